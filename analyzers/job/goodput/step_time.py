"""Seconds that a device computes for a batch: THE model of step time over batch size that planners share.

Start at :class:`StepTime`, of one device type; :class:`~ddltool.analyzers.job.balancing.minmax.DeviceCurves` is the same of
several at once, as arrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Self

from ddltool.analyzers.job.goodput.throughput import ThroughputParams
from ddltool.device import DEVICES_PER_NODE


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """A pass over x samples takes ``launch_s + per_sample_s max(x, saturation)`` seconds of computing on one device."""

    launch_s: float = 0.0
    per_sample_s: float | None = None
    """None: nothing but the device's capability says it (:meth:`at_capability`)."""
    memory_limit: int | None = None
    """Most samples of a pass; None: no limit is known."""
    saturation: int = 0
    """Samples below which a pass takes no less time."""
    sync: ThroughputParams | None = None
    """Fitted model whose synchronisation time is added to a step; None: not known."""
    devices_per_node: int = DEVICES_PER_NODE
    """For ``sync``: devices that fill a node."""

    def at_capability(self, mini_batches_per_s: Fraction | float, batch_size: int) -> Self:
        """Return the same with a time per sample, by which a saturated mini-batch takes ``1 / mini_batches_per_s``.

        A fitted time per sample stays.
        """
        if self.per_sample_s is not None:
            return self
        return replace(self, per_sample_s=float(1 / (mini_batches_per_s * max(batch_size, self.saturation))))

    @property
    def samples_per_s(self) -> float:
        """Samples per second beyond the launch, where the device is saturated; infinity where they take no time."""
        return 1 / self.per_sample_s if self.per_sample_s else math.inf

    def seconds(self, samples: float, passes: int = 1) -> float:
        """Return the seconds of ``samples`` in so many equal passes. It must have a time per sample."""
        assert self.per_sample_s is not None
        return passes * self.launch_s + self.per_sample_s * max(samples, passes * self.saturation)

    def most_within(self, seconds: float, samples: int) -> int:
        """Return how many of ``samples`` one pass makes in so many seconds, rounded up where rounding might cost one."""
        left = seconds - self.launch_s
        if left < 0:
            return 0
        if self.samples_per_s == math.inf:
            return samples
        most = int(min(left * self.samples_per_s * (1 + 1e-12) + 1e-9, samples))
        return most if most >= max(1, self.saturation) else 0

    def scaled(self, factor: float) -> Self:
        """Return the same with every fitted time ``factor`` times as long; limits and saturation stay."""
        per_sample_s = None if self.per_sample_s is None else self.per_sample_s * factor
        return replace(self, launch_s=self.launch_s * factor, per_sample_s=per_sample_s)
