"""The event loop of many workers that share network cards; one iteration of all of them at a time.

A worker and a server have one channel, which carries one transfer at a time; the channels of a server share its network
card, those of a worker share the worker's (:mod:`sharing`). A resource picks its next op as in :mod:`timeline`. Start at
:meth:`ClusterSimulator.iteration`.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.communication.sharing import Fabric, Pair
from ddltool.analyzers.communication.timeline import Simulator, _Ready
from ddltool.errors import InputError
from ddltool.graph import COMPUTE, RECV, Graph


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
