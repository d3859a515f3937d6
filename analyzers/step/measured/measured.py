"""The measured time oracle: it times every op of a traced step on this machine's CPU. Start at :func:`measure_ops`.

TicTac's oracle (section 5) takes the shortest of 5 runs of each op. Here an op runs by itself with random arguments of
the traced shapes and strides, and equal calls (see :func:`signature`) are timed once. So a step takes seconds to
measure, needs memory for a few ops rather than for the step, and allocates no weights.

Every round calls each op once, in program order, so that an op finds the caches as other ops left them, as in a real step.
Five calls of one op in a row would be up to 20 % too fast on small models.

Floating-point arguments are normal, or in [0.1, 1) where an op needs them positive (variances, ``log``, ``pow``).
Integer arguments that index something are drawn from its range; all others are 0, which is always a valid index.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from ddltool.analyzers.step.measured.matching import with_measured
from ddltool.analyzers.step.recording.torch_costs import arguments_by_name, base_name, value_of
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.step import TrainingStep
from ddltool.analyzers.step.tracing.torch_adapter import TracedStep, trace_step
from ddltool.device import Network
from ddltool.errors import InputError, one_line
from ddltool.graph import COMPUTE, Estimate, Graph, Mode, assign_channels
from ddltool.units import show_bytes

Call = Callable[[], Any]
Progress = Callable[[int, int], None]
DEFAULT_MEMORY_BYTES = 2 * 2**30
# Nominal rates of the ops that cannot be timed: only the ratio of their times matters, since measured ops set the scale.
_NOMINAL_FLOPS, _NOMINAL_BYTES_PER_S, _NOMINAL_LAUNCH_S = 1e11, 1e10, 1e-6
# Arguments that must be positive, and ops all of whose arguments must be.
_POSITIVE_ARGUMENTS = frozenset(
    ["running_var", "save_invstd", "save_var", "rstd", "invstd", "logsumexp", "total_weight"]
)
_POSITIVE_OPS = frozenset(["pow", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "lgamma", "digamma"])
# Ops that read a buffer in a private format, packed by another op of the same library.
_OPAQUE = frozenset(["mkldnn_rnn_layer_backward"])
# How many random numbers are drawn for a tensor at most; a larger tensor repeats them.
_POOL_ELEMENTS = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class OpTimes:
    """Measured seconds by op name, and the ops that could not be measured."""

    seconds: Mapping[str, float]
    distinct: int
    """How many distinct calls (by :func:`signature`) were timed."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """By the name of an op without a time, the reason."""


@dataclass(slots=True, eq=False)
class _Candidate:
    """One distinct call that is timed for all ops with its signature."""

    node: Node
    need_bytes: float
    """Bytes of its arguments and results."""
    names: list[str] = field(default_factory=list)
    """The names of the ops with this signature."""
    best_s: float = float("inf")
    """The shortest time so far."""
    call: Call | None = None
    """The call with its arguments, if it is kept from round to round; None: it is made anew in every round."""
    reason: str = ""
    """Why it cannot be timed, "" if it can."""


def measure_ops(
    traced: TracedStep,
    *,
    runs: int = 5,
    memory_bytes: float = DEFAULT_MEMORY_BYTES,
    progress: Progress | None = None,
) -> OpTimes:
    """Return the shortest time in seconds of ``runs`` calls of every op that is not free, or why it has none.

    Args:
        memory_bytes: limit on the arguments and results that are in memory; an op that needs more by itself is not run.
        progress: ``progress(done, total)`` is called after every call.
    """
    candidate_of: dict[Hashable, _Candidate] = {}
    for name, estimate in zip(traced.graph.names, traced.graph.estimate, strict=True):
        node = traced.nodes.get(name)  # None: a transfer
        if node is None or estimate == "free":
            continue
        key = signature(node)
        if key not in candidate_of:
            candidate_of[key] = _Candidate(node, working_bytes(node))
        candidate_of[key].names.append(name)
    candidates = list(candidate_of.values())
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        _time_in_rounds(candidates, runs, memory_bytes, progress)
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
    progress: Progress | None = None,
) -> Graph:
    """Return the graph of one step with measured compute ops and transfers timed by ``network``.

    Args:
        build: a function that makes the step, which is traced in float32 for this machine's CPU.
        mode, batch_size: see :func:`.torch_adapter.trace_torch`, also for what it raises.
        network: what the transfers go over; None: the default network.
        runs, progress: see :func:`measure_ops`.
    """
    traced = trace_step(build, mode=mode, batch_size=batch_size, numerics=Numerics(cuda=False))
    times = measure_ops(traced, runs=runs, progress=progress)
    graph = apply_times(traced.graph, times, network or Network())
    meta = {**graph.meta, "device": "cpu", "threads": torch.get_num_threads(), "runs": runs}
    return replace(graph, meta={**meta, "torch": str(torch.__version__)})


def apply_times(graph: Graph, times: OpTimes, network: Network) -> Graph:
    """Return the graph with the measured durations in seconds; transfers take ``latency + bytes / bandwidth``, free ops 0.

    An op without a measured time gets a roofline at nominal rates, which :func:`.matching.with_measured` scales to the ops
    that have one. Raises InputError if some ops cost something and none of these was measured.
    """
    graph = assign_channels(graph, network.parameter_servers)
    is_transfer = graph.kind != COMPUTE
    bytes_per_s = network.bandwidth_bytes_per_s
    is_measured = np.array([name in times.seconds for name in graph.names])
    is_costly = ~is_transfer & np.array([estimate != "free" for estimate in graph.estimate])
    if is_costly.any() and not is_measured.any():
        reason = next(iter(times.failed.values()), "no reason given")
        problem = f"none of its {int(is_costly.sum())} ops could be timed ({reason})"
        raise InputError(graph.name, problem, "use roofline")
    roofline = np.maximum(graph.flops / _NOMINAL_FLOPS, graph.size_bytes / _NOMINAL_BYTES_PER_S) + _NOMINAL_LAUNCH_S
    nominal = np.where(is_transfer, network.latency_s + graph.size_bytes / bytes_per_s, roofline)
    meta = {
        **graph.meta,
        "oracle": "measured",
        "timed_calls": times.distinct,
        "bandwidth_bytes_per_s": bytes_per_s,
        "latency_s": network.latency_s,
        "parameter_servers": network.parameter_servers,
    }
    fallback = replace(graph, meta=meta)
    seconds = np.array([times.seconds.get(name, np.nan) for name in graph.names])  # NaN: not measured
    seconds[~is_costly] = 0.0
    marks: list[Estimate] = ["rule" for _ in graph.names]
    return with_measured(fallback.with_durations(nominal, marks), seconds, is_measured)


def _time_in_rounds(candidates: list[_Candidate], runs: int, memory_bytes: float, progress: Progress | None) -> None:
    """Call every candidate once per round, and store its shortest time, or the reason why it has none, in it.

    The first round warms up and does not count. Calls with their arguments are kept for later rounds as long as
    ``memory_bytes`` leave room for the largest op; the others are made anew in every round. ``progress``: see
    :func:`measure_ops`.
    """
    for candidate in candidates:
        if candidate.need_bytes > memory_bytes:
            needed, allowed = show_bytes(candidate.need_bytes), show_bytes(memory_bytes)
            candidate.reason = f"needs {needed}, more than the {allowed} allowed"
    largest_bytes = max((candidate.need_bytes for candidate in candidates if not candidate.reason), default=0.0)
    kept_bytes = 0.0
    total = len(candidates) * (runs + 1)
    for done in range(total):
        candidate = candidates[done % len(candidates)]
        is_warm_up = done < len(candidates)
        if not candidate.reason:
            try:
                call = candidate.call or make_call(candidate.node)
                call_s = time_call(call)
            except Exception as error:  # an op may raise anything when its arguments are made up
                candidate.reason = one_line(f"{type(error).__name__}: {error}")[:200]
                candidate.call = None
            else:
                if not is_warm_up:
                    candidate.best_s = min(candidate.best_s, call_s)
                elif kept_bytes + candidate.need_bytes + largest_bytes <= memory_bytes:
                    candidate.call = call
                    kept_bytes += candidate.need_bytes
        if progress is not None:
            progress(done + 1, total)


def signature(node: Node) -> Hashable:
    """Return a key that is equal for calls that take equally long: op, arguments, and shape, strides and type of tensors.

    Tensors are numbered by first use, so that a call with one tensor twice differs from a call with two alike tensors.
    """
    tensor_indices: dict[Node, int] = {}

    def describe(value: Any) -> Hashable:
        """Return an argument as a key: a node's number and value, a container's items, or else type and text."""
        if isinstance(value, Node):
            tensor_index = tensor_indices.setdefault(value, len(tensor_indices))
            return (tensor_index, *(_describe_value(leaf) for leaf in _leaves(value_of(value))))
        if isinstance(value, (list, tuple)):
            return ("list", *(describe(item) for item in value))
        if isinstance(value, Mapping):
            return ("map", *((key, describe(item)) for key, item in value.items()))
        return (type(value).__name__, repr(value))

    return (str(node.target), describe(node.args), describe(node.kwargs))


def working_bytes(node: Node) -> float:
    """Return the bytes of a call's arguments and results, without scratch memory."""
    return sum(_tensor_bytes(value_of(value)) for value in (*node.all_input_nodes, node))


def make_call(node: Node) -> Call:
    """Return a function without parameters that runs the node's op on random arguments, which it keeps in memory.

    Raises NotImplementedError for an op that reads a private format, and for an argument of an unknown type.
    """
    name = base_name(node.target)
    arguments = arguments_by_name(node.target, node.args, node.kwargs)
    if name in _OPAQUE or any("workspace" in argument for argument in arguments):
        raise NotImplementedError(f"{name} reads what another op packed")
    # By the node among the arguments, the random tensor, or list of tensors, in its place.
    tensor_of: dict[Node, Any] = {}
    for argument, value in arguments.items():
        is_positive = argument in _POSITIVE_ARGUMENTS or name in _POSITIVE_OPS
        limits = _index_limits(name, arguments, argument)
        for input_node, limit in _nodes_with_limits(value, limits):
            if input_node not in tensor_of:
                tensor_of[input_node] = _materialise(value_of(input_node), limit=limit, positive=is_positive)
    if name.startswith("max_pool") and name.endswith("_with_indices_backward"):
        _set_pool_indices(name, arguments, tensor_of)
    args = map_arg(node.args, tensor_of.__getitem__)
    kwargs = map_arg(node.kwargs, tensor_of.__getitem__)
    target: Any = node.target
    return lambda: target(*args, **kwargs)


def time_call(call: Call) -> float:
    """Return the seconds of one call.

    With one thread: the shorter of CPU and wall time, so that other work on the machine counts little. With more threads:
    wall time, since CPU time adds up over threads.
    """
    cpu_began_s = time.process_time()
    wall_began_s = time.perf_counter()
    call()
    wall_s = time.perf_counter() - wall_began_s
    cpu_s = time.process_time() - cpu_began_s
    return min(wall_s, cpu_s) if torch.get_num_threads() == 1 else wall_s


def _index_limits(name: str, arguments: Mapping[str, Any], argument: str) -> Sequence[int] | int | None:
    """Return the exclusive upper limit of the indices in the argument named ``argument``; None: it holds no indices.

    For a list of index tensors (``index``, ``index_put``) a limit for each dimension is returned. ``name``: the op's;
    ``arguments``: all of its arguments by name, from whose shapes the limit follows.
    """
    name = name.strip("_").removeprefix("unsafe_")

    def shape(key: str) -> tuple[int, ...]:
        """Return the shape of the tensor in an argument."""
        return tuple(value_of(arguments[key]).shape)

    if name == "embedding" and argument == "indices":
        return shape("weight")[0]
    if name == "embedding_dense_backward" and argument == "indices":
        return int(arguments["num_weights"])
    if name.startswith("nll_loss") and argument == "target":  # classes: (classes,) or (samples, classes, ...)
        return shape("self")[1 if len(shape("self")) > 1 else 0]
    if name in ("index", "index_put") and argument == "indices":
        return shape("self")
    if argument == "index" and "dim" in arguments and "self" in arguments:
        size = shape("self") or (1,)
        return size[int(arguments["dim"])]
    return None


def _nodes_with_limits(value: Any, limit: Sequence[int] | int | None) -> Iterator[tuple[Node, int]]:
    """Yield (node, exclusive limit of its integers) for each node in ``value``, a node or a list of them.

    ``limit``: what :func:`_index_limits` returned for the argument. A limit of 1 allows zeros only.
    """
    if isinstance(value, Node):
        yield value, limit if isinstance(limit, int) else 1
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _nodes_with_limits(item, limit[index] if isinstance(limit, tuple) else None)


def _materialise(value: Any, *, limit: int, positive: bool) -> Any:
    """Return a random tensor with the shape, strides and type of a traced one; for a list of tensors, a list.

    ``limit``: exclusive limit of integers. ``positive``: floats are drawn from [0.1, 1) and not from a normal distribution.
    Raises NotImplementedError for a value that is no tensor.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(_materialise(item, limit=limit, positive=positive) for item in value)
    if not isinstance(value, Tensor):
        raise NotImplementedError(f"an argument is a {type(value).__name__}")
    elements = _storage_elements(value)
    flat = torch.empty(elements, dtype=value.dtype)
    if value.dtype == torch.bool:
        flat.random_(0, 2)
    elif not (value.dtype.is_floating_point or value.dtype.is_complex):
        flat.random_(0, limit) if limit > 1 else flat.zero_()
    else:
        random_pool = torch.empty(min(elements, _POOL_ELEMENTS))
        random_pool.uniform_(0.1, 1.0) if positive else random_pool.normal_()
        for start in range(0, elements, _POOL_ELEMENTS):  # drawing a gigabyte of numbers takes longer than most ops
            chunk = flat[start : start + _POOL_ELEMENTS]
            chunk.copy_(random_pool[: len(chunk)])
    return flat.as_strided(value.shape, value.stride())


def _set_pool_indices(name: str, arguments: Mapping[str, Any], tensor_of: dict[Node, Any]) -> None:
    """Set the indices for a pooling's backward pass to those that its forward pass finds in the same random input.

    Random indices would miss every cache. ``name``: the backward op's; ``tensor_of``: the random tensors by node, of which
    that of the argument ``indices`` is overwritten.
    """
    argument_names = ("self", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
    forward_arguments = [map_arg(arguments[key], tensor_of.__getitem__) for key in argument_names]
    forward = getattr(torch.ops.aten, name.removesuffix("_backward")).default
    tensor_of[arguments["indices"]].copy_(forward(*forward_arguments)[1])


def _describe_value(value: Any) -> Hashable:
    """Return shape, strides and type of a tensor, or the text of another value, as a key."""
    return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else repr(value)


def _leaves(value: Any) -> list[Any]:
    """Return the items of nested lists and tuples in order, without None; for any other value, a list of it alone.

    None by itself gives an empty list.
    """
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [] if value is None else [value]


def _storage_elements(value: Tensor) -> int:
    """Return how many elements of storage a tensor spans, from its first element to its last, both included."""
    if value.numel() == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))


def _tensor_bytes(value: Any) -> float:
    """Return the bytes of storage under the tensors in a value, which may be a tensor or nested lists of them."""
    tensors = (leaf for leaf in _leaves(value) if isinstance(leaf, Tensor))
    return float(sum(_storage_elements(tensor) * tensor.element_size() for tensor in tensors))
