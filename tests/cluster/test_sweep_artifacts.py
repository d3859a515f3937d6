"""Sweeps in the report and in the gate: means over the seeds, the comparison, what failed, and documents that are none.
Sweeps with fitted models and prices: the bits of single replays, and no file of two truths.
"""

from __future__ import annotations

import copy
import csv
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddltool.analyzers.answers.gating.metrics import extract
from ddltool.shipped import folder
from ddltool.simulation_results import SweepFigures
from tests.conftest import Cli
from tests.helpers.workloads import FOLDER, write_goodput

FIGURES = tuple(name for name in SweepFigures.model_fields if name != "cost")


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``sweep --compare`` prints."""
    import contextlib
    import io

    from ddltool.commands.main import run

    loads, said = folder() / "workloads", io.StringIO()
    where = ["--cluster", str(loads / "cluster.yaml"), "--traces", str(loads / "traces")]
    asked = ["--policy", "fifo,srtf", "--seeds", "2", "--compare", "srtf,fifo", "--json"]
    with contextlib.redirect_stdout(said):
        assert run(["simulate", "sweep", str(loads / "synthetic.csv"), *where, *asked]) == 0
    found: dict[str, Any] = json.loads(said.getvalue())
    return found


def drawn(seed: int = 0, *, workloads: int = 2, policies: int = 2, seeds: int = 3) -> dict[str, Any]:
    """A sweep of figures that are all different."""
    rng = np.random.default_rng(seed)
    cells = [
        {
            "workload": f"w{workload}",
            "policy": f"p{policy}",
            "seed": number,
            "figures": {name: float(rng.uniform(1, 1000)) for name in FIGURES},
            "cpu_s": 0.1,
            "error": None,
        }
        for number in range(seeds)
        for policy in range(policies)
        for workload in range(workloads)
    ]
    return {"kind": "ddltool.sweep", "schema_version": 1, "cells_wanted": len(cells), "cells_failed": 0, "cells": cells}


def page_of(cli: Cli, place: Path, document: dict[str, Any]) -> str:
    (place / "sweep.json").write_text(json.dumps(document))
    cli("report", place / "sweep.json", "-o", place / "page.html").done()
    return (place / "page.html").read_text()


def rows_of(page: str) -> list[list[str]]:
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", page)]


def metrics(document: dict[str, Any]) -> dict[str, Any]:
    return {name: metric.value for name, metric in extract(document, "sweep.json").metrics.items()}


@pytest.mark.parametrize("seed", range(5))
def test_the_gate_takes_means_over_the_seeds(seed: int) -> None:
    document = drawn(seed)
    found = metrics(document)
    for workload in ("w0", "w1"):
        for policy in ("p0", "p1"):
            for name in FIGURES:
                values = [
                    cell["figures"][name]
                    for cell in document["cells"]
                    if (cell["workload"], cell["policy"]) == (workload, policy)
                ]
                assert math.isclose(found[f"{name}/{policy}/{workload}"], math.fsum(values) / len(values))
    assert (found["replays"], found["failed"]) == (12, 0)
    assert len(found) == 2 + 4 * len(FIGURES)


def test_a_failed_replay_has_no_part_in_the_means_and_fails_the_gate(cli: Cli, tmp_path: Path) -> None:
    before, now = drawn(), drawn()
    now["cells"][0].update(figures=None, error="no room for job 3")
    now["cells_failed"] = 1
    rest = [each["figures"]["avg_jct_s"] for each in before["cells"][4::4]]
    assert metrics(now)["avg_jct_s/p0/w0"] == pytest.approx(sum(rest) / 2)
    for name, document in (("before", before), ("now", now)):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    cli(
        "gate", tmp_path / "now.json", "--baseline", tmp_path / "before.json", "--rule", "failed increase <= 0"
    ).refuses("failed increase <= 0: 1 (baseline 0", code=1)
    page = page_of(cli, tmp_path, now)
    assert ["w0", "p0", "0", "no room for job 3"] in rows_of(page)


def test_a_slower_policy_fails_the_default_rules(cli: Cli, tmp_path: Path) -> None:
    before = drawn()
    now = copy.deepcopy(before)
    for cell in now["cells"]:
        if (cell["policy"], cell["workload"]) == ("p1", "w0"):
            cell["figures"]["avg_jct_s"] *= 1.2
    for name, document in (("before", before), ("now", now)):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    assert cli("gate", tmp_path / "before.json", "--baseline", tmp_path / "before.json").code == 0
    result = cli("gate", tmp_path / "now.json", "--baseline", tmp_path / "before.json", "--json")
    failed = [check["metric"] for check in result.document["checks"] if not check["passed"]]
    assert (result.code, failed) == (1, ["avg_jct_s/p1/w0"])


def test_the_page_shows_what_simulate_printed(cli: Cli, tmp_path: Path, simulated: dict[str, Any]) -> None:
    page = page_of(cli, tmp_path, simulated)
    assert "1 workload under 2 policies with 2 seeds: 4 replays." in page
    values = [cell["figures"]["avg_jct_s"] for cell in simulated["cells"] if cell["policy"] == "srtf"]
    row = next(row for row in rows_of(page) if row[:2] == ["synthetic", "srtf"])
    assert row[2:4] == ["2", f"{sum(values) / 2:,.0f}"]
    ratio = simulated["comparison"]["comparisons"][0]["ratio"]
    row = next(row for row in rows_of(page) if row and row[0] == "average JCT")
    assert row[1] == f"{ratio - 1:+.1%}"
    assert metrics(simulated)["ratio/avg_jct_s"] == ratio
    assert metrics(simulated)["compared"] == "srtf,fifo"


def test_two_workloads_stand_one_after_the_other(cli: Cli, tmp_path: Path) -> None:
    page = page_of(cli, tmp_path, drawn())
    assert [row[:3] for row in rows_of(page) if len(row) > 5] == [
        ["w0", "p0", "3"],
        ["w0", "p1", "3"],
        ["w1", "p0", "3"],
        ["w1", "p1", "3"],
    ]
    assert "cost" not in page.split("<section")[1]


def test_a_sweep_that_goes_on_and_one_that_failed_throughout(cli: Cli, tmp_path: Path) -> None:
    assert "3 replays of this sweep are not done yet" in page_of(cli, tmp_path, {**drawn(), "cells_wanted": 15})
    document = drawn()
    for cell in document["cells"]:
        cell.update(figures=None, error="boom")
    page = page_of(cli, tmp_path, {**document, "cells_failed": 12})
    assert page.count("boom") == 12
    assert "<svg" not in page


def test_enormous_figures_are_drawn_or_left_to_the_table(cli: Cli, tmp_path: Path, simulated: dict[str, Any]) -> None:
    document = copy.deepcopy(simulated)
    for cell in document["cells"]:
        cell["figures"] = dict.fromkeys(cell["figures"], 1e12)
    for number, each in enumerate(document["comparison"]["comparisons"]):
        each.update(ratio=1e30 if number else 1e-30, low=0.0, high=1e30)
    page = page_of(cli, tmp_path, document)
    assert "inf" not in page.split("<section")[1].split("</section>")[0]
    assert metrics(document)["avg_jct_s/fifo/synthetic"] == pytest.approx(1e12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda made: made["cells"].append(made["cells"][0]), "cells give p0 on w0 with seed 0 twice"),
        (lambda made: made.update(cells=[]), "cells: is empty; give at least 1 entry"),
        (lambda made: made.update(cells={}), "cells: is a mapping; give a list"),
        (lambda made: made["cells"][0]["figures"].pop("avg_jct_s"), "cells[0].figures.avg_jct_s: is missing"),
        (lambda made: made.pop("cells_wanted"), "cells_wanted: is missing"),
    ],
)
@pytest.mark.parametrize("command", [("report", "-o", "page.html"), ("gate", "--metrics")])
def test_what_is_no_sweep(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[dict[str, Any]], None],
    message: str,
    command: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    document = drawn()
    change(document)
    Path("sweep.json").write_text(json.dumps(document))
    result = cli(command[0], "sweep.json", *command[1:])
    assert result.code == 2
    assert result.error_line.startswith("sweep.json")
    assert message in result.error_line
    assert not Path("page.html").exists()


TRACES = ("--traces", FOLDER / "traces")
FIELDS = "noise=900,samples=2e5,batch=64,max-batch=4096,max-local=256"
MIXED = """kind: ddltool.cluster
name: mixed
nodes:
  - {name: slow, count: 2, devices: {type: gpu, count: 4}}
  - {name: fast, count: 1, devices: {type: other, count: 4}}
"""


@pytest.fixture
def working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working working, with what separates the parts of ``--goodput`` in its name: a workload, a cluster, a model."""
    made = tmp_path / "a,b=c"
    made.mkdir()
    lines = (FOLDER / "synthetic.csv").read_text().splitlines()
    (made / "small.csv").write_text("\n".join(lines[:9]) + "\n")
    (made / "cluster.yaml").write_text(MIXED)
    write_goodput(made / "goodput.json")
    monkeypatch.chdir(made)
    return made


def goodput(noise: int = 900) -> tuple[str, str]:
    return "--goodput", f"vision=goodput.json,{FIELDS.replace('900', str(noise))}"


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_sweep_has_the_bits_of_single_replays(cli: Cli, working: Path, jobs: int) -> None:
    base = ("small.csv", "--cluster", "cluster.yaml", *TRACES, *goodput(), "--price", "gpu=1,other=3")
    swept = cli(
        "simulate", "sweep", *base, "--policy", "fifo,ours", "--seeds", 2, "--jobs", jobs, "--csv", "rows.csv", "--json"
    ).done()
    assert swept.err.count("constant noise scale 900") == 1
    assert "constant noise scale 900" in swept.document["settings"]["assumptions"]["vision"]
    cells = {(cell["policy"], cell["seed"]): cell["figures"] for cell in swept.document["cells"]}
    assert len(cells) == 4
    for seed in range(2):
        alone = cli("simulate", *base, "--policy", "fifo,ours", "--seed", seed, "--json").document["policies"]
        for policy, record in alone.items():
            found = cells[policy, seed]
            assert found["cost"] == record["cost"]["jobs"] > 0
            assert found["gpu_seconds"] == sum(job["gpu_seconds"] for job in record["jobs"])
            assert found["worst_fairness"] == record["finish_time_fairness"]["max"]
            for name in ("avg_jct_s", "median_jct_s", "p99_jct_s", "makespan_s", "avg_queueing_s", "restarts"):
                assert found[name] == record[name]
    with (working / "rows.csv").open() as rows:
        assert [float(row["cost"]) for row in csv.DictReader(rows)] == [one["cost"] for one in cells.values()]
    measured = cli("simulate", *base[:3], *TRACES, "--policy", "fifo", "--json").document["policies"]["fifo"]
    assert measured["avg_jct_s"] != cells["fifo", 0]["avg_jct_s"]  # the model was in use


def test_a_seed_of_a_sweep_draws_failures_as_a_single_replay_does(cli: Cli, working: Path) -> None:
    base = ("small.csv", "--cluster", "cluster.yaml", *TRACES, "--policy", "fifo", "--mtbf", "1h")
    swept = cli("simulate", "sweep", *base, "--failure-seed", 5, "--seeds", 2, "--json").document["cells"]
    averages = [
        cli("simulate", *base, "--failure-seed", 5 + seed, "--seed", seed, "--json").document["policies"]["fifo"][
            "avg_jct_s"
        ]
        for seed in range(2)
    ]
    assert [one["figures"]["avg_jct_s"] for one in swept] == averages
    assert averages[0] != averages[1]


def test_costs_are_compared_where_all_have_one(cli: Cli, working: Path) -> None:
    base = ("simulate", "sweep", "small.csv", "--cluster", "cluster.yaml", *TRACES, "--policy", "fifo,ours")
    plain = cli(*base, "--compare", "ours,fifo", "--json").document["comparison"]["comparisons"]
    assert "cost" not in {row["measure"] for row in plain}
    priced = cli(*base, "--compare", "ours,fifo", "--price", "gpu=1,other=3", "--json").document
    rows = {row["measure"]: row["ratio"] for row in priced["comparison"]["comparisons"]}
    fifo, ours = (cell["figures"]["cost"] for cell in priced["cells"])
    assert rows.pop("cost") == pytest.approx(ours / fifo)
    assert rows["gpu_seconds"] != pytest.approx(ours / fifo, rel=1e-6)
    assert rows == {row["measure"]: row["ratio"] for row in plain}
    free = cli(*base, "--compare", "ours,fifo", "--price", "0", "--json").done()
    assert "cost" not in {row["measure"] for row in free.document["comparison"]["comparisons"]}
    shown = cli(*base, "--compare", "ours,fifo", "--price", "gpu=1,other=3").out
    assert "cost (price)" in shown
    assert f"{ours:,.2f}" in shown


def test_a_file_is_of_one_truth(cli: Cli, working: Path) -> None:
    base = ("simulate", "sweep", "small.csv", "--cluster", "cluster.yaml", *TRACES, "--policy", "fifo", "-o", "s.json")
    prices = ("--price", "1")
    assert cli(*base, *goodput(), *prices, "--seeds", 1).code == 0
    kept = (working / "s.json").read_bytes()
    again = cli(*base, *goodput(), *prices, "--seeds", 1)
    assert "1 of 1 replays are there already" in again.err
    assert (working / "s.json").read_bytes() == kept
    for arguments, words in [
        (goodput(), "settings.prices_per_gpu_hour: is not that of this sweep"),
        ((*goodput(), "--price", "2"), "settings.prices_per_gpu_hour: is not that of this sweep"),
        (prices, "settings.traces.vision: has changed since"),
        ((*goodput(800), *prices), "settings.traces.vision: has changed since"),
    ]:
        cli(*base, *arguments, "--seeds", 2).refuses(words)
    text = (working / "goodput.json").read_text()
    (working / "goodput.json").write_text(text.replace("0.05", "0.06", 1))
    assert "settings.traces.vision" in cli(*base, *goodput(), *prices, "--seeds", 2).error_line
    (working / "goodput.json").write_text(text)
    assert (working / "s.json").read_bytes() == kept
    more = cli(*base, *goodput(), *prices, "--seeds", 2)
    assert "1 of 2 replays are there already" in more.err
    # A file without models and prices has no such keys and goes on without.
    for seeds in (1, 2):
        assert cli(*base[:-1], "plain.json", "--seeds", seeds).code == 0
    settings = json.loads((working / "plain.json").read_text())["settings"]
    assert {"assumptions", "prices_per_gpu_hour"} & set(settings) == set()
    settings_gone = json.loads((working / "plain.json").read_text())
    settings_gone["settings"] = None
    (working / "plain.json").write_text(json.dumps(settings_gone))
    assert "plain.json:settings: is null" in cli(*base[:-1], "plain.json", "--seeds", 2).error_line


def test_all_applications_may_be_fitted_and_none_may_be_missing(cli: Cli, working: Path) -> None:
    rows = (working / "small.csv").read_text().splitlines()
    kept = [row for row in rows if row.startswith("name") or ",vision," in row]
    (working / "vision.csv").write_text("\n".join(kept) + "\n")
    base = ("--cluster", "cluster.yaml", "--policy", "fifo", *goodput())
    assert cli("simulate", "sweep", "vision.csv", *base).code == 0
    cli("simulate", "sweep", "vision.csv", "small.csv", *base).refuses(
        "--traces: are missing for application 'language'"
    )


def test_a_clusters_trace_is_no_workload_of_a_sweep(cli: Cli, working: Path) -> None:
    (working / "helios.csv").write_text('"job_id",gpu_num,submit_time,duration\na,1,0,100\n')
    (working / "philly.json").write_text("[]")
    base = ("--cluster", "cluster.yaml", *TRACES, "--policy", "fifo", "-o", "s.json")
    for name in ("helios.csv", "philly.json"):
        refused = cli("simulate", "sweep", "small.csv", name, *base)
        assert refused.code == 2
        assert (
            f"{name}: is a cluster's trace; make a workload of it with ddltool simulate convert first"
            in refused.error_line
        )
    assert not (working / "s.json").exists()
