"""Predicted against measured, on runs whose truth is known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ddltool.analyzers.job.diagnosing.verification import error_text, verify
from ddltool.analyzers.job.goodput.throughput import grad_time_s
from ddltool.analyzers.job.planning.job_model import combine, measured_speeds
from ddltool.analyzers.step.measured.feedback import read_run
from ddltool.errors import InputError
from ddltool.graph import Graph, Op, write_graph
from ddltool.plans import Plan
from tests.conftest import Cli, throughput, write_lines

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
                    **{"kind": "ddltool.telemetry", "schema_version": 1, "step": step, "rank": rank},
                    **{"world_size": len(batches), "num_nodes": 1, "device": name, "batch": batch},
                    **{"total_batch": sum(batches.values()), "compute_s": computed[name]},
                    **{"wait_s": longest - computed[name], "sync_s": sync_s},
                    **{"step_s": longest + sync_s, "memory_bytes": 1e9},
                }
            )
    return found


def frame(*args: Any, **options: Any) -> pd.DataFrame:
    return pd.DataFrame(rows(*args, **options))


@pytest.fixture
def plan_file(tmp_path: Path, cli: Cli) -> Path:
    (tmp_path / "job.yaml").write_text(JOB, encoding="utf-8")
    assert cli("plan", tmp_path / "job.yaml", "--strategy", "lb-bsp", "-o", tmp_path / "plan.json").code == 0
    return tmp_path / "plan.json"


def test_an_asynchronous_run_has_the_spread_of_its_parts(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "job.yaml").write_text(JOB, encoding="utf-8")
    asked = ("--strategy", "elastic-bsp", "-o", tmp_path / "plan.json")
    assert cli("plan", tmp_path / "job.yaml", *asked).code == 0
    run = frame({"fast": 8, "slow": 8}, {"fast": 0.1, "slow": 0.2}, noise=0.0, steps=43)
    run.loc[run["step"] >= 23, "step_s"] *= 1.5
    found = verify(planned(tmp_path / "plan.json"), read_run(run, "t")).iteration
    assert (found.low_s, found.high_s) == pytest.approx((2 * 0.21, 2 * 0.315))
    assert found.low_s < found.measured_s < found.high_s


def planned(path: Path) -> Plan:
    return Plan.model_validate_json(path.read_text(encoding="utf-8"))


def test_a_run_as_planned(plan_file: Path) -> None:
    """24 and 8 samples, 0.1 s each by the capabilities."""
    found = verify(planned(plan_file), read_run(frame({"fast": 24, "slow": 8}, {"fast": 0.1, "slow": 0.1}), "t"))
    assert found.iteration.predicted_s == pytest.approx(0.1)
    assert found.iteration.measured_s == pytest.approx(0.11, rel=0.05)
    assert [check.predicted_s for check in found.ranks] == pytest.approx([0.1, 0.1])
    assert all(abs(check.error) < 0.02 for check in found.ranks)
    assert [line.partition(":")[0] for line in found.refit] == [
        "the plan leaves synchronisation out; measured 10 ms per step"
    ]


def test_a_slower_device_is_named(plan_file: Path) -> None:
    found = verify(planned(plan_file), read_run(frame({"fast": 24, "slow": 8}, {"fast": 0.1, "slow": 0.2}), "t"))
    assert found.iteration.error == pytest.approx(0.1 / 0.21 - 1, abs=0.02)
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
    assert not found.passed


def test_a_model_of_the_real_devices(plan_file: Path) -> None:
    params = throughput(alpha_grad_s=0.01, beta_grad_s=0.002, alpha_sync_local_s=0.03)
    seconds = {name: float(grad_time_s(params, batch)) for name, batch in (("fast", 24), ("slow", 8))}
    run = read_run(frame({"fast": 24, "slow": 8}, seconds, sync_s=0.03, noise=0.0), "t")
    found = verify(planned(plan_file), run, {"": params})
    assert found.iteration.predicted_s == pytest.approx(0.058 + 0.03)
    assert found.iteration.error == pytest.approx(0.0, abs=1e-9)
    assert found.refit == []
    with pytest.raises(InputError, match="has no model of slow; it knows fast"):
        verify(planned(plan_file), run, {"fast": params})


def test_the_last_of_several_runs_and_no_smaller_last_steps() -> None:
    first = rows({"fast": 24, "slow": 8}, {"fast": 1.0, "slow": 1.0})
    second = rows({"fast": 24, "slow": 8}, {"fast": 0.1, "slow": 0.1})
    tail = [
        {**row, "step": 40, "batch": 2, "total_batch": 4, "compute_s": 0.001, "step_s": 0.001} for row in second[-2:]
    ]
    run = read_run(pd.DataFrame([*first, *second, *tail]), "t")
    assert run.iteration_s == pytest.approx(0.11, rel=0.05)
    assert [rank.steps for rank in run.ranks] == [37, 37]
    assert measured_speeds(run, 8, {})[0] == pytest.approx({"fast": 30, "slow": 10}, rel=0.02)


def test_another_number_of_processes_is_refused(plan_file: Path) -> None:
    with pytest.raises(InputError, match="telemetry: is of 3 processes, the plan of 2"):
        verify(planned(plan_file), read_run(frame(dict.fromkeys("abc", 8), dict.fromkeys("abc", 0.1)), "t"))


def test_the_command(plan_file: Path, tmp_path: Path, cli: Cli) -> None:
    told = write_lines(tmp_path / "t.jsonl", rows({"fast": 24, "slow": 8}, {"fast": 0.1, "slow": 0.2}))
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
    told = write_lines(tmp_path / "t.jsonl", rows({"fast": 24, "slow": 8}, {"fast": 0.1, "slow": 0.1}))
    failed = cli("verify", plan_file, told, *options)
    assert failed.code == 2
    assert failed.error_line.startswith(message)


def test_plan_auto_on_the_command_line(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "job.yaml").write_text(JOB, encoding="utf-8")
    told = write_lines(tmp_path / "t.jsonl", rows({"fast": 24, "slow": 8}, {"fast": 0.1, "slow": 0.2}))
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
    assert shown.out.splitlines()[0].startswith("Use the one fast and the one slow, 24 samples")
    assert max(len(line) for line in shown.out.splitlines()) <= 80


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--objective", "fast"], "--objective: unknown objective 'fast'"),
        (["--strategy", "est", "--objective", "cheapest"], "--objective: has no part in --strategy est"),
        (["--objective", "cheapest"], "devices.fast.price_per_hour: is missing"),
        (["--bandwidth", "fast"], "bandwidth: 'fast' is"),
    ],
)
def test_auto_refuses_what_it_cannot_read(tmp_path: Path, cli: Cli, options: list[str], message: str) -> None:
    (tmp_path / "job.yaml").write_text(JOB + "model: zoo:cifarnet\n", encoding="utf-8")
    cli("plan", tmp_path / "job.yaml", *options).refuses(message)


def test_telemetry_of_devices_that_the_job_does_not_offer(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "job.yaml").write_text(JOB, encoding="utf-8")
    told = write_lines(tmp_path / "t.jsonl", rows({"K80": 16, "slow": 16}, {"K80": 0.1, "slow": 0.2}))
    cli("plan", tmp_path / "job.yaml", "--telemetry", told).refuses(
        "is of device 'K80', which the job does not offer; types there: fast, slow"
    )


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


def test_another_device_is_named_and_not_blamed(plan_file: Path, tmp_path: Path, cli: Cli) -> None:
    """Rank 1 was planned on a slow device; an H100 in its place is ten times as fast."""
    made = rows({"fast": 24, "H100": 8}, {"fast": 0.1, "H100": 0.01})
    found = verify(planned(plan_file), read_run(pd.DataFrame(made), "t"))
    assert not found.complete
    assert found.refit[0].startswith("rank 1 was planned on slow, ran on H100: the run did not follow the plan")
    assert not any(line.startswith("H100 computes") for line in found.refit)
    told = write_lines(tmp_path / "t.jsonl", made)
    plain = cli("verify", plan_file, told)
    assert (plain.code, "FAILED: the run did not follow the plan" in plain.out) == (1, True)
    judged = cli("verify", plan_file, told, "--max-error", "20%")
    assert judged.code == 1
    assert "H100 for slow" in judged.out
    # No time of another device is a finding: neither of the step, nor of its parts.
    elsewhere = write_lines(tmp_path / "e.jsonl", rows({"cpu": 24, "H100": 8}, {"cpu": 90.0, "H100": 0.01}))
    for told in (judged.out, cli("verify", plan_file, elsewhere, "--max-error", "20%").out):
        assert "the plan's devices, so its times are not held against the measured ones" in " ".join(told.split())
        assert "the limit" not in told
        assert "synchronisation took" not in told
        assert not re.search(r"\d%", told.partition("part of a step")[2].partition("Compute by")[0])
    both = verify(planned(plan_file), read_run(frame({"H100": 24, "A100": 8}, {"H100": 0.1, "A100": 0.1}), "t"))
    assert [line.partition(",")[0] for line in both.refit] == [
        "rank 0 was planned on fast",
        "rank 1 was planned on slow",
    ]


def test_a_model_of_the_other_device_answers_for_it(plan_file: Path) -> None:
    params = throughput(beta_grad_s=0.1 / 24)
    run = read_run(frame({"fast": 24, "H100": 8}, {"fast": 0.1, "H100": 0.0333}, sync_s=0.0), "t")
    assert verify(planned(plan_file), run, {"": params}).complete


def test_part_of_the_processes_is_no_proof(plan_file: Path, tmp_path: Path, cli: Cli) -> None:
    made = [row for row in rows({"fast": 24, "slow": 8}, {"fast": 0.1, "slow": 0.1}) if row["rank"] == 0]
    found = verify(planned(plan_file), read_run(pd.DataFrame(made), "t"))
    assert found.missing_ranks == [1]
    assert found.refit[0].startswith("no rows of rank 1 (1 of 2 processes)")
    told = write_lines(tmp_path / "t.jsonl", made)
    judged = cli("verify", plan_file, told, "--max-error", "30%", "--json")
    assert judged.code == 1
    assert (judged.document["passed"], judged.document["missing_ranks"]) == (False, [1])


@pytest.mark.parametrize(("text", "remedy"), [("15", "write 15% or 0.15"), ("1.5", "write 1.5% or 0.015")])
def test_a_bare_number_above_one_is_no_share(plan_file: Path, tmp_path: Path, cli: Cli, text: str, remedy: str) -> None:
    told = write_lines(tmp_path / "t.jsonl", rows({"fast": 24, "slow": 8}, {"fast": 0.1, "slow": 0.1}))
    failed = cli("verify", plan_file, told, "--max-error", text)
    assert failed.code == 2
    assert failed.error_line.endswith(remedy)
    assert cli("verify", plan_file, told, "--max-error", "150%").code == 0


IMPOSSIBLE = [
    ({"step_s": 0.0}, "line 5:step_s: is 0; a step takes at least 1 ns"),
    ({"compute_s": 5e-324}, "line 5:compute_s: is 5e-324; a step takes at least 1 ns"),
    ({"batch": 1e-320}, "line 5:batch: is "),
    ({"wait_s": 2e9}, "line 5:wait_s: is 2000000000; a number from 0 to 1000000000"),
    ({"rank": 2}, "line 5:rank: is 2; below the number of processes"),
    ({"num_nodes": 3}, "line 5:num_nodes: is 3; at most the number of processes"),
    ({"step": 1}, "line 5:step: is 1; the steps of a rank rise within a run"),
    ({"batch": 33}, "line 5:batch: is 33; at most total_batch, that of all ranks"),
    ({"batch": 23}, "line 5:total_batch: is 32; the samples of all ranks in the step"),
    ({"device": None}, "line 5:device: is empty; give a text"),
]


@pytest.mark.parametrize(("change", "message"), IMPOSSIBLE)
@pytest.mark.parametrize("command", ["verify", "gate", "report"])
def test_impossible_rows_are_refused_by_all_readers(
    plan_file: Path, tmp_path: Path, cli: Cli, command: str, change: dict[str, Any], message: str
) -> None:
    made = rows({"fast": 24, "slow": 8}, {"fast": 0.1, "slow": 0.1})
    made[4] |= change
    told = write_lines(tmp_path / "t.jsonl", made)
    words: dict[str, list[object]] = {
        "verify": ["verify", plan_file, told],
        "gate": ["gate", told, "--rule", "step_s <= 1"],
        "report": ["report", told, "-o", tmp_path / "page.html"],
    }
    cli(*words[command]).refuses(f"t.jsonl:{message}")
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("command", ["verify", "gate", "report"])
def test_a_run_that_never_trained(plan_file: Path, tmp_path: Path, cli: Cli, command: str) -> None:
    dead = [
        {**row, "batch": 0, "total_batch": 0, "compute_s": 0.0, "step_s": 0.0}
        for row in rows({"fast": 24, "slow": 8}, {"fast": 0.1, "slow": 0.1})
    ]
    told = write_lines(tmp_path / "t.jsonl", dead)
    words: dict[str, list[object]] = {
        "verify": ["verify", plan_file, told],
        "gate": ["gate", told, "--rule", "step_s <= 1"],
        "report": ["report", told, "-o", tmp_path / "page.html"],
    }
    cli(*words[command]).refuses("holds no step with samples")


@pytest.mark.parametrize(
    ("times", "cause"), [(2.0, "quieter machine"), (0.5, "busier machine"), (60.0, "not the devices of the plan")]
)
def test_one_factor_for_all_is_the_machines(plan_file: Path, times: float, cause: str) -> None:
    found = verify(
        planned(plan_file), read_run(frame({"fast": 24, "slow": 8}, dict.fromkeys(("fast", "slow"), 0.1 * times)), "t")
    )
    assert sum(cause in line for line in found.refit) == 1
    uneven = verify(
        planned(plan_file), read_run(frame({"fast": 24, "slow": 8}, {"fast": 0.1 * times, "slow": 0.1}), "t")
    )
    assert not any(cause in line for line in uneven.refit)


def test_a_fit_that_knows_less_than_the_limit_says_so(plan_file: Path) -> None:
    run = read_run(frame({"fast": 24, "slow": 8}, {"fast": 0.1, "slow": 0.2}), "t")
    params = throughput(beta_grad_s=0.1 / 24)
    for error, told in ((0.31, True), (0.05, False)):
        found = verify(planned(plan_file), run, {"": params}, model_error=error)
        assert found.known_error == error
        assert any("known to within 31% only, more than 15%" in line for line in found.refit) == told


def test_the_rest_of_a_subtraction_is_no_prediction(plan_file: Path) -> None:
    params = throughput(alpha_grad_s=0.01363, beta_grad_s=0.0021528, alpha_sync_local_s=1e-17)
    found = verify(
        planned(plan_file), read_run(frame({"fast": 24, "slow": 8}, {"fast": 0.1, "slow": 0.1}), "t"), {"": params}
    )
    assert found.sync.predicted_s == 0.0
    assert error_text(found.sync.predicted_s, 0.065) == "-"


@pytest.mark.parametrize(
    ("predicted", "measured", "shown"),
    [(0.11, 0.1, "+10.0%"), (36.0, 0.1, "x 360"), (1e-3, 0.1, "-99.0%"), (None, 0.1, "-"), (0.1, 0.0, "-")],
)
def test_error_texts(predicted: float | None, measured: float, shown: str) -> None:
    assert error_text(predicted, measured) == shown


def test_predictions_are_scaled_to_what_was_measured() -> None:
    """A CPU that poses as two devices runs at a hundredth of their roofline: the third type would too."""
    found = combine({"V100": 11.0, "P100": 8.0}, {"V100": 1100.0, "P100": 800.0, "T4": 500.0})
    assert found.capabilities == pytest.approx({"V100": 11.0, "P100": 8.0, "T4": 5.0})
    assert found.errors == {"T4": 0.5}
    assert found.remark.startswith("P100, V100 measured, T4 predicted: measured speeds are 0.01 times")
    uneven = combine({"V100": 11.0, "P100": 200.0}, {"V100": 1100.0, "P100": 800.0, "T4": 500.0})
    assert uneven.capabilities["T4"] == pytest.approx(500 * (0.01 * 0.25) ** 0.5)
    assert uneven.errors["T4"] == pytest.approx(24.0)  # 0.25 / 0.01 - 1: nothing sure can follow from it
    near = combine({"V100": 900.0}, {"V100": 1100.0, "T4": 500.0})
    assert (near.capabilities["T4"], near.remark) == (500.0, "V100 measured, T4 predicted")
    blind = combine({"V100": 11.0}, {"T4": 500.0})
    assert "nothing tells how far" in blind.remark
    assert combine({"V100": 11.0}, {"V100": 1100.0}).remark == ""
    assert combine({}, {"V100": 1100.0}).capabilities == {"V100": 1100.0}


def test_what_lies_in_the_noise_is_no_finding() -> None:
    """A part off by less than the steps differ among themselves has no percentage; the step itself always has one."""
    from ddltool.analyzers.answers.reporting.result_sections import verified_table
    from ddltool.results import Verification, VerifiedStep, VerifiedTime

    step = VerifiedStep(predicted_s=1.0, measured_s=1.004, low_s=0.99, high_s=1.05, error=-0.004)

    def errors(sync: VerifiedTime, compute: VerifiedTime) -> list[str]:
        result = Verification(
            plan="p", telemetry="t", iteration=step, compute=compute, sync=sync, ranks=[], refit=[], passed=True
        )
        return [row[-1] for row in verified_table(result, "").rows]

    tiny, small = VerifiedTime(predicted_s=0.007, measured_s=1e-4), VerifiedTime(predicted_s=1.0, measured_s=1.029)
    assert errors(tiny, small) == ["-0.4%", "in the noise", "in the noise"]
    large, off = VerifiedTime(predicted_s=0.07, measured_s=0.01), VerifiedTime(predicted_s=1.0, measured_s=1.04)
    assert errors(large, off) == ["-0.4%", "-3.8%", "x 7"]
