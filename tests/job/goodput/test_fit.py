"""``ddltool fit``: several device types, steps that took too long, accumulation, and numbers no measurement gives.
Rows made from known parameters: the fit finds them again, where the rows determine them at all.
What the rows determine: coverage on data with a known truth, and brute force.
"""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.answers.reporting.charts import drawn
from ddltool.analyzers.answers.reporting.fit_sections import fit_figures, goodput_map
from ddltool.analyzers.job.goodput.fit import (
    ASSUMED_ERROR,
    SLOPE_SPREAD,
    FitProblem,
    descend,
    evaluate,
    fit,
    parameter_intervals,
)
from ddltool.analyzers.job.goodput.fitted_models import fit_rows
from ddltool.analyzers.job.goodput.observations import Observations, from_frame
from ddltool.analyzers.job.goodput.throughput import NAMES, ThroughputParams, grad_time_s, iteration_time_s, log_times
from ddltool.analyzers.job.goodput.tuning import BatchLimits, frontier
from ddltool.artifacts import load, save
from ddltool.errors import InputError
from ddltool.goodput_model import Goodput, ParameterInterval
from tests.conftest import Cli, throughput
from tests.helpers.throughput_rows import observed

TRUTH = throughput(
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
            **{"device": "gpu", "num_nodes": nodes, "num_replicas": replicas, "local_batch_size": batch},
            **{"step_time_s": step, "sync_time_s": np.maximum(step - (passes + 1) * grad, 0.0)},
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
        *("fit_seconds", "holdout", "intervals", "kind", "mape", "params", "rmsle", "samples", "schema_version"),
        *("sources", "undetermined"),
    ]
    assert Goodput.model_validate(out).params_of("anything").model_dump() == out["params"]


def test_rows_that_do_not_say_whose_they_are(tmp_path: Path, cli: Cli) -> None:
    frame = measured(TRUTH)
    frame.assign(device="T4").to_csv(tmp_path / "a.csv", index=False)
    frame.assign(device="A100").to_csv(tmp_path / "b.csv", index=False)
    frame.drop(columns="device").to_csv(tmp_path / "c.csv", index=False)
    assert cli("fit", tmp_path / "a.csv", tmp_path / "c.csv", "--json").document["samples"] == 2 * len(frame)
    cli("fit", tmp_path / "a.csv", tmp_path / "b.csv", tmp_path / "c.csv").refuses(
        "c.csv:device: is missing; rows of T4, A100 are there too"
    )
    cli("fit", tmp_path / "a.csv", tmp_path / "b.csv", "--holdout", tmp_path / "c.csv").refuses("c.csv:device")


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
    cli("fit", tmp_path / "p.csv", "-o", tmp_path / "g.json").refuses(message)
    assert not (tmp_path / "g.json").exists()


def test_one_line_for_json_that_is_nested(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "t.jsonl").write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    cli("fit", tmp_path / "t.jsonl").refuses("t.jsonl:line 1: is nested thousands deep")


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
@pytest.mark.parametrize("scale", [1e-7, 1e6])
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


# What people measure: 1 to 4 nodes, 1 to 4 replicas each, five local batches.
GRID = np.array([(n, n * k, m) for n in (1, 2, 4) for k in (1, 2, 4) for m in (8, 16, 32, 64, 128)], dtype=float)
# Where predictions are asked for besides: between the measured ones, and twice beyond.
ASKED = np.array([(n, n * k, m) for n in (1, 2, 3, 8) for k in (1, 3, 4) for m in (12, 48, 256)], dtype=float)


def drawn_params(seed: int) -> ThroughputParams:
    """Parameters from the priors: times log-uniform over a factor of 10 to 100, slopes 0.5 to 10 % of the intercept."""
    chance = np.random.default_rng(seed)

    def log_uniform(low: float, high: float) -> float:
        return float(np.exp(chance.uniform(np.log(low), np.log(high))))

    local, across = log_uniform(0.005, 0.1), log_uniform(0.02, 0.5)
    return ThroughputParams(
        alpha_grad_s=log_uniform(0.005, 0.2),
        beta_grad_s=log_uniform(1e-4, 1e-2),
        alpha_sync_local_s=local,
        beta_sync_local_s=local * log_uniform(0.005, 0.1),
        alpha_sync_node_s=across,
        beta_sync_node_s=across * log_uniform(0.005, 0.1),
        gamma=float(chance.uniform(1.0, 6.0)),
    )


def determined(truth: ThroughputParams) -> list[str]:
    """Parameters whose standard error is below a fifth when each time of the grid is measured to 1 %.

    From the truth alone (Cramer-Rao, by finite differences of the model), so no fit can influence what counts.
    """
    logs = np.log([getattr(truth, name) for name in NAMES])

    def times(at: np.ndarray) -> np.ndarray:
        values = np.exp(at)
        values[6] = min(max(values[6], 1.0), 10.0)
        there = ThroughputParams(**dict(zip(NAMES, values.tolist(), strict=True)))
        return np.log(np.concatenate([iteration_time_s(there, *GRID.T), grad_time_s(there, GRID[:, 2])]))

    slopes = np.stack([(times(logs + d) - times(logs - d)) / 2e-5 for d in np.eye(7) * 1e-5], axis=1)
    covariance = np.linalg.pinv(slopes.T @ slopes / 0.01**2, rcond=1e-15, hermitian=True)
    return [name for name, variance in zip(NAMES, np.diag(covariance), strict=True) if variance < 0.2**2]


def recovers(seed: int) -> int:
    """Check one set of parameters; return how many of the seven counted."""
    truth = drawn_params(seed)
    exact = fit(observed(truth, GRID)).params.model_dump()
    names = determined(truth)
    for name in names:
        assert exact[name] == pytest.approx(getattr(truth, name), rel=0.02), (seed, name)
    noisy = fit(observed(truth, GRID, 0.05, seed)).params
    wanted = np.asarray(iteration_time_s(truth, *GRID.T))
    made = np.asarray(iteration_time_s(noisy, *GRID.T))
    assert np.abs(made / wanted - 1).max() < 0.10, seed
    asked = np.abs(np.asarray(iteration_time_s(noisy, *ASKED.T)) / np.asarray(iteration_time_s(truth, *ASKED.T)) - 1)
    assert asked.mean() < 0.10, seed
    return len(names)


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_the_fit_recovers_drawn_parameters(first: int) -> None:
    """Without noise within 2 %; with 5 % noise every predicted step within 10 %, and on average where none was measured."""
    counted = sum(recovers(seed) for seed in range(first, first + 10))
    assert counted >= 0.6 * 70


@pytest.mark.slow
@pytest.mark.parametrize("first", range(40, 200, 20))
def test_the_fit_recovers_more_drawn_parameters(first: int) -> None:
    assert sum(recovers(seed) for seed in range(first, first + 20)) >= 0.6 * 140


KNOWN = throughput(
    alpha_grad_s=0.05,
    beta_grad_s=0.002,
    alpha_sync_local_s=0.03,
    beta_sync_local_s=0.004,
    alpha_sync_node_s=0.15,
    beta_sync_node_s=0.01,
    gamma=2.0,
)
KNOWN_PLACES = ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (2, 8), (4, 16))
ALL = tuple((nodes, replicas, batch) for nodes, replicas in KNOWN_PLACES for batch in (8, 32, 128))


def highest(interval: ParameterInterval) -> float:
    return math.inf if interval.high is None else interval.high


@pytest.mark.slow
def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    runs = 60
    covered = np.zeros(7)
    for seed in range(runs):
        rows = observed(KNOWN, ALL, 0.05, seed)
        found = parameter_intervals(rows, fit(rows).params, level=0.9)
        covered += [one.low <= getattr(KNOWN, name) <= highest(one) for name, one in found.intervals.items()]
    # 99.9 % of the time each lies within 3.3 standard errors of a proportion
    margin = 3.3 * math.sqrt(0.9 * 0.1 / runs)
    assert (covered / runs > 0.9 - margin).all(), dict(zip(NAMES, covered / runs, strict=True))
    assert 0.84 < covered.mean() / runs < 0.96  # and they are not just wide


@settings(max_examples=4)
@given(st.integers(0, 10**6), st.sampled_from([0.02, 0.1]))
def test_an_interval_holds_its_best_value_and_shrinks_with_less_noise(seed: int, error: float) -> None:
    rows = observed(KNOWN, ALL, error, seed)
    params = fit(rows).params
    wide, narrow = (parameter_intervals(rows, params, level=level) for level in (0.95, 0.5))
    free = fit(rows, slope_spread=math.inf).params
    for name in NAMES:
        outer, inner, value = wide[name], narrow[name], getattr(free, name)
        assert outer.low <= inner.low * (1 + 1e-3) + 1e-12
        assert highest(inner) <= highest(outer) * (1 + 1e-3)
        assert inner.low <= value * (1 + 1e-3) + 1e-6
        assert value <= highest(inner) * (1 + 1e-3)
    assert wide.error == pytest.approx(error, rel=0.5)
    assert wide.error == narrow.error


def test_ends_are_where_the_refitted_error_reaches_the_threshold() -> None:
    """Checked against scipy's optimiser, with the parameter held at the end found."""
    from scipy.optimize import least_squares
    from scipy.special import ndtri

    rows = observed(KNOWN, ALL, 0.05, 3)
    found = parameter_intervals(rows, fit(rows).params, level=0.9, error=0.05)

    def errors(logs: np.ndarray, held: int | None = None, at: float = 0.0) -> np.ndarray:
        full = logs if held is None else np.insert(logs, held, at)
        grad, step, _, _ = log_times(np.exp(full), rows.num_nodes, rows.num_replicas, rows.local_batch_size)
        weight = math.sqrt(20 / len(ALL))  # of T_grad: as in the fit, 1 for up to 20 configurations
        return np.concatenate([step - np.log(rows.step_time_s), weight * (grad - np.log(rows.grad_time_s))])

    start = np.log([getattr(KNOWN, name) for name in NAMES])
    best = 2 * least_squares(errors, start, xtol=1e-12, ftol=1e-12).cost
    for name in ("alpha_grad_s", "alpha_sync_node_s", "gamma"):
        held = NAMES.index(name)
        for end in (found[name].low, highest(found[name])):
            refit = least_squares(errors, np.delete(start, held), args=(held, math.log(end)), xtol=1e-12, ftol=1e-12)
            assert (2 * refit.cost - best) / 0.05**2 == pytest.approx(float(ndtri(0.95)) ** 2, rel=0.02)


@pytest.mark.parametrize(
    ("rows", "undetermined"),
    [
        ([(1, 1, 8), (1, 1, 32)] * 4, NAMES[2:]),
        ([(1, 1, 8)] * 8, NAMES[1:]),
        ([row for row in ALL if row[0] == 1], ("alpha_sync_node_s", "beta_sync_node_s")),
        (
            [row for row in ALL if row[1] <= 2 and row[0] == 1],
            ("beta_sync_local_s", "alpha_sync_node_s", "beta_sync_node_s"),
        ),
        (ALL, ()),
    ],
)
def test_undetermined_parameters_are_named(rows: list[tuple[int, int, int]], undetermined: tuple[str, ...]) -> None:
    seen = observed(KNOWN, rows, 0.02, 1)
    found = parameter_intervals(seen, fit(seen).params)
    assert set(undetermined) <= set(found.undetermined)
    assert set(found.undetermined) <= {*undetermined, "gamma", "beta_sync_local_s"}
    for name, one in found.intervals.items():
        assert (one.reason != "") == (name in found.undetermined)
    assert not found["alpha_grad_s"].reason


def test_seen_but_without_weight_is_undetermined_too() -> None:
    """Synchronisation far shorter than a pass, fully hidden: no row says anything about its overlap."""
    hidden = ThroughputParams(
        **{**KNOWN.model_dump(), "alpha_sync_local_s": 1e-6, "beta_sync_local_s": 0.0, "gamma": 8.0}
    )
    seen = observed(hidden, [row for row in ALL if row[0] == 1] * 2, 0.05, 2)
    found = parameter_intervals(seen, fit(seen).params)
    assert found["gamma"].reason == "the rows fit as well with any value"
    assert found["alpha_sync_local_s"].low == 0
    assert highest(found["alpha_sync_local_s"]) < float(grad_time_s(hidden, 8))  # longer than a pass would show


def test_too_few_rows_assume_an_error() -> None:
    seen = observed(KNOWN, [(1, 1, 8), (1, 1, 32)], 0.01, 0, with_grad=False)
    found = parameter_intervals(seen, fit(seen).params)
    assert found.error == ASSUMED_ERROR
    for bad in (0.0, 1.0):
        with pytest.raises(InputError, match="level"):
            parameter_intervals(seen, KNOWN, level=bad)
    nothing = Observations(**{f.name: np.zeros(0) for f in fields(Observations)})
    with pytest.raises(InputError, match="at least one"):
        parameter_intervals(nothing, KNOWN)


params = st.builds(
    ThroughputParams,
    **{name: st.floats(1e-3, 1.0) for name in NAMES[:6]},
    gamma=st.floats(1.1, 9.0),
)


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


measurement = st.tuples(
    *(st.integers(1, 3), st.integers(0, 4), st.sampled_from([8, 16, 40]), st.integers(0, 2)),
    *(st.floats(0.5, 2.0), st.sampled_from([0.1, 0.25, math.nan])),
)


@given(params, st.lists(measurement, min_size=1, max_size=12), st.floats(1e-3, 0.2))
def test_the_loss_is_that_by_hand(p: ThroughputParams, made: list[tuple[Any, ...]], error: float) -> None:
    """Row by row in plain arithmetic: what is free, within which bounds, from where, how far off, and how sure."""
    made = [(nodes, nodes + more * (nodes > 1 or more > 1), *rest) for nodes, more, *rest in made]
    nodes, replicas, batch, passes, step, grad = np.array(made, dtype=float).T
    rows = Observations(
        **{"num_nodes": nodes, "num_replicas": replicas, "local_batch_size": batch, "accumulation_steps": passes},
        **{"step_time_s": step, "grad_time_s": grad},
    )
    problem, places = FitProblem(rows), sorted({one[:4] for one in made})
    shared = [place for place in places if place[1] > 1]
    near, far = ([place for place in shared if (place[0] > 1) == across] for across in (False, True))
    free = [True, len({place[2] for place in places}) > 1]
    free += [bool(n) for side in (near, far) for n in (len(side), sum(place[1] > 2 for place in side))] + [bool(shared)]
    assert problem.free.tolist() == free

    of_place = {place: [one for one in made if one[:4] == place] for place in places}
    steps = {place: mean(math.log(one[4]) for one in ones) for place, ones in of_place.items()}
    grads = {place: [math.log(one[5]) for one in ones if one[5] == one[5]] for place, ones in of_place.items()}
    shortest = min([*steps.values(), *(mean(logs) for logs in grads.values() if logs)]) + math.log(1e-7)
    largest, most = max(place[2] for place in places), max(max(place[1] for place in places) - 2, 1)
    low = [shortest, shortest - math.log(largest), *[shortest, shortest - math.log(most)] * 2, 0.0]
    assert problem.low == pytest.approx(low)
    assert problem.high == pytest.approx([max(steps.values()) + math.log(10)] * 6 + [math.log(10)])

    problem.set_prior(error)
    weight = 2 * error**2 / max(len({place[:2] for place in shared}), 1)
    assert problem.prior_weight == pytest.approx(weight)
    at = {
        name: getattr(p, name) if is_free else float(name == "gamma") for name, is_free in zip(NAMES, free, strict=True)
    }

    def times(place: tuple[int, ...]) -> tuple[float, float]:
        count, replicas, batch, passes = place
        side = "local" if count == 1 else "node"
        beyond = max(replicas - 2, 0)
        one = at["alpha_grad_s"] + at["beta_grad_s"] * batch
        sync = (at[f"alpha_sync_{side}_s"] + at[f"beta_sync_{side}_s"] * beyond) if replicas > 1 else 0.0
        return math.log(one), math.log(passes * one + (one ** at["gamma"] + sync ** at["gamma"]) ** (1 / at["gamma"]))

    known = sum(map(len, grads.values()))
    loss = sum(len(of_place[place]) / len(made) * (times(place)[1] - steps[place]) ** 2 for place in places)
    loss += sum(len(logs) / known * (times(place)[0] - mean(logs)) ** 2 for place, logs in grads.items() if logs)
    slopes = [(at["alpha_sync_local_s"], at["beta_sync_local_s"], free[3])]
    slopes += [(at["alpha_sync_node_s"], at["beta_sync_node_s"], free[5])]
    loss += sum(weight * math.log(1 + (beta / alpha / SLOPE_SPREAD) ** 2) for alpha, beta, is_free in slopes if is_free)
    point = np.where(free, np.log([getattr(p, name) for name in NAMES]), 0.0)
    residuals, jacobian = problem.residuals(point)
    assert residuals @ residuals == pytest.approx(loss)
    for index in range(7):
        moved = [problem.residuals(point + side * 1e-6 * (np.arange(7) == index))[0] for side in (1, -1)]
        assert jacobian[:, index] * free[index] == pytest.approx((moved[0] - moved[1]) / 2e-6, abs=1e-6)

    squares = sum((times(one[:4])[1] - math.log(one[4])) ** 2 for one in made)
    freedom = len(made) - sum(free)
    assert problem.scatter(point) == (pytest.approx(math.sqrt(squares / freedom)) if freedom >= 1 else None)
    within = sum((math.log(one[4]) - steps[one[:4]]) ** 2 for one in made)
    within_grad = sum((log - mean(logs)) ** 2 for logs in grads.values() for log in logs)
    share = len(made) / max(known, 1)
    spread, left = problem.time_error(0.3)
    assert left == pytest.approx(len(made) + share * known - sum(free))
    whole = 0.3 * len(made) + within + share * within_grad
    assert spread == pytest.approx(math.sqrt(whole / left) if left >= 1 else math.inf)
    at = {name: getattr(p, name) for name in NAMES}
    off = [times(one[:4])[1] - math.log(one[4]) for one in made]
    figures = math.sqrt(mean(one**2 for one in off)), mean(abs(math.exp(one) - 1) for one in off), len(made)
    judged = evaluate(p, rows)
    assert (judged.rmsle, judged.mape, judged.samples) == pytest.approx(figures)


def test_the_prior_is_weighed_anew_until_its_weight_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, weigh = [0.0], FitProblem.set_prior

    def noted(problem: FitProblem, error: float | None) -> None:
        weigh(problem, error)
        weights.append(problem.prior_weight)

    monkeypatch.setattr(FitProblem, "set_prior", noted)
    fit(observed(KNOWN, ALL, 0.2, 1))
    stays = [abs(after - before) <= 0.01 * before for before, after in itertools.pairwise(weights)]
    assert stays == [False] * (len(stays) - 1) + [True]


def test_the_fit_is_the_best_of_its_starts() -> None:
    """Rows whose errors make two minima: from gammas 1.3 and 2 the descent ends in the worse one."""
    seen = observed(KNOWN, [(1, 1, 8), (1, 2, 8), (1, 2, 32), (1, 4, 32), (2, 4, 64), (2, 8, 16)], 0.3, 55)
    problem = FitProblem(seen)
    found, _ = problem.residuals(problem.start_from(fit(seen, slope_spread=math.inf).params))
    worse, best = (descend(problem, problem.start(gamma)).loss for gamma in (1.3, 3.5))
    assert found @ found == pytest.approx(best, rel=1e-3)
    assert worse > 1.05 * best


def test_intervals_begin_again_where_a_better_fit_is_met() -> None:
    """From a worse minimum than the fit's, as a fit of other starts would give."""
    seen = observed(KNOWN, [(1, 1, 8), (1, 2, 8), (1, 2, 32), (1, 4, 32), (2, 4, 64), (2, 8, 16)], 0.3, 55)
    problem = FitProblem(seen)
    worse, best = (problem.params(descend(problem, problem.start(gamma)).point) for gamma in (1.3, 3.5))
    found, wanted = (parameter_intervals(seen, each).intervals for each in (worse, best))
    for name in NAMES:
        assert found[name].low == pytest.approx(wanted[name].low, rel=1e-2)
        assert highest(found[name]) == pytest.approx(highest(wanted[name]), rel=1e-2)


def test_rows_without_any_error_have_intervals_too() -> None:
    """Three rows that the model fits exactly leave it no residual to judge by and one direction flat."""
    rows = Observations(
        num_nodes=np.array([1.0, 1.0, 1.0]),
        num_replicas=np.array([1.0, 1.0, 2.0]),
        local_batch_size=np.array([4.0, 8.0, 8.0]),
        step_time_s=np.array([0.02, 0.03, 0.04]),
        grad_time_s=np.array([0.02, 0.03, 0.03]),
    )
    sure = parameter_intervals(rows, fit(rows).params)
    assert not sure["alpha_grad_s"].reason
    assert sure["alpha_grad_s"].low <= 0.01 <= highest(sure["alpha_grad_s"])
    assert set(sure.undetermined) == {"beta_sync_local_s", "alpha_sync_node_s", "beta_sync_node_s", "gamma"}
