"""Compares a measured run with its plan, and names the figures that should be fitted again. Start at :func:`verify`."""

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

# Relative error up to which a prediction counts as right; above, the figure behind it is named for a new fit.
ACCEPTED = 0.15
# The ranks' ratios of measured to predicted time count as one ratio if they differ by at most this factor.
_SAME_RATIO = 1.5
# Ratio from which on errors are shown as factors, and another device is suspected.
_MANIFOLD = 5.0
# Share of the compute time below which a difference of two times is a rounding error; most ranks that a sentence names.
_ROUNDING, _RANKS_NAMED = 1e-12, 8


def error_text(predicted_s: float | None, measured_s: float) -> str:
    """Return the error of a prediction in percent of the measured time; ``-`` where either time is missing or 0.

    The error of a prediction that is five times too long, or more, is shown as that factor.

    >>> error_text(0.11, 0.1), error_text(36.0, 0.1), error_text(0.001, 0.1), error_text(0.0, 0.1)
    ('+10.0%', 'x 360', '-99.0%', '-')
    """
    if predicted_s is None or predicted_s <= 0 or measured_s <= 0:
        return "-"
    ratio = predicted_s / measured_s
    return f"{ratio - 1:+.1%}" if ratio < _MANIFOLD else f"x {ratio:,.3g}"


def verify(
    plan: Plan,
    run: Run,
    models: Mapping[str, ThroughputParams] | None = None,
    *,
    model_error: float | None = None,
    max_error: float | None = None,
    names: tuple[str, str] = ("plan", "telemetry"),
) -> Verification:
    """Return the comparison of a measured ``run`` with its ``plan``: predicted and measured times, and what to fit again.

    A run that did not follow the plan does not pass. Raises InputError for a run with another number of processes than the
    plan, for a plan without compute times and no models, and for a device that no model knows.

    Args:
        plan: the plan that the run should have followed.
        run: what the run's telemetry says, rank by rank.
        models: device type -> fitted model, or "" -> model for all types; they predict compute and synchronisation instead of
            the plan, for a run on other devices than planned.
        model_error: relative error of the models; None: not known.
        max_error: largest relative error of a step with which the run passes; None: any.
        names: of the plan's and the telemetry's file, for the result.
    """
    if run.world_size != plan.world_size:
        problem = f"is of {run.world_size} processes, the plan of {plan.world_size}"
        raise InputError("telemetry", problem, "give the telemetry of a run of this plan")
    rank_assignments = [row for row in plan.assignments for _ in range(row.devices)]  # a plan's row is of several ranks
    known_models = dict(models or {})
    known_error = None if plan.decision is None else plan.decision.error
    if known_models:
        known_error = model_error
    present_ranks = {rank.rank for rank in run.ranks}
    missing_ranks = [rank for rank in range(plan.world_size) if rank not in present_ranks]
    checks = [_verify_rank(rank_assignments[rank.rank], rank, known_models) for rank in run.ranks]
    # The predicted step: compute of the slowest rank, exposed synchronisation, and the rest (optimizer, loader, waiting).
    compute_s = max(check.predicted_s for check in checks)
    sync_s = plan.communication_s
    if known_models:
        sync_s = max(_exposed_s(model, run, compute_s) for model in known_models.values())
    elif sync_s is None and plan.strategy == "goodput":
        sync_s = max(0.0, plan.iteration_s - compute_s)
    if sync_s is not None:
        sync_s = _without_rounding(sync_s, compute_s)
    other_s = None  # models say nothing of it
    if not known_models and plan.other_s is not None:
        other_s = _without_rounding(plan.other_s, compute_s)
    predicted_s = compute_s + (sync_s or 0.0) + (other_s or 0.0)
    if plan.strategy == "elastic-bsp":  # its workers do not step in unison, and the plan predicts their joint step
        run = _joint_step(plan, run)
        predicted_s = plan.iteration_s
        sync_s = 0.0
    error = predicted_s / run.iteration_s - 1
    accepted = ACCEPTED if max_error is None else max_error
    elsewhere = any(check.other_device for check in checks)  # then times of steps are not the plan's to explain
    refit = [*_deviations(checks, missing_ranks), *_what_to_refit(checks, run, sync_s, known_error, accepted)]
    refit += [] if elsewhere or plan.superstep else _unexplained_time(run, other_s)
    result = Verification(
        job=plan.job,
        plan=names[0],
        telemetry=names[1],
        iteration=VerifiedStep(
            predicted_s=predicted_s,
            measured_s=run.iteration_s,
            low_s=run.iteration_low_s,
            high_s=run.iteration_high_s,
            error=error,
        ),
        compute=VerifiedTime(predicted_s=compute_s, measured_s=max(check.measured_s for check in checks)),
        sync=VerifiedTime(predicted_s=sync_s, measured_s=run.sync_s),
        other=None if plan.superstep else VerifiedTime(predicted_s=other_s, measured_s=run.other_s),
        ranks=checks,
        missing_ranks=missing_ranks,
        known_error=known_error,
        refit=refit,
        max_error=max_error,
        passed=True,
    )
    # A run of other devices, or of some of the processes, cannot show that the plan was right.
    passed = result.followed and (max_error is None or (result.complete and abs(error) <= max_error))
    return result.model_copy(update={"passed": passed})


def _joint_step(plan: Plan, run: Run) -> Run:
    """Return the run of an elastic-bsp plan, with a step being the time in which all workers make ``max_workers`` mini-batches.

    These workers do not step in unison, so the rates of their own steps add up, and what they wait for is part of these steps.
    The quartiles are over the parts of the run, which are spans of consecutive steps of each rank.
    """
    step_s = plan.max_workers / sum(1 / rank.mean_step_s for rank in run.ranks)
    # for each span of about the same time, the mean step of every rank in it
    spans = zip(*(rank.parts_s for rank in run.ranks), strict=False)
    span_steps_s = [plan.max_workers / sum(1 / rank_step_s for rank_step_s in span) for span in spans]
    low_s, high_s = np.quantile(span_steps_s, (0.25, 0.75)).tolist()
    return replace(
        run,
        iteration_s=step_s,
        sync_s=0.0,
        iteration_low_s=min(low_s, step_s),
        iteration_high_s=max(high_s, step_s),
    )


def _remedy_for(checks: Sequence[VerifiedRank]) -> str:
    """Return the remedy for wrong figures, in words: plan again where all ranks ran on the planned devices, else fit again."""
    if all(check.device == check.planned_device for check in checks):
        return "plan again with --telemetry and this file"
    # "alone", because rows of an older profile would be averaged with the run's
    return "fit it again from this telemetry alone"


def _verify_rank(assignment: Assignment, rank: RankRun, models: Mapping[str, ThroughputParams]) -> VerifiedRank:
    """Return the record of a rank's predicted and measured compute time per step, in seconds.

    The prediction is that of the model of its device or, without models, the planned time in proportion to the samples that the
    rank really had. ``assignment``: the plan's row for this rank. Raises InputError where there is neither.
    """
    model = models.get(rank.device, models.get(""))
    if model is not None:
        predicted_s = float(grad_time_s(model, rank.batch))
    elif models:
        raise InputError("--goodput", f"has no model of {rank.device}", f"it knows {', '.join(models)}")
    elif assignment.compute_s is None or assignment.compute_s <= 0 or assignment.local_batch_size < 1:
        raise InputError("plan:assignments", "hold no compute_s above 0", "make the plan again, or give --goodput FILE")
    else:
        predicted_s = assignment.compute_s * rank.batch / assignment.local_batch_size
    return VerifiedRank(
        rank=rank.rank,
        device=rank.device,
        planned_device=assignment.device_type,
        other_device=model is None and rank.device != assignment.device_type,
        planned_batch=assignment.local_batch_size,
        batch=rank.batch,
        predicted_s=predicted_s,
        measured_s=rank.compute_s,
        error=predicted_s / rank.compute_s - 1,
        spread=rank.error,
    )


def _exposed_s(model: ThroughputParams, run: Run, compute_s: float) -> float:
    """Return the seconds of synchronisation in a step of ``run`` that its compute, of ``compute_s`` seconds, does not hide.

    It is what the fitted ``model`` says (Pollux, section 3.2).
    """
    sync_s = float(sync_time_s(model, run.num_nodes, run.world_size))
    exposed_s = float(overlapped(compute_s, sync_s, model.gamma)) - compute_s
    return _without_rounding(exposed_s, compute_s)


def _without_rounding(part_s: float, compute_s: float) -> float:
    """Return ``part_s``, or 0 where it is so small that it must be a rounding error of a subtraction of times."""
    return part_s if part_s > _ROUNDING * compute_s else 0.0


def _deviations(checks: Sequence[VerifiedRank], missing: Sequence[int]) -> Iterator[str]:
    """Yield the sentences on deviations from the plan: missing ranks, ranks on other devices or with other batches.

    ``checks``: the ranks that the telemetry has; ``missing``: numbers of the others.
    """
    if missing:
        ranks_text = ", ".join(map(str, missing[:_RANKS_NAMED]))
        if len(missing) > _RANKS_NAMED:
            ranks_text += ", ..."
        noun = "rank" if len(missing) == 1 else "ranks"
        share = f"{len(missing)} of {len(checks) + len(missing)} processes"
        yield f"no rows of {noun} {ranks_text} ({share}): this is only part of the run; give the telemetry of all"
    moved: dict[tuple[str, str], list[int]] = {}
    for check in checks:
        if check.other_device:
            moved.setdefault((check.planned_device, check.device), []).append(check.rank)
    for (planned_device, device), ranks in moved.items():
        who = f"rank {ranks[0]} was" if len(ranks) == 1 else f"{len(ranks)} of {len(checks)} ranks were"
        where = f"{who} planned on {planned_device}, ran on {device}"
        yield f"{where}: the run did not follow the plan; give --goodput FILE of the devices it ran on"
    for check in checks:
        if check.batch != check.planned_batch:
            batch_text = f"{check.batch} samples per step, the plan gives it {check.planned_batch}"
            yield f"rank {check.rank} trained on {batch_text}: the run did not follow the plan"


def _what_to_refit(
    checks: Sequence[VerifiedRank], run: Run, sync_s: float | None, known_error: float | None, accepted: float
) -> Iterator[str]:
    """Yield a sentence for each figure that was off: the compute of a device type, the fit's error, synchronisation.

    Args:
        sync_s: predicted exposed synchronisation in seconds; None: not predicted.
        known_error: relative error of the compute times behind the prediction; None: unknown.
        accepted: relative error of a step that the reader accepts.
    """
    by_device: dict[str, list[VerifiedRank]] = {}
    for check in checks:
        if not check.other_device:
            by_device.setdefault(check.device, []).append(check)
    off_ranks = []
    for device, ranks in by_device.items():
        worst = max(ranks, key=lambda check: abs(check.error))
        if abs(worst.error) > max(ACCEPTED, worst.spread or 0.0):
            off_ranks.append(worst)
            pace = "slower" if worst.error < 0 else "faster"
            factor_text = f"{worst.measured_s / worst.predicted_s:.3g} times the predicted time"
            yield f"{device} computes {pace} than predicted ({factor_text}): {_remedy_for(ranks)}"
    yield from _machine_load([check for ranks in by_device.values() for check in ranks], known_error)
    if off_ranks and known_error is not None and known_error > accepted:
        yield (
            f"the compute times behind the prediction are known to within {known_error:.0%} only, more than {accepted:.0%}: "
            "profile again with more repeats and nothing else running"
        )
    if any(check.other_device for check in checks):
        return
    measured_text = f"{show_seconds(run.sync_s)} per step"
    if len(checks) > 1 and sync_s is None:
        yield f"the plan leaves synchronisation out; measured {measured_text}: plan with a network or a fit"
    elif len(checks) > 1 and sync_s is not None and abs(sync_s - run.sync_s) > ACCEPTED * run.iteration_s:
        yield f"synchronisation took {measured_text}, predicted {show_seconds(sync_s)}: {_remedy_for(checks)}"


def _unexplained_time(run: Run, other_s: float | None) -> Iterator[str]:
    """Yield a sentence where the part of a step that is neither compute nor synchronisation is not as predicted."""
    if abs(run.other_s - (other_s or 0.0)) <= ACCEPTED * run.iteration_s:
        return
    rest_text = f"{show_seconds(run.other_s)} of each step is neither compute nor synchronisation"
    predicted_text = "the plan leaves it out" if other_s is None else f"predicted {show_seconds(other_s)}"
    yield f"{rest_text} (optimizer, loader, waiting), {predicted_text}: plan again with --telemetry and this file"


def _machine_load(checks: Sequence[VerifiedRank], known_error: float | None) -> Iterator[str]:
    """Yield a sentence on the likely cause where all processes are off by about the same factor: the machine, or all devices.

    Nothing is yielded for a single process, for factors that differ, and where the error of any process is acceptable, such as
    one within ``known_error``, the relative error of the compute times behind the prediction.
    """
    ratios = [check.measured_s / check.predicted_s for check in checks]
    if len(ratios) < 2 or max(ratios) > _SAME_RATIO * min(ratios):
        return
    if any(abs(check.error) <= max(ACCEPTED, check.spread or 0.0, known_error or 0.0) for check in checks):
        return
    median_ratio = sorted(ratios)[len(ratios) // 2]
    text = f"all processes take about {median_ratio:.2g} times the predicted time: possibly"
    if not 1 / _MANIFOLD < median_ratio < _MANIFOLD:
        yield f"{text} these are not the devices of the plan; give --goodput FILE, a fit of those it ran on"
    elif (max(ratios) < 1) == (min(ratios) < 1):
        load = "busier" if max(ratios) < 1 else "quieter"
        yield f"{text} the profile was taken on a {load} machine; profile again as it is in training, then fit and plan"
