"""Predicted ends of each worker's next iterations, from the lengths of its recent ones (ElasticBSP, section III).

Start at :func:`predict_ends`. A predictor is any callable that takes one worker's recorded iteration lengths and the number of
lengths to predict, and returns these; :data:`PREDICTORS` holds the built-in ones by name.
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
"""Number of last lengths of which the mean is taken."""
# The moving average needs no older lengths: their weight, 0.8 ** 200 = 4e-20, is less than rounding.
_EMA_MEMORY = 200


class LengthPredictor(Protocol):
    """Predicts one worker's next iteration lengths."""

    def __call__(self, lengths_s: Floats, lookahead: int, /) -> ArrayLike:
        """Return (lookahead,) predicted seconds, or one number for all, from (h,) recorded ones, oldest first; h >= 1."""
        ...


def last_length(lengths_s: Floats, lookahead: int, /) -> float:
    """Return the last recorded length in seconds; the paper assumes that lengths do not change."""
    return float(lengths_s[-1])


def ema(lengths_s: Floats, lookahead: int, /) -> float:
    """Return the exponential moving average of the lengths (oldest first) in seconds, with alpha 0.2, begun at the oldest."""
    recent = lengths_s[-_EMA_MEMORY:]
    weights = EMA_ALPHA * (1 - EMA_ALPHA) ** np.arange(len(recent) - 1, -1, -1.0)
    weights[0] /= EMA_ALPHA  # the average begins at the oldest length, which has all the remaining weight
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

    Args:
        lengths_s: per worker its (h_p,) recorded iteration lengths in seconds, oldest first.
        origins_s: (n,) times at which the workers' first predicted iterations begin.
        lookahead: number of iterations to predict.
        predictor: of iteration lengths.
        names: (n,) names of the workers in errors; None: their numbers from 0.

    Raises InputError for a lookahead below 1, a worker without a recorded length, and predicted lengths that are not
    ``lookahead`` finite seconds above zero.
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
        worker_lengths = np.asarray(predictor(recorded, lookahead), dtype=np.float64)
        if worker_lengths.shape not in ((), (1,), (lookahead,)):
            problem = f"its predictor returned shape {worker_lengths.shape}"
            raise InputError(f"worker {name}", problem, f"expected ({lookahead},) or one number")
        predicted[worker] = worker_lengths  # one number stands for all iterations
        if not (np.isfinite(predicted[worker]).all() and (predicted[worker] > 0).all()):
            problem = f"its next iterations were predicted to take {predicted[worker].min():g} s"
            raise InputError(f"worker {name}", problem, "iteration lengths must be above zero and finite")
    np.cumsum(predicted, axis=1, out=predicted)
    predicted += origins[:, None]
    return predicted
