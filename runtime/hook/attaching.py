"""Load an enforcement config, check it against the job, and attach it to the model. Start at :func:`attach`.

::

    hook = runtime.attach("enforce.json", model=ddp_model, optimizer=optimizer, dataset=dataset)
    loader = hook.dataloader(batch_size=16, shuffle=True, seed=0)
    for epoch in range(epochs):
        hook.set_epoch(epoch)
        ...                                  # the training loop stays as it is

What is enforced: each rank's local batch size, and gradients weighted by the samples behind them. The order in which
DDP's buckets travel is left to DDP, and the logical workers of an EST plan run as one batch per device.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler

from ddltool.artifacts import to_json
from ddltool.errors import InputError
from ddltool.plans import Enforcement
from ddltool.runtime.hook.batches import VariableBatchSampler
from ddltool.runtime.hook.gradients import SampleCounter, WeightedAverage
from ddltool.runtime.hook.job import Job, count_nodes, dataset_length, load_and_check
from ddltool.runtime.hook.sharding import ShardedWeights
from ddltool.runtime.hook.telemetry import Identity, RowFile, StepRecorder

EXIT_PAUSE_S = 0.1


class Hook:
    """What :func:`attach` returns. This one enforces nothing: data come as in any DDP script, nothing is registered.

    Attributes:
        rank, world_size: this process's place in the job.
        local_batch_size: samples per step on this rank as planned; None where nothing is enforced.
        accumulation_steps: passes before the last one of a step, over all of which the script splits the local batch.
    """

    def __init__(self, dataset: Dataset[Any] | None, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_batch_size: int | None = None
        self.accumulation_steps = 0
        self._dataset = dataset
        self._samplers: list[DistributedSampler[Any] | VariableBatchSampler] = []

    def dataloader(
        self, *, batch_size: int, shuffle: bool = True, seed: int = 0, drop_last: bool = False, **options: Any
    ) -> DataLoader[Any]:
        """Return a DataLoader over this rank's share of the dataset; ``options`` go to ``DataLoader``.

        Without a config this is the standard DataLoader with a DistributedSampler. With one, ``batch_size`` is
        REPLACED by this rank's planned local batch, and the batches come from a
        :class:`~ddltool.runtime.hook.batches.VariableBatchSampler`. Call :meth:`set_epoch` before each epoch. Raises
        InputError when no dataset was attached, or when ``options`` bring a sampler of their own.
        """
        dataset = self._given_dataset(options)
        sampler = self._standard_sampler(dataset, shuffle, seed)
        return DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=drop_last, **options)

    def batch_sampler(
        self, *, batch_size: int, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> Sampler[list[int]]:
        """Return what :meth:`dataloader` would use, for ``DataLoader(dataset, batch_sampler=...)`` of your own."""
        sampler = self._standard_sampler(self._given_dataset({}), shuffle, seed)
        return BatchSampler(sampler, batch_size, drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch's order of samples in all loaders made here; the same number on every rank."""
        for sampler in self._samplers:
            sampler.set_epoch(epoch)

    def count_samples(self, samples: int) -> None:
        """Let the next forward pass stand for ``samples`` samples (or tokens, if the loss is a mean over tokens).

        Needed only where dim 0 of the model's first tensor argument is something else. Call before each forward pass.
        """

    def close(self) -> None:
        """Write what telemetry is still held back; also happens at exit. Gradients stay weighted. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _given_dataset(self, options: dict[str, Any]) -> Dataset[Any]:
        """Return the dataset. Raises InputError without one, or when ``options`` would choose the samples as well."""
        if self._dataset is None:
            raise InputError("dataset", "was not given to attach", "call runtime.attach(..., dataset=dataset)")
        if taken := sorted(options.keys() & {"sampler", "batch_sampler"}):
            remedy = "use hook.batch_sampler(...) in a DataLoader of your own"
            raise InputError("dataloader", f"{taken[0]} is the hook's to choose", remedy)
        return self._dataset

    def _standard_sampler(self, dataset: Dataset[Any], shuffle: bool, seed: int) -> DistributedSampler[Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, num_replicas=self.world_size, rank=self.rank, shuffle=shuffle, seed=seed
        )
        self._samplers.append(sampler)
        return sampler


class EnforcingHook(Hook):
    """The hook of a process that follows an enforcement config."""

    def __init__(
        self,
        enforcement: Enforcement,
        dataset: Dataset[Any] | None,
        rank: int,
        counter: SampleCounter,
        recorder: StepRecorder | None,
    ) -> None:
        super().__init__(dataset, rank, enforcement.world_size)
        self.enforcement = enforcement
        self.local_batch_size = enforcement.ranks[rank].local_batch_size
        self.accumulation_steps = enforcement.ranks[rank].accumulation_steps
        self._counter = counter
        self._recorder = recorder

    def dataloader(
        self, *, batch_size: int, shuffle: bool = True, seed: int = 0, drop_last: bool = False, **options: Any
    ) -> DataLoader[Any]:
        """Return a DataLoader with the planned local batches; ``batch_size`` is replaced."""
        dataset = self._given_dataset(options)
        sampler = self.batch_sampler(batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last)
        return DataLoader(dataset, batch_sampler=sampler, **options)

    def batch_sampler(
        self, *, batch_size: int, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> VariableBatchSampler:
        """Return the sampler of the planned local batches; ``batch_size`` is replaced."""
        sizes = [entry.local_batch_size for entry in self.enforcement.ranks]
        size = len(self._given_dataset({}))  # type: ignore[arg-type]  # checked at attach
        sampler = VariableBatchSampler(size, sizes, self.rank, shuffle, seed, drop_last)
        self._samplers.append(sampler)
        return sampler

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch's order of samples; the next step is timed from its forward pass."""
        super().set_epoch(epoch)
        if self._recorder is not None:
            self._recorder.begin_epoch()

    def count_samples(self, samples: int) -> None:
        """Let the next forward pass stand for ``samples`` samples. Raises InputError when negative."""
        self._counter.announce(samples)

    def close(self) -> None:
        """Write the telemetry that is still held back and stop recording."""
        if self._recorder is not None:
            self._recorder.close()


def attach(
    config: str | os.PathLike[str] | None,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Dataset[Any] | None = None,
) -> Hook:
    """Make this process follow an enforcement config; call it once on every rank, before the first step.

    Args:
        config: path of an ``enforce.json`` (the same on every rank), or None: a hook that does and costs nothing.
        model: the job's ``DistributedDataParallel`` module, or one that ``fully_shard`` or ``runtime.shard`` sharded over
            all processes (with a single process, any module).
        optimizer: the optimizer whose steps telemetry writes down.
        dataset: a dataset with ``__len__`` for :meth:`Hook.dataloader`; None if you load ``hook.local_batch_size``
            samples per step by your own means.

    With the environment variable DDLTOOL_OFF=1 any config is as None: for measuring what the hook costs.

    The loss must be a mean over the local batch (under gradient accumulation over the micro-batch). If the
    config names a telemetry file, it is emptied now. ``DistributedDataParallel.join`` is not supported.

    Raises InputError, on every rank as soon as one rank refuses, when config and job do not fit. Left uncaught, it ends
    the process with one line on stderr and exit code 2.
    """
    if config is None or os.environ.get("DDLTOOL_OFF", "") not in ("", "0"):
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return Hook(dataset, rank, world_size)
    try:
        return _attach(os.fspath(config), model, optimizer, dataset)
    except InputError as error:
        _end_in_one_line(error)
        raise


def _attach(path: str, model: nn.Module, optimizer: torch.optim.Optimizer, dataset: Dataset[Any] | None) -> Hook:
    job = Job.this()
    enforcement = job.together(lambda: load_and_check(path, job, model, optimizer, dataset))
    digest = hashlib.sha256(to_json(enforcement).encode()).hexdigest()[:12]
    job.demand_same(path, f"content {digest}", "give every rank the same file")
    samples = "none" if dataset is None else f"{dataset_length(dataset)} samples"
    job.demand_same("dataset", samples, "give every rank the whole dataset")
    cuda = any(parameter.is_cuda for parameter in model.parameters())
    counter = SampleCounter(required=job.world_size > 1)
    file = _row_file(enforcement, job)
    take_samples = counter.take if job.side is None else None
    recorder = StepRecorder(file, cuda=cuda, take_samples=take_samples) if file is not None else None
    if job.side is not None and isinstance(model, DistributedDataParallel):
        average = WeightedAverage(counter, enforcement.total_batch_size, model.process_group, job.side, recorder)
        register(model, average)
        model.register_forward_hook(counter.weigh)
    weights = None
    if job.side is not None and isinstance(model, FSDPModule):
        several = any(entry.accumulation_steps for entry in enforcement.ranks)
        weights = ShardedWeights(counter, enforcement.total_batch_size if several else None, job.side, recorder)
        optimizer.register_step_pre_hook(weights.settle)
    if file is not None and recorder is not None:
        job.together(file.open)
        optimizer.register_step_pre_hook(recorder.before_update)
        optimizer.register_step_post_hook(recorder.after_update)
    if job.side is not None or recorder is not None:
        model.register_forward_pre_hook(_Forward(counter, recorder), with_kwargs=True)
    if weights is not None:
        model.register_forward_pre_hook(weights.begin)
        model.register_forward_hook(weights.weigh)
    return EnforcingHook(enforcement, dataset, job.rank, counter, recorder)


@dataclass(frozen=True, slots=True)
class _Forward:
    """What happens before each forward pass of the model."""

    counter: SampleCounter
    recorder: StepRecorder | None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        if self.recorder is not None and module.training:
            self.recorder.begin_forward()
        self.counter.count(module, args, kwargs)


class Reduction(Protocol):
    """What reduces DDP's buckets."""

    def reduce(self, state: object, bucket: dist.GradBucket, /) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """Start to reduce one bucket."""
        ...


def register(model: DistributedDataParallel, average: Reduction) -> None:
    """Make ``average`` the model's communication hook. Raises InputError when it already has one."""
    atexit.unregister(_pause_before_exit)  # once is enough, however many models were attached to
    atexit.register(_pause_before_exit)
    try:
        model.register_comm_hook(None, average.reduce)
    except RuntimeError as error:
        if "can only be called once" not in str(error):
            raise
        remedy = "attach once per model, and register no other communication hook"
        raise InputError("model", "already has a communication hook", remedy) from None


def _pause_before_exit() -> None:
    """Give gloo's threads the time to drop the tensors of the last step.

    They do so a moment after the step is over, and need the interpreter for tensors that Python has seen, as a hook's
    buckets are. A thread that asks for it while it shuts down aborts the process (pytorch issue 190489), and a job that
    was done would count as failed: 13 of 150 short ones did, none of 295 with this pause.
    """
    time.sleep(EXIT_PAUSE_S)


def _row_file(enforcement: Enforcement, job: Job) -> RowFile | None:
    """Return the file for this rank's rows, not opened yet; None where the config names none."""
    if enforcement.telemetry is None:
        return None
    identity = Identity(
        rank=job.rank,
        world_size=job.world_size,
        num_nodes=count_nodes(job.world_size),
        device=enforcement.ranks[job.rank].device_type,
    )
    return RowFile(Path(enforcement.telemetry), identity)


def _end_in_one_line(error: InputError) -> None:
    """See to it that ``error``, if nobody catches it, ends the process as the command line would end.

    That is one line on stderr and the error's exit code, instead of a traceback. Other exceptions are not touched.
    """
    previous = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if value is not error:
            previous(kind, value, trace)
            return
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(error.exit_code)

    sys.excepthook = show
