"""Graph: one worker's partitioned graph of one training or inference step.

Ops are stored in parallel arrays (entry ``i`` of every array belongs to op ``i``) and edges in compressed rows, so that
analyzers are vectorised; :class:`Op` shows one op to people and files. Start at :meth:`Graph.from_ops`.

Terms (TicTac, section 3): a ``recv`` op is a root that brings one parameter in over a channel, a ``send`` op is a leaf
that takes one gradient out, everything else is ``compute``. A resource runs one op at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, Strict

from ddltool.artifacts import Artifact, parse, read_document, save
from ddltool.errors import InputError
from ddltool.quantities import MOST, AtLeastOne, Count, NonNegative, Processes, Seconds

# Strict: a text of digits is not taken for a number, nor a number for a text.
Text = Annotated[str, Strict()]
Place = Annotated[int, Strict(), Field(ge=-1, le=MOST)]
OpKind = Literal["recv", "compute", "send"]
Mode = Literal["training", "inference"]
KINDS: tuple[OpKind, ...] = ("recv", "compute", "send")
Gemm = tuple[float, float, float, float]
"""The shape of a matrix product: (count, m, n, k) for ``count`` products of an (m, k) and a (k, n) matrix."""
Layout = Literal["", "channels_first", "channels_last", "left_transposed", "both_transposed"]
NO_GEMM: Gemm = (0.0, 0.0, 0.0, 0.0)
RECV, COMPUTE, SEND = range(3)
RECOMPUTED = "backward/recomputed"
"""The beginning of the names of ops of a backward pass that checkpoints run once more."""
# Names that are both arrays of a graph and fields of its ops.
_TEXTS = ("parameter", "op_type", "estimate", "dtype", "layout")
_NUMBERS = ("duration_s", "flops", "size_bytes", "written_bytes")
# Where a duration comes from: a formula for that op type, the memory-traffic default, an op that costs nothing, the
# file that was read, or a measurement. Coverage is counted over these.
Estimate = Literal["rule", "default", "free", "file", "measured"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """One op as a record, as in graph.json."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    name: Annotated[Text, Field(description="unique within the graph")]
    kind: OpKind
    resource: Annotated[Text, Field(description="compute:NUMBER, or channel:NUMBER for recv and send")] = "compute:0"
    duration_s: Annotated[Seconds | None, Field(description="seconds on its resource; null: not estimated")] = None
    flops: Annotated[NonNegative, Field(description="floating-point operations (a multiply-add counts two)")] = 0.0
    size_bytes: Annotated[
        NonNegative, Field(description="bytes transferred (recv, send) or read and written (compute)")
    ] = 0.0
    parameter: Annotated[Text | None, Field(description="the parameter that a recv or send carries")] = None
    inputs: Annotated[tuple[Text, ...], Field(description="names of the ops whose results it needs")] = ()
    op_type: Annotated[Text, Field(description="the framework's name of the op")] = ""
    estimate: Annotated[Estimate | None, Field(description="where duration_s comes from")] = None
    written_bytes: Annotated[
        NonNegative, Field(description="the part of a compute op's size_bytes that it writes; 0 where nobody said")
    ] = 0.0
    dtype: Annotated[Text, Field(description="torch's name of the type that it works in; empty: meta.dtype")] = ""
    layout: Annotated[
        Layout,
        Field(
            description="how its tensors lie in memory: where the channels of its images or volumes are (empty: "
            "meta.channels_last); which of a product's factors have contiguous columns in place of rows (empty: not the left)"
        ),
    ] = ""
    gemm: Annotated[
        tuple[NonNegative, NonNegative, NonNegative, NonNegative],
        Field(
            description="count, m, n, k of the matrix products behind it (of the forward pass for a backward op); zeros: none. "
            "Of a send: count, 0, rows, columns of its parameter's matrices; of a vector 0, 0, 0, elements"
        ),
    ] = NO_GEMM


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """Processes and memory of a script's recorded step. A place is the position of an op among the graph's compute ops."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    world_size: Annotated[Processes, Field(description="processes that the launcher starts")]
    passes: Annotated[AtLeastOne, Field(description="forward passes of the model in the step")]
    compiled: Annotated[bool, Strict(), Field(description="whether the script asks torch.compile for its model")]
    made: Annotated[
        tuple[Place, ...], Field(description="of each storage: place where it is made; -1: before the step")
    ]
    freed: Annotated[
        tuple[Place | None, ...], Field(description="last place where it lives; null: it outlives the step")
    ]
    storage_bytes: tuple[NonNegative, ...]
    parts: Annotated[tuple[Text, ...], Field(description="what it holds: parameters, gradients, activations, ...")]
    waits: Annotated[tuple[Place, ...], Field(description="places of ops that the host waited for")] = ()
    groups: Annotated[Mapping[str, tuple[Count, ...]], Field(description="ranks of each collective, by op")] = field(
        default_factory=dict
    )
    assumed: Annotated[
        Mapping[str, Count], Field(description="how often a value that only a run knows was read, by file:line")
    ] = field(default_factory=dict)
    seconds: Annotated[Seconds, Field(description="that recording took")] = 0.0
    batches: Annotated[
        AtLeastOne | None,
        Field(
            description="different batches among the processes: those that share activations share one; null: each",
        ),
    ] = None

    def lives(self, places: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Return the first place, the last place and the bytes of every storage, each (storages,).

        ``places``: number of compute ops of the step. A storage made before the step begins at place 0; one that
        outlives the step ends at the last place.
        """
        start = np.maximum(np.array(self.made, dtype=np.int64), 0)
        end = np.array([places - 1 if place is None else place for place in self.freed], dtype=np.int64)
        # A storage that no op used ends before it starts: it lives at its first place alone.
        return start, np.maximum(end, start), np.array(self.storage_bytes, dtype=np.float64)

    def held_bytes(self, places: int, part: str | None = None) -> NDArray[np.float64]:
        """Return the bytes that are held at every place, (places,).

        ``part``: count only storages of this part, such as "gradients"; None: all.
        """
        start, end, size = self.lives(places)
        if part is not None:
            size = size * np.array([name == part for name in self.parts], dtype=bool)
        # Bytes are added at a storage's first place and subtracted after its last; the running sum is what is held.
        change = np.zeros(places + 1)
        np.add.at(change, np.minimum(start, places), size)
        np.add.at(change, np.minimum(end + 1, places), -size)
        return np.cumsum(change)[:places]


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """A validated graph of ``n`` ops and ``e`` edges. Build it with :meth:`from_ops`; treat the arrays as read-only."""

    name: str
    mode: Mode
    names: tuple[str, ...]
    kind: NDArray[np.int8]
    """(n,) index into KINDS."""
    resource: NDArray[np.int32]
    """(n,) index into ``resource_names``."""
    resource_names: tuple[str, ...]
    duration_s: NDArray[np.float64]
    """(n,) seconds; NaN where not estimated."""
    flops: NDArray[np.float64]
    """(n,); :class:`Op` says what this and the next columns hold."""
    size_bytes: NDArray[np.float64]
    parameter: tuple[str | None, ...]
    op_type: tuple[str, ...]
    estimate: tuple[Estimate | None, ...]
    input_ptr: NDArray[np.int64]
    """(n + 1,) row pointers: op i's inputs are ``input_index[input_ptr[i]:input_ptr[i + 1]]``."""
    input_index: NDArray[np.int32]
    """(e,) op indices."""
    written_bytes: NDArray[np.float64]
    dtype: tuple[str, ...]
    layout: tuple[Layout, ...]
    gemm: NDArray[np.float64]
    """(n, 4) count, m, n and k of the matrix products behind each op; zeros: none, or not known."""
    batch_size: int | None = None
    meta: Mapping[str, str | int | float | bool | None] = field(default_factory=dict)
    """What the graph was made from and for, such as source, device and bandwidth; free-form, kept in the file."""
    recorded: Recorded | None = None
    """Processes and memory of a script's step; None: the graph of a model alone."""

    @classmethod
    def from_ops(
        cls,
        name: str,
        mode: Mode,
        ops: Iterable[Op],
        *,
        batch_size: int | None = None,
        meta: Mapping[str, str | int | float | bool | None] | None = None,
        recorded: Recorded | None = None,
        where: str = "graph",
    ) -> Graph:
        """Return the validated graph of ``ops``; ``meta`` and ``recorded`` are its fields.

        Raises InputError (``where`` stands before the field) for duplicate names, unknown inputs, recv ops with inputs,
        send ops that are inputs, a kind on the wrong resource, negative, NaN or infinite numbers, a parameter received
        twice, and cycles, one of which the message shows.
        """
        records = list(ops)
        op_index = _index_by_name(records, where)
        # Edges in compressed rows: pointers[i] is where the inputs of op i begin in the list of all inputs.
        pointers = np.zeros(len(records) + 1, dtype=np.int64)
        sources: list[int] = []
        for position, op in enumerate(records):
            _check_op(op, f"{where}:ops[{position}]")
            sources.extend(_input_indices(op, op_index, f"{where}:ops[{position}].inputs"))
            pointers[position + 1] = len(sources)
        resources = sorted({op.resource for op in records}, key=natural_key)
        resource_index = {resource: index for index, resource in enumerate(resources)}
        columns: dict[str, Any] = {name: tuple(getattr(op, name) for op in records) for name in (*_TEXTS, *_NUMBERS)}
        columns |= {name: np.array(columns[name], dtype=np.float64) for name in _NUMBERS}  # None becomes NaN
        graph = cls(
            name=name,
            mode=mode,
            names=tuple(op.name for op in records),
            kind=np.array([KINDS.index(op.kind) for op in records], dtype=np.int8),
            resource=np.array([resource_index[op.resource] for op in records], dtype=np.int32),
            resource_names=tuple(resources),
            input_ptr=pointers,
            input_index=np.array(sources, dtype=np.int32),
            gemm=np.array([op.gemm for op in records], dtype=np.float64).reshape(len(records), 4),
            batch_size=batch_size,
            meta=dict(meta or {}),
            recorded=recorded,
            **columns,
        )
        _check_structure(graph, where)
        return graph

    def __len__(self) -> int:
        """Return the number of ops."""
        return len(self.names)

    def __eq__(self, other: object) -> bool:
        """Return whether another graph has the same name, mode, batch size, meta, and ops in the same order.

        ``recorded`` is not compared.
        """
        if not isinstance(other, Graph):
            return NotImplemented
        own_head = (self.name, self.mode, self.batch_size, dict(self.meta))
        other_head = (other.name, other.mode, other.batch_size, dict(other.meta))
        return own_head == other_head and list(self.ops()) == list(other.ops())

    __hash__ = None  # type: ignore[assignment]

    def inputs_of(self, op: int) -> NDArray[np.int32]:
        """Return the indices of the inputs of the op with index ``op``."""
        return self.input_index[self.input_ptr[op] : self.input_ptr[op + 1]]

    def op(self, position: int) -> Op:
        """Return the op with index ``position`` as a record, with its inputs by name."""
        columns: dict[str, Any] = {name: getattr(self, name)[position] for name in _TEXTS}
        columns |= {name: float(getattr(self, name)[position]) for name in _NUMBERS}
        if math.isnan(columns["duration_s"]):
            columns["duration_s"] = None
        return Op(
            name=self.names[position],
            kind=KINDS[self.kind[position]],
            resource=self.resource_names[self.resource[position]],
            inputs=tuple(self.names[source] for source in self.inputs_of(position)),
            gemm=tuple(self.gemm[position].tolist()),
            **columns,
        )

    def ops(self) -> Iterator[Op]:
        """Return an iterator of the ops as records, in file order."""
        return (self.op(position) for position in range(len(self)))

    def of_kind(self, kind: int) -> NDArray[np.intp]:
        """Return the indices of the ops of one kind (RECV, COMPUTE or SEND)."""
        return np.flatnonzero(self.kind == kind)

    @property
    def users(self) -> NDArray[np.int32]:
        """(e,) the op that uses each entry of ``input_index``: edge k goes from ``input_index[k]`` to ``users[k]``."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.input_ptr))

    @property
    def timed(self) -> bool:
        """Whether every op has a duration."""
        return not bool(np.isnan(self.duration_s).any())

    @property
    def parameter_bytes(self) -> float:
        """Bytes of all parameters: the sum over the recv ops."""
        return float(self.size_bytes[self.kind == RECV].sum())

    @property
    def trained_bytes(self) -> float:
        """Bytes of the trained parameters: the sum over the send ops, which carry their gradients."""
        return float(self.size_bytes[self.kind == SEND].sum())

    def successors(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the ops that need each op's result, as compressed rows: (pointers (n + 1,), indices (e,)).

        The ops that need op i are ``indices[pointers[i]:pointers[i + 1]]``.
        """
        counts = np.bincount(self.input_index, minlength=len(self)).astype(np.int64)
        pointers = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        return pointers, self.users[np.argsort(self.input_index, kind="stable")]

    def topological_order(self) -> NDArray[np.int32]:
        """Return the op indices, (n,), each after its inputs: Kahn's algorithm with a first-in first-out queue. O(n + e).

        Raises InputError that shows one cycle if there is any.
        """
        missing_inputs = np.diff(self.input_ptr).tolist()
        pointer_array, targets = self.successors()
        target_ptr, target = pointer_array.tolist(), targets.tolist()
        order = [position for position, count in enumerate(missing_inputs) if count == 0]
        for position in order:  # the list grows while it is read: it is the queue
            for successor in target[target_ptr[position] : target_ptr[position + 1]]:
                missing_inputs[successor] -= 1
                if missing_inputs[successor] == 0:
                    order.append(successor)
        if len(order) < len(self):
            raise InputError(
                "graph:ops", f"the inputs form a cycle: {_show_cycle(self, missing_inputs)}", "remove one edge"
            )
        return np.array(order, dtype=np.int32)

    def with_durations(self, duration_s: NDArray[np.float64], estimate: Sequence[Estimate | None]) -> Graph:
        """Return a copy with other durations, (n,) in seconds, and with the origin (``Estimate``) of each.

        Raises InputError for a negative, NaN or infinite duration and for a wrong length.
        """
        durations = np.asarray(duration_s, dtype=np.float64)
        if durations.shape != (len(self),) or len(estimate) != len(self):
            raise InputError("durations", f"shape {durations.shape} for {len(self)} ops", "give one per op")
        bad = np.flatnonzero(~(np.isfinite(durations) & (durations >= 0)))
        if bad.size:
            raise InputError(
                "durations", f"{self.names[bad[0]]} has {durations[bad[0]]}", "seconds must be >= 0 and finite"
            )
        return replace(self, duration_s=durations, estimate=tuple(estimate))


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Return a sort key that compares runs of digits as numbers; different texts have different keys.

    >>> sorted(["layer10", "layer2"], key=natural_key)
    ['layer2', 'layer10']
    """
    parts = [part for part in re.split(r"([0-9]+)", text) if part]
    # Numbers sort before other text and by value; the digits themselves are compared last, so that 01 and 1 differ.
    key = [(0, int(part), part) if part.isascii() and part.isdigit() else (1, 0, part) for part in parts]
    return tuple(key)


def spread(sizes: Mapping[str, float], channels: int) -> dict[str, int]:
    """Return a channel (0 to ``channels`` - 1) for each name of ``sizes``, so that the channels' sums are nearly equal.

    The largest goes first, onto the least loaded channel (LPT); ties by name. O(n log n + n p) for p channels.

    >>> spread({"a": 3, "b": 2, "c": 2, "d": 1}, 2)
    {'a': 0, 'b': 1, 'c': 1, 'd': 0}
    """
    load = [0.0] * channels
    channel_of: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], natural_key(name))):
        channel_of[name] = min(range(channels), key=load.__getitem__)
        load[channel_of[name]] += sizes[name]
    return channel_of


def _index_by_name(rows: Sequence[Op], where: str) -> dict[str, int]:
    """Return each op's index by its name. Raises InputError for an empty or repeated name, and if there are no ops."""
    index: dict[str, int] = {}
    for position, op in enumerate(rows):
        if not op.name:
            raise InputError(f"{where}:ops[{position}].name", "is empty", "every op needs a name")
        if op.name in index:
            where_name = f"{where}:ops[{position}].name"
            raise InputError(
                where_name, f"duplicate name {op.name!r} (first at ops[{index[op.name]}])", "names must be unique"
            )
        index[op.name] = position
    if not rows:
        raise InputError(f"{where}:ops", "is empty", "a graph has at least one op")
    return index


def _input_indices(op: Op, index: Mapping[str, int], where: str) -> list[int]:
    """Return the indices of an op's inputs. Raises InputError for an unknown name and for a repeated one.

    ``index``: the ops' indices by name.
    """
    try:
        indices = [index[source] for source in op.inputs]
    except KeyError as error:
        raise InputError(where, f"unknown input {error.args[0]!r} of {op.name!r}", "name an op of this graph") from None
    if len(set(indices)) < len(indices):
        raise InputError(where, f"{op.name!r} names an input twice", "name each input once")
    return indices


def _check_op(op: Op, where: str) -> None:
    """Raise InputError for a number that is not finite and >= 0, a wrong kind of resource, and a recv op with inputs."""
    numbers = [("duration_s", op.duration_s), ("flops", op.flops), ("size_bytes", op.size_bytes)]
    numbers += [("written_bytes", op.written_bytes), *(("gemm", value) for value in op.gemm)]
    for name, value in numbers:
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise InputError(f"{where}.{name}", f"{op.name!r} has {value}", "it must be a finite number >= 0")
    resource_kind, _, number = op.resource.partition(":")
    expected_kind = "compute" if op.kind == "compute" else "channel"
    if resource_kind != expected_kind or not (number.isascii() and number.isdigit()):
        raise InputError(
            f"{where}.resource", f"{op.kind} op {op.name!r} is on {op.resource!r}", f"expected {expected_kind}:NUMBER"
        )
    if op.kind == "recv" and op.inputs:
        raise InputError(f"{where}.inputs", f"recv op {op.name!r} has inputs", "a recv op is a root")


def _check_structure(graph: Graph, where: str) -> None:
    """Raise InputError for a send op that is an input, a parameter of two recv ops, and a cycle."""
    consumed_sends = np.flatnonzero(graph.kind[graph.input_index] == SEND)
    if consumed_sends.size:
        send = graph.names[graph.input_index[consumed_sends[0]]]
        raise InputError(f"{where}:ops", f"send op {send!r} is used as an input", "a send op is a leaf")
    receiver_of: dict[str, str] = {}
    for position in graph.of_kind(RECV):
        parameter = graph.parameter[position]
        if parameter is not None and parameter in receiver_of:
            names = f"{receiver_of[parameter]!r} and {graph.names[position]!r}"
            raise InputError(f"{where}:ops", f"parameter {parameter!r} is received by {names}", "receive it once")
        if parameter is not None:
            receiver_of[parameter] = graph.names[position]
    try:
        graph.topological_order()
    except InputError as error:
        raise InputError(f"{where}:ops", error.problem, error.remedy) from None


def _show_cycle(graph: Graph, pending: Sequence[int]) -> str:
    """Return one cycle as text, ``a -> b -> a``; of more than 9 ops the middle is left out.

    ``pending``: by op, the number of its inputs that Kahn's algorithm could not order: above 0 for every op of a cycle.
    """
    import networkx as nx  # takes half a second, and only a broken graph needs it

    unordered = nx.DiGraph(
        (int(source), op) for op in np.flatnonzero(pending).tolist() for source in graph.inputs_of(op)
    )
    cycle = [graph.names[source] for source, _ in nx.find_cycle(unordered)]
    shown = [*cycle[:6], "...", *cycle[-2:]] if len(cycle) > 9 else cycle
    return " -> ".join([*shown, cycle[0]])


# Fields of an op that are written even if they are empty.
_ALWAYS = frozenset(["name", "kind", "resource", "duration_s", "flops", "size_bytes", "parameter", "inputs"])


class GraphDocument(Artifact):
    """The document of a graph, as in graph.json; :func:`from_document` makes a :class:`Graph` of it."""

    kind: Literal["ddltool.graph"] = "ddltool.graph"
    name: str
    mode: Mode = Field(description="training or inference")
    batch_size: AtLeastOne | None = Field(default=None, description="samples of the step; null: unknown")
    meta: dict[str, str | int | float | bool | None] = Field(default_factory=dict, description="where it comes from")
    ops: list[Op]
    recorded: Recorded | None = Field(default=None, description="of a script's step; null: of a model's alone")


def to_document(graph: Graph) -> dict[str, Any]:
    """Return the graph as a mapping for JSON; of an op, empty fields are left out that are not in ``_ALWAYS``."""
    names = [field.name for field in fields(Op)]
    op_rows = [{name: value for name in names if (value := getattr(op, name)) or name in _ALWAYS} for op in graph.ops()]
    for row in op_rows:
        row["inputs"] = list(row["inputs"])  # lists, because JSON has no tuples
        gemm = row.pop("gemm")
        if any(gemm):
            row["gemm"] = list(gemm)
    head: dict[str, Any] = {"kind": "ddltool.graph", "schema_version": 1, "name": graph.name, "mode": graph.mode}
    recorded = {} if graph.recorded is None else {"recorded": asdict(graph.recorded)}
    return {**head, "batch_size": graph.batch_size, "meta": dict(graph.meta), "ops": op_rows, **recorded}


def from_document(document: dict[str, Any], where: str = "graph") -> Graph:
    """Return the graph in a document. Raises InputError as :meth:`Graph.from_ops` does, and for a wrong ``recorded``."""
    checked = parse(document, GraphDocument, where)
    graph = Graph.from_ops(
        checked.name,
        checked.mode,
        checked.ops,
        batch_size=checked.batch_size,
        meta=checked.meta,
        recorded=checked.recorded,
        where=where,
    )
    if checked.recorded is not None:
        _check_recorded(graph, checked.recorded, f"{where}:recorded")
    return graph


def _check_recorded(graph: Graph, recorded: Recorded, where: str) -> None:
    """Raise InputError if ``recorded`` has lists of unequal length, places beyond the compute ops, or unknown ops.

    A place is the index of a compute op among the compute ops, at which a storage is made or freed or the host waits; -1 is
    before the first. A step without any compute op may name place 0, at which it ends.
    """
    lengths = {len(recorded.made), len(recorded.freed), len(recorded.storage_bytes), len(recorded.parts)}
    if len(lengths) > 1:
        raise InputError(where, "made, freed, storage_bytes and parts differ in length", "give one of each per storage")
    places = int((graph.kind == COMPUTE).sum())
    given = [*recorded.made, *(place for place in recorded.freed if place is not None), *recorded.waits]
    last_place = max(places - 1, 0)
    if not all(-1 <= place <= last_place for place in given):
        raise InputError(where, f"a place lies outside of {places} compute ops", f"write -1 to {last_place}")
    if unknown := recorded.groups.keys() - set(graph.names):
        raise InputError(f"{where}.groups", f"unknown op {min(unknown)!r}", "name an op of this graph")


def read_graph(path: str | Path) -> Graph:
    """Return the graph in a graph.json (or .json.gz). Raises InputError for an unreadable file and an invalid graph."""
    return from_document(read_document(path), str(path))


def write_graph(graph: Graph, path: str | Path) -> None:
    """Write graph.json atomically, gzip-compressed when the name ends in ``.gz``."""
    save(to_document(graph), path)


def assign_channels(graph: Graph, servers: int) -> Graph:
    """Return a copy with the transfers spread (:func:`spread`) over ``channel:0`` to ``channel:SERVERS-1``.

    A parameter's recv and send get the same channel. The assignment does not depend on the order of ops.
    O(p log p + p * servers) for p parameters.
    """
    bytes_by_parameter: dict[str, float] = {}
    transfers = np.flatnonzero(graph.kind != COMPUTE)
    # A parameter's recv and send should have one size; if they differ, the larger counts.
    for position in transfers:
        parameter = graph.parameter[position] or graph.names[position]
        bytes_by_parameter[parameter] = max(bytes_by_parameter.get(parameter, 0.0), float(graph.size_bytes[position]))
    channel_of = spread(bytes_by_parameter, servers)
    # Channels that nothing uses are left out; compute resources stay.
    compute_names = sorted(graph.resource_names[index] for index in np.unique(graph.resource[graph.kind == COMPUTE]))
    used_channels = sorted(set(channel_of.values()))
    names = tuple([f"channel:{channel}" for channel in used_channels] + compute_names)
    index_of_resource = {name: index for index, name in enumerate(names)}
    # 0 for channels that are left out: every op on one is a transfer, and gets its channel below.
    new_index = np.array([index_of_resource.get(name, 0) for name in graph.resource_names], dtype=graph.resource.dtype)
    resource = new_index[graph.resource]
    for op in transfers:
        resource[op] = index_of_resource[f"channel:{channel_of[graph.parameter[op] or graph.names[op]]}"]
    return replace(graph, resource=resource, resource_names=names)
