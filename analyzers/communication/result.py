"""What ``ddltool trace`` and ``ddltool.trace`` find, as one record. Start at :func:`trace`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ddltool.analyzers.communication.collectives import compressed_ddp, parse_compression, plan_collectives
from ddltool.analyzers.communication.efficiency import Comparison, compare, verdict
from ddltool.analyzers.communication.program import own_fabric, program_of
from ddltool.analyzers.communication.timeline import to_chrome_trace
from ddltool.analyzers.costs.model import coverage
from ddltool.analyzers.loading.fabrics import fabric_of, own_link
from ddltool.analyzers.loading.sources import Source, is_graph_file, name_of
from ddltool.analyzers.loading.timed_graph import BANDWIDTH, DEVICE, LATENCY, known_devices, timed_graph
from ddltool.artifacts import check_outputs, parse_record, to_json, write_text
from ddltool.errors import InputError
from ddltool.graph import RECV, SEND, Graph, Mode, write_graph
from ddltool.graph_results import BucketFigures, CollectiveFigures, TraceBounds, TracedGraph, TraceResult
from ddltool.stages import Stage, Tell, log_remark, quietly


def trace(
    source: Source,
    *,
    mode: Mode | None = None,
    batch_size: int | None = None,
    bindings: Mapping[str, int] | None = None,
    device: str = DEVICE,
    precision: str = "fp32",
    channels_last: bool = False,
    sequence_length: int | None = None,
    devices_file: Path | None = None,
    bandwidth: str | None = None,
    latency: str | None = None,
    parameter_servers: int = 1,
    oracle: str | None = None,
    exact: bool = False,
    time_limit_s: float = 20.0,
    replicas: int = 8,
    gpus_per_node: int | None = None,
    link: str | None = None,
    nic: str | None = None,
    nccl_tests: Sequence[Path] = (),
    compress: str | None = None,
    samples: int = 100,
    seed: int = 0,
    output: str | Path | None = None,
    perfetto: str | Path | None = None,
    tell: Tell = log_remark,
    stage: Stage = quietly,
) -> TraceResult:
    """Trace one step, order its transfers, and say what that gains, for parameter servers, DDP and FSDP2.

    ``source``: a module, (module, example_inputs), a function that makes one, or a text as on the command line. ``output``: a
    place for the graph, ``perfetto`` for TAC's timeline; the rest as the options of ``ddltool trace`` (``bandwidth`` and
    ``latency`` None: 10 Gbit/s and 50 us). Raises InputError for what is unknown, does not run, or cannot be written.
    """
    compression = None if compress is None else parse_compression(compress)
    if output is not None and output == perfetto:
        raise InputError("--perfetto", f"is {perfetto}, as -o", "give two different files")
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
    own = is_graph_file(source) and oracle is None and graph.meta.get("bandwidth_bytes_per_s") is not None
    if own:
        fabric = own_fabric(graph)
    else:
        known = known_devices(devices_file).device(device)
        several = bandwidth is None and (link is not None or own_link(known).kind.startswith("nvlink"))
        fabric = fabric_of(
            known,
            gpus_per_node=gpus_per_node or (8 if several else 1),
            link=link,
            nic=nic,
            bandwidth=bandwidth if nic is not None else bandwidth or BANDWIDTH,
            latency=latency if nic is not None else latency or LATENCY,
            nccl_tests=nccl_tests,
        )
    group = fabric.over(replicas) if fabric is not None else None
    plans = plan_collectives(graph, group) if group is not None else None
    if compression is not None and plans is not None and group is not None:
        name = device if not own else str(graph.meta.get("device"))
        rate = known_devices(devices_file).device(name).memory_bytes_per_s
        figures = compressed_ddp(graph, program_of(graph), group, compression, rate, plans.ddp.default.step_s)
        plans = plans.model_copy(update={"compressed": figures})
    if output is not None:
        write_graph(graph, output)
    if perfetto is not None:
        made = to_chrome_trace(graph, comparison.timelines["tac"], comparison.schedules["tac"].priority)
        write_text(perfetto, to_json(made, indent=None))
    return trace_result(graph, comparison, plans)


def trace_result(graph: Graph, comparison: Comparison, plans: CollectiveFigures | None = None) -> TraceResult:
    """Return a trace as the command's result: graph, bounds, schedules, what is winnable, collectives, coverage, verdict."""
    bounds, best_s = comparison.bounds, comparison.best_bound_s
    return TraceResult(
        graph=_traced_graph(graph),
        bounds=TraceBounds(upper_s=bounds.upper_s, lower_s=bounds.lower_s, speedup=bounds.speedup, best_lower_s=best_s),
        schedules=comparison.schedules,
        efficiency_undefined=comparison.undefined_reason,
        coverage=coverage(graph),
        servers=_servers_of(graph),
        collectives=None if plans is None else _with_names_of_the_best(plans),
        verdict=verdict(comparison),
        predicted=True,
    )


# What a graph says of its times: where they are for, how they were made, and how sure they are.
_SAID = (
    *("device", "oracle", "precision", "channels_last", "optimizer", "update_s", "error_low", "error_high"),
    *("bandwidth_bytes_per_s", "latency_s"),
)


def _traced_graph(graph: Graph) -> TracedGraph:
    """Return a graph's figures."""
    recvs, sends = len(graph.of_kind(RECV)), len(graph.of_kind(SEND))
    counts = {"parameters": recvs, "parameter_bytes": int(graph.parameter_bytes)}
    counts |= {"ops": len(graph), "recvs": recvs, "sends": sends}
    said = {key: graph.meta.get(key) for key in ("parameter_elements", *_SAID)}
    channels = sum(name.startswith("channel:") for name in graph.resource_names)
    whole = {"name": graph.name, "mode": graph.mode, "batch_size": graph.batch_size, **counts, **said}
    return parse_record({**whole, "flops": float(graph.flops.sum()), "channels": channels}, TracedGraph, graph.name)


def _servers_of(graph: Graph) -> dict[str, list[str]]:
    """Return which parameters each channel (parameter server) holds, in file order."""
    held: dict[str, list[str]] = {name: [] for name in graph.resource_names if name.startswith("channel:")}
    for op in graph.of_kind(RECV):
        held[graph.resource_names[graph.resource[op]]].append(graph.parameter[op] or graph.names[op])
    return held


def _with_names_of_the_best(plans: CollectiveFigures) -> CollectiveFigures:
    """Return the plans without the parameters of the buckets that nobody would set."""
    sides = {"default": plans.ddp.default, "best_cap": plans.ddp.best_cap}
    others = {name: BucketFigures(**one.model_dump(exclude={"bucket_parameters"})) for name, one in sides.items()}
    return plans.model_copy(update={"ddp": plans.ddp.model_copy(update=others)})
