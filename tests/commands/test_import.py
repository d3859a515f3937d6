"""Importing others' measurements: the same numbers come out, and every bad value is named by row and column."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.job.goodput.imported_rows import import_files
from ddltool.analyzers.job.goodput.observations import from_frame, import_steps, import_table, kind_of
from ddltool.analyzers.step.measured.kineto import busy_within, read_steps
from ddltool.commands.import_ import import_
from ddltool.errors import InputError
from ddltool.profiles import read_profile
from ddltool.tables import read_table
from tests.conftest import write

PLACEMENTS = "placement,local_bsz,step_time,sync_time\n1,32,0.5,0.01\n44,32,0.75,0.2\n103,64,1.5,0.3\n"


def telemetry(**changes: object) -> str:
    row: dict[str, object] = {
        **{"kind": "ddltool.telemetry", "schema_version": 1, "step": 0, "rank": 0, "world_size": 2, "num_nodes": 1},
        **{"device": "T4", "batch": 8, "total_batch": 16, "compute_s": 0.5, "wait_s": 0.1, "sync_s": 0.05},
        **{"step_s": 0.7, "memory_bytes": 1e9},
    }
    batch = changes.get("batch")
    total = {"total_batch": 2 * batch} if isinstance(batch, int) else {}
    return json.dumps({**row, **total, **changes}) + "\n"


def test_placements_become_native_rows(tmp_path: Path) -> None:
    frame, sources = import_files([write(tmp_path / "placements.csv", PLACEMENTS)], device="T4")
    assert frame["num_nodes"].tolist() == [1, 2, 2]
    assert frame["num_replicas"].tolist() == [1, 8, 4]
    assert frame["local_batch_size"].tolist() == [32, 32, 64]
    assert frame["step_time_s"].tolist() == [0.5, 0.75, 1.5]
    assert frame["sync_time_s"].tolist() == [0.01, 0.2, 0.3]
    assert set(frame["device"]) == {"T4"}
    assert set(frame["origin"]) == {"imported"}
    assert [(source.kind, source.rows) for source in sources] == [("placements", 3)]


def test_several_files_keep_their_order_and_write_one_profile(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    scalability = "num_nodes,num_replicas,local_bsz,step_time,sync_time\n6,12,32,2.0,0.5\n"
    files = [write(tmp_path / "p.csv", PLACEMENTS), write(tmp_path / "s.csv", scalability)]
    out = tmp_path / "profile.csv"
    import_(files, output=out, device_name="T4")
    assert "wrote" in capsys.readouterr().out
    assert read_profile(out)["num_replicas"].tolist() == [1, 8, 4, 12]
    again, _ = import_files([out])  # a native profile is imported as it is
    pd.testing.assert_frame_equal(again[read_profile(out).columns], read_profile(out))
    import_(files, as_json=True, device_name="T4")
    document = json.loads(capsys.readouterr().out)
    assert len(document["rows"]) == 4
    assert document["sources"][1]["kind"] == "scalability"


def test_the_rows_of_published_tables(shared_data: Path) -> None:
    for name in ("placements-rtx.csv", "scalability-dgx-ext.csv"):
        path = shared_data / "sia-sosp23" / "traces" / "cifar10" / name
        frame, _ = import_files([path], device="GPU")
        with path.open(encoding="utf-8") as file:
            for place, row in enumerate(csv.DictReader(file)):
                digits = [int(digit) for digit in row.get("placement", "")]
                nodes = sum(digit > 0 for digit in digits) or int(row.get("num_nodes", 0))
                assert frame["num_nodes"][place] == nodes
                assert frame["num_replicas"][place] == (sum(digits) or int(row.get("num_replicas", 0)))
                assert frame["step_time_s"][place] == float(row["step_time"])
        assert len(frame) == place + 1


@settings(max_examples=15)
@given(
    batches=st.lists(st.sampled_from([4, 8, 0]), min_size=1, max_size=30),
    times=st.lists(st.floats(1e-3, 10), min_size=30, max_size=30),
)
def test_telemetry_is_read_as_the_fit_reads_it(
    tmp_path_factory: pytest.TempPathFactory, batches: list[int], times: list[float]
) -> None:
    lines = [
        telemetry(step=step, rank=rank, batch=batch, compute_s=times[step], sync_s=times[-1 - step] / 7)
        for step, batch in enumerate(batches)
        for rank in (0, 1)
    ]
    path = write(tmp_path_factory.mktemp("t") / "telemetry.jsonl", "".join(lines))
    steady = batches if len(batches) <= 6 else batches[3:]
    if not any(steady):
        with pytest.raises(InputError, match="no step with samples"):
            import_files([path])
        return
    direct = from_frame(read_table(path), str(path))
    frame, _ = import_files([path])
    imported = from_frame(frame, "imported")
    np.testing.assert_array_equal(imported.local_batch_size, direct.local_batch_size)
    np.testing.assert_allclose(imported.step_time_s, direct.step_time_s, rtol=1e-12)
    np.testing.assert_allclose(imported.grad_time_s, direct.grad_time_s, rtol=1e-12)


CSV_MISTAKES = {
    "empty": ("", "is empty"),
    "header only": ("placement,local_bsz,step_time,sync_time\n", "has no rows"),
    "column twice": (PLACEMENTS.replace("sync_time", "step_time"), ":line 1: has the column 'step_time' twice"),
    "kinds": ("placement,local_bsz,step_time,sync_time,step_time_s\n1,1,1,0,1\n", "mixes the columns of two kinds"),
    "both": ("placement,num_nodes,local_bsz,step_time,sync_time\n1,1,1,1,0\n", "has both placement and num_nodes"),
    "missing": (
        "placement,local_bsz,step_tim,sync_time\n1,1,1,0\n",
        "no column 'step_time'; did you mean \"step_tim\"",
    ),
    "zero": (PLACEMENTS.replace("0.75", "0"), ":row 2:step_time: is 0;"),
    "text": (PLACEMENTS.replace("0.5", "fast"), ":row 1:step_time: is fast"),
    "half a sample": (PLACEMENTS.replace(",64,", ",64.5,"), ":row 3:local_bsz: is 64.5"),
    "two": (PLACEMENTS.replace("0.75", "0").replace(",64,", ",0,"), ":row 3:local_bsz: is 0"),
    "two columns": (PLACEMENTS.replace("0.75,0.2", "0,-1"), ":row 2:step_time: is 0;"),
    "sync": (PLACEMENTS.replace("0.2", "0.75"), ":row 2:sync_time: is 0.75; it is the part of the step"),
    "placement": (PLACEMENTS.replace("44", "4x"), ":row 2:placement: is 4x"),
    "no gpu": (PLACEMENTS.replace("44", "00"), ":row 2:placement: is 00"),
    "short row": (PLACEMENTS.replace("0.75,0.2", "0.75"), ":row 2: has 3 fields; the header has 4"),
    "long row": (PLACEMENTS.replace("0.75,0.2", "0.75,0.2,7"), ":row 2: has 5 fields; the header has 4"),
    "long rows": (
        PLACEMENTS.replace(",0.01", ",0.01,1").replace(",0.2", ",0.2,1").replace(",0.3", ",0.3,1"),
        ":row 1: has 5 fields",
    ),
    "binary": ("\0\1\2\3", "has no rows"),
    "few replicas": (
        "device,num_nodes,num_replicas,local_batch_size,step_time_s,sync_time_s\nT4,3,2,1,1,0\n",
        ":row 1:num_replicas: 2 replicas on 3 nodes",
    ),
    "device": (
        "device,num_nodes,num_replicas,local_batch_size,step_time_s,sync_time_s\nT4,1,1,1,1,0\n,1,1,1,1,0\n",
        ":row 2:device: is empty",
    ),
}


@pytest.mark.parametrize("name", CSV_MISTAKES)
def test_a_bad_table_is_named_in_one_line_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    text, wanted = CSV_MISTAKES[name]
    path, out = write(tmp_path / "bad.csv", text), tmp_path / "out.csv"
    good = write(tmp_path / "good.csv", PLACEMENTS)
    device = None if name == "device" else "T4"
    with pytest.raises(InputError) as raised:
        import_([good, path] if device else [path], output=out, device_name=device)
    assert wanted in str(raised.value)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not out.exists()


@given(data=st.data())
def test_the_first_bad_cell_is_the_one_named(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40))
    frame = pd.DataFrame(
        {
            "num_nodes": [1] * count,
            "num_replicas": [4] * count,
            "local_batch_size": data.draw(st.lists(st.integers(1, 999), min_size=count, max_size=count)),
            "step_time_s": data.draw(st.lists(st.floats(0.5, 9), min_size=count, max_size=count)),
            "sync_time_s": [0.25] * count,
        }
    )
    assert len(import_table(frame, "FILE", "T4")) == count
    row = data.draw(st.integers(0, count - 1))
    column = data.draw(st.sampled_from(list(frame.columns)))
    value = data.draw(st.sampled_from([float("nan"), float("inf"), -1.0, 1e308]))
    bad = frame.astype(float)
    bad.loc[row:, column] = value  # later rows are bad too: the first counts
    with pytest.raises(InputError) as raised:
        import_table(bad, "FILE", "T4")
    assert str(raised.value).startswith(f"FILE:row {row + 1}:{column}: is ")


JSONL_MISTAKES = {
    "truncated first": (telemetry()[:40] + "\n" + telemetry(), ":line 1: is not JSON"),
    "truncated inside": (telemetry() + telemetry()[:40] + "\n" + telemetry(), ":line 2: is not JSON"),
    "another kind": (
        telemetry() + telemetry(kind="ddltool.goodput"),
        ":line 2:kind: is 'ddltool.goodput'; give 'ddltool.telemetry'",
    ),
    "list": (telemetry() + "[1]\n", ":line 2: is not an object"),
    "key twice": (
        telemetry() + telemetry().replace('"rank": 0', '"rank": 0, "rank": 1'),
        ":line 2: has the key 'rank'",
    ),
    "text": (telemetry(batch="many"), ":line 1:batch: is many"),
    "missing": (telemetry().replace('"sync_s"', '"sink_s"'), "has no column 'sync_s'; did you mean \"sink_s\""),
    "huge": (telemetry(sync_s=10**400), ":line 1"),
    "nothing": ("\n\n", "is empty"),
    "no samples": (telemetry(batch=0), "no step with samples"),
    "deep": ("[" * 100_000 + "\n", ":line 1"),
}


@pytest.mark.parametrize("name", JSONL_MISTAKES)
def test_bad_telemetry_is_named_by_line(tmp_path: Path, name: str) -> None:
    text, wanted = JSONL_MISTAKES[name]
    path = write(tmp_path / "telemetry.jsonl", text)
    with pytest.raises(InputError) as raised:
        import_files([path])
    assert wanted in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_killed_writer_loses_its_last_line_only(tmp_path: Path) -> None:
    path = write(tmp_path / "telemetry.jsonl", telemetry() + telemetry(step=1, compute_s=0.7) + telemetry()[:50])
    frame, sources = import_files([path])
    assert sources[0].rows == 2
    assert frame["step_time_s"].tolist() == pytest.approx([0.65])
    assert frame["peak_memory_bytes"].tolist() == [1e9]


def test_accumulated_passes_become_accumulation_steps(tmp_path: Path) -> None:
    path = write(tmp_path / "telemetry.jsonl", telemetry(batch=32, passes=4, compute_s=0.8))
    row = import_files([path])[0].iloc[0]
    assert (row["local_batch_size"], row["accumulation_steps"]) == (8, 3)
    assert row["grad_time_s"] == pytest.approx(0.2)
    assert row["step_time_s"] == pytest.approx(0.85)


def test_files_that_are_no_measurements(tmp_path: Path) -> None:
    cut = tmp_path / "telemetry.jsonl.gz"
    cut.write_bytes(gzip.compress(telemetry().encode() * 1000)[:60])
    path = write(tmp_path / "p.csv", PLACEMENTS)
    (loop := tmp_path / "loop.csv").symlink_to(loop)
    for files, wanted in (
        ([], "FILE: is missing"),
        ([tmp_path / "none.csv"], "no such file"),
        ([tmp_path / "none.jsonl"], "no such file"),
        ([write(tmp_path / "notes.txt", "x")], "ends in .txt"),
        ([cut], "is not a whole gzip file"),
        ([path, path], "is given twice"),
        ([loop], "cannot be read"),
        ([path], "does not say the device; name it with --device-name NAME"),
    ):
        with pytest.raises(InputError, match=wanted):
            import_files(files, device=None if files == [path] else "T4")


def trace_event(name: str, category: str, start: float, length: float, **args: object) -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": length, "args": args}


def trace(folder: Path, **header: object) -> Path:
    """Two steps of 100 and 120 us; NCCL runs 30 us beside compute and 10 us (20 us) alone in the first (second)."""
    events = [trace_event("ProfilerStep#4", "user_annotation", 0, 100)]
    events += [trace_event("ProfilerStep#5", "user_annotation", 100, 120)]
    kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
    for begin, length in ((0, 100), (100, 120)):
        alone = 10 if begin == 0 else 20
        events.append(trace_event("gemm", "kernel", begin + 5, 60, device=0))
        events.append(trace_event(kernel, "kernel", begin + 35, 30 + alone, device=0))
        events.append(trace_event("adam", "kernel", begin + length - 5, 5, device=0))
    return write(folder / "trace.json", json.dumps({**header, "traceEvents": events}))


def test_a_trace_gives_its_steps_and_what_no_compute_hid(tmp_path: Path) -> None:
    steps = read_steps(trace(tmp_path, distributedInfo={"rank": 0, "world_size": 4}, deviceProperties=[{"name": "T4"}]))
    np.testing.assert_allclose(steps.step_time_s, [100e-6, 120e-6])
    np.testing.assert_allclose(steps.communication_s, [40e-6, 50e-6])
    np.testing.assert_allclose(steps.exposed_s, [10e-6, 20e-6])
    frame = import_steps(steps, local_batch_size=32, num_nodes=2)
    row = frame.iloc[0]
    assert (row["device"], row["num_nodes"], row["num_replicas"], row["local_batch_size"]) == ("T4", 2, 4, 32)
    assert row["step_time_s"] == pytest.approx(110e-6)
    assert row["sync_time_s"] == pytest.approx(15e-6)
    assert row["repeats"] == 2


@pytest.mark.parametrize(
    ("world_size", "given", "wanted"),
    [
        (4, {}, "does not say the batch size; give it with --batch-size N"),
        (None, {"batch_size": 8}, "has collectives and does not say of how many replicas"),
        (4, {"batch_size": 8, "num_nodes": 1, "num_replicas": 2}, "is of a job of 4 replicas, not 2"),
        (4, {"batch_size": 8}, "does not say on how many nodes its 4 ranks ran"),
        (4, {"batch_size": 8, "num_nodes": 1}, "--device-name"),
    ],
)
def test_what_a_trace_does_not_say_is_asked_for(
    tmp_path: Path, world_size: int | None, given: dict[str, int], wanted: str
) -> None:
    path = trace(tmp_path, **({"distributedInfo": {"world_size": world_size}} if world_size else {}))
    with pytest.raises(InputError, match=wanted):
        import_files([path], **given)


@pytest.mark.parametrize(
    ("given", "option"),
    [({"batch_size": 8}, "batch-size"), ({"num_nodes": 1}, "nodes"), ({"num_replicas": 2}, "replicas")],
)
def test_what_a_trace_is_asked_has_no_part_in_tables(tmp_path: Path, given: dict[str, int], option: str) -> None:
    table = write(tmp_path / "placements.csv", PLACEMENTS)
    with pytest.raises(
        InputError, match=f"^--{option}: has no part in the import of .*placements.csv; it is for a profiler"
    ):
        import_files([table], device="T4", **given)
    number = {"batch_size": 8, "num_nodes": 1, "num_replicas": 4}
    both = import_files([table, trace(tmp_path, distributedInfo={"world_size": 4})], device="V100", **number)
    assert [source.kind for source in both[1]] == ["placements", "trace"]


def test_collectives_of_gloo_count_as_communication(tmp_path: Path) -> None:
    """Of 0.21 s an all-reduce fills 0.18 s, 0.02 s of it beside an operator, on a CPU that has no kernels."""
    events = []
    for number, begin in enumerate((0.0, 210e3, 420e3)):
        events += [
            trace_event(f"ProfilerStep#{number}", "user_annotation", begin, 210e3),
            trace_event("aten::mm", "cpu_op", begin, 30e3),
            {**trace_event("gloo:all_reduce", "user_annotation", begin + 10e3, 180e3), "tid": 2},
            trace_event("c10d::allreduce_", "cpu_op", begin + 10e3, 100),
            trace_event("aten::add_", "cpu_op", begin + 200e3, 5e3),
        ]
    steps = read_steps(write(tmp_path / "gloo.json", json.dumps({"traceEvents": events})))
    np.testing.assert_allclose(steps.communication_s, 0.18)
    np.testing.assert_allclose(steps.exposed_s, 0.16)
    frame = import_steps(steps, local_batch_size=8, num_nodes=1, num_replicas=2, device="CPU")
    assert frame["sync_time_s"].tolist() == pytest.approx([0.16])


def test_stub_steps_are_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A profiler that is stopped right after a step leaves a range of 0.05 ms beside the one of 9.29 ms."""
    events = [trace_event("ProfilerStep#4", "user_annotation", 0, 9290)]
    events += [trace_event("aten::mm", "cpu_op", 1000 * number, 900) for number in range(9)]
    events += [trace_event("ProfilerStep#5", "user_annotation", 9300, 50)]
    path = write(tmp_path / "stub.json", json.dumps({"traceEvents": events}))
    steps = read_steps(path)
    np.testing.assert_allclose(steps.step_time_s, [9.29e-3])
    import_([path], as_json=True, device_name="CPU", batch_size=8, replicas=1)
    printed = capsys.readouterr()
    said = "1 of 2 steps hold less than half of the work and are left out: 5 (0.05 ms, 0 of 9 calls)"
    assert json.loads(printed.out)["sources"][0]["remarks"] == [said]
    assert "stub.json: 1 of 2 steps" in printed.err


def test_work_after_the_last_step_is_not_the_last_steps(tmp_path: Path) -> None:
    """A kernel that the last step launched runs late and is its own; what is launched after it is no step's."""
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
    events = [trace_event("ProfilerStep#0", "user_annotation", 0, 100)]
    for number, (called, begin) in enumerate(((90, 150), (120, 400))):
        events.append(trace_event("cudaLaunchKernel", "cuda_runtime", called, 1, correlation=number + 1))
        events.append(trace_event(nccl, "kernel", begin, 40, correlation=number + 1, device=0))
    steps = read_steps(write(tmp_path / "late.json", json.dumps({"traceEvents": events})))
    np.testing.assert_allclose(steps.communication_s, [40e-6])


def test_a_trace_without_steps(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no ProfilerStep range"):
        import_files([write(tmp_path / "t.json", json.dumps({"traceEvents": []}))], batch_size=8)


@given(
    intervals=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 30)), max_size=12),
    cuts=st.lists(st.integers(0, 100), min_size=2, max_size=5, unique=True),
)
def test_busy_time_by_window_against_counting_moments(intervals: list[tuple[int, int]], cuts: list[int]) -> None:
    cuts = sorted(cuts)
    start = np.array([float(begin) for begin, _ in intervals])
    length = np.array([float(size) for _, size in intervals])
    found = busy_within(start, length, np.array(cuts[:-1], dtype=float), np.array(cuts[1:], dtype=float))
    busy = {moment for begin, size in intervals for moment in range(begin, begin + size)}
    wanted = [sum(moment in busy for moment in range(low, high)) for low, high in itertools.pairwise(cuts)]
    np.testing.assert_allclose(found, wanted, atol=1e-9)


def test_kinds_are_told_by_their_columns() -> None:
    assert kind_of(["step_time", "placement", "sync_time", "local_bsz", "note"], "F") == "placements"
    with pytest.raises(InputError, match="has columns a, b; expected"):
        kind_of(["a", "b"], "F")


def test_blanks_and_a_byte_order_mark_do_no_harm(tmp_path: Path) -> None:
    path = write(tmp_path / "p.csv", "\ufeff" + PLACEMENTS.replace(",", ", "))
    assert read_table(path)["step_time"].tolist() == [0.5, 0.75, 1.5]
