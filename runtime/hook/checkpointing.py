"""Activation checkpointing of named modules, with what a plan keeps of each. Start at :func:`checkpoint_modules`."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ddltool.errors import InputError
from ddltool.plans import Recomputed, is_product


def checkpoint_modules(model: nn.Module, plan: Sequence[Recomputed]) -> None:
    """Let each named module compute its activations again in the backward pass (``torch.utils.checkpoint``).

    Only ``forward`` of these modules changes: names of parameters, and so checkpoints, stay. Call it before
    ``fully_shard`` and ``DistributedDataParallel``. The random state is kept, so dropout drops the same again. All or
    nothing. Raises InputError for a module that the model does not have, and for one that is checkpointed already.
    """
    found = dict(model.named_modules())
    for entry in plan:
        if entry.module not in found:
            problem = f"the model has no module {entry.module!r}"
            raise InputError("checkpointing", problem, "trace and plan this model")
        if getattr(found[entry.module].forward, "func", None) is checkpoint:
            raise InputError("checkpointing", f"{entry.module!r} is checkpointed already", "name each module once")
    for entry in plan:
        module = found[entry.module]
        options: dict[str, Any] = {"use_reentrant": False}
        if entry.keeps:
            options["context_fn"] = functools.partial(_contexts, frozenset(entry.keeps))
        module.forward = functools.partial(checkpoint, module.forward, **options)


def _contexts(keeps: frozenset[int]) -> Any:
    """Return what decides on the ops of one forward pass: it counts the products of the pass and of its repetition."""
    seen: Counter[bool] = Counter()

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if not is_product(op.overloadpacket.__name__):
            return CheckpointPolicy.PREFER_RECOMPUTE
        place = seen[context.is_recompute]
        seen[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if place in keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
