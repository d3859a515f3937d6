"""How to hold and train a model on a job's devices: sharding, checkpointing, batches and passes together.

Combinations of devices, ``replicate x shard``, checkpointing and passes are enumerated and costed by the one cost model: a
traced step's times on each device type, its memory, the collectives on the job's network. The samples of a step are the job's,
whatever the devices. What does not fit stays in the list with what it lacks. Start at :meth:`Layouts.search`.

Devices of unlike types each take the share of the batch that lets all end together (LB-BSP, Equation 3), in one number of
passes, for sharded processes communicate in every pass. A shard group of HSDP is of one type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from ddltool.analyzers.balancing.minmax import DeviceCurves, Row, spread
from ddltool.analyzers.communication.collectives import best_cuts, bucket_setting, default_cuts, finish_s, plan_ddp
from ddltool.analyzers.communication.fsdp import plan_fsdp, prefetch_setting
from ddltool.analyzers.communication.program import Program, program_of
from ddltool.analyzers.costs.memory import Checkpointing, Keeps, Kind, Sharding
from ddltool.analyzers.costs.model import CostModel
from ddltool.analyzers.costs.nccl import Communicator, Fabric
from ddltool.analyzers.costs.predict import Placement, Setting, WorkCurve, own_update_s, step_of, timed_step
from ddltool.analyzers.deciding.goal import Goal
from ddltool.analyzers.deciding.search import Counts, best_devices
from ddltool.analyzers.placement.problem import Problem
from ddltool.decision import Layout, NothingFits
from ddltool.errors import Infeasible
from ddltool.graph import Graph
from ddltool.plans import Assignment, BucketSetting, Plan, PrefetchSetting, Recomputed, ShardingSetting
from ddltool.units import counted, show_bytes

WAYS: tuple[Checkpointing, ...] = ("none", "selective", "full")
# A simpler layout within this share of the best is preferred: less to set, less to go wrong.
_AS_GOOD = 0.02
_SIMPLER = {"none": 0, "ddp": 1, "fsdp": 2, "hsdp": 3, "zero2": 4}
# Layouts whose buckets or prefetch are chosen before one is picked, and how far behind the best by default settings.
_SETTLED, _SETTINGS_GAIN = 8, 1.5
# Layouts listed that do not fit.
_LISTED = 8
# Of the devices that would hold a step, the most that are looked for.
_MOST_SOUGHT = 4096
# Of a bound by the time of one sample more: larger batches take a little less each.
_SURE = 0.9
# Seconds that the choice of what to compute again may take.
_CHOOSING_S = 3.0
_GIB = 2.0**30
# From this share of the device's time on the host's, known to within 60 %, may decide.
_HOST_NEAR = 0.6


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceKind:
    """One offered device type: how fast, on which network, and how much of its memory a process can have."""

    model: CostModel
    fabric: Fabric
    usable_bytes: float
    slower: float = 1.0
    """What the job says of its speed: a factor on the predicted times."""
    price_per_hour: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A layout and what its figures are made of."""

    layout: Layout
    sharding: Sharding
    how: str
    """Key of what is computed again."""
    names: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()
    """Samples by device, whose ``kind`` counts ``names``. Empty where it does not fit."""
    slowest: str = ""
    """The type whose devices end last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Timed:
    program: Program
    graph: Graph
    slower: float
    host_share: float

    def own_update_s(self, sharding: Sharding) -> float:
        return own_update_s(self.graph, sharding) * self.slower


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """The layouts of one job; ``kinds`` by device type, ``total`` samples per step."""

    work: WorkCurve
    kinds: Mapping[str, DeviceKind]
    total: int
    optimizer: str
    _timed: dict[tuple[str, int, str], _Timed] = field(default_factory=dict)
    _graphs: dict[int, Graph] = field(default_factory=dict)
    _taken: dict[tuple[Sharding, str, int], float] = field(default_factory=dict)
    _peaks: dict[tuple[Sharding, str, int], float] = field(default_factory=dict)
    _settings: dict[str, tuple[BucketSetting | None, PrefetchSetting | None]] = field(default_factory=dict)
    _keeps: dict[str, Keeps] = field(default_factory=dict)

    def search(
        self, problem: Problem, goal: Goal | None = None, *, equal: bool = False, limit_s: float = 5.0
    ) -> tuple[list[Found], float]:
        """Return the layouts worth a line, the best first and those that do not fit last, and how far the best may be from it.

        ``equal``: devices that take part take equal shares. What is picked has been played through torch's allocator on each
        type; of communication all have what comes by default. The gap is relative to what no layout's value is below; infinite
        where nothing is known of it. Raises NothingFits.
        """
        goal = goal or Goal(step_samples=self.total)
        fitting, lacking, value = list[Found](), list[Found](), self.value(goal)
        first = _largest(problem, self.total)
        largest = first[0]
        # One node of each type: nothing leaves it.
        nodes = [min(self.kinds[each.name].fabric.gpus_per_node, each.count) for each in problem.devices]
        first += [tuple(size * (kind == only) for kind in range(len(nodes))) for only, size in enumerate(nodes)]

        def of(counts: Counts, least: float) -> tuple[float, list[Found]] | None:
            # Of all devices every layout is shown; of fewer what could be better, or simpler and as good as that.
            limit = least if counts != largest else math.inf
            if self._bound(problem, counts, counts, goal) >= limit:
                return None
            fit, short = self._on(problem, counts, equal, goal, limit * (1 + _AS_GOOD) ** 2)
            lacking.extend(short if counts == largest else [])
            fitting.extend(fit)
            return (value(_simplest(fit, value).layout) if fit else math.inf), fit

        def bound(low: Counts, high: Counts) -> float:
            return self._bound(problem, low, high, goal)

        best = best_devices(
            problem, of, bound, most=self.total, limit_s=limit_s, first=first, spare=goal.objective != "cheapest"
        )
        if not fitting and (lacking or not goal.limited):
            raise self._nothing_fits(lacking)
        if best is None:
            raise Infeasible("what fits is slower or dearer than the job allows")
        picked = self._picked(problem, fitting, lacking, goal, equal)
        picked = self._settled(picked, fitting, goal)
        counts = tuple(picked.layout.devices.get(name, 0) for name in self._names(problem))
        beside = self._on(problem, counts, equal, goal)[0]
        rest = sorted((it for it in [*beside, *fitting] if it.layout != picked.layout), key=lambda it: value(it.layout))
        mine = set(map(id, beside))
        short = _distinct(sorted(lacking, key=lambda it: it.layout.missing_bytes))
        # Plain DDP is what people ask for first, however much it lacks.
        plain = [it for it in short[_LISTED:] if simplicity(it.layout)[:2] == (1, 0)]
        gap = value(picked.layout) / best.bound - 1 if best.bound else math.inf
        shown = _distinct(rest, lambda it: id(it) not in mine or not self._lacks(it))
        return [picked, *shown, *short[:_LISTED], *plain], max(0.0, gap)

    def _picked(self, problem: Problem, fitting: list[Found], lacking: list[Found], goal: Goal, equal: bool) -> Found:
        """Return the simplest of the best layouts that the allocator holds; those it does not go to ``lacking``.

        Some devices have one layout, whatever else is offered: the simplest of the best on them.
        """
        value, chosen = self.value(goal), False
        while fitting:
            on = dict[tuple[tuple[str, int], ...], list[Found]]()
            for found in fitting:
                on.setdefault(tuple(found.layout.devices.items()), []).append(found)
            picked = _simplest([_simplest(each, value) for each in on.values()], value)
            if lack := self._lacks(picked):
                fitting.remove(picked)
                layout = picked.layout.model_copy(update={"missing_bytes": lack, "step_s": None})
                lacking.append(replace(picked, layout=layout))
                counts = tuple(picked.layout.devices.get(name, 0) for name in self._names(problem))
                more = picked.layout.passes + 1
                again = self._found(problem, counts, picked.sharding, picked.how, equal, lambda _: True, more)
                if again is not None and not again.layout.missing_bytes:
                    fitting.append(again)
                continue
            if picked.how == "none" or goal.objective == "least-memory" or chosen:
                return picked
            chosen = True
            if (made := self._chosen(picked)) is not None:
                fitting.append(made)
        raise self._nothing_fits(lacking)

    def _settled(self, picked: Found, fitting: list[Found], goal: Goal) -> Found:
        """Return what is best once each has its own best buckets or prefetch: ``picked``, or one near it that fits.

        A simpler one within a little stays.
        """
        value = self.value(goal)
        if goal.objective == "least-memory":
            return picked
        near = [it for it in fitting if value(it.layout) <= value(picked.layout) * _SETTINGS_GAIN]
        best, worth = picked, value(self._with_settings(picked)) / (1 + _AS_GOOD)
        for other in sorted(near, key=lambda it: value(it.layout))[:_SETTLED]:
            settled = value(self._with_settings(other))
            if settled < worth and not self._lacks(other):
                best, worth = other, settled
        return best

    def _with_settings(self, found: Found) -> Layout:
        """Return a layout with what the best buckets or prefetch save of its step, and of its price."""
        layout, saved_s = found.layout, 0.0
        if found.sharding.gathers:
            _, prefetch = self.communication(found)
            if prefetch is not None:
                saved_s = max(0.0, prefetch.default_step_s - prefetch.step_s) * layout.passes
        elif found.sharding.kind == "ddp":
            program, group = self._last_pass(found), self._group(layout.devices, found.sharding)
            default_s = finish_s(program, group, default_cuts(program))
            best_s = min(default_s, finish_s(program, group, best_cuts(program, group)))
            saved_s = max(program.compute_s, default_s) - max(program.compute_s, best_s)
        step_s = layout.step_s or math.inf
        price = None if layout.price_per_sample is None else layout.price_per_sample * (1 - saved_s / step_s)
        return layout.model_copy(update={"step_s": step_s - saved_s, "price_per_sample": price})

    def _last_pass(self, found: Found) -> Program:
        """Return the pass of the devices that end last."""
        most = found.layout.local_batch_sizes[found.slowest]
        return self._step(found.slowest, -(-most // found.layout.passes), found.how).program

    def _on(
        self, problem: Problem, counts: Counts, equal: bool, goal: Goal, limit: float = math.inf
    ) -> tuple[list[Found], list[Found]]:
        """Return the layouts on exactly these devices: those that fit and are not above a limit, and those that do not fit.

        Under a limit, without those that compute more again than what fits in one pass.
        """
        value, limit_s = self.value(goal), limit if goal.objective == "fastest" else math.inf
        used = {name: count for name, count in zip(self._names(problem), counts, strict=True) if count}
        fit, short = list[Found](), list[Found]()
        for sharding in self._shardings(counts, problem):
            if self._above(used, sharding, goal, limit):
                continue
            for how in self._hows():
                made = self._found(
                    problem, counts, sharding, how, equal, lambda layout: value(layout) <= limit, limit=limit_s
                )
                if made is not None:
                    (short if made.layout.missing_bytes else fit).append(made)
                    if limit < math.inf and made.layout.passes == 1 and not made.layout.missing_bytes:
                        break
        return fit, short

    def _above(self, used: Mapping[str, int], sharding: Sharding, goal: Goal, limit: float) -> bool:
        """Return whether one collective of all gradients takes more than a limit: buckets and units of them take longer."""
        if limit == math.inf or sum(used.values()) == 1 or goal.objective == "least-memory":
            return False
        size_bytes = self._exchanged_bytes(next(iter(used)))
        group = self._group(used, sharding)
        step_s = _SURE * (group.reduce_scatter_s(size_bytes) if sharding.gathers else group.all_reduce_s(size_bytes))
        hourly = sum(count * (self.kinds[name].price_per_hour or 0.0) for name, count in used.items())
        return goal.of(step_s, sum(used.values()), hourly * step_s / 3600) > limit

    def _exchanged_bytes(self, name: str) -> float:
        program = self._step(name, self.work.traced.graph.batch_size or 1, "none").program
        return float(min(program.size_bytes.sum(), program.held_bytes.sum()))

    def _lacks(self, found: Found) -> float:
        """Return the bytes that torch's allocator lacks to hold a layout on the type with least room; 0: it holds it."""
        worst = 0.0
        for name, size in found.layout.local_batch_sizes.items():
            usable, most = self.kinds[name].usable_bytes, -(-size // found.layout.passes)
            key = found.sharding, found.how, most
            if key not in self._taken:
                held = self.work.held(most, found.sharding, self.optimizer, self._kept(found.how, most))
                self._taken[key] = math.inf if held is None else float(held.reserved_bytes() or 0)
            if self._taken[key] > usable:
                # near its limit it gives back what is free as a whole, which it does not without one
                held = self.work.held(most, found.sharding, self.optimizer, self._kept(found.how, most))
                if held is None or held.reserved_bytes(usable) is None:
                    worst = max(worst, self._taken[key] - usable)
        return worst

    def at_speeds(self, capabilities: Mapping[str, float], batch_size: int) -> Layouts:
        """Return the same on devices that make so many mini-batches of ``batch_size`` samples per second, by type."""
        kinds = dict(self.kinds)
        for name, capability in capabilities.items():
            predicted = self._step(name, batch_size, "none")
            seconds = predicted.program.compute_s + predicted.own_update_s(Sharding(kind="none"))
            kinds[name] = replace(kinds[name], slower=1 / (capability * seconds) if seconds else 1.0)
        return Layouts(work=self.work, kinds=kinds, total=self.total, optimizer=self.optimizer)

    def plainest(self, problem: Problem) -> Found:
        """Return what one would do first: an equal split over all devices, sharded and checkpointed as little as need be.

        Where none fits, the fastest of those on a single type; at last, the best layout.
        """
        alone = [replace(problem, devices=(device,)) for device in problem.devices]
        for part in ([problem], alone) if len(alone) > 1 else ([problem],):
            found = [plain for each in part for plain in self._plain(each)]
            if found:
                return min(found, key=lambda it: it.layout.step_s or math.inf)
        return self.search(problem)[0][0]

    def equally(self, problem: Problem, counts: Counts) -> Found:
        """Return an equal split on exactly these devices, by tensors alone. Raises Infeasible where none fits."""
        fit, _ = self._on(problem, counts, True, Goal())
        if not fit:
            raise Infeasible("nothing fits on these devices")
        return _simplest(fit, self.value(Goal()))

    def _plain(self, problem: Problem) -> list[Found]:
        fitting = [it for counts in _largest(problem, self.total) for it in self._on(problem, counts, True, Goal())[0]]
        while fitting:
            plain = min(fitting, key=lambda it: simplicity(it.layout)[1::-1])
            if not self._lacks(plain):
                return [plain]
            fitting.remove(plain)
        return []

    def value(self, goal: Goal) -> Callable[[Layout], float]:
        """Return what a layout is ranked by, least first."""

        def of(layout: Layout) -> float:
            price = None if layout.price_per_sample is None else layout.price_per_sample * self.total
            worth = goal.of(layout.step_s or math.inf, sum(layout.devices.values()), price)
            return max(layout.memory_bytes.values()) if goal.objective == "least-memory" and worth < math.inf else worth

        return of

    def whole_bytes(self, devices: Mapping[str, int], batch_size: int) -> float:
        """Return what a process with a whole model and ``batch_size`` samples holds.

        Raises Infeasible where a device is too small for it.
        """
        needed = self._peak(Sharding(kind="ddp" if sum(devices.values()) > 1 else "none"), "none", batch_size)
        for name in devices:
            if (has := self.kinds[name].usable_bytes) < needed:
                raise Infeasible(
                    f"memory: a whole model in each process, with {counted(batch_size, 'sample')}, takes {show_bytes(needed)}; "
                    f"each {name} has {show_bytes(has)} for it, {_gib(needed - has)} missing"
                )
        return needed

    def plan(self, found: Found, problem: Problem, strategy: Literal["bsp", "lb-bsp"]) -> Plan:
        """Return the plan of a layout that fits: batches, sharding, modules to checkpoint, and prefetch or buckets.

        Its step leaves out what communication is not hidden: see ``Layout.step_s``.
        """
        layout, names = found.layout, found.names
        size = max(row.size for row in found.rows)
        keeps = self._kept(found.how, -(-size // layout.passes))
        rows = []
        for row in found.rows:
            name = names[row.kind]
            timed = self._step(name, -(-row.size // layout.passes), found.how)
            seconds = layout.passes * timed.program.compute_s + timed.own_update_s(found.sharding)
            rows.append(
                Assignment(
                    device_type=name,
                    devices=row.devices,
                    ests_per_device=0,
                    local_batch_size=row.size,
                    accumulation_steps=layout.passes - 1,
                    compute_s=seconds,
                )
            )
        compute_s = layout.compute_s or 0.0
        throughput = problem.max_workers / compute_s
        made = (
            sum(row.devices * row.local_batch_size / (row.compute_s or math.inf) for row in rows) / problem.batch_size
        )
        return Plan(
            job=problem.job,
            strategy=strategy,
            max_workers=problem.max_workers,
            batch_size=problem.batch_size,
            iteration_s=compute_s,
            throughput=throughput,
            assignments=rows,
            est_count=0,
            waste=max(0.0, made - throughput),
            overload_factor=compute_s,
            status="feasible",
            gap=0.0,
            solve_seconds=0.0,
            sharding=ShardingSetting(
                kind="ddp" if layout.sharding == "none" else layout.sharding,
                replicate=layout.replicate,
                shard=layout.shard,
                checkpointing=[Recomputed(module=module, keeps=list(kept)) for module, kept in keeps.items()],
                memory_bytes=layout.memory_bytes,
            ),
        )

    def communication(self, found: Found) -> tuple[BucketSetting | None, PrefetchSetting | None]:
        """Return DDP's buckets or FSDP2's units and prefetch of a layout that fits, as far as its memory allows."""
        key = found.layout.model_dump_json()
        if key not in self._settings:
            self._settings[key] = self._communication(found)
        return self._settings[key]

    def _communication(self, found: Found) -> tuple[BucketSetting | None, PrefetchSetting | None]:
        layout, counts = found.layout, found.layout.devices
        if layout.sharding == "none":
            return None, None
        program, group = self._last_pass(found), self._group(counts, found.sharding)
        if not found.sharding.gathers:
            return bucket_setting(plan_ddp(program, group)), None
        plans = plan_fsdp(program, group)
        if plans is None:
            return None, None
        room = min(self.kinds[name].usable_bytes - size for name, size in layout.memory_bytes.items())
        more = plans.best.gathered_bytes - plans.default.gathered_bytes
        chosen = plans.best if more <= room else plans.default
        if not found.sharding.reshards:
            chosen = plans.default.model_copy(update={"reshard_after_forward": False})
        return None, prefetch_setting(plans, chosen)

    def _bound(self, problem: Problem, low: Counts, high: Counts, goal: Goal) -> float:
        """Return what no layout on devices between two corners is below: all of them compute at full speed, all the time.

        Nor is a step shorter than all gradients take on the slowest card that they must pass.
        """
        if not any(high) or sum(low) > self.total:
            return math.inf
        if goal.objective == "least-memory":
            return 0.0
        size = -(-self.total // sum(device.count for device in problem.devices))
        rate, price, least, quickest, card = 0.0, 0.0, math.inf, math.inf, math.inf
        leaves = sum(map(bool, low)) > 1
        for name, fewest, most in zip(self._names(problem), low, high, strict=True):
            if most:
                each = 1 / self._sample_s(name, size)
                quickest = min(quickest, 1 / each)
                hourly, fabric = self.kinds[name].price_per_hour or 0.0, self.kinds[name].fabric
                if fewest and (leaves or fewest > fabric.gpus_per_node):
                    card = min(card, math.inf if fabric.measured else fabric.between.bytes_per_s)
                rate, price, least = rate + most * each, price + fewest * hourly, min(least, hourly / each)
        # Samples are whole: somebody takes the mean of them, rounded up.
        step_s = _SURE * max(self.total / rate, quickest * math.ceil(self.total / min(sum(high), self.total)))
        step_s = max(step_s, _SURE * self._exchanged_bytes(problem.devices[0].name) / card)
        return goal.of(step_s, max(sum(low), 1), max(price * step_s, _SURE * least * self.total) / 3600)

    def _sample_s(self, name: str, size: int) -> float:
        """Return the seconds of one sample more on a device type, about ``size`` of them: what is traced anyway tells."""
        traced = self.work.traced.graph.batch_size or 2 * size
        sizes = sorted({size, traced if traced != size else 2 * size})
        least, most = (self._step(name, samples, "none").program.compute_s for samples in sizes)
        return max(min((most - least) / (sizes[1] - sizes[0]), least / sizes[0]), 1e-12)

    def _names(self, problem: Problem) -> Iterator[str]:
        return (device.name for device in problem.devices)

    def _hows(self) -> Sequence[str]:
        return WAYS if self.work.ledger(1).blocks else WAYS[:1]

    def _shardings(self, counts: Counts, problem: Problem) -> list[Sharding]:
        """Return the ways in which so many devices can share the state."""
        n = sum(counts)
        if n == 1:
            return [Sharding(kind="none")]
        used = [count for count in counts if count]
        per_node = [self.kinds[name].fabric.gpus_per_node for name in self._names(problem)]
        common = math.gcd(*used)
        sizes = {2**power for power in range(1, n.bit_length())} | {*used, *per_node}
        kinds: list[Sharding] = [Sharding(kind="ddp")]
        if self.work.ledger(1).blocks:
            kinds += [Sharding(kind="fsdp", shard=n), Sharding(kind="zero2", shard=n)]
            kinds += [
                Sharding(kind="hsdp", shard=size) for size in sorted(sizes) if 1 < size < n and common % size == 0
            ]
        return kinds

    def _found(
        self,
        problem: Problem,
        counts: Counts,
        sharding: Sharding,
        how: str,
        equal: bool,
        worth: Callable[[Layout], bool],
        least: int = 1,
        limit: float = math.inf,
    ) -> Found | None:
        """Return the best passes and batches of one combination; None where they cannot be made, or are not ``worth`` it.

        ``limit``: of seconds a step, which what is surely above need not be traced for.
        """
        names = list(self._names(problem))
        used = {name: count for name, count in zip(names, counts, strict=True) if count}
        most = {name: self._most(sharding, how, name, 2 * -(-self.total // sum(counts))) for name in used}
        if min(most.values()) < 1:
            return self._lacking(used, sharding, how)
        best: Found | None = None
        room = sum(count * most[name] for name, count in used.items())
        fewest = max(least, -(-self.total // room))
        if equal or len(used) == 1:
            fewest = max(fewest, math.ceil(math.ceil(self.total / sum(counts)) / min(most.values())))
        for passes in dict.fromkeys((fewest, fewest + 1, 2 * fewest) if len(used) > 1 and not equal else (fewest,)):
            rows = self._split(names, counts, most, how, passes, equal)
            if rows is None or min(row.size for row in rows) < passes:
                continue
            if limit < math.inf and self._least_s(names, used, sharding, how, passes, rows) > limit:
                continue
            made = self._costed(names, used, sharding, how, passes, rows, worth)
            if made is not None and (best is None or (made.layout.step_s or 0) < (best.layout.step_s or 0)):
                best = made
        return best

    def _split(
        self, names: Sequence[str], counts: Counts, most: Mapping[str, int], how: str, passes: int, equal: bool
    ) -> tuple[Row, ...] | None:
        """Return the samples of each device: equal, or so that all end together; None where they do not fit."""
        if equal or sum(map(bool, counts)) == 1:
            share, left = divmod(self.total, sum(counts))
            rows = []
            for kind, count in enumerate(counts):
                more = min(left, count)
                left -= more
                sizes = ((more, share + 1), (count - more, share))
                rows += [Row(kind=kind, devices=devices, size=size) for devices, size in sizes if devices]
            return tuple(rows)
        per_pass = max(2, -(-self.total // (sum(counts) * passes)))
        launch, slope = [], []
        for name, count in zip(names, counts, strict=True):
            if not count:
                launch.append(0.0)
                slope.append(1.0)
                continue
            launched_s, sample_s = self._line(name, per_pass, how)
            slope.append(sample_s)
            launch.append(launched_s * passes)
        limits = [passes * most.get(name, 0) for name in names]
        return spread(DeviceCurves.of(launch_s=launch, per_sample_s=slope, memory_limit=limits), counts, self.total)

    def _line(self, name: str, size: int, how: str) -> tuple[float, float]:
        """Return the seconds of a pass without samples, and of each sample more about ``size``: few sizes are traced."""
        most = 2 ** math.ceil(math.log2(max(size, 2)))
        if self.work.traced.largest is not None:
            most = max(2, min(most, self.work.traced.largest))
        one, more_s = (self._step(name, samples, how).program.compute_s for samples in (1, most))
        sample_s = max((more_s - one) / (most - 1), 1e-12)
        return max(one - sample_s, 0.0), sample_s

    def _least_s(
        self,
        names: Sequence[str],
        used: Mapping[str, int],
        sharding: Sharding,
        how: str,
        passes: int,
        rows: tuple[Row, ...],
    ) -> float:
        """Return what a step hardly takes less than: the slowest's passes, and all gradients after the first of them."""
        compute_s = 0.0
        for row in rows:
            size = -(-row.size // passes)
            launched_s, sample_s = self._line(names[row.kind], size, how)
            compute_s = max(compute_s, launched_s + sample_s * size)
        group, name = self._group(used, sharding), names[rows[0].kind]
        program = self._step(name, self.work.traced.graph.batch_size or 1, "none").program
        reduce_s = group.reduce_scatter_s if sharding.gathers else group.all_reduce_s
        first = float(program.ready_s[0]) / program.compute_s
        exchanged_s = 0.0 if group.replicas < 2 else reduce_s(self._exchanged_bytes(name))
        return _SURE * ((passes - 1) * compute_s + max(compute_s, first * compute_s + exchanged_s))

    def _costed(
        self,
        names: Sequence[str],
        used: Mapping[str, int],
        sharding: Sharding,
        how: str,
        passes: int,
        rows: tuple[Row, ...],
        worth: Callable[[Layout], bool],
    ) -> Found | None:
        """Return the layout with its figures; None where even its compute alone is not ``worth`` it."""
        sizes = {names[row.kind]: max(it.size for it in rows if it.kind == row.kind) for row in rows}
        parts = {name: self._step(name, -(-size // passes), how) for name, size in sizes.items()}
        compute = {name: passes * part.program.compute_s + part.own_update_s(sharding) for name, part in parts.items()}
        prices = [self.kinds[name].price_per_hour for name in used]
        hourly = sum(count * (price or 0.0) for count, price in zip(used.values(), prices, strict=True))

        def layout(step_s: float, **more: Any) -> Layout:
            return Layout(
                devices=dict(used),
                **_shape(sharding, sum(used.values())),
                checkpointing=how if how in WAYS else "chosen",
                local_batch_sizes=sizes,
                passes=passes,
                compute_s=max(compute.values()),
                step_s=step_s,
                memory_bytes={name: self._peak(sharding, how, -(-size // passes)) for name, size in sizes.items()},
                price_per_sample=None if None in prices else hourly / 3600 * step_s / self.total,
                **more,
            )

        if not worth(layout(max(compute.values()))):
            return None
        step, slowest = 0.0, ""
        for name, part in parts.items():
            group = Fabric.joined({each: self.kinds[each].fabric for each in used}, used)
            setting = Setting(fabric=group.fabric, optimizer=self.optimizer, accumulation=passes)
            place = Placement(num_nodes=group.nodes, num_replicas=group.replicas)
            seconds = step_of(part.program, setting, place, sharding, part.own_update_s(sharding))
            if seconds > step:
                step, slowest = seconds, name
        low, high = self.kinds[slowest].model.interval(step, host_share=parts[slowest].host_share)
        # A type that waits for its host takes no less time for a smaller share, and on a slower host it may.
        host_bound = any(part.host_share > _HOST_NEAR for part in parts.values())
        made = layout(step, low_s=low, high_s=high, host_bound=host_bound)
        return Found(layout=made, sharding=sharding, how=how, names=tuple(names), rows=rows, slowest=slowest)

    def _chosen(self, found: Found) -> Found | None:
        """Return a layout with the cheapest recomputation that its devices' memory allows; None where none is cheaper."""
        from ddltool.analyzers.costs.checkpointing import cheapest  # it loads a solver

        layout = found.layout
        name = min(layout.memory_bytes, key=lambda each: self.kinds[each].usable_bytes - layout.memory_bytes[each])
        size = -(-layout.local_batch_sizes[name] // layout.passes)
        ledger = self.work.ledger(size)
        budget = min(self.kinds[each].usable_bytes for each in layout.memory_bytes)
        timed = self._step(name, size, "none").graph
        own = size if ledger.traced is self.work.traced else None
        try:
            made = cheapest(ledger, ledger.seconds(timed), found.sharding, self.optimizer, budget, own, _CHOOSING_S)
        except Infeasible:  # by a hair, or in the time there was
            return None
        key = f"chosen {len(self._keeps)}"
        self._keeps[key] = made.keeps
        better = self._costed(
            found.names, layout.devices, found.sharding, key, layout.passes, found.rows, lambda _: True
        )
        if better is None or (better.layout.step_s or 0) >= (layout.step_s or 0) * (1 - 1e-6):
            return None
        fits = all(size <= self.kinds[each].usable_bytes for each, size in better.layout.memory_bytes.items())
        return better if fits else None

    def _lacking(self, used: Mapping[str, int], sharding: Sharding, how: str) -> Found:
        """Return a layout that does not hold one sample of each device."""
        held = self._peak(sharding, how, 1)
        layout = Layout(
            devices=dict(used),
            **_shape(sharding, sum(used.values())),
            checkpointing=cast(Checkpointing, how),
            local_batch_sizes=dict.fromkeys(used, 1),
            passes=1,
            memory_bytes=dict.fromkeys(used, held),
            missing_bytes=held - min(self.kinds[name].usable_bytes for name in used),
        )
        return Found(layout=layout, sharding=sharding, how=how)

    def _nothing_fits(self, lacking: Sequence[Found]) -> NothingFits:
        short = _distinct(sorted(lacking, key=lambda it: it.layout.missing_bytes))
        if not short:
            return NothingFits(f"no devices take {self.total} samples", [])
        first = short[0].layout
        name = max(first.devices, key=lambda each: -self.kinds[each].usable_bytes)
        has = self.kinds[name].usable_bytes
        on = f"each of {first.devices_text}" if sum(first.devices.values()) > 1 else f"one {name}"
        text = (
            f"memory: one sample on {on} takes {show_bytes(first.memory_bytes[name])} in a process ({first.text}), "
            f"and each {name} has {show_bytes(has)} for it: {_gib(first.missing_bytes)} missing"
        )
        how = self._hows()[-1]
        alone = self._peak(Sharding(kind="none"), how, 1)
        ways = [f"one device of {math.ceil(alone / _GIB) + 1} GiB"]
        if self.work.ledger(1).blocks:
            shards = (2**power for power in range(1, _MOST_SOUGHT.bit_length()))
            enough = next((n for n in shards if self._peak(Sharding(kind="fsdp", shard=n), how, 1) <= has), None)
            if enough is not None:
                ways.insert(0, f"{enough} {name} (FSDP2, {how} checkpointing)")
        return NothingFits(f"{text}; it would fit on {' or '.join(ways)}", [it.layout for it in short[:_LISTED]])

    def _most(self, sharding: Sharding, how: str, name: str, most: int) -> int:
        """Return the most samples of a pass, up to ``most``, that a device of a type holds; 0 where none. Bisection."""
        usable, largest = self.kinds[name].usable_bytes, self.work.traced.largest
        most = most if largest is None else min(most, largest)
        if self._peak(sharding, how, most) <= usable:
            return most
        if self._peak(sharding, how, 1) > usable:
            return 0
        low, high = 1, 2
        while high <= most and self._peak(sharding, how, high) <= usable:
            low, high = high, 2 * high
        high = min(high, most + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._peak(sharding, how, middle) <= usable else (low, middle)
        return low

    def _peak(self, sharding: Sharding, how: str, size: int) -> float:
        key = sharding, how, size
        if key not in self._peaks:
            ledger = self.work.ledger(size)
            scaled = size if ledger.traced is self.work.traced else None
            peak = ledger.peak(sharding, self.optimizer, self._kept(how, size), scaled)
            self._peaks[key] = peak.total_bytes
        return self._peaks[key]

    def _kept(self, how: str, size: int) -> Keeps:
        if how in self._keeps:
            return self._keeps[how]
        return self.work.ledger(size).every_block(cast(Checkpointing, how))

    def _step(self, name: str, size: int, how: str) -> _Timed:
        """Return the step of ``size`` samples on a device type."""
        key = name, size, how
        if key not in self._timed:
            if size not in self._graphs:
                self._graphs[size] = self.work.traced.at(size)
            kind = self.kinds[name]
            timed = timed_step(self._graphs[size], kind.model, Setting(fabric=kind.fabric, optimizer=self.optimizer))
            timed = timed.with_durations(timed.duration_s * kind.slower, timed.estimate)
            if keeps := self._kept(how, size):
                timed = self.work.ledger(size).lengthened(keeps, timed)
            self._timed[key] = _Timed(
                program=program_of(timed),
                graph=timed,
                slower=kind.slower,
                host_share=float(timed.meta.get("host_share") or 0.0),
            )
        return self._timed[key]

    def _group(self, devices: Mapping[str, int], sharding: Sharding) -> Communicator:
        group = Fabric.joined({name: self.kinds[name].fabric for name in devices}, devices)
        return group.fabric.sharded(group.replicas, sharding.shard, group.nodes) if sharding.gathers else group


def simplicity(layout: Layout) -> tuple[int, int, int, int]:
    """Return how much there is to set, least first: sharding, checkpointing, passes, devices left in."""
    kind = "zero2" if layout.sharding == "fsdp" and not layout.reshard_after_forward else layout.sharding
    again = ("none", "selective", "full", "chosen").index(layout.checkpointing)
    return _SIMPLER[kind], again, layout.passes, sum(layout.devices.values())


def _simplest(found: Sequence[Found], value: Callable[[Layout], float]) -> Found:
    """Return the simplest of the layouts as good as the best."""
    best = min(value(it.layout) for it in found)
    as_good = [it for it in found if value(it.layout) <= best * (1 + _AS_GOOD)]
    return min(as_good, key=lambda it: (*simplicity(it.layout), value(it.layout)))


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / _GIB:.3g} GiB"


def _shape(sharding: Sharding, processes: int) -> dict[str, Any]:
    kinds: dict[Kind, str] = {"none": "none", "ddp": "ddp", "fsdp": "fsdp", "zero2": "fsdp", "hsdp": "hsdp"}
    return {
        "sharding": kinds[sharding.kind],
        "replicate": processes // sharding.shard,
        "shard": sharding.shard,
        "reshard_after_forward": sharding.kind != "zero2",
    }


def _distinct(found: Iterable[Found], holds: Callable[[Found], bool] = lambda _: True) -> list[Found]:
    """Return the first of each kind of layout on the same types, of those that hold."""
    kept: dict[tuple[object, ...], Found] = {}
    for it in found:
        layout = it.layout
        key = layout.sharding, layout.replicate > 1, layout.reshard_after_forward, layout.checkpointing, *layout.devices
        if key not in kept and holds(it):
            kept[key] = it
    return list(kept.values())


def _largest(problem: Problem, total: int) -> list[Counts]:
    """Return the largest sets of devices that the constraints take: of all types, or of each where they may not mix."""
    order = problem.fastest_first
    kept = [[kind] for kind in order] if problem.single_type else [order]
    return [tuple(problem.filled(kinds, total)) for kinds in kept if any(problem.filled(kinds, total))]
