"""Predictors of every worker's speed in its next iteration, from its past ones (LB-BSP, section 3.2.2 and Table 3).

Predictors work online on all workers at once: ``predict`` before an iteration, with the readings of CPU and memory taken
at its start, then ``observe`` with its measured speeds. Start at :func:`make`. :class:`Trained` is the base class of the
predictors that learn after a warm-up; :class:`Arima` is here, the networks are in :mod:`~.networks`.
"""

from __future__ import annotations

import copy
import logging
import threading
import warnings
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from ddltool.arrays import Floats
from ddltool.errors import InputError, known

log = logging.getLogger(__name__)

EMA_ALPHA = 0.2
WARM_UP = 500
# Ratio to the average above which (or below whose inverse) consecutive speeds count as a lasting change.
_CHANGE_RATIO = 1.25
# Forecasts are clipped to this ratio beyond a worker's lowest and highest speed; wilder ones would stall the others.
_BOUND_RATIO = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictorSettings:
    """How the trained predictors learn; the defaults are the paper's where it gives them."""

    warm_up: int = WARM_UP
    """Iterations observed before the first training; until then predictions are EMA's."""
    refit_every: int = 500
    """Iterations between trainings after that; each goes on from the weights of the one before."""
    window: int = 1000
    """Most recent iterations that a training sees."""
    hidden: int = 10
    """Units of the one hidden layer."""
    most_steps: int = 1500
    """Steps at most of the common model's training, each over all its samples."""
    own_steps: int = 60
    """Steps at most of each worker's own training, each over the whole window."""
    patience: int = 50
    """Steps without a lower validation error after which a model's training stops."""
    seed: int = 0
    background: bool = False
    """Train networks in a thread, going on with what is there until it has ended: for use while a job runs."""
    restart_after: int = 0
    """Speeds in a row far off on the same side after which EMA, during a warm-up too, begins anew with their median; 0:
    never (the paper's)."""

    def __post_init__(self) -> None:
        for name in ("warm_up", "window"):
            if getattr(self, name) < 20:
                raise InputError(name, f"is {getattr(self, name)}", "training needs 20 iterations or more")
        for name in ("refit_every", "hidden", "most_steps", "own_steps", "patience"):
            if getattr(self, name) < 1:
                raise InputError(name, f"is {getattr(self, name)}", "give 1 or more")
        if self.restart_after < 0:
            raise InputError("restart_after", f"is {self.restart_after}", "give 0 or more")


class Ema:
    """Exponential moving average that begins at the first speed; alpha is the weight of the latest.

    With ``restart_after`` k > 0, a worker whose last k speeds were all 1.25 times above its average of then, or all as far
    below, has changed for good: its average begins anew with their median, and need not get there by and by.
    """

    def __init__(self, workers: int, alpha: float = EMA_ALPHA, restart_after: int = 0) -> None:
        self._alpha = alpha
        self._recent: deque[Floats] = deque(maxlen=restart_after)
        self._above = self._below = np.zeros(workers, dtype=np.int64)
        self._mean = np.full(workers, np.nan)

    def predict(self, cpu: Floats, memory: Floats) -> Floats:
        """Return (n,) averages."""
        return self._mean

    def observe(self, speed: Floats) -> None:
        """Take (n,) speeds into the averages."""
        has_mean = ~np.isnan(self._mean)
        if self._recent.maxlen:
            self._recent.append(np.asarray(speed, dtype=np.float64))
            self._above = (self._above + 1) * (speed > _CHANGE_RATIO * self._mean)
            self._below = (self._below + 1) * (speed < self._mean / _CHANGE_RATIO)
        self._mean = np.where(has_mean, self._alpha * speed + (1 - self._alpha) * self._mean, speed)
        changed = np.maximum(self._above, self._below) >= (self._recent.maxlen or np.inf)
        if changed.any():
            self._mean = np.where(changed, np.median(np.stack(self._recent), axis=0), self._mean)


class Trained:
    """A predictor that learns after a warm-up: EMA until then, and forecasts within bounds after it.

    A subclass implements :meth:`_train` and :meth:`_forecast`.
    """

    LEARNED: tuple[str, ...] = ()
    """Attributes that training sets and that may be taken over later; none: it always trains in the foreground."""

    def __init__(self, workers: int, settings: PredictorSettings) -> None:
        self.settings = settings
        self._rows: deque[Floats] = deque(maxlen=settings.window)
        self._count = 0
        self.ready = False
        """Whether a training has ended, so that forecasts are possible."""
        self._ema = Ema(workers, restart_after=settings.restart_after)
        self._lowest = np.full(workers, np.inf)
        self._highest = np.full(workers, -np.inf)
        self._readings: tuple[Floats, Floats] | None = None
        self._due = False
        self._apprentice: tuple[Trained, threading.Thread] | None = None

    def predict(self, cpu: Floats, memory: Floats) -> Floats:
        """Return (n,) predicted speeds: EMA's during the warm-up and where a forecast is not finite.

        A due training runs here and not in :meth:`observe`, so a run that ends before another prediction skips it.
        """
        self._readings = np.array(cpu, dtype=np.float64), np.array(memory, dtype=np.float64)
        if self._due:
            self._due = False
            if self.settings.background and self.LEARNED:
                self._start_background_training()
            else:
                self._train()
                self.ready = True
        self._adopt_trained_state()
        fallback = self._ema.predict(cpu, memory)
        if not self.ready:
            return fallback
        forecast = self._forecast(*self._readings)
        bounded = np.clip(forecast, self._lowest / _BOUND_RATIO, self._highest * _BOUND_RATIO)
        return np.where(np.isfinite(forecast), bounded, fallback)

    def observe(self, speed: Floats) -> None:
        """Take (n,) speeds of the iteration that :meth:`predict` was called for."""
        if self._readings is None:
            raise InputError("observe", "was called before predict", "predict every iteration before it is observed")
        self._rows.append(np.stack((np.asarray(speed, dtype=np.float64), *self._readings)))
        self._count += 1
        self._ema.observe(speed)
        self._lowest, self._highest = np.minimum(self._lowest, speed), np.maximum(self._highest, speed)
        since_warm_up = self._count - self.settings.warm_up
        self._due = since_warm_up >= 0 and since_warm_up % self.settings.refit_every == 0
        if self.ready and not self._due:
            self._advance(np.asarray(speed, dtype=np.float64))

    def last(self, iterations: int) -> Floats:
        """Return (k, 3, n) speed, CPU and memory of the last k iterations, k at most ``iterations`` and the window."""
        return np.stack(list(self._rows)[-iterations:])

    def _start_background_training(self) -> None:
        """Start a thread that trains a copy on the present rows, unless a training still runs."""
        if self._apprentice is not None:
            return
        apprentice = copy.copy(self)
        apprentice._rows = self._rows.copy()
        apprentice._apprentice = None

        def train() -> None:
            apprentice.ready = self.ready
            try:
                apprentice._train()
                apprentice.ready = True
            except Exception:
                log.warning("training the speed predictor has failed; going on without", exc_info=True)

        thread = threading.Thread(target=train, name="ddltool-predictor", daemon=True)
        self._apprentice = apprentice, thread
        thread.start()

    def _adopt_trained_state(self) -> None:
        """Copy the ``LEARNED`` attributes from a background training that has ended."""
        if self._apprentice is None or self._apprentice[1].is_alive():
            return
        apprentice, self._apprentice = self._apprentice[0], None
        if apprentice.ready:
            for name in self.LEARNED:
                setattr(self, name, getattr(apprentice, name))
            self.ready = True

    def _train(self) -> None:
        raise NotImplementedError

    def _advance(self, speed: Floats) -> None:
        """Update the state with (n,) speeds of one more iteration, between trainings."""

    def _forecast(self, cpu: Floats, memory: Floats) -> Floats:
        raise NotImplementedError


class Arima(Trained):
    """ARIMA(2,2,1) on each worker's speed (LB-BSP, section 5.4).

    Parameters are estimated by statsmodels on a window and kept until the next training; between trainings only the state
    moves on. With w the second difference of the speed, ``u[t] = w[t] - phi1 w[t-1] - phi2 w[t-2]`` is a moving average of
    order 1, whose exact one-step forecasts are the innovations algorithm's (Brockwell and Davis, section 5.2):

        e[t] = u[t] - theta e[t-1] / r[t-1],   r[t] = 1 + theta^2 - theta^2 / r[t-1],   e = 0 and r = 1 + theta^2 at first.

    The usual shortcut r = 1 would never forget its start where theta is -1, which is what speeds that were differenced
    once too often lead to. All workers go in one array, where statsmodels' own ``append`` would take milliseconds for each
    worker and iteration.
    """

    def __init__(self, workers: int, settings: PredictorSettings) -> None:
        super().__init__(workers, settings)
        self.parameters = np.zeros((3, workers))
        """(3, n) phi1, phi2, theta."""
        self._error = np.zeros(workers)
        self._variance = np.ones(workers)
        self._next = np.zeros(workers)

    def _train(self) -> None:
        window = self.last(self.settings.window)[:, 0]
        self.parameters = np.stack([_estimate_arima(series) for series in window.T], axis=1)
        second_difference = np.diff(window, n=2, axis=0)
        phi1, phi2, theta = self.parameters
        self._error, self._variance = np.zeros_like(theta), 1 + theta**2
        self._next = phi1 * second_difference[1] + phi2 * second_difference[0]
        for previous, latest in pairwise(second_difference[1:]):
            self._step(latest, previous)

    def _advance(self, speed: Floats) -> None:
        second_difference = np.diff(self.last(4)[:, 0], n=2, axis=0)
        self._step(second_difference[1], second_difference[0])

    def _step(self, latest: Floats, previous: Floats) -> None:
        phi1, phi2, theta = self.parameters
        self._error = latest - self._next
        self._next = phi1 * latest + phi2 * previous + theta * self._error / self._variance
        self._variance = 1 + theta**2 - theta**2 / self._variance

    def _forecast(self, cpu: Floats, memory: Floats) -> Floats:
        last = self.last(2)[:, 0]
        forecast: Floats = 2 * last[1] - last[0] + self._next
        return forecast


def _estimate_arima(series: Floats) -> Floats:
    """Return (3,) phi1, phi2, theta of one worker's (k,) speeds.

    Constant speeds, and series on which the estimation fails or is not invertible, get those of a random walk.
    """
    from statsmodels.tsa.arima.model import ARIMA

    scale = float(series.std())
    random_walk = np.array([0.0, 0.0, -1.0])
    if scale <= 1e-9 * float(np.abs(series).max()):
        return random_walk
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # convergence; what came out is judged below
        try:
            fitted = ARIMA(series / scale, order=(2, 2, 1)).fit(method="innovations_mle", cov_type="none")
        except (ValueError, ArithmeticError, np.linalg.LinAlgError):
            return random_walk
    parameters = np.asarray(fitted.params, dtype=np.float64)[:3]
    return parameters if np.isfinite(parameters).all() and abs(parameters[2]) <= 1 else random_walk


__all__ = ["PREDICTORS", "READING", "Ema", "Last", "PredictorSettings", "SpeedPredictor", "make"]

PREDICTORS = ("last", "ema", "arima", "rnn", "lstm", "narx")
READING = ("narx",)
"""Those that look at CPU and memory."""


class SpeedPredictor(Protocol):
    """Predicts the next speeds of n workers."""

    def predict(self, cpu: Floats, memory: Floats) -> Floats:
        """Return (n,) samples per second of the iteration that begins now, NaN where nothing is known yet.

        ``cpu`` and ``memory``: (n,) readings at its start. To be called once before every :meth:`observe`.
        """
        ...

    def observe(self, speed: Floats) -> None:
        """Take the (n,) speeds of the iteration that has ended, in samples per second."""
        ...


class Last:
    """The speed of the last iteration: the paper's memoryless method."""

    def __init__(self, workers: int) -> None:
        self._speed = np.full(workers, np.nan)

    def predict(self, cpu: Floats, memory: Floats) -> Floats:
        """Return (n,) last speeds."""
        return self._speed

    def observe(self, speed: Floats) -> None:
        """Keep (n,) speeds."""
        self._speed = np.array(speed, dtype=np.float64)


def make(name: str, workers: int, settings: PredictorSettings | None = None) -> SpeedPredictor:
    """Return the predictor called ``name`` for n workers; see :data:`PREDICTORS`. Raises InputError for other names."""
    chosen, name = settings if settings is not None else PredictorSettings(), known("predictor", name, PREDICTORS)
    if name == "last":
        return Last(workers)
    if name == "ema":
        return Ema(workers, restart_after=chosen.restart_after)
    if name == "arima":
        return Arima(workers, chosen)
    from ddltool.analyzers.job.balancing.networks import NeuralNetwork

    return NeuralNetwork(name, workers, chosen)
