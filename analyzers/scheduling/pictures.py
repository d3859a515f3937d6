"""Pictures of replays: completion times, who held the GPUs, one job's life. Data in, PNG or SVG bytes out.

A replay's result leaves out who held what in each round: :class:`Recorder` wraps a policy and keeps that. Colours are
Okabe and Ito's, which people with colour blindness can tell apart; lines differ in their dashes and areas in their
hatching as well, so that a print without colours can be read.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from numpy.typing import NDArray

from ddltool.analyzers.scheduling.cluster import Allocation, ClusterSpec, count_gpus
from ddltool.analyzers.scheduling.job import SimulatedJob
from ddltool.analyzers.scheduling.simulator import JobResult, Policy, SimulationResult
from ddltool.errors import InputError, did_you_mean

Floats = NDArray[np.float64]
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#999999")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 3)), (0, (3, 1)))
_HATCHES = ("", "//", "..", "\\\\", "xx", "--", "++", "oo")
FORMATS = ("png", "svg")
# Points of time at which an area is drawn: no screen shows more.
_MOST_POINTS = 2000
# Times at which a log axis may be marked, seconds.
_MARKS = (
    *(1e-3, 1e-2, 0.1, 1, 2, 5, 10, 20),
    *(60, 120, 300, 600, 1200, 1800),
    *(3600, 7200, 18000, 36000),
    *(86400, 172800, 432000, 864000, 8.64e6, 8.64e7),
)
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "ddltool",
    "text.parse_math": False,  # a name may hold dollars
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.4,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """From ``time_s`` on job ``job`` (its row in the workload) holds ``allocation``; () is none."""

    time_s: float
    job: int
    allocation: Allocation
    restarted: bool
    """Whether this starts it anew; False for the first start and for a stop."""

    @property
    def gpus(self) -> int:
        """How many GPUs."""
        return count_gpus(self.allocation)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Job ``job`` was first seen to run with ``batch_size`` samples per step at ``time_s``."""

    time_s: float
    job: int
    batch_size: int


class Recorder:
    """A policy that passes everything on to ``policy`` and keeps its answers, where they changed.

    Batches are those that jobs ran with when the round began, so a change within an interval is seen at its end, and
    a batch that a job had between two rounds only is not seen. What failures took
    away counts as held until the next round.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.name, self.tuning = policy.name, policy.tuning
        self.pools = getattr(policy, "pools", False)
        self.held: list[Held] = []
        self.batches: list[Batch] = []
        self._batch: dict[int, int] = {}
        self._known: dict[int, Allocation] = {}

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        """Return what the policy answers."""
        has = {job.index: job.allocation for job in jobs}
        # What the simulator took away (a node failed) is seen here at the earliest; a finished job has nothing either.
        for index in [index for index, known in self._known.items() if known and known != has.get(index, ())]:
            self._note(now_s, index, (), restarted=False)
        for job in jobs:
            # A job in its restart has not trained with its batch yet.
            if job.allocation and now_s > job.running_from_s:
                size = job.total_batch_size
                if self._batch.get(job.index) != size:
                    self._batch[job.index] = size
                    self.batches.append(Batch(time_s=now_s, job=job.index, batch_size=size))
        chosen = self.policy.allocate(jobs, cluster, now_s)
        for job in jobs:
            new = chosen.get(job.index, ())
            if new != job.allocation:
                self._note(now_s, job.index, new, restarted=bool(new) and job.starts > 0)
        return chosen

    def _note(self, now_s: float, job: int, allocation: Allocation, *, restarted: bool) -> None:
        self._known[job] = allocation
        self.held.append(Held(time_s=now_s, job=job, allocation=allocation, restarted=restarted))


def completion_picture(results: Mapping[str, SimulationResult], *, file_format: str = "png") -> bytes:
    """Return the distribution of completion times (share of jobs done within t, log t), one line per policy."""
    if not results:
        raise InputError("pictures", "have no policy", "replay at least one")
    with mpl.rc_context(_STYLE):
        figure, axis = _figure(4.5)
        for number, (name, result) in enumerate(results.items()):
            # A job that ends as it arrives has no place on a log axis; a millisecond is as good.
            jct = np.maximum(np.sort([job.jct_s for job in result.jobs]), 1e-3)
            share = np.arange(1, len(jct) + 1) / len(jct)
            axis.step(
                np.concatenate([jct[:1], jct]),
                np.concatenate([[0.0], share]),
                where="post",
                color=COLOURS[number % len(COLOURS)],
                linestyle=_DASHES[number % len(_DASHES)],
                linewidth=1.8,
                label=f"{name} (mean {_duration(float(jct.mean()))})",
            )
        axis.set_xscale("log")
        _log_times(axis)
        axis.set_xlabel("completion time, from submission to finish")
        axis.set_ylabel("share of jobs")
        axis.set_ylim(0, 1.02)
        axis.grid(True, which="major", alpha=0.25)
        axis.legend(loc="lower right", frameon=False)
        axis.set_title("Completion times (simulated)", loc="left")
        return _bytes(figure, file_format)


def allocation_picture(result: SimulationResult, record: Recorder, *, file_format: str = "png") -> bytes:
    """Return the GPUs held over time, stacked by application; restarts count as held, as they are.

    Above eight applications the smallest are drawn as "others".
    """
    names = [job.application for job in result.jobs]
    times, held = gpus_over_time(result, record)
    order = _by_use(names, times, held)
    stacks = {
        label: held[[row for row, name in enumerate(names) if name in members]].sum(axis=0) for label, members in order
    }
    with mpl.rc_context(_STYLE):
        figure, axis = _figure(4.5)
        hours = times / 3600
        keep = _thinned(len(times))
        layers = axis.stackplot(
            hours[keep],
            *(layer[keep] for layer in stacks.values()),
            labels=list(stacks),
            colors=COLOURS[: len(stacks)],
            step="post",
            edgecolor="white",
            linewidth=0.2,
        )
        for layer, hatch in zip(layers, _HATCHES, strict=False):
            layer.set_hatch(hatch)
        axis.axhline(result.total_gpus, color="black", linewidth=1, linestyle="--")
        axis.annotate(
            f"all {result.total_gpus}",
            (1, result.total_gpus),
            xycoords=("axes fraction", "data"),
            va="bottom",
            ha="right",
        )
        axis.set_xlabel("hours since the first submission")
        axis.set_ylabel("GPUs held")
        axis.set_xlim(0, max(float(hours[-1]), 1e-6))
        axis.set_ylim(0, result.total_gpus * 1.1)
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
        figure.legend(loc="outside lower center", ncols=4, frameon=False)
        axis.set_title(f"Who holds the GPUs under {result.policy} (simulated)", loc="left")
        return _bytes(figure, file_format)


def life_picture(result: SimulationResult, record: Recorder, job: str, *, file_format: str = "png") -> bytes:
    """Return one job's life: GPUs and batch size over time, restarts marked. Raises InputError for an unknown job."""
    index = _find(result, job)
    found = result.jobs[index]
    end = found.finish_s - found.submit_s
    scale, unit = (3600.0, "hours") if end > 7200 else (60.0, "minutes")
    steps = [
        (entry.time_s - found.submit_s, entry.gpus)
        for entry in record.held
        if entry.job == index and entry.time_s < found.finish_s
    ]
    moves = [entry.time_s - found.submit_s for entry in record.held if entry.job == index and entry.restarted]
    batches = [(entry.time_s - found.submit_s, entry.batch_size) for entry in record.batches if entry.job == index]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(8, 5), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True)
        times = np.array([0.0, *(at for at, _ in steps), end]) / scale
        gpus = np.array([0, *(count for _, count in steps), 0])
        top.step(times, gpus, where="post", color=COLOURS[0], linewidth=1.8)
        top.fill_between(times, gpus, step="post", color=COLOURS[0], alpha=0.2)
        top.set_ylabel("GPUs")
        top.set_ylim(0, max(int(gpus.max()), 1) * 1.2)
        top.yaxis.set_major_locator(MaxNLocator(integer=True))
        if moves:
            at = np.array(moves) / scale
            values = gpus[np.searchsorted(times[:-1], at, side="right") - 1]
            top.plot(at, values, "v", color=COLOURS[1], markersize=6, linestyle="none", label=f"restart ({len(moves)})")
            top.legend(loc="upper right", frameon=False)
        if batches:
            sizes = [size for _, size in batches]
            bottom.step(
                np.array([*(at for at, _ in batches), end]) / scale,
                np.array([*sizes, sizes[-1]]),
                where="post",
                color=COLOURS[2],
                linewidth=1.8,
            )
            bottom.set_ylim(0, max(sizes) * 1.15)
        bottom.set_ylabel("batch size, samples")
        bottom.set_xlabel(f"{unit} since its submission")
        bottom.set_xlim(0, end / scale)
        for axis in (top, bottom):
            axis.grid(True, alpha=0.25)
        top.set_title(f"{found.name} ({found.application}) under {result.policy} (simulated)", loc="left")
        return _bytes(figure, file_format)


def gpus_over_time(result: SimulationResult, record: Recorder) -> tuple[Floats, Floats]:
    """Return times (t,) in seconds since the first submission and the GPUs of each job from each on, (n, t).

    The last column is the end, where nothing is held.
    """
    ends = [job.finish_s for job in result.jobs]
    changes = [(entry.time_s, entry.job, entry.gpus) for entry in record.held if entry.time_s < ends[entry.job]]
    changes += [(job.finish_s, index, 0) for index, job in enumerate(result.jobs)]
    begin = min(job.submit_s for job in result.jobs)
    times = np.unique(np.array([begin, *(at for at, _, _ in changes)]))
    held = np.zeros((len(result.jobs), len(times)))
    # Where a job ends in the very round in which another takes its GPUs both are told of at one time; order by job.
    for at, job, gpus in sorted(changes, key=lambda change: change[0]):
        held[job, int(np.searchsorted(times, at)) :] = gpus
    return times - begin, held


def longest_restarted(result: SimulationResult) -> str:
    """Return the job whose life shows most: the one with the most restarts, the longest on a tie."""

    def key(job: JobResult) -> tuple[int, float]:
        return job.restarts, job.jct_s

    return max(result.jobs, key=key).name


def _find(result: SimulationResult, job: str) -> int:
    names = [found.name for found in result.jobs]
    if job not in names:
        raise InputError("--picture-job", f"the workload has no job {job!r}", did_you_mean(job, names))
    return names.index(job)


def _by_use(names: Sequence[str], times: Floats, held: Floats) -> list[tuple[str, list[str]]]:
    """Return (label, its names) by GPU time, the most first; the smallest beyond eight as one."""
    use = (held[:, :-1] * np.diff(times)).sum(axis=1)
    total = dict.fromkeys(names, 0.0)
    for name, value in zip(names, use.tolist(), strict=True):
        total[name] += value
    order = sorted(total, key=lambda name: (-total[name], name))
    if len(order) <= len(COLOURS):
        return [(name, [name]) for name in order]
    kept = len(COLOURS) - 1
    return [*((name, [name]) for name in order[:kept]), (f"others ({len(order) - kept})", order[kept:])]


def _thinned(count: int) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, count - 1, min(count, _MOST_POINTS)).astype(np.int64))


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, height), layout="constrained")
    return figure, figure.subplots()


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _log_times(axis: Axes) -> None:
    """Mark the axis at times that people think in, at most eight of them."""
    low, high = axis.get_xlim()
    marks = [at for at in _MARKS if low <= at <= high]
    if len(marks) < 2:
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _duration(value)))
    else:
        shown = marks[:: -(-len(marks) // 8)]
        axis.set_xticks(shown, [_mark(at) for at in shown])
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.set_xlim(low, high)


def _mark(seconds: float) -> str:
    """Return a time on an axis in the largest unit of which it is one or more."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds * 1000:g} ms"


def _bytes(figure: Figure, file_format: str) -> bytes:
    if file_format not in FORMATS:
        raise InputError("picture format", f"is {file_format!r}", "png or svg")
    buffer = io.BytesIO()
    if file_format == "png":
        FigureCanvasAgg(figure)
        figure.savefig(buffer, format="png", metadata={"Software": "ddltool"})
    else:
        FigureCanvasSVG(figure)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
