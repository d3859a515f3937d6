"""The largest batch that fits in memory, found by trying. Start at :func:`search_limit`, :func:`measure_limit`.

Every try is a real training step in a child process. On CPU it fits when the process's resident set, by the kernel's own
high-water mark, stayed within the budget; the parent stops a child that goes beyond it, before it takes the machine's
memory. The limit on address space that systems offer (``RLIMIT_AS``) is of no use here: torch reserves gigabytes that it never
touches. On CUDA it fits when no ``OutOfMemoryError`` comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import psutil

from ddltool.errors import InputError
from ddltool.runtime.measuring.children import Children
from ddltool.runtime.measuring.worker import Subject, Task, replica, reset_peak

LARGEST = 2**20
# A step's memory is reached in its first backward pass; the second shows what an optimizer keeps.
_STEPS = 2
_LOOK_EVERY_S = 0.005
# A line through two small batches may be far off; the search does not jump further than this.
_LONGEST_JUMP = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """What was tried and what came out of it."""

    batch: int | None
    """Largest batch that ran within the budget, while the next one did not; None: none up to ``LARGEST`` was too large."""
    tried: dict[int, float | None] = field(default_factory=dict)
    """Peak bytes by batch; None where it did not fit."""


def search_limit(attempt: Callable[[int], float | None], budget_bytes: float, largest: int = LARGEST) -> MemoryLimit:
    """Return the limit by growing batches, then bisection; ``attempt(batch)`` returns peak bytes, None if it did not fit.

    The largest batch that fits has run, and the next one has been tried and did not fit. A line through the peaks guesses
    the limit, which saves tries where memory grows evenly and costs none otherwise: every other try halves the bracket.
    """
    tried: dict[int, float | None] = {}
    low, high, step = 0, largest + 1, 0
    while high - low > 1:
        guess = _guess(tried, budget_bytes)
        step += 1
        if high > largest:
            wish = 1 if low == 0 else max(2 * low, min(guess or 0, _LONGEST_JUMP * low))
            batch = min(wish, largest)
        elif guess is not None and step % 2:
            margin = max(1, (high - low) // 8)  # a guess next to an end would tell little
            batch = min(max(guess, low + margin), high - margin)
        else:
            batch = (low + high) // 2
        tried[batch] = attempt(batch)
        if tried[batch] is not None:
            low = batch
        else:
            high = batch
    return MemoryLimit(batch=None if high > largest else low, tried=tried)


def _guess(tried: dict[int, float | None], budget_bytes: float) -> int | None:
    """Return where the line through the two largest batches that fit meets the budget; None where it does not rise."""
    fitted = sorted((batch, peak) for batch, peak in tried.items() if peak is not None)
    if len(fitted) < 2:
        return None
    (one, low), (two, high) = fitted[-2:]
    if high <= low:
        return None
    return int(min(two + (budget_bytes - high) * (two - one) / (high - low), 2.0 * LARGEST))


def measure_limit(
    subject: Subject, budget_bytes: float, *, progress: Callable[[str], None] = lambda remark: None
) -> MemoryLimit:
    """Return the largest batch whose training step keeps to ``budget_bytes`` per process.

    On CUDA the budget is what torch's allocator may take of the device. Raises InputError for a budget beyond what is free,
    or when the model does not train; DdlToolError when a process ends in another way.
    """
    if subject.device == "cpu" and budget_bytes > (free := psutil.virtual_memory().available):
        problem = f"{budget_bytes / 2**30:.3g} GiB is more than the {free / 2**30:.3g} GiB that are free"
        raise InputError("--memory", problem, "give less, or stop other programs")
    child: Children | None = (
        None  # tries one batch after another; a new one does after each that went beyond the budget
    )

    def end() -> None:
        nonlocal child
        if child is not None:
            child.close()
        child = None

    def attempt(batch: int) -> float | None:
        """Return the peak bytes of a training step, None when it did not fit."""
        nonlocal child
        child = child or Children(_serve, [(subject, budget_bytes)], subject.source)
        who = f"memory of batch {batch}: the process"
        child.send(0, batch)
        watched = psutil.Process(child.processes[0].pid) if subject.device == "cpu" else None
        while not (found := child.receive([0], f"{who} was silent", _LOOK_EVERY_S)):
            with contextlib.suppress(psutil.NoSuchProcess):
                if watched is not None and watched.memory_info().rss > budget_bytes:
                    end()
                    return None
        [(_, answer)] = found
        if failure := child.failure(answer, who):
            raise failure
        peak, again = answer
        if not again or peak > budget_bytes:  # after an exception of the allocator all was given back
            end()
        return float(peak) if 0 < peak <= budget_bytes else None

    def told(batch: int) -> float | None:
        peak = attempt(batch)
        progress(f"batch {batch} {'does not fit' if peak is None else 'fits'}")
        return peak

    try:
        return search_limit(told, budget_bytes)
    finally:
        end()


def _serve(subject: Subject, budget_bytes: float, pipe: Connection) -> None:
    """Try the batches that come; answer with the peak bytes (0: out of memory) and whether this process may try another."""
    import torch

    worker = replica(subject, [1], 0, 1)
    if worker.device.type == "cuda":
        total = torch.cuda.get_device_properties(worker.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total), worker.device)
    while True:
        batch = pipe.recv()
        worker.drop()
        again = reset_peak(worker.device)
        outcome = worker.run(Task(replicas=1, batch=batch, warmup=0, most=_STEPS))
        pipe.send((outcome.peak_bytes, again))
