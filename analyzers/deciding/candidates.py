"""What each strategy makes of one job on the same devices, communication included. Start at :class:`Candidates`.

:func:`plan_by` is where a strategy becomes a plan, ``Candidates.of`` where they are enumerated, and ``Candidates._costed``
where one is costed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, cast

from ddltool.analyzers.balancing.plan import StepCurve, plan_bsp, plan_lb_bsp
from ddltool.analyzers.barriers.superstep import DEFAULT_LOOKAHEAD, plan_elastic_bsp
from ddltool.analyzers.deciding.communication import FITTED, Communication, Exposed
from ddltool.analyzers.goodput.plan import plan_goodput
from ddltool.analyzers.goodput.throughput import ThroughputParams, efficiency, grad_time_s
from ddltool.analyzers.placement.est import DEFAULT_OBJECTIVE, solve_est
from ddltool.analyzers.placement.problem import Problem, demand_throughput
from ddltool.analyzers.placement.steps import device_counts
from ddltool.decision import Kept, Layout, NothingFits, Objective, Option
from ddltool.errors import Infeasible
from ddltool.job import Job
from ddltool.plans import Plan

if TYPE_CHECKING:  # it loads torch
    from ddltool.analyzers.deciding.layouts import Found, Layouts

# From the least change to a training script to the most.
STRATEGIES = ("bsp", "lb-bsp", "est", "goodput", "elastic-bsp")
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Knowledge:
    """What is known about the job beside its placement problem; all of it may be empty."""

    curves: Mapping[str, StepCurve] = field(default_factory=dict)
    """Step time over batch size, by device type."""
    models: Mapping[str, ThroughputParams] = field(default_factory=dict)
    """Fitted throughput models, by device type."""
    communication: Communication | None = None
    layouts: Layouts | None = None
    """What memory and time the job's model takes however it is sharded; None: the model cannot be traced here."""
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
    """Options of the single strategies: of EST plans how many, seconds per solver call, seed and objectives; of barriers."""

    top_k: int = 1
    limit_s: float = 5.0
    seed: int = 0
    prefer: tuple[str, ...] | None = None
    lookahead: int = DEFAULT_LOOKAHEAD
    max_gap: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One strategy's plan, its figures for comparison, and its communication settings."""

    plan: Plan
    option: Option
    exposed: Exposed | None
    layouts: tuple[Layout, ...] = ()
    """The plan's own, where its step was found among layouts, and those beside it."""


def plan_by(
    strategy: str,
    problem: Problem,
    settings: Settings,
    curves: Mapping[str, StepCurve] | None = None,
    *,
    synchronise: bool = True,
) -> Plan:
    """Return the plan of one strategy, goodput apart, which has no placement problem.

    ``synchronise``: whether an lb-bsp plan has the synchronisation of its curves in its step; no other has any.
    """
    if strategy == "bsp":
        return plan_bsp(problem, curves)
    if strategy == "lb-bsp":
        return plan_lb_bsp(problem, curves, synchronise=synchronise)
    if strategy == "elastic-bsp":
        return plan_elastic_bsp(problem, lookahead=settings.lookahead, max_gap=settings.max_gap)
    return solve_est(
        problem,
        top_k=settings.top_k,
        time_limit_s=settings.limit_s,
        seed=settings.seed,
        objective=settings.prefer or DEFAULT_OBJECTIVE,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """Makes the candidates of one job."""

    job: Job
    knowledge: Knowledge
    settings: Settings
    objective: Objective = "fastest"

    def of(self, problem: Problem, left_out: dict[str, str]) -> list[Candidate]:
        """Return what each strategy makes of ``problem``; those without a plan go to ``left_out`` with the reason."""
        makers: dict[str, Callable[[Problem], Candidate]] = {
            "est": self._est,
            "goodput": self._goodput,
            "elastic-bsp": self._elastic_bsp,
        }
        found = []
        for name in STRATEGIES:
            try:
                if name in makers:
                    self._demand_room(problem)
                    made = makers[name](problem)
                else:
                    made = self._split(cast(Literal["bsp", "lb-bsp"], name), problem)
                # Slower, communication included, than the job asks for is no plan.
                demand_throughput(made.option.throughput, problem.min_throughput)
                if self.knowledge.layouts is not None and not made.layouts:
                    devices, samples = device_counts(made.plan), _most_samples(made.plan, self.job)
                    held = self.knowledge.layouts.whole_bytes(devices, samples)
                    made = replace(made, option=made.option.model_copy(update={"memory_bytes": held}))
                found.append(made)
            except NothingFits as error:
                if name == "lb-bsp":  # on any devices, in any way
                    raise
                left_out[name] = str(error)
            except Infeasible as error:
                left_out[name] = str(error)
        return found

    def _demand_room(self, problem: Problem) -> None:
        """Raise Infeasible where no offered device holds a whole model and a mini-batch: before anything is searched."""
        layouts, refused = self.knowledge.layouts, list[Infeasible]()
        if layouts is None:
            return
        for device in problem.devices:
            try:
                layouts.whole_bytes({device.name: min(2, device.count)}, self.job.batch_size)
            except Infeasible as error:
                refused.append(error)
        if len(refused) == len(problem.devices):
            raise refused[0]

    def baseline(self, problem: Problem) -> Option:
        """Return doing nothing: the equal split over all devices, communication as it comes.

        Of a model whose memory is known, it is sharded and checkpointed as little as it must be; where no equal split over all
        devices fits, on the best single type.
        """
        if (layouts := self.knowledge.layouts) is not None:
            return self._laid_out("bsp", problem, layouts.plainest(problem)).option
        try:
            plan = plan_bsp(problem, self.knowledge.curves)
        except Infeasible:  # an equal split that does not fit would have to be made in passes, of the same time
            plan = plan_bsp(problem)
        try:
            exposed = self._synchronous(plan, plan.iteration_s)
        except Infeasible:
            exposed = None
        usual = None if exposed is None else Exposed(default_s=exposed.default_s, best_s=exposed.default_s)
        return self._costed(plan, problem, usual, "D0").option

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

    def _split(self, strategy: Literal["bsp", "lb-bsp"], problem: Problem) -> Candidate:
        if (layouts := self.knowledge.layouts) is not None:
            found = layouts.search(problem, self.objective, equal=strategy == "bsp")
            made = self._laid_out(strategy, problem, found[0])
            return replace(made, layouts=(made.layouts[0], *(other.layout for other in found[1:])))
        plan = plan_by(strategy, problem, self.settings, self.knowledge.curves, synchronise=False)
        return self._costed(plan, problem, self._synchronous(plan, plan.iteration_s), "D0")

    def _laid_out(self, strategy: Literal["bsp", "lb-bsp"], problem: Problem, found: Found) -> Candidate:
        """Return the candidate of a layout, whose step has the best prefetch or buckets that its memory allows."""
        layouts, layout = self.knowledge.layouts, found.layout
        assert layouts is not None  # it made what was found
        buckets, prefetch = layouts.communication(found)
        plan = layouts.plan(found, problem, strategy)
        setting = buckets or prefetch
        saved = 0.0 if setting is None else max(0.0, setting.default_step_s - setting.step_s)
        saved *= layout.passes if found.sharding.gathers else 1
        default = max(0.0, (layout.step_s or 0.0) - plan.iteration_s)
        exposed = Exposed(
            default_s=default,
            best_s=max(0.0, default - saved),
            setting=layout.text,
            ddp=buckets,
            fsdp2=prefetch,
        )
        made = self._costed(plan, problem, exposed, "D0")
        ratio = made.option.iteration_s / (layout.step_s or 1.0)
        low_s, high_s = (None if end is None else end * ratio for end in (layout.low_s, layout.high_s))
        ends = {"low_s": low_s, "high_s": high_s}
        more = {"order_saves_s": saved or None, "memory_bytes": max(layout.memory_bytes.values())}
        option = made.option.model_copy(update={**ends, **more})
        return replace(made, option=option, layouts=(layout.model_copy(update={"step_s": option.iteration_s, **ends}),))

    def _est(self, problem: Problem) -> Candidate:
        """Bits across device types are promised only where the job or the model's scan says so."""
        allowed = self.job.constraints.determinism == "D2" or self.knowledge.d2_eligible is True
        mixed = allowed and not problem.single_type
        try:
            plan = plan_by("est", problem if mixed else replace(problem, single_type=True), self.settings)
        except Infeasible:
            if problem.single_type or mixed:
                raise
            # Over several types the bits hold for this placement alone.
            plan, allowed = plan_by("est", problem, self.settings), False
            mixed = len(device_counts(plan)) > 1
        capability = {device.name: device.capability_per_s for device in problem.devices}
        kept: Kept = "D1" if not mixed else "D2" if allowed else "D0"
        # Gradients travel during the last EST's pass, and the device that ends last decides when.
        last = max(
            float(1 / capability[row.device_type])
            for row in plan.assignments
            if row.ests_per_device / capability[row.device_type] >= plan.iteration_s * 0.999
        )
        return self._costed(plan, problem, self._synchronous(plan, last), kept)

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
        compute = float(grad_time_s(models[choice.device_type], choice.local_batch_size))
        compute = min(plan.iteration_s, compute * (choice.accumulation_steps + 1))
        waiting = plan.iteration_s - compute
        exposed = Exposed(default_s=waiting, best_s=waiting, setting=FITTED)
        share = plan.iteration_s / (plan.iteration_s + self.knowledge.other_s)
        update = {
            "throughput": plan.throughput * share,
            "goodput_per_s": choice.goodput_per_s * share,
            "order_saves_s": None,
        }
        return self._costed(plan, problem, exposed, "D0", compute_s=compute, update=update)

    def _elastic_bsp(self, problem: Problem) -> Candidate:
        """Every iteration carries its worker's own transfers and the rest, and the barrier is chosen with them."""
        bare = plan_by("elastic-bsp", problem, self.settings)
        known, rest = self.knowledge.communication, self.knowledge.other_s
        if known is None and not rest:
            return self._costed(bare, problem, None, "none")
        # A type that the barrier leaves out without communication may come in with it, as far as there is room.
        used = device_counts(bare)
        room = max(1, problem.device_limit - sum(used.values()))
        counts = {device.name: used.get(device.name) or min(device.count, room) for device in problem.devices}
        plan, each = self._with_transfers(problem, counts)
        # Devices that stay out have no transfers that could slow the others: those that are left are asked again.
        while device_counts(plan) != counts:
            counts = device_counts(plan)
            kept = tuple(replace(it, count=counts[it.name]) for it in problem.devices if it.name in counts)
            narrower, each = self._with_transfers(replace(problem, devices=kept), counts)
            plan = _narrowed(plan, narrower)
        worst = max(each.values(), key=lambda exposed: exposed.best_s)
        added = max(0.0, plan.iteration_s - bare.iteration_s)
        other_s = added * rest / (rest + worst.best_s) if rest else 0.0
        exposed = None if known is None else replace(worst, best_s=added - other_s)
        update = {"order": worst.setting, "order_saves_s": worst.default_s - worst.best_s}
        made = self._costed(plan, problem, exposed, "none", compute_s=bare.iteration_s, other_s=other_s, update=update)
        return replace(made, exposed=None)  # settings for DDP are none for its servers

    def _with_transfers(self, problem: Problem, counts: Mapping[str, int]) -> tuple[Plan, dict[str, Exposed]]:
        """Return the barrier where each device exposes what it does with ``counts`` devices at work, and that by type."""
        known, each, slowed = self.knowledge.communication, {}, []
        for device in problem.devices:
            beside = {device.name: counts[device.name]} if problem.single_type else counts
            alone = 1 / device.capability_per_s
            exposed = Exposed(default_s=0.0, best_s=0.0) if known is None else known.asynchronous(beside, float(alone))
            seconds = alone + Fraction(exposed.best_s) + Fraction(self.knowledge.other_s)
            slowed.append(replace(device, capability_per_s=1 / seconds))
            each[device.name] = exposed
        return plan_by("elastic-bsp", replace(problem, devices=tuple(slowed)), self.settings), each

    def _synchronous(self, plan: Plan, pass_s: float) -> Exposed | None:
        """Return what the plan's replicas leave exposed; None when nothing is known about communication."""
        known = self.knowledge.communication
        return None if known is None else known.synchronous(device_counts(plan), pass_s)

    def _costed(
        self,
        plan: Plan,
        problem: Problem,
        exposed: Exposed | None,
        kept: Kept,
        *,
        compute_s: float | None = None,
        other_s: float | None = None,
        update: Mapping[str, object] | None = None,
    ) -> Candidate:
        """Return the candidate of a plan, whose ``iteration_s`` is compute alone where ``compute_s`` does not say it.

        ``update``: figures of the option that do not follow from its step.
        """
        compute = plan.iteration_s if compute_s is None else compute_s
        rest = self.knowledge.other_s if other_s is None else other_s
        step = compute + (0.0 if exposed is None else exposed.best_s) + rest
        devices = device_counts(plan)
        error = self.error(devices)
        staleness = 0 if plan.superstep is None else plan.superstep.iteration_gap
        option = Option(
            strategy=plan.strategy,
            devices=devices,
            compute_s=compute,
            communication_s=None if exposed is None else exposed.best_s,
            other_s=rest,
            iteration_s=step,
            throughput=problem.max_workers / step,
            low_s=None if error is None or error == math.inf else step * max(0.0, 1 - error),
            high_s=None if error is None or error == math.inf else step * (1 + error),
            goodput_per_s=self._goodput_per_s(problem.max_workers / step, staleness),
            staleness=staleness,
            determinism=kept,
            order="" if exposed is None else exposed.setting,
            order_saves_s=max(0.0, exposed.default_s - exposed.best_s)
            if exposed is not None and exposed.setting
            else None,
        ).model_copy(update=update)
        prices = {device.name: device.price_micro for device in problem.devices}
        if all(prices.get(name) is not None for name in devices):
            hourly = sum((prices[name] or 0) * count for name, count in devices.items()) / 1e6
            price = hourly / _SECONDS_PER_HOUR / (option.throughput * self.job.batch_size)
            option = option.model_copy(update={"price_per_sample": price})
        return Candidate(plan=plan, option=option, exposed=exposed)

    def _goodput_per_s(self, throughput: float, staleness: int) -> float | None:
        """Return progress. Stale updates do not count like fresh ones, and no model here says how much less."""
        section = self.job.goodput
        if section is None or section.noise_scale is None or staleness:
            return None
        total = self.job.max_workers * self.job.batch_size
        share = float(efficiency(section.noise_scale, total, section.initial_batch_size or total))
        return throughput * self.job.batch_size * share


def _most_samples(plan: Plan, job: Job) -> int:
    """Return the most samples that a device of a plan has in memory at a time: its ESTs take turns."""
    if plan.goodput is not None:
        return plan.goodput.local_batch_size
    return job.batch_size


def _narrowed(wide: Plan, narrow: Plan) -> Plan:
    """Return ``narrow``, planned for the devices of ``wide``, with what ``wide`` says of all devices."""
    assert wide.superstep is not None
    assert narrow.superstep is not None
    parts = (wide.superstep.left_out, narrow.superstep.left_out)
    left_out = {name: sum(part.get(name, 0) for part in parts) for name in (*parts[0], *parts[1])}
    superstep = narrow.superstep.model_copy(update={"left_out": left_out})
    return narrow.model_copy(update={"superstep": superstep, "status": wide.status, "gap": wide.gap})
