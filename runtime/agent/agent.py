"""Training whose batch size follows the goodput, which is measured while it runs. Start at :class:`GoodputAgent`.

::

    agent = GoodputAgent(
        ddp_model, optimizer, dataset, initial_batch_size=32, max_batch_size=1024, max_local_batch_size=256
    )
    for epoch in range(epochs):
        for inputs, targets in agent.batches(epoch):
            agent.loss(loss_fn(model(inputs), targets)).backward()  # a mean over the batch
            if agent.complete:  # the last pass of a step: gradients are the mean over all samples of all ranks
                optimizer.step()
                optimizer.zero_grad()

A step is one update of the parameters; it may take several passes (forward and backward), each on a local batch of
every rank. The agent times passes and steps, estimates the gradient noise scale from norms of gradients, and refits the
throughput model every so often beside the training. Then it changes total batch, local batch and accumulation at a step
boundary, on all ranks alike; the learning rate follows by a rule (Pollux, Qiao et al., OSDI 2021, job level).

A learning-rate schedule that counts steps is given to the agent (``scheduler=``), which steps it by the samples done,
because larger batches make fewer steps. One that counts epochs stays in the loop.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader, Dataset

from ddltool.analyzers.job.goodput.lr_rules import rule as lr_rule
from ddltool.analyzers.job.goodput.noise_scale import SMOOTHING, NoiseScaleEstimator
from ddltool.analyzers.job.goodput.tuning import BatchLimits
from ddltool.artifacts import parse_record
from ddltool.errors import InputError
from ddltool.runtime.agent.choosing import AgentPolicy, BatchDecision, Chooser, TimedStep, split_near
from ddltool.runtime.agent.noise_sampling import NoiseSampler
from ddltool.runtime.hook.job import bare_optimizer, demand_wrapped
from ddltool.runtime.hook.loss_scaling import LossScaler, Reduction
from ddltool.runtime.hook.telemetry import StepRecorder, TelemetryFile, Watcher
from ddltool.runtime.processes.batches import Pass, VariableBatchSampler
from ddltool.runtime.processes.checking import is_set
from ddltool.runtime.processes.job import DistributedJob
from ddltool.runtime.processes.launcher import count_nodes
from ddltool.runtime.processes.liveness import is_broken
from ddltool.runtime.processes.same_samples import dataset_length, demand_same_samples
from ddltool.runtime.processes.step_times import Exchange, Stamp, device_of, is_cuda, stamp
from ddltool.runtime.processes.stopping import refuse_in_one_line

OFF, HOLD = "DDLTOOL_OFF", "DDLTOOL_HOLD"
WARMUP_STEPS = 3
"""Number of steps after a start whose times are left out, because they allocate memory and fill caches."""
FIRST_NOISE_EVERY = 10
"""Steps between samples of the noise until the cost of sampling is known."""
ALIASES = {"square-root": "sqrt", "square_root": "sqrt"}
log = logging.getLogger(__name__)


class Batches:
    """An iterator with a length, which is the most batches that may come: without one, trainers fetch a batch ahead."""

    def __init__(self, source: Iterator[Any], most: int) -> None:
        self._source = source
        self._most = most

    def __iter__(self) -> Iterator[Any]:
        """Return this iterator itself, so the batches come only once."""
        return self

    def __next__(self) -> Any:
        """Return the next batch."""
        return next(self._source)

    def __len__(self) -> int:
        """Return the most batches that could come when the iterator was made; it does not count down."""
        return self._most

    def close(self) -> None:
        """End the iteration; a batch that the loop holds stays untrained."""
        if isinstance(self._source, Generator):  # of an epoch that is over it is an empty iterator, without close()
            self._source.close()


class GoodputAgent(Watcher):
    """Tunes one job's batch while it trains. All ranks make the same agent, after DDP and before the first step.

    With the environment variable DDLTOOL_OFF=1 the agent only hands out batches of the initial size and weights losses;
    with DDLTOOL_HOLD=1 it does all its work but does not change the batch. When measuring or deciding fails during
    training, a warning is logged once and the present batch stays.

    Args:
        model: ``DistributedDataParallel`` without a communication hook, or with one process any module.
        optimizer: torch's, or accelerate's wrapper of it. Its ``lr`` stays the rate at ``initial_batch_size``, for
            schedulers to change: the rule's factor multiplies it inside ``optimizer.step()`` only, so factors never
            compound.
        dataset: map-style, the same on every rank; or its number of samples, where :meth:`batches` gets a loader of the
            script's own with :attr:`sampler`.
        initial_batch_size: total batch M0 for which the learning rate was tuned, and the smallest one used.
        max_batch_size: largest total batch.
        max_local_batch_size, min_local_batch_size: limits of the samples per rank and pass; memory sets the upper one.
        max_accumulation_steps: most passes of a step before its last; None: any number.
        scheduler: a learning-rate schedule that counts steps of ``initial_batch_size`` samples. After each update the
            agent steps it until it has made as many steps as a run at M0 for the same samples. "by hand": the script
            sets rates itself, by :attr:`progress`. None: the schedule, if any, counts epochs.
        rule: how the learning rate follows the batch: adascale, linear, sqrt (or square-root), legw, constant, or a
            registered rule.
        warmup_epochs: epochs of learning-rate warmup at M0, which the rule may stretch (legw).
        interval_s: seconds between decisions; longer where a fit would cost more than the overhead allows.
        interval_steps: decide after every this many steps instead, whatever it costs.
        overhead: share of the time that measuring and deciding may take.
        noise_every: sample the gradient noise every so many steps; None: as often as the overhead allows; 0: never.
        smoothing: smoothing factor of the noise scale, per observation.
        min_gain: share of the present goodput by which a batch's predicted goodput must exceed it for a change.
        adapt: False: measure and decide, but change nothing.
        background: fit in a thread beside training, and apply the result at a later look; False: at once.
        shuffle, seed: the order of samples: ``torch.randperm`` from ``seed + epoch``.
        telemetry: a JSON Lines file for one row per rank and step (kind ``ddltool.telemetry``); None: none.

    Raises InputError, on all ranks, for arguments that are invalid or differ between ranks; Infeasible when the ranks
    cannot share any batch within the limits.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Dataset[Any] | int,
        *,
        initial_batch_size: int,
        max_batch_size: int,
        max_local_batch_size: int,
        min_local_batch_size: int = 1,
        max_accumulation_steps: int | None = None,
        scheduler: LRScheduler | Literal["by hand"] | None = None,
        rule: str = "adascale",
        warmup_epochs: float = 0.0,
        interval_s: float = 30.0,
        interval_steps: int | None = None,
        overhead: float = 0.01,
        noise_every: int | None = None,
        smoothing: float = SMOOTHING,
        min_gain: float = 0.05,
        adapt: bool = True,
        background: bool = True,
        shuffle: bool = True,
        seed: int = 0,
        telemetry: str | os.PathLike[str] | None = None,
    ) -> None:
        """Check the arguments, choose the first split of the batch, and register hooks on model and optimizer.

        All ranks construct the agent together, because the checks exchange messages.
        """
        refuse_in_one_line()
        # Check the arguments, also against those of other ranks.
        job = DistributedJob.this()
        limits = BatchLimits(
            initial_batch_size=initial_batch_size,
            max_batch_size=max_batch_size,
            max_local_batch_size=max_local_batch_size,
            min_local_batch_size=min_local_batch_size,
            max_accumulation_steps=max_accumulation_steps,
        )
        self.is_off = is_set(OFF)
        policy_settings = {
            "interval_s": interval_s,
            "interval_steps": interval_steps,
            "overhead": overhead,
            "noise_every": noise_every,
            "min_gain": min_gain,
            "adapt": adapt and not is_set(HOLD),
            "background": background,
            "warmup_epochs": warmup_epochs,
        }
        policy = parse_record(policy_settings, AgentPolicy, "GoodputAgent")
        demand_wrapped(job, model)
        optimizer = bare_optimizer(optimizer)
        self._rule = lr_rule(ALIASES.get(rule, rule))
        self._job = job
        self._model = model
        self._limits = limits
        self._warmup_epochs = warmup_epochs
        self._dataset = None if isinstance(dataset, int) else dataset
        samples = dataset if isinstance(dataset, int) else dataset_length(dataset)
        order = f"seed {seed}, shuffle {shuffle}"
        description = f"{limits}, {policy}, {rule}, {samples} samples, {order}, off {self.is_off}"
        job.demand_same("agent", description, "build it alike on every rank")
        demand_same_samples(job, self._dataset)
        start = split_near(initial_batch_size, job.world_size, limits)
        self.sampler = VariableBatchSampler(samples, start, job.rank, shuffle, seed, whole=True)
        self.progress = 0.0
        """Number of steps at the initial batch that make the same progress by the rule (AdaScale: scale-invariant steps)."""
        self._cuda = is_cuda(model)
        # State of the present pass and step.
        self._pass_under_way: Pass | None = None  # from its batch to the request for the next one
        self._last_backward_pass: Pass | None = None
        self._pass_with_loss: Pass | None = None  # the last pass whose loss came through `loss`
        # (parameter, its gradient, the gradient's version) after a pass that is not the step's last: must stay the same.
        self._gradient_seen: tuple[nn.Parameter, Tensor, int] | None = None
        self._finished_pass: Pass | None = None  # the step's last pass, once its step is over
        self._timed_step: TimedStep | None = None
        self._first_step = 0  # since this start or a loaded checkpoint; the steps after it are warm-up
        self._rates_to_restore: list[Any] | None = None  # base learning rates by group, while the optimizer steps
        self._last_rates: tuple[int, list[Any]] | None = None  # (epoch, base rates) at the last update
        self._is_scheduled_by_hand = scheduler == "by hand"
        self._scheduler = None if self._is_scheduled_by_hand else cast("LRScheduler | None", scheduler)
        self._schedule_steps = 0  # steps of the schedule that the agent has made
        self._pass_counts: list[float] = []  # the counts that `loss` was given in the step's passes so far
        self._has_loss_without_count = False  # in the step's passes so far
        self._gradient_factor = 1.0  # corrects the step's gradients from a weight by samples to one by counts
        self._optimizer = optimizer
        self._is_updating = False
        # The parts that do the work, and their hooks.
        self._scaler = LossScaler(job, "agent", watcher=self)
        self._ddp_model = model if isinstance(model, DistributedDataParallel) and job.world_size > 1 else None
        process_group = self._ddp_model.process_group if self._ddp_model is not None else None
        trained = [value for group in optimizer.param_groups for value in group["params"]]
        self._trained_parameters = trained
        every = FIRST_NOISE_EVERY if noise_every is None else noise_every
        self._noise = NoiseSampler(trained, optimizer, job.world_size, process_group, 0 if self.is_off else every)
        nodes = count_nodes(job.world_size)
        estimator = NoiseScaleEstimator(smoothing)
        self._chooser = Chooser(job, nodes, limits, policy, self.sampler, self._noise, estimator)
        self._recorder: StepRecorder | None = None
        if telemetry is not None and not self.is_off:
            self._recorder = StepRecorder(TelemetryFile.of(telemetry, job, device_of(model)), cuda=self._cuda)
        optimizer.register_step_pre_hook(self._before_update)
        self._scaler.open(model, optimizer)
        # Registered after the scaler's own post-step hook, which refuses an update in which the ranks differ.
        optimizer.register_step_post_hook(self._after_update)

    # What a training loop uses.

    def batches(self, epoch: int, loader: DataLoader[Any] | None = None, **options: Any) -> Batches:
        """Return an iterator over this rank's batches of ``epoch``: all of it, or the rest after a restart.

        ``loader``: one made with ``batch_sampler=agent.sampler``; None: one is made here, and ``options`` (such as
        ``num_workers``, ``collate_fn``) go to ``DataLoader``. An epoch before the agent's present one has no batches.
        Batches that data workers fetched ahead keep their size when the batch size changes. Raises InputError without a
        dataset or a loader, and for a loader with another sampler.
        """
        if loader is None and self._dataset is None:
            raise InputError("dataset", "is only a number", "give batches() a loader made with agent.sampler")
        if loader is not None and loader.batch_sampler is not self.sampler:
            raise InputError("loader", "has a sampler of its own", "make it with batch_sampler=agent.sampler")
        if epoch < self.sampler.epoch:
            return Batches(iter(()), 0)
        self.sampler.set_epoch(epoch)
        if loader is None:
            # The dataset is not None, as checked above.
            loader = DataLoader(self._dataset, batch_sampler=self.sampler, **options)  # type: ignore[arg-type]
        batches_left = len(self.sampler)
        if self._chooser.adapts:  # the batch may become the smallest one again, which makes the most batches
            samples_left = self.sampler.dataset_size - self.sampler.position
            batches_left = max(batches_left, -(-samples_left // self._limits.initial_batch_size))
        return Batches(self._passes(loader), batches_left)

    def _passes(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Yield the loader's batches, and treat each as a pass that lasts until the loop requests the next batch.

        Raises InputError if the second batch is requested before a backward pass on the first (fetching ahead), and as
        :meth:`_refuse_other_optimizer` does.
        """
        batches = iter(loader)
        is_first = True
        other_optimizer_hook = None
        if self._ddp_model is not None:
            other_optimizer_hook = register_optimizer_step_pre_hook(self._refuse_other_optimizer)
        try:
            while True:
                start = stamp(self._cuda)
                try:
                    batch = next(batches)
                except StopIteration:
                    return
                batch_pass = self.sampler.issued.popleft()
                self._begin_pass(batch_pass, start)
                yield batch
                # Only the first batch is checked: a loop that fetches ahead does so from the start.
                if is_first and self._last_backward_pass is not batch_pass:
                    problem = "the next one was fetched before the first was trained on, so passes would be mistaken"
                    remedy = "fetch no batch ahead; num_workers does it behind the agent"
                    raise InputError("agent.batches", problem, remedy)
                is_first = False
                self._end_pass()
        finally:
            self._pass_under_way = None
            if other_optimizer_hook is not None:
                other_optimizer_hook.remove()

    @property
    def complete(self) -> bool:
        """Whether the present batch is the last pass of its step: time for ``optimizer.step()``."""
        return self._pass_under_way is not None and self._pass_under_way.is_last

    @property
    def samples(self) -> int:
        """Samples of the present batch that count: 0 between batches, and for a filler batch of a rank without samples."""
        return 0 if self._pass_under_way is None else self._pass_under_way.samples

    @property
    def total_batch_size(self) -> int:
        """Samples of all ranks in a full step: of the step under way, between steps of the next."""
        return self._chooser.split_at(self._current_step()).total_batch_size

    @property
    def accumulation_steps(self) -> int:
        """Number of passes of a full step before the last one, which makes the update."""
        return self._chooser.split_at(self._current_step()).accumulation_steps

    @property
    def noise_scale(self) -> float | None:
        """The smoothed gradient noise scale in samples at the last look; None while unknown."""
        return self._chooser.noise_scale

    @property
    def changes(self) -> list[tuple[int, int, int]]:
        """Changes of the batch since this process started, as (first step, total batch, accumulation steps)."""
        return self._chooser.changes

    @property
    def decision(self) -> BatchDecision | None:
        """The result of the last fit, on rank 0; None elsewhere, before the first fit, and after one without a result."""
        return self._chooser.decision

    @property
    def learning_rate_factor(self) -> float:
        """The factor of the learning rate in the step under way, between steps in the next; 1 at the initial batch size."""
        current_pass = self._pass_under_way
        total = self.total_batch_size if current_pass is None or current_pass.is_full else current_pass.step_samples
        return self._learning_rate_factor_at(total)

    def loss(self, loss: Tensor, *, count: float | Tensor | None = None, reduction: Reduction = "mean") -> Tensor:
        """Return ``loss`` with its value unchanged and its gradients weighted by the batch's share of the step's samples.

        Summed over all passes and ranks, the gradients are then that of the mean over all samples of the step, although
        passes differ in size. With ``count``, they are that of the mean over all counted elements: each pass is weighted
        by its count over the step's samples, and at the end of the last pass gradients are multiplied by the step's
        samples over all ranks' and passes' counts, whose sum is known only then.

        Args:
            loss: a mean over the batch.
            count: the number of elements (tokens, label weights) that the loss is a mean over, where these are not the
                samples; needed in all passes of a step or in none. In the last pass all ranks call this together.
            reduction: how the ranks' losses are combined: "mean" weights each by its count, "sum" adds them up,
                "average" is the ranks' plain average (:meth:`~ddltool.runtime.hook.loss_scaling.LossScaler.loss`).

        Raises InputError outside of :meth:`batches`, for a reduction other than mean without a count in a step of
        several passes, and for a count in some passes only. A loss that is measured to be something else than it is
        said to be is refused after the update, on all ranks.
        """
        current_pass = self._pass_under_way
        if current_pass is None:
            raise InputError("backward", "no batch is under way", "call it inside for ... in agent.batches(epoch)")
        if reduction != "mean" and current_pass.passes > 1 and count is None:
            problem = f"is {reduction} in a step of {current_pass.passes} passes"
            raise InputError("reduction", problem, "give a mean and its count")
        self._pass_with_loss = current_pass
        self._has_loss_without_count = self._has_loss_without_count or count is None
        if self._has_loss_without_count and (self._pass_counts or count is not None):
            raise _count_error()
        if count is None:
            return self._scaler.loss(loss, reduction=reduction)
        count_here = float(count) if current_pass.samples else 0.0  # a filler batch counts for nothing
        self._pass_counts.append(count_here)
        if current_pass.is_last:
            self._set_gradient_factor(current_pass)
        return self._scaler.loss(loss, count=count_here, of=float(current_pass.step_samples), reduction=reduction)

    def _set_gradient_factor(self, current_pass: Pass) -> None:
        """Set the factor that turns gradients divided by the step's samples into ones divided by the sum of all counts.

        All ranks call this together in a step's last pass, which is the first to know all counts. If they are all 0, the
        factor is 1. Raises InputError if some passes had no count.
        """
        if len(self._pass_counts) != current_pass.passes:
            raise _count_error()
        total = sum(count for (count,) in self._job.numbers(sum(self._pass_counts)))
        self._gradient_factor = current_pass.step_samples / total if total else 1.0

    # Calls of the loss scaler, whose watcher this is, during backward passes.

    def begin_backward(self) -> None:
        """Prepare for a backward pass that begins: in a step's last pass, to see this rank's own gradients.

        Raises InputError for a DDP model outside of :meth:`batches`, and if the gradients of the step's earlier passes
        were changed or cleared.
        """
        current_pass = self._pass_under_way
        if current_pass is None and self._ddp_model is not None:
            raise InputError("backward", "no batch is under way", "call it inside for ... in agent.batches(epoch)")
        if current_pass is not None and current_pass.is_last:
            self._noise.begin_last_backward()
        if self._gradient_seen is not None:
            parameter, gradient, version = self._gradient_seen  # a version rises with every change in place
            if parameter.grad is not gradient or gradient._version != version:
                problem = "were changed or cleared before the step's last pass"
                raise InputError("gradients", problem, "clear and clip them where agent.complete is true")

    def note_complete(self) -> None:
        """Note that this rank's gradients are complete, while DDP still waits for those of other ranks."""
        if self._pass_under_way is not None and self._timed_step is not None and self._ddp_model is not None:
            self._timed_step.exchanges[-1].note_ready()
            self._noise.complete(self._pass_under_way, self._gradient_factor)

    def end_backward(self) -> None:
        """Note that a backward pass is over, the exchange of its gradients included.

        After a pass that is not the step's last, one gradient and its version are remembered, to find out whether the
        loop changes it. After the last one, gradients are multiplied by the factor of the counts given to :meth:`loss`.
        """
        current_pass = self._pass_under_way
        if current_pass is None or self._finished_pass is current_pass:
            return
        self._last_backward_pass = current_pass
        self._gradient_seen = None
        if not current_pass.is_last:
            with_gradient = next((value for value in self._trained_parameters if value.grad is not None), None)
            if with_gradient is not None:
                gradient = with_gradient.grad
                self._gradient_seen = with_gradient, gradient, gradient._version
        if current_pass.is_last and self._gradient_factor != 1.0:
            gradients = [value.grad for value in self._trained_parameters if value.grad is not None]
            torch._foreach_mul_(gradients, self._gradient_factor)
            self._gradient_factor = 1.0
        if self._timed_step is not None:
            self._note_backward_end(current_pass, self._timed_step)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides model, optimizer and scheduler: numbers, strings and tensors only.

        Save it on rank 0, between ``optimizer.step()`` and the next batch; ``torch.load(weights_only=True)`` reads it.
        """
        return {
            "version": 1,
            "initial_batch_size": self._limits.initial_batch_size,
            "rule": self._rule.name,
            "learning_rate_factor": self._learning_rate_factor_at(self.total_batch_size),
            "progress": self.progress,
            "scheduled": self._schedule_steps,
            "sampler": {
                **self.sampler.state_dict(),
                "total_batch_size": self.total_batch_size,
                "accumulation_steps": self.accumulation_steps,
            },
            **self._chooser.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`, which a job of any number of processes may have saved.

        The total batch stays if this job's ranks can share it; otherwise it becomes the nearest that they can, with a
        warning on rank 0. Raises InputError for a state of another dataset, order or initial batch and for anything
        that is not a state, and Infeasible if the ranks can share no batch; then nothing is changed.
        """
        if not isinstance(state, Mapping) or state.get("version") != 1:
            raise InputError("agent state", "is none of version 1", "give what state_dict returned")
        state_initial = state.get("initial_batch_size")
        own_initial = self._limits.initial_batch_size
        if state_initial != own_initial:
            raise InputError("agent state:initial_batch_size", f"is {state_initial}", f"this job has {own_initial}")
        try:  # all that may fail comes before the agent itself is changed
            progress = float(state["progress"])
            total = int(state["sampler"]["total_batch_size"])
            split = split_near(total, self._job.world_size, self._limits)
            sampler_before = self.sampler.state_dict(), self.sampler.split_at(self.sampler.step)
            self.sampler.load_state_dict(state["sampler"], split)
            try:
                self._chooser.load_state(state)
            except Exception:  # the sampler must not keep a part of a broken state
                self.sampler.load_state_dict(*sampler_before)
                raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError("agent state", f"cannot be read ({error!r})", "give what state_dict returned") from None
        if split.total_batch_size != total and self._job.rank == 0:
            log.warning(
                "goodput agent: %d ranks cannot share %d samples; going on with %d",
                split.world_size,
                total,
                split.total_batch_size,
            )
        self.progress = progress
        self._schedule_steps = int(state.get("scheduled", 0))
        self._last_rates = None  # loading may have changed the rates, which is not a schedule's doing
        self._first_step = self.sampler.step
        self._pass_under_way = None
        self._finished_pass = None
        self._timed_step = None

    def close(self) -> None:
        """Write telemetry that is still buffered, end the agent's thread, and remove its hooks from the model.

        It also happens at exit, and more calls do nothing. A batch under way is abandoned, and other optimizers may
        step again.
        """
        self._pass_under_way = None
        if self._recorder is not None:
            self._recorder.close()
        self._chooser.close()
        self._scaler.close()

    # A pass and a step, from inside.

    def _current_step(self) -> int:
        """Return the number of the step under way; between steps, that of the next one.

        A step is over after its update, although the loop may still hold its last batch.
        """
        current_pass = self._pass_under_way
        if current_pass is None or self._finished_pass is not None:
            return self.sampler.step
        return current_pass.step

    def _begin_pass(self, current_pass: Pass, start: Stamp) -> None:
        """Begin the pass of a batch that the loader has just yielded; ``start``: the moment when fetching it began.

        The loss scaler is told the pass's samples, and DDP whether to reduce its gradients; unless the agent is off,
        timing and noise sampling start.
        """
        self._pass_under_way = current_pass
        self._finished_pass = None
        # Earlier batches are forgotten: only the present one may be trained on.
        self._scaler.pending.drop(self.sampler, everything=True)
        self._scaler.pending.draw(self.sampler, current_pass)
        if current_pass.number == 0:
            self._pass_counts = []
            self._has_loss_without_count = False
            self._gradient_factor = 1.0
        if self._ddp_model is not None:
            self._ddp_model.require_backward_grad_sync = current_pass.is_last  # what DDP's no_sync() sets
        if self.is_off:
            return
        self._noise.begin(current_pass)
        if current_pass.number == 0:
            self._timed_step = TimedStep(first_pass=current_pass, exchanges=[])
        if self._timed_step is not None:
            self._timed_step.exchanges.append(Exchange(current_pass.samples, current_pass.samples, start, self._cuda))

    def _note_backward_end(self, current_pass: Pass, timed: TimedStep) -> None:
        """Note the end of a pass's backward in ``timed``, and take the gradient norms of a sampled step.

        If sampling fails, a warning is logged once; only the error of a broken connection between ranks is raised.
        """
        exchange = timed.exchanges[-1]
        if exchange.ready is None:
            exchange.note_ready()
        exchange.note_done()
        try:
            self._noise.after_pass(current_pass)
            if current_pass.is_last:
                self._noise.finish(current_pass)
        except Exception as error:
            if is_broken(error):
                raise
            self._chooser.warn("sampling the noise", error)
        timed.own_s += self._noise.take_spent_s()

    def _end_pass(self) -> None:
        """End the present pass, because the loop requests the next batch.

        If it is a step's last one and no update followed (AMP skips the update after an overflow), the step ends too.
        """
        current_pass = self._pass_under_way
        if current_pass is not None and current_pass.is_last and self._finished_pass is not current_pass:
            self._finish_step(current_pass, updated=False)
        self._pass_under_way = None

    def _before_update(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...] = (), keywords: Mapping[str, Any] = {}
    ) -> None:
        """Check that the update comes at the right moment, and multiply the learning rates by the rule's factor.

        This is the optimizer's pre-step hook; :meth:`_after_update` restores the rates. Between steps it does nothing.
        Raises InputError before a step's last pass, before that pass's backward, and for a loss that did not come
        through :meth:`loss`.
        """
        current_pass = self._pass_under_way
        if current_pass is None or self._finished_pass is current_pass:
            return
        if not current_pass.is_last:
            raise InputError("optimizer.step", "came before the step's last pass", "call it if agent.complete")
        # A closure runs forward and backward inside the update, so neither can have come before it.
        has_closure = any(value is not None for value in (*arguments[1:], *keywords.values()))
        if self._last_backward_pass is not current_pass and not has_closure:
            remedy = "call agent.loss(loss).backward() first"
            raise InputError("optimizer.step", "came before the pass's backward", remedy)
        if self._pass_with_loss is not current_pass and not has_closure:
            remedy = "write loss = agent.loss(loss) before loss.backward()"
            raise InputError("loss", "did not come through agent.loss", remedy)
        self._is_updating = True  # meanwhile optimizers inside this one may step, as in ZeroRedundancyOptimizer
        if not self.is_off:
            factor = self.learning_rate_factor
            self._rates_to_restore = [group["lr"] for group in optimizer.param_groups]
            self._refuse_stepwise_schedule(current_pass, self._rates_to_restore)
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Restore the learning rates that :meth:`_before_update` multiplied, and end the step: the post-step hook."""
        self._is_updating = False
        if self._rates_to_restore is not None:
            for group, rate in zip(optimizer.param_groups, self._rates_to_restore, strict=True):
                group["lr"] = rate
            self._rates_to_restore = None
        current_pass = self._pass_under_way
        if current_pass is not None and current_pass.is_last and self._finished_pass is not current_pass:
            self._finish_step(current_pass, updated=True)

    def _refuse_other_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Raise InputError if another optimizer steps within a step of uneven batches or several passes.

        The gradients of its parameters were averaged without weights, because the agent weights only its own model's
        losses. This is a hook before every optimizer's step.
        """
        current_pass = self._pass_under_way
        if current_pass is None or optimizer is self._optimizer or self._is_updating:
            return
        sizes = current_pass.split.sizes_of(current_pass.step_samples)
        if current_pass.passes > 1 or not (sizes == sizes[0, 0]).all():
            kind = type(optimizer).__name__
            problem = f"a second one ({kind}) steps within agent.batches, whose gradients nobody weighs"
            raise InputError("optimizer", problem, "train one wrapped model that has all parts, with one optimizer")

    def _refuse_stepwise_schedule(self, current_pass: Pass, rates: list[Any]) -> None:
        """Raise InputError if the base learning ``rates`` (by group) have changed within an epoch, while the batch may grow.

        Such a schedule counts steps, of which larger batches make fewer. It is allowed where the agent steps the
        schedule itself, where the script sets rates by hand, and where the batch does not change.
        """
        before = self._last_rates
        present_rates = list(map(float, rates))
        self._last_rates = (current_pass.epoch, present_rates)
        is_allowed = self._scheduler is not None or self._is_scheduled_by_hand or not self._chooser.adapts
        if is_allowed or before is None:
            return
        epoch_before, rates_before = before
        if epoch_before == current_pass.epoch and rates_before != present_rates:
            remedy = "give it to the agent, GoodputAgent(..., scheduler=scheduler), and do not step it in the loop"
            problem = "changes from step to step of an epoch, but larger batches make fewer steps"
            raise InputError("the learning rate", problem, remedy)

    def _step_schedule(self) -> None:
        """Step the schedule until it has made as many steps as a run at the initial batch would for the same samples."""
        if self._scheduler is None:
            return
        dataset_size = self.sampler.dataset_size
        initial_batch = self._limits.initial_batch_size
        steps_per_epoch = -(-dataset_size // initial_batch)  # rounded up: an epoch's last, smaller batch is a step too
        is_epoch_over = self.sampler.position >= dataset_size
        steps_in_epoch = steps_per_epoch if is_epoch_over else self.sampler.position // initial_batch
        wanted_steps = self.sampler.epoch * steps_per_epoch + steps_in_epoch
        while self._schedule_steps < wanted_steps:
            self._scheduler.step()
            self._schedule_steps += 1

    def _finish_step(self, current_pass: Pass, *, updated: bool) -> None:
        """End a step: count its samples, step the schedule, keep its times, and look at the measurements if that is due.

        ``updated`` is False if the update was skipped: the samples are done, but no progress was made. Times of the
        first steps after a start and of an epoch's smaller last step are not kept.
        """
        end = stamp(self._cuda)
        # Before `commit`, which moves the place in the epoch.
        factor = self._learning_rate_factor_at(current_pass.step_samples)
        self._finished_pass = current_pass
        self.sampler.commit(current_pass)
        if updated:
            self.progress += self._steps_at_initial_batch(current_pass.step_samples)
        self._step_schedule()
        timed = self._timed_step
        self._timed_step = None
        if timed is None:  # the agent is off
            return
        timed.end = end
        self._chooser.largest_tried = max(self._chooser.largest_tried, current_pass.step_samples)
        if self._recorder is not None:
            self._write_telemetry(self._recorder, timed, end, learning_rate_factor=factor, noise_scale=self.noise_scale)
        if current_pass.is_full and current_pass.step >= self._first_step + WARMUP_STEPS:
            self._chooser.add(timed)
        if self.sampler.step >= self._chooser.look_at:
            self._chooser.look()

    def _write_telemetry(self, recorder: StepRecorder, timed: TimedStep, end: Stamp, **more: Any) -> None:
        """Write a step's telemetry row, with ``more`` as further columns.

        ``timed``: the step's passes; ``end``: the moment after its update. Waiting for the slowest rank counts as part of
        ``sync_s``, because telling them apart would take a collective.
        """
        for exchange in timed.exchanges:  # as if the slowest rank had been ready with this one
            exchange.arrived_s = exchange.ready.host_s if exchange.ready is not None else None
        if not timed.first_pass.step_start:  # the step's first sample is the epoch's first
            recorder.begin_epoch()
        more |= {"total_batch": timed.first_pass.step_samples, "passes": len(timed.exchanges)}
        recorder.add(timed.first_pass.step, timed.exchanges, end, **more)

    def _learning_rate_factor_at(self, total: int) -> float:
        """Return the rule's factor of the learning rate, warmup included, at a batch of ``total`` samples.

        It is 1 while the rule lacks gradient statistics. A batch below the initial one, such as an epoch's smaller last
        step, counts as the initial one.
        """
        statistics = self._chooser.statistics
        if self._rule.needs_statistics and statistics is None:
            return 1.0
        scale = max(1.0, total / self._limits.initial_batch_size)
        epoch = self.sampler.epoch + self.sampler.position / self.sampler.dataset_size
        return self._rule.warmed_factor(scale, epoch, self._warmup_epochs, statistics)

    def _steps_at_initial_batch(self, total: int) -> float:
        """Return the number of steps at the initial batch that make as much progress as a step of ``total`` samples.

        For a larger batch the learning-rate rule says that number; it is 1 while the rule lacks gradient statistics. A
        smaller batch counts as its share of a step.
        """
        statistics = self._chooser.statistics
        scale = total / self._limits.initial_batch_size
        if scale <= 1 or (self._rule.needs_statistics and statistics is None):
            return min(scale, 1.0)
        return self._rule.steps_at_initial(scale, statistics)


def _count_error() -> InputError:
    """Return the error for a step in which some passes had a count and others had none."""
    return InputError("backward", "was given a count in some passes of a step only", "give it in all of them")
