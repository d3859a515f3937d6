"""DDP's gradient buckets: how much all-reduce time stays exposed, and which buckets leave least. Start at :func:`plan_ddp`.

DistributedDataParallel closes a bucket once it holds at least its cap, in the order in which gradients became ready in
the first step, and all-reduces the buckets one after another, each when its last gradient is ready. With ``t_j`` when
gradient j is ready, a bucket of gradients i+1 to j ends at ``max(end of the bucket before, t_j) + cost(bytes)``; what
lies after the end of backward is exposed. The best cut of p gradients in ready order follows by dynamic programming.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.communication.program import Program, Ring

MIB = 2**20
DEFAULT_CAP_MIB = 25.0
# torch.distributed._DEFAULT_FIRST_BUCKET_BYTES: only the default configuration begins with a small bucket.
DEFAULT_FIRST_BYTES = 2**20
_MOST_SUMS, _MOST_CAPS = 400, 300
# More buckets are only worth it from this share of the step on: what a launch costs is not in the ring's formula.
_WORTH = 0.001
CAPS_MIB = (1, 2, 4, 8, 10, 16, 25, 32, 50, 64, 100, 128, 200, 256, 400, 512, 800, 1024, 2048, 4096)


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketPlan:
    """Buckets in the order in which they are reduced, and what they cost."""

    name: str
    bucket_cap_mb: float | None
    """What to pass to DistributedDataParallel; None: pass the list if there is one, else nothing (the default)."""
    bucket_cap_mb_list: tuple[float, ...] | None
    buckets: tuple[tuple[str, ...], ...]
    """Parameter names, in ready order."""
    step_s: float
    exposed_s: float
    """Communication after the end of backward, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpPlan:
    """Today's default, the best single cap, and the best buckets."""

    default: BucketPlan
    best_cap: BucketPlan
    best: BucketPlan
    lower_s: float
    """No buckets at all can be faster: backward first, then at least the last gradient; or all bytes on the wire."""


def plan_ddp(program: Program, ring: Ring) -> DdpPlan:
    """Return the default buckets of DDP, the best ``bucket_cap_mb``, and the best buckets of any size. O(p^2).

    Caps tried: the usual sizes, and those at which the buckets change (all of them for small models, else spread evenly
    over them); of those within 0.1 % of the best, the one with the fewest buckets. The order of buckets is that of one
    dtype: torch buckets each dtype separately.
    """
    default = _evaluate(program, ring, "default", assign_buckets(program, DEFAULT_CAP_MIB, DEFAULT_FIRST_BYTES))
    total = float(program.size_bytes.sum()) / MIB
    caps = [*sorted({float(cap) for cap in CAPS_MIB if cap < total} | {float(np.ceil(total))}), *_breakpoints(program)]
    tried = [_evaluate(program, ring, "cap", assign_buckets(program, cap), cap=cap) for cap in caps]
    fastest = min(plan.step_s for plan in tried)
    as_good = [plan for plan in tried if plan.step_s <= fastest * (1 + _WORTH)]
    best_cap = min(as_good, key=lambda plan: (len(plan.buckets), plan.step_s))
    if default.step_s <= best_cap.step_s:
        best_cap = replace(default, name="cap")
    cuts = best_cuts(program, ring)
    best = _evaluate(program, ring, "buckets", cuts, cap_list=_caps_for(program, cuts))
    if best_cap.step_s <= best.step_s:
        best = replace(best_cap, name="buckets")
    whole = ring.all_reduce_s(float(program.size_bytes.sum()))
    last = ring.all_reduce_s(float(program.size_bytes[-1]))
    first = float(program.ready_s[0])
    return DdpPlan(
        default=default,
        best_cap=best_cap,
        best=best,
        lower_s=max(program.compute_s, float(program.ready_s[-1]) + last, first + whole),
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


def finish_s(program: Program, ring: Ring, cuts: Sequence[int]) -> float:
    """Return when the last bucket is reduced, seconds from the step's start."""
    now, first = 0.0, 0
    for cut in cuts:
        now = max(now, float(program.ready_s[cut - 1])) + ring.all_reduce_s(float(program.size_bytes[first:cut].sum()))
        first = cut
    return now


def best_cuts(program: Program, ring: Ring) -> list[int]:
    """Return the cut of the gradients, in ready order, whose last bucket is reduced first. O(p^2) vectorised."""
    count = len(program.parameters)
    held = np.concatenate([np.zeros(1), np.cumsum(program.size_bytes)])
    fixed = ring.all_reduce_s(0.0)
    per_byte = (ring.all_reduce_s(1e9) - fixed) / 1e9
    ends = np.zeros(count + 1)
    previous: NDArray[np.intp] = np.zeros(count + 1, dtype=np.intp)
    for place in range(1, count + 1):
        starts = np.maximum(ends[:place], program.ready_s[place - 1])
        values = starts + fixed + per_byte * (held[place] - held[:place])
        previous[place] = int(values.argmin())
        ends[place] = values[previous[place]]
    cuts: list[int] = []
    place = count
    while place:
        cuts.append(place)
        place = int(previous[place])
    return cuts[::-1]


def _caps_for(program: Program, cuts: Sequence[int]) -> tuple[float, ...]:
    """Return the caps in MiB that make the reducer form exactly these buckets: each its own size in bytes.

    Exact for parameters of one dtype that hold something, in the order in which their gradients become ready.
    """
    bounds = [0, *cuts]
    return tuple(float(program.size_bytes[low:high].sum()) / MIB for low, high in itertools.pairwise(bounds))


def _evaluate(
    program: Program,
    ring: Ring,
    name: str,
    cuts: Sequence[int],
    *,
    cap: float | None = None,
    cap_list: tuple[float, ...] | None = None,
) -> BucketPlan:
    bounds = [0, *cuts]
    step = max(program.compute_s, finish_s(program, ring, cuts))
    return BucketPlan(
        name=name,
        bucket_cap_mb=cap,
        bucket_cap_mb_list=cap_list,
        buckets=tuple(program.parameters[low:high] for low, high in itertools.pairwise(bounds) if high > low),
        step_s=step,
        exposed_s=step - program.compute_s,
    )
