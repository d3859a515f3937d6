"""The report's sections of telemetry: the hook's (or agent's) steps, and a synchronisation server's rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.deciding.feedback import read_run
from ddltool.analyzers.deciding.verification import verify
from ddltool.analyzers.goodput.observations import WARMUP_STEPS
from ddltool.analyzers.reporting.figures import Bars, Line, Lines, Spans, stacked
from ddltool.analyzers.reporting.result_sections import verified_table
from ddltool.analyzers.reporting.section import Picture, Section, Table, counted, few, shortened
from ddltool.errors import InputError
from ddltool.plan import Plan
from ddltool.units import show_bytes, show_seconds

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[np.float64]
Blocks = list[Picture | Table]
POINTS = 240
_RANKS_DRAWN, _BATCH_LINES = 24, 6
_PHASES = ("compute_s", "wait_s", "sync_s")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Binned:
    """Values over steps, in at most 240 equal bins: middle step, median, 5 % and 95 % quantile, each (b,)."""

    step: Array
    median: Array
    low: Array
    high: Array
    width: int
    """Steps per bin."""


def binned(step: NDArray[np.int64], value: Array, points: int = POINTS) -> Binned:
    """Return ``value`` (n,) over ``step`` (n,), any order, in at most ``points`` bins of equal width."""
    first = int(step.min())
    width = max(1, -(-(int(step.max()) - first + 1) // points))
    bins = (step - first) // width
    order = np.argsort(bins, kind="stable")
    found, starts = np.unique(bins[order], return_index=True)
    parts = np.split(value[order], starts[1:])
    quantiles = np.array([np.quantile(part, (0.5, 0.05, 0.95)) for part in parts])
    middle = np.asarray(first + found * width + (width - 1) / 2, dtype=np.float64)
    return Binned(step=middle, median=quantiles[:, 0], low=quantiles[:, 1], high=quantiles[:, 2], width=width)


def telemetry_section(frame: pd.DataFrame, name: str, plans: Sequence[tuple[str, Plan]]) -> Section:
    """Return the section of a run's telemetry rows; ``plans`` (file name, plan) are held against it.

    ``frame`` has the columns of :class:`~ddltool.telemetry.TelemetryRow`, one row per rank and step, in any order.
    """
    steady = frame[frame["step"] >= frame["step"].min() + WARMUP_STEPS]
    steady = steady if len(steady) else frame
    ranks = int(frame["rank"].nunique())
    lead = [
        f"{counted(len(frame), 'row')}: steps {frame['step'].min():,} to {frame['step'].max():,} of {counted(ranks, 'rank')} "
        f"(world size {', '.join(str(size) for size in sorted(set(frame['world_size']))[:8])}); median step "
        f"{show_seconds(float(steady['step_s'].median()))}. Medians leave out the first {WARMUP_STEPS} steps."
    ]
    compared, levels, words = _compared(frame, plans)
    blocks: Blocks = [_step_times(frame, levels), _phases(steady), *compared, *_batches(frame)]
    blocks += _agent(frame)
    return Section(title=f"Telemetry: {name}", lead=lead + words, blocks=blocks)


def _step_times(frame: pd.DataFrame, levels: list[tuple[str, float]]) -> Picture:
    step = frame["step"].to_numpy(dtype=np.int64)
    made = binned(step, frame["step_s"].to_numpy(dtype=float))
    waiting = binned(step, frame["wait_s"].to_numpy(dtype=float))
    lines = [
        Line(label="step, median", x=made.step, y=made.median, low=made.low, high=made.high),
        Line(label="of it waiting", x=waiting.step, y=waiting.median),
    ]
    figure = Lines(
        lines=lines, xlabel="step", ylabel="time", title="Step time over time", levels=levels, seconds=True, whole="x"
    )
    per = "" if made.width == 1 else f" Each point stands for {made.width:,} steps."
    rows = [
        (f"{at:,.0f}", *(show_seconds(float(value)) for value in (middle, low, high, wait)))
        for at, middle, low, high, wait in zip(made.step, made.median, made.low, made.high, waiting.median, strict=True)
    ]
    table = Table(
        caption="Step time over time, all ranks",
        header=("step", "median", "5 %", "95 %", "waiting"),
        rows=rows,
        label="measured",
    )
    caption = f"Step time of all ranks; the band holds nine of ten rows.{per}"
    return Picture(figures=[figure], caption=caption, label="measured", table=table)


def _phases(frame: pd.DataFrame) -> Picture:
    """Return where each rank's median step goes; of many ranks those that compute longest."""
    medians = frame.groupby("rank")[[*_PHASES, "step_s", "batch", "memory_bytes"]].median()
    device: dict[Any, str] = frame.groupby("rank")["device"].last().to_dict()
    drawn = medians if len(medians) <= _RANKS_DRAWN else medians.nlargest(_RANKS_DRAWN, "compute_s").sort_index()
    lanes = [
        (f"rank {rank}", stacked({key.removesuffix("_s"): float(row[key]) for key in _PHASES}))
        for rank, row in drawn.iterrows()
    ]
    rows = [
        (
            str(rank),
            device[rank],
            f"{row['batch']:,.0f}",
            *(show_seconds(float(row[key])) for key in (*_PHASES, "step_s")),
            f"{row['wait_s'] / row['step_s']:.1%}" if row["step_s"] > 0 else "-",
            show_bytes(float(row["memory_bytes"])),
        )
        for rank, row in medians.iterrows()
    ]
    table = Table(
        caption="Median step of each rank",
        header=("rank", "device", "batch", "compute", "wait", "sync", "step", "waiting", "peak memory"),
        rows=rows,
        label="measured",
        text_columns=2,
    )
    some = f" The {_RANKS_DRAWN} of {len(medians)} ranks that compute longest." if len(medians) > _RANKS_DRAWN else ""
    caption = f"Where each rank's median step goes.{some}"
    figure = Spans(lanes=lanes, xlabel="median step", title="Where each rank's step goes")
    return Picture(figures=[figure], caption=caption, label="measured", table=table)


def _batches(frame: pd.DataFrame) -> Blocks:
    """Return the batch sizes over the steps, where they change or differ: by rank, or their spread over many ranks."""
    if frame["batch"].min() == frame["batch"].max():
        return []
    ranks = sorted(set(frame["rank"]))
    step = frame["step"].to_numpy(dtype=np.int64)
    batch = frame["batch"].to_numpy(dtype=float)
    if len(ranks) <= _BATCH_LINES:
        lines, rows = [], []
        for rank in ranks:
            own = (frame["rank"] == rank).to_numpy()
            made = binned(step[own], batch[own])
            lines.append(Line(label=f"rank {rank}", x=made.step, y=made.median))
            rows.append((str(rank), *_sizes(batch[own])))
    else:
        made = binned(step, batch)
        lines = [Line(label="median of the ranks", x=made.step, y=made.median, low=made.low, high=made.high)]
        rows = [("all", *_sizes(batch))]
    figure = Lines(
        lines=lines,
        xlabel="step",
        ylabel="samples",
        title="Batch size of each rank over time",
        draw="steps",
        whole="xy",
    )
    header = ("rank", "first", "least", "median", "most", "last")
    table = Table(caption="Local batch sizes", header=header, rows=rows, label="measured")
    caption = "Samples that each rank processed in a step."
    return [Picture(figures=[figure], caption=caption, label="measured", table=table)]


def _sizes(batch: Array) -> tuple[str, ...]:
    """Return the first, least, median, most and last of batch sizes, (n,) in the order of steps."""
    return tuple(f"{value:,.0f}" for value in (batch[0], batch.min(), np.median(batch), batch.max(), batch[-1]))


def _agent(frame: pd.DataFrame) -> Blocks:
    """Return what a goodput agent wrote: noise scale, learning rate factor and total batch over the steps."""
    if "noise_scale" not in frame.columns or not frame["noise_scale"].notna().any():
        return []
    known = frame[frame["noise_scale"].notna()]
    step = known["step"].to_numpy(dtype=np.int64)
    noise = binned(step, known["noise_scale"].to_numpy(dtype=float))
    total = binned(step, known["total_batch"].to_numpy(dtype=float))
    lines = [
        Line(label="gradient noise scale", x=noise.step, y=noise.median),
        Line(label="total batch size", x=total.step, y=total.median),
    ]
    title = "Noise scale and total batch over time"
    figure = Lines(lines=lines, xlabel="step", ylabel="samples", title=title, whole="x")
    factor = known.get("learning_rate_factor")
    factors = None if factor is None or not factor.notna().all() else binned(step, factor.to_numpy(dtype=float)).median
    rows = [
        (f"{at:,.0f}", f"{phi:,.0f}", f"{size:,.0f}", "-" if factors is None else f"{factors[place]:.3f}")
        for place, (at, phi, size) in enumerate(zip(noise.step, noise.median, total.median, strict=True))
    ]
    header = ("step", "noise scale", "total batch", "learning rate factor")
    table = Table(caption="What the agent knew and set", header=header, rows=rows, label="measured")
    caption = "Gradient noise scale and the total batch that the agent set."
    return [Picture(figures=[figure], caption=caption, label="measured", table=table)]


def _compared(
    frame: pd.DataFrame, plans: Sequence[tuple[str, Plan]]
) -> tuple[Blocks, list[tuple[str, float]], list[str]]:
    """Return tables of predicted against measured, the predicted step times, and why a plan is not compared."""
    blocks: Blocks = []
    levels: list[tuple[str, float]] = []
    words: list[str] = []
    left_out: list[str] = []
    for name, plan in plans:
        try:
            found = verify(plan, read_run(frame, "telemetry"))
        except InputError as error:
            left_out.append(f"{shortened(name, 60)} ({error.where} {error.problem})")
            continue
        levels.append((f"predicted, {name}", found.iteration.predicted_s))
        blocks.append(verified_table(found, f"Predicted by {shortened(name, 60)} against measured"))
        words.append(f"Against {shortened(name, 60)}: {'; '.join(few(found.refit)) or 'nothing to fit again'}.")
    if left_out:
        words.append(f"Not compared with {'; '.join(few(left_out, 8))}.")
    return blocks, levels[:3], words


def sync_section(rows: Sequence[Mapping[str, Any]], name: str) -> Section:
    """Return the section of a synchronisation server's checked rows (kind ``ddltool.sync``): waiting and staleness."""
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
    blocks: Blocks = []
    if steps:
        blocks += [_sync_waiting(steps), _sync_staleness(steps)]
    if barriers:
        blocks.append(_sync_barriers(barriers))
    left = [row for row in rows if row["event"] in ("left", "joined")]
    if left:
        cells = [
            (show_seconds(row["time_s"]), str(row["worker"]), row["event"], str(row.get("reason", ""))) for row in left
        ]
        header = ("at", "worker", "what", "why")
        blocks.append(
            Table(
                caption="Workers that came and went",
                header=header,
                rows=cells,
                label="measured",
                text_columns=4,
            )
        )
    return Section(title=f"Synchronisation: {name}", lead=lead, blocks=blocks)


def _sync_waiting(steps: Sequence[Mapping[str, Any]]) -> Picture:
    workers = sorted({row["worker"] for row in steps})
    rows, bars = [], []
    for worker in workers:
        own = [row for row in steps if row["worker"] == worker]
        waits = np.array([row["wait_s"] for row in own])
        stale = np.array([row["staleness"] for row in own])
        bars.append((f"worker {worker}", float(waits.sum())))
        rows.append(
            (
                str(worker),
                f"{len(own):,}",
                show_seconds(float(waits.sum())),
                show_seconds(float(np.median(waits))),
                f"{stale.mean():.2f}",
                str(stale.max()),
                str(max(row["gap"] for row in own)),
                f"{sum(row['dropped'] for row in own):,}",
            )
        )
    header = ("worker", "steps", "waited", "median wait", "staleness", "most", "gap", "dropped")
    table = Table(caption="By worker", header=header, rows=rows, label="measured")
    some = ""
    if len(bars) > _RANKS_DRAWN:
        some = f" The {_RANKS_DRAWN} of {len(bars)} workers that waited longest."
        bars = sorted(bars, key=lambda bar: -bar[1])[:_RANKS_DRAWN]
    figure = Bars(rows=bars, xlabel="time waited for others", title="Waiting by worker", seconds=True)
    caption = f"How long each worker waited for others.{some}"
    return Picture(figures=[figure], caption=caption, label="measured", table=table)


def _sync_staleness(steps: Sequence[Mapping[str, Any]]) -> Picture:
    values, counts = np.unique([row["staleness"] for row in steps if not row["dropped"]], return_counts=True)
    share = counts / max(counts.sum(), 1)
    rows = [(str(value), f"{count:,}", f"{part:.1%}") for value, count, part in zip(values, counts, share, strict=True)]
    header = ("staleness", "steps", "share")
    table = Table(caption="Staleness of the gradients that were used", header=header, rows=rows, label="measured")
    bars = [(_updates(int(value)), float(count)) for value, count in zip(values, counts, strict=True)]
    figure = Bars(rows=bars[:_RANKS_DRAWN], xlabel="steps", title="Staleness of gradients")
    some = f" The {_RANKS_DRAWN} freshest of {len(bars)} are drawn." if len(bars) > _RANKS_DRAWN else ""
    caption = f"How many updates old the used gradients were.{some}"
    return Picture(figures=[figure], caption=caption, label="measured", table=table)


def _updates(staleness: int) -> str:
    return "up to date" if staleness == 0 else f"{counted(staleness, 'update')} old"


def _sync_barriers(barriers: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for row in barriers:
        pairs = zip(row["predicted_end_s"], row["end_s"], strict=False)
        known = [(ahead, real) for ahead, real in pairs if real]
        error = f"{np.mean([ahead / real - 1 for ahead, real in known]):+.1%}" if known else "-"
        counts = row["iterations"]
        spread = f"{min(counts)} .. {max(counts)}" if counts else "-"
        rows.append((str(row["superstep"]), show_seconds(row["time_s"]), show_seconds(row["length_s"]), spread, error))
    header = ("superstep", "over at", "length", "iterations", "ends, predicted against real")
    return Table(caption="Supersteps", header=header, rows=rows, label="measured")
