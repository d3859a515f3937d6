"""``ddltool profile SOURCE``: step times, synchronisation and memory on this machine; the network; others' measurements."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from ddltool.analyzers.loading.imported_rows import import_files
from ddltool.analyzers.reporting.result_sections import network_section
from ddltool.artifacts import save
from ddltool.commands import values
from ddltool.commands.options import Json, Output, Seed, demand_part, is_given, one_of
from ddltool.commands.output import note, out, print_json, progress, say, show, table, tell_written
from ddltool.errors import DdlToolError, InputError
from ddltool.outputs import check_outputs
from ddltool.profiles import records, write_profile
from ddltool.results import ProfileResult, WatchResult
from ddltool.runtime.measuring.campaign import (
    LARGEST_BATCH,
    MOST_REPLICAS,
    MOST_STEPS,
    MeasureRequest,
    RowFile,
    threads_of,
)
from ddltool.runtime.measuring.network import measure_network
from ddltool.runtime.measuring.profiling import BUDGET_S, RESOLVER, device_memory, kept, measured, width
from ddltool.runtime.measuring.torchrun_job import Job, Place, job_from_environment
from ddltool.runtime.measuring.watch import WatchLost, WatchRequest, record, summarise, write_rows
from ddltool.units import counted, parse_bytes, show_bytes, show_seconds

_ALWAYS = {"output", "seed", "as_json"}
_ONE = _ALWAYS | {"source", "batch_sizes", "replicas"}
_PARTS = {
    "--network": _ALWAYS | {"network", "replicas"},
    "--watch": _ONE | {"watch", "cores"},
    "--import": _ALWAYS | {"imports", "device_name", "batch_sizes", "nodes", "replicas"},
    "": _ONE
    | {"accumulation", "device", "device_name", "precision", "budget", "repeats", "warmup"}
    | {"threads", "memory", "resume"},
}
"""By mode ("": measuring), the parameters that it reads."""


@values.as_options({"replicas": "--replicas", "cores": "--cores", "watch": "--watch"})
def profile(
    context: typer.Context,
    source: Annotated[
        str | None, typer.Argument(metavar="SOURCE", help="The model to train; not needed with --network.")
    ] = None,
    batch_sizes: Annotated[
        str,
        typer.Option(
            metavar="N,N,...|auto",
            help="Local batch sizes, 1,2,4,8 by default; auto searches where throughput saturates.",
        ),
    ] = "",
    replicas: Annotated[
        str,
        typer.Option(
            metavar="N,N,...", help="How many processes to measure with; 1, and all of a torchrun job, by default."
        ),
    ] = "",
    accumulation: Annotated[
        str, typer.Option(metavar="N,N,...", help="Accumulation steps before the one that synchronises; 0 is none.")
    ] = "0",
    device: Annotated[str, typer.Option(**one_of("cpu", "cuda", help="Where it trains."))] = "cpu",
    device_name: Annotated[
        str, typer.Option(metavar="NAME", help="Name to write in the device column; cpu or cuda by default.")
    ] = "",
    precision: Annotated[str, typer.Option(metavar="SHARE", help="How well to know every step time.")] = "5%",
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Stop measuring after this long; 60s by default without --repeats.")
    ] = "",
    repeats: Annotated[
        int | None, typer.Option(help="Timed steps per configuration, in place of --precision.", min=1, max=MOST_STEPS)
    ] = None,
    warmup: Annotated[int, typer.Option(help="Untimed steps before them.", min=0, max=MOST_STEPS)] = 2,
    threads: Annotated[int, typer.Option(help="Threads of each process; 0 shares the cores.", min=0, max=4096)] = 0,
    memory: Annotated[
        str, typer.Option(metavar="SIZE|all", help="Search the largest batch that fits, by trying; all is a whole GPU.")
    ] = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the rows of -o FILE; measure what is missing.")
    ] = False,
    network: Annotated[
        bool,
        typer.Option("--network", help="Measure latency and bandwidth between --replicas processes (or torchrun's)."),
    ] = False,
    watch: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Record speed, CPU and memory of every process for N iterations, for balance.", min=1
        ),
    ] = None,
    cores: Annotated[
        str,
        typer.Option(metavar="N,N,...", help="The core that each process stays on.", rich_help_panel="With --watch"),
    ] = "",
    imports: Annotated[
        list[Path] | None,
        typer.Option(
            "--import", metavar="FILE", help="AdaptDL table, profiler trace, telemetry or profile.csv; may be repeated."
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(help="Nodes of a profiler trace that does not say.", min=1, rich_help_panel="With --import"),
    ] = None,
    output: Output = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Measure training steps here, or the network; watch workers; or import measurements."""
    # Long, but flat: it hands each mode its share of the options.
    with _one_voice():
        check_outputs(imports or [], {"-o": output})
        mode = _mode({"--network": network, "--watch": watch, "--import": imports})
        demand_part(context, mode or "measuring", _PARTS[mode])
        if source is None and "source" in _PARTS[mode]:
            raise InputError("SOURCE", "is missing", "give a model, for example zoo:resnet32, or --network")
        sizes: tuple[int, ...] | None = () if batch_sizes == "auto" else None
        if sizes is None and batch_sizes:
            sizes = values.integers(batch_sizes, "--batch-sizes", most=LARGEST_BATCH)
        counts = values.integers(replicas, "--replicas", most=MOST_REPLICAS) if replicas else None
        if imports:
            one = "give the one {} of the imported trace".format
            given = {
                "batch_size": values.single(sizes, batch_sizes, "--batch-sizes", one("size")),
                "num_nodes": nodes,
                "num_replicas": values.single(counts, replicas, "--replicas", one("number")),
            }
            profile_import(imports, output, as_json, device=device_name or None, **given)
        elif network:
            profile_network(max((2, *(counts or ()))), output, as_json)
        elif watch:
            remedy = "give the one size that every process trains with"
            size = values.single(sizes, batch_sizes, "--batch-sizes", remedy)
            pinned = values.integers(cores, "--cores", least=0, ordered=False, once=False) if cores else None
            watching = WatchRequest(
                source=source or "",
                resolver=RESOLVER,
                batch=size or 8,
                workers=max(counts or (2,)),
                iterations=watch,
                cores=pinned,
                seed=seed,
            )
            profile_watch(watching, output, as_json)
        else:
            if repeats is not None and is_given(context, "precision"):
                problem = "has no part beside --repeats, which takes its place"
                raise InputError("--precision", problem, "give one of the two")
            if repeats is not None and batch_sizes == "auto":
                raise InputError("--batch-sizes", "auto searches with --precision", "leave --repeats out")
            if device not in ("cpu", "cuda"):
                raise InputError("--device", f"unknown device {device!r}", "cpu or cuda")
            place = job_from_environment()
            if resume and not threads and place is None and output is not None and output.is_file():
                # The default depends on the numbers of replicas, and what is missing may be fewer than were measured.
                threads = threads_of(output)
            otherwise_s = math.inf if repeats is not None else BUDGET_S
            request = MeasureRequest(
                source=source or "",
                resolver=RESOLVER,
                batch_sizes=(1, 2, 4, 8) if sizes is None else sizes,
                replicas=counts or tuple(sorted({1, place.world_size if place is not None else 1})),
                accumulation=values.integers(accumulation, "--accumulation", least=0, most=MOST_STEPS),
                device=device,
                device_name=device_name or device,
                threads=threads,
                processes=place.local_world_size if place is not None else 0,
                warmup=warmup,
                repeats=repeats,
                precision=values.share(precision, "--precision"),
                budget_s=values.budget(budget, "--budget") if budget else otherwise_s,
                seed=seed,
            )
            _measure(request, place, memory, output, resume=resume, as_json=as_json)


@contextlib.contextmanager
def _one_voice() -> Iterator[None]:
    """Let the errors of a torchrun job's ranks other than 0 end the process with their exit code, and without a word."""
    if "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0":
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal tells rank 0 as well, and it ends all
    try:
        yield
    except DdlToolError as error:
        raise SystemExit(error.exit_code) from None


def _mode(asked: Mapping[str, object]) -> str:
    """Return the option of the one mode that is asked for, "" for measuring. Raises InputError for two."""
    modes = [name for name, on in asked.items() if on]
    if len(modes) > 1:
        raise InputError(modes[1], f"has no part in {modes[0]}", "give one of the two")
    return modes[0] if modes else ""


def _measure(
    request: MeasureRequest, place: Place | None, memory: str, output: Path | None, *, resume: bool, as_json: bool
) -> None:
    """Measure, write and print. Under torchrun every rank calls this, and rank 0 does all but its share of the steps."""
    if place is not None and place.rank > 0:
        with (
            _prints_elsewhere(),
            Job(place, request.subject(), request.replicas, lambda e: os._exit(e.exit_code)) as job,
        ):
            job.prepare()
            job.follow()
        return
    file = RowFile(output, request, resume=resume)
    budget = _budget(memory, request.device) if memory else None
    with kept(file), _leading(request, place) as job:
        result = measured(request, file, memory_bytes=budget, job=job, tell=note, stage=progress)
    if as_json:
        print_json(result)
    else:
        _show(result)
        tell_written(output)


@contextlib.contextmanager
def _leading(request: MeasureRequest, place: Place | None) -> Iterator[Job | None]:
    """Yield rank 0's side of the torchrun job, None outside one."""
    if place is None:
        yield None
        return

    def leave(error: DdlToolError) -> NoReturn:
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201 - the main thread cannot speak any more
        os._exit(error.exit_code)

    job = Job(place, request.subject(), request.replicas, leave)

    def stopped(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise DdlToolError(f"{job.where}: stopped by torchrun (a process of the job ended, or the job was stopped)")

    before = signal.signal(signal.SIGTERM, stopped)
    try:
        with _prints_elsewhere(), job:
            yield job
    finally:
        if signal.getsignal(signal.SIGTERM) is stopped:
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _prints_elsewhere() -> Iterator[None]:
    """Send what the user's module prints to stderr: it runs in this process, whose stdout carries the result."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _budget(memory: str, device: str) -> float:
    """Return the bytes that ``--memory`` allows."""
    if memory != "all":
        return parse_bytes(memory, "--memory")
    if device != "cuda":
        raise InputError("--memory", "all is for GPUs", "give a size, such as 2GiB: a CPU shares its memory")
    return device_memory("cuda")


def _show(found: ProfileResult) -> None:
    """Print the measured rows and what they say about the device."""
    accumulates = any(row["accumulation_steps"] for row in found.rows)
    rows = [
        (
            str(row["device"]),
            str(row["num_replicas"]),
            *((str(row["accumulation_steps"]),) if accumulates else ()),
            str(row["local_batch_size"]),
            show_seconds(row["step_time_s"]),
            f"{width(row):.1%}",
            str(int(row["repeats"])),
            show_seconds(row["sync_time_s"]),
            show_bytes(row["peak_memory_bytes"]),
        )
        for row in found.rows
    ]
    extra = ("accum",) if accumulates else ()
    columns = ("device", "replicas", *extra, "batch", "step", "+-", "steps", "sync", "memory")
    console = out()
    console.print(table("Step times (median, half its 95 % interval) and peak memory, measured", columns, rows))
    for item in found.skipped:
        passes = f", {item.accumulation_steps} accumulation steps" if item.accumulation_steps else ""
        guess = f": {show_seconds(item.predicted_step_time_s)}" if item.predicted_step_time_s else ""
        where = f"batch {item.local_batch_size} on {counted(item.num_replicas, 'replica')}{passes}"
        console.print(f"not measured: {where}{guess} ({item.reason})")
    for name, curve in found.devices.items():
        overhead = show_seconds(curve.launch_overhead_s)
        console.print(f"{name}: launch overhead {overhead}, saturates at batch {curve.saturation_batch}")
        if curve.linear_from_batch is not None:
            slope = show_seconds(curve.seconds_per_sample)
            console.print(f"{name}: linear from batch {curve.linear_from_batch} on, {slope} per sample")
        how = "predicted by extrapolation"
        if found.memory is not None:
            how = f"measured, {len(found.memory.tries)} tries within {show_bytes(found.memory.budget_bytes)}"
        limit = f"at batch {curve.memory_limit_batch} ({how})"
        if curve.memory_limit_batch is None:
            limit = "unknown: the peaks do not grow with the batch; search it with --memory SIZE"
        console.print(f"{name}: memory limit {limit}")


def profile_network(processes: int, output: Path | None, as_json: bool) -> None:
    """Measure and print; rank 0 speaks for all."""
    with progress("measuring the network") as advance:
        found = measure_network(processes, progress=lambda done, total: advance(done, f"pair {done} of {total}"))
    if int(os.environ.get("RANK", "0")) != 0:
        return
    if output is not None:
        save(found, output)
    if as_json:
        print_json(found)
        return
    together = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE", "-")
    show(network_section(found.model_copy(update={"local": found.local or together}), "this job"), output)


def profile_import(
    files: Sequence[Path],
    output: Path | None,
    as_json: bool,
    *,
    device: str | None = None,
    batch_size: int | None = None,
    num_nodes: int | None = None,
    num_replicas: int | None = None,
) -> None:
    """Read the files, write one profile when ``output`` is given, and print what each file gave and the profile covers.

    ``device`` names the device of all rows; the three numbers are what a profiler trace does not always say.
    """
    frame, sources = import_files(
        files, device=device, batch_size=batch_size, num_nodes=num_nodes, num_replicas=num_replicas
    )
    if output is not None:
        write_profile(frame, output)
    for source in sources:
        for remark in source.remarks:
            note(f"{source.path}: {remark}")
    if as_json:
        print_json(ProfileResult(rows=records(frame), sources=sources))
        return
    console = out()
    rows = [(Path(source.path).name, source.kind, f"{source.rows:,}") for source in sources]
    console.print(table("Imported", ("file", "kind", "rows"), rows, text_columns=2))
    for name, part in frame.groupby("device", sort=True):
        batches, replicas = part["local_batch_size"], part["num_replicas"]
        say(
            f"{name}: {len(part):,} rows, local batch {batches.min()} to {batches.max()}, {replicas.min()} to "
            f"{replicas.max()} replicas on up to {part['num_nodes'].max()} nodes"
        )
    tell_written(output)


def profile_watch(request: WatchRequest, output: Path | None, as_json: bool) -> None:
    """Train in local processes in lockstep, write what each did as CSV, and print a summary.

    Raises DdlToolError when a worker is lost; what was recorded until then is written all the same.
    """
    try:
        with progress("watching", request.iterations) as advance:
            rows = record(request, lambda done: advance(done, f"{done} of {request.iterations}"))
    except WatchLost as lost:
        kept = f"the {len(lost.rows) // request.workers} iterations that all workers completed"
        if not lost.rows:
            kept = "no iteration was complete, so nothing is written"
        elif output is None:
            kept += " are lost: name a file with -o"
        else:
            write_rows(lost.rows, output)
            kept += f" are in {output}"
        raise DdlToolError(f"{request.source}: {lost}; {kept}") from None
    if output is not None:
        write_rows(rows, output)
    found = summarise(rows, request.batch)
    if as_json:
        print_json(found)
    else:
        _show_watched(found, output)


def _show_watched(found: WatchResult, output: Path | None) -> None:
    """Print a row per worker and what balancing could gain."""
    rows = [
        (
            one.worker,
            f"{one.speed:.4g}",
            f"{one.speed_low:.4g} to {one.speed_high:.4g}",
            f"{one.cpu:.0%}",
            f"{one.memory:.0%}",
        )
        for one in found.workers
    ]
    title = f"{found.iterations} iterations with {found.batch} samples per worker, measured"
    columns = ("worker", "samples/s", "10 to 90 %", "CPU", "memory")
    caption = "samples/s: median without waiting; CPU and memory: mean shares that the worker could expect"
    console = out()
    console.print(table(title, columns, rows, caption=caption))
    equal_s, known_s = found.equal_split_s, found.speeds_known_s
    console.print(
        f"Computing takes {show_seconds(equal_s)} with equal batches, {show_seconds(known_s)} with batches by known "
        f"speeds ({1 - known_s / equal_s:.0%} less)."
    )
    if output is not None:
        say(f"wrote {output}; next: ddltool balance {output}")
