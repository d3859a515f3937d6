"""The main job, end to end, as a user runs it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from ddltool.artifacts import load
from ddltool.commands import demo as commands
from ddltool.commands import demo_train
from ddltool.commands.main import run
from ddltool.commands.profile import profile
from ddltool.goodput_model import Goodput
from ddltool.graph import read_graph
from ddltool.plans import Enforcement, Plan
from ddltool.profiles import read_profile
from ddltool.telemetry import TelemetryRow
from tests.helpers.processes import as_job


@pytest.fixture(scope="module", params=["small", pytest.param("as shipped", marks=pytest.mark.slow)])
def demo(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, object], str]:
    """The demo with less to measure and to train in this process, or as it is shipped, under torchrun."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    if request.param == "as shipped":
        command = [sys.executable, "-m", "ddltool", "demo", "-o", str(folder), "--json"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
        assert done.returncode == 0, done.stderr
        return folder, json.loads(done.stdout), done.stderr

    def train(command: list[str], *_: object) -> tuple[int, str]:
        return max(abs(code or 0) for code, *_ in as_job(2, folder, forty_steps, *command[-2:])), ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddltool.commands.profile.profile", partial(profile, warmup=0))
        less = {"BATCH_SIZES": (1, 2, 3, 4), "REPLICAS": (1,), "REPEATS": 1, "SAMPLES": 2, "run_script": train}
        for name, value in less.items():
            patch.setattr(commands, name, value)
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()) as told:
            assert run(["demo", "-o", str(folder), "--json"]) == 0, told.getvalue()
    return folder, json.loads(printed.getvalue()), told.getvalue()


def forty_steps(rank: int, *arguments: str) -> None:
    """Train on images of a fourth of the pixels."""
    demo_train.STEPS, demo_train.ENLARGED = 40, 2
    sys.argv[1:] = arguments
    demo_train.main()


def test_every_step_announces_itself(demo: tuple[Path, dict[str, object], str]) -> None:
    steps = [line for line in demo[2].splitlines() if line.startswith("[")]
    names = ("trace", "profile", "fit", "plan", "emit", "train", "fit telemetry", "report")
    assert steps == [f"[{place}/8] {name}" for place, name in enumerate(names, start=1)]


def test_every_artifact_is_whole(demo: tuple[Path, dict[str, object], str]) -> None:
    folder = demo[0]
    graph = read_graph(folder / "graph.json")
    plan = load(folder / "plan.json", Plan)
    enforcement = load(folder / "enforce.json", Enforcement)
    assert graph.name == "resnet32"
    assert plan.status == "optimal"
    assert plan.throughput > load(folder / "plan-bsp.json", Plan).throughput
    assert {parameter.name for parameter in plan.parameters} == set(filter(None, graph.parameter))
    assert enforcement.world_size == plan.world_size == 2
    sizes = [rank.local_batch_size for rank in enforcement.ranks]
    assert sum(sizes) == plan.max_workers * plan.batch_size
    assert len(set(sizes)) == 2  # uneven, or the weighting would go untested
    assert load(folder / "goodput.json", Goodput).samples == len(read_profile(folder / "profile.csv")) >= 4
    assert load(folder / "goodput-telemetry.json", Goodput).samples >= 2
    assert json.loads((folder / "timeline.perfetto.json").read_text())["traceEvents"]


def test_the_training_was_real(demo: tuple[Path, dict[str, object], str]) -> None:
    folder, document, _ = demo
    training = document["training"]
    assert isinstance(training, dict)
    losses = training["losses"]
    assert sum(losses[-8:]) < 0.7 * sum(losses[:8])
    assert training["accuracy"] > 0.15  # chance is 0.1, give or take 0.02
    lines = (folder / "telemetry.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [TelemetryRow.model_validate_json(line) for line in lines]
    enforcement = load(folder / "enforce.json", Enforcement)
    assert len(rows) == len(losses) * enforcement.world_size
    full = [row for row in rows if row.total_batch == enforcement.total_batch_size]
    assert len(full) > 0.9 * len(rows)
    assert all(row.batch == enforcement.ranks[row.rank].local_batch_size for row in full)


def test_the_report_labels_its_figures(demo: tuple[Path, dict[str, object], str]) -> None:
    html = (demo[0] / "report.html").read_text(encoding="utf-8")
    assert html.count('class="drawing"') >= html.count("<figure>") > 0
    for kind in ("graph", "profile", "goodput", "plan", "enforcement", "telemetry"):
        assert f'<section id="{kind}-1">' in html
    for label in ("measured", "predicted", "simulated"):
        assert f'<span class="badge">{label}</span>' in html


@pytest.mark.slow
def test_an_interruption_while_training_leaves_nobody_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ddltool", "demo", "-o", str(tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stderr is not None
        lines = iter(child.stderr.readline, "")
        assert any(line.startswith("[6/8] train") for line in lines)
        ranks = wait_for_ranks(child.pid)
        child.send_signal(signal.SIGINT)
        rest = child.stderr.read()
        assert child.wait(timeout=60) == 130
    assert rest.strip().splitlines()[-1] == "error: interrupted"
    assert len(ranks) == 2
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive
    assert not (tmp_path / "out" / "report.html").exists()


def wait_for_ranks(pid: int) -> list[psutil.Process]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        family = psutil.Process(pid).children(recursive=True)
        ranks = [process for process in family if "-u" in process.cmdline()[:2]]
        if len(ranks) == 2:
            return ranks
        time.sleep(0.2)
    return []
