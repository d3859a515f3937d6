"""The fit of the throughput model: seven parameters from measured step times (Pollux, section 4.1). Start at :func:`fit`.

Minimised is the mean squared log error of the full step and of one pass (:mod:`~ddltool.analyzers.goodput.least_squares`),
from many starts, after rows that are no steady state were left out.

Synchronisation slows down less than linearly as replicas are added, so a slope learnt on few replicas predicts too long
steps for many. A prior answers that: a slope is a small share of its intercept, ``beta / alpha`` Cauchy about 0 with scale
:data:`SLOPE_SPREAD`. What stands against it is the rows' own scatter about the model, counted once for each placement
(rows of one placement err together), so rows without noise overrule it. Its scale, and the weight of T_grad, are about
those that best predicted rows of more than 8 replicas from those of up to 8, and of 4 nodes from those of up to 3, over the
six applications of Pollux's own measurements (``benchmarks/bench_fit.py --prior`` repeats the choice). Within a node, whose
replicas are few and mostly measured, the prior yields where the rows' own interval of the slope excludes what it makes of
it. Across nodes it stays: there the slope is asked for numbers of nodes that nobody measured, and over the tables of Sia's
artifact errors on those were larger without it.

Only gross errors are left out. Measured tables deviate from the model by tens of per cent in whole groups of rows (the
model is not the truth), and a loss that bends early, such as Huber's at two standard deviations, gives those groups up:
on Pollux's tables it doubles the error on unseen rows of bert. So a first fit that few rows cannot pull (least absolute
errors) finds the rows that lie far outside the others' scatter, and the least-squares fit goes without them.

A device type has its own speed (``alpha_grad``, ``beta_grad``). Synchronisation belongs to the network, so types on one
network can share its five parameters: then few rows of one type are enough when another was measured well. Types on
networks of their own (another interconnect, other numbers of GPUs per node) must not. :func:`fit_devices` decides by
cross-validation over placements: each fold leaves out whole placements of every type and asks which way predicts their
steps better.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from ddltool.analyzers.goodput.least_squares import SLOPES, Descent, Problem, descend
from ddltool.analyzers.goodput.observations import Observations, check
from ddltool.analyzers.goodput.throughput import NAMES, ThroughputParams, iteration_time_s
from ddltool.errors import InputError, NotProven
from ddltool.goodput_model import FitError

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
SLOPE_SPREAD = 0.05
# Standard deviation of a log time: when the rows are too few to tell, and at least.
ASSUMED_ERROR, LEAST_ERROR = 0.05, 1e-7
_GAMMA_STARTS = (1.0, 1.3, 2.0, 3.5, 7.0)
_GROWTH_STARTS = (0.02, 0.3)
# Descents from all starts are cut short; the best few go on to the end.
_SHORT, _FINALISTS = 12, 3
# A row is left out when its log error exceeds both: six standard deviations, and a factor of two either way.
DEVIATIONS, LEAST_FACTOR = 6.0, 2.0
# More than this share of rows are no outliers: then the model does not hold. Of fewer rows than these none can be told
# from a parameter.
LARGEST_SHARE, FEWEST_ROWS = 0.15, 6
# Errors smaller than this count alike in the fit of least absolute errors.
_SMOOTH = 0.02
FOLDS = 4
# Separate networks have five parameters more per type: they must predict better by this share to be worth it.
MARGIN = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class FitResult:
    """Fitted parameters, their error on all rows (those left out included), and what the rows could not determine."""

    params: ThroughputParams
    error: FitError
    fit_seconds: float
    undetermined: tuple[str, ...]
    left_out: Mask = field(compare=False)
    """(n,) the rows that were left out of the fit."""


def evaluate(params: ThroughputParams, rows: Observations) -> FitError:
    """Return RMSLE and MAPE of the full step time on the rows. Raises InputError for rows that cannot be."""
    check(rows)
    ratio = np.maximum(predict(params, rows), 1e-300) / rows.step_time_s
    return FitError(
        rmsle=float(np.sqrt(np.mean(np.log(ratio) ** 2))), mape=float(np.mean(np.abs(ratio - 1.0))), samples=len(rows)
    )


def predict(params: ThroughputParams, rows: Observations) -> Array:
    """Return the predicted step time of each row in seconds, shape (n,)."""
    return np.asarray(
        iteration_time_s(params, rows.num_nodes, rows.num_replicas, rows.local_batch_size, rows.accumulation_steps)
    )


def fit(
    rows: Observations,
    *,
    seed: int = 0,
    slope_spread: float = SLOPE_SPREAD,
    grad_weight: float | None = None,
    robust: bool = True,
) -> FitResult:
    """Return the best fit of one device type over many starts.

    ``slope_spread``: scale of ``beta / alpha`` of synchronisation before any row is seen; ``math.inf`` fits the rows
    alone. ``grad_weight``: how much an error of T_grad counts beside one of the step; by default 1 for up
    to 20 configurations, falling to 0.1 for 200 and more. ``robust``: leave out rows that are
    no steady state. ``seed`` makes one more, random start. Raises InputError without rows or for numbers that no
    measurement can give, NotProven when no start converged. O(configurations) per evaluation.
    """
    return fit_joint([rows], seed=seed, slope_spread=slope_spread, grad_weight=grad_weight, robust=robust)[0]


def fit_joint(
    devices: Sequence[Observations],
    *,
    seed: int = 0,
    slope_spread: float = SLOPE_SPREAD,
    grad_weight: float | None = None,
    robust: bool = True,
) -> tuple[FitResult, ...]:
    """Return the fit of several device types that share their network: gamma and the parameters of synchronisation.

    Arguments and errors as for :func:`fit`. Each result has its own rows' error; ``fit_seconds`` is that of the whole.
    """
    started = time.perf_counter()
    if not slope_spread > 0:
        raise InputError("slope_spread", f"is {slope_spread}", "give a number above 0; inf fits the rows alone")
    if not devices:
        raise InputError("observations", "are empty", "give at least one measured row")
    for rows in devices:
        check(rows)
    left_out = [np.zeros(len(rows), dtype=bool) for rows in devices]
    kept = list(devices)
    prior = math.isfinite(slope_spread)
    scale = slope_spread if prior else 1.0
    if robust:
        left_out = _outliers(Problem(devices, slope_scale=scale, grad_weight=grad_weight), prior)
        kept = [rows.take(~out) for rows, out in zip(devices, left_out, strict=True)]
    problem = Problem(kept, slope_scale=scale, grad_weight=grad_weight)
    found = _solve(problem, (*_GAMMA_STARTS, float(np.random.default_rng(seed).uniform(1.0, 10.0))))
    if prior:
        found = _with_prior(problem, found)
    if not (found.converged and math.isfinite(found.loss)):
        raise NotProven("the throughput fit did not converge from any start; check the rows for errors of measurement")
    seconds = time.perf_counter() - started
    return tuple(
        FitResult(
            params=params,
            error=evaluate(params, rows),
            fit_seconds=seconds,
            undetermined=tuple(name for name, known in zip(NAMES, problem.free[index], strict=True) if not known),
            left_out=out,
        )
        for rows, params, index, out in zip(devices, problem.params(found.point), problem.index, left_out, strict=True)
    )


def _solve(problem: Problem, gammas: Sequence[float]) -> Descent:
    """Return the best minimum: short descents from all starts, the best of them to the end."""
    shared = bool(problem.free[problem.gamma])
    growths = _GROWTH_STARTS if problem.free[problem.index[0][[3, 5]]].any() else (0.02,)
    starts = [problem.start(gamma, growth) for gamma in (gammas if shared else (2.0,)) for growth in growths]
    short = sorted((descend(problem, start, steps=_SHORT) for start in starts), key=lambda item: item.loss)
    ends = [descend(problem, item.point) for item in short[:_FINALISTS]]
    return min([item for item in ends if item.converged] or ends, key=lambda item: item.loss)


def _slope_weight(problem: Problem, error: float) -> float:
    """Return the weight of the prior beside the mean squared error, errors of a placement taken as one."""
    return 2.0 * error**2 / max(problem.placements, 1)


def _with_prior(problem: Problem, free: Descent) -> Descent:
    """Return the minimum with the prior on the slopes; ``free`` is the one without it."""
    found = free
    for _ in range(20):  # the scatter decides how much the prior counts, and the prior moves the scatter
        before = problem.slope_weights[0]
        error = max(problem.scatter(found.point) or ASSUMED_ERROR, LEAST_ERROR)
        problem.slope_weights[:] = _slope_weight(problem, error)
        found = descend(problem, found.point)
        if abs(problem.slope_weights[0] - before) <= 0.01 * before:
            break
    again = _solve(problem, _GAMMA_STARTS[::2])
    found = again if again.loss < found.loss else found
    slope = int(problem.index[0][SLOPES[0][1]])
    if problem.free[slope] and _excluded(problem, free, found.point, slope):
        problem.slope_weights[0] = 0.0
        found = min((descend(problem, item.point) for item in (found, free)), key=lambda item: item.loss)
    return found


def _excluded(problem: Problem, free: Descent, point: Array, unknown: int) -> bool:
    """Return whether the rows' own 90 % interval excludes an unknown's value: what uncertainty.py would find."""
    beside = free.point.copy()
    beside[unknown] = point[unknown]
    weights, problem.slope_weights = problem.slope_weights, np.zeros(2)
    least = min(descend(problem, start, fixed=unknown).loss for start in (point, beside))
    error, freedom = problem.time_error(free.loss)
    problem.slope_weights = weights
    return (least - free.loss) * problem.rows > (float(stdtrit(max(freedom, 1.0), 0.95)) * error) ** 2


def _outliers(problem: Problem, prior: bool) -> list[Mask]:
    """Return, per device, which rows to leave out, shape (n,): none when they are many or carry a parameter alone.

    About ten least-squares fits: that of least absolute log errors of the steps, by iteratively reweighted least squares.
    """
    groups = problem.groups
    none = [np.zeros(len(item.rows), dtype=bool) for item in groups]
    count = sum(len(item) for item in none)
    if count < max(FEWEST_ROWS, int(problem.free.sum()) + 1):
        return none
    problem.slope_weights[:] = _slope_weight(problem, ASSUMED_ERROR) if prior else 0.0
    point, steps = _solve(problem, (2.0,)).point, 20
    for _ in range(10):
        point = descend(problem, point, steps=steps).point
        errors, steps = problem.step_errors(point), 3
        problem.weigh([1.0 / np.maximum(np.abs(error), _SMOOTH) for error in errors])
    found = []
    for error in errors:  # per device: one may scatter far more than another
        limit = max(DEVIATIONS * 1.4826 * float(np.median(np.abs(error))), math.log(LEAST_FACTOR))
        found.append(np.abs(error) > limit)
    left = sum(int(item.sum()) for item in found)
    if left == 0 or left > max(1, LARGEST_SHARE * count) or any(item.all() for item in found):
        return none
    kept = Problem([item.rows.take(~out) for item, out in zip(groups, found, strict=True)])
    return found if np.array_equal(kept.free, problem.free) else none


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceModels:
    """Models by device type, in the order of the rows, and why they share a network or do not."""

    results: dict[str, FitResult]
    shared_network: bool
    reason: str


def fit_devices(
    devices: Mapping[str, Observations], *, seed: int = 0, shared_network: bool | None = None
) -> DeviceModels:
    """Return one model per device type from its rows.

    ``shared_network``: True or False to decide what cross-validation decides by default. A type without rows of several
    replicas takes its synchronisation from the shared network. Raises as :func:`fit`.
    """
    if not devices:
        raise InputError("devices", "are none", "give the rows of at least one device type")
    alone = {name: fit(rows, seed=seed) for name, rows in devices.items()}
    if len(alone) == 1:
        return DeviceModels(results=alone, shared_network=False, reason="one device type")
    # Rows that are no steady state are found device by device, and left out of what follows.
    kept = {name: rows.take(~alone[name].left_out) for name, rows in devices.items()}
    reason = "as asked"
    if shared_network is None:
        shared_network, reason = _choose(kept, seed)
    if not shared_network:
        return DeviceModels(results=alone, shared_network=False, reason=reason)
    joint = fit_joint(list(kept.values()), seed=seed, robust=False)
    seconds = sum(item.fit_seconds for item in alone.values())
    results = {
        name: replace(
            result,
            error=evaluate(result.params, devices[name]),
            left_out=alone[name].left_out,
            fit_seconds=result.fit_seconds + seconds,
        )
        for name, result in zip(kept, joint, strict=True)
    }
    return DeviceModels(results=results, shared_network=True, reason=reason)


def _choose(devices: Mapping[str, Observations], seed: int) -> tuple[bool, str]:
    """Return whether to share the network, and why in words."""
    synchronising = [name for name, rows in devices.items() if (rows.num_replicas > 1).any()]
    if len(synchronising) < 2:
        only = f"only {synchronising[0]} has" if synchronising else "no type has"
        return True, f"{only} rows of several replicas"
    scores = leave_out(list(devices.values()), seed=seed)
    if scores is None:
        return True, "too few rows to leave any out; sharing takes fewer parameters"
    shared, separate = scores
    worth = separate < (1.0 - MARGIN) * shared
    return not worth, f"error on rows left out {shared:.3f} shared, {separate:.3f} separate"


def leave_out(devices: Sequence[Observations], *, seed: int = 0, folds: int = FOLDS) -> tuple[float, float] | None:
    """Return the RMSLE of left-out steps of several replicas, network shared and separate; None when none can be left out.

    The mean over the device types, so that the one with most rows does not decide alone. A fold leaves out every
    ``folds``-th placement of each type, or row where a type has fewer than three placements.
    """
    fold_of = [fold_numbers(rows, folds) for rows in devices]
    squares: list[list[list[Array]]] = [[[] for _ in devices] for _ in range(2)]
    for fold in range(folds):
        held = [numbers == fold for numbers in fold_of]
        train = [rows.take(~out) for rows, out in zip(devices, held, strict=True)]
        if not any(out.any() for out in held) or min(len(rows) for rows in train) == 0:
            continue
        shared = fit_joint(train, seed=seed, robust=False)
        separate = [fit(rows, seed=seed, robust=False) for rows in train]
        for results, found in zip((shared, separate), squares, strict=True):
            for result, rows, out, mine in zip(results, devices, held, found, strict=True):
                test = rows.take(out)
                mine.append((np.log(predict(result.params, test)) - np.log(test.step_time_s)) ** 2)
    scores = []
    for found in squares:
        per_device = [np.concatenate(item) for item in found if sum(map(len, item))]
        if not per_device:
            return None
        scores.append(float(np.mean([math.sqrt(item.mean()) for item in per_device])))
    return scores[0], scores[1]


def fold_numbers(rows: Observations, folds: int) -> NDArray[np.int64]:
    """Return the fold of each row, shape (n,); -1 for rows of one replica, which are never left out."""
    several = rows.num_replicas > 1
    numbers = np.full(len(rows), -1, dtype=np.int64)
    pairs = np.stack([rows.num_nodes, rows.num_replicas])[:, several]
    unique, which = np.unique(pairs, axis=1, return_inverse=True)
    units = which.reshape(-1) if unique.shape[1] >= 3 else np.arange(pairs.shape[1])
    if units.size >= 2:
        numbers[several] = units % folds
    return numbers
