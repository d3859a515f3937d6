"""What is beside ``ddltool simulate``, through the commands: sweeps, and questions about one job."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.test_advise import write_state
from tests.conftest import Result

Cli = Callable[..., Result]
FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "workloads"
WORKLOAD = FOLDER / "synthetic.csv"
SHARED = ("--cluster", FOLDER / "cluster.yaml", "--traces", FOLDER / "traces")


def test_a_sweep_has_the_figures_of_single_replays(cli: Cli, tmp_path: Path) -> None:
    shutil.copyfile(FOLDER / "synthetic.csv", tmp_path / "again.csv")
    files = (FOLDER / "synthetic.csv", tmp_path / "again.csv")
    swept = cli(
        *("simulate", "sweep", *files, *SHARED, "--policy", "fifo,srtf", "--compare", "srtf,fifo"),
        *("--csv", tmp_path / "rows.csv", "--json"),
    )
    assert swept.code == 0, swept.err
    single = cli("simulate", files[0], *SHARED, "--policy", "fifo,srtf", "--json").document["policies"]
    cells = swept.document["cells"]
    assert [(cell["workload"], cell["policy"]) for cell in cells] == [
        (name, policy) for name in ("synthetic", "again") for policy in ("fifo", "srtf")
    ]
    for cell in cells:
        assert cell["figures"]["avg_jct_s"] == single[cell["policy"]]["avg_jct_s"]
    with (tmp_path / "rows.csv").open() as rows:
        assert len(list(csv.DictReader(rows))) == 4
    measures = {row["measure"]: row for row in swept.document["comparison"]["comparisons"]}
    change = single["srtf"]["avg_jct_s"] / single["fifo"]["avg_jct_s"]
    assert any(row["ratio"] == pytest.approx(change) for row in measures.values())
    shown = cli("simulate", "sweep", files[0], *SHARED, "--policy", "fifo,srtf", "--compare", "srtf,fifo")
    assert "Change from fifo to srtf" in shown.out
    assert max(len(line) for line in shown.out.splitlines()) <= 80


def test_gpus_held_over_time_add_up(cli: Cli) -> None:
    found = cli("simulate", FOLDER / "synthetic.csv", *SHARED, "--policy", "fifo,ours", "--json").document
    for record in found["policies"].values():
        usage = record["usage"]
        assert usage["time_s"] == sorted(usage["time_s"])
        assert 0 < max(usage["gpus"]) <= 16
        spans = zip(usage["time_s"], usage["time_s"][1:], usage["gpus"], strict=False)
        held = sum(gpus * (end - begin) for begin, end, gpus in spans)
        assert held == pytest.approx(sum(job["gpu_seconds"] for job in record["jobs"]), rel=0.05)


def test_the_advice_is_the_functions(cli: Cli, tmp_path: Path) -> None:
    state = write_state(tmp_path)
    shown = cli("simulate", "advise", state, "-o", tmp_path / "advice.json")
    assert shown.code == 0, shown.err
    assert ("Resize from" in shown.out) or ("Stay on" in shown.out)
    assert json.loads((tmp_path / "advice.json").read_text())["kind"] == "ddltool.advice"


def test_the_first_local_batch_is_the_baseline(cli: Cli, tmp_path: Path) -> None:
    made = cli("simulate", "trials", "vision", "--policy", "fifo", "--local-batch", "32,16,64", "--json")
    assert made.code == 0, made.err
    assert list(made.document["policies"]) == ["fixed-32", "fixed-16", "fixed-64", "fifo"]
    assert made.document["search"]["local_batch_size"] == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate", "w.csv", "v.csv"), "Got unexpected extra argument"),
        (("simulate", "w.csv", "--local-batch", "4"), "No such option: --local-batch"),
        (("simulate",), "Missing argument 'WORKLOAD.csv'"),
        (("simulate", WORKLOAD, *SHARED[2:]), "--cluster: is missing"),
        (("simulate", "autoscale", "a", "--mtbf", "3h"), "No such option: --mtbf"),
        (("simulate", "autoscale", "nothing"), "nothing"),
        (("simulate", "autoscale", ""), "APP: is empty"),
        (("simulate", "advise", "x.yaml"), "x.yaml: no such file"),
        (("simulate", "trials", "a", *SHARED[2:]), "--cluster: is missing"),
        (("simulate", "trials", "vision", "--local-batch", "0"), "--local-batch: 0 is below 1"),
        (("simulate", "generate", "--policy", "pollux"), "No such option: --policy"),
        (("simulate", "convert", "w.csv", "--failure-seed", "0"), "No such option: --failure-seed"),
        (("simulate", "sweep", WORKLOAD, "--metrics"), "No such option: --metrics"),
        (("simulate", "sweep", WORKLOAD, "--price", "T4=1"), "price"),
        (("simulate", "sweep", WORKLOAD, "--power", "1000"), "--power: is 1000.0; from -50 to 50"),
        (("simulate", "sweep", WORKLOAD, *SHARED, "--goodput", "vision"), "--goodput: is 'vision'"),
        (("simulate", "sweep", WORKLOAD, *SHARED, "--goodput", "vision=x.json"), "vision: lacks noise"),
        (("simulate", "sweep", WORKLOAD, "--compare", "ours"), "--compare: is 'ours'; two policies"),
        (
            ("simulate", "sweep", WORKLOAD, "--policy", "fifo", "--compare", "fifo,sia"),
            "two policies of those replayed: fifo",
        ),
        (("simulate", "sweep", WORKLOAD, "--engine", "cloud"), "--engine: unknown engine 'cloud'"),
        (("simulate", "sweep", WORKLOAD, WORKLOAD), "is given twice"),
    ],
)
def test_what_does_not_go_together_is_one_line(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = cli(*arguments)
    assert refused.code == 2
    assert message in refused.error_line
    assert not list(tmp_path.glob("*.csv"))
