"""Measures a process's steps: moments, the exchange of gradients, memory. Start at :class:`Exchange`.

On the CPU a moment is a value of ``time.perf_counter``. On CUDA the host runs ahead of the device, so a moment is also
an event on the device's own timeline, which is read only when a row is written, so that no step waits for the device.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Stamp:
    """A moment: ``host_s`` in seconds of ``time.perf_counter``, and on CUDA also an event on the device's timeline."""

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
    """Return the seconds from ``start`` to ``end``, at least 0: by device events when both have one, else by the host."""
    if start.event is not None and end.event is not None:
        return max(0.0, float(start.event.elapsed_time(end.event)) / 1000)
    return max(0.0, end.host_s - start.host_s)


@dataclass(slots=True)
class Exchange:
    """One backward pass of this rank and the exchange of its gradients; a moment is None until it is noted."""

    samples: int
    """Samples of this rank."""
    total: int
    """Samples of all ranks."""
    start: Stamp
    """When the pass began."""
    cuda: bool
    ready: Stamp | None = None
    """When this rank's last gradient was computed."""
    arrived_s: float | None = None
    """When the slowest rank's last gradient was computed, on this host's clock."""
    done: Stamp | None = None
    """When the last bucket held its average."""
    listened: bool = False
    """Whether a collective of this exchange notes ``arrived_s``."""
    like: Exchange | None = None
    """The last exchange with ``listened``, whose *sync* is used for this one; None if this one has, or none did."""
    paused_s: float = 0.0
    """Seconds between ``start`` and ``ready`` in which this rank waited for the others' counts."""

    def note_ready(self) -> None:
        """Note that this rank's last gradient is computed now."""
        self.ready = stamp(self.cuda)

    def note_arrival(self, _: object = None) -> None:
        """Note that the slowest rank's last gradient is computed now; a collective's future calls this with its result."""
        self.arrived_s = time.perf_counter()

    def note_done(self) -> None:
        """Note that a bucket holds its average now; the last call counts."""
        self.done = stamp(self.cuda)

    def split(self) -> tuple[float, float, float]:
        """Return (compute, wait, sync) in seconds: computing, waiting for the slowest rank, and exchanging gradients.

        Where the slowest rank's moment was not noted, the sync of the exchange ``like`` is assumed; without that, the
        whole exchange counts as waiting. Where ``ready`` or ``done`` was not noted, the span that it would end is 0.
        """
        ready = self.ready if self.ready is not None else self.start
        done = self.done if self.done is not None else ready
        exchange_s = seconds_between(ready, done)
        if self.arrived_s is not None:
            # The host may note the moment late, or on CUDA ahead of the device, so the wait is kept within the exchange.
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
    """Return the device's name for telemetry: that of the present CUDA device if the model is on CUDA, else "cpu"."""
    return torch.cuda.get_device_name() if is_cuda(model) else "cpu"


def peak_memory(cuda: bool) -> int:
    """Return the peak memory of this process so far, in bytes: allocated on CUDA with ``cuda``, else resident."""
    if cuda:
        return torch.cuda.max_memory_allocated()
    try:
        with open("/proc/self/status", "rb") as status:
            text = status.read()
        begin = text.index(b"VmHWM:") + len(b"VmHWM:")
        return int(text[begin : text.index(b"kB", begin)]) * 1024
    except (OSError, ValueError):
        # Second choice, because this figure survives exec: a child starts with the peak of its launcher.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
