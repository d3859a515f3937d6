"""What the goodput agent knows and how it decides: measured times, the fit, and the next batch. Start at :func:`decide`.

No processes and no tensors here, so that a decision can be repeated from a checkpoint's numbers.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddltool.analyzers.goodput.elastic_table import Split, find_split
from ddltool.analyzers.goodput.fit import fit
from ddltool.analyzers.goodput.observations import Observations
from ddltool.analyzers.goodput.throughput import ThroughputParams, goodput_per_s
from ddltool.analyzers.goodput.tuning import BatchLimits, tune_one
from ddltool.errors import Infeasible, InputError

TIMES_KEPT = 64
"""Latest times per allocation and local batch; what is fitted is their median."""
FULL_STEP, PASS = 0, 1
Key = tuple[int, int, int, int]


class StepTimes:
    """Measured times by (nodes, replicas, local batch, kind): full steps' synchronising part, and passes without it."""

    def __init__(self) -> None:
        self._times: defaultdict[Key, deque[float]] = defaultdict(lambda: deque(maxlen=TIMES_KEPT))

    def add(self, nodes: int, replicas: int, local_batch: int, kind: int, seconds: float) -> None:
        """Take a time: of the last pass of a step with reduction and update (FULL_STEP), or of a pass alone (PASS).

        Times that are not finite and above 0 are left out.
        """
        if math.isfinite(seconds) and seconds > 0:
            self._times[nodes, replicas, local_batch, kind].append(seconds)

    def __len__(self) -> int:
        """Return the number of configurations with a full step."""
        return sum(1 for key in self._times if key[3] == FULL_STEP)

    def largest_local_batch(self) -> int:
        """Return the largest local batch with a time, 0 without any."""
        return max((key[2] for key in self._times), default=0)

    def observations(self) -> Observations:
        """Return one row per configuration with a full step, arrays of shape (n,), medians in seconds."""
        rows = []
        for (nodes, replicas, batch, kind), times in sorted(self._times.items()):
            if kind == FULL_STEP:
                alone = self._times.get((nodes, replicas, batch, PASS))
                rows.append((nodes, replicas, batch, np.median(times), np.median(alone) if alone else math.nan))
        table = np.array(rows, dtype=np.float64).reshape(-1, 5)
        return Observations(
            num_nodes=table[:, 0],
            num_replicas=table[:, 1],
            local_batch_size=table[:, 2],
            step_time_s=table[:, 3],
            grad_time_s=table[:, 4],
        )

    def copy(self) -> StepTimes:
        """Return a copy that another thread may read."""
        made = StepTimes()
        for key, times in self._times.items():
            made._times[key] = times.copy()
        return made

    def rows(self) -> list[list[float]]:
        """Return all times kept, as (nodes, replicas, local batch, kind, seconds), oldest first per configuration."""
        return [[*map(float, key), seconds] for key, times in sorted(self._times.items()) for seconds in times]

    def load_rows(self, rows: Iterable[Sequence[float]]) -> None:
        """Forget everything and take what :meth:`rows` returned. Raises InputError for a row that is none."""
        self._times.clear()
        for number, row in enumerate(rows):
            if len(row) != 5 or not all(math.isfinite(value) for value in row):
                raise InputError(f"observations:row {number}", f"is {list(row)}", "give what state_dict returned")
            self.add(int(row[0]), int(row[1]), int(row[2]), int(row[3]), float(row[4]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """How to share out steps from now on, and what was expected of it."""

    split: Split
    goodput_per_s: float
    present_goodput_per_s: float
    params: ThroughputParams


def decide(
    times: StepTimes,
    nodes: int,
    present: Split,
    limits: BatchLimits,
    *,
    noise_scale: float | None,
    largest_tried: int,
    min_gain: float,
) -> Decision | None:
    """Return the batch of highest goodput on the present ranks; None to stay with the present one.

    Fits the throughput model to all times (Pollux, section 4.1) and maximises goodput over local batch and accumulation
    (Equation 13). While exploring, neither the total nor the local batch may be more than twice the largest tried: what
    the model says beyond is extrapolation (Pollux's rule for replicas, applied to batches). A change must promise
    ``min_gain`` (a share) more goodput. ``noise_scale`` in samples; None: unknown, so stay.

    Raises what the fit and the search raise.
    """
    if noise_scale is None or not len(times):
        return None
    params = fit(times.observations()).params
    replicas = present.world_size
    allowed = explored(limits, replicas, largest_tried, times.largest_local_batch())
    local = -(-present.total_batch_size // (replicas * (present.accumulation_steps + 1)))
    now = float(
        goodput_per_s(
            params,
            nodes,
            replicas,
            local,
            present.accumulation_steps,
            noise_scale=noise_scale,
            initial_batch_size=limits.initial_batch_size,
        )
    )
    try:
        best = tune_one(params, nodes, replicas, allowed, noise_scale=noise_scale)
    except Infeasible:
        return None
    # ranks may differ by a sample, so a total that equal batches only reach beyond the limit is cut back to it
    total = min(best.total_batch_size, allowed.max_batch_size)
    chosen = Split(world_size=replicas, total_batch_size=total, accumulation_steps=best.accumulation_steps)
    better = best.goodput_per_s > now * (1 + min_gain)
    return Decision(
        split=chosen if better else present,
        goodput_per_s=best.goodput_per_s,
        present_goodput_per_s=now,
        params=params,
    )


def explored(limits: BatchLimits, replicas: int, largest_tried: int, largest_local: int) -> BatchLimits:
    """Return the limits cut to twice the largest total and local batch that were tried."""
    total = min(limits.max_batch_size, max(2 * largest_tried, limits.initial_batch_size, replicas))
    local = min(limits.max_local_batch_size, max(2 * largest_local, limits.min_local_batch_size))
    return replace(limits, max_batch_size=total, max_local_batch_size=local)


def split_near(total: int, replicas: int, limits: BatchLimits) -> Split:
    """Return the split of ``total`` samples over the ranks, or of the nearest total that can be split within the limits.

    With equal distance the smaller. Raises Infeasible when there is none at all.
    """
    low, high = limits.initial_batch_size, limits.max_batch_size
    total = min(max(total, low), high)
    for away in range(max(total - low, high - total) + 1):
        for candidate in (total - away, total + away):
            if low <= candidate <= high:
                split, _ = find_split(candidate, replicas, limits)
                if split is not None:
                    return split
    raise Infeasible(
        f"no total batch from {low} to {high} can be shared by {replicas} ranks in local batches of "
        f"{limits.min_local_batch_size} to {limits.max_local_batch_size}"
    )
