"""``ddltool trace SOURCE``: read a model, order its transfers, and say what a good order is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, get_args

from ddltool.analyzers.answers.reporting.graph_section import SETTINGS, determinism_section, trace_section
from ddltool.analyzers.step.communication.collectives import compressed_ddp, parse_compression, plan_collectives
from ddltool.analyzers.step.communication.fabrics import BANDWIDTH, LATENCY, fabric_of, own_link
from ddltool.analyzers.step.communication.program import own_fabric, program_of
from ddltool.analyzers.step.costs.timed_graph import DEVICE, timed_graph
from ddltool.analyzers.step.tracing.sources import Source, is_graph_file, is_onnx_file, name_of, scan_source
from ddltool.analyzers.step.transfers.efficiency import compare
from ddltool.analyzers.step.transfers.result import trace_result
from ddltool.analyzers.step.transfers.timeline import to_chrome_trace
from ddltool.artifacts import check_outputs, to_json, write_text
from ddltool.commands.options import (
    AS_TEXT,
    DEVICES,
    LocalLink,
    Precision,
    Seed,
    completed,
    number,
    one_of,
    pairs,
    within,
)
from ddltool.commands.output import answer, progress
from ddltool.commands.verbs import VerbCall, demand_part, is_given, refuse, verb
from ddltool.device import DEVICES_PER_NODE
from ddltool.errors import InputError
from ddltool.graph import Mode, write_graph
from ddltool.graph_results import DeterminismResult, NamedGraph, TraceResult
from ddltool.shipped import known_devices
from ddltool.stages import Stage, Tell, log_remark, quietly

# Parameters that say what joins replicas.
_LINKS = ("gpus_per_node", "link", "nic", "nccl_tests")
# Parameters that a graph with times of its own ignores.
_TIMING = ("device", "devices_file", "bandwidth", "latency", "parameter_servers", *_LINKS)
# Parameters that have no effect on a source that is no torch model, and on measuring its ops on this machine.
_TORCH = {"precision", "channels_last", "sequence_length"}
_MODELLED = {"precision", "channels_last", "device", "devices_file"}


def _bindings(text: str, where: str) -> dict[str, int]:
    """Return the sizes by name in a text such as ``batch=8,sequence=128``. Raises InputError for any other text."""
    named = pairs(text, where, "NAME=SIZE", "batch=8,sequence=128", "[0-9]+")
    return {name: int(size) for name, size in named.items()}


@verb
def trace(
    source: Annotated[Source | list[str], AS_TEXT],
    *,
    mode: Annotated[Mode | None, one_of(*get_args(Mode))] = None,
    batch_size: Annotated[int | None, within(1)] = None,
    bindings: Annotated[Mapping[str, int] | None, _bindings] = None,
    device: Annotated[str, DEVICES] = DEVICE,
    precision: Precision = "fp32",
    channels_last: bool = False,
    sequence_length: Annotated[int | None, within(1)] = None,
    devices_file: Path | None = None,
    bandwidth: str | None = None,
    latency: str | None = None,
    parameter_servers: Annotated[int, within(1, 10_000)] = 1,
    oracle: Annotated[str | None, completed(("roofline", "measured"))] = None,
    exact: bool = False,
    time_limit_s: Annotated[float, number(0)] = 20.0,
    replicas: Annotated[int, within(2, 100_000)] = 8,
    gpus_per_node: Annotated[int | None, within(1, 1024)] = None,
    link: LocalLink = None,
    nic: str | None = None,
    nccl_tests: Sequence[Path] = (),
    compress: str | None = None,
    samples: Annotated[int, within(1)] = 100,
    seed: Seed = 0,
    output: str | Path | None = None,
    perfetto: str | Path | None = None,
    tell: Tell = log_remark,
    stage: Stage = quietly,
) -> TraceResult:
    """Trace one step, order its transfers, and say what that gains, for parameter servers, DDP and FSDP2.

    ``source``: a module, (module, example_inputs), a function that makes one, a text as on the command line, or the
    words of a command that trains. ``bandwidth`` and ``latency`` None: 10 Gbit/s and 50 us; with a ``nic``, NCCL's
    latency of cards. ``output``: the file for the graph; ``perfetto``: that for the timeline of TAC's order. For the
    others see the options of ``ddltool trace``.

    Raises InputError for an unknown name, a source that does not run, and an output that cannot be written.
    """
    _demand_parts(source, oracle)
    if not exact:
        refuse("a trace without --exact", ("time_limit_s",), instead="add --exact, or leave it out")
    compression = None if compress is None else parse_compression(compress)
    if output is not None and output == perfetto:
        raise InputError("perfetto", f"is {perfetto}, as -o", "give two different files")
    # Of a source FILE:FUNCTION the file is an input.
    read = [name_of(source).partition(":")[0]] if isinstance(source, (str, Path)) else []
    check_outputs([*read, oracle, devices_file, *nccl_tests], {"-o": output, "--perfetto": perfetto})
    with stage(f"tracing {name_of(source)}") as advance:
        graph = timed_graph(
            source,
            mode=mode,
            batch_size=batch_size,
            bindings=bindings,
            device=device,
            bandwidth=bandwidth or BANDWIDTH,
            latency=latency or LATENCY,
            parameter_servers=parameter_servers,
            oracle=oracle,
            devices_file=devices_file,
            precision=precision,
            channels_last=channels_last,
            sequence_length=sequence_length,
            tell=tell,
            progress=advance,
        )
    with stage("simulating", 4 * samples) as advance:
        comparison = compare(
            graph,
            samples=samples,
            seed=seed,
            exact_s=time_limit_s if exact else None,
            progress=lambda done, total: advance(done, "" if done < total else "(searching a better order)"),
        )
    # A file with times of its own was timed for its own network.
    has_own_times = is_graph_file(source) and oracle is None and graph.meta.get("bandwidth_bytes_per_s") is not None
    if has_own_times:
        ignored_names = [name for name in _TIMING if is_given(name)]
        if ignored_names:
            options = ", ".join("--" + name.replace("_", "-") for name in ignored_names)
            tell(f"note: {options} ignored: the file has times of its own; add --oracle roofline to time it anew")
        fabric = own_fabric(graph)
    else:
        known = known_devices(devices_file).device(device)
        # Devices with NVLink are taken for several on a node; --bandwidth without --link means nodes of one GPU.
        is_board = bandwidth is None and (link is not None or own_link(known).kind.startswith("nvlink"))
        per_node = gpus_per_node or (DEVICES_PER_NODE if is_board else 1)
        texts = {"link": link, "nic": nic, "bandwidth": bandwidth, "latency": latency}
        fabric = fabric_of(known, gpus_per_node=per_node, nccl_tests=nccl_tests, **texts)
    # The fabric over which replicas exchange gradients; without one there are no collectives to plan.
    group = fabric.over(replicas) if fabric is not None else None
    plans = plan_collectives(graph, group) if group is not None else None
    # What compressed gradients would bring over DDP's default buckets.
    if compression is not None and plans is not None and group is not None:
        name = str(graph.meta.get("device")) if has_own_times else device
        rate = known_devices(devices_file).device(name).memory_bytes_per_s
        figures = compressed_ddp(graph, program_of(graph), group, compression, rate, plans.ddp.default.step_s)
        plans = plans.model_copy(update={"compressed": figures})
    result = trace_result(graph, comparison, plans)
    timeline = None
    if perfetto is not None:  # made before anything is written, so that an error leaves no file behind
        tac = comparison.schedules["tac"]
        timeline = to_json(to_chrome_trace(graph, comparison.timelines["tac"], tac.priority), indent=None)
    if output is not None:
        write_graph(graph, output)
    if perfetto is not None and timeline is not None:
        write_text(perfetto, timeline)
    return result


def show_trace(
    call: VerbCall[TraceResult],
    *,
    setting: Annotated[str, one_of(*SETTINGS)] = "ddp",
    determinism: bool = False,
    output: Path | None = None,
    perfetto: Path | None = None,
    as_json: bool = False,
) -> None:
    """Print what the order of transfers gains; or, for ``--determinism``, what stands in the way of equal bits.

    ``setting``: how replicas exchange gradients ("ddp", "fsdp2" or "servers"); its verdict comes first.
    """
    if determinism:
        demand_part("--determinism", {"source", "mode", "batch_size", "bindings", "determinism", "as_json"})
        source = call["source"]
        _demand_bindable(source)
        with progress(f"tracing {source}"):
            graph, levels = scan_source(source, call["mode"], call["batch_size"], call["bindings"])
        scanned = DeterminismResult(graph=NamedGraph(name=graph.name, mode=graph.mode), determinism=levels)
        answer(scanned, lambda: determinism_section(scanned), as_json)
        return
    result = call()
    answer(result, lambda: trace_section(result, setting), as_json, output, perfetto)


def _demand_parts(source: Source | list[str], oracle: str | None) -> None:
    """Raise InputError for an argument that the caller gave and that has no effect on timing this source.

    ``oracle``: where the ops' times come from: "roofline" (the cost model), "measured" (on this machine) or a file; None: the
    source's own times, or the cost model.
    """
    _demand_bindable(source)
    if oracle == "measured":
        refuse("--oracle measured", _MODELLED)
    elif is_graph_file(source) or is_onnx_file(source):
        refuse(str(source), _TORCH)


def _demand_bindable(source: Source | list[str]) -> None:
    """Raise InputError if ``bindings`` are given for a source that is no ONNX file, and so has no symbolic dimensions."""
    if is_given("bindings") and not is_onnx_file(source):
        problem = f"{name_of(source)} has no symbolic dimensions"
        raise InputError("bindings", problem, "leave it out: only ONNX files have them")
