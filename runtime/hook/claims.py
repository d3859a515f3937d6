"""What a script says of a loss, checked by measurement. Start at :class:`LossGraph` and :func:`find_coupling`.

``hook.loss(loss)`` claims that a loss is a mean over the samples of a batch. Then the part of the loss's gradient that
belongs to one sample does not depend on the outputs for another one: the derivative of one half's output gradients by the
other half's outputs is zero. One more backward pass tells, through the loss alone and not through the model. It cannot see
samples that meet by a selection (``median``, ``topk``, ``cumsum`` of absolute values) or before the outputs (BatchNorm), and
losses without a second derivative (``cdist``, compiled ones): ``ddltool doctor --check`` compares those with one process.

The graph is walked along its edges, never read by the names of its nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

Node = Any
"""A node of the autograd graph (``torch.autograd.graph.Node``), or None for a tensor without one."""
_OUTPUTS, _WEIGHED = "ddltool.outputs", "ddltool.weighed"
"""Keys in a node's metadata: the outputs of a model that it computes; that ``hook.loss`` returned its tensor."""
_MOST_NODES = 200_000
_MOST_ELEMENTS = 1 << 26
"""Larger outputs are not measured: their gradients would be held three times."""
_ROUNDING = {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.float32: 1e-4, torch.float64: 1e-7}
"""Differences below this share of the largest value are rounding."""


@dataclass(eq=False, slots=True)
class ForwardPass:
    """One forward pass of a model whose losses are weighed by ``owner``."""

    owner: Any
    averaged_in: int | None = None
    """The number of the backward pass in which DDP averaged its gradients; None: not yet."""


OutputKey = tuple[ForwardPass, int]
"""A forward pass, and the place of a tensor among those that it has returned."""


class Output(NamedTuple):
    """One tensor that a model's forward pass has returned: an edge of the graph, and its shape."""

    key: OutputKey
    edge: GradientEdge
    shape: tuple[int, ...]


def nested_tensors(value: Any, depth: int = 8) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, mappings and objects with attributes, down to a depth."""
    if isinstance(value, Tensor):
        yield value
        return
    items: Iterable[Any] = ()
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, (list, tuple)):
        items = value
    elif not isinstance(value, (type, nn.Module)):
        names = [*getattr(value, "__dict__", ()), *getattr(value, "__slots__", ())]
        items = [getattr(value, name, None) for name in names]
    for item in items if depth else ():
        yield from nested_tensors(item, depth - 1)


def mark_outputs(outputs: Iterable[Tensor], forward_pass: ForwardPass) -> list[Output]:
    """Note on the graph's nodes which tensors a forward pass has returned; keeps no tensor alive. Return what was noted."""
    marked = []
    for place, tensor in enumerate(outputs):
        if tensor.grad_fn is not None:
            node: Node = tensor.grad_fn
            output = Output((forward_pass, place), GradientEdge(node, tensor.output_nr), tuple(tensor.shape))
            node.metadata.setdefault(_OUTPUTS, {})[tensor.output_nr] = output.key, output.shape
            marked.append(output)
    return marked


def outputs_of(node: Node) -> list[Output]:
    """Return the tensors of forward passes that a node computes."""
    known = node.metadata.get(_OUTPUTS, {})
    return [Output(key, GradientEdge(node, number), shape) for number, (key, shape) in known.items()]


def mark_weighed(loss: Tensor) -> None:
    """Note on the graph that ``hook.loss`` has returned this tensor."""
    node: Node = loss.grad_fn
    node.metadata[_WEIGHED] = True


@dataclass(slots=True)
class LossGraph:
    """The graph between a loss and the outputs of the models that it comes from."""

    outputs: list[Output] = field(default_factory=list)
    """The outputs nearest to the loss."""
    leaves: list[Tensor] = field(default_factory=list)
    """Leaf tensors, such as parameters, that the loss reaches without passing through one of the outputs."""
    is_weighed: bool = False
    """Whether a part of it has come from ``hook.loss`` before."""
    nodes: int = 0

    @classmethod
    def of(cls, loss: Tensor) -> LossGraph:
        """Return the graph of ``loss``. It takes about a microsecond for each node."""
        graph = cls()
        for node in _walk([loss.grad_fn], graph.outputs):
            graph.nodes += 1
            graph.is_weighed = graph.is_weighed or _WEIGHED in node.metadata
            if (leaf := getattr(node, "variable", None)) is not None:
                graph.leaves.append(leaf)
        return graph

    def measurable_outputs(self) -> tuple[list[Output], set[OutputKey]]:
        """Return the nearest outputs with rows, none of them computed from another one, and all others that gradients reach.

        Behind a loss that the model has returned, these are the model's other outputs that it was computed from. Larger ones
        than can be held several times are left out.
        """
        outputs: list[Output] = []
        deeper = self.outputs
        while deeper:
            outputs += [output for output in deeper if math.prod(output.shape) > 1]
            inside = _behind(
                output for output in deeper if math.prod(output.shape) <= 1
            )  # losses that the model computed
            deeper = []
            for _ in _walk(inside, deeper):
                pass
        behind = {output.key for node in _walk(_behind(outputs)) for output in outputs_of(node)}
        nearest = [output for output in outputs if output.key not in behind]
        if sum(math.prod(output.shape) for output in nearest) > _MOST_ELEMENTS:
            nearest = []
        return nearest, behind | {output.key for output in self.outputs} - {output.key for output in nearest}


def _behind(outputs: Iterable[Output]) -> list[Node]:
    """Return the nodes next behind those that compute the outputs."""
    return [follower for output in outputs for follower, _ in output.edge.node.next_functions]


def _walk(starts: Sequence[Node], stops: list[Output] | None = None) -> Iterator[Node]:
    """Yield the nodes behind ``starts``, each once; with ``stops`` none behind outputs of forward passes, which go there."""
    seen, waiting = set[Node](), list(starts)
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if stops is not None and (outputs := outputs_of(node)):
            stops += outputs
            continue
        yield node
        waiting += [follower for follower, _ in node.next_functions]


def output_gradients(
    loss: Tensor, outputs: Sequence[Output], weight: float, *, twice: bool
) -> list[Tensor | None] | None:
    """Return the gradient of ``weight * loss`` by each output; ``twice``: so that it can be differentiated again.

    Outputs that were gathered from other ranks get the gradients of their losses too, so all ranks call this together. None
    where the graph does not allow it: memory is short, or a function has no second derivative.
    """
    edges = [output.edge for output in outputs]
    weights = torch.full_like(loss, weight)
    try:
        return list(torch.autograd.grad(loss, edges, weights, retain_graph=True, create_graph=twice, allow_unused=True))
    except RuntimeError:  # torch.OutOfMemoryError is one too
        return None


def gradients_past_outputs(loss: Tensor, outputs: Sequence[Output], past: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of the parameters ``past`` by the ways that pass none of the outputs, where they are made zero."""

    def no_gradients(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(gradient if gradient is None else torch.zeros_like(gradient) for gradient in gradients)

    handles = [node.register_prehook(no_gradients) for node in {output.edge.node for output in outputs}]
    try:
        gradients = torch.autograd.grad(loss.sum(), list(past.values()), retain_graph=True, allow_unused=True)
    except RuntimeError:
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return {name: gradient for name, gradient in zip(past, gradients, strict=True) if gradient is not None}


def find_coupling(outputs: Sequence[Output], gradients: Sequence[Tensor | None], samples: int, seed: int) -> bool:
    """Return whether the loss couples samples of the batch, by its ``gradients`` by the ``outputs``.

    A random half of the ``samples`` is held against the other half. Rows may be several for each sample: one group of all
    samples after the other (two views of each), or those of one sample next to each other. Samples are coupled where they are
    under both readings. False too where no dimension counts the samples, or where the gradients have no derivative.
    """
    pairs = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None and gradient.requires_grad
    ]
    if not pairs:
        return False
    generator = torch.Generator().manual_seed(seed)
    in_half = torch.zeros(max(samples, 1), dtype=torch.bool)
    in_half[torch.randperm(len(in_half), generator=generator)[: len(in_half) // 2]] = True
    # Both are computed on all ranks: outputs that were gathered from others let ranks meet in a derivative too.
    readings = [_is_coupled(pairs, in_half, interleaved) for interleaved in (False, True)]
    return all(readings)


def sample_dimension(shape: tuple[int, ...], samples: int) -> int | None:
    """Return the dimension that counts samples: the first if it is a multiple, else the second of three or more if equal."""
    if shape and shape[0] and shape[0] % samples == 0:
        return 0
    return 1 if len(shape) > 2 and shape[1] == samples else None


def _is_coupled(pairs: Sequence[tuple[Output, Tensor]], in_half: Tensor, interleaved: bool) -> bool:
    """Return whether the gradients of the rows in one half depend on the outputs of the rows in the other one."""
    masks: list[Tensor | None] = []
    parts = []
    for output, gradient in pairs:
        mask = None
        if (dimension := sample_dimension(output.shape, len(in_half))) is not None:
            shape = [1] * len(output.shape)
            shape[dimension] = output.shape[dimension]
            each = shape[dimension] // len(in_half)
            mask = in_half.repeat_interleave(each) if interleaved else in_half.repeat(each)
            mask = mask.to(gradient.device).view(shape)
        masks.append(mask)
        # Any weights would do that do not cancel by chance; a fixed irrational rotation costs no random numbers.
        weights = torch.arange(gradient.numel(), device=gradient.device, dtype=gradient.dtype).mul_(0.618).cos_()
        parts.append((gradient * weights.view(gradient.shape) * (0 if mask is None else mask)).sum())
    try:
        seconds = torch.autograd.grad(parts, [output.edge for output, _ in pairs], retain_graph=True, allow_unused=True)
    except RuntimeError:
        return False
    own = other = 0.0
    for second, mask in zip(seconds, masks, strict=True):
        if second is not None and mask is not None:
            size = second.detach().abs()
            own, other = max(own, float((size * mask).max())), max(other, float((size * ~mask).max()))
    # Rows that are not coupled are multiplied by zeros: what is left is no rounding of sums.
    return math.isfinite(other) and other > 1e-6 * own


def largest_difference(gradient: Tensor, expected: Tensor) -> float:
    """Return by how much two gradients differ at most, over what rounding explains: above 1 they are not the same."""
    scale = float(torch.maximum(gradient.abs().max(), expected.abs().max()))
    allowed = 10 * _ROUNDING.get(gradient.dtype, 5e-2) * scale
    difference = float((gradient - expected).abs().max())
    return difference / allowed if math.isfinite(difference) and allowed else 0.0
