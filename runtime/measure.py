"""Measures training steps in real processes: batch sizes x local replicas, with and without synchronisation.

Every replica is a process of its own with a gloo (CPU) or NCCL (CUDA) group. Start at :func:`iter_measurements`.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import queue
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ddltool.errors import DdlToolError, InputError, one_line

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import nn

# Nothing that a profile measures takes longer without a sign of life; a hung collective must not hang the user.
SILENCE_LIMIT_S = 300.0
RELIABLE_SPREAD, SHORTEST_STEP_S, FEWEST_REPEATS = 0.1, 1e-3, 3


class Step(Protocol):
    """What a resolver returns: the module, its inputs, and a loss of its output."""

    module: nn.Module
    inputs: tuple[Any, ...]
    loss: Callable[[Any], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureRequest:
    """What to measure. ``resolver`` is ``package.module:function``, called as ``function(source, batch_size)``."""

    source: str
    resolver: str
    batch_sizes: tuple[int, ...]
    replicas: tuple[int, ...] = (1,)
    device: str = "cpu"
    device_name: str = "cpu"
    warmup: int = 2
    repeats: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name, values in (
            ("batch sizes", self.batch_sizes),
            ("replicas", self.replicas),
            ("repeats", (self.repeats,)),
        ):
            if not values or min(values) < 1:
                raise InputError(name, f"are {values}", "give whole numbers >= 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a measurement is: configurations done, and the one just measured."""

    done: int
    total: int
    remark: str


def measure(request: MeasureRequest, *, progress: Callable[[Progress], None] | None = None) -> pd.DataFrame:
    """Return one row per configuration, in ProfileRow's columns; see :func:`iter_measurements` for what is measured."""
    import pandas as pd

    total = len(request.batch_sizes) * len(request.replicas)
    rows: list[dict[str, Any]] = []
    for row in iter_measurements(request):
        rows.append(row)
        if progress is not None:
            remark = f"batch {row['local_batch_size']} x {row['num_replicas']}"
            progress(Progress(done=len(rows), total=total, remark=remark))
    if not rows:
        raise InputError("--batch-sizes", f"even {min(request.batch_sizes)} runs out of memory", "give smaller ones")
    return pd.DataFrame(rows)


def iter_measurements(request: MeasureRequest) -> Iterator[dict[str, Any]]:
    """Yield a row as soon as a configuration is measured; batch sizes that run out of memory are left out.

    ``step_time_s``: median over the repeats of the slowest replica's full step. ``sync_time_s``: what that is longer
    than the same step without synchronisation (AdaptDL's convention), 0 for one replica. Every process gets the same
    number of threads whatever the number of replicas. Raises DdlToolError when a process fails, with its reason.
    """
    if request.device == "cuda":
        _check_cuda(max(request.replicas))
    threads = max(1, len(os.sched_getaffinity(0)) // max(request.replicas))
    for replicas in sorted(set(request.replicas)):
        yield from _run_group(request, replicas, threads)


def reliability(frame: pd.DataFrame) -> list[str]:
    """Return a plain sentence for every reason not to trust the rows, with what to try."""
    found: list[str] = []
    wide = frame[frame["step_time_spread_s"] > RELIABLE_SPREAD * frame["step_time_s"]]
    if len(wide):
        worst = (wide["step_time_spread_s"] / wide["step_time_s"]).max()
        found.append(
            f"{len(wide)} of {len(frame)} rows spread by up to {worst:.0%}; stop other load or raise --repeats"
        )
    if (frame["step_time_s"] < SHORTEST_STEP_S).any():
        found.append("steps below 1 ms measure the framework more than the model; use larger batch sizes")
    if (frame["repeats"] < FEWEST_REPEATS).any():
        found.append(f"fewer than {FEWEST_REPEATS} repeats say nothing about the spread; raise --repeats")
    return found


def _check_cuda(replicas: int) -> None:
    import torch

    found = torch.cuda.device_count()
    if found < replicas:
        raise InputError(
            "--device", f"cuda has {found} devices for {replicas} replicas", "use --device cpu or fewer replicas"
        )


def _run_group(request: MeasureRequest, replicas: int, threads: int) -> Iterator[dict[str, Any]]:
    """Start the processes of one replica count and yield what rank 0 reports."""
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[tuple[str, Any]] = context.Queue()
    port = _free_port()
    children = [
        context.Process(target=_child, args=(request, rank, replicas, threads, port, results), daemon=True)
        for rank in range(replicas)
    ]
    try:
        for child in children:
            child.start()
        yield from _listen(results, children)
    finally:
        for child in children:
            if child.is_alive():
                child.kill()
            child.join()


def _listen(results: multiprocessing.Queue[tuple[str, Any]], children: list[Any]) -> Iterator[dict[str, Any]]:
    last = time.monotonic()
    while True:
        try:
            kind, value = results.get(timeout=0.2)
        except queue.Empty:
            dead = [child for child in children if child.exitcode not in (None, 0)]
            if dead and results.empty():
                raise DdlToolError(f"a measuring process died (exit code {dead[0].exitcode})") from None
            if time.monotonic() - last > SILENCE_LIMIT_S:
                raise DdlToolError(f"the measuring processes were silent for {SILENCE_LIMIT_S:.0f} s") from None
            continue
        last = time.monotonic()
        if kind == "row":
            yield value
        elif kind == "error":
            raise InputError(*value)
        else:
            return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _child(
    request: MeasureRequest,
    rank: int,
    replicas: int,
    threads: int,
    port: int,
    results: multiprocessing.Queue[tuple[str, Any]],
) -> None:
    """Run one replica; whatever goes wrong reaches the parent as text."""
    import torch
    import torch.distributed as dist

    os.dup2(2, 1)  # what the user's module prints must not mix with the command's result
    threading.Thread(target=_follow_parent, daemon=True).start()
    torch.set_num_threads(threads)
    torch.manual_seed(request.seed)
    try:
        if replicas > 1:
            # Otherwise gloo asks the host's name, which need not resolve to this machine.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            backend = "nccl" if request.device == "cuda" else "gloo"
            dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=replicas)
        _measure_all(request, rank, replicas, results)
    except DdlToolError as error:
        where = getattr(error, "where", request.source)
        results.put(("error", (where, getattr(error, "problem", str(error)), getattr(error, "remedy", ""))))
    except KeyboardInterrupt:
        return  # the parent was interrupted as well and reports it
    except Exception as error:
        text = one_line(f"{type(error).__name__}: {error}")[:300]
        results.put(
            ("error", (request.source, f"a training step failed ({text})", "it must train on its example inputs"))
        )
    else:
        if rank == 0:
            results.put(("done", None))
    finally:
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):  # a dead peer must not hide what was reported
                dist.destroy_process_group()


def _follow_parent() -> None:
    """End this process when the one that started it is gone: a killed command leaves nobody computing."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _measure_all(
    request: MeasureRequest, rank: int, replicas: int, results: multiprocessing.Queue[tuple[str, Any]]
) -> None:
    import torch

    module_name, _, function = request.resolver.partition(":")
    resolver: Callable[[str, int], Step] = getattr(importlib.import_module(module_name), function)
    device = torch.device("cuda", rank) if request.device == "cuda" else torch.device("cpu")
    for batch in sorted(set(request.batch_sizes)):
        _reset_peak(device)
        fits, full, local = 1.0, [0.0], [0.0]
        try:
            full, local = _time_steps(resolver(request.source, batch), request, replicas, device)
        except (MemoryError, RuntimeError) as error:
            if not isinstance(error, MemoryError) and "out of memory" not in str(error).lower():
                raise
            if replicas > 1:  # the peers are inside a collective by now; no message can reach them
                raise InputError("--batch-sizes", f"{batch} runs out of memory", "leave it out") from None
            fits = 0.0
        if not fits:
            return
        if rank == 0:
            results.put(("row", _row(request, replicas, batch, full, local, _peak_bytes(device))))


def _row(
    request: MeasureRequest, replicas: int, batch: int, full: list[float], local: list[float], peak_bytes: float
) -> dict[str, Any]:
    import numpy as np

    step = float(np.median(full))
    low, high = np.percentile(full, [25, 75])
    return {
        "device": request.device_name,
        "num_nodes": 1,
        "num_replicas": replicas,
        "local_batch_size": batch,
        "step_time_s": step,
        # Never all of the step: computing takes some of it, whatever the noise says.
        "sync_time_s": 0.0 if replicas == 1 else min(max(0.0, step - float(np.median(local))), 0.99 * step),
        "peak_memory_bytes": peak_bytes,
        "step_time_spread_s": float(high - low),
        "repeats": request.repeats,
    }


def _time_steps(
    step: Step, request: MeasureRequest, replicas: int, device: torch.device
) -> tuple[list[float], list[float]]:
    """Return the times of full steps and of steps without synchronisation, the slowest replica's, interleaved."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    module = step.module.to(device).train()
    inputs = tuple(value.to(device) if isinstance(value, torch.Tensor) else value for value in step.inputs)
    wrapped: nn.Module = DistributedDataParallel(module) if replicas > 1 else module
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def once(*, synchronise: bool) -> float:
        """Return the slowest replica's seconds for one step."""
        waiting = contextlib.nullcontext() if synchronise or replicas == 1 else wrapped.no_sync()  # type: ignore[operator]
        started = _now(device)
        with waiting:
            loss = step.loss(wrapped(*inputs))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return _slowest(_now(device) - started, replicas, device)

    for _ in range(request.warmup):
        once(synchronise=True)
    full: list[float] = []
    local: list[float] = []
    for _ in range(request.repeats):
        full.append(once(synchronise=True))
        if replicas > 1:
            local.append(once(synchronise=False))
    return full, local or full


def _now(device: torch.device) -> float:
    """Return the monotonic clock once the device has finished what was asked of it."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _slowest(seconds: float, replicas: int, device: torch.device) -> float:
    """Return the longest of the replicas' times; also lines the replicas up for the next step."""
    import torch
    import torch.distributed as dist

    if replicas == 1:
        return seconds
    longest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


def _reset_peak(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):  # without the right to reset it, the peak is that of the process so far
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes(device: torch.device) -> float:
    """Return the peak memory: what CUDA allocated, or the process's resident set."""
    import torch

    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    try:
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return float(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024
    except (OSError, StopIteration):
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
