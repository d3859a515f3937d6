"""Which samples of a global batch each rank takes when their costs differ, so that all ranks end together.

A sample has a cost, a rank r has a speed v_r; the step takes ``max over r of (sum of the rank's costs) / v_r``. That is
scheduling on uniform machines, which is NP-hard. Start at :func:`balanced`, which the hook calls in every step: the better of
:func:`lpt` and, where speeds are equal, :func:`karmarkar_karp`. :func:`solve` proves how far an assignment is from the best. A
padded pass costs its longest sample times its number of samples; for those :func:`by_length` cuts the batch sorted by length.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ddltool.arrays import Floats, Ints
from ddltool.errors import InputError

# CP-SAT's model counts time in this fraction of the lower bound.
_UNITS = 10**9
# Halvings of a bracket after which it is as narrow as floats allow.
_HALVINGS = 60
# Largest samples times ranks: above, differencing takes over a quarter of a second, and CP-SAT's model is slow to make.
_MOST_DIFFERENCED, _MOST_SOLVED = 1 << 18, 1 << 16
# Relative difference up to which times count as equal; a quotient this close below a whole number is rounded up.
_SAME = 1e-9


def seconds_of(costs: Floats, rank_of: Ints, speeds: Floats) -> Floats:
    """Return (m,) seconds of the ranks: the sum of the costs of a rank's samples, over its speed.

    ``costs`` (n,) of the samples, ``rank_of`` (n,) the rank of each, ``speeds`` (m,) cost per second of each rank.
    """
    times: Floats = np.bincount(rank_of, costs, minlength=len(speeds)) / speeds
    return times


def lower_bound(costs: Floats, speeds: Floats) -> float:
    """Return a lower bound in seconds on the step of any assignment of samples, ``costs`` (n,), to ranks, ``speeds`` (m,).

    It is the largest of three bounds. All samples take at least as long as if all ranks shared them perfectly. The k largest
    samples take at least as long as if the k fastest ranks shared them perfectly. With m ranks of equal speed, some rank gets
    k + 1 of the k m + 1 largest samples, which cost at least as much as the smallest k + 1 of these.
    """
    largest, fastest = np.sort(costs)[::-1], np.sort(speeds)[::-1]
    most_samples = min(len(largest), len(fastest) - 1)
    shared_by_fastest = np.cumsum(largest[:most_samples]) / np.cumsum(fastest[:most_samples])
    bounds = [largest.sum() / fastest.sum(), *shared_by_fastest]
    if np.ptp(fastest) == 0:
        for k in range(1, (len(largest) - 1) // len(fastest) + 1):
            last = k * len(fastest)
            bounds.append(largest[last - k : last + 1].sum() / fastest[0])
    return float(max(bounds))


def lpt(costs: Floats, speeds: Floats) -> Ints:
    """Return the (n,) rank of each sample by longest processing time first (LPT).

    Samples are assigned in the order of falling cost, each to the rank that would end it earliest. ``costs`` (n,) of the
    samples, ``speeds`` (m,) of the ranks. The step is at most 4/3 - 1/(3 m) times the shortest one with equal speeds (Graham,
    1969), and 2 - 2/(m + 1) times with others (Gonzalez, Ibarra and Sahni, 1977). O(n m).
    """
    rank_of, loads = np.zeros(len(costs), dtype=np.int64), np.zeros(len(speeds))
    for sample in np.argsort(-costs, kind="stable"):
        rank = int(np.argmin((loads + costs[sample]) / speeds))
        rank_of[sample] = rank
        loads[rank] += costs[sample]
    return rank_of


def karmarkar_karp(costs: Floats, ranks: int) -> Ints:
    """Return the (n,) rank of each sample on m = ``ranks`` ranks of equal speed, by largest differencing.

    ``costs`` (n,) of the samples. At first each sample is a partial assignment of its own. The two with the largest differences
    between the ranks' loads are joined, the largest load of one with the smallest of the other, and so on, until one is left
    (Karmarkar and Karp, 1982). The step is at most 4/3 - 1/(3 m) times the shortest one (Michiels et al., 2003). O(n m log m).
    """
    # A partial assignment is (-difference of its loads, tie-breaker, [(load, samples) of each rank by rising load]): the heap
    # pops the largest difference first. Samples are a tree of nested pairs, so that joining copies nothing.
    nothing: Any = ()
    partial_assignments = [
        (-cost, sample, [(0.0, nothing)] * (ranks - 1) + [(cost, (sample, nothing))])
        for sample, cost in enumerate(costs.tolist())
    ]
    heapq.heapify(partial_assignments)
    while len(partial_assignments) > 1:
        _, tie_breaker, first = heapq.heappop(partial_assignments)
        _, _, second = heapq.heappop(partial_assignments)
        loads = [(a + b, (left, right)) for (a, left), (b, right) in zip(first, reversed(second), strict=True)]
        loads.sort(key=lambda load: load[0])
        smallest_load, largest_load = loads[0][0], loads[-1][0]
        heapq.heappush(partial_assignments, (smallest_load - largest_load, tie_breaker, loads))
    _, _, whole_assignment = partial_assignments[0]
    rank_of = np.zeros(len(costs), dtype=np.int64)
    for rank, (_, tree) in enumerate(whole_assignment):
        rank_of[_samples_in(tree)] = rank
    return rank_of


def _samples_in(tree: Any) -> list[int]:
    """Return the samples in a tree of nested pairs: a pair's members are samples (int), pairs, or empty tuples."""
    samples: list[int] = []
    open_pairs = [tree]  # a stack, because trees may be deeper than Python's recursion allows
    while open_pairs:
        for member in open_pairs.pop():
            if isinstance(member, int):
                samples.append(member)
            elif member:
                open_pairs.append(member)
    return samples


def is_differenced(costs: Floats, speeds: Floats) -> bool:
    """Return whether :func:`karmarkar_karp` is used: speeds are equal, and samples times ranks are few enough."""
    return bool(np.ptp(speeds) == 0) and len(costs) * len(speeds) <= _MOST_DIFFERENCED


def balanced(costs: Floats, speeds: Floats, passes: int = 1) -> Ints:
    """Return the (n,) place of each sample, ``rank * passes + pass``, so that all ranks end at about the same time.

    ``costs`` (n,) of the samples, ``speeds`` (m,) of the ranks in cost per second; each rank makes ``passes`` passes. The
    result is the same on every machine, so ranks need not communicate. Every place gets a sample if there are enough.
    """
    ranks = len(speeds)
    choices = [lpt(costs, speeds)]
    if is_differenced(costs, speeds):
        choices.append(karmarkar_karp(costs, ranks))
    best = min(choices, key=lambda rank_of: float(seconds_of(costs, rank_of, speeds).max()))
    # a rank needs as many samples as passes, so that none of its passes is empty
    return assign_passes(costs, topped_up(costs, best, ranks, passes), ranks, passes)


def assign_passes(costs: Floats, rank_of: Ints, ranks: int, passes: int) -> Ints:
    """Return the (n,) place ``rank * passes + pass`` of each sample, whose rank is in ``rank_of`` (n,).

    A rank's samples are shared out to its passes by LPT (longest processing time first, :func:`lpt`). Every rank makes its
    costliest pass first, so that passes of similar cost coincide where ranks wait for each other in every pass.
    """
    rank_and_pass = rank_of * passes
    if passes == 1:
        return rank_and_pass
    for rank in range(ranks):
        samples = np.flatnonzero(rank_of == rank)
        # The pass of each of these samples; none is empty if there are enough.
        pass_of = topped_up(costs[samples], lpt(costs[samples], np.ones(passes)), passes)
        costliest_first = np.argsort(-np.bincount(pass_of, costs[samples], minlength=passes), kind="stable")
        rank_and_pass[samples] += np.argsort(costliest_first)[pass_of]  # the inverse: each pass's position by its cost
    return rank_and_pass


def topped_up(costs: Floats, places: Ints, count: int, least: int = 1) -> Ints:
    """Return the (n,) places of the samples, changed so that each of ``count`` places has at least ``least`` samples.

    A place is a rank or a pass, by index. While one has too few, the place with most samples gives it its cheapest one. Nothing
    changes where there are too few samples in all.
    """
    places = places.copy()
    sample_counts = np.bincount(places, minlength=count)
    while len(places) >= count * least and sample_counts.min() < least:
        giver, taker = int(np.argmax(sample_counts)), int(np.argmin(sample_counts))
        givers_samples = np.flatnonzero(places == giver)
        places[givers_samples[np.argmin(costs[givers_samples])]] = taker
        sample_counts[giver] -= 1
        sample_counts[taker] += 1
    return places


def by_length(costs: Floats, speeds: Floats, passes: int = 1) -> Ints:
    """Return the (n,) place ``rank * passes + pass`` of each sample, where passes are padded to their longest sample.

    A padded pass costs its number of samples times the largest of their costs. So the samples are sorted and cut into places of
    neighbours, with the longer ones on faster ranks. A bisection finds the least time within which the places hold all samples.
    With one pass and equal speeds no other assignment ends earlier, because a place whose longest sample is shorter holds at
    least as many within any time. No place is left empty if there are enough samples.
    """
    costliest_first = np.argsort(-costs, kind="stable")
    fastest_ranks = np.argsort(-speeds, kind="stable")
    sorted_costs = costs[costliest_first].tolist()
    place_speeds = np.repeat(speeds[fastest_ranks], passes)  # of all places, those of the fastest rank first
    # at first equal numbers of samples, rounded up
    starts = list(range(0, len(costs), -(-len(costs) // len(place_speeds))))
    low_s = 0.0
    high_s = max(sorted_costs) * len(costs) / float(place_speeds.min())
    for _ in range(_HALVINGS):
        middle_s = (low_s + high_s) / 2
        starts_within = _starts_within(sorted_costs, place_speeds.tolist(), middle_s)
        if starts_within is None:
            low_s = middle_s
        else:
            high_s = middle_s
            starts = starts_within
    # for each sorted sample the index of its place in the order of falling speed, then the place's own number
    sorted_place = np.searchsorted(np.array(starts), np.arange(len(costs)), side="right") - 1
    place_numbers = np.repeat(fastest_ranks * passes, passes) + np.tile(np.arange(passes), len(fastest_ranks))
    places = np.empty(len(costs), dtype=np.int64)
    places[costliest_first] = place_numbers[sorted_place]
    return topped_up(costs, places, len(place_speeds))


def _starts_within(costs: list[float], speeds: list[float], limit_s: float) -> list[int] | None:
    """Return the index in ``costs`` at which each place's samples start, if no place takes longer than ``limit_s`` seconds.

    ``costs`` of the samples are in falling order, and places of the given ``speeds`` take neighbours in turn. A place takes its
    number of samples times its first cost, over its speed. None where the places cannot hold all samples within the limit.
    """
    start = 0
    starts = []
    for speed in speeds:
        starts.append(start)
        if start < len(costs):
            start += int(limit_s * speed / costs[start] + _SAME)  # rounding must not turn a whole number into one less
    return starts if start >= len(costs) else None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Proven:
    """The best assignment that CP-SAT has found."""

    rank_of: Ints
    """(n,) rank of each sample."""
    seconds: float
    """Seconds of the step: until the last rank ends."""
    bound: float
    """Lower bound in seconds on the step of any assignment."""

    @property
    def is_optimal(self) -> bool:
        """Whether the step is equal to its bound, up to a relative 1e-9 for each of the n costs, which :func:`solve` rounds."""
        return self.seconds <= self.bound * (1 + len(self.rank_of) * _SAME)


def solve(costs: Floats, speeds: Floats, limit_s: float, seed: int = 0, gap: float = 0.0) -> Proven:
    """Return the best assignment of samples, ``costs`` (n,), to ranks, ``speeds`` (m,), that CP-SAT finds, and a proven bound.

    The search begins at :func:`balanced`, and ends after ``limit_s`` seconds. It is left out where the beginning is within the
    share ``gap`` of :func:`lower_bound`, and for more than 65,536 samples times ranks. CP-SAT needs whole numbers: costs are
    rounded down to billionths of the lower bound, so that its bound holds for the exact costs too.
    """
    from ortools.sat.python import cp_model

    from ddltool.solver import run, solver_for

    start = balanced(costs, speeds)
    seconds = float(seconds_of(costs, start, speeds).max())
    bound = lower_bound(costs, speeds)
    unsolved = Proven(rank_of=start, seconds=seconds, bound=bound)
    is_good_enough = unsolved.is_optimal or seconds <= bound * (1 + gap)
    if is_good_enough or limit_s <= 0 or len(costs) * len(speeds) > _MOST_SOLVED:
        return unsolved
    unit_times = np.floor(costs[:, None] / speeds * (_UNITS / bound)).astype(np.int64)  # (n, m)
    model = cp_model.CpModel()
    # The end is at least the bound, minus what rounding takes from n costs (below one unit each), and at most the beginning's.
    end = model.new_int_var(_UNITS - len(costs), int(seconds / bound * _UNITS), "end")
    order = np.argsort(-costs, kind="stable").tolist()
    are_alike = np.ptp(speeds) == 0
    chosen = [[model.new_bool_var("") for _ in speeds] for _ in costs]
    for position, sample in enumerate(order):
        model.add_exactly_one(chosen[sample])
        # Ranks of equal speed are interchangeable, so the k-th sample may be restricted to the first k ranks.
        barred_ranks = range(position + 1, len(speeds)) if are_alike else ()
        for rank in barred_ranks:
            model.add(chosen[sample][rank] == 0)
    for rank in range(len(speeds)):
        model.add(sum(int(unit_times[sample, rank]) * chosen[sample][rank] for sample in range(len(costs))) <= end)
    model.minimize(end)
    solver = solver_for(limit_s, seed)
    status = run(solver, model)
    best = start
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        solved = np.array([[solver.boolean_value(choice) for choice in row] for row in chosen]).argmax(axis=1)
        # by exact costs, which are not rounded, the beginning may be the better one
        best = min(start, solved, key=lambda rank_of: float(seconds_of(costs, rank_of, speeds).max()))
    reached = float(seconds_of(costs, best, speeds).max())
    return Proven(rank_of=best, seconds=reached, bound=bound * max(1.0, solver.best_objective_bound / _UNITS))


def checked_costs(costs: ArrayLike, where: str = "costs") -> Floats:
    """Return the (n,) costs as floats.

    Raises InputError, under the name ``where``, for no costs, and for a cost that is not finite and above 0.
    """
    checked = np.asarray(costs, dtype=np.float64)
    if checked.ndim != 1 or not len(checked):
        raise InputError(where, f"has shape {checked.shape}", "give one number for each sample")
    is_wrong = ~(np.isfinite(checked) & (checked > 0))
    if is_wrong.any():
        sample = int(np.argmax(is_wrong))
        raise InputError(f"{where}[{sample}]", f"is {checked[sample]:g}", "give finite numbers above 0")
    return checked
