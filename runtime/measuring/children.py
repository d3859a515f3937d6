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
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

from ddltool import interrupts
from ddltool.errors import DdlToolError, InputError, listed, one_line

# No step takes longer without a sign of life; a hung collective must not hang the user.
SILENCE_LIMIT_S = 300.0
# The death of a process is seen within this time of what follows from it.
_GRACE_S = 0.5

# In a child: the private folder in which the children meet.
_folder = ""

T = TypeVar("T")


class LostProcess(DdlToolError):
    """A process has ended before its time: its ``rank``, and ``how`` it ended, in words."""

    def __init__(self, where: str, rank: int, how: str) -> None:
        super().__init__(f"{where}: process {rank} {how}")
        self.rank, self.how = rank, how


class Children:
    """Processes of this machine with a pipe each, in which ``body(*arguments, pipe)`` runs; a ``with`` block ends them.

    An exception of a body is raised here as one line about ``source`` (:func:`in_one_line`).
    """

    def __init__(self, body: Callable[..., None], arguments: Sequence[tuple[Any, ...]], source: str = "") -> None:
        """Start one process for each of ``arguments``; when one cannot be started, those that were are ended again."""
        context = multiprocessing.get_context("spawn")
        # A pipe for each: a queue that all share can be left locked, or with half a message in it, by one that is killed.
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
                child_end.close()  # or a dead process's pipe would not end

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
        """Send a message to the process ``rank``; where it is gone, the next :meth:`receive` raises the error."""
        self._heard_s = time.monotonic()
        with contextlib.suppress(OSError):
            self.pipes[rank].send(message)

    def receive(
        self, ranks: Sequence[int], where: str, poll_s: float = 1.0, limit_s: float = SILENCE_LIMIT_S
    ) -> list[tuple[int, Any]]:
        """Return the (rank, message) pairs that arrive within ``poll_s``, at most one of each process, in rank order.

        ``where`` begins error messages. Raises the error that a process raised, :class:`LostProcess` for a process that
        ended, and DdlToolError naming the ranks when none of them sent anything for ``limit_s``.
        """
        ready = wait([self.pipes[rank] for rank in ranks], poll_s)
        messages: list[tuple[int, Any]] = []
        for rank in ranks:
            if self.pipes[rank] in ready:
                try:
                    message = self.pipes[rank].recv()
                except (EOFError, OSError):
                    raise self._dead_process(where, rank) or LostProcess(where, rank, "went away") from None
                if isinstance(message, DdlToolError):
                    # When one process dies, its peers' collectives fail too; the death is the reason.
                    raise (self._dead_process(where, rank) if len(self.processes) > 1 else None) or message
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
        """Wait for one answer of each rank, and return the answers in the order of ``ranks``.

        Args:
            ranks: whose answers are wanted.
            where: begins error messages.
            take_note: ``take_note(rank, message)`` returns whether a message is only a note on the way and no answer;
                by default None is one, a sign of life.
            limit_s: seconds that all of them may be silent.

        Raises what :meth:`receive` raises.
        """
        answers: dict[int, Any] = {}
        while unanswered := [rank for rank in ranks if rank not in answers]:
            messages = self.receive(unanswered, where, limit_s=limit_s)
            answers |= {rank: message for rank, message in messages if not take_note(rank, message)}
        return [answers[rank] for rank in ranks]

    def _dead_process(self, where: str, rank: int) -> LostProcess | None:
        """Return the error of a process that has died, None when all live after the grace time; ``rank`` is looked at first."""
        rank_first = sorted(enumerate(self.processes), key=lambda entry: entry[0] != rank)

        def find_dead() -> LostProcess | None:
            """Return the error of the first process with an exit code other than 0, None without one."""
            dead = ((dead_rank, process.exitcode) for dead_rank, process in rank_first if process.exitcode)
            return next((LostProcess(where, dead_rank, how_it_ended(code)) for dead_rank, code in dead), None)

        return poll_until(_GRACE_S, find_dead)


def poll_until(seconds: float, look: Callable[[], T | None]) -> T | None:
    """Call ``look`` until it returns something, for at most ``seconds``; return that, or None. It is called at least once."""
    deadline_s = time.monotonic() + seconds
    while (result := look()) is None and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return result


def meeting_place(use: str = "all") -> str:
    """Return, in a child, the ``init_method`` of a process group of all :class:`Children`: a private file, one per ``use``."""
    return f"file://{_folder}/{use}"


def _run(body: Callable[..., None], arguments: tuple[Any, ...], pipe: Connection, source: str, folder: str) -> None:
    """Run ``body`` in a child process; send any exception of it to the parent as an error of one line.

    ``folder``: where the children meet. The child ends when its parent does.
    """
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


def in_one_line(error: Exception, source: str) -> DdlToolError:
    """Return an exception of the user's model as an error of one line about ``source``; a DdlToolError is returned as it is."""
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
    cause = ": by somebody, or by the system when memory ran out" if -exit_code == signal.SIGKILL else ""
    return f"was killed ({name}{cause})"
