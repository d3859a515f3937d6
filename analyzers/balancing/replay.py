"""A recorded trace lived through again: predict, size the batches, see how long the iteration would really have taken.

Row k of the trace says how fast each worker was in iteration k, so an iteration with batch sizes x takes
``max_i x_i / v_i`` (LB-BSP, section 3.2). Every predictor is judged on the same iterations, those after the warm-up.

:func:`compare` puts BSP, ASP, SSP, redundant execution, work shifting and LB-BSP beside each other. These let workers run
apart, so there a row of the trace is a stretch of wall-clock time, as long as iteration k lasts with equal batches. Within
it a worker's rate is constant; what it gets done by time t is piecewise linear, and the time at which work is done is the
inverse of that. BSP so reproduces the trace exactly. An update is one worker's gradient. Time per iteration is
horizon * X / samples processed: for asynchronous schemes the paper's per-update time, times n. Staleness is how many
updates of others a gradient has not seen: those applied between its worker's reading of the parameters and its own update.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddltool.analyzers.balancing.predict import PREDICTORS, Predictor, Settings, make
from ddltool.analyzers.balancing.sizing import equal, proportional
from ddltool.analyzers.balancing.trace import MOST_SPEED, SpeedTrace
from ddltool.analyzers.loading.worker_tables import read_speeds
from ddltool.arrays import Floats, Ints
from ddltool.errors import InputError, known
from ddltool.results import BalanceResult, PredictorFigures, SchemeFigures, SplitTime
from ddltool.stages import Stage, Tell, log_remark, quietly

BATCH_PER_WORKER = 128
MOST_SAMPLES = 10**12


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcome:
    """What one way of sizing batches came to, over the iterations that are judged (J of them)."""

    iteration_s: Floats
    """(J,) seconds of the slowest worker."""
    predicted: Floats
    """(J, n) predicted speeds; the actual ones where nothing is predicted."""
    actual: Floats
    """(J, n) samples per second."""

    @property
    def rmse(self) -> float:
        """Root mean square error of a worker's predicted speed, the mean over workers; samples per second."""
        return float(np.sqrt(((self.predicted - self.actual) ** 2).mean(axis=0)).mean())

    @property
    def rmse_relative(self) -> float:
        """The same as a share of each worker's mean speed."""
        errors = np.sqrt(((self.predicted - self.actual) ** 2).mean(axis=0))
        return float((errors / self.actual.mean(axis=0)).mean())

    @property
    def mean_s(self) -> float:
        """Mean seconds of an iteration."""
        return float(self.iteration_s.mean())


def replay(trace: SpeedTrace, predictor: Predictor, total: int, *, since: int = 0) -> Outcome:
    """Return what sizing by this predictor's speeds comes to from iteration ``since`` on, ``total`` samples in all.

    ``predictor``: a fresh one; it sees all iterations in order. Where nothing can be predicted yet batches are equal.
    Raises Infeasible as :func:`~.sizing.proportional` does.
    """
    predicted = np.empty_like(trace.speed)
    times = np.empty(trace.iterations)
    for k in range(trace.iterations):
        speeds = np.array(predictor.predict(trace.cpu[k], trace.memory[k]))
        predicted[k] = speeds
        if k >= since:
            known = np.isfinite(speeds).all()
            sizes = proportional(speeds, total) if known else equal(trace.workers, total)
            times[k] = (sizes / trace.speed[k]).max()
        predictor.observe(trace.speed[k])
    return Outcome(iteration_s=times[since:], predicted=predicted[since:], actual=trace.speed[since:])


def replay_equal(trace: SpeedTrace, total: int, *, since: int = 0) -> Outcome:
    """Return what equal batches come to: BSP as frameworks have it."""
    sizes = equal(trace.workers, total)
    actual = trace.speed[since:]
    return Outcome(iteration_s=(sizes / actual).max(axis=1), predicted=actual, actual=actual)


def replay_oracle(trace: SpeedTrace, total: int, *, since: int = 0) -> Outcome:
    """Return what the same sizing comes to with the speeds of each iteration known beforehand."""
    actual = trace.speed[since:]
    times = np.array([(proportional(speeds, total) / speeds).max() for speeds in actual])
    return Outcome(iteration_s=times, predicted=actual, actual=actual)


def gain_kept(outcome: Outcome, equal_split: Outcome, oracle: Outcome) -> float:
    """Return the share of the oracle's gain over the equal split that ``outcome`` reaches; 1 where there is none."""
    possible = equal_split.mean_s - oracle.mean_s
    return 1.0 if possible <= 0 else (equal_split.mean_s - outcome.mean_s) / possible


def default_warm_up(iterations: int, wanted: int) -> int:
    """Return the warm-up that a trace allows: ``wanted``, or half of a shorter trace, and never below 20."""
    return max(20, min(wanted, iterations // 2))


def balance(
    trace: str | Path,
    predictor: str = "all",
    *,
    total_batch: int | None = None,
    warm_up: int = 500,
    schemes: bool = False,
    seed: int = 0,
    tell: Tell = log_remark,
    stage: Stage = quietly,
) -> BalanceResult:
    """Replay recorded worker speeds (a CSV): predict each next one, size the batches by it, and time the iterations.

    ``predictor``: last, ema, arima, rnn, lstm, narx or all. ``total_batch``: samples of all workers, 128 each by default;
    ``warm_up`` iterations come before the first training; ``schemes`` adds BSP, ASP, SSP and others. LB-BSP, sections 3 and 4.
    Raises InputError for what cannot be read and for more warm-up than the trace has.
    """
    predictor = known("--predictor", predictor, (*PREDICTORS, "all"))
    chosen: tuple[str, ...] = PREDICTORS if predictor == "all" else (predictor,)
    if predictor == "all" and importlib.util.find_spec("statsmodels") is None:
        tell("arima is left out: pip install statsmodels")
        chosen = tuple(name for name in chosen if name != "arima")
    recorded = read_speeds(Path(trace), tell)
    if schemes:
        check_ratio(recorded)
        if recorded.workers < WORKERS_PER_BACKUP:
            few = f"one worker in {WORKERS_PER_BACKUP} is a backup, and the trace has {recorded.workers}"
            tell(f"redundant execution is left out: {few}")
    settings = Settings(warm_up=_warmed(recorded, warm_up, Path(trace), tell), seed=seed)
    total = _total(recorded, total_batch)
    outcomes = {}
    with stage("replaying", len(chosen)) as advance:
        for place, name in enumerate(chosen):
            advance(place, name)
            outcomes[name] = replay(recorded, make(name, recorded.workers, settings), total, since=settings.warm_up)
    equal_split = replay_equal(recorded, total, since=settings.warm_up)
    oracle = replay_oracle(recorded, total, since=settings.warm_up)

    def time_of(outcome: Outcome) -> dict[str, float]:
        return {"iteration_s": outcome.mean_s, "iteration_time_ratio": outcome.mean_s / equal_split.mean_s}

    by = "narx" if predictor == "all" else predictor
    beside: dict[str, Any] = {"schemes": _compared(recorded, total, by, settings)} if schemes else {}
    return BalanceResult(
        workers=recorded.workers,
        iterations=recorded.iterations,
        warm_up=settings.warm_up,
        total_batch=total,
        seed=settings.seed,
        predictors={
            name: PredictorFigures(
                rmse=outcome.rmse,
                rmse_relative=outcome.rmse_relative,
                gain_kept=gain_kept(outcome, equal_split, oracle),
                **time_of(outcome),
            )
            for name, outcome in outcomes.items()
        },
        equal_split=SplitTime(**time_of(equal_split)),
        oracle=SplitTime(**time_of(oracle)),
        **beside,
    )


def _compared(recorded: SpeedTrace, total: int, by: str, settings: Settings) -> dict[str, Any]:
    """Return every scheme's figures beside BSP's, LB-BSP by a predictor."""
    made = compare(recorded, total, make(by, recorded.workers, settings))
    base_s = made["bsp"].iteration_s
    ratios = {name: each.iteration_s / base_s for name, each in made.items()}
    figures = {name: SchemeFigures(**asdict(made[name]), iteration_time_ratio=ratio) for name, ratio in ratios.items()}
    return {"predictor": by, **figures}


def _warmed(recorded: SpeedTrace, asked: int, path: Path, tell: Tell) -> int:
    """Return the iterations of warm-up that the trace allows, and say so when they are fewer than asked for.

    Raises InputError when no iteration comes after them.
    """
    warmed = default_warm_up(recorded.iterations, asked)
    if recorded.iterations <= warmed:
        problem = f"has {recorded.iterations} iterations, none after the warm-up of {warmed}"
        raise InputError(str(path), problem, f"record more than {warmed}")
    if warmed < asked:
        tell(f"the trace has {recorded.iterations} iterations, so the warm-up is {warmed} of them")
    return warmed


def _total(recorded: SpeedTrace, given: int | None) -> int:
    """Return the samples of all workers together. Raises InputError for fewer than workers, and beyond MOST_SAMPLES."""
    total = given if given is not None else BATCH_PER_WORKER * recorded.workers
    if total < recorded.workers:
        raise InputError("--total-batch", f"is {total}", f"{recorded.workers} workers need one sample each or more")
    if total > MOST_SAMPLES:
        raise InputError("--total-batch", f"is {total}", f"give at most {MOST_SAMPLES} samples")
    return total


SSP_BOUND = 5
FLEXRR_CHECKS = 100
FLEXRR_TRIGGER = 0.2
FLEXRR_CHUNK = 0.05
MOST_PER_ROW = 100
"""Iterations per row of the trace after which the rest of the horizon is left out: the mean is known by then."""
MOST_SHIFTING_PER_ROW = 20
"""The same for work shifting, whose iterations are simulated check by check."""
MOST_RATIO = 1e9
"""Between the fastest and the slowest speed of a trace; beyond it one row is more iterations than can be simulated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchemeResult:
    """What one scheme came to."""

    iteration_s: float
    """Mean seconds in which X samples are processed (and used)."""
    staleness: float
    """Mean number of other workers' updates that a gradient has not seen; 0 for synchronous schemes."""
    iteration_gap: int
    """Most iterations that one worker was ahead of another."""
    wasted: float = 0.0
    """Share of the processed samples whose gradients are thrown away."""


class Clock:
    """What n workers get done over time, from rates that are constant within each of K rows."""

    def __init__(self, rates: Floats, row_s: Floats) -> None:
        """``rates``: (K, n) work per second; ``row_s``: (K,) seconds of each row. After the last row its rates go on."""
        self.ends_s = np.concatenate(([0.0], np.cumsum(row_s)))
        self.done = np.concatenate((np.zeros((1, rates.shape[1])), np.cumsum(rates * row_s[:, None], axis=0)))
        self.rates = rates
        self.horizon_s = float(self.ends_s[-1])
        self._every = np.arange(rates.shape[1])
        # One ascending array for all workers, so that one search finds the row of each: work counted from a base that
        # lies beyond anything the worker before it gets done.
        self._base = np.concatenate(([0.0], np.cumsum(self.done[-1] + 1.0)[:-1]))
        self._line = (self.done + self._base).T.ravel()

    def row(self, at_s: float) -> int:
        """Return the row at a time."""
        return int(np.clip(np.searchsorted(self.ends_s, at_s, side="right") - 1, 0, len(self.rates) - 1))

    def done_by(self, at_s: Floats | float) -> Floats:
        """Return (n,) work done by the given time, one for all or (n,)."""
        row = np.clip(np.searchsorted(self.ends_s, at_s, side="right") - 1, 0, len(self.rates) - 1)
        rates: Floats = self.done[row, self._every] + (at_s - self.ends_s[row]) * self.rates[row, self._every]
        return rates

    def when(self, work: Floats) -> Floats:
        """Return (n,) the times by which the workers have done (n,) ``work``, counted from time 0."""
        rows = len(self.rates)
        beyond = work > self.done[-1]
        place = np.searchsorted(self._line, np.minimum(work, self.done[-1]) + self._base, side="right") - 1
        row = np.where(beyond, rows - 1, np.clip(place - self._every * (rows + 1), 0, rows - 1))
        times: Floats = self.ends_s[row] + (work - self.done[row, self._every]) / self.rates[row, self._every]
        return times


def check_ratio(trace: SpeedTrace) -> None:
    """Raise InputError for speeds further apart than :data:`MOST_RATIO`."""
    low, high = float(trace.speed.min()), float(trace.speed.max())
    if high > MOST_RATIO * low:
        problem = f"lie between {low:g} and {high:g} samples per second"
        raise InputError("speeds", problem, f"schemes are simulated up to a ratio of {MOST_RATIO:g}")


def cpu_clock(trace: SpeedTrace, total: int) -> Clock:
    """Return the clock of a trace: work is samples, and a row lasts as long as an iteration with equal batches.

    Raises InputError for speeds too far apart (:func:`check_ratio`).
    """
    check_ratio(trace)
    return Clock(trace.speed, (equal(trace.workers, total) / trace.speed).max(axis=1))


def bsp(clock: Clock, need: Floats) -> SchemeResult:
    """Return what it comes to when all wait for the slowest; ``need``: (n,) work of each worker's batch."""
    return _synchronous(clock, lambda at: need)


def bounded(clock: Clock, need: Floats, bound: int | None = SSP_BOUND) -> SchemeResult:
    """Return SSP, where nobody may be more than ``bound`` iterations ahead of the slowest; None: ASP.

    A worker begins its j-th iteration when it has ended the one before and all have ended j - bound.
    """
    workers = len(need)
    begins: list[Floats] = []
    ends: list[Floats] = []
    last = np.zeros(workers)
    while last.min() < clock.horizon_s and len(ends) < MOST_PER_ROW * len(clock.rates):
        begin = last
        if bound is not None and len(ends) >= bound:
            begin = np.maximum(begin, ends[len(ends) - bound].max())
        last = clock.when(clock.done_by(begin) + need)
        begins.append(begin)
        ends.append(last)
    begin_s, end_s = np.array(begins), np.array(ends)
    inside = end_s <= clock.horizon_s
    updates = np.sort(end_s.ravel())
    seen = np.searchsorted(updates, end_s, side="left") - np.searchsorted(updates, begin_s, side="right")
    return SchemeResult(
        iteration_s=clock.horizon_s * workers / max(1, int(inside.sum())),
        staleness=float(seen[inside].mean()) if inside.any() else 0.0,
        iteration_gap=_widest_gap(end_s, clock.horizon_s),
    )


def redundant(clock: Clock, need: Callable[[Ints], Floats], total: int, backups: int) -> SchemeResult:
    """Return redundant execution: only the first n - ``backups`` gradients count, the others are thrown away.

    Of the trace's n workers ``backups`` are redundant, so batches are X / (n - backups); with the paper's two extra
    instances on 32 workers it is the same but for the number of machines.
    """
    workers = clock.rates.shape[1]
    counted = workers - backups
    sizes = np.full(workers, -(-total // counted), dtype=np.int64)
    work = need(sizes)
    at, iterations = 0.0, 0
    while at < clock.horizon_s and iterations < MOST_PER_ROW * len(clock.rates):
        at = float(np.partition(clock.when(clock.done_by(at) + work), counted - 1)[counted - 1])
        iterations += 1
    return SchemeResult(iteration_s=at / iterations, staleness=0.0, iteration_gap=0, wasted=backups / workers)


def work_shifting(clock: Clock, total: int, overhead: float = 0.005) -> SchemeResult:
    """Return a FlexRR-like scheme on CPU workers: inside an iteration, those who are done take work from stragglers.

    Progress is checked 100 times per (equal-split) iteration, in one that lasts longer each hundredth of its time so far. A
    worker that has ended takes 5 % of a batch from the one with most left, provided that one lags by more than 20 % of a
    batch; each transfer costs the helper ``overhead`` of the iteration before it begins. Samples must be processed one by one
    for this, which the figures do not charge for.
    """
    workers = clock.rates.shape[1]
    batch = total / workers
    at, iterations = 0.0, 0
    while at < clock.horizon_s and iterations < MOST_SHIFTING_PER_ROW * len(clock.rates):
        rates = clock.rates[clock.row(at)]
        length = float((batch / rates).max())
        step = length / FLEXRR_CHECKS
        left = np.full(workers, batch)
        # Before the first worker ends nothing is shifted.
        passed = float((batch / rates).min())
        ends = passed
        left = np.maximum(0.0, left - (clock.done_by(at + passed) - clock.done_by(at)))
        while left.max() > 1e-9 * batch:
            step = max(step, passed / FLEXRR_CHECKS)
            done = clock.done_by(at + passed + step) - clock.done_by(at + passed)
            idle = np.flatnonzero(left <= 1e-9 * batch)
            order = np.argsort(-left, kind="stable")
            order = order[left[order] > FLEXRR_TRIGGER * batch][: len(idle)]
            # The fastest helpers first; the delay of a transfer is work that its helper does not do.
            helpers = idle[np.argsort(-done[idle], kind="stable")][: len(order)]
            left[order] -= FLEXRR_CHUNK * batch
            left[helpers] += FLEXRR_CHUNK * batch + overhead * length * done[helpers] / step
            ends = passed + step * float(np.max(np.where(left > 0, np.minimum(1.0, left / done), 0.0)))
            left = np.maximum(0.0, left - done)
            passed += step
        at += ends
        iterations += 1
    return SchemeResult(iteration_s=at / iterations, staleness=0.0, iteration_gap=0)


def lb_bsp(clock: Clock, trace: SpeedTrace, total: int, predictor: Predictor) -> SchemeResult:
    """Return LB-BSP on CPU workers: batches by predicted speeds, with the readings of the moment they are chosen."""

    sizes = equal(trace.workers, total)

    def need(at: float) -> Floats:
        """Return the (n,) batches of the iteration that begins at ``at``; equal until the predictor knows all speeds."""
        nonlocal sizes
        row = clock.row(at)
        speeds = np.asarray(predictor.predict(trace.cpu[row], trace.memory[row]))
        sizes = proportional(speeds, total) if np.isfinite(speeds).all() else equal(trace.workers, total)
        return sizes.astype(np.float64)

    def observe(seconds: Floats) -> None:
        """Tell the predictor the speeds at which those batches were computed."""
        # Far into a trace a short time can be lost to rounding.
        predictor.observe(np.minimum(sizes / np.maximum(seconds, 1e-300), MOST_SPEED))

    return _synchronous(clock, need, observe)


def lb_bsp_oracle(clock: Clock, total: int) -> SchemeResult:
    """Return LB-BSP on CPU workers that know what each will get done: the least whole batches allow, to a sample."""

    def need(at: float) -> Floats:
        """Return the (n,) samples that each worker gets done until all together have done ``total``, by bisection."""
        begun = clock.done_by(at)
        low, high = 0.0, float(((total / len(begun)) / clock.rates[clock.row(at)]).max()) * 4 + 1e-9
        while float((clock.done_by(at + high) - begun).sum()) < total:
            high *= 2
        for _ in range(50):
            middle = (low + high) / 2
            if float((clock.done_by(at + middle) - begun).sum()) < total:
                low = middle
            else:
                high = middle
        done = clock.done_by(at + high) - begun
        # Far into a trace the little that a slow worker gets done can be lost to rounding.
        return proportional(np.maximum(done, 1e-12 * done.max()), total).astype(np.float64)

    return _synchronous(clock, need)


WORKERS_PER_BACKUP = 16


def compare(trace: SpeedTrace, total: int, predictor: Predictor) -> dict[str, SchemeResult]:
    """Return what every scheme comes to on a CPU cluster's trace, LB-BSP by ``predictor``.

    Redundant execution has one backup in 16 workers, and no part with fewer. Raises InputError as :func:`cpu_clock`.
    """
    clock, need = cpu_clock(trace, total), equal(trace.workers, total).astype(float)
    made = {"bsp": bsp(clock, need), "asp": bounded(clock, need, None), "ssp": bounded(clock, need)}
    if backups := trace.workers // WORKERS_PER_BACKUP:
        made["redundant"] = redundant(clock, lambda sizes: sizes.astype(float), total, backups)
    made["work_shifting"] = work_shifting(clock, total)
    made["lb_bsp"] = lb_bsp(clock, trace, total, predictor)
    made["lb_bsp_oracle"] = lb_bsp_oracle(clock, total)
    return made


def _synchronous(
    clock: Clock, need: Callable[[float], Floats], observe: Callable[[Floats], None] | None = None
) -> SchemeResult:
    """Return iterations that all begin together, with ``need(begin)`` (n,) work each, until the horizon."""
    at, iterations = 0.0, 0
    # Rounding must not let one more iteration begin an instant before the end.
    while at < clock.horizon_s * (1 - 1e-12) and iterations < MOST_PER_ROW * len(clock.rates):
        ends = clock.when(clock.done_by(at) + need(at))
        if observe is not None:
            observe(ends - at)
        at = float(ends.max())
        iterations += 1
    return SchemeResult(iteration_s=at / iterations, staleness=0.0, iteration_gap=0)


def _widest_gap(end_s: Floats, horizon_s: float) -> int:
    """Return the largest difference of iterations ended, at any moment up to the horizon; (J, n) ends."""
    counts = np.arange(1, len(end_s) + 1)
    slowest = end_s.max(axis=1)
    first = end_s.min(axis=1)
    behind = np.searchsorted(slowest, first, side="right")
    inside = first <= horizon_s
    return int((counts - behind)[inside].max()) if inside.any() else 0
