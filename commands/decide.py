"""``ddltool plan --strategy auto``: everything known about a job, the comparison, and the table for people."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddltool.analyzers.deciding.candidates import Knowledge, Settings
    from ddltool.analyzers.deciding.communication import Communication
    from ddltool.analyzers.deciding.feedback import Run
    from ddltool.analyzers.goodput.throughput import ThroughputParams
    from ddltool.decision import Decision, Objective, Option
    from ddltool.device import DeviceTable
    from ddltool.goodput_model import Goodput
    from ddltool.graph import Graph
    from ddltool.job import Job
    from ddltool.plan import Plan

OBJECTIVES = ("fastest", "cheapest", "same-bits")
_COLUMNS = ("strategy", "on", "step", "±", "exposed", "per s", "goodput", "stale", "bits", "price/1e6")


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the command line adds to job.yaml."""

    objective: Objective
    graph: Graph | None
    telemetry: Path | None
    bandwidth: str | None
    latency: str
    settings: Settings


def auto_plan(job: Job, job_file: Path, given: Given) -> Plan:
    """Return the picked plan with the comparison in ``decision``. Raises InputError, Infeasible."""
    from ddltool.analyzers.deciding.communication import GraphCommunication
    from ddltool.analyzers.deciding.compare import decide
    from ddltool.analyzers.deciding.compute import with_compute
    from ddltool.analyzers.deciding.feedback import combine
    from ddltool.analyzers.deciding.rescaling import measured_speeds, with_run
    from ddltool.analyzers.placement.problem import from_job
    from ddltool.commands.output import note
    from ddltool.commands.plan_input import capabilities_of, ordered_parameters

    run = _run(given.telemetry)
    known = _knowledge(job, job_file, given, run)
    speeds = None if run is None else measured_speeds(run, job.batch_size, known.curves)
    measured = {} if speeds is None else speeds.capabilities
    offered = {offer.type for offer in job.devices}
    unknown = sorted(set(measured) - offered)
    if unknown:
        from ddltool.errors import InputError

        problem = f"is of device {unknown[0]!r}, which the job does not offer"
        raise InputError(str(given.telemetry), problem, f"types there: {', '.join(sorted(offered))}")
    rest = job.model_copy(update={"devices": [offer for offer in job.devices if offer.type not in measured]})
    told = job if job.model or all(it.capability_per_s or it.profile or it.goodput for it in job.devices) else rest
    predicted = capabilities_of(told, job_file.parent, str(job_file)) if rest.devices else {}
    combined = combine(measured, predicted)
    capabilities = combined.capabilities
    factors = {name: predicted[name] / capabilities[name] for name in combined.errors}
    knowledge = replace(known, errors={**known.errors, **combined.errors}, remark=combined.remark)
    if run is not None and speeds is not None:
        knowledge = with_run(knowledge, run, {**factors, **speeds.factors})
    made = decide(
        job,
        from_job(job, capabilities),
        knowledge,
        objective=given.objective,
        settings=given.settings,
    )
    if given.graph is None and isinstance(knowledge.communication, GraphCommunication):
        made = made.model_copy(update={"parameters": ordered_parameters(knowledge.communication.graph)})
    if given.settings.top_k > 1 and made.strategy != "est":
        note(f"note: --top-k lists EST plans; the plan picked is {made.strategy}")
    return with_compute(made, capabilities)


def _run(path: Path | None) -> Run | None:
    """Return the earlier run that telemetry tells of, None without any."""
    from ddltool.analyzers.deciding.feedback import read_run
    from ddltool.profile import read_table

    return None if path is None else read_run(read_table(path), str(path))


def _knowledge(job: Job, job_file: Path, given: Given, run: Run | None) -> Knowledge:
    """Return what is known beside capabilities: curves, fitted models, communication, errors, and fitness for D2."""
    from ddltool.analyzers.deciding.candidates import Knowledge
    from ddltool.analyzers.goodput.throughput import ThroughputParams
    from ddltool.analyzers.placement.determinism import d2_eligible
    from ddltool.commands.plan_input import step_curves

    fitted = _fitted(job, job_file.parent)
    models = {name: ThroughputParams(**model.params_of(name).model_dump()) for name, model in fitted.items()}
    errors, source = _errors(job, job_file.parent, fitted, run)
    return Knowledge(
        curves=step_curves(job, job_file),
        models=models,
        communication=_communication(job, job_file.parent, given, models, run),
        other_s=0.0 if run is None else run.other_s,
        errors=errors,
        error_source=source,
        d2_eligible=None if given.graph is None else d2_eligible(given.graph)[0],
    )


def _fitted(job: Job, folder: Path) -> dict[str, Goodput]:
    """Return the goodput.json of each device type that names one."""
    from ddltool.artifacts import load
    from ddltool.goodput_model import Goodput

    return {offer.type: load(folder / offer.goodput, Goodput) for offer in job.devices if offer.goodput is not None}


def _errors(job: Job, folder: Path, fitted: Mapping[str, Goodput], run: Run | None) -> tuple[dict[str, float], str]:
    """Return the relative error of each type's compute times where one is known, and where it comes from."""
    from ddltool.fixtures.loading import devices_of
    from ddltool.profile import read_profile

    found: dict[str, float] = {}
    sources: list[str] = []
    table = devices_of(job, str(folder / "job.yaml"))
    for offer in job.devices:
        known: list[tuple[float, str]] = []
        if run is not None and offer.type in run.errors():
            known.append((run.errors()[offer.type], "spread of the earlier run's steps"))
        elif offer.capability_per_s is None and offer.profile is not None:
            frame = read_profile(folder / offer.profile)
            if "step_time_spread_s" in frame.columns and frame["step_time_spread_s"].notna().any():
                spread = float((frame["step_time_spread_s"] / frame["step_time_s"]).median() / 2)
                known.append((spread, "spread of the profile"))
        elif offer.capability_per_s is None and offer.type not in fitted:
            known.append((_model_error(offer.type, table), "cost model, in cross-validation"))
        if offer.type in fitted:  # its times, or at least how they grow with the batch, are the fit's
            mape = fitted[offer.type].devices.get(offer.type, fitted[offer.type]).mape
            known.append((mape, "error of the fit"))
        if known:
            found[offer.type], source = max(known)
            sources.append(source)
    return found, ", ".join(dict.fromkeys(sources))


def _model_error(name: str, table: DeviceTable) -> float:
    """Return half the width of the cost model's 80 % interval on a device type, as a share of the prediction."""
    from ddltool.analyzers.costs.model import cost_model
    from ddltool.fixtures.loading import calibration

    return cost_model(table.device(name, "devices.type"), calibration()).relative_error


def _communication(
    job: Job, folder: Path, given: Given, models: Mapping[str, ThroughputParams], run: Run | None
) -> Communication | None:
    """Return the best source there is: an earlier run, a graph on a known network, or a fit that saw several replicas."""
    from ddltool.analyzers.deciding.communication import FittedCommunication, MeasuredCommunication

    if run is not None and run.world_size > 1:
        return MeasuredCommunication(sync_s=run.sync_s, replicas=run.world_size)
    from_graph = _from_graph(job, folder, given)
    if from_graph is not None:
        return from_graph
    synchronised = {
        name: model for name, model in models.items() if model.alpha_sync_local_s + model.alpha_sync_node_s > 0
    }
    if synchronised:
        return FittedCommunication(synchronised, 8 if job.goodput is None else job.goodput.devices_per_node)
    return None


def _from_graph(job: Job, folder: Path, given: Given) -> Communication | None:
    """Return communication simulated on the model's graph; None without a graph, or without a rate for its network.

    The rate is --bandwidth, else that of the cluster's slowest network card, else the one that the graph was timed for. Raises
    InputError for a graph that is no timed training step.
    """
    from ddltool.analyzers.deciding.communication import GraphCommunication
    from ddltool.artifacts import load
    from ddltool.commands.output import note
    from ddltool.errors import InputError
    from ddltool.fixtures.loading import devices_of
    from ddltool.graph import SEND
    from ddltool.job import Cluster
    from ddltool.units import parse_bandwidth, parse_duration

    rate, per_node, delay = None, 1, parse_duration(given.latency)
    offered = {offer.type for offer in job.devices if offer.count}
    if job.cluster is not None:
        groups = [group for group in load(folder / job.cluster, Cluster).nodes if group.devices.type in offered]
        cards = [group.nic_gbit for group in groups]
        per_node = max((group.devices.count for group in groups), default=1)
        if cards and None not in cards:
            rate = min(card for card in cards if card is not None) * 1e9 / 8
    if given.bandwidth is not None:
        rate = parse_bandwidth(given.bandwidth)
    graph = given.graph
    if graph is None and job.model is not None and rate is not None:
        graph = _traced(job)
    if graph is None:
        return None
    if rate is None:
        known, own = graph.meta.get("bandwidth_bytes_per_s"), graph.meta.get("latency_s")
        if not isinstance(known, (int, float)):
            note("note: communication is left out: name a cluster with nic_gbit, or give --bandwidth")
            return None
        rate, delay = float(known), float(own) if isinstance(own, (int, float)) else delay
    if graph.mode != "training" or not graph.timed or not len(graph.of_kind(SEND)):
        raise InputError(
            "--graph", f"{graph.name} is no timed training step", "make one with ddltool trace SOURCE -o FILE"
        )
    table = devices_of(job, str(folder / "job.yaml"))
    memory = {device.type: device.memory_gib for device in job.devices}
    for name, given_gib in memory.items():
        if given_gib is None and (known_device := table.find(name)) is not None:
            memory[name] = known_device.memory_gib
    return GraphCommunication(graph, rate, delay, memory, per_node)


def _traced(job: Job) -> Graph:
    """Return the job's model as a graph; times only matter relative to each other, so any known device will do."""
    from ddltool.analyzers.loading.timed_graph import timed_graph
    from ddltool.fixtures.loading import devices

    name = next((offer.type for offer in job.devices if devices().find(offer.type)), "V100")
    return timed_graph(
        str(job.model),
        batch_size=job.batch_size,
        device=name,
        precision=job.precision,
        channels_last=job.channels_last,
        sequence_length=job.sequence_length,
    )


def show_decision(decision: Decision) -> None:
    """Print the comparison and the three sentences."""
    from ddltool.commands.output import out, table
    from ddltool.units import show_seconds

    console = out()
    rows = [_row("nothing", decision.baseline)]
    rows += [
        _row(("> " if option.strategy == decision.picked else "") + option.strategy, option)
        for option in decision.options
    ]
    everything = [decision.baseline, *decision.options]
    progress = any(option.goodput_per_s is not None for option in everything)
    shown = {
        "±": any(option.high_s is not None for option in everything),
        "exposed": any(option.communication_s is not None for option in everything),
        "per s": not progress,
        "goodput": progress,
        "stale": any(option.staleness for option in everything),
        "price/1e6": any(option.price_per_sample is not None for option in everything),
    }
    kept = [place for place, name in enumerate(_COLUMNS) if shown.get(name, True)]
    console.print(
        table(
            f"Strategies compared, objective {decision.objective} (predicted)",
            [_COLUMNS[place] for place in kept],
            [tuple(row[place] for place in kept) for row in rows],
        )
    )
    if decision.baseline.other_s:
        console.print(
            f"every step has {show_seconds(decision.baseline.other_s)} besides, as the earlier run measured: optimizer, "
            "loader, waiting"
        )
    for name, why in decision.left_out.items():
        console.print(f"not compared: {name}: {why}")
    for line in decision.words:
        console.print(line)
    if decision.communication_source:
        console.print(f"communication from {decision.communication_source}")


def _row(name: str, option: Option) -> tuple[str, ...]:
    """Return an option's cells, one for each of _COLUMNS."""
    from ddltool.units import show_seconds

    half = None if option.high_s is None else (option.high_s - option.iteration_s) / option.iteration_s
    return (
        name,
        str(sum(option.devices.values())),
        show_seconds(option.iteration_s),
        "-" if half is None else f"{half:.0%}",
        show_seconds(option.communication_s),
        f"{option.throughput:.4g}",
        _rate(option.goodput_per_s),
        str(option.staleness),
        option.determinism if option.determinism != "none" else "-",
        "-" if option.price_per_sample is None else f"{option.price_per_sample * 1e6:.3g}",
    )


def _rate(per_s: float | None) -> str:
    """Return a rate for the table: whole from a hundred on, else in three digits; a dash for none."""
    if per_s is None:
        return "-"
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"
