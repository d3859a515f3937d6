"""Load an enforcement config, check it against the job, and attach it to the model. Start at :func:`attach`.

::

    hook = runtime.attach("enforce.json", model=ddp_model, optimizer=optimizer, dataset=dataset)
    loader = hook.dataloader(batch_size=16, shuffle=True, seed=0)
    for epoch in range(epochs):
        hook.set_epoch(epoch)
        ...                                  # the training loop stays as it is

What is enforced: each rank's local batch size, and losses weighed by the samples behind them. The order in which
DDP's buckets travel is left to DDP, and the logical workers of an EST plan run as one batch per device.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler

from ddltool.artifacts import to_json
from ddltool.errors import InputError
from ddltool.plans import Enforcement
from ddltool.runtime.hook.batches import VariableBatchSampler
from ddltool.runtime.hook.checking import begin_check
from ddltool.runtime.hook.data_parallel import config_path
from ddltool.runtime.hook.gradients import TimedAverage
from ddltool.runtime.hook.job import (
    Job,
    bare_optimizer,
    count_nodes,
    demand_same_samples,
    load_and_check,
    refuse_in_one_line,
)
from ddltool.runtime.hook.loader import CountedLoader
from ddltool.runtime.hook.telemetry import Identity, RowFile, StepRecorder
from ddltool.runtime.hook.trained import guard
from ddltool.runtime.hook.weighing import Reduction, Weigher

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
        """Let the next forward pass stand for ``samples`` samples. Call before each forward pass.

        Needed only with a loader that the hook has not made, where dim 0 of the model's first tensor argument is something
        else than the samples.
        """

    def loss(self, loss: Tensor, *, count: float | Tensor | None = None, reduction: Reduction = "mean") -> Tensor:
        """Return ``loss``, of the same value, with gradients that weigh by ``count``: what it is a mean over on this rank.

        Needed where a loss is no mean over the samples of the batch: tokens of texts of different lengths (``count``), a sum
        (``reduction="sum"``), or one that counts all ranks already (``"average"``). See
        :meth:`~ddltool.runtime.hook.weighing.Weigher.loss`.
        """
        return loss

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
        weigher: Weigher,
        recorder: StepRecorder | None,
    ) -> None:
        super().__init__(dataset, rank, enforcement.world_size)
        self.enforcement = enforcement
        self.local_batch_size = enforcement.ranks[rank].local_batch_size
        self.accumulation_steps = enforcement.ranks[rank].accumulation_steps
        self._weigher = weigher
        self._recorder = recorder

    def dataloader(
        self, *, batch_size: int, shuffle: bool = True, seed: int = 0, drop_last: bool = False, **options: Any
    ) -> DataLoader[Any]:
        """Return a DataLoader with the planned local batches; ``batch_size`` is replaced."""
        dataset = self._given_dataset(options)
        sampler = self._sampler(shuffle, seed, drop_last)
        return CountedLoader(dataset, sampler, self._weigher, **options)

    def batch_sampler(
        self, *, batch_size: int, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> VariableBatchSampler:
        """Return the sampler of the planned local batches; ``batch_size`` is replaced."""
        sampler = self._sampler(shuffle, seed, drop_last)
        self._weigher.follow(sampler, loose=True)
        return sampler

    def _sampler(self, shuffle: bool, seed: int, drop_last: bool) -> VariableBatchSampler:
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
        self._weigher.announce(samples)

    def loss(self, loss: Tensor, *, count: float | Tensor | None = None, reduction: Reduction = "mean") -> Tensor:
        """Return ``loss`` with gradients that weigh by ``count``. Raises InputError, on all ranks, where it cannot be."""
        return self._weigher.loss(loss, count=count, reduction=reduction)

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
        config: path of an ``enforce.json`` (the same on every rank), or None: a hook that does and costs nothing. Where the
            environment variable DDLTOOL_ENFORCE names one, as emitted launchers do, it is that.
        model: the job's ``DistributedDataParallel`` module, or one that ``fully_shard`` or ``runtime.shard`` sharded over
            all processes (with a single process, any module).
        optimizer: the optimizer whose steps telemetry writes down.
        dataset: a dataset with ``__len__`` for :meth:`Hook.dataloader`; None if you load ``hook.local_batch_size``
            samples per step by your own means.

    With the environment variable DDLTOOL_OFF=1 any config is as None: for measuring what the hook costs. With
    DDLTOOL_CHECK=1 the first steps are held against those of one process (:mod:`~ddltool.runtime.hook.checking`).

    ``backward`` weighs each loss by the samples of the rank's batch; the loss must be a mean over them, and is refused where it
    is not (:meth:`Hook.loss` says what it is). If the config names a telemetry file, it is emptied now.
    ``DistributedDataParallel.join`` is not supported.

    Raises InputError, on every rank as soon as one rank refuses, when config and job do not fit. Left uncaught, that and any
    later refusal end the process with one line on stderr and exit code 2.
    """
    if config is None or os.environ.get("DDLTOOL_OFF", "") not in ("", "0"):
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return Hook(dataset, rank, world_size)
    refuse_in_one_line()
    return _attach(config_path(config), model, optimizer, dataset)


def _attach(path: str, model: nn.Module, optimizer: torch.optim.Optimizer, dataset: Dataset[Any] | None) -> Hook:
    job = Job.this()
    optimizer = job.together(lambda: bare_optimizer(optimizer))
    enforcement = job.together(lambda: load_and_check(path, job, model, optimizer, dataset))
    digest = hashlib.sha256(to_json(enforcement).encode()).hexdigest()[:12]
    job.demand_same(path, f"content {digest}", "give every rank the same file")
    demand_same_samples(job, dataset)
    cuda = any(parameter.is_cuda for parameter in model.parameters())
    weigher = Weigher(
        job,
        "hook",
        lambda: [entry.local_batch_size for entry in enforcement.ranks],
        passes=enforcement.ranks[job.rank].accumulation_steps + 1,
    )
    file = _row_file(enforcement, job)
    wrapped = model if job.side is not None and isinstance(model, DistributedDataParallel) else None
    recorder = None
    if file is not None:
        recorder = StepRecorder(file, cuda=cuda, take_samples=weigher.take_tally if wrapped is None else None)
        weigher.watcher = recorder
        job.together(file.open)
        optimizer.register_step_pre_hook(recorder.before_update)
        optimizer.register_step_post_hook(recorder.after_update)
        if wrapped is not None:
            register(wrapped, TimedAverage(weigher.take_tally, wrapped.process_group, recorder, job.side))
    if job.side is not None:
        guard(job, model, optimizer)
        optimizer.register_step_post_hook(weigher.check_update)
    begin_check(job, model, optimizer)
    if job.side is not None or recorder is not None:
        weigher.open(model)
    return EnforcingHook(enforcement, dataset, job.rank, weigher, recorder)


class Averaging(Protocol):
    """What reduces DDP's buckets."""

    def reduce(self, state: object, bucket: dist.GradBucket, /) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        """Start to reduce one bucket."""
        ...


def register(model: DistributedDataParallel, average: Averaging) -> None:
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
