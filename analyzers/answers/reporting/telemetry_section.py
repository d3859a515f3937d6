"""Sections of runs: telemetry of the hook or an agent, the events of a synchronisation server, and stragglers.

A ``frame`` has the columns of :class:`~ddltool.telemetry.TelemetryRow`, with one row for each rank and step. The rows of a
server are mappings with the fields of ``ddltool.telemetry``'s events: a "step" row has a worker's ``wait_s`` (seconds that
its pull waited for other workers) and ``staleness`` (updates by others that its gradient had not seen), a "barrier" row
describes a superstep, the iterations between two barriers. Columns of tables are by field name or by index in a tuple,
with a format behind a colon.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ddltool.analyzers.answers.reporting.figures import Bars, Lanes, Line, Lines, Span, merged, stacked
from ddltool.analyzers.answers.reporting.result_sections import verified_table
from ddltool.analyzers.answers.reporting.section import (
    Blocks,
    Column,
    Picture,
    Section,
    Table,
    Verdict,
    how_many_drawn,
    pictured,
    tabled,
)
from ddltool.analyzers.job.diagnosing.verification import verify
from ddltool.analyzers.step.measured.feedback import read_run
from ddltool.arrays import Floats, Ints
from ddltool.errors import InputError, few, shortened
from ddltool.plans import Plan
from ddltool.results import RankSplit, StragglersResult
from ddltool.telemetry import WARMUP_STEPS
from ddltool.units import counted, show_seconds

POINTS = 240
_RANKS_DRAWN, _BATCH_LINES = 24, 6
_PHASES = ("compute_s", "wait_s", "sync_s")


def binned(label: str, steps: Ints, values: Floats, points: int = POINTS, *, band: bool = False) -> tuple[Line, int]:
    """Return (line of medians over bins of equally many steps, number of steps of a bin).

    ``steps``, ``values``: (n,), in any order. ``points``: the most bins; a screen cannot show more. ``band``: whether the
    line has a band from the 5 % to the 95 % quantile.
    """
    first = int(steps.min())
    width = max(1, math.ceil((int(steps.max()) - first + 1) / points))
    bins = (steps - first) // width
    # Rows sorted by bin, and the index at which each bin's rows begin.
    order = np.argsort(bins, kind="stable")
    bin_indices, starts = np.unique(bins[order], return_index=True)
    values_by_bin = np.split(values[order], starts[1:])
    quantiles = np.array([np.quantile(values_of_bin, (0.05, 0.5, 0.95)) for values_of_bin in values_by_bin])
    low, middle, high = quantiles.T
    bin_centres = np.asarray(first + bin_indices * width + (width - 1) / 2, dtype=np.float64)
    return Line(label=label, x=bin_centres, y=middle, low=low if band else None, high=high if band else None), width


def telemetry_section(frame: pd.DataFrame, name: str, plans: Sequence[tuple[str, Plan]]) -> Section:
    """Return the section of a run's telemetry: step times, their phases, and how the plans' predictions compare.

    ``frame``: the columns of :class:`~ddltool.telemetry.TelemetryRow`, one row per rank and step, in any order.
    ``plans``: pairs (file name, plan).
    """
    # Without the first steps, which allocate and compile, unless there are no others.
    after_warmup = frame[frame["step"] >= frame["step"].min() + WARMUP_STEPS]
    steady = after_warmup if len(after_warmup) else frame
    ranks = int(frame["rank"].nunique())
    lead = [
        f"{counted(len(frame), 'row')}: steps {frame['step'].min():,} to {frame['step'].max():,} of {counted(ranks, 'rank')} "
        f"(world size {', '.join(str(size) for size in sorted(set(frame['world_size']))[:8])}); median step "
        f"{show_seconds(float(steady['step_s'].median()))}. Medians leave out the first {WARMUP_STEPS} steps."
    ]
    compared, levels, words = _compare_with_plans(frame, plans)
    blocks: Blocks = [_step_times_picture(frame, levels), _phases_picture(steady), *compared, *_batch_picture(frame)]
    blocks += _agent_picture(frame)
    return Section(title=f"Telemetry: {name}", lead=lead + words, blocks=blocks, verdict=_telemetry_verdict(steady))


def _binned_column(label: str, frame: pd.DataFrame, column: str, *, band: bool = False) -> tuple[Line, int]:
    """Return :func:`binned` of a column of ``frame`` over its steps: (line of medians, number of steps of a point)."""
    return binned(label, frame["step"].to_numpy(dtype=np.int64), frame[column].to_numpy(dtype=float), band=band)


def _step_times_picture(frame: pd.DataFrame, levels: list[tuple[str, float]]) -> Picture:
    """Return the picture of the median step and waiting time of all ranks over the steps.

    ``levels``: (name, predicted step time in seconds), drawn as lines across.
    """
    step_line, width = _binned_column("step, median", frame, "step_s", band=True)
    waiting_line, _ = _binned_column("of it waiting", frame, "wait_s")
    figure = Lines(
        lines=[step_line, waiting_line],
        xlabel="step",
        ylabel="time",
        title="Step time over time",
        levels=levels,
        seconds=True,
        whole="x",
    )
    points_remark = "" if width == 1 else f" Each point stands for {width:,} steps."
    columns = {"step": "step:,.0f", "median": "median_s", "5 %": "low_s", "95 %": "high_s", "waiting": "wait_s"}
    points = {
        "step": step_line.x,
        "median_s": step_line.y,
        "low_s": step_line.low,
        "high_s": step_line.high,
        "wait_s": waiting_line.y,
    }
    rows = pd.DataFrame(points).to_dict("records")
    table = tabled("Step time over time, all ranks", "measured", rows, columns)
    return pictured(f"Step time of all ranks; the band holds nine of ten rows.{points_remark}", table, figure)


def _phases_picture(frame: pd.DataFrame) -> Picture:
    """Return the phases (compute, wait, sync) of each rank's median step as lanes and a table.

    Of many ranks the 24 of longest compute are drawn.
    """
    medians = frame.groupby("rank")[[*_PHASES, "step_s", "batch", "memory_bytes"]].median()
    medians["device"] = frame.groupby("rank")["device"].last()
    drawn = medians if len(medians) <= _RANKS_DRAWN else medians.nlargest(_RANKS_DRAWN, "compute_s").sort_index()
    lanes = [
        (f"rank {rank}", stacked({key.removesuffix("_s"): float(row[key]) for key in _PHASES}))
        for rank, row in drawn.iterrows()
    ]
    columns: dict[str, Column[Any]] = {"rank": "rank", "device": "device", "batch": "batch:,.0f"}
    columns |= {key.removesuffix("_s"): key for key in (*_PHASES, "step_s")}
    columns["waiting"] = lambda row: f"{row['wait_s'] / row['step_s']:.1%}" if row["step_s"] > 0 else "-"
    columns["peak memory"] = "memory_bytes"
    rows = medians.reset_index().to_dict("records")
    table = tabled("Median step of each rank", "measured", rows, columns, text_columns=2)
    drawn_remark = (
        f" The {_RANKS_DRAWN} of {len(medians)} ranks that compute longest." if len(medians) > _RANKS_DRAWN else ""
    )
    figure = Lanes(lanes=lanes, xlabel="median step", title="Where each rank's step goes")
    return pictured(f"Where each rank's median step goes.{drawn_remark}", table, figure)


def _batch_picture(frame: pd.DataFrame) -> Blocks:
    """Return the picture of batch sizes over the steps: a line per rank or, of many ranks, their median and spread.

    Returns [] if all ranks and steps have the same batch.
    """
    if frame["batch"].min() == frame["batch"].max():
        return []
    parts = {str(rank): part for rank, part in frame.groupby("rank")}
    if len(parts) <= _BATCH_LINES:
        lines = [_binned_column(f"rank {rank}", part, "batch")[0] for rank, part in parts.items()]
    else:
        # The lines of many ranks would be indistinguishable.
        parts = {"all": frame}
        lines = [_binned_column("median of the ranks", frame, "batch", band=True)[0]]
    title = "Batch size of each rank over time"
    figure = Lines(lines=lines, xlabel="step", ylabel="samples", title=title, draw="steps", whole="xy")
    rows = []
    for part in parts.values():
        sizes = part["batch"]
        rows.append((sizes.iloc[0], sizes.min(), sizes.median(), sizes.max(), sizes.iloc[-1]))
    columns = {name: f"{index}:,.0f" for index, name in enumerate(("first", "least", "median", "most", "last"))}
    table = tabled("Local batch sizes", "measured", rows, columns, names=("rank", parts))
    return [pictured("Samples that each rank processed in a step.", table, figure)]


def _agent_picture(frame: pd.DataFrame) -> Blocks:
    """Return the picture of a goodput agent's noise scale, total batch and learning rate factor over the steps, as a list.

    Returns [] for a run without an agent.
    """
    agent_rows = frame[frame["noise_scale"].notna()]
    if agent_rows.empty:
        return []
    noise, _ = _binned_column("gradient noise scale", agent_rows, "noise_scale")
    total_batch, _ = _binned_column("total batch size", agent_rows, "total_batch")
    factor, _ = _binned_column("", agent_rows, "learning_rate_factor")  # only for the table, so without a label
    title = "Noise scale and total batch over time"
    figure = Lines(lines=[noise, total_batch], xlabel="step", ylabel="samples", title=title, whole="x")
    rates = [None if np.isnan(rate) else rate for rate in factor.y]
    rows = [*zip(noise.x, noise.y, total_batch.y, rates, strict=True)]
    columns = {"step": "0:,.0f", "noise scale": "1:,.0f", "total batch": "2:,.0f", "learning rate factor": "3:.3f"}
    table = tabled("What the agent knew and set", "measured", rows, columns)
    return [pictured("Gradient noise scale and the total batch that the agent set.", table, figure)]


def _compare_with_plans(
    frame: pd.DataFrame, plans: Sequence[tuple[str, Plan]]
) -> tuple[Blocks, list[tuple[str, float]], list[str]]:
    """Return the comparison of a run with plans: (tables, at most three predicted steps as (name, seconds), sentences).

    A plan that the run cannot be compared with is left out; a sentence says why.
    """
    blocks: Blocks = []
    levels: list[tuple[str, float]] = []
    remarks: list[str] = []
    left_out: list[str] = []
    for name, plan in plans:
        try:
            # Raises InputError for a plan of another job: other devices or processes.
            verification = verify(plan, read_run(frame, "telemetry"))
        except InputError as error:
            left_out.append(f"{shortened(name, 60)} ({error.where} {error.problem})")
            continue
        levels.append((f"predicted, {name}", verification.iteration.predicted_s))
        blocks.append(verified_table(verification, f"Predicted by {shortened(name, 60)} against measured"))
        remarks.append(
            f"Against {shortened(name, 60)}: {'; '.join(few(verification.refit)) or 'nothing to fit again'}."
        )
    if left_out:
        remarks.append(f"Not compared with {'; '.join(few(left_out, 8))}.")
    return blocks, levels[:3], remarks


def sync_section(rows: Sequence[Mapping[str, Any]], name: str) -> Section:
    """Return the section of a synchronisation server's checked rows (kind ``ddltool.sync``): waiting, staleness, supersteps."""
    steps = [row for row in rows if row["event"] == "step"]
    barriers = [row for row in rows if row["event"] == "barrier"]
    summaries = [row for row in rows if row["event"] == "summary"]
    workers = len({row["worker"] for row in steps})
    lead = [f"{counted(len(steps), 'step')} of {counted(workers, 'worker')}, {counted(len(barriers), 'barrier')}."]
    if summaries:
        last = summaries[-1]
        lead.append(f"Policy {last['policy']}: {last['updates']:,} updates, {last['updates_per_s']:.4g} per second.")
    else:
        lead.append("The file has no last line yet: the server still runs, or was killed.")
    blocks: Blocks = [_waiting_picture(steps), _staleness_picture(steps)] if steps else []
    if barriers:
        blocks.append(_superstep_table(barriers))
    if moved := [row for row in rows if row["event"] in ("left", "joined")]:
        columns: dict[str, Column[Mapping[str, Any]]] = {"at": "time_s", "worker": "worker", "what": "event"}
        columns["why"] = lambda row: row.get("reason", "")
        blocks.append(tabled("Workers that came and went", "measured", moved, columns, text_columns=4))
    return Section(title=f"Synchronisation: {name}", lead=lead, blocks=blocks, verdict=_sync_verdict(steps))


def _waiting_picture(steps: Sequence[Mapping[str, Any]]) -> Picture:
    """Return the table of each worker's waiting and staleness, with bars of the time that it waited for others.

    ``steps``: the server's rows of steps, at least one.
    """
    # Columns of the table: (field of a step's row, how a worker's rows are summed up).
    figures = {"steps": ("step", "size"), "waited_s": ("wait_s", "sum"), "median_s": ("wait_s", "median")}
    figures |= {"staleness": ("staleness", "mean"), "most": ("staleness", "max"), "gap": ("gap", "max")}
    by_worker = pd.DataFrame(steps).groupby("worker").agg(**figures)
    columns: dict[str, Column[Any]] = {"steps": "steps", "waited": "waited_s", "median wait": "median_s"}
    columns |= {"staleness": "staleness:.2f", "most": "most", "gap": "gap"}
    rows = by_worker.reset_index().to_dict("records")
    table = tabled("By worker", "measured", rows, {"worker": "worker", **columns})
    drawn_remark = ""
    waited_s = by_worker["waited_s"]
    if len(waited_s) > _RANKS_DRAWN:
        drawn_remark = f" The {_RANKS_DRAWN} of {len(waited_s)} workers that waited longest."
        waited_s = waited_s.nlargest(_RANKS_DRAWN)
    bars = [(f"worker {worker}", float(waited)) for worker, waited in waited_s.items()]
    figure = Bars(rows=bars, xlabel="time waited for others", title="Waiting by worker", seconds=True)
    return pictured(f"How long each worker waited for others.{drawn_remark}", table, figure)


def _staleness_picture(steps: Sequence[Mapping[str, Any]]) -> Picture:
    """Return the picture of the number of steps by staleness: the updates by others that a used gradient had not seen."""
    counts = sorted(Counter(row["staleness"] for row in steps).items())
    step_count = sum(count for _, count in counts)
    columns: dict[str, Column[tuple[int, int]]] = {"staleness": "0:d", "steps": "1"}
    columns["share"] = lambda row: f"{row[1] / step_count:.1%}"
    table = tabled("Staleness of the gradients that were used", "measured", counts, columns)
    bars = [
        (f"{counted(staleness, 'update')} old" if staleness else "up to date", float(count))
        for staleness, count in counts
    ]
    figure = Bars(rows=bars[:_RANKS_DRAWN], xlabel="steps", title="Staleness of gradients")
    return pictured(
        f"How many updates old the used gradients were.{how_many_drawn(_RANKS_DRAWN, bars, 'ages')}", table, figure
    )


def _superstep_table(barriers: Sequence[Mapping[str, Any]]) -> Table:
    """Return the table of supersteps: end, length, and the mean error of the predicted ends of the workers."""

    def error(row: Mapping[str, Any]) -> str:
        """Return the mean relative error of a superstep's predicted ends; "-" if it has none, as in the warm-up."""
        ends = zip(row["predicted_end_s"], row["end_s"], strict=False)
        errors = [predicted_s / measured_s - 1 for predicted_s, measured_s in ends if measured_s]
        return f"{np.mean(errors):+.1%}" if errors else "-"

    columns: dict[str, Column[Mapping[str, Any]]] = {
        "superstep": "superstep",
        "over at": "time_s",
        "length": "length_s",
        "iterations": lambda row: f"{min(row['iterations'])} .. {max(row['iterations'])}" if row["iterations"] else "-",
        "ends, predicted against real": error,
    }
    return tabled("Supersteps", "measured", barriers, columns)


_LANES_DRAWN = 16


def stragglers_section(result: StragglersResult, name: str) -> Section:
    """Return the section on ranks that slow the others: the verdict, the findings, the parts of the ranks' steps."""
    lead = [result.verdict, *(finding.sentence for finding in result.findings[1:])]
    share = "" if result.m_w is None else f"; the slowest 3 % of the ranks explain {result.m_w:.0%} of that (M_W)"
    lead.append(
        f"A step takes {show_seconds(result.step_s)}, {result.slowdown:.3f} times the "
        f"{show_seconds(result.ideal_step_s)} of equal ranks (slowdown S){share}."
    )
    blocks: Blocks = []
    if result.splits:
        blocks.append(_splits_picture(result))
    if result.classes:
        rows = sorted(
            (*result.classes.items(), *result.stages.items(), *result.workers.items()), key=lambda row: -row[1]
        )
        columns = {"operations": "0", "alone": "1:.3f"}
        blocks.append(tabled("What the slowdown is of", "predicted", rows, columns))
    return Section(
        title=f"Stragglers: {name}", lead=[*lead, *result.remarks], blocks=blocks, verdict=_stragglers_verdict(result)
    )


def _splits_picture(result: StragglersResult) -> Picture:
    """Return the table of the parts of each rank's step, with the ranks' timeline or, without one, bars of their waiting."""
    columns: dict[str, Column[RankSplit]] = {"step": "step_s", "waiting": "wait_s", "if median": "step_if_median_s"}
    columns |= {part: _part_column(part) for part in result.splits[0].parts_s}
    columns["exposed"] = "exposed_s"
    names = ("rank", [str(row.rank) for row in result.splits])
    spare = ("optimizer", "exposed", "host", "input")
    table = tabled("Where the ranks' steps go", "measured", result.splits, columns, names=names, spare=spare)
    if result.timeline:
        drawn = result.timeline[:_LANES_DRAWN]
        end_s = max((span[1] for lane in drawn for span in lane.spans), default=0.0)
        lanes = [(lane.rank, merged([Span(*span) for span in lane.spans], end_s)) for lane in drawn]
        figure = Lanes(lanes=lanes, title="What each rank did")
        return pictured(
            f"The first steps, on one clock.{how_many_drawn(_LANES_DRAWN, result.timeline, 'ranks')}", table, figure
        )
    rows = [(f"rank {row.rank}", row.wait_s) for row in result.splits[:_LANES_DRAWN]]
    bars = Bars(rows=rows, xlabel="waiting in a step", title="Waiting by rank", seconds=True)
    return pictured(
        f"Who waits: a straggler does not.{how_many_drawn(_LANES_DRAWN, result.splits, 'ranks')}", table, bars
    )


def _part_column(part: str) -> Column[RankSplit]:
    """Return the column of one part of the ranks' steps, as time in a readable unit."""
    return lambda row: show_seconds(row.parts_s[part])


def _stragglers_verdict(result: StragglersResult) -> Verdict:
    """Return the verdict: the main finding, the numbers of steps and ranks behind it, and the command that helps."""
    finding = result.findings[0] if result.findings else None
    sure = f"slowdown {result.slowdown:.3f} over {counted(result.steps, 'step')} of {counted(result.ranks, 'rank')}"
    then = (finding.command or "") if finding is not None else "nothing: the ranks are alike"
    return Verdict(answer=result.verdict, sure=sure, then=then, good=finding is None)


def _telemetry_verdict(steady: pd.DataFrame) -> Verdict:
    """Return the verdict on a run: the median step and the share of time that ranks waited, after the warm-up."""
    low, middle, high = steady["step_s"].quantile([0.25, 0.5, 0.75])
    # 1e-300: steps without samples may take no time.
    waiting = float(steady["wait_s"].sum() / max(steady["step_s"].sum(), 1e-300))
    return Verdict(
        answer=f"A step took {show_seconds(middle)}; {waiting:.0%} of it waiting for others (measured).",
        sure=f"half of all between {show_seconds(low)} and {show_seconds(high)}",
        then="ddltool verify PLAN TELEMETRY; ddltool fit on it makes the next plan better",
    )


def _sync_verdict(steps: Sequence[Mapping[str, Any]]) -> Verdict | None:
    """Return the verdict on a server: how long a worker's pull waited; None before the first step."""
    waits = [row["wait_s"] for row in steps]
    if not waits:
        return None
    low, middle, high = np.quantile(waits, [0.25, 0.5, 0.75])
    return Verdict(
        answer=f"A pull waited {show_seconds(middle)} for other workers (measured).",
        sure=f"half of all between {show_seconds(low)} and {show_seconds(high)}",
    )
