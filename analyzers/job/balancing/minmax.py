"""The integer batch sizes that minimise the slowest worker's time, exactly, and the workers to leave out.

Start at :func:`choose`, or :func:`spread` for given workers. The problem is ``min over x of max_i t_i(x_i)`` with ``sum x_i =
X`` (LB-BSP, Equation 3), for curves t_i that never fall with x_i. The greedy rule gives one sample after the other to the
worker whose next sample would end earliest. It is optimal: if the result ends at time T, every next sample would have ended at
T or later when the last sample was given, so fewer than X samples in all end before T, whatever the sizes. The greedy sizes
after all samples that end by a given time do not depend on the order, so a bisection over time for the last such state
(:func:`_earliest_state`) replaces its X steps.

Leaving a worker out is giving it no sample. Because one worker's time does not depend on the others, the least T by which the
workers' capacities add up to X, without those that cannot make one sample by T, is the optimum over all choices of workers at
once. Workers of a type are alike, so 100,000 of them take no longer than one. With limits on devices and money the workers
that make most samples by T are chosen: without prices those with the largest capacities, with prices by a knapsack with one
whole number per type, which CP-SAT solves where the devices of largest capacity cost too much.

Where an iteration takes longer the more workers take part, let T(k) be the least time by which at most k workers make the
whole batch; it never rises with k. The shortest iteration is the least ``finish(T(k), k)``, and no number of workers from k1 to
k2 has less than ``finish(T(k2), k1)``: intervals that cannot win are dropped, the others halved (:func:`shortest`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike

from ddltool.analyzers.job.goodput.throughput import StepTime
from ddltool.arrays import Flags, Floats
from ddltool.arrays import Ints as Counts
from ddltool.errors import InputError
from ddltool.search import search_counts

_UNLIMITED = 2**40
"""A limit of samples that no batch reaches."""
Finish = Callable[[float, int], float]
"""(Seconds of the slowest worker, number of workers) -> seconds of the iteration; it must not fall in either argument."""


class Curves(Protocol):
    """Seconds over batch size of n workers."""

    @property
    def limits(self) -> Counts:
        """(n,) most samples of each worker, 0 or more."""
        ...

    def seconds(self, sizes: Counts) -> Floats:
        """Return (n,) seconds of the workers for (n,) ``sizes`` samples, ``1 <= sizes <= limits``; never falling with these."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceCurves:
    """Curves of n device types: ``launch + per_sample * max(x, saturation) + communication`` seconds for x samples.

    Arrays are (n,); :meth:`of` makes and explains them. With accumulation a batch above the memory limit is made in as few and
    as equal passes as fit, each with its own launch, and gradients are sent once.
    """

    launch_s: Floats
    per_sample_s: Floats
    saturation: Floats
    communication_s: Floats
    memory_limit: Counts
    accumulate: bool = False

    @classmethod
    def of(
        cls,
        *,
        per_sample_s: ArrayLike,
        launch_s: ArrayLike = 0.0,
        saturation: ArrayLike = 0.0,
        communication_s: ArrayLike = 0.0,
        memory_limit: ArrayLike = 2**31,
        accumulate: bool = False,
    ) -> DeviceCurves:
        """Return curves; each argument is (n,) or one number for all types, finite and at least 0.

        Args:
            per_sample_s: seconds per sample where the device is saturated; its length is n.
            launch_s: Gamma(0), seconds of a batch whatever its size.
            saturation: samples below which time does not fall (x^s).
            communication_s: t_comm, seconds that do not overlap with computation.
            memory_limit: most samples in memory at a time (x^o).
            accumulate: whether larger batches are made by gradient accumulation.
        """
        slope = np.atleast_1d(np.asarray(per_sample_s, dtype=np.float64))

        def of_all(values: ArrayLike) -> Floats:
            """Return ``values`` as (n,), one number being repeated."""
            return np.broadcast_to(np.asarray(values, dtype=np.float64), slope.shape)

        return cls(
            per_sample_s=slope,
            launch_s=of_all(launch_s),
            saturation=of_all(saturation),
            communication_s=of_all(communication_s),
            memory_limit=np.broadcast_to(np.asarray(memory_limit, dtype=np.int64), slope.shape),
            accumulate=accumulate,
        )

    @classmethod
    def of_types(cls, times: Sequence[StepTime], *, accumulate: bool = False) -> DeviceCurves:
        """Return the curves of device types with these step times; a type without a time per sample gets times of NaN.

        ``accumulate``: whether batches above a type's memory limit are made by gradient accumulation.
        """
        return cls.of(
            per_sample_s=[math.nan if time.per_sample_s is None else time.per_sample_s for time in times],
            launch_s=[time.launch_s for time in times],
            saturation=[float(time.saturation) for time in times],
            memory_limit=[_UNLIMITED if time.memory_limit is None else time.memory_limit for time in times],
            accumulate=accumulate,
        )

    @property
    def limits(self) -> Counts:
        """(n,) most samples of each worker; with accumulation no limit, or 0 where not even one sample fits into memory."""
        if self.accumulate:
            return np.where(self.memory_limit > 0, np.int64(_UNLIMITED), 0)
        return self.memory_limit

    def seconds(self, sizes: Counts) -> Floats:
        """Return (n,) seconds of each worker for (n,) ``sizes`` samples.

        With accumulation they are made in as few passes as memory allows, whose sizes differ by at most one sample.
        """
        seconds: Floats
        if not self.accumulate:
            seconds = self.communication_s + self.launch_s + self.per_sample_s * np.maximum(sizes, self.saturation)
            return seconds
        passes = np.maximum(-(-sizes // np.maximum(self.memory_limit, 1)), 1)
        smaller_size, larger_passes = sizes // passes, sizes % passes  # so many passes have one sample more
        computed_samples = larger_passes * np.maximum(smaller_size + 1, self.saturation)
        computed_samples += (passes - larger_passes) * np.maximum(smaller_size, self.saturation)
        seconds = self.communication_s + passes * self.launch_s + self.per_sample_s * computed_samples
        return seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The offered devices of K types, and the limits on the devices in use."""

    counts: tuple[int, ...]
    """Offered devices of each type."""
    max_devices: int | None = None
    """Most devices in use; None: no limit."""
    prices: tuple[int, ...] | None = None
    """Price of one device of each type, a whole number; None: devices cost nothing."""
    budget: int = 0
    """Highest price of all devices in use; it counts only with ``prices``."""
    single_type: bool = False
    """Whether all devices in use must be of one type."""


class Row(NamedTuple):
    """``devices`` devices of the type with index ``kind`` that take ``size`` samples each."""

    kind: int
    devices: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """Devices and sizes of the shortest step."""

    rows: tuple[Row, ...]
    numbers: tuple[int, ...]
    """Number of used devices of each type."""
    slowest_s: float
    """Seconds in which the slowest device computes its samples."""
    iteration_s: float
    """Seconds of the step, synchronisation included where it is known."""


def choose(curves: Curves, offer: Offer, total: int, finish: Finish | None = None) -> Chosen | None:
    """Return the devices and sizes with the shortest step over all choices that ``offer`` allows.

    None where no choice holds ``total`` samples. Where devices cost nothing, the most devices are taken among equal steps, so
    that none is left out without need.

    Args:
        curves: seconds over batch size of the K types, in the order of ``offer``.
        offer: the offered devices, and the limits on those in use.
        total: X, samples of all devices together; at least 1.
        finish: adds synchronisation to a step; None: there is none.
    """
    offers = [offer]
    if offer.single_type:  # each type alone
        single_type_counts = np.diag(offer.counts).tolist()
        offers = [replace(offer, counts=tuple(counts)) for counts in single_type_counts]
    choices = [choice for each in offers if (choice := _choose_mixed(curves, each, total, finish)) is not None]
    return min(choices, key=lambda choice: choice.iteration_s, default=None)


def _choose_mixed(curves: Curves, offer: Offer, total: int, finish: Finish | None) -> Chosen | None:
    """Return the result of :func:`choose` if types may mix, whatever ``offer.single_type`` says."""
    chooser = _Chooser(offer, total)
    most_sizes = np.where(chooser.counts > 0, np.minimum(curves.limits, total), 0)
    # First the shortest time and the number of devices, then which devices, last the exact sizes on these.
    state = shortest(chooser.fewest, chooser.most, finish, curves, most_sizes)
    if state is None:
        return None
    numbers = chooser.most_productive(state.sizes, state.number)
    if numbers is None:
        return None
    used_counts = tuple(numbers.tolist())
    rows = spread(curves, used_counts, total)
    assert rows is not None  # the chosen devices make at least ``total`` samples by the best time
    slowest_s = slowest_of(curves, rows)
    iteration_s = slowest_s if finish is None else finish(slowest_s, sum(used_counts))
    return Chosen(rows=rows, numbers=used_counts, slowest_s=slowest_s, iteration_s=iteration_s)


def spread(curves: Curves, numbers: Sequence[int], total: int) -> tuple[Row, ...] | None:
    """Return the batch sizes with which the slowest device ends earliest, as rows of equal devices.

    ``curves``: seconds over batch size of K types; ``numbers`` (K,): how many devices of each type take part. Each device gets
    at least one sample, and all together get ``total``; None where that is impossible. Sizes are those of the module's greedy
    rule, found for all devices of a type at once.
    """
    counts = np.asarray(numbers, dtype=np.int64)
    greedy_state = _fill_greedily(curves, counts, total)
    if greedy_state is None:
        return None
    # (K,) each: the size of one device before the rule's end, its size if it takes all samples that end just then, and how
    # many of these samples the devices of the type take together.
    sizes_before, sizes_at_end, extra_samples = greedy_state
    # So of each type some devices take all (full), at most one takes a part, and the others none.
    full_devices, rest_samples = np.divmod(extra_samples, np.maximum(sizes_at_end - sizes_before, 1))
    partial_devices = np.minimum(rest_samples, 1)
    # (K, 3) by type, and by full, partial or none: the number of devices and their size; each pair with devices makes a row
    devices = np.column_stack((full_devices, partial_devices, counts - full_devices - partial_devices))
    sizes = np.column_stack((sizes_at_end, sizes_before + rest_samples, sizes_before))
    type_indices, size_indices = np.nonzero(devices)
    return tuple(
        Row(kind=kind, devices=number, size=size)
        for kind, number, size in zip(
            type_indices.tolist(),
            devices[type_indices, size_indices].tolist(),
            sizes[type_indices, size_indices].tolist(),
            strict=True,
        )
    )


def slowest_of(curves: Curves, rows: Sequence[Row]) -> float:
    """Return the seconds of the slowest device in ``rows``; -1.0 where no row has samples.

    ``curves``: seconds over batch size of K types, whose indices are the rows' ``kind``. Of several rows of one type the
    largest size counts, because times do not fall with the size.
    """
    sizes = np.zeros(len(curves.limits), dtype=np.int64)
    np.maximum.at(sizes, [row.kind for row in rows], [row.size for row in rows])
    # curves are defined from one sample on; types without samples are left out of the maximum
    return float(curves.seconds(np.maximum(sizes, 1)).max(where=sizes > 0, initial=-1.0))


def _fill_greedily(curves: Curves, numbers: Counts, total: int) -> tuple[Counts, Counts, Counts] | None:
    """Return three (K,) arrays by device type: sizes before the greedy rule's end, sizes at its end, and extra samples.

    The end is the time at which the last sample of the greedy rule ends. Extra samples are those that all devices of a type
    take together beyond their sizes before. ``numbers`` (K,) devices of each type take part, each with at least one sample.
    None where these cannot take ``total`` samples.
    """
    is_used = numbers > 0
    max_sizes = np.where(is_used, np.minimum(curves.limits, total), 0)
    devices = int(numbers.sum())
    if not 0 < devices <= total or (max_sizes[is_used] < 1).any():
        return None
    if _type_samples(numbers, max_sizes, total).sum() < total:
        return None
    sizes_before = sizes_at_end = np.minimum(max_sizes, 1)
    if devices < total:
        earliest = _earliest_state(
            lambda sizes: bool(_type_samples(numbers, sizes, total).sum() >= total), curves, 1, max_sizes
        )
        assert earliest is not None  # the limits admit the total
        sizes_before, sizes_at_end = earliest.before, earliest.sizes
    last_samples = _type_samples(numbers, sizes_at_end - sizes_before, total)  # samples that end exactly at the optimum
    # Not all of these may be needed: they are taken type by type until the total is reached.
    needed = total - int((numbers * sizes_before).sum())
    taken_by_earlier_types = np.concatenate(([0], np.cumsum(last_samples)[:-1]))
    extra_samples = np.clip(needed - taken_by_earlier_types, 0, last_samples)
    return sizes_before, sizes_at_end, extra_samples


def _type_samples(numbers: Counts, sizes: Counts, total: int) -> Counts:
    """Return (K,) samples of all devices of each type: ``numbers * sizes``, where no size is above ``total``.

    Where products might overflow 64 bits, devices beyond those that make ``total`` samples are not counted, so that a sum
    reaches ``total`` if and only if the true sum does.
    """
    might_overflow = int(numbers.sum()) * total >= 2**62  # no sum of the products is larger than this one
    if might_overflow:
        enough_devices = -(-total // np.maximum(sizes, 1))  # rounded up
        numbers = np.minimum(numbers, enough_devices)
    samples: Counts = numbers * sizes
    return samples


class _Chooser:
    """Chooses devices of K types, when one device of type i makes at most ``sizes[i]`` samples in some given time."""

    def __init__(self, offer: Offer, total: int) -> None:
        """Take the offered devices, and the ``total`` samples that the chosen ones must make together."""
        self.offer = offer
        self.total = total
        self.counts = np.asarray(offer.counts, dtype=np.int64)
        """(K,) offered devices of each type."""
        # Each device in use takes a sample at least.
        self.most_devices = min(total, int(self.counts.sum()))
        if offer.max_devices is not None:
            self.most_devices = min(self.most_devices, offer.max_devices)
        # As Python's integers, because prices times devices may need more than 64 bits.
        self._prices = None if offer.prices is None else np.asarray(offer.prices, dtype=object)
        self._counts_equal = offer.prices is None and self.counts.min() == self.counts.max()
        """Whether all types are free of charge and have as many devices, so that they differ by their sizes alone."""

    def fewest(self, sizes: Counts) -> int:
        """Return the fewest devices that make the whole batch, with ``sizes`` (K,) samples each; 0: no allowed choice does.

        Devices of the largest sizes are taken; where these cost too much, CP-SAT searches for others.
        """
        if self._counts_equal:  # the types' order does not matter, and sorting values is many times faster than argsort
            ordered_sizes, ordered_counts = np.sort(sizes)[::-1], self.counts
        else:
            order = np.argsort(sizes)[::-1]
            ordered_sizes, ordered_counts = sizes[order], self.counts[order]
        samples = np.cumsum(_type_samples(ordered_counts, ordered_sizes, self.total))
        if samples[-1] < self.total:
            return 0
        last_type = int(np.searchsorted(samples, self.total))  # with its devices the batch is reached
        samples_before = int(samples[last_type - 1]) if last_type else 0
        missing_samples = self.total - samples_before
        needed_of_last = -(-missing_samples // int(ordered_sizes[last_type]))  # rounded up
        devices = int(ordered_counts[:last_type].sum()) + needed_of_last
        if devices > self.most_devices:
            return 0
        if self._prices is None or self._largest(sizes, order, devices) is not None:
            return devices
        numbers = self._knapsack(sizes, self.most_devices, whole_batch=True)
        return 0 if numbers is None else int(numbers.sum())

    def most(self, sizes: Counts) -> int:
        """Return the most devices that can take part, each with at least one sample; with prices, an upper bound of that.

        Types with a size of 0 in ``sizes`` (K,) cannot make a sample in the given time.
        """
        if self._prices is not None:
            return self.most_devices
        return min(self.most_devices, int(self.counts[sizes > 0].sum()))

    def most_productive(self, sizes: Counts, devices: int) -> Counts | None:
        """Return how many devices of each type, (K,), make the most samples together; None where no choice is allowed.

        At most ``devices`` are taken, whose price is within the offer's budget. ``sizes`` (K,): samples of one device of each
        type. The devices of the largest sizes are best; where they exceed the budget, a knapsack is solved.
        """
        numbers = self._largest(sizes, np.argsort(-sizes, kind="stable"), devices)
        return self._knapsack(sizes, devices, whole_batch=False) if numbers is None else numbers

    def _largest(self, sizes: Counts, order: Counts, devices: int) -> Counts | None:
        """Return how many of the ``devices`` devices with the largest sizes are of each type, (K,).

        ``sizes`` (K,): samples of one device of each type; ``order`` (K,): indices of the types by falling size. None where
        these devices exceed the budget.
        """
        usable = np.where(sizes[order] > 0, self.counts[order], 0)
        taken_so_far = np.minimum(np.cumsum(usable), devices)
        numbers = np.zeros_like(self.counts)
        numbers[order] = np.diff(taken_so_far, prepend=0)
        if self._prices is not None and int(self._prices @ numbers) > self.offer.budget:
            return None
        return numbers

    def _knapsack(self, sizes: Counts, devices: int, *, whole_batch: bool) -> Counts | None:
        """Return how many devices to take of each type, (K,), within the budget, by CP-SAT; None where none are possible.

        ``sizes`` (K,): samples of one device of each type; ``devices``: most devices in all. With ``whole_batch`` the result
        is the fewest devices that make all samples, else those that make the most samples.
        """
        from ortools.sat.python import cp_model

        from ddltool.solver import run, solver_for

        assert self.offer.prices is not None
        model = cp_model.CpModel()
        # More devices of a type than make the whole batch are not needed; this also keeps products within 64 bits.
        max_numbers = [
            min(count, devices, self.offer.budget // price if price else devices, -(-self.total // size)) if size else 0
            for count, price, size in zip(self.offer.counts, self.offer.prices, sizes.tolist(), strict=True)
        ]
        used = [model.new_int_var(0, max_number, "") for max_number in max_numbers]
        model.add(cp_model.LinearExpr.sum(used) <= devices)
        model.add(cp_model.LinearExpr.weighted_sum(used, list(self.offer.prices)) <= self.offer.budget)
        samples = cp_model.LinearExpr.weighted_sum(used, sizes.tolist())
        if whole_batch:
            model.add(samples >= self.total)
            model.minimize(cp_model.LinearExpr.sum(used))
        else:
            model.maximize(samples)
        solver = solver_for(math.inf, 1)  # without a time limit, because the result must be exact
        if run(solver, model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        return np.array([solver.value(variable) for variable in used], dtype=np.int64)


def capacities(curves: Curves, within_s: float, least: int | Counts, most: Counts) -> Counts:
    """Return (n,) the most samples that each worker makes within ``within_s`` seconds, between ``least`` and ``most`` (n,).

    ``least`` is one number or (n,). A worker that cannot make ``least`` samples in that time gets ``least`` all the same, and
    one whose ``most`` is smaller gets ``most``. Bisects the sizes of all workers at once, which needs curves that never fall:
    O(n log max(most - least)).
    """
    high = np.array(most, dtype=np.int64)
    low = np.minimum(high, least)
    while (low < high).any():
        middle = high - (high - low) // 2
        # Where a worker's search has ended, its middle may be 0, for which curves need not be defined.
        fits = curves.seconds(np.maximum(middle, 1)) <= within_s
        is_searching = low < high
        low = np.where(is_searching & fits, middle, low)
        high = np.where(is_searching & ~fits, middle - 1, high)
    return low


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _EarliestState:
    """The least time at which a condition holds, and the workers' sizes at and before it."""

    at_s: float
    sizes: Counts
    """(n,) most samples that each worker makes by ``at_s``."""
    before: Counts
    """(n,) most samples that each worker makes before ``at_s``."""


def _earliest_state(
    is_enough: Callable[[Counts], bool], curves: Curves, min_size: int, max_sizes: Counts
) -> _EarliestState | None:
    """Return the state at the least time at which ``is_enough`` holds for the workers' capacities; None if it never holds.

    A worker's capacity at a time is the most samples that it makes by then. The result is exact: a bisection over time, whose
    lower end is always the next time at which some capacity grows, and whose upper end is a time that is known to be enough.

    Args:
        is_enough: condition on (n,) capacities between ``min_size`` and ``max_sizes``; it must stay true for larger ones,
            and be false where no worker makes more than ``min_size``.
        curves: seconds over batch size.
        min_size: samples that each worker has from the start (``max_sizes`` where that is less).
        max_sizes: (n,) most samples of each worker.

    Raises InputError where the time of ``max_sizes`` samples is not finite.
    """
    sizes_before = np.minimum(max_sizes, min_size)
    sizes_at_end: Counts = np.array(max_sizes, dtype=np.int64)
    end_s = _last_end_s(curves, max_sizes > 0, sizes_at_end)
    if not math.isfinite(end_s):
        raise InputError("curves", "give times too large for a number", "seconds of the whole batch must be finite")
    if not is_enough(sizes_at_end):
        return None
    min_sizes = sizes_before
    # The times of workers that have no more than their first samples do not count: these cost no time.
    end_s = _last_end_s(curves, sizes_at_end > min_sizes, sizes_at_end)
    next_s = _next_end_s(curves, sizes_before, max_sizes)
    while next_s < end_s:
        middle_s = _midpoint(next_s, end_s)
        sizes = capacities(curves, middle_s, sizes_before, sizes_at_end)
        if is_enough(sizes):
            sizes_at_end = sizes
            end_s = _last_end_s(curves, sizes > min_sizes, sizes)
        else:
            sizes_before = sizes
            next_s = _next_end_s(curves, sizes, max_sizes)
    return _EarliestState(at_s=end_s, sizes=sizes_at_end, before=sizes_before)


def _last_end_s(curves: Curves, mask: Flags, sizes: Counts) -> float:
    """Return the seconds until the last worker in ``mask`` (n,) ends its ``sizes`` (n,) samples; -1 for an empty mask."""
    with np.errstate(over="ignore"):  # the caller checks for infinity
        seconds = curves.seconds(np.maximum(sizes, 1))
    return float(seconds.max(where=mask, initial=-1.0))


def _next_end_s(curves: Curves, sizes: Counts, max_sizes: Counts) -> float:
    """Return the earliest time in seconds at which a worker ends one sample more than ``sizes`` (n,).

    Infinite where all have their ``max_sizes`` (n,) samples already.
    """
    seconds = curves.seconds(np.maximum(np.minimum(sizes + 1, max_sizes), 1))
    return float(seconds.min(where=sizes < max_sizes, initial=np.inf))


def _midpoint(low: float, high: float) -> float:
    """Return the midpoint, or ``low`` where there is no float between the two, so that a bisection always ends."""
    middle = low + (high - low) / 2
    return middle if low < middle < high else low


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortest:
    """The shortest iteration: how many workers take part, and their capacities."""

    sizes: Counts
    """(n,) most samples that each worker makes by the least time in which ``number`` workers can make the batch."""
    number: int
    """Number of workers; of equally short iterations the one with most workers is taken."""


def shortest(
    fewest_workers: Callable[[Counts], int],
    most_workers: Callable[[Counts], int],
    finish: Finish | None,
    curves: Curves,
    most: Counts,
) -> Shortest | None:
    """Return the shortest iteration over all numbers of workers; None where all workers together make too few samples.

    Of equally short iterations the one with most workers is taken, then the one whose slowest worker ends first. The result is
    exact, because it is decided by the given functions' own numbers.

    Args:
        fewest_workers: (n,) capacities -> fewest workers that make the whole batch, 0 where all together do not; it must not
            rise with capacities (0 counts as infinite).
        most_workers: (n,) capacities -> most workers that can take part, each with at least one sample; it must not be less
            than ``fewest_workers``, nor fall with capacities.
        finish: see :data:`Finish`; None: an iteration takes as long as its slowest worker.
        curves: seconds over batch size.
        most: (n,) most samples of each worker.
    """
    earliest = _earliest_state(lambda sizes: fewest_workers(sizes) > 0, curves, 0, most)
    if earliest is None:
        return None
    if finish is None:
        return Shortest(sizes=earliest.sizes, number=most_workers(earliest.sizes))

    @cache
    def earliest_with_at_most(number: int) -> _EarliestState:
        """Return the earliest state in which at most ``number`` workers make the batch."""
        state = _earliest_state(lambda sizes: 0 < fewest_workers(sizes) <= number, curves, 0, most)
        assert state is not None  # with their most samples, ``number`` workers make the batch
        return state

    @cache
    def earliest_with_exactly(number: int) -> _EarliestState:
        """Return the earliest state in which ``number`` workers make the batch, each with at least one sample.

        In the earliest state with at most ``number`` workers, fewer may have a sample; then a later state is searched for.
        """
        state = earliest_with_at_most(number)
        if most_workers(state.sizes) < number:
            later_state = _earliest_state(
                lambda sizes: 0 < fewest_workers(sizes) <= number <= most_workers(sizes), curves, 0, most
            )
            assert later_state is not None  # with their most samples, ``number`` workers do
            state = later_state
        return state

    def cost(number: int) -> tuple[float, int]:
        """Return the iteration's seconds with ``number`` workers, and ``-number``, with which more workers win a tie."""
        return finish(earliest_with_exactly(number).at_s, number), -number

    def bound(low: int, high: int) -> tuple[float, int]:
        """Return a lower bound of :func:`cost` from ``low`` to ``high`` workers: time of ``high`` ones, finish of ``low``."""
        return finish(earliest_with_at_most(high).at_s, low), -high

    best, _ = search_counts(fewest_workers(most), most_workers(most), cost, bound)
    return Shortest(sizes=earliest_with_exactly(best).sizes, number=best)
