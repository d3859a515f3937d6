"""The moving average of a worker's speed, and the base class of predictors that are trained. See :mod:`~.predict`."""

from __future__ import annotations

import copy
import logging
import threading
from collections import deque
from dataclasses import dataclass

import numpy as np

from ddltool.arrays import Floats
from ddltool.errors import InputError

log = logging.getLogger(__name__)

EMA_ALPHA = 0.2
WARM_UP = 500
# Fewest iterations that determine a model.
_FEWEST_ITERATIONS = 20
# Ratio to the average above which, or below whose inverse, consecutive speeds count as a lasting change.
_CHANGE_RATIO = 1.25
# Forecasts are clipped to the range of a worker's past speeds, widened by this ratio; one wild forecast would stall all.
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
    """Most steps of the common model's training, each over all its samples."""
    own_steps: int = 60
    """Most steps of each worker's own training, each over the whole window."""
    patience: int = 50
    """Steps without a lower validation error after which a model's training stops."""
    seed: int = 0
    background: bool = False
    """Whether to train networks in a thread, and predict with the old weights meanwhile: for use while a job runs."""
    restart_after: int = 0
    """Number of consecutive speeds far off EMA on the same side after which EMA restarts at their median, also during a
    warm-up; 0: never, as in the paper."""

    def __post_init__(self) -> None:
        """Raise InputError for a number below what training needs."""
        for name in ("warm_up", "window"):
            if getattr(self, name) < _FEWEST_ITERATIONS:
                problem, remedy = f"is {getattr(self, name)}", f"training needs {_FEWEST_ITERATIONS} iterations or more"
                raise InputError(name, problem, remedy)
        for name in ("refit_every", "hidden", "most_steps", "own_steps", "patience"):
            if getattr(self, name) < 1:
                raise InputError(name, f"is {getattr(self, name)}", "give 1 or more")
        if self.restart_after < 0:
            raise InputError("restart_after", f"is {self.restart_after}", "give 0 or more")


class Ema:
    """Exponential moving average that begins at the first speed; alpha is the weight of the latest speed.

    With ``restart_after`` k > 0, a worker whose last k speeds were each more than 1.25 times its average at that time, or each
    less than the average over 1.25, counts as changed for good: its average restarts at the median of these k.
    """

    def __init__(self, workers: int, alpha: float = EMA_ALPHA, restart_after: int = 0) -> None:
        """Begin without an average of any of the ``workers``."""
        self._alpha = alpha
        self._recent: deque[Floats] = deque(maxlen=restart_after)
        """The last k speeds, (n,) each, from which an average restarts; empty for k = 0."""
        # (n,) number of consecutive last speeds far above the average, and far below it.
        self._above = self._below = np.zeros(workers, dtype=np.int64)
        self._mean = np.full(workers, np.nan)
        """(n,) averages in samples per second; NaN before the first speed."""

    def predict(self, cpu: Floats, memory: Floats) -> Floats:
        """Return the (n,) average speeds, in samples per second; NaN before the first speed."""
        return self._mean

    def observe(self, speed: Floats) -> None:
        """Take (n,) speeds into the averages, and restart those of workers that have changed for good."""
        has_mean = ~np.isnan(self._mean)
        if self._recent.maxlen:
            self._recent.append(np.asarray(speed, dtype=np.float64))
            # multiplied by whether the speed is far off: a count goes up by one, or back to 0
            self._above = (self._above + 1) * (speed > _CHANGE_RATIO * self._mean)
            self._below = (self._below + 1) * (speed < self._mean / _CHANGE_RATIO)
        self._mean = np.where(has_mean, self._alpha * speed + (1 - self._alpha) * self._mean, speed)
        has_changed = np.maximum(self._above, self._below) >= (self._recent.maxlen or np.inf)
        if has_changed.any():
            self._mean = np.where(has_changed, np.median(np.stack(self._recent), axis=0), self._mean)


class Trained:
    """A predictor that is trained after a warm-up: EMA predicts until then, and clipped forecasts afterwards.

    A subclass implements :meth:`_train` and :meth:`_forecast`, and may implement :meth:`_advance`.
    """

    LEARNED: tuple[str, ...] = ()
    """Attributes that training sets, which are taken over from a copy trained in the background; empty: it never is."""

    def __init__(self, workers: int, settings: PredictorSettings) -> None:
        """Begin in the warm-up, with an EMA that predicts until a training has ended."""
        self.settings = settings
        self._rows: deque[Floats] = deque(maxlen=settings.window)
        """(3, n) speed, CPU and memory of each iteration of the window."""
        self._count = 0
        """Iterations observed."""
        self.ready = False
        """Whether a training has ended, so that forecasts are possible."""
        self._ema = Ema(workers, restart_after=settings.restart_after)
        self._lowest = np.full(workers, np.inf)
        """(n,) slowest speed of each worker so far; ``_highest``: the fastest."""
        self._highest = np.full(workers, -np.inf)
        self._readings: tuple[Floats, Floats] | None = None
        """(n,) CPU and memory at the last prediction, which belong to the next observed speeds."""
        self._due = False
        """Whether the next prediction must train first."""
        self._background_training: tuple[Trained, threading.Thread] | None = None
        """The copy that is being trained, and the thread that trains it; None: no training runs."""

    def predict(self, cpu: Floats, memory: Floats) -> Floats:
        """Return (n,) predicted speeds of the next iteration, in samples per second.

        They are EMA's during the warm-up and where a forecast is not finite. ``cpu`` and ``memory``: (n,) present readings. A
        due training is done first, or started in the background. It is not done in :meth:`observe`, because after the last
        iteration it would be in vain.
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
        """Take the (n,) speeds, in samples per second, of the iteration that the last :meth:`predict` was for.

        Then decide whether the next :meth:`predict` must train; if not, the model's state moves on by this iteration. Raises
        InputError where :meth:`predict` was never called.
        """
        if self._readings is None:
            raise InputError("observe", "was called before predict", "predict every iteration before it is observed")
        self._rows.append(np.stack((np.asarray(speed, dtype=np.float64), *self._readings)))  # (3, n)
        self._count += 1
        self._ema.observe(speed)
        self._lowest = np.minimum(self._lowest, speed)
        self._highest = np.maximum(self._highest, speed)
        since_warm_up = self._count - self.settings.warm_up
        self._due = since_warm_up >= 0 and since_warm_up % self.settings.refit_every == 0
        if self.ready and not self._due:  # a training reads all rows, this one included
            self._advance(np.asarray(speed, dtype=np.float64))

    def last(self, iterations: int) -> Floats:
        """Return (k, 3, n) speed, CPU and memory of the last k = ``iterations`` iterations (or of all kept), oldest first."""
        return np.stack(list(self._rows)[-iterations:])

    def _start_background_training(self) -> None:
        """Start a thread that trains a copy on the present rows, unless a training still runs.

        Meanwhile this predictor predicts by what it has learnt before, so that no prediction waits.
        """
        if self._background_training is not None:
            return
        # A shallow copy suffices: training replaces attributes and changes none in place. Only the rows grow meanwhile.
        trained_copy = copy.copy(self)
        trained_copy._rows = self._rows.copy()
        trained_copy._background_training = None

        def train() -> None:
            """Train the copy in the thread; a failure is logged and leaves this predictor as it is."""
            trained_copy.ready = self.ready
            try:
                trained_copy._train()
                trained_copy.ready = True
            except Exception:  # a failed training must not end the job
                log.warning("training the speed predictor has failed; going on without", exc_info=True)

        thread = threading.Thread(target=train, name="ddltool-predictor", daemon=True)
        self._background_training = trained_copy, thread
        thread.start()

    def _adopt_trained_state(self) -> None:
        """Take over the ``LEARNED`` attributes of the copy trained in the background, if its training has ended."""
        if self._background_training is None:
            return
        trained_copy, thread = self._background_training
        if thread.is_alive():
            return
        self._background_training = None
        if trained_copy.ready:
            for name in self.LEARNED:
                setattr(self, name, getattr(trained_copy, name))
            self.ready = True

    def _train(self) -> None:
        """Fit the model of every worker to the rows of the window; subclasses must implement it."""
        raise NotImplementedError

    def _advance(self, speed: Floats) -> None:
        """Update the model's state with the (n,) speeds of one more iteration; here nothing is to be done."""

    def _forecast(self, cpu: Floats, memory: Floats) -> Floats:
        """Return (n,) forecast speeds of the next iteration from (n,) readings at its start; subclasses must implement it."""
        raise NotImplementedError
