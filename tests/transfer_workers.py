"""Process bodies for the tests of ordered transfers: workers and servers of one plan, each in a process of its own."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddltool.runtime.servers.parameter_server import MomentumSGD, ParameterServer
from ddltool.runtime.servers.transfers import TransferPlan
from ddltool.runtime.servers.worker import PushOrder, Worker

PATIENCE_S = 40.0


@dataclass(frozen=True)
class Outcome:
    """How one process ended: what its body returned or raised, its exit code, and the seconds it took."""

    result: Any
    error: str
    exit_code: int | None
    seconds: float


def launch(body: Callable[..., Any], size: int, *args: Any) -> list[Outcome]:
    """Run ``body(rank, *args)`` in ``size`` processes of one gloo job; raise AssertionError if one does not end.

    They meet in a store that rank 0 keeps, as under torchrun's static rendezvous.
    """
    context = multiprocessing.get_context("forkserver")  # imports torch once for all processes
    context.set_forkserver_preload(["tests.transfer_workers"])
    with tempfile.TemporaryDirectory() as folder:
        port = Path(folder, "port")
        crew = []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            target = (theirs, port, rank, size, body, args)
            process = context.Process(target=_enter, args=target, daemon=True)
            process.start()
            theirs.close()
            crew.append((process, ours))
        try:
            outcomes = []
            end = time.monotonic() + PATIENCE_S
            for rank, (process, pipe) in enumerate(crew):
                answer = None
                if not pipe.poll(max(end - time.monotonic(), 0.0)):
                    raise AssertionError(f"rank {rank} did not answer\n{_stacks(crew, port)}")
                try:
                    answer = pipe.recv()
                except EOFError:
                    answer = (None, "no answer", 0.0)
                process.join(max(end - time.monotonic(), 0.0))
                assert process.exitcode is not None, f"rank {rank} did not end\n{_stacks(crew, port)}"
                outcomes.append(Outcome(answer[0], answer[1], process.exitcode, answer[2]))
            return outcomes
        finally:
            for process, _ in crew:
                process.kill()
                process.join()


def _stacks(crew: list[tuple[BaseProcess, Connection]], port: Path) -> str:
    """Return where every thread of the processes that are still there stands."""
    for process, _ in crew:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(1.0)
    return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(port.parent.glob("stacks.*")))


def meet(port: Path, rank: int, size: int) -> None:
    """Join the job whose rank 0 leaves its store's port in a file."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def _enter(pipe: Connection, port: Path, rank: int, size: int, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    stacks = port.with_name(f"stacks.{rank}").open("w", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, stacks)
    meet(port, rank, size)
    dist.barrier()
    start = time.monotonic()
    try:
        answer = (body(rank, *args), "", 0.0)
    except Exception as error:
        answer = (None, f"{type(error).__name__}: {error}", time.monotonic() - start)
    pipe.send(answer)


class Branches(nn.Module):
    """A small classifier with two heads; ``use`` None uses both."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 4)])

    def forward(self, features: Tensor, use: int = 0) -> Tensor:
        logits: Tensor = self.heads[use](self.body(features))
        return logits


def make_model() -> Branches:
    torch.manual_seed(7)
    return Branches()


def make_batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return torch.randn(8, 6, generator=generator), torch.randint(4, (8,), generator=generator)


def make_plan(workers: int, servers: int, order: str) -> TransferPlan:
    model = make_model()
    names = [name for name, _ in model.named_parameters()]
    priority = {"reversed": TransferPlan.priority_of(names[::-1]), "given": TransferPlan.priority_of(sorted(names))}
    seed = 11 if order == "random" else None
    return TransferPlan.for_model(
        model, workers=workers, servers=servers, priority=priority.get(order), random_seed=seed
    )


SGD = {"lr": 0.1, "momentum": 0.9}


def train(rank: int, workers: int, servers: int, order: str, steps: int, push: str = "ready") -> Any:
    """Train over ordered transfers; return weights, arrival orders per pull, and on servers what was sent."""
    model, plan = make_model(), make_plan(workers, servers, order)
    if rank >= workers:
        server = ParameterServer(model, plan, MomentumSGD(**SGD), timeout_s=10)
        server.serve()
        return server.sent
    arrivals = []
    with torch.no_grad():  # the servers' values must be what counts
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    with Worker(model, plan, timeout_s=10, push=push) as worker:
        for step in range(steps):
            features, labels = make_batch(rank, step)
            with worker.step():
                nn.functional.cross_entropy(model(features, use=step % 2), labels).backward()
            arrivals.append(worker.arrivals)
        worker.pull()
        arrivals.append(worker.arrivals)
    return {name: value.detach().numpy() for name, value in model.named_parameters()}, arrivals


def change(model: nn.Module, how: str) -> None:
    """Do to the gradients what a training loop does between the backward pass and the end of the step."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    if how == "clip":
        nn.utils.clip_grad_norm_(parameters, 0.05)
    if how == "scale one":
        parameters[0].grad.mul_(0.5)  # type: ignore[union-attr]
    if how == "another":
        parameters[-1].grad = 0.5 * parameters[-1].grad  # type: ignore[operator]
    if how == "forget":
        model.zero_grad()


def train_changing(rank: int, how: str, push: PushOrder, steps: int) -> Any:
    """One worker, one server; the gradients are changed after the backward pass, or come from ``how`` = two of them."""
    model, plan = make_model(), make_plan(1, 1, "none")
    if rank == 1:
        ParameterServer(model, plan, MomentumSGD(**SGD), timeout_s=10).serve()
        return None
    with Worker(model, plan, timeout_s=10, push=push) as worker:
        for step in range(steps):
            with worker.step():
                for part in range(2 if how == "two" else 1):
                    features, labels = make_batch(part, step)
                    nn.functional.cross_entropy(model(features), labels).backward()
                change(model, how)
        worker.pull()
    return {name: value.detach().numpy() for name, value in model.named_parameters()}


def train_with_trouble(rank: int, workers: int, servers: int, trouble: str, culprit: int, timeout_s: float) -> None:
    """Train until ``culprit`` makes ``trouble`` in step 2; every other rank is to end by an error of its own."""
    model, plan = make_model(), make_plan(workers, servers, "none")
    if rank >= workers:
        server = ParameterServer(
            model, plan, Trouble(trouble if rank == culprit else "", after=24), timeout_s=timeout_s
        )
        server.serve()
        return
    with Worker(model, plan, timeout_s=timeout_s) as worker:
        for step in range(5):
            features, labels = make_batch(rank, step)
            with worker.step():
                loss = nn.functional.cross_entropy(model(features), labels)
                if rank == culprit and step == 2:
                    make_trouble(trouble, timeout_s)
                loss.backward()
            if rank == culprit and step == 2 and trouble == "leave":
                break


def make_trouble(trouble: str, timeout_s: float) -> None:
    if trouble == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if trouble == "stall":
        time.sleep(2 * timeout_s + 1)
    if trouble == "raise":
        raise ValueError("a bad batch")


class Trouble(MomentumSGD):
    """An optimizer that makes trouble after so many updates."""

    def __init__(self, trouble: str, after: int) -> None:
        super().__init__(**SGD)
        self.trouble, self.left = trouble, after

    def __call__(self, name: str, value: Tensor, gradient: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            make_trouble(self.trouble, 0.0)
        return super().__call__(name, value, gradient)


def stall_in_the_middle(rank: int, workers: int, timeout_s: float) -> None:
    """One server, two workers; worker 1 pushes every gradient of step 0 but its first layer's, then sleeps."""
    model, plan = make_model(), make_plan(workers, 1, "none")
    if rank >= workers:
        ParameterServer(model, plan, MomentumSGD(**SGD), timeout_s=timeout_s).serve()
        return
    with Worker(model, plan, timeout_s=timeout_s) as worker:
        if rank == 1:
            model.body[0].weight.register_hook(lambda gradient: time.sleep(2 * timeout_s))
        for step in range(2):
            features, labels = make_batch(rank, step)
            with worker.step():
                nn.functional.cross_entropy(model(features), labels).backward()


def connect(rank: int, case: str) -> None:
    """Two workers, one server, with one rank at odds with the others, as ``case`` says."""
    model, plan = make_model(), make_plan(2, 1, "none")
    if case == "order on rank 1" and rank == 1:
        plan = make_plan(2, 1, "reversed")
    if case == "order on ranks 1 and 2" and rank > 0:
        plan = make_plan(2, 1, "reversed")
    if case == "shape on rank 2" and rank == 2:
        model.heads[1] = nn.Linear(16, 5)
    if case == "more servers":
        plan = make_plan(2, 2, "none")
    if rank == 2:
        ParameterServer(model, plan, MomentumSGD(**SGD)).serve()
        return
    with Worker(model, plan, push="late" if case == "push on rank 0" and rank == 0 else "ready"):  # type: ignore[arg-type]
        pass


class Attention(nn.Module):
    """Uses a child's weights without calling the child: as torch.nn does itself, and as nothing can wait for."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.last = nn.Linear(8, 8)
        self.own = own

    def forward(self, features: Tensor) -> Tensor:
        hidden: Tensor = self.attention(features, features, features)[0]
        return nn.functional.linear(hidden, self.last.weight) if self.own else self.last(hidden)


def use_unseen(rank: int, own: bool) -> Any:
    """One step of a module whose weights are used by others than their owner; returns the output's sum."""
    torch.manual_seed(1)
    model = Attention(own)
    plan = TransferPlan.for_model(model, workers=1, servers=1)
    features = torch.randn(2, 3, 8)
    expected = model(features).sum().item()
    if rank == 1:
        ParameterServer(model, plan, MomentumSGD(lr=0.1)).serve()
        return None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    with Worker(model, plan) as worker, worker.step():
        output = model(features).sum()
        output.backward()
    return output.item(), expected


def serve_slowly(rank: int, order: str, pause_s: float) -> Any:
    """One worker watches its own memory while the server pauses between transfers: what has changed from look to look."""
    model, plan = make_model(), make_plan(1, 1, order)
    names = [slot.name for slot in plan.slots]
    if rank == 1:
        server = Pausing(model, plan, MomentumSGD(**SGD))
        server.pause_s = pause_s
        server.serve()
        return [names[index] for index in plan.queue(0, 0, 0)]
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    left, seen = set(names), []
    with Worker(model, plan) as worker, worker.step(push=False):
        while left:
            if new := {name for name in left if not torch.isnan(parameters[name]).any()}:
                seen.append(new)
                left -= new
    return seen, [arrival.name for arrival in worker.arrivals]


class Pausing(ParameterServer):
    """A server that takes a rest before each transfer."""

    pause_s = 0.0

    def may_send(self, worker: int, clock: int, name: str) -> bool:
        time.sleep(self.pause_s)
        return super().may_send(worker, clock, name)


class Asynchronous(ParameterServer):
    """Every gradient is applied as it comes; a worker waits for its own and for nobody else's."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.own: Counter[tuple[int, str]] = Counter()

    def may_send(self, worker: int, clock: int, name: str) -> bool:
        return self.own[worker, name] >= clock

    def blockers(self, worker: int, clock: int, name: str) -> list[int]:
        return []

    def accept(self, worker: int, clock: int, name: str, gradient: Tensor) -> None:
        with self.changed:
            self.own[worker, name] += 1
            self.publish(name, self._update(name, self.values[name], gradient))


def train_asynchronously(rank: int, steps: int) -> Any:
    """Worker 0 takes its steps, then worker 1 takes one; return the versions each saw, of the last parameter to come."""
    model, plan = make_model(), make_plan(2, 1, "none")
    if rank == 2:
        server = Asynchronous(model, plan, MomentumSGD(**SGD), timeout_s=5)
        server.serve()
        return server.version
    versions = []
    turn = dist.new_group(backend="gloo", ranks=[0, 1], use_local_synchronization=True)
    with Worker(model, plan, timeout_s=5) as worker:
        if rank == 1:
            dist.barrier(group=turn)
        for step in range(steps if rank == 0 else 1):
            features, labels = make_batch(rank, step)
            with worker.step():
                nn.functional.cross_entropy(model(features), labels).backward()
            versions.append(worker.arrivals[-1].version)
        if rank == 0:
            worker.pull()  # comes when all gradients have been applied
            dist.barrier(group=turn)
    return versions
