"""Synchronisation models as policy objects: when a worker may have parameters, and which gradients make an update.

In a *step* a worker pulls all parameters, computes, and pushes all gradients; its *clock* is the number of steps that it
has made. A *member* is a worker that takes part; more may join late.

Every rank creates an equal policy. A server opens it with a :class:`ServerState` (who is in the job, which gradients
have come) and asks it at each step of the protocol. The policy only decides; the server sends and computes.

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

# Supersteps of one iteration before ElasticBSP's first prediction: two, because the first iteration sets up connections
# and caches and is too long to predict from.
WARM_UP = 2
LENGTHS_KEPT = 200  # latest iteration times of each worker, from which ends are predicted
SUPERSTEPS_KEPT = 1_000  # latest supersteps, kept for whoever reads `supersteps`


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
    """Number of workers that began the job, or the most members at one time if that is more."""
    names: tuple[str, ...]
    """This server's trainable parameters."""
    seats: int = 0
    """Number of workers when all that may join have joined; 0: as many as began."""
    decides: bool = True
    """Whether this is server 0, which decides for all servers."""
    version: dict[str, int] = field(default_factory=dict)
    """Per parameter, how many updates have been made."""
    members: set[int] = field(init=False)
    """Workers that have neither closed nor been lost."""
    pushed: dict[str, list[int]] = field(init=False)
    """Per trainable parameter and worker, the number of gradients that have come; a late joiner's begins at ``start``."""
    steps: list[int] = field(init=False)
    """Per worker, the number of steps whose gradients have all come; a late joiner's begins at ``start``."""
    start: dict[int, int] = field(default_factory=dict)
    """Per worker that joined late, the number of its first step."""

    def __post_init__(self) -> None:
        """Make all workers that begin the job members without a step; fill in ``seats`` and ``version`` if not given."""
        self.seats = self.seats or self.workers
        self.members = set(range(self.workers))
        self.version = self.version or dict.fromkeys(self.names, 0)
        self.pushed = {name: [0] * self.seats for name in self.names}
        self.steps = [0] * self.seats


class SyncPolicy:
    """The interface of a synchronisation model on a server; by default no worker waits and nothing is decided."""

    settings: tuple[object, ...] = ()
    fixed = False
    """Whether the loss of a worker ends the run."""
    lost_after_s = 10.0
    """Seconds that a worker for which others wait may be silent, unless the server is given another number."""
    quota: Sequence[int] = ()
    """Per worker, the number of steps from the start of the job to the next barrier; empty: there are no barriers."""
    state: ServerState

    def describe(self) -> str:
        """Return the model's name and settings, such as ``SSP(3)``; ranks must agree on it for the job to start."""
        name = type(self).__name__
        return f"{name}({', '.join(map(str, self.settings))})" if self.settings else name

    def open(self, state: ServerState) -> None:
        """Start on a server, which keeps ``state`` up to date."""
        self.state = state

    def waits_for(self, worker: int, clock: int, name: str) -> list[int] | None:
        """Return the workers whose gradients must come before ``worker`` gets the trainable parameter ``name`` again.

        None: the parameter may be sent now, and is sent before the server's next call. An empty list: the worker waits
        for a decision. ``clock``: the number of steps that the worker has made, whose gradients have all come.
        """
        return None

    def take(self, worker: int, name: str, gradient: Tensor) -> list[Update]:
        """Accept the ``gradient`` of parameter ``name`` from a member, and return the updates that are now due.

        The updates may hold the gradient itself, which the server then changes.
        """
        raise NotImplementedError

    def settle(self) -> list[Update]:
        """Return the updates that have become due because a member is gone."""
        return []

    def joined(self, worker: int, clock: int) -> None:
        """Note that ``worker`` is a member from now on; its first step is number ``clock``, which no worker has pushed yet."""

    def decide(self, now_s: float, worker: int | None = None) -> BarrierRow | None:
        """If a superstep (the iterations between two barriers) is over, set the next barrier and return the superstep's row.

        Otherwise None. Called on server 0: when the job begins, when the gradients of one more step of ``worker`` have
        all come, and when a member is gone (``worker`` None). ``now_s``: seconds since the start. After a row is
        returned, the other servers :meth:`follow` this one's ``quota``.
        """
        return None

    def follow(self, quota: list[int]) -> None:
        """Adopt server 0's decision: worker w reaches the next barrier after its ``quota[w]``-th step of the job."""


class BSP(SyncPolicy):
    """Bulk synchronous parallel: version v of a parameter needs the v-th gradient of every member, added in rank order.

    An update is the mean of the members' gradients: of fewer when a worker is lost. ``fixed``: every update needs all
    workers, and the loss of one ends the run.
    """

    def __init__(self, *, fixed: bool = False) -> None:
        """Set whether all workers are needed; a worker may then be silent for longer, as its loss ends the run."""
        if fixed:
            self.fixed = True
            self.settings = ("fixed",)
            self.lost_after_s = 30.0

    def open(self, state: ServerState) -> None:
        """Start on a server, without any gradient."""
        super().open(state)
        self._pending_gradients: dict[str, dict[int, Tensor]] = {name: {} for name in state.names}

    def waits_for(self, worker: int, clock: int, name: str) -> list[int] | None:
        """Return the workers whose gradients the update of the step before still needs; None if that update was made.

        ``clock``: the number of steps that ``worker`` has made, which is the number of updates that it must see; ``name``:
        the parameter that it pulls.
        """
        if self.state.version[name] >= clock:
            return None
        return sorted(self._needed_workers(name) - self._pending_gradients[name].keys())

    def take(self, worker: int, name: str, gradient: Tensor) -> list[Update]:
        """Keep the gradient; return the update if every needed worker's gradient has come, else nothing."""
        self._pending_gradients[name][worker] = gradient
        return self._due_updates([name])

    def settle(self) -> list[Update]:
        """Return the updates that have waited only for the member that is gone."""
        return self._due_updates(self.state.names)

    def _needed_workers(self, name: str) -> set[int]:
        """Return the workers whose gradients the next update needs; a joiner counts from its first step on."""
        if self.fixed:
            return set(range(self.state.workers))
        next_step = self.state.version[name]
        start = self.state.start
        return {worker for worker in self.state.members if start.get(worker, 0) <= next_step}

    def _due_updates(self, names: Iterable[str]) -> list[Update]:
        """Return the updates of those of ``names`` that have all needed gradients, added in rank order, and forget these."""
        updates = []
        for name in names:
            pending = self._pending_gradients[name]
            if pending and pending.keys() >= self._needed_workers(name):
                updates.append(Update(name, [pending[worker] for worker in sorted(pending)], len(pending)))
                self._pending_gradients[name] = {}
        return updates


class ASP(SyncPolicy):
    """Asynchronous parallel: every gradient is applied when it comes, divided by the number of workers.

    So a sample moves the weights as far as under BSP with the same learning rate. What a worker pulls includes all of
    its own gradients, and never waits for other workers.
    """

    def take(self, worker: int, name: str, gradient: Tensor) -> list[Update]:
        """Return an update with this gradient alone."""
        return [Update(name, [gradient], self.state.workers)]

    def _members_behind(self, name: str, target: Sequence[int]) -> list[int]:
        """Return the members that have pushed fewer gradients of ``name`` than they should have, in ascending order.

        ``target``: by worker number, how many steps' gradients the worker should have pushed.
        """
        pushed = self.state.pushed[name]
        return sorted(other for other in self.state.members if pushed[other] < target[other])


class SSP(ASP):
    """Stale synchronous parallel: a worker starts step c only when every member has pushed c - s steps (s: staleness).

    So what it pulls holds all gradients up to step c - s - 1 of every member; with s = 0 no worker runs ahead. Raises
    InputError for a staleness below 0.
    """

    def __init__(self, staleness: int) -> None:
        if staleness < 0:
            raise InputError("SSP", f"a staleness of {staleness}", "give 0 or more")
        self.staleness = staleness
        self.settings = (staleness,)

    def waits_for(self, worker: int, clock: int, name: str) -> list[int] | None:
        """Return the members that are more than ``staleness`` steps behind step ``clock``; None if there are none."""
        least_steps = clock - self.staleness
        return self._members_behind(name, [least_steps] * self.state.seats) or None


class ElasticBSP(ASP):
    """Elastic supersteps: each barrier is set after the iterations whose predicted ends are closest to each other.

    Args:
        lookahead: R, the number of coming iterations of each worker among which the next barrier is chosen.
        predictor: name of the predictor of iteration times, one of ``PREDICTORS``.
        objective: what the barrier is best at, as in :func:`~ddltool.analyzers.job.barriers.tradeoff.best_barrier`.
        max_gap: most iterations by which workers may differ within a superstep; None: only R limits it.

    Raises InputError for a lookahead below 1, a negative gap, and unknown names.

    Attributes:
        supersteps: the last ``SUPERSTEPS_KEPT`` that are over; on server 0 only.
    """

    def __init__(
        self, lookahead: int, *, predictor: str = "ema", objective: Objective = "waiting", max_gap: int | None = None
    ) -> None:
        """Check the settings; the state of a job is set up in :meth:`open`."""
        if lookahead < 1:
            raise InputError("ElasticBSP:lookahead", f"is {lookahead}", "give 1 or more")
        if max_gap is not None and max_gap < 0:
            raise InputError("ElasticBSP:max_gap", f"is {max_gap}", "give 0 or more")
        for argument, name, known in (("predictor", predictor, PREDICTORS), ("objective", objective, OBJECTIVES)):
            if name not in known:
                raise InputError(f"ElasticBSP:{argument}", f'"{name}"', did_you_mean(name, known))
        self.lookahead = lookahead
        self.predictor = predictor
        self.objective = objective
        self.max_gap = max_gap
        self.settings = lookahead, predictor, objective, max_gap

    def open(self, state: ServerState) -> None:
        """Start on a server, with a barrier after the first iteration.

        Raises InputError on server 0 if it holds no trainable parameter: it would see no gradients.
        """
        if state.decides and not state.names:
            raise InputError("transfer plan", "puts no trainable parameter on server 0", "it must see the gradients")
        super().open(state)
        self.supersteps: deque[BarrierRow] = deque(maxlen=SUPERSTEPS_KEPT)
        self._superstep_count = 0
        self.quota: list[int] = [1] * state.seats
        self._last_barrier = [0] * state.seats
        # By worker, the lengths of its latest iterations.
        self._lengths_s = [deque[float](maxlen=LENGTHS_KEPT) for _ in range(state.seats)]
        self._last_end_s: list[float | None] = [None] * state.seats  # None: before the end of its first iteration
        # Of the superstep under way: its workers (empty before the first), and by these their iterations and ends.
        self._superstep_workers: list[int] = []
        self._iterations: list[int] = []
        self._predicted_end_s: list[float] = []
        self._superstep_began_s = 0.0

    def waits_for(self, worker: int, clock: int, name: str) -> list[int] | None:
        """Return, at a barrier and right after it, the members that have not reached it; between barriers None.

        At the barrier the list may be empty: then all have reached it, and the worker waits for the decision on the next
        one. ``clock``: the number of steps that ``worker`` has made; ``name``: the parameter that it pulls.
        """
        if clock >= self.quota[worker]:
            return self._members_behind(name, self.quota)
        if clock == self._last_barrier[worker]:  # the first step after a barrier needs all gradients up to it
            return self._members_behind(name, self._last_barrier) or None
        return None

    def joined(self, worker: int, clock: int) -> None:
        """Make the next superstep the joiner's first: until then its barrier is at its first step."""
        self.quota = [*self.quota]
        self.quota[worker] = max(self.quota[worker], clock)
        self._last_barrier[worker] = max(self._last_barrier[worker], clock)

    def decide(self, now_s: float, worker: int | None = None) -> BarrierRow | None:
        """Note that ``worker`` has ended an iteration; if all members are at the barrier, return the ended superstep's row.

        The next superstep then starts. The first ``WARM_UP`` ones have one iteration of each member, because nothing can
        be predicted yet. The first call, at the start of the job, only starts the first superstep.
        """
        if worker is not None:
            self._note_end(worker, now_s)
        state = self.state
        members = sorted(state.members)
        if not self._superstep_workers:  # the start of the job
            self._superstep_workers = members
            self._iterations = [1] * len(members)
            self._superstep_began_s = now_s
            return None
        if not members or any(state.steps[member] < self.quota[member] for member in members):
            return None
        finished_superstep = self._finish_superstep(now_s)
        self._begin_superstep(members, now_s)
        return finished_superstep

    def _begin_superstep(self, members: list[int], now_s: float) -> None:
        """Choose each member's number of iterations in the superstep that starts now, and set the next barrier after them.

        ``members``: worker numbers, ascending; ``now_s``: seconds since the start.
        """
        lengths_s = [self._lengths_s[worker] for worker in members]
        self._superstep_workers = members
        self._superstep_began_s = now_s
        self._iterations = [1] * len(members)
        self._predicted_end_s = []
        if self._superstep_count >= WARM_UP and all(lengths_s):
            self._iterations, self._predicted_end_s = self.choose([np.array(lengths) for lengths in lengths_s])
        quota = [*self.quota]
        for worker, count in zip(members, self._iterations, strict=True):
            quota[worker] = self.state.steps[worker] + count
            if self._last_end_s[worker] is not None:
                self._last_end_s[worker] = now_s  # so that the wait at the barrier counts as part of no iteration
        self.follow(quota)

    def _note_end(self, worker: int, now_s: float) -> None:
        """Note that ``worker`` has ended an iteration now; from its second one on, its length is kept too."""
        previous_end_s = self._last_end_s[worker]
        if previous_end_s is not None:
            self._lengths_s[worker].append(now_s - previous_end_s)
        self._last_end_s[worker] = now_s

    def _finish_superstep(self, now_s: float) -> BarrierRow:
        """Return the row of the superstep that ends now, and append it to :attr:`supersteps`; a lost worker's end is None."""
        ends_s: list[float | None] = []  # since the superstep's start, by worker
        for worker in self._superstep_workers:
            last_end_s = self._last_end_s[worker]
            if last_end_s is None or worker not in self.state.members:
                ends_s.append(None)
            else:
                ends_s.append(last_end_s - self._superstep_began_s)
        finished_superstep = BarrierRow(
            time_s=now_s,
            superstep=self._superstep_count,
            workers=self._superstep_workers,
            iterations=self._iterations,
            predicted_end_s=self._predicted_end_s,
            end_s=ends_s,
            length_s=now_s - self._superstep_began_s,
        )
        self.supersteps.append(finished_superstep)
        self._superstep_count += 1
        return finished_superstep

    def choose(self, lengths_s: list[np.ndarray]) -> tuple[list[int], list[float]]:
        """Return (iterations to the next barrier, their predicted ends in seconds from now), each by worker.

        ``lengths_s``: for each worker, (k,) seconds of its latest iterations.
        """
        ends = predict_ends(lengths_s, np.zeros(len(lengths_s)), self.lookahead, PREDICTORS[self.predictor])
        if self.objective == "waiting" and self.max_gap is None:
            barrier = zipline(ends)
        else:
            barrier = best_barrier(ends, objective=self.objective, max_gap=self.max_gap)
        return barrier.iterations.tolist(), barrier.chosen_s.tolist()

    def follow(self, quota: list[int]) -> None:
        """Make the present quota the last barrier, and ``quota`` the next one."""
        self._last_barrier = [*self.quota]
        self.quota = quota
