"""``ddltool balance TRACE.csv``: what load balancing by predicted speeds would have gained."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from ddltool.analyzers.answers.reporting.result_sections import balance_section
from ddltool.analyzers.job.balancing.predict import PREDICTORS, make_predictor
from ddltool.analyzers.job.balancing.replay import (
    BATCH_PER_WORKER,
    WORKERS_PER_BACKUP,
    Outcome,
    check_ratio,
    compare,
    gain_kept,
    replay,
    replay_equal,
    replay_oracle,
)
from ddltool.analyzers.job.balancing.sizing import MOST_SAMPLES
from ddltool.analyzers.job.balancing.trained import PredictorSettings
from ddltool.analyzers.step.measured.worker_tables import SpeedTrace, default_warm_up, read_speeds
from ddltool.commands.options import Seed, one_of, within
from ddltool.commands.output import finish
from ddltool.commands.verbs import VerbCall, verb
from ddltool.errors import InputError, known
from ddltool.results import BalanceResult, PredictorFigures, SchemeFigures, SplitTime
from ddltool.stages import Stage, Tell, log_remark, quietly


@verb
def balance(
    trace: str | Path,
    predictor: Annotated[str, one_of(*PREDICTORS, "all")] = "all",
    *,
    total_batch: Annotated[int | None, {"show_default": f"{BATCH_PER_WORKER} each"}] = None,
    warm_up: Annotated[int, within(20)] = 500,
    schemes: bool = False,
    seed: Seed = 0,
    tell: Tell = log_remark,
    stage: Stage = quietly,
) -> BalanceResult:
    """Replay recorded worker speeds: predict each next one, size the batches by it, and time the iterations.

    LB-BSP, sections 3 and 4. ``trace``: a CSV, or the hook's telemetry. ``predictor``: last, ema, arima, rnn, lstm, narx or
    all. ``total_batch``: samples of all workers, 128 each by default; ``warm_up`` iterations come before the first training;
    ``schemes`` adds BSP, ASP, SSP and others. Raises InputError for what cannot be read and for more warm-up than the trace
    has.
    """
    predictor = known("--predictor", predictor, (*PREDICTORS, "all"))
    chosen: tuple[str, ...] = PREDICTORS if predictor == "all" else (predictor,)
    if predictor == "all" and importlib.util.find_spec("statsmodels") is None:
        tell("arima is left out: pip install statsmodels")
        chosen = tuple(name for name in chosen if name != "arima")
    recorded = read_speeds(Path(trace), tell)
    if schemes:
        check_ratio(recorded)
        if recorded.workers < WORKERS_PER_BACKUP:
            few = f"one worker in {WORKERS_PER_BACKUP} is a backup, and the trace has {recorded.workers}"
            tell(f"redundant execution is left out: {few}")
    settings = PredictorSettings(warm_up=_warmed(recorded, warm_up, Path(trace), tell), seed=seed)
    total = _total(recorded, total_batch)
    outcomes = {}
    with stage("replaying", len(chosen)) as advance:
        for index, name in enumerate(chosen):
            advance(index, name)
            outcomes[name] = replay(
                recorded, make_predictor(name, recorded.workers, settings), total, since=settings.warm_up
            )
    equal_split = replay_equal(recorded, total, since=settings.warm_up)
    oracle = replay_oracle(recorded, total, since=settings.warm_up)

    def time_of(outcome: Outcome) -> dict[str, float]:
        return {"iteration_s": outcome.mean_s, "iteration_time_ratio": outcome.mean_s / equal_split.mean_s}

    compared_predictor = "narx" if predictor == "all" else predictor
    optional_fields: dict[str, Any] = (
        {"schemes": _compared(recorded, total, compared_predictor, settings)} if schemes else {}
    )
    return BalanceResult(
        workers=recorded.workers,
        iterations=recorded.iterations,
        warm_up=settings.warm_up,
        total_batch=total,
        seed=settings.seed,
        predictors={
            name: PredictorFigures(
                rmse=outcome.rmse,
                rmse_relative=outcome.rmse_relative,
                gain_kept=gain_kept(outcome, equal_split, oracle),
                **time_of(outcome),
            )
            for name, outcome in outcomes.items()
        },
        equal_split=SplitTime(**time_of(equal_split)),
        oracle=SplitTime(**time_of(oracle)),
        **optional_fields,
    )


def show_balance(call: VerbCall[BalanceResult], output: Path | None = None, as_json: bool = False) -> None:
    """Print what each predictor would have gained, and write it."""
    result, name = call(), Path(call["trace"]).name
    finish(result, lambda: balance_section(result, name), output, as_json)


def _compared(recorded: SpeedTrace, total: int, predictor: str, settings: PredictorSettings) -> dict[str, Any]:
    """Return the figures of every scheme, with iteration times relative to BSP's; LB-BSP predicts by ``predictor``."""
    schemes = compare(recorded, total, make_predictor(predictor, recorded.workers, settings))
    bsp_s = schemes["bsp"].iteration_s
    ratios = {name: scheme.iteration_s / bsp_s for name, scheme in schemes.items()}
    figures = {
        name: SchemeFigures(**asdict(schemes[name]), iteration_time_ratio=ratio) for name, ratio in ratios.items()
    }
    return {"predictor": predictor, **figures}


def _warmed(recorded: SpeedTrace, wanted: int, path: Path, tell: Tell) -> int:
    """Return the iterations of warm-up that the trace allows, and say so when they are fewer than asked for.

    Raises InputError when no iteration comes after them.
    """
    warmed = default_warm_up(recorded.iterations, wanted)
    if recorded.iterations <= warmed:
        problem = f"has {recorded.iterations} iterations, none after the warm-up of {warmed}"
        raise InputError(str(path), problem, f"record more than {warmed}")
    if warmed < wanted:
        tell(f"the trace has {recorded.iterations} iterations, so the warm-up is {warmed} of them")
    return warmed


def _total(recorded: SpeedTrace, total_batch: int | None) -> int:
    """Return the samples of all workers together. Raises InputError for fewer than workers, and beyond MOST_SAMPLES."""
    total = total_batch if total_batch is not None else BATCH_PER_WORKER * recorded.workers
    if total < recorded.workers:
        raise InputError("--total-batch", f"is {total}", f"{recorded.workers} workers need one sample each or more")
    if total > MOST_SAMPLES:
        raise InputError("--total-batch", f"is {total}", f"give at most {MOST_SAMPLES} samples")
    return total
