"""Apply a plan's sharding: FSDP2 or HSDP over a device mesh, prefetch lists, activation checkpointing. Start at :func:`shard`.

::

    model = shard(net, "enforce.json")           # before the optimizer is made
    optimizer = torch.optim.AdamW(model.parameters())
    hook = attach("enforce.json", model=model, optimizer=optimizer, dataset=dataset)

FSDP2 averages gradients over all processes, as DDP does; losses that weigh by their samples make that the mean over samples.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ddltool.errors import InputError
from ddltool.plans import ShardingSetting
from ddltool.runtime.hook.checkpointing import checkpoint_modules
from ddltool.runtime.hook.data_parallel import Config, apply_prefetch, ddp_arguments, loaded


def shard(model: nn.Module, config: Config, **options: Any) -> nn.Module:
    """Return ``model`` sharded, and checkpointed, as planned; call it on every rank before the optimizer is made.

    FSDP2 and HSDP change ``model`` itself; DDP wraps it. ``options`` go to ``fully_shard`` (``mesh``, ``mp_policy``,
    ``offload_policy``) or to ``DistributedDataParallel``. A single process only gets the checkpointing.

    Raises InputError for a config without a sharding, for other processes than planned, and for modules that the model lacks.
    """
    enforcement, where = loaded(config)
    plan = enforcement.sharding
    if plan is None:
        problem = "is missing: the plan knew nothing of memory"
        raise InputError(
            f"{where}:sharding", problem, "plan a job whose model: can be traced (zoo:NAME, file.py:factory)"
        )
    processes = dist.get_world_size() if dist.is_initialized() else 1
    if processes != enforcement.world_size:
        problem = f"is {enforcement.world_size}, but this job runs {processes} process(es)"
        raise InputError(f"{where}:world_size", problem, "start as many processes as planned, after init_process_group")
    units = [] if enforcement.fsdp2 is None or plan.kind == "ddp" else enforcement.fsdp2.units
    known = dict(model.named_modules())
    if missing := [name for name in units if name not in known]:
        raise InputError(f"{where}:fsdp2.units", f"the model has no module {missing[0]!r}", "trace and plan this model")
    checkpoint_modules(model, plan.checkpointing)
    if processes == 1:
        return model
    if plan.kind == "ddp":
        buckets = {} if enforcement.ddp is None else ddp_arguments(enforcement)
        return DistributedDataParallel(model, **{**buckets, **options})
    options.setdefault("mesh", _mesh(model, plan))
    kept: dict[str, Any] = (
        {} if enforcement.fsdp2 is None or enforcement.fsdp2.reshard_after_forward else {"reshard_after_forward": False}
    )
    for name in units:
        fully_shard(known[name], **kept, **options)
    fully_shard(model, **kept, **options)  # by itself FSDP2 keeps the root gathered
    if units:
        apply_prefetch(model, enforcement)
    return model


def _mesh(model: nn.Module, plan: ShardingSetting) -> DeviceMesh:
    """Return the processes as replicate x shard: the ranks of a shard group follow one another."""
    kind = next((value.device.type for value in model.parameters()), "cpu")
    if kind == "meta":
        accelerator = torch.accelerator.current_accelerator()
        kind = "cpu" if accelerator is None else accelerator.type
    if plan.kind == "fsdp":
        return init_device_mesh(kind, (plan.shard,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (plan.replicate, plan.shard), mesh_dim_names=("replicate", "shard"))
