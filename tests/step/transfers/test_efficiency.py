"""Many workers on shared network cards: one worker repeats the timeline, sharing adds up, seeds repeat.
The reduction, the lower bound and CP-SAT against enumeration of every schedule, and against each other.
"""

from __future__ import annotations

import importlib
import itertools
import json
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cluster import (
    Cluster,
    ClusterRun,
    ClusterSimulator,
    Fabric,
    fair_rates,
    measured_efficiency,
    simulate_cluster,
)
from ddltool.analyzers.step.transfers.efficiency import bounds, solve_exact
from ddltool.analyzers.step.transfers.order import Schedule, tac, tic
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
from ddltool.graph import COMPUTE, RECV, SEND, Graph, Op, read_graph
from ddltool.shipped import folder
from tests.helpers.strategies import timed_graphs

CLOSE = 1e-9  # seconds; the simulator counts in picoseconds


def run_of(
    graph: Graph, *, order: Schedule | None = None, iterations: int = 10, seed: int = 0, **cluster: float
) -> ClusterRun:
    made = Cluster(**cluster)  # type: ignore[arg-type]
    return simulate_cluster(graph, made, order=order, iterations=iterations, seed=seed)


def transfers(*times: float, server: int = 0, kind: str = "recv") -> Graph:
    """A graph of transfers on one channel; sends hang on an op that takes no time."""
    ops = [Op(name="start", kind="compute", duration_s=0.0)]
    for i, time in enumerate(times):
        inputs = ("start",) if kind == "send" else ()
        ops.append(
            Op(name=f"t{i}", kind=kind, resource=f"channel:{server}", duration_s=time, parameter=f"p{i}", inputs=inputs)  # type: ignore[arg-type]
        )
    return Graph.from_ops("transfers", "training", ops, batch_size=4)


# One worker


@given(timed_graphs(channels=1), st.integers(0, 50), st.booleans(), st.sampled_from([0.0, 0.05, 1.0]))
def test_one_worker_on_one_server_repeats_the_timeline(graph: Graph, seed: int, ordered: bool, latency: float) -> None:
    order = tac(graph) if ordered else None
    cluster = Cluster(workers=1, servers=1, latency_s=latency)
    start_s, end_s = ClusterSimulator(graph, cluster).iteration(order.priority if order else None, seed)
    want = simulate(graph, order.priority if order else None, seed)
    assert np.array_equal(start_s[0], want.start_s)
    assert np.array_equal(end_s[0], want.end_s)


def test_one_worker_shares_its_own_card_between_servers() -> None:
    ops = [Op(name=f"r{k}", kind="recv", resource=f"channel:{k}", duration_s=1.0, parameter=f"p{k}") for k in range(4)]
    graph = Graph.from_ops("g", "inference", ops)
    assert run_of(graph, workers=1, servers=4).iteration_s[0] == pytest.approx(4.0)
    assert run_of(graph, workers=1, servers=4, worker_rate=2.0).iteration_s[0] == pytest.approx(2.0)
    assert run_of(graph, workers=1, servers=4, worker_rate=math.inf).iteration_s[0] == 1.0


# Sharing, by hand


@pytest.mark.parametrize("kind", ["recv", "send"])
@pytest.mark.parametrize("workers", [2, 3, 8])
def test_workers_that_fetch_from_one_server_take_as_many_times_as_long(workers: int, kind: str) -> None:
    run = run_of(transfers(1.0, kind=kind), workers=workers, servers=1)
    assert run.finish_s == pytest.approx(float(workers))


def test_latency_is_not_shared() -> None:
    """0.25 s of every transfer move no bytes; the other 0.75 s share the card between two workers."""
    run = run_of(transfers(1.0), workers=2, servers=1, latency_s=0.25)
    assert run.finish_s == pytest.approx(0.25 + 2 * 0.75)
    graph = transfers(1.0)
    assert run_of(graph, workers=1, servers=1, latency_s=0.25).iteration_s[0] == 1.0


@pytest.mark.parametrize(("kinds", "seconds"), [(("recv", "send"), 2.0), (("recv", "recv"), 4.0)])
def test_the_two_directions_do_not_compete(kinds: tuple[str, str], seconds: float) -> None:
    """A worker's transfers with two servers share its card when both come in, not when one comes in and one goes out."""
    ops = [Op(name="start", kind="compute", duration_s=0.0)]
    for server, kind in enumerate(kinds):
        inputs = ("start",) if kind == "send" else ()
        name, channel = f"t{server}", f"channel:{server}"
        ops.append(Op(name=name, kind=kind, resource=channel, duration_s=2.0, parameter=name, inputs=inputs))  # type: ignore[arg-type]
    graph = Graph.from_ops("g", "training", ops)
    assert run_of(graph, workers=1, servers=2).iteration_s[0] == pytest.approx(seconds)


FLOWS = st.sets(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=12).map(sorted)
CARDS = st.sampled_from([0.5, 1.0, 1.5, 3.0, math.inf])


@given(FLOWS, CARDS, CARDS)
def test_rates_are_max_min_fair(flows: list[tuple[int, int]], worker_rate: float, server_rate: float) -> None:
    """The certificate: nothing is over its limit, and every flow has a full link where no other flow is faster."""
    rates = fair_rates(flows, Cluster(workers=5, servers=4, worker_rate=worker_rate, server_rate=server_rate))
    links = [(0, worker, worker_rate) for worker in range(5)] + [(1, server, server_rate) for server in range(4)]
    full: list[list[int]] = []
    for end, card, limit in links:
        members = [i for i, flow in enumerate(flows) if flow[end] == card]
        total = sum(rates[i] for i in members)
        assert total <= limit + CLOSE
        if members and total >= limit - CLOSE:
            full.append(members)
    for i, rate in enumerate(rates):
        assert 0 < rate <= 1
        own = rate >= 1 - CLOSE
        assert own or any(i in members and rate >= max(rates[j] for j in members) - CLOSE for members in full)


def served(
    works: dict[tuple[int, int], float], starts: dict[tuple[int, int], float], worker_rate: float, server_rate: float
) -> dict[tuple[int, int], float]:
    """Ends of the transfers by small steps of time with ``fair_rates`` at each, as an oracle for Fabric's events."""
    left, ends, now = dict(works), {}, 0.0
    waiting = dict(starts)
    while left:
        active = [pair for pair in left if waiting[pair] <= now]
        rates = fair_rates(active, Cluster(workers=4, servers=3, worker_rate=worker_rate, server_rate=server_rate))
        until = min([waiting[p] for p in left if waiting[p] > now], default=math.inf)
        until = min([until, *(now + left[p] / r for p, r in zip(active, rates, strict=True))])
        for pair, rate in zip(active, rates, strict=True):
            left[pair] -= rate * (until - now)
            if left[pair] <= 1e-3:
                ends[pair] = until
                del left[pair]
        now = until
    return ends


@given(
    st.dictionaries(
        st.tuples(st.integers(0, 3), st.integers(0, 2)),
        st.tuples(st.integers(10**6, 10**8), st.integers(0, 10**8)),
        min_size=1,
    ),
    st.sampled_from([0.7, 1.0, 2.0, math.inf]),
    st.sampled_from([0.5, 1.0, 2.0]),
)
def test_the_fabric_moves_transfers_at_their_fair_rates(
    jobs: dict[tuple[int, int], tuple[int, int]], worker_rate: float, server_rate: float
) -> None:
    fabric = Fabric(Cluster(workers=4, servers=3, worker_rate=worker_rate, server_rate=server_rate))
    starts = sorted((start, pair) for pair, (_, start) in jobs.items())
    ends: dict[tuple[int, int], float] = {}
    now = 0.0
    while starts or fabric.next_end(now) < math.inf:
        now = min(fabric.next_end(now), starts[0][0] if starts else math.inf)
        ends.update(dict.fromkeys(fabric.ended(now), now))
        while starts and starts[0][0] == now:
            pair = starts.pop(0)[1]
            fabric.join(pair, float(jobs[pair][0]), now)
    want = served(
        {pair: float(work) for pair, (work, _) in jobs.items()},
        {pair: float(start) for pair, (_, start) in jobs.items()},
        worker_rate,
        server_rate,
    )
    assert ends.keys() == want.keys()
    for pair, end in want.items():
        assert ends[pair] == pytest.approx(end, abs=50)  # units; every event rounds to one


# Whole iterations


@given(timed_graphs(channels=2), st.integers(1, 4), st.integers(0, 9), st.booleans(), st.sampled_from([1.0, math.inf]))
def test_nothing_is_lost_and_nothing_is_too_fast(
    graph: Graph, workers: int, seed: int, ordered: bool, worker_rate: float
) -> None:
    priority = tac(graph).priority if ordered else None
    cluster = Cluster(workers=workers, servers=2, worker_rate=worker_rate)
    start_s, end_s = ClusterSimulator(graph, cluster).iteration(priority, seed)
    took = end_s - start_s
    compute = graph.kind == COMPUTE
    assert np.allclose(took[:, compute], graph.duration_s[compute], atol=CLOSE)
    assert (took[:, ~compute] >= graph.duration_s[~compute] - CLOSE).all()
    for row in range(workers):
        for op in range(len(graph)):
            assert all(end_s[row, s] <= start_s[row, op] + CLOSE for s in graph.inputs_of(op))
        for lane in range(len(graph.resource_names)):
            ops = sorted(np.flatnonzero(graph.resource == lane), key=lambda op: (start_s[row, op], end_s[row, op]))
            assert all(end_s[row, a] <= start_s[row, b] + CLOSE for a, b in itertools.pairwise(ops))
    last = float(end_s.max())
    for kind in (RECV, SEND):
        own = graph.kind == kind
        for server in range(2):
            at = [place for place, name in enumerate(graph.resource_names) if name == f"channel:{server}"]
            load = float(graph.duration_s[own & np.isin(graph.resource, at)].sum())
            assert last >= workers * load - CLOSE  # the server's card
        if worker_rate == 1.0:
            assert (end_s.max(axis=1) >= float(graph.duration_s[own].sum()) - CLOSE).all()  # the worker's card
    values = measured_efficiency(graph, start_s, end_s)
    assert (np.isnan(values) | ((values >= -CLOSE) & (values <= 1 + CLOSE))).all()


def test_same_seed_same_run_and_another_seed_another() -> None:
    graph = chain(12)
    runs = [
        run_of(graph, workers=3, servers=1, iterations=4, seed=seed, noise=0.1, worker_noise=0.1).finish_s
        for seed in (7, 7, 8)
    ]
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])
    assert np.array_equal(runs[0][1:], runs[2][:3])  # iteration i of seed s is iteration 0 of seed s + i
    assert len(np.unique(runs[0])) == 12


def chain(layers: int, transfer_s: float = 1.0, compute_s: float = 1.0) -> Graph:
    """A network of layers, each with one parameter, whose order of transfers matters as much as it can."""
    ops: list[Op] = []
    for i in range(layers):
        ops.append(Op(name=f"r{i}", kind="recv", resource="channel:0", duration_s=transfer_s, parameter=f"p{i}"))
        before = (f"c{i - 1}",) if i else ()
        ops.append(Op(name=f"c{i}", kind="compute", duration_s=compute_s, inputs=(f"r{i}", *before)))
    return Graph.from_ops("chain", "inference", ops, batch_size=4)


def test_ordered_workers_spread_less_wait_less_and_are_faster_than_random_ones() -> None:
    graph = chain(20)
    baseline = run_of(graph, workers=4, servers=1, iterations=40, server_rate=4.0)
    ordered = run_of(graph, workers=4, servers=1, iterations=40, order=tac(graph), server_rate=4.0)
    assert ordered.iteration_s.std() < 1e-9 < 0.3 < baseline.iteration_s.std()
    assert ordered.straggler.max() == 0 < 0.05 < baseline.straggler.mean()
    assert ordered.iteration_s == pytest.approx(21.0)  # every transfer but the first under compute
    assert baseline.iteration_s.mean() > 1.2 * 21.0
    assert ordered.efficiency == pytest.approx((40 - 21) / (40 - 20))


@pytest.mark.parametrize(("noise", "worker_noise"), [(0.5, 0.0), (0.0, 0.5)])
def test_noise_keeps_the_mean_and_has_the_sigma_it_was_given(noise: float, worker_noise: float) -> None:
    graph = chain(20)
    simulator = ClusterSimulator(graph, Cluster(workers=1, servers=1, noise=noise, worker_noise=worker_noise))
    runs = [simulator.iteration(None, seed) for seed in range(400)]
    took = np.array([end_s[0] - start_s[0] for start_s, end_s in runs])
    compute, transfer = took[:, graph.kind == COMPUTE], took[:, graph.kind == RECV]
    assert compute.mean() == pytest.approx(1.0, abs=0.08)  # 3 standard errors of the 400 common factors
    assert np.log(compute).std() == pytest.approx(0.5, abs=0.06)
    assert np.log(transfer).std() == pytest.approx(noise, abs=0.06)
    spread = np.ptp(compute, axis=1)
    assert (spread > 0.1).all() if noise else spread.max() < 1e-9  # every op for itself, or all of a worker together


def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program that prints the figures."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "benchmarks"))
    return importlib.import_module("tictac_figures")


def test_the_figures_program_prints_gains_that_agree_with_the_simulator(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = program(monkeypatch)
    options = figures.Options(
        models=["alexnet_v2"], iterations=3, seed=0, noise=0.0, worker_noise=0.0, compute_factor=1.0, server_rate=1.0
    )
    figures.figure10(options)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("alexnet_v2")]
    assert [len(line) for line in lines] == [7, 7]  # training, inference: TIC and TAC at three batch factors
    graph = figures.worker_graph("alexnet_v2", "inference", figures.cloud_gpu(), 1, options)
    runs = [
        run_of(graph, workers=4, servers=1, iterations=3, latency_s=50e-6, order=order) for order in (None, tac(graph))
    ]
    gain = runs[1].iterations_per_s / runs[0].iterations_per_s - 1
    assert gain > 0.1
    assert lines[1][4] == f"{gain:+.1%}"


@pytest.mark.parametrize(("model", "images_per_s"), [("inception_v3", 29.3), ("vgg16", 35.4), ("alexnet_v2", 656.0)])
def test_the_figures_program_times_training_as_published(
    monkeypatch: pytest.MonkeyPatch, model: str, images_per_s: float
) -> None:
    figures = program(monkeypatch)
    options = figures.Options(
        models=[], iterations=1, seed=0, noise=0.0, worker_noise=0.0, compute_factor=None, server_rate=1.0
    )
    graph = figures.worker_graph(model, "training", figures.cloud_gpu(), 1, options)
    assert (graph.batch_size or 0) / bounds(graph).compute_s == pytest.approx(images_per_s)


# Regression


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
def test_any_graph_equals_enumeration(graph: Graph) -> None:
    best = least_makespan(unreduced(graph))
    assert least_makespan(reduce(graph)) == best
    assert lower_bound(unreduced(graph)) <= best
    assert lower_bound(reduce(graph)) <= best
    found = solve_exact(graph, workers=1)
    assert found.status == "optimal"
    assert found.makespan_s == pytest.approx(seconds(graph, best), rel=2e-6)


@given(training_graphs(channels=2))
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
@settings(max_examples=20)
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
