"""Graph: what is refused, and that what is accepted comes back unchanged."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.errors import InputError
from ddltool.graph import RECV, Graph, Op, from_document, natural_key, read_graph, to_document, write_graph


def recv(name: str, **fields: object) -> Op:
    return Op(**{"name": name, "kind": "recv", "resource": "channel:0", "duration_s": 1.0, "parameter": name, **fields})  # type: ignore[arg-type]


def compute(name: str, *inputs: str, duration_s: float | None = 1.0) -> Op:
    return Op(name=name, kind="compute", inputs=inputs, duration_s=duration_s)


def make(*ops: Op) -> Graph:
    return Graph.from_ops("g", "training", ops)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ((recv("a"), recv("a", parameter="b")), r"graph:ops\[1\].name: duplicate name 'a' \(first at ops\[0\]\)"),
        ((compute("b", "x"),), r"graph:ops\[0\].inputs: unknown input 'x' of 'b'"),
        ((compute("b", duration_s=-1.0),), r"graph:ops\[0\].duration_s: 'b' has -1.0; it must be a finite number >= 0"),
        ((compute("b", duration_s=math.nan),), r"graph:ops\[0\].duration_s: 'b' has nan"),
        ((compute("b", duration_s=math.inf),), r"graph:ops\[0\].duration_s: 'b' has inf"),
        ((recv("a", size_bytes=-4.0),), r"graph:ops\[0\].size_bytes: 'a' has -4.0"),
        ((recv("a", resource="compute:0"),), r"resource: recv op 'a' is on 'compute:0'; expected channel:NUMBER"),
        ((compute("c"), recv("a", inputs=("c",))), r"recv op 'a' has inputs; a recv op is a root"),
        ((recv("a"), recv("b", parameter="a")), r"parameter 'a' is received by 'a' and 'b'"),
        ((compute("c"), compute("d", "c", "c")), r"'d' names an input twice"),
        ((), r"graph:ops: is empty"),
        ((compute(""),), r"graph:ops\[0\].name: is empty"),
    ],
)
def test_refused(ops: tuple[Op, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(*ops)


def test_a_send_is_a_leaf() -> None:
    send = Op(name="s", kind="send", resource="channel:0", inputs=("a",))
    with pytest.raises(InputError, match="send op 's' is used as an input; a send op is a leaf"):
        make(recv("a"), send, compute("c", "s"))


def test_a_cycle_is_reported_with_its_edges() -> None:
    ops = (recv("r"), compute("a", "r", "c"), compute("b", "a"), compute("c", "b"), compute("d", "c"))
    with pytest.raises(InputError, match="form a cycle: ") as caught:
        make(*ops)
    cycle = caught.value.problem.partition("cycle: ")[2].split(" -> ")
    edges = {(source, op.name) for op in ops for source in op.inputs}
    assert cycle[0] == cycle[-1]
    assert set(itertools.pairwise(cycle)) <= edges
    assert set(cycle) == {"a", "b", "c"}


def test_a_long_cycle_stays_on_one_readable_line() -> None:
    ops = [compute(f"op{i}", f"op{(i - 1) % 500}") for i in range(500)]
    with pytest.raises(InputError, match=r"-> \.\.\. ->") as caught:
        make(*ops)
    assert len(str(caught.value)) < 300


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    count = draw(st.integers(1, 12))
    names = draw(st.lists(st.text(min_size=1, max_size=6), min_size=count, max_size=count, unique=True))
    times = st.one_of(st.none(), st.floats(0, 1e6, allow_nan=False))
    ops = []
    for position, name in enumerate(names):
        sources = [op.name for op in ops if op.kind != "send"]
        kind = draw(st.sampled_from(["recv", "compute", "send"]))
        inputs = draw(st.lists(st.sampled_from(sources), unique=True)) if sources and kind != "recv" else []
        resource = f"{'compute' if kind == 'compute' else 'channel'}:{draw(st.integers(0, 2))}"
        parameter = f"p{position}" if kind != "compute" else None
        size = draw(st.floats(0, 1e12))
        estimate = draw(st.sampled_from([None, "rule", "default", "free", "file", "measured"]))
        ops.append(
            Op(
                name=name,
                kind=kind,
                resource=resource,
                duration_s=draw(times),
                flops=size,
                size_bytes=size,
                parameter=parameter,
                inputs=tuple(inputs),
                op_type="x",
                estimate=estimate,
            )
        )
    meta = draw(
        st.dictionaries(st.text(max_size=4), st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.text()))
    )
    return Graph.from_ops("g", "training", ops, batch_size=draw(st.one_of(st.none(), st.integers(1, 99))), meta=meta)


@given(graphs())
def test_round_trip_through_json(graph: Graph) -> None:
    text = json.dumps(to_document(graph), allow_nan=False)
    assert from_document(json.loads(text)) == graph


@given(graphs())
@settings(max_examples=15)
def test_round_trip_through_files(tmp_path_factory: pytest.TempPathFactory, graph: Graph) -> None:
    folder = tmp_path_factory.mktemp("g")
    for name in ("g.json", "g.json.gz"):
        write_graph(graph, folder / name)
        assert read_graph(folder / name) == graph


@given(graphs())
def test_topological_order_and_successors(graph: Graph) -> None:
    order = graph.topological_order()
    place = {int(op): position for position, op in enumerate(order)}
    assert sorted(place) == list(range(len(graph)))
    for op in range(len(graph)):
        assert all(place[int(source)] < place[op] for source in graph.inputs_of(op))
    pointers, targets = graph.successors()
    edges = {(op, int(t)) for op in range(len(graph)) for t in targets[pointers[op] : pointers[op + 1]]}
    assert edges == {(int(s), op) for op in range(len(graph)) for s in graph.inputs_of(op)}


def test_natural_order() -> None:
    names = ["layer10", "layer2", "layer", "a1b2", "a1b10"]
    assert sorted(names, key=natural_key) == ["a1b2", "a1b10", "layer", "layer2", "layer10"]


@given(st.text(), st.text())
def test_natural_order_is_total(left: str, right: str) -> None:
    assert (natural_key(left) == natural_key(right)) == (left == right)


def test_durations_are_checked() -> None:
    graph = make(recv("a"), compute("b", "a"))
    assert graph.with_durations(np.array([2.0, 0.0]), ("rule", "free")).duration_s.tolist() == [2.0, 0.0]
    with pytest.raises(InputError, match="b has nan; seconds must be >= 0 and finite"):
        graph.with_durations(np.array([2.0, np.nan]), ("rule", "rule"))
    with pytest.raises(InputError, match=r"shape \(1,\) for 2 ops"):
        graph.with_durations(np.array([2.0]), ("rule",))


def test_views() -> None:
    graph = make(recv("a", size_bytes=8.0), compute("b", "a", duration_s=None))
    assert graph.parameter_bytes == 8.0
    assert graph.of_kind(RECV).tolist() == [0]
    assert not graph.timed


def test_fifty_thousand_ops_fit(tmp_path: Path) -> None:
    """Linear, not quadratic: 50,000 ops in a chain are built, ordered and written."""
    count = 50_000
    graph = make(*(compute(f"op{i}", *([f"op{i - 1}"] if i else [])) for i in range(count)))
    assert graph.topological_order().tolist() == list(range(count))
    write_graph(graph, tmp_path / "g.json.gz")
    assert len(read_graph(tmp_path / "g.json.gz")) == count
