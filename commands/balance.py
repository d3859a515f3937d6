"""``ddltool balance TRACE.csv``: what load balancing by predicted speeds would have gained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from ddltool.analyzers.balancing import schemes
from ddltool.analyzers.balancing.predict import PREDICTORS, Predictor, Settings, check_names, make
from ddltool.analyzers.balancing.replay import Outcome, default_warm_up, gain_kept, replay, replay_equal, replay_oracle
from ddltool.analyzers.balancing.schemes import SchemeResult, check_ratio
from ddltool.analyzers.balancing.sizing import equal
from ddltool.analyzers.balancing.trace import SpeedTrace
from ddltool.analyzers.reporting.result_sections import balance_section
from ddltool.artifacts import check_writable, read_document, save, write_text
from ddltool.commands.options import Json, Output, Seed
from ddltool.commands.output import note, print_json, progress, show
from ddltool.commands.values import demand_picture
from ddltool.errors import InputError
from ddltool.outputs import demand_distinct
from ddltool.results import BalanceResult, PredictorFigures, SchemeFigures, SplitTime

BATCH_PER_WORKER = 128
MOST_SAMPLES = 10**12
WORKERS_PER_BACKUP = 16


def balance(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE.csv", help="Columns iteration,worker,speed,cpu,memory (.gz accepted).")
    ],
    predictor: Annotated[str, typer.Option(help="last, ema, arima, rnn, lstm, narx or all.")] = "all",
    total_batch: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help=f"Samples of all workers together (default {BATCH_PER_WORKER} each).", show_default=False),
    ] = None,
    warm_up: Annotated[
        int, typer.Option(help="Iterations before the first training; none of them is judged.", min=20)
    ] = 500,
    schemes: Annotated[bool, typer.Option("--schemes", help="Compare with BSP, ASP, SSP and others.")] = False,
    weights: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE.json", help="Begin with the weights of an earlier run (rnn, lstm, narx)."),
    ] = None,
    save_weights: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE.json", help="Keep what the network has learned."),
    ] = None,
    picture: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE.svg", help="Draw actual and predicted speeds."),
    ] = None,
    seed: Seed = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Replay recorded worker speeds: predict each next one, size the batches by it, and time the iterations."""
    chosen = PREDICTORS if predictor == "all" else (predictor,)
    check_names(chosen)
    for option, path in (("--weights", weights), ("--save-weights", save_weights)):
        if path is not None and predictor not in ("rnn", "lstm", "narx"):
            raise InputError(option, f"does not go with --predictor {predictor}", "name one of rnn, lstm, narx")
    demand_distinct([trace], {"-o": output, "--picture": picture, "--save-weights": save_weights})
    demand_picture(picture, "speeds")
    for path in (output, picture, save_weights):
        if path is not None:
            check_writable(path)
    from ddltool.analyzers.loading.worker_tables import read_speeds  # it loads pandas

    recorded = read_speeds(trace, note)
    if schemes:
        _check_schemes(recorded)
    settings = Settings(warm_up=_warmed(recorded, warm_up, trace), seed=seed)
    total = _total(recorded, total_batch)
    outcomes, networks = replay_all(recorded, chosen, total, settings, weights)
    found = describe(recorded, outcomes, total, settings)
    if schemes:
        name = "narx" if predictor == "all" else predictor
        compared = {"predictor": name, **compare(recorded, total, name, settings)}
        found = found.model_copy(update={"schemes": compared})
    if save_weights is not None:
        _write_weights(networks[predictor], recorded, save_weights)
    if picture is not None:
        _write_picture(recorded, _drawn(outcomes), settings.warm_up, picture)
    if output is not None:
        save(found, output)
    if as_json:
        print_json(found)
    else:
        show(balance_section(found, trace.name), output)


def _check_schemes(recorded: SpeedTrace) -> None:
    """Raise InputError for speeds too far apart to compare schemes on; say which scheme so few workers leave out."""
    check_ratio(recorded)
    if recorded.workers < WORKERS_PER_BACKUP:
        few = f"one worker in {WORKERS_PER_BACKUP} is a backup, and the trace has {recorded.workers}"
        note(f"redundant execution is left out: {few}")


def _warmed(recorded: SpeedTrace, asked: int, path: Path) -> int:
    """Return the iterations of warm-up that the trace allows, and say so when they are fewer than asked for.

    Raises InputError when no iteration comes after them.
    """
    warmed = default_warm_up(recorded.iterations, asked)
    if recorded.iterations <= warmed:
        problem = f"has {recorded.iterations} iterations, none after the warm-up of {warmed}"
        raise InputError(str(path), problem, f"record more than {warmed}")
    if warmed < asked:
        note(f"the trace has {recorded.iterations} iterations, so the warm-up is {warmed} of them")
    return warmed


def _total(recorded: SpeedTrace, given: int | None) -> int:
    """Return the samples of all workers together. Raises InputError for fewer than workers, and beyond MOST_SAMPLES."""
    total = given if given is not None else BATCH_PER_WORKER * recorded.workers
    if total < recorded.workers:
        raise InputError("--total-batch", f"is {total}", f"{recorded.workers} workers need one sample each or more")
    if total > MOST_SAMPLES:
        raise InputError("--total-batch", f"is {total}", f"give at most {MOST_SAMPLES} samples")
    return total


def _write_weights(network: Predictor, recorded: SpeedTrace, path: Path) -> None:
    """Keep what a network has learned of each worker."""
    from ddltool.analyzers.balancing.networks import Network, weights_to_json

    assert isinstance(network, Network)  # --save-weights names one
    write_text(path, weights_to_json(network, recorded.names))
    note(f"wrote {path}")


def _write_picture(recorded: SpeedTrace, drawn: dict[str, Outcome], warm_up: int, path: Path) -> None:
    """Draw actual and predicted speeds."""
    from ddltool.analyzers.balancing.picture import speeds_svg

    write_text(path, speeds_svg(recorded.names, drawn, warm_up))
    note(f"wrote {path}")


def replay_all(
    trace: SpeedTrace, names: tuple[str, ...], total: int, settings: Settings, weights: Path | None
) -> tuple[dict[str, Outcome], dict[str, Predictor]]:
    """Return what each predictor, the equal split and the oracle come to, and the predictors."""
    outcomes: dict[str, Outcome] = {}
    predictors: dict[str, Predictor] = {}
    since = settings.warm_up
    with progress("replaying", len(names)) as advance:
        for place, name in enumerate(names):
            advance(place, name)
            predictors[name] = make(name, trace.workers, settings)
            if weights is not None:
                _reuse(predictors[name], weights, trace.names)
            outcomes[name] = replay(trace, predictors[name], total, since=since)
    outcomes["equal"] = replay_equal(trace, total, since=since)
    outcomes["oracle"] = replay_oracle(trace, total, since=since)
    return outcomes, predictors


def _reuse(predictor: Predictor, path: Path, names: tuple[str, ...]) -> None:
    """Let a network begin with the weights of a file. Raises InputError for weights that do not fit it."""
    from ddltool.analyzers.balancing.networks import Network, reuse_weights

    assert isinstance(predictor, Network)  # --weights goes with no other predictor
    reuse_weights(predictor, read_document(path), names, str(path))


def describe(trace: SpeedTrace, outcomes: dict[str, Outcome], total: int, settings: Settings) -> BalanceResult:
    """Return all outcomes as the command's result."""
    equal, oracle = outcomes["equal"], outcomes["oracle"]

    def split(outcome: Outcome) -> dict[str, float]:
        return {"iteration_s": outcome.mean_s, "iteration_time_ratio": outcome.mean_s / equal.mean_s}

    return BalanceResult(
        workers=trace.workers,
        iterations=trace.iterations,
        warm_up=settings.warm_up,
        total_batch=total,
        seed=settings.seed,
        predictors={
            name: PredictorFigures(
                rmse=outcome.rmse,
                rmse_relative=outcome.rmse_relative,
                gain_kept=gain_kept(outcome, equal, oracle),
                **split(outcome),
            )
            for name, outcome in outcomes.items()
            if name not in ("equal", "oracle") and outcome.rmse is not None and outcome.rmse_relative is not None
        },
        equal_split=SplitTime(**split(equal)),
        oracle=SplitTime(**split(oracle)),
    )


def compare(trace: SpeedTrace, total: int, name: str, settings: Settings) -> dict[str, SchemeFigures]:
    """Return time and staleness of every scheme on the trace as wall-clock time; LB-BSP by the named predictor."""
    clock = schemes.cpu_clock(trace, total)
    need = equal(trace.workers, total).astype(float)
    made: dict[str, SchemeResult] = {
        "bsp": schemes.bsp(clock, need),
        "asp": schemes.bounded(clock, need, None),
        "ssp": schemes.bounded(clock, need),
    }
    backups = trace.workers // WORKERS_PER_BACKUP
    if backups:
        made["redundant"] = schemes.redundant(clock, lambda sizes: sizes.astype(float), total, backups)
    made["work_shifting"] = schemes.work_shifting(clock, total)
    made["lb_bsp"] = schemes.lb_bsp(clock, trace, total, make(name, trace.workers, settings))
    made["lb_bsp_oracle"] = schemes.lb_bsp_oracle(clock, total)
    return {
        key: SchemeFigures(
            iteration_s=result.iteration_s,
            iteration_time_ratio=result.iteration_s / made["bsp"].iteration_s,
            staleness=result.staleness,
            iteration_gap=result.iteration_gap,
            wasted=result.wasted,
        )
        for key, result in made.items()
    }


def _drawn(outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
    """Return the outcomes to draw: up to three predictors, those with the lowest errors."""
    predictors = [name for name in outcomes if name not in ("equal", "oracle")]
    return {name: outcomes[name] for name in sorted(predictors, key=lambda name: outcomes[name].rmse or 0.0)[:3]}
