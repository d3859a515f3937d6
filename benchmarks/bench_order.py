"""TIC and TAC beside the straightforward TAC that recomputes every property for every pick, in the same run.

Graphs: the shipped traces of the zoo, and GPT-2 and Llama (32 layers) where transformers is installed. Prints seconds,
the ratio, and the efficiencies; then the growth on generated graphs. The straightforward version is left out where it
would take minutes (``--all`` runs it there too).
"""

from __future__ import annotations

import argparse
import resource
import time
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np
from generated import deep_network

from ddltool.analyzers.step.costs.timed_graph import timed_graph
from ddltool.analyzers.step.transfers.efficiency import compare
from ddltool.analyzers.step.transfers.order import tac, tic
from ddltool.analyzers.step.transfers.timeline import Simulator
from ddltool.dependencies import whole_times
from ddltool.errors import MissingExtra
from ddltool.graph import RECV, Graph, read_graph
from ddltool.shipped import folder

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
        p, m, impends = (np.array(column, dtype=np.int64) for column in columns)
        left = np.minimum(p[None, :], m[:, None])
        before = (left < left.T) | ((left == left.T) & (impends[:, None] < impends[None, :]))
        free = np.flatnonzero(~before.any(axis=0))
        candidates = [outstanding[place] for place in (free if len(free) else range(len(outstanding)))]
        order.append(min(candidates, key=lambda recv: (impending[recv], -compute[recv])))
        outstanding.remove(order[-1])
    return order


def seconds(call: Callable[[Graph], Any], graph: Graph) -> float:
    """Return CPU seconds of one call, as ``timeit`` takes them: without a garbage collection that happens to fall in."""
    return timeit.timeit(lambda: call(graph), timer=time.process_time, number=1)


def graphs() -> list[Graph]:
    """Return traced graphs, and one of the size that the peers' figures were taken on."""
    shipped = [
        read_graph(folder() / "graphs" / f"{name}-training.graph.json.gz")
        for name in ("inception_v1", "resnet50_v1", "resnet101_v2")
    ]
    shipped.append(deep_network(160, 1500))
    try:
        return shipped + [timed_graph(f"transformers:{name}") for name in ("gpt2", "llama")]
    except MissingExtra:
        return shipped


def growth() -> None:
    """Print CPU seconds and memory for generated graphs of growing size."""
    print("\ngenerated    recvs     ops   TIC s   TAC s  peak MiB   simulated events/s")
    for recvs, ops in ((30, 1_000), (300, 10_000), (1_500, 50_000), (3_000, 100_000)):
        graph = deep_network(recvs, ops, branches=3)
        fast, ordered = seconds(tic, graph), seconds(tac, graph)
        simulator, order = Simulator(graph), tac(graph).priority
        started = time.process_time()
        simulator.run(order, 0)
        rate = len(graph) / (time.process_time() - started)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{'':10s} {recvs:7d} {len(graph):7d}  {fast:.3f}   {ordered:.3f}  {peak:8.0f}   {rate:12,.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="the straightforward version on every graph: minutes")
    limit = 10**9 if parser.parse_args().all else STRAIGHTFORWARD_LIMIT
    print(f"{'graph':14s} recvs   ops   TIC s   TAC s  straightforward  ratio   E random    TIC    TAC")
    for graph in graphs():
        fast = seconds(tac, graph)
        ordered = min(seconds(tac, graph) for _ in range(3))
        slow = seconds(straightforward, graph) if len(graph) <= limit else None
        results = compare(graph, samples=10).schedules
        values = "  ".join(f"{(results[name].efficiency or 0):.3f}" for name in ("random", "tic", "tac"))
        shown = f"{slow:12.2f} {slow / ordered:8.0f}x" if slow is not None else f"{'-':>12s} {'-':>9s}"
        recvs = len(graph.of_kind(RECV))
        print(
            f"{graph.name:14s} {recvs:5d} {len(graph):5d}  {fast:.3f}   {ordered:.3f}  {shown}     {values}", flush=True
        )
    growth()
