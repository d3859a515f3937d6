"""A recorded trace lived through again: predict, size the batches, see how long the iteration would really have taken.

Row k of the trace says how fast each worker was in iteration k, so an iteration with batch sizes x takes
``max_i x_i / v_i`` (LB-BSP, section 3.2). Every predictor is judged on the same iterations, those after the warm-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddltool.analyzers.balancing.predict import PREDICTORS, Predictor, Settings, check_names, make
from ddltool.analyzers.balancing.schemes import WORKERS_PER_BACKUP, check_ratio, compare
from ddltool.analyzers.balancing.sizing import equal, proportional
from ddltool.analyzers.balancing.trace import SpeedTrace
from ddltool.analyzers.loading.worker_tables import read_speeds
from ddltool.errors import InputError
from ddltool.results import BalanceResult, PredictorFigures, SchemeFigures, SplitTime
from ddltool.stages import Stage, Tell, log_remark, quietly

Floats = NDArray[np.float64]
BATCH_PER_WORKER = 128
MOST_SAMPLES = 10**12


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcome:
    """What one way of sizing batches came to, over the iterations that are judged (J of them)."""

    iteration_s: Floats
    """(J,) seconds of the slowest worker."""
    predicted: Floats | None
    """(J, n) predicted speeds; None where nothing is predicted."""
    actual: Floats
    """(J, n) samples per second."""

    @property
    def rmse(self) -> float | None:
        """Root mean square error of a worker's predicted speed, the mean over workers; samples per second."""
        if self.predicted is None:
            return None
        return float(np.sqrt(((self.predicted - self.actual) ** 2).mean(axis=0)).mean())

    @property
    def rmse_relative(self) -> float | None:
        """The same as a share of each worker's mean speed."""
        if self.predicted is None:
            return None
        errors = np.sqrt(((self.predicted - self.actual) ** 2).mean(axis=0))
        return float((errors / self.actual.mean(axis=0)).mean())

    @property
    def mean_s(self) -> float:
        """Mean seconds of an iteration."""
        return float(self.iteration_s.mean())


def replay(
    trace: SpeedTrace, predictor: Predictor, total: int, *, since: int = 0, limits: ArrayLike | None = None
) -> Outcome:
    """Return what sizing by this predictor's speeds comes to from iteration ``since`` on.

    Args:
        trace: K iterations of n workers.
        predictor: a fresh one; it sees all iterations in order.
        total: X, samples of all workers together.
        since: the first iteration that is judged.
        limits: (n,) most samples of each worker.

    Where nothing can be predicted yet batches are equal and the prediction counts as the mean of the known speeds.
    Raises Infeasible as :func:`~.sizing.proportional` does.
    """
    predicted = np.empty_like(trace.speed)
    times = np.empty(trace.iterations)
    for k in range(trace.iterations):
        speeds = np.array(predictor.predict(trace.cpu[k], trace.memory[k]))
        predicted[k] = speeds
        if k >= since:
            known = np.isfinite(speeds).all()
            sizes = proportional(speeds, total, limits) if known else equal(trace.workers, total, limits)
            times[k] = (sizes / trace.speed[k]).max()
        predictor.observe(trace.speed[k])
    return Outcome(iteration_s=times[since:], predicted=predicted[since:], actual=trace.speed[since:])


def replay_equal(trace: SpeedTrace, total: int, *, since: int = 0, limits: ArrayLike | None = None) -> Outcome:
    """Return what equal batches come to: BSP as frameworks have it."""
    sizes = equal(trace.workers, total, limits)
    actual = trace.speed[since:]
    return Outcome(iteration_s=(sizes / actual).max(axis=1), predicted=None, actual=actual)


def replay_oracle(trace: SpeedTrace, total: int, *, since: int = 0, limits: ArrayLike | None = None) -> Outcome:
    """Return what the same sizing comes to with the speeds of each iteration known beforehand."""
    actual = trace.speed[since:]
    times = np.array([(proportional(speeds, total, limits) / speeds).max() for speeds in actual])
    return Outcome(iteration_s=times, predicted=actual, actual=actual)


def gain_kept(outcome: Outcome, equal_split: Outcome, oracle: Outcome) -> float:
    """Return the share of the oracle's gain over the equal split that ``outcome`` reaches; 1 where there is none."""
    possible = equal_split.mean_s - oracle.mean_s
    return 1.0 if possible <= 0 else (equal_split.mean_s - outcome.mean_s) / possible


def default_warm_up(iterations: int, wanted: int) -> int:
    """Return the warm-up that a trace allows: ``wanted``, or half of a shorter trace, and never below 20."""
    return max(20, min(wanted, iterations // 2))


def balance_result(
    trace: SpeedTrace, outcomes: Mapping[str, Outcome], total: int, settings: Settings, predictor: str | None = None
) -> BalanceResult:
    """Return predictors' ``outcomes`` beside the equal split and the oracle, as a record.

    ``predictor``: also compare schemes on the whole trace, LB-BSP by this predictor.
    """
    equal_split = replay_equal(trace, total, since=settings.warm_up)
    oracle = replay_oracle(trace, total, since=settings.warm_up)

    def time_of(outcome: Outcome) -> dict[str, float]:
        return {"iteration_s": outcome.mean_s, "iteration_time_ratio": outcome.mean_s / equal_split.mean_s}

    schemes: dict[str, Any] = {}
    if predictor is not None:
        made = compare(trace, total, make(predictor, trace.workers, settings))
        base_s = made["bsp"].iteration_s
        figures = {
            name: SchemeFigures(**asdict(each), iteration_time_ratio=each.iteration_s / base_s)
            for name, each in made.items()
        }
        schemes = {"schemes": {"predictor": predictor, **figures}}
    return BalanceResult(
        workers=trace.workers,
        iterations=trace.iterations,
        warm_up=settings.warm_up,
        total_batch=total,
        seed=settings.seed,
        predictors={
            name: PredictorFigures(
                rmse=outcome.rmse or 0.0,
                rmse_relative=outcome.rmse_relative or 0.0,
                gain_kept=gain_kept(outcome, equal_split, oracle),
                **time_of(outcome),
            )
            for name, outcome in outcomes.items()
        },
        equal_split=SplitTime(**time_of(equal_split)),
        oracle=SplitTime(**time_of(oracle)),
        **schemes,
    )


def balance(
    trace: str | Path,
    predictor: str = "all",
    *,
    total_batch: int | None = None,
    warm_up: int = 500,
    schemes: bool = False,
    seed: int = 0,
    tell: Tell = log_remark,
    stage: Stage = quietly,
) -> BalanceResult:
    """Replay recorded worker speeds (a CSV): predict each next one, size the batches by it, and time the iterations.

    ``predictor``: last, ema, arima, rnn, lstm, narx or all. ``total_batch``: samples of all workers, 128 each by default;
    ``warm_up`` iterations come before the first training; ``schemes`` adds BSP, ASP, SSP and others. LB-BSP, sections 3 and 4.
    Raises InputError for what cannot be read and for more warm-up than the trace has.
    """
    chosen = PREDICTORS if predictor == "all" else (predictor,)
    check_names(chosen)
    recorded = read_speeds(Path(trace), tell)
    if schemes:
        check_ratio(recorded)
        if recorded.workers < WORKERS_PER_BACKUP:
            few = f"one worker in {WORKERS_PER_BACKUP} is a backup, and the trace has {recorded.workers}"
            tell(f"redundant execution is left out: {few}")
    settings = Settings(warm_up=_warmed(recorded, warm_up, Path(trace), tell), seed=seed)
    total = _total(recorded, total_batch)
    outcomes = {}
    with stage("replaying", len(chosen)) as advance:
        for place, name in enumerate(chosen):
            advance(place, name)
            outcomes[name] = replay(recorded, make(name, recorded.workers, settings), total, since=settings.warm_up)
    by = ("narx" if predictor == "all" else predictor) if schemes else None
    return balance_result(recorded, outcomes, total, settings, by)


def _warmed(recorded: SpeedTrace, asked: int, path: Path, tell: Tell) -> int:
    """Return the iterations of warm-up that the trace allows, and say so when they are fewer than asked for.

    Raises InputError when no iteration comes after them.
    """
    warmed = default_warm_up(recorded.iterations, asked)
    if recorded.iterations <= warmed:
        problem = f"has {recorded.iterations} iterations, none after the warm-up of {warmed}"
        raise InputError(str(path), problem, f"record more than {warmed}")
    if warmed < asked:
        tell(f"the trace has {recorded.iterations} iterations, so the warm-up is {warmed} of them")
    return warmed


def _total(recorded: SpeedTrace, given: int | None) -> int:
    """Return the samples of all workers together. Raises InputError for fewer than workers, and beyond MOST_SAMPLES."""
    total = given if given is not None else BATCH_PER_WORKER * recorded.workers
    if total < recorded.workers:
        raise InputError("--total-batch", f"is {total}", f"{recorded.workers} workers need one sample each or more")
    if total > MOST_SAMPLES:
        raise InputError("--total-batch", f"is {total}", f"give at most {MOST_SAMPLES} samples")
    return total
