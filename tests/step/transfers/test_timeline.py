"""The simulated timeline keeps its rules; bounds, efficiency and verdict say what they should."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddltool.analyzers.step.transfers.efficiency import bounds, compare, verdict
from ddltool.analyzers.step.transfers.order import tac
from ddltool.analyzers.step.transfers.timeline import Ready, Timeline, play, simulate, to_chrome_trace
from ddltool.graph import COMPUTE, RECV, Graph, Op
from tests.helpers.strategies import timed_graphs
from tests.helpers.toys import figure1

CLOSE = 1e-9


def check_certificate(graph: Graph, timeline: Timeline, priority: Mapping[str, int] | None) -> None:
    """Fail unless the timeline is one that the rules allow."""
    start, end = timeline.start_s, timeline.end_s
    assert np.allclose(end - start, graph.duration_s, atol=CLOSE)
    ready = np.array([max((end[s] for s in graph.inputs_of(op)), default=0.0) for op in range(len(graph))])
    assert (start >= ready - CLOSE).all()
    assert timeline.makespan_s == pytest.approx(float(end.max(initial=0.0)), abs=CLOSE)
    for lane in range(len(graph.resource_names)):
        ops = [int(op) for op in np.flatnonzero(graph.resource == lane)]
        ops.sort(key=lambda op: (start[op], end[op]))
        for one, two in itertools.pairwise(ops):
            assert end[one] <= start[two] + CLOSE  # one at a time
        for op in ops:
            # While it was ready and waiting, its resource was busy all the time.
            busy = sum(
                min(end[o], start[op]) - max(start[o], ready[op])
                for o in ops
                if end[o] > ready[op] and start[o] < start[op]
            )
            assert busy == pytest.approx(start[op] - ready[op], abs=1e-8)
            number = (priority or {}).get(graph.names[op])
            for other in ops:
                rank = (priority or {}).get(graph.names[other])
                if number is not None and rank is not None and rank < number and start[other] > start[op] + CLOSE:
                    assert ready[other] > start[op] - CLOSE  # a more urgent one was not ready yet


@given(timed_graphs(channels=2), st.integers(0, 5), st.booleans())
def test_certificates(graph: Graph, seed: int, ordered: bool) -> None:
    priority = tac(graph).priority if ordered else None
    timeline = simulate(graph, priority, seed)
    check_certificate(graph, timeline, priority)
    limits = bounds(graph)
    assert limits.lower_s - CLOSE <= timeline.makespan_s <= limits.upper_s + CLOSE
    value = limits.efficiency(timeline.makespan_s)
    assert value is None or 0 <= value <= 1


def by_hand(ops: list[tuple[int, int, list[int]]], numbers: list[int]) -> list[int]:
    """When each op starts, tick by tick: whatever ends in a tick ends before anybody picks, and who picks takes the least."""
    start, end, now = [-1] * len(ops), [-1] * len(ops), 0
    while -1 in start:
        done = {op for op in range(len(ops)) if start[op] >= 0 and end[op] <= now}
        for lane in {lane for _, lane, _ in ops}:
            mine = [op for op in range(len(ops)) if ops[op][1] == lane]
            ready = [op for op in mine if start[op] < 0 and done.issuperset(ops[op][2])]
            if ready and not any(start[op] >= 0 and op not in done for op in mine):
                op = min(ready, key=numbers.__getitem__)
                start[op], end[op] = now, now + ops[op][0]
        if all(start[op] < 0 or end[op] > now or op in done for op in range(len(ops))):  # else something took no time
            now += 1
    return start


@given(st.data())
def test_a_timeline_is_that_tick_by_tick(data: st.DataObject) -> None:
    """With a number of its own for every op nothing is left to chance; durations of 0 to 3 ticks end together often."""
    count = data.draw(st.integers(1, 9))
    op = st.tuples(st.integers(0, 3), st.integers(0, 2))
    ops = [
        (*data.draw(op), sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=3)) if n else [])) for n in range(count)
    ]  # fmt: skip
    numbers = data.draw(st.permutations(range(count)))
    following = [[later for later in range(count) if n in ops[later][2]] for n in range(count)]
    times, lanes = [op[0] for op in ops], [op[1] for op in ops]
    found = play(times, lanes, following, [len(op[2]) for op in ops], numbers, random.Random(0))
    start = by_hand(ops, list(numbers))
    end = [begin + time for begin, time in zip(start, times, strict=True)]
    assert found == (start, end, max(end))


def test_every_op_that_may_be_picked_is_picked_as_often() -> None:
    """Of two with the lowest number and two without, in any order; the higher number only when it is the lowest left."""
    chance, first, last = random.Random(0), Counter[int](), Counter[int]()
    for _ in range(2000):
        ready = Ready()
        for op, number in enumerate((3, 3, -1, -1, 7)):
            ready.add(op, number)
        picked = [ready.pick(chance) for _ in range(6)]
        assert sorted(picked) == [-1, 0, 1, 2, 3, 4]
        assert picked[-1] == -1
        assert picked.index(4) > max(picked.index(0), picked.index(1))
        first[picked[0]] += 1
        order = play([1] * 3, [0] * 3, [[]] * 3, [0] * 3, [-1] * 3, chance)[0]
        last[order[0] * 3 + order[1]] += 1
    assert set(first) == {0, 1, 2, 3}
    assert all(abs(count - 500) < 100 for count in first.values())
    assert len(last) == 6
    assert all(abs(count - 333) < 85 for count in last.values())


def test_bounds_by_hand() -> None:
    limits = bounds(figure1())
    assert (limits.upper_s, limits.lower_s, limits.speedup) == (4.0, 2.0, 1.0)
    assert limits.efficiency(3.0) == 0.5
    assert limits.efficiency(4.0) == 0.0


def one_resource() -> Graph:
    ops = [Op(name=f"c{i}", kind="compute", duration_s=0.1) for i in range(3)]
    return Graph.from_ops("serial", "inference", ops)


def test_efficiency_is_undefined_when_one_resource_does_everything() -> None:
    comparison = compare(one_resource(), samples=3)
    assert comparison.schedules["tac"].efficiency is None
    assert comparison.undefined_reason == "U = L, one resource does all the work: there is nothing to overlap"
    assert verdict(comparison).worth_it is False
    assert "No order can gain anything" in verdict(comparison).text


def test_a_graph_that_takes_no_time() -> None:
    graph = Graph.from_ops("nothing", "inference", [Op(name="c", kind="compute", duration_s=0.0)])
    comparison = compare(graph, samples=2)
    assert comparison.bounds.speedup is None
    assert comparison.schedules["random"].makespan_s == 0.0
    assert verdict(comparison).worth_it is False


def chain(layers: int, transfer: float, compute: float) -> Graph:
    ops = [
        Op(name=f"r{i}", kind="recv", resource="channel:0", duration_s=transfer, parameter=str(i))
        for i in range(layers)
    ]
    for i in range(layers):
        inputs = (f"r{i}", *((f"c{i - 1}",) if i else ()))
        ops.append(Op(name=f"c{i}", kind="compute", duration_s=compute, inputs=inputs))
    return Graph.from_ops("chain", "inference", ops)


def test_verdicts() -> None:
    comparison = compare(chain(30, 1.0, 1.0), samples=30)
    balanced = verdict(comparison)
    assert balanced.worth_it
    assert comparison.gain > 0.2
    assert "Worth doing" in balanced.text
    assert "At best an order saves 50% of a step without any overlap (S = 1.00); " in balanced.text
    assert "balanced" in balanced.text
    long = compare(chain(260, 1.0, 1e-3), samples=6)
    assert long.schedules["improved"].orders_compute is False
    heavy = verdict(long)
    assert not heavy.worth_it
    assert "communication takes" in heavy.text
    assert "Not worth doing" in heavy.text


def test_tac_on_a_chain_reaches_the_optimum_exactly() -> None:
    comparison = compare(chain(10, 1.0, 1.0), samples=20)
    assert comparison.schedules["tac"].makespan_s == pytest.approx(11.0)
    assert comparison.schedules["tac"].makespan_std_s == 0.0
    # more runs of an order that leaves nothing to chance would be the same
    assert [comparison.schedules[name].samples for name in ("random", "tac")] == [20, 5]
    assert comparison.schedules["random"].makespan_s > 12
    assert comparison.schedules["tac"].efficiency == pytest.approx(0.9)
    assert comparison.schedules["tac"].efficiency_of_best == 1.0
    attributed = comparison.schedules["random"].attribution
    assert attributed is not None
    assert attributed.winnable == pytest.approx((comparison.schedules["random"].makespan_s - 11.0) / 10.0)


def test_a_comparison_repeats_with_its_seed() -> None:
    graph = chain(8, 1.0, 0.7)
    one, two, other = (compare(graph, samples=5, seed=seed).schedules["random"] for seed in (1, 1, 2))
    assert one.makespan_s == two.makespan_s != other.makespan_s


def test_progress_is_told() -> None:
    seen: list[tuple[int, int]] = []
    compare(figure1(), samples=4, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 16) for done in range(1, len(seen) + 1)]


def test_perfetto_events_equal_the_timeline() -> None:
    graph = figure1()
    timeline, schedule = simulate(graph, tac(graph).priority, 0), tac(graph)
    document = json.loads(json.dumps(to_chrome_trace(graph, timeline, schedule.priority)))
    events = {event["name"]: event for event in document["traceEvents"] if event["ph"] == "X"}
    assert set(events) == set(graph.names)
    assert {event["pid"] for event in document["traceEvents"]} == {0}
    for op in range(len(graph)):
        event = events[graph.names[op]]
        assert (event["ts"], event["dur"]) == pytest.approx((timeline.start_s[op] * 1e6, 1e6), rel=1e-9)
        assert (event["args"]["kind"] == "recv") == (graph.kind[op] == RECV) == ("priority" in event["args"])
    lanes = {event["args"]["name"]: event["tid"] for event in document["traceEvents"] if event["name"] == "thread_name"}
    assert {event["tid"] for name, event in events.items() if name.startswith("op")} == {lanes["compute:0"]}
    assert (graph.kind == COMPUTE).sum() == 2
