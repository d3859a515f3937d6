"""Synchronisation models on real training: time to a fixed accuracy, waiting and staleness, workers of unequal speed.

    python benchmarks/bench_sync.py [--seeds 3] [--seconds 8] [--target 0.9] [--lr 0.2] [--models bsp,asp] [--json FILE]

One parameter server and four workers, each a process of its own, train a small network on scikit-learn's digits; every
run lasts the same time. The workers' inequality is made by sleeps, for they share few cores: a step sleeps for 30, 36,
48 and 90 ms (times 0.9 to 1.1, drawn anew for each step) beside its computation of a few milliseconds. With
``--change``, workers 0 and 3 change places in the middle of the run.

Every gradient has the same weight under every model: the learning rate over the number of workers. The server takes a
snapshot every 50 ms; accuracies are computed from these after the run, on the samples that were held out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import ttest_1samp
from sklearn.datasets import load_digits
from torch import Tensor, nn

from ddltool.runtime.servers import (
    ASP,
    BSP,
    SSP,
    ElasticBSP,
    Meeting,
    Server,
    SyncPolicy,
    TransferPlan,
    Worker,
    shard,
)

SLEEPS_S = (0.030, 0.036, 0.048, 0.090)
JITTER = 0.1
BATCH, TRAINED = 8, 1500
SNAPSHOT_S = 0.05
MODELS: dict[str, SyncPolicy] = {
    "bsp": BSP(),
    "asp": ASP(),
    "ssp3": SSP(3),
    "elastic15": ElasticBSP(15),
    "elastic30": ElasticBSP(30),
    "elastic60": ElasticBSP(60),
}


def make_model(seed: int) -> nn.Sequential:
    """Return the network with its first values."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def load_samples() -> tuple[Tensor, Tensor]:
    """Return the shuffled digits and their labels."""
    images, targets = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    return torch.tensor(images[order], dtype=torch.float32) / 16, torch.tensor(targets[order])


def work(model: nn.Module, plan: TransferPlan, policy: SyncPolicy, meeting: Meeting, run: dict[str, Any]) -> int:
    """Train until the time is over; return the number of steps."""
    features, labels = load_samples()
    rank, steps = meeting.rank, 0
    assert rank is not None
    chance = np.random.default_rng((run["seed"], rank))
    with Worker(model, plan, policy, meeting=meeting) as worker:
        begin_s = time.monotonic()
        for epoch in range(10**6):
            mine = torch.from_numpy(shard(TRAINED, worker.members(epoch), rank, epoch=epoch, seed=run["seed"]))
            for batch in mine.split(BATCH):
                spent_s = time.monotonic() - begin_s
                if spent_s > run["seconds"]:
                    return steps
                place = {0: 3, 3: 0}.get(rank, rank) if run["change"] and spent_s > run["seconds"] / 2 else rank
                with worker.step():
                    loss = nn.functional.cross_entropy(model(features[batch]), labels[batch])
                    time.sleep(SLEEPS_S[place] * chance.uniform(1 - JITTER, 1 + JITTER))
                    loss.backward()
                steps += 1
    return steps


def serve(
    model: nn.Module, plan: TransferPlan, policy: SyncPolicy, meeting: Meeting, run: dict[str, Any]
) -> dict[str, Any]:
    """Serve, and return figures of the run."""
    server = Server(model, plan, torch.optim.SGD(model.parameters(), lr=run["lr"]), policy, meeting=meeting)
    snapshots: list[tuple[float, int, dict[str, Tensor]]] = []
    over = threading.Event()

    def watch() -> None:
        begin_s = time.monotonic()
        while not over.wait(SNAPSHOT_S):
            steps = sum(server.steps_made)
            # The values are replaced, never written to.
            snapshots.append((time.monotonic() - begin_s, steps, dict(server.values)))

    thread = threading.Thread(target=watch)
    thread.start()
    values = server.serve()
    over.set()
    thread.join()
    features, labels = load_samples()

    def accuracy(values: dict[str, Tensor]) -> float:
        model.load_state_dict(values)
        with torch.no_grad():
            return (model(features[TRAINED:]).argmax(1) == labels[TRAINED:]).float().mean().item()

    hit = next(((time_s, steps) for time_s, steps, found in snapshots if accuracy(found) >= run["target"]), None)
    barriers = [one for one in getattr(policy, "supersteps", []) if one.predicted_end_s and one.end_s]
    return {
        "time_to_target_s": hit[0] if hit else None,
        "gradients_to_target": hit[1] if hit else None,
        "final_accuracy": accuracy(values),
        "gradients": sum(server.steps_made),
        "updates": server.updates,
        "wait_s": server.log.wait_s,
        "staleness": dict(server.log.staleness),
        "lost": server.lost,
        "barriers": [
            {"iterations": one.iterations, "predicted_s": max(one.predicted_end_s), "actual_s": max(one.end_s)}
            | {"predicted_wait_s": sum(max(one.predicted_end_s) - end_s for end_s in one.predicted_end_s)}
            | {"actual_wait_s": sum(max(one.end_s) - end_s for end_s in one.end_s)}
            for one in barriers
            if len(one.workers) == len(SLEEPS_S) and None not in one.end_s
        ],
    }


def enter(pipe: Connection, port: int, rank: int, name: str, run: dict[str, Any]) -> None:
    """Run one process of a job and send what it returns."""
    torch.set_num_threads(1)
    meeting = Meeting(rank=rank, address=f"127.0.0.1:{port}", token="benchmark")
    model, policy = make_model(run["seed"]), MODELS[name]
    plan = TransferPlan.for_model(model, workers=len(SLEEPS_S), servers=1)
    pipe.send((work if rank < plan.workers else serve)(model, plan, policy, meeting, run))


def measure(name: str, run: dict[str, Any]) -> dict[str, Any]:
    """Run one job and return its figures."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sklearn.datasets", "ddltool.runtime.servers"])  # imported once for all processes
    size, crew = len(SLEEPS_S) + 1, []
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # kept for the server, which listens there
        port.bind(("127.0.0.1", 0))
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, port.getsockname()[1], rank, name, run)
            process = context.Process(target=enter, args=arguments, daemon=True)
            process.start()
            theirs.close()
            crew.append((process, ours))
        answers = [pipe.recv() for _, pipe in crew]
        for process, _ in crew:
            process.join()
    return {"model": name, "seed": run["seed"], "steps": answers[:-1]} | answers[-1]


def median(values: list[float | None]) -> str:
    """Return the median and the range; a dash where a run never came so far."""
    if None in values:
        return f"{'-':>6}"
    found = [value for value in values if value is not None]
    return f"{statistics.median(found):6.2f} ({min(found):.2f}-{max(found):.2f})"


def show(name: str, rows: list[dict[str, Any]], seconds: float) -> None:
    """Print one line of the table."""
    times, needed = ([row[key] for row in rows] for key in ("time_to_target_s", "gradients_to_target"))
    waits = np.mean([row["wait_s"] for row in rows], axis=0) / seconds
    stale = sum((Counter(row["staleness"]) for row in rows), Counter[int]())
    mean = sum(key * count for key, count in stale.items()) / max(stale.total(), 1)
    print(
        f"{name:10} {median(times):>20} {median([n and float(n) for n in needed]):>24} "
        f"{median([100 * row['final_accuracy'] for row in rows]):>22} "
        f"{statistics.median(row['gradients'] for row in rows) / seconds:8.1f} "
        f"{' '.join(f'{100 * wait:3.0f}' for wait in waits):>16} {mean:6.2f} {max(stale):4d}",
        flush=True,
    )
    barriers = [barrier for row in rows for barrier in row["barriers"]]
    if barriers:
        errors = [abs(barrier["actual_s"] / barrier["predicted_s"] - 1) for barrier in barriers]
        waited = [sum(b[key] for b in barriers) / len(barriers) for key in ("predicted_wait_s", "actual_wait_s")]
        print(
            f"{'':10} {len(barriers)} supersteps: length {statistics.median(b['actual_s'] for b in barriers):.2f} s, "
            f"predicted end off by {100 * statistics.median(errors):.1f} % (median), waiting of all workers "
            f"{1e3 * waited[0]:.0f} ms predicted, {1e3 * waited[1]:.0f} ms actual (mean)",
            flush=True,
        )


def compare(name: str, rows: list[dict[str, Any]], base: list[dict[str, Any]]) -> None:
    """Print how much more accurate a model was than ASP, seed by seed, with Student's interval of the mean."""
    points = np.array(
        [100 * (row["final_accuracy"] - other["final_accuracy"]) for row, other in zip(rows, base, strict=True)]
    )
    low, high = ttest_1samp(points, 0.0).confidence_interval(0.95)
    print(
        f"{name:10} final accuracy less asp's, by seed: {points.mean():+.2f} points "
        f"(95 % {low:+.2f} to {high:+.2f}), above in {(points > 0).sum()} of {len(points)}"
    )


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="per run")
    parser.add_argument("--target", type=float, default=0.9, help="accuracy on the held-out samples")
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--change", action="store_true", help="the fastest and the slowest change places halfway")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(
        f"{options.seconds:g} s per run, medians of {options.seeds} seeds (range); waiting per worker as % of the run"
    )
    print(
        f"{'':10} {'s to ' + format(options.target, 'g'):>20} {'gradients to it':>24} {'final accuracy %':>22} "
        f"{'grad/s':>8} {'waiting %':>16} {'stale':>6} {'max':>4}"
    )
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in options.models.split(",")}
    for seed in range(options.seeds):  # the models take turns, so that other load on the machine meets all of them
        run = {"seed": seed, "change": options.change}
        run |= {key: getattr(options, key) for key in ("seconds", "target", "lr")}
        for name, rows in found.items():
            rows.append(measure(name, run))
            if options.json:
                options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, rows in found.items():
        show(name, rows, options.seconds)
    for name, rows in found.items():
        if name != "asp" and "asp" in found and options.seeds > 1:
            compare(name, rows, found["asp"])


if __name__ == "__main__":
    main()
