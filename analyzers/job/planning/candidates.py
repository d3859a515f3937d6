"""The best plan of each strategy for one job, with its step time, communication included. Start at :class:`Candidates`.

``_cost_split``, ``_cost_est`` and ``_cost_elastic_bsp`` cost a strategy on exactly given devices;
:func:`~ddltool.analyzers.job.planning.device_search.best_devices` searches the numbers of devices. All end in ``_cost_plan``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Literal, cast, get_args

from ddltool.analyzers.job.goodput.throughput import StepTime, efficiency, grad_time_s
from ddltool.analyzers.job.placement.problem import Problem, demand_throughput
from ddltool.analyzers.job.placement.steps import Counts, best_step, counts_of, device_counts, evaluate, plan_of
from ddltool.analyzers.job.planning.device_search import Best, best_devices
from ddltool.analyzers.job.planning.exposed import FITTED, Exposed
from ddltool.analyzers.job.planning.goodput_plan import plan_goodput
from ddltool.analyzers.job.planning.job_model import Bounds, JobModel
from ddltool.analyzers.job.planning.options import HOUR_S, Goal, PlanOptions
from ddltool.analyzers.job.planning.split import plan_bsp, plan_lb_bsp
from ddltool.analyzers.job.planning.superstep import plan_elastic_bsp
from ddltool.decision import Kept, Layout, NothingFits, Option
from ddltool.errors import Infeasible, InputError
from ddltool.job import Job, WorkerGroup
from ddltool.plans import Plan

if TYPE_CHECKING:  # it loads torch
    from ddltool.analyzers.job.planning.layout_figures import LayoutCandidate
    from ddltool.analyzers.job.planning.layouts import Layouts

# From the least change to a training script to the most.
STRATEGIES = ("bsp", "lb-bsp", "est", "goodput", "elastic-bsp")
# A device type counts among the slowest from this share of the slowest one's compute time on.
_NEAR_SLOWEST = 0.98
# Up to this share of a step in exposed communication, nothing is gained by less of it.
_EXPOSED = 0.1
# The gap reported in place of infinity, where no lower bound is known.
_UNKNOWN_GAP = 1e9
Split = Literal["bsp", "lb-bsp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One strategy's plan, its figures for comparison, and its communication settings."""

    plan: Plan
    option: Option
    """The plan's figures as the comparison shows them: step, throughput, price, memory."""
    exposed: Exposed | None
    """Communication that compute does not hide, with the best settings; None: not known, or there is nothing to set."""
    layouts: tuple[Layout, ...] = ()
    """The layout of the plan first, then the next best; empty where the plan was not searched among layouts."""
    laid_out: LayoutCandidate | None = None
    """What the plan's layout is derived from, and by which figures."""
    figures: Layouts | None = None
    """What costed the plan's layout."""

    def split_wait_s(self) -> float:
        """Return by how many seconds the step is longer where DTensor splits layers among devices; 0 where it splits none."""
        return 0.0 if self.laid_out is None or self.figures is None else self.figures.split_wait_s(self.laid_out)

    def would_save(self) -> dict[str, float]:
        """Return change of the script that nobody asked for -> share of a step that it would save in the plan's layout.

        Changes that save nothing are left out.
        """
        if self.laid_out is None or self.figures is None:
            return {}
        now_s = self.laid_out.layout.step_s or 0.0
        steps_s = {
            name: other.step_s(self.laid_out) for name, other in self.figures.alternatives(self.laid_out).items()
        }
        # What changes numerics too must save more than what it contains.
        compiled_s = steps_s.get("torch.compile") or math.inf
        return {
            name: 1 - step_s / now_s
            for name, step_s in steps_s.items()
            if step_s is not None and step_s < min(now_s, compiled_s if "fp8" in name else math.inf)
        }


def plan_by(
    strategy: str, problem: Problem, options: PlanOptions, curves: Mapping[str, StepTime] | None = None
) -> Plan:
    """Return the plan of any strategy but goodput (which has no placement problem), by the strategy's own device choice."""
    if strategy == "bsp":
        return plan_bsp(problem, curves)
    if strategy == "lb-bsp":
        return plan_lb_bsp(problem, curves)
    if strategy == "elastic-bsp":
        return plan_elastic_bsp(problem, lookahead=options.lookahead, max_gap=options.max_gap)
    from ddltool.analyzers.job.placement.est import DEFAULT_OBJECTIVE, solve_est  # it loads a solver

    return solve_est(
        problem,
        top_k=options.top_k,
        time_limit_s=options.limit_s,
        seed=options.seed,
        objective=options.prefer or DEFAULT_OBJECTIVE,
    )


def on_counts(problem: Problem, counts: Counts) -> Problem:
    """Return the problem on exactly ``counts`` (T,) devices per type, which must meet its constraints: these are dropped."""
    kept = tuple(replace(device, count=count) for device, count in zip(problem.devices, counts, strict=True) if count)
    return replace(problem, devices=kept, max_price_micro=None, max_devices=None, min_throughput=None)


def each_type(problem: Problem) -> list[Problem]:
    """Return one problem per device type alone; empty where only one type is offered."""
    if len(problem.devices) == 1:
        return []
    return [replace(problem, devices=(device,)) for device in problem.devices]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidates:
    """Makes the candidates of one job."""

    job: Job
    model: JobModel
    options: PlanOptions = field(default_factory=PlanOptions)

    @property
    def goal(self) -> Goal:
        """The objective and limits that candidates are compared by."""
        return self.options.goal

    def _with_goal(self, goal: Goal) -> Candidates:
        """Return the same candidates with another goal."""
        return replace(self, options=replace(self.options, goal=goal))

    def cheapest(self, problem: Problem) -> Candidate | None:
        """Return the plan of equal batches, within the goal's limits, whose samples cost least; None where a price is unknown.

        None too where there is no such plan.
        """
        if any(device.price_micro is None for device in problem.devices):
            return None
        try:
            return self._with_goal(replace(self.goal, objective="cheapest")).best("bsp", problem)
        except Infeasible:
            return None

    def of(self, problem: Problem, left_out: dict[str, Infeasible], only: str | None = None) -> list[Candidate]:
        """Return each strategy's candidate on its best devices, and on the best devices of each type alone.

        ``left_out`` receives the reason of each strategy without a plan; ``only`` names a single strategy, None means all.
        Raises NothingFits where no devices hold the model in any layout.
        """
        candidates: list[Candidate] = []
        for strategy in STRATEGIES if only is None else (only,):
            if self.job.asks_for_hosts and strategy not in get_args(Split):
                left_out[strategy] = Infeasible(f"keeps all on the devices, and offload asks for {self.job.offload}")
                continue
            try:
                overall = self.best(strategy, problem)
            except Infeasible as error:
                # lb-bsp has searched all layouts on all mixes of devices: only groups and the hosts' memory are left.
                if isinstance(error, NothingFits) and strategy == "lb-bsp":
                    if others := self._in_groups(problem) or self._on_hosts(problem):
                        return others
                    raise
                left_out[strategy] = error
                continue
            candidates.append(overall)
            # On one type with known layouts lb-bsp splits equally, as bsp does.
            for single_type in [] if strategy == "lb-bsp" and self.model.layouts is not None else each_type(problem):
                # a fastest plan that is on one type is no slower than those on another
                if len(overall.option.devices) > 1 or self.goal.objective != "fastest":
                    with suppress(Infeasible):
                        candidates.append(self.best(strategy, single_type))
        if only in (None, "bsp") and candidates and _leaves_room(candidates[0]):
            base_s = candidates[0].option.iteration_s
            groups = self._in_groups(problem, candidates[0])
            # A group that leads by the hooks of DDP or FSDP2 alone has DTensor's in their place.
            candidates += [each for each in groups if not 0.0 < each.split_wait_s() >= base_s - each.option.iteration_s]
        # On one type an lb-bsp layout has equal shares, so it is a bsp candidate too, which the bsp search may have missed.
        return [
            *candidates,
            *(
                _renamed_bsp(candidate)
                for candidate in candidates
                if candidate.layouts and len(candidate.option.devices) == 1 and only is None
            ),
        ]

    def _in_groups(self, problem: Problem, base: Candidate | None = None) -> list[Candidate]:
        """Return the best plan of each size of groups of devices that hold a replica between them.

        Groups by tensors lie within a node. Stages of a pipeline are tried between nodes where ``base``, the best plan of
        single devices, waits for the network or leaves devices of its types out, and where there is none (None); where nothing
        fits even then, within a node as well, of the fewest stages.
        """
        layouts = self.model.layouts
        if layouts is None:
            return []
        per_node = max(kind.fabric.gpus_per_node for kind in layouts.kinds.values())
        devices = max(device.count for device in problem.devices)
        tensors = [2**power for power in range(1, per_node.bit_length()) if 2**power <= per_node]
        nodes = -(-devices // per_node)
        tried = [(tensor, 1) for tensor in tensors]  # (devices that share each product, stages)
        offered = {device.name: device.count for device in problem.devices}
        if base is None or (
            _waits(base.option) or any(count < offered[name] for name, count in base.option.devices.items())
        ):
            # a stage is a single device or a whole node
            tried += [(tensor, 2**power) for power in range(1, nodes.bit_length()) for tensor in {1, *tensors[-1:]}]
        found = [each for degrees in tried if (each := self._best_in_groups(*degrees, problem))]
        if found or base is not None:
            return found
        for pipeline in (2**power for power in range(1, devices.bit_length())):
            found = [each for tensor in (1, *tensors) if (each := self._best_in_groups(tensor, pipeline, problem))]
            if found:
                break
        return found

    def _on_hosts(self, problem: Problem) -> list[Candidate]:
        """Return the best plans with activations, and with the state, in the hosts' memory, unless the job says none."""
        layouts, found = self.model.layouts, list[Candidate]()
        if layouts is None or self.job.offload != "auto":
            return []
        for what in ("activations", "optimizer"):
            with suppress(Infeasible, InputError):
                model = replace(self.model, layouts=layouts.on_hosts(what))
                found.append(replace(self, model=model).best("bsp", problem))
        return found

    def _best_in_groups(self, tensor: int, pipeline: int, problem: Problem) -> Candidate | None:
        """Return the best plan of groups of ``tensor`` x ``pipeline`` devices that hold a replica together; None: none exists.

        A group stands in the search for one device: counts are divided by its size and prices multiplied, while memory is
        checked by the layouts. Only ``bsp`` is searched, in which groups get equal samples. In the option and the layouts of
        the result counts are of devices again; in its plan they stay those of groups, whose size ``group`` tells. The goal's
        limits are demanded of the whole devices.
        """
        from ddltool.analyzers.step.costs.setting import ParallelDegrees  # it loads torch

        assert self.model.layouts is not None  # the caller checked it
        degrees = ParallelDegrees(tensor=tensor, pipeline=pipeline, sequence=tensor > 1)
        layouts, size = self.model.layouts.in_groups(degrees), degrees.gpus
        if layouts is None:
            return None
        groups = [
            replace(
                device,
                count=device.count // size,
                capability_per_s=Fraction(layouts.capability(device.name, problem.batch_size)),
                memory_gib=None,
                price_micro=None if device.price_micro is None else device.price_micro * size,
            )
            for device in problem.devices
            if device.name in layouts.kinds and device.count >= size
        ]
        most = None if problem.max_devices is None else problem.max_devices // size
        if not groups or most == 0:
            return None
        problem = replace(problem, devices=tuple(groups), max_devices=most)
        try:
            candidate = replace(self, model=replace(self.model, layouts=layouts))._search_layouts("bsp", problem)
            devices = {name: count * size for name, count in candidate.option.devices.items()}
            group = WorkerGroup(tensor=degrees.tensor, pipeline=degrees.pipeline)
            option = candidate.option.model_copy(update={"devices": devices, "group": group})
            self.goal.demand(option)
        except Infeasible:
            return None
        return replace(
            candidate,
            plan=candidate.plan.model_copy(update={"group": group}),
            option=option,
            layouts=tuple(
                layout.model_copy(update={"devices": {name: n * size for name, n in layout.devices.items()}})
                for layout in candidate.layouts
            ),
        )

    def best(self, name: str, problem: Problem) -> Candidate:
        """Return a strategy's candidate on its best devices. Raises Infeasible, with the reason, where it has none."""
        try:
            candidate = self._best_unchecked(name, problem)
        except NothingFits:
            raise
        except Infeasible:
            self._demand_reachable(name, problem)
            raise
        # The candidate's throughput includes communication, which the placement problem's own check does not.
        demand_throughput(candidate.option.throughput, problem.min_throughput)
        self.goal.demand(candidate.option)
        return candidate

    def _demand_reachable(self, name: str, problem: Problem) -> None:
        """Raise Infeasible, with time or price, where the fastest plan misses the deadline or the cheapest one the budget.

        A search under limits only says that no plan keeps them; this one, without limits, finds by how much they are missed.
        """
        if not self.goal.limited:
            return
        fastest = self._with_goal(self.goal.unlimited())._best_unchecked(name, problem).option
        demand_throughput(fastest.throughput, problem.min_throughput)
        replace(self.goal, budget=math.inf).demand(fastest)
        if self.goal.budget < math.inf:
            cheapest = self._with_goal(self.goal.unlimited("cheapest"))._best_unchecked(name, problem).option
            replace(self.goal, deadline_s=math.inf).demand(cheapest)
            self.goal.demand_both(fastest, cheapest)

    def _best_unchecked(self, name: str, problem: Problem) -> Candidate:
        """Return a strategy's candidate on its best devices, before deadline, budget and throughput are checked."""
        is_split = name in ("bsp", "lb-bsp")
        if (layouts := self.model.layouts) is not None and is_split:
            return self._search_layouts(cast(Split, name), problem)
        if name == "goodput" and self.job.goodput is None:
            raise Infeasible("the job has no goodput section")
        feasible = problem if is_split else self._on_types_that_fit(problem)
        build = {"goodput": self._cost_goodput, "est": self._est_by_determinism}.get(
            name, partial(self._search_counts, name)
        )
        candidate = build(feasible)
        if layouts is not None:  # the other strategies hold a whole model, and the samples of their largest pass
            samples = self.job.batch_size  # est takes turns, and elastic-bsp steps, with one mini-batch each
            if name == "goodput":
                rows = candidate.plan.assignments
                samples = max(-(-row.local_batch_size // (row.accumulation_steps + 1)) for row in rows)
            needed_bytes = layouts.whole_bytes(candidate.option.devices, samples)
            candidate = replace(candidate, option=candidate.option.model_copy(update={"memory_bytes": needed_bytes}))
        return candidate

    def _search_counts(self, name: str, problem: Problem) -> Candidate:
        """Return a strategy's candidate on the device counts that the branch-and-bound search finds best."""
        build = {"est": self._cost_est, "elastic-bsp": self._cost_elastic_bsp}.get(
            name, partial(self._cost_split, name)
        )
        bounds = Bounds(self.model, self.goal, problem, name)

        def evaluate_counts(counts: Counts, best_value: float) -> tuple[float, Candidate] | None:
            """Return the value and plan of so many devices of each type.

            None where it is infeasible, leaves some of them out, or can be no better than ``best_value``.
            """
            if bounds(counts, counts) >= best_value:
                return None
            try:
                candidate = build(on_counts(problem, counts), True)
            except Infeasible:
                return None
            # A plan that leaves devices out is the candidate of smaller counts.
            if sum(candidate.option.devices.values()) != sum(counts):
                return None
            return self.goal.value(candidate.option), candidate

        # Each device takes a sample at least, or a whole mini-batch where the strategy does not split these.
        most_devices = problem.max_workers * (problem.batch_size if name in ("bsp", "lb-bsp") else 1)
        limit_s, prefer_fewer = self.options.limit_s / len(STRATEGIES), self.goal.objective != "cheapest"
        best = best_devices(problem, evaluate_counts, bounds, most=most_devices, limit_s=limit_s, spare=prefer_fewer)
        if best is None:
            raise self._refusal(name, problem)
        candidate = build(on_counts(problem, best.counts), False)  # the search left communication settings out
        return replace(candidate, plan=self._with_proof(candidate.plan, problem, best))

    def _refusal(self, name: str, problem: Problem) -> Infeasible:
        """Return the error that explains why a strategy has no plan on any devices."""
        try:
            plan_by(name, problem, self.options, self.model.curves)
        except Infeasible as error:
            return error
        return Infeasible("no devices that the constraints allow have a step of it")

    def _with_proof(self, plan: Plan, problem: Problem, best: Best[Candidate]) -> Plan:
        """Return the plan with the search's gap and time, and the offered devices that it leaves out."""
        unused, proven = problem.spare(best.counts), best.gap == 0
        update = {**_proof_fields(best.gap), "solve_seconds": best.seconds}
        if plan.superstep is not None:
            update["superstep"] = plan.superstep.model_copy(update={"left_out": unused if proven else {}})
        if plan.split is not None:
            split_update: dict[str, object] = {"dropped": unused, "equal_s": None}
            with suppress(Infeasible):
                split_update["equal_s"] = plan_bsp(problem, self.model.curves).iteration_s
            update["split"] = plan.split.model_copy(update=split_update)
        return plan.model_copy(update=update)

    def _on_types_that_fit(self, problem: Problem) -> Problem:
        """Return the problem on the types that hold a whole model and a mini-batch. Raises Infeasible where none does."""
        layouts, communication = self.model.layouts, self.model.communication
        kept, errors = [], list[Infeasible]()
        for device in problem.devices:
            try:
                if layouts is not None:
                    layouts.demand_whole(device.name, device.count, self.job.batch_size)
                elif communication is not None:
                    communication.demand_whole(device.name)
                kept.append(device)
            except Infeasible as error:
                errors.append(error)
        if not kept:
            raise errors[0]
        return problem if len(kept) == len(problem.devices) else replace(problem, devices=tuple(kept))

    def usual(self, problem: Problem) -> dict[str, Option]:
        """Return the baselines by name: an equal split with default communication settings, as one would run without a plan.

        One over all devices and one over all devices of each type. A model with known memory is sharded and checkpointed
        only as far as memory demands; baselines that do not fit are left out.
        """
        baselines: dict[str, Option] = {}
        for subproblem in (problem, *each_type(problem)):
            with suppress(Infeasible):
                option = self._baseline(subproblem)
                mix_name = " + ".join(f"{count} {name}" for name, count in option.devices.items())
                if len(problem.devices) > 1 and len(option.devices) == len(problem.devices):
                    mix_name = f"all {sum(option.devices.values())}"
                how = option.order if self.model.layouts is not None and option.order else "equal batches"
                baselines.setdefault(f"{mix_name} with {how}", option)
        return baselines

    def _baseline(self, problem: Problem) -> Option:
        """Return the baseline of one set of devices. Raises Infeasible where it does not fit."""
        if (layouts := self.model.layouts) is not None:
            return self._cost_layout("bsp", problem, layouts.plainest(problem), best=False).option
        try:
            plan = plan_bsp(problem, self.model.curves)
        except Infeasible:  # too large for memory: gradient accumulation takes the same time by the capabilities
            plan = plan_bsp(problem)
        exposed = self._exposed_synchronous(plan, plan.iteration_s)
        default_exposure = None if exposed is None else Exposed(default_s=exposed.default_s, best_s=exposed.default_s)
        return self._cost_plan(plan, problem, default_exposure, "D0").option

    def equal_splits_of_one_type(self, problem: Problem) -> list[Option]:
        """Return the feasible equal splits on 1, 2, 4, ... and all devices of each single type."""
        options = []
        for type_index, device in enumerate(problem.devices):
            sizes = {2**power for power in range(device.count.bit_length())} | {device.count}
            for counts in (
                tuple(size * (type_index == index) for index in range(len(problem.devices))) for size in sorted(sizes)
            ):
                if problem.allows(counts):
                    with suppress(Infeasible):
                        options.append(self._equal_split(problem, counts).option)
        return options

    def _equal_split(self, problem: Problem, counts: Counts) -> Candidate:
        """Return the equal split on ``counts`` devices per type, with default settings where layouts are known."""
        if (layouts := self.model.layouts) is not None:
            return self._cost_layout("bsp", problem, layouts.equally(problem, counts), best=False)
        return self._cost_split("bsp", on_counts(problem, counts), True)

    def progress(self, option: Option) -> float:
        """Return goodput in samples per second where a noise scale is known, else the plain sample throughput."""
        return option.throughput * self.job.batch_size if option.goodput_per_s is None else option.goodput_per_s

    def _cost_split(self, strategy: str, problem: Problem, quick: bool) -> Candidate:
        """Return the equal (bsp) or balanced (lb-bsp) split; ``quick`` leaves communication settings out."""
        curves = self.model.curves
        plan = plan_bsp(problem, curves) if strategy == "bsp" else plan_lb_bsp(problem, curves, synchronise=False)
        return self._cost_plan(plan, problem, self._exposed_synchronous(plan, plan.iteration_s, quick), "D0")

    def _search_layouts(self, strategy: Split, problem: Problem) -> Candidate:
        """Return the best layout of a traced model over all allowed devices, the next best in its ``layouts``."""
        layouts = self.model.layouts
        assert layouts is not None  # the caller checked it
        limit_s = self.options.limit_s / 2  # bsp and lb-bsp share the time
        started = time.perf_counter()
        ranked, gap = layouts.search(problem, self.goal, equal=strategy == "bsp", limit_s=limit_s)
        candidate = self._cost_layout(strategy, problem, ranked[0])
        plan = candidate.plan.model_copy(update={**_proof_fields(gap), "solve_seconds": time.perf_counter() - started})
        return replace(candidate, plan=plan, layouts=(candidate.layouts[0], *(other.layout for other in ranked[1:])))

    def _cost_layout(
        self, strategy: Split, problem: Problem, laid_out: LayoutCandidate, *, best: bool = True
    ) -> Candidate:
        """Return the candidate of the layout ``laid_out``, which came from the model's layouts, under the name ``strategy``.

        ``best``: with the best prefetch or buckets that fit memory, else the defaults.
        """
        layouts, layout = self.model.layouts, laid_out.layout
        assert layouts is not None  # the layout came from it
        buckets, prefetch = layouts.communication(laid_out) if best else (None, None)
        plan = layouts.plan(laid_out, problem, strategy)  # whose step is compute alone
        setting = buckets or prefetch
        saved_s = 0.0 if setting is None else max(0.0, setting.default_step_s - setting.step_s)
        saved_s *= layout.passes if laid_out.sharding.gathers else 1  # sharded replicas communicate in every pass
        default_s = max(0.0, (layout.step_s or 0.0) - plan.iteration_s)
        exposed = Exposed(
            default_s=default_s,
            best_s=max(0.0, default_s - saved_s),
            setting=layout.text,
            ddp=buckets,
            fsdp2=prefetch,
        )
        candidate = self._cost_plan(plan, problem, exposed, "D0")
        # The layout's interval is that of a step with default settings.
        settled_ratio = candidate.option.iteration_s / (layout.step_s or 1.0)
        low_s, high_s = (None if end is None else end * settled_ratio for end in (layout.low_s, layout.high_s))
        # Capabilities written in the job come without an error, so their step has no interval.
        interval = {"low_s": low_s, "high_s": high_s} if self.model.error(layout.devices) is not None else {}
        figures = {
            "order_saves_s": saved_s or None,
            "memory_bytes": max(layout.memory_bytes.values()),
            "host_bound": layout.host_bound,
        }
        option = candidate.option.model_copy(update={**interval, **figures})
        price = None if layout.price_per_sample is None else layout.price_per_sample * settled_ratio
        settled = {"step_s": option.iteration_s, "price_per_sample": price, **interval}
        return replace(
            candidate,
            option=option,
            laid_out=laid_out,
            figures=layouts,
            layouts=(layout.model_copy(update=settled),),
        )

    def _est_by_determinism(self, problem: Problem) -> Candidate:
        """Return logical workers on one device type, or on several where their results are bitwise equal (D2).

        Where one type does not suffice, several are taken without that promise (D0).
        """
        has_same_bits = self.job.constraints.determinism == "D2" or self.model.d2_eligible is True
        is_mixed = has_same_bits and not problem.single_type
        try:
            candidate = self._search_counts("est", problem if is_mixed else replace(problem, single_type=True))
        except Infeasible:
            if problem.single_type or is_mixed:
                raise
            # On several types without D2 the bits are those of this placement alone: D0.
            candidate, has_same_bits = self._search_counts("est", problem), False
        kept: Kept = "D1" if len(candidate.option.devices) == 1 and not is_mixed else "D2" if has_same_bits else "D0"
        candidate = replace(candidate, option=candidate.option.model_copy(update={"determinism": kept}))
        if self.options.top_k > 1:
            subproblem = problem if is_mixed else replace(problem, single_type=True)
            ranked = plan_by("est", subproblem, self.options)
            own_counts = counts_of(problem, candidate.plan)
            alternatives = [plan for plan in (ranked, *ranked.alternatives) if counts_of(problem, plan) != own_counts]  # type: ignore[arg-type]
            candidate = replace(
                candidate,
                plan=candidate.plan.model_copy(update={"alternatives": alternatives[: self.options.top_k - 1]}),
            )
        return candidate

    def _cost_est(self, problem: Problem, quick: bool) -> Candidate:
        """Return logical workers (ESTs) on exactly these devices, at least one on each."""
        counts = tuple(device.count for device in problem.devices)
        if sum(counts) > problem.max_workers or best_step(problem, counts) is None:
            raise Infeasible("these devices have no room for the workers")
        plan = plan_of(problem, evaluate(problem, counts), optimal=True, gap=0.0, solve_seconds=0.0)
        capability = {device.name: device.capability_per_s for device in problem.devices}
        # Gradients travel during the last EST's pass on the device that ends last; devices within 0.1 % tie.
        last_pass_s = max(
            float(1 / capability[row.device_type])
            for row in plan.assignments
            if row.ests_per_device / capability[row.device_type] >= plan.iteration_s * 0.999
        )
        exposed, communication = self._exposed_synchronous(plan, last_pass_s, quick), self.model.communication
        if exposed is not None and communication is not None:
            exposed = communication.ordered(device_counts(plan), exposed)
        return self._cost_plan(plan, problem, exposed, "D1")

    def _cost_goodput(self, problem: Problem) -> Candidate:
        """Return the goodput plan on the types with a fitted model; what the fit adds to compute is exposed."""
        assert self.job.goodput is not None  # the caller checked it
        offered = {device.name for device in problem.devices}
        models = {name: model for name, model in self.model.models.items() if name in offered}
        if not models:
            raise Infeasible("no offered device has a fitted throughput model (goodput: FILE)")
        plan = plan_goodput(self.job, self.job.goodput, models)
        choice = plan.goodput or plan.split  # on one type, or on several
        assert choice is not None  # plan_goodput fills one in
        compute_s = plan.overload_factor  # of a split over several types: seconds of its slowest device
        if plan.goodput is not None:
            compute_s = float(grad_time_s(models[plan.goodput.device_type], plan.goodput.local_batch_size))
            compute_s = min(plan.iteration_s, compute_s * (plan.goodput.accumulation_steps + 1))
        waiting_s = plan.iteration_s - compute_s
        exposed = Exposed(default_s=waiting_s, best_s=waiting_s, setting=FITTED)
        if self.model.seen and self.model.communication is not None:
            measured = self.model.communication.synchronous(device_counts(plan), compute_s)
            waits_s = [waiting_s, *(end_s for end_s in (measured.low_s, measured.high_s) if end_s is not None)]
            exposed = replace(exposed, low_s=min(waits_s), high_s=max(waits_s))  # the fit and the earlier run differ
        other_s = self.model.other_s(device_counts(plan), compute_s if plan.world_size > 1 else 0.0)
        working_share = plan.iteration_s / (plan.iteration_s + other_s)  # the fit's step is without ``other_s``
        update = {
            "throughput": plan.throughput * working_share,
            "goodput_per_s": (choice.goodput_per_s or 0.0) * working_share,
            "step_samples": choice.total_batch_size,
            "order_saves_s": None,
        }
        return self._cost_plan(plan, problem, exposed, "D0", compute_s=compute_s, update=update)

    def _cost_elastic_bsp(self, problem: Problem, quick: bool) -> Candidate:
        """Return the ElasticBSP plan, its barrier chosen for iterations that include each worker's transfers and overhead.

        ``quick`` leaves out what compute alone would take, by which the step is split into its parts.
        """
        communication, options = self.model.communication, self.options
        overhead_s = self.model.other_s(offer.name for offer in problem.devices)
        build = partial(plan_elastic_bsp, lookahead=options.lookahead, max_gap=options.max_gap, all_devices=True)
        counts = {offer.name: offer.count for offer in problem.devices}
        exposures, slowed_devices = dict[str, Exposed](), []
        for device in problem.devices:
            iteration_s = 1 / device.capability_per_s
            exposed = (
                Exposed(default_s=0.0, best_s=0.0)
                if communication is None
                else communication.asynchronous(counts, float(iteration_s))
            )
            whole_s = iteration_s + Fraction(exposed.best_s) + Fraction(self.model.other_s([device.name]))
            slowed_devices.append(replace(device, capability_per_s=1 / whole_s))
            exposures[device.name] = exposed
        plan = build(replace(problem, devices=tuple(slowed_devices)))
        compute_plan = plan if quick else build(problem)
        worst = max(exposures.values(), key=lambda exposed: exposed.best_s)
        compute_s = min(compute_plan.iteration_s, plan.iteration_s)
        # What transfers and overhead add to the step is split in the ratio of the two in a worker's iteration.
        added_s = plan.iteration_s - compute_s
        other_s = added_s * overhead_s / (overhead_s + worst.best_s) if overhead_s else 0.0
        update: dict[str, object] = {}
        barrier_exposed = None
        if communication is not None:
            update = {"order": worst.setting, "order_saves_s": worst.default_s - worst.best_s}
            best_s = max(0.0, added_s - other_s)
            share = best_s / worst.best_s if worst.best_s else 1.0
            low_s, high_s = (None if end_s is None else share * end_s for end_s in (worst.low_s, worst.high_s))
            barrier_exposed = replace(worst, best_s=best_s, low_s=low_s, high_s=high_s)
        candidate = self._cost_plan(
            plan, problem, barrier_exposed, "none", compute_s=compute_s, other_s=other_s, update=update
        )
        return replace(candidate, exposed=None)  # parameter servers have no DDP settings

    def _exposed_synchronous(self, plan: Plan, pass_s: float, quick: bool = False) -> Exposed | None:
        """Return the replicas' exposed communication, without settings where ``quick``; None: communication is not known."""
        communication = self.model.communication
        if communication is None:
            return None
        if not quick:
            return communication.synchronous(device_counts(plan), pass_s)
        exposed_s = communication.least_s(device_counts(plan), pass_s)
        return Exposed(default_s=exposed_s, best_s=exposed_s)

    def _cost_plan(
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
        """Return the candidate of a plan: step, interval, goodput and price from its parts.

        Args:
            exposed: communication beside compute; None: not known, counted as 0 s.
            kept: the determinism level of the results.
            compute_s: seconds of compute in a step; None: the plan's ``iteration_s``.
            other_s: seconds of neither compute nor communication; None: from the job model.
            update: fields of the option that replace those derived here.
        """
        computing_s = plan.iteration_s if compute_s is None else compute_s
        devices = device_counts(plan)
        # by how much the step may be shorter or longer, apart from the error of the compute times
        less_s, more_s = 0.0, 0.0
        wait = exposed or Exposed(default_s=0.0, best_s=0.0)
        if other_s is None:
            skewed_s = computing_s if sum(devices.values()) > 1 else 0.0
            other_s = self.model.other_s(devices, skewed_s)
            # The imbalance was measured on the earlier run's devices; on others it may be as little as 0.
            less_s = self.model.imbalance * skewed_s if devices != self.model.seen else 0.0
        step_s = computing_s + wait.best_s + other_s
        if wait.low_s is not None and wait.high_s is not None:
            less_s, more_s = less_s + wait.best_s - wait.low_s, wait.high_s - wait.best_s
        error, interval = self.model.error(devices), dict[str, float]()
        if error is not None and (error := math.hypot(error, self.model.drift)) < math.inf:
            interval = {"low_s": (step_s - less_s) * max(0.0, 1 - error), "high_s": (step_s + more_s) * (1 + error)}
        staleness = 0 if plan.superstep is None else plan.superstep.iteration_gap
        option = Option(
            strategy=plan.strategy,
            devices=devices,
            compute_s=computing_s,
            communication_s=None if exposed is None else exposed.best_s,
            other_s=other_s,
            iteration_s=step_s,
            throughput=problem.max_workers / step_s,
            low_s=interval.get("low_s"),
            high_s=interval.get("high_s"),
            goodput_per_s=self._goodput_per_s(problem.max_workers / step_s, staleness),
            staleness=staleness,
            determinism=kept,
            order=wait.setting,
            order_saves_s=max(0.0, wait.default_s - wait.best_s) if wait.setting else None,
            leans_on=_compute_elasticities(plan, problem, computing_s / step_s),
        ).model_copy(update=update)
        prices = {device.name: device.price_micro for device in problem.devices}
        if all(prices.get(name) is not None for name in devices):
            hourly = sum((prices[name] or 0) * count for name, count in devices.items()) / 1e6
            price = hourly / HOUR_S / (option.throughput * self.job.batch_size)
            option = option.model_copy(update={"price_per_sample": price})
        return Candidate(plan=plan, option=option, exposed=exposed)

    def _goodput_per_s(self, throughput: float, staleness: int) -> float | None:
        """Return samples per second times statistical efficiency; None without a noise scale or for stale updates.

        ``throughput``: logical mini-batches per second; ``staleness``: iterations by which an update may be stale.
        """
        section = self.job.goodput
        if section is None or section.noise_scale is None or staleness:
            return None
        total_batch = self.job.max_workers * self.job.batch_size
        statistical_efficiency = float(
            efficiency(section.noise_scale, total_batch, section.initial_batch_size or total_batch)
        )
        return throughput * self.job.batch_size * statistical_efficiency


def _leaves_room(candidate: Candidate) -> bool:
    """Return whether groups that hold a replica between them could be faster than a layout of single devices.

    They could not where a device holds the whole state and all activations, and little communication is exposed.
    """
    if not candidate.layouts:
        return False
    layout, option = candidate.layouts[0], candidate.option
    is_whole = layout.sharding in ("none", "ddp") and layout.checkpointing == "none" and layout.passes == 1
    return not is_whole or _waits(option)


def _waits(option: Option) -> bool:
    """Return whether a step has much exposed communication."""
    return (option.communication_s or 0.0) > _EXPOSED * option.iteration_s


def _renamed_bsp(candidate: Candidate) -> Candidate:
    """Return a candidate of equal shares under the name bsp."""
    update = {"strategy": "bsp"}
    return replace(
        candidate, plan=candidate.plan.model_copy(update=update), option=candidate.option.model_copy(update=update)
    )


def _compute_elasticities(plan: Plan, problem: Problem, share: float) -> dict[str, float]:
    """Return the elasticity of the step to each device type's compute time; they sum to ``share``, compute's part of a step.

    Where work is split by speed, types weigh by their part of the work; else only types (nearly) as slow as the slowest count.
    """
    speeds = {device.name: float(device.capability_per_s) for device in problem.devices}
    is_split_by_speed = plan.strategy in ("lb-bsp", "elastic-bsp")
    weights: dict[str, float] = {}
    for row in plan.assignments:
        speed = speeds.get(row.device_type, 1.0)
        if plan.strategy == "elastic-bsp":
            weight = row.devices * speed
        elif is_split_by_speed:
            weight = float(row.devices * row.local_batch_size)
        else:
            weight = row.compute_s or row.local_batch_size / plan.batch_size / speed
        weights[row.device_type] = (
            weight + weights.get(row.device_type, 0.0)
            if is_split_by_speed
            else max(weight, weights.get(row.device_type, 0.0))
        )
    if not is_split_by_speed:
        weights = {name: weight for name, weight in weights.items() if weight >= _NEAR_SLOWEST * max(weights.values())}
    total_weight = sum(weights.values())
    return {name: share * weight / total_weight for name, weight in weights.items()} if total_weight else {}


def _proof_fields(gap: float) -> dict[str, object]:
    """Return a plan's status and relative gap; below 1e-9 counts as proven optimal."""
    return {"status": "feasible" if gap > 1e-9 else "optimal", "gap": min(gap, _UNKNOWN_GAP)}
