"""Measures training steps in real processes: batch sizes x replicas x accumulation steps. Start at :func:`campaign`.

Every replica is a process of its own with a gloo (CPU) or NCCL (CUDA) group: started here (:mod:`.pool`), or torchrun's
(:mod:`.torchrun_job`). This module says what is asked for (:class:`MeasureRequest`), decides what runs next, turns times
into rows, and keeps the file that the rows fill (:class:`RowFile`).
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ddltool.analyzers.goodput.curve import Interval, first_of, median_interval, next_doubling, predict
from ddltool.artifacts import check_writable
from ddltool.errors import InputError
from ddltool.profile import read_profile, write_profile
from ddltool.runtime.measuring.pool import Pool
from ddltool.runtime.measuring.worker import FEWEST_FOR_AN_INTERVAL, Outcome, Subject, Task

if TYPE_CHECKING:
    import pandas as pd

RELIABLE_SPREAD, SHORTEST_STEP_S, FEWEST_REPEATS = 0.1, 1e-3, 3
MOST_STEPS, LARGEST_BATCH, MOST_REPLICAS = 100_000, 2**24, 4096
# One visit times at most so many steps; what is still uncertain then is visited again later, in another mood of the machine.
_STEPS_PER_VISIT = 1000
# Powers of two end here when nothing saturates.
_LARGEST_DOUBLING = 2**16
_SETTINGS = {"device", "threads", "warmup", "seed", "torch"}  # as settings_of writes them
_KEY = ["num_replicas", "accumulation_steps", "local_batch_size"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureRequest:
    """What to measure. ``resolver`` is ``package.module:function``, called as ``function(source, batch_size)``.

    With ``repeats`` every configuration gets that many timed steps. Without, each gets as many as its median needs to be
    known to ``precision``, until ``budget_s`` seconds are spent, and batch sizes whose step time follows from the others'
    are left out; no ``batch_sizes`` then means to search where throughput saturates.
    """

    source: str
    resolver: str
    batch_sizes: tuple[int, ...] = ()
    replicas: tuple[int, ...] = (1,)
    accumulation: tuple[int, ...] = (0,)
    device: str = "cpu"
    device_name: str = "cpu"
    source_name: str = ""
    """What the rows say of the source; by default the source."""
    threads: int = 0
    """Threads of each process; 0: the machine's cores shared among ``processes``."""
    processes: int = 0
    """Processes on this machine; 0: the most replicas."""
    warmup: int = 2
    repeats: int | None = 5
    precision: float = 0.05
    budget_s: float = math.inf
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise InputError for numbers that no measurement can have."""
        _check("batch sizes", self.batch_sizes, 1, LARGEST_BATCH, may_be_empty=self.repeats is None)
        _check("replicas", self.replicas, 1, MOST_REPLICAS)
        _check("accumulation steps", self.accumulation, 0, MOST_STEPS)
        _check("warmup", (self.warmup,), 0, MOST_STEPS)
        if self.repeats is not None:
            _check("repeats", (self.repeats,), 1, MOST_STEPS)
        if not 0 < self.precision < 1:
            raise InputError("precision", f"is {self.precision}", "give a share between 0 and 1, such as 0.05 or 5%")
        if not self.budget_s > 0:
            raise InputError("budget", f"is {self.budget_s} s", "give a time above 0")

    def subject(self) -> Subject:
        """Return what the workers need to know."""
        return Subject(
            source=self.source,
            resolver=self.resolver,
            device=self.device,
            threads=self.threads or max(1, len(os.sched_getaffinity(0)) // (self.processes or max(self.replicas))),
            seed=self.seed,
        )


def _check(name: str, values: tuple[int, ...], least: int, most: int, *, may_be_empty: bool = False) -> None:
    if (not values and not may_be_empty) or min(values, default=least) < least:
        shown = values[0] if len(values) == 1 else values
        raise InputError(name, f"are {shown}", f"give whole numbers >= {least}")
    if max(values, default=least) > most:
        raise InputError(name, f"has {max(values)}", f"give whole numbers up to {most}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a measurement is: configurations done, how many it may become, and the one just measured."""

    done: int
    total: int
    remark: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """A configuration that was not measured, and why."""

    num_replicas: int
    accumulation_steps: int
    local_batch_size: int
    reason: str
    predicted_step_time_s: float | None = None


@dataclass(kw_only=True, slots=True)
class Measured:
    """What a campaign found."""

    frame: pd.DataFrame
    skipped: list[Skipped] = field(default_factory=list)
    spent_s: float = 0.0
    over_budget: bool = False
    """Whether the budget ended the campaign before every median was known to the precision."""


class Executor(Protocol):
    """Runs tasks: a pool of own processes, or torchrun's job."""

    def run(self, task: Task) -> Outcome:
        """Return the times of a task."""
        ...

    def nodes_of(self, replicas: int) -> int:
        """Return on how many nodes so many replicas run."""
        ...


Key = tuple[int, int, int]
"""Replicas, accumulation steps, local batch size."""
OnRows = Callable[["pd.DataFrame"], None]


def measure(request: MeasureRequest, *, progress: Callable[[Progress], None] | None = None) -> pd.DataFrame:
    """Return one row per configuration, in ProfileRow's columns, measured in processes of this machine."""
    return campaign(request, progress=progress).frame


def campaign(
    request: MeasureRequest,
    *,
    executor: Executor | None = None,
    known: pd.DataFrame | None = None,
    on_rows: OnRows | None = None,
    progress: Callable[[Progress], None] | None = None,
    largest_batch: int = LARGEST_BATCH,
) -> Measured:
    """Measure what the request asks for and ``known`` does not have; return all rows, the known ones as they are.

    ``on_rows`` gets all rows after every visit to a configuration. Batches above ``largest_batch`` are left out, and all
    larger ones once one runs out of memory. Columns: ``step_time_s`` is the median over the repeats of the slowest
    replica's full step, with its 95 % interval; ``sync_time_s`` what that is longer than the same step without
    synchronisation (AdaptDL's convention), 0 for one replica; ``grad_time_s`` one pass without synchronisation, the
    update a part of it where nothing is accumulated.

    Raises DdlToolError when a process fails, with its reason; InputError when nothing fits in memory.
    """
    if executor is not None:
        return _Campaign(request, executor, known, largest_batch).run(on_rows, progress)
    if request.device == "cuda":
        _check_cuda(max(request.replicas))
    with Pool(request.subject(), request.replicas) as pool:
        found = _Campaign(request, pool, known, largest_batch)
        if found.next_task() is not None:
            pool.start()  # importing torch is no part of the budget
        return found.run(on_rows, progress)


class _Campaign:
    """The state of a campaign: what was timed so far, and what that makes of the rest."""

    def __init__(
        self, request: MeasureRequest, executor: Executor, known: pd.DataFrame | None, largest_batch: int
    ) -> None:
        self.request, self.executor = request, executor
        self.limit = largest_batch
        self.series = [
            (replicas, steps)
            for replicas in sorted(set(request.replicas))
            for steps in sorted(set(request.accumulation))
        ]
        self.wanted = set(request.batch_sizes)
        self.rows: dict[Key, dict[str, Any]] = {}
        self.times: dict[Key, Outcome] = {}
        self.began = time.monotonic()
        for row in [] if known is None else known.to_dict("records"):
            self.rows[_key(row)] = {str(name): value for name, value in row.items()}

    def run(self, on_rows: OnRows | None, progress: Callable[[Progress], None] | None) -> Measured:
        """Run tasks until nothing is left to do."""
        self.began = time.monotonic()
        while (task := self.next_task()) is not None:
            self._absorb(task, self.executor.run(task))
            if on_rows is not None and self.rows:
                on_rows(self.frame())
            if progress is not None:
                total = max(len(self.rows), len(self.wanted) * len(self.series))
                progress(Progress(done=len(self.rows), total=total, remark=str(task)))
        if not self.rows:
            smallest = min(self.request.batch_sizes, default=1)
            raise InputError("--batch-sizes", f"even {smallest} runs out of memory", "give smaller ones")
        over = self.request.repeats is None and self._spent() >= self.request.budget_s and self._work_left()
        return Measured(frame=self.frame(), skipped=self._skipped(), spent_s=self._spent(), over_budget=over)

    def frame(self) -> pd.DataFrame:
        """Return all rows, ordered by replicas, accumulation steps and batch."""
        import pandas as pd

        return pd.DataFrame([self.rows[key] for key in sorted(self.rows)])

    def next_task(self) -> Task | None:
        """Return what to run next, None when everything is known well enough or the budget is spent."""
        request = self.request
        if self.rows and self._spent() >= request.budget_s:
            return None
        if request.repeats is not None:
            missing = self._missing()
            return self._task(missing[0], most=request.repeats) if missing else None
        searched = self._search()
        if searched is not None:
            return self._first_visit(searched)
        ranked = self._ranked()
        if not ranked:
            return None
        doubt, key = ranked[0]
        return self._second_visit(key, doubt) if key in self.rows else self._first_visit(key)

    def _search(self) -> Key | None:
        """Return the next configuration of the search for saturation, None when it has ended or was not asked for."""
        if self.request.batch_sizes:
            return None
        replicas, steps = self.series[0]
        points = {batch: point.median for batch, point in self._points(replicas, steps).items()}
        batch = next_doubling(points, min(self.limit, _LARGEST_DOUBLING))
        if batch is None or batch > self.limit or batch in points:
            self.wanted = set(points)
            return None
        self.wanted = {*points, batch}
        return replicas, steps, batch

    def _missing(self) -> list[Key]:
        """Return what was asked for, fits, and was not measured, in the order of the rows."""
        return [
            (replicas, steps, batch)
            for replicas, steps in self.series
            for batch in sorted(self.wanted)
            if batch <= self.limit and (replicas, steps, batch) not in self.rows
        ]

    def _points(self, replicas: int, steps: int) -> dict[int, Interval]:
        return {
            key[2]: _interval(row)
            for key, row in self.rows.items()
            if key[:2] == (replicas, steps) and key[2] <= self.limit
        }

    def _ranked(self) -> list[tuple[float, Key]]:
        """Return what is not known to the precision, with its doubt, the greatest first; equal doubts in a good order."""
        found: list[tuple[float, Key]] = []
        for replicas, steps in self.series:
            points = self._points(replicas, steps)
            doubts = {batch: predict(points, batch).relative for batch in self._wanted_of(points)}
            unknown = sorted(batch for batch, doubt in doubts.items() if math.isinf(doubt))
            if unknown:
                found.append((math.inf, (replicas, steps, first_of(unknown, sorted(points)))))
                continue
            found += [(doubt, (replicas, steps, batch)) for batch, doubt in doubts.items()]
            found += [
                (point.relative, (replicas, steps, batch))
                for batch, point in points.items()
                # rows of an earlier run are kept as they are; what so many steps do not settle, more will not
                if 0 < len(self.times.get((replicas, steps, batch), Outcome()).full) < MOST_STEPS
            ]
        return sorted((item for item in found if item[0] > self.request.precision), key=lambda item: -item[0])

    def _wanted_of(self, points: dict[int, Interval]) -> list[int]:
        return [batch for batch in sorted(self.wanted) if batch not in points and batch <= self.limit]

    def _task(self, key: Key, *, most: int, seconds: float = math.inf, precision: float = 0.0) -> Task:
        replicas, steps, batch = key
        return Task(
            replicas=replicas,
            batch=batch,
            accumulation=steps,
            warmup=self.request.warmup,
            most=most,
            seconds=seconds,
            precision=precision,
        )

    def _first_visit(self, key: Key) -> Task:
        """Return a visit that lasts until the median is known, or the configuration's share of the budget is spent."""
        share = (self.request.budget_s - self._spent()) / max(1, len(self._missing()))
        return self._task(key, most=_STEPS_PER_VISIT, seconds=max(0.0, share), precision=self.request.precision)

    def _second_visit(self, key: Key, doubt: float) -> Task:
        """Return a visit with as many steps as bring the interval down to the precision, by the root of their number."""
        have = self.times[key].full
        lacking = math.ceil(len(have) * ((doubt / self.request.precision) ** 2 - 1)) if doubt < 10 else _STEPS_PER_VISIT
        most = min(max(lacking, FEWEST_FOR_AN_INTERVAL), _STEPS_PER_VISIT)
        rivals = max(1, len(self._ranked()))
        return self._task(key, most=most, seconds=max(0.0, (self.request.budget_s - self._spent()) / rivals))

    def _absorb(self, task: Task, outcome: Outcome) -> None:
        """Add a visit's times to its configuration's row; forget what is too large."""
        if outcome.out_of_memory:
            self.limit = min(self.limit, task.batch - 1)
            return
        key = (task.replicas, task.accumulation, task.batch)
        before = self.times.get(key, Outcome())
        together = Outcome(
            full=before.full + outcome.full,
            local=before.local + outcome.local,
            passes=before.passes + outcome.passes,
            peak_bytes=max(before.peak_bytes, outcome.peak_bytes),
        )
        self.times[key] = together
        self.rows[key] = row_of(self.request, task, together, self.executor.nodes_of(task.replicas))

    def _spent(self) -> float:
        return time.monotonic() - self.began

    def _work_left(self) -> bool:
        return bool(self._ranked()) or self._search() is not None

    def _skipped(self) -> list[Skipped]:
        """Return what was asked for and not measured, and why."""
        found = []
        for replicas, steps in self.series:
            points = self._points(replicas, steps)
            for batch in sorted(self.wanted - set(points)):
                guess = predict(points, batch)
                known = guess.relative <= self.request.precision and self.request.repeats is None
                if batch > self.limit:
                    reason = f"memory ends at batch {self.limit}"
                elif known:
                    neighbours = sorted(points)
                    low = max(value for value in neighbours if value < batch)
                    high = min(value for value in neighbours if value > batch)
                    reason = f"known to {guess.relative:.1%} from the curve between batch {low} and {high}"
                else:
                    reason = "the budget was spent"
                found.append(
                    Skipped(
                        num_replicas=replicas,
                        accumulation_steps=steps,
                        local_batch_size=batch,
                        reason=reason,
                        predicted_step_time_s=guess.step_time_s if known else None,
                    )
                )
        return found


def _key(row: dict[Any, Any]) -> Key:
    steps = row.get("accumulation_steps")
    passes = 0 if steps is None or math.isnan(steps) else int(steps)
    return int(row["num_replicas"]), passes, int(row["local_batch_size"])


def _interval(row: dict[str, Any]) -> Interval:
    median = float(row["step_time_s"])
    low, high = (float(row.get(f"step_time_{end}_s") or math.nan) for end in ("low", "high"))
    return Interval(median=median, low=median if math.isnan(low) else low, high=median if math.isnan(high) else high)


def _check_cuda(replicas: int) -> None:
    import torch

    found = torch.cuda.device_count()
    if found < replicas:
        raise InputError(
            "--device", f"cuda has {found} devices for {replicas} replicas", "use --device cpu or fewer replicas"
        )


def row_of(request: MeasureRequest, task: Task, times: Outcome, nodes: int) -> dict[str, Any]:
    """Return a configuration's row in ProfileRow's columns."""
    full = median_interval(times.full)
    step, shared = full.median, task.replicas > 1
    local = float(np.median(times.local)) if shared else step
    lower, upper = np.percentile(times.full, [25, 75])
    return {
        "device": request.device_name,
        "num_nodes": nodes,
        "num_replicas": task.replicas,
        "local_batch_size": task.batch,
        "step_time_s": step,
        # Never all of the step: computing takes some of it, whatever the noise says.
        "sync_time_s": min(max(0.0, step - local), 0.99 * step) if shared else 0.0,
        "peak_memory_bytes": times.peak_bytes,
        "step_time_spread_s": float(upper - lower),
        "repeats": len(times.full),
        "step_time_low_s": full.low,
        "step_time_high_s": full.high,
        "accumulation_steps": task.accumulation,
        "grad_time_s": min(float(np.median(times.passes)) if times.passes else local, step),
        "source": request.source_name or request.source,
        "settings": settings_of(request),
    }


def settings_of(request: MeasureRequest) -> str:
    """Return what must be equal for rows to compare, as ``NAME=VALUE`` separated by semicolons."""
    settings = {
        "device": request.device,
        "threads": request.subject().threads,
        "warmup": request.warmup,
        "seed": request.seed,
        "torch": version("torch"),
    }
    return ";".join(f"{name}={value}" for name, value in settings.items())


def reliability(frame: pd.DataFrame) -> list[str]:
    """Return a plain sentence for every reason not to trust the rows, with what to try."""
    found: list[str] = []
    wide = frame[frame["step_time_spread_s"] > RELIABLE_SPREAD * frame["step_time_s"]]
    if len(wide):
        worst = (wide["step_time_spread_s"] / wide["step_time_s"]).max()
        found.append(
            f"{len(wide)} of {len(frame)} rows spread by up to {worst:.0%}; stop other load or raise --repeats"
        )
    if (frame["step_time_s"] < SHORTEST_STEP_S).any():
        found.append("steps below 1 ms measure the framework more than the model; use larger batch sizes")
    if (frame["repeats"] < FEWEST_REPEATS).any():
        found.append(f"fewer than {FEWEST_REPEATS} repeats say nothing about the spread; raise --repeats")
    return found


def source_name(source: str) -> str:
    """Return what the ``source`` column says: SOURCE, with a digest of the file where it names one.

    A model that was edited since is another model.
    """
    location, colon, _ = source.rpartition(":")
    path = Path(location)
    if not colon or not location.endswith(".py") or not path.is_file():
        return source
    return f"{source}#{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"


class RowFile:
    """A profile.csv that is rewritten (atomically) whenever a row comes; a killed process loses no row that was written."""

    def __init__(self, path: Path | None, *, resume: bool, device: str, source: str, settings: str) -> None:
        """Read what is there when ``resume``. Raises InputError when it was measured from something else, or otherwise."""
        self.path = path
        self.known: pd.DataFrame | None = None
        self.written = 0
        self._streams = path is not None and (str(path) == "-" or (path.exists() and not path.is_file()))
        if path is None:
            if resume:
                raise InputError("--resume", "has no file to go on with", "name it with -o FILE")
            return
        check_writable(path)
        if resume and not self._streams and path.exists():
            self.known = self._read(path, {"device": device, "source": source, "settings": settings})

    def write(self, frame: pd.DataFrame) -> None:
        """Write all rows; standard output and pipes get them at the end (:meth:`close`)."""
        if self.path is not None and not self._streams:
            write_profile(frame, self.path)
            self.written = len(frame)

    def close(self, frame: pd.DataFrame) -> None:
        """Write all rows for good."""
        if self.path is not None:
            write_profile(frame, self.path)

    @staticmethod
    def _read(path: Path, expected: dict[str, str]) -> pd.DataFrame:
        frame = read_profile(path)
        for name, now in expected.items():
            if name not in frame.columns:
                raise InputError(str(path), f"has no column {name!r}", "only what ddltool profile wrote can be resumed")
            for row, value in enumerate(frame[name].astype(str).tolist(), start=1):
                if value != now:
                    then, here = _difference(value, now)
                    remedy = f"measure alike{_options(name, then)}, or write another file"
                    raise InputError(f"{path}:row {row}:{name}", f"is {then}, not {here}", remedy)
        frame["accumulation_steps"] = frame["accumulation_steps"].fillna(0).astype("int64")
        twice = frame.duplicated(_KEY).to_numpy().nonzero()[0]
        if twice.size:
            raise InputError(f"{path}:row {twice[0] + 1}", "repeats an earlier configuration", "remove one of the rows")
        return frame.drop(columns="schema_version", errors="ignore")  # every writing sets it anew


def threads_of(path: Path) -> int:
    """Return the threads per process with which the rows of ``path`` were measured, 0 where the file says nothing of it.

    What is wrong with the file is for :class:`RowFile` to say.
    """
    try:
        settings = read_profile(path)["settings"].astype(str)
    except (InputError, KeyError):
        return 0
    found = settings.str.extract(r"(?:^|;)threads=([1-9]\d{0,8})(?:;|$)")[0].dropna()
    return int(found.iloc[0]) if len(found) else 0


def _options(column: str, then: str) -> str:
    """Return in brackets the options that make a measurement like the one that filled ``column`` with ``then``."""
    if column == "device":
        return " (--device, --device-name)"
    if column != "settings":
        return ""
    settings = dict(part.split("=", 1) for part in then.split(";") if "=" in part)
    if not settings or not set(settings) <= _SETTINGS:  # rows that were predicted or imported: no option measures those
        return ""
    named = (f"{name if name == 'torch' else f'--{name}'} {value}" for name, value in settings.items())
    return f" ({', '.join(named)})"


def _difference(then: str, now: str) -> tuple[str, str]:
    """Return the parts of two settings that differ; other texts as they are."""
    one, two = then.split(";"), now.split(";")
    if len(one) != len(two) or len(one) == 1:
        return then, now
    parts = [(left, right) for left, right in zip(one, two, strict=True) if left != right]
    return ";".join(left for left, _ in parts), ";".join(right for _, right in parts)
