"""What the rows determine: coverage on data with a known truth, and brute force."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.job.goodput.fit import fit
from ddltool.analyzers.job.goodput.observations import Observations
from ddltool.analyzers.job.goodput.throughput import NAMES, ThroughputParams, grad_time_s, iteration_time_s, log_times
from ddltool.analyzers.job.goodput.uncertainty import ASSUMED_ERROR, parameter_intervals
from ddltool.errors import InputError
from ddltool.goodput_model import ParameterInterval
from tests.helpers.throughput_rows import observed

TRUTH = ThroughputParams(
    alpha_grad_s=0.05,
    beta_grad_s=0.002,
    alpha_sync_local_s=0.03,
    beta_sync_local_s=0.004,
    alpha_sync_node_s=0.15,
    beta_sync_node_s=0.01,
    gamma=2.0,
)
PLACES = ((1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (2, 8), (4, 16))
ALL = tuple((nodes, replicas, batch) for nodes, replicas in PLACES for batch in (8, 32, 128))


def highest(interval: ParameterInterval) -> float:
    return math.inf if interval.high is None else interval.high


@pytest.mark.slow
def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    runs = 60
    covered = np.zeros(7)
    for seed in range(runs):
        rows = observed(TRUTH, ALL, 0.05, seed)
        found = parameter_intervals(rows, fit(rows).params, level=0.9)
        covered += [one.low <= getattr(TRUTH, name) <= highest(one) for name, one in found.intervals.items()]
    # 99.9 % of the time each lies within 3.3 standard errors of a proportion
    margin = 3.3 * math.sqrt(0.9 * 0.1 / runs)
    assert (covered / runs > 0.9 - margin).all(), dict(zip(NAMES, covered / runs, strict=True))
    assert 0.84 < covered.mean() / runs < 0.96  # and they are not just wide


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.02, 0.1]))
def test_an_interval_holds_its_best_value_and_shrinks_with_less_noise(seed: int, error: float) -> None:
    rows = observed(TRUTH, ALL, error, seed)
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

    rows = observed(TRUTH, ALL, 0.05, 3)
    found = parameter_intervals(rows, fit(rows).params, level=0.9, error=0.05)

    def errors(logs: np.ndarray, held: int | None = None, at: float = 0.0) -> np.ndarray:
        full = logs if held is None else np.insert(logs, held, at)
        grad, step, _, _ = log_times(np.exp(full), rows.num_nodes, rows.num_replicas, rows.local_batch_size)
        weight = math.sqrt(20 / len(ALL))  # of T_grad: as in the fit, 1 for up to 20 configurations
        return np.concatenate([step - np.log(rows.step_time_s), weight * (grad - np.log(rows.grad_time_s))])

    start = np.log([getattr(TRUTH, name) for name in NAMES])
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
    seen = observed(TRUTH, rows, 0.02, 1)
    found = parameter_intervals(seen, fit(seen).params)
    assert set(undetermined) <= set(found.undetermined)
    assert set(found.undetermined) <= {*undetermined, "gamma", "beta_sync_local_s"}
    for name, one in found.intervals.items():
        assert (one.reason != "") == (name in found.undetermined)
    assert not found["alpha_grad_s"].reason


def test_seen_but_without_weight_is_undetermined_too() -> None:
    """Synchronisation far shorter than a pass, fully hidden: no row says anything about its overlap."""
    hidden = ThroughputParams(
        **{**TRUTH.model_dump(), "alpha_sync_local_s": 1e-6, "beta_sync_local_s": 0.0, "gamma": 8.0}
    )
    seen = observed(hidden, [row for row in ALL if row[0] == 1] * 2, 0.05, 2)
    found = parameter_intervals(seen, fit(seen).params)
    assert found["gamma"].reason == "the rows fit as well with any value"
    assert found["alpha_sync_local_s"].low == 0
    assert highest(found["alpha_sync_local_s"]) < float(grad_time_s(hidden, 8))  # longer than a pass would show


def test_too_few_rows_assume_an_error() -> None:
    seen = observed(TRUTH, [(1, 1, 8), (1, 1, 32)], 0.01, 0, with_grad=False)
    found = parameter_intervals(seen, fit(seen).params)
    assert found.error == ASSUMED_ERROR
    for bad in (0.0, 1.0):
        with pytest.raises(InputError, match="level"):
            parameter_intervals(seen, TRUTH, level=bad)
    nothing = Observations(**{f.name: np.zeros(0) for f in fields(Observations)})
    with pytest.raises(InputError, match="at least one"):
        parameter_intervals(nothing, TRUTH)


params = st.builds(
    ThroughputParams,
    **{name: st.floats(1e-3, 1.0) for name in NAMES[:6]},
    gamma=st.floats(1.1, 9.0),
)


@settings(max_examples=60, deadline=None)
@given(params, st.integers(1, 3), st.integers(1, 8), st.integers(1, 100))
def test_jacobian_against_differences(p: ThroughputParams, nodes: int, more: int, batch: int) -> None:
    values = np.array([getattr(p, name) for name in NAMES])
    place = (np.array([float(nodes)]), np.array([float(nodes + more - 1)]), np.array([float(batch)]))
    log_grad, log_step, by_grad, by_step = log_times(values, *place)
    assert np.exp(log_step[0]) == pytest.approx(float(iteration_time_s(p, nodes, nodes + more - 1, batch)))
    assert np.exp(log_grad[0]) == pytest.approx(float(grad_time_s(p, batch)))
    for i in range(7):
        up, down = (log_times(values * np.exp(h * (np.arange(7) == i)), *place) for h in (1e-5, -1e-5))
        assert by_grad[0, i] == pytest.approx((up[0][0] - down[0][0]) / 2e-5, abs=1e-6)
        assert by_step[0, i] == pytest.approx((up[1][0] - down[1][0]) / 2e-5, abs=1e-6)


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
