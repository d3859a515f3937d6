"""Which samples of a global batch each rank takes when they cost unlike much, so that all ranks end together.

A sample has a cost, a rank a speed; the step takes ``max_r sum of its costs / v_r``. That is scheduling on uniform machines,
which is NP-hard. Start at :func:`balanced`, which is what the hook does in every step: the better of :func:`lpt` and, where
speeds are equal, :func:`karmarkar_karp`. :func:`solve` proves how far that is from the best. A pass that is padded costs as
much as its longest sample times its samples; for those :func:`by_length` cuts the batch sorted by length.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ddltool.arrays import Floats, Ints
from ddltool.errors import InputError

# Whole units of the least possible time in CP-SAT's model.
_UNITS = 10**9
_HALVINGS = 60
# Samples times ranks: beyond these, differencing takes more than a quarter of a second, and CP-SAT's model too long to make.
_MOST_DIFFERENCED, _MOST_SOLVED = 1 << 18, 1 << 16
_SAME = 1e-9


def seconds_of(costs: Floats, places: Ints, speeds: Floats) -> Floats:
    """Return (m,) times of the ranks: the sum of the (n,) ``costs`` at each of the (n,) ``places``, over its speed."""
    times: Floats = np.bincount(places, costs, minlength=len(speeds)) / speeds
    return times


def lower_bound(costs: Floats, speeds: Floats) -> float:
    """Return a time below which no assignment ends.

    The k largest samples take at least as long as on the k fastest ranks alone, all samples as long as on all ranks. With
    equal speeds, k + 1 of the k m + 1 largest samples share a rank.
    """
    largest, fastest = np.sort(costs)[::-1], np.sort(speeds)[::-1]
    few = min(len(largest), len(fastest) - 1)
    bounds = [largest.sum() / fastest.sum(), *(np.cumsum(largest[:few]) / np.cumsum(fastest[:few]))]
    if np.ptp(fastest) == 0:
        for shared in range(1, (len(largest) - 1) // len(fastest) + 1):
            last = shared * len(fastest)
            bounds.append(largest[last - shared : last + 1].sum() / fastest[0])
    return float(max(bounds))


def lpt(costs: Floats, speeds: Floats) -> Ints:
    """Return (n,) ranks: each sample, largest first, goes where it would end earliest.

    Never above 4/3 - 1/(3 m) of the best with equal speeds (Graham, 1969), 2 - 2/(m + 1) with others (Gonzalez, Ibarra and
    Sahni, 1977). O(n m).
    """
    places, loads = np.zeros(len(costs), dtype=np.int64), np.zeros(len(speeds))
    for sample in np.argsort(-costs, kind="stable"):
        rank = int(np.argmin((loads + costs[sample]) / speeds))
        places[sample] = rank
        loads[rank] += costs[sample]
    return places


def karmarkar_karp(costs: Floats, ranks: int) -> Ints:
    """Return (n,) ranks of equal speed by the largest differencing method (Karmarkar and Karp, 1982) in ``ranks`` parts.

    The two partial assignments whose loads differ most are joined, the largest load of one with the smallest of the other.
    Never above 4/3 - 1/(3 m) of the best (Michiels et al., 2003). O(n m log m).
    """
    none: Any = ()
    waiting = [
        (-cost, sample, [(0.0, none)] * (ranks - 1) + [(cost, (sample, none))])
        for sample, cost in enumerate(costs.tolist())
    ]
    heapq.heapify(waiting)
    while len(waiting) > 1:
        (_, number, first), (_, _, second) = heapq.heappop(waiting), heapq.heappop(waiting)
        joined = [(a + b, (left, right)) for (a, left), (b, right) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda part: part[0])
        heapq.heappush(waiting, (joined[0][0] - joined[-1][0], number, joined))
    places = np.zeros(len(costs), dtype=np.int64)
    for rank, (_, part) in enumerate(waiting[0][2]):
        open_parts = [part]
        while open_parts:
            for piece in open_parts.pop():
                if isinstance(piece, int):
                    places[piece] = rank
                elif piece:
                    open_parts.append(piece)
    return places


def is_differenced(costs: Floats, speeds: Floats) -> bool:
    """Return whether :func:`karmarkar_karp` is tried: speeds are equal, and samples and ranks few enough."""
    return bool(np.ptp(speeds) == 0) and len(costs) * len(speeds) <= _MOST_DIFFERENCED


def balanced(costs: Floats, speeds: Floats, passes: int = 1) -> Ints:
    """Return (n,) places, ``rank * passes + pass``, of samples with (n,) ``costs`` on ranks with (m,) ``speeds``.

    The same on every machine; each place has a sample where there are so many.
    """
    ranks, choices = len(speeds), [lpt(costs, speeds)]
    if is_differenced(costs, speeds):
        choices.append(karmarkar_karp(costs, ranks))
    best = min(choices, key=lambda places: float(seconds_of(costs, places, speeds).max()))
    return in_passes(costs, filled(costs, best, ranks, passes), ranks, passes)


def in_passes(costs: Floats, places: Ints, ranks: int, passes: int) -> Ints:
    """Return (n,) places ``rank * passes + pass`` of samples on ranks ``places``, passes of a rank as even as LPT makes them.

    A rank's costlier passes come first, so that those of all ranks that meet in each pass are alike.
    """
    found = places * passes
    for rank in range(ranks if passes > 1 else 0):
        mine = np.flatnonzero(places == rank)
        parts = filled(costs[mine], lpt(costs[mine], np.ones(passes)), passes)
        order = np.argsort(-np.bincount(parts, costs[mine], minlength=passes), kind="stable")
        found[mine] += np.argsort(order)[parts]
    return found


def filled(costs: Floats, places: Ints, count: int, least: int = 1) -> Ints:
    """Return (n,) places of which each of ``count`` has ``least`` samples or more, where n is enough for that.

    What is missing somewhere are the cheapest samples of the place that has most.
    """
    places = places.copy()
    numbers = np.bincount(places, minlength=count)
    while len(places) >= count * least and numbers.min() < least:
        giver, taker = int(np.argmax(numbers)), int(np.argmin(numbers))
        theirs = np.flatnonzero(places == giver)
        places[theirs[np.argmin(costs[theirs])]] = taker
        numbers[giver] -= 1
        numbers[taker] += 1
    return places


def by_length(costs: Floats, speeds: Floats, passes: int = 1) -> Ints:
    """Return (n,) places of samples that are padded to the longest of their pass: the sorted batch cut at lengths.

    A pass takes its number of samples times the largest of their costs. Faster ranks get the longer samples. With one pass
    and equal speeds no other assignment ends earlier: a place whose longest sample is shorter takes no fewer samples.
    """
    order = np.argsort(-costs, kind="stable")
    ranks = np.argsort(-speeds, kind="stable")
    place_speeds, sorted_costs = np.repeat(speeds[ranks], passes), costs[order].tolist()
    cuts = list(range(0, len(costs), -(-len(costs) // len(place_speeds))))
    low, high = 0.0, max(sorted_costs) * len(costs) / float(place_speeds.min())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        tried = _cut_at(sorted_costs, place_speeds.tolist(), middle)
        if tried is None:
            low = middle
        else:
            high, cuts = middle, tried
    cut = np.searchsorted(np.array(cuts), np.arange(len(costs)), side="right") - 1
    places = np.empty(len(costs), dtype=np.int64)
    places[order] = np.repeat(ranks * passes, passes)[cut] + np.tile(np.arange(passes), len(ranks))[cut]
    return filled(costs, places, len(place_speeds))


def _cut_at(costs: list[float], speeds: list[float], limit: float) -> list[int] | None:
    """Return where each place begins in the descending ``costs`` when none takes longer than ``limit``; None: impossible."""
    begin, cuts = 0, []
    for speed in speeds:
        cuts.append(begin)
        if begin < len(costs):
            begin += int(limit * speed / costs[begin] + _SAME)
    return cuts if begin >= len(costs) else None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Proven:
    """The best assignment that CP-SAT has found."""

    places: Ints
    seconds: float
    """When its last rank ends."""
    bound: float
    """Before which no assignment ends."""

    @property
    def is_optimal(self) -> bool:
        """Whether no assignment ends earlier, to a billionth."""
        return self.seconds <= self.bound * (1 + len(self.places) * _SAME)


def solve(costs: Floats, speeds: Floats, limit_s: float, seed: int = 0, gap: float = 0.0) -> Proven:
    """Return the best assignment of samples to ranks within ``limit_s`` seconds, and a proven bound.

    The search begins at :func:`balanced`, and is left out where that is within ``gap`` of :func:`lower_bound`, and for more
    than 65,536 samples times ranks. Costs are rounded down to billionths of the least possible time, so that the bound holds
    for the exact ones.
    """
    from ortools.sat.python import cp_model

    from ddltool.solver import run, solver_for

    start = balanced(costs, speeds)
    seconds, bound = float(seconds_of(costs, start, speeds).max()), lower_bound(costs, speeds)
    known = Proven(places=start, seconds=seconds, bound=bound)
    if known.is_optimal or seconds <= bound * (1 + gap) or limit_s <= 0 or len(costs) * len(speeds) > _MOST_SOLVED:
        return known
    times = np.floor(costs[:, None] / speeds * (_UNITS / bound)).astype(np.int64)
    model = cp_model.CpModel()
    end = model.new_int_var(_UNITS - len(costs), int(seconds / bound * _UNITS), "end")
    order = np.argsort(-costs, kind="stable").tolist()
    are_alike = np.ptp(speeds) == 0
    chosen = [[model.new_bool_var("") for _ in speeds] for _ in costs]
    for position, sample in enumerate(order):
        model.add_exactly_one(chosen[sample])
        for rank in range(
            position + 1, len(speeds) if are_alike else 0
        ):  # ranks are alike: the k-th opens at most the k-th
            model.add(chosen[sample][rank] == 0)
    for rank in range(len(speeds)):
        model.add(sum(int(times[sample, rank]) * chosen[sample][rank] for sample in range(len(costs))) <= end)
    model.minimize(end)
    solver = solver_for(limit_s, seed)
    status = run(solver, model)
    places = start
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        found = np.array([[solver.boolean_value(choice) for choice in row] for row in chosen]).argmax(axis=1)
        places = min(start, found, key=lambda each: float(seconds_of(costs, each, speeds).max()))
    reached = float(seconds_of(costs, places, speeds).max())
    return Proven(places=places, seconds=reached, bound=bound * max(1.0, solver.best_objective_bound / _UNITS))


def checked_costs(costs: ArrayLike, where: str = "costs") -> Floats:
    """Return (n,) costs as floats. Raises InputError for none, and for one that is not finite and above 0."""
    found = np.asarray(costs, dtype=np.float64)
    if found.ndim != 1 or not len(found):
        raise InputError(where, f"has shape {found.shape}", "give one number for each sample")
    is_wrong = ~(np.isfinite(found) & (found > 0))
    if is_wrong.any():
        place = int(np.argmax(is_wrong))
        raise InputError(f"{where}[{place}]", f"is {found[place]:g}", "give finite numbers above 0")
    return found
