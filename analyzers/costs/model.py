"""The cost model of one device: its datasheet, the constants that hold for it, and how sure its predictions are.

Start at :class:`CostModel`; :func:`cost_model` makes one from the device table and the calibration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from ddltool.analyzers.costs.kernel_times import DATASHEET, UNITS, Constants
from ddltool.analyzers.costs.step import HOST_BOUND, StepTime, time_step
from ddltool.calibration import CalibrationTable, Residuals
from ddltool.device import GIVEN, Device, name_key
from ddltool.graph import Graph

# A host that takes up to this share of the device's time does not show in the step.
_HIDDEN = 0.5
# Generations in the order of their years: one without measured rows lies between its neighbours.
GENERATIONS = ("Kepler", "Maxwell", "Pascal", "Volta", "Turing", "Ampere", "Ada", "Hopper", "Blackwell")


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A prediction in which 80 % of measurements are expected to lie between ``low`` and ``high``."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, eq=False)
class CostModel:
    """Times on one device."""

    device: Device
    constants: Constants
    residuals: Residuals
    """Of a step that is bound by the device."""
    host_residuals: Residuals
    """Of a step that is bound by the host."""

    def step(self, graph: Graph, *, optimizer: str = "none") -> StepTime:
        """Return the predicted time of one step of a traced graph on this device."""
        return time_step(graph, self.device, self.constants, optimizer=optimizer)

    def interval(self, step_s: float, *, host_share: float = 0.0) -> Interval:
        """Return the prediction with its 80 % interval: the wider, the more of the step the host has a part in.

        ``host_share``: what the host takes beside the device; up to half of it is hidden, from ``HOST_BOUND`` on all counts.
        """
        weight = min(1.0, max(0.0, (host_share - _HIDDEN) / (HOST_BOUND - _HIDDEN)))
        low, high = self.residuals.low, self.residuals.high  # the prediction lies between them
        low *= min(self.host_residuals.low / low, 1.0) ** weight
        high *= max(self.host_residuals.high / high, 1.0) ** weight
        return Interval(value=step_s, low=step_s * low, high=step_s * high)

    @property
    def relative_error(self) -> float:
        """Half the width of the interval as a share of the prediction."""
        return (self.residuals.high - self.residuals.low) / 2.0


def cost_model(device: Device, calibration: CalibrationTable) -> CostModel:
    """Return the cost model of a device: with its own fit where a user gave one, else with its generation's factors."""
    host = calibration.residuals["host"]
    own = device.fitted
    if own is not None:
        constants = _constants(calibration, dict(own.units))
        constants = replace(constants, issue_s=own.issue_s, start_s=own.start_s, update_s=own.update_s)
        return CostModel(device=device, constants=constants, residuals=own.residuals, host_residuals=host)
    if device.architecture == "CPU":
        return datasheet(device)
    known = {name_key(name) for name in calibration.devices}
    seen = name_key(device.name) in known and not device.source.startswith(GIVEN)
    kind = "device" if seen else "generation" if device.architecture in calibration.judged else "unknown"
    residuals = calibration.residuals[kind]  # type: ignore[index]
    if device.architecture not in GENERATIONS:
        residuals = _ANOTHER_MAKER
    units = _units(device.architecture, calibration)
    return CostModel(device=device, constants=_constants(calibration, units), residuals=residuals, host_residuals=host)


# Of other makers no row is known: kernels are believed to reach from 45 % to 170 % of what they reach on NVIDIA's, as shares.
_ANOTHER_MAKER = Residuals(
    low=0.6, high=2.2, median_error=0.4, rows=0, what="a belief: no GPU of this maker was measured"
)
# Datasheets alone were between a quarter of a measured step and all of it, on CPUs and GPUs alike.
_UNCALIBRATED = Residuals(low=1.0, high=4.0, median_error=0.6, rows=1, what="the datasheet alone, never measured")


def datasheet(device: Device) -> CostModel:
    """Return the cost model of a device that reaches its datasheet and has no host beside it: how CPUs are estimated."""
    return CostModel(device=device, constants=DATASHEET, residuals=_UNCALIBRATED, host_residuals=_UNCALIBRATED)


def _constants(calibration: CalibrationTable, units: dict[str, float]) -> Constants:
    return Constants(
        arithmetic=calibration.arithmetic,
        traffic=calibration.traffic,
        feed=calibration.feed,
        start_s=calibration.start_s,
        cache=calibration.cache,
        issue_s=calibration.issue_s,
        update_s=calibration.update_s,
        turn_s=calibration.turn_s,
        units=units,
    )


def _units(generation: str, calibration: CalibrationTable) -> dict[str, float]:
    """Return a generation's factors; the geometric mean of its nearest neighbours' where it was not measured, else 1."""
    known = calibration.generations
    if generation in known:
        return dict(known[generation])
    if generation not in GENERATIONS:
        return dict.fromkeys(UNITS, 1.0)
    place = GENERATIONS.index(generation)
    before = next((known[name] for name in reversed(GENERATIONS[:place]) if name in known), None)
    after = next((known[name] for name in GENERATIONS[place:] if name in known), None)
    near = [units for units in (before, after) if units is not None]
    if not near:
        return dict.fromkeys(UNITS, 1.0)
    return {unit: math.exp(float(np.mean([math.log(units[unit]) for units in near]))) for unit in UNITS}
