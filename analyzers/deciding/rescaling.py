"""What a run measured put in place of what fits say, so that all strategies are compared by one source.

Start at :func:`measured_speeds`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ddltool.analyzers.balancing.plan import StepCurve
from ddltool.analyzers.deciding.candidates import Knowledge
from ddltool.analyzers.deciding.feedback import RankRun, Run
from ddltool.analyzers.goodput.throughput import ThroughputParams, sync_time_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """The device types of a run."""

    capabilities: Mapping[str, float]
    """Mini-batches per second by device type, of a device that computes one mini-batch at a time."""
    factors: Mapping[str, float]
    """Measured compute over what the type's fit says of the measured batch; for the types that have a fit."""


def measured_speeds(run: Run, batch_size: int, curves: Mapping[str, StepCurve]) -> Speeds:
    """Return how fast the run's device types are with mini-batches of ``batch_size`` samples; the median rank's.

    A type with a fit keeps the fit's shape: its curve, multiplied so that the measured batch takes the measured time.
    Any other type takes a time proportional to its samples, or to its saturation where there are fewer.
    """
    factors: dict[str, float] = {}
    capabilities: dict[str, float] = {}
    by_device: dict[str, list[RankRun]] = {}
    for rank in run.ranks:
        by_device.setdefault(rank.device, []).append(rank)
    for device, ranks in by_device.items():
        curve = curves.get(device) or StepCurve()
        if is_fitted(curve):
            factor = float(np.median([rank.compute_s / _fitted_s(curve, rank.batch, rank.passes) for rank in ranks]))
            factors[device] = factor
            capabilities[device] = 1.0 / (factor * _fitted_s(curve, batch_size, 1))
        else:
            rates = [max(rank.batch, rank.passes * curve.saturation) / rank.compute_s for rank in ranks]
            capabilities[device] = float(np.median(rates)) / batch_size
    return Speeds(capabilities=capabilities, factors=factors)


def is_fitted(curve: StepCurve) -> bool:
    """Return whether a curve's times come from a fit, and not from the type's capability."""
    return curve.per_sample_s is not None and (curve.launch_s > 0 or curve.per_sample_s > 0)


def scaled_curve(curve: StepCurve, factor: float) -> StepCurve:
    """Return the curve on which every fitted time is ``factor`` times as long; limits and saturation stay."""
    per_sample_s = None if curve.per_sample_s is None else curve.per_sample_s * factor
    return replace(curve, launch_s=curve.launch_s * factor, per_sample_s=per_sample_s)


def scaled_model(model: ThroughputParams, factor: float, run: Run) -> ThroughputParams:
    """Return a fitted model whose compute is ``factor`` times as long and whose synchronisation is the run's.

    The synchronisation that a run leaves exposed behind its longest compute c, m seconds, is the model's
    ``((c + m)^gamma - c^gamma)^(1/gamma)`` (Pollux, section 3.2, solved for the synchronisation). A run of one process
    says nothing about it: it stays as fitted.
    """
    made = replace(model, alpha_grad_s=model.alpha_grad_s * factor, beta_grad_s=model.beta_grad_s * factor)
    if run.world_size < 2:
        return made
    longest = max(rank.compute_s for rank in run.ranks)
    seconds = longest * float(((1 + run.sync_s / longest) ** model.gamma - 1) ** (1 / model.gamma))
    fitted = float(sync_time_s(model, run.num_nodes, run.world_size))
    if fitted > 0:
        by = seconds / fitted
        return replace(
            made,
            alpha_sync_local_s=model.alpha_sync_local_s * by,
            beta_sync_local_s=model.beta_sync_local_s * by,
            alpha_sync_node_s=model.alpha_sync_node_s * by,
            beta_sync_node_s=model.beta_sync_node_s * by,
        )
    if run.num_nodes < 2:
        return replace(made, alpha_sync_local_s=seconds, beta_sync_local_s=0.0)
    return replace(made, alpha_sync_node_s=seconds, beta_sync_node_s=0.0)


def with_run(knowledge: Knowledge, run: Run, factors: Mapping[str, float]) -> Knowledge:
    """Return what is known with every fit made to agree with ``run``.

    ``factors``: by how much the compute of each device type is longer than its fit says.
    """
    curves = {name: scaled_curve(curve, factors.get(name, 1.0)) for name, curve in knowledge.curves.items()}
    models = {name: scaled_model(model, factors.get(name, 1.0), run) for name, model in knowledge.models.items()}
    return replace(knowledge, curves=curves, models=models)


def _fitted_s(curve: StepCurve, samples: int, passes: int) -> float:
    """Return a fitted curve's seconds for ``samples`` in so many equal passes."""
    assert curve.per_sample_s is not None  # is_fitted
    return passes * curve.launch_s + curve.per_sample_s * max(samples, passes * curve.saturation)
