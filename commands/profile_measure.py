"""``ddltool profile SOURCE``: from options to a request, and from what was measured to a table or JSON."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ddltool.commands import values
from ddltool.errors import DdlToolError, InputError, Interrupted

if TYPE_CHECKING:
    import pandas as pd

    from ddltool.analyzers.goodput.curve import CurveSummary
    from ddltool.runtime.measuring.campaign import Measured, MeasureRequest, RowFile
    from ddltool.runtime.measuring.memory import MemoryLimit
    from ddltool.runtime.measuring.torchrun_job import Place

RESOLVER = "ddltool.analyzers.loading.sources:training_step"
_BUDGET_S = 60.0
"""How long a measurement may go on that is told neither its budget nor its number of steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How many steps of each configuration are timed: a number of them, or until their time is known well enough."""

    precision: float
    budget_s: float
    repeats: int | None
    warmup: int

    @classmethod
    def read(cls, *, precision: str, budget: str, repeats: int | None, warmup: int) -> Sampling:
        """Return what the options of these names say. Raises InputError for texts that are no share and no time."""
        otherwise_s = math.inf if repeats is not None else _BUDGET_S
        return cls(
            precision=values.share(precision, "--precision"),
            budget_s=values.budget(budget, "--budget") if budget else otherwise_s,
            repeats=repeats,
            warmup=warmup,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureOptions:
    """The command line's options, as numbers where they do not depend on the machine."""

    source: str
    batch_sizes: tuple[int, ...]
    replicas: tuple[int, ...]
    accumulation: tuple[int, ...]
    device: str
    device_name: str
    sampling: Sampling
    threads: int
    memory: str
    resume: bool
    seed: int


def profile_model(options: MeasureOptions, output: Path | None, as_json: bool) -> None:
    """Measure, write and print. Under torchrun every rank calls this, and rank 0 does all but its share of the steps."""
    from ddltool.commands.output import note, print_json
    from ddltool.commands.profile_output import as_document, shortfalls, show_profile
    from ddltool.runtime.measuring.campaign import RowFile, reliability, settings_of, source_name, threads_of
    from ddltool.runtime.measuring.torchrun_job import job_from_environment

    if options.device not in ("cpu", "cuda"):
        raise InputError("--device", f"unknown device {options.device!r}", "cpu or cuda")
    place = job_from_environment()
    if options.resume and not options.threads and place is None and output is not None and output.is_file():
        # The default depends on the numbers of replicas, and what is missing may be fewer than were measured.
        options = replace(options, threads=threads_of(output))
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
    from ddltool.runtime.measuring.campaign import MeasureRequest, source_name

    world = place.world_size if place is not None else 1
    sampling = options.sampling
    if not options.batch_sizes and sampling.repeats is not None:
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
        warmup=sampling.warmup,
        repeats=sampling.repeats,
        precision=sampling.precision,
        budget_s=sampling.budget_s,
        seed=options.seed,
    )


def measure_with_progress(request: MeasureRequest) -> pd.DataFrame:
    """Return the measured rows, with a progress bar while they come in."""
    from ddltool.commands.output import progress
    from ddltool.runtime.measuring.campaign import measure

    with progress("measuring", len(request.batch_sizes) * len(request.replicas)) as advance:
        return measure(request, progress=lambda state: advance(state.done, state.remark))


def _lead(
    request: MeasureRequest, options: MeasureOptions, file: RowFile, place: Place | None
) -> tuple[Measured, MemoryLimit | None]:
    """Search the memory limit if it was asked for, then measure; batches beyond the limit are not tried."""
    from ddltool.commands.output import progress
    from ddltool.runtime.measuring.campaign import LARGEST_BATCH, campaign

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
    from ddltool.runtime.measuring.torchrun_job import Job

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
    from ddltool.runtime.measuring.torchrun_job import Job

    def leave(error: DdlToolError) -> NoReturn:
        os._exit(error.exit_code)

    with _prints_elsewhere(), Job(place, request.subject(), request.replicas, leave) as job:
        job.prepare()
        job.follow()


@contextlib.contextmanager
def _tell_what_is_kept(file: RowFile) -> Iterator[None]:
    """Let the line of a failure or a Ctrl-C end with the rows that it leaves behind."""
    try:
        yield
    except (DdlToolError, KeyboardInterrupt) as error:
        if not file.written:
            raise
        rows = "1 row is" if file.written == 1 else f"{file.written} rows are"
        kept = f"{rows} in {file.path}; --resume goes on from there"
        if isinstance(error, DdlToolError):
            error.args = (f"{error}; {kept}",)
            raise
        raise Interrupted(kept) from None


def _memory_limit(
    request: MeasureRequest, options: MeasureOptions, progress: Callable[[str], None]
) -> MemoryLimit | None:
    """Return the measured memory limit, None when none was asked for."""
    from ddltool.runtime.measuring.memory import measure_limit

    if not options.memory:
        return None
    if options.memory == "all":
        if request.device != "cuda":
            raise InputError("--memory", "all is for GPUs", "give a size, such as 2GiB: a CPU shares its memory")
        budget_bytes = _device_memory("cuda")
    else:
        budget_bytes = values.size(options.memory, "--memory")
    return measure_limit(request.subject(), budget_bytes, progress=progress)


def _device_memory(device: str) -> float:
    """Return the bytes that the device has: all of the GPU's, or what is free in main memory."""
    if device == "cuda":
        import torch

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
