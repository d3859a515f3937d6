"""The processes that a measurement starts on this machine. Start at :class:`Pool`.

One process per replica of the largest count asked for; smaller counts use the first of them, so that every count runs
under the same conditions. Each process waits on a pipe for its next task.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from ddltool.runtime.measuring.children import Children, free_port
from ddltool.runtime.measuring.worker import Outcome, Subject, Task, Worker

if TYPE_CHECKING:
    import torch.distributed as dist


class Pool:
    """Processes on this machine, started when the first task comes."""

    def __init__(self, subject: Subject, replicas: Sequence[int]) -> None:
        self.subject, self.replicas = subject, sorted(set(replicas))
        self._children: Children | None = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def nodes_of(self, replicas: int) -> int:
        """Return on how many nodes so many replicas run: this machine."""
        return 1

    def start(self) -> Children:
        """Start the processes and wait until all are ready. Raises DdlToolError when one is not."""
        ranks, port = range(self.replicas[-1]), free_port()
        arguments = [(self.subject, rank, self.replicas, port) for rank in ranks]
        self._children = children = Children(_serve, arguments, self.subject.source)
        _gather(children, ranks, self.subject.source)
        return children

    def run(self, task: Task) -> Outcome:
        """Return the times of a task, with the largest peak memory of any replica.

        Raises InputError when the model fails, DdlToolError naming the configuration when a process ends.
        """
        children = self._children or self.start()
        ranks = range(task.replicas)
        for rank in ranks:
            children.send(rank, task)
        outcomes = _gather(children, ranks, str(task))
        return Outcome(
            full=outcomes[0].full,
            local=outcomes[0].local,
            passes=outcomes[0].passes,
            peak_bytes=max(outcome.peak_bytes for outcome in outcomes),
        )

    def close(self) -> None:
        """End the processes; the next task starts new ones."""
        if self._children is not None:
            self._children.close()
        self._children = None


def _gather(children: Children, ranks: Sequence[int], where: str) -> list[Any]:
    """Return one answer per rank."""
    answers: dict[int, Any] = {}
    while len(answers) < len(ranks):
        waiting = [rank for rank in ranks if rank not in answers]
        for rank, answer in children.receive(waiting, f"{where}: the measuring processes were silent"):
            if failure := children.failure(answer, f"{where}: a measuring process"):
                raise failure
            if answer is not None:  # a sign of life
                answers[rank] = answer
    return [answers[rank] for rank in ranks]


def _serve(subject: Subject, rank: int, replicas: Sequence[int], port: int, pipe: Connection) -> None:
    """Be one replica. Its process group is not destroyed: that would wait for peers that wait for this one."""
    worker = Worker(subject, _device(subject, rank), _groups(subject, rank, replicas, port))
    pipe.send(True)
    while True:
        task = pipe.recv()
        pipe.send(worker.run(task, _beat(pipe)))


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
