"""Checks by measurement what a script says of a loss. Start at :class:`LossGraph` and :func:`find_coupling`.

``hook.loss(loss)`` claims that a loss is a mean over the samples of a batch. If it is, the loss's gradient with respect
to one sample's outputs does not depend on another sample's outputs: the derivative of one half's output gradients with
respect to the other half's outputs is zero. One more backward pass, through the loss and not the model, shows that.

It cannot see samples that are combined by a selection (``median``, ``topk``, ``cumsum`` of absolute values) or before
the outputs (BatchNorm), nor losses without a second derivative (``cdist`` before torch 2.14, compiled ones); ``ddltool
doctor --check`` compares those with one process. The autograd graph is walked along its edges, and never interpreted by
the names of its nodes.
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
"""Keys in a node's metadata: for the model outputs that the node computes; and set where ``hook.loss`` returned its tensor."""
_MOST_NODES = 200_000
"""Most nodes of a graph that are visited, so that a huge one does not delay training."""
_MOST_ELEMENTS = 1 << 26
"""Outputs with more elements than this are not measured, because three copies of their gradients would be held."""
_SMALLEST_COUPLING = 1e-6
"""Share of the largest second derivative above which samples count as coupled."""
_ROUNDING_MULTIPLES = 10
"""A gradient may differ by this many times its type's entry in :data:`_ROUNDING`."""
_ROUNDING = {torch.float16: 2e-2, torch.bfloat16: 5e-2, torch.float32: 1e-4, torch.float64: 1e-7}
"""By type: differences below this share of the largest value count as rounding."""


@dataclass(eq=False, slots=True)
class ForwardPass:
    """One forward pass of a model whose losses the LossScaler ``owner`` weights."""

    owner: Any
    averaged_in: int | None = None
    """Number of the backward pass in which DDP averaged its gradients; None: not yet."""


OutputKey = tuple[ForwardPass, int]
"""(forward pass, index of a tensor among those that it has returned)."""


class Output(NamedTuple):
    """One tensor that a model's forward pass has returned: its key, its edge in the autograd graph, and its shape."""

    key: OutputKey
    edge: GradientEdge
    shape: tuple[int, ...]


def nested_tensors(value: Any, depth: int = 8) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, tuples, mappings and objects with attributes, down to ``depth`` levels.

    Modules and classes are not searched.
    """
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
    for item in items if depth else ():  # a limit, because objects may refer to each other in a cycle
        yield from nested_tensors(item, depth - 1)


def mark_outputs(outputs: Iterable[Tensor], forward_pass: ForwardPass) -> list[Output]:
    """Note in the autograd graph that ``forward_pass`` has returned the tensors ``outputs``, and return the notes.

    Tensors without a gradient function are left out. The notes refer to graph nodes and keep no tensor alive.
    """
    marked = []
    for output_index, tensor in enumerate(outputs):
        if tensor.grad_fn is not None:
            node: Node = tensor.grad_fn
            output = Output((forward_pass, output_index), GradientEdge(node, tensor.output_nr), tuple(tensor.shape))
            node.metadata.setdefault(_OUTPUTS, {})[tensor.output_nr] = output.key, output.shape
            marked.append(output)
    return marked


def outputs_of(node: Node) -> list[Output]:
    """Return the outputs of forward passes that a graph node computes, which :func:`mark_outputs` has noted there."""
    marked = node.metadata.get(_OUTPUTS, {})
    return [Output(key, GradientEdge(node, output_nr), shape) for output_nr, (key, shape) in marked.items()]


def mark_weighed(loss: Tensor) -> None:
    """Note in the autograd graph that ``hook.loss`` has returned this tensor, to find a loss that is weighted twice."""
    node: Node = loss.grad_fn
    node.metadata[_WEIGHED] = True


@dataclass(slots=True)
class LossGraph:
    """The part of an autograd graph between a loss and the model outputs from which it was computed."""

    outputs: list[Output] = field(default_factory=list)
    """The outputs nearest to the loss."""
    leaves: list[Tensor] = field(default_factory=list)
    """Leaf tensors, such as parameters, that the loss reaches without passing through one of the outputs."""
    is_weighed: bool = False
    """Whether ``hook.loss`` has returned a tensor in it before."""
    nodes: int = 0
    """Number of nodes in it."""

    @classmethod
    def of(cls, loss: Tensor) -> LossGraph:
        """Return the part of the graph of ``loss`` up to the models' outputs; empty for a loss without ``grad_fn``.

        Takes about 1 us per node.
        """
        graph = cls()
        # The walk stops at outputs of models, and appends them to `graph.outputs`.
        for node in _walk([loss.grad_fn], graph.outputs):
            graph.nodes += 1
            graph.is_weighed = graph.is_weighed or _WEIGHED in node.metadata
            # Only nodes that accumulate a leaf's gradient have the attribute.
            if (leaf := getattr(node, "variable", None)) is not None:
                graph.leaves.append(leaf)
        return graph

    def measurable_outputs(self) -> tuple[list[Output], set[OutputKey]]:
        """Return (outputs by which the loss can be measured, keys of all other outputs that its gradients reach).

        Measurable are the outputs nearest to the loss with more than one element, of which none is computed from
        another. An output of one element is a loss that the model has computed itself; the outputs from which that was
        computed take its place. If the outputs are too large together (:data:`_MOST_ELEMENTS`), none is measurable.
        """
        outputs: list[Output] = []
        next_outputs = self.outputs
        while next_outputs:
            outputs += [output for output in next_outputs if math.prod(output.shape) > 1]
            # An output of one element is a loss that the model has computed: go on to its inputs.
            inside = _behind(output for output in next_outputs if math.prod(output.shape) <= 1)
            next_outputs = []
            for _ in _walk(inside, next_outputs):  # fills `next_outputs`
                pass
        keys_behind = {output.key for node in _walk(_behind(outputs)) for output in outputs_of(node)}
        nearest = [output for output in outputs if output.key not in keys_behind]
        if sum(math.prod(output.shape) for output in nearest) > _MOST_ELEMENTS:
            nearest = []
        keys_not_measured = {output.key for output in self.outputs} - {output.key for output in nearest}
        return nearest, keys_behind | keys_not_measured


def _behind(outputs: Iterable[Output]) -> list[Node]:
    """Return the graph nodes from which the nodes of ``outputs`` take their inputs, further away from the loss."""
    return [follower for output in outputs for follower, _ in output.edge.node.next_functions]


def _walk(starts: Sequence[Node], stops: list[Output] | None = None) -> Iterator[Node]:
    """Yield once each graph node that can be reached from ``starts``, those included, up to :data:`_MOST_NODES`.

    With a list ``stops``, nodes that compute outputs of forward passes are not yielded: their outputs are appended to
    it, and the walk does not go beyond them.
    """
    visited = set[Node]()
    waiting = list(starts)
    while waiting and len(visited) < _MOST_NODES:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if stops is not None and (outputs := outputs_of(node)):
            stops += outputs
            continue
        yield node
        waiting += [follower for follower, _ in node.next_functions]


def output_gradients(
    loss: Tensor, outputs: Sequence[Output], weight: float, *, twice: bool
) -> list[Tensor | None] | None:
    """Return the gradient of ``weight * loss`` with respect to each output; None for one on which it does not depend.

    With ``twice`` the gradients can be differentiated again. All ranks call this together, because an output that was
    gathered from other ranks gets the gradients of their losses too. The result is None if the gradients cannot be
    computed: a function has no second derivative, or memory runs out.
    """
    edges = [output.edge for output in outputs]
    weights = torch.full_like(loss, weight)
    try:
        return list(torch.autograd.grad(loss, edges, weights, retain_graph=True, create_graph=twice, allow_unused=True))
    except RuntimeError:  # torch.OutOfMemoryError is one too
        return None


def gradients_past_outputs(
    loss: Tensor, outputs: Sequence[Output], parameters: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the gradients of ``loss`` that reach ``parameters`` without passing through any of ``outputs``, by name.

    For this call, gradients are set to zero where they pass an output, so a parameter that is reached only through
    outputs has zeros. Parameters that the loss does not reach are left out. The result is empty if the gradients cannot
    be computed: the loss's graph is missing or freed, or memory runs out.
    """

    def no_gradients(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Return zeros in place of a node's gradients; a graph node's pre-hook."""
        return tuple(gradient if gradient is None else torch.zeros_like(gradient) for gradient in gradients)

    handles = [node.register_prehook(no_gradients) for node in {output.edge.node for output in outputs}]
    try:
        gradients = torch.autograd.grad(loss.sum(), list(parameters.values()), retain_graph=True, allow_unused=True)
    except RuntimeError:  # the check is left out: it must not end the training that it checks
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return {name: gradient for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None}


def find_coupling(outputs: Sequence[Output], gradients: Sequence[Tensor | None], samples: int, seed: int) -> bool:
    """Return whether the loss's gradient with respect to one sample's outputs depends on other samples' outputs.

    Args:
        outputs: the model's outputs.
        gradients: the loss's gradient with respect to each output, differentiable; None where there is none.
        samples: number of samples in the batch.
        seed: of the random half of the samples that is compared with the other half.

    A sample may have several rows in an output: next to each other, or one in each of several groups of all samples
    (views). Samples count as coupled only if they are in both layouts. The result is also False if no dimension of an
    output is the samples', or the gradients cannot be differentiated.
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
    # No short cut: all ranks must compute both, because gathered outputs make ranks exchange messages in a derivative.
    coupled_by_layout = [_is_coupled(pairs, in_half, interleaved) for interleaved in (False, True)]
    return all(coupled_by_layout)  # in the wrong layout, a sample's own rows look like those of different samples


def sample_dimension(shape: tuple[int, ...], samples: int) -> int | None:
    """Return the dimension of an output of ``shape`` along which samples are; None if there is none.

    It is 0 if that size is a multiple of ``samples`` (one or several rows each), or else 1, in an output of three or
    more dimensions, if that size is ``samples`` (sequence first).
    """
    if shape and shape[0] and shape[0] % samples == 0:
        return 0
    return 1 if len(shape) > 2 and shape[1] == samples else None


def _is_coupled(pairs: Sequence[tuple[Output, Tensor]], in_half: Tensor, interleaved: bool) -> bool:
    """Return whether gradients of one half of the samples depend on outputs of the other half.

    The gradients of the half's rows are summed up with weights. The derivative of that sum with respect to the outputs
    of the other half is zero unless samples are coupled.

    Args:
        pairs: each output with its gradient.
        in_half: (samples,) booleans, true for the samples in the half.
        interleaved: whether the rows of one sample are next to each other; False: they are in groups of all samples.
    """
    masks: list[Tensor | None] = []  # for each output, true in the rows of the half; None: it has no samples' dimension
    weighted_sums = []
    for output, gradient in pairs:
        mask = _row_mask(output.shape, in_half, interleaved)
        if mask is not None:
            mask = mask.to(gradient.device)
        masks.append(mask)
        # Any weights do that do not cancel by chance: cosines of multiples of 0.618 need no random numbers.
        weights = torch.arange(gradient.numel(), device=gradient.device, dtype=gradient.dtype).mul_(0.618).cos_()
        weighted_sums.append((gradient * weights.view(gradient.shape) * (0 if mask is None else mask)).sum())
    try:
        second_derivatives = torch.autograd.grad(
            weighted_sums, [output.edge for output, _ in pairs], retain_graph=True, allow_unused=True
        )
    except RuntimeError:
        return False
    largest_own = 0.0  # largest second derivative with respect to outputs of the same half
    largest_other = 0.0  # and of the other half
    for derivative, mask in zip(second_derivatives, masks, strict=True):
        if derivative is not None and mask is not None:
            size = derivative.detach().abs()
            largest_own = max(largest_own, float((size * mask).max()))
            largest_other = max(largest_other, float((size * ~mask).max()))
    # The derivative of rows that are not coupled is exactly zero, because they are multiplied by zeros.
    return math.isfinite(largest_other) and largest_other > _SMALLEST_COUPLING * largest_own


def _row_mask(shape: tuple[int, ...], in_half: Tensor, interleaved: bool) -> Tensor | None:
    """Return booleans that are true in the rows of an output of ``shape`` that belong to the samples in the half.

    The result has the output's size along the samples' dimension and 1 in all others, so that it is broadcast over them;
    None if the output has no such dimension. ``in_half`` and ``interleaved``: as for :func:`_is_coupled`.
    """
    dimension = sample_dimension(shape, len(in_half))
    if dimension is None:
        return None
    mask_shape = [1] * len(shape)
    mask_shape[dimension] = shape[dimension]
    rows_per_sample = shape[dimension] // len(in_half)
    mask = in_half.repeat_interleave(rows_per_sample) if interleaved else in_half.repeat(rows_per_sample)
    return mask.view(mask_shape)


def largest_difference(gradient: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two gradients of one shape, as a multiple of the difference that rounding allows.

    Above 1 they differ. It is 0 if both are zero, or a value is not finite.
    """
    scale = float(torch.maximum(gradient.abs().max(), expected.abs().max()))
    allowed = _ROUNDING_MULTIPLES * _ROUNDING.get(gradient.dtype, 5e-2) * scale
    difference = float((gradient - expected).abs().max())
    return difference / allowed if math.isfinite(difference) and allowed else 0.0
