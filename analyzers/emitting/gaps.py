"""What a plan says and a target has no words for: listed beside every output, so that nothing is lost in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ddltool.analyzers.emitting.layout import Layout
from ddltool.plan import Plan

Target = Literal["hook", "torchrun", "kubernetes", "slurm", "fsdp2", "ddp"]
TARGETS: tuple[Target, ...] = ("hook", "torchrun", "kubernetes", "slurm", "fsdp2", "ddp")

_HOOK = "emit --target hook and ddltool.runtime.attach do it"
# What, whether a plan has it, who expresses it, and where to go with the others. The order is that of the output.
_CONTENTS: tuple[tuple[str, Callable[[Plan], bool], frozenset[Target], str], ...] = (
    (
        "local batch sizes",
        # Of one sample each, whatever script runs makes the only step there is.
        lambda plan: any(row.local_batch_size != 1 for row in plan.assignments),
        frozenset({"hook", "kubernetes", "ddp", "fsdp2"}),
        _HOOK,
    ),
    (
        "weights of uneven gradients",
        lambda plan: len({row.local_batch_size for row in plan.assignments}) > 1,
        frozenset({"hook", "kubernetes"}),
        _HOOK,
    ),
    (
        "order of parameters",
        lambda plan: any(p.priority is not None for p in plan.parameters),
        frozenset({"hook", "kubernetes"}),
        _HOOK,
    ),
    (
        "DDP buckets",
        lambda plan: plan.ddp is not None,
        frozenset({"hook", "kubernetes", "ddp"}),
        "emit --target ddp",
    ),
    (
        "FSDP2 units and prefetch",
        lambda plan: plan.fsdp2 is not None,
        frozenset({"hook", "kubernetes", "fsdp2"}),
        "emit --target fsdp2",
    ),
    (
        "accumulation steps",
        lambda plan: plan.goodput is not None and plan.goodput.accumulation_steps > 0,
        frozenset({"ddp", "fsdp2"}),
        "accumulate in the script: the local batch size holds all passes",
    ),
    (
        "logical workers",
        lambda plan: any(row.ests_per_device > 1 for row in plan.assignments),
        frozenset(),
        "they run as one larger batch per device; ddltool.runtime.elastic keeps their bits",
    ),
    (
        "device types",
        lambda plan: len({row.device_type for row in plan.assignments}) > 1,
        frozenset({"hook", "kubernetes", "slurm", "torchrun"}),
        "start the processes in the order of LOCAL_BATCH_SIZES; --target torchrun, kubernetes and slurm do it",
    ),
)


def not_expressed(plan: Plan, target: Target, layout: Layout | None = None) -> list[str]:
    """Return what the target leaves out of a plan or has to assume, each as ``WHAT: what to do about it``."""
    found = [f"{what}: {remedy}" for what, has, who, remedy in _CONTENTS if has(plan) and target not in who]
    if layout is not None and layout.assumed:
        found.append(
            "nodes: the plan does not say how many devices a node has; one node per device type is assumed (--devices-per-node)"
        )
    return found
