"""What each strategy makes of one job on the same devices, communication included. Start at :class:`Candidates`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from ddltool.analyzers.balancing.plan import StepCurve, plan_bsp, plan_lb_bsp
from ddltool.analyzers.barriers.superstep import DEFAULT_LOOKAHEAD, plan_elastic_bsp
from ddltool.analyzers.deciding.communication import FITTED, Communication, Exposed
from ddltool.analyzers.goodput.plan import plan_goodput
from ddltool.analyzers.goodput.throughput import ThroughputParams, efficiency, grad_time_s
from ddltool.analyzers.placement.est import solve_est
from ddltool.analyzers.placement.problem import Problem, demand_throughput
from ddltool.decision import Kept, Option
from ddltool.errors import Infeasible
from ddltool.job import Job
from ddltool.plan import Plan

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Knowledge:
    """What is known about the job beside its placement problem; all of it may be empty."""

    curves: Mapping[str, StepCurve] = field(default_factory=dict)
    """Step time over batch size, by device type."""
    models: Mapping[str, ThroughputParams] = field(default_factory=dict)
    """Fitted throughput models, by device type."""
    communication: Communication | None = None
    other_s: float = 0.0
    """Seconds of each step, or each worker's iteration, beside both: optimizer, loader, waiting."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Relative error of the compute times, by device type, where one is known."""
    error_source: str = ""
    remark: str = ""
    """What a reader must know of the compute times beside their errors: some measured, some predicted."""
    d2_eligible: bool | None = None
    """Whether the model may have the same bits on devices of different types; None: not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Options of the single strategies: EST plans to show, seconds per solver call, seed, and the barrier's limits."""

    top_k: int = 1
    limit_s: float = 5.0
    seed: int = 0
    lookahead: int = DEFAULT_LOOKAHEAD
    max_gap: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One strategy's plan, its figures for comparison, and its communication settings."""

    plan: Plan
    option: Option
    exposed: Exposed | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """Makes the candidates of one job."""

    job: Job
    knowledge: Knowledge
    settings: Settings

    def of(self, problem: Problem, left_out: dict[str, str]) -> list[Candidate]:
        """Return what each strategy makes of ``problem``; those without a plan go to ``left_out`` with the reason."""
        makers: dict[str, Callable[[Problem], Candidate]] = {
            "bsp": self._bsp,
            "lb-bsp": self._lb_bsp,
            "est": self._est,
            "goodput": self._goodput,
            "elastic-bsp": self._elastic_bsp,
        }
        found = []
        for name, make in makers.items():
            try:
                found.append(_fast_enough(make(problem), problem))
            except Infeasible as error:
                left_out[name] = str(error)
        return found

    def baseline(self, problem: Problem) -> Option:
        """Return doing nothing: the equal split over all devices, communication as it comes."""
        try:
            plan = plan_bsp(problem, self.knowledge.curves)
        except Infeasible:  # an equal split that does not fit would have to be made in passes, of the same time
            plan = plan_bsp(problem)
        try:
            exposed = self._synchronous(plan, plan.iteration_s)
        except Infeasible:
            exposed = None
        made = self._candidate(plan, problem, exposed, "D0").option
        seconds = None if exposed is None else exposed.default_s
        return self._figures(made.model_copy(update={"order": "", "order_saves_s": None}), problem, seconds)

    def progress(self, option: Option) -> float:
        """Return samples per second, as far as known those that count like samples at the initial batch."""
        return option.throughput * self.job.batch_size if option.goodput_per_s is None else option.goodput_per_s

    def error(self, devices: Mapping[str, int]) -> float | None:
        """Return the largest relative error of the used types' compute times, given ones counted as exact; None for none."""
        known = [self.knowledge.errors[name] for name in devices if name in self.knowledge.errors]
        return max(known, default=None)

    def gain_error(self, first: Mapping[str, int], second: Mapping[str, int]) -> float | None:
        """Return the relative error of one plan's rate over another's; None where no error is known.

        The errors of different types are independent and add in squares. One type's error is the same on both sides: it
        scales both steps, and cancels.
        """
        types = {*first, *second}
        known = [self.knowledge.errors[name] for name in types if name in self.knowledge.errors]
        if not known:
            return None
        return 0.0 if len(types) == 1 else math.hypot(*known)

    def _bsp(self, problem: Problem) -> Candidate:
        plan = plan_bsp(problem, self.knowledge.curves)
        return self._candidate(plan, problem, self._synchronous(plan, plan.iteration_s), "D0")

    def _lb_bsp(self, problem: Problem) -> Candidate:
        plan = plan_lb_bsp(problem, self.knowledge.curves, synchronise=False)  # it comes with all strategies' below
        return self._candidate(plan, problem, self._synchronous(plan, plan.iteration_s), "D0")

    def _est(self, problem: Problem) -> Candidate:
        """Bits across device types are promised only where the job or the model's scan says so."""
        allowed = self.job.constraints.determinism == "D2" or self.knowledge.d2_eligible is True
        mixed = allowed and not problem.single_type
        try:
            plan = self._mapped(problem if mixed else replace(problem, single_type=True))
        except Infeasible:
            if problem.single_type or mixed:
                raise
            plan, allowed = self._mapped(problem), False  # over several types the bits hold for this placement alone
            mixed = len({row.device_type for row in plan.assignments}) > 1
        capability = {device.name: device.capability_per_s for device in problem.devices}
        kept: Kept = "D1" if not mixed else "D2" if allowed else "D0"
        # Gradients travel during the last EST's pass, and the device that ends last decides when.
        last = max(
            float(1 / capability[row.device_type])
            for row in plan.assignments
            if row.ests_per_device / capability[row.device_type] >= plan.iteration_s * 0.999
        )
        return self._candidate(plan, problem, self._synchronous(plan, last), kept)

    def _mapped(self, problem: Problem) -> Plan:
        settings = self.settings
        return solve_est(problem, top_k=settings.top_k, time_limit_s=settings.limit_s, seed=settings.seed)

    def _goodput(self, problem: Problem) -> Candidate:
        if self.job.goodput is None:
            raise Infeasible("the job has no goodput section")
        offered = {device.name for device in problem.devices}
        models = {name: model for name, model in self.knowledge.models.items() if name in offered}
        if not models:
            raise Infeasible("no offered device has a fitted throughput model (goodput: FILE)")
        plan = plan_goodput(self.job, self.job.goodput, models)
        assert plan.goodput is not None  # plan_goodput fills it in
        choice = plan.goodput
        passes = choice.accumulation_steps + 1
        compute = float(grad_time_s(models[choice.device_type], choice.local_batch_size)) * passes
        other_s = self.knowledge.other_s
        kept = plan.iteration_s / (plan.iteration_s + other_s)
        made = self._candidate(
            plan.model_copy(update={"iteration_s": min(compute, plan.iteration_s)}), problem, None, "D0"
        )
        option = made.option.model_copy(
            update={
                "iteration_s": plan.iteration_s + other_s,
                "communication_s": max(0.0, plan.iteration_s - compute),
                "throughput": plan.throughput * kept,
                "goodput_per_s": choice.goodput_per_s * kept,
                "order": FITTED,
            }
        )
        return Candidate(plan=plan, option=self._bounded(self._priced(option, problem)), exposed=None)

    def _elastic_bsp(self, problem: Problem) -> Candidate:
        """Every iteration carries its worker's own transfers and the rest, and the barrier is chosen with them."""
        bare = self._barrier(problem)
        if self.knowledge.communication is None and not self.knowledge.other_s:
            return self._candidate(bare, problem, None, "none")
        # A type that the barrier leaves out without communication may come in with it, as far as there is room.
        used = devices_of(bare)
        room = max(1, problem.device_limit - sum(used.values()))
        counts = {device.name: used.get(device.name) or min(device.count, room) for device in problem.devices}
        plan, each = self._with_transfers(problem, counts)
        # Devices that stay out have no transfers that could slow the others: those that are left are asked again.
        while devices_of(plan) != counts:
            counts = devices_of(plan)
            kept = tuple(replace(it, count=counts[it.name]) for it in problem.devices if it.name in counts)
            narrower, each = self._with_transfers(replace(problem, devices=kept), counts)
            plan = _narrowed(plan, narrower)
        worst = max(each.values(), key=lambda exposed: exposed.best_s)
        option = self._candidate(
            plan.model_copy(update={"iteration_s": bare.iteration_s}), problem, None, "none"
        ).option
        option = option.model_copy(update={"order": worst.setting, "order_saves_s": worst.default_s - worst.best_s})
        added, rest = max(0.0, plan.iteration_s - bare.iteration_s), self.knowledge.other_s
        rest_s = added * rest / (rest + worst.best_s) if rest else 0.0
        communication_s = None if self.knowledge.communication is None else added - rest_s
        return Candidate(plan=plan, option=self._figures(option, problem, communication_s, rest_s), exposed=None)

    def _with_transfers(self, problem: Problem, counts: Mapping[str, int]) -> tuple[Plan, dict[str, Exposed]]:
        """Return the barrier where each device exposes what it does with ``counts`` devices at work, and that by type."""
        known, rest = self.knowledge.communication, Fraction(self.knowledge.other_s)
        each = {}
        for device in problem.devices:
            beside = {device.name: counts[device.name]} if problem.single_type else counts
            pass_s = float(1 / device.capability_per_s)
            each[device.name] = (
                Exposed(default_s=0.0, best_s=0.0) if known is None else known.asynchronous(beside, pass_s)
            )
        slowed = [
            replace(
                device, capability_per_s=1 / (1 / device.capability_per_s + Fraction(each[device.name].best_s) + rest)
            )
            for device in problem.devices
        ]
        return self._barrier(replace(problem, devices=tuple(slowed))), each

    def _barrier(self, problem: Problem) -> Plan:
        return plan_elastic_bsp(problem, lookahead=self.settings.lookahead, max_gap=self.settings.max_gap)

    def _synchronous(self, plan: Plan, pass_s: float) -> Exposed | None:
        """Return what the plan's replicas leave exposed; None when nothing is known about communication."""
        if self.knowledge.communication is None:
            return None
        return self.knowledge.communication.synchronous(devices_of(plan), pass_s)

    def _candidate(self, plan: Plan, problem: Problem, exposed: Exposed | None, determinism: Kept) -> Candidate:
        """Return the candidate of a plan whose ``iteration_s`` is compute alone."""
        option = Option(
            strategy=plan.strategy,
            devices=devices_of(plan),
            compute_s=plan.iteration_s,
            iteration_s=plan.iteration_s,
            throughput=plan.throughput,
            staleness=0 if plan.superstep is None else plan.superstep.iteration_gap,
            determinism=determinism,
            order="" if exposed is None else exposed.setting,
            order_saves_s=None if exposed is None else max(0.0, exposed.default_s - exposed.best_s),
        )
        return Candidate(
            plan=plan,
            option=self._figures(option, problem, None if exposed is None else exposed.best_s),
            exposed=exposed,
        )

    def _figures(
        self, option: Option, problem: Problem, communication_s: float | None, other_s: float | None = None
    ) -> Option:
        """Return the option with everything that follows from its compute, its communication and the rest of a step."""
        rest_s = self.knowledge.other_s if other_s is None else other_s
        iteration = option.compute_s + (communication_s or 0.0) + rest_s
        throughput = problem.max_workers / iteration
        update: dict[str, object] = {
            "communication_s": communication_s,
            "other_s": rest_s,
            "iteration_s": iteration,
            "throughput": throughput,
        }
        section = self.job.goodput
        # Stale updates do not count like fresh ones, and no model here says how much less.
        if section is not None and section.noise_scale is not None and option.staleness == 0:
            total = self.job.max_workers * self.job.batch_size
            share = float(efficiency(section.noise_scale, total, section.initial_batch_size or total))
            update["goodput_per_s"] = throughput * self.job.batch_size * share
        return self._bounded(self._priced(option.model_copy(update=update), problem))

    def _priced(self, option: Option, problem: Problem) -> Option:
        """Return the option with its price per sample where every used device has one."""
        prices = {device.name: device.price_micro for device in problem.devices}
        used = [prices.get(name) for name in option.devices]
        if None in used:
            return option
        hourly = sum((prices[name] or 0) * count for name, count in option.devices.items()) / 1e6
        rate = option.throughput * self.job.batch_size
        return option.model_copy(update={"price_per_sample": hourly / _SECONDS_PER_HOUR / rate})

    def _bounded(self, option: Option) -> Option:
        """Return the option with the error of its compute times as limits of its step time."""
        error = self.error(option.devices)
        if error is None or not math.isfinite(error):
            return option
        return option.model_copy(
            update={"low_s": option.iteration_s * max(0.0, 1 - error), "high_s": option.iteration_s * (1 + error)}
        )


def _narrowed(wide: Plan, narrow: Plan) -> Plan:
    """Return ``narrow``, planned for the devices of ``wide``, with what ``wide`` says of all devices."""
    assert wide.superstep is not None
    assert narrow.superstep is not None
    parts = (wide.superstep.left_out, narrow.superstep.left_out)
    left_out = {name: sum(part.get(name, 0) for part in parts) for name in (*parts[0], *parts[1])}
    superstep = narrow.superstep.model_copy(update={"left_out": left_out})
    return narrow.model_copy(update={"superstep": superstep, "status": wide.status, "gap": wide.gap})


def _fast_enough(candidate: Candidate, problem: Problem) -> Candidate:
    """Return the candidate. Raises Infeasible when it is slower, communication included, than the job asks for."""
    demand_throughput(candidate.option.throughput, problem.min_throughput)
    return candidate


def devices_of(plan: Plan) -> dict[str, int]:
    """Return how many devices of each type a plan uses."""
    counts: dict[str, int] = {}
    for row in plan.assignments:
        counts[row.device_type] = counts.get(row.device_type, 0) + row.devices
    return counts
