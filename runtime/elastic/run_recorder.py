"""Fingerprints of a training loop of one's own, plain DDP included, for ``ddltool diff-run``. Start at :class:`RunRecorder`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddltool.errors import InputError
from ddltool.runtime.elastic.checkpoint import environment
from ddltool.runtime.elastic.contexts import Buffers, RandomStreams
from ddltool.runtime.elastic.digests import StepFile, TurnRecorder, digests
from ddltool.runtime.elastic.processes import Processes
from ddltool.runtime.elastic.run_difference import BEFORE
from ddltool.runtime.hook.job import Job

T = TypeVar("T")


class RunRecorder:
    """Records every step of a user's own loop; each process of the job counts as one logical worker.

    ::

        recorder = RunRecorder(model, optimizer, "run.jsonl")      # the DistributedDataParallel, or the bare module
        for inputs, targets in recorder.batches(loader):           # was: in loader
            loss = loss_fn(model(inputs), targets)
            recorder.loss(loss)                                     # optional
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    What is recorded, in causal order: random streams before the batch is fetched, batches, buffers, outputs of leaf
    modules, losses, each process's own gradients (before DDP averages them), buffers; then the gradients that the
    optimizer gets and the parameters that it leaves. A step ends with ``optimizer.step()``; several batches may come
    before it. Process 0 writes. Reads every byte of the training state and waits for all processes in each step: slow.

    Args:
        model: the module that is trained; names are those of the bare module.
        optimizer: over its parameters.
        path: the record; a step that it has already is replaced, with all that follow.
        settings: what else the run depends on, as plain numbers and strings by name (seed, batch size, ...).
        first_step: number of the next step, for a run that goes on.

    Raises InputError, on every process, where the record cannot be written.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        path: str | os.PathLike[str],
        *,
        settings: Mapping[str, Any] | None = None,
        first_step: int = 0,
    ) -> None:
        self._model: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        self._device = next(self._model.parameters()).device
        job = Job.this()
        self._processes = Processes(job=job, runs=tuple((rank,) for rank in range(job.world_size)))
        known = environment(self._device) | {"processes": job.world_size} | dict(settings or {})
        file = job.together(lambda: StepFile(path, known) if job.rank == 0 else None)
        self._file = file
        self._turns = TurnRecorder(self._model)
        self._gradients: dict[str, Tensor] = {}
        self._combined: dict[str, str] = {}
        self._before: dict[str, str] | None = None
        self._epoch = 0
        self._open = False
        self.step = first_step
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._watch(name))
        optimizer.register_step_pre_hook(self._before_update)
        optimizer.register_step_post_hook(self._after_update)

    def _watch(self, name: str) -> Any:
        def note(gradient: Tensor) -> None:
            if self._open:
                held = self._gradients.get(name)
                self._gradients[name] = gradient.detach().clone() if held is None else held.add_(gradient)

        return note

    def batches(self, loader: Iterable[T], epoch: int = 0) -> Iterator[T]:
        """Yield the batches of ``loader``, recording each and the random streams before it is fetched."""
        self._epoch = epoch
        source = iter(loader)
        while True:
            begun = self._begin()
            try:
                batch = next(source)
            except StopIteration:
                if begun:
                    self._open = False
                return
            self._turns.batch(batch)
            yield batch

    def loss(self, value: Tensor) -> None:
        """Note the loss of the present batch."""
        self._turns.loss(value)

    def _begin(self) -> bool:
        """Begin a turn unless one is under way; return whether it did."""
        if self._open:
            return False
        streams = RandomStreams.capture(self._device).to_document()
        self._turns.begin(self._processes.rank, streams, self._buffers())
        self._gradients = {}
        self._open = True
        return True

    def _buffers(self) -> dict[str, Tensor | None]:
        buffers = Buffers(self._model)
        return dict(zip(buffers.names, buffers.current(), strict=True))

    def _before_update(self, *_: object) -> None:
        if not self._open:
            raise InputError("RunRecorder", "the optimizer steps without a batch", "take them from recorder.batches")
        named = reversed([name for name, value in self._model.named_parameters() if value.requires_grad])
        order = list(named)
        self._turns.end({name: self._gradients.get(name) for name in order}, self._buffers())
        self._combined = digests({name: self._model.get_parameter(name).grad for name in order})
        self._before = self._parameters() if self._file is not None and self.step == 0 else None
        self._open = False

    def _parameters(self) -> dict[str, str]:
        return digests(dict(self._model.named_parameters()))

    def _after_update(self, *_: object) -> None:
        gathered = self._processes.gather_bytes(self._turns.take())
        if self._file is not None:
            shared = {"combined gradient": self._combined, "parameter": self._parameters()}
            if self._before is not None:
                shared[BEFORE] = self._before
            self._file.write(self.step, self._epoch, gathered, shared)
        self.step += 1
