"""``ddltool plan --strategy est`` with an order of objectives, nodes, and several jobs."""

from __future__ import annotations

import json
import re
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
        (["job.yaml", "--strategy", "bsp", "--prefer", "price"], "--prefer: has no part in --strategy bsp"),
        (["job.yaml", "--strategy", "est", "--prefer", "speed"], "objective: unknown objective 'speed'"),
        (["networked.yaml", "--strategy", "est", "--prefer", "price"], "--prefer: does not go with network"),
        (
            ["job.yaml", "--strategy", "est", "--with", "second.yaml", "--share", "fair"],
            "--share: unknown share 'fair'",
        ),
        (["job.yaml", "--strategy", "est", "--with", "networked.yaml"], "network: is not part of a joint plan"),
        (["job.yaml", "--strategy", "est", "--max-gap", "3"], "--max-gap: has no part in --strategy est"),
        (["job.yaml", "--strategy", "lb-bsp", "--top-k", "3"], "--top-k: has no part in --strategy lb-bsp"),
        (["job.yaml", "--strategy", "est", "--share", "sum"], "--share: has no part in a plan of one job"),
        (
            ["job.yaml", "--strategy", "est", "--with", "second.yaml", "--top-k", "2"],
            "--top-k: has no part in a plan of several",
        ),
        *(
            (
                ["job.yaml", "--strategy", "est", "--with", "second.yaml", option, value],
                f"{option}: has no part in a plan of several jobs; leave it out, or leave out --with",
            )
            for option, value in (("--prefer", "price"), ("--graph", "none.json"), ("--output", "x.json"))
        ),
        (["job.yaml", "--time-limit", "nan"], "--time-limit: is nan; give a number"),
        (["job.yaml", "--time-limit", "0"], "--time-limit: is 0; give a number of at least 0.01"),
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


def limited(folder: Path, name: str, constraints: str, text: str = JOB) -> Path:
    """Write a job with constraints."""
    path = folder / name
    path.write_text(f"{text}constraints: {{{constraints}}}\n")
    return path


@pytest.mark.parametrize("strategy", ["auto", "bsp", "lb-bsp", "elastic-bsp", "est"])
def test_no_strategy_is_slower_than_the_job_allows(
    folder: Path, capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    """Whatever is planned reaches min_throughput, and one that cannot is refused with both figures."""
    reached = {"bsp": 12.19, "est": 19.2, "lb-bsp": 25.6, "elastic-bsp": 26, "auto": 26}[strategy]
    for least in (6, 13, 30):
        file = limited(folder, "fast.yaml", f"min_throughput: {least}")
        code = run(["plan", str(file), "--strategy", strategy, "--json"])
        shown = capsys.readouterr()
        if code == 0:
            assert json.loads(shown.out)["throughput"] >= least
        else:
            assert code == 3
            assert f"fast.yaml: {'no strategy has a plan: ' if strategy == 'auto' else ''}" in shown.err
            assert f"min_throughput: at least {least}" in shown.err
        assert code == (0 if least <= reached else 3)


def test_auto_maps_over_several_types_when_one_is_not_enough(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(limited(folder, "mixed.yaml", "min_throughput: 13")), "--json"]) == 0
    options = {each["strategy"]: each for each in json.loads(capsys.readouterr().out)["decision"]["options"]}
    assert options["est"]["determinism"] == "D0"
    assert len(options["est"]["devices"]) > 1
    assert options["est"]["throughput"] >= 13
    assert run(["plan", str(limited(folder, "one.yaml", "min_throughput: 12")), "--json"]) == 0
    options = {each["strategy"]: each for each in json.loads(capsys.readouterr().out)["decision"]["options"]}
    assert (options["est"]["determinism"], len(options["est"]["devices"])) == ("D1", 1)


def test_unknown_kernels_are_not_hardware_agnostic(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(limited(folder, "d2.yaml", "determinism: D2")), "--strategy", "est", "--json"]) == 0
    shown = capsys.readouterr()
    assert len(devices(json.loads(shown.out))) == 1
    assert "D2: nothing says which kernels the model uses, so the plan keeps to one device type" in shown.err
    sure = limited(folder, "sure.yaml", "determinism: D2, hardware_agnostic: true")
    assert len(devices(plan(capsys, sure))) > 1


def test_the_job_that_cannot_run_or_has_to_wait_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broke = limited(folder, "broke.yaml", "max_price_per_hour: 0.1", JOB.replace("mixed", "broke"))
    assert run(["plan", str(folder / "job.yaml"), "--strategy", "est", "--with", str(broke)]) == 3
    assert "broke.yaml: max_price_per_hour" in capsys.readouterr().err
    slow = limited(folder, "slow.yaml", "min_throughput: 40", JOB.replace("mixed", "slow"))
    assert run(["plan", str(folder / "job.yaml"), "--strategy", "est", "--with", str(slow)]) == 3
    assert f"error: {slow}: min_throughput: at least 40" in capsys.readouterr().err
    first = limited(folder, "first.yaml", "min_throughput: 15")
    second = limited(folder, "later.yaml", "min_throughput: 12", JOB.replace("mixed", "later"))
    made = plan(capsys, first, "--with", second)
    (waiting,) = (job for job in made["jobs"] if job["plan"] is None)
    found = re.search(
        r"waits: on what the others leave it would reach ([0-9.]+) mini-batches/s, below its", waiting["waits"]
    )
    assert found is not None
    assert 0 < float(found[1]) < 15


def test_prices_have_a_limit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dear = limited(folder, "dear.yaml", "max_price_per_hour: 12", JOB.replace("2.5", "1.0e13"))
    assert run(["plan", str(dear), "--strategy", "est"]) == 2
    assert "devices[0].price_per_hour: is 10000000000000.0; give a number of at most 1e+09" in capsys.readouterr().err
