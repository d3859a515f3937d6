"""The work of one aten op of a recorded step: its fake tensors' sizes, by the rules of :mod:`op_rules`.

Every size goes through a :class:`Scale`, so that one trace gives the work of a step at any batch size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map_only

from ddltool.analyzers.tracing import op_rules
from ddltool.analyzers.tracing.op_rules import Call, Cost, names_in


@dataclass(frozen=True, slots=True)
class Scale:
    """From the batch size of a trace to another one: every dimension that ``prime`` divides grows with the batch.

    Exact when the prime divides no other dimension of the step (:func:`prime_batch`).
    """

    traced: int = 1
    wanted: int = 1
    prime: int = 0
    """A divisor of ``traced``; 0: ``traced`` itself."""

    def size(self, number: int) -> int:
        """Return a dimension or a count of elements at the wanted batch size, rounded down.

        >>> Scale(61, 4).size(61 * 196), Scale(61, 4).size(61 * 61), Scale(61, 4).size(224)
        (784, 16, 224)
        >>> Scale(8 * 61, 6, 61).size(4 * 61)  # half of the batch
        3
        """
        grown, shrunk = self._ratio(number)
        return grown // shrunk

    def is_whole(self, number: int) -> bool:
        """Return whether a dimension comes out whole: half of an odd batch does not."""
        grown, shrunk = self._ratio(number)
        return grown % shrunk == 0

    def _ratio(self, number: int) -> tuple[int, int]:
        if self.traced == self.wanted:
            return number, 1
        prime = self.prime or self.traced
        powers = 0
        while number and number % prime == 0:
            number //= prime
            powers += 1
        return number * self.wanted**powers, (self.traced // prime) ** powers

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Return a tensor's shape at the wanted batch size."""
        return tuple(self.size(int(dim)) for dim in tensor.shape)

    def elements(self, tensor: Tensor) -> int:
        """Return how many elements a tensor has at the wanted batch size."""
        return math.prod(self.shape(tensor))

    def stored_bytes(self, tensor: Tensor) -> float:
        """Return the bytes of the storage behind a tensor at the wanted batch size."""
        width = tensor.element_size()
        return float(self.size(tensor.untyped_storage().nbytes() // width) * width)


AS_TRACED = Scale()


def prime_batch(sizes: Iterable[int]) -> int:
    """Return a prime that divides none of the ``sizes``: traced at this batch, a dimension tells if it is the batch's."""
    taken = {int(size) for size in sizes if size}
    return next(
        number
        for number in count(61, 2)
        if all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2))
        and all(size % number for size in taken)
    )


# One row read for each index, and fewer written: those of a bag are added up.
_BAGS = names_in("_embedding_bag _embedding_bag_forward_only")
# CUDA's kernels for these read half precision and compute in float32, or write half precision again: a cast beside them is
# no kernel of its own.
_CASTS_INPUT = names_in("_softmax _log_softmax _safe_softmax sum prod cumsum cumprod")
_CASTS_RESULT = frozenset(["_softmax_backward_data", "_log_softmax_backward_data"])


def cost_of(node: Node, scale: Scale = AS_TRACED) -> Cost:
    """Return the cost of a call node whose ``meta['val']`` holds fake tensors (set by make_fx), at a scaled batch size."""
    target: Any = node.target
    name = base_name(target)
    output = tensors_of(node.meta.get("val"))
    operator = isinstance(target, torch._ops.OpOverload)
    if name in op_rules.FREE or (operator and target.is_view) or _in_neighbour(node, name):
        return Cost(flops=0.0, size_bytes=0.0, estimate="free", written_bytes=_bytes(output, scale))
    given = map_arg(named(node), lambda n: n.meta.get("val"))
    inputs = tensors_of(given)
    if name in _CASTS_INPUT | _CASTS_RESULT:
        inputs, output = _without_casts(node, inputs, output)
    written = _bytes(output, scale)
    if name in _BAGS:
        table = given["weight"]
        added = float(scale.elements(given["indices"]) * math.prod(table.shape[1:]))
        moved = added * table.element_size() + _bytes([one for one in inputs if one is not table], scale) + written
        dtype = _dtype([*output, *inputs])
        return Cost(flops=added, size_bytes=moved, estimate="rule", written_bytes=written, dtype=dtype)
    shapes = dict(tree_map_only(Tensor, scale.shape, given))
    if "groups" in given:  # a filter of its own for every sample makes the batch one of groups
        shapes["groups"] = scale.size(int(given["groups"]))
    call = Call(
        name=name,
        inputs=[value if isinstance(given[key], Tensor) else None for key, value in shapes.items()],
        output=scale.shape(output[0]) if output else None,
        named=shapes,
        elements=max((float(scale.elements(tensor)) for tensor in [*inputs, *output]), default=0.0),
        read_bytes=_bytes(inputs, scale),
        written_bytes=written,
        dtype=_dtype(inputs if op_rules.multiplies(name) else [*output, *inputs]),
        pointwise=operator and torch.Tag.pointwise in target.tags,
    )
    return op_rules.cost_of(call)


def _in_neighbour(node: Node, name: str) -> bool:
    """Return whether a cast happens inside the kernel beside it: before a softmax or sum, or after a softmax's backward."""
    if name != "_to_copy" or not isinstance(node.args[0], Node):
        return False
    before = base_name(node.args[0].target)
    if before in _CASTS_RESULT:
        return len(node.args[0].users) == 1
    return bool(node.users) and all(base_name(user.target) in _CASTS_INPUT for user in node.users)


def _without_casts(node: Node, inputs: list[Tensor], output: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return what a kernel that casts by itself really reads and writes: the tensors beyond the casts."""
    for source in node.all_input_nodes:
        if _in_neighbour(source, base_name(source.target)):
            cast = source.meta["val"]
            inputs = [source.args[0].meta["val"] if tensor is cast else tensor for tensor in inputs]  # type: ignore[union-attr]
    for user in node.users:
        if _in_neighbour(user, base_name(user.target)):
            output = [user.meta["val"]]
    return inputs, output


def base_name(target: Any) -> str:
    """Return an op's name without namespace and overload: ``convolution`` for ``aten.convolution.default``."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return str(getattr(target, "__name__", target))


def named(node: Node) -> dict[str, Any]:
    """Return a call's arguments by the names of its schema; by position where it has none."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    names += [str(number) for number in range(len(names), len(node.args))]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _dtype(tensors: Sequence[Tensor]) -> str:
    """Return the type that an op computes in: that of its largest floating-point tensor, else of its first."""
    floating = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    chosen = max(floating, key=lambda tensor: tensor.numel(), default=tensors[0] if tensors else None)
    return str(chosen.dtype).removeprefix("torch.") if chosen is not None else ""


def tensors_of(values: Any) -> list[Tensor]:
    """Return the distinct tensors anywhere in nested lists, tuples and mappings; of a sparse one indices and values."""
    found: dict[int, Tensor] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            if value.layout == torch.sparse_coo:
                visit([value._indices(), value._values()])
            else:
                found.setdefault(id(value), value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif isinstance(value, Mapping):
            for item in value.values():
                visit(item)

    visit(values)
    return list(found.values())


def value_of(node: Node) -> Any:
    """Return what a node makes, as fake tensors; for a constant of the graph the constant."""
    if "val" in node.meta or node.op != "get_attr":
        return node.meta.get("val")
    return getattr(node.graph.owning_module, str(node.target), None)


def _bytes(tensors: Iterable[Tensor], scale: Scale) -> float:
    """Return the bytes that the tensors occupy; an expanded tensor counts what it is stored in."""
    return float(sum(min(scale.elements(t) * t.element_size(), scale.stored_bytes(t)) for t in tensors))
