"""The search for the batch of highest goodput, exact over integers and for many allocations at once.

Start at :class:`BatchSearch`; :mod:`ddltool.analyzers.goodput.tuning` is what to call.

With ``n = s + 1`` passes, ``M = K m n`` and noise scale phi, goodput is ``(phi + M0) / h`` with
``h(m, n) = (1 + phi / M) T_iter``, ``T_iter = (n - 1) X + R(X)``, ``X = T_grad(m)``, ``R(X) = (X^g + T_sync^g)^(1/g)``.
Three facts make the search over all integers (m, n) short:

1. For each n, h is convex in ``u = 1 / m`` (``T_iter / m`` is the perspective of a convex function; ``X(1 / u)`` is convex
   in u): the best integer m is one of the two next to the real minimum. That solves ``b m^2 = (phi / (K n))
   (a + X e q / (n - 1 + q))`` with ``e = (T_sync / X)^g`` and ``q = (X / R)^(g - 1)``, monotone in log m: Newton's method
   with a bracket.
2. For each per-replica batch ``B = m n``, fewer passes with larger m are never slower: ``n X(B / n)`` grows with n, and so
   does ``R(X) - X``. So h at ``m = m_max`` with a real n bounds every point of the same B >= m_max from below. That
   bound is convex in B with its minimum at ``B* = sqrt(phi m_max (R - X) / (K X))``. With B* moved into the allowed
   range, ``n1 = floor(B* / m_max)``: all n <= n1 are answered by (m_max, n1).
3. From n = n1 + 1 on, with ``h*(n)`` the minimum over real m: a point of more passes with ``B <= n m_max`` costs at least
   ``h*(n) + a (1 + phi / M_max)`` (fact 2; each pass adds a), one of larger B at least ``h(m_max, n)``, already tried. The
   search stops when the former is not below the best point found. Usually that is at once; where few integers fit
   between the smallest and the largest total batch it can take many n, and the answer is exact all the same.

Exact up to rounding: no point is better by more than a 1e-12th.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from ddltool.errors import InputError

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
Line = tuple[float, float]
_ROUNDING = 1e-12
# Zero times make logarithms infinite; this one is zero beside any time that can be measured.
_TINY = 1e-300
_LARGEST_CHUNK = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """What a job allows: total batch ``M0 <= M <= max``, local batch within memory, accumulation steps.

    ``max_accumulation_steps`` None: any. Raises InputError for a value out of range.
    """

    initial_batch_size: int
    max_batch_size: int
    max_local_batch_size: int
    min_local_batch_size: int = 1
    max_accumulation_steps: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "max_accumulation_steps" else 1
            if value is not None and value < least:
                raise InputError(field.name, f"is {value}", f"it must be {least} or more")
        for low, high in (("initial", "max"), ("min_local", "max_local")):
            first, last = getattr(self, f"{low}_batch_size"), getattr(self, f"{high}_batch_size")
            if first > last:
                raise InputError(f"{low}_batch_size", f"is {first}", f"it must be at most {high}_batch_size, {last}")


class BatchSearch:
    """The search over (m, n) for many (T_sync, K) at once; arrays have shape (allocations, numbers of passes)."""

    def __init__(
        self,
        lines: Sequence[Line],
        gamma: float,
        sync: Array,
        replicas: Array,
        limits: BatchLimits,
        noise: float,
    ) -> None:
        self.pieces = envelope(lines)
        self.least_alpha = min(alpha for alpha, _ in lines)
        self.gamma, self.noise = gamma, noise
        # h = (weight + share / M) T_iter; without noise in sight (phi = inf) only T_iter / M counts.
        self.weight, self.share = (0.0, 1.0) if math.isinf(noise) else (1.0, float(noise))
        self.smallest, self.largest = float(limits.min_local_batch_size), float(limits.max_local_batch_size)
        allowed = limits.max_accumulation_steps
        self.most_passes = math.inf if allowed is None else allowed + 1.0
        self.sync, self.replicas = sync[:, None], replicas[:, None]
        self.log_sync = np.log(np.maximum(self.sync, _TINY))
        self.low = np.ceil(limits.initial_batch_size / self.replicas)
        self.high = np.minimum(np.floor(limits.max_batch_size / self.replicas), self.most_passes * self.largest)

    def grad(self, m: Array) -> Array:
        """Return X = T_grad(m), the slowest of the lines."""
        (alpha, beta), *others = ((alpha, beta) for alpha, beta, _, _ in self.pieces)
        made = alpha + beta * m
        for alpha, beta in others:
            made = np.maximum(made, alpha + beta * m)
        return made

    def overlapped(self, x: Array, rows: slice | Ints) -> Array:
        """Return R(X), at least X."""
        # the cap keeps the power finite; it is reached only where T_sync is e^60 times X or more
        ratio = np.exp(np.minimum(self.gamma * (self.log_sync[rows] - np.log(x)), 600.0))
        made: Array = x * np.exp(np.log(1.0 + ratio) / self.gamma)
        return made

    def cost(self, m: Array, n: Array, rows: slice | Ints) -> Array:
        """Return h(m, n) for m, n >= 1 (not checked against the limits)."""
        x = self.grad(m)
        made: Array = (self.weight + self.share / (self.replicas[rows] * m * n)) * (
            (n - 1.0) * x + self.overlapped(x, rows)
        )
        return made

    def best_real(self, n: Array, low: Array, high: Array, rows: slice | Ints) -> Array:
        """Return the real m in [low, high] of least h, by convexity piece by piece of the envelope."""
        if self.noise == 0:
            return low + np.zeros_like(n)
        best: Array | None = None
        least: Array | None = None
        for alpha, beta, start, end in self.pieces:
            if math.isinf(self.noise) or beta == 0:
                root = np.full(np.broadcast_shapes(n.shape, low.shape), np.inf)
            else:
                root = self.stationary(alpha, beta, n, rows)
            m: Array = np.minimum(np.maximum(np.minimum(np.maximum(root, start), end), low), high)
            if len(self.pieces) == 1:
                return m
            cost = self.cost(m, n, rows)
            best = m if best is None or least is None else np.where(cost < least, m, best)
            least = cost if least is None else np.minimum(cost, least)
        assert best is not None  # an envelope has at least one piece
        return best

    def stationary(self, alpha: float, beta: float, n: Array, rows: slice | Ints) -> Array:
        """Return the m > 0 where h is stationary on one line ``X = alpha + beta m``; phi and beta are above 0.

        Newton on ``F(y) = 2 y - log(c / beta) - log(alpha + D)``, y = log m, whose slope lies in [2, 1 + gamma]; alone it
        can swing to and fro for ever, so the bracket is halved where F did not.
        """
        log_c = np.log(self.noise / beta / (self.replicas[rows] * n))
        log_sync, more = self.log_sync[rows], n - 1.0
        alpha = max(alpha, _TINY)
        y = 0.5 * (log_c + np.log(alpha + self.sync[rows]))  # exact for gamma = 1
        above, below = np.full_like(y, np.inf), np.full_like(y, -np.inf)
        before = above
        for _ in range(60):
            bm = beta * np.exp(y)
            x = alpha + bm
            e = np.exp(np.minimum(self.gamma * (log_sync - np.log(x)), 600.0))
            q = np.exp((1.0 / self.gamma - 1.0) * np.log(1.0 + e))
            final = q / (more + q)  # how much the synchronising pass weighs among all
            d = x * e * final
            value = 2.0 * y - log_c - np.log(alpha + d)
            slope = 2.0 + (self.gamma - 1.0) * (1.0 - (1.0 - final) * e / (1.0 + e)) * d / (alpha + d) * bm / x
            positive = value > 0
            above, below = np.where(positive, y, above), np.where(positive, below, y)
            step = value / slope
            if np.abs(step).max(initial=0.0) < 1e-10:
                break
            y = y - step
            size = np.abs(value)
            halve = ((2.0 * size > before) & (np.abs(step) > 1e-6)) | (y > above) | (y < below)
            halve &= np.isfinite(above - below)
            if halve.any():
                y = np.where(halve, 0.5 * (above + below), y)
            before = size
        return np.exp(y)

    def run(self) -> tuple[Array, Array, Array]:
        """Return m, n and h of the best point per allocation, shape (allocations,); m = 0 and h = inf where none is."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return self._run()

    def _run(self) -> tuple[Array, Array, Array]:
        count = len(self.sync)
        every: slice | Ints = slice(None)
        x = self.grad(np.array([[self.largest]]))
        # fact 2; noise 0 asks for the smallest batch, inf for the largest
        best_batch = np.sqrt(self.noise * self.largest / self.replicas * (self.overlapped(x, every) / x - 1.0))
        best_batch = np.where(np.isnan(best_batch), np.inf if math.isinf(self.noise) else 0.0, best_batch)
        target = np.minimum(np.maximum(best_batch, self.low), self.high)
        full = np.floor(target / self.largest)
        allowed = (full >= 1) & (full * self.largest >= self.low) & (self.low <= self.high)
        n = np.maximum(full, 1.0)
        self.cost_best = np.where(allowed, self.cost(np.full((count, 1), self.largest), n, every), np.inf)[:, 0]
        self.m_best = np.where(allowed, self.largest, 0.0)[:, 0]
        self.n_best = np.where(allowed, n, 0.0)[:, 0]

        rows: slice | Ints = every
        start, width = full + 1.0, 1
        while True:
            bound = self._consider(start + np.arange(width), rows)
            # fact 3
            grown = bound[:, -1:] + self.least_alpha * (
                self.weight + self.share / (self.replicas[rows] * self.high[rows])
            )
            start = start + width
            on = (grown < self.cost_best[rows, None] * (1.0 - _ROUNDING)) & (start <= self.most_passes)
            on &= (start * self.smallest <= self.high[rows]) & (self.low[rows] <= self.high[rows])
            index = np.flatnonzero(on[:, 0])
            if not index.size:
                return self.m_best, self.n_best, self.cost_best
            rows, start = np.arange(count)[rows][index], start[index]
            width = max(1, min(4 * width, _LARGEST_CHUNK // index.size))

    def _consider(self, n: Array, rows: slice | Ints) -> Array:
        """Try all m for each of the n, shape (rows, width); return the least h over real m, inf where none is allowed."""
        low, high = self.low[rows], self.high[rows]
        real_low = np.maximum(self.smallest, low / n)
        real_high = np.minimum(self.largest, high / n)
        m = self.best_real(n, real_low, real_high, rows)
        bound = np.where((real_low <= real_high) & (n <= self.most_passes), self.cost(m, n, rows), np.inf)
        least, most = np.maximum(self.smallest, np.ceil(low / n)), np.minimum(self.largest, np.floor(high / n))
        first = np.minimum(np.maximum(np.floor(m), least), most)
        second = np.minimum(np.maximum(np.floor(m) + 1.0, least), most)
        fits = (least <= most) & (n <= self.most_passes)
        costs = [np.where(fits, self.cost(np.maximum(point, 1.0), n, rows), np.inf) for point in (first, second)]
        points, cost = np.where(costs[1] < costs[0], second, first), np.minimum(costs[0], costs[1])
        pick = (np.arange(len(cost)), cost.argmin(axis=1))
        better = cost[pick] < self.cost_best[rows]
        for array, values in ((self.cost_best, cost), (self.m_best, points), (self.n_best, n)):
            array[rows] = np.where(better, values[pick], array[rows])
        return bound


def envelope(lines: Sequence[Line]) -> tuple[tuple[float, float, float, float], ...]:
    """Return (alpha, beta, from m, to m) of the upper envelope of lines over m >= 0, left to right."""
    pieces: list[tuple[float, float, float, float]] = []
    for alpha, beta in sorted(set(lines), key=lambda line: (line[1], line[0])):
        start = 0.0
        while pieces:
            other_alpha, other_beta, begin, _ = pieces[-1]
            start = (other_alpha - alpha) / (beta - other_beta) if beta > other_beta else 0.0
            start = max(start, 0.0)
            if start > begin:
                pieces[-1] = (other_alpha, other_beta, begin, start)
                break
            pieces.pop()
            start = 0.0
        pieces.append((alpha, beta, start, math.inf))
    return tuple(pieces)
