"""ARIMA(2,2,1) on each worker's speed (LB-BSP, section 5.4).

Parameters are estimated by statsmodels on a window and kept until the next training; between trainings only the state
moves on. With w the second difference of the speed, ``u[t] = w[t] - phi1 w[t-1] - phi2 w[t-2]`` is a moving average of
order 1, whose exact one-step forecasts are the innovations algorithm's (Brockwell and Davis, section 5.2):

    e[t] = u[t] - theta e[t-1] / r[t-1],   r[t] = 1 + theta^2 - theta^2 / r[t-1],   e = 0 and r = 1 + theta^2 at first.

The usual shortcut r = 1 would never forget its start where theta is -1, which is what speeds that were differenced once
too often lead to. All workers go in one array, where statsmodels' own ``append`` would take milliseconds for each worker
and iteration.
"""

from __future__ import annotations

import warnings
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.balancing.predict import Settings, Trained

Floats = NDArray[np.float64]
ORDER = (2, 2, 1)


class Arima(Trained):
    """ARIMA(2,2,1) for n workers."""

    def __init__(self, workers: int, settings: Settings) -> None:
        super().__init__(workers, settings)
        self.parameters = np.zeros((3, workers))
        """(3, n) phi1, phi2, theta."""
        self._error = np.zeros(workers)
        self._variance = np.ones(workers)
        self._next = np.zeros(workers)

    @property
    def look_back(self) -> int:
        """Two differences, and one of their values before."""
        return 4

    def _train(self) -> None:
        window = self.history.last(self.settings.window)[:, 0]
        self.parameters = np.stack([_estimate(series) for series in window.T], axis=1)
        second = np.diff(window, n=2, axis=0)
        phi1, phi2, theta = self.parameters
        self._error, self._variance = np.zeros_like(theta), 1 + theta**2
        self._next = phi1 * second[1] + phi2 * second[0]
        for before, now in pairwise(second[1:]):
            self._step(now, before)

    def _advance(self, speed: Floats) -> None:
        second = np.diff(self.history.last(4)[:, 0], n=2, axis=0)
        self._step(second[1], second[0])

    def _step(self, now: Floats, before: Floats) -> None:
        phi1, phi2, theta = self.parameters
        self._error = now - self._next
        self._next = phi1 * now + phi2 * before + theta * self._error / self._variance
        self._variance = 1 + theta**2 - theta**2 / self._variance

    def _forecast(self, cpu: Floats, memory: Floats) -> Floats:
        last = self.history.last(2)[:, 0]
        forecast: Floats = 2 * last[1] - last[0] + self._next
        return forecast


def _estimate(series: Floats) -> Floats:
    """Return (3,) phi1, phi2, theta of one worker's speeds; those of a random walk where they cannot be estimated."""
    from statsmodels.tsa.arima.model import ARIMA

    scale = float(series.std())
    walk = np.array([0.0, 0.0, -1.0])
    if scale <= 1e-9 * float(np.abs(series).max()):
        return walk
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # convergence; what came out is judged below
        try:
            fitted = ARIMA(series / scale, order=ORDER).fit(method="innovations_mle", cov_type="none")
        except (ValueError, ArithmeticError, np.linalg.LinAlgError):
            return walk
    found = np.asarray(fitted.params, dtype=np.float64)[:3]
    return found if np.isfinite(found).all() and abs(found[2]) <= 1 else walk
