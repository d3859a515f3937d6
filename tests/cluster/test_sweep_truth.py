"""Sweeps with fitted models and prices: the bits of single replays, and no file of two truths."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result
from tests.helpers.workloads import FOLDER, write_goodput

Cli = Callable[..., Result]
TRACES = ("--traces", FOLDER / "traces")
FIELDS = "noise=900,samples=2e5,batch=64,max-batch=4096,max-local=256"
MIXED = """kind: ddltool.cluster
name: mixed
nodes:
  - {name: slow, count: 2, devices: {type: gpu, count: 4}}
  - {name: fast, count: 1, devices: {type: other, count: 4}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with what separates the parts of ``--goodput`` in its name: a workload, a cluster, a model."""
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


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_sweep_has_the_bits_of_single_replays(cli: Cli, folder: Path, jobs: int) -> None:
    base = ("small.csv", "--cluster", "cluster.yaml", *TRACES, *goodput(), "--price", "gpu=1,other=3")
    swept = cli(
        "simulate", "sweep", *base, "--policy", "fifo,ours", "--seeds", 2, "--jobs", jobs, "--csv", "rows.csv", "--json"
    )
    assert swept.code == 0, swept.err
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
    with (folder / "rows.csv").open() as rows:
        assert [float(row["cost"]) for row in csv.DictReader(rows)] == [one["cost"] for one in cells.values()]
    measured = cli("simulate", *base[:3], *TRACES, "--policy", "fifo", "--json").document["policies"]["fifo"]
    assert measured["avg_jct_s"] != cells["fifo", 0]["avg_jct_s"]  # the model was in use


def test_a_seed_of_a_sweep_draws_failures_as_a_single_replay_does(cli: Cli, folder: Path) -> None:
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


def test_costs_are_compared_where_all_have_one(cli: Cli, folder: Path) -> None:
    base = ("simulate", "sweep", "small.csv", "--cluster", "cluster.yaml", *TRACES, "--policy", "fifo,ours")
    plain = cli(*base, "--compare", "ours,fifo", "--json").document["comparison"]["comparisons"]
    assert "cost" not in {row["measure"] for row in plain}
    priced = cli(*base, "--compare", "ours,fifo", "--price", "gpu=1,other=3", "--json").document
    rows = {row["measure"]: row["ratio"] for row in priced["comparison"]["comparisons"]}
    fifo, ours = (cell["figures"]["cost"] for cell in priced["cells"])
    assert rows.pop("cost") == pytest.approx(ours / fifo)
    assert rows["gpu_seconds"] != pytest.approx(ours / fifo, rel=1e-6)
    assert rows == {row["measure"]: row["ratio"] for row in plain}
    free = cli(*base, "--compare", "ours,fifo", "--price", "0", "--json")
    assert free.code == 0, free.err
    assert "cost" not in {row["measure"] for row in free.document["comparison"]["comparisons"]}
    shown = cli(*base, "--compare", "ours,fifo", "--price", "gpu=1,other=3").out
    assert "cost (price)" in shown
    assert f"{ours:,.2f}" in shown


def test_a_file_is_of_one_truth(cli: Cli, folder: Path) -> None:
    base = ("simulate", "sweep", "small.csv", "--cluster", "cluster.yaml", *TRACES, "--policy", "fifo", "-o", "s.json")
    prices = ("--price", "1")
    assert cli(*base, *goodput(), *prices, "--seeds", 1).code == 0
    kept = (folder / "s.json").read_bytes()
    again = cli(*base, *goodput(), *prices, "--seeds", 1)
    assert "1 of 1 replays are there already" in again.err
    assert (folder / "s.json").read_bytes() == kept
    for arguments, words in [
        (goodput(), "settings.prices_per_gpu_hour: is not that of this sweep"),
        ((*goodput(), "--price", "2"), "settings.prices_per_gpu_hour: is not that of this sweep"),
        (prices, "settings.traces.vision: has changed since"),
        ((*goodput(800), *prices), "settings.traces.vision: has changed since"),
    ]:
        refused = cli(*base, *arguments, "--seeds", 2)
        assert refused.code == 2
        assert words in refused.error_line
    text = (folder / "goodput.json").read_text()
    (folder / "goodput.json").write_text(text.replace("0.05", "0.06", 1))
    assert "settings.traces.vision" in cli(*base, *goodput(), *prices, "--seeds", 2).error_line
    (folder / "goodput.json").write_text(text)
    assert (folder / "s.json").read_bytes() == kept
    more = cli(*base, *goodput(), *prices, "--seeds", 2)
    assert "1 of 2 replays are there already" in more.err
    # A file without models and prices has no such keys and goes on without.
    for seeds in (1, 2):
        assert cli(*base[:-1], "plain.json", "--seeds", seeds).code == 0
    settings = json.loads((folder / "plain.json").read_text())["settings"]
    assert {"assumptions", "prices_per_gpu_hour"} & set(settings) == set()
    settings_gone = json.loads((folder / "plain.json").read_text())
    settings_gone["settings"] = None
    (folder / "plain.json").write_text(json.dumps(settings_gone))
    assert "plain.json:settings: is null" in cli(*base[:-1], "plain.json", "--seeds", 2).error_line


def test_all_applications_may_be_fitted_and_none_may_be_missing(cli: Cli, folder: Path) -> None:
    rows = (folder / "small.csv").read_text().splitlines()
    kept = [row for row in rows if row.startswith("name") or ",vision," in row]
    (folder / "vision.csv").write_text("\n".join(kept) + "\n")
    base = ("--cluster", "cluster.yaml", "--policy", "fifo", *goodput())
    assert cli("simulate", "sweep", "vision.csv", *base).code == 0
    refused = cli("simulate", "sweep", "vision.csv", "small.csv", *base)
    assert refused.code == 2
    assert "--traces: are missing for application 'language'" in refused.error_line


def test_a_clusters_trace_is_no_workload_of_a_sweep(cli: Cli, folder: Path) -> None:
    (folder / "helios.csv").write_text('"job_id",gpu_num,submit_time,duration\na,1,0,100\n')
    (folder / "philly.json").write_text("[]")
    base = ("--cluster", "cluster.yaml", *TRACES, "--policy", "fifo", "-o", "s.json")
    for name in ("helios.csv", "philly.json"):
        refused = cli("simulate", "sweep", "small.csv", name, *base)
        assert refused.code == 2
        assert (
            f"{name}: is a cluster's trace; make a workload of it with ddltool simulate convert first"
            in refused.error_line
        )
    assert not (folder / "s.json").exists()
