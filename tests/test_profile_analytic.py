"""Predicting a GPU that is not here: work against direct traces and the allocator, times against closed forms."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ddltool.analyzers.goodput.analytic import (
    DATASHEET,
    Calibration,
    Link,
    Placement,
    Target,
    memory_limit_batch,
    op_times_s,
    peak_memory_bytes,
    predict,
)
from ddltool.analyzers.goodput.analytic_calibration import CALIBRATION, HELD_OUT, error_range
from ddltool.analyzers.goodput.fit import fit
from ddltool.analyzers.goodput.observations import from_frame
from ddltool.analyzers.goodput.step_work import StepWork, WorkCurve, measure_work
from ddltool.analyzers.goodput.throughput import grad_time_s
from ddltool.analyzers.tracing.step import TrainingStep, default_loss
from ddltool.commands.profile_analytic import AnalyticRequest, predict_profile, profile_analytic
from ddltool.commands.sources import resolve_step, training_step
from ddltool.device import Device
from ddltool.errors import Infeasible, InputError
from ddltool.graph import Graph, Op
from ddltool.profile import read_profile

ROOT = Path(__file__).resolve().parents[1]
LINK = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-4)
DEVICE = Device(
    name="test",
    title="test",
    peak_flops={"float32": 1e12, "tf32": 8e12, "float16": 16e12},
    memory_bytes_per_s=1e11,
    memory_gib=16,
    source="none",
)
TARGET = Target(device=DEVICE, local=LINK, network=LINK, optimizer="sgd")
ALONE = Placement(num_nodes=1, num_replicas=1)


def zoo_curve(name: str, *sizes: int) -> WorkCurve:
    return measure_work(lambda: resolve_step(f"zoo:{name}"), sizes)


class Pairs(nn.Module):
    """Similarities of all pairs of samples: the work grows with the square of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x)
        return (made @ made.T).logsumexp(1)


def pairs_step() -> TrainingStep:
    return TrainingStep(name="pairs", module=Pairs(), inputs=(torch.zeros(1, 64),), loss=default_loss)


@pytest.mark.parametrize("name", ["cifarnet", "resnet32", "bert_small"])
def test_the_work_between_two_traces_is_that_of_a_direct_trace(name: str) -> None:
    curve, direct = zoo_curve(name, 3), zoo_curve(name, 24).traced[24]
    assert curve.affine
    assert curve.error < 1e-9
    made = curve.at(24)
    np.testing.assert_allclose(made.graph.flops, direct.graph.flops, rtol=1e-9)
    np.testing.assert_allclose(made.graph.size_bytes, direct.graph.size_bytes, rtol=1e-9)
    np.testing.assert_allclose(made.live_bytes, direct.live_bytes, rtol=1e-9)


def test_work_that_is_not_affine_is_traced_at_every_size() -> None:
    curve = measure_work(pairs_step, [8, 16, 32])
    assert not curve.affine
    for size in (8, 16, 32):
        assert 2 * size * size * 32 in curve.at(size).graph.flops
    with pytest.raises(InputError, match="was not traced"):
        curve.at(20)


def test_three_traces_tell_a_square_from_a_line() -> None:
    assert measure_work(pairs_step, [64]).error > 0.01
    assert zoo_curve("cifarnet", 64).error == 0.0
    assert not measure_work(pairs_step, [2]).affine


def allocator_peak(name: str, batch: int, folder: Path) -> float:
    """Return the peak bytes of tensors in a real step on the CPU, as torch's allocator reports them."""
    step = training_step(f"zoo:{name}", batch)
    module = step.module.train()

    def run() -> None:
        for parameter in module.parameters():
            parameter.grad = None
        step.loss(module(*step.inputs)).backward()

    run()
    for parameter in module.parameters():
        parameter.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    recorded.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    held = [*module.parameters(), *module.buffers(), *step.inputs]
    base = sum(tensor.numel() * tensor.element_size() for tensor in held)
    return float(np.cumsum([size for _, size in changes]).max()) + base


@pytest.mark.parametrize("name", ["cifarnet", "resnet32", "bert_small"])
def test_the_peak_of_live_bytes_is_the_allocators(name: str, tmp_path: Path) -> None:
    estimated = float(zoo_curve(name, 8).at(8).live_bytes.max())
    assert estimated == pytest.approx(allocator_peak(name, 8, tmp_path), rel=0.05)


def little_graph(**sizes: float) -> Graph:
    """A convolution, a matrix product, an addition and a view; one parameter whose gradient is ready last."""
    ops = [Op(name="recv/w", kind="recv", resource="channel:0", size_bytes=4e6, parameter="w")]
    for name, op_type in (
        ("forward/conv", "aten.convolution"),
        ("forward/mm", "aten.mm"),
        ("backward/add", "aten.add"),
    ):
        source = (ops[-1].name,)
        ops.append(
            Op(name=name, kind="compute", flops=1e10, size_bytes=1e6, inputs=source, op_type=op_type, estimate="rule")
        )
    ops.append(Op(name="backward/view", kind="compute", inputs=("backward/add",), op_type="aten.view", estimate="free"))
    ops.append(
        Op(
            name="send/w",
            kind="send",
            resource="channel:0",
            size_bytes=4e6,
            parameter="w",
            inputs=("backward/view",),
        )
    )
    return Graph.from_ops("little", "training", ops, batch_size=2)


def little_curve() -> WorkCurve:
    work = StepWork(graph=little_graph(), live_bytes=np.array([5e6, 9e6, 7e6]))
    return WorkCurve(low=work, high=work, affine=False, error=0.0, traced={2: work})


@pytest.mark.parametrize(
    ("arithmetic", "convolution", "product"),
    [("default", 8e12, 1e12), ("float32", 1e12, 1e12), ("tf32", 8e12, 8e12), ("mixed", 16e12, 16e12)],
)
def test_each_arithmetic_runs_at_its_own_peak(arithmetic: str, convolution: float, product: float) -> None:
    times = op_times_s(little_graph(), replace(TARGET, arithmetic=arithmetic))
    np.testing.assert_allclose(times[1:3], [1e10 / convolution, 1e10 / product])
    assert times[4] == 0
    assert times[0] == 0


def test_shares_and_launches_by_hand() -> None:
    calibration = Calibration(
        vector_share=0.5, matrix_unit_share=0.25, bandwidth_share=0.1, per_op_s=1e-3, per_parameter_s=1e-2
    )
    target = replace(TARGET, calibration=calibration)
    times = op_times_s(little_graph(), target)
    np.testing.assert_allclose(times[1:4], np.array([1e10 / 2e12, 1e10 / 0.5e12, 1e10 / 0.5e12]) + 1e-3)
    (step,) = predict(little_curve(), target, [2], [ALONE])
    update = 1e-2 + 3 * 4e6 / 1e10  # host work for one parameter; read it, read its gradient, write it
    assert step.step_time_s == pytest.approx(times.sum() + update)
    assert step.sync_time_s == 0
    assert step.launch_s == pytest.approx(3e-3 + 1e-2)


@settings(deadline=None)
@given(replicas=st.integers(2, 64), nodes=st.integers(1, 8), rate=st.floats(1e6, 1e12), delay=st.floats(0, 1))
def test_one_bucket_that_is_ready_last_costs_the_whole_ring(
    replicas: int, nodes: int, rate: float, delay: float
) -> None:
    network = Link(bandwidth_bytes_per_s=rate, latency_s=delay)
    nodes = min(nodes, replicas)
    place = Placement(num_nodes=nodes, num_replicas=replicas)
    (step,) = predict(little_curve(), replace(TARGET, network=network), [2], [place])
    link = network if nodes > 1 else LINK
    ring = 2 * (replicas - 1) * (link.latency_s + 4e6 / replicas / link.bandwidth_bytes_per_s)
    assert step.sync_time_s == pytest.approx(ring, rel=1e-6, abs=1e-9)


def test_synchronisation_hides_behind_backward() -> None:
    curve = zoo_curve("resnet32", 64)
    fast, slow = (
        predict(
            curve,
            replace(TARGET, network=Link(bandwidth_bytes_per_s=rate, latency_s=0.0)),
            [64],
            [ALONE, Placement(num_nodes=2, num_replicas=2)],
        )
        for rate in (1e12, 1e6)
    )
    size = curve.at(64).graph.parameter_bytes
    assert fast[1].sync_time_s < 0.01 * size / 1e9 + fast[0].step_time_s * 0.01
    whole = size / 1e6  # a ring of two moves the whole size once
    assert 0.9 * whole - slow[0].step_time_s < slow[1].sync_time_s <= whole


def test_memory_by_hand() -> None:
    work = little_curve().at(2)
    assert peak_memory_bytes(work, TARGET) == 3 * 4e6  # the update needs more than the pass
    assert peak_memory_bytes(work, replace(TARGET, optimizer="adam")) == 5 * 4e6
    assert peak_memory_bytes(work, TARGET, num_replicas=2) == 4 * 4e6
    big = StepWork(graph=work.graph, live_bytes=np.array([100e6]))
    assert peak_memory_bytes(big, TARGET) == 100e6
    assert peak_memory_bytes(big, replace(TARGET, arithmetic="mixed")) == 4e6 + 48e6 + 2e6


def test_the_memory_limit_is_the_last_batch_that_fits() -> None:
    curve = zoo_curve("bert_small", 8)
    for gib in (2, 5, 16):
        target = replace(TARGET, device=DEVICE.model_copy(update={"memory_gib": gib}))
        limit, usable = memory_limit_batch(curve, target), gib * 2**30 - 2**30
        assert peak_memory_bytes(curve.at(limit), target) <= usable < peak_memory_bytes(curve.at(limit + 1), target)
    small = replace(TARGET, device=DEVICE.model_copy(update={"memory_gib": 1.01}))
    assert memory_limit_batch(curve, small) == 0


def test_rows_say_that_they_are_predicted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "profile.csv"
    request = AnalyticRequest(
        source="zoo:cifarnet", device="t4", batch_sizes=(8, 32, 128), replicas=(1, 2, 8), gpus_per_node=4
    )
    profile_analytic(request, out, True)
    document = json.loads(capsys.readouterr().out)
    assert document["predicted"] is True
    assert {row["origin"] for row in document["rows"]} == {"analytic"}
    assert set(document["devices"]["T4"]) == {"saturation_batch", "memory_limit_batch", "launch_overhead_s"}
    frame = read_profile(out)
    assert frame[["num_nodes", "num_replicas"]].drop_duplicates().to_numpy().tolist() == [[1, 1], [1, 2], [2, 8]]
    assert (frame["predicted_low_s"] < frame["step_time_s"]).all()
    assert (frame["step_time_s"] < frame["predicted_high_s"]).all()
    wide, narrow = (frame[(frame["num_replicas"] > 1) == many] for many in (True, False))
    ranges = [(part["predicted_high_s"] / part["predicted_low_s"]).max() for part in (wide, narrow)]
    assert ranges[0] > ranges[1]
    profile_analytic(request, None, False)
    text = capsys.readouterr().out
    assert "predicted, not measured" in text
    assert "How sure: on 3 applications x 3 GPUs" in text


def test_a_fit_reads_predicted_rows() -> None:
    found = predict_profile(AnalyticRequest(source="zoo:cifarnet", device="V100", batch_sizes=(8, 32, 128, 512)))
    rows = from_frame(found.frame, "predicted")
    params = fit(rows).params
    np.testing.assert_allclose(np.asarray(grad_time_s(params, rows.local_batch_size)), rows.step_time_s, rtol=0.05)
    assert (found.frame["step_time_s"].diff().dropna() > 0).all()


def test_batches_beyond_the_memory(capsys: pytest.CaptureFixture) -> None:
    request = AnalyticRequest(source="zoo:bert_small", device="T4", batch_sizes=(16, 10**6))
    found = predict_profile(request)
    assert found.left_out == (10**6,)
    assert found.frame["local_batch_size"].tolist() == [16]
    profile_analytic(request, None, False)
    assert "left out: local batch 1000000 does not fit 16 GiB" in capsys.readouterr().err
    with pytest.raises(Infeasible, match="local batch 1000000 of zoo:bert_small does not fit the 16 GiB of a T4"):
        predict_profile(replace(request, batch_sizes=(10**6,)))
    every = predict_profile(replace(request, batch_sizes=None)).frame["local_batch_size"].tolist()
    assert every == [2**power for power in range(len(every))]
    assert every[-1] <= found.memory_limit_batch < 2 * every[-1]


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"device": "T-4"}, 'unknown device .T-4.; did you mean "T4"'),
        ({"device": "cpu-core"}, "is no GPU"),
        ({"source": "zoo:nothing"}, "unknown model"),
        ({"source": "model.onnx"}, "holds one batch size only"),
        ({"arithmetic": "float16"}, "--arithmetic: unknown 'float16'"),
        ({"optimizer": "adamw"}, '--optimizer: unknown .adamw.; did you mean "adam"'),
        ({"batch_sizes": (0,)}, "--batch-sizes: 0 is out of range"),
        ({"batch_sizes": (10**12,)}, "--batch-sizes: 1000000000000 is out of range"),
        ({"replicas": (0,)}, "--replicas: 0 is out of range"),
        ({"gpus_per_node": 0}, "--gpus-per-node: 0 is out of range"),
        ({"bandwidth": "0Gbit"}, "--bandwidth: .*not a usable bandwidth"),
        ({"latency": "nan"}, "--latency"),
        ({"per_parameter": "-1us"}, "--per-parameter"),
    ],
)
def test_bad_requests_get_one_line(changes: dict[str, object], wanted: str, tmp_path: Path) -> None:
    request = AnalyticRequest(source="zoo:cifarnet", device="T4", batch_sizes=(8,))
    out = tmp_path / "profile.csv"
    with pytest.raises(InputError, match=wanted) as raised:
        profile_analytic(replace(request, **changes), out, False)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)
    assert not out.exists()


def test_a_model_that_does_not_trace(tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text(
        "import torch\n"
        "class Odd(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__(); self.w = torch.nn.Parameter(torch.zeros(3))\n"
        "    def forward(self, x):\n        return x * self.w if x.sum() > 0 else x - self.w\n"
        "def make():\n    return Odd(), torch.zeros(1, 3)\n"
    )
    with pytest.raises(InputError, match="cannot be traced") as raised:
        predict_profile(AnalyticRequest(source=f"{path}:make", device="T4", batch_sizes=(8,)))
    assert "\n" not in str(raised.value)


def test_unseen_devices_get_the_wider_range() -> None:
    known, unknown = error_range("A100", several_replicas=False), error_range("H100", several_replicas=False)
    assert known.device_seen
    assert not unknown.device_seen
    assert (known.low, known.high) == (min(e.low for e in HELD_OUT), max(e.high for e in HELD_OUT))
    assert unknown.low <= known.low
    assert unknown.high >= known.high
    low, high = known.interval_s(1.0)
    assert low == 1 / known.high
    assert high == 1 / known.low


def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_analytic", ROOT / "benchmarks" / "bench_analytic.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_analytic"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_shipped_figures_are_those_of_the_benchmark(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    module = bench()
    monkeypatch.setattr(module, "DATA", shared_data / "sia-sosp23" / "traces")
    cells = module.read_cells()
    quick = [module.Quick(cell) for cell in cells]
    module.check_quick(cells, quick)
    made = module.calibrate(quick)
    for name in ("vector_share", "matrix_unit_share", "bandwidth_share", "per_op_s", "per_parameter_s"):
        assert getattr(CALIBRATION, name) == pytest.approx(getattr(made, name), rel=0.05)
    held = module.folds(cells, quick, lambda other, cell: other.application != cell.application)
    both = module.folds(
        cells, quick, lambda other, cell: other.application != cell.application and other.device != cell.device
    )
    for cell, ratios, unseen in zip(cells, held, both, strict=True):
        (entry,) = [e for e in HELD_OUT if (e.application, e.device) == (cell.application, cell.device)]
        assert entry.mape == pytest.approx(abs(ratios - 1).mean(), abs=0.02)
        assert (entry.low, entry.high) == pytest.approx((ratios.min(), ratios.max()), abs=0.03)
        assert entry.unseen_device_mape == pytest.approx(abs(unseen - 1).mean(), abs=0.02)
        assert (entry.unseen_device_low, entry.unseen_device_high) == pytest.approx(
            (unseen.min(), unseen.max()), abs=0.03
        )
        # What really ran on the device fits by the estimate, too.
        target = cell.target(DATASHEET)
        assert memory_limit_batch(cell.curve, target) >= max(cell.batches)
