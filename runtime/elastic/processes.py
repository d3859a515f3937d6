"""The processes of an elastic job, and which logical workers (ESTs) each of them runs. Start at :class:`Processes`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddltool.errors import InputError
from ddltool.runtime.measuring.rendezvous import START_LIMIT_S, job_from_environment, job_store
from ddltool.runtime.processes.job import DistributedJob


def start_processes(backend: str = "gloo") -> None:
    """Join the process group of a torchrun job, also after a restart; outside of torchrun, or once joined, do nothing.

    Blocks until all processes have joined. ``torch.distributed.init_process_group`` alone reads the processes'
    addresses from torchrun's store, where after a restart it can find those of processes that are gone; here each
    attempt has keys of its own.
    """
    place = job_from_environment()
    if place is not None and not dist.is_initialized():
        store = job_store("elastic", START_LIMIT_S)
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world_size)


def divide(max_workers: int, world_size: int, counts: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the virtual ranks (numbers of logical workers) that each process runs, by rank, each in ascending order.

    The workers of one process train one after the other: each has a *turn* in every step. Virtual ranks are numbered in
    the order in which turns end if all processes need the same time for all of their turns together. So a sum in
    virtual-rank order can grow while processes still compute.

    Args:
        max_workers: number of logical workers.
        world_size: number of processes.
        counts: logical workers of each process, (world_size,); None: as evenly as possible.

    Raises InputError when there are more processes than logical workers, or ``counts`` does not fit.

    >>> divide(4, 2), divide(4, 2, (1, 3))
    (((0, 2), (1, 3)), ((2,), (0, 1, 3)))
    """
    if world_size > max_workers:
        problem = f"is {max_workers}, but the job runs {world_size} processes"
        raise InputError("max_workers", problem, f"start at most {max_workers} processes: each runs one logical worker")
    if counts is None:
        even, surplus = divmod(max_workers, world_size)
        counts = [even + (rank < surplus) for rank in range(world_size)]
    if len(counts) != world_size or min(counts) < 1 or sum(counts) != max_workers:
        remedy = f"give {world_size} counts (one per process, each at least 1) that add up to {max_workers}"
        raise InputError("placement", f"is {list(counts)}", remedy)
    # (share of the step's time after which a turn ends, rank); exact fractions, so that equal ends compare equal
    ends_of_turns = [(Fraction(turn + 1, count), rank) for rank, count in enumerate(counts) for turn in range(count)]
    virtual_ranks: list[list[int]] = [[] for _ in range(world_size)]
    for virtual_rank, (_, rank) in enumerate(sorted(ends_of_turns)):
        virtual_ranks[rank].append(virtual_rank)
    return tuple(map(tuple, virtual_ranks))


@dataclass(frozen=True, kw_only=True, slots=True)
class Processes:
    """The processes of a job, and the logical workers that each of them runs (``runs[rank]``, ascending).

    ``job.side`` is a gloo group for host data; partial sums go over it with ``tag``, which only this trainer uses.
    """

    job: DistributedJob
    runs: tuple[tuple[int, ...], ...]
    tag: int

    @classmethod
    def this(cls, max_workers: int, counts: Sequence[int] | None = None) -> Processes:
        """Return the running job's processes, with ``max_workers`` logical workers divided among them by :func:`divide`.

        All processes call this together. Raises InputError, on every process, when the workers cannot be divided so.
        """
        job = DistributedJob.this()
        runs = job.together(lambda: divide(max_workers, job.world_size, counts))
        return cls(job=job, runs=runs, tag=job.new_tag())

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
    def owners(self) -> list[int]:
        """For each virtual rank, the rank of the process that runs it, shape (max_workers,)."""
        rank_of = {virtual_rank: rank for rank, run in enumerate(self.runs) for virtual_rank in run}
        return [rank_of[virtual_rank] for virtual_rank in range(self.max_workers)]

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Return all logical workers' rows in virtual-rank order, on every process.

        ``rows`` has shape (workers here, n) and lives on the host; the result has shape (max_workers, n).
        """
        if self.job.side is None:
            return rows
        padded = rows.new_zeros((max(map(len, self.runs)), rows.shape[1]))  # all_gather needs equal shapes
        padded[: len(rows)] = rows
        gathered = [torch.empty_like(padded) for _ in self.runs]
        dist.all_gather(gathered, padded, group=self.job.side)
        rows_by_process = torch.cat([part[: len(run)] for part, run in zip(gathered, self.runs, strict=True)])
        virtual_ranks_by_process = torch.tensor([virtual_rank for run in self.runs for virtual_rank in run])
        return rows_by_process[virtual_ranks_by_process.argsort()]


def broadcast(tensors: list[Tensor], source: int) -> None:
    """Overwrite ``tensors`` in place, on every process, with the values of the process of rank ``source``.

    All processes call this together; without a process group of several, nothing happens.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        with torch.no_grad():
            for value in tensors:
                dist.broadcast(value.data, src=source)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return ``batch`` with its tensors on ``device``, also those nested in lists, tuples and mappings.

    Tuples become lists, and mappings dicts; other values stay themselves.
    """
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [to_device(value, device) for value in batch]
    return batch


def count_collectives() -> int:
    """Return how many collectives the default process group has run; 0 without one.

    Those within a turn are the script's, because ddltool's messages of a turn use another group.
    """
    group: Any = dist.group.WORLD if dist.is_initialized() else None
    return 0 if group is None else int(group._get_sequence_number_for_group())
