"""Sweeps: the same bits from every engine, nothing lost, nobody left behind.
Paired comparisons: against scipy's t interval, coverage on drawn data, and what is no evidence.
"""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from scipy import stats

from ddltool.analyzers.cluster import sweep as module
from ddltool.analyzers.cluster.cluster import NodeEvent, NodeFailures
from ddltool.analyzers.cluster.replay import Setup
from ddltool.analyzers.cluster.simulator import Options
from ddltool.analyzers.cluster.sweep import COLUMNS, FIGURES, MEASURES, SweepTask, cells, compare, sole_writer, sweep
from ddltool.errors import InputError, MissingExtra
from ddltool.simulation_results import SweepCell, SweepDocument, SweepFigures
from tests.helpers.workloads import FOLDER

Sweep = Callable[..., SweepDocument]
SCRIPT = """
import sys
from pathlib import Path
from ddltool.analyzers.cluster.simulator import Options
from ddltool.analyzers.cluster.replay import Setup
from ddltool.analyzers.cluster.sweep import sweep
folder, output, traces = map(Path, sys.argv[1:4])
setup = Setup(cluster=folder / "cluster.yaml", traces=[traces], options=Options())
sweep([folder / "small.csv"], setup, ["ours", "pollux"], range(500), jobs=2, output=output)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A workload of six jobs, so that a replay takes a moment, and the cluster."""
    lines = (FOLDER / "synthetic.csv").read_text().splitlines()
    (tmp_path / "small.csv").write_text("\n".join(lines[:7]) + "\n")
    (tmp_path / "other.csv").write_text("\n".join([lines[0], *lines[8:13]]) + "\n")
    (tmp_path / "cluster.yaml").write_text((FOLDER / "cluster.yaml").read_text())
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Sweep:
    def call(
        workloads: Sequence[str] = ("small",),
        policies: Sequence[str] = ("fifo", "pollux"),
        seeds: Sequence[int] = (0, 1),
        options: Options | None = None,
        power: float = -1.0,
        **more: Any,
    ) -> SweepDocument:
        paths = [folder / f"{name}.csv" for name in workloads]
        cluster, traces = folder / "cluster.yaml", [FOLDER / "traces"]
        setup = Setup(cluster=cluster, traces=traces, options=options or Options(), power=power)
        return sweep(paths, setup, policies, seeds, **more)

    return call


def bits(document: SweepDocument) -> str:
    """The figures, as text with every digit."""
    return json.dumps([{**cell.model_dump(), "cpu_s": None} for cell in document.cells])


def test_processes_give_the_bits_of_one_process(run: Sweep) -> None:
    lost = Options(failures=NodeFailures(mtbf_s=3000.0, repair_s=600.0))
    alone = run(("small", "other"), ("fifo", "ours"), options=lost)
    assert [cell.key for cell in alone.cells] == [
        (w, p, s) for w in ("small", "other") for p in ("fifo", "ours") for s in (0, 1)
    ]
    assert alone.cells_failed == 0
    assert bits(run(("small", "other"), ("fifo", "ours"), options=lost, jobs=2)) == bits(alone)


@pytest.mark.slow
def test_ray_gives_the_bits_of_one_process(run: Sweep) -> None:
    pytest.importorskip("ray")
    assert bits(run(engine="ray")) == bits(run())


def test_without_ray_its_extra_is_named(run: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"ddltool\[ray\]"):
        run(engine="ray")


def test_a_ray_that_does_not_start_is_one_line(run: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise Exception("The current node timed out during startup.\nThis could happen because\nof many things")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=init))
    with pytest.raises(InputError, match=r"^--engine ray: cannot be reached \(The current node timed .*; check RAY_"):
        run(engine="ray")


def die_or_answer(mark: Path, task: SweepTask) -> SweepCell:
    """Kill this process at seed 1 while ``mark`` is there: a file is so once, a folder always."""
    if task.key[2] == 1 and mark.exists():
        if mark.is_file():
            mark.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return task.record()


@pytest.mark.parametrize("always", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_process_that_dies_costs_at_most_its_own_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, always: bool
) -> None:
    """What was under way is replayed one at a time: a cell that ends its process again has failed."""
    mark = tmp_path / "mark"
    (mark.mkdir if always else mark.touch)()
    monkeypatch.setattr(module, "run_cell", partial(die_or_answer, mark))
    setup = Setup(cluster=tmp_path, traces=(), options=Options())
    tasks = [SweepTask(("w", "p", seed), tmp_path, setup) for seed in range(3)]
    found = list(module._run(tasks, 2, "local"))
    assert sorted(one.seed for one in found) == [0, 1, 2]
    failed = [one for one in found if one.error]
    assert [one.seed for one in failed] == ([1] if always else [])
    assert all("its process was killed" in (one.error or "") for one in failed)


def test_what_failed_is_tried_again(run: Sweep, folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "sweep.json"
    whole = run(policies=["pollux"], seeds=[0, 1, 2], output=output)
    broken = json.loads(output.read_text())
    broken["cells"][0].update(figures=None, cpu_s=None, error="its process was killed")
    output.write_text(json.dumps(broken))
    said: list[str] = []
    again = run(policies=["pollux"], seeds=[0, 1, 2], output=output, tell=said.append)
    assert said == [f"{output}: 2 of 3 replays are there already"]
    assert bits(again) == bits(whole)


def test_a_cell_that_cannot_run_is_named_and_the_others_kept(run: Sweep, folder: Path) -> None:
    rows = (folder / "other.csv").read_text().replace(",1,", ",400,")
    (folder / "huge.csv").write_text(rows)  # more GPUs than there are: only policies that keep to the request fail
    said: list[str] = []
    document = run(("small", "huge"), ("fifo", "pollux"), [0], tell=said.append)
    assert [bool(cell.error) for cell in document.cells] == [False, False, True, False]
    assert document.cells_failed == 1
    assert [line.partition(":")[2].partition(":")[0] for line in said] == [" huge under fifo, seed 0"]
    compared = compare(document.cells, "pollux", "fifo")
    assert compared.unit == "seed"
    assert compared.comparisons[0].units == 1


def test_resumes_from_a_partial_file_and_keeps_what_else_it_holds(run: Sweep, tmp_path: Path) -> None:
    output = tmp_path / "sweep.json"
    run(policies=["fifo"], seeds=[0], output=output)
    first = json.loads(output.read_text())
    first["cells"][0]["figures"]["avg_jct_s"] = 123.0  # to tell what was kept from what was replayed again
    output.write_text(json.dumps(first))
    second = run(("other",), ["pollux"], [0], output=output)
    assert [cell.policy for cell in second.cells] == ["pollux", "fifo"]
    third = run(policies=["fifo", "pollux"], seeds=[0], output=output)
    assert [cell.workload for cell in third.cells] == ["small", "small", "other"]
    assert third.cells[0].figures is not None
    assert third.cells[0].figures.avg_jct_s == 123.0
    assert json.loads(output.read_text()) == json.loads(third.model_dump_json())


def test_refuses_a_file_of_other_settings(run: Sweep, folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "sweep.json"
    run(policies=["fifo"], seeds=[0], output=output)
    kept = output.read_bytes()
    with pytest.raises(InputError, match="settings.options"):
        run(policies=["fifo"], seeds=[0], options=Options(interval_s=30.0), output=output)
    with pytest.raises(InputError, match="settings.power"):
        run(policies=["fifo"], seeds=[0], power=-2.0, output=output)
    small = (folder / "small.csv").read_text()
    (folder / "small.csv").write_text((folder / "other.csv").read_text())
    with pytest.raises(InputError, match="settings.workloads.small"):
        run(policies=["fifo"], seeds=[0], output=output)
    (folder / "small.csv").write_text(small)
    run(["other"], ["fifo"], [0], output=folder / "both.json")
    run(["small"], ["fifo"], [0], output=folder / "both.json")
    assert set(json.loads((folder / "both.json").read_text())["settings"]["workloads"]) == {"small", "other"}
    assert output.read_bytes() == kept
    output.write_text(kept.decode()[:200])
    with pytest.raises(InputError, match=r"sweep\.json"):
        run(policies=["fifo"], seeds=[0], output=output)
    for cells_ in ([1], [{}], [{"workload": "a", "policy": "b", "seed": 0, "figures": {"jobs": "x"}}]):
        output.write_text(json.dumps({**json.loads(kept), "cells": cells_}))
        with pytest.raises(InputError, match=r"cells\[0\]"):
            run(policies=["fifo"], seeds=[0], output=output)


def test_every_seed_has_failures_of_its_own_and_policies_share_them(run: Sweep) -> None:
    lost = NodeFailures(mtbf_s=3000.0, repair_s=600.0, events=(NodeEvent(time_s=100.0, node=0, kind="leave"),))
    options = Options(failures=lost)
    alone = run(policies=["fifo", "srtf"], seeds=[0, 1, 2], options=options)
    assert alone.cells_failed == 0
    average = [cell.figures and cell.figures.avg_jct_s for cell in alone.cells]
    assert len(set(average[:3])) == 3  # fifo itself draws nothing
    assert bits(run(policies=["srtf", "fifo"], seeds=[2, 1], options=options)) == bits(
        alone.model_copy(update={"cells": [cell for p in (1, 0) for cell in alone.cells[3 * p + 2 : 3 * p : -1]]})
    )


def test_refuses_sweeps_that_cannot_be(run: Sweep) -> None:
    for more, words in (
        ({"policies": []}, "policies"),
        ({"seeds": [1, 1]}, "twice"),
        ({"workloads": ["small", "small"]}, "twice"),
        ({"workloads": ["missing"]}, "missing.csv"),
        ({"engine": "spark"}, "spark"),
        ({"jobs": 0}, "--jobs"),
        ({"seeds": range(2_000_000)}, "at most"),
    ):
        with pytest.raises(InputError, match=words):
            run(**more)
    assert len(cells(["a", "b"], ["p"], [1, 2, 3])) == 6


def test_table_and_comparison(run: Sweep, tmp_path: Path) -> None:
    table = tmp_path / "sweep.csv"
    document = run(("small", "other"), table=table)
    with table.open() as lines:
        rows = list(csv.DictReader(lines))
    assert tuple(rows[0]) == COLUMNS
    assert len(rows) == 8
    for row, cell in zip(rows, document.cells, strict=True):
        assert [float(row[name]) for name in FIGURES if name != "cost"] == [
            getattr(cell.figures, name) for name in FIGURES if name != "cost"
        ]
    comparison = compare(document.cells, "pollux", "fifo")
    assert [row.measure for row in comparison.comparisons] == list(MEASURES[:-1])
    assert comparison.unit == "workload"


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_it_is_ended_nobody_is_left_and_the_file_is_whole(folder: Path, how: signal.Signals) -> None:
    output = folder / "sweep.json"
    arguments = [sys.executable, "-c", SCRIPT, str(folder), str(output), str(FOLDER / "traces")]
    process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    workers: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 60
        while not (output.exists() and len(workers) >= 2) and time.monotonic() < deadline:
            workers = psutil.Process(process.pid).children(recursive=True)
            time.sleep(0.02)
        assert len(workers) >= 2
        process.send_signal(how)
        assert process.wait(timeout=120) != 0
    finally:
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(workers, timeout=60)
    assert not left
    document = json.loads(output.read_text())
    assert 0 < len(document["cells"]) < document["cells_wanted"] == 1000
    # What a killed process leaves holds nobody up: the lock ended with it.
    assert {path.name for path in folder.glob(".*sweep*")} <= {".sweep.json.lock"} or how == signal.SIGKILL
    with sole_writer(output):
        pass


def test_two_sweeps_do_not_write_one_file(run: Sweep, tmp_path: Path) -> None:
    output = tmp_path / "sweep.json"
    run(policies=["fifo"], seeds=[0], output=output)
    kept = output.read_bytes()
    (tmp_path / "link.json").symlink_to(output)
    with sole_writer(output):
        for path in (output, tmp_path / "link.json"):
            with pytest.raises(InputError, match=rf"another sweep is writing .*{path.name}"):
                run(policies=["srtf"], seeds=[0], output=path)
        run(policies=["srtf"], seeds=[0], output=tmp_path / "other.json")
    assert output.read_bytes() == kept
    run(policies=["srtf"], seeds=[0], output=output)
    assert {cell["policy"] for cell in json.loads(output.read_text())["cells"]} == {"fifo", "srtf"}
    assert not list(tmp_path.glob(".*"))


def test_a_disk_that_fails_is_no_missing_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def failing(descriptor: int, how: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", failing)
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    with (
        pytest.raises(InputError, match=r"sweep\.json: cannot be locked .*error"),
        sole_writer(tmp_path / "sweep.json"),
    ):
        raise AssertionError("the lock was not taken")
    assert not list(tmp_path.iterdir())
    assert not before or len(os.listdir("/proc/self/fd")) <= before


Replays = list[SweepCell]


def replays(ratios: dict[tuple[str, int], float], hardness: dict[str, float] | None = None) -> Replays:
    """Two policies, "a" at ``ratio`` times the figures of "b"."""
    made = []
    for (workload, seed), ratio in ratios.items():
        base = (hardness or {}).get(workload, 100.0)
        made += [replay("a", workload, seed, base * ratio), replay("b", workload, seed, base)]
    return made


def replay(policy: str, workload: str, seed: int, value: float) -> SweepCell:
    figures = SweepFigures.model_construct(**dict.fromkeys(SweepFigures.model_fields, value))
    return SweepCell.model_construct(workload=workload, policy=policy, seed=seed, figures=figures)


def test_agrees_with_scipys_paired_t_test() -> None:
    ratios = {("w1", 0): 0.8, ("w2", 0): 0.95, ("w3", 0): 0.85, ("w4", 0): 1.02}
    result = compare(replays(ratios, {"w1": 1e6, "w2": 3.0}), "a", "b")
    logs = np.log(list(ratios.values()))
    low, high = stats.t.interval(0.95, 3, loc=logs.mean(), scale=stats.sem(logs))
    assert result.unit == "workload"
    assert [row.measure for row in result.comparisons] == list(MEASURES)
    for row in result.comparisons:
        assert row.ratio == pytest.approx(stats.gmean(list(ratios.values())))
        assert (row.low, row.high) == pytest.approx((math.exp(low), math.exp(high)))
        assert (row.better, row.units, row.decided) == (3, 4, False)


def test_the_order_of_the_policies_turns_the_ratio_over() -> None:
    ratios = {("w1", 0): 0.8, ("w2", 0): 0.81, ("w3", 0): 0.79}
    there, back = (compare(replays(ratios), *pair).comparisons[0] for pair in (("a", "b"), ("b", "a")))
    assert there.low is not None
    assert there.high is not None
    assert there.ratio * back.ratio == pytest.approx(1)
    assert back.low == pytest.approx(1 / there.high)
    assert there.decided
    assert back.decided


def test_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        logs = rng.normal(math.log(0.9), 0.2, size=4)
        made = replays({(f"w{number}", 0): math.exp(value) for number, value in enumerate(logs)})
        row = compare(made, "a", "b").comparisons[0]
        assert row.low is not None
        assert row.high is not None
        covered += row.low <= 0.9 <= row.high
    # 95 % of 400 with a standard deviation of 4.4; a normal quantile in place of Student's covers 85 %.
    assert 365 <= covered <= 395


def test_seeds_do_not_count_as_workloads() -> None:
    ratios = {(name, seed): ratio for name, ratio in (("w1", 0.8), ("w2", 0.9), ("w3", 0.85)) for seed in range(50)}
    many = compare(replays(ratios), "a", "b").comparisons[0]
    few = compare(replays({key: ratio for key, ratio in ratios.items() if key[1] == 0}), "a", "b").comparisons[0]
    assert many.units == few.units == 3
    assert (many.low, many.high) == pytest.approx((few.low, few.high))


def test_one_workload_counts_its_seeds_and_repeats_are_no_evidence() -> None:
    result = compare(replays({("w", 0): 0.8, ("w", 1): 0.9}), "a", "b")
    assert result.unit == "seed"
    assert result.comparisons[0].low is not None
    same = compare(replays({("w", seed): 0.8 for seed in range(5)}), "a", "b").comparisons[0]
    assert (same.low, same.high, same.decided) == (None, None, False)
    assert compare(replays({("w", 0): 0.8}), "a", "b").comparisons[0].low is None


def test_only_shared_replays_are_compared() -> None:
    made = replays({("w1", 0): 0.8, ("w2", 0): 0.9})
    more = [*made, replay("a", "w3", 0, 1e9)]
    assert compare(more, "a", "b").comparisons == compare(made, "a", "b").comparisons


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_refuses_figures_without_a_logarithm(value: float) -> None:
    made = [replay("a", "w1", 0, value), replay("b", "w1", 0, 1.0)]
    with pytest.raises(InputError, match="w1 seed 0:avg_jct_s"):
        compare(made, "a", "b")


def test_refuses_what_cannot_be_compared() -> None:
    made = replays({("w1", 0): 0.8})
    for pair, words in ((("a", "a"), "twice"), (("a", "c"), "in common")):
        with pytest.raises(InputError, match=words):
            compare(made, *pair)
