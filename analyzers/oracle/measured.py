"""The measured time oracle: every op of a traced step, timed on this machine's CPU.

TicTac's oracle (section 5) takes the shortest of 5 runs of each op. Here an op runs by itself with random arguments of
the traced shapes and strides, and ops alike in everything that decides their time are timed once. So a step takes
seconds to measure, needs memory for a few ops rather than for the step, and allocates no weights.

The ops take turns in program order, one call each per round: like in a real step an op finds the caches as other ops
left them. Five calls of one op in a row are up to 20 % too fast on small models.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx import Node

from ddltool.analyzers.costs.estimate import assign_channels
from ddltool.analyzers.tracing.dialect import Numerics
from ddltool.analyzers.tracing.step import TrainingStep
from ddltool.analyzers.tracing.torch_adapter import TracedStep, trace_step
from ddltool.analyzers.tracing.torch_run import (
    Call,
    make_call,
    peak_bytes,
    signature,
    time_call,
    time_in_step,
    working_bytes,
)
from ddltool.device import Network
from ddltool.errors import InputError, one_line
from ddltool.graph import COMPUTE, Estimate, Graph, Mode
from ddltool.units import show_bytes

DEFAULT_MEMORY_BYTES = 2 * 2**30
# Rates of no device in particular: what is scaled by measured ops keeps nothing of them but their ratio.
_NOMINAL_FLOPS, _NOMINAL_BYTES_PER_S, _NOMINAL_LAUNCH_S = 1e11, 1e10, 1e-6

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class OpTimes:
    """Measured seconds by op name, and what could not be measured."""

    seconds: Mapping[str, float]
    distinct: int
    """Calls that differ in op, arguments, shapes, strides or types: this many were timed for all of ``seconds``."""
    in_step: tuple[str, ...] = ()
    """Ops that do not run by themselves and were timed in a run of the whole step."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Ops without a time, and why."""


@dataclass(slots=True, eq=False)
class _Candidate:
    """One distinct call: the ops it stands for, its shortest time so far, and its arguments while they are kept."""

    node: Node
    names: list[str]
    best_s: float = float("inf")
    call: Call | None = None
    reason: str = ""


def measure_ops(
    traced: TracedStep,
    *,
    runs: int = 5,
    threads: int | None = None,
    memory_bytes: float = DEFAULT_MEMORY_BYTES,
    progress: Progress | None = None,
) -> OpTimes:
    """Return the shortest time of ``runs`` calls of every op that costs anything, in seconds.

    ``threads``: torch's, its own number by default. ``memory_bytes`` bounds arguments and results, whether kept for the
    next round or not; an op that alone needs more is not run. ``progress(done, total)`` is called after every call.
    An op that does not run alone is timed in a run of the whole step, if that fits into the memory.

    Raises InputError for numbers below 1.
    """
    _check(runs=runs, threads=threads, memory_bytes=memory_bytes)
    candidates = _distinct(traced)
    with _quiet_torch(threads):
        _take_turns(candidates, runs, memory_bytes, progress)
        alone = [c for c in candidates if not c.reason]
        in_step = _within_step(traced, [c for c in candidates if c.reason], runs, memory_bytes)
    return OpTimes(
        seconds={name: c.best_s for c in [*alone, *in_step] for name in c.names},
        distinct=len(alone) + len(in_step),
        in_step=tuple(name for c in in_step for name in c.names),
        failed={name: c.reason for c in candidates if c.reason for name in c.names},
    )


def estimate_measured(
    build: Callable[[], TrainingStep],
    *,
    mode: Mode,
    batch_size: int | None = None,
    network: Network | None = None,
    runs: int = 5,
    threads: int | None = None,
    memory_bytes: float = DEFAULT_MEMORY_BYTES,
    progress: Progress | None = None,
) -> Graph:
    """Return the graph of one step of the module that ``build`` makes, compute ops measured, transfers by ``network``.

    See ``trace_torch`` for the first arguments and :func:`measure_ops` for the others. Raises what they raise.
    """
    traced = trace_step(build, mode=mode, batch_size=batch_size, numerics=Numerics(cuda=False))
    times = measure_ops(traced, runs=runs, threads=threads, memory_bytes=memory_bytes, progress=progress)
    graph = apply_times(traced.graph, times, network or Network())
    meta = {
        **graph.meta,
        "device": "cpu",
        "threads": threads or torch.get_num_threads(),
        "torch": str(torch.__version__),
        "runs": runs,
    }
    return replace(graph, meta=meta)


def apply_times(graph: Graph, times: OpTimes, network: Network) -> Graph:
    """Return the graph with measured durations, seconds; its transfers take ``latency + bytes / bandwidth``.

    Free ops take 0. An op without a time gets its roofline time at nominal rates, times the median ratio of measured to
    roofline time over the ops of its type, or over all ops where none of its type was measured; it counts as
    ``default``. Raises InputError when ops cost something and none was measured.
    """
    graph = assign_channels(graph, network.parameter_servers)
    transfer = graph.kind != COMPUTE
    durations = np.where(transfer, network.latency_s + graph.size_bytes / network.bandwidth_bytes_per_s, 0.0)
    estimate: list[Estimate] = ["rule" if moved else "free" for moved in transfer]
    measured = np.array([name in times.seconds for name in graph.names])
    missing = np.array([source != "free" for source in graph.estimate]) & ~transfer & ~measured
    for op in np.flatnonzero(measured):
        durations[op], estimate[op] = times.seconds[graph.names[op]], "measured"
    if missing.any():
        durations[missing] = _scaled(graph, durations, measured, missing, times)
        for op in np.flatnonzero(missing):
            estimate[op] = "default"
    meta = {
        **graph.meta,
        "oracle": "measured",
        "timed_calls": times.distinct,
        "bandwidth_bytes_per_s": network.bandwidth_bytes_per_s,
        "latency_s": network.latency_s,
        "parameter_servers": network.parameter_servers,
    }
    return replace(graph, meta=meta).with_durations(durations, estimate)


def _scaled(
    graph: Graph,
    durations: NDArray[np.float64],
    measured: NDArray[np.bool_],
    missing: NDArray[np.bool_],
    times: OpTimes,
) -> NDArray[np.float64]:
    """Return the scaled roofline times of the ops without a measurement."""
    if not measured.any():
        reason = next(iter(times.failed.values()), "no reason given")
        raise InputError(graph.name, f"none of its {int(missing.sum())} ops could be timed ({reason})", "use roofline")
    roofline = np.maximum(graph.flops / _NOMINAL_FLOPS, graph.size_bytes / _NOMINAL_BYTES_PER_S) + _NOMINAL_LAUNCH_S
    ratio = durations / roofline
    types = np.array(graph.op_type)
    found = np.empty(int(missing.sum()))
    for row, op in enumerate(np.flatnonzero(missing)):
        alike = measured & (types == types[op])
        found[row] = roofline[op] * np.median(ratio[alike if alike.any() else measured])
    return found


def _check(*, runs: int, threads: int | None, memory_bytes: float) -> None:
    for name, value in (("runs", runs), ("threads", threads), ("memory", memory_bytes)):
        if value is not None and not value >= 1:
            raise InputError(name, f"is {value}", "it must be at least 1")


@contextmanager
def _quiet_torch(threads: int | None) -> Iterator[None]:
    """Run without gradients, with that many threads, and leave torch's threads and random numbers as they were."""
    before = torch.get_num_threads()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.set_num_threads(threads or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _distinct(traced: TracedStep) -> list[_Candidate]:
    """Return the distinct calls among the ops that cost anything, in program order."""
    found: dict[Hashable, _Candidate] = {}
    for name, source in zip(traced.graph.names, traced.graph.estimate, strict=True):
        node = traced.nodes.get(name)
        if node is None or source == "free":
            continue
        found.setdefault(signature(node), _Candidate(node, [])).names.append(name)
    return list(found.values())


def _take_turns(candidates: list[_Candidate], runs: int, memory_bytes: float, progress: Progress | None) -> None:
    """Time every candidate once per round, after a first round that is not timed."""
    kept = 0.0
    need = {id(candidate): working_bytes(candidate.node) for candidate in candidates}
    largest = max((size for size in need.values() if size <= memory_bytes), default=0.0)
    total = len(candidates) * (runs + 1)
    for done in range(total):
        candidate, warm = candidates[done % len(candidates)], done >= len(candidates)
        size = need[id(candidate)]
        if size > memory_bytes:
            candidate.reason = f"needs {show_bytes(size)}, more than the {show_bytes(memory_bytes)} allowed"
        if not candidate.reason:
            try:
                call = candidate.call or make_call(candidate.node)
                taken = time_call(call)
            except Exception as error:  # an op may raise anything when its arguments are made up
                candidate.reason, candidate.call = one_line(f"{type(error).__name__}: {error}")[:200], None
            else:
                if warm:
                    candidate.best_s = min(candidate.best_s, taken)
                elif kept + size + largest <= memory_bytes:  # the largest op must still find room beside what is kept
                    candidate.call = call
                    kept += size
        if progress is not None:
            progress(done + 1, total)


def _within_step(traced: TracedStep, candidates: list[_Candidate], runs: int, memory_bytes: float) -> list[_Candidate]:
    """Return those of the candidates that could be timed in a run of the whole step."""
    needed = peak_bytes(traced.fx) if candidates else 0.0
    if not candidates or needed > memory_bytes:
        return []
    for candidate in candidates:
        candidate.call = None
    try:
        best = time_in_step(traced.fx, [candidate.node for candidate in candidates], runs=runs)
    except Exception as error:  # the same op may fail here too
        text = one_line(f"{type(error).__name__}: {error}")[:200]
        for candidate in candidates:
            candidate.reason = f"{candidate.reason}; nor in the whole step: {text}"
        return []
    for candidate in candidates:
        candidate.best_s, candidate.reason = best[candidate.node], ""
    return candidates
