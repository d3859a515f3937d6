"""What a worker and a server have in common: threads over one wire, and one failure that ends them all. See :class:`End`."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ddltool.errors import InputError
from ddltool.runtime.servers.transfers import TransferError
from ddltool.runtime.servers.wire import CLOSED, Wire

JOIN_S = 5.0
# A transfer that begins in the moment in which its peer goes away may never end in gloo; its thread is left behind.
LEFT_BEHIND_S = 1.0
LISTEN_S = 2.0  # how long to wait for the last words of an end that closes
TELLING_S = 5.0  # at most, for hearing and telling last words and for hanging up
BEFORE = "before that,"
T = TypeVar("T")


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
        """Set when it has been told."""
        self._cause: TransferError | None = None
        """Set at once, without what others said before."""
        self._has_left = False
        """Whether the threads have ended, so that nothing can be asked any more."""
        self._told = threading.Event()
        self._told.set()
        """Clear while a failure is being told: whoever closes connections waits, or nobody would hear the reason."""
        self._threads: list[threading.Thread] = []
        self._listeners: list[threading.Thread] = []
        self._ended: set[threading.Thread] = set()
        self._lanes: list[queue.SimpleQueue[Any]] = []
        """Where threads wait for work; None ends them."""

    def _start(self, body: Callable[[int], None], peer: int) -> threading.Thread:
        """Run ``body(peer)`` in a thread; what it raises becomes the failure of this end."""
        thread = self._thread(body, peer)
        self._threads.append(thread)
        return thread

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
            finally:
                with self.changed:
                    self._ended.add(thread)
                    self.changed.notify_all()

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
        peer goes away. Raises InputError when this end has closed.
        """
        self._raise_failure()
        self._demand_open()
        answers: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                answers.append(transfer())
            except BaseException as error:
                errors.append(error)
            with self.changed:
                self.changed.notify_all()

        thread = threading.Thread(target=run, daemon=True, name=f"{self._title} request")
        self._listeners.append(thread)
        thread.start()
        with self.changed:
            while not answers and not errors:
                self._raise_failure()
                self.changed.wait()
        self._listeners.remove(thread)
        if errors:
            raise errors[0]
        return answers[0]

    def _demand_open(self) -> None:
        if self._has_left:
            raise InputError(self._title, "is asked for something after it has closed", "ask before, inside its block")

    def _fail(self, error: TransferError) -> None:
        """Make ``error`` the failure unless there is one, tell the peers what was first, and end all threads."""
        with self.changed:
            if self._failing:
                return
            self._failing, self._cause = True, error
            self._told.clear()
        try:
            self._tell_and_hang_up(error)
        finally:
            self._told.set()

    def _tell_and_hang_up(self, error: TransferError) -> None:
        first = ""
        try:
            # A broken connection may have a reason at another end; every other failure begins here and is told at once.
            if CLOSED in str(error) and error.peer is not None:
                first = self._wire.last_words(error.peer, LISTEN_S)
            if error.peer is not None:
                first = first or self._wire.heard()
        finally:  # a signal may end the listening
            try:
                self._wire.tell(first or str(error))
            finally:
                if first and BEFORE not in str(error):  # a lost worker's reason, which this end repeats, has it already
                    error = TransferError(f"{error}; {BEFORE} {first}", error.peer)
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
        self._has_left = True

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _raise_what_ended_it(self) -> None:
        """Raise the failure when all is over, also one that could not be told in time."""
        self._raise_failure()
        if self._cause is not None:
            raise self._cause

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        """Say ``what`` was going on in the errors of the wire."""
        try:
            yield
        except TransferError as error:
            raise TransferError(f"{self._title}: {error} {what}", error.peer) from error
