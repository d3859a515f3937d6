"""What goes wrong on a parameter server, and what it costs: kills, a stall, NaN, overflow, SIGTERM to the whole job.

    python benchmarks/bench_sync_faults.py [--models bsp,elastic] [--faults kill-worker,nan] [--stall 30] [--repeat 3]
        [--json FILE]

Three workers with steps of 20 ms (a sleep, beside a small network on random data) and one server, each a process of its
own. In step 20 of worker 1 (kill-last: of each worker) the fault happens. Printed are: the longest time between two
steps of the other workers from then on, how each process ended (the first words of its error), the seconds from the
fault until all had ended, what the server lost, and how many processes were left (always 0: they are counted before
anything is cleaned up). At the end a table of the worst of all runs, in Markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddltool.errors import DdlToolError
from ddltool.runtime.processes.stopping import Terminated
from ddltool.runtime.servers import BSP, ElasticBSP, Meeting, Server, SyncPolicy, TransferPlan, Worker

MODELS: dict[str, SyncPolicy] = {"bsp": BSP(), "elastic": ElasticBSP(4)}
FAULTS = ("kill-worker", "nan", "raise", "stall", "overflow", "kill-server", "kill-last", "term-all")
WORKERS, CULPRIT, FAULT_AT, STEPS = 3, 1, 20, 60
STEP_S = 0.02


def work(
    pipe: Connection, model: nn.Module, plan: TransferPlan, policy: SyncPolicy, meeting: Meeting, run: dict[str, Any]
) -> None:
    """Train; send the time of every step."""
    rank = meeting.rank
    checkpoint = Path(run["folder"], f"last.pt.{rank}")
    with Worker(model, plan, policy, checkpoint=checkpoint, meeting=meeting) as worker:
        for number in range(STEPS):
            if number == FAULT_AT and (rank == CULPRIT or run["fault"] == "kill-last"):
                pipe.send(("fault", time.monotonic()))
                if run["fault"] in ("kill-worker", "kill-last"):
                    os.kill(os.getpid(), signal.SIGKILL)
                if run["fault"] == "kill-server":
                    os.kill(run["pids"][WORKERS], signal.SIGKILL)
                if run["fault"] == "term-all":
                    for pid in sorted(run["pids"], key=os.getpid().__eq__):  # this process last
                        os.kill(pid, signal.SIGTERM)
                if run["fault"] == "stall":
                    time.sleep(run["stall"])
            with worker.step():
                if rank == CULPRIT and number == FAULT_AT and run["fault"] == "raise":
                    raise RuntimeError("a bad batch")
                loss = model(torch.ones(4, 32)).pow(2).mean()
                if rank == CULPRIT and number == FAULT_AT and run["fault"] == "nan":
                    loss = loss * float("nan")
                if number == FAULT_AT and run["fault"] == "overflow":
                    loss = loss + 2.5e38 * sum(value.sum() for value in model.parameters())
                time.sleep(STEP_S)
                loss.backward()
            pipe.send(("step", time.monotonic()))


def enter(pipe: Connection, rank: int, name: str, run: dict[str, Any]) -> None:
    """Run one process of a job and send how it ended."""
    torch.set_num_threads(1)
    run["pids"][rank] = os.getpid()
    meeting = Meeting(rank=rank, address=f"127.0.0.1:{run['port']}", token="benchmark")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    plan = TransferPlan.for_model(model, workers=WORKERS, servers=1)
    lost: dict[int, str] = {}
    try:
        if rank < WORKERS:
            work(pipe, model, plan, MODELS[name], meeting, run)
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            server = Server(model, plan, optimizer, MODELS[name], meeting=meeting)
            try:
                server.serve()
            finally:
                lost = server.lost
        ending = "done"
    except (DdlToolError, RuntimeError, Terminated) as error:
        ending = f"{type(error).__name__}: {error}"
    pipe.send(("end", time.monotonic(), ending, lost))


def measure(name: str, fault: str, stall: float) -> dict[str, Any]:
    """Run one job and return what happened."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ddltool.runtime.servers"])
    with tempfile.TemporaryDirectory() as folder, socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # kept for the server, which listens there
        port.bind(("127.0.0.1", 0))
        run = {"port": port.getsockname()[1], "folder": folder, "fault": fault, "stall": stall}
        run["pids"] = context.Array("q", WORKERS + 1)
        crew = []
        for rank in range(WORKERS + 1):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=enter, args=(theirs, rank, name, run), daemon=True)
            process.start()
            theirs.close()
            crew.append((process, ours))
        seen = [listen(pipe) for _, pipe in crew]
        for process, _ in crew:
            process.join(5)
        left = sum(process.is_alive() for process, _ in crew)
        files = sorted(path.name for path in Path(folder).glob("last.pt*"))
    fault_s = max(each[1] for events in seen for each in events if each[0] == "fault")
    gaps = [
        later[1] - max(earlier[1], fault_s)
        for rank, events in enumerate(seen[:WORKERS])
        if rank != CULPRIT
        for earlier, later in itertools.pairwise(events)
        if earlier[0] == later[0] == "step" and later[1] > fault_s
    ]
    ends = [next((each for each in events if each[0] == "end"), None) for events in seen]
    return {
        "model": name,
        "fault": fault,
        "others_longest_gap_s": max(gaps, default=None),
        "endings": ["killed" if end is None else end[2] for end in ends],
        "all_ended_s": max(end[1] for end in ends if end is not None) - fault_s,
        "lost": {} if ends[-1] is None else ends[-1][3],
        "checkpoints": files,
        "processes_left": left,
    }


def listen(pipe: Connection) -> list[tuple[Any, ...]]:
    """Return what a process says, up to its "end"; that of a process that was killed has none."""
    said = []
    with contextlib.suppress(EOFError):  # the other end of the pipe closes with the process, however that ends
        while not said or said[-1][0] != "end":
            said.append(pipe.recv())
    return said


def show(row: dict[str, Any]) -> None:
    """Print one run."""
    gap = row["others_longest_gap_s"]
    others = "-" if gap is None else f"{gap:.2f} s"
    print(
        f"{row['model']:8} {row['fault']:12} others' longest gap {others:>8}, "
        f"all ended after {row['all_ended_s']:.2f} s, "
        f"{row['processes_left']} processes left, checkpoints {row['checkpoints'] or 'none'}"
    )
    for rank, ending in enumerate(row["endings"]):
        print(f"    {f'worker {rank}' if rank < WORKERS else 'server':8} {ending.splitlines()[0][:110]}")
    for rank, reason in row["lost"].items():
        print(f"    lost     worker {rank}: {reason.splitlines()[0][:110]}", flush=True)


def summarise(rows: list[dict[str, Any]]) -> None:
    """Print the worst of the runs of each model and fault."""
    print(f"\nworst of {len(rows) // len({(row['model'], row['fault']) for row in rows})} runs each\n")
    print("| fault | model | longest step of the others, s | all ended after, s | checkpoints | processes left |")
    print("|---|---|---|---|---|---|")
    for name, fault in dict.fromkeys((row["model"], row["fault"]) for row in rows):
        runs = [row for row in rows if (row["model"], row["fault"]) == (name, fault)]
        gaps = [row["others_longest_gap_s"] for row in runs]
        longest = "-" if None in gaps else f"{max(gaps):.2f}"
        ended = max(row["all_ended_s"] for row in runs)
        saved, left = min(len(row["checkpoints"]) for row in runs), max(row["processes_left"] for row in runs)
        print(f"| {fault} | {name} | {longest} | {ended:.2f} | {saved} | {left} |")


def main() -> None:
    """Run every fault under every model and print what happened."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--stall", type=float, default=30.0, help="seconds")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    for fault in given.faults.split(","):
        for name in given.models.split(","):
            for _ in range(given.repeat):
                rows.append(measure(name, fault, given.stall))
                show(rows[-1])
    summarise(rows)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
