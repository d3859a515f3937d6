"""The counter that keeps transfers in order, and the gloo connections that carry them. Start at :class:`Gate`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ddltool.errors import InputError, one_line
from ddltool.runtime.hook.job import Job
from ddltool.runtime.servers.transfers import IDLE_S, TransferError, TransferPlan, check_same_plan

HEADER = 2  # int64 numbers before each payload: the parameter's index, and its version or the worker's clock
REFUSED = -1  # in place of the index: nothing more will come, for the worker is no longer part of the job
CLOSE, PULL, STEP = range(3)  # what a worker's request asks for: nothing more, parameters, parameters for a gradient
WORDS, WORDS_S = 1024, 1.0  # length in bytes of a failing end's last words, and how long to send them
# A time-out would look like the end of the peer, and close the connections to all others as well.
LONGER_THAN_ANY_JOB = timedelta(days=365)
CLOSED = "the other end closed the connection"
Direction = Literal["pull", "push", "control"]
Groups = Mapping[Direction, Any]  # gloo process groups: of torch.distributed, or made directly


class Gate:
    """The counter of one channel and iteration: lets transfer k through when k transfers have gone before it.

    ``order`` holds the keys, first to last; ``ready`` says whether a key could go. A transfer that is ready out of its
    turn waits. ``changed`` is notified by whoever makes a transfer ready.
    """

    def __init__(self, order: Sequence[int], ready: Callable[[int], bool], changed: threading.Condition) -> None:
        self.counter = 0
        self._order = order
        self._ready = ready
        self._changed = changed

    def take(self, timeout_s: float | None, check: Callable[[int], None]) -> int | None:
        """Return the next key when it is ready, None when it was not within ``timeout_s``; the counter stays.

        ``check(key)`` is called on every change and may raise to end the waiting.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                key = self._order[self.counter] if self.counter < len(self._order) else -1
                check(key)
                if key >= 0 and self._ready(key):
                    return key
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return None
                self._changed.wait(left)

    def passed(self) -> None:
        """Count the transfer that was taken as handed to the transport."""
        self.counter += 1

    def waiting(self) -> list[int]:
        """Return the keys that are ready but not in turn."""
        return [key for key in self._order[self.counter + 1 :] if self._ready(key)]


class Wire:
    """This process's connections: one gloo group per direction, so that neither waits behind the other.

    All operations may be called from any thread. A failed one raises TransferError.
    """

    def __init__(self, plan: TransferPlan, timeout_s: float, check: Callable[[], None]) -> None:
        """Connect; call on all ranks. ``check`` may refuse with InputError, which then all ranks raise.

        Raises InputError where torch.distributed is not initialised or the ranks' plans differ.
        """
        if not dist.is_initialized():
            remedy = "call torch.distributed.init_process_group('gloo') first"
            raise InputError("torch.distributed", "is not initialised", remedy)
        control = dist.new_group(backend="gloo")
        job = Job(rank=dist.get_rank(), world_size=dist.get_world_size(), side=control)
        job.together(check)
        check_same_plan(plan, control)
        pull, push = (
            dist.new_group(backend="gloo", timeout=timedelta(seconds=max(timeout_s, IDLE_S))) for _ in range(2)
        )
        # Last words have a group of their own, for a wait that times out closes its group.
        self._begin(plan, job.rank, {"pull": pull, "push": push, "control": control})
        for rank in range(job.world_size):
            if (rank < plan.workers) != (job.rank < plan.workers):
                self.admit(rank, self._groups, rank)

    def _begin(self, plan: TransferPlan, rank: int, groups: Groups) -> None:
        self.rank, self._size, self._groups = rank, len(plan.slots), groups
        self._routes: dict[int, tuple[Groups, int]] = {}
        self._words: dict[int, Tensor] = {}
        self._hearing: dict[int, Any] = {}
        self._ended: dict[int, threading.Event] = {}

    def admit(self, peer: int, groups: Groups, place: int) -> None:
        """Make ``peer``, which has rank ``place`` in these groups, one of the other ends.

        Raises TransferError, with nothing changed, when it has gone already.
        """
        # gloo itself receives last words, so that a process which is busy or late still finds them when it looks.
        words = torch.zeros(WORDS, dtype=torch.uint8)
        try:
            self._hearing[peer] = groups["control"].recv([words], place, 0)
        except RuntimeError as error:
            raise TransferError(reason(error), peer) from error
        self._ended[peer] = threading.Event()
        self._words[peer] = words
        self._routes[peer] = groups, place

    def _route(self, direction: Direction, peer: int) -> tuple[Any, int]:
        groups, place = self._routes.get(peer, (self._groups, peer))
        return groups[direction], place

    @property
    def header_tag(self) -> int:
        """Tag of headers; payloads have their parameter's index, requests the number after this one."""
        return self._size

    @property
    def request_tag(self) -> int:
        """Tag of requests."""
        return self._size + 1

    @property
    def first_free_tag(self) -> int:
        """Tags from here on are for messages between the ends of one synchronisation model."""
        return self._size + 3  # the one before is for closing

    def post(self, direction: Direction, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Start to receive into ``tensor`` and return the work to wait for."""
        try:
            group, place = self._route(direction, peer)
            work: dist.Work = group.recv([tensor], place, tag)
        except RuntimeError as error:
            raise TransferError(reason(error), peer) from error
        return work

    def send(self, direction: Direction, tensor: Tensor, peer: int, tag: int, timeout_s: float) -> None:
        """Hand ``tensor`` to the transport and wait until it has taken all of it."""
        try:
            group, place = self._route(direction, peer)
            work = group.send([tensor], place, tag)
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise TransferError(reason(error), peer) from error

    def wait(self, work: dist.Work, peer: int, timeout_s: float) -> None:
        """Wait for a receive that was posted for ``peer``."""
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise TransferError(reason(error), peer) from error

    def hang_up(self) -> None:
        """Close all connections, so that every thread here and every peer that waits on one stops waiting.

        gloo has no call that does so (its ``abort`` leaves the waiting threads waiting), but a receive that times out
        closes all pairs of its group.
        """
        self._close("pull")
        self._close("push")
        self._close("control")

    def _close(self, direction: Direction) -> None:
        for peer in list(self._routes):
            with suppress(RuntimeError):
                group, place = self._route(direction, peer)
                group.recv([torch.empty(1)], place, self._size + 2).wait(timedelta(milliseconds=1))

    def watch(self, peer: int) -> None:
        """Wait until ``peer`` has said its last words, has closed, or :meth:`stop_watching` is called; once per peer.

        A transfer that begins in the moment in which the peer goes away may wait for ever in gloo; this receive has
        been there from the beginning.
        """
        with suppress(RuntimeError):
            self._hearing[peer].wait(LONGER_THAN_ANY_JOB)
        self._ended[peer].set()

    def stop_watching(self) -> None:
        """End :meth:`watch` in all threads. Nothing can be told or heard after this."""
        self._close("control")

    def tell(self, text: str) -> None:
        """Send every peer that still listens the last words of this end."""
        words = torch.tensor(list(text.encode(errors="replace")[:WORDS].ljust(WORDS, b"\0")), dtype=torch.uint8)
        sending = []
        for peer in list(self._routes):
            with suppress(RuntimeError):
                group, place = self._route("control", peer)
                sending.append(group.send([words], place, 0))
        for work in sending:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=WORDS_S))

    def last_words(self, peer: int, within_s: float) -> str:
        """Return the last words of ``peer``, waiting for it to say them or to close; empty when there are none.

        Of a peer that says nothing to this end, one server's to another, others may tell: any last words will do.
        """
        if peer in self._ended:
            self._ended[peer].wait(within_s)
            return self._said(peer)
        end = time.monotonic() + within_s
        while not (text := self.heard()) and time.monotonic() < end:
            time.sleep(0.01)
        return text

    def forget(self, peer: int) -> None:
        """Let nobody hear any more what ``peer`` said when it ended: the job goes on without it."""
        if self._ended[peer].is_set():
            self._words[peer].zero_()

    def heard(self) -> str:
        """Return a peer's last words, empty when there are none."""
        return next((text for peer in list(self._words) if (text := self._said(peer))), "")

    def _said(self, peer: int) -> str:
        if not self._ended[peer].is_set():
            return ""  # half of them may be there
        return bytes(self._words[peer].tolist()).rstrip(b"\0").decode(errors="ignore")


def reason(error: Exception) -> str:
    """Return what gloo says, in a few words."""
    text = one_line(str(error))
    for sign, words in (
        ("imed out", "timed out"),
        ("losed by peer", CLOSED),
        ("eset by peer", CLOSED),
        ("roken pipe", CLOSED),
        ("pair closure", "this end has closed the connection"),
    ):
        if sign in text:
            return words
    return text[:200]
