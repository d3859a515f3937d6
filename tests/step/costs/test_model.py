"""The roofline oracle: times by hand, balanced channels, honest coverage."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.step.costs.model import coverage, datasheet, estimate
from ddltool.device import Device, Network
from ddltool.graph import RECV, Graph, Op, assign_channels

BOX = Device(
    name="box",
    title="",
    peak_flops={"float32": 100.0, "float16": 400.0},
    memory_bytes_per_s=10.0,
    memory_gib=1,
    source="",
)


def graph(dtype: str = "float32") -> Graph:
    """Ops for a device of 100 FLOP/s (400 in half precision) and 10 bytes a second; only products count as arithmetic."""
    ops = [
        Op(name="r", kind="recv", resource="channel:0", size_bytes=50.0, parameter="w"),
        Op(name="bound by flops", kind="compute", flops=300.0, inputs=("r",), estimate="rule", op_type="aten.mm"),
        Op(
            name="bound by memory",
            kind="compute",
            flops=100.0,
            size_bytes=40.0,
            inputs=("r",),
            estimate="default",
            op_type="b",
        ),
        Op(name="view", kind="compute", flops=9.0, size_bytes=9.0, inputs=("r",), estimate="free", op_type="c"),
        Op(name="no word", kind="compute", size_bytes=10.0, inputs=("r",), op_type="d"),
        Op(name="s", kind="send", resource="channel:0", size_bytes=50.0, parameter="w", inputs=("bound by flops",)),
    ]
    return Graph.from_ops("g", "training", ops, meta={"dtype": dtype})


def test_times_by_hand() -> None:
    network = Network(bandwidth_bytes_per_s=25.0, latency_s=0.5)
    timed = estimate(graph(), datasheet(BOX), network)
    assert timed.duration_s.tolist() == [2.5, 3.0, 4.0, 0.0, 1.0, 2.5]
    assert timed.estimate == ("rule", "rule", "default", "free", "default", "rule")
    half = estimate(graph("float16"), datasheet(BOX), network)
    assert half.duration_s.tolist() == [2.5, 0.75, 4.0, 0.0, 1.0, 2.5]
    assert timed.meta["device"] == "box"


def test_coverage_counts_ops_and_time() -> None:
    covered = coverage(estimate(graph(), datasheet(BOX), Network()))
    assert (covered.rule_ops, covered.default_ops, covered.free_ops) == (0.25, 0.5, 0.25)
    assert covered.default_time == pytest.approx(5 / 8)
    assert covered.rule_time == pytest.approx(3 / 8)
    assert covered.default_types == [("b", 1), ("d", 1)]


sizes = st.lists(st.integers(0, 1000), min_size=1, max_size=30)


@given(sizes, st.integers(1, 8), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_channels_are_balanced_whatever_the_order_of_the_file(
    parameters: list[int], servers: int, random: object
) -> None:
    ops = [
        Op(name=f"r{i}", kind="recv", resource="channel:0", size_bytes=size, parameter=f"p{i}")
        for i, size in enumerate(parameters)
    ]
    ops.append(Op(name="c", kind="compute", inputs=tuple(op.name for op in ops)))
    ops += [
        Op(name=f"s{i}", kind="send", resource="channel:0", size_bytes=size, parameter=f"p{i}", inputs=("c",))
        for i, size in enumerate(parameters)
    ]
    made = assign_channels(Graph.from_ops("g", "training", ops), servers)
    channel = {op.name: op.resource for op in made.ops()}
    load: dict[str, float] = {}
    for i, size in enumerate(parameters):
        assert channel[f"r{i}"] == channel[f"s{i}"]
        load[channel[f"r{i}"]] = load.get(channel[f"r{i}"], 0.0) + size
    # Longest processing time first stays within 4/3 of the ideal (Graham 1969), whose bounds are the mean and the largest.
    ideal = max(sum(parameters) / servers, max(parameters), _second_bound(parameters, servers))
    assert max(load.values()) <= 4 / 3 * ideal + 1e-9
    shuffled = list(ops)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    again = assign_channels(Graph.from_ops("g", "training", shuffled), servers)
    assert {op.name: op.resource for op in again.ops()} == channel


def _second_bound(parameters: list[int], servers: int) -> int:
    """Two of the largest servers + 1 parameters must share a channel."""
    ordered = sorted(parameters, reverse=True)
    return ordered[servers - 1] + ordered[servers] if len(ordered) > servers else 0


def test_recv_sizes_survive() -> None:
    timed = estimate(graph(), datasheet(BOX), Network(parameter_servers=3))
    assert timed.size_bytes[timed.of_kind(RECV)].tolist() == [50.0]
