"""graph.json: the Graph as a document (kind ``ddltool.graph``)."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ddltool.artifacts import Artifact, parse, read_document, save
from ddltool.errors import InputError
from ddltool.graph import Graph, Mode, Op

# Products of two sums are still numbers.
_LARGEST_SUM = 1e150
_ALWAYS = frozenset(["name", "kind", "resource", "duration_s", "flops", "size_bytes", "parameter", "inputs"])


class GraphDocument(Artifact):
    """The document of a graph; :class:`ddltool.graph.Graph` is the same thing checked and in arrays."""

    kind: Literal["ddltool.graph"] = "ddltool.graph"
    name: str
    mode: Mode = Field(description="training or inference")
    batch_size: int | None = Field(default=None, ge=1, description="samples of the step; null: unknown")
    meta: dict[str, str | int | float | bool | None] = Field(default_factory=dict, description="where it comes from")
    ops: list[Op]


def to_document(graph: Graph) -> dict[str, Any]:
    """Return the graph as a JSON-ready mapping; fields that say nothing are left out of the ops."""
    names = [field.name for field in fields(Op)]
    rows = [{name: value for name in names if (value := getattr(op, name)) or name in _ALWAYS} for op in graph.ops()]
    for row in rows:
        row["inputs"] = list(row["inputs"])
        gemm = row.pop("gemm")
        if any(gemm):
            row["gemm"] = list(gemm)
    head: dict[str, Any] = {"kind": "ddltool.graph", "schema_version": 1, "name": graph.name, "mode": graph.mode}
    return {**head, "batch_size": graph.batch_size, "meta": dict(graph.meta), "ops": rows}


def from_document(document: dict[str, Any], where: str = "graph") -> Graph:
    """Return the graph in a document. Raises InputError; see :meth:`Graph.from_ops` for what is refused."""
    checked = parse(document, GraphDocument, where)
    made = Graph.from_ops(
        checked.name, checked.mode, checked.ops, batch_size=checked.batch_size, meta=checked.meta, where=where
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
