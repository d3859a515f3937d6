"""Training that gives the same bits on any number of processes. Start at :class:`ElasticTrainer`.

::

    start_processes()                               # under torchrun; alone it does nothing
    trainer = ElasticTrainer(model, optimizer, nn.CrossEntropyLoss(), dataset, max_workers=4, batch_size=8)
    trainer.resume("run.pt")                        # if it is there, on whatever number of processes
    for epoch in range(3):
        for step in trainer.epoch(epoch):
            if step.number % 100 == 0:
                trainer.save("run.pt")

The unit of training is the logical worker (EST, EasyScaleThread). There are ``max_workers`` of them, whatever the number
of processes. Each has its own data shard, random streams and module buffers; those of one process take turns on it.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset, default_collate

from ddltool.errors import InputError
from ddltool.runtime.elastic import checkpoint
from ddltool.runtime.elastic.contexts import LOSS, Contexts, modules_of, named_buffers, plain_name
from ddltool.runtime.elastic.ordered_mean import MIB, OrderedMean
from ddltool.runtime.elastic.processes import Processes, broadcast, count_collectives, to_device
from ddltool.runtime.elastic.recording import TurnRecorder
from ddltool.runtime.elastic.sample_feed import BatchTask, SampleFeed
from ddltool.runtime.elastic.settings import check_model, check_optimizer, check_parameters, settings_of, workers_of
from ddltool.runtime.hook.job import bare_optimizer, planned_for
from ddltool.runtime.hook.telemetry import StepRecorder, TelemetryFile
from ddltool.runtime.processes.batches import VariableBatchSampler
from ddltool.runtime.processes.random_streams import streams_kept
from ddltool.runtime.processes.same_samples import dataset_length, demand_same_samples
from ddltool.runtime.processes.step_times import Exchange
from ddltool.runtime.processes.stopping import StopSignals, refuse_in_one_line

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """A step whose gradients are averaged.

    Attributes:
        number: steps made so far in the whole run, this one included.
        epoch: the step's epoch.
        losses: each logical worker's loss in virtual-rank order, the mean over its micro-batches; NaN where not given.
        stop: whether a process was asked to stop (:meth:`ElasticTrainer.stop_on`); the same on all processes.
    """

    number: int
    epoch: int
    losses: tuple[float, ...]
    stop: bool

    @property
    def loss(self) -> float:
        """The mean of ``losses`` over the logical workers."""
        return sum(self.losses) / len(self.losses)


class ElasticTrainer:
    """Trains by ``max_workers`` logical workers; parameters, buffers and losses do not depend on the number of processes.

    Training starts from process 0's parameters and buffers. Every step takes ``max_workers * batch_size *
    accumulation`` samples of the epoch's permutation (``torch.randperm`` from ``seed + epoch``, as in torch's
    DistributedSampler); what is left at the end of an epoch is not used in it. Each sample is fetched while its worker
    is switched in, so an augmentation draws from the worker's random streams, unless there are ``data_workers``.

    Turns on ``torch.use_deterministic_algorithms`` for this process. Between steps the model of one process (with an
    even placement process 0) holds virtual rank 0's buffers; :meth:`evaluating` puts them on every process.

    Source: EasyScale (Li et al., SC 2023), sections 3.2 and 3.3, determinism levels D0 and D1.

    Args:
        model: the bare module, on its device.
        optimizer: over the parameters of model and loss, and any others in its groups. All are averaged and saved, and
            may be frozen, unfrozen and added between steps. Its ``step`` must not need a closure.
        loss_fn: a module or any callable that returns the mean loss of a batch: ``loss_fn(model(*inputs), target)`` for
            a batch ``(*inputs, target)``, ``loss_fn(model(**batch), batch)`` for a mapping, ``loss_fn(model(batch),
            batch)`` for a single tensor. None where the loop uses :meth:`batches`.
        dataset: map-style, the same on every process.
        max_workers: logical workers; at least as many as processes.
        batch_size: samples per logical worker and micro-batch.
        seed: of the order of samples and of the workers' random streams.
        accumulation: micro-batches per logical worker and step.
        placement: logical workers of each process; None: as evenly as possible.
        bucket_mib: most MiB of gradients in one message.
        data_workers: processes that make batches ahead for all logical workers here. Augmentations then draw from a
            random state of their own for every batch, so results do not depend on the number, 0 included. None: no such
            processes, and augmentations draw from the logical worker's streams, within its turn, as in a plain loop.
        collate: makes a batch of a list of samples; None: torch's ``default_collate``.
        extras: what else belongs in a checkpoint, by name, such as the learning-rate scheduler.
        record: a file for the fingerprints of every step (:mod:`~.recording`); slow, for finding a difference of two
            runs.

    Raises InputError where the job, the model or the settings do not allow equal bits.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        dataset: Dataset[Any],
        *,
        max_workers: int = 4,
        batch_size: int = 8,
        seed: int = 0,
        accumulation: int = 1,
        placement: Sequence[int] | None = None,
        bucket_mib: float = 25.0,
        data_workers: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        extras: Mapping[str, Stateful] | None = None,
        record: str | os.PathLike[str] | None = None,
    ) -> None:
        """Check that bits will not depend on the placement, and set up the logical workers of this process.

        All processes construct the trainer together; parameters and buffers of process 0 are sent to the others.
        """
        refuse_in_one_line()
        # Check all arguments, before processes exchange anything and after.
        check_model(model, loss_fn)
        inner = bare_optimizer(optimizer)
        self.model = model
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.dataset = dataset
        self._parameters: dict[str, nn.Parameter] = {}
        self._layout: tuple[Any, ...] = ()  # what `_present_layout` returned when `_parameters` were last set
        self._replace_parameters()
        check_parameters(self._parameters)
        check_optimizer(inner)
        self.device = next(model.parameters()).device
        self.settings = settings_of(
            max_workers=max_workers,
            batch_size=batch_size,
            accumulation=accumulation,
            seed=seed,
            dataset_size=dataset_length(dataset),
            sample_streams="turn" if data_workers is None else "batch",
        )
        if not 0 < bucket_mib < 2**40:  # NaN is neither
            raise InputError("bucket_mib", f"is {bucket_mib}", "give the size of a bucket in MiB, above 0")
        self.processes = Processes.this(max_workers, placement)
        demand_same_samples(self.processes.job, dataset)
        torch.use_deterministic_algorithms(True)
        environment = checkpoint.environment(self.device)
        description = ", ".join(f"{name} {value}" for name, value in environment.items())
        remedy = "give all processes the same: torch.set_num_threads"
        self.processes.job.demand_same("environment", description, remedy)
        # Start from process 0's values; then make the parts of this process.
        modules = modules_of(model, loss_fn)
        buffers = {id(value): value for value in named_buffers(modules).values() if value is not None}
        broadcast([*self._parameters.values(), *buffers.values()], 0)
        local = self.processes.local
        self._first = self.processes.owners[0]
        size = self.settings.dataset_size
        sizes = [batch_size * accumulation] * max_workers
        self._samplers = {rank: VariableBatchSampler(size, sizes, rank, True, seed, drop_last=True) for rank in local}
        self._contexts = Contexts(modules, local, seed, self.device)
        self._bucket_bytes = int(bucket_mib * MIB)
        self._mean = self._new_mean(None)
        self._collate = collate or default_collate
        self._feed = None
        if data_workers is not None:
            self._feed = SampleFeed(dataset, self._collate, seed=seed, workers=data_workers)
        self._open_telemetry(None, self.device.type)
        self._recorder = None
        if record is not None:
            self._recorder = TurnRecorder(model, self.processes.job, record, self.settings.model_dump() | environment)
        self._extras = dict(extras or {})
        self._stamps: dict[Path, checkpoint.Stamp | None] = {}  # of the checkpoints that this run has read or written
        self._stops: list[StopSignals] = []
        # The position in the run, and the state of the step and turn under way.
        self.epoch_number = 0
        self.step_in_epoch = 0
        self.steps_made = 0
        self.last_step: StepResult | None = None
        self._losses: dict[int, list[Tensor]] = {}  # of the step under way, by virtual rank; empty between steps
        self._micro_batches = 0  # ended so far in the whole run of this process
        self._awaits_update = False  # whether a step's gradients are averaged and the update has not come yet
        self._versions = 0  # the sum of all parameters' versions at the step's start
        self._collectives = 0  # number of collectives that had run at the turn's start
        # (parameter, its gradient, the gradient's version) after a micro-batch; None after the last one of a turn.
        self._gradient_before: tuple[Tensor, Tensor, int] | None = None
        self._backward_passes = 0
        self._watched_parameter = self._watch_first_parameter() if accumulation > 1 else None
        self._unsaved_optimizer = ""  # the class of an optimizer that trains the model as well and would not be saved
        inner.register_step_pre_hook(self._before_update)
        inner.register_step_post_hook(self._after_update)

    @classmethod
    def planned(
        cls,
        config: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        dataset: Dataset[Any],
        **options: Any,
    ) -> ElasticTrainer:
        """Return a trainer of the logical workers in the plan ``config``, placed as planned; ``options``: as for the class.

        The plan sets ``max_workers``, ``batch_size`` and ``placement``. With the planned number of processes, the
        telemetry that the config names is written, a row per process and step; on any other number the workers are
        spread evenly, with the same bits and without telemetry. Raises InputError for a plan without logical workers.
        """
        path, planned = planned_for(config, model)
        ests, size = workers_of(path, planned)
        as_planned = (dist.get_world_size() if dist.is_initialized() else 1) == len(ests)
        placement = ests if as_planned else None
        options |= {"max_workers": sum(ests), "batch_size": size, "placement": placement}
        trainer = cls(model, optimizer, loss_fn, dataset, **options)
        if as_planned:
            trainer._open_telemetry(planned.telemetry, planned.ranks[trainer.processes.rank].device_type)
        return trainer

    def _open_telemetry(self, path: str | None, device: str) -> None:
        """Start to write this process's telemetry to ``path``; None: record nothing. ``device``: its type in the rows."""
        self._rows = TelemetryFile.of(path, self.processes.job, device)
        self._telemetry = StepRecorder(self._rows, cuda=self.device.type == "cuda")

    def _watch_first_parameter(self) -> Tensor:
        """Return the first trained parameter, after a hook on it that counts its backward passes in ``_backward_passes``.

        With accumulation, the count says how often its gradient may have changed (:meth:`_demand_same_gradients`).
        """
        first_trained = next(value for value in self._parameters.values() if value.requires_grad)

        def count_backward_pass(_: Tensor) -> None:
            """Count a backward pass, which has just added to the parameter's gradient."""
            self._backward_passes += 1

        first_trained.register_post_accumulate_grad_hook(count_backward_pass)
        return first_trained

    def _note_unsaved_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Note the class of ``optimizer`` if it trains the trainer's parameters and a checkpoint would lack its state.

        The trainer's own and those among its ``extras`` are saved. This is a hook after every optimizer's step.
        """
        stateful = (self.optimizer, *self._extras.values())
        saved = [bare_optimizer(entry) for entry in stateful if isinstance(entry, torch.optim.Optimizer)]
        is_saved = any(optimizer is entry for entry in saved)
        known_ids = {id(value) for value in self._parameters.values()}
        trained_ids = {id(value) for group in optimizer.param_groups for value in group["params"]}
        if not is_saved and known_ids & trained_ids:
            self._unsaved_optimizer = type(optimizer).__name__

    def _replace_parameters(self) -> list[Tensor]:
        """Set ``_parameters`` to those of model, loss and optimizer by name; return those that were not in it before.

        ``_layout`` is set too, so that a later change is noticed. A parameter in several of them gets its name from the
        first, in this order.
        """
        by_name = dict(self.model.named_parameters())
        if isinstance(self.loss_fn, nn.Module):
            by_name |= {LOSS + name: value for name, value in self.loss_fn.named_parameters()}
        for group_index, group in enumerate(self.optimizer.param_groups):
            by_name |= {f"(optimizer).{group_index}.{index}": value for index, value in enumerate(group["params"])}
        ids_before = {id(value) for value in self._parameters.values()}
        first_names: dict[int, str] = {}  # by id of a parameter, which may have several names
        for name, value in by_name.items():
            first_names.setdefault(id(value), name)
        self._parameters = {name: by_name[name] for name in first_names.values()}
        self._layout = self._present_layout()
        return [value for value in self._parameters.values() if id(value) not in ids_before]

    def _present_layout(self) -> tuple[Any, ...]:
        """Return a tuple that stays equal as long as no parameter is added, frozen or unfrozen.

        It holds the number of parameters in each optimizer group, then whether each parameter requires a gradient.
        """
        sizes = (len(group["params"]) for group in self.optimizer.param_groups)
        return *sizes, *(value.requires_grad for value in self._parameters.values())

    def _new_mean(self, buckets: list[list[str]] | None, before: OrderedMean | None = None) -> OrderedMean:
        """Return an :class:`OrderedMean` of the present parameters; ``before``, which it replaces, is closed.

        ``buckets``: parameter names by bucket, from a checkpoint. If None, or if the names are not exactly those of the
        trained parameters, buckets are recorded in the next step.
        """
        if before is not None:
            before.clear()
            before.close()
        trained = [name for name, value in self._parameters.items() if value.requires_grad]
        if buckets is not None and sorted(name for bucket in buckets for name in bucket) != sorted(trained):
            buckets = None  # parameters were frozen or unfrozen since; other buckets give the same bits
        return OrderedMean(
            self._parameters,
            self.processes,
            turns_per_worker=self.settings.accumulation,
            bucket_bytes=self._bucket_bytes,
            buckets=buckets,
        )

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in one epoch, which is the same for all logical workers."""
        return len(next(iter(self._samplers.values())))

    # Training.

    def epoch(self, epoch: int) -> Iterator[StepResult]:
        """Train the rest of an epoch, and yield a result after every optimizer step.

        An epoch that is over yields nothing. Raises InputError without a ``loss_fn``, after a step that was left before
        its end, and for what would make bits depend on the placement (:meth:`turn_done`).
        """
        if self.loss_fn is None:
            raise InputError("loss_fn", "was not given", "give one, or write the loop with trainer.batches(epoch)")
        with self._feed.watched() if self._feed is not None else nullcontext():
            for batch in self.batches(epoch):
                if isinstance(batch, Mapping):
                    loss = self.loss_fn(self.model(**batch), batch)
                elif isinstance(batch, Tensor):
                    loss = self.loss_fn(self.model(batch), batch)
                else:
                    *inputs, target = batch
                    loss = self.loss_fn(self.model(*inputs), target)
                if (self._micro_batches + 1) % self.settings.accumulation == 0:  # the turn's last backward pass is next
                    self._mean.expect()
                loss.backward()
                if self.turn_done(loss):
                    self.optimizer.step()
                    assert self.last_step is not None
                    yield self.last_step

    def batches(self, epoch: int) -> Iterator[Any]:
        """Yield this process's micro-batches of the rest of an epoch; each is to be followed by :meth:`turn_done`.

        ::

            for inputs, target in trainer.batches(epoch):
                loss = loss_fn(model(inputs), target)
                loss.backward()
                if trainer.turn_done(loss):          # .grad now holds the mean over all logical workers
                    optimizer.step()

        No ``zero_grad`` is needed. From a batch to its ``turn_done`` the batch's logical worker is switched in; after the
        last one of a step none is. An epoch that is over yields nothing. Raises InputError after a step that was left
        before its end, and for a batch without ``turn_done``.
        """
        if self._losses:
            raise InputError("trainer.batches", "a step was left before its end", "load a checkpoint")
        if epoch < self.epoch_number:
            return
        if epoch > self.epoch_number:
            self.epoch_number = epoch
            self.step_in_epoch = 0
        source = self._fetch_batches(epoch)
        self._telemetry.begin_epoch()
        other_steps = register_optimizer_step_post_hook(self._note_unsaved_optimizer)
        try:
            while self.step_in_epoch < self.steps_per_epoch:
                for rank in self.processes.local:
                    self._begin_turn(rank)
                    for _ in range(self.settings.accumulation):
                        batch = to_device(next(source), self.device)
                        if self._recorder is not None:
                            self._recorder.batch(batch)
                        micro_batches_before = self._micro_batches
                        self._telemetry.begin_forward()
                        self._telemetry.begin_backward()  # counts a pass; the update comes before the yield returns
                        yield batch
                        if self._micro_batches == micro_batches_before:
                            problem = "a batch was not followed by turn_done"
                            raise InputError("trainer.batches", problem, "call it each time")
        finally:
            other_steps.remove()
            self._contexts.untracked.close()
            self._rows.flush()

    def _fetch_batches(self, epoch: int) -> Iterator[Any]:
        """Yield this process's micro-batches of the rest of the epoch, in the order of the turns.

        Without a feed each is made when it is requested, in its worker's turn, and so draws from that worker's random
        streams. A feed seeds the streams anew for each batch, so that its data workers can make later ones ahead.
        """
        for sampler in self._samplers.values():
            sampler.set_epoch(epoch)
        # By virtual rank, the dataset indices of each step of the epoch, those of its micro-batches one after the other.
        shares = {rank: list(sampler) for rank, sampler in self._samplers.items()}
        batch_size = self.settings.batch_size
        tasks = []
        for step in range(self.step_in_epoch, self.steps_per_epoch):
            for rank in self.processes.local:
                for index in range(self.settings.accumulation):
                    indices = shares[rank][step][index * batch_size : (index + 1) * batch_size]
                    tasks.append(BatchTask(rank, epoch, step, index, tuple(indices)))
        if self._feed is None:
            for task in tasks:
                yield self._collate([self.dataset[index] for index in task.indices])
            return
        batches = self._feed.batches(tasks)
        for _ in tasks:
            # With 0 data workers the feed makes the batch in this process, and must not leave its streams seeded.
            with nullcontext() if self._feed.workers else streams_kept(self.device):
                batch = next(batches)
            yield batch

    def _begin_turn(self, rank: int) -> None:
        """Switch the logical worker of virtual rank ``rank`` in; in a step's first turn first note changed parameters."""
        self._awaits_update = False
        if rank == self.processes.local[0]:
            self._update_parameters()
        self._mean.clear()
        self._mean.begin(rank)
        self._contexts.enter(rank)
        self._collectives = count_collectives()
        if self._recorder is not None:
            self._recorder.begin(rank, *self._contexts.present())

    def _update_parameters(self) -> None:
        """Note the parameters' versions; if any were frozen, unfrozen or added since the last step, replace the mean.

        The mean (:class:`OrderedMean`) averages a fixed set of parameters, so a changed set needs a new one. New
        parameters get process 0's values. Within a step no parameter may change, which :meth:`turn_done` checks.
        """
        # torch adds 1 to a tensor's version with every change in place, so an equal sum means that nothing changed.
        self._versions = sum(value._version for value in self._parameters.values())
        if self._layout != self._present_layout():
            added_parameters = self._replace_parameters()
            broadcast(added_parameters, 0)
            self._mean = self._new_mean(buckets=None, before=self._mean)  # the next step divides them into buckets

    def turn_done(self, loss: Tensor | None = None) -> bool:
        """End a micro-batch after its backward pass, and the turn with its last one; return whether the step is complete.

        It is complete once per step, on every process: then ``.grad`` is the mean over all logical workers, and the
        optimizer may step. That call blocks for the other processes. ``loss`` (a scalar; None counts as NaN) goes into
        :attr:`StepResult.losses`.

        Raises InputError without an active worker, and for what would make bits depend on the placement of logical
        workers on processes: parameters or gradients that were changed in the turn, or a collective that it ran.
        """
        rank = self._contexts.active
        if rank is None:
            raise InputError("turn_done", "no logical worker is switched in", "call it once per batch")
        if self._versions != sum(value._version for value in self._parameters.values()):
            problem = "its parameters changed in a turn"
            raise InputError("model", problem, "update them once, when turn_done returns True")
        losses = self._losses.setdefault(rank, [])
        losses.append(torch.tensor(torch.nan) if loss is None else loss.detach())  # read at the step's end, not here
        if self._recorder is not None:
            self._recorder.loss(losses[-1])
        self._micro_batches += 1
        self._demand_same_gradients()
        if self._micro_batches % self.settings.accumulation:
            return False
        if self._recorder is not None:
            self._recorder.end(None, self._contexts.present()[1])
        if self._collectives != count_collectives():
            remedy = "keep what the workers of a turn compute to themselves"
            raise InputError("the turn", "ran a collective of all processes, whose number must not matter", remedy)
        is_last = rank == self.processes.local[-1]
        self._contexts.leave(is_last)
        if not is_last:
            self._mean.take(rank)
            return False
        exchange = self._begin_exchange()
        self._mean.take(rank)
        self._finish_step()
        exchange.note_done()
        return True

    def _begin_exchange(self) -> Exchange:
        """Start and return the telemetry of the step's gradient exchange; call it after this process's last turn.

        Its samples are those of a whole step: of this process's logical workers, and of all.
        """
        samples = self.settings.batch_size * self.settings.accumulation
        here = samples * len(self.processes.local)
        total = samples * self.settings.max_workers
        exchange = self._telemetry.begin_exchange(here, total)
        exchange.note_ready()
        # The sum passes from rank to rank, so no part of the exchange is a wait for the slowest process alone.
        exchange.note_arrival()
        return exchange

    def _demand_same_gradients(self) -> None:
        """Raise InputError if a gradient was changed or cleared since the turn's last micro-batch; remember the present one.

        One parameter's gradient is watched. Each backward pass raises its version by 1, and any other change raises it
        further.
        """
        before = self._gradient_before
        self._gradient_before = None
        if before is not None:
            parameter, gradient, version = before
            if parameter.grad is not gradient or gradient._version != version + self._backward_passes:
                problem = "were changed or cleared between the micro-batches of a turn"
                raise InputError("gradients", problem, "leave out zero_grad, and clip them when turn_done returns True")
        self._backward_passes = 0
        is_last_of_turn = self._micro_batches % self.settings.accumulation == 0
        watched = self._watched_parameter
        if not is_last_of_turn and watched is not None and watched.grad is not None:
            self._gradient_before = watched, watched.grad, watched.grad._version

    def _finish_step(self) -> None:
        """Set ``.grad`` to the mean, and ``last_step`` to the losses and stop requests of all processes; count the step.

        All processes do so together. Each worker's loss and its process's stop request travel in one message with the
        flags that say which gradients exist.
        """
        stop = float(any(signals.came for signals in self._stops))
        # A row for each worker of this process: (its mean loss, whether its process is to stop).
        own_rows = []
        for rank in self.processes.local:
            losses = [float(value) for value in self._losses[rank]]
            own_rows.append([sum(losses) / len(losses), stop])
        table = self._mean.finish(torch.tensor(own_rows, dtype=torch.float64))  # the same, for all workers
        self._losses = {}
        self.step_in_epoch += 1
        self.steps_made += 1
        self.last_step = StepResult(
            number=self.steps_made,
            epoch=self.epoch_number,
            losses=tuple(table[:, 0].tolist()),
            stop=bool(table[:, 1].any()),
        )
        self._awaits_update = True
        if self._recorder is not None:
            self._recorder.combined(first=self.steps_made == 1)

    def _before_update(self, _: object, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Raise InputError for an update before the step's last turn, or with a closure: the optimizer's pre-step hook."""
        if self._contexts.active is not None or self._losses:
            remedy = "call it when turn_done returns True"
            raise InputError("optimizer.step", "came before the step's last turn", remedy)
        if any(value is not None for value in (*arguments[1:], *named.values())):
            problem = "was given a closure, which would see one logical worker's batch"
            remedy = "give none; the gradients are there when turn_done returns True"
            raise InputError("optimizer.step", problem, remedy)

    def _after_update(self, *_: object) -> None:
        """Write the step's fingerprints and telemetry after the optimizer's update: its post-step hook.

        An update that follows no step of this trainer, such as the script's own, has no fingerprints; telemetry sees it,
        because it decides itself what counts as a step.
        """
        if self._recorder is not None and self._awaits_update:
            # The step has been counted already, so its number from 0 is one less.
            self._recorder.write(self.steps_made - 1, self.epoch_number)
        self._telemetry.after_update()
        self._awaits_update = False

    def stop_on(self, *numbers: signal.Signals) -> None:
        """Note signals, on any process, in place of ending: the next step of all processes has :attr:`StepResult.stop` set.

        So ``if step.stop: trainer.save(path); break`` saves a checkpoint on request. Without ``numbers``: SIGTERM and
        SIGINT (Ctrl-C). A later SIGINT still interrupts at once
        (:class:`~ddltool.runtime.processes.stopping.StopSignals`). Handlers that the script has set for them are replaced,
        since it asks for these signals by name; a second call adds its signals. Call it in the main thread.
        """
        self._stops.append(StopSignals(*numbers))
        self._stops[-1].open(all_of_them=True)

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Give the block the model in evaluation mode, with virtual rank 0's buffers on every process; all call this together.

        Changes of the block to buffers are dropped, and the training mode is restored. Raises InputError within a step.
        """
        self._demand_between_steps("evaluating")
        was_training = self.model.training
        with self._contexts.on_copies():
            broadcast(list(self.model.buffers()), self._first)
            self.model.eval()
            try:
                yield self.model
            finally:
                self.model.train(was_training)

    def close(self) -> None:
        """End the data workers, if there are any; without this call they end with the process or this object."""
        if self._feed is not None:
            self._feed.close()

    # Checkpoints.

    def _demand_between_steps(self, operation: str) -> None:
        """Raise InputError, naming ``operation``, from a step's first turn until its update."""
        is_in_turn = self._contexts.active is not None or self._losses
        # A loss scaler skips the update for gradients that are not finite, so it need not have come.
        if is_in_turn or (self._awaits_update and self._mean.is_usable()):
            raise InputError(operation, "the step is not over", "call it after optimizer.step(), before the next batch")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint, atomically; all processes call this together, between steps.

        The file has everything on which the bits of the rest of the run depend, and nothing about the number of
        processes. Process 0 writes it; the checkpoint before stays as ``NAME.previous``. Raises InputError, on every
        process, when the file cannot be written, when a state holds objects that only pickle could restore, and when
        another optimizer trains the model and is not among ``extras``.
        """
        self._demand_between_steps("save")
        if self._unsaved_optimizer:
            problem = f"a second one ({self._unsaved_optimizer}) trains the model as well, "
            problem += "and a checkpoint would lack its state"
            raise InputError("optimizer", problem, "give it to the trainer: extras={'second': optimizer}")
        job = self.processes.job
        own_part: dict[str, Any] = {"workers": self._contexts.to_documents()}
        if job.rank == self._first:  # extras that copy buffers, such as AveragedModel, hold virtual rank 0's here
            own_part["extras"] = {name: value.state_dict() for name, value in self._extras.items()}
        with self._telemetry.checkpoint():
            # Process 0 does not encode its own part, because `write` checks that it can be read back.
            encoded_parts = job.gather(job.together(lambda: checkpoint.encode(path, own_part) if job.rank else b""))

            def write() -> None:
                """Write the file on process 0, from its own part and those that the others have sent."""
                if job.rank == 0:
                    content = self._checkpoint_content([own_part, *map(checkpoint.decode, encoded_parts[1:])])
                    absolute = Path(path).absolute()
                    self._stamps[absolute] = checkpoint.write(path, content, self._stamps.get(absolute))

            job.together(write)

    def _checkpoint_content(self, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a checkpoint file's content: this process's state, with workers and extras from all processes' ``parts``.

        ``parts``: by rank, what :meth:`save` collects on each process: "workers", the documents of its logical workers,
        and from the process of virtual rank 0 also "extras", the state of each by name.
        """
        workers = [worker for part in parts for worker in part["workers"]]
        position = {"epoch": self.epoch_number, "step": self.step_in_epoch, "steps_made": self.steps_made}
        return {
            "settings": self.settings.model_dump(),
            "environment": checkpoint.environment(self.device),
            "position": position,
            # Plain names fit the model whether it is compiled or not.
            "buckets": [[plain_name(name) for name in bucket] for bucket in self._mean.bucket_names or ()],
            "parameters": {plain_name(name): value.detach() for name, value in self._parameters.items()},
            "optimizer": self.optimizer.state_dict(),
            "optimizer_class": type(self.optimizer).__name__,
            "extras": parts[self._first]["extras"],
            "workers": sorted(workers, key=lambda worker: worker["virtual_rank"]),
        }

    def resume(self, path: str | os.PathLike[str]) -> bool:
        """Continue from a checkpoint if there is one; return whether there was. All processes call this together.

        If only ``NAME.previous`` is there, it warns and returns False. Raises InputError, on every process, when the
        checkpoint does not fit, when it was made with another number of threads, device type or torch version, which
        would change bits, and when some processes do not see the file.
        """
        exists = Path(path).exists()
        older = checkpoint.previous(Path(path))
        if not exists and older.exists() and self.processes.rank == 0:
            text = f"{path} is missing and {older} is there: starting anew; rename it to continue from it"
            warnings.warn(text, stacklevel=2)
        self.processes.job.demand_same(os.fspath(path), "there" if exists else "missing", "use a folder that all see")
        if exists:
            self.load(path)
        return exists

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue from a checkpoint; all processes call this together, between steps.

        For optimizer options the saved values are used, with a warning where they differ from the present ones. Raises
        InputError, on every process, when there is no checkpoint, when it does not fit this run or was made with another
        number of threads, device type or torch version, and when some processes do not see the file.
        """
        self._demand_between_steps("load")
        stamp = checkpoint.stamp(path)  # before reading: a file that another run replaces meanwhile has another one
        present = self.settings.model_dump(), self.device, self._parameters, self._extras, self.optimizer
        content, differences = self.processes.job.together(lambda: checkpoint.read_matching(path, *present))
        if differences and self.processes.rank == 0:
            text = f"{os.fspath(path)}:optimizer: {'; '.join(differences)}; the saved values are continued with"
            warnings.warn(text, stacklevel=2)
        self.processes.job.demand_same(os.fspath(path), checkpoint.content_digest(content), "use a folder that all see")
        # From here on this process's state changes.
        names = {plain_name(name): name for name in self._parameters}
        with torch.no_grad():
            for name, value in self._parameters.items():
                value.copy_(content["parameters"][plain_name(name)])
        self.optimizer.load_state_dict(content["optimizer"])
        for name, extra in self._extras.items():
            extra.load_state_dict(content["extras"][name])
        position = content["position"]
        self.epoch_number = position["epoch"]
        self.step_in_epoch = position["step"]
        self.steps_made = position["steps_made"]
        self._telemetry.resume(self.steps_made)
        buckets = [[names[name] for name in bucket] for bucket in content["buckets"]] or None
        self._mean = self._new_mean(buckets, self._mean)
        self._contexts.load(content["workers"], os.fspath(path))
        self._stamps[Path(path).absolute()] = stamp
        if self._recorder is not None:
            self._recorder.reopen()
