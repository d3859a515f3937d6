"""Which of two policies is better, and how sure that is: paired differences over workloads and seeds.

Every workload is replayed under both policies, so what makes one workload harder than another cancels. Ratios are
compared, in their logarithm: a policy that halves and one that doubles a figure are then equally far from equality, and
long workloads do not outweigh short ones. The interval is Student's t on the mean log ratio. A bootstrap was not
taken: with the handful of workloads that one has, its intervals are too narrow (their ends cannot lie outside what was
drawn; for n = 4 the standard error alone is too small by ``sqrt(3/4)``). Seeds of one workload are no independent
evidence of what happens on others: they are averaged first, so that n is the number of workloads; with one workload n
is its seeds, and the answer speaks of that workload alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from ddltool.errors import InputError
from ddltool.simulation_results import ComparedMeasure, PolicyComparison, SweepCell, SweepFigures

Floats = NDArray[np.float64]
MEASURES = ("avg_jct_s", "p99_jct_s", "worst_fairness", "makespan_s", "gpu_seconds", "cost")
"""What is compared, the cost where every replay has one above 0; less is better for all of them."""


def compare(cells: Sequence[SweepCell], first: str, second: str, *, confidence: float = 0.95) -> PolicyComparison:
    """Return the first policy's figures over the second's, over what both have replayed.

    Replays that only one policy has (a failed cell) are left out in pairs. Raises InputError without any pair, for a
    policy compared with itself and figures that are not above 0.
    """
    if first == second:
        raise InputError("--compare", f"names {first!r} twice", "name two policies, such as ours,pollux")
    if not 0 < confidence < 1:
        raise InputError("confidence", f"is {confidence}", "between 0 and 1, such as 0.95")
    found = {
        name: {(cell.workload, cell.seed): cell.figures for cell in cells if cell.policy == name and cell.figures}
        for name in (first, second)
    }
    shared = [(key, one, found[second][key]) for key, one in found[first].items() if key in found[second]]
    if not shared:
        raise InputError("--compare", f"{first} and {second} have no workload and seed in common", "replay both on one")
    several = len({workload for (workload, _), *_ in shared}) > 1
    priced = all((figures.cost or 0) > 0 for _, *both in shared for figures in both)
    made = []
    for measure in MEASURES if priced else MEASURES[:-1]:
        units: dict[object, list[float]] = {}
        for (workload, seed), one, other in shared:
            ratio = _log(one, measure, workload, seed) - _log(other, measure, workload, seed)
            units.setdefault(workload if several else seed, []).append(ratio)
        made.append(_interval(measure, np.array([np.mean(each) for each in units.values()]), confidence))
    unit: Literal["workload", "seed"] = "workload" if several else "seed"
    return PolicyComparison(first=first, second=second, unit=unit, confidence=confidence, comparisons=made)


def _log(figures: SweepFigures, measure: str, workload: str, seed: int) -> float:
    value = getattr(figures, measure)
    if not value > 0:
        raise InputError(f"workload {workload} seed {seed}:{measure}", f"is {value}", "a number above 0")
    return math.log(value)


def _interval(measure: str, logs: Floats, confidence: float) -> ComparedMeasure:
    """Return the comparison of log ratios (n,)."""
    n, mean = len(logs), float(logs.mean())
    low = high = None
    # Pairs that agree to the last digits are one replay repeated (seeds that nothing drew from), not evidence.
    if n > 1 and float(np.ptp(logs)) > 1e-12:
        half = float(stdtrit(n - 1, 0.5 + confidence / 2)) * float(logs.std(ddof=1)) / math.sqrt(n)
        # Beyond the range of floating point an interval says no more than that.
        low, high = math.exp(max(mean - half, -700.0)), math.exp(min(mean + half, 700.0))
    return ComparedMeasure(
        measure=measure,
        ratio=math.exp(mean),
        low=low,
        high=high,
        better=int((logs < 0).sum()),
        units=n,
        decided=low is not None and high is not None and not low <= 1 <= high,
    )
