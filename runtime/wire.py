"""The counter that keeps transfers in order, and the gloo connections that carry them. Start at :class:`Gate`."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ddltool.errors import InputError, one_line
from ddltool.runtime.job import Job
from ddltool.runtime.transfers import IDLE_S, TransferError, TransferPlan, check_same_plan

HEADER = 2  # int64 numbers before each payload: the parameter's index, and its version or the worker's clock
REFUSED = -1  # in place of the index: nothing more will come, for the worker is no longer part of the job
CLOSE, PULL, STEP = range(3)  # what a worker's request asks for: nothing more, parameters, parameters for a gradient
JOIN_S = 5.0
# A transfer that begins in the moment in which its peer goes away may never end in gloo; its thread is left behind.
LEFT_BEHIND_S = 1.0
# Length in bytes of a failing end's last words, and how long to send them and to wait for those of an end that closes.
WORDS, WORDS_S, LISTEN_S = 1024, 1.0, 2.0
TELLING_S = 5.0  # at most, for hearing and telling last words and for hanging up
CLOSED = "the other end closed the connection"
BEFORE = "before that,"
T = TypeVar("T")
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
        """Make ``peer``, which has rank ``place`` in these groups, one of the other ends."""
        self._routes[peer] = groups, place
        # gloo itself receives last words, so that a process which is busy or late still finds them when it looks.
        words = torch.zeros(WORDS, dtype=torch.uint8)
        self._hearing[peer] = groups["control"].recv([words], place, 0)
        self._ended[peer] = threading.Event()
        self._words[peer] = words

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
            raise TransferError(reason(error)) from error
        return work

    def send(self, direction: Direction, tensor: Tensor, peer: int, tag: int, timeout_s: float) -> None:
        """Hand ``tensor`` to the transport and wait until it has taken all of it."""
        try:
            group, place = self._route(direction, peer)
            work = group.send([tensor], place, tag)
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise TransferError(reason(error)) from error

    def wait(self, work: dist.Work, timeout_s: float) -> None:
        """Wait for a posted receive."""
        try:
            work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise TransferError(reason(error)) from error

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
            self._hearing[peer].wait(timedelta(seconds=10 * IDLE_S))
        self._ended[peer].set()

    def stop_watching(self) -> None:
        """End :meth:`watch` in all threads. Nothing can be told or heard after this."""
        self._close("control")

    def tell(self, text: str) -> None:
        """Send every peer that still listens the last words of this end."""
        words = torch.tensor(list(text.encode()[:WORDS].ljust(WORDS, b"\0")), dtype=torch.uint8)
        sending = []
        for peer in list(self._routes):
            with suppress(RuntimeError):
                group, place = self._route("control", peer)
                sending.append(group.send([words], place, 0))
        for work in sending:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=WORDS_S))

    def listen(self, within_s: float) -> str:
        """Return a peer's last words; empty when a peer has closed without any, or none has done either in time."""
        end = time.monotonic() + within_s
        while not (text := self._heard()) and not self._gone() and time.monotonic() < end:
            time.sleep(0.01)
        return text or self._heard()

    def last_words(self, peer: int, within_s: float) -> str:
        """Return this peer's last words, empty when there are none."""
        self._ended[peer].wait(within_s)
        return self._said(peer)

    def _heard(self) -> str:
        return next((text for peer in list(self._words) if (text := self._said(peer))), "")

    def _gone(self) -> bool:
        return any(ended.is_set() for ended in list(self._ended.values()))

    def _said(self, peer: int) -> str:
        if not self._ended[peer].is_set():
            return ""  # half of them may be there
        return bytes(self._words[peer].tolist()).rstrip(b"\0").decode(errors="ignore")


class End:
    """What a worker and a server have in common: threads, and one failure that ends them all and is told to the job.

    Attributes:
        changed: the condition that guards the state and is notified when it changes.
    """

    def __init__(self, wire: Wire, title: str) -> None:
        self.changed = threading.Condition()
        self._wire = wire
        self._title = title
        self._failing = False
        self._failure: TransferError | None = None
        self._told = threading.Event()
        self._told.set()
        """Clear while a failure is being told: whoever closes connections waits, or nobody would hear the reason."""
        self._threads: list[threading.Thread] = []
        self._listeners: list[threading.Thread] = []
        self._lanes: list[queue.SimpleQueue[Any]] = []
        """Where threads wait for work; None ends them."""

    def _start(self, body: Callable[[int], None], peer: int) -> None:
        """Run ``body(peer)`` in a thread; what it raises becomes the failure of this end."""
        self._threads.append(self._thread(body, peer))

    def _listen_to(self, peer: int) -> None:
        """Run :meth:`_listen` in a thread, which may be the last one to end."""
        self._listeners.append(self._thread(self._listen, peer))

    def _thread(self, body: Callable[[int], None], peer: int) -> threading.Thread:
        def run() -> None:
            try:
                body(peer)
            except TransferError as error:
                self._fail(error)
            except Exception as error:  # an optimizer's or a policy's own: the job must hear of it all the same
                self._fail(TransferError(f"{self._title} failed: {type(error).__name__}: {error}"))

        thread = threading.Thread(target=run, daemon=True, name=f"{self._title} {body.__name__} {peer}")
        thread.start()
        return thread

    def _listen(self, peer: int) -> None:
        """Hear the last words of ``peer``, a rank."""
        self._wire.watch(peer)

    @contextmanager
    def _requesting(self) -> Iterator[None]:
        """Make the error of a request the failure of this end, and raise that: it knows a peer's last words."""
        try:
            yield
        except TransferError as error:
            self._fail(error)
            with self.changed:  # another thread may have been first and be about to say so
                self.changed.wait_for(lambda: self._failure is not None, TELLING_S)
                self._raise_failure()
            raise

    def _abandonable(self, transfer: Callable[[], T]) -> T:
        """Return what ``transfer()`` does, in a thread of its own: no longer waited for once this end has failed.

        The main thread must not wait in gloo itself, which forgets a transfer that begins in the moment in which its
        peer goes away.
        """
        self._raise_failure()
        answers: list[T | TransferError] = []

        def run() -> None:
            answer: T | TransferError
            try:
                answer = transfer()
            except TransferError as error:
                answer = error
            with self.changed:
                answers.append(answer)
                self.changed.notify_all()

        threading.Thread(target=run, daemon=True, name=f"{self._title} request").start()
        with self.changed:
            while not answers:
                self._raise_failure()
                self.changed.wait()
        if isinstance(answers[0], TransferError):
            raise answers[0]
        return answers[0]

    def _fail(self, error: TransferError) -> None:
        """Make ``error`` the failure unless there is one, tell the peers what was first, and end all threads."""
        with self.changed:
            if self._failing:
                return
            self._failing = True
            self._told.clear()
        try:
            self._tell_and_hang_up(error)
        finally:
            self._told.set()

    def _tell_and_hang_up(self, error: TransferError) -> None:
        # A closed connection has a reason at the other end; every other failure begins here and is told at once.
        first = self._wire.listen(LISTEN_S if CLOSED in str(error) else 0.0)
        self._wire.tell(first or str(error))
        if first and BEFORE not in str(error):  # a lost worker's reason, which this end repeats, has it already
            error = TransferError(f"{error}; {BEFORE} {first}")
        with self.changed:
            self._failure = error
            self.changed.notify_all()
        for lane in self._lanes:
            lane.put(None)
        self._wire.hang_up()

    def _join(self) -> None:
        """Wait for the threads, which have been told to end."""
        self._told.wait(TELLING_S)
        self._wire.stop_watching()
        end = time.monotonic() + (LEFT_BEHIND_S if self._failing else JOIN_S)
        for thread in [*self._threads, *self._listeners]:
            thread.join(max(end - time.monotonic(), 0.0))
        self._threads, self._listeners = [], []

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """Say ``what`` was going on in the errors of the wire."""
        try:
            yield
        except TransferError as error:
            raise TransferError(f"{self._title}: {error} {what}") from error


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
