"""What a server of a synchronisation model writes down: JSON Lines, and the same figures summed up in memory.

Start at :class:`SyncLog`. One file per server, written by it alone; each line is one of the rows below. All times are
monotonic seconds since the server began to serve, all durations seconds.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar, Literal

from ddltool.artifacts import SCHEMA_VERSION, Record, check_writable
from ddltool.errors import InputError
from ddltool.runtime.servers.policies import Superstep

log = logging.getLogger(__name__)


class _Row(Record):
    KIND: ClassVar[str] = "ddltool.sync"
    kind: Literal["ddltool.sync"] = "ddltool.sync"
    schema_version: int = SCHEMA_VERSION
    time_s: float


class StepRow(_Row):
    """One worker's step, when its last gradient came in."""

    event: Literal["step"] = "step"
    worker: int
    step: int
    wait_s: float
    """How long its pull waited for other workers."""
    staleness: int
    """Updates that others made to a parameter between its pull and the use of its gradient; the most of any."""
    gap: int
    """Steps that it was ahead of the slowest member when it had pushed."""
    dropped: bool
    """Whether its gradients came too late to be used."""


class BarrierRow(_Row):
    """One superstep of ElasticBSP, when it is over. Ends are since ``time_s - length_s``."""

    event: Literal["barrier"] = "barrier"
    superstep: int
    workers: list[int]
    iterations: list[int]
    predicted_end_s: list[float]
    end_s: list[float | None]
    length_s: float


class LeftRow(_Row):
    """A worker has closed or was lost."""

    event: Literal["left"] = "left"
    worker: int
    lost: bool
    reason: str
    epoch: int | None = None
    """The epoch of which it last asked for a share (server 0 alone is asked)."""
    steps_of_epoch: int | None = None
    """Steps of that epoch that it has made."""
    batches_left: int | None = None
    """Batches of its share that nobody has processed, where it has said how many there are."""


class JoinedRow(_Row):
    """A worker has joined; ``step`` is the number of its first one, ``epoch`` the first of which it gets a share."""

    event: Literal["joined"] = "joined"
    worker: int
    step: int
    epoch: int


class SummaryRow(_Row):
    """The last line: the whole run."""

    event: Literal["summary"] = "summary"
    policy: str
    steps: list[int]
    updates: int
    updates_per_s: float
    wait_s: list[float]
    staleness: dict[int, int]
    dropped: list[int]


Row = StepRow | BarrierRow | LeftRow | JoinedRow | SummaryRow


@dataclass(kw_only=True, slots=True)
class Share:
    """How far a worker has come in the epoch of which it asked for a share last."""

    epoch: int
    batches: int | None = None
    """How many there are to make; None: the worker has not said."""
    clock: int | None = None
    """The number of the worker's first step in it."""
    steps: int = 0
    """Steps of it whose gradients have come whole."""

    @property
    def left_out(self) -> int | None:
        """Batches of the share that were not processed; None: not known."""
        return None if self.batches is None else max(0, self.batches - self.steps)

    def __str__(self) -> str:
        text = f"it had made {self.steps} steps of epoch {self.epoch}"
        return text if self.batches is None else f"{text}, {self.left_out} of its {self.batches} batches are left out"


@dataclass(kw_only=True, slots=True)
class _OpenStep:
    """What is known of a worker's step before its gradients have come whole."""

    wait_s: float = 0.0
    staleness: int = 0
    dropped: bool = False


class SyncLog:
    """Sums up and writes.

    Attributes:
        wait_s: per worker.
        staleness: how many steps' gradients were used with which staleness.
        dropped: per worker, steps whose gradients came too late to be used.
    """

    def __init__(self, workers: int, path: Path | None) -> None:
        self.path = path
        self.wait_s = [0.0] * workers
        self.staleness: Counter[int] = Counter()
        self.dropped = [0] * workers
        self._open_steps = [_OpenStep() for _ in range(workers)]
        self._began_s = time.monotonic()
        self._file: IO[bytes] | None = None

    def open(self) -> None:
        """Empty the file. Raises InputError when it cannot be written or holds something else."""
        if self.path is None:
            return
        check_writable(self.path)
        if self.path.is_file():
            with self.path.open("rb") as file:
                first = file.readline(4096)
            if first.strip() and _Row.KIND.encode() not in first:
                remedy = "move it or name another file"
                raise InputError(str(self.path), "holds something other than sync telemetry", remedy)
        try:
            self._file = self.path.open("wb", buffering=0)
        except OSError as error:
            problem = f"cannot be written ({error.strerror})"
            raise InputError(str(self.path), problem, "name a file in a writable folder") from None

    def start(self) -> None:
        """Times count from here."""
        self._began_s = time.monotonic()

    @property
    def time_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began_s

    def waited(self, worker: int, seconds: float) -> None:
        """A transfer to ``worker`` waited for others."""
        self.wait_s[worker] += seconds
        self._open_steps[worker].wait_s += seconds

    def used(self, worker: int, staleness: int | None) -> None:
        """A gradient was taken with this staleness; None: it was dropped."""
        step = self._open_steps[worker]
        if staleness is None:
            step.dropped = True
        else:
            step.staleness = max(step.staleness, staleness)

    def step(self, worker: int, number: int, gap: int) -> None:
        """All gradients of ``worker``'s step ``number`` are in."""
        step, self._open_steps[worker] = self._open_steps[worker], _OpenStep()
        if step.dropped:
            self.dropped[worker] += 1
        else:
            self.staleness[step.staleness] += 1
        self._add(
            StepRow(
                time_s=self.time_s,
                worker=worker,
                step=number,
                wait_s=step.wait_s,
                staleness=step.staleness,
                gap=gap,
                dropped=step.dropped,
            )
        )

    def barrier(self, superstep: Superstep) -> None:
        """A superstep is over."""
        self._add(
            BarrierRow(
                time_s=self.time_s,
                superstep=superstep.number,
                workers=superstep.workers,
                iterations=superstep.iterations,
                predicted_end_s=superstep.predicted_end_s,
                end_s=[None if math.isnan(end) else end for end in superstep.end_s],
                length_s=time.monotonic() - superstep.began_s,
            )
        )

    def joined(self, worker: int, step: int, epoch: int) -> None:
        """A worker has joined late."""
        self._add(JoinedRow(time_s=self.time_s, worker=worker, step=step, epoch=epoch))

    def left(self, worker: int, reason: str | None, share: Share | None) -> None:
        """A worker has closed (``reason`` None) or was lost, so far into its share of an epoch."""
        self._add(
            LeftRow(
                time_s=self.time_s,
                worker=worker,
                lost=reason is not None,
                reason=reason or "closed",
                epoch=share.epoch if share else None,
                steps_of_epoch=share.steps if share else None,
                batches_left=share.left_out if share else None,
            )
        )
        if reason is not None:
            log.warning("worker %d is taken out of the job: %s%s", worker, reason, f"; {share}" if share else "")

    def close(self, policy: str, steps: list[int], updates: int) -> None:
        """Write the summary and close the file."""
        time_s = self.time_s
        self._add(
            SummaryRow(
                time_s=time_s,
                policy=policy,
                steps=steps,
                updates=updates,
                updates_per_s=updates / time_s if time_s else 0.0,
                wait_s=self.wait_s,
                staleness=dict(sorted(self.staleness.items())),
                dropped=self.dropped,
            )
        )
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add(self, row: Row) -> None:
        """Write a row at once, so that a killed server loses none; a failure ends telemetry, not training."""
        if self._file is None:
            return
        line = row.model_dump_json().encode() + b"\n"
        try:
            if self._file.write(line) != len(line):
                raise OSError(0, "no space left")
        except OSError as error:
            log.warning("%s: telemetry stops, training goes on (%s)", self.path, error.strerror)
            self._file.close()
            self._file = None
