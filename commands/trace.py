"""``ddltool trace SOURCE``: read a model, order its transfers, and say what a good order is worth."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from ddltool.commands.options import (
    ChannelsLast,
    DevicesFile,
    Json,
    Output,
    Precision,
    Seed,
    SequenceLength,
    Source,
)
from ddltool.commands.values import number

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddltool.analyzers.communication.efficiency import Comparison
    from ddltool.device import Network
    from ddltool.graph import Graph, Mode

DEVICE, BANDWIDTH, LATENCY = "V100", "10Gbit", "50us"


def trace(
    source: Source,
    mode: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="training (default for torch) or inference (default for ONNX).", show_default=False),
    ] = None,
    batch_size: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Samples per step; the source's own by default.", min=1, show_default=False),
    ] = None,
    bind: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAME=SIZE,...", help="Sizes of an ONNX file's symbolic dimensions.", show_default=False),
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="Device type to estimate compute times for.")] = DEVICE,
    precision: Precision = "fp32",
    channels_last: ChannelsLast = False,
    sequence_length: SequenceLength = None,
    devices_file: DevicesFile = None,
    bandwidth: Annotated[str, typer.Option(help="Network bandwidth per channel.")] = BANDWIDTH,
    latency: Annotated[str, typer.Option(help="Network latency per transfer.")] = LATENCY,
    parameter_servers: Annotated[
        int, typer.Option(help="Channels to spread the parameters over.", min=1, max=10_000)
    ] = 1,
    oracle: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="roofline, measured (on this machine), or a torch profiler trace (.json, .json.gz); a timed graph.json "
            "keeps its own durations unless this is given.",
            show_default=False,
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
    samples: Annotated[int, typer.Option(help="Simulated runs of each order.", min=1)] = 100,
    perfetto: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="Write TAC's timeline as a Chrome/Perfetto trace.", show_default=False),
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
    from ddltool.artifacts import check_writable
    from ddltool.commands.collectives import collective_plans
    from ddltool.commands.output import print_json
    from ddltool.commands.sources import is_graph_file
    from ddltool.commands.trace_output import as_document, show_trace
    from ddltool.errors import InputError
    from ddltool.graph_io import write_graph
    from ddltool.outputs import demand_distinct

    if determinism:
        _scan(source, mode, batch_size, bind, {"-o": output, "--perfetto": perfetto}, as_json)
        return
    if output is not None and output == perfetto:
        raise InputError("--perfetto", f"is {perfetto}, as -o", "give two different files")
    demand_distinct([source.partition(":")[0], oracle, devices_file], {"-o": output, "--perfetto": perfetto})
    for place in (output, perfetto):
        if place is not None:
            check_writable(place)
    graph = timed_graph(
        source,
        mode=_mode(mode),
        batch_size=batch_size,
        bindings=_bindings(bind, source),
        device=device,
        bandwidth=bandwidth,
        latency=latency,
        parameter_servers=parameter_servers,
        oracle=oracle,
        devices_file=devices_file,
        precision=precision,
        channels_last=channels_last,
        sequence_length=sequence_length,
    )
    comparison = compare_with_progress(graph, samples=samples, seed=seed, exact_s=time_limit if exact else None)
    own = is_graph_file(source) and oracle is None and graph.meta.get("bandwidth_bytes_per_s") is not None
    if own:
        _tell_ignored(device, devices_file, bandwidth, latency, parameter_servers)
    plans = collective_plans(graph, replicas=replicas, bandwidth=bandwidth, latency=latency, own_network=own)
    if output is not None:
        write_graph(graph, output)
    if perfetto is not None:
        _write_timeline(graph, comparison, perfetto)
    if as_json:
        print_json(as_document(graph, comparison, plans))
    else:
        show_trace(graph, comparison, plans, [place for place in (output, perfetto) if place is not None])


def _scan(
    source: str,
    mode: str | None,
    batch_size: int | None,
    bind: str | None,
    written: Mapping[str, Path | None],
    as_json: bool,
) -> None:
    """Print what stands in the way of equal bits. Raises InputError for a file to write: a scan writes none."""
    from ddltool.commands.determinism import determinism
    from ddltool.errors import InputError

    for option, place in written.items():
        if place is not None:
            raise InputError(option, "has no part in --determinism", "leave it out, or redirect --json")
    determinism(source, mode=_mode(mode), batch_size=batch_size, bindings=_bindings(bind, source), as_json=as_json)


def _write_timeline(graph: Graph, comparison: Comparison, path: Path) -> None:
    """Write TAC's timeline as a Chrome/Perfetto trace."""
    from ddltool.analyzers.communication.perfetto import to_chrome_trace
    from ddltool.artifacts import to_json, write_text

    timeline, schedule = comparison.tac.timeline, comparison.tac.schedule
    priority = schedule.priority if schedule is not None else None
    write_text(path, to_json(to_chrome_trace(graph, timeline, priority), indent=None))


def _tell_ignored(device: str, devices_file: Path | None, bandwidth: str, latency: str, parameter_servers: int) -> None:
    """Say which options have no part in a graph that brings its own times."""
    from ddltool.commands.output import note

    given = {
        "--device": device != DEVICE,
        "--devices-file": devices_file is not None,
        "--bandwidth": bandwidth != BANDWIDTH,
        "--latency": latency != LATENCY,
        "--parameter-servers": parameter_servers != 1,
    }
    if any(given.values()):
        names = ", ".join(name for name, changed in given.items() if changed)
        note(f"note: {names} ignored: the file has times of its own; add --oracle roofline to time it anew")


def _mode(mode: str | None) -> Mode | None:
    """Return the mode of that name. Raises InputError for any other."""
    from ddltool.errors import InputError

    modes: dict[str | None, Mode | None] = {None: None, "training": "training", "inference": "inference"}
    if mode not in modes:
        raise InputError("--mode", f"unknown mode {mode!r}", "training or inference")
    return modes[mode]


def _bindings(text: str | None, source: str) -> dict[str, int]:
    """Return the sizes in ``batch=8,sequence=128``. Raises InputError for anything else, and without an ONNX file."""
    from ddltool.commands.sources import is_onnx_file
    from ddltool.errors import InputError

    if text is not None and not is_onnx_file(source):
        raise InputError("--bind", f"{source} has no symbolic dimensions", "leave it out: only ONNX files have them")
    found: dict[str, int] = {}
    for part in text.split(",") if text is not None else ():
        name, _, size = part.strip().rpartition("=")
        if not name or name in found or not size.isdecimal():
            raise InputError("--bind", f"cannot read {part!r}", "give each name once: batch=8,sequence=128")
        found[name] = int(size)
    return found


def timed_graph(
    source: str,
    *,
    mode: Mode | None = None,
    batch_size: int | None = None,
    bindings: Mapping[str, int] | None = None,
    device: str = DEVICE,
    bandwidth: str = BANDWIDTH,
    latency: str = LATENCY,
    parameter_servers: int = 1,
    oracle: str | None = None,
    devices_file: Path | None = None,
    precision: str = "fp32",
    channels_last: bool = False,
    sequence_length: int | None = None,
) -> Graph:
    """Return the graph of SOURCE with a duration for every op: its own where a file has them, else the cost model's.

    ``oracle``: roofline, measured, or the path of a profiler trace. ``devices_file``: device types beside the known ones.
    Raises InputError for what is none of them, for unknown devices and for a SOURCE that cannot be read.
    """
    from ddltool.analyzers.costs.estimate import estimate
    from ddltool.analyzers.costs.model import cost_model
    from ddltool.analyzers.tracing.dialect import Numerics
    from ddltool.commands.output import note, progress
    from ddltool.commands.sources import is_graph_file, load_graph
    from ddltool.device import Network
    from ddltool.errors import InputError
    from ddltool.fixtures.loading import calibration, known_devices
    from ddltool.units import parse_bandwidth, parse_duration

    if oracle not in (None, "roofline", "measured") and not Path(oracle).is_file():
        problem = f"unknown oracle {oracle!r}, and no such file"
        raise InputError("--oracle", problem, "roofline, measured, or the path of a profiler trace")
    network = Network(
        bandwidth_bytes_per_s=parse_bandwidth(bandwidth),
        latency_s=parse_duration(latency),
        parameter_servers=parameter_servers,
    )
    model = cost_model(known_devices(devices_file).device(device), calibration())
    numerics = Numerics(precision, channels_last)  # type: ignore[arg-type]  # Numerics checks it
    if oracle == "measured":
        return _measured(source, mode, batch_size, network)
    with progress(f"tracing {source}"):
        graph = load_graph(source, mode, batch_size, bindings, numerics=numerics, sequence_length=sequence_length)
    if graph.meta.get("note"):
        note(f"note: {graph.meta['note']}")
    if is_graph_file(source) and graph.timed and oracle is None:
        return graph
    estimated = estimate(graph, model, network)
    return estimated if oracle in (None, "roofline") else _from_profiler(graph, estimated, oracle)


def _measured(source: str, mode: Mode | None, batch_size: int | None, network: Network) -> Graph:
    """Return the graph of a torch SOURCE with ops timed on this machine's CPU."""
    from ddltool.analyzers.oracle.measured import estimate_measured
    from ddltool.commands.output import progress
    from ddltool.commands.sources import is_graph_file, is_onnx_file, resolve_step
    from ddltool.errors import InputError

    if is_graph_file(source) or is_onnx_file(source):
        raise InputError("--oracle", f"{source} has no ops that can be run", "measured needs a torch SOURCE")
    with progress(f"timing the ops of {source}") as advance, contextlib.redirect_stdout(sys.stderr):
        return estimate_measured(
            lambda: resolve_step(source),
            mode=mode or "training",
            batch_size=batch_size,
            network=network,
            progress=lambda done, total: advance(done, f"{done} of {total}"),
        )


def _from_profiler(graph: Graph, estimated: Graph, path: str) -> Graph:
    """Return the graph with the times of a profiler trace; transfers and what it lacks come from the roofline."""
    from ddltool.analyzers.oracle.kineto import read_trace
    from ddltool.analyzers.oracle.matching import apply, match
    from ddltool.commands.output import note, progress
    from ddltool.commands.trace_output import describe_match

    with progress(f"reading {path}"):
        trace = read_trace(Path(path))
        found = match(graph, trace)
        timed = apply(graph, found, estimated)
    for line in describe_match(found):
        note(line)
    return timed


def compare_with_progress(graph: Graph, *, samples: int, seed: int, exact_s: float | None = None) -> Comparison:
    """Return the comparison of orders, with a progress bar on a terminal."""
    from ddltool.analyzers.communication.efficiency import compare
    from ddltool.commands.output import progress

    with progress("simulating", 4 * samples) as advance:
        return compare(
            graph,
            samples=samples,
            seed=seed,
            exact_s=exact_s,
            progress=lambda done, total: advance(done, "" if done < total else "(searching a better order)"),
        )
