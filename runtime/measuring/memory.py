"""The largest batch that fits in memory, found by trying. Start at :func:`search_limit`, :func:`measure_limit`.

Every try is a real training step in a child process. On CPU the batch fits if the peak of the process's resident set,
as the kernel reports it, stays within the budget; the parent kills a child that exceeds it, before it takes the
machine's memory. The system's limit on address space (``RLIMIT_AS``) cannot be used, because torch reserves gigabytes
that it never touches. On CUDA the batch fits if no ``OutOfMemoryError`` comes.
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
# The first step allocates the optimizer's state; with it the second reaches the peak.
_STEPS = 2
_LOOK_EVERY_S = 0.005  # how often the parent reads a child's memory
# Most times by which the next batch may exceed the largest that fits: a line through two small batches may be far off.
_LONGEST_JUMP = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimit:
    """The largest batch that fits in memory, and the peak memory of every batch that was tried."""

    batch: int | None
    """Largest batch that fits; 0: not even 1 fits; None: every batch up to ``LARGEST`` fits."""
    tried: dict[int, float | None] = field(default_factory=dict)
    """Peak bytes by batch; None where it did not fit."""


def search_limit(attempt: Callable[[int], float | None], budget_bytes: float, largest: int = LARGEST) -> MemoryLimit:
    """Return the largest batch that fits, found by growing batches and then by bisection.

    A line through the peaks of the batches that fit predicts where they reach the budget, which saves tries where memory
    grows linearly. Every other try halves the bracket, so that bad predictions cannot make the search long.

    Args:
        attempt: ``attempt(batch)`` returns the batch's peak bytes, None if it does not fit.
        budget_bytes: the memory limit, for the prediction only; ``attempt`` decides what fits.
        largest: the largest batch to try.
    """
    tried: dict[int, float | None] = {}
    # Invariant: batch `low` fits (0: none has yet), and `high` does not (largest + 1: all that were tried fit).
    low = 0
    high = largest + 1
    tries = 0
    while high - low > 1:
        guess = _extrapolated_limit(tried, budget_bytes)
        tries += 1
        if low == 0 and high > largest:
            batch = 1
        elif high > largest:  # nothing has failed yet: at least double the batch
            batch = min(max(2 * low, min(guess or 0, _LONGEST_JUMP * low)), largest)
        elif guess is not None and tries % 2:
            margin = max(1, (high - low) // 8)  # a try next to an end of the bracket would hardly shrink it
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

    ``tried``: peak bytes by batch, None where it did not fit. The result is at most twice ``LARGEST``; it is None if
    fewer than two batches fit, or the peak does not grow with the batch.
    """
    fitted = sorted((batch, peak) for batch, peak in tried.items() if peak is not None)
    if len(fitted) < 2:
        return None
    (smaller, low_bytes), (larger, high_bytes) = fitted[-2:]
    if high_bytes <= low_bytes:
        return None
    batch_at_budget = larger + (budget_bytes - high_bytes) * (larger - smaller) / (high_bytes - low_bytes)
    return int(min(batch_at_budget, 2.0 * LARGEST))


def measure_limit(
    subject: Subject, budget_bytes: float, *, progress: Callable[[str], None] = lambda remark: None
) -> MemoryLimit:
    """Return the largest batch whose training step needs at most ``budget_bytes`` in one process, found by trying.

    On the CPU the budget bounds the process's resident memory, on CUDA what torch's allocator may take of the device.
    ``progress`` gets a text after each try. Raises InputError on the CPU for a budget above the free memory, or when the
    model does not train; DdlToolError when the process dies, or never answers.
    """
    if subject.device == "cpu" and budget_bytes > (free := psutil.virtual_memory().available):
        problem = f"{budget_bytes / 2**30:.3g} GiB is more than the {free / 2**30:.3g} GiB that are free"
        raise InputError("--memory", problem, "give less, or stop other programs")
    with contextlib.closing(_Trial(subject, budget_bytes)) as trial:

        def attempt(batch: int) -> float | None:
            """Return the peak bytes of a step of ``batch`` samples, None if it does not fit, and report the progress."""
            peak = trial.peak_of(batch)
            progress(f"batch {batch} {'does not fit' if peak is None else 'fits'}")
            return peak

        return search_limit(attempt, budget_bytes)


class _Trial:
    """A child process that tries one batch after another; it is replaced after each batch that exceeds the budget."""

    def __init__(self, subject: Subject, budget_bytes: float) -> None:
        self._subject = subject
        self._budget_bytes = budget_bytes
        self._child: Children | None = None

    def close(self) -> None:
        """Kill the process, if there is one."""
        if self._child is not None:
            self._child.close()
        self._child = None

    def peak_of(self, batch: int) -> float | None:
        """Return the peak bytes of a training step of ``batch`` samples; None if it does not fit the budget.

        On the CPU this process reads the child's resident memory meanwhile, and kills the child once that exceeds the
        budget. Raises what the child raises.
        """
        if self._child is None:
            self._child = Children(_serve, [(self._subject, self._budget_bytes)], self._subject.source)
        child = self._child
        child.send(0, batch)
        # On CUDA the child limits itself (see _serve).
        process = psutil.Process(child.processes[0].pid) if self._subject.device == "cpu" else None
        while not (messages := child.receive([0], f"memory of batch {batch}", _LOOK_EVERY_S)):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process is not None and process.memory_info().rss > self._budget_bytes:
                    self.close()
                    return None
        [(_, (peak, is_reusable))] = messages
        if not is_reusable or peak > self._budget_bytes:
            self.close()  # the next try starts a new child, without this one's peak
        return float(peak) if 0 < peak <= self._budget_bytes else None  # 0: memory ran out in the child


def _serve(subject: Subject, budget_bytes: float, pipe: Connection) -> None:
    """In a child process, run a step of each batch from ``pipe``; send back (peak bytes, whether it may try another batch).

    Peak bytes are 0 if memory ran out. If the system does not allow a process to reset its peak, another process must
    try the next batch.
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
