"""What runs inside training processes. Start at :func:`attach`, the hook that makes a job follow its plan.

``attach`` and ``Hook`` are loaded, and torch with them, when they are first asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddltool.runtime.hook import Hook, attach

__all__ = ["Hook", "attach"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ddltool.runtime import hook

    return getattr(hook, name)
