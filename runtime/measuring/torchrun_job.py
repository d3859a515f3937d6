"""Measuring with the processes of a torchrun job. Start at :func:`job_from_environment`, :class:`Job`.

Rank 0 leads: it decides what runs next and writes it into the job's store; the others read, run their part and wait. What
goes wrong on one rank is written there too, and ends all: rank 0 says why, the others end in silence.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from ddltool.errors import DdlToolError, InputError, one_line
from ddltool.runtime.measuring.children import in_one_line, soon
from ddltool.runtime.measuring.worker import START_LIMIT, Outcome, Subject, Task, Worker, replica

START_LIMIT_S = START_LIMIT.total_seconds()
# Followers may wait this long for their next task: as long as rank 0 searches for the memory limit, say.
_PATIENCE = timedelta(hours=24)
# The reason of a failure reaches the store before the failure itself reaches the peers' collectives, or just after.
_GRACE_S = 1.0

Leave = Callable[[DdlToolError], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """This process's place in a torchrun job."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    address: str
    port: int


def job_from_environment(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Return the place that torchrun's variables give, None outside a job. Raises InputError for broken ones."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        return None

    def number(name: str, default: str | None = None) -> int:
        text = environment.get(name, default) or ""
        if not text.isdecimal():
            raise InputError(name, f"is {text!r}", "start the job with torchrun")
        return int(text)

    size = number("WORLD_SIZE")
    local_size = number("LOCAL_WORLD_SIZE", str(size))
    rank = number("RANK")
    return Place(
        rank=rank,
        world_size=size,
        local_rank=number("LOCAL_RANK", str(rank % max(1, local_size))),
        local_world_size=local_size,
        node=number("GROUP_RANK", str(rank // max(1, local_size))),
        address=environment["MASTER_ADDR"],
        port=number("MASTER_PORT"),
    )


def job_store(place: Place, use: str, timeout_s: float, *, again: bool = False) -> Any:
    """Return a connection to the job's store, kept apart by ``use``; ``again``: one more of this process.

    A restarted job does not read what the attempt before left there. Raises RuntimeError where the others cannot be found.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    hosts = place.rank == 0 and not again and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    limit = timedelta(seconds=timeout_s)
    store = TCPStore(place.address, place.port, place.world_size, is_master=hosts, timeout=limit)
    return PrefixStore(f"{use}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


class Job:
    """All processes of a torchrun job; rank 0's is the executor of a campaign. Every rank makes one, with equal arguments.

    ``leave(error)`` is called on rank 0 when another rank fails while this one is inside a collective that no exception can
    end: it tells the user and ends the process.
    """

    def __init__(self, place: Place, subject: Subject, replicas: Sequence[int], leave: Leave) -> None:
        self.place, self.subject, self.replicas = place, subject, sorted(set(replicas))
        self._leave = leave
        self._telling = threading.Lock()
        self._tasks = 0
        self._worker: Worker | None = None
        self.where = subject.source
        if self.replicas[-1] > place.world_size:
            raise InputError(
                "--replicas",
                f"{self.replicas[-1]} is more than the job's {place.world_size} processes",
                f"start {self.replicas[-1]} with torchrun, or measure fewer",
            )

    def __enter__(self) -> Job:
        try:
            self._store = job_store(self.place, "profile", START_LIMIT_S)
            # A connection serves one waiting thread.
            self._watched = job_store(self.place, "profile", START_LIMIT_S, again=True)
        except RuntimeError as error:
            raise DdlToolError(f"the job's processes do not find each other ({one_line(str(error))[:200]})") from error
        self._store.set(f"node/{self.place.rank}", str(self.place.node))
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Tell the others that all is done, or why not."""
        reason: dict[str, Any] = {}
        if isinstance(error, InputError):
            reason = {"where": error.where, "problem": error.problem, "remedy": error.remedy, "code": error.exit_code}
        elif kind is not None:
            told = (str(error), error.exit_code) if isinstance(error, DdlToolError) else ("interrupted", 130)
            reason = dict(zip(("problem", "code"), told, strict=True))
        self._telling.acquire(timeout=START_LIMIT_S)  # never while the watcher ends this process
        with contextlib.suppress(RuntimeError):
            self._post({"rank": self.place.rank, **reason})
        self._watcher.join(_GRACE_S)
        if reason and self.place.rank > 0:
            time.sleep(3 * _GRACE_S)  # torchrun ends all when one rank ends, and rank 0 must have told why

    def nodes_of(self, replicas: int) -> int:
        """Return on how many nodes the first ``replicas`` ranks run."""
        return len({self._store.get(f"node/{rank}") for rank in range(replicas)})

    def run(self, task: Task) -> Outcome:
        """Lead a task: returns its times on rank 0. Raises the reason when any rank fails."""
        self._store.set(f"task/{self._tasks}", json.dumps(asdict(task)))
        self._tasks += 1
        self.where = str(task)
        return self._part(task)

    def prepare(self) -> None:
        """Import torch and connect the replicas; every rank must call this."""
        from torch._C._distributed_c10d import PrefixStore

        place = self.place
        try:
            if self.subject.device == "cuda":
                import torch

                if (found := torch.cuda.device_count()) <= place.local_rank:
                    problem = f"cuda has {found} devices for {place.local_world_size} processes of a node"
                    raise InputError("--device", problem, "start fewer processes, or use --device cpu")
            self._worker = replica(
                self.subject,
                self.replicas,
                place.rank,
                place.world_size,
                local_rank=place.local_rank,
                store=PrefixStore("group", self._store),
            )
        except Exception as error:
            raise self._reason(error) from error

    def follow(self) -> None:
        """Run the parts of rank 0's tasks that are this rank's, until there are no more."""
        while True:
            name = f"task/{self._tasks}"
            self._store.wait([name], _PATIENCE)
            self._tasks += 1
            order = json.loads(self._store.get(name))
            if order is None:
                return
            task = Task(**order)
            self.where = str(task)
            if self.place.rank < task.replicas:
                self._part(task)

    def finish(self) -> None:
        """Send the followers home."""
        self._store.set(f"task/{self._tasks}", "null")

    def _part(self, task: Task) -> Outcome:
        assert self._worker is not None
        try:
            return self._worker.run(task)
        except Exception as error:
            raise self._reason(error) from error

    def _reason(self, error: Exception) -> DdlToolError:
        """Return why this rank cannot go on: what another rank posted, else its own error."""

        def posted() -> DdlToolError | None:
            with contextlib.suppress(RuntimeError):
                if self._store.check(["end"]):
                    return _as_error(json.loads(self._store.get("end")))
            return None

        if told := soon(_GRACE_S if isinstance(error, RuntimeError) else 0.0, posted):
            return told
        if isinstance(error, RuntimeError) and _is_lost(error):
            return DdlToolError(f"{self.where}: a process of the job ended")
        return in_one_line(error, self.subject.source)

    def _post(self, reason: dict[str, Any]) -> None:
        self._store.compare_set("end", "", json.dumps(reason))  # the first reason is the reason

    def _watch(self) -> None:
        """Wait for the end; when another rank's failure is the end, end this process too."""
        try:
            self._watched.wait(["end"], _PATIENCE)
            reason = json.loads(self._watched.get("end"))
        except RuntimeError:
            return  # the store has gone, and the job with it
        if "code" not in reason or reason["rank"] == self.place.rank:
            return
        # The main thread usually fails as well, and speaks then; a collective may keep it for ever.
        time.sleep(2 * _GRACE_S if self.place.rank == 0 else 3 * _GRACE_S)
        if not self._telling.acquire(blocking=False):
            return
        try:
            if self.place.rank == 0:
                self._leave(_as_error(reason))
        finally:  # whatever became of the line: its stream may be closed
            os._exit(int(reason["code"]))


def _as_error(reason: dict[str, Any]) -> DdlToolError:
    """Return a posted reason as an exception, naming the rank."""
    if reason.get("remedy"):
        return InputError(f"rank {reason['rank']}: {reason['where']}", reason["problem"], reason["remedy"])
    return DdlToolError(f"rank {reason['rank']}: {reason.get('problem', 'ended')}")


def _is_lost(error: RuntimeError) -> bool:
    """Return whether a collective failed because a peer is gone."""
    text = str(error).lower()
    return any(word in text for word in ("connection", "peer", "socket", "timed out", "unhandled system error"))
