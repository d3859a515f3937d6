"""The shape of TicTac's evaluation (Figures 7 and 9 to 12), simulated: every number printed comes from a simulation.

Graphs: the shipped traces of Table 1's ten models. Their compute times are the roofline's times a factor: on the K80
(10 Gbit/s, the cloud GPU environment) the factor that makes a training step as long as TensorFlow's published
throughput says, on 32 CPU cores (1 Gbit/s, the CPU cluster) an assumed 8. Workers share their servers' network cards.

    python benchmarks/tictac_figures.py --figures 7 9 --models inception_v2 vgg16 --iterations 10
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from cluster import Cluster, ClusterRun, simulate_cluster

from ddltool.analyzers.step.costs.model import cost_model, estimate
from ddltool.analyzers.step.transfers.efficiency import bounds
from ddltool.analyzers.step.transfers.order import Schedule, tac, tic
from ddltool.device import Device, Network
from ddltool.graph import COMPUTE, Graph, Mode, read_graph
from ddltool.shipped import calibration, devices, folder

TABLE_1 = (
    *("alexnet_v2", "inception_v1", "inception_v2", "inception_v3", "resnet50_v1", "resnet101_v1"),
    *("resnet50_v2", "resnet101_v2", "vgg16", "vgg19"),
)
MODES: tuple[Mode, ...] = ("training", "inference")
ORDERS: dict[str, Callable[[Graph], Schedule]] = {"tic": tic, "tac": tac}
GBIT = 1e9 / 8
# Images per second of training on one K80 with synthetic data, at Table 1's batch sizes: TensorFlow's benchmarks page of
# May 2017 (Google Compute Engine), tensorflow/docs_src/performance/benchmarks.md.
PUBLISHED_K80 = {"alexnet": ("alexnet_v2", 656.0), "inception": ("inception_v3", 29.3)}
PUBLISHED_K80 |= {"resnet": ("resnet50_v1", 49.5), "vgg": ("vgg16", 35.4)}
CPU_FACTOR = 8.0
SENSITIVITY = 100


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What a figure was measured on."""

    title: str
    device: Device
    bandwidth_bytes_per_s: float
    compute_factor: Callable[[str], float]
    """By model: how many times as long as the roofline says its compute ops take."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What holds for all figures."""

    models: Sequence[str]
    iterations: int
    seed: int
    noise: float
    worker_noise: float
    compute_factor: float | None
    """Instead of the environment's own: 1 is the roofline, which real kernels do not reach."""
    server_rate: float


def cloud_gpu() -> Environment:
    """Return the paper's GPU environment: K80 workers on 10 Gbit/s, compute scaled by :func:`k80_factor`."""
    return Environment(
        title="K80, 10 Gbit/s",
        device=devices().device("K80"),
        bandwidth_bytes_per_s=10 * GBIT,
        compute_factor=k80_factor,
    )


@cache
def k80_factor(model: str) -> float:
    """Return published over roofline time of a training step, from the published model of the same family."""
    known, images_per_s = next(found for family, found in PUBLISHED_K80.items() if model.startswith(family))
    graph = estimate(shipped(known, "training"), cost_model(devices().device("K80"), calibration()), Network())
    return (graph.batch_size or 1) / images_per_s / bounds(graph).compute_s


def shipped(model: str, mode: Mode) -> Graph:
    """Return the graph of a model that ships with ddltool."""
    return read_graph(folder() / "graphs" / f"{model}-{mode}.graph.json.gz")


def cpu_cluster() -> Environment:
    """Return the paper's CPU environment: 32 cores a worker on 1 Gbit/s."""
    core = devices().device("cpu-core")
    node = core.model_copy(
        update={
            "peak_flops": {name: 32 * rate for name, rate in core.peak_flops.items()},
            "memory_bytes_per_s": 32 * core.memory_bytes_per_s,
        }
    )
    return Environment(
        title="32 CPU cores, 1 Gbit/s", device=node, bandwidth_bytes_per_s=GBIT, compute_factor=lambda _: CPU_FACTOR
    )


def worker_graph(
    model: str, mode: Mode, where: Environment, servers: int, options: Options, batch_factor: float = 1.0
) -> Graph:
    """Return the timed graph of one worker; ``batch_factor`` scales the batch and with it all compute times."""
    network = Network(bandwidth_bytes_per_s=where.bandwidth_bytes_per_s, parameter_servers=servers)
    timed = estimate(shipped(model, mode), cost_model(where.device, calibration()), network)
    factor = options.compute_factor or where.compute_factor(model)
    scale = np.where(timed.kind == COMPUTE, factor * batch_factor, 1.0)
    return timed.with_durations(timed.duration_s * scale, timed.estimate)


def run(graph: Graph, workers: int, servers: int, order: Schedule | None, options: Options) -> ClusterRun:
    """Return a simulated training or inference run; no ``order``: a random one in each iteration."""
    cluster = Cluster(
        workers=workers,
        servers=servers,
        noise=options.noise,
        worker_noise=options.worker_noise,
        server_rate=options.server_rate,
        latency_s=float(graph.meta["latency_s"] or 0.0),
    )
    return simulate_cluster(graph, cluster, order=order, iterations=options.iterations, seed=options.seed)


def gains(graph: Graph, workers: int, servers: int, options: Options) -> dict[str, float]:
    """Return each order's throughput over the baseline's, minus 1."""
    baseline = run(graph, workers, servers, None, options).iterations_per_s
    return {
        name: run(graph, workers, servers, make(graph), options).iterations_per_s / baseline - 1
        for name, make in ORDERS.items()
    }


def heading(number: str, text: str) -> None:
    """Print the title of a figure."""
    print(f"\nFigure {number} (simulated): {text}")


def table(columns: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Print named rows under right-aligned columns."""
    print(f"  {'':14s}" + "".join(f"{column:>14s}" for column in columns), flush=True)
    for name, cells in rows:
        print(f"  {name:14s}" + "".join(f"{cell:>14s}" for cell in cells), flush=True)


def both(values: dict[str, float]) -> str:
    """Return the gains of TIC and TAC as one cell."""
    return f"{values['tic']:+.1%} {values['tac']:+.1%}"


def figure7(options: Options) -> None:
    """Print the gain by number of workers and servers."""
    where, sizes = cloud_gpu(), ((2, 1), (4, 1), (8, 2), (16, 4))
    for mode in MODES:
        heading("7", f"gain in throughput over random orders, TIC and TAC; {mode}, {where.title}, W workers, P servers")
        rows = (
            (model, [both(gains(worker_graph(model, mode, where, p, options), w, p, options)) for w, p in sizes])
            for model in options.models
        )
        table([f"W={w} P={p}" for w, p in sizes], rows)


def figure9(options: Options) -> None:
    """Print the gain by number of servers."""
    where, servers = cloud_gpu(), (1, 2, 4)
    for mode in MODES:
        heading("9", f"gain in throughput over random orders, TIC and TAC; {mode}, {where.title}, 8 workers")
        rows = (
            (model, [both(gains(worker_graph(model, mode, where, p, options), 8, p, options)) for p in servers])
            for model in options.models
        )
        table([f"P={p}" for p in servers], rows)


def figure10(options: Options) -> None:
    """Print the gain by batch size."""
    where, factors = cloud_gpu(), (0.5, 1.0, 2.0)
    for mode in MODES:
        heading(
            "10", f"gain over random orders, TIC and TAC; {mode}, {where.title}, 4 workers, 1 server, batch factors"
        )
        rows = (
            (model, [both(gains(worker_graph(model, mode, where, 1, options, f), 4, 1, options)) for f in factors])
            for model in options.models
        )
        table([f"batch x {factor:g}" for factor in factors], rows)


def figure11(options: Options) -> None:
    """As the paper: the largest value over the iterations."""
    where = cloud_gpu()
    for mode in MODES:
        heading(
            "11", f"efficiency E and straggler time, largest of {options.iterations}; {mode}, {where.title}, W=4 P=1"
        )
        rows = []
        for model in options.models:
            graph = worker_graph(model, mode, where, 1, options)
            runs = [run(graph, 4, 1, order, options) for order in (None, tic(graph), tac(graph))]
            efficiencies = [f"{np.nanmax(one.efficiency.mean(axis=1)):.3f}" for one in runs]
            rows.append((model, efficiencies + [f"{one.straggler.max():.1%}" for one in runs]))
        table(["E random", "E tic", "E tac", "wait random", "wait tic", "wait tac"], rows)


def figure12(options: Options) -> None:
    """Print the distribution of step times, and how well the efficiency E explains them, also by compute factor."""
    where, workers, model = cpu_cluster(), 4, "inception_v2"
    for mode in MODES:
        graph = worker_graph(model, mode, where, 1, options)
        runs = {"random": run(graph, workers, 1, None, options), "tac": run(graph, workers, 1, tac(graph), options)}
        heading("12", f"{model} {mode}, {where.title}, {workers} workers, 1 server, {options.iterations} iterations")
        print("  shortest step of all over step time (1: the shortest; the paper's normalisation, as its text implies)")
        best = min(float(one.iteration_s.min()) for one in runs.values())
        rows = []
        for name, one in runs.items():
            values = best / one.iteration_s
            cells = [f"{values.mean():.3f}", f"{values.std():.4f}"]
            cells += [f"{value:.3f}" for value in np.percentile(values, (5, 50, 95))]
            rows.append((name, [*cells, f"{np.nanmean(one.efficiency):.3f}"]))
        table(["mean", "std", "p5", "p50", "p95", "mean E"], rows)
        intercept, slope, squared = regression(list(runs.values()))
        print(f"  step / shortest = {intercept / best:.3f} {slope / best:+.3f} E, R2 = {squared}, both orders")
        print(f"  random orders alone: R2 = {regression([runs['random']])[2]}")
    print(f"\n  R2 (both orders) and TAC's gain by compute factor, {SENSITIVITY} iterations")
    factors = (1.0, 2.0, 4.0, 8.0, 16.0)
    rows = []
    for mode in MODES:
        cells = []
        for factor in factors:
            chosen = replace(options, compute_factor=factor, iterations=SENSITIVITY)
            graph = worker_graph(model, mode, where, 1, chosen)
            pair = [run(graph, workers, 1, order, chosen) for order in (None, tac(graph))]
            cells.append(f"{regression(pair)[2]} {pair[1].iterations_per_s / pair[0].iterations_per_s - 1:+.1%}")
        rows.append((mode, cells))
    table([f"x {factor:g}" for factor in factors], rows)


def regression(runs: Sequence[ClusterRun]) -> tuple[float, float, str]:
    """Return intercept and slope of step time on E of the worker that ended last, over all iterations, and R squared."""
    step = np.concatenate([one.iteration_s for one in runs])
    last = np.concatenate([one.efficiency[np.arange(len(one.finish_s)), one.finish_s.argmax(axis=1)] for one in runs])
    step, last = step[np.isfinite(last)], last[np.isfinite(last)]
    slope, intercept = np.polyfit(last, step, 1)
    varies = np.ptp(step) > 0 and np.ptp(last) > 0
    squared = f"{np.corrcoef(last, step)[0, 1] ** 2:.3f}" if varies else "undefined"
    return float(intercept), float(slope), squared


FIGURES: dict[str, Callable[[Options], None]] = {
    "7": figure7, "9": figure9, "10": figure10, "11": figure11, "12": figure12,
}  # fmt: skip


def main() -> None:
    """Print the figures that are asked for, all by default."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--figures", nargs="+", choices=list(FIGURES), default=list(FIGURES))
    parser.add_argument("--models", nargs="+", choices=TABLE_1, default=list(TABLE_1))
    parser.add_argument("--iterations", type=int, default=10, help="per configuration; the paper's is 10")
    parser.add_argument("--distribution", type=int, default=1000, help="iterations of Figure 12; the paper's is 1000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--noise", type=float, default=0.05, help="sigma of the lognormal factor on every op")
    parser.add_argument("--worker-noise", type=float, default=0.02, help="sigma of the one on a worker's compute")
    parser.add_argument(
        "--compute-factor", type=float, help="compute times over the roofline's, instead of the environment's own"
    )
    parser.add_argument("--server-rate", type=float, default=1.0, help="a server's card as a multiple of a worker's")
    given = parser.parse_args()
    print(
        f"Simulated, not measured: seed {given.seed}, {given.iterations} iterations, noise {given.noise:g} per op and"
        f" {given.worker_noise:g} per worker, server card {given.server_rate:g} x worker card."
    )
    factors = {model: given.compute_factor or k80_factor(model) for model in given.models}
    print(
        "compute times over the cost model's, K80: "
        + ", ".join(f"{name} {value:.2f}" for name, value in factors.items())
    )
    for number in given.figures:
        started = time.perf_counter()
        options = Options(
            models=given.models,
            iterations=given.distribution if number == "12" else given.iterations,
            seed=given.seed,
            noise=given.noise,
            worker_noise=given.worker_noise,
            compute_factor=given.compute_factor,
            server_rate=given.server_rate,
        )
        FIGURES[number](options)
        print(f"  ({time.perf_counter() - started:.0f} s)")


if __name__ == "__main__":
    main()
