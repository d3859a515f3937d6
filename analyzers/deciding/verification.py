"""Predicted against measured: did a run go as its plan said, and what is to be fitted again? Start at :func:`verify`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddltool.analyzers.deciding.feedback import RankRun, Run
from ddltool.analyzers.goodput.throughput import ThroughputParams, grad_time_s, overlapped, sync_time_s
from ddltool.errors import InputError
from ddltool.plan import Assignment, Plan
from ddltool.units import show_seconds

# Within this a prediction is called right; beyond it the figure it came from is named for a new fit.
ACCEPTED = 0.15


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCheck:
    """One process: what the plan said and what it did."""

    rank: int
    device: str
    planned_batch: int
    batch: int
    predicted_s: float
    """Compute of the batch that it really had."""
    measured_s: float
    error: float
    """Predicted over measured, minus one."""
    spread: float
    """Half the interquartile range of the measured times, relative."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """The whole run against its plan."""

    predicted_s: float
    """Step time."""
    measured_s: float
    low_s: float
    high_s: float
    """Quartiles of the measured steps."""
    error: float
    predicted_compute_s: float
    measured_compute_s: float
    """Of the rank that computes longest."""
    predicted_sync_s: float | None
    """None where the plan says nothing about it."""
    measured_sync_s: float
    ranks: tuple[RankCheck, ...]
    refit: tuple[str, ...]
    """What to measure or fit again, and why; empty when the plan was right."""


def verify(plan: Plan, run: Run, models: Mapping[str, ThroughputParams] | None = None) -> Verification:
    """Return the comparison of ``run`` with ``plan``.

    ``models`` (by device type, or one under "" for all) predict the devices that the job really ran on, where these are
    not the plan's. Raises InputError when the run cannot be this plan's: another number of processes, no compute times
    in the plan and no models, or a device that no model knows.
    """
    if plan.strategy == "elastic-bsp":
        raise InputError("plan", "is an elastic-bsp plan", "the hook writes no telemetry of supersteps to compare with")
    if run.world_size != plan.world_size:
        problem = f"is of {run.world_size} processes, the plan of {plan.world_size}"
        raise InputError("telemetry", problem, "give the telemetry of a run of this plan")
    rows = [row for row in plan.assignments for _ in range(row.devices)]
    given = dict(models or {})
    checks = tuple(_check(rows[rank.rank], rank, given) for rank in run.ranks)
    compute = max(check.predicted_s for check in checks)
    sync = plan.communication_s
    if given:
        sync = max(_exposed_s(model, run, compute) for model in given.values())
    elif sync is None and plan.strategy == "goodput":
        sync = max(0.0, plan.iteration_s - compute)
    predicted = compute + (sync or 0.0)
    return Verification(
        predicted_s=predicted,
        measured_s=run.iteration_s,
        low_s=run.iteration_low_s,
        high_s=run.iteration_high_s,
        error=predicted / run.iteration_s - 1,
        predicted_compute_s=compute,
        measured_compute_s=max(check.measured_s for check in checks),
        predicted_sync_s=sync,
        measured_sync_s=run.sync_s,
        ranks=checks,
        refit=tuple(_refit(checks, run, sync)),
    )


def _check(row: Assignment, rank: RankRun, models: Mapping[str, ThroughputParams]) -> RankCheck:
    model = models.get(rank.device, models.get(""))
    if model is not None:
        predicted = float(grad_time_s(model, rank.batch))
    elif models:
        raise InputError("--goodput", f"has no model of {rank.device}", f"it knows {', '.join(models)}")
    elif row.compute_s is None or row.compute_s <= 0 or row.local_batch_size < 1:
        raise InputError("plan:assignments", "hold no compute_s above 0", "make the plan again, or give --goodput FILE")
    else:
        predicted = row.compute_s * rank.batch / row.local_batch_size
    return RankCheck(
        rank=rank.rank,
        device=rank.device,
        planned_batch=row.local_batch_size,
        batch=rank.batch,
        predicted_s=predicted,
        measured_s=rank.compute_s,
        error=predicted / rank.compute_s - 1,
        spread=rank.error,
    )


def _exposed_s(model: ThroughputParams, run: Run, compute_s: float) -> float:
    """Return the synchronisation that one model leaves exposed behind ``compute_s`` (Pollux, section 3.2)."""
    sync = float(sync_time_s(model, run.num_nodes, run.world_size))
    return float(overlapped(compute_s, sync, model.gamma)) - compute_s


def _refit(checks: Sequence[RankCheck], run: Run, sync_s: float | None) -> Iterator[str]:
    """Yield what to measure or fit again."""
    for check in checks:
        if check.batch != check.planned_batch:
            yield (
                f"rank {check.rank} trained on {check.batch} samples per step, the plan gives it {check.planned_batch}: "
                "the run did not follow the plan"
            )
    by_device: dict[str, list[RankCheck]] = {}
    for check in checks:
        by_device.setdefault(check.device, []).append(check)
    for device, ranks in by_device.items():
        worst = max(ranks, key=lambda check: abs(check.error))
        if abs(worst.error) > max(ACCEPTED, worst.spread):
            how = "slower" if worst.error < 0 else "faster"
            share = abs(worst.measured_s / worst.predicted_s - 1)
            yield f"{device} computes {share:.0%} {how} than predicted: fit it again from this telemetry"
    if len(checks) > 1 and sync_s is None:
        yield (
            f"the plan leaves synchronisation out; measured {show_seconds(run.sync_s)} per step: plan with a network or a fit"
        )
    elif len(checks) > 1 and sync_s is not None and abs(sync_s - run.sync_s) > ACCEPTED * run.iteration_s:
        yield (
            f"synchronisation took {show_seconds(run.sync_s)} per step, predicted {show_seconds(sync_s)}: fit it again from "
            "this telemetry"
        )
