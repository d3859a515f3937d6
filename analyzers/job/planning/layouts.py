"""The best layout of a model on a job's devices: sharding, checkpointing, batches and passes together.

Combinations of devices, ``replicate x shard``, checkpointing and passes are enumerated, each costed by
:class:`~.layout_figures.LayoutFigures`. The samples of a step are the job's, whatever the devices. What does not fit stays in
the list with what it lacks. A shard group of HSDP is of one type. Start at :meth:`Layouts.search`; :func:`layouts_of` makes
them of a job. It loads torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from ddltool.analyzers.job.placement.problem import Problem
from ddltool.analyzers.job.placement.steps import Counts
from ddltool.analyzers.job.planning.device_search import best_devices
from ddltool.analyzers.job.planning.layout_figures import (
    GIB,
    SURE,
    WAYS,
    WAYS_ON_HOST,
    WHOLE,
    DeviceKind,
    LayoutCandidate,
    LayoutFigures,
    gib,
)
from ddltool.analyzers.job.planning.options import Goal
from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.costs.model import cost_model
from ddltool.analyzers.step.costs.offloading import demand_host_update
from ddltool.analyzers.step.costs.parallel import parallel_curve
from ddltool.analyzers.step.costs.predict import usable_bytes
from ddltool.analyzers.step.costs.saving import split_way
from ddltool.analyzers.step.costs.setting import ParallelDegrees, Setting
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.analyzers.step.costs.work import WorkCurve, work_of
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.decision import LEAST_GAIN, Layout, NothingFits
from ddltool.device import GIVEN, DeviceTable
from ddltool.errors import Infeasible, InputError
from ddltool.job import Job
from ddltool.shipped import calibration
from ddltool.units import show_bytes

# What people run without a tool.
_PLAIN = ("none", "ddp", "fsdp")
_SIMPLER = {"none": 0, "ddp": 1, "fsdp": 2, "hsdp": 3, "zero2": 4}
# How many layouts get their best buckets or prefetch before one is picked, and up to how many times the best default step.
_SETTLED, _SETTINGS_GAIN = 8, 1.5
# Layouts listed that do not fit.
_LISTED = 8
# Of the devices that would hold a step, the most that are looked for.
_MOST_SOUGHT = 4096


@dataclass(frozen=True, kw_only=True)
class Layouts(LayoutFigures):
    """Searches the layouts of one job for the best one."""

    def in_groups(self, degrees: ParallelDegrees) -> Layouts | None:
        """Return the layouts of groups of devices that hold a replica between them; None where the model is not divided so.

        None, too, for what is to be in the hosts' memory. Only types of which a node holds a whole tensor group are left.
        """
        kinds = {
            name: replace(kind, price_per_hour=kind.price_per_hour and kind.price_per_hour * degrees.gpus)
            for name, kind in self.kinds.items()
            if kind.fabric.gpus_per_node >= degrees.tensor
        }
        if not kinds or self.offload or self.ways != WAYS:  # nothing on a host is modelled for groups
            return None
        fabric = next(iter(kinds.values())).fabric
        try:  # as many passes as stages are in flight at a time at most
            work = parallel_curve(self.work, Setting(fabric=fabric, accumulation=degrees.pipeline, layout=degrees))
        except InputError:
            return None
        return self.changed(work=work, kinds=kinds, degrees=degrees, saves_on_host=False)

    def on_hosts(self, what: str = "optimizer") -> Layouts:
        """Return the layouts with parameters, gradients and optimizer state in the hosts' memory, or with ``activations``.

        Raises InputError for a model without blocks, for an optimizer that has no update there, and for activations of a
        compiled step.
        """
        if not self.work.lifetimes(1).blocks:
            raise InputError("--offload", "the model has no list of blocks to gather one by one", "give none")
        if what == "activations":
            if self.compile:
                raise InputError("--offload", "activations of a compiled step are not modelled", "give none")
            return self.changed(ways=WAYS_ON_HOST, saves_on_host=True)
        demand_host_update(self.optimizer)
        return self.changed(offload=True, saves_on_host=False)

    def search(
        self,
        problem: Problem,
        goal: Goal | None = None,
        *,
        equal: bool = False,
        limit_s: float = 5.0,
        plays_all: bool = False,
    ) -> tuple[list[LayoutCandidate], float]:
        """Return (the layouts to list, gap): the best layout first, those that do not fit memory last.

        ``equal``: devices that take part take equal shares. The best has been played through torch's allocator on each type
        (``plays_all``: every layout, which is slow); all are costed with default settings of communication. The gap is relative
        to a lower bound of every layout's value; infinite where that is 0. Raises NothingFits; Infeasible where what fits
        breaks a limit of the goal.
        """
        goal = goal or Goal(step_samples=self.total)
        fitting, too_large, value = list[LayoutCandidate](), list[LayoutCandidate](), self.value(goal)
        # 1. Search the numbers of devices, by bounds on what any layout on them can reach.
        start_counts = _largest_counts(problem, self.total)
        all_counts = start_counts[0]
        # One node of each type: nothing leaves it.
        node_sizes = [min(self._between(device.name).gpus_per_node, device.count) for device in problem.devices]
        start_counts += [tuple(row) for row in np.diag(node_sizes).tolist()]

        def best_on(counts: Counts, best_value: float) -> tuple[float, list[LayoutCandidate]] | None:
            """Return the best value on so many devices of each type, and its layouts; None: none is below ``best_value``."""
            # Of all devices every layout is shown; of fewer what could be better, or simpler and as good as that.
            value_limit = best_value if counts != all_counts else math.inf
            if self._lower_bound(problem, counts, counts, goal) >= value_limit:
                return None
            fits, misfits = self._layouts_on(problem, counts, equal, goal, value_limit * (1 + LEAST_GAIN) ** 2)
            if plays_all:
                missing = [self._missing_bytes(candidate) for candidate in fits]
                misfits = [*misfits, *(_refused(*pair) for pair in zip(fits, missing, strict=True) if pair[1])]
                fits = [candidate for candidate, lacking in zip(fits, missing, strict=True) if not lacking]
            too_large.extend(misfits if counts == all_counts else [])
            fitting.extend(fits)
            return (value(_simplest(fits, value).layout) if fits else math.inf), fits

        def bound(low: Counts, high: Counts) -> float:
            """Return a lower bound of the value on device counts between ``low`` and ``high``."""
            return self._lower_bound(problem, low, high, goal)

        spare = goal.objective != "cheapest"
        best = best_devices(problem, best_on, bound, most=self.total, limit_s=limit_s, first=start_counts, spare=spare)
        if not fitting and (too_large or not goal.limited):
            raise self._nothing_fits(too_large)
        if best is None:
            raise Infeasible("what fits is slower or dearer than the job allows")
        # 2. Pick one: the allocator must have room for it, then communication settings are compared.
        try:
            pick = self._pick_simplest(fitting, too_large, goal, equal)
        except NothingFits:
            # Layouts of less value that the allocator holds were passed over for those that it does not.
            if plays_all:
                raise
            return self.search(problem, goal, equal=equal, limit_s=limit_s, plays_all=True)
        pick = self._pick_with_settings(pick, fitting, goal)
        # 3. List the others: all layouts on the same devices, the best of other devices, and what nearly fits.
        counts = problem.counts(pick.layout.devices)
        same_devices = self._layouts_on(problem, counts, equal, goal)[0]
        others = [candidate for candidate in [*same_devices, *fitting] if candidate.layout != pick.layout]
        others.sort(key=lambda candidate: value(candidate.layout))

        def is_held(candidate: LayoutCandidate) -> bool:
            """Return whether the allocator has room for a layout; one that it refuses is among what nearly fits."""
            if missing_bytes := self._missing_bytes(candidate):
                too_large.append(_refused(candidate, missing_bytes))
            return not missing_bytes

        shown = _distinct(others, is_held)
        closest = _distinct(sorted(too_large, key=lambda candidate: candidate.layout.missing_bytes))
        # Plain DDP is what people ask for first, however much it lacks.
        plain = [candidate for candidate in closest[_LISTED:] if simplicity(candidate.layout)[:2] == (1, 0)]
        gap = value(pick.layout) / best.bound - 1 if best.bound else math.inf
        return [pick, *shown, *closest[:_LISTED], *plain], max(0.0, gap)

    def _pick_simplest(
        self, fitting: list[LayoutCandidate], too_large: list[LayoutCandidate], goal: Goal, equal: bool
    ) -> LayoutCandidate:
        """Return the simplest of the best layouts that fit in the allocator too; moves those that do not to ``too_large``.

        Adds to ``fitting`` layouts in more passes, and with recomputation that a solver chose. ``equal``: devices take equal
        shares. Raises NothingFits where the allocator holds none.

        Each set of devices enters with one layout, the simplest of the best on it, so that what else is offered does not
        change the layout on these devices.
        """
        value, is_recomputation_solved = self.value(goal), False
        while fitting:
            by_devices = dict[tuple[tuple[str, int], ...], list[LayoutCandidate]]()
            for candidate in fitting:
                by_devices.setdefault(tuple(candidate.layout.devices.items()), []).append(candidate)
            pick = _simplest([_simplest(candidates, value) for candidates in by_devices.values()], value)
            if missing_bytes := self._missing_bytes(pick):
                fitting.remove(pick)
                too_large.append(_refused(pick, missing_bytes))
                # Smaller passes may fit: as many as one sample less of any device takes.
                sizes = [(size, -(-size // pick.layout.passes)) for size in pick.layout.local_batch_sizes.values()]
                if smaller := [-(-size // (each - 1)) for size, each in sizes if each > 1]:
                    shape = pick.layout.devices, pick.sharding, pick.recompute, equal
                    retry = self._fastest_batching(*shape, least_passes=min(smaller))
                    if retry is not None and not retry.layout.missing_bytes:
                        fitting.append(retry)
                continue
            if pick.recompute == "none" or goal.objective == "least-memory" or is_recomputation_solved:
                return pick
            is_recomputation_solved = True
            everything_on_host = self.ways != WAYS
            # Whether the solver may save on the host: on the device first, unless that is ruled out.
            for on_host in (False, True)[everything_on_host : 1 + self.saves_on_host]:
                # fitting[-1] is what was just found on the device, if anything
                if on_host and not everything_on_host and not self._gains_without_recomputation(fitting[-1], pick):
                    break
                fitting += filter(None, [self._with_solved_recomputation(pick, on_host)])
        raise self._nothing_fits(too_large)

    def _gains_without_recomputation(self, best: LayoutCandidate, pick: LayoutCandidate) -> bool:
        """Return whether a step in which nothing were computed again would be worth another layout than ``best``."""
        shape = pick.layout.devices, pick.sharding, "none", pick.layout.passes, pick.rows
        least = self._cost(*shape)
        return least is not None and (best.layout.step_s or 0.0) > (least.layout.step_s or 0.0) * (1 + LEAST_GAIN)

    def _pick_with_settings(self, pick: LayoutCandidate, fitting: list[LayoutCandidate], goal: Goal) -> LayoutCandidate:
        """Return the best layout once each has its own best buckets or prefetch: ``pick``, or one of nearly its value.

        Another one must gain at least ``LEAST_GAIN``, for ``pick`` is the simplest.
        """
        value = self.value(goal)
        if goal.objective == "least-memory":
            return pick
        near = [candidate for candidate in fitting if value(candidate.layout) <= value(pick.layout) * _SETTINGS_GAIN]
        best, best_value = pick, value(self._with_settings(pick)) / (1 + LEAST_GAIN)
        for other in sorted(near, key=lambda candidate: value(candidate.layout))[:_SETTLED]:
            settled_value = value(self._with_settings(other))
            if settled_value < best_value and not self._missing_bytes(other):
                best, best_value = other, settled_value
        return best

    def _layouts_on(
        self, problem: Problem, counts: Counts, equal: bool, goal: Goal, limit: float = math.inf
    ) -> tuple[list[LayoutCandidate], list[LayoutCandidate]]:
        """Return the layouts on exactly ``counts`` devices: those that fit, of value up to ``limit``, and those too large.

        Under a finite limit recomputation grows only until a layout fits in one pass, because more of it takes longer.
        ``equal``: every device takes as many samples.
        """
        # the value of the objective "fastest" is the seconds of a step, which can be bounded before a layout is costed
        value, limit_s = self.value(goal), limit if goal.objective == "fastest" else math.inf
        devices = problem.named(counts)
        fits, too_large = list[LayoutCandidate](), list[LayoutCandidate]()
        for sharding in self._shardings(counts, problem):
            if self._exceeds(devices, sharding, goal, limit):
                continue
            for recompute in self._recomputations():
                candidate = self._fastest_batching(
                    devices, sharding, recompute, equal, lambda layout: value(layout) <= limit, limit_s=limit_s
                )
                if candidate is not None:
                    (too_large if candidate.layout.missing_bytes else fits).append(candidate)
                    if limit < math.inf and candidate.layout.passes == 1 and not candidate.layout.missing_bytes:
                        break
        return fits, too_large

    def _exceeds(self, devices: Mapping[str, int], sharding: Sharding, goal: Goal, limit: float) -> bool:
        """Return whether one collective of all gradients alone exceeds ``limit``; buckets and units of them take longer."""
        if limit == math.inf or sum(devices.values()) == 1 or goal.objective == "least-memory":
            return False
        size_bytes = self._exchanged_bytes(next(iter(devices)), sharding)
        group = self._process_group(devices, sharding)
        step_s = SURE * (group.reduce_scatter_s(size_bytes) if sharding.gathers else group.all_reduce_s(size_bytes))
        price_per_hour = sum(count * (self.kinds[name].price_per_hour or 0.0) for name, count in devices.items())
        return goal.of(step_s, sum(devices.values()), price_per_hour * step_s / 3600) > limit

    def plainest(self, problem: Problem) -> LayoutCandidate:
        """Return what a careful engineer would run: an equal split over all devices, the fastest of DDP and FSDP2.

        Where none fits, the fastest of those on a single type; at last, the best layout.
        """
        single_types = [replace(problem, devices=(device,)) for device in problem.devices]
        for problems in ([problem], single_types) if len(single_types) > 1 else ([problem],):
            plain_layouts = [candidate for part in problems for candidate in self._plainest_fitting(part)]
            if plain_layouts:
                return min(plain_layouts, key=lambda candidate: candidate.layout.step_s or math.inf)
        return self.search(problem)[0][0]

    def equally(self, problem: Problem, counts: Counts) -> LayoutCandidate:
        """Return an equal split on exactly these devices, by tensors alone. Raises Infeasible where none fits."""
        fits, _ = self._layouts_on(problem, counts, True, Goal())
        if not fits:
            raise Infeasible("nothing fits on these devices")
        return _simplest(fits, self.value(Goal()))

    def _plainest_fitting(self, problem: Problem) -> list[LayoutCandidate]:
        """Return the simplest of the fastest plain layouts that the allocator holds; empty where none fits."""
        most = _largest_counts(problem, self.total)
        fitting = [candidate for counts in most for candidate in self._layouts_on(problem, counts, True, Goal())[0]]
        fitting = [candidate for candidate in fitting if candidate.sharding.kind in _PLAIN] or fitting
        while fitting:
            plainest = _simplest(fitting, self.value(Goal()))
            if not self._missing_bytes(plainest):
                return [plainest]
            fitting.remove(plainest)
        return []

    def value(self, goal: Goal) -> Callable[[Layout], float]:
        """Return the function that layouts are ranked by, the least first: the goal's value, or bytes for least memory."""

        def value_of(layout: Layout) -> float:
            """Return a layout's value; infinite where it breaks a limit of the goal."""
            price = None if layout.price_per_sample is None else layout.price_per_sample * self.total
            devices = sum(layout.devices.values()) * self.degrees.gpus
            goal_value = goal.of(layout.step_s or math.inf, devices, price)
            by_memory = goal.objective == "least-memory" and goal_value < math.inf
            return max(layout.memory_bytes.values()) if by_memory else goal_value

        return value_of

    def _lower_bound(self, problem: Problem, low: Counts, high: Counts, goal: Goal) -> float:
        """Return a lower bound of the goal's value over layouts on counts from ``low`` to ``high`` of each type.

        All devices compute at full speed, all the time, and no step is shorter than all gradients take on the slowest
        network card that they must pass.
        """
        if not any(high) or sum(low) > self.total:
            return math.inf
        if goal.objective == "least-memory":
            return 0.0
        mean_samples = -(-self.total // sum(device.count for device in problem.devices))
        samples_per_s = low_price = 0.0
        least_price = least_sample_s = card_bytes_per_s = math.inf  # least_price: hourly price over samples per second
        low_counts = problem.named(low)
        spans_types = len(low_counts) > 1
        for name, count in problem.named(high).items():
            low_count = low_counts.get(name, 0)
            device_per_s = 1 / self._sample_s(name, mean_samples)
            least_sample_s = min(least_sample_s, 1 / device_per_s)
            price_per_hour, fabric = self.kinds[name].price_per_hour or 0.0, self._between(name)
            if low_count and (spans_types or low_count > fabric.gpus_per_node):
                card_bytes_per_s = min(card_bytes_per_s, math.inf if fabric.measured else fabric.between.bytes_per_s)
            samples_per_s += count * device_per_s
            low_price += low_count * price_per_hour
            least_price = min(least_price, price_per_hour / device_per_s)
        # Samples are whole: one device at least takes their mean, rounded up.
        most_samples = math.ceil(self.total / min(sum(high), self.total))
        compute_s = SURE * max(self.total / samples_per_s, least_sample_s * most_samples)
        step_s = max(compute_s, SURE * self._exchanged_bytes(problem.devices[0].name, WHOLE) / card_bytes_per_s)
        return goal.of(step_s, max(sum(low), 1), max(low_price * step_s, SURE * least_price * self.total) / 3600)

    def _shardings(self, counts: Counts, problem: Problem) -> list[Sharding]:
        """Return the ways in which ``counts`` (T,) devices can share the state: parameters, gradients, optimizer.

        HSDP's shards are powers of two, nodes, and all devices of a type, where they divide the devices of every type.
        """
        devices = sum(counts)
        used_counts = [count for count in counts if count]
        per_node = [self._between(device.name).gpus_per_node for device in problem.devices]
        if self.offload:  # only what gathers its parts can keep them elsewhere
            sharers = max(min(count, room) for count, room in zip(counts, per_node, strict=True))  # on the fullest host
            sharded = (
                self.changed(offload=False)._shardings(counts, problem) if devices > 1 else [Sharding(kind="fsdp")]
            )
            return [replace(each, on_host=sharers) for each in sharded if each.gathers]
        if devices == 1:
            return [Sharding(kind="none")]
        common_divisor = math.gcd(*used_counts)
        sizes = {2**power for power in range(1, devices.bit_length())} | {*used_counts, *per_node}
        kinds: list[Sharding] = [Sharding(kind="ddp")]
        if self.work.lifetimes(1).blocks:
            kinds += [Sharding(kind="fsdp", shard=devices), Sharding(kind="zero2", shard=devices)]
            hybrid_sizes = [size for size in sorted(sizes) if 1 < size < devices and common_divisor % size == 0]
            kinds += [Sharding(kind="hsdp", shard=size) for size in hybrid_sizes]
        return kinds

    def _nothing_fits(self, lacking: Sequence[LayoutCandidate]) -> NothingFits:
        """Return the error that names the bytes that the closest layout lacks, and the devices that would hold the model."""
        closest = _distinct(sorted(lacking, key=lambda candidate: candidate.layout.missing_bytes))
        if not closest:
            return NothingFits(f"no devices take {self.total} samples", [])
        layout = closest[0].layout
        name = max(layout.devices, key=lambda each: -self.kinds[each].usable_bytes)
        usable = self.kinds[name].usable_bytes
        needed = show_bytes(usable + layout.missing_bytes)  # of tensors, or of what torch's allocator reserves for them
        device_text = f"each of {layout.devices_text}" if sum(layout.devices.values()) > 1 else f"one {name}"
        text = (
            f"memory: one sample on {device_text} takes {needed} in a process ({layout.text}), "
            f"and each {name} has {show_bytes(usable)} for it: {gib(layout.missing_bytes)} missing"
        )
        recompute = self._recomputations()[-1]
        whole_bytes = self._peak(Sharding(kind="none"), recompute, 1)
        ways = [f"one device of {math.ceil(whole_bytes / GIB) + 1} GiB"]
        if self.work.lifetimes(1).blocks:
            shard_counts = (2**power for power in range(1, _MOST_SOUGHT.bit_length()))
            peaks = ((n, self._peak(Sharding(kind="fsdp", shard=n), recompute, 1)) for n in shard_counts)
            shards_needed = next((n for n, peak_bytes in peaks if peak_bytes <= usable), None)
            if shards_needed is not None:
                ways.insert(0, f"{shards_needed} {name} (FSDP2, {split_way(recompute)[0]} checkpointing)")
        layouts = [candidate.layout for candidate in closest[:_LISTED]]
        return NothingFits(f"{text}; it would fit on {' or '.join(ways)}", layouts)

    def holds(self, problem: Problem) -> bool:
        """Return whether all devices, or all of a type where they may not mix, hold a sample each in some layout."""
        way = self._recomputations()[-1]
        return any(
            self._peak(sharding, way, 1)
            <= min(self.kinds[kind.name].usable_bytes for kind, n in zip(problem.devices, counts, strict=True) if n)
            for counts in _largest_counts(problem, self.total)
            for sharding in self._shardings(counts, problem)
        )


def simplicity(layout: Layout) -> tuple[int, int, int, int]:
    """Return the key by which layouts are simple, simplest first: sharding, checkpointing, passes, number of devices."""
    kind = "zero2" if layout.sharding == "fsdp" and not layout.reshard_after_forward else layout.sharding
    checkpointing = ("none", "selective", "full", "chosen").index(layout.checkpointing) + 4 * bool(layout.activations)
    return _SIMPLER[kind], checkpointing, layout.passes, sum(layout.devices.values())


def _simplest(candidates: Sequence[LayoutCandidate], value: Callable[[Layout], float]) -> LayoutCandidate:
    """Return the simplest of the layouts as good as the best."""
    best_value = min(value(candidate.layout) for candidate in candidates)
    as_good = [candidate for candidate in candidates if value(candidate.layout) <= best_value * (1 + LEAST_GAIN)]
    return min(as_good, key=lambda candidate: (*simplicity(candidate.layout), value(candidate.layout)))


def _refused(candidate: LayoutCandidate, missing_bytes: float) -> LayoutCandidate:
    """Return a layout that lacks so many bytes."""
    layout = candidate.layout.model_copy(update={"missing_bytes": missing_bytes, "step_s": None})
    return replace(candidate, layout=layout)


def _distinct(
    candidates: Iterable[LayoutCandidate], is_shown: Callable[[LayoutCandidate], bool] = lambda _: True
) -> list[LayoutCandidate]:
    """Return the first of each kind of layout on the same types, of those for which ``is_shown`` holds.

    A kind is how the state is sharded and what is recomputed or saved on the host.
    """
    kept: dict[tuple[object, ...], LayoutCandidate] = {}
    for candidate in candidates:
        layout = candidate.layout
        how = layout.checkpointing, bool(layout.activations)
        key = layout.sharding, layout.replicate > 1, layout.reshard_after_forward, *how, *layout.devices
        if key not in kept and is_shown(candidate):
            kept[key] = candidate
    return list(kept.values())


def _largest_counts(problem: Problem, total: int) -> list[Counts]:
    """Return the largest sets of devices that the constraints take: of all types, or of each where they may not mix."""
    types = problem.fastest_first
    type_sets = [[kind] for kind in types] if problem.single_type else [types]
    return [
        tuple(problem.with_added(type_set, total)) for type_set in type_sets if any(problem.with_added(type_set, total))
    ]


def job_work(job: Job) -> WorkCurve:
    """Return the traced step of a job's model at any batch size, traced once. Raises InputError where it cannot be."""
    numerics = Numerics(job.precision, job.channels_last)
    return _work(str(job.model), numerics, job.sequence_length, job.lora, job.attention)


@cache
def _work(
    source: str, numerics: Numerics, sequence_length: int | None, lora: int | None, attention: str | None
) -> WorkCurve:
    """Return the traced step of a model, one trace for all jobs that train it alike."""
    return work_of(source, numerics, sequence_length, lora, attention)


def layouts_of(job: Job, table: DeviceTable, fabrics: Mapping[str, Fabric]) -> Layouts | None:
    """Return the layouts of a job, all of whose types ``table`` knows; None where its model's step has no batch."""
    work = job_work(job)
    if work.traced.graph.batch_size is None:
        return None
    kinds = {}
    for offer in job.devices:
        if offer.count:
            device = table.device(offer.type, "devices.type")
            job_memory = {"memory_gib": offer.memory_gib, "source": GIVEN}
            limited_device = device if offer.memory_gib is None else device.model_copy(update=job_memory)
            kinds[offer.type] = DeviceKind(
                model=cost_model(device, calibration()),
                fabric=fabrics[offer.type],
                usable_bytes=usable_bytes(limited_device),
                price_per_hour=offer.price_per_hour,
            )
    total = job.max_workers * job.batch_size
    layouts = Layouts(
        work=work,
        kinds=kinds,
        total=total,
        optimizer=job.optimizer,
        compile=job.compile,
        saves_on_host=job.offload == "auto" and not job.compile,
    )
    return layouts.on_hosts(job.offload) if job.asks_for_hosts else layouts
