"""The measured time oracle: every op of a traced step, timed on this machine's CPU.

TicTac's oracle (section 5) takes the shortest of 5 runs of each op. Here an op runs by itself with random arguments of
the traced shapes and strides, and ops alike in everything that decides their time are timed once. So a step takes
seconds to measure, needs memory for a few ops rather than for the step, and allocates no weights.

The ops take turns in program order, one call each per round: like in a real step an op finds the caches as other ops
left them. Five calls of one op in a row are up to 20 % too fast on small models.

Floating-point arguments are normal, or in [0.1, 1) where an op needs them positive (variances, ``log``, ``pow``).
Integer arguments that index something are drawn from its range; all others are 0, which is always a valid index.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from ddltool.analyzers.costs.model import assign_channels
from ddltool.analyzers.oracle.matching import with_measured
from ddltool.analyzers.tracing.dialect import Numerics
from ddltool.analyzers.tracing.step import TrainingStep
from ddltool.analyzers.tracing.torch_adapter import TracedStep, trace_step
from ddltool.analyzers.tracing.torch_costs import base_name, named, value_of
from ddltool.device import Network
from ddltool.errors import InputError, one_line
from ddltool.graph import COMPUTE, Estimate, Graph, Mode
from ddltool.units import show_bytes

Call = Callable[[], Any]
Progress = Callable[[int, int], None]
DEFAULT_MEMORY_BYTES = 2 * 2**30
# Rates of no device in particular: what is scaled by measured ops keeps nothing of them but their ratio.
_NOMINAL_FLOPS, _NOMINAL_BYTES_PER_S, _NOMINAL_LAUNCH_S = 1e11, 1e10, 1e-6
_POSITIVE_ARGUMENTS = frozenset(
    ["running_var", "save_invstd", "save_var", "rstd", "invstd", "logsumexp", "total_weight"]
)
_POSITIVE_OPS = frozenset(["pow", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "lgamma", "digamma"])
# What these read was packed by another op of the same library in a form that only the library knows.
_OPAQUE = frozenset(["mkldnn_rnn_layer_backward"])
_POOL_ELEMENTS = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class OpTimes:
    """Measured seconds by op name, and what could not be measured."""

    seconds: Mapping[str, float]
    distinct: int
    """Calls that differ in op, arguments, shapes, strides or types: this many were timed for all of ``seconds``."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Ops without a time, and why."""


@dataclass(slots=True, eq=False)
class _Candidate:
    """One distinct call: the ops it stands for, its shortest time so far, and its arguments while they are kept."""

    node: Node
    need_bytes: float
    names: list[str] = field(default_factory=list)
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
    """
    found: dict[Hashable, _Candidate] = {}
    for name, source in zip(traced.graph.names, traced.graph.estimate, strict=True):
        node = traced.nodes.get(name)
        if node is not None and source != "free":
            found.setdefault(signature(node), _Candidate(node, working_bytes(node))).names.append(name)
    candidates = list(found.values())
    with _quiet_torch(threads):
        _take_turns(candidates, runs, memory_bytes, progress)
    timed = [candidate for candidate in candidates if not candidate.reason]
    return OpTimes(
        seconds={name: candidate.best_s for candidate in timed for name in candidate.names},
        distinct=len(timed),
        failed={name: candidate.reason for candidate in candidates if candidate.reason for name in candidate.names},
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

    See ``trace_torch`` for the first arguments and :func:`measure_ops` for the others. Raises what the former raises.
    """
    traced = trace_step(build, mode=mode, batch_size=batch_size, numerics=Numerics(cuda=False))
    times = measure_ops(traced, runs=runs, threads=threads, memory_bytes=memory_bytes, progress=progress)
    graph = apply_times(traced.graph, times, network or Network())
    meta = {**graph.meta, "device": "cpu", "threads": threads or torch.get_num_threads(), "runs": runs}
    return replace(graph, meta={**meta, "torch": str(torch.__version__)})


def apply_times(graph: Graph, times: OpTimes, network: Network) -> Graph:
    """Return the graph with measured durations, seconds; its transfers take ``latency + bytes / bandwidth``.

    Free ops take 0. What an op without a time gets is :func:`.matching.with_measured`'s, beside a roofline at nominal rates.
    Raises InputError when ops cost something and none was measured.
    """
    graph = assign_channels(graph, network.parameter_servers)
    transfer, rate = graph.kind != COMPUTE, network.bandwidth_bytes_per_s
    measured = np.array([name in times.seconds for name in graph.names])
    costs = ~transfer & np.array([source != "free" for source in graph.estimate])
    if costs.any() and not measured.any():
        reason = next(iter(times.failed.values()), "no reason given")
        raise InputError(graph.name, f"none of its {int(costs.sum())} ops could be timed ({reason})", "use roofline")
    roofline = np.maximum(graph.flops / _NOMINAL_FLOPS, graph.size_bytes / _NOMINAL_BYTES_PER_S) + _NOMINAL_LAUNCH_S
    links = {"bandwidth_bytes_per_s": rate, "latency_s": network.latency_s}
    meta = {**graph.meta, "oracle": "measured", "timed_calls": times.distinct, **links}
    nominal = np.where(transfer, network.latency_s + graph.size_bytes / rate, roofline)
    fallback = replace(graph, meta={**meta, "parameter_servers": network.parameter_servers})
    seconds = np.array([times.seconds.get(name, np.nan) for name in graph.names])
    seconds[~costs] = 0.0
    marks: list[Estimate] = ["rule" for _ in graph.names]
    return with_measured(fallback.with_durations(nominal, marks), seconds, measured)


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


def _take_turns(candidates: list[_Candidate], runs: int, memory_bytes: float, progress: Progress | None) -> None:
    """Time every candidate once per round, after a first round that is not timed."""
    kept = 0.0
    largest = max((one.need_bytes for one in candidates if one.need_bytes <= memory_bytes), default=0.0)
    total = len(candidates) * (runs + 1)
    for done in range(total):
        candidate, warm = candidates[done % len(candidates)], done >= len(candidates)
        size = candidate.need_bytes
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


def signature(node: Node) -> Hashable:
    """Return what decides how long a call takes: op, arguments, and shape, strides and type of every tensor.

    The same tensor given twice differs from two tensors alike. Calls of one signature need timing once.
    """
    seen: dict[Node, int] = {}

    def describe(value: Any) -> Hashable:
        if isinstance(value, Node):
            place = seen.setdefault(value, len(seen))
            return (place, *(_describe(leaf) for leaf in _leaves(value_of(value))))
        if isinstance(value, (list, tuple)):
            return ("list", *(describe(item) for item in value))
        if isinstance(value, Mapping):
            return ("map", *((key, describe(item)) for key, item in value.items()))
        return (type(value).__name__, repr(value))

    return (str(node.target), describe(node.args), describe(node.kwargs))


def working_bytes(node: Node) -> float:
    """Return the bytes of a call's arguments and results: what running it alone takes, scratch memory aside."""
    return sum(_bytes(value_of(value)) for value in (*node.all_input_nodes, node))


def make_call(node: Node) -> Call:
    """Return a function that runs the call node with random arguments, which it holds.

    Raises NotImplementedError for a call whose arguments cannot be made up.
    """
    name = base_name(node.target)
    given = named(node)
    if name in _OPAQUE or any("workspace" in argument for argument in given):
        raise NotImplementedError(f"{name} reads what another op packed")
    made: dict[Node, Any] = {}
    for argument, value in given.items():
        positive = argument in _POSITIVE_ARGUMENTS or name in _POSITIVE_OPS
        for source, limit in _nodes_with_limits(value, _index_limits(name, given, argument)):
            if source not in made:
                made[source] = _materialise(value_of(source), limit=limit, positive=positive)
    if name.startswith("max_pool") and name.endswith("_with_indices_backward"):
        _set_pool_indices(name, given, made)
    args, kwargs = map_arg(node.args, made.__getitem__), map_arg(node.kwargs, made.__getitem__)
    target: Any = node.target
    return lambda: target(*args, **kwargs)


def time_call(call: Call) -> float:
    """Return the seconds of one call.

    With one thread the call's CPU time, if that is shorter than what the clock says: what else runs on the
    machine then counts for little. With more threads their CPU time says nothing about the call's length, and only the
    clock is left.
    """
    used = time.process_time()
    began = time.perf_counter()
    call()
    taken = time.perf_counter() - began
    return min(taken, time.process_time() - used) if torch.get_num_threads() == 1 else taken


def _index_limits(name: str, given: Mapping[str, Any], argument: str) -> Sequence[int] | int | None:
    """Return the limit of an argument that holds indices, one per item for a list; None if it holds none."""
    name = name.strip("_").removeprefix("unsafe_")

    def shape(key: str) -> tuple[int, ...]:
        return tuple(value_of(given[key]).shape)

    if name == "embedding" and argument == "indices":
        return shape("weight")[0]
    if name == "embedding_dense_backward" and argument == "indices":
        return int(given["num_weights"])
    if name.startswith("nll_loss") and argument == "target":
        return shape("self")[1 if len(shape("self")) > 1 else 0]
    if name in ("index", "index_put") and argument == "indices":
        return shape("self")
    if argument == "index" and "dim" in given and "self" in given:
        size = shape("self") or (1,)
        return size[int(given["dim"])]
    return None


def _nodes_with_limits(value: Any, limit: Sequence[int] | int | None) -> Iterator[tuple[Node, int]]:
    """Yield each node in an argument with the limit of its integers (1: zeros only)."""
    if isinstance(value, Node):
        yield value, limit if isinstance(limit, int) else 1
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _nodes_with_limits(item, limit[number] if isinstance(limit, tuple) else None)


def _materialise(value: Any, *, limit: int, positive: bool) -> Any:
    """Return a value like a traced one, with memory: same shapes, strides and types."""
    if isinstance(value, (list, tuple)):
        return type(value)(_materialise(item, limit=limit, positive=positive) for item in value)
    if not isinstance(value, Tensor):
        raise NotImplementedError(f"an argument is a {type(value).__name__}")
    elements = _span(value)
    flat = torch.empty(elements, dtype=value.dtype)
    if value.dtype == torch.bool:
        flat.random_(0, 2)
    elif not (value.dtype.is_floating_point or value.dtype.is_complex):
        flat.random_(0, limit) if limit > 1 else flat.zero_()
    else:
        pool = torch.empty(min(elements, _POOL_ELEMENTS))
        pool.uniform_(0.1, 1.0) if positive else pool.normal_()
        for start in range(0, elements, _POOL_ELEMENTS):  # drawing a gigabyte of numbers takes longer than most ops
            part = flat[start : start + _POOL_ELEMENTS]
            part.copy_(pool[: len(part)])
    return flat.as_strided(value.shape, value.stride())


def _set_pool_indices(name: str, named: Mapping[str, Any], made: dict[Node, Any]) -> None:
    """Set the indices of a pooling's backward pass to those of its forward: random ones would miss every cache."""
    wanted = ("self", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
    arguments = [map_arg(named[key], made.__getitem__) for key in wanted]
    forward = getattr(torch.ops.aten, name.removesuffix("_backward")).default
    made[named["indices"]].copy_(forward(*arguments)[1])


def _describe(value: Any) -> Hashable:
    return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else repr(value)


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [] if value is None else [value]


def _span(value: Tensor) -> int:
    """Return how many elements a tensor of this shape and these strides reaches over."""
    if value.numel() == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))


def _bytes(value: Any) -> float:
    return float(sum(_span(leaf) * leaf.element_size() for leaf in _leaves(value) if isinstance(leaf, Tensor)))
