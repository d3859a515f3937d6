"""What this rank did in a step: samples, seconds of its own computation, and how much memory is left.

The seconds run from the first forward pass to the moment at which DDP has this rank's last bucket of gradients ready; what
the exchange takes, and waiting for others, is not the rank's speed. On CUDA both ends are events on the device's timeline.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddltool.runtime.hook.telemetry import Exchange, Stamp, StepRecorder, seconds_between, stamp
from ddltool.runtime.measuring.watch import available_memory, expected_cpu

Floats = NDArray[np.float64]
LEAST_S = 1e-9


@dataclass(slots=True)
class StepClock:
    """Times the steps of this rank; ``recorder`` gets to know of them too, if there is one."""

    cuda: bool
    recorder: StepRecorder | None = None
    _start: Stamp | None = None
    _exchanges: list[Exchange] | None = None
    _passes: int = 0

    def begin_forward(self) -> None:
        """A forward pass begins; the first since the last exchange starts the clock."""
        self._passes += 1
        if self._start is None:
            self._start = stamp(self.cuda)
        if self.recorder is not None:
            self.recorder.begin_forward()

    def begin_exchange(self, samples: int, totals: Tensor | None) -> Exchange:
        """Return the record of a backward pass whose gradients are about to be exchanged."""
        if self.recorder is not None:
            exchange = self.recorder.begin_exchange(samples, totals)
        else:
            exchange = Exchange(
                samples, totals, self._start if self._start is not None else stamp(self.cuda), self.cuda
            )
        self._start = None
        self._exchanges = [*(self._exchanges or ()), exchange]
        return exchange

    def take(self) -> list[Exchange]:
        """Return the exchanges since the last call: those of the step that has ended."""
        exchanges, self._exchanges = self._exchanges or [], None
        return exchanges

    def take_passes(self) -> int:
        """Return the forward passes since the last call."""
        passes, self._passes = self._passes, 0
        return passes


def row_of(exchanges: list[Exchange], cuda: bool, readings: bool) -> Floats:
    """Return (5,) samples, seconds, and as shares memory in use, CPU that can be expected, and memory available.

    CPU takes a millisecond to find out, so it is 1 without ``readings``. On CUDA this waits for the device to end the
    computation; call it where that does no harm.
    """
    seconds = 0.0
    for exchange in exchanges:
        ready = exchange.ready if exchange.ready is not None else exchange.start
        if ready.event is not None:
            ready.event.synchronize()
        seconds += seconds_between(exchange.start, ready)
    samples = sum(exchange.samples for exchange in exchanges)
    available = available_memory()
    used = 1.0 - available
    if cuda:
        used = torch.cuda.max_memory_allocated() / torch.cuda.get_device_properties().total_memory
    cpu = expected_cpu() if readings else 1.0
    return np.array([samples, max(seconds, LEAST_S), used, cpu, available], dtype=np.float64)
