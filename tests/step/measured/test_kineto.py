"""Profiler traces: against plain loops over the same JSON, against torch's own profiler, and against brute force."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from ddltool.analyzers.step.costs.model import datasheet, estimate
from ddltool.analyzers.step.measured.kineto import ProfilerTrace, TraceSpans, read_events, read_steps, read_trace, union
from ddltool.analyzers.step.measured.matching import Match, apply, match
from ddltool.analyzers.step.recording.op_rules import normal_type
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.step import TrainingStep, default_loss
from ddltool.analyzers.step.tracing.torch_adapter import trace_torch
from ddltool.device import Device, Network
from ddltool.errors import InputError
from ddltool.graph import COMPUTE, Graph, Op
from tests.conftest import write

REAL = ("alexnet_single_gpu", "nccl_data", "sampled_rank-0", "distributed_info_not_found")
GPU = REAL[:3]
Event = dict[str, Any]


# ---------------------------------------------------------------- published traces, counted by plain loops


def real_file(shared_data: Path, name: str) -> Path:
    path = shared_data / "kineto" / f"{name}.json.gz"
    if not path.is_file():
        pytest.skip(f"no trace {name} here")
    return path


def load_plainly(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        document: dict[str, Any] = json.load(stream)
    return document


def of_category(events: list[Event], *categories: str) -> list[Event]:
    return [event for event in events if event.get("ph") == "X" and event.get("cat") in categories]


def is_nccl(event: Event) -> bool:
    return "nccl" in event["name"].lower()


def covered_us(intervals: list[tuple[float, float]]) -> float:
    """Length of a union by merging neighbours, another way than the module's."""
    total, end = 0.0, -1.0
    for first, last in sorted(intervals):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def spans_of(events: list[Event]) -> list[tuple[float, float]]:
    return [(event["ts"], event["ts"] + event["dur"]) for event in events]


@pytest.mark.parametrize("name", REAL)
def test_steps_of_real_traces(shared_data: Path, name: str) -> None:
    """What runs before the first step counts in none, all that runs later does."""
    path = real_file(shared_data, name)
    events = load_plainly(path)["traceEvents"]
    wanted = {
        row["name"]: row for row in of_category(events, "user_annotation") if row["name"].startswith("ProfilerStep")
    }
    if not wanted:
        with pytest.raises(InputError, match="no ProfilerStep range"):
            read_steps(path)
        return
    steps = read_steps(path)
    assert steps.world_size == load_plainly(path).get("distributedInfo", {}).get("world_size")
    begin = min(row["ts"] for row in wanted.values())
    by_time = sorted(wanted.values(), key=lambda row: row["ts"])
    assert steps.step_time_s * 1e6 == pytest.approx([row["dur"] for row in by_time])
    kernels = of_category(events, "kernel")
    communication, compute = (
        [(max(first, begin), last) for first, last in spans_of(rows) if last > begin]
        for rows in ([e for e in kernels if is_nccl(e)], [e for e in kernels if not is_nccl(e)])
    )
    assert steps.communication_s.sum() * 1e6 == pytest.approx(covered_us(communication), abs=1.0)
    exposed = covered_us(compute + communication) - covered_us(compute)
    assert steps.exposed_s.sum() * 1e6 == pytest.approx(exposed, abs=1.0)
    assert (steps.exposed_s <= steps.communication_s + 1e-12).all()


def calls_of(trace: ProfilerTrace) -> dict[str, tuple[int, float, float]]:
    """Calls of each operator that no other operator makes: how many, their microseconds and their kernels'."""
    found: dict[str, tuple[int, float, float]] = {}
    for row in np.flatnonzero(trace.is_top):
        name = trace.names[trace.spans.key[row]]
        count, host, device = found.get(name, (0, 0.0, 0.0))
        found[name] = (
            count + 1,
            host + float(trace.spans.duration_s[row]) * 1e6,
            device + float(trace.device_s[row]) * 1e6,
        )
    return found


def launched_us(trace: ProfilerTrace) -> float:
    """Microseconds of everything that any span launched."""
    return float(trace.device_s[trace.spans.parent < 0].sum()) * 1e6


def operators_around(events: list[Event], launch: Event) -> list[Event]:
    """Operators (one namespace, one name) around a runtime call, outermost first."""
    found = [
        event
        for event in events
        if event["tid"] == launch["tid"]
        and event["ts"] <= launch["ts"] <= event["ts"] + event["dur"]
        and event["name"].count("::") == 1
        and not event["name"].startswith(("autograd::", "c10d::", "torch.", "torch::"))
    ]
    return sorted(found, key=lambda event: (event["ts"], -event["dur"]))


@pytest.mark.parametrize("name", GPU)
def test_kernels_belong_to_the_operator_around_their_launch(shared_data: Path, name: str) -> None:
    path = real_file(shared_data, name)
    events = load_plainly(path)["traceEvents"]
    operators = of_category(events, "cpu_op")
    launches = {event["args"]["correlation"]: event for event in of_category(events, "cuda_runtime")}
    work = [event for event in of_category(events, "kernel", "gpu_memcpy", "gpu_memset") if not is_nccl(event)]
    wanted: dict[str, float] = defaultdict(float)
    for kernel in random.Random(3).sample(work, k=min(400, len(work))):
        for around in operators_around(operators, launches[kernel["args"]["correlation"]])[:1]:
            wanted[around["name"]] += kernel["dur"]
    trace = read_trace(path)
    found = defaultdict(float, {key: device for key, (_, _, device) in calls_of(trace).items()})
    assert wanted
    assert launched_us(trace) >= sum(kernel["dur"] for kernel in work if kernel["cat"] == "kernel") * (1 - 1e-6)
    for key, amount in wanted.items():
        if len(work) <= 400:
            assert found[key] == pytest.approx(amount, rel=1e-6), key
        else:
            assert found[key] >= amount * (1 - 1e-6), key


def test_external_ids_agree_where_they_mean_operators(shared_data: Path, tmp_path: Path) -> None:
    """This trace's kernels carry their operator's id: without the runtime calls the links must stay the same."""
    path = real_file(shared_data, "nccl_data")
    document = load_plainly(path)
    document["traceEvents"] = [event for event in document["traceEvents"] if event.get("cat") != "cuda_runtime"]
    linked, fallen_back = read_trace(path), read_trace(saved(tmp_path / "t.json", document))
    assert launched_us(linked) > 0
    assert launched_us(fallen_back) == pytest.approx(launched_us(linked))
    by_name = [{name: device for name, (_, _, device) in calls_of(trace).items()} for trace in (linked, fallen_back)]
    assert by_name[0] == pytest.approx(by_name[1])


def test_external_ids_that_are_correlations_link_nothing(shared_data: Path, tmp_path: Path) -> None:
    """Older traces repeat the correlation there; 17 of them collide with ids of operators that launched nothing."""
    document = load_plainly(real_file(shared_data, "alexnet_single_gpu"))
    document["traceEvents"] = [event for event in document["traceEvents"] if event.get("cat") != "cuda_runtime"]
    trace = read_trace(saved(tmp_path / "t.json", document))
    assert trace.device_s.sum() == 0.0


def test_resnet50_of_a_real_gpu_trace(shared_data: Path) -> None:
    """The k-th convolution of each step by plain loops; the least over the three steps must be the graph's times."""
    from ddltool.analyzers.step.tracing.sources import load_graph

    path = real_file(shared_data, "nccl_data")
    events = load_plainly(path)["traceEvents"]
    launches = {event["args"]["correlation"]: event for event in of_category(events, "cuda_runtime")}
    calls = sorted((e for e in of_category(events, "cpu_op") if e["name"] == "aten::conv2d"), key=lambda e: e["ts"])
    time = dict.fromkeys(range(len(calls)), 0.0)
    for kernel in of_category(events, "kernel", "gpu_memset", "gpu_memcpy"):
        launch = launches[kernel["args"]["correlation"]]
        for place, call in enumerate(calls):
            if call["tid"] == launch["tid"] and call["ts"] <= launch["ts"] <= call["ts"] + call["dur"]:
                time[place] += kernel["dur"]
    assert len(calls) == 3 * 53
    wanted = np.array(list(time.values())).reshape(3, 53).min(axis=0) * 1e-6
    graph = load_graph("zoo:resnet50_v1", "training", None)
    found = match(graph, read_trace(path))
    convolutions = [op for op, name in enumerate(graph.op_type) if name == "aten.convolution"]
    assert found.durations[convolutions] == pytest.approx(wanted)
    assert found.steps == 3
    assert found.matched_ops > 0.99
    assert 0.9 < found.matched_time < 1.0
    # The zoo's ResNet pools in its shortcuts as the paper's did, this one does not: it is told, not hidden.
    assert "max_pool2d_with_indices" in found.inexact_types
    assert ("aten._foreach_add_", 1) not in found.unmatched_types
    assert any(name == "aten::_foreach_add_" for name, _, _ in found.unmatched_calls)


# ---------------------------------------------------------------- traces that torch makes here


def small_step() -> TrainingStep:
    module = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(16, 10),
    )
    return TrainingStep(name="small", module=module, inputs=(torch.randn(8, 3, 16, 16),), loss=default_loss)


@pytest.fixture(scope="module")
def graph() -> Graph:
    return trace_torch(small_step, mode="training", numerics=Numerics(cuda=False))


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three eager training steps, with an optimizer, marked as steps."""
    path = tmp_path_factory.mktemp("eager") / "trace.json"
    step = small_step()
    optimizer = torch.optim.SGD(step.module.parameters(), lr=0.1, momentum=0.9)
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        schedule=schedule(wait=0, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda run: run.export_chrome_trace(str(path)),
    ) as run:
        for _ in range(4):
            optimizer.zero_grad()
            step.run().backward()
            optimizer.step()
            run.step()
    return path


def costly(graph: Graph) -> list[int]:
    return [op for op in range(len(graph)) if graph.kind[op] == COMPUTE and graph.estimate[op] != "free"]


def test_an_eager_run_is_matched_call_by_call(graph: Graph, eager: Path) -> None:
    trace = read_trace(eager)
    found = match(graph, trace)
    assert found.steps == trace.steps == 3
    assert found.matched_ops == 1.0
    assert found.unmatched_types == ()
    assert 0.0 < found.matched_time < 1.0
    assert np.isfinite(found.durations[costly(graph)]).all()
    # The optimizer's calls are nobody's ops, though the graph has mul and add of its own.
    listed = {name for name, _, _ in found.unmatched_calls}
    assert {"aten::mul_", "aten::add_"} & listed or {"aten::_foreach_mul_", "aten::_foreach_add_"} & listed
    # The two convolutions by hand: the least of the three steps' aten::convolution, a name the eager run nests.
    events = json.loads(eager.read_text())["traceEvents"]
    times = [event["dur"] for event in sorted(events, key=lambda e: e["ts"]) if event["name"] == "aten::conv2d"]
    wanted = np.array(times).reshape(3, 2).min(axis=0) * 1e-6
    of_convolution = [op for op, name in enumerate(graph.op_type) if name == "aten.convolution"]
    assert found.durations[of_convolution] == pytest.approx(wanted)


def test_another_number_of_calls_gives_its_type_the_mean(graph: Graph, eager: Path, tmp_path: Path) -> None:
    """One more pooling in a step: every other type keeps its times, this one takes the steps that have as many as ops."""
    document = json.loads(eager.read_text())
    plain = match(graph, read_trace(eager))
    pools = [e for e in document["traceEvents"] if e["name"] == "aten::max_pool2d"]
    document["traceEvents"] += [{**pool, "ts": pool["ts"] + pool["dur"] + 0.25, "dur": 0.125} for pool in pools]
    found = match(graph, read_trace(saved(tmp_path / "more.json", document)))
    assert found.inexact_types == ("max_pool2d_with_indices",)
    (pool,) = [op for op, name in enumerate(graph.op_type) if name == "aten.max_pool2d_with_indices"]
    assert found.durations[pool] == pytest.approx(min((e["dur"] + 0.125) / 2 for e in pools) * 1e-6)
    rest = [op for op in costly(graph) if op != pool]
    np.testing.assert_array_equal(found.durations[rest], plain.durations[rest])


DEVICE = Device(
    name="test", title="test", peak_flops={"float32": 1e12}, memory_bytes_per_s=1e11, memory_gib=16, source="none"
)
NETWORK = Network(bandwidth_bytes_per_s=1e9, latency_s=1e-5)


def test_apply_fills_the_rest_from_the_roofline(graph: Graph, eager: Path, tmp_path: Path) -> None:
    """Take one type out of the trace: its ops get the roofline's time, scaled as the others came out."""
    document = json.loads(eager.read_text())
    gone = {"aten::linear", "aten::addmm"}
    document["traceEvents"] = [e for e in document["traceEvents"] if e.get("name") not in gone]
    found = match(graph, read_trace(saved(tmp_path / "t.json", document)))
    assert found.unmatched_types == (("aten.addmm", 1),)
    roofline = estimate(graph, datasheet(DEVICE), NETWORK)
    timed = apply(graph, found, roofline)
    ratios = [
        found.durations[op] / roofline.duration_s[op]
        for op in costly(graph)
        if found.durations[op] > 0 and roofline.duration_s[op] > 0
    ]
    for op in range(len(graph)):
        if graph.kind[op] != COMPUTE:
            assert (timed.duration_s[op], timed.estimate[op]) == (roofline.duration_s[op], "rule")
        elif graph.estimate[op] == "free":
            assert (timed.duration_s[op], timed.estimate[op]) == (0.0, "free")
        elif graph.op_type[op] == "aten.addmm":
            assert timed.estimate[op] == "default"
            assert timed.duration_s[op] == pytest.approx(float(np.median(ratios)) * roofline.duration_s[op])
        else:
            assert (timed.duration_s[op], timed.estimate[op]) == (found.durations[op], "measured")


@pytest.mark.parametrize(("relus", "share"), [(1, 1.0), (4, 0.4)])
def test_a_type_called_too_often_matches_by_its_counts(tmp_path: Path, relus: int, share: float) -> None:
    """Of 10 us, 8 are the ReLUs' of which the graph has one: 2/10 + 8/10 * 1/4. Less than 45 % is refused."""
    graph = compute_graph(["aten.convolution", "aten.relu"])
    events = [
        operator("aten::convolution", 0, 2),
        operator("Optimizer.step#SGD.step", 50, 90),
        operator("aten::mul_", 60, 70),
    ]
    events += [operator("aten::relu", 10 + 8 * place, 8 / relus) for place in range(relus)]
    found = match(graph, read_trace(saved(tmp_path / "t.json", [annotation("ProfilerStep#1", 0, 200), *events])))
    assert found.matched_time == pytest.approx(share)
    roofline = estimate(graph, datasheet(DEVICE), NETWORK)
    if share == 1.0:
        assert apply(graph, found, roofline).duration_s[2] == pytest.approx(8e-6)
    else:
        with pytest.raises(InputError, match=r"only 40% of its time .* another model; .* with 45% of its time matched"):
            apply(graph, found, roofline)


def test_a_trace_of_another_model_is_an_error(tmp_path: Path) -> None:
    graph = compute_graph(["aten.convolution", "aten.relu"])
    found = match(graph, read_trace(saved(tmp_path / "t.json", [operator("fbgemm::lookup", 0, 5)])))
    assert found.matched_ops == 0.0
    with pytest.raises(InputError, match=r"no op of g occurs in the trace \(it has fbgemm::lookup\)"):
        apply(graph, found, estimate(graph, datasheet(DEVICE), NETWORK))


# ---------------------------------------------------------------- traces made by hand


def saved(path: Path, document: Any) -> Path:
    return write(path, json.dumps(document))


def operator(name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> Event:
    return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 9, "tid": tid, "ts": ts, "dur": dur, "args": args}


def launch(ts: float, correlation: int, tid: int = 1, name: str = "cudaLaunchKernel", dur: float = 1.0) -> Event:
    event = operator(name, ts, dur, tid, correlation=correlation)
    return {**event, "cat": "cuda_runtime"}


def kernel(name: str, ts: float, dur: float, correlation: int, stream: int = 7, **args: Any) -> Event:
    event = operator(name, ts, dur, stream, correlation=correlation, device=0, **{"External id": correlation}, **args)
    return {**event, "cat": "kernel", "pid": 0}


def annotation(name: str, ts: float, dur: float, tid: int = 1) -> Event:
    return {**operator(name, ts, dur, tid), "cat": "user_annotation"}


def compute_graph(types: list[str]) -> Graph:
    ops = [Op(name="recv/w", kind="recv", resource="channel:0", size_bytes=4.0, parameter="w")]
    ops += [
        Op(name=f"op{i}", kind="compute", op_type=name, inputs=("recv/w",), flops=1e6, size_bytes=8.0, estimate="rule")
        for i, name in enumerate(types)
    ]
    return Graph.from_ops("g", "inference", ops)


STEP = [
    operator("aten::conv2d", 10, 20),
    operator("aten::convolution", 12, 15),
    launch(14, 1),
    kernel("conv", 100, 50, 1),
    operator("aten::relu_", 40, 5),
    launch(42, 2),
    kernel("relu", 150, 8, 2),
]


def test_document_forms_read_the_same(tmp_path: Path) -> None:
    """Bare list, keys before and after, gzip under any name, strings for numbers."""
    wanted = {
        "aten::conv2d": (1, pytest.approx(20), pytest.approx(50)),
        "aten::relu_": (1, pytest.approx(5), pytest.approx(8)),
    }
    assert calls_of(read_trace(saved(tmp_path / "a.json", {"traceEvents": STEP, "schemaVersion": 1}))) == wanted
    forms: dict[str, Any] = {
        "bare": STEP,
        "after": {"distributedInfo": {"backend": "nccl"}, "x": [1, {"traceEvents": 3}], "traceEvents": STEP},
        "before": {"traceEvents": STEP, "distributedInfo": {}, "last": 1.5},
        "strings": [{**event, "ts": str(event["ts"]), "dur": f"{event['dur']:.3f}"} for event in STEP],
        "shuffled": random.Random(1).sample(STEP, k=len(STEP)),
    }
    for name, document in forms.items():
        assert calls_of(read_trace(saved(tmp_path / f"{name}.json", document))) == wanted, name
    hidden = tmp_path / "compressed.json"
    hidden.write_bytes(gzip.compress(json.dumps(STEP).encode()))
    assert calls_of(read_trace(hidden)) == wanted


def test_missing_fields_are_no_errors(tmp_path: Path) -> None:
    bare: list[Event] = [
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 1},
        {"ph": "X", "cat": "kernel", "name": "k", "ts": 5, "dur": 2, "args": None},
        {
            **{"ph": "X", "cat": "kernel", "name": "k", "ts": 5},
            **{"dur": 2, "args": {"External id": "x", "correlation": 2**70}},
        },
        {"ph": "M", "name": "process_name"},
        {"name": "no phase"},
        {},
        {"ph": "E", "ts": 3},
        {"ph": "B", "ts": 3, "tid": 5},
    ]
    trace = read_trace(saved(tmp_path / "t.json", bare))
    assert calls_of(trace) == {"aten::add": (1, 0.0, 0.0)}


def test_steps_take_the_least_and_communication_is_not_compute(tmp_path: Path) -> None:
    """Two steps, backward on another thread, both NCCL namings, host waits and sync rows."""
    events = [
        annotation("ProfilerStep#3", 0, 100),
        annotation("ProfilerStep#4", 100, 100),
        operator("aten::relu", 500, 9),  # outside the steps: no part of it
    ]
    for base, conv, relu in ((0, 50, 8), (100, 30, 9)):
        number = base + 10
        events += [
            operator("aten::conv2d", base + 10, 20),
            operator("aten::cudnn_convolution", base + 12, 15),
            launch(base + 14, number),
            kernel("conv", base + 1000, conv, number),
            operator("aten::relu", base + 40, 20, tid=2),
            launch(base + 42, number + 1, tid=2),
            kernel("relu", base + 1060, relu, number + 1),
            operator("aten::item", base + 70, 25),
            launch(base + 71, number + 5, name="cudaStreamSynchronize", dur=20),
            kernel("Stream Sync", base + 1000, 99, number + 5),
        ]
    events += [
        operator("aten::exp", 62, 3),
        launch(63, 800),
        kernel("exp", 1075, 3, 800),
        launch(15, 900),  # inside the first convolution, as a functional collective may be: the network's time, not its
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 1040, 40, 900, stream=9),
        kernel("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclWork*)", 2000, 10, 901, stream=9),
        {**kernel("Memset (Device)", 3000, 3, 902), "cat": "gpu_memset"},
    ]
    path = saved(tmp_path / "t.json", events)
    trace, steps = read_trace(path), read_steps(path)
    assert steps.step_time_s * 1e6 == pytest.approx([100, 100])
    # Computing: 1000-1050, 1060-1068, 1075-1078, 1100-1130, 1160-1169. The all-reduce 1040-1080 is bare in 1050-1060,
    # 1068-1075 and 1078-1080. It runs after the last step began, the GPU being late; the all-gather, which no step
    # launched, is none's.
    assert steps.communication_s * 1e6 == pytest.approx([0, 40])
    assert steps.exposed_s * 1e6 == pytest.approx([0, 10 + 7 + 2])
    found = match(compute_graph(["aten.convolution", "aten.relu", "aten.tanh"]), trace)
    assert found.durations[1:3] * 1e6 == pytest.approx([30, 8])
    assert np.isnan(found.durations[[0, 3]]).all()
    assert found.unmatched_types == (("aten.tanh", 1),)
    assert found.matched_ops == pytest.approx(2 / 3)
    assert found.matched_time == pytest.approx(97 / 100)
    assert found.unmatched_calls[0] == ("aten::exp", 1, pytest.approx(3e-6))
    assert calls_of(trace)["aten::conv2d"][2] == pytest.approx(80)
    outside = trace.marked(lambda name: name == "aten::relu") & (trace.spans.start_s > 400e-6)
    assert trace.span_step[outside].tolist() == [-1]
    (waiting,) = np.flatnonzero(trace.marked(lambda name: name == "aten::item"))[:1]
    assert trace.time_s[waiting] * 1e6 == pytest.approx(5)


@pytest.mark.parametrize(
    ("graph_type", "trace_type"),
    [
        ("aten.convolution.default", "aten::_convolution"),
        ("aten.convolution", "aten::conv2d"),
        ("aten.native_batch_norm", "aten::cudnn_batch_norm"),
        (
            "aten._scaled_dot_product_flash_attention_for_cpu_backward",
            "aten::_scaled_dot_product_efficient_attention_backward",
        ),
        ("Conv", "aten::conv2d"),
        ("Relu", "aten::relu_"),
        ("aten._softmax.default", "aten::softmax"),
    ],
)
def test_types_that_are_one(graph_type: str, trace_type: str) -> None:
    assert normal_type(graph_type) == normal_type(trace_type)


def test_types_that_are_not_one() -> None:
    names = ["aten::convolution", "aten::convolution_backward", "aten::mm", "aten::bmm", "fbgemm::mm", "aten::relu"]
    names += ["aten::scaled_dot_product_attention", "aten::_scaled_dot_product_flash_attention_backward", "aten::addmm"]
    assert len({normal_type(name) for name in names}) == len(names)


# ---------------------------------------------------------------- bad input


GOOD = json.dumps({"schemaVersion": 1, "traceEvents": STEP})


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is empty"),
        (b"   \n", "is not JSON, or is cut off"),
        (GOOD[:-40].encode(), "is not JSON, or is cut off"),
        (gzip.compress(GOOD.encode(), mtime=0)[:-30], "is not a whole gzip file"),
        (gzip.compress(GOOD.encode(), mtime=0)[:12] + b"\xff" * 40, "is not a whole gzip file"),
        (b'{"traceEvents": []}', "has no cpu_op and no kernel events (found: none at all)"),
        (b'{"traceEvents": 3}', "found: none at all"),
        (b'"text"', "found: none at all"),
        (b"[1, 2]", "event 0 is no JSON object"),
        (b'{"traceEvents": [{"ph": nope, "name": "something that is long enough"}]}', "is not JSON"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe\xfa", "is not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (json.dumps([{"ph": "M", "name": "process_name"}]).encode(), "found: M"),
    ],
)
def test_bad_files_are_one_line(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_trace(path)
    assert problem in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", ["inf", -1, "soon", "nan", True, [3]])
@pytest.mark.parametrize("field", ["ts", "dur"])
def test_bad_times_name_their_event(tmp_path: Path, field: str, bad: Any) -> None:
    events = [operator("aten::add", 1, 2), {**operator("aten::mul", 5, 2), field: bad}]
    path = saved(tmp_path / "t.json", {"traceEvents": events})
    if field == "ts" and bad == -1:
        assert len(read_trace(path).spans) == 2  # a clock may start anywhere
        return
    with pytest.raises(InputError, match=rf"event 1 \(aten::mul\): {field} is "):
        read_trace(path)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path, problem in ((tmp_path / "none.json", "no such file"), (tmp_path, "is a folder")):
        with pytest.raises(InputError, match=problem):
            read_trace(path)


# ---------------------------------------------------------------- parts against brute force


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(json_values, max_size=8), st.booleans())
def test_streaming_equals_loading(tmp_path_factory: pytest.TempPathFactory, events: list[Any], bare: bool) -> None:
    path = tmp_path_factory.getbasetemp() / "stream.json"
    saved(path, events if bare else {"other": [1, {"traceEvents": 3}], "traceEvents": events, "last": 1.5})
    assert list(read_events(path)) == json.loads(json.dumps(events), parse_float=Decimal)


def test_control_characters_in_names(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps([operator("aten::add", 1, 2)]).replace("add", "a\x01b"))
    assert [event["name"] for event in read_events(path)] == ["aten::a b"]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 15)), max_size=25))
def test_busy_time_is_the_cells_that_are_covered(intervals: list[tuple[int, int]]) -> None:
    cells = {cell for start, length in intervals for cell in range(start, start + length)}
    starts = np.array([start for start, _ in intervals], dtype=np.float64)
    lengths = np.array([length for _, length in intervals], dtype=np.float64)
    assert np.diff(union(np.stack([starts, starts + lengths])), axis=0).sum() == len(cells)


@st.composite
def nested(draw: Callable[..., Any]) -> list[tuple[int, float, float]]:
    """(thread, start, duration) of spans that nest on each thread, in any order."""
    rows: list[tuple[int, float, float]] = []

    def fill(thread: int, first: int, last: int, depth: int) -> None:
        at = first
        while depth < 4 and at + 2 <= last and draw(st.booleans()):
            start = draw(st.integers(at, last - 2))
            end = draw(st.integers(start + 2, last))
            rows.append((thread, float(start), float(end - start)))
            fill(thread, start + 1, end - 1, depth + 1)
            at = end + 1

    for thread in range(2):
        fill(thread, 0, 60, 0)
    order: list[tuple[int, float, float]] = draw(st.permutations(rows))
    return order


@given(
    nested(), st.lists(st.tuples(st.integers(0, 1), st.integers(0, 60)), max_size=8), st.randoms(use_true_random=False)
)
def test_nesting_equals_looking_at_every_pair(
    rows: list[tuple[int, float, float]], moments: list[tuple[int, int]], rng: random.Random
) -> None:
    thread = np.array([row[0] for row in rows], dtype=np.int32)
    start, duration = (np.array([row[column] for row in rows], dtype=np.float64) for column in (1, 2))
    spans, order = TraceSpans.build(np.arange(len(rows), dtype=np.int32), thread, start, duration)
    sorted_rows = [rows[place] for place in order]
    marked = np.array([rng.random() < 0.4 for _ in rows], dtype=bool)
    amount = np.array([rng.randrange(9) for _ in rows], dtype=np.float64)

    def holds(outer: int, inner: int) -> bool:
        a, b = sorted_rows[outer], sorted_rows[inner]
        return outer != inner and a[0] == b[0] and a[1] <= b[1] and b[1] + b[2] <= a[1] + a[2]

    size = range(len(rows))
    around = {i: [j for j in size if holds(j, i)] for i in size}
    shortest = lambda found: min(found, key=lambda j: sorted_rows[j][2], default=-1)  # noqa: E731
    assert spans.parent.tolist() == [shortest(around[i]) for i in size]
    assert spans.below(marked).tolist() == [any(marked[j] for j in around[i]) for i in size]
    assert spans.with_nested(amount).tolist() == [
        amount[i] + sum(amount[j] for j in size if i in around[j]) for i in size
    ]
    asked = spans.innermost(
        np.array([where for where, _ in moments], dtype=np.int32), np.array([at for _, at in moments], dtype=np.float64)
    )
    for (where, at), found in zip(moments, asked, strict=True):
        holding = [j for j in size if sorted_rows[j][0] == where and sorted_rows[j][1] <= at <= sum(sorted_rows[j][1:])]
        assert found == shortest(holding)


def test_rounded_times_neither_nest_neighbours_nor_lose_children(tmp_path: Path) -> None:
    """Times cut to microseconds: a child may end 1 us late; a neighbour that starts in the last 1 us is none."""
    events = [
        operator("aten::linear", 0, 10),
        operator("aten::addmm", 3, 8),
        operator("aten::add", 20, 10.25),
        operator("aten::mul", 30, 10),
    ]
    trace = read_trace(saved(tmp_path / "t.json", events))
    assert sorted(calls_of(trace)) == ["aten::add", "aten::linear", "aten::mul"]


# ---------------------------------------------------------------- memory


def test_memory_is_a_part_of_the_file(tmp_path: Path) -> None:
    """Operators, launches and kernels with their usual arguments: less than the file is kept, also while it is sorted."""
    pad = {"Sequence number": 1, "Fwd thread id": 0, "Input Dims": [[32, 3, 64, 64], [64, 3, 3, 3]], "Ev Idx": 1}
    path = tmp_path / "large.json"
    with path.open("w") as out:
        out.write('{"traceEvents": [')
        for at in range(0, 240_000, 40):
            step = [operator("aten::conv2d", at, 30, **pad), operator("aten::convolution", at + 1, 28, **pad)]
            step += [launch(at + 5, at + 1), kernel("void at::native::conv", at + 20, 25, at + 1, grid=[512, 1, 1])]
            out.write(json.dumps(step)[1:-1] + ",")
        out.write('{"ph": "M"}]}')
    tracemalloc.start()
    assert len(read_trace(path).spans) == 12_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.6 * path.stat().st_size


def test_match_is_complete_for_every_op(graph: Graph, eager: Path) -> None:
    found: Match = match(graph, read_trace(eager))
    transfers = graph.kind != COMPUTE
    assert np.isnan(found.durations[transfers]).all()
    assert not found.measured[transfers].any()
    assert set(np.flatnonzero(found.measured)) == set(costly(graph))
