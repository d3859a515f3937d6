"""Process bodies for what goes wrong on a parameter server beyond a lost worker; see :func:`train`."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddltool.errors import InputError
from ddltool.runtime.servers import ASP, BSP, Server, SyncPolicy, TransferError, Worker, wire
from tests.helpers.sync_workers import wait_for
from tests.helpers.transfer_workers import AfterUpdates, Branches, make_batch, make_model, make_plan, make_step, sgd

SAMPLES, BATCH = 44, 4  # three workers: 15, 15 and 14 samples, so 4 batches each


def train(
    rank: int, policy: SyncPolicy, workers: int, servers: int, folder: Path, fault: str, options: dict[str, Any]
) -> Any:
    """Train three epochs; in step ``at`` the ``culprits`` meet with the fault."""
    model, plan = make_model(), make_plan(workers, servers, "none")
    Path(folder, f"pid.{rank}").write_text(str(os.getpid()))
    if rank >= workers:
        return serve(rank, policy, folder, model, plan, options)
    last = options.get("checkpoint", folder) / f"last.{rank}.pt"
    last.parent.mkdir(exist_ok=True)
    made, updates = 0, []
    with Worker(model, plan, policy, checkpoint=last) as worker:
        for epoch in range(3):
            for batch in worker.batches(SAMPLES, BATCH, epoch=epoch, seed=0):
                with worker.step():
                    features, labels = make_batch(rank, int(batch[0]))
                    loss = nn.functional.cross_entropy(model(features), labels)
                    updates.append(worker.updates)
                    if made == options.get("at", 3) and rank in options["culprits"]:
                        loss = go_wrong(fault, loss, model, folder, last)
                    time.sleep(0.01)
                    loss.backward()
                made += 1
    return {"made": made, "updates": updates}


def go_wrong(fault: str, loss: torch.Tensor, model: Branches, folder: Path, last: Path) -> torch.Tensor:
    if fault == "huge":  # every gradient of it is finite
        return loss + sum(value.sum() * 2.5e38 for value in model.body.parameters())
    if fault == "nan without a folder":
        shutil.rmtree(last.parent)
        return loss * float("nan")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "raise":
        raise ValueError("a bad batch")
    if fault == "interrupt":
        raise KeyboardInterrupt
    if fault == "terminate all":
        pids = [int(path.read_text()) for path in folder.glob("pid.*")]
        for pid in sorted(pids, key=os.getpid().__eq__):  # this process last
            os.kill(pid, signal.SIGTERM)
    return loss


def lose_the_server_before_the_end(rank: int, policy: SyncPolicy, steps: int, folder: Path) -> str:
    """One worker kills the server after its last step, and closes when it has noticed; return what closing says."""
    model, plan = make_model(), make_plan(1, 1, "none")
    Path(folder, f"pid.{rank}").write_text(str(os.getpid()))
    if rank == 1:
        Server(model, plan, sgd(model, lr=0.01), policy).serve()
    worker = Worker(model, plan, policy, checkpoint=folder / "last.pt")
    for step in range(steps):
        make_step(worker, model, make_batch(0, step))
    os.kill(int(Path(folder, "pid.1").read_text()), signal.SIGKILL)
    said = "nothing"
    try:
        worker.close()
    except TransferError as error:
        said = str(error)
    worker.close()  # it has been said once
    return said


def train_until_the_optimizer_breaks(rank: int, after: int, text: str, sign: Path) -> Any:
    """Two workers under ASP, of which worker 1 raises in its second step; the optimizer of the server breaks later."""
    model, plan = make_model(), make_plan(2, 1, "none")
    if rank == 2:

        def fail() -> None:
            raise RuntimeError(text)

        Server(model, plan, AfterUpdates(model, after, fail), ASP(), lost_after_s=30.0).serve()
        return None
    with Worker(model, plan, ASP()) as worker:
        for step in range(2000):
            with worker.step():
                features, labels = make_batch(rank, step)
                if rank == 1 and step == 1:
                    sign.touch()
                    raise ValueError("a bad batch of long ago")
                if step == 1:
                    wait_for(sign)
                nn.functional.cross_entropy(model(features), labels).backward()
                time.sleep(0.005)
    return None


def train_beyond(rank: int, limit_s: float, seconds: float) -> Any:
    """Work in silence for longer than ``limit_s``, which is what a connection may be silent; then ask a closed worker."""
    wire.SILENT_S = limit_s
    model, plan = make_model(), make_plan(1, 1, "none")
    if rank == 1:
        Server(model, plan, sgd(model), BSP()).serve()
        return "served"
    with Worker(model, plan, BSP()) as worker, worker.step():
        features, labels = make_batch(0, 0)
        nn.functional.cross_entropy(model(features), labels).backward()
        time.sleep(seconds)
    try:
        worker.pull()
    except InputError as error:
        return str(error)
    return "pulled"


def fall_silent(rank: int, limit_s: float) -> None:
    """The server hangs in step 2, with its connections open."""
    model, plan = make_model(), make_plan(1, 1, "none")
    if rank == 1:
        Server(
            model, plan, AfterUpdates(model, 12, lambda: time.sleep(2 * limit_s)), BSP(), lost_after_s=limit_s
        ).serve()
    with Worker(model, plan, BSP()) as worker:
        for step in range(5):
            make_step(worker, model, make_batch(0, step))


def stand_still(rank: int, limit_s: float, sign: Path) -> str:
    """All stand still for longer than ``limit_s``, as on a machine that sleeps, and worker 1 wakes before the server."""
    model, plan = make_model(), make_plan(2, 1, "none")

    def night() -> None:
        sign.touch()
        time.sleep(1.2 * limit_s)

    if rank == 2:
        server = Server(model, plan, AfterUpdates(model, 12, night), ASP(), lost_after_s=limit_s)
        server.serve()
        return f"lost: {server.lost}"
    with Worker(model, plan, ASP()) as worker:
        receive, nights = worker._wire.receive, [1.1 * limit_s]

        def sleep(timeout_s: float) -> Any:
            message = receive(timeout_s)
            if message is None and nights and sign.exists():
                time.sleep(nights.pop())
            return message

        worker._wire.receive = sleep  # type: ignore[method-assign]
        for step in range(5 * rank):
            make_step(worker, model, make_batch(rank, step))
    return f"nights: {nights}"


def serve(rank: int, policy: SyncPolicy, folder: Path, model: nn.Module, plan: Any, options: dict[str, Any]) -> Any:
    """Return how the server ended, and what it holds then."""
    server = Server(
        model,
        plan,
        torch.optim.SGD(model.parameters(), lr=options.get("lr", 0.01)),
        policy,
        telemetry=folder / f"sync.{rank}.jsonl",
        lost_after_s=options.get("lost_after_s", 60.0),
    )
    ending = "done"
    try:
        server.serve()
    except TransferError as error:
        ending = str(error)
    finite = all(bool(torch.isfinite(value).all()) for value in server.values.values())
    return {"ending": ending, "finite": finite, "lost": server.lost}
