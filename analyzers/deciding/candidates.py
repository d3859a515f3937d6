"""What each strategy makes of one job, on every subset of its devices, communication included. Start at :class:`Candidates`.

A strategy is costed on exactly given devices by its maker; ``Candidates.best`` asks :func:`~.search.best_devices` for the
devices on which it is best. All makers end in ``Candidates._costed``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

from ddltool.analyzers.balancing.plan import StepCurve, plan_bsp, plan_lb_bsp
from ddltool.analyzers.barriers.superstep import DEFAULT_LOOKAHEAD, plan_elastic_bsp
from ddltool.analyzers.deciding.bounds import Bounds
from ddltool.analyzers.deciding.communication import FITTED, Exposed
from ddltool.analyzers.deciding.goal import HOUR_S, Goal
from ddltool.analyzers.deciding.knowledge import Knowledge
from ddltool.analyzers.goodput.plan import plan_goodput
from ddltool.analyzers.goodput.throughput import efficiency, grad_time_s
from ddltool.analyzers.placement.device_search import Best, best_devices
from ddltool.analyzers.placement.problem import Problem, demand_throughput
from ddltool.analyzers.placement.steps import Counts, best_step, counts_of, device_counts, evaluate, plan_of
from ddltool.decision import Kept, Layout, NothingFits, Option
from ddltool.errors import Infeasible
from ddltool.job import Job
from ddltool.plans import Plan

if TYPE_CHECKING:  # it loads torch
    from ddltool.analyzers.deciding.layout_figures import Found

# From the least change to a training script to the most.
STRATEGIES = ("bsp", "lb-bsp", "est", "goodput", "elastic-bsp")
# Devices within this share of the slowest end with it.
_SLOWEST = 0.98
# Where nothing bounds a plan from below.
_UNBOUNDED = 1e9
Split = Literal["bsp", "lb-bsp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Options of the single strategies: of EST plans how many, seconds in all, seed and objectives; of barriers."""

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


def plan_by(strategy: str, problem: Problem, settings: Settings, curves: Mapping[str, StepCurve] | None = None) -> Plan:
    """Return the plan of one strategy by its own rules, goodput apart, which has no placement problem."""
    if strategy == "bsp":
        return plan_bsp(problem, curves)
    if strategy == "lb-bsp":
        return plan_lb_bsp(problem, curves)
    if strategy == "elastic-bsp":
        return plan_elastic_bsp(problem, lookahead=settings.lookahead, max_gap=settings.max_gap)
    from ddltool.analyzers.placement.est import DEFAULT_OBJECTIVE, solve_est  # it loads a solver

    return solve_est(
        problem,
        top_k=settings.top_k,
        time_limit_s=settings.limit_s,
        seed=settings.seed,
        objective=settings.prefer or DEFAULT_OBJECTIVE,
    )


def narrowed(problem: Problem, counts: Counts) -> Problem:
    """Return the problem on exactly so many devices, which keep its constraints: nothing is left to choose but the work."""
    kept = tuple(replace(it, count=n) for it, n in zip(problem.devices, counts, strict=True) if n)
    return replace(problem, devices=kept, max_price_micro=None, max_devices=None, min_throughput=None)


def alone(problem: Problem) -> list[Problem]:
    """Return the problem on each of its types alone, where it offers several."""
    if len(problem.devices) == 1:
        return []
    return [replace(problem, devices=(device,)) for device in problem.devices]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """Makes the candidates of one job."""

    job: Job
    knowledge: Knowledge
    settings: Settings
    goal: Goal = field(default_factory=Goal)

    def of(self, problem: Problem, left_out: dict[str, Infeasible], only: str | None = None) -> list[Candidate]:
        """Return what each strategy makes of the best devices, and of the best of each type alone.

        Those without a plan go to ``left_out`` with the reason; ``only``: a single strategy. Raises NothingFits where the model
        fits on no devices in any way.
        """
        found: list[Candidate] = []
        for name in STRATEGIES if only is None else (only,):
            try:
                every = self.best(name, problem)
            except Infeasible as error:
                if isinstance(error, NothingFits) and name == "lb-bsp":  # on any devices, in any way
                    raise
                left_out[name] = error
                continue
            found.append(every)
            # Of one type whose layouts are known an uneven split is the equal one.
            for part in [] if name == "lb-bsp" and self.knowledge.layouts is not None else alone(problem):
                if len(every.option.devices) > 1 or self.goal.objective != "fastest":
                    with suppress(Infeasible):
                        found.append(self.best(name, part))
        # On one type the shares of a layout are equal whatever they are called, and the search may have found more by one name.
        return [
            *found,
            *(_called_equal(it) for it in found if it.layouts and len(it.option.devices) == 1 and only is None),
        ]

    def best(self, name: str, problem: Problem) -> Candidate:
        """Return what a strategy makes of the best devices for it. Raises Infeasible where it has no plan, with the reason."""
        try:
            made = self._made(name, problem)
        except NothingFits:
            raise
        except Infeasible:
            self._demand_reachable(name, problem)
            raise
        # Slower, communication included, than the job asks for is no plan.
        demand_throughput(made.option.throughput, problem.min_throughput)
        self.goal.demand(made.option)
        return made

    def _demand_reachable(self, name: str, problem: Problem) -> None:
        """Raise Infeasible where the fastest plan is too slow, or the cheapest too dear, with what they take."""
        if not self.goal.limited:
            return
        fastest = replace(self, goal=self.goal.unlimited())._made(name, problem).option
        demand_throughput(fastest.throughput, problem.min_throughput)
        replace(self.goal, budget=math.inf).demand(fastest)
        if self.goal.budget < math.inf:
            cheapest = replace(self, goal=self.goal.unlimited("cheapest"))._made(name, problem).option
            replace(self.goal, deadline_s=math.inf).demand(cheapest)
            self.goal.demand_both(fastest, cheapest)

    def _made(self, name: str, problem: Problem) -> Candidate:
        splits = name in ("bsp", "lb-bsp")
        if (layouts := self.knowledge.layouts) is not None and splits:
            return self._best_layout(cast(Split, name), problem)
        if name == "goodput" and self.job.goodput is None:
            raise Infeasible("the job has no goodput section")
        holding = problem if splits else self._holding(problem)
        make = {"goodput": self._goodput, "est": self._est_by_bits}.get(name, partial(self._searched, name))
        made = make(holding)
        if layouts is not None:
            chosen = made.plan.goodput  # else ESTs take turns, a mini-batch each
            samples = self.job.batch_size if chosen is None else chosen.local_batch_size
            held = layouts.whole_bytes(made.option.devices, samples)
            made = replace(made, option=made.option.model_copy(update={"memory_bytes": held}))
        return made

    def _searched(self, name: str, problem: Problem) -> Candidate:
        """Return a strategy's plan on the best numbers of devices, found by its figures on each."""
        make = {"est": self._est, "elastic-bsp": self._elastic_bsp}.get(name, partial(self._split, name))
        bounds = Bounds(self.knowledge, self.goal, problem, name)

        def value(counts: Counts, least: float) -> tuple[float, Candidate] | None:
            if bounds(counts, counts) >= least:
                return None
            try:
                made = make(narrowed(problem, counts), True)
            except Infeasible:
                return None
            if sum(made.option.devices.values()) != sum(counts):  # it is the plan of fewer devices
                return None
            return self.goal.value(made.option), made

        most = problem.max_workers * (problem.batch_size if name in ("bsp", "lb-bsp") else 1)
        limit_s, spare = self.settings.limit_s / len(STRATEGIES), self.goal.objective != "cheapest"
        best = best_devices(problem, value, bounds, most=most, limit_s=limit_s, spare=spare)
        if best is None:
            raise self._refused(name, problem)
        made = make(narrowed(problem, best.counts), False)
        return replace(made, plan=self._told(made.plan, problem, best))

    def _refused(self, name: str, problem: Problem) -> Infeasible:
        """Return what stands in the way of a plan on any devices."""
        try:
            plan_by(name, problem, self.settings, self.knowledge.curves)
        except Infeasible as error:
            return error
        return Infeasible("no devices that the constraints allow have a step of it")

    def _told(self, plan: Plan, problem: Problem, best: Best[Candidate]) -> Plan:
        """Return the plan with what is proven of its devices, and which of those offered are better left out."""
        out, proven = problem.spare(best.counts), best.gap == 0
        update = {**_proof(best.gap), "solve_seconds": best.seconds}
        if plan.superstep is not None:
            update["superstep"] = plan.superstep.model_copy(update={"left_out": out if proven else {}})
        if plan.split is not None:
            split: dict[str, object] = {"dropped": out, "equal_s": None}
            with suppress(Infeasible):
                split["equal_s"] = plan_bsp(problem, self.knowledge.curves).iteration_s
            update["split"] = plan.split.model_copy(update=split)
        return plan.model_copy(update=update)

    def _holding(self, problem: Problem) -> Problem:
        """Return the problem on the types that hold a whole model and a mini-batch. Raises Infeasible where none does."""
        layouts, known = self.knowledge.layouts, self.knowledge.communication
        kept, refused = [], list[Infeasible]()
        for device in problem.devices:
            try:
                if layouts is not None:
                    layouts.whole_bytes({device.name: min(2, device.count)}, self.job.batch_size)
                elif known is not None:
                    known.demand_whole(device.name)
                kept.append(device)
            except Infeasible as error:
                refused.append(error)
        if not kept:
            raise refused[0]
        return problem if len(kept) == len(problem.devices) else replace(problem, devices=tuple(kept))

    def usual(self, problem: Problem) -> dict[str, Option]:
        """Return what people would do without a plan: an equal split, communication as it comes; by what it is called.

        Over all devices, and over all of each type alone. Of a model whose memory is known, it is sharded and checkpointed as
        little as it must be; what does not fit is left out.
        """
        found: dict[str, Option] = {}
        for part in (problem, *alone(problem)):
            with suppress(Infeasible):
                option = self._usual(part)
                mix = " + ".join(f"{number} {name}" for name, number in option.devices.items())
                if len(problem.devices) > 1 and len(option.devices) == len(problem.devices):
                    mix = f"all {sum(option.devices.values())}"
                found.setdefault(f"{mix}, equally", option)
        return found

    def _usual(self, problem: Problem) -> Option:
        if (layouts := self.knowledge.layouts) is not None:
            return self._laid_out("bsp", problem, layouts.plainest(problem), best=False).option
        try:
            plan = plan_bsp(problem, self.knowledge.curves)
        except Infeasible:  # an equal split that does not fit would have to be made in passes, of the same time
            plan = plan_bsp(problem)
        exposed = self._synchronous(plan, plan.iteration_s)
        usual = None if exposed is None else Exposed(default_s=exposed.default_s, best_s=exposed.default_s)
        return self._costed(plan, problem, usual, "D0").option

    def alike(self, problem: Problem) -> list[Option]:
        """Return equal splits on 1, 2, 4, ... and all devices of each type alone, where the constraints allow them."""
        made = []
        for kind, device in enumerate(problem.devices):
            powers = {2**power for power in range(device.count.bit_length())} | {device.count}
            for counts in (tuple(n * (kind == place) for place in range(len(problem.devices))) for n in sorted(powers)):
                if problem.allows(counts):
                    with suppress(Infeasible):
                        made.append(self._alike(problem, counts).option)
        return made

    def _alike(self, problem: Problem, counts: Counts) -> Candidate:
        if (layouts := self.knowledge.layouts) is not None:
            return self._laid_out("bsp", problem, layouts.equally(problem, counts), best=False)
        return self._split("bsp", narrowed(problem, counts), True)

    def progress(self, option: Option) -> float:
        """Return samples per second, as far as known those that count like samples at the initial batch."""
        return option.throughput * self.job.batch_size if option.goodput_per_s is None else option.goodput_per_s

    def _split(self, strategy: str, problem: Problem, quick: bool) -> Candidate:
        curves = self.knowledge.curves
        plan = plan_bsp(problem, curves) if strategy == "bsp" else plan_lb_bsp(problem, curves, synchronise=False)
        return self._costed(plan, problem, self._synchronous(plan, plan.iteration_s, quick), "D0")

    def _best_layout(self, strategy: Split, problem: Problem) -> Candidate:
        layouts = self.knowledge.layouts
        assert layouts is not None  # who asks has seen it
        limit_s = self.settings.limit_s / 2  # of equal and of uneven shares
        started = time.perf_counter()
        found, gap = layouts.search(problem, self.goal, equal=strategy == "bsp", limit_s=limit_s)
        made = self._laid_out(strategy, problem, found[0])
        plan = made.plan.model_copy(update={**_proof(gap), "solve_seconds": time.perf_counter() - started})
        return replace(made, plan=plan, layouts=(made.layouts[0], *(other.layout for other in found[1:])))

    def _laid_out(self, strategy: Split, problem: Problem, found: Found, *, best: bool = True) -> Candidate:
        """Return the candidate of a layout; ``best``: with the best prefetch or buckets that its memory allows."""
        layouts, layout = self.knowledge.layouts, found.layout
        assert layouts is not None  # it made what was found
        buckets, prefetch = layouts.communication(found) if best else (None, None)
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
        # Of times that the job gives nobody knows the error.
        ends = {"low_s": low_s, "high_s": high_s} if self.knowledge.error(layout.devices) is not None else {}
        more = {
            "order_saves_s": saved or None,
            "memory_bytes": max(layout.memory_bytes.values()),
            "host_bound": layout.host_bound,
        }
        option = made.option.model_copy(update={**ends, **more})
        return replace(made, option=option, layouts=(layout.model_copy(update={"step_s": option.iteration_s, **ends}),))

    def _est_by_bits(self, problem: Problem) -> Candidate:
        """Return logical workers on one type, or on several where their bits are known to be the same on all."""
        allowed = self.job.constraints.determinism == "D2" or self.knowledge.d2_eligible is True
        mixed = allowed and not problem.single_type
        try:
            made = self._searched("est", problem if mixed else replace(problem, single_type=True))
        except Infeasible:
            if problem.single_type or mixed:
                raise
            # Over several types the bits hold for this placement alone.
            made, allowed = self._searched("est", problem), False
        kept: Kept = "D1" if len(made.option.devices) == 1 and not mixed else "D2" if allowed else "D0"
        made = replace(made, option=made.option.model_copy(update={"determinism": kept}))
        if self.settings.top_k > 1:
            single = problem if mixed else replace(problem, single_type=True)
            others = plan_by("est", single, self.settings)
            own = counts_of(problem, made.plan)
            rest = [row for row in (others, *others.alternatives) if counts_of(problem, row) != own]  # type: ignore[arg-type]
            made = replace(made, plan=made.plan.model_copy(update={"alternatives": rest[: self.settings.top_k - 1]}))
        return made

    def _est(self, problem: Problem, quick: bool) -> Candidate:
        """Return logical workers on exactly these devices, each with one at least."""
        counts = tuple(device.count for device in problem.devices)
        if sum(counts) > problem.max_workers or best_step(problem, counts) is None:
            raise Infeasible("these devices have no room for the workers")
        plan = plan_of(problem, evaluate(problem, counts), optimal=True, gap=0.0, solve_seconds=0.0)
        capability = {device.name: device.capability_per_s for device in problem.devices}
        # Gradients travel during the last EST's pass, and the device that ends last decides when.
        last = max(
            float(1 / capability[row.device_type])
            for row in plan.assignments
            if row.ests_per_device / capability[row.device_type] >= plan.iteration_s * 0.999
        )
        exposed, known = self._synchronous(plan, last, quick), self.knowledge.communication
        if exposed is not None and known is not None:
            exposed = known.ordered(device_counts(plan), exposed)
        return self._costed(plan, problem, exposed, "D1")

    def _goodput(self, problem: Problem) -> Candidate:
        assert self.job.goodput is not None  # who asks has seen it
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
        if self.knowledge.seen and self.knowledge.communication is not None:
            other = self.knowledge.communication.synchronous(device_counts(plan), compute)
            ends = [waiting, *(end for end in (other.low_s, other.high_s) if end is not None)]
            exposed = replace(exposed, low_s=min(ends), high_s=max(ends))  # two sources of one time
        rest = self.knowledge.other_s(device_counts(plan), compute if choice.num_replicas > 1 else 0.0)
        share = plan.iteration_s / (plan.iteration_s + rest)
        update = {
            "throughput": plan.throughput * share,
            "goodput_per_s": choice.goodput_per_s * share,
            "step_samples": choice.total_batch_size,
            "order_saves_s": None,
        }
        return self._costed(plan, problem, exposed, "D0", compute_s=compute, update=update)

    def _elastic_bsp(self, problem: Problem, quick: bool) -> Candidate:
        """Every iteration carries its worker's own transfers and the rest, and the barrier is chosen with them."""
        known, rest = self.knowledge.communication, self.knowledge.other_s(it.name for it in problem.devices)
        settings = self.settings
        make = partial(plan_elastic_bsp, lookahead=settings.lookahead, max_gap=settings.max_gap, all_devices=True)
        counts, each, slowed = {it.name: it.count for it in problem.devices}, dict[str, Exposed](), []
        for device in problem.devices:
            own = 1 / device.capability_per_s
            exposed = Exposed(default_s=0.0, best_s=0.0) if known is None else known.asynchronous(counts, float(own))
            seconds = own + Fraction(exposed.best_s) + Fraction(self.knowledge.other_s([device.name]))
            slowed.append(replace(device, capability_per_s=1 / seconds))
            each[device.name] = exposed
        plan = make(replace(problem, devices=tuple(slowed)))
        bare = plan if quick else make(problem)
        worst = max(each.values(), key=lambda exposed: exposed.best_s)
        compute_s = min(bare.iteration_s, plan.iteration_s)
        added = plan.iteration_s - compute_s
        other_s = added * rest / (rest + worst.best_s) if rest else 0.0
        update: dict[str, object] = {}
        exposed_s = None
        if known is not None:
            update = {"order": worst.setting, "order_saves_s": worst.default_s - worst.best_s}
            best_s = max(0.0, added - other_s)
            share = best_s / worst.best_s if worst.best_s else 1.0
            low_s, high_s = (None if end is None else share * end for end in (worst.low_s, worst.high_s))
            exposed_s = replace(worst, best_s=best_s, low_s=low_s, high_s=high_s)
        made = self._costed(plan, problem, exposed_s, "none", compute_s=compute_s, other_s=other_s, update=update)
        return replace(made, exposed=None)  # settings for DDP are none for its servers

    def _synchronous(self, plan: Plan, pass_s: float, quick: bool = False) -> Exposed | None:
        """Return what the plan's replicas leave exposed, without its settings where it is to be ``quick``; None: not known."""
        known = self.knowledge.communication
        if known is None:
            return None
        if not quick:
            return known.synchronous(device_counts(plan), pass_s)
        seconds = known.least_s(device_counts(plan), pass_s)
        return Exposed(default_s=seconds, best_s=seconds)

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
        devices = device_counts(plan)
        less, more, waits = 0.0, 0.0, exposed or Exposed(default_s=0.0, best_s=0.0)
        if other_s is None:
            skewed_s = compute if sum(devices.values()) > 1 else 0.0
            other_s = self.knowledge.other_s(devices, skewed_s)
            # Other devices may wait less for each other than those of the earlier run.
            less = self.knowledge.skew * skewed_s if devices != self.knowledge.seen else 0.0
        step = compute + waits.best_s + other_s
        if waits.low_s is not None and waits.high_s is not None:
            less, more = less + waits.best_s - waits.low_s, waits.high_s - waits.best_s
        error, ends = self.knowledge.error(devices), dict[str, float]()
        if error is not None and (error := math.hypot(error, self.knowledge.drift)) < math.inf:
            ends = {"low_s": (step - less) * max(0.0, 1 - error), "high_s": (step + more) * (1 + error)}
        staleness = 0 if plan.superstep is None else plan.superstep.iteration_gap
        option = Option(
            strategy=plan.strategy,
            devices=devices,
            compute_s=compute,
            communication_s=None if exposed is None else exposed.best_s,
            other_s=other_s,
            iteration_s=step,
            throughput=problem.max_workers / step,
            low_s=ends.get("low_s"),
            high_s=ends.get("high_s"),
            goodput_per_s=self._goodput_per_s(problem.max_workers / step, staleness),
            staleness=staleness,
            determinism=kept,
            order=waits.setting,
            order_saves_s=max(0.0, waits.default_s - waits.best_s) if waits.setting else None,
            leans_on=_leans_on(plan, problem, compute / step),
        ).model_copy(update=update)
        prices = {device.name: device.price_micro for device in problem.devices}
        if all(prices.get(name) is not None for name in devices):
            hourly = sum((prices[name] or 0) * count for name, count in devices.items()) / 1e6
            price = hourly / HOUR_S / (option.throughput * self.job.batch_size)
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


def _called_equal(found: Candidate) -> Candidate:
    renamed = {"strategy": "bsp"}
    return replace(found, plan=found.plan.model_copy(update=renamed), option=found.option.model_copy(update=renamed))


def _leans_on(plan: Plan, problem: Problem, share: float) -> dict[str, float]:
    """Return by how much a step changes with each type's compute times, as shares; all together ``share``, that of computing.

    Where the work is split by speed, a type counts by its part of it; where it is not, the slowest decide.
    """
    speeds = {device.name: float(device.capability_per_s) for device in problem.devices}
    shared = plan.strategy in ("lb-bsp", "elastic-bsp")
    parts: dict[str, float] = {}
    for row in plan.assignments:
        speed = speeds.get(row.device_type, 1.0)
        if plan.strategy == "elastic-bsp":
            part = row.devices * speed
        elif shared:
            part = float(row.devices * row.local_batch_size)
        else:
            part = row.compute_s or row.local_batch_size / plan.batch_size / speed
        parts[row.device_type] = (
            part + parts.get(row.device_type, 0.0) if shared else max(part, parts.get(row.device_type, 0.0))
        )
    if not shared:
        parts = {name: part for name, part in parts.items() if part >= _SLOWEST * max(parts.values())}
    whole = sum(parts.values())
    return {name: share * part / whole for name, part in parts.items()} if whole else {}


def _proof(gap: float) -> dict[str, object]:
    """Return what a plan says of its proof."""
    return {"status": "feasible" if gap > 1e-9 else "optimal", "gap": min(gap, _UNBOUNDED)}
