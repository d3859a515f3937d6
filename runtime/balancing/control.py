"""Batch sizes that follow the workers' speeds while a DDP job runs (LB-BSP). Start at :func:`balance`.

::

    balancer = balance(ddp_model, optimizer, dataset, total_batch=256)
    loader = balancer.dataloader(shuffle=True, seed=0)
    for epoch in range(epochs):
        balancer.set_epoch(epoch)
        ...                                  # the training loop stays as it is

After each optimizer step every rank reports samples and seconds; rank 0 chooses sizes with the same sum; all ranks load
by them from the next step on that no loader has loaded yet. Gradients are weighted by samples, so the result is the mean over
all samples whatever the sizes. A worker's step is never interrupted: sizes change between steps only.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from ddltool.analyzers.balancing import algorithm2, predict
from ddltool.analyzers.balancing.control import Policy, SpeedPolicy, TrialPolicy
from ddltool.analyzers.balancing.sizing import equal
from ddltool.errors import InputError
from ddltool.runtime.balancing.arguments import check_options, whole_samples
from ddltool.runtime.balancing.clock import StepClock, row_of
from ddltool.runtime.balancing.events import EventFile, Manager
from ddltool.runtime.balancing.exchange import TIMEOUT_S, Exchange, KeyStore, default_store, own, under
from ddltool.runtime.balancing.least import least_samples
from ddltool.runtime.balancing.loop import Background, Blocking
from ddltool.runtime.balancing.loss import LossReport
from ddltool.runtime.balancing.sampler import BalancedLoader, BalancedSampler, fitting_sizes
from ddltool.runtime.balancing.tree import TreeExchange
from ddltool.runtime.hook.attaching import register
from ddltool.runtime.hook.gradients import SampleCounter, WeightedAverage
from ddltool.runtime.hook.job import Job, dataset_length

Cluster = Literal["cpu", "gpu"]
MOST_BLOCKING = 16
# In a job a worker that has become slow holds up all others until the sizes follow, so both ways notice lasting changes.
LIVE_LEARNING = predict.Settings(background=True, restart_after=3)
LIVE_TRIAL = algorithm2.Settings(renew=True)
# Each job in a process has keys of its own: the last ones of a job before would be taken for answers.
_NUMBERS = itertools.count()


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceOptions:
    """How to balance. The same on every rank."""

    cluster: Cluster = "cpu"
    """``cpu``: sizes by predicted speeds, chosen while all wait; ``gpu``: Algorithm 2, chosen behind the next step."""
    predictor: str = "ema"
    """For ``cpu``: last, ema, arima, rnn, lstm or narx."""
    learning: predict.Settings | None = None
    """How a predictor learns; None: as the paper has it, networks in the background, and EMA, theirs before they have
    learned too, begins anew after three steps that show a lasting change."""
    trial: algorithm2.Settings | None = None
    """Algorithm 2's steps and windows; None: the paper's, and the fast approach again after a lasting change."""
    tolerance: float = 0.0
    """For ``cpu``: share by which the longest predicted time must fall for sizes to change."""
    background: bool | None = None
    """Choose behind the next step; None: for ``gpu``, and for more than 16 ranks, whose reports take a while."""
    enabled: bool = True
    """False: sizes stay as they were given (BSP, or known speeds), gradients are weighted all the same."""
    compress: Literal["bf16"] | None = None
    """Let gradients travel as bfloat16."""
    timeout_s: float = TIMEOUT_S
    """How long a rank waits for the others' reports."""


class Balancer:
    """What :func:`balance` returns: one rank's end.

    Attributes:
        rank, world_size: this process's place.
        total_batch: samples of all ranks per step; never changes.
        least: samples that every rank gets in every step.
    """

    def __init__(
        self,
        job: Job,
        dataset: Dataset[Any],
        sizes: tuple[int, ...],
        loop: Blocking | Background | None,
        clock: StepClock,
        readings: bool,
        least: int = 1,
    ) -> None:
        self.rank = job.rank
        self.world_size = job.world_size
        self.least = least
        self.total_batch = sum(sizes)
        self.manager: Manager | None = None
        self.report: LossReport | None = None
        self._job = job
        self._dataset = dataset
        self._sizes = sizes
        self._loop = loop
        self._clock = clock
        self._readings = readings
        self._sampler: BalancedSampler | None = None
        self._loader: BalancedLoader | None = None
        self._recall: dict[str, Any] | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """(n,) samples of each rank in the next full step that is loaded."""
        return self._sizes

    @property
    def waited_s(self) -> float:
        """Seconds in all that this rank's steps were held up by choosing batch sizes."""
        return 0.0 if self._loop is None else self._loop.waited_s

    def dataloader(self, *, shuffle: bool = True, seed: int = 0, **options: Any) -> DataLoader[Any]:
        """Return the loader of this rank's batches; ``options`` go to ``DataLoader``. Call on every rank, once.

        With data workers, lists of indices are handed out ahead (``num_workers * prefetch_factor`` steps), and new sizes
        come into force as much later. Raises InputError when called again, when ``options`` choose samples themselves, when
        ranks would look ahead differently far, or for a dataset without a length or of less than ``least`` for every rank.
        """
        if self._sampler is not None:
            raise InputError("dataloader", "was made already", "use one loader per balancer")
        if taken := sorted(options.keys() & {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}):
            raise InputError("dataloader", f"{taken[0]} is the balancer's to choose", "leave it out")
        sampler = BalancedSampler(dataset_length(self._dataset), self._sizes, self.rank, shuffle, seed, self.least)
        loader = BalancedLoader(self._dataset, sampler, **options)
        ahead = loader.num_workers * (loader.prefetch_factor or 0)
        self._job.demand_same(
            "dataloader", f"{ahead} steps ahead, seed {seed}, shuffle {shuffle}", "use the same on all ranks"
        )
        self._sampler, self._loader = sampler, loader
        if self._recall is not None:
            self._restore(self._recall)
        return loader

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch's order of samples; the same number on every rank."""
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)

    def after_step(self, *_: object) -> None:
        """The optimizer has made its update: report, and take over new sizes. Runs by itself as an optimizer hook."""
        exchanges = self._clock.take()
        if not exchanges and self.world_size > 1:
            return  # an update without a backward pass before it is no step
        passes = self._clock.take_passes()
        if self._loader is not None:
            self._loader.commit(passes)
        if self._loop is None:
            return
        chosen = self._loop.next(lambda: row_of(exchanges, self._clock.cuda, self._readings))
        if chosen is None:
            return
        self._resize(tuple(int(size) for size in chosen))

    def set_sizes(self, sizes: Sequence[int]) -> None:
        """Use other sizes with the same sum from the next step that is not loaded yet; the same on every rank.

        Raises InputError where sizes are being chosen (``enabled``) or do not fit.
        """
        if self._loop is not None:
            raise InputError("sizes", "are chosen by speed in this job", "set BalanceOptions(enabled=False)")
        self._resize(fitting_sizes(sizes, self.world_size, self.total_batch, self.least))

    def _resize(self, sizes: tuple[int, ...]) -> None:
        if sizes != self._sizes:
            if self._sampler is not None:
                self._sampler.resize(sizes)
            self._sizes = sizes

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs, as plain numbers; save rank 0's. Call between steps."""
        sampler = {} if self._sampler is None else self._sampler.state_dict()
        return {"sampler": sampler, "policy": {} if self.manager is None else self.manager.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the last step of a checkpoint, on every rank with the same state, before the first step.

        The number of ranks may be another; sizes then stay as they were given. Raises InputError when dataset, order or
        total batch differ.
        """
        self._recall = state
        if self._sampler is not None:
            self._restore(state)

    def _restore(self, state: dict[str, Any]) -> None:
        assert self._sampler is not None
        self._sampler.load_state_dict(state.get("sampler", {}))
        self._sizes = self._sampler.sizes
        if self.manager is not None:
            self.manager.load_state_dict(state.get("policy", {}), self._sizes)

    def close(self) -> None:
        """End threads and groups of choosing sizes; call after the last step on every rank, each when it gets there.

        Idempotent; gradients stay weighted.
        """
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()
        if self.report is not None:
            self.report.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def balance(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    dataset: Dataset[Any],
    *,
    total_batch: int | None = None,
    sizes: Sequence[int] | None = None,
    limits: Sequence[int] | None = None,
    least: int | None = None,
    options: BalanceOptions | None = None,
    events: str | os.PathLike[str] | None = None,
    store: KeyStore | None = None,
) -> Balancer:
    """Balance the load of a DDP job; call once on every rank, before the first step.

    Args:
        model, optimizer: the job's; the loss must be a mean over the local batch, which reaches the model through its output.
        dataset: all samples, the same on every rank.
        total_batch: X, samples of all ranks per step, split equally at the start; not needed with ``sizes``.
        sizes: (n,) samples of each rank at the start.
        limits: (n,) most samples that each rank's memory holds; None: memory use alone limits growth.
        least: samples that every rank gets in every step; None: 1, or 2 where the model has a BatchNorm layer in training
            mode, which cannot do with one (SyncBatchNorm can).
        options: how to balance.
        events: JSON Lines file that rank 0 writes resizes and advice to.
        store: where ranks talk; None: the one of ``init_process_group``. More than 16 ranks that all wait talk over a gloo
            group of the job's default process group instead, and use the store to find out who is missing.

    Raises InputError, on every rank, when something does not fit together.
    """
    job = Job.this()
    chosen = options if options is not None else BalanceOptions()
    path = None if events is None else Path(events)
    start, fewest, manager = job.together(lambda: _prepare(job, model, total_batch, sizes, limits, least, chosen, path))
    job.demand_same("batch sizes", f"{start}, at least {fewest}", "give every rank the same sizes and the same least")
    cuda = any(parameter.is_cuda for parameter in model.parameters())
    clock = StepClock(cuda)
    loop: Blocking | Background | None = None
    exchange: Exchange | None = None
    if job.world_size > 1 and chosen.enabled:
        name = f"ddltool/balance/{next(_NUMBERS)}"
        shared = store if store is not None else default_store()
        # Through the store, rank 0 is to be the first to give up: it knows who is missing, and tells the others.
        link = own(shared, name, chosen.timeout_s * (1.0 if job.rank == 0 else 1.5))
        many = job.world_size > MOST_BLOCKING
        behind = (chosen.cluster == "gpu" or many) if chosen.background is None else chosen.background
        if many and not behind:
            exchange = TreeExchange(link, job.rank, job.world_size, manager, chosen.timeout_s)
        else:
            exchange = Exchange(link, job.rank, job.world_size, manager, under(shared, name))
        loop = Background(exchange) if behind else Blocking(exchange)
    balancer = Balancer(job, dataset, start, loop, clock, chosen.predictor in predict.READING, fewest)
    if job.world_size > 1:
        balancer.report = LossReport(exchange, balancer.close)
    balancer.manager = manager if job.rank == 0 else None
    counter = SampleCounter(required=job.world_size > 1)
    model.register_forward_pre_hook(_forward(counter, clock), with_kwargs=True)
    if job.side is not None:
        compress = torch.bfloat16 if chosen.compress == "bf16" else None
        average = WeightedAverage(counter, sum(start), model.process_group, job.side, clock, compress)
        register(model, average)
        model.register_forward_hook(counter.weigh)
    optimizer.register_step_post_hook(balancer.after_step)
    return balancer


def _prepare(
    job: Job,
    model: nn.Module,
    total_batch: int | None,
    sizes: Sequence[int] | None,
    limits: Sequence[int] | None,
    least: int | None,
    options: BalanceOptions,
    events: Path | None,
) -> tuple[tuple[int, ...], int, Manager]:
    """Return the first sizes, the least ones, and what chooses the next. Raises InputError for what does not fit."""
    if job.world_size > 1 and not isinstance(model, DistributedDataParallel):
        raise InputError("model", f"is a {type(model).__name__}", "wrap it in DistributedDataParallel first")
    check_options(options)
    if total_batch is not None:
        total_batch = whole_samples("total_batch", total_batch)
    sizes = None if sizes is None else [whole_samples("sizes", size) for size in sizes]
    limits = None if limits is None else [whole_samples("limits", limit) for limit in limits]
    total = total_batch if sizes is None else sum(sizes)
    if total is None:
        raise InputError("total_batch", "is missing", "give it, or the sizes of all ranks")
    fewest = least_samples(model, least, job.world_size, total, sizes, limits)
    if sizes is None:
        sizes = equal(job.world_size, total, limits, fewest).tolist()
    if len(sizes) != job.world_size:
        raise InputError("sizes", f"has {len(sizes)} entries", f"give one for each of {job.world_size} ranks")
    if total_batch is not None and sum(sizes) != total_batch:
        raise InputError("sizes", f"add up to {sum(sizes)}", f"the total batch is {total_batch}")
    policy: Policy
    if options.cluster == "gpu":
        policy = TrialPolicy(sizes, limits, options.trial if options.trial is not None else LIVE_TRIAL, fewest)
    else:
        learning = options.learning if options.learning is not None else LIVE_LEARNING
        policy = SpeedPolicy(sizes, limits, options.predictor, learning, tolerance=options.tolerance, least=fewest)
    start = tuple(int(size) for size in np.asarray(policy.sizes))
    return start, fewest, Manager(policy, EventFile(events if job.rank == 0 else None))


def _forward(counter: SampleCounter, clock: StepClock) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
    """Return what happens before each forward pass of the model: nothing unless gradients are wanted."""

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            counter.count(module, args, kwargs)
            if module.training:
                clock.begin_forward()

    return begin
