"""Predicted against measured, on runs whose truth is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ddltool.analyzers.deciding.feedback import read_run
from ddltool.analyzers.deciding.verification import verify
from ddltool.analyzers.goodput.throughput import ThroughputParams, grad_time_s
from ddltool.errors import InputError
from ddltool.graph import Graph, Op
from ddltool.graph_io import write_graph
from ddltool.plan import Plan
from tests.conftest import Result

Cli = Callable[..., Result]

JOB = """
kind: ddltool.job
name: mixed
max_workers: 4
batch_size: 8
devices:
  - {type: fast, count: 1, capability_per_s: 30}
  - {type: slow, count: 1, capability_per_s: 10}
"""


def rows(
    batches: dict[str, int], seconds: dict[str, float], sync_s: float = 0.01, steps: int = 40, noise: float = 0.02
) -> list[dict[str, Any]]:
    """Telemetry of a run in which each device takes ``seconds`` for its whole batch."""
    chance = np.random.default_rng(0)
    found: list[dict[str, Any]] = []
    for step in range(steps):
        slow = 5.0 if step < 3 else 1.0  # the first steps are no steady state
        computed = {name: slow * value * float(chance.uniform(1 - noise, 1 + noise)) for name, value in seconds.items()}
        longest = max(computed.values())
        for rank, (name, batch) in enumerate(batches.items()):
            found.append(
                {
                    "kind": "ddltool.telemetry",
                    "schema_version": 1,
                    "step": step,
                    "rank": rank,
                    "world_size": len(batches),
                    "num_nodes": 1,
                    "device": name,
                    "batch": batch,
                    "total_batch": sum(batches.values()),
                    "compute_s": computed[name],
                    "wait_s": longest - computed[name],
                    "sync_s": sync_s,
                    "step_s": longest + sync_s,
                    "memory_bytes": 1e9,
                }
            )
    return found


def frame(*args: Any, **options: Any) -> pd.DataFrame:
    return pd.DataFrame(rows(*args, **options))


def write(path: Path, made: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    return path


@pytest.fixture
def plan_file(tmp_path: Path, cli: Cli) -> Path:
    (tmp_path / "job.yaml").write_text(JOB, encoding="utf-8")
    assert cli("plan", tmp_path / "job.yaml", "--strategy", "lb-bsp", "-o", tmp_path / "plan.json").code == 0
    return tmp_path / "plan.json"


def planned(path: Path) -> Plan:
    return Plan.model_validate_json(path.read_text(encoding="utf-8"))


def test_a_run_as_planned(plan_file: Path) -> None:
    """24 and 8 samples, 0.1 s each by the capabilities."""
    found = verify(planned(plan_file), read_run(frame({"fast": 24, "slow": 8}, {"fast": 0.1, "slow": 0.1}), "t"))
    assert found.predicted_s == pytest.approx(0.1)
    assert found.measured_s == pytest.approx(0.11, rel=0.05)
    assert [check.predicted_s for check in found.ranks] == pytest.approx([0.1, 0.1])
    assert all(abs(check.error) < 0.02 for check in found.ranks)
    assert [line.partition(":")[0] for line in found.refit] == [
        "the plan leaves synchronisation out; measured 10 ms per step"
    ]


def test_a_slower_device_is_named(plan_file: Path) -> None:
    found = verify(planned(plan_file), read_run(frame({"fast": 24, "slow": 8}, {"fast": 0.1, "slow": 0.2}), "t"))
    assert found.error == pytest.approx(0.1 / 0.21 - 1, abs=0.02)
    assert "slow computes" in found.refit[0]
    assert "slower than predicted" in found.refit[0]
    assert not any(line.startswith("fast") for line in found.refit)


def test_a_run_with_other_batches_did_not_follow_the_plan(plan_file: Path) -> None:
    found = verify(planned(plan_file), read_run(frame({"fast": 16, "slow": 16}, {"fast": 0.07, "slow": 0.2}), "t"))
    assert [line.split(" did not")[0].split(":")[0] for line in found.refit[:2]] == [
        "rank 0 trained on 16 samples per step, the plan gives it 24",
        "rank 1 trained on 16 samples per step, the plan gives it 8",
    ]
    assert [check.predicted_s for check in found.ranks] == pytest.approx([0.1 * 16 / 24, 0.2])


def test_a_model_of_the_real_devices(plan_file: Path) -> None:
    params = ThroughputParams(
        alpha_grad_s=0.01,
        beta_grad_s=0.002,
        alpha_sync_local_s=0.03,
        beta_sync_local_s=0.0,
        alpha_sync_node_s=0.0,
        beta_sync_node_s=0.0,
        gamma=1.0,
    )
    seconds = {name: float(grad_time_s(params, batch)) for name, batch in (("fast", 24), ("slow", 8))}
    run = read_run(frame({"fast": 24, "slow": 8}, seconds, sync_s=0.03, noise=0.0), "t")
    found = verify(planned(plan_file), run, {"": params})
    assert found.predicted_s == pytest.approx(0.058 + 0.03)
    assert found.error == pytest.approx(0.0, abs=1e-9)
    assert found.refit == ()
    with pytest.raises(InputError, match="has no model of slow; it knows fast"):
        verify(planned(plan_file), run, {"fast": params})


def test_the_last_of_several_runs_and_no_smaller_last_steps() -> None:
    first = rows({"fast": 24, "slow": 8}, {"fast": 1.0, "slow": 1.0})
    second = rows({"fast": 24, "slow": 8}, {"fast": 0.1, "slow": 0.1})
    tail = [{**row, "step": 40, "batch": 2, "compute_s": 0.001, "step_s": 0.001} for row in second[-2:]]
    run = read_run(pd.DataFrame([*first, *second, *tail]), "t")
    assert run.iteration_s == pytest.approx(0.11, rel=0.05)
    assert [rank.steps for rank in run.ranks] == [37, 37]
    assert run.capabilities(8) == pytest.approx({"fast": 30, "slow": 10}, rel=0.02)


def test_another_number_of_processes_is_refused(plan_file: Path) -> None:
    with pytest.raises(InputError, match="telemetry: is of 3 processes, the plan of 2"):
        verify(planned(plan_file), read_run(frame(dict.fromkeys("abc", 8), dict.fromkeys("abc", 0.1)), "t"))


def test_the_command(plan_file: Path, tmp_path: Path, cli: Cli) -> None:
    told = write(tmp_path / "t.jsonl", rows({"fast": 24, "slow": 8}, {"fast": 0.1, "slow": 0.2}))
    document = cli("verify", plan_file, told, "--json").document
    assert document["kind"] == "ddltool.verification"
    assert document["iteration"]["error"] == pytest.approx(0.1 / 0.21 - 1, abs=0.02)
    assert document["passed"] is True
    shown = cli("verify", plan_file, told, "--max-error", "15%", "-o", tmp_path / "v.json")
    assert shown.code == 1
    assert "beyond the limit of 15%" in shown.out
    assert json.loads((tmp_path / "v.json").read_text(encoding="utf-8"))["passed"] is False
    assert cli("verify", plan_file, told, "--max-error", "60%").code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-error", "nan"], "--max-error: 'nan' is no share"),
        (["--max-error", "-1"], "--max-error: '-1' is no share"),
        (["--goodput", "missing.json"], "missing.json: no such file"),
    ],
)
def test_bad_options(plan_file: Path, tmp_path: Path, cli: Cli, options: list[str], message: str) -> None:
    told = write(tmp_path / "t.jsonl", rows({"fast": 24, "slow": 8}, {"fast": 0.1, "slow": 0.1}))
    failed = cli("verify", plan_file, told, *options)
    assert failed.code == 2
    assert failed.error_line.startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compute_s": float("nan")}, "line 5:compute_s: is nan"),
        ({"sync_s": -1.0}, "line 5:sync_s: is -1.0"),
        ({"batch": "many"}, "line 5:batch: is many"),
        ({"rank": 7}, "line 5:rank: is 7 of 2 processes"),
        ({"step": 1e300}, "line 5:step: is 1e\\+300"),
    ],
)
def test_bad_rows_are_named(change: dict[str, Any], message: str) -> None:
    made = rows({"fast": 24, "slow": 8}, {"fast": 0.1, "slow": 0.1})
    made[4] |= change
    with pytest.raises(InputError, match=message):
        read_run(pd.DataFrame(made), "t")
    with pytest.raises(InputError, match="has no column 'wait_s'"):
        read_run(pd.DataFrame(made).drop(columns="wait_s"), "t")


def test_plan_auto_on_the_command_line(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "job.yaml").write_text(JOB, encoding="utf-8")
    told = write(tmp_path / "t.jsonl", rows({"fast": 24, "slow": 8}, {"fast": 0.1, "slow": 0.2}))
    before = cli("plan", tmp_path / "job.yaml", "--json").document
    after = cli("plan", tmp_path / "job.yaml", "--telemetry", told, "--json").document
    assert before["decision"]["error"] is None
    assert after["decision"]["error"] == pytest.approx(0.01, abs=0.01)
    assert after["decision"]["communication_source"] == "synchronisation measured on 2 processes"
    sizes = {row["device_type"]: row["local_batch_size"] for row in after["assignments"]}
    assert (before["strategy"], after["strategy"]) == ("lb-bsp", "lb-bsp")
    assert sizes["fast"] in (27, 28)  # 240 against 40 samples a second
    assert after["communication_s"] == pytest.approx(0.01)
    shown = cli("plan", tmp_path / "job.yaml")
    assert "Strategies compared, objective fastest (predicted)" in shown.out
    assert max(len(line) for line in shown.out.splitlines()) <= 80


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--objective", "fast"], "--objective: unknown objective 'fast'"),
        (["--strategy", "bsp", "--objective", "cheapest"], "--objective: has no part in --strategy bsp"),
        (["--objective", "cheapest"], "devices.fast.price_per_hour: is missing"),
        (["--bandwidth", "fast"], "bandwidth: 'fast' is"),
    ],
)
def test_auto_refuses_what_it_cannot_read(tmp_path: Path, cli: Cli, options: list[str], message: str) -> None:
    (tmp_path / "job.yaml").write_text(JOB + "model: zoo:lenet\n", encoding="utf-8")
    failed = cli("plan", tmp_path / "job.yaml", *options)
    assert failed.code == 2
    assert message in failed.error_line


def test_telemetry_of_devices_that_the_job_does_not_offer(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "job.yaml").write_text(JOB, encoding="utf-8")
    told = write(tmp_path / "t.jsonl", rows({"K80": 16, "slow": 16}, {"K80": 0.1, "slow": 0.2}))
    failed = cli("plan", tmp_path / "job.yaml", "--telemetry", told)
    assert failed.code == 2
    assert "is of device 'K80', which the job does not offer; types there: fast, slow" in failed.error_line


@pytest.mark.parametrize(("op_type", "types"), [("aten.mm", {"fast", "slow"}), ("aten.convolution", {"fast"})])
def test_d2_keeps_to_one_type_where_the_model_is_not_eligible(
    tmp_path: Path, cli: Cli, op_type: str, types: set[str]
) -> None:
    graph = Graph.from_ops(
        "toy",
        "training",
        [
            Op(name="w", kind="recv", resource="channel:0", duration_s=1.0, parameter="w", size_bytes=8.0),
            Op(name="forward/a/op", kind="compute", duration_s=1.0, inputs=("w",), op_type=op_type),
            Op(name="g", kind="send", resource="channel:0", duration_s=1.0, parameter="w", inputs=("forward/a/op",)),
        ],
    )
    write_graph(graph, tmp_path / "graph.json")
    text = (
        JOB.replace("count: 1", "count: 2").replace("max_workers: 4", "max_workers: 8")
        + "model: graph.json\nconstraints: {determinism: D2}\n"
    )
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    made = cli("plan", tmp_path / "job.yaml", "--strategy", "est", "--json")
    assert {row["device_type"] for row in made.document["assignments"]} == types
    assert ("D2: the plan keeps to one device type" in made.err) == (types == {"fast"})
