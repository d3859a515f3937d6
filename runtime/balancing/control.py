"""Batch sizes that follow the workers' speeds while a DDP job runs (LB-BSP). Start at :func:`balance`.

::

    balancer = balance(ddp_model, optimizer, dataset, total_batch=256)
    loader = balancer.dataloader(shuffle=True, seed=0)
    for epoch in range(epochs):
        balancer.set_epoch(epoch)
        ...                                  # the training loop stays as it is

After optimizer steps every rank reports its samples and seconds. Rank 0 chooses sizes with the same sum. All ranks use
them from the first step on that no rank's loader has loaded yet. Losses are weighted by samples, so gradients are the
mean over all samples whatever the sizes. Sizes change between steps only.
"""

from __future__ import annotations

import atexit
import logging
import operator
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from ddltool.analyzers.job.balancing import algorithm2
from ddltool.analyzers.job.balancing.control import Policy, Report, SpeedPolicy, TrialPolicy
from ddltool.analyzers.job.balancing.predict import READING
from ddltool.analyzers.job.balancing.sizing import equal
from ddltool.analyzers.job.balancing.trained import PredictorSettings
from ddltool.arrays import Floats
from ddltool.artifacts import kind_of
from ddltool.errors import InputError
from ddltool.runtime.hook.job import bare_optimizer, demand_wrapped
from ddltool.runtime.hook.loader import CountedLoader
from ddltool.runtime.hook.loss_scaling import LossScaler, Reduction
from ddltool.runtime.hook.telemetry import PassClock
from ddltool.runtime.measuring.share import available_memory, expected_cpu
from ddltool.runtime.processes.batches import VariableBatchSampler, fitting_sizes
from ddltool.runtime.processes.checking import begin_check, is_reference
from ddltool.runtime.processes.consensus import Consensus
from ddltool.runtime.processes.job import DistributedJob
from ddltool.runtime.processes.line_files import LineFile, new_run
from ddltool.runtime.processes.same_samples import dataset_length, demand_same_samples
from ddltool.runtime.processes.step_times import Exchange, is_cuda
from ddltool.runtime.processes.stopping import pause_before_exit, refuse_in_one_line
from ddltool.telemetry import BalanceEvent

log = logging.getLogger(__name__)
Cluster = Literal["cpu", "gpu"]
MOST_BLOCKING = 16
"""With more ranks, sizes are chosen while the next step runs, because waiting for all reports would take too long."""
MOST_STEPS_UNREPORTED = 20
"""Ranks report their speed at least once in this many steps."""
MOST_SAMPLES = 10**12
"""The largest number of samples that is accepted; a larger one is a mistake."""
LEAST_NORMALIZED = 2
"""Fewest samples under BatchNorm: it divides by the batch's standard deviation, and torch refuses a single sample."""
# A worker that has become slow holds up all others until the sizes follow, so both ways notice lasting changes.
LIVE_LEARNING = PredictorSettings(background=True, restart_after=3)
LIVE_TRIAL = algorithm2.Algorithm2Settings(renew=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceOptions:
    """How to balance. The same on every rank."""

    cluster: Cluster = "cpu"
    """``cpu``: sizes by predicted speeds, while all ranks wait; ``gpu``: by Algorithm 2, while the next step runs."""
    predictor: str = "ema"
    """For ``cpu``: last, ema, arima, rnn, lstm or narx."""
    learning: PredictorSettings | None = None
    """How a predictor learns; None: as in the paper, but networks learn in the background, and EMA (which networks use
    until they have learned) starts anew after three steps that show a lasting change."""
    trial: algorithm2.Algorithm2Settings | None = None
    """Algorithm 2's steps and windows; None: the paper's, with the fast approach repeated after a lasting change."""
    tolerance: float | None = None
    """For ``cpu``: share by which the longest predicted time must fall for sizes to change; None: the median error of
    the latest predictions, so that noise moves no samples; 0: always take the best sizes, as in the paper."""
    background: bool | None = None
    """Choose while the next step runs; None: for ``gpu``, and for more than 16 ranks, whose reports take a while."""
    enabled: bool = True
    """False: sizes stay as given (BSP, or known speeds); gradients are weighted all the same."""
    compress: Literal["bf16"] | None = None
    """Send gradients as bfloat16."""
    interval_s: float = 0.2
    """Where all ranks wait for the choice: seconds between reports, rounded down to whole steps, 1 to 20. In the
    background ranks report at every step."""
    timeout_s: float | None = None
    """How long a rank waits for the others' reports; None: as long as the job's process group waits in a collective."""

    def check(self) -> None:
        """Raise InputError naming the first option whose value is not among its choices, or not within its range."""
        choices: dict[str, tuple[object, ...]] = {
            "cluster": ("cpu", "gpu"),
            "compress": (None, "bf16"),
            "background": (None, True, False),
            "enabled": (True, False),
        }
        for name, allowed in choices.items():
            if (value := getattr(self, name)) not in allowed:
                raise InputError(name, f"is {value!r}", " or ".join(map(str, allowed)))
        ranges = {
            "tolerance": (0.0, 1.0, "a share from 0 to 1"),
            "timeout_s": (0.001, 1e6, "seconds from 0.001 to 1e6"),
            "interval_s": (0.0, 1e3, "seconds from 0 to 1000"),
        }
        for name, (least_value, most_value, description) in ranges.items():
            value = getattr(self, name)
            is_default = value is None and name != "interval_s"
            if not is_default and not (isinstance(value, (int, float)) and least_value <= value <= most_value):
                raise InputError(name, f"is {value!r}", f"give {description}")


class _StepClock(PassClock):
    """Measures what this rank did in a step: samples, seconds of its own computation, and shares of memory and CPU.

    The seconds run from the first forward pass to the moment at which this rank's gradients are complete. The exchange
    and the wait for other ranks are left out. On CUDA both ends are events on the device's timeline.
    """

    readings = False
    """Whether to read the share of CPU that can be expected, which takes a millisecond and which some predictors use."""

    def row(self, exchanges: list[Exchange]) -> Floats:
        """Return this rank's report of the passes in ``exchanges``, (5,): samples, seconds, and three shares from 0 to 1.

        The shares are memory in use (the most so far on CUDA), CPU that can be expected (1 where it is not read), and
        memory of the host available. On CUDA this blocks until the device has computed the gradients.
        """
        seconds = 0.0
        for exchange in exchanges:
            ready = exchange.ready or exchange.start  # `split` counts no seconds without `ready`
            if ready.event is not None:
                ready.event.synchronize()
            seconds += exchange.split()[0]
        samples = sum(exchange.samples for exchange in exchanges)
        available_share = available_memory()
        used_share = 1.0 - available_share
        if self._cuda:
            used_share = torch.cuda.max_memory_allocated() / torch.cuda.get_device_properties().total_memory
        cpu = expected_cpu() if self.readings else 1.0
        # 1e-9: speeds are samples over seconds, and a clock may show none.
        return np.array([samples, max(seconds, 1e-9), used_share, cpu, available_share], dtype=np.float64)


class _Loader(CountedLoader):
    """A loader that continues an epoch where it was left, or starts it again where it was complete."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches from the sampler's position to the end of the epoch; the whole epoch if it was complete.

        An iteration that runs to its end marks the epoch as finished in the sampler.
        """
        if self._planned_sampler.position == self._planned_sampler.dataset_size:
            self._planned_sampler.position = 0
        yield from super().__iter__()
        self._planned_sampler.finish()


class Balancer:
    """What :func:`balance` returns: one rank's part.

    Attributes:
        rank, world_size: this process's place in the job.
        total_batch: samples of all ranks per step; never changes.
        least: samples that every rank gets in every step.
    """

    def __init__(
        self,
        job: DistributedJob,
        dataset: Dataset[Any],
        sizes: tuple[int, ...],
        least: int,
        scaler: LossScaler,
        clock: _StepClock,
        consensus: Consensus | None,
        manager: Manager,
        chooses: bool,
    ) -> None:
        """Keep what :func:`balance` has made: ``sizes``, (n,) samples by rank in the first steps, and the rank's parts.

        ``consensus``: by which ranks report and learn the next sizes; None with one rank. ``manager`` chooses them; only
        rank 0 keeps it. ``chooses``: whether sizes follow speeds.
        """
        self.rank = job.rank
        self.world_size = job.world_size
        self.least = least
        self.total_batch = sum(sizes)
        self._job = job
        self._dataset = dataset
        self._sizes = sizes
        self._scaler = scaler
        self._clock = clock
        self._consensus = consensus
        self._chooses = chooses and consensus is not None
        self._manager = manager if job.rank == 0 else None
        self._sampler: VariableBatchSampler | None = None
        self._loader: _Loader | None = None
        self._saved_state: dict[str, Any] | None = None
        self._held_exchanges: list[Exchange] = []  # of steps since the last report
        self._steps_to_report = 1  # steps until the next report

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each rank, (n,), in the next full step that is loaded."""
        return self._sizes

    def dataloader(self, *, shuffle: bool = True, seed: int = 0, **options: Any) -> DataLoader[Any]:
        """Return the loader of this rank's batches; call it once, on every rank.

        ``shuffle`` and ``seed`` give the order of samples, as in torch's DistributedSampler; ``options`` go to
        ``DataLoader``. With data workers, indices are handed out ``num_workers * prefetch_factor`` steps ahead, and new
        sizes take effect that much later. Raises InputError when called again, when ``options`` choose samples
        themselves (``batch_size``, ``shuffle``, ``sampler``, ...), when ranks differ in steps ahead, seed or shuffle,
        and for a dataset without a length or with fewer than ``least`` samples for every rank.
        """
        if self._sampler is not None:
            raise InputError("dataloader", "was made already", "use one loader per balancer")
        if reserved := sorted(options.keys() & {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"}):
            raise InputError("dataloader", f"{reserved[0]} is the balancer's to choose", "leave it out")
        size = dataset_length(self._dataset)
        sampler = VariableBatchSampler(size, self._sizes, self.rank, shuffle, seed, whole=True, least=self.least)
        loader = _Loader(self._dataset, sampler, self._scaler, **options)
        prefetched_steps = loader.num_workers * (loader.prefetch_factor or 0)
        description = f"{prefetched_steps} steps ahead, seed {seed}, shuffle {shuffle}"
        self._job.demand_same("dataloader", description, "use the same on all ranks")
        self._sampler = sampler
        self._loader = loader
        if self._saved_state is not None:
            self._restore_state(self._saved_state)
        return loader

    def loss(self, loss: Tensor, *, count: float | Tensor | None = None, reduction: Reduction = "mean") -> Tensor:
        """Return ``loss`` with its value unchanged and its gradients weighted by ``count``.

        ``count``: how many elements (samples, tokens) this rank's loss is a mean over; None: the batch's samples.
        ``reduction``: "mean"; "sum" for a loss that is a sum over them; "average" if the ranks' plain average is right.
        The full rules are at :meth:`~ddltool.runtime.hook.loss_scaling.LossScaler.loss`.
        """
        return self._scaler.loss(loss, count=count, reduction=reduction)

    def set_epoch(self, epoch: int) -> None:
        """Use the order of samples of ``epoch``, the same number on every rank; without a loader nothing happens."""
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)

    def after_step(self, *_: object) -> None:
        """Report this rank's speed after an update, and adopt new sizes: the optimizer's post-step hook.

        Most steps only keep their times: at each report all ranks agree on the number of steps to the next one, so all
        of them report after the same step, for all steps since the last. Where choices are made while all wait, this
        blocks until rank 0 has chosen.
        """
        exchanges = self._clock.take()
        if not exchanges and self.world_size > 1:
            return  # an update without a backward pass before it does not count as a step
        last_pass = None if self._sampler is None else self._scaler.pending.last_used(self._sampler)
        if self._sampler is not None and last_pass is not None and last_pass.epoch == self._sampler.epoch:
            # A loop that fetches ahead may be in the next epoch already, where this pass has no place.
            self._sampler.commit(last_pass)
        if not self._chooses or self._consensus is None:
            return
        self._held_exchanges += exchanges
        self._steps_to_report -= 1
        if self._steps_to_report > 0:
            return
        exchanges_to_report = self._held_exchanges
        self._held_exchanges = []
        agreed = self._consensus.propose(lambda: self._clock.row(exchanges_to_report))
        if agreed is not None:  # None: the first report behind training, which has no choice before it
            *sizes, steps_to_report = (int(number) for number in agreed)
            self._steps_to_report = steps_to_report
            self._resize(tuple(sizes))

    def set_sizes(self, sizes: Sequence[int]) -> None:
        """Use other sizes, (n,) samples by rank with the same sum, from the next step that is not loaded yet.

        Call it on every rank with the same sizes. Raises InputError where sizes are chosen by speed (``enabled``), and
        for sizes of another number or sum, or below ``least``.
        """
        if self._chooses:
            raise InputError("sizes", "are chosen by speed in this job", "set BalanceOptions(enabled=False)")
        self._resize(fitting_sizes(sizes, self.world_size, self.total_batch, self.least))

    def _resize(self, sizes: tuple[int, ...]) -> None:
        """Use ``sizes``, (n,) samples by rank, from the next step that is not loaded yet."""
        if sizes != self._sizes:
            if self._sampler is not None:
                self._sampler.resize(sizes)
            self._sizes = sizes

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs, as plain numbers: the sampler's position, and what Algorithm 2 has learned.

        Save rank 0's, between steps: other ranks lack Algorithm 2's part ("policy" is empty).
        """
        sampler: dict[str, Any] = {}
        if self._sampler is not None:
            own_fields = {"total": self.total_batch, "sizes": list(self._sampler.sizes)}
            sampler = own_fields | self._sampler.state_dict()
        return {"sampler": sampler, "policy": {} if self._manager is None else self._manager.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last step of a checkpoint: on every rank with the same state, before the first step.

        The number of ranks may differ from the checkpoint's; sizes then stay as they were given. Before
        :meth:`dataloader` the state is only kept, and checked there. Raises InputError when dataset, order or total
        batch differ.
        """
        self._saved_state = state
        if self._sampler is not None:
            self._restore_state(state)

    def _restore_state(self, state: dict[str, Any]) -> None:
        """Continue at a checkpoint's position and with its sizes; on rank 0 the manager is given its policy's state, too.

        The sizes fit this job if there is one for each rank, of at least ``least``, and they add up to the total batch;
        otherwise the present ones stay. Raises InputError for another total batch, and what the sampler raises for
        another dataset or order.
        """
        assert self._sampler is not None
        sampler_state = state.get("sampler", {})
        if (total := sampler_state.get("total")) != self.total_batch:
            raise InputError("sampler state:total", f"is {total}", f"this job has {self.total_batch}")
        sizes = sampler_state.get("sizes")
        has_total = isinstance(sizes, list) and len(sizes) == self.world_size and sum(sizes) == self.total_batch
        sizes_fit = has_total and min(sizes) >= self.least
        self._sampler.load_state_dict(sampler_state, sizes if sizes_fit else None)
        self._sizes = self._sampler.sizes
        if self._manager is not None:
            self._manager.load_state_dict(state.get("policy", {}), self._sizes)

    def close(self) -> None:
        """Stop choosing sizes; call after the last step on every rank. Gradients stay weighted; more calls do nothing."""
        self._chooses = False
        if self._consensus is not None:
            self._consensus.close()

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
) -> Balancer:
    """Balance the load of a DDP job and return this rank's part; call once on every rank, before the first step.

    It registers hooks on ``model`` and ``optimizer``.

    Args:
        model, optimizer: the job's. The loss goes through :meth:`Balancer.loss`, which weights it by the samples of the
            rank's batch; a loss that is not a mean over them needs its ``count`` or ``reduction``, or is refused.
        dataset: all samples, the same on every rank.
        total_batch: samples of all ranks per step, split equally at the start; not needed with ``sizes``.
        sizes: (n,) samples of each rank at the start.
        limits: (n,) most samples that each rank's memory holds; None: memory use alone limits growth.
        least: samples that every rank gets in every step; None: 1, or 2 where the model has a BatchNorm layer in
            training mode, which cannot normalize one sample (SyncBatchNorm can).
        options: how to balance; None: the defaults.
        events: JSON Lines file to which rank 0 appends changes of sizes and advice to remove a straggler.

    Raises InputError, on every rank, for arguments that do not fit together or differ between ranks.
    """
    refuse_in_one_line()
    job = DistributedJob.this()
    chosen = options if options is not None else BalanceOptions()
    path = None if events is None else Path(events)
    start, fewest, manager = job.together(lambda: _prepare(job, model, total_batch, sizes, limits, least, chosen, path))
    optimizer = job.together(lambda: bare_optimizer(optimizer))
    job.demand_same("batch sizes", f"{start}, at least {fewest}", "give every rank the same sizes and the same least")
    demand_same_samples(job, dataset)
    consensus = None
    if job.world_size > 1:
        is_slow_to_choose = chosen.cluster == "gpu" or job.world_size > MOST_BLOCKING
        behind = is_slow_to_choose if chosen.background is None else chosen.background
        manager.interval_s = 0.0 if behind else chosen.interval_s
        choose = manager.sizes_and_steps_to_report
        consensus = Consensus(job, choose, timeout_s=chosen.timeout_s, behind=chosen.enabled and behind)
    scaler = LossScaler(job, "balancer", lambda: balancer.sizes)  # called later only: the balancer is made below
    clock = _StepClock(is_cuda(model), scaler.pending.take_tally)
    clock.readings = chosen.predictor in READING
    scaler.watcher = clock
    begin_check(job, model, optimizer)
    balancer = Balancer(job, dataset, start, fewest, scaler, clock, consensus, manager, chosen.enabled)
    scaler.open(model, optimizer)
    if job.side is not None and chosen.compress == "bf16":  # a single process, which has no side group, sends nothing
        compress(model)
    optimizer.register_step_post_hook(balancer.after_step)
    return balancer


def compress(model: DistributedDataParallel) -> None:
    """Make DDP send gradients as bfloat16, which halves the bytes of float32 ones.

    Gradients are divided by the number of ranks in their own type first, and only the all-reduce is in bfloat16.
    torch's own hook rounds once more, and is refused without NCCL. At exit the process pauses shortly. Raises
    InputError for a model that has a communication hook already.
    """
    group = model.process_group

    def average(bucket: Any) -> torch.futures.Future[Tensor]:
        """Return the future mean of one DDP bucket, whose buffer holds it in place."""
        buffer = bucket.buffer().div_(dist.get_world_size(group))
        future = dist.all_reduce(buffer.to(torch.bfloat16), group=group, async_op=True).get_future()
        # The future of an all-reduce holds a list of one tensor, still bfloat16.
        averaged: torch.futures.Future[Tensor] = future.then(lambda done: buffer.copy_(done.value()[0]))
        return averaged

    try:
        # A lambda, because DDP compares a function's annotations with its own types.
        model.register_comm_hook(None, lambda _, bucket: average(bucket))
    except RuntimeError as error:
        if "can only be called once" not in str(error):
            raise
        raise InputError("model", "already has a communication hook", "leave out compress, or that one") from None
    atexit.register(pause_before_exit)


def _prepare(
    job: DistributedJob,
    model: nn.Module,
    total_batch: int | None,
    sizes: Sequence[int] | None,
    limits: Sequence[int] | None,
    least: int | None,
    options: BalanceOptions,
    events: Path | None,
) -> tuple[tuple[int, ...], int, Manager]:
    """Check the arguments of :func:`balance`; return (first sizes, least size, manager that chooses the next sizes).

    ``events``: the file for changes and advice; None: no file. In the single process that repeats a job's steps for
    DDLTOOL_CHECK, ``sizes`` and ``limits`` are left out: its size is the total batch. Raises InputError for the first
    argument that does not fit.
    """
    demand_wrapped(job, model)
    options.check()
    total_batch = None if total_batch is None else _whole_samples("total_batch", total_batch)
    sizes = None if sizes is None else [_whole_samples("sizes", size) for size in sizes]
    limits = None if limits is None else [_whole_samples("limits", limit) for limit in limits]
    chosen_total = total_batch if sizes is None else sum(sizes)
    if is_reference():  # one process of a check, which takes the batches of all ranks together
        sizes = None
        limits = None
    if chosen_total is None:
        raise InputError("total_batch", "is missing", "give it, or the sizes of all ranks")
    fewest = least_samples(model, least, job.world_size, chosen_total, sizes, limits)
    if sizes is None:
        sizes = equal(job.world_size, chosen_total, limits, fewest).tolist()
    if len(sizes) != job.world_size:
        raise InputError("sizes", f"has {len(sizes)} entries", f"give one for each of {job.world_size} ranks")
    if total_batch is not None and sum(sizes) != total_batch:
        raise InputError("sizes", f"add up to {sum(sizes)}", f"the total batch is {total_batch}")
    policy = _policy_of(options, sizes, limits, fewest)
    start = tuple(int(size) for size in np.asarray(policy.sizes))
    return start, fewest, Manager(policy, events if job.rank == 0 else None)


def _policy_of(options: BalanceOptions, sizes: Sequence[int], limits: Sequence[int] | None, least: int) -> Policy:
    """Return the policy for the cluster that ``options`` name; it starts from ``sizes``, (n,) samples by rank.

    For ``gpu`` sizes are tried out (Algorithm 2), because a GPU's speed depends on its batch; for ``cpu`` they follow
    predicted speeds. ``limits``: (n,) most samples by rank, or None; ``least``: fewest samples of any rank.
    """
    if options.cluster == "gpu":
        return TrialPolicy(sizes, limits, options.trial if options.trial is not None else LIVE_TRIAL, least)
    learning = options.learning if options.learning is not None else LIVE_LEARNING
    return SpeedPolicy(sizes, limits, options.predictor, learning, tolerance=options.tolerance, least=least)


def _whole_samples(name: str, value: object) -> int:
    """Return ``value`` as a number of samples. Raises InputError for all but whole numbers from 1 to ``MOST_SAMPLES``.

    ``name``: the argument that it was given as, for the message.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = 0
    if isinstance(value, bool) or not 1 <= number <= MOST_SAMPLES:
        raise InputError(name, f"{value!r} is no number of samples", f"give whole numbers from 1 to {MOST_SAMPLES}")
    return number


def least_samples(
    model: nn.Module,
    least: int | None,
    ranks: int,
    total: int,
    sizes: Sequence[int] | None = None,
    limits: Sequence[int] | None = None,
) -> int:
    """Return the fewest samples that each of ``ranks`` ranks gets in a step of ``total`` samples.

    That is ``least``; if it is None, 1, or 2 where a layer is BatchNorm over the local batch, which cannot normalize
    one sample. ``sizes``: (n,) first samples by rank; ``limits``: (n,) most samples by rank; None: not given. Raises
    InputError where the total batch, a size or a limit is too small for it.
    """
    reason = ""
    alternative = "a smaller least"
    if least is not None:
        least_count = _whole_samples("least", least)
    elif (norm_layer := local_batch_norm(model)) is None:
        least_count = 1
    else:
        least_count = LEAST_NORMALIZED
        reason = f" (layer {norm_layer} is BatchNorm over the local batch)"
        alternative = "least=1"
    if least_count * ranks > total:
        problem = f"{least_count} for each of {ranks} ranks{reason} is more than the total batch of {total}"
        raise InputError("least", problem, f"give a total batch of {least_count * ranks} or more, or {alternative}")
    for name, values in (("sizes", sizes), ("limits", limits)):
        for rank, value in enumerate(values or ()):
            if value < least_count:
                problem = f"has {value} for rank {rank}, below the least of {least_count} samples{reason}"
                raise InputError(name, problem, f"give every rank {least_count} or more, or {alternative}")
    return least_count


def local_batch_norm(model: nn.Module) -> str | None:
    """Return the name of the first layer that normalizes over the local batch in training; None if there is none.

    SyncBatchNorm is left out, because it normalizes over all ranks' samples; so is a layer in evaluation mode that has
    running statistics to use. A model that is in evaluation mode itself is assumed to be trained whole later.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, _BatchNorm) or isinstance(layer, nn.SyncBatchNorm):
            continue
        if layer.training or not model.training or not layer.track_running_stats:
            return str(name)
    return None


class Manager:
    """Chooses batch sizes on rank 0, as the :class:`~ddltool.runtime.processes.consensus.Consensus` asks.

    Reports that are not shown to the policy: the first ones, whose steps allocate and fill caches, and those of steps
    with fewer samples than a full one (the end of an epoch). A report of several full batches (several steps, or
    gradient accumulation) counts as one of their mean.

    Args:
        policy: chooses sizes from reports.
        events: JSON Lines file to which changes and advice are appended; None: no file.
        skip: number of first reports that are not judged.

    Raises InputError for a file that cannot be written or holds something other than events.
    """

    def __init__(self, policy: Policy, events: Path | None = None, skip: int = 1) -> None:
        self._policy = policy
        self._events = LineFile(events, kind_of(BalanceEvent), "balancing events")
        self._run = new_run()
        self._reports_to_skip = skip
        # Number of the last step that was reported, from 0, and of steps from there to the next report.
        self._last_step = -1
        self._steps_to_report = 1
        self._advised_rank: int | None = None
        self._lock = threading.Lock()  # the policy is asked in the consensus's thread, and saved in the training's
        self.total = int(policy.sizes.sum())
        self.interval_s = 0.0
        """Seconds between reports: agreeing costs time that counts in short steps. 0: report after every step."""

    def sizes_and_steps_to_report(self, rows: Floats) -> Floats:
        """Return the answer to all ranks, (n + 1,): the n next sizes, and after how many steps ranks report again.

        ``rows`` (n, 5): the ranks' reports (:meth:`_StepClock.row`), each of one or several steps.
        """
        samples = rows[:, 0]
        seconds = rows[:, 1]
        steps = max(float(samples.sum()), 1.0) / self.total  # less than one at the end of an epoch
        longest_step_s = max(float(seconds.max()) / steps, 1e-9)  # not 0, to divide by
        sizes = self(rows)
        steps_in_interval = self.interval_s // longest_step_s
        self._steps_to_report = int(min(max(steps_in_interval, 1), MOST_STEPS_UNREPORTED))
        return np.append(sizes, self._steps_to_report)

    def __call__(self, rows: Floats) -> Floats:
        """Return the next sizes, (n,) samples, from the ranks' (n, 5) reports; log and write changes and advice.

        A report's columns are samples, seconds, and the shares of memory in use, CPU and memory available. Reports that
        are not judged (see the class) leave the sizes as they are. A straggler is named once, not at every report.
        """
        with self._lock:
            self._last_step += self._steps_to_report
            step = self._last_step
            is_skipped = self._reports_to_skip > 0
            self._reports_to_skip -= 1
            samples = rows[:, 0]
            passes, remainder = divmod(round(float(samples.sum())), self.total)
            # Whole batches of the planned total, in each of which every rank had a sample.
            is_full = remainder == 0 and passes >= 1 and (samples >= passes).all()
            if is_skipped or not is_full:
                return self._policy.sizes.astype(np.float64)
            if passes > 1:  # samples and seconds of a mean pass; the shares stay
                rows = np.concatenate((rows[:, :2] / passes, rows[:, 2:]), axis=1)
            sizes_before = self._policy.sizes.tolist()
            choice = self._policy.choose(Report.of(rows))
        removed_rank = choice.remove if choice.remove != self._advised_rank else None
        seconds = rows[:, 1]
        if choice.fine_tuning:
            self._write_event("fine_tuning", step, choice.sizes, seconds)
        if list(choice.sizes) != sizes_before:
            log.debug("step %d: batch sizes %s", step, choice.sizes)
            self._write_event("resize", step, choice.sizes, seconds)
        if removed_rank is not None:
            log.warning(
                "step %d: remove this straggler: rank %d is the slowest (%.3g s) with only %d samples left; training "
                "without it would be faster",
                step,
                removed_rank,
                seconds[removed_rank],
                choice.sizes[removed_rank],
            )
            self._write_event("remove_straggler", step, choice.sizes, seconds, removed_rank)
            self._advised_rank = removed_rank
        return np.array(choice.sizes, dtype=np.float64)

    def _write_event(
        self,
        event: Literal["resize", "fine_tuning", "remove_straggler"],
        step: int,
        sizes: tuple[int, ...],
        seconds: Floats,
        rank: int | None = None,
    ) -> None:
        """Append a line to the file of events, if there is one.

        ``seconds`` (n,): the ranks' times of the step; ``rank``: the straggler.
        """
        if not self._events.is_open:  # making a line about 96 ranks takes longer than choosing their sizes
            return
        rounded_s = [float(f"{value:.4g}") for value in seconds]
        row = BalanceEvent(run=self._run, event=event, step=step, sizes=list(sizes), seconds=rounded_s, rank=rank)
        self._events.write([row.model_dump_json()])

    def state_dict(self) -> dict[str, Any]:
        """Return what Algorithm 2 has learned by its trials; empty for predictors of speed, which learn anew."""
        with self._lock:
            return self._policy.state_dict() if isinstance(self._policy, TrialPolicy) else {}

    def load_state_dict(self, state: dict[str, Any], sizes: tuple[int, ...]) -> None:
        """Continue with ``sizes``, (n,) samples by rank, and with Algorithm 2's ``state`` if it belongs to these sizes."""
        with self._lock:
            if state and isinstance(self._policy, TrialPolicy) and state.get("sizes") == list(sizes):
                self._policy.load_state_dict(state)
            else:
                self._policy.sizes = np.array(sizes, dtype=np.int64)
