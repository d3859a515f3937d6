"""Replay of a recorded speed trace: predict, size the batches, and compute how long each iteration would have taken.

Row k of the trace says how fast each worker was in iteration k: v_i samples per second. So an iteration with batch sizes x_i
takes ``max_i x_i / v_i`` (LB-BSP, section 3.2). Every predictor is judged on the same iterations, those after the warm-up.

:func:`compare` simulates BSP, ASP, SSP, redundant execution, work shifting and LB-BSP. Some of these let workers run apart, so
there a row of the trace is a span of wall-clock time, as long as iteration k lasts with equal batches. Within it a worker's
rate is constant, so the work that it has done by time t is piecewise linear, and the time by which work is done is the
inverse. BSP reproduces the trace exactly. An update is one worker's gradient. Time per iteration is
horizon * X / samples processed, with X samples of all workers in an iteration: for asynchronous schemes the paper's time per
update, times n workers. Staleness is the number of other workers' updates that a gradient has not seen: those applied
between its worker's reading of the parameters and its own update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ddltool.analyzers.job.balancing.predict import SpeedPredictor
from ddltool.analyzers.job.balancing.sizing import equal, proportional
from ddltool.analyzers.step.measured.worker_tables import MOST_SPEED, SpeedTrace
from ddltool.arrays import Floats, Ints
from ddltool.errors import InputError

BATCH_PER_WORKER = 128
# Share of a batch up to which samples that are left are rounding errors.
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcome:
    """Times and speeds of one batch sizing rule over the J iterations after the warm-up."""

    iteration_s: Floats
    """(J,) seconds of the slowest worker."""
    predicted: Floats
    """(J, n) predicted speeds in samples per second; the actual ones for rules that predict nothing."""
    actual: Floats
    """(J, n) actual speeds in samples per second."""

    @property
    def rmse(self) -> float:
        """Mean over workers of the root mean square error of the predicted speed, in samples per second."""
        return float(np.sqrt(((self.predicted - self.actual) ** 2).mean(axis=0)).mean())

    @property
    def rmse_relative(self) -> float:
        """Mean over workers of the root mean square error of the predicted speed over the worker's mean speed."""
        errors = np.sqrt(((self.predicted - self.actual) ** 2).mean(axis=0))
        return float((errors / self.actual.mean(axis=0)).mean())

    @property
    def mean_s(self) -> float:
        """Mean seconds of an iteration."""
        return float(self.iteration_s.mean())


def replay(trace: SpeedTrace, predictor: SpeedPredictor, total: int, *, since: int = 0) -> Outcome:
    """Return the outcome of batches in proportion to predicted speeds.

    Batches are equal until all speeds can be predicted. Raises Infeasible as :func:`~.sizing.proportional` does.

    Args:
        trace: speeds and readings of each iteration.
        predictor: an untrained one; it is shown all iterations in order.
        total: samples of all workers together in an iteration.
        since: first iteration that counts in the outcome.
    """
    predicted = np.empty_like(trace.speed)
    times = np.empty(trace.iterations)
    for k in range(trace.iterations):
        speeds = np.array(predictor.predict(trace.cpu[k], trace.memory[k]))
        predicted[k] = speeds
        if k >= since:
            is_known = np.isfinite(speeds).all()
            sizes = proportional(speeds, total) if is_known else equal(trace.workers, total)
            times[k] = (sizes / trace.speed[k]).max()
        predictor.observe(trace.speed[k])
    return Outcome(iteration_s=times[since:], predicted=predicted[since:], actual=trace.speed[since:])


def replay_equal(trace: SpeedTrace, total: int, *, since: int = 0) -> Outcome:
    """Return the outcome of equal batches (plain BSP) of ``total`` samples together, from iteration ``since`` on."""
    sizes = equal(trace.workers, total)
    actual = trace.speed[since:]
    return Outcome(iteration_s=(sizes / actual).max(axis=1), predicted=actual, actual=actual)


def replay_oracle(trace: SpeedTrace, total: int, *, since: int = 0) -> Outcome:
    """Return the outcome of batches in proportion to each iteration's actual speeds, which no other sizing beats.

    ``total``: samples of all workers in an iteration; ``since``: the first iteration that counts.
    """
    actual = trace.speed[since:]
    times = np.array([(proportional(speeds, total) / speeds).max() for speeds in actual])
    return Outcome(iteration_s=times, predicted=actual, actual=actual)


def gain_kept(outcome: Outcome, equal_split: Outcome, oracle: Outcome) -> float:
    """Return the share of the oracle's gain over the equal split that ``outcome`` reaches; 1 if no gain is possible.

    A gain is in mean seconds of an iteration. The oracle sizes batches by the actual speeds (:func:`replay_oracle`). The share
    is negative where ``outcome`` is slower than the equal split.
    """
    possible = equal_split.mean_s - oracle.mean_s
    return 1.0 if possible <= 0 else (equal_split.mean_s - outcome.mean_s) / possible


SSP_BOUND = 5
"""Iterations that a worker may be ahead of the slowest under SSP."""
FLEXRR_CHECKS = 100
"""Checks of progress in an iteration of work shifting."""
FLEXRR_TRIGGER = 0.2
"""Share of a batch by which a worker must lag before work is taken from it."""
FLEXRR_CHUNK = 0.05
"""Share of a batch that one transfer moves."""
FLEXRR_DELAY = 0.005
"""Share of an iteration by which a transfer delays the helper."""
MOST_PER_ROW = 100
"""Simulated iterations per row of the trace, after which a simulation ends early: the mean is known by then."""
MOST_SHIFTING_PER_ROW = 20
"""The same for work shifting, whose iterations are simulated check by check."""
MOST_RATIO = 1e9
"""Largest ratio of a trace's speeds; beyond it one row holds more iterations than can be simulated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchemeResult:
    """Mean figures of one synchronisation scheme over a trace."""

    iteration_s: float
    """Mean seconds in which X samples are processed and their gradients used."""
    staleness: float
    """Mean number of other workers' updates that a gradient has not seen; 0 for synchronous schemes."""
    iteration_gap: int
    """Most iterations that one worker was ahead of another."""
    wasted: float = 0.0
    """Share of the processed samples whose gradients are thrown away."""


class Clock:
    """Cumulative work of n workers over time, with rates that are constant within each of K rows.

    Work is in the unit of the rates, such as samples; time in seconds from the beginning of the first row.
    """

    def __init__(self, rates: Floats, row_s: Floats) -> None:
        """Take (K, n) ``rates``, work per second, and (K,) ``row_s``, seconds of each row.

        After the last row its rates continue.
        """
        self.ends_s = np.concatenate(([0.0], np.cumsum(row_s)))
        """(K + 1,) the beginning of the first row, and the end of each."""
        self.done = np.concatenate((np.zeros((1, rates.shape[1])), np.cumsum(rates * row_s[:, None], axis=0)))
        """(K + 1, n) work that each worker has done by then."""
        self.rates = rates
        self.horizon_s = float(self.ends_s[-1])
        """The end of the last row."""
        self._workers = np.arange(rates.shape[1])
        # The workers' cumulative work, each shifted by a base beyond all work of the previous worker, is one ascending array,
        # so that one search finds the rows of all workers.
        self._base = np.concatenate(([0.0], np.cumsum(self.done[-1] + 1.0)[:-1]))
        self._all_done = (self.done + self._base).T.ravel()  # (n (K + 1),)
        self._sum_done = self.done.sum(axis=1)  # (K + 1,)

    def row(self, at_s: float) -> int:
        """Return the index of the row that contains the time ``at_s``; after the end, the last one."""
        return min(max(int(np.searchsorted(self.ends_s, at_s, side="right")) - 1, 0), len(self.rates) - 1)

    def done_by(self, at_s: Floats | float) -> Floats:
        """Return (n,) the work that each worker has done by ``at_s``, which is one time for all or (n,) times."""
        row = np.clip(np.searchsorted(self.ends_s, at_s, side="right") - 1, 0, len(self.rates) - 1)
        in_row_s = at_s - self.ends_s[row]
        work: Floats = self.done[row, self._workers] + in_row_s * self.rates[row, self._workers]
        return work

    def when(self, work: Floats) -> Floats:
        """Return (n,) the times in seconds by which the workers have done ``work`` (n,), counted from time 0.

        It is the inverse of :meth:`done_by`. Work beyond the last row is done at the last row's rate.
        """
        rows = len(self.rates)
        # Each worker has rows + 1 entries in the array: its work at time 0 and at the rows' ends.
        is_past_end = work > self.done[-1]
        flat_index = np.searchsorted(self._all_done, np.minimum(work, self.done[-1]) + self._base, side="right") - 1
        row = np.where(is_past_end, rows - 1, np.clip(flat_index - self._workers * (rows + 1), 0, rows - 1))
        work_in_row = work - self.done[row, self._workers]
        times: Floats = self.ends_s[row] + work_in_row / self.rates[row, self._workers]
        return times

    def when_together(self, work: float) -> float:
        """Return the time in seconds by which all workers together have done ``work``, counted from time 0."""
        row = min(max(int(np.searchsorted(self._sum_done, work, side="right")) - 1, 0), len(self.rates) - 1)
        return float(self.ends_s[row] + (work - self._sum_done[row]) / self.rates[row].sum())


def check_ratio(trace: SpeedTrace) -> None:
    """Raise InputError where the fastest speed is more than :data:`MOST_RATIO` times the slowest one."""
    low, high = float(trace.speed.min()), float(trace.speed.max())
    if high > MOST_RATIO * low:
        problem = f"lie between {low:g} and {high:g} samples per second"
        raise InputError("speeds", problem, f"schemes are simulated up to a ratio of {MOST_RATIO:g}")


def cpu_clock(trace: SpeedTrace, total: int) -> Clock:
    """Return the clock of a trace: work is in samples, and a row lasts as long as an iteration with equal batches.

    ``total``: samples of all workers in an iteration. Raises InputError for speeds too far apart (:func:`check_ratio`).
    """
    check_ratio(trace)
    return Clock(trace.speed, (equal(trace.workers, total) / trace.speed).max(axis=1))


def bsp(clock: Clock, need: Floats) -> SchemeResult:
    """Return the result of BSP, in which all workers wait for the slowest one in every iteration.

    ``need`` (n,): work of each worker's batch, in the unit of the clock.
    """
    return _synchronous(clock, lambda at: need)


def bounded(clock: Clock, need: Floats, bound: int | None = SSP_BOUND) -> SchemeResult:
    """Return the result of SSP, in which no worker may be more than ``bound`` iterations ahead of the slowest one.

    A worker begins its j-th iteration when it has ended its previous one and all workers have ended iteration j - bound. A
    bound of None is ASP. ``need`` (n,): work of each worker's batch, in the unit of the clock.
    """
    workers = len(need)
    begin_rows: list[Floats] = []
    end_rows: list[Floats] = []
    last_end_s = np.zeros(workers)
    while last_end_s.min() < clock.horizon_s and len(end_rows) < MOST_PER_ROW * len(clock.rates):
        start_s = last_end_s
        if bound is not None and len(end_rows) >= bound:
            start_s = np.maximum(start_s, end_rows[len(end_rows) - bound].max())
        last_end_s = clock.when(clock.done_by(start_s) + need)
        begin_rows.append(start_s)
        end_rows.append(last_end_s)
    begin_s, end_s = np.array(begin_rows), np.array(end_rows)
    in_horizon = end_s <= clock.horizon_s
    updates = np.sort(end_s.ravel())
    # updates after the iteration's begin, when the worker read the parameters, and before its own update
    updates_missed = np.searchsorted(updates, end_s, side="left") - np.searchsorted(updates, begin_s, side="right")
    return SchemeResult(
        iteration_s=clock.horizon_s * workers / max(1, int(in_horizon.sum())),
        staleness=float(updates_missed[in_horizon].mean()) if in_horizon.any() else 0.0,
        iteration_gap=_widest_gap(end_s, clock.horizon_s),
    )


def redundant(clock: Clock, need: Callable[[Ints], Floats], total: int, backups: int) -> SchemeResult:
    """Return the result of redundant execution: the first n - ``backups`` gradients count, the others are thrown away.

    ``backups`` of the trace's n workers are redundant, so each batch has ``total`` / (n - backups) samples, rounded up. The
    paper instead adds two workers to 32. ``need``: (n,) batch sizes -> (n,) work.
    """
    workers = clock.rates.shape[1]
    counted = workers - backups
    sizes = np.full(workers, -(-total // counted), dtype=np.int64)
    work = need(sizes)
    now_s, iterations = 0.0, 0
    while now_s < clock.horizon_s and iterations < MOST_PER_ROW * len(clock.rates):
        end_s = clock.when(clock.done_by(now_s) + work)
        now_s = float(np.partition(end_s, counted - 1)[counted - 1])  # the end of the last gradient that counts
        iterations += 1
    return SchemeResult(iteration_s=now_s / iterations, staleness=0.0, iteration_gap=0, wasted=backups / workers)


def work_shifting(clock: Clock, total: int) -> SchemeResult:
    """Return the result of a scheme like FlexRR on CPU workers: workers that are done take work from stragglers.

    ``total``: samples of all workers in an iteration. Progress is checked 100 times in the time of an iteration with equal
    batches and, in an iteration that lasts longer, after each further hundredth of its time so far. A worker that has ended
    takes 5 % of a batch from the one with most left, if that is more than 20 % of a batch. Each transfer delays the helper by
    half a per cent of an iteration. Samples must be processed one by one for this; the extra cost of that is not
    included.
    """
    workers = clock.rates.shape[1]
    batch = total / workers
    now_s, iterations = 0.0, 0
    while now_s < clock.horizon_s and iterations < MOST_SHIFTING_PER_ROW * len(clock.rates):
        rates = clock.rates[clock.row(now_s)]
        iteration_s = float((batch / rates).max())  # with equal batches and no transfers
        check_s = iteration_s / FLEXRR_CHECKS
        # No work is shifted before the first worker ends.
        elapsed_s = float((batch / rates).min())
        end_s = elapsed_s
        samples_left = np.maximum(0.0, batch - (clock.done_by(now_s + elapsed_s) - clock.done_by(now_s)))  # (n,)
        while samples_left.max() > _ROUNDING * batch:
            check_s = max(check_s, elapsed_s / FLEXRR_CHECKS)
            done = clock.done_by(now_s + elapsed_s + check_s) - clock.done_by(now_s + elapsed_s)
            idle = np.flatnonzero(samples_left <= _ROUNDING * batch)
            stragglers = np.argsort(-samples_left, kind="stable")
            stragglers = stragglers[samples_left[stragglers] > FLEXRR_TRIGGER * batch][: len(idle)]
            # One straggler per helper, the fastest helpers first; a transfer's delay is added as work that the helper could do.
            helpers = idle[np.argsort(-done[idle], kind="stable")][: len(stragglers)]
            samples_left[stragglers] -= FLEXRR_CHUNK * batch
            samples_left[helpers] += FLEXRR_CHUNK * batch + FLEXRR_DELAY * iteration_s * done[helpers] / check_s
            # the end of the iteration if all workers end before the next check; else it is overwritten in the next turn
            end_s = elapsed_s + check_s * float(
                np.max(np.where(samples_left > 0, np.minimum(1.0, samples_left / done), 0.0))
            )
            samples_left = np.maximum(0.0, samples_left - done)
            elapsed_s += check_s
        now_s += end_s
        iterations += 1
    return SchemeResult(iteration_s=now_s / iterations, staleness=0.0, iteration_gap=0)


def lb_bsp(clock: Clock, trace: SpeedTrace, total: int, predictor: SpeedPredictor) -> SchemeResult:
    """Return the result of LB-BSP on CPU workers: batches in proportion to predicted speeds, ``total`` samples in all.

    The predictor gets the trace's readings of CPU and memory at the time at which an iteration begins.
    """
    sizes = equal(trace.workers, total)

    def need(at: float) -> Floats:
        """Return the (n,) batches of the iteration that begins at ``at``; equal until the predictor knows all speeds."""
        nonlocal sizes
        row = clock.row(at)
        speeds = np.asarray(predictor.predict(trace.cpu[row], trace.memory[row]))
        sizes = proportional(speeds, total) if np.isfinite(speeds).all() else equal(trace.workers, total)
        return sizes.astype(np.float64)

    def observe(seconds: Floats) -> None:
        """Tell the predictor the speeds at which the last batches were computed, in (n,) ``seconds``."""
        # Late in a long trace a short time may be rounded to 0.
        predictor.observe(np.minimum(sizes / np.maximum(seconds, 1e-300), MOST_SPEED))

    return _synchronous(clock, need, observe)


def lb_bsp_oracle(clock: Clock, total: int) -> SchemeResult:
    """Return the result of LB-BSP on CPU workers whose future speeds are known, which is the least possible time.

    Each worker's batch is what it can process until all workers together have processed ``total`` samples, rounded to whole
    samples, so that all end at about the same time.
    """

    def need(at: float) -> Floats:
        """Return the (n,) batches of the iteration that begins at ``at``."""
        begun = clock.done_by(at)
        done = clock.done_by(clock.when_together(float(begun.sum()) + total)) - begun
        # Late in a long trace the work of a slow worker may be rounded to 0.
        return proportional(np.maximum(done, 1e-12 * done.max()), total).astype(np.float64)

    return _synchronous(clock, need)


WORKERS_PER_BACKUP = 16
"""Workers for each redundant one: the paper adds two to 32."""


def compare(trace: SpeedTrace, total: int, predictor: SpeedPredictor) -> dict[str, SchemeResult]:
    """Return scheme -> its result on a CPU cluster's trace; LB-BSP uses ``predictor``.

    ``total``: samples of all workers in an iteration. Redundant execution has one backup for every 16 workers, and is left out
    with fewer. Raises InputError as :func:`cpu_clock` does.
    """
    clock, need = cpu_clock(trace, total), equal(trace.workers, total).astype(float)
    results = {"bsp": bsp(clock, need), "asp": bounded(clock, need, None), "ssp": bounded(clock, need)}
    if backups := trace.workers // WORKERS_PER_BACKUP:
        results["redundant"] = redundant(clock, lambda sizes: sizes.astype(float), total, backups)
    results["work_shifting"] = work_shifting(clock, total)
    results["lb_bsp"] = lb_bsp(clock, trace, total, predictor)
    results["lb_bsp_oracle"] = lb_bsp_oracle(clock, total)
    return results


def _synchronous(
    clock: Clock, need: Callable[[float], Floats], observe: Callable[[Floats], None] | None = None
) -> SchemeResult:
    """Return the result of a scheme in which all workers begin each iteration together, up to the end of the trace.

    Args:
        need: time in seconds at which an iteration begins -> (n,) work of each worker in it.
        observe: called with the (n,) seconds that the workers took for each iteration; None: they are not needed.
    """
    now_s, iterations = 0.0, 0
    # the factor keeps rounding errors from beginning one more iteration just before the end
    while now_s < clock.horizon_s * (1 - 1e-12) and iterations < MOST_PER_ROW * len(clock.rates):
        end_s = clock.when(clock.done_by(now_s) + need(now_s))
        if observe is not None:
            observe(end_s - now_s)
        now_s = float(end_s.max())
        iterations += 1
    return SchemeResult(iteration_s=now_s / iterations, staleness=0.0, iteration_gap=0)


def _widest_gap(end_s: Floats, horizon_s: float) -> int:
    """Return the largest difference between two workers' numbers of ended iterations, at any time up to the horizon.

    ``end_s`` (J, n): time in seconds at which each worker ended its j-th iteration.
    """
    counts = np.arange(1, len(end_s) + 1)
    last_end_s = end_s.max(axis=1)
    first_end_s = end_s.min(axis=1)
    # number of iterations that the slowest worker has ended when the fastest one ends its j-th
    slowest_counts = np.searchsorted(last_end_s, first_end_s, side="right")
    in_horizon = first_end_s <= horizon_s
    return int((counts - slowest_counts)[in_horizon].max()) if in_horizon.any() else 0
