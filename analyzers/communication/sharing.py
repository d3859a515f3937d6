"""How transfers that share network cards divide their rate: max-min fairness, one direction at a time.

Every parameter server and every worker has one network card, full duplex: what leaves a server (recv ops) and what
reaches it (send ops) do not compete. Rates are multiples of a channel's nominal rate, at which a transfer that is alone
runs. Start at :func:`fair_rates`; :class:`Fabric` moves transfers at those rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Pair = tuple[int, int]
"""(worker, server): the channel between them, which carries one transfer at a time."""


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
