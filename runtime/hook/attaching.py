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

import hashlib
import os
import weakref
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from ddltool.artifacts import to_json
from ddltool.errors import InputError
from ddltool.plans import Enforcement
from ddltool.runtime.hook.batches import Sizes, VariableBatchSampler, fitting_sizes
from ddltool.runtime.hook.checking import begin_check
from ddltool.runtime.hook.data_parallel import config_path
from ddltool.runtime.hook.job import (
    Job,
    bare_optimizer,
    check_model,
    check_parameters,
    dataset_length,
    demand_same_samples,
    is_set,
    load_and_check,
)
from ddltool.runtime.hook.loader import CountedLoader, GivenLoader, StreamLoader
from ddltool.runtime.hook.stopping import refuse_in_one_line
from ddltool.runtime.hook.telemetry import RowFile, StepRecorder, device_of, is_cuda
from ddltool.runtime.hook.trained import leave_alone
from ddltool.runtime.hook.weighing import Observer, Reduction, Weigher


class Hook:
    """What :func:`attach` returns. This one enforces nothing: data come as in any DDP script, nothing is registered.

    Attributes:
        rank, world_size: this process's place in the job.
        local_batch_size: samples per step on this rank as planned; None where nothing is enforced.
        accumulation_steps: passes before the last one of a step, over all of which the script splits the local batch.
        passes: the most passes that any rank makes in a step.
        recorder: what writes this rank's steps down, where anything does.
    """

    def __init__(
        self, dataset: Dataset[Any] | None, rank: int, world_size: int, weigher: Weigher | None = None
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.local_batch_size: int | None = None
        self.accumulation_steps, self.passes = 0, 1
        self.recorder: StepRecorder | None = None
        self._dataset, self._weigher = dataset, weigher
        self._samplers: weakref.WeakSet[DistributedSampler[Any] | VariableBatchSampler] = weakref.WeakSet()
        self._epoch: int | None = None

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

    def planned(
        self, loader: DataLoader[Any], *, shared: bool = True, accumulated: int | None = None
    ) -> DataLoader[Any]:
        """Return a loader like one that the script has made, with the planned batches.

        Its dataset, its options and the order of its sampler stay: what one process would get from it is shared out among the
        ranks, whatever it was shared out by before (``DistributedSampler``, accelerate). ``shared=False``: of an iterable
        dataset every rank has a stream of its own, not the whole one. ``accumulated``: an update is of so many batches, each
        one's loss divided by that; where the plan accumulates they are its passes. Without a config this is the loader itself.

        Raises InputError on every rank where samples do not come one by one, or are others on other ranks, and where the plan
        makes another number of passes.
        """
        return loader

    def bind(self, model: nn.Module, optimizer: torch.optim.Optimizer, *others: torch.optim.Optimizer) -> None:
        """Say what is trained, where :func:`attach` was called before it was there; once, and before the first step.

        Telemetry is of the first optimizer's steps.
        """

    def call(self, name: str) -> Self:
        """Return this hook, which messages speak of as ``name`` from now on."""
        if self._weigher is not None:
            self._weigher.name = name
        return self

    def turn_to_next_batch(self, skip: int = 0, *, passed: Any = None) -> None:
        """Let what is computed now be the next batch that the loader has given, past ``skip`` that are left out.

        For trainers that fetch several batches before they compute the first; loops that take one after the other need not.
        ``passed``: the batch, where the model's forward pass is not called.
        """
        if self._weigher is not None:
            self._weigher.hand.turn_to_next(skip)
            if passed is not None:
                self._weigher.begin_forward(None, (passed,))

    def is_divided_by(self, loss: Tensor, number: float) -> bool:
        """Return whether ``loss`` is a sum divided by ``number``, as read from its graph on all ranks; all ask together.

        Raises InputError where its graph does not tell.
        """
        return self._weigher is not None and self._weigher.is_divided_by(loss, number)

    @property
    def last_weight(self) -> float:
        """What the gradients of the last loss were multiplied by: with it the average of the ranks' losses is that of all."""
        return 1.0 if self._weigher is None else self._weigher.last_weight

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch's order of samples in all loaders made here, before and after; the same number on every rank.

        Telemetry times the next step from its forward pass.
        """
        self._epoch = epoch
        for sampler in self._samplers:
            sampler.set_epoch(epoch)
        if self.recorder is not None:
            self.recorder.begin_epoch()

    def count_samples(self, samples: int) -> None:
        """Let the next forward pass stand for ``samples`` samples. Call before each forward pass.

        Needed only with a loader that the hook has not made, where dim 0 of the model's first tensor argument is something
        else than the samples. Raises InputError when negative.
        """
        if self._weigher is not None:
            self._weigher.hand.announce(samples)

    def loss(self, loss: Tensor, *, count: float | Tensor | None = None, reduction: Reduction = "mean") -> Tensor:
        """Return ``loss``, of the same value, with gradients that weigh by ``count``: what it is a mean over on this rank.

        Needed where a loss is no mean over the samples of the batch: tokens of texts of different lengths (``count``), a sum
        (``reduction="sum"``), or one that counts all ranks already (``"average"``). See
        :meth:`~ddltool.runtime.hook.weighing.Weigher.loss`. Raises InputError, on all ranks, where it cannot be.
        """
        return loss if self._weigher is None else self._weigher.loss(loss, count=count, reduction=reduction)

    def close(self) -> None:
        """Write what telemetry is still held back; also happens at exit. Gradients stay weighted. Idempotent."""
        if self.recorder is not None:
            self.recorder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _given_dataset(self, options: dict[str, Any]) -> Dataset[Any]:
        """Return the dataset. Raises InputError without one, or when ``options`` would choose the samples as well."""
        if self._dataset is None:
            raise InputError("dataset", "was not given to attach", "call runtime.attach(..., dataset=dataset)")
        if taken := sorted(options.keys() & {"sampler", "batch_sampler"}):
            remedy = "use hook.batch_sampler(...) in a DataLoader of your own"
            raise InputError("dataloader", f"{taken[0]} is the hook's to choose", remedy)
        return self._dataset

    def _follow_epoch(self, sampler: DistributedSampler[Any] | VariableBatchSampler) -> None:
        self._samplers.add(sampler)
        if self._epoch is not None:
            sampler.set_epoch(self._epoch)

    def _standard_sampler(self, dataset: Dataset[Any], shuffle: bool, seed: int) -> DistributedSampler[Any]:
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, num_replicas=self.world_size, rank=self.rank, shuffle=shuffle, seed=seed
        )
        self._follow_epoch(sampler)
        return sampler


class EnforcingHook(Hook):
    """The hook of a process that follows an enforcement config, of file ``path``."""

    def __init__(self, path: str, enforcement: Enforcement, dataset: Dataset[Any] | None, job: Job) -> None:
        self._sizes, mine = [entry.local_batch_size for entry in enforcement.ranks], enforcement.ranks[job.rank]
        self._weigher: Weigher = Weigher(job, "hook", lambda: self._sizes, passes=mine.accumulation_steps + 1)
        super().__init__(dataset, job.rank, enforcement.world_size, self._weigher)
        self.enforcement = enforcement
        self.local_batch_size, self.accumulation_steps = mine.local_batch_size, mine.accumulation_steps
        self.passes = max(entry.accumulation_steps for entry in enforcement.ranks) + 1
        self._path, self._job = path, job
        self._weigher.hand.missing = "call hook.bind(model, optimizer) when both are there"

    def bind(self, model: nn.Module, optimizer: torch.optim.Optimizer, *others: torch.optim.Optimizer) -> None:
        """Weigh and record what is trained. Raises InputError, on every rank, where it does not fit the plan."""
        if self._weigher.hand.missing is None:
            raise InputError("bind", "was called already", "attach once for each model")
        job = self._job
        trained = job.together(lambda: [bare_optimizer(each) for each in (optimizer, *others)])
        job.together(lambda: check_model(model, job))
        job.together(lambda: check_parameters(self._path, self.enforcement.parameters, model))
        file = None
        if self.enforcement.telemetry is not None:
            file = RowFile.of(self.enforcement.telemetry, job, self.enforcement.ranks[job.rank].device_type)
        self.recorder = _record(file, job, model, trained[0], self._weigher)
        begin_check(job, model, trained[0])
        if job.side is not None or self.recorder is not None:
            self._weigher.open(model, *trained)
        self._weigher.hand.missing = None

    def dataloader(
        self, *, batch_size: int, shuffle: bool = True, seed: int = 0, drop_last: bool = False, **options: Any
    ) -> DataLoader[Any]:
        """Return a DataLoader with the planned local batches; ``batch_size`` is replaced."""
        dataset = self._given_dataset(options)
        if isinstance(dataset, IterableDataset):
            return self._streamed(dataset, drop_last=drop_last, **options)
        if "shared" in options:
            raise InputError("dataloader", "shared is for iterable datasets", "leave it out")
        sampler = self._sampler(shuffle, seed, drop_last)
        return CountedLoader(dataset, sampler, self._weigher, **options)

    def planned(
        self, loader: DataLoader[Any], *, shared: bool = True, accumulated: int | None = None
    ) -> DataLoader[Any]:
        """Return a loader like ``loader`` with the planned batches."""
        given = self._job.together(lambda: GivenLoader(loader, self._job))
        passes = 1 if accumulated is None else self.passes
        if passes not in (1, accumulated):
            problem = f"of {accumulated} batches an update, where the plan makes {passes} passes"
            raise InputError("accumulation", problem, f"accumulate {passes}")
        if given.is_stream:
            if passes > 1:
                problem = f"is a stream, and the plan makes {passes} passes a step"
                raise InputError("loader", problem, "plan without accumulation, or give a dataset with a length")
            return self._streamed(given.dataset, shared=shared, drop_last=given.drop_last, **given.options)
        if given.dataset is not self._dataset:
            demand_same_samples(self._job, given.dataset)
        split = Sizes(fitting_sizes(self._sizes, len(self._sizes), sum(self._sizes), passes), passes, passes)
        sampler = VariableBatchSampler(given.samples, split, self.rank, drop_last=given.drop_last, order=given.order)
        self._follow_epoch(sampler)
        made = CountedLoader(given.dataset, sampler, self._weigher, **given.options)
        # Scripts tell it the epoch; DataLoader lets nobody set it.
        object.__setattr__(made, "sampler", given.sampler)
        return made

    def _streamed(self, stream: Any, **options: Any) -> DataLoader[Any]:
        return StreamLoader(stream, Sizes(tuple(self._sizes)), self._job, self._weigher, **options)

    def batch_sampler(
        self, *, batch_size: int, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> VariableBatchSampler:
        """Return the sampler of the planned local batches; ``batch_size`` is replaced."""
        sampler = self._sampler(shuffle, seed, drop_last)
        self._weigher.hand.follow(sampler, loose=True)
        return sampler

    def _sampler(self, shuffle: bool, seed: int, drop_last: bool) -> VariableBatchSampler:
        size = dataset_length(self._given_dataset({}))
        sampler = VariableBatchSampler(size, self._sizes, self.rank, shuffle, seed, drop_last)
        self._follow_epoch(sampler)
        return sampler


class ObservingHook(Hook):
    """The hook of a process in which nothing is enforced, and that writes telemetry to a file ``path``."""

    def __init__(self, path: str, dataset: Dataset[Any] | None, job: Job) -> None:
        self._observer = Observer(job, "hook")
        super().__init__(dataset, job.rank, job.world_size, self._observer)
        self._path, self._job = path, job

    def bind(self, model: nn.Module, optimizer: torch.optim.Optimizer, *others: torch.optim.Optimizer) -> None:
        """Record what is trained. Raises InputError, on every rank, where the file cannot be written."""
        first = self._job.together(lambda: bare_optimizer(optimizer))
        file = RowFile.of(self._path, self._job, device_of(model))
        self.recorder = _record(file, self._job, model, first, self._observer)
        self._observer.open(model)


def attach(
    config: str | os.PathLike[str] | None,
    *,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    dataset: Dataset[Any] | None = None,
    telemetry: str | os.PathLike[str] | None = None,
) -> Hook:
    """Make this process follow an enforcement config; call it once on every rank, before the first step.

    Args:
        config: path of an ``enforce.json`` (the same on every rank), or None: a hook that does and costs nothing, also for a
            model that is trained on batches of its own beside one that follows a plan. Where the
            environment variable DDLTOOL_ENFORCE names one, as emitted launchers do, it is that.
        model: the job's ``DistributedDataParallel`` module, or one that ``fully_shard`` or ``runtime.shard`` sharded over
            all processes (with a single process, any module). None: :meth:`Hook.bind` says it, and the optimizer, later.
        optimizer: the optimizer whose steps telemetry writes down.
        dataset: a dataset for :meth:`Hook.dataloader`; None if you give :meth:`Hook.planned` your own loader, or load
            ``hook.local_batch_size`` samples per step by your own means.
        telemetry: without a config, a file for what is measured all the same; a config names its own.

    With the environment variable DDLTOOL_OFF=1 any config is as None, without telemetry: for measuring what the hook costs.
    With DDLTOOL_CHECK=1 the first steps are held against those of one process (:mod:`~ddltool.runtime.hook.checking`).

    ``backward`` weighs each loss by the samples of the rank's batch; the loss must be a mean over them, and is refused where it
    is not (:meth:`Hook.loss` says what it is). Where the config names a telemetry file, this run is appended to it.
    ``DistributedDataParallel.join`` is not supported.

    Raises InputError, on every rank as soon as one rank refuses, when config and job do not fit. Left uncaught, that and any
    later refusal end the process with one line on stderr and exit code 2.
    """
    if config is None and model is not None:
        leave_alone(model)
    if is_set("DDLTOOL_OFF") or (config is None and telemetry is None):
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return Hook(dataset, rank, world_size)
    refuse_in_one_line()
    if config is not None and telemetry is not None:
        raise InputError("telemetry", "is in the config already", "leave it out, or give no config")
    if (model is None) != (optimizer is None):
        raise InputError(
            "attach", "got a model or an optimizer alone", "give both, or neither and call hook.bind later"
        )
    job, hook = Job.this(), Hook(dataset, 0, 1)
    if config is not None:
        path = config_path(config)
        enforcement = job.together(lambda: load_and_check(path, job, dataset))
        digest = hashlib.sha256(to_json(enforcement).encode()).hexdigest()[:12]
        job.demand_same(path, f"content {digest}", "give every rank the same file")
        demand_same_samples(job, dataset)
        hook = EnforcingHook(path, enforcement, dataset, job)
    elif telemetry is not None:
        hook = ObservingHook(os.fspath(telemetry), dataset, job)
    if model is not None and optimizer is not None:
        hook.bind(model, optimizer)
    return hook


def _record(
    file: RowFile | None, job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, weigher: Weigher
) -> StepRecorder | None:
    """Record the steps of ``optimizer`` in ``file``, if there is one."""
    if file is None:
        return None
    side = job.side if isinstance(model, DistributedDataParallel) else None
    recorder = StepRecorder(file, cuda=is_cuda(model), take_samples=weigher.hand.take_tally, side=side)
    weigher.watcher = recorder
    optimizer.register_step_pre_hook(recorder.before_update)
    optimizer.register_step_post_hook(recorder.after_update)
    return recorder
