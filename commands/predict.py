"""``ddltool predict SOURCE --device NAME``: step time, throughput and memory of training on GPUs that are not here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast, get_args

from ddltool.analyzers.answers.reporting.predict_section import predict_section
from ddltool.analyzers.step.communication.fabrics import fabric_of
from ddltool.analyzers.step.costs.model import cost_model, demand_float8
from ddltool.analyzers.step.costs.numerics import least_that_fit, options_text, smaller_numerics
from ddltool.analyzers.step.costs.parallel import parallel_curve
from ddltool.analyzers.step.costs.predict import memory_limit_batch, predict_on, predicted_profile
from ddltool.analyzers.step.costs.recorded import predict_recorded
from ddltool.analyzers.step.costs.setting import ParallelDegrees, Setting
from ddltool.analyzers.step.costs.work import work_of
from ddltool.analyzers.step.recording.command import LIMIT_S, assumed, is_command, record, words_of
from ddltool.analyzers.step.tracing.batches import Fed, samples_in
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.sources import Source, is_graph_file, name_of
from ddltool.commands.options import (
    AS_TEXT,
    DEVICES,
    IN_SCRIPT,
    OPTIMIZER,
    LocalLink,
    Precision,
    completed,
    integers,
    number,
    one_of,
    within,
)
from ddltool.commands.output import answer
from ddltool.commands.verbs import VerbCall, given_options, is_given, refuse, verb
from ddltool.device import DEVICES_PER_NODE, Device, DeviceTable
from ddltool.errors import Infeasible, InputError
from ddltool.graph import Graph, read_graph
from ddltool.graph_results import PredictResult
from ddltool.job import Attention
from ddltool.profiles import write_profile
from ddltool.shipped import calibration, known_devices
from ddltool.stages import Stage, Tell, log_remark, quietly

SHARDINGS = ("none", "ddp", "zero1", "zero2", "fsdp", "fsdp:SHARD", "hsdp:SHARD", "fsdp:cpu")
_LARGEST = 2**31
# Parameters of a step that is traced: a script that is recorded says these itself. And those that only a script has.
_MODELLED = (
    "batch_sizes", "replicas", "precision", "channels_last", "compile", "optimizer", "accumulation", "sharding",
    "checkpointing", "sequence_length", "tensor_parallel", "pipeline_parallel", "expert_parallel", "sequence_parallel",
    "async_tensor_parallel", "virtual_stages", "lora", "load_in_4bit", "attention",
)  # fmt: skip
_RECORDED = ("limit", "keep_files")


def _sizes(text: str, where: str) -> tuple[int, ...] | None:
    """Return the batch sizes in a text such as ``8,16``; None for ``auto``, which tries them up to the memory limit."""
    return None if text == "auto" else integers(text, where, ordered=False)


@verb
def predict(
    source: Annotated[Source | list[str] | Graph, AS_TEXT],
    device: Annotated[str | Sequence[str], DEVICES],
    *,
    batch: Any = None,
    batch_sizes: Annotated[Sequence[int] | int | None, _sizes] = None,
    replicas: Annotated[Sequence[int] | int, integers] = 1,
    tensor_parallel: Annotated[int, within(1, 1024)] = 1,
    pipeline_parallel: Annotated[int, within(1, 1024)] = 1,
    expert_parallel: Annotated[int, within(1, 1024)] = 1,
    sequence_parallel: bool = False,
    async_tensor_parallel: bool = False,
    virtual_stages: Annotated[int, within(1, 1024)] = 1,
    gpus_per_node: Annotated[int, within(1, 1024)] = DEVICES_PER_NODE,
    precision: Precision = "fp32",
    channels_last: bool = False,
    compile: bool = False,
    optimizer: Annotated[str, OPTIMIZER] = "adam",
    lora: Annotated[int | None, within(1, 4096)] = None,
    load_in_4bit: bool = False,
    attention: Annotated[str | None, one_of(*get_args(Attention))] = None,
    accumulation: Annotated[int, within(1, 1_000_000)] = 1,
    sharding: Annotated[str, {"choices": SHARDINGS, **completed(SHARDINGS)}] = "ddp",
    checkpointing: str = "none",
    sequence_length: Annotated[int | None, within(1)] = None,
    bandwidth: str | None = None,
    latency: str | None = None,
    nic: str | None = None,
    link: LocalLink = None,
    local_bandwidth: str | None = None,
    local_latency: str | None = None,
    nccl_tests: Sequence[Path] = (),
    devices_file: Path | None = None,
    limit: Annotated[float, number(0)] = LIMIT_S,
    keep_files: bool = False,
    tell: Tell = log_remark,
    stage: Stage = quietly,
) -> PredictResult:
    """Predict training steps on devices that are not here, each with the range in which 80 % of measurements fall.

    ``source``: a module, (module, example_inputs), a function that makes one, a text as on the command line, or the list of
    words of a command that trains: its step is recorded, and the script says how it trains; or a recorded Graph. ``batch``:
    what your DataLoader yields: a tensor, (inputs, targets), or tensors by name; what the model does not take are targets.
    ``device``: names as ``ddltool devices`` lists them. ``batch_sizes``: local ones; None: that of ``batch``, else 1, 2, 4,
    ... up to the memory limit. The other settings are those of ``ddltool predict``. Raises InputError for what is unknown or
    cannot be traced, Infeasible where nothing fits.
    """
    sizes = _counts("batch_sizes", batch_sizes) if batch_sizes is not None else None
    counts = _counts("replicas", replicas)
    # Each device has a network, a cost model and (below) a setting: the lists go together.
    devices = _devices(device, known_devices(devices_file))
    texts = {"link": link, "local_bandwidth": local_bandwidth, "local_latency": local_latency}
    texts |= {"nic": nic, "bandwidth": bandwidth, "latency": latency}
    fabrics = [fabric_of(spec, gpus_per_node=gpus_per_node, nccl_tests=nccl_tests, **texts) for spec in devices]
    models = [cost_model(spec, calibration()) for spec in devices]
    if isinstance(source, Graph) or is_command(source) or is_graph_file(source):
        refuse("a recorded step", ("batch", *_MODELLED), instead=IN_SCRIPT)
        graph = _recorded_step(source, devices[0], gpus_per_node, limit, keep_files, tell, stage)
        return _reproducible(predict_recorded(graph, list(zip(models, fabrics, strict=True)), graph.name), source)
    refuse("a step that is traced", _RECORDED)
    if batch is not None:
        sizes = (samples_in(batch),) if sizes is None else sizes
        source = Fed(source, batch)
    layout = ParallelDegrees(
        tensor=tensor_parallel,
        pipeline=pipeline_parallel,
        sequence=sequence_parallel,
        virtual=virtual_stages,
        overlapped=async_tensor_parallel,
        expert=expert_parallel,
    )
    if any(count % expert_parallel for count in counts):
        problem = f"{expert_parallel} GPUs share the experts of {', '.join(map(str, counts))} replicas"
        raise InputError("--expert-parallel", problem, "give --replicas in multiples of it")
    trained: dict[str, Any] = {"optimizer": optimizer, "accumulation": accumulation, "compile": compile}
    trained |= {"sharding": sharding, "checkpointing": checkpointing, "layout": layout}
    settings = [Setting(fabric=fabric, **trained) for fabric in fabrics]
    if max(counts) == 1 and sharding not in ("none", "ddp") and not sharding.endswith(":cpu"):
        tell(f"note: --sharding {sharding} changes nothing for one replica; --replicas 8 has eight to share its state")
    for spec in devices:
        demand_float8(spec, precision)
    # Several GPUs compute with parameters of the half type; nothing is cast between the ops.
    numerics = Numerics(
        precision,  # type: ignore[arg-type]  # Numerics checks it
        channels_last,
        gathered=layout != ParallelDegrees(),
        load_in_4bit=load_in_4bit,
    )
    with stage(f"tracing {name_of(source)}"):
        curve = work_of(cast(Source, source), numerics, sequence_length, lora, attention)
    remark = curve.traced.graph.meta.get("note")
    if remark:
        tell(f"note: {remark}")
    curve = parallel_curve(curve, settings[0])

    def fits(change: Mapping[str, Any]) -> bool:
        """Return whether one sample fits every device with the numerics in ``change`` in place of its own.

        Traces the model anew.
        """
        new_settings = [replace(setting, optimizer=change.get("optimizer", optimizer)) for setting in settings]
        new_numerics = replace(
            numerics,
            precision=change.get("precision", precision),
            load_in_4bit=change.get("load_in_4bit", load_in_4bit),
        )
        rank = change.get("lora", lora)
        with stage(f"trying {options_text(change)}"):
            work = work_of(cast(Source, source), new_numerics, sequence_length, rank, attention)
        work = parallel_curve(work, new_settings[0])
        pairs = zip(devices, new_settings, strict=True)
        # The limit of memory on the most replicas, which share the state among most: 0 if no sample fits.
        return all(memory_limit_batch(work, spec, setting, max(counts)) for spec, setting in pairs)

    try:
        predicted = predict_on(curve, list(zip(models, settings, strict=True)), sizes, counts, name_of(source))
    except Infeasible as error:
        # The error also says with which other numerics the step would fit.
        changes = smaller_numerics(numerics.precision, optimizer, lora, devices, load_in_4bit=load_in_4bit)
        fitting = least_that_fit(changes, fits)
        also = f"; it fits with {' or '.join(fitting)}" if fitting else ""
        raise Infeasible(f"{error}{also}") from None
    return _reproducible(predicted, source)


def _reproducible(result: PredictResult, source: Source | list[str] | Graph) -> PredictResult:
    """Return the result with ``command``: the words behind ``ddltool predict`` that would predict the same again.

    Devices, batch sizes and replicas are not among them, because each row has its own. The result is returned unchanged if no
    command line can describe it: for a model, a Graph or a batch that a program gave as an object.
    """
    if is_command(source):
        named = ["--", *words_of(source)]
    elif isinstance(source, (str, Path)) and not is_given("batch"):
        named = [str(source)]
    else:
        return result
    options = given_options({"source", "device", "batch_sizes", "replicas"})
    return result.model_copy(update={"command": [*options, *named]})


def _recorded_step(
    source: str | Path | list[str] | Graph,
    device: Device,
    gpus_per_node: int,
    limit_s: float,
    keep_files: bool,
    tell: Tell,
    stage: Stage,
) -> Graph:
    """Return the graph of a recorded step, which is given, read from a file, or recorded here from a command.

    Args:
        source: a Graph, the path of its file, or the words of a command that trains.
        device: the device that the command's script sees.
        gpus_per_node: how many GPUs the script sees on a node.
        limit_s: the most seconds for recording.
        keep_files: whether what the script writes stays on the disk.
        tell: is called with a remark on what was assumed of values that only a run knows.
        stage: makes the context of the recording, which shows its progress.

    Raises InputError for a graph that was traced and not recorded.
    """
    if is_command(source):
        with stage(f"recording {' '.join(words_of(source))}"):
            graph = record(source, device, gpus_per_node=gpus_per_node, limit_s=limit_s, keep_files=keep_files)
    else:
        graph = source if isinstance(source, Graph) else read_graph(str(source))
    if graph.recorded is None:
        remedy = "give a torch source: zoo:NAME, transformers:NAME, timm:NAME, diffusers:NAME, file.py:factory"
        raise InputError(
            graph.name if isinstance(source, Graph) else str(source),
            "holds one batch size only and cannot be traced at others",
            remedy,
        )
    remark = assumed(graph)
    if remark:
        tell(remark)
    return graph


def show_predict(call: VerbCall[PredictResult], output: Path | None = None, as_json: bool = False) -> None:
    """Print the predicted rows, and write them as a profile."""
    result = call()
    if output is not None:
        write_profile(predicted_profile(result), output)
    answer(result, lambda: predict_section(result), as_json, output)


def _counts(where: str, given: Sequence[int] | int) -> tuple[int, ...]:
    """Return one number, or several, as a tuple.

    ``where``: the parameter, for errors. Raises InputError unless all are from 1 to 2**31.
    """
    numbers = (given,) if isinstance(given, int) else tuple(given)
    for count in numbers:
        if not isinstance(count, int) or not 1 <= count <= _LARGEST:
            raise InputError(where, f"{count} is out of range", f"write whole numbers from 1 to {_LARGEST}")
    return numbers


def _devices(names: str | Sequence[str], known: DeviceTable) -> list[Device]:
    """Return the devices that ``A100,L4``, or several texts, name, each once.

    Raises InputError for an unknown one, a CPU, and no name at all.
    """
    parts = names.split(",") if isinstance(names, str) else names
    devices = [known.gpu(name) for part in parts if (name := part.strip())]
    if not devices:
        raise InputError("device", "names no device", "give one or more, such as A100,L4")
    return list({device.name: device for device in devices}.values())
