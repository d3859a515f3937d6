"""The processes that a measurement starts on this machine. Start at :class:`Pool`.

One process per replica of the largest count asked for; smaller counts use the first of them, so that every count runs
under the same conditions. Each process waits on a pipe for its next task.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from ddltool.errors import DdlToolError, InputError
from ddltool.runtime.measuring.children import SILENCE_LIMIT_S, follow_parent, free_port, how_it_ended, start, stop
from ddltool.runtime.measuring.worker import Outcome, Subject, Task, Worker, as_input_error

if TYPE_CHECKING:
    import torch.distributed as dist

# When one process dies, its peers' collectives fail too; the death is the reason, and is seen within this time.
_GRACE_S = 0.5


@dataclass(frozen=True, slots=True)
class Refusal:
    """What a process could not do, as InputError's three parts."""

    where: str
    problem: str
    remedy: str


class Pool:
    """Processes on this machine, started when the first task comes."""

    def __init__(self, subject: Subject, replicas: Sequence[int]) -> None:
        self.subject, self.replicas = subject, sorted(set(replicas))
        self._children: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The processes' numbers, of rank 0 first."""
        return [child.pid for child in self._children]

    def nodes_of(self, replicas: int) -> int:
        """Return on how many nodes so many replicas run: this machine."""
        return 1

    def start(self) -> None:
        """Start the processes and wait until all are ready. Raises DdlToolError when one is not."""
        world = self.replicas[-1]
        context = multiprocessing.get_context("spawn")
        port = free_port()
        ends = [context.Pipe() for _ in range(world)]
        self._pipes = [mine for mine, _ in ends]
        self._children = [
            context.Process(target=_serve, args=(self.subject, rank, self.replicas, port, ends[rank][1]), daemon=True)
            for rank in range(world)
        ]
        start(self._children)
        for _, theirs in ends:
            theirs.close()  # or a dead child's pipe would not end
        self._gather(range(world), self.subject.source)

    def run(self, task: Task) -> Outcome:
        """Return the times of a task, with the largest peak memory of any replica.

        Raises InputError when the model fails, DdlToolError naming the configuration when a process ends.
        """
        if not self._children:
            self.start()
        ranks = range(task.replicas)
        for rank in ranks:
            with contextlib.suppress(OSError):  # its end is noticed below
                self._pipes[rank].send(task)
        outcomes = self._gather(ranks, str(task))
        return Outcome(
            full=outcomes[0].full,
            local=outcomes[0].local,
            passes=outcomes[0].passes,
            peak_bytes=max(outcome.peak_bytes for outcome in outcomes),
        )

    def close(self) -> None:
        """End the processes; the next task starts new ones."""
        stop(self._children)
        for pipe in self._pipes:
            pipe.close()
        self._children, self._pipes = [], []

    def _gather(self, ranks: Sequence[int], where: str) -> list[Any]:
        """Return one answer per rank."""
        answers: dict[int, Any] = {}
        last = time.monotonic()
        while len(answers) < len(ranks):
            waiting = [rank for rank in ranks if rank not in answers]
            ready = wait([self._pipes[rank] for rank in waiting], timeout=1.0)
            if ready:
                last = time.monotonic()
            elif time.monotonic() - last > SILENCE_LIMIT_S:
                raise DdlToolError(f"{where}: the measuring processes were silent for {SILENCE_LIMIT_S:.0f} s")
            for rank in waiting:
                if self._pipes[rank] in ready and (answer := self._receive(rank, where)) is not None:
                    answers[rank] = answer
        return [answers[rank] for rank in ranks]

    def _receive(self, rank: int, where: str) -> Any:
        """Return a rank's answer, None for a sign of life."""
        try:
            answer = self._pipes[rank].recv()
        except (EOFError, OSError):
            self._children[rank].join(_GRACE_S)
            raise DdlToolError(self._deaths(where) or f"{where}: a measuring process went away") from None
        if isinstance(answer, Refusal):
            death = self._deaths(where, within_s=_GRACE_S if len(self._children) > 1 else 0.0)
            if death:
                raise DdlToolError(death)
            raise InputError(answer.where, answer.problem, answer.remedy)
        return answer

    def _deaths(self, where: str, within_s: float = 0.0) -> str:
        """Return how a process ended that did not end by itself, in words; empty when none did."""
        deadline = time.monotonic() + within_s
        while True:
            for child in self._children:
                if child.exitcode not in (None, 0):
                    return f"{where}: a measuring process {how_it_ended(child.exitcode)}"
            if time.monotonic() >= deadline:
                return ""
            time.sleep(0.02)


def _serve(subject: Subject, rank: int, replicas: Sequence[int], port: int, pipe: Connection) -> None:
    """Be one replica; whatever goes wrong reaches the parent as text."""
    os.dup2(2, 1)  # what the user's module prints must not mix with the command's result
    threading.Thread(target=follow_parent, daemon=True).start()
    try:
        worker = Worker(subject, _device(subject, rank), _groups(subject, rank, replicas, port))
        pipe.send(True)
        while True:
            task = pipe.recv()
            pipe.send(worker.run(task, _beat(pipe)))
    except (EOFError, BrokenPipeError):
        return  # the parent has gone
    except Exception as error:
        told = as_input_error(error, subject.source)
        with contextlib.suppress(OSError):
            pipe.send(Refusal(told.where, told.problem, told.remedy))
    finally:
        # not destroy_process_group: it would wait for peers that wait for this one
        with contextlib.suppress(OSError):
            pipe.close()


def _beat(pipe: Connection) -> Callable[[], None]:
    """Return a function that sends a sign of life, at most one a second."""
    last = time.monotonic()

    def beat() -> None:
        nonlocal last
        if time.monotonic() - last > 1.0:
            last = time.monotonic()
            pipe.send(None)

    return beat


def _device(subject: Subject, rank: int) -> Any:
    import torch

    return torch.device("cuda", rank) if subject.device == "cuda" else torch.device("cpu")


def _groups(subject: Subject, rank: int, replicas: Sequence[int], port: int) -> dict[int, dist.ProcessGroup | None]:
    """Return the process group of every replica count above one; all ranks make all groups, in the same order."""
    import torch.distributed as dist

    world = max(replicas)
    if world == 1:
        return {}
    # Otherwise gloo asks the host's name, which need not resolve to this machine.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if subject.device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    return {count: dist.new_group(range(count)) for count in replicas if count > 1}
