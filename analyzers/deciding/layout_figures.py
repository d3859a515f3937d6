"""What one layout takes on given devices: sharding, checkpointing, batches and passes, costed by the one cost model.

A traced step's times on each device type, its memory, the collectives on the job's network. Devices of unlike types each take
the share of the batch that lets all end together (LB-BSP, Equation 3), in one number of passes, for sharded processes
communicate in every pass. Start at :class:`LayoutFigures`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, cast

from ddltool.analyzers.balancing.minmax import DeviceCurves, Row, spread
from ddltool.analyzers.balancing.plan import equal_rows
from ddltool.analyzers.communication.collectives import best_cuts, bucket_setting, default_cuts, finish_s, plan_ddp
from ddltool.analyzers.communication.fsdp import plan_fsdp, prefetch_setting
from ddltool.analyzers.communication.program import Program, program_of
from ddltool.analyzers.costs.memory import Checkpointing, Keeps, Kind, Sharding
from ddltool.analyzers.costs.model import CostModel
from ddltool.analyzers.costs.nccl import Communicator, Fabric
from ddltool.analyzers.costs.predict import Placement, Setting, WorkCurve, own_update_s, step_of, timed_step
from ddltool.analyzers.placement.problem import Problem
from ddltool.decision import Layout
from ddltool.errors import Infeasible
from ddltool.graph import Graph
from ddltool.plans import Assignment, BucketSetting, Plan, PrefetchSetting, Recomputed, ShardingSetting
from ddltool.units import counted, show_bytes

Worth = Callable[[Layout], bool]
WAYS: tuple[Checkpointing, ...] = ("none", "selective", "full")
# Of a bound by the time of one sample more: larger batches take a little less each.
SURE = 0.9
# Seconds that the choice of what to compute again may take.
_CHOOSING_S = 3.0
GIB = 2.0**30
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
    rows: tuple[Row, ...] = ()
    """Samples by device, whose ``kind`` counts the layout's types. Empty where it does not fit."""
    slowest: str = ""
    """The type whose devices end last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Timed:
    program: Program
    graph: Graph
    slower: float
    host_share: float
    library_share: float

    def own_update_s(self, sharding: Sharding) -> float:
        return own_update_s(self.graph, sharding) * self.slower


@dataclass(frozen=True, kw_only=True)
class LayoutFigures:
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

    def at_speeds(self, capabilities: Mapping[str, float], batch_size: int) -> Self:
        """Return the same on devices that make so many mini-batches of ``batch_size`` samples per second, by type."""
        kinds = dict(self.kinds)
        for name, capability in capabilities.items():
            predicted = self._step(name, batch_size, "none")
            seconds = predicted.program.compute_s + predicted.own_update_s(Sharding(kind="none"))
            kinds[name] = replace(kinds[name], slower=1 / (capability * seconds) if seconds else 1.0)
        return type(self)(work=self.work, kinds=kinds, total=self.total, optimizer=self.optimizer)

    def whole_bytes(self, devices: Mapping[str, int], batch_size: int) -> float:
        """Return what a process with a whole model and ``batch_size`` samples holds.

        Raises Infeasible where a device is too small for it.
        """
        needed = self._peak(Sharding(kind="ddp" if sum(devices.values()) > 1 else "none"), "none", batch_size)
        for name in devices:
            if (has := self.kinds[name].usable_bytes) < needed:
                raise Infeasible(
                    f"memory: a whole model in each process, with {counted(batch_size, 'sample')}, takes {show_bytes(needed)}; "
                    f"each {name} has {show_bytes(has)} for it, {gib(needed - has)} missing"
                )
        return needed

    def plan(self, found: Found, problem: Problem, strategy: Literal["bsp", "lb-bsp"]) -> Plan:
        """Return the plan of a layout that fits: batches, sharding, modules to checkpoint, and prefetch or buckets.

        Its step leaves out what communication is not hidden: see ``Layout.step_s``.
        """
        layout, names = found.layout, list(found.layout.devices)
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
        made = (
            sum(row.devices * row.local_batch_size / (row.compute_s or math.inf) for row in rows) / problem.batch_size
        )
        sharding = ShardingSetting(
            kind="ddp" if layout.sharding == "none" else layout.sharding,
            replicate=layout.replicate,
            shard=layout.shard,
            checkpointing=[Recomputed(module=module, keeps=list(kept)) for module, kept in keeps.items()],
            memory_bytes=layout.memory_bytes,
        )
        waste = max(0.0, made - problem.max_workers / compute_s)
        return problem.plan(strategy, compute_s, rows, waste=waste, status="feasible", sharding=sharding)

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

    def _sample_s(self, name: str, size: int) -> float:
        """Return the seconds of one sample more on a device type, about ``size`` of them: what is traced anyway tells."""
        traced = self.work.traced.graph.batch_size or 2 * size
        sizes = sorted({size, traced if traced != size else 2 * size})
        least, most = (self._step(name, samples, "none").program.compute_s for samples in sizes)
        return max(min((most - least) / (sizes[1] - sizes[0]), least / sizes[0]), 1e-12)

    def _hows(self) -> Sequence[str]:
        return WAYS if self.work.ledger(1).blocks else WAYS[:1]

    def _found(
        self,
        used: Mapping[str, int],
        sharding: Sharding,
        how: str,
        equal: bool,
        worth: Worth = lambda _: True,
        least: int = 1,
        limit: float = math.inf,
    ) -> Found | None:
        """Return the best passes and batches of one combination; None where they cannot be made, or are not ``worth`` it.

        ``limit``: of seconds a step, which what is surely above need not be traced for.
        """
        devices, best = sum(used.values()), None
        most = {name: self._most(sharding, how, name, 2 * -(-self.total // devices)) for name in used}
        if min(most.values()) < 1:
            return self._lacking(used, sharding, how)
        room = sum(count * most[name] for name, count in used.items())
        fewest = max(least, -(-self.total // room))
        if equal or len(used) == 1:
            fewest = max(fewest, math.ceil(math.ceil(self.total / devices) / min(most.values())))
        for passes in dict.fromkeys((fewest, fewest + 1, 2 * fewest) if len(used) > 1 and not equal else (fewest,)):
            rows = self._split(used, most, how, passes, equal)
            if rows is None or min(row.size for row in rows) < passes:
                continue
            if limit < math.inf and self._least_s(used, sharding, how, passes, rows) > limit:
                continue
            made = self._costed(used, sharding, how, passes, rows, worth)
            if made is not None and (best is None or (made.layout.step_s or 0) < (best.layout.step_s or 0)):
                best = made
        return best

    def _split(
        self, used: Mapping[str, int], most: Mapping[str, int], how: str, passes: int, equal: bool
    ) -> tuple[Row, ...] | None:
        """Return the samples of each device: equal, or so that all end together; None where they do not fit."""
        counts = list(used.values())
        if equal or len(used) == 1:
            return tuple(equal_rows(dict(enumerate(counts)), self.total))
        lines = [self._line(name, max(2, -(-self.total // (sum(counts) * passes))), how) for name in used]
        launch, slope = [launched_s * passes for launched_s, _ in lines], [sample_s for _, sample_s in lines]
        limits = [passes * most[name] for name in used]
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
        self, used: Mapping[str, int], sharding: Sharding, how: str, passes: int, rows: tuple[Row, ...]
    ) -> float:
        """Return what a step hardly takes less than: the slowest's passes, and all gradients after the first of them."""
        names, compute_s = list(used), 0.0
        for row in rows:
            size = -(-row.size // passes)
            launched_s, sample_s = self._line(names[row.kind], size, how)
            compute_s = max(compute_s, launched_s + sample_s * size)
        group, name = self._group(used, sharding), names[rows[0].kind]
        program = self._step(name, self.work.traced.graph.batch_size or 1, "none").program
        reduce_s = group.reduce_scatter_s if sharding.gathers else group.all_reduce_s
        first = float(program.ready_s[0]) / program.compute_s
        exchanged_s = 0.0 if group.replicas < 2 else reduce_s(self._exchanged_bytes(name))
        return SURE * ((passes - 1) * compute_s + max(compute_s, first * compute_s + exchanged_s))

    def _costed(
        self,
        used: Mapping[str, int],
        sharding: Sharding,
        how: str,
        passes: int,
        rows: tuple[Row, ...],
        worth: Worth = lambda _: True,
    ) -> Found | None:
        """Return the layout with its figures; None where even its compute alone is not ``worth`` it."""
        names = list(used)
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
        part = parts[slowest]
        shares = {"host_share": part.host_share, "library_share": part.library_share}
        low, high = self.kinds[slowest].model.interval(step, **shares)
        # A type that waits for its host takes no less time for a smaller share, and on a slower host it may.
        host_bound = any(part.host_share > _HOST_NEAR for part in parts.values())
        made = layout(step, low_s=low, high_s=high, host_bound=host_bound)
        return Found(layout=made, sharding=sharding, how=how, rows=rows, slowest=slowest)

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
        better = self._costed(layout.devices, found.sharding, key, layout.passes, found.rows)
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
                library_share=float(timed.meta.get("library_share") or 0.0),
            )
        return self._timed[key]

    def _group(self, devices: Mapping[str, int], sharding: Sharding) -> Communicator:
        group = Fabric.joined({name: self.kinds[name].fabric for name in devices}, devices)
        return group.fabric.sharded(group.replicas, sharding.shard, group.nodes) if sharding.gathers else group


def gib(size_bytes: float) -> str:
    """Return a size in GiB, whatever it is."""
    return f"{size_bytes / GIB:.3g} GiB"


def _shape(sharding: Sharding, processes: int) -> dict[str, Any]:
    kinds: dict[Kind, str] = {"none": "none", "ddp": "ddp", "fsdp": "fsdp", "zero2": "fsdp", "hsdp": "hsdp"}
    return {
        "sharding": kinds[sharding.kind],
        "replicate": processes // sharding.shard,
        "shard": sharding.shard,
        "reshard_after_forward": sharding.kind != "zero2",
    }
