"""The hook inside other people's trainers: transformers' ``Trainer`` and Lightning. Start at :class:`HookedTrainerMixin`.

Each is loaded, and the package that it is for, when it is first asked for. Accelerate needs nothing from here.
"""

from typing import TYPE_CHECKING, Any

from ddltool.errors import MissingExtra

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
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from ddltool.analyzers.step.tracing.factories import declare_torchvision

    declare_torchvision()  # transformers imports it
    try:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("transformers", "accelerate", "lightning"):
            raise
        raise MissingExtra(f"integrations.{name}", error.name, "integrations") from None
