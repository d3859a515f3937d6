"""Records one JSON line per optimizer step (:class:`ddltool.telemetry.TelemetryRow`). Start at :class:`StepRecorder`.

A step has one *exchange* for each backward pass in which ranks average gradients. Its time has three parts. *compute*
ends when this rank's last gradient is computed. *wait* ends when the slowest rank's is too; a tiny collective, the
beacon, which each rank starts when its own is ready, completes then. *sync* ends when the averaged gradients are in
place. A straggler is a rank that others wait for and that waits for nobody. On CUDA *wait* is measured by the host, and
at most the whole exchange (:mod:`~ddltool.runtime.processes.step_times`).
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from ddltool.artifacts import kind_of
from ddltool.runtime.processes.job import DistributedJob
from ddltool.runtime.processes.launcher import count_nodes
from ddltool.runtime.processes.line_files import LineFile, new_run
from ddltool.runtime.processes.step_times import Exchange, Stamp, peak_memory, seconds_between, stamp
from ddltool.runtime.processes.stopping import pause_before_exit
from ddltool.telemetry import TelemetryRow

ROWS_HELD = 50
"""Buffered rows are written when there are this many."""
SECONDS_HELD = 1.0
"""Buffered rows are written when none was for this many seconds."""
# Reading the peak takes 10 us and more, and it changes little after the first steps, so later only every tenth step does.
STEPS_PER_MEMORY_READING = 10
EXCHANGES_PER_BEACON = 10
"""One of this many exchanges has a beacon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedStep:
    """The measurements of one optimizer step, from which a row is made when it is written."""

    number: int
    """Number of the step, from 0."""
    exchanges: list[Exchange]
    """One for each backward pass with an exchange of gradients."""
    begin: Stamp
    end: Stamp
    memory_bytes: int
    """Peak memory so far, when it was last read."""
    more: dict[str, Any] = field(default_factory=dict)
    """Further fields of the row, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The fields that all rows of a process share."""

    rank: int
    world_size: int
    num_nodes: int
    device: str
    """The device's name, such as "cpu"."""
    run: str = ""
    """Name of this run of the job."""
    servers: int = 0
    """Number of parameter servers."""
    clock_s: float = field(default_factory=lambda: time.time() - time.perf_counter())
    """Seconds to add to ``perf_counter`` for the time since 1970; read once, so that setting the clock moves no step."""

    def row(self, step: ObservedStep) -> TelemetryRow:
        """Return the row of ``step``; the times of several backward passes are added up.

        On CUDA this blocks until the device has passed the end of the step.
        """
        if step.end.event is not None:
            step.end.event.synchronize()
        parts_by_exchange = [exchange.split() for exchange in step.exchanges]  # (compute, wait, sync) in seconds
        compute_s, wait_s, sync_s = (sum(parts) for parts in zip(*parts_by_exchange, strict=True))
        step_s = seconds_between(step.begin, step.end)
        fields = {
            "run": self.run,
            "step": step.number,
            "rank": self.rank,
            "world_size": self.world_size,
            "num_nodes": self.num_nodes,
            "servers": self.servers,
            "device": self.device,
            "batch": sum(exchange.samples for exchange in step.exchanges),
            "total_batch": sum(exchange.total for exchange in step.exchanges),
            "compute_s": round(compute_s, 9),
            "wait_s": round(wait_s, 9),
            "sync_s": round(sync_s, 9),
            "step_s": round(step_s, 9),
            "memory_bytes": step.memory_bytes,
            "end_s": round(self.clock_s + step.end.host_s, 6),
            # From the step's begin to its first forward pass: the loop fetches data then.
            "data_s": round(min(step_s, seconds_between(step.begin, step.exchanges[0].start)), 9),
        }
        return TelemetryRow(**(fields | step.more))


@dataclass(slots=True)
class TelemetryFile:
    """Appends rows to a JSON Lines file that several processes share; all of them open it before any of them writes.

    Rows are buffered until there are :data:`ROWS_HELD`, or for :data:`SECONDS_HELD`. A process that is killed loses the
    buffered ones; the file has whole lines only. Until :meth:`open`, rows are dropped.
    """

    path: Path
    identity: Identity
    _file: LineFile = field(default_factory=LineFile)
    _held: list[ObservedStep] = field(default_factory=list)
    _written_s: float = 0.0

    @classmethod
    def of(cls, path: str | os.PathLike[str] | None, job: DistributedJob, device: str) -> Self:
        """Return this rank's file at ``path``, opened for a new run, whose name rank 0 chooses.

        All ranks call this together, and all raise InputError if one cannot open it. ``path`` None: a closed file, which
        drops its rows. ``device``: the name of this rank's device in the rows.
        """
        ranks = job.world_size
        identity = Identity(rank=job.rank, world_size=ranks, num_nodes=count_nodes(ranks), device=device)
        if path is None:
            return cls(Path(os.devnull), identity)
        file = cls(Path(path), replace(identity, run=job.gather(new_run().encode())[0].decode()))
        job.together(file.open)
        return file

    def open(self) -> None:
        """Open the file for appending. Raises InputError if it cannot be written or holds something else."""
        self._file = LineFile(self.path, kind_of(TelemetryRow), "telemetry")
        self._written_s = time.perf_counter()

    def add(self, step: ObservedStep) -> None:
        """Buffer a step, and write the buffered ones if they are many or old enough; a closed file drops it."""
        if not self._file.is_open:
            return
        self._held.append(step)
        if len(self._held) >= ROWS_HELD or step.end.host_s - self._written_s > SECONDS_HELD:
            self._written_s = step.end.host_s
            self.flush(but=1)  # the last step's beacon may not have completed yet

    def flush(self, but: int = 0) -> None:
        """Write the buffered steps, except the last ``but`` of them."""
        if self._file.is_open:
            due_count = len(self._held) - but
            due = self._held[:due_count]
            self._held = self._held[due_count:]
            self._file.write([self.identity.row(step).model_dump_json(exclude_none=True) for step in due])

    def close(self) -> None:
        """Write all buffered steps and close the file; more calls do nothing."""
        self.flush()
        self._held = []
        self._file.close()


class Watcher:
    """The interface of objects that a LossScaler tells of forward and backward passes; here nothing happens.

    Telemetry, the balancer's clock and the goodput agent implement it.
    """

    def begin_forward(self) -> None:
        """Note that a forward pass of the model in training mode begins."""

    def begin_backward(self) -> None:
        """Note that a backward pass through the model begins."""

    def note_complete(self) -> None:
        """Note that this rank's gradients are complete in a backward pass that DDP averages; DDP now waits for other ranks."""

    def pause(self, seconds: float) -> None:
        """Note that this rank has waited ``seconds`` for counts of the other ranks."""

    def end_backward(self) -> None:
        """Note that a backward pass is over, the exchange of its gradients included."""


class PassClock(Watcher):
    """Times one rank's exchanges of gradients; each starts with the first forward pass after the exchange before.

    Args:
        cuda: whether the model is on a CUDA device.
        take_samples: function that returns (samples of this rank, of all ranks) in the gradients since its last call;
            None: exchanges are begun by calls of :meth:`begin_exchange` only.
        side: a gloo group of the same ranks, for the beacon of every tenth exchange; None: no beacons.
    """

    def __init__(
        self,
        cuda: bool,
        take_samples: Callable[[], tuple[int, int]] | None = None,
        side: dist.ProcessGroup | None = None,
    ) -> None:
        """Start without passes; with a ``side`` group, make the process pause at exit (:func:`pause_before_exit`)."""
        self._cuda = cuda
        self._take_samples = take_samples
        self._side = side
        self._start: Stamp | None = None  # of *compute*; None: no forward pass since the last exchange
        self._paused_s = 0.0  # seconds waited for counts of other ranks since `_start`
        self._exchanges: list[Exchange] = []  # since the last `take`
        # The last exchange with a beacon, whose *sync* is used for those without.
        self._listened: Exchange | None = None
        self._completed = 0  # number of exchanges begun by `note_complete`
        self._beacon = torch.zeros(1)  # its value does not matter, only when it arrives
        if side is not None:
            atexit.unregister(pause_before_exit)  # one pause is enough for several models
            atexit.register(pause_before_exit)

    def begin_forward(self) -> None:
        """Start *compute*, if this is the first forward pass since the last exchange."""
        if self._start is None:
            self._start = stamp(self._cuda)

    def note_complete(self) -> None:
        """End *compute*, because this rank's gradients are complete; in every tenth exchange, start the beacon."""
        if self._take_samples is None:
            return
        own_samples, all_samples = self._take_samples()
        exchange = self.begin_exchange(own_samples, all_samples)
        exchange.note_ready()
        if self._side is not None and self._completed % EXCHANGES_PER_BEACON == 0:
            exchange.listened = True
            dist.all_reduce(self._beacon, group=self._side, async_op=True).get_future().then(exchange.note_arrival)
        self._completed += 1

    def pause(self, seconds: float) -> None:
        """Subtract ``seconds`` of waiting from *compute*; not on CUDA, where the device may compute meanwhile."""
        if not self._cuda:
            self._paused_s += seconds

    def begin_exchange(self, samples: int, total: int) -> Exchange:
        """Begin and return the record of an exchange of gradients; it starts with *compute*, or now if that has not begun.

        ``samples``: this rank's samples in these gradients; ``total``: those of all ranks.
        """
        start = self._start if self._start is not None else stamp(self._cuda)
        exchange = Exchange(samples, total, start, self._cuda, like=self._listened, paused_s=self._paused_s)
        self._start = None
        self._paused_s = 0.0
        self._exchanges.append(exchange)
        return exchange

    def end_backward(self) -> None:
        """Note the end of the exchange that is under way, if there is one.

        If it had a beacon, its *sync* is used from now on for exchanges without.
        """
        if not self._exchanges:
            return
        last = self._exchanges[-1]
        is_under_way = last.ready is not None and last.done is None
        if is_under_way:
            last.note_done()
            if last.listened:
                self._listened = last
                last.like = None  # it has measured its own *sync*

    def take(self) -> list[Exchange]:
        """Return the exchanges of gradients since the last call, which are those of the step that has ended."""
        exchanges = self._exchanges
        self._exchanges = []
        return exchanges


class StepRecorder(PassClock):
    """Observes one rank's steps and gives them to a :class:`TelemetryFile`, which is written at exit at the latest.

    Attributes:
        path: the file's.
        row: function that makes a row of a step.
        watch: function called with every step, whose time counts as part of no step; None: none.
    """

    def __init__(
        self,
        file: TelemetryFile,
        *,
        cuda: bool = False,
        take_samples: Callable[[], tuple[int, int]] | None = None,
        side: dist.ProcessGroup | None = None,
    ) -> None:
        """Number steps from 0; the first row also has the seconds from now to the first step (``start_s``)."""
        super().__init__(cuda, take_samples, side)
        self.path = file.path
        self.row = file.identity.row
        self.watch: Callable[[ObservedStep], None] | None = None
        self._file = file
        self._number = 0  # of the next step
        self._passes = 0  # backward passes of that step so far
        self._memory_bytes = 0  # the last reading
        self._opened_s = time.perf_counter()
        self._has_row = False
        self._checkpoint_s = 0.0
        self._previous_end: Stamp | None = None
        # Runs when the recorder is collected or the interpreter exits; it must not refer to the recorder itself.
        self._finalizer = weakref.finalize(self, file.close)

    def begin_backward(self) -> None:
        """Count a backward pass of the step, also one whose gradients are not exchanged (``no_sync``)."""
        self._passes += 1

    def before_update(self, *_: object) -> None:
        """End *compute* at the start of an update, if no exchange was ever seen (one process, FSDP2): the pre-step hook."""
        if self._take_samples is not None and self._start is not None and not self._completed:
            own_samples, all_samples = self._take_samples()
            self.begin_exchange(own_samples, all_samples).note_ready()

    def after_update(self, *_: object) -> None:
        """Add the step that the update completes: the optimizer's post-step hook."""
        end = stamp(self._cuda)
        self.before_update()  # for an optimizer with a closure, which runs the forward pass inside the update
        passes = self._passes
        self._passes = 0
        if exchanges := self.take():  # an update without a backward pass before it does not count as a step
            self.add(self._number, exchanges, end, passes=max(passes, len(exchanges)))
        else:
            self._previous_end = end

    def add(self, number: int, exchanges: list[Exchange], end: Stamp, **more: Any) -> None:
        """Add the step ``number``, which ended at ``end``, and call ``watch`` with it.

        It begins where the step before ended; the first one of a run or epoch begins with its first exchange. The first
        row also has the seconds before training (``start_s``) and the launcher's number of restarts.

        Args:
            number: of the step, from 0.
            exchanges: the step's exchanges of gradients, at least one.
            end: the end of the optimizer's update.
            more: further fields of the step's :class:`~ddltool.telemetry.TelemetryRow`, by name.
        """
        begin = self._previous_end if self._previous_end is not None else exchanges[0].start
        if not self._has_row or self._number < STEPS_PER_MEMORY_READING or self._number % STEPS_PER_MEMORY_READING == 0:
            self._memory_bytes = peak_memory(self._cuda)
        self._number += 1
        if not self._has_row:
            more["start_s"] = round(max(0.0, begin.host_s - self._opened_s), 9)
            self._has_row = True
            if restarts := os.environ.get("TORCHELASTIC_RESTART_COUNT", ""):
                more["restarts"] = int(restarts)
        if self._checkpoint_s:
            more["checkpoint_s"] = round(self._checkpoint_s, 9)
            self._checkpoint_s = 0.0
        step = ObservedStep(
            number=number, exchanges=exchanges, begin=begin, end=end, memory_bytes=self._memory_bytes, more=more
        )
        self._file.add(step)
        self._previous_end = end
        if self.watch is not None:
            self.watch(step)
            self._previous_end = stamp(self._cuda)

    def resume(self, steps: int) -> None:
        """Number the next step ``steps``, after a checkpoint of that many; numbers never go back."""
        self._number = max(self._number, steps)

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Count the seconds of the block, between two steps, as a checkpoint's; buffered rows are written before it.

        They go into the next row, and into no step's time. Within a step nothing is counted, because the time is part of
        the step.
        """
        self._file.flush()  # a run that ends in the block, or is continued from the checkpoint, has all rows before it
        # Within a step there is a forward pass, or an exchange that no update has taken yet.
        begin = stamp(self._cuda)
        is_within = self._start is not None or bool(self._exchanges)
        yield
        end = stamp(self._cuda)
        if is_within:
            return
        if end.event is not None:
            end.event.synchronize()
        self._checkpoint_s += seconds_between(begin, end)
        if self._previous_end is not None:  # the next step begins where the block ends
            self._previous_end = end

    def begin_epoch(self) -> None:
        """Make the next step begin with its forward pass, so that the time between epochs counts as part of no step."""
        self._previous_end = None

    def close(self) -> None:
        """Write all rows and stop recording."""
        self._finalizer()
