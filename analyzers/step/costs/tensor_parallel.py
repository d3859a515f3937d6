"""The step of one of several ranks that share every block's products: tensor parallelism as in Megatron-LM and DTensor.

In each block the first product of a chain is split by columns and the next one by rows (Shoeybi et al., arXiv:1909.08053):
attention by heads, an MLP by its hidden width. Tensors between the two are divided among the ranks. A product whose inner
dimension is divided gives a partial sum on each rank, which an all-reduce completes. The embedding, the head and the loss are
divided by the vocabulary. Which products are split follows from the traced step alone: a product of a weight and a whole tensor
begins a chain, and a product of a weight and a divided tensor ends it. A product is not split if something after it needs the
whole width (a normalisation, the choice of experts), or if no product ends its chain within the block. From the split weights
the rest follows op by op, forward and backward.

With sequence parallelism (Korthikanti et al., arXiv:2205.05198) tensors between the chains are divided by tokens, and each
all-reduce becomes a reduce-scatter and an all-gather. Start at :func:`rank_of`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from ddltool.analyzers.step.costs.memory import ModelBlock
from ddltool.analyzers.step.recording.op_rules import FACTOR_PLACES, names_in
from ddltool.analyzers.step.recording.torch_costs import (
    AS_TRACED,
    Issued,
    Sized,
    base_name,
    cost_of,
    issued,
    sized,
    tensors_of,
    value_of,
)
from ddltool.analyzers.step.tracing.torch_adapter import TracedStep
from ddltool.errors import InputError
from ddltool.graph import RECV, SEND

_BATCHED = names_in("bmm baddbmm")
# Ops whose result is a view or a copy of their input.
PASSING = names_in(
    "t transpose permute view _unsafe_view reshape expand unsqueeze squeeze _to_copy to_float8 clone detach alias slice"
)
# Ops that need all elements of a dimension at once.
_NEEDS_WHOLE = names_in(
    "native_layer_norm _fused_rms_norm _softmax _log_softmax _safe_softmax mean sum var var_mean amax max topk sort argmax "
    "cumsum linalg_vector_norm norm"
)
_ADDED = names_in("add add_")
# Ops that are linear in a tensor of rows, so that they can run on partial sums, and the sum over experts comes before the
# exchange. Scaling is taken for one in the forward pass only: a norm's backward pass scales, too, but after the exchange.
_LINEAR = names_in("index index_put _unsafe_index_put index_add scatter_add gather index_select")
_LINEAR_FORWARD = names_in("mul div sum")
# In place of the index of a dimension to cut along: the longest one, for ops whose cost depends only on the number of elements.
_LONGEST = -99
# A loss that is divided by the vocabulary exchanges three numbers of every token: the largest logit, the label's logit, and the
# sum of exponentials.
_LOSS_EXCHANGES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorExchange:
    """A collective of a rank's step."""

    op: str
    """The op that it follows, by name."""
    tensor: Sized
    """The tensor that is reduced or sent, at the traced batch size."""
    whole: bool = False
    """Whether every rank needs the whole sum, so that the exchange is an all-reduce even under sequence parallelism."""
    of_experts: bool = False
    """Whether it is an all-to-all, which sends rows to the GPUs of their experts, or back; else the tensor is reduced."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rank:
    """The step of one rank: one of the GPUs that share a model by tensor parallelism."""

    traced: TracedStep
    """The step with the rank's part of the work; the fake tensors of its program are still whole."""
    exchanges: Sequence[TensorExchange]
    divided: Mapping[int, float]
    """By the address of a torch storage that is divided, the share of it that the rank holds."""

    def exchanged_bytes(self, batch_size: int) -> list[float]:
        """Return the bytes of each exchange's tensor, in the order of ``exchanges``, at a batch size (samples of a pass)."""
        scale = self.traced.scale(batch_size) or AS_TRACED
        return [scale.bytes([exchange.tensor]) for exchange in self.exchanges]


def rank_of(traced: TracedStep, blocks: Sequence[ModelBlock], ranks: int, *, sequence: bool = False) -> Rank:
    """Return the step of one of ``ranks`` ranks that share a traced training step by tensor parallelism.

    ``blocks``: of the step's lifetimes. ``sequence``: whether tensors between the chains are divided by tokens (sequence
    parallelism). Raises InputError for a step without blocks or without a product that can be split, and for a number of ranks
    that does not divide the heads or the width of a product. O(nodes) for each attempt at splitting the products, see
    ``_split_weights``.
    """
    if not blocks:
        problem = f"{traced.graph.name} has no list of blocks that run one after another"
        raise InputError("--tensor-parallel", problem, "leave it out")
    return _Divider(traced, blocks, ranks, sequence).rank()


class _Divider:
    """Finds which tensors of a step are divided among the ranks, and makes one rank's step of it.

    A product whose weight is split by columns makes a divided tensor: each rank holds a part of it. One whose weight is split
    by rows takes a divided tensor and makes a partial sum: each rank holds a summand of the whole shape, and an exchange
    completes it. The ops from the one to the other are a chain. A tensor that is neither divided nor a partial sum is whole:
    every rank holds all of it. ``names`` and ``parameters`` are by node: the op's name, and that of the parameter which it
    stands for. A place is the index of a node.
    """

    def __init__(self, traced: TracedStep, blocks: Sequence[ModelBlock], ranks: int, sequence: bool) -> None:
        """Find where the backward pass begins and the block in which each node runs; nothing is divided yet."""
        self.traced, self.ranks, self.sequence = traced, ranks, sequence
        self.nodes: list[Node] = list(traced.program.nodes)
        self.names = {node: name for name, node in traced.nodes.items()}
        starts = (place for place, node in enumerate(self.nodes) if self.names.get(node, "").startswith("backward"))
        self.backward = next(starts, len(self.nodes))
        """The index of the first node of the backward pass."""
        self.parameters = {node: name for name, node in traced.parameters.items()}
        self.place_of = {node: place for place, node in enumerate(self.nodes)}
        self.block_at = [-1] * len(self.nodes)
        """By place of a node, the number of the block in whose forward pass it runs; -1: in none."""
        for number, block in enumerate(blocks):
            self.block_at[block.first : block.last + 1] = [number] * (block.last + 1 - block.first)
        self.head_from = max(block.last for block in blocks)
        """The index of the last node of all blocks' forward passes, which the head follows."""
        self.split: dict[Node, str] = {}
        """How each divided weight and bias is split: by "rows", "columns" or "vocabulary"; weights that are not are whole."""
        self.widths: dict[str, int] = {}
        """By a text for messages, such as "heads of attention", a number that must be divisible by the number of ranks."""
        self.divided: set[Node] = set()
        """Nodes whose tensor is divided: each rank holds a part."""
        self.partial: set[Node] = set()
        """Nodes whose tensor is a partial sum: each rank holds a summand of the whole shape."""
        self.exchanges: list[TensorExchange] = []

    def rank(self) -> Rank:
        """Return the rank's step; call it once.

        Raises InputError as :func:`rank_of` does for products that cannot be split among so many ranks.
        """
        self._split_weights()
        for words, width in self.widths.items():
            if width % self.ranks:
                least = math.gcd(*self.widths.values())
                remedy = f"give a divisor of {least}" if least > 1 else "leave it out"
                raise InputError("--tensor-parallel", f"{self.ranks} ranks do not divide {width} {words}", remedy)
        self._divide()
        split_names = {self.parameters[node] for node in self.split if node in self.parameters}
        traced = step_of_part(self.traced, self._cuts, self.ranks, split_names)
        return Rank(traced=traced, exchanges=self.exchanges, divided=self._shares())

    # Which weights are split ------------------------------------------------------------------------------------------

    def _split_weights(self) -> None:
        """Decide which weights are split: fill ``split``, and ``widths`` with the numbers that the ranks have to divide.

        A product that turns out not to begin a chain is left whole. This may change the role of others, so all products are
        tried again until none fails; it ends, because each attempt leaves more products whole. Raises InputError if no product
        is split in the end.
        """
        left_whole: set[Node] = set()
        while failed := self._try_chains(left_whole):
            left_whole |= failed
        if not self.split:
            raise InputError("--tensor-parallel", f"{self.traced.graph.name} has no product to split", "leave it out")
        self._split_vocabulary()

    def _try_chains(self, left_whole: set[Node]) -> set[Node]:
        """Split the weights of all chains, and return the products whose chains fail.

        A chain is a product split by columns, the ops on its divided result, and the product split by rows that ends it. It is
        named by its first product. It fails if no product of the same block ends it, or if one of its ops needs the whole
        width. ``left_whole``: products that begin no chain, because theirs failed before.
        """
        self.split.clear()
        self.widths.clear()
        none: frozenset[Node] = frozenset()
        open_chains: dict[Node, frozenset[Node]] = {}
        """By node, the first products of the chains that it is in."""
        in_last_dimension: dict[Node, frozenset[Node]] = {}
        """By node, those of these products whose divided width is still the last dimension of the node's tensor."""
        ended_chains: set[Node] = set()
        failed: set[Node] = set()
        for place, node in enumerate(self.nodes[: self.backward]):
            chains = none.union(*(open_chains.get(source, none) for source in node.all_input_nodes))
            # A chain must end within its block.
            failed |= {product for product in chains if self.block_at[self.place_of[product]] != self.block_at[place]}
            factors = factors_of(node)
            weight = self._weight_of(node) if self.block_at[place] >= 0 else None
            if factors and weight is not None:  # a product with a weight ends the chains of its input, or begins one
                ends_here = open_chains.get(factors[0], none)
                ended_chains |= ends_here
                if ends_here:
                    self._split_product(node, weight, "rows")
                elif node not in left_whole:
                    self._split_product(node, weight, "columns")
                    own_chain = frozenset((node,))
                    open_chains[node] = own_chain
                    in_last_dimension[node] = own_chain
                continue
            if not chains:
                continue
            # Any other op on a divided tensor continues its chains, unless it needs what is divided as a whole.
            open_chains[node] = chains
            keeping_sources = [source for source in node.all_input_nodes if _keeps_last(source, node)]
            kept = none.union(*(in_last_dimension.get(source, none) for source in keeping_sources))
            if base_name(node.target) in _NEEDS_WHOLE:
                failed |= kept
            if not _is_attention(node):
                in_last_dimension[node] = kept
            else:  # it is divided by heads
                self._note_heads(node, chains)
                if not all(open_chains.get(source) for source in factors or node.all_input_nodes[:3]):
                    failed |= chains  # some of queries, keys and values are whole, so that heads cannot be divided
            if kept:
                self._split_added_biases(node)
        never_ended = {product for chains in open_chains.values() for product in chains} - ended_chains
        return (failed | never_ended) - left_whole

    def _split_added_biases(self, node: Node) -> None:
        """Split the biases of split products which an op of its own adds: the parameters of one dimension that it reads."""
        for source in node.all_input_nodes:
            if source in self.parameters and value_of(source).dim() == 1:
                self.split.setdefault(source, "columns")

    def _split_product(self, node: Node, weight: Node, how: str) -> None:
        """Note that the ``weight`` of the product ``node`` is split by "rows", "columns" or "vocabulary" (``how``).

        Its bias is split alike, except by rows: then it is added once, to the completed sum. The width of a product that is
        split by columns is noted in ``widths``, for messages under the name of its layer, such as "columns of q_proj".
        """
        self.split[weight] = how
        if how == "rows":
            return
        self.split |= {source: how for source in node.all_input_nodes if self._is_bias(source)}
        if how == "columns":
            layer = self.parameters[weight].rpartition(".")[0]  # such as layers.0.attention.q_proj
            self.widths[f"columns of {layer.rpartition('.')[2]}"] = _width(node)

    def _split_vocabulary(self) -> None:
        """Split by vocabulary the largest embedding outside the blocks, and the head, which makes a logit for each of its rows.

        Does nothing for a model without an embedding outside the blocks.
        """
        tables = [
            node.all_input_nodes[0]
            for place, node in enumerate(self.nodes[: self.backward])
            if base_name(node.target) == "embedding" and self.block_at[place] < 0
        ]
        if not tables:
            return
        largest_table = max(tables, key=lambda table: int(value_of(table).shape[0]))
        vocabulary = int(value_of(largest_table).shape[0])
        self.split[largest_table] = "vocabulary"
        for node in self.nodes[self.head_from + 1 : self.backward]:
            weight = self._weight_of(node)
            if weight is not None and _width(node) == vocabulary:
                self._split_product(node, weight, "vocabulary")

    def _note_heads(self, node: Node, products: Iterable[Node]) -> None:
        """Note in ``widths`` the number of heads of an attention, and that of its keys and values if there are fewer.

        ``node``: a fused attention, or the product of queries and keys. ``products``: the products that make queries, keys and
        values; one with fewer columns than heads times a head's width makes keys or values that several heads share.
        """
        shapes = [tuple(value_of(source).shape) for source in node.all_input_nodes[:3]]
        queries_shape = shapes[0]
        if base_name(node.target) in _BATCHED:
            # A product of (batch x heads, tokens, width) by (batch x heads, width, tokens), of which the width is taken to be
            # the shortest side.
            width = min(min(shape[-2:]) for shape in shapes)
            heads = queries_shape[0] // (self.traced.graph.batch_size or 1)
        else:  # a fused attention: (batch, heads, tokens, width)
            width = queries_shape[-1]
            heads = queries_shape[-3]
        self.widths["heads of attention"] = heads
        for product in products:
            if _width(product) % width == 0 and _width(product) // width < heads:
                self.widths["heads of keys and values"] = _width(product) // width

    def _weight_of(self, node: Node) -> Node | None:
        """Return the parameter by which a node multiplies its input, also through views, copies and casts of it.

        None: the node is no product, or its second factor is no parameter. In torch's layers the weight is the second one:
        ``x @ W.t()``.
        """
        factors = factors_of(node)
        if not factors:
            return None
        weight = factors[1]
        while weight.op == "call_function" and base_name(weight.target) in PASSING:
            weight = weight.all_input_nodes[0]
        return weight if self.parameters.get(weight) else None

    def _is_bias(self, node: Node) -> bool:
        """Return whether a node is a parameter of one dimension, or a view or cast of one."""
        while node.op == "call_function" and base_name(node.target) in PASSING:
            node = node.all_input_nodes[0]
        return bool(self.parameters.get(node)) and value_of(node).dim() == 1

    # Which tensors are divided then --------------------------------------------------------------------------------------

    def _divide(self) -> None:
        """Follow the split weights through the program, and fill ``divided``, ``partial`` and ``exchanges``.

        Ops run on a partial sum as long as they can; an exchange completes it before the first op that cannot. So the passes
        over the nodes in the order of the program decide for each whether its tensor is divided, a partial sum, or whole.
        """
        self.divided |= set(self.split)
        whole_gradients = self._whole_gradients()
        vocabularies = {int(value_of(table).shape[0]) for table, how in self.split.items() if how == "vocabulary"}
        for node in self.nodes:
            if node.op != "call_function":
                continue
            name = base_name(node.target)
            partial_sums = [source for source in node.all_input_nodes if source in self.partial]
            if partial_sums and self._stays_partial(node, partial_sums):
                self.partial.add(node)
                continue
            for source in partial_sums:
                self._complete(source, self.partial)
            factors = factors_of(node)
            has_divided = any(source in self.divided for source in node.all_input_nodes)
            if factors and not self._is_batch_product(node):
                self._divide_product(node, factors, node in whole_gradients)
            elif name == "embedding" and node.all_input_nodes[0] in self.divided:
                self.partial.add(node)
            elif name == "embedding_dense_backward":
                if value_of(node).shape[0] in vocabularies:
                    self.divided.add(node)
            elif has_divided and name.startswith("nll_loss") and not name.endswith("backward"):
                self._exchange_loss(node)
            elif has_divided:
                self.divided.add(node)

    def _divide_product(self, node: Node, factors: tuple[Node, Node], is_whole_gradient: bool) -> None:
        """Note whether a product is a partial sum (both factors are divided) or divided (one of them is).

        A product with a weight that is not split, and the gradient of such a weight, need whole factors: divided ones are
        exchanged first. ``is_whole_gradient``: whether the product makes such a gradient.
        """
        weight = self._weight_of(node)
        if is_whole_gradient or (weight is not None and weight not in self.split):
            for factor in factors:
                self._complete(factor, self.divided)
        is_divided = [factor in self.divided for factor in factors]
        if all(is_divided):
            self.partial.add(node)
        elif any(is_divided):
            self.divided.add(node)

    def _stays_partial(self, node: Node, parts: Sequence[Node]) -> bool:
        """Return whether an op on partial sums makes a partial sum, so that no exchange is needed yet.

        Views, casts and linear ops do, and so do sums of partial sums. ``parts``: those of its inputs that are partial sums.
        """
        name, is_forward = base_name(node.target), self.place_of[node] < self.backward
        if name in _ADDED:
            # The backward pass adds the gradients of one tensor one by one, and a whole one (past a residual) may come first.
            # A single exchange follows their sum, for which it is enough that the whole one counts on one rank only.
            return len(parts) == len(node.all_input_nodes) or not is_forward
        return name in PASSING or name in _LINEAR or (is_forward and name in _LINEAR_FORWARD)

    def _complete(self, node: Node, among: set[Node]) -> None:
        """Make a node's tensor whole by an exchange, if it is in the set ``among`` (``divided`` or ``partial``).

        For a view, the tensor that it is a view of is exchanged. That tensor and its views leave the set. Split weights stay
        divided.
        """
        if node not in among or node in self.split:
            return
        while base_name(node.target) in PASSING and node.all_input_nodes[0] in among:
            node = node.all_input_nodes[0]
        if node in self.split:  # a view of a weight
            return
        self._exchange(node)
        waiting = [node]
        while waiting:
            viewed = waiting.pop()
            among.discard(viewed)
            waiting += [user for user in viewed.users if user in among and base_name(user.target) in PASSING]

    def _whole_gradients(self) -> set[Node]:
        """Return the nodes that make the gradients of parameters that are not split: every rank needs these gradients whole."""
        # By the address of a torch storage, the last node with a tensor in it.
        made_by = {
            tensor.untyped_storage()._cdata: node for node in self.nodes for tensor in tensors_of(value_of(node))
        }
        split_names = {self.parameters[node] for node in self.split if node in self.parameters}
        makers = set()
        for name, gradient in self.traced.gradients.items():
            if name in split_names:
                continue
            node = made_by[gradient.untyped_storage()._cdata]
            while base_name(node.target) in PASSING and node.all_input_nodes:  # through views and copies
                node = node.all_input_nodes[0]
            makers.add(node)
        return makers

    def _is_batch_product(self, node: Node) -> bool:
        """Return whether a node is a batched product of two activations, as in attention that is not fused."""
        return base_name(node.target) in _BATCHED and self._weight_of(node) is None

    def _exchange(self, node: Node) -> None:
        """Add an exchange of a node's tensor after the op that makes it."""
        maker = node
        while maker not in self.names:  # the node picks one of several results of an op
            maker = maker.all_input_nodes[0]
        self.exchanges.append(TensorExchange(op=self.names[maker], tensor=exchanged(tensors_of(value_of(node))[0])))

    def _exchange_loss(self, node: Node) -> None:
        """Add the ``_LOSS_EXCHANGES`` exchanges of a loss on divided logits, each of one float32 number for every token."""
        tokens = value_of(node.all_input_nodes[0]).shape[:-1]
        number_each = exchanged(torch.empty(tokens, dtype=torch.float32, device="meta"))
        self.exchanges += [TensorExchange(op=self.names[node], tensor=number_each, whole=True)] * _LOSS_EXCHANGES

    # The rank's step -----------------------------------------------------------------------------------------------------

    def _cuts(self, node: Node) -> dict[Node, int | None]:
        """Return, for each input of an op and for its output, the dimension along which the rank has only a part of the tensor.

        None: the rank has all of it. -2 means rows and -1 columns of a product; :data:`_LONGEST` the longest dimension.
        """
        tensors = [*node.all_input_nodes, node]
        factors = factors_of(node)
        if factors and not self._is_batch_product(node):
            return self._cuts_of_product(node, factors)
        if _is_attention(node):  # every rank has a part of the heads
            # A batched product is of (batch x heads, ...), a fused attention of (batch, heads, ...).
            heads_dimension = 0 if factors else 1
            is_divided = node in self.divided
            return {each: heads_dimension if is_divided and self._is_activation(each) else None for each in tensors}
        return {
            each: _LONGEST if each in self.divided or (self.sequence and self._is_activation(each)) else None
            for each in tensors
        }

    def _cuts_of_product(self, node: Node, factors: tuple[Node, Node]) -> dict[Node, int | None]:
        """Return what :meth:`_cuts` does for a product of two matrices, from which of its factors are divided.

        Two divided factors are cut along the inner dimension, so that the result is a partial sum of the whole shape. A single
        one is cut along its outer dimension, and the result alike.
        """
        left, right = factors
        cuts: dict[Node, int | None] = dict.fromkeys([*node.all_input_nodes, node])
        is_left_divided, is_right_divided = left in self.divided, right in self.divided
        if is_left_divided and is_right_divided:
            cuts[left] = -1
            cuts[right] = -2
        elif is_left_divided:
            cuts[left] = -2
            cuts[node] = -2
        elif is_right_divided:
            cuts[right] = -1
            cuts[node] = -1
        if is_left_divided != is_right_divided:
            for source in node.all_input_nodes:
                if self._is_bias(source) and source in self.divided:
                    cuts[source] = -1
        return cuts

    def _is_activation(self, node: Node) -> bool:
        """Return whether a node is the result of an op with two or more dimensions, which is taken for an activation."""
        return node.op == "call_function" and any(tensor.dim() > 1 for tensor in tensors_of(value_of(node)))

    def _shares(self) -> dict[int, float]:
        """Return, by the address of a divided torch storage, the share of it that the rank holds, above 0 and below 1.

        Storages that are not named are held whole. Under sequence parallelism, activations between the chains are divided, too,
        but partial sums are not.
        """
        shares: dict[int, float] = {}
        whole: set[int] = set()
        for node in self.nodes:
            is_divided = node in self.divided or (
                self.sequence
                and self._is_activation(node)
                and node not in self.partial
                and not self._of_parameter(node)
            )
            for tensor in tensors_of(value_of(node)):
                address = tensor.untyped_storage()._cdata
                if is_divided:
                    shares.setdefault(address, 1.0 / self.ranks)
                elif node.op != "call_function" or base_name(node.target) not in PASSING:
                    whole.add(address)
        return {address: share for address, share in shares.items() if address not in whole}

    def _of_parameter(self, node: Node) -> bool:
        """Return whether a node is a view or cast of a placeholder, such as a parameter, or a result of the program."""
        while node.op == "call_function" and base_name(node.target) in PASSING:
            node = node.all_input_nodes[0]
        return node in self.parameters or node.op != "call_function" or self.nodes[-1] in node.users


def step_of_part(
    traced: TracedStep, cuts_of: Callable[[Node], Mapping[Node, int | None]], parts: int, split_names: Collection[str]
) -> TracedStep:
    """Return a traced step with one GPU's part of the work, of the parameters and of the gradients.

    The cost of an op is that of its call on the GPU's parts of its tensors; ops on whole tensors keep their cost.

    Args:
        traced: the whole step.
        cuts_of: returns, for each input of an op and for its output, the dimension along which the GPU has only a part of the
            tensor, see :func:`_issued_cut`.
        parts: the number of parts, each on another GPU.
        split_names: the parameters of which each GPU has only a part.
    """
    graph = traced.graph
    issued_calls, calls = _calls_on_parts(traced, cuts_of, parts)
    costs = [cost_of(call) for call in issued_calls]
    flops, gemm = graph.flops.copy(), graph.gemm.copy()
    size_bytes, written_bytes = graph.size_bytes.copy(), graph.written_bytes.copy()
    for op, name in enumerate(graph.names):
        if name in calls:
            cost = costs[calls[name]]
            flops[op] = cost.flops
            size_bytes[op] = cost.size_bytes
            written_bytes[op] = cost.written_bytes
            gemm[op] = cost.gemm
    for op in np.flatnonzero((graph.kind == RECV) | (graph.kind == SEND)).tolist():
        if graph.parameter[op] in split_names:
            size_bytes[op] /= parts  # each GPU sends its part
    part_graph = replace(graph, flops=flops, size_bytes=size_bytes, written_bytes=written_bytes, gemm=gemm)
    # The cached traces at other batch sizes are those of the whole step, and left behind.
    return replace(traced, graph=part_graph, issued=issued_calls, calls=calls, _traces={})


def _calls_on_parts(
    traced: TracedStep, cuts_of: Callable[[Node], Mapping[Node, int | None]], parts: int
) -> tuple[tuple[Issued, ...], dict[str, int]]:
    """Return (distinct calls, by op name the index of the op's call in them) of one GPU's part of a step.

    A call is an op with the shapes and types of its tensors, on which its cost depends. The whole step's calls keep their
    indices, also those that the GPU does not make; calls on parts of tensors follow. The arguments are those of
    :func:`step_of_part`.
    """
    index_of_call: dict[Issued, int] = {call: index for index, call in enumerate(traced.issued)}
    calls = dict(traced.calls)
    known: dict[tuple[Any, ...], int] = {}  # by whole call and cuts, the index of the cut call, since layers repeat
    for name, node in traced.nodes.items():
        cuts = cuts_of(node)
        if not any(cut is not None for cut in cuts.values()):
            continue
        key = (traced.calls[name], *cuts.values())
        if key not in known:
            cut_call = _issued_cut(node, cuts, parts)
            known[key] = index_of_call.setdefault(cut_call, len(index_of_call))  # an equal call keeps its index
        calls[name] = known[key]
    return tuple(index_of_call), calls


def factors_of(node: Node) -> tuple[Node, Node] | None:
    """Return the two factors of a product, the input first and the weight second; None: the node is no product."""
    if not isinstance(node.target, OpOverload):
        return None
    argument_indices = FACTOR_PLACES.get(base_name(node.target))
    if argument_indices is None:
        return None
    left, right = argument_indices
    return (node.args[left], node.args[right])  # type: ignore[return-value]


def _is_attention(node: Node) -> bool:
    """Return whether a node is a fused attention, or a batched product, of which attention without fusion has two."""
    name = base_name(node.target)
    return name in _BATCHED or ("scaled_dot_product" in name and "attention" in name)


def _width(node: Node) -> int:
    """Return the last dimension of a node's tensor."""
    return int(tensors_of(value_of(node))[0].shape[-1])


def _keeps_last(source: Node, node: Node) -> bool:
    """Return whether an op's result has the last dimension of its input ``source`` as its last one.

    Only a view may move or split it; of a view it is taken to be kept if the two have the same size.
    """
    if base_name(node.target) not in PASSING or base_name(node.target) == "slice":
        return True
    before, after = value_of(source), value_of(node)
    return bool(before.dim() and after.dim() and before.shape[-1] == after.shape[-1])


def exchanged(tensor: Tensor) -> Sized:
    """Return the properties of a tensor that is exchanged: shape and type, with a storage of its own elements only.

    A view may lie in a larger storage, which is not exchanged.
    """
    return replace(sized(tensor), stored=tensor.numel())


def _issued_cut(node: Node, cuts: Mapping[Node, int | None], ranks: int) -> Issued:
    """Return what the cost of one rank's call depends on: the op of ``node`` on the rank's parts of its tensors.

    ``cuts``: for the op's inputs and output, the dimension along which each is cut into ``ranks`` parts; None: it is whole.
    """
    # :func:`issued` reads the values in the nodes' ``meta``: they are replaced by cut ones meanwhile, and restored.
    before = {each: each.meta.get("val") for each in cuts}
    try:
        for each, dimension in cuts.items():
            if dimension is not None:
                each.meta["val"] = _cut(before[each], dimension, ranks)
        return issued(node)
    finally:
        for each, value in before.items():
            if value is not None:
                each.meta["val"] = value


def _cut(value: Any, dimension: int, ranks: int) -> Any:
    """Return a tensor without storage, of the shape of the first rank's part of ``value`` along a dimension.

    The part is rounded up if the ranks do not divide the dimension. Expanded dimensions (stride 0) stay expanded. A list is cut
    item by item; a value that is no tensor, or has no such dimension, is returned unchanged. ``dimension``: counted as by
    torch, or :data:`_LONGEST`, for which the first dimension counts only if it is the only one.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(_cut(item, dimension, ranks) for item in value)
    if not isinstance(value, Tensor) or not value.dim():
        return value
    shape = list(value.shape)
    if dimension == _LONGEST:
        dimension = max(range(min(1, len(shape) - 1), len(shape)), key=lambda place: shape[place])
    if dimension < -len(shape) or dimension >= len(shape):
        return value
    shape[dimension] = -(-shape[dimension] // ranks)  # rounded up
    held = [1 if stride == 0 else size for size, stride in zip(shape, value.stride(), strict=True)]
    return torch.empty(held, dtype=value.dtype, device="meta").expand(shape)
