"""One throughput model per device type, and whether the types share a network. Start at :func:`fit_devices`.

A device type has its own speed (``alpha_grad``, ``beta_grad``). Synchronisation belongs to the network, so types on one
network can share its five parameters: then few rows of one type are enough when another was measured well. Types on
networks of their own (another interconnect, other numbers of GPUs per node) must not. Cross-validation over placements
decides: each fold leaves out whole placements of every type and asks which way predicts their steps better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.goodput.fit import FitResult, evaluate, fit, fit_joint, predict
from ddltool.analyzers.goodput.observations import Observations, check
from ddltool.errors import InputError

Array = NDArray[np.float64]
FOLDS = 4
# Separate networks have five parameters more per type: they must predict better by this share to be worth it.
MARGIN = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceModels:
    """Models by device type, in the order of the rows, and why they share a network or do not."""

    results: dict[str, FitResult]
    shared_network: bool
    reason: str
    shared_rmsle: float | None
    """Error of the steps left out when the network is shared; None where no rows could be left out."""
    separate_rmsle: float | None


def fit_devices(
    devices: Mapping[str, Observations], *, seed: int = 0, shared_network: bool | None = None
) -> DeviceModels:
    """Return one model per device type from its rows.

    ``shared_network``: True or False to decide what cross-validation decides by default. A type without rows of several
    replicas takes its synchronisation from the shared network. Raises as :func:`~ddltool.analyzers.goodput.fit.fit`.
    """
    if not devices:
        raise InputError("devices", "are none", "give the rows of at least one device type")
    names, parts = list(devices), list(devices.values())
    for rows in parts:
        check(rows)
    alone = [fit(rows, seed=seed) for rows in parts]
    if len(parts) == 1:
        return _models(names, alone, False, "one device type", None, None)
    # Rows that are no steady state are found device by device, and left out of what follows.
    kept = [rows.take(~result.left_out) for rows, result in zip(parts, alone, strict=True)]
    reason = "as asked"
    scores: tuple[float, float] | None = None
    if shared_network is None:
        scores = leave_out(kept, seed=seed)
        shared_network, reason = _choose(names, parts, scores)
    shared_rmsle, separate_rmsle = scores if scores is not None else (None, None)
    if not shared_network:
        return _models(names, alone, False, reason, shared_rmsle, separate_rmsle)
    joint = fit_joint(kept, seed=seed, robust=False).results
    results = []
    for rows, own, result in zip(parts, alone, joint, strict=True):
        error = evaluate(result.params, rows)
        expected = iter(predict(result.params, rows)[own.left_out])
        results.append(
            replace(
                result,
                rmsle=error.rmsle,
                mape=error.mape,
                samples=len(rows),
                outliers=tuple(replace(item, expected_s=float(next(expected))) for item in own.outliers),
                left_out=own.left_out,
                fit_seconds=result.fit_seconds + sum(item.fit_seconds for item in alone),
            )
        )
    return _models(names, results, True, reason, shared_rmsle, separate_rmsle)


def _models(
    names: Sequence[str],
    results: Sequence[FitResult],
    shared: bool,
    reason: str,
    shared_rmsle: float | None,
    separate_rmsle: float | None,
) -> DeviceModels:
    return DeviceModels(
        results=dict(zip(names, results, strict=True)),
        shared_network=shared,
        reason=reason,
        shared_rmsle=shared_rmsle,
        separate_rmsle=separate_rmsle,
    )


def _choose(
    names: Sequence[str], parts: Sequence[Observations], scores: tuple[float, float] | None
) -> tuple[bool, str]:
    """Return whether to share the network, and why in words."""
    synchronising = [name for name, rows in zip(names, parts, strict=True) if (rows.num_replicas > 1).any()]
    if len(synchronising) < 2:
        only = f"only {synchronising[0]} has" if synchronising else "no type has"
        return True, f"{only} rows of several replicas"
    if scores is None:
        return True, "too few rows to leave any out; sharing takes fewer parameters"
    shared, separate = scores
    errors = f"error on rows left out {shared:.3f} shared, {separate:.3f} separate"
    if not separate < (1.0 - MARGIN) * shared:
        return True, errors
    return False, errors


def leave_out(devices: Sequence[Observations], *, seed: int = 0, folds: int = FOLDS) -> tuple[float, float] | None:
    """Return the RMSLE of left-out steps of several replicas, network shared and separate; None when none can be left out.

    The mean over the device types, so that the one with most rows does not decide alone. A fold leaves out every
    ``folds``-th placement of each type, or row where a type has fewer than three placements.
    """
    fold_of = [_fold_numbers(rows, folds) for rows in devices]
    errors: list[list[list[Array]]] = [[[] for _ in devices] for _ in range(2)]
    for fold in range(folds):
        held = [numbers == fold for numbers in fold_of]
        train = [rows.take(~out) for rows, out in zip(devices, held, strict=True)]
        if not any(out.any() for out in held) or min(len(rows) for rows in train) == 0:
            continue
        shared = [result.params for result in fit_joint(train, seed=seed, robust=False).results]
        separate = [fit(rows, seed=seed, robust=False).params for rows in train]
        for way, params in enumerate((shared, separate)):
            for place, (rows, out) in enumerate(zip(devices, held, strict=True)):
                test = rows.take(out)
                errors[way][place].append((np.log(predict(params[place], test)) - np.log(test.step_time_s)) ** 2)
    scores = []
    for found in errors:
        per_device = [np.concatenate(item) for item in found if sum(map(len, item))]
        if not per_device:
            return None
        scores.append(float(np.mean([math.sqrt(item.mean()) for item in per_device])))
    return scores[0], scores[1]


def _fold_numbers(rows: Observations, folds: int) -> NDArray[np.int64]:
    """Return the fold of each row, shape (n,); -1 for rows of one replica, which are never left out."""
    several = rows.num_replicas > 1
    numbers = np.full(len(rows), -1, dtype=np.int64)
    pairs = np.stack([rows.num_nodes, rows.num_replicas])[:, several]
    unique, which = np.unique(pairs, axis=1, return_inverse=True)
    units = which.reshape(-1) if unique.shape[1] >= 3 else np.arange(pairs.shape[1])
    if units.size >= 2:
        numbers[several] = units % folds
    return numbers
