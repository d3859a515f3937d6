"""Child processes that end with their parent, and that a Ctrl-C at the terminal does not reach. Start at :class:`Children`."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from ddltool.errors import DdlToolError, InputError, one_line

# No step takes longer without a sign of life; a hung collective must not hang the user.
SILENCE_LIMIT_S = 300.0
# When one process dies, its peers' collectives fail too; the death is the reason, and is seen within this time.
_GRACE_S = 0.5

# In a child: where it meets the others.
_folder = ""

T = TypeVar("T")
GONE = object()
"""Stands for a message where none will come: the process has ended, or closed its pipe."""


class Children:
    """Processes of this machine with a pipe each, in which ``body(*arguments, pipe)`` runs; a ``with`` block ends them.

    What a body raises arrives as :func:`in_one_line` tells it of ``source``.
    """

    def __init__(self, body: Callable[..., None], arguments: Sequence[tuple[Any, ...]], source: str = "") -> None:
        context = multiprocessing.get_context("spawn")
        # A pipe for each: a queue that all share can be left locked, or with half a message in it, by one that is killed.
        both = [context.Pipe() for _ in arguments]
        self.pipes = [mine for mine, _ in both]
        # A file to meet at: a store on a port would listen to everybody who reaches this machine.
        self._folder = tempfile.mkdtemp(prefix="ddltool-")
        self.processes = [
            context.Process(target=_run, args=(body, given, theirs, source, self._folder), daemon=True)
            for given, (_, theirs) in zip(arguments, both, strict=True)
        ]
        self._heard_s = time.monotonic()
        try:
            with _interrupts_held():
                for process in self.processes:
                    process.start()
        except BaseException:
            self.close()
            raise
        finally:
            for _, theirs in both:
                theirs.close()  # or a dead process's pipe would not end

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the processes that still run, and wait for all that were started."""
        started = [process for process in self.processes if process.pid is not None]
        for process in started:
            if process.is_alive():
                process.kill()
        for process in started:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def send(self, rank: int, message: Any) -> None:
        """Send a message; that a process is gone is for :meth:`receive` to tell."""
        self._heard_s = time.monotonic()
        with contextlib.suppress(OSError):
            self.pipes[rank].send(message)

    def receive(self, ranks: Iterable[int], silent: str, timeout_s: float = 1.0) -> list[tuple[int, Any]]:
        """Return what has come from these processes, at most one message of each, by rank; ``GONE`` for one that ended.

        Raises DdlToolError, ``SILENT for 300 s``, when none was heard of for so long.
        """
        asked = list(ranks)
        ready = wait([self.pipes[rank] for rank in asked], timeout_s)
        found: list[tuple[int, Any]] = []
        for rank in asked:
            if self.pipes[rank] in ready:
                try:
                    found.append((rank, self.pipes[rank].recv()))
                except (EOFError, OSError):
                    found.append((rank, GONE))
        if found:
            self._heard_s = time.monotonic()
        elif time.monotonic() - self._heard_s > SILENCE_LIMIT_S:
            raise DdlToolError(f"{silent} for {SILENCE_LIMIT_S:.0f} s")
        return found

    def gather(
        self, ranks: Sequence[int], where: str, who: str, is_note: Callable[[Any], bool] = lambda answer: answer is None
    ) -> list[Any]:
        """Return one answer of each rank; what ``is_note`` is a sign of life and no answer.

        Raises what :meth:`failure` says.
        """
        answers: dict[int, Any] = {}
        while left := [rank for rank in ranks if rank not in answers]:
            for rank, answer in self.receive(left, f"{where}: the {who}es were silent"):
                if failure := self.failure(answer, f"{where}: a {who}"):
                    raise failure
                if not is_note(answer):
                    answers[rank] = answer
        return [answers[rank] for rank in ranks]

    def failure(self, answer: Any, who: str) -> DdlToolError | None:
        """Return why this answer is none: ``WHO died`` where a process did, else what it refused; None for an answer."""
        if answer is not GONE and not isinstance(answer, DdlToolError):
            return None
        patience_s = _GRACE_S if answer is GONE or len(self.processes) > 1 else 0.0
        if code := soon(patience_s, lambda: next((each.exitcode for each in self.processes if each.exitcode), None)):
            return DdlToolError(f"{who} {how_it_ended(code)}")
        return answer if isinstance(answer, DdlToolError) else DdlToolError(f"{who} went away")


def soon(seconds: float, look: Callable[[], T | None]) -> T | None:
    """Return what ``look`` finds within so many seconds, None where there is nothing; it looks once at least."""
    deadline = time.monotonic() + seconds
    while (found := look()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def meeting_place(use: str = "all") -> str:
    """Return, in a child, where :class:`Children` meet for this use, for ``init_process_group``: a file of this user's."""
    return f"file://{_folder}/{use}"


def _run(body: Callable[..., None], arguments: tuple[Any, ...], pipe: Connection, source: str, folder: str) -> None:
    """Be one process; whatever goes wrong reaches the parent as text."""
    global _folder
    _folder = folder
    os.dup2(2, 1)  # what the user's module prints must not mix with the command's result
    threading.Thread(target=_follow_parent, daemon=True).start()
    try:
        body(*arguments, pipe)
    except Exception as error:
        with contextlib.suppress(OSError):  # the parent has gone
            pipe.send(in_one_line(error, source))
    finally:
        with contextlib.suppress(OSError):
            pipe.close()


def _follow_parent() -> None:
    """End this process when the one that started it is gone: a killed command leaves nobody computing."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(_folder, ignore_errors=True)
        os._exit(1)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold SIGINT back; processes started inside never receive it, for a blocked signal stays blocked across exec.

    The parent receives it too and ends them. A handler set by the child itself would come too late: importing torch
    takes seconds, and a Ctrl-C then ends in a traceback.
    """
    resource_tracker.ensure_running()  # it unblocks SIGINT when it starts its own process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # a Ctrl-C of the meantime is delivered here


def in_one_line(error: Exception, source: str) -> DdlToolError:
    """Return what a model raised as one line about its SOURCE, and errors of ours as they are."""
    if isinstance(error, DdlToolError):
        return error
    text = one_line(f"{type(error).__name__}: {error}")[:300]
    return InputError(source, f"a training step failed ({text})", "it must train on its example inputs")


def how_it_ended(exit_code: int) -> str:
    """Return an exit code of ``multiprocessing`` in words.

    >>> how_it_ended(9), how_it_ended(-9)
    ('died (exit code 9)', 'was killed (SIGKILL: by somebody, or by the system when memory ran out)')
    """
    if exit_code >= 0:
        return f"died (exit code {exit_code})"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    more = ": by somebody, or by the system when memory ran out" if -exit_code == signal.SIGKILL else ""
    return f"was killed ({name}{more})"
