"""Records of training runs: a fingerprint of every tensor of every step, one JSON line each.

A step consists of one *turn* of each logical worker, in which it runs its forward and backward passes; a worker's number
is its *virtual rank*.

``ElasticTrainer(..., record="run.jsonl")`` writes one, and :class:`RunRecorder` does for a loop of one's own, plain DDP
included. Two records of the same training, on any numbers of processes, are compared by
:func:`~.run_difference.first_difference` and by ``ddltool diff-run``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddltool.artifacts import check_writable, demand_file
from ddltool.errors import InputError
from ddltool.runtime.elastic.checkpoint import environment
from ddltool.runtime.elastic.contexts import modules_of, named_buffers
from ddltool.runtime.elastic.run_difference import (
    BEFORE,
    WORKER_CAUSES,
    Digests,
    RecordedStep,
    SharedKind,
    StepReader,
    WorkerKind,
)
from ddltool.runtime.processes.digests import digest, digests
from ddltool.runtime.processes.job import DistributedJob
from ddltool.runtime.processes.random_streams import RandomStreams

T = TypeVar("T")


class TurnRecorder:
    """Takes the fingerprints of this process's turns; process 0 writes a line per step.

    A turn is the computation of one logical worker in a step. For each turn call :meth:`begin`, :meth:`batch`,
    :meth:`loss` and :meth:`end`, and for each step :meth:`combined` before the update and :meth:`write` after it. Module
    outputs are those of the modules without children, in the order in which they ran. A step that is made again replaces
    the one in the file and all that follow. Raises InputError, on every process, where the file cannot be written or
    holds something else.
    """

    def __init__(
        self, model: nn.Module, job: DistributedJob, path: str | os.PathLike[str], settings: Mapping[str, Any]
    ) -> None:
        """Check the file on all processes, and register forward hooks on the modules without children.

        ``settings``: what the run depends on, by name; each line holds them.
        """
        self._model = model
        self._job = job
        self._path = Path(path)
        self._settings = dict(settings)
        self._has_written = False  # whether this run has written to the file since it was opened
        self._turns: dict[str, dict[WorkerKind, Digests]] = {}  # of the present step, by virtual rank
        self._turn: dict[WorkerKind, Digests] | None = None  # the turn under way
        self._shared: dict[SharedKind, Digests] = {}
        job.together(self._check)
        for name, module in model.named_modules():
            if not list(module.children()):
                module.register_forward_hook(self._watch(f"{name or 'model'} ({type(module).__name__})"))

    def _check(self) -> None:
        """On process 0, raise InputError unless the record can be written and holds nothing else."""
        if self._job.rank == 0:
            check_writable(self._path)
            demand_file(self._path)
            if self._path.exists():
                next(iter(StepReader(self._path)), None)  # raises for another kind of file

    def _watch(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        """Return a forward hook that records the fingerprint of a module's output under ``name``.

        It does nothing outside of turns and without gradients.
        """

        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            """Record the output's fingerprint as "NUMBER NAME", by the number of the call in this turn."""
            if self._turn is not None and torch.is_grad_enabled():
                call = f"{len(self._turn['output'])} {name}"
                # One fingerprint of all tensors that the output holds.
                self._turn["output"][call] = digest("".join(digests(output).values()).encode())

        return note

    def begin(self, virtual_rank: int, streams: Any, buffers: Mapping[str, Tensor | None]) -> None:
        """Begin a logical worker's turn: record its random streams and buffers, before it draws from them or changes them.

        ``streams``: the states of its random generators, as nested dicts with tensors or numbers as leaves; ``buffers``:
        the model's buffers by name, None for one that is registered as None.
        """
        turn: dict[WorkerKind, Digests] = {kind: {} for kind in WORKER_CAUSES}
        turn["random stream"] = digests(streams)
        turn["buffer before"] = digests(buffers)
        self._turns[str(virtual_rank)] = turn
        self._turn = turn

    def batch(self, content: Any) -> None:
        """Record the fingerprints of a micro-batch's leaves, numbered across the turn's batches."""
        if self._turn is not None:
            begin = len(self._turn["batch"])  # keeps the names of several batches of a turn apart
            self._turn["batch"] |= {f"{begin}.{name}": fingerprint for name, fingerprint in digests(content).items()}

    def loss(self, value: Tensor) -> None:
        """Record the fingerprint of a micro-batch's loss, as "loss NUMBER" from 0."""
        if self._turn is not None:
            self._turn["loss"][f"loss {len(self._turn['loss'])}"] = digest(value)

    def end(self, gradients: Mapping[str, Tensor | None] | None, buffers: Mapping[str, Tensor | None]) -> None:
        """End a turn: record its gradients, and its buffers by name as they are now.

        ``gradients``: by parameter name, None where there is none; None altogether: those in ``.grad``.
        """
        if self._turn is not None:
            present = self._gradients()
            turn_gradients = present if gradients is None else {name: gradients.get(name) for name in present}
            self._turn["gradient"] = digests(turn_gradients)
            self._turn["buffer"] = digests(buffers)
        self._turn = None

    def combined(self, *, first: bool) -> None:
        """Record, on process 0, the gradients that the optimizer is about to use; with ``first`` also the parameters.

        ``first``: whether this is the run's first step.
        """
        if self._job.rank == 0:
            self._shared = {"combined gradient": digests(self._gradients())}
            if first:
                self._shared[BEFORE] = self._parameters()

    def write(self, step: int, epoch: int) -> None:
        """Write a step's line, after the optimizer's update. All processes call this together; process 0 writes.

        The first line of a run drops lines of the same step or later ones from the file.
        """
        own_turns = self._turns
        self._turns = {}
        turns_by_process = self._job.gather(json.dumps(own_turns).encode())
        if self._job.rank > 0:
            return
        turns: dict[str, Any] = {}
        for encoded in turns_by_process:
            turns |= json.loads(encoded)
        recorded = RecordedStep(
            step=step,
            epoch=epoch,
            settings=self._settings,
            workers={virtual_rank: turns[virtual_rank] for virtual_rank in sorted(turns, key=int)},
            shared=self._shared | {"parameter": self._parameters()},
        )
        if not self._has_written:
            self._drop_from(step)
            self._has_written = True
        with self._path.open("a") as file:
            file.write(_line(recorded))

    def reopen(self) -> None:
        """Let the next line replace the lines of its step and later ones: call it after loading a checkpoint."""
        self._has_written = False

    def _drop_from(self, step: int) -> None:
        """Drop the lines of ``step`` and later steps from the file, and a line that a killed process left unfinished."""
        partial = self._path.with_name(self._path.name + ".partial")
        with partial.open("w") as kept:
            for recorded in StepReader(self._path) if self._path.exists() else ():
                if recorded.step >= step:
                    break
                kept.write(_line(recorded))
        os.replace(partial, self._path)

    def _gradients(self) -> dict[str, Tensor | None]:
        """Return the gradients in ``.grad`` by name, last layer first, which is the order of a backward pass.

        Frozen parameters are left out; one without a gradient has None.
        """
        trained = [(name, value.grad) for name, value in self._model.named_parameters() if value.requires_grad]
        return dict(reversed(trained))

    def _parameters(self) -> Digests:
        """Return the fingerprints of the present parameters, by name."""
        return digests(dict(self._model.named_parameters()))


def _line(step: RecordedStep) -> str:
    """Return a step as one line of JSON, newline included."""
    return json.dumps(step.model_dump()) + "\n"


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

    Recorded are, in causal order: random streams before the batch is fetched, batches, buffers, outputs of leaf
    modules, losses, each process's own gradients (before DDP averages them), buffers; then the gradients that the
    optimizer gets and the parameters that it leaves. A step ends with ``optimizer.step()``; several batches may come
    before it. Process 0 writes. This reads every byte of the training state and waits for all processes in each step,
    so it is slow.

    Args:
        model: the module that is trained; names are those of the bare module.
        optimizer: over its parameters.
        path: the record; the first step that is written replaces one of the same number, and all that follow.
        settings: what else the run depends on, as plain numbers and strings by name (seed, batch size, ...).
        first_step: number of the next step, for a run that is continued.

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
        """Open the record on all processes together, and register hooks on parameters and optimizer."""
        bare: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
        self._device = next(bare.parameters()).device
        self._job = DistributedJob.this()
        all_settings = environment(self._device) | {"processes": self._job.world_size} | dict(settings or {})
        self._recorder = TurnRecorder(bare, self._job, path, all_settings)
        self._modules = modules_of(bare, None)
        self._gradients: dict[str, Tensor] = {}
        self._epoch = 0
        self._open = False  # whether a step has begun and its update has not come yet
        self.step = first_step
        for name, parameter in bare.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(self._watch(name))
        optimizer.register_step_pre_hook(self._before_update)
        optimizer.register_step_post_hook(self._after_update)

    def _watch(self, name: str) -> Callable[[Tensor], None]:
        """Return a gradient hook that sums up the parameter ``name``'s own gradients, before DDP averages them."""

        def note(gradient: Tensor) -> None:
            """Add a gradient to the parameter's sum of this step."""
            if self._open:
                total = self._gradients.get(name)
                self._gradients[name] = gradient.detach().clone() if total is None else total.add_(gradient)

        return note

    def batches(self, loader: Iterable[T], epoch: int = 0) -> Iterator[T]:
        """Yield the batches of ``loader``; record each, and at the start of a step also random streams and buffers.

        The streams are those before the step's first batch is fetched, because fetching may draw from them. ``epoch``:
        its number, for the step's line. A step that the loader ends in the middle of goes on with the next loader.
        """
        self._epoch = epoch
        source = iter(loader)
        while True:
            begins_step = not self._open
            if begins_step:
                streams = RandomStreams.present(self._device).to_document()
                self._recorder.begin(self._job.rank, streams, named_buffers(self._modules))
                self._gradients = {}
                self._open = True
            try:
                batch = next(source)
            except StopIteration:
                self._open = not begins_step  # a step without any batch has not begun
                return
            self._recorder.batch(batch)
            yield batch

    def loss(self, value: Tensor) -> None:
        """Record the loss of the present batch."""
        self._recorder.loss(value)

    def _before_update(self, *_: object) -> None:
        """End the turn, and record the averaged gradients: the optimizer's pre-step hook. Raises InputError without a batch."""
        if not self._open:
            raise InputError("RunRecorder", "the optimizer steps without a batch", "take them from recorder.batches")
        self._recorder.end(self._gradients, named_buffers(self._modules))
        self._recorder.combined(first=self.step == 0)
        self._open = False

    def _after_update(self, *_: object) -> None:
        """Write the step's line, together with all processes, and count the step: the optimizer's post-step hook."""
        self._recorder.write(self.step, self._epoch)
        self.step += 1
