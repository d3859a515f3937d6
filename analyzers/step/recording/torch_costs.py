"""The work of one aten op of a recorded step, from the sizes of its fake tensors by the rules of :mod:`op_rules`.

Every size goes through a :class:`Scale`, so that one trace gives the work of a step at any batch size. The cost of a call
depends on its :class:`Issued` alone; equal calls, such as those of equal layers, are costed once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from ddltool.analyzers.step.recording import op_rules
from ddltool.analyzers.step.recording.op_rules import Call, Cost, names_in


@dataclass(frozen=True, slots=True)
class Scale:
    """Scales sizes from a trace's batch size to a wanted one.

    A dimension that ``prime`` divides is taken to grow with the batch, and any other one to be independent of it. A trace
    at a batch of 61 samples has dimensions such as 61 x 196; at a batch of 4 they are 4 x 196. The scaling is exact if
    the prime divides no dimension that is independent of the batch (:func:`prime_batch`).
    """

    traced: int = 1
    """The batch size of the trace."""
    wanted: int = 1
    """The batch size to scale to."""
    prime: int = 0
    """A divisor of ``traced``; 0: ``traced`` itself."""

    def size(self, number: int) -> int:
        """Return a dimension or a count of elements at the wanted batch size, rounded down.

        >>> Scale(61, 4).size(61 * 196), Scale(61, 4).size(61 * 61), Scale(61, 4).size(224)
        (784, 16, 224)
        >>> Scale(8 * 61, 6, 61).size(4 * 61)  # half of the batch
        3
        """
        numerator, denominator = self._ratio(number)
        return numerator // denominator

    def is_whole(self, number: int) -> bool:
        """Return whether a dimension scales to a whole number: half of an odd batch does not."""
        numerator, denominator = self._ratio(number)
        return numerator % denominator == 0

    def _ratio(self, number: int) -> tuple[int, int]:
        """Return numerator and denominator of a scaled dimension, whose quotient need not be whole.

        The prime may divide ``number`` several times (a square of the batch); each of these factors is scaled.
        """
        if self.traced == self.wanted:
            return number, 1
        prime = self.prime or self.traced
        powers = 0  # how often the prime divides the number
        while number and number % prime == 0:
            number //= prime
            powers += 1
        return number * self.wanted**powers, (self.traced // prime) ** powers

    def shape(self, tensor: Sized) -> tuple[int, ...]:
        """Return a tensor's shape at the wanted batch size."""
        return tuple(map(self.size, tensor.shape))

    def elements(self, tensor: Sized) -> int:
        """Return how many elements a tensor has at the wanted batch size."""
        return math.prod(self.shape(tensor))

    def bytes(self, tensors: Iterable[Sized]) -> float:
        """Return the bytes of tensors at the wanted batch size; of an expanded tensor, only the stored elements count."""
        return float(sum(min(self.elements(tensor), self.size(tensor.stored)) * tensor.width for tensor in tensors))


@dataclass(frozen=True, slots=True)
class Sized:
    """The properties of a tensor that cost rules read."""

    shape: tuple[int, ...]
    stored: int
    """Elements of its storage, 0 for a sparse tensor."""
    width: int
    """Bytes of an element."""
    dtype: str
    """torch's name of the type: ``float32``."""
    floating: bool
    """Whether its numbers are floating-point, real or complex."""


@dataclass(frozen=True, slots=True)
class Issued:
    """What the cost of a recorded call depends on: calls with equal ones cost the same."""

    name: str
    """Without namespace and overload: ``convolution``."""
    free: bool
    """Whether it costs nothing: a view, an allocation, or a cast that runs within a neighbour's kernel."""
    pointwise: bool
    """Whether torch marks the op as element-wise."""
    arguments: tuple[tuple[str, Any], ...] = ()
    """(name, value) pairs; tensors as :class:`Sized`, lists as tuples."""
    inputs: tuple[Sized, ...] = ()
    """The distinct tensors that the kernel reads."""
    output: tuple[Sized, ...] = ()


AS_TRACED = Scale()
"""The scale that changes no size."""


_LEAST_PRIME = 61
"""Smaller primes divide too many of a model's sizes."""


def prime_batch(sizes: Iterable[int]) -> int:
    """Return a prime, 61 or more, that divides none of the ``sizes``.

    ``sizes``: of the model and its inputs without the batch. In a trace with this number of samples, only dimensions
    that grow with the batch are then divisible by it.
    """
    other_sizes = {int(size) for size in sizes if size}  # 0 would be divisible by every prime

    def is_prime(odd: int) -> bool:
        """Return whether an odd number is a prime."""
        return all(odd % divisor for divisor in range(3, math.isqrt(odd) + 1, 2))

    odd_numbers = count(_LEAST_PRIME, 2)
    return next(number for number in odd_numbers if is_prime(number) and all(size % number for size in other_sizes))


# Ops that read a row for each index and write the sum of each bag.
_BAGS = names_in("_embedding_bag _embedding_bag_forward_only")
# CUDA's kernels of these ops read half precision and compute in float32, or write half precision from it: a cast before
# or after them is no separate kernel.
_CASTS_INPUT = names_in("_softmax _log_softmax _safe_softmax sum prod cumsum cumprod")
_CASTS_RESULT = frozenset(["_softmax_backward_data", "_log_softmax_backward_data"])


def issued(node: Node) -> Issued:
    """Return what the cost of a call depends on; ``node``: the call, whose results (fake tensors) are in ``meta["val"]``.

    So are those of the nodes among its arguments.
    """
    target: Any = node.target  # an operator of torch, or any other function that torch.fx can call
    name = base_name(target)
    output = tensors_of(node.meta.get("val"))
    is_operator = isinstance(target, torch._ops.OpOverload)
    if name in op_rules.FREE or (is_operator and target.is_view) or _is_fused_cast(node, name):
        return Issued(name, free=True, pointwise=False, output=tuple(map(sized, output)))
    arguments = map_arg(arguments_by_name(target, node.args, node.kwargs), lambda argument: argument.meta.get("val"))
    unread = _out_names(target) if is_operator else frozenset()
    inputs = tensors_of([value for argument, value in arguments.items() if argument not in unread])
    if is_operator and not target._schema.returns:  # an update in place: what it writes is among its arguments
        written = _written_names(target)
        if name.startswith("_fused_") and arguments.get("grad_scale") is None:
            written.remove("grads")  # a fused optimizer writes gradients only where it has to unscale them
        output = tensors_of([arguments.get(argument) for argument in written])
    if name == "all_gather_copy_in":  # FSDP2 copies a process's shards into its own part of the buffer that it gathers
        inputs, output = tensors_of(arguments["all_gather_inputs"]), output[:1]
    if name in _CASTS_INPUT | _CASTS_RESULT:
        inputs, output = _without_casts(node, inputs, output)
    return Issued(
        name,
        free=False,
        pointwise=is_operator and torch.Tag.pointwise in target.tags,
        arguments=tuple((key, _hashable(value)) for key, value in arguments.items()),
        inputs=tuple(map(sized, inputs)),
        output=tuple(map(sized, output)),
    )


@lru_cache(maxsize=8192)
def sized(tensor: Tensor) -> Sized:
    """Return the properties of a fake tensor that cost rules read, worked out once for each tensor (by identity)."""
    width = tensor.element_size()
    return Sized(
        shape=tuple(map(int, tensor.shape)),
        stored=0 if tensor.layout == torch.sparse_coo else tensor.untyped_storage().nbytes() // width,
        width=width,
        dtype=str(tensor.dtype).removeprefix("torch."),
        floating=tensor.is_floating_point() or tensor.is_complex(),
    )


def _hashable(value: Any) -> Any:
    """Return an argument in a form that can be compared and hashed: tensors as :class:`Sized`, lists as tuples.

    A value that has no hash, such as a dictionary, becomes its text.
    """
    if isinstance(value, Tensor):
        return sized(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_hashable, value))
    return value if value.__hash__ is not None else str(value)


def cost_of(call: Issued, scale: Scale = AS_TRACED) -> Cost:
    """Return the operations and bytes of a call, with its tensors scaled from the traced batch size to another.

    An embedding bag reads the rows of its indices and adds them up; every other op follows the tables of
    :mod:`.op_rules`.
    """
    written = scale.bytes(call.output)
    if call.free:
        return Cost(flops=0.0, size_bytes=0.0, estimate="free", written_bytes=written)
    arguments = dict(call.arguments)
    if call.name in _BAGS:
        return _cost_of_bag(call, scale)

    def to_shapes(value: Any) -> Any:
        """Return an argument with its tensors as scaled shapes."""
        if isinstance(value, Sized):
            return scale.shape(value)
        return [to_shapes(item) for item in value] if isinstance(value, tuple) else value

    shapes = {key: to_shapes(value) for key, value in arguments.items()}
    if "groups" in arguments:  # a convolution with a filter per sample has its batch in the groups
        shapes["groups"] = scale.size(int(arguments["groups"]))
    return op_rules.cost_of(
        Call(
            name=call.name,
            inputs=[shape if isinstance(arguments[key], Sized) else None for key, shape in shapes.items()],
            output=scale.shape(call.output[0]) if call.output else None,
            named=shapes,
            elements=max((float(scale.elements(tensor)) for tensor in [*call.inputs, *call.output]), default=0.0),
            read_bytes=scale.bytes(call.inputs),
            written_bytes=written,
            # A product computes in its inputs' type, also where it returns another (float8 gives bfloat16).
            dtype=_dtype(call.inputs if op_rules.multiplies(call.name) else [*call.output, *call.inputs]),
            pointwise=call.pointwise,
        )
    )


def _cost_of_bag(call: Issued, scale: Scale) -> Cost:
    """Return the cost of an embedding bag, which reads one row of a table for each index and adds up the rows of each bag."""
    arguments = dict(call.arguments)
    table, indices = arguments["weight"], arguments["indices"]
    row_elements = math.prod(table.shape[1:])
    added_elements = float(scale.elements(indices) * row_elements)
    other_inputs = list(call.inputs)
    other_inputs.remove(table)  # only the looked-up rows of the table are read
    written = scale.bytes(call.output)
    return Cost(
        flops=added_elements,
        size_bytes=added_elements * table.width + scale.bytes(other_inputs) + written,
        estimate="rule",
        written_bytes=written,
        dtype=_dtype([*call.output, *call.inputs]),
    )


def _is_fused_cast(node: Node, name: str) -> bool:
    """Return whether a node is a cast that runs within the kernel before or after it, and so costs nothing by itself.

    The kernels of softmax and sums cast what they read, so a cast is part of them if only they read its result. The
    backward kernel of a softmax casts what it writes, so a cast is part of it if nothing else reads that. ``name``: the
    node's op.
    """
    source = node.args[0] if node.args else None
    if name != "_to_copy" or not isinstance(source, Node):
        return False
    if base_name(source.target) in _CASTS_RESULT:
        return len(source.users) == 1
    return bool(node.users) and all(base_name(user.target) in _CASTS_INPUT for user in node.users)


def _without_casts(node: Node, inputs: list[Tensor], output: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that a kernel reads and those that it writes, where casts before and after it run within it.

    It then reads what the cast before it casts, and writes the result of the cast after it. ``inputs`` and ``output``: the
    tensors of the node itself, as if casts were kernels of their own.
    """
    for source in node.all_input_nodes:
        if _is_fused_cast(source, base_name(source.target)):
            cast = source.meta["val"]
            inputs = [source.args[0].meta["val"] if tensor is cast else tensor for tensor in inputs]  # type: ignore[union-attr]
    for user in node.users:
        if _is_fused_cast(user, base_name(user.target)):
            output = [user.meta["val"]]
    return inputs, output


def base_name(target: Any) -> str:
    """Return an op's name without namespace and overload: ``convolution`` for ``aten.convolution.default``."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return str(getattr(target, "__name__", target))


def arguments_by_name(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by their names in its op's schema; the names are "0", "1", ... for an op without a schema.

    ``target``: torch's operator or another function, ``args`` and ``kwargs``: as it is called. Defaults are left out.
    """
    schema = getattr(target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    names += [str(number) for number in range(len(names), len(args))]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def written_arguments(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that a call writes to in place, as the schema of its op ``target`` declares them; [] without one.

    ``args``, ``kwargs``: of the call.
    """
    if not (names := _written_names(target)):
        return []
    arguments = arguments_by_name(target, args, kwargs)
    return [arguments[name] for name in names if name in arguments]


@cache
def _out_names(target: torch._ops.OpOverload) -> frozenset[str]:
    """Return the arguments that an op only writes, as ``out=``; others of that name, as of attention's backward, are read."""
    written = _written_names(target)
    return frozenset(each.name for each in target._schema.arguments if each.kwarg_only and each.name in written)


def _written_names(target: Any) -> list[str]:
    """Return the names of the arguments that an op writes to in place; [] for an op without a schema."""
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    return [each.name for each in schema.arguments if each.alias_info is not None and each.alias_info.is_write]


def _dtype(tensors: Sequence[Sized]) -> str:
    """Return the type of the largest floating-point tensor, else of the first tensor, "" without tensors.

    This is taken for the type that an op with these tensors computes in.
    """
    floating = [tensor for tensor in tensors if tensor.floating]
    if floating:
        return max(floating, key=lambda tensor: math.prod(tensor.shape)).dtype
    return tensors[0].dtype if tensors else ""


def tensors_of(values: Any) -> list[Tensor]:
    """Return the distinct tensors in nested lists, tuples and mappings; for a sparse tensor its indices and values."""
    if isinstance(values, Tensor) and values.layout != torch.sparse_coo:  # most ops make one tensor
        return [values]
    tensor_by_id: dict[int, Tensor] = {}

    def collect(value: Any) -> None:
        """Add the tensors in a value."""
        if isinstance(value, Tensor):
            if value.layout == torch.sparse_coo:
                collect([value._indices(), value._values()])
            else:
                tensor_by_id.setdefault(id(value), value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                collect(item)
        elif isinstance(value, Mapping):
            for item in value.values():
                collect(item)

    collect(values)
    return list(tensor_by_id.values())


def value_of(node: Node) -> Any:
    """Return the result of a node's call (a tensor without memory, or nested ones); None where it has none."""
    return node.meta.get("val")
