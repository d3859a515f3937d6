"""``ddltool balance TRACE.csv``: what load balancing by predicted speeds would have gained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from ddltool.commands.options import Json, Output, Seed

if TYPE_CHECKING:
    from ddltool.analyzers.balancing.predict import Predictor, Settings
    from ddltool.analyzers.balancing.replay import Outcome
    from ddltool.analyzers.balancing.schemes import SchemeResult
    from ddltool.analyzers.balancing.trace import SpeedTrace

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
    from ddltool.analyzers.balancing.predict import PREDICTORS, Settings, check_names
    from ddltool.artifacts import check_writable, save
    from ddltool.commands.balance_output import show_balance
    from ddltool.commands.balance_trace import read_trace
    from ddltool.commands.output import print_json
    from ddltool.commands.values import demand_picture
    from ddltool.errors import InputError
    from ddltool.outputs import demand_distinct

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
    recorded = read_trace(trace)
    if schemes:
        _check_schemes(recorded)
    settings = Settings(warm_up=_warmed(recorded, warm_up, trace), seed=seed)
    total = _total(recorded, total_batch)
    outcomes, networks = replay_all(recorded, chosen, total, settings, weights)
    document = describe(recorded, outcomes, total, settings)
    if schemes:
        name = "narx" if predictor == "all" else predictor
        document["schemes"] = {"predictor": name, **compare(recorded, total, name, settings)}
    if save_weights is not None:
        _write_weights(networks[predictor], recorded, save_weights)
    if picture is not None:
        _write_picture(recorded, _drawn(outcomes, document), settings.warm_up, picture)
    if output is not None:
        save(document, output)
    if as_json:
        print_json(document)
    else:
        show_balance(document, output)


def _check_schemes(recorded: SpeedTrace) -> None:
    """Raise InputError for speeds too far apart to compare schemes on; say which scheme so few workers leave out."""
    from ddltool.analyzers.balancing.schemes import check_ratio
    from ddltool.commands.output import note

    check_ratio(recorded)
    if recorded.workers < WORKERS_PER_BACKUP:
        few = f"one worker in {WORKERS_PER_BACKUP} is a backup, and the trace has {recorded.workers}"
        note(f"redundant execution is left out: {few}")


def _warmed(recorded: SpeedTrace, asked: int, path: Path) -> int:
    """Return the iterations of warm-up that the trace allows, and say so when they are fewer than asked for.

    Raises InputError when no iteration comes after them.
    """
    from ddltool.analyzers.balancing.replay import default_warm_up
    from ddltool.commands.output import note
    from ddltool.errors import InputError

    warmed = default_warm_up(recorded.iterations, asked)
    if recorded.iterations <= warmed:
        problem = f"has {recorded.iterations} iterations, none after the warm-up of {warmed}"
        raise InputError(str(path), problem, f"record more than {warmed}")
    if warmed < asked:
        note(f"the trace has {recorded.iterations} iterations, so the warm-up is {warmed} of them")
    return warmed


def _total(recorded: SpeedTrace, given: int | None) -> int:
    """Return the samples of all workers together. Raises InputError for fewer than workers, and beyond MOST_SAMPLES."""
    from ddltool.errors import InputError

    total = given if given is not None else BATCH_PER_WORKER * recorded.workers
    if total < recorded.workers:
        raise InputError("--total-batch", f"is {total}", f"{recorded.workers} workers need one sample each or more")
    if total > MOST_SAMPLES:
        raise InputError("--total-batch", f"is {total}", f"give at most {MOST_SAMPLES} samples")
    return total


def _write_weights(network: Predictor, recorded: SpeedTrace, path: Path) -> None:
    """Keep what a network has learned of each worker."""
    from ddltool.analyzers.balancing.networks import Network, weights_to_json
    from ddltool.artifacts import write_text
    from ddltool.commands.output import note

    assert isinstance(network, Network)  # --save-weights names one
    write_text(path, weights_to_json(network, recorded.names))
    note(f"wrote {path}")


def _write_picture(recorded: SpeedTrace, drawn: dict[str, Outcome], warm_up: int, path: Path) -> None:
    """Draw actual and predicted speeds."""
    from ddltool.analyzers.balancing.picture import speeds_svg
    from ddltool.artifacts import write_text
    from ddltool.commands.output import note

    write_text(path, speeds_svg(recorded.names, drawn, warm_up))
    note(f"wrote {path}")


def replay_all(
    trace: SpeedTrace, names: tuple[str, ...], total: int, settings: Settings, weights: Path | None
) -> tuple[dict[str, Outcome], dict[str, Predictor]]:
    """Return what each predictor, the equal split and the oracle come to, and the predictors."""
    from ddltool.analyzers.balancing.predict import make
    from ddltool.analyzers.balancing.replay import replay, replay_equal, replay_oracle
    from ddltool.commands.output import progress

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
    from ddltool.artifacts import read_document

    assert isinstance(predictor, Network)  # --weights goes with no other predictor
    reuse_weights(predictor, read_document(path), names, str(path))


def describe(trace: SpeedTrace, outcomes: dict[str, Outcome], total: int, settings: Settings) -> dict[str, Any]:
    """Return the document that ``--json`` prints."""
    from ddltool.analyzers.balancing.replay import gain_kept

    equal, oracle = outcomes["equal"], outcomes["oracle"]
    records = {}
    for name, outcome in outcomes.items():
        records[name] = {
            "rmse": outcome.rmse,
            "rmse_relative": outcome.rmse_relative,
            "iteration_s": outcome.mean_s,
            "iteration_time_ratio": outcome.mean_s / equal.mean_s,
            "gain_kept": gain_kept(outcome, equal, oracle),
        }
    references = {
        key: {field: records[name][field] for field in ("iteration_s", "iteration_time_ratio")}
        for key, name in (("equal_split", "equal"), ("oracle", "oracle"))
    }
    return {
        "kind": "ddltool.balance",
        "schema_version": 1,
        "workers": trace.workers,
        "iterations": trace.iterations,
        "warm_up": settings.warm_up,
        "total_batch": total,
        "seed": settings.seed,
        "predictors": {name: record for name, record in records.items() if name not in ("equal", "oracle")},
        **references,
    }


def compare(trace: SpeedTrace, total: int, name: str, settings: Settings) -> dict[str, Any]:
    """Return time and staleness of every scheme on the trace as wall-clock time; LB-BSP by the named predictor."""
    from ddltool.analyzers.balancing import schemes
    from ddltool.analyzers.balancing.predict import make
    from ddltool.analyzers.balancing.sizing import equal

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
        key: {
            "iteration_s": result.iteration_s,
            "iteration_time_ratio": result.iteration_s / made["bsp"].iteration_s,
            "staleness": result.staleness,
            "iteration_gap": result.iteration_gap,
            "wasted": result.wasted,
        }
        for key, result in made.items()
    }


def _drawn(outcomes: dict[str, Outcome], document: dict[str, Any]) -> dict[str, Outcome]:
    """Return the outcomes to draw: up to three predictors, those with the lowest errors."""
    names = sorted(document["predictors"], key=lambda name: document["predictors"][name]["rmse"])[:3]
    return {name: outcomes[name] for name in names}
