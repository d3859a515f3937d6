"""What the tests of load balancing ask of real processes; see tests/runtime_workers.py for the crew that runs it."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_wrapper,
    fp16_compress_wrapper,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ddltool.analyzers.balancing import algorithm2
from ddltool.errors import DdlToolError, InputError
from ddltool.runtime.balancing.control import BalanceOptions, Balancer, balance, compress
from ddltool.runtime.balancing.partitioned import PartitionedData
from ddltool.runtime.hook import telemetry, weighing
from ddltool.runtime.hook.job import Job
from ddltool.runtime.hook.weighing import Weigher
from tests.runtime_workers import furthest, gradients, loss_of, make_data, make_model


class Clock:
    """Takes the place of ``time`` where a step is timed: it goes on when it is told to, whatever else the machine does."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for module in (telemetry, weighing):
                patch.setattr(module, "time", self)
            yield


CLOCK = Clock()


class Timed(nn.Module):
    """A small network that takes some time per sample, by :data:`CLOCK`."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.per_sample_s = 0.0

    def forward(self, features: Tensor) -> Tensor:
        CLOCK.now_s += self.per_sample_s * len(features)
        return self.network(features)


def running(name: str) -> list[str]:
    """Return where the threads of this name in this process stand."""
    frames = sys._current_frames()
    alive = [thread for thread in threading.enumerate() if thread.name == name and thread.ident in frames]
    return ["".join(traceback.format_stack(frames[thread.ident])) for thread in alive if thread.ident is not None]


def broken_migration(rank: int) -> str:
    """Return what a rank is told when moving samples fails."""
    data = PartitionedData((torch.arange(40),), threshold=0.2)

    def fail(migration: Any) -> None:
        migration.received.set_exception(RuntimeError("the wire is cut"))

    data._migrate = fail  # type: ignore[method-assign]
    try:
        for _ in range(200):
            data.after_step((20, 5))
    except DdlToolError as error:
        return str(error)
    return "nothing"


def dataset(samples: int) -> TensorDataset:
    """Return samples whose first feature is their number."""
    features = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
    features[:, 0] = torch.arange(samples)
    return TensorDataset(features, (features[:, 1] > 0).long())


def job(samples: int, **arguments: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer, Balancer]:
    """Return a balanced job over :func:`dataset`, the same model on all ranks."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Timed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, balance(model, optimizer, dataset(samples), **arguments)


@CLOCK.told()
def train(
    rank: int,
    cluster: str,
    per_sample_ms: tuple[float, float],
    moved_ms: tuple[float, float],
    epochs: int = 3,
    events: str | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return sizes and samples of every step of a job whose ranks' speeds change in the middle."""
    options = BalanceOptions(cluster=cluster, timeout_s=30.0, interval_s=0.0, **more)  # type: ignore[arg-type]
    model, optimizer, balancer = job(320, total_batch=32, options=options, events=events)
    loader = balancer.dataloader(seed=5)
    steps, seen = [], []
    for epoch in range(epochs):
        balancer.set_epoch(epoch)
        model.module.per_sample_s = (per_sample_ms if epoch < epochs // 2 + 1 else moved_ms)[rank] / 1000
        numbers: list[int] = []
        for features, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), labels).backward()
            optimizer.step()
            steps.append(len(labels))
            numbers += features[:, 0].long().tolist()
        seen.append(numbers)
    balancer.close()
    return {
        "steps": steps,
        "seen": seen,
        "sizes": balancer.sizes,
        "threads": running("ddltool-agreement"),
        "parameters": [value.detach().clone() for value in model.module.parameters()],
    }


def together(per_epoch: list[list[int]], total: int = 32) -> list[Tensor]:
    """Return the parameters of one process that trains on whole batches, in the order of ``per_epoch``."""
    torch.manual_seed(0)
    model = Timed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    features, labels = dataset(320).tensors
    for numbers in per_epoch:
        for begin in range(0, len(numbers), total):
            places = torch.tensor(numbers[begin : begin + total])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features[places]), labels[places]).backward()
            optimizer.step()
    return [value.detach().clone() for value in model.parameters()]


def known_sizes(rank: int) -> tuple[list[int], list[int]]:
    """Return the samples of each step, and their numbers, of a job whose script changes the sizes itself."""
    model, optimizer, balancer = job(320, sizes=[8, 24], options=BalanceOptions(enabled=False))
    steps, numbers = [], []
    for step, (features, labels) in enumerate(balancer.dataloader()):
        nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()
        steps.append(len(labels))
        numbers += features[:, 0].long().tolist()
        if step == 3:
            balancer.set_sizes([20, 12])
    return steps, numbers


@CLOCK.told()
def resumed(rank: int, cluster: str) -> tuple[list[int], list[int], bool]:
    """Return what an epoch saw before and after a checkpoint in its middle, and whether sizes came back."""
    options = BalanceOptions(cluster=cluster, timeout_s=30.0)  # type: ignore[arg-type]
    model, optimizer, balancer = job(320, total_batch=32, options=options)
    before: list[int] = []
    model.module.per_sample_s = (0.0001, 0.0004)[rank]
    for step, (features, labels) in enumerate(balancer.dataloader(seed=5)):
        nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()
        before += features[:, 0].long().tolist()
        if step == 5:
            break
    states = [balancer.state_dict() if rank == 0 else None]
    sizes = balancer.sizes
    balancer.close()
    dist.broadcast_object_list(states)
    model, optimizer, balancer = job(320, total_batch=32, options=options)
    balancer.load_state_dict(states[0])
    loader = balancer.dataloader(seed=5)
    same = balancer.sizes == sizes
    after: list[int] = []
    for features, labels in loader:
        nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()
        after += features[:, 0].long().tolist()
    balancer.close()
    return before, after, same


def accumulated(rank: int, case: dict[str, Any]) -> tuple[list[int], list[int], list[int], float]:
    """Return what an accumulating job saw before and after a checkpoint, then in a pass anew, and the largest gradient error.

    Keys of ``case``: ``passes`` per update, ``workers`` that load ahead, ``no_sync``, ``output`` (how the model answers).
    """
    workers = {"num_workers": 1, "prefetch_factor": 1} if case["workers"] else {}
    # The crew's processes are daemons, which may have no children; these loaders' are gone when their loops end.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]

    def made() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = DistributedDataParallel(Answering(case["output"]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        balancer = balance(model, optimizer, dataset(100), total_batch=8, options=BalanceOptions(enabled=False))
        return model, optimizer, balancer

    def loop(model: Any, optimizer: Any, balancer: Balancer, loader: Any, stop: int | None) -> list[int]:
        numbers: list[int] = []
        window: list[int] = []
        for step, (features, labels) in enumerate(loader, 1):
            window += features[:, 0].long().tolist()
            ends = step % case["passes"] == 0
            with contextlib.nullcontext() if ends or not case["no_sync"] else model.no_sync():
                nn.functional.cross_entropy(read(model(features)), labels).backward()
            if not ends:
                continue
            if case["no_sync"]:
                errors.append(against_all(model, window, case["passes"]))
            optimizer.step()
            optimizer.zero_grad()
            numbers += window
            window = []
            balancer.set_sizes([(1, 7), (6, 2), (4, 4)][step // case["passes"] % 3])
            if step == stop:
                break
        return numbers

    errors: list[float] = []
    model, optimizer, balancer = made()
    loader = balancer.dataloader(seed=5, **workers)
    before = loop(model, optimizer, balancer, loader, 2 * case["passes"])
    states = [balancer.state_dict() if rank == 0 else None]
    balancer.close()
    dist.broadcast_object_list(states)
    model, optimizer, balancer = made()
    balancer.load_state_dict(states[0])
    loader = balancer.dataloader(seed=5, **workers)
    after = loop(model, optimizer, balancer, loader, None)
    anew = [number for features, _ in loader for number in features[:, 0].long().tolist()]
    balancer.close()
    return before, after, anew, max(errors, default=0.0)


class Answering(nn.Module):
    """A linear model that answers with a tensor, or with one inside something."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.kind = kind

    def forward(self, features: Tensor) -> Any:
        answer = self.layer(features / 50)
        kinds = {"dict": {"name": "x", "logits": answer}, "tuple": (None, [answer]), "record": Logits(answer)}
        return kinds.get(self.kind, answer)


@dataclass
class Logits:
    """A model's answer of its own type."""

    logits: Tensor


def read(answer: Any) -> Tensor:
    """Return the tensor in what :class:`Answering` answered."""
    if isinstance(answer, dict):
        return answer["logits"]
    if isinstance(answer, tuple):
        return answer[1][0]
    return answer.logits if isinstance(answer, Logits) else answer


def against_all(model: DistributedDataParallel, window: list[int], passes: int) -> float:
    """Return the relative error of the gradient against ``passes`` times the mean over all ranks' samples."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, window)
    places = torch.tensor([number for numbers in gathered for number in numbers])
    features, labels = dataset(100).tensors
    reference = Answering("")
    reference.load_state_dict(model.module.state_dict())
    (passes * nn.functional.cross_entropy(reference(features[places]), labels[places])).backward()
    pairs = zip(model.module.parameters(), reference.parameters(), strict=True)
    return max(float((one.grad - two.grad).abs().max() / two.grad.abs().max()) for one, two in pairs)


def refusal(rank: int, case: str) -> str:
    """Return the message with which a job is refused."""
    try:
        if case == "one size too many":
            job(100, sizes=[1, 2, 3])
        elif case == "no total":
            job(100)
        elif case == "other total":
            job(100, sizes=[2, 2], total_batch=5)
        elif case in ARGUMENTS:
            job(100, **{"total_batch": 8, **ARGUMENTS[case]})
        elif case == "unknown predictor":
            job(100, total_batch=8, options=BalanceOptions(predictor="emma"))
        elif case == "different sizes":
            job(100, sizes=[2, 2 + rank])
        elif case == "no DDP":
            balance(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters()), None, total_batch=4)  # type: ignore[arg-type]
        elif case == "file of another kind":
            path = Path(f"/dev/shm/ddltool-{time.time_ns()}.txt")
            path.write_text("precious\n")
            try:
                job(100, total_batch=8, events=path)
            finally:
                assert path.read_text() == "precious\n"
                path.unlink()
        elif case == "data workers differ":
            job(100, total_batch=8)[2].dataloader(num_workers=rank)
        elif case == "sizes of one's own":
            job(100, total_batch=8)[2].set_sizes([3, 5])
        elif case == "own batch size":
            job(100, total_batch=8)[2].dataloader(batch_size=4)
    except (InputError, DdlToolError) as error:
        return str(error)
    return "accepted"


def chained_gradients(rank: int, case: dict[str, Any]) -> float:
    """Return the largest gradient error of unequal batches in some combination of DDP's features.

    Keys of ``case``: ``passes`` (micro-batches per rank), ``compress`` (None, "ours", or the wrapper around it), ``unused``.
    """
    torch.manual_seed(0)
    reference, model = make_model(), make_model()
    reference.load_state_dict(model.state_dict())
    wrapped = DistributedDataParallel(model, find_unused_parameters=True, **case.get("ddp", {}))
    weigher = Weigher(Job.this(), "test", lambda: (3, 13))
    weigher.open(wrapped)
    if case["compress"] == "ours":
        compress(wrapped)
    elif (around := {"bf16": bf16_compress_wrapper, "fp16": fp16_compress_wrapper}.get(case["compress"])) is not None:
        hook = around(allreduce_hook)
        hook.__name__ = "chained"  # by its name, DDP refuses torch's bf16 hook without NCCL, which the tests do without
        wrapped.register_comm_hook(None, hook)
    sizes, passes = (3, 13), case["passes"]
    features, labels = make_data(sum(sizes) * passes)
    errors = []
    for _ in range(3):
        wrapped.zero_grad()
        reference.zero_grad()
        total = sum(sizes) * passes
        for number in range(passes):
            begin = number * sum(sizes) + sum(sizes[:rank])
            mine = slice(begin, begin + sizes[rank])
            if number < passes - 1:
                with wrapped.no_sync():
                    (loss_of(wrapped, features[mine], labels[mine]) / passes).backward()
            else:
                (loss_of(wrapped, features[mine], labels[mine]) / passes).backward()
        loss_of(reference, features[:total], labels[:total]).backward()
        errors.append(furthest(gradients(model), gradients(reference)))
    weigher.close()
    return max(errors)


def migrate(rank: int, sizes: tuple[int, int], steps: int, threshold: float) -> dict[str, Any]:
    """Return partitions, what each held before and after, and how often each sample was used since the change."""
    numbers = torch.arange(40) + 40 * rank
    data = PartitionedData((numbers, numbers.float()[:, None].repeat(1, 3)), threshold=threshold, seed=2)
    used: list[int] = []
    changed, gap, beside = [], 0.0, 0
    for step in range(steps):
        first, second = data.next_batch(sizes[rank])
        assert torch.equal(second[:, 0].long(), first)
        used += first.tolist()
        if data.after_step(sizes):
            changed.append(step)
            used.clear()
        if data.moving:  # three steps beside what moves, then one that lasts until all has come
            beside += 1
            if beside > 3:
                data._migration.received.exception(60.0)  # type: ignore[union-attr]
        else:
            gap = max(gap, max(data.counts) - min(data.counts))
    return {
        "partitions": data.partitions,
        "held": data.tensors[0].tolist(),
        "used": np.bincount(np.array(used), minlength=80).tolist(),
        "changed": changed,
        "gap": gap,
    }


def mismatched_partitions(rank: int) -> str:
    """Return the message for partitions of different types."""
    try:
        PartitionedData((torch.zeros(4, dtype=torch.float32 if rank else torch.float64),))
    except InputError as error:
        return str(error)
    return "accepted"


ARGUMENTS: dict[str, dict[str, Any]] = {
    "half a sample": {"sizes": [8.5, 8], "total_batch": None},
    "limit nan": {"limits": [float("nan"), 8]},
    "limit huge": {"limits": [10**30, 8]},
    "total text": {"total_batch": "8"},
    "total nan": {"total_batch": float("nan")},
    "total fraction": {"total_batch": 8.5},
    "total huge": {"total_batch": 10**30},
    "compress": {"options": BalanceOptions(compress="fp8")},  # type: ignore[arg-type]
    "tolerance nan": {"options": BalanceOptions(tolerance=float("nan"))},
    "tolerance -1": {"options": BalanceOptions(tolerance=-1.0)},
    "timeout": {"options": BalanceOptions(timeout_s=-1)},
}
SHORT_WINDOWS = algorithm2.Settings(step=3, window=1, fine_window=3)
