"""What is known about a job beside its placement problem: :class:`JobModel`; the least that a step takes: :class:`Bounds`.

Fitted and predicted times are corrected by an earlier run's measured ones, so that all strategies are compared by one source:
:func:`measured_speeds`, :func:`combine`, :func:`with_run`.
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


# Halvings in which the least computing time is found; what is returned is its lower end.
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


class Bounds:
    """What the goal compares (:meth:`Goal.of`), bounded from below over all numbers of devices between two corners.

    Each part of a step is bounded alone: computing as if all devices of the upper corner took as many whole samples (or
    mini-batches, where the strategy deals out these) as they can by then; the rest and the communication as on the
    devices of the lower corner, for neither gets shorter with more devices.
    """

    def __init__(self, model: JobModel, goal: Goal, problem: Problem, strategy: str) -> None:
        self.model, self.goal, self.problem, self.strategy = model, goal, problem, strategy
        by_samples = strategy in ("bsp", "lb-bsp")
        work_per_worker = problem.batch_size if by_samples else 1
        curves = model.curves if by_samples else {}
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
            compute_s = max([compute_s, *(curve.seconds(share) for curve, n in zip(self.times, low, strict=True) if n)])
        communication_s, other_s = 0.0, 0.0
        if self.strategy != "elastic-bsp":  # whose iterations have both in them, as long as each worker takes
            other_s = self.model.other_s(self.problem.named(low), compute_s if fewest > 1 else 0.0)
            if fewest > 1:
                communication_s = self._communication_s(low, high, compute_s)
        if communication_s == math.inf:
            return math.inf
        step_s = compute_s + communication_s + other_s
        return self.goal.of(step_s, max(fewest, 1), self._price(low, high, step_s))

    def _compute_s(self, high: Counts) -> float:
        """Return a lower bound of the seconds in which up to ``high`` devices of each type do the whole step's work."""
        offered = [(step_time, count) for step_time, count in zip(self.times, high, strict=True) if count]
        if self.strategy == "elastic-bsp":  # nobody waits for a whole step
            return self.work / sum(step_time.samples_per_s * count for step_time, count in offered)
        low_s, high_s = 0.0, min(step_time.seconds(self.work) for step_time, _ in offered)
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
        for samples, count in sorted(((curve.most_within(seconds, self.work), n) for curve, n in types), reverse=True):
            used = min(count, work_left)
            samples_done, work_left = samples_done + samples * used, work_left - used
        return samples_done >= self.work

    def _communication_s(self, low: Counts, high: Counts, compute_s: float) -> float:
        """Return the least seconds that communication leaves exposed; infinite where exactly ``low`` hold no replica."""
        source = self.model.communication
        if source is None:
            return 0.0
        # Gradients travel while the last pass computes: an EST's is of one mini-batch.
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
        """Return the least price of a step: of the devices of ``low`` for its time, and of the work on the cheapest type."""
        hourly = [(device.price_micro or 0) / 1e6 for device in self.problem.devices]
        price_of_low = sum(price * count for price, count in zip(hourly, low, strict=True)) * step_s
        offers = zip(hourly, self.times, high, strict=True)
        price_of_unit = min((price / curve.samples_per_s for price, curve, count in offers if count), default=0.0)
        price_of_work = price_of_unit * self.work
        return max(price_of_low, price_of_work) / HOUR_S


# Ratio of measured to predicted speed from which on the predictions of the other types are scaled as well.
RESCALED_FROM = 2.0


def measured_speeds(
    run: Run, batch_size: int, curves: Mapping[str, StepTime]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return how fast the run's device types are with mini-batches of ``batch_size`` samples, and how far fits were off.

    Both by device type: mini-batches per second of the median rank, and measured compute over what the type's fit says of
    the measured batch. A type with a fit keeps the fit's shape: its curve, multiplied so that the measured batch takes the
    measured time. Any other type takes a time proportional to its samples, or to its saturation where there are fewer.
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
    """Speeds of all offered device types: of some measured, of the others predicted."""

    capabilities: Mapping[str, float]
    """Mini-batches per second by device type."""
    errors: Mapping[str, float]
    """Relative error of the types whose prediction was scaled."""
    remark: str
    """What a reader must know before comparing one with the other; empty where all types are measured."""


def combine(measured: Mapping[str, float], predicted: Mapping[str, float]) -> Combined:
    """Return the measured speeds, and for types without one the predictions, scaled where measured types were far off.

    Both are mini-batches per second by device type; ``predicted`` holds the measured types as well, as far as something
    predicts them. Where a measured type is more than ``RESCALED_FROM`` times off its own prediction, whatever made it so
    (another machine posing as it, a model the roofline does not know) makes it for the others too: they are scaled by
    the geometric mean of measured over predicted, with the spread of these ratios as their error, at least 50 %.
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
    """Return ``knowledge`` with every curve and model scaled to agree with ``run``.

    ``factors``: by how much the compute of each device type is longer than its fit says.
    """
    curves = {name: curve.scaled(factors.get(name, 1.0)) for name, curve in knowledge.curves.items()}
    models = {name: scaled_model(model, factors.get(name, 1.0), run) for name, model in knowledge.models.items()}
    return replace(knowledge, curves=curves, models=models)


def scaled_model(model: ThroughputParams, factor: float, run: Run) -> ThroughputParams:
    """Return a fitted model whose compute is ``factor`` times as long and whose synchronisation is the run's.

    The synchronisation that a run leaves exposed behind its longest compute c, m seconds, is the model's
    ``((c + m)^gamma - c^gamma)^(1/gamma)`` (Pollux, section 3.2, solved for the synchronisation). A run of one process
    says nothing about it: it stays as fitted.
    """
    scaled = {"alpha_grad_s": model.alpha_grad_s * factor, "beta_grad_s": model.beta_grad_s * factor}
    if run.world_size > 1:
        longest_s = max(rank.compute_s for rank in run.ranks)
        sync_s = longest_s * float(((1 + run.sync_s / longest_s) ** model.gamma - 1) ** (1 / model.gamma))
        fitted_s = float(sync_time_s(model, run.num_nodes, run.world_size))
        if fitted_s > 0:
            names = ("alpha_sync_local_s", "beta_sync_local_s", "alpha_sync_node_s", "beta_sync_node_s")
            scaled |= {name: getattr(model, name) * sync_s / fitted_s for name in names}
        else:
            level = "local" if run.num_nodes < 2 else "node"
            scaled |= {f"alpha_sync_{level}_s": sync_s, f"beta_sync_{level}_s": 0.0}
    return model.model_copy(update=scaled)
