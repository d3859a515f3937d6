"""Measures training steps in real processes: batch sizes x replicas x accumulation steps. Start at :func:`campaign`.

A *configuration* is one combination of these; a *task* times some steps of one, and a configuration may have several.

Every replica is a process of its own in a gloo (CPU) or NCCL (CUDA) group, started here (:class:`LocalReplicas`) or by
torchrun (:mod:`.torchrun_job`). This module holds the request (:class:`MeasureRequest`), decides what runs next, makes
rows of the times, and writes the file of the rows (:class:`ProfileFile`).
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd

from ddltool.analyzers.job.goodput.curve import Interval, first_to_measure, median_interval, next_to_measure, predict
from ddltool.artifacts import check_writable, is_stream
from ddltool.errors import InputError
from ddltool.profiles import read_profile, write_profile
from ddltool.results import SkippedConfiguration
from ddltool.runtime.measuring.children import Children, meeting_place
from ddltool.runtime.measuring.worker import FEWEST_FOR_AN_INTERVAL, MeasureTask, StepTimings, Subject, connect_replica

RELIABLE_SPREAD = 0.1
SHORTEST_STEP_S = 1e-3
FEWEST_REPEATS = 3
"""A row is doubtful with a larger quartile range (relative to the step time), a shorter step, or fewer repeats."""
MOST_STEPS = 100_000
LARGEST_BATCH = 2**24
MOST_REPLICAS = 4096
"""Limits of what is measured: timed steps of a configuration, batch size, processes."""
_LARGEST_SYNC_SHARE = 0.99
"""Largest share of a step that counts as synchronisation: noise may make it all, but computing takes some."""
# Most steps that one visit times. A median that is still uncertain is timed again later, because a machine's speed drifts.
_STEPS_PER_VISIT = 1000
# The search for saturation doubles batches up to here.
_LARGEST_DOUBLING = 2**16

Key = tuple[int, int, int]
"""A configuration: (replicas, accumulation steps, local batch size)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureRequest(Subject):
    """What to measure: every combination of batch size, number of replicas and number of accumulation steps.

    ``resolver`` is ``package.module:function``, called as ``function(source, batch_size)``. With ``repeats`` every
    configuration gets that many timed steps. Without (None), each gets as many as it takes to know its median to
    ``half_width``, until ``budget_s`` seconds are spent, and batch sizes whose step time can be predicted from others are
    left out. If ``batch_sizes`` is empty too, the batch size at which throughput saturates is searched.
    """

    batch_sizes: tuple[int, ...] = ()
    replicas: tuple[int, ...] = (1,)
    accumulation: tuple[int, ...] = (0,)
    device: str = "cpu"
    device_name: str = "cpu"
    threads: int = 0
    """Threads of each process; 0: this machine's cores divided by ``processes``."""
    processes: int = 0
    """Processes on this machine; 0: the largest of ``replicas``."""
    warmup: int = 2
    repeats: int | None = 5
    half_width: float = 0.05
    """Wanted half of the width of the median's 95 % interval, as a share of the median."""
    budget_s: float = math.inf

    def subject(self) -> Subject:
        """Return what all tasks of the worker processes share, with the number of their threads."""
        cores = len(os.sched_getaffinity(0))
        return replace(self, threads=self.threads or max(1, cores // (self.processes or max(self.replicas))))

    def common_columns(self) -> dict[str, str]:
        """Return the columns ``device``, ``source`` and ``settings``, which must be equal in all rows of a profile.

        If the source names a Python file, the file's digest is appended, so that an edited model counts as another.
        """
        location, colon, _ = self.source.rpartition(":")
        digest = ""
        if colon and location.endswith(".py") and Path(location).is_file():
            digest = f"#{hashlib.sha256(Path(location).read_bytes()).hexdigest()[:12]}"
        settings = {"device": self.device, "threads": self.subject().threads, "warmup": self.warmup, "seed": self.seed}
        settings |= {"precision": self.numerics, "optimizer": self.optimizer, "torch": version("torch")}
        settings_text = ";".join(f"{name}={value}" for name, value in settings.items())
        return {"device": self.device_name, "source": self.source + digest, "settings": settings_text}


@dataclass(kw_only=True, slots=True)
class CampaignResult:
    """The rows of profile.csv, the configurations that were not measured, and the seconds that the campaign took."""

    frame: pd.DataFrame
    skipped: list[SkippedConfiguration] = field(default_factory=list)
    spent_s: float = 0.0


def campaign(
    request: MeasureRequest,
    *,
    executor: Executor | None = None,
    known: pd.DataFrame | None = None,
    on_rows: Callable[[pd.DataFrame], None] | None = None,
    progress: Callable[[int, str], None] = lambda done, remark: None,
    largest_batch: int = LARGEST_BATCH,
) -> CampaignResult:
    """Measure what the request asks for and ``known`` does not have; return all rows, the known ones unchanged.

    A row's ``step_time_s`` is the median over the repeats of the slowest replica's full step, with its 95 % interval.
    ``sync_time_s`` is the time by which that exceeds the same step without synchronisation (AdaptDL's convention), 0
    for one replica. ``grad_time_s`` is one pass without synchronisation; without accumulation it includes the update.

    Args:
        request: what to measure.
        executor: runs the tasks; None: processes are started on this machine.
        known: rows of an earlier run; None: none.
        on_rows: called with all rows after every task, which times steps of one configuration.
        progress: called with the number of rows and a text on what has run.
        largest_batch: larger batches are left out, as are all from the first one on that runs out of memory.

    Raises DdlToolError when a process fails, with its reason; InputError when nothing fits in memory.
    """
    state = _Campaign(request, known, largest_batch)
    if executor is not None or state.next_task() is None:  # no processes are needed if all is known
        return state.run(executor, on_rows, progress)
    most_replicas = max(request.replicas)
    if request.device == "cuda":
        import torch

        if (devices := torch.cuda.device_count()) < most_replicas:
            problem = f"cuda has {devices} devices for {most_replicas} replicas"
            raise InputError("--device", problem, "use --device cpu or fewer replicas")
    arguments = [(request.subject(), rank, sorted(set(request.replicas))) for rank in range(most_replicas)]
    with Children(_serve, arguments, request.source) as children:
        children.gather(range(most_replicas), request.source)  # importing torch does not count in the budget
        return state.run(LocalReplicas(children), on_rows, progress)


class _Campaign:
    """The state of a campaign: rows and step times so far, and the choice of the next configuration to measure.

    Attributes:
        limit: the largest batch that may be measured; lowered when memory runs out.
        series: the pairs (replicas, accumulation steps) to measure.
        wanted: the batch sizes to measure in each series.
        rows: the rows of profile.csv, by configuration, each with its columns by name.
        times: the step times that this run has measured, by configuration, of all of its tasks together.
    """

    def __init__(self, request: MeasureRequest, known: pd.DataFrame | None, largest_batch: int) -> None:
        """Start with the ``known`` rows of an earlier run, if any; their single step times are not known."""
        self.request = request
        self.limit = largest_batch
        self.common_columns = request.common_columns()
        self.series = [(count, steps) for count in sorted(request.replicas) for steps in sorted(request.accumulation)]
        self.wanted = set(request.batch_sizes)
        self.rows: dict[Key, dict[str, Any]] = {}
        self.times: dict[Key, StepTimings] = {}
        self.began_s = time.monotonic()
        for row in [] if known is None else known.to_dict("records"):
            key = (int(row["num_replicas"]), int(row["accumulation_steps"]), int(row["local_batch_size"]))
            self.rows[key] = {str(column): value for column, value in row.items()}

    def run(
        self,
        executor: Executor | None,
        on_rows: Callable[[pd.DataFrame], None] | None,
        progress: Callable[[int, str], None],
    ) -> CampaignResult:
        """Run tasks on ``executor`` until there is no next one, and return the result; without one, the known rows only.

        ``on_rows`` and ``progress`` are called after every task. Raises InputError when no batch fits in memory.
        """
        self.began_s = time.monotonic()
        while executor is not None and (task := self.next_task()) is not None:
            self._absorb(task, executor.run(task), executor.nodes_of(task.replicas))
            if on_rows is not None and self.rows:
                on_rows(self.frame())
            total = max(len(self.rows), len(self.wanted) * len(self.series))
            progress(len(self.rows), f"{task} ({len(self.rows)} of {total})")
        if not self.rows:
            smallest = min(self.request.batch_sizes, default=1)
            raise InputError("--batch-sizes", f"even {smallest} runs out of memory", "give smaller ones")
        return CampaignResult(frame=self.frame(), skipped=self._skipped(), spent_s=time.monotonic() - self.began_s)

    def frame(self) -> pd.DataFrame:
        """Return all rows as a table, ordered by replicas, accumulation steps and batch."""
        return pd.DataFrame([self.rows[key] for key in sorted(self.rows)])

    def next_task(self) -> MeasureTask | None:
        """Return the next task, or None if all that is wanted is known or the budget is spent.

        With a fixed number of repeats, each configuration gets one task, in order. Otherwise the search for the batch at
        which throughput saturates comes first, then the configuration whose median is least certain, until all are known
        to the request's half width.
        """
        request = self.request
        left_s = self.request.budget_s - (time.monotonic() - self.began_s)
        if self.rows and left_s <= 0:
            return None
        within = [batch for batch in sorted(self.wanted) if batch <= self.limit]
        missing = [(*series, batch) for series in self.series for batch in within if (*series, batch) not in self.rows]
        if request.repeats is not None:
            return self._task(missing[0], most=request.repeats) if missing else None
        searched = self._next_searched()
        ranked = self._ranked_by_uncertainty() if searched is None else [(math.inf, searched)]
        if not ranked:
            return None
        uncertainty, key = ranked[0]
        if key not in self.rows:
            # The task ends when the median is known, or an equal share of the remaining budget is spent.
            share_s = max(0.0, left_s / max(1, len(missing)))
            return self._task(key, most=_STEPS_PER_VISIT, seconds=share_s, half_width=request.half_width)
        steps = self._steps_lacking(uncertainty, timed_steps=len(self.times[key].full))
        return self._task(key, most=steps, seconds=max(0.0, left_s / len(ranked)))

    def _steps_lacking(self, uncertainty: float, timed_steps: int) -> int:
        """Return how many more steps of a configuration to time, so that its median is known to the requested half width.

        The interval narrows with the square root of the number of steps. ``uncertainty``: half the width of the
        interval after ``timed_steps`` steps, as a share of the median.
        """
        lacking = _STEPS_PER_VISIT
        if uncertainty < 10:  # from an interval of ten times the median, or an infinite one, no useful number follows
            lacking = math.ceil(timed_steps * ((uncertainty / self.request.half_width) ** 2 - 1))
        return min(max(lacking, FEWEST_FOR_AN_INTERVAL), _STEPS_PER_VISIT)

    def _next_searched(self) -> Key | None:
        """Return the next configuration in the search for the batch at which throughput saturates; None if it has ended.

        Also None if batch sizes were given. The search is made in the first series; its batches become :attr:`wanted`
        in all series.
        """
        if self.request.batch_sizes:
            return None
        replicas, steps = self.series[0]
        points = {batch: point.median for batch, point in self._points(replicas, steps).items()}
        batch = next_to_measure(points, min(self.limit, _LARGEST_DOUBLING))
        if batch is None or batch > self.limit or batch in points:  # found, or stopped at the largest batch
            self.wanted = set(points)
            return None
        self.wanted = {*points, batch}
        return replicas, steps, batch

    def _points(self, replicas: int, steps: int) -> dict[int, Interval]:
        """Return the measured medians and intervals, in seconds, of a series (``replicas``, ``steps``) by batch.

        ``steps``: accumulation steps. Batches above the limit are left out; a row without an interval counts as exact.
        """
        points = {}
        for (row_replicas, row_steps, batch), row in self.rows.items():
            if (row_replicas, row_steps) == (replicas, steps) and batch <= self.limit:
                median = float(row["step_time_s"])
                low = float(row.get("step_time_low_s") or math.nan)
                high = float(row.get("step_time_high_s") or math.nan)
                points[batch] = Interval(
                    median=median,
                    low=median if math.isnan(low) else low,
                    high=median if math.isnan(high) else high,
                )
        return points

    def _ranked_by_uncertainty(self) -> list[tuple[float, Key]]:
        """Return (uncertainty, configuration) of medians that are not known well enough, the most uncertain first.

        The uncertainty is half the width of the interval over the median, measured or predicted from the series'
        curve. It is infinite where the curve cannot predict; the series then has a single entry, the batch to measure
        first.
        """
        ranked: list[tuple[float, Key]] = []
        for series in self.series:
            points = self._points(*series)
            unmeasured = [batch for batch in sorted(self.wanted) if batch not in points and batch <= self.limit]
            uncertainties = {batch: predict(points, batch).relative for batch in unmeasured}
            unpredicted = [batch for batch, uncertainty in uncertainties.items() if math.isinf(uncertainty)]
            if unpredicted:
                ranked.append((math.inf, (*series, first_to_measure(unpredicted, sorted(points)))))
                continue
            ranked += [(uncertainty, (*series, batch)) for batch, uncertainty in uncertainties.items()]
            ranked += [
                (point.relative, (*series, batch))
                for batch, point in points.items()
                # rows of an earlier run (no times) are not measured again, nor is a median after MOST_STEPS steps
                if 0 < len(self.times.get((*series, batch), StepTimings()).full) < MOST_STEPS
            ]
        return sorted((entry for entry in ranked if entry[0] > self.request.half_width), key=lambda entry: -entry[0])

    def _task(self, key: Key, *, most: int, seconds: float = math.inf, half_width: float = 0.0) -> MeasureTask:
        """Return a task for the configuration ``key``: at most ``most`` steps or ``seconds``, less if ``half_width`` is met."""
        replicas, steps, batch = key
        shape = {"replicas": replicas, "batch": batch, "accumulation": steps, "warmup": self.request.warmup}
        return MeasureTask(**shape, most=most, seconds=seconds, half_width=half_width)

    def _absorb(self, task: MeasureTask, outcome: StepTimings, nodes: int) -> None:
        """Add a task's times, measured on ``nodes`` nodes, to its configuration's, and make the row from all of them.

        A task without times has run out of memory: the limit becomes one below its batch.
        """
        if not outcome.full:  # memory ran out
            self.limit = min(self.limit, task.batch - 1)
            return
        key = (task.replicas, task.accumulation, task.batch)
        before = self.times.get(key, StepTimings())
        times = StepTimings(
            full=before.full + outcome.full,
            local=before.local + outcome.local,
            passes=before.passes + outcome.passes,
            peak_bytes=max(before.peak_bytes, outcome.peak_bytes),
        )
        self.times[key] = times
        full = median_interval(times.full)
        is_synchronised = task.replicas > 1
        step_s = full.median
        # Without synchronisation: from the steps that were timed so, or for one replica all of them.
        local_s = float(np.median(times.local)) if is_synchronised else step_s
        quartile_low_s, quartile_high_s = np.percentile(times.full, [25, 75])
        self.rows[key] = {
            "device": self.common_columns["device"],
            "num_nodes": nodes,
            "num_replicas": task.replicas,
            "local_batch_size": task.batch,
            "step_time_s": step_s,
            "sync_time_s": (min(max(0.0, step_s - local_s), _LARGEST_SYNC_SHARE * step_s) if is_synchronised else 0.0),
            "peak_memory_bytes": times.peak_bytes,
            "step_time_spread_s": float(quartile_high_s - quartile_low_s),
            "repeats": len(times.full),
            "step_time_low_s": full.low,
            "step_time_high_s": full.high,
            "accumulation_steps": task.accumulation,
            "grad_time_s": min(float(np.median(times.passes)) if times.passes else local_s, step_s),
            "source": self.common_columns["source"],
            "settings": self.common_columns["settings"],
        }

    def _skipped(self) -> list[SkippedConfiguration]:
        """Return the wanted configurations that were not measured, each with the reason.

        One whose step time the curve through the measured batches of its series tells well enough gets that time, too.
        """
        skipped = []
        # With a fixed number of repeats each configuration is measured by itself, and none is left to the curve.
        may_predict = self.request.repeats is None
        for replicas, steps in self.series:
            points = self._points(replicas, steps)
            for batch in sorted(self.wanted - set(points)):
                prediction = predict(points, batch)
                uncertainty = prediction.relative  # as a share of the step time
                is_known = may_predict and uncertainty <= self.request.half_width
                reason = "the budget was spent"
                if batch > self.limit:
                    reason = f"memory ends at batch {self.limit}"
                elif is_known:  # a batch is predicted only between two that were measured
                    low = max(measured for measured in points if measured < batch)
                    high = min(measured for measured in points if measured > batch)
                    reason = f"known to {uncertainty:.1%} from the curve between batch {low} and {high}"
                skipped.append(
                    SkippedConfiguration(
                        num_replicas=replicas,
                        accumulation_steps=steps,
                        local_batch_size=batch,
                        reason=reason,
                        predicted_step_time_s=prediction.step_time_s if is_known else None,
                    )
                )
        return skipped


class Executor(Protocol):
    """The interface of what runs a campaign's tasks: :class:`LocalReplicas`, or the processes of torchrun."""

    def nodes_of(self, replicas: int) -> int:
        """Return the number of nodes on which ``replicas`` replicas run."""

    def run(self, task: MeasureTask) -> StepTimings:
        """Run a task and return its times; empty times mean that memory ran out."""


@dataclass(frozen=True, slots=True)
class LocalReplicas:
    """Processes on this machine, one per replica of the largest count, each waiting on a pipe for its next task.

    Smaller counts use the first ones; the others idle, so that every count runs under the same conditions.
    """

    children: Children

    def nodes_of(self, replicas: int) -> int:
        """Return 1: this machine."""
        return 1

    def run(self, task: MeasureTask) -> StepTimings:
        """Run a task and return its times, with the largest peak memory of any replica.

        Raises InputError when the model fails, and DdlToolError naming the configuration and the process when one ends.
        """
        ranks = range(task.replicas)
        for rank in ranks:
            self.children.send(rank, task)
        outcomes: list[StepTimings] = self.children.gather(ranks, str(task))
        return replace(outcomes[0], peak_bytes=max(outcome.peak_bytes for outcome in outcomes))


def _serve(subject: Subject, rank: int, replicas: Sequence[int], pipe: Connection) -> None:
    """Run as replica ``rank`` in a child process, without end: time each task from ``pipe``, and send its times back.

    First it sends True when it is ready, and while it measures None as a sign of life. The process group is never
    destroyed, because that would wait for peers that wait for this process.

    ``subject``: what is measured; ``replicas``: all numbers of replicas that the campaign measures. There is a process
    for each replica of the largest number.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo asks the host's name, which need not be this machine
    world_size = max(replicas)
    worker = connect_replica(subject, replicas, rank, world_size, init_method=meeting_place())
    pipe.send(True)  # torch is imported and the replicas are connected
    last_sign_s = time.monotonic()

    def beat() -> None:
        """Send a sign of life, at most one per second."""
        nonlocal last_sign_s
        if time.monotonic() - last_sign_s > 1.0:
            last_sign_s = time.monotonic()
            pipe.send(None)

    while True:
        pipe.send(worker.run(pipe.recv(), beat))


def reliability(frame: pd.DataFrame) -> list[str]:
    """Return a sentence with a remedy for every reason to doubt the rows: wide spread, too short steps, too few repeats."""
    sentences: list[str] = []
    wide = frame[frame["step_time_spread_s"] > RELIABLE_SPREAD * frame["step_time_s"]]
    if len(wide):
        worst = (wide["step_time_spread_s"] / wide["step_time_s"]).max()
        sentences.append(
            f"{len(wide)} of {len(frame)} rows spread by up to {worst:.0%}; stop other load or raise --repeats"
        )
    if (frame["step_time_s"] < SHORTEST_STEP_S).any():
        sentences.append("steps below 1 ms measure the framework more than the model; use larger batch sizes")
    if (frame["repeats"] < FEWEST_REPEATS).any():
        sentences.append(f"fewer than {FEWEST_REPEATS} repeats say nothing about the spread; raise --repeats")
    return sentences


class ProfileFile:
    """A profile.csv that is rewritten (atomically) whenever a row comes, so that a killed process loses no written row.

    Attributes:
        known: with ``resume`` the rows of the file; None without it or without a file.
        written: number of rows in the file now, as far as this object has written it.

    Raises InputError for a file that cannot be written, and for rows whose settings differ from the request's.
    """

    def __init__(self, path: Path | None, request: MeasureRequest, *, resume: bool) -> None:
        """Check the file before anything is measured; ``path`` None: rows are not written."""
        self.path = path
        self.known = None
        self.written = 0
        if path is None:
            if resume:
                raise InputError("--resume", "has no file to go on with", "name it with -o FILE")
            return
        check_writable(path)
        self._streams = is_stream(path)
        if resume and path.is_file():
            self.known = _read_resumed_rows(path, request.common_columns())

    def write(self, frame: pd.DataFrame) -> None:
        """Write all rows now, except to standard output and pipes, which get them once at the end (:meth:`close`)."""
        if self.path is not None and not self._streams:
            write_profile(frame, self.path)
            self.written = len(frame)

    def close(self, frame: pd.DataFrame) -> None:
        """Write all rows for the last time; for standard output and pipes it is the only time."""
        if self.path is not None:
            write_profile(frame, self.path)


def _read_resumed_rows(path: Path, expected: dict[str, str]) -> pd.DataFrame:
    """Return the rows of the profile at ``path``, which a campaign continues.

    ``expected``: the value that each row must have in a column, by the column's name. Raises InputError where such a
    column is missing or has another value, and where two rows have the same configuration.
    """
    frame = read_profile(path)
    for name, requested in expected.items():
        if name not in frame.columns:
            raise InputError(str(path), f"has no column {name!r}", "only what ddltool profile wrote can be resumed")
        for row, measured in enumerate(frame[name].astype(str), start=1):
            if measured != requested:
                measured_settings = measured.split(";")
                requested_settings = requested.split(";")
                only_measured = ";".join(each for each in measured_settings if each not in requested_settings)
                only_requested = ";".join(each for each in requested_settings if each not in measured_settings)
                problem = f"is {only_measured}, not {only_requested}"
                raise InputError(f"{path}:row {row}:{name}", problem, "measure alike, or write another file")
    frame["accumulation_steps"] = frame["accumulation_steps"].fillna(0).astype("int64")
    repeated_rows = frame.duplicated(["num_replicas", "accumulation_steps", "local_batch_size"]).to_numpy().nonzero()[0]
    if repeated_rows.size:
        where = f"{path}:row {repeated_rows[0] + 1}"
        raise InputError(where, "repeats an earlier configuration", "remove one of the rows")
    return frame.drop(columns="schema_version", errors="ignore")  # writing adds it again


def threads_of(path: Path) -> int:
    """Return the threads per process with which the rows of ``path`` were measured; 0 if the file does not say.

    A file that cannot be read gives 0 too, because :class:`ProfileFile` will raise its error.
    """
    try:
        settings = read_profile(path)["settings"].astype(str)
    except (InputError, KeyError):
        return 0
    threads = settings.str.extract(r"(?:^|;)threads=([1-9]\d{0,8})(?:;|$)")[0].dropna()
    return int(threads.iloc[0]) if len(threads) else 0
