"""What data-parallel frameworks leave exposed on one traced step, and what to set: DDP here, FSDP2 in :mod:`.fsdp`.

DistributedDataParallel closes a bucket once it holds at least its cap, in the order in which gradients became ready in
the first step, and all-reduces the buckets one after another, each when its last gradient is ready. With ``t_j`` when
gradient j is ready, a bucket of gradients i+1 to j ends at ``max(end of the bucket before, t_j) + cost(bytes)``; what
lies after the end of backward is exposed. The best cut of p gradients in ready order follows by dynamic programming.
Start at :func:`plan_collectives`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.communication.fsdp import plan_fsdp, prefetch_setting
from ddltool.analyzers.communication.program import (
    CLEAR_GAIN,
    SMALL_GAIN,
    Program,
    program_of,
    share_saved,
)
from ddltool.analyzers.costs.nccl import Communicator, Group
from ddltool.graph import SEND, Graph
from ddltool.graph_results import BucketFigures, CollectiveFigures, DdpFigures
from ddltool.plans import BucketSetting, PrefetchSetting
from ddltool.units import show_seconds

MIB = 2**20
DEFAULT_CAP_MIB = 25.0
# torch.distributed._DEFAULT_FIRST_BUCKET_BYTES: only the default configuration begins with a small bucket.
DEFAULT_FIRST_BYTES = 2**20
_MOST_SUMS, _MOST_CAPS = 400, 300
# More buckets are only worth it from this share of the step on: what a launch costs is not in the ring's formula.
_WORTH = 0.001
# A simpler setting within this share of the best one's step is preferred.
_AS_GOOD = 0.002
CAPS_MIB = (1, 2, 4, 8, 10, 16, 25, 32, 50, 64, 100, 128, 200, 256, 400, 512, 800, 1024, 2048, 4096)


def plan_collectives(graph: Graph, group: Group) -> CollectiveFigures | None:
    """Return the plans of a timed training graph, None for inference: there is no gradient to reduce."""
    if graph.mode != "training" or not len(graph.of_kind(SEND)):
        return None
    program = program_of(graph)
    return CollectiveFigures(
        replicas=group.replicas,
        network=group.fabric.text,
        compute_s=program.compute_s,
        ddp=plan_ddp(program, group),
        fsdp2=plan_fsdp(program, group),
    )


def settings(plans: CollectiveFigures) -> tuple[BucketSetting, PrefetchSetting | None]:
    """Return what a plan keeps of them: DDP's buckets and FSDP2's prefetch lists."""
    return bucket_setting(plans.ddp), None if plans.fsdp2 is None else prefetch_setting(plans.fsdp2)


def plan_ddp(program: Program, group: Communicator) -> DdpFigures:
    """Return the default buckets of DDP, the best ``bucket_cap_mb``, and the best buckets of any size. O(p^2).

    Caps tried: the usual sizes, and those at which the buckets change (all of them for small models, else spread evenly
    over them); of those within 0.1 % of the best, the one with the fewest buckets. The order of buckets is that of one
    dtype: torch buckets each dtype separately. No buckets at all can be faster than the bound: backward first, then at
    least the last gradient; or all bytes on the wire.
    """
    default = _figures(program, group, default_cuts(program))
    total = float(program.size_bytes.sum()) / MIB
    caps = [*sorted({float(cap) for cap in CAPS_MIB if cap < total} | {float(np.ceil(total))}), *_breakpoints(program)]
    tried = [_figures(program, group, assign_buckets(program, cap), cap=cap) for cap in caps]
    fastest = min(plan.step_s for plan in tried)
    as_good = [plan for plan in tried if plan.step_s <= fastest * (1 + _WORTH)]
    best_cap = min(as_good, key=lambda plan: (plan.buckets, plan.step_s))
    if default.step_s <= best_cap.step_s:
        best_cap = default
    cuts = best_cuts(program, group)
    best = _figures(program, group, cuts, cap_list=_caps_for(program, cuts))
    if best_cap.step_s <= best.step_s:
        best = best_cap
    whole = group.all_reduce_s(float(program.size_bytes.sum()))
    last = group.all_reduce_s(float(program.size_bytes[-1]))
    return DdpFigures(
        default=default,
        best_cap=best_cap,
        best=best,
        lower_bound_s=max(program.compute_s, float(program.ready_s[-1]) + last, float(program.ready_s[0]) + whole),
        verdict=_verdict(program, default, best_cap, best),
    )


def _breakpoints(program: Program) -> list[float]:
    """Return caps in MiB at which the buckets change: sums of neighbouring gradients, at most ``_MOST_CAPS`` of them."""
    held = np.concatenate([np.zeros(1), np.cumsum(program.size_bytes)])
    ends = np.arange(len(held))
    if len(held) > _MOST_SUMS:
        ends = np.unique(np.linspace(0, len(held) - 1, _MOST_SUMS).astype(np.int64))
    sums = np.unique((held[ends][:, None] - held[ends][None, :])[np.tril_indices(len(ends), -1)])
    if len(sums) > _MOST_CAPS:
        sums = sums[np.linspace(0, len(sums) - 1, _MOST_CAPS).astype(np.int64)]
    return [float(value) for value in sums / MIB]


def default_cuts(program: Program) -> list[int]:
    """Return where DDP's own buckets end."""
    return assign_buckets(program, DEFAULT_CAP_MIB, DEFAULT_FIRST_BYTES)


def assign_buckets(program: Program, cap_mib: float, first_bytes: float | None = None) -> list[int]:
    """Return where buckets end (exclusive places in ready order) under a cap in MiB, as DDP's reducer forms them.

    ``first_bytes`` limits the first bucket; None: the cap does.
    """
    limit = cap_mib * MIB if first_bytes is None else first_bytes
    cuts: list[int] = []
    held = 0.0
    for place, size in enumerate(program.size_bytes.tolist()):
        held += size
        if held >= limit:
            cuts.append(place + 1)
            held, limit = 0.0, cap_mib * MIB
    if not cuts or cuts[-1] < len(program.parameters):
        cuts.append(len(program.parameters))
    return cuts


def finish_s(program: Program, group: Communicator, cuts: Sequence[int]) -> float:
    """Return when the last bucket is reduced, seconds from the step's start."""
    held = np.concatenate([np.zeros(1), np.cumsum(program.size_bytes)])
    ends = np.array([0, *cuts])
    seconds = group.all_reduce_s(held[ends[1:]] - held[ends[:-1]])
    now = 0.0
    for ready, took in zip(program.ready_s[ends[1:] - 1].tolist(), seconds.tolist(), strict=True):
        now = max(now, ready) + took
    return now


def best_cuts(program: Program, group: Communicator) -> list[int]:
    """Return the cut of the gradients, in ready order, whose last bucket is reduced first. O(p^2) vectorised."""
    count = len(program.parameters)
    held = np.concatenate([np.zeros(1), np.cumsum(program.size_bytes)])
    ends = np.zeros(count + 1)
    previous: NDArray[np.intp] = np.zeros(count + 1, dtype=np.intp)
    for place in range(1, count + 1):
        starts = np.maximum(ends[:place], program.ready_s[place - 1])
        values = starts + group.all_reduce_s(held[place] - held[:place])
        previous[place] = int(values.argmin())
        ends[place] = values[previous[place]]
    cuts: list[int] = []
    place = count
    while place:
        cuts.append(place)
        place = int(previous[place])
    return cuts[::-1]


def _caps_for(program: Program, cuts: Sequence[int]) -> list[float]:
    """Return the caps in MiB that make the reducer form exactly these buckets: each its own size in bytes.

    Exact for parameters of one dtype that hold something, in the order in which their gradients become ready.
    """
    bounds = [0, *cuts]
    return [float(program.size_bytes[low:high].sum()) / MIB for low, high in itertools.pairwise(bounds)]


def _figures(
    program: Program,
    group: Communicator,
    cuts: Sequence[int],
    *,
    cap: float | None = None,
    cap_list: list[float] | None = None,
) -> BucketFigures:
    bounds = [0, *cuts]
    step = max(program.compute_s, finish_s(program, group, cuts))
    buckets = [list(program.parameters[low:high]) for low, high in itertools.pairwise(bounds) if high > low]
    return BucketFigures(
        bucket_cap_mb=cap,
        bucket_cap_mb_list=cap_list,
        buckets=len(buckets),
        step_s=step,
        exposed_s=step - program.compute_s,
        bucket_parameters=buckets,
    )


def bucket_setting(ddp: DdpFigures) -> BucketSetting:
    """Return DDP's buckets for a plan: the simplest of default, single cap and list that is as good as the best."""
    chosen = ddp.best_cap if ddp.best_cap.step_s <= ddp.best.step_s * (1 + _AS_GOOD) else ddp.best
    chosen = ddp.default if ddp.default.step_s <= chosen.step_s * (1 + _AS_GOOD) else chosen
    return BucketSetting(
        bucket_cap_mb=chosen.bucket_cap_mb,
        bucket_cap_mb_list=chosen.bucket_cap_mb_list,
        buckets=chosen.bucket_parameters or [],
        step_s=chosen.step_s,
        default_step_s=ddp.default.step_s,
    )


def _verdict(program: Program, default: BucketFigures, best_cap: BucketFigures, best: BucketFigures) -> str:
    """Return in words what DDP's buckets can gain and what to set."""
    gain, by_cap = share_saved(best.step_s, default.step_s), share_saved(best_cap.step_s, default.step_s)
    text = f"DDP's default leaves {show_seconds(default.exposed_s)} of communication exposed; "
    if gain < SMALL_GAIN:
        text += f"no other buckets save {SMALL_GAIN:.0%} of the step: leave bucket_cap_mb alone."
    elif by_cap >= 0.9 * gain and best_cap.bucket_cap_mb is not None:
        text += f"set bucket_cap_mb={best_cap.bucket_cap_mb:g}: {by_cap:.1%} of the step saved."
    else:
        alone = f"bucket_cap_mb={best_cap.bucket_cap_mb:g} alone" if best_cap.bucket_cap_mb else "no cap alone"
        worth = "worth it" if gain >= CLEAR_GAIN else "a small gain"
        text += f"{best.buckets} buckets by bucket_cap_mb_list save {gain:.1%} ({alone}: {by_cap:.1%}): {worth}."
    return text + program.starved(default.exposed_s)
