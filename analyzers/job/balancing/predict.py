"""Predictors of every worker's speed in its next iteration, from its past ones (LB-BSP, section 3.2.2 and Table 3).

Predictors work online on all workers at once: ``predict`` before an iteration, with the readings of CPU and memory taken
at its start, then ``observe`` with its measured speeds. Start at :func:`make_predictor`. :class:`~.trained.Trained` is the
base class of those that learn after a warm-up: :class:`Arima` here and the neural networks in :mod:`~.networks`.
"""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Protocol

import numpy as np

from ddltool.analyzers.job.balancing.trained import Ema, PredictorSettings, Trained
from ddltool.arrays import Floats
from ddltool.errors import known

PREDICTORS = ("last", "ema", "arima", "rnn", "lstm", "narx")
READING = ("narx",)
"""Predictors that use the readings of CPU and memory."""


class SpeedPredictor(Protocol):
    """Predicts the next speeds of n workers."""

    def predict(self, cpu: Floats, memory: Floats) -> Floats:
        """Return (n,) predicted samples per second of the iteration that begins now; NaN where nothing is known yet.

        ``cpu`` and ``memory``: (n,) readings at its start. It must be called once before every :meth:`observe`.
        """
        ...

    def observe(self, speed: Floats) -> None:
        """Take the (n,) speeds of the iteration that has ended, in samples per second."""
        ...


class Last:
    """The speed of the last iteration: the paper's memoryless method."""

    def __init__(self, workers: int) -> None:
        """Begin without a speed of any of the ``workers``."""
        self._speed = np.full(workers, np.nan)

    def predict(self, cpu: Floats, memory: Floats) -> Floats:
        """Return the (n,) speeds of the last iteration, in samples per second; NaN before the first."""
        return self._speed

    def observe(self, speed: Floats) -> None:
        """Keep the (n,) speeds as the next prediction."""
        self._speed = np.array(speed, dtype=np.float64)


class Arima(Trained):
    """ARIMA(2,2,1) on each worker's speed (LB-BSP, section 5.4).

    Parameters are estimated by statsmodels on a window and kept until the next training; in between only the state is updated.
    With w the second difference of the speed, ``u[t] = w[t] - phi1 w[t-1] - phi2 w[t-2]`` is a moving average of order 1, whose
    exact one-step forecasts are given by the innovations algorithm (Brockwell and Davis, section 5.2):

        e[t] = u[t] - theta e[t-1] / r[t-1],   r[t] = 1 + theta^2 - theta^2 / r[t-1].

    At first e is 0, and r is 1 + theta^2 for the first e that is not. The usual shortcut r = 1 would never forget its start
    where theta is -1, the value for speeds that were differenced once too often. All workers are in one array, because
    statsmodels' own ``append`` takes milliseconds per worker and iteration.
    """

    def __init__(self, workers: int, settings: PredictorSettings) -> None:
        """Begin with parameters of 0, until the first training after the warm-up estimates them."""
        super().__init__(workers, settings)
        self.parameters = np.zeros((3, workers))
        """(3, n) phi1, phi2, theta."""
        self._error = np.zeros(workers)
        """(n,) e of the last iteration: its second difference minus the forecast of it."""
        self._variance = np.ones(workers)
        """(n,) r of the coming iteration: the variance of the forecast's error over that of the noise."""
        self._next = np.zeros(workers)
        """(n,) forecast of the next second difference."""

    def _train(self) -> None:
        """Estimate each worker's parameters on the window, then run the recursion over the window up to the present."""
        window = self.last(self.settings.window)[:, 0]
        self.parameters = np.stack([_estimate_arima(series) for series in window.T], axis=1)
        second_difference = np.diff(window, n=2, axis=0)
        phi1, phi2, theta = self.parameters
        self._error, self._variance = np.zeros_like(theta), 1 + theta**2
        self._next = phi1 * second_difference[1] + phi2 * second_difference[0]
        for previous, latest in pairwise(second_difference[1:]):
            self._step(latest, previous)

    def _advance(self, speed: Floats) -> None:
        """Take the latest second difference of the speeds into the state; ``speed`` (n,) is in the window already."""
        second_difference = np.diff(self.last(4)[:, 0], n=2, axis=0)
        self._step(second_difference[1], second_difference[0])

    def _step(self, latest: Floats, previous: Floats) -> None:
        """Move the recursion on by one iteration, from the ``latest`` and the ``previous`` (n,) second differences.

        Formulas: those of the class, whose e is ``_error``, whose r is ``_variance``, and whose forecast of w is ``_next``.
        """
        phi1, phi2, theta = self.parameters
        self._error = latest - self._next
        self._next = phi1 * latest + phi2 * previous + theta * self._error / self._variance
        self._variance = 1 + theta**2 - theta**2 / self._variance

    def _forecast(self, cpu: Floats, memory: Floats) -> Floats:
        """Return (n,) forecast speeds: the line through the last two, plus the forecast second difference."""
        last = self.last(2)[:, 0]
        forecast: Floats = 2 * last[1] - last[0] + self._next
        return forecast


def _estimate_arima(series: Floats) -> Floats:
    """Return (3,) phi1, phi2, theta, estimated from one worker's (k,) speeds.

    They are those of a random walk for constant speeds, and where the estimation fails or gives a theta outside -1 to 1, with
    which the recursion would diverge.
    """
    from statsmodels.tsa.arima.model import ARIMA

    scale = float(series.std())
    random_walk = np.array([0.0, 0.0, -1.0])
    if scale <= 1e-9 * float(np.abs(series).max()):
        return random_walk
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of convergence: the parameters are checked below
        try:
            fitted = ARIMA(series / scale, order=(2, 2, 1)).fit(method="innovations_mle", cov_type="none")
        except (ValueError, ArithmeticError, np.linalg.LinAlgError):
            return random_walk
    parameters = np.asarray(fitted.params, dtype=np.float64)[:3]
    return parameters if np.isfinite(parameters).all() and abs(parameters[2]) <= 1 else random_walk


def make_predictor(name: str, workers: int, settings: PredictorSettings | None = None) -> SpeedPredictor:
    """Return the predictor called ``name``, one of :data:`PREDICTORS`, for ``workers`` workers.

    ``settings``: how trained predictors learn; None: the defaults. Raises InputError for any other name.
    """
    name = known("predictor", name, PREDICTORS)
    if settings is None:
        settings = PredictorSettings()
    if name == "last":
        return Last(workers)
    if name == "ema":
        return Ema(workers, restart_after=settings.restart_after)
    if name == "arima":
        return Arima(workers, settings)
    from ddltool.analyzers.job.balancing.networks import NeuralNetwork  # imports torch

    return NeuralNetwork(name, workers, settings)
