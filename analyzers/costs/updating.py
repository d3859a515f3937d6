"""A device's own constants from a user's measured rows, the shipped ones as prior. Start at :func:`update`.

Few rows cannot tell thirteen classes of kernels apart, so what is fitted are the factors on matrix units, float32 units and
memory, and the host's times; shares by class stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.costs.fitting import Belief, Case, fit, steps_s
from ddltool.analyzers.costs.kernel_times import UNITS, demand_of
from ddltool.analyzers.costs.kernels import kernels_of
from ddltool.analyzers.costs.model import CostModel, cost_model
from ddltool.analyzers.costs.step import OPTIMIZERS
from ddltool.calibration import CalibrationTable, DeviceFit
from ddltool.device import Device
from ddltool.errors import InputError
from ddltool.graph import COMPUTE, SEND, Graph

_OWN = "own"
# How far a device may be from its generation, and a user's host from the one of the measurements (standard deviations of
# logarithms): between the GPUs of one generation the fitted factors differ by up to a third, between hosts by more.
SPREAD: Mapping[str, float] = {"*": 0.0, **dict.fromkeys(UNITS, 0.3), "start_s": 0.2, "issue_s": 0.5, "update_s": 0.5}


@dataclass(frozen=True, kw_only=True, eq=False)
class Updated:
    """A device with its own constants, and predicted / measured of the rows before and after."""

    device: Device
    before: NDArray[np.float64]
    """(rows,)"""
    after: NDArray[np.float64]


def case_of(graph: Graph, model: CostModel, measured_s: float, *, optimizer: str) -> Case:
    """Return a measured step of one replica as a case for the fit. ``graph``: traced, at the measured batch size."""
    kernels = kernels_of(graph)
    precision, channels_last = str(graph.meta.get("precision", "fp32")), bool(graph.meta.get("channels_last", False))
    passes = OPTIMIZERS[optimizer].passes
    launching = len(np.unique(kernels.op))
    return Case(
        demand=demand_of(kernels, model.device, precision=precision, channels_last=channels_last),
        count=np.ones(len(kernels)),
        ops=launching,
        views=int((graph.kind == COMPUTE).sum()) - launching,
        update_traffic_s=passes * graph.trained_bytes / model.device.memory_bytes_per_s,
        tensors=len(graph.of_kind(SEND)) if passes else 0,
        generation=_OWN,
        measured_s=measured_s,
    )


def update(
    rows: Sequence[tuple[Graph, float]], device: Device, calibration: CalibrationTable, *, optimizer: str, source: str
) -> Updated:
    """Return the device fitted to ``rows``: traced graphs and the measured seconds of their steps on one replica.

    ``source`` names the rows. Rows of one graph count together as one where they are many. Raises InputError for none.
    """
    if not rows:
        raise InputError(source, "has no rows of one replica", "measure with ddltool profile SOURCE --replicas 1")
    model = cost_model(device, calibration)
    cases = [case_of(graph, model, seconds, optimizer=optimizer) for graph, seconds in rows]
    prior = Belief(
        constants=replace(model.constants, units={}), generations={_OWN: model.constants.units}, spread=SPREAD
    )
    found = fit(cases, prior)
    units = dict(found.generations[_OWN])
    measured = np.array([seconds for _, seconds in rows])
    fitted = DeviceFit(
        units=units,
        issue_s=found.constants.issue_s,
        start_s=found.constants.start_s,
        update_s=found.constants.update_s,
        residuals=calibration.residuals["device"],
        source=source,
    )
    return Updated(
        device=device.model_copy(update={"fitted": fitted}),
        before=steps_s(cases, prior) / measured,
        after=steps_s(cases, found) / measured,
    )
