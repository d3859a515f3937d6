"""How many samples every rank gets in every step: two where the model normalizes over its local batch.

BatchNorm divides by the deviation within the batch; of one sample without extent there is none, and torch refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddltool.errors import InputError
from ddltool.runtime.balancing.arguments import whole_samples

_NORMALIZED = 2


def local_batch_norm(model: nn.Module) -> str | None:
    """Return the name of the first layer that normalizes over the local batch in training; None: there is none.

    SyncBatchNorm normalizes over all ranks' samples. A layer in evaluation mode uses what it has learned, where it keeps
    that; a model that is in evaluation mode altogether is taken to be trained as a whole later.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, _BatchNorm) or isinstance(layer, nn.SyncBatchNorm):
            continue
        if layer.training or not model.training or not layer.track_running_stats:
            return str(name)
    return None


def least_samples(
    model: nn.Module,
    least: int | None,
    ranks: int,
    total: int,
    sizes: Sequence[int] | None = None,
    limits: Sequence[int] | None = None,
) -> int:
    """Return the samples that each of ``ranks`` gets in every step of ``total``; None: 1, or 2 with local BatchNorm.

    Raises InputError where the total batch, one of (n,) ``sizes`` or one of (n,) ``limits`` is too small for it.
    """
    layer = local_batch_norm(model) if least is None else None
    number = whole_samples("least", least) if least is not None else 1 if layer is None else _NORMALIZED
    why = "" if layer is None else f" (layer {layer} is BatchNorm over the local batch)"
    other = "a smaller least" if layer is None else "least=1"
    if number * ranks > total:
        problem = f"{number} for each of {ranks} ranks{why} is more than the total batch of {total}"
        raise InputError("least", problem, f"give a total batch of {number * ranks} or more, or {other}")
    for name, values in (("sizes", sizes), ("limits", limits)):
        for rank, value in enumerate(values or ()):
            if value < number:
                problem = f"has {value} for rank {rank}, below the least of {number} samples{why}"
                raise InputError(name, problem, f"give every rank {number} or more, or {other}")
    return number
