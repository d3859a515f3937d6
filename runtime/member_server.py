"""A parameter server that outlives its workers: finds those that are gone or silent, and takes them out.

Start at :class:`MemberServer`; :class:`~.sync_server.SyncServer` adds the synchronisation model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ddltool.errors import InputError
from ddltool.runtime.membership import FOREVER_S, LEFT_BEHIND_S, MEMBERS, Membership
from ddltool.runtime.servers import ParameterServer
from ddltool.runtime.servers import Update as Optimizer
from ddltool.runtime.sync_records import SyncLog
from ddltool.runtime.transfers import TransferError, TransferPlan
from ddltool.runtime.wire import CLOSED, HEADER, JOIN_S, REFUSED

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
    ) -> None:
        """See :class:`~.sync_server.SyncServer`."""
        if not lost_after_s > 0:
            raise InputError("lost_after_s", f"is {lost_after_s}", "give seconds above 0")
        super().__init__(values, plan, update, timeout_s=FOREVER_S, idle_s=FOREVER_S)
        self.membership = Membership(workers=plan.workers, lost_after_s=lost_after_s)
        self.log = SyncLog(workers=plan.workers, path=telemetry)
        self._leaving: set[int] = set()
        self._done = threading.Event()

    def serve(self) -> dict[str, Tensor]:
        """See :meth:`~.servers.ParameterServer.serve`."""
        for worker in range(self.plan.workers):
            self._start(self._guard, worker)
        watch = threading.Thread(target=self._watch, daemon=True, name=f"{self._title} watch")
        watch.start()
        try:
            return super().serve()
        finally:
            self._done.set()
            watch.join(JOIN_S)

    def left(self, worker: int) -> None:
        """The worker has closed; it leaves when its last gradients are in."""
        self._leaving.add(worker)

    def other_request(self, worker: int, kind: int, clock: int) -> None:
        """See :meth:`~.servers.ParameterServer.other_request`."""
        if kind != MEMBERS:
            super().other_request(worker, kind, clock)
        with self.changed:
            members = self.membership.of_epoch(clock)
            self.membership.heard(worker)
        answer = torch.zeros(self.plan.workers, dtype=torch.int64)
        answer[list(members)] = 1
        with self._telling(f"while telling worker {worker} (rank {worker}) the members"):
            self._wire.send("pull", answer, worker, self._wire.first_free_tag, FOREVER_S)

    def _check_member(self, worker: int) -> None:
        """Raise Refused when ``worker`` has been taken out."""
        if worker in self.membership.lost:
            raise Refused

    def _refuse(self, worker: int) -> None:
        """Tell a worker that asks for parameters that it is no longer a member."""
        with self._telling(f"while refusing worker {worker} (rank {worker})"):
            header = torch.full((HEADER,), REFUSED, dtype=torch.int64)
            self._wire.send("pull", header, worker, self._wire.header_tag, FOREVER_S)

    def _dismiss(self, lost: Mapping[int, str]) -> None:
        """End the threads of lost workers, which wait for what will never come; one that wakes up is to hear of it."""
        self._done.set()
        text = "; ".join(f"worker {worker} was taken out: {reason}" for worker, reason in lost.items())
        self._wire.tell(f"{self._title}: the job is over; {text}")
        self._failing = True
        self._wire.hang_up()

    def _join(self) -> None:
        self._done.set()
        self._wire.stop_watching()
        if self._failing:
            self._join_s = LEFT_BEHIND_S
        super()._join()

    def _guard(self, worker: int) -> None:
        """Take a worker out that has gone away without closing, whatever else is under way."""
        self._wire.watch(worker)
        # What it sent before it closed may still be on its way.
        if not self._done.wait(GRACE_S) and worker not in self._leaving and not self._failing:
            self._gone(worker, TransferError(f"{self._title}: {CLOSED}: worker {worker} (rank {worker})"))

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
        time.sleep(2 * WATCH_S)  # its last words may be on their way
        words = self._wire.heard_from(worker)
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
                self.log.left(worker, reason)
                self.changed.notify_all()
            if self.membership.members:
                self._settle()

    def _settle(self) -> None:
        """Do what is due now that a member is gone; the accepting lock is held."""
        raise NotImplementedError
