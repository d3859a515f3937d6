"""Step time, memory and price of one layout (sharding, checkpointing, batches, passes) on given devices.

The cost model gives a traced step's times per device type, its memory and its collectives on the job's network. Which batches,
passes and recomputation are the fastest is found in :mod:`.layout_batches`. Start at :class:`LayoutFigures`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from ddltool.analyzers.job.balancing.minmax import Row
from ddltool.analyzers.job.placement.problem import Problem
from ddltool.analyzers.step.communication.collectives import (
    best_cuts,
    bucket_setting,
    default_cuts,
    finish_s,
    plan_ddp,
)
from ddltool.analyzers.step.communication.fsdp import plan_fsdp, prefetch_setting
from ddltool.analyzers.step.communication.nccl import Communicator, Fabric
from ddltool.analyzers.step.communication.program import Program, program_of
from ddltool.analyzers.step.costs.memory import PARAMETER, Recomputation
from ddltool.analyzers.step.costs.model import CostModel
from ddltool.analyzers.step.costs.offloading import HostCopies, host_link_bytes_per_s
from ddltool.analyzers.step.costs.parallel import ParallelCurve, between_replicas
from ddltool.analyzers.step.costs.predict import products_s
from ddltool.analyzers.step.costs.saving import ON_HOST, Checkpointing, Saving, split_way
from ddltool.analyzers.step.costs.setting import ParallelDegrees, Placement, Setting
from ddltool.analyzers.step.costs.sharding import Kind, Sharding
from ddltool.analyzers.step.costs.work import WorkCurve, host_wait_s, own_sum_s, own_update_s
from ddltool.analyzers.step.costs.wrapping import hooked, split_wait_s, with_copies
from ddltool.decision import Layout, OnHost, SavedOnHost
from ddltool.errors import Infeasible, InputError
from ddltool.graph import Graph
from ddltool.plans import Assignment, BucketSetting, Plan, PrefetchSetting, ShardingSetting
from ddltool.units import counted, show_bytes

if TYPE_CHECKING:  # it loads a solver
    from ddltool.analyzers.step.costs.checkpointing import CheckpointingChoice

Accept = Callable[[Layout], bool]
WAYS: tuple[Checkpointing, ...] = ("none", "selective", "full")
WAYS_ON_HOST = tuple(f"{way}{ON_HOST}" for way in WAYS)
GIB = 2.0**30
WHOLE = Sharding(kind="none")
# From this ratio of the host's time to the device's on, the host may decide the step: its time is known to within 60 %.
_HOST_NEAR = 0.6
# From this share of a step's operations in convolutions on, the layout of images counts.
_OF_IMAGES = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceKind:
    """One offered device type: its cost model, its network, and the memory that a process can use."""

    model: CostModel
    fabric: Fabric
    usable_bytes: float
    slower: float = 1.0
    """Factor on the predicted times, from the capability that the job gives."""
    price_per_hour: float | None = None
    """Of what takes a share of the batch: a device, or a group of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutCandidate:
    """A layout, with the sharding, recomputation and shares of samples that its figures are derived from."""

    layout: Layout
    sharding: Sharding
    recompute: str
    """What is recomputed: one of :data:`WAYS` or :data:`WAYS_ON_HOST`, or a key of the solver's choices ("chosen 0", ...)."""
    rows: tuple[Row, ...] = ()
    """Samples by device; ``kind`` is the index of the type in ``layout.devices``. Empty where the layout does not fit."""
    slowest: str = ""
    """The device type that ends the step last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Timed:
    """The forward and backward pass of one mini-batch on a device type, with the time of each operation."""

    program: Program
    graph: Graph

    def own_update_s(self, sharding: Sharding) -> float:
        """Return the seconds of the optimizer on the parameters that a process of the sharding updates itself."""
        return own_update_s(self.graph, sharding)

    def share(self, name: str) -> float:
        """Return the share of the pass's time, 0 to 1, that ``name`` says: ``host_share`` (Python) or ``library_share``."""
        return float(self.graph.meta.get(name) or 0.0)


@dataclass(frozen=True, kw_only=True)
class LayoutFigures:
    """Costs the layouts of one job. ``kinds``: offered devices by type; ``total``: samples per step.

    Where ``degrees`` say that several devices hold a replica between them, such a group takes a device's place: in counts, in
    shares of samples, in prices.

    In all methods ``used`` is device type -> number of devices, ``name`` a device type, ``passes`` the number of passes of a
    step, ``size`` the samples of one pass, and ``recompute`` what is recomputed (see :class:`LayoutCandidate`). A pass is one
    forward and backward pass on a device; a step of several passes accumulates their gradients.

    The private fields cache by: ``_timed`` (device type, samples, recomputation, work), ``_missing`` (usable bytes, sharding,
    recomputation, samples) and ``_peaks`` (the last three of these) in bytes, ``_settings`` the layout as JSON, ``_solved``
    that and whether blocks save on the host; by recomputation key ``_choices``.
    """

    work: WorkCurve
    kinds: Mapping[str, DeviceKind]
    total: int
    optimizer: str
    degrees: ParallelDegrees = field(default_factory=ParallelDegrees)
    compile: bool = False
    offload: bool = False
    """Whether parameters, gradients and the optimizer's state are kept in the hosts' memory."""
    ways: tuple[str, ...] = WAYS
    """What every block may save."""
    saves_on_host: bool = False
    """Whether the solver may let blocks save on the host."""
    _timed: dict[tuple[str, int, str, WorkCurve], _Timed] = field(default_factory=dict)
    _missing: dict[tuple[float, Sharding, str, int], float] = field(default_factory=dict)
    _peaks: dict[tuple[Sharding, str, int], float] = field(default_factory=dict)
    _settings: dict[str, tuple[BucketSetting | None, PrefetchSetting | None]] = field(default_factory=dict)
    _choices: dict[str, CheckpointingChoice] = field(default_factory=dict)
    _solved: dict[tuple[str, bool], LayoutCandidate | None] = field(default_factory=dict)

    def _with_settings(self, candidate: LayoutCandidate) -> Layout:
        """Return the layout with step and price reduced by what the best DDP buckets or FSDP2 prefetch save."""
        layout = candidate.layout
        saved_s = self._saved_by_settings_s(candidate)
        step_s = layout.step_s or math.inf
        price = None if layout.price_per_sample is None else layout.price_per_sample * (1 - saved_s / step_s)
        return layout.model_copy(update={"step_s": step_s - saved_s, "price_per_sample": price})

    def _saved_by_settings_s(self, candidate: LayoutCandidate) -> float:
        """Return by how many seconds the best DDP buckets or FSDP2 prefetch make a step shorter than the defaults.

        0.0 for groups of devices, of which no better settings are known, and for a single process.
        """
        if candidate.sharding.gathers:
            _, prefetch = self.communication(candidate)
            if prefetch is None:
                return 0.0
            # sharded replicas communicate in every pass
            return max(0.0, prefetch.default_step_s - prefetch.step_s) * candidate.layout.passes
        if candidate.sharding.kind == "ddp" and self.degrees.gpus == 1:
            program = self._last_pass(candidate)
            group = self._process_group(candidate.layout.devices, candidate.sharding)
            default_s = finish_s(program, group, default_cuts(program))
            best_s = min(default_s, finish_s(program, group, best_cuts(program, group)))
            # what ends before the pass's compute does is hidden, and earlier still saves nothing
            return max(program.compute_s, default_s) - max(program.compute_s, best_s)
        return 0.0

    def _last_pass(self, candidate: LayoutCandidate) -> Program:
        """Return one pass (when each gradient is ready) on the device type that ends the step last."""
        largest = candidate.layout.local_batch_sizes[candidate.slowest]
        size = -(-largest // candidate.layout.passes)
        timed = self._timed_pass(candidate.slowest, size, candidate.recompute, candidate.sharding)
        return self._hooked(timed, candidate.sharding)

    def _exchanged_bytes(self, name: str, sharding: Sharding) -> float:
        """Return a lower bound of the bytes of gradients that a device of type ``name`` exchanges in a step.

        They are the gradients of the device's pipeline stage, in the smaller of the sizes in which they are sent and stored.
        """
        # gradients are as large for any batch, so one that is traced anyway is taken
        program = self._timed_pass(name, self.work.traced.graph.batch_size or 1, "none", sharding).program
        return float(min(program.size_bytes.sum(), program.held_bytes.sum())) / self.degrees.pipeline

    def _missing_bytes(self, candidate: LayoutCandidate) -> float:
        """Return how many bytes torch's allocator lacks on the device type that lacks most; 0.0: the layout fits.

        The allocator reserves more than its tensors take, because memory is fragmented.
        """
        layout = candidate.layout
        return max(
            self._missing_on(
                self.kinds[name].usable_bytes, candidate.sharding, candidate.recompute, -(-size // layout.passes)
            )
            for name, size in layout.local_batch_sizes.items()
        )

    def _missing_on(self, usable_bytes: float, sharding: Sharding, recompute: str, size: int) -> float:
        """Return how many bytes the allocator lacks on a device that has ``usable_bytes``; results are cached.

        0.0: it has enough. Infinite: the model cannot be traced at so many samples.
        """
        key = usable_bytes, sharding, recompute, size
        if key not in self._missing:
            saving = self._saving(recompute, size, sharding)
            held = self._work(sharding).held(size, sharding, self.optimizer, saving)
            if held is None:
                self._missing[key] = math.inf
            # Given a limit, the allocator frees whole unused segments when it comes near.
            elif held.reserved_bytes(usable_bytes) is not None:
                self._missing[key] = 0.0
            else:
                self._missing[key] = (held.reserved_bytes() or 0) - usable_bytes
        return self._missing[key]

    def at_speeds(self, capabilities: Mapping[str, float], batch_size: int) -> Self:
        """Return these figures with times scaled so that they agree with measured capabilities.

        ``capabilities``: device type -> mini-batches of ``batch_size`` samples per second; types not in it stay as they are.
        """
        kinds = dict(self.kinds)
        for name, capability in capabilities.items():
            kinds[name] = replace(kinds[name], slower=self.capability(name, batch_size) / capability)
        return self.changed(kinds=kinds)

    def changed(self, **fields: Any) -> Self:
        """Return the figures of the same job with other fields, and with empty caches, whose keys do not hold these fields.

        Only the solver's choices of recomputation (``_choices``) stay, because layouts refer to them.
        """
        return replace(self, _timed={}, _missing={}, _peaks={}, _settings={}, _solved={}, **fields)

    def alternatives(self, candidate: LayoutCandidate) -> dict[str, Self]:
        """Return what the user may change of the script beside the layout: name of the change -> the figures with it.

        The changes are torch.compile; float8, compiled, where every device has units for it; asynchronous tensor parallelism,
        which torch has only compiled, in tensor groups; and channels_last where convolutions are more than a small share of
        the step. float8 and channels_last are told only where one device holds a replica: a group's work is traced in the
        job's numerics alone.
        """
        found = {} if self.compile else {"torch.compile": self.changed(compile=True)}
        prefix = "" if self.compile else "torch.compile with "
        work = self.work.under(candidate.sharding)
        is_replica_on_one_device = self.degrees.gpus == 1
        has_float8 = all("float8" in self.kinds[name].model.device.peak_flops for name in candidate.layout.devices)
        if has_float8 and work.in_fp8 is not None and is_replica_on_one_device:
            with suppress(InputError):  # a step that cannot be traced in float8 has no such alternative
                found[f"{prefix}fp8"] = self.changed(compile=True, work=work.in_fp8())
        if isinstance(self.work, ParallelCurve) and self.degrees.sequence:
            degrees = replace(self.degrees, overlapped=True)
            overlapped = self.changed(compile=True, degrees=degrees, work=replace(self.work, layout=degrees))
            found[f"{prefix}asynchronous tensor parallelism"] = overlapped
        has_images = _convolution_share(work.traced.graph) > _OF_IMAGES
        if has_images and work.in_channels_last is not None and is_replica_on_one_device:
            with suppress(InputError):  # the same of channels_last
                found["channels_last"] = self.changed(work=work.in_channels_last())
        return found

    def step_s(self, candidate: LayoutCandidate) -> float | None:
        """Return the seconds of a step in a candidate's layout by these figures; None where they have no such step."""
        layout = candidate.layout
        try:
            costed = self._cost(layout.devices, candidate.sharding, candidate.recompute, layout.passes, candidate.rows)
        except InputError:
            return None
        return None if costed is None else costed.layout.step_s

    def split_wait_s(self, candidate: LayoutCandidate) -> float:
        """Return by how many seconds a step is longer where DTensor splits layers among a group's devices.

        The scripts that ``ddltool emit`` writes use DTensor, whose Python code takes time for each operation. The figures of
        groups are those of libraries that split without it, as Megatron does, or compile it away. 0.0 without tensor
        parallelism and for a compiled step.
        """
        if self.degrees.tensor == 1 or self.compile:
            return 0.0
        passes = candidate.layout.passes
        step_samples = candidate.layout.local_batch_sizes[candidate.slowest]
        timed = self._timed_pass(candidate.slowest, -(-step_samples // passes), candidate.recompute, candidate.sharding)
        busy_s = candidate.layout.compute_s or 0.0
        return split_wait_s(timed.graph, passes, self.degrees.pipeline, busy_s)

    @property
    def step_tokens(self) -> int | None:
        """Return the tokens of a step; None where its samples are no texts."""
        tokens = self.work.traced.graph.meta.get("tokens_per_sample")
        return tokens * self.total if isinstance(tokens, int) else None

    def capability(self, name: str, batch_size: int) -> float:
        """Return the mini-batches of ``batch_size`` samples that one device of a type (or group) makes in a second, alone."""
        timed = self._timed_pass(name, batch_size, "none", WHOLE)
        seconds = self._busy_s(timed, WHOLE, 1)
        return 1 / seconds if seconds else math.inf

    def _busy_s(self, timed: _Timed, sharding: Sharding, passes: int) -> float:
        """Return the seconds for which a device computes in a step of ``passes`` passes, on average over pipeline stages.

        They are those of the passes, of adding up the passes' gradients and of the optimizer's update.
        """
        # The backward passes of a group's step hold its sums already.
        sums_s = (passes - 1) * own_sum_s(timed.graph, sharding) if self.degrees.gpus == 1 else 0.0
        pass_s = self._hooked(timed, sharding).compute_s
        return (passes * pass_s + sums_s + timed.own_update_s(sharding)) / self.degrees.pipeline

    def _hooked(self, timed: _Timed, sharding: Sharding) -> Program:
        """Return a pass with FSDP2's copies and what the hooks of DDP or FSDP2 take on the host; for groups, without either.

        Groups of devices have DTensor's overhead in place of the hooks': see :meth:`split_wait_s`.
        """
        if self.degrees.gpus > 1:
            return timed.program
        return hooked(with_copies(timed.program, timed.graph, sharding), timed.graph, sharding)

    def hooks_s(self, name: str, batch_size: int) -> float:
        """Return by how many seconds DDP's hooks on the host lengthen a pass of ``batch_size`` samples on a device type."""
        ddp = Sharding(kind="ddp")
        timed = self._timed_pass(name, batch_size, "none", ddp)
        return max(0.0, self._hooked(timed, ddp).compute_s - timed.program.compute_s)

    def _work(self, sharding: Sharding) -> WorkCurve:
        """Return the step's operations as a function of the batch size, as this sharding (and compilation) runs them."""
        return self.work.under(sharding, self.compile)

    def whole_bytes(self, devices: Mapping[str, int], batch_size: int, *, sums: bool = False) -> float:
        """Return the peak bytes of a process with a whole model and ``batch_size`` samples.

        ``sums``: whether it keeps the sum of gradients from pass to pass. Raises Infeasible where a device of ``devices`` has
        less memory.
        """
        kind: Kind = "ddp" if sum(devices.values()) > 1 else "none"
        needed = self._peak(Sharding(kind=kind, sums=sums), "none", batch_size)
        for name in devices:
            if (has := self.kinds[name].usable_bytes) < needed:
                raise Infeasible(
                    f"memory: a whole model in each process, with {counted(batch_size, 'sample')}, takes {show_bytes(needed)}; "
                    f"each {name} has {show_bytes(has)} for it, {gib(needed - has)} missing"
                )
        return needed

    def demand_whole(self, name: str, count: int, batch_size: int) -> None:
        """Raise Infeasible where devices of a type lack the memory for a whole model and ``batch_size`` samples.

        ``count``: how many of them are offered; 0: nothing is demanded of the type.
        """
        if count:
            # two devices exchange gradients, which takes memory beside the model; more take no more than two
            self.whole_bytes({name: min(2, count)}, batch_size)

    def plan(self, candidate: LayoutCandidate, problem: Problem, strategy: Literal["bsp", "lb-bsp"]) -> Plan:
        """Return the plan of a layout that fits: batch sizes, sharding and modules to checkpoint.

        Its ``iteration_s`` is compute alone; ``Layout.step_s`` includes exposed communication.
        """
        layout = candidate.layout
        names = list(layout.devices)
        most_samples = max(row.size for row in candidate.rows)
        pass_samples = -(-most_samples // layout.passes)
        saving = self._saving(candidate.recompute, pass_samples, candidate.sharding)
        rows = []
        for row in candidate.rows:
            name = names[row.kind]
            timed = self._timed_pass(name, -(-row.size // layout.passes), candidate.recompute, candidate.sharding)
            seconds = self._busy_s(timed, candidate.sharding, layout.passes)
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
        # mini-batches per second if no device ever waited
        capacity = (
            sum(row.devices * row.local_batch_size / (row.compute_s or math.inf) for row in rows) / problem.batch_size
        )
        sharding = ShardingSetting(
            kind="ddp" if layout.sharding == "none" else layout.sharding,
            replicate=layout.replicate,
            shard=layout.shard,
            offload=layout.offload is not None,
            checkpointing=saving.recomputed(),
            on_host=saving.offloaded(self._work(candidate.sharding).lifetimes(pass_samples).names),
            memory_bytes=layout.memory_bytes,
        )
        waste = max(0.0, capacity - problem.max_workers / compute_s)
        return problem.plan(strategy, compute_s, rows, waste=waste, status="feasible", sharding=sharding)

    def communication(self, candidate: LayoutCandidate) -> tuple[BucketSetting | None, PrefetchSetting | None]:
        """Return the best settings as (DDP's buckets, FSDP2's prefetch that fits memory), of which one or both are None.

        Both are None for one process, for groups of devices, and where FSDP2 finds no units to shard. Results are cached by the
        layout as JSON: it holds sharding and samples, and its times and bytes tell kinds of recomputation apart.
        """
        key = candidate.layout.model_dump_json()
        if key not in self._settings:
            self._settings[key] = self._communication(candidate)
        return self._settings[key]

    def _communication(self, candidate: LayoutCandidate) -> tuple[BucketSetting | None, PrefetchSetting | None]:
        """Return the result of :meth:`communication` without its cache."""
        layout = candidate.layout
        if layout.sharding == "none" or self.degrees.gpus > 1:  # nothing is known of settings that suit groups
            return None, None
        program = self._last_pass(candidate)
        group = self._process_group(layout.devices, candidate.sharding)
        if not candidate.sharding.gathers:
            return bucket_setting(plan_ddp(program, group)), None
        plans = plan_fsdp(program, group)
        if plans is None:
            return None, None
        # Gathering further ahead is faster, and holds more parameters at a time.
        free_bytes = min(self.kinds[name].usable_bytes - size for name, size in layout.memory_bytes.items())
        extra_bytes = plans.best.gathered_bytes - plans.default.gathered_bytes
        chosen = plans.best if extra_bytes <= free_bytes else plans.default
        if not candidate.sharding.reshards:
            chosen = plans.default.model_copy(update={"reshard_after_forward": False})
        return None, prefetch_setting(plans, chosen)

    def mfu(self, candidate: LayoutCandidate, step_s: float) -> float:
        """Return the share of a step of ``step_s`` seconds that its products would take at the devices' dense peaks.

        Recomputed products do not count. Devices of a type are taken to have as many samples as the one with the most.
        """
        layout = candidate.layout
        products_of_all_s = 0.0  # summed over the devices, or over the groups of devices that hold a replica each
        for name, count in layout.devices.items():
            size = -(-layout.local_batch_sizes[name] // layout.passes)
            graph = self._timed_pass(name, size, "none", candidate.sharding).graph
            products_of_all_s += count * products_s(graph, self.kinds[name].model.device)
        all_s = sum(layout.devices.values()) * layout.pipeline_parallel * step_s
        return layout.passes * products_of_all_s / all_s

    def _cost(
        self,
        used: Mapping[str, int],
        sharding: Sharding,
        recompute: str,
        passes: int,
        rows: tuple[Row, ...],
        accept: Accept = lambda _: True,
    ) -> LayoutCandidate | None:
        """Return the layout with its predicted step, the range of it, peak memory and price.

        ``used``: device type -> number of devices. ``rows``: devices with equal samples of a step (``size``) and the index of
        their type in ``used`` (``kind``). None where ``accept`` refuses the layout with a step of compute alone:
        communication would make it only worse, and need not be costed.
        """
        names = list(used)
        # Device type -> most samples of one device, in a step and in a pass: they decide its time and memory.
        step_samples = {names[row.kind]: max(other.size for other in rows if other.kind == row.kind) for row in rows}
        pass_samples = {name: -(-size // passes) for name, size in step_samples.items()}
        timed_passes = {name: self._timed_pass(name, size, recompute, sharding) for name, size in pass_samples.items()}
        compute_s = max(self._busy_s(timed, sharding, passes) for timed in timed_passes.values())
        prices = [self.kinds[name].price_per_hour for name in used]
        hourly_price = sum(count * (price or 0.0) for count, price in zip(used.values(), prices, strict=True))

        def make_layout(step_s: float, **fields: Any) -> Layout:
            """Return the layout with a step of ``step_s`` seconds and further ``fields``."""
            return Layout(
                devices=dict(used),
                **self._shape(sharding, sum(used.values())),
                checkpointing=checkpointing_of(recompute),
                local_batch_sizes=step_samples,
                passes=passes,
                compute_s=compute_s,
                step_s=step_s,
                memory_bytes={name: self._peak(sharding, recompute, size) for name, size in pass_samples.items()},
                # The state on the host is the same of all types, so that any type's pass tells it.
                offload=self._on_host(sharding, passes, next(iter(timed_passes.values()))),
                activations=self._saved_on_host(used, sharding, recompute, passes, step_samples),
                price_per_sample=None if None in prices else hourly_price / 3600 * step_s / self.total,
                **fields,
            )

        if not accept(make_layout(compute_s)):
            return None
        # A step ends with the type that takes longest, communication on the network of all used types included.
        gpus = {name: count * self.degrees.gpus for name, count in used.items()}
        group = Fabric.joined({name: self.kinds[name].fabric for name in used}, gpus)
        place = Placement(num_nodes=group.nodes, num_replicas=sum(used.values()), gpus=self.degrees.gpus)
        step_times = {
            name: self._work(sharding).step_time(
                timed.graph,
                timed.program,
                self.kinds[name].model,
                self._setting(group.fabric, sharding, passes),
                place,
                pass_samples[name],
            )
            for name, timed in timed_passes.items()
        }
        slowest = max(step_times, key=lambda name: step_times[name].step_s)
        longest_s = step_times[slowest].step_s
        slowest_pass = timed_passes[slowest]
        low_s, high_s = self.kinds[slowest].model.interval(
            longest_s,
            host_share=slowest_pass.share("host_share"),
            library_share=slowest_pass.share("library_share"),
            compiled=self.compile,
        )
        # A host-bound type takes as long for a smaller share of the batch, so its time does not follow the device.
        waits_for_hooks = any(each.hooks_s > 0.0 for each in step_times.values())
        host_is_near = any(each.share("host_share") > _HOST_NEAR for each in timed_passes.values())
        host_bound = waits_for_hooks or host_is_near
        wait_s = host_wait_s(slowest_pass.graph, passes, step_times[slowest])
        layout = make_layout(longest_s, low_s=low_s, high_s=high_s, host_bound=host_bound, host_wait_s=wait_s)
        return LayoutCandidate(layout=layout, sharding=sharding, recompute=recompute, rows=rows, slowest=slowest)

    def _peak(self, sharding: Sharding, recompute: str, size: int) -> float:
        """Return the most bytes that a process holds at a time in a pass of ``size`` samples; infinite: no such batch."""
        key = sharding, recompute, size
        if key not in self._peaks:
            saving = self._saving(recompute, size, sharding)
            held = self._work(sharding).held(size, sharding, self.optimizer, saving)
            self._peaks[key] = math.inf if held is None else held.peak().total_bytes
        return self._peaks[key]

    def _on_host(self, sharding: Sharding, passes: int, timed: _Timed) -> OnHost | None:
        """Return what a host keeps, copies and computes in a step of ``passes`` passes; None where the state is on the devices.

        In each pass parameters are copied to the device for the forward pass, again for the backward pass if they are freed in
        between (``sharding.reshards``), and gradients are copied back.
        """
        if not sharding.on_host:
            return None
        lifetimes = self._work(sharding).lifetimes(1)
        kept_bytes = lifetimes.kept_share * float(lifetimes.sizes()[lifetimes.role == PARAMETER].sum())
        copied_bytes = (1 + sharding.reshards) * kept_bytes + float(lifetimes.trained_bytes.sum())
        return OnHost(
            memory_bytes=lifetimes.host_bytes(sharding, self.optimizer, lifetimes.sizes()),
            copied_bytes=passes * copied_bytes / sharding.shard,
            update_s=timed.own_update_s(sharding) + (passes - 1) * own_sum_s(timed.graph, sharding),
        )

    def _saved_on_host(
        self, used: Mapping[str, int], sharding: Sharding, recompute: str, passes: int, sizes: Mapping[str, int]
    ) -> SavedOnHost | None:
        """Return what a step's activations cost that blocks save on the hosts; None where they save none there.

        The memory is in bytes of a host, for all of its devices; the copied bytes and the seconds of waiting are of one device.
        Each figure is that of the device type where it is largest. ``sizes``: device type -> samples of a step on one device.
        """
        by_type = list[SavedOnHost]()
        for name, step_samples in sizes.items():
            size = -(-step_samples // passes)
            saving = self._saving(recompute, size, sharding)
            if not saving.on_host:
                return None
            work = self._work(sharding)
            # Without recomputation, whose time ``copies`` itself adds to that of the pass.
            timed = self._timed_pass(name, size, "none", sharding).graph
            lifetimes = work.lifetimes(size)
            link_bytes_per_s = host_link_bytes_per_s(self.kinds[name].model.device)
            copies = lifetimes.copies(
                Recomputation(lifetimes, saving),
                lifetimes.seconds(timed),
                lifetimes.sizes(work.scaled(size)),
                link_bytes_per_s,
            )
            copied_bytes = link_bytes_per_s * float(copies.copy_s.sum())  # one way, in one pass
            devices_on_host = min(used[name], self.kinds[name].fabric.gpus_per_node)
            by_type.append(
                SavedOnHost(
                    memory_bytes=devices_on_host * copied_bytes,
                    copied_bytes=2 * passes * copied_bytes,  # to the host and back
                    waits_s=passes * sum(float(waits_s.sum()) for waits_s in copies.waits()),
                )
            )
        figures = SavedOnHost.model_fields
        return SavedOnHost(**{figure: max(getattr(saved, figure) for saved in by_type) for figure in figures})

    def _saving(self, recompute: str, size: int, sharding: Sharding) -> Saving:
        """Return which activations each block keeps for the backward pass, in a pass of ``size`` samples.

        ``recompute``: a way that is the same for every block, or the key of a choice by the solver (:class:`LayoutCandidate`).
        """
        if recompute in self._choices:
            return self._choices[recompute].saving
        return self._work(sharding).lifetimes(size).every_saving(recompute)

    def _timed_pass(self, name: str, size: int, recompute: str, sharding: Sharding) -> _Timed:
        """Return a pass of ``size`` samples on a device type, recomputation included; results are cached."""
        work = self._work(sharding)
        key = name, size, recompute, work
        if key not in self._timed:
            device = self.kinds[name]
            saving = self._saving(recompute, size, sharding)
            if saving:  # not everything is kept: the pass without recomputation becomes longer
                lifetimes = work.lifetimes(size)
                timed = lifetimes.lengthened(
                    saving,
                    self._timed_pass(name, size, "none", sharding).graph,
                    lifetimes.sizes(work.scaled(size)),
                    host_link_bytes_per_s(device.model.device),
                )
            else:
                timed = work.timed(size, device.model, self._setting(device.fabric, sharding, 1))
                timed = _slowed(timed, device.slower)
            self._timed[key] = _Timed(program=program_of(timed), graph=timed)
        return self._timed[key]

    def _setting(self, fabric: Fabric, sharding: Sharding, passes: int) -> Setting:
        """Return what the cost model must know of a step beside its operations; ``fabric`` joins single devices."""
        return Setting(
            fabric=fabric,
            optimizer=self.optimizer,
            accumulation=passes,
            compile=self.compile,
            sharding=sharding,
            layout=self.degrees,
        )

    def _between(self, name: str) -> Fabric:
        """Return the network over which the gradients of replicas on a device type are reduced.

        A replica is on one device or, in groups, on several; then it is the network between groups.
        """
        return between_replicas(self.kinds[name].fabric, self.degrees)

    def _shape(self, sharding: Sharding, replicas: int) -> dict[str, Any]:
        """Return field -> value for the fields of :class:`Layout` that sharding and degrees of parallelism decide."""
        kinds: dict[Kind, str] = {"none": "none", "ddp": "ddp", "fsdp": "fsdp", "zero2": "fsdp", "hsdp": "hsdp"}
        return {
            "sharding": kinds[sharding.kind],
            "replicate": replicas // sharding.shard,
            "shard": sharding.shard,
            "reshard_after_forward": sharding.kind != "zero2",
            "tensor_parallel": self.degrees.tensor,
            "pipeline_parallel": self.degrees.pipeline,
        }

    def _process_group(self, devices: Mapping[str, int], sharding: Sharding) -> Communicator:
        """Return the process group in which ``devices`` (type -> number) exchange gradients.

        For a sharded model it is the group that holds one copy of the model, with the time of copies to hosts if the state is
        kept there.
        """
        group = Fabric.joined({name: self._between(name) for name in devices}, devices)
        if not sharding.gathers:
            return group
        used = [self.kinds[name].model.device for name in devices]
        kept_share = self._work(sharding).lifetimes(1).kept_share if sharding.on_host else 1.0
        return HostCopies.around(
            group.fabric.sharded(group.replicas, sharding.shard, group.nodes), sharding, used, kept_share
        )


def checkpointing_of(recompute: str) -> Literal["none", "selective", "full", "chosen"]:
    """Return the value of ``Layout.checkpointing`` for a way of recomputing; "chosen" for a solver's choice."""
    way, _ = split_way(recompute)  # without where the blocks save
    return next((kind for kind in WAYS if kind == way), "chosen")


def _convolution_share(graph: Graph) -> float:
    """Return the share of a graph's floating-point operations that are in convolutions, 0 to 1."""
    is_convolution = np.array([op_type.startswith("aten.convolution") for op_type in graph.op_type], dtype=bool)
    return float(graph.flops[is_convolution].sum() / max(graph.flops.sum(), 1.0))


def _slowed(timed: Graph, factor: float) -> Graph:
    """Return a timed graph with the times of all operations, copies and of the optimizer's update multiplied by ``factor``."""
    if factor == 1.0:
        return timed
    figures = {name: factor * float(timed.meta.get(name) or 0.0) for name in ("update_s", "update_host_s")}
    figures["memory_bytes_per_s"] = float(timed.meta.get("memory_bytes_per_s") or 0.0) / factor
    slowed = timed.with_durations(timed.duration_s * factor, timed.estimate)
    return replace(slowed, meta={**timed.meta, **figures})


def gib(size_bytes: float) -> str:
    """Return a size as a text such as ``0.0125 GiB``, in GiB however small it is."""
    return f"{size_bytes / GIB:.3g} GiB"
