"""Settings of an elastic run, and checks of its model, loss and optimizer: bits must not depend on the placement."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

import torch
from pydantic import Field
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ddltool.artifacts import Record, parse_record
from ddltool.errors import InputError
from ddltool.plans import Enforcement
from ddltool.runtime.elastic.contexts import modules_of


class RunSettings(Record):
    """The settings on which the bits of a run depend; a checkpoint is continued with the same ones only."""

    max_workers: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    accumulation: int = Field(ge=1)
    seed: int = Field(ge=0, lt=2**63)
    dataset_size: int
    sample_streams: Literal["turn", "batch"]
    """Random streams of augmentations: the logical worker's in its ``turn``, or a state of its own for each ``batch``."""


def settings_of(**values: Any) -> RunSettings:
    """Return ``values``, given by the names of :class:`RunSettings`, as checked settings.

    Raises InputError for values out of range, and for a dataset with fewer samples than one step takes.
    """
    settings = parse_record(values, RunSettings, "ElasticTrainer")
    step_samples = settings.max_workers * settings.batch_size * settings.accumulation
    if settings.dataset_size < step_samples:
        problem = f"has {settings.dataset_size} samples, "
        problem += f"one step takes max_workers x batch_size x accumulation = {step_samples}"
        raise InputError("dataset", problem, "give a smaller batch_size or max_workers")
    return settings


def workers_of(path: str, planned: Enforcement) -> tuple[list[int], int]:
    """Return (number of logical workers (ESTs) of each planned process, batch size of every logical worker).

    ``path``: the plan's file, for errors. Raises InputError for a process without logical workers, and for batch sizes
    that differ or are not whole.
    """
    sizes = {entry.local_batch_size / max(entry.ests, 1) for entry in planned.ranks}  # samples per logical worker
    size = int(min(sizes))
    are_equal = len(sizes) == 1
    are_whole = size in sizes
    have_workers = all(entry.ests for entry in planned.ranks)
    if not (are_equal and are_whole and have_workers):
        problem = f"of a plan of strategy {planned.strategy} are no equal logical workers"
        raise InputError(f"{path}:ranks", problem, "plan with --strategy est, or give it to runtime.attach")
    return [entry.ests for entry in planned.ranks], size


def check_model(model: nn.Module, loss_fn: Any) -> None:
    """Raise InputError for a model or loss whose bits would depend on how logical workers are placed on processes.

    Refused are a model wrapped in DDP, SyncBatchNorm, and a model without parameters to train.
    """
    if isinstance(model, DistributedDataParallel):
        remedy = "give the bare module: the logical workers are averaged here"
        raise InputError("model", "is a DistributedDataParallel", remedy)
    for prefix, module in modules_of(model, loss_fn).items():
        if isinstance(module, nn.SyncBatchNorm):
            problem = "is a SyncBatchNorm, whose sums depend on the placement"
            raise InputError(f"model:{prefix.removesuffix('.')}", problem, "use BatchNorm")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("model", "has no parameter that requires gradients", "give the model that is trained")


def check_parameters(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise InputError for a parameter (by name) without a shape yet, or one that is sharded over processes."""
    for name, value in parameters.items():
        if isinstance(value, nn.parameter.UninitializedParameter):
            raise InputError(f"model:{name}", "has no shape yet", "run the model on a batch first")
        if isinstance(value, DTensor):
            remedy = "give the bare module: each process holds it"
            raise InputError(f"model:{name}", "is sharded (FSDP2, a DTensor)", remedy)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError for an optimizer whose ``step`` requires a closure, or whose state is spread over processes."""
    kind = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        problem = f"is {kind}, which computes the loss itself, of one logical worker's batch"
        raise InputError("optimizer", problem, "use one whose step() needs no closure")
    if any(parent.__name__ == "ZeroRedundancyOptimizer" for parent in type(optimizer).__mro__):
        problem = f"is {kind}, whose state is spread over processes"
        raise InputError("optimizer", problem, "use the optimizer that it wraps")
