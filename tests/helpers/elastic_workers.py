"""What the processes of the elastic tests are asked to do, and the models that they train.

One crew of four ranks serves all tests; each call lets the first ``size`` of them form a process group of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import multiprocessing
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, default_collate

from ddltool.errors import InputError
from ddltool.runtime.elastic import checkpoint as elastic_checkpoint
from ddltool.runtime.elastic import contexts, ordered_mean
from ddltool.runtime.elastic.ordered_mean import OrderedMean
from ddltool.runtime.elastic.processes import Processes
from ddltool.runtime.elastic.recording import RunRecorder
from ddltool.runtime.elastic.trainer import ElasticTrainer
from ddltool.runtime.processes.digests import digest, leaves
from ddltool.runtime.processes.random_streams import seed_streams
from tests.helpers.processes import message_of
from tests.helpers.runtime_workers import Crew, digits_table
from tests.helpers.training_patterns import Pattern, classified

WORKERS = 4
BATCH = 8
SAMPLES = 320  # ten steps an epoch


class Digits(Dataset[tuple[Tensor, int]]):
    """Scikit-learn's digits, 8 x 8; shifted, mirrored and made noisy by draws from all three host generators."""

    def __init__(self, samples: int = SAMPLES) -> None:
        table = digits_table(samples)
        self.images = torch.tensor(table[:, :-1], dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self.targets = table[:, -1].astype(int).tolist()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.roll(self.images[index], random.randint(-1, 1), dims=2)
        if np.random.rand() < 0.3:  # noqa: NPY002  # the global generator is what is tested
            image = image.flip(2)
        return image + 0.05 * torch.randn_like(image), self.targets[index]


class Cnn(nn.Module):
    """Convolutions, BatchNorm, dropout; ``unused`` never has a gradient, ``rare`` only for some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Conv2d(8, 16, 3, padding=1, stride=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(256, 10)
        self.rare = nn.Linear(256, 10)
        self.unused = nn.Linear(3, 3)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.body(images)
        logits: Tensor = self.head(hidden)
        return logits + self.rare(hidden) if float(images.detach().sum()) % 1 < 0.3 else logits


class Transformer(nn.Module):
    """One encoder layer over the image's rows, with dropout and an embedding that is tied to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 16)
        self.positions = nn.Embedding(8, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, 10)
        self.register_buffer("order", torch.arange(8), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.project(images.squeeze(1)) + self.positions(self.order)  # type: ignore[operator,arg-type]
        logits: Tensor = self.head(self.layer(hidden).mean(1))
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {"cnn": Cnn, "transformer": Transformer}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adam": functools.partial(torch.optim.Adam, lr=2e-3, weight_decay=1e-4),
    "adamw": functools.partial(torch.optim.AdamW, lr=2e-3),
}


def build(model: str, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Return a model, its optimizer and a learning-rate scheduler, the same ones each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        module = MODELS[model]()
    update = OPTIMIZERS[optimizer](module.parameters())
    return module, update, torch.optim.lr_scheduler.StepLR(update, step_size=7, gamma=0.5)


@functools.cache
def elastic_crew() -> Crew:
    """Return the four ranks that all tests share."""
    crew = Crew(WORKERS)
    atexit.register(crew.close)
    return crew


def on(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return ``function(*args)`` of every process of a job of ``size``; one process alone is this one."""
    if size == 1:
        torch.set_num_threads(1)
        return [function(*args)]
    with tempfile.TemporaryDirectory() as folder:
        return elastic_crew().run(_in_group, size, f"{folder}/store", function, args)[:size]


def _in_group(rank: int, size: int, store: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it has data workers
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank >= size:
        return None
    hook = sys.excepthook
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        return function(*args)
    finally:
        sys.excepthook = hook  # every group that torch makes puts one around the last, and takes none away


def run(
    path: str,
    *,
    model: str = "cnn",
    optimizer: str = "sgd",
    until: int = 20,
    control: str = "",
    plain_loop: bool = False,
    **options: Any,
) -> list[list[float]]:
    """Train up to step ``until``, from the checkpoint at ``path`` if there is one, and write one there.

    Returns the losses of the steps made here. ``control`` takes one of the things away that make bits equal.
    """
    module, update, scheduler = build(model, optimizer)
    options = {"max_workers": WORKERS, "batch_size": BATCH, "bucket_mib": 0.01} | options
    losses: list[list[float]] = []
    with BROKEN[control]():
        trainer = ElasticTrainer(
            module, update, nn.CrossEntropyLoss(), Digits(), extras={"scheduler": scheduler}, **options
        )
        trainer.resume(path)
        for epoch in itertools.count():
            for step in by_hand(trainer, epoch) if plain_loop else trainer.epoch(epoch):
                scheduler.step()
                torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002  # between steps is nobody's turn
                losses.append(list(step.losses))
                if step.number == until:
                    trainer.save(path)
                    trainer.close()
                    return losses
    raise AssertionError("unreachable")


def fed(path: str, data_workers: int | None, until: int, size_of_batch: int = BATCH) -> list[list[float]]:
    """Train the transformer with batches from data workers, and record it."""
    return run(
        path,
        model="transformer",
        until=until,
        batch_size=size_of_batch,
        accumulation=BATCH // size_of_batch,
        data_workers=data_workers,
        record=f"{path}.jsonl",
    )


def by_hand(trainer: ElasticTrainer, epoch: int) -> Iterator[Any]:
    """Do what :meth:`ElasticTrainer.epoch` does, as a user who writes the loop would."""
    for images, targets in trainer.batches(epoch):
        loss = nn.functional.cross_entropy(trainer.model(images), targets)
        loss.backward()
        if trainer.turn_done(loss):
            trainer.optimizer.step()
            yield trainer.last_step


BROKEN: dict[str, Callable[[], Any]] = {
    "": contextlib.nullcontext,
    "shared random streams": lambda: mock.patch.object(contexts.RandomStreams, "restore"),
    "shared buffers": lambda: mock.patch.object(contexts.WorkerState, "install"),
    "torch stream not restored": lambda: mock.patch.object(torch, "set_rng_state"),
}


def bits(path: str | Path) -> dict[str, str]:
    """Return the digest of everything in a checkpoint, by name: parameters, buffers, optimizer, streams, position."""
    content = elastic_checkpoint.read(path)
    return {name: digest(leaf) if isinstance(leaf, Tensor) else repr(leaf) for name, leaf in leaves(content)}


def by_copies(copies: Sequence[Pattern], steps: int, batch_size: int) -> list[list[float]]:
    """Train a whole copy of everything for each logical worker, in turns, without any of the code that is tested.

    Returns each worker's loss in each step; the first copy holds the result, its own buffers included.
    """
    torch.use_deterministic_algorithms(True)
    states, losses, first = [], [], copies[0]
    for rank in range(len(copies)):
        seed_streams(0, rank)
        states.append((random.getstate(), np.random.get_state(), torch.get_rng_state()))  # noqa: NPY002
    per_step = len(copies) * batch_size * first.accumulation
    steps_per_epoch = len(first.dataset) // per_step
    for step in range(steps):
        epoch, place = divmod(step, steps_per_epoch)
        order = torch.randperm(len(first.dataset), generator=torch.Generator().manual_seed(epoch)).tolist()
        losses.append([])
        for rank, made in enumerate(copies):
            random.setstate(states[rank][0])
            np.random.set_state(states[rank][1])  # noqa: NPY002
            torch.set_rng_state(states[rank][2])
            made.optimizer.zero_grad()
            values = []
            for turn in range(first.accumulation):
                begin = place * per_step + (rank * first.accumulation + turn) * batch_size
                batch = default_collate([made.dataset[index] for index in order[begin : begin + batch_size]])
                loss = made.loss(made.model, batch)
                (first.scaler.scale(loss) if first.scaler is not None else loss).backward()
                values.append(loss.item())
            losses[-1].append(sum(values) / len(values))
            states[rank] = (random.getstate(), np.random.get_state(), torch.get_rng_state())  # noqa: NPY002
        for parameters in zip(*map(parameters_of, copies), strict=True):
            gradients = [value.grad for value in parameters]
            if any(gradient is not None for gradient in gradients):
                total = torch.zeros_like(parameters[0]) if gradients[0] is None else gradients[0].clone()
                for gradient in gradients[1:]:
                    total += 0.0 if gradient is None else gradient
                parameters[0].grad = total / (len(copies) * first.accumulation)
        first.update(step)
        first.after(step, epoch_ends=place == steps_per_epoch - 1)
        for made in copies[1:]:
            made.after_update(made, step)
        with torch.no_grad():
            for parameters in zip(*map(parameters_of, copies), strict=True):
                for value in parameters[1:]:
                    value.copy_(parameters[0])
    return losses


def parameters_of(made: Pattern) -> list[nn.Parameter]:
    return [value for group in made.optimizer.param_groups for value in group["params"]]


def by_four_copies(model: str, optimizer: str, steps: int) -> tuple[dict[str, Tensor], list[list[float]]]:
    """Return the final state of worker 0's copy (its buffers included) and the losses."""
    copies = []
    for _ in range(WORKERS):
        module, update, scheduler = build(model, optimizer)
        copies.append(Pattern(model=module, optimizer=update, scheduler=scheduler, loss=classified, dataset=Digits()))
    losses = by_copies(copies, steps, BATCH)
    return copies[0].model.state_dict(), losses


def in_ddp(module: nn.Module, hooked: bool) -> DistributedDataParallel:
    """Return a module in plain DDP; ``hooked``: with the ordered mean."""
    torch.use_deterministic_algorithms(True)
    model = DistributedDataParallel(module, bucket_cap_mb=0.01, broadcast_buffers=False)
    if hooked:
        model.register_comm_hook(None, ordered_mean.ordered_mean)
    return model


def by_ddp(hooked: bool, steps: int) -> dict[str, str]:
    """Train with plain DDP, one process per logical worker; return the digests of rank 0's model."""
    module, update, scheduler = build("transformer", "adamw")
    model = in_ddp(module, hooked)
    seed_streams(0, dist.get_rank())
    for batch in shard(dist.get_rank(), steps):
        update.zero_grad()
        classified(model, batch).backward()
        update.step()
        scheduler.step()
    return {name: digest(value) for name, value in module.named_parameters()}


def shard(rank: int, steps: int) -> Iterator[Any]:
    """Yield a logical worker's batches."""
    dataset = Digits()
    for step in range(steps):
        epoch, place = divmod(step, SAMPLES // (WORKERS * BATCH))
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
        begin = (place * WORKERS + rank) * BATCH
        yield default_collate([dataset[index] for index in order[begin : begin + BATCH]])


def evaluated(path: str) -> list[str]:
    """Return the digests of the logits of a trained model under ``evaluating``, and of its buffers before and after."""
    module, update, scheduler = build("cnn", "sgd")
    trainer = ElasticTrainer(module, update, None, Digits(), extras={"scheduler": scheduler})
    trainer.load(path)
    before = [digest(value) for value in module.buffers()]
    with trainer.evaluating() as model, torch.no_grad():
        seen = digest(model(Digits().images[:50]))
    assert module.training
    assert before == [digest(value) for value in module.buffers()]
    return [seen, "".join(before)]


def refusal(**options: Any) -> str:
    """Return what the trainer's construction says on this process."""
    module, update, _ = build("cnn", "sgd")
    return message_of(ElasticTrainer, module, update, None, Digits(), **options)


def stopped_at() -> list[int]:
    """Let rank 1 be asked to stop during step 3; return the step after which each process stops."""
    module, update, _ = build("transformer", "sgd")
    trainer = ElasticTrainer(module, update, nn.CrossEntropyLoss(), Digits())
    trainer.stop_on(signal.SIGTERM)
    for step in trainer.epoch(0):
        if step.stop:
            return [step.number]
        if step.number == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
    return [-1]


SHAPES = {"a": (3,), "b": (2, 5), "c": (7,), "d": (1,), "e": (4, 4)}
PARAMETERS = tuple(SHAPES)


def gradient_of(virtual_rank: int, name: str, step: int) -> Tensor | None:
    """Return a known gradient whose sum depends on the order, None for some workers and parameters."""
    if (virtual_rank + step + PARAMETERS.index(name)) % 5 == 0:
        return None
    generator = torch.Generator().manual_seed(1000 * step + 10 * virtual_rank + PARAMETERS.index(name))
    return torch.randn(SHAPES[name], generator=generator) * 10.0 ** (virtual_rank % 4)


def chained(counts: tuple[int, ...], early: bool, steps: int = 3, bucket_bytes: int = 48) -> tuple[list[str], int]:
    """Average known gradients in a chain; return the digests of all means, and in how many turns something left early."""
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
    processes = Processes.this(sum(counts), counts)
    mean = OrderedMean(parameters, processes, bucket_bytes=bucket_bytes)
    found, ahead = [], 0
    for step in range(steps):
        mean.clear()
        for rank in processes.local:
            mean.begin(rank)
            gradients = {name: gradient_of(rank, name, step) for name in PARAMETERS}
            loss = sum((parameters[n] * g).sum() for n, g in gradients.items() if g is not None)
            if early:
                mean.expect()
            loss.backward()  # type: ignore[union-attr]
            ahead += any(virtual == rank for virtual, _ in [*mean._submitted, *mean._added])
            mean.take(rank)
        notes = mean.finish(torch.tensor([[float(rank)] for rank in processes.local], dtype=torch.float64))
        assert notes[:, 0].tolist() == list(range(sum(counts)))
        found += ["none" if value.grad is None else digest(value.grad) for value in parameters.values()]
    return found, ahead


def twice() -> str:
    """Return what a second backward pass of a turn that was said to have one meets."""
    parameter = nn.Parameter(torch.ones(3))
    processes = Processes.this(2)
    mean = OrderedMean({"p": parameter}, processes)
    for _ in range(2):
        mean.clear()
        mean.begin(processes.local[0])
        mean.expect()
        parameter.sum().backward()
        try:
            if mean._bucket_index:
                parameter.sum().backward()
        except InputError as error:
            message = str(error)
        mean.take(processes.local[0])
        mean.finish(torch.zeros(1, 1, dtype=torch.float64))
    return message


def recorded_ddp(path: str, steps: int, hooked: bool = True, **options: Any) -> None:
    """Train the transformer with plain DDP in a loop of its own, and record it."""
    torch.use_deterministic_algorithms(True)
    rank = dist.get_rank() if dist.is_initialized() else 0
    module, update, _ = build("transformer", "adamw")
    model = in_ddp(module, hooked) if dist.is_initialized() else module
    recorder = RunRecorder(model, update, path, settings={"seed": 0}, **options)
    seed_streams(0, rank)
    for batch in recorder.batches(shard(rank, steps)):
        update.zero_grad()
        loss = classified(model, batch)
        recorder.loss(loss)
        loss.backward()
        update.step()
