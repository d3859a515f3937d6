"""The gradient noise scale phi: how many samples a batch needs until its gradient is more signal than noise.

Start at :class:`NoiseScaleEstimator`, which takes squared norms (numbers, no tensors) step by step. With G the true
gradient and S the trace of the covariance of one sample's gradient, ``phi = S / |G|^2`` in samples (McCandlish et al. 2018,
"simple" noise scale, appendix A.1). A mean gradient over a batch of B samples has ``E |g|^2 = |G|^2 + S / B``; two batch
sizes make two equations, from K replicas, accumulation steps, or two consecutive steps. For optimizers that scale each
coordinate (Adam), take all norms of ``P g`` instead of ``g``: the pre-conditioned noise scale of Pollux, section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ddltool.analyzers.job.goodput.lr_rules import GradientStatistics
from ddltool.errors import InputError

# Effective number of past observations: 1 / (1 - smoothing).
SMOOTHING = 0.99
# What is averaged: 1 (so that the start's bias can be corrected), both terms, their squares and product.
_MOMENTS = ("weight", "sqr", "var", "sqr_sqr", "var_var", "sqr_var")


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseTerms:
    """Unbiased estimates of ``|G|^2`` (sqr) and of S (var_per_sample); either can be negative by chance."""

    sqr: float
    var_per_sample: float


def noise_terms(small_sqr: float, big_sqr: float, small: float, big: float) -> NoiseTerms:
    """Return estimates of ``|G|^2`` and S from the squared norms of gradients at two batch sizes.

    They solve ``E |g|^2 = |G|^2 + S / B`` at both sizes (McCandlish et al., appendix A.1), and are unbiased for independent
    samples.

    ``small_sqr`` is the mean of ``|g_i|^2`` over independent gradients of ``small`` samples each; ``big_sqr`` is the squared
    norm of their mean, over all ``big`` samples. For batches of unequal sizes b_i, weigh both means by b_i and let ``small`` be
    the mean of the b_i: S / b_i weighted by b_i / B sums to S over that mean. The norms of small batches scatter most, and
    where noise prevails the weights of least variance are nearly these, ``b_i (1 - b_i / B)`` (Cannikin, arXiv:2402.05302).

    Raises InputError unless ``0 < small < big`` and the norms are finite and at least 0.
    """
    if not 0 < small < big:
        raise InputError(
            "batch sizes", f"are {small:g} and {big:g}", "the second must be larger: give two or more gradients"
        )
    if not (math.isfinite(small_sqr) and math.isfinite(big_sqr) and small_sqr >= 0 and big_sqr >= 0):
        raise InputError("squared norms", f"are {small_sqr} and {big_sqr}", "they must be finite and >= 0")
    return NoiseTerms(
        sqr=(big * big_sqr - small * small_sqr) / (big - small),
        var_per_sample=(small_sqr - big_sqr) / (1.0 / small - 1.0 / big),
    )


def differenced_terms(first_sqr: float, second_sqr: float, dot: float, batch: float) -> NoiseTerms:
    """Return estimates of ``|G|^2`` and S from the gradients g1 and g2 of two consecutive steps of ``batch`` samples.

    This is for a job that computes one gradient per step. ``first_sqr`` and ``second_sqr`` are the squared norms, ``dot`` is
    ``g1 . g2``. The equations of :func:`noise_terms` with the sizes ``batch`` and ``2 batch`` become ``|G|^2 ~ g1 . g2`` and
    ``S ~ batch |g1 - g2|^2 / 2``. Where G changes from G1 to G2 between the steps, S is too large by ``batch |G1 - G2|^2 / 2``.
    Raises InputError as :func:`noise_terms` does.
    """
    sum_sqr = first_sqr + second_sqr
    return noise_terms(sum_sqr / 2.0, max(sum_sqr + 2.0 * dot, 0.0) / 4.0, batch, 2.0 * batch)


class NoiseScaleEstimator:
    """Estimates the noise scale over many steps: smooths ``|G|^2`` and S separately, and divides the second by the first.

    Both are exponential moving averages, over about the last ``1 / (1 - smoothing)`` observations, whose bias towards the start
    value 0 is corrected as Adam corrects its moments.

    Args:
        smoothing: weight of the past, 0 <= smoothing < 1.
    """

    def __init__(self, smoothing: float = SMOOTHING) -> None:
        """Begin without observations. Raises InputError for a smoothing out of range."""
        if not 0 <= smoothing < 1:
            raise InputError("smoothing", f"is {smoothing}", "give a number from 0 to below 1")
        self.smoothing = smoothing
        self.reset()

    def reset(self) -> None:
        """Forget all observations, as after a change of the parameters that makes old gradients meaningless."""
        self._moments = np.zeros(len(_MOMENTS))
        self._weight_sqr = 0.0
        self.count = 0
        """Observations taken since the start or the last reset."""

    def add(self, terms: NoiseTerms) -> None:
        """Take one observation of both terms into the moving averages. They must be finite, as :func:`noise_terms` ensures."""
        past = self.smoothing
        present = 1.0 - self.smoothing
        sqr, var = terms.sqr, terms.var_per_sample
        observed = np.array([1.0, sqr, var, sqr * sqr, var * var, sqr * var])  # in the order of _MOMENTS
        self._moments = past * self._moments + present * observed
        self._weight_sqr = past * past * self._weight_sqr + present * present
        self.count += 1

    @property
    def terms(self) -> NoiseTerms | None:
        """Both smoothed terms, None before the first observation."""
        if not self.count:
            return None
        weight, sqr, var, *_ = self._moments.tolist()
        return NoiseTerms(sqr=sqr / weight, var_per_sample=var / weight)

    @property
    def noise_scale(self) -> float | None:
        """Phi in samples; None before the first observation and where no gradient is visible above the noise (|G|^2 <= 0).

        It is 0 for a negative S, which means that the noise is too small to be seen.
        """
        terms = self.terms
        if terms is None or terms.sqr <= 0:
            return None
        phi = max(terms.var_per_sample, 0.0) / terms.sqr
        return phi if math.isfinite(phi) else None

    @property
    def relative_error(self) -> float | None:
        """Relative standard error of :attr:`noise_scale`, to first order, from the scatter of independent observations.

        None where the noise scale is 0 or unknown, and for fewer than three observations. Above about 0.3 the noise scale is
        also biased upwards: smooth over more observations.
        """
        terms, phi = self.terms, self.noise_scale
        if terms is None or not phi or self.count < 3:
            return None
        sqr, var = terms.sqr, terms.var_per_sample
        weight, _, _, sqr_sqr, var_var, sqr_var = self._moments.tolist()
        scatter = sqr_sqr / weight / sqr**2 + var_var / weight / var**2 - 2.0 * sqr_var / weight / (sqr * var)
        share = self._weight_sqr / weight**2  # 1 / effective number of observations
        # the division is that by n - 1 in a sample variance: few observations must not look surer than they are
        return math.sqrt(max(scatter, 0.0) * share / max(1.0 - share, share))

    def statistics(self, initial_batch_size: int) -> GradientStatistics | None:
        """Return the statistics that AdaScale needs, at batch size M0; None where the noise scale is unknown."""
        terms = self.terms
        if terms is None or self.noise_scale is None:
            return None
        return GradientStatistics(sqr=terms.sqr, var=max(terms.var_per_sample, 0.0) / initial_batch_size)

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint: smoothing, averages by name, and the number of observations."""
        moments = dict(zip(_MOMENTS, self._moments.tolist(), strict=True))
        return {"smoothing": self.smoothing, **moments, "weight_sqr": self._weight_sqr, "count": self.count}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a state that :meth:`state_dict` returned. Raises InputError naming what is missing in it."""
        missing = sorted({"smoothing", *_MOMENTS, "weight_sqr", "count"} - set(state))
        if missing:
            raise InputError("noise scale state", f"lacks {', '.join(missing)}", "give what state_dict returned")
        self._moments = np.array([float(state[name]) for name in _MOMENTS])
        self.smoothing = float(state["smoothing"])
        self._weight_sqr = float(state["weight_sqr"])
        self.count = int(state["count"])
