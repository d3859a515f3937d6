"""The hook inside trainers of other libraries: transformers' ``Trainer`` and Lightning. Start at :class:`HookedTrainerMixin`.

Each integration, and with it the trainer's library, is imported when it is first used. Accelerate needs no integration.
"""

from typing import TYPE_CHECKING, Any

from ddltool.errors import InputError, MissingExtra

if TYPE_CHECKING:
    from ddltool.runtime.integrations.lightning_callback import HookCallback
    from ddltool.runtime.integrations.transformers_trainer import HookedTrainerMixin, TelemetryCallback

_HOMES = {
    "HookCallback": "lightning_callback",
    "HookedTrainerMixin": "transformers_trainer",
    "TelemetryCallback": "transformers_trainer",
}
__all__ = ["HookCallback", "HookedTrainerMixin", "TelemetryCallback"]


def __getattr__(name: str) -> Any:
    """Import the integration that holds ``name``, and with it the trainer's library, when the name is first used.

    From then on, an uncaught error of ddltool ends the process with one line. Raises MissingExtra if the library is not
    installed, and InputError for a torchvision that does not fit this torch.
    """
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from ddltool.analyzers.step.recording.vision import declare_torchvision
    from ddltool.runtime.processes.stopping import refuse_in_one_line

    refuse_in_one_line()
    declare_torchvision()  # transformers imports it
    try:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except (ImportError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name in ("transformers", "accelerate", "lightning"):
            raise MissingExtra(f"integrations.{name}", error.name, "integrations") from None
        if (reason := _torchvision_reason(error)) is not None:
            problem = f"cannot be imported beside this torch, for which it was not built ({reason})"
            remedy = "install both from one index, or pip uninstall torchvision"
            raise InputError("torchvision", problem, remedy) from error
        raise


def _torchvision_reason(error: BaseException | None) -> str | None:
    """Return the text of the first error of torchvision's in the chain of causes of ``error``; None if there is none."""
    while error is not None:
        if "torchvision::" in str(error) or getattr(error, "name", None) == "torchvision":
            return str(error)
        error = error.__cause__ or error.__context__
    return None
