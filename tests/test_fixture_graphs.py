"""The shipped graphs: valid, ordered and simulated by the rules, and equal to a fresh trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddltool.analyzers.communication.efficiency import bounds, compare
from ddltool.analyzers.communication.order import tac, tic
from ddltool.analyzers.costs.model import coverage
from ddltool.analyzers.loading.timed_graph import timed_graph
from ddltool.fixtures.loading import graph_files
from ddltool.fixtures.zoo import ZOO
from ddltool.graph import COMPUTE, RECV, SEND, Graph, Mode, read_graph
from tests.toys import TOYS

FILES = graph_files()
STEMS = [path.name.removesuffix(".graph.json.gz") for path in FILES]


def load(stem: str) -> Graph:
    return read_graph(FILES[STEMS.index(stem)])


def test_all_are_there() -> None:
    wanted = {f"{name}-{mode}" for name in ZOO for mode in ("inference", "training")}
    others = {f"adverse-{name}" for name in ("wide_join", "many_servers", "sends_compete")}
    assert set(STEMS) == wanted | others | {f"toy-{name}" for name in TOYS}


@pytest.mark.parametrize("name", TOYS)
def test_the_toys_are_the_papers(name: str) -> None:
    assert list(load(f"toy-{name}").ops()) == list(TOYS[name]().ops())


@pytest.mark.parametrize("path", FILES, ids=STEMS)
def test_orders_and_timelines(path: Path) -> None:
    graph = read_graph(path)
    recvs = {graph.names[op] for op in graph.of_kind(RECV)}
    for schedule in (tic(graph), tac(graph)):
        assert set(schedule.order) == set(schedule.priority) == recvs
        numbers = [schedule.priority[name] for name in schedule.order]
        assert numbers == sorted(numbers)
    comparison = compare(graph, samples=2)
    limits = bounds(graph)
    for result in comparison.schedules.values():
        assert (
            limits.lower_s * (1 - 1e-9) <= result.makespan_min_s <= result.makespan_max_s <= limits.upper_s * (1 + 1e-9)
        )
    if not path.name.startswith("adverse"):  # those are shipped because TAC is wrong there
        assert comparison.schedules["tac"].makespan_s <= comparison.schedules["random"].makespan_s * 1.001


@pytest.mark.parametrize(
    "path", [path for path in FILES if not path.name.startswith(("toy", "adverse"))], ids=lambda path: path.name
)
def test_zoo_graphs_are_whole(path: Path) -> None:
    graph = read_graph(path)
    entry = ZOO[path.name.removesuffix(".graph.json.gz").rpartition("-")[0]]
    assert graph.batch_size == entry.batch_size
    if entry.published is not None:
        assert len(graph.of_kind(RECV)) == entry.published.parameters
        assert graph.parameter_bytes / 2**20 == pytest.approx(entry.published.parameter_mib, rel=0.01)
    sends = 0 if graph.mode == "inference" else len(graph.of_kind(RECV))
    if entry.name == "inception_v3" and graph.mode == "inference":
        unused = {graph.parameter[op] for op in graph.of_kind(RECV)} - consumed(graph)
        assert all(name is not None and name.startswith("auxiliary") for name in unused)
    assert len(graph.of_kind(SEND)) == sends
    assert coverage(graph).rule_time > 0.99


def consumed(graph: Graph) -> set[str | None]:
    return {graph.parameter[source] for op in graph.of_kind(COMPUTE) for source in graph.inputs_of(int(op))}


# One of each family; all of them take three times as long (`make slow`).
FAMILIES = ("alexnet_v2", "inception_v2", "resnet50_v2", "resnet32", "gpt_small")


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    "name", [name if name in FAMILIES else pytest.param(name, marks=pytest.mark.slow) for name in ZOO]
)
def test_a_fresh_trace_is_the_shipped_graph(name: str, mode: Mode) -> None:
    """If this fails after an intended change in tracing, run `make fixtures` and judge the diff."""
    fresh, shipped = timed_graph(f"zoo:{name}", mode=mode), load(f"{name}-{mode}")  # type: ignore[arg-type]
    assert fresh.names == shipped.names
    assert fresh == shipped
