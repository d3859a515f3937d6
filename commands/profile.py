"""``ddltool profile SOURCE``: step times, synchronisation and memory on this machine."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from ddltool.analyzers.step.tracing.sources import Source
from ddltool.commands.options import AS_TEXT, Seed, budget, integers, is_follower, one_of, share, within
from ddltool.commands.output import out, print_json, progress, say, table, tell_written
from ddltool.commands.verbs import VerbCall, is_given, verb
from ddltool.errors import DdlToolError, InputError, known
from ddltool.results import ProfileResult, WatchResult
from ddltool.runtime.measuring.campaign import (
    LARGEST_BATCH,
    MOST_REPLICAS,
    MOST_STEPS,
    MeasureRequest,
    ProfileFile,
    threads_of,
)
from ddltool.runtime.measuring.profiling import BUDGET_S, RESOLVER, device_memory, half_width_of, keeping_rows, measured
from ddltool.runtime.measuring.rendezvous import Place, job_from_environment
from ddltool.runtime.measuring.torchrun_job import TorchrunJob
from ddltool.runtime.measuring.training import MEASURED, OPTIMIZERS, checked_precision
from ddltool.runtime.measuring.watch import WatchLost, WatchRequest, record, summarise, write_rows
from ddltool.stages import Stage, Tell, log_remark, quietly
from ddltool.units import counted, parse_bytes, show_bytes, show_seconds

# Readers of options: functions of (text, option).
_replicas = partial(integers, most=MOST_REPLICAS)
_accumulation = partial(integers, least=0, most=MOST_STEPS)


def _sizes(text: str, where: str) -> tuple[int, ...]:
    """Return the batch sizes in a text such as ``1,2,4``; () for ``auto``, a search. Raises InputError for other texts."""
    return () if text == "auto" else integers(text, where, most=LARGEST_BATCH)


@verb
def profile(
    source: Annotated[Source, AS_TEXT],
    *,
    batch_sizes: Annotated[Sequence[int] | None, _sizes] = (1, 2, 4, 8),
    replicas: Annotated[Sequence[int] | None, _replicas] = None,
    accumulation: Annotated[Sequence[int], _accumulation] = (0,),
    device: Annotated[str, one_of("cpu", "cuda")] = "cpu",
    device_name: str | None = None,
    precision: Annotated[str, {**one_of(*MEASURED), "reader": lambda text, _: text}] = "fp32",
    optimizer: Annotated[str, one_of(*OPTIMIZERS)] = "sgd",
    half_width: Annotated[float, share] = 0.05,
    time_limit_s: Annotated[float | None, budget] = None,
    repeats: Annotated[int | None, within(1, MOST_STEPS)] = None,
    warmup: Annotated[int, within(0, MOST_STEPS)] = 2,
    threads: Annotated[int, within(0, 4096)] = 0,
    memory: Annotated[str | float | None, AS_TEXT] = None,
    resume: bool = False,
    output: str | Path | None = None,
    seed: Seed = 0,
    tell: Tell = log_remark,
    stage: Stage = quietly,
) -> ProfileResult:
    """Measure training steps here: step time, synchronisation and memory by batch size and number of processes.

    The steps run in processes of their own, or in those of the torchrun job that this is part of: there every rank
    calls it, and ranks above 0 return a result without rows.

    ``source``: a torch source as a text, which those processes build. ``batch_sizes`` None: a search for the batch at
    which throughput saturates. ``replicas`` (numbers of processes) None: 1, and that of a torchrun job.
    ``accumulation``: numbers of passes before the one that synchronises. Steps run on ``device`` ("cpu" or "cuda"), which
    the rows call ``device_name`` (None: the same). ``precision`` (number format) and ``optimizer``: those of the measured
    steps. ``threads``: of each process; 0: its share of the cores.

    ``half_width``: steps are repeated until half of the 95 % interval of their time is at most this share of it, or until
    ``time_limit_s`` (None: 60 s) is over; ``repeats``: this number of timed steps instead, without a limit of time unless
    one is given. ``warmup``: untimed steps before them. ``memory``: search the largest
    batch that fits into so many bytes, a number or a text such as ``2GiB``; ``all``: a whole GPU. ``output``: profile.csv,
    written row by row; ``resume`` keeps the rows that it has.

    Raises InputError for a source that cannot be built or run, and for settings that contradict each other.
    """
    if not isinstance(source, (str, Path)):
        remedy = "name a function that makes it: package.module:factory or path/file.py:factory"
        raise InputError("source", f"a {type(source).__name__} cannot be handed to other processes", remedy)
    if device not in ("cpu", "cuda"):
        raise InputError("device", f"unknown device {device!r}", "cpu or cuda")
    numerics = checked_precision(precision, device)
    known("optimizer", optimizer, OPTIMIZERS)
    if repeats is not None and is_given("half_width"):
        problem = "has no part beside --repeats, which takes its place"
        raise InputError("half_width", problem, "give one of the two")
    if repeats is not None and not batch_sizes:
        raise InputError("batch_sizes", "auto searches with --half-width", "leave --repeats out")
    place = job_from_environment()
    path = None if output is None else Path(output)
    if resume and not threads and place is None and path is not None and path.is_file():
        # The file's number of threads: the default depends on the replicas, of which some may be measured already.
        threads = threads_of(path)
    request = MeasureRequest(
        source=str(source),
        resolver=RESOLVER,
        batch_sizes=tuple(batch_sizes or ()),
        replicas=tuple(replicas or sorted({1, place.world_size if place is not None else 1})),
        accumulation=tuple(accumulation),
        device=device,
        device_name=device_name or device,
        threads=threads,
        processes=place.local_world_size if place is not None else 0,
        warmup=warmup,
        repeats=repeats,
        half_width=half_width,
        numerics=numerics,
        optimizer=optimizer,
        budget_s=time_limit_s or (math.inf if repeats is not None else BUDGET_S),
        seed=seed,
    )
    # Rank 0 leads the measurement and has the rows; the other ranks only take part in the steps.
    if place is not None and place.rank > 0:
        _follow_rank_0(request, place)
        return ProfileResult(rows=[])
    file = ProfileFile(path, request, resume=resume)
    limit = None if memory is None else _memory_budget(memory, device)
    with keeping_rows(file), _leading_job(request, place) as job:
        return measured(request, file, memory_bytes=limit, job=job, tell=tell, stage=stage)


def show_profile(call: VerbCall[ProfileResult], output: Path | None = None, as_json: bool = False) -> None:
    """Print the measured rows; in a torchrun job only rank 0 does."""
    result = call()
    if is_follower():
        return
    if as_json:
        print_json(result)
    else:
        _print_profile(result)
        tell_written(output)


def _follow_rank_0(request: MeasureRequest, place: Place) -> None:
    """Run the steps of a rank above 0, as rank 0 of the torchrun job demands, until the measurement is over.

    ``request``: the measurement, the same on all ranks; ``place``: this process's rank in the job. Raises DdlToolError if
    the job fails, after it has printed the error.
    """
    with _stdout_to_stderr(), TorchrunJob(place, request.subject(), request.replicas) as job:
        try:
            job.prepare()
            job.follow()
        except DdlToolError as error:  # printed here, as main() prints errors of rank 0 alone
            print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201
            raise


@contextlib.contextmanager
def _leading_job(request: MeasureRequest, place: Place | None) -> Iterator[TorchrunJob | None]:
    """Yield rank 0's side of the torchrun job, through which it tells the other ranks what to do; None outside of a job.

    During the body, stdout is redirected (:func:`_stdout_to_stderr`), and a SIGTERM by torchrun raises DdlToolError.
    ``request``: the measurement; ``place``: this process's rank in the job; None: there is no job.
    """
    if place is None:
        yield None
        return

    job = TorchrunJob(place, request.subject(), request.replicas)

    def stopped(number: int, frame: object) -> None:
        """Raise the job's error; a second SIGTERM is ignored, so that it does not disturb the clean-up."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        problem = "stopped by torchrun (a process of the job ended, or the job was stopped)"
        raise job.failure(DdlToolError(f"{job.where}: {problem}"))

    # torchrun sends SIGTERM to all ranks when one has failed.
    before = signal.signal(signal.SIGTERM, stopped)
    try:
        with _stdout_to_stderr(), job:
            yield job
    finally:
        # A handler that the user's module has set in the meantime stays.
        if signal.getsignal(signal.SIGTERM) is stopped:
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr in the body: the user's module runs in this process and may print; stdout is for the result."""
    sys.stdout.flush()  # what is in Python's buffer belongs to the old stdout
    # By file descriptors (1: stdout, 2: stderr), as C code and child processes print there too.
    stdout_copy = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)


def _memory_budget(memory: str | float, device: str) -> float:
    """Return the bytes that a search for the memory limit may use.

    ``memory``: a number, a text such as ``2GiB``, or ``all`` of a GPU. ``device``: cpu or cuda. Raises InputError for any
    other text, and for ``all`` of a CPU.
    """
    if not isinstance(memory, str):
        return memory
    if memory != "all":
        return parse_bytes(memory, "memory")
    if device != "cuda":
        raise InputError("memory", "all is for GPUs", "give a size, such as 2GiB: a CPU shares its memory")
    return device_memory("cuda")


def _print_profile(result: ProfileResult) -> None:
    """Print the measured rows, the skipped configurations with reasons, and each device's overhead and limits."""
    accumulates = any(row["accumulation_steps"] for row in result.rows)
    columns = ["device", "replicas", "batch", "step", "+-", "steps", "sync", "memory"]
    rows = [
        [
            str(row["device"]),
            str(row["num_replicas"]),
            str(row["local_batch_size"]),
            show_seconds(row["step_time_s"]),
            f"{half_width_of(row):.1%}",
            str(int(row["repeats"])),
            show_seconds(row["sync_time_s"]),
            show_bytes(row["peak_memory_bytes"]),
        ]
        for row in result.rows
    ]
    if accumulates:  # else a column of zeros would say nothing
        columns.insert(2, "accum")
        for cells, row in zip(rows, result.rows, strict=True):
            cells.insert(2, str(row["accumulation_steps"]))
    console = out()
    console.print(table("Step times (median, half its 95 % interval) and peak memory, measured", columns, rows))
    for skipped in result.skipped:
        passes = f", {skipped.accumulation_steps} accumulation steps" if skipped.accumulation_steps else ""
        guess = f": {show_seconds(skipped.predicted_step_time_s)}" if skipped.predicted_step_time_s else ""
        where = f"batch {skipped.local_batch_size} on {counted(skipped.num_replicas, 'replica')}{passes}"
        console.print(f"not measured: {where}{guess} ({skipped.reason})")
    for name, curve in result.devices.items():
        overhead = show_seconds(curve.launch_overhead_s)
        console.print(f"{name}: launch overhead {overhead}, saturates at batch {curve.saturation_batch}")
        if curve.linear_from_batch is not None:
            slope = show_seconds(curve.seconds_per_sample)
            console.print(f"{name}: linear from batch {curve.linear_from_batch} on, {slope} per sample")
        how = "predicted by extrapolation"
        if result.memory is not None:
            how = f"measured, {len(result.memory.tries)} tries within {show_bytes(result.memory.budget_bytes)}"
        if curve.memory_limit_batch is not None:
            # An extrapolated limit is not known to more than three digits.
            most = curve.memory_limit_batch if result.memory is not None else float(f"{curve.memory_limit_batch:.3g}")
            limit = f"at batch {most:,.0f} ({how})"
        else:
            limit = "unknown: the peaks do not grow with the batch; search it with --memory SIZE"
        console.print(f"{name}: memory limit {limit}")


_cores = partial(integers, least=0, ordered=False, once=False)


def profile_watch(
    source: str,
    iterations: Annotated[int, within(1)] = 200,
    batch_size: Annotated[int, within(1, LARGEST_BATCH)] = 8,
    replicas: Annotated[int, within(1)] = 2,
    cores: Annotated[tuple[int, ...] | None, _cores] = None,
    output: Path | None = None,
    seed: Seed = 0,
    as_json: bool = False,
) -> None:
    """Train in local processes in lockstep and record speed, CPU and memory of each, for balance.

    ``source``: of the model. ``batch_size``: samples of each of the ``replicas`` processes in an iteration. ``cores``: one
    core for each process; None: any. ``output``: CSV file for the records; None: none is written. Raises DdlToolError if a
    worker is lost; what was recorded until then is written first.
    """
    sizes = {"batch": batch_size, "workers": replicas, "iterations": iterations}
    request = WatchRequest(source=source, resolver=RESOLVER, cores=cores, seed=seed, **sizes)
    try:
        with progress("watching", request.iterations) as advance:
            rows = record(request, lambda done: advance(done, f"{done} of {request.iterations}"))
    except WatchLost as lost:
        what_is_kept = f"the {len(lost.rows) // request.workers} iterations that all workers completed"
        if not lost.rows:
            what_is_kept = "no iteration was complete, so nothing is written"
        elif output is None:
            what_is_kept += " are lost: name a file with -o"
        else:
            write_rows(lost.rows, output)
            what_is_kept += f" are in {output}"
        raise DdlToolError(f"{request.source}: {lost}; {what_is_kept}") from None
    if output is not None:
        write_rows(rows, output)
    result = summarise(rows, request.batch)
    if as_json:
        print_json(result)
    else:
        _print_watched(result, output)


def _print_watched(result: WatchResult, output: Path | None) -> None:
    """Print a row for each worker, and the gain of batches by the workers' speeds.

    ``output``: the file to which the rows were written, named with the next command; None: none.
    """
    rows = [
        (
            worker.worker,
            f"{worker.speed:.4g}",
            f"{worker.speed_low:.4g} to {worker.speed_high:.4g}",
            f"{worker.cpu:.0%}",
            f"{worker.memory:.0%}",
        )
        for worker in result.workers
    ]
    title = f"{result.iterations} iterations with {result.batch} samples per worker, measured"
    columns = ("worker", "samples/s", "10 to 90 %", "CPU", "memory")
    caption = "samples/s: median without waiting; CPU and memory: mean shares that the worker could expect"
    console = out()
    console.print(table(title, columns, rows, caption=caption))
    equal_s, known_s = result.equal_split_s, result.speeds_known_s
    console.print(
        f"Computing takes {show_seconds(equal_s)} with equal batches, {show_seconds(known_s)} with batches by known "
        f"speeds ({1 - known_s / equal_s:.0%} less)."
    )
    if output is not None:
        say(f"wrote {output}; next: ddltool balance {output}")
