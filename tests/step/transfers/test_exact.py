"""The reduction, the lower bound and CP-SAT against enumeration of every schedule, and against each other."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.step.transfers.efficiency import bounds, solve_exact
from ddltool.analyzers.step.transfers.order import tac, tic
from ddltool.analyzers.step.transfers.shop import (
    ShopProblem,
    list_schedule,
    lower_bound,
    order_of,
    reduce,
    run_order,
    unreduced,
)
from ddltool.analyzers.step.transfers.timeline import simulate
from ddltool.dependencies import time_scale
from ddltool.graph import RECV, Graph, Op, read_graph
from ddltool.shipped import folder
from tests.helpers.strategies import timed_graphs


def least_makespan(problem: ShopProblem) -> int:
    """Try every order of all ops that the inputs allow; a partial one that is already too long is given up."""
    best = sum(problem.times)
    count = len(problem)

    def extend(done: int, ends: tuple[int, ...], free: tuple[int, ...], last: int) -> None:
        nonlocal best
        if last >= best and done != (1 << count) - 1:
            return
        if done == (1 << count) - 1:
            best = min(best, last)
            return
        key = (done, free, ends)
        if key in seen:
            return
        seen.add(key)
        for op in range(count):
            if done >> op & 1 or any(not done >> source & 1 for source in problem.inputs[op]):
                continue
            begin = max([free[problem.resource[op]], *(ends[source] for source in problem.inputs[op])])
            end = begin + problem.times[op]
            extend(
                done | 1 << op,
                (*ends[:op], end, *ends[op + 1 :]),
                (*free[: problem.resource[op]], end, *free[problem.resource[op] + 1 :]),
                max(last, end),
            )

    seen: set[tuple[int, tuple[int, ...], tuple[int, ...]]] = set()
    extend(0, (0,) * count, (0,) * problem.resources, 0)
    return best


@st.composite
def training_graphs(draw: st.DrawFn, *, layers: int = 3, channels: int = 1) -> Graph:
    """Forward, loss, backward and sends as a framework makes them, with ops off the path and ops without any time."""
    time = st.integers(0, 4).map(float)
    ops: list[Op] = []

    def add(name: str, kind: str, inputs: tuple[str, ...] = (), channel: int = 0) -> str:
        resource = "compute:0" if kind == "compute" else f"channel:{channel}"
        parameter = name if kind != "compute" else None
        ops.append(
            Op(
                name=name,
                kind=kind,  # type: ignore[arg-type]
                resource=resource,
                duration_s=draw(time),
                parameter=parameter,
                inputs=tuple(dict.fromkeys(inputs)),
            )
        )
        return name

    before: tuple[str, ...] = ()
    forward = []
    for layer in range(draw(st.integers(1, layers))):
        channel = draw(st.integers(0, channels - 1))
        weights = [add(f"w{layer}.{k}", "recv", channel=channel) for k in range(draw(st.integers(1, 2)))]
        source = before if draw(st.booleans()) else before[-1:]
        before = (*before, add(f"f{layer}", "compute", (*weights, *source)))
        forward.append(before[-1])
        if draw(st.booleans()):
            add(f"side{layer}", "compute", (draw(st.sampled_from([weights[0], before[-1]])),))
    back = add("loss", "compute", before)
    for layer in reversed(range(len(forward))):
        extra = (forward[layer],)
        if draw(st.booleans()):
            extra = (*extra, add(f"mask{layer}", "compute", (forward[layer],)))
        back = add(f"b{layer}", "compute", (back, *extra))
        gradient = add(f"g{layer}", "compute", (back,)) if draw(st.booleans()) else back
        for k in range(draw(st.integers(1, 2))):
            add(f"s{layer}.{k}", "send", (gradient,), channel=draw(st.integers(0, channels - 1)))
        if draw(st.booleans()):
            add(f"off{layer}", "compute", (back,))
    return Graph.from_ops("training", "training", ops)


def seconds(graph: Graph, units: int) -> float:
    return units / time_scale(graph)


@given(timed_graphs(max_recvs=3, max_computes=4, channels=2))
@settings(max_examples=150, deadline=None)
def test_any_graph_equals_enumeration(graph: Graph) -> None:
    best = least_makespan(unreduced(graph))
    assert least_makespan(reduce(graph)) == best
    assert lower_bound(unreduced(graph)) <= best
    assert lower_bound(reduce(graph)) <= best
    found = solve_exact(graph, workers=1)
    assert found.status == "optimal"
    assert found.makespan_s == pytest.approx(seconds(graph, best), rel=2e-6)


@given(training_graphs(channels=2))
@settings(max_examples=60, deadline=None)
def test_training_graphs_reduced_and_whole_have_one_optimum(graph: Graph) -> None:
    """Solved twice by CP-SAT, merged and unmerged; the merged problem's schedule holds on the whole graph."""
    whole, merged = unreduced(graph), reduce(graph)
    assert len(merged) <= len(whole)
    assert solve(merged) == solve(whole)
    assert lower_bound(merged) <= solve(whole)
    found = solve_exact(graph, workers=1)
    assert found.makespan_s == pytest.approx(seconds(graph, solve(whole)), rel=1e-9)


def solve(problem: ShopProblem) -> int:
    """A plain job shop model, written apart from the package's."""
    from ortools.sat.python import cp_model

    model, horizon = cp_model.CpModel(), sum(problem.times)
    unit = int(np.gcd.reduce(problem.times)) or 1
    times = [length // unit for length in problem.times]
    starts = [model.new_int_var(0, horizon // unit, "") for _ in times]
    intervals = [
        model.new_fixed_size_interval_var(start, length, "") for start, length in zip(starts, times, strict=True)
    ]
    for resource in range(problem.resources):
        model.add_no_overlap([intervals[op] for op in range(len(times)) if problem.resource[op] == resource])
    span = model.new_int_var(0, horizon // unit, "")
    for op, inputs in enumerate(problem.inputs):
        model.add(span >= starts[op] + times[op])
        for source in inputs:
            model.add(starts[op] >= starts[source] + times[source])
    model.minimize(span)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return round(solver.objective_value) * unit


@given(training_graphs(layers=2))
@settings(max_examples=40, deadline=None)
def test_the_schedule_is_a_real_one(graph: Graph) -> None:
    found = solve_exact(graph, workers=1)
    start, end = found.timeline.start_s, found.timeline.end_s
    assert np.allclose(end - start, graph.duration_s, atol=1e-9)
    for op in range(len(graph)):
        assert all(end[source] <= start[op] + 1e-9 for source in graph.inputs_of(op))
    for resource in range(len(graph.resource_names)):
        mine = sorted((start[op], end[op]) for op in np.flatnonzero(graph.resource == resource))
        assert all(left[1] <= right[0] + 1e-9 for left, right in itertools.pairwise(mine))
    assert end.max() == pytest.approx(found.makespan_s)
    assert sorted(found.schedule.order) == sorted(graph.names[op] for op in graph.of_kind(RECV))


@given(timed_graphs(channels=2))
@settings(max_examples=60, deadline=None)
def test_nothing_beats_exact_and_it_is_not_below_its_bound(graph: Graph) -> None:
    found = solve_exact(graph, workers=1, time_limit_s=10)
    limits = bounds(graph)
    assert limits.lower_s - 1e-9 <= found.lower_bound_s <= found.makespan_s + 1e-12
    for schedule in (tac(graph), tic(graph), found.schedule):
        for seed in range(3):
            assert simulate(graph, schedule.priority, seed).makespan_s >= found.makespan_s - 2e-6 * found.makespan_s


def test_without_time_the_start_and_its_bound_are_kept() -> None:
    graph = read_graph(folder() / "graphs" / "toy-figure4b.graph.json.gz")
    found = solve_exact(graph, time_limit_s=0.0)
    assert found.makespan_s == pytest.approx(5.0)
    assert found.lower_bound_s <= found.makespan_s
    json.dumps(found.schedule.order)


def test_a_start_that_no_bound_proves_is_proven_by_the_solver() -> None:
    waits = {"c0": ("b",), "c1": ("a", "c0"), "c2": ("a",), "c3": ("a", "c1", "c2")}
    times = {"a": 4.0, "b": 2.0, "c0": 1.0, "c1": 3.0, "c2": 3.0, "c3": 1.0}
    ops = [Op(name=name, kind="recv", resource="channel:0", parameter=name, duration_s=times[name]) for name in "ab"]
    ops += [Op(name=name, kind="compute", duration_s=times[name], inputs=inputs) for name, inputs in waits.items()]
    graph = Graph.from_ops("tight", "inference", ops)
    assert seconds(graph, lower_bound(reduce(graph))) == 11.0
    found = solve_exact(graph, workers=1)
    assert (found.status, found.makespan_s, found.lower_bound_s) == ("optimal", 12.0, 12.0)


def test_free_ops_do_not_hold_a_send_back() -> None:
    """A view between a kernel and its send runs when the kernel ends, although the device is busy from then on."""
    ops = [
        Op(name="k", kind="compute", duration_s=1.0),
        Op(name="view", kind="compute", duration_s=0.0, inputs=("k",)),
        Op(name="s", kind="send", resource="channel:0", duration_s=5.0, parameter="p", inputs=("view",)),
        Op(name="long", kind="compute", duration_s=5.0, inputs=("k",)),
    ]
    graph = Graph.from_ops("view", "training", ops)
    assert len(reduce(graph)) == 3
    assert solve_exact(graph).makespan_s == pytest.approx(6.0)


def test_list_schedule_and_order_agree() -> None:
    problem = unreduced(read_graph(folder() / "graphs" / "toy-figure4a.graph.json.gz"))
    starts = list_schedule(problem, [0] * len(problem))
    assert run_order(problem, order_of(problem, starts, problem.times), problem.times) == starts
