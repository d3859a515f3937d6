"""Synchronisation models as policy objects: when a worker may have parameters, and which gradients make an update.

A policy is created alike on every rank; on a server it is opened with a :class:`Book` (who is in the job, what has come
in) and asked at each step of the protocol, one call at a time. It sends nothing and computes nothing:
:mod:`ddltool.runtime.servers` does.

* :class:`BSP`: bulk synchronous parallel; every update has one gradient of every worker.
* :class:`ASP`: asynchronous; every gradient is an update, nobody waits.
* :class:`SSP`: stale synchronous (Ho et al., NIPS 2013); as ASP, but no worker is more than s steps ahead of another.
* :class:`BackupWorkers`: redundant execution (Chen et al., arXiv:1604.00981); an update takes the first n - b gradients.
* :class:`LocalSGD`: every worker takes H steps of its own, then what they changed is averaged (Stich, ICLR 2019).
* :class:`ddltool.runtime.servers.elastic_bsp.ElasticBSP`: barriers where predicted iteration ends meet best.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from ddltool.errors import InputError


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
    whole_pulls = False
    """Whether a pull must bring all parameters of a server as they were at one moment."""
    book: Book

    def describe(self) -> str:
        """Return the model and its settings; ranks that differ here refuse to start."""
        return type(self).__name__

    def open(self, book: Book) -> None:
        """Begin on a server."""
        self.book = book

    def may_begin(self, worker: int, clock: int) -> bool:
        """Return whether the pull of ``worker``, which has pushed ``clock`` steps, may begin."""
        return True

    def may_pull(self, worker: int, clock: int, name: str) -> bool:
        """Return whether ``worker`` may have the trainable parameter ``name`` now."""
        raise NotImplementedError

    def blockers(self, worker: int, clock: int, name: str) -> list[int]:
        """Return the members for whose gradients ``worker`` waits."""
        return []

    def began(self, worker: int) -> None:
        """A pull of ``worker`` begins."""

    def take(self, worker: int, name: str, gradient: Tensor) -> tuple[bool, list[Update]]:
        """Take a gradient of a member; return whether it counts (else it is dropped), and the updates that are due."""
        raise NotImplementedError

    def settle(self) -> list[Update]:
        """Return the updates that are due now that a member is gone."""
        return []

    def applied(self) -> None:
        """The updates that were due are made and can be seen."""

    def joined(self, worker: int, clock: int, now_s: float) -> None:
        """``worker`` is a member from now on; its first step has the number ``clock``, which nobody has pushed yet."""


class BSP(Policy):
    """Bulk synchronous parallel: version v of a parameter needs the v-th gradient of every member, added in rank order.

    The update takes the mean over the gradients that there are: when a worker is lost, over fewer.
    """

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

    With ``MomentumSGD(lr=1.0)`` on the servers the new value is the workers' mean; other optimizers make it slow
    momentum and the like. H = 1 is BSP with the local optimizer's state on each worker.
    """

    def __init__(self, steps: int) -> None:
        """``steps``: H. Raises InputError below 1."""
        if steps < 1:
            raise InputError("local SGD", f"{steps} local steps", "give 1 or more")
        self.local_steps = steps

    def describe(self) -> str:
        """See :meth:`Policy.describe`."""
        return f"LocalSGD({self.local_steps})"


class ASP(Policy):
    """Asynchronous parallel: every gradient is applied when it comes, over the number of workers.

    So a sample moves the weights as far as under BSP with the same learning rate. A worker's own gradients are in what
    it pulls (read my writes), which waits for nobody else.
    """

    def may_pull(self, worker: int, clock: int, name: str) -> bool:
        """See :meth:`Policy.may_pull`."""
        return self.book.pushed[name][worker] >= clock

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

    def may_pull(self, worker: int, clock: int, name: str) -> bool:
        """See :meth:`Policy.may_pull`."""
        return super().may_pull(worker, clock, name) and not self.blockers(worker, clock, name)

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

    whole_pulls = True

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
        self._turning = False
        self._works_on = [0] * book.seats
        self._pending: dict[int, dict[str, Tensor]] = {}
        self._arrived: set[int] = set()

    def may_begin(self, worker: int, clock: int) -> bool:
        """See :meth:`Policy.may_begin`."""
        if not self.book.names:
            return True
        return self.book.steps[worker] >= clock and worker not in self._arrived and not self._turning

    def began(self, worker: int) -> None:
        """See :meth:`Policy.began`."""
        self._works_on[worker] = self._iteration

    def may_pull(self, worker: int, clock: int, name: str) -> bool:
        """See :meth:`Policy.may_pull`."""
        return True

    def blockers(self, worker: int, clock: int, name: str) -> list[int]:
        """See :meth:`Policy.blockers`."""
        return sorted(self.book.members - self._arrived) if worker in self._arrived else []

    def take(self, worker: int, name: str, gradient: Tensor) -> tuple[bool, list[Update]]:
        """See :meth:`Policy.take`."""
        if self._works_on[worker] < self._iteration or self._turning:
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
        if self._turning or len(self._arrived) < need:
            return []
        self._turning = True
        first = sorted(self._arrived)
        return [Update(name, [self._pending[w][name] for w in first], len(first)) for name in self.book.names]

    def applied(self) -> None:
        """See :meth:`Policy.applied`."""
        if self._turning:
            self._turning, self._iteration = False, self._iteration + 1
            self._pending, self._arrived = {}, set()
