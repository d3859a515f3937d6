"""Synchronisation models as policy objects: when a worker may have parameters, and which gradients make an update.

A policy is created alike on every rank; on a server it is opened with a :class:`Book` (who is in the job, what has come
in) and asked at each step of the protocol, one call at a time. It sends nothing and computes nothing: the server does.

* :class:`BSP`: bulk synchronous parallel; every update has one gradient of every worker.
* :class:`ASP`: asynchronous; every gradient is an update, nobody waits.
* :class:`SSP`: stale synchronous (Ho et al., NIPS 2013); as ASP, but no worker is more than s steps ahead of another.
* :class:`BackupWorkers`: redundant execution (Chen et al., arXiv:1604.00981); an update takes the first n - b gradients.
* :class:`LocalSGD`: every worker takes H steps of its own, then what they changed is averaged (Stich, ICLR 2019).
* :class:`ElasticBSP`: barriers where predicted iteration ends meet best (Zhao et al., ICDM 2019).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ddltool.analyzers.barriers.predict import PREDICTORS, predict_ends
from ddltool.analyzers.barriers.tradeoff import OBJECTIVES, Objective, best_barrier
from ddltool.analyzers.barriers.zipline import zipline
from ddltool.errors import InputError, did_you_mean
from ddltool.telemetry import BarrierRow

# Supersteps of one iteration before ElasticBSP's first prediction. The first iteration sets up connections and caches
# and is too long to predict from, so it takes two.
WARM_UP = 2
LENGTHS_KEPT = 200
SUPERSTEPS_KEPT = 1_000


@dataclass(frozen=True, slots=True)
class Update:
    """One update of one parameter: the sum of ``gradients``, in this order, over ``divisor``."""

    name: str
    gradients: list[Tensor]
    divisor: int


@dataclass(kw_only=True, slots=True)
class Book:
    """What one server knows about the job; the server keeps it, policies read it."""

    workers: int
    """How many began, or the most that there were at once."""
    names: tuple[str, ...]
    """This server's trainable parameters."""
    seats: int = 0
    """How many workers there are with all who may join; 0: as many as began."""
    decides: bool = True
    """Whether this is server 0, which decides for all where one has to."""
    version: dict[str, int] = field(default_factory=dict)
    """Per parameter, how many updates have been made."""
    members: set[int] = field(init=False)
    """Workers that have neither closed nor been lost."""
    pushed: dict[str, list[int]] = field(init=False)
    """Per trainable parameter and worker, how many gradients have come."""
    steps: list[int] = field(init=False)
    """Per worker, how many steps' gradients have come whole; who joined counts from its ``start``."""
    begun: list[int] = field(init=False)
    """Per worker, the version of the trainable parameter that its last pull began with."""
    start: dict[int, int] = field(default_factory=dict)
    """Per worker that joined late, the number of its first step."""

    def __post_init__(self) -> None:
        self.seats = self.seats or self.workers
        self.members = set(range(self.workers))
        self.version = self.version or dict.fromkeys(self.names, 0)
        self.pushed = {name: [0] * self.seats for name in self.names}
        self.steps, self.begun = [0] * self.seats, [0] * self.seats


class Policy:
    """What the models have in common. A model that nothing here suits overrides any of the methods."""

    settings: tuple[object, ...] = ()
    local_steps = 1
    """Steps that a worker takes between two pulls."""
    fixed = False
    """Whether the loss of a worker ends the run."""
    lost_after_s = 10.0
    """How long a worker for which others wait may be silent, unless the server is told otherwise."""
    quota: Sequence[int] = ()
    """Steps from the beginning of the job to the next barrier, per worker."""
    book: Book

    def describe(self) -> str:
        """Return the model and its settings; ranks that differ here refuse to start."""
        return type(self).__name__ + (f"({', '.join(map(str, self.settings))})" if self.settings else "")

    def open(self, book: Book) -> None:
        """Begin on a server."""
        self.book = book

    def waits_for(self, worker: int, clock: int, name: str) -> list[int] | None:
        """Return for whose gradients ``worker`` must wait before it gets the trainable parameter ``name``.

        None: it may have it now; an empty list: it waits for a decision. The gradients of the ``clock`` steps that it
        has made are in. What may go is sent before another call.
        """
        return None

    def take(self, worker: int, name: str, gradient: Tensor) -> tuple[bool, list[Update]]:
        """Take a gradient of a member; return whether it counts (else it is dropped), and the updates that are due."""
        raise NotImplementedError

    def settle(self) -> list[Update]:
        """Return the updates that are due now that a member is gone."""
        return []

    def joined(self, worker: int, clock: int) -> None:
        """``worker`` is a member from now on; its first step has the number ``clock``, which nobody has pushed yet."""

    def decide(self, now_s: float, worker: int | None = None) -> BarrierRow | None:
        """Return the superstep that is over, if one is; the other servers then :meth:`follow` this one's ``quota``.

        Asked on server 0 when the job begins, when all gradients of one more step of ``worker`` are in, and when a member
        is gone; ``now_s``: since the beginning.
        """
        return None

    def follow(self, quota: list[int]) -> None:
        """Server 0 has decided that worker w makes ``quota[w]`` steps, from the beginning of the job to the next barrier."""


class BSP(Policy):
    """Bulk synchronous parallel: version v of a parameter needs the v-th gradient of every member, added in rank order.

    The update takes the mean over the gradients that there are: when a worker is lost, over fewer. ``fixed``: every
    update takes all workers; the loss of one ends the run.
    """

    def __init__(self, *, fixed: bool = False) -> None:
        if fixed:
            self.fixed, self.settings, self.lost_after_s = True, ("fixed",), 30.0

    def open(self, book: Book) -> None:
        """Begin on a server."""
        super().open(book)
        self._pending: dict[str, dict[int, Tensor]] = {name: {} for name in book.names}

    def waits_for(self, worker: int, clock: int, name: str) -> list[int] | None:
        """Wait for the update with the gradients of the step before."""
        if self.book.version[name] >= clock:
            return None
        return sorted(self._needed(name) - self._pending[name].keys())

    def take(self, worker: int, name: str, gradient: Tensor) -> tuple[bool, list[Update]]:
        """Update when all have come."""
        self._pending[name][worker] = gradient
        return True, self._due([name])

    def settle(self) -> list[Update]:
        """Update what waited for the one that is gone."""
        return self._due(self.book.names)

    def _needed(self, name: str) -> set[int]:
        """Return the members that take part in the next update; who has joined does from its first step on."""
        if self.fixed:
            return set(range(self.book.workers))
        next_step, start = self.book.version[name], self.book.start
        return {worker for worker in self.book.members if start.get(worker, 0) <= next_step}

    def _due(self, names: Iterable[str]) -> list[Update]:
        due = []
        for name in names:
            pending = self._pending[name]
            if pending and pending.keys() >= self._needed(name):
                due.append(Update(name, [pending[worker] for worker in sorted(pending)], len(pending)))
                self._pending[name] = {}
        return due


class LocalSGD(BSP):
    """H local steps, then averaging: what travels as a gradient is pulled minus local value.

    With ``torch.optim.SGD(lr=1.0)`` on the servers the new value is the workers' mean; other optimizers make it slow
    momentum and the like. H = 1 is BSP with the local optimizer's state on each worker. Raises InputError below 1.
    """

    def __init__(self, steps: int) -> None:
        if steps < 1:
            raise InputError("local SGD", f"{steps} local steps", "give 1 or more")
        super().__init__()
        self.local_steps, self.settings = steps, (steps,)


class ASP(Policy):
    """Asynchronous parallel: every gradient is applied when it comes, over the number of workers.

    So a sample moves the weights as far as under BSP with the same learning rate. A worker's own gradients are in what
    it pulls (read my writes), which waits for nobody else.
    """

    def take(self, worker: int, name: str, gradient: Tensor) -> tuple[bool, list[Update]]:
        """Update at once."""
        return True, [Update(name, [gradient], self.book.workers)]

    def _behind(self, name: str, target: Sequence[int]) -> list[int]:
        """Return the members that have not pushed ``target`` gradients of ``name``."""
        pushed = self.book.pushed[name]
        return sorted(other for other in self.book.members if pushed[other] < target[other])


class SSP(ASP):
    """Stale synchronous parallel: a worker begins step c only when every member has pushed c - s steps.

    So what it pulls holds all gradients up to step c - s - 1 of every member; s = 0 lets nobody run ahead. Raises
    InputError for an s below 0.
    """

    def __init__(self, staleness: int) -> None:
        if staleness < 0:
            raise InputError("SSP", f"a staleness of {staleness}", "give 0 or more")
        self.staleness, self.settings = staleness, (staleness,)

    def waits_for(self, worker: int, clock: int, name: str) -> list[int] | None:
        """Wait for those who are too far behind."""
        return self._behind(name, [clock - self.staleness] * self.book.seats) or None


class BackupWorkers(Policy):
    """Redundant execution: an iteration ends with the first n - b whole sets of gradients; later ones are dropped.

    A worker whose gradients came too late goes on at once with the iteration that is under way. Lost workers count as
    backups until there are fewer than n - b left. Each server has iterations of its own, so with several servers a step
    may count on one and be too late on another. Raises InputError for a b below 0.
    """

    def __init__(self, backups: int) -> None:
        if backups < 0:
            raise InputError("backup workers", f"{backups} of them", "give 0 or more")
        self.backups, self.settings = backups, (backups,)

    def open(self, book: Book) -> None:
        """Begin on a server. Raises InputError when all workers would be backups."""
        if self.backups >= book.workers:
            problem = f"{self.backups} of {book.workers} workers"
            raise InputError("backup workers", problem, "at least one worker must be none")
        super().open(book)
        self._pending: dict[int, dict[str, Tensor]] = {}
        self._arrived: set[int] = set()

    def waits_for(self, worker: int, clock: int, name: str) -> list[int] | None:
        """Wait for the end of the iteration to which one has contributed."""
        return sorted(self.book.members - self._arrived) if worker in self._arrived else None

    def take(self, worker: int, name: str, gradient: Tensor) -> tuple[bool, list[Update]]:
        """Drop what was computed with parameters of an iteration that is over."""
        if self.book.begun[worker] < self.book.version[name]:  # an iteration updates all of a server's parameters
            self._pending.pop(worker, None)
            return False, []
        mine = self._pending.setdefault(worker, {})
        mine[name] = gradient
        if len(mine) == len(self.book.names):
            self._arrived.add(worker)
        return True, self.settle()

    def settle(self) -> list[Update]:
        """Update all when enough have come whole."""
        need = max(1, min(self.book.workers - self.backups, len(self.book.members)))
        if len(self._arrived) < need:
            return []
        first, pending = sorted(self._arrived), self._pending
        self._pending, self._arrived = {}, set()
        return [Update(name, [pending[w][name] for w in first], len(first)) for name in self.book.names]


class ElasticBSP(ASP):
    """Elastic supersteps with a lookahead of R iterations; the gap within a superstep is below R, or ``max_gap``.

    ``predictor``: one of ``PREDICTORS``. ``objective`` and ``max_gap``: as ``best_barrier``. Raises InputError for a
    lookahead below 1, a negative gap, and unknown names.

    Attributes:
        supersteps: the last ``SUPERSTEPS_KEPT`` that are over, on server 0.
    """

    def __init__(
        self, lookahead: int, *, predictor: str = "ema", objective: Objective = "waiting", max_gap: int | None = None
    ) -> None:
        if lookahead < 1:
            raise InputError("ElasticBSP:lookahead", f"is {lookahead}", "give 1 or more")
        if max_gap is not None and max_gap < 0:
            raise InputError("ElasticBSP:max_gap", f"is {max_gap}", "give 0 or more")
        for what, name, known in (("predictor", predictor, PREDICTORS), ("objective", objective, OBJECTIVES)):
            if name not in known:
                raise InputError(f"ElasticBSP:{what}", f'"{name}"', did_you_mean(name, known))
        self.lookahead, self.predictor, self.objective, self.max_gap = lookahead, predictor, objective, max_gap
        self.settings = lookahead, predictor, objective, max_gap

    def open(self, book: Book) -> None:
        """Begin on a server. Raises InputError when server 0 would see no gradients."""
        if book.decides and not book.names:
            raise InputError("transfer plan", "puts no trainable parameter on server 0", "it must see the gradients")
        super().open(book)
        self.supersteps: deque[BarrierRow] = deque(maxlen=SUPERSTEPS_KEPT)
        self._over = 0
        self.quota: list[int] = [1] * book.seats
        self._base = [0] * book.seats
        self._lengths: list[list[float]] = [[] for _ in range(book.seats)]
        self._last_end_s: list[float | None] = [None] * book.seats  # None: before the end of its first iteration
        self._workers: list[int] = []  # of the superstep under way, as what follows
        self._iterations: list[int] = []
        self._predicted_end_s: list[float] = []
        self._began_s = 0.0

    def waits_for(self, worker: int, clock: int, name: str) -> list[int] | None:
        """Wait at the barrier; behind it, for the gradients of all up to it."""
        if clock >= self.quota[worker]:
            return self._behind(name, self.quota)
        return (self._behind(name, self._base) or None) if clock == self._base[worker] else None

    def joined(self, worker: int, clock: int) -> None:
        """Its first superstep is the next one."""
        self.quota = [*self.quota]
        self.quota[worker], self._base[worker] = max(self.quota[worker], clock), max(self._base[worker], clock)

    def decide(self, now_s: float, worker: int | None = None) -> BarrierRow | None:
        """Begin a superstep when every member has made its iterations of the last one; the first ones are of one each."""
        if worker is not None:
            if (last_s := self._last_end_s[worker]) is not None:
                self._lengths[worker] = [*self._lengths[worker], now_s - last_s][-LENGTHS_KEPT:]
            self._last_end_s[worker] = now_s
        book, members = self.book, sorted(self.book.members)
        if not self._workers:
            self._workers, self._iterations, self._began_s = members, [1] * len(members), now_s
            return None
        if not members or any(book.steps[worker] < self.quota[worker] for worker in members):
            return None
        ends_s = [self._last_end_s[worker] if worker in book.members else None for worker in self._workers]
        over = BarrierRow(
            time_s=now_s,
            superstep=self._over,
            workers=self._workers,
            iterations=self._iterations,
            predicted_end_s=self._predicted_end_s,
            end_s=[None if end_s is None else end_s - self._began_s for end_s in ends_s],
            length_s=now_s - self._began_s,
        )
        self.supersteps.append(over)
        self._over += 1
        lengths = [self._lengths[worker] for worker in members]
        self._workers, self._began_s = members, now_s
        self._iterations, self._predicted_end_s = [1] * len(members), []
        if self._over >= WARM_UP and all(lengths):
            self._iterations, self._predicted_end_s = self.choose([np.array(recorded) for recorded in lengths])
        quota = [*self.quota]
        for worker, count in zip(members, self._iterations, strict=True):
            quota[worker] = book.steps[worker] + count
            if self._last_end_s[worker] is not None:
                self._last_end_s[worker] = now_s  # the wait belongs to no iteration
        self.follow(quota)
        return over

    def choose(self, lengths_s: list[np.ndarray]) -> tuple[list[int], list[float]]:
        """Return how many iterations each worker makes, and when it should begin to wait, from recorded lengths."""
        ends = predict_ends(lengths_s, np.zeros(len(lengths_s)), self.lookahead, PREDICTORS[self.predictor])
        if self.objective == "waiting" and self.max_gap is None:
            barrier = zipline(ends)
        else:
            barrier = best_barrier(ends, objective=self.objective, max_gap=self.max_gap)
        return barrier.iterations.tolist(), barrier.chosen_s.tolist()

    def follow(self, quota: list[int]) -> None:
        """The steps up to the barrier that has been reached are the base of the next superstep."""
        self._base, self.quota = [*self.quota], quota
