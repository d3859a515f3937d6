"""What it costs to choose batch sizes for n workers after every step: emulated with n real processes and a real store.

    python benchmarks/bench_balance_control.py                 # 4, 32 and 96 workers

n processes on this machine each report as ranks of a job do, through torch.distributed's TCPStore. Rank 0, which also runs the
store's server, chooses and tells. On n machines all but rank 0's part happens at the same time, so of this machine, with its
few cores, the figure that carries over is rank 0's: the CPU seconds of its whole process (server thread included) per step.
*Whole round* counts receiving n reports, choosing, answering and clearing up, as if nothing overlapped; the time on the wire is
not in it. *Choosing* is the decision alone.

In the background none of that is on the step's path: *hand over* is what the training thread itself pays then.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from ddltool.analyzers.job.balancing.control import Policy, SpeedPolicy, TrialPolicy
from ddltool.analyzers.job.balancing.trained import PredictorSettings
from ddltool.runtime.balancing.control import LIVE_LEARNING, Manager
from ddltool.runtime.processes.consensus import Consensus
from ddltool.runtime.processes.job import DistributedJob

STEP_S = 0.1


def policy(name: str, workers: int) -> Policy:
    if name == "algorithm2":
        return TrialPolicy([32] * workers)
    if name == "ema":
        return SpeedPolicy([32] * workers, settings=LIVE_LEARNING)
    return SpeedPolicy(
        [32] * workers, predictor=name, settings=PredictorSettings(warm_up=60, refit_every=10**6, background=True)
    )


def choosing(name: str, workers: int, rounds: int) -> float:
    """Return the median CPU seconds of one decision, trained networks included."""
    manager, chance = Manager(policy(name, workers), skip=0), np.random.default_rng(0)
    spent = []
    for number in range(rounds):
        sizes = manager._policy.sizes
        rows = np.stack(
            [sizes, sizes / chance.uniform(50, 100, workers), *chance.uniform(0.3, 0.9, (3, workers))], axis=1
        )
        begin = time.thread_time()
        manager(rows)
        spent.append(time.thread_time() - begin)
        if number == rounds // 2 and name == "narx":
            time.sleep(8)  # the training in the background
    return statistics.median(spent[rounds // 2 + 1 :])


def rounds_of(workers: int, rounds: int, port: int) -> float:
    """Return rank 0's median CPU seconds per round."""
    children, rank = [], 0
    for number in range(1, workers):
        child = os.fork()
        if child == 0:
            rank, children = number, []
            break
        children.append(child)
    store = dist.TCPStore("127.0.0.1", port, workers, rank == 0, timedelta(seconds=60), wait_for_workers=False)
    job = DistributedJob(rank=rank, world_size=workers, side=None)
    consensus = Consensus(job, Manager(policy("ema", workers)), timeout_s=60, store=store)
    chance, spent = np.random.default_rng(rank), []
    row = np.array([32.0, 0.0, 0.5, 1.0, 0.5])
    for _ in range(rounds):
        row[1] = 32 / chance.uniform(50, 100)
        begin = time.process_time()
        chosen = consensus.propose(lambda: row)
        row[0] = 32 if chosen is None else chosen[rank]
        spent.append(time.process_time() - begin)
    if rank:
        os._exit(0)
    for child in children:
        os.waitpid(child, 0)
    return statistics.median(spent[5:])


def hand_over(rounds: int) -> float:
    """Return the wall seconds per step that a training thread pays when sizes are chosen behind it (one worker)."""
    job, spent = DistributedJob(rank=0, world_size=1, side=None), []
    consensus = Consensus(job, Manager(policy("algorithm2", 1)), behind=True)
    for _ in range(rounds):
        begin = time.perf_counter()
        consensus.propose(lambda: np.array([32, 0.5, 0.5, 1.0, 0.5]))
        spent.append(time.perf_counter() - begin)
        time.sleep(0.005)
    consensus.close()
    return statistics.median(spent)


def main() -> None:
    """Measure what was asked for and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="4,32,96")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    port = 20000 + os.getpid() % 20000
    print(f"milliseconds per step, and as a share of a step of {STEP_S * 1000:.0f} ms")
    print("workers  whole round      choosing:   ema       narx    algorithm 2")
    for place, workers in enumerate(int(part) for part in options.workers.split(",")):
        whole = rounds_of(workers, options.rounds, port + place)
        chosen = [choosing(name, workers, 140) for name in ("ema", "narx", "algorithm2")]
        print(
            f"{workers:7}  {whole * 1e3:5.2f} ({whole / STEP_S:5.2%})           "
            + "  ".join(f"{value * 1e3:9.3f}" for value in chosen)
        )
    handed = hand_over(200)
    print(f"hand over, in the background: {handed * 1e3:.3f} ms ({handed / STEP_S:.3%})")


if __name__ == "__main__":
    main()
