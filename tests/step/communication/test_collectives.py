"""DDP's buckets against torch's own assignment and enumeration; FSDP2's timeline against a second, separate one."""

from __future__ import annotations

import dataclasses
import itertools
import random

import networkx as nx
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ddltool.analyzers.step.communication.collectives import (
    DEFAULT_FIRST_BYTES,
    MIB,
    assign_buckets,
    best_cuts,
    finish_s,
    plan_collectives,
    plan_ddp,
)
from ddltool.analyzers.step.communication.fsdp import Unit, block_container, plan_fsdp, simulate_fsdp, units_of
from ddltool.analyzers.step.communication.nccl import Fabric, Group
from ddltool.analyzers.step.communication.program import Program, program_of
from ddltool.analyzers.step.costs.model import datasheet, estimate
from ddltool.analyzers.step.tracing.step import TrainingStep
from ddltool.analyzers.step.tracing.torch_adapter import trace_torch
from ddltool.device import Network
from ddltool.errors import InputError
from ddltool.graph import Graph, Op, read_graph
from ddltool.shipped import devices, folder

GROUP = Fabric.flat(1e9, 1e-4).over(4)
NEAR = Fabric.flat(3e9, 1e-5).over(2)


def shipped(stem: str) -> Graph:
    return read_graph(folder() / "graphs" / f"{stem}.graph.json.gz")


@st.composite
def programs(draw: st.DrawFn, most: int = 7) -> Program:
    count = draw(st.integers(1, most))
    ready = np.sort(np.array([draw(st.floats(0, 1)) for _ in range(count)]))
    size = np.array([float(draw(st.integers(1, 40)) * MIB // 4) for _ in range(count)])
    return Program(
        parameters=tuple(f"p{k}" for k in range(count)),
        ready_s=ready,
        size_bytes=size,
        held=tuple(f"p{k}" for k in range(count)),
        held_bytes=size,
        first_use_s=np.zeros(count),
        backward_s=0.0,
        compute_s=float(ready[-1]),
    )


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), torch.zeros(2, 5, 16)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(3)), torch.zeros(2, 3, 8, 8)),
    ],
)
def test_gradients_are_ready_in_the_order_in_which_autograd_hands_them_over(module: nn.Module, inputs: Tensor) -> None:
    """A layer's weight and bias are computed at one time; the reducer counts them as they are accumulated."""
    module(inputs)  # lazy layers take their shape
    step = TrainingStep(name="m", module=module, inputs=(inputs,), loss=lambda out: out.square().mean())
    graph = trace_torch(lambda: step, mode="training")
    program = program_of(estimate(graph, datasheet(devices().device("A100")), Network()))
    seen: list[str] = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))  # type: ignore[misc]
    step.loss(module(inputs)).backward()
    assert list(program.parameters) == seen


def test_ring_costs_are_the_textbook_ones() -> None:
    """All-reduce of S bytes on n processes: 2 (n - 1) rounds, 2 (n - 1) / n of S over the wire."""
    assert GROUP.all_reduce_s(4e9) == pytest.approx(2 * 3 * 1e-4 + 2 * 3 / 4 * 4)
    assert GROUP.all_gather_s(4e9) == GROUP.reduce_scatter_s(4e9) == pytest.approx(3 * 1e-4 + 3)


@given(programs(), st.sampled_from([0.25, 0.5, 1.0, 3.0, 25.0]))
def test_buckets_under_a_cap_are_torchs(program: Program, cap: float) -> None:
    tensors = [torch.empty(int(size) // 4, device="meta") for size in program.size_bytes]
    for limits, cuts in (
        ([int(cap * MIB)], assign_buckets(program, cap)),
        ([DEFAULT_FIRST_BYTES, int(cap * MIB)], assign_buckets(program, cap, DEFAULT_FIRST_BYTES)),
    ):
        theirs, _ = dist._compute_bucket_assignment_by_size(tensors, limits)  # type: ignore[attr-defined]
        assert [list(range(low, high)) for low, high in itertools.pairwise([0, *cuts])] == theirs


def test_the_default_is_torchs() -> None:
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == DEFAULT_FIRST_BYTES


@given(programs())
def test_best_cuts_equal_enumeration(program: Program) -> None:
    count = len(program.parameters)
    every = ([*inner, count] for size in range(count) for inner in itertools.combinations(range(1, count), size))
    best = min(finish_s(program, GROUP, cuts) for cuts in every)
    assert finish_s(program, GROUP, best_cuts(program, GROUP)) == pytest.approx(best, rel=1e-12)
    plan = plan_ddp(program, GROUP)
    assert plan.lower_bound_s <= plan.best.step_s * (1 + 1e-12)
    assert plan.best.step_s <= plan.best_cap.step_s <= plan.default.step_s
    assert plan.best.exposed_s >= 0


@given(programs())
def test_the_list_of_caps_makes_exactly_these_buckets(program: Program) -> None:
    """What is emitted as bucket_cap_mb_list, turned to bytes as DDP does, gives the planned buckets in torch."""
    best = plan_ddp(program, GROUP).best
    if best.bucket_cap_mb_list is None:
        return
    tensors = [torch.empty(int(size) // 4, device="meta") for size in program.size_bytes]
    limits = [int(cap * MIB) for cap in best.bucket_cap_mb_list]
    theirs, _ = dist._compute_bucket_assignment_by_size(tensors, limits)  # type: ignore[attr-defined]
    assert [[f"p{k}" for k in bucket] for bucket in theirs] == best.bucket_parameters


def test_a_bucket_plan_by_hand() -> None:
    """Two gradients of 1 s on the wire each, ready at 1 and 4 s: apart, the first is done before the second is ready."""
    group = Fabric.flat(1e6, 0.0).over(2)
    program = Program(
        parameters=("a", "b"),
        ready_s=np.array([1.0, 4.0]),
        size_bytes=np.array([1e6, 1e6]),
        held=("a", "b"),
        held_bytes=np.array([1e6, 1e6]),
        first_use_s=np.zeros(2),
        backward_s=0.0,
        compute_s=4.0,
    )
    assert finish_s(program, group, [1, 2]) == pytest.approx(5.0)
    assert finish_s(program, group, [2]) == pytest.approx(6.0)
    assert plan_ddp(program, group).best.bucket_parameters == [["a"], ["b"]]


def second_opinion(
    root: Unit, units: list[Unit], group: Group, ahead: int, back: int, reshard: bool, near: Group
) -> float:
    """The same rules as a graph of events; the step is its longest path."""
    events: nx.DiGraph[str] = nx.DiGraph()
    wire: list[str] = []

    def add(name: str, length: float, *after: str, on_wire: bool = False) -> None:
        if on_wire:
            after = (*after, *wire[-1:])
            wire.append(name)
        events.add_node(name, length=length)
        for other in after:
            # Gates are named "start:X": X may have begun, not ended.
            gate, _, origin = other.rpartition("start:")
            events.add_edge(origin, name, begins=bool(gate or other.startswith("start:")))

    count = len(units)
    gather, regather, scatter = group.all_gather_s, near.all_gather_s, group.reduce_scatter_s
    add("gather-root", gather(root.size_bytes) if root.size_bytes else 0.0, on_wire=True)
    add("root-forward", root.forward_s, "gather-root")
    last = "root-forward"
    for k, unit in enumerate(units):
        gate = [f"start:forward{k - 1 - ahead}"] if k - 1 - ahead >= 0 else []
        add(f"gather{k}", gather(unit.size_bytes), *gate, on_wire=True)
        add(f"forward{k}", unit.forward_s, last, f"gather{k}")
        last = f"forward{k}"
    add("root-first", root.backward_s / 2, last)
    last = "root-first"
    again: set[int] = set() if reshard else set(range(count))
    if reshard:
        add(f"again{count - 1}", regather(units[-1].size_bytes), f"start:forward{count - 1}", on_wire=True)
        again.add(count - 1)
    scattered: list[str] = []
    for k in reversed(range(count)):
        if k not in again:
            add(f"again{k}", regather(units[k].size_bytes), last, on_wire=True)
            again.add(k)
        add(f"backward{k}", units[k].backward_s, last, *([f"again{k}"] if events.has_node(f"again{k}") else []))
        for following in range(k - 1, max(-1, k - 1 - back), -1):
            if following not in again:
                add(f"again{following}", regather(units[following].size_bytes), f"start:backward{k}", on_wire=True)
                again.add(following)
        add(f"after{k}", 0.0, f"backward{k}", *scattered[-1:])
        last = f"after{k}"
        if units[k].gradient_bytes:
            add(f"scatter{k}", scatter(units[k].gradient_bytes), last, on_wire=True)
            scattered.append(f"scatter{k}")
    add("root-last", root.backward_s / 2, last)
    if root.gradient_bytes:
        add("scatter-root", scatter(root.gradient_bytes), "root-last", on_wire=True)
    start: dict[str, float] = {}
    for name in nx.topological_sort(events):
        start[name] = max(
            (
                start[before] + (0.0 if data["begins"] else events.nodes[before]["length"])
                for before, _, data in events.in_edges(name, data=True)
            ),
            default=0.0,
        )
    return max(start[name] + events.nodes[name]["length"] for name in events)


units_strategy = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)).map(
        lambda t: Unit(
            name="", size_bytes=t[0] * 1e8, gradient_bytes=t[3] * 1e8, forward_s=t[1] / 10, backward_s=t[2] / 10
        )
    ),
    min_size=2,
    max_size=7,
)


@given(units_strategy, st.integers(1, 4), st.integers(1, 4), st.booleans(), st.sampled_from([GROUP, NEAR]))
def test_fsdp_equals_a_second_timeline(units: list[Unit], ahead: int, back: int, reshard: bool, near: Group) -> None:
    root, blocks = (
        units[0],
        [
            Unit(
                name=f"b{k}",
                size_bytes=u.size_bytes,
                gradient_bytes=u.gradient_bytes,
                forward_s=u.forward_s,
                backward_s=u.backward_s,
            )
            for k, u in enumerate(units[1:])
        ],
    )
    plan = simulate_fsdp(root, blocks, GROUP, ahead, back, reshard=reshard, near=near)
    assert plan.step_s == pytest.approx(second_opinion(root, blocks, GROUP, ahead, back, reshard, near), rel=1e-12)
    assert plan.exposed_s >= -1e-12


def test_fsdp_units_are_the_blocks() -> None:
    program = program_of(shipped("gpt_small-training"))
    container = block_container(program.held, program.held_bytes.tolist())
    assert container is not None
    found = units_of(program)
    assert found is not None
    root, units = found
    assert [unit.name for unit in units] == [f"{container}.{k}" for k in range(len(units))]
    assert root.size_bytes + sum(unit.size_bytes for unit in units) == pytest.approx(program.size_bytes.sum())
    compute = root.forward_s + root.backward_s + sum(unit.forward_s + unit.backward_s for unit in units)
    assert compute == pytest.approx(program.compute_s)
    same = [unit.forward_s for unit in units]
    assert max(same) < 1.5 * min(same)  # equal blocks take about equal time
    assert max(unit.backward_s for unit in units) < 1.5 * min(unit.backward_s for unit in units)


def test_frozen_blocks_are_gathered_and_not_reduced() -> None:
    """Six blocks of a large weight and a small adapter: freezing the weights takes the reduce-scatters away, no gather."""

    def blocks(trained: bool) -> Graph:
        ops: list[Op] = []
        before: tuple[str, ...] = ()
        for k in range(6):
            for name, size in (("base", 4e8), ("adapter", 4e5)):
                full = f"layers.{k}.{name}"
                ops.append(
                    Op(
                        name=f"recv/{full}",
                        kind="recv",
                        resource="channel:0",
                        duration_s=0.1,
                        size_bytes=size,
                        parameter=full,
                    )
                )
            inputs = (f"recv/layers.{k}.base", f"recv/layers.{k}.adapter", *before)
            ops.append(Op(name=f"f{k}", kind="compute", duration_s=0.01, inputs=inputs))
            before = (f"f{k}",)
        for k in reversed(range(6)):
            ops.append(Op(name=f"backward/{k}", kind="compute", duration_s=0.02, inputs=before))
            before = (f"backward/{k}",)
            for name, size in (("base", 4e8), ("adapter", 4e5)):
                full = f"layers.{k}.{name}"
                if trained or name == "adapter":
                    send = Op(name=f"send/{full}", kind="send", resource="channel:0", duration_s=0.1, size_bytes=size)
                    ops.append(dataclasses.replace(send, parameter=full, inputs=before))
        return Graph.from_ops("blocks", "training", ops)

    whole, frozen = (plan_fsdp(program_of(blocks(trained)), GROUP) for trained in (True, False))
    assert whole is not None
    assert frozen is not None
    assert frozen.default.gathered_bytes == whole.default.gathered_bytes
    gathers = sum(GROUP.all_gather_s(4e8 + 4e5) for _ in frozen.units)
    assert gathers < frozen.default.step_s < whole.default.step_s


def test_a_step_without_any_time_gains_nothing() -> None:
    ops = [
        Op(name="r", kind="recv", resource="channel:0", duration_s=0.0, parameter="w"),
        Op(name="c", kind="compute", duration_s=0.0, inputs=("r",)),
        Op(name="s", kind="send", resource="channel:0", duration_s=0.0, parameter="w", inputs=("c",)),
    ]
    plans = plan_collectives(Graph.from_ops("zero", "training", ops), Fabric.flat(1e9, 0.0).over(2))
    assert plans is not None
    assert "leave bucket_cap_mb alone" in plans.ddp.verdict


@given(programs())
def test_no_single_cap_is_better(program: Program) -> None:
    """Every cap that any set of neighbouring gradients adds up to, and anything between."""
    sizes = program.size_bytes
    sums = {float(sizes[i:j].sum()) for i in range(len(sizes)) for j in range(i + 1, len(sizes) + 1)}
    best = min(finish_s(program, GROUP, assign_buckets(program, cap / MIB)) for cap in sums)
    default = finish_s(program, GROUP, assign_buckets(program, 25, DEFAULT_FIRST_BYTES))
    best = max(min(best, default), program.compute_s)
    # Fewer buckets are preferred where the step is at most 0.1 % longer.
    found = plan_ddp(program, GROUP).best_cap
    assert best * (1 - 1e-12) <= found.step_s <= best * (1 + 1e-3) * (1 + 1e-12)
    if found.bucket_cap_mb is not None:  # rounded, and these buckets still
        cuts = assign_buckets(program, found.bucket_cap_mb)
        assert max(finish_s(program, GROUP, cuts), program.compute_s) == found.step_s
        assert len(cuts) == found.buckets


def test_depth_pays_where_the_network_is_uneven() -> None:
    """A large block behind small ones: fetched further ahead, its gather hides behind more compute."""
    sizes = [1, 1, 1, 12, 1, 1]
    blocks = [
        Unit(name=f"l.{k}", size_bytes=s * 1e8, gradient_bytes=s * 1e8, forward_s=0.3, backward_s=0.6)
        for k, s in enumerate(sizes)
    ]
    root = Unit(name="", size_bytes=1e7, gradient_bytes=1e7, forward_s=0.0, backward_s=0.0)
    shallow, deep = (simulate_fsdp(root, blocks, GROUP, depth, depth) for depth in (1, 3))
    assert deep.step_s < 0.95 * shallow.step_s
    assert deep.gathered_bytes > shallow.gathered_bytes


def test_hidden_communication_exposes_nothing() -> None:
    """The sum of the passes in the order of the step, and that of all compute, may differ in the last bit."""
    rng = random.Random(0)
    for _ in range(200):
        root = Unit(name="", size_bytes=0.0, gradient_bytes=0.0, forward_s=rng.random(), backward_s=rng.random())
        blocks = [
            Unit(name=f"l.{k}", size_bytes=1.0, gradient_bytes=0.0, forward_s=rng.random(), backward_s=rng.random())
            for k in range(3)
        ]
        plan = simulate_fsdp(root, blocks, GROUP, 1, 1)
        assert 0 <= plan.exposed_s < 1e-12


def test_the_answers_name_what_to_set() -> None:
    plans = plan_collectives(shipped("gpt_small-training"), GROUP)
    assert plans is not None
    assert "DDP" in plans.ddp.verdict
    assert plans.fsdp2 is not None
    assert "FSDP2" in plans.fsdp2.verdict
    assert plan_collectives(shipped("gpt_small-inference"), GROUP) is None
    with pytest.raises(InputError, match="is no training step"):
        program_of(shipped("gpt_small-inference"))


def test_prefetch_lists_follow_the_depth() -> None:
    fsdp = plan_fsdp(program_of(shipped("gpt_small-training")), Fabric.flat(2e8, 0).over(64))
    assert fsdp is not None
    for lists, depth in (
        (fsdp.forward_prefetch, fsdp.best.forward_depth),
        (fsdp.backward_prefetch, fsdp.best.backward_depth),
    ):
        assert (depth == 1) == (not lists)
        assert all(1 <= len(ahead) <= depth for ahead in lists.values())


def test_gradients_are_ready_in_program_order() -> None:
    ops = [
        Op(name="recv/a", kind="recv", resource="channel:0", duration_s=1.0, size_bytes=4.0, parameter="a"),
        Op(name="recv/b", kind="recv", resource="channel:0", duration_s=1.0, size_bytes=8.0, parameter="b"),
        Op(name="f", kind="compute", duration_s=1.0, inputs=("recv/a", "recv/b")),
        Op(name="db", kind="compute", duration_s=2.0, inputs=("f",)),
        Op(name="da", kind="compute", duration_s=3.0, inputs=("f",)),
        Op(
            name="send/a",
            kind="send",
            resource="channel:0",
            duration_s=1.0,
            size_bytes=4.0,
            parameter="a",
            inputs=("da",),
        ),
        Op(
            name="send/b",
            kind="send",
            resource="channel:0",
            duration_s=1.0,
            size_bytes=8.0,
            parameter="b",
            inputs=("db",),
        ),
    ]
    program = program_of(Graph.from_ops("two", "training", ops))
    assert program.parameters == ("b", "a")
    assert program.ready_s.tolist() == [3.0, 6.0]
    assert program.size_bytes.tolist() == [8.0, 4.0]
    assert (program.backward_s, program.compute_s) == (1.0, 6.0)
