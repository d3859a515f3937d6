"""``ddltool trace SOURCE``: read a model, order its transfers, and say what a good order is worth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from ddltool.analyzers.communication.result import trace as trace_of
from ddltool.analyzers.loading.fabrics import BANDWIDTH, LATENCY
from ddltool.analyzers.loading.sources import is_graph_file, is_onnx_file, scan_source
from ddltool.analyzers.reporting.graph_section import SETTINGS, determinism_section, trace_section
from ddltool.commands.options import (
    ChannelsLast,
    Compress,
    DevicesFile,
    Json,
    LocalLink,
    NcclTests,
    Nic,
    Output,
    Precision,
    Seed,
    SequenceLength,
    Source,
    demand_part,
    device_names,
    is_given,
    one_of,
)
from ddltool.commands.output import note, print_json, progress, show
from ddltool.commands.values import number
from ddltool.errors import InputError, known
from ddltool.graph import Mode
from ddltool.graph_io import read_graph
from ddltool.graph_results import DeterminismResult, NamedGraph

_LINKS = ("gpus_per_node", "link", "nic", "nccl_tests")
# What a graph that brings its own times does not read.
_TIMING = ("device", "devices_file", "bandwidth", "latency", "parameter_servers", *_LINKS)


def trace(
    context: typer.Context,
    source: Source,
    mode: Annotated[
        str | None,
        typer.Option(**one_of("training", "inference", help="Default: training for torch, inference for ONNX.")),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples per step; the source's own by default.", min=1)
    ] = None,
    bind: Annotated[
        str | None, typer.Option(metavar="NAME=SIZE,...", help="Sizes of an ONNX file's symbolic dimensions.")
    ] = None,
    device: Annotated[
        str,
        typer.Option(metavar="NAME", autocompletion=device_names, help="Device type to estimate compute times for."),
    ] = "V100",
    precision: Precision = "fp32",
    channels_last: ChannelsLast = False,
    sequence_length: SequenceLength = None,
    devices_file: DevicesFile = None,
    bandwidth: Annotated[str, typer.Option(metavar="RATE", help="Network bandwidth per channel and node.")] = BANDWIDTH,
    latency: Annotated[str, typer.Option(metavar="TIME", help="Network latency per transfer.")] = LATENCY,
    parameter_servers: Annotated[
        int, typer.Option(help="Channels to spread the parameters over.", min=1, max=10_000)
    ] = 1,
    oracle: Annotated[
        str | None,
        typer.Option(
            metavar="roofline|measured|FILE",
            autocompletion=lambda: ["roofline", "measured"],
            help="measured: on this machine; FILE: a torch profiler trace (.json, .json.gz). A timed graph.json keeps its "
            "own durations unless this is given.",
        ),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Solve for the best order of everything, with a bound.")
    ] = False,
    time_limit: Annotated[
        float, typer.Option(help="Seconds for --exact.", metavar="SECONDS", parser=number("--time-limit", 0))
    ] = 20.0,
    replicas: Annotated[
        int, typer.Option(help="Processes that DDP or FSDP2 would run on (training).", min=2, max=100_000)
    ] = 8,
    setting: Annotated[
        str, typer.Option(**one_of(*SETTINGS, help="How gradients travel: what the verdict speaks of first."))
    ] = "ddp",
    gpus_per_node: Annotated[
        int | None,
        typer.Option(
            help="Replicas of a node; 1 where --bandwidth is given, else 8 on the device's own NVLink.", min=1, max=1024
        ),
    ] = None,
    link: LocalLink = None,
    nic: Nic = None,
    nccl_tests: NcclTests = None,
    compress: Compress = None,
    samples: Annotated[int, typer.Option(help="Simulated runs of each order.", min=1)] = 100,
    perfetto: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write TAC's timeline as a Chrome/Perfetto trace.")
    ] = None,
    determinism: Annotated[
        bool,
        typer.Option("--determinism", help="List what stands in the way of equal bits (D0, D1, D2), and nothing else."),
    ] = False,
    output: Output = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Trace one step, order its transfers, and say what that gains, for parameter servers, DDP and FSDP2."""
    setting = known("--setting", setting, SETTINGS)
    _demand_parts(context, source, oracle, determinism)
    if determinism:
        show_determinism(
            source, mode=_mode(mode), batch_size=batch_size, bindings=_bindings(bind, source), as_json=as_json
        )
        return
    own = is_graph_file(source) and oracle is None
    if own and (given := [name for name in _TIMING if is_given(context, name)]):
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        if read_graph(source).meta.get("bandwidth_bytes_per_s") is not None:
            note(f"note: {names} ignored: the file has times of its own; add --oracle roofline to time it anew")
    found = trace_of(
        source,
        mode=_mode(mode),
        batch_size=batch_size,
        bindings=_bindings(bind, source),
        device=device,
        precision=precision,
        channels_last=channels_last,
        sequence_length=sequence_length,
        devices_file=devices_file,
        bandwidth=bandwidth if is_given(context, "bandwidth") else None,
        latency=latency if is_given(context, "latency") else None,
        parameter_servers=parameter_servers,
        oracle=oracle,
        exact=exact,
        time_limit_s=time_limit,
        replicas=replicas,
        gpus_per_node=gpus_per_node,
        link=link,
        nic=nic,
        nccl_tests=nccl_tests or (),
        compress=compress,
        samples=samples,
        seed=seed,
        output=output,
        perfetto=perfetto,
        tell=note,
        stage=progress,
    )
    if as_json:
        print_json(found)
    else:
        show(trace_section(found, setting), output, perfetto)


def _demand_parts(context: typer.Context, source: str, oracle: str | None, determinism: bool) -> None:
    """Raise InputError for an option that has no part in what was asked for."""
    every = {parameter.name or "" for parameter in context.command.params}
    if determinism:
        demand_part(context, "--determinism", {"source", "mode", "batch_size", "bind", "determinism", "as_json"})
    elif oracle == "measured":
        demand_part(context, "--oracle measured", every - {"precision", "channels_last", "device", "devices_file"})
    elif is_graph_file(source) or is_onnx_file(source):
        demand_part(context, f"{source}", every - {"precision", "channels_last", "sequence_length"})


def _mode(mode: str | None) -> Mode | None:
    """Return the mode of that name. Raises InputError for any other."""
    modes: dict[str | None, Mode | None] = {None: None, "training": "training", "inference": "inference"}
    if mode not in modes:
        raise InputError("--mode", f"unknown mode {mode!r}", "training or inference")
    return modes[mode]


def _bindings(text: str | None, source: str) -> dict[str, int]:
    """Return the sizes in ``batch=8,sequence=128``. Raises InputError for anything else, and without an ONNX file."""
    if text is not None and not is_onnx_file(source):
        raise InputError("--bind", f"{source} has no symbolic dimensions", "leave it out: only ONNX files have them")
    found: dict[str, int] = {}
    for part in text.split(",") if text is not None else ():
        name, _, size = part.strip().rpartition("=")
        if not name or name in found or not size.isdecimal():
            raise InputError("--bind", f"cannot read {part!r}", "give each name once: batch=8,sequence=128")
        found[name] = int(size)
    return found


def show_determinism(
    source: str,
    *,
    mode: Mode | None = None,
    batch_size: int | None = None,
    bindings: Mapping[str, int] | None = None,
    as_json: bool = False,
) -> None:
    """Print the levels of a model's ops; the body of ``ddltool trace SOURCE --determinism``."""
    with progress(f"tracing {source}"):
        graph, scanned = scan_source(source, mode, batch_size, bindings)
    found = DeterminismResult(graph=NamedGraph(name=graph.name, mode=graph.mode), determinism=scanned)
    if as_json:
        print_json(found)
    else:
        show(determinism_section(found))
