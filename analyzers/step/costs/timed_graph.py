"""A graph with a time for every op, from one of four sources: the file, the cost model, this machine, a profiler trace."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from ddltool.analyzers.step.communication.fabrics import BANDWIDTH, LATENCY
from ddltool.analyzers.step.costs.model import cost_model, demand_float8, estimate
from ddltool.analyzers.step.recording.command import assumed, is_command, record
from ddltool.analyzers.step.tracing.sources import Source, is_graph_file, is_onnx_file, load_graph, resolve_step
from ddltool.device import Network
from ddltool.errors import InputError
from ddltool.graph import Graph, Mode
from ddltool.shipped import calibration, known_devices
from ddltool.units import parse_bandwidth, parse_latency

DEVICE = "V100"
"""The device type whose times are predicted by default."""


def timed_graph(
    source: Source | list[str],
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
    tell: Callable[[str], None] = lambda line: None,
    progress: Callable[[int, str], None] = lambda done, remark: None,
) -> Graph:
    """Return the graph of SOURCE with a duration in seconds for every op.

    Args:
        source: what the user names (a model, a graph or ONNX file), or the command that runs a training script, as a list.
        mode: "training" or "inference"; None: as the source says.
        batch_size: samples of one pass; None: as the source says.
        bindings: sizes of the symbolic dimensions of an ONNX file, by their names; None: as the source says.
        device: the name of the device type whose times are predicted.
        bandwidth: of the network of the transfers, as text such as "10Gbit/s".
        latency: of a transfer, as text such as "50us".
        parameter_servers: over how many servers the transfers are spread.
        oracle: where times come from: "roofline" (the cost model), "measured" (this machine), or the path of a profiler trace;
            None: a graph file's own times if it has them, else the cost model.
        devices_file: a file of device types beside the known ones; None: there is none.
        precision, channels_last: the numerics in which a model is traced (:class:`Numerics`).
        sequence_length: tokens of a sample; None: as the source says.
        tell: is called with each remark for the user: on the source, and on ops that a profiler trace lacks.
        progress: is called with the number of calls measured so far and a text.

    Raises InputError for another oracle, for an unknown device, and for a SOURCE that cannot be read.
    """
    from ddltool.analyzers.step.tracing.numerics import Numerics

    if oracle not in (None, "roofline", "measured") and not Path(oracle).is_file():
        problem = f"unknown oracle {oracle!r}, and no such file"
        raise InputError("--oracle", problem, "roofline, measured, or the path of a profiler trace")
    network = Network(
        bandwidth_bytes_per_s=parse_bandwidth(bandwidth),
        latency_s=parse_latency(latency),
        parameter_servers=parameter_servers,
    )
    model = cost_model(known_devices(devices_file).device(device), calibration())
    if not is_command(source) and not is_graph_file(source):  # these two have a precision of their own
        demand_float8(model.device, precision)
    numerics = Numerics(precision, channels_last)  # type: ignore[arg-type]  # Numerics checks it
    if oracle == "measured":
        return _time_on_this_machine(cast("Source", source), mode, batch_size, sequence_length, network, progress)
    if is_command(source):
        graph = record(source, known_devices(devices_file).device(device))
        if line := assumed(graph):
            tell(line)
    else:
        graph = load_graph(
            cast("Source", source), mode, batch_size, bindings, numerics=numerics, sequence_length=sequence_length
        )
    if graph.meta.get("note"):
        tell(f"note: {graph.meta['note']}")
    if is_graph_file(source) and graph.timed and oracle is None:
        return graph  # with the file's own times
    estimated = estimate(graph, model, network)
    if oracle in (None, "roofline"):
        return estimated
    return _time_from_profiler(graph, estimated, Path(oracle), tell)


def with_op_times(graph: Graph) -> tuple[Graph, str]:
    """Return (graph with a time for every op, sentence that says where the times are from).

    They are the graph's own times if it has any, or else predictions for a V100 and the default network. The sentence is "" for
    own times of unknown origin.
    """
    if not graph.timed:
        predicted = estimate(graph, cost_model(known_devices(None).device(DEVICE), calibration()), Network())
        return predicted, f"The file has no times: these are a {DEVICE}'s behind 10 Gbit/s, predicted."
    if graph.meta.get("oracle"):
        return graph, f"Times: {graph.meta['oracle']}, {graph.meta.get('device') or 'device not named'}."
    return graph, ""


def _time_on_this_machine(
    source: Source,
    mode: Mode | None,
    batch_size: int | None,
    sequence_length: int | None,
    network: Network,
    progress: Callable[[int, str], None],
) -> Graph:
    """Return the graph of a torch SOURCE with ops timed on this machine's CPU.

    The arguments are those of :func:`timed_graph`, with the options of the network parsed; ``mode`` None: training. Raises
    InputError for a graph or ONNX file, whose ops torch cannot run.
    """
    from ddltool.analyzers.step.measured.measured import estimate_measured

    if is_graph_file(source) or is_onnx_file(source):
        raise InputError("--oracle", f"{source} has no ops that can be run", "measured needs a torch SOURCE")
    with contextlib.redirect_stdout(sys.stderr):  # what the user's model prints must not mix with the result
        return estimate_measured(
            lambda: resolve_step(source, sequence_length),
            mode=mode or "training",
            batch_size=batch_size,
            network=network,
            progress=lambda done, total: progress(done, f"{done} of {total}"),
        )


def _time_from_profiler(graph: Graph, estimated: Graph, path: Path, tell: Callable[[str], None]) -> Graph:
    """Return ``graph`` with the times of the profiler trace at ``path``.

    ``estimated``: the same graph with predicted times. Transfers keep these; ops that the trace lacks get them scaled to the
    measured ones. ``tell`` is called with each remark on how the trace's ops matched the graph's.
    """
    from ddltool.analyzers.step.measured.kineto import read_trace
    from ddltool.analyzers.step.measured.matching import apply, match

    matching = match(graph, read_trace(path))
    for line in matching.lines():
        tell(line)
    return apply(graph, matching, estimated)
