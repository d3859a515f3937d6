"""What ``ddltool simulate`` was asked for, and which of its options have a part in that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddltool.commands.parts import demand_part, is_given
from ddltool.commands.simulate_policies import POLICIES

if TYPE_CHECKING:
    import typer

OPTIONS = {
    "interval": "--interval",
    "restart delay": "--restart-delay",
    "interference": "--interference",
    "power": "--power",
    "mtbf": "--mtbf",
    "repair": "--repair",
    "checkpoint interval": "--checkpoint-interval",
}
"""What the library calls these options in its errors."""
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
    _check_mode(context)
    _check_partners(context)


def _check_partners(context: typer.Context) -> None:
    """Raise InputError for an option that is read with another one only, which is not there."""
    from ddltool.errors import InputError

    drawn, fails = is_given(context, "mtbf"), is_given(context, "failures")
    for name in ("repair", "failure_seed"):
        if is_given(context, name) and not drawn:
            remedy = "events say themselves when a node is back" if fails else "say how often nodes fail"
            raise InputError(f"--{name.replace('_', '-')}", "needs --mtbf", remedy)
    if is_given(context, "checkpoint_interval") and not (drawn or fails):
        raise InputError("--checkpoint-interval", "needs --mtbf or --failures", "say how often nodes fail")
    if is_given(context, "seeds") and is_given(context, "seed"):
        last = context.params["seeds"] - 1
        raise InputError(
            "--seed", f"has no part beside --seeds, which takes the seeds 0 to {last}", "give one of the two"
        )
    names = {name.strip() for name in context.params["policy"].split(",")}
    if is_given(context, "power") and names <= {*POLICIES} - {"pollux"}:
        problem = f"has no part in --policy {context.params['policy']}"
        raise InputError("--power", problem, "leave it out, or replay pollux, which alone reads it")


def _check_mode(context: typer.Context) -> None:
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
