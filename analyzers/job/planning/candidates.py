"""The best plan of each strategy for one job, with its step time, communication included. Start at :class:`Candidates`.

``_cost_split``, ``_cost_est`` and ``_cost_elastic_bsp`` cost a strategy on exactly given devices;
:func:`~ddltool.analyzers.job.planning.device_search.best_devices` searches the numbers of devices. All end in ``_cost_plan``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
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
EAGER = ("est", "elastic-bsp")
"""Strategies for which torch.compile is not modelled."""
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
        """Return the changes of the script beside the layout that would make the step shorter, with the share that each saves.

        A key names a change that the job does not ask for (``torch.compile``, ``fp8``, ...); its value is the saved share of
        the plan's step, 0 to 1. Changes that save nothing are left out.
        """
        if self.laid_out is None or self.figures is None:
            return {}
        planned_s = self.laid_out.layout.step_s or 0.0
        steps_s = {
            name: other.step_s(self.laid_out) for name, other in self.figures.alternatives(self.laid_out).items()
        }
        compiled_s = steps_s.get("torch.compile") or math.inf
        saved: dict[str, float] = {}
        for name, step_s in steps_s.items():
            # "torch.compile with fp8" changes more of the script, so it must save more than compiling alone
            least_s = min(planned_s, compiled_s) if name.startswith("torch.compile with") else planned_s
            if step_s is not None and step_s < least_s:
                saved[name] = 1 - step_s / planned_s
        return saved


def plan_by(
    strategy: str, problem: Problem, options: PlanOptions, curves: Mapping[str, StepTime] | None = None
) -> Plan:
    """Return the plan of any strategy but goodput (which has no placement problem), by the strategy's own device choice.

    ``curves``: device type -> step time over samples; None: times are proportional to samples, by the types' capabilities.
    Communication is not included. Raises Infeasible where the strategy has no plan.
    """
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
    """Return the problem that offers exactly ``counts`` (T,) devices, without limits on price, number or throughput.

    The caller has checked that ``counts`` keep these limits.
    """
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
        """Return the maker of candidates for the same job with another goal."""
        return replace(self, options=replace(self.options, goal=goal))

    def cheapest(self, problem: Problem) -> Candidate | None:
        """Return the plan of equal batches (bsp), within the goal's limits, whose samples cost least.

        None where a device type has no price, and where no plan keeps the limits.
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
            if self.job.compile and self.model.layouts is not None and strategy in EAGER:
                left_out[strategy] = Infeasible("torch.compile is not modelled for it")
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
            # A fastest plan that is on one type is no slower than those on another.
            is_type_open = len(overall.option.devices) > 1 or self.goal.objective != "fastest"
            # On one type with known layouts lb-bsp splits equally, as bsp does.
            is_covered_by_bsp = strategy == "lb-bsp" and self.model.layouts is not None
            if is_type_open and not is_covered_by_bsp:
                for single_type in each_type(problem):
                    with suppress(Infeasible):
                        candidates.append(self.best(strategy, single_type))
        if only in (None, "bsp") and candidates and _leaves_room(candidates[0]):
            base_s = candidates[0].option.iteration_s
            for candidate in self._in_groups(problem, candidates[0]):
                # A group may lead only because its figures are without the hooks of DDP or FSDP2; in the emitted script it
                # has DTensor's overhead in their place, so it must lead by more than that, unless time is not what counts.
                wait_s = candidate.split_wait_s()
                by_memory = self.goal.objective == "least-memory"
                if wait_s <= 0.0 or wait_s < base_s - candidate.option.iteration_s or by_memory:
                    candidates.append(candidate)
        if only is not None:
            return candidates
        # On one type an lb-bsp layout has equal shares, so it is a bsp candidate too, which the bsp search may have missed.
        on_one_type = [each for each in candidates if each.layouts and len(each.option.devices) == 1]
        return [*candidates, *(_renamed_bsp(candidate) for candidate in on_one_type)]

    def _in_groups(self, problem: Problem, base: Candidate | None = None) -> list[Candidate]:
        """Return the best plan of each size of groups of devices that hold a replica between them, by powers of two.

        Tensor parallelism stays within a node. Pipeline stages are tried between nodes where ``base``, the best plan of single
        devices, waits for the network or leaves devices of its types unused, and where there is no such plan (None). Where
        even then nothing fits, stages within a node are tried as well, with the fewest stages that fit.
        """
        layouts = self.model.layouts
        if layouts is None:
            return []
        per_node = max(kind.fabric.gpus_per_node for kind in layouts.kinds.values())
        devices = max(device.count for device in problem.devices)
        tensors = [2**power for power in range(1, per_node.bit_length()) if 2**power <= per_node]
        tried = [(tensor, 1) for tensor in tensors]  # (tensor-parallel devices, pipeline stages)
        offered = problem.offered
        if (
            base is None
            or _waits(base.option)
            or any(count < offered[name] for name, count in base.option.devices.items())
        ):
            nodes = -(-devices // per_node)
            # a stage is a single device or a whole node
            tried += [(tensor, 2**power) for power in range(1, nodes.bit_length()) for tensor in {1, *tensors[-1:]}]
        found = [each for degrees in tried if (each := self._best_in_groups(*degrees, problem))]
        if found or base is not None:
            return found
        for pipeline in (2**power for power in range(1, devices.bit_length())):
            found = [each for tensor in (1, *tensors) if (each := self._best_in_groups(tensor, pipeline, problem))]
            if found:
                return found
        return []

    def _on_hosts(self, problem: Problem) -> list[Candidate]:
        """Return the best plan with activations in the hosts' memory and the best with the state there, as far as they fit.

        A plan for which the hosts need more memory than usual ones have is left out, as one whose step does not fit.

        Empty unless the job leaves the use of the hosts' memory to the plan (``offload: auto``).
        """
        layouts, found = self.model.layouts, list[Candidate]()
        if layouts is None or self.job.offload != "auto":
            return []
        for what in ("activations", "optimizer"):
            with suppress(Infeasible, InputError):
                model = replace(self.model, layouts=layouts.on_hosts(what))
                candidate = replace(self, model=model).best("bsp", problem)
                if layouts.usual_hosts_hold(candidate.layouts[0]):
                    found.append(candidate)
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
        """Return the candidate of the strategy ``name`` on its best devices, within the goal's limits.

        Raises Infeasible, with the reason, where there is none: NothingFits for lack of memory, Missed for a broken limit.
        """
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

        ``name`` is that of the strategy. A search under limits says no more than that no plan keeps them; this one, without
        limits, finds by how much they are missed.
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
        """Return the candidate of the strategy ``name`` on its best devices; the goal's limits are not demanded of it yet."""
        layouts = self.model.layouts
        if name in ("bsp", "lb-bsp"):
            return (
                self._search_counts(name, problem)
                if layouts is None
                else self._search_layouts(cast(Split, name), problem)
            )
        if name == "goodput" and self.job.goodput is None:
            raise Infeasible("the job has no goodput section")
        feasible = self._on_types_that_fit(problem)
        if name == "goodput":
            candidate = self._cost_goodput(feasible)
        elif name == "est":
            candidate = self._est_by_determinism(feasible)
        else:
            candidate = self._search_counts(name, feasible)
        if layouts is None:
            return candidate
        # These strategies hold a whole model, and the samples of their largest pass.
        pass_samples = self.job.batch_size  # a turn of est and an iteration of elastic-bsp take one mini-batch each
        rows = candidate.plan.assignments
        sums = any(row.ests_per_device > 1 for row in rows)  # the workers of a device add up their gradients
        if name == "goodput":
            pass_samples = max(-(-row.local_batch_size // (row.accumulation_steps + 1)) for row in rows)
            sums = any(row.accumulation_steps for row in rows)
        needed_bytes = layouts.whole_bytes(candidate.option.devices, pass_samples, sums=sums)
        return replace(candidate, option=candidate.option.model_copy(update={"memory_bytes": needed_bytes}))

    def _search_counts(self, name: str, problem: Problem) -> Candidate:
        """Return the candidate of the strategy ``name`` on the device counts that the branch-and-bound search finds best.

        Raises Infeasible, with the strategy's own reason, where no counts have a plan.
        """
        builders = {"est": self._cost_est, "elastic-bsp": self._cost_elastic_bsp}
        build = builders.get(name, partial(self._cost_split, name))
        bounds = Bounds(self.model, self.goal, problem, name)

        def evaluate_counts(counts: Counts, best_value: float) -> tuple[float, Candidate] | None:
            """Return (the goal's value, candidate) on ``counts`` (T,) devices.

            None where there is no plan, where it leaves some of the devices out, and where it can be no better than
            ``best_value``.
            """
            if bounds(counts, counts) >= best_value:
                return None
            try:
                candidate = build(on_counts(problem, counts), True)  # quick: without communication settings
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
        """Return the error that explains why the strategy ``name`` has no plan on any devices.

        It is the error of the strategy's own choice of devices, which knows the reason.
        """
        try:
            plan_by(name, problem, self.options, self.model.curves)
        except Infeasible as error:
            return error
        return Infeasible("no devices that the constraints allow have a step of it")

    def _with_proof(self, plan: Plan, problem: Problem, best: Best[Candidate]) -> Plan:
        """Return the plan with the search's gap and time, and the offered devices that it leaves out.

        For a balanced split the step of an equal split on all devices is added, to compare; it may be infeasible (None).
        """
        unused = problem.spare(best.counts)
        update = {**_proof_fields(best.gap), "solve_seconds": best.seconds}
        if plan.superstep is not None:
            is_proven = best.gap == 0  # else the devices may have been left out for lack of time
            update["superstep"] = plan.superstep.model_copy(update={"left_out": unused if is_proven else {}})
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

    def usual(self, problem: Problem, used: Mapping[str, int]) -> dict[str, Option]:
        """Return the baselines to a plan, which one would run without it: name -> figures.

        They are equal splits with default communication settings, over all devices, over all devices of each type, and over
        those that the plan uses (``used``: type name -> count). A model with known memory is sharded and checkpointed only as
        far as memory demands; baselines that do not fit are left out.
        """
        baselines: dict[str, Option] = {}
        subproblems = [problem, *each_type(problem)]
        if used not in [one.offered for one in subproblems]:
            subproblems.append(on_counts(problem, problem.counts(used)))
        for subproblem in subproblems:
            with suppress(Infeasible):
                option = self._baseline(subproblem)
                mix_name = " + ".join(f"{count} {name}" for name, count in option.devices.items())
                if len(problem.devices) > 1 and option.devices == problem.offered:
                    mix_name = f"all {sum(option.devices.values())}"
                how = option.order if self.model.layouts is not None and option.order else "equal batches"
                baselines.setdefault(f"{mix_name} with {how}", option)
        return baselines

    def _baseline(self, problem: Problem) -> Option:
        """Return the figures of the equal split over all devices of ``problem``, with default communication settings.

        Raises Infeasible where it does not fit into memory.
        """
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
            numbers = {2**power for power in range(device.count.bit_length())} | {device.count}
            for number in sorted(numbers):
                counts = tuple(number if index == type_index else 0 for index in range(len(problem.devices)))
                if problem.allows(counts):
                    with suppress(Infeasible):
                        options.append(self._equal_split(problem, counts).option)
        return options

    def _equal_split(self, problem: Problem, counts: Counts) -> Candidate:
        """Return the equal split on ``counts`` (T,) devices; with default communication settings where layouts are known."""
        if (layouts := self.model.layouts) is not None:
            return self._cost_layout("bsp", problem, layouts.equally(problem, counts), best=False)
        return self._cost_split("bsp", on_counts(problem, counts), True)

    def progress(self, option: Option) -> float:
        """Return goodput in samples per second where a noise scale is known, else the plain sample throughput."""
        return option.throughput * self.job.batch_size if option.goodput_per_s is None else option.goodput_per_s

    def _cost_split(self, strategy: str, problem: Problem, quick: bool) -> Candidate:
        """Return the equal (bsp) or balanced (lb-bsp) split over the devices of ``problem``.

        ``quick``: leave the best communication settings out of the result; its times are the same.
        """
        curves = self.model.curves
        plan = plan_bsp(problem, curves) if strategy == "bsp" else plan_lb_bsp(problem, curves, synchronise=False)
        return self._cost_plan(plan, problem, self._exposed_synchronous(plan, plan.iteration_s, quick), "D0")

    def _search_layouts(self, strategy: Split, problem: Problem) -> Candidate:
        """Return the candidate of the best layout of a traced model over all allowed devices.

        Its ``layouts`` list that layout first, then the next best. Raises Infeasible where no layout fits or keeps the limits.
        """
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
            "local_batch_sizes": layout.local_batch_sizes,
            "passes": layout.passes,
            "host_bound": layout.host_bound,
        }
        option = candidate.option.model_copy(update={**interval, **figures})
        price = None if layout.price_per_sample is None else layout.price_per_sample * settled_ratio
        mfu = layouts.mfu(laid_out, option.iteration_s)
        settled = {"step_s": option.iteration_s, "price_per_sample": price, "mfu": mfu, **interval}
        return replace(
            candidate,
            option=option,
            laid_out=laid_out,
            figures=layouts,
            layouts=(layout.model_copy(update=settled),),
        )

    def _est_by_determinism(self, problem: Problem) -> Candidate:
        """Return the candidate of logical workers (ESTs), with the level of determinism that its results keep.

        D2: bitwise the same results on devices of any types; D1: on any number of devices of one type; D0: on this placement
        alone. Several types are searched where D2 is possible, else one type (D1); where one type does not suffice, several
        without a promise (D0). With ``options.top_k`` above 1 the plan lists alternatives.
        """
        has_same_bits = self.job.constraints.determinism == "D2" or self.model.d2_eligible is True
        is_mixed = has_same_bits and not problem.single_type
        searched = problem if is_mixed else replace(problem, single_type=True)
        try:
            candidate = self._search_counts("est", searched)
        except Infeasible:
            if problem.single_type or is_mixed:
                raise
            # On several types without D2 the bits are those of this placement alone: D0.
            candidate = self._search_counts("est", problem)
            has_same_bits = False
        kept: Kept = "D2" if has_same_bits else "D0"
        if len(candidate.option.devices) == 1 and not is_mixed:
            kept = "D1"
        candidate = replace(candidate, option=candidate.option.model_copy(update={"determinism": kept}))
        if self.options.top_k > 1:
            ranked = plan_by("est", searched, self.options)
            own_counts = counts_of(problem, candidate.plan)
            alternatives = [plan for plan in (ranked, *ranked.alternatives) if counts_of(problem, plan) != own_counts]  # type: ignore[arg-type]
            candidate = replace(
                candidate,
                plan=candidate.plan.model_copy(update={"alternatives": alternatives[: self.options.top_k - 1]}),
            )
        return candidate

    def _cost_est(self, problem: Problem, quick: bool) -> Candidate:
        """Return the candidate of logical workers (ESTs) on exactly the devices of ``problem``, at least one on each.

        ``quick``: leave the best communication settings out of the result. Raises Infeasible where the devices cannot take the
        job's workers.
        """
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
        exposed = self._exposed_synchronous(plan, last_pass_s, quick)
        communication = self.model.communication
        if exposed is not None and communication is not None:
            exposed = communication.ordered(device_counts(plan), exposed)
        hooks_s = self._hooks_s(row.device_type for row in plan.assignments) if sum(counts) > 1 else 0.0
        return self._cost_plan(plan, problem, exposed, "D1", hooks_s=hooks_s)

    def _hooks_s(self, types: Iterable[str]) -> float:
        """Return the seconds by which hooks on gradients lengthen a step of exchanging processes, on the slowest of types."""
        layouts = self.model.layouts
        if layouts is None:
            return 0.0
        return max(layouts.hooks_s(name, self.job.batch_size) for name in types)

    def _cost_goodput(self, problem: Problem) -> Candidate:
        """Return the candidate of the goodput plan on the types with a fitted model.

        What the fitted step takes beyond compute counts as exposed communication. Raises Infeasible where no offered type has a
        fitted model, or no batch is possible.
        """
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
        """Return the candidate of the ElasticBSP plan on exactly the devices of ``problem``.

        Its barrier is chosen for iterations that include each worker's transfers and overhead. ``quick``: do not plan for
        compute alone as well, by which the step is divided into compute, communication and overhead.
        """
        communication, options = self.model.communication, self.options
        overhead_s = self.model.other_s(offer.name for offer in problem.devices)
        overhead_s += self._hooks_s(offer.name for offer in problem.devices)
        build = partial(plan_elastic_bsp, lookahead=options.lookahead, max_gap=options.max_gap, all_devices=True)
        counts = {offer.name: offer.count for offer in problem.devices}
        exposures: dict[str, Exposed] = {}  # by device type
        slowed_devices = []  # with the capability that is left beside transfers and overhead
        for device in problem.devices:
            iteration_s = 1 / device.capability_per_s
            exposed = (
                Exposed(default_s=0.0, best_s=0.0)
                if communication is None
                else communication.asynchronous(counts, float(iteration_s))
            )
            whole_s = iteration_s + Fraction(exposed.best_s) + Fraction(self.model.other_s([device.name]))
            whole_s += Fraction(self._hooks_s([device.name]))
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
        """Return the exposed communication of a plan's synchronous replicas; None where communication is not known.

        ``pass_s``: seconds of the step's last pass, during which gradients travel; ``quick``: find the seconds alone, without
        the settings that reach them.
        """
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
        hooks_s: float = 0.0,
        update: Mapping[str, object] | None = None,
    ) -> Candidate:
        """Return the candidate of a plan: its step is the sum of compute, exposed communication and other time.

        The step's interval (where an error of the compute times is known), goodput and price follow from it.

        Args:
            plan: the plan, whose ``iteration_s`` is without communication unless ``compute_s`` says otherwise.
            problem: the placement problem, with the types' capabilities and prices.
            exposed: communication beside compute; None: not known, counted as 0 s.
            kept: the determinism level of the results.
            compute_s: seconds of compute in a step; None: the plan's ``iteration_s``.
            other_s: seconds of neither compute nor communication; None: from the job model.
            hooks_s: seconds that hooks of DDP on the host add to these.
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
        other_s += hooks_s
        step_s = computing_s + wait.best_s + other_s
        if wait.low_s is not None and wait.high_s is not None:
            less_s, more_s = less_s + wait.best_s - wait.low_s, wait.high_s - wait.best_s
        low_s: float | None = None
        high_s: float | None = None
        compute_error = self.model.error(devices)
        if compute_error is not None:
            error = math.hypot(compute_error, self.model.drift)
            if error < math.inf:
                low_s = (step_s - less_s) * max(0.0, 1 - error)
                high_s = (step_s + more_s) * (1 + error)
        staleness = 0 if plan.superstep is None else plan.superstep.iteration_gap
        option = Option(
            strategy=plan.strategy,
            devices=devices,
            compute_s=computing_s,
            communication_s=None if exposed is None else exposed.best_s,
            other_s=other_s,
            iteration_s=step_s,
            throughput=problem.max_workers / step_s,
            low_s=low_s,
            high_s=high_s,
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
    layout = candidate.layouts[0]
    holds_all = layout.sharding in ("none", "ddp") and layout.checkpointing == "none" and layout.passes == 1
    return not holds_all or _waits(candidate.option)


def _waits(option: Option) -> bool:
    """Return whether exposed communication is more than a tenth of an option's step."""
    return (option.communication_s or 0.0) > _EXPOSED * option.iteration_s


def _renamed_bsp(candidate: Candidate) -> Candidate:
    """Return a copy of a candidate with equal shares whose strategy is called "bsp"."""
    update = {"strategy": "bsp"}
    return replace(
        candidate, plan=candidate.plan.model_copy(update=update), option=candidate.option.model_copy(update=update)
    )


def _compute_elasticities(plan: Plan, problem: Problem, share: float) -> dict[str, float]:
    """Return device type -> elasticity of the step to its compute time: by how many % the step grows if that grows by 1 %.

    The elasticities sum to ``share``, the share of compute in the step. Where work is split by speed, types weigh by their
    share of the work; else only types (nearly) as slow as the slowest count. Empty where no type has a weight.
    """
    speeds = {device.name: float(device.capability_per_s) for device in problem.devices}
    is_split_by_speed = plan.strategy in ("lb-bsp", "elastic-bsp")
    weights: dict[
        str, float
    ] = {}  # by device type: its work where that is split by speed, else its longest compute time
    for row in plan.assignments:
        speed = speeds.get(row.device_type, 1.0)
        before = weights.get(row.device_type, 0.0)
        if plan.strategy == "elastic-bsp":
            weights[row.device_type] = row.devices * speed + before
        elif is_split_by_speed:
            weights[row.device_type] = float(row.devices * row.local_batch_size) + before
        else:
            compute_s = row.compute_s or row.local_batch_size / plan.batch_size / speed
            weights[row.device_type] = max(compute_s, before)
    if not is_split_by_speed:
        slowest = max(weights.values(), default=0.0)
        weights = {name: weight for name, weight in weights.items() if weight >= _NEAR_SLOWEST * slowest}
    total_weight = sum(weights.values())
    return {name: share * weight / total_weight for name, weight in weights.items()} if total_weight else {}


def _proof_fields(gap: float) -> dict[str, object]:
    """Return the fields ``status`` and ``gap`` of a plan whose search ended with this relative gap.

    A gap up to 1e-9 counts as rounding, so that the plan is proven optimal; an infinite one (no bound is known) becomes a large
    number, which JSON can hold.
    """
    return {"status": "feasible" if gap > 1e-9 else "optimal", "gap": min(gap, _UNKNOWN_GAP)}
