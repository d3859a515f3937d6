"""Times real training steps on this machine, and makes one result of them. Start at :func:`measured`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil

from ddltool.analyzers.job.goodput.curve import summarise
from ddltool.errors import DdlToolError, InputError, Interrupted
from ddltool.profiles import records
from ddltool.results import MemorySearch, MemoryTry, ProfileResult
from ddltool.runtime.measuring.campaign import LARGEST_BATCH, MeasureRequest, ProfileFile, campaign, reliability
from ddltool.runtime.measuring.memory import measure_limit
from ddltool.runtime.measuring.torchrun_job import TorchrunJob
from ddltool.stages import Stage, Tell, log_remark, quietly
from ddltool.units import show_bytes

RESOLVER = "ddltool.analyzers.step.tracing.sources:training_step"
BUDGET_S = 60.0
"""Seconds that a measurement may take when neither a budget nor a number of steps is given."""


def measured(
    request: MeasureRequest,
    file: ProfileFile,
    *,
    memory_bytes: float | None = None,
    job: TorchrunJob | None = None,
    tell: Tell = log_remark,
    stage: Stage = quietly,
) -> ProfileResult:
    """Measure ``request`` and return the result.

    Args:
        request: what to measure.
        file: gets the rows as they come; its ``known`` rows are not measured again.
        memory_bytes: memory limit: the largest batch within it is searched first, and no larger one is measured. None:
            no limit.
        job: the processes of a torchrun job; None: local ones are started.
        tell: called with each warning.
        stage: reports progress: ``with stage(name) as advance``, where ``advance(done, text)`` is called.

    Raises InputError when not even batch 1 fits in memory, and what :func:`campaign` raises.
    """
    search, largest = None, None
    with stage("measuring") as advance:
        if memory_bytes is not None:
            search, largest = _search_limit(request, memory_bytes, lambda text: advance(0, f"memory: {text}"))
        if job is not None:
            job.prepare()
        measurements = campaign(
            request,
            executor=job,
            known=file.known,
            on_rows=file.write,
            progress=lambda done, remark: advance(0, remark),
            largest_batch=LARGEST_BATCH if largest is None else largest,
        )
    file.close(measurements.frame)
    frame = measurements.frame
    if search is not None:  # the limit is known by trying, so it need not be extrapolated from the rows' memory
        curves = summarise(frame, None, {request.device_name: largest})
    else:
        curves = summarise(frame, device_memory(request.device))
    result = ProfileResult(
        rows=records(frame),
        devices=curves,
        skipped=measurements.skipped,
        measuring_seconds=measurements.spent_s,
        memory=search,
    )
    for warning in [*reliability(frame), *_shortfalls(result, request)]:
        tell(f"warning: {warning}")
    return result


def _search_limit(
    request: MeasureRequest, memory_bytes: float, progress: Callable[[str], None]
) -> tuple[MemorySearch, int | None]:
    """Search for the largest batch whose step needs at most ``memory_bytes``; return (the tries, that batch).

    The batch is None if every batch fits that was tried. ``progress`` gets a text after each try. Raises InputError when
    not even batch 1 fits.
    """
    limit = measure_limit(request.subject(), memory_bytes, progress=progress)
    if limit.batch == 0:
        raise InputError("--memory", f"even batch 1 needs more than {show_bytes(memory_bytes)}", "give more")
    tries = [MemoryTry(local_batch_size=batch, peak_memory_bytes=peak) for batch, peak in limit.tried.items()]
    return MemorySearch(budget_bytes=memory_bytes, tries=tries), limit.batch


@contextlib.contextmanager
def keeping_rows(file: ProfileFile) -> Iterator[None]:
    """Add to a DdlToolError or Ctrl-C in the block how many rows ``file`` has, if any, and how to continue from there.

    A Ctrl-C is then raised as Interrupted.
    """
    try:
        yield
    except (DdlToolError, KeyboardInterrupt) as error:
        if not file.written:
            raise
        rows = "1 row is" if file.written == 1 else f"{file.written} rows are"
        remark = f"{rows} in {file.path}; --resume goes on from there"
        if isinstance(error, DdlToolError):
            error.args = (f"{error}; {remark}",)
            raise
        raise Interrupted(remark) from None


def device_memory(device: str) -> float:
    """Return the memory of ``device`` in bytes: "cpu": what is free in main memory; "cuda": all of the first GPU's.

    Raises InputError for "cuda" without a GPU.
    """
    if device == "cpu":
        return float(psutil.virtual_memory().available)
    import torch

    if not torch.cuda.is_available():
        remedy = "use --device cpu, or ddltool predict for a GPU elsewhere"
        raise InputError("--device", "cuda has 0 devices here", remedy)
    return float(torch.cuda.get_device_properties(0).total_memory)


def half_width_of(row: Mapping[str, Any]) -> float:
    """Return half the width of the 95 % interval of a profile row's step time, as a share of the step time."""
    return float((row["step_time_high_s"] - row["step_time_low_s"]) / 2 / row["step_time_s"])


def _shortfalls(result: ProfileResult, request: MeasureRequest) -> list[str]:
    """Return sentences on shortfalls: step times less precise than requested, and configurations that were not measured."""
    sentences = []
    half_widths = [half_width_of(row) for row in result.rows]
    too_wide = [half_width for half_width in half_widths if half_width > request.half_width]
    if too_wide and request.repeats is None:  # a fixed number of repeats asks for no half width
        sentences.append(
            f"{len(too_wide)} of {len(result.rows)} step times are known to {max(too_wide):.0%} only, "
            f"not {request.half_width:.0%}; stop other load or raise --time-limit"
        )
    missing = sum(skipped.reason == "the budget was spent" for skipped in result.skipped)
    if missing:
        remedy = "raise --time-limit, or --resume"
        sentences.append(f"{missing} configurations were not measured: the time was spent; {remedy}")
    return sentences
