"""A lower bound on a strategy's step over ranges of device counts, for the search over these. Start at :class:`Bounds`."""

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
        work_per_worker = problem.batch_size if by_samples else 1
        curves = knowledge.curves if by_samples else {}
        self.work = problem.max_workers * work_per_worker  # of a step, in samples or mini-batches
        self.times = [
            curves.get(device.name, StepTime()).at_capability(device.capability_per_s, work_per_worker)
            for device in problem.devices
        ]
        self._least_compute_s = cache(self._compute_s)

    def __call__(self, low: Counts, high: Counts) -> float:
        """Return a lower bound of the goal's value over counts from ``low`` to ``high`` by type; infinite: none is possible."""
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
        """Return a lower bound of the seconds in which up to ``high`` devices of each type do the whole step's work."""
        offered = [(time, count) for time, count in zip(self.times, high, strict=True) if count]
        if self.strategy == "elastic-bsp":  # nobody waits for a whole step
            return self.work / sum(time.samples_per_s * count for time, count in offered)
        low_s, high_s = 0.0, min(time.seconds(self.work) for time, _ in offered)
        for _ in range(_HALVINGS):
            middle_s = (low_s + high_s) / 2
            if self._is_done(offered, middle_s):
                high_s = middle_s
            else:
                low_s = middle_s
        return low_s

    def _is_done(self, types: list[tuple[StepTime, int]], seconds: float) -> bool:
        """Return whether the given numbers of devices by type can do the whole work within ``seconds``, no used one idle."""
        samples_done, work_left = 0, self.work
        for samples, count in sorted(((time.most_within(seconds, self.work), n) for time, n in types), reverse=True):
            used = min(count, work_left)
            samples_done, work_left = samples_done + samples * used, work_left - used
        return samples_done >= self.work

    def _communication_s(self, low: Counts, high: Counts, compute_s: float) -> float:
        """Return the least seconds that communication leaves exposed; infinite where exactly ``low`` hold no replica."""
        source = self.knowledge.communication
        if source is None:
            return 0.0
        # Gradients travel while the last pass computes: an EST's is of one mini-batch.
        mini_batch_s = max((1 / time.samples_per_s for time, n in zip(self.times, high, strict=True) if n), default=0.0)
        pass_s = mini_batch_s if self.strategy == "est" else compute_s
        fewest, most = self.problem.named(low), self.problem.named(high)
        try:
            return source.least_s(fewest, pass_s) if low == high else source.bound_s(fewest, most, pass_s)
        except Infeasible:
            return math.inf

    def _price(self, low: Counts, high: Counts, step_s: float) -> float:
        """Return the least price of a step: of the devices of ``low`` for its time, and of the work on the cheapest type."""
        hourly = [(device.price_micro or 0) / 1e6 for device in self.problem.devices]
        price_of_low = sum(price * count for price, count in zip(hourly, low, strict=True)) * step_s
        offers = zip(hourly, self.times, high, strict=True)
        price_of_unit = min((price / time.samples_per_s for price, time, count in offers if count), default=0.0)
        price_of_work = price_of_unit * self.work
        return max(price_of_low, price_of_work) / HOUR_S
