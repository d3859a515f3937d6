"""Makes batches for all logical workers of a process, by data workers that they share. Start at :class:`SampleFeed`.

EasyScale (Li et al., SC 2023), section 3.2, "Optimizing data pre-processing": only one logical worker trains at a time
on a process, in its *turn* of a step, so a few data workers (processes that load samples) serve all of them, in the
order of the turns. A logical worker's number is its virtual rank. The paper queues the random states of mini-batches
that are made and not yet used. Here every mini-batch has a random state of its own, which follows from the seed, the
virtual rank, and the position in the epoch. So nothing is queued or kept in a checkpoint, and the number of data
workers does not matter.
"""

from __future__ import annotations

import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from ddltool.errors import InputError
from ddltool.runtime.measuring.children import poll_until
from ddltool.runtime.processes.random_streams import seed_streams

DYING_S = 2.0  # a broken connection shows at most this long before its process has an exit code
PREFETCHED = 2  # batches that each data worker makes ahead


@dataclass(frozen=True, slots=True)
class BatchTask:
    """One micro-batch to be made: its logical worker, its position in the run, and the dataset indices of its samples."""

    virtual_rank: int
    """The number of the logical worker."""
    epoch: int
    step: int
    """Number of the step in the epoch, from 0."""
    micro_batch: int
    """Number of the micro-batch among the worker's in this step, from 0."""
    indices: tuple[int, ...]


class _Batches(Dataset[Any]):
    """A dataset whose items are batches, indexed by :class:`BatchTask`; used in this process or in data workers."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any], seed: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed

    def __getitem__(self, task: BatchTask) -> Any:
        """Return the batch of ``task``, after seeding the global random generators by the task's worker and position."""
        seed_streams(self._seed, task.virtual_rank, task.epoch, task.step, task.micro_batch)
        return self._collate([self._dataset[index] for index in task.indices])


class SampleFeed:
    """Makes the batches of a sequence of tasks in order; ``workers`` processes make them ahead.

    With 0 workers this process makes them, and the caller saves and restores its global random generators. ``dataset``
    (map-style) sees the global generators of Python, NumPy and torch seeded anew for every batch; ``collate`` makes a
    batch of a list of samples. Raises InputError for a negative number of workers.
    """

    def __init__(
        self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any], *, seed: int = 0, workers: int = 0
    ) -> None:
        """Make the loader of the data workers, if there are any; they start when the first batch is requested."""
        if workers < 0:
            raise InputError("data_workers", f"is {workers}", "give 0 or more")
        self.workers = workers
        self._batches = _Batches(dataset, collate, seed)
        self._tasks: list[BatchTask] = []
        self._loader: DataLoader[Any] | None = None
        if workers:
            with warnings.catch_warnings():  # torch warns of more workers than cores; the user has chosen the number
                warnings.simplefilter("ignore")
                self._loader = DataLoader(
                    self._batches,
                    sampler=self._tasks,
                    batch_size=None,
                    num_workers=workers,
                    prefetch_factor=PREFETCHED,
                    persistent_workers=True,
                    generator=torch.Generator(),  # otherwise it would draw from the active logical worker's stream
                )
            # Not left to garbage collection, which may close the loader's queues before it can tell its workers to end.
            weakref.finalize(self, _end, self._loader)

    def batches(self, tasks: Sequence[BatchTask]) -> Iterator[Any]:
        """Yield the batch of every task, in order.

        Without data workers this process makes each batch when it is requested, on one thread as a data worker does,
        because the number of threads may change the bits. Raises InputError naming a data worker that has ended.
        """
        if self._loader is None:
            for task in tasks:
                threads = torch.get_num_threads()
                torch.set_num_threads(1)
                try:
                    batch = self._batches[task]
                finally:
                    torch.set_num_threads(threads)
                yield batch
            return
        self._tasks[:] = tasks  # in place: this list is the loader's sampler
        with warnings.catch_warnings(), _signal_kept():
            warnings.simplefilter("ignore")
            source = iter(self._loader)
        for _ in tasks:
            with self.watched():
                batch = next(source)
            yield batch

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Turn an error in the block that an ended data worker has caused into an InputError that names the worker.

        It may come anywhere in the block, because another loader's signal handler may raise it. The other data workers
        are ended too.
        """
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:
            # Broken connections raise OSError and EOFError; torch's own RuntimeError names the worker.
            may_be_worker = not isinstance(error, RuntimeError) or "DataLoader worker" in str(error)
            number, process = self._ended_worker() if may_be_worker else (0, None)
            if process is None:
                raise
            pid = process.pid
            code = process.exitcode
            self.close()
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            remedy = "start again from the last checkpoint; a killed one often lacked memory: use fewer data_workers"
            raise InputError(f"data worker {number}", f"(process {pid}) {how}", remedy) from None

    def _ended_worker(self) -> tuple[int, Any]:
        """Return (number, process) of a data worker that has ended; (0, None) if all run.

        Waits up to :data:`DYING_S`, because a connection breaks a little before its process has an exit code.
        """
        iterator = getattr(self._loader, "_iterator", None)
        processes = getattr(iterator, "_workers", [])  # torch has no public list of a loader's processes

        def find_ended() -> tuple[int, Any] | None:
            """Return (number, process) of the first worker with an exit code, if any has one."""
            ended = ((number, process) for number, process in enumerate(processes) if process.exitcode is not None)
            return next(ended, None)

        return poll_until(DYING_S if processes else 0.0, find_ended) or (0, None)

    def close(self) -> None:
        """End the data workers; the next :meth:`batches` starts new ones."""
        if self._loader is not None:
            _end(self._loader)


def _end(loader: DataLoader[Any]) -> None:
    """End a loader's data workers, if any run."""
    iterator = loader._iterator
    loader._iterator = None
    if iterator is not None:
        iterator._shutdown_workers()  # type: ignore[attr-defined]


@contextmanager
def _signal_kept() -> Iterator[None]:
    """Restore the handler of SIGCHLD after the block, in which torch installs its own.

    torch finds dead workers without it, because it also polls. Outside of the main thread no handler can be set, so the
    block just runs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before if before is not None else signal.SIG_DFL)
        signal_handling._SIGCHLD_handler_set = False  # so that another loader may install torch's handler again
