"""The step of one of several GPUs that share the experts of every block: expert parallelism, as in GShard and DeepSpeed-MoE.

Each GPU has its own samples and, of E experts, its own part (Lepikhin et al., arXiv:2006.16668; Rajbhandari et al.,
arXiv:2201.05596). Before the products of a block's experts every token's row goes to the GPUs of the experts that it chose, and
after them the results come back: two all-to-alls in the forward pass and two in the backward pass. Tokens are taken to choose
all experts equally often, so that a GPU computes as much as without the exchange: its experts' products with the rows of all
GPUs. Which parameters are experts follows from the traced step: those of three dimensions that a grouped product multiplies.
Start at :func:`share_experts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from torch.fx import Node

from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.costs.tensor_parallel import (
    PASSING,
    Rank,
    TensorExchange,
    exchanged,
    factors_of,
    step_of_part,
)
from ddltool.analyzers.step.recording.op_rules import names_in
from ddltool.analyzers.step.recording.torch_costs import base_name, tensors_of, value_of
from ddltool.analyzers.step.tracing.torch_adapter import TracedStep
from ddltool.arrays import Floats
from ddltool.errors import InputError

_GROUPED = names_in("_grouped_mm")
# Ops that add up or hand on gradients of experts.
_KEEPING = PASSING | names_in("add add_ mul zeros_like copy_")


def share_experts(traced: TracedStep, gpus: int) -> Rank:
    """Return the step of one of ``gpus`` GPUs that share the experts of a traced training step. O(nodes).

    Raises InputError for a step without experts that a grouped product multiplies, and for a number of GPUs that does not
    divide the experts.
    """
    return _Sharer(traced, gpus).rank()


def expert_names(traced: TracedStep) -> list[str]:
    """Return the names of the parameters that are experts, in the order of the step's parameters; [] for a dense model."""
    products = [node for node in traced.program.nodes if base_name(node.target) in _GROUPED]
    weights = {_source(factors[1]) for node in products if (factors := factors_of(node)) is not None}
    return [name for name, node in traced.parameters.items() if node in weights and value_of(node).dim() == 3]


def all_to_all_s(fabric: Fabric, gpus: int, size_bytes: Floats) -> Floats:
    """Return the seconds in which each of ``gpus`` GPUs sends rows of ``size_bytes`` in equal parts to all of them.

    Within a node as many bytes pass each link as in an all-gather of that size; between nodes each GPU sends, by its share of
    its node's card, what is for the GPUs of other nodes. The two go on at the same time.
    """
    inside = min(gpus, fabric.gpus_per_node)
    seconds: Floats = fabric.over(inside).all_gather_s(size_bytes * inside / gpus)
    if gpus > inside:
        bytes_per_s = fabric.between.bytes_per_s / fabric.gpus_per_node
        sent_bytes = size_bytes * (1.0 - inside / gpus)
        seconds = np.maximum(seconds, fabric.between.latency_s + sent_bytes / bytes_per_s)
    return seconds


def _source(node: Node) -> Node:
    """Return the node of which ``node`` is a view or cast, through any number of them."""
    while node.op == "call_function" and base_name(node.target) in PASSING:
        node = node.all_input_nodes[0]
    return node


class _Sharer:
    """Finds the tensors with a row of matrices for each expert, of which a GPU has a part, and the all-to-alls."""

    def __init__(self, traced: TracedStep, gpus: int) -> None:
        """Find the experts. Raises InputError as :func:`share_experts` does."""
        self.traced, self.gpus = traced, gpus
        self.nodes: list[Node] = list(traced.program.nodes)
        self.names = {node: name for name, node in traced.nodes.items()}
        self.experts = expert_names(traced)
        if not self.experts:
            problem = f"{traced.graph.name} has no experts in a grouped product"
            raise InputError("--expert-parallel", problem, "leave it out")
        counts = {value_of(traced.parameters[name]).shape[0] for name in self.experts}
        if any(count % gpus for count in counts):
            problem = f"{gpus} GPUs do not divide {' or '.join(map(str, sorted(counts)))} experts"
            raise InputError("--expert-parallel", problem, "give a divisor")
        self.divided = self._divided(counts)
        """Nodes whose tensor has a matrix for each expert: weights, and their gradients."""

    def rank(self) -> Rank:
        """Return the GPU's step."""
        traced = step_of_part(self.traced, self._cuts, self.gpus, set(self.experts))
        shares = {
            tensor.untyped_storage()._cdata: 1.0 / self.gpus
            for node in self.divided
            for tensor in tensors_of(value_of(node))
        }
        return Rank(traced=traced, exchanges=list(self._exchanges()), divided=shares)

    def _divided(self, counts: set[int]) -> set[Node]:
        """Return the nodes whose tensor has three dimensions, of which the first is of experts; ``counts``: of experts."""
        divided = {self.traced.parameters[name] for name in self.experts}
        for node in self.nodes:
            tensors = tensors_of(value_of(node)) if node.op == "call_function" else []
            if not tensors or tensors[0].dim() != 3 or tensors[0].shape[0] not in counts:
                continue
            is_made = base_name(node.target) in _GROUPED
            is_kept = base_name(node.target) in _KEEPING and any(source in divided for source in node.all_input_nodes)
            if is_made or is_kept:
                divided.add(node)
        return divided

    def _cuts(self, node: Node) -> Mapping[Node, int | None]:
        """Return, for each input of an op and for its output, 0 where the GPU has only its experts' part; else None."""
        return {each: 0 if each in self.divided else None for each in (*node.all_input_nodes, node)}

    def _exchanges(self) -> Iterator[TensorExchange]:
        """Yield the all-to-alls, of each block's experts in the order of the program.

        They are of the rows that the first product reads, and of those that the last one writes; so they are in the backward
        pass, where the rows are gradients.
        """
        chains: dict[tuple[str, bool], list[tuple[Node, Node]]] = {}
        """By the experts' module, and whether it is the forward pass: the products in their order, each with its rows."""
        parameter_of = {self.traced.parameters[name]: name for name in self.experts}
        is_forward = True
        for node in self.nodes:
            is_forward = is_forward and not self.names.get(node, "").startswith("backward")
            factors = factors_of(node) if base_name(node.target) in _GROUPED else None
            if factors is not None and (name := parameter_of.get(_source(factors[1]))) is not None:
                chains.setdefault((name.rpartition(".")[0], is_forward), []).append((node, factors[0]))
        for chain in chains.values():
            (first, rows), (last, _) = chain[0], chain[-1]
            for product, sent in ((first, rows), (last, last)):
                tensor = exchanged(tensors_of(value_of(sent))[0])
                yield TensorExchange(op=self.names[product], tensor=tensor, of_experts=True)
