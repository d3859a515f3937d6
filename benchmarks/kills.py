"""A process of a job is killed, stopped or ended at a random moment: how the others end, after how long, with which line.

    python benchmarks/kills.py [--only hook,agent] [--signals SIGSTOP] [--moments calls] [--times 20] [--seed 0]

Three processes that train with steps of some milliseconds; ``servers`` has a parameter server beside them, which may be the
one. SIGKILL, SIGSTOP or SIGTERM comes to one of them up to a second after training has begun (``time``), or before or after
one of its first 120 calls of torch.distributed, its stores, zmq or ``torch.save``, which is mostly in set-up, inside an
exchange, while sizes are agreed on, or while a checkpoint is written (``calls``). The job's own time-out (that of
``init_process_group``; for servers what a silent process is allowed) is 3 s. Printed is a row per kind and signal: how many
of the others ended by an error of one line that names the one that is missing, the seconds until the last of them had ended
(median and longest), how many jobs lasted longer than the time-out and 2 s, how many files of telemetry or checkpoints were
left half written, and the line that was printed most.
"""

from __future__ import annotations

import argparse
import collections
import faulthandler
import functools
import json
import multiprocessing
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ddltool import runtime
from ddltool.artifacts import save
from ddltool.errors import InputError
from ddltool.plans import Enforcement, RankEnforcement
from ddltool.runtime.agent import GoodputAgent
from ddltool.runtime.balancing import balance
from ddltool.runtime.elastic import ElasticTrainer, checkpoint
from ddltool.runtime.servers import Meeting, Server, TransferPlan, Worker
from ddltool.runtime.servers.wire import Wire

STEPS = 10**6
RANKS, TIMEOUT_S, GRACE_S = 3, 3.0, 2.0
PATIENCE_S, HANGS_S = 60.0, 20.0
CALLS_HIT = 120
SIGNALS = {each.name: each for each in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a process of a job is, and what it needs."""

    rank: int
    port: int
    folder: str
    ready: Connection
    limit_s: float = TIMEOUT_S
    hit: tuple[int, bool, signal.Signals] | None = None
    """After how many calls it hits itself, whether before that call or after it, and by which signal; None: others do."""


def loop(model: nn.Module, optimizer: Any, batches: Callable[[int], Any], hook: Any, made: Callable[[], None]) -> None:
    """Train for ever; ``hook``: what weighs losses."""
    for epoch in range(STEPS):
        for inputs, targets in batches(epoch):
            hook.loss(nn.functional.cross_entropy(model(inputs), targets)).backward()
            optimizer.step()
            optimizer.zero_grad()
            made()


def hook(network: nn.Module, data: TensorDataset, made: Callable[[], None], place: Place) -> None:
    """Train with uneven batches and telemetry."""
    sizes = (4, 5, 7)
    ranks = [
        RankEnforcement(rank=rank, device_type="cpu", ests=1, local_batch_size=size) for rank, size in enumerate(sizes)
    ]
    rows = f"{place.folder}/rows.jsonl"
    plan = Enforcement(
        job="kills", strategy="bsp", world_size=RANKS, total_batch_size=sum(sizes), ranks=ranks, telemetry=rows
    )
    path = Path(place.folder, f"enforce-{place.rank}.json")
    save(plan, path)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    attached = runtime.attach(path, model=model, optimizer=optimizer, dataset=data)
    loader = attached.dataloader(batch_size=16)
    loop(model, optimizer, lambda epoch: loader, attached, made)


def balanced(network: nn.Module, data: TensorDataset, made: Callable[[], None], place: Place) -> None:
    """Train with batches that follow speeds."""
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    balancer = balance(model, optimizer, data, total_batch=16)
    loader = balancer.dataloader()
    loop(model, optimizer, lambda epoch: loader, balancer, made)


def agent(network: nn.Module, data: TensorDataset, made: Callable[[], None], place: Place) -> None:
    """Train with batches that follow the goodput."""
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    follows = GoodputAgent(
        model, optimizer, data, initial_batch_size=16, max_batch_size=64, max_local_batch_size=32, interval_s=0.5
    )
    for epoch in range(STEPS):
        for inputs, targets in follows.batches(epoch):
            follows.loss(nn.functional.cross_entropy(model(inputs), targets)).backward()
            if follows.complete:
                optimizer.step()
                optimizer.zero_grad()
                made()


def elastic(network: nn.Module, data: TensorDataset, made: Callable[[], None], place: Place) -> None:
    """Train four logical workers, with a checkpoint every five steps."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    trainer = ElasticTrainer(
        network, optimizer, nn.CrossEntropyLoss(), data, max_workers=4, batch_size=4, bucket_mib=0.01
    )
    for epoch in range(STEPS):
        for number, _ in enumerate(trainer.epoch(epoch)):
            made()
            if number % 5 == 4:
                trainer.save(f"{place.folder}/checkpoint.pt")


def servers(network: nn.Module, data: TensorDataset, made: Callable[[], None], place: Place) -> None:
    """Train in lockstep over a parameter server, the process after the last worker."""
    meeting = Meeting(rank=place.rank, address=f"127.0.0.1:{place.port}", token="kills", limit_s=place.limit_s)
    plan = TransferPlan.for_model(network, workers=RANKS, servers=1)
    if place.rank == RANKS:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
        server = Server(network, plan, optimizer, lost_after_s=place.limit_s, meeting=meeting)
        if place.hit is None:
            place.ready.send("ready")
        server.serve()
        return
    inputs, targets = (tensor[:16] for tensor in data.tensors)
    with Worker(network, plan, meeting=meeting) as worker:
        for _ in range(STEPS):
            with worker.step():
                nn.functional.cross_entropy(network(inputs), targets).backward()
            made()


def ambush(place: Place) -> None:
    """Let the process hit itself at one of its calls, and say so just before."""
    if place.hit is None:
        return
    left, before, number = place.hit

    def hit() -> None:
        place.ready.send("hit")
        os.kill(os.getpid(), number)

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counts(*args: Any, **named: Any) -> Any:
            nonlocal left
            left -= threading.current_thread() is threading.main_thread()
            now, left = left == 0, left - (left == 0)
            if now and before:
                hit()
            result = call(*args, **named)
            if now:
                hit()
            return result

        return counts

    for holder, names in CALLS.items():
        for name in names:
            setattr(holder, name, counted(getattr(holder, name)))


CALLS: dict[Any, tuple[str, ...]] = {
    dist: ("all_reduce", "all_gather", "broadcast", "isend", "irecv", "send", "recv", "barrier", "new_group"),
    dist.PrefixStore: ("set", "get", "multi_get", "compare_set", "delete_key"),  # type: ignore[attr-defined]
    torch: ("save",),
    Wire: ("send", "receive"),
}
KINDS = {"hook": hook, "balance": balanced, "agent": agent, "elastic": elastic, "servers": servers}


def _main(kind: str, place: Place) -> None:
    """Train for ever; say so when training has begun."""
    torch.set_num_threads(1)
    if kind == "servers":
        ambush(place)
    else:
        store = dist.TCPStore("127.0.0.1", place.port, is_master=False)
        limit = timedelta(seconds=place.limit_s)
        dist.init_process_group("gloo", rank=place.rank, world_size=RANKS, store=store, timeout=limit)
        ambush(place)
    torch.manual_seed(0)
    features = torch.randn(640, 32)
    data = TensorDataset(features, (features[:, 1] > 0).long())
    network = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    steps = 0

    def made() -> None:
        nonlocal steps
        steps += 1
        if steps == 2 and place.hit is None:
            place.ready.send("ready")
        time.sleep(0.002)

    KINDS[kind](network, data, made, place)


def _process(kind: str, place: Place) -> None:
    """Do what Python does with a script: an error that nobody catches goes to the excepthook."""
    with open(f"{place.folder}/told-{place.rank}", "w") as told:
        os.dup2(told.fileno(), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    faulthandler.register(signal.SIGUSR1, sys.stderr)
    try:
        _main(kind, place)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    os._exit(1)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the others ended: the seconds until the last had, and of each what it printed and its exit code (None: it hung)."""

    lived_s: float
    told: list[str]
    codes: list[int | None]
    torn: list[str]
    """Files that are not whole: telemetry with a broken line, a checkpoint that cannot be read."""

    def names(self, victim: int, *, among: bool = False) -> int:
        """Return how many ended by an error in one line that names the process that is missing, and no traceback.

        ``among``: together with others that were too busy to answer, it may be.
        """
        others = r"(\d+, )*" if among else ""
        return sum(
            code == 1
            and "Traceback" not in text
            and re.match(rf"error: .*rank {others}{victim}\b", self.line(text)) is not None
            for text, code in zip(self.told, self.codes, strict=True)
        )

    @staticmethod
    def line(text: str) -> str:
        """Return the last line."""
        return (text.strip().splitlines() or ["nothing"])[-1]


def disturbed(
    kind: str,
    number: signal.Signals,
    victim: int,
    delay_s: float,
    call: tuple[int, bool] | None = None,
    limit_s: float = TIMEOUT_S,
) -> Outcome:
    """Send a signal to a process some time after training began, or before or after its n-th call; return how others ended.

    This process holds the store, as torchrun does. ``limit_s``: the job's own time-out.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "ddltool.runtime.agent", "ddltool.runtime.elastic", __name__])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    size, port = RANKS, store.port
    if kind == "servers":
        size, store = RANKS + 1, None  # the server listens there itself
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(size)]
        places = [
            Place(rank=rank, port=port, folder=folder, ready=pipes[rank][1], limit_s=limit_s) for rank in range(size)
        ]
        if call is not None:
            places[victim] = replace(places[victim], hit=(*call, number))
        crew = [context.Process(target=_process, args=(kind, place)) for place in places]
        for process in crew:
            process.start()
        told = [Path(folder, f"told-{rank}") for rank in range(size)]
        others = [rank for rank in range(size) if rank != victim]
        try:
            for rank, (mine, _) in enumerate(pipes):
                if (call is None or rank == victim) and not mine.poll(PATIENCE_S):
                    raise RuntimeError(f"rank {rank} did not come so far: {told[rank].read_text()}")
            time.sleep(delay_s)
            begin = time.monotonic()
            if call is None:
                os.kill(crew[victim].pid or 0, number)
            for rank in others:
                crew[rank].join(max(begin + HANGS_S + limit_s - TIMEOUT_S - time.monotonic(), 0.0))
            lived_s = time.monotonic() - begin
            for rank in others:
                if crew[rank].is_alive():  # say where it stands
                    os.kill(crew[rank].pid or 0, signal.SIGUSR1)
                    time.sleep(1.0)
                    print(told[rank].read_text(), file=sys.stderr)
            codes = [crew[rank].exitcode for rank in others]
        finally:
            for process in crew:
                process.kill()
                process.join()
        texts = [told[rank].read_text() for rank in others]
        return Outcome(lived_s=lived_s, told=texts, codes=codes, torn=list(torn(Path(folder))))


def torn(folder: Path) -> Iterator[str]:
    """Yield what a job has left half written."""
    for path in folder.glob("*.jsonl*"):
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                json.loads(line if line.endswith(b"\n") else b"")
            except ValueError:
                yield f"{path.name}: {line[:80]!r}"
    for path in folder.glob("checkpoint.pt"):
        try:
            checkpoint.read(path)
        except InputError as error:
            yield str(error)


def row(kind: str, name: str, moments: str, times: int, seed: int) -> str:
    """Return a table's row: that many random moments of one kind and signal."""
    chance = random.Random(f"{kind} {name} {seed}")
    lived, named, broken, lines = [], 0, 0, collections.Counter[str]()
    size = RANKS + (kind == "servers")
    for _ in range(times):
        victim, delay_s = chance.randrange(size), chance.uniform(0.0, 1.0)
        call = None
        if moments == "calls":
            call, delay_s = (1 + int(CALLS_HIT ** chance.random()), chance.random() < 0.5), 0.0
        found = disturbed(kind, SIGNALS[name], victim, delay_s, call)
        lived.append(found.lived_s)
        named += found.names(victim)
        broken += len(found.torn)
        for text in found.told:
            lines[re.sub(r"\d+(\.\d+)?", "N", found.line(text))] += 1
        if found.names(victim) < size - 1 or found.lived_s > TIMEOUT_S + GRACE_S or found.torn:
            shown = [found.line(text) for text in found.told]
            when = f"call {call}" if call else f"{delay_s:.2f} s"
            print(
                f"{kind} {name} of {victim} at {when}: {found.lived_s:.1f} s, {shown} {found.torn}",
                file=sys.stderr,
                flush=True,
            )
    late = sum(each > TIMEOUT_S + GRACE_S for each in lived)
    shown = f"{statistics.median(lived):.1f} | {max(lived):.1f}"
    ended = f"{named} of {times * (size - 1)}"
    return f"| {kind} | {name} | {ended} | {shown} | {late} | {broken} | `{lines.most_common(1)[0][0]}` |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", "--kinds", default=",".join(KINDS))
    parser.add_argument("--signals", default=",".join(SIGNALS))
    parser.add_argument("--moments", choices=("time", "calls"), default="time")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    columns = "kind", "signal", "end in one line that names it", "median, s", "longest, s", "too late", "torn files"
    print(f"| {' | '.join(columns)} | the line, N a number |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in given.only.split(","):
        for name in given.signals.split(","):
            print(row(kind, name, given.moments, given.times, given.seed), flush=True)


if __name__ == "__main__":
    main()
