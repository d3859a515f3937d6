"""The allocation of shared devices to several jobs at once. Start at :func:`solve_jobs`.

A job's share is its throughput over that with every device to itself. A line is one step time of one job, with the job's
device counts as variables. A single mixed-integer program, solved by HiGHS, picks at most one line for each job and a whole
number of devices for the line, within the shared devices. The share of a line is at most that of its step time, and at most
that of its devices if they computed without a pause: the second limit keeps the linear relaxation close to whole devices,
so that step times may be grouped where there are many. The bound of the program holds with groups too, and the share of each
job is recomputed exactly from its devices.

The largest smallest share ("max-min") is found by bisection over the shares: the same program, with one line for each job,
decides whether all jobs can reach a share at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from ddltool.analyzers.job.placement.est import solve_est
from ddltool.analyzers.job.placement.problem import DeviceType, Problem
from ddltool.analyzers.job.placement.steps import (
    Counts,
    best_step,
    counts_of,
    evaluate,
    plan_of,
    step_table,
    step_time_of,
)
from ddltool.arrays import Flags, Floats, Ints
from ddltool.errors import Infeasible, InputError, NotProven
from ddltool.graph import natural_key
from ddltool.job import LARGEST
from ddltool.plans import Plan
from ddltool.results import JointJob, JointPlan, Sharing

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

Sharings = list[Counts | None]
"""Devices of each shared type for each job; None: the job waits."""
# Most lines of a program over all jobs; larger tables are grouped, each into _MIN_LINES groups or more.
_MAX_LINES, _MIN_LINES = 1500, 6
# Most groups of step times in one job's table.
_MAX_GROUPS = 1500
# Programs of at most _EXACT_LINES lines are solved to a gap of 0, larger ones to _GAP_LIMIT.
_EXACT_LINES, _GAP_LIMIT = 400, 1e-3
# With "max-min" the smallest share has this part of the time limit, and the sum after it at most _SUM_LIMIT_S seconds.
_FLOOR_SHARE, _SUM_LIMIT_S = 0.6, 4.0
# Time limit of one program that decides whether all jobs reach a share.
_FLOOR_LIMIT_S = 1.0
# Gaps below this are rounding errors.
_ROUNDING = 1e-7
# Relative difference up to which step times and shares are equal: the same fractions computed in another order.
_SAME = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class JobTable:
    """One job's useful step times in S groups, fastest first, over the T shared device types."""

    problem: Problem
    type_indices: tuple[int, ...]
    """For each of the problem's types, its index among the T shared types."""
    available: Ints
    """(T,) devices of each shared type that the job may use."""
    best_shares: Floats
    """(S,) share of the job in a group's fastest step."""
    capacities: Ints
    """(S, T) EST capacity of one device in a group's slowest step; 0 for types that the job cannot use."""
    alone: float
    """The job's mini-batches per second with every device to itself."""
    weight: float
    """Weight of the job's share in the sum over all jobs."""

    def share(self, devices: Sequence[int]) -> float | None:
        """Return the job's share on ``devices`` (T,): its throughput there over that with every device to itself.

        None where the devices break a constraint of the job, the required throughput included.
        """
        counts = tuple(int(devices[type_index]) for type_index in self.type_indices)
        has_unusable_devices = sum(counts) != sum(devices)  # of types that the job does not name
        if has_unusable_devices or not self.problem.allows(counts):
            return None
        step = best_step(self.problem, counts)
        if step is None or step > self.problem.slowest_step:
            return None
        return float(self.problem.max_workers / step) / self.alone

    def over_shared_types(self, values: Sequence[float]) -> Floats:
        """Return ``values``, one per type of the problem, as (T,) values of the shared types; 0 for types of other jobs."""
        shared_values = np.zeros(len(self.available))
        shared_values[list(self.type_indices)] = values
        return shared_values

    def at_least(self, floor: float) -> Self:
        """Return the table without the step times that are too slow for the share ``floor``.

        The table's problem then requires the throughput of that share.
        """
        groups = self._groups_with_share(floor)
        least_per_s = Fraction(floor * (1 - _SAME) * self.alone)
        if self.problem.min_throughput is not None:
            least_per_s = max(self.problem.min_throughput, least_per_s)
        problem = replace(self.problem, min_throughput=least_per_s)
        return replace(self, problem=problem, best_shares=self.best_shares[groups], capacities=self.capacities[groups])

    def slowest_with_share(self, floor: float) -> Self:
        """Return the table with only the slowest group that reaches the share ``floor``, or with no group.

        Devices have their largest capacity in the slowest step. A group's slowest step may be slightly too slow for the share.
        So an infeasible program over such tables proves the share impossible, but a feasible one does not prove it possible.
        """
        slowest_group = self._groups_with_share(floor)[-1:]
        return replace(self, best_shares=self.best_shares[slowest_group], capacities=self.capacities[slowest_group])

    def _groups_with_share(self, floor: float) -> Ints:
        """Return the indices of the groups whose fastest step reaches the share ``floor``, up to rounding errors."""
        return np.flatnonzero(self.best_shares >= floor * (1 - _SAME))

    def grouped(self, lines: int) -> Self:
        """Return the table with at most ``lines`` groups: neighbours are joined, each group over the same ratio of step times.

        A joined group has the share of its fastest step and the capacities of its slowest one, so that it allows everything
        that its parts allow.
        """
        if len(self.best_shares) <= lines:
            return self
        first, last = _group_bounds(1 / self.best_shares, lines)
        return replace(self, best_shares=self.best_shares[first], capacities=self.capacities[last])


class SharingFound(NamedTuple):
    """The sharing that a program found, and its bound."""

    devices: Sharings | None
    """None: no sharing exists, or none was found in time."""
    bound: float
    """No sharing has a larger weighted sum of shares; -infinity: there is none."""


def solve_jobs(
    problems: Sequence[Problem],
    devices: Mapping[str, int],
    *,
    weights: Sequence[float] | None = None,
    objective: Sharing = "sum",
    time_limit_s: float = 10.0,
    seed: int = 0,
) -> JointPlan:
    """Return the plan of each job; no device belongs to two jobs, and every job keeps its own constraints.

    The result's ``gap`` is relative to a bound on every sharing; ``file`` of a job in it is its problem's name.

    Args:
        problems: the jobs; a job uses the types that its problem names, and at most as many devices as it offers.
        devices: shared devices by type.
        weights: of the jobs, above 0; None: equal.
        objective: "sum" maximises the weighted sum of shares (throughput over that with every device to itself), where a job
            may wait; "max-min" maximises the smallest share, then the sum.
        time_limit_s: seconds for all programs together; the best sharing by then is returned.
        seed: of the solver that finds what each job reaches alone.

    Raises Infeasible where a job cannot run even alone, NotProven where a job's throughput alone is not proven to be the best,
    InputError for no jobs, a job none of whose types is shared, or weights that are not positive.
    """
    started = time.perf_counter()
    deadline = started + time_limit_s
    names = sorted((name for name, count in devices.items() if count > 0), key=natural_key)
    counts = np.array([devices[name] for name in names], dtype=np.int64)
    tables = _tables(problems, names, counts, weights or [1.0] * len(problems), seed)
    # A greedy sharing first; with "max-min" the highest floor (a share that all jobs reach); then the largest sum above it.
    chosen = _greedy_sharing(tables, counts)
    must_serve_all = False
    floor_bound = 1.0  # of the smallest share: no share exceeds 1
    if objective == "max-min":
        floor_deadline = time.perf_counter() + _FLOOR_SHARE * (deadline - time.perf_counter())
        floor, floor_bound, floor_sharing = _highest_floor(tables, counts, floor_deadline)
        if floor_sharing is not None:
            tables = [table.at_least(floor) for table in tables]
            chosen = floor_sharing
            must_serve_all = True
        deadline = min(deadline, time.perf_counter() + _SUM_LIMIT_S)  # the sum is only the second objective
    max_groups = max(_MIN_LINES, _MAX_LINES // len(tables))
    program_sharing, bound = solve_sharing(
        [table.grouped(max_groups) for table in tables],
        counts,
        must_serve_all=must_serve_all,
        limit_s=max(0.05, deadline - time.perf_counter()),
    )
    if program_sharing is not None:
        # HiGHS may stop at its time limit with a worse sharing than the greedy one; and without a floor that all jobs reach,
        # the sharing with the largest sum may let a job wait that the greedy one serves.
        smallest_first = objective == "max-min" and not must_serve_all
        chosen = max(chosen, program_sharing, key=lambda sharing: _merit(tables, sharing, smallest_first))
    shares = _shares_of(tables, chosen)
    value = _weighted_sum(tables, chosen)
    if objective == "max-min":
        value = min(shares)
        bound = floor_bound
    gap = max(0.0, 1 - value / bound) if bound > 0 else 0.0
    if gap <= _ROUNDING:
        gap = 0.0
    seconds = time.perf_counter() - started
    jobs = [
        JointJob(file=table.problem.job, relative=share, plan=_plan(table, row_counts, gap, seconds), waits=None)
        for table, row_counts, share in zip(tables, chosen, shares, strict=True)
    ]
    status = "optimal" if gap == 0 else "feasible"
    # Rounding may leave the bound just below the value; where the value is proven best, it is the bound.
    bound = max(bound, value) if gap else value
    return JointPlan(
        objective=objective, value=value, bound=bound, gap=gap, status=status, solve_seconds=seconds, jobs=jobs
    )


def idle_throughput(problem: Problem, devices: Mapping[str, int], plans: Sequence[Plan | None]) -> float:
    """Return the mini-batches per second that a job would reach on those shared ``devices`` that no plan uses.

    It is the best EST plan's, and 0 where the job cannot run on them. The throughput that the job requires is ignored.
    ``problem``: the job's; ``plans``: of all jobs, None for those that wait, as this one does.
    """
    devices_left = dict(devices)
    for plan in plans:
        for row in () if plan is None else plan.assignments:
            devices_left[row.device_type] -= row.devices
    offered = _offered_devices(problem, devices_left)
    try:
        return solve_est(replace(problem, devices=offered, min_throughput=None)).throughput if offered else 0.0
    except Infeasible:
        return 0.0


def _offered_devices(problem: Problem, devices: Mapping[str, int]) -> tuple[DeviceType, ...]:
    """Return the job's device types that are also in ``devices`` (by type), each with the smaller of the two counts."""
    usable = [device for device in problem.devices if devices.get(device.name)]
    return tuple(replace(device, count=min(device.count, devices[device.name])) for device in usable)


def _plan(table: JobTable, shared_counts: Counts | None, gap: float, seconds: float) -> Plan | None:
    """Return the plan of a job on ``shared_counts`` (T,) devices of the shared types; None for a job that waits.

    ``gap`` and ``seconds`` are those of the whole allocation.
    """
    if shared_counts is None:
        return None
    figures = evaluate(table.problem, tuple(shared_counts[type_index] for type_index in table.type_indices))
    return plan_of(table.problem, figures, optimal=gap == 0, gap=gap, solve_seconds=seconds)


def _tables(
    problems: Sequence[Problem], names: Sequence[str], counts: Ints, weights: Sequence[float], seed: int
) -> list[JobTable]:
    """Return each job's table over the shared types, after solving what the job reaches with every device to itself.

    ``names`` and ``counts`` (T,): the shared types and their numbers of devices. Raises as :func:`solve_jobs` does.
    """
    if not problems:
        raise InputError("jobs", "there are none", "give one job at least")
    if len(weights) != len(problems) or not all(0 < weight <= LARGEST for weight in weights):
        problem_text = f"must be one positive number for each job, at most {LARGEST:g}"
        raise InputError("weights", problem_text, "leave them out for equal weights")
    tables = []
    shared = dict(zip(names, counts.tolist(), strict=True))
    for problem, weight in zip(problems, weights, strict=True):
        offered = _offered_devices(problem, shared)
        if not offered:
            raise InputError(f"{problem.job}:devices", "none of its device types is there", f"there are {names}")
        problem = replace(problem, devices=offered)
        try:
            alone_plan = solve_est(problem, seed=seed)
        except Infeasible as error:
            raise Infeasible(f"{problem.job}: {error}") from None
        if alone_plan.gap > 0:  # shares over less than the best throughput could exceed 1, and no bound would hold
            raise NotProven(f"{problem.job}: what it reaches alone was not settled in {alone_plan.solve_seconds:.0f} s")
        tables.append(job_table(problem, names, counts, weight, step_time_of(problem, counts_of(problem, alone_plan))))
    return tables


def job_table(problem: Problem, names: Sequence[str], devices: Ints, weight: float, alone_step: Fraction) -> JobTable:
    """Return the table of one job.

    Args:
        names, devices: (T,) the shared types and their numbers of devices.
        weight: of the job's share in the sum over all jobs.
        alone_step: the smallest step time in seconds with all devices. Faster steps are left out as impossible, and so are
            steps that are too slow for the job's required throughput.
    """
    table = step_table(
        tuple(device.capability_per_s for device in problem.devices),
        problem.max_workers,
        tuple(device.most_ests for device in problem.devices),
    )
    type_indices = tuple(list(names).index(device.name) for device in problem.devices)
    first_step = int(np.searchsorted(table.seconds, float(alone_step) * (1 - _SAME)))
    end_step = int(np.searchsorted(table.seconds, float(problem.slowest_step) * (1 + _SAME), side="right"))
    # at least one step, although rounding may put ``end_step`` at ``first_step`` where only all devices are fast enough
    group_starts, group_ends = _group_bounds(table.seconds[first_step : max(end_step, first_step + 1)], _MAX_GROUPS)
    capacities = np.zeros((len(group_ends), len(names)), dtype=np.int64)
    capacities[:, list(type_indices)] = table.capacities[first_step + group_ends]
    available = np.zeros(len(names), dtype=np.int64)
    for device, type_index in zip(problem.devices, type_indices, strict=True):
        available[type_index] = min(problem.affordable(device), int(devices[type_index]))
    alone_throughput = float(problem.max_workers / alone_step)
    return JobTable(
        problem=problem,
        type_indices=type_indices,
        available=available,
        best_shares=table.throughputs[first_step + group_starts] / alone_throughput,
        capacities=capacities,
        alone=alone_throughput,
        weight=weight,
    )


def _group_bounds(seconds: Floats, max_groups: int) -> tuple[Ints, Ints]:
    """Return the indices of the first and of the last step time of each of G groups, both (G,), G <= ``max_groups``.

    ``seconds`` (S,): the step times, ascending. Each is a group of its own if there are few enough; else groups span equal
    ratios of step times.
    """
    edges = np.arange(len(seconds) + 1)
    if len(seconds) > max_groups:
        boundary_times = np.geomspace(seconds[0], seconds[-1], max_groups + 1)[1:-1]
        edges = np.unique([0, *np.searchsorted(seconds, boundary_times), len(seconds)])
    return edges[:-1], edges[1:] - 1


def _shares_of(tables: Sequence[JobTable], devices: Sharings) -> list[float]:
    """Return each job's share on its devices; 0 for a job that waits."""
    return [0.0 if row is None else table.share(row) or 0.0 for table, row in zip(tables, devices, strict=True)]


def _weighted_sum(tables: Sequence[JobTable], devices: Sharings) -> float:
    """Return the sum of the jobs' shares on their ``devices``, each times the job's weight."""
    pairs = zip(tables, _shares_of(tables, devices), strict=True)
    return sum(table.weight * share for table, share in pairs)


def _merit(tables: Sequence[JobTable], devices: Sharings, smallest_first: bool) -> tuple[float, float]:
    """Return the key by which sharings compare, larger is better: smallest share, then weighted sum of shares.

    Without ``smallest_first`` the smallest share does not count (0.0).
    """
    return min(_shares_of(tables, devices)) if smallest_first else 0.0, _weighted_sum(tables, devices)


def _greedy_sharing(tables: Sequence[JobTable], counts: Ints) -> Sharings:
    """Return a first sharing of ``counts`` (T,) devices, made without a solver.

    Each job in turn takes, of the devices that are left, the offer with which it has the largest share: one device of one type,
    or an equal part of all types. A job waits where no offer keeps its constraints.
    """
    devices_left = counts.copy()
    one_device = np.eye(len(counts), dtype=np.int64)  # (T, T) one device of each type in turn
    equal_part = counts // len(tables)
    chosen: Sharings = []
    for table in tables:
        offers = np.minimum(np.vstack([one_device, equal_part]), table.available)  # (T + 1, T)
        fitting_rows = [tuple(row) for row in offers[(offers <= devices_left).all(axis=1)].tolist()]
        shares = {row: share for row in fitting_rows if (share := table.share(row)) is not None}
        best = max(shares, key=shares.__getitem__, default=None)
        if best is not None:
            devices_left = devices_left - np.array(best)
        chosen.append(best)
    return chosen


def _highest_floor(tables: Sequence[JobTable], counts: Ints, deadline: float) -> tuple[float, float, Sharings | None]:
    """Return (highest floor found, upper bound on floors, sharing that reaches the floor found).

    A floor is a share that all jobs reach at once. ``counts`` (T,): shared devices; ``deadline``: value of
    ``time.perf_counter`` at which the search ends. The sharing is None where no program found one. The lowest floor is tried
    first, whatever the deadline. Then a bisection finds the highest floor with a sharing, and a second one, above it, the
    lowest floor that is proven impossible.
    """
    floors = np.unique(np.concatenate([table.best_shares for table in tables]))
    best_sharing: Sharings | None = None
    # Indices in ``floors``: -1 while no floor is reached, len(floors) while none is proven impossible.
    reached_index, barred_index = -1, len(floors)

    def try_floor(floor_index: int) -> bool | None:
        """Return whether some sharing of the devices gives every job the share ``floors[floor_index]`` or more.

        None: such a sharing is neither found nor proven impossible. Notes the best sharing so far, with the highest floor
        that it reaches, and the lowest floor that is proven impossible.
        """
        nonlocal best_sharing, reached_index, barred_index
        sharing, bound = find_floor_sharing(tables, counts, float(floors[floor_index]))
        if bound == -math.inf:  # proven impossible
            barred_index = min(barred_index, floor_index)
            return False
        if sharing is None:
            return None
        # It may reach a higher floor, or a lower one where step times are grouped: a group counts with the share of its
        # fastest step, and the devices may make its slowest one.
        smallest_share = min(_shares_of(tables, sharing))
        attained_index = int(np.searchsorted(floors, smallest_share * (1 + _SAME), side="right")) - 1
        if attained_index > reached_index:
            reached_index = attained_index
            best_sharing = sharing
        return True if reached_index >= floor_index else None

    try_floor(0)
    # First bisection: no sharing was found at ``high`` or above.
    high = barred_index
    while high - reached_index > 1 and time.perf_counter() < deadline:
        middle = (max(reached_index, 0) + high) // 2
        if not try_floor(max(middle, reached_index + 1)):
            high = max(middle, reached_index + 1)
    # Second bisection: ``low`` is not proven impossible, barred_index is.
    low = high
    while barred_index - low > 1 and time.perf_counter() < deadline:
        middle = (low + barred_index) // 2
        low = middle if try_floor(middle) is not False else low
    # Where step times are grouped, a share between two floors may be possible, so the barred floor itself is the bound.
    is_grouped = any(len(table.best_shares) >= _MAX_GROUPS for table in tables)
    bound_index = barred_index if is_grouped else barred_index - 1
    bound = float(floors[min(bound_index, len(floors) - 1)]) if barred_index else 0.0
    return float(floors[max(reached_index, 0)]), bound, best_sharing


def find_floor_sharing(tables: Sequence[JobTable], counts: Ints, floor: float) -> SharingFound:
    """Return a sharing of ``counts`` (T,) devices in which all jobs reach about the share ``floor``.

    The bound of the result is -infinity where that is proven impossible; its devices are None where no sharing was found.
    """
    floor_tables = [table.slowest_with_share(floor) for table in tables]
    if not all(len(table.best_shares) for table in floor_tables):
        return SharingFound(None, -math.inf)
    return solve_sharing(floor_tables, counts, must_serve_all=True, limit_s=_FLOOR_LIMIT_S, first_feasible=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lines:
    """The L lines of all jobs, job after job; a job that must keep to one device type has each step time once per type."""

    jobs: Ints
    """(L,) index of the job."""
    workers: Ints
    """(L,) ESTs of the job."""
    job_weights: Floats
    """(L,) weight of the job."""
    best_shares: Floats
    """(L,) the job's share with the fastest step of the line's group."""
    capacities: Ints
    """(L, T) ESTs of one device in the slowest step of the group; 0 for types that the line does not use."""
    available: Ints
    """(L, T) devices that the job may use; 0 for types that the line does not use."""
    speeds: Floats
    """(L, T) share that one device adds to the job if it computes without a pause."""
    limit_shares: Floats
    """(2, L, T) fraction of the job's limits on the number of devices and on the hourly price that one device uses."""

    @classmethod
    def of(cls, tables: Sequence[JobTable]) -> Self:
        """Return the lines of the tables, job after job; each group of step times makes a line.

        A job that must keep to one device type has a line per group and offered type; other jobs have one per group.
        """
        one_type_masks = np.eye(len(tables[0].available), dtype=np.int64)  # (T, T) a row of 0 and 1 for each type alone
        all_types_mask = one_type_masks.sum(axis=0)
        # (index of the job, its table, (T,) mask of the types that the lines use); each row makes a line per group
        table_rows = [
            (job, table, type_mask)
            for job, table in enumerate(tables)
            for type_mask in (one_type_masks if table.problem.single_type else [all_types_mask])
            if (type_mask * table.available).any()
        ]
        group_counts = [len(table.best_shares) for _, table, _ in table_rows]
        speeds, limit_shares = [], []
        for _, table, _ in table_rows:
            problem = table.problem
            price_limit = problem.max_price_micro
            rates = [float(device.capability_per_s) / table.alone for device in problem.devices]
            speeds.append(table.over_shared_types(rates))
            prices = [(device.price_micro or 0) / price_limit if price_limit else 0.0 for device in problem.devices]
            limit_shares.append(
                [np.full(len(one_type_masks), 1 / problem.device_limit), table.over_shared_types(prices)]
            )
        return cls(
            jobs=np.repeat([job for job, _, _ in table_rows], group_counts),
            workers=np.repeat([table.problem.max_workers for _, table, _ in table_rows], group_counts),
            job_weights=np.repeat([table.weight for _, table, _ in table_rows], group_counts),
            best_shares=np.concatenate([table.best_shares for _, table, _ in table_rows]),
            capacities=np.concatenate([table.capacities * type_mask for _, table, type_mask in table_rows]),
            available=np.repeat(
                [type_mask * table.available for _, table, type_mask in table_rows], group_counts, axis=0
            ),
            speeds=np.repeat(speeds, group_counts, axis=0),
            limit_shares=np.repeat(np.array(limit_shares).transpose(1, 0, 2), group_counts, axis=1),
        )

    @property
    def devices_alone(self) -> Ints:
        """(L, T) devices that hold every EST of the job when they are all of one type."""
        return np.asarray(-(-self.workers[:, None] // np.maximum(self.capacities, 1)))

    def constraints(self, *, with_rounded_cuts: bool) -> csr_matrix:
        """Return the matrix A, (R, L + L + L T), of the R constraints ``A (picked, share, count) <= 0`` on single lines.

        The variables: ``picked`` (L,) tells which lines are used, ``share`` (L,) their shares, ``count`` (L, T) their devices.
        ``with_rounded_cuts`` adds Chvatal-Gomory cuts, which whole numbers of devices obey anyway and fractions may not.
        """
        from scipy import sparse

        line_count, type_count = self.capacities.shape
        identity = sparse.identity(line_count, format="csr")
        zeros = sparse.csr_matrix((line_count, line_count))
        # Row l of a matrix over all counts has its T entries in the columns of line l.
        row_ends = np.arange(0, line_count * type_count + 1, type_count)
        column_indices = np.arange(line_count * type_count)

        def constraint_rows(
            pick: Floats | Ints | float,
            share: csr_matrix,
            counts: Floats | Ints,
            kept: Flags | slice,
        ) -> csr_matrix:
            """Return rows of A, one for each line l that ``kept`` (L,) chooses:

            ``pick[l] picked[l] + share[l] . all shares + counts[l] . count[l] <= 0``. ``pick``: (L,), or one for all lines;
            ``share``: (L, L), the identity or zeros; ``counts``: (L, T), coefficients of the line's numbers of devices.
            """
            count_columns = sparse.csr_matrix((counts.ravel(), column_indices, row_ends))
            picked_columns = identity.multiply(np.reshape(pick, (-1, 1)))
            return sparse.csr_matrix(sparse.hstack([picked_columns, share, count_columns], format="csr")[kept])

        all_rows = slice(None)
        blocks = [
            # The devices of a picked line hold every EST.
            constraint_rows(self.workers, zeros, -self.capacities, all_rows),
            # Its share is at most the share of its fastest step, and of its devices computing without a pause.
            constraint_rows(-self.best_shares, identity, np.zeros((line_count, type_count)), all_rows),
            constraint_rows(0.0, identity, -self.speeds, all_rows),
            # It keeps the job's own limits.
            *(
                constraint_rows(-1.0, zeros, limit_share, (self.available * limit_share).sum(axis=1) > 1)
                for limit_share in self.limit_shares
            ),
        ]
        for type_index in range(type_count):
            # Without this a fraction of a line could use all available devices of a type that cannot hold the whole job.
            type_mask = np.eye(type_count)[type_index] * np.ones((line_count, 1))
            is_short = (self.capacities[:, type_index] > 0) & (
                self.available[:, type_index] < self.devices_alone[:, type_index]
            )
            blocks.append(constraint_rows(-self.available[:, type_index], zeros, type_mask, is_short))
            if with_rounded_cuts:  # sum(capacity count) >= ESTs, divided by one type's capacity and rounded up
                capacity = np.maximum(self.capacities[:, type_index], 1)
                blocks.append(
                    constraint_rows(
                        -(-self.workers // capacity), zeros, -self.capacities // capacity[:, None], all_rows
                    )
                )
        return sparse.csr_matrix(sparse.vstack(blocks))


def solve_sharing(
    tables: Sequence[JobTable], devices: Ints, *, must_serve_all: bool, limit_s: float, first_feasible: bool = False
) -> SharingFound:
    """Return the sharing of ``devices`` (T,) with the largest weighted sum of shares, and a bound on the sum.

    It is a mixed-integer program. The variables for the L lines of all jobs (:class:`_Lines`) are ``picked`` (L,), 0 or 1,
    ``share`` (L,), and ``count`` (L, T), whole numbers.

    Args:
        tables: the jobs' step times; ``devices``: the shared devices of each type.
        must_serve_all: whether every job needs devices; else a job may wait.
        limit_s: seconds for HiGHS.
        first_feasible: whether to return the first sharing found, in which no job has more devices of a type than hold it.
    """
    from scipy import optimize, sparse  # slow to import, and other plans do not need it

    lines = _Lines.of(tables)
    line_count, type_count = lines.capacities.shape
    max_counts = np.where(lines.capacities > 0, lines.available, 0)
    costs = np.concatenate([np.zeros(line_count), -lines.job_weights, np.zeros(line_count * type_count)])
    gap_limit = 0.0 if line_count <= _EXACT_LINES else _GAP_LIMIT
    if first_feasible:  # minimising devices finds a sharing soonest
        max_counts = np.minimum(max_counts, lines.devices_alone)
        costs = np.concatenate([np.zeros(2 * line_count), np.ones(line_count * type_count)])
        gap_limit = math.inf
    rows = lines.constraints(with_rounded_cuts=first_feasible)
    of_job = sparse.csr_matrix(
        (np.ones(line_count), (lines.jobs, np.arange(line_count))), shape=(len(tables), line_count)
    )
    of_type = sparse.csr_matrix(np.tile(np.eye(type_count), line_count))
    solved = optimize.milp(
        costs,
        integrality=np.concatenate([np.ones(line_count), np.zeros(line_count), np.ones(line_count * type_count)]),
        bounds=optimize.Bounds(0, np.concatenate([np.ones(line_count), lines.best_shares, max_counts.ravel()])),
        constraints=[
            optimize.LinearConstraint(rows, ub=0.0),
            # At most one line for each job, and at most the shared devices of each type.
            optimize.LinearConstraint(
                _padded(of_job, line_count * (type_count + 1), zeros_first=False), 1.0 if must_serve_all else 0.0, 1.0
            ),
            optimize.LinearConstraint(_padded(of_type, 2 * line_count, zeros_first=True), ub=devices),
        ],
        options={"time_limit": limit_s, "mip_rel_gap": min(gap_limit, 1e9)},  # HiGHS takes no infinite gap
    )
    if solved.status == 2:  # scipy's number for infeasible
        return SharingFound(None, -math.inf)
    bound = float(sum(table.weight * table.best_shares.max(initial=0.0) for table in tables))
    if solved.mip_dual_bound is not None and not first_feasible:
        bound = min(bound, -float(solved.mip_dual_bound))
    if solved.x is None:
        return SharingFound(None, bound)
    picked, _, counts = np.split(np.rint(solved.x).astype(np.int64), [line_count, 2 * line_count])
    chosen: Sharings = [None] * len(tables)
    for line in np.flatnonzero(picked).tolist():
        chosen[lines.jobs[line]] = tuple(counts.reshape(line_count, type_count)[line].tolist())
    # HiGHS computes in floats with tolerances, so its solution is checked in whole numbers.
    keeps_job_limits = all(
        row is None or table.share(row) is not None for table, row in zip(tables, chosen, strict=True)
    )
    keeps_devices = bool((sum(np.array(row) for row in chosen if row is not None) <= devices).all())
    if not keeps_job_limits or not keeps_devices or (must_serve_all and None in chosen):
        return SharingFound(None, bound)
    return SharingFound(chosen, bound)


def _padded(matrix: csr_matrix, zero_columns: int, *, zeros_first: bool) -> csr_matrix:
    """Return the matrix with ``zero_columns`` columns of zeros after it, or before it where ``zeros_first``."""
    from scipy import sparse

    zeros = sparse.csr_matrix((matrix.shape[0], zero_columns))
    return sparse.csr_matrix(sparse.hstack([zeros, matrix] if zeros_first else [matrix, zeros]))
