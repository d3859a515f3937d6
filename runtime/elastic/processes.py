"""The processes of an elastic job, and which logical workers (ESTs) each of them runs. Start at :class:`Processes`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import TCPStore  # type: ignore[attr-defined]

from ddltool.errors import InputError
from ddltool.runtime.hook.job import Job


def start_processes(backend: str = "gloo") -> None:
    """Join the process group of a torchrun job, also after a restart; do nothing when not under torchrun.

    ``torch.distributed.init_process_group`` reads addresses from torchrun's store, and after a restart it can read those
    of processes that are dead. Here each attempt writes and reads under a prefix of its own.
    """
    if dist.is_initialized() or "RANK" not in os.environ:
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    master = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and rank == 0
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, is_master=master)
    dist.init_process_group(backend, store=PrefixStore(f"try{attempt}", store), rank=rank, world_size=size)


def divide(
    max_workers: int, world_size: int, counts: Sequence[int] | None = None, *, dealt: bool = True
) -> tuple[tuple[int, ...], ...]:
    """Return the virtual ranks of each process, ascending; as even as possible unless ``counts`` says how many.

    ``dealt``: in the order in which the processes finish their turns when all take equally long over all of theirs, so
    that a sum in rank order can grow while they still compute; otherwise contiguous runs. Raises InputError when there
    are more processes than logical workers, or ``counts`` does not fit.

    >>> divide(4, 2), divide(4, 2, (1, 3)), divide(4, 3, dealt=False)
    (((0, 2), (1, 3)), ((2,), (0, 1, 3)), ((0, 1), (2,), (3,)))
    """
    if max_workers < 1:
        raise InputError("max_workers", f"is {max_workers}", "give at least 1")
    if world_size > max_workers:
        problem = f"is {max_workers}, but the job runs {world_size} processes"
        raise InputError("max_workers", problem, f"start at most {max_workers} processes: each runs one logical worker")
    if counts is None:
        even, surplus = divmod(max_workers, world_size)
        counts = [even + (rank < surplus) for rank in range(world_size)]
    if len(counts) != world_size or min(counts) < 1 or sum(counts) != max_workers:
        remedy = f"give {world_size} counts (one per process, each at least 1) that add up to {max_workers}"
        raise InputError("placement", f"is {list(counts)}", remedy)
    turns = [(Fraction(turn + 1, count), rank) for rank, count in enumerate(counts) for turn in range(count)]
    owners = [rank for _, rank in (sorted(turns) if dealt else sorted(turns, key=lambda turn: turn[1]))]
    return tuple(tuple(v for v, owner in enumerate(owners) if owner == rank) for rank in range(world_size))


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """This process among all, and the logical workers of each (``runs[rank]``, ascending).

    ``job.side`` is a gloo group for host data; ``chain`` another one, for sums on their way, used by one thread only.
    """

    job: Job
    runs: tuple[tuple[int, ...], ...]
    chain: dist.ProcessGroup | None = None

    @classmethod
    def this(cls, max_workers: int, counts: Sequence[int] | None = None, *, dealt: bool = True) -> Processes:
        """Return the running job's processes. Raises InputError, on every one, when they cannot hold the workers."""
        job = Job.this()
        runs = job.together(lambda: divide(max_workers, job.world_size, counts, dealt=dealt))
        return cls(job=job, runs=runs, chain=dist.new_group(backend="gloo") if job.world_size > 1 and dealt else None)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.job.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.job.world_size

    @property
    def local(self) -> tuple[int, ...]:
        """The virtual ranks that this process runs."""
        return self.runs[self.rank]

    @property
    def max_workers(self) -> int:
        """The number of logical workers on all processes."""
        return sum(map(len, self.runs))

    @property
    def owners(self) -> tuple[int, ...]:
        """The process of each virtual rank."""
        by_rank = {virtual: rank for rank, run in enumerate(self.runs) for virtual in run}
        return tuple(by_rank[virtual] for virtual in range(len(by_rank)))

    @property
    def first(self) -> int:
        """The process that runs virtual rank 0."""
        return self.owners[0]

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Return all logical workers' rows in virtual-rank order, on every process.

        ``rows`` has shape (workers here, n) and lives on the host; the result has shape (max_workers, n).
        """
        if self.job.side is None:
            return rows
        order = torch.tensor([virtual for run in self.runs for virtual in run]).argsort()
        widest = max(map(len, self.runs))
        mine = rows.new_zeros((widest, rows.shape[1]))
        mine[: len(rows)] = rows
        gathered = [torch.empty_like(mine) for _ in self.runs]
        dist.all_gather(gathered, mine, group=self.job.side)
        return torch.cat([part[: len(run)] for part, run in zip(gathered, self.runs, strict=True)])[order]

    def gather_bytes(self, document: bytes) -> list[bytes]:
        """Return every process's bytes in rank order on process 0, and an empty list elsewhere."""
        if self.job.side is None:
            return [document]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in self.runs]
        dist.all_gather(lengths, torch.tensor([len(document)]), group=self.job.side)
        longest = max(int(length) for length in lengths)
        mine = torch.zeros(longest, dtype=torch.uint8)
        if document:
            mine[: len(document)] = torch.frombuffer(bytearray(document), dtype=torch.uint8)
        gathered = [torch.empty_like(mine) for _ in self.runs] if self.rank == 0 else None
        dist.gather(mine, gathered, dst=0, group=self.job.side)
        return [_bytes(part[: int(n)]) for part, n in zip(gathered, lengths, strict=True)] if gathered else []

    def from_first(self, make: Callable[[], bytes]) -> bytes:
        """Return what ``make`` returns on virtual rank 0's process, on every process; the others do not call it."""
        if self.job.side is None:
            return make()
        document = make() if self.rank == self.first else b""
        length = torch.tensor([len(document)])
        dist.broadcast(length, src=self.first, group=self.job.side)
        content = torch.empty(int(length), dtype=torch.uint8)
        if document:
            content = torch.frombuffer(bytearray(document), dtype=torch.uint8)
        dist.broadcast(content, src=self.first, group=self.job.side)
        return _bytes(content)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
