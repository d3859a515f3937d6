"""Many workers and parameter servers: iterations of synchronous training or inference, simulated (TicTac, section 6).

Every worker runs the same graph; an iteration ends when the last worker has ended. A worker and a server have one
channel, which carries one transfer at a time; the channels of a server share its network card, those of a worker the
worker's: max-min fairness, one direction at a time (full duplex: recv ops and send ops do not compete). A resource picks
its next op as in :mod:`ddltool.analyzers.step.transfers.timeline`. Rates are multiples of a channel's nominal rate, at which
a transfer that is alone runs. Start at :func:`simulate_cluster`.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ddltool.analyzers.step.transfers.efficiency import MakespanBounds, bounds
from ddltool.analyzers.step.transfers.order import Schedule
from ddltool.analyzers.step.transfers.timeline import Ready, Simulator
from ddltool.arrays import Floats
from ddltool.graph import COMPUTE, RECV, Graph

Pair = tuple[int, int]
"""(worker, server): the channel between them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """What the workers share, and how much chance there is.

    Rates are multiples of the rate that the graph's transfer times were estimated for.
    """

    workers: int
    servers: int
    server_rate: float = 1.0
    """Each parameter server's network card, each direction."""
    worker_rate: float = 1.0
    """Each worker's network card, each direction; infinite: only the servers' cards are shared."""
    latency_s: float = 0.0
    """The part of every transfer that holds its channel but moves no bytes, so that it shares no card."""
    noise: float = 0.0
    """Sigma of a lognormal factor of mean 1 on every op's time, drawn per worker and iteration."""
    worker_noise: float = 0.0
    """Sigma of a lognormal factor of mean 1 on all compute times of a worker, drawn per worker and iteration."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ClusterRun:
    """Simulated iterations: I of them on W workers."""

    cluster: Cluster
    bounds: MakespanBounds
    """U, L and S of one worker's graph at the nominal, unshared rate."""
    finish_s: Floats
    """(I, W) when each worker was done, seconds from the iteration's start."""
    efficiency: Floats
    """(I, W) E of every worker with U and L of the iteration as it ran (measured times); NaN where U = L."""

    @property
    def iteration_s(self) -> Floats:
        """Length of every iteration (I,), seconds: the last worker's end."""
        ends: Floats = self.finish_s.max(axis=1)
        return ends

    @property
    def straggler(self) -> Floats:
        """Longest wait of any worker as a share of the iteration (I,), 0 to 1 (TicTac, section 6.3)."""
        last = self.iteration_s
        share: Floats = (last - self.finish_s.min(axis=1)) / np.where(last > 0, last, 1.0)
        return share

    @property
    def iterations_per_s(self) -> float:
        """Iterations per second over the whole run; infinite when nothing takes any time."""
        total = float(self.iteration_s.sum())
        return len(self.finish_s) / total if total > 0 else math.inf


def simulate_cluster(
    graph: Graph, cluster: Cluster, *, order: Schedule | None = None, iterations: int = 10, seed: int = 0
) -> ClusterRun:
    """Return ``iterations`` simulated iterations of the workers that run ``graph`` against the servers.

    The transfers on ``channel:k`` are with server k. ``order`` None is the baseline: random, every worker and iteration
    for itself. The same arguments give the same run; worker 0 of iteration i draws what
    ``Simulator(graph).run(priority, seed + i)`` draws, and without noise a single worker on a single server repeats it
    exactly. O(iterations W (n + e) log n) plus O(W servers) for every transfer that begins or ends.
    """
    simulator = ClusterSimulator(graph, cluster)
    priority = order.priority if order is not None else None
    finish_s, efficiency = np.empty((iterations, cluster.workers)), np.empty((iterations, cluster.workers))
    for number in range(iterations):
        start_s, end_s = simulator.iteration(priority, seed + number)
        finish_s[number] = end_s.max(axis=1)
        efficiency[number] = measured_efficiency(graph, start_s, end_s)
    return ClusterRun(cluster=cluster, bounds=bounds(graph), finish_s=finish_s, efficiency=efficiency)


def measured_efficiency(graph: Graph, start_s: Floats, end_s: Floats) -> Floats:
    """Return E of every worker (W,) with U and L from the times (W, n) that its ops took; NaN if U = L.

    TicTac, section 3.2: "for a given iteration, we measure runtime of each op as well as the makespan". A transfer's
    time is what it took on the shared network, so that E tells the order's quality apart from the sharing.
    """
    lanes = len(graph.resource_names)
    loads = np.array([np.bincount(graph.resource, weights=row, minlength=lanes) for row in end_s - start_s])
    upper, lower = loads.sum(axis=1), loads.max(axis=1)
    spread = upper - lower
    known = spread > 1e-12 * upper
    values = np.full(len(loads), math.nan)
    values[known] = (upper - end_s.max(axis=1))[known] / spread[known]
    return values


class ClusterSimulator(Simulator):
    """A graph prepared for many iterations on a cluster; ``run`` is one worker with the network to itself."""

    def __init__(self, graph: Graph, cluster: Cluster) -> None:
        """Prepare a timed graph. Raises InputError for ops without a duration."""
        super().__init__(graph)
        self.cluster = cluster
        self._latency = float(round(cluster.latency_s * self.scale))
        kinds = graph.kind[self.file_order]
        servers = [int(name.partition(":")[2]) for name in graph.resource_names]
        self._server = [
            -1 if kind == COMPUTE else servers[lane] for kind, lane in zip(kinds, self.resource, strict=True)
        ]
        self._is_compute = kinds == COMPUTE
        self._is_recv = (kinds == RECV).tolist()
        self._base = np.array(self.times, dtype=np.float64)

    def iteration(self, priority: Mapping[str, int] | None, seed: int) -> tuple[Floats, Floats]:
        """Return when each worker began and ended each op, two of shape (W, n), seconds, in the graph's op order."""
        workers = [_Worker(self, number, priority, seed) for number in range(self.cluster.workers)]
        self._play(workers)
        starts, ends = np.empty((2, len(workers), len(self.times)))
        starts[:, self.file_order] = np.array([worker.starts for worker in workers]) / self.scale
        ends[:, self.file_order] = np.array([worker.ends for worker in workers]) / self.scale
        return starts, ends

    def drawn_times(self, number: int, seed: int) -> list[float]:
        """Return one worker's op times in one iteration; adding workers changes nobody else's draws."""
        sigma, common = self.cluster.noise, self.cluster.worker_noise
        if sigma == common == 0:
            return self._base.tolist()
        normal = np.random.default_rng([seed, number])
        exponent = np.where(self._is_compute, common * normal.standard_normal() - common**2 / 2, 0.0)
        exponent = exponent + sigma * normal.standard_normal(len(self._base)) - sigma**2 / 2
        times: list[float] = np.rint(self._base * np.exp(exponent)).tolist()
        return times

    def _play(self, workers: Sequence[_Worker]) -> None:
        """Run one iteration; the workers keep their ops' starts and ends."""
        down, up = Fabric(self.cluster), Fabric(self.cluster)
        # (time, worker, op) for what ends at a known time, (time, worker, ~op) for a transfer whose latency is over.
        events: list[tuple[float, int, int]] = []
        on_channel: dict[Pair, int] = {}
        now, ended = 0.0, {number: list[int]() for number in range(len(workers))}
        while True:
            for number, ops in ended.items():
                for op in workers[number].advance(ops, now):
                    time, shared = workers[number].times[op], self._server[op] >= 0
                    if not shared or time <= self._latency:
                        heapq.heappush(events, (now + time, number, op))
                    else:
                        heapq.heappush(events, (now + self._latency, number, ~op))
            now = min(events[0][0] if events else math.inf, down.next_end(now), up.next_end(now))
            if now == math.inf:
                return
            ended = {}
            for pair in (*down.ended(now), *up.ended(now)):
                ended.setdefault(pair[0], []).append(on_channel[pair])
            while events and events[0][0] == now:
                _, number, op = heapq.heappop(events)
                if op >= 0:
                    ended.setdefault(number, []).append(op)
                    continue
                pair = number, self._server[~op]
                on_channel[pair] = ~op
                (down if self._is_recv[~op] else up).join(pair, workers[number].times[~op] - self._latency, now)


class _Worker:
    """One worker within one iteration: which ops are ready, running and done."""

    def __init__(self, graph: ClusterSimulator, number: int, priority: Mapping[str, int] | None, seed: int) -> None:
        self.times = graph.drawn_times(number, seed)
        self.starts, self.ends = [0.0] * len(self.times), [0.0] * len(self.times)
        self._graph, self._numbers = graph, graph.numbers(priority)
        self._pending = list(graph.inputs)
        lanes = max(graph.resource) + 1
        self._ready = [Ready() for _ in range(lanes)]
        self._busy = [False] * lanes
        # Worker 0 draws what the single worker's timeline draws.
        self._chance = random.Random(seed if number == 0 else f"{seed}/{number}")
        for op, count in enumerate(self._pending):
            if count == 0:
                self._ready[graph.resource[op]].add(op, self._numbers[op])

    def advance(self, ended: list[int], now: float) -> list[int]:
        """Complete the ops that end now, then let every free resource pick; return the ops that start."""
        resource = self._graph.resource
        for op in sorted(ended, key=resource.__getitem__):  # the timeline's order
            self.ends[op] = now
            self._busy[resource[op]] = False
            for successor in self._graph.following[op]:
                self._pending[successor] -= 1
                if self._pending[successor] == 0:
                    self._ready[resource[successor]].add(successor, self._numbers[successor])
        started = []
        for lane, ready in enumerate(self._ready):
            if not self._busy[lane] and (op := ready.pick(self._chance)) >= 0:
                self._busy[lane] = True
                self.starts[op] = now
                started.append(op)
        return started


def fair_rates(flows: Sequence[Pair], cluster: Cluster) -> list[float]:
    """Return the max-min fair rate of every ``(worker, server)`` flow, in the flows' order, as multiples of nominal.

    No flow exceeds 1, the flows of a server add up to at most ``server_rate``, those of a worker to at most
    ``worker_rate``, and no flow can gain without a flow that has no more losing (progressive filling: Bertsekas and
    Gallager, "Data Networks", section 6.5.2). O(flows + cards), times the levels
    where a worker's card can bind.
    """
    ends = (cluster.workers, cluster.servers)
    counts = [[0] * cards for cards in ends]
    left = [[rate] * cards for rate, cards in zip((cluster.worker_rate, cluster.server_rate), ends, strict=True)]
    for flow in flows:
        for end, card in enumerate(flow):
            counts[end][card] += 1
    even = [min(1.0, cluster.server_rate / count) if count else 0.0 for count in counts[1]]
    if sum(even) <= cluster.worker_rate:  # no worker's card can bind: every server splits evenly
        return [even[server] for _, server in flows]
    rates, rising = [0.0] * len(flows), list(range(len(flows)))
    while rising:
        share = [
            [rest / count if count else 1.0 for rest, count in zip(left[e], counts[e], strict=True)] for e in (0, 1)
        ]
        level = min(1.0, *share[0], *share[1])
        # A flow stops rising where its channel or a card of its own is full; all others rise on.
        full = [k for k in rising if level in (1.0, share[0][flows[k][0]], share[1][flows[k][1]])]
        for k in full:
            rates[k] = level
            for end, card in enumerate(flows[k]):
                counts[end][card] -= 1
                left[end][card] = max(0.0, left[end][card] - level)
        rising = [k for k in rising if rates[k] == 0.0]
    return rates


class Fabric:
    """The transfers of one direction: at most one per (worker, server) pair, moving at their fair rates.

    Times and amounts of work are whole units (see ``time_scale``); ends are rounded to whole units, so that transfers
    that end together by symmetry end at one instant.
    """

    def __init__(self, cluster: Cluster) -> None:
        """Take the cards that the transfers share."""
        self._cluster = cluster
        self._left: dict[Pair, float] = {}
        self._rates: dict[Pair, float] = {}
        self._ends: dict[Pair, float] = {}
        self._since, self._next, self._changed = 0.0, math.inf, False

    def join(self, pair: Pair, work: float, now: float) -> None:
        """Put a transfer in; ``work`` is its time at the nominal rate, above 0."""
        self._move(now)
        self._left[pair], self._changed = work, True

    def next_end(self, now: float) -> float:
        """Return when the next transfer ends if nothing changes before; infinite when none is on its way."""
        if self._changed:  # new rates from here on
            self._move(now)
            self._changed = False
            self._rates = dict(zip(self._left, fair_rates(list(self._left), self._cluster), strict=True))
            self._ends = {pair: now + max(0, round(work / self._rates[pair])) for pair, work in self._left.items()}
            self._next = min(self._ends.values(), default=math.inf)
        return self._next

    def ended(self, now: float) -> list[Pair]:
        """Take out the transfers that end now and return their pairs."""
        if self._next != now:
            return []
        found = [pair for pair, end in self._ends.items() if end == now]
        self._move(now)
        self._changed = True
        for pair in found:
            del self._left[pair], self._rates[pair], self._ends[pair]
        return found

    def _move(self, now: float) -> None:
        for pair, rate in self._rates.items():
            self._left[pair] -= rate * (now - self._since)
        self._since = now
