"""``ddltool trace SOURCE --determinism``: which level of determinism a model allows, and what stands in the way."""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddltool.analyzers.placement.determinism import OpFinding, Scan
    from ddltool.graph import Graph, Mode

_MODULES_SHOWN = 3
_VERDICTS = {
    "none": "not even D0: an op has no deterministic kernel",
    "unknown": "not known: an op is in no table",
    "D1": "D1: equal bits on any number of devices of one type; not D2",
    "D2": "D2-eligible: equal bits on mixed device types are possible",
}


def scan_source(
    source: str, mode: Mode | None = None, batch_size: int | None = None, bindings: Mapping[str, int] | None = None
) -> tuple[Graph, Scan]:
    """Return the graph of any SOURCE and what its ops allow; torch sources are looked at with their data types.

    Raises InputError as :func:`ddltool.analyzers.loading.sources.load_graph`.
    """
    from ddltool.analyzers.loading.sources import is_graph_file, is_onnx_file, load_graph, resolve_step
    from ddltool.analyzers.placement.determinism import op_facts, scan

    if is_graph_file(source) or is_onnx_file(source):
        graph = load_graph(source, mode, batch_size, bindings)
        return graph, scan(graph)
    from ddltool.analyzers.loading.sources import demand_whole
    from ddltool.analyzers.tracing.torch_adapter import trace_step

    with contextlib.redirect_stdout(sys.stderr):  # what the user's forward prints must not mix with the result
        traced = trace_step(lambda: resolve_step(source), mode=mode or "training", batch_size=batch_size)
    return demand_whole(traced.graph, source), scan(traced.graph, op_facts(traced))


def determinism(
    source: str,
    *,
    mode: Mode | None = None,
    batch_size: int | None = None,
    bindings: Mapping[str, int] | None = None,
    as_json: bool = False,
) -> None:
    """Print the levels of a model's ops; the body of ``ddltool trace SOURCE --determinism``."""
    from ddltool.commands.output import out, print_json, progress

    with progress(f"tracing {source}"):
        graph, found = scan_source(source, mode, batch_size, bindings)
    if as_json:
        print_json(as_document(graph, found))
        return
    console = out()
    console.print(f"{graph.name} ({graph.mode}): {_VERDICTS[found.level]}", soft_wrap=True)
    for reason in found.reasons:
        console.print(f"  {reason}", soft_wrap=True)
    if found.ops:
        console.print(_table(found))
        _print_classes(found)
    console.print(f"{found.exact} other ops depend on their inputs alone.")
    if graph.mode == "inference":
        console.print("A forward graph: what the backward pass would add is not seen.")


def as_document(graph: Graph, found: Scan) -> dict[str, Any]:
    """Return a scan as JSON."""
    from ddltool.analyzers.placement.determinism_ops import TORCH_VERSION

    return {
        "kind": "ddltool.determinism",
        "schema_version": 1,
        "graph": {"name": graph.name, "mode": graph.mode},
        "determinism": {
            "level": found.level,
            "d2_eligible": found.d2_eligible,
            "reasons": list(found.reasons),
            "settings": list(found.settings),
            "exact_ops": found.exact,
            "tables_of_torch": TORCH_VERSION,
            "ops": [_op_document(finding) for finding in found.ops],
        },
    }


def _op_document(finding: OpFinding) -> dict[str, Any]:
    return {
        "op": finding.op,
        "class": finding.kernels.name,
        "level": finding.kernels.level,
        "count": finding.count,
        "flops": finding.flops,
        "modules": list(finding.modules),
        "reason": finding.kernels.reason,
        "setting": finding.kernels.setting,
    }


def _table(found: Scan) -> Any:
    from ddltool.commands.output import table

    rows = [
        (
            finding.op or "(no type)",
            finding.kernels.name,
            finding.kernels.level,
            f"{finding.count:>3}",
            _modules(finding),
        )
        for finding in found.ops
    ]
    columns = ("op", "kernels", "up to", "n", "modules")
    return table("Ops whose bits depend on more than their inputs", columns, rows, text_columns=5)


def _modules(finding: OpFinding) -> str:
    """Return the last two parts of the modules' paths, without repeats, cut to a few."""
    names = list(dict.fromkeys(".".join(path.split(".")[-2:]) for path in finding.modules))
    shown = ", ".join(names[:_MODULES_SHOWN])
    more = len(names) - _MODULES_SHOWN
    return f"{shown}, +{more}" if more > 0 else shown


def _print_classes(found: Scan) -> None:
    """Print once per class what its bits depend on and what to set."""
    from ddltool.commands.output import out

    counts: dict[str, int] = defaultdict(int)
    for finding in found.ops:
        counts[finding.kernels.name] += finding.count
    seen = {finding.kernels.name: finding.kernels for finding in found.ops}
    for name, kernels in seen.items():
        out().print(f"{name} ({counts[name]}): {kernels.reason}", soft_wrap=True)
        if kernels.setting:
            out().print(f"  set: {kernels.setting}", soft_wrap=True)
