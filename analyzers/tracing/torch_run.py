"""Running the ops of a traced step on the CPU, each by itself with made-up arguments or all in a run of the step.

Floating-point arguments are normal, or in [0.1, 1) where an op needs them positive (variances, ``log``, ``pow``).
Integer arguments that index something are drawn from its range; all others are 0, which is always a valid index.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from ddltool.analyzers.tracing.torch_costs import base_name, named, storages, value_of

Call = Callable[[], Any]

_POSITIVE_ARGUMENTS = frozenset(
    ["running_var", "save_invstd", "save_var", "rstd", "invstd", "logsumexp", "total_weight"]
)
_POSITIVE_OPS = frozenset(["pow", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "lgamma", "digamma"])
# What these read was packed by another op of the same library in a form that only the library knows.
_OPAQUE = frozenset(["mkldnn_rnn_layer_backward"])
_POOL_ELEMENTS = 1 << 20


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


def peak_bytes(fx: GraphModule) -> float:
    """Return an upper bound on the bytes alive at once in a run of the step that drops values after their last use."""
    change = [0.0] * (len(fx.graph.nodes) + 1)
    for storage in storages(fx):
        change[storage.born] += storage.elements * storage.width
        change[storage.died] -= storage.elements * storage.width
    return max(accumulate(change))


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


def time_in_step(fx: GraphModule, wanted: Collection[Node], *, runs: int) -> dict[Node, float]:
    """Return the shortest time of each wanted node over ``runs`` runs of the whole step, after one that is not timed.

    Whatever a node raises ends the run and is raised.
    """
    inputs = [
        _materialise(value_of(node), limit=1, positive=False) for node in fx.graph.nodes if node.op == "placeholder"
    ]
    best = dict.fromkeys(wanted, float("inf"))

    class Timer(Interpreter):
        def run_node(self, n: Node) -> Any:
            if n not in best or not timing:
                return super().run_node(n)
            kept: list[Any] = []
            best[n] = min(best[n], time_call(lambda: kept.append(super(Timer, self).run_node(n))))
            return kept[0]

    for repetition in range(runs + 1):
        timing = repetition > 0
        Timer(fx).run(*inputs)
    return best


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
