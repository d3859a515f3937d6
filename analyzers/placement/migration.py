"""Is a better plan worth leaving the current one? Moving stops the job for a while; the gain has a horizon to pay for it."""

from __future__ import annotations

from collections.abc import Mapping

from ddltool.analyzers.placement.dealing import device_counts, verify
from ddltool.analyzers.placement.problem import Problem
from ddltool.errors import InputError
from ddltool.placement_records import Migration
from ddltool.plan import Alternative, Plan


def weigh(problem: Problem, best: Plan, current: Plan, *, migration_s: float, horizon_s: float) -> Plan:
    """Return ``best``, or the current plan re-evaluated under ``problem`` when staying makes as many mini-batches.

    Within ``horizon_s`` seconds, staying makes ``R horizon`` mini-batches and moving ``R' (horizon - migration)``. A current
    plan that breaks a constraint, or needs devices that are no longer there, must be left. A plan with the same
    assignments moves nothing. Raises InputError for times that are negative or no plan of ``problem``'s workers.
    """
    if not (migration_s >= 0 and horizon_s > 0):
        problem_text = f"migration {migration_s:g} s, horizon {horizon_s:g} s"
        raise InputError("horizon", problem_text, "a horizon > 0 and a migration of 0 s or more")
    if current.max_workers != problem.max_workers:
        shown = f"has {current.max_workers} logical workers, the job {problem.max_workers}"
        raise InputError("current plan", shown, "give a plan of the same job")
    moved = _moves(device_counts(current), device_counts(best))
    throughput = _throughput(problem, current)
    stay = throughput is not None and (
        _same(current, best) or throughput * horizon_s >= best.throughput * (horizon_s - migration_s)
    )
    gain = None if throughput is None else best.throughput - throughput
    record = Migration(
        stay=stay,
        devices_moved=moved,
        migration_s=migration_s,
        horizon_s=horizon_s,
        current_throughput=throughput,
        other_throughput=best.throughput,
        pays_after_s=0.0 if gain is None else best.throughput * migration_s / gain if gain > 0 else None,
    )
    if not stay or throughput is None:
        return best.model_copy(update={"migration": record})
    capability = {device.name: device.capability_per_s for device in problem.devices}
    in_use = float(sum(row.devices * capability[row.device_type] for row in current.assignments))
    step = problem.max_workers / throughput
    kept = {
        "iteration_s": step,
        "throughput": throughput,
        "assignments": current.assignments,
        "est_count": problem.max_workers,
        "waste": in_use - throughput,
        "overload_factor": step,
        "migration": record,
        "communication_s": None,
        "alternatives": [_as_alternative(best), *best.alternatives] if moved else best.alternatives,
    }
    return best.model_copy(update=kept)


def _throughput(problem: Problem, current: Plan) -> float | None:
    """Return what the current assignments make now; None when they are no longer allowed."""
    try:
        return float(problem.max_workers / verify(problem, current.assignments))
    except ValueError:
        return None


def _same(one: Plan, other: Plan) -> bool:
    """Return whether two plans put the same ESTs on the same devices."""
    pairs = [[(row.device_type, row.devices, row.ests_per_device) for row in plan.assignments] for plan in (one, other)]
    return sorted(pairs[0]) == sorted(pairs[1])


def _moves(before: Mapping[str, int], now: Mapping[str, int]) -> int:
    return sum(abs(before.get(name, 0) - now.get(name, 0)) for name in {*before, *now})


def _as_alternative(plan: Plan) -> Alternative:
    return Alternative(**{name: getattr(plan, name) for name in Alternative.model_fields})
