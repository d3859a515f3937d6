"""Fitting the constants of the cost model to measured steps, with what is known already as the prior. Start at :func:`fit`.

Least squares of log(predicted / measured) over all cases, softened against outliers (soft L1), plus the squared distance of
every constant from its prior in units of how far it may be off: what the cases do not determine stays where it was. All
constants are positive and fitted as logarithms. A kernel depends on one constant of each kind, so one difference per kind
gives all slopes (Curtis, Powell and Reid, "On the estimation of sparse Jacobian matrices", 1974).

A device's own constants from a user's measured rows, the shipped ones as prior. Start at :func:`update`.

Few rows cannot tell the classes of kernels apart, so what is fitted are the factors on matrix units, float32 units and memory,
and the host's times; shares by class stay. How sure predictions are afterwards is told by the rows themselves: each model, or
where there is one model only each batch size, is predicted by a fit to the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from ddltool.analyzers.costs.kernel_times import (
    ARITHMETIC,
    FEED,
    TRAFFIC,
    UNITS,
    Constants,
    Demand,
    by_library,
    demand_of,
    seconds,
)
from ddltool.analyzers.costs.kernels import kernels_of
from ddltool.analyzers.costs.model import HOST_BOUND, LIBRARY_BOUND, OPTIMIZERS, VIEW, CostModel, cost_model
from ddltool.calibration import CalibrationTable, DeviceFit, Residuals
from ddltool.device import Device
from ddltool.errors import InputError
from ddltool.graph import COMPUTE, SEND, Graph

Array = NDArray[np.float64]
_SCALARS = ("start_s", "cache", "turn_s", "issue_s", "update_s")
# Host and device time meet softly here, as cases hold kernels without their order.
_MEETING = 6.0
_STEP = 1e-5
# Seconds that a setting adds, before anything is known of it.
_ADDED_S = 0.01


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One measured step and what it asks of its device."""

    demand: Demand
    """Of ``k`` kernels, alike ones once."""
    count: Array
    """(k,) how often each runs."""
    ops: int
    """Ops that launch kernels."""
    views: int
    """Ops that do not."""
    update_traffic_s: float
    """Seconds of the update's traffic at full bandwidth."""
    tensors: int
    """Parameter tensors that are updated."""
    generation: str
    """The device's architecture."""
    measured_s: float
    weight: float = 1.0
    error: float = 0.1
    """Relative error that is expected of such a measurement, model and prediction together."""
    setting: str = ""
    """What adds the same seconds to every step beside it, such as a loader of data; empty where nothing does."""


@dataclass(frozen=True, kw_only=True)
class Belief:
    """Constants, and how far each may be off (standard deviation of its logarithm)."""

    constants: Constants
    generations: Mapping[str, Mapping[str, float]]
    """Factors by generation and unit, 1 where nothing is known."""
    spread: Mapping[str, float]
    """By name as :func:`names` gives them; a name that is missing has the spread of what it starts with, else of ``*``."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """Seconds that a setting adds to each step."""

    def spread_of(self, name: str) -> float:
        """Return how far a constant may be off."""
        return self.spread.get(name, self.spread.get(name.partition(":")[0], self.spread["*"]))

    def at(self, generation: str) -> Constants:
        """Return the constants with a generation's factors; with none where it is not known."""
        return replace(self.constants, units=dict(self.generations.get(generation, dict.fromkeys(UNITS, 1.0))))


def names(generations: Sequence[str], settings: Sequence[str] = ()) -> list[str]:
    """Return the names of all constants in the order in which they are fitted."""
    shares = [
        *(f"arithmetic:{n}" for n in ARITHMETIC),
        *(f"traffic:{n}" for n in TRAFFIC),
        *(f"feed:{n}" for n in FEED),
    ]
    factors = [f"{unit}:{generation}" for generation in generations for unit in UNITS]
    return [*shares, *_SCALARS, *factors, *(f"setting:{setting}" for setting in settings)]


def _to_vector(belief: Belief, generations: Sequence[str], settings: Sequence[str]) -> Array:
    constants = belief.constants
    values = [constants.arithmetic[n] for n in ARITHMETIC] + [constants.traffic[n] for n in TRAFFIC]
    values += [constants.feed[n] for n in FEED] + [getattr(constants, n) for n in _SCALARS]
    values += [belief.generations.get(g, {}).get(unit, 1.0) for g in generations for unit in UNITS]
    values += [belief.settings.get(setting, _ADDED_S) for setting in settings]
    made: Array = np.log(np.array(values))
    return made


def _from_vector(logs: Array, generations: Sequence[str], settings: Sequence[str], belief: Belief) -> Belief:
    values = iter(np.exp(logs).tolist())
    constants = Constants(
        arithmetic={n: next(values) for n in ARITHMETIC},
        traffic={n: next(values) for n in TRAFFIC},
        feed={n: next(values) for n in FEED},
        **{n: next(values) for n in _SCALARS},
    )
    factors = {generation: {unit: next(values) for unit in UNITS} for generation in generations}
    of_settings = {setting: next(values) for setting in settings}
    return replace(
        belief,
        constants=constants,
        generations={**belief.generations, **factors},
        settings={**belief.settings, **of_settings},
    )


class _Stack:
    """All cases in one table, so that one pass over arrays gives every predicted step."""

    def __init__(self, cases: Sequence[Case]) -> None:
        parts = {f.name: [getattr(case.demand, f.name) for case in cases] for f in fields(Demand)}
        self.demand = Demand(**{name: np.concatenate(values) for name, values in parts.items()})
        self.count = np.concatenate([case.count for case in cases])
        lengths = [len(case.count) for case in cases]
        self.case = np.repeat(np.arange(len(cases)), lengths)
        names_, self.generation = np.unique([case.generation for case in cases], return_inverse=True)
        self.generations = [str(name) for name in names_]
        settings = [case.setting for case in cases]
        self.settings = sorted(set(settings) - {""})
        self.setting = np.array([self.settings.index(name) if name else -1 for name in settings])
        self.issued = np.array([case.ops + VIEW * case.views for case in cases])
        self.traffic_s = np.array([case.update_traffic_s for case in cases])
        self.tensors = np.array([case.tensors for case in cases], dtype=np.float64)

    def steps_s(self, belief: Belief) -> Array:
        """Return (cases,) predicted seconds."""
        device, host = self.device_s(belief), self.host_s(belief)
        made: Array = _met(device, host) + sum(self._update_s(belief)) + self._added_s(belief)
        return made

    def device_s(self, belief: Belief) -> Array:
        """Return (cases,) seconds of all kernels, one after another."""
        return self._per_case(self._kernels_s(self._constants(belief)))

    def host_s(self, belief: Belief) -> Array:
        """Return (cases,) seconds in which the host issues all ops."""
        made: Array = belief.constants.issue_s * self.issued
        return made

    def slopes(self, belief: Belief) -> Array:
        """Return (cases, constants) d log(seconds) / d log(constant), constants as :func:`names` gives them."""
        width = len(names(self.generations, self.settings))
        constants = self._constants(belief)
        kernels = self._kernels_s(constants)
        flat = np.zeros(len(self.issued) * width)
        for bumped, column in self._bumps(constants):
            slope = (self._kernels_s(bumped) - kernels) / _STEP
            chosen = (column >= 0) & (slope != 0.0)
            place = self.case[chosen] * width + column[chosen]
            flat += np.bincount(place, weights=slope[chosen], minlength=len(flat))
        slopes = flat.reshape(-1, width)
        device, host = self._per_case(kernels), self.host_s(belief)
        met, every = _met(device, host), np.arange(len(host))
        slopes *= ((_met(device * (1.0 + _STEP), host) - met) / (_STEP * device))[:, None]
        columns = {name: place for place, name in enumerate(names(self.generations, self.settings))}
        slopes[:, columns["issue_s"]] += (_met(device, host * (1.0 + _STEP)) - met) / _STEP
        traffic, tensors = self._update_s(belief)
        memory = len(ARITHMETIC) + len(TRAFFIC) + len(FEED) + len(_SCALARS) + len(UNITS) * self.generation
        slopes[every, memory + UNITS.index("memory")] -= traffic
        slopes[:, columns["traffic:pointwise"]] -= traffic
        slopes[:, columns["update_s"]] += tensors
        added = self._added_s(belief)
        if self.settings:
            slopes[every, width - len(self.settings) + np.maximum(self.setting, 0)] += added
        slopes /= (met + traffic + tensors + added)[:, None]
        return slopes

    def _bumps(self, constants: Constants) -> Iterator[tuple[Constants, NDArray[np.intp]]]:
        """Yield constants with all of a kind raised by ``_STEP``, and (kernels,) which of them each kernel depends on."""
        more = 1.0 + _STEP
        arithmetic_of = self.demand.arithmetic_of
        raised = {name: share * more for name, share in constants.arithmetic.items()}
        yield replace(constants, arithmetic=raised), arithmetic_of
        raised = {name: share * more for name, share in constants.traffic.items()}
        yield replace(constants, traffic=raised), len(ARITHMETIC) + self.demand.traffic_of
        place = np.array([FEED.index(name) if name in FEED else -1 for name in ARITHMETIC])[arithmetic_of]
        start = len(ARITHMETIC) + len(TRAFFIC)
        raised = {name: share * more for name, share in constants.feed.items()}
        yield replace(constants, feed=raised), np.where((arithmetic_of >= 0) & (place >= 0), start + place, -1)
        start += len(FEED)
        for name in ("start_s", "cache", "turn_s"):
            bumped = replace(constants, **{name: getattr(constants, name) * more})
            yield bumped, np.full(len(self.case), start + _SCALARS.index(name))
        start += len(_SCALARS)
        generation = len(UNITS) * self.generation[self.case]
        for number, unit in enumerate(UNITS):
            units = {**constants.units, unit: constants.units[unit] * more}
            yield replace(constants, units=units), start + generation + number

    def _constants(self, belief: Belief) -> Constants:
        """Return the constants with (kernels,) factors of each kernel's generation."""
        known = [belief.at(name).units for name in self.generations]
        of_case = {unit: np.array([units[unit] for units in known])[self.generation] for unit in UNITS}
        units = {unit: factors[self.case] for unit, factors in of_case.items()}
        return replace(belief.constants, units=units)  # type: ignore[arg-type]

    def _kernels_s(self, constants: Constants) -> Array:
        made: Array = self.count * seconds(self.demand, constants)
        return made

    def _per_case(self, values: Array) -> Array:
        made: Array = np.bincount(self.case, weights=values, minlength=len(self.issued)).astype(np.float64)
        return made

    def _update_s(self, belief: Belief) -> tuple[Array, Array]:
        """Return (cases,) seconds of the update's traffic, and of its tensors."""
        memory = np.array([belief.at(name).units["memory"] for name in self.generations])[self.generation]
        traffic = self.traffic_s / (belief.constants.traffic["pointwise"] * memory)
        return traffic, belief.constants.update_s * self.tensors

    def _added_s(self, belief: Belief) -> Array:
        """Return (cases,) the seconds that each case's setting adds."""
        seconds_of = np.array([*(belief.settings.get(name, _ADDED_S) for name in self.settings), 0.0])
        made: Array = seconds_of[self.setting]
        return made


def _met(device: Array, host: Array) -> Array:
    """Return the time of a pass: the longer of the two, and a little more where they are alike."""
    longer, shorter = np.maximum(device, host), np.minimum(device, host)
    made: Array = longer * (1.0 + (shorter / longer) ** _MEETING) ** (1.0 / _MEETING)
    return made


def steps_s(cases: Sequence[Case], belief: Belief) -> Array:
    """Return (cases,) the predicted seconds of every case."""
    return _Stack(cases).steps_s(belief)


def host_bound(cases: Sequence[Case], belief: Belief) -> NDArray[np.bool_]:
    """Return (cases,) whether the host needs about as long as the device, or longer."""
    stack = _Stack(cases)
    made: NDArray[np.bool_] = stack.host_s(belief) > HOST_BOUND * stack.device_s(belief)
    return made


def library_bound(cases: Sequence[Case], belief: Belief) -> NDArray[np.bool_]:
    """Return (cases,) whether kernels that differ by the library's version say how far off a step is."""
    stack = _Stack(cases)
    kernels_s = stack._kernels_s(stack._constants(belief))
    chosen = stack._per_case(kernels_s * by_library(stack.demand))
    made: NDArray[np.bool_] = chosen > LIBRARY_BOUND * stack._per_case(kernels_s)
    return made


def fit(cases: Sequence[Case], prior: Belief, *, first: Belief | None = None, rounds: int = 30) -> Belief:
    """Return the belief after the cases. O(rounds x kernels).

    Generations and settings that occur in ``cases`` get factors of their own. ``first``: where to begin the search, for a
    fit to cases much like those of an earlier one. Raises ValueError for no cases.
    """
    if not cases:
        raise ValueError("no cases to fit")
    stack = _Stack(cases)
    parts = stack.generations, stack.settings
    start = _to_vector(prior, *parts)
    begin = start if first is None else _to_vector(first, *parts)
    spread = np.array([prior.spread_of(name) for name in names(*parts)])
    measured = np.log([case.measured_s for case in cases])
    scale = np.array([case.weight / case.error for case in cases])
    free = spread > 0

    def at(logs: Array) -> Belief:
        every = start.copy()
        every[free] = logs
        return _from_vector(every, *parts, prior)

    def errors(belief: Belief) -> Array:
        made: Array = (np.log(stack.steps_s(belief)) - measured) * scale
        return made

    def residuals(logs: Array) -> Array:
        off = errors(at(logs))
        soft = np.sign(off) * np.sqrt(2.0 * (np.sqrt(1.0 + off**2) - 1.0))
        made: Array = np.concatenate([soft, (logs - start[free]) / spread[free]])
        return made

    def jacobian(logs: Array) -> Array:
        belief = at(logs)
        root = np.sqrt(1.0 + errors(belief) ** 2)
        of_cases = stack.slopes(belief)[:, free] * (scale * np.sqrt((1.0 + root) / 2.0) / root)[:, None]
        return np.concatenate([of_cases, np.diag(1.0 / spread[free])])

    found = least_squares(residuals, begin[free], jac=jacobian, max_nfev=rounds, x_scale="jac", ftol=1e-5)
    return at(found.x)


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
        update_traffic_s=passes * graph.trained_bytes / (model.device.free_of_codes * model.device.memory_bytes_per_s),
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
