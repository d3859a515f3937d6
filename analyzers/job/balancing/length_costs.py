"""The cost of a model's samples by their length, fitted to steps that the cost model predicts at three lengths.

Start at :func:`cost_of_model`; :mod:`~.lengths` uses the result.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import nnls

from ddltool.analyzers.job.balancing.lengths import SampleCost
from ddltool.analyzers.step.communication.fabrics import fabric_of
from ddltool.analyzers.step.costs.model import CostModel, cost_model
from ddltool.analyzers.step.costs.predict import predict
from ddltool.analyzers.step.costs.setting import Placement, Setting
from ddltool.analyzers.step.costs.work import WorkCurve, work_of
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.sources import Source
from ddltool.arrays import Floats
from ddltool.device import DEVICES_PER_NODE
from ddltool.errors import InputError
from ddltool.shipped import calibration, known_devices

# Lengths to trace, as shares of the longest: three, for the three coefficients of a sample's cost.
_SHARES = (1 / 16, 1 / 4, 1.0)
# Kernels are fastest at lengths that are multiples of this.
_MULTIPLE = 64


def lengths_tried(longest: int) -> tuple[int, ...]:
    """Return three lengths, in tokens, at which a step is predicted.

    They are a sixteenth, a quarter and the whole of ``longest``, rounded up to multiples of 64. Where some of these are equal,
    twice and four times the largest replace them, because the fit needs three different lengths; these may exceed ``longest``.

    >>> lengths_tried(4096), lengths_tried(100)
    ((256, 1024, 4096), (64, 128, 256))
    """
    rounded = [_MULTIPLE * max(math.ceil(share * longest / _MULTIPLE), 1) for share in _SHARES]
    different = tuple(dict.fromkeys([*rounded, 2 * rounded[-1], 4 * rounded[-1]]))
    return different[:3]


def cost_of_model(
    source: Source, device: str, precision: str, *, longest: int, replicas: int, sharded: bool = False
) -> SampleCost:
    """Return the cost of a model's sample by its length, and the cost of a step without samples, in seconds on a device type.

    A sample's cost is the difference between a step of two samples and a step of one. The rest (launches, reading of weights,
    the update, exposed communication of ``replicas``) is the step's cost, the median over the three lengths. Raises InputError
    for an unknown device, and for a source that cannot be traced.

    Args:
        source: the model.
        device: the type's name in the shipped table.
        precision: of the computation, by name (see ``ddltool.precision``).
        longest: tokens of the longest sample.
        replicas: data-parallel ranks.
        sharded: whether parameters are sharded (FSDP) and not replicated (DDP).
    """
    gpu = known_devices().gpu(device)
    model = cost_model(gpu, calibration())
    setting = Setting(
        fabric=fabric_of(gpu, gpus_per_node=DEVICES_PER_NODE),
        sharding="fsdp" if sharded else "ddp",
        optimizer="adamw",
    )
    numerics, lengths = Numerics(precision), lengths_tried(longest)  # type: ignore[arg-type]  # Numerics checks it
    steps = [_sample_and_step_s(work_of(source, numerics, length), model, setting, replicas) for length in lengths]
    added_s, once_s = np.array(steps).T
    # A difference of two predictions comes out as 0 where both steps wait for Python, which takes as long for two samples.
    tells = added_s > 0.0
    if not tells.any():
        problem = f"steps of one and of two samples of {longest:,} tokens wait for Python on {device}, and take as long"
        raise InputError("--model", problem, "leave it out, and costs grow with the tokens")
    return fitted(np.array(lengths, dtype=np.float64)[tells], added_s[tells], max(float(np.median(once_s)), 0.0))


def fitted(lengths: Floats, added_s: Floats, once_s: float) -> SampleCost:
    """Return the cost of a sample of L tokens, ``a L + b L^2 + c``, that best fits ``added_s`` at ``lengths`` (n,) tokens.

    Coefficients are at least 0, and the sum of squared relative errors is least. ``added_s`` (n,): seconds that such a sample
    adds to a step, above 0; ``once_s``: seconds of a step without samples, which the result holds as ``per_step``.
    """
    # Terms are divided by the seconds, so that they should add up to 1 and the residuals are relative errors.
    relative_terms = np.stack([lengths, lengths**2, np.ones_like(lengths)], axis=1) / added_s[:, None]
    scale = relative_terms.max(axis=0)  # columns of one size, because the solver's tolerance is absolute
    coefficients = nnls(relative_terms / scale, np.ones_like(lengths))[0] / scale
    per_token, per_square, per_sample = coefficients.tolist()
    return SampleCost(per_token=per_token, per_square=per_square, per_sample=per_sample, per_step=once_s)


def _sample_and_step_s(work: WorkCurve, model: CostModel, setting: Setting, replicas: int) -> tuple[float, float]:
    """Return the seconds that a sample adds to a step, and the seconds of a step without samples.

    The first is a step of two samples minus a step of one, both on one replica, as on several the second sample may hide
    communication. The second is a step of one sample on each of ``replicas``, minus the first. ``work``: the model's work by
    batch size, at one length of samples; ``model``: the device's cost model.
    """
    nodes = math.ceil(replicas / setting.fabric.gpus_per_node)
    placements = [Placement(num_nodes=1, num_replicas=1), Placement(num_nodes=nodes, num_replicas=replicas)]
    # By placement, then by batch size.
    alone_one, alone_two, together_one, _ = predict(work, model, setting, (1, 2), placements)
    added_s = alone_two.step_time_s - alone_one.step_time_s
    return added_s, together_one.step_time_s - added_s
