"""The largest batch that fits in memory, found by trying. Start at :func:`search_limit`, :func:`measure_limit`.

Every try is a real training step in a child process. On CPU it fits when the process's resident set, by the kernel's
own high-water mark, stayed within the budget; the parent stops a child that goes beyond it, before it takes the
machine's memory. The limit on address space that systems offer (``RLIMIT_AS``) is of no use here: torch reserves
gigabytes that it never touches. On CUDA it fits when no ``OutOfMemoryError`` comes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import psutil

from ddltool.errors import InputError
from ddltool.runtime.measuring.children import Children
from ddltool.runtime.measuring.worker import MeasureTask, Subject, connect_replica, reset_peak

LARGEST = 2**20  # the largest batch that is tried
# A step's memory is reached in its first backward pass; the second shows what an optimizer keeps.
_STEPS = 2
_LOOK_EVERY_S = 0.005  # how often the parent reads a child's memory
# A line through two small batches may be far off; the search does not jump further than this.
_LONGEST_JUMP = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """The largest batch that fits in memory, and the peak memory of every batch that was tried."""

    batch: int | None
    """Largest batch that fits while the next does not (0: not even 1 fits); None: every batch up to ``LARGEST`` fits."""
    tried: dict[int, float | None] = field(default_factory=dict)
    """Peak bytes by batch; None where it did not fit."""


def search_limit(attempt: Callable[[int], float | None], budget_bytes: float, largest: int = LARGEST) -> MemoryLimit:
    """Return the limit by growing batches, then bisection; ``attempt(batch)`` returns peak bytes, None if it did not fit.

    A line through the peaks guesses the limit, which saves tries where memory grows evenly. Every other try halves the
    bracket anyway, so that bad guesses cannot make the search long.
    """
    tried: dict[int, float | None] = {}
    # Invariant: batch `low` has run and fits (0: none yet), `high` does not fit (largest + 1: none was tried).
    low, high, tries = 0, largest + 1, 0
    while high - low > 1:
        guess = _extrapolated_limit(tried, budget_bytes)
        tries += 1
        if high > largest:
            larger = 1 if low == 0 else max(2 * low, min(guess or 0, _LONGEST_JUMP * low))
            batch = min(larger, largest)
        elif guess is not None and tries % 2:
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


def _extrapolated_limit(tried: dict[int, float | None], budget_bytes: float) -> int | None:
    """Return the batch at which memory reaches the budget, by the line through the two largest batches that fit.

    ``tried``: peak bytes by batch, None where it did not fit. The result is None where fewer than two fit, or the
    peak does not grow with the batch.
    """
    fitted = sorted((batch, peak) for batch, peak in tried.items() if peak is not None)
    if len(fitted) < 2:
        return None
    (smaller, low_bytes), (larger, high_bytes) = fitted[-2:]
    if high_bytes <= low_bytes:
        return None
    added_bytes = high_bytes - low_bytes
    return int(min(larger + (budget_bytes - high_bytes) * (larger - smaller) / added_bytes, 2.0 * LARGEST))


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
    with contextlib.closing(_Trial(subject, budget_bytes)) as trial:

        def attempt(batch: int) -> float | None:
            """Return the peak bytes of a step of ``batch`` samples, None if it does not fit, and tell the progress."""
            peak = trial.peak_of(batch)
            progress(f"batch {batch} {'does not fit' if peak is None else 'fits'}")
            return peak

        return search_limit(attempt, budget_bytes)


class _Trial:
    """A process that tries one batch after another; a new one takes its place after each that went beyond the budget."""

    def __init__(self, subject: Subject, budget_bytes: float) -> None:
        self._subject, self._budget_bytes = subject, budget_bytes
        self._child: Children | None = None

    def close(self) -> None:
        """End the process, if there is one."""
        if self._child is not None:
            self._child.close()
        self._child = None

    def peak_of(self, batch: int) -> float | None:
        """Return the peak bytes of a training step of ``batch`` samples; None when it does not fit the budget.

        On the CPU the parent reads the child's resident memory meanwhile, and ends the child once it is too large.
        Raises what the child raises.
        """
        arguments = [(self._subject, self._budget_bytes)]
        child = self._child = self._child or Children(_serve, arguments, self._subject.source)
        child.send(0, batch)
        process = psutil.Process(child.processes[0].pid) if self._subject.device == "cpu" else None
        while not (messages := child.receive([0], f"memory of batch {batch}", _LOOK_EVERY_S)):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process is not None and process.memory_info().rss > self._budget_bytes:
                    self.close()
                    return None
        [(_, (peak, is_reusable))] = messages
        if not is_reusable or peak > self._budget_bytes:
            self.close()
        return float(peak) if 0 < peak <= self._budget_bytes else None


def _serve(subject: Subject, budget_bytes: float, pipe: Connection) -> None:
    """Run a step of each batch from ``pipe``, in a child process; send back (peak bytes, whether it may try another batch).

    Peak bytes are 0 when memory ran out. Where the system does not let a process reset its peak, a new one must try the
    next.
    """
    import torch

    worker = connect_replica(subject, [1], 0, 1)
    if worker.device.type == "cuda":
        total = torch.cuda.get_device_properties(worker.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / total), worker.device)
    while True:
        batch = pipe.recv()
        worker.drop()
        is_reusable = reset_peak(worker.device)
        outcome = worker.run(MeasureTask(replicas=1, batch=batch, warmup=0, most=_STEPS))
        pipe.send((outcome.peak_bytes, is_reusable))
