"""What a server of a synchronisation model writes down: JSON Lines, and the same figures summed up in memory.

Start at :class:`SyncLog`. One file per server, written by it alone; each line is one of the rows below. All times are
monotonic seconds since the server began to serve, all durations seconds.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from ddltool.artifacts import SCHEMA_VERSION, Record, check_writable
from ddltool.errors import InputError
from ddltool.runtime.hook.telemetry import whole_lines
from ddltool.runtime.servers.elastic_bsp import Superstep
from ddltool.runtime.servers.membership import Share

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


@dataclass(kw_only=True)
class SyncLog:
    """Sums up and writes; the server guards it by its lock."""

    workers: int
    path: Path | None = None
    wait_s: list[float] = field(default_factory=list)
    """Per worker."""
    staleness: Counter[int] = field(default_factory=Counter)
    """How many steps' gradients were used with which staleness."""
    dropped: list[int] = field(default_factory=list)
    """Per worker, steps whose gradients came too late to be used."""
    max_gap: int = 0
    _began_s: float = field(default_factory=time.monotonic)
    _step_wait_s: list[float] = field(default_factory=list)
    _step_staleness: list[int] = field(default_factory=list)
    _step_dropped: list[bool] = field(default_factory=list)
    _descriptor: int | None = None

    def __post_init__(self) -> None:
        self.wait_s, self._step_wait_s = [0.0] * self.workers, [0.0] * self.workers
        self.dropped, self._step_staleness = [0] * self.workers, [0] * self.workers
        self._step_dropped = [False] * self.workers

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
            self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC)
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
        self._step_wait_s[worker] += seconds

    def used(self, worker: int, staleness: int | None) -> None:
        """A gradient was taken with this staleness; None: it was dropped."""
        if staleness is None:
            self._step_dropped[worker] = True
        else:
            self._step_staleness[worker] = max(self._step_staleness[worker], staleness)

    def step(self, worker: int, step: int, gap: int) -> None:
        """All gradients of ``worker``'s step number ``step`` are in."""
        dropped, staleness = self._step_dropped[worker], self._step_staleness[worker]
        self.max_gap = max(self.max_gap, gap)
        if dropped:
            self.dropped[worker] += 1
        else:
            self.staleness[staleness] += 1
        self._add(
            StepRow(
                time_s=self.time_s,
                worker=worker,
                step=step,
                wait_s=self._step_wait_s[worker],
                staleness=staleness,
                gap=gap,
                dropped=dropped,
            )
        )
        self._step_wait_s[worker], self._step_staleness[worker], self._step_dropped[worker] = 0.0, 0, False

    def barrier(self, superstep: Superstep) -> None:
        """A superstep is over."""
        ends = [None if math.isnan(end) else end for end in superstep.end_s]
        self._add(
            BarrierRow(
                time_s=self.time_s,
                superstep=superstep.number,
                workers=superstep.workers,
                iterations=superstep.iterations,
                predicted_end_s=superstep.predicted_end_s,
                end_s=ends,
                length_s=time.monotonic() - superstep.began_s,
            )
        )

    def joined(self, worker: int, step: int, epoch: int) -> None:
        """A worker has joined late."""
        self._add(JoinedRow(time_s=self.time_s, worker=worker, step=step, epoch=epoch))

    def left(self, worker: int, reason: str | None, share: Share | None = None) -> None:
        """A worker has closed (``reason`` None) or was lost, so far into its share of an epoch."""
        self._add(
            LeftRow(
                time_s=self.time_s,
                worker=worker,
                lost=reason is not None,
                reason=reason or "closed",
                epoch=None if share is None else share.epoch,
                steps_of_epoch=None if share is None else share.steps,
                batches_left=None if share is None else share.left_out,
            )
        )
        if reason is not None:
            log.warning("worker %d is taken out of the job: %s%s", worker, reason, _told(share))

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
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _add(self, row: Row) -> None:
        """Write a row at once, so that a killed server loses none; a failure ends telemetry, not training."""
        if self._descriptor is None:
            return
        try:
            for block in whole_lines([row.model_dump_json()]):
                if os.write(self._descriptor, block) != len(block):
                    raise OSError(0, "no space left")
        except OSError as error:
            log.warning("%s: telemetry stops, training goes on (%s)", self.path, error.strerror)
            os.close(self._descriptor)
            self._descriptor = None


def _told(share: Share | None) -> str:
    """Return what a lost worker leaves out, as the end of a sentence."""
    if share is None:
        return ""
    text = f"; it had made {share.steps} steps of epoch {share.epoch}"
    return text if share.left_out is None else f"{text}, {share.left_out} of its {share.batches} batches are left out"
