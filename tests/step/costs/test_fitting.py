"""Fitting the cost model: it finds what cases were made from, leaves alone what they do not tell, shrugs off a wild one."""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.step.costs import fitting
from ddltool.analyzers.step.costs.fitting import Belief, Case, _Stack, fit, host_bound, names, steps_s
from ddltool.analyzers.step.costs.kernel_times import ARITHMETIC, CARRIED, FEED, TRAFFIC, UNITS, Constants, Demand
from ddltool.shipped import calibration, devices

REPO = Path(__file__).resolve().parents[3]
CONSTANTS = Constants(
    arithmetic=dict.fromkeys(ARITHMETIC, 0.6),
    traffic=dict.fromkeys(TRAFFIC, 0.7),
    feed=dict.fromkeys(FEED, 4000.0),
    carried=dict.fromkeys(CARRIED, 20.0),
    start_s=4e-6,
    cache=0.4,
    issue_s=10e-6,
    update_s=20e-6,
    turn_s=3e-6,
)
PRIOR = Belief(constants=CONSTANTS, generations={}, spread={"*": 1.0, **dict.fromkeys(UNITS, 0.3), "setting": 0.5})
USED = ("matrix_product/tensor", "convolution/vector", "depthwise_convolution/channels_last")


def make_case(random: np.random.Generator, kernels: int = 12, generation: str = "Ampere", **more: object) -> Case:
    """A step of kernels bound now by arithmetic, now by traffic."""
    used = np.array([-1, *(ARITHMETIC.index(name) for name in USED)])
    arithmetic_of = random.choice(used, kernels)
    product = arithmetic_of >= 0
    size = random.uniform(1e-5, 1e-2, kernels)
    lean = random.choice([0.05, 1.0, 20.0], kernels)
    on_tensor = arithmetic_of == ARITHMETIC.index("matrix_product/tensor")
    demand = Demand(
        arithmetic_s=np.where(product, size * lean, 0.0),
        arithmetic_of=arithmetic_of,
        on_tensor=on_tensor,
        fed_s=np.where(on_tensor, size * lean * 100.0, 0.0),
        traffic_s=size,
        traffic_of=random.choice([TRAFFIC.index("pointwise"), TRAFFIC.index("copy")], kernels),
        carried_s=size * random.choice([0.0, 5.0], kernels),
        cached=random.uniform(0.0, 1.0, kernels),
        turns=random.choice([0.0, 50.0], kernels),
        rows_s=random.choice([0.0, 1e-4], kernels),
        serial=arithmetic_of == ARITHMETIC.index("depthwise_convolution/channels_last"),
    )
    case = Case(
        demand=demand,
        count=random.integers(1, 9, kernels).astype(float),
        ops=3 * kernels,
        views=kernels,
        tensors=kernels,
        generation=generation,
        measured_s=1.0,
    )
    return replace(case, **more)


def measured(cases: Sequence[Case], truth: Belief) -> list[Case]:
    """The cases with the times that the truth gives them."""
    return [replace(case, measured_s=float(time)) for case, time in zip(cases, steps_s(cases, truth), strict=True)]


def moved(belief: Belief, random: np.random.Generator, by: float = 0.3) -> Belief:
    """A truth: every constant somewhere around the belief's."""

    def around(values: dict[str, float]) -> dict[str, float]:
        return {name: value * float(np.exp(random.normal(0.0, by))) for name, value in values.items()}

    constants = belief.constants
    return replace(
        belief,
        constants=replace(
            constants,
            arithmetic={name: min(share, 0.95) for name, share in around(dict(constants.arithmetic)).items()},
            traffic=around(dict(constants.traffic)),
            feed=around(dict(constants.feed)),
            carried=around(dict(constants.carried)),
        ),
    )


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_finds_the_constants_that_cases_were_made_from(seed: int) -> None:
    random = np.random.default_rng(seed)
    cases = [make_case(random) for _ in range(60)]
    truth = moved(PRIOR, random)
    # What an architecture's factors and the shares have in common cannot be told apart: hold the factors.
    prior = replace(PRIOR, spread={**PRIOR.spread, **dict.fromkeys(UNITS, 0.0), "cache": 0.0, "*": 30.0})
    found = fit(measured(cases, truth), prior, rounds=60)
    np.testing.assert_allclose(steps_s(cases, found), steps_s(cases, truth), rtol=1e-3)
    for name in ("pointwise", "copy"):
        assert found.constants.traffic[name] == pytest.approx(truth.constants.traffic[name], rel=0.03)
    for name in USED[1:]:
        assert found.constants.arithmetic[name] == pytest.approx(truth.constants.arithmetic[name], rel=0.05)


def test_what_cases_do_not_tell_stays_at_the_prior() -> None:
    random = np.random.default_rng(3)
    cases = [make_case(random) for _ in range(30)]
    found = fit(measured(cases, moved(PRIOR, random)), PRIOR)
    for name in set(ARITHMETIC) - set(USED):
        assert found.constants.arithmetic[name] == pytest.approx(0.6)
    for name in set(TRAFFIC) - {"pointwise", "copy"}:
        assert found.constants.traffic[name] == pytest.approx(0.7)
    assert found.constants.arithmetic[USED[1]] != pytest.approx(0.6, rel=0.01)
    assert set(found.generations) == {"Ampere"}


@pytest.mark.parametrize("seed", range(3))
def test_one_wild_row_moves_little(seed: int) -> None:
    random = np.random.default_rng(seed)
    truth = moved(PRIOR, random)
    cases = measured([make_case(random) for _ in range(60)], truth)
    wild = [replace(cases[0], measured_s=50.0 * cases[0].measured_s), *cases[1:]]
    before, after = (steps_s(cases, fit(each, PRIOR)) for each in (cases, wild))
    assert np.median(np.abs(np.log(after / before))) < 0.02
    assert np.abs(np.log(after / before)[1:]).max() < 0.1


def test_generations_and_settings_have_constants_of_their_own() -> None:
    random = np.random.default_rng(5)
    cases = [make_case(random, generation=name, error=0.01) for name in ("Ampere", "Hopper") for _ in range(20)]
    cases += [make_case(random, setting="slow host", error=0.01) for _ in range(10)]
    truth = replace(
        PRIOR, generations={"Hopper": {"tensor": 0.8, "vector": 1.0, "memory": 1.25}}, settings={"slow host": 0.2}
    )
    held = replace(PRIOR, spread={"*": 0.01, **dict.fromkeys(UNITS, 0.5), "setting": 2.0})
    found = fit(measured(cases, truth), held)
    assert found.settings["slow host"] == pytest.approx(0.2, rel=0.05)
    assert found.generations["Hopper"]["memory"] == pytest.approx(1.25, rel=0.05)
    assert found.generations["Ampere"]["memory"] == pytest.approx(1.0, rel=0.05)
    assert found.at("Volta").units == dict.fromkeys(UNITS, 1.0)


def test_slopes_are_those_of_the_times() -> None:
    random = np.random.default_rng(7)
    cases = [make_case(random, generation=name) for name in ("Ampere", "Hopper") for _ in range(4)]
    cases += [make_case(random, setting="slow host"), make_case(random, ops=4000)]
    belief = moved(replace(PRIOR, settings={"slow host": 0.05}), random)
    stack = _Stack(cases)
    parts = stack.generations, stack.settings
    logs = fitting._to_vector(belief, *parts)
    slopes = stack.slopes(belief)
    assert slopes.shape == (len(cases), len(names(*parts)))
    for place in range(len(logs)):
        up, down = logs.copy(), logs.copy()
        up[place] += 1e-4
        down[place] -= 1e-4
        high, low = (np.log(stack.steps_s(fitting._from_vector(each, *parts, belief))) for each in (up, down))
        np.testing.assert_allclose(slopes[:, place], (high - low) / 2e-4, atol=2e-4)


def test_host_bound_cases_are_told() -> None:
    random = np.random.default_rng(9)
    cases = [make_case(random), make_case(random, ops=10_000_000)]
    assert host_bound(cases, PRIOR).tolist() == [False, True]


def test_no_cases_are_refused() -> None:
    with pytest.raises(ValueError, match="no cases to fit"):
        fit([], PRIOR)


def test_demand_is_stacked_whole() -> None:
    random = np.random.default_rng(11)
    cases = [make_case(random, kernels=count) for count in (1, 5)]
    stack = _Stack(cases)
    assert all(len(getattr(stack.demand, each.name)) == 6 for each in fields(Demand))
    np.testing.assert_allclose(steps_s(cases, PRIOR), [float(steps_s([case], PRIOR)[0]) for case in cases], rtol=1e-12)


def test_the_shipped_calibration_is_whole() -> None:
    table = calibration()
    assert set(table.arithmetic) == set(ARITHMETIC)
    assert set(table.traffic) == set(TRAFFIC)
    assert set(table.feed) == set(FEED)
    for share in (*table.arithmetic.values(), *table.traffic.values()):
        assert 0.0 < share <= 4.0  # grouped convolutions count against the float32 peak, where matrix units run them
    assert 0.0 < table.cache < 1.0
    for units in table.generations.values():
        assert set(units) == set(UNITS)
        assert all(0.3 < factor < 2.0 for factor in units.values())
    for name in table.devices:
        assert devices().device(name).branch in table.generations
    for residuals in table.residuals.values():
        assert residuals.low < 1.0 < residuals.high
    assert set(table.residuals) == {
        *("device", "generation", "unknown", "host", "library", "product", "collective", "compiled")
    }


DATA = Path(os.environ.get("DDLTOOL_DATA", REPO / ".." / "shared" / "data"))


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "truth").exists(), reason="the measured rows are not here")
@pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")
def test_the_page_tells_what_the_shipped_constants_predict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPO / "benchmarks"))
    import truth_cases
    import truth_page

    shown = re.findall(
        r"\| ([\d.]+) ms \| ([\d.]+) ms \| [+-]\d+ % \|", (REPO / "docs" / "truth.md").read_text("utf-8")
    )
    rows = truth_page.examples(truth_cases.read(DATA).rows)
    assert len(shown) == len(rows) > 3
    for row, (measured_ms, predicted_ms) in zip(rows[:4], shown, strict=False):
        assert 1e3 * row.measured_s == pytest.approx(float(measured_ms), rel=1e-2)
        assert 1e3 * truth_page.predicted_s(row, calibration()) == pytest.approx(float(predicted_ms), rel=1e-2)


SCRIPT = REPO / "benchmarks" / "measure_gpu.py"


def run_script(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_measuring_script_runs_without_a_gpu_and_predicts_its_rows(tmp_path: Path) -> None:
    rows, only = tmp_path / "rows.csv", "perceptron --batch-sizes 8192 --precision bf16"
    asked = ("measure", rows, "--only", only, "--steps", 1, "--device", "cpu")
    for _ in range(2):
        assert run_script(*asked).returncode == 0
    with rows.open(encoding="utf-8") as lines:
        made = list(csv.DictReader(lines))
    assert [row["source"] for row in made] == ["perceptron"] * 2
    for row in made:
        assert (row["batch_size"], row["precision"], row["gpu"]) == ("8192", "bf16", "cpu")
        assert float(row["step_ms"]) > 0
    compared = run_script("compare", rows, "--device-name", "H100")
    assert "2 steps" in compared.stdout.splitlines()[-1], compared.stderr
    (tmp_path / "other.csv").write_text("device,num_nodes\n")
    told = run_script("measure", tmp_path / "other.csv", *asked[2:])
    assert told.returncode == 1
    assert "holds something else" in told.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_measuring_script_says_that_there_is_no_gpu(tmp_path: Path) -> None:
    told = run_script("measure", tmp_path / "rows.csv")
    assert told.returncode == 1
    assert "torch sees no GPU here" in told.stderr
