"""Whether an enforcement config, a model and a dataset fit this process's job. Start at :func:`load_and_check`."""

from __future__ import annotations

import copy
import os
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
from ddltool.runtime.hook.data_parallel import config_path
from ddltool.runtime.processes.digests import fingerprint
from ddltool.runtime.processes.job import DistributedJob
from ddltool.runtime.processes.random_streams import kept, seed_streams

REFERENCE = "DDLTOOL_CHECK_REFERENCE"
"""Set in a process that a check has started, to train alone on whole batches; where its gradients go."""
MAP_STYLE = "give a map-style dataset (with __len__ and __getitem__)"
WITHOUT_DATASET = (
    "give a map-style dataset, or leave dataset out and load hook.local_batch_size samples per step yourself"
)


def load_and_check(path: str, job: DistributedJob, dataset: Dataset[Any] | None) -> Enforcement:
    """Return the config. Raises InputError where it does not fit this job and its data."""
    enforcement = load(path, Enforcement)
    if is_reference():
        enforcement = _alone(enforcement)
    check_plan(path, enforcement.plan_sha256, os.environ.get("DDLTOOL_PLAN_SHA256"))
    if enforcement.strategy == "elastic-bsp":
        problem = "is elastic-bsp, whose workers do not step together as DDP's do"
        raise InputError(f"{path}:strategy", problem, "use ddltool.runtime.servers.follow in place of attach")
    _check_world(path, enforcement, job)
    if dataset is not None and not isinstance(dataset, IterableDataset):
        size = dataset_length(dataset, WITHOUT_DATASET)
        if size < enforcement.total_batch_size:
            problem = f"is {enforcement.total_batch_size}, but the dataset has {size} samples"
            raise InputError(f"{path}:total_batch_size", problem, "plan smaller batches or fewer processes")
    return enforcement


def planned_for(config: str | os.PathLike[str], model: nn.Module) -> tuple[str, Enforcement]:
    """Return the config's path and the config. Raises InputError where it is not the launcher's, or not the model's."""
    path = config_path(config)
    planned = load(path, Enforcement)
    check_plan(path, planned.plan_sha256, os.environ.get("DDLTOOL_PLAN_SHA256"))
    check_parameters(path, planned.parameters, model)
    return path, planned


def check_plan(path: str, emitted: str | None, launched: str | None) -> None:
    """Raise InputError when launcher and config were emitted from two plans; None: one of them does not say."""
    if emitted and launched and emitted != launched:
        problem = f"is {emitted[:12]}..., but the job was launched by plan {launched[:12]}... (DDLTOOL_PLAN_SHA256)"
        raise InputError(f"{path}:plan_sha256", problem, "emit the launcher and the config from one plan")


def is_reference() -> bool:
    """Whether this process is the one that a check has started (:mod:`~ddltool.runtime.hook.checking`)."""
    return bool(os.environ.get(REFERENCE))


def is_set(name: str) -> bool:
    """Whether an environment variable is there, and neither empty nor 0."""
    return os.environ.get(name, "") not in ("", "0")


def _alone(enforcement: Enforcement) -> Enforcement:
    """Return the config of one process that takes the batches of all ranks together."""
    first = enforcement.ranks[0].model_copy(update={"local_batch_size": enforcement.total_batch_size})
    changes = {"world_size": 1, "ranks": [first], "telemetry": None, "sharding": None, "ddp": None, "fsdp2": None}
    return enforcement.model_copy(update=changes)


def _check_world(path: str, enforcement: Enforcement, job: DistributedJob) -> None:
    """Raise InputError unless the job has as many processes as planned."""
    if enforcement.world_size == job.world_size:
        return
    processes = "1 process" if job.world_size == 1 else f"{job.world_size} processes"
    why = "" if dist.is_initialized() else " (torch.distributed is not initialised)"
    raise InputError(
        f"{path}:world_size",
        f"is {enforcement.world_size}, but this job runs {processes}{why}",
        f"start {enforcement.world_size} (torchrun --nproc-per-node), or plan for {job.world_size} and emit again",
    )


def check_model(model: nn.Module, job: DistributedJob) -> None:
    """Raise InputError unless DDP or FSDP2 averages the model's gradients over all ranks."""
    if job.world_size == 1:
        return
    if (sharded := _sharded_over(model)) is not None:
        if sharded != job.world_size:
            problem = f"is sharded over {sharded} of the {job.world_size} processes, or along other dimensions as well"
            raise InputError("model", problem, "give fully_shard a mesh of all processes, for data alone")
        return
    demand_wrapped(job, model, " or runtime.shard")
    assert isinstance(model, DistributedDataParallel)
    if (size := dist.get_world_size(model.process_group)) != job.world_size:
        problem = f"is averaged over {size} of the {job.world_size} processes"
        raise InputError("model", problem, "wrap it with the default process group")


def demand_wrapped(job: DistributedJob, model: nn.Module, otherwise: str = "") -> None:
    """Raise InputError for the bare model of several processes."""
    if job.world_size > 1 and not isinstance(model, DistributedDataParallel):
        remedy = f"give the model that torch.nn.parallel.DistributedDataParallel(model){otherwise} returns"
        raise InputError("model", f"is a {type(model).__name__}, not a DistributedDataParallel", remedy)


def _sharded_over(model: nn.Module) -> int | None:
    """Return over how many processes FSDP2 shards the model; 0: along other dimensions too; None: FSDP2 does not shard it."""
    if not isinstance(model, FSDPModule):
        return None
    meshes: set[int] = set()
    for parameter in model.parameters():
        placements = [placement.is_shard() for placement in getattr(parameter, "placements", ())]
        meshes.add(parameter.device_mesh.size() if sum(placements) == 1 else 0)  # type: ignore[attr-defined]
    return meshes.pop() if len(meshes) == 1 else 0


def check_parameters(path: str, planned: list[ParameterRecord], model: nn.Module) -> None:
    """Raise InputError unless the plan's parameters are the model's, by name and size in bytes.

    The prefix that DDP and torch.compile put before names is left out. Frozen parameters need not be in the plan; an
    empty plan fits any model.
    """
    if not planned:
        return
    sizes = {entry.name: entry.size_bytes for entry in planned}
    parameters: dict[str, torch.nn.Parameter] = dict(_unwrapped(model).named_parameters())
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


def _unwrapped(model: nn.Module) -> nn.Module:
    """Return the user's own module inside DDP and torch.compile."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def bare_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the optimizer inside what accelerate, Lightning and others wrap around it. Raises InputError for none."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError("optimizer", f"is a {type(optimizer).__name__}", "give the job's torch.optim.Optimizer")
    return optimizer


def dataset_length(dataset: Dataset[Any], remedy: str = MAP_STYLE) -> int:
    """Return the number of samples. Raises InputError, with ``remedy``, where samples cannot be picked by index."""
    if isinstance(dataset, IterableDataset):
        raise InputError("dataset", f"is a {type(dataset).__name__}, an IterableDataset", remedy)
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        raise InputError("dataset", f"is a {type(dataset).__name__} without a length", remedy) from None


def demand_same_samples(job: DistributedJob, dataset: Dataset[Any] | None) -> None:
    """Raise InputError on every rank unless all have equally many samples, and an equal first, middle and last one.

    They are read from a copy of the dataset, as a file that it opens must not be shared with data workers, and with the same
    random seeds on all ranks, for random transforms.
    """
    size_text = "none" if dataset is None else "a stream"
    if dataset is not None and not isinstance(dataset, IterableDataset):
        size_text = f"{dataset_length(dataset)} samples"
    job.demand_same("dataset", size_text, "give every rank the whole dataset")
    if dataset is None or isinstance(dataset, IterableDataset) or job.world_size == 1:
        return
    remedy = "make it alike on every rank: the same files in the same order, and the same seed where it is shuffled"
    job.demand_same("dataset: content of samples", _fingerprint(dataset), remedy)


def _fingerprint(dataset: Dataset[Any]) -> str:
    """Return a digest of the first, middle and last sample."""
    size, fingerprints = dataset_length(dataset), []
    with kept():
        try:
            copied = _own_copy(dataset)
            for index in (0, size // 2, size - 1):
                seed_streams(index)
                fingerprints.append(fingerprint(copied[index]))
        except Exception as error:
            return f"not readable ({type(error).__name__})"  # that is for the training loop to show
    return fingerprint(fingerprints)[:12]


def _own_copy(dataset: Any) -> Any:
    """Return a shallow copy of a dataset, also of the datasets that it wraps."""
    copied = copy.copy(dataset)
    if isinstance(getattr(copied, "dataset", None), Dataset):
        copied.dataset = _own_copy(copied.dataset)
    return copied
