"""Loads an enforcement config, checks it against the job, and attaches it to the model. Start at :func:`attach`.

::

    hook = runtime.attach("enforce.json", model=ddp_model, optimizer=optimizer, dataset=dataset)
    loader = hook.dataloader(batch_size=16, shuffle=True, seed=0)
    for epoch in range(epochs):
        hook.set_epoch(epoch)
        ...                                  # the training loop stays as it is

It enforces each rank's local batch size, and weights losses by their samples. A *step* is one update of the parameters;
it takes one or several *passes* (forward and backward), each on a part of the rank's local batch. The order in which
DDP's buckets are reduced is left to DDP, and the logical workers of an EST plan run as one batch per device.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from ddltool.artifacts import to_json
from ddltool.errors import InputError
from ddltool.plans import Enforcement
from ddltool.runtime.hook.gradient_watch import watch_gradients
from ddltool.runtime.hook.guards import leave_alone
from ddltool.runtime.hook.job import bare_optimizer, check_model, check_parameters, config_path, load_and_check
from ddltool.runtime.hook.loader import CountedLoader, GivenLoader, StreamLoader
from ddltool.runtime.hook.loss_scaling import LossScaler, Reduction
from ddltool.runtime.hook.outer import OuterSteps
from ddltool.runtime.hook.telemetry import StepRecorder, TelemetryFile
from ddltool.runtime.processes.batches import Sizes, VariableBatchSampler, fitting_sizes
from ddltool.runtime.processes.checking import begin_check, is_set, note_unchecked
from ddltool.runtime.processes.job import DistributedJob
from ddltool.runtime.processes.lengths import Lengths, as_lengths
from ddltool.runtime.processes.same_samples import dataset_length, demand_same_samples
from ddltool.runtime.processes.step_times import device_of, is_cuda
from ddltool.runtime.processes.stopping import refuse_in_one_line


class Hook:
    """The result of :func:`attach`. This base class enforces nothing: it gives DDP's standard loaders and registers no hooks.

    Attributes:
        rank, world_size: this process's place in the job.
        local_batch_size: planned samples of this rank in a step; None where nothing is enforced.
        passes: the largest number of passes (forward and backward) that any rank makes in a step.
        accumulation_steps: number of this rank's passes in a step before the last one; the script splits the local batch
            into this number plus 1.
        recorder: writes telemetry; None: there is none.
    """

    def __init__(
        self, dataset: Dataset[Any] | None, rank: int, world_size: int, scaler: LossScaler | None = None
    ) -> None:
        """Start without an epoch and without telemetry; without a ``scaler`` losses are not weighted."""
        self.rank = rank
        self.world_size = world_size
        self.local_batch_size: int | None = None
        self.accumulation_steps = 0
        self.passes = 1
        self.recorder: StepRecorder | None = None
        self._dataset = dataset
        self._scaler = scaler
        self._samplers: weakref.WeakSet[DistributedSampler[Any] | VariableBatchSampler] = weakref.WeakSet()
        self._epoch: int | None = None
        self._steps_made = 0
        self._outer: OuterSteps | None = None

    def dataloader(
        self,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        lengths: Any = None,
        **options: Any,
    ) -> DataLoader[Any]:
        """Return a DataLoader over this rank's share of the dataset.

        Without a config this is the standard DataLoader with a DistributedSampler; with one, ``batch_size`` is REPLACED
        by this rank's planned local batch. Call :meth:`set_epoch` before each epoch.

        Args:
            batch_size: samples of this rank in a batch, where nothing is enforced.
            shuffle, seed: the order of samples, as in torch's DistributedSampler.
            drop_last: leave out an epoch's last batch if it is smaller.
            lengths: (n,) tokens of the dataset's samples, or :class:`~ddltool.runtime.processes.lengths.Lengths`: the
                samples of each planned step are divided so that ranks end together. Losses that are means over tokens
                need ``count=`` in :meth:`loss`, as without lengths. Without a config they are ignored.
            options: go to ``DataLoader``.

        Raises InputError when no dataset was attached, when ``options`` contain a sampler, and on every rank for a wrong
        number of lengths.
        """
        dataset = self._given_dataset(options)
        sampler = self._standard_sampler(dataset, shuffle, seed)
        return DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=drop_last, **options)

    def batch_sampler(
        self, *, batch_size: int, shuffle: bool = True, seed: int = 0, drop_last: bool = False, lengths: Any = None
    ) -> Sampler[list[int]]:
        """Return the batch sampler of :meth:`dataloader`, for the script's own ``DataLoader(dataset, batch_sampler=...)``.

        ``shuffle`` and ``seed`` give the order of samples, as in torch's DistributedSampler; ``drop_last`` leaves out an
        epoch's last batch if it is smaller. Without a config ``lengths`` are ignored.
        """
        sampler = self._standard_sampler(self._given_dataset({}), shuffle, seed)
        return BatchSampler(sampler, batch_size, drop_last)

    def planned(
        self, loader: DataLoader[Any], *, shared: bool = True, accumulated: int | None = None, lengths: Any = None
    ) -> DataLoader[Any]:
        """Return a loader with the planned batches and the dataset, options and sample order of the script's ``loader``.

        The samples that a single process would get are divided among the ranks, whatever divided them before
        (``DistributedSampler``, accelerate). Without a config ``loader`` itself is returned.

        Args:
            loader: the script's loader.
            shared: for an iterable dataset, whether all ranks read the same stream; False: every rank has a stream of
                its own.
            accumulated: number of batches per update, where the script divides the loss of each by that number; it must
                be the plan's number of passes. None: each batch is a whole planned one.
            lengths: (n,) tokens of each of the dataset's samples, by index, or a ``Lengths``; None: samples are not
                divided by their lengths.

        Raises InputError, on every rank, for a loader whose sampler gives whole batches, for samples that differ between
        ranks, and where the plan makes another number of passes.
        """
        return loader

    def bind(self, model: nn.Module, optimizer: torch.optim.Optimizer, *others: torch.optim.Optimizer) -> None:
        """Attach to the model, where :func:`attach` was called without one: once on every rank, before the first step.

        ``optimizer``: the one whose steps telemetry records; ``others``: further optimizers of the model. This base
        class does nothing; the hooks of a config or of telemetry start their work here.
        """

    def named(self, name: str) -> Self:
        """Make error messages call this hook ``name`` from now on, and return the hook."""
        if self._scaler is not None:
            self._scaler.name = name
        return self

    def turn_to_next_batch(self, skip: int = 0, *, passed: Any = None) -> None:
        """Note that the next computation is on the loader's next batch, after ``skip`` batches that are dropped.

        Only for trainers that fetch several batches before they compute the first. ``passed``: the batch, if the
        computation does not call the wrapped model's forward pass; None: it does.
        """
        if self._scaler is not None:
            self._scaler.pending.turn_to_next(skip)
            if passed is not None:
                self._scaler.begin_forward(None, (passed,))

    @property
    def last_weight(self) -> float:
        """The factor by which the last loss's gradients were multiplied; 1 where nothing is weighted.

        The ranks' plain average of (loss x factor) is the mean over all samples of all ranks.
        """
        return 1.0 if self._scaler is None else self._scaler.last_weight

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, by whose number all loaders of this hook order their samples; the same on every rank."""
        self._epoch = epoch
        for sampler in self._samplers:
            sampler.set_epoch(epoch)
        if self.recorder is not None:
            self.recorder.begin_epoch()

    def resumed(self, steps: int) -> None:
        """Make telemetry number the next step ``steps``: call it before the first step if a checkpoint was loaded.

        ``steps``: number of steps made before that checkpoint. So ``ddltool verify`` finds the steps of an earlier run
        that were lost. Raises InputError for a negative number.
        """
        if steps < 0:
            raise InputError("resumed", f"is {steps}", "give the number of steps made before, 0 or more")
        self._steps_made = steps
        if self.recorder is not None:
            self.recorder.resume(steps)

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Count the time of the block as a checkpoint in telemetry: ``with hook.checkpoint(): save(...)``.

        Use it between two steps, on every rank. Where only one rank writes, let the others wait for it inside the block,
        so that their waiting counts too.
        """
        with nullcontext() if self.recorder is None else self.recorder.checkpoint():
            yield

    def count_samples(self, samples: int) -> None:
        """Set the number of samples of the next forward pass; call it before each. Raises InputError for a negative number.

        It is needed only with a loader of the script's own, if dimension 0 of the model's first tensor argument is not
        the samples.
        """
        if self._scaler is not None:
            self._scaler.pending.announce(samples)

    def loss(self, loss: Tensor, *, count: float | Tensor | None = None, reduction: Reduction = "mean") -> Tensor:
        """Return ``loss`` with its value unchanged and its gradients weighted by this rank's share of all ranks' ``count``.

        Each term of a loss needs a call of its own. The full rules and errors are at
        :meth:`~ddltool.runtime.hook.loss_scaling.LossScaler.loss`.

        Args:
            loss: the loss of this rank's batch.
            count: the number of elements (such as tokens) that the loss is a mean over on this rank; None: its samples.
            reduction: "mean"; "sum" for a sum over the elements; "average" if the ranks' plain average is right.
        """
        return loss if self._scaler is None else self._scaler.loss(loss, count=count, reduction=reduction)

    def outer(self, model: nn.Module, inner: torch.optim.Optimizer, *, every: int, **settings: Any) -> OuterSteps:
        """Average this island's parameters with the other islands' after every ``every`` steps of the optimizer ``inner``.

        Call it once, on every rank, before the first step; the loop stays as it is. Returns the object that does it,
        whose other arguments are ``settings``. Raises InputError for a setting out of its range, and for a second call.
        """
        if self._outer is not None:
            raise InputError("outer", "was called already", "call it once for each model that is attached to")
        self._outer = OuterSteps(model, bare_optimizer(inner), every=every, **settings)
        return self._outer

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank needs to resume besides model, optimizer and loader: the state of its outer steps, if any."""
        return {} if self._outer is None else {"outer": self._outer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state of :meth:`state_dict`; call it after :meth:`outer`.

        Raises InputError for a state with outer steps where the hook has none, or the reverse, or of other parameters.
        """
        if ("outer" in state) != (self._outer is not None):
            problem = "has outer steps, and the hook has none" if "outer" in state else "has no outer steps"
            raise InputError("state", problem, "call hook.outer first, as in the run before")
        if self._outer is not None:
            self._outer.load_state_dict(state["outer"])

    def close(self) -> None:
        """Write telemetry that is still buffered, as also happens at exit; gradients stay weighted. More calls do nothing."""
        if self.recorder is not None:
            self.recorder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _given_dataset(self, options: dict[str, Any]) -> Dataset[Any]:
        """Return the dataset given to :func:`attach`. Raises InputError if there is none or ``options`` contain a sampler."""
        if self._dataset is None:
            raise InputError("dataset", "was not given to attach", "call runtime.attach(..., dataset=dataset)")
        if sampler_options := sorted(options.keys() & {"sampler", "batch_sampler"}):
            remedy = "use hook.batch_sampler(...) in a DataLoader of your own"
            raise InputError("dataloader", f"{sampler_options[0]} is the hook's to choose", remedy)
        return self._dataset

    def _follow_epoch(self, sampler: DistributedSampler[Any] | VariableBatchSampler) -> None:
        """Set the sampler's epoch, now and at every :meth:`set_epoch`."""
        self._samplers.add(sampler)
        if self._epoch is not None:
            sampler.set_epoch(self._epoch)

    def _record(
        self,
        file: TelemetryFile,
        job: DistributedJob,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: LossScaler,
    ) -> None:
        """Record the steps of ``optimizer`` in ``file``.

        ``scaler`` tells the recorder of the model's forward and backward passes and of their samples. Under DDP the
        ranks of ``job`` also exchange beacons, which show when the slowest of them is ready.
        """
        side = job.side if isinstance(model, DistributedDataParallel) else None
        recorder = StepRecorder(file, cuda=is_cuda(model), take_samples=scaler.pending.take_tally, side=side)
        recorder.resume(self._steps_made)
        self.recorder = recorder
        scaler.watcher = recorder
        optimizer.register_step_pre_hook(recorder.before_update)
        optimizer.register_step_post_hook(recorder.after_update)

    def _standard_sampler(self, dataset: Dataset[Any], shuffle: bool, seed: int) -> DistributedSampler[Any]:
        """Return torch's sampler of this rank's samples, which follows :meth:`set_epoch`."""
        place = self.world_size, self.rank
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, *place, shuffle=shuffle, seed=seed)
        self._follow_epoch(sampler)
        return sampler


class EnforcingHook(Hook):
    """The hook of a process that follows the enforcement config in the file ``path``."""

    def __init__(self, path: str, enforcement: Enforcement, dataset: Dataset[Any] | None, job: DistributedJob) -> None:
        """Take this rank's sizes from the config; until :meth:`bind`, losses are not weighted and loaders raise InputError.

        ``path``: the config's, for messages; ``dataset``: for :meth:`dataloader`, or None; ``job``: the ranks.
        """
        sizes = tuple(entry.local_batch_size for entry in enforcement.ranks)
        own_entry = enforcement.ranks[job.rank]
        self._scaler: LossScaler = LossScaler(job, "hook", lambda: sizes, passes=own_entry.accumulation_steps + 1)
        super().__init__(dataset, job.rank, enforcement.world_size, self._scaler)
        self.enforcement = enforcement
        self._path = path
        self._job = job
        self._sizes = Sizes(sizes)
        self.local_batch_size = own_entry.local_batch_size
        self.accumulation_steps = own_entry.accumulation_steps
        self.passes = max(entry.accumulation_steps for entry in enforcement.ranks) + 1
        self._scaler.pending.missing = "call hook.bind(model, optimizer) when both are there"

    def bind(self, model: nn.Module, optimizer: torch.optim.Optimizer, *others: torch.optim.Optimizer) -> None:
        """Check that the model is the planned one, start to weight its losses, and record the steps of ``optimizer``.

        Ranks are compared after the updates of all optimizers. Raises InputError, on every rank, for another model than
        planned, and when called twice.
        """
        if self._scaler.pending.missing is None:
            raise InputError("bind", "was called already", "attach once for each model")
        job = self._job
        planned = self.enforcement
        optimizers = job.together(lambda: [bare_optimizer(wrapped) for wrapped in (optimizer, *others)])
        job.together(lambda: check_model(model, job))
        job.together(lambda: check_parameters(self._path, planned.parameters, model))
        watch_gradients(model, optimizers[0], job.rank)
        if planned.telemetry is not None:
            file = TelemetryFile.of(planned.telemetry, job, planned.ranks[job.rank].device_type)
            self._record(file, job, model, optimizers[0], self._scaler)
        begin_check(job, model, *optimizers, path=self._path)
        # A single process has nothing to weight, so its passes are watched for telemetry only.
        if job.side is not None or self.recorder is not None:
            self._scaler.open(model, *optimizers)
        self._scaler.pending.missing = None
        note_unchecked(self._path, planned, job)

    def dataloader(
        self,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        lengths: Any = None,
        **options: Any,
    ) -> DataLoader[Any]:
        """Return a DataLoader of this rank's planned batches, which replace ``batch_size``; arguments as for the base class.

        ``drop_last`` leaves out the remainder of an epoch that is smaller than a step. An iterable dataset is read as a
        stream, in its own order and without ``lengths``.
        """
        dataset = self._given_dataset(options)
        if isinstance(dataset, IterableDataset):
            _demand_no_lengths(lengths)
            return StreamLoader(dataset, self._sizes, self._job, self._scaler, drop_last=drop_last, **options)
        sampler = self._planned_sampler(shuffle, seed, drop_last, lengths)
        return CountedLoader(dataset, sampler, self._scaler, **options)

    def batch_sampler(
        self, *, batch_size: int, shuffle: bool = True, seed: int = 0, drop_last: bool = False, lengths: Any = None
    ) -> VariableBatchSampler:
        """Return the sampler of the planned local batches, which replace ``batch_size``.

        The script's own loader does not report when it hands out a batch, so the hook looks up what the sampler has
        issued. The other arguments are the same as for :meth:`dataloader`.
        """
        sampler = self._planned_sampler(shuffle, seed, drop_last, lengths)
        self._scaler.pending.unannounced.add(sampler)
        return sampler

    def planned(
        self, loader: DataLoader[Any], *, shared: bool = True, accumulated: int | None = None, lengths: Any = None
    ) -> DataLoader[Any]:
        """Return a loader with the dataset, order, workers and collation of ``loader``, and this rank's planned batches.

        The arguments and errors are those of the base class. A stream where an update has several batches is refused too.
        """
        given = self._job.together(lambda: GivenLoader(loader, self._job))
        passes = 1 if accumulated is None else accumulated
        if accumulated not in (None, self.passes):
            planned = "1 pass" if self.passes == 1 else f"{self.passes} passes"
            total = self.enforcement.total_batch_size
            problem = f"is {accumulated}, but the plan makes an update of {total} samples in {planned}"
            remedy = "update after each batch" if self.passes == 1 else f"accumulate {self.passes} batches"
            raise InputError("accumulated", problem, f"{remedy}, or plan again")
        if given.is_stream:
            _demand_no_lengths(lengths)
            if passes > 1:
                problem = f"is a stream, and the plan makes {passes} passes a step"
                raise InputError("loader", problem, "plan without accumulation, or give a dataset with a length")
            stream: Any = given.dataset
            options = {"shared": shared, "drop_last": given.drop_last, **given.options}
            return StreamLoader(stream, self._sizes, self._job, self._scaler, **options)
        if given.dataset is not self._dataset:  # that one was compared by `attach`
            demand_same_samples(self._job, given.dataset)
        split = replace(self._sizes, least=passes, passes=passes)  # at least one sample for each pass
        fitting_sizes(split.sizes, split.world_size, split.total_batch_size, passes)  # raises if a rank has fewer
        known_lengths = self._same_lengths(lengths, given.dataset)
        options = {"drop_last": given.drop_last, "order": given.order, "lengths": known_lengths}
        sampler = VariableBatchSampler(given.samples, split, self.rank, **options)
        self._follow_epoch(sampler)
        planned_loader = CountedLoader(given.dataset, sampler, self._scaler, **given.options)
        # Scripts call its set_epoch; DataLoader refuses a plain assignment.
        object.__setattr__(planned_loader, "sampler", given.sampler)
        return planned_loader

    def _planned_sampler(self, shuffle: bool, seed: int, drop_last: bool, lengths: Any) -> VariableBatchSampler:
        """Return the sampler of this rank's planned batches, which follows :meth:`set_epoch`.

        ``shuffle`` and ``seed`` give the order of samples; ``drop_last`` leaves out an epoch's remainder; ``lengths``: (n,)
        tokens of the dataset's samples, or None. Raises InputError without a dataset (:meth:`_given_dataset`), for one
        without a length, and for lengths that do not fit it or differ between ranks (:meth:`_same_lengths`).
        """
        dataset = self._given_dataset(options={})  # no options of a DataLoader, which could name a sampler of its own
        known_lengths = self._same_lengths(lengths, dataset)
        size = dataset_length(dataset)
        sampler = VariableBatchSampler(size, self._sizes, self.rank, shuffle, seed, drop_last, lengths=known_lengths)
        self._follow_epoch(sampler)
        return sampler

    def _same_lengths(self, given: Any, dataset: Dataset[Any]) -> Lengths | None:
        """Return the lengths of the dataset's samples as :class:`Lengths`; None for None.

        Raises InputError, on every rank, for a wrong number of lengths, and if ranks differ.
        """
        lengths = self._job.together(lambda: as_lengths(given, dataset_length(dataset)))
        digest = "none" if lengths is None else lengths.digest
        self._job.demand_same("lengths", digest, "give every rank the same lengths")
        return lengths


def _demand_no_lengths(lengths: Any) -> None:
    """Raise InputError unless ``lengths`` is None: samples of a stream have no index."""
    if lengths is not None:
        raise InputError("lengths", "is given for a stream", "leave it out, or give a dataset with a length")


class ObservingHook(Hook):
    """The hook of a process without a config, which only writes telemetry to the file ``path``."""

    def __init__(self, path: str, dataset: Dataset[Any] | None, job: DistributedJob) -> None:
        self._observer = LossScaler(job, "hook", weighs=False)
        super().__init__(dataset, job.rank, job.world_size, self._observer)
        self._path = path
        self._job = job

    def bind(self, model: nn.Module, optimizer: torch.optim.Optimizer, *others: torch.optim.Optimizer) -> None:
        """Start to record the steps of ``optimizer``. Raises InputError, on every rank, if the file cannot be written."""
        bare = self._job.together(lambda: bare_optimizer(optimizer))
        watch_gradients(model, bare, self._job.rank)
        self._record(TelemetryFile.of(self._path, self._job, device_of(model)), self._job, model, bare, self._observer)
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
        config: path of an ``enforce.json``, the same on every rank. A path in the environment variable DDLTOOL_ENFORCE,
            which emitted launchers set, replaces it. None: the hook does and costs nothing; use this also for a second
            model that is trained on its own batches beside one that follows a plan.
        model: the job's ``DistributedDataParallel`` module, or one that ``fully_shard`` or ``runtime.shard`` sharded
            over all processes; with a single process any module. None: model and optimizer are given to
            :meth:`Hook.bind` later.
        optimizer: the one whose steps telemetry records.
        dataset: for :meth:`Hook.dataloader`; None where :meth:`Hook.planned` gets a loader, or the script loads samples
            itself.
        telemetry: a file to which telemetry is appended, if there is no config; a config names its own.

    Each loss must go through :meth:`Hook.loss`. ``DistributedDataParallel.join`` is not supported. With the environment
    variable DDLTOOL_OFF=1 any config counts as None, without telemetry, to measure the hook's cost. With DDLTOOL_CHECK=1
    the first steps are compared with those of one process (:mod:`~ddltool.runtime.processes.checking`).

    Raises InputError when config and job do not fit, on every rank if one rank refuses. Uncaught, this and any later
    error of ddltool end the process with one line on stderr and exit code 2.
    """
    if config is None and optimizer is not None:
        leave_alone(bare_optimizer(optimizer))  # else the hook of a model with a plan would refuse its updates
    if is_set("DDLTOOL_OFF") or (config is None and telemetry is None):
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return Hook(dataset, rank, world_size)
    refuse_in_one_line()
    if config is not None and telemetry is not None:
        raise InputError("telemetry", "is in the config already", "leave it out, or give no config")
    if (model is None) != (optimizer is None):
        remedy = "give both, or neither and call hook.bind later"
        raise InputError("attach", "got a model or an optimizer alone", remedy)
    job = DistributedJob.this()
    hook: Hook
    if config is None:
        assert telemetry is not None  # without both, a hook that does nothing was returned above
        hook = ObservingHook(os.fspath(telemetry), dataset, job)
    else:
        path = config_path(config)
        enforcement = job.together(lambda: load_and_check(path, job, dataset))
        digest = hashlib.sha256(to_json(enforcement).encode()).hexdigest()[:12]
        job.demand_same(path, f"content {digest}", "give every rank the same file")
        demand_same_samples(job, dataset)
        hook = EnforcingHook(path, enforcement, dataset, job)
    if model is not None and optimizer is not None:
        hook.bind(model, optimizer)
    return hook
