"""What a job names beside its own numbers: graphs, profiles and fitted models, read and turned into what plans need."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddltool.analyzers.balancing.plan import StepCurve
    from ddltool.analyzers.goodput.throughput import ThroughputParams
    from ddltool.analyzers.tracing.dialect import Numerics
    from ddltool.graph import Graph
    from ddltool.job import Job
    from ddltool.plan import ParameterRecord, Plan


def step_curves(job: Job, job_file: Path) -> dict[str, StepCurve]:
    """Return time over batch size for the device types that have a fitted model, saturation or a limit of samples.

    Raises InputError for a total batch beyond what can be split.
    """
    from ddltool.analyzers.balancing.plan import StepCurve, checked_total, memory_limit

    checked_total(job.max_workers, job.batch_size, f"{job_file}:batch_size")
    models = fitted_models(job, job_file)
    found = {}
    for offer in job.devices:
        limit, model = memory_limit(job, offer), models.get(offer.type)
        if model is None and limit is None and offer.saturation_batch is None:
            continue
        found[offer.type] = StepCurve(
            launch_s=0.0 if model is None else model.alpha_grad_s,
            per_sample_s=None if model is None else model.beta_grad_s,
            memory_limit=limit,
            saturation=offer.saturation_batch or 0,
            sync=model,
            devices_per_node=8 if job.goodput is None else job.goodput.devices_per_node,
        )
    return found


def fitted_models(job: Job, job_file: Path) -> dict[str, ThroughputParams]:
    """Return the fitted throughput models of the job's device types.

    Raises InputError, which names the model's file, for one without the type and for one whose passes take no time or
    more than a number holds: no plan can be made of either.
    """
    from ddltool.analyzers.goodput.throughput import ThroughputParams
    from ddltool.artifacts import load
    from ddltool.errors import InputError, naming
    from ddltool.goodput_model import Goodput

    found = {}
    for offer in job.devices:
        if offer.goodput is None:
            continue
        path = job_file.parent / offer.goodput
        fitted = load(path, Goodput)
        with naming(path, ["devices"]):
            params = fitted.params_of(offer.type)
        where = f"{path}:devices.{offer.type}.params" if fitted.devices else f"{path}:params"
        pass_s = params.alpha_grad_s + params.beta_grad_s * job.batch_size
        if pass_s == 0:
            raise InputError(where, "say that a pass takes no time", "alpha_grad_s or beta_grad_s must be above 0")
        if not (math.isfinite(pass_s) and math.isfinite(1.0 / pass_s)):
            problem = f"say that a pass over {job.batch_size} samples takes {pass_s:.3g} s"
            raise InputError(where, problem, "alpha_grad_s and beta_grad_s must give a time between 1e-300 and 1e300 s")
        found[offer.type] = ThroughputParams(**params.model_dump())
    return found


def scanned(job: Job, graph: Graph | None) -> Job:
    """Return the job with what its model's ops say about D2, where it asks for D2 and does not say itself."""
    from ddltool.analyzers.loading.sources import is_graph_file
    from ddltool.analyzers.placement.determinism import d2_eligible
    from ddltool.commands.determinism import scan_source
    from ddltool.commands.output import note

    limits = job.constraints
    if limits.determinism != "D2" or limits.hardware_agnostic is not None:
        return job
    if graph is None and job.model is None:
        note(
            "D2: nothing says which kernels the model uses, so the plan keeps to one device type; name a model: or --graph, "
            "or set hardware_agnostic: true"
        )
        return job.model_copy(update={"constraints": limits.model_copy(update={"hardware_agnostic": False})})
    if job.model is not None and not is_graph_file(job.model):
        _, found = scan_source(job.model, batch_size=job.batch_size)
        eligible, reasons = found.d2_eligible, found.reasons
    else:
        assert graph is not None  # a job's own graph file has been read
        eligible, reasons = d2_eligible(graph)
    if not eligible:
        note(f"D2: the plan keeps to one device type: {reasons[0]}")
    return job.model_copy(update={"constraints": limits.model_copy(update={"hardware_agnostic": eligible})})


def capabilities_of(job: Job, folder: Path, where: str) -> dict[str, float]:
    """Return the capability of each device type: as written, from its fit or its profile, or from the cost model.

    Paths in the job are relative to ``folder``; predicted capabilities are told on stderr.
    """
    from ddltool.analyzers.placement.problem import capability_from_profile
    from ddltool.commands.output import note
    from ddltool.errors import InputError
    from ddltool.profile import read_profile

    found: dict[str, float] = {}
    missing: list[str] = []
    models: dict[str, ThroughputParams] = {}  # read when a device first needs its own
    for offer in job.devices:
        if offer.capability_per_s is not None:
            found[offer.type] = offer.capability_per_s
        elif offer.goodput is not None:
            # Before the profile: what several strategies are compared by must come from one source.
            models = models or fitted_models(job, folder / "job.yaml")
            model = models[offer.type]
            found[offer.type] = 1.0 / (model.alpha_grad_s + model.beta_grad_s * job.batch_size)
        elif offer.profile is not None:
            path = folder / offer.profile
            found[offer.type] = capability_from_profile(read_profile(path), offer.type, job.batch_size, str(path))
        else:
            missing.append(offer.type)
    if missing and job.model is None:
        problem = (
            f"{missing[0]} has neither capability_per_s nor profile, and the job names no model to estimate it from"
        )
        raise InputError(f"{where}:devices", problem, "give one of the three")
    if not missing:
        return found
    predicted = _roofline_capabilities(job, folder, missing, where)
    shown = ", ".join(f"{name} {value:.3g}/s" for name, value in predicted.items())
    note(f"predicted capabilities ({job.model}, {job.precision}, {job.optimizer}): {shown}")
    return {**found, **predicted}


def _roofline_capabilities(job: Job, folder: Path, types: list[str], where: str) -> dict[str, float]:
    """Return capabilities predicted from the traced model and the known devices, with those that the job describes."""
    from ddltool.analyzers.costs.estimate import estimate
    from ddltool.analyzers.costs.model import cost_model
    from ddltool.analyzers.loading.sources import is_graph_file, load_graph
    from ddltool.analyzers.placement.problem import capability_from_graph
    from ddltool.device import Network
    from ddltool.fixtures.loading import calibration, devices_of

    source = str(folder / job.model) if job.model and is_graph_file(job.model) else str(job.model)
    graph = load_graph(
        source,
        None,
        None if is_graph_file(source) else job.batch_size,
        numerics=numerics_of(job),
        sequence_length=job.sequence_length,
    )
    table = devices_of(job, where)
    return {
        name: capability_from_graph(
            estimate(
                graph,
                cost_model(table.device(name, "devices.type"), calibration()),
                Network(),
                optimizer=job.optimizer,
            )
        )
        for name in types
    }


def numerics_of(job: Job) -> Numerics:
    """Return the precision and layout that the job's predicted times are for."""
    from ddltool.analyzers.tracing.dialect import Numerics

    return Numerics(job.precision, job.channels_last)


def graph_of(job: Job, folder: Path, graph_file: Path | None) -> Graph | None:
    """Return the graph whose parameters the plan lists: the one given, or the job's own when that is a file."""
    from ddltool.analyzers.loading.sources import is_graph_file
    from ddltool.graph_io import read_graph

    if graph_file is not None:
        return read_graph(graph_file)
    return read_graph(folder / job.model) if job.model is not None and is_graph_file(job.model) else None


def ordered_parameters(graph: Graph) -> list[ParameterRecord]:
    """Return the graph's parameters in the order in which they should travel: TAC's, or TIC's for an untimed graph."""
    from ddltool.analyzers.communication.order import tac, tic
    from ddltool.graph import RECV
    from ddltool.plan import ParameterRecord

    schedule = tac(graph) if graph.timed else tic(graph)
    place = {graph.names[position]: int(position) for position in graph.of_kind(RECV)}
    return [
        ParameterRecord(
            name=graph.parameter[place[name]] or name,
            size_bytes=int(graph.size_bytes[place[name]]),
            priority=schedule.priority[name],
        )
        for name in schedule.order
    ]


def data_parallel(graph: Graph, made: Plan) -> dict[str, Any]:
    """Return the DDP and FSDP2 settings for the plan's processes on the network that the graph was timed for."""
    from ddltool.analyzers.communication.collectives import plan_collectives, settings
    from ddltool.commands.collectives import own_ring

    ring = own_ring(graph, made.world_size)
    if ring is None or not graph.timed or made.world_size < 2:
        return {}
    plans = plan_collectives(graph, ring)
    if plans is None:
        return {}
    buckets, prefetch = settings(plans)
    return {"ddp": buckets, "fsdp2": prefetch}
