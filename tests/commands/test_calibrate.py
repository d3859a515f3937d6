"""``ddltool calibrate``: a device is found from rows that it made, and rows that are not its own, or few, are not believed."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ddltool.analyzers.job.goodput.imported_rows import measured_rows
from ddltool.analyzers.step.communication.fabrics import bus_bandwidth
from ddltool.analyzers.step.costs.fitting import MeasuredStep, Updated, fit_device, merged
from ddltool.analyzers.step.costs.model import CostModel, cost_model
from ddltool.analyzers.step.costs.work import WorkCurve, work_of
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.device import Device
from ddltool.errors import InputError
from ddltool.graph import Graph
from ddltool.shipped import calibration, devices, known_devices
from tests.conftest import Cli

MODELS = ("zoo:resnet32", "zoo:alexnet_v2", "zoo:gpt_small", "zoo:bert_small", "zoo:cifarnet", "zoo:resnet50_v1")
SIZES = (32, 64, 128, 256)
A10 = devices().device("A10")
HEADER = "device,num_nodes,num_replicas,local_batch_size,step_time_s,sync_time_s"


@cache
def curve(source: str) -> WorkCurve:
    return work_of(source, Numerics(), None)


@cache
def graph_of(source: str, batch: int) -> Graph:
    return curve(source).traced.at(batch)


def model(device: Device = A10) -> CostModel:
    return cost_model(device, calibration())


def rows(
    models: Sequence[str],
    sizes: Sequence[int] = SIZES,
    *,
    memory: float = 1.0,
    noise: float = 0.0,
    device: Device = A10,
) -> list[MeasuredStep]:
    """Steps of a device whose memory is ``memory`` times as fast as its figures say; each model has an error of its own."""
    true = model(device.model_copy(update={"memory_bytes_per_s": device.memory_bytes_per_s * memory}))
    random = np.random.default_rng(5)
    found = []
    for name in models:
        off = float(np.exp(random.normal(0.0, noise)))
        for size in sizes:
            seconds = off * true.step(graph_of(name, size), optimizer="sgd").step_s
            found.append(MeasuredStep(model=name, batch=size, optimizer="sgd", seconds=seconds))
    return found


def calibrated(made: Sequence[MeasuredStep], device: Device = A10) -> Updated:
    return fit_device(made, graph_of, device, calibration(), source="rows")


def width(device: Device) -> float:
    residuals = model(device).residuals
    return float(np.log(residuals.high / residuals.low))


# ---------------------------------------------------------------- the fit


def test_a_few_rows_pull_a_device_to_where_it_is() -> None:
    """Five rows of one model mend another's, on a device whose memory is slower than its generation's."""
    found = calibrated(rows(["zoo:resnet50_v1"], (16, 32, 64, 128, 256), memory=0.6))
    assert np.abs(found.after - 1).max() < 0.5 * np.abs(found.before - 1).max()
    true = rows(["zoo:resnet32"], [512], memory=0.6)[0].seconds
    graph = graph_of("zoo:resnet32", 512)
    before, after = (abs(model(each).step(graph, optimizer="sgd").step_s / true - 1) for each in (A10, found.device))
    assert after < 0.6 * before


def test_rows_as_predicted_change_nothing() -> None:
    found = calibrated(rows(MODELS[:2]))
    for unit, factor in found.device.fitted.units.items():  # type: ignore[union-attr]
        assert factor == pytest.approx(model().constants.units[unit], rel=0.02)


def test_no_device_is_faster_than_its_datasheet() -> None:
    """Rows of memory at 1.25 times the datasheet's rate are held at what memory can reach."""
    found = calibrated(rows(["zoo:resnet32", "zoo:alexnet_v2"], memory=1.35)).device.fitted
    assert found is not None
    table, units = calibration(), model().constants.units
    assert found.units["memory"] <= max(units["memory"], 1.1 / table.traffic["pointwise"]) * (1 + 1e-9)
    for unit in ("tensor", "vector"):
        share = table.arithmetic[f"matrix_product/{unit}"]
        assert found.units[unit] <= max(units[unit], 1.0 / share) * (1 + 1e-9)


def test_repeats_are_one_step_and_outweigh_nothing() -> None:
    made = rows(MODELS[:2], memory=0.7)
    wild = replace(made[0], seconds=50 * made[0].seconds)
    assert [step.seconds for step in merged([*made[:1] * 3, wild])] == pytest.approx([made[0].seconds])
    once, often = calibrated(made), calibrated([*made, *made[:1] * 4000])
    assert often.device == once.device
    assert len(often.after) == len(made)


def test_many_sizes_of_one_model_count_as_a_few() -> None:
    """Sixty sizes of a model that contradicts another do not drown the other's four."""
    one, other = rows(["zoo:alexnet_v2"], memory=0.6), rows(["zoo:resnet32"], memory=1.0)
    many = rows(["zoo:alexnet_v2"], range(32, 272, 4), memory=0.6)
    few, drowned = (calibrated([*each, *other]).device.fitted for each in (one, many))
    assert few is not None
    assert drowned is not None
    assert drowned.units["memory"] == pytest.approx(few.units["memory"], rel=0.1)


def test_thousands_of_rows_take_as_long_as_their_sizes() -> None:
    made = rows(["zoo:cifarnet"], range(8, 520, 8), memory=0.8)
    seconds = []
    for each in (made, [row for row in made for _ in range(64)]):
        start = time.process_time()
        calibrated(each)
        seconds.append(time.process_time() - start)
    assert seconds[1] < 10 * seconds[0]


# ---------------------------------------------------------------- how sure


def test_ranges_narrow_with_models_and_not_with_sizes() -> None:
    one = calibrated(rows(MODELS[:1], range(16, 272, 16), memory=0.8)).device
    two = calibrated(rows(MODELS[:2], SIZES[:2], memory=0.8)).device
    six = calibrated(rows(MODELS, memory=0.8)).device
    assert width(one) >= width(A10) * (1 - 1e-3)
    assert width(two) >= width(A10) * (1 - 1e-3)  # four steps are few
    assert width(six) < 0.9 * width(A10)
    residuals = model(six).residuals
    assert residuals.rows == len(MODELS) * len(SIZES)
    assert residuals.what.startswith("the model (own rows")


def test_ranges_widen_with_what_the_rows_left_over() -> None:
    exact, noisy = (calibrated(rows(MODELS, memory=0.8, noise=noise)).device for noise in (0.0, 0.3))
    assert width(noisy) > 1.2 * width(exact)
    assert width(noisy) > 2 * 0.7 * 1.2816 * 0.3, "as wide as the models' own errors, or nearly"
    assert model(noisy).residuals.median_error > 0.1


def test_an_earlier_fit_is_no_prior() -> None:
    made = rows(MODELS[:1], memory=0.6)
    once = calibrated(made)
    assert calibrated(made, once.device).device == once.device


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (1e3, "fits no A10: .* check that step_time_s is in seconds"),
        (1e-3, "after the fit half of the steps are off by a factor of"),
        (6.0, "would reach 0.* of what is expected|off by a factor of"),
    ],
)
def test_rows_that_cannot_be_of_the_device_are_refused(scale: float, message: str) -> None:
    for models in (MODELS[:1], MODELS):
        made = [replace(row, seconds=scale * row.seconds) for row in rows(models, [256, 512])]
        with pytest.raises(InputError, match=message):
            calibrated(made)


# ---------------------------------------------------------------- which rows


def frame(**columns: object) -> pd.DataFrame:
    plain = {"device": "A10", "num_replicas": 1, "local_batch_size": 8, "step_time_s": 0.1, "source": "zoo:cifarnet"}
    return pd.DataFrame([{**plain, **columns}])


def chosen(table: pd.DataFrame, **given: str | None) -> list[MeasuredStep]:
    return measured_rows(table, "rows.csv", A10, devices(), **given)  # type: ignore[arg-type]


PROFILE = "device=cuda;threads=2;warmup=2;seed=0;torch=2.13.0"


def test_the_rows_of_the_device_however_written() -> None:
    table = pd.concat([frame(device=name) for name in ("NVIDIA A10", "a-10", "cuda", "T4", "box")])
    assert len(chosen(table)) == 3
    with pytest.raises(InputError, match=r"rows.csv: holds rows of T4, box and none of A10; name the device"):
        chosen(table.tail(2))


def test_rows_that_say_how_they_were_measured() -> None:
    digest = frame(source="train.py:make_model#391010d3c359", settings=PROFILE, accumulation_steps=0)
    assert chosen(digest) == [MeasuredStep(model="train.py:make_model", batch=8, optimizer="sgd", seconds=0.1)]
    assert chosen(digest, precision="tf32", optimizer="sgd")
    assert chosen(frame())[0].optimizer == "adam"
    assert chosen(frame(), optimizer="momentum")[0].optimizer == "momentum"
    for said, asked in (("amp", "fp16"), ("fp16", "amp"), ("bf16-pure", "bf16-pure")):
        assert chosen(frame(optimizer="adamw", precision=said), precision=asked)[0].optimizer == "adamw"
    assert chosen(frame(num_replicas=2)) == chosen(frame(accumulation_steps=3)) == []
    assert chosen(frame(source=np.nan), model="zoo:resnet32")[0].model == "zoo:resnet32"


@pytest.mark.parametrize(
    ("row", "given", "message"),
    [
        ({"origin": "predicted"}, {}, "row 1:origin: is predicted; calibrate with measured rows"),
        ({"settings": "predicted, fp32, optimizer adam"}, {}, "row 1:origin: is predicted"),
        ({"settings": PROFILE}, {"precision": "amp"}, "row 1: was measured in fp32, not fp16; leave --precision"),
        ({"settings": PROFILE}, {"optimizer": "adam"}, "row 1: was measured with sgd, not adam; leave --opt"),
        ({"precision": "bf16"}, {}, "row 1: was measured in bf16, not fp32"),
        ({"precision": "bf16"}, {"precision": "bf16-pure"}, "row 1: was measured in bf16, not bf16-pure"),
        ({"precision": "fp4"}, {}, "row 1:precision: unknown precision 'fp4'"),
        ({"settings": PROFILE.replace("cuda", "cpu")}, {}, "row 1: was measured on a CPU"),
        ({"optimizer": "adamx"}, {}, 'row 1:optimizer: unknown .adamx.; did you mean "adam'),
        ({"source": None}, {}, "rows.csv: does not say which model was trained; name it: --model SOURCE"),
    ],
)
def test_rows_that_contradict_are_refused(row: dict[str, object], given: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        chosen(frame(**row), **given)


# ---------------------------------------------------------------- nccl-tests

LOGS = {
    "2.13": """# nThread 1 nGpus 8 minBytes 8 maxBytes 134217728 step: 2(factor)
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     8388608       2097152     float     sum      -1    400.0   20.97   36.70      0    400.0   20.97   36.70      0
    67108864      16777216     float     sum      -1    900.0   74.57  130.49      0    900.0   74.57    1.00      0
   134217728      33554432     float     sum      -1   1750.0   76.70  134.22    N/A   1750.0   76.70    1.00    N/A
""",
    "2.0, without root": """#
#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
    67108864      16777216   float     sum    900.0   74.57  130.49  2e-07    900.0   74.57    1.00  2e-07
   134217728      33554432   float     sum   1750.0   76.70  134.22    N/A   1750.0   76.70    1.00    N/A
""",
    "all-gather, redop blank, behind mpirun's prefix": """
[1,0]<stdout>:#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error
[1,0]<stdout>:    67108864       2097152   float              900.0   74.57  130.49  0e+00    900.0   74.57    1.00  0e+00
[1,0]<stdout>:   134217728       4194304   float             1750.0   76.70  134.22  0e+00   1750.0   76.70    1.00  0e+00
[1,0]<stdout>:# Out of bounds values : 0 OK
""",
}


@pytest.mark.parametrize("log", LOGS.values(), ids=LOGS)
def test_logs_of_all_versions(log: str) -> None:
    assert bus_bandwidth(log, "nccl.log") == pytest.approx((130.49e9 + 134.22e9) / 2)


def test_a_log_without_large_messages_is_refused() -> None:
    with pytest.raises(InputError, match="nccl.log: has no row of 64 MiB or more .*; run nccl-tests up to 1G"):
        bus_bandwidth(LOGS["2.13"].replace("67108864", "1024").replace("134217728", "2048"), "nccl.log")


def test_a_measured_link_is_taken_whole(cli: Cli, tmp_path: Path) -> None:
    log, device = tmp_path / "nccl.log", tmp_path / "device.yaml"
    log.write_text(LOGS["2.13"])
    assert cli("calibrate", log, "--device", "A10", "-o", device).code == 0
    own = tmp_path / "own.yaml"
    own.write_text("devices: [{name: box, peak_flops: {float32: 1e13}, memory_bytes_per_s: 5e11, memory_gib: 8}]")

    def rate(name: str, *more: object) -> float:
        document = cli("predict", "zoo:cifarnet", "--device", name, "--batch-sizes", 8, "--json", *more).document
        return float(document["devices"][name]["link_bytes_per_s"])

    assert rate("A10", "--devices-file", device) == pytest.approx(132.355e9)
    assert rate("A10") == pytest.approx(0.76 * A10.link_bytes_per_s)
    assert rate("box", "--devices-file", own) == pytest.approx(0.76 * 15.75e9)


# ---------------------------------------------------------------- the command


TRAIN = """
from torch import nn, zeros

def make_model():
    return nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 900, 10)), (zeros(2, 3, 32, 32),)
"""


def test_the_documented_path(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile as ``profile`` writes it, with the digest of the model's file; then predict with the device's file."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN)
    made = cli(
        *("predict", "train.py:make_model", "--device", "A10", "--optimizer", "sgd"),
        *("--batch-sizes", "64,128,256,512,1024", "--json"),
    ).document["rows"]
    lines = [f"{HEADER},source,settings"]
    for row in made:
        step = f"{row['local_batch_size']},{1.4 * row['step_time_s']}"
        lines += [f"A10,1,{n},{step},0,train.py:make_model#391010d3c359,{PROFILE}" for n in (1, 2)]
        lines += [f"T4,1,1,{step},0,train.py:make_model#391010d3c359,{PROFILE}"]
    Path("ROWS.csv").write_text("\n".join(lines))
    calibrate = ("calibrate", "ROWS.csv", "--device", "A10", "-o", "device.yaml", "--json")
    assert "names code" in cli(*calibrate).err
    told = cli(*calibrate, "--allow-code")
    assert "5 of 15 rows are of one replica and one pass on A10" in told.err
    found = told.document
    assert found["rows"] == 5
    assert found["median_error"]["before"] == pytest.approx(1 - 1 / 1.4, abs=0.01)
    assert found["median_error"]["after"] < found["median_error"]["before"] / 2
    before = calibration().residuals["generation"]
    assert found["devices"][0]["fitted"]["residuals"]["low"] <= before.low
    assert found["devices"][0]["fitted"]["residuals"]["high"] >= before.high
    again = cli(
        *("predict", "train.py:make_model", "--device", "A10", "--optimizer", "sgd", "--batch-sizes", "256"),
        *("--devices-file", "device.yaml", "--json"),
    ).document
    assert again["rows"][0]["step_time_s"] == pytest.approx(1.4 * made[2]["step_time_s"], rel=0.2)
    assert again["devices"]["A10"]["error"]["what"].startswith("the batch size (own rows")
    text = cli("calibrate", "ROWS.csv", "--device", "A10", "--allow-code").out
    assert "A10: median error of 5 steps" in text


TEXT = """
from torch import long, nn, zeros

def make_model():
    return nn.Sequential(nn.Embedding(1000, 512), nn.Linear(512, 512)), (zeros(2, 128, dtype=long),)
"""


def test_text_models_take_their_length(cli: Cli, tmp_path: Path) -> None:
    table, source = tmp_path / "rows.csv", f"{tmp_path / 'text.py'}:make_model"
    (tmp_path / "text.py").write_text(TEXT)
    step = model().step(work_of(source, Numerics(), 1024).traced.at(64), optimizer="adam").step_s
    table.write_text(f"{HEADER}\n,1,1,64,{step},0\n")
    options = ("--device", "A10", "--model", source, "--json")
    assert cli("calibrate", table, *options, "--sequence-length", 1024).document["median_error"]["before"] < 0.05
    assert "fits no A10" in cli("calibrate", table, *options).error_line


def test_telemetry_and_tables_of_others_take_the_device_given(cli: Cli, tmp_path: Path) -> None:
    """What names no device is of the one that is given; telemetry that names another is refused."""
    table, telemetry = tmp_path / "placements.csv", tmp_path / "telemetry.jsonl"
    step = model().step(graph_of("zoo:cifarnet", 128), optimizer="adam").step_s
    table.write_text(f"placement,local_bsz,step_time,sync_time\n1,128,{step},0\n1,64,{0.8 * step},0\n")
    given = ("--device", "A10", "--model", "zoo:cifarnet", "--json")
    assert cli("calibrate", table, *given).document["rows"] == 2
    for name in ("", "NVIDIA A10", "NVIDIA A100-SXM4-40GB"):
        row = {"step": 0, "rank": 0, "world_size": 1, "num_nodes": 1, "batch": 128, "compute_s": step, "sync_s": 0.0}
        telemetry.write_text("".join(json.dumps({**row, "step": n, "device": name}) + "\n" for n in range(9)))
        told = cli("calibrate", telemetry, *given)
        if "A100" in name:
            assert "holds rows of NVIDIA A100-SXM4-40GB and none of A10" in told.error_line
        else:
            assert told.document["rows"] == 1


@pytest.mark.parametrize(
    ("name", "text", "options", "message"),
    [
        ("rows.csv", f"{HEADER}\nA10,1,1,8,0.1,0\n", (), "does not say which model"),
        ("rows.csv", f"{HEADER}\nA10,1,2,8,0.1,0\n", ("--model", "zoo:cifarnet"), "has no rows of one replica"),
        ("rows.csv", f"{HEADER}\nA10,1,1,8,0.1,0\n", ("--device", "cpu-core"), "--device: cpu-core is no GPU"),
        (
            "rows.csv",
            f"{HEADER}\nA10,1,1,8,0.1,0\n",
            ("--optimizer", "adamx"),
            "--optimizer: unknown optimizer 'adamx'",
        ),
        ("rows.csv", f"{HEADER}\nA10,1,1,8,0.1,0\n", ("--batch-size", "8"), "--batch-size: has no part in"),
        ("rows.csv", f"{HEADER},origin\nA10,1,1,8,0.1,0,predicted\n", (), "row 1:origin: is predicted"),
        ("trace.json", "{}", (), "does not say the batch size; give it with --batch-size N"),
        ("nccl.log", "# time algbw busbw\n 8 2 float sum -1 40.0 0.0 0.0 0\n", (), "has no row of 64 MiB or more"),
        ("rows.txt", "some text\n", (), "ends in .txt; give a .csv"),
    ],
)
def test_calibrate_refuses_in_one_line(
    cli: Cli, tmp_path: Path, name: str, text: str, options: tuple[str, ...], message: str
) -> None:
    (tmp_path / name).write_text(text)
    device = () if "--device" in options else ("--device", "A10")
    cli("calibrate", tmp_path / name, *device, *options, "-o", tmp_path / "device.yaml").refuses(message)
    assert not (tmp_path / "device.yaml").exists()


FITTED = {
    "units": {"tensor": 1.0, "vector": 1.0, "memory": 0.9},
    **{"issue_s": 1e-5, "start_s": 1e-5, "update_s": 1e-5, "source": "rows.csv"},
    "residuals": {"low": 0.8, "high": 1.2, "median_error": 0.1, "rows": 5, "what": "these rows"},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"units": {"tensor": 1.0, "memory": 1.0}}, "units: has memory, tensor; give exactly tensor, vector, memory"),
        ({"units": {}}, "units: has nothing; give exactly"),
        (
            {"residuals": {**FITTED["residuals"], "low": 1.1}},
            "residuals: low is 1.1 and high 1.2; the prediction itself",
        ),  # type: ignore[dict-item]
    ],
)
def test_broken_device_files_are_one_line(cli: Cli, tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "device.yaml"
    entry = {"name": "box", "peak_flops": {"float32": 1e13}, "memory_bytes_per_s": 5e11, "memory_gib": 8}
    for fitted in (FITTED, {**FITTED, **change}):
        path.write_text(json.dumps({"devices": [{**entry, "fitted": fitted}]}))
        if fitted is FITTED:
            assert known_devices(path).device("box").fitted is not None
    assert message in cli("devices", "--devices-file", path).error_line
