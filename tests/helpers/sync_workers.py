"""Process bodies for the tests of synchronisation models; unequal speed is made by sleeps."""

from __future__ import annotations

import dataclasses
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddltool.runtime.servers import SSP, Meeting, Server, SyncPolicy, Worker, follow
from tests.helpers.processes import wait_until
from tests.helpers.transfer_workers import (
    PATIENCE_S,
    Outcome,
    forget,
    launch,
    make_batch,
    make_model,
    make_plan,
    sgd,
    weights_of,
)


def train(
    rank: int,
    policy: SyncPolicy,
    workers: int,
    servers: int,
    steps: list[int],
    sleeps_s: list[float],
    options: dict[str, Any] | None = None,
) -> Any:
    """Train worker r for ``steps[r]`` steps of at least ``sleeps_s[r]``.

    Workers return their weights and, per step, when they had pulled and when they were about to push (monotonic
    seconds, one clock for all processes). Servers return what their log and policy say, who is lost, and the order of
    events. Files in ``folder`` tell how far the others are: in step ``hold`` those who began wait until all that join have
    had their answer; the worker ``last`` stays in its first step until all others have ended, or stand in step ``stands_in``.
    """
    options = options or {}
    model = make_model()
    late, folder = options.get("late", 0), Path(options.get("folder", "."))
    plan = dataclasses.replace(make_plan(workers, servers, options.get("order", "none")), late=late)
    if workers <= rank < plan.world_size:
        return serve(model, plan, policy, options)
    meeting = Meeting.of_environment()
    joins = meeting.rank is None
    if joins:
        wait_for(folder / "open")
        if options.get("comes_after"):
            wait_for(folder / "over")
            meeting.limit_s = 1.0
        policy = options.get("strangers", {}).get(rank, policy)
    forget(model)  # the servers' values must be what counts
    pulled, made, members = [], [], []
    checkpoint = options.get("checkpoint")
    if checkpoint is not None:
        checkpoint = f"{checkpoint}.{rank}"
    try:
        worker = Worker(model, plan, policy, checkpoint=checkpoint, meeting=meeting)
    finally:
        if joins:
            (folder / f"answered.{rank}").touch()
    with worker:
        rank, began = worker.rank, worker.clock
        for step in range(steps[rank]):
            features, labels = make_batch(rank, step)
            with worker.step():
                loss = nn.functional.cross_entropy(model(features, use=step % 2), labels)
                pulled.append(time.monotonic())
                if late and not joins and step == options.get("hold"):
                    for joiner in range(plan.world_size, plan.world_size + options["joiners"]):
                        wait_for(folder / f"answered.{joiner}")
                if step == options.get("stands_in"):
                    (folder / str(rank)).touch()
                if step == 0 and rank == options.get("last"):
                    for other in range(rank):
                        wait_for(folder / str(other))
                if rank == options.get("culprit") and step == options.get("at", 3):
                    make_trouble(options, loss)
                time.sleep(sleeps_s[rank])
                made.append(time.monotonic())
                loss.backward()
            if options.get("epochs"):
                members.append(worker.members(worker.epoch + step))
        if not options.get("no_pull"):
            worker.pull()
    if "last" in options:
        (folder / str(rank)).touch()  # already there where it was to stand in a step
    weights = weights_of(model)
    found = {"weights": weights, "pulled": pulled, "made": made, "members": members}
    return found | {"worker": worker.rank, "began": began, "epoch": worker.epoch}


class Numbered(Dataset[tuple[int, Tensor, Tensor]]):
    """Samples that say which they are."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        features, labels = make_batch(0, index)
        return index, features[0], labels[0]


def follow_plan(rank: int, config: str, steps: int) -> list[list[int]]:
    """Follow an elastic-bsp plan for two epochs, rank 1 for ``steps`` batches at most; return the samples of each."""
    model = make_model()
    seen: list[list[int]] = []
    for indices, features, labels in follow(config, model, sgd(model, momentum=0.0), Numbered(), epochs=2):
        seen.append(indices.tolist())
        nn.functional.cross_entropy(model(features), labels).backward()
        if rank == 1 and len(seen) == steps:
            break
    assert all(value.isfinite().all() for value in model.parameters())
    return seen


def wait_for(file: Path) -> None:
    wait_until(file.exists, f"{file} comes", PATIENCE_S)


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


def serve(model: nn.Module, plan: Any, policy: SyncPolicy, options: dict[str, Any]) -> Any:
    optimizer = sgd(model, **({"momentum": 0.0} | options["optimizer"] if "optimizer" in options else {}))
    limit_s, telemetry = options.get("lost_after_s", 60.0), options.get("telemetry")
    server = Logged(model, plan, optimizer, policy, lost_after_s=limit_s, telemetry=telemetry)
    server.events = []
    server.open_at = Path(options["folder"], "open"), options.get("open_at", 1)
    server.kill_at = options.get("kill_at") if server.server == options.get("kill_server", 0) else None
    begin = time.monotonic()
    values = server.serve()
    Path(options["folder"], "over").touch()
    return {
        "values": {name: value.numpy() for name, value in values.items()},
        "version": dict(server.version),
        "wait_s": server.log.wait_s,
        "staleness": dict(server.log.staleness),
        "lost": server.lost,
        "events": server.events,
        "steps": sum(server.steps_made),
        "supersteps": list(getattr(policy, "supersteps", [])),
        "seconds": time.monotonic() - begin,
    }


class Logged(Server):
    """A server that writes down each gradient that it has taken, and may kill itself."""

    events: list[tuple[str, int, int, str, bool]]
    open_at: tuple[Path, int]
    kill_at: int | None = None

    def accept(self, worker: int, clock: int, name: str, gradient: Tensor) -> None:
        before = self.version[name]
        super().accept(worker, clock, name, gradient)
        self.events.append(("push", worker, clock, name, self.version[name] > before))
        if len(self.events) == self.open_at[1]:
            self.open_at[0].touch()
        if self.kill_at is not None and len(self.events) >= self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def run(
    policy: SyncPolicy, workers: int, servers: int, steps: list[int], sleeps_s: list[float], options: dict[str, Any]
) -> tuple[list[Outcome], list[Outcome], list[Outcome]]:
    """Return how the workers, the servers and those ended that join: ``len(steps) - workers`` of them.

    They call when server 0 has taken ``options["open_at"]`` gradients.
    """
    late, began = len(steps) - workers, workers + servers
    with tempfile.TemporaryDirectory() as folder:
        options = {"late": late, "joiners": late, "folder": folder} | options
        outcomes = launch(train, began, policy, workers, servers, steps, sleeps_s, options, late=late)
    return outcomes[:workers], outcomes[workers:began], outcomes[began:]


def disagree(rank: int) -> None:
    """Two workers and a server; rank 1 has another bound than the others."""
    model, plan, policy = make_model(), make_plan(2, 1, "none"), SSP(2 if rank == 1 else 3)
    if rank == 2:
        Server(model, plan, sgd(model), policy).serve()
        return
    with Worker(model, plan, policy):
        pass
