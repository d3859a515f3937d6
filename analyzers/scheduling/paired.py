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
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddltool.errors import InputError

Floats = NDArray[np.float64]
MEASURES: Mapping[str, str] = {
    "avg_jct_s": "average JCT",
    "p99_jct_s": "p99 JCT",
    "worst_fairness": "worst fairness",
    "makespan_s": "makespan",
    "gpu_seconds": "cost (GPU time)",
}
"""What is compared, and its name for people; less is better for all of them."""
PRICED: Mapping[str, str] = {"cost": "cost (price)"}
"""What is compared besides where every replay has it, above 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One measure of the first policy over that of the second; below 1 the first is better."""

    measure: str
    ratio: float
    """Geometric mean of the ratios."""
    low: float | None
    """Confidence interval of the ratio; None with fewer than two pairs, or pairs that are all the same."""
    high: float | None
    better: int
    """Units (workloads, or seeds) on which the first is better."""
    units: int

    @property
    def decided(self) -> bool:
        """Whether the interval leaves equality out."""
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedResult:
    """All measures of two policies; ``unit`` is what was counted: "workload" or "seed"."""

    first: str
    second: str
    unit: str
    confidence: float
    comparisons: tuple[Comparison, ...]


Figures = Mapping[tuple[str, int], Mapping[str, float]]
"""The figures of one policy's replays by (workload, seed); with the keys of :data:`MEASURES`, all above 0."""


def compare(found: Mapping[str, Figures], first: str, second: str, *, confidence: float = 0.95) -> PairedResult:
    """Return the first policy's figures over the second's, over what both have replayed.

    Replays that only one policy has (a failed cell) are left out in pairs. Raises InputError without any pair, for a
    policy compared with itself and figures that are not above 0.
    """
    if first == second:
        raise InputError("--compare", f"names {first!r} twice", "name two policies, such as ours,pollux")
    if not 0 < confidence < 1:
        raise InputError("confidence", f"is {confidence}", "between 0 and 1, such as 0.95")
    shared = [key for key in found[first] if key in found[second]]
    if not shared:
        raise InputError("--compare", f"{first} and {second} have no workload and seed in common", "replay both on one")
    workloads = list(dict.fromkeys(name for name, _ in shared))
    unit = "workload" if len(workloads) > 1 else "seed"
    made = []
    priced = [
        name for name in PRICED if all(found[each][key].get(name, 0) > 0 for each in (first, second) for key in shared)
    ]
    for measure in (*MEASURES, *priced):
        logs = {key: _log_ratio(found[first][key], found[second][key], measure, key) for key in shared}
        if unit == "workload":
            values = [float(np.mean([logs[key] for key in shared if key[0] == name])) for name in workloads]
        else:
            values = list(logs.values())
        made.append(_interval(measure, np.array(values), confidence))
    return PairedResult(first=first, second=second, unit=unit, confidence=confidence, comparisons=tuple(made))


def _log_ratio(one: Mapping[str, float], other: Mapping[str, float], measure: str, key: tuple[str, int]) -> float:
    for figures in (one, other):
        value = figures.get(measure, math.nan)
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"workload {key[0]} seed {key[1]}:{measure}", f"is {value}", "a number above 0")
    return math.log(one[measure]) - math.log(other[measure])


def _interval(measure: str, logs: Floats, confidence: float) -> Comparison:
    """Return the comparison of log ratios (n,)."""
    from scipy.special import stdtrit

    n, mean = len(logs), float(logs.mean())
    low = high = None
    # Pairs that agree to the last digits are one replay repeated (seeds that nothing drew from), not evidence.
    if n > 1 and float(np.ptp(logs)) > 1e-12:
        half = float(stdtrit(n - 1, 0.5 + confidence / 2)) * float(logs.std(ddof=1)) / math.sqrt(n)
        # Beyond the range of floating point an interval says no more than that.
        low, high = math.exp(max(mean - half, -700.0)), math.exp(min(mean + half, 700.0))
    return Comparison(measure=measure, ratio=math.exp(mean), low=low, high=high, better=int((logs < 0).sum()), units=n)
