"""Which devices of each type take part, and how many samples each, so that a step is shortest: exact, by types.

A step with the types' curves t_k and n_k devices of type k ends at T at the earliest if ``sum_k n_k c_k(T) >= X``, where
c_k(T) is the most samples that one device makes by T (see :mod:`ddltool.analyzers.balancing.minmax`). So the best devices
at T are those that maximise this sum within the limits of devices and money: without prices the ones with the largest c_k,
with prices a knapsack with one whole number per type, which CP-SAT solves where bounds do not decide it. The sum never
falls with T, so a bisection finds the least T over all choices of devices at once. Devices of a type are alike, so
100,000 of them cost no more than one.

Where synchronisation takes longer the more devices take part, :func:`~.searching.shortest` weighs the fewest devices
that make the batch by T for all T at once. With prices each number of devices has a least T of its own, and ranges of
numbers that cannot win are not looked into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ddltool.analyzers.balancing.curves import Counts, Curves
from ddltool.analyzers.balancing.searching import earliest, shortest

Finish = Callable[[float, int], float]
"""From the seconds of the slowest device and the number of devices to those of the whole step; never falling in either."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """K device types: how many there are, and what may be used of them."""

    counts: tuple[int, ...]
    max_devices: int | None = None
    prices: tuple[int, ...] | None = None
    """Whole prices of one device of each type; None: they cost nothing."""
    budget: int = 0
    """Most that all used devices may cost; read where there are prices."""
    single_type: bool = False

    def price(self, numbers: Sequence[int]) -> int:
        """Return what so many devices of each type cost."""
        return sum(each * number for each, number in zip(self.prices or (), numbers, strict=False))

    def price_of(self, kind: int, number: int) -> int:
        """Return what so many devices of one type cost."""
        return 0 if self.prices is None else self.prices[kind] * number

    def allows(self, kind: int, left: int, money: int | None = None) -> int:
        """Return how many devices of type ``kind`` a limit of ``left`` devices and of money allow."""
        count = min(self.counts[kind], left)
        if self.prices is None or self.prices[kind] == 0:
            return count
        return min(count, (self.budget if money is None else money) // self.prices[kind])


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
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
    search = _Search(curves=curves, offer=offer, total=total, finish=finish or (lambda slowest, devices: slowest))
    kinds = range(len(offer.counts))
    sets = [(kind,) for kind in kinds] if offer.single_type else [tuple(kinds)]
    found = [made for kinds in sets if (made := search.best(kinds)) is not None]
    return min(found, key=lambda made: made.iteration_s, default=None)


def spread(curves: Curves, numbers: Sequence[int], total: int) -> tuple[Row, ...] | None:
    """Return the sizes with the least slowest device where ``numbers`` devices of each type all take part.

    Each gets a sample at least; None where they cannot take ``total``. Greedy by marginal time, by types.
    """
    most = np.minimum(curves.limits, total)
    used = [kind for kind, number in enumerate(numbers) if number]
    devices = sum(numbers)
    if not used or devices > total or min(int(most[kind]) for kind in used) < 1:
        return None
    if sum(numbers[kind] * int(most[kind]) for kind in used) < total:
        return None
    most = np.where(np.asarray(numbers) > 0, most, 0)
    low = high = np.minimum(most, 1)
    if devices < total:
        reach = earliest(lambda sizes: _sum(numbers, sizes) >= total, curves, 1, most)
        assert reach is not None  # the limits admit the total
        low, high = reach.before, reach.sizes
    left = total - _sum(numbers, low)
    rows: list[Row] = []
    for kind in used:
        more = int(high[kind] - low[kind])  # samples that end exactly at the optimum
        given = min(left, numbers[kind] * more)
        left -= given
        full, part = divmod(given, more) if more else (0, 0)
        sizes = ((full, int(high[kind])), (int(part > 0), int(low[kind]) + part))
        rows += [Row(kind=kind, devices=number, size=size) for number, size in sizes if number]
        if rest := numbers[kind] - full - int(part > 0):
            rows.append(Row(kind=kind, devices=rest, size=int(low[kind])))
    return tuple(rows)


def seconds_of(curves: Curves, row: Row) -> float:
    """Return the seconds of a row's devices."""
    sizes = np.ones(len(curves.limits), dtype=np.int64)
    sizes[row.kind] = row.size
    return float(curves.seconds(sizes)[row.kind])


def _sum(numbers: Sequence[int], each: Counts) -> int:
    """Return the sum over devices, in whole numbers of any size."""
    return sum(number * int(size) for number, size in zip(numbers, each.tolist(), strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Search:
    curves: Curves
    offer: Offer
    total: int
    finish: Finish

    def best(self, kinds: tuple[int, ...]) -> Chosen | None:
        """Return the best choice among the types ``kinds``, over all numbers of devices."""
        largest = min(self.total, sum(self.offer.counts[kind] for kind in kinds))
        if self.offer.max_devices is not None:
            largest = min(largest, self.offer.max_devices)
        if self.offer.prices is None:
            return self._unpriced(largest, kinds)
        best = self._with_most(largest, kinds)
        if best is None:
            return None
        ranges = [(1, largest - 1, best.slowest_s)]
        while ranges:
            first, last, slowest = ranges.pop()
            # More devices never make the slowest later: `slowest` bounds the whole range from below.
            if first > last or self.finish(slowest, first) >= best.iteration_s:
                continue
            middle = (first + last) // 2
            found = self._with_most(middle, kinds)
            if found is not None:
                if found.iteration_s < best.iteration_s:
                    best = found
                ranges.append((first, middle - 1, found.slowest_s))
            ranges.append((middle + 1, last, slowest))
        return best

    def _unpriced(self, largest: int, kinds: tuple[int, ...]) -> Chosen | None:
        """Return the best choice of at most ``largest`` devices where they cost nothing."""

        def fewest(sizes: Counts) -> int:
            left, used = self.total, 0
            for kind in np.argsort(-sizes, kind="stable").tolist():
                if not (size := int(sizes[kind])):
                    break
                number: int = min(self.offer.counts[kind], largest - used, -(-left // size))
                left -= number * size
                used += number
                if left <= 0:
                    return used
            return 0

        def room(sizes: Counts) -> int:
            return min(largest, _sum(self.offer.counts, (sizes > 0).astype(np.int64)))

        found = shortest(fewest, room, self.finish, self.curves, self._most(kinds))
        if found is None:
            return None
        numbers = self._pick(found.sizes, found.number, None)
        assert numbers is not None
        return self._chosen(numbers)

    def _most(self, kinds: tuple[int, ...]) -> Counts:
        """Return (K,) the most samples of a device of each type, 0 for those outside ``kinds`` or of which there are none."""
        mine = np.zeros(len(self.offer.counts), dtype=bool)
        mine[list(kinds)] = True
        most: Counts = np.minimum(self.curves.limits, self.total)
        return np.where(mine & (np.asarray(self.offer.counts) > 0), most, 0)

    def _with_most(self, devices: int, kinds: tuple[int, ...]) -> Chosen | None:
        """Return the best choice of at most ``devices`` devices."""
        most = self._most(kinds)
        reach = earliest(lambda sizes: self._pick(sizes, devices, self.total) is not None, self.curves, 0, most)
        if reach is None:
            return None
        numbers = self._pick(reach.sizes, devices, None)
        assert numbers is not None
        return self._chosen(numbers)

    def _chosen(self, numbers: list[int]) -> Chosen:
        """Return the choice of so many devices of each type, which can all take part."""
        rows = spread(self.curves, numbers, self.total)
        assert rows is not None  # the sum of what they make by `at` reaches the total
        slowest = max(seconds_of(self.curves, row) for row in rows)
        return Chosen(
            rows=rows,
            numbers=tuple(numbers),
            slowest_s=slowest,
            iteration_s=self.finish(slowest, sum(numbers)),
        )

    def _pick(self, each: Counts, devices: int, wanted: int | None) -> list[int] | None:
        """Return numbers of devices that make most, or (``wanted``) that make as much; None where none do."""
        largest = self._greedy(each, devices, np.argsort(-each, kind="stable"), priced=False)
        reached = _sum(largest, each)
        if wanted is not None and reached < wanted:
            return None
        if self.offer.prices is None or self.offer.price(largest) <= self.offer.budget:
            return largest
        value = each / np.maximum(np.asarray(self.offer.prices, dtype=np.float64), 0.5)
        cheap = self._greedy(each, devices, np.argsort(-value, kind="stable"), priced=True)
        if wanted is not None and _sum(cheap, each) >= wanted:
            return cheap
        return self._knapsack(each, devices, wanted)

    def _greedy(self, each: Counts, devices: int, order: Counts, *, priced: bool) -> list[int]:
        numbers, left, money = [0] * len(each), devices, self.offer.budget
        for kind in order.tolist():
            if each[kind] < 1:
                continue
            number = self.offer.allows(kind, left, money) if priced else min(self.offer.counts[kind], left)
            numbers[kind] = number
            left -= number
            money -= self.offer.price_of(kind, number) if priced else 0
        return numbers

    def _knapsack(self, each: Counts, devices: int, wanted: int | None) -> list[int] | None:
        """Return the numbers of devices by CP-SAT: exact, one whole variable per type."""
        from ortools.sat.python import cp_model

        assert self.offer.prices is not None
        model = cp_model.CpModel()
        # More devices of one type than make the whole batch are not needed, and products stay within 64 bits.
        most = [
            min(self.offer.allows(kind, devices), -(-self.total // size)) if size else 0
            for kind, size in enumerate(each.tolist())
        ]
        used = [model.new_int_var(0, number, str(kind)) for kind, number in enumerate(most)]
        model.add(cp_model.LinearExpr.sum(used) <= devices)
        model.add(cp_model.LinearExpr.weighted_sum(used, list(self.offer.prices)) <= self.offer.budget)
        makes = cp_model.LinearExpr.weighted_sum(used, each.tolist())
        if wanted is None:
            model.maximize(makes)
        else:
            model.add(makes >= wanted)
        solver = cp_model.CpSolver()
        solver.parameters.num_workers = 1
        status = solver.solve(model)
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return [int(solver.value(variable)) for variable in used]
        return None
