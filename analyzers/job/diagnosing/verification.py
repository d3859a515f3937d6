"""Predicted against measured: did a run go as its plan said, and what is to be fitted again? Start at :func:`verify`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ddltool.analyzers.job.goodput.throughput import ThroughputParams, grad_time_s, overlapped, sync_time_s
from ddltool.analyzers.step.measured.feedback import RankRun, Run
from ddltool.errors import InputError
from ddltool.plans import Assignment, Plan
from ddltool.results import Verification, VerifiedRank, VerifiedStep, VerifiedTime
from ddltool.units import show_seconds

# Within this a prediction is called right; beyond it the figure it came from is named for a new fit.
ACCEPTED = 0.15
# Ratios of measured over predicted within this factor of each other are one ratio.
_ALIKE = 1.5
# From here on tenths of a percent say nothing.
_MANIFOLD = 5.0
_ROUNDING, _LONGEST_S, _RANKS_NAMED = 1e-12, 1e9, 8


def error_text(predicted_s: float | None, measured_s: float) -> str:
    """Return how far a prediction is off in percent of the measured, ``-`` where nothing is predicted.

    >>> error_text(0.11, 0.1), error_text(36.0, 0.1), error_text(0.001, 0.1), error_text(0.0, 0.1)
    ('+10.0%', '+35,900%', '-99.0%', '-')
    """
    if predicted_s is None or predicted_s <= 0 or measured_s <= 0:
        return "-"
    ratio = predicted_s / measured_s
    return f"{ratio - 1:+.1%}" if ratio < _MANIFOLD else f"{ratio - 1:+,.0%}"


def verify(
    plan: Plan,
    run: Run,
    models: Mapping[str, ThroughputParams] | None = None,
    *,
    model_error: float | None = None,
    max_error: float | None = None,
    names: tuple[str, str] = ("plan", "telemetry"),
) -> Verification:
    """Return the comparison of ``run`` with ``plan``; ``names``: the files that were read.

    ``models`` (by device type, or one under "" for all) predict the devices that the job really ran on, where these are
    not the plan's; ``model_error`` is their relative error. ``max_error``: the deviation of a step that the reader
    allows; None: any passes. A run that did not follow the plan does not pass.
    Raises InputError when the run cannot be this plan's: another number of processes, no compute times in the plan and
    no models, or a device that no model knows.
    """
    if run.world_size != plan.world_size:
        problem = f"is of {run.world_size} processes, the plan of {plan.world_size}"
        raise InputError("telemetry", problem, "give the telemetry of a run of this plan")
    rows = [row for row in plan.assignments for _ in range(row.devices)]
    given = dict(models or {})
    known = model_error if given else None if plan.decision is None else plan.decision.error
    present = {rank.rank for rank in run.ranks}
    missing = [rank for rank in range(plan.world_size) if rank not in present]
    checks = [_check(rows[rank.rank], rank, given) for rank in run.ranks]
    compute = max(check.predicted_s for check in checks)
    sync = plan.communication_s
    if given:
        sync = max(_exposed_s(model, run, compute) for model in given.values())
    elif sync is None and plan.strategy == "goodput":
        sync = max(0.0, plan.iteration_s - compute)
    other = None if given else plan.other_s
    predicted = compute + (sync or 0.0) + (other or 0.0)
    if plan.strategy == "elastic-bsp":
        run = _asynchronous(plan, run)
        predicted, sync = plan.iteration_s, 0.0
    predicted = _believable(predicted)
    error = predicted / run.iteration_s - 1
    refit = _refit(checks, run, sync, known, ACCEPTED if max_error is None else max_error)
    made = Verification(
        plan=names[0],
        telemetry=names[1],
        iteration=VerifiedStep(
            predicted_s=predicted,
            measured_s=run.iteration_s,
            low_s=run.iteration_low_s,
            high_s=run.iteration_high_s,
            error=error,
        ),
        compute=VerifiedTime(predicted_s=compute, measured_s=max(check.measured_s for check in checks)),
        sync=VerifiedTime(predicted_s=sync, measured_s=run.sync_s),
        other=None if plan.superstep else VerifiedTime(predicted_s=other, measured_s=run.other_s),
        ranks=checks,
        missing_ranks=missing,
        known_error=known,
        refit=[*_not_followed(checks, missing), *refit, *([] if plan.superstep else _rest(run, other))],
        max_error=max_error,
        passed=True,
    )
    # A run of other devices, or of some of the processes, cannot show that the plan was right.
    passed = made.followed and (max_error is None or (made.complete and abs(error) <= max_error))
    return made.model_copy(update={"passed": passed})


def _asynchronous(plan: Plan, run: Run) -> Run:
    """Return a run whose step is the time in which its workers, whoever it is, make a plan's mini-batches.

    Its quartiles are those of the run's parts.
    """
    seconds = plan.max_workers / sum(1 / rank.mean_step_s for rank in run.ranks)
    parts = zip(*(rank.parts_s for rank in run.ranks), strict=False)  # of about the same stretch of time
    each = [plan.max_workers / sum(1 / step_s for step_s in part) for part in parts]
    low_s, high_s = np.quantile(each, (0.25, 0.75)).tolist()
    return replace(run, iteration_s=seconds, iteration_low_s=min(low_s, seconds), iteration_high_s=max(high_s, seconds))


def _believable(predicted_s: float) -> float:
    """Return a predicted time. Raises InputError for one beyond any step's."""
    if not predicted_s <= _LONGEST_S:
        raise InputError("plan", f"predicts {predicted_s:.3g} s for this run's step", f"it must be <= {_LONGEST_S:g} s")
    return predicted_s


def _remedy(checks: Sequence[VerifiedRank]) -> str:
    """Return what to do about figures that were wrong: a plan takes those of its own devices as they were measured."""
    if all(check.device == check.planned_device for check in checks):
        return "plan again with --telemetry and this file"
    # Rows of a profile from other times would be averaged with the run's.
    return "fit it again from this telemetry alone"


def _check(row: Assignment, rank: RankRun, models: Mapping[str, ThroughputParams]) -> VerifiedRank:
    model = models.get(rank.device, models.get(""))
    if model is not None:
        predicted = float(grad_time_s(model, rank.batch))
    elif models:
        raise InputError("--goodput", f"has no model of {rank.device}", f"it knows {', '.join(models)}")
    elif row.compute_s is None or row.compute_s <= 0 or row.local_batch_size < 1:
        raise InputError("plan:assignments", "hold no compute_s above 0", "make the plan again, or give --goodput FILE")
    else:
        predicted = row.compute_s * rank.batch / row.local_batch_size
    return VerifiedRank(
        rank=rank.rank,
        device=rank.device,
        planned_device=row.device_type,
        other_device=model is None and rank.device != row.device_type,
        planned_batch=row.local_batch_size,
        batch=rank.batch,
        predicted_s=_believable(predicted),
        measured_s=rank.compute_s,
        error=predicted / rank.compute_s - 1,
        spread=rank.error,
    )


def _exposed_s(model: ThroughputParams, run: Run, compute_s: float) -> float:
    """Return the synchronisation that one model leaves exposed behind ``compute_s`` (Pollux, section 3.2)."""
    sync = float(sync_time_s(model, run.num_nodes, run.world_size))
    exposed = float(overlapped(compute_s, sync, model.gamma)) - compute_s
    return exposed if exposed > _ROUNDING * compute_s else 0.0  # the rest of a subtraction is no prediction


def _not_followed(checks: Sequence[VerifiedRank], missing: Sequence[int]) -> Iterator[str]:
    """Yield where the run did something else than the plan says."""
    if missing:
        named = ", ".join(map(str, missing[:_RANKS_NAMED])) + (", ..." if len(missing) > _RANKS_NAMED else "")
        noun = "rank" if len(missing) == 1 else "ranks"
        share = f"{len(missing)} of {len(checks) + len(missing)} processes"
        yield f"no rows of {noun} {named} ({share}): this is only part of the run; give the telemetry of all"
    for check in checks:
        if check.other_device:
            was = f"rank {check.rank} was planned on {check.planned_device}, ran on {check.device}"
            yield f"{was}: the run did not follow the plan; give --goodput FILE of the devices it ran on"
    for check in checks:
        if check.batch != check.planned_batch:
            given = f"{check.batch} samples per step, the plan gives it {check.planned_batch}"
            yield f"rank {check.rank} trained on {given}: the run did not follow the plan"


def _refit(
    checks: Sequence[VerifiedRank], run: Run, sync_s: float | None, known: float | None, accepted: float
) -> Iterator[str]:
    """Yield what to measure or fit again."""
    by_device: dict[str, list[VerifiedRank]] = {}
    for check in checks:
        if not check.other_device:
            by_device.setdefault(check.device, []).append(check)
    off = []
    for device, ranks in by_device.items():
        worst = max(ranks, key=lambda check: abs(check.error))
        if abs(worst.error) > max(ACCEPTED, worst.spread or 0.0):
            off.append(worst)
            how = "slower" if worst.error < 0 else "faster"
            times = f"{worst.measured_s / worst.predicted_s:.3g} times the predicted time"
            yield f"{device} computes {how} than predicted ({times}): {_remedy(ranks)}"
    yield from _other_load([check for ranks in by_device.values() for check in ranks], known)
    if off and known is not None and known > accepted:
        yield (
            f"the compute times behind the prediction are known to within {known:.0%} only, more than {accepted:.0%}: "
            "profile again with more repeats and nothing else running"
        )
    took = f"{show_seconds(run.sync_s)} per step"
    if len(checks) > 1 and sync_s is None:
        yield f"the plan leaves synchronisation out; measured {took}: plan with a network or a fit"
    elif len(checks) > 1 and sync_s is not None and abs(sync_s - run.sync_s) > ACCEPTED * run.iteration_s:
        yield f"synchronisation took {took}, predicted {show_seconds(sync_s)}: {_remedy(checks)}"


def _rest(run: Run, other_s: float | None) -> Iterator[str]:
    """Yield what to do about a part of the step that is neither compute nor synchronisation."""
    if abs(run.other_s - (other_s or 0.0)) <= ACCEPTED * run.iteration_s:
        return
    said = f"{show_seconds(run.other_s)} of each step is neither compute nor synchronisation"
    predicted = "the plan leaves it out" if other_s is None else f"predicted {show_seconds(other_s)}"
    yield f"{said} (optimizer, loader, waiting), {predicted}: plan again with --telemetry and this file"


def _other_load(checks: Sequence[VerifiedRank], known: float | None) -> Iterator[str]:
    """Yield the likely cause where all processes are off by about one factor: the machine, not a device."""
    ratios = [check.measured_s / check.predicted_s for check in checks]
    if len(ratios) < 2 or max(ratios) > _ALIKE * min(ratios):
        return
    if any(abs(check.error) <= max(ACCEPTED, check.spread or 0.0, known or 0.0) for check in checks):
        return
    middle = sorted(ratios)[len(ratios) // 2]
    said = f"all processes take about {middle:.2g} times the predicted time: possibly"
    if not 1 / _MANIFOLD < middle < _MANIFOLD:
        yield f"{said} these are not the devices of the plan; give --goodput FILE, a fit of those it ran on"
    elif (max(ratios) < 1) == (min(ratios) < 1):
        load = "busier" if max(ratios) < 1 else "quieter"
        yield f"{said} the profile was taken on a {load} machine; profile again as it is in training, then fit and plan"
