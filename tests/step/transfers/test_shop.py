"""The improved order: never worse than TAC, and the optimum where TAC misses it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.step.transfers.efficiency import improve, solve_exact
from ddltool.analyzers.step.transfers.order import tac
from ddltool.analyzers.step.transfers.timeline import Simulator
from ddltool.graph import RECV, Graph, read_graph
from ddltool.shipped import folder
from tests.helpers.strategies import timed_graphs
from tests.step.transfers.test_exact import training_graphs


def mean(graph: Graph, priority: object, samples: int = 8) -> float:
    simulator = Simulator(graph)
    return sum(simulator.run(priority, seed).makespan_s for seed in range(samples)) / samples  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "from_tac", "best", "improved"),
    [("wide_join", 22.0, 14.0, 14.0), ("many_servers", 18.0, 13.0, 13.0), ("sends_compete", 18.0, 12.0, 12.0)],
)
def test_where_tac_is_not_optimal(name: str, from_tac: float, best: float, improved: float) -> None:
    graph = read_graph(folder() / "graphs" / f"adverse-{name}.graph.json.gz")
    assert mean(graph, tac(graph).priority) == pytest.approx(from_tac)
    found = solve_exact(graph)
    assert (found.status, found.makespan_s) == ("optimal", pytest.approx(best))
    mended = improve(graph)
    assert mean(graph, mended.priority) == pytest.approx(improved)
    assert improve(graph) == mended


@given(st.one_of(timed_graphs(channels=2), training_graphs(channels=2)))
@settings(max_examples=80, deadline=None)
def test_never_worse_than_tac_and_never_better_than_exact(graph: Graph) -> None:
    found = improve(graph)
    ours = mean(graph, found.priority)
    assert ours <= mean(graph, tac(graph).priority) * (1 + 1e-12)
    best = solve_exact(graph, workers=1).makespan_s
    assert ours >= best * (1 - 2e-6)
    assert sorted(found.order) == sorted(graph.names[op] for op in graph.of_kind(RECV))
