"""When each worker will end its next iterations, from the lengths of its recent ones (ElasticBSP, section III).

A predictor is any callable that takes one worker's recorded iteration lengths and how many to predict, and returns the
predicted lengths; :data:`PREDICTORS` holds the built-in ones by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from ddltool.arrays import Floats
from ddltool.errors import InputError

EMA_ALPHA = 0.2
"""Weight of the latest length in the moving average."""
WINDOW = 10
"""Lengths that the mean is of."""
# Older lengths weigh less than rounding does: 0.8 ** 200 is 4e-20.
_EMA_MEMORY = 200


class LengthPredictor(Protocol):
    """Predicts one worker's next iteration lengths."""

    def __call__(self, lengths_s: Floats, lookahead: int, /) -> ArrayLike:
        """Return (lookahead,) seconds, or one number for all, from (h,) recorded seconds, oldest first; h >= 1."""
        ...


def last_length(lengths_s: Floats, lookahead: int, /) -> float:
    """Return the last recorded length in seconds: right where nothing changes, as the paper assumes."""
    return float(lengths_s[-1])


def ema(lengths_s: Floats, lookahead: int, /) -> float:
    """Return the exponential moving average (seconds) of the lengths, oldest first: alpha is 0.2, the start the oldest one."""
    recent = lengths_s[-_EMA_MEMORY:]
    weights = EMA_ALPHA * (1 - EMA_ALPHA) ** np.arange(len(recent) - 1, -1, -1.0)
    weights[0] /= EMA_ALPHA  # the average starts at the oldest length, which so has the whole weight that is left
    return float(weights @ recent)


def window_mean(lengths_s: Floats, lookahead: int, /) -> float:
    """Return the mean, in seconds, of the last 10 lengths, or of all where there are fewer."""
    return float(lengths_s[-WINDOW:].mean())


PREDICTORS: Mapping[str, LengthPredictor] = {"last": last_length, "ema": ema, "mean": window_mean}


def predict_ends(
    lengths_s: Sequence[Floats],
    origins_s: ArrayLike,
    lookahead: int,
    predictor: LengthPredictor = ema,
    names: Sequence[str] | None = None,
) -> Floats:
    """Return (n, lookahead) predicted iteration ends of n workers, in seconds.

    ``lengths_s``: per worker its (h_p,) recorded iteration lengths in seconds, oldest first. ``origins_s``: (n,) when each
    worker's first predicted iteration begins. ``names``: (n,) what errors call the workers; None: their numbers from 0.
    Raises InputError for a lookahead below 1, a worker without a recorded length, and a predictor that returns
    lengths which are not ``lookahead`` finite seconds above zero.
    """
    if lookahead < 1:
        raise InputError("lookahead", f"is {lookahead}", "predict at least one iteration")
    origins = np.asarray(origins_s, dtype=np.float64)
    if origins.shape != (len(lengths_s),):
        raise InputError("origins_s", f"has shape {origins.shape}", f"give one origin for each of {len(lengths_s)}")
    predicted = np.empty((len(lengths_s), lookahead))
    for worker, recorded in enumerate(lengths_s):
        name = str(worker) if names is None else names[worker]
        if len(recorded) == 0:
            raise InputError(f"worker {name}", "has no recorded iteration length", "predictions need at least one")
        answer = np.asarray(predictor(recorded, lookahead), dtype=np.float64)
        if answer.shape not in ((), (1,), (lookahead,)):
            problem = f"its predictor returned shape {answer.shape}"
            raise InputError(f"worker {name}", problem, f"expected ({lookahead},) or one number")
        predicted[worker] = answer
        if not (np.isfinite(predicted[worker]).all() and (predicted[worker] > 0).all()):
            problem = f"its next iterations were predicted to take {predicted[worker].min():g} s"
            raise InputError(f"worker {name}", problem, "iteration lengths must be above zero and finite")
    np.cumsum(predicted, axis=1, out=predicted)
    predicted += origins[:, None]
    return predicted
