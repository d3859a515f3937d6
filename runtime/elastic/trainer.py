"""Training that gives the same bits on any number of processes. Start at :class:`ElasticTrainer`.

::

    start_processes()                               # under torchrun; alone it does nothing
    trainer = ElasticTrainer(model, optimizer, nn.CrossEntropyLoss(), dataset, max_workers=4, batch_size=8)
    trainer.resume("run.pt")                        # if it is there, on whatever number of processes
    for epoch in range(3):
        for step in trainer.epoch(epoch):
            if step.number % 100 == 0:
                trainer.save("run.pt")

The unit of training is the logical worker (EST, EasyScaleThread): ``max_workers`` of them, however many processes there
are. Each has its data shard, its random streams and its module buffers, and they take turns on the process they are on.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from ddltool.errors import InputError
from ddltool.runtime.elastic import checkpoint
from ddltool.runtime.elastic.ordered_mean import Order
from ddltool.runtime.elastic.processes import Processes, start_processes
from ddltool.runtime.elastic.turns import REDUCTIONS, Reduction, Settings, Step, Turns
from ddltool.runtime.hook.job import dataset_length

__all__ = ["ElasticTrainer", "Step", "start_processes"]

_PARTS = ("settings", "environment", "position", "buckets", "parameters", "optimizer", "extras", "workers")
BUILD_THE_SAME = "give the settings of the run that is continued"


class Stateful(Protocol):
    """What has a state of plain numbers and tensors: a learning-rate scheduler, say."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take a state."""
        ...


class ElasticTrainer(Turns):
    """``max_workers`` logical workers on this job's processes; parameters, buffers and losses do not depend on how many.

    Process 0's parameters and buffers are the ones that training starts from. Every step takes ``max_workers *
    batch_size * accumulation`` samples of the epoch's permutation (``torch.randperm`` from ``seed + epoch``, as in
    torch's DistributedSampler); what is left at the end of an epoch is not used in it. Each sample is fetched while its
    worker is switched in, so an augmentation draws from the worker's streams, unless there are ``data_workers``.

    Turns on ``torch.use_deterministic_algorithms`` for this process. Between steps the model of one process (with an
    even placement process 0) holds virtual rank 0's buffers; :meth:`evaluating` puts them on every process.

    Source: EasyScale (Li et al., SC 2023), sections 3.2 and 3.3, determinism levels D0 and D1.

    Args:
        model: the bare module, on its device.
        optimizer: over the model's parameters.
        loss_fn: ``loss_fn(model(*inputs), target)`` is the mean loss of a batch ``(*inputs, target)``; None if you use
            :meth:`batches`.
        dataset: map-style, the same on every process.
        max_workers: logical workers; at least as many as processes.
        batch_size: samples per logical worker and micro-batch.
        accumulation: micro-batches per logical worker and step.
        placement: logical workers of each process; None: as even as possible.
        order: how gradients are added: ``ranked`` ((g0 + g1) + g2) + g3, or ``tree`` (g0 + g1) + (g2 + g3). The bits
            differ between the two.
        reduction: how a ``ranked`` sum comes about: ``chain``, the default for models on the host, passes it from process
            to process during the backward passes, with one sum in memory; ``gather`` sends everything to everybody at
            the end of a step. The same bits. ``tree`` gathers.
        bucket_mib: gradients that travel together, MiB.
        data_workers: processes that make batches ahead for all logical workers here; the samples and augmentations do
            not depend on how many, 0 included. Augmentations then draw from a state of their own for every batch; None:
            from the logical worker's streams, within its turn, as in a plain loop.
        collate: makes a batch of a list of samples; None: torch's ``default_collate``.
        extras: what else belongs into a checkpoint, by name, such as the learning-rate scheduler.
        record: a file for the fingerprints of every step (see :mod:`ddltool.runtime.elastic.digests`); slow, for finding out.

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
        order: Order = "ranked",
        reduction: Reduction | None = None,
        bucket_mib: float = 25.0,
        data_workers: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        extras: Mapping[str, Stateful] | None = None,
        record: str | os.PathLike[str] | None = None,
    ) -> None:
        _check_model(model)
        settings = Settings(
            max_workers=max_workers,
            batch_size=batch_size,
            accumulation=accumulation,
            seed=seed,
            order=order,
            dataset_size=dataset_length(dataset),
            sample_streams="turn" if data_workers is None else "batch",
        )
        chosen = _reduction(reduction, order, model)
        processes = Processes.this(max_workers, placement, dealt=chosen == "chain")
        torch.use_deterministic_algorithms(True)
        here = checkpoint.environment(next(model.parameters()).device)
        environment = ", ".join(f"{name} {value}" for name, value in here.items())
        processes.job.demand_same("environment", environment, "give all processes the same: torch.set_num_threads")
        _broadcast([*model.parameters(), *model.buffers()], 0)
        super().__init__(
            model,
            optimizer,
            dataset,
            settings,
            processes,
            bucket_mib=bucket_mib,
            reduction=chosen,
            data_workers=data_workers,
            collate=collate,
            record=record,
        )
        self.loss_fn = loss_fn
        self._extras = dict(extras or {})
        self._stamps: dict[Path, checkpoint.Stamp | None] = {}  # of what this run has read and written

    def epoch(self, epoch: int) -> Iterator[Step]:
        """Train the rest of an epoch, one step per item. An epoch that is behind already yields nothing."""
        if self.loss_fn is None:
            raise InputError("loss_fn", "was not given", "give one, or write the loop with trainer.batches(epoch)")
        with self._feed.watched() if self._feed is not None else nullcontext():
            for *inputs, target in self.batches(epoch):
                loss = self.loss_fn(self.model(*inputs), target)
                if self._turn_ends:
                    self._mean.expect()
                loss.backward()
                if self.turn_done(loss):
                    self.optimizer.step()
                    assert self.last_step is not None
                    yield self.last_step

    def close(self) -> None:
        """End the data workers, if there are any; otherwise they end with the process or when this is collected."""
        if self._feed is not None:
            self._feed.close()

    @contextmanager
    def evaluating(self) -> Iterator[nn.Module]:
        """Give the model in evaluation mode, with virtual rank 0's buffers on every process; all call this together."""
        self._demand_between_steps("evaluating")
        was_training = self.model.training
        buffers = list(self.model.buffers())
        kept = [value.clone() for value in buffers]
        _broadcast(buffers, self.processes.first)
        self.model.eval()
        try:
            yield self.model
        finally:
            self.model.train(was_training)
            for value, own in zip(buffers, kept, strict=True):
                value.copy_(own)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint, atomically; all processes call this together, between steps.

        The file has everything that the bits of the rest of the run depend on, and nothing about the number of
        processes. Process 0 writes. Raises InputError, on every process, when it cannot, or when a state holds objects that
        only pickle could bring back.
        """
        self._demand_between_steps("save")
        rank, first = self.processes.rank, self.processes.first
        own: dict[str, Any] = {"workers": self._contexts.to_documents()}
        if rank == first:  # extras that copy buffers, as AveragedModel does, copied virtual rank 0's here
            own["extras"] = {name: value.state_dict() for name, value in self._extras.items()}
        # Process 0 takes its own as they are: `write` refuses what cannot be read back.
        share = self.processes.job.together(lambda: checkpoint.encode_readable(path, own) if rank else b"")
        parts = self.processes.gather_bytes(share)

        def write() -> None:
            if rank == 0:
                documents = [own, *map(checkpoint.decode, parts[1:])]
                workers = [worker for document in documents for worker in document["workers"]]
                workers.sort(key=lambda worker: worker["virtual_rank"])
                content = self._content(workers, documents[first]["extras"])
                place = Path(path).absolute()
                self._stamps[place] = checkpoint.write(path, content, self._stamps.get(place))

        self.processes.job.together(write)

    def _content(self, workers: list[dict[str, Any]], extras: dict[str, Any]) -> dict[str, Any]:
        content = {
            "settings": asdict(self.settings),
            "environment": checkpoint.environment(self.device),
            "position": {"epoch": self.epoch_number, "step": self.step_in_epoch, "steps_made": self.steps_made},
            "buckets": self._mean.bucket_names,
            "parameters": {name: value.detach() for name, value in self.model.named_parameters()},
            "optimizer": self.optimizer.state_dict(),
            "optimizer_class": type(self.optimizer).__name__,
            "extras": extras,
            "workers": workers,
        }
        return checkpoint.uncompiled(content)

    def resume(self, path: str | os.PathLike[str]) -> bool:
        """Continue from a checkpoint if there is one; return whether there was. All processes call this together.

        Raises InputError, on every process, when the checkpoint does not fit, or was made where other bits must be
        expected: other threads, device type or torch.
        """
        found = Path(path).exists()
        older = checkpoint.previous(Path(path))
        if not found and older.exists() and self.processes.rank == 0:
            text = f"{path} is missing and {older} is there: starting anew; rename it to continue from it"
            warnings.warn(text, stacklevel=2)
        self.processes.job.demand_same(os.fspath(path), "there" if found else "missing", "use a folder that all see")
        if found:
            self.load(path)
        return found

    def load(self, path: str | os.PathLike[str]) -> None:
        """Continue from a checkpoint, as :meth:`resume`. Raises InputError when there is none."""
        self._demand_between_steps("load")
        mark = checkpoint.stamp(path)
        content = self.processes.job.together(lambda: self._checked(path))
        self.processes.job.demand_same(os.fspath(path), checkpoint.content_digest(content), "use a folder that all see")
        names = {checkpoint.plain_name(name): name for name, _ in self.model.named_parameters()}
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                value.copy_(content["parameters"][checkpoint.plain_name(name)])
        self.optimizer.load_state_dict(content["optimizer"])
        for name, extra in self._extras.items():
            extra.load_state_dict(content["extras"][name])
        position = content["position"]
        self.epoch_number, self.step_in_epoch = position["epoch"], position["step"]
        self.steps_made = position["steps_made"]
        self._mean.clear()
        self._mean.close()
        self._mean = self._new_mean([[names[name] for name in bucket] for bucket in content["buckets"] or []] or None)
        self._contexts.load(content["workers"], os.fspath(path))
        self._stamps[Path(path).absolute()] = mark
        if self._file is not None:
            self._file.reopen()

    def _checked(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Return a checkpoint's content. Raises InputError unless this run can continue it."""
        content = checkpoint.read(path)
        if missing := [name for name in _PARTS if name not in content]:
            raise InputError(
                os.fspath(path), f"has no {missing[0]}", "give a checkpoint that ElasticTrainer.save wrote"
            )
        content = checkpoint.uncompiled(content)  # older files may have the names of a compiled model
        settings = {"sample_streams": "turn"} | content["settings"]  # older files do not say
        checkpoint.demand_equal(path, settings, asdict(self.settings), BUILD_THE_SAME)
        remedy = "equal bits need the same: torch.set_num_threads, torch's version, the type of device"
        checkpoint.demand_equal(path, content["environment"], checkpoint.environment(self.device), remedy)
        saved = {name: _form(value) for name, value in content["parameters"].items()}
        present = {checkpoint.plain_name(name): _form(value) for name, value in self.model.named_parameters()}
        present |= dict.fromkeys(saved.keys() - present.keys(), "missing")
        saved |= dict.fromkeys(present.keys() - saved.keys(), "missing")
        remedy = "build the model that was saved"
        checkpoint.demand_equal(f"{os.fspath(path)}:parameters", saved, present, remedy)
        if missing := sorted(set(content["extras"]) ^ set(self._extras)):
            raise InputError(f"{os.fspath(path)}:extras", f"{missing[0]} is only on one side", BUILD_THE_SAME)
        saved_class = content.get("optimizer_class")
        told = checkpoint.demand_same_optimizer(path, content["optimizer"], saved_class, self.optimizer)
        if told and self.processes.rank == 0:
            warnings.warn(told, stacklevel=2)
        return content


def _form(value: Tensor) -> str:
    """Return a tensor's type and shape in words."""
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def _broadcast(tensors: list[Tensor], source: int) -> None:
    """Give every process the values of process ``source``."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        with torch.no_grad():
            for value in tensors:
                dist.broadcast(value.data, src=source)


def _reduction(asked: Reduction | None, order: Order, model: nn.Module) -> Reduction:
    """Return how gradients are added up. Raises InputError for what does not go together."""
    if asked is not None and asked not in REDUCTIONS:
        raise InputError("reduction", f"is {asked}", f"known: {', '.join(REDUCTIONS)}")
    on_host = all(parameter.device.type == "cpu" for parameter in model.parameters())
    possible = order == "ranked" and on_host
    if asked == "chain" and not possible:
        problem = f"is chain, with order {order}" if on_host else "is chain, with parameters that are not on the host"
        raise InputError("reduction", problem, "leave it out, or give gather")
    return asked or ("chain" if possible else "gather")


def _check_model(model: nn.Module) -> None:
    """Raise InputError for a model whose bits would depend on the placement."""
    if isinstance(model, DistributedDataParallel):
        remedy = "give the bare module: the logical workers are averaged here"
        raise InputError("model", "is a DistributedDataParallel", remedy)
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            problem = "is a SyncBatchNorm, whose sums depend on the placement"
            raise InputError(f"model:{name}", problem, "use BatchNorm")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError("model", "has no parameter that requires gradients", "give the model that is trained")
