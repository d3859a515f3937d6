"""Records speed, CPU and memory of training processes per iteration, which is the input of ``ddltool balance``.

In a training loop of one's own::

    watch = Watch("w0")
    for batch in loader:
        with watch.iteration(samples=len(batch)):
            ...forward and backward...
        ...gradients are exchanged and applied; waiting for others is not the worker's speed...
    write_rows(watch.rows, "trace.csv")

:func:`record` starts processes that train a model together and watches them.

CPU and memory are read before the iteration, because batch sizes are chosen then. CPU is the share of a core that the
process can expect (:func:`~.share.expected_cpu`), memory the share of the machine's memory that is available.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pandas as pd

from ddltool.artifacts import write_text
from ddltool.errors import DdlToolError, InputError
from ddltool.graph import natural_key
from ddltool.results import WatchedWorker, WatchResult
from ddltool.runtime.measuring.children import Children, LostProcess, meeting_place
from ddltool.runtime.measuring.share import available_memory, expected_cpu

# Seconds between two messages with a worker's rows; rows that were not sent yet are lost if the worker is killed.
TELL_EVERY_S = 0.5
DONE = "done"
"""A worker's last message."""
MOST_WORKERS = 256
MOST_ROWS = 10**7
WARM_ITERATIONS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedRow:
    """One iteration of one worker."""

    iteration: int
    worker: str
    speed: float
    """Samples per second, without waiting for other workers."""
    cpu: float
    """Share of a core that the worker could expect when the iteration began, above 0 and at most 1."""
    memory: float
    """Share of the machine's memory that was available then, 0 to 1."""


@dataclass(slots=True)
class Watch:
    """Observes the iterations of this process: ``rows`` has one for each, under the name ``worker``."""

    worker: str
    rows: list[SpeedRow] = field(default_factory=list)

    @contextmanager
    def iteration(self, samples: int) -> Iterator[None]:
        """Time the block, which computes ``samples`` samples, and append a row; a block that raises leaves none.

        The block must hold the worker's own computation only, no waiting for others; on a GPU synchronise the device at
        its end.
        """
        cpu = expected_cpu()
        memory = available_memory()
        begin = time.perf_counter()
        yield
        seconds = max(time.perf_counter() - begin, 1e-9)  # not 0, to divide by
        row = SpeedRow(iteration=len(self.rows), worker=self.worker, speed=samples / seconds, cpu=cpu, memory=memory)
        self.rows.append(row)


def write_rows(rows: Iterable[SpeedRow], path: str | Path) -> None:
    """Write rows as CSV (gzipped if the name ends in ``.gz``), by iteration, then worker; raises InputError if it cannot."""
    ordered = sorted(rows, key=lambda row: (row.iteration, row.worker))
    lines = [f"{row.iteration},{row.worker},{row.speed:.6g},{row.cpu:.4g},{row.memory:.4g}" for row in ordered]
    write_text(path, "\n".join(("iteration,worker,speed,cpu,memory", *lines)) + "\n")


def summarise(rows: Sequence[SpeedRow], batch: int) -> WatchResult:
    """Return each worker's speed (samples/s), and the mean seconds of an iteration with equal batches and batches by speed.

    A speed is the median over the iterations, with the 10 % and 90 % quantiles. The first :data:`WARM_ITERATIONS`
    iterations are left out if there are more than twice as many. ``rows``: those of all workers, at least one;
    ``batch``: samples per worker and iteration.
    """
    frame = pd.DataFrame([asdict(row) for row in rows])
    first_steady = WARM_ITERATIONS if frame["iteration"].max() >= 2 * WARM_ITERATIONS else 0
    steady = frame[frame["iteration"] >= first_steady]
    workers = [
        WatchedWorker(
            worker=str(name),
            speed=float(readings["speed"].median()),
            speed_low=float(readings["speed"].quantile(0.1)),
            speed_high=float(readings["speed"].quantile(0.9)),
            cpu=float(readings["cpu"].mean()),
            memory=float(readings["memory"].mean()),
        )
        for name, readings in sorted(steady.groupby("worker"), key=lambda entry: natural_key(str(entry[0])))
    ]
    speeds_by_iteration = steady.groupby("iteration")["speed"]  # of all workers
    return WatchResult(
        batch=batch,
        iterations=int(frame["iteration"].max()) + 1,
        left_out=first_steady,
        workers=workers,
        # With equal batches all wait for the slowest; with batches in proportion to speeds all end together.
        equal_split_s=float((batch / speeds_by_iteration.min()).mean()),
        speeds_known_s=float((batch * len(workers) / speeds_by_iteration.sum()).mean()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchRequest:
    """Which training to watch. ``resolver`` is ``package.module:function``, called as ``function(source, batch)``."""

    source: str
    resolver: str
    batch: int
    """Samples per worker and iteration."""
    workers: int = 2
    iterations: int = 1000
    cores: tuple[int, ...] | None = None
    """For each worker, the system's number of the core to which it is bound; None: they are not bound."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise InputError for too many workers or rows, for a number of cores other than ``workers``, or one not usable."""
        if self.workers > MOST_WORKERS:
            raise InputError("replicas", f"is {self.workers}", f"watch at most {MOST_WORKERS} local processes")
        if self.workers * self.iterations > MOST_ROWS:
            problem = f"would make {self.workers * self.iterations} rows"
            raise InputError("iterations", problem, f"record at most {MOST_ROWS}")
        if self.cores is None:
            return

        usable = sorted(os.sched_getaffinity(0))
        if len(self.cores) != self.workers:
            raise InputError("cores", f"names {len(self.cores)} cores", f"name one for each of {self.workers} workers")
        for core in self.cores:
            if core not in usable:
                raise InputError("cores", f"{core} is not here", f"usable: {', '.join(map(str, usable))}")


class WatchLost(DdlToolError):
    """A watched process has ended too early."""

    def __init__(self, message: str, rows: list[SpeedRow]) -> None:
        super().__init__(message)
        self.rows = rows
        """All workers' rows of the iterations that every worker has completed."""


def record(request: WatchRequest, progress: Callable[[int], None] = lambda done: None) -> list[SpeedRow]:
    """Train one model in several processes, and return the rows of all of them, worker by worker.

    They train in lockstep on the CPU, with gradients averaged over gloo; each computes on one thread. ``progress`` is
    called now and then with the number of iterations that all have sent. Raises InputError when a step fails, and
    WatchLost, with the complete iterations, when a process dies.
    """
    rows: list[list[SpeedRow]] = [[] for _ in range(request.workers)]

    def take_rows(rank: int, message: Any) -> bool:
        """Keep the rows that a worker has sent; return False for its last message, else True.

        The progress that is reported is the number of rows of the worker that has sent fewest.
        """
        if message == DONE:
            return False
        rows[rank].extend(message)
        progress(min(map(len, rows)))
        return True

    with Children(_worker, [(request, rank) for rank in range(request.workers)], request.source) as children:
        try:
            children.gather(range(request.workers), "watch", take_rows)
        except LostProcess as lost:
            complete = min(map(len, rows))
            complete_rows = [row for worker_rows in rows for row in worker_rows[:complete]]
            message = f"worker w{lost.rank} {lost.how} at iteration {len(rows[lost.rank])}"
            raise WatchLost(message, complete_rows) from None
    return [row for worker_rows in rows for row in worker_rows]


def _worker(request: WatchRequest, rank: int, results: Connection) -> None:
    """In a child process, train as worker ``rank`` and send the rows of its iterations to the parent, then DONE.

    Rows are sent only every :data:`TELL_EVERY_S` seconds, because the parent that reads them takes CPU time from the
    workers. Gradients are averaged as one vector, in lockstep with the other workers.
    """
    import torch
    import torch.distributed as dist

    from ddltool.analyzers.step.tracing.step import called

    if request.cores is not None:
        os.sched_setaffinity(0, {request.cores[rank]})
    torch.set_num_threads(1)
    torch.manual_seed(request.seed)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=meeting_place(), rank=rank, world_size=request.workers)
    step = resolve_name(request.resolver)(request.source, request.batch)
    parameters = [value for value in step.module.parameters() if value.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=1e-2)
    watch = Watch(f"w{rank}")
    sent_rows = 0
    sent_s = time.monotonic()
    # The first step allocates memory and fills caches, so it is not watched.
    step.loss(called(step.module, step.inputs, step.keywords)).backward()
    try:
        for _ in range(request.iterations):
            optimizer.zero_grad()
            dist.barrier()
            with watch.iteration(request.batch):
                step.loss(called(step.module, step.inputs, step.keywords)).backward()
            gradients = [value.grad for value in parameters if value.grad is not None]
            vector = torch.nn.utils.parameters_to_vector(gradients)
            dist.all_reduce(vector)
            torch.nn.utils.vector_to_parameters(vector / request.workers, gradients)
            optimizer.step()
            if time.monotonic() - sent_s > TELL_EVERY_S:
                results.send(watch.rows[sent_rows:])
                sent_rows = len(watch.rows)
                sent_s = time.monotonic()
    finally:
        results.send(watch.rows[sent_rows:])
    results.send(DONE)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
