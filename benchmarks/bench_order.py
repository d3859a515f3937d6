"""TIC and TAC beside the straightforward TAC that recomputes every property for every pick, in the same run.

Graphs: the shipped traces of the zoo, and GPT-2 and Llama (32 layers) where transformers is installed. Prints seconds,
the ratio, and the efficiencies. The straightforward version is left out where it would take minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ddltool.analyzers.communication.efficiency import compare
from ddltool.analyzers.communication.order import precedes, tac, tic
from ddltool.analyzers.communication.properties import whole_times
from ddltool.commands.trace import timed_graph
from ddltool.fixtures.loading import folder
from ddltool.graph import RECV, Graph
from ddltool.graph_io import read_graph

STRAIGHTFORWARD_LIMIT = 2500  # ops


def straightforward(graph: Graph) -> list[str]:
    """TAC with sets per op and Algorithm 1 run anew for every pick."""
    times = dict(zip(graph.names, whole_times(graph).tolist(), strict=True))
    dep: dict[str, set[str]] = {}
    for position in graph.topological_order():
        op = graph.op(int(position))
        dep[op.name] = {op.name} if op.kind == "recv" else set().union(*(dep[source] for source in op.inputs))
    others = [op.name for op in graph.ops() if op.kind != "recv"]
    outstanding = [graph.names[op] for op in graph.of_kind(RECV)]
    order = []
    while outstanding:
        left = set(outstanding)
        compute, impending = dict.fromkeys(left, 0), dict.fromkeys(left, 2**62)
        for name in others:
            blocking = dep[name] & left
            load = sum(times[recv] for recv in blocking)
            if len(blocking) == 1:
                compute[next(iter(blocking))] += times[name]
            elif blocking:
                for recv in blocking:
                    impending[recv] = min(impending[recv], load)
        columns = (
            [compute[r] for r in outstanding],
            [times[r] for r in outstanding],
            [impending[r] for r in outstanding],
        )
        before = precedes(*(np.array(column, dtype=np.int64) for column in columns))
        free = np.flatnonzero(~before.any(axis=0))
        candidates = [outstanding[place] for place in (free if len(free) else range(len(outstanding)))]
        order.append(min(candidates, key=lambda recv: (impending[recv], -compute[recv])))
        outstanding.remove(order[-1])
    return order


def seconds(call: Callable[[Graph], Any], graph: Graph) -> float:
    started = time.perf_counter()
    call(graph)
    return time.perf_counter() - started


def graphs() -> list[Graph]:
    shipped = [
        read_graph(folder() / "graphs" / f"{name}-training.graph.json.gz")
        for name in ("inception_v1", "resnet50_v1", "resnet101_v2")
    ]
    try:
        return shipped + [timed_graph(f"transformers:{name}") for name in ("gpt2", "llama")]
    except ImportError:
        return shipped


if __name__ == "__main__":
    print(f"{'graph':14s} recvs   ops   TIC s   TAC s  straightforward  ratio   E random    TIC    TAC")
    for graph in graphs():
        fast = seconds(tac, graph)
        slow = seconds(straightforward, graph) if len(graph) <= STRAIGHTFORWARD_LIMIT else None
        results = compare(graph, samples=10).results()
        values = "  ".join(f"{(results[name].efficiency or 0):.3f}" for name in ("random", "tic", "tac"))
        shown = f"{slow:12.2f} {slow / fast:8.0f}x" if slow is not None else f"{'-':>12s} {'-':>9s}"
        recvs = len(graph.of_kind(RECV))
        print(
            f"{graph.name:14s} {recvs:5d} {len(graph):5d}  {seconds(tic, graph):.3f}   {fast:.3f}  {shown}     {values}"
        )
