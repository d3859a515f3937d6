"""What samples of a model cost by their length, from the cost model: the step at three lengths. See :mod:`~.lengths`."""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import nnls

from ddltool.analyzers.job.balancing.lengths import SampleCost
from ddltool.analyzers.step.communication.fabrics import fabric_of
from ddltool.analyzers.step.costs.model import CostModel, cost_model
from ddltool.analyzers.step.costs.predict import Placement, Setting, WorkCurve, predict, work_of
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.sources import Source
from ddltool.arrays import Floats
from ddltool.device import DEVICES_PER_NODE
from ddltool.shipped import calibration, known_devices

_SHARES = (1 / 16, 1 / 4, 1.0)
_MULTIPLE = 64


def lengths_tried(longest: int) -> tuple[int, ...]:
    """Return the three lengths of steps: a sixteenth, a quarter and the whole of the longest, in multiples of 64."""
    rounded = [_MULTIPLE * max(math.ceil(share * longest / _MULTIPLE), 1) for share in _SHARES]
    return tuple(dict.fromkeys([*rounded, 2 * rounded[-1], 4 * rounded[-1]]))[:3]


def cost_of_model(
    source: Source, device: str, precision: str, *, longest: int, replicas: int, sharded: bool = False
) -> SampleCost:
    """Return the seconds of a sample of ``source`` on a device type, and those of a step whatever its samples.

    A sample's are those that a second one of its length adds to a step of one; what is there once (launches, reading of
    weights, the update, exposed communication of ``replicas``) belongs to the step, of the middle length. For lengths up to
    ``longest`` tokens. Raises InputError for an unknown device, and for a source that cannot be traced.
    """
    gpu = known_devices().gpu(device)
    model = cost_model(gpu, calibration())
    setting = Setting(
        fabric=fabric_of(gpu, gpus_per_node=DEVICES_PER_NODE),
        sharding="fsdp" if sharded else "ddp",
        optimizer="adamw",
    )
    numerics, lengths = Numerics(precision), lengths_tried(longest)  # type: ignore[arg-type]  # Numerics checks it
    steps = [_added_and_once(work_of(source, numerics, length), model, setting, replicas) for length in lengths]
    added_s, once_s = np.array(steps).T
    return fitted(np.array(lengths, dtype=np.float64), added_s, max(float(np.sort(once_s)[1]), 0.0))


def fitted(lengths: Floats, added_s: Floats, once_s: float) -> SampleCost:
    """Return the cost whose coefficients, none below 0, miss (n,) seconds of samples of (n,) ``lengths`` least, as shares."""
    terms = np.stack([lengths, lengths**2, np.ones_like(lengths)], axis=1) / added_s[:, None]
    scale = terms.max(axis=0)
    per_token, per_square, per_sample = (nnls(terms / scale, np.ones_like(lengths))[0] / scale).tolist()
    return SampleCost(per_token=per_token, per_square=per_square, per_sample=per_sample, per_step=once_s)


def _added_and_once(work: WorkCurve, model: CostModel, setting: Setting, replicas: int) -> tuple[float, float]:
    """Return the seconds that a second sample adds to a step, and those of a step without what a sample adds."""
    nodes = math.ceil(replicas / setting.fabric.gpus_per_node)
    places = [Placement(num_nodes=1, num_replicas=1), Placement(num_nodes=nodes, num_replicas=replicas)]
    one, two, together, _ = predict(work, model, setting, (1, 2), places)
    added_s = two.step_time_s - one.step_time_s
    return added_s, together.step_time_s - added_s
