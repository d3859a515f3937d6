"""Measures with the processes of a torchrun job. Start at :class:`TorchrunJob`.

Rank 0 leads: it decides what runs next and writes that task into the job's store; the others read it, run their part
and wait for the next. The first rank that fails prints the reason and exits; then the others' collectives fail, and
torchrun ends them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta

from ddltool.errors import DdlToolError, InputError, one_line
from ddltool.runtime.measuring.children import poll_until, training_failure
from ddltool.runtime.measuring.rendezvous import START_LIMIT_S, Place, job_store
from ddltool.runtime.measuring.worker import MeasureTask, StepTimer, StepTimings, Subject, connect_replica

# How long followers wait for their next task, for instance while rank 0 searches for the memory limit.
_PATIENCE = timedelta(hours=24)
# Seconds after a collective's failure in which another rank's failure may still show in the store.
_GRACE_S = 1.0


class TorchrunJob:
    """This process's part in measuring with a torchrun job; every rank makes one, with equal arguments, and enters it.

    All ranks call :meth:`prepare`. Then rank 0's is the executor of a campaign, and the others :meth:`follow`. The
    first rank on which an exception occurs raises it and notes its failure in the job's store. The other ranks, whose
    collectives fail as a consequence, raise SystemExit: exit code 1, no output.
    """

    def __init__(self, place: Place, subject: Subject, replicas: Sequence[int]) -> None:
        """Keep the arguments; ``replicas``: counts to be measured. Raises InputError for one above the number of processes."""
        self.place = place
        self.subject = subject
        self.replicas = sorted(set(replicas))
        self._tasks = 0  # number of the next task in the store
        self._worker: StepTimer | None = None  # made by `prepare`
        self.where = subject.source  # begins error messages: the source, later the task under way
        if self.replicas[-1] > place.world_size:
            problem = f"{self.replicas[-1]} is more than the job's {place.world_size} processes"
            raise InputError("--replicas", problem, f"start {self.replicas[-1]} with torchrun, or measure fewer")

    def __enter__(self) -> TorchrunJob:
        """Connect to the job's store, and write there on which node this rank runs.

        Raises DdlToolError when the store cannot be reached.
        """
        try:
            self._store = job_store("profile", START_LIMIT_S)
        except RuntimeError as error:
            raise DdlToolError(f"the job's processes do not find each other ({one_line(str(error))[:200]})") from error
        self._store.set(f"node/{self.place.rank}", str(self.place.node))
        return self

    def __exit__(self, *_: object) -> None:
        """On rank 0, end the other ranks by a null task, also after a failure between two tasks."""
        if self.place.rank == 0:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"task/{self._tasks}", "null")

    def nodes_of(self, replicas: int) -> int:
        """Return the number of nodes on which the first ``replicas`` ranks run."""
        return len({self._store.get(f"node/{rank}") for rank in range(replicas)})

    def run(self, task: MeasureTask) -> StepTimings:
        """On rank 0, give a task to all ranks through the job's store, run its part, and return its times.

        Any error is raised as an error of one line, or as SystemExit if another rank failed first (:meth:`failure`).
        """
        self._store.set(f"task/{self._tasks}", json.dumps(asdict(task)))
        self._tasks += 1
        return self._run_part(task)

    def prepare(self) -> None:
        """Import torch, and connect the replicas to each other; every rank calls this, together, before the first task.

        Raises InputError when this node has fewer GPUs than processes.
        """
        from torch._C._distributed_c10d import PrefixStore

        place = self.place
        with self._errors_reported():
            if self.subject.device == "cuda":
                import torch

                if (devices := torch.cuda.device_count()) <= place.local_rank:
                    problem = f"cuda has {devices} devices for {place.local_world_size} processes of a node"
                    raise InputError("--device", problem, "start fewer processes, or use --device cpu")
            self._worker = connect_replica(
                self.subject,
                self.replicas,
                place.rank,
                place.world_size,
                local_rank=place.local_rank,
                store=PrefixStore("group", self._store),
            )

    def follow(self) -> None:
        """Run this rank's part of rank 0's tasks until a null task comes; call it on every rank but 0.

        Tasks are read from the job's store in order; those of which this rank is not a replica are skipped.
        """
        while True:
            key = f"task/{self._tasks}"
            with self._errors_reported():
                self._store.wait([key], _PATIENCE)
                fields = json.loads(self._store.get(key))
            self._tasks += 1
            if fields is None:
                return
            task = MeasureTask(**fields)
            if self.place.rank < task.replicas:
                self._run_part(task)

    def _run_part(self, task: MeasureTask) -> StepTimings:
        """Run this rank's part of a task, and return its times. Errors are raised as by :meth:`run`."""
        assert self._worker is not None
        self.where = str(task)
        with self._errors_reported():
            return self._worker.run(task)

    @contextlib.contextmanager
    def _errors_reported(self) -> Iterator[None]:
        """Turn any exception in the block into that of :meth:`failure`."""
        try:
            yield
        except Exception as error:
            raise self.failure(error) from error

    def failure(self, error: Exception) -> BaseException:
        """Return the exception to raise for ``error``: one line about this rank, or SystemExit if another rank failed first.

        The first failure is the reason for all; the errors of other ranks are only its consequences. So only the first
        rank that fails prints anything.
        """
        # A RuntimeError may be that of a collective whose peer has failed, so the peer gets time to say so.
        if self._failed_elsewhere(_GRACE_S if isinstance(error, RuntimeError) else 0.0):
            return SystemExit(1)
        if isinstance(error, RuntimeError) and _is_lost(error):
            return DdlToolError(f"{self.where}: a process of the job ended")
        reported = training_failure(error, self.subject.source)
        if self.place.rank and isinstance(reported, InputError):
            return InputError(f"rank {self.place.rank}: {reported.where}", reported.problem, reported.remedy)
        return reported

    def _failed_elsewhere(self, within_s: float) -> bool:
        """Return whether another rank has failed, waiting up to ``within_s``; if not, note this rank as the first to fail.

        False if the store cannot be reached.
        """
        own_rank = str(self.place.rank)
        try:
            poll_until(within_s, lambda: self._store.check(["failed"]) or None)
            # Sets the key to this rank only if it is not set yet, and returns the value that it has then.
            first_failed = self._store.compare_set("failed", "", own_rank)
        except RuntimeError:
            return False  # the store is gone
        return bool(first_failed != own_rank.encode())


def _is_lost(error: RuntimeError) -> bool:
    """Return whether ``error`` is torch's for a collective whose peer is gone, by its text."""
    text = str(error).lower()
    return any(word in text for word in ("connection", "peer", "socket", "timed out", "unhandled system error"))
