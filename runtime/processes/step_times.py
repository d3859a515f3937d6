"""What a process measures of its steps: moments, the exchange of gradients, memory. Start at :class:`Exchange`.

On the CPU a moment is a value of ``time.perf_counter``. On CUDA the host runs ahead of the device, so a moment is also
an event on the device's own timeline, which is read only when a row is written (no synchronisation per step).
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Stamp:
    """A moment on the host's clock, and on CUDA also an event on the device's timeline."""

    host_s: float
    event: torch.cuda.Event | None = None


def stamp(cuda: bool) -> Stamp:
    """Return the present moment; on CUDA also record an event on the current stream."""
    if not cuda:
        return Stamp(time.perf_counter())
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return Stamp(time.perf_counter(), event)


def seconds_between(start: Stamp, end: Stamp) -> float:
    """Return the seconds from ``start`` to ``end``, never negative; by device events when both have one."""
    if start.event is not None and end.event is not None:
        return max(0.0, float(start.event.elapsed_time(end.event)) / 1000)
    return max(0.0, end.host_s - start.host_s)


@dataclass(slots=True)
class Exchange:
    """One backward pass of this rank and the exchange of its gradients; a moment is None until it is noted."""

    samples: int
    total: int
    """Samples of all ranks."""
    start: Stamp
    cuda: bool
    ready: Stamp | None = None
    arrived_s: float | None = None
    done: Stamp | None = None
    listened: bool = False
    """Whether a collective of this exchange notes when the slowest rank is ready."""
    like: Exchange | None = None
    """The last exchange that was listened to, whose *sync* stands for this one's; None: this one is, or none was."""
    paused_s: float = 0.0
    """Seconds between start and ready in which this rank waited for the others' counts."""

    def note_ready(self) -> None:
        """Note the moment at which the last gradient of this rank is ready."""
        self.ready = stamp(self.cuda)

    def note_arrival(self, _: object = None) -> None:
        """Note the moment at which the last gradient of the slowest rank is ready."""
        self.arrived_s = time.perf_counter()

    def note_done(self) -> None:
        """Note the moment at which a bucket holds its average; the last call counts."""
        self.done = stamp(self.cuda)

    def split(self) -> tuple[float, float, float]:
        """Return the seconds of compute, wait and sync: computing, waiting for the slowest rank, and exchanging gradients.

        Where the slowest rank's moment was not noted, the sync of the last exchange that noted it stands for this
        one's. A moment that was noted late cannot have been later than the end of the exchange.
        """
        ready = self.ready if self.ready is not None else self.start
        done = self.done if self.done is not None else ready
        exchange_s = seconds_between(ready, done)
        if self.arrived_s is not None:
            wait_s = min(exchange_s, max(0.0, self.arrived_s - ready.host_s))
        else:
            wait_s = exchange_s - (min(exchange_s, self.like.split()[2]) if self.like is not None else 0.0)
        compute_s = seconds_between(self.start, ready)
        paused_s = min(self.paused_s, compute_s)
        return compute_s - paused_s, paused_s + wait_s, exchange_s - wait_s


def is_cuda(model: nn.Module) -> bool:
    """Return whether a model has parameters on CUDA."""
    return any(parameter.is_cuda for parameter in model.parameters())


def device_of(model: nn.Module) -> str:
    """Return what telemetry calls a model's device."""
    return torch.cuda.get_device_name() if is_cuda(model) else "cpu"


def peak_memory(cuda: bool) -> int:
    """Return the peak memory of this process so far, in bytes: of the CUDA device with ``cuda``, else resident."""
    if cuda:
        return torch.cuda.max_memory_allocated()
    try:
        with open("/proc/self/status", "rb") as status:
            text = status.read()
        begin = text.index(b"VmHWM:") + len(b"VmHWM:")
        return int(text[begin : text.index(b"kB", begin)]) * 1024
    except (OSError, ValueError):
        # Second choice, for this figure survives exec: a child starts with the peak of its launcher.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
