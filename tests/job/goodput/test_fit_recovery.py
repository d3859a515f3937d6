"""Rows made from known parameters: the fit finds them again, where the rows determine them at all."""

from __future__ import annotations

import numpy as np
import pytest

from ddltool.analyzers.job.goodput.fit import fit
from ddltool.analyzers.job.goodput.throughput import NAMES, ThroughputParams, grad_time_s, iteration_time_s
from tests.helpers.throughput_rows import observed

# What people measure: 1 to 4 nodes, 1 to 4 replicas each, five local batches.
GRID = np.array([(n, n * k, m) for n in (1, 2, 4) for k in (1, 2, 4) for m in (8, 16, 32, 64, 128)], dtype=float)
# Where predictions are asked for besides: between the measured ones, and twice beyond.
ASKED = np.array([(n, n * k, m) for n in (1, 2, 3, 8) for k in (1, 3, 4) for m in (12, 48, 256)], dtype=float)


def drawn(seed: int) -> ThroughputParams:
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
    truth = drawn(seed)
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
