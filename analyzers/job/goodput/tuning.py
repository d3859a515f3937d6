"""The batch that makes the most progress: local batch m and accumulation steps s of highest goodput, exact over integers.

Start at :func:`tune` (thousands of allocations at once), :func:`tune_one`, or :func:`frontier` (what more
GPUs buy); :func:`goodput_grid` is the picture behind it.

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

Exact up to rounding: no point is better by more than a 1e-12th. Where no equal local batches add up to a total within the
limits (128 samples on 3 replicas), the total is M0 rounded up to the next that they do (3 x 43).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike

from ddltool.analyzers.job.goodput.elastic_table import ElasticLimits
from ddltool.analyzers.job.goodput.throughput import ThroughputParams, efficiency, iteration_time_s, sync_time_s
from ddltool.arrays import Flags, Floats, Ints
from ddltool.errors import Infeasible, InputError

# Relative difference of two costs that is rounding.
_ROUNDING = 1e-12
# Zero times make logarithms infinite; this one is zero beside any time that can be measured.
_TINY = 1e-300
# Most (allocation, passes) points that one round of the search looks at; arrays stay small enough for the cache.
_LARGEST_CHUNK = 1 << 18
# Largest exponent taken: e^600 is still a float.
_LARGEST_EXPONENT = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits(ElasticLimits):
    """The batches that a job allows: total batch from M0 to ``max_batch_size``, local batches and accumulation steps.

    Raises InputError for a value out of range.
    """

    initial_batch_size: int
    max_batch_size: int

    def __post_init__(self) -> None:
        """Raise InputError for a value out of range."""
        ElasticLimits.__post_init__(self)
        if self.initial_batch_size > self.max_batch_size:
            remedy = f"it must be at most max_batch_size, {self.max_batch_size}"
            raise InputError("initial_batch_size", f"is {self.initial_batch_size}", remedy)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tuned:
    """The best batch of each allocation; arrays of shape (n,), which are all 0 where no batch is allowed."""

    local_batch_size: Ints
    accumulation_steps: Ints
    total_batch_size: Ints
    goodput_per_s: Floats

    @property
    def feasible(self) -> Flags:
        """Whether any batch is allowed, shape (n,)."""
        return self.local_batch_size > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedOne:
    """The best batch for one allocation."""

    local_batch_size: int
    accumulation_steps: int
    total_batch_size: int
    goodput_per_s: float


def tune(
    params: ThroughputParams, num_nodes: ArrayLike, num_replicas: ArrayLike, limits: BatchLimits, *, noise_scale: float
) -> Tuned:
    """Return the batch of highest goodput for each allocation (Pollux, Equation 13; exact over integer m and s).

    ``num_nodes`` and ``num_replicas`` broadcast to shape (n,). ``noise_scale`` phi >= 0 in samples; ``math.inf`` makes
    efficiency 1, so throughput alone counts. Goodput is in useful samples per second, 0 where no batch is allowed. Raises
    InputError for fewer replicas than nodes, for no node, for a negative noise scale, and when a pass takes no time.
    """
    if not noise_scale >= 0:
        raise InputError("noise_scale", f"is {noise_scale}", "a number of samples >= 0, or inf for throughput alone")
    if params.alpha_grad_s + params.beta_grad_s <= 0:
        raise InputError("params", "say that a pass takes no time", "alpha_grad_s or beta_grad_s must be above 0")
    nodes, replicas = np.broadcast_arrays(_integers("num_nodes", num_nodes), _integers("num_replicas", num_replicas))
    invalid = np.flatnonzero((nodes < 1) | (replicas < nodes))
    if invalid.size:
        problem = f"has {replicas[invalid[0]]} replicas on {nodes[invalid[0]]} nodes"
        raise InputError(f"allocation {invalid[0]}", problem, "each node has at least one")
    # The model knows of an allocation only its replicas and whether these are on one node: one search for each such key.
    search_keys = 2 * replicas + (nodes > 1)
    is_used = np.zeros(search_keys.max(initial=0) + 1, dtype=np.int64)  # by key; faster than np.unique
    is_used[search_keys] = 1
    distinct_keys = np.flatnonzero(is_used)
    search_of_key = np.zeros_like(is_used)
    search_of_key[distinct_keys] = np.arange(len(distinct_keys))
    search_of_allocation = search_of_key[search_keys]
    replicas_each = distinct_keys // 2
    search = _Search(params, 1 + distinct_keys % 2, replicas_each, limits, noise_scale)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        search.run()
        search.round_up()
    scale = 1.0 if math.isinf(noise_scale) else noise_scale + limits.initial_batch_size
    local = search.m_best.astype(np.int64)
    passes = search.n_best.astype(np.int64)
    return Tuned(
        local_batch_size=local[search_of_allocation],
        accumulation_steps=np.maximum(passes - 1, 0)[search_of_allocation],
        total_batch_size=(replicas_each * local * passes)[search_of_allocation],
        goodput_per_s=np.where(local > 0, scale / search.cost_best, 0.0)[search_of_allocation],
    )


def tune_one(
    params: ThroughputParams, num_nodes: int, num_replicas: int, limits: BatchLimits, *, noise_scale: float
) -> TunedOne:
    """Return the batch of highest goodput for one allocation, as :func:`tune` does for many.

    Raises Infeasible, naming the limits, when no batch is allowed, and InputError as :func:`tune` does.
    """
    tuned = tune(params, num_nodes, num_replicas, limits, noise_scale=noise_scale)
    if not tuned.feasible[0]:
        steps = "any" if limits.max_accumulation_steps is None else f"at most {limits.max_accumulation_steps}"
        raise Infeasible(
            f"no batch fits {num_replicas} replicas: no multiple of {num_replicas} from {limits.initial_batch_size} to "
            f"{limits.max_batch_size} samples has local batches of {limits.min_local_batch_size} to "
            f"{limits.max_local_batch_size} with {steps} accumulation steps"
        )
    return TunedOne(**{item.name: getattr(tuned, item.name)[0].item() for item in fields(TunedOne)})


def _integers(name: str, values: ArrayLike) -> Ints:
    """Return ``values`` as (n,) integers. Raises InputError, under the argument's ``name``, where one is not whole."""
    array = np.atleast_1d(values)
    integers: Ints = array.astype(np.int64)
    if array.dtype.kind not in "iu" and not np.array_equal(integers, array):
        raise InputError(name, "has a value that is no integer", "give whole numbers")
    return integers


class _Search:
    """The search over local batch m and passes n for many allocations at once, by the module's three facts.

    Arrays have shape (allocations, numbers of passes), or (allocations, 1) where a value does not depend on the passes.
    ``rows`` are the indices of the allocations that a method handles. ``cost_best``, ``m_best`` and ``n_best`` (allocations,)
    hold each allocation's best point so far.
    """

    def __init__(
        self, params: ThroughputParams, nodes: Ints, replicas: Ints, limits: BatchLimits, noise: float
    ) -> None:
        """Take the module's symbols from the model, ``nodes`` and ``replicas`` (allocations,), limits and noise scale phi.

        ``low`` and ``high`` (allocations, 1) bound the samples of one replica in a step; ``sync`` is T_sync in seconds.
        """
        self.alpha = params.alpha_grad_s
        self.beta = params.beta_grad_s
        self.gamma = params.gamma
        self.noise = noise
        # h = (weight + share / M) T_iter; for phi = inf, h / phi = T_iter / M takes its place.
        self.weight, self.share = (0.0, 1.0) if math.isinf(noise) else (1.0, float(noise))
        self.smallest = float(limits.min_local_batch_size)
        self.largest = float(limits.max_local_batch_size)
        self.most_passes = math.inf if limits.max_accumulation_steps is None else limits.max_accumulation_steps + 1.0
        self.replicas = replicas[:, None].astype(np.float64)
        self.sync = np.asarray(sync_time_s(params, nodes, replicas), dtype=np.float64)[:, None]
        self.log_sync = np.log(np.maximum(self.sync, _TINY))
        self.low = np.ceil(limits.initial_batch_size / self.replicas)
        self.high = np.floor(limits.max_batch_size / self.replicas)

    def overlapped(self, x: Floats, rows: slice | Ints) -> Floats:
        """Return R(X), the seconds of the pass that synchronises, from ``x`` = X, those of a pass alone; at least X."""
        # The cap is reached only where T_sync is e^60 times X or more, as gamma is at most 10.
        ratio = np.exp(np.minimum(self.gamma * (self.log_sync[rows] - np.log(x)), _LARGEST_EXPONENT))
        seconds: Floats = x * np.exp(np.log(1.0 + ratio) / self.gamma)
        return seconds

    def cost(self, m: Floats, n: Floats, rows: slice | Ints) -> Floats:
        """Return the module's h, which is inversely proportional to goodput, for local batches ``m`` and passes ``n``.

        Both are 1 or more, and may be beyond the limits.
        """
        x = self.alpha + self.beta * m
        step = (n - 1.0) * x + self.overlapped(x, rows)
        costs: Floats = (self.weight + self.share / (self.replicas[rows] * m * n)) * step
        return costs

    def stationary(self, n: Floats, rows: slice | Ints) -> Floats:
        """Return the real m >= 0 of least h for each number of passes n; infinite where h falls for ever.

        The module's equation for m is solved as ``F(y) = 2 y - log(phi / (K n beta)) - log(alpha + D) = 0``, with ``y = log m``
        and ``D = X e q / (n - 1 + q)``, by Newton's method; the slope of F lies in [2, 1 + gamma]. Newton alone can swing to
        and fro for ever, so the bracket is halved where a step did not halve |F|.
        """
        # efficiency without noise asks for the smallest batch, infinite noise or passes of constant time for the largest
        if math.isinf(self.noise) or self.beta == 0 or self.noise == 0:
            return np.full(np.broadcast_shapes(n.shape, self.replicas[rows].shape), np.inf if self.noise else 0.0)
        log_c = np.log(self.noise / self.beta / (self.replicas[rows] * n))
        log_sync, plain_passes = self.log_sync[rows], n - 1.0
        alpha = max(self.alpha, _TINY)
        y = 0.5 * (log_c + np.log(alpha + self.sync[rows]))  # exact for gamma = 1
        above, below = np.full_like(y, np.inf), np.full_like(y, -np.inf)
        size_before = above
        for _ in range(60):
            bm = self.beta * np.exp(y)
            x = alpha + bm
            e = np.exp(np.minimum(self.gamma * (log_sync - np.log(x)), _LARGEST_EXPONENT))
            q = np.exp((1.0 / self.gamma - 1.0) * np.log(1.0 + e))
            last_share = q / (plain_passes + q)  # how much the synchronising pass weighs among all
            d = x * e * last_share
            value = 2.0 * y - log_c - np.log(alpha + d)
            slope = 2.0 + (self.gamma - 1.0) * (1.0 - (1.0 - last_share) * e / (1.0 + e)) * d / (alpha + d) * bm / x
            is_above = value > 0
            above, below = np.where(is_above, y, above), np.where(is_above, below, y)
            step = value / slope
            if np.abs(step).max(initial=0.0) < 1e-10:
                break
            y = y - step
            residual = np.abs(value)
            is_halved = ((2.0 * residual > size_before) & (np.abs(step) > 1e-6)) | (y > above) | (y < below)
            is_halved &= np.isfinite(above - below)
            if is_halved.any():
                y = np.where(is_halved, 0.5 * (above + below), y)
            size_before = residual
        return np.exp(y)

    def run(self) -> None:
        """Find the best point of each allocation, and store it in ``m_best``, ``n_best`` and ``cost_best``.

        m is 0 and the cost infinite where the limits allow no point. First comes the best point with the largest local batch
        (fact 2); then more passes are tried, a growing number at a time, for the allocations that fact 3 leaves open.
        """
        every: slice | Ints = slice(None)
        grad_s = self.alpha + self.beta * self.largest
        high = np.minimum(self.high, self.most_passes * self.largest)
        # fact 2: B*; NaN stands for 0 times infinity, where noise 0 asks for the smallest batch and inf for the largest
        sync_excess = self.overlapped(np.array([[grad_s]]), every) / grad_s - 1.0
        best_batch = np.sqrt(self.noise * self.largest / self.replicas * sync_excess)
        best_batch = np.where(np.isnan(best_batch), np.inf if math.isinf(self.noise) else 0.0, best_batch)
        full_passes = np.floor(np.minimum(np.maximum(best_batch, self.low), high) / self.largest)
        is_allowed = (full_passes >= 1) & (full_passes * self.largest >= self.low) & (self.low <= high)
        cost = np.where(is_allowed, self.cost(np.array([[self.largest]]), np.maximum(full_passes, 1.0), every), np.inf)
        self.cost_best = cost[:, 0]
        self.m_best = (is_allowed * self.largest)[:, 0]
        self.n_best = (is_allowed * full_passes)[:, 0]
        rows = every
        passes = full_passes + 1.0
        width = 1  # numbers of passes to try at a time
        while True:
            bounds = self._consider(passes + np.arange(width), rows)
            # fact 3: no point of more passes costs less than this
            beyond = bounds[:, -1:] + self.alpha * (self.weight + self.share / (self.replicas[rows] * high[rows]))
            passes = passes + width
            is_open = (beyond < self.cost_best[rows, None] * (1.0 - _ROUNDING)) & (passes <= self.most_passes)
            is_open &= (passes * self.smallest <= high[rows]) & (self.low[rows] <= high[rows])
            open_rows = np.flatnonzero(is_open[:, 0])
            if not open_rows.size:
                return
            rows = np.arange(len(self.replicas))[rows][open_rows]
            passes = passes[open_rows]
            width = max(1, min(4 * width, _LARGEST_CHUNK // open_rows.size))

    def round_up(self) -> None:
        """Store a point for the allocations for which no total batch within the limits can be shared equally.

        Their total is M0 rounded up to the next that can be, in as few passes as fit; it may be above the largest total.
        """
        # no point found, though the smallest local batch on each replica is within the largest total
        is_unanswered = np.isinf(self.cost_best[:, None]) & (self.high >= self.smallest)
        if not is_unanswered.any():
            return
        n = np.ceil(self.low / self.largest)
        m = np.ceil(self.low / n)
        is_within = (m >= self.smallest) & (m <= self.largest) & (n <= self.most_passes)
        self._take(slice(None), m, n, np.where(is_within & is_unanswered, self.cost(m, n, slice(None)), np.inf))

    def _take(self, rows: slice | Ints, m: Floats, n: Floats, cost: Floats) -> None:
        """For each of ``rows``, store the cheapest of its points if it beats the best so far.

        ``m``, ``n`` and ``cost`` (rows, width): local batch, passes and h of each point.
        """
        best_points = (np.arange(len(cost)), cost.argmin(axis=1))
        is_better = cost[best_points] < self.cost_best[rows]
        for best, values in ((self.cost_best, cost), (self.m_best, m), (self.n_best, n)):
            best[rows] = np.where(is_better, values[best_points], best[rows])

    def _consider(self, n: Floats, rows: slice | Ints) -> Floats:
        """Store the best points with ``n`` (rows, width) passes, and return the least h over real m for each n (rows, width).

        The result bounds further points by fact 3; it is infinite where no m is allowed. By fact 1 the best integer m is next
        to the real minimum.
        """
        low, high = self.low[rows], self.high[rows]
        # The allowed range of real m, then that of integers.
        real_low = np.maximum(self.smallest, low / n)
        real_high = np.minimum(self.largest, high / n)
        m = np.minimum(np.maximum(self.stationary(n, rows), real_low), real_high)
        bounds = np.where((real_low <= real_high) & (n <= self.most_passes), self.cost(m, n, rows), np.inf)
        least = np.maximum(self.smallest, np.ceil(low / n))
        most = np.minimum(self.largest, np.floor(high / n))
        has_integer = (least <= most) & (n <= self.most_passes)
        floor_m = np.floor(m)
        m_below, m_above = (np.maximum(np.minimum(np.maximum(x, least), most), 1.0) for x in (floor_m, floor_m + 1.0))
        cost_below = self.cost(m_below, n, rows)
        cost_above = self.cost(m_above, n, rows)
        best_m = np.where(cost_above < cost_below, m_above, m_below)
        self._take(rows, best_m, n, np.where(has_integer, np.minimum(cost_below, cost_above), np.inf))
        return bounds


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Frontier:
    """Best goodput over the number of GPUs; arrays of shape (n,) have one entry per number of GPUs from 1 to n."""

    num_replicas: Ints
    num_nodes: Ints
    tuned: Tuned
    speedup: Floats
    """Goodput over that of the fewest GPUs that can run the job; 0 where it cannot run."""
    efficient: Flags
    """Whether every smaller number of GPUs has a lower goodput."""
    pays_until: int
    """The largest number of GPUs that still pays; see :func:`frontier`."""
    threshold: float
    """Share of the first GPUs' goodput that further ones must bring to pay."""


def frontier(
    params: ThroughputParams,
    max_replicas: int,
    limits: BatchLimits,
    *,
    noise_scale: float,
    replicas_per_node: int,
    threshold: float = 0.5,
) -> Frontier:
    """Return the best goodput for 1 to ``max_replicas`` GPUs on as few nodes as hold them.

    With ``g1`` the goodput per GPU of the fewest GPUs that can run the job, ``pays_until`` is the largest K that maximises
    ``goodput(K) - threshold g1 K``: no number of GPUs beyond it brings, on average, the share ``threshold`` of what the first
    ones do. So a dip (the first GPU of a second node) does not end it when the next GPUs make up for it.

    Args:
        params: the fitted throughput model.
        max_replicas: largest number of GPUs.
        limits: the batches that the job allows.
        noise_scale: phi in samples, 0 or more; infinite: throughput alone counts.
        replicas_per_node: GPUs that fill a node.
        threshold: share, 0 to 1, of the first GPUs' goodput that further ones must bring to pay.

    Raises InputError for arguments out of range, Infeasible when no number can run the job.
    """
    if min(max_replicas, replicas_per_node) < 1:
        raise InputError(
            "max_replicas, replicas_per_node", f"are {max_replicas}, {replicas_per_node}", "give 1 or more"
        )
    if not 0 <= threshold <= 1:
        raise InputError("threshold", f"is {threshold}", "give a share between 0 and 1")
    replicas = np.arange(1, max_replicas + 1, dtype=np.int64)
    nodes = -(-replicas // replicas_per_node)
    tuned = tune(params, nodes, replicas, limits, noise_scale=noise_scale)
    goodput = tuned.goodput_per_s
    feasible = np.flatnonzero(tuned.feasible)
    if not feasible.size:
        raise Infeasible(f"no number of GPUs up to {max_replicas} allows a batch within {limits}")
    fewest = int(feasible[0])
    best_before = np.concatenate([[0.0], np.maximum.accumulate(goodput)[:-1]])
    efficient = goodput > best_before
    per_gpu = goodput[fewest] / replicas[fewest]
    # goodput minus the cost of the GPUs, each of which costs the share ``threshold`` of what one of the first brings
    net_goodput = np.where(tuned.feasible, goodput - threshold * per_gpu * replicas, -math.inf)
    return Frontier(
        num_replicas=replicas,
        num_nodes=nodes,
        tuned=tuned,
        speedup=goodput / goodput[fewest],
        efficient=efficient,
        pays_until=int(replicas[np.flatnonzero(net_goodput == net_goodput.max())[-1]]),  # of equal ones the largest
        threshold=threshold,
    )


def goodput_grid(
    params: ThroughputParams,
    num_nodes: ArrayLike,
    num_replicas: ArrayLike,
    total_batch_sizes: ArrayLike,
    limits: BatchLimits,
    *,
    noise_scale: float,
) -> Floats:
    """Return the goodput of each allocation at each total batch, (allocations, batches); NaN where the limits forbid it.

    It is a surface to look at: local batches may be fractions. Each point takes the fewest accumulation steps that fit into
    memory, which is fastest for a given batch. ``num_nodes`` and ``num_replicas`` (allocations,); ``total_batch_sizes``
    (batches,) in samples; ``noise_scale``: phi in samples, infinite: efficiency is 1.
    """
    nodes, replicas = (np.atleast_1d(np.asarray(item, dtype=np.float64))[:, None] for item in (num_nodes, num_replicas))
    total = np.atleast_1d(np.asarray(total_batch_sizes, dtype=np.float64))[None, :]
    passes = np.maximum(np.ceil(total / (replicas * limits.max_local_batch_size)), 1.0)
    local = total / (replicas * passes)
    step_s = np.asarray(iteration_time_s(params, nodes, replicas, local, passes - 1.0))
    efficiencies = np.asarray(efficiency(noise_scale, total, limits.initial_batch_size))
    allowed = (local >= limits.min_local_batch_size) & (total >= limits.initial_batch_size)
    allowed &= total <= limits.max_batch_size
    if limits.max_accumulation_steps is not None:
        allowed &= passes <= limits.max_accumulation_steps + 1
    goodput: Floats = np.where(allowed, total / step_s * efficiencies, np.nan)
    return goodput
