"""What is known about a job beside its placement problem, and how sure. Start at :class:`JobModel`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddltool.analyzers.job.goodput.step_time import StepTime
from ddltool.analyzers.job.goodput.throughput import ThroughputParams
from ddltool.analyzers.job.planning.exposed import Communication
from ddltool.decision import Option

if TYPE_CHECKING:  # it loads torch
    from ddltool.analyzers.job.planning.layouts import Layouts


@dataclass(frozen=True, kw_only=True, slots=True)
class JobModel:
    """Measured and fitted figures of a job; each may be empty."""

    curves: Mapping[str, StepTime] = field(default_factory=dict)
    """Step time over batch size, by device type."""
    models: Mapping[str, ThroughputParams] = field(default_factory=dict)
    """Fitted throughput models, by device type."""
    communication: Communication | None = None
    layouts: Layouts | None = None
    """What memory and time the job's model takes however it is sharded; None: the model cannot be traced here."""
    overhead_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each step, or each worker's iteration, beside both, by device type: optimizer, loader."""
    imbalance: float = 0.0
    """What several that synchronise wait because none is always as fast, over their compute."""
    drift: float = 0.0
    """By what share a step of an earlier run may differ in another run, whatever decides it."""
    seen: Mapping[str, int] = field(default_factory=dict)
    """The devices of an earlier run."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Relative error of the compute times, by device type, where one is known."""
    error_source: str = ""
    remark: str = ""
    """What a reader must know of the compute times beside their errors: some measured, some predicted."""
    d2_eligible: bool | None = None
    """Whether the model may have the same bits on devices of different types; None: not known."""

    def other_s(self, devices: Iterable[str], skewed_s: float = 0.0) -> float:
        """Return what a step has beside compute and communication on devices of some types.

        ``skewed_s``: the compute of several that synchronise. Of a type that no run has seen it is the longest known.
        """
        longest = max(self.overhead_s.values(), default=0.0)
        return max((self.overhead_s.get(name, longest) for name in devices), default=0.0) + self.imbalance * skewed_s

    def error(self, devices: Iterable[str]) -> float | None:
        """Return the largest relative error of the used types' compute times, given ones counted as exact; None for none."""
        return max((self.errors[name] for name in devices if name in self.errors), default=None)

    def gain_error(self, first: Option, second: Option) -> float | None:
        """Return the relative error of one plan's rate over another's; None where no error is known.

        The errors of different types are independent and add in squares, each by how much more one step leans on that type's
        times than the other: one type's error alone scales both, and cancels. Where the host decides, the types' times do not,
        and each counts in full.
        """
        types = {*first.devices, *second.devices}
        errors = {name: self.errors[name] for name in types if name in self.errors}
        if not errors:
            return None
        if len(types) > 1 and (first.host_bound or second.host_bound):
            return math.hypot(*errors.values())
        leanings = (
            (first.leans_on.get(name, 0.0) - second.leans_on.get(name, 0.0), error) for name, error in errors.items()
        )
        return math.hypot(*(difference * error for difference, error in leanings if abs(difference) > 1e-9))
