"""Process bodies for the tests of ordered transfers: workers and servers of one plan, each in a process of its own."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from ddltool.runtime.servers import BSP, Meeting, Server, SyncPolicy, TransferPlan, Worker
from ddltool.runtime.servers.policies import Update
from ddltool.runtime.servers.worker import PushTime
from tests.helpers.processes import forking, wait_until
from tests.helpers.runtime_workers import Branches

PATIENCE_S = 120.0  # less than what a worker or a server waits where nobody says for how long


@dataclass(frozen=True)
class Outcome:
    """How one process ended: what its body returned or raised, its exit code, and the seconds it took."""

    result: Any
    error: str
    exit_code: int | None
    seconds: float


def launch(body: Callable[..., Any], size: int, *args: Any, late: int = 0) -> list[Outcome]:
    """Run ``body(rank, *args)`` in ``size`` processes of one job; raise AssertionError if one does not end.

    ``late`` more have no rank in the job, though the body gets a number; the environment is a launcher's. They all
    begin when the last one has started.
    """
    context = forking()
    together = context.Barrier(size + late)
    with tempfile.TemporaryDirectory() as folder, socket.socket() as port:
        # Bound here and never listened at, the port is nobody else's until the job's server listens.
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", 0))
        job = {"DDLTOOL_SERVER": f"127.0.0.1:{port.getsockname()[1]}", "DDLTOOL_TOKEN": folder}
        crew = []
        for rank in range(size + late):
            ours, theirs = context.Pipe(duplex=False)
            mine = job | ({"RANK": str(rank), "WORLD_SIZE": str(size)} if rank < size else {})
            target = (theirs, Path(folder), rank, mine, together, body, args)
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
                    raise AssertionError(f"rank {rank} did not answer\n{_stacks(crew, Path(folder))}")
                try:
                    answer = pipe.recv()
                except EOFError:
                    answer = (None, "no answer", 0.0)
                process.join(max(end - time.monotonic(), 0.0))
                assert process.exitcode is not None, f"rank {rank} did not end\n{_stacks(crew, Path(folder))}"
                outcomes.append(Outcome(answer[0], answer[1], process.exitcode, answer[2]))
            return outcomes
        finally:
            for process, _ in crew:
                process.kill()
                process.join()


def _stacks(crew: list[tuple[BaseProcess, Connection]], folder: Path) -> str:
    """Return where every thread of the processes that are still there stands."""
    for process, _ in crew:
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(1.0)
    return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(folder.glob("stacks.*")))


def _enter(
    pipe: Connection,
    folder: Path,
    rank: int,
    job: dict[str, str],
    together: threading.Barrier,
    body: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    stacks = (folder / f"stacks.{rank}").open("w", encoding="utf-8")
    faulthandler.register(signal.SIGUSR1, stacks)
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(job)
    together.wait()
    start = time.monotonic()
    try:
        answer = (body(rank, *args), "", 0.0)
    except Exception as error:
        answer = (None, f"{type(error).__name__}: {error}", time.monotonic() - start)
    pipe.send(answer)


def results(outcomes: list[Outcome]) -> list[Any]:
    """Return the results of processes that ended well."""
    assert [(outcome.error, outcome.exit_code) for outcome in outcomes] == [("", 0)] * len(outcomes)
    return [outcome.result for outcome in outcomes]


def make_model() -> Branches:
    torch.manual_seed(7)
    return Branches(width=16)


def make_batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return torch.randn(8, 6, generator=generator), torch.randint(4, (8,), generator=generator)


def make_plan(workers: int, servers: int, order: str) -> TransferPlan:
    model = make_model()
    names = [name for name, _ in model.named_parameters()]
    orders = {"reversed": names[::-1], "given": sorted(names)}
    priority = {given: {name: number for number, name in enumerate(wanted)} for given, wanted in orders.items()}
    seed = 11 if order == "random" else None
    return TransferPlan.for_model(
        model, workers=workers, servers=servers, priority=priority.get(order), random_seed=seed
    )


SGD = {"lr": 0.1, "momentum": 0.9}


def sgd(model: nn.Module, **changes: float) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), **(SGD | changes))


def trained_alone(
    steps: int, workers: Callable[[int], list[tuple[int, int]]], **changes: float
) -> dict[str, np.ndarray]:
    """Return the weights after the same steps in one process, the mean's gradients added in rank order.

    ``workers(step)``: who takes part in a step, and with which of its own batches.
    """
    model = make_model()
    parameters, optimizer = dict(model.named_parameters()), sgd(model, **changes)
    for step in range(steps):
        totals: dict[str, Tensor] = {}
        for worker, batch in workers(step):
            features, labels = make_batch(worker, batch)
            loss = nn.functional.cross_entropy(model(features, use=batch % 2), labels)
            found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            for (name, value), gradient in zip(parameters.items(), found, strict=True):
                mine = torch.zeros_like(value) if gradient is None else gradient
                totals[name] = totals[name] + mine if name in totals else mine
        for name, value in parameters.items():
            value.grad = totals[name] / len(workers(step))
        optimizer.step()
    return {name: value.detach().numpy() for name, value in parameters.items()}


def make_step(worker: Worker, model: nn.Module, batch: tuple[Tensor, Tensor], **options: Any) -> None:
    with worker.step():
        nn.functional.cross_entropy(model(batch[0], **options), batch[1]).backward()


def forget(model: nn.Module) -> None:
    """Leave no value in a model: what it has later came from the servers."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))


def weights_of(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy() for name, value in model.named_parameters()}


sgd(make_model())  # torch loads its compiler with the first optimizer: here, before the processes are forked


def train(rank: int, workers: int, servers: int, order: str, steps: int) -> Any:
    """Train over ordered transfers; workers return weights and arrival orders per pull, servers versions."""
    model, plan = make_model(), make_plan(workers, servers, order)
    if rank >= workers:
        server = Server(model, plan, sgd(model))
        server.serve()
        return server.version
    arrivals = []
    forget(model)  # the servers' values must be what counts
    with Worker(model, plan) as worker:
        for step in range(steps):
            make_step(worker, model, make_batch(rank, step), use=step % 2)
            arrivals.append(worker.arrivals)
        worker.pull()
        arrivals.append(worker.arrivals)
    return weights_of(model), arrivals


def train_compiled(rank: int, steps: int) -> Any:
    """Return the trained weights of a compiled model, and what was compiled of the worker's own code."""
    model, plan, traced = make_model(), make_plan(1, 1, "given"), []
    if rank:
        return Server(model, plan, sgd(model)).serve() and None
    torch._dynamo.convert_frame.register_bytecode_hook(lambda code, _: traced.append(code.co_filename))
    with Worker(model, plan) as worker:
        compiled = torch.compile(model, backend="eager")
        for step in range(steps):
            make_step(worker, compiled, make_batch(0, step), use=step % 2)
        worker.pull()
        return weights_of(model), [name for name in traced if "servers" in name], len(traced)


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


def train_changing(rank: int, how: str, push: PushTime, steps: int) -> Any:
    """One worker, one server; the gradients are changed after the backward pass, or come from ``how`` = two of them."""
    model, plan = make_model(), make_plan(1, 1, "none")
    if rank == 1:
        Server(model, plan, sgd(model)).serve()
        return None
    with Worker(model, plan, push=push) as worker:
        for step in range(steps):
            with worker.step():
                for part in range(2 if how == "two" else 1):
                    features, labels = make_batch(part, step)
                    nn.functional.cross_entropy(model(features), labels).backward()
                change(model, how)
        worker.pull()
    return weights_of(model)


def train_with_trouble(rank: int, workers: int, servers: int, trouble: str, culprit: int, timeout_s: float) -> None:
    """Train until ``culprit`` makes ``trouble`` in step 2; every other rank is to end by an error of its own."""
    model, plan = make_model(), make_plan(workers, servers, "none")
    if rank >= workers:
        optimizer = AfterUpdates(model, 24, lambda: make_trouble(trouble if rank == culprit else "", 0.0))
        Server(model, plan, optimizer, lost_after_s=timeout_s).serve()
        return
    with Worker(model, plan) as worker:
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


class AfterUpdates(torch.optim.SGD):
    """An optimizer that does something else in one of its updates."""

    def __init__(self, model: nn.Module, updates: int, act: Callable[[], None]) -> None:
        super().__init__(model.parameters(), **SGD)
        self.left, self.act = updates, act

    def step(self, closure: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            self.act()
        return super().step(closure)


def stall_in_the_middle(rank: int, workers: int, timeout_s: float) -> None:
    """One server, two workers; worker 1 pushes every gradient of step 0 but its first layer's, then sleeps."""
    model, plan = make_model(), make_plan(workers, 1, "none")
    if rank >= workers:
        Server(model, plan, sgd(model), lost_after_s=timeout_s).serve()
        return
    with Worker(model, plan) as worker:
        if rank == 1:
            model.body[0].weight.register_hook(lambda gradient: time.sleep(2 * timeout_s))
        for step in range(2):
            make_step(worker, model, make_batch(rank, step))


def connect(rank: int, case: str) -> None:
    """Two workers, one server, with one rank at odds with the others, as ``case`` says."""
    model, plan = make_model(), make_plan(2, 1, "none")
    if case == "order on ranks 1 and 2" and rank > 0:
        plan = make_plan(2, 1, "reversed")
    if case == "shape on rank 2" and rank == 2:
        model.heads[1] = nn.Linear(16, 5)
    if case == "more servers":
        plan = make_plan(2, 2, "none")
    if rank == 2:
        Server(model, plan, sgd(model)).serve()
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
        Server(model, plan, sgd(model)).serve()
        return None
    forget(model)
    with Worker(model, plan) as worker, worker.step():
        output = model(features).sum()
        output.backward()
    return output.item(), expected


def serve_slowly(rank: int, order: str, folder: Path) -> Any:
    """One worker's memory is watched while the server pauses between transfers: what has changed from look to look."""
    model, plan = make_model(), make_plan(1, 1, order)
    names = [slot.name for slot in plan.slots]
    if rank == 1:
        Server(model, plan, sgd(model), Pausing(folder)).serve()
        return [names[index] for index in plan.queue(0, 0, 0)]
    parameters = dict(model.named_parameters())
    forget(model)
    seen: list[set[str]] = []

    def watch() -> None:
        left = set(names)
        while left:
            if new := {name for name in left if not torch.isnan(parameters[name]).any()}:
                seen.append(new)
                left -= new
                (folder / str(len(names) - len(left))).touch()

    watching = threading.Thread(target=watch)
    watching.start()
    with Worker(model, plan, Pausing(folder)) as worker:
        worker.pull()
        watching.join()
        return seen, [arrival.name for arrival in worker.arrivals]


class Pausing(BSP):
    """A server that rests before each transfer until the last one has been seen to come."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.asked = folder, set[str]()

    def waits_for(self, worker: int, clock: int, name: str) -> list[int] | None:
        before = self.asked - {name}
        seen = self.folder / str(len(before))
        wait_until(lambda: not before or seen.exists(), f"{sorted(before)} are all seen", PATIENCE_S)
        self.asked.add(name)
        return super().waits_for(worker, clock, name)


class OneByOne(SyncPolicy):
    """Every gradient is applied as it comes; but worker 1 begins when worker 0 has pushed so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def waits_for(self, worker: int, clock: int, name: str) -> list[int] | None:
        return [0] if worker == 1 and self.state.pushed[name][0] < self.steps else None

    def take(self, worker: int, name: str, gradient: Tensor) -> list[Update]:
        return [Update(name, [gradient], 1)]


def train_one_by_one(rank: int, steps: int) -> Any:
    """Return the versions that each worker saw, of the last parameter to come."""
    model, plan, policy = make_model(), make_plan(2, 1, "none"), OneByOne(steps)
    if rank == 2:
        server = Server(model, plan, sgd(model), policy)
        server.serve()
        return server.version
    versions = []
    with Worker(model, plan, policy) as worker:
        for step in range(steps if rank == 0 else 1):
            make_step(worker, model, make_batch(rank, step))
            versions.append(worker.arrivals[-1].version)
    return versions


def meet(rank: int, case: str) -> None:
    """Two workers, one server, of which one does not come or has another token."""
    meeting = Meeting.of_environment()
    meeting.limit_s = 2.0
    if rank == 1 and case == "missing":
        return
    if rank == 1 and case == "another token":
        meeting.token = "guessed"
    model, plan = make_model(), make_plan(2, 1, "none")
    if rank == 2:
        Server(model, plan, sgd(model), meeting=meeting).serve()
    else:
        Worker(model, plan, meeting=meeting).close()


def listening(rank: int) -> list[str]:
    """One worker, one server: return where the server listens."""
    model, plan = make_model(), make_plan(1, 1, "none")
    if rank == 0:
        Worker(model, plan).close()
        return []
    server = Server(model, plan, sgd(model))
    found = [str(one.laddr.ip) for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"]
    server.serve()
    return found
