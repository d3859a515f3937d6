"""Process bodies for the tests of synchronisation models; unequal speed is made by sleeps."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddltool.runtime.sync import SSP, MomentumSGD, Policy, SyncServer, SyncWorker
from tests.transfer_workers import SGD, make_batch, make_model, make_plan


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
    model, plan = make_model(), make_plan(workers, servers, options.get("order", "none"))
    if rank >= workers:
        return serve(model, plan, policy, options)
    optimizer = PlainSGD(model, 0.1) if policy.local_steps > 1 else None
    with torch.no_grad():  # the servers' values must be what counts
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    pulled, made, members = [], [], []
    checkpoint = options.get("checkpoint")
    with SyncWorker(
        model, plan, policy, local_optimizer=optimizer, checkpoint=checkpoint and f"{checkpoint}.{rank}"
    ) as worker:
        for step in range(steps[rank]):
            features, labels = make_batch(rank, step)
            with worker.step():
                loss = nn.functional.cross_entropy(model(features, use=step % 2), labels)
                pulled.append(time.monotonic())
                if rank == options.get("culprit") and step == options.get("at", 3):
                    make_trouble(options, loss)
                time.sleep(sleeps_s[rank])
                made.append(time.monotonic())
                loss.backward()
            if options.get("epochs"):
                members.append(worker.members(step))
        if not options.get("no_pull"):
            worker.pull()
    weights = {name: value.detach().numpy() for name, value in model.named_parameters()}
    return {"weights": weights, "pulled": pulled, "made": made, "members": members}


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
    server = Logged(model, plan, optimizer, policy, lost_after_s=options.get("lost_after_s", 5.0), telemetry=telemetry)
    server.events = []
    server.kill_at = options.get("kill_at") if server.server == options.get("kill_server", 0) else None
    begin = time.monotonic()
    values = server.serve()
    return {
        "values": {name: value.numpy() for name, value in values.items()},
        "version": dict(server.version),
        "wait_s": server.log.wait_s,
        "staleness": dict(server.log.staleness),
        "dropped": server.log.dropped,
        "lost": server.membership.lost,
        "events": server.events,
        "supersteps": getattr(policy, "supersteps", []),
        "seconds": time.monotonic() - begin,
    }


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

    def accept(self, worker: int, clock: int, name: str, gradient: Tensor) -> None:
        before = self.version[name]
        super().accept(worker, clock, name, gradient)
        self.events.append(("push", worker, clock, name, self.version[name] > before))
        if self.kill_at is not None and len(self.events) >= self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def disagree(rank: int) -> None:
    """Two workers and a server; rank 1 has another bound than the others."""
    model, plan, policy = make_model(), make_plan(2, 1, "none"), SSP(2 if rank == 1 else 3)
    if rank == 2:
        SyncServer(model, plan, MomentumSGD(**SGD), policy).serve()
        return
    with SyncWorker(model, plan, policy):
        pass
