"""``ddltool plan --strategy est`` with an order of objectives, a current plan, nodes, and several jobs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddltool.commands.main import run

JOB = """
name: mixed
max_workers: 16
batch_size: 32
cluster: cluster.yaml
devices:
  - {type: V100, capability_per_s: 3.1, price_per_hour: 2.5}
  - {type: P100, capability_per_s: 2.4, price_per_hour: 1.4}
  - {type: T4, capability_per_s: 1.0, price_per_hour: 0.5}
"""
CLUSTER = """
nodes:
  - {name: big, count: 1, devices: {type: V100, count: 4}}
  - {name: mid, count: 2, devices: {type: P100, count: 2}}
  - {name: small, count: 4, devices: {type: T4}}
"""
PARAMS = {
    "alpha_grad_s": 0.01, "beta_grad_s": 0.001, "alpha_sync_local_s": 0.02, "beta_sync_local_s": 0.002,
    "alpha_sync_node_s": 0.4, "beta_sync_node_s": 0.05, "gamma": 1.5,
}  # fmt: skip
GOODPUT = {
    "kind": "ddltool.goodput", "schema_version": 1, "sources": ["x"], "params": PARAMS, "rmsle": 0, "mape": 0,
    "samples": 1, "fit_seconds": 0, "undetermined": [],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "second.yaml").write_text(JOB.replace("16", "8").replace("mixed", "second"))
    (tmp_path / "goodput.json").write_text(json.dumps(GOODPUT))
    (tmp_path / "networked.yaml").write_text(JOB + "network: goodput.json\n")
    return tmp_path


def plan(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:  # type: ignore[type-arg]
    assert run(["plan", *(str(argument) for argument in arguments), "--strategy", "est", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert isinstance(made, dict)
    return made


def devices(made: dict) -> dict[str, int]:  # type: ignore[type-arg]
    found: dict[str, int] = {}
    for row in made["assignments"]:
        found[row["device_type"]] = found.get(row["device_type"], 0) + row["devices"]
    return found


def test_an_order_of_objectives(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert devices(plan(capsys, folder / "job.yaml")) == {"V100": 4, "P100": 4}
    assert devices(plan(capsys, folder / "job.yaml", "--prefer", "price")) == {"T4": 1}
    assert devices(plan(capsys, folder / "job.yaml", "--prefer", "devices, throughput")) == {"V100": 1}


def test_nodes_and_network(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = plan(capsys, folder / "networked.yaml")
    assert (made["network"]["num_nodes"], made["network"]["num_replicas"]) == (3, 8)
    assert made["network"]["sync_s"] == pytest.approx(0.4 + 0.05 * 6)
    assert made["iteration_s"] == pytest.approx((made["overload_factor"] ** 1.5 + 0.7**1.5) ** (1 / 1.5))
    slow = {**GOODPUT, "params": {**PARAMS, "alpha_sync_node_s": 9.0}}
    (folder / "goodput.json").write_text(json.dumps(slow))
    assert devices(plan(capsys, folder / "networked.yaml")) == {"V100": 4}
    assert run(["plan", str(folder / "networked.yaml"), "--strategy", "est"]) == 0
    assert "one node: 4 devices on 1" in capsys.readouterr().out


def test_the_current_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = folder / "now.json"
    plan(capsys, folder / "job.yaml", "-o", now)
    (folder / "cluster.yaml").write_text(CLUSTER.replace("count: 1, devices", "count: 2, devices"))
    for horizon, stays in ((200, True), (600, False)):
        made = plan(capsys, folder / "job.yaml", "--current", now, "--migration", 60, "--horizon", horizon)
        assert made["migration"]["stay"] is stays
        assert devices(made) == ({"V100": 4, "P100": 4} if stays else {"V100": 8})
    run(["plan", str(folder / "job.yaml"), "--strategy", "est", "--current", str(now), "--horizon", "600"])
    shown = capsys.readouterr().out
    assert "move 8 devices" in shown
    assert max(len(line) for line in shown.splitlines()) <= 80


def test_several_jobs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for share in ("sum", "max-min"):
        made = plan(capsys, folder / "job.yaml", "--with", folder / "second.yaml", "--share", share)
        assert made["gap"] == 0
        used = [devices(job["plan"]) for job in made["jobs"]]
        assert all(sum(each.get(name, 0) for each in used) <= 4 for name in ("V100", "P100", "T4"))
        smallest = min(job["relative"] for job in made["jobs"])
        assert made["value"] == pytest.approx(
            smallest if share == "max-min" else sum(j["relative"] for j in made["jobs"])
        )
    assert run(["plan", str(folder / "job.yaml"), "--strategy", "est", "--with", str(folder / "second.yaml")]) == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines()) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["job.yaml", "--strategy", "bsp", "--prefer", "price"], "--prefer, --current and --with need --strategy est"),
        (["job.yaml", "--strategy", "est", "--prefer", "speed"], "objective: unknown objective 'speed'"),
        (["networked.yaml", "--strategy", "est", "--prefer", "price"], "--prefer: does not go with network"),
        (["job.yaml", "--strategy", "est", "--current", "goodput.json"], "goodput.json:kind: is 'ddltool.goodput'"),
        (["job.yaml", "--strategy", "est", "--with", "second.yaml", "--share", "fair"], "--share: unknown rule 'fair'"),
        (["job.yaml", "--strategy", "est", "--with", "networked.yaml"], "network: is not part of a joint plan"),
        (
            ["job.yaml", "--strategy", "est", "--with", "second.yaml", "-o", "x.json"],
            "--output: holds the plan of one job",
        ),
    ],
)
def test_what_does_not_go_together(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    assert run(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_network_needs_nodes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = JOB.replace("cluster: cluster.yaml", "network: goodput.json").replace("}", ", count: 4}")
    (folder / "alone.yaml").write_text(alone)
    assert run(["plan", str(folder / "alone.yaml"), "--strategy", "est"]) == 2
    assert "network: needs cluster: beside it" in capsys.readouterr().err
