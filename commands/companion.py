"""``ddltool companion``: a database of the best plan for every number of available devices."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Annotated, Any

from ddltool.analyzers.deciding.feedback import check_rows
from ddltool.analyzers.emitting.kubernetes import train_job_patch
from ddltool.analyzers.emitting.layout import NodeGroup
from ddltool.analyzers.loading.job_inputs import capabilities_of, graph_of, read_with_specs, scanned
from ddltool.analyzers.placement.companion import build, disagreeing, measured_capability, meta_of, plan_for
from ddltool.analyzers.placement.problem import from_job
from ddltool.analyzers.placement.proposals import Proposal, proposals
from ddltool.artifacts import write_text
from ddltool.commands.options import device_counts, number, within
from ddltool.commands.output import note, out, print_json, say, table
from ddltool.companion import Companion, CompanionPlan, is_companion, write_companion
from ddltool.errors import Infeasible, InputError
from ddltool.tables import read_table
from ddltool.units import show_seconds

_Text = str | None


def companion(
    source: Path,
    lookup: str | None = None,
    free: str | None = None,
    patch: Path | None = None,
    per_node: Annotated[int, within(1, 1024)] = 8,
    resource: str = "nvidia.com/gpu",
    top_k: Annotated[int, within(1, 1000)] = 3,
    measured: Path | None = None,
    threshold: Annotated[float, number(0.0, 10.0)] = 0.1,
    devices_file: Path | None = None,
    allow_code: bool = False,
    output: Path | None = None,
    as_json: bool = False,
) -> None:
    """Keep the best plan for every number of available devices, look one up, correct it by what was measured."""
    document: dict[str, Any] = {}
    lines: list[str] = []
    if free is not None and lookup is None:
        raise InputError("--free", "needs --lookup", "say what the job holds, for example --lookup V100=2")
    if patch is not None and lookup is None:
        raise InputError("--patch", "needs --lookup", "say what is free, for example --lookup V100=6")
    if not is_companion(source):
        if source.suffix in (".db", ".sqlite"):
            Companion(source).close()  # says what is wrong with it
        if output is None:
            raise InputError("--output", "is missing", "say where the database goes: -o plans.db")
        document["built"] = _build(source, output, devices_file, allow_code, lines)
        source = output
    elif output is not None or devices_file is not None:
        option = "--devices-file" if output is None else "--output"
        raise InputError(option, "is for making a database from a job", "leave it out")
    with Companion(source) as base:
        if measured is not None:
            document["recalibrated"] = _recalibrate(base, measured, threshold, lines)
        shown = [*lines]
        if lookup is not None:
            held = device_counts(lookup, "--lookup")
            plan = _looked_up(base, held)
            if not plan.ests and free is None:
                raise Infeasible(f"{base.meta.job} cannot run on {lookup}: no room for all of its logical workers")
            found = None if free is None else _proposals(base, plan, held, device_counts(free, "--free"), top_k)
            document |= _plan_document(plan, found)
            if patch is not None:
                document["patch"], text = _patch(base, held, per_node, None if resource == "none" else resource)
                write_text(patch, json.dumps(document["patch"], indent=1) + "\n")
                shown += [text, f"wrote {patch}: kubectl patch trainjob NAME --type merge --patch-file {patch}"]
        elif not document:
            fresh, total = base.counts()
            document["about"] = {"up_to_date": fresh, "vectors": total, **base.meta.model_dump(mode="json")}
        if as_json:
            print_json(document)
            return
        for line in shown:
            say(line)
        if lookup is not None:
            _show(base, lookup, plan, found, free)
        elif "about" in document:
            rows = [(it.type, str(it.count), f"{it.capability_per_s:.4g}") for it in base.meta.devices]
            title = f"{base.meta.job}: plans for {base.meta.max_workers} logical workers"
            out().print(table(title, ("device", "up to", "mini-batches/s of one EST"), rows))
            out().print(f"{fresh:,} of {total:,} vectors up to date (generation {base.meta.generation})")


def _build(
    job_file: Path, output: Path, devices_file: Path | None, allow_code: bool, lines: list[str]
) -> dict[str, Any]:
    """Make the database of a job; what to say of it goes to ``lines``."""
    job = read_with_specs(job_file, devices_file, allow_code=allow_code)
    if job.network is not None:
        raise InputError(f"{job_file}:network", "is not kept in a companion database", "leave it out, or use plan")
    job = scanned(job, graph_of(job, job_file.parent, None), note)
    meta = meta_of(from_job(job, capabilities_of(job, job_file.parent, str(job_file), note)))
    started = time.perf_counter()
    plans, places = build(meta)
    write_companion(output, meta, plans, enumerate(places.tolist()))
    seconds = time.perf_counter() - started
    kept = f"{len(places):,} vectors of devices, {len(plans):,} different plans"
    text = kept if len(places) else "too many vectors of devices: each is kept when it is first asked for"
    lines += [f"{meta.job}: {text}, {seconds:.3f} s", f"wrote {output}"]
    return {"vectors": len(places), "plans": len(plans), "seconds": seconds}


def _recalibrate(base: Companion, telemetry: Path, threshold: float, lines: list[str]) -> dict[str, Any]:
    """Take over measured capabilities that are off by more than ``threshold``; what to say goes to ``lines``."""
    known = {device.type: device.capability_per_s for device in base.meta.devices}
    found = measured_capability(check_rows(read_table(telemetry), str(telemetry), lines.append), base.meta.batch_size)
    changed = disagreeing(base.meta, found, threshold)
    if changed:
        base.recalibrate(changed)
    for name, value in found.items():
        verdict = "taken over" if name in changed else "kept as it was"
        lines.append(f"{name}: measured {value:.4g}/s, predicted {known[name]:.4g}/s: {verdict}")
    return {
        name: {"measured": value, "predicted": known[name], "changed": name in changed} for name, value in found.items()
    }


def _looked_up(base: Companion, held: dict[str, int]) -> CompanionPlan:
    """Return the plan for given devices, made now where it is not kept."""
    counts = base.meta.clamped(held)
    plan = base.lookup(counts)
    if plan is None:
        plan = plan_for(base.meta, counts)
        base.remember(counts, plan)
    return plan


def _patch(base: Companion, held: dict[str, int], per_node: int, resource: str | None) -> tuple[dict[str, Any], str]:
    """Return the patch of a TrainJob for the best it can be on some of ``held``: one type, nodes alike; and that in words."""
    tried: list[tuple[float, int, str]] = []
    for name, most in zip((device.type for device in base.meta.devices), base.meta.clamped(held), strict=True):
        for count in range(1, most + 1):
            if count <= per_node or count % per_node == 0:  # whole nodes: those of a TrainJob are alike
                found = _looked_up(base, {name: count})
                if sum(found.used.values()) == count:
                    tried.append((-found.throughput, count, name))
    if not tried:
        raise Infeasible(f"{base.meta.job} cannot run on one type of these devices, which is all that a TrainJob has")
    rate, count, name = min(tried)
    best, nodes = _looked_up(base, {name: count}), max(1, count // per_node)
    processes = count // nodes
    group = NodeGroup(device_type=name, nodes=nodes, processes_per_node=processes, first_node=0, first_rank=0)
    batches = [ests * base.meta.batch_size for devices, ests in best.ests[name] for _ in range(devices)]
    notes = {
        "device-type": name,
        "local-batch-sizes": ",".join(map(str, batches)),
        "step-seconds": f"{best.step_s:.4g}",
    }
    text = f"TrainJob: {nodes} x {processes} {name}, {-rate:.4g} logical mini-batches/s (predicted)"
    return train_job_patch(group, resource, notes), text


def _proposals(
    base: Companion, plan: CompanionPlan, held: dict[str, int], offered: dict[str, int], top_k: int
) -> list[Proposal]:
    """Return the best scale-outs from what the job holds; a homogeneous job scales out what it uses."""
    if any(device.max_ests is not None for device in base.meta.devices):
        raise InputError("--free", "does not go with a limit on the ESTs of one device", "use --lookup alone")
    base.meta.clamped(dict.fromkeys(offered, 0))  # an unknown type is told
    capability = {device.type: device.capability_per_s for device in base.meta.devices}
    holding = plan.used if base.meta.homogeneous else held
    return proposals(capability, holding, offered, base.meta.max_workers, top_k, base.meta.homogeneous)


def _plan_document(plan: CompanionPlan, found: list[Proposal] | None) -> dict[str, Any]:
    rows = [
        {"device_type": name, "devices": devices, "ests_per_device": ests}
        for name, entries in plan.ests.items()
        for devices, ests in entries
    ]
    document = {"throughput": plan.throughput, "iteration_s": plan.step_s or None, "assignments": rows}
    return document if found is None else {**document, "proposals": [dataclasses.asdict(each) for each in found]}


def _show(base: Companion, lookup: str, plan: CompanionPlan, found: list[Proposal] | None, free: str | None) -> None:
    """Print a plan and proposals as tables."""
    rows = [(name, str(devices), str(ests)) for name, entries in plan.ests.items() for devices, ests in entries]
    if not rows:
        out().print(f"{base.meta.job} cannot run on {lookup}")
    else:
        out().print(table(f"{base.meta.job} on {lookup} (predicted)", ("device", "devices", "ESTs each"), rows))
        out().print(f"step time {show_seconds(plan.step_s)}, {plan.throughput:.4g} logical mini-batches/s (predicted)")
    if found == []:
        out().print("no number of the free devices makes the job faster")
    elif found:
        lines = [
            (f"{it.count} {it.device_type}", f"{it.throughput:.4g}", f"{it.speedup:.3f}", f"{it.speedup_per_gpu:.3f}")
            for it in found
        ]
        columns = ("more devices", "throughput", "speedup", "gain per device")
        out().print(table(f"Proposals for {free} (predicted)", columns, lines))
