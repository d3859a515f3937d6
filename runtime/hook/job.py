"""Checks that an enforcement config and a model fit this process's job. Start at :func:`load_and_check`."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, IterableDataset

from ddltool.artifacts import load
from ddltool.errors import InputError
from ddltool.plans import Enforcement, ParameterRecord
from ddltool.runtime.processes.checking import is_reference
from ddltool.runtime.processes.job import DistributedJob
from ddltool.runtime.processes.same_samples import dataset_length
from ddltool.runtime.processes.stopping import refuse_in_one_line

Config = str | os.PathLike[str] | Enforcement
WITHOUT_DATASET = (
    "give a map-style dataset, or leave dataset out and load hook.local_batch_size samples per step yourself"
)


def config_path(given: str | os.PathLike[str]) -> str:
    """Return the path of the config: that in the variable DDLTOOL_ENFORCE, which launchers set, or else the ``given`` one."""
    return os.environ.get("DDLTOOL_ENFORCE") or os.fspath(given)


def loaded(config: Config) -> tuple[Enforcement, str]:
    """Return (the enforcement config, its name for messages): the name is its path, or "config" for one in memory.

    Side effect: from now on, an uncaught error of ddltool ends this process with one line on stderr. Raises InputError
    for a file that is not a config, or was emitted from another plan than the launcher.
    """
    refuse_in_one_line()
    if isinstance(config, Enforcement):
        return config, "config"
    path = config_path(config)
    enforcement = load(path, Enforcement)
    check_plan(path, enforcement.plan_sha256, os.environ.get("DDLTOOL_PLAN_SHA256"))
    return enforcement, path


def check_plan(path: str, emitted: str | None, launched: str | None) -> None:
    """Raise InputError if config and launcher were emitted from different plans.

    ``emitted``: the digest of the config's plan at ``path``; ``launched``: of the launcher's; None: not known, which
    fits any.
    """
    if emitted and launched and emitted != launched:
        problem = f"is {emitted[:12]}..., but the job was launched by plan {launched[:12]}... (DDLTOOL_PLAN_SHA256)"
        raise InputError(f"{path}:plan_sha256", problem, "emit the launcher and the config from one plan")


def load_and_check(path: str, job: DistributedJob, dataset: Dataset[Any] | None) -> Enforcement:
    """Return the enforcement config at ``path``.

    A check (DDLTOOL_CHECK) repeats the job's steps in a single process, for which the config is changed to one rank with
    the batches of all. Raises InputError for the strategy elastic-bsp, whose workers do not step together, for another
    number of processes, and for a ``dataset`` smaller than a step (of an IterableDataset the size is not known).
    """
    enforcement, _ = loaded(path)
    if is_reference():
        first = enforcement.ranks[0].model_copy(update={"local_batch_size": enforcement.total_batch_size})
        changes = {"world_size": 1, "ranks": [first], "telemetry": None, "sharding": None, "ddp": None, "fsdp2": None}
        enforcement = enforcement.model_copy(update=changes)
    if enforcement.strategy == "elastic-bsp":
        problem = "is elastic-bsp, whose workers do not step together as DDP's do"
        raise InputError(f"{path}:strategy", problem, "use ddltool.runtime.servers.follow in place of attach")
    if enforcement.world_size != job.world_size:
        processes = "1 process" if job.world_size == 1 else f"{job.world_size} processes"
        why = "" if dist.is_initialized() else " (torch.distributed is not initialised)"
        problem = f"is {enforcement.world_size}, but this job runs {processes}{why}"
        remedy = (
            f"start {enforcement.world_size} (torchrun --nproc-per-node), or plan for {job.world_size} and emit again"
        )
        raise InputError(f"{path}:world_size", problem, remedy)
    if dataset is not None and not isinstance(dataset, IterableDataset):
        size = dataset_length(dataset, WITHOUT_DATASET)
        if size < enforcement.total_batch_size:
            problem = f"is {enforcement.total_batch_size}, but the dataset has {size} samples"
            raise InputError(f"{path}:total_batch_size", problem, "plan smaller batches or fewer processes")
    return enforcement


def planned_for(config: str | os.PathLike[str], model: nn.Module) -> tuple[str, Enforcement]:
    """Return (the config's path, the config).

    Raises InputError if it was made for another model than ``model``, or launched by another plan.
    """
    planned, path = loaded(config)
    check_parameters(path, planned.parameters, model)
    return path, planned


def submodules(model: nn.Module, names: Collection[str], where: str) -> dict[str, Any]:
    """Return the modules of ``model`` with these names, by name. Raises InputError, about ``where``, if it lacks one."""
    modules = {}
    for name in names:
        try:
            modules[name] = model.get_submodule(name)
        except AttributeError:
            raise InputError(where, f"the model has no module {name!r}", "trace and plan this model") from None
    return modules


def check_model(model: nn.Module, job: DistributedJob) -> None:
    """Raise InputError unless DDP or FSDP2 averages the model's gradients over exactly the ranks of the job."""
    if job.world_size == 1:
        return
    if isinstance(model, FSDPModule):
        sharded_over = {_processes_sharded_over(parameter) for parameter in model.parameters()}
        if sharded_over != {job.world_size}:
            size = sharded_over.pop() if len(sharded_over) == 1 else 0
            problem = f"is sharded over {size} of the {job.world_size} processes, or along other dimensions as well"
            raise InputError("model", problem, "give fully_shard a mesh of all processes, for data alone")
        return
    demand_wrapped(job, model, " or runtime.shard")
    assert isinstance(model, DistributedDataParallel)
    if (size := dist.get_world_size(model.process_group)) != job.world_size:
        problem = f"is averaged over {size} of the {job.world_size} processes"
        raise InputError("model", problem, "wrap it with the default process group")


def _processes_sharded_over(parameter: Any) -> int:
    """Return the number of processes that a parameter is sharded over; 0 unless along exactly one mesh dimension."""
    sharded_dimensions = sum(placement.is_shard() for placement in getattr(parameter, "placements", ()))
    return int(parameter.device_mesh.size()) if sharded_dimensions == 1 else 0


def demand_wrapped(job: DistributedJob, model: nn.Module, otherwise: str = "") -> None:
    """Raise InputError for a model that is not wrapped by DDP, in a job of several processes.

    ``otherwise``: words for the remedy that name another allowed wrapper.
    """
    if job.world_size > 1 and not isinstance(model, DistributedDataParallel):
        remedy = f"give the model that torch.nn.parallel.DistributedDataParallel(model){otherwise} returns"
        raise InputError("model", f"is a {type(model).__name__}, not a DistributedDataParallel", remedy)


def check_parameters(path: str, planned: list[ParameterRecord], model: nn.Module) -> None:
    """Raise InputError unless the ``planned`` parameters are the model's, by name and size in bytes.

    The wrappers of DDP and torch.compile are removed first. Frozen parameters need not be planned; an empty list fits
    any model. ``path``: the config, for the message.
    """
    if not planned:
        return
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod  # type: ignore[assignment]
    sizes = {entry.name: entry.size_bytes for entry in planned}
    parameters: dict[str, torch.nn.Parameter] = dict(model.named_parameters())
    problems = [f"{name} is not in the model" for name in sizes if name not in parameters]
    for name, parameter in parameters.items():
        size = parameter.numel() * parameter.element_size()
        if name not in sizes and parameter.requires_grad:
            problems.append(f"{name} is not in the plan")
        elif name in sizes and sizes[name] != size:
            problems.append(f"{name} has {sizes[name]} bytes in the plan and {size} in the model")
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        remedy = "make the plan from this model, in this data type"
        raise InputError(f"{path}:parameters", ", ".join(problems[:3]) + more, remedy)


def bare_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return torch's optimizer inside wrappers such as accelerate's and Lightning's (attribute ``optimizer``).

    Raises InputError if there is none.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError("optimizer", f"is a {type(optimizer).__name__}", "give the job's torch.optim.Optimizer")
    return optimizer
