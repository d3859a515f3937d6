"""The turns of logical workers (ESTs) on one process: who computes which batch, in which state. Start at :class:`Turns`.

:class:`ddltool.runtime.elastic.trainer.ElasticTrainer` is what a training script uses; it adds checkpoints and the ready-made
loop.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from ddltool.errors import InputError
from ddltool.runtime.elastic.checkpoint import environment
from ddltool.runtime.elastic.contexts import AttributeWatch, Contexts
from ddltool.runtime.elastic.digests import StepFile, TurnRecorder, digests
from ddltool.runtime.elastic.ordered_mean import MIB, ORDERS, ChainedMean, GatheredMean, Order, OrderedMean
from ddltool.runtime.elastic.processes import Processes
from ddltool.runtime.elastic.run_difference import BEFORE
from ddltool.runtime.elastic.sample_feed import SampleFeed, Task
from ddltool.runtime.hook.batches import VariableBatchSampler

Reduction = Literal["chain", "gather"]
REDUCTIONS = ("chain", "gather")
SAME_CTRL_C_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the bits of a run depend on and the user chooses; a checkpoint is continued with the same.

    Raises InputError for a count below 1, an unknown order, or a dataset without the samples of one step.
    """

    max_workers: int
    batch_size: int
    accumulation: int
    seed: int
    order: Order
    dataset_size: int
    sample_streams: str = "turn"
    """What augmentations draw from: the worker's streams in its ``turn``, or a state of its own for each ``batch``."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name not in ("seed", "dataset_size") and isinstance(value, int) and value < 1:
                raise InputError(name, f"is {value}", "give at least 1")
        if not 0 <= self.seed < 2**63:
            raise InputError("seed", f"is {self.seed}", "give 0 to 2**63 - 1")
        if self.order not in ORDERS:
            raise InputError("order", f"is {self.order}", f"known: {', '.join(ORDERS)}")
        if self.dataset_size < (needed := self.max_workers * self.batch_size * self.accumulation):
            what = f"has {self.dataset_size} samples, one step takes max_workers x batch_size x accumulation = {needed}"
            raise InputError("dataset", what, "give a smaller batch_size or max_workers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A step that was made.

    Attributes:
        number: steps made so far in the whole run, this one included.
        epoch: its epoch.
        losses: each logical worker's loss in virtual-rank order (mean over its micro-batches); NaN where not given.
        stop: a process was asked to stop (:meth:`ElasticTrainer.stop_on`); the same on all processes.
    """

    number: int
    epoch: int
    losses: tuple[float, ...]
    stop: bool

    @property
    def loss(self) -> float:
        """The mean over the logical workers."""
        return sum(self.losses) / len(self.losses)


class Turns:
    """Runs the logical workers of this process, one after the other, and averages what all processes computed.

    Args: as those of :class:`~ddltool.runtime.elastic.trainer.ElasticTrainer`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Dataset[Any],
        settings: Settings,
        processes: Processes,
        *,
        bucket_mib: float,
        reduction: Reduction,
        data_workers: int | None,
        collate: Callable[[list[Any]], Any] | None,
        record: str | os.PathLike[str] | None,
    ) -> None:
        self.model, self.optimizer, self.dataset = model, optimizer, dataset
        self.settings, self.processes = settings, processes
        self.device = next(model.parameters()).device
        per_worker = [settings.batch_size * settings.accumulation] * settings.max_workers
        self._samplers = {
            rank: VariableBatchSampler(settings.dataset_size, per_worker, rank, True, settings.seed, drop_last=True)
            for rank in processes.local
        }
        self._contexts = Contexts(model, processes.local, settings.seed, self.device)
        self._attributes = AttributeWatch(model, processes.rank == processes.first)  # one process tells
        if not 0 < bucket_mib < 2**40:  # NaN is neither
            raise InputError("bucket_mib", f"is {bucket_mib}", "give the size of a bucket in MiB, above 0")
        self._bucket_bytes = int(bucket_mib * MIB)
        self._reduction = reduction
        self._mean = self._new_mean(None)
        self._collate = collate or default_collate
        self._feed = None
        if data_workers is not None:
            self._feed = SampleFeed(dataset, self._collate, seed=settings.seed, workers=data_workers)
        self._turns = TurnRecorder(model) if record is not None else None
        self._file = processes.job.together(lambda: self._open_record(record))
        self.epoch_number, self.step_in_epoch, self.steps_made = 0, 0, 0
        self.last_step: Step | None = None
        self._losses: dict[int, list[Tensor]] = {}
        self._micro_batches = 0
        self._awaits_update = self._stop = False
        self._gathered_turns: list[bytes] = []
        self._combined: dict[str, str] = {}
        self._before: dict[str, str] | None = None
        optimizer.register_step_post_hook(self._updated)

    def _open_record(self, path: str | os.PathLike[str] | None) -> StepFile | None:
        if path is None or self.processes.rank > 0:
            return None
        return StepFile(path, asdict(self.settings) | environment(self.device))

    @property
    def steps_per_epoch(self) -> int:
        """Steps in one epoch."""
        return len(next(iter(self._samplers.values())))

    def batches(self, epoch: int) -> Iterator[Any]:
        """Yield this process's micro-batches of the rest of an epoch; each is to be followed by :meth:`turn_done`.

        ::

            for inputs, target in trainer.batches(epoch):
                loss = loss_fn(model(inputs), target)
                loss.backward()
                if trainer.turn_done(loss):          # .grad now holds the mean over all logical workers
                    optimizer.step()

        No ``zero_grad`` is needed. While a batch is out, its logical worker is switched in; after ``turn_done`` of the
        last one in a step none is. An epoch that is behind already yields nothing.
        """
        if self._losses:
            raise InputError("trainer.batches", "a step was left before its end", "load a checkpoint")
        if epoch < self.epoch_number:
            return
        if epoch > self.epoch_number:
            self.epoch_number, self.step_in_epoch = epoch, 0
        source = self._fetched(epoch)
        while self.step_in_epoch < self.steps_per_epoch:
            for rank in self.processes.local:
                self._begin_turn(rank)
                for _ in range(self.settings.accumulation):
                    batch = _moved(next(source), self.device)
                    if self._turns is not None:
                        self._turns.batch(batch)
                    before = self._micro_batches
                    yield batch
                    if self._micro_batches == before:
                        problem = "a batch was not followed by turn_done"
                        raise InputError("trainer.batches", problem, "call it each time")

    def _fetched(self, epoch: int) -> Iterator[Any]:
        """Yield the batches of the rest of the epoch in the order of the turns, each fetched when it is asked for."""
        for sampler in self._samplers.values():
            sampler.set_epoch(epoch)
        shares = {rank: list(sampler) for rank, sampler in self._samplers.items()}
        size, places = self.settings.batch_size, range(self.settings.accumulation)
        tasks = [
            Task(rank, epoch, step, place, tuple(shares[rank][step][place * size : (place + 1) * size]))
            for step in range(self.step_in_epoch, self.steps_per_epoch)
            for rank in self.processes.local
            for place in places
        ]
        if self._feed is None:
            for task in tasks:
                yield self._collate([self.dataset[index] for index in task.indices])
            return
        batches = self._feed.batches(tasks)
        for _ in tasks:
            with nullcontext() if self._feed.workers else self._contexts.aside():
                batch = next(batches)
            yield batch

    @property
    def _turn_ends(self) -> bool:
        """Whether the micro-batch that is out is the last of its worker's turn."""
        return (self._micro_batches + 1) % self.settings.accumulation == 0

    def _begin_turn(self, rank: int) -> None:
        self._awaits_update = False
        self._mean.clear()
        self._mean.begin(rank)
        self._contexts.enter(rank)
        self._attributes.begin()
        if self._turns is not None:
            self._turns.begin(rank, *self._contexts.seen())

    def turn_done(self, loss: Tensor | None = None) -> bool:
        """Say that the backward pass of a micro-batch is over; return whether the step's gradients are complete.

        True once per step, on every process: then ``.grad`` is the mean over all logical workers. ``loss`` (a scalar) is
        for :attr:`Step.losses`.
        """
        rank = self._contexts.active
        if rank is None:
            raise InputError("turn_done", "no logical worker is switched in", "call it once per batch")
        losses = self._losses.setdefault(rank, [])
        losses.append(torch.tensor(torch.nan) if loss is None else loss.detach())
        if self._turns is not None:
            self._turns.loss(losses[-1])
        self._micro_batches += 1
        if self._micro_batches % self.settings.accumulation:
            return False
        buffers = self._contexts.seen()[1] if self._turns is not None else {}
        self._attributes.end()
        last = rank == self.processes.local[-1]
        self._contexts.leave(last)
        if self._turns is not None:
            self._turns.end(self._gradients(), buffers)
        self._mean.take(rank)
        if last:
            self._finish_step()
        return last

    def _gradients(self) -> dict[str, Tensor | None]:
        """Return the present gradients, last layer first: the order in which a backward pass makes them."""
        return {name: self.model.get_parameter(name).grad for name in reversed(self._mean.names)}

    def _finish_step(self) -> None:
        losses = [[float(value) for value in self._losses[rank]] for rank in self.processes.local]
        notes = torch.tensor([[sum(each) / len(each), float(self._stop)] for each in losses], dtype=torch.float64)
        table = self._mean.finish(notes)
        self._losses = {}
        self.step_in_epoch += 1
        self.steps_made += 1
        self.last_step = Step(
            number=self.steps_made,
            epoch=self.epoch_number,
            losses=tuple(table[:, 0].tolist()),
            stop=bool(table[:, 1].any()),
        )
        self._awaits_update = True
        if self._turns is not None:
            self._gathered_turns = self.processes.gather_bytes(self._turns.take())
            self._combined = digests(self._gradients()) if self._file is not None else {}
            self._before = self._parameters() if self._file is not None and self.steps_made == 1 else None

    def _updated(self, *_: object) -> None:
        """Note that the optimizer made its step, and write the step's fingerprints."""
        if self._file is not None and self._awaits_update:
            shared = {"combined gradient": self._combined, "parameter": self._parameters()}
            if self._before is not None:
                shared[BEFORE] = self._before
            self._file.write(self.steps_made - 1, self.epoch_number, self._gathered_turns, shared)
        self._awaits_update = False

    def _parameters(self) -> dict[str, str]:
        return digests(dict(self.model.named_parameters()))

    def stop_on(self, *numbers: signal.Signals) -> None:
        """Let a signal, on any process, set :attr:`Step.stop` of a step on all of them, instead of ending the process.

        ``if step.stop: trainer.save(path); break`` is then a checkpoint on request. Without ``numbers``: SIGTERM and
        SIGINT (Ctrl-C). A SIGINT more than a second after the first is a KeyboardInterrupt, at once; earlier ones are
        the same Ctrl-C, which the terminal and a launcher both send.
        """
        first: float | None = None

        def note(number: int, _: FrameType | None) -> None:
            nonlocal first
            self._stop = True
            if number == signal.SIGINT:
                first = time.monotonic() if first is None else first
                if time.monotonic() - first > SAME_CTRL_C_S:
                    raise KeyboardInterrupt

        for number in numbers or (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, note)

    def _new_mean(self, buckets: list[list[str]] | None) -> OrderedMean:
        parameters = dict(self.model.named_parameters())
        turns, size = self.settings.accumulation, self._bucket_bytes
        if self._reduction == "chain":
            return ChainedMean(parameters, self.processes, turns_per_worker=turns, bucket_bytes=size, buckets=buckets)
        order = self.settings.order
        return GatheredMean(
            parameters, self.processes, order=order, turns_per_worker=turns, bucket_bytes=size, buckets=buckets
        )

    def _demand_between_steps(self, what: str) -> None:
        if self._contexts.active is not None or self._losses or self._awaits_update:
            raise InputError(what, "the step is not over", "call it after optimizer.step(), before the next batch")


def _moved(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with its tensors on ``device``, inside lists, tuples and mappings."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: _moved(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [_moved(value, device) for value in batch]
    return batch
