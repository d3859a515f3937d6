"""EST plans on nodes: the step is computing and synchronising, so fewer devices on fewer nodes may be faster.

Start at :func:`solve_on_nodes`. Computing takes ``f = max A_i / C_i`` for A_i ESTs on a device of capability C_i (EasyScale,
Equation 1b). Synchronising takes Pollux's ``T_sync(N, K)`` for K devices on N nodes, and both overlap:
``(f^g + T_sync^g)^(1/g)`` with g the fitted gamma (Pollux, section 3.2). Across nodes, T_sync depends on K alone and grows
with it, while f falls with K; so the best K is found by bounding both over intervals of K. One node and one device are tried
separately.
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

# Gaps below this are rounding errors.
_ROUNDING = 1e-12


class Steps(Protocol):
    """Step times with synchronisation between ``replicas`` devices on ``nodes`` nodes.

    Both must not fall with more devices, nor from one node to several.
    """

    def sync_s(self, nodes: int, replicas: int) -> float:
        """Return the seconds of synchronising without computing."""
        ...

    def step_s(self, compute_s: float, nodes: int, replicas: int) -> float:
        """Return the seconds of a step with ``compute_s`` seconds of computing."""
        ...


@dataclass(frozen=True, slots=True)
class _FittedSync:
    """Step times by a fitted model: Pollux's T_sync and its overlap with computing."""

    params: ThroughputParams

    def sync_s(self, nodes: int, replicas: int) -> float:
        """Return T_sync in seconds; across nodes it is at least that on one node, though a fit on noisy rows may say less."""
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
    """Number of nodes that hold the devices."""
    proven: bool
    """Whether it is proven that no other devices of this number compute faster."""


# Seconds of computing of the best devices found, and a lower bound, which is smaller where the solver's time ran out.
_ComputeTimes = tuple[Fraction, Fraction]


def solve_on_nodes(
    problem: Problem,
    nodes: Sequence[NodeGroup],
    params: ThroughputParams | Steps,
    *,
    time_limit_s: float = 10.0,
    seed: int = 0,
) -> Plan:
    """Return the plan with the shortest step, synchronisation included, with the best of the other choices as alternatives.

    The choices are one device, one node, and several nodes. ``nodes``: groups of equal nodes of the cluster. ``params``: the
    synchronisation times by a fit (only its parameters of synchronisation and overlap are used) or by known links. The plan's
    ``iteration_s`` and ``throughput`` include synchronising, ``overload_factor`` does not, and ``waste`` counts devices as idle
    while they only synchronise. All constraints hold as in :func:`solve_est`, which also says when Infeasible and NotProven are
    raised. Raises InputError when a type has no nodes.
    """
    started = time.perf_counter()
    steps = _FittedSync(params) if isinstance(params, ThroughputParams) else params
    check_affordable(problem)
    for name in {device.name for device in problem.devices} - {group.devices.type for group in nodes}:
        raise InputError(f"cluster:nodes.{name}", "has no nodes", "name the nodes of every device type")
    # A required throughput is that of the whole step, so it is checked at the end: the solver knows only the computing.
    unlimited = replace(problem, min_throughput=None)
    if not is_feasible(unlimited, seed=seed):
        solve_est(unlimited, seed=seed)  # raises Infeasible with the requirements that conflict
    deadline = started + time_limit_s
    # Everything on one device or one node is tried; numbers of devices on several nodes are searched by bounds.
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
    """Return the fewest nodes that hold ``counts`` (device type -> devices); each node has devices of one type.

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
    """Store ``plan`` in ``best`` under its choice (one device, one node or several) if no plan there has as short a step."""
    choice: Choice = "one device"
    if plan.nodes > 1:
        choice = "several nodes"
    elif sum(plan.counts) > 1:
        choice = "one node"
    if choice not in best or plan.step_s < best[choice].step_s:
        best[choice] = plan


def _on_one_node(problem: Problem, nodes: Sequence[NodeGroup], steps: Steps) -> dict[Choice, _NodePlan]:
    """Return the best plan on one device and the best one on several devices of one node, where they exist.

    Every number of devices of each type is tried, because a node holds one type. ``nodes``: groups of equal nodes; ``steps``:
    the step times with synchronisation.
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
    """Return (the best plan with at least two devices on any nodes, a lower bound in seconds on the steps of all plans).

    It is (None, infinity) where no such plan exists. The number K of devices is searched by intervals, which are split in the
    order of their bounds: computing falls with K and synchronising grows, so the computing of an interval's upper end with the
    synchronising of its lower end bounds every step in it.

    Args:
        problem: the placement problem, without a required throughput.
        nodes: groups of equal nodes of the cluster.
        steps: the step times with synchronisation.
        limit_s: the shortest step in seconds of the other choices, which the bound covers too.
        deadline: of ``time.perf_counter``; the best plan by then is returned.
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
        """Return the seconds of a step with at most ``devices`` devices; infinite where they cannot run every EST.

        Where the solver's time ran out, lowers ``unproven_s`` to the bound on this step.
        """
        nonlocal unproven_s
        times = compute_times(devices)
        if times is None:
            return math.inf
        found_s, least_s = times
        if least_s < found_s:
            unproven_s = min(unproven_s, steps.step_s(float(least_s), 2, devices))
        return steps.step_s(float(found_s), 2, devices)

    def bound(low: int, high: int) -> float:
        """Return a lower bound on the steps with ``low`` to ``high`` devices; infinite where none can beat that of ``low``."""
        times = compute_times(high)
        if times is None or times == compute_times(low):
            return math.inf  # none can run every EST, or none computes faster than ``low`` devices, which were tried
        _, least_compute_s = times
        return steps.step_s(float(least_compute_s), 2, low)

    best_devices, unopened_s = search_counts(2, max_devices, step_s, bound, lambda: time.perf_counter() >= deadline)
    best_step_s = step_s(best_devices)
    bound_s = min(best_step_s, unproven_s, math.inf if unopened_s is None else unopened_s)
    plan = solve_est(replace(problem, max_devices=best_devices), seed=seed)
    counts = counts_of(problem, plan)
    # The plan may have fewer devices than the limit, and fit on one node: its own step counts, not ``best_step_s``.
    needed = nodes_needed(device_counts(plan), nodes)
    compute_s = step_time_of(problem, counts)
    plan_step_s = steps.step_s(float(compute_s), needed, sum(counts))
    proven = plan.status == "optimal"
    best = _NodePlan(step_s=plan_step_s, counts=counts, compute_s=compute_s, nodes=needed, proven=proven)
    return best, min(bound_s, limit_s, plan_step_s)


def _compute_time(problem: Problem, seed: int, devices: int) -> _ComputeTimes | None:
    """Return the smallest computing time found with at most ``devices`` devices, and a lower bound on it, in exact seconds.

    None where so many devices cannot run every EST. The two differ only with a price limit, which needs a solver, if the
    solver's time ran out.
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
    """Return the figures of a plan with synchronisation in its step; the time in which devices do not compute is waste."""
    alternative = evaluate(problem, node_plan.counts)
    throughput = problem.max_workers / node_plan.step_s
    capability_in_use = alternative.waste + alternative.throughput
    return alternative.model_copy(
        update={"iteration_s": node_plan.step_s, "throughput": throughput, "waste": capability_in_use - throughput}
    )
