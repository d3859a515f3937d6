"""What a loss is a mean over, read from its autograd graph. Start at :func:`terms_of`.

``cross_entropy`` leaves behind the weight of the labels that it divided by, ``mean`` the number of its elements, a division
its divisor. So the graph tells whether a loss is a mean over the samples of a batch, over its tokens, or none at all. Names
of graph nodes are torch's own (``NllLossBackward0``); one that is not known here makes the answer "unknown", never a guess.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Node = Any
"""A node of the autograd graph: ``torch.autograd.graph.Node``, with attributes that depend on its kind."""
MARK = "ddltool"
"""Key in a node's metadata: whose model's output this is."""
WEIGHED = "_WeighedBackward"
"""Name of the node that a loss has which was weighed explicitly."""
_MOST_NODES = 200_000
_ELEMENTWISE = re.compile(
    r"(Mul|Div|Add|Sub|Rsub|Neg|Pow|Abs|Exp|Log|Clone|ToCopy|View|UnsafeView|Reshape|Squeeze|Unsqueeze|MaskedFill|Where|"
    r"Relu|Softplus|LogSigmoid|Clamp|Sqrt|Transpose|Permute|Alias)\w*Backward\d*$"
)
_LINEAR = re.compile(
    r"(Mul|Div|Neg|Clone|ToCopy|View|UnsafeView|Reshape|Squeeze|Unsqueeze|Transpose|Permute|Alias)Backward\d*$"
)
_MIXING = re.compile(
    r"(Mean|Sum|Var|Std|Prod|Amax|Amin|Max|Min|Median|Kthvalue|Mode|Topk|Sort|Logsumexp|Softmax|LogSoftmax|Cumsum|"
    r"LinalgVectorNorm|Norm)Backward\d*$"
)
_SAME = re.compile(
    r"(Neg|Clone|ToCopy|View|UnsafeView|Reshape|Squeeze|Unsqueeze|Alias|Stack|Cat|Add|Sub|Rsub)\w*Backward\d*$"
)

_OF_PARAMETERS = re.compile(
    r"(Pow|Mul|Div|Add|Sub|Neg|Abs|Sqrt|Exp|Log|Relu|Clamp|Sum|Mean|Norm|LinalgVectorNorm|Stack|Cat|View|UnsafeView|Reshape|"
    r"Squeeze|Unsqueeze|Clone|ToCopy|Alias|T|Transpose)Backward\d*$|torch::autograd::AccumulateGrad$"
)


@dataclass(slots=True)
class Mark:
    """What the outputs of one forward pass are marked with."""

    owner: Any
    """Who weighs what is trained through the model."""
    spent: bool = False
    """Whether a backward pass has come by."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Where the graph of a loss leads to."""

    marks: tuple[Mark, ...]
    """The forward passes that it comes from, past no weighed term."""
    weighed: tuple[Any, ...]
    """Who has weighed a term of it explicitly."""
    leaves: tuple[Tensor, ...]
    """Parameters that it comes from, past all marks."""


@dataclass(frozen=True, slots=True)
class Terms:
    """One term of a loss: ``count`` is what its sum is divided by, None for a plain sum; or why that is not known."""

    count: float | None
    unknown: str = ""
    behind: tuple[Node, ...] = ()
    """Nodes of what was added up."""


def mark(values: Iterable[Any], sign: Mark) -> None:
    """Mark all tensors in nested ``values`` that have a gradient; keeps nothing alive."""
    for value in values:
        if isinstance(value, Tensor):
            if value.grad_fn is not None:
                node: Node = value.grad_fn
                node.metadata[MARK] = sign
        elif isinstance(value, dict):
            mark(value.values(), sign)
        elif isinstance(value, (list, tuple)):
            mark(value, sign)
        elif hasattr(value, "__dict__") or hasattr(value, "__slots__"):
            names = [*getattr(value, "__dict__", ()), *getattr(value, "__slots__", ())]
            mark([getattr(value, name, None) for name in names], sign)


def reach(roots: Iterable[Node]) -> Reach:
    """Return whose outputs, and whether weighed terms, lie behind the nodes; the search ends at them."""
    marks: dict[int, Mark] = {}
    weighed, seen, leaves = dict[Any, None](), set[Node](), list[Tensor]()
    waiting = [node for node in roots if node is not None]
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == WEIGHED:
            weighed[node.owner] = None
        elif (sign := node.metadata.get(MARK)) is not None:
            marks[id(sign)] = sign
        elif (leaf := getattr(node, "variable", None)) is not None:
            leaves.append(leaf)
        else:
            waiting += [after for after, _ in node.next_functions if after is not None]
    return Reach(tuple(marks.values()), tuple(weighed), tuple(leaves))


def terms_of(root: Tensor) -> list[Terms]:
    """Return the terms that add up to a loss of one element, without those that come from no marked model."""
    if root.grad_fn is None:
        return []
    return list(_terms((root.grad_fn, root.output_nr), 1.0, inside=False))


def _terms(edge: tuple[Node, int], divisor: float, *, inside: bool) -> Iterator[Terms]:
    """Yield the terms behind an output of a node, which is a number that was divided by ``divisor`` since.

    ``inside``: past a mark, so what follows is in a model that is trained.
    """
    node, number = edge
    inside = inside or MARK in node.metadata
    if not reach([node]).marks if not inside else _is_penalty(node):
        return
    name = node.name()
    after = [(follower, place) for follower, place in node.next_functions if follower is not None]
    behind = tuple(follower for follower, _ in after)
    if name.startswith("_DDPSink"):  # what DDP puts behind each output where parameters may be unused
        yield from _terms(node.next_functions[number], divisor, inside=inside)
    elif name.startswith(("MulBackward", "DivBackward")):
        yield from _scaled(node, name, divisor, inside)
    elif name.startswith("MeanBackward0"):
        count = node._saved_self_sym_numel
        if len(after) == 1 and after[0][0].name().startswith("StackBackward"):
            yield from _terms(after[0], divisor * count, inside=inside)
        else:
            yield Terms(divisor * count, behind=behind)
    elif name.startswith("MeanBackward1") and _whole(node):
        yield Terms(divisor * math.prod(node._saved_self_sym_sizes), behind=behind)
    elif name.startswith("SumBackward"):
        yield from _summed(node, after, divisor, inside)
    elif hasattr(node, "_saved_reduction"):
        yield _reduced(node, name, divisor, behind)
    elif _SAME.match(name):
        for each in after:
            yield from _terms(each, divisor, inside=inside)
    else:
        yield Terms(None, name)


def _is_penalty(root: Node) -> bool:
    """Return whether a term is of parameters alone: nothing but sums, norms and the like of them, and no other tensor."""
    waiting, seen = [root], set[Node]()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        followers = [follower for follower, _ in node.next_functions]
        if not _OF_PARAMETERS.match(node.name()) or (None in followers and not _has_number(node)):
            return False
        waiting += [follower for follower in followers if follower is not None]
    return True


def _has_number(node: Node) -> bool:
    """Return whether what a node has besides its followers is a plain number, or is added to one."""
    if node.name().startswith(("Add", "Sub", "Rsub")):
        made: Any = getattr(node, "_input_metadata", ())
        return len(made) == 1 and math.prod(made[0].shape) == 1
    return node.name().startswith(("Mul", "Div")) and _by_number(node)


def _by_number(node: Node) -> bool:
    """Return whether a node multiplies by numbers at most, not by a tensor of several."""
    others = [getattr(node, name, None) for name in ("_saved_other", "_saved_self")]
    return all(other.numel() == 1 for other in others if isinstance(other, Tensor))


def _scaled(node: Node, name: str, divisor: float, inside: bool) -> Iterator[Terms]:
    """Yield the terms of a product or a quotient with a number that is none of the model's."""
    trained = [
        (place, edge)
        for place, edge in enumerate(node.next_functions)
        if edge[0] is not None and (inside or reach([edge[0]]).marks)
    ]
    if len(trained) != 1 or (name.startswith("Div") and trained[0][0] != 0):
        yield Terms(None, name)
        return
    place, edge = trained[0]
    other = getattr(node, "_saved_other" if place == 0 else "_saved_self", None)
    if isinstance(other, Tensor):
        if other.numel() != 1:
            yield Terms(None, name)
            return
        other = other.item()
    factor = 1.0 if other is None else float(other)
    if name.startswith("Mul"):
        if factor == 0:
            return  # a term that is there for its graph alone
        factor = 1 / factor
    yield from _terms(edge, divisor * factor, inside=inside)


def _summed(node: Node, after: list[tuple[Node, int]], divisor: float, inside: bool) -> Iterator[Terms]:
    if len(after) == 1 and after[0][0].name().startswith("StackBackward"):
        yield from _terms(after[0], divisor, inside=inside)
        return
    behind = tuple(follower for follower, _ in after)
    below: Node | None = behind[0] if len(behind) == 1 else None
    bent = ""
    while below is not None and not below.name().startswith("MeanBackward1") and _ELEMENTWISE.match(below.name()):
        if not _LINEAR.match(below.name()) or not _by_number(below):
            bent = bent or below.name()
        followers = [follower for follower, _ in below.next_functions if follower is not None]
        below = followers[0] if len(followers) == 1 else None
    if below is not None and below.name().startswith("MeanBackward1") and 0 in below._saved_dim:
        sizes = below._saved_self_sym_sizes
        behind = tuple(follower for follower, _ in below.next_functions if follower is not None)
        if bent:  # a square of a mean, or a mean times shares that were counted on this rank, is no mean
            yield Terms(None, bent)
            return
        yield Terms(divisor * math.prod(sizes[_place(dim, len(sizes))] for dim in below._saved_dim), behind=behind)
    else:
        yield Terms(divisor if divisor != 1.0 else None, behind=behind)


def _reduced(node: Node, name: str, divisor: float, behind: tuple[Node, ...]) -> Terms:
    """Return the term of a loss function of torch's that reduces by itself."""
    if node._saved_reduction == 0:
        return Terms(None, name)
    if node._saved_reduction == 2:
        return Terms(divisor if divisor != 1.0 else None)
    if name.startswith("NllLoss"):
        return Terms(divisor * float(node._saved_total_weight), behind=behind)
    values = getattr(node, "_saved_self", None)
    return Terms(divisor * values.numel(), behind=behind) if isinstance(values, Tensor) else Terms(None, name)


def mixing(term: Terms, samples: int) -> str:
    """Return the node behind a term, and before the marked model, that goes over all of so many samples; "": there is none.

    That is a sum, a selection or a softmax along a dimension of that length, or a product of two such sets of rows. What
    it makes of one rank's samples is not what one process would make of all.
    """
    seen, waiting = set[Node](), list(term.behind)
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node in seen or MARK in node.metadata or node.name() == WEIGHED:
            continue
        seen.add(node)
        after = [follower for follower, _ in node.next_functions if follower is not None]
        name = str(node.name())
        if _MIXING.match(name) and samples in _lengths(node) and reach(after).marks:
            return name
        if name.startswith("MmBackward") and all(reach([each]).marks for each in (after if len(after) == 2 else [])):
            rows = getattr(node, "_saved_self_sym_sizes", (0, 0)), getattr(node, "_saved_mat2_sym_sizes", (0, 0))
            if samples in (rows[0][-1], rows[1][-1]):
                return name
        waiting += after
    return ""


def _lengths(node: Node) -> list[int]:
    """Return the lengths of the dimensions that a node goes over."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    for name in ("_saved_self", "_saved_result") if sizes is None else ():
        with contextlib.suppress(RuntimeError):  # it may have been changed since
            if isinstance(value := getattr(node, name, None), Tensor):
                sizes = value.shape
                break
    if not sizes:
        return []
    dims = getattr(node, "_saved_dim", None)
    if dims is None:
        return [math.prod(sizes), *([sizes[0]] if len(sizes) > 1 else [])]
    return [sizes[_place(dim, len(sizes))] for dim in ((dims,) if isinstance(dims, int) else dims)]


def _whole(node: Node) -> bool:
    """Whether a mean goes over all dimensions."""
    sizes = node._saved_self_sym_sizes
    return {_place(dim, len(sizes)) for dim in node._saved_dim} == set(range(len(sizes)))


def _place(dim: int, dims: int) -> int:
    """Return a dimension counted from the front; the graph keeps negative ones as unsigned numbers."""
    return dim - 2**64 if dim >= 2**63 else dim % dims if dim < dims else dim
