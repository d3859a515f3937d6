"""graph.json: the Graph as a document (kind ``ddltool.graph``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ddltool.artifacts import Artifact, Record, parse, read_document, save
from ddltool.errors import InputError
from ddltool.graph import NO_GEMM, Estimate, Graph, Mode, Op, OpKind

# Products of two sums are still numbers.
_LARGEST_SUM = 1e150


class OpRecord(Record):
    """One op of graph.json."""

    name: str = Field(description="unique within the graph")
    kind: OpKind
    resource: str = Field(description="compute:NUMBER, or channel:NUMBER for recv and send")
    duration_s: float | None = Field(default=None, description="seconds on its resource; null: not estimated")
    flops: float = Field(default=0.0, description="floating-point operations (a multiply-add counts two)")
    size_bytes: float = Field(default=0.0, description="bytes transferred (recv, send) or read and written (compute)")
    parameter: str | None = Field(default=None, description="the parameter that a recv or send carries")
    inputs: list[str] = Field(default_factory=list, description="names of the ops whose results it needs")
    op_type: str = Field(default="", description="the framework's name of the op")
    estimate: Estimate | None = Field(default=None, description="where duration_s comes from")
    written_bytes: float = Field(default=0.0, description="the part of a compute op's size_bytes that it writes")
    dtype: str = Field(default="", description="torch's name of the type that it works in; empty: meta.dtype")
    gemm: tuple[float, float, float, float] = Field(
        default=NO_GEMM,
        strict=False,
        description="count, m, n, k of the matrix products behind it (of the forward pass for a backward op); zeros: none",
    )


class GraphDocument(Artifact):
    """The document of a graph; :class:`ddltool.graph.Graph` is the same thing checked and in arrays."""

    KIND: ClassVar[str] = "ddltool.graph"
    kind: Literal["ddltool.graph"] = "ddltool.graph"
    name: str
    mode: Mode
    batch_size: int | None = Field(default=None, ge=1)
    meta: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    ops: list[OpRecord]


def to_document(graph: Graph) -> dict[str, Any]:
    """Return the graph as a JSON-ready mapping; fields that say nothing are left out of the ops."""
    rows: list[dict[str, Any]] = []
    for op in graph.ops():
        row: dict[str, Any] = {
            "name": op.name,
            "kind": op.kind,
            "resource": op.resource,
            "duration_s": op.duration_s,
            "flops": op.flops,
            "size_bytes": op.size_bytes,
            "parameter": op.parameter,
            "inputs": list(op.inputs),
        }
        if op.op_type:
            row["op_type"] = op.op_type
        if op.estimate is not None:
            row["estimate"] = op.estimate
        if op.written_bytes:
            row["written_bytes"] = op.written_bytes
        if op.dtype:
            row["dtype"] = op.dtype
        if any(op.gemm):
            row["gemm"] = list(op.gemm)
        rows.append(row)
    head: dict[str, Any] = {"kind": GraphDocument.KIND, "schema_version": 1, "name": graph.name, "mode": graph.mode}
    return {**head, "batch_size": graph.batch_size, "meta": dict(graph.meta), "ops": rows}


def from_document(document: dict[str, Any], where: str = "graph") -> Graph:
    """Return the graph in a document. Raises InputError; see :meth:`Graph.from_ops` for what is refused."""
    checked = parse(document, GraphDocument, where)
    ops = (
        Op(
            name=row.name,
            kind=row.kind,
            resource=row.resource,
            duration_s=row.duration_s,
            flops=row.flops,
            size_bytes=row.size_bytes,
            parameter=row.parameter,
            inputs=tuple(row.inputs),
            op_type=row.op_type,
            estimate=row.estimate,
            written_bytes=row.written_bytes,
            dtype=row.dtype,
            gemm=row.gemm,
        )
        for row in checked.ops
    )
    made = Graph.from_ops(
        checked.name, checked.mode, ops, batch_size=checked.batch_size, meta=checked.meta, where=where
    )
    for name in ("duration_s", "flops", "size_bytes"):
        _check_sum(getattr(made, name), f"{where}:ops", name)
    return made


def _check_sum(values: NDArray[np.float64], where: str, name: str) -> None:
    """Raise InputError at the op from which on the sum, without NaN (not estimated), is too large to compute with."""
    with np.errstate(over="ignore"):
        large = np.flatnonzero(np.nancumsum(values) > _LARGEST_SUM)
    if large.size:
        at, value = f"{where}[{large[0]}].{name}", values[large[0]]
        raise InputError(at, f"is {value:g}, the sum up to it more than {_LARGEST_SUM:g}", "give ordinary numbers")


def read_graph(path: str | Path) -> Graph:
    """Read and validate graph.json (or .json.gz)."""
    return from_document(read_document(path), str(path))


def write_graph(graph: Graph, path: str | Path) -> None:
    """Write graph.json atomically, gzip-compressed when the name ends in ``.gz``."""
    save(to_document(graph), path)
