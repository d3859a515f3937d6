"""A parameter server that outlives its workers: finds those that are gone or silent, and takes them out.

Start at :class:`MemberServer`; :class:`~.sync_server.SyncServer` adds the synchronisation model.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store

from ddltool.errors import InputError, one_line
from ddltool.runtime.servers.ends import LEFT_BEHIND_S, LISTEN_S
from ddltool.runtime.servers.member_wire import Door
from ddltool.runtime.servers.membership import FOREVER_S, JOIN, JOINED, MEMBERS, SHARE, Membership, Share
from ddltool.runtime.servers.parameter_server import ParameterServer
from ddltool.runtime.servers.parameter_server import Update as Optimizer
from ddltool.runtime.servers.records import SyncLog
from ddltool.runtime.servers.transfers import TransferError, TransferPlan
from ddltool.runtime.servers.wire import CLOSED, HEADER, REFUSED

log = logging.getLogger(__name__)

LOST_AFTER_S = 10.0
WATCH_S, GRACE_S = 0.1, 1.0


class Refused(Exception):
    """The worker is no longer a member."""


class MemberServer(ParameterServer):
    """A parameter server with a membership. A wait is not limited by time but by the death or silence of a worker."""

    def __init__(
        self,
        values: nn.Module | Mapping[str, Tensor],
        plan: TransferPlan,
        update: Optimizer,
        lost_after_s: float,
        telemetry: Path | None,
        door: Store | None,
    ) -> None:
        """See :class:`~.sync_server.SyncServer`."""

        def check() -> None:
            if not lost_after_s > 0:
                raise InputError("lost_after_s", f"is {lost_after_s}", "give seconds above 0")
            if (plan.late > 0) != (door is not None):
                problem = f"is {'missing' if door is None else 'given'} for a plan with {plan.late} late workers"
                raise InputError("door", problem, "both or neither: workers join through a torch.distributed store")

        super().__init__(values, plan, update, timeout_s=FOREVER_S, idle_s=FOREVER_S, check=check)
        self._store = door
        self._admitted: set[int] = set()
        self._gates: dict[int, int] = {}
        self.membership = Membership(workers=plan.workers, lost_after_s=lost_after_s)
        self.log = SyncLog(workers=plan.seats, path=telemetry)
        self._leaving: set[int] = set()
        self._done = threading.Event()

    def serve(self) -> dict[str, Tensor]:
        """See :meth:`~.servers.ParameterServer.serve`."""
        watch = threading.Thread(target=self._watch, daemon=True, name=f"{self._title} watch")
        watch.start()
        helpers = [watch]
        if self._store is not None:
            helpers.append(threading.Thread(target=self._open, daemon=True, name=f"{self._title} door"))
            helpers[-1].start()
        try:
            return super().serve()
        finally:
            self._done.set()
            for thread in helpers:
                thread.join(LEFT_BEHIND_S)

    def left(self, worker: int) -> None:
        """The worker has closed; it leaves when its last gradients are in."""
        self._leaving.add(worker)

    def other_request(self, worker: int, kind: int, clock: int) -> None:
        """See :meth:`~.servers.ParameterServer.other_request`."""
        if kind == JOINED:
            with self.changed:
                self._gates.pop(worker, None)
                self.changed.notify_all()
            return
        if kind == SHARE:
            with self.changed:
                self.membership.shares(worker, clock)
            return
        if kind == MEMBERS:
            with self.changed:
                members = self.membership.of_epoch(clock)
                self.membership.begins(worker, clock)
                self.membership.heard(worker)
            answer = torch.zeros(self.plan.seats, dtype=torch.int64)
            answer[list(members)] = 1
        elif kind == JOIN:
            answer = torch.tensor(self._let_in(worker, clock))
        else:
            super().other_request(worker, kind, clock)
            return
        peer = self.plan.rank_of_worker(worker)
        with self._telling(f"while telling worker {worker} (rank {peer}) who is in the job"):
            self._wire.send("pull", answer, peer, self._wire.first_free_tag, FOREVER_S)

    def _open(self) -> None:
        """Connect to those who come late. They are members when they have asked all servers (:meth:`_let_in`)."""
        assert self._store is not None
        try:
            door = self._door(self._store)
        except RuntimeError as error:
            log.warning("%s: nobody can join: the store is gone (%s)", self._title, one_line(str(error))[:200])
            return
        for worker, groups in door.joiners(self._done):
            with self.changed:
                if self._done.is_set() or self._failing:
                    break  # the joiner sees its connections close when this process ends
                try:
                    self._wire.admit(self.plan.rank_of_worker(worker), groups, 0)
                except TransferError as error:
                    log.warning("%s: worker %d wanted to join and has gone (%s)", self._title, worker, error)
                    continue
                self._admitted.add(worker)
            self._listen_to(self.plan.rank_of_worker(worker))
            for body in (self._answer, self._collect):
                self._start(body, worker)
        self._done.wait()
        door.close()

    def _door(self, store: Store) -> Door:
        """Return where joiners come in."""
        raise NotImplementedError

    def _let_in(self, worker: int, clock: int) -> list[int]:
        """Make a joiner a member; return the number of its first step and its first epoch, [-1, 0] if that is too late."""
        raise NotImplementedError

    def _check_member(self, worker: int) -> None:
        """Raise Refused when ``worker`` has been taken out."""
        if worker in self.membership.lost:
            raise Refused

    def _refuse(self, worker: int) -> None:
        """Tell a worker that asks for parameters that it is no longer a member."""
        peer = self.plan.rank_of_worker(worker)
        with self._telling(f"while refusing worker {worker} (rank {peer})"):
            header = torch.full((HEADER,), REFUSED, dtype=torch.int64)
            self._wire.send("pull", header, peer, self._wire.header_tag, FOREVER_S)

    def _dismiss(self, lost: Mapping[int, str]) -> None:
        """End the threads of lost workers, which wait for what will never come; one that wakes up is to hear of it."""
        self._done.set()
        text = "".join(f"; worker {worker} was taken out: {reason}" for worker, reason in lost.items())
        self._wire.tell(f"{self._title}: the job is over{text}")
        self._failing = True
        self._wire.hang_up()

    def _join(self) -> None:
        self._done.set()
        super()._join()

    def _listen(self, peer: int) -> None:
        """Take a worker out that has gone away without closing, whatever else is under way."""
        self._wire.watch(peer)
        worker = self.plan.worker_of_rank(peer)
        # What it sent before it closed may still be on its way.
        if not self._done.wait(GRACE_S) and worker not in self._leaving and not self._failing:
            self._gone(worker, TransferError(f"{self._title}: {CLOSED}: worker {worker} (rank {peer})", peer))

    def _answer(self, worker: int) -> None:
        try:
            super()._answer(worker)
        except TransferError as error:
            self._gone(worker, error)

    def _collect(self, worker: int) -> None:
        try:
            super()._collect(worker)
        except TransferError as error:
            self._gone(worker, error)
        else:
            self._remove(worker, None)

    def _watch(self) -> None:
        """Take out workers for which others wait in vain."""
        try:
            self._take_out_the_silent()
        except Exception as error:  # what follows from a loss may be an update, and so the optimizer's own
            self._fail(TransferError(f"{self._title} failed: {type(error).__name__}: {error}"))

    def _take_out_the_silent(self) -> None:
        while not self._done.wait(min(WATCH_S, self.membership.lost_after_s / 4)) and not self._failing:
            with self.changed:
                waiting = self.membership.waiting()
                wanted = {other for one in waiting for other in self.blockers(*one)}
                if self.membership.closed:  # the run comes to its end, and the server itself waits for the last
                    wanted |= self.membership.members
                silent = self.membership.silent(sorted(wanted))
            for worker, seconds in silent.items():
                self._lose(worker, f"nothing came from it for {seconds:.1f} s, and others waited for it")

    def _gone(self, worker: int, error: TransferError) -> None:
        """A worker's connection has ended."""
        if self._failing:
            raise error
        peer = self.plan.rank_of_worker(worker)
        words = self._wire.last_words(peer, LISTEN_S)
        self._wire.forget(peer)  # they are no reason of what goes wrong later
        self._lose(worker, f"{error}; before that, {words}" if words else str(error))

    def _lose(self, worker: int, reason: str) -> None:
        self._remove(worker, reason)
        self._steps[worker].put(None)

    def _remove(self, worker: int, reason: str | None) -> None:
        """Take a worker out (``reason`` None: it has closed), and do what others waited for it to do."""
        with self._accepting:
            with self.changed:
                if not self.membership.remove(worker, reason):
                    return
                self.log.left(worker, reason, self._share(worker))
                self.changed.notify_all()
            if self.membership.members:
                self._settle()

    def _share(self, worker: int) -> Share | None:
        """Return how far ``worker`` has come in its epoch; ``changed`` is held."""
        raise NotImplementedError

    def _settle(self) -> None:
        """Do what is due now that a member is gone; the accepting lock is held."""
        raise NotImplementedError
