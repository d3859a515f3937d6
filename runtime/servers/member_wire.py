"""How a worker that joins late finds the servers: a store as the door, and connections of its own to every server.

A gloo group has the processes that it began with, so each joiner and all servers make three new groups, one per
direction and one for last words. Start at :func:`knock` (the joiner) and :class:`Door` (a server).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from threading import Event

from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from ddltool.errors import InputError, one_line
from ddltool.runtime.servers.policies import Policy
from ddltool.runtime.servers.transfers import TransferError, TransferPlan
from ddltool.runtime.servers.wire import Direction, Groups, Wire

DIRECTIONS: tuple[Direction, ...] = ("pull", "push", "control")
LOOK_S = 0.1
SERVER_S, JOINER_S = 10.0, 30.0  # how long an end waits for the others of a group; servers see to one joiner at a time
_JOB, _KNOCKED, _OVER = "ddltool/job", "ddltool/knocked", "ddltool/over"

log = logging.getLogger(__name__)


class LateWire(Wire):
    """The connections of a worker that joined late."""

    def __init__(self, plan: TransferPlan, groups: Groups, worker: int) -> None:
        """Take the connected ``groups``, in which this process has rank 0 and server s rank s + 1."""
        self._begin(plan, plan.rank_of_worker(worker), groups)
        for server in range(plan.servers):
            self.admit(plan.rank_of_server(server), groups, server + 1)


class Door:
    """Where a server looks for joiners."""

    def __init__(self, store: Store, plan: TransferPlan, server: int, policy: Policy) -> None:
        """``store``: one that all servers and joiners reach. Server 0 leaves in it what joiners must have too."""
        self._store, self._plan, self._server = store, plan, server
        if server == 0:
            store.set(_JOB, _description(plan, policy))

    def joiners(self, done: Event) -> Iterator[tuple[int, Groups]]:
        """Yield each joiner's number and connected groups until ``done`` is set or every seat was taken once.

        A joiner that does not come through is logged and passed over. One at a time, and all servers in the same order.
        """
        worker = self._plan.workers
        while worker < self._plan.seats:
            try:
                if not self._store.check([_knock(worker)]):
                    if done.wait(LOOK_S):
                        return
                    continue
                groups = _connect(self._store, worker, self._server + 1, self._plan.servers, SERVER_S)
            except RuntimeError as error:
                if done.is_set():
                    return
                if not _alive(self._store):
                    log.warning("nobody can join any more: the store is gone (%s)", one_line(str(error))[:200])
                    return
                log.warning("worker %d wanted to join and did not come through", worker)
            else:
                yield worker, groups
            worker += 1

    def close(self) -> None:
        """Tell those who come from now on that the job is over, if the store is still there."""
        with suppress(RuntimeError):
            self._store.set(_OVER, "")


def knock(store: Store, plan: TransferPlan, policy: Policy, check: Callable[[], None]) -> LateWire:
    """Take a seat and connect to all servers.

    Raises InputError when the job has another plan, model or synchronisation model, or no seat is left; TransferError
    when no server opens.
    """
    check()
    try:
        theirs = bytes(store.get(_JOB)).decode()
    except RuntimeError as error:
        raise TransferError(f"no server has opened the door ({one_line(str(error))[:120]})") from error
    if store.check([_OVER]):
        raise TransferError("the job is over, nobody can join it")
    if theirs != (ours := _description(plan, policy)):
        raise InputError("job", f"is {theirs}, this worker has {ours}", "give the joiner the plan and model of the job")
    try:
        worker = plan.workers + store.add(_KNOCKED, 1) - 1
        if worker >= plan.seats:
            raise InputError("transfer plan:late", f"all {plan.late} seats have been taken", "plan for more")
        store.set(_knock(worker), "")
        return LateWire(plan, _connect(store, worker, 0, plan.servers, JOINER_S), worker)
    except RuntimeError as error:
        raise TransferError(f"the servers did not let this worker in ({one_line(str(error))[:120]})") from error


def _connect(store: Store, worker: int, place: int, servers: int, limit_s: float) -> Groups:
    """Return the connected groups of one joiner. Raises RuntimeError when one end does not come in time."""
    limit = timedelta(seconds=limit_s)
    return {
        direction: ProcessGroupGloo(PrefixStore(f"{_knock(worker)}/{direction}", store), place, 1 + servers, limit)
        for direction in DIRECTIONS
    }


def _knock(worker: int) -> str:
    return f"ddltool/join/{worker}"


def _description(plan: TransferPlan, policy: Policy) -> str:
    return f"plan {plan.digest()} under {policy.describe()}"


def _alive(store: Store) -> bool:
    try:
        return bool(store.check([_JOB]))
    except RuntimeError:
        return False
