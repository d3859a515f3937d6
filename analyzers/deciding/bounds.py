"""What a strategy takes at least on some numbers of devices, for the search over them. Start at :class:`Bounds`."""

from __future__ import annotations

import math
from functools import cache

from ddltool.analyzers.balancing.plan import StepCurve
from ddltool.analyzers.deciding.goal import HOUR_S, Goal
from ddltool.analyzers.deciding.knowledge import Knowledge
from ddltool.analyzers.placement.problem import Problem
from ddltool.analyzers.placement.steps import Counts
from ddltool.errors import Infeasible


class Bounds:
    """What no numbers of devices between two corners are below, for one strategy: its computing, and bytes on the slowest link.

    A step computes at least as long as if every device took what it can by then, whatever it exchanges; and a gradient
    cannot be reduced over the nodes sooner than its bytes pass a link.
    """

    def __init__(self, knowledge: Knowledge, goal: Goal, problem: Problem, name: str) -> None:
        self.knowledge, self.goal, self.problem, self.name = knowledge, goal, problem, name
        # What is dealt out: samples, or mini-batches as a whole.
        known, size = (knowledge.curves, problem.batch_size) if name in ("bsp", "lb-bsp") else ({}, 1)
        curves = [known.get(device.name, StepCurve()) for device in problem.devices]
        self.total = problem.max_workers * size
        self.launch = [curve.launch_s for curve in curves]
        self.least = [max(1, curve.saturation) for curve in curves]
        self.rates = [
            float(device.capability_per_s) * max(size, curve.saturation)
            if curve.per_sample_s is None
            else 1 / curve.per_sample_s
            if curve.per_sample_s
            else math.inf
            for device, curve in zip(problem.devices, curves, strict=True)
        ]
        self.prices = [device.price_micro or 0 for device in problem.devices]
        self._compute_s = cache(self._computing_s)

    def __call__(self, low: Counts, high: Counts) -> float:
        """Return the bound of a box, in what the goal compares."""
        problem, used = self.problem, sum(low)
        if not any(high) or used > self.total:
            return math.inf
        seconds, apart = self._compute_s(high), self.name == "elastic-bsp"
        devices = problem.named(low)
        if self.name == "bsp":
            share = self.total // min(self.total, sum(high))
            seconds = max(seconds, max((self._takes(kind, share) for kind, n in enumerate(low) if n), default=0.0))
        other_s = 0.0 if apart else self.knowledge.other_s(devices, seconds if used > 1 else 0.0)
        if (known := self.knowledge.communication) is not None and used > 1 and not apart:
            slowest = max((1 / rate for rate, n in zip(self.rates, high, strict=True) if n), default=0.0)
            pass_s = slowest if self.name == "est" else seconds
            try:
                most = problem.named(high)
                seconds += known.least_s(devices, pass_s) if low == high else known.bound_s(devices, most, pass_s)
            except Infeasible:  # exactly these hold no replica
                return math.inf
        seconds += other_s
        priced = zip(self.prices, self.rates, high, strict=True)
        cheapest = min((price / rate for price, rate, n in priced if n), default=0.0)
        each = sum(price * n for price, n in zip(self.prices, low, strict=True))
        price = max(each * seconds, cheapest * self.total) / 1e6 / HOUR_S
        return self.goal.of(seconds, max(used, 1), price)

    def _takes(self, kind: int, samples: int) -> float:
        return self.launch[kind] + max(samples, self.least[kind]) / self.rates[kind]

    def _computing_s(self, high: Counts) -> float:
        """Return the least seconds in which some of so many devices make the whole step's work, by whole samples or ESTs."""
        if self.name == "elastic-bsp":  # iterations of its own: nobody waits for a whole step
            return self.total / sum(rate * n for rate, n in zip(self.rates, high, strict=True))
        kinds = [kind for kind, n in enumerate(high) if n]

        def enough(seconds: float) -> bool:
            takes = sorted(((self._within(kind, seconds), high[kind]) for kind in kinds), reverse=True)
            left, made = self.total, 0
            for size, n in takes:
                n = min(n, left)
                made, left = made + size * n, left - n
            return made >= self.total

        low, top = 0.0, min(self._takes(kind, self.total) for kind in kinds)
        for _ in range(44):
            middle = (low + top) / 2
            low, top = (low, middle) if enough(middle) else (middle, top)
        return low

    def _within(self, kind: int, seconds: float) -> int:
        """Return how many samples or ESTs a device makes by then, rounded up where rounding might cost one."""
        left = seconds - self.launch[kind]
        if left < 0:
            return 0
        if self.rates[kind] == math.inf:
            return self.total
        most = int(min(left * self.rates[kind] * (1 + 1e-12) + 1e-9, self.total))
        return most if most >= self.least[kind] else 0
