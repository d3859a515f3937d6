"""Which options have a part in what a command was asked to do, for commands with several modes.

An option that has none is refused, even with its default value: who gives it expects something of it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether the command line (or an environment variable) gives this parameter."""
    source = context.get_parameter_source(name)
    return source is not None and not source.name.startswith("DEFAULT")


def demand_part(context: typer.Context, mode: str, allowed: Collection[str], *, instead: str = "leave it out") -> None:
    """Raise InputError for the first option or argument on the command line that has no part in ``mode``.

    ``allowed``: names of the command's parameters, as in its signature. ``instead``: what would be right.
    """
    from ddltool.errors import InputError

    for parameter in context.command.params:
        name = parameter.name or ""
        if name in allowed or not is_given(context, name):
            continue
        shown = (
            parameter.opts[-1]
            if parameter.param_type_name == "option"
            else getattr(parameter, "metavar", None) or name.upper()
        )
        raise InputError(shown, f"has no part in {mode}", instead)
