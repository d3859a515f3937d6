"""The hook inside other people's trainers: transformers' ``Trainer`` and Lightning. Start at :class:`HookedTrainerMixin`.

Each is loaded, and the package that it is for, when it is first asked for. Accelerate needs nothing from here.
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
    """Import the integration that holds ``name``, and the trainer's package with it, when the name is first asked for.

    Raises MissingExtra where that package is not installed, and InputError for a torchvision that does not fit this torch.
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
    """Return torchvision's own message among the causes of an import's error; None where none of them is torchvision's."""
    while error is not None:
        if "torchvision::" in str(error) or getattr(error, "name", None) == "torchvision":
            return str(error)
        error = error.__cause__ or error.__context__
    return None
