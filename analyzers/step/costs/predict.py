"""Predicted steps over batch sizes and placements of a job on one device type. Start at :func:`predict`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddltool.analyzers.step.communication.program import Program, program_of
from ddltool.analyzers.step.costs.held import Held
from ddltool.analyzers.step.costs.memory import Recomputation
from ddltool.analyzers.step.costs.model import HOST_BOUND, CostModel
from ddltool.analyzers.step.costs.offloading import host_link_bytes_per_s
from ddltool.analyzers.step.costs.saving import ON_HOST, Saving
from ddltool.analyzers.step.costs.setting import ALONE, ParallelDegrees, Placement, Setting
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.analyzers.step.costs.work import WorkCurve, host_wait_s
from ddltool.arrays import Floats
from ddltool.device import GIVEN, Device
from ddltool.errors import Infeasible, InputError
from ddltool.graph import RECOMPUTED, Graph
from ddltool.graph_results import (
    MemoryTimeline,
    PredictedDevice,
    PredictedRow,
    PredictionAssumptions,
    PredictResult,
    RecomputeFigures,
)
from ddltool.precision import precision_of

if TYPE_CHECKING:  # it loads a solver
    from ddltool.analyzers.step.costs.checkpointing import CheckpointingChoice

# The part of a device's memory that a training process cannot use: what the driver keeps (1 to 1.5 %), and a context that loads
# kernels only when they are needed.
RESERVED_BYTES = 2.0**30
# A context that loads all kernels of torch and cuDNN at once, as CUDA did before 11.7: nvidia-smi shows so much for a process
# with a tiny model (Lucid's PPO, 2.00 GiB on an RTX 3090).
CONTEXT_BYTES = 2.0 * 2**30
# Real segments over those of the simulated allocator, at most: torchtitan's runs took up to a seventh more.
FRAGMENTED = 1.15
# The buffers of an NCCL communicator: 4 MiB (NCCL_BUFFSIZE) each way for up to 32 channels.
_COMMUNICATOR_BYTES = 2 * 32 * 4 * 2.0**20
# How many moments a timeline of memory has: as many as a picture can show.
_MOMENTS = 160
# A rate of 90 % of the best predicted one counts as saturated, as for measured profiles.
_SATURATED = 0.9
# The search for the largest batch ends here: a step whose memory grows with the batch does not fit any device by then.
_LARGEST_BATCH = 2**40
# Fields of a setting that are reported as assumptions.
_ASSUMED = ("compile", "optimizer", "accumulation", "sharding", "checkpointing")


def predict_on(
    curve: WorkCurve,
    model_settings: Sequence[tuple[CostModel, Setting]],
    batch_sizes: Sequence[int] | None,
    replicas: Sequence[int],
    source: str,
) -> PredictResult:
    """Return the predicted rows on each device, the assumptions behind them, and limits and errors of each device.

    Args:
        curve: the work of the model's step.
        model_settings: one cost model and setting per device; assumptions are reported from the first setting.
        batch_sizes: local batch sizes; None: powers of two up to each device's memory limit.
        replicas: numbers of replicas to predict for.
        source: name of the model.

    Raises Infeasible if ``batch_sizes`` is None and one sample does not fit.
    """
    _, first_setting = model_settings[0]
    meta = curve.traced.graph.meta
    rows = []
    devices = {}
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
        devices[model.device.name] = _predicted_device(curve, model, setting, predicted)
        rows += predicted
    assumed = {
        **{name: meta.get(name) for name in ("precision", "channels_last")},
        **{name: getattr(first_setting, name) for name in _ASSUMED},
        "sequence_length": meta.get("tokens_per_sample"),
        "lora": meta.get("lora"),
        "load_in_4bit": bool(meta.get("load_in_4bit")),
        "bandwidth_bytes_per_s": first_setting.fabric.between.bytes_per_s,
        "gpus_per_node": first_setting.fabric.gpus_per_node,
        "sequence_parallel": first_setting.layout.sequence,
        "async_tensor_parallel": first_setting.layout.overlapped,
        "expert_parallel": first_setting.layout.expert,
        "virtual_stages": first_setting.layout.virtual,
    }
    return PredictResult(
        predicted=True, rows=rows, devices=devices, assumptions=PredictionAssumptions.model_validate(assumed)
    )


def _predicted_device(
    curve: WorkCurve, model: CostModel, setting: Setting, predicted: Sequence[PredictedRow]
) -> PredictedDevice:
    """Return what the result says of a device beside its rows.

    The batch size from which on it is saturated (90 % of the best rate) and the largest that fits are those of the first row's
    number of replicas. If no row fits because not even one sample does, the change of options that helps is named.
    ``predicted``: the rows of this device, at least one.
    """
    fitting_rows = [row for row in predicted if row.fits]
    fastest = max(fitting_rows, key=lambda row: row.samples_per_s, default=None)
    first_rows = [row for row in fitting_rows if row.num_replicas == predicted[0].num_replicas]
    best_rate = max((row.samples_per_s for row in first_rows), default=0.0)
    saturated_sizes = [row.local_batch_size for row in first_rows if row.samples_per_s >= _SATURATED * best_rate]
    remedy_text = ""
    if not fitting_rows and setting.layout.gpus == 1 and not setting.budget_bytes:  # remedies are known for these alone
        most_replicas = max(row.num_replicas for row in predicted)
        if memory_limit_batch(curve, model.device, setting, most_replicas) == 0:
            remedy_text = remedy(curve, model.device, setting, most_replicas)
    precision = precision_of(curve.traced.graph.meta.get("precision"))
    return PredictedDevice(
        saturation_batch=min(saturated_sizes, default=None),
        memory_limit_batch=memory_limit_batch(curve, model.device, setting, predicted[0].num_replicas),
        remedy=remedy_text,
        has_precision=precision.computes in model.device.peak_flops,
        price_per_hour=model.device.price_per_hour,
        error=model.residuals,
        link_bytes_per_s=setting.fabric.inside.bytes_per_s,
        memory=None if fastest is None else timeline(curve, model, setting, fastest),
    )


def _fitting_sizes(curve: WorkCurve, model: CostModel, setting: Setting, replicas: int) -> tuple[int, ...]:
    """Return the local batch sizes 1, 2, 4, ... up to the memory limit, without those at which the step does not run.

    They are all returned if it runs at none, so that predicting them says why. Under a budget that holds one sample only where
    blocks save different things, it is (1,). Raises Infeasible if one sample does not fit; the message names the smallest
    change of options that helps.
    """
    limit = memory_limit_batch(curve, model.device, setting, replicas)
    sharding = setting.sharded(replicas)
    if limit < 1 and setting.budget_bytes:
        curve = curve.under(sharding, setting.compile)
        seconds = curve.lifetimes(1).seconds(curve.timed(1, model, setting))
        # The limit is that of blocks which all save the same. Raises Infeasible, with the least budget, if no others fit.
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
    """Return a text on the smallest change of options with which one sample fits a device; "": none helps.

    It reads like "with --sharding fsdp a local batch of 4 does", where 4 is the largest batch that fits then. Numbers of
    replicas are tried in ascending order, for each the kinds of sharding, and for each the kinds of checkpointing.
    ``replicas``: the number with which no sample fits.
    """
    # By descending memory, from the setting's own on.
    checkpointings = ["none", "selective", "full", f"full{ON_HOST}"]
    own = checkpointings.index(setting.uniform) if setting.uniform in checkpointings else 3
    checkpointings = checkpointings[own:] if curve.lifetimes(1).blocks else ["none"]
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
                    continue  # what does not fit already
                candidate = replace(setting, sharding=sharding_kind, checkpointing=checkpointing)
                limit = memory_limit_batch(curve, device, candidate, replica_count)
                if limit:
                    changed_options = []
                    if replica_count != replicas:
                        changed_options.append(f"--replicas {replica_count}")
                    if sharding_kind != setting.sharding:
                        changed_options.append(f"--sharding {sharding_kind}")
                    if checkpointing != setting.checkpointing:
                        changed_options.append(f"--checkpointing {checkpointing}")
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

    Args:
        curve: the work of the model's step.
        model: the cost model of the device.
        setting: how the replicas are joined, and how the model is trained.
        batch_sizes: local batch sizes: samples of one pass of one replica.
        placements: how many replicas run on how many nodes.
        source: the model's name, for the rows.

    Raises InputError for a batch size at which the step cannot be traced, and Infeasible for a budget of memory that no choice
    of checkpointing keeps.
    """
    # Timing a graph and choosing what to recompute are slow, and the same for several placements.
    timed: dict[tuple[int, bool], Graph] = {}  # by batch size, and whether parameters are gathered
    recomputed_steps: dict[tuple[int, Sharding | bool], _RecomputedStep] = {}
    rows = []
    for placement in placements:
        sharding = setting.sharded(placement.num_replicas)
        work = curve.under(sharding, setting.compile)
        for size in batch_sizes:
            if (size, sharding.gathers) not in timed:
                timed[size, sharding.gathers] = work.timed(size, model, setting)
            # Without a budget, recomputation depends on the sharding only by whether parameters are gathered.
            key = (size, sharding if setting.budget_bytes else sharding.gathers)
            if key not in recomputed_steps:
                timed_graph = timed[size, sharding.gathers]
                recomputed_steps[key] = _recompute_step(work, model, setting, sharding, timed_graph, size)
            rows.append(_predict_row(work, model, setting, placement, recomputed_steps[key], size, source))
    return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class _RecomputedStep:
    """A timed step with the recomputation of its checkpointed blocks."""

    graph: Graph
    """The timed graph; the durations of the backward pass include the recomputation."""
    program: Program
    """The same as a sequence of kernels and exchanges (``program_of``)."""
    saving: Saving
    """What blocks save, and where."""
    figures: RecomputeFigures | None
    """What the result reports of it; None: all that blocks make is kept."""


def _recompute_step(
    curve: WorkCurve, model: CostModel, setting: Setting, sharding: Sharding, timed: Graph, size: int
) -> _RecomputedStep:
    """Return a timed step with the recomputation that the setting's checkpointing adds.

    ``sharding``: that of the setting on some number of replicas. ``timed``: the graph of one pass with times, without
    recomputation. ``size``: its local batch size.
    """
    if setting.checkpointing == "none":
        return _RecomputedStep(graph=timed, program=program_of(timed), saving=Saving(), figures=None)
    lifetimes = curve.lifetimes(size)
    seconds = lifetimes.seconds(timed)
    saving = lifetimes.every_saving(setting.uniform)
    budget_bytes = setting.budget_bytes
    lower_bound_s = None
    if budget_bytes is not None:
        choice = _choose_saving(curve, model, setting, sharding, seconds, size)
        saving = choice.saving
        lower_bound_s = choice.bound_s
    recomputation = Recomputation(lifetimes, saving)
    sizes = lifetimes.sizes(curve.scaled(size))
    rate = host_link_bytes_per_s(model.device)
    recompute_s = lifetimes.recomputed(recomputation, seconds).sum()
    waits = lifetimes.copies(recomputation, seconds, sizes, rate).waits() if lifetimes.blocks else ()
    figures = RecomputeFigures(
        modules=saving.recomputed(),
        recomputed_s=float(recompute_s),
        budget_bytes=budget_bytes,
        lower_bound_s=lower_bound_s,
        on_host=saving.offloaded(lifetimes.names),
        host_bytes=float(sum(sizes[storages].sum() for storages in recomputation.copied)),
        waits_s=float(sum(waits_s.sum() for waits_s in waits)),
    )
    lengthened_graph = lifetimes.lengthened(saving, timed, sizes, rate)
    return _RecomputedStep(graph=lengthened_graph, program=program_of(lengthened_graph), saving=saving, figures=figures)


def _choose_saving(
    curve: WorkCurve, model: CostModel, setting: Setting, sharding: Sharding, seconds: Floats, size: int
) -> CheckpointingChoice:
    """Return the cheapest choice of what blocks save under the setting's budget of memory, at local batch ``size``.

    ``seconds`` (nodes,): the time of each place of the program. A choice that torch's allocator has no room for is made again
    with a smaller budget. Raises Infeasible if no choice fits the budget.
    """
    from ddltool.analyzers.step.costs.checkpointing import cheapest  # it loads a solver

    usable = usable_bytes(model.device)
    return cheapest(
        curve.lifetimes(size),
        seconds,
        sharding,
        setting.optimizer,
        setting.budget_bytes or 0.0,
        curve.scaled(size),
        host_bytes_per_s=host_link_bytes_per_s(model.device) if setting.saves_on_host else 0.0,
        lacking_bytes=lambda saving: lacking_bytes(curve.held(size, sharding, setting.optimizer, saving), usable),
    )


def lacking_bytes(held: Held | None, usable: float) -> float:
    """Return the bytes that a device lacks for what torch's allocator reserves for a step; 0.0: it fits, else 1.0 or more.

    ``held``: what the step holds; None: it cannot be traced at its batch size, and lacks infinitely many. ``usable``: the bytes
    of the device that a training process can use.
    """
    if held is None:
        return math.inf
    # Given a limit, the allocator frees whole unused segments when it comes near. So a step may fit that reserves more without.
    if held.reserved_bytes(usable) is not None:
        return 0.0
    unlimited_bytes = held.reserved_bytes() or 0
    return max(1.0, unlimited_bytes - usable)


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

    ``step``: the timed step with its recomputation; ``source``: the model's name. Raises InputError for a batch size beyond
    the largest at which the step can be traced.
    """
    graph, program = step.graph, step.program
    sharding = setting.sharded(placement.num_replicas)
    # Time: with two shares that :func:`.model.estimate` has put into the graph's meta.
    host_share = float(graph.meta.get("host_share") or 0.0)
    library_share = float(graph.meta.get("library_share") or 0.0)
    time = curve.step_time(graph, program, model, setting, placement, size)
    step_s = time.step_s
    low_s, high_s = model.interval(step_s, host_share=host_share, library_share=library_share, compiled=setting.compile)
    samples = placement.num_replicas * size * setting.accumulation
    tokens = graph.meta.get("tokens_per_sample")
    # Memory: of the tensors, of the allocator's segments, and the range that a user may see.
    held = curve.held(size, sharding, setting.optimizer, step.saving)
    if held is None:
        raise InputError("--batch-sizes", f"{size} is more than the step is traced at", "give a smaller one")
    peak_bytes = held.peak().total_bytes
    limited_bytes = held.reserved_bytes(usable_bytes(model.device))
    reserved_bytes = limited_bytes
    if reserved_bytes is None:  # a step that does not fit is reported with what it would reserve without a limit
        reserved_bytes = held.reserved_bytes() or 0
    least_bytes = curve.lower_peak_bytes(size, sharding, setting.optimizer, step.saving, peak_bytes)
    memory_low_bytes, memory_high_bytes = memory_range(
        least_bytes,
        reserved_bytes,
        sharding,
        placement.num_replicas,
        curve.workspace_bytes(size),
        setting.layout,
        float(program.size_bytes.sum()),
    )
    gpus = placement.num_replicas * placement.gpus
    samples_per_s = samples / step_s
    gpu_price_per_hour = model.device.price_per_hour
    price_per_million_samples = None
    if gpu_price_per_hour is not None:
        price_per_million_samples = (
            gpu_price_per_hour * placement.num_replicas * placement.gpus / 3600 / samples_per_s * 1e6
        )
    return PredictedRow(
        device=model.device.name,
        num_nodes=placement.num_nodes,
        num_replicas=placement.num_replicas,
        tensor_parallel=setting.layout.tensor,
        pipeline_parallel=setting.layout.pipeline,
        num_gpus=gpus,
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
        samples_per_s=samples_per_s,
        tokens_per_s=samples * float(tokens) / step_s if isinstance(tokens, (int, float)) else None,
        mfu=setting.accumulation * products_s(graph, model.device) / setting.layout.pipeline / step_s,
        host_bound=host_share > HOST_BOUND or time.hooks_s > 0.0,
        host_wait_s=host_wait_s(graph, setting.accumulation, time),
        price_per_million_samples=price_per_million_samples,
        accumulation_steps=setting.accumulation - 1,
        source=source,
        origin="predicted",
    )


def products_s(graph: Graph, device: Device) -> float:
    """Return the seconds that all products of a graph would take at the device's dense peak; MFU is this over a step's seconds.

    Products are matrix products, and convolutions, attention and recurrent layers, which consist of them. In ``fp32``,
    convolutions and recurrent layers may use TF32 and are counted at its peak; products in float8 are counted at the peak of
    float8. Products that checkpoints compute again are left out.
    """
    computes = precision_of(graph.meta.get("precision")).computes
    peak = device.peak_for(computes)
    convolution_peak = device.peak_for("tf32") if computes == "float32" else peak
    is_recomputed = np.array([name.startswith(RECOMPUTED) for name in graph.names], dtype=bool)
    # A row of ``gemm`` is (count, m, n, k); m is 0 for an op without matrix products, and for a transfer.
    is_product = (graph.gemm[:, 1] > 0) & ~is_recomputed
    op_kinds = [op_type.rpartition(".")[2] for op_type in graph.op_type]
    is_convolution = is_product & np.array(
        [name.startswith(("convolution", "recurrent")) for name in op_kinds], dtype=bool
    )
    is_narrow = is_product & np.array([dtype.startswith("float8") for dtype in graph.dtype], dtype=bool)
    peaks = np.select([is_convolution, is_narrow], [convolution_peak, device.peak_for("float8")], peak)
    return float((graph.flops / peaks)[is_product].sum())


def usable_bytes(device: Device) -> float:
    """Return the bytes of a device's memory that a training process can use: without the driver's and a context's.

    From a datasheet's size, error-correcting codes are deducted; a size that a user gives is taken as the driver shows it.
    """
    share = 1.0 if device.source.startswith(GIVEN) else device.free_of_codes
    return share * device.memory_gib * 2.0**30 - RESERVED_BYTES


def memory_range(
    peak_bytes: float,
    reserved_bytes: float,
    sharding: Sharding,
    replicas: int,
    workspace_bytes: float,
    layout: ParallelDegrees = ALONE,
    gradient_bytes: float = 0.0,
) -> tuple[float, float]:
    """Return (least, most) bytes of a device that a process is likely to take.

    The least are its tensors. The most are the allocator's segments times ``FRAGMENTED``, a context with all kernels loaded,
    cuDNN's workspace, and the buffers of NCCL's communicators. Under DDP the buckets of the first step stay beside those of the
    others until Python's collector frees them.

    Args:
        peak_bytes: the most bytes of tensors at one time.
        reserved_bytes: the bytes of segments that torch's allocator reserves for them.
        sharding: how the replicas share parameters, gradients and optimizer states.
        replicas: the number of replicas.
        workspace_bytes: what cuDNN may take beside the tensors.
        layout: how the GPUs of one replica share its model.
        gradient_bytes: the bytes of all gradients, which DDP's buckets hold.
    """
    group_kinds = (  # each kind of group that exists has a communicator
        replicas > 1,  # among replicas
        sharding.kind == "hsdp" and replicas > sharding.shard,  # between the groups of HSDP
        layout.tensor > 1,
        layout.pipeline > 1,
    )
    first_buckets_bytes = gradient_bytes if sharding.kind in ("ddp", "zero1") and replicas > 1 else 0.0
    most = FRAGMENTED * reserved_bytes + CONTEXT_BYTES + workspace_bytes + sum(group_kinds) * _COMMUNICATOR_BYTES
    most += first_buckets_bytes
    return peak_bytes, most


def memory_limit_batch(curve: WorkCurve, device: Device, setting: Setting, num_replicas: int = 1) -> int:
    """Return the largest local batch (samples of one pass of one replica) that fits the device; 0: one sample does not fit.

    It is found by bisection. Under a budget of memory, all blocks are taken to be fully checkpointed, which holds least.
    """
    sharding, available_bytes = setting.sharded(num_replicas), usable_bytes(device)
    curve = curve.under(sharding, setting.compile)

    def fits(size: int) -> bool:
        """Return whether a local batch keeps the budget and finds room in the device's allocator."""
        memory = curve.held(size, sharding, setting.optimizer, setting.uniform)
        if memory is None or memory.peak().total_bytes > min(available_bytes, setting.budget_bytes or available_bytes):
            return False
        return memory.reserved_bytes(available_bytes) is not None

    # ``fitting_size`` always fits; ``larger_size`` does not fit from the end of the first loop on.
    if not fits(1):
        return 0
    fitting_size, larger_size = 1, 2
    while fits(larger_size) and larger_size < _LARGEST_BATCH:
        fitting_size, larger_size = larger_size, 2 * larger_size
    while larger_size - fitting_size > 1:
        middle_size = (fitting_size + larger_size) // 2
        if fits(middle_size):
            fitting_size = middle_size
        else:
            larger_size = middle_size
    return fitting_size


def timeline(curve: WorkCurve, model: CostModel, setting: Setting, row: PredictedRow) -> MemoryTimeline | None:
    """Return the memory of one process over a predicted row's pass, at the fullest moment of each of ``_MOMENTS`` equal spans.

    None: the step cannot be traced at so large a batch. ``row``: a prediction for this curve, device and setting, whose choice
    of what to recompute is taken over.
    """
    sharding = setting.sharded(row.num_replicas)
    curve = curve.under(sharding, setting.compile)
    size = row.local_batch_size
    lifetimes = curve.lifetimes(size)
    figures = row.recompute
    saving = Saving() if figures is None else Saving.read(figures.modules, figures.on_host, lifetimes.names)
    held = curve.held(size, sharding, setting.optimizer, saving)
    if held is None:
        return None
    recomputation = Recomputation(lifetimes, saving)
    timed = curve.timed(size, model, setting)
    copies = None
    if saving.on_host:
        rate, sizes = host_link_bytes_per_s(model.device), lifetimes.sizes(curve.scaled(size))
        copies = lifetimes.copies(recomputation, lifetimes.seconds(timed), sizes, rate)
    end_s = lifetimes.clock(recomputation, timed, copies)
    fullest_places = fullest_of_spans(end_s, held.peak().curve, float(end_s[-1]))
    fullest_bytes = {part: part_bytes[fullest_places] for part, part_bytes in held.curves().items()}
    # Rounding can leave sums of bytes that are added and freed slightly below 0.
    return MemoryTimeline(
        num_replicas=row.num_replicas,
        local_batch_size=size,
        time_s=end_s[fullest_places].tolist(),
        parts={part: np.maximum(held, 0.0).tolist() for part, held in fullest_bytes.items() if held.any()},
    )


def fullest_of_spans(at_s: Floats, total_bytes: Floats, step_s: float) -> NDArray[np.intp]:
    """Return, ascending, the place with most bytes of each of ``_MOMENTS`` equal spans of a step.

    A span of time in which no place ends has none. ``at_s`` (places,): when each place ends, ascending, in seconds.
    ``total_bytes`` (places,): what is held there. ``step_s``: the seconds of the step.
    """
    # The end of the last place lies in the last span; a step without any time is no division by 0.
    span = np.minimum((_MOMENTS * at_s / max(step_s, 1e-30)).astype(np.int64), _MOMENTS - 1)
    order = np.lexsort((total_bytes, span))  # by span, and by bytes within a span
    is_last_of_span = np.append(np.diff(span[order]) > 0, True)
    return np.sort(order[is_last_of_span])


def predicted_profile(result: PredictResult) -> pd.DataFrame:
    """Return the predicted rows as a table with the columns of measured ones, and a column ``settings`` that describes them.

    Columns without any value are left out, and so are those of parallel layouts if every replica is one GPU.
    """
    assumptions = result.assumptions
    layout_label = ", channels_last" if assumptions.channels_last else ""
    compile_label = ", compiled" if assumptions.compile else ""
    settings = f"predicted, {assumptions.precision}{layout_label}{compile_label}, optimizer {assumptions.optimizer}"
    left_out = {"recompute"}
    row_of_several_gpus = next((row for row in result.rows if row.num_gpus > row.num_replicas), None)
    if row_of_several_gpus is None:
        left_out |= {"num_gpus", "tensor_parallel", "pipeline_parallel"}
    else:
        degrees = f"tensor {row_of_several_gpus.tensor_parallel} x pipeline {row_of_several_gpus.pipeline_parallel}"
        settings += f", {degrees}"
    rows = [{**row.model_dump(mode="json", exclude=left_out), "settings": settings} for row in result.rows]
    return pd.DataFrame(rows).dropna(axis="columns", how="all")
