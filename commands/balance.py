"""``ddltool balance TRACE.csv``: what load balancing by predicted speeds would have gained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddltool.analyzers.balancing.predict import PREDICTORS, Settings, check_names, make
from ddltool.analyzers.balancing.replay import balance_result, default_warm_up, replay
from ddltool.analyzers.balancing.schemes import WORKERS_PER_BACKUP, check_ratio
from ddltool.analyzers.balancing.trace import SpeedTrace
from ddltool.analyzers.loading.worker_tables import read_speeds
from ddltool.analyzers.reporting.result_sections import balance_section, speeds_figures
from ddltool.commands.options import Json, Output, Seed
from ddltool.commands.output import finish, note, progress
from ddltool.commands.values import demand_picture, write_picture
from ddltool.errors import InputError
from ddltool.outputs import check_outputs

BATCH_PER_WORKER = 128
MOST_SAMPLES = 10**12


def balance(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE.csv", help="Columns iteration,worker,speed,cpu,memory (.gz accepted).")
    ],
    predictor: Annotated[str, typer.Option(help="last, ema, arima, rnn, lstm, narx or all.")] = "all",
    total_batch: Annotated[
        int | None, typer.Option(help=f"Samples of all workers together (default {BATCH_PER_WORKER} each).")
    ] = None,
    warm_up: Annotated[
        int, typer.Option(help="Iterations before the first training; none of them is judged.", min=20)
    ] = 500,
    schemes: Annotated[bool, typer.Option("--schemes", help="Compare with BSP, ASP, SSP and others.")] = False,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw actual and predicted speeds.")] = None,
    seed: Seed = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Replay recorded worker speeds: predict each next one, size the batches by it, and time the iterations."""
    chosen = PREDICTORS if predictor == "all" else (predictor,)
    check_names(chosen)
    check_outputs([trace], {"-o": output, "--picture": picture})
    demand_picture(picture, "speeds")
    recorded = read_speeds(trace, note)
    if schemes:
        check_ratio(recorded)
        if recorded.workers < WORKERS_PER_BACKUP:
            few = f"one worker in {WORKERS_PER_BACKUP} is a backup, and the trace has {recorded.workers}"
            note(f"redundant execution is left out: {few}")
    settings = Settings(warm_up=_warmed(recorded, warm_up, trace), seed=seed)
    total = _total(recorded, total_batch)
    outcomes = {}
    with progress("replaying", len(chosen)) as advance:
        for place, name in enumerate(chosen):
            advance(place, name)
            learner = make(name, recorded.workers, settings)
            outcomes[name] = replay(recorded, learner, total, since=settings.warm_up)
    scheme_predictor = ("narx" if predictor == "all" else predictor) if schemes else None
    found = balance_result(recorded, outcomes, total, settings, scheme_predictor)
    if picture is not None:
        best = sorted(outcomes, key=lambda name: outcomes[name].rmse or 0.0)[:3]
        write_picture(
            picture, speeds_figures(recorded.names, {name: outcomes[name] for name in best}, settings.warm_up)
        )
        note(f"wrote {picture}")
    finish(found, lambda: balance_section(found, trace.name), output, as_json)


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
