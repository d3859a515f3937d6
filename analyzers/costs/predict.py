"""Predicted steps over batch sizes and placements of a job on one device type. Start at :func:`predict`.

The work of a step at any batch size is counted from one trace where it is a function of its batch
(:func:`ddltool.analyzers.tracing.torch_adapter.trace_any_batch`): its graph, and the memory alive while it runs. A step is
``accumulation`` passes and an update. With several replicas the gradients leave in DDP's default buckets over a ring
(Patarasuk and Yuan, JPDC 2009) while the last backward pass goes on, and only what is left after it counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, get_args

import numpy as np

from ddltool.analyzers.communication.collectives import default_cuts, finish_s
from ddltool.analyzers.communication.fsdp import simulate_fsdp, units_of
from ddltool.analyzers.communication.program import Program, program_of
from ddltool.analyzers.costs.kernels import compiled
from ddltool.analyzers.costs.memory import (
    Array,
    Checkpointing,
    Held,
    Keeps,
    Ledger,
    Peak,
    Recomputation,
    Sharding,
    ledger_of,
)
from ddltool.analyzers.costs.model import HOST_BOUND, OPTIMIZER, OPTIMIZERS, CostModel, estimate
from ddltool.analyzers.costs.nccl import Fabric
from ddltool.analyzers.tracing.dialect import Numerics
from ddltool.analyzers.tracing.step import TrainingStep
from ddltool.analyzers.tracing.torch_adapter import AS_DEFAULT, TracedStep, trace_any_batch
from ddltool.device import GIVEN, Device, Network
from ddltool.errors import Infeasible, InputError, did_you_mean
from ddltool.graph import Graph
from ddltool.graph_results import (
    Assumptions,
    MemoryTimeline,
    PredictedDevice,
    PredictedRow,
    PredictResult,
    RecomputeFigures,
)
from ddltool.plans import Recomputed
from ddltool.units import parse_bytes

if TYPE_CHECKING:  # it loads a solver
    from ddltool.analyzers.costs.checkpointing import Chosen

# What a training process cannot have of the device: what the driver keeps (1 to 1.5 %) and a context that loads its kernels
# when they are needed.
RESERVED_BYTES = 2.0**30
# A context that loads all kernels of torch and cuDNN at once, as CUDA did before 11.7: what nvidia-smi shows of a process
# whose model is tiny (Lucid's PPO, 2.00 GiB on an RTX 3090).
CONTEXT_BYTES = 2.0 * 2**30
# What segments may take beyond those of the played allocator: torchtitan's runs took up to a tenth more.
FRAGMENTED = 1.1
# Of each of NCCL's communicators: 4 MiB (NCCL_BUFFSIZE) each way for up to 32 channels.
_COMMUNICATOR_BYTES = 2 * 32 * 4 * 2.0**20
# A choice of activations that leaves its device no room is made again for a smaller budget, so many times.
_TIGHTER, _TIGHTENED = 0.95, 8
# Moments of a timeline of memory.
_MOMENTS = 160
# A rate of 90 % of the best predicted one counts as saturated, as for measured profiles.
_SATURATED = 0.9
_ASSUMED = ("compile", "optimizer", "accumulation", "sharding", "checkpointing")
# What each precision computes in.
_TYPES = {"amp": "float16", "bf16": "bfloat16", "tf32": "tf32", "fp32": "float32"}


@dataclass(frozen=True, kw_only=True, eq=False)
class WorkCurve:
    """The work of a step at any batch size."""

    traced: TracedStep

    _ledgers: dict[int, Ledger] = field(default_factory=dict)

    def ledger(self, batch_size: int) -> Ledger:
        """Return what the step holds at a batch size, from one trace where that tells of all. O(calls) the first time.

        A step that is traced at every batch size counts at the next multiple of 8 where it does not run at this one.
        Raises InputError where it cannot be traced.
        """
        traced = self.traced
        if batch_size != traced.graph.batch_size and traced.scale(batch_size) is None:
            try:
                traced = traced.traced_at(batch_size)
            except InputError:
                if batch_size % 8 == 0:
                    raise
                return self.ledger(batch_size + -batch_size % 8)
        size = traced.graph.batch_size or 0
        if size not in self._ledgers:
            self._ledgers[size] = ledger_of(traced)
        return self._ledgers[size]

    def held(
        self, batch_size: int, sharding: Sharding, optimizer: str, keeps: Keeps | Checkpointing = "none"
    ) -> Held | None:
        """Return what one process holds where, of all tensors; None where the step is traced at no such batch.

        What kernels take as workspace is not in a trace. Raises InputError for checkpointing of a model without blocks.
        """
        if self.traced.largest is not None and batch_size > self.traced.largest:
            return None
        ledger = self.ledger(batch_size)
        keeps = ledger.every_block(keeps) if isinstance(keeps, str) else keeps
        return ledger.held(Recomputation(ledger, keeps), sharding, optimizer, ledger.sizes(self.scaled(batch_size)))

    def workspace_bytes(self, batch_size: int) -> float:
        """Return what cuDNN may take beside the tensors while it tries its kernels (:meth:`Ledger.workspace_bytes`)."""
        return self.ledger(batch_size).workspace_bytes(self.scaled(batch_size))

    def scaled(self, batch_size: int) -> int | None:
        """Return the batch size to which the ledger of a batch size is scaled; None: it is of that size itself."""
        return batch_size if self.ledger(batch_size).traced is self.traced else None

    def peak(
        self, batch_size: int, sharding: Sharding, optimizer: str, checkpointing: Checkpointing = "none"
    ) -> Peak | None:
        """Return the most bytes of tensors that one process holds, as :meth:`held` does."""
        held = self.held(batch_size, sharding, optimizer, checkpointing)
        return None if held is None else held.peak()

    def runs_at(self, batch_size: int) -> bool:
        """Return whether the step takes a batch size, so far as a trace has to tell."""
        if self.traced.prime == self.traced.graph.batch_size:
            return True
        try:
            self.traced.at(batch_size)
        except InputError:
            return False
        return True


def measure_work(build: Callable[[], TrainingStep], numerics: Numerics = AS_DEFAULT) -> WorkCurve:
    """Return the work of the training step that ``build`` makes. Raises InputError when it cannot be traced."""
    return WorkCurve(traced=trace_any_batch(build, mode="training", numerics=numerics))


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Replicas over nodes; one node is joined by the local link, several by the network."""

    num_nodes: int
    num_replicas: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_nodes <= self.num_replicas:
            text = f"{self.num_replicas} replicas on {self.num_nodes} nodes"
            raise InputError("--replicas", text, "every node holds at least one replica")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How the replicas are joined, and how the model is trained."""

    fabric: Fabric
    optimizer: str = OPTIMIZER
    accumulation: int = 1
    """Passes in a step."""
    compile: bool = False
    sharding: str = "ddp"
    """As :meth:`Sharding.named` takes it, where there are several replicas."""
    checkpointing: str = "none"
    """Of every block (none, selective, full), or the bytes that a step's tensors may take, such as 40GiB."""

    def sharded(self, replicas: int) -> Sharding:
        """Return how ``replicas`` share the step's state."""
        return Sharding.named(self.sharding if replicas > 1 else "none", replicas)

    @property
    def budget_bytes(self) -> float | None:
        """Return what a step's tensors may take; None where blocks are treated alike."""
        if self.checkpointing in get_args(Checkpointing):
            return None
        return parse_bytes(self.checkpointing, "--checkpointing")

    @property
    def uniform(self) -> Checkpointing:
        """Return how every block is treated, or may be under a budget."""
        known: tuple[Checkpointing, ...] = get_args(Checkpointing)
        return next((how for how in known if how == self.checkpointing), "full")

    def __post_init__(self) -> None:
        if not any(sign.isdigit() for sign in self.checkpointing) and self.checkpointing not in get_args(Checkpointing):
            ways = did_you_mean(self.checkpointing, (*get_args(Checkpointing), "40GiB"))
            raise InputError("--checkpointing", f"unknown {self.checkpointing!r}", ways)
        _ = self.budget_bytes
        if self.optimizer not in OPTIMIZERS:
            raise InputError("--optimizer", f"unknown {self.optimizer!r}", did_you_mean(self.optimizer, OPTIMIZERS))


def predict_on(
    curve: WorkCurve,
    chosen: Sequence[tuple[CostModel, Setting]],
    batch_sizes: Sequence[int] | None,
    replicas: Sequence[int],
    source: str,
) -> PredictResult:
    """Return the predicted rows on each device, what was assumed, and how sure it is.

    Without ``batch_sizes`` those that fit: raises Infeasible when none does. ``source`` names the model.
    """
    setting, meta = chosen[0][1], curve.traced.graph.meta
    rows, devices = [], {}
    for model, own in chosen:
        places = [Placement(num_nodes=math.ceil(n / own.fabric.gpus_per_node), num_replicas=n) for n in replicas]
        sizes = batch_sizes or _fitting_sizes(curve, model, own, max(replicas))
        found = predict(curve, model, own, sizes, places, source)
        fitting = [row for row in found if row.fits]
        alone = [row for row in fitting if row.num_replicas == found[0].num_replicas]
        best = max((row.samples_per_s for row in alone), default=0.0)
        wide = [row.local_batch_size for row in alone if row.samples_per_s >= _SATURATED * best]
        devices[model.device.name] = PredictedDevice(
            saturation_batch=min(wide, default=None),
            memory_limit_batch=memory_limit_batch(curve, model.device, own, found[0].num_replicas),
            has_precision=_TYPES[str(meta.get("precision"))] in model.device.peak_flops,
            price_per_hour=model.device.price_per_hour,
            error=model.residuals,
            link_bytes_per_s=own.fabric.inside.bytes_per_s,
            memory=timeline(curve, model, own, max(fitting, key=lambda row: row.samples_per_s)) if fitting else None,
        )
        rows += found
    assumed = {
        **{name: meta.get(name) for name in ("precision", "channels_last")},
        **{name: getattr(setting, name) for name in _ASSUMED},
        "sequence_length": meta.get("tokens_per_sample"),
        "bandwidth_bytes_per_s": setting.fabric.between.bytes_per_s,
        "gpus_per_node": setting.fabric.gpus_per_node,
    }
    return PredictResult(predicted=True, rows=rows, devices=devices, assumptions=Assumptions.model_validate(assumed))


def _fitting_sizes(curve: WorkCurve, model: CostModel, setting: Setting, replicas: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to the memory limit. Raises Infeasible when one sample does not fit."""
    limit = memory_limit_batch(curve, model.device, setting, replicas)
    if limit < 1 and setting.budget_bytes:
        sharding, seconds = (
            setting.sharded(replicas),
            curve.ledger(1).seconds(timed_step(curve.traced.at(1), model, setting)),
        )
        _chosen(curve, model, setting, sharding, seconds, 1)  # says what would do, unless a mixture of choices does
        return (1,)
    if limit < 1:
        raise Infeasible(
            f"one sample does not fit the {model.device.memory_gib:g} GiB of a {model.device.name}, by estimate; "
            f"{remedy(curve, model.device, setting, replicas) or 'nor does it sharded over 1,024'}; "
            "give --batch-sizes to see its time all the same"
        )
    every = tuple(2**power for power in range(limit.bit_length()))
    return tuple(size for size in every if curve.runs_at(size)) or every


def remedy(curve: WorkCurve, device: Device, setting: Setting, replicas: int) -> str:
    """Return the least change by which one sample fits a device, as options with the largest batch; "" where none does.

    Less checkpointing goes before more, replicas as they are before more of them.
    """
    hows: list[Checkpointing] = ["none", "selective", "full"]
    hows = hows[hows.index(setting.uniform) :] if curve.ledger(1).blocks else ["none"]
    counts = [replicas, *(2**power for power in range(1, 11) if 2**power > replicas)]
    for count in counts:
        kinds = (
            [setting.sharding, "zero1", "fsdp"]
            if count == replicas > 1
            else [setting.sharding if count == 1 else "fsdp"]
        )
        for kind in dict.fromkeys(kinds):
            for how in hows:
                if (count, kind, how) == (replicas, setting.sharding, setting.uniform):
                    continue
                other = replace(setting, sharding=kind, checkpointing=how)
                if limit := memory_limit_batch(curve, device, other, count):
                    changed = [f"--replicas {count}"] * (count != replicas)
                    changed += [f"--sharding {kind}"] * (kind != setting.sharding)
                    changed += [f"--checkpointing {how}"] * (how != setting.checkpointing)
                    return f"with {' '.join(changed)} a local batch of {limit} does"
    return ""


def predict(
    curve: WorkCurve,
    model: CostModel,
    setting: Setting,
    batch_sizes: Sequence[int],
    placements: Sequence[Placement],
    source: str = "",
) -> list[PredictedRow]:
    """Return one prediction per placement and local batch size, placements outermost. O(ops log ops) per batch size.

    Raises InputError for a batch size that the step is not traced at, and Infeasible for a budget that no choice keeps.
    """
    timed = {size: timed_step(curve.traced.at(size), model, setting) for size in batch_sizes}
    made: dict[tuple[int, Sharding], _Repeated] = {}
    rows = []
    for placement in placements:
        sharding = setting.sharded(placement.num_replicas)
        for size in batch_sizes:
            if (size, sharding) not in made:
                alike = next(
                    (each for (own, _), each in made.items() if own == size and not setting.budget_bytes), None
                )
                made[size, sharding] = alike or _repeated(curve, model, setting, sharding, timed[size], size)
            rows.append(_row(curve, model, setting, placement, made[size, sharding], size, source))
    return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class _Repeated:
    """A timed step with what is computed again."""

    graph: Graph
    program: Program
    keeps: Keeps
    figures: RecomputeFigures | None


def _repeated(
    curve: WorkCurve, model: CostModel, setting: Setting, sharding: Sharding, timed: Graph, size: int
) -> _Repeated:
    if setting.checkpointing == "none":
        return _Repeated(graph=timed, program=program_of(timed), keeps={}, figures=None)
    ledger = curve.ledger(size)
    keeps: Keeps = ledger.every_block(setting.uniform)
    budget, bound_s = setting.budget_bytes, None
    if budget is not None:
        chosen = _chosen(curve, model, setting, sharding, ledger.seconds(timed), size)
        keeps, bound_s = chosen.keeps, chosen.bound_s
    again_s = ledger.again_s(Recomputation(ledger, keeps), ledger.seconds(timed)).sum()
    modules = [Recomputed(module=name, keeps=list(kept)) for name, kept in keeps.items()]
    figures = RecomputeFigures(modules=modules, recomputed_s=float(again_s), budget_bytes=budget, lower_bound_s=bound_s)
    longer = ledger.lengthened(keeps, timed)
    return _Repeated(graph=longer, program=program_of(longer), keeps=keeps, figures=figures)


def _chosen(
    curve: WorkCurve, model: CostModel, setting: Setting, sharding: Sharding, seconds: Array, size: int
) -> Chosen:
    """Return the cheapest choice under the budget; under less of it where the device's allocator finds no room for that."""
    from ddltool.analyzers.costs.checkpointing import cheapest  # it loads a solver

    ledger, budget = curve.ledger(size), setting.budget_bytes or 0.0
    chosen = None
    for _ in range(_TIGHTENED):
        try:
            chosen = cheapest(ledger, seconds, sharding, setting.optimizer, budget, curve.scaled(size))
        except Infeasible:
            if chosen is None:
                raise
            break
        held = curve.held(size, sharding, setting.optimizer, chosen.keeps)
        if held is None or held.reserved_bytes(usable_bytes(model.device)) is not None:
            break
        budget = _TIGHTER * min(budget, chosen.peak_bytes)
    assert chosen is not None
    return chosen


def _row(
    curve: WorkCurve,
    model: CostModel,
    setting: Setting,
    placement: Placement,
    made: _Repeated,
    size: int,
    source: str,
) -> PredictedRow:
    graph, program = made.graph, made.program
    sharding = setting.sharded(placement.num_replicas)
    update_s, host_share = own_update_s(graph, sharding), float(graph.meta.get("host_share") or 0.0)
    step_s = step_of(program, setting, placement, sharding, update_s)
    library_share = float(graph.meta.get("library_share") or 0.0)
    low_s, high_s = model.interval(step_s, host_share=host_share, library_share=library_share)
    samples, tokens = placement.num_replicas * size * setting.accumulation, graph.meta.get("tokens_per_sample")
    held = curve.held(size, sharding, setting.optimizer, made.keeps)
    if held is None:
        raise InputError("--batch-sizes", f"{size} is more than the step is traced at", "give a smaller one")
    peak_bytes, within = held.peak().total_bytes, held.reserved_bytes(usable_bytes(model.device))
    # on a full device the allocator gives free segments back: what it would take elsewhere is more than there is
    reserved_bytes = within if within is not None else held.reserved_bytes() or 0
    low, high = memory_range(peak_bytes, reserved_bytes, sharding, placement.num_replicas, curve.workspace_bytes(size))
    price = model.device.price_per_hour
    return PredictedRow(
        device=model.device.name,
        num_nodes=placement.num_nodes,
        num_replicas=placement.num_replicas,
        local_batch_size=size,
        step_time_s=step_s,
        predicted_low_s=low_s,
        predicted_high_s=high_s,
        sync_time_s=max(step_s - setting.accumulation * program.compute_s - update_s, 0.0),
        peak_memory_bytes=round(peak_bytes),
        reserved_bytes=reserved_bytes,
        memory_low_bytes=round(low),
        memory_high_bytes=round(high),
        fits=within is not None,
        recompute=made.figures,
        samples_per_s=samples / step_s,
        tokens_per_s=samples * float(tokens) / step_s if isinstance(tokens, (int, float)) else None,
        mfu=setting.accumulation * products_s(graph, model.device) / step_s,
        host_bound=host_share > HOST_BOUND,
        price_per_million_samples=None
        if price is None
        else price * placement.num_replicas / 3600 / (samples / step_s) * 1e6,
        accumulation_steps=setting.accumulation - 1,
        source=source,
        origin="predicted",
    )


def step_of(program: Program, setting: Setting, placement: Placement, sharding: Sharding, update_s: float) -> float:
    """Return the seconds of a step: all its passes, what is left of synchronisation, and the update of one's part.

    ``update_s``: of one's part. Sharded processes communicate in every pass, others in the last one.
    """
    synced_s = _synchronised_s(program, setting, placement, sharding)
    other_s = synced_s if sharding.gathers else program.compute_s
    return (setting.accumulation - 1) * other_s + synced_s + update_s


def own_update_s(graph: Graph, sharding: Sharding) -> float:
    """Return the seconds in which a process updates its part, from a graph's times: of sharded tensors it has as many."""
    whole_s, host_s = (float(graph.meta.get(name) or 0.0) for name in ("update_s", "update_host_s"))
    return host_s + (whole_s - host_s) / sharding.shard if sharding.gathers else whole_s / sharding.shard


def timed_step(graph: Graph, model: CostModel, setting: Setting) -> Graph:
    """Return a traced training graph with the model's times: of the compiled step where the setting says so."""
    run = compiled(graph) if setting.compile else graph
    return estimate(run, model, Network(), optimizer=setting.optimizer)


def products_s(graph: Graph, device: Device) -> float:
    """Return the seconds of all matrix products, convolutions and attention at the device's dense peak: what MFU counts.

    In ``fp32`` convolutions and recurrent layers may use TF32, so its peak is theirs.
    """
    precision = str(graph.meta.get("precision", "fp32"))
    peak = device.peak_for(_TYPES[precision])
    eased = device.peak_for("tf32") if precision == "fp32" else peak
    product = graph.gemm[:, 1] > 0
    names = [op_type.rpartition(".")[2] for op_type in graph.op_type]
    convolution = product & np.array([name.startswith(("convolution", "recurrent")) for name in names], dtype=bool)
    return float(graph.flops[convolution].sum() / eased + graph.flops[product & ~convolution].sum() / peak)


def usable_bytes(device: Device) -> float:
    """Return what a training process can have of a device's memory: what a user gives is taken as what the driver shows."""
    share = 1.0 if device.source.startswith(GIVEN) else device.free_of_codes
    return share * device.memory_gib * 2.0**30 - RESERVED_BYTES


def _synchronised_s(program: Program, setting: Setting, placement: Placement, sharding: Sharding) -> float:
    """Return forward, backward and what is left of the collectives after it, in seconds."""
    if placement.num_replicas == 1:
        return program.compute_s
    if not sharding.gathers:
        if sharding.kind == "none":
            raise InputError("--sharding", f"none on {placement.num_replicas} replicas", "give ddp, fsdp or another")
        every = setting.fabric.over(placement.num_replicas, placement.num_nodes)
        reduced = max(program.compute_s, finish_s(program, every, default_cuts(program)))
        # each process updates its part and tells it to all others
        return reduced + (every.all_gather_s(float(program.size_bytes.sum())) if sharding.kind == "zero1" else 0.0)
    group = setting.fabric.sharded(placement.num_replicas, sharding.shard, placement.num_nodes)
    found = units_of(program)
    if found is None:  # one unit: everything is gathered before the step and reduced after it
        held = float(program.held_bytes.sum())
        return group.all_gather_s(held) + program.compute_s + group.reduce_scatter_s(float(program.size_bytes.sum()))
    near = setting.fabric.over(sharding.forward_shard) if sharding.forward_shard else None
    return simulate_fsdp(*found, group, 1, 1, reshard=sharding.reshards, near=near).step_s


def memory_range(
    peak_bytes: float, reserved_bytes: float, sharding: Sharding, replicas: int, workspace_bytes: float
) -> tuple[float, float]:
    """Return the least and the most bytes that a process is likely to take of a device.

    The least: its tensors. The most: the allocator's segments and a tenth, a large context, what cuDNN's search may leave,
    and buffers of the communicators (one, and one more between groups).
    """
    communicators = (replicas > 1) + (sharding.kind == "hsdp" and replicas > sharding.shard)
    most = FRAGMENTED * reserved_bytes + CONTEXT_BYTES + workspace_bytes + communicators * _COMMUNICATOR_BYTES
    return peak_bytes, most


def memory_limit_batch(curve: WorkCurve, device: Device, setting: Setting, num_replicas: int = 1) -> int:
    """Return the largest local batch that fits the device, under a budget with everything computed again; 0: none does.

    Bisection.
    """
    sharding, usable = setting.sharded(num_replicas), usable_bytes(device)

    def fits(size: int) -> bool:
        held = curve.held(size, sharding, setting.optimizer, setting.uniform)
        if held is None or held.peak().total_bytes > min(usable, setting.budget_bytes or usable):
            return False
        return held.reserved_bytes(usable) is not None

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high) and high < 2**40:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def timeline(curve: WorkCurve, model: CostModel, setting: Setting, row: PredictedRow) -> MemoryTimeline | None:
    """Return what a process holds over a pass of a row, at the fullest moment of each of equal spans of time."""
    size, ledger = row.local_batch_size, curve.ledger(row.local_batch_size)
    keeps = {each.module: each.keeps for each in row.recompute.modules} if row.recompute else {}
    held = curve.held(size, setting.sharded(row.num_replicas), setting.optimizer, keeps)
    if held is None:
        return None
    clock = ledger.clock(Recomputation(ledger, keeps), timed_step(curve.traced.at(size), model, setting))
    curves, total = held.curves(), held.peak().curve
    span = np.minimum((_MOMENTS * clock / max(clock[-1], 1e-30)).astype(np.int64), _MOMENTS - 1)
    order = np.lexsort((total, span))
    tops = np.sort(order[np.append(np.diff(span[order]) > 0, True)])
    return MemoryTimeline(
        num_replicas=row.num_replicas,
        local_batch_size=size,
        time_s=clock[tops].tolist(),
        parts={name: np.maximum(each[tops], 0.0).tolist() for name, each in curves.items() if each[tops].any()},
    )
