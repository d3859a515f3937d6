"""EST plans on nodes: the step is computing and synchronising, so fewer devices on fewer nodes may be faster.

Computing takes ``f = max A_i / C_i`` (EasyScale, Equation 1b); synchronising takes Pollux's ``T_sync(N, K)`` for K devices
on N nodes, and both overlap: ``(f^g + T_sync^g)^(1/g)`` (Pollux, section 3.2). Across nodes, T_sync grows with K alone and
f falls with K, so the best K is found by bounding both over intervals of K; one node, and one device, are tried apart.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial
from typing import Protocol

from ddltool.analyzers.job.goodput.throughput import ThroughputParams, overlapped, sync_time_s
from ddltool.analyzers.job.placement.est import is_feasible, solve_est
from ddltool.analyzers.job.placement.problem import Problem, check_affordable, demand_throughput
from ddltool.analyzers.job.placement.steps import (
    Counts,
    best_step,
    counts_of,
    device_counts,
    evaluate,
    plan_of,
    step_time_of,
)
from ddltool.errors import Infeasible, InputError
from ddltool.job import NodeGroup
from ddltool.plans import Alternative, Choice, NetworkCost, Plan
from ddltool.search import search_counts

# Relative difference to the best step below which a bound is equal to it.
_ROUNDING = 1e-12


class Steps(Protocol):
    """Step times with synchronisation; they never fall with the number of nodes (one or several) or of devices."""

    def sync_s(self, nodes: int, replicas: int) -> float:
        """Return the seconds of synchronising alone."""
        ...

    def step_s(self, compute_s: float, nodes: int, replicas: int) -> float:
        """Return the seconds of a step."""
        ...


@dataclass(frozen=True, slots=True)
class _FittedSync:
    """Pollux's T_sync and overlap."""

    params: ThroughputParams

    def sync_s(self, nodes: int, replicas: int) -> float:
        """Return the seconds of synchronising ``replicas`` devices on so many nodes (T_sync).

        Across nodes they are at least what they are on one node, though a fit on noisy rows may say less.
        """
        on_one_s = float(sync_time_s(self.params, 1, replicas))
        return on_one_s if nodes == 1 else max(on_one_s, float(sync_time_s(self.params, nodes, replicas)))

    def step_s(self, compute_s: float, nodes: int, replicas: int) -> float:
        """Return the seconds of a step that computes for ``compute_s`` and synchronises, the two overlapped as fitted."""
        return float(overlapped(compute_s, self.sync_s(nodes, replicas), self.params.gamma))


@dataclass(frozen=True, kw_only=True, slots=True)
class _NodePlan:
    """Devices, the nodes that hold them, and their step time."""

    step_s: float
    """Seconds of a step, synchronisation included."""
    counts: Counts
    compute_s: Fraction
    """Seconds of computing alone."""
    nodes: int
    """How many nodes hold the devices."""
    proven: bool
    """Whether no other devices of this number compute faster."""


# The computing time reached, and a lower bound on it; the bound is smaller where the solver's time ran out.
_ComputeTimes = tuple[Fraction, Fraction]


def solve_on_nodes(
    problem: Problem,
    nodes: Sequence[NodeGroup],
    params: ThroughputParams | Steps,
    *,
    time_limit_s: float = 10.0,
    seed: int = 0,
) -> Plan:
    """Return the plan of smallest step, synchronisation included, with the best of the other choices as alternatives.

    The choices are one device, one node, and several nodes. ``params`` gives the synchronisation times, a fit's (only those of
    its parameters that are about synchronising and overlap are used) or those of known links; across nodes they are taken to
    be no shorter than on one. ``iteration_s`` and ``throughput`` include synchronising, ``overload_factor`` does
    not, ``waste`` counts the devices' time in it as idle. Every constraint holds as for ``solve_est``. Raises
    Infeasible as it does, InputError when a type has no nodes.
    """
    started = time.perf_counter()
    steps = _FittedSync(params) if isinstance(params, ThroughputParams) else params
    check_affordable(problem)
    for name in {device.name for device in problem.devices} - {group.devices.type for group in nodes}:
        raise InputError(f"cluster:nodes.{name}", "has no nodes", "name the nodes of every device type")
    # A required throughput is on the whole step, and is checked at the end; the solver knows the computing alone.
    unlimited = replace(problem, min_throughput=None)
    if not is_feasible(unlimited, seed=seed):
        solve_est(unlimited, seed=seed)  # raises with the requirements that conflict
    deadline = started + time_limit_s
    best_by_choice = _on_one_node(unlimited, nodes, steps)
    limit_s = min((node_plan.step_s for node_plan in best_by_choice.values()), default=math.inf)
    several_nodes, bound_s = _across_nodes(unlimited, nodes, steps, limit_s, deadline, seed)
    if several_nodes is not None:
        _keep_if_best(best_by_choice, several_nodes)
    ranked = sorted(best_by_choice.items(), key=lambda item: (item[1].step_s, item[1].nodes, sum(item[1].counts)))
    best = ranked[0][1]
    message = "with synchronisation the most that can be reached is"
    demand_throughput(problem.max_workers / best.step_s, problem.min_throughput, message)
    gap = max(0.0, 1.0 - min(bound_s, best.step_s) / best.step_s)
    gap = gap if gap > _ROUNDING else 0.0
    seconds = time.perf_counter() - started
    plan = plan_of(
        problem, _alternative(unlimited, best), optimal=gap == 0 and best.proven, gap=gap, solve_seconds=seconds
    )
    cost = NetworkCost(
        choice=ranked[0][0],
        num_nodes=best.nodes,
        num_replicas=sum(best.counts),
        compute_s=float(best.compute_s),
        sync_s=steps.sync_s(best.nodes, sum(best.counts)),
        best_steps={choice: node_plan.step_s for choice, node_plan in ranked},
    )
    alternatives = [_alternative(unlimited, node_plan) for _, node_plan in ranked[1:]]
    waiting_s = max(0.0, best.step_s - float(best.compute_s))
    return plan.model_copy(update={"alternatives": alternatives, "network": cost, "communication_s": waiting_s})


def nodes_needed(counts: Mapping[str, int], nodes: Sequence[NodeGroup]) -> int:
    """Return the fewest nodes that hold ``counts``, devices by type; a node holds one type.

    The largest nodes of a type are filled first. Raises InputError when there are not enough nodes.
    """
    total_nodes = 0
    for name, remaining in counts.items():
        type_groups = [group for group in nodes if group.devices.type == name]
        for group in sorted(type_groups, key=lambda group: -group.devices.count):
            used_nodes = min(group.count, -(-remaining // group.devices.count))
            total_nodes += used_nodes
            remaining = max(0, remaining - used_nodes * group.devices.count)
        if remaining:
            raise InputError(
                f"devices.{name}.count", f"is more than the cluster's nodes hold by {remaining}", "offer fewer"
            )
    return total_nodes


def _keep_if_best(best: dict[Choice, _NodePlan], plan: _NodePlan) -> None:
    """Store ``plan`` in ``best``, under its choice (one device, one node or several), if its step is the shortest there."""
    choice: Choice = "several nodes" if plan.nodes > 1 else "one node" if sum(plan.counts) > 1 else "one device"
    if choice not in best or plan.step_s < best[choice].step_s:
        best[choice] = plan


def _on_one_node(problem: Problem, nodes: Sequence[NodeGroup], steps: Steps) -> dict[Choice, _NodePlan]:
    """Return the best plan on one device and the best on one node, as far as they exist, by trying every number of devices.

    A node holds one device type; ``steps`` tells how long a step takes with synchronisation.
    """
    best: dict[Choice, _NodePlan] = {}
    for type_index, device in enumerate(problem.devices):
        node_sizes = [group.devices.count for group in nodes if group.count and group.devices.type == device.name]
        most_devices = min(max(node_sizes, default=0), problem.device_limit, device.count)
        for devices in range(1, most_devices + 1):
            counts = tuple(devices if type_index == other_index else 0 for other_index in range(len(problem.devices)))
            compute_s = best_step(problem, counts) if problem.allows(counts) else None
            if compute_s is None:
                continue
            step_s = steps.step_s(float(compute_s), 1, devices)
            _keep_if_best(best, _NodePlan(step_s=step_s, counts=counts, compute_s=compute_s, nodes=1, proven=True))
    return best


def _across_nodes(
    problem: Problem, nodes: Sequence[NodeGroup], steps: Steps, limit_s: float, deadline: float, seed: int
) -> tuple[_NodePlan | None, float]:
    """Return the best plan on at least two devices anywhere, and a lower bound in seconds on the step of all such plans.

    None and infinity where there is no such plan. The number K of devices is searched by intervals, the most promising split
    first: computing falls with K and synchronising grows, so computing at the upper end with synchronising at the lower one
    bounds every step in between.

    Args:
        limit_s: the best step of the other choices.
        deadline: of ``time.perf_counter``; what is found by then is returned.
        seed: of the solver.
    """
    max_devices = min(problem.device_limit, sum(device.count for device in problem.devices))
    if max_devices < 2 or sum(group.count for group in nodes) < 2:
        return None, math.inf
    compute_times = cache(partial(_compute_time, problem, seed))
    if compute_times(max_devices) is None:
        return None, math.inf
    unproven_s = math.inf

    def step_s(devices: int) -> float:
        """Return the seconds of a step with at most so many devices, infinite where they cannot hold every EST.

        Lowers ``unproven_s`` to what the step may be at best where the solver's time ran out.
        """
        nonlocal unproven_s
        if (times := compute_times(devices)) is None:
            return math.inf
        if times[1] < times[0]:
            unproven_s = min(unproven_s, steps.step_s(float(times[1]), 2, devices))
        return steps.step_s(float(times[0]), 2, devices)

    def bound(low: int, high: int) -> float:
        """Return a lower bound on the steps with ``low`` to ``high`` devices; infinite where none can beat that of ``low``."""
        times = compute_times(high)
        if times is None or times == compute_times(low):
            return math.inf  # none holds every EST; or none computes sooner than the low end, which was looked at
        return steps.step_s(float(times[1]), 2, low)

    best_devices, unopened_s = search_counts(2, max_devices, step_s, bound, lambda: time.perf_counter() >= deadline)
    best_step_s = step_s(best_devices)
    bound_s = min(best_step_s, unproven_s, math.inf if unopened_s is None else unopened_s)
    plan = solve_est(replace(problem, max_devices=best_devices), seed=seed)
    counts = counts_of(problem, plan)
    # The plan may use fewer devices than it may, and fit on one node: its own step then is the one that counts.
    needed, compute_s = nodes_needed(device_counts(plan), nodes), step_time_of(problem, counts)
    plan_step_s = steps.step_s(float(compute_s), needed, sum(counts))
    proven = plan.status == "optimal"
    best = _NodePlan(step_s=plan_step_s, counts=counts, compute_s=compute_s, nodes=needed, proven=proven)
    return best, min(bound_s, limit_s, plan_step_s)


def _compute_time(problem: Problem, seed: int, devices: int) -> _ComputeTimes | None:
    """Return the smallest computing time f with at most ``devices`` devices, and a lower bound on it, exact seconds.

    None: so many devices cannot hold every EST. The two differ only where a price limit makes a solver necessary, whose time
    ran out.
    """
    limited = replace(problem, max_devices=devices)
    if problem.max_price_micro is None:
        best = best_step(limited)
        return None if best is None else (best, best)
    try:
        plan = solve_est(limited, seed=seed)
    except Infeasible:
        return None
    reached_s = step_time_of(limited, counts_of(limited, plan))
    return reached_s, reached_s * (1 - Fraction(plan.gap))


def _alternative(problem: Problem, node_plan: _NodePlan) -> Alternative:
    """Return a plan's figures with the synchronisation in its step, whose time counts as waste."""
    alternative = evaluate(problem, node_plan.counts)
    throughput = problem.max_workers / node_plan.step_s
    capability_in_use = alternative.waste + alternative.throughput
    return alternative.model_copy(
        update={"iteration_s": node_plan.step_s, "throughput": throughput, "waste": capability_in_use - throughput}
    )
