"""Apply a plan's sharding: FSDP2 or HSDP over a device mesh, prefetch lists, activation checkpointing. Start at :func:`shard`.

::

    model = shard(net, "enforce.json")           # before the optimizer is made
    optimizer = torch.optim.AdamW(model.parameters())
    hook = attach("enforce.json", model=model, optimizer=optimizer, dataset=dataset)

FSDP2 averages gradients over all processes. :class:`ShardedWeights` scales what enters the model's backward pass, so that this
average is the mean over samples whatever the split: process r of n counts ``n x_r / X`` for x_r of X samples.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ddltool.errors import InputError
from ddltool.plans import ShardingSetting
from ddltool.runtime.hook.checkpointing import checkpoint_modules
from ddltool.runtime.hook.data_parallel import Config, apply_prefetch, ddp_arguments, loaded
from ddltool.runtime.hook.gradients import SampleCounter, scaled
from ddltool.runtime.hook.telemetry import StepRecorder


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
    kept = (
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


class ShardedWeights:
    """Makes the average over processes that FSDP2 takes of gradients the mean over all samples of a step.

    The samples of all processes are counted while the forward pass runs, so that a step of one pass is exact from the
    backward pass on. Of several passes each counts as planned, and should they not have made the planned total, the update
    begins with the gradients corrected for it.

    Args:
        counter: where this rank's samples come from.
        planned_total: samples per step of all ranks together, where a step has several passes; None: it has one.
        side: a gloo group of all ranks.
        recorder: is told of each step's samples; None: nobody wants to know.
    """

    def __init__(
        self,
        counter: SampleCounter,
        planned_total: int | None,
        side: dist.ProcessGroup,
        recorder: StepRecorder | None = None,
    ) -> None:
        self._counter = counter
        self._planned_total = planned_total
        self._side = side
        self._ranks = dist.get_world_size(side)
        self._recorder = recorder
        self._passes: list[tuple[Tensor, dist.Work]] = []
        self._divisor = 0.0

    def begin(self, module: nn.Module, args: object) -> None:
        """Start to count the samples of this pass on all ranks: a forward pre-hook, after the one that counts them here."""
        if module.training and torch.is_grad_enabled():
            total = torch.tensor([float(self._counter.latest)], dtype=torch.float64)
            self._passes.append((total, dist.all_reduce(total, group=self._side, async_op=True)))

    def weigh(self, module: nn.Module, args: object, output: Any) -> Any:
        """Scale the gradients of this pass: a forward hook. Raises InputError for an output without a tensor to scale."""
        if not (module.training and torch.is_grad_enabled()):
            return None
        if len(self._passes) == 1:
            self._divisor = float(self._planned_total or self._counted())
        return scaled(output, self._ranks * self._counter.latest / max(self._divisor, 1.0))

    def settle(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Correct the gradients for the total that was counted, where it is another: before the optimizer's update."""
        samples = self._counter.take()
        if not self._passes:
            return
        total = self._counted()
        if total not in (0.0, self._divisor):
            for group in optimizer.param_groups:
                for value in group["params"]:
                    if value.grad is not None:
                        value.grad.mul_(self._divisor / total)
        self._passes.clear()
        if self._recorder is not None:
            self._recorder.begin_exchange(samples, torch.tensor([total])).note_ready()

    def _counted(self) -> float:
        total = 0.0
        for part, work in self._passes:
            work.wait()
            total += float(part)
        return total
