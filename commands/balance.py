"""``ddltool balance FILE``: what batches by predicted speeds would have gained, or samples shared out by their lengths."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import pandas as pd

from ddltool.analyzers.answers.reporting.lengths_section import lengths_section
from ddltool.analyzers.answers.reporting.result_sections import balance_section
from ddltool.analyzers.answers.reporting.section import Section
from ddltool.analyzers.job.balancing.assigning import checked_costs
from ddltool.analyzers.job.balancing.lengths import WAYS, LengthsJob, SampleCost, compare, draw
from ddltool.analyzers.job.balancing.lengths_result import lengths_result
from ddltool.analyzers.job.balancing.predict import PREDICTORS, make_predictor
from ddltool.analyzers.job.balancing.replay import (
    BATCH_PER_WORKER,
    WORKERS_PER_BACKUP,
    Outcome,
    check_ratio,
    gain_kept,
    replay,
    replay_equal,
    replay_oracle,
)
from ddltool.analyzers.job.balancing.replay import compare as compare_schemes
from ddltool.analyzers.job.balancing.sizing import MOST_SAMPLES
from ddltool.analyzers.job.balancing.trained import PredictorSettings
from ddltool.analyzers.step.measured.length_tables import lengths_of, read_length_lines
from ddltool.analyzers.step.measured.worker_tables import (
    SPEED_COLUMNS,
    SpeedTrace,
    default_warm_up,
    read_speeds,
)
from ddltool.analyzers.step.tracing.sources import Source, name_of
from ddltool.commands.options import AS_TEXT, DEVICES, Precision, Seed, number, numbers, one_of, within
from ddltool.commands.output import finish
from ddltool.commands.verbs import VerbCall, refuse, verb
from ddltool.errors import InputError, known
from ddltool.results import BalanceResult, LengthsResult, PredictorFigures, SchemeFigures, SplitTime
from ddltool.stages import Stage, Tell, log_remark, quietly
from ddltool.tables import read_table

# Parameters that have an effect for recorded speeds alone, and for lengths alone; others are refused there.
_OF_SPEEDS = ("predictor", "warm_up", "schemes")
_OF_LENGTHS = (
    "replicas", "rank_speeds", "accumulation", "max_tokens", "sharded", "window", "pack", "cost", "model", "device",
    "precision", "today", "batches", "limit",
)  # fmt: skip
# The fields of a SampleCost, in the order of the numbers of ``--cost``.
_COEFFICIENTS = ("per_token", "per_square", "per_sample", "per_pass", "per_step")
# Default samples of a rank in a pass.
_OWN_SAMPLES = 8
_MOST_RANKS, _MOST_IN_BATCH = 4096, 100_000


@verb
def balance(
    trace: str | Path | pd.DataFrame | Sequence[int],
    predictor: Annotated[str, one_of(*PREDICTORS, "all")] = "all",
    *,
    total_batch: Annotated[int | None, {"show_default": f"{BATCH_PER_WORKER} each; {_OWN_SAMPLES} in a pass"}] = None,
    warm_up: Annotated[int, within(20)] = 500,
    schemes: bool = False,
    replicas: Annotated[int, within(1, _MOST_RANKS)] = 8,
    rank_speeds: Annotated[
        Sequence[float] | None, {"reader": numbers(1, _MOST_RANKS, above=0.0), "metavar": "V,V,..."}
    ] = None,
    accumulation: Annotated[int, within(1, 1000)] = 1,
    max_tokens: Annotated[int | None, within(1)] = None,
    sharded: bool = False,
    window: Annotated[int, within(1, 1000)] = 1,
    pack: Annotated[int | None, within(1)] = None,
    cost: Annotated[Sequence[float] | None, {"reader": numbers(3, 5), "metavar": "A,B,C[,PASS[,STEP]]"}] = None,
    model: Annotated[Source | None, AS_TEXT] = None,
    device: Annotated[str, DEVICES] = "H100",
    precision: Precision = "bf16",
    today: Annotated[str, one_of(*WAYS)] = "padded",
    batches: Annotated[int, within(1, 10_000)] = 100,
    limit: Annotated[float, number(0, 3600)] = 5.0,
    seed: Seed = 0,
    tell: Tell = log_remark,
    stage: Stage = quietly,
) -> BalanceResult | LengthsResult:
    """Say what batches by predicted speeds, or samples shared out by their lengths, would gain.

    ``trace`` tells which of the two: recorded speeds (a CSV, or the hook's telemetry), replayed as in LB-BSP, sections
    3 and 4; or a dataset's lengths, one for each sample or a histogram. It is a file, its rows as a DataFrame, or a
    list of lengths.

    Of speeds, ``predictor``: last, ema, arima, rnn, lstm, narx or all; ``total_batch``: samples of all workers;
    ``warm_up``: iterations before the first training of a predictor; ``schemes`` adds BSP, ASP, SSP and others.

    Of lengths, ``cost``: a, b and c of a sample's cost a L + b L^2 + c, then the costs of a pass and of a step;
    ``model``: a source whose steps on ``device`` give them. The other settings are those of ``ddltool balance``.

    Raises InputError for a table that cannot be read, a parameter without effect, and a trace shorter than its warm-up.
    """
    path, frame = _rows_of(trace)
    lengths = lengths_of(frame, path)  # (lengths, number of samples of each)
    # A table without lengths is one of speeds; settings of the other kind are refused.
    if lengths is None:
        predictors = _predictors(predictor, tell)
        recorded = read_speeds(path, tell, frame)
        refuse("recorded speeds", _OF_LENGTHS, instead="give a table with a column length or tokens")
        if schemes:
            check_ratio(recorded)
            if recorded.workers < WORKERS_PER_BACKUP:
                few = f"one worker in {WORKERS_PER_BACKUP} is a backup, and the trace has {recorded.workers}"
                tell(f"redundant execution is left out: {few}")
        settings = PredictorSettings(warm_up=_warm_up_of(recorded, warm_up, path, tell), seed=seed)
        return _speeds_result(recorded, predictors, _total_of_workers(recorded, total_batch), settings, schemes, stage)
    refuse("a table of lengths", _OF_SPEEDS)
    # Parameters that the other ones make ineffective.
    if cost is not None or model is None:
        refuse("a cost that is not a model's", ("model", "device", "precision"), instead="give --model without --cost")
    if max_tokens is not None:
        refuse("--max-tokens", ("accumulation",), instead="give one of the two")
    if rank_speeds is not None and len(rank_speeds) != replicas:
        refuse("--rank-speeds", ("replicas",), instead=f"{len(rank_speeds)} are given, one for each rank")
    ranks = (1.0,) * replicas if rank_speeds is None else tuple(rank_speeds)
    total = total_batch if total_batch is not None else _OWN_SAMPLES * len(ranks) * accumulation
    # Global batches, whose samples are shared out in today's way and in each remedy.
    drawn = draw(*lengths, _checked_total(total, len(ranks) * accumulation), batches, seed)
    sample_cost, source = _given_cost(cost)
    if model is not None:
        from ddltool.analyzers.job.balancing.length_costs import cost_of_model  # nothing else here needs torch

        source = f"{name_of(model)} on {device}, {precision}"
        longest = int(lengths[0].max())
        with stage(f"tracing {name_of(model)} at three lengths"):
            sample_cost = cost_of_model(model, device, precision, longest=longest, replicas=len(ranks), sharded=sharded)
    job = LengthsJob(
        speeds=checked_costs(ranks, "rank_speeds"),
        total_batch=total,
        cost=sample_cost,
        passes=accumulation,
        max_tokens=max_tokens,
        sharded=sharded,
        window=window,
        pack=pack,
    )
    with stage("sharing out batches", len(drawn)) as advance:
        compared = compare(drawn, job, limit, seed, advance)
    unit: Literal["s", "tokens"] = "tokens" if model is None else "s"
    return lengths_result(job, lengths, compared, today=today, seed=seed, unit=unit, source=source)


def _predictors(name: str, tell: Tell) -> tuple[str, ...]:
    """Return the predictors that a name stands for; ``all``: those whose packages are installed.

    ``tell`` gets a remark if one is left out. Raises InputError for an unknown name.
    """
    name = known("--predictor", name, (*PREDICTORS, "all"))
    if name != "all":
        return (name,)
    if importlib.util.find_spec("statsmodels") is not None:  # an optional package, which arima alone needs
        return PREDICTORS
    tell("arima is left out: pip install statsmodels")
    return tuple(name for name in PREDICTORS if name != "arima")


def _speeds_result(
    recorded: SpeedTrace,
    predictors: Sequence[str],
    total: int,
    settings: PredictorSettings,
    schemes: bool,
    stage: Stage,
) -> BalanceResult:
    """Return the figures of a recorded run replayed with batches sized by each predictor's speeds, and with equal ones.

    Args:
        recorded: the workers' speeds in each iteration.
        predictors: the names of the predictors.
        total: samples of all workers in an iteration.
        settings: the settings of all predictors.
        schemes: whether the synchronisation schemes BSP, ASP, SSP and others are compared, too.
        stage: makes the context of the replays, which shows their progress.
    """
    outcomes = {}
    with stage("replaying", len(predictors)) as advance:
        for index, name in enumerate(predictors):
            advance(index, name)
            predictor = make_predictor(name, recorded.workers, settings)
            outcomes[name] = replay(recorded, predictor, total, since=settings.warm_up)
    # The two bounds: batches that ignore speeds, and batches by the true speeds.
    equal_split = replay_equal(recorded, total, since=settings.warm_up)
    oracle = replay_oracle(recorded, total, since=settings.warm_up)

    def time_of(outcome: Outcome) -> dict[str, float]:
        """Return the fields of the mean iteration time: in seconds, and relative to the equal split's."""
        return {"iteration_s": outcome.mean_s, "iteration_time_ratio": outcome.mean_s / equal_split.mean_s}

    optional_fields: dict[str, Any] = {}
    if schemes:
        # LB-BSP uses one predictor: the one that was asked for, else the paper's.
        of_schemes = predictors[0] if len(predictors) == 1 else "narx"
        optional_fields["schemes"] = _scheme_figures(recorded, total, of_schemes, settings)
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


def show_balance(
    call: VerbCall[BalanceResult | LengthsResult], output: Path | None = None, as_json: bool = False
) -> None:
    """Print the gain of each predictor, or of each way to distribute samples, and save it to ``output`` if given."""
    result, name = call(), Path(call["trace"]).name

    def section() -> Section:
        """Return the section of the result, which is of lengths or of speeds."""
        return lengths_section(result, name) if isinstance(result, LengthsResult) else balance_section(result, name)

    finish(result, section, output, as_json)


def _rows_of(trace: str | Path | pd.DataFrame | Sequence[int]) -> tuple[Path, pd.DataFrame]:
    """Return (path that errors name, table of the workers' speeds or of samples' lengths).

    ``trace``: a file, the table itself, or a list, which is taken for the lengths of samples and becomes the column "length".
    Raises InputError for a file that cannot be read.
    """
    if isinstance(trace, pd.DataFrame):
        return Path("trace"), trace
    if not isinstance(trace, (str, Path)):
        return Path("trace"), pd.DataFrame({"length": list(trace)})
    path = Path(trace)
    lines = read_length_lines(path)
    if lines is not None:
        return path, lines
    # The columns are named in the error about an empty table.
    return path, read_table(trace, (*SPEED_COLUMNS, "or length alone"))


def _given_cost(cost: Sequence[float] | None) -> tuple[SampleCost, str]:
    """Return (cost of a sample by its length L, words on where the cost is from).

    ``cost``: a, b and c of a L + b L^2 + c, then optionally the costs of a pass and of a step; None: an assumed decoder's.
    Raises InputError for fewer than three or more than five numbers.
    """
    if cost is None:
        return SampleCost(), "assumed, a decoder of width 4096"
    if not 3 <= len(cost) <= len(_COEFFICIENTS):
        raise InputError("cost", f"has {len(cost)} numbers", "give a, b, c, and those of a pass and of a step")
    return SampleCost(**dict(zip(_COEFFICIENTS, cost, strict=False))), "given"


def _checked_total(total: int, least: int) -> int:
    """Return ``total``, the samples of a global batch. Raises InputError unless it is from ``least`` to 100,000.

    ``least``: one sample in every pass of every rank.
    """
    if not least <= total <= _MOST_IN_BATCH:
        raise InputError("total_batch", f"is {total}", f"give {least} (one in each pass) to {_MOST_IN_BATCH} samples")
    return total


def _scheme_figures(recorded: SpeedTrace, total: int, predictor: str, settings: PredictorSettings) -> dict[str, Any]:
    """Return the figures of every synchronisation scheme on the whole trace by name, and "predictor", which LB-BSP uses.

    ``recorded``: the workers' speeds in each iteration. ``total``: samples of all workers in an iteration.
    """
    schemes = compare_schemes(recorded, total, make_predictor(predictor, recorded.workers, settings))
    bsp_s = schemes["bsp"].iteration_s
    ratios = {name: scheme.iteration_s / bsp_s for name, scheme in schemes.items()}
    figures = {
        name: SchemeFigures(**asdict(schemes[name]), iteration_time_ratio=ratio) for name, ratio in ratios.items()
    }
    return {"predictor": predictor, **figures}


def _warm_up_of(recorded: SpeedTrace, wanted: int, path: Path, tell: Tell) -> int:
    """Return after how many iterations a predictor is first trained: ``wanted``, or fewer if the trace is short.

    ``tell`` is then called with a remark. ``recorded``: the workers' speeds, from the file ``path``. Raises InputError if no
    iteration is left after the warm-up.
    """
    warmed = default_warm_up(recorded.iterations, wanted)
    if recorded.iterations <= warmed:
        problem = f"has {recorded.iterations} iterations, none after the warm-up of {warmed}"
        raise InputError(str(path), problem, f"record more than {warmed}")
    if warmed < wanted:
        tell(f"the trace has {recorded.iterations} iterations, so the warm-up is {warmed} of them")
    return warmed


def _total_of_workers(recorded: SpeedTrace, total_batch: int | None) -> int:
    """Return the samples of all workers in an iteration: ``total_batch``; None: a default number for each worker.

    Raises InputError for fewer samples than workers, and for more than ``MOST_SAMPLES``.
    """
    total = total_batch if total_batch is not None else BATCH_PER_WORKER * recorded.workers
    if total < recorded.workers:
        raise InputError("--total-batch", f"is {total}", f"{recorded.workers} workers need one sample each or more")
    if total > MOST_SAMPLES:
        raise InputError("--total-batch", f"is {total}", f"give at most {MOST_SAMPLES} samples")
    return total
