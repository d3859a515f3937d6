"""``ddltool profile SOURCE``: step times, synchronisation and memory on this machine."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from ddltool.commands.declaring import called
from ddltool.commands.options import Seed, budget, integers, is_given, one_of, share, within
from ddltool.commands.output import note, out, print_json, progress, table, tell_written
from ddltool.errors import DdlToolError, InputError
from ddltool.results import ProfileResult
from ddltool.runtime.measuring.campaign import (
    LARGEST_BATCH,
    MOST_REPLICAS,
    MOST_STEPS,
    MeasureRequest,
    RowFile,
    threads_of,
)
from ddltool.runtime.measuring.profiling import BUDGET_S, RESOLVER, device_memory, kept, measured, width
from ddltool.runtime.measuring.torchrun_job import Job, Place, job_from_environment
from ddltool.units import counted, parse_bytes, show_bytes, show_seconds

_replicas = partial(integers, most=MOST_REPLICAS)
_accumulation = partial(integers, least=0, most=MOST_STEPS)


def _sizes(text: str, where: str) -> tuple[int, ...]:
    return () if text == "auto" else integers(text, where, most=LARGEST_BATCH)


def profile(
    context: typer.Context,
    source: str,
    batch_sizes: Annotated[tuple[int, ...], _sizes] = (1, 2, 4, 8),
    replicas: Annotated[tuple[int, ...] | None, _replicas] = None,
    accumulation: Annotated[tuple[int, ...], _accumulation] = (0,),
    device: Annotated[str, one_of("cpu", "cuda")] = "cpu",
    device_name: str = "",
    precision: Annotated[float, share] = 0.05,
    budget_s: Annotated[float | None, budget] = None,
    repeats: Annotated[int | None, within(1, MOST_STEPS)] = None,
    warmup: Annotated[int, within(0, MOST_STEPS)] = 2,
    threads: Annotated[int, within(0, 4096)] = 0,
    memory: str = "",
    resume: bool = False,
    output: Path | None = None,
    seed: Seed = 0,
    as_json: bool = False,
) -> None:
    """Measure training steps here: step time, synchronisation and memory by batch size and number of processes."""
    if repeats is not None and is_given(context, "precision"):
        problem = "has no part beside --repeats, which takes its place"
        raise InputError("--precision", problem, "give one of the two")
    if repeats is not None and not batch_sizes:
        raise InputError("--batch-sizes", "auto searches with --precision", "leave --repeats out")
    place = job_from_environment()
    if resume and not threads and place is None and output is not None and output.is_file():
        # The default depends on the numbers of replicas, and what is missing may be fewer than were measured.
        threads = threads_of(output)
    request = called(
        context,
        MeasureRequest,
        resolver=RESOLVER,
        batch_sizes=batch_sizes,
        replicas=replicas or tuple(sorted({1, place.world_size if place is not None else 1})),
        device_name=device_name or device,
        threads=threads,
        processes=place.local_world_size if place is not None else 0,
        repeats=repeats,
        budget_s=budget_s or (math.inf if repeats is not None else BUDGET_S),
    )
    _measure(request, place, memory, output, resume=resume, as_json=as_json)


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
        if curve.memory_limit_batch is not None:
            most = curve.memory_limit_batch if found.memory is not None else float(f"{curve.memory_limit_batch:.3g}")
            limit = f"at batch {most:,.0f} ({how})"
        else:
            limit = "unknown: the peaks do not grow with the batch; search it with --memory SIZE"
        console.print(f"{name}: memory limit {limit}")
