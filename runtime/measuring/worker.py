"""One replica's side of a measurement: runs training steps and takes their times. Start at :class:`Worker`."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ddltool.analyzers.goodput.curve import median_interval
from ddltool.errors import InputError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import nn

# Six steps are the fewest whose extremes hold the median with 95 %; three are the fewest that show any spread.
FEWEST_FOR_AN_INTERVAL, FEWEST = 6, 3
# Steps timed within a moment share the machine's mood of that moment, however many they are.
SHORTEST_LOOK_S = 0.2
START_LIMIT = timedelta(seconds=300)
"""How long replicas wait for each other."""


class Step(Protocol):
    """What a resolver returns: the module, its inputs, and a loss of its output."""

    module: nn.Module
    inputs: tuple[Any, ...]
    loss: Callable[[Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is measured, the same for all tasks. ``resolver`` is ``package.module:function``."""

    source: str
    resolver: str
    device: str
    threads: int
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One visit to a configuration: how many steps to time.

    Ends after ``most`` steps; before that when ``seconds`` were spent on steps of any kind (and three were timed), or when
    the median is known to ``precision`` (0: never).
    """

    replicas: int
    batch: int
    accumulation: int = 0
    warmup: int = 2
    most: int
    seconds: float = float("inf")
    precision: float = 0.0

    def __str__(self) -> str:
        passes = f", {self.accumulation} accumulation steps" if self.accumulation else ""
        return f"batch {self.batch} on {self.replicas} replica{'s' if self.replicas > 1 else ''}{passes}"

    def over(self, times: list[float], spent: float) -> bool:
        """Return whether these steps (seconds) are enough; ``spent``: seconds of all steps, the untimed ones too.

        All replicas see the same times, so all of them stop at the same step.
        """
        if len(times) >= self.most or (len(times) >= FEWEST and spent >= self.seconds):
            return True
        if len(times) < FEWEST_FOR_AN_INTERVAL or sum(times) < SHORTEST_LOOK_S or not self.precision:
            return False
        return median_interval(times).relative <= self.precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a visit gave: seconds of each step, the slowest replica's; all empty when memory ran out."""

    full: tuple[float, ...] = ()
    local: tuple[float, ...] = ()
    """Of steps without synchronisation, interleaved; empty for one replica."""
    passes: tuple[float, ...] = ()
    """Of one accumulation pass in each full step; empty without accumulation."""
    peak_bytes: float = 0.0


def resolved(resolver: str) -> Callable[[str, int], Step]:
    """Return what ``package.module:function`` names."""
    module, _, function = resolver.partition(":")
    found: Callable[[str, int], Step] = getattr(importlib.import_module(module), function)
    return found


def replica(
    subject: Subject,
    replicas: Sequence[int],
    rank: int,
    world_size: int,
    *,
    local_rank: int | None = None,
    **meeting: Any,
) -> Worker:
    """Return this rank's worker, connected to the others; all ranks make the groups of all counts, in the same order.

    ``meeting``: where they meet, as ``torch.distributed.init_process_group`` takes it.
    """
    import torch
    import torch.distributed as dist

    cuda = subject.device == "cuda"
    device = torch.device("cuda", rank if local_rank is None else local_rank) if cuda else torch.device("cpu")
    if max(replicas) == 1:
        return Worker(subject, device)
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", rank=rank, world_size=world_size, timeout=START_LIMIT, **meeting
    )
    return Worker(subject, device, {count: dist.new_group(range(count)) for count in sorted(replicas) if count > 1})


class Worker:
    """A replica that runs tasks. ``groups``: the process group of each replica count above one, this rank's part in it."""

    def __init__(
        self, subject: Subject, device: torch.device, groups: Mapping[int, dist.ProcessGroup | None] | None = None
    ) -> None:
        import torch

        self.subject, self.device, self.groups = subject, device, groups or {}
        self._resolver = resolved(subject.resolver)
        self._ready: tuple[int, int] | None = None
        self._once: Callable[[Task, bool], tuple[float, float]] | None = None
        torch.set_num_threads(subject.threads)
        torch.manual_seed(subject.seed)
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def run(self, task: Task, alive: Callable[[], None] = lambda: None) -> Outcome:
        """Return the times of a task; an outcome without times when memory ran out on one replica.

        ``alive`` is called after every step. Raises InputError (memory ran out on one of several replicas, whose peers
        now wait; a source that cannot be trained) and whatever the model raises.
        """
        try:
            return self._run(task, alive)
        except (MemoryError, RuntimeError) as error:
            text = str(error).lower()
            said = "out of memory" in text or "can't allocate memory" in text  # CUDA's and the CPU's allocator
            if not isinstance(error, MemoryError) and not said:
                raise
        self.drop()
        if task.replicas > 1:
            raise InputError("--batch-sizes", f"{task.batch} runs out of memory", "leave it out")
        return Outcome()

    def drop(self) -> None:
        """Give back the memory of the configuration that was measured last."""
        self._ready = self._once = None
        gc.collect()
        if self.device.type == "cuda":
            import torch

            torch.cuda.empty_cache()
        else:
            with contextlib.suppress(OSError, AttributeError):  # not every C library can
                ctypes.CDLL(None).malloc_trim(0)

    def _run(self, task: Task, alive: Callable[[], None]) -> Outcome:
        if self._ready != (task.replicas, task.batch):
            self.drop()
            reset_peak(self.device)
            self._once = self._prepare(task)
            self._ready = (task.replicas, task.batch)
        once = self._once
        assert once is not None
        spent = 0.0
        for number in range(task.warmup):
            if number == 0 or spent < task.seconds:
                spent += once(task, True)[0]
            alive()
        full: list[float] = []
        local: list[float] = []
        passes: list[float] = []
        while not task.over(full, spent):
            step, one_pass = once(task, True)
            full.append(step)
            spent += step
            if task.accumulation:
                passes.append(one_pass)
            if task.replicas > 1:
                local.append(once(task, False)[0])
                spent += local[-1]
            alive()
        return Outcome(full=tuple(full), local=tuple(local), passes=tuple(passes), peak_bytes=peak_bytes(self.device))

    def _prepare(self, task: Task) -> Callable[[Task, bool], tuple[float, float]]:
        """Return a function that runs one step, with or without synchronisation, and returns step and pass seconds."""
        import torch
        from torch.nn.parallel import DistributedDataParallel

        step = self._resolver(self.subject.source, task.batch)
        device = self.device
        group = self.groups.get(task.replicas)
        module = step.module.to(device).train()
        inputs = tuple(value.to(device) if isinstance(value, torch.Tensor) else value for value in step.inputs)
        shared = task.replicas > 1
        wrapped: nn.Module = DistributedDataParallel(module, process_group=group) if shared else module
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

        def one_pass(share: float) -> None:
            loss = step.loss(wrapped(*inputs))
            (loss if share == 1.0 else loss * share).backward()

        def once(task: Task, synchronise: bool) -> tuple[float, float]:
            share = 1.0 / (task.accumulation + 1)
            quiet = wrapped.no_sync if shared else contextlib.nullcontext
            started = now(device)
            accumulated = 0.0
            if task.accumulation:
                with quiet():  # type: ignore[operator]
                    for _ in range(task.accumulation):
                        one_pass(share)
                accumulated = (now(device) - started) / task.accumulation
            with contextlib.nullcontext() if synchronise else quiet():  # type: ignore[operator]
                one_pass(share)
            optimizer.step()
            optimizer.zero_grad()
            return slowest((now(device) - started, accumulated), group if shared else None, device)

        return once


def now(device: torch.device) -> float:
    """Return the monotonic clock (seconds) once the device has finished what was asked of it."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def slowest(seconds: tuple[float, float], group: dist.ProcessGroup | None, device: torch.device) -> tuple[float, float]:
    """Return the longest of the replicas' times; also lines the replicas up for the next step."""
    import torch
    import torch.distributed as dist

    if group is None:
        return seconds
    longest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    step, one_pass = longest.tolist()
    return step, one_pass


def reset_peak(device: torch.device) -> bool:
    """Start a new peak; return False where the process has no right to: then the peak is that of the process so far."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes(device: torch.device) -> float:
    """Return the peak memory since :func:`reset_peak`: what CUDA allocated, or the process's resident set."""
    import torch

    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return float(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024
    except (OSError, StopIteration):
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
