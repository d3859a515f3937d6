"""Sweeps: the same bits from every engine, nothing lost, nobody left behind."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddltool.analyzers.scheduling.failures import Failures, NodeEvent
from ddltool.analyzers.scheduling.paired import MEASURES
from ddltool.analyzers.scheduling.simulator import Options
from ddltool.analyzers.scheduling.sweep import COLUMNS, FIGURES, cells
from ddltool.commands import sweep as command
from ddltool.commands import sweep_engines
from ddltool.commands.sweep import sweep
from ddltool.commands.sweep_lock import sole_writer
from ddltool.commands.sweep_output import compare_document, show_comparison, show_sweep
from ddltool.errors import InputError, MissingExtra

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "workloads"
Sweep = Callable[..., dict[str, Any]]
SCRIPT = """
import sys
from pathlib import Path
from ddltool.analyzers.scheduling.simulator import Options
from ddltool.commands.sweep import sweep
from ddltool.commands.sweep_lock import sole_writer
folder, output = map(Path, sys.argv[1:3])
sweep([folder / "small.csv"], folder / "cluster.yaml", [Path(sys.argv[3])], ["ours", "pollux"], range(500), Options(),
      jobs=2, output=output)
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
        **more: Any,
    ) -> dict[str, Any]:
        paths = [folder / f"{name}.csv" for name in workloads]
        return sweep(paths, folder / "cluster.yaml", [FOLDER / "traces"], policies, seeds, options or Options(), **more)

    return call


def bits(document: dict[str, Any]) -> str:
    """The figures, as text with every digit."""
    return json.dumps([{**cell, "cpu_s": None} for cell in document["cells"]])


def test_processes_give_the_bits_of_one_process(run: Sweep) -> None:
    alone = run(("small", "other"), ("fifo", "ours"))
    assert [(cell["workload"], cell["policy"], cell["seed"]) for cell in alone["cells"]] == [
        (w, p, s) for w in ("small", "other") for p in ("fifo", "ours") for s in (0, 1)
    ]
    assert alone["cells_failed"] == 0
    assert bits(run(("small", "other"), ("fifo", "ours"), jobs=3)) == bits(alone)


def test_ray_gives_the_bits_of_one_process(run: Sweep) -> None:
    pytest.importorskip("ray")
    assert bits(run(engine="ray")) == bits(run())


def test_without_ray_its_extra_is_named(run: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"ddltool\[ray\]"):
        run(engine="ray")


def test_a_dead_worker_costs_its_own_cell_only(run: Sweep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    start, killed = sweep_engines._start, []

    def start_and_kill_first(task: dict[str, Any]) -> Any:
        worker = start(task)
        if not killed:
            killed.append(task["seed"])
            worker.process.kill()
        return worker

    monkeypatch.setattr(sweep_engines, "_start", start_and_kill_first)
    output = tmp_path / "sweep.json"
    broken = run(policies=["pollux"], seeds=[0, 1, 2], jobs=2, output=output)
    assert [cell["error"] is None for cell in broken["cells"]] == [False, True, True]
    assert "signal 9" in broken["cells"][0]["error"]
    whole = run(policies=["pollux"], seeds=[0, 1, 2])
    assert bits(broken).count('"figures": {') == 2
    # What failed is tried again, and only that.
    seen: list[int] = []
    monkeypatch.setattr(command, "run_tasks", lambda tasks, *rest: seen.extend(t["seed"] for t in tasks) or iter(()))
    run(policies=["pollux"], seeds=[0, 1, 2], output=output)
    assert seen == [0]
    monkeypatch.undo()
    assert bits(run(policies=["pollux"], seeds=[0, 1, 2], output=output)) == bits(whole)


def test_a_cell_that_cannot_run_is_named_and_the_others_kept(
    run: Sweep, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (folder / "other.csv").read_text().replace(",1,", ",400,")
    (folder / "huge.csv").write_text(rows)  # more GPUs than there are: only policies that keep to the request fail
    document = run(("small", "huge"), ("fifo", "pollux"), [0])
    assert [bool(cell["error"]) for cell in document["cells"]] == [False, False, True, False]
    assert document["cells_failed"] == 1
    assert "failed: huge under fifo, seed 0" in capsys.readouterr().err
    compared = compare_document(document, "pollux,fifo")
    assert compared["unit"] == "seed"
    assert compared["comparisons"][0]["units"] == 1


def test_resumes_from_a_partial_file_and_keeps_what_else_it_holds(run: Sweep, tmp_path: Path) -> None:
    output = tmp_path / "sweep.json"
    run(policies=["fifo"], seeds=[0], output=output)
    first = json.loads(output.read_text())
    first["cells"][0]["figures"]["avg_jct_s"] = 123.0  # to tell what was kept from what was replayed again
    output.write_text(json.dumps(first))
    second = run(("other",), ["pollux"], [0], output=output)
    assert [cell["policy"] for cell in second["cells"]] == ["pollux", "fifo"]
    third = run(policies=["fifo", "pollux"], seeds=[0], output=output)
    assert [cell["workload"] for cell in third["cells"]] == ["small", "small", "other"]
    assert third["cells"][0]["figures"]["avg_jct_s"] == 123.0
    assert json.loads(output.read_text()) == third


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
    lost = Failures(mtbf_s=3000.0, repair_s=600.0, events=(NodeEvent(time_s=100.0, node=0, kind="leave"),))
    options = Options(failures=lost)
    alone = run(policies=["fifo", "srtf"], seeds=[0, 1, 2], options=options)
    assert alone["cells_failed"] == 0
    average = [cell["figures"]["avg_jct_s"] for cell in alone["cells"]]
    assert len(set(average[:3])) == 3  # fifo itself draws nothing
    assert bits(run(policies=["fifo", "srtf"], seeds=[0, 1, 2], options=options, jobs=2)) == bits(alone)


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


def test_table_and_comparison(run: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "sweep.csv"
    document = run(("small", "other"), table=table)
    with table.open() as lines:
        rows = list(csv.DictReader(lines))
    assert tuple(rows[0]) == COLUMNS
    assert len(rows) == 8
    for row, cell in zip(rows, document["cells"], strict=True):
        assert [float(row[name]) for name in FIGURES] == [cell["figures"][name] for name in FIGURES]
    comparison = compare_document(document, "pollux,fifo")
    assert [row["measure"] for row in comparison["comparisons"]] == list(MEASURES)
    assert comparison["unit"] == "workload"
    show_sweep(document)
    show_comparison(comparison)
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) <= 80
    assert any("average JCT" in line for line in shown)
    for pair in ("pollux", "a,b,c", ","):
        with pytest.raises(InputError, match="--compare"):
            compare_document(document, pair)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_it_is_ended_nobody_is_left_and_the_file_is_whole(folder: Path, how: signal.Signals) -> None:
    output = folder / "sweep.json"
    arguments = [sys.executable, "-c", SCRIPT, str(folder), str(output), str(FOLDER / "traces")]
    process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    workers: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + 60
        while not (output.exists() and len(workers) == 2) and time.monotonic() < deadline:
            workers = psutil.Process(process.pid).children()
            time.sleep(0.02)
        assert len(workers) == 2
        process.send_signal(how)
        assert process.wait(timeout=30) != 0
    finally:
        process.kill()
        process.wait()
    _, left = psutil.wait_procs(workers, timeout=10)
    assert not left
    document = json.loads(output.read_text())
    assert 0 < len(document["cells"]) < document["cells_wanted"] == 1000
    # What a killed process leaves holds nobody up: the lock ended with it, and the next sweep clears up.
    assert {path.name for path in folder.glob(".*sweep*")} <= {".sweep.json.lock"} or how == signal.SIGKILL
    with sole_writer(output):
        pass
    assert not list(folder.glob(".*sweep*"))


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


def test_what_killed_writers_left_is_cleared_up_and_nothing_else(run: Sweep, tmp_path: Path) -> None:
    def write(name: str, mode: int) -> Path:
        path = tmp_path / name
        path.write_text("{")
        path.chmod(mode)
        return path

    left = write(".sweep.json.j4jrhx67", 0o600)
    others = [
        write(".sweep.json.backup01", 0o644),
        write(".sweep.json.old", 0o600),
        write(".other.json.j4jrhx67", 0o600),
    ]
    run(policies=["fifo"], seeds=[0], output=tmp_path / "sweep.json")
    assert not left.exists()
    assert all(path.exists() for path in others)


@pytest.mark.parametrize(("name", "value"), [("p99_jct_s", float("nan")), ("cpu_s", float("inf")), ("jobs", True)])
def test_a_file_with_figures_that_are_no_numbers_is_refused(
    run: Sweep, tmp_path: Path, name: str, value: float
) -> None:
    output = tmp_path / "sweep.json"
    run(policies=["fifo"], output=output)
    document = json.loads(output.read_text())
    cell = document["cells"][1]
    (cell if name == "cpu_s" else cell["figures"])[name] = value
    output.write_text(json.dumps(document))
    kept = output.read_bytes()
    with pytest.raises(InputError, match=rf"cells\[1\]:{name}: is {value} \(small under fifo, seed 1\)"):
        run(policies=["fifo"], output=output)
    assert output.read_bytes() == kept
