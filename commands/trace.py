"""``ddltool trace SOURCE``: read a model, order its transfers, and say what a good order is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from ddltool.analyzers.communication.result import trace as trace_of
from ddltool.analyzers.loading.fabrics import BANDWIDTH, LATENCY
from ddltool.analyzers.loading.sources import is_graph_file, is_onnx_file, scan_source
from ddltool.analyzers.reporting.graph_section import SETTINGS, determinism_section, trace_section
from ddltool.commands.declaring import called
from ddltool.commands.options import (
    DEVICES,
    LocalLink,
    Precision,
    Seed,
    completed,
    demand_part,
    is_given,
    number,
    one_of,
    pairs,
    within,
)
from ddltool.commands.output import answer, note, progress
from ddltool.errors import InputError
from ddltool.graph import Mode, read_graph
from ddltool.graph_results import DeterminismResult, NamedGraph

_LINKS = ("gpus_per_node", "link", "nic", "nccl_tests")
# What a graph that brings its own times does not read.
_TIMING = ("device", "devices_file", "bandwidth", "latency", "parameter_servers", *_LINKS)


def trace(
    context: typer.Context,
    source: str,
    mode: Annotated[Mode | None, one_of(*get_args(Mode))] = None,
    batch_size: Annotated[int | None, within(1)] = None,
    bind: str | None = None,
    device: Annotated[str, DEVICES] = "V100",
    precision: Precision = "fp32",
    channels_last: bool = False,
    sequence_length: Annotated[int | None, within(1)] = None,
    devices_file: Path | None = None,
    bandwidth: str = BANDWIDTH,
    latency: str = LATENCY,
    parameter_servers: Annotated[int, within(1, 10_000)] = 1,
    oracle: Annotated[str | None, completed(("roofline", "measured"))] = None,
    exact: bool = False,
    time_limit_s: Annotated[float, number(0)] = 20.0,
    replicas: Annotated[int, within(2, 100_000)] = 8,
    setting: Annotated[str, one_of(*SETTINGS)] = "ddp",
    gpus_per_node: Annotated[int | None, within(1, 1024)] = None,
    link: LocalLink = None,
    nic: str | None = None,
    nccl_tests: list[Path] | None = None,
    compress: str | None = None,
    samples: Annotated[int, within(1)] = 100,
    perfetto: Path | None = None,
    determinism: bool = False,
    output: Path | None = None,
    seed: Seed = 0,
    as_json: bool = False,
) -> None:
    """Trace one step, order its transfers, and say what that gains, for parameter servers, DDP and FSDP2."""
    _demand_parts(context, source, oracle, determinism)
    if determinism:
        with progress(f"tracing {source}"):
            graph, scanned = called(context, scan_source, bindings=_bindings(bind, source))
        levels = DeterminismResult(graph=NamedGraph(name=graph.name, mode=graph.mode), determinism=scanned)
        answer(levels, lambda: determinism_section(levels), as_json)
        return
    own = is_graph_file(source) and oracle is None
    if own and (given := [name for name in _TIMING if is_given(context, name)]):
        names = ", ".join("--" + name.replace("_", "-") for name in given)
        if read_graph(source).meta.get("bandwidth_bytes_per_s") is not None:
            note(f"note: {names} ignored: the file has times of its own; add --oracle roofline to time it anew")
    found = called(context, trace_of, bindings=_bindings(bind, source))
    answer(found, lambda: trace_section(found, setting), as_json, output, perfetto)


def _demand_parts(context: typer.Context, source: str, oracle: str | None, determinism: bool) -> None:
    """Raise InputError for an option that has no part in what was asked for."""
    every = {parameter.name or "" for parameter in context.command.params}
    if determinism:
        demand_part(context, "--determinism", {"source", "mode", "batch_size", "bind", "determinism", "as_json"})
    elif oracle == "measured":
        demand_part(context, "--oracle measured", every - {"precision", "channels_last", "device", "devices_file"})
    elif is_graph_file(source) or is_onnx_file(source):
        demand_part(context, f"{source}", every - {"precision", "channels_last", "sequence_length"})


def _bindings(text: str | None, source: str) -> dict[str, int]:
    """Return the sizes in ``batch=8,sequence=128``. Raises InputError for anything else, and without an ONNX file."""
    if text is not None and not is_onnx_file(source):
        raise InputError("--bind", f"{source} has no symbolic dimensions", "leave it out: only ONNX files have them")
    named = pairs(text or "", "--bind", "NAME=SIZE", "batch=8,sequence=128", "[0-9]+")
    return {name: int(size) for name, size in named.items()}
