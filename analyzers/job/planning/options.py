"""What a plan is asked for beside the job: its objective and limits (:class:`Goal`), and all else (:class:`PlanOptions`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddltool.analyzers.job.planning.failures import Failures
from ddltool.analyzers.job.planning.superstep import DEFAULT_LOOKAHEAD
from ddltool.analyzers.step.communication.collectives import Compression
from ddltool.decision import FailureFigures, Objective, Option, Remedy, RunFactors, RunFigures
from ddltool.errors import Infeasible
from ddltool.graph import Graph
from ddltool.units import counted, show_hours, show_money, show_seconds

HOUR_S = 3600.0
# Standard deviations of a normal distribution within which 80 % of it lie, as of a predicted step.
_RANGE = 1.2816
# Share of the time that trains below which a run does not get anywhere.
_LEAST_GOODPUT = 0.01
_NONE_TRAINS = 1e-9
"""The goodput of a remedy by which nothing trains: the run takes as good as for ever."""


class Missed(Infeasible):
    """Says that the best plan breaks a limit of the goal; ``by``: the plan's figure over the limit."""

    def __init__(self, text: str, by: float = 0.0) -> None:
        """Take the error's text, and by what factor the limit is missed (pickle sets it after the text)."""
        super().__init__(text)
        self.by = by


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """The objective, the samples of the whole run, and limits on it. Values are compared least first."""

    objective: Objective = "fastest"
    samples: float | None = None
    """Of the whole run; None: only steps are planned."""
    step_samples: int = 1
    """Of a step of all workers."""
    deadline_s: float = math.inf
    """Seconds of the whole run; infinite: any."""
    budget: float = math.inf
    """Price of the whole run in dollars; infinite: any."""
    slowest_step_s: float = math.inf
    """Seconds of a step at the least throughput that the job demands; infinite: none is demanded."""
    failures: Failures | None = None
    power_w: Mapping[str, float] = field(default_factory=dict)
    """Watts of one device by type, where they are known."""

    @property
    def limited(self) -> bool:
        """Whether a plan may be too slow or too dear."""
        return min(self.deadline_s, self.budget, self.slowest_step_s) < math.inf

    def unlimited(self, objective: Objective = "fastest") -> Goal:
        """Return the same run's goal with this objective and no limits."""
        return Goal(objective=objective, samples=self.samples, step_samples=self.step_samples, failures=self.failures)

    def slowdown(self, devices: int) -> float:
        """Return how many times as long a run on so many devices takes with failures and checkpoints as without.

        A search compares plans by it. What waiting for repairs or spares add is the picked plan's: see :meth:`run`.
        """
        return 1.0 if self.failures is None else self.failures.factor(max(devices, 1))

    def _remedied(self, devices: int) -> tuple[str, float, float]:
        """Return (best remedy for failures, how many times as long the run takes by it, how many times as dear it is).

        A remedy is what a job does about failed devices (:meth:`Failures.remedies`). The best is the cheapest where the
        objective is the cheapest plan, else the fastest. Without failures it is ("", 1.0, 1.0).
        """
        if self.failures is None:
            return "", 1.0, 1.0
        factors: dict[str, tuple[float, float]] = {}  # remedy -> (longer by, dearer by)
        for name, (goodput, paid_devices) in self.failures.remedies(devices).items():
            longer = 1 / max(goodput, _NONE_TRAINS)
            dearer = paid_devices / devices / max(goodput, _NONE_TRAINS)
            factors[name] = longer, dearer
        first, second = (1, 0) if self.objective == "cheapest" else (0, 1)  # price, then time; or time, then price
        best = min(factors, key=lambda name: (factors[name][first], factors[name][second]))
        longer, dearer = factors[best]
        return best, longer, dearer

    def failure_factors(self, counts: Iterable[int]) -> dict[str, RunFactors]:
        """Return number of devices -> what failures make of a run on them, by the best remedy; {} where nothing fails.

        The keys are texts, as in the JSON of a decision.
        """
        if self.failures is None:
            return {}
        found: dict[str, RunFactors] = {}
        for count in sorted(counts):
            _, longer, dearer = self._remedied(count)
            found[str(count)] = RunFactors(time=longer, price=dearer)
        return found

    def failure_figures(self, option: Option, shards: int) -> FailureFigures | None:
        """Return how failures and checkpoints slow down a run of ``option``, by each remedy; None where nothing fails.

        ``shards``: number of devices that share a replica's state, and so each checkpoint of it. Raises Infeasible where less
        than a hundredth of the time trains.
        """
        failures = self.failures
        if failures is None:
            return None
        devices = sum(option.devices.values())
        run = self.run(option)
        remedy, slowdown, dearer = self._remedied(devices)
        if 1 / slowdown < _LEAST_GOODPUT:
            raise Infeasible(
                f"--mtbf: one of {counted(devices, 'device')} fails every {show_seconds(failures.mtbf_s / devices)}, "
                f"a checkpoint takes {show_seconds(failures.checkpoint_s)} and a restart {show_seconds(failures.restart_s)}: "
                f"less than {_LEAST_GOODPUT:.0%} of the time trains"
            )
        remedies: dict[str, Remedy] = {}
        for name, (goodput, paid_devices) in failures.remedies(devices).items():
            hours: float | None = None  # not known, or infinite
            price: float | None = None
            if run is not None and goodput:
                # The run's hours and price are by the best remedy: they are scaled to this one's.
                hours = run.hours / slowdown / goodput
                if run.price is not None:
                    price = run.price / dearer * paid_devices / devices / goodput
            remedies[name] = Remedy(goodput=goodput, devices=paid_devices, hours=hours, price=price)
        interval_s = failures.interval_s(devices)
        processes = shards * (1 if option.group is None else option.group.size)  # that share a checkpoint
        return FailureFigures(
            remedy=remedy,
            remedies=remedies,
            job_mtbf_s=failures.mtbf_s / devices,
            repair_s=failures.repair_s,
            checkpoint_s=failures.checkpoint_s,
            write_s=failures.write_s,
            checkpoint_bytes=failures.size_bytes or None,
            process_bytes=failures.size_bytes / processes or None,
            checkpoint_interval_s=interval_s if interval_s < math.inf else None,
            per_storage=failures.per_storage(devices),
        )

    def value(self, option: Option) -> float:
        """Return the number that an option is compared by (:meth:`of`), the least first; infinite where a limit is broken."""
        samples = self.step_samples if option.step_samples is None else option.step_samples
        price = None if option.price_per_sample is None else option.price_per_sample * samples
        return self.of(option.iteration_s, sum(option.devices.values()), price, samples)

    def of(self, step_s: float, devices: int, price: float | None, samples: int | None = None) -> float:
        """Return the number that plans are compared by, the least first, for a plan with such steps.

        By objective it is the price per sample, the number of devices, or else the seconds of a step; failures and checkpoints
        make price and time larger. It is infinite where a limit is broken, and where the cheapest plan is looked for and the
        price is not known. A longer step, or one on more devices, never has a smaller value: searches rely on that.

        Args:
            step_s: seconds of the step.
            devices: how many devices it takes.
            price: dollars of the step; None: not known.
            samples: samples of the step; None: the job's.
        """
        step_samples = samples or self.step_samples
        slowdown = self.slowdown(devices)
        if not self._keeps_limits(step_s, price, step_samples, slowdown):
            return math.inf
        if self.objective == "cheapest":
            return math.inf if price is None else price / step_samples * slowdown
        if self.objective == "fewest-devices":
            # among plans on equally many devices the fastest: a step's time adds less than one device would
            return devices + step_s / (step_s + 1)
        return step_s * slowdown

    def _keeps_limits(self, step_s: float, price: float | None, step_samples: int, slowdown: float) -> bool:
        """Return whether a run of such steps keeps the demanded throughput, the deadline and the budget.

        ``price``: dollars of a step; None: not known, which keeps any budget. ``slowdown``: factor on the run's time and price
        from failures and checkpoints.
        """
        slack = 1 + 1e-9  # for rounding
        steps = 0.0 if self.samples is None else self.samples / step_samples  # of the whole run
        return (
            step_s <= self.slowest_step_s * slack
            and steps * step_s * slowdown <= self.deadline_s * slack
            and (price is None or steps * price * slowdown <= self.budget * slack)
        )

    def demand(self, option: Option) -> None:
        """Raise Missed, with the option's figures, where its whole run breaks the deadline, the budget, or both."""
        run = self.run(option)
        if run is None:
            return
        used_text = f"on {' + '.join(f'{count} {name}' for name, count in option.devices.items())}"
        broken: list[tuple[str, float]] = []  # (what it breaks, its figure over the limit)
        if run.hours * HOUR_S > self.deadline_s * (1 + 1e-9):
            allowed_hours = self.deadline_s / HOUR_S
            text = f"deadline: the whole run takes {show_hours(run.hours)} {used_text}, {show_hours(allowed_hours)} allowed"
            broken.append((text, run.hours / max(allowed_hours, 1e-9)))
        if run.price is not None and run.price > self.budget * (1 + 1e-9):
            text = f"budget: the whole run costs {show_money(run.price)} {used_text}, {show_money(self.budget)} allowed"
            broken.append((text, run.price / max(self.budget, 1e-9)))
        if broken:
            texts, factors = zip(*broken, strict=True)
            raise Missed("; ".join(texts), max(factors))

    def demand_both(self, fastest: Option, cheapest: Option) -> None:
        """Raise Missed where the fastest plan is too dear and the cheapest too slow."""
        fastest_run, cheapest_run = self.run(fastest), self.run(cheapest)
        if fastest_run is None or cheapest_run is None or fastest_run.price is None or fastest_run.price <= self.budget:
            return
        text = f"the fastest plan costs {show_money(fastest_run.price)}, {show_money(self.budget)} allowed"
        text += f"; the cheapest takes {show_hours(cheapest_run.hours)}, {show_hours(self.deadline_s / HOUR_S)} allowed"
        raise Missed(f"budget and deadline: no plan keeps both: {text}", fastest_run.price / self.budget)

    def run(self, option: Option) -> RunFigures | None:
        """Return time, price, energy and failures of the whole run by an option; None where its samples are not known.

        The times include failures, by the best remedy, and checkpoints.
        """
        if self.samples is None:
            return None
        devices = sum(option.devices.values())
        _, slowdown, dearer = self._remedied(devices)
        steps = self.samples / (self.step_samples if option.step_samples is None else option.step_samples)
        hours = steps * option.iteration_s * slowdown / HOUR_S
        low_hours = None if option.low_s is None else steps * option.low_s * slowdown / HOUR_S
        high_hours = None if option.high_s is None else steps * option.high_s * slowdown / HOUR_S
        failures = self.failures
        interval_s = math.inf
        if failures is not None:
            interval_s = failures.interval_s(devices)
            if hours < math.inf:
                # The error of the step and the chance of failures are independent, so their deviations add in squares.
                by_failures = _RANGE * failures.spread_s(devices, hours * HOUR_S) / HOUR_S
                low = hours if low_hours is None else low_hours
                high = hours if high_hours is None else high_hours
                without_failures = low / slowdown  # failures only add to it
                low_hours = max(hours - math.hypot(hours - low, by_failures), without_failures)
                high_hours = hours + math.hypot(high - hours, by_failures)
        watts = None  # where the power of a used type is not known
        if option.devices.keys() <= self.power_w.keys():
            watts = sum(self.power_w[name] * count for name, count in option.devices.items())
        return RunFigures(
            samples=self.samples,
            steps=steps,
            hours=hours,
            low_hours=low_hours,
            high_hours=high_hours,
            price=None if option.price_per_sample is None else option.price_per_sample * self.samples * dearer,
            energy_kwh=None if watts is None else hours * watts / 1000,
            checkpoint_interval_s=interval_s if interval_s < math.inf else None,
            failures=None if failures is None else hours * HOUR_S * devices / failures.mtbf_s,
        )


Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """The options of ``ddltool plan``, read and checked."""

    goal: Goal = field(default_factory=Goal)
    storage_bytes_per_s: float | None = None
    """Rate at which all processes together write a checkpoint; None: the goal's failures say how long that takes."""
    graph: Graph | None = None
    """The model's graph, where it was given or the job names a model."""
    telemetry: Path | None = None
    """File of an earlier run's telemetry."""
    bandwidth: str | None = None
    latency: str = "50us"
    nccl_tests: tuple[Path, ...] = ()
    compress: Compression | None = None
    top_k: int = 1
    """How many EST plans to return, the best first."""
    limit_s: float = 5.0
    """Seconds for all searches together."""
    seed: int = 0
    prefer: tuple[str, ...] | None = None
    """Order of an EST plan's objectives; None: the default one."""
    lookahead: int = DEFAULT_LOOKAHEAD
    """Iterations up to an elastic-bsp plan's barrier."""
    max_gap: int | None = None
    """Iterations by which one worker may be ahead of another there; None: any number."""
    saved_as: str = ""
    """The file that the plan is written to; empty: none."""
    tell: Tell = lambda _: None
    """Takes a remark for the user."""
