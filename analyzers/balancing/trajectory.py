"""Algorithm 2 on simulated GPU workers: batch sizes and times, iteration by iteration. Start at :func:`simulate`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddltool.analyzers.balancing.algorithm2 import Algorithm2, Phase, Settings
from ddltool.analyzers.balancing.curves import DeviceCurves
from ddltool.errors import InputError

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trajectory:
    """K simulated iterations of n workers."""

    sizes: Counts
    """(K, n) samples that each worker processed."""
    seconds: Floats
    """(K, n) batch processing times."""
    fine_at: int | None
    """The iteration after which fine tuning began."""
    removals: tuple[tuple[int, int], ...]
    """(iteration, worker) of each advice to remove a straggler."""

    def spread(self, begin: int, end: int) -> float:
        """Return (longest - shortest) / longest of the workers' mean times over iterations [begin, end)."""
        mean = self.seconds[begin:end].mean(axis=0)
        return float(1 - mean.min() / mean.max())


def simulate(
    curves: DeviceCurves,
    start: Sequence[int],
    iterations: int,
    *,
    settings: Settings | None = None,
    factors: ArrayLike | None = None,
    changes: Mapping[int, DeviceCurves] | None = None,
    delay: int = 0,
) -> Trajectory:
    """Return what Algorithm 2 does to workers with known curves.

    Args:
        curves: seconds over samples of n workers.
        start: (n,) samples at the start.
        iterations: K, at least 1.
        settings: Algorithm 2's.
        factors: (K, n) by which times are longer; None: the curves' own times.
        changes: iteration -> the curves from then on.
        delay: iterations by which a decision comes into force later than the next one, as when it is made in the background.

    Memory use is the batch over the curve's limit, and nobody gets a batch above it.
    """
    if iterations < 1 or delay < 0:
        raise InputError("simulation", f"of {iterations} iterations, delay {delay}", "give 1 or more, and 0 or more")
    algorithm = Algorithm2(start, curves.limits.tolist(), settings)
    noise = np.ones((iterations, len(start))) if factors is None else np.asarray(factors, dtype=np.float64)
    pending: deque[Counts] = deque([algorithm.sizes.copy()] * delay)
    sizes, seconds = np.empty((iterations, len(start)), dtype=np.int64), np.empty((iterations, len(start)))
    current, fine_at, removals = algorithm.sizes.copy(), None, []
    for k in range(iterations):
        curves = (changes or {}).get(k, curves)
        sizes[k], seconds[k] = current, curves.seconds(current) * noise[k]
        decision = algorithm.observe(seconds[k], current / curves.memory_limit, current)
        if decision.phase is Phase.FINE and fine_at is None:
            fine_at = k
        if decision.remove:
            removals.append((k, decision.straggler))
        pending.append(np.array(decision.sizes))
        current = pending.popleft()
    return Trajectory(sizes=sizes, seconds=seconds, fine_at=fine_at, removals=tuple(removals))


def slower_network(curves: DeviceCurves, worker: int, factor: float) -> DeviceCurves:
    """Return the curves with one worker's communication ``factor`` times as long."""
    communication = np.array(curves.communication_s, dtype=np.float64)
    communication[worker] *= factor
    return replace(curves, communication_s=communication)
