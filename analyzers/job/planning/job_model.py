"""What is known about a job beside its placement problem (:class:`JobModel`), and bounds of its steps (:class:`Bounds`).

Fitted and predicted times are corrected by those that an earlier run measured, so that all strategies are compared by times
from one source: :func:`measured_speeds`, :func:`combine`, :func:`with_run`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ddltool.analyzers.job.goodput.throughput import StepTime, ThroughputParams, sync_time_s
from ddltool.analyzers.job.placement.problem import Problem
from ddltool.analyzers.job.placement.steps import Counts
from ddltool.analyzers.job.planning.exposed import Communication
from ddltool.analyzers.job.planning.options import HOUR_S, Goal
from ddltool.analyzers.step.measured.feedback import RankRun, Run
from ddltool.decision import Option
from ddltool.errors import Infeasible

if TYPE_CHECKING:
    from ddltool.analyzers.job.planning.layouts import Layouts


# Halvings of the interval that holds the least computing time; its lower end is a bound after any number.
_HALVINGS = 44


@dataclass(frozen=True, kw_only=True, slots=True)
class JobModel:
    """Measured and fitted figures of a job; each may be empty."""

    curves: Mapping[str, StepTime] = field(default_factory=dict)
    """Step time over batch size, by device type."""
    models: Mapping[str, ThroughputParams] = field(default_factory=dict)
    """Fitted throughput models, by device type."""
    communication: Communication | None = None
    layouts: Layouts | None = None
    """Memory and time of the job's model for every way to shard it; None: the model cannot be traced."""
    overhead_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step (or of a worker's iteration) beside compute and communication, by device type: optimizer, loader."""
    imbalance: float = 0.0
    """Waiting of devices that synchronise, because each is slow at other times, over their compute."""
    drift: float = 0.0
    """Share by which the steps of another run may differ from those of the earlier run."""
    seen: Mapping[str, int] = field(default_factory=dict)
    """Number of devices of the earlier run by type."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Relative error of the compute times, by device type, where one is known."""
    error_source: str = ""
    """Where ``errors`` come from, in words."""
    remark: str = ""
    """A remark on the compute times besides their errors: which are measured and which predicted; empty: none."""
    d2_eligible: bool | None = None
    """Whether the model can give the same bits on devices of different types; None: not known."""

    def other_s(self, devices: Iterable[str], skewed_s: float = 0.0) -> float:
        """Return the seconds of a step beside compute and communication, on the types ``devices``.

        They are the longest overhead of these types, plus the waiting of devices that synchronise because each is slow at
        other times. ``skewed_s``: seconds of compute during which such waiting arises; 0.0: a single device, which never waits.
        """
        longest_s = max(self.overhead_s.values(), default=0.0)  # assumed for types whose overhead is not known
        overhead_s = max((self.overhead_s.get(name, longest_s) for name in devices), default=0.0)
        return overhead_s + self.imbalance * skewed_s

    def error(self, devices: Iterable[str]) -> float | None:
        """Return the largest relative error of the compute times of the types ``devices``; None where none is known."""
        return max((self.errors[name] for name in devices if name in self.errors), default=None)

    def gain_error(self, first: Option, second: Option) -> float | None:
        """Return the relative error of the ratio of two plans' rates; None where no error is known.

        The errors of different types are independent and add in squares, each multiplied by the difference between the shares
        in which the two steps depend on that type's times (``leans_on``). So where both depend on one type alone, its error
        cancels. A type without a known error counts as exact. With several types, where the host's time limits a step, these
        shares do not tell how the step follows a device's times, so every type's error counts in full.
        """
        types = {*first.devices, *second.devices}
        errors = {name: self.errors[name] for name in types if name in self.errors}
        if not errors:
            return None
        if len(types) > 1 and (first.host_bound or second.host_bound):
            return math.hypot(*errors.values())
        contributions = []
        for name, error in errors.items():
            difference = first.leans_on.get(name, 0.0) - second.leans_on.get(name, 0.0)
            if abs(difference) > 1e-9:  # less is rounding
                contributions.append(difference * error)
        return math.hypot(*contributions)


class Bounds:
    """Lower bounds of the number that the goal minimises (:meth:`Goal.of`) over boxes of device counts.

    A box holds all counts between a lower and an upper corner. Each part of a step is bounded by itself. Computing: as if all
    devices of the upper corner shared the work in whole samples (or mini-batches, where the strategy deals out these).
    Communication and the rest: as on the devices of the lower corner, because neither gets shorter with more devices.
    """

    def __init__(self, model: JobModel, goal: Goal, problem: Problem, strategy: str) -> None:
        """Take the job's model, goal and problem, and the name of the strategy whose steps are bounded."""
        self.model = model
        self.goal = goal
        self.problem = problem
        self.strategy = strategy
        by_samples = strategy in ("bsp", "lb-bsp")  # the other strategies deal out whole mini-batches
        work_per_worker = problem.batch_size if by_samples else 1
        curves = model.curves if by_samples else {}
        self.work = problem.max_workers * work_per_worker
        """What all devices do together in a step, in samples or in mini-batches."""
        self.times = [
            curves.get(device.name, StepTime()).at_capability(device.capability_per_s, work_per_worker)
            for device in problem.devices
        ]
        """Time over such units of work, by type in the problem's order."""
        self._least_compute_s = cache(self._compute_s)

    def __call__(self, low: Counts, high: Counts) -> float:
        """Return a lower bound of the goal's number over (T,) counts from ``low`` to ``high``; infinite: none is possible."""
        fewest = sum(low)
        if not any(high) or fewest > self.work:
            return math.inf
        compute_s = self._least_compute_s(high)
        if self.strategy == "bsp":  # an equal split gives each device, those of ``low`` too, at least this many samples
            share = self.work // min(self.work, sum(high))
            compute_s = max([compute_s, *(curve.seconds(share) for curve, n in zip(self.times, low, strict=True) if n)])
        communication_s, other_s = 0.0, 0.0
        if self.strategy != "elastic-bsp":  # its workers communicate by themselves, which is not bounded here
            other_s = self.model.other_s(self.problem.named(low), compute_s if fewest > 1 else 0.0)
            if fewest > 1:
                communication_s = self._communication_s(low, high, compute_s)
        if communication_s == math.inf:
            return math.inf
        step_s = compute_s + communication_s + other_s
        return self.goal.of(step_s, max(fewest, 1), self._price(low, high, step_s))

    def _compute_s(self, high: Counts) -> float:
        """Return a lower bound of the seconds in which up to ``high`` (T,) devices do the work of a step."""
        offered = [(step_time, count) for step_time, count in zip(self.times, high, strict=True) if count]
        if self.strategy == "elastic-bsp":  # nobody waits for a whole step
            return self.work / sum(step_time.samples_per_s * count for step_time, count in offered)
        # Bisection: within ``low_s`` the devices do not manage the work, within ``high_s`` they do.
        low_s = 0.0
        high_s = min(step_time.seconds(self.work) for step_time, _ in offered)
        for _ in range(_HALVINGS):
            middle_s = (low_s + high_s) / 2
            if sum(step_time.most_within(middle_s, self.work) * count for step_time, count in offered) >= self.work:
                high_s = middle_s
            else:
                low_s = middle_s
        return low_s

    def _communication_s(self, low: Counts, high: Counts, compute_s: float) -> float:
        """Return a lower bound of the seconds of exposed communication from ``low`` to ``high`` (T,) devices.

        ``compute_s``: of a step. Infinite where ``low`` equals ``high`` and the model does not fit on these devices.
        """
        source = self.model.communication
        if source is None:
            return 0.0
        # Gradients travel while the last pass computes; with ESTs that is a pass over one mini-batch.
        mini_batch_s = max(
            (1 / curve.samples_per_s for curve, n in zip(self.times, high, strict=True) if n), default=0.0
        )
        pass_s = mini_batch_s if self.strategy == "est" else compute_s
        fewest, most = self.problem.named(low), self.problem.named(high)
        try:
            return source.least_s(fewest, pass_s) if low == high else source.bound_s(fewest, most, pass_s)
        except Infeasible:
            return math.inf

    def _price(self, low: Counts, high: Counts, step_s: float) -> float:
        """Return a lower bound of the price in dollars of a step of ``step_s`` seconds on ``low`` to ``high`` (T,) devices.

        It is the larger of two: the price of the ``low`` devices for that time, and that of the work on the cheapest type.
        """
        hourly = [(device.price_micro or 0) / 1e6 for device in self.problem.devices]
        price_of_low = sum(price * count for price, count in zip(hourly, low, strict=True)) * step_s
        offers = zip(hourly, self.times, high, strict=True)
        price_of_unit = min((price / curve.samples_per_s for price, curve, count in offers if count), default=0.0)
        price_of_work = price_of_unit * self.work
        return max(price_of_low, price_of_work) / HOUR_S


# Ratio of measured to predicted speed, or its inverse, beyond which predictions of other types are scaled as well.
RESCALED_FROM = 2.0


def measured_speeds(
    run: Run, batch_size: int, curves: Mapping[str, StepTime]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return (capabilities, factors) that an earlier run measured, both by device type.

    A capability is in mini-batches of ``batch_size`` samples per second. A factor is measured compute over that of the fit (in
    ``curves``: device type -> step time over samples) for the measured batch, of the median rank; types without a fit have
    none. A type with a fit keeps the fit's shape: its time for ``batch_size`` samples is the fit's times the factor. A type
    without one takes a time proportional to its samples, or to its saturation batch where that is larger.
    """
    factors: dict[str, float] = {}
    capabilities: dict[str, float] = {}
    by_device: dict[str, list[RankRun]] = {}
    for rank in run.ranks:
        by_device.setdefault(rank.device, []).append(rank)
    for device, ranks in by_device.items():
        curve = curves.get(device) or StepTime()
        if curve.per_sample_s is not None and (curve.launch_s > 0 or curve.per_sample_s > 0):
            factor = float(np.median([rank.compute_s / curve.seconds(rank.batch, rank.passes) for rank in ranks]))
            factors[device] = factor
            capabilities[device] = 1.0 / (factor * curve.seconds(batch_size))
        else:
            rates = [max(rank.batch, rank.passes * curve.saturation) / rank.compute_s for rank in ranks]
            capabilities[device] = float(np.median(rates)) / batch_size
    return capabilities, factors


@dataclass(frozen=True, kw_only=True, slots=True)
class Combined:
    """Speeds of all offered device types, measured where possible and else predicted."""

    capabilities: Mapping[str, float]
    """Mini-batches per second by device type."""
    errors: Mapping[str, float]
    """Relative error of the types whose prediction was scaled."""
    remark: str
    """In words, which are measured, which predicted and scaled; empty unless there are both."""


def combine(measured: Mapping[str, float], predicted: Mapping[str, float]) -> Combined:
    """Return the measured speeds, and for types without one the predicted speeds, scaled where predictions are far off.

    Both arguments are mini-batches per second by device type; ``predicted`` holds measured types as well where something
    predicts them. If any measured type is off its own prediction by more than a factor of ``RESCALED_FROM``, the same cause is
    assumed for the others (a slower machine, a model that the roofline does not fit): they are scaled by the geometric mean of
    measured over predicted. Their error is then the spread of these ratios, at least 50 %.
    """
    predicted_others = {name: rate for name, rate in predicted.items() if name not in measured}
    errors: dict[str, float] = {}
    remark = ""
    if measured and predicted_others:
        remark = f"{', '.join(sorted(measured))} measured, {', '.join(sorted(predicted_others))} predicted"
        ratios = [rate / predicted[name] for name, rate in measured.items() if predicted.get(name, 0.0) > 0]
        if not ratios:
            remark += ", and nothing tells how far predictions are off here"
        elif not all(1 / RESCALED_FROM <= ratio <= RESCALED_FROM for ratio in ratios):
            scale = float(np.exp(np.mean(np.log(ratios))))
            remark += f": measured speeds are {scale:.2g} times their own prediction, so the predicted ones are scaled as well"
            errors = dict.fromkeys(predicted_others, max(0.5, max(ratios) / min(ratios) - 1))
            predicted_others = {name: rate * scale for name, rate in predicted_others.items()}
    return Combined(capabilities={**predicted_others, **measured}, errors=errors, remark=remark)


def with_run(knowledge: JobModel, run: Run, factors: Mapping[str, float]) -> JobModel:
    """Return ``knowledge`` with every type's step time over batch size, and its fitted model, scaled to agree with ``run``.

    ``factors``: device type -> measured compute over that of its fit; 1 for types that are not in it.
    """
    curves = {name: curve.scaled(factors.get(name, 1.0)) for name, curve in knowledge.curves.items()}
    models = {name: scaled_model(model, factors.get(name, 1.0), run) for name, model in knowledge.models.items()}
    return replace(knowledge, curves=curves, models=models)


def scaled_model(model: ThroughputParams, factor: float, run: Run) -> ThroughputParams:
    """Return the fitted model with compute ``factor`` times as long and synchronisation scaled to the run's.

    If c is the run's longest compute and m its exposed synchronisation, both in seconds, the model's T_sync is
    ``((c + m)^gamma - c^gamma)^(1/gamma)`` (Pollux, section 3.2, solved for T_sync). After a run of one process, or
    with servers, the synchronisation stays as fitted. Where the fit's T_sync is 0 for the run's devices, the run's becomes the
    intercept.
    """
    scaled = {"alpha_grad_s": model.alpha_grad_s * factor, "beta_grad_s": model.beta_grad_s * factor}
    if run.world_size < 2 or run.servers:
        return model.model_copy(update=scaled)
    longest_s = max(rank.compute_s for rank in run.ranks)
    # the formula above divided by c, because powers of very long or short times could overflow
    sync_s = longest_s * float(((1 + run.sync_s / longest_s) ** model.gamma - 1) ** (1 / model.gamma))
    fitted_s = float(sync_time_s(model, run.num_nodes, run.world_size))
    if fitted_s > 0:
        names = ("alpha_sync_local_s", "beta_sync_local_s", "alpha_sync_node_s", "beta_sync_node_s")
        scaled |= {name: getattr(model, name) * sync_s / fitted_s for name in names}
    else:
        level = "local" if run.num_nodes < 2 else "node"
        scaled |= {f"alpha_sync_{level}_s": sync_s, f"beta_sync_{level}_s": 0.0}
    return model.model_copy(update=scaled)
