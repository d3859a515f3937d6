"""``ddltool profile SOURCE``: from options to a request, and from what was measured to a table or JSON."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ddltool.commands.profile_options import DEFAULT_BUDGET_S, size
from ddltool.errors import DdlToolError, InputError

if TYPE_CHECKING:
    import pandas as pd

    from ddltool.analyzers.goodput.curve import CurveSummary
    from ddltool.runtime.measure import Measured, MeasureRequest
    from ddltool.runtime.measure_files import RowFile
    from ddltool.runtime.measure_job import Place
    from ddltool.runtime.measure_memory import MemoryLimit

RESOLVER = "ddltool.commands.sources:training_step"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureOptions:
    """The command line's options, as numbers where they do not depend on the machine."""

    source: str
    batch_sizes: tuple[int, ...]
    replicas: tuple[int, ...]
    accumulation: tuple[int, ...]
    device: str
    device_name: str
    precision: float
    budget_s: float | None
    repeats: int | None
    warmup: int
    threads: int
    memory: str
    resume: bool
    seed: int


def profile_model(options: MeasureOptions, output: Path | None, as_json: bool) -> None:
    """Measure, write and print. Under torchrun every rank calls this, and rank 0 does all but its share of the steps."""
    from ddltool.commands.output import note, print_json
    from ddltool.commands.profile_output import as_document, shortfalls, show_profile
    from ddltool.runtime.measure import reliability, settings_of
    from ddltool.runtime.measure_files import RowFile, source_name
    from ddltool.runtime.measure_job import job_from_environment

    if options.device not in ("cpu", "cuda"):
        raise InputError("--device", f"unknown device {options.device!r}", "cpu or cuda")
    place = job_from_environment()
    request = request_of(options, place)
    if place is not None and place.rank > 0:
        _follow(request, place)
        return
    file = RowFile(
        output,
        resume=options.resume,
        device=request.device_name,
        source=source_name(request.source),
        settings=settings_of(request),
    )
    with _tell_what_is_kept(file):
        found, limit = _lead(request, options, file, place)
    file.close(found.frame)
    summaries = summarise_profile(found.frame, request, limit)
    for warning in [*reliability(found.frame), *shortfalls(found, request)]:
        note(f"warning: {warning}")
    if as_json:
        print_json(as_document(found, summaries, limit))
    else:
        show_profile(found, summaries, limit, output)


def request_of(options: MeasureOptions, place: Place | None) -> MeasureRequest:
    """Return the request, with the defaults that depend on each other filled in."""
    from ddltool.runtime.measure import MeasureRequest
    from ddltool.runtime.measure_files import source_name

    world = place.world_size if place is not None else 1
    budget_s = options.budget_s or (math.inf if options.repeats is not None else DEFAULT_BUDGET_S)
    if not options.batch_sizes and options.repeats is not None:
        raise InputError("--batch-sizes", "auto searches with --precision", "leave --repeats out")
    return MeasureRequest(
        source=options.source,
        source_name=source_name(options.source),
        resolver=RESOLVER,
        batch_sizes=options.batch_sizes,
        replicas=options.replicas or tuple(sorted({1, world})),
        accumulation=options.accumulation,
        device=options.device,
        device_name=options.device_name,
        threads=options.threads,
        processes=place.local_world_size if place is not None else 0,
        warmup=options.warmup,
        repeats=options.repeats,
        precision=options.precision,
        budget_s=budget_s,
        seed=options.seed,
    )


def measure_with_progress(request: MeasureRequest) -> pd.DataFrame:
    """Return the measured rows, with a progress bar while they come in."""
    from ddltool.commands.output import progress
    from ddltool.runtime.measure import measure

    with progress("measuring", len(request.batch_sizes) * len(request.replicas)) as advance:
        return measure(request, progress=lambda state: advance(state.done, state.remark))


def _lead(
    request: MeasureRequest, options: MeasureOptions, file: RowFile, place: Place | None
) -> tuple[Measured, MemoryLimit | None]:
    """Search the memory limit if it was asked for, then measure; batches beyond the limit are not tried."""
    from ddltool.commands.output import progress
    from ddltool.runtime.measure import LARGEST_BATCH, campaign

    with _job(request, place) as job, progress("measuring") as advance:
        limit = _memory_limit(request, options, lambda remark: advance(0, f"memory: {remark}"))
        if limit is not None and limit.batch is not None and limit.batch < 1:
            raise InputError("--memory", f"even batch 1 needs more than {options.memory}", "give more")
        if job is not None:
            job.prepare()
        found = campaign(
            request,
            executor=job,
            known=file.known,
            on_rows=file.write,
            progress=lambda state: advance(0, f"{state.remark} ({state.done} of {state.total})"),
            largest_batch=limit.batch if limit is not None and limit.batch is not None else LARGEST_BATCH,
        )
        if job is not None:
            job.finish()
    return found, limit


@contextlib.contextmanager
def _job(request: MeasureRequest, place: Place | None) -> Iterator[Any]:
    """Yield rank 0's side of the torchrun job, None outside one."""
    if place is None:
        yield None
        return
    from ddltool.runtime.measure_job import Job

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


def _follow(request: MeasureRequest, place: Place) -> None:
    """Be one of the other ranks."""
    from ddltool.runtime.measure_job import Job

    def leave(error: DdlToolError) -> NoReturn:
        os._exit(error.exit_code)

    with _prints_elsewhere(), Job(place, request.subject(), request.replicas, leave) as job:
        job.prepare()
        job.follow()


@contextlib.contextmanager
def _tell_what_is_kept(file: RowFile) -> Iterator[None]:
    """Say on stderr which rows a failure or a Ctrl-C leaves behind."""
    from ddltool.commands.output import note

    try:
        yield
    except (DdlToolError, KeyboardInterrupt):
        if file.written:
            note(f"{file.written} rows are in {file.path}; --resume goes on from there")
        raise


def _memory_limit(
    request: MeasureRequest, options: MeasureOptions, progress: Callable[[str], None]
) -> MemoryLimit | None:
    """Return the measured memory limit, None when none was asked for."""
    from ddltool.runtime.measure_memory import measure_limit

    if not options.memory:
        return None
    if options.memory == "all":
        if request.device != "cuda":
            raise InputError("--memory", "all is for GPUs", "give a size, such as 2GiB: a CPU shares its memory")
        budget_bytes = _device_memory("cuda")
    else:
        budget_bytes = size(options.memory, "--memory")
    return measure_limit(request.subject(), budget_bytes, progress=progress)


def _device_memory(device: str) -> float:
    """Return the bytes that the device has: all of the GPU's, or what is free in main memory."""
    if device == "cuda":
        import torch

        from ddltool.errors import InputError

        if not torch.cuda.is_available():
            raise InputError(
                "--device", "cuda has 0 devices here", "use --device cpu, or --analytic for a GPU elsewhere"
            )
        return float(torch.cuda.get_device_properties(0).total_memory)
    import psutil

    return float(psutil.virtual_memory().available)


def summarise_profile(
    frame: pd.DataFrame, request: MeasureRequest, limit: MemoryLimit | None
) -> dict[str, CurveSummary]:
    """Return launch overhead, saturation and memory limit per device."""
    from ddltool.analyzers.goodput.curve import summarise

    if limit is not None:
        return summarise(frame, None, {request.device_name: limit.batch})
    return summarise(frame, _device_memory(request.device))
