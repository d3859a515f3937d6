"""Reads the files that a job names (models, graphs, profiles, fits, telemetry) into the inputs of plans.

Start at :func:`knowledge_of`. In all functions ``tell`` is called with each remark for the user, and paths in the job are
relative to ``folder`` or to the folder of ``job_file``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ddltool.analyzers.job.goodput.throughput import StepTime, ThroughputParams
from ddltool.analyzers.job.placement.problem import capability_from_graph, capability_from_profile
from ddltool.analyzers.job.planning.exposed import (
    Communication,
    FittedCommunication,
    GraphCommunication,
    MeasuredCommunication,
)
from ddltool.analyzers.job.planning.job_model import JobModel
from ddltool.analyzers.job.planning.options import PlanOptions, Tell
from ddltool.analyzers.job.planning.split import checked_total, memory_limit
from ddltool.analyzers.step.communication.collectives import DEFAULT_CAP_MIB
from ddltool.analyzers.step.communication.fabrics import BANDWIDTH, between_nodes, own_link, tests_in
from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.costs.model import cost_model, estimate, lora_words, memory_words
from ddltool.analyzers.step.costs.numerics import least_that_fit, smaller_numerics
from ddltool.analyzers.step.costs.optimizers import state_share
from ddltool.analyzers.step.measured.feedback import Run, read_run
from ddltool.analyzers.step.tracing.determinism import scan
from ddltool.analyzers.step.tracing.sources import is_graph_file, is_onnx_file, load_graph, scan_source
from ddltool.artifacts import load
from ddltool.device import DEVICES_PER_NODE, Network, name_key
from ddltool.errors import InputError, naming
from ddltool.goodput_model import Goodput
from ddltool.graph import SEND, Graph, read_graph
from ddltool.job import Cluster, DeviceOffer, Job, NodeGroup, read_job
from ddltool.links import Link, parse_link
from ddltool.precision import precision_of
from ddltool.profiles import read_profile
from ddltool.shipped import calibration, devices, devices_of, with_specs
from ddltool.tables import read_table
from ddltool.units import counted, parse_bandwidth, parse_latency, show_rate

if TYPE_CHECKING:
    from ddltool.analyzers.job.planning.layouts import Layouts


def read_with_specs(job_or_file: Path | Job, devices_file: Path | None, *, allow_code: bool = False) -> Job:
    """Return a job, read from its file if it is given as one, that knows the device types specified in ``devices_file``.

    ``devices_file``: specifications of the user's own types; None: only shipped types are known. ``allow_code``: whether the
    file may name a model in Python code. The configuration file of a ``transformers:`` model is taken relative to the job's
    file.
    """
    if isinstance(job_or_file, Job):
        return with_specs(job_or_file, job_or_file.name, devices_file)
    file = job_or_file
    job = read_job(file, allow_code=allow_code)
    scheme, _, name = str(job.model).partition(":")
    if scheme == "transformers" and name.endswith(".json"):
        job = job.model_copy(update={"model": f"transformers:{file.parent / name}"})
    return with_specs(job, str(file), devices_file)


def written_in(job: Job, folder: Path) -> Job:
    """Return the job as a file in ``folder`` must say it: paths in it become relative to that folder.

    :func:`read_with_specs` and plans take paths in a job file relative to the file.
    """
    scheme, _, name = str(job.model).partition(":")
    if scheme == "transformers" and name.endswith(".json"):
        return job.model_copy(update={"model": f"transformers:{os.path.relpath(name, folder)}"})
    if job.model is not None and is_graph_file(job.model):
        return job.model_copy(update={"model": os.path.relpath(job.model, folder)})
    return job


def step_curves(job: Job, job_file: Path) -> dict[str, StepTime]:
    """Return device type -> step time over batch size, for types with a fitted model, a saturation batch or a memory limit.

    Raises InputError for a total batch above ``split.MOST_SAMPLES``.
    """
    checked_total(job.max_workers, job.batch_size, f"{job_file}:batch_size")
    models = fitted_models(job, job_file)
    curves = {}
    for offer in job.devices:
        memory_samples, model = memory_limit(job, offer), models.get(offer.type)
        if model is None and memory_samples is None and offer.saturation_batch is None:
            continue
        curves[offer.type] = StepTime(
            launch_s=0.0 if model is None else model.alpha_grad_s,
            per_sample_s=None if model is None else model.beta_grad_s,
            memory_limit=memory_samples,
            saturation=offer.saturation_batch or 0,
            sync=model,
            devices_per_node=DEVICES_PER_NODE if job.goodput is None else job.goodput.devices_per_node,
        )
    return curves


def fitted_models(job: Job, job_file: Path) -> dict[str, ThroughputParams]:
    """Return device type -> fitted throughput model, for the job's device types that name one.

    Raises InputError, which names the model's file, where the file lacks the type, or where the job's mini-batch would take 0 s
    or no finite time.
    """
    models = {}
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
        models[offer.type] = params
    return models


def scanned(job: Job, graph: Graph | None, tell: Tell) -> Job:
    """Return the job with ``hardware_agnostic`` set: whether its operators give the same bits on devices of any type.

    A scan of the model's operators tells. It is made only for a job that asks for determinism D2 without that field; any other
    is returned as it is. ``graph``: the job's graph, if it has been read; None: its model is traced. Without a model or a graph
    to scan the field becomes False, which keeps the plan to one device type.
    """
    limits = job.constraints
    if limits.determinism != "D2" or limits.hardware_agnostic is not None:
        return job
    if graph is None and job.model is None:
        tell(
            "D2: nothing says which kernels the model uses, so the plan keeps to one device type; name a model: or --graph, "
            "or set hardware_agnostic: true"
        )
        return job.model_copy(update={"constraints": limits.model_copy(update={"hardware_agnostic": False})})
    if job.model is not None and not is_graph_file(job.model):
        _, determinism = scan_source(job.model, batch_size=job.batch_size)
    else:
        assert graph is not None  # a job's own graph file has been read
        determinism = scan(graph)
    if not determinism.d2_eligible:
        tell(f"D2: the plan keeps to one device type: {determinism.reasons[0]}")
    return job.model_copy(
        update={"constraints": limits.model_copy(update={"hardware_agnostic": determinism.d2_eligible})}
    )


def capabilities_of(job: Job, folder: Path, where: str, tell: Tell) -> dict[str, float]:
    """Return device type -> capability in mini-batches per second: as written in the job, else fitted, profiled or predicted.

    ``where`` names the job in errors. Raises InputError for a type without any of these sources.
    """
    capabilities: dict[str, float] = {}
    unrated: list[str] = []
    models: dict[str, ThroughputParams] = {}  # by device type; all files are read when a device first needs its own
    for offer in job.devices:
        if offer.capability_per_s is not None:
            capabilities[offer.type] = offer.capability_per_s
        elif offer.goodput is not None:
            # A fit takes precedence over a profile, because strategies are compared by times from the same source.
            models = models or fitted_models(job, folder / "job.yaml")  # only the folder of that path is used
            model = models[offer.type]
            capabilities[offer.type] = 1.0 / (model.alpha_grad_s + model.beta_grad_s * job.batch_size)
        elif offer.profile is not None:
            path = folder / offer.profile
            capabilities[offer.type] = capability_from_profile(
                read_profile(path), offer.type, job.batch_size, str(path)
            )
        else:
            unrated.append(offer.type)
    if unrated and job.group is not None:
        problem = (
            f"{unrated[0]} has neither capability_per_s nor profile, and the step of {job.group.text} is not predicted"
        )
        raise InputError(f"{where}:devices", problem, "measure or give that of one group")
    if unrated and job.model is None:
        problem = (
            f"{unrated[0]} has neither capability_per_s nor profile, and the job names no model to estimate it from"
        )
        raise InputError(f"{where}:devices", problem, "give one of the three")
    if not unrated:
        return capabilities
    predicted = _predicted_capabilities(job, folder, unrated, where)
    batch = counted(job.batch_size, "sample")
    shown = ", ".join(f"{name} alone {show_rate(value)}/s of {batch}" for name, value in predicted.items())
    words = memory_words(job.precision, job.optimizer)
    if job.lora is not None:
        words = f"{lora_words(job.lora, job.load_in_4bit)}, all else frozen; {job.precision}, {job.optimizer}"
    meta = (
        _untimed_graph(job, folder).meta if traceable(job) else {}
    )  # that of the trace which was made for the figures
    if tokens := meta.get("tokens_per_sample"):
        words = f"{words}; {tokens:,} tokens a sample"
    tell(f"predicted capabilities ({job.model}; {words}): {shown}")
    if remark := meta.get("note"):
        tell(f"note: {remark}")
    return {**capabilities, **predicted}


def _predicted_capabilities(job: Job, folder: Path, types: list[str], where: str) -> dict[str, float]:
    """Return type -> mini-batches per second that the cost model predicts from the model's graph and the specifications.

    Raises InputError for a type without a specification, or one without a rate for the job's precision.
    """
    table = devices_of(job, where)
    if narrow := precision_of(job.precision).linears:  # checked first, because tracing takes long
        for name in types:
            table.device(name, "devices.type").demand_rate(narrow, job.precision)
    graph = _untimed_graph(job, folder)
    return {
        name: capability_from_graph(
            estimate(
                graph, cost_model(table.device(name, "devices.type"), calibration()), Network(), optimizer=job.optimizer
            )
        )
        for name in types
    }


def graph_of(job: Job, folder: Path, graph_file: Path | None) -> Graph | None:
    """Return the graph in ``graph_file``, else in the graph file that the job names as its model; None without either."""
    if graph_file is not None:
        return read_graph(graph_file)
    return read_graph(folder / job.model) if job.model is not None and is_graph_file(job.model) else None


def samples_of(job: Job, graph: Graph | None, tokens: float | None) -> float | None:
    """Return how many samples ``tokens`` tokens are; None for None.

    A sample's length is the job's ``sequence_length``, else that of its traced model or of ``graph``. Raises InputError where
    none of these knows it.
    """
    if tokens is None:
        return None
    tokens_per_sample: object = job.sequence_length
    if tokens_per_sample is None and traceable(job):
        from ddltool.analyzers.job.planning.layouts import job_work  # it loads torch

        tokens_per_sample = job_work(job).traced.graph.meta.get("tokens_per_sample")
    if tokens_per_sample is None and graph is not None:
        tokens_per_sample = graph.meta.get("tokens_per_sample")
    if not isinstance(tokens_per_sample, int):
        raise InputError("--tokens", "nothing says how many tokens a sample has", "give --samples or sequence_length")
    return tokens / tokens_per_sample


def powers(job: Job, where: str) -> dict[str, float]:
    """Return device type -> datasheet power in watts, for types whose specification has it."""
    table = devices_of(job, where)
    specs = {offer.type: table.find(offer.type) for offer in job.devices}
    return {name: device.power_w for name, device in specs.items() if device is not None and device.power_w}


def with_rates(job: Job, where: str, tell: Tell) -> Job:
    """Return a job of a model without the device types whose datasheets have no rate for its precision, and tell which.

    Types whose speed the job gives or measured stay. The job is returned as it is where no type would be left. ``where``: the
    file that errors name.
    """
    linears = precision_of(job.precision).linears
    if not linears or not traceable(job):
        return job
    table = devices_of(job, where)
    offered_types = [offer.type for offer in job.devices if offer.count]
    predicted = [offer.type for offer in job.devices if not (offer.capability_per_s or offer.profile or offer.goodput)]
    specs = {name: table.find(name) for name in offered_types if name in predicted}
    lacking = [name for name, device in specs.items() if device is not None and linears not in device.peak_flops]
    if not lacking or len(lacking) == len(offered_types):
        return job
    tell(f"note: {' and '.join(lacking)} left out: no rate for {job.precision} in the datasheet")
    return job.model_copy(update={"devices": [offer for offer in job.devices if offer.type not in lacking]})


def run_of(path: Path | None, tell: Tell) -> Run | None:
    """Return the earlier run that a telemetry file recorded; None for None."""
    return None if path is None else read_run(read_table(path), str(path), tell)


def knowledge_of(job: Job, job_file: Path, options: PlanOptions, run: Run | None) -> JobModel:
    """Return all that is known of the job's times and memory, from its files and from an earlier ``run`` (None: none).

    With a run, layouts are left out. The curves and models are not yet scaled to the run.
    """
    fit_files = {offer.type: job_file.parent / offer.goodput for offer in job.devices if offer.goodput is not None}
    fitted = {name: load(path, Goodput) for name, path in fit_files.items()}
    models = {name: fit.params_of(name) for name, fit in fitted.items()}
    errors, error_source = _errors(job, job_file.parent, fitted, run)
    fabrics = _fabrics_or_assumed(job, job_file.parent, options)
    return JobModel(
        curves=step_curves(job, job_file),
        models=models,
        communication=_communication(job, job_file.parent, options, models, run, fabrics),
        layouts=None if run is not None or fabrics is None else _layouts(job, job_file.parent, fabrics),
        overhead_s={} if run is None else run.overheads_s(),
        imbalance=0.0 if run is None else run.imbalance,
        drift=0.0 if run is None else run.drift,
        seen={} if run is None else run.devices,
        errors=errors,
        error_source=error_source,
        d2_eligible=None if options.graph is None else scan(options.graph).d2_eligible,
    )


def _errors(job: Job, folder: Path, fitted: Mapping[str, Goodput], run: Run | None) -> tuple[dict[str, float], str]:
    """Return (device type -> relative error of its compute times, where the errors come from in words).

    ``fitted``: device type -> fit, for types that have one; ``run``: an earlier run (None: none). Where a type's times come
    from several sources, the largest of their errors counts. Types whose error is not known, such as those with a capability
    in the job, are left out.
    """
    errors: dict[str, float] = {}
    sources: list[str] = []
    table = devices_of(job, str(folder / "job.yaml"))
    for offer in job.devices:
        candidates: list[tuple[float, str]] = []  # (relative error, source in words)
        if run is not None and offer.type in run.errors():
            candidates.append((run.errors()[offer.type], "spread of the earlier run's steps"))
        elif offer.capability_per_s is None and offer.profile is not None:
            frame = read_profile(folder / offer.profile)
            if "step_time_spread_s" in frame.columns and frame["step_time_spread_s"].notna().any():
                spread = float((frame["step_time_spread_s"] / frame["step_time_s"]).median() / 2)
                candidates.append((spread, "spread of the profile"))
        elif offer.capability_per_s is None and offer.type not in fitted:
            model = cost_model(table.device(offer.type, "devices.type"), calibration())
            candidates.append((model.relative_error, "cost model, in cross-validation"))
        if offer.type in fitted:  # also beside a measured run, because the fit says how times grow with the batch
            mape = fitted[offer.type].devices.get(offer.type, fitted[offer.type]).mape
            candidates.append((mape, "error of the fit"))
        if candidates:
            errors[offer.type], source = max(candidates)
            sources.append(source)
    return errors, ", ".join(dict.fromkeys(sources))


def _communication(
    job: Job,
    folder: Path,
    options: PlanOptions,
    models: Mapping[str, ThroughputParams],
    run: Run | None,
    fabrics: dict[str, Fabric] | None,
) -> Communication | None:
    """Return the most trusted source of exposed communication that the job has; None without any.

    In this order they are: an earlier run of several processes, a graph on a known network, a fit of several replicas.
    ``models``: fitted throughput models, ``fabrics``: networks, both by device type.
    """
    if run is not None and run.world_size > 1:
        size_bytes = None if options.graph is None else options.graph.parameter_bytes
        buckets = None if size_bytes is None else max(1, math.ceil(size_bytes / (DEFAULT_CAP_MIB * 2**20)))
        more: dict[str, Any] = {"nodes": run.num_nodes, "speeds": run.speeds(), "buckets": buckets}
        if run.servers:
            pass_s = fmean(rank.compute_s for rank in run.ranks)
            return MeasuredCommunication.of_servers(run.sync_s, pass_s, run.world_size, **more)
        return MeasuredCommunication(sync_s=run.sync_s, replicas=run.world_size, **more)
    from_graph = graph_communication(job, folder, options, fabrics)
    if from_graph is not None:
        return from_graph
    synchronised_models = {
        name: model for name, model in models.items() if model.alpha_sync_local_s + model.alpha_sync_node_s > 0
    }
    if synchronised_models:
        return FittedCommunication(
            synchronised_models, DEVICES_PER_NODE if job.goodput is None else job.goodput.devices_per_node
        )
    return None


def _fabrics_or_assumed(job: Job, folder: Path, options: PlanOptions) -> dict[str, Fabric] | None:
    """Return device type -> network, as :func:`fabrics_of`, but assume one where a traceable job names none.

    The user is told of the assumption where the job has several devices. None where a job that is not traceable names none.
    """
    fabrics = fabrics_of(job, folder, options)
    if fabrics is not None or not traceable(job):
        return fabrics
    if sum(offer.count for offer in job.devices) > 1:
        remedy = "nic: in the job or its cluster says otherwise"
        options.tell(f"note: no network is named, {BANDWIDTH}/s between nodes is assumed; {remedy}")
    return fabrics_of(job, folder, replace(options, bandwidth=BANDWIDTH))


def traceable(job: Job) -> bool:
    """Return whether a job's model can be traced at any batch size: it is code, and each worker is a single device."""
    return job.group is None and job.model is not None and not is_graph_file(job.model) and not is_onnx_file(job.model)


def _layouts(job: Job, folder: Path, fabrics: Mapping[str, Fabric]) -> Layouts | None:
    """Return the layouts of the job's model; None where it cannot be traced or an offered type has no specification."""
    table = devices_of(job, str(folder / "job.yaml"))
    if not traceable(job) or any(table.find(offer.type) is None for offer in job.devices if offer.count):
        return None
    from ddltool.analyzers.job.planning.layouts import layouts_of  # it loads torch

    return layouts_of(job, table, fabrics)


def options_that_fit(job: Job, job_file: Path, options: PlanOptions, holds: Callable[[Layouts], bool]) -> list[str]:
    """Return the options of ``ddltool plan``, each by itself, with which the job would fit into memory: ``["--lora 16"]``.

    Tried are an 8-bit optimizer, parameters in a half-precision type, both together where neither suffices, LoRA of rank 16,
    that beside weights of 4 bits, and half the samples' length, a quarter, ... (the longest that fits). ``holds``: returns
    whether one of some layouts fits. The user sees no remarks on these trials.
    """
    quiet = replace(options, tell=lambda _: None)
    fabrics = _fabrics_or_assumed(job, job_file.parent, quiet)
    if fabrics is None:
        return []

    def fits(**changed: Any) -> bool:
        """Return whether the job fits with these fields changed."""
        try:
            layouts = _layouts(job.model_copy(update=changed), job_file.parent, fabrics)
            return layouts is not None and holds(layouts)
        except InputError:  # this model takes no adapters, or no samples of that length
            return False

    table = devices_of(job, str(job_file))
    specs = [table.device(offer.type, "devices") for offer in job.devices if offer.count]
    changes = smaller_numerics(job.precision, job.optimizer, job.lora, specs, load_in_4bit=job.load_in_4bit)
    found = least_that_fit(changes, lambda change: fits(**change))
    from ddltool.analyzers.job.planning.layouts import job_work  # it loads torch

    length = job.sequence_length or job_work(job).traced.graph.meta.get("tokens_per_sample")
    # Where not even the shortest length fits, no longer one does.
    is_long = isinstance(length, int) and length >= 2 * _SHORTEST and fits(sequence_length=_SHORTEST)
    while is_long and isinstance(length, int) and length >= 2 * _SHORTEST:
        length //= 2
        if fits(sequence_length=length):
            found.append(f"--sequence-length {length}")
            break
    return found


def graph_communication(
    job: Job, folder: Path, options: PlanOptions, fabrics: dict[str, Fabric] | None
) -> GraphCommunication | None:
    """Return communication that is simulated on a training graph: the one in ``options``, else that of the job's model.

    ``fabrics``: device type -> network; None: links of the bandwidth that the graph was timed for (the model is not traced
    then). None without a graph, and where no bandwidth is known, which the user is told. Raises InputError for a graph that is
    not a timed training step.
    """
    graph = options.graph
    if graph is None and job.model is not None and fabrics is not None:
        graph = _timed_graph(job, folder)
    if graph is None:
        return None
    if fabrics is None:
        bandwidth = graph.meta.get("bandwidth_bytes_per_s")
        if not isinstance(bandwidth, (int, float)):
            options.tell("note: communication is left out: name a cluster with nic or nic_gbit, or give --bandwidth")
            return None
        graph_latency = graph.meta.get("latency_s")
        latency_s = float(graph_latency) if isinstance(graph_latency, (int, float)) else parse_latency(options.latency)
        fabrics = (
            fabrics_of(job, folder, options, Link(kind="plain", bytes_per_s=float(bandwidth), latency_s=latency_s))
            or {}
        )
    if graph.mode != "training" or not graph.timed or not len(graph.of_kind(SEND)):
        raise InputError(
            "--graph", f"{graph.name} is no timed training step", "make one with ddltool trace SOURCE -o FILE"
        )
    table = devices_of(job, str(folder / "job.yaml"))
    memory_gib = {device.type: device.memory_gib for device in job.devices}
    for name, given_gib in memory_gib.items():
        if given_gib is None and (known_device := table.find(name)) is not None:
            memory_gib[name] = known_device.memory_gib
    return GraphCommunication(graph, fabrics, memory_gib)


def slowest_memory(job: Job, where: str, names: Iterable[str]) -> float:
    """Return the lowest memory bandwidth of the types ``names`` in bytes per second.

    ``where`` names the job's file. Raises InputError for a type without a specification.
    """
    table = devices_of(job, where)
    return min(table.device(name, "--compress").memory_bytes_per_s for name in names)


def fabrics_of(job: Job, folder: Path, options: PlanOptions, timed_for: Link | None = None) -> dict[str, Fabric] | None:
    """Return device type -> network, for the offered types; None where some link between nodes is not known.

    The link between nodes is that of --bandwidth, else the slowest card of the cluster's nodes, the offer's nic, or
    ``timed_for``; for devices of one node it is PCIe. The link inside a node is the slowest that cluster or offer names, else
    the device's own. Devices per node are as the cluster or per_node says, else 8 (with a remark) for a type with NVLink under
    --bandwidth, else 1.
    """
    cluster = None if job.cluster is None else load(folder / job.cluster, Cluster)
    table = devices_of(job, str(folder / "job.yaml"))
    offers = [offer for offer in job.devices if offer.count]
    given_link = between_nodes(None, options.bandwidth, options.latency, ("", "--bandwidth", "--latency"))
    group_size = job.group.size if job.group else 1
    fabrics: dict[str, Fabric] = {}
    for offer in offers:
        nodes = [] if cluster is None else [group for group in cluster.nodes if group.devices.type == offer.type]
        spec = table.find(offer.type)
        default_link = own_link(spec) if spec is not None else parse_link("pcie3")
        link_texts = [text for text in (*(group.link for group in nodes), offer.link) if text is not None]
        inside = min((parse_link(text) for text in link_texts), key=lambda link: link.bytes_per_s, default=default_link)
        per_node = max((max(group.devices.count // group_size, 1) for group in nodes), default=offer.per_node or 1)
        if given_link is not None and not nodes and offer.per_node is None and inside.kind.startswith("nvlink"):
            per_node = max(DEVICES_PER_NODE // group_size, 1)
            assumption = f"{offer.type}: {per_node} a node on {inside.text} ({inside.bytes_per_s / 1e9:.4g} GB/s)"
            options.tell(f"note: {assumption} are assumed; a cluster, or per_node beside the count, says otherwise")
        between = given_link or _slowest_between(nodes, offer, options.latency) or timed_for
        if between is None and len(offers) == 1 and 1 < offer.count <= per_node:
            # All devices are in one node; parameter servers are reached over PCIe through the host.
            between = replace(parse_link("pcie3"), latency_s=parse_latency(options.latency))
        if between is None and not options.nccl_tests:
            return None
        between = between or between_nodes(None, BANDWIDTH, options.latency, ("", "", "--latency"))
        assert between is not None  # a rate was given
        measured = tuple(tests_in(path, per_node) for path in options.nccl_tests)
        fabrics[offer.type] = Fabric(inside=inside, between=between, gpus_per_node=per_node, measured=measured)
    return fabrics or None


def _slowest_between(groups: Sequence[NodeGroup], offer: DeviceOffer, latency: str) -> Link | None:
    """Return the slowest link between the nodes in ``groups``, or the offer's for no groups; None where any is not known.

    ``latency``: text such as ``50us``, for links that are given by their speed alone; a named card's datasheet has its own.
    """
    # (speed in Gbit/s or None, name of a card or None); a speed takes precedence
    given = [(group.nic_gbit, group.nic or offer.nic) for group in groups] or [(offer.nic_gbit, offer.nic)]
    option_names = ("nic", "nic_gbit", "--latency")  # for errors
    links: list[Link | None] = []
    for gbit, card in given:
        if gbit is None:
            link = between_nodes(card, None, None, option_names)
        else:
            link = between_nodes(None, f"{gbit}Gbit", latency, option_names)
        links.append(link)
    known_links = [link for link in links if link is not None]
    if len(known_links) < len(links):
        return None
    return min(known_links, key=lambda link: link.bytes_per_s)


def _timed_graph(job: Job, folder: Path) -> Graph:
    """Return the graph of the job's model, timed on its first shipped device type, else on a V100.

    The type does not matter, because compute is scaled to each type's speed later.
    """
    name = next((offer.type for offer in job.devices if devices().find(offer.type)), "V100")
    return estimate(_untimed_graph(job, folder), cost_model(devices().device(name), calibration()), Network())


def _untimed_graph(job: Job, folder: Path) -> Graph:
    """Return the untimed graph of a step of ``batch_size`` samples of the job's model.

    A graph file has its own batch. Raises InputError for a graph that was recorded from a script.
    """
    if not traceable(job):
        source = str(folder / str(job.model)) if is_graph_file(str(job.model)) else str(job.model)
        graph = load_graph(source, None, None if is_graph_file(source) else job.batch_size)
        if graph.recorded is not None:
            problem = "is a script's recorded step, at its own batch in its own world"
            raise InputError(source, problem, f"plan that step: ddltool plan {source} --devices 8xH100")
        return graph
    from ddltool.analyzers.job.planning.layouts import job_work  # it loads torch

    return job_work(job).traced.at(job.batch_size)


def trained_numbers(job: Job) -> tuple[int, bool]:
    """Return the number of trained parameters (those of the adapters with LoRA), and whether the model reads tokens."""
    graph = _untimed_graph(job, Path())
    size_bytes = float(graph.size_bytes[graph.of_kind(SEND)].sum())
    return round(size_bytes / precision_of(graph.meta.get("precision")).width), "tokens_per_sample" in graph.meta


def checkpoint_bytes(job: Job, folder: Path, graph: Graph | None) -> float | None:
    """Return the bytes of a checkpoint of all processes; None where there is neither a graph nor a model in the job.

    It holds the trained parameters in their precision and the optimizer's state, but no frozen parameters.
    """
    if graph is None and job.model is None:
        return None
    graph = graph or _untimed_graph(job, folder)
    return graph.trained_bytes * (1 + state_share(graph, job.optimizer))


# Where nothing fits, :func:`options_that_fit` tries samples of at least so many tokens.
_SHORTEST = 256
_OFFER = re.compile(r"((?P<times>[0-9]{1,7})x)?(?P<type>[^=,@]+?)(=(?P<count>[0-9]{1,7}))?(@(?P<price>[0-9.]{1,12}))?")


@dataclass(frozen=True, slots=True)
class Offered:
    """Devices of one type as ``--devices`` names them; None for a count or price that it leaves out."""

    type: str
    count: int | None
    price_per_hour: float | None


def offered(devices: str) -> list[Offered]:
    """Return the devices in a text such as ``8xH100,A100=4@2.5,L4``, with ``@`` before a price per hour.

    Raises InputError for a part that is not of this form.
    """
    offers = []
    spelled: dict[str, str] = {}  # in any case it is the type that was named first
    for part in devices.split(","):
        match = _OFFER.fullmatch(part.strip())
        if match is None or (match["times"] and match["count"]):
            problem = f"{part.strip()!r} is not TYPE=N"
            raise InputError(
                "--devices", problem, "for example A100=8,V100=4 or 8xA100,4xV100; A100=8@2.5 with a price"
            )
        count = match["count"] or match["times"]
        price = float(match["price"]) if match["price"] else None
        name = spelled.setdefault(name_key(match["type"]), match["type"].strip())
        offers.append(Offered(name, int(count) if count else None, price))
    return offers


def with_prices(job: Job, prices: str) -> Job:
    """Return the job with prices in dollars per hour from a text as of :func:`read_prices`; others stay."""
    by_type = read_prices(prices, [offer.type for offer in job.devices])
    offers = [
        offer.model_copy(update={"price_per_hour": by_type.get(offer.type, offer.price_per_hour)})
        for offer in job.devices
    ]
    return job.model_copy(update={"devices": offers})


def read_prices(prices: str, offered_types: Sequence[str]) -> dict[str, float]:
    """Return device type -> dollars per hour of one device from a text such as ``H100=2.5,A100=1.2``.

    Raises InputError for a part that is not of this form, for a type that is given twice, and for one that is not among the
    ``offered_types``, whose spelling the result has.
    """
    by_type: dict[str, float] = {}
    types = {name_key(name): name for name in offered_types}  # in any case and spelling -> as it was offered
    for part in prices.split(","):
        match = re.fullmatch(r"\s*([^=]+?)\s*=\s*\$?([0-9]{1,9}(?:\.[0-9]{1,6})?)\s*", part)
        if match is None:
            problem = f"{part.strip()!r} is no type with its dollars an hour, 0 or more"
            raise InputError("--price", problem, "write H100=2.5,A100=1.2")
        if name_key(match[1]) not in types:
            raise InputError(
                "--price", f"{match[1]} is not among the devices", f"there are {', '.join(types.values())}"
            )
        name = types[name_key(match[1])]
        if name in by_type:
            raise InputError("--price", f"gives {name} twice", "give it once")
        by_type[name] = float(match[2])
    return by_type


# Field of a job -> option that sets it, where that is not named like the field.
_FIELDS = {"batch_size": "--batch-size", "max_workers": "--batch-size", "devices": "--devices"}


def job_of(
    source: str,
    devices: str,
    *,
    nodes: int | None = None,
    batch_size: int | None = None,
    link: str | None = None,
    nic: str | None = None,
    bandwidth: str | None = None,
    devices_file: Path | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    sequence_length: int | None = None,
    compile: bool = False,
    channels_last: bool = False,
    lora: int | None = None,
    load_in_4bit: bool = False,
    offload: str | None = None,
    attention: str | None = None,
) -> Job:
    """Return the job of a model on devices that options describe. Raises InputError, which names the option.

    The total batch is divided into as many workers as there are devices, or the next smaller number that divides it. Options
    that are None take the job's default.

    Args:
        source: the model, as a job's ``model`` names it: ``zoo:NAME``, ``file.py:factory``, a graph file, ...
        devices: for example ``A100=8,V100=4``, or ``A100=8@2.5`` with a price per hour; every type needs its number.
        nodes: nodes in all, each with devices of one type, dealt in proportion to the devices; None: 8 devices on each.
        batch_size: samples of a step on all devices together; None: 8 per device.
        link: between the devices of a node; ``nic``: between nodes, by their cards' datasheet; ``bandwidth``: between nodes,
            as measured. Each is the text of the option of its name.
        devices_file: specifications of the user's own types, so that :func:`job_of` knows them; the job does not hold them.
        precision, optimizer, sequence_length, compile, channels_last, lora, load_in_4bit, offload, attention: the job's fields
            of these names.
    """
    if nic is not None and bandwidth is not None:
        raise InputError("--nic", "does not go with --bandwidth", "cards by datasheet, or a rate as measured")
    nic_gbit = None if bandwidth is None else parse_bandwidth(bandwidth) * 8 / 1e9
    counts, prices = _counts_and_prices(devices)
    total = sum(counts.values())
    per_node = _per_node(counts, nodes)
    samples = batch_size or 8 * total
    # A job's batch is ``max_workers`` equal mini-batches.
    workers = max(size for size in range(1, min(total, samples) + 1) if samples % size == 0)
    optional_fields = {
        "precision": precision,
        "optimizer": optimizer,
        "sequence_length": sequence_length,
        "lora": lora,
        "offload": offload,
        "attention": attention,
    }
    given_fields: dict[str, Any] = {name: value for name, value in optional_fields.items() if value is not None}
    given_fields |= {
        name: True
        for name, is_on in {
            "compile": compile,
            "channels_last": channels_last,
            "load_in_4bit": load_in_4bit,
        }.items()
        if is_on
    }
    try:
        job = Job(
            name=re.sub(r"[^\w.-]+", "-", source.rpartition(":")[2] or source).strip("-") or "job",
            model=source,
            max_workers=workers,
            batch_size=samples // workers,
            devices=[
                DeviceOffer(
                    type=name,
                    count=count,
                    per_node=per_node[name],
                    link=link,
                    nic=nic,
                    nic_gbit=nic_gbit,
                    price_per_hour=prices[name],
                )
                for name, count in counts.items()
            ],
            **given_fields,
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0]) if first["loc"] else "devices"
        option = _FIELDS.get(field, "--" + field.replace("_", "-"))
        raise InputError(option, first["msg"].removeprefix("Value error, "), "see ddltool plan --help") from None
    table = devices_of(with_specs(job, "--devices", devices_file), "--devices")
    for name in counts:
        table.device(name, "--devices")  # raises InputError for a type that nobody knows
    return job


def _counts_and_prices(devices: str) -> tuple[dict[str, int], dict[str, float | None]]:
    """Return by type the number of devices and the price of one per hour (None: not given) of :func:`job_of`'s ``devices``.

    Raises InputError for a type without a number, and if there is no device.
    """
    counts: dict[str, int] = {}
    prices: dict[str, float | None] = {}
    for offer in offered(devices):
        if offer.count is None:
            raise InputError("--devices", f"{offer.type!r} is not TYPE=N", "for example A100=8,V100=4")
        counts[offer.type] = counts.get(offer.type, 0) + offer.count
        prices[offer.type] = offer.price_per_hour if offer.price_per_hour is not None else prices.get(offer.type)
    if not any(counts.values()):
        raise InputError("--devices", f"{devices!r} offers none", "for example A100=8,V100=4")
    return counts, prices


def _per_node(counts: dict[str, int], nodes: int | None) -> dict[str, int]:
    """Return device type -> devices on a node, when ``counts`` devices (by type) are distributed over ``nodes`` nodes.

    A node has devices of one type. ``nodes`` of None: as many as are needed with 8 devices on each. Raises InputError for fewer
    nodes than types or more nodes than devices.
    """
    used_counts = {name: count for name, count in counts.items() if count}
    if nodes is None:
        return {name: max(1, min(count, DEVICES_PER_NODE)) for name, count in counts.items()}
    if not len(used_counts) <= nodes <= sum(used_counts.values()):
        problem = (
            f"is {nodes}, for {counted(sum(used_counts.values()), 'device')} of {counted(len(used_counts), 'type')}"
        )
        raise InputError("--nodes", problem, "a node has devices of one type, and at least one")
    nodes_by_type = dict.fromkeys(used_counts, 1)
    for _ in range(nodes - len(used_counts)):  # the next node goes to the type whose nodes are fullest
        fullest = max(
            (name for name in used_counts if nodes_by_type[name] < used_counts[name]),
            key=lambda name: used_counts[name] / nodes_by_type[name],
        )
        nodes_by_type[fullest] += 1
    return {name: max(1, -(-count // nodes_by_type.get(name, 1))) for name, count in counts.items()}
