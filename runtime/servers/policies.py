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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ddltool.analyzers.barriers.predict import PREDICTORS, predict_ends
from ddltool.analyzers.barriers.tradeoff import OBJECTIVES, Objective, best_barrier
from ddltool.analyzers.barriers.zipline import zipline
from ddltool.errors import InputError, did_you_mean

# Supersteps of one iteration before ElasticBSP's first prediction. The first iteration sets up connections and caches
# and is too long to predict from, so it takes two.
WARM_UP = 2
LENGTHS_KEPT = 200


@dataclass(frozen=True, slots=True)
class Update:
    """One update of one parameter: the sum of ``gradients``, in this order, over ``divisor``."""

    name: str
    gradients: list[Tensor]
    divisor: int


@dataclass(kw_only=True, slots=True)
class Superstep:
    """One decision, and what came of it. Times are seconds since the decision; the lists have one entry per worker."""

    number: int
    workers: list[int]
    """The members when it was made."""
    iterations: list[int]
    lengths_s: list[list[float]]
    """The recorded iteration lengths that the prediction had; empty in the warm-up."""
    predicted_s: list[list[float]]
    """(n, R) predicted ends, as the barrier was chosen from them; empty in the warm-up."""
    predicted_end_s: list[float]
    """When each worker was to begin to wait; empty in the warm-up."""
    began_s: float
    """Monotonic clock."""
    end_s: list[float] = field(default_factory=list)
    """When each worker began to wait (NaN: lost before); empty until the barrier is over."""


@dataclass(kw_only=True, slots=True)
class Book:
    """What one server knows about the job; the server keeps it, policies read it."""

    workers: int
    """How many began, or the most that there were at once."""
    seats: int = 0
    """How many there are with all who may join; 0: as many as began."""
    names: tuple[str, ...]
    """This server's trainable parameters."""
    decides: bool = True
    """Whether this is server 0, which decides for all where one has to."""
    members: set[int] = field(default_factory=set)
    """Workers that have neither closed nor been lost."""
    pushed: dict[str, list[int]] = field(default_factory=dict)
    """Per parameter and worker, how many gradients have come."""
    version: dict[str, int] = field(default_factory=dict)
    """Per parameter, how many updates have been made."""
    steps: list[int] = field(default_factory=list)
    """Per worker, how many steps' gradients have come whole; who joined counts from its ``start``."""
    start: dict[int, int] = field(default_factory=dict)
    """Per worker that joined late, the number of its first step."""

    def __post_init__(self) -> None:
        self.seats = self.seats or self.workers


class Policy:
    """What the models have in common. A model that nothing here suits overrides any of the methods."""

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
        return type(self).__name__

    def open(self, book: Book) -> None:
        """Begin on a server."""
        self.book = book

    def may_pull(self, worker: int, clock: int, name: str) -> bool:
        """Return whether ``worker`` may have the trainable parameter ``name`` now.

        The gradients of the ``clock`` steps that it has made are in. What may go is sent before another call.
        """
        return not self.blockers(worker, clock, name)

    def blockers(self, worker: int, clock: int, name: str) -> list[int]:
        """Return the members for whose gradients ``worker`` waits."""
        return []

    def began(self, worker: int) -> None:
        """A pull of ``worker`` begins: it gets its first trainable parameter."""

    def take(self, worker: int, name: str, gradient: Tensor) -> tuple[bool, list[Update]]:
        """Take a gradient of a member; return whether it counts (else it is dropped), and the updates that are due."""
        raise NotImplementedError

    def settle(self) -> list[Update]:
        """Return the updates that are due now that a member is gone."""
        return []

    def joined(self, worker: int, clock: int, now_s: float) -> None:
        """``worker`` is a member from now on; its first step has the number ``clock``, which nobody has pushed yet."""

    def start(self, now_s: float) -> None:
        """The job begins."""

    def ended(self, worker: int, now_s: float) -> None:
        """All gradients of one more step of ``worker`` are in."""

    def decide(self, now_s: float) -> Superstep | None:
        """Return the superstep that is over, if one is; the other servers then :meth:`follow` this one's ``quota``.

        Asked on server 0, after a step has ended or a member is gone.
        """
        return None

    def follow(self, quota: list[int]) -> None:
        """Server 0 has decided that worker w makes ``quota[w]`` steps, from the beginning of the job to the next barrier."""


class BSP(Policy):
    """Bulk synchronous parallel: version v of a parameter needs the v-th gradient of every member, added in rank order.

    The update takes the mean over the gradients that there are: when a worker is lost, over fewer.
    """

    def __init__(self, *, fixed: bool = False) -> None:
        """``fixed``: every update takes all workers; the loss of one ends the run."""
        self.fixed = fixed
        if fixed:
            self.lost_after_s = 30.0

    def describe(self) -> str:
        """See :meth:`Policy.describe`."""
        return "BSP(fixed)" if self.fixed else "BSP"

    def open(self, book: Book) -> None:
        """See :meth:`Policy.open`."""
        super().open(book)
        self._pending: dict[str, dict[int, Tensor]] = {name: {} for name in book.names}

    def may_pull(self, worker: int, clock: int, name: str) -> bool:
        """See :meth:`Policy.may_pull`."""
        return self.book.version[name] >= clock

    def blockers(self, worker: int, clock: int, name: str) -> list[int]:
        """See :meth:`Policy.blockers`."""
        return sorted(self._needed(name) - self._pending[name].keys())

    def take(self, worker: int, name: str, gradient: Tensor) -> tuple[bool, list[Update]]:
        """See :meth:`Policy.take`."""
        self._pending[name][worker] = gradient
        return True, self._due([name])

    def settle(self) -> list[Update]:
        """See :meth:`Policy.settle`."""
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
    momentum and the like. H = 1 is BSP with the local optimizer's state on each worker.
    """

    def __init__(self, steps: int) -> None:
        """``steps``: H. Raises InputError below 1."""
        if steps < 1:
            raise InputError("local SGD", f"{steps} local steps", "give 1 or more")
        super().__init__()
        self.local_steps = steps

    def describe(self) -> str:
        """See :meth:`Policy.describe`."""
        return f"LocalSGD({self.local_steps})"


class ASP(Policy):
    """Asynchronous parallel: every gradient is applied when it comes, over the number of workers.

    So a sample moves the weights as far as under BSP with the same learning rate. A worker's own gradients are in what
    it pulls (read my writes), which waits for nobody else.
    """

    def take(self, worker: int, name: str, gradient: Tensor) -> tuple[bool, list[Update]]:
        """See :meth:`Policy.take`."""
        return True, [Update(name, [gradient], self.book.workers)]


class SSP(ASP):
    """Stale synchronous parallel: a worker begins step c only when every member has pushed c - s steps.

    So what it pulls holds all gradients up to step c - s - 1 of every member; s = 0 lets nobody run ahead.
    """

    def __init__(self, staleness: int) -> None:
        """``staleness``: s. Raises InputError below 0."""
        if staleness < 0:
            raise InputError("SSP", f"a staleness of {staleness}", "give 0 or more")
        self.staleness = staleness

    def describe(self) -> str:
        """See :meth:`Policy.describe`."""
        return f"SSP({self.staleness})"

    def blockers(self, worker: int, clock: int, name: str) -> list[int]:
        """See :meth:`Policy.blockers`."""
        pushed = self.book.pushed[name]
        return sorted(other for other in self.book.members if pushed[other] < clock - self.staleness)


class BackupWorkers(Policy):
    """Redundant execution: an iteration ends with the first n - b whole sets of gradients; later ones are dropped.

    A worker whose gradients came too late goes on at once with the iteration that is under way. Lost workers count as
    backups until there are fewer than n - b left. Each server has iterations of its own, so with several servers a step
    may count on one and be too late on another.
    """

    def __init__(self, backups: int) -> None:
        """``backups``: b. Raises InputError below 0."""
        if backups < 0:
            raise InputError("backup workers", f"{backups} of them", "give 0 or more")
        self.backups = backups

    def describe(self) -> str:
        """See :meth:`Policy.describe`."""
        return f"BackupWorkers({self.backups})"

    def open(self, book: Book) -> None:
        """See :meth:`Policy.open`."""
        if self.backups >= book.workers:
            problem = f"{self.backups} of {book.workers} workers"
            raise InputError("backup workers", problem, "at least one worker must be none")
        super().open(book)
        self._iteration = 0
        self._works_on = [0] * book.seats
        self._pending: dict[int, dict[str, Tensor]] = {}
        self._arrived: set[int] = set()

    def may_pull(self, worker: int, clock: int, name: str) -> bool:
        """See :meth:`Policy.may_pull`."""
        return worker not in self._arrived

    def began(self, worker: int) -> None:
        """See :meth:`Policy.began`."""
        self._works_on[worker] = self._iteration

    def blockers(self, worker: int, clock: int, name: str) -> list[int]:
        """See :meth:`Policy.blockers`."""
        return sorted(self.book.members - self._arrived) if worker in self._arrived else []

    def take(self, worker: int, name: str, gradient: Tensor) -> tuple[bool, list[Update]]:
        """See :meth:`Policy.take`."""
        if self._works_on[worker] < self._iteration:
            self._pending.pop(worker, None)
            return False, []
        mine = self._pending.setdefault(worker, {})
        mine[name] = gradient
        if len(mine) == len(self.book.names):
            self._arrived.add(worker)
        return True, self.settle()

    def settle(self) -> list[Update]:
        """See :meth:`Policy.settle`."""
        need = max(1, min(self.book.workers - self.backups, len(self.book.members)))
        if len(self._arrived) < need:
            return []
        first, pending = sorted(self._arrived), self._pending
        self._iteration, self._pending, self._arrived = self._iteration + 1, {}, set()
        return [Update(name, [pending[w][name] for w in first], len(first)) for name in self.book.names]


class ElasticBSP(ASP):
    """Elastic supersteps with a lookahead of R iterations; the gap within a superstep is below R, or ``max_gap``.

    Attributes:
        supersteps: the decisions so far, on server 0.
    """

    def __init__(
        self,
        lookahead: int,
        *,
        predictor: str = "ema",
        objective: Objective = "waiting",
        max_gap: int | None = None,
    ) -> None:
        """``lookahead``: R. ``predictor``: one of ``PREDICTORS``. ``objective`` and ``max_gap``: as ``best_barrier``.

        Raises InputError for a lookahead below 1, a negative gap, and unknown names.
        """
        if lookahead < 1:
            raise InputError("ElasticBSP:lookahead", f"is {lookahead}", "give 1 or more")
        if max_gap is not None and max_gap < 0:
            raise InputError("ElasticBSP:max_gap", f"is {max_gap}", "give 0 or more")
        if predictor not in PREDICTORS:
            raise InputError("ElasticBSP:predictor", f'"{predictor}"', did_you_mean(predictor, PREDICTORS))
        if objective not in OBJECTIVES:
            raise InputError("ElasticBSP:objective", f'"{objective}"', did_you_mean(objective, OBJECTIVES))
        self.lookahead, self.predictor, self.objective, self.max_gap = lookahead, predictor, objective, max_gap

    def describe(self) -> str:
        """See :meth:`Policy.describe`."""
        return f"ElasticBSP({self.lookahead}, {self.predictor}, {self.objective}, {self.max_gap})"

    def open(self, book: Book) -> None:
        """See :meth:`Policy.open`."""
        if book.decides and not book.names:
            raise InputError("transfer plan", "puts no trainable parameter on server 0", "it must see the gradients")
        super().open(book)
        self.supersteps: list[Superstep] = []
        self.quota = [1] * book.seats
        self._base = [0] * book.seats
        self._lengths: list[list[float]] = [[] for _ in range(book.seats)]
        self._last_end_s = [0.0] * book.seats
        self._came = [False] * book.seats

    def may_pull(self, worker: int, clock: int, name: str) -> bool:
        """See :meth:`Policy.may_pull`."""
        return clock < self.quota[worker] and (clock > self._base[worker] or not self._behind(name, self._base))

    def blockers(self, worker: int, clock: int, name: str) -> list[int]:
        """See :meth:`Policy.blockers`."""
        if clock >= self.quota[worker]:
            return self._behind(name, self.quota)
        return self._behind(name, self._base) if clock == self._base[worker] else []

    def _behind(self, name: str, target: Sequence[int]) -> list[int]:
        """Return the members that have not pushed ``target`` gradients of ``name``."""
        pushed = self.book.pushed[name]
        return sorted(other for other in self.book.members if pushed[other] < target[other])

    def joined(self, worker: int, clock: int, now_s: float) -> None:
        """See :meth:`Policy.joined`; its first superstep is the next one."""
        self.quota = [*self.quota]
        self.quota[worker], self._base[worker] = max(self.quota[worker], clock), max(self._base[worker], clock)
        self._last_end_s[worker] = now_s

    def start(self, now_s: float) -> None:
        """See :meth:`Policy.start`; the first superstep is one iteration each."""
        self._begin(now_s, [1] * len(self.book.members))

    def ended(self, worker: int, now_s: float) -> None:
        """See :meth:`Policy.ended`."""
        if self._came[worker]:
            self._lengths[worker] = [*self._lengths[worker], now_s - self._last_end_s[worker]][-LENGTHS_KEPT:]
        self._came[worker] = True
        self._last_end_s[worker] = now_s

    def decide(self, now_s: float) -> Superstep | None:
        """See :meth:`Policy.decide`; a superstep is over when every member has made its iterations."""
        book, members = self.book, sorted(self.book.members)
        if not members or any(book.steps[worker] < self.quota[worker] for worker in members):
            return None
        over = self.supersteps[-1]
        over.end_s = [
            self._last_end_s[worker] - over.began_s if worker in book.members else float("nan")
            for worker in over.workers
        ]
        lengths = [self._lengths[worker] for worker in members]
        if len(self.supersteps) < WARM_UP or not all(lengths):
            self._begin(now_s, [1] * len(members))
        else:
            recorded = [np.array(one) for one in lengths]
            ends = predict_ends(recorded, np.zeros(len(members)), self.lookahead, PREDICTORS[self.predictor])
            if self.objective == "waiting" and self.max_gap is None:
                barrier = zipline(ends)
            else:
                barrier = best_barrier(ends, objective=self.objective, max_gap=self.max_gap)
            self._begin(now_s, barrier.iterations.tolist(), lengths, ends.tolist(), barrier.chosen_s.tolist())
        quota = [*self.quota]
        for worker, count in zip(members, self.supersteps[-1].iterations, strict=True):
            quota[worker] = book.steps[worker] + count
            self._last_end_s[worker] = now_s  # the wait belongs to no iteration
        self.follow(quota)
        return over

    def follow(self, quota: list[int]) -> None:
        """See :meth:`Policy.follow`."""
        self._base, self.quota = [*self.quota], quota

    def _begin(
        self,
        now_s: float,
        iterations: list[int],
        lengths_s: Sequence[list[float]] = (),
        predicted_s: Sequence[list[float]] = (),
        predicted_end_s: Sequence[float] = (),
    ) -> None:
        """Begin a superstep; nothing is predicted in the warm-up."""
        self.supersteps.append(
            Superstep(
                number=len(self.supersteps),
                workers=sorted(self.book.members),
                iterations=iterations,
                lengths_s=[list(recorded) for recorded in lengths_s],
                predicted_s=list(predicted_s),
                predicted_end_s=list(predicted_end_s),
                began_s=now_s,
            )
        )
