"""Predicted steps over batch sizes and placements of a job on one device type. Start at :func:`predict`.

The work of a step at any batch size is counted from one trace where it is a function of its batch
(:func:`ddltool.analyzers.step.tracing.torch_adapter.trace_any_batch`): its graph, and the memory alive while it runs. A step is
``accumulation`` passes and an update. With several replicas the gradients leave in DDP's default buckets over a ring
(Patarasuk and Yuan, JPDC 2009) while the last backward pass goes on, and only what is left after it counts.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import pandas as pd
import torch

from ddltool.analyzers.step.communication.collectives import default_cuts, finish_s
from ddltool.analyzers.step.communication.fsdp import simulate_fsdp, units_of
from ddltool.analyzers.step.communication.nccl import Communicator, Fabric
from ddltool.analyzers.step.communication.program import Program, program_of
from ddltool.analyzers.step.costs.compiling import compiled, compiled_lifetimes
from ddltool.analyzers.step.costs.memory import (
    Array,
    Held,
    Peak,
    Recomputation,
    Sharding,
    TensorLifetimes,
    lifetimes_of,
)
from ddltool.analyzers.step.costs.model import HOST_BOUND, OPTIMIZER, CostModel, estimate
from ddltool.analyzers.step.costs.offloading import (
    HostCopies,
    demand_host_update,
    host_link_bytes_per_s,
    host_sum_s,
    host_update_s,
)
from ddltool.analyzers.step.costs.optimizers import OPTIMIZERS
from ddltool.analyzers.step.costs.saving import ON_HOST, Checkpointing, SavedOps, Saving, split_way
from ddltool.analyzers.step.tracing.adapters import with_lora
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.sources import Source, demand_whole, is_graph_file, is_onnx_file, resolve_step
from ddltool.analyzers.step.tracing.step import TrainingStep
from ddltool.analyzers.step.tracing.torch_adapter import AS_DEFAULT, TracedStep, trace_any_batch
from ddltool.device import GIVEN, Device, Network
from ddltool.errors import Infeasible, InputError, did_you_mean
from ddltool.graph import Graph
from ddltool.graph_results import (
    MemoryTimeline,
    PredictedDevice,
    PredictedRow,
    PredictionAssumptions,
    PredictResult,
    RecomputeFigures,
)
from ddltool.precision import precision_of
from ddltool.units import parse_bytes

if TYPE_CHECKING:  # it loads a solver
    from ddltool.analyzers.step.costs.checkpointing import CheckpointingChoice

# What a training process cannot have of the device: what the driver keeps (1 to 1.5 %) and a context that loads its kernels
# when they are needed.
RESERVED_BYTES = 2.0**30
# A context that loads all kernels of torch and cuDNN at once, as CUDA did before 11.7: what nvidia-smi shows of a process
# whose model is tiny (Lucid's PPO, 2.00 GiB on an RTX 3090).
CONTEXT_BYTES = 2.0 * 2**30
# What segments may take beyond those of the played allocator: torchtitan's runs took up to a seventh more.
FRAGMENTED = 1.15
# Of each of NCCL's communicators: 4 MiB (NCCL_BUFFSIZE) each way for up to 32 channels.
_COMMUNICATOR_BYTES = 2 * 32 * 4 * 2.0**20
# Moments of a timeline of memory: as many as a picture can show.
_MOMENTS = 160
# A rate of 90 % of the best predicted one counts as saturated, as for measured profiles.
_SATURATED = 0.9
# The search for the largest batch ends here: nothing that grows with the batch fits a device then.
_LARGEST_BATCH = 2**40
# Fields of a setting that are reported as assumptions.
_ASSUMED = ("compile", "optimizer", "accumulation", "sharding", "checkpointing")


@dataclass(frozen=True, kw_only=True, eq=False)
class WorkCurve:
    """The work of a step at any batch size."""

    traced: TracedStep
    gathered: Callable[[], WorkCurve] | None = None
    """Makes the work of the step as ``fully_shard`` computes it, where that differs: its parameters come in a half type, and
    nothing is cast between the ops."""
    eighth: Callable[[], WorkCurve] | None = None
    """Makes the work of the step with its wide linear layers in float8, where it runs in bfloat16."""
    compile: Literal["", "blocks", "whole"] = ""
    """Whether its tensors live as under ``torch.compile``: of each of its blocks, as torchtitan and torchtune compile, or of
    the whole step. A model without blocks is compiled as a whole."""
    _lifetimes: dict[int, TensorLifetimes] = field(default_factory=dict)
    """By traced batch size."""
    _gathered: list[WorkCurve] = field(default_factory=list)
    """What ``gathered`` made, once it was asked for; a list, because the curve is frozen."""
    _compiled: list[WorkCurve] = field(default_factory=list)
    """The same work under ``torch.compile`` once it was asked for: of an eager curve with its blocks compiled, of that one
    compiled as a whole."""

    def under(self, sharding: Sharding, compile: bool = False) -> WorkCurve:
        """Return the work of the step under a sharding.

        FSDP computes an autocast model in its half type throughout, for which the step is traced again the first time; a
        model that does not run so is taken as it is. ``compile``: its tensors live as under ``torch.compile``.
        """
        if compile and not self.compile:
            eager = self.under(sharding)
            if not eager._compiled:
                whole = replace(eager, gathered=None, compile="whole", _lifetimes={})
                eager._compiled.append(replace(whole, compile="blocks", _lifetimes={}, _compiled=[whole]))
            return eager._compiled[0]
        if not sharding.gathers or self.gathered is None:
            return self
        if not self._gathered:
            try:
                self._gathered.append(self.gathered())
            except InputError:  # it runs in the half type under autocast alone
                self._gathered.append(self)
        return self._gathered[0]

    def lifetimes(self, batch_size: int) -> TensorLifetimes:
        """Return the tensor lifetimes of the step at a batch size. O(calls) the first time.

        One trace serves all batch sizes if its shapes scale with the batch; otherwise the step is traced again, at the
        next multiple of 8 if it does not run at ``batch_size``. Raises InputError if both traces fail.
        """
        traced = self.traced
        if batch_size != traced.graph.batch_size and traced.scale(batch_size) is None:
            try:
                traced = traced.traced_at(batch_size)
            except InputError:
                if batch_size % 8 == 0:
                    raise
                return self.lifetimes(batch_size + -batch_size % 8)
        size = traced.graph.batch_size or 0
        if size not in self._lifetimes:
            lifetimes = lifetimes_of(traced)
            by_block = self.compile == "blocks" and bool(lifetimes.blocks)
            self._lifetimes[size] = compiled_lifetimes(lifetimes, blocks_only=by_block) if self.compile else lifetimes
        return self._lifetimes[size]

    def held(
        self, batch_size: int, sharding: Sharding, optimizer: str, saving: SavedOps | Saving | str = "none"
    ) -> Held | None:
        """Return the bytes of tensors that one process holds at every place of the program; no workspace of kernels.

        ``saving``: one kind of checkpointing for every block (:meth:`TensorLifetimes.every_saving`), what blocks save, or the
        products that each checkpointed block saves. None: ``batch_size`` is larger than any at which the step was traced.
        Raises InputError for checkpointing of a model without a list of blocks.
        """
        if self.traced.largest is not None and batch_size > self.traced.largest:
            return None
        lifetimes = self.lifetimes(batch_size)
        saving = lifetimes.every_saving(saving) if isinstance(saving, str) else saving
        return lifetimes.held(
            Recomputation(lifetimes, saving), sharding, optimizer, lifetimes.sizes(self.scaled(batch_size))
        )

    def least(self, batch_size: int, sharding: Sharding, optimizer: str, saving: Saving, peak_bytes: float) -> float:
        """Return the least peak in bytes of a step that holds ``peak_bytes`` with its blocks compiled one by one.

        Compiled as a whole it may hold less; which of the two a trainer does is not known. A curve that is not compiled by
        blocks has no other peak.
        """
        held = self._compiled[0].held(batch_size, sharding, optimizer, saving) if self.compile == "blocks" else None
        return peak_bytes if held is None else min(peak_bytes, held.peak().total_bytes)

    def workspace_bytes(self, batch_size: int) -> float:
        """Return the bytes that cuDNN may take beside the tensors: :meth:`TensorLifetimes.workspace_bytes`."""
        return self.lifetimes(batch_size).workspace_bytes(self.scaled(batch_size))

    def scaled(self, batch_size: int) -> int | None:
        """Return the argument of :meth:`TensorLifetimes.sizes` for a batch size.

        None: the lifetimes are of a trace at that very size, and need no scaling.
        """
        return batch_size if self.lifetimes(batch_size).traced is self.traced else None

    def peak(self, batch_size: int, sharding: Sharding, optimizer: str, checkpointing: str = "none") -> Peak | None:
        """Return the most bytes of tensors that one process holds at one time; None as for :meth:`held`."""
        held = self.held(batch_size, sharding, optimizer, checkpointing)
        return None if held is None else held.peak()

    def timed(self, batch_size: int, model: CostModel, setting: Setting) -> Graph:
        """Return the graph of one pass at a batch size, with the cost model's times.

        Raises InputError where the step does not run at it, as :meth:`TracedStep.at` does.
        """
        return timed_step(self.traced.at(batch_size), model, setting)

    def step_time(
        self, graph: Graph, program: Program, model: CostModel, setting: Setting, placement: Placement, batch_size: int
    ) -> StepSeconds:
        """Return the time of a step whose passes are those of a timed ``graph`` and its ``program``.

        ``model`` and ``batch_size`` are for the curves of parallel layouts, which need them.
        """
        sharding = setting.sharded(placement.num_replicas)
        update_s = own_update_s(graph, sharding)
        sums_s = (setting.accumulation - 1) * own_sum_s(graph, sharding)
        kept_share = self.lifetimes(batch_size).kept_share if sharding.on_host else 1.0
        copies = partial(HostCopies.around, sharding=sharding, devices=[model.device], kept_share=kept_share)
        step_s = step_of(program, setting, placement, sharding, update_s, copies) + sums_s
        if sharding.gathers and placement.num_replicas > 1:
            group = setting.fabric.sharded(placement.num_replicas, sharding.shard, placement.num_nodes)
            step_s += gathered_matrices_s(graph, group, sharding)
        passes_s = setting.accumulation * program.compute_s + sums_s
        return StepSeconds(step_s=step_s, passes_s=passes_s, update_s=update_s)

    def runs_at(self, batch_size: int) -> bool:
        """Return whether the step runs at a batch size; only a step whose shapes do not scale has to be traced for it."""
        if self.traced.prime == self.traced.graph.batch_size:
            return True
        try:
            self.traced.at(batch_size)
        except InputError:
            return False
        return True


def measure_work(
    build: Callable[[], TrainingStep], numerics: Numerics = AS_DEFAULT, like: TracedStep | None = None
) -> WorkCurve:
    """Return the work of the training step that ``build`` makes, which is traced in the given numerics.

    ``like``: an earlier trace of the step in other numerics, as of :func:`trace_any_batch`. Raises InputError when the step
    cannot be traced.
    """
    build = cache(build)
    traced = trace_any_batch(build, mode="training", numerics=numerics, like=like)

    def again(**changed: Any) -> WorkCurve:
        """Return the work of the same step with some of its numerics changed."""
        return measure_work(build, replace(numerics, **changed), traced)

    eighth = partial(again, precision="fp8") if numerics.precision == "bf16" else None
    if not numerics.autocasts:
        return WorkCurve(traced=traced, eighth=eighth)
    return WorkCurve(traced=traced, gathered=partial(again, gathered=True), eighth=eighth)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeconds:
    """The seconds of a step, and of its passes and its update without what replicas exchange."""

    step_s: float
    passes_s: float
    update_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelDegrees:
    """How the GPUs of one replica share its model."""

    tensor: int = 1
    """GPUs that share every block's products."""
    pipeline: int = 1
    """GPUs that have some of the blocks each."""
    sequence: bool = False
    """Whether the GPUs of ``tensor`` also divide by tokens what lies between the products that they share."""
    virtual: int = 1
    """Stages of each GPU of a pipeline; several are interleaved."""

    @property
    def gpus(self) -> int:
        """Return the GPUs of one replica."""
        return self.tensor * self.pipeline


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Replicas over nodes; one node is joined by the local link, several by the network."""

    num_nodes: int
    num_replicas: int
    gpus: int = 1
    """Of one replica."""

    def __post_init__(self) -> None:
        """Raise InputError for nodes without a GPU of the job."""
        if not 1 <= self.num_nodes <= self.num_replicas * self.gpus:
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
    sharding: str | Sharding = "ddp"
    """A text for :meth:`Sharding.named`, which says it for any number of replicas (one is never sharded), or the sharding of
    one number of them."""
    checkpointing: str = "none"
    """Of every block (none, selective, full), or the budget in bytes of a step's tensors, such as 40GiB; with ``:cpu`` behind,
    what blocks save goes to the host."""
    layout: ParallelDegrees = ParallelDegrees()

    def sharded(self, replicas: int) -> Sharding:
        """Return how so many replicas share the step's parameters, gradients and optimizer state."""
        sharding = self.sharding
        if not isinstance(sharding, Sharding):
            sharding = Sharding.named(sharding if replicas > 1 or sharding.endswith(":cpu") else "none", replicas)
            sharding = replace(sharding, on_host=min(sharding.on_host, self.fabric.gpus_per_node))
        return replace(sharding, sums=self.accumulation > 1)

    @property
    def budget_bytes(self) -> float | None:
        """Return the budget of a step's tensors in bytes; None: ``checkpointing`` names one kind for all blocks."""
        text, _ = split_way(self.checkpointing)
        return None if text in get_args(Checkpointing) else parse_bytes(text, "--checkpointing")

    @property
    def saves_on_host(self) -> bool:
        """Return whether blocks may save on the host."""
        return split_way(self.checkpointing)[1]

    @property
    def uniform(self) -> str:
        """Return the checkpointing of every block; under a budget ``full``, which holds least."""
        if self.budget_bytes is None:
            return self.checkpointing
        return f"full{ON_HOST}" if self.saves_on_host else "full"

    def __post_init__(self) -> None:
        """Raise InputError for unknown texts of checkpointing, sharding and optimizer."""
        kind, on_host = split_way(self.checkpointing)
        if not any(sign.isdigit() for sign in kind) and kind not in get_args(Checkpointing):
            suggestion = did_you_mean(self.checkpointing, (*get_args(Checkpointing), "40GiB", "full:cpu", "40GiB:cpu"))
            raise InputError("--checkpointing", f"unknown {self.checkpointing!r}", suggestion)
        _ = self.budget_bytes  # raises for a text that is no size
        if on_host and self.compile:
            problem = f"{self.checkpointing!r} with --compile is not modelled"
            raise InputError("--checkpointing", problem, f"give {kind}, or leave out --compile")
        if isinstance(self.sharding, str):
            shard = self.sharding.removesuffix(":cpu").partition(":")[2]
            Sharding.named(self.sharding, int(shard) if shard.isdecimal() else 1)  # one replica is checked, too
        if self.optimizer not in OPTIMIZERS:
            raise InputError("--optimizer", f"unknown {self.optimizer!r}", did_you_mean(self.optimizer, OPTIMIZERS))
        if isinstance(self.sharding, str) and self.sharding.endswith(":cpu"):
            demand_host_update(self.optimizer)


def predict_on(
    curve: WorkCurve,
    model_settings: Sequence[tuple[CostModel, Setting]],
    batch_sizes: Sequence[int] | None,
    replicas: Sequence[int],
    source: str,
) -> PredictResult:
    """Return the predicted rows on each device, their assumptions, and the error of each device's cost model.

    Args:
        curve: the work of the model's step.
        model_settings: one cost model and setting per device; assumptions are reported from the first setting.
        batch_sizes: local batch sizes; None: powers of two up to each device's memory limit.
        replicas: numbers of replicas to predict for.
        source: name of the model.

    Raises Infeasible if ``batch_sizes`` is None and one sample does not fit.
    """
    first_setting, meta = model_settings[0][1], curve.traced.graph.meta
    rows, devices = [], {}
    for model, setting in model_settings:
        placements = [
            Placement(
                num_nodes=math.ceil(replica_count * setting.layout.gpus / setting.fabric.gpus_per_node),
                num_replicas=replica_count,
                gpus=setting.layout.gpus,
            )
            for replica_count in replicas
        ]
        sizes = batch_sizes or _fitting_sizes(curve, model, setting, max(replicas))
        predicted = predict(curve, model, setting, sizes, placements, source)
        fitting_rows = [row for row in predicted if row.fits]
        smallest_replica_rows = [row for row in fitting_rows if row.num_replicas == predicted[0].num_replicas]
        best_rate = max((row.samples_per_s for row in smallest_replica_rows), default=0.0)
        saturated_sizes = [
            row.local_batch_size for row in smallest_replica_rows if row.samples_per_s >= _SATURATED * best_rate
        ]
        helps = ""
        if not fitting_rows and setting.layout.gpus == 1 and not setting.budget_bytes:
            holds_none = not memory_limit_batch(curve, model.device, setting, max(replicas))
            helps = remedy(curve, model.device, setting, max(replicas)) if holds_none else ""
        devices[model.device.name] = PredictedDevice(
            saturation_batch=min(saturated_sizes, default=None),
            memory_limit_batch=memory_limit_batch(curve, model.device, setting, predicted[0].num_replicas),
            remedy=helps,
            has_precision=precision_of(meta.get("precision")).computes in model.device.peak_flops,
            price_per_hour=model.device.price_per_hour,
            error=model.residuals,
            link_bytes_per_s=setting.fabric.inside.bytes_per_s,
            memory=timeline(
                curve, model, setting, max(fitting_rows, key=lambda row: row.samples_per_s)
            )  # the fastest row
            if fitting_rows
            else None,
        )
        rows += predicted
    assumed = {
        **{name: meta.get(name) for name in ("precision", "channels_last")},
        **{name: getattr(first_setting, name) for name in _ASSUMED},
        "sequence_length": meta.get("tokens_per_sample"),
        "lora": meta.get("lora"),
        "bandwidth_bytes_per_s": first_setting.fabric.between.bytes_per_s,
        "gpus_per_node": first_setting.fabric.gpus_per_node,
        "sequence_parallel": first_setting.layout.sequence,
        "virtual_stages": first_setting.layout.virtual,
    }
    return PredictResult(
        predicted=True, rows=rows, devices=devices, assumptions=PredictionAssumptions.model_validate(assumed)
    )


def _fitting_sizes(curve: WorkCurve, model: CostModel, setting: Setting, replicas: int) -> tuple[int, ...]:
    """Return the local batch sizes 1, 2, 4, ... up to the memory limit, those at which the step runs.

    Raises Infeasible when one sample does not fit; its message names the least change of options that helps.
    """
    limit = memory_limit_batch(curve, model.device, setting, replicas)
    sharding = setting.sharded(replicas)
    if limit < 1 and setting.budget_bytes:
        curve = curve.under(sharding, setting.compile)
        seconds = curve.lifetimes(1).seconds(curve.timed(1, model, setting))
        # Raises Infeasible with the least budget that holds one sample, unless blocks with different choices fit.
        _choose_saving(curve, model, setting, sharding, seconds, 1)
        return (1,)
    if limit < 1:
        raise Infeasible(
            f"one sample does not fit the {model.device.memory_gib:g} GiB of a {model.device.name}, by estimate; "
            f"{remedy(curve, model.device, setting, replicas) or 'nor does it sharded over 1,024'}; "
            "give --batch-sizes to see its time all the same"
        )
    powers_of_two = tuple(2**power for power in range(limit.bit_length()))
    return tuple(size for size in powers_of_two if curve.runs_at(size)) or powers_of_two


def remedy(curve: WorkCurve, device: Device, setting: Setting, replicas: int) -> str:
    """Return the least change of options by which one sample fits a device, with its largest batch; "": no change helps.

    Changes are tried by number of replicas, then by kind of sharding, then by checkpointing, the least first. ``replicas``:
    the number of them on which no sample fits. The result reads like "with --sharding fsdp a local batch of 4 does".
    """
    checkpointings = ["none", "selective", "full", f"full{ON_HOST}"][: 3 if setting.compile else 4]
    least = checkpointings.index(setting.uniform) if setting.uniform in checkpointings else 3
    checkpointings = checkpointings[least:] if curve.lifetimes(1).blocks else ["none"]
    replica_counts = [replicas, *(2**power for power in range(1, 11) if 2**power > replicas)]  # up to 1,024
    for replica_count in replica_counts:
        if replica_count == 1:
            sharding_kinds = [setting.sharding]
        elif replica_count == replicas:
            sharding_kinds = [setting.sharding, "zero1", "fsdp"]
        else:
            sharding_kinds = ["fsdp"]
        for sharding_kind in dict.fromkeys(sharding_kinds):
            for checkpointing in checkpointings:
                if (replica_count, sharding_kind, checkpointing) == (replicas, setting.sharding, setting.uniform):
                    continue
                candidate = replace(setting, sharding=sharding_kind, checkpointing=checkpointing)
                if limit := memory_limit_batch(curve, device, candidate, replica_count):
                    changed_options = [f"--replicas {replica_count}"] * (replica_count != replicas)
                    changed_options += [f"--sharding {sharding_kind}"] * (sharding_kind != setting.sharding)
                    changed_options += [f"--checkpointing {checkpointing}"] * (checkpointing != setting.checkpointing)
                    return f"with {' '.join(changed_options)} a local batch of {limit} does"
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

    ``source``: the model's name, for the rows. Raises InputError for a batch size at which the step cannot be traced, and
    Infeasible for a budget of memory that no choice of checkpointing keeps.
    """
    timed: dict[tuple[int, bool], Graph] = {}  # by batch size, and whether parameters are gathered
    recomputed_steps: dict[tuple[int, Sharding], _RecomputedStep] = {}
    rows = []
    for placement in placements:
        sharding = setting.sharded(placement.num_replicas)
        work = curve.under(sharding, setting.compile)
        for size in batch_sizes:
            if (size, sharding.gathers) not in timed:
                timed[size, sharding.gathers] = work.timed(size, model, setting)
            if (size, sharding) not in recomputed_steps:
                # Without a budget, what is recomputed depends on whether parameters are gathered alone.
                same_size_step = next(
                    (
                        step
                        for (step_size, other), step in recomputed_steps.items()
                        if (step_size, other.gathers) == (size, sharding.gathers) and not setting.budget_bytes
                    ),
                    None,
                )
                recomputed_steps[size, sharding] = same_size_step or _recompute_step(
                    work, model, setting, sharding, timed[size, sharding.gathers], size
                )
            rows.append(_predict_row(work, model, setting, placement, recomputed_steps[size, sharding], size, source))
    return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class _RecomputedStep:
    """A timed step with the recomputation of its checkpointed blocks."""

    graph: Graph
    """Recomputation counts in the durations of the backward pass."""
    program: Program
    saving: Saving
    figures: RecomputeFigures | None
    """None: all that blocks make is kept."""


def _recompute_step(
    curve: WorkCurve, model: CostModel, setting: Setting, sharding: Sharding, timed: Graph, size: int
) -> _RecomputedStep:
    """Return a timed step of local batch ``size`` with the recomputation that the setting's checkpointing adds."""
    if setting.checkpointing == "none":
        return _RecomputedStep(graph=timed, program=program_of(timed), saving=Saving(), figures=None)
    lifetimes = curve.lifetimes(size)
    saving = lifetimes.every_saving(setting.uniform)
    budget_bytes, lower_bound_s = setting.budget_bytes, None
    if budget_bytes is not None:
        choice = _choose_saving(curve, model, setting, sharding, lifetimes.seconds(timed), size)
        saving, lower_bound_s = choice.saving, choice.bound_s
    recomputation, sizes = Recomputation(lifetimes, saving), lifetimes.sizes(curve.scaled(size))
    rate = host_link_bytes_per_s(model.device)
    recompute_s = lifetimes.recompute_s(recomputation, lifetimes.seconds(timed)).sum()
    waits = lifetimes.copies(recomputation, lifetimes.seconds(timed), sizes, rate).waits() if lifetimes.blocks else ()
    figures = RecomputeFigures(
        modules=saving.recomputed(),
        recomputed_s=float(recompute_s),
        budget_bytes=budget_bytes,
        lower_bound_s=lower_bound_s,
        on_host=saving.offloaded(lifetimes.names),
        host_bytes=float(sum(sizes[storages].sum() for storages in recomputation.copied)),
        waits_s=float(sum(seconds.sum() for seconds in waits)),
    )
    lengthened_graph = lifetimes.lengthened(saving, timed, sizes, rate)
    return _RecomputedStep(graph=lengthened_graph, program=program_of(lengthened_graph), saving=saving, figures=figures)


def _choose_saving(
    curve: WorkCurve, model: CostModel, setting: Setting, sharding: Sharding, seconds: Array, size: int
) -> CheckpointingChoice:
    """Return the cheapest choice of what blocks save under the setting's budget of memory, at local batch ``size``.

    ``seconds`` (nodes,): of the program's places. Raises Infeasible if no choice fits.
    """
    from ddltool.analyzers.step.costs.checkpointing import cheapest_with_room  # it loads a solver

    usable = usable_bytes(model.device)
    return cheapest_with_room(
        lambda saving: lacking_bytes(curve.held(size, sharding, setting.optimizer, saving), usable),
        curve.lifetimes(size),
        seconds,
        sharding,
        setting.optimizer,
        setting.budget_bytes or 0.0,
        curve.scaled(size),
        host_bytes_per_s=host_link_bytes_per_s(model.device) if setting.saves_on_host else 0.0,
    )


def lacking_bytes(held: Held | None, usable: float) -> float:
    """Return the bytes that a device with ``usable`` lacks for what torch's allocator reserves; 0.0: it fits.

    Given a limit, the allocator frees whole unused segments when it comes near. None, what is not traced, fits nowhere.
    """
    if held is None:
        return math.inf
    return 0.0 if held.reserved_bytes(usable) is not None else max(1.0, (held.reserved_bytes() or 0) - usable)


def _predict_row(
    curve: WorkCurve,
    model: CostModel,
    setting: Setting,
    placement: Placement,
    step: _RecomputedStep,
    size: int,
    source: str,
) -> PredictedRow:
    """Return the predicted time, throughput, memory and price of one placement at local batch ``size``.

    ``step``: the timed step with its recomputation. ``source``: the model's name. Raises InputError for a batch size beyond
    the largest at which the step is traced.
    """
    graph, program = step.graph, step.program
    sharding = setting.sharded(placement.num_replicas)
    host_share = float(graph.meta.get("host_share") or 0.0)
    time = curve.step_time(graph, program, model, setting, placement, size)
    step_s = time.step_s
    library_share = float(graph.meta.get("library_share") or 0.0)
    low_s, high_s = model.interval(step_s, host_share=host_share, library_share=library_share, compiled=setting.compile)
    samples, tokens = placement.num_replicas * size * setting.accumulation, graph.meta.get("tokens_per_sample")
    held = curve.held(size, sharding, setting.optimizer, step.saving)
    if held is None:
        raise InputError("--batch-sizes", f"{size} is more than the step is traced at", "give a smaller one")
    peak_bytes, limited_bytes = held.peak().total_bytes, held.reserved_bytes(usable_bytes(model.device))
    # Segments that do not fit are reported as on an unlimited device, which never gives free ones back.
    reserved_bytes = limited_bytes if limited_bytes is not None else held.reserved_bytes() or 0
    least_bytes = curve.least(size, sharding, setting.optimizer, step.saving, peak_bytes)
    memory_low_bytes, memory_high_bytes = memory_range(
        least_bytes, reserved_bytes, sharding, placement.num_replicas, curve.workspace_bytes(size), setting.layout
    )
    price = model.device.price_per_hour
    return PredictedRow(
        device=model.device.name,
        num_nodes=placement.num_nodes,
        num_replicas=placement.num_replicas,
        tensor_parallel=setting.layout.tensor,
        pipeline_parallel=setting.layout.pipeline,
        num_gpus=placement.num_replicas * placement.gpus,
        local_batch_size=size,
        step_time_s=step_s,
        predicted_low_s=low_s,
        predicted_high_s=high_s,
        sync_time_s=max(step_s - time.passes_s - time.update_s, 0.0),
        peak_memory_bytes=round(peak_bytes),
        reserved_bytes=reserved_bytes,
        memory_low_bytes=round(memory_low_bytes),
        memory_high_bytes=round(memory_high_bytes),
        fits=limited_bytes is not None,
        recompute=step.figures,
        samples_per_s=samples / step_s,
        tokens_per_s=samples * float(tokens) / step_s if isinstance(tokens, (int, float)) else None,
        mfu=setting.accumulation * products_s(graph, model.device) / setting.layout.pipeline / step_s,
        host_bound=host_share > HOST_BOUND,
        price_per_million_samples=None
        if price is None
        else price * placement.num_replicas * placement.gpus / 3600 / (samples / step_s) * 1e6,
        accumulation_steps=setting.accumulation - 1,
        source=source,
        origin="predicted",
    )


def step_of(
    program: Program,
    setting: Setting,
    placement: Placement,
    sharding: Sharding,
    update_s: float,
    copies: Callable[[Communicator], Communicator],
) -> float:
    """Return the seconds of a step: its passes, the communication that outlasts them, and the optimizer's update.

    ``update_s``: of the part that one process updates. Sharded processes communicate in every pass, others in the last.
    ``copies``: adds to a group what its processes copy from and to their host.
    """
    last_pass_s = _synchronized_pass_s(program, setting, placement, sharding, copies)
    other_pass_s = last_pass_s if sharding.gathers else program.compute_s
    return (setting.accumulation - 1) * other_pass_s + last_pass_s + update_s


def own_update_s(graph: Graph, sharding: Sharding) -> float:
    """Return the seconds in which a process updates its shard, from the ``meta`` of a graph.

    The host's time per tensor stays whole if every process has a part of every tensor (fsdp), and is divided if each has some
    of the tensors (zero1). So it is where the update needs whole matrices, of which a process has some: the most are as many
    as there are for each process, rounded up.
    """
    if sharding.on_host:
        return host_update_s(graph, sharding)
    whole_s, host_s = (float(graph.meta.get(name) or 0.0) for name in ("update_s", "update_host_s"))
    if matrices := int(graph.meta.get("update_matrices") or 0):
        return whole_s * math.ceil(matrices / sharding.shard) / matrices
    return host_s + (whole_s - host_s) / sharding.shard if sharding.gathers else whole_s / sharding.shard


def gathered_matrices_s(graph: Graph, group: Communicator, sharding: Sharding) -> float:
    """Return the seconds in which sharded processes give each other the parts of matrices that an update needs whole.

    The parts of a matrix go to the process that updates it, and come back in bfloat16: as many bytes as a reduce-scatter of
    one process's parts sends. 0 for an update that needs none.
    """
    size_bytes = float(graph.meta.get("update_matrix_bytes") or 0.0)
    return 2.0 * float(group.reduce_scatter_s(size_bytes / sharding.shard)) if size_bytes else 0.0


def own_sum_s(graph: Graph, sharding: Sharding) -> float:
    """Return the seconds in which a process adds its shard of one pass's gradients to those before, from ``meta``."""
    if sharding.on_host:
        return host_sum_s(graph, sharding)
    whole_s, launch_s = (float(graph.meta.get(name) or 0.0) for name in ("sum_s", "sum_launch_s"))
    return launch_s + (whole_s - launch_s) / (sharding.shard if sharding.gathers else 1)


def timed_step(graph: Graph, model: CostModel, setting: Setting) -> Graph:
    """Return a traced training graph with the model's times, compiled first if the setting says so."""
    run = compiled(graph) if setting.compile else graph
    return estimate(run, model, Network(), optimizer=setting.optimizer)


def products_s(graph: Graph, device: Device) -> float:
    """Return the seconds of all matrix products, convolutions and attention at the device's dense peak: what MFU counts.

    In ``fp32`` convolutions and recurrent layers may use TF32, so its peak is theirs; products in float8 have their own.
    """
    computes = precision_of(graph.meta.get("precision")).computes
    peak = device.peak_for(computes)
    convolution_peak = device.peak_for("tf32") if computes == "float32" else peak
    is_product = graph.gemm[:, 1] > 0
    op_kinds = [op_type.rpartition(".")[2] for op_type in graph.op_type]
    is_convolution = is_product & np.array(
        [name.startswith(("convolution", "recurrent")) for name in op_kinds], dtype=bool
    )
    is_narrow = is_product & np.array([dtype.startswith("float8") for dtype in graph.dtype], dtype=bool)
    peaks = np.select([is_convolution, is_narrow], [convolution_peak, device.peak_for("float8")], peak)
    return float((graph.flops / peaks)[is_product].sum())


def usable_bytes(device: Device) -> float:
    """Return the bytes of a device's memory that a training process can have.

    A size that a user gives is taken as the one that the driver shows: error-correcting codes are not deducted from it.
    """
    share = 1.0 if device.source.startswith(GIVEN) else device.free_of_codes
    return share * device.memory_gib * 2.0**30 - RESERVED_BYTES


def _synchronized_pass_s(
    program: Program,
    setting: Setting,
    placement: Placement,
    sharding: Sharding,
    copies: Callable[[Communicator], Communicator],
) -> float:
    """Return the seconds of a pass that communicates: forward, backward, and the collectives that outlast them.

    With one replica nothing is communicated but with its host. Raises InputError for several replicas that never exchange
    anything (none).
    """
    if placement.num_replicas == 1 and not sharding.on_host:
        return program.compute_s
    if not sharding.gathers:
        if sharding.kind == "none":
            raise InputError("--sharding", f"none on {placement.num_replicas} replicas", "give ddp, fsdp or another")
        all_replicas = setting.fabric.over(placement.num_replicas, placement.num_nodes)
        reduced_s = max(program.compute_s, finish_s(program, all_replicas, default_cuts(program)))
        # ZeRO-1: each process gathers the parameters that the others have updated.
        return reduced_s + (
            all_replicas.all_gather_s(float(program.size_bytes.sum())) if sharding.kind == "zero1" else 0.0
        )
    group = copies(setting.fabric.sharded(placement.num_replicas, sharding.shard, placement.num_nodes))
    units = units_of(program)
    if units is None:  # one unit: everything is gathered before the step and reduced after it
        parameter_bytes = float(program.held_bytes.sum())
        return (
            group.all_gather_s(parameter_bytes)
            + program.compute_s
            + group.reduce_scatter_s(float(program.size_bytes.sum()))
        )
    forward_group = setting.fabric.over(sharding.forward_shard) if sharding.forward_shard else None
    return simulate_fsdp(*units, group, 1, 1, reshard=sharding.reshards, near=forward_group).step_s


def memory_range(
    peak_bytes: float,
    reserved_bytes: float,
    sharding: Sharding,
    replicas: int,
    workspace_bytes: float,
    layout: ParallelDegrees = ParallelDegrees(),
) -> tuple[float, float]:
    """Return the least and the most bytes that a process is likely to take of a device.

    The least is its tensors. The most is the allocator's segments and a seventh, a context with all kernels loaded, the
    workspace of cuDNN's search, and buffers of the communicators (one, and with HSDP one more between groups; one of each kind
    of a layout's groups).
    """
    communicators = (replicas > 1) + (sharding.kind == "hsdp" and replicas > sharding.shard)
    communicators += (layout.tensor > 1) + (layout.pipeline > 1)
    most = FRAGMENTED * reserved_bytes + CONTEXT_BYTES + workspace_bytes + communicators * _COMMUNICATOR_BYTES
    return peak_bytes, most


def memory_limit_batch(curve: WorkCurve, device: Device, setting: Setting, num_replicas: int = 1) -> int:
    """Return the largest local batch that fits the device, by bisection; 0: one sample does not fit.

    Under a budget of memory all blocks count as fully checkpointed.
    """
    sharding, available_bytes = setting.sharded(num_replicas), usable_bytes(device)
    curve = curve.under(sharding, setting.compile)

    def fits(size: int) -> bool:
        """Return whether a local batch keeps the budget and finds room in the device's allocator."""
        memory = curve.held(size, sharding, setting.optimizer, setting.uniform)
        if memory is None or memory.peak().total_bytes > min(available_bytes, setting.budget_bytes or available_bytes):
            return False
        return memory.reserved_bytes(available_bytes) is not None

    # ``fitting_size`` always fits; ``larger_size`` does not once the first loop is over.
    if not fits(1):
        return 0
    fitting_size, larger_size = 1, 2
    while fits(larger_size) and larger_size < _LARGEST_BATCH:
        fitting_size, larger_size = larger_size, 2 * larger_size
    while larger_size - fitting_size > 1:
        middle_size = (fitting_size + larger_size) // 2
        fitting_size, larger_size = (middle_size, larger_size) if fits(middle_size) else (fitting_size, middle_size)
    return fitting_size


def timeline(curve: WorkCurve, model: CostModel, setting: Setting, row: PredictedRow) -> MemoryTimeline | None:
    """Return the memory of one process over a predicted row's pass, at the fullest moment of each of ``_MOMENTS`` equal spans.

    None: the step is not traced at so large a batch.
    """
    sharding = setting.sharded(row.num_replicas)
    curve = curve.under(sharding, setting.compile)
    size, lifetimes = row.local_batch_size, curve.lifetimes(row.local_batch_size)
    figures = row.recompute
    saving = Saving() if figures is None else Saving.read(figures.modules, figures.on_host, lifetimes.names)
    held = curve.held(size, sharding, setting.optimizer, saving)
    if held is None:
        return None
    recomputation, timed = Recomputation(lifetimes, saving), curve.timed(size, model, setting)
    rate, sizes = host_link_bytes_per_s(model.device), lifetimes.sizes(curve.scaled(size))
    copies = lifetimes.copies(recomputation, lifetimes.seconds(timed), sizes, rate) if saving.on_host else None
    end_s = lifetimes.clock(recomputation, timed, copies)
    bytes_by_part, total_bytes = held.curves(), held.peak().curve
    # The end of the last place lies in the last span; a step without any time is no division by 0.
    span_index = np.minimum((_MOMENTS * end_s / max(end_s[-1], 1e-30)).astype(np.int64), _MOMENTS - 1)
    order = np.lexsort((total_bytes, span_index))  # by span, and by bytes within a span
    is_last_of_span = np.append(np.diff(span_index[order]) > 0, True)
    fullest_places = np.sort(order[is_last_of_span])
    fullest_bytes = {part: part_bytes[fullest_places] for part, part_bytes in bytes_by_part.items()}
    # Sums of what is added and freed may end a little below 0 by rounding.
    return MemoryTimeline(
        num_replicas=row.num_replicas,
        local_batch_size=size,
        time_s=end_s[fullest_places].tolist(),
        parts={part: np.maximum(held, 0.0).tolist() for part, held in fullest_bytes.items() if held.any()},
    )


def work_of(
    source: Source,
    numerics: Numerics,
    sequence_length: int | None,
    lora: int | None = None,
    attention: str | None = None,
) -> WorkCurve:
    """Return the work of SOURCE's training step at any batch size.

    ``sequence_length``: tokens of a sample; None: as the source says. ``lora``: the rank of adapters, which alone are then
    trained; None: the whole model is. ``attention``: eager, sdpa, or flash (sdpa by the kernel for 16-bit numbers alone).

    Raises InputError for a graph or ONNX file, for a library's model of which the example inputs miss a part, and for flash in
    a precision that it has no kernel for.
    """
    if attention == "flash" and precision_of(numerics.precision).computes not in ("bfloat16", "float16"):
        remedy = "give a precision of 16 bits, such as bf16"
        raise InputError("attention", f"flash has no kernel for {numerics.precision}", remedy)
    if is_graph_file(source) or is_onnx_file(source):
        remedy = "give a torch source: zoo:NAME, timm:NAME, transformers:NAME, file.py:factory"
        raise InputError(str(source), "holds one batch size only and cannot be traced at others", remedy)

    if isinstance(source, str) and source.startswith("zoo:"):  # what ships does not change
        return _zoo_work(source, numerics, sequence_length, lora, attention, torch.get_default_dtype())
    return _traced_work(source, numerics, sequence_length, lora, attention)


def _traced_work(
    source: Source, numerics: Numerics, sequence_length: int | None, lora: int | None, attention: str | None
) -> WorkCurve:
    """Return the work of a torch SOURCE, traced anew."""

    def build() -> TrainingStep:
        """Return the source's step, with adapters if they are asked for."""
        step = resolve_step(source, sequence_length, "sdpa" if attention == "flash" else attention)
        return step if lora is None else with_lora(step, lora, numerics)

    with contextlib.redirect_stdout(sys.stderr):  # what the user's forward prints must not mix with the result
        curve = measure_work(build, numerics)
    graph = demand_whole(curve.traced.graph, source)
    return replace(curve, traced=replace(curve.traced, graph=replace(graph, meta={**graph.meta, "lora": lora})))


@lru_cache(maxsize=8)
def _zoo_work(
    source: str,
    numerics: Numerics,
    sequence_length: int | None,
    lora: int | None,
    attention: str | None,
    default_type: torch.dtype,
) -> WorkCurve:
    """Return the work of a model that ships with ddltool; who asks for it again waits for no second trace."""
    return _traced_work(source, numerics, sequence_length, lora, attention)


def predicted_profile(result: PredictResult) -> pd.DataFrame:
    """Return the predicted rows in the columns of a table of measured ones, each with its ``settings`` in words.

    Columns without any value are left out, and so are those of parallel layouts if every replica is one GPU.
    """
    assumptions = result.assumptions
    layout_label = ", channels_last" if assumptions.channels_last else ""
    compile_label = ", compiled" if assumptions.compile else ""
    settings = f"predicted, {assumptions.precision}{layout_label}{compile_label}, optimizer {assumptions.optimizer}"
    if spread := next((row for row in result.rows if row.num_gpus > row.num_replicas), None):
        settings += f", tensor {spread.tensor_parallel} x pipeline {spread.pipeline_parallel}"
    left_out = {"recompute"} if spread else {"recompute", "num_gpus", "tensor_parallel", "pipeline_parallel"}
    rows = [{**row.model_dump(mode="json", exclude=left_out), "settings": settings} for row in result.rows]
    return pd.DataFrame(rows).dropna(axis="columns", how="all")
