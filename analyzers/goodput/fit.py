"""The fit of the throughput model: seven parameters from measured step times (Pollux, section 4.1). Start at :func:`fit`.

Minimised is the mean squared log error (RMSLE squared) of the accumulation step ``T_grad`` and of the full step, both
where observed, with L-BFGS-B and the analytic gradient, over the logarithms of the parameters. A parameter that no row
can speak about keeps its prior: zero for synchronisation never seen (Pollux's "prior-driven exploration").

Synchronisation slows down less than linearly as replicas are added, so a slope learnt on few replicas predicts too long
steps for many. A prior on the slopes, ``SLOPE_PRIOR (beta / alpha)^2`` within and across nodes, answers that. Its weight
is the one that best predicted rows of more than 8 replicas from those of up to 8, and of 4 nodes from those of up to 3,
over the six applications of Pollux's own measurements (``benchmarks/bench_fit.py --prior`` repeats the choice).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult, minimize

from ddltool.analyzers.goodput.observations import Observations
from ddltool.analyzers.goodput.throughput import ThroughputParams, iteration_time_s
from ddltool.errors import InputError, NotProven

Array = NDArray[np.float64]
NAMES = (
    "alpha_grad_s",
    "beta_grad_s",
    "alpha_sync_local_s",
    "beta_sync_local_s",
    "alpha_sync_node_s",
    "beta_sync_node_s",
    "gamma",
)
# A time below this is zero for any step that can be measured.
_LEAST_S = 1e-9
SLOPE_PRIOR = 0.5
_GAMMA_STARTS = (1.2, 2.5, 6.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorSummary:
    """Error of the predicted against the measured full step time."""

    rmsle: float
    mape: float
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FitResult:
    """Fitted parameters, their error on the fitted rows, and what the rows could not determine."""

    params: ThroughputParams
    rmsle: float
    mape: float
    samples: int
    fit_seconds: float
    undetermined: tuple[str, ...]


def evaluate(params: ThroughputParams, observations: Observations) -> ErrorSummary:
    """Return RMSLE and MAPE of the full step time on the observations."""
    seen = observations.step_time_s
    predicted = np.asarray(
        iteration_time_s(params, observations.num_nodes, observations.num_replicas, observations.local_batch_size)
    )
    return ErrorSummary(
        rmsle=float(np.sqrt(np.mean((np.log(predicted) - np.log(seen)) ** 2))),
        mape=float(np.mean(np.abs(predicted - seen) / seen)),
        samples=len(seen),
    )


def fit(observations: Observations, *, seed: int = 0, slope_prior: float = SLOPE_PRIOR) -> FitResult:
    """Return the best fit over a few starts, the first from the data and the others with other overlap exponents.

    ``slope_prior`` is the weight of the prior on the slopes of synchronisation; 0 fits the rows alone.

    ``seed`` shifts nothing when the starts agree; it is used for one more, random start. Raises InputError without
    rows, NotProven when no start converged. O(rows) per evaluation.
    """
    started = time.perf_counter()
    if len(observations) == 0:
        raise InputError("observations", "are empty", "give at least one measured row")
    problem = _Problem(observations, slope_prior)
    chance = np.random.default_rng(seed)
    best: OptimizeResult | None = None
    for gamma in (*_GAMMA_STARTS, float(chance.uniform(1.0, 10.0))):
        found = minimize(
            problem.loss,
            problem.start(gamma),
            jac=True,
            method="L-BFGS-B",
            bounds=problem.bounds,
            options={"maxiter": 500, "ftol": 1e-12, "gtol": 1e-8},
        )
        # 2 is "abnormal line search": at the rounding floor it ends a converged run, so the value decides.
        if found.status in (0, 2) and np.isfinite(found.fun) and (best is None or found.fun < best.fun):
            best = found
    if best is None:
        raise NotProven("the throughput fit did not converge from any start; check the rows for outliers")
    params = problem.params(best.x)
    error = evaluate(params, observations)
    return FitResult(
        params=params,
        rmsle=error.rmsle,
        mape=error.mape,
        samples=len(observations),
        fit_seconds=time.perf_counter() - started,
        undetermined=tuple(name for name, free in zip(NAMES, problem.free, strict=True) if not free),
    )


class _Problem:
    """The loss over the logarithms of the free parameters; the others keep their priors."""

    def __init__(self, rows: Observations, slope_prior: float) -> None:
        self.slope_prior = slope_prior
        self.batch = rows.local_batch_size
        self.log_step = np.log(rows.step_time_s)
        self.has_grad = np.isfinite(rows.grad_time_s)
        self.log_grad = np.log(np.where(self.has_grad, rows.grad_time_s, 1.0))
        self.step_s = rows.step_time_s
        self.grad_s = np.where(self.has_grad, rows.grad_time_s, rows.step_time_s)
        self.more = np.maximum(rows.num_replicas - 2, 0.0)
        self.local = (rows.num_replicas > 1) & (rows.num_nodes <= 1)
        self.across = (rows.num_replicas > 1) & (rows.num_nodes > 1)
        self.shared = self.local | self.across
        seen_local, seen_across = bool(self.local.any()), bool(self.across.any())
        several = len(np.unique(self.batch)) > 1
        self.free = np.array(
            [
                True,
                several,
                seen_local,
                bool((self.more[self.local] > 0).any()),
                seen_across,
                bool((self.more[self.across] > 0).any()),
                seen_local or seen_across,
            ]
        )
        largest = float(rows.step_time_s.max()) * 10
        time_bounds = (np.log(_LEAST_S), np.log(largest))
        every = [time_bounds] * 6 + [(0.0, np.log(10.0))]
        self.bounds = [bound for bound, free in zip(every, self.free, strict=True) if free]

    def start(self, gamma: float) -> Array:
        """Return a start from the data: a line through T_grad, synchronisation from what the step takes longer."""
        slope, intercept = 0.0, float(np.median(self.grad_s))
        if self.free[1]:
            weight = 1.0 / self.grad_s
            slope, intercept = np.polyfit(self.batch, self.grad_s, 1, w=weight)
        floor = 0.01 * float(np.median(self.grad_s))
        longer = np.maximum(self.step_s - self.grad_s, floor)
        local = float(np.median(longer[self.local])) if self.local.any() else 1.0
        across = float(np.median(longer[self.across])) if self.across.any() else 1.0
        values = [
            max(intercept, floor),
            max(slope, floor / float(self.batch.max())),
            local,
            local / 10,
            across,
            across / 10,
        ]
        whole = np.log(np.array([*values, gamma]))
        low, high = (np.array(side) for side in zip(*self.bounds, strict=True))
        start: Array = np.clip(whole[self.free], low, high)
        return start

    def _whole(self, logs: Array) -> Array:
        """Return all seven parameters; those that are not free have their priors: 0, and 1 for gamma."""
        values = np.zeros(7)
        values[6] = 1.0
        values[self.free] = np.exp(logs)
        return values

    def params(self, logs: Array) -> ThroughputParams:
        """Return the parameters at a point; a time at the lower bound is zero."""
        values = self._whole(logs)
        values[:6][values[:6] <= _LEAST_S * 1.01] = 0.0
        values[6] = min(max(values[6], 1.0), 10.0)
        return ThroughputParams(**dict(zip(NAMES, values.tolist(), strict=True)))

    def loss(self, logs: Array) -> tuple[float, Array]:
        """Return the mean squared log errors and their gradient by the free logarithms."""
        values = self._whole(logs)
        a_g, b_g, a_l, b_l, a_n, b_n, gamma = values
        grad = a_g + b_g * self.batch
        sync = np.where(self.local, a_l + b_l * self.more, np.where(self.across, a_n + b_n * self.more, 1.0))
        log_grad, log_sync = np.log(grad), np.log(np.maximum(sync, 1e-300))
        both = np.logaddexp(gamma * log_grad, gamma * log_sync) / gamma
        share = np.where(self.shared, np.exp(gamma * (log_grad - both)), 1.0)  # weight of T_grad in the step
        log_step = np.where(self.shared, both, log_grad)
        step_error = (log_step - self.log_step) / len(self.batch)
        count = max(int(self.has_grad.sum()), 1)
        grad_error = np.where(self.has_grad, log_grad - self.log_grad, 0.0) / count
        loss = float(step_error @ (log_step - self.log_step) + grad_error @ (log_grad - self.log_grad))
        by_grad = 2 * (step_error * share + grad_error) / grad
        by_sync = np.where(self.shared, 2 * step_error * (1 - share) / sync, 0.0)
        by_gamma = np.where(
            self.shared, 2 * step_error * (share * log_grad + (1 - share) * log_sync - both) / gamma, 0.0
        )
        local, across = by_sync * self.local, by_sync * self.across
        whole = np.array(
            [
                by_grad.sum() * a_g,
                (by_grad @ self.batch) * b_g,
                local.sum() * a_l,
                (local @ self.more) * b_l,
                across.sum() * a_n,
                (across @ self.more) * b_n,
                by_gamma.sum() * gamma,
            ]
        )
        for alpha, beta in ((2, 3), (4, 5)):
            if self.free[beta]:
                penalty = self.slope_prior * (values[beta] / values[alpha]) ** 2
                loss += penalty
                whole[beta] += 2 * penalty
                whole[alpha] -= 2 * penalty
        return loss, whole[self.free]
