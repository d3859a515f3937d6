"""The work of a step at any batch size: what it computes, holds and exchanges, from one trace. Start at :func:`work_of`.

The graph of a step at any batch size, and the memory that it holds, are computed from one trace if they are a function of the
batch size (:func:`ddltool.analyzers.step.tracing.torch_adapter.trace_any_batch`). A step is ``accumulation`` passes (each a
forward and a backward pass over one micro-batch, gradient accumulation) and an update of the parameters. With several
replicas, gradients are reduced in DDP's default buckets during the last backward pass, and only the communication that
outlasts it adds to the step.
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
from ddltool.analyzers.step.costs.wrapping import hooked, with_copies
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
    """The trace of the step from which everything is computed."""
    under_fsdp: Callable[[], WorkCurve] | None = None
    """Traces the step as FSDP2's ``fully_shard`` computes it, with parameters gathered in a half type (16 bits) and no casts
    between ops, and returns its work; None: under FSDP the step computes the same."""
    in_fp8: Callable[[], WorkCurve] | None = None
    """Traces the step with its wide linear layers in float8, and returns its work; None: the step does not run in bfloat16."""
    in_channels_last: Callable[[], WorkCurve] | None = None
    """Traces the step with its images in channels_last, and returns its work; None: they are in that layout already."""
    compile: Literal["", "blocks", "whole"] = ""
    """Whether tensors live as under ``torch.compile``: of each block by itself, as torchtitan and torchtune do ("blocks"), of
    the whole step ("whole"), or not (""). A model without blocks is always compiled as a whole."""
    _lifetimes: dict[int, TensorLifetimes] = field(default_factory=dict)
    """What :meth:`lifetimes` has computed, by traced batch size."""
    _under_fsdp: list[WorkCurve] = field(default_factory=list)
    """The result of ``under_fsdp`` once it was called; a list of at most one, because the fields of the class are frozen."""
    _compiled: list[WorkCurve] = field(default_factory=list)
    """The same work under ``torch.compile`` once it was asked for; a list of at most one. Of an eager curve it is the curve
    with compiled blocks, and of that one the curve compiled as a whole."""

    def under(self, sharding: Sharding, compile: bool = False) -> WorkCurve:
        """Return the work of the step under a sharding.

        FSDP computes an autocast model in the half type (bfloat16 or float16) throughout, for which the step is traced again
        the first time; a model that does not run in this way keeps its own work. ``compile``: whether tensors live as under
        ``torch.compile``; then the returned curve is the one with blocks compiled one by one. Results are kept, so that a
        second call returns the same object.
        """
        if compile and not self.compile:
            eager = self.under(sharding)
            if not eager._compiled:
                whole = replace(eager, under_fsdp=None, compile="whole", _lifetimes={})
                by_blocks = replace(whole, compile="blocks", _lifetimes={}, _compiled=[whole])
                eager._compiled.append(by_blocks)
            return eager._compiled[0]
        if not sharding.gathers or self.under_fsdp is None:
            return self
        if not self._under_fsdp:  # a failure is kept as well, so that the step is traced only once
            try:
                self._under_fsdp.append(self.under_fsdp())
            except InputError:  # the model runs in the half type under autocast only
                self._under_fsdp.append(self)
        return self._under_fsdp[0]

    def lifetimes(self, batch_size: int) -> TensorLifetimes:
        """Return when each tensor of the step is made and last used, from a trace that serves ``batch_size`` (samples).

        One trace serves all batch sizes if its shapes scale with the batch; then the result has the sizes of the traced batch,
        and :meth:`TensorLifetimes.sizes` converts them. Otherwise the step is traced again, at the next multiple of 8 if it
        does not run at ``batch_size``. Raises InputError if both traces fail. O(calls of torch ops) the first time.
        """
        traced = self.traced
        if batch_size != traced.graph.batch_size and traced.scale(batch_size) is None:
            try:
                traced = traced.traced_at(batch_size)
            except InputError:
                if batch_size % 8 == 0:  # this may be the second try already, and there is no third
                    raise
                next_multiple = batch_size + -batch_size % 8
                return self.lifetimes(next_multiple)
        size = traced.graph.batch_size or 0
        if size not in self._lifetimes:
            lifetimes = lifetimes_of(traced)
            if self.compile:
                by_block = self.compile == "blocks" and bool(lifetimes.blocks)
                lifetimes = compiled_lifetimes(lifetimes, blocks_only=by_block)
            self._lifetimes[size] = lifetimes
        return self._lifetimes[size]

    def held(
        self, batch_size: int, sharding: Sharding, optimizer: str, saving: SavedOps | Saving | str = "none"
    ) -> Held | None:
        """Return the bytes of tensors, without kernels' workspace, that one process holds at every place of the program.

        A place is the index of a node of the traced program. None: ``batch_size`` is larger than the largest at which the step
        can be traced. Raises InputError for checkpointing of a model without a list of blocks.

        Args:
            batch_size: local samples of one pass.
            sharding: how the replicas share parameters, gradients and optimizer states.
            optimizer: a name of ``OPTIMIZERS``.
            saving: what blocks save for their backward passes: one kind of checkpointing for every block, such as "full"
                (:meth:`TensorLifetimes.every_saving`), a ``Saving``, or by checkpointed block the products that it saves.
        """
        if self.traced.largest is not None and batch_size > self.traced.largest:
            return None
        lifetimes = self.lifetimes(batch_size)
        if isinstance(saving, str):
            saving = lifetimes.every_saving(saving)
        size = lifetimes.sizes(self.scaled(batch_size))
        return lifetimes.held(Recomputation(lifetimes, saving), sharding, optimizer, size)

    def lower_peak_bytes(
        self, batch_size: int, sharding: Sharding, optimizer: str, saving: Saving, peak_bytes: float
    ) -> float:
        """Return the lower of two peaks in bytes: with blocks compiled one by one, and with the step compiled as a whole.

        Which of the two a trainer does is not known. ``peak_bytes``: the first of them, which is returned as it is for a curve
        that is not compiled by blocks. The other arguments are those of :meth:`held`.
        """
        if self.compile != "blocks":
            return peak_bytes
        compiled_as_a_whole = self._compiled[0]
        held = compiled_as_a_whole.held(batch_size, sharding, optimizer, saving)
        return peak_bytes if held is None else min(peak_bytes, held.peak().total_bytes)

    def workspace_bytes(self, batch_size: int) -> float:
        """Return the bytes that cuDNN may take beside the tensors; see :meth:`TensorLifetimes.workspace_bytes`."""
        return self.lifetimes(batch_size).workspace_bytes(self.scaled(batch_size))

    def scaled(self, batch_size: int) -> int | None:
        """Return the batch size to pass to :meth:`TensorLifetimes.sizes`; None: the trace is of that size and not scaled."""
        return batch_size if self.lifetimes(batch_size).traced is self.traced else None

    def peak(self, batch_size: int, sharding: Sharding, optimizer: str, checkpointing: str = "none") -> Peak | None:
        """Return the most bytes of tensors that one process holds at one time.

        None: the step cannot be traced at so large a batch. ``checkpointing``: none, selective or full, for every block. The
        other arguments are those of :meth:`held`.
        """
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
        """Return the time of a step: its passes, the communication that is not hidden behind them, and the update.

        Args:
            graph: one pass with times, as :meth:`timed` returns it, with the recomputation of checkpointed blocks if any.
            program: the graph as a sequence of kernels and exchanges (``program_of``), without the hooks of DDP or FSDP2.
            model: the cost model of the device.
            setting: how the model is trained; ``setting.accumulation`` passes make a step.
            placement: how many replicas and nodes there are.
            batch_size: local samples of a pass.

        ``model`` and ``batch_size`` matter only where shards lie on the host, for the copies to and from it.
        """
        sharding = setting.sharded(placement.num_replicas)
        program = with_copies(program, graph, sharding)
        program_with_hooks = hooked(program, graph, sharding)
        update_s = own_update_s(graph, sharding)
        sums_s = (setting.accumulation - 1) * own_sum_s(graph, sharding)
        kept_share = self.lifetimes(batch_size).kept_share if sharding.on_host else 1.0
        copies = partial(HostCopies.around, sharding=sharding, devices=[model.device], kept_share=kept_share)
        step_s = step_of(program_with_hooks, setting, placement, sharding, update_s, copies) + sums_s
        if sharding.gathers and placement.num_replicas > 1:
            group = setting.fabric.sharded(placement.num_replicas, sharding.shard, placement.num_nodes)
            step_s += gathered_matrices_s(graph, group, sharding)
        passes_s = setting.accumulation * program_with_hooks.compute_s + sums_s
        hooks_s = setting.accumulation * (program_with_hooks.compute_s - program.compute_s)
        return StepSeconds(step_s=step_s, passes_s=passes_s, update_s=update_s, hooks_s=hooks_s)

    def runs_at(self, batch_size: int) -> bool:
        """Return whether a pass of so many samples runs; the step is traced to find out unless it scales to every batch."""
        if self.traced.scales_to_every_batch:
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

    ``build`` is called once. ``like``: a trace of the same step in other numerics, whose finding on how shapes grow with the
    batch is taken over (:func:`trace_any_batch`); None: there is none. Raises InputError if the step cannot be traced.
    """
    build = cache(build)
    traced = trace_any_batch(build, mode="training", numerics=numerics, like=like)

    def with_numerics(**changed: Any) -> WorkCurve:
        """Trace the same step with some fields of its ``Numerics`` changed, and return its work."""
        return measure_work(build, replace(numerics, **changed), traced)

    # These are functions, so that the step is traced in other numerics only when it is asked for.
    in_fp8 = partial(with_numerics, precision="fp8") if numerics.precision == "bf16" else None
    in_channels_last = None if numerics.channels_last else partial(with_numerics, channels_last=True)
    under_fsdp = partial(with_numerics, gathered=True) if numerics.autocasts else None
    return WorkCurve(traced=traced, under_fsdp=under_fsdp, in_fp8=in_fp8, in_channels_last=in_channels_last)


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
    """Return the seconds of a step in which the device waits for the host, at most all of the step.

    ``graph``: one pass with times, whose ``meta`` has the waits of the pass and of the update (``pass_host_s``,
    ``update_host_s``). ``passes``: how many passes the step has. ``time``: the step's, with the waits for hooks.
    """
    pass_wait_s = float(graph.meta.get("pass_host_s") or 0.0)
    update_wait_s = float(graph.meta.get("update_host_s") or 0.0)
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

    Processes that gather parameters communicate in every pass, others only in the last.

    Args:
        program: one pass of a step, as a sequence of kernels and exchanges.
        setting: how the model is trained.
        placement: how many replicas and nodes there are.
        sharding: that of ``setting`` on so many replicas.
        update_s: the seconds in which one process updates its part of the parameters.
        copies: returns the group of processes that it is given with the times of copies to and from the hosts added to its
            collectives; the group itself where nothing lies on a host.
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
    whole_s = float(graph.meta.get("update_s") or 0.0)
    host_s = float(graph.meta.get("update_host_s") or 0.0)
    matrices = int(graph.meta.get("update_matrices") or 0)
    if matrices:
        most_matrices = math.ceil(matrices / sharding.shard)
        return whole_s * most_matrices / matrices
    if sharding.gathers:
        return host_s + (whole_s - host_s) / sharding.shard
    return whole_s / sharding.shard


def gathered_matrices_s(graph: Graph, group: Communicator, sharding: Sharding) -> float:
    """Return the seconds in which sharded processes exchange the parts of matrices that an update needs whole; 0 for none.

    Only Muon needs whole matrices; their bytes in bfloat16 are in the ``meta`` of ``graph`` (``update_matrix_bytes``). The
    parts of a matrix go to the process that updates it, and its new parts go back. Each way takes as long as a reduce-scatter
    of one process's parts. ``group``: the processes among which ``sharding`` divides the parameters.
    """
    matrix_bytes = float(graph.meta.get("update_matrix_bytes") or 0.0)
    if not matrix_bytes:
        return 0.0
    one_way_s = float(group.reduce_scatter_s(matrix_bytes / sharding.shard))
    return 2.0 * one_way_s


def own_sum_s(graph: Graph, sharding: Sharding) -> float:
    """Return the seconds in which a process adds its part of a pass's gradients to those of the passes before.

    Its part is one of ``shard`` processes' if gradients are sharded, else all. The graph's ``meta`` has the seconds for all,
    ``sum_s``, and within them those to launch a kernel for each gradient, ``sum_launch_s``, which sharding does not shorten.
    Gradients on the host are summed there.
    """
    if sharding.on_host:
        return host_sum_s(graph, sharding)
    whole_s = float(graph.meta.get("sum_s") or 0.0)
    launch_s = float(graph.meta.get("sum_launch_s") or 0.0)
    processes = sharding.shard if sharding.gathers else 1  # that share the gradients
    return launch_s + (whole_s - launch_s) / processes


def timed_step(graph: Graph, model: CostModel, setting: Setting) -> Graph:
    """Return a traced training graph with the times that the cost model predicts.

    The graph is first changed to its fused kernels if the setting says that the step is compiled.
    """
    executed = compiled(graph) if setting.compile else graph
    return estimate(executed, model, Network(), optimizer=setting.optimizer)


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
        buckets = default_cuts(program)  # the buckets of gradients that DDP reduces at a time
        reduced_s = max(program.compute_s, finish_s(program, all_replicas, buckets))
        if sharding.kind == "zero1":  # each process gathers the parameters that the others have updated
            reduced_s += all_replicas.all_gather_s(float(program.size_bytes.sum()))
        return reduced_s
    group = copies(setting.fabric.sharded(placement.num_replicas, sharding.shard, placement.num_nodes))
    units = units_of(program)
    if units is None:  # the model is one unit: everything is gathered before the step and reduced after it
        gather_s = group.all_gather_s(float(program.held_bytes.sum()))
        reduce_s = group.reduce_scatter_s(float(program.size_bytes.sum()))
        return gather_s + program.compute_s + reduce_s
    root, blocks = units
    forward_group = setting.fabric.over(sharding.forward_shard) if sharding.forward_shard else None
    return simulate_fsdp(root, blocks, group, 1, 1, reshard=sharding.reshards, near=forward_group).step_s


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

    Raises InputError for a graph or ONNX file, for a library's model if the example inputs do not reach a part of it, for flash
    in a precision for which it has no kernel, and for weights of 4 bits without adapters.
    """
    if numerics.load_in_4bit and lora is None:
        problem = "packs the weights that LoRA freezes, and all weights are trained"
        raise InputError("--load-in-4bit", problem, "give --lora 16, or leave it out")
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
    meta = {**graph.meta, "lora": lora, "load_in_4bit": numerics.load_in_4bit}
    return replace(curve, traced=replace(curve.traced, graph=replace(graph, meta=meta)))


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
