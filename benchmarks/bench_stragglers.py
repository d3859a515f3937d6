"""Faults injected into real ranks: does ``ddltool stragglers`` name rank and cause; clean runs; what a remedy wins.

    python benchmarks/bench_stragglers.py [--runs 10] [--kinds clean,link] [--seed 0]     # faults, 4 ranks over gloo
    python benchmarks/bench_stragglers.py --gain                                          # balanced batches, elastic barriers
    python benchmarks/bench_stragglers.py --overhead                                      # what a watch costs

Each run trains 18 steps under the profiler, 16 of them in the traces; which rank has the fault is drawn with the seed. A slow
link is a rank's own network namespace behind a bridge, at 20 Mbit/s (root on Linux; left out elsewhere). The device of
``--gain`` sleeps for each sample, one rank three times as long, so that the machine's other work does not matter.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset

from ddltool import runtime
from ddltool.analyzers.job.balancing.sizing import proportional
from ddltool.analyzers.job.diagnosing.diagnosis import diagnose
from ddltool.analyzers.job.diagnosing.traces import of_traces
from ddltool.analyzers.step.measured.ranks import RankSteps, of_telemetry
from ddltool.artifacts import save
from ddltool.commands.barrier import LOOKAHEAD, barrier
from ddltool.plans import Enforcement, RankEnforcement
from ddltool.runtime.servers import BSP, ElasticBSP, Server, SyncPolicy, TransferPlan, Worker
from ddltool.tables import read_table

RANKS, WIDTH, BATCH, STEPS = 4, 128, 64, 18
SLEEP_S = 0.1
CAUSES = {
    "clean": None,
    "backward": "slow device",
    "cpu": "slow device",
    "loader": "slow input",
    "sequences": "uneven work",
    "pauses": "pauses",
    "checkpoint": "pauses",
    "drift": "thermal drift",
    "link": "slow link",
}
"""What is injected, and what it is to be called."""
# Stops the process for a while, lets it run for a while, as a CPU quota does; stops it longer with each line that it reads.
_LIMIT = """
import os, select, signal, sys, time
target, (run, stop, more) = int(sys.argv[1]), map(float, sys.argv[2:])
while os.getppid() == target:
    if more and select.select([0], [], [], 0)[0]: stop += more * len(os.read(0, 99))
    os.kill(target, signal.SIGSTOP); time.sleep(stop)
    os.kill(target, signal.SIGCONT); time.sleep(run)
"""


class Samples(Dataset[Tensor]):
    """Rows of one length; ``wait_s`` before each batch's first."""

    def __init__(self, length: int, wait_s: float) -> None:
        self.length, self.wait_s = length, wait_s

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, row: int) -> Tensor:
        if self.wait_s and row % BATCH == 0:
            time.sleep(self.wait_s)
        return torch.zeros(self.length, WIDTH)


def train(rank: int, fault: str, slow: int, folder: Path) -> None:
    """Train for ``STEPS`` steps, the first two of them not profiled; rank ``slow`` has the fault."""
    torch.manual_seed(0)
    mine = fault if rank == slow else "clean"
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(6)))
    if mine == "backward":
        model[3].register_full_backward_hook(lambda *_: time.sleep(SLEEP_S))
    replica = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(replica.parameters(), lr=1e-4)
    loader = DataLoader(Samples(24 if mine == "sequences" else 4, SLEEP_S if mine == "loader" else 0.0), BATCH)
    heap = [[number] for number in range(600_000)] if mine == "pauses" else []
    state = torch.zeros(16 << 20) if mine == "checkpoint" else None
    gc.disable()
    limit = None
    if mine in ("cpu", "drift"):
        # Heat slows every operation: in slices much shorter than a step.
        pace = ("0.01", "0.03", "0") if mine == "cpu" else ("0.002", "0.0004", "0.0004")
        words = [sys.executable, "-c", _LIMIT, str(os.getpid()), *pace]
        limit = subprocess.Popen(words, stdin=subprocess.PIPE)

    def export(run: Any) -> None:
        run.export_chrome_trace(str(folder / f"rank{rank}.json"))

    timing = schedule(wait=1, warmup=1, active=STEPS - 2, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=timing, on_trace_ready=export) as run:
        for step, rows in enumerate(loader):
            optimizer.zero_grad()
            replica(rows).square().mean().backward()
            if heap and step % 4 == 3:
                gc.collect()
            optimizer.step()
            if state is not None and step % 5 == 4:
                torch.save(state, folder / "checkpoint.pt")
            if limit is not None and limit.stdin is not None:
                limit.stdin.write(b"s")
                limit.stdin.flush()
            run.step()
    gc.enable()
    if limit is not None:
        limit.kill()
        limit.wait()
        os.kill(os.getpid(), signal.SIGCONT)
    if state is not None:
        (folder / "checkpoint.pt").unlink()


def run_cases(folder: Path, world: int, cases: Sequence[tuple[str, int]], device: str = "lo") -> list[Path]:
    """Run the cases (fault, slow rank) in ``world`` processes, one after the other; return the folder of each one's traces."""
    folders = [folder / f"{place}-{fault}" for place, (fault, _) in enumerate(cases)]
    given = [(fault, slow, str(where)) for (fault, slow), where in zip(cases, folders, strict=True)]
    start(_cases, world, device, given)
    return folders


def start(body: Callable[..., None], world: int, device: str, *args: object) -> None:
    """Run ``body(rank, *args)`` in ``world`` processes over gloo; on another device than lo each in a namespace of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(_rank, (world, device, port, body, args), nprocs=world, start_method="spawn")


def _rank(rank: int, world: int, device: str, port: int, body: Callable[..., None], args: tuple[object, ...]) -> None:
    if device != "lo":
        with open(f"/run/netns/{device}{rank}") as space:
            if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")
    address = "127.0.0.1" if device == "lo" else "10.99.0.1"
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo" if device == "lo" else "eth"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    body(rank, *args)
    dist.barrier()
    dist.destroy_process_group()


def _cases(rank: int, cases: Sequence[tuple[str, int, str]]) -> None:
    for fault, slow, folder in cases:
        Path(folder).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        train(rank, fault, slow, Path(folder))


@contextlib.contextmanager
def slow_link(slow: int, mbit: float = 20.0) -> Iterator[str]:
    """Make a namespace for each rank behind one bridge, one of them with a slow link; yield what their names begin with."""
    prefix = f"dds{os.getpid()}-"
    hub = f"{prefix}hub"

    def shell(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True, text=True)

    try:
        shell("ip", "netns", "add", hub)
        shell("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        shell("ip", "-n", hub, "link", "set", "bridge", "up")
        for rank in range(RANKS):
            name, port = f"{prefix}{rank}", f"p{rank}"
            shell("ip", "netns", "add", name)
            shell("ip", "link", "add", "eth", "netns", name, "type", "veth", "peer", "name", port, "netns", hub)
            shell("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
            shell("ip", "-n", name, "addr", "add", f"10.99.0.{rank + 1}/24", "dev", "eth")
            for device in ("eth", "lo"):
                shell("ip", "-n", name, "link", "set", device, "up")
            if rank == slow:
                shape = ("root", "tbf", "rate", f"{mbit:g}mbit", "burst", "32kb", "latency", "200ms")
                shell("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth", *shape)
                shell("ip", "netns", "exec", hub, "tc", "qdisc", "add", "dev", port, *shape)
        yield prefix
    finally:
        for name in (hub, *(f"{prefix}{rank}" for rank in range(RANKS))):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def named(folder: Path) -> list[tuple[int | None, str]]:
    """Return the ranks and causes that the traces in a folder give."""
    found = diagnose(of_traces(sorted(folder.glob("*.json"))), "traces").findings
    return [(one.rank, one.cause) for one in found]


def faults(kinds: Sequence[str], runs: int, seed: int, folder: Path) -> None:
    """Print right and wrong for each kind."""
    draw = random.Random(seed)
    print("| injected | to be named | right | instead |\n|---|---|---|---|")
    for kind in kinds:
        slow = [draw.randrange(RANKS) for _ in range(runs)]
        try:
            if kind == "link":
                found = []
                for number, rank in enumerate(slow):
                    with slow_link(rank) as prefix:
                        found += map(named, run_cases(folder / f"link{number}", RANKS, [("clean", rank)], prefix))
            else:
                found = list(map(named, run_cases(folder / kind, RANKS, [(kind, rank) for rank in slow])))
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"| {kind} | {CAUSES[kind]} | not run: {error} | |", flush=True)
            continue
        cause = CAUSES[kind]
        right = [one[:1] == ([] if cause is None else [(rank, cause)]) for one, rank in zip(found, slow, strict=True)]
        wrong = [f"{rank}: {one}" for one, rank, good in zip(found, slow, right, strict=True) if not good]
        print(f"| {kind} | {cause or 'nobody'} | {sum(right)} of {runs} | {'; '.join(wrong)} |", flush=True)
        shutil.rmtree(folder / kind, ignore_errors=True)


# ---------------------------------------------------------------- what the remedies win

SAMPLE_S = {"device": (0.0005, 0.0015, 0.0005, 0.0005), "devices": (0.0005, 0.0010, 0.0007, 0.0005)}
"""What a sample takes on each rank: one slow device, and devices of three speeds."""
GAIN_STEPS = 50


def gain(folder: Path) -> None:
    """Print what the verdict and its commands predict of balanced batches and of elastic barriers, and what these win."""
    print("| ranks | remedy | predicted | measured |\n|---|---|---|---|")
    for name, sample_s in SAMPLE_S.items():
        equal = [32] * RANKS
        (where := folder / name).mkdir()
        before, wall_s = measured_step(where, sample_s, equal)
        found = diagnose(before, "telemetry")
        print(found.verdict, file=sys.stderr)
        sizes = proportional(before.speed().mean(axis=1), sum(equal)).tolist()
        after, _ = measured_step(where, sample_s, sizes)
        won = 1 - float(np.median(after.step_s[:, 5:])) / float(np.median(before.step_s[:, 5:]))
        print(
            f"| {name} | batches {sizes} | {found.findings[0].predicted_gain or 0.0:.1%} of a step | {won:.1%} |",
            flush=True,
        )
        rates = barrier(where / "telemetry-before.jsonl")
        chosen, bsp = rates.algorithms["zipline"], rates.bsp
        predicted = (chosen.iterations_per_s or 0.0) / (bsp.iterations_per_s or 1.0) - 1
        elastic, served = (served_rate(where, sample_s, one) for one in (ElasticBSP(LOOKAHEAD), BSP()))
        iterations = "-".join(map(str, chosen.iterations.values()))
        against = f"{elastic / served - 1:+.1%}; against DDP {elastic / (RANKS / wall_s) - 1:+.1%}"
        print(f"| {name} | elastic barrier {iterations} | {predicted:+.1%} iterations/s | {against} |", flush=True)


def measured_step(folder: Path, sample_s: Sequence[float], sizes: Sequence[int]) -> tuple[RankSteps, float]:
    """Return a run's telemetry as steps of ranks, and the wall-clock seconds of a step."""
    start(_synchronous, RANKS, "lo", str(folder), sample_s, sizes)
    if not (kept := folder / "telemetry-before.jsonl").exists():
        shutil.copy(folder / "telemetry.jsonl", kept)
    run = of_telemetry(read_table(folder / "telemetry.jsonl"), "telemetry")
    return run, float(np.median(run.step_s[:, 5:]))


def _synchronous(rank: int, folder: str, sample_s: Sequence[float], sizes: Sequence[int]) -> None:
    os.chdir(folder)
    model = nn.Linear(WIDTH, WIDTH)
    model.register_forward_hook(lambda *_: time.sleep(sample_s[rank] * sizes[rank]))
    replica = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=1e-4)
    ranks = [RankEnforcement(rank=r, device_type="cpu", ests=1, local_batch_size=n) for r, n in enumerate(sizes)]
    config = Enforcement(job="gain", strategy="lb-bsp", world_size=RANKS, total_batch_size=sum(sizes), ranks=ranks)
    if rank == 0:
        save(config, Path("enforce.json"))
    dist.barrier()
    with runtime.attach("enforce.json", model=replica, optimizer=optimizer) as hook:
        for _ in range(GAIN_STEPS):
            optimizer.zero_grad()
            hook.loss(replica(torch.zeros(sizes[rank], WIDTH, requires_grad=True)).square().mean()).backward()
            optimizer.step()


def served_rate(folder: Path, sample_s: Sequence[float], policy: SyncPolicy) -> float:
    """Return the iterations a second of the ranks as workers of one server."""
    start(_served, RANKS + 1, "lo", str(folder), sample_s, policy)
    return sum(float(file.read_text()) for file in folder.glob("rate*"))


def _served(rank: int, folder: str, sample_s: Sequence[float], policy: SyncPolicy) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    plan = TransferPlan.for_model(model, workers=RANKS, servers=1)
    if rank == RANKS:
        Server(model, plan, torch.optim.SGD(model.parameters(), lr=1e-4), policy).serve()
        return
    model.register_forward_hook(lambda *_: time.sleep(sample_s[rank] * 32))
    ends = []
    with Worker(model, plan, policy) as worker:
        while len(ends) < 10 or ends[-1] - ends[0] < GAIN_STEPS * max(sample_s) * 32:
            with worker.step():
                model(torch.zeros(32, WIDTH, requires_grad=True)).square().mean().backward()
            ends.append(time.monotonic())
    # The first supersteps are BSP's: nothing is known of the lengths then.
    late = [end for end in ends if end - ends[0] > 0.2 * (ends[-1] - ends[0])]
    (Path(folder) / f"rate{rank}").write_text(str((len(late) - 1) / (late[-1] - late[0])))


# ---------------------------------------------------------------- what a watch costs


def overhead(folder: Path) -> None:
    """Print the CPU time of steps with a watch against steps without one, in turns of 100."""
    start(_watched, RANKS, "lo", str(folder))


def _watched(rank: int, folder: str) -> None:
    os.chdir(folder)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(3)))
    replica = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=1e-4)
    hook = runtime.attach(None, model=replica, optimizer=optimizer, telemetry="telemetry.jsonl")
    watch = runtime.watch_ranks(hook, every=50)
    assert hook.recorder is not None
    spent: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(24):
        on = turn % 2 == 0
        hook.recorder.watch = watch if on else None
        begin = time.process_time()
        for _ in range(50):
            optimizer.zero_grad()
            replica(torch.zeros(32, 1024)).square().mean().backward()
            optimizer.step()
        spent[on].append(time.process_time() - begin)
    ratio = [with_ / without for with_, without in zip(spent[True], spent[False], strict=True)]
    if rank == 0:
        share = watch.cost_s / (statistics.median(spent[False]) / 50 * watch.stretch)
        print(f"CPU of steps with a watch / without: median {statistics.median(ratio):.4f} of {len(ratio)} pairs")
        print(f"a look takes {watch.cost_s * 1e3:.2f} ms every {watch.stretch} steps: {share:.3%} of rank 0's CPU time")


def main() -> None:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--kinds", default=",".join(CAUSES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gain", action="store_true")
    parser.add_argument("--overhead", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.gain:
            gain(Path(folder))
        elif given.overhead:
            overhead(Path(folder))
        else:
            faults(given.kinds.split(","), given.runs, given.seed, Path(folder))


if __name__ == "__main__":
    main()
