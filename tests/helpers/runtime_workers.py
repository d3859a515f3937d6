"""Real processes for the tests of the runtime: a crew of two ranks over gloo, and what they are asked to do.

The crew is started once per test session, for starting a process that imports torch takes seconds. A test hands each
rank a function of this module (so that it can be found in the other process) and gets one answer per rank.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib.util
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_wrapper,
    fp16_compress_wrapper,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from ddltool import runtime
from ddltool.plans import Enforcement, ParameterRecord, RankEnforcement
from ddltool.runtime.balancing.control import compress
from ddltool.runtime.hook import loss_scaling
from tests.helpers.processes import LASTING, forking, message_of

PATIENCE_S = 120.0
# On a busy machine gloo's ranks now and then close a connection that another one is just making.
_STARTS = 3
_DIES_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


class Crew:
    """``size`` processes of one gloo process group that run functions on demand, after ``first()`` once for all of them."""

    def __init__(self, size: int, first: Callable[[], object] = dict) -> None:
        context = forking()
        for _ in range(_STARTS):
            self._folder = tempfile.TemporaryDirectory()
            self._pipes, theirs = zip(*(context.Pipe() for _ in range(size)), strict=True)
            store = f"file://{self._folder.name}/store"
            self._process = context.Process(target=_serve_all, args=(theirs, store, first), daemon=True)
            self._process.start()
            LASTING.add(self._process.pid or 0)
            for pipe in theirs:
                pipe.close()
            if all(map(_answers, self._pipes)):
                return
            self.close()
        raise AssertionError(f"{size} ranks did not find each other in {_STARTS} attempts")

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return ``function(rank, *args)`` of every rank; raise AssertionError with the traceback of one that fails."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(PATIENCE_S):
                self.close()
                crew.cache_clear()
                raise AssertionError(f"rank {rank} did not answer {function.__name__} within {PATIENCE_S} s")
            answers.append(pipe.recv())
        for rank, (failure, _) in enumerate(answers):
            assert failure is None, f"rank {rank}: {failure}"
        return [answer for _, answer in answers]

    def close(self) -> None:
        self._process.kill()  # which ends the others
        self._process.join()
        self._folder.cleanup()


@functools.cache
def crew() -> Crew:
    """Return the two ranks that all tests share."""
    pair = Crew(2)
    atexit.register(pair.close)
    return pair


def _answers(pipe: Connection) -> bool:
    """Return whether a rank says that it is in its group."""
    try:
        return pipe.poll(PATIENCE_S) and pipe.recv() == "here"
    except (EOFError, ConnectionError):
        return False


def _serve_all(pipes: Sequence[Connection], store: str, first: Callable[[], object]) -> None:
    first()
    for rank in range(1, len(pipes)):
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
            _serve(pipes, store, rank)
    _serve(pipes, store, 0)


def _serve(pipes: Sequence[Connection], store: str, rank: int) -> None:
    pipe, size = pipes[rank], len(pipes)
    for other in {*pipes} - {pipe}:
        other.close()
    # Of data workers, as in a script, not as this rank was started.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    pipe.send("here")
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((None, function(rank, *args)))
        except Exception:
            pipe.send((traceback.format_exc(), None))


def enforcement(sizes: Iterable[int], *, telemetry: str | None = None, **changes: Any) -> Enforcement:
    """Return a config with these local batches."""
    ranks = [
        RankEnforcement(rank=rank, device_type=f"type{rank}", ests=1, local_batch_size=size)
        for rank, size in enumerate(sizes)
    ]
    fields: dict[str, Any] = {
        "job": "test",
        "strategy": "bsp",
        "world_size": len(ranks),
        "total_batch_size": sum(entry.local_batch_size for entry in ranks),
        "ranks": ranks,
        "telemetry": telemetry,
    }
    return Enforcement(**(fields | changes))


def parameter_records(model: nn.Module) -> list[ParameterRecord]:
    """Return the records that a plan made from ``model`` holds."""
    return [
        ParameterRecord(name=name, size_bytes=parameter.numel() * parameter.element_size())
        for name, parameter in model.named_parameters()
    ]


class Branches(nn.Module):
    """A small classifier; ``use`` picks one of two output layers, so that the other has no gradient.

    ``features`` may come as a tensor, in a mapping, as a function that returns it, or (``turned``) with the samples in
    columns.
    """

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(width, 4), nn.Linear(width, 4)])

    def forward(self, features: Any, use: int = 0, turned: bool = False) -> Tensor:
        if isinstance(features, dict):
            features = features["features"][0]
        elif callable(features):
            features = features()
        hidden: Tensor = self.body(features.T if turned else features)
        logits: Tensor = self.heads[use](hidden)
        return logits


def make_model(dtype: torch.dtype = torch.float32) -> Branches:
    torch.manual_seed(7)
    return Branches().to(dtype)


def make_data(samples: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return features and labels whose gradients differ from sample to sample."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    scale = torch.linspace(0.2, 3.0, samples, dtype=torch.float64).unsqueeze(1)
    return (features * scale).to(dtype), torch.arange(samples) % 4


def gradients(model: nn.Module) -> list[Tensor]:
    """Return copies of all gradients in float64, zeros where there is none."""
    return [
        (torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).double().clone()
        for parameter in model.parameters()
    ]


def furthest(one: list[Tensor], other: list[Tensor]) -> float:
    """Return the largest difference between two lists of gradients."""
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def loss_of(model: nn.Module, features: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return nn.functional.cross_entropy(model(features, **options), labels)


def attached(model: DistributedDataParallel, config: str | None, dataset: Dataset[Any] | None = None) -> runtime.Hook:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return runtime.attach(config, model=model, optimizer=optimizer, dataset=dataset)


def gradient_errors(
    rank: int,
    config: str | None,
    steps: list[list[tuple[int, int]]],
    dtype: torch.dtype = torch.float32,
    ddp: dict[str, Any] | None = None,
    scale: float = 1.0,
    heads: tuple[int, ...] = (0,),
    compressed: str | None = None,
) -> tuple[list[float], int]:
    """Return each step's largest gradient error against one process that sees all samples, and the bucket count.

    A step is a list of micro-batches, a micro-batch the samples of each rank. All but the last run under ``no_sync``.
    The output layer in use goes round ``heads``. ``ddp`` are options of DistributedDataParallel. ``compressed``: "ours", or
    to which type torch's own wrapper of communication hooks casts.
    """
    model = DistributedDataParallel(make_model(dtype), **({"find_unused_parameters": True} | (ddp or {})))
    reference = make_model(dtype)
    hook = attached(model, config)
    if compressed is not None:
        compress_gradients(model, compressed)
    errors = []
    for place, step in enumerate(steps):
        use = heads[place % len(heads)]
        features, labels = make_data(sum(map(sum, step)), dtype)
        model.zero_grad()
        begin = 0
        for number, sizes in enumerate(step):
            at = begin + sum(sizes[:rank])
            mine = slice(at, at + sizes[rank])
            begin += sum(sizes)
            with contextlib.nullcontext() if number == len(step) - 1 else model.no_sync():
                hook.count_samples(sizes[rank])
                (scale * hook.loss(loss_of(model, features[mine], labels[mine], use=use)) / len(step)).backward()
        reference.zero_grad()
        (scale * loss_of(reference, features, labels, use=use)).backward()
        errors.append(furthest(gradients(model), gradients(reference)))
    buckets = str(model._get_ddp_logging_data()["bucket_sizes"]).split(",")  # type: ignore[operator]
    return errors, len(buckets)


def compress_gradients(model: DistributedDataParallel, way: str) -> None:
    if way == "ours":
        compress(model)
        return
    around = {"bf16": bf16_compress_wrapper, "fp16": fp16_compress_wrapper}[way](allreduce_hook)
    around.__name__ = "chained"  # by its name, DDP refuses torch's bf16 hook without NCCL, which the tests do without
    model.register_comm_hook(None, around)


def error_when_fed(rank: int, config: str, way: str) -> float:
    """Return the gradient error of one step with 3 and 13 samples, the features handed over in some ``way``."""
    model = DistributedDataParallel(make_model(), find_unused_parameters=True)
    reference = make_model()
    hook = attached(model, config)
    features, labels = make_data(16)
    mine = slice(0, 3) if rank == 0 else slice(3, 16)
    if way == "evaluated between":
        with torch.no_grad():
            model(features)
        model.eval()
        model(features[: 1 + rank])
        model.train()
    if way in ("announced", "announced columns"):
        hook.count_samples(len(labels[mine]))
    given: dict[str, Any] = {
        "keyword": {"features": features[mine]},
        "mapping": {"features": {"features": [features[mine]]}},
        "announced": {"features": lambda: features[mine]},
        "announced columns": {"features": features[mine].T, "turned": True},
        "columns": {"features": features[mine].T, "turned": True},
    }.get(way, {"features": features[mine]})
    hook.loss(nn.functional.cross_entropy(model(**given), labels[mine])).backward()
    loss_of(reference, features, labels).backward()
    return furthest(gradients(model), gradients(reference))


def error_with_an_idle_rank(rank: int, config: str) -> float:
    """Return the gradient error when rank 0 has no sample, only padding."""
    model = DistributedDataParallel(make_model(), find_unused_parameters=True)
    reference = make_model()
    hook = attached(model, config)
    features, labels = make_data(13)
    loss_of(reference, features, labels).backward()
    hook.count_samples(0 if rank == 0 else 13)
    hook.loss(loss_of(model, features, labels)).backward()
    return furthest(gradients(model), gradients(reference))


def failure_of_step(rank: int, config: str, way: str) -> str:
    """Return what a training step that cannot be counted raises."""
    model = DistributedDataParallel(make_model(), find_unused_parameters=True)
    hook = attached(model, config)
    features, labels = make_data(3 if rank == 0 else 13)
    if way == "negative":
        return message_of(hook.count_samples, -1)
    if way == "columns":
        return message_of(lambda: hook.loss(loss_of(model, features.T, labels, turned=True)).backward())
    fed = (lambda: features) if way == "no tensor" else features
    return message_of(lambda: hook.loss(loss_of(model, fed, labels)).backward())


def trained_and_observed(rank: int, telemetry: str | None) -> list[Tensor]:
    """Return the parameters after six steps of 8 samples of which every second is an accumulating one."""
    model = DistributedDataParallel(make_model(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    dataset = TensorDataset(*make_data(96))
    hook = runtime.attach(None, model=model, optimizer=optimizer, dataset=dataset, telemetry=telemetry)
    for number, (features, labels) in enumerate(hook.dataloader(batch_size=8)):
        with model.no_sync() if number % 2 == 0 else contextlib.nullcontext():
            hook.loss(loss_of(model, features, labels)).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    hook.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


def digits_table(rows: int | None = None) -> np.ndarray:
    """Return scikit-learn's digits, 64 pixels and the digit in each row.

    As load_digits does, without importing scikit-learn, which takes seconds in each process.
    """
    folder = next(iter(importlib.util.find_spec("sklearn").submodule_search_locations))  # type: ignore[union-attr,arg-type]
    return np.loadtxt(Path(folder) / "datasets/data/digits.csv.gz", delimiter=",", max_rows=rows)


class Unsized(Dataset[int]):
    """A dataset that has items and no length."""

    def __getitem__(self, index: int) -> int:
        return index


def refusal(rank: int, config: str, case: str) -> str:
    """Return what ``attach`` says on this rank, in a working folder of its own where there is one."""
    dataset: Dataset[Any] | None = TensorDataset(torch.zeros(40))
    model: nn.Module = DistributedDataParallel(make_model())
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    match case:
        case "bare":
            model = make_model()
        case "compiled around":
            model = torch.compile(model)  # type: ignore[assignment]
        case "hooked" if isinstance(model, DistributedDataParallel):
            model.register_comm_hook(None, lambda state, bucket: torch.futures.Future())
        case "part of the ranks":
            groups = [dist.new_group([0]), dist.new_group([1])]
            model = DistributedDataParallel(make_model(), process_group=groups[rank])
        case "twice":
            runtime.attach(config, model=model, optimizer=optimizer, dataset=dataset)
        case "unsized":
            dataset = Unsized()
        case "small":
            dataset = TensorDataset(torch.zeros(15))
        case "different data":
            dataset = TensorDataset(torch.zeros(40 + rank))
        case "no optimizer":
            optimizer = [optimizer]
        case "missing on rank 1":
            config = config if rank == 0 else f"{config}.absent"
        case "different configs":
            config = config if rank == 0 else f"{config}.other"
    folder = Path(config).parent / f"rank{rank}"
    with contextlib.chdir(folder if folder.is_dir() else "."):
        return message_of(runtime.attach, config, model=model, optimizer=optimizer, dataset=dataset)


def registered(*things: Any) -> int:
    """Return the number of hooks that are registered on modules and optimizers, by their own books."""
    books = [book for thing in things for name, book in vars(thing).items() if name.endswith("_hooks")]
    return sum(len(book) for book in books)


def traces_of_attach(rank: int, config: str | None) -> dict[str, Any]:
    """Return what ``attach`` registers, and an epoch's batches of its loader and of DDP's usual one."""
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = registered(model, model.module, optimizer)
    dataset = TensorDataset(torch.arange(21))
    hook = runtime.attach(config, model=model, optimizer=optimizer, dataset=dataset)
    usual_sampler: DistributedSampler[Any] = DistributedSampler(dataset, seed=3)
    usual = DataLoader(dataset, batch_size=4, sampler=usual_sampler)
    loader = hook.dataloader(batch_size=4, seed=3)
    own = DataLoader(dataset, batch_sampler=hook.batch_sampler(batch_size=4, seed=3))
    hook.set_epoch(2)
    usual_sampler.set_epoch(2)
    hook.count_samples(5)
    hook.close()
    return {
        "registered": registered(model, model.module, optimizer) - before,
        "types": (type(hook).__name__, type(loader).__name__, type(loader.sampler).__name__),
        "local_batch_size": hook.local_batch_size,
        "batches": [[batch[0].tolist() for batch in each] for each in (loader, own, usual)],
    }


class Sleepy(nn.Module):
    """A model that takes its time in the forward pass."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.inner = make_model()

    def forward(self, features: Tensor) -> Tensor:
        time.sleep(self.seconds)
        logits: Tensor = self.inner(features)
        return logits


def observed_training(rank: int, config: str, folder: str, options: dict[str, Any]) -> None:
    """Train in ``folder`` with the hook's loader over 3 + 13 samples a step, sleeping in each forward pass.

    Options: ``steps``, ``sleep_s`` (of each rank), ``bucket_cap_mb``, ``micro_batches``; ``nested``: DDP has all gradients
    within a backward pass of checkpointing, and averages there.
    """
    steps, micro_batches = options.get("steps", 6), options.get("micro_batches", 1)
    with contextlib.chdir(folder):
        module = Sleepy(options.get("sleep_s", (0.0, 0.0))[rank])
        cap = options.get("bucket_cap_mb", 25.0)
        if nested := options.get("nested", False):
            loss_scaling._SENTINELS = 2  # fewer than its parameters
            del module.inner.heads[1]
            whole = module.forward
            module.forward = lambda values: checkpoint(whole, values.requires_grad_(), use_reentrant=True)  # type: ignore[method-assign]
        model = DistributedDataParallel(module, bucket_cap_mb=cap, find_unused_parameters=not nested)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        dataset = TensorDataset(*make_data(16 * steps * micro_batches))
        with runtime.attach(config, model=model, optimizer=optimizer, dataset=dataset) as hook:
            for number, (inputs, answers) in enumerate(hook.dataloader(batch_size=8)):
                updates = number % micro_batches == micro_batches - 1
                with contextlib.nullcontext() if updates else model.no_sync():
                    hook.loss(loss_of(model, inputs, answers)).backward()
                if updates:
                    optimizer.step()
                    optimizer.zero_grad()


def train_alone(rank: int, config: str, steps: int, end: str) -> None:
    """Train one process that has no process group, then end it: by signal, by returning, or closing first."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = runtime.attach(config, model=model, optimizer=optimizer, dataset=TensorDataset(*make_data(16 * steps)))
    for inputs, answers in hook.dataloader(batch_size=1):
        hook.loss(loss_of(model, inputs, answers)).backward()
        optimizer.step()
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
