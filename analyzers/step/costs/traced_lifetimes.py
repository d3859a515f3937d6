"""Reads when a traced step makes, uses and frees each storage, and where its blocks run. Start at :func:`lifetimes_of`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from ddltool.analyzers.step.communication.fsdp import block_container, block_of
from ddltool.analyzers.step.costs.memory import ACTIVATION, GIVEN, GRADIENT, PARAMETER, ModelBlock, TensorLifetimes
from ddltool.analyzers.step.recording.torch_costs import tensors_of, value_of, written_arguments
from ddltool.analyzers.step.tracing.torch_adapter import TracedStep
from ddltool.arrays import Floats
from ddltool.graph import RECV, SEND
from ddltool.plans import is_product


def lifetimes_of(traced: TracedStep) -> TensorLifetimes:
    """Return when each storage (memory of a tensor and its views) of a traced training step is made and used. O(nodes).

    The step's blocks are the members of the module list with most of the parameters; there are none without such a list, or
    if its members do not run one after another, each once.
    """
    return _Reader(traced).read()


@dataclass(kw_only=True, slots=True)
class _Storage:
    """One storage while a step is read; its fields are the entries of the arrays of :class:`TensorLifetimes` by that name."""

    elements: int
    width: int
    alloc: int
    role: int
    owner: int
    forward: int = 0
    free: int = 0
    gradient_of: str = ""


class _Reader:
    """Reads the storages and blocks of a traced step in one pass; storages are numbered in the order of first use.

    A place is the index of a node of the program. ``spans``: by name of a block, the first and last place of its forward pass;
    empty if the blocks do not run one after another. ``block_at``: by place of the forward pass, the name of the block that
    runs there. The index of a block is its position in ``spans``.
    """

    def __init__(self, traced: TracedStep) -> None:
        """Find the model's list of blocks, and where each block's forward pass begins and ends."""
        self.traced = traced
        graph = traced.graph
        self.nodes: list[Node] = list(traced.program.nodes)
        self.op_names = {node: name for name, node in traced.nodes.items()}
        received = graph.kind == RECV  # one op for each parameter
        parameters = [graph.parameter[op] or "" for op in np.flatnonzero(received).tolist()]
        self.container = block_container(parameters, graph.size_bytes[received].tolist())
        """The name of the module list that holds the blocks; None: there is none."""
        self.parameters = {node: name for name, node in traced.parameters.items()}
        backward_places = (
            place for place, node in enumerate(self.nodes) if self.op_names.get(node, "").startswith("backward")
        )
        self.backward = next(backward_places, len(self.nodes) - 1)
        """The first place of the backward pass; the place of the program's output if it has no backward pass."""
        self.block_at = self._read_block_names()
        self.spans = self._read_spans()
        self.block_numbers = {name: number for number, name in enumerate(self.spans)}
        self.storages: list[_Storage] = []
        self.storage_numbers: dict[int, int] = {}
        """By the address of torch's storage."""
        self.last_reads: dict[tuple[int, int], int] = {}
        """By storage and block index, the last place of the block's forward pass that reads the storage."""

    def read(self) -> TensorLifetimes:
        """Return the lifetimes of all storages, and the blocks. To be called once.

        Every use of a storage is recorded first, because its role, its owner (the block that it belongs to) and its last place
        may depend on all of them. Where the blocks cannot be told from one another, no storage has an owner.
        """
        used_storages = [  # by place, the indices of the storages that the node reads or makes
            {
                self._record_use(source, tensor, place)
                for source in (*node.all_input_nodes, node)
                for tensor in _tensors(source)
            }
            for place, node in enumerate(self.nodes)
        ]
        # Roles, owners and last places are complete only after these three, each of which may override the one before.
        self._free_as_recorded()
        self._mark_gradients()
        if self.spans:
            self._assign_activations()
        blocks = self._read_blocks(used_storages)
        if not blocks:
            for storage in self.storages:
                storage.owner = -1
        alloc = np.array([storage.alloc for storage in self.storages], dtype=np.int64)
        # By place of a product (matrix product, convolution or the like), its number within its block.
        product_numbers = {place: number for block in blocks for number, place in enumerate(block.products)}
        input_rows = [  # what a block reads and did not make itself: the rows of TensorLifetimes.read
            (storage, block, last_read)
            for (storage, block), last_read in self.last_reads.items()
            if blocks and alloc[storage] < blocks[block].first
        ]
        return TensorLifetimes(
            traced=self.traced,
            nodes=len(self.nodes),
            backward=self.backward,
            elements=tuple(storage.elements for storage in self.storages),
            width=np.array([float(storage.width) for storage in self.storages]),
            alloc=alloc,
            forward=np.array([storage.forward for storage in self.storages], dtype=np.int64),
            free=np.array([storage.free for storage in self.storages], dtype=np.int64),
            role=np.array([storage.role for storage in self.storages], dtype=np.int64),
            owner=np.array([storage.owner for storage in self.storages], dtype=np.int64),
            product=np.array([product_numbers.get(place, -1) for place in alloc.tolist()], dtype=np.int64),
            read=np.array(input_rows, dtype=np.int64).reshape(-1, 3),
            trained_bytes=self._sum_trained_bytes(blocks),
            kept_share=self._kept_share(),
            blocks=blocks,
            gradient_of=tuple(storage.gradient_of for storage in self.storages),
            numbers=self.storage_numbers,
        )

    def _record_use(self, source: Node, tensor: Tensor, place: int) -> int:
        """Record that the node at ``place`` uses ``tensor``, and return the index of the tensor's storage.

        ``source``: the node that makes the tensor, which is the node at ``place`` itself or one of its inputs.
        """
        address = tensor.untyped_storage()._cdata
        if address not in self.storage_numbers:
            self.storage_numbers[address] = len(self.storages)
            self.storages.append(self._new_storage(source, tensor, place))
        storage_index = self.storage_numbers[address]
        storage = self.storages[storage_index]
        storage.free = max(storage.free, place)
        if place < self.backward:
            storage.forward = max(storage.forward, place)
            if self.spans and self.block_at[place]:
                self.last_reads[storage_index, self.block_numbers[self.block_at[place]]] = place
        return storage_index

    def _new_storage(self, source: Node, tensor: Tensor, place: int) -> _Storage:
        """Return the record of a storage that is first used at ``place``, by the node ``source`` that makes its tensor.

        Its role follows from where it comes from: a parameter, another input of the step, or an op.
        """
        if source.op == "placeholder":
            role = PARAMETER if source in self.parameters else GIVEN
            made_at = 0
        else:
            role = ACTIVATION
            made_at = place
        return _Storage(
            elements=tensor.untyped_storage().nbytes() // tensor.element_size(),
            width=tensor.element_size(),
            alloc=made_at,
            role=role,
            owner=self._owner(self.parameters.get(source, "")),
        )

    def _owner(self, parameter: str) -> int:
        """Return the index of the block of the parameter with that name; -1: it lies outside all blocks."""
        if self.container is None:
            return -1
        return self.block_numbers.get(block_of(parameter, self.container), -1)

    def _free_as_recorded(self) -> None:
        """Let each storage live until the traced step gave it up, which may be after its last use.

        A storage that the step never gave up (``traced.last`` has no node for it) lives until the program's end.
        """
        places = {node: place for place, node in enumerate(self.nodes)}
        for address, index in self.storage_numbers.items():
            last_node = self.traced.last.get(address)
            given_up_at = len(self.nodes) - 1 if last_node is None else places[last_node]
            storage = self.storages[index]
            storage.free = max(storage.free, given_up_at)

    def _mark_gradients(self) -> None:
        """Set role, owner and last place of the parameters' gradients, which are held to the program's end."""
        for name, gradient in self.traced.gradients.items():
            storage = self.storages[self.storage_numbers[gradient.untyped_storage()._cdata]]
            storage.free = len(self.nodes) - 1
            storage.role = GRADIENT
            storage.owner = self._owner(name)
            storage.gradient_of = name

    def _assign_activations(self) -> None:
        """Set the owner of each activation that no op outside one block uses in the forward pass: that block.

        Checkpointing a block may drop such tensors: no other block would miss them.
        """
        for storage in self.storages:
            if storage.role != ACTIVATION or storage.alloc >= self.backward:
                continue
            maker = self.block_at[
                storage.alloc
            ]  # the name of the block that makes it; "": it is made outside all blocks
            if not maker:
                continue
            _, last_place = self.spans[maker]
            if storage.forward <= last_place:
                storage.owner = self.block_numbers[maker]

    def _read_blocks(self, storages_by_place: Sequence[set[int]]) -> tuple[ModelBlock, ...]:
        """Return the blocks in the order of their forward passes; none at all if one of them has no backward pass.

        A block's backward pass is where nodes use a storage that it owns, from the first such node to the last.
        ``storages_by_place``: by place, the indices of the storages that the node reads or makes.
        """
        backward_places: list[list[int]] = [[] for _ in self.spans]
        for place in range(self.backward, len(self.nodes) - 1):  # the last node is the program's output
            for owner in {self.storages[index].owner for index in storages_by_place[place]} - {-1}:
                backward_places[owner].append(place)
        if not all(backward_places):
            return ()
        overwritten = self._overwritten_storages()
        blocks = []
        for (name, (first, last)), places in zip(self.spans.items(), backward_places, strict=True):
            products = tuple(place for place in range(first, last + 1) if _is_product(self.nodes[place]))
            # A result that is overwritten is lost, so that such a product cannot be kept.
            keepable = tuple(
                number
                for number, place in enumerate(products)
                if overwritten.isdisjoint(self._storages_of(self.nodes[place]))
            )
            blocks.append(
                ModelBlock(
                    name=name,
                    first=first,
                    last=last,
                    begins=places[0],
                    ends=places[-1],
                    products=products,
                    keepable=keepable,
                )
            )
        return tuple(blocks)

    def _kept_share(self) -> float:
        """Return the bytes of all parameters as they are kept, over the bytes in which the step's ops read them.

        The two differ if a float32 parameter is cast to a half type before it is traced. 1.0 for a step without parameters.
        """
        graph = self.traced.graph
        read_bytes = sum(tensor.nbytes for node, name in self.parameters.items() if name for tensor in _tensors(node))
        return float(graph.parameter_bytes) / read_bytes if read_bytes else 1.0

    def _sum_trained_bytes(self, blocks: Sequence[ModelBlock]) -> Floats:
        """Return (blocks + 1,) the bytes of parameters with a gradient, those outside all blocks last."""
        graph = self.traced.graph
        trained_bytes = np.zeros(len(blocks) + 1)
        for op in np.flatnonzero(graph.kind == SEND).tolist():  # one op for each gradient
            owner = self._owner(graph.parameter[op] or "") if blocks else -1
            trained_bytes[owner] += graph.size_bytes[op]  # the index -1, of no block, finds the last entry
        return trained_bytes

    def _storages_of(self, node: Node) -> set[int]:
        """Return the indices of the storages of a node's outputs."""
        return {self.storage_numbers[tensor.untyped_storage()._cdata] for tensor in _tensors(node)}

    def _overwritten_storages(self) -> set[int]:
        """Return the indices of the storages that an op of the forward pass changes in place, by the op's schema."""
        overwritten: set[int] = set()
        for node in self.nodes[: self.backward]:
            for value in written_arguments(node.target, node.args, node.kwargs):
                if isinstance(value, Node):
                    overwritten |= self._storages_of(value)
        return overwritten

    def _read_block_names(self) -> list[str]:
        """Return, by place of the forward pass, the name of the block in which the node runs; "": in none.

        The name of an op contains the module that calls it. A node that is no op runs where its predecessor does.
        """
        blocks: list[str] = []
        current_block = ""
        for node in self.nodes[: self.backward]:
            op_name = self.op_names.get(node)
            if op_name is not None:
                current_block = ""
                module = op_name.rpartition("/")[0].partition("/")[2]  # of forward/MODULE/OP
                if module and self.container is not None:
                    current_block = block_of(f"{module}.", self.container)
            blocks.append(current_block)
        return blocks

    def _read_spans(self) -> dict[str, tuple[int, int]]:
        """Return, by name of a block, the first and the last place of its forward pass, in the order of these.

        {}: a block runs in several pieces, or there are fewer than two blocks.
        """
        spans: dict[str, tuple[int, int]] = {}
        named_blocks: Sequence[str] = [name for name in self.block_at if name]
        # Uninterrupted runs of one block: as many as blocks, if each runs in one piece.
        run_count = 1 + sum(block != next_block for block, next_block in pairwise(named_blocks)) if named_blocks else 0
        for place, name in enumerate(self.block_at):
            if name:
                first_place, _ = spans.get(name, (place, place))
                spans[name] = (first_place, place)
        return spans if len(spans) == run_count and len(spans) > 1 else {}


def _is_product(node: Node) -> bool:
    """Return whether a node is a matrix product, convolution or the like (:func:`ddltool.plans.is_product`)."""
    return isinstance(node.target, OpOverload) and is_product(node.target.overloadpacket.__name__)


def _tensors(node: Node) -> list[Tensor]:
    """Return the tensors that a node makes, as they were traced."""
    return tensors_of(value_of(node))
