"""How full the devices are when every job has at least a given relative throughput: proven bounds, and whole devices.

At a given floor each job has one step time, the slowest that it may have. Its devices are chosen so that the fullest
device type is as empty as possible (the *load*: devices in use over devices there are, 1 when a type is full). The
linear program over columns gives the load for parts of columns; prices of devices that add up to 1 over all devices
bound it from below: no choice has a smaller load than all jobs' cheapest devices cost (Lagrange). Above 1, the floor
cannot be had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.placement.job_columns import (
    ROUNDING,
    JobTable,
    cover,
    cover_whole,
    limit_prices,
    linear_program,
    taken_whole,
)
from ddltool.analyzers.placement.step_times import Counts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# More ESTs than this are put together in so many parts before devices are chosen whole for them.
_PARTS = 512
# Jobs are looked at together in dynamic programs of about the same length: those with up to so many ESTs.
_SHORT = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is known about a floor."""

    prices: Floats
    """(T,) of devices; the scarce types' are high."""
    impossible: bool
    """Proven: the floor cannot be had."""
    columns: tuple[tuple[int, Counts], ...]
    """(job, devices) of the linear program; empty when it has no load of 1 or less."""
    parts: Floats
    """How much of each of the columns the linear program takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """Questions for the cheapest devices, L of them; several for a job whose limits have a price of their own."""

    jobs: Ints
    rooms: Ints
    """(L, T)"""
    available: Ints
    """(L, T)"""
    workers: Ints
    extra: Floats
    """(L, T) what a device costs beyond its price, in mean prices."""
    credit: Floats
    """(L,) what the job has of that for free."""
    starts: Ints
    """(M,) the first line of each mode; a mode's lines are trials of prices for the same choice of devices."""


def at_least(table: JobTable, floor: float) -> Ints:
    """Return the places of the step times that may give a job ``floor`` of what it makes alone.

    Where the table is thinned, the last of them may be a little too slow: what it does not allow is impossible.
    """
    return np.flatnonzero(table.best_values >= table.least_worth(floor))


def load_at(
    tables: Sequence[JobTable], counts: Ints, floor: float, prices: Floats, until: Callable[[], bool], rounds: int = 25
) -> Load:
    """Return whether every job can have ``floor``, by generating columns from ``prices`` (T,) on; they join the tables.

    Ends as soon as one of the two is known, when no column is new, when a linear program is not solved, or when
    ``until()`` says so.
    """
    lines = lines_at(tables, floor)
    if lines is None:
        return Load(prices=prices, impossible=True, columns=(), parts=np.zeros(0))
    prices = prices / float(prices @ counts)
    for _ in range(rounds):
        least, columns = cheapest(lines, prices, len(tables))
        if least.sum() > 1 + ROUNDING:
            return Load(prices=prices, impossible=True, columns=(), parts=np.zeros(0))
        fresh = sum(tables[job].add(row) for job, row in columns)  # all of them: any() would stop at the first
        solved = _master(tables, counts, floor)
        if solved is None:
            break
        value, now, pool, parts = solved
        if value <= 1 + ROUNDING:
            return Load(prices=now, impossible=False, columns=tuple(pool), parts=parts)
        # The middle of old and new prices is nearer to the best ones than the new alone, which jump.
        prices = now if not fresh else 0.5 * (prices + now)
        prices = prices / float(prices @ counts)
        if not fresh or until():
            break
    return Load(prices=prices, impossible=False, columns=(), parts=np.zeros(0))


def lines_at(tables: Sequence[JobTable], floor: float) -> Lines | None:
    """Return what to ask for at a floor; None: a job cannot have it."""
    jobs: list[int] = []
    starts: list[int] = []
    rooms, available, extra, credit = [], [], [], []
    for job, table in enumerate(tables):
        slowest = at_least(table, floor)
        if not len(slowest):
            return None
        kinds = len(table.available)
        trials = limit_prices(table)
        modes = np.eye(kinds, dtype=np.int64) if table.problem.single_type else np.ones((1, kinds), dtype=np.int64)
        for mode in modes[(modes * table.available).any(axis=1)]:
            starts.append(len(jobs))
            for cost, free in trials:
                jobs.append(job)
                rooms.append(table.rooms[slowest[-1]] * mode * (table.available > 0))
                available.append(table.available * mode)
                extra.append(cost)
                credit.append(free)
    return Lines(
        jobs=np.array(jobs),
        rooms=np.array(rooms),
        available=np.array(available),
        workers=np.array([tables[job].problem.max_workers for job in jobs]),
        extra=np.array(extra),
        credit=np.array(credit),
        starts=np.array(starts),
    )


def cheapest(lines: Lines, prices: Floats, number: int) -> tuple[Floats, list[tuple[int, Counts]]]:
    """Return (J,) what each job's devices cost at least at ``prices`` (T,), and columns (job, devices)."""
    unit = float(prices.mean())
    each = prices + unit * lines.extra
    cost, rows, holds = cover(lines.rooms, lines.available, each, lines.workers)
    columns = [(int(lines.jobs[line]), tuple(rows[line].tolist())) for line in np.flatnonzero(holds)]
    for low, high in ((0, _SHORT), (_SHORT, _PARTS), (_PARTS, np.inf)):
        part = np.flatnonzero((lines.workers > low) & (lines.workers <= high) & holds)
        if len(part):
            rooms, workers = _in_parts(lines.rooms[part], lines.workers[part], up=True)
            whole, choice = cover_whole(rooms, each[part], workers)
            cost[part] = np.maximum(cost[part], whole)
            if high > _PARTS:
                rooms, workers = _in_parts(lines.rooms[part], lines.workers[part], up=False)
                _, choice = cover_whole(rooms, each[part], workers)
            columns += zip(lines.jobs[part].tolist(), taken_whole(rooms, choice, workers), strict=True)
    cost -= unit * lines.credit
    # Of a job's modes (one device type each) the cheapest counts, of its trials in a mode the dearest, which is nearest.
    least = np.full(number, np.inf)
    np.minimum.at(least, lines.jobs[lines.starts], np.maximum.reduceat(cost, lines.starts))
    return least, columns


def _in_parts(rooms: Ints, workers: Ints, *, up: bool) -> tuple[Ints, Ints]:
    """Return (L, T) rooms and (L,) workers in ``_PARTS`` parts where there are more workers than that.

    Rooms rounded up keep a bound a bound; rounded down, what holds the parts holds the workers.
    """
    goal = np.minimum(workers, _PARTS)
    over = rooms * goal[:, None]
    return (-(-over // workers[:, None]) if up else over // workers[:, None]), goal


def _pool(tables: Sequence[JobTable], floor: float) -> list[tuple[int, Counts]]:
    """Return the columns (job, devices) with which the job has the floor."""
    return [
        (job, row)
        for job, table in enumerate(tables)
        for row, worth in table.columns.items()
        if worth >= table.least_worth(floor)
    ]


def _master(
    tables: Sequence[JobTable], counts: Ints, floor: float
) -> tuple[float, Floats, list[tuple[int, Counts]], Floats] | None:
    """Return the least load in parts of the columns, prices (T,), the columns, and their parts; None: it is not known.

    Every job has a column, for it is on its own with all devices in one.
    """
    from scipy import sparse

    pool = _pool(tables, floor)
    owners = np.array([job for job, _ in pool])
    use = np.array([row for _, row in pool], dtype=float)
    picks = sparse.csr_matrix((np.ones(len(pool)), (owners, np.arange(len(pool)))), shape=(len(tables), len(pool) + 1))
    made = linear_program(
        np.append(np.zeros(len(pool)), 1.0),
        A_ub=sparse.csr_matrix(np.column_stack([use.T, -counts.astype(float)])),
        b_ub=np.zeros(len(counts)),
        A_eq=picks,
        b_eq=np.ones(len(tables)),
        method="highs-ds",  # simplex: a corner, with fewer split jobs than there are types
    )
    if made is None:
        return None
    prices = np.maximum(0.0, -made.ineqlin.marginals)
    total = float(prices @ counts)
    return float(made.fun), prices / total if total > 0 else np.ones(len(counts)) / counts.sum(), pool, made.x[:-1]


def whole_columns(load: Load, counts: Ints, number: int, steps: int = 400) -> tuple[list[Counts], bool]:
    """Return one column for each of the ``number`` jobs and whether they fit within the devices ``counts`` (T,).

    From the largest part of each job on, always the exchange that takes most off what is too much, cheap ones first.
    """
    owners = np.array([job for job, _ in load.columns])
    use = np.array([row for _, row in load.columns], dtype=np.int64)
    order = np.lexsort((-load.parts, owners))
    chosen = order[np.searchsorted(owners[order], np.arange(number))]
    cost = use @ load.prices
    total = use[chosen].sum(axis=0)
    for _ in range(steps):
        over = float((np.maximum(0, total - counts) / counts).sum())
        if over == 0:
            break
        after = total - use[chosen][owners] + use
        excess = (np.maximum(0, after - counts) / counts).sum(axis=1)
        gain = cost - cost[chosen][owners]
        best = int(np.lexsort((gain, excess))[0])
        if excess[best] >= over - 1e-12:
            break
        total = after[best]
        chosen[owners[best]] = best
    return [load.columns[place][1] for place in chosen], bool((total <= counts).all())
