"""``ddltool barrier TIMES.csv``: when the workers should synchronise next."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from ddltool.analyzers.answers.reporting.result_sections import barrier_section
from ddltool.analyzers.job.barriers.ends import Barrier, EndTimes, bsp
from ddltool.analyzers.job.barriers.predict import PREDICTORS, predict_ends
from ddltool.analyzers.job.barriers.tradeoff import OBJECTIVES, best_barrier, tradeoff
from ddltool.analyzers.job.barriers.zipline import full_gridscan, gridscan, zipline
from ddltool.analyzers.step.measured.worker_tables import read_predicted, read_recorded
from ddltool.commands.options import one_of, within
from ddltool.commands.output import finish
from ddltool.commands.verbs import VerbCall, is_given, verb
from ddltool.errors import InputError, known
from ddltool.results import BarrierChoice, BarrierFigures, BarrierResult, TradeoffFigures
from ddltool.stages import Tell, log_remark

# ElasticBSP's algorithms.
PUBLISHED: Mapping[str, Callable[[EndTimes], Barrier]] = {
    "zipline": zipline,
    "gridscan": gridscan,
    "fullgridscan": full_gridscan,
}
# Number of bounds on the iteration gap in the trade-off; for more than MANY_ENDS ends only a few, as each takes a search.
CURVE_POINTS, FEW_POINTS, MANY_ENDS = 17, 5, 500_000
LOOKAHEAD = 15
# With more ends than this, a choice takes more than seconds.
MOST_ENDS = 5_000_000


@verb
def barrier(
    times: str | Path,
    *,
    lookahead: Annotated[int | None, within(1, 100_000), {"show_default": f"{LOOKAHEAD}, with --predicted all"}] = None,
    algorithm: Annotated[str, one_of(*PUBLISHED, "all")] = "zipline",
    predicted: bool = False,
    predictor: Annotated[str, one_of(*PREDICTORS)] = "ema",
    max_gap: Annotated[int | None, within(0)] = None,
    tell: Tell = log_remark,
) -> BarrierResult:
    """Choose the next barrier: how many iterations each worker makes until all synchronise.

    The method is ElasticBSP's. ``times``: a CSV of iteration ends, or telemetry; with ``predicted`` its rows are the
    predictions themselves. ``lookahead``: number of next iterations of each worker that are considered; None: 15, with
    ``predicted`` all. ``algorithm``: zipline, gridscan, fullgridscan or all. ``predictor`` of an iteration's length: last,
    ema or mean. ``max_gap``: largest difference of the workers' iterations at the exact barriers; None: no limit.

    Raises InputError for an unreadable file, an unknown name, and more than five million ends.
    """
    if predicted and is_given("predictor"):
        raise InputError("predictor", "has no part in --predicted", "leave it out: the rows are predictions already")
    algorithm = known("--algorithm", algorithm, (*PUBLISHED, "all"))
    predictor = known("--predictor", predictor, list(PREDICTORS))
    if predicted:
        names, rows = read_predicted(Path(times), lookahead)
        ends = EndTimes.of(rows)
    else:
        names, ends = predicted_ends(Path(times), lookahead or LOOKAHEAD, predictor, tell)
    calls: dict[str, Callable[[EndTimes], Barrier]] = {"bsp": bsp}
    calls |= PUBLISHED if algorithm == "all" else {algorithm: PUBLISHED[algorithm]}
    calls |= {objective: partial(best_barrier, objective=objective, max_gap=max_gap) for objective in OBJECTIVES}
    counts = np.diff(ends.pointers)  # (workers,) predicted ends of each
    # Seconds of an iteration on each worker, by its first and last predicted end; 0 where one end does not tell.
    length_s = (ends.last_s - ends.first_s) / (counts - 1) if counts.min() > 1 else np.zeros(len(names))
    # The CPU seconds of each choice are part of the result.
    records = {}
    for name, choose in calls.items():
        begin_s = time.process_time()
        choice = choose(ends)
        cpu_seconds = time.process_time() - begin_s
        superstep_s = float((choice.iterations * length_s).max())  # until the slowest worker is at the barrier
        records[name] = BarrierChoice(
            **_figures(choice),
            iterations=dict(zip(names, choice.iterations.tolist(), strict=True)),
            iterations_per_s=int(choice.iterations.sum()) / superstep_s if superstep_s > 0.0 else None,
            compute_seconds=cpu_seconds,
        )
    curve = tradeoff(ends, CURVE_POINTS if len(ends.end_s) <= MANY_ENDS else FEW_POINTS)
    return BarrierResult(
        workers=len(names),
        lookahead=int(counts.max()),
        predictor=None if predicted else predictor,
        algorithms={name: record for name, record in records.items() if name in PUBLISHED},
        bsp=records["bsp"],
        max_gap=max_gap,
        objectives={name: records[name] for name in OBJECTIVES},
        tradeoff=[
            TradeoffFigures(max_gap=gap, **{name: BarrierFigures(**_figures(best[name])) for name in OBJECTIVES})
            for gap, best in curve.items()
        ],
    )


def show_barrier(call: VerbCall[BarrierResult], output: Path | None = None, as_json: bool = False) -> None:
    """Print the barrier that each algorithm chose, and save the result to ``output`` if given."""
    result, name = call(), Path(call["times"]).name
    finish(result, lambda: barrier_section(result, name), output, as_json)


def _figures(barrier: Barrier) -> dict[str, Any]:
    """Return the fields of a barrier that :class:`BarrierFigures` has, by name."""
    return {name: getattr(barrier, name) for name in BarrierFigures.model_fields}


def predicted_ends(path: Path, lookahead: int, predictor: str, tell: Tell) -> tuple[tuple[str, ...], EndTimes]:
    """Return (names of the workers, predicted ends, in seconds, of the next ``lookahead`` iterations of each).

    ``path``: a file of recorded iteration ends, or telemetry. ``predictor``: a name of ``PREDICTORS``, by which the length of
    an iteration is predicted. ``tell`` is called with a remark on workers whose rows stop early. Raises InputError for a wrong
    or unreadable file, and for more than ``MOST_ENDS`` ends.
    """
    recorded = read_recorded(path, tell)
    names = recorded.names
    if len(names) * lookahead > MOST_ENDS:
        problem = f"{len(names)} workers x {lookahead} iterations are too many"
        raise InputError("--lookahead", problem, f"at most {MOST_ENDS // len(names)} for these workers")
    if recorded.lagging:
        first_names = ", ".join(recorded.lagging[:3]) + (", ..." if len(recorded.lagging) > 3 else "")
        tell(
            f"the rows of {len(recorded.lagging)} of {len(names)} workers ({first_names}) stop more than two of their "
            "iterations before the newest row; their predictions begin there"
        )
    where = [f"{name} of {path}" for name in names]
    ends = predict_ends(recorded.lengths_s, recorded.origins_s, lookahead, PREDICTORS[predictor], where)
    return names, EndTimes.of(ends)
