"""Many workers and parameter servers: iterations of synchronous training or inference, simulated (TicTac, section 6).

Every worker runs the same graph; an iteration ends when the last worker has ended. A worker and a server have one
channel, which carries one transfer at a time; the channels of a server share its network card, those of a worker the
worker's: max-min fairness, one direction at a time (full duplex: recv ops and send ops do not compete). A resource picks
its next op as in :mod:`timeline`. Rates are multiples of a channel's nominal rate, at which a transfer that is alone runs.

Start at :func:`simulate_cluster`; the event loop is :meth:`ClusterSimulator.iteration`, which :class:`Fabric` tells
when transfers end at the rates of :func:`fair_rates`.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.communication.efficiency import Bounds, bounds
from ddltool.analyzers.communication.order import Schedule
from ddltool.analyzers.communication.timeline import Simulator, _Ready
from ddltool.errors import InputError
from ddltool.graph import COMPUTE, RECV, Graph

Pair = tuple[int, int]
"""(worker, server): the channel between them, which carries one transfer at a time."""


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
class Iteration:
    """One iteration: when each worker ran each op, ``start_s`` and ``end_s`` (W, n), seconds, in the graph's op order."""

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    finish_s: NDArray[np.float64]
    """(W,) when each worker was done."""


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


class ClusterSimulator(Simulator):
    """A graph prepared for many iterations on a cluster; ``run`` is one worker with the network to itself."""

    def __init__(self, graph: Graph, cluster: Cluster) -> None:
        """Prepare a timed graph. Raises InputError as :func:`simulate_cluster` does."""
        super().__init__(graph)
        _check(graph, cluster)
        self.cluster = cluster
        self._latency = float(round(cluster.latency_s * self._scale))
        kinds = graph.kind[self._file_order]
        servers = [name.partition(":")[2] for name in graph.resource_names]
        self._server = [
            -1 if kind == COMPUTE else int(servers[lane]) for kind, lane in zip(kinds, self._resource, strict=True)
        ]
        self._is_compute = kinds == COMPUTE
        self._is_recv = (kinds == RECV).tolist()
        self._base = np.array(self._times, dtype=np.float64)

    def iteration(self, priority: Mapping[str, int] | None, seed: int) -> Iteration:
        """Return one iteration under ``priority`` (op name to number >= 0; others have none)."""
        numbers = [priority.get(name, -1) for name in self._names] if priority else [-1] * len(self._names)
        workers = [self._worker(number, numbers, seed) for number in range(self.cluster.workers)]
        self._play(workers)
        starts = np.array([worker.starts for worker in workers]) / self._scale
        ends = np.array([worker.ends for worker in workers]) / self._scale
        start_s, end_s = np.empty_like(starts), np.empty_like(ends)
        start_s[:, self._file_order], end_s[:, self._file_order] = starts, ends
        return Iteration(start_s=start_s, end_s=end_s, finish_s=end_s.max(axis=1))

    def _worker(self, number: int, numbers: list[int], seed: int) -> _Worker:
        # Worker 0 draws what the single worker's timeline draws; adding workers changes nobody else's draws.
        chance = random.Random(seed if number == 0 else f"{seed}/{number}")
        times = self._base
        sigma, common = self.cluster.noise, self.cluster.worker_noise
        if sigma > 0 or common > 0:
            normal = np.random.default_rng([seed, number])
            exponent = np.where(self._is_compute, common * normal.standard_normal() - common**2 / 2, 0.0)
            exponent = exponent + sigma * normal.standard_normal(len(times)) - sigma**2 / 2
            times = np.rint(times * np.exp(exponent))
        return _Worker(times.tolist(), self._resource, self._next, self._inputs, numbers, self._resources, chance)

    def _play(self, workers: list[_Worker]) -> None:
        """Run one iteration; the workers keep their ops' starts and ends."""
        cluster, latency = self.cluster, self._latency
        server, is_recv = self._server, self._is_recv
        down, up = (
            Fabric(
                workers=cluster.workers,
                servers=cluster.servers,
                worker_rate=cluster.worker_rate,
                server_rate=cluster.server_rate,
            )
            for _ in range(2)
        )
        # (time, worker, op) for what ends at a known time, (time, worker, ~op) for a transfer whose latency is over.
        events: list[tuple[float, int, int]] = [(math.inf, 0, 0)]
        on_channel: dict[Pair, int] = {}

        def resume(number: int, ops: list[int], now: float) -> None:
            """Complete a worker's ops and send what it picks next on its way."""
            worker = workers[number]
            for op in worker.advance(ops, now):
                time = worker.times[op]
                if server[op] < 0 or time <= latency:
                    heapq.heappush(events, (now + time, number, op))
                elif latency > 0:
                    heapq.heappush(events, (now + latency, number, ~op))
                else:
                    join(number, op, time)

        def join(number: int, op: int, work: float) -> None:
            on_channel[number, server[op]] = op
            (down if is_recv[op] else up).join((number, server[op]), work)

        now = 0.0
        for number in range(len(workers)):
            resume(number, [], now)
        while True:
            for fabric in (down, up):
                if fabric.changed:
                    fabric.settle(now)
            horizon = min(down.next_end, up.next_end)
            # Until a transfer begins or ends the workers do not touch each other: one at a time.
            while events[0][0] < horizon and not (down.changed or up.changed):
                now, number, op = heapq.heappop(events)
                if op < 0:
                    join(number, ~op, workers[number].times[~op] - latency)
                    continue
                ops = [op]
                while events[0][0] == now and events[0][1] == number:
                    ops.append(heapq.heappop(events)[2])
                resume(number, ops, now)
            if down.changed or up.changed:
                continue
            if horizon == math.inf:
                return
            now = horizon
            ended: dict[int, list[int]] = {}
            for fabric in (down, up):
                for pair in fabric.ended() if fabric.next_end == now else ():
                    fabric.leave(pair)
                    ended.setdefault(pair[0], []).append(on_channel[pair])
            while events[0][0] == now:
                _, number, op = heapq.heappop(events)
                if op < 0:
                    join(number, ~op, workers[number].times[~op] - latency)
                else:
                    ended.setdefault(number, []).append(op)
            for number, ops in ended.items():
                resume(number, ops, now)


class _Worker:
    """One worker within one iteration: which ops are ready, running and done."""

    __slots__ = (
        *("_busy", "_chance", "_following", "_numbers", "_pending", "_ready", "_resource", "_waiting"),
        *("ends", "starts", "times"),
    )

    def __init__(
        self,
        times: list[float],
        resource: list[int],
        following: list[list[int]],
        inputs: list[int],
        numbers: list[int],
        resources: int,
        chance: random.Random,
    ) -> None:
        self.times = times
        self.starts, self.ends = [0.0] * len(times), [0.0] * len(times)
        self._resource, self._following, self._numbers = resource, following, numbers
        self._pending = inputs.copy()
        self._ready = [_Ready() for _ in range(resources)]
        self._waiting = [0] * resources
        self._busy = [False] * resources
        self._chance = chance
        for op, count in enumerate(inputs):
            if count == 0:
                self._ready[resource[op]].add(op, numbers[op])
                self._waiting[resource[op]] += 1

    def advance(self, ended: list[int], now: float) -> list[int]:
        """Complete the ops that end now, then let every free resource pick; return the ops that start."""
        resource, pending, ready, waiting = self._resource, self._pending, self._ready, self._waiting
        if len(ended) > 1:
            ended.sort(key=resource.__getitem__)  # the timeline's order: by resource
        for op in ended:
            self.ends[op] = now
            self._busy[resource[op]] = False
            for successor in self._following[op]:
                pending[successor] -= 1
                if pending[successor] == 0:
                    lane = resource[successor]
                    waiting[lane] += 1
                    ready[lane].add(successor, self._numbers[successor])
        started = []
        for lane, count in enumerate(waiting):
            if count and not self._busy[lane]:
                free = ready[lane].free
                # With nothing to choose there is nothing to draw, as in `pick`.
                op = free.pop() if count == 1 and free else ready[lane].pick(self._chance)
                waiting[lane] -= 1
                self._busy[lane] = True
                self.starts[op] = now
                started.append(op)
        return started


def _check(graph: Graph, cluster: Cluster) -> None:
    for name in ("workers", "servers"):
        if getattr(cluster, name) < 1:
            raise InputError(name, f"is {getattr(cluster, name)}", "it must be at least 1")
    for name in ("server_rate", "worker_rate"):
        if not getattr(cluster, name) > 0:
            raise InputError(name, f"is {getattr(cluster, name)}", "it must be above 0")
    for name in ("latency_s", "noise", "worker_noise"):
        if not (math.isfinite(getattr(cluster, name)) and getattr(cluster, name) >= 0):
            raise InputError(name, f"is {getattr(cluster, name)}", "it must be a finite number >= 0")
    for lane in np.unique(graph.resource[graph.kind != COMPUTE]):
        number = graph.resource_names[lane].partition(":")[2]
        if not (number.isdecimal() and int(number) < cluster.servers):
            raise InputError(
                graph.name,
                f"has transfers on channel:{number} and there are {cluster.servers} servers",
                "spread the transfers over the servers first (assign_channels)",
            )


def fair_rates(
    flows: Sequence[Pair], *, workers: int, servers: int, worker_rate: float = 1.0, server_rate: float = 1.0
) -> list[float]:
    """Return the max-min fair rate of every ``(worker, server)`` flow, in the flows' order, as multiples of nominal.

    No flow exceeds 1, the flows of a server add up to at most ``server_rate``, those of a worker to at most
    ``worker_rate``, and no flow can gain without a flow that has no more losing (progressive filling: Bertsekas and
    Gallager, "Data Networks", section 6.5.2). O(flows + cards) where the servers bind, else times the levels.
    """
    at_server, at_worker = [0] * servers, [0] * workers
    for worker, server in flows:
        at_server[server] += 1
        at_worker[worker] += 1
    share = [min(1.0, server_rate / count) if count else 1.0 for count in at_server]
    load = [0.0] * workers
    for worker, server in flows:
        load[worker] += share[server]
    if max(load, default=0.0) <= worker_rate:  # no worker's card binds: every server splits evenly
        return [share[server] for _, server in flows]
    rates = [0.0] * len(flows)
    server_left, worker_left = [server_rate] * servers, [worker_rate] * workers
    rising = list(range(len(flows)))
    while rising:
        by_server = [left / count if count else 1.0 for left, count in zip(server_left, at_server, strict=True)]
        by_worker = [left / count if count else 1.0 for left, count in zip(worker_left, at_worker, strict=True)]
        level = min(1.0, *by_server, *by_worker)
        # A flow stops rising where its channel or a card of its own is full; all others rise on.
        full = [flow for flow in rising if level in (1.0, by_worker[flows[flow][0]], by_server[flows[flow][1]])]
        for flow in full:
            worker, server = flows[flow]
            rates[flow] = level
            at_server[server] -= 1
            at_worker[worker] -= 1
            server_left[server] = max(0.0, server_left[server] - level)
            worker_left[worker] = max(0.0, worker_left[worker] - level)
        rising = [flow for flow in rising if rates[flow] == 0.0]
    return rates


class Fabric:
    """The transfers of one direction: at most one per (worker, server) pair, moving at their fair rates.

    Times and amounts of work are whole units (see ``time_scale``); ends are rounded to whole units, so that transfers
    that end together by symmetry end at one instant. Use: ``leave`` and ``join`` as often as needed, then ``settle``.

    As long as no worker's card can bind, every server splits its rate evenly and has one clock, which counts the work
    that each of its transfers has received: a transfer ends when the clock reaches its mark, and a change costs
    O(transfers of that server). Otherwise every transfer moves at the rate that :func:`fair_rates` gives it.
    """

    __slots__ = ("_cards", "_clocks", "_counts", "_joining", "_leaving", "_single", "changed", "next_end")

    def __init__(self, *, workers: int, servers: int, worker_rate: float, server_rate: float) -> None:
        """Take the numbers of cards and their rates as multiples of a channel's nominal rate."""
        self._cards = (workers, servers, worker_rate, server_rate)
        self._clocks = [_Clock(server_rate) for _ in range(servers)]
        self._counts = [0] * servers
        self._single: _Single | None = None
        self._leaving: list[Pair] = []
        self._joining: list[tuple[Pair, float]] = []
        self.changed = False
        """Whether there is anything to settle."""
        self.next_end = math.inf
        """When the next transfer ends if nothing changes before; infinite when none is on its way."""

    def leave(self, pair: Pair) -> None:
        """Take the transfer of a (worker, server) pair out at the next ``settle``."""
        self._leaving.append(pair)
        self._counts[pair[1]] -= 1
        self.changed = True

    def join(self, pair: Pair, work: float) -> None:
        """Put a transfer in at the next ``settle``; ``work`` is its time at the nominal rate, above 0."""
        self._joining.append((pair, work))
        self._counts[pair[1]] += 1
        self.changed = True

    def ended(self) -> list[Pair]:
        """Return the pairs whose transfers end at ``next_end``; each has to ``leave``."""
        if self._single is not None:
            return [pair for pair, end in self._single.ends.items() if end == self.next_end]
        found = [
            (clock.ended(), server) for server, clock in enumerate(self._clocks) if clock.next_end == self.next_end
        ]
        return [(worker, server) for workers, server in found for worker in workers]

    def settle(self, now: float) -> None:
        """Carry out what was asked for since the last time, at time ``now``."""
        workers, servers, worker_rate, server_rate = self._cards
        # The most that a worker can be sent is what one transfer from every busy server brings.
        if sum([min(1.0, server_rate / count) for count in self._counts if count]) <= worker_rate:
            if self._single is not None:
                self._spread(now)
            self._settle_clocks(now)
        else:
            if self._single is None:
                self._single = _Single(now, self._clocks)
            self._single.change(now, self._leaving, self._joining)
            self.next_end = self._single.plan(workers, servers, worker_rate, server_rate)
        self._leaving, self._joining, self.changed = [], [], False

    def _settle_clocks(self, now: float) -> None:
        clocks = self._clocks
        touched = {pair[1] for pair in self._leaving} | {pair[1] for pair, _ in self._joining}
        for server in touched:
            clocks[server].advance(now)
        for worker, server in self._leaving:
            del clocks[server].marks[worker]
        for (worker, server), work in self._joining:
            clocks[server].marks[worker] = clocks[server].reading + work
        for server in touched:
            clocks[server].plan()
        self.next_end = min([clock.next_end for clock in clocks])

    def _spread(self, now: float) -> None:
        """Go back from single rates to one clock per server."""
        assert self._single is not None
        self._single.change(now, (), ())
        for clock in self._clocks:
            clock.marks, clock.reading, clock.since = {}, 0.0, now
        for (worker, server), work in self._single.left.items():
            self._clocks[server].marks[worker] = work
        for clock in self._clocks:
            clock.plan()
        self._single = None


class _Clock:
    """A server that splits its rate evenly: ``reading`` is the work that every transfer has received."""

    __slots__ = ("marks", "next_end", "next_mark", "rate", "reading", "server_rate", "since")

    def __init__(self, server_rate: float) -> None:
        self.server_rate = server_rate
        self.marks: dict[int, float] = {}
        self.reading, self.since, self.rate = 0.0, 0.0, 0.0
        self.next_mark, self.next_end = math.inf, math.inf

    def advance(self, now: float) -> None:
        self.reading += self.rate * (now - self.since)
        self.since = now

    def plan(self) -> None:
        """Set the rate and the next end from the transfers that are there now."""
        if self.marks:
            self.rate = min(1.0, self.server_rate / len(self.marks))
            self.next_mark = min(self.marks.values())
            self.next_end = self.since + max(0, round((self.next_mark - self.reading) / self.rate))
        else:
            self.reading, self.rate, self.next_end = 0.0, 0.0, math.inf

    def ended(self) -> list[int]:
        together = self.next_mark + 0.5 * self.rate  # what the clock counts in half a unit of time
        return [worker for worker, mark in self.marks.items() if mark <= together]


class _Single:
    """Transfers that move at a rate of their own each."""

    __slots__ = ("ends", "left", "rates", "since")

    def __init__(self, now: float, clocks: Iterable[_Clock]) -> None:
        self.left: dict[Pair, float] = {}
        self.rates: list[float] = []
        self.ends: dict[Pair, float] = {}
        self.since = now
        for server, clock in enumerate(clocks):
            clock.advance(now)
            self.left.update({(worker, server): mark - clock.reading for worker, mark in clock.marks.items()})
        self.rates = [0.0] * len(self.left)

    def change(self, now: float, leaving: Iterable[Pair], joining: Iterable[tuple[Pair, float]]) -> None:
        passed, left = now - self.since, self.left
        for pair, rate in zip(left, self.rates, strict=True):
            left[pair] -= rate * passed
        for pair in leaving:
            del left[pair]
        left.update(joining)
        self.since = now

    def plan(self, workers: int, servers: int, worker_rate: float, server_rate: float) -> float:
        """Set the rates and return when the next transfer ends."""
        self.rates = fair_rates(
            list(self.left), workers=workers, servers=servers, worker_rate=worker_rate, server_rate=server_rate
        )
        works = zip(self.left.items(), self.rates, strict=True)
        self.ends = {pair: self.since + max(0, round(work / rate)) for (pair, work), rate in works}
        return min(self.ends.values())
