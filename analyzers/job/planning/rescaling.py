"""Corrects fitted and predicted times by an earlier run's measured ones, so that all strategies are compared by one source.

Start at :func:`measured_speeds`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ddltool.analyzers.job.goodput.step_time import StepTime
from ddltool.analyzers.job.goodput.throughput import ThroughputParams, sync_time_s
from ddltool.analyzers.job.planning.job_model import JobModel
from ddltool.analyzers.step.measured.feedback import RankRun, Run

# Ratio of measured to predicted speed from which on the predictions of the other types are scaled as well.
RESCALED_FROM = 2.0


def measured_speeds(
    run: Run, batch_size: int, curves: Mapping[str, StepTime]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return how fast the run's device types are with mini-batches of ``batch_size`` samples, and how far fits were off.

    Both by device type: mini-batches per second of the median rank, and measured compute over what the type's fit says of
    the measured batch. A type with a fit keeps the fit's shape: its curve, multiplied so that the measured batch takes the
    measured time. Any other type takes a time proportional to its samples, or to its saturation where there are fewer.
    """
    factors: dict[str, float] = {}
    capabilities: dict[str, float] = {}
    by_device: dict[str, list[RankRun]] = {}
    for rank in run.ranks:
        by_device.setdefault(rank.device, []).append(rank)
    for device, ranks in by_device.items():
        curve = curves.get(device) or StepTime()
        if curve.per_sample_s is not None and (curve.launch_s > 0 or curve.per_sample_s > 0):
            factor = float(np.median([rank.compute_s / curve.seconds(rank.batch, rank.passes) for rank in ranks]))
            factors[device] = factor
            capabilities[device] = 1.0 / (factor * curve.seconds(batch_size))
        else:
            rates = [max(rank.batch, rank.passes * curve.saturation) / rank.compute_s for rank in ranks]
            capabilities[device] = float(np.median(rates)) / batch_size
    return capabilities, factors


@dataclass(frozen=True, kw_only=True, slots=True)
class Combined:
    """Speeds of all offered device types: of some measured, of the others predicted."""

    capabilities: Mapping[str, float]
    """Mini-batches per second by device type."""
    errors: Mapping[str, float]
    """Relative error of the types whose prediction was scaled."""
    remark: str
    """What a reader must know before comparing one with the other; empty where all types are measured."""


def combine(measured: Mapping[str, float], predicted: Mapping[str, float]) -> Combined:
    """Return the measured speeds, and for types without one the predictions, scaled where measured types were far off.

    Both are mini-batches per second by device type; ``predicted`` holds the measured types as well, as far as something
    predicts them. Where a measured type is more than ``RESCALED_FROM`` times off its own prediction, whatever made it so
    (another machine posing as it, a model the roofline does not know) makes it for the others too: they are scaled by
    the geometric mean of measured over predicted, with the spread of these ratios as their error, at least 50 %.
    """
    predicted_others = {name: rate for name, rate in predicted.items() if name not in measured}
    errors: dict[str, float] = {}
    remark = ""
    if measured and predicted_others:
        remark = f"{', '.join(sorted(measured))} measured, {', '.join(sorted(predicted_others))} predicted"
        ratios = [rate / predicted[name] for name, rate in measured.items() if predicted.get(name, 0.0) > 0]
        if not ratios:
            remark += ", and nothing tells how far predictions are off here"
        elif not all(1 / RESCALED_FROM <= ratio <= RESCALED_FROM for ratio in ratios):
            scale = float(np.exp(np.mean(np.log(ratios))))
            remark += f": measured speeds are {scale:.2g} times their own prediction, so the predicted ones are scaled as well"
            errors = dict.fromkeys(predicted_others, max(0.5, max(ratios) / min(ratios) - 1))
            predicted_others = {name: rate * scale for name, rate in predicted_others.items()}
    return Combined(capabilities={**predicted_others, **measured}, errors=errors, remark=remark)


def with_run(knowledge: JobModel, run: Run, factors: Mapping[str, float]) -> JobModel:
    """Return ``knowledge`` with every curve and model scaled to agree with ``run``.

    ``factors``: by how much the compute of each device type is longer than its fit says.
    """
    curves = {name: curve.scaled(factors.get(name, 1.0)) for name, curve in knowledge.curves.items()}
    models = {name: scaled_model(model, factors.get(name, 1.0), run) for name, model in knowledge.models.items()}
    return replace(knowledge, curves=curves, models=models)


def scaled_model(model: ThroughputParams, factor: float, run: Run) -> ThroughputParams:
    """Return a fitted model whose compute is ``factor`` times as long and whose synchronisation is the run's.

    The synchronisation that a run leaves exposed behind its longest compute c, m seconds, is the model's
    ``((c + m)^gamma - c^gamma)^(1/gamma)`` (Pollux, section 3.2, solved for the synchronisation). A run of one process
    says nothing about it: it stays as fitted.
    """
    scaled = {"alpha_grad_s": model.alpha_grad_s * factor, "beta_grad_s": model.beta_grad_s * factor}
    if run.world_size > 1:
        longest_s = max(rank.compute_s for rank in run.ranks)
        sync_s = longest_s * float(((1 + run.sync_s / longest_s) ** model.gamma - 1) ** (1 / model.gamma))
        fitted_s = float(sync_time_s(model, run.num_nodes, run.world_size))
        if fitted_s > 0:
            names = ("alpha_sync_local_s", "beta_sync_local_s", "alpha_sync_node_s", "beta_sync_node_s")
            scaled |= {name: getattr(model, name) * sync_s / fitted_s for name in names}
        else:
            level = "local" if run.num_nodes < 2 else "node"
            scaled |= {f"alpha_sync_{level}_s": sync_s, f"beta_sync_{level}_s": 0.0}
    return model.model_copy(update=scaled)
