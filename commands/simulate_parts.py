"""What ``ddltool simulate`` was asked for, and which of its options have a part in that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddltool.commands.parts import demand_part, is_given

if TYPE_CHECKING:
    import typer

_ALWAYS = {"output", "as_json", "seed"}
_REPLAY = _ALWAYS | {
    "workloads",
    "cluster",
    "traces",
    "policy",
    "interval",
    "restart_delay",
    "interference",
    "power",
    "react",
    "whole_seconds",
    "mtbf",
    "repair",
    "checkpoint_interval",
    "failures",
    "failure_seed",
    "goodput",
    "price",
}
_SWEEP = {"seeds", "jobs", "engine", "csv", "compare"}
_MODES = {
    "advise": ("--advise", _ALWAYS | {"advise"}),
    "autoscale": ("--autoscale", _ALWAYS | {"autoscale", "traces", "restart_delay"}),
    "search": (
        "--hyperparameter-search",
        _ALWAYS | {"search", "traces", "cluster", "policy", "power", "interval", "restart_delay", "local_batch"},
    ),
    "generate": ("--generate", _ALWAYS | {"generate", "traces", "cluster"}),
    "convert": ("--convert", _ALWAYS | {"convert", "workloads", "traces", "cluster", "sample"}),
}
"""By the parameter that asks for it: how the mode is called, and the parameters that it reads."""


def is_sweep(context: typer.Context) -> bool:
    """Return whether several replays are asked for."""
    return len(context.params["workloads"] or ()) > 1 or any(is_given(context, name) for name in _SWEEP)


def check_parts(context: typer.Context) -> None:
    """Raise InputError for the first option on the command line that what was asked for does not read."""
    for name, (mode, allowed) in _MODES.items():
        if is_given(context, name):
            demand_part(context, mode, allowed)
            return
    if is_sweep(context):
        remedy = "leave it out, or replay one workload with one seed"
        demand_part(context, "a sweep", _REPLAY | _SWEEP, instead=remedy)
        return
    pictures = {"picture_job", "picture_format"}
    demand_part(context, "a replay", _REPLAY | {"metrics", "sample", "picture"} | pictures)
    if not is_given(context, "picture"):
        demand_part(context, "a replay without --picture", [name for name in context.params if name not in pictures])
