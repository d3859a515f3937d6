"""Jobs that last while processes come, leave, stall and die: do memory, threads, files and sockets stay where they are?

    python benchmarks/soak.py [--seconds 3600] [--parts lockstep,supersteps,elastic,balance] [--seed 0]

Four jobs at once. ``lockstep`` and ``supersteps``: a parameter server each (BSP; ElasticBSP) with two workers that stay and
six seats that are filled again and again by workers that leave, are killed, stand still for a second, or for longer than is
allowed. ``elastic``: four processes that train the same job again and again, interrupted and resumed in another number at
random steps. ``balance``: one job of three ranks whose speeds change all the time. The table has, of each process that lasts,
what it had of each resource in the second and the last quarter of the time (medians). It grew where the last median is above
all of the second quarter. Memory grew where a line through its second half (Theil and Sen's, so that single peaks do not
count; the lower end of its 95 % interval) rises by more than 2 MiB. Exit code 1 when something grew, waited beyond its limit
or had other bits than promised. A wait's limit is longer by what the machine was late for a sleeping thread.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import gc
import hashlib
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import psutil
import torch
from scipy.stats import theilslopes
from torch import nn

from ddltool.runtime.servers import BSP, ElasticBSP, Meeting, Server, SyncPolicy, Worker
from tests.helpers import balance_workers, elastic_workers
from tests.helpers.processes import forking, free_port
from tests.helpers.runtime_workers import PATIENCE_S, Crew
from tests.helpers.transfer_workers import make_batch, make_model, make_plan, sgd

STAYING, SEATS, LOST_AFTER_S, GRACE_S = 2, 8, 5.0, 5.0
SLACK_BYTES = 2 * 2**20
Watched = dict[str, int]


@dataclass
class Part:
    """One of the jobs: what happened in it, and what broke a promise."""

    events: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    longest_s: float = 0.0
    limit_s: float = LOST_AFTER_S + GRACE_S

    def waited(self, seconds: float, what: str) -> None:
        """Note how long something waited."""
        self.longest_s = max(self.longest_s, seconds)
        if seconds > self.limit_s:
            self.broken.append(f"{what} waited {seconds:.1f} s of {self.limit_s:.1f} allowed")


class Records:
    """What the watched processes hold, sampled while they run."""

    def __init__(self) -> None:
        self.processes: dict[str, psutil.Process] = {}
        self.samples: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.late_s = 0.0
        """By how much the machine was late, at most, for a thread that slept."""

    def sleep(self, seconds: float) -> None:
        """Sleep, and note how late it got."""
        began = time.monotonic()
        time.sleep(seconds)
        self.late_s = max(self.late_s, time.monotonic() - began - seconds)

    def watch(self, name: str, pid: int | None) -> None:
        """Sample this process from now on."""
        self.processes[name] = psutil.Process(pid)

    def sample(self) -> None:
        """Write down what every watched process that is there holds now."""
        for name, process in list(self.processes.items()):
            with contextlib.suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
                sockets = len(process.net_connections("all"))
                found = {
                    "memory": process.memory_full_info().uss,
                    "threads": process.num_threads(),
                    "files": process.num_fds() - sockets,
                    "sockets": sockets,
                }
                for what, value in found.items():
                    self.samples[name, what].append(value)


def grew(values: list[float]) -> bool:
    """Return whether a typical value of the last quarter is above all of the second one (the first is warm-up)."""
    quarter = len(values) // 4
    return quarter > 0 and statistics.median(values[-quarter:]) > max(values[quarter : 2 * quarter])


def rise(values: list[float]) -> float:
    """Return by how much the second half rises at least, at 95 %; caches and the allocator fill in the first."""
    last = values[len(values) // 2 :]
    return float(theilslopes(last).low_slope) * len(last) if len(last) > 2 else 0.0


# Parameter servers.


def member(place: dict[str, Any], policy: SyncPolicy, folder: str) -> None:
    """Serve, stay to the end, or join and leave after some steps; write each step's bits and seconds down."""
    rank, steps = place["rank"], place["steps"]
    torch.set_num_threads(1)
    sys.stderr = Path(folder, f"told.{os.getpid()}").open("w", buffering=1)  # noqa: SIM115  # as long as the process
    meeting = Meeting(rank=rank, address=place["address"], token="soak", limit_s=PATIENCE_S)
    model, plan = make_model(), place["plan"]
    chance = random.Random(place["seed"])
    if rank == STAYING:
        server = Server(
            model, plan, sgd(model, momentum=0.0, lr=0.01), policy, lost_after_s=LOST_AFTER_S, meeting=meeting
        )
        server.serve()
        Path(folder, "lost").write_text("\n".join(f"{who} {why}" for who, why in server.lost.items()))
        return
    over, steps_file = Path(folder, "over"), Path(folder, f"steps.{os.getpid()}")
    with steps_file.open("w", buffering=1) as lines, Worker(model, plan, policy, meeting=meeting) as worker:
        for step in range(steps):
            if over.exists():
                break
            features, labels = make_batch(worker.rank, step)
            began, clock = time.monotonic(), worker.clock
            with worker.step():
                loss = nn.functional.cross_entropy(model(features), labels)
                bits = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.body.state_dict().values()))
                time.sleep(chance.uniform(0.01, 0.05))
                loss.backward()
            lines.write(f"{clock} {bits.hexdigest()} {time.monotonic() - began:.3f}\n")


def serving(part: Part, records: Records, name: str, policy: SyncPolicy, seconds: float, seed: int) -> None:
    """Run a parameter server whose workers come and go."""
    chance, port = random.Random(f"{name} {seed}"), free_port()
    late = SEATS + round(seconds)
    plan = make_plan(STAYING, 1, "none")
    plan = type(plan).for_model(make_model(), workers=STAYING, servers=1, late=late)
    with tempfile.TemporaryDirectory() as folder:

        def start(rank: int | None, steps: int) -> BaseProcess:
            place = {
                "rank": rank,
                "steps": steps,
                "address": f"127.0.0.1:{port}",
                "plan": plan,
                "seed": chance.random(),
            }
            process = forking().Process(target=member, args=(place, policy, folder), daemon=True)
            process.start()
            return process

        def words(process: BaseProcess) -> str:
            path = Path(folder, f"told.{process.pid}")
            return (path.read_text().strip().splitlines() or ["nothing"])[-1] if path.exists() else "nothing"

        def begun(process: BaseProcess) -> bool:
            steps = Path(folder, f"steps.{process.pid}")
            return steps.exists() and steps.stat().st_size > 0

        staying = [start(rank, 10**9) for rank in range(STAYING + 1)]
        patience = time.monotonic() + PATIENCE_S
        while not all(map(begun, staying[:STAYING])) and time.monotonic() < patience:
            time.sleep(0.1)
        for rank in range(STAYING):
            records.watch(f"{name}: worker {rank}", staying[rank].pid)
        records.watch(f"{name}: server", staying[STAYING].pid)
        guests: list[BaseProcess] = []
        hurt: set[int | None] = set()
        quiet = 0.0
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(chance.uniform(0.2, 1.0))
            if any(process.exitcode is not None for process in staying):
                break
            for process in [each for each in guests if each.exitcode is not None]:
                guests.remove(process)
                if process.exitcode and process.pid not in hurt:
                    part.broken.append(f"a worker that nobody harmed ended with {process.exitcode}: {words(process)}")
                part.events["left"] += process.exitcode == 0
            if len(guests) < SEATS - STAYING:
                guests.append(start(None, chance.choice([20, 100, 500])))
                part.events["joined"] += 1
                continue
            guest = chance.choice(guests)
            if guest.pid in hurt or guest.pid is None or not begun(guest):
                continue
            what = chance.choice(["killed", "stalled for 1 s", "stalled too long", "nothing", "nothing"])
            # Losses one after another may add up in one step: each silence is waited for by itself.
            if what == "nothing" or (what != "killed" and time.monotonic() < quiet):
                continue
            quiet = quiet if what == "killed" else time.monotonic() + LOST_AFTER_S + GRACE_S
            part.events[what] += 1
            if what == "killed":
                hurt.add(guest.pid)
                guest.kill()
            elif what == "stalled for 1 s":
                _stop(guest.pid, 1.0)
            else:
                hurt.add(guest.pid)
                threading.Thread(target=_stop, args=(guest.pid, LOST_AFTER_S + 2.0), daemon=True).start()
        Path(folder, "over").touch()
        for guest in guests:
            if not begun(guest):  # it may come when the server has gone, and would wait for one
                guest.kill()
        began = time.monotonic()
        for process in [*staying, *guests]:
            process.join(max(began + LOST_AFTER_S + PATIENCE_S - time.monotonic(), 0.0))
        for process in [*staying, *guests]:
            if process.exitcode is None or (process in staying and process.exitcode):
                part.broken.append(f"a process ended with {process.exitcode}: {words(process)}")
            process.kill()
            process.join()
        part.limit_s += records.late_s
        seen: dict[str, set[str]] = defaultdict(set)
        for path in Path(folder).glob("steps.*"):
            for line in path.read_text().splitlines():
                clock, bits, waited = line.split()
                seen[clock].add(bits)
                if int(path.suffix[1:]) not in hurt:
                    part.waited(float(waited), "a step")
        part.events["steps"] = len(seen)
        if isinstance(policy, BSP) and any(len(bits) > 1 for bits in seen.values()):
            part.broken.append("workers of a step saw different weights")


def _stop(pid: int, seconds: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)


# Elastic training.


def train(path: str, model: str, optimizer: str, until: int) -> None:
    """Train up to a step and let go of everything: a trainer is a circle of objects, so it goes with a collection.

    What the allocator keeps for later is given back: it is not what the trainer holds.
    """
    elastic_workers.run(path, model=model, optimizer=optimizer, until=until)
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # glibc's
        ctypes.CDLL(None).malloc_trim(0)


def elastic(part: Part, records: Records, seconds: float, seed: int) -> None:
    """Train jobs that are resized at random steps; compare their bits with those of a run of one size."""
    chance, crew = random.Random(f"elastic {seed}"), Crew(elastic_workers.WORKERS)
    part.limit_s = PATIENCE_S
    for rank, process in enumerate(crew._processes):
        records.watch(f"elastic: process {rank}", process.pid)
    last = 30

    @functools.cache
    def reference(model: str, optimizer: str) -> dict[str, str]:
        path = f"{folder}/reference-{model}-{optimizer}"
        segment(path, 4, last, model, optimizer)
        return elastic_workers.bits(path)

    def segment(path: str, size: int, until: int, model: str, optimizer: str) -> None:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as store:
            crew.run(elastic_workers._in_group, size, f"{store}/store", train, (path, model, optimizer, until))
        part.waited(time.monotonic() - began, "a part of a run")

    with tempfile.TemporaryDirectory() as folder:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            model = chance.choice(sorted(elastic_workers.MODELS)), chance.choice(sorted(elastic_workers.OPTIMIZERS))
            wanted = reference(*model)
            path = Path(folder, f"run-{part.events['runs with equal bits']}")
            stops = sorted({*chance.sample(range(1, last), 4), last})
            for until in stops:
                segment(str(path), chance.randint(1, elastic_workers.WORKERS), until, *model)
                part.events["resized"] += until != last
            part.events["runs with equal bits"] += 1
            if elastic_workers.bits(path) != wanted:
                part.broken.append(f"{model} stopped after {stops}: other bits than without")
            path.unlink()
    crew.close()


# Live balancing.


def advance(rank: int, epochs: int, seed: int, job: list[Any] = []) -> tuple[list[list[int]], str, list[int]]:  # noqa: B006
    """Go on with this rank's job; return the samples of each epoch, the parameters' bits and the sizes."""
    if not job:
        options = balance_workers.BalanceOptions(timeout_s=30.0, interval_s=0.0)
        model, optimizer, balancer = balance_workers.job(320, total_batch=32, options=options)
        job += [model, optimizer, balancer, balancer.dataloader(seed=5), 0]
    model, optimizer, balancer, loader, epoch = job
    seen = []
    for number in range(epoch, epoch + epochs):
        balancer.set_epoch(number)
        model.module.per_sample_s = random.Random(f"{seed} {rank} {number // 3}").uniform(0.2, 2.0) / 1000
        seen.append([])
        for features, labels in loader:
            optimizer.zero_grad()
            balancer.loss(nn.functional.cross_entropy(model(features), labels)).backward()
            optimizer.step()
            seen[-1] += features[:, 0].long().tolist()
    job[4] += epochs
    bits = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.module.state_dict().values()))
    return seen, bits.hexdigest(), list(balancer.sizes)


def balance(part: Part, records: Records, seconds: float, seed: int) -> None:
    """Train one job with speeds that change every three epochs."""
    crew = Crew(3)
    part.limit_s = PATIENCE_S
    for rank, process in enumerate(crew._processes):
        records.watch(f"balance: rank {rank}", process.pid)
    end, sizes = time.monotonic() + seconds, []
    while time.monotonic() < end:
        began = time.monotonic()
        found = crew.run(advance, 3, seed)
        part.waited(time.monotonic() - began, "three epochs")
        for epoch in zip(*(seen for seen, _, _ in found), strict=True):
            part.events["epochs"] += 1
            if sorted(number for mine in epoch for number in mine) != list(range(320)):
                part.broken.append("an epoch did not see every sample once")
        if len({bits for _, bits, _ in found}) > 1:
            part.broken.append("ranks have different weights")
        part.events["resized"] += sizes != found[0][2]
        sizes = found[0][2]
    crew.close()


PARTS: dict[str, Callable[[Part, Records, float, int], None]] = {
    "lockstep": lambda part, records, seconds, seed: serving(part, records, "lockstep", BSP(), seconds, seed),
    "supersteps": lambda part, records, seconds, seed: serving(
        part, records, "supersteps", ElasticBSP(4), seconds, seed
    ),
    "elastic": elastic,
    "balance": balance,
}


def told(part: Part, name: str, records: Records, seconds: float, seed: int) -> None:
    """Run a part; what it raises is a broken promise."""
    try:
        PARTS[name](part, records, seconds, seed)
    except (Exception, AssertionError) as error:
        part.broken.append(f"{type(error).__name__}: {error}"[-2000:])


def rows(records: Records) -> Iterator[tuple[str, bool]]:
    """Yield the table's rows of resources, and whether something grew."""
    units = {"memory": 2**20}
    for name in records.processes:
        cells, any_grew = [], False
        for what in ("memory", "threads", "files", "sockets"):
            values = records.samples[name, what]
            quarter = max(len(values) // 4, 1)
            before, after = (
                statistics.median(part) for part in (values[quarter : 2 * quarter] or [0], values[-quarter:])
            )
            more = rise(values) > SLACK_BYTES if what == "memory" else grew(values)
            any_grew |= more
            unit = units.get(what, 1)
            cells.append(
                f"{before / unit:.{1 if unit > 1 else 0}f} → {after / unit:.{1 if unit > 1 else 0}f}{' grew' * more}"
            )
        yield f"| {name} | {' | '.join(cells)} |", any_grew


def main() -> int:
    """Run the jobs beside each other and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    names, records = given.parts.split(","), Records()
    multiprocessing.get_context("forkserver").set_forkserver_preload([])
    # What this file imports, which every process would import again by itself.
    workers = (
        "tests.helpers.elastic_workers",
        "tests.helpers.balance_workers",
        "tests.helpers.transfer_workers",
        "ddltool.runtime.servers",
    )
    forking().set_forkserver_preload(["torch._dynamo", "scipy.stats", *workers])
    forkserver.ensure_running()
    parts = {name: Part() for name in names}
    threads = [
        threading.Thread(target=told, args=(parts[name], name, records, given.seconds, given.seed)) for name in names
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + given.seconds
    while time.monotonic() < end and any(thread.is_alive() for thread in threads):
        records.sleep(min(given.seconds / 200, 5.0))
        records.sample()
    for thread in threads:
        thread.join()
    failed = False
    print("| process | memory, MiB | threads | files | sockets |", "|---|---|---|---|---|", sep="\n")
    for row, more in rows(records):
        print(row)
        failed |= more
    print("", "| job | what happened | longest wait, s | allowed, s |", "|---|---|---|---|", sep="\n")
    for name, part in parts.items():
        happened = ", ".join(f"{count:,} {what}" for what, count in sorted(part.events.items()))
        print(f"| {name} | {happened} | {part.longest_s:.1f} | {part.limit_s:.1f} |")
    for name, part in parts.items():
        for line in dict.fromkeys(part.broken):
            print(f"error: {name}: {line}", file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
