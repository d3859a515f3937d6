"""What the goodput agent takes note of in each step: the weighted reduction, times, telemetry."""

# No `from __future__ import annotations` here: DDP compares the annotations of a communication hook with real types.

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ddltool.errors import InputError
from ddltool.runtime.agent.noise_sampling import NoiseSampler
from ddltool.runtime.agent.tuning import FULL_STEP, PASS, StepTimes
from ddltool.runtime.hook.job import Job
from ddltool.runtime.hook.resizable_batches import Pass
from ddltool.runtime.hook.telemetry import Exchange, Identity, RowFile, Stamp, Step, peak_memory, seconds_between
from ddltool.telemetry import TelemetryRow

STEPS_PER_MEMORY_READING = 50


@dataclass(kw_only=True, slots=True)
class TimedStep:
    """One optimizer step of this rank while it is made: one exchange per pass, the last with the reduction."""

    taken: Pass
    exchanges: list[Exchange] = field(default_factory=list)
    end: Stamp | None = None
    own_s: float = 0.0
    """What sampling the noise took of it."""

    def record(self, times: StepTimes, nodes: int, replicas: int) -> None:
        """Add this step's times; the device must have passed its end."""
        last = self.exchanges[-1]
        if self.end is None or last.ready is None or not last.samples:
            return
        times.add(nodes, replicas, last.samples, FULL_STEP, seconds_between(last.start, self.end) - self.own_s)
        for exchange in self.exchanges[:-1]:
            if exchange.ready is not None:
                times.add(nodes, replicas, exchange.samples, PASS, seconds_between(exchange.start, exchange.ready))
        if len(self.exchanges) == 1 and replicas > 1:
            times.add(nodes, replicas, last.samples, PASS, seconds_between(last.start, last.ready) - self.own_s)


class AgentReduction:
    """DDP's communication hook: the sum over the ranks of gradients that are weighted already, and the norms by the way.

    Each pass's loss was multiplied by its share of the step's samples, so the sum is the gradient of the mean over all of
    them, whatever the split (LB-BSP, weighted aggregation). All ranks know the split: no counts travel.
    """

    def __init__(self, noise: NoiseSampler, group: dist.ProcessGroup) -> None:
        self._noise = noise
        self._group = group
        self.taken: Pass | None = None
        """The pass that is under way; None outside of ``agent.backward``."""
        self.exchange: Exchange | None = None

    def reduce(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]  # exported only where torch.distributed is available
    ) -> torch.futures.Future[Tensor]:
        """Sum one bucket over the ranks. Raises InputError when the loss was not weighted."""
        if self.taken is None:
            raise InputError("backward", "was called on the loss itself", "call agent.backward(loss)")
        self._noise.before_reduction(bucket, self.taken)
        if bucket.is_last() and self.exchange is not None:
            self.exchange.note_ready()
        work = dist.all_reduce(bucket.buffer(), group=self._group, async_op=True)
        future: torch.futures.Future[Tensor] = work.get_future().then(_first)
        self._noise.after_reduction(bucket, future)
        return future


def _first(future: torch.futures.Future[list[Tensor]]) -> Tensor:
    return future.value()[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentStep(Step):
    """One step as telemetry keeps it."""

    total_batch: int
    learning_rate_factor: float
    noise_scale: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentIdentity(Identity):
    """What all rows of a process have in common."""

    def row(self, step: Step) -> TelemetryRow:
        """Return the row of ``step``, waiting for the slowest rank counted as synchronisation."""
        for exchange in step.exchanges:
            if exchange.ready is not None:
                exchange.arrived_s = exchange.ready.host_s
        made = Identity.row(self, step)
        if not isinstance(step, AgentStep):
            return made
        more = {
            "total_batch": step.total_batch,
            "passes": len(step.exchanges),
            "learning_rate_factor": step.learning_rate_factor,
            "noise_scale": step.noise_scale,
        }
        return made.model_copy(update=more)


class AgentTelemetry:
    """Writes one row per step, as the hook does; see :class:`ddltool.telemetry.TelemetryRow`.

    Waiting for the slowest rank is not told apart from synchronisation (that would take a collective per step): ``wait_s``
    is 0 and ``sync_s`` holds both.
    """

    def __init__(self, path: str | os.PathLike[str], job: Job, nodes: int, cuda: bool) -> None:
        self._cuda = cuda
        device = torch.cuda.get_device_name() if cuda else "cpu"
        identity = AgentIdentity(rank=job.rank, world_size=job.world_size, num_nodes=nodes, device=device)
        self._file = RowFile(Path(path), identity)
        job.together(self._file.open)
        self._memory_bytes = 0
        self._previous_end: Stamp | None = None

    def add(self, timed: TimedStep, learning_rate_factor: float, noise_scale: float | None) -> None:
        """Take a step that was made."""
        if timed.end is None:
            return
        number, start = timed.taken.step, timed.exchanges[0].start
        if number % STEPS_PER_MEMORY_READING < 1 or not self._memory_bytes:
            self._memory_bytes = peak_memory(self._cuda)
        begin = self._previous_end if self._previous_end is not None and timed.taken.step_start else start
        self._previous_end = timed.end
        self._file.add(
            AgentStep(
                number=number,
                exchanges=timed.exchanges,
                begin=begin,
                end=timed.end,
                memory_bytes=self._memory_bytes,
                total_batch=timed.taken.step_samples,
                learning_rate_factor=learning_rate_factor,
                noise_scale=noise_scale,
            )
        )

    def close(self) -> None:
        """Write what is held back; more calls do nothing."""
        self._file.close()
