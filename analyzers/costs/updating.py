"""A device's own constants from a user's measured rows, the shipped ones as prior. Start at :func:`update`.

Few rows cannot tell the classes of kernels apart, so what is fitted are the factors on matrix units, float32 units and memory,
and the host's times; shares by class stay. How sure predictions are afterwards is told by the rows themselves: each model, or
where there is one model only each batch size, is predicted by a fit to the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.costs.fitting import Belief, Case, fit, steps_s
from ddltool.analyzers.costs.kernel_times import UNITS, demand_of
from ddltool.analyzers.costs.kernels import kernels_of
from ddltool.analyzers.costs.model import OPTIMIZERS, CostModel, cost_model
from ddltool.calibration import CalibrationTable, DeviceFit, Residuals
from ddltool.device import Device
from ddltool.errors import InputError
from ddltool.graph import COMPUTE, SEND, Graph

Array = NDArray[np.float64]
OWN = "own"
"""The generation of a calibrated device's cases: its own."""
# How far a device may be from its generation, and a user's host from the one of the measurements (standard deviations of
# logarithms): between the GPUs of one generation the fitted factors differ by up to a third, between hosts by more.
SPREAD: Mapping[str, float] = {"*": 0.0, **dict.fromkeys(UNITS, 0.3), "start_s": 0.2, "issue_s": 0.5, "update_s": 0.5}
# No device does more than its datasheet: the rate that each unit's main class of kernels reaches is at most this share of it.
# Memory may: what a cache keeps counts as traffic.
_MOST = {"tensor": 1.0, "vector": 1.0, "memory": 1.1}
# All batch sizes of a model count as so many rows: what is wrong with one of them is wrong with the others.
_FEW = 4.0
# The prior counts as so many models; with fewer steps than these, or of one model, it cannot be outdone.
_PRIOR_MODELS, _ENOUGH = 4.0, 5
_FOLDS = 6
# Standard deviations above which a tenth lies.
_TENTH = 1.2816
# Beyond these the rows are not of this device, or not as they say: standard deviations of the prior, and median error.
_FAR, _MEDIAN = 3.0, 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A measured step of one replica and one pass."""

    model: str
    batch: int
    optimizer: str
    seconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Updated:
    """A device with its own constants, and predicted / measured of the steps before and after."""

    device: Device
    before: Array
    """(steps,) one for every model, batch size and optimizer."""
    after: Array
    """(steps,)"""


def update(
    rows: Sequence[Measured],
    graph_of: Callable[[str, int], Graph],
    device: Device,
    calibration: CalibrationTable,
    *,
    source: str,
) -> Updated:
    """Return the device fitted to ``rows``; ``graph_of`` returns the graph of a model at a batch size.

    Repeats of a model, batch size and optimizer are one step, and all steps of a model together count as a few. An earlier fit
    of the device is left out: the shipped constants are the prior. ``source`` names the rows. Raises InputError for none, and
    for rows that cannot be of this device.
    """
    if not rows:
        remedy = "measure with ddltool profile SOURCE --replicas 1"
        raise InputError(source, "has no rows of one replica and one pass", remedy)
    model = cost_model(device.model_copy(update={"fitted": None}), calibration)
    steps = merged(rows)
    models = [step.model for step in steps]
    cases = [_case(graph_of(step.model, step.batch), model, step, models.count(step.model)) for step in steps]
    prior = prior_of(model)
    found = refit(cases, prior)
    measured = np.array([step.seconds for step in steps])
    before, after = steps_s(cases, prior) / measured, steps_s(cases, found) / measured
    _demand_plausible(model, prior, found, after, source)
    fitted = DeviceFit(
        units=dict(found.generations[OWN]),
        issue_s=found.constants.issue_s,
        start_s=found.constants.start_s,
        update_s=found.constants.update_s,
        residuals=residuals_after(cases, models, prior, model.residuals),
        source=source,
    )
    return Updated(device=device.model_copy(update={"fitted": fitted}), before=before, after=after)


def merged(rows: Sequence[Measured]) -> list[Measured]:
    """Return one step for the rows of each model, batch size and optimizer: the median of their logarithms. O(rows)."""
    logs: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for row in rows:
        logs[row.model, row.batch, row.optimizer].append(math.log(row.seconds))
    return [
        Measured(model=model, batch=batch, optimizer=optimizer, seconds=math.exp(float(np.median(each))))
        for (model, batch, optimizer), each in sorted(logs.items())
    ]


def _case(graph: Graph, model: CostModel, step: Measured, beside: int) -> Case:
    """Return a measured step as a case for the fit, one of ``beside`` of its model. ``graph``: traced, at its batch size."""
    kernels = kernels_of(graph)
    precision, channels_last = str(graph.meta.get("precision", "fp32")), bool(graph.meta.get("channels_last", False))
    passes = OPTIMIZERS[step.optimizer].passes
    launching = len(np.unique(kernels.op))
    return Case(
        demand=demand_of(kernels, model.device, precision=precision, channels_last=channels_last),
        count=np.ones(len(kernels)),
        ops=launching,
        views=int((graph.kind == COMPUTE).sum()) - launching,
        update_traffic_s=passes * graph.trained_bytes / model.device.memory_bytes_per_s,
        tensors=len(graph.of_kind(SEND)) if passes else 0,
        generation=OWN,
        measured_s=step.seconds,
        weight=min(1.0, math.sqrt(_FEW / beside)),
    )


def prior_of(model: CostModel) -> Belief:
    """Return what is believed of a device before its own rows are read."""
    return Belief(
        constants=replace(model.constants, units={}), generations={OWN: dict(model.constants.units)}, spread=SPREAD
    )


def refit(cases: Sequence[Case], prior: Belief) -> Belief:
    """Return the belief after the cases of a device (``generation``: ``OWN``), within what its datasheet can do.

    A factor that would be beyond its bound is held there, and the others are fitted again.
    """
    constants, before = prior.constants, prior.generations[OWN]
    reached = {
        "tensor": constants.arithmetic["matrix_product/tensor"],
        "vector": constants.arithmetic["matrix_product/vector"],
        "memory": constants.traffic["pointwise"],
    }
    # The shipped factors of a generation may lie beyond: large caches, and libraries that compute less than they are asked for.
    most = {unit: max(before[unit], _MOST[unit] / reached[unit]) for unit in UNITS}
    found = fit(cases, prior)
    for _ in UNITS:
        beyond = {unit: most[unit] for unit in UNITS if found.generations[OWN][unit] > most[unit]}
        if not beyond:
            break
        held = {**prior.generations[OWN], **beyond}
        prior = replace(prior, generations={OWN: held}, spread={**prior.spread, **dict.fromkeys(beyond, 0.0)})
        found = fit(cases, prior)
    return found


def residuals_after(cases: Sequence[Case], models: Sequence[str], prior: Belief, before: Residuals) -> Residuals:
    """Return how far off predictions are after a fit to ``cases`` of ``models``; ``before``: how far off without it.

    Both sides of the prior's range are scaled by one factor, ``s / s0``: with ``s0`` the prior's standard deviation, ``r`` the
    root mean square of the left-out errors (every model as much as another) and ``k`` models beside the first,

        s^2 = max(r^2, (n0 s0^2 + k r^2) / (n0 + k))

    the scaled inverse chi-squared update of a variance (Gelman et al., "Bayesian Data Analysis", section 2.6) with the prior
    worth ``n0`` = 4 models, but never surer than the rows' own errors. Few steps, or those of one model, give k = 0.
    """
    errors = np.abs(_left_out(cases, models, prior))
    squares = [float(np.mean(errors[[name == each for each in models]] ** 2)) for name in sorted(set(models))]
    own = float(np.mean(squares))
    known = _deviation(before) ** 2
    others = len(squares) - 1 if len(cases) >= _ENOUGH else 0
    factor = math.sqrt(max(own, (_PRIOR_MODELS * known + others * own) / (_PRIOR_MODELS + others)) / known)
    median = float(np.median(np.expm1(errors)))
    what = "the model" if len(squares) > 1 else "the batch size" if len(cases) > 1 else "any row"
    return Residuals(
        low=float(f"{before.low**factor:.4g}"),
        high=float(f"{before.high**factor:.4g}"),
        median_error=float(f"{median if others else max(median, before.median_error):.4g}"),
        rows=len(cases),
        what=f"{what} (own rows of the device, and what was known before them)",
    )


def _left_out(cases: Sequence[Case], models: Sequence[str], prior: Belief) -> Array:
    """Return (cases,) log(predicted / measured) of each by a fit to the others: models in folds, or steps of the one model.

    A single case is judged by the prior.
    """
    several = len(set(models)) > 1
    groups = list(models) if several else [str(number) for number in range(len(cases))]
    fold_of = {group: number % _FOLDS for number, group in enumerate(dict.fromkeys(groups))}
    fold = np.array([fold_of[group] for group in groups])
    measured = np.log([case.measured_s for case in cases])
    errors: Array = np.log(steps_s(cases, prior)) - measured
    for number in set(fold_of.values()) if len(cases) > 1 else ():
        inside = [case for case, own in zip(cases, fold, strict=True) if own != number]
        outside = [case for case, own in zip(cases, fold, strict=True) if own == number]
        errors[fold == number] = np.log(steps_s(outside, refit(inside, prior))) - measured[fold == number]
    return errors


def _deviation(residuals: Residuals) -> float:
    """Return the standard deviation of the logarithm that an 80 % range stands for."""
    return math.log(residuals.high / residuals.low) / (2.0 * _TENTH)


def _demand_plausible(model: CostModel, prior: Belief, found: Belief, after: Array, source: str) -> None:
    """Raise InputError where the fit is beyond what may be believed of the device: then the rows are not what they seem."""
    remedy = (
        "check that step_time_s is in seconds, and that device, precision, optimizer and model are those of the rows"
    )
    off = np.abs(np.log(after))
    limit = min(_FAR * _deviation(model.residuals), math.log1p(_MEDIAN))
    if (median := float(np.median(off))) > limit:
        text = f"after the fit half of the steps are off by a factor of {math.exp(median):.3g} or more"
        raise InputError(source, f"fits no {model.device.name}: {text}", remedy)
    for unit in UNITS:
        factor = found.generations[OWN][unit] / prior.generations[OWN][unit]
        if abs(math.log(factor)) > _FAR * SPREAD[unit]:
            text = f"fits no {model.device.name}: its {_UNIT_NAMES[unit]} would reach {factor:.2g} of what is expected of it"
            raise InputError(source, text, remedy)


_UNIT_NAMES = {"tensor": "matrix units", "vector": "float32 units", "memory": "memory"}
