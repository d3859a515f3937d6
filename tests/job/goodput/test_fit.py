"""``ddltool fit``: several device types, steps that took too long, accumulation, and numbers no measurement gives."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ddltool.analyzers.answers.reporting.charts import drawn
from ddltool.analyzers.answers.reporting.fit_sections import fit_figures, goodput_map
from ddltool.analyzers.job.goodput.fit import FitProblem, fit
from ddltool.analyzers.job.goodput.fitted_models import fit_rows
from ddltool.analyzers.job.goodput.observations import Observations, from_frame
from ddltool.analyzers.job.goodput.throughput import ThroughputParams, grad_time_s, iteration_time_s
from ddltool.analyzers.job.goodput.tuning import BatchLimits, frontier
from ddltool.artifacts import load, save
from ddltool.errors import InputError
from ddltool.goodput_model import Goodput
from tests.conftest import Result

Cli = Callable[..., Result]
TRUTH = ThroughputParams(
    alpha_grad_s=0.02,
    beta_grad_s=0.002,
    alpha_sync_local_s=0.03,
    beta_sync_local_s=0.001,
    alpha_sync_node_s=0.1,
    beta_sync_node_s=0.004,
    gamma=2.0,
)
FAST = ThroughputParams(**{**TRUTH.model_dump(), "alpha_grad_s": 0.01, "beta_grad_s": 0.0005})
OTHER_NETWORK = ThroughputParams(**{**FAST.model_dump(), "alpha_sync_local_s": 0.003, "alpha_sync_node_s": 0.01})
PLACES = [(n, n * k, m) for n in (1, 2, 4) for k in (1, 2, 4) for m in (8, 32, 128)]


def measured(
    truth: ThroughputParams,
    places: list[tuple[int, int, int]] = PLACES,
    error: float = 0.02,
    seed: int = 0,
    passes: int = 0,
) -> pd.DataFrame:
    """A native profile: T_grad and the step each with its own error."""
    nodes, replicas, batch = np.array(places).T
    noise = np.exp(error * np.random.default_rng(seed).normal(size=(2, len(places))))
    step = np.asarray(iteration_time_s(truth, nodes, replicas, batch, passes)) * noise[0]
    grad = np.asarray(grad_time_s(truth, batch)) * noise[1]
    return pd.DataFrame(
        {
            "device": "gpu",
            "num_nodes": nodes,
            "num_replicas": replicas,
            "local_batch_size": batch,
            "step_time_s": step,
            "sync_time_s": np.maximum(step - (passes + 1) * grad, 0.0),
        }
    )


def rows(truth: ThroughputParams, **options: object) -> Observations:
    return from_frame(measured(truth, **options), "p.csv")  # type: ignore[arg-type]


def off(params: ThroughputParams, truth: ThroughputParams = TRUTH) -> float:
    """The mean relative error of predicted steps where none was measured."""
    places = np.array([(n, n * k, m) for n in (1, 2, 3, 4) for k in (1, 3, 4) for m in (16, 64, 200)]).T
    return float(np.mean(np.abs(np.asarray(iteration_time_s(params, *places)) / iteration_time_s(truth, *places) - 1)))


# Steps that took too long


def test_telemetry_of_which_a_twentieth_is_slow_gives_the_same_model() -> None:
    chance = np.random.default_rng(0)
    log = []
    for batch in (8, 16, 32, 64):
        compute = float(grad_time_s(TRUTH, batch))
        whole = float(iteration_time_s(TRUTH, 1, 2, batch))
        for step in range(100):
            slow = 5.0 if chance.random() < 0.05 else 1.0
            log.append(
                {"step": 10 + step, "rank": 0, "batch": batch, "world_size": 2, "num_nodes": 1, "wait_s": 0.0}
                | {"compute_s": compute * slow, "sync_s": (whole - compute) * slow}
            )
    result = fit(from_frame(pd.DataFrame(log), "t.jsonl"))
    batches = np.array([8, 12, 48, 64])
    made, wanted = (np.asarray(iteration_time_s(p, 1, 2, batches)) for p in (result.params, TRUTH))
    assert made == pytest.approx(wanted, rel=0.02)


# Accumulation


def test_rows_with_accumulation_are_steps_of_several_passes() -> None:
    frame = pd.concat(
        [measured(TRUTH, error=0.0, passes=s).assign(accumulation_steps=s) for s in (0, 3)], ignore_index=True
    )
    result = fit(from_frame(frame, "p.csv"))
    assert result.params.model_dump() == pytest.approx(TRUTH.model_dump(), rel=1e-3)
    # without the column the same rows are not explained
    assert fit(from_frame(frame.drop(columns="accumulation_steps"), "p.csv")).error.mape > 0.1


def test_the_time_of_a_pass_is_used_where_it_was_measured() -> None:
    frame = measured(TRUTH, error=0.0, passes=2).assign(accumulation_steps=2.0)
    frame["sync_time_s"] = 0.0  # says that all of the step is compute; the passes were timed by themselves
    frame["grad_time_s"] = np.asarray(grad_time_s(TRUTH, frame["local_batch_size"]))
    assert fit(from_frame(frame, "p.csv")).params.model_dump() == pytest.approx(TRUTH.model_dump(), rel=1e-3)
    frame.loc[::2, "grad_time_s"] = np.nan  # half of them: the others fall back to step minus sync
    made = from_frame(frame, "p.csv").grad_time_s
    assert made[1::2] == pytest.approx(frame["grad_time_s"].to_numpy()[1::2])
    assert made[::2] == pytest.approx(frame["step_time_s"].to_numpy()[::2] / 3)


# Several device types


def test_a_type_measured_alone_takes_the_network_of_the_other() -> None:
    alone = [(1, 1, 8), (1, 1, 32), (1, 1, 128)]
    found = fit_rows({"slow": rows(TRUTH), "fast": rows(FAST, places=alone)}, [""], None, 0)
    assert found.shared_network
    assert "fast without rows of several replicas has that of slow" in found.network_choice
    assert off(found.params_of("fast"), FAST) < 0.03
    assert not found.devices["fast"].undetermined
    assert found.devices["fast"].intervals["gamma"] == found.devices["slow"].intervals["gamma"]


def test_the_command_on_several_types(tmp_path: Path, cli: Cli) -> None:
    measured(TRUTH).assign(device="T4").to_csv(tmp_path / "a.csv", index=False)
    measured(OTHER_NETWORK, PLACES[:20]).assign(device="A100").to_csv(tmp_path / "b.csv", index=False)
    out = cli("fit", tmp_path / "a.csv", tmp_path / "b.csv", "-o", tmp_path / "g.json", "--json").document
    assert out["shared_network"] is False
    assert out["params"] == out["devices"]["T4"]["params"] != out["devices"]["A100"]["params"]
    assert "T4, the device with most rows" in out["note"]
    again = load(tmp_path / "g.json", Goodput)
    assert again.params_of("A100").model_dump() == out["devices"]["A100"]["params"]
    with pytest.raises(InputError, match='has no A10; did you mean "A100"'):
        again.params_of("A10")
    text = cli("fit", tmp_path / "a.csv", tmp_path / "b.csv", "--holdout", tmp_path / "b.csv").out
    assert "error on the holdout rows" in text
    save(again, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "g.json").read_text()


def test_the_document_of_one_type_has_the_same_keys_as_ever(tmp_path: Path, cli: Cli) -> None:
    measured(TRUTH).to_csv(tmp_path / "a.csv", index=False)
    out = cli("fit", tmp_path / "a.csv", "--json").document
    assert sorted(out) == [
        "fit_seconds",
        "holdout",
        "intervals",
        "kind",
        "mape",
        "params",
        "rmsle",
        "samples",
        "schema_version",
        "sources",
        "undetermined",
    ]
    assert Goodput.model_validate(out).params_of("anything").model_dump() == out["params"]


def test_rows_that_do_not_say_whose_they_are(tmp_path: Path, cli: Cli) -> None:
    frame = measured(TRUTH)
    frame.assign(device="T4").to_csv(tmp_path / "a.csv", index=False)
    frame.assign(device="A100").to_csv(tmp_path / "b.csv", index=False)
    frame.drop(columns="device").to_csv(tmp_path / "c.csv", index=False)
    assert cli("fit", tmp_path / "a.csv", tmp_path / "c.csv", "--json").document["samples"] == 2 * len(frame)
    found = cli("fit", tmp_path / "a.csv", tmp_path / "b.csv", tmp_path / "c.csv")
    assert found.code == 2
    assert "c.csv:device: is missing; rows of T4, A100 are there too" in found.error_line
    held = cli("fit", tmp_path / "a.csv", tmp_path / "b.csv", "--holdout", tmp_path / "c.csv")
    assert held.code == 2
    assert "c.csv:device" in held.error_line


# Numbers that no measurement gives


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("step_time_s", "1e308", "row 2:step_time_s: is 1e+308; a number from 1e-09 to 1000000000"),
        ("step_time_s", "5e-324", "row 2:step_time_s: is 5e-324"),
        ("local_batch_size", "1e308", "row 2:local_batch_size: is 1e+308; a whole number from 1 to 1000000000"),
        ("num_replicas", str(10**30), "row 2:num_replicas: is 1000000"),
        ("accumulation_steps", "2.5", "row 2:accumulation_steps: is 2.5"),
        ("accumulation_steps", "-1", "row 2:accumulation_steps: is -1"),
        (
            "grad_time_s",
            "9",
            "row 2:grad_time_s: is 9; it must be the time of one pass, above 0 and at most the step time",
        ),
        ("grad_time_s", "soon", "row 2:grad_time_s: is soon"),
        ("sync_time_s", "inf", "row 2:sync_time_s: is inf"),
    ],
)
def test_one_line_for_what_cannot_be(tmp_path: Path, cli: Cli, column: str, value: str, message: str) -> None:
    frame = measured(TRUTH, PLACES[:3]).assign(accumulation_steps=0, grad_time_s="").astype(str)
    frame.loc[1, column] = value
    frame.to_csv(tmp_path / "p.csv", index=False)
    found = cli("fit", tmp_path / "p.csv", "-o", tmp_path / "g.json")
    assert found.code == 2
    assert message in found.error_line
    assert not (tmp_path / "g.json").exists()


@pytest.mark.parametrize(
    "line", ['{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", '{"a": ' + "1" * 5000 + "}"], ids=["nested", "digits"]
)
def test_one_line_for_json_that_cannot_be(tmp_path: Path, cli: Cli, line: str) -> None:
    (tmp_path / "t.jsonl").write_text(line + "\n")
    found = cli("fit", tmp_path / "t.jsonl")
    assert found.code == 2
    assert "t.jsonl:line 1: has a number of thousands of digits, or is nested thousands deep" in found.error_line


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize(
    "places",
    [
        [(1, 1, 8)],
        [(2, 4, 8)] * 2,
        [(1, 2, 8)] * 7,
        [(1, 1, 8), (1, 10**9, 8)],
        [(4, 4, 10**9), (1, 1, 1)],
        [(1, 1, 8), (1, 2, 8), (1, 4, 8), (2, 8, 8)],
    ],
)
@pytest.mark.parametrize("scale", [1e-7, 1.0, 1e6])
def test_few_rows_of_any_size_are_fitted_without_a_warning(
    places: list[tuple[int, int, int]], scale: float, tmp_path: Path, cli: Cli
) -> None:
    frame = measured(TRUTH, places, error=0.0)
    frame[["step_time_s", "sync_time_s"]] *= scale
    frame = frame[(frame["step_time_s"] > 1e-9) & (frame["step_time_s"] < 1e9)]
    frame.to_csv(tmp_path / "p.csv", index=False)
    out = cli("fit", tmp_path / "p.csv", "--json")
    assert out.code == 0, out
    assert out.document["mape"] < 0.01


def test_rows_by_the_hundred_thousand_cost_what_their_configurations_do() -> None:
    """Rows of one configuration are one: the fit of all rows is that of the means, and as quick."""
    frame = pd.concat([measured(TRUTH, error=0.05, seed=seed) for seed in range(40)], ignore_index=True)
    many = from_frame(frame, "p.csv")
    problem = FitProblem(many, grad_weight=0.1)
    assert len(problem.nodes) == len(PLACES)
    point = problem.start(2.0)
    errors, _ = problem.residuals(point)
    predicted = problem.params(point)
    step = np.log(np.asarray(iteration_time_s(predicted, many.num_nodes, many.num_replicas, many.local_batch_size)))
    grad = np.log(np.asarray(grad_time_s(predicted, many.local_batch_size)))
    wanted = np.mean((step - np.log(many.step_time_s)) ** 2) + 0.1 * np.mean((grad - np.log(many.grad_time_s)) ** 2)
    error, freedom = problem.time_error(float(errors @ errors))
    assert error**2 * freedom == pytest.approx(wanted * len(many))
    # ever different batches are told apart to half a per cent
    batch = np.random.default_rng(0).integers(1, 10**6, 50_000).astype(float)
    wide = Observations(
        num_nodes=np.ones(len(batch)),
        num_replicas=np.ones(len(batch)),
        local_batch_size=batch,
        step_time_s=np.asarray(iteration_time_s(TRUTH, 1, 1, batch)),
        grad_time_s=np.full(len(batch), np.nan),
    )
    assert len(FitProblem(wide).nodes) < 5000
    assert fit(wide).params.beta_grad_s == pytest.approx(TRUTH.beta_grad_s, rel=1e-3)


# Pictures


def test_pictures() -> None:
    devices = {"T4": rows(TRUTH), "A100": rows(FAST)}
    words = "".join(ET.fromstring(drawn(fit_figures(devices, {"T4": TRUTH, "A100": FAST}), "svg")).itertext())
    for word in ("T4", "A100", "16 GPUs on 4 nodes", "local batch size"):
        assert word in words
    limits = BatchLimits(initial_batch_size=64, max_batch_size=4096, max_local_batch_size=128)
    for replicas, said in ((16, "scaling pays until"), (1, "")):
        found = frontier(TRUTH, replicas, limits, noise_scale=1000.0, replicas_per_node=4)
        figure = goodput_map(TRUTH, limits, found, found.pays_until, noise_scale=1000.0, known=replicas)
        assert said in figure.marks[0][0]
        assert "useful samples/s" in "".join(ET.fromstring(drawn([figure], "svg")).itertext())
