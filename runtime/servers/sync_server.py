"""The server of a synchronisation model. Start at :class:`SyncServer`; :mod:`ddltool.runtime.servers` has the whole picture."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store

from ddltool.errors import InputError
from ddltool.runtime.servers.elastic_bsp import ElasticBSP
from ddltool.runtime.servers.member_server import LOST_AFTER_S, MemberServer, Refused
from ddltool.runtime.servers.member_wire import Door
from ddltool.runtime.servers.membership import FOREVER_S, Share, check_same_policy
from ddltool.runtime.servers.parameter_server import Update as Optimizer
from ddltool.runtime.servers.policies import Book, Policy, Update
from ddltool.runtime.servers.signals import Interruptions
from ddltool.runtime.servers.transfers import TransferError, TransferPlan

BACKLOG_S = 60.0  # at most, for the last updates of another server
OVER = -1  # in place of a superstep's number: there will be no more


class SyncServer(MemberServer):
    """A parameter server under a synchronisation model.

    Attributes:
        membership: who is in the job, who was lost and why.
        log: waiting, staleness, dropped gradients.
        policy: with ElasticBSP, ``policy.supersteps`` on server 0 has the decisions.
        updates: how often any parameter was updated, over the number of parameters.
    """

    def __init__(
        self,
        values: nn.Module | Mapping[str, Tensor],
        plan: TransferPlan,
        update: Optimizer,
        policy: Policy,
        *,
        lost_after_s: float = LOST_AFTER_S,
        telemetry: str | PathLike[str] | None = None,
        door: Store | None = None,
    ) -> None:
        """Take this rank's share of ``values`` and connect; a collective over all ranks.

        ``lost_after_s``: a worker for which others wait, and from which nothing has come for so long, is taken out; it
        must exceed a worker's longest step. ``telemetry``: a JSON Lines file of this server's own (see
        :mod:`~.sync_records`). ``door``: for a plan with ``late`` workers, a store through which they come, the same on
        all servers. Raises InputError as :class:`~.wire.Wire` does, when the ranks' policies differ, when the
        policy does not suit the job, and when the file cannot be written.
        """
        check_same_policy(policy)
        super().__init__(values, plan, update, lost_after_s, None if telemetry is None else Path(telemetry), door)
        self.policy = policy
        names = tuple(slot.name for slot in plan.slots if slot.server == self.server and slot.trainable)
        self._book = Book(
            workers=plan.workers,
            seats=plan.seats,
            names=names,
            decides=self.server == 0,
            members=self.membership.members,
            pushed={name: [0] * plan.seats for name in names},
            version=self.version,
            steps=[0] * plan.seats,
        )
        try:
            if plan.late and not self.server and not names:
                raise InputError("transfer plan", "puts no trainable parameter on server 0", "joining needs one there")
            policy.open(self._book)
            self.log.open()
        except InputError as error:
            self._fail(TransferError(f"{self._title}: {error}"))  # the others are connected, and would wait
            raise
        self._snapshot: dict[int, tuple[dict[str, Tensor], dict[str, int]]] = {}
        self._pulled: list[dict[str, int]] = [dict(self.version) for _ in range(plan.seats)]
        self._since_s: dict[int, float] = {}
        self._left = [0] * plan.seats
        self._over = not (isinstance(policy, ElasticBSP) and self.server)
        others = plan.servers - 1 if isinstance(policy, ElasticBSP) and not self.server else 0
        self._barriers: list[queue.SimpleQueue[list[int] | None]] = [queue.SimpleQueue() for _ in range(others)]
        """On server 0, what each other server is to be told."""
        self._lanes += self._barriers
        self._announcers: list[threading.Thread] = []

    @property
    def updates(self) -> float:
        """Updates per trainable parameter so far."""
        names = self._book.names
        return sum(self.version[name] for name in names) / max(len(names), 1)

    @property
    def taken(self) -> int:
        """Steps (under local SGD: rounds) of all workers whose gradients have come whole."""
        return sum(self.steps_made)

    @property
    def steps_made(self) -> list[int]:
        """Per worker, late ones included, the steps that it has made (under local SGD: rounds)."""
        return [steps - self._book.start.get(worker, 0) for worker, steps in enumerate(self._book.steps)]

    # The policy points of the parameter server.

    def may_send(self, worker: int, clock: int, name: str) -> bool:
        """See :meth:`~.servers.ParameterServer.may_send`."""
        self._check_member(worker)
        held = any(clock >= step for other, step in self._gates.items() if other in self.membership.members)
        allowed = name not in self._book.pushed or (not held and self.policy.may_pull(worker, clock, name))
        self._note(worker, clock, name, allowed)
        return allowed

    def blockers(self, worker: int, clock: int, name: str) -> list[int]:
        """See :meth:`~.servers.ParameterServer.blockers`."""
        # Who joins holds back the others until all servers know it.
        joining = {other for other, step in self._gates.items() if clock >= step and other in self.membership.members}
        return sorted({*self.policy.blockers(worker, clock, name), *(joining - {worker})})

    def to_send(self, worker: int, name: str) -> tuple[Tensor, int]:
        """See :meth:`~.servers.ParameterServer.to_send`."""
        values, versions = self._snapshot.get(worker, (self.values, self.version))
        self._pulled[worker][name] = versions[name]
        self.membership.heard(worker)
        return values[name], versions[name]

    def accept(self, worker: int, clock: int, name: str, gradient: Tensor) -> None:
        """See :meth:`~.servers.ParameterServer.accept`."""
        finite = bool(torch.isfinite(gradient).all())
        with self.changed:
            if worker not in self.membership.members:
                return
            self.membership.heard(worker)
        if not finite:
            # Large parameters are the job's doing: then other workers' gradients will not be finite either.
            largest = max((float(self.values[other].abs().max()) for other in self._book.names), default=0.0)
            reason = (
                f"its gradient of {name} in step {clock} is not finite (the largest parameter here is {largest:.3g})"
            )
            self._lose(worker, reason)
            return
        book = self._book
        with self.changed:
            book.pushed[name][worker] += 1
            counts, updates = self.policy.take(worker, name, gradient)
            stale = self.version[name] - self._pulled[worker][name]
            self.log.used(worker, stale if counts else None)
        if not self._apply(updates, f"after worker {worker}'s gradient of step {clock}"):
            return
        with self.changed:
            self._left[worker] += 1
            whole = self._left[worker] == len(book.names)
            if whole:
                self._left[worker] = 0
                book.steps[worker] += 1
                slowest = min((book.steps[other] for other in book.members), default=0)
                self.log.step(worker, clock, book.steps[worker] - slowest)
                if isinstance(self.policy, ElasticBSP):
                    self.policy.ended(worker, time.monotonic())
            self.changed.notify_all()
        if whole:
            self._decide()

    # Threads.

    def serve(self) -> dict[str, Tensor]:
        """Serve until every worker has closed or is lost, and return the final values.

        Raises TransferError when no worker ended well, when another server is lost, and when an update is not finite;
        :attr:`values` then holds the last ones, all finite. SIGTERM and Ctrl-C end the run in order (the summary is
        written, the workers hear of it) unless the script has handlers of its own.
        """
        self.log.start()
        interruptions = Interruptions()
        interruptions.open()
        if isinstance(self.policy, ElasticBSP):
            self.policy.start(time.monotonic())
            if self.server:
                self._start(self._follow, 0)
            self._announcers = [self._start(self._announce, 1 + place) for place in range(len(self._barriers))]
        try:
            return super().serve()
        finally:
            with interruptions.held_off():
                self.log.close(self.policy.describe(), self.steps_made, round(self.updates))
            interruptions.close()

    def _door(self, store: Store) -> Door:
        return Door(store, self.plan, self.server, self.policy)

    def _let_in(self, worker: int, clock: int) -> list[int]:
        """See :meth:`~.member_server.MemberServer._let_in`.

        Server 0 (``clock`` -1) chooses the first step: the next one of which no gradient can have been pushed anywhere.
        Until the joiner says that all servers know, it holds back the pulls of that step, and with them its gradients.
        """
        book = self._book
        with self._accepting, self.changed:
            if not book.members or self._failing:
                return [-1, 0]
            most = max((count for counts in book.pushed.values() for count in counts), default=0)
            if clock < 0:
                clock = 1 + most
                if self.plan.servers > 1:
                    self._gates[worker] = clock
            elif clock < most:  # a step that needed nothing of server 0 has slipped by
                return [-2, 0]
            for counts in book.pushed.values():
                counts[worker] = clock
            book.steps[worker] = book.start[worker] = clock
            self.membership.add(worker)
            book.workers = max(book.workers, len(book.members))
            self.policy.joined(worker, clock, time.monotonic())
            epoch = self.membership.next_epoch
            self.log.joined(worker, clock, epoch)
            self.changed.notify_all()
        return [clock, epoch]

    def _until_done(self) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self._failing or not self.membership.members)
            ended_well = bool(self.membership.closed)
            lost = dict(self.membership.lost)
        if not self._failing and not ended_well:
            worker, reason = next(iter(lost.items()))
            self._fail(TransferError(f"{self._title}: no worker is left; the first lost was worker {worker}: {reason}"))
        if not self._failing:
            self._end_together()
        if not self._failing and (lost or self._admitted - self.membership.closed):
            self._dismiss(lost)

    def _end_together(self) -> None:
        """Under ElasticBSP: tell the other servers that there will be no more barriers, or hear it from server 0."""
        for lane in self._barriers:
            lane.put([OVER] + [0] * self.plan.seats)
            lane.put(None)
        limit_s = 2 * self.membership.lost_after_s + BACKLOG_S  # servers may lose a worker so much apart
        with self.changed:
            if self.changed.wait_for(
                lambda: self._failing or (self._over and self._ended.issuperset(self._announcers)), limit_s
            ):
                return
        problem = "server 0 has not said" if self.server else "another server has not heard"
        self._fail(TransferError(f"{self._title}: {problem} that the run is over, for {limit_s:g} s"))

    def _hand_over(self, worker: int, clock: int, pull: int) -> None:
        try:
            with self.changed:
                self.membership.heard(worker)
                self.membership.steps(worker, clock)
                while not self._may_begin(worker, clock):
                    self._raise_failure()
                    self.changed.wait()
                self.policy.began(worker)
                if self.policy.whole_pulls:
                    self._snapshot[worker] = dict(self.values), dict(self.version)
            super()._hand_over(worker, clock, pull)
        except Refused:
            self._refuse(worker)

    def _may_begin(self, worker: int, clock: int) -> bool:
        self._check_member(worker)
        allowed = self.policy.may_begin(worker, clock)
        self._note(worker, clock, self._book.names[0] if self._book.names else "", allowed)
        return allowed

    def _note(self, worker: int, clock: int, name: str, allowed: bool) -> None:
        """Keep account of who waits for others; ``changed`` is held.

        Until a worker's own gradient is in, its pull waits for the transport and for nobody else.
        """
        if not allowed:
            self.membership.blocked(worker, clock, name)
            if self._book.pushed[name][worker] >= clock and self.blockers(worker, clock, name):
                self._since_s.setdefault(worker, time.monotonic())
            return
        self.membership.free(worker)
        since_s = self._since_s.pop(worker, None)
        if since_s is not None:
            self.log.waited(worker, time.monotonic() - since_s)

    def _follow(self, server: int) -> None:
        """Take the barriers that server 0 announces, until it says that there will be no more."""
        peer = self.plan.rank_of_server(server)
        assert isinstance(self.policy, ElasticBSP)
        while True:
            message = torch.empty(1 + self.plan.seats, dtype=torch.int64)
            with self._telling(f"while waiting for the next barrier of server {server} (rank {peer})"):
                self._wire.wait(self._wire.post("pull", message, peer, self._wire.first_free_tag), peer, FOREVER_S)
            number, *quota = message.tolist()
            with self.changed:
                if number == OVER:
                    self._over = True
                else:
                    self.policy.follow(quota)
                self.changed.notify_all()
            if number == OVER:
                return

    # What follows from a gradient or a loss.

    def _apply(self, updates: list[Update], when: str) -> bool:
        """Make updates, all visible at once; the accepting lock is held.

        Return False, with the run ended and nothing published, when one of the new values is not finite.
        """
        if not updates:
            return True
        new = {}
        for due in updates:
            total = due.gradients[0]
            for gradient in due.gradients[1:]:
                total = total.add_(gradient)
            mean = total.div_(due.divisor)
            value = self._update(due.name, self.values[due.name], mean)
            if not torch.isfinite(value).all():
                self._fail(TransferError(f"{self._title}: {self._not_finite(due, mean)}, {when}"))
                return False
            new[due.name] = value
        with self.changed:
            for name, value in new.items():
                self.publish(name, value)
            self.policy.applied()
            self.changed.notify_all()
        return True

    def _not_finite(self, due: Update, mean: Tensor) -> str:
        """Return which update is not finite, and why; every gradient in it is finite."""
        before = self.values[due.name]
        if not torch.isfinite(before).all():
            cause = "its value was not finite from the beginning"
        elif not torch.isfinite(mean).all():
            cause = f"the sum of {len(due.gradients)} workers' finite gradients is too large for {mean.dtype}"
        else:
            largest = float(mean.abs().max()) if mean.numel() else 0.0
            cause = f"the optimizer left the numbers of {before.dtype} on a finite gradient (largest {largest:.3g})"
        return f"update {self.version[due.name] + 1} of {due.name} is not finite: {cause}"

    def _decide(self) -> None:
        """Choose and announce the next barrier when this one has been reached."""
        if not isinstance(self.policy, ElasticBSP) or self.server:
            return
        with self.changed:
            quota = self.policy.decide(time.monotonic())
            if quota is None:
                return
            over, following = self.policy.supersteps[-2:]
            self.log.barrier(over)
        for lane in self._barriers:
            lane.put([following.number, *quota])
        with self.changed:
            self.changed.notify_all()

    def _announce(self, server: int) -> None:
        """Tell another server the barriers, in a thread of its own: nothing waits for a server that is gone."""
        peer, lane = self.plan.rank_of_server(server), self._barriers[server - 1]
        while (numbers := lane.get()) is not None:
            with self._telling(f"while telling server {server} (rank {peer}) the next barrier"):
                self._wire.send("pull", torch.tensor(numbers), peer, self._wire.first_free_tag, FOREVER_S)

    def _settle(self) -> None:
        with self.changed:
            updates = self.policy.settle()
        if self._apply(updates, "after the loss or the end of a worker"):
            self._decide()

    def _share(self, worker: int) -> Share | None:
        return self.membership.share(worker, self._book.steps[worker], self.policy.local_steps)
