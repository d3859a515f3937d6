"""Process bodies for the tests of synchronisation models; unequal speed is made by sleeps."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddltool.runtime.servers import SSP, MomentumSGD, Policy, SyncServer, SyncWorker
from tests.transfer_workers import PATIENCE_S, SGD, Outcome, launch, make_batch, make_model, make_plan


def train(
    rank: int,
    policy: Policy,
    workers: int,
    servers: int,
    steps: list[int],
    sleeps_s: list[float],
    options: dict[str, Any] | None = None,
) -> Any:
    """Train worker r for ``steps[r]`` steps of at least ``sleeps_s[r]``.

    Workers return their weights and, per step, when they had pulled and when they were about to push (monotonic
    seconds, one clock for all processes). Servers return what their log, policy and membership say, and the order of events.
    """
    options = options or {}
    model = make_model()
    late = options.get("late", 0)
    plan = dataclasses.replace(make_plan(workers, servers, options.get("order", "none")), late=late)
    door = dist.TCPStore("127.0.0.1", options["port"], is_master=False) if late else None
    if workers <= rank < plan.world_size:
        return serve(model, plan, policy, options | {"door": door})
    joins = rank >= plan.world_size
    if joins:
        assert door is not None
        while not door.check(["open"]):
            time.sleep(0.01)
        if options.get("comes_after"):
            door.wait(["over"], timedelta(seconds=PATIENCE_S))
        policy = options.get("strangers", {}).get(rank, policy)
        if options.get("ghost") and rank == plan.world_size:  # it knocks, and that is all
            door.add("ddltool/knocked", 1)
            door.set(f"ddltool/join/{workers}", "")
            return None
        while options.get("ghost") and not door.check([f"ddltool/join/{workers}"]):
            time.sleep(0.01)
    optimizer = PlainSGD(model, 0.1) if policy.local_steps > 1 else None
    with torch.no_grad():  # the servers' values must be what counts
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    pulled, made, members = [], [], []
    Dawdling.dawdle_s = options.get("dawdle_s", Dawdling.dawdle_s)
    checkpoint = options.get("checkpoint")
    with (Dawdling if joins else SyncWorker)(
        model,
        plan,
        policy,
        local_optimizer=optimizer,
        checkpoint=checkpoint and f"{checkpoint}.{rank}",
        door=door if joins else None,
    ) as worker:
        rank, began = worker.rank, worker.clock
        if joins and door is not None:
            door.set("in", "")
        for step in range(steps[rank]):
            features, labels = make_batch(rank, step)
            with worker.step():
                loss = nn.functional.cross_entropy(model(features, use=step % 2), labels)
                pulled.append(time.monotonic())
                if not joins and door is not None and step == options.get("hold"):
                    door.wait(["in"], timedelta(seconds=PATIENCE_S))
                if step == 0 and rank == options.get("last"):
                    while not all(Path(options["gate"], str(other)).exists() for other in range(rank)):
                        time.sleep(0.01)
                if rank == options.get("culprit") and step == options.get("at", 3):
                    make_trouble(options, loss)
                time.sleep(sleeps_s[rank])
                made.append(time.monotonic())
                loss.backward()
            if options.get("epochs"):
                members.append(worker.members(worker.epoch + step))
        if not options.get("no_pull"):
            worker.pull()
    if "gate" in options:
        Path(options["gate"], str(rank)).touch()
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
    found = {"weights": weights, "pulled": pulled, "made": made, "members": members}
    return found | {"worker": worker.rank, "began": began, "epoch": worker.epoch}


def make_trouble(options: dict[str, Any], loss: Tensor) -> None:
    if options["trouble"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if options["trouble"] == "stall":
        time.sleep(options["stall_s"])
    if options["trouble"] == "raise":
        raise ValueError("a bad batch")
    if options["trouble"] == "nan":
        loss.data.fill_(float("nan"))
        loss.register_hook(lambda gradient: gradient * float("nan"))


def serve(model: nn.Module, plan: Any, policy: Policy, options: dict[str, Any]) -> Any:
    optimizer = MomentumSGD(**(options.get("optimizer") or SGD))
    telemetry = options.get("telemetry")
    limit, door = options.get("lost_after_s", 5.0), options.get("door")
    server = Logged(model, plan, optimizer, policy, lost_after_s=limit, telemetry=telemetry, door=door)
    server.door, server.open_at = door, options.get("open_at", 1)
    server.events = []
    server.kill_at = options.get("kill_at") if server.server == options.get("kill_server", 0) else None
    begin = time.monotonic()
    values = server.serve()
    if door is not None:
        door.set("over", "")
    return {
        "values": {name: value.numpy() for name, value in values.items()},
        "version": dict(server.version),
        "wait_s": server.log.wait_s,
        "staleness": dict(server.log.staleness),
        "dropped": server.log.dropped,
        "lost": server.membership.lost,
        "events": server.events,
        "steps": server.taken,
        "sent": (server.sent, plan.queue(server.server, 0, 0)),
        "supersteps": getattr(policy, "supersteps", []),
        "seconds": time.monotonic() - begin,
    }


class Dawdling(SyncWorker):
    """A joiner that lets time pass between server 0, which lets it in, and the others, which do not know of it yet."""

    dawdle_s = 0.4

    def _exchange(self, server: int, kind: int, number: int, length: int) -> Tensor:
        if server:
            time.sleep(self.dawdle_s)
        return super()._exchange(server, kind, number, length)


class PlainSGD:
    """Local steps without momentum; torch's own takes seconds to import."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.model, self.lr = model, lr

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=self.lr)

    def zero_grad(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


class Logged(SyncServer):
    """A server that writes down each gradient that it has taken, and may kill itself."""

    events: list[tuple[str, int, int, str, bool]]
    kill_at: int | None = None
    door: dist.Store | None = None
    open_at = 1

    def accept(self, worker: int, clock: int, name: str, gradient: Tensor) -> None:
        before = self.version[name]
        super().accept(worker, clock, name, gradient)
        self.events.append(("push", worker, clock, name, self.version[name] > before))
        if self.door is not None and len(self.events) == self.open_at:
            self.door.set("open", "")
        if self.kill_at is not None and len(self.events) >= self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def join(pipe: Connection, rank: int, *args: Any) -> None:
    """Train as a worker that is no part of the job that began, and send what comes of it."""
    torch.set_num_threads(1)
    start = time.monotonic()
    try:
        answer = (train(rank, *args), "", 0.0)
    except Exception as error:
        answer = (None, f"{type(error).__name__}: {error}", time.monotonic() - start)
    pipe.send(answer)


def launch_with_late(
    policy: Policy, workers: int, servers: int, steps: list[int], sleeps_s: list[float], options: dict[str, Any]
) -> tuple[list[Outcome], list[Outcome], list[Outcome]]:
    """Run a job into which ``len(steps) - workers`` processes come late; return workers, servers and those.

    They knock when server 0 has taken ``options["open_at"]`` gradients.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    options = {"late": len(steps) - workers} | options | {"port": store.port}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.transfer_workers"])
    crew = []
    for rank in range(workers + servers, len(steps) + servers):
        ours, theirs = context.Pipe(duplex=False)
        target = (theirs, rank, policy, workers, servers, steps, sleeps_s, options)
        process = context.Process(target=join, args=target, daemon=True)
        process.start()
        theirs.close()
        crew.append((process, ours))
    try:
        began = launch(train, workers + servers, policy, workers, servers, steps, sleeps_s, options)
        late = []
        for process, pipe in crew:
            assert pipe.poll(PATIENCE_S), "a late worker did not answer"
            try:
                answer = pipe.recv()
            except EOFError:
                answer = (None, "no answer", 0.0)
            process.join(PATIENCE_S)
            late.append(Outcome(answer[0], answer[1], process.exitcode, answer[2]))
    finally:
        for process, _ in crew:
            process.kill()
            process.join()
    return began[:workers], began[workers:], late


def disagree(rank: int) -> None:
    """Two workers and a server; rank 1 has another bound than the others."""
    model, plan, policy = make_model(), make_plan(2, 1, "none"), SSP(2 if rank == 1 else 3)
    if rank == 2:
        SyncServer(model, plan, MomentumSGD(**SGD), policy).serve()
        return
    with SyncWorker(model, plan, policy):
        pass
