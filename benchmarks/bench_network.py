"""Ordered transfers over a real throttled link: measured step times beside those that the simulator predicts.

    python benchmarks/bench_network.py [--rate-mbit 200] [--steps 6] [--rounds 2] [--models vgg,resnet] [--json FILE]

One worker and one parameter server, each in a network namespace of its own, joined by a veth pair whose two ends are
shaped by ``tc ... tbf`` (so each direction has the full rate). Needs root, ``ip`` and ``tc``; says so and ends with 0
where one is missing. The orders take turns in blocks of steps. "random" draws a new order for each step.

What the prediction knows, all measured in the same run but none of it with transfers and computation overlapped:

* op times: the shortest of each aten op of the step, run in eager mode before and after each block of steps, scaled so
  that they add up to the shortest step without transfers;
* the link: latency, time per transfer and rate, fitted to the arrival times of pulls without computation.

The graph is that of ``trace_torch`` with two changes, because it is what this runtime does: ops run in program order
(eager mode does not reorder), and gradients leave on a channel of their own (the link is full duplex).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ddltool.analyzers.step.tracing.step import TrainingStep, default_loss
from ddltool.analyzers.step.tracing.torch_adapter import trace_torch
from ddltool.analyzers.step.transfers.efficiency import solve_exact
from ddltool.analyzers.step.transfers.order import tac, tic
from ddltool.analyzers.step.transfers.timeline import Simulator
from ddltool.graph import COMPUTE, RECV, Graph
from ddltool.runtime.servers import BSP, Meeting, Server, TransferPlan, Worker

WORKER_IP, SERVER_IP, PORT = "10.99.7.1", "10.99.7.2", 29517
RANDOM, MODES = "random", ("inference", "training")
ORDERS = (RANDOM, "tic", "tac", "exact", "last use")


class Vgg(nn.Sequential):
    """Convolutions that compute and a first linear layer that holds two thirds of the bytes."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        inputs = 3
        for width in (64, 128, 256):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
            inputs = width
        super().__init__(*layers, nn.Flatten(), nn.Linear(256 * 8 * 8, 128), nn.ReLU(), nn.Linear(128, 10))


class Block(nn.Module):
    """Two convolutions with batch norm, added to their input."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, features: Tensor) -> Tensor:
        """Return the features (n, outputs, h, w) of features (n, inputs, h * stride, w * stride)."""
        hidden = torch.relu(self.norm1(self.conv1(features)))
        return torch.relu(self.norm2(self.conv2(hidden)) + self.short(features))


class ResNet(nn.Sequential):
    """A ResNet with three stages of two blocks: many small transfers, the large ones last."""

    def __init__(self) -> None:
        blocks = [Block(i, o, s) for i, o, s in ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1))]
        blocks += [Block(128, 256, 2), Block(256, 256, 1)]
        stem = (nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        super().__init__(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, int]]] = {
    "vgg": (Vgg, {"inference": 40, "training": 16}),
    "resnet": (ResNet, {"inference": 16, "training": 6}),
}
IMAGE = (3, 64, 64)


def make_step(model: str, mode: str) -> TrainingStep:
    """Return the model with example inputs."""
    build, batch = MODELS[model]
    return TrainingStep(name=model, module=build(), inputs=(torch.zeros(batch[mode], *IMAGE),), loss=default_loss)


def run_step(step: TrainingStep, mode: str) -> None:
    """Run one step: forward, or forward, loss and backward."""
    if mode == "training":
        step.run().backward()
    else:
        with torch.no_grad():
            step.module(*step.inputs)


# --- Costs of ops, measured -----------------------------------------------------------------------------------------


class OpTimer(TorchDispatchMode):
    """Times every aten op that runs, in order, by type."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[tuple[str, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self.times.append((f"aten.{func.overloadpacket.__name__}", time.perf_counter() - start))
        return result


def time_ops(step: TrainingStep, mode: str, repeats: int) -> tuple[list[tuple[str, float]], float]:
    """Return each op's shortest time in program order, and the shortest time of a whole step without a timer."""
    runs, whole = [], []
    for _ in range(repeats):
        step.module.zero_grad()
        start = time.perf_counter()
        run_step(step, mode)
        whole.append(time.perf_counter() - start)
        step.module.zero_grad()
        with OpTimer() as timer:
            run_step(step, mode)
        runs.append(timer.times)
    return shortest(runs), min(whole)


def shortest(runs: Sequence[Sequence[tuple[str, float]]]) -> list[tuple[str, float]]:
    """Return the shortest time of each op over several runs of the same ops."""
    return [(group[0][0], min(time_s for _, time_s in group)) for group in zip(*runs, strict=True)]


def with_op_times(graph: Graph, ops: Sequence[tuple[str, float]], whole_s: float) -> Graph:
    """Return the graph with these times on its compute ops, scaled to add up to ``whole_s``; transfers take 0.

    The k-th op of a type in the graph is the k-th of that type that ran. Views take 0, whatever the timer says: the
    few microseconds of the one that turns a linear layer's weight would give that weight a P above 0, and TAC would
    send it before every weight that computes only together with its bias.
    """
    queues: dict[str, list[float]] = {}
    for kind, time_s in ops:
        queues.setdefault(kind, []).append(time_s)
    durations = np.zeros(len(graph))
    for op in graph.of_kind(COMPUTE):
        queue = queues.get(graph.op_type[op])
        time_s = queue.pop(0) if queue else 0.0
        durations[op] = 0.0 if graph.estimate[op] == "free" else time_s
    durations *= whole_s / durations.sum()
    return graph.with_durations(durations, ["measured"] * len(graph))


def as_executed(graph: Graph) -> Graph:
    """Return the graph with its compute ops chained in program order and its sends on a channel of their own."""
    ops, last = [], None
    for op in graph.ops():
        if op.kind == "compute":
            chain = {last: None} if last is not None else {}
            op = replace(op, inputs=tuple(dict.fromkeys(op.inputs) | chain))
            last = op.name
        elif op.kind == "send":
            op = replace(op, resource="channel:1")
        ops.append(op)
    return Graph.from_ops(graph.name, graph.mode, ops, batch_size=graph.batch_size, meta=graph.meta)


def with_transfers(graph: Graph, per_transfer_s: float, bytes_per_s: float) -> Graph:
    """Return the graph with the time of every transfer."""
    transfer = graph.kind != COMPUTE
    durations = np.where(transfer, per_transfer_s + graph.size_bytes / bytes_per_s, graph.duration_s)
    return graph.with_durations(durations, ["measured"] * len(graph))


def orders_of(graph: Graph) -> dict[str, dict[str, int]]:
    """Return priorities by parameter for every enforced order; ``graph`` has all its durations.

    "exact" is the best order for ops that run in program order, by CP-SAT; "last use" sends what is used last first.
    """
    use: dict[int, int] = {}
    for op in range(len(graph)):
        for source in graph.inputs_of(op).tolist():
            use.setdefault(source, op)
    recvs = graph.of_kind(RECV).tolist()
    last = sorted(recvs, key=lambda op: (-use.get(op, len(graph)), -op))
    found = {"last use": {str(graph.parameter[op]): number for number, op in enumerate(last)}}
    exact = solve_exact(as_executed(graph)).schedule
    for name, schedule in (("tic", tic(graph)), ("tac", tac(graph)), ("exact", exact)):
        place = {recv: number for number, recv in enumerate(schedule.order)}
        found[name] = {str(graph.parameter[op]): place[graph.names[op]] for op in recvs}
    return found


# --- The two processes ----------------------------------------------------------------------------------------------


class WholeSteps(BSP):
    """A step begins when the one before is over, as the graph of one step has it."""

    def waits_for(self, worker: int, clock: int, name: str) -> list[int] | None:
        """Wait until every gradient of the steps before has been applied."""
        return None if min(self.book.version.values()) >= clock else super().waits_for(worker, clock, name) or []


def make_plan(module: nn.Module, order: str, orders: dict[str, dict[str, int]], seed: int) -> TransferPlan:
    """Return the transfer plan of one order: drawn anew from ``seed`` for random ones, else by the priorities in ``orders``."""
    if order == RANDOM:
        return TransferPlan.for_model(module, workers=1, servers=1, random_seed=seed)
    return TransferPlan.for_model(module, workers=1, servers=1, priority=orders[order])


def play(role: str, folder: Path) -> None:
    """Be one of the two processes; the worker leaves what it measured in ``folder``."""
    torch.set_num_threads(1)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    results = []
    for case in config["cases"]:
        torch.manual_seed(0)
        step = make_step(case["model"], case["mode"])
        step.module.train(case["mode"] == "training")
        for block in range(-1, config["rounds"]):  # the first round warms up
            for order in ORDERS if block >= 0 else ORDERS[:1]:
                plan = make_plan(step.module, order, case["orders"], block)
                meeting = Meeting(rank=int(role == "server"), address=f"{SERVER_IP}:{PORT}", token="benchmark")
                if role == "server":
                    optimizer = torch.optim.SGD(step.module.parameters(), lr=1e-4, momentum=0.9)
                    Server(step.module, plan, optimizer, WholeSteps(), lost_after_s=60, meeting=meeting).serve()
                else:
                    steps = config["steps"] if block >= 0 else 1
                    measured = measure_block(step, case["mode"], plan, steps, meeting)
                    about = {"model": case["model"], "mode": case["mode"], "order": order, "block": block}
                    results += [about | measured] if block >= 0 else []
    if role == "worker":
        (folder / "result.json").write_text(json.dumps(results), encoding="utf-8")


def measure_block(step: TrainingStep, mode: str, plan: TransferPlan, steps: int, meeting: Meeting) -> dict[str, Any]:
    """Measure one block of steps under one plan: op times, idle pulls, and the steps themselves."""
    before, before_s = time_ops(step, mode, 3)
    step.module.zero_grad()
    training = mode == "training"
    with Worker(step.module, plan, WholeSteps(), meeting=meeting) as worker:
        idle = []
        for _ in range(2):
            worker.pull()
            idle.append([(arrival.name, arrival.time_s) for arrival in worker.arrivals])
        marks = []
        for _ in range(steps + 1):
            marks.append(time.perf_counter())
            with worker.step(push=training):
                run_step(step, mode)
        marks.append(time.perf_counter())
    times = np.diff(marks)[1 : steps + 1] if training else np.diff(marks)[:steps]
    after, after_s = time_ops(step, mode, 2)
    step.module.zero_grad()
    ops, whole_s = shortest([before, after]), min(before_s, after_s)
    return {"ops": ops, "whole_s": whole_s, "idle": idle, "times": times.tolist(), "first_pull": 2 + int(training)}


# --- The link -------------------------------------------------------------------------------------------------------


def shell(*words: str) -> None:
    """Run a command. Raises CalledProcessError when it fails."""
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def link(rate_mbit: float) -> Iterator[tuple[str, str]]:
    """Make two namespaces joined by a shaped link, yield their names, and remove them whatever happens."""
    names = [f"ddltool-{side}-{os.getpid()}" for side in ("worker", "server")]
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        for name in names:
            shell("ip", "netns", "add", name)
        shell("ip", "link", "add", "v0", "netns", names[0], "type", "veth", "peer", "name", "v1", "netns", names[1])
        for side, (name, address) in enumerate(zip(names, (WORKER_IP, SERVER_IP), strict=True)):
            device = f"v{side}"
            shell("ip", "-n", name, "addr", "add", f"{address}/24", "dev", device)
            shell("ip", "-n", name, "link", "set", device, "up")
            shell("ip", "-n", name, "link", "set", "lo", "up")
            shape = ("root", "tbf", "rate", f"{rate_mbit:g}mbit", "burst", "256kb", "latency", "50ms")
            shell("ip", "netns", "exec", name, "tc", "qdisc", "replace", "dev", device, *shape)
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def run_pair(names: tuple[str, str], folder: Path) -> None:
    """Run worker and server, each in its namespace. Raises RuntimeError when one fails."""
    crew = []
    for role, name in zip(("worker", "server"), names, strict=True):
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        words = ["ip", "netns", "exec", name, sys.executable, __file__, "--role", role, "--folder", str(folder)]
        crew.append(subprocess.Popen(words, env=environment))
    try:
        while any(process.poll() is None for process in crew):
            if any(process.poll() for process in crew):
                break
            time.sleep(0.2)
        for process in crew:
            if process.wait(30):
                raise RuntimeError(f"one of the two processes ended with {process.returncode}")
    finally:
        for process in crew:
            process.kill()
            process.wait()


def obstacle() -> str:
    """Return why the link cannot be made here; empty when it can."""
    if os.geteuid() != 0:
        return "not root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"no {missing[0]}"
    try:
        with link(100):
            return ""
    except (subprocess.CalledProcessError, OSError) as error:
        return f"the link could not be made ({getattr(error, 'stderr', '') or error})".replace("\n", " ")


# --- Prediction and report ------------------------------------------------------------------------------------------


def fit_link(sizes: dict[str, float], idle: list[list[list[Any]]]) -> tuple[float, float, float]:
    """Return latency (s), time per transfer (s) and rate (bytes/s), fitted to the arrivals of idle pulls.

    Arrival k of a pull is at ``latency + k * per_transfer + bytes so far / rate``; least squares, nothing below 0.
    Pulls that another load on the machine slowed down by more than a tenth are left out.
    """
    from scipy.optimize import nnls

    fastest = min(pull[-1][1] for pull in idle)
    rows, times = [], []
    for pull in idle:
        if pull[-1][1] > 1.1 * fastest:
            continue
        total = np.cumsum([sizes[name] for name, _ in pull])
        rows += [[1.0, place + 1.0, moved / 1e6] for place, moved in enumerate(total)]
        times += [time_s for _, time_s in pull]
    latency, per_transfer, per_megabyte = nnls(np.array(rows), np.array(times))[0].tolist()
    return latency, per_transfer, 1e6 / per_megabyte


def evaluate(case: dict[str, Any], blocks: list[dict[str, Any]], graph: Graph) -> dict[str, Any]:
    """Return measured and predicted step times of one model and mode, per order."""
    step = make_step(case["model"], case["mode"])
    slots = TransferPlan.for_model(step.module, workers=1, servers=1).slots
    sizes = {name: float(value.nbytes) for name, value in step.module.named_parameters()}
    latency_s, per_transfer_s, bytes_per_s = fit_link(sizes, [pull for block in blocks for pull in block["idle"]])
    compute_s = statistics.median(block["whole_s"] for block in blocks)
    recv_of = {str(graph.parameter[op]): graph.names[op] for op in graph.of_kind(RECV)}
    rows: dict[str, dict[str, Any]] = {}
    pairs = []
    for order in ORDERS:
        measured, predicted = [], []
        for block in (block for block in blocks if block["order"] == order):
            plan = make_plan(step.module, order, case["orders"], block["block"])
            timed = with_transfers(with_op_times(graph, block["ops"], block["whole_s"]), per_transfer_s, bytes_per_s)
            simulator = Simulator(as_executed(timed))
            for place, time_s in enumerate(block["times"]):
                queue = plan.queue(0, 0, block["first_pull"] + place)
                priority = {recv_of[slots[index].name]: number for number, index in enumerate(queue)}
                measured.append(time_s)
                predicted.append(latency_s + simulator.run(priority, 0).makespan_s)
        pairs += list(zip(measured, predicted, strict=True)) if order == RANDOM else []
        middle, expected = statistics.median(measured), statistics.median(predicted)
        rows[order] = {
            "measured_s": middle,
            "measured_quartiles_s": np.quantile(measured, (0.25, 0.75)).tolist(),
            "predicted_s": expected,
            "error_percent": 100 * (expected - middle) / middle,
            "steps": len(measured),
        }
    correlation = np.corrcoef(np.array(pairs).T)[0, 1]
    moved = sum(sizes.values())
    return {
        "model": case["model"],
        "mode": case["mode"],
        "compute_s": compute_s,
        "transfer_s": per_transfer_s * len(sizes) + moved / bytes_per_s,
        "latency_s": latency_s,
        "per_transfer_s": per_transfer_s,
        "bytes_per_s": bytes_per_s,
        "parameter_bytes": moved,
        "r2_random_steps": float(correlation**2),
        "orders": rows,
    }


def show(result: dict[str, Any]) -> None:
    """Print measured and predicted step times of one model and mode, a row for each order."""
    print(
        f"\n{result['model']}, {result['mode']}: compute {result['compute_s'] * 1e3:.0f} ms, "
        f"transfers {result['transfer_s'] * 1e3:.0f} ms one way ({result['parameter_bytes'] / 1e6:.1f} MB at "
        f"{result['bytes_per_s'] / 1e6:.1f} MB/s, {result['per_transfer_s'] * 1e3:.2f} ms each, "
        f"latency {result['latency_s'] * 1e3:.1f} ms)"
    )
    print(f"{'order':10} {'measured':>11} {'quartiles':>17} {'predicted':>12} {'error':>8} {'x random':>9}")
    base = result["orders"][RANDOM]["measured_s"]
    for order, row in result["orders"].items():
        low, high = (1e3 * value for value in row["measured_quartiles_s"])
        print(
            f"{order:10} {row['measured_s'] * 1e3:8.0f} ms {low:8.0f}-{high:5.0f} ms {row['predicted_s'] * 1e3:9.0f} ms "
            f"{row['error_percent']:+7.1f}% {base / row['measured_s']:8.2f}x"
        )
    print(f"random orders, step by step: R2 {result['r2_random_steps']:.3f} between measured and predicted")


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate-mbit", type=float, default=200.0)
    parser.add_argument("--steps", type=int, default=6, help="per block")
    parser.add_argument("--rounds", type=int, default=2, help="blocks per order")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--role", choices=("worker", "server"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        play(options.role, options.folder)
        return
    if reason := obstacle():
        print(f"skipped: {reason}; this benchmark makes network namespaces and shapes their link")
        return
    torch.set_num_threads(1)
    cases, graphs = [], []
    for model in options.models.split(","):
        for mode in options.modes.split(","):
            step = make_step(model, mode)
            step.module.train(mode == "training")
            graph = trace_torch(lambda model=model, mode=mode: make_step(model, mode), mode=mode)
            nominal = with_transfers(with_op_times(graph, *time_ops(step, mode, 3)), 1e-4, options.rate_mbit * 1.25e5)
            cases.append({"model": model, "mode": mode, "orders": orders_of(nominal)})
            graphs.append(graph)
    with tempfile.TemporaryDirectory() as folder, link(options.rate_mbit) as names:
        config = {"cases": cases, "steps": options.steps, "rounds": options.rounds}
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        run_pair(names, Path(folder))
        blocks = json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))
    results = []
    for case, graph in zip(cases, graphs, strict=True):
        mine = [block for block in blocks if (block["model"], block["mode"]) == (case["model"], case["mode"])]
        results.append(evaluate(case, mine, graph))
        show(results[-1])
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
