"""Apply a plan's sharding: FSDP2 or HSDP, prefetch lists, what blocks save and where. Start at :func:`shard`.


::

    model = shard(net, "enforce.json")           # before the optimizer is made
    optimizer = torch.optim.AdamW(model.parameters())
    hook = attach("enforce.json", model=model, optimizer=optimizer, dataset=dataset)

FSDP2 averages gradients over all processes, as DDP does; weighted losses make that the mean over all samples.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ddltool.errors import InputError
from ddltool.plans import Enforcement, Recomputed, ShardingSetting, is_product
from ddltool.runtime.hook.data_parallel import apply_prefetch, ddp_arguments
from ddltool.runtime.hook.job import Config, loaded, submodules
from ddltool.runtime.hook.offloading import offload_modules


def shard(model: nn.Module, config: Config, **options: Any) -> nn.Module:
    """Return ``model`` sharded and with activation checkpointing as planned; call it on every rank before the optimizer.

    FSDP2 and HSDP change ``model`` itself; DDP wraps it. ``options`` go to ``fully_shard`` (``mesh``, ``mp_policy``,
    ``offload_policy``) or to ``DistributedDataParallel``, and go before what the plan says. In a single process only what
    modules save is applied, unless the plan keeps its state in the host's memory; that needs ``init_process_group``.

    Raises InputError for a config without a sharding, for another number of processes than planned, and for modules
    that the model lacks.
    """
    enforcement, plan, units = _checked(config, model)
    checkpoint_modules(model, plan.checkpointing)
    offload_modules(model, plan.on_host)
    if enforcement.world_size == 1 and not plan.offload:
        return model  # nothing to divide; only fully_shard can keep the state on the host
    if plan.kind == "ddp":
        buckets = {} if enforcement.ddp is None else ddp_arguments(enforcement)
        return DistributedDataParallel(model, **{**buckets, **options})
    options.setdefault("mesh", _mesh(model, plan))
    if enforcement.fsdp2 is not None and not enforcement.fsdp2.reshard_after_forward:
        options.setdefault("reshard_after_forward", False)
    if plan.offload:
        pinned = torch.accelerator.is_available()
        options.setdefault("offload_policy", CPUOffloadPolicy(pin_memory=pinned))
    for unit in [*units, model]:  # the root, last; by default FSDP2 keeps it gathered after forward
        _shard_norms(unit, options)
        if not isinstance(unit, FSDPModule):  # a norm that is a unit by itself is one by now
            fully_shard(unit, **options)
    if units:
        apply_prefetch(model, enforcement)
    return model


def _shard_norms(unit: nn.Module, options: dict[str, Any]) -> None:
    """Shard a unit's batch norms apart, in their own type, where ``options`` compute in a half type.

    Their running statistics are buffers, which FSDP2 leaves in float32, and torch refuses weights of another type beside them.
    """
    policy = options.get("mp_policy")
    if policy is None or policy.param_dtype is None:
        return
    norms: list[nn.Module] = [
        part
        for part in unit.modules()
        if isinstance(part, _BatchNorm) and part.affine and not isinstance(part, FSDPModule)
    ]
    if norms:
        own_type = MixedPrecisionPolicy(reduce_dtype=policy.reduce_dtype, cast_forward_inputs=False)
        fully_shard(norms, **{**options, "mp_policy": own_type})


def _checked(config: Config, model: nn.Module) -> tuple[Enforcement, ShardingSetting, list[nn.Module]]:
    """Return (the enforcement config, its sharding, the modules that it shards one by one, without the root).

    Raises InputError for a config without a sharding, for another number of processes than planned, and for modules
    that the model lacks.
    """
    enforcement, where = loaded(config)
    plan = enforcement.sharding
    if plan is None:
        problem = "is missing: the plan knew nothing of memory"
        remedy = "plan a job whose model: can be traced (zoo:NAME, file.py:factory)"
        raise InputError(f"{where}:sharding", problem, remedy)
    processes = dist.get_world_size() if dist.is_initialized() else 1
    if processes != enforcement.world_size:
        problem = f"is {enforcement.world_size}, but this job runs {processes} process(es)"
        raise InputError(f"{where}:world_size", problem, "start as many processes as planned, after init_process_group")
    units = [] if enforcement.fsdp2 is None or plan.kind == "ddp" else enforcement.fsdp2.units
    return enforcement, plan, [*submodules(model, units, f"{where}:fsdp2.units").values()]


def _mesh(model: nn.Module, plan: ShardingSetting) -> DeviceMesh:
    """Return the processes as a device mesh: of one dimension for full sharding, else of (replicate, shard).

    The ranks of a shard group are consecutive. The mesh's device type is the model's; for a model on the meta device,
    that of the machine's accelerator, or the CPU.
    """
    kind = next((value.device.type for value in model.parameters()), "cpu")
    if kind == "meta":
        accelerator = torch.accelerator.current_accelerator()
        kind = "cpu" if accelerator is None else accelerator.type
    if plan.kind == "fsdp":
        return init_device_mesh(kind, (plan.shard,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (plan.replicate, plan.shard), mesh_dim_names=("replicate", "shard"))


def checkpoint_modules(model: nn.Module, plan: Sequence[Recomputed]) -> None:
    """Make each module that ``plan`` names recompute its activations in the backward pass (``torch.utils.checkpoint``).

    It replaces ``forward`` of these modules only, so names of parameters, and with them checkpoint files, stay the same.
    Call it before ``fully_shard`` and ``DistributedDataParallel``. The random state is restored for the recomputation,
    so dropout is the same. Raises InputError for a module that the model lacks or that is checkpointed already, and then
    changes nothing.
    """
    modules = submodules(model, [entry.module for entry in plan], "checkpointing")
    for name, module in modules.items():
        if getattr(module.forward, "func", None) is checkpoint:  # the partial that is made below
            raise InputError("checkpointing", f"{name!r} is checkpointed already", "name each module once")
    for entry in plan:
        module = modules[entry.module]
        options: dict[str, Any] = {"use_reentrant": False}
        if entry.keeps:
            options["context_fn"] = functools.partial(_selective_contexts, frozenset(entry.keeps))
        module.forward = functools.partial(checkpoint, module.forward, **options)


def _selective_contexts(keeps: frozenset[int]) -> Any:
    """Return torch's two contexts of a selective checkpoint: for a module's forward pass, and for its recomputation.

    Matrix products are numbered from 0 in the order in which they run. The outputs of those in ``keeps`` are stored; all
    other ops are recomputed.
    """
    products_seen: Counter[bool] = Counter()

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        """Return whether an op's output is stored; the forward pass and the recomputation number products separately."""
        if not is_product(op.overloadpacket.__name__):
            return CheckpointPolicy.PREFER_RECOMPUTE
        product_index = products_seen[context.is_recompute]
        products_seen[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if product_index in keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
