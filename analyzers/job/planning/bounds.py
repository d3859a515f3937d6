"""What a strategy takes at least on some numbers of devices, for the search over them. Start at :class:`Bounds`."""

from __future__ import annotations

import math
from functools import cache

from ddltool.analyzers.job.goodput.step_time import StepTime
from ddltool.analyzers.job.placement.problem import Problem
from ddltool.analyzers.job.placement.steps import Counts
from ddltool.analyzers.job.planning.goal import HOUR_S, Goal
from ddltool.analyzers.job.planning.job_model import JobModel
from ddltool.errors import Infeasible

# Halvings in which the least computing time is found; what is returned is its lower end.
_HALVINGS = 44


class Bounds:
    """What the goal compares (:meth:`Goal.of`), bounded from below over all numbers of devices between two corners.

    Each part of a step is bounded alone: computing as if all devices of the upper corner took as many whole samples (or
    mini-batches, where the strategy deals out these) as they can by then; the rest and the communication as on the
    devices of the lower corner, for neither gets shorter with more devices.
    """

    def __init__(self, knowledge: JobModel, goal: Goal, problem: Problem, strategy: str) -> None:
        self.knowledge, self.goal, self.problem, self.strategy = knowledge, goal, problem, strategy
        by_samples = strategy in ("bsp", "lb-bsp")
        each = problem.batch_size if by_samples else 1
        known = knowledge.curves if by_samples else {}
        self.work = problem.max_workers * each  # of a step, in samples or mini-batches
        self.times = [
            known.get(device.name, StepTime()).at_capability(device.capability_per_s, each)
            for device in problem.devices
        ]
        self._least_compute_s = cache(self._compute_s)

    def __call__(self, low: Counts, high: Counts) -> float:
        """Return a value that no devices from ``low`` to ``high`` of each type are below; infinite where none are possible."""
        fewest = sum(low)
        if not any(high) or fewest > self.work:
            return math.inf
        compute_s = self._least_compute_s(high)
        if self.strategy == "bsp":
            share = self.work // min(self.work, sum(high))
            compute_s = max([compute_s, *(time.seconds(share) for time, n in zip(self.times, low, strict=True) if n)])
        communication_s, other_s = 0.0, 0.0
        if self.strategy != "elastic-bsp":  # whose iterations have both in them, as long as each worker takes
            other_s = self.knowledge.other_s(self.problem.named(low), compute_s if fewest > 1 else 0.0)
            if fewest > 1:
                communication_s = self._communication_s(low, high, compute_s)
        if communication_s == math.inf:
            return math.inf
        step_s = compute_s + communication_s + other_s
        return self.goal.of(step_s, max(fewest, 1), self._price(low, high, step_s))

    def _compute_s(self, high: Counts) -> float:
        """Return the least seconds in which some of so many devices do the whole step's work."""
        types = [(time, n) for time, n in zip(self.times, high, strict=True) if n]
        if self.strategy == "elastic-bsp":  # nobody waits for a whole step
            return self.work / sum(time.samples_per_s * n for time, n in types)
        low_s, high_s = 0.0, min(time.seconds(self.work) for time, _ in types)
        for _ in range(_HALVINGS):
            middle_s = (low_s + high_s) / 2
            if self._is_done(types, middle_s):
                high_s = middle_s
            else:
                low_s = middle_s
        return low_s

    def _is_done(self, types: list[tuple[StepTime, int]], seconds: float) -> bool:
        """Return whether so many devices of some types may do the whole work by then, none of them idle."""
        done, unused = 0, self.work
        for size, n in sorted(((time.most_within(seconds, self.work), n) for time, n in types), reverse=True):
            used = min(n, unused)
            done, unused = done + size * used, unused - used
        return done >= self.work

    def _communication_s(self, low: Counts, high: Counts, compute_s: float) -> float:
        """Return the least seconds that communication leaves exposed; infinite where exactly ``low`` hold no replica."""
        source = self.knowledge.communication
        if source is None:
            return 0.0
        # Gradients travel while the last pass computes: an EST's is of one mini-batch.
        one = max((1 / time.samples_per_s for time, n in zip(self.times, high, strict=True) if n), default=0.0)
        pass_s = one if self.strategy == "est" else compute_s
        fewest, most = self.problem.named(low), self.problem.named(high)
        try:
            return source.least_s(fewest, pass_s) if low == high else source.bound_s(fewest, most, pass_s)
        except Infeasible:
            return math.inf

    def _price(self, low: Counts, high: Counts, step_s: float) -> float:
        """Return the least price of a step: of the devices of ``low`` for its time, and of the work on the cheapest type."""
        hourly = [(device.price_micro or 0) / 1e6 for device in self.problem.devices]
        of_low = sum(price * n for price, n in zip(hourly, low, strict=True)) * step_s
        offers = zip(hourly, self.times, high, strict=True)
        of_work = min((price / time.samples_per_s for price, time, n in offers if n), default=0.0) * self.work
        return max(of_low, of_work) / HOUR_S
