"""How well one quantity predicts another: the straight line of least squares and its R squared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddltool.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """``y = intercept + slope x``; ``r_squared`` is the share of y's variance that it explains, None if y never varies."""

    slope: float
    intercept: float
    r_squared: float | None

    def at(self, x: ArrayLike) -> NDArray[np.float64]:
        """Return the line's values at ``x``, in x's shape."""
        return self.intercept + self.slope * np.asarray(x, dtype=np.float64)


def fit_line(x: ArrayLike, y: ArrayLike) -> Line:
    """Return the least-squares line through the points (x, y), both of shape (n,); pairs with a NaN are left out.

    TicTac's Figure 12 (a) has scheduling efficiency as x and step time as y. An x that never varies gives slope 0.
    Raises InputError for different lengths and for fewer than two points.
    """
    xs, ys = np.asarray(x, dtype=np.float64).ravel(), np.asarray(y, dtype=np.float64).ravel()
    if xs.shape != ys.shape:
        raise InputError("points", f"there are {xs.size} x and {ys.size} y", "give as many of one as of the other")
    known = np.isfinite(xs) & np.isfinite(ys)
    xs, ys = xs[known], ys[known]
    if xs.size < 2:
        raise InputError("points", f"{xs.size} of them are finite", "a line needs at least two")
    # Around the means: the sums of squares of large, nearly equal values would cancel.
    dx, dy = xs - xs.mean(), ys - ys.mean()
    square, total = float(dx @ dx), float(dy @ dy)
    slope = float(dx @ dy) / square if square > 0 else 0.0
    residual = dy - slope * dx
    return Line(
        slope=slope,
        intercept=float(ys.mean() - slope * xs.mean()),
        r_squared=1.0 - float(residual @ residual) / total if total > 0 else None,
    )
