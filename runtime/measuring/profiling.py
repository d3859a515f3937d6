"""Real training steps timed on this machine, as one result. Start at :func:`profile`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ddltool.analyzers.goodput.curve import summarise
from ddltool.analyzers.loading.sources import Source
from ddltool.errors import DdlToolError, InputError, Interrupted
from ddltool.profiles import records
from ddltool.results import MemorySearch, MemoryTry, ProfileResult
from ddltool.runtime.measuring.campaign import LARGEST_BATCH, MeasureRequest, RowFile, campaign, reliability
from ddltool.runtime.measuring.memory import measure_limit
from ddltool.runtime.measuring.torchrun_job import Job
from ddltool.stages import Stage, Tell, log_remark, quietly
from ddltool.units import show_bytes

RESOLVER = "ddltool.analyzers.loading.sources:training_step"
BUDGET_S = 60.0
"""How long a measurement may go on that is told neither its budget nor its number of steps."""


def profile(
    source: Source,
    *,
    batch_sizes: Sequence[int] | None = (1, 2, 4, 8),
    replicas: Sequence[int] = (1,),
    accumulation: Sequence[int] = (0,),
    device: str = "cpu",
    device_name: str | None = None,
    precision: float = 0.05,
    budget_s: float | None = None,
    repeats: int | None = None,
    warmup: int = 2,
    threads: int = 0,
    memory_bytes: float | None = None,
    output: str | Path | None = None,
    resume: bool = False,
    seed: int = 0,
    tell: Tell = log_remark,
    stage: Stage = quietly,
) -> ProfileResult:
    """Measure training steps here, in processes of their own, over batch sizes and local replicas.

    ``source``: a torch source as a text, which those processes build. ``batch_sizes`` None: a search of where throughput
    saturates. ``precision``: how well to know every step time, within ``budget_s`` (60 s by default); ``repeats``: that many
    timed steps in place of it. ``memory_bytes``: search the largest batch that fits. ``output``: profile.csv, written row by
    row; ``resume`` keeps its rows. Raises InputError for what cannot be built or run.
    """
    if not isinstance(source, (str, Path)):
        remedy = "name a function that makes it: package.module:factory or path/file.py:factory"
        raise InputError("source", f"a {type(source).__name__} cannot be handed to other processes", remedy)
    if device not in ("cpu", "cuda"):
        raise InputError("--device", f"unknown device {device!r}", "cpu or cuda")
    request = MeasureRequest(
        source=str(source),
        resolver=RESOLVER,
        batch_sizes=tuple(batch_sizes or ()),
        replicas=tuple(replicas),
        accumulation=tuple(accumulation),
        device=device,
        device_name=device_name or device,
        threads=threads,
        warmup=warmup,
        repeats=repeats,
        precision=precision,
        budget_s=budget_s if budget_s is not None else math.inf if repeats is not None else BUDGET_S,
        seed=seed,
    )
    file = RowFile(None if output is None else Path(output), request, resume=resume)
    with kept(file):
        return measured(request, file, memory_bytes=memory_bytes, tell=tell, stage=stage)


def measured(
    request: MeasureRequest,
    file: RowFile,
    *,
    memory_bytes: float | None = None,
    job: Job | None = None,
    tell: Tell = log_remark,
    stage: Stage = quietly,
) -> ProfileResult:
    """Return what the request's campaign finds; ``file`` gets its rows, ``job`` are torchrun's processes, if there are any."""
    search = None
    largest: int | None = LARGEST_BATCH
    with stage("measuring") as advance:
        if memory_bytes is not None:
            limit = measure_limit(request.subject(), memory_bytes, progress=lambda said: advance(0, f"memory: {said}"))
            largest = limit.batch
            if largest == 0:
                raise InputError("--memory", f"even batch 1 needs more than {show_bytes(memory_bytes)}", "give more")
            tries = [MemoryTry(local_batch_size=batch, peak_memory_bytes=peak) for batch, peak in limit.tried.items()]
            search = MemorySearch(budget_bytes=memory_bytes, tries=tries)
        if job is not None:
            job.prepare()
        found = campaign(
            request,
            executor=job,
            known=file.known,
            on_rows=file.write,
            progress=lambda done, remark: advance(0, remark),
            largest_batch=LARGEST_BATCH if largest is None else largest,
        )
        if job is not None:
            job.finish()
    file.close(found.frame)
    frame = found.frame
    if search is not None:
        curves = summarise(frame, None, {request.device_name: largest})
    else:
        curves = summarise(frame, device_memory(request.device))
    result = ProfileResult(rows=records(frame), devices=curves, skipped=found.skipped, measuring_seconds=found.spent_s)
    if search is not None:
        result = result.model_copy(update={"memory": search})
    for warning in [*reliability(frame), *_shortfalls(result, request)]:
        tell(f"warning: {warning}")
    return result


@contextlib.contextmanager
def kept(file: RowFile) -> Iterator[None]:
    """Let the line of a failure or a Ctrl-C end with the rows that it leaves behind."""
    try:
        yield
    except (DdlToolError, KeyboardInterrupt) as error:
        if not file.written:
            raise
        rows = "1 row is" if file.written == 1 else f"{file.written} rows are"
        left = f"{rows} in {file.path}; --resume goes on from there"
        if isinstance(error, DdlToolError):
            error.args = (f"{error}; {left}",)
            raise
        raise Interrupted(left) from None


def device_memory(device: str) -> float:
    """Return the bytes that the device has: all of the GPU's, or what is free in main memory."""
    if device == "cpu":
        return float(psutil.virtual_memory().available)
    import torch

    if not torch.cuda.is_available():
        raise InputError(
            "--device", "cuda has 0 devices here", "use --device cpu, or ddltool predict for a GPU elsewhere"
        )
    return float(torch.cuda.get_device_properties(0).total_memory)


def width(row: Mapping[str, Any]) -> float:
    """Return half the interval of a step time over the time."""
    return float((row["step_time_high_s"] - row["step_time_low_s"]) / 2 / row["step_time_s"])


def _shortfalls(found: ProfileResult, request: MeasureRequest) -> list[str]:
    """Return what the budget did not suffice for, in plain sentences."""
    said = []
    wide = [share for row in found.rows if (share := width(row)) > request.precision]
    if wide and request.repeats is None:
        said.append(
            f"{len(wide)} of {len(found.rows)} step times are known to {max(wide):.0%} only, not {request.precision:.0%}; "
            "stop other load or raise --budget"
        )
    missing = sum(item.reason == "the budget was spent" for item in found.skipped)
    if missing:
        said.append(f"{missing} configurations were not measured: the budget was spent; raise --budget, or --resume")
    return said
