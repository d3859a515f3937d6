"""The work of a step at any batch size: what it computes, holds and exchanges, from one trace. Start at :func:`work_of`.

The graph of a step at any batch size, and the memory that it holds, are computed from one trace if they are a function of the
batch size (:func:`ddltool.analyzers.step.tracing.torch_adapter.trace_any_batch`). A step is ``accumulation`` passes and an
update. With several replicas, gradients are reduced in DDP's default buckets during the last backward pass, and only the
communication that outlasts it adds to the step.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Any, Literal

import torch

from ddltool.analyzers.step.communication.collectives import default_cuts, finish_s
from ddltool.analyzers.step.communication.fsdp import simulate_fsdp, units_of
from ddltool.analyzers.step.communication.nccl import Communicator
from ddltool.analyzers.step.communication.program import Program
from ddltool.analyzers.step.costs.compiling import compiled, compiled_lifetimes
from ddltool.analyzers.step.costs.held import Held, Peak
from ddltool.analyzers.step.costs.memory import Recomputation, TensorLifetimes
from ddltool.analyzers.step.costs.model import CostModel, estimate
from ddltool.analyzers.step.costs.offloading import HostCopies, host_sum_s, host_update_s
from ddltool.analyzers.step.costs.saving import SavedOps, Saving
from ddltool.analyzers.step.costs.setting import Placement, Setting
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.analyzers.step.costs.traced_lifetimes import lifetimes_of
from ddltool.analyzers.step.costs.wrapping import hooked
from ddltool.analyzers.step.tracing.adapters import with_lora
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.sources import Source, demand_whole, is_graph_file, is_onnx_file, resolve_step
from ddltool.analyzers.step.tracing.step import TrainingStep
from ddltool.analyzers.step.tracing.torch_adapter import AS_DEFAULT, TracedStep, trace_any_batch
from ddltool.device import Network
from ddltool.errors import InputError
from ddltool.graph import Graph
from ddltool.precision import precision_of


@dataclass(frozen=True, kw_only=True, eq=False)
class WorkCurve:
    """The work of a step at any batch size."""

    traced: TracedStep
    gathered: Callable[[], WorkCurve] | None = None
    """Returns the work of the step as ``fully_shard`` computes it, with parameters gathered in a half type and no casts between
    ops; None: it does not differ."""
    eighth: Callable[[], WorkCurve] | None = None
    """Returns the work of the step with its wide linear layers in float8; None: the step does not run in bfloat16."""
    last: Callable[[], WorkCurve] | None = None
    """Returns the work of the step with its images in channels_last; None: they are."""
    compile: Literal["", "blocks", "whole"] = ""
    """Whether tensors live as under ``torch.compile``: of each block by itself, as torchtitan and torchtune do ("blocks"), of
    the whole step ("whole"), or not (""). A model without blocks is always compiled as a whole."""
    _lifetimes: dict[int, TensorLifetimes] = field(default_factory=dict)
    """By traced batch size."""
    _gathered: list[WorkCurve] = field(default_factory=list)
    """The result of ``gathered`` once it was called; a list, because the class is frozen."""
    _compiled: list[WorkCurve] = field(default_factory=list)
    """The same work under ``torch.compile`` once it was asked for: for an eager curve the one with compiled blocks, and for
    that one the work compiled as a whole."""

    def under(self, sharding: Sharding, compile: bool = False) -> WorkCurve:
        """Return the work of the step under a sharding.

        FSDP computes an autocast model in the half type throughout, for which the step is traced again the first time; a
        model that does not run in this way keeps its own work. ``compile``: tensors live as under ``torch.compile``.
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
            try:  # a result or a failure, it is found out once
                self._gathered.append(self.gathered())
            except InputError:  # the model runs in the half type under autocast only
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
                if batch_size % 8 == 0:  # also of the retry: no further size is tried
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
        """Return the bytes of tensors, without kernels' workspace, that one process holds at every place of the program.

        None: ``batch_size`` is larger than the largest at which the step can be traced. ``saving``: one kind of checkpointing
        for every block (:meth:`TensorLifetimes.every_saving`), what blocks save, or the products that each checkpointed block
        saves. Raises InputError for checkpointing of a model without a list of blocks.
        """
        if self.traced.largest is not None and batch_size > self.traced.largest:
            return None
        lifetimes = self.lifetimes(batch_size)
        saving = lifetimes.every_saving(saving) if isinstance(saving, str) else saving
        return lifetimes.held(
            Recomputation(lifetimes, saving), sharding, optimizer, lifetimes.sizes(self.scaled(batch_size))
        )

    def lower_peak_bytes(
        self, batch_size: int, sharding: Sharding, optimizer: str, saving: Saving, peak_bytes: float
    ) -> float:
        """Return the lower of the step's peaks in bytes with its blocks compiled one by one, ``peak_bytes``, and as a whole.

        Which of the two a trainer does is not known. For a curve that is not compiled by blocks it is ``peak_bytes``.
        """
        held = self._compiled[0].held(batch_size, sharding, optimizer, saving) if self.compile == "blocks" else None
        return peak_bytes if held is None else min(peak_bytes, held.peak().total_bytes)

    def workspace_bytes(self, batch_size: int) -> float:
        """Return the bytes that cuDNN may take beside the tensors; see :meth:`TensorLifetimes.workspace_bytes`."""
        return self.lifetimes(batch_size).workspace_bytes(self.scaled(batch_size))

    def scaled(self, batch_size: int) -> int | None:
        """Return the batch size to pass to :meth:`TensorLifetimes.sizes`; None: the trace is of that size and not scaled."""
        return batch_size if self.lifetimes(batch_size).traced is self.traced else None

    def peak(self, batch_size: int, sharding: Sharding, optimizer: str, checkpointing: str = "none") -> Peak | None:
        """Return the peak of the tensors that one process holds; None: as for :meth:`held`."""
        held = self.held(batch_size, sharding, optimizer, checkpointing)
        return None if held is None else held.peak()

    def timed(self, batch_size: int, model: CostModel, setting: Setting) -> Graph:
        """Return the graph of one pass at a batch size, with the cost model's times.

        Raises InputError if the step does not run at this batch size, as :meth:`TracedStep.at` does.
        """
        return timed_step(self.traced.at(batch_size), model, setting)

    def step_time(
        self, graph: Graph, program: Program, model: CostModel, setting: Setting, placement: Placement, batch_size: int
    ) -> StepSeconds:
        """Return the time of a step: ``setting.accumulation`` passes of a timed ``graph``, communication, and the update.

        ``program``: the graph's program view. ``model`` and ``batch_size``: of the step; they matter for shards on the host.
        """
        sharding = setting.sharded(placement.num_replicas)
        compute_s, program = program.compute_s, hooked(program, graph, sharding)
        update_s = own_update_s(graph, sharding)
        sums_s = (setting.accumulation - 1) * own_sum_s(graph, sharding)
        kept_share = self.lifetimes(batch_size).kept_share if sharding.on_host else 1.0
        copies = partial(HostCopies.around, sharding=sharding, devices=[model.device], kept_share=kept_share)
        step_s = step_of(program, setting, placement, sharding, update_s, copies) + sums_s
        if sharding.gathers and placement.num_replicas > 1:
            group = setting.fabric.sharded(placement.num_replicas, sharding.shard, placement.num_nodes)
            step_s += gathered_matrices_s(graph, group, sharding)
        passes_s = setting.accumulation * program.compute_s + sums_s
        hooks_s = setting.accumulation * (program.compute_s - compute_s)
        return StepSeconds(step_s=step_s, passes_s=passes_s, update_s=update_s, hooks_s=hooks_s)

    def runs_at(self, batch_size: int) -> bool:
        """Return whether the step runs at a batch size; it is traced to find out unless its shapes scale with every batch."""
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
    """Return the work of the training step that ``build`` makes, traced in the given numerics.

    ``build`` is called once. ``like``: a trace of the step in other numerics, see :func:`trace_any_batch`. Raises InputError
    if the step cannot be traced.
    """
    build = cache(build)
    traced = trace_any_batch(build, mode="training", numerics=numerics, like=like)

    def again(**changed: Any) -> WorkCurve:
        """Return the work of the same step with some of its numerics changed."""
        return measure_work(build, replace(numerics, **changed), traced)

    # The same step in other numerics is traced only when it is asked for: with layers in float8, in channels_last, by FSDP.
    eighth = partial(again, precision="fp8") if numerics.precision == "bf16" else None
    last = None if numerics.channels_last else partial(again, channels_last=True)
    gathered = partial(again, gathered=True) if numerics.autocasts else None
    return WorkCurve(traced=traced, gathered=gathered, eighth=eighth, last=last)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeconds:
    """The seconds of a step and of its parts."""

    step_s: float
    """All of the step, with the exchanges of replicas that add to it."""
    passes_s: float
    """The passes, without exchanges."""
    update_s: float
    """The optimizer's update."""
    hooks_s: float = 0.0
    """The part of the passes in which the device waits for the hooks of DDP or FSDP2."""


def host_wait_s(graph: Graph, passes: int, time: StepSeconds) -> float:
    """Return the seconds of a step of so many passes in which the device waits for the host, at most all of it.

    ``graph``: timed, so that its ``meta`` has the waits of a pass and of the update; ``time``: of the step, with its hooks.
    """
    pass_wait_s, update_wait_s = (float(graph.meta.get(name) or 0.0) for name in ("pass_host_s", "update_host_s"))
    return min(time.step_s, passes * pass_wait_s + update_wait_s + time.hooks_s)


def step_of(
    program: Program,
    setting: Setting,
    placement: Placement,
    sharding: Sharding,
    update_s: float,
    copies: Callable[[Communicator], Communicator],
) -> float:
    """Return the seconds of a step: its passes, the communication that outlasts them, and the optimizer's update.

    Processes that gather parameters communicate in every pass, others only in the last. ``update_s``: the seconds of the part
    that one process updates. ``copies``: a function that returns a group with the times of copies to and from the hosts added.
    """
    last_pass_s = _synchronized_pass_s(program, setting, placement, sharding, copies)
    other_pass_s = last_pass_s if sharding.gathers else program.compute_s
    return (setting.accumulation - 1) * other_pass_s + last_pass_s + update_s


def own_update_s(graph: Graph, sharding: Sharding) -> float:
    """Return the seconds in which a process updates its shard, from the ``meta`` of a timed graph.

    With fsdp every process has a part of every tensor, so the host's time for going through the tensors is not divided; with
    zero1 each process has some of the tensors, and it is. If the update needs whole matrices (Muon), they are divided among
    the processes, and the one with the most of them counts.
    """
    if sharding.on_host:
        return host_update_s(graph, sharding)
    whole_s, host_s = (float(graph.meta.get(name) or 0.0) for name in ("update_s", "update_host_s"))
    if matrices := int(graph.meta.get("update_matrices") or 0):
        return whole_s * math.ceil(matrices / sharding.shard) / matrices
    return host_s + (whole_s - host_s) / sharding.shard if sharding.gathers else whole_s / sharding.shard


def gathered_matrices_s(graph: Graph, group: Communicator, sharding: Sharding) -> float:
    """Return the seconds in which sharded processes exchange the parts of matrices that an update needs whole; 0 for none.

    In bfloat16, the parts of a matrix go to the process that updates it, and its new parts go back. Each way takes as long as
    a reduce-scatter of one process's parts.
    """
    size_bytes = float(graph.meta.get("update_matrix_bytes") or 0.0)
    return 2.0 * float(group.reduce_scatter_s(size_bytes / sharding.shard)) if size_bytes else 0.0


def own_sum_s(graph: Graph, sharding: Sharding) -> float:
    """Return the seconds in which a process adds its part of a pass's gradients to those of the passes before.

    Its part is one of ``shard`` processes' if gradients are sharded, else all. The graph's ``meta`` has the seconds for all,
    ``sum_s``, and within them those to launch a kernel for each gradient, ``sum_launch_s``, which sharding does not shorten.
    Gradients on the host are summed there.
    """
    if sharding.on_host:
        return host_sum_s(graph, sharding)
    whole_s, launch_s = (float(graph.meta.get(name) or 0.0) for name in ("sum_s", "sum_launch_s"))
    return launch_s + (whole_s - launch_s) / (sharding.shard if sharding.gathers else 1)


def timed_step(graph: Graph, model: CostModel, setting: Setting) -> Graph:
    """Return a traced training graph with the model's times, compiled first if the setting says so."""
    run = compiled(graph) if setting.compile else graph
    return estimate(run, model, Network(), optimizer=setting.optimizer)


def _synchronized_pass_s(
    program: Program,
    setting: Setting,
    placement: Placement,
    sharding: Sharding,
    copies: Callable[[Communicator], Communicator],
) -> float:
    """Return the seconds of a pass that communicates: forward, backward, and the collectives that outlast them.

    A single replica communicates only with its host, if its shards are there. ``copies``: see :func:`step_of`. Raises
    InputError for several replicas with the sharding "none", which exchange nothing.
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


def work_of(
    source: Source,
    numerics: Numerics,
    sequence_length: int | None,
    lora: int | None = None,
    attention: str | None = None,
) -> WorkCurve:
    """Return the work of SOURCE's training step at any batch size.

    ``sequence_length``: tokens of a sample; None: as the source says. ``lora``: the rank of adapters, which alone are then
    trained; None: the whole model is trained. ``attention``: eager, sdpa, or flash, which is sdpa in a precision in which it
    runs the flash kernel; None: the source's own. A ``zoo:`` model is traced only once in a process.

    Raises InputError for a graph or ONNX file, for a library's model if the example inputs do not reach a part of it, and for
    flash in a precision for which it has no kernel.
    """
    if attention == "flash" and precision_of(numerics.precision).computes not in ("bfloat16", "float16"):
        remedy = "give a precision of 16 bits, such as bf16"
        raise InputError("attention", f"flash has no kernel for {numerics.precision}", remedy)
    if is_graph_file(source) or is_onnx_file(source):
        remedy = "give a torch source: zoo:NAME, transformers:NAME, timm:NAME, diffusers:NAME, file.py:factory"
        raise InputError(str(source), "holds one batch size only and cannot be traced at others", remedy)

    if isinstance(source, str) and source.startswith("zoo:"):  # what ships does not change
        return _zoo_work(source, numerics, sequence_length, lora, attention, torch.get_default_dtype())
    return _traced_work(source, numerics, sequence_length, lora, attention)


def _traced_work(
    source: Source, numerics: Numerics, sequence_length: int | None, lora: int | None, attention: str | None
) -> WorkCurve:
    """Trace a torch SOURCE and return its work; see :func:`work_of`."""

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
    """Return the work of a model that ships with ddltool; a second call with equal arguments does not trace it again.

    ``default_type``: torch's default dtype, which is an argument only because the work depends on it.
    """
    return _traced_work(source, numerics, sequence_length, lora, attention)
