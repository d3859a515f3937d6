"""Where a plan's times come from: one source for all strategies, its own error, and nothing of a step left out."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddltool.analyzers.answers.reporting.plan_section import _device_spans, _optimality_words
from ddltool.analyzers.job.goodput.throughput import StepTime, iteration_time_s
from ddltool.analyzers.job.placement.problem import DeviceType, Problem
from ddltool.analyzers.job.planning.job_model import measured_speeds, scaled_model
from ddltool.analyzers.job.planning.split import plan_bsp
from ddltool.analyzers.step.measured.feedback import RankRun, Run, drift, read_run
from ddltool.artifacts import load
from ddltool.commands.plan import plan
from ddltool.plans import Plan
from tests.conftest import Cli, throughput, write_lines
from tests.job.diagnosing.test_verification import rows

LAUNCH_S, SAMPLE_S, SYNC_S = 0.01, 0.001, 0.02
MAPE, SPREAD = 0.395, 0.28
TOTAL, BATCH = 256, 64
OTHER_S = 0.05
REMEDY = "plan again with --telemetry and this file"


def fit(path: Path, launch_s: float = LAUNCH_S, sample_s: float = SAMPLE_S, sync_s: float = SYNC_S) -> None:
    """Write a fitted model with an error of ``MAPE``."""
    params = {
        "alpha_grad_s": launch_s,
        "beta_grad_s": sample_s,
        "alpha_sync_local_s": sync_s,
        "beta_sync_local_s": 0.0,
        "alpha_sync_node_s": 0.0,
        "beta_sync_node_s": 0.0,
        "gamma": 1.5,
    }
    document = {
        "kind": "ddltool.goodput",
        "schema_version": 1,
        "sources": ["profile.csv"],
        "params": params,
        "rmsle": 0.3,
        "mape": MAPE,
        "samples": 6,
        "fit_seconds": 0.1,
        "undetermined": [],
    }
    path.write_text(json.dumps(document), encoding="utf-8")


def profile(path: Path, device: str, spread: float = SPREAD) -> None:
    """Write two measured batches, their interquartile range twice ``spread``."""
    table = pd.DataFrame(
        {
            "device": device,
            "num_nodes": 1,
            "num_replicas": 1,
            "local_batch_size": [64, 128],
            "sync_time_s": 0.0,
            "peak_memory_bytes": 1e9,
            "step_time_s": [LAUNCH_S + SAMPLE_S * 64, LAUNCH_S + SAMPLE_S * 128],
            "step_time_spread_s": [2 * spread * (LAUNCH_S + SAMPLE_S * 64), 2 * spread * (LAUNCH_S + SAMPLE_S * 128)],
        }
    )
    table.to_csv(path, index=False)


def job_file(folder: Path, types: str, more: str = "") -> Path:
    """Write a job of one device of each type, with a profile and a fit of its own."""
    listed = []
    for name in types:
        profile(folder / f"{name}.csv", name)
        fit(folder / f"{name}.json")
        listed.append(f"  - {{type: {name}, count: 1, profile: {name}.csv, goodput: {name}.json}}")
    text = f"kind: ddltool.job\nname: test\nmax_workers: 4\nbatch_size: {BATCH}\ndevices:\n" + "\n".join(listed) + "\n"
    (folder / "job.yaml").write_text(text + more, encoding="utf-8")
    return folder / "job.yaml"


def telemetry(
    folder: Path, batches: dict[str, int], seconds: dict[str, float], sync_s: float = 0.004, other_s: float = 0.0
) -> Path:
    """Write a run without noise in which every step has ``other_s`` beside compute and synchronisation."""
    made = rows(batches, seconds, sync_s=sync_s, noise=0.0)
    for row in made:
        row["step_s"] += other_s
    path = folder / "telemetry.jsonl"
    write_lines(path, made)
    return path


def compute_of(document: dict[str, Any]) -> dict[str, float]:
    """Return each strategy's seconds of compute per step."""
    return {option["strategy"]: option["compute_s"] for option in document["decision"]["options"]}


def test_measured_speeds_replace_those_of_the_fits_in_every_strategy(tmp_path: Path, cli: Cli) -> None:
    """Two types of one fit; one of them is measured three times as slow as that, with half of the batch each."""
    fitted = LAUNCH_S + SAMPLE_S * 128
    told = telemetry(tmp_path, {"a": 128, "b": 128}, {"a": fitted, "b": 3 * fitted})
    made = cli("plan", job_file(tmp_path, "ab"), "--telemetry", told, "--json").document
    compute = compute_of(made)
    alone = LAUNCH_S + SAMPLE_S * TOTAL  # the fast one is better off without the other under an equal split
    assert made["decision"]["baselines"]["all 2 with equal batches"]["compute_s"] == pytest.approx(3 * fitted)
    assert compute["bsp"] == made["decision"]["baseline"]["compute_s"] == pytest.approx(min(alone, 3 * fitted))
    best = min(max(LAUNCH_S + SAMPLE_S * size, 3 * (LAUNCH_S + SAMPLE_S * (TOTAL - size))) for size in range(1, TOTAL))
    assert compute["lb-bsp"] == pytest.approx(best)
    assert compute["est"] == pytest.approx(4 * (LAUNCH_S + SAMPLE_S * BATCH))  # all four on the fast one
    assert made["strategy"] == "lb-bsp"
    assert made["decision"]["error"] == pytest.approx(MAPE)  # how times grow with the batch is still the fit's


@pytest.mark.parametrize("profiled", [True, False])
def test_types_that_the_run_did_not_have_keep_to_the_measured_ones(tmp_path: Path, cli: Cli, profiled: bool) -> None:
    """The one type is measured at three times its fit, so the fit of the other is stretched by as much."""
    fitted = LAUNCH_S + SAMPLE_S * 128
    told = telemetry(tmp_path, {"a": 128}, {"a": 3 * fitted})
    path = job_file(tmp_path, "ac")
    if not profiled:
        text = path.read_text(encoding="utf-8").replace("profile: a.csv, ", "").replace("profile: c.csv, ", "")
        path.write_text(text, encoding="utf-8")
    made = cli("plan", path, "--telemetry", told, "--json").document
    compute = compute_of(made)
    assert compute["bsp"] == pytest.approx(3 * fitted)
    assert compute["lb-bsp"] == pytest.approx(3 * fitted)
    assert compute["est"] == pytest.approx(3 * 4 * (LAUNCH_S + SAMPLE_S * BATCH))  # on one type of device
    near = telemetry(tmp_path, {"a": 128}, {"a": 1.5 * fitted})
    kept = compute_of(cli("plan", tmp_path / "job.yaml", "--telemetry", near, "--json").document)
    assert kept["est"] == pytest.approx(4 * (LAUNCH_S + SAMPLE_S * BATCH))  # on c, as its fit says


def test_the_goodput_plan_is_by_the_run_as_well(tmp_path: Path, cli: Cli) -> None:
    section = f"goodput: {{initial_batch_size: {TOTAL}, max_batch_size: {TOTAL}, max_local_batch_size: 128}}\n"
    fitted = LAUNCH_S + SAMPLE_S * 128
    text = job_file(tmp_path, "a", section).read_text(encoding="utf-8").replace("count: 1", "count: 2")
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    rows_of = rows({"a": 128, "other": 128}, {"a": 3 * fitted, "other": 3 * fitted}, sync_s=0.004, noise=0.0)
    told = tmp_path / "t.jsonl"
    write_lines(told, ({**row, "device": "a"} for row in rows_of))
    made = cli("plan", tmp_path / "job.yaml", "--telemetry", told, "--json").document
    assert {option["strategy"]: option["iteration_s"] for option in made["decision"]["options"]}[
        "goodput"
    ] == pytest.approx(3 * fitted + 0.004)


def run_of(ranks: list[tuple[str, int, float, int]], sync_s: float = 0.01, nodes: int = 1) -> Run:
    """Return a run from (device, batch, seconds of compute, passes) of each rank."""
    made = tuple(
        RankRun(
            rank=place,
            device=device,
            batch=batch,
            steps=10,
            compute_s=seconds,
            wait_s=0.0,
            error=0.0,
            passes=passes,
        )
        for place, (device, batch, seconds, passes) in enumerate(ranks)
    )
    longest = max(seconds for _, _, seconds, _ in ranks) + sync_s
    return Run(
        world_size=len(made),
        num_nodes=nodes,
        ranks=made,
        iteration_s=longest,
        iteration_low_s=longest,
        iteration_high_s=longest,
        sync_s=sync_s,
    )


def test_a_scaled_curve_gives_the_measured_time_at_the_measured_batch() -> None:
    curve = StepTime(launch_s=0.01, per_sample_s=0.001, saturation=40, memory_limit=100)
    capabilities, factors = measured_speeds(run_of([("a", 90, 0.6, 3)]), 64, {"a": curve})
    scaled = curve.scaled(factors["a"])
    assert scaled.per_sample_s is not None
    # Three passes of thirty samples each, each of which takes as long as forty.
    assert 3 * (scaled.launch_s + 40 * scaled.per_sample_s) == pytest.approx(0.6)
    assert capabilities["a"] == pytest.approx(1 / (scaled.launch_s + 64 * scaled.per_sample_s))
    assert (scaled.saturation, scaled.memory_limit) == (40, 100)


def test_without_a_fit_the_capability_gives_the_measured_time() -> None:
    """A type that no batch below 32 makes faster took 0.2 s for 16: 160 samples a second from 32 on."""
    capabilities, factors = measured_speeds(
        run_of([("a", 16, 0.2, 1), ("b", 16, 0.2, 1)]), 8, {"a": StepTime(saturation=32)}
    )
    assert capabilities == pytest.approx({"a": 20.0, "b": 10.0})
    assert factors == {}


@given(
    gamma=st.floats(1, 10),
    sync_s=st.floats(1e-4, 1.0),
    fitted_s=st.sampled_from([0.0, 0.003, 0.5]),
    nodes=st.sampled_from([1, 2]),
    factor=st.floats(0.1, 10),
)
def test_a_scaled_model_gives_the_runs_step(
    gamma: float, sync_s: float, fitted_s: float, nodes: int, factor: float
) -> None:
    model = throughput(
        alpha_grad_s=0.01, beta_grad_s=0.001, alpha_sync_local_s=fitted_s, alpha_sync_node_s=fitted_s, gamma=gamma
    )
    compute = factor * (0.01 + 0.001 * 90)
    run = run_of([("a", 90, compute, 1), ("a", 90, compute, 1)], sync_s, nodes)
    scaled = scaled_model(model, factor, run)
    assert float(iteration_time_s(scaled, nodes, 2, 90)) == pytest.approx(compute + sync_s, rel=1e-6)


@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    launch=st.floats(0, 1),
    each=st.floats(1e-4, 1),
    rates=st.lists(st.floats(0.1, 50), min_size=3, max_size=3),
)
def test_an_equal_split_wastes_what_its_devices_wait(
    counts: list[int], launch: float, each: float, rates: list[float]
) -> None:
    """The first type is of a fitted curve that has nothing to do with its capability."""
    devices = tuple(
        DeviceType(name=f"d{place}", count=count, capability_per_s=Fraction(rates[place]))
        for place, count in enumerate(counts)
    )
    problem = Problem(job="test", max_workers=8, batch_size=32, devices=devices)
    made = plan_bsp(problem, {"d0": StepTime(launch_s=launch, per_sample_s=each)})
    busy = [(row.compute_s or 0.0, row.devices, row.local_batch_size) for row in made.assignments]
    waits = sum(count * size / 32 * (1 / seconds - 1 / made.iteration_s) for seconds, count, size in busy)
    assert made.waste >= 0
    assert made.waste == pytest.approx(waits, rel=1e-9, abs=1e-9)


def test_waste_is_of_the_capability_in_use(tmp_path: Path, cli: Cli) -> None:
    """A capability that no fit agrees with: the two devices make 128 samples in their fitted time while none waits."""
    text = job_file(tmp_path, "a").read_text(encoding="utf-8").replace("count: 1", "count: 2")
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    made = cli("plan", tmp_path / "job.yaml", "--json").document
    assert made["communication_s"] > 0
    capability = 2 * 128 / BATCH / (LAUNCH_S + SAMPLE_S * 128)
    assert made["waste"] + made["throughput"] == pytest.approx(capability)
    assert made["waste"] == pytest.approx(capability * made["communication_s"] / made["iteration_s"])
    assert f"mini-batches/s of {capability:.4g} on the used devices" in cli("-v", "plan", tmp_path / "job.yaml").out


@pytest.mark.parametrize(
    ("spread", "error", "source"), [(SPREAD, MAPE, "error of the fit"), (0.6, 0.6, "spread of the profile")]
)
def test_times_of_a_fit_have_its_error_at_least(
    tmp_path: Path, cli: Cli, spread: float, error: float, source: str
) -> None:
    path = job_file(tmp_path, "a")
    profile(tmp_path / "a.csv", "a", spread)
    decision = cli("plan", path, "--json").document["decision"]
    assert (decision["error"], decision["error_source"]) == (pytest.approx(error), source)


def test_fitted_synchronisation_is_not_called_measured(tmp_path: Path, cli: Cli) -> None:
    text = job_file(tmp_path, "a").read_text(encoding="utf-8").replace("count: 1", "count: 2")
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    words = " ".join(cli("plan", tmp_path / "job.yaml", "--json").document["decision"]["words"])
    assert "exposed communication (as fitted)" in words
    assert "as measured" not in words


def test_a_measured_step_adds_up(tmp_path: Path, cli: Cli) -> None:
    """Compute 0.2, synchronisation 0.01, and 0.05 of optimizer and loader."""
    told = telemetry(tmp_path, {"a": 128, "b": 128}, {"a": 0.15, "b": 0.2}, sync_s=0.01, other_s=OTHER_S)
    path = job_file(tmp_path, "ab")
    assert cli("plan", path, "--strategy", "bsp", "-o", tmp_path / "plan.json").code == 0
    found = cli("verify", tmp_path / "plan.json", told, "--json").document
    assert found["other"] == {"predicted_s": None, "measured_s": pytest.approx(OTHER_S)}
    parts = [found[name]["measured_s"] for name in ("compute", "sync", "other")]
    assert sum(parts) == pytest.approx(found["iteration"]["measured_s"])
    assert any("50 ms of each step is neither compute nor synchronisation" in line for line in found["refit"])
    assert any("b computes slower" in line and line.endswith(REMEDY) for line in found["refit"])
    shown = cli("verify", tmp_path / "plan.json", told).out
    assert "other: optimizer, loader, waiting" in shown
    assert max(len(line) for line in shown.splitlines()) <= 80


def test_the_rest_of_a_step_is_in_the_next_plan(tmp_path: Path, cli: Cli) -> None:
    """A plan made with a run's telemetry predicts that run where it plans the same."""
    path = job_file(tmp_path, "ab")
    told = telemetry(tmp_path, {"a": 128, "b": 128}, {"a": 0.2, "b": 0.2}, sync_s=0.01, other_s=OTHER_S)
    made = cli("plan", path, "--telemetry", told, "-o", tmp_path / "plan.json", "--json").document
    assert (made["strategy"], made["iteration_s"]) == ("bsp", pytest.approx(0.26))
    for option in [made["decision"]["baseline"], *made["decision"]["options"]]:
        parts = option["compute_s"] + (option["communication_s"] or 0.0) + option["other_s"]
        assert option["iteration_s"] == pytest.approx(parts)
        assert option["other_s"] == pytest.approx(OTHER_S) or option["strategy"] == "elastic-bsp"
    # Each of two devices makes an iteration of its own in 64 samples' time and the rest: four of them make a step.
    elastic = next(option for option in made["decision"]["options"] if option["strategy"] == "elastic-bsp")
    each = 0.2 * (LAUNCH_S + SAMPLE_S * BATCH) / (LAUNCH_S + SAMPLE_S * 128)
    served = 0.01 * (1 + 0.01 / (each + 0.01))  # where one of two is at the server while the other comes
    assert elastic["iteration_s"] == pytest.approx(2 * (each + served + OTHER_S))
    assert elastic["other_s"] == pytest.approx(2 * OTHER_S)
    plan = load(tmp_path / "plan.json", Plan)
    for row in plan.assignments:
        drawn = sorted(_device_spans(plan, row), key=lambda span: span.start)
        assert [span.kind for span in drawn if span.kind != "waiting"] == ["compute", "communication", "other"]
        assert drawn[-1].end == pytest.approx(plan.iteration_s)
    assert _optimality_words(plan) == "proven optimal"
    unproven = plan.model_copy(update={"status": "feasible"})
    assert "shorter step" in _optimality_words(unproven.model_copy(update={"gap": 0.0}))
    assert _optimality_words(unproven.model_copy(update={"gap": 0.02})) == "within 2.0% of the proven bound"
    found = cli("verify", tmp_path / "plan.json", told, "--json").document
    assert found["iteration"]["error"] == pytest.approx(0.0, abs=1e-9)
    assert found["other"]["predicted_s"] == pytest.approx(OTHER_S)
    assert found["refit"] == []
    shown = cli("-v", "plan", path, "--telemetry", told).out
    assert "every step has 50 ms besides, as the earlier run measured" in shown
    assert max(len(line) for line in shown.splitlines()) <= 80


def test_passes_of_a_run_are_read() -> None:
    frame = pd.DataFrame(rows({"a": 8}, {"a": 0.1}))
    assert read_run(frame, "t").ranks[0].passes == 1
    assert read_run(frame.assign(passes=3), "t").ranks[0].passes == 3
    assert read_run(frame.assign(passes=None), "t").ranks[0].passes == 1


def test_a_device_that_the_job_does_not_offer_is_fitted_again(tmp_path: Path, cli: Cli) -> None:
    """Its telemetry is no help to a plan for other devices."""
    path = job_file(tmp_path, "ab")
    assert cli("plan", path, "--strategy", "bsp", "-o", tmp_path / "plan.json").code == 0
    told = telemetry(tmp_path, {"cpu": 128, "b": 128}, {"cpu": 0.5, "b": 0.5}, sync_s=0.3)
    found = cli("verify", tmp_path / "plan.json", told, "--goodput", tmp_path / "a.json", "--json").document
    ends = {line.partition(" ")[0]: line.partition("): ")[2] or line.rpartition(": ")[2] for line in found["refit"]}
    assert ends["cpu"] == ends["synchronisation"] == "fit it again from this telemetry alone"
    assert ends["b"] == REMEDY


def test_an_interval_has_what_lies_between_runs_of_the_same_shape(tmp_path: Path) -> None:
    def run(name: str, slow: float, batches: dict[str, int] | None = None) -> pd.DataFrame:
        shape = batches or {"A": 64, "B": 64}
        return pd.DataFrame(rows(shape, dict.fromkeys(shape, slow * 0.2), noise=0.0)).assign(run=name)

    alone, other = run("c", 1.0), run("b", 3.0, {"A": 96, "B": 32})
    assert read_run(alone, "t").drift == pytest.approx(0, abs=1e-9)
    assert read_run(pd.concat([other, alone]), "t").drift == pytest.approx(0, abs=1e-9)  # of another shape
    several = pd.concat([run("a", 1.1), other, alone], ignore_index=True)
    found = read_run(several, "t").drift
    assert found == pytest.approx(drift([0.23, 0.21]))
    assert found > 0.3  # of two runs 9 % apart, which is all that is known
    write_lines(tmp_path / "telemetry.jsonl", several.to_dict("records"))
    made = plan(job_file(tmp_path, "AB"), "bsp", telemetry=tmp_path / "telemetry.jsonl")
    assert made.decision is not None
    option = made.decision.options[0]
    assert (option.high_s or 0) / option.iteration_s - 1 == pytest.approx(math.hypot(found, MAPE))


def test_a_run_with_servers_tells_what_workers_wait_for_them(tmp_path: Path, cli: Cli) -> None:
    """Two alike workers that wait 50 ms for parameters in every step: the next plan of them has the run's own step."""
    compute_s = LAUNCH_S + SAMPLE_S * BATCH
    made = rows({"a": BATCH, "b": BATCH}, {"a": compute_s, "b": compute_s}, sync_s=0.0, noise=0.0)
    for row in made:
        row |= {"servers": 1, "wait_s": 0.05, "step_s": compute_s + 0.05}
    write_lines(tmp_path / "telemetry.jsonl", made)
    given = ("plan", job_file(tmp_path, "ab"), "--telemetry", tmp_path / "telemetry.jsonl", "--json")
    found = cli(*given, "--strategy", "elastic-bsp").document
    assert found["iteration_s"] == pytest.approx(2 * compute_s + 2 * 0.05)  # two mini-batches of each make four
    (option,) = (each for each in found["decision"]["options"] if each["strategy"] == "elastic-bsp")
    assert option["low_s"] < found["iteration_s"] < option["high_s"]
    bsp = next(each for each in cli(*given).document["decision"]["options"] if each["strategy"] == "bsp")
    assert 0 < bsp["communication_s"] < 0.05  # a ring of as fast transfers: nobody is before one in a queue
    assert bsp["other_s"] == pytest.approx(0.0, abs=1e-9)
