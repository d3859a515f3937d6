"""The speed of every worker in its next iteration, from what it did before (LB-BSP, section 3.2.2 and Table 3).

Predictors work online on all workers at once: ``predict`` before an iteration, with the readings of CPU and memory taken
at its start, then ``observe`` with the speeds that it really had. Start at :func:`make`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ddltool.analyzers.balancing.trained import Arima, Ema, Floats, Settings
from ddltool.errors import InputError, did_you_mean

__all__ = ["PREDICTORS", "READING", "Ema", "Last", "Predictor", "Settings", "check_names", "make"]

PREDICTORS = ("last", "ema", "arima", "rnn", "lstm", "narx")
READING = ("narx",)
"""Those that look at CPU and memory."""


class Predictor(Protocol):
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


def make(name: str, workers: int, settings: Settings | None = None) -> Predictor:
    """Return the predictor called ``name`` for n workers; see :data:`PREDICTORS`. Raises InputError for other names."""
    chosen = settings if settings is not None else Settings()
    if name == "last":
        return Last(workers)
    if name == "ema":
        return Ema(workers, restart_after=chosen.restart_after)
    if name == "arima":
        return Arima(workers, chosen)
    if name in PREDICTORS:
        from ddltool.analyzers.balancing.networks import Network

        return Network(name, workers, chosen)
    raise InputError("predictor", f"unknown predictor {name!r}", did_you_mean(name, PREDICTORS))


def check_names(names: Sequence[str]) -> None:
    """Raise InputError for a name that is no predictor's."""
    for name in names:
        if name not in PREDICTORS:
            raise InputError("--predictor", f"unknown predictor {name!r}", did_you_mean(name, (*PREDICTORS, "all")))
