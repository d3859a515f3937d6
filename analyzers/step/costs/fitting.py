"""Fitting the constants of the cost model to measured steps, with the known constants as the prior. Start at :func:`fit`.

A case is one measured step, a belief the constants with how far each may be off, and a setting something that adds the same
seconds to several steps, such as a data loader. Logarithms are natural ones.

Least squares of log(predicted / measured) over all cases, softened against outliers (soft L1), plus the squared distance of
every constant from its prior in units of its standard deviation, so that a constant which the cases do not determine keeps its
prior value. All constants are positive and fitted as logarithms. A kernel depends on one constant of each kind, so one
difference per kind gives all slopes (Curtis, Powell and Reid, "On the estimation of sparse Jacobian matrices", 1974).

:func:`fit_device` fits a device's own constants to a user's measured rows, with the shipped constants as the prior. Few rows
cannot tell the classes of kernels apart, so only the factors on matrix units, float32 units and memory, and the host's times,
are fitted; the shares of single classes stay. The error of later predictions is estimated by cross-validation: each model, or
of a single model each batch size, is predicted by a fit to the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from ddltool.analyzers.step.costs.kernel_times import (
    ARITHMETIC,
    CARRIED,
    FEED,
    TRAFFIC,
    UNITS,
    Constants,
    Demand,
    by_library,
    demand_of,
    seconds,
)
from ddltool.analyzers.step.costs.kernels import kernels_of
from ddltool.analyzers.step.costs.model import HOST_BOUND, LIBRARY_BOUND, VIEW, CostModel, cost_model
from ddltool.analyzers.step.costs.optimizers import update_of
from ddltool.arrays import Flags, Floats
from ddltool.calibration import CalibrationTable, DeviceFit, Residuals
from ddltool.device import Device
from ddltool.errors import InputError
from ddltool.graph import COMPUTE, SEND, Graph

# The constants that are single numbers, not a number for each class of kernels: the device's three, then the host's two.
_SCALARS = ("start_s", "cache", "turn_s", "issue_s", "update_s")
# The power of the norm that combines the host's and the device's time: about the longer one, and more where they are alike,
# because cases hold kernels without their order.
_MEETING = 6.0
# The share by which constants are raised to compute slopes as differences.
_STEP = 1e-5
# The prior for the seconds that a setting adds.
_ADDED_S = 0.01


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One measured step and the work that it asks of its device and host."""

    demand: Demand
    """Of ``k`` distinct kernels."""
    count: Floats
    """(k,) how often each runs."""
    ops: int
    """The number of ops that launch kernels; each takes the host ``issue_s``."""
    views: int
    """The number of ops that launch none, and take the host the share ``VIEW`` of that."""
    tensors: int
    """The number of parameter tensors that are updated."""
    generation: str
    """The device's architecture."""
    measured_s: float
    """Seconds of the step."""
    weight: float = 1.0
    """The weight of its error."""
    error: float = 0.1
    """The relative error that is expected of measurement and prediction together."""
    setting: str = ""
    """The name of something that adds the same seconds to every step, such as a data loader; "" for nothing."""


@dataclass(frozen=True, kw_only=True)
class Belief:
    """Constants, and the standard deviation of the logarithm of each."""

    constants: Constants
    generations: Mapping[str, Mapping[str, float]]
    """Factors by generation and unit, 1 where nothing is known."""
    spread: Mapping[str, float]
    """Standard deviations by name (:func:`names`), by the part of a name before ":", or for all others by ``*``."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """By setting, the seconds that it adds to each step."""

    def spread_of(self, name: str) -> float:
        """Return the standard deviation of the logarithm of the constant with that name (:func:`names`).

        0: the constant is fixed. The entry of ``spread`` for the whole name counts, else that for its part before ":", else
        ``*``.
        """
        kind = name.partition(":")[0]
        return self.spread.get(name, self.spread.get(kind, self.spread["*"]))

    def at(self, generation: str) -> Constants:
        """Return the constants with a generation's factors; factors of an unknown generation are 1."""
        factors = self.generations.get(generation, dict.fromkeys(UNITS, 1.0))
        return replace(self.constants, units=dict(factors))


def names(generations: Sequence[str], settings: Sequence[str] = ()) -> list[str]:
    """Return the names of all constants in the order in which they are fitted, such as "arithmetic:attention/tensor".

    Each of ``generations`` has a factor for each unit, and each of ``settings`` (see :class:`Case`) has seconds of its own.
    """
    shares = [
        *(f"arithmetic:{n}" for n in ARITHMETIC),
        *(f"traffic:{n}" for n in TRAFFIC),
        *(f"feed:{n}" for n in FEED),
        *(f"carried:{n}" for n in CARRIED),
    ]
    factors = [f"{unit}:{generation}" for generation in generations for unit in UNITS]
    return [*shares, *_SCALARS, *factors, *(f"setting:{setting}" for setting in settings)]


def _to_vector(belief: Belief, generations: Sequence[str], settings: Sequence[str]) -> Floats:
    """Return (constants,) the logarithms of a belief's constants, in the order of :func:`names` for the same arguments.

    A generation or setting that the belief does not know gets the values with which a fit begins.
    """
    constants = belief.constants
    values = [constants.arithmetic[n] for n in ARITHMETIC] + [constants.traffic[n] for n in TRAFFIC]
    values += [constants.feed[n] for n in FEED] + [constants.carried[n] for n in CARRIED]
    values += [getattr(constants, n) for n in _SCALARS]
    values += [belief.generations.get(g, {}).get(unit, 1.0) for g in generations for unit in UNITS]
    values += [belief.settings.get(setting, _ADDED_S) for setting in settings]
    logarithms: Floats = np.log(np.array(values))
    return logarithms


def _from_vector(logs: Floats, generations: Sequence[str], settings: Sequence[str], belief: Belief) -> Belief:
    """Return ``belief`` with the constants whose logarithms are ``logs``, as :func:`_to_vector` orders them.

    Generations and settings that are not named, and all spreads, stay as they are.
    """
    values = iter(np.exp(logs).tolist())
    constants = Constants(
        arithmetic={n: next(values) for n in ARITHMETIC},
        traffic={n: next(values) for n in TRAFFIC},
        feed={n: next(values) for n in FEED},
        carried={n: next(values) for n in CARRIED},
        **{n: next(values) for n in _SCALARS},
    )
    factors = {generation: {unit: next(values) for unit in UNITS} for generation in generations}
    added_s = {setting: next(values) for setting in settings}
    return replace(
        belief,
        constants=constants,
        generations={**belief.generations, **factors},
        settings={**belief.settings, **added_s},
    )


class _Stack:
    """All cases with their kernels in one table, as (kernels,) and (cases,) arrays, to predict all steps at once.

    A case is a measured step on a device of a ``generation``, which has factors of its own; its ``setting`` adds a constant
    time to it, such as a data loader's. A :class:`Belief` holds the constants by which steps are predicted.
    """

    def __init__(self, cases: Sequence[Case]) -> None:
        """Join the cases' kernels, and note for each kernel its case, and for each case its generation and setting."""
        values_by_field = {f.name: [getattr(case.demand, f.name) for case in cases] for f in fields(Demand)}
        self.demand = Demand(**{name: np.concatenate(values) for name, values in values_by_field.items()})
        self.count = np.concatenate([case.count for case in cases])
        lengths = [len(case.count) for case in cases]
        self.case = np.repeat(np.arange(len(cases)), lengths)
        """(kernels,) the index of the case that a kernel belongs to."""
        generations, self.generation = np.unique([case.generation for case in cases], return_inverse=True)
        self.generations = [str(name) for name in generations]
        """The names of all generations; ``generation`` (cases,) are indices into them."""
        settings = [case.setting for case in cases]
        self.settings = sorted(set(settings) - {""})
        self.setting = np.array([self.settings.index(name) if name else -1 for name in settings])
        """(cases,) the index of a case's setting in ``settings``; -1: it has none."""
        # A fraction, because a view takes the host only a part of an op's time.
        self.issued = np.array([case.ops + VIEW * case.views for case in cases])
        """(cases,) how many ops the host issues, where a view counts as the share ``VIEW`` of one."""
        self.tensors = np.array([case.tensors for case in cases], dtype=np.float64)
        """(cases,) parameter tensors that are updated."""

    def steps_s(self, belief: Belief) -> Floats:
        """Return (cases,) the predicted seconds of each step: its pass, its update per tensor, and what its setting adds."""
        pass_s = _combine_host_and_device(self.device_s(belief), self.host_s(belief))
        predicted_s: Floats = pass_s + self._tensors_s(belief) + self._added_s(belief)
        return predicted_s

    def device_s(self, belief: Belief) -> Floats:
        """Return (cases,) seconds of all kernels, one after another."""
        return self._per_case(self._kernels_s(self._constants(belief)))

    def host_s(self, belief: Belief) -> Floats:
        """Return (cases,) seconds in which the host issues all ops."""
        issued_s: Floats = belief.constants.issue_s * self.issued
        return issued_s

    def slopes(self, belief: Belief) -> Floats:
        """Return (cases, constants) the derivatives d log(seconds) / d log(constant), with constants as in :func:`names`."""
        column_names = names(self.generations, self.settings)
        constants = self._constants(belief)
        kernels_s = self._kernels_s(constants)
        slopes = self._device_slopes(constants, kernels_s, len(column_names))
        # By the chain rule, from the device's seconds to those of the pass.
        device_s, host_s = self._per_case(kernels_s), self.host_s(belief)
        pass_s = _combine_host_and_device(device_s, host_s)
        raised_device_pass_s = _combine_host_and_device(device_s * (1.0 + _STEP), host_s)
        slopes *= ((raised_device_pass_s - pass_s) / (_STEP * device_s))[:, None]
        # The constants of the host, each of which has a column of its own.
        raised_host_pass_s = _combine_host_and_device(device_s, host_s * (1.0 + _STEP))
        slopes[:, column_names.index("issue_s")] += (raised_host_pass_s - pass_s) / _STEP
        tensors_s = self._tensors_s(belief)
        slopes[:, column_names.index("update_s")] += tensors_s
        added_s = self._added_s(belief)
        if self.settings:  # the last columns; a case without a setting adds 0 to the first of them
            setting_column = len(column_names) - len(self.settings) + np.maximum(self.setting, 0)
            slopes[np.arange(len(host_s)), setting_column] += added_s
        # From d seconds to d log(seconds).
        slopes /= (pass_s + tensors_s + added_s)[:, None]
        return slopes

    def _device_slopes(self, constants: Constants, kernels_s: Floats, columns_count: int) -> Floats:
        """Return (cases, columns) the derivatives d (device's seconds) / d log(constant), with columns as in :func:`names`.

        Each kernel uses at most one constant of a kind, so all of a kind are raised together: one difference gives the slope
        of every kernel, and their sums give that of every constant. ``kernels_s`` (kernels,): seconds with ``constants``.
        """
        flat = np.zeros(len(self.issued) * columns_count)
        for raised, column in self._raise_by_kind(constants):
            slope = (self._kernels_s(raised) - kernels_s) / _STEP
            is_nonzero = (column >= 0) & (slope != 0.0)
            flat_index = self.case[is_nonzero] * columns_count + column[is_nonzero]
            flat += np.bincount(flat_index, weights=slope[is_nonzero], minlength=len(flat))
        return flat.reshape(-1, columns_count)

    def _raise_by_kind(self, constants: Constants) -> Iterator[tuple[Constants, NDArray[np.intp]]]:
        """Yield, for each kind of constants, (constants with all of that kind raised by ``_STEP``, column of each kernel).

        Columns (kernels,) are indices into :func:`names`: that of the constant which the kernel uses; -1: it uses none of the
        kind. The kinds are, in the order of their columns, the shares of arithmetic and of traffic, ``feed``, ``carried``, each
        scalar of kernels, and each unit's factors.
        """
        factor = 1.0 + _STEP

        def raised(values: Mapping[str, float]) -> dict[str, float]:
            """Return all values raised by ``_STEP``."""
            return {name: value * factor for name, value in values.items()}

        arithmetic_of, traffic_of = self.demand.arithmetic_of, self.demand.traffic_of
        yield replace(constants, arithmetic=raised(constants.arithmetic)), arithmetic_of
        yield replace(constants, traffic=raised(constants.traffic)), len(ARITHMETIC) + traffic_of
        first_column = len(ARITHMETIC) + len(TRAFFIC)
        feed_index = np.array([FEED.index(name) if name in FEED else -1 for name in ARITHMETIC])[arithmetic_of]
        is_fed = (arithmetic_of >= 0) & (feed_index >= 0)
        yield replace(constants, feed=raised(constants.feed)), np.where(is_fed, first_column + feed_index, -1)
        first_column += len(FEED)
        carried_index = np.array([CARRIED.index(name) if name in CARRIED else -1 for name in TRAFFIC])[traffic_of]
        carried_column = np.where(carried_index >= 0, first_column + carried_index, -1)
        yield replace(constants, carried=raised(constants.carried)), carried_column
        first_column += len(CARRIED)
        for name in _SCALARS[:3]:  # kernels do not depend on the host's two
            raised_constants = replace(constants, **{name: getattr(constants, name) * factor})
            yield raised_constants, np.full(len(self.case), first_column + _SCALARS.index(name))
        first_column += len(_SCALARS)
        generation_column = first_column + len(UNITS) * self.generation[self.case]  # of the first unit
        for unit_index, unit in enumerate(UNITS):
            units = {**constants.units, unit: constants.units[unit] * factor}
            yield replace(constants, units=units), generation_column + unit_index

    def _constants(self, belief: Belief) -> Constants:
        """Return the belief's constants for all kernels at once.

        ``units`` has an array (kernels,) by unit: for each kernel, the factor of its device's generation. All other constants
        are those of the belief, which all generations share.
        """
        # (kernels,) the index in ``generations`` of each kernel: that of its case.
        generation_of_kernel = self.generation[self.case]
        factors_by_generation = [belief.at(name).units for name in self.generations]
        units = {}
        for unit in UNITS:
            factors = np.array([factor_of[unit] for factor_of in factors_by_generation])  # (generations,)
            units[unit] = factors[generation_of_kernel]
        return replace(belief.constants, units=units)  # type: ignore[arg-type]

    def _kernels_s(self, constants: Constants) -> Floats:
        """Return (kernels,) the seconds of all runs of each kernel."""
        kernels_s: Floats = self.count * seconds(self.demand, constants)
        return kernels_s

    def _per_case(self, values: Floats) -> Floats:
        """Return (cases,) the sums of ``values`` (kernels,) over the kernels of each case."""
        sums: Floats = np.bincount(self.case, weights=values, minlength=len(self.issued)).astype(np.float64)
        return sums

    def _tensors_s(self, belief: Belief) -> Floats:
        """Return (cases,) the seconds of the update per tensor."""
        tensors_s: Floats = belief.constants.update_s * self.tensors
        return tensors_s

    def _added_s(self, belief: Belief) -> Floats:
        """Return (cases,) the seconds that each case's setting adds."""
        # The index -1, of a case without a setting, finds the 0 at the end.
        setting_s = np.array([*(belief.settings.get(name, _ADDED_S) for name in self.settings), 0.0])
        added_s: Floats = setting_s[self.setting]
        return added_s


def _combine_host_and_device(device_s: Floats, host_s: Floats) -> Floats:
    """Return (cases,) the seconds of a pass: the longer of the two times, and somewhat more where they are alike."""
    longer_s, shorter_s = np.maximum(device_s, host_s), np.minimum(device_s, host_s)
    pass_s: Floats = longer_s * (1.0 + (shorter_s / longer_s) ** _MEETING) ** (1.0 / _MEETING)
    return pass_s


def steps_s(cases: Sequence[Case], belief: Belief) -> Floats:
    """Return (cases,) the predicted seconds of every case."""
    return _Stack(cases).steps_s(belief)


def host_bound(cases: Sequence[Case], belief: Belief) -> Flags:
    """Return (cases,) whether the host needs about as long as the device, or longer."""
    stack = _Stack(cases)
    is_bound: Flags = stack.host_s(belief) > HOST_BOUND * stack.device_s(belief)
    return is_bound


def library_bound(cases: Sequence[Case], belief: Belief) -> Flags:
    """Return (cases,) whether kernels that depend on a library's version take over ``LIBRARY_BOUND`` of the device's time."""
    stack = _Stack(cases)
    kernels_s = stack._kernels_s(stack._constants(belief))
    library_s = stack._per_case(kernels_s * by_library(stack.demand))
    is_bound: Flags = library_s > LIBRARY_BOUND * stack._per_case(kernels_s)
    return is_bound


def fit(cases: Sequence[Case], prior: Belief, *, first: Belief | None = None, rounds: int = 30) -> Belief:
    """Return ``prior`` updated by the measured steps: the constants that predict them best while staying near the prior.

    Generations and settings that occur in ``cases`` get constants of their own. Constants with spread 0 stay fixed.

    Args:
        cases: the measured steps.
        prior: the constants before the fit, and how far each may move.
        first: where the search begins, such as the result of a fit to similar cases; None: at ``prior``.
        rounds: the most evaluations of all predictions.

    O(rounds x kernels). Raises ValueError for no cases.
    """
    if not cases:
        raise ValueError("no cases to fit")
    stack = _Stack(cases)  # predicts the steps of all cases at once
    generations, settings = stack.generations, stack.settings
    prior_logs = _to_vector(prior, generations, settings)
    first_logs = prior_logs if first is None else _to_vector(first, generations, settings)
    spread = np.array([prior.spread_of(name) for name in names(generations, settings)])
    measured_logs = np.log([case.measured_s for case in cases])
    weights = np.array([case.weight / case.error for case in cases])
    is_free = spread > 0

    def belief_at(logs: Floats) -> Belief:
        """Return the belief with these logarithms (free,) of the constants that are not fixed."""
        all_logs = prior_logs.copy()
        all_logs[is_free] = logs
        return _from_vector(all_logs, generations, settings, prior)

    def errors(belief: Belief) -> Floats:
        """Return (cases,) log(predicted / measured), in units of the error that is expected."""
        weighted: Floats = (np.log(stack.steps_s(belief)) - measured_logs) * weights
        return weighted

    def residuals(logs: Floats) -> Floats:
        """Return (cases + free,) what the solver sums the squares of: softened errors, then distances from the prior.

        ``logs`` (free,): the logarithms of the constants that are not fixed.
        """
        weighted_errors = errors(belief_at(logs))
        # Soft L1: half the square of this is sqrt(1 + error^2) - 1, which grows like the error itself where it is large.
        soft_errors = np.sign(weighted_errors) * np.sqrt(2.0 * (np.sqrt(1.0 + weighted_errors**2) - 1.0))
        weighted: Floats = np.concatenate([soft_errors, (logs - prior_logs[is_free]) / spread[is_free]])
        return weighted

    def jacobian(logs: Floats) -> Floats:
        """Return (cases + free, free) the derivatives of :func:`residuals` by ``logs``, (free,), in the same order."""
        belief = belief_at(logs)
        log_slopes = stack.slopes(belief)[:, is_free]  # (cases, free) d log(predicted) / d log(constant)
        # By the chain rule: an error e has its case's weight, and the derivative of the softened error by e is
        # sqrt((1 + r) / 2) / r, with r = sqrt(1 + e^2).
        roots = np.sqrt(1.0 + errors(belief) ** 2)
        softened_weights = weights * np.sqrt((1.0 + roots) / 2.0) / roots  # (cases,)
        prior_rows = np.diag(1.0 / spread[is_free])  # of the distances from the prior
        return np.concatenate([log_slopes * softened_weights[:, None], prior_rows])

    solution = least_squares(residuals, first_logs[is_free], jac=jacobian, max_nfev=rounds, x_scale="jac", ftol=1e-5)
    return belief_at(solution.x)


OWN = "own"
"""The name of the generation of a calibrated device's cases, which has no other device."""
# Standard deviations of logarithms: of a device's factors around its generation's, and of a user's host around that of the
# measurements. Between GPUs of one generation the fitted factors differ by up to a third, between hosts by more.
SPREAD: Mapping[str, float] = {"*": 0.0, **dict.fromkeys(UNITS, 0.3), "start_s": 0.2, "issue_s": 0.5, "update_s": 0.5}
# The rate that each unit's main class of kernels reaches is at most this share of the datasheet's. It may exceed the memory's,
# because traffic that a cache serves is counted, too.
_MOST = {"tensor": 1.0, "vector": 1.0, "memory": 1.1}
# All batch sizes of a model together count as at most so many rows, because their errors are alike.
_FEW = 4.0
# The prior counts as so many models; with fewer steps than the second number, its range is not narrowed.
_PRIOR_MODELS, _ENOUGH = 4.0, 5
_FOLDS = 6
# A tenth of a normal distribution lies beyond so many standard deviations.
_TENTH = 1.2816
# Rows are refused as not of this device beyond these: standard deviations from the prior, and the median error.
_FAR, _MEDIAN = 3.0, 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """A measured step of one replica and one pass."""

    model: str
    batch: int
    """Samples."""
    optimizer: str
    """A name of ``OPTIMIZERS``."""
    seconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Updated:
    """A device with its own constants, and how well these predict the measured steps."""

    device: Device
    before: Floats
    """(steps,) predicted / measured of each model, batch size and optimizer before the fit."""
    after: Floats
    """(steps,) the same after the fit."""


def fit_device(
    rows: Sequence[MeasuredStep],
    graph_of: Callable[[str, int], Graph],
    device: Device,
    calibration: CalibrationTable,
    *,
    source: str,
) -> Updated:
    """Return the device with constants fitted to measured rows, and how well they predict these before and after the fit.

    Args:
        rows: measured steps. Repeats of a model, batch size and optimizer count as one; all of a model weigh together as at
            most 4 (``_FEW``), because their errors are alike.
        graph_of: a function that returns the traced graph of a model at a batch size.
        device: the device; an earlier fit in it is ignored.
        calibration: the shipped constants, which are the prior.
        source: the name of the rows, for errors and for the fit's provenance.

    Raises InputError for no rows, and for rows that cannot be of this device.
    """
    if not rows:
        remedy = "measure with ddltool profile SOURCE --replicas 1"
        raise InputError(source, "has no rows of one replica and one pass", remedy)
    model = cost_model(device.model_copy(update={"fitted": None}), calibration)
    steps = merged(rows)
    step_models = [step.model for step in steps]
    cases = [_case_of(graph_of(step.model, step.batch), model, step, step_models.count(step.model)) for step in steps]
    prior = prior_of(model)
    posterior = refit(cases, prior)
    measured_s = np.array([step.seconds for step in steps])
    before_ratios = steps_s(cases, prior) / measured_s
    after_ratios = steps_s(cases, posterior) / measured_s
    _demand_plausible(model, prior, posterior, after_ratios, source)
    fitted = DeviceFit(
        units=dict(posterior.generations[OWN]),
        issue_s=posterior.constants.issue_s,
        start_s=posterior.constants.start_s,
        update_s=posterior.constants.update_s,
        residuals=residuals_after(cases, step_models, prior, model.residuals),
        source=source,
    )
    return Updated(device=device.model_copy(update={"fitted": fitted}), before=before_ratios, after=after_ratios)


def merged(rows: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Return one step for the rows of each model, batch size and optimizer, in that order, with their median time. O(rows).

    The median is of logarithms, so that of two rows it is the geometric mean.
    """
    logs: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for row in rows:
        logs[row.model, row.batch, row.optimizer].append(math.log(row.seconds))
    return [
        MeasuredStep(model=model, batch=batch, optimizer=optimizer, seconds=math.exp(float(np.median(step_logs))))
        for (model, batch, optimizer), step_logs in sorted(logs.items())
    ]


def _case_of(graph: Graph, model: CostModel, step: MeasuredStep, model_steps: int) -> Case:
    """Return a measured step as a case for the fit.

    ``graph``: the step's, traced at its batch size. ``model``: the cost model of the device before the fit. ``model_steps``:
    how many measured steps there are of the same neural network, which share a weight.
    """
    pass_kernels = kernels_of(graph)
    update_kernels = update_of(graph, step.optimizer).kernels
    precision = str(graph.meta.get("precision", "fp32"))
    pass_demand = demand_of(pass_kernels, model.device, precision=precision)
    launching_ops = len(np.unique(pass_kernels.op))
    # Going through the tensors of an update is counted as so many issued ops, so that it scales with the host's speed.
    tensors_as_ops = 0.0
    if len(update_kernels):
        tensors_as_ops = len(graph.of_kind(SEND)) * model.constants.update_s / model.constants.issue_s
    return Case(
        demand=pass_demand.then(demand_of(update_kernels, model.device)),
        count=np.ones(len(pass_kernels) + len(update_kernels)),
        ops=launching_ops + len(update_kernels) + round(tensors_as_ops),
        views=int((graph.kind == COMPUTE).sum()) - launching_ops,
        tensors=0,  # they are counted as ops
        generation=OWN,
        measured_s=step.seconds,
        weight=min(1.0, math.sqrt(_FEW / model_steps)),
    )


def prior_of(model: CostModel) -> Belief:
    """Return the prior of a device before its own rows are read: its model's constants, with ``SPREAD``."""
    return Belief(
        constants=replace(model.constants, units={}), generations={OWN: dict(model.constants.units)}, spread=SPREAD
    )


def refit(cases: Sequence[Case], prior: Belief) -> Belief:
    """Return ``prior`` updated by the cases of one device, with its factors bounded by the datasheet.

    The generation of all cases is ``OWN``. No factor may say that kernels exceed the datasheet: one that would is fixed at its
    bound, and the others are fitted again.
    """
    constants, prior_factors = prior.constants, prior.generations[OWN]
    # The share of the datasheet that the main class of kernels of each unit reaches with a factor of 1.
    reached_shares = {
        "tensor": constants.arithmetic["matrix_product/tensor"],
        "vector": constants.arithmetic["matrix_product/vector"],
        "memory": constants.traffic["pointwise"],
    }
    # A generation's shipped factors may exceed the bound, for large caches and libraries that compute less than is asked for.
    largest_factors = {unit: max(prior_factors[unit], _MOST[unit] / reached_shares[unit]) for unit in UNITS}
    posterior = fit(cases, prior)
    for _ in UNITS:  # each round fixes at least one of the factors, so that there are no more rounds than units
        bounded_factors = {
            unit: largest_factors[unit] for unit in UNITS if posterior.generations[OWN][unit] > largest_factors[unit]
        }
        if not bounded_factors:
            break
        factors = {**prior.generations[OWN], **bounded_factors}
        prior = replace(
            prior, generations={OWN: factors}, spread={**prior.spread, **dict.fromkeys(bounded_factors, 0.0)}
        )
        posterior = fit(cases, prior)
    return posterior


def residuals_after(cases: Sequence[Case], models: Sequence[str], prior: Belief, before: Residuals) -> Residuals:
    """Return the range of measured / predicted after a fit to ``cases``, in which 80 % of later steps are expected.

    ``models``: the name of each case's neural network. ``prior``: the belief before the fit. ``before``: the range before it.
    The logarithms of both sides of that range are scaled by one factor, ``s / s0``. With
    ``s0`` the standard deviation of ``before``, ``r`` the root mean square of the left-out errors (every model weighs the
    same) and ``k`` models beside the first,

        s^2 = max(r^2, (n0 s0^2 + k r^2) / (n0 + k))

    which is the scaled inverse chi-squared update of a variance (Gelman et al., "Bayesian Data Analysis", section 2.6) with a
    prior worth ``n0`` = 4 models, but never less than the rows' own errors. With fewer than 5 steps, or one model, k is 0.
    """
    errors = np.abs(_leave_out_errors(cases, models, prior))
    model_variances = [
        float(np.mean(errors[[name == model_name for model_name in models]] ** 2)) for name in sorted(set(models))
    ]
    row_variance = float(np.mean(model_variances))  # r^2
    prior_variance = _deviation(before) ** 2  # s0^2
    other_models = len(model_variances) - 1 if len(cases) >= _ENOUGH else 0  # k
    pooled_variance = (_PRIOR_MODELS * prior_variance + other_models * row_variance) / (_PRIOR_MODELS + other_models)
    range_factor = math.sqrt(max(row_variance, pooled_variance) / prior_variance)
    median = float(np.median(np.expm1(errors)))
    if len(model_variances) > 1:
        left_out = "the model"
    elif len(cases) > 1:
        left_out = "the batch size"
    else:
        left_out = "any row"
    return Residuals(
        low=float(f"{before.low**range_factor:.4g}"),
        high=float(f"{before.high**range_factor:.4g}"),
        median_error=float(f"{median if other_models else max(median, before.median_error):.4g}"),
        rows=len(cases),
        what=f"{left_out} (own rows of the device, and what was known before them)",
    )


def _leave_out_errors(cases: Sequence[Case], models: Sequence[str], prior: Belief) -> Floats:
    """Return (cases,) log(predicted / measured) of each case under a fit to the cases of all other folds (cross-validation).

    All steps of a model are in one fold; with one model only, each step may be in another. A single case is predicted by the
    prior. ``models``: the name of each case's neural network.
    """
    has_several_models = len(set(models)) > 1
    # What a fold holds as a whole: the steps of a model, or with one model a single step.
    groups = list(models) if has_several_models else [str(case_index) for case_index in range(len(cases))]
    fold_of = {group: fold_index % _FOLDS for fold_index, group in enumerate(dict.fromkeys(groups))}
    fold = np.array([fold_of[group] for group in groups])
    measured_logs = np.log([case.measured_s for case in cases])
    if len(cases) == 1:
        single_errors: Floats = np.log(steps_s(cases, prior)) - measured_logs
        return single_errors
    errors = np.zeros(len(cases))
    for fold_index in set(fold_of.values()):
        is_held_out = fold == fold_index
        training_cases = [case for case, held_out in zip(cases, is_held_out, strict=True) if not held_out]
        held_out_cases = [case for case, held_out in zip(cases, is_held_out, strict=True) if held_out]
        predicted_s = steps_s(held_out_cases, refit(training_cases, prior))
        errors[is_held_out] = np.log(predicted_s) - measured_logs[is_held_out]
    return errors


def _deviation(residuals: Residuals) -> float:
    """Return the standard deviation of the normal distribution of logarithms whose middle 80 % is ``residuals``' range."""
    return math.log(residuals.high / residuals.low) / (2.0 * _TENTH)


def _demand_plausible(model: CostModel, prior: Belief, found: Belief, after: Floats, source: str) -> None:
    """Raise InputError if the measured rows cannot be of the model's device.

    They are not if half of the steps stay far off after the fit, or if a unit's factor moved by more than ``_FAR`` standard
    deviations: the rows are then of another device, unit of time or precision.

    Args:
        model: the cost model of the device before the fit.
        prior, found: the beliefs before and after the fit.
        after: (steps,) predicted / measured after the fit.
        source: the name of the rows, for the error.
    """
    remedy = (
        "check that step_time_s is in seconds, and that device, precision, optimizer and model are those of the rows"
    )
    deviations = np.abs(np.log(after))
    limit = min(_FAR * _deviation(model.residuals), math.log1p(_MEDIAN))
    if (median := float(np.median(deviations))) > limit:
        text = f"after the fit half of the steps are off by a factor of {math.exp(median):.3g} or more"
        raise InputError(source, f"fits no {model.device.name}: {text}", remedy)
    for unit in UNITS:
        factor = found.generations[OWN][unit] / prior.generations[OWN][unit]
        if abs(math.log(factor)) > _FAR * SPREAD[unit]:
            text = f"fits no {model.device.name}: its {_UNIT_NAMES[unit]} would reach {factor:.2g} of what is expected of it"
            raise InputError(source, text, remedy)


_UNIT_NAMES = {"tensor": "matrix units", "vector": "float32 units", "memory": "memory"}
