"""Runs training steps as one replica of a measurement, and times them. Start at :class:`StepTimer`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from ddltool.analyzers.job.goodput.curve import median_interval
from ddltool.errors import InputError
from ddltool.runtime.measuring.rendezvous import START_LIMIT_S

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from ddltool.analyzers.step.tracing.step import TrainingStep

# The extremes of six values contain the median with 95 % confidence, of fewer not; three are the fewest that show a spread.
FEWEST_FOR_AN_INTERVAL, FEWEST = 6, 3
# Seconds that timed steps must take before the precision of their median counts: in a shorter time all of them may be
# slowed down by the same disturbance.
SHORTEST_LOOK_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """The model and settings that all tasks share."""

    source: str
    """The user's model, by a text that the resolver understands."""
    resolver: str
    """``package.module:function``, which names the function that makes a training step of ``source`` and a batch size."""
    device: str
    """"cpu" or "cuda"."""
    threads: int
    """Threads that a process computes with."""
    seed: int = 0
    numerics: str = "fp32"
    """The precision that steps compute in."""
    optimizer: str = "sgd"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureTask:
    """A run of timed steps of one configuration (replicas, batch, accumulation), and when it ends.

    It ends after ``most`` timed steps, or after ``seconds`` were spent on steps of any kind (and three were timed), or
    when half the width of the median's 95 % interval is at most ``half_width`` times the median.
    """

    replicas: int
    batch: int
    """Samples of one replica in one pass."""
    accumulation: int = 0
    """Passes of a step before the one that synchronises the replicas."""
    warmup: int = 2
    """Steps before those that are timed."""
    most: int
    seconds: float = float("inf")
    half_width: float = 0.0
    """0: how well the median is known does not end it."""

    def __str__(self) -> str:
        """Name the configuration, as progress and errors show it."""
        passes = f", {self.accumulation} accumulation steps" if self.accumulation else ""
        return f"batch {self.batch} on {self.replicas} replica{'s' if self.replicas > 1 else ''}{passes}"

    def is_over(self, steps_s: list[float], spent_s: float) -> bool:
        """Return whether the task ends, by the rules of the class.

        ``steps_s``: seconds of each timed step; ``spent_s``: of all steps, warm-up included. All replicas have the same
        times, so that all of them stop at the same step.
        """
        if len(steps_s) >= self.most or (len(steps_s) >= FEWEST and spent_s >= self.seconds):
            return True
        if len(steps_s) < FEWEST_FOR_AN_INTERVAL or sum(steps_s) < SHORTEST_LOOK_S or not self.half_width:
            return False
        return median_interval(steps_s).relative <= self.half_width


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimings:
    """The times that a task has measured, in seconds of the slowest replica; all empty if memory ran out."""

    full: tuple[float, ...] = ()
    """Times of full steps."""
    local: tuple[float, ...] = ()
    """Times of steps without synchronisation, one after each full step; empty for one replica."""
    passes: tuple[float, ...] = ()
    """Time of one accumulation pass in each full step; empty without accumulation."""
    peak_bytes: float = 0.0
    """Peak memory of this replica."""


def connect_replica(
    subject: Subject,
    replicas: Sequence[int],
    rank: int,
    world_size: int,
    *,
    local_rank: int | None = None,
    **meeting: Any,
) -> StepTimer:
    """Return this rank's step timer, connected to the other replicas; blocks until they have come.

    Args:
        subject: what is measured.
        replicas: the counts of replicas that will be measured; all ranks make a process group for each above 1, in the
            same order. If all are 1, no rank is waited for.
        rank, world_size: this process's place among all processes.
        local_rank: index of this process's GPU; None: ``rank``.
        meeting: where the ranks meet, as ``torch.distributed.init_process_group`` takes it.
    """
    import torch
    import torch.distributed as dist

    cuda = subject.device == "cuda"
    device = torch.device("cpu")
    if cuda:
        device = torch.device("cuda", rank if local_rank is None else local_rank)
    if max(replicas) == 1:
        return StepTimer(subject, device)
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=START_LIMIT_S),
        **meeting,
    )
    return StepTimer(subject, device, {count: dist.new_group(range(count)) for count in sorted(replicas) if count > 1})


class StepTimer:
    """A replica that runs tasks. ``groups``: by replica count above 1, this rank's process group of the first so many ranks."""

    def __init__(
        self, subject: Subject, device: torch.device, groups: Mapping[int, dist.ProcessGroup | None] | None = None
    ) -> None:
        """Set this process's threads, seed and CUDA device. The model is made with the first task."""
        import torch

        self.subject = subject
        self.device = device
        self.groups = groups or {}
        self._resolver: Callable[[str, int], TrainingStep] = resolve_name(subject.resolver)
        self._prepared: dict[tuple[int, int], _Configuration] = {}  # at most one, by its replicas and batch
        torch.set_num_threads(subject.threads)
        torch.manual_seed(subject.seed)
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def run(self, task: MeasureTask, alive: Callable[[], None] = lambda: None) -> StepTimings:
        """Run a task and return its times; they are empty if a single replica runs out of memory.

        ``alive`` is called after every step. Raises InputError when one of several replicas runs out of memory, because
        its peers would wait for it, or when the source cannot be trained, and whatever the model raises.
        """
        try:
            return self._run(task, alive)
        except (MemoryError, RuntimeError) as error:
            text = str(error).lower()
            # the messages of CUDA's allocator and of the CPU's
            is_memory_error = "out of memory" in text or "can't allocate memory" in text
            if not isinstance(error, MemoryError) and not is_memory_error:
                raise
        self.drop()
        if task.replicas > 1:
            raise InputError("--batch-sizes", f"{task.batch} runs out of memory", "leave it out")
        return StepTimings()

    def drop(self) -> None:
        """Free the model that was measured last, so that the next one's peak memory does not contain it."""
        self._prepared.clear()
        gc.collect()
        if self.device.type == "cuda":
            import torch

            torch.cuda.empty_cache()
        else:
            with contextlib.suppress(OSError, AttributeError):  # not every C library has this function
                ctypes.CDLL(None).malloc_trim(0)  # returns freed memory to the system

    def _run(self, task: MeasureTask, alive: Callable[[], None]) -> StepTimings:
        """Prepare the task's model unless it is the last task's, warm up, time steps, and return the times.

        With several replicas, each full step is followed by one without synchronisation. Warm-up ends early once the
        task's seconds are spent. ``alive`` is called after every step.
        """
        shape = task.replicas, task.batch
        if shape not in self._prepared:
            self.drop()
            reset_peak(self.device)
            step = self._resolver(self.subject.source, task.batch)
            self._prepared[shape] = _Configuration(self.subject, step, self.device, self.groups.get(task.replicas))
        configuration = self._prepared[shape]
        spent_s = 0.0
        for warmups_done in range(task.warmup):
            if warmups_done == 0 or spent_s < task.seconds:  # at least one, however long it takes
                step_s, _ = configuration.time_step(task.accumulation)
                spent_s += step_s
            alive()
        from ddltool.runtime.processes.step_times import peak_memory

        full_s: list[float] = []
        local_s: list[float] = []
        passes_s: list[float] = []
        while not task.is_over(full_s, spent_s):
            step_s, pass_s = configuration.time_step(task.accumulation)
            full_s.append(step_s)
            spent_s += step_s
            if task.accumulation:
                passes_s.append(pass_s)
            if task.replicas > 1:
                step_s, _ = configuration.time_step(task.accumulation, synchronise=False)
                local_s.append(step_s)
                spent_s += step_s
            alive()
        return StepTimings(
            full=tuple(full_s),
            local=tuple(local_s),
            passes=tuple(passes_s),
            peak_bytes=float(peak_memory(self.device.type == "cuda")),
        )


class _Configuration:
    """A model on its device, for one batch size and number of replicas, whose training steps are timed."""

    def __init__(
        self, subject: Subject, step: TrainingStep, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        """Prepare module, inputs and optimizer on ``device``.

        ``subject``: the settings (precision, optimizer); ``step``: the user's module with inputs of one batch size and its
        loss; ``group``: the replicas' process group, None for a single replica.
        """
        from torch.nn.parallel import DistributedDataParallel

        from ddltool.analyzers.step.tracing.step import called
        from ddltool.runtime.measuring.training import backward_and_update, prepared_module

        self._step = step
        self._device = device
        self._group = group
        self._call = called
        # `_computing` makes the context of a forward pass (autocast), `_unsynchronised` that of a pass whose gradients
        # are not averaged.
        module, self._inputs, self._computing = prepared_module(step.module, step.inputs, subject.numerics, device)
        self._module = module
        self._unsynchronised = contextlib.nullcontext
        if group is not None:
            wrapped = DistributedDataParallel(module, process_group=group)
            self._module = wrapped
            self._unsynchronised = wrapped.no_sync  # type: ignore[assignment]
        self._backward, self._update = backward_and_update(module, subject.optimizer, subject.numerics, device)

    def time_step(self, accumulation: int, *, synchronise: bool = True) -> tuple[float, float]:
        """Run an optimizer step; return (its seconds, seconds of one accumulation pass or 0), each of the slowest replica.

        Of the ``accumulation`` + 1 passes, only the last synchronises the replicas, and only with ``synchronise``.
        """
        loss_scale = 1.0 / (accumulation + 1)  # so that the sum over the passes is a mean
        pass_s = 0.0
        started_s = synchronised_clock(self._device)
        if accumulation:
            with self._unsynchronised():
                for _ in range(accumulation):
                    self._run_pass(loss_scale)
            pass_s = (synchronised_clock(self._device) - started_s) / accumulation
        with contextlib.nullcontext() if synchronise else self._unsynchronised():
            self._run_pass(loss_scale)
        self._update()
        step_s = synchronised_clock(self._device) - started_s
        return of_slowest_replica((step_s, pass_s), self._group, self._device)

    def _run_pass(self, loss_scale: float) -> None:
        """Run one forward and backward pass, with the loss multiplied by ``loss_scale``."""
        with self._computing():
            loss = self._step.loss(self._call(self._module, self._inputs, self._step.keywords))
        self._backward(loss if loss_scale == 1.0 else loss * loss_scale)


def synchronised_clock(device: torch.device) -> float:
    """Block until ``device`` has finished all its work, and return ``time.perf_counter()``."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def of_slowest_replica(
    seconds: tuple[float, float], group: dist.ProcessGroup | None, device: torch.device
) -> tuple[float, float]:
    """Return the longest (step, pass) seconds of any replica; ``group`` None, for a single replica: ``seconds`` themselves.

    The reduction also makes the replicas start the next step together.
    """
    import torch
    import torch.distributed as dist

    if group is None:
        return seconds
    longest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    step_s, pass_s = longest.tolist()
    return step_s, pass_s


def reset_peak(device: torch.device) -> bool:
    """Reset this process's peak memory, and return whether that worked; the system may not allow it on the CPU.

    If it did not, the peak remains that of the process's whole life so far.
    """
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): 5 resets the peak of the resident set
    except OSError:
        return False
    return True
