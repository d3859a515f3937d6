"""What the tests of load balancing ask of real processes; see tests/helpers/runtime_workers.py for the crew that runs it."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset, TensorDataset

from ddltool.analyzers.job.balancing import algorithm2
from ddltool.runtime.balancing.control import BalanceOptions, Balancer, balance
from ddltool.runtime.balancing.partitioned import PartitionedData
from ddltool.runtime.hook import loss_scaling
from ddltool.runtime.processes import step_times
from tests.helpers.processes import message_of


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
            for module in (step_times, loss_scaling):
                patch.setattr(module, "time", self)
            yield


CLOCK = Clock()


class Timed(nn.Module):
    """A small network that takes some time per sample, by :data:`CLOCK`; with BatchNorm it refuses a batch of one."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        middle = nn.BatchNorm1d(8) if norm else nn.Tanh()
        self.network = nn.Sequential(nn.Linear(4, 8), middle, nn.Linear(8, 2))
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

    data._move_samples = fail  # type: ignore[method-assign]
    return message_of(lambda: [data.after_step((20, 5)) for _ in range(200)])


def dataset(samples: int) -> TensorDataset:
    """Return samples whose first feature is their number."""
    features = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
    features[:, 0] = torch.arange(samples)
    return TensorDataset(features, (features[:, 1] > 0).long())


def job(
    samples: int, *, norm: bool = False, **arguments: Any
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, Balancer]:
    """Return a balanced job over :func:`dataset`, the same model on all ranks."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Timed(norm))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, balance(model, optimizer, dataset(samples), **arguments)


def update(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, balancer: Balancer | None = None
) -> list[int]:
    """Train on a batch, in a balanced job or alone; return the numbers of its samples."""
    features, labels = batch
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(features), labels)
    (loss if balancer is None else balancer.loss(loss)).backward()
    optimizer.step()
    return features[:, 0].long().tolist()


@CLOCK.told()
def train(
    rank: int,
    cluster: str,
    per_sample_ms: tuple[float, float],
    moved_ms: tuple[float, float],
    *,
    epochs: int = 4,
    events: str | None = None,
    samples: int = 320,
    total: int = 32,
    norm: bool = False,
    least: int | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Return sizes and samples of every step of a job whose ranks' speeds change in the middle."""
    options = BalanceOptions(cluster=cluster, timeout_s=30.0, interval_s=0.0, **more)  # type: ignore[arg-type]
    model, optimizer, balancer = job(samples, norm=norm, total_batch=total, least=least, options=options, events=events)
    loader = balancer.dataloader(seed=5)
    steps, seen = [], []
    for epoch in range(epochs):
        balancer.set_epoch(epoch)
        model.module.per_sample_s = (per_sample_ms if epoch < epochs // 2 + 1 else moved_ms)[rank] / 1000
        numbers = [update(model, optimizer, batch, balancer) for batch in loader]
        steps += map(len, numbers)
        seen.append([number for step in numbers for number in step])
    balancer.close()
    return {
        "steps": steps,
        "seen": seen,
        "sizes": balancer.sizes,
        "least": balancer.least,
        "threads": running("ddltool-consensus"),
        "parameters": [value.detach().clone() for value in model.module.parameters()],
    }


def together(per_epoch: list[list[int]], total: int = 32) -> list[Tensor]:
    """Return the parameters of one process that trains on whole batches, in the order of ``per_epoch``."""
    torch.manual_seed(0)
    model = Timed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    features, labels = dataset(320).tensors
    for numbers in per_epoch:
        for places in torch.tensor(numbers).split(total):
            update(model, optimizer, (features[places], labels[places]))
    return [value.detach().clone() for value in model.parameters()]


def known_sizes(rank: int) -> tuple[list[int], list[int]]:
    """Return the samples of each step, and their numbers, of a job whose script changes the sizes itself."""
    model, optimizer, balancer = job(320, sizes=[8, 24], options=BalanceOptions(enabled=False))
    numbers = []
    for step, batch in enumerate(balancer.dataloader()):
        numbers.append(update(model, optimizer, batch, balancer))
        if step == 3:
            balancer.set_sizes([20, 12])
    return list(map(len, numbers)), [number for step in numbers for number in step]


def state_of_rank_0(balancer: Balancer) -> Any:
    """Return rank 0's state, as from a checkpoint, and end the job."""
    states = [balancer.state_dict()]
    balancer.close()
    dist.broadcast_object_list(states)
    return states[0]


@CLOCK.told()
def resumed(rank: int, cluster: str) -> tuple[list[int], list[int], bool]:
    """Return what an epoch saw before and after a checkpoint in its middle, and whether sizes came back."""
    options = BalanceOptions(cluster=cluster, timeout_s=30.0)  # type: ignore[arg-type]
    model, optimizer, balancer = job(320, total_batch=32, options=options)
    before: list[int] = []
    model.module.per_sample_s = (0.0001, 0.0004)[rank]
    for _, batch in zip(range(6), balancer.dataloader(seed=5), strict=False):
        before += update(model, optimizer, batch, balancer)
    sizes, state = balancer.sizes, state_of_rank_0(balancer)
    model, optimizer, balancer = job(320, total_batch=32, options=options)
    balancer.load_state_dict(state)
    loader = balancer.dataloader(seed=5)
    same = balancer.sizes == sizes
    after = [number for batch in loader for number in update(model, optimizer, batch, balancer)]
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
                balancer.loss(nn.functional.cross_entropy(read(model(features)), labels)).backward()
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
    state = state_of_rank_0(balancer)
    model, optimizer, balancer = made()
    balancer.load_state_dict(state)
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


def other_file() -> None:
    """Give a file of something else for the events; it stays as it is."""
    path = Path(f"/dev/shm/ddltool-{time.time_ns()}.txt")
    path.write_text("precious\n")
    try:
        job(100, total_batch=8, events=path)
    finally:
        assert path.read_text() == "precious\n"
        path.unlink()


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(5)


def loader_of_a_stream() -> None:
    model = DistributedDataParallel(nn.Linear(1, 2))
    balance(model, torch.optim.SGD(model.parameters()), Stream(), total_batch=4).dataloader()


KNOWN = BalanceOptions(enabled=False)
NORM = "(layer module.network.1 is BatchNorm over the local batch)"
REFUSALS: dict[str, tuple[Callable[[int], Any], str]] = {
    "one size too many": (lambda rank: job(100, sizes=[1, 2, 3]), "sizes: has 3 entries; give one for each of 2 ranks"),
    "no total": (lambda rank: job(100), "total_batch: is missing"),
    "other total": (lambda rank: job(100, sizes=[2, 2], total_batch=5), "sizes: add up to 4; the total batch is 5"),
    "half a sample": (lambda rank: job(100, sizes=[8.5, 8]), "sizes: 8.5 is no number of samples"),
    "limit nan": (
        lambda rank: job(100, total_batch=8, limits=[float("nan"), 8]),
        "limits: nan is no number of samples",
    ),
    "limit huge": (lambda rank: job(100, total_batch=8, limits=[10**30, 8]), f"limits: {10**30} is no"),
    "total text": (lambda rank: job(100, total_batch="8"), "total_batch: '8' is no number of samples"),
    "total nan": (lambda rank: job(100, total_batch=float("nan")), "total_batch: nan is"),
    "total fraction": (lambda rank: job(100, total_batch=8.5), "total_batch: 8.5 is"),
    "total huge": (lambda rank: job(100, total_batch=10**30), f"total_batch: {10**30} is"),
    "compress": (
        lambda rank: job(100, total_batch=8, options=BalanceOptions(compress="fp8")),  # type: ignore[arg-type]
        "compress: is 'fp8'; None or bf16",
    ),
    "tolerance nan": (
        lambda rank: job(100, total_batch=8, options=BalanceOptions(tolerance=float("nan"))),
        "tolerance: is nan; give a share from 0 to 1",
    ),
    "tolerance -1": (
        lambda rank: job(100, total_batch=8, options=BalanceOptions(tolerance=-1.0)),
        "tolerance: is -1.0",
    ),
    "timeout": (lambda rank: job(100, total_batch=8, options=BalanceOptions(timeout_s=-1)), "timeout_s: is -1"),
    "unknown predictor": (
        lambda rank: job(100, total_batch=8, options=BalanceOptions(predictor="emma")),
        "unknown predictor 'emma'",
    ),
    "different sizes": (lambda rank: job(100, sizes=[2, 2 + rank]), "batch sizes: differs between rank 0"),
    "no DDP": (
        lambda rank: balance(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters()), None, total_batch=4),  # type: ignore[arg-type]
        "model: is a Linear, not a DistributedDataParallel; give the model that",
    ),
    "data workers differ": (
        lambda rank: job(100, total_batch=8)[2].dataloader(num_workers=rank),
        "dataloader: differs between rank 0 (0 steps ahead",
    ),
    "sizes of one's own": (
        lambda rank: job(100, total_batch=8)[2].set_sizes([3, 5]),
        "sizes: are chosen by speed in this job",
    ),
    "own batch size": (
        lambda rank: job(100, total_batch=8)[2].dataloader(batch_size=4),
        "dataloader: batch_size is the balancer's to choose",
    ),
    "another file": (lambda rank: other_file(), "holds something other than balancing events"),
    "stream": (
        lambda rank: loader_of_a_stream(),
        "dataset: is a Stream, an IterableDataset; give a map-style dataset (with __len__ and __getitem__)",
    ),
    # What leaves a rank with less than the least samples.
    "total below the least": (
        lambda rank: job(100, norm=True, total_batch=3),
        f"least: 2 for each of 2 ranks {NORM} is more than the total batch of 3; "
        "give a total batch of 4 or more, or least=1",
    ),
    "total below the least asked": (
        lambda rank: job(100, total_batch=16, least=9),
        "least: 9 for each of 2 ranks is more than the total batch of 16; "
        "give a total batch of 18 or more, or a smaller least",
    ),
    "sizes below the least": (
        lambda rank: job(100, norm=True, sizes=[15, 1]),
        f"sizes: has 1 for rank 1, below the least of 2 samples {NORM}; give every rank 2 or more, or least=1",
    ),
    "sizes below the least asked": (
        lambda rank: job(100, sizes=[15, 1], least=3),
        "sizes: has 1 for rank 1, below the least of 3 samples; give every rank 3 or more, or a smaller least",
    ),
    "limits below the least": (
        lambda rank: job(100, total_batch=16, limits=[16, 4], least=5),
        "limits: has 4 for rank 1, below the least of 5 samples; give every rank 5 or more, or a smaller least",
    ),
    "least zero": (
        lambda rank: job(100, total_batch=16, least=0),
        "least: 0 is no number of samples; give whole numbers from 1 to 1000000000000",
    ),
    "least fraction": (lambda rank: job(100, total_batch=16, least=1.5), "least: 1.5 is no number of samples"),
    "least differs": (
        lambda rank: job(100, total_batch=16, least=1 + rank),
        "batch sizes: differs between rank 0 ((8, 8), at least 1) and rank 1 ((8, 8), at least 2); "
        "give every rank the same sizes and the same least",
    ),
    "dataset below the least": (
        lambda rank: job(3, norm=True, total_batch=16)[2].dataloader(),
        "dataset: has 3 samples for 2 ranks; give every rank 2 samples or more, or make least smaller",
    ),
    "set sizes below the least": (
        lambda rank: job(100, norm=True, total_batch=16, options=KNOWN)[2].set_sizes([15, 1]),
        "sizes: is [15, 1]; give every rank 2 samples or more, or make least smaller",
    ),
    "set sizes of another total": (
        lambda rank: job(100, total_batch=16, options=KNOWN)[2].set_sizes([15, 2]),
        "sizes: are 2 with sum 17; this job has 2 ranks and 16 samples",
    ),
    "one by choice": (lambda rank: job(100, norm=True, sizes=[15, 1], least=1), "accepted"),
}


def refusal(rank: int, case: str) -> str:
    """Return the message with which a job is refused."""
    return message_of(REFUSALS[case][0], rank)


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
        **{"partitions": data.partitions, "held": data.tensors[0].tolist()},
        **{"used": np.bincount(np.array(used), minlength=80).tolist(), "changed": changed, "gap": gap},
    }


def mismatched_partitions(rank: int) -> str:
    """Return the message for partitions of different types."""
    return message_of(PartitionedData, (torch.zeros(4, dtype=torch.float32 if rank else torch.float64),))


SHORT_WINDOWS = algorithm2.Algorithm2Settings(step=3, window=1, fine_window=3)
