"""Starts child processes that end with their parent and ignore Ctrl-C at the terminal. Start at :class:`Children`."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from ddltool import interrupts
from ddltool.errors import DdlToolError, InputError, listed, one_line

# Seconds without any message after which processes count as hung: no step takes that long without a sign of life.
SILENCE_LIMIT_S = 300.0
# After an error that a process's death may have caused, its exit code shows within these seconds.
_GRACE_S = 0.5

# In a child: the private folder in which the children meet; "" in other processes.
_folder = ""

T = TypeVar("T")


class LostProcess(DdlToolError):
    """A process has ended too early: its ``rank``, and ``how`` it ended, in words; ``where`` begins the message."""

    def __init__(self, where: str, rank: int, how: str) -> None:
        super().__init__(f"{where}: process {rank} {how}")
        self.rank = rank
        self.how = how


class Children:
    """Child processes with a pipe each, which run ``body(*arguments, pipe)``; leaving the ``with`` block kills them.

    Process number i, from 0, has the *rank* i. An exception of a body is raised by :meth:`receive`, as one line about
    ``source``, the user's model (:func:`training_failure`).
    """

    def __init__(self, body: Callable[..., None], arguments: Sequence[tuple[Any, ...]], source: str = "") -> None:
        """Start one process for each of ``arguments``; if one cannot be started, kill those that were."""
        context = multiprocessing.get_context("spawn")
        # A pipe each: a killed process can leave a shared queue locked, or with half a message in it.
        pipe_pairs = [context.Pipe() for _ in arguments]
        self.pipes = [parent_end for parent_end, _ in pipe_pairs]
        # The children meet at a file: a store on a port would listen to everybody who reaches this machine.
        self._folder = tempfile.mkdtemp(prefix="ddltool-")
        self.processes = [
            context.Process(target=_run, args=(body, body_arguments, child_end, source, self._folder), daemon=True)
            for body_arguments, (_, child_end) in zip(arguments, pipe_pairs, strict=True)
        ]
        self._heard_s = time.monotonic()  # when the last message came or went
        try:
            with interrupts.held():
                for process in self.processes:
                    process.start()
        except BaseException:
            self.close()
            raise
        finally:
            for _, child_end in pipe_pairs:
                child_end.close()  # else reading from a dead process's pipe would not end

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the processes that still run, wait for all that were started, and remove their meeting folder."""
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
        """Send a message to the process ``rank``; if it is gone, the next :meth:`receive` raises the error."""
        self._heard_s = time.monotonic()
        with contextlib.suppress(OSError):
            self.pipes[rank].send(message)

    def receive(
        self, ranks: Sequence[int], where: str, poll_s: float = 1.0, limit_s: float = SILENCE_LIMIT_S
    ) -> list[tuple[int, Any]]:
        """Return (rank, message) pairs, in the order of ``ranks``, at most one of each process.

        It returns as soon as some have come, and after ``poll_s`` seconds at the latest. ``where`` begins error
        messages. Raises the error that a process has sent, :class:`LostProcess` for a process that ended, and
        DdlToolError naming the ranks when none of them sent anything for ``limit_s`` seconds.
        """
        ready = wait([self.pipes[rank] for rank in ranks], poll_s)
        messages: list[tuple[int, Any]] = []
        for rank in ranks:
            if self.pipes[rank] not in ready:
                continue
            try:
                message = self.pipes[rank].recv()
            except (EOFError, OSError):
                raise self._dead_process(where, rank) or LostProcess(where, rank, "went away") from None
            if isinstance(message, DdlToolError):
                # When one process dies, its peers' collectives fail too; then the death is the error to raise.
                death = self._dead_process(where, rank) if len(self.processes) > 1 else None
                raise death or message
            messages.append((rank, message))
        if messages:
            self._heard_s = time.monotonic()
        elif time.monotonic() - self._heard_s > limit_s:
            names = listed([str(rank) for rank in ranks], 8)
            raise DdlToolError(f"{where}: no answer from process {names} within {limit_s:.0f} s")
        return messages

    def gather(
        self,
        ranks: Sequence[int],
        where: str,
        take_note: Callable[[int, Any], bool] = lambda rank, message: message is None,
        limit_s: float = SILENCE_LIMIT_S,
    ) -> list[Any]:
        """Block until each rank has answered, and return the answers in the order of ``ranks``.

        Args:
            ranks: of the processes that answer.
            where: begins error messages.
            take_note: ``take_note(rank, message)`` handles a message and returns whether it was a note, not the answer;
                by default None is a note, a sign of life.
            limit_s: seconds that all of them together may be silent.

        Raises what :meth:`receive` raises.
        """
        answers: dict[int, Any] = {}
        while unanswered := [rank for rank in ranks if rank not in answers]:
            messages = self.receive(unanswered, where, limit_s=limit_s)
            answers |= {rank: message for rank, message in messages if not take_note(rank, message)}
        return [answers[rank] for rank in ranks]

    def _dead_process(self, where: str, rank: int) -> LostProcess | None:
        """Return the error of a process that has died, ``rank``'s if it is one; None if all live after :data:`_GRACE_S`."""
        rank_first = sorted(enumerate(self.processes), key=lambda entry: entry[0] != rank)

        def find_dead() -> LostProcess | None:
            """Return the error of the first process with an exit code other than 0; None if there is none."""
            dead = ((dead_rank, process.exitcode) for dead_rank, process in rank_first if process.exitcode)
            return next((LostProcess(where, dead_rank, how_it_ended(code)) for dead_rank, code in dead), None)

        return poll_until(_GRACE_S, find_dead)


def poll_until(seconds: float, look: Callable[[], T | None]) -> T | None:
    """Call ``look`` every 20 ms, at least once, until it returns something else than None or ``seconds`` are over.

    Returns its last result.
    """
    deadline_s = time.monotonic() + seconds
    while (result := look()) is None and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return result


def meeting_place(use: str = "all") -> str:
    """Return, in a child process, an ``init_method`` for a process group of all :class:`Children`.

    It is a file in their private folder, another one for each ``use``.
    """
    return f"file://{_folder}/{use}"


def _run(body: Callable[..., None], arguments: tuple[Any, ...], pipe: Connection, source: str, folder: str) -> None:
    """Run ``body`` in a child process, and send its exception, if any, to the parent as an error of one line.

    ``body`` is called with ``arguments`` and then ``pipe``. ``source``: the user's script, as the error names it;
    ``folder``: where the children meet (:func:`meeting_place`). The child exits when its parent ends.
    """
    global _folder
    _folder = folder
    os.dup2(2, 1)  # what the user's module prints must not mix with the command's result
    threading.Thread(target=_follow_parent, daemon=True).start()
    try:
        body(*arguments, pipe)
    except Exception as error:
        with contextlib.suppress(OSError):  # the parent has gone
            pipe.send(training_failure(error, source))
    finally:
        with contextlib.suppress(OSError):
            pipe.close()


def _follow_parent() -> None:
    """Block until the parent process ends, then delete the meeting folder and exit: the body of a thread of a child."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(_folder, ignore_errors=True)
        os._exit(1)


def training_failure(error: Exception, source: str) -> DdlToolError:
    """Return the error of one line which says that a training step of ``source``, the user's model, has raised ``error``.

    A DdlToolError is returned itself.
    """
    if isinstance(error, DdlToolError):
        return error
    text = one_line(f"{type(error).__name__}: {error}")[:300]
    return InputError(source, f"a training step failed ({text})", "it must train on its example inputs")


def how_it_ended(exit_code: int) -> str:
    """Return in words what an exit code of ``multiprocessing`` says; a negative one is the signal that killed the process.

    >>> how_it_ended(9), how_it_ended(-9)
    ('died (exit code 9)', 'was killed (SIGKILL: by somebody, or by the system when memory ran out)')
    """
    if exit_code >= 0:
        return f"died (exit code {exit_code})"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    cause = ": by somebody, or by the system when memory ran out" if -exit_code == signal.SIGKILL else ""
    return f"was killed ({name}{cause})"
