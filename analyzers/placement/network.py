"""EST plans on nodes: the step is computing and synchronising, so fewer devices on fewer nodes may be faster.

Computing takes ``f = max A_i / C_i`` (EasyScale, Equation 1b); synchronising takes Pollux's ``T_sync(N, K)`` for K devices
on N nodes, and both overlap: ``(f^g + T_sync^g)^(1/g)`` (Pollux, section 3.2). Across nodes, T_sync grows with K alone and
f falls with K, so the best K is found by bounding both over intervals of K; one node, and one device, are tried apart.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Protocol

from ddltool.analyzers.goodput.throughput import ThroughputParams, overlapped, sync_time_s
from ddltool.analyzers.placement.est import is_feasible, solve_est
from ddltool.analyzers.placement.problem import Problem, check_affordable, demand_throughput
from ddltool.analyzers.placement.steps import Counts, best_step, counts_of, device_counts, evaluate, plan_of, reach
from ddltool.errors import Infeasible, InputError
from ddltool.job import NodeGroup
from ddltool.plans import Alternative, Choice, NetworkCost, Plan

# Bounds closer than this share of the best step are rounding.
_ROUNDING = 1e-12


class Steps(Protocol):
    """What computing and synchronising take together. On several nodes no less than on one, and no less on more devices."""

    def sync_s(self, nodes: int, replicas: int) -> float:
        """Return the seconds of synchronising alone."""
        ...

    def step_s(self, compute_s: float, nodes: int, replicas: int) -> float:
        """Return the seconds of a step."""
        ...


@dataclass(frozen=True, slots=True)
class _Fitted:
    """Pollux's T_sync and overlap."""

    params: ThroughputParams

    def sync_s(self, nodes: int, replicas: int) -> float:
        """Return T_sync in seconds; across nodes at least what it is on one."""
        on_one = float(sync_time_s(self.params, 1, replicas))
        return on_one if nodes == 1 else max(on_one, float(sync_time_s(self.params, nodes, replicas)))

    def step_s(self, compute_s: float, nodes: int, replicas: int) -> float:
        """Return both, overlapped."""
        return float(overlapped(compute_s, self.sync_s(nodes, replicas), self.params.gamma))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """A plan with its nodes."""

    step_s: float
    counts: Counts
    compute_s: Fraction
    nodes: int
    proven: bool


# The computing time that was reached, and one that no choice of devices beats: less where the solver's time ran out.
_Computing = tuple[Fraction, Fraction]


def solve_on_nodes(
    problem: Problem,
    nodes: Sequence[NodeGroup],
    params: ThroughputParams | Steps,
    *,
    time_limit_s: float = 10.0,
    seed: int = 0,
) -> Plan:
    """Return the plan of smallest step, synchronisation included, with the best of the other choices as alternatives.

    The choices are one device, one node, and several nodes. ``params`` gives the synchronisation times, a fit's (one per
    device type would differ in its computing times only, which are not used) or those of known links; across nodes they are
    taken to be no shorter than on one. ``iteration_s`` and ``throughput`` include synchronising, ``overload_factor`` does
    not, ``waste`` counts the devices' time in it as idle. Every constraint holds as for ``solve_est``. Raises
    Infeasible as it does, InputError when a type has no nodes.
    """
    started = time.perf_counter()
    steps = _Fitted(params) if isinstance(params, ThroughputParams) else params
    check_affordable(problem)
    for name in {device.name for device in problem.devices} - {group.devices.type for group in nodes}:
        raise InputError(f"cluster:nodes.{name}", "has no nodes", "name the nodes of every device type")
    quick = replace(problem, min_throughput=None)  # the limit is on the whole step: checked at the end
    if not is_feasible(quick, seed=seed):
        solve_est(quick, seed=seed)  # raises with the requirements that conflict
    deadline = started + time_limit_s
    found = _on_one_node(quick, nodes, steps)
    limit = min((each.step_s for each in found.values()), default=math.inf)
    across, bound = _across_nodes(quick, nodes, steps, limit, deadline, seed)
    if across is not None:
        _keep(found, across)
    ranked = sorted(found.items(), key=lambda item: (item[1].step_s, item[1].nodes, sum(item[1].counts)))
    best = ranked[0][1]
    most = "with synchronisation the most that can be reached is"
    demand_throughput(problem.max_workers / best.step_s, problem.min_throughput, most)
    gap = max(0.0, 1.0 - min(bound, best.step_s) / best.step_s)
    gap = gap if gap > _ROUNDING else 0.0
    seconds = time.perf_counter() - started
    made = plan_of(problem, _alternative(quick, best), optimal=gap == 0 and best.proven, gap=gap, solve_seconds=seconds)
    cost = NetworkCost(
        choice=ranked[0][0],
        num_nodes=best.nodes,
        num_replicas=sum(best.counts),
        compute_s=float(best.compute_s),
        sync_s=steps.sync_s(best.nodes, sum(best.counts)),
        best_steps={choice: each.step_s for choice, each in ranked},
    )
    others = [_alternative(quick, each) for _, each in ranked[1:]]
    waiting = max(0.0, best.step_s - float(best.compute_s))
    return made.model_copy(update={"alternatives": others, "network": cost, "communication_s": waiting})


def nodes_needed(counts: Mapping[str, int], nodes: Sequence[NodeGroup]) -> int:
    """Return the fewest nodes that hold so many devices of each type: largest nodes first.

    Raises InputError when there are not enough.
    """
    total = 0
    for name, left in counts.items():
        own = [group for group in nodes if group.devices.type == name]
        for group in sorted(own, key=lambda group: -group.devices.count):
            used = min(group.count, -(-left // group.devices.count))
            total += used
            left = max(0, left - used * group.devices.count)
        if left:
            raise InputError(f"devices.{name}.count", f"is more than the cluster's nodes hold by {left}", "offer fewer")
    return total


def _keep(best: dict[Choice, _Found], made: _Found) -> None:
    """Keep a plan if it is the best of its choice."""
    choice: Choice = "several nodes" if made.nodes > 1 else "one node" if sum(made.counts) > 1 else "one device"
    if choice not in best or made.step_s < best[choice].step_s:
        best[choice] = made


def _on_one_node(problem: Problem, nodes: Sequence[NodeGroup], steps: Steps) -> dict[Choice, _Found]:
    """Return the best plans on one device and on one node, those that there are: a node holds one device type."""
    best: dict[Choice, _Found] = {}
    for place, device in enumerate(problem.devices):
        own = [group.devices.count for group in nodes if group.count and group.devices.type == device.name]
        for number in range(1, min(max(own, default=0), problem.device_limit, device.count) + 1):
            counts = tuple(number if place == other else 0 for other in range(len(problem.devices)))
            compute = best_step(problem, counts) if problem.allows(counts) else None
            if compute is None:
                continue
            step = steps.step_s(float(compute), 1, number)
            _keep(best, _Found(step_s=step, counts=counts, compute_s=compute, nodes=1, proven=True))
    return best


def _across_nodes(
    problem: Problem, nodes: Sequence[NodeGroup], steps: Steps, limit: float, deadline: float, seed: int
) -> tuple[_Found | None, float]:
    """Return the best plan on at least two devices anywhere, and a step time that none of them can beat.

    Intervals of K are split, most promising first: ``f`` at the upper end and ``T_sync`` at the lower one bound the step.
    """
    most = min(problem.device_limit, sum(device.count for device in problem.devices))
    if most < 2 or sum(group.count for group in nodes) < 2:
        return None, math.inf
    compute = {number: _compute_time(problem, number, seed) for number in (2, most)}
    if compute[most] is None:
        return None, math.inf
    best_number, best_step, unsettled = most, math.inf, math.inf

    def look(number: int) -> None:
        nonlocal best_number, best_step, unsettled
        if (times := compute[number]) is None:
            return
        if (step := steps.step_s(float(times[0]), 2, number)) < best_step:
            best_number, best_step = number, step
        if times[1] < times[0]:
            unsettled = min(unsettled, steps.step_s(float(times[1]), 2, number))

    def bound(low: int, high: int) -> float:
        times = compute[high]
        return math.inf if times is None else steps.step_s(float(times[1]), 2, low)

    look(2)
    look(most)
    intervals = [(bound(2, most), 2, most)]
    while intervals and intervals[0][0] < best_step * (1 - _ROUNDING) and time.perf_counter() < deadline:
        _, low, high = heapq.heappop(intervals)
        if high - low <= 1 or compute[low] == compute[high]:
            continue  # both ends were looked at; with equal computing times the lower end is the best
        middle = (low + high) // 2
        compute[middle] = _compute_time(problem, middle, seed)
        look(middle)
        for part in ((low, middle), (middle, high)):
            heapq.heappush(intervals, (bound(*part), *part))
    left = min(best_step, unsettled, *(first for first, _, _ in intervals[:1]))
    plan = solve_est(replace(problem, max_devices=best_number), seed=seed)
    counts = counts_of(problem, plan)
    needed, reached = nodes_needed(device_counts(plan), nodes), reach(problem, counts)
    step = steps.step_s(float(reached), needed, sum(counts))
    proven = plan.status == "optimal"
    return _Found(step_s=step, counts=counts, compute_s=reached, nodes=needed, proven=proven), min(left, limit, step)


def _compute_time(problem: Problem, devices: int, seed: int) -> _Computing | None:
    """Return the smallest f with at most so many devices; None: they have no room."""
    narrowed = replace(problem, max_devices=devices)
    if problem.max_price_micro is None:
        best = best_step(narrowed)
        return None if best is None else (best, best)
    try:
        plan = solve_est(narrowed, seed=seed)
    except Infeasible:
        return None
    reached = reach(narrowed, counts_of(narrowed, plan))
    return reached, reached * (1 - Fraction(plan.gap))


def _alternative(problem: Problem, found: _Found) -> Alternative:
    """Return a plan's figures with the synchronisation in its step."""
    made = evaluate(problem, found.counts)
    throughput = problem.max_workers / found.step_s
    in_use = made.waste + made.throughput
    return made.model_copy(update={"iteration_s": found.step_s, "throughput": throughput, "waste": in_use - throughput})
