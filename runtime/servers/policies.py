"""Synchronisation models as policy objects: when a worker may have parameters, and which gradients make an update.

A policy is created alike on every rank. On a server it is opened with a :class:`ServerState` (who is in the job, what
has come in) and asked at each step of the protocol, one call at a time. It sends nothing and computes nothing: the
server does.

* :class:`BSP`: bulk synchronous parallel; every update has one gradient of every worker.
* :class:`ASP`: asynchronous; every gradient is an update, nobody waits.
* :class:`SSP`: stale synchronous (Ho et al., NIPS 2013); as ASP, but no worker is more than s steps ahead of another.
* :class:`ElasticBSP`: barriers where predicted iteration ends meet best (Zhao et al., ICDM 2019).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ddltool.analyzers.job.barriers.predict import PREDICTORS, predict_ends
from ddltool.analyzers.job.barriers.tradeoff import OBJECTIVES, Objective, best_barrier
from ddltool.analyzers.job.barriers.zipline import zipline
from ddltool.errors import InputError, did_you_mean
from ddltool.telemetry import BarrierRow

# Supersteps of one iteration before ElasticBSP's first prediction. The first iteration sets up connections and caches
# and is too long to predict from, so it takes two.
WARM_UP = 2
LENGTHS_KEPT = 200  # latest iteration times of each worker, from which ends are predicted
SUPERSTEPS_KEPT = 1_000  # latest supersteps, to be looked at


@dataclass(frozen=True, slots=True)
class Update:
    """One update of one parameter: the sum of ``gradients``, in this order, over ``divisor``."""

    name: str
    gradients: list[Tensor]
    divisor: int


@dataclass(kw_only=True, slots=True)
class ServerState:
    """One server's view of the job; the server keeps it up to date, policies read it."""

    workers: int
    """The workers that began the job, or the most members at one time if that is more."""
    names: tuple[str, ...]
    """This server's trainable parameters."""
    seats: int = 0
    """Workers with all that may join; 0: as many as began."""
    decides: bool = True
    """Whether this is server 0, which decides for all where one has to."""
    version: dict[str, int] = field(default_factory=dict)
    """Per parameter, how many updates have been made."""
    members: set[int] = field(init=False)
    """Workers that have neither closed nor been lost."""
    pushed: dict[str, list[int]] = field(init=False)
    """Per trainable parameter and worker, the number of gradients that have come; a joiner's counts from its ``start``."""
    steps: list[int] = field(init=False)
    """Per worker, how many steps' gradients have come whole; who joined counts from its ``start``."""
    start: dict[int, int] = field(default_factory=dict)
    """Per worker that joined late, the number of its first step."""

    def __post_init__(self) -> None:
        """Let all workers that begin the job be members that have made no step; fill in what was not given."""
        self.seats = self.seats or self.workers
        self.members = set(range(self.workers))
        self.version = self.version or dict.fromkeys(self.names, 0)
        self.pushed = {name: [0] * self.seats for name in self.names}
        self.steps = [0] * self.seats


class SyncPolicy:
    """The interface of a synchronisation model on a server; by default nobody waits and nothing is decided."""

    settings: tuple[object, ...] = ()
    fixed = False
    """Whether the loss of a worker ends the run."""
    lost_after_s = 10.0
    """How long a worker for which others wait may be silent, unless the server is told otherwise."""
    quota: Sequence[int] = ()
    """Steps from the beginning of the job to the next barrier, per worker."""
    state: ServerState

    def describe(self) -> str:
        """Return the model and its settings; ranks that differ here refuse to start."""
        return type(self).__name__ + (f"({', '.join(map(str, self.settings))})" if self.settings else "")

    def open(self, state: ServerState) -> None:
        """Begin on a server, which keeps ``state`` up to date."""
        self.state = state

    def waits_for(self, worker: int, clock: int, name: str) -> list[int] | None:
        """Return the workers whose gradients must come before ``worker`` gets the trainable parameter ``name`` again.

        None: the parameter may be sent now; an empty list: the worker waits for a decision. ``clock`` is the number of
        steps that the worker has made, whose gradients have all come. The server sends a released parameter before its
        next call.
        """
        return None

    def take(self, worker: int, name: str, gradient: Tensor) -> list[Update]:
        """Take the ``gradient`` of parameter ``name`` that a member has sent, and return the updates that are due."""
        raise NotImplementedError

    def settle(self) -> list[Update]:
        """Return the updates that are due now that a member, for whose gradients they waited, is gone."""
        return []

    def joined(self, worker: int, clock: int) -> None:
        """Take ``worker`` as a member from now on; its first step has the number ``clock``, which nobody has pushed yet."""

    def decide(self, now_s: float, worker: int | None = None) -> BarrierRow | None:
        """Return the superstep (the iterations between two barriers) that is over, None if none is; choose the next barrier.

        The other servers then :meth:`follow` this one's ``quota``. Called on server 0 when the job begins, when all
        gradients of one more step of ``worker`` are in, and when a member is gone; ``now_s``: seconds since the
        beginning.
        """
        return None

    def follow(self, quota: list[int]) -> None:
        """Take over server 0's decision: worker w reaches the next barrier when it has made ``quota[w]`` steps in all."""


class BSP(SyncPolicy):
    """Bulk synchronous parallel: version v of a parameter needs the v-th gradient of every member, added in rank order.

    The update takes the mean over the gradients that there are: when a worker is lost, over fewer. ``fixed``: every
    update takes all workers; the loss of one ends the run.
    """

    def __init__(self, *, fixed: bool = False) -> None:
        """Choose whether all workers are needed; a lost one then ends the run, so it may be silent for longer."""
        if fixed:
            self.fixed, self.settings, self.lost_after_s = True, ("fixed",), 30.0

    def open(self, state: ServerState) -> None:
        """Begin on a server, without gradients."""
        super().open(state)
        self._pending_gradients: dict[str, dict[int, Tensor]] = {name: {} for name in state.names}

    def waits_for(self, worker: int, clock: int, name: str) -> list[int] | None:
        """Return the workers whose gradients the update of the step before still needs; None when it was made."""
        if self.state.version[name] >= clock:
            return None
        return sorted(self._needed_workers(name) - self._pending_gradients[name].keys())

    def take(self, worker: int, name: str, gradient: Tensor) -> list[Update]:
        """Keep the gradient, and return the update once every needed worker's gradient is there."""
        self._pending_gradients[name][worker] = gradient
        return self._due_updates([name])

    def settle(self) -> list[Update]:
        """Return the updates that have waited only for the member that is gone."""
        return self._due_updates(self.state.names)

    def _needed_workers(self, name: str) -> set[int]:
        """Return the workers whose gradients the next update needs; a joiner counts from its first step on."""
        if self.fixed:
            return set(range(self.state.workers))
        next_step, start = self.state.version[name], self.state.start
        return {worker for worker in self.state.members if start.get(worker, 0) <= next_step}

    def _due_updates(self, names: Iterable[str]) -> list[Update]:
        """Return the updates of those parameters that have a gradient of every needed worker, and forget these gradients."""
        updates = []
        for name in names:
            pending = self._pending_gradients[name]
            if pending and pending.keys() >= self._needed_workers(name):
                updates.append(Update(name, [pending[worker] for worker in sorted(pending)], len(pending)))
                self._pending_gradients[name] = {}
        return updates


class ASP(SyncPolicy):
    """Asynchronous parallel: every gradient is applied when it comes, divided by the number of workers.

    So a sample moves the weights as far as under BSP with the same learning rate. A worker's own gradients are in what
    it pulls, which waits for nobody else.
    """

    def take(self, worker: int, name: str, gradient: Tensor) -> list[Update]:
        """Return an update with this gradient alone: nobody waits."""
        return [Update(name, [gradient], self.state.workers)]

    def _members_behind(self, name: str, target: Sequence[int]) -> list[int]:
        """Return the members that have pushed fewer gradients of ``name`` than their ``target``, given by worker."""
        pushed = self.state.pushed[name]
        return sorted(other for other in self.state.members if pushed[other] < target[other])


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
        """Return the members that are more than ``staleness`` steps behind step ``clock``; None: none is."""
        return self._members_behind(name, [clock - self.staleness] * self.state.seats) or None


class ElasticBSP(ASP):
    """Elastic supersteps: barriers at the iterations, up to ``lookahead`` ahead, whose predicted ends meet best.

    Args:
        lookahead: R, iterations of each worker among which the next barrier is chosen.
        predictor: of iteration times: one of ``PREDICTORS``.
        objective: what the barrier is best at, as in :func:`~ddltool.analyzers.job.barriers.tradeoff.best_barrier`.
        max_gap: most iterations by which workers may differ within a superstep; None: below R.

    Raises InputError for a lookahead below 1, a negative gap, and unknown names.

    Attributes:
        supersteps: the last ``SUPERSTEPS_KEPT`` that are over, on server 0.
    """

    def __init__(
        self, lookahead: int, *, predictor: str = "ema", objective: Objective = "waiting", max_gap: int | None = None
    ) -> None:
        """Check the settings; what is known of the workers' speeds comes with :meth:`open`."""
        if lookahead < 1:
            raise InputError("ElasticBSP:lookahead", f"is {lookahead}", "give 1 or more")
        if max_gap is not None and max_gap < 0:
            raise InputError("ElasticBSP:max_gap", f"is {max_gap}", "give 0 or more")
        for argument, name, known in (("predictor", predictor, PREDICTORS), ("objective", objective, OBJECTIVES)):
            if name not in known:
                raise InputError(f"ElasticBSP:{argument}", f'"{name}"', did_you_mean(name, known))
        self.lookahead, self.predictor, self.objective, self.max_gap = lookahead, predictor, objective, max_gap
        self.settings = lookahead, predictor, objective, max_gap

    def open(self, state: ServerState) -> None:
        """Begin on a server, with a barrier after the first iteration.

        Raises InputError when server 0 would see no gradients.
        """
        if state.decides and not state.names:
            raise InputError("transfer plan", "puts no trainable parameter on server 0", "it must see the gradients")
        super().open(state)
        self.supersteps: deque[BarrierRow] = deque(maxlen=SUPERSTEPS_KEPT)
        self._superstep_count = 0
        self.quota: list[int] = [1] * state.seats
        self._last_barrier = [0] * state.seats
        self._lengths_s: list[list[float]] = [[] for _ in range(state.seats)]
        self._last_end_s: list[float | None] = [None] * state.seats  # None: before the end of its first iteration
        # Of the superstep under way: its workers (empty before the first), and by these their iterations and ends.
        self._superstep_workers: list[int] = []
        self._iterations: list[int] = []
        self._predicted_end_s: list[float] = []
        self._superstep_began_s = 0.0

    def waits_for(self, worker: int, clock: int, name: str) -> list[int] | None:
        """Return the workers to wait for at a barrier and right after it: all that are not there yet. In between nobody (None).

        At the barrier itself the list may be empty: then the decision on the next one is awaited.
        """
        if clock >= self.quota[worker]:
            return self._members_behind(name, self.quota)
        if clock == self._last_barrier[worker]:  # the first step behind a barrier needs all gradients up to it
            return self._members_behind(name, self._last_barrier) or None
        return None

    def joined(self, worker: int, clock: int) -> None:
        """Let the joiner's first superstep be the next one: until then its barrier is where it begins."""
        self.quota = [*self.quota]
        self.quota[worker] = max(self.quota[worker], clock)
        self._last_barrier[worker] = max(self._last_barrier[worker], clock)

    def decide(self, now_s: float, worker: int | None = None) -> BarrierRow | None:
        """Note that ``worker`` has ended an iteration; when every member is at the barrier, return the superstep that is over.

        The next one is begun then. The first ``WARM_UP`` supersteps have one iteration of each member, as nothing can
        be predicted yet.
        """
        if worker is not None:
            self._note_end(worker, now_s)
        state, members = self.state, sorted(self.state.members)
        if not self._superstep_workers:
            self._superstep_workers, self._iterations, self._superstep_began_s = members, [1] * len(members), now_s
            return None
        if not members or any(state.steps[worker] < self.quota[worker] for worker in members):
            return None
        finished_superstep = self._finish_superstep(now_s)
        member_lengths_s = [self._lengths_s[worker] for worker in members]
        self._superstep_workers, self._superstep_began_s = members, now_s
        self._iterations, self._predicted_end_s = [1] * len(members), []
        if self._superstep_count >= WARM_UP and all(member_lengths_s):
            self._iterations, self._predicted_end_s = self.choose(list(map(np.array, member_lengths_s)))
        quota = [*self.quota]
        for worker, count in zip(members, self._iterations, strict=True):
            quota[worker] = state.steps[worker] + count
            if self._last_end_s[worker] is not None:
                self._last_end_s[worker] = now_s  # the wait belongs to no iteration
        self.follow(quota)
        return finished_superstep

    def _note_end(self, worker: int, now_s: float) -> None:
        """Note that ``worker`` has ended an iteration; its length is known if the one before has ended too."""
        if (previous_end_s := self._last_end_s[worker]) is not None:
            self._lengths_s[worker] = [*self._lengths_s[worker], now_s - previous_end_s][-LENGTHS_KEPT:]
        self._last_end_s[worker] = now_s

    def _finish_superstep(self, now_s: float) -> BarrierRow:
        """Return the superstep that ends now, and keep it among :attr:`supersteps`; lost workers have no end in it."""
        last_ends_s = [self._last_end_s[worker] for worker in self._superstep_workers]
        is_member = [worker in self.state.members for worker in self._superstep_workers]
        finished_superstep = BarrierRow(
            time_s=now_s,
            superstep=self._superstep_count,
            workers=self._superstep_workers,
            iterations=self._iterations,
            predicted_end_s=self._predicted_end_s,
            end_s=[
                end_s - self._superstep_began_s if end_s is not None and is_here else None
                for end_s, is_here in zip(last_ends_s, is_member, strict=True)
            ],
            length_s=now_s - self._superstep_began_s,
        )
        self.supersteps.append(finished_superstep)
        self._superstep_count += 1
        return finished_superstep

    def choose(self, lengths_s: list[np.ndarray]) -> tuple[list[int], list[float]]:
        """Return each worker's number of iterations to the next barrier, and its predicted end of them in seconds from now.

        ``lengths_s``: the (k,) seconds of each worker's latest iterations.
        """
        ends = predict_ends(lengths_s, np.zeros(len(lengths_s)), self.lookahead, PREDICTORS[self.predictor])
        if self.objective == "waiting" and self.max_gap is None:
            barrier = zipline(ends)
        else:
            barrier = best_barrier(ends, objective=self.objective, max_gap=self.max_gap)
        return barrier.iterations.tolist(), barrier.chosen_s.tolist()

    def follow(self, quota: list[int]) -> None:
        """Take the present quota as the last barrier and ``quota`` as the next one."""
        self._last_barrier, self.quota = [*self.quota], quota
