"""The whole batch sizes that minimise the slowest worker's time, exactly, and which workers to do without.

``min over x of max_i t_i(x_i)`` with ``sum x_i = X`` (LB-BSP, Equation 3), for curves t_i that never fall with x_i. The
greedy rule gives one sample after the other to the worker whose next sample would end earliest. It is optimal: if the
result ends at T, the greedy took its last sample although every other next sample would have ended at T or later, so
fewer than X samples in all end before T, whatever the sizes. After all samples that end by some time the greedy is where
it is without regard to order, so a bisection over T for the last such state (:func:`_earliest`) replaces its X steps.

Leaving a worker out is giving it nothing. As one worker's time does not depend on the others, the least T at which the
workers' capacities reach X, with nothing from those that cannot make one sample by T, is the optimum over all choices of
workers at once. Workers of a type are alike, so 100,000 of them cost no more than one. Within limits on devices and money
the workers that make most by T are chosen: without prices those with the largest capacities, with prices by a knapsack
with one whole number per type, which CP-SAT solves where those of the largest capacity cost too much.

Where an iteration takes longer the more workers take part, let K(T) be the fewest that make the whole batch by T; it
never rises with T. The shortest iteration is the least ``value(T, K(T))`` over all T, and in a range of times from T1 to
T2 nothing is less than ``value(T1, K(T2))``: ranges that cannot win are dropped, the others halved, the most promising
first (:func:`shortest`). ``value`` may be flat over times, as where synchronisation hides computation: a range that can
only be as short as the best is looked into only if more workers could take part in it, so of a plateau few times are seen.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddltool.arrays import Floats
from ddltool.arrays import Ints as Counts
from ddltool.errors import InputError

Finish = Callable[[float, int], float]
"""From the seconds of the slowest worker and the number of workers to those of the iteration; never falling in either."""


class Curves(Protocol):
    """Seconds over batch size of n workers."""

    @property
    def limits(self) -> Counts:
        """(n,) most samples of each worker; at least 0."""
        ...

    def seconds(self, sizes: Counts) -> Floats:
        """Return (n,) seconds of the workers with (n,) ``sizes`` samples, ``1 <= sizes <= limits``; never falling."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceCurves:
    """``launch + per_sample * max(x, saturation) + communication``, all (n,) arrays; made by :meth:`of`.

    With accumulation a batch above the memory limit is made in as few and as equal parts as fit, each with its own
    launch; gradients travel once.
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
        """Return checked curves; each argument is (n,) or one number for all.

        Args:
            per_sample_s: seconds per sample where the device is saturated, at least 0; its length is n.
            launch_s: Gamma(0), seconds of a batch whatever its size.
            saturation: samples below which time does not fall (x^s).
            communication_s: t_comm, seconds that do not overlap with computation.
            memory_limit: most samples in memory at a time (x^o).
            accumulate: whether larger batches are made by gradient accumulation.

        Raises InputError for values that are negative or not finite.
        """
        slope = np.atleast_1d(np.asarray(per_sample_s, dtype=np.float64))
        named = {"launch_s": launch_s, "saturation": saturation, "communication_s": communication_s}
        values = {"per_sample_s": slope, **{name: np.asarray(given, dtype=float) for name, given in named.items()}}
        for name, array in values.items():
            if array.shape not in ((), slope.shape):
                raise InputError(name, f"has shape {array.shape}", f"give one number or {len(slope)}")
            if not np.isfinite(array).all() or (array < 0).any():
                raise InputError(name, "has a value that is negative or not finite", "give numbers of at least 0")
            values[name] = np.broadcast_to(array, slope.shape)
        memory = np.asarray(memory_limit, dtype=np.int64)
        if memory.shape not in ((), slope.shape) or (memory < 0).any():
            raise InputError("memory_limit", "is not usable", f"give one whole number of samples or {len(slope)}")
        return cls(**values, memory_limit=np.broadcast_to(memory, slope.shape), accumulate=accumulate)

    @property
    def limits(self) -> Counts:
        """(n,) most samples; with accumulation memory does not bind."""
        if self.accumulate:
            return np.where(self.memory_limit > 0, np.int64(2**40), 0)
        return self.memory_limit

    def seconds(self, sizes: Counts) -> Floats:
        """Return (n,) seconds of an iteration with (n,) ``sizes`` samples."""
        seconds: Floats
        if not self.accumulate:
            seconds = self.communication_s + self.launch_s + self.per_sample_s * np.maximum(sizes, self.saturation)
            return seconds
        parts = np.maximum(-(-sizes // np.maximum(self.memory_limit, 1)), 1)
        small, larger = sizes // parts, sizes % parts  # `larger` parts hold one sample more
        computed = larger * np.maximum(small + 1, self.saturation)
        computed += (parts - larger) * np.maximum(small, self.saturation)
        seconds = self.communication_s + parts * self.launch_s + self.per_sample_s * computed
        return seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """K types of workers: how many there are, and what may be used of them."""

    counts: tuple[int, ...]
    max_devices: int | None = None
    prices: tuple[int, ...] | None = None
    """Whole prices of one device of each type; None: they cost nothing."""
    budget: int = 0
    """Most that all used devices may cost; read where there are prices."""
    single_type: bool = False


class Row(NamedTuple):
    """``devices`` devices of a type that take ``size`` samples each."""

    kind: int
    devices: int
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """Devices and sizes of the shortest step."""

    rows: tuple[Row, ...]
    numbers: tuple[int, ...]
    """Used devices of each type."""
    slowest_s: float
    """Seconds of the slowest device."""
    iteration_s: float
    """Seconds of the step, synchronisation included where it is known."""


def choose(curves: Curves, offer: Offer, total: int, finish: Finish | None = None) -> Chosen | None:
    """Return the devices and sizes with the shortest step over all choices that ``offer`` allows; None where none fits.

    Args:
        curves: of the K types, in the order of ``offer``.
        total: X, samples of all devices together; at least 1.
        finish: how synchronisation lengthens the step; None: not at all.

    Where devices cost nothing, of equal steps the one with most devices is taken, so that none is left out without need.
    """
    ends = finish or (lambda slowest, devices: slowest)
    offers = [offer]
    if offer.single_type:
        alone = np.diag(offer.counts).tolist()
        offers = [replace(offer, counts=tuple(counts)) for counts in alone]
    found = []
    for each in offers:
        numbers = _best_numbers(curves, each, total, ends)
        if numbers is not None:
            rows = spread(curves, numbers.tolist(), total)
            assert rows is not None  # what they make by the best time reaches the total
            slowest, taken = slowest_of(curves, rows), tuple(numbers.tolist())
            made_s = ends(slowest, sum(taken))
            found.append(Chosen(rows=rows, numbers=taken, slowest_s=slowest, iteration_s=made_s))
    return min(found, key=lambda made: made.iteration_s, default=None)


def spread(curves: Curves, numbers: Sequence[int], total: int) -> tuple[Row, ...] | None:
    """Return the sizes with the least slowest device where ``numbers`` devices of each type all take part.

    Each gets a sample at least; None where they cannot take ``total``. Greedy by marginal time, by types.
    """
    counts = np.asarray(numbers, dtype=np.int64)
    filled = _fill(curves, counts, total)
    if filled is None:
        return None
    low, high, given = filled
    full, part = np.divmod(given, np.maximum(high - low, 1))
    over = np.minimum(part, 1)  # the one device that gets a part of what the type could take more
    devices = np.column_stack((full, over, counts - full - over))
    kinds, which = np.nonzero(devices)
    sizes = np.column_stack((high, low + part, low))[kinds, which]
    return tuple(map(Row, kinds.tolist(), devices[kinds, which].tolist(), sizes.tolist()))


def slowest_of(curves: Curves, rows: Sequence[Row]) -> float:
    """Return the seconds of the slowest of the rows' devices."""
    sizes = np.zeros(len(curves.limits), dtype=np.int64)
    np.maximum.at(sizes, [row.kind for row in rows], [row.size for row in rows])
    return float(curves.seconds(np.maximum(sizes, 1)).max(where=sizes > 0, initial=-1.0))


def _fill(curves: Curves, numbers: Counts, total: int) -> tuple[Counts, Counts, Counts] | None:
    """Return the greedy's (K,) sizes before its last time, at it, and samples given to each type beyond the former.

    ``numbers`` (K,) devices of each type take part, with a sample at least; None where they cannot take ``total``.
    """
    used = numbers > 0
    most = np.where(used, np.minimum(curves.limits, total), 0)
    devices = int(numbers.sum())
    if not 0 < devices <= total or (most[used] < 1).any() or _made(numbers, most, total).sum() < total:
        return None
    low = high = np.minimum(most, 1)
    if devices < total:
        reach = _earliest(lambda sizes: bool(_made(numbers, sizes, total).sum() >= total), curves, 1, most)
        assert reach is not None  # the limits admit the total
        low, high = reach.before, reach.sizes
    room = _made(numbers, high - low, total)  # samples that end exactly at the optimum
    before = np.concatenate(([0], np.cumsum(room)[:-1]))
    return low, high, np.clip(total - int((numbers * low).sum()) - before, 0, room)


def _made(numbers: Counts, sizes: Counts, total: int) -> Counts:
    """Return (K,) samples of all devices of each type, where they might pass 64 bits no more than ``total`` takes.

    So sums of them are enough for ``total`` exactly where the true ones are.
    """
    if int(numbers.sum()) * total >= 2**62:
        numbers = np.minimum(numbers, -(-total // np.maximum(sizes, 1)))
    made: Counts = numbers * sizes
    return made


def _best_numbers(curves: Curves, offer: Offer, total: int, finish: Finish) -> Counts | None:
    """Return (K,) numbers of devices of the shortest step that can all take part in it; None where all make too little."""
    counts = np.asarray(offer.counts, dtype=np.int64)
    limit = min(total, int(counts.sum()), total if offer.max_devices is None else offer.max_devices)
    prices = None if offer.prices is None else np.asarray(offer.prices, dtype=object)
    alike = prices is None and counts.min() == counts.max()

    def roomiest(sizes: Counts, order: Counts, devices: int) -> Counts | None:
        """Return the ``devices`` devices that make most, ``order`` (K,) being the types by their samples; None: too dear."""
        taken = np.diff(np.minimum(np.cumsum(np.where(sizes[order] > 0, counts[order], 0)), devices), prepend=0)
        numbers = np.zeros_like(counts)
        numbers[order] = taken
        return numbers if prices is None or int(prices @ numbers) <= offer.budget else None

    def fewest(sizes: Counts) -> int:
        if alike:  # sorting alone is many times faster than finding the order
            each, many = np.sort(sizes)[::-1], counts
        else:
            order = np.argsort(sizes)[::-1]
            each, many = sizes[order], counts[order]
        made = np.cumsum(_made(many, each, total))
        if made[-1] < total:
            return 0
        last = int(np.searchsorted(made, total))
        short = total - (int(made[last - 1]) if last else 0)
        number = int(many[:last].sum()) - (-short // int(each[last]))
        if number > limit:
            return 0
        if prices is None or roomiest(sizes, order, number) is not None:
            return number
        numbers = _knapsack(sizes, offer, total, limit, total)
        return 0 if numbers is None else int(numbers.sum())

    def largest(sizes: Counts) -> int:
        return limit if prices is not None else min(limit, int(counts[sizes > 0].sum()))

    found = shortest(fewest, largest, finish, curves, np.where(counts > 0, np.minimum(curves.limits, total), 0))
    if found is None:
        return None
    numbers = roomiest(found.sizes, np.argsort(-found.sizes, kind="stable"), found.number)
    return _knapsack(found.sizes, offer, None, found.number, total) if numbers is None else numbers


def _knapsack(sizes: Counts, offer: Offer, wanted: int | None, devices: int, total: int) -> Counts | None:
    """Return the fewest devices that make ``wanted``, or (None) those that make most, by CP-SAT: one variable per type."""
    from ortools.sat.python import cp_model

    assert offer.prices is not None
    model = cp_model.CpModel()
    # More devices of one type than make the whole batch are not needed, and products stay within 64 bits.
    most = [
        min(count, devices, offer.budget // price if price else devices, -(-total // size)) if size else 0
        for count, price, size in zip(offer.counts, offer.prices, sizes.tolist(), strict=True)
    ]
    used = [model.new_int_var(0, number, "") for number in most]
    model.add(cp_model.LinearExpr.sum(used) <= devices)
    model.add(cp_model.LinearExpr.weighted_sum(used, list(offer.prices)) <= offer.budget)
    makes = cp_model.LinearExpr.weighted_sum(used, sizes.tolist())
    if wanted is None:
        model.maximize(makes)
    else:
        model.add(makes >= wanted)
        model.minimize(cp_model.LinearExpr.sum(used))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    return np.array([solver.value(variable) for variable in used], dtype=np.int64)


def capacities(curves: Curves, within_s: float, least: int | Counts, most: Counts) -> Counts:
    """Return (n,) the most samples that each worker makes within ``within_s``, from ``least`` to (n,) ``most``.

    ``least`` is one number or (n,); where ``most`` is less than it, ``most`` is the answer.

    Bisection over the size for all workers at once: O(n log max(most - least)).
    """
    high = np.array(most, dtype=np.int64)
    low = np.minimum(high, least)
    while (low < high).any():
        middle = high - (high - low) // 2
        # Where the search has ended the middle may be 0, for which curves need not be defined.
        fits = curves.seconds(np.maximum(middle, 1)) <= within_s
        going = low < high
        low = np.where(going & fits, middle, low)
        high = np.where(going & ~fits, middle - 1, high)
    return low


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Reach:
    """The least time by which something is so, and what the workers make by then."""

    at_s: float
    sizes: Counts
    """(n,) most samples that each makes by ``at_s``."""
    before: Counts
    """(n,) most samples that each makes by any earlier time."""


def _earliest(enough: Callable[[Counts], bool], curves: Curves, least: int, most: Counts) -> _Reach | None:
    """Return the least time at which ``enough`` is true of what the workers make by it; None if it never is.

    Args:
        enough: from (n,) capacities, which lie between ``least`` (or ``most``, if that is less) and ``most``, to whether
            they do; must stay true with larger ones, and be false where no worker makes more than ``least``.
        curves: seconds over batch size.
        least: samples that each worker has anyhow.
        most: (n,) most samples.

    Raises InputError where the time of ``most`` samples is no finite number.
    """
    low = np.minimum(most, least)
    high: Counts = np.array(most, dtype=np.int64)
    high_s = _last_s(curves, most > 0, high)
    if not math.isfinite(high_s):
        raise InputError("curves", "give times too large for a number", "seconds of the whole batch must be finite")
    if not enough(high):
        return None
    floor = low
    high_s = _last_s(curves, high > floor, high)
    next_s = _next_s(curves, low, most)
    while next_s < high_s:
        middle = _between(next_s, high_s)
        sizes = capacities(curves, middle, low, high)
        if enough(sizes):
            high, high_s = sizes, _last_s(curves, sizes > floor, sizes)
        else:
            low, next_s = sizes, _next_s(curves, sizes, most)
    return _Reach(at_s=high_s, sizes=high, before=low)


def _last_s(curves: Curves, mask: NDArray[np.bool_], sizes: Counts) -> float:
    """Return when the last of the workers in ``mask`` ends its ``sizes`` samples; -1 if there are none."""
    with np.errstate(over="ignore"):
        seconds = curves.seconds(np.maximum(sizes, 1))
    return float(seconds.max(where=mask, initial=-1.0))


def _next_s(curves: Curves, sizes: Counts, most: Counts) -> float:
    """Return when the first of the workers would end one sample more than ``sizes``; infinity if none has room."""
    seconds = curves.seconds(np.maximum(np.minimum(sizes + 1, most), 1))
    return float(seconds.min(where=sizes < most, initial=np.inf))


def _between(low: float, high: float) -> float:
    """Return a number from ``low``, itself allowed, to below ``high``."""
    middle = low + (high - low) / 2
    return middle if low < middle < high else low


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Range:
    """Times from ``next_s`` to before ``until_s`` at which an iteration may end."""

    next_s: float
    until_s: float
    low: Counts
    """(n,) what the workers make by any time before ``next_s``."""
    high: Counts
    """(n,) what they make by ``until_s``."""
    fewest: int
    """No fewer workers make the total by a time of the range."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shortest:
    """The shortest iteration."""

    iteration_s: float
    slowest_s: float
    """When the slowest worker ends: the least time by which ``number`` workers can."""
    sizes: Counts
    """(n,) most samples that each worker makes by then."""
    number: int
    """Most workers that can take part without making the iteration longer."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Best:
    """The best iteration seen, and whether a range of times can hold a better one."""

    fewest: Callable[[Counts], int]
    largest: Callable[[Counts], int]
    value: Finish
    iteration_s: float = math.inf
    number: int = 0
    at_s: float = math.inf
    sizes: Counts | None = None

    def look(self, at_s: float, sizes: Counts) -> int:
        """See what an iteration takes whose slowest worker ends at ``at_s``; return the fewest workers, 0 for none."""
        fewest = self.fewest(sizes)
        if not fewest or (found := self.value(at_s, fewest)) > self.iteration_s:
            return fewest
        if found < self.iteration_s:
            self.iteration_s, self.number = found, 0
        if self._more(at_s, sizes):
            self.number = self._most(at_s, max(fewest, self.number), self.largest(sizes))
            self.at_s, self.sizes = at_s, sizes
        return fewest

    def may_win(self, bound: float, part: _Range) -> bool:
        """Return whether a range with no iteration below ``bound`` may hold a shorter one, or an equal one of more workers."""
        return bound < self.iteration_s or (bound == self.iteration_s and self._more(part.next_s, part.high))

    def _more(self, from_s: float, until: Counts) -> bool:
        """Return whether more workers than the best's may take part from ``from_s`` on if each makes at most ``until``."""
        return self.largest(until) > self.number and self.value(from_s, self.number + 1) <= self.iteration_s

    def _most(self, at_s: float, number: int, largest: int) -> int:
        """Return the most workers up to ``largest``, of which ``number`` are not too many, that keep the iteration."""
        while number < largest:
            middle = number + (largest - number + 1) // 2
            if self.value(at_s, middle) <= self.iteration_s:
                number = middle
            else:
                largest = middle - 1
        return number


def shortest(
    fewest: Callable[[Counts], int], largest: Callable[[Counts], int], value: Finish, curves: Curves, most: Counts
) -> Shortest | None:
    """Return the shortest iteration over all times of the slowest worker; None where all make too little.

    Args:
        fewest: from (n,) capacities to the least number of workers that make the whole batch, 0 where all together do not;
            never rising with capacities (0 counting as infinite).
        largest: from (n,) capacities to the most workers that can take part, with a sample at least for each; no less than
            ``fewest``, never falling with capacities.
        value: from the seconds of the slowest worker and the number of workers to those of the iteration; never falling.
        curves: seconds over batch size.
        most: (n,) most samples.

    Of equal iterations the one with most workers is taken, and of those the one whose slowest worker ends first. Exact: what
    decides are the given functions' own numbers.
    """
    whole = _earliest(lambda sizes: fewest(sizes) > 0, curves, 0, most)
    if whole is None:
        return None
    best = _Best(fewest=fewest, largest=largest, value=value)
    waiting: list[tuple[float, int, _Range]] = []
    order = itertools.count()

    def push(part: _Range) -> None:
        if part.next_s < part.until_s and best.may_win(bound := value(part.next_s, part.fewest), part):
            heapq.heappush(waiting, (bound, next(order), part))

    best.look(whole.at_s, whole.sizes)
    until_s = _last_s(curves, most > 0, most)
    everything = best.look(until_s, most)
    rest = _next_s(curves, whole.sizes, most)
    push(_Range(next_s=rest, until_s=until_s, low=whole.sizes, high=most, fewest=everything))
    while waiting:
        bound, _, part = heapq.heappop(waiting)
        if not best.may_win(bound, part):  # something better was found since
            continue
        middle = _between(part.next_s, part.until_s)
        while value(middle, part.fewest) > best.iteration_s:  # where nothing can win any more
            middle = _between(part.next_s, middle)
        sizes = capacities(curves, middle, part.low, part.high)
        at_s, next_s = _last_s(curves, sizes > 0, sizes), _next_s(curves, sizes, most)
        if number := best.look(at_s, sizes):
            push(_Range(next_s=part.next_s, until_s=at_s, low=part.low, high=sizes, fewest=number))
        push(_Range(next_s=next_s, until_s=part.until_s, low=sizes, high=part.high, fewest=part.fewest))
    return _first(best, curves, most)


def _first(best: _Best, curves: Curves, most: Counts) -> Shortest:
    """Return the best iteration with the slowest worker as early as its number of workers can have it."""
    assert best.sizes is not None
    number, at_s, sizes = best.number, best.at_s, best.sizes
    # Where any earlier time would have made an iteration of so many workers shorter, none of them can do it.
    if best.value(math.nextafter(at_s, 0.0), number) >= best.iteration_s:
        reach = _earliest(lambda made: 0 < best.fewest(made) <= number <= best.largest(made), curves, 0, sizes)
        assert reach is not None  # the best itself is one
        at_s, sizes = reach.at_s, reach.sizes
    return Shortest(iteration_s=best.iteration_s, slowest_s=at_s, sizes=sizes, number=number)
