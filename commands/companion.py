"""``ddltool companion``: a database of the best plan for every number of available devices."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from pydantic import ValidationError

from ddltool.analyzers.placement.companion import build, disagreeing, measured_capability, meta_of, plan_for
from ddltool.analyzers.placement.problem import from_job
from ddltool.analyzers.placement.proposals import Proposal, proposals
from ddltool.artifacts import check_writable
from ddltool.commands.options import DevicesFile, Json, Output
from ddltool.commands.output import note, out, print_json, table
from ddltool.commands.values import number
from ddltool.companion import Companion, CompanionPlan, is_companion, write_companion
from ddltool.errors import InputError
from ddltool.fixtures.loading import with_specs
from ddltool.job import read_job
from ddltool.outputs import demand_distinct
from ddltool.profile import read_table
from ddltool.schema_words import in_words
from ddltool.telemetry import TelemetryRow
from ddltool.units import show_seconds


def companion(
    source: Annotated[Path, typer.Argument(metavar="JOB.yaml|FILE.db", help="The job, or a database made before.")],
    lookup: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--lookup", metavar="TYPE=N,...", help="The best plan for these devices.", show_default=False),
    ] = None,
    free: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--free", metavar="TYPE=N,...", help="With --lookup: what more of these would bring.", show_default=False
        ),
    ] = None,
    top_k: Annotated[int, typer.Option(help="With --free: how many proposals.", min=1, max=1000)] = 3,
    measured: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--measured", metavar="TELEMETRY", help="telemetry.jsonl to compare the capabilities with."),
    ] = None,
    threshold: Annotated[
        float,
        typer.Option(
            help="With --measured: the share by which a capability must be off; 0 to 10.",
            parser=number("--threshold", 0.0, 10.0),
            metavar="SHARE",
        ),
    ] = 0.1,
    devices_file: DevicesFile = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Keep the best plan for every number of available devices, look one up, correct it by what was measured."""
    document: dict[str, Any] = {}
    if free is not None and lookup is None:
        raise InputError("--free", "needs --lookup", "say what the job holds, for example --lookup V100=2")
    if not is_companion(source):
        if source.suffix in (".db", ".sqlite"):
            Companion(source).close()  # says what is wrong with it
        if output is None:
            raise InputError("--output", "is missing", "say where the database goes: -o plans.db")
        document["built"] = _build(source, output, devices_file, as_json)
        source = output
    elif output is not None or devices_file is not None:
        option = "--devices-file" if output is None else "--output"
        raise InputError(option, "is for making a database from a job", "leave it out")
    with Companion(source) as base:
        if measured is not None:
            document["recalibrated"] = _recalibrate(base, measured, threshold, as_json)
        if lookup is not None:
            document |= _look_up(base, lookup, free, top_k, as_json)
        elif not document:
            document["about"] = _about(base, as_json)
    if as_json:
        print_json(document)


def _build(job_file: Path, output: Path, devices_file: Path | None, as_json: bool) -> dict[str, Any]:
    """Make the database of a job."""
    from ddltool.analyzers.loading.job_inputs import capabilities_of, graph_of, scanned

    demand_distinct([job_file, devices_file], {"-o": output})
    check_writable(output)
    job = with_specs(read_job(job_file), str(job_file), devices_file)
    if job.network is not None:
        raise InputError(f"{job_file}:network", "is not kept in a companion database", "leave it out, or use plan")
    job = scanned(job, graph_of(job, job_file.parent, None), note)
    meta = meta_of(from_job(job, capabilities_of(job, job_file.parent, str(job_file), note)))
    started = time.perf_counter()
    built = build(meta)
    write_companion(output, meta, built.plans, built.vectors())
    seconds = time.perf_counter() - started
    if not as_json:
        kept = f"{len(built.plan_of):,} vectors of devices, {len(built.plans):,} different plans"
        text = kept if len(built.plan_of) else "too many vectors of devices: each is kept when it is first asked for"
        out().print(f"{meta.job}: {text}, {seconds:.3f} s\nwrote {output}", soft_wrap=True)
    return {"vectors": len(built.plan_of), "plans": len(built.plans), "seconds": seconds}


def _about(base: Companion, as_json: bool) -> dict[str, Any]:
    """Print what a database holds."""
    fresh, total = base.counts()
    if not as_json:
        rows = [(device.type, str(device.count), f"{device.capability_per_s:.4g}") for device in base.meta.devices]
        console = out()
        title = f"{base.meta.job}: plans for {base.meta.max_workers} logical workers"
        console.print(table(title, ("device", "up to", "mini-batches/s of one EST"), rows))
        console.print(f"{fresh:,} of {total:,} vectors up to date (generation {base.meta.generation})")
    return {"up_to_date": fresh, "vectors": total, **base.meta.model_dump(mode="json")}


def _recalibrate(base: Companion, telemetry: Path, threshold: float, as_json: bool) -> dict[str, Any]:
    """Take over measured capabilities that are off by more than ``threshold``."""
    rows = []
    for place, row in enumerate(read_table(telemetry).to_dict("records"), start=1):
        present = {str(name): value for name, value in row.items() if value is not None and value == value}
        try:
            entry = TelemetryRow.model_validate(present)
        except ValidationError as error:
            first = error.errors()[0]
            column = ".".join(map(str, first["loc"]))
            raise InputError(f"{telemetry}:row {place}:{column}", *in_words(first)) from None
        rows.append((entry.device, entry.batch, entry.compute_s))
    known = {device.type: device.capability_per_s for device in base.meta.devices}
    measured = measured_capability(rows, base.meta.batch_size)
    if not measured:
        raise InputError(str(telemetry), "has no row with samples and computing time", "measure a few steps")
    changed = disagreeing(base.meta, measured, threshold)
    if changed:
        base.recalibrate(changed)
    if not as_json:
        for name, value in measured.items():
            verdict = "taken over" if name in changed else "kept as it was"
            out().print(f"{name}: measured {value:.4g}/s, predicted {known[name]:.4g}/s: {verdict}")
    return {
        name: {"measured": value, "predicted": known[name], "changed": name in changed}
        for name, value in measured.items()
    }


def _look_up(base: Companion, lookup: str, free: str | None, top_k: int, as_json: bool) -> dict[str, Any]:
    """Print the plan for given devices, and what more would bring."""
    held = _counts("--lookup", lookup)
    counts = base.meta.clamped(held)
    plan = base.lookup(counts)
    if plan is None:
        plan = plan_for(base.meta, counts)
        base.remember(counts, plan)
    found = [] if free is None else _proposals(base, plan.used, held, free, top_k)
    if not as_json:
        _show(base, lookup, plan, found, free)
        if free is not None and not found:
            out().print("no number of the free devices makes the job faster")
    rows = [
        {"device_type": name, "devices": devices, "ests_per_device": ests}
        for name, entries in plan.ests.items()
        for devices, ests in entries
    ]
    document: dict[str, Any] = {"throughput": plan.throughput, "iteration_s": plan.step_s, "assignments": rows}
    if free is not None:
        document["proposals"] = [
            {
                "device_type": each.device_type,
                "count": each.count,
                "throughput": each.throughput,
                "speedup": each.speedup,
                "speedup_per_gpu": each.speedup_per_gpu,
            }
            for each in found
        ]
    return document


def _proposals(base: Companion, used: dict[str, int], held: dict[str, int], free: str, top_k: int) -> list[Proposal]:
    """Return the best scale-outs from what the job holds; a homogeneous job scales out what it uses."""
    offered = _counts("--free", free)
    if any(device.max_ests is not None for device in base.meta.devices):
        raise InputError("--free", "does not go with a limit on the ESTs of one device", "use --lookup alone")
    for name in offered:
        base.meta.clamped({name: 0})  # an unknown type is told
    capability = {device.type: device.capability_per_s for device in base.meta.devices}
    holding = used if base.meta.homogeneous else held
    return proposals(capability, holding, offered, base.meta.max_workers, top_k, base.meta.homogeneous)


def _show(base: Companion, lookup: str, plan: CompanionPlan, found: list[Proposal], free: str | None) -> None:
    """Print a plan and proposals as tables."""
    console = out()
    rows = [(name, str(devices), str(ests)) for name, entries in plan.ests.items() for devices, ests in entries]
    if not rows:
        console.print(f"{base.meta.job} cannot run on {lookup}")
    else:
        title = f"{base.meta.job} on {lookup} (predicted)"
        console.print(table(title, ("device", "devices", "ESTs each"), rows))
        console.print(
            f"step time {show_seconds(plan.step_s)}, {plan.throughput:.4g} logical mini-batches/s (predicted)"
        )
    if found:
        lines = [
            (
                f"{each.count} {each.device_type}",
                f"{each.throughput:.4g}",
                f"{each.speedup:.3f}",
                f"{each.speedup_per_gpu:.3f}",
            )
            for each in found
        ]
        columns = ("more devices", "throughput", "speedup", "gain per device")
        console.print(table(f"Proposals for {free} (predicted)", columns, lines))


def _counts(option: str, text: str) -> dict[str, int]:
    """Return device counts from ``TYPE=N,...``. Raises InputError for anything else."""
    counts: dict[str, int] = {}
    for part in text.split(","):
        name, equals, number = part.strip().rpartition("=")
        if not (equals and name and number.isascii() and number.isdigit() and len(number) <= 9):
            raise InputError(option, f"{part.strip()!r} is not TYPE=N", "for example V100=2,T4=1")
        if name in counts:
            raise InputError(option, f"{name} stands twice", "add the counts up")
        counts[name] = int(number)
    return counts
