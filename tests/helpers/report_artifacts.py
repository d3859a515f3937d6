"""One file of every kind that ``ddltool report`` shows, made by ddltool's own commands where one writes it."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ddltool.commands.main import run
from ddltool.results import NetworkPair, NetworkResult
from ddltool.shipped import folder
from ddltool.telemetry import BarrierRow, LeftRow, StepRow, SummaryRow, TelemetryRow

STRATEGIES = ("est", "bsp", "lb-bsp", "elastic-bsp", "auto")
JOB = """
kind: ddltool.job
name: mixed
max_workers: 8
batch_size: 32
devices:
  - {type: V100, count: 4, capability_per_s: 3.1}
  - {type: P100, count: 4, capability_per_s: 2.4}
constraints: {max_devices: 6}
"""
TUNED = """
kind: ddltool.job
name: tuned
max_workers: 8
batch_size: 32
devices: [{type: T4, count: 8, goodput: goodput.json}]
goodput: {noise_scale: 5000, initial_batch_size: 128, max_batch_size: 4096, max_local_batch_size: 512, epoch_samples: 50000}
"""


KNOBS = """
import sys, torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batch = int(sys.argv[2]) if len(sys.argv) > 2 else 2
while True:
    model(torch.randn(batch, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def artifacts_in(place: Path) -> list[Path]:
    """Return the paths of the artifacts in a folder made by :func:`write_all`, or in a copy of one."""
    left_out = {"job.yaml", "tuned.yaml", "speeds.csv", "lengths.txt", "knobs.py"}
    return sorted(path for path in place.iterdir() if path.name not in left_out)


def write_all(place: Path) -> None:
    """Write an artifact of every kind, and plans of every strategy and of a command."""
    with _inside(place):
        shutil.copy(folder() / "graphs" / "toy-figure1.graph.json.gz", "toy.json.gz")
        shutil.copy(folder() / "graphs" / "cifarnet-training.graph.json.gz", "graph.json.gz")
        Path("job.yaml").write_text(JOB)
        Path("tuned.yaml").write_text(TUNED)
        write_profile(Path("profile.csv"))
        _do("fit", "profile.csv", "-o", "goodput.json")
        for strategy in STRATEGIES:
            extra = ["--graph", "graph.json.gz"] if strategy in ("est", "auto") else []
            extra += ["--top-k", "2"] if strategy == "est" else []
            _do("plan", "job.yaml", "--strategy", strategy, *extra, "-o", f"plan-{strategy}.json")
        _do("plan", "tuned.yaml", "--strategy", "goodput", "-o", "plan-goodput.json")
        Path("knobs.py").write_text(KNOBS)
        tried = ["--devices", "1xH100", "--vary", "--batch-size 4,8"]
        _do("plan", *tried, "-o", "command-plan.json", "--", "python", "knobs.py")
        islands = ["--devices", "1xV100+1xT4", "--link-between", "100Mbit", "--outer-every", "1,8"]
        _do("plan", "zoo:cifarnet", *islands, "-o", "islands_plan.json")
        _do("emit", "plan-est.json", "-o", "enforce.json")
        ranks = len(json.loads(Path("enforce.json").read_text())["ranks"])
        write_telemetry(Path("telemetry.jsonl"), ranks=ranks)
        write_telemetry(Path("agent.jsonl"), ranks=ranks, agent=True)
        _do("stragglers", "telemetry.jsonl", "-o", "stragglers.json")
        _do("verify", "plan-est.json", "telemetry.jsonl", "-o", "verification.json", code=1)
        write_sync(Path("sync.jsonl"))
        write_network(Path("network.json"))
        _do("barrier", str(folder() / "barrier" / "times.csv"), "--algorithm", "all", "-o", "barrier.json")
        with gzip.open(folder() / "balance" / "recorded-4.csv.gz", "rt") as file:
            header, *rows = file
        Path("speeds.csv").write_text(header + "".join(row for row in rows if int(row.split(",")[0]) < 150))
        _do("balance", "speeds.csv", "--predictor", "last", "--schemes", "-o", "balance.json")
        Path("lengths.txt").write_text("".join(f"{1 + 37 * index % 900}\n" for index in range(400)))
        _do("balance", "lengths.txt", "--replicas", "2", "--window", "2", "-o", "lengths.json")
        loads = folder() / "workloads"
        where = ["--cluster", str(loads / "cluster.yaml"), "--traces", str(loads / "traces")]
        _do("simulate", str(loads / "synthetic.csv"), *where, "--policy", "fifo,srtf", "-o", "simulation.json")
        workload, pair = str(loads / "synthetic.csv"), ["--policy", "fifo,srtf", "--compare", "srtf,fifo"]
        with open("sweep.json", "w") as file, contextlib.redirect_stdout(file):
            assert run(["simulate", "sweep", workload, *where, *pair, "--seeds", "2", "--json"]) == 0
        with (
            open("gate.json", "w") as file,
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(file),
            contextlib.redirect_stderr(nowhere),
        ):
            run(["gate", "plan-est.json", "--baseline", "plan-bsp.json", "--json"])  # exit 1: the checks fail


def _do(*arguments: str, code: int = 0) -> None:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        ended = run(list(arguments))
    assert ended == code, arguments


@contextlib.contextmanager
def _inside(place: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(place)
    try:
        yield
    finally:
        os.chdir(before)


def write_profile(path: Path) -> None:
    """Write times of a known model with 2 % of noise."""
    rng = np.random.default_rng(0)
    rows = ["device,num_nodes,num_replicas,local_batch_size,step_time_s,sync_time_s,peak_memory_bytes"]
    for nodes, replicas in ((1, 1), (1, 2), (1, 4), (2, 8)):
        for batch in (16, 32, 64, 128):
            sync = 0.0 if replicas == 1 else 0.01 * nodes + 0.002 * (replicas - 2)
            step = (0.02 + 0.001 * batch + sync) * np.exp(rng.normal(0, 0.02))
            rows.append(f"T4,{nodes},{replicas},{batch},{step:.6f},{sync:.6f},{2e9 + 1e7 * batch:.0f}")
    path.write_text("\n".join(rows) + "\n")


def write_telemetry(path: Path, *, ranks: int = 4, steps: int = 60, agent: bool = False, device: str = "V100") -> None:
    """Write rows of ``ranks`` processes whose batches change once; an agent's rows say more."""
    rng = np.random.default_rng(1)
    lines = []
    for step in range(steps):
        batch = [64 + 8 * (rank - ranks // 2) * (step >= steps // 2) for rank in range(ranks)]
        compute = [size / 200 * float(np.exp(rng.normal(0, 0.02))) for size in batch]
        for rank in range(ranks):
            row = TelemetryRow(
                step=step,
                rank=rank,
                world_size=ranks,
                num_nodes=1,
                device=device,
                batch=batch[rank],
                total_batch=sum(batch),
                compute_s=compute[rank],
                wait_s=max(compute) - compute[rank],
                sync_s=0.03,
                step_s=max(compute) + 0.031,
                memory_bytes=2.5e9,
                learning_rate_factor=1.5 if agent else None,
                noise_scale=800.0 + step if agent else None,
            )
            lines.append(row.model_dump_json())
    path.write_text("\n".join(lines) + "\n")


def write_sync(path: Path) -> None:
    """Write what a server of a synchronisation model writes: steps, a barrier, a lost worker, the summary."""
    rows: list[StepRow | BarrierRow | LeftRow | SummaryRow] = [
        StepRow(
            time_s=0.1 * step + 0.01 * worker,
            worker=worker,
            step=step,
            wait_s=0.01 * worker,
            staleness=(step + worker) % 3,
            gap=worker,
        )
        for step in range(20)
        for worker in range(3)
    ]
    ends = {"predicted_end_s": [0.4, 0.5, 0.5], "end_s": [0.41, None, 0.5]}
    rows.append(BarrierRow(time_s=2.0, superstep=0, workers=[0, 1, 2], iterations=[5, 4, 3], length_s=0.5, **ends))
    rows.append(LeftRow(time_s=2.1, worker=1, lost=True, reason="connection closed"))
    rows.append(
        SummaryRow(
            time_s=2.2,
            policy="elastic-bsp",
            steps=[20, 20, 20],
            updates=60,
            updates_per_s=27.3,
            wait_s=[0.0, 0.2, 0.4],
            staleness={0: 20, 1: 20, 2: 20},
        )
    )
    lines = [json.loads(row.model_dump_json()) for row in rows]
    lines[0]["dropped"] = False  # a field that earlier versions wrote
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_network(path: Path) -> None:
    """Write a measurement between three processes as ``ddltool network`` writes it."""
    sizes = [float(2**power) for power in range(10, 24, 2)]
    facts = {"latency_s": 4e-5, "residual": 0.05}
    pairs = [
        NetworkPair(
            ranks=[first, second],
            bandwidth_bytes_per_s=1e9 + 1e8 * second,
            **facts,
            sizes_bytes=sizes,
            shortest_s=[4e-5 + size / 1e9 for size in sizes],
            median_s=[5e-5 + size / 1e9 for size in sizes],
            spread_s=[1e-6 for _ in sizes],
        )
        for first, second in ((0, 1), (0, 2), (1, 2))
    ]
    found = NetworkResult(processes=3, local=True, bandwidth_bytes_per_s=1.1e9, **facts, pairs=pairs)
    path.write_text(found.model_dump_json())
