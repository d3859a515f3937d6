"""``ddltool companion``: a database of the best plan for every number of available devices."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from ddltool.analyzers.answers.emitting.kubernetes import train_job_patch
from ddltool.analyzers.answers.emitting.layout import EqualNodes
from ddltool.analyzers.job.placement.companion import (
    build,
    differing_capabilities,
    measured_capability,
    meta_of,
    plan_for,
)
from ddltool.analyzers.job.placement.problem import from_job
from ddltool.analyzers.job.placement.proposals import Proposal, proposals
from ddltool.analyzers.job.planning.job_inputs import capabilities_of, graph_of, read_with_specs, scanned
from ddltool.artifacts import demand_file, write_text
from ddltool.commands.options import device_counts, number, within
from ddltool.commands.output import note, out, print_json, say, table
from ddltool.companion import Companion, CompanionMeta, CompanionPlan, is_companion, write_companion
from ddltool.device import DEVICES_PER_NODE
from ddltool.errors import Infeasible, InputError
from ddltool.tables import read_table
from ddltool.telemetry import check_rows
from ddltool.units import show_seconds


def companion(
    source: Path,
    lookup: str | None = None,
    free: str | None = None,
    patch: Path | None = None,
    per_node: Annotated[int, within(1, 1024)] = DEVICES_PER_NODE,
    resource: str = "nvidia.com/gpu",
    top_k: Annotated[int, within(1, 1000)] = 3,
    measured: Path | None = None,
    threshold: Annotated[float, number(0.0, 10.0)] = 0.1,
    devices_file: Path | None = None,
    allow_code: bool = False,
    output: Path | None = None,
    as_json: bool = False,
) -> None:
    """Keep the best plan for every number of available devices, look one up, correct it by what was measured.

    ``source``: a job.yaml, whose database is written to ``output``, or a database. ``lookup``: the available devices;
    ``free``: those that could be added. ``measured``: telemetry, whose capabilities replace stored ones that differ by
    more than ``threshold``, a share. ``patch``: the file for a TrainJob's patch. Raises InputError for options that need
    another one, and Infeasible if the job cannot run on the devices.
    """
    document: dict[str, Any] = {}  # for JSON: a part for each thing that was done
    remarks: list[str] = []
    if lookup is None:
        if free is not None:
            raise InputError("--free", "needs --lookup", "say what the job holds, for example --lookup V100=2")
        if patch is not None:
            raise InputError("--patch", "needs --lookup", "say what is free, for example --lookup V100=6")
    # The database of a job is made first, and then used like any other.
    if not is_companion(source):
        if source.suffix in (".db", ".sqlite"):
            Companion(source).close()  # raises the error about this database
        if output is None:
            raise InputError("--output", "is missing", "say where the database goes: -o plans.db")
        document["built"] = _build_database(source, output, devices_file, allow_code, remarks)
        source = output
    elif output is not None or devices_file is not None:
        option = "--devices-file" if output is None else "--output"
        raise InputError(option, "is for making a database from a job", "leave it out")
    # What prints the answer after the remarks; printing waits until the database is closed and all has succeeded.
    show: Callable[[], None] | None = None
    with Companion(source) as database:
        if measured is not None:
            document["recalibrated"] = _recalibrate(database, measured, threshold, remarks)
        if lookup is not None:
            fields, show = _look_up(database, lookup, free, top_k)
            document |= fields
            if patch is not None:
                devices = device_counts(lookup, "--lookup")
                requested = None if resource == "none" else resource
                document["patch"] = _write_patch(patch, database, devices, per_node, requested, remarks)
        elif not document:  # nothing was asked for: say what the database is
            fresh_count, vector_count = database.counts()
            meta = database.meta.model_dump(mode="json")
            document["about"] = {"up_to_date": fresh_count, "vectors": vector_count, **meta}
            show = partial(_print_about, database.meta, fresh_count, vector_count)
    if as_json:
        print_json(document)
        return
    for line in remarks:
        say(line)
    if show is not None:
        show()


def _look_up(
    database: Companion, lookup: str, free: str | None, top_k: int
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Return (JSON fields of the plan on the devices in ``lookup``, a function that prints the plan).

    ``lookup``: the available devices, as text such as ``V100=2,T4=1``. ``free``: devices that could be added, as such a text,
    for which the ``top_k`` best additions are proposed; None: propose nothing. Raises Infeasible if the devices cannot run the
    job and ``free`` is None.
    """
    devices = device_counts(lookup, "--lookup")
    plan = _plan_on_devices(database, devices)
    if not plan.ests and free is None:
        raise Infeasible(f"{database.meta.job} cannot run on {lookup}: no room for all of its logical workers")
    # None: not asked for; []: no addition helps.
    scale_outs = None
    if free is not None:
        scale_outs = _scale_outs(database, plan, devices, device_counts(free, "--free"), top_k)
    return _plan_document(plan, scale_outs), partial(_print_plan, database.meta.job, lookup, plan, scale_outs, free)


def _build_database(
    job_file: Path, output: Path, devices_file: Path | None, allow_code: bool, remarks: list[str]
) -> dict[str, Any]:
    """Write the database of a job's best plans to ``output``, and return the JSON fields on it.

    Sentences to print are appended to ``remarks``. Raises InputError for a job that a database cannot hold.
    """
    demand_file(output)  # a database cannot be written into a pipe
    job = read_with_specs(job_file, devices_file, allow_code=allow_code)
    if job.network is not None:
        raise InputError(f"{job_file}:network", "is not kept in a companion database", "leave it out, or use plan")
    job = scanned(job, graph_of(job, job_file.parent, None), note)
    meta = meta_of(from_job(job, capabilities_of(job, job_file.parent, str(job_file), note)))
    started = time.perf_counter()
    plans, plan_indices = build(meta)
    write_companion(output, meta, plans, enumerate(plan_indices.tolist()))
    seconds = time.perf_counter() - started
    stored = f"{len(plan_indices):,} vectors of devices, {len(plans):,} different plans"
    size = stored if len(plan_indices) else "too many vectors of devices: each is kept when it is first asked for"
    remarks += [f"{meta.job}: {size}, {seconds:.3f} s", f"wrote {output}"]
    return {"vectors": len(plan_indices), "plans": len(plans), "seconds": seconds}


def _recalibrate(database: Companion, telemetry: Path, threshold: float, remarks: list[str]) -> dict[str, Any]:
    """Replace the database's capabilities from which measured ones differ by more than ``threshold``, a share.

    Returns the JSON fields on it. Capabilities are mini-batches of one EST (logical worker) per second, by device type.
    Sentences to print are appended to ``remarks``.
    """
    predicted_per_s = {device.type: device.capability_per_s for device in database.meta.devices}
    rows = check_rows(read_table(telemetry), str(telemetry), remarks.append)
    measured_per_s = measured_capability(rows, database.meta.batch_size)
    corrected_per_s = differing_capabilities(database.meta, measured_per_s, threshold)
    if corrected_per_s:
        database.recalibrate(corrected_per_s)
    for name, rate_per_s in measured_per_s.items():
        # A capability within the threshold is kept, as the difference may be noise.
        verdict = "taken over" if name in corrected_per_s else "kept as it was"
        remarks.append(f"{name}: measured {rate_per_s:.4g}/s, predicted {predicted_per_s[name]:.4g}/s: {verdict}")
    return {
        name: {"measured": rate_per_s, "predicted": predicted_per_s[name], "changed": name in corrected_per_s}
        for name, rate_per_s in measured_per_s.items()
    }


def _plan_on_devices(database: Companion, devices: dict[str, int]) -> CompanionPlan:
    """Return the plan for these numbers of devices by type; if the database lacks it, it is made and stored."""
    counts = database.meta.clamped(devices)
    plan = database.lookup(counts)
    if plan is None:
        plan = plan_for(database.meta, counts)
        database.remember(counts, plan)
    return plan


def _write_patch(
    output: Path,
    database: Companion,
    held_devices: dict[str, int],
    per_node: int,
    resource: str | None,
    remarks: list[str],
) -> dict[str, Any]:
    """Write a TrainJob patch for the fastest plan on one device type in equal nodes to ``output``, and return it.

    Args:
        held_devices: available devices by type; the plan may leave some idle.
        per_node: devices of a node; a plan on more devices uses whole nodes.
        resource: name of the resource that the patch requests; None: no request.
        remarks: the sentences to print are appended to it.

    Raises Infeasible if no single type can run the job.
    """
    candidates: list[tuple[float, int, str]] = []  # (minus mini-batches per second, number of devices, their type)
    types = [device.type for device in database.meta.devices]
    for name, max_count in zip(types, database.meta.clamped(held_devices), strict=True):
        for count in range(1, max_count + 1):
            if count <= per_node or count % per_node == 0:  # a TrainJob's nodes are all equal
                candidate = _plan_on_devices(database, {name: count})
                if sum(candidate.used.values()) == count:  # else devices idle: a smaller count is as fast
                    candidates.append((-candidate.throughput, count, name))
    if not candidates:
        raise Infeasible(
            f"{database.meta.job} cannot run on one type of these devices, which is all that a TrainJob has"
        )
    # The fastest candidate; of equally fast ones that with the fewest devices.
    negative_rate, count, name = min(candidates)
    best_plan = _plan_on_devices(database, {name: count})
    nodes = max(1, count // per_node)
    processes = count // nodes
    group = EqualNodes(device_type=name, nodes=nodes, processes_per_node=processes, first_node=0, first_rank=0)
    # The samples of each process in a step: its ESTs (logical workers) take one mini-batch each.
    batches = [ests * database.meta.batch_size for devices, ests in best_plan.ests[name] for _ in range(devices)]
    notes = {
        "device-type": name,
        "local-batch-sizes": ",".join(map(str, batches)),
        "step-seconds": f"{best_plan.step_s:.4g}",
    }
    document = train_job_patch(group, resource, notes)
    write_text(output, json.dumps(document, indent=1) + "\n")
    remarks.append(f"TrainJob: {nodes} x {processes} {name}, {-negative_rate:.4g} logical mini-batches/s (predicted)")
    remarks.append(f"wrote {output}: kubectl patch trainjob NAME --type merge --patch-file {output}")
    return document


def _scale_outs(
    database: Companion, plan: CompanionPlan, held_devices: dict[str, int], offered: dict[str, int], top_k: int
) -> list[Proposal]:
    """Return the ``top_k`` best additions of ``offered`` devices (by type) to ``held_devices`` (by type).

    For a homogeneous job they are added to the devices that its ``plan`` uses. Raises InputError for an unknown type, and
    for a database with a limit on the ESTs of a device, which proposals do not take into account.
    """
    if any(device.max_ests is not None for device in database.meta.devices):
        raise InputError("--free", "does not go with a limit on the ESTs of one device", "use --lookup alone")
    database.meta.clamped(dict.fromkeys(offered, 0))  # raises InputError for an unknown type
    capability = {device.type: device.capability_per_s for device in database.meta.devices}
    holding = plan.used if database.meta.homogeneous else held_devices
    return proposals(capability, holding, offered, database.meta.max_workers, top_k, database.meta.homogeneous)


def _plan_document(plan: CompanionPlan, scale_outs: list[Proposal] | None) -> dict[str, Any]:
    """Return the JSON fields of a plan and, unless ``scale_outs`` is None, those of the proposed additions.

    ``iteration_s`` is None for a plan that runs nothing.
    """
    rows = [
        {"device_type": name, "devices": devices, "ests_per_device": ests}
        for name, entries in plan.ests.items()
        for devices, ests in entries
    ]
    document = {"throughput": plan.throughput, "iteration_s": plan.step_s or None, "assignments": rows}
    if scale_outs is None:
        return document
    return {**document, "proposals": [dataclasses.asdict(proposal) for proposal in scale_outs]}


def _print_about(meta: CompanionMeta, fresh_count: int, vector_count: int) -> None:
    """Print a database's job, its devices with their capabilities, and how many plans are up to date."""
    rows = [(device.type, str(device.count), f"{device.capability_per_s:.4g}") for device in meta.devices]
    title = f"{meta.job}: plans for {meta.max_workers} logical workers"
    out().print(table(title, ("device", "up to", "mini-batches/s of one EST"), rows))
    out().print(f"{fresh_count:,} of {vector_count:,} vectors up to date (generation {meta.generation})")


def _print_plan(
    job: str, lookup: str, plan: CompanionPlan, scale_outs: list[Proposal] | None, free: str | None
) -> None:
    """Print a plan and its proposals as tables.

    ``lookup`` and ``free``: the devices, as the user wrote them. ``scale_outs``: None: not asked for; []: none helps.
    """
    rows = [(name, str(devices), str(ests)) for name, entries in plan.ests.items() for devices, ests in entries]
    if not rows:
        out().print(f"{job} cannot run on {lookup}")
    else:
        out().print(table(f"{job} on {lookup} (predicted)", ("device", "devices", "ESTs each"), rows))
        out().print(f"step time {show_seconds(plan.step_s)}, {plan.throughput:.4g} logical mini-batches/s (predicted)")
    if scale_outs == []:
        out().print("no number of the free devices makes the job faster")
    elif scale_outs:
        proposal_rows = [
            (
                f"{proposal.count} {proposal.device_type}",
                f"{proposal.throughput:.4g}",
                f"{proposal.speedup:.3f}",
                f"{proposal.speedup_per_gpu:.3f}",
            )
            for proposal in scale_outs
        ]
        columns = ("more devices", "throughput", "speedup", "gain per device")
        out().print(table(f"Proposals for {free} (predicted)", columns, proposal_rows))
