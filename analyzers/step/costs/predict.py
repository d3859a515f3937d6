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
        devices[model.device.name] = _predicted_device(curve, model, setting, predicted)
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


def _predicted_device(
    curve: WorkCurve, model: CostModel, setting: Setting, predicted: Sequence[PredictedRow]
) -> PredictedDevice:
    """Return what the result says of a device beside its rows, ``predicted``.

    The batch size from which on it is saturated (90 % of the best rate) and the largest that fits are those of the first row's
    number of replicas. If no row fits because not even one sample does, the change of options that helps is named.
    """
    fitting_rows = [row for row in predicted if row.fits]
    fastest = max(fitting_rows, key=lambda row: row.samples_per_s, default=None)
    first_rows = [row for row in fitting_rows if row.num_replicas == predicted[0].num_replicas]
    best_rate = max((row.samples_per_s for row in first_rows), default=0.0)
    saturated_sizes = [row.local_batch_size for row in first_rows if row.samples_per_s >= _SATURATED * best_rate]
    helps, most_replicas = "", max(row.num_replicas for row in predicted)
    if not fitting_rows and setting.layout.gpus == 1 and not setting.budget_bytes:  # remedies are known for these alone
        holds_none = not memory_limit_batch(curve, model.device, setting, most_replicas)
        helps = remedy(curve, model.device, setting, most_replicas) if holds_none else ""
    precision = precision_of(curve.traced.graph.meta.get("precision"))
    return PredictedDevice(
        saturation_batch=min(saturated_sizes, default=None),
        memory_limit_batch=memory_limit_batch(curve, model.device, setting, predicted[0].num_replicas),
        remedy=helps,
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
    """Return the smallest change of options with which one sample fits a device, and the largest batch then; "": none helps.

    It reads like "with --sharding fsdp a local batch of 4 does". Numbers of replicas are tried in ascending order, for each the
    kinds of sharding, and for each the kinds of checkpointing. ``replicas``: the number with which no sample fits.
    """
    # By descending memory, from the setting's own on; what blocks save on the host is not modelled beside compiling.
    checkpointings = ["none", "selective", "full", f"full{ON_HOST}"][: 3 if setting.compile else 4]
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
    recomputed_steps: dict[tuple[int, Sharding | bool], _RecomputedStep] = {}
    rows = []
    for placement in placements:
        sharding = setting.sharded(placement.num_replicas)
        work = curve.under(sharding, setting.compile)
        for size in batch_sizes:
            if (size, sharding.gathers) not in timed:
                timed[size, sharding.gathers] = work.timed(size, model, setting)
            # Without a budget, recomputation depends on the sharding only by whether parameters are gathered.
            key = size, sharding if setting.budget_bytes else sharding.gathers
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
    """The graph's program view."""
    saving: Saving
    """What blocks save, and where."""
    figures: RecomputeFigures | None
    """What the result reports of it; None: all that blocks make is kept."""


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
    """Return the bytes that a device with ``usable`` lacks for what torch's allocator reserves; 0.0: it fits, else 1 or more.

    Given a limit, the allocator frees whole unused segments when it comes near. So a step may fit that reserves more without
    one. ``held`` None: a step that cannot be traced at its batch size fits nowhere.
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

    ``step``: the timed step with its recomputation; ``source``: the model's name. Raises InputError for a batch size beyond
    the largest at which the step can be traced.
    """
    graph, program = step.graph, step.program
    sharding = setting.sharded(placement.num_replicas)
    # Time: figures that :func:`.model.estimate` has put into the graph's meta.
    host_share, library_share = (float(graph.meta.get(name) or 0.0) for name in ("host_share", "library_share"))
    time = curve.step_time(graph, program, model, setting, placement, size)
    step_s = time.step_s
    low_s, high_s = model.interval(step_s, host_share=host_share, library_share=library_share, compiled=setting.compile)
    samples, tokens = placement.num_replicas * size * setting.accumulation, graph.meta.get("tokens_per_sample")
    # Memory: of the tensors, of the allocator's segments, and the range that a user may see.
    held = curve.held(size, sharding, setting.optimizer, step.saving)
    if held is None:
        raise InputError("--batch-sizes", f"{size} is more than the step is traced at", "give a smaller one")
    peak_bytes, limited_bytes = held.peak().total_bytes, held.reserved_bytes(usable_bytes(model.device))
    # A step that does not fit is reported with what it would reserve on a device without a limit.
    reserved_bytes = limited_bytes if limited_bytes is not None else held.reserved_bytes() or 0
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
        host_bound=host_share > HOST_BOUND or time.hooks_s > 0.0,
        host_wait_s=host_wait_s(graph, setting.accumulation, time),
        price_per_million_samples=None
        if price is None
        else price * placement.num_replicas * placement.gpus / 3600 / (samples / step_s) * 1e6,
        accumulation_steps=setting.accumulation - 1,
        source=source,
        origin="predicted",
    )


def products_s(graph: Graph, device: Device) -> float:
    """Return the seconds that all products of a graph would take at the device's dense peak; MFU is this over a step's seconds.

    Products are matrix products, convolutions, attention and recurrent layers. In ``fp32``, convolutions and recurrent layers
    may use TF32 and are counted at its peak; products in float8 are counted at the peak of float8.
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

    The least are its tensors, ``peak_bytes``. The most are the allocator's segments times ``FRAGMENTED``, a context with all
    kernels loaded, cuDNN's workspace, and the buffers of communicators: one among replicas, one more between the groups of
    HSDP, and one for each kind of group of the ``layout``. Under DDP the buckets of the first step, of ``gradient_bytes``, stay
    beside those of the others until Python's collector frees them.
    """
    communicators = (replicas > 1) + (sharding.kind == "hsdp" and replicas > sharding.shard)
    communicators += (layout.tensor > 1) + (layout.pipeline > 1)
    first_buckets_bytes = gradient_bytes if sharding.kind in ("ddp", "zero1") and replicas > 1 else 0.0
    most = FRAGMENTED * reserved_bytes + CONTEXT_BYTES + workspace_bytes + communicators * _COMMUNICATOR_BYTES
    most += first_buckets_bytes
    return peak_bytes, most


def memory_limit_batch(curve: WorkCurve, device: Device, setting: Setting, num_replicas: int = 1) -> int:
    """Return the largest local batch that fits the device, found by bisection; 0: one sample does not fit.

    Under a budget of memory, all blocks are taken to be fully checkpointed.
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
        fitting_size, larger_size = (middle_size, larger_size) if fits(middle_size) else (fitting_size, middle_size)
    return fitting_size


def timeline(curve: WorkCurve, model: CostModel, setting: Setting, row: PredictedRow) -> MemoryTimeline | None:
    """Return the memory of one process over a predicted row's pass, at the fullest moment of each of ``_MOMENTS`` equal spans.

    None: the step cannot be traced at so large a batch.
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
    """Return, ascending, the place with most bytes of each of ``_MOMENTS`` equal spans of a step; none of an empty span.

    ``at_s`` (places,): when each place ends, ascending. ``total_bytes`` (places,): what is held there.
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
    if spread := next((row for row in result.rows if row.num_gpus > row.num_replicas), None):
        settings += f", tensor {spread.tensor_parallel} x pipeline {spread.pipeline_parallel}"
    left_out = {"recompute"} if spread else {"recompute", "num_gpus", "tensor_parallel", "pipeline_parallel"}
    rows = [{**row.model_dump(mode="json", exclude=left_out), "settings": settings} for row in result.rows]
    return pd.DataFrame(rows).dropna(axis="columns", how="all")
