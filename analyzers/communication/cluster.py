"""Many workers and parameter servers: iterations of synchronous training or inference, simulated (TicTac, section 6).

Every worker runs the same graph; an iteration ends when the last worker has ended. Start at :func:`simulate_cluster`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.communication.cluster_events import Cluster, ClusterSimulator, Iteration
from ddltool.analyzers.communication.efficiency import Bounds, bounds
from ddltool.analyzers.communication.order import Schedule
from ddltool.errors import InputError
from ddltool.graph import Graph


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClusterRun:
    """Simulated iterations: I of them on W workers."""

    cluster: Cluster
    schedule: Schedule | None
    """None: every worker transfers in a random order of its own in every iteration."""
    bounds: Bounds
    """U, L and S of one worker's graph at the nominal, unshared rate."""
    finish_s: NDArray[np.float64]
    """(I, W) when each worker was done, seconds from the iteration's start."""
    efficiency: NDArray[np.float64]
    """(I, W) E of every worker with U and L of the iteration as it ran (measured times); NaN where U = L."""
    batch_size: int | None

    @property
    def iteration_s(self) -> NDArray[np.float64]:
        """Length of every iteration (I,), seconds: the last worker's end."""
        ends: NDArray[np.float64] = self.finish_s.max(axis=1)
        return ends

    @property
    def straggler(self) -> NDArray[np.float64]:
        """Longest wait of any worker as a share of the iteration (I,), 0 to 1 (TicTac, section 6.3)."""
        last = self.iteration_s
        waits = last - self.finish_s.min(axis=1)
        share: NDArray[np.float64] = waits / np.where(last > 0, last, 1.0)
        return share

    @property
    def nominal_efficiency(self) -> NDArray[np.float64]:
        """E (I, W) with U and L at the nominal rate; below 0 where sharing makes a step longer than U, NaN if U = L."""
        spread = self.bounds.upper_s - self.bounds.lower_s
        if spread <= 1e-12 * self.bounds.upper_s:
            return np.full_like(self.finish_s, math.nan)
        return (self.bounds.upper_s - self.finish_s) / spread

    @property
    def iterations_per_s(self) -> float:
        """Iterations per second over the whole run; infinite when nothing takes any time."""
        total = float(self.iteration_s.sum())
        return len(self.finish_s) / total if total > 0 else math.inf

    @property
    def samples_per_s(self) -> float | None:
        """Throughput of all workers together; None when the graph has no batch size."""
        return None if self.batch_size is None else self.cluster.workers * self.batch_size * self.iterations_per_s


def simulate_cluster(
    graph: Graph,
    *,
    workers: int,
    servers: int,
    order: Schedule | None = None,
    iterations: int = 10,
    seed: int = 0,
    noise: float = 0.0,
    worker_noise: float = 0.0,
    server_rate: float = 1.0,
    worker_rate: float = 1.0,
    latency_s: float | None = None,
) -> ClusterRun:
    """Return ``iterations`` simulated iterations of ``workers`` workers that run ``graph`` against ``servers`` servers.

    The transfers on ``channel:k`` are with server k. ``order`` None is the baseline: random, every worker and iteration
    for itself. ``latency_s`` None takes the graph's own (``meta``), 0 if it has none. See :class:`Cluster` for the other
    quantities. The same arguments give the same run; worker 0 of iteration i draws what
    ``Simulator(graph).run(priority, seed + i)`` draws, and without noise a single worker on a single server repeats it
    exactly. O(iterations W (n + e) log(n W)) plus O(W servers) for every transfer that begins or ends.

    Raises InputError for ops without a duration, a channel that has no server, and values out of range.
    """
    latency = float(graph.meta.get("latency_s") or 0.0) if latency_s is None else latency_s
    cluster = Cluster(
        workers=workers,
        servers=servers,
        server_rate=server_rate,
        worker_rate=worker_rate,
        latency_s=latency,
        noise=noise,
        worker_noise=worker_noise,
    )
    if iterations < 1:
        raise InputError("iterations", f"is {iterations}", "it must be at least 1")
    if seed < 0:
        raise InputError("seed", f"is {seed}", "it must be at least 0")
    simulator = ClusterSimulator(graph, cluster)
    finish_s = np.empty((iterations, workers))
    efficiency = np.empty((iterations, workers))
    for number in range(iterations):
        run = simulator.iteration(order.priority if order is not None else None, seed + number)
        finish_s[number] = run.finish_s
        efficiency[number] = measured_efficiency(graph, run)
    return ClusterRun(
        cluster=cluster,
        schedule=order,
        bounds=bounds(graph),
        finish_s=finish_s,
        efficiency=efficiency,
        batch_size=graph.batch_size,
    )


def measured_efficiency(graph: Graph, run: Iteration) -> NDArray[np.float64]:
    """Return E of every worker (W,) with U and L from the times that its ops took in this iteration; NaN if U = L.

    TicTac, section 3.2: "for a given iteration, we measure runtime of each op as well as the makespan". A transfer's
    time is what it took on the shared network, so that E tells the order's quality apart from the sharing.
    """
    took = run.end_s - run.start_s
    lanes = len(graph.resource_names)
    loads = np.array([np.bincount(graph.resource, weights=row, minlength=lanes) for row in took])
    upper, lower = loads.sum(axis=1), loads.max(axis=1)
    spread = upper - lower
    known = spread > 1e-12 * upper
    values = np.full(len(took), math.nan)
    values[known] = (upper - run.finish_s)[known] / spread[known]
    return values
