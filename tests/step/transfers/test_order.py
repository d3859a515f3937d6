"""TIC and TAC: the paper's toy graphs, a straightforward implementation as oracle, and order-independence.
The improved order: never worse than TAC, and the optimum where TAC misses it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddltool.analyzers.step.transfers.efficiency import bounds, improve, solve_exact
from ddltool.analyzers.step.transfers.order import Properties, first_recv, tac, tic, unpreceded
from ddltool.analyzers.step.transfers.timeline import Simulator, simulate
from ddltool.dependencies import find_dependencies, whole_times
from ddltool.errors import InputError
from ddltool.graph import RECV, Graph, Op, read_graph
from ddltool.shipped import folder
from tests.helpers.strategies import timed_graphs
from tests.helpers.toys import figure1, figure4a, figure4b
from tests.step.transfers.test_efficiency import training_graphs


def straightforward(
    graph: Graph, outstanding: set[str], times: Mapping[str, Fraction]
) -> dict[str, tuple[object, ...]]:
    """Algorithm 1 word for word, with sets and fractions: (P, M, M+) of every outstanding recv."""
    dep: dict[str, set[str]] = {}
    for position in graph.topological_order():
        op = graph.op(int(position))
        dep[op.name] = {op.name} if op.kind == "recv" else set().union(*(dep[source] for source in op.inputs))
    load = {op.name: sum((times[r] for r in dep[op.name] & outstanding), Fraction(0)) for op in graph.ops()}
    compute = dict.fromkeys(outstanding, Fraction(0))
    impending: dict[str, object] = dict.fromkeys(outstanding, math.inf)
    for op in graph.ops():
        if op.kind == "recv":
            continue
        blocking = dep[op.name] & outstanding
        if len(blocking) == 1:
            compute[next(iter(blocking))] += times[op.name]
        if len(blocking) > 1:
            for recv in blocking:
                impending[recv] = min(impending[recv], load[op.name])  # type: ignore[type-var]
    return {recv: (compute[recv], load[recv], impending[recv]) for recv in outstanding}


def precedes(compute: np.ndarray, transfer: np.ndarray, impending: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
    """The matrix "row strictly precedes column" of Equation 6 with M+ on equality, from P, M and M+ (r,)."""
    left = np.minimum(compute[None, :], transfer[:, None])  # min(P_B, M_A), A the row and B the column
    right = left.T  # min(P_A, M_B)
    before: np.ndarray = (left < right) | ((left == right) & (impending[:, None] < impending[None, :]))  # type: ignore[type-arg]
    return before


def exact_times(graph: Graph) -> dict[str, Fraction]:
    """The same whole picoseconds that the implementation compares, so that ties are the same ties."""
    return {name: Fraction(int(t)) for name, t in zip(graph.names, whole_times(graph), strict=True)}


def test_figure_1() -> None:
    """recv1 first; M+ is the same for both, so TIC alone cannot tell them apart."""
    assert tac(figure1()).order == ("recv1", "recv2")
    assert tic(figure1()).priority == {"recv1": 0, "recv2": 0}
    assert simulate(figure1(), tac(figure1()).priority, 0).makespan_s == pytest.approx(3.0)
    reverse = {"recv1": 1, "recv2": 0}
    assert simulate(figure1(), reverse, 0).makespan_s == pytest.approx(4.0)


def test_figure_4a_is_johnsons_rule() -> None:
    """For every small choice of times the picked order has the shorter of the two makespans of case 1."""
    values = (1.0, 2.0, 3.0)
    for m_a, p_a, m_b, p_b in itertools.product(values, repeat=4):
        a_first = m_a + max(p_a, m_b) + p_b
        b_first = m_b + max(p_b, m_a) + p_a
        graph = figure4a(m_a, p_a, m_b, p_b)
        order = tac(graph).order
        assert {order[0]} <= {
            name for name, span in (("recvA", a_first), ("recvB", b_first)) if span <= min(a_first, b_first)
        }
        assert simulate(graph, tac(graph).priority, 0).makespan_s == pytest.approx(min(a_first, b_first))


def test_algorithm_3_as_printed_is_the_reverse() -> None:
    """A: short transfer, long compute; B: the other way round. Equation 6 saves 1 of 5 seconds, the listing would not."""
    graph = figure4a(1.0, 2.0, 2.0, 1.0)
    compute, transfer = {"A": 2, "B": 1}, {"A": 1, "B": 2}
    printed_a, printed_b = min(compute["A"], transfer["B"]), min(compute["B"], transfer["A"])
    assert not printed_a < printed_b  # the listing returns A < B and so puts B first
    assert tac(graph).order == ("recvA", "recvB")
    assert simulate(graph, {"recvA": 0, "recvB": 1}, 0).makespan_s == pytest.approx(4.0)
    assert simulate(graph, {"recvA": 1, "recvB": 0}, 0).makespan_s == pytest.approx(5.0)


def test_figure_4b() -> None:
    assert tac(figure4b()).order == ("recvA", "recvB", "recvC", "recvD")
    assert tic(figure4b()).priority == {"recvA": 0, "recvB": 0, "recvC": 1, "recvD": 2}


@given(timed_graphs())
def test_properties_equal_algorithm_1_at_every_step(graph: Graph) -> None:
    times = exact_times(graph)
    dependencies = find_dependencies(graph)
    properties = Properties(dependencies, whole_times(graph))
    names = [graph.names[op] for op in dependencies.recvs]
    outstanding = set(names)
    order = list(range(len(names)))
    Random(0).shuffle(order)
    for recv in order:
        wanted = straightforward(graph, outstanding, times)
        left = [place for place, name in enumerate(names) if name in outstanding]
        for place in left:
            assert (properties.compute[place], properties.recv_time[place]) == wanted[names[place]][:2]
        for some in (left, *itertools.combinations(left, 2)):  # M+ by what is asked of it: who has the least
            least = min(wanted[names[place]][2] for place in some)  # type: ignore[type-var]
            found = properties.least_impending(np.isin(np.arange(len(names)), some))
            assert np.flatnonzero(found).tolist() == [p for p in some if wanted[names[p]][2] == least]
        properties.complete(recv)
        outstanding.remove(names[recv])


@given(timed_graphs())
def test_every_pick_of_tac_is_one_that_no_other_precedes(graph: Graph) -> None:
    """Equation 6 by hand on the straightforward properties: the picked recv is preceded by nobody, or by its circle."""
    outstanding = {graph.names[op] for op in graph.of_kind(RECV)}
    times = exact_times(graph)
    for picked in tac(graph).order:
        known = straightforward(graph, outstanding, times)

        def before(a: str, b: str, known: dict[str, tuple[object, ...]] = known) -> bool:
            (p_a, m_a, next_a), (p_b, m_b, next_b) = known[a], known[b]
            left, right = min(p_b, m_a), min(p_a, m_b)  # type: ignore[type-var]
            return left < right or (left == right and next_a < next_b)  # type: ignore[operator]

        def by_equation_6(a: str, b: str, known: dict[str, tuple[object, ...]] = known) -> bool:
            (p_a, m_a, _), (p_b, m_b, _) = known[a], known[b]
            return min(p_b, m_a) < min(p_a, m_b)  # type: ignore[type-var,no-any-return,operator]

        free = {other for other in outstanding if not any(before(rest, other) for rest in outstanding)}
        first = {other for other in outstanding if not any(by_equation_6(rest, other) for rest in outstanding)}
        assert first
        assert picked in (free or first)
        best = min(free or first, key=lambda name: (known[name][2], -known[name][0]))  # type: ignore[operator]
        assert known[picked][2] == known[best][2]
        assert known[picked][0] == known[best][0]
        outstanding.remove(picked)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.booleans()), min_size=1, max_size=7))
def test_the_unpreceded_are_those_of_the_matrix(rows: list[tuple[int, int, bool]]) -> None:
    compute, transfer = (np.array([row[column] for row in rows], dtype=np.int64) for column in (0, 1))
    outstanding = np.array([row[2] for row in rows])
    before = precedes(compute, transfer, np.zeros(len(rows), dtype=np.int64)) & outstanding[:, None]
    wanted = outstanding & ~before.any(axis=0)
    assert unpreceded(compute, transfer, outstanding).tolist() == wanted.tolist()
    assert wanted.any() == outstanding.any()


def test_the_circle_of_the_comparator() -> None:
    """(P, M, M+) = (3,3,9) < (6,3,10) < (4,4,5) < (3,3,9): nobody is free; Equation 6 alone leaves the first two."""
    compute, transfer, impending = (
        np.array(column, dtype=np.int64) for column in ((3, 6, 4, 1), (3, 3, 4, 9), (9, 10, 5, 50))
    )
    before = precedes(compute, transfer, impending)
    assert before[0, 1]
    assert before[1, 2]
    assert before[2, 0]
    assert before.any(axis=0).all()
    assert unpreceded(compute, transfer, np.ones(4, dtype=bool)).tolist() == [True, True, False, False]


@given(timed_graphs(channels=2), st.randoms(use_true_random=False))
def test_nothing_depends_on_how_the_file_is_sorted(graph: Graph, random: Random) -> None:
    rows = [
        Op(
            **{name: getattr(op, name) for name in Op.__slots__}
            | {"inputs": tuple(random.sample(op.inputs, len(op.inputs)))}
        )
        for op in graph.ops()
    ]
    random.shuffle(rows)
    shuffled = Graph.from_ops("random", "training", rows)
    assert tac(shuffled) == tac(graph)
    assert tic(shuffled) == tic(graph)
    for priority in (None, tac(graph).priority):
        left, right = simulate(graph, priority, 3), simulate(shuffled, priority, 3)
        assert left.makespan_s == right.makespan_s
        assert dict(zip(graph.names, left.start_s, strict=True)) == dict(
            zip(shuffled.names, right.start_s, strict=True)
        )


@given(timed_graphs(max_recvs=4, max_computes=5))
def test_no_order_beats_brute_force_and_tac_is_a_permutation(graph: Graph) -> None:
    recvs = [graph.names[op] for op in graph.of_kind(RECV)]
    schedule = tac(graph)
    assert sorted(schedule.order) == sorted(recvs)
    assert [schedule.priority[name] for name in schedule.order] == list(range(len(recvs)))
    limits = bounds(graph)
    best = min(
        simulate(graph, {name: place for place, name in enumerate(order)}, seed).makespan_s
        for order in itertools.permutations(recvs)
        for seed in range(3)
    )
    mine = min(simulate(graph, schedule.priority, seed).makespan_s for seed in range(3))
    assert limits.lower_s - 1e-9 <= best <= mine + 1e-9 <= limits.upper_s + 1e-8


def test_tac_is_near_optimal_on_chains() -> None:
    """A chain of layers, each waiting for its own parameter: the order of use is optimal, and TAC finds it."""
    random = Random(1)
    for _ in range(50):
        ops: list[Op] = []
        for layer in range(6):
            ops.append(
                Op(
                    name=f"r{layer}",
                    kind="recv",
                    resource="channel:0",
                    duration_s=random.uniform(1, 5),
                    parameter=f"{layer}",
                )
            )
            inputs = (f"r{layer}", *((f"c{layer - 1}",) if layer else ()))
            ops.append(Op(name=f"c{layer}", kind="compute", duration_s=random.uniform(1, 5), inputs=inputs))
        random.shuffle(ops)
        graph = Graph.from_ops("chain", "inference", ops)
        assert tac(graph).order == tuple(f"r{layer}" for layer in range(6))


def test_ties_follow_the_order_of_use_then_the_name() -> None:
    ops = [Op(name=f"r{i}", kind="recv", resource="channel:0", duration_s=1.0, parameter=str(i)) for i in (10, 9, 2)]
    ops += [Op(name="c", kind="compute", duration_s=1.0, inputs=("r10", "r9", "r2"))]
    graph = Graph.from_ops("ties", "inference", ops)
    assert tac(graph).order == tic(graph).order == ("r2", "r9", "r10")


def test_ties_follow_the_earliest_use_and_not_the_last() -> None:
    """Both recvs have P = M = 1 and M+ = 2. ``z`` is used at level 1 and again at level 4, ``a`` at level 2."""
    ops = [Op(name=name, kind="recv", resource="channel:0", duration_s=1.0, parameter=name) for name in ("a", "z")]
    inputs = {"s": (), "t": ("s",), "u": ("z",), "v": ("a", "t"), "w": ("u", "v"), "x": ("w", "z")}
    ops += [Op(name=name, kind="compute", duration_s=1.0, inputs=sources) for name, sources in inputs.items()]
    graph = Graph.from_ops("twice", "inference", ops)
    assert tac(graph).order == tic(graph).order == ("z", "a")


def test_bounds_take_the_busiest_of_each_side() -> None:
    loads = {"compute:0": (2.0, 1.0), "compute:1": (2.0,), "channel:0": (4.0,), "channel:1": (1.0,)}
    ops = [
        Op(
            name=f"{lane}/{place}",
            kind="compute" if lane.startswith("compute") else "recv",
            resource=lane,
            duration_s=time,
        )
        for lane, times in loads.items()
        for place, time in enumerate(times)
    ]
    limits = bounds(Graph.from_ops("two of each", "inference", ops))
    assert (limits.compute_s, limits.transfer_s, limits.lower_s, limits.upper_s) == (3.0, 4.0, 4.0, 10.0)
    assert limits.speedup == 1.5


def test_first_recv_prefers_more_compute_on_equal_impending() -> None:
    ops = [Op(name=name, kind="recv", resource="channel:0", duration_s=5.0, parameter=name) for name in ("a", "b")]
    ops += [
        Op(name=f"c{name}", kind="compute", duration_s=time, inputs=(name,)) for name, time in (("a", 1.0), ("b", 3.0))
    ]
    graph = Graph.from_ops("two", "inference", ops)
    properties = Properties(find_dependencies(graph), whole_times(graph))
    assert first_recv(properties, np.arange(2)) == 1


def test_untimed_graphs() -> None:
    ops = [Op(name="r", kind="recv", resource="channel:0", parameter="r"), Op(name="c", kind="compute", inputs=("r",))]
    graph = Graph.from_ops("untimed", "inference", ops)
    assert tic(graph).order == ("r",)
    with pytest.raises(InputError, match="op 'r' has no duration; time the graph with an oracle first"):
        tac(graph)


def test_times_of_years_do_not_overflow() -> None:
    ops = [Op(name=f"r{i}", kind="recv", resource="channel:0", duration_s=1e9 + i, parameter=str(i)) for i in range(3)]
    ops += [Op(name="c", kind="compute", duration_s=1e9, inputs=tuple(op.name for op in ops))]
    graph = Graph.from_ops("years", "inference", ops)
    assert simulate(graph, tac(graph).priority, 0).makespan_s == pytest.approx(4e9, rel=1e-6)


def without_ties(random: Random) -> Graph:
    """A graph whose times are all different and positive, so that Equation 6 decides nearly everything."""
    recvs = random.randint(2, 8)
    ops = [
        Op(name=f"r{i}", kind="recv", resource="channel:0", duration_s=random.uniform(0.1, 5), parameter=f"{i}")
        for i in range(recvs)
    ]
    for i in range(random.randint(2, 12)):
        names = [op.name for op in ops]
        inputs = tuple(sorted(random.sample(names, random.randint(1, min(3, len(names))))))
        ops.append(Op(name=f"c{i}", kind="compute", duration_s=random.uniform(0.1, 5), inputs=inputs))
    return Graph.from_ops("no_ties", "inference", ops)


def papers_tac(graph: Graph) -> list[str]:
    """Algorithm 3 with Equation 6: properties anew for every pick, then a linear search with the comparator."""
    outstanding = {graph.names[op] for op in graph.of_kind(RECV)}
    times = exact_times(graph)
    order = []
    while outstanding:
        known = straightforward(graph, outstanding, times)
        first = None
        for name in sorted(outstanding):
            if first is None:
                first = name
                continue
            (p_a, m_a, next_a), (p_b, m_b, next_b) = known[name], known[first]
            left, right = min(p_b, m_a), min(p_a, m_b)  # type: ignore[type-var]
            if left < right or (left == right and next_a < next_b):  # type: ignore[operator]
                first = name
        assert first is not None
        order.append(first)
        outstanding.remove(first)
    return order


def unique_first(graph: Graph, order: list[str]) -> bool:
    """Whether every pick strictly preceded every other outstanding recv: then any right TAC gives this order."""
    outstanding = {graph.names[op] for op in graph.of_kind(RECV)}
    times = exact_times(graph)
    for picked in order:
        known = straightforward(graph, outstanding, times)
        p_a, m_a, next_a = known[picked]
        for other in outstanding - {picked}:
            p_b, m_b, next_b = known[other]
            left, right = min(p_b, m_a), min(p_a, m_b)  # type: ignore[type-var]
            if not (left < right or (left == right and next_a < next_b)):  # type: ignore[operator]
                return False
        outstanding.remove(picked)
    return True


def test_the_papers_algorithm_on_two_hundred_graphs_without_ties() -> None:
    random = Random(6)
    compared = 0
    while compared < 200:
        graph = without_ties(random)
        order = papers_tac(graph)
        if unique_first(graph, order):
            compared += 1
            assert list(tac(graph).order) == order


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
def test_never_worse_than_tac_and_never_better_than_exact(graph: Graph) -> None:
    found = improve(graph)
    ours = mean(graph, found.priority)
    assert ours <= mean(graph, tac(graph).priority) * (1 + 1e-12)
    best = solve_exact(graph, workers=1).makespan_s
    assert ours >= best * (1 - 2e-6)
    assert sorted(found.order) == sorted(graph.names[op] for op in graph.of_kind(RECV))
