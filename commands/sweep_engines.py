"""Where the cells of a sweep are computed: in this process, in local processes, or on a Ray cluster."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ddltool.commands.sweep_worker import run_cell

if TYPE_CHECKING:
    from ddltool.analyzers.scheduling.sweep import Cell

ENGINES = ("local", "ray")
Task = dict[str, Any]


def run_tasks(tasks: Sequence[Task], jobs: int, engine: str) -> Iterator[dict[str, Any]]:
    """Yield the record of each task as it ends; no process is left however the caller stops."""
    if not tasks:
        return
    if engine == "ray":
        yield from _run_on_ray(tasks)
    elif jobs == 1:
        for task in tasks:
            yield run_cell(task)
    else:
        yield from _run_in_processes(tasks, min(jobs, len(tasks)))


def cell_of(record: Mapping[str, Any]) -> Cell:
    """Return the cell that a task or a record is of."""
    from ddltool.analyzers.scheduling.sweep import Cell

    return Cell(workload=record["workload"], policy=record["policy"], seed=record["seed"])


@dataclass(slots=True)
class _Worker:
    """A process and the task it is at."""

    process: subprocess.Popen[str]
    task: Task

    def give(self, task: Task) -> None:
        """Send it a task; that it has died is seen where its answer is read."""
        assert self.process.stdin is not None
        self.task = task
        with suppress(OSError):
            self.process.stdin.write(json.dumps(task) + "\n")
            self.process.stdin.flush()


def _start(task: Task) -> _Worker:
    # In a session of its own, so that Ctrl-C reaches this process alone, which then ends its workers.
    process = subprocess.Popen(
        [sys.executable, "-m", "ddltool.commands.sweep_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )
    worker = _Worker(process=process, task=task)
    worker.give(task)
    return worker


def _run_in_processes(tasks: Sequence[Task], count: int) -> Iterator[dict[str, Any]]:
    """Yield records from ``count`` workers; one that dies loses its own task only and is replaced."""
    from ddltool.analyzers.scheduling.sweep import failed

    waiting = deque(tasks)
    with selectors.DefaultSelector() as selector:
        workers: list[_Worker] = []

        def add() -> None:
            worker = _start(waiting.popleft())
            workers.append(worker)
            assert worker.process.stdout is not None
            selector.register(worker.process.stdout, selectors.EVENT_READ, worker)

        try:
            while waiting and len(workers) < count:
                add()
            while workers:
                for key, _ in selector.select():
                    worker: _Worker = key.data
                    assert worker.process.stdout is not None
                    line = worker.process.stdout.readline()  # a worker writes its answer in one go
                    task = worker.task
                    if line.endswith("\n"):
                        record = json.loads(line)
                        if waiting:
                            worker.give(waiting.popleft())
                        else:
                            selector.unregister(worker.process.stdout)
                            workers.remove(worker)
                            _end(worker)
                    else:
                        selector.unregister(worker.process.stdout)
                        workers.remove(worker)
                        code = _end(worker)
                        why = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
                        record = failed(cell_of(task), f"its process {why}; the machine may be short of memory")
                        if waiting:
                            add()
                    yield record
        finally:
            for worker in workers:
                _end(worker)


def _end(worker: _Worker) -> int:
    """Close a worker's pipes, which ends it, and return its exit code; insist where that does not help."""
    process = worker.process
    for stream in (process.stdin, process.stdout):
        with suppress(OSError):
            if stream is not None:
                stream.close()
    try:
        return process.wait(timeout=2)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _run_on_ray(tasks: Sequence[Task]) -> Iterator[dict[str, Any]]:
    """Yield records from a Ray cluster: the one that ``RAY_ADDRESS`` names, or one on this machine.

    All its nodes must see the input files under the same paths and have ddltool installed. One core per cell.
    """
    from ddltool.analyzers.scheduling.sweep import failed
    from ddltool.errors import InputError, MissingExtra, one_line

    try:
        ray = import_module("ray")
    except ImportError:
        raise MissingExtra("--engine ray", "ray", "ray") from None
    own = not ray.is_initialized()
    if own:
        try:
            ray.init(log_to_driver=False, include_dashboard=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError) as error:
            problem = f"cannot be reached ({one_line(str(error))[:120]})"
            raise InputError(
                "--engine ray", problem, "check RAY_ADDRESS; unset it to start Ray on this machine"
            ) from None
    remote = ray.remote(num_cpus=1, max_retries=0)(run_cell)
    running: dict[Any, Task] = {}
    try:
        running = {remote.remote(task): task for task in tasks}
        while running:
            ready, _ = ray.wait(list(running), num_returns=1)
            for reference in ready:
                task = running.pop(reference)
                try:
                    record = ray.get(reference)
                except ray.exceptions.RayError as error:
                    record = failed(cell_of(task), f"{type(error).__name__}: {str(error).splitlines()[0]}")
                yield record
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
        if own:
            ray.shutdown()
