"""What a job names beside its own numbers: models, graphs, profiles and fits, read and turned into what plans need.

``tell`` takes a remark for the user.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ddltool.analyzers.balancing.plan import StepCurve, checked_total, memory_limit
from ddltool.analyzers.communication.collectives import DEFAULT_CAP_MIB, Compression
from ddltool.analyzers.costs.model import cost_model, estimate
from ddltool.analyzers.costs.nccl import Fabric
from ddltool.analyzers.deciding.candidates import Settings
from ddltool.analyzers.deciding.communication import (
    Communication,
    FittedCommunication,
    GraphCommunication,
    MeasuredCommunication,
)
from ddltool.analyzers.deciding.feedback import Run, read_run
from ddltool.analyzers.deciding.goal import Goal
from ddltool.analyzers.deciding.knowledge import Knowledge
from ddltool.analyzers.goodput.throughput import ThroughputParams
from ddltool.analyzers.loading.fabrics import BANDWIDTH, between_nodes, own_link, tests_in
from ddltool.analyzers.loading.sources import is_graph_file, is_onnx_file, load_graph, scan_source
from ddltool.analyzers.placement.determinism import scan
from ddltool.analyzers.placement.problem import capability_from_graph, capability_from_profile
from ddltool.artifacts import load
from ddltool.device import Network
from ddltool.errors import InputError, naming
from ddltool.fixtures.loading import calibration, devices, devices_of, with_specs
from ddltool.goodput_model import Goodput
from ddltool.graph import SEND, Graph, read_graph
from ddltool.job import Cluster, DeviceOffer, Job, NodeGroup, read_job
from ddltool.links import Link, parse_link
from ddltool.profiles import read_profile
from ddltool.tables import read_table
from ddltool.units import counted, parse_latency

if TYPE_CHECKING:
    from ddltool.analyzers.deciding.layouts import Layouts


Tell = Callable[[str], None]
# Modules with NVLink stand so many to a board.
_SXM = 8


@dataclass(frozen=True, kw_only=True)
class Given:
    """What the command line adds to job.yaml."""

    goal: Goal
    graph: Graph | None
    telemetry: Path | None
    bandwidth: str | None
    latency: str
    nccl_tests: tuple[Path, ...]
    compress: Compression | None
    settings: Settings
    tell: Tell
    """Takes a remark for the user."""


def read_with_specs(given: Path | Job, devices_file: Path | None, *, allow_code: bool = False) -> Job:
    """Return a job, or that in a file, with the figures of device types that another file describes; see :func:`read_job`."""
    if isinstance(given, Job):
        return with_specs(given, given.name, devices_file)
    file, job = given, read_job(given, allow_code=allow_code)
    scheme, _, name = str(job.model).partition(":")
    if scheme == "transformers" and name.endswith(".json"):
        job = job.model_copy(update={"model": f"transformers:{file.parent / name}"})
    return with_specs(job, str(file), devices_file)


def step_curves(job: Job, job_file: Path) -> dict[str, StepCurve]:
    """Return time over batch size for the device types that have a fitted model, saturation or a limit of samples.

    Raises InputError for a total batch beyond what can be split.
    """
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
        found[offer.type] = params
    return found


def scanned(job: Job, graph: Graph | None, tell: Tell) -> Job:
    """Return the job with what its model's ops say about D2, where it asks for D2 and does not say itself."""
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
        _, found = scan_source(job.model, batch_size=job.batch_size)
    else:
        assert graph is not None  # a job's own graph file has been read
        found = scan(graph)
    if not found.d2_eligible:
        tell(f"D2: the plan keeps to one device type: {found.reasons[0]}")
    return job.model_copy(update={"constraints": limits.model_copy(update={"hardware_agnostic": found.d2_eligible})})


def capabilities_of(job: Job, folder: Path, where: str, tell: Tell) -> dict[str, float]:
    """Return the capability of each device type: as written, from its fit or its profile, or from the cost model.

    Paths in the job are relative to ``folder``; predicted capabilities are told.
    """
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
    if missing and job.group is not None:
        problem = (
            f"{missing[0]} has neither capability_per_s nor profile, and the step of {job.group.text} is not predicted"
        )
        raise InputError(f"{where}:devices", problem, "measure or give that of one group")
    if missing and job.model is None:
        problem = (
            f"{missing[0]} has neither capability_per_s nor profile, and the job names no model to estimate it from"
        )
        raise InputError(f"{where}:devices", problem, "give one of the three")
    if not missing:
        return found
    predicted = _roofline_capabilities(job, folder, missing, where)
    shown = ", ".join(f"{name} {value:.3g}/s" for name, value in predicted.items())
    tell(f"predicted capabilities ({job.model}, {job.precision}, {job.optimizer}): {shown}")
    return {**found, **predicted}


def _roofline_capabilities(job: Job, folder: Path, types: list[str], where: str) -> dict[str, float]:
    """Return capabilities predicted from the traced model and the known devices, with those that the job describes."""
    graph = _graph(job, folder)
    table = devices_of(job, where)
    return {
        name: capability_from_graph(
            estimate(
                graph, cost_model(table.device(name, "devices.type"), calibration()), Network(), optimizer=job.optimizer
            )
        )
        for name in types
    }


def graph_of(job: Job, folder: Path, graph_file: Path | None) -> Graph | None:
    """Return the graph whose parameters the plan lists: the one given, or the job's own when that is a file."""
    if graph_file is not None:
        return read_graph(graph_file)
    return read_graph(folder / job.model) if job.model is not None and is_graph_file(job.model) else None


def samples_of(job: Job, graph: Graph | None, tokens: float | None) -> float | None:
    """Return the samples that so many tokens are; None for None. Raises InputError where nothing says how long a sample is."""
    if tokens is None:
        return None
    length: object = job.sequence_length
    if length is None and traceable(job):
        from ddltool.analyzers.loading.job_layouts import job_work  # it loads torch

        length = job_work(job).traced.graph.meta.get("tokens_per_sample")
    if length is None and graph is not None:
        length = graph.meta.get("tokens_per_sample")
    if not isinstance(length, int):
        raise InputError("--tokens", "nothing says how many tokens a sample has", "give --samples or sequence_length")
    return tokens / length


def powers(job: Job, where: str) -> dict[str, float]:
    """Return the datasheet's power of each device type that is known to have one, in watts."""
    table = devices_of(job, where)
    known = {offer.type: table.find(offer.type) for offer in job.devices}
    return {name: device.power_w for name, device in known.items() if device is not None and device.power_w}


def run_of(path: Path | None, tell: Tell) -> Run | None:
    """Return the earlier run that telemetry tells of, None without any."""
    return None if path is None else read_run(read_table(path), str(path), tell)


def knowledge_of(job: Job, job_file: Path, given: Given, run: Run | None) -> Knowledge:
    """Return what is known beside capabilities: curves, fitted models, communication, errors, and fitness for D2."""
    named = {offer.type: job_file.parent / offer.goodput for offer in job.devices if offer.goodput is not None}
    fitted = {name: load(path, Goodput) for name, path in named.items()}
    models = {name: model.params_of(name) for name, model in fitted.items()}
    errors, source = _errors(job, job_file.parent, fitted, run)
    fabrics = _fabrics(job, job_file.parent, given)
    return Knowledge(
        curves=step_curves(job, job_file),
        models=models,
        communication=_communication(job, job_file.parent, given, models, run, fabrics),
        layouts=None if run is not None or fabrics is None else _layouts(job, job_file.parent, fabrics),
        rests_s={} if run is None else run.rests_s(),
        skew=0.0 if run is None else run.skew,
        drift=0.0 if run is None else run.drift,
        seen={} if run is None else run.devices,
        errors=errors,
        error_source=source,
        d2_eligible=None if given.graph is None else scan(given.graph).d2_eligible,
    )


def _errors(job: Job, folder: Path, fitted: Mapping[str, Goodput], run: Run | None) -> tuple[dict[str, float], str]:
    """Return the relative error of each type's compute times where one is known, and where it comes from."""
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
            model = cost_model(table.device(offer.type, "devices.type"), calibration())
            known.append((model.relative_error, "cost model, in cross-validation"))
        if offer.type in fitted:  # its times, or at least how they grow with the batch, are the fit's
            mape = fitted[offer.type].devices.get(offer.type, fitted[offer.type]).mape
            known.append((mape, "error of the fit"))
        if known:
            found[offer.type], source = max(known)
            sources.append(source)
    return found, ", ".join(dict.fromkeys(sources))


def _communication(
    job: Job,
    folder: Path,
    given: Given,
    models: Mapping[str, ThroughputParams],
    run: Run | None,
    fabrics: dict[str, Fabric] | None,
) -> Communication | None:
    """Return the best source there is: an earlier run, a graph on a known network, or a fit that saw several replicas."""
    if run is not None and run.world_size > 1:
        size_bytes = None if given.graph is None else given.graph.parameter_bytes
        return MeasuredCommunication(
            sync_s=run.sync_s,
            replicas=run.world_size,
            nodes=run.num_nodes,
            speeds=run.speeds(),
            buckets=None if size_bytes is None else max(1, math.ceil(size_bytes / (DEFAULT_CAP_MIB * 2**20))),
        )
    from_graph = graph_communication(job, folder, given, fabrics)
    if from_graph is not None:
        return from_graph
    synchronised = {
        name: model for name, model in models.items() if model.alpha_sync_local_s + model.alpha_sync_node_s > 0
    }
    if synchronised:
        return FittedCommunication(synchronised, 8 if job.goodput is None else job.goodput.devices_per_node)
    return None


def _fabrics(job: Job, folder: Path, given: Given) -> dict[str, Fabric] | None:
    """Return the job's network; of a job with a model that names none, an assumed one, which is told."""
    found = fabrics_of(job, folder, given)
    if found is not None or not traceable(job):
        return found
    if sum(offer.count for offer in job.devices) > 1:
        remedy = "nic: in the job or its cluster says otherwise"
        given.tell(f"note: no network is named, {BANDWIDTH}/s between nodes is assumed; {remedy}")
    return fabrics_of(job, folder, replace(given, bandwidth=BANDWIDTH))


def traceable(job: Job) -> bool:
    """Return whether a job names a model that can be traced at any batch size, and that one device holds."""
    return job.group is None and job.model is not None and not is_graph_file(job.model) and not is_onnx_file(job.model)


def _layouts(job: Job, folder: Path, fabrics: Mapping[str, Fabric]) -> Layouts | None:
    """Return what the job's model takes however it is sharded; None where the model or a device is not known."""
    table = devices_of(job, str(folder / "job.yaml"))
    if not traceable(job) or any(table.find(offer.type) is None for offer in job.devices if offer.count):
        return None
    from ddltool.analyzers.loading.job_layouts import layouts_of  # it loads torch

    return layouts_of(job, table, fabrics)


def graph_communication(
    job: Job, folder: Path, given: Given, fabrics: dict[str, Fabric] | None
) -> GraphCommunication | None:
    """Return communication simulated on the model's graph; None without a graph, or without a rate for its network.

    The network is the job's (:func:`fabrics_of`), else the one that the graph was timed for. Raises InputError for a graph that
    is no timed training step.
    """
    graph = given.graph
    if graph is None and job.model is not None and fabrics is not None:
        graph = _traced(job, folder)
    if graph is None:
        return None
    if fabrics is None:
        rate = graph.meta.get("bandwidth_bytes_per_s")
        if not isinstance(rate, (int, float)):
            given.tell("note: communication is left out: name a cluster with nic or nic_gbit, or give --bandwidth")
            return None
        own = graph.meta.get("latency_s")
        delay = float(own) if isinstance(own, (int, float)) else parse_latency(given.latency)
        fabrics = fabrics_of(job, folder, given, Link(kind="plain", bytes_per_s=float(rate), latency_s=delay)) or {}
    if graph.mode != "training" or not graph.timed or not len(graph.of_kind(SEND)):
        raise InputError(
            "--graph", f"{graph.name} is no timed training step", "make one with ddltool trace SOURCE -o FILE"
        )
    table = devices_of(job, str(folder / "job.yaml"))
    memory = {device.type: device.memory_gib for device in job.devices}
    for name, given_gib in memory.items():
        if given_gib is None and (known_device := table.find(name)) is not None:
            memory[name] = known_device.memory_gib
    return GraphCommunication(graph, fabrics, memory)


def slowest_memory(job: Job, where: str, names: Iterable[str]) -> float:
    """Return the least memory rate of some device types, bytes per second. Raises InputError for an unknown one."""
    table = devices_of(job, where)
    return min(table.device(name, "--compress").memory_bytes_per_s for name in names)


def fabrics_of(job: Job, folder: Path, given: Given, timed_for: Link | None = None) -> dict[str, Fabric] | None:
    """Return the network of each offered device type; None where nothing joins the nodes.

    Between nodes: --bandwidth, the cluster's slowest card, the offer's nic, or ``timed_for``. Inside: the cluster's or the
    offer's link, or the device's own. On a node stand as many as the cluster or per_node says; of a type with NVLink that only
    --bandwidth joins, 8, which is told; of others one.
    """
    cluster = None if job.cluster is None else load(folder / job.cluster, Cluster)
    table, offers = devices_of(job, str(folder / "job.yaml")), [offer for offer in job.devices if offer.count]
    rate = between_nodes(None, given.bandwidth, given.latency, ("", "--bandwidth", "--latency"))
    together = job.group.size if job.group else 1
    found: dict[str, Fabric] = {}
    for offer in offers:
        groups = [] if cluster is None else [group for group in cluster.nodes if group.devices.type == offer.type]
        known = table.find(offer.type)
        own = own_link(known) if known is not None else parse_link("pcie3")
        named = [text for text in (*(group.link for group in groups), offer.link) if text is not None]
        inside = min((parse_link(text) for text in named), key=lambda link: link.bytes_per_s, default=own)
        per_node = max((max(group.devices.count // together, 1) for group in groups), default=offer.per_node or 1)
        if rate is not None and not groups and offer.per_node is None and inside.kind.startswith("nvlink"):
            per_node = max(_SXM // together, 1)
            joined = f"{offer.type}: {per_node} a node on {inside.text} ({inside.bytes_per_s / 1e9:.4g} GB/s)"
            given.tell(f"note: {joined} are assumed; a cluster, or per_node beside the count, says otherwise")
        between = rate or _slowest_card(groups, offer, given.latency) or timed_for
        if between is None and len(offers) == 1 and 1 < offer.count <= per_node:
            # nothing leaves the node; parameter servers would be reached through the host
            between = replace(parse_link("pcie3"), latency_s=parse_latency(given.latency))
        if between is None and not given.nccl_tests:
            return None
        between = between or between_nodes(None, BANDWIDTH, given.latency, ("", "", "--latency"))
        assert between is not None  # a rate was given
        measured = tuple(tests_in(path, per_node) for path in given.nccl_tests)
        found[offer.type] = Fabric(inside=inside, between=between, gpus_per_node=per_node, measured=measured)
    return found or None


def _slowest_card(groups: Sequence[NodeGroup], offer: DeviceOffer, latency: str) -> Link | None:
    """Return the slowest link of a type's nodes to others; None where a node's is not known."""
    links = [
        between_nodes(None, f"{group.nic_gbit}Gbit", latency, ("", "", "--latency"))
        if group.nic_gbit is not None
        else between_nodes(group.nic or offer.nic, None, None, ("nic", "", ""))
        for group in groups
    ] or [between_nodes(offer.nic, None, None, ("nic", "", ""))]
    known = [link for link in links if link is not None]
    return min(known, key=lambda link: link.bytes_per_s) if len(known) == len(links) else None


def _traced(job: Job, folder: Path) -> Graph:
    """Return the job's model as a graph; times only matter relative to each other, so any known device will do."""
    name = next((offer.type for offer in job.devices if devices().find(offer.type)), "V100")
    return estimate(_graph(job, folder), cost_model(devices().device(name), calibration()), Network())


def _graph(job: Job, folder: Path) -> Graph:
    """Return a step of ``batch_size`` samples of the job's model, without times."""
    if not traceable(job):
        source = str(folder / str(job.model)) if is_graph_file(str(job.model)) else str(job.model)
        return load_graph(source, None, None if is_graph_file(source) else job.batch_size)
    from ddltool.analyzers.loading.job_layouts import job_work  # it loads torch

    return job_work(job).traced.at(job.batch_size)


_NODE = 8
_OFFER = re.compile(r"(?P<type>[^=,@]+)=(?P<count>[0-9]{1,7})(@(?P<price>[0-9.]{1,12}))?")
_FIELDS = {"batch_size": "--batch-size", "max_workers": "--batch-size", "devices": "--devices"}


def job_of(
    source: str,
    devices: str,
    *,
    nodes: int | None = None,
    batch_size: int | None = None,
    link: str | None = None,
    nic: str | None = None,
    devices_file: Path | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    sequence_length: int | None = None,
) -> Job:
    """Return the job of a model on ``devices`` such as ``A100=8,V100=4``, or ``A100=8@2.5`` with a price per hour.

    ``batch_size``: samples of a step on all devices together; 8 of each by default. ``nodes``: of all types, each of one
    type, in proportion to the devices; by default as few as hold 8. ``devices_file``: types of the user's own. The
    others are the job's. Raises InputError, which names the option.
    """
    offers = [_OFFER.fullmatch(part.strip()) for part in devices.split(",")]
    if not offers or None in offers:
        raise InputError(
            "--devices", f"{devices!r} is not TYPE=N", "for example A100=8,V100=4, or A100=8@2.5 with a price"
        )
    counts: dict[str, int] = {}
    prices: dict[str, float | None] = {}
    for offer in offers:
        assert offer is not None
        counts[offer["type"]] = counts.get(offer["type"], 0) + int(offer["count"])
        prices[offer["type"]] = float(offer["price"]) if offer["price"] else prices.get(offer["type"])
    total = sum(counts.values())
    if total == 0:
        raise InputError("--devices", f"{devices!r} offers none", "for example A100=8,V100=4")
    per_node = _per_node(counts, nodes)
    samples = batch_size or 8 * total
    workers = max(size for size in range(1, min(total, samples) + 1) if samples % size == 0)
    of_job = {"precision": precision, "optimizer": optimizer, "sequence_length": sequence_length}
    known: dict[str, Any] = {name: value for name, value in of_job.items() if value is not None}
    try:
        made = Job(
            name=re.sub(r"[^\w.-]+", "-", source.rpartition(":")[2] or source).strip("-") or "job",
            model=source,
            max_workers=workers,
            batch_size=samples // workers,
            devices=[
                DeviceOffer(
                    type=name, count=count, per_node=per_node[name], link=link, nic=nic, price_per_hour=prices[name]
                )
                for name, count in counts.items()
            ],
            **known,
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0]) if first["loc"] else "devices"
        option = _FIELDS.get(field, "--" + field.replace("_", "-"))
        raise InputError(option, first["msg"].removeprefix("Value error, "), "see ddltool plan --help") from None
    table = devices_of(with_specs(made, "--devices", devices_file), "--devices")
    for name in counts:
        table.device(name, "--devices")
    return made


def _per_node(counts: dict[str, int], nodes: int | None) -> dict[str, int]:
    """Return how many devices of each type stand on one of its nodes."""
    used = {name: count for name, count in counts.items() if count}
    if nodes is None:
        return {name: max(1, min(count, _NODE)) for name, count in counts.items()}
    if not len(used) <= nodes <= sum(used.values()):
        problem = f"is {nodes}, for {counted(sum(used.values()), 'device')} of {counted(len(used), 'type')}"
        raise InputError("--nodes", problem, "a node has devices of one type, and at least one")
    given = dict.fromkeys(used, 1)
    for _ in range(nodes - len(used)):  # the next node to the type whose nodes are fullest
        fullest = max((name for name in used if given[name] < used[name]), key=lambda name: used[name] / given[name])
        given[fullest] += 1
    return {name: max(1, -(-count // given.get(name, 1))) for name, count in counts.items()}
