"""Sweeps: workloads x policies x seeds in this process, in local ones or on a Ray cluster, resumable (:func:`sweep`).

A cell is one replay: a workload, a policy, a seed. Its figures depend on nothing else, so that they are the same bit for bit
wherever they are computed; its CPU time is recorded besides. The output is rewritten after every cell, by one sweep at a time,
and a sweep continues from the output of an earlier one.

:func:`compare` tells which of two policies is better, and how sure that is. Every workload is replayed under both, so that its
difficulty cancels. Logarithms of ratios are averaged: a policy that halves and one that doubles a figure are then equally far
from equality, and long workloads do not outweigh short ones. The interval is Student's t on the mean log ratio, because a
bootstrap's is too narrow with a handful of workloads. Seeds of one workload are no independent evidence of what happens on
others: they are averaged first, so that n is the number of workloads. With one workload, n is the number of its seeds, and the
answer holds for that workload alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import lru_cache
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from filelock import FileLock, Timeout
from scipy.special import stdtrit

from ddltool import interrupts
from ddltool.analyzers.cluster.cluster import ClusterSpec
from ddltool.analyzers.cluster.inputs import FittedModel, read_cluster, read_truth, read_workload
from ddltool.analyzers.cluster.policies import policies as policies_of
from ddltool.analyzers.cluster.replay import Setup, replays
from ddltool.analyzers.cluster.truth import Application
from ddltool.arrays import Floats
from ddltool.artifacts import check_writable, is_stream, load, read_text, save, write_text
from ddltool.errors import InputError, MissingExtra, known, one_line
from ddltool.simulation_results import (
    ComparedMeasure,
    JobSpec,
    PolicyComparison,
    SweepCell,
    SweepDocument,
    SweepFigures,
)

ENGINES = ("local", "ray")
FIGURES = tuple(SweepFigures.model_fields)
COLUMNS = ("workload", "policy", "seed", *FIGURES, "cpu_s", "error")
"""Columns of the CSV, which has one row per cell; the cost is empty without prices."""
_MOST_CELLS = 1_000_000
# Settings with one value per file or application. An earlier run may have had others, which are kept; the same file with
# another content is refused.
_BY_NAME = ("workloads", "traces", "assumptions")
_LOCK_PATIENCE_S = 0.5


Key = tuple[str, str, int]
"""A cell: the workload's name, the policy, the seed."""


class SweepTask(NamedTuple):
    """A cell, the file of its workload, and the setup that all cells share."""

    key: Key
    workload: Path
    setup: Setup

    def record(
        self, *, figures: SweepFigures | None = None, cpu_s: float | None = None, error: str | None = None
    ) -> SweepCell:
        """Return the cell's record: the figures and CPU seconds of its replay, or the ``error`` (made one line)."""
        workload, policy, seed = self.key
        error = one_line(error) if error is not None else None
        return SweepCell(workload=workload, policy=policy, seed=seed, figures=figures, cpu_s=cpu_s, error=error)


def cells(workloads: Sequence[str], policies: Sequence[str], seeds: Sequence[int]) -> list[Key]:
    """Return workloads x policies x seeds, in this order. Raises InputError for repeated or missing values."""
    for name, values in (("workloads", workloads), ("policies", policies), ("seeds", seeds)):
        if not values:
            raise InputError(name, "are empty", "give at least one")
        repeated = [value for value, times in Counter(values).items() if times > 1]
        if repeated:
            raise InputError(name, f"name {repeated[0]!r} twice", "give each once")
    count = len(workloads) * len(policies) * len(seeds)
    if count > _MOST_CELLS:
        raise InputError("seeds", f"make {count:,} replays", f"at most {_MOST_CELLS:,} in one sweep")
    return [(workload, policy, seed) for workload in workloads for policy in policies for seed in seeds]


def sweep(
    workloads: Sequence[Path],
    setup: Setup,
    policies: Sequence[str],
    seeds: Sequence[int],
    *,
    jobs: int = 1,
    engine: str = "local",
    output: Path | None = None,
    table: Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
    advance: Callable[[int, str], None] = lambda done, remark: None,
) -> SweepDocument:
    """Replay every cell, and return the document of these in order, followed by an earlier run's other cells.

    Args:
        workloads: their files.
        setup: the files and options of all replays.
        policies, seeds: names and seeds, each replayed on each workload.
        jobs: number of local processes with the engine "local"; 1: this process.
        engine: "local", or "ray": as many processes as the Ray cluster has cores.
        output: file that is rewritten after every cell. If it exists, its cells are not replayed, except failed ones.
        table: file for the same as CSV.
        tell: called with remarks and failures.
        advance: called with the number of cells done and the name of the last one.

    Raises InputError, before anything runs, for input that cannot be read, for an ``output`` with other settings, and for one
    that another sweep is writing. A cell that fails does not raise; it gets an error in its record.
    """
    engine = known("--engine", engine, ENGINES)
    if jobs < 1:
        raise InputError("--jobs", f"is {jobs}", "at least 1")
    names = _names(workloads)
    keys = cells(list(names), policies, seeds)
    settings = _settings(names, setup, tell)
    for target in (output, table):
        if target is not None:
            check_writable(target)
    with sole_writer(output):  # from reading the earlier cells to the last write
        records = _earlier_cells(output, settings)
        tasks = [SweepTask(key, names[key[0]].resolve(), setup.resolved()) for key in keys if key not in records]
        present = len(keys) - len(tasks)
        if present:
            tell(f"{output}: {present} of {len(keys)} replays are there already")
        advance(present, "")
        for ended, record in enumerate(_run(tasks, jobs, engine), start=1):
            records[record.key] = record
            if record.error:
                tell(f"failed: {record}: {record.error}")
            advance(present + ended, str(record))
            if output is not None and not is_stream(output):
                save(_document(settings, records, keys), output)
        document = _document(settings, records, keys)
        if output is not None:
            save(document, output)
    if table is not None:
        rows = [{**record, **(record["figures"] or {})} for record in document.model_dump()["cells"]]
        write_text(table, pd.DataFrame(rows, columns=COLUMNS, dtype=object).to_csv(index=False, lineterminator="\n"))
    return document


def _names(workloads: Sequence[Path]) -> dict[str, Path]:
    """Return name -> file of each workload; the name is the file's, or its path where two files have the same name."""
    repeated = [path for path, times in Counter(workloads).items() if times > 1]
    if repeated:
        raise InputError(str(repeated[0]), "is given twice", "give each workload once")
    stems = Counter(path.stem for path in workloads)
    return {path.stem if stems[path.stem] == 1 else str(path): path for path in workloads}


def _document(settings: dict[str, Any], records: Mapping[Key, SweepCell], keys: Sequence[Key]) -> SweepDocument:
    """Return the sweep's document: the cells of ``keys`` that are done, in that order, then those of earlier runs."""
    key_set = set(keys)
    cells = [records[key] for key in keys if key in records]
    return SweepDocument(
        settings=settings,
        cells_wanted=len(keys),
        cells_failed=sum(record.error is not None for record in records.values()),
        cells=[*cells, *(record for key, record in records.items() if key not in key_set)],
    )


# One cell, wherever it is replayed.


def run_cell(task: SweepTask) -> SweepCell:
    """Return the record of one cell: its figures and CPU seconds, or the error that ended its replay."""
    begin = time.process_time()
    try:
        figures = _replayed(*task)
    except Exception as error:  # whatever one cell raises must not end the others
        return task.record(error=str(error) or type(error).__name__)
    return task.record(figures=figures, cpu_s=time.process_time() - begin)


def _replayed(key: Key, workload: Path, setup: Setup) -> SweepFigures:
    """Return the figures of one cell's replay, with a cost where there are prices.

    The cell's seed is added to that of the failures, so that failures differ between seeds and are the same for all policies.
    """
    _, policy, seed = key
    jobs, machines, applications = _inputs(workload, setup.cluster, tuple(setup.traces), tuple(setup.models))
    options = setup.options
    if options.failures is not None:
        options = replace(options, failures=replace(options.failures, seed=options.failures.seed + seed))
    mixed = len(machines.type_names) > 1
    makers = policies_of(policy, setup.power, options.restart_delay_s, seed, mixed=mixed)
    ((_, summary),) = replays(jobs, applications, machines, makers, options, prices=setup.prices)
    fields = {name: getattr(summary, name) for name in FIGURES if hasattr(summary, name) and name != "cost"}
    fields["jobs"] = len(summary.jobs)
    fields["gpu_seconds"] = sum(job.gpu_seconds for job in summary.jobs)
    fields["worst_fairness"] = summary.finish_time_fairness.max
    fields["fair_share"] = summary.finish_time_fairness.share_below_1
    if summary.cost is not None:
        fields["cost"] = summary.cost.jobs
    return SweepFigures.model_validate(fields)


@lru_cache(maxsize=4)
def _inputs(
    workload: Path, cluster: Path, traces: tuple[Path, ...], models: tuple[FittedModel, ...]
) -> tuple[list[JobSpec], ClusterSpec, dict[str, Application]]:
    """Return the workload, the cluster and the applications; cached, so that they are read once for a workload's cells."""
    jobs = read_workload(workload)
    named = {job.application for job in jobs}
    used_models = [model for model in models if model.application in named]  # the others are of other workloads
    return jobs, read_cluster(cluster), read_truth(jobs, traces, used_models).applications


# Where cells are replayed.


def _run(tasks: Sequence[SweepTask], jobs: int, engine: str) -> Iterator[SweepCell]:
    """Yield the record of each task when it ends, from ``jobs`` processes on ``engine``.

    No process is left running when the caller closes the iterator early. Where a process dies (memory ran out), the running
    tasks are replayed again one at a time: a task whose process dies again gets an error, the others get their figures.
    """
    if engine == "ray" and tasks:
        yield from _run_on_ray(tasks)
    elif min(jobs, len(tasks)) <= 1:
        yield from map(run_cell, tasks)
    else:
        waiting = deque(tasks)
        while waiting:
            suspects = yield from _run_in_processes(waiting, min(jobs, len(waiting)))
            for task in suspects:
                if (yield from _run_in_processes(deque([task]), 1)):
                    yield task.record(error="its process was killed, twice; the machine may be short of memory")


def _run_in_processes(waiting: deque[SweepTask], count: int) -> Generator[SweepCell, None, list[SweepTask]]:
    """Yield the records of the tasks in ``waiting``, which it empties, as they end in ``count`` processes.

    Returns the tasks that were running when a process died, for the caller to replay; [] if none died.
    """
    context = get_context("spawn")  # a fork would copy the threads' locks of this process, held or not
    worker_end, sweep_end = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_end_with, initargs=(worker_end,))
    running: dict[Future[SweepCell], SweepTask] = {}
    try:
        while waiting or running:
            while waiting and len(running) < count:
                with interrupts.held():  # a process started here must not get Ctrl-C: the sweep handles it
                    running[pool.submit(run_cell, waiting[0])] = waiting[0]
                waiting.popleft()
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                record = future.result()
                del running[future]
                yield record
    except BrokenProcessPool:
        return list(running.values())
    finally:
        # This ends the workers, even in the middle of a replay, so that shutdown does not wait for them.
        sweep_end.close()
        pool.shutdown(cancel_futures=True)
        worker_end.close()
    return []


def _end_with(line: Connection) -> None:
    """Start a thread that ends this worker process, even in the middle of a replay, when the sweep ends or dies.

    ``line``: a pipe whose other end the sweep holds; the system closes it when the sweep's process dies.
    """

    def watch() -> None:
        """Wait until the other end of the pipe is closed, then end the process."""
        with suppress(OSError):
            line.poll(None)
        os._exit(0)  # not sys.exit, which would only end this thread

    threading.Thread(target=watch, daemon=True).start()


def _run_on_ray(tasks: Sequence[SweepTask]) -> Iterator[SweepCell]:
    """Yield records from a Ray cluster: the one that ``RAY_ADDRESS`` names, else one that is started on this machine.

    All its nodes must have the input files under the same paths, and ddltool installed. Each cell takes one core. A cell whose
    process dies gets an error, and is not tried again. Raises MissingExtra without ray, InputError where it cannot be reached.
    """
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "error")  # without it, Ray warns for minutes before it gives up
    try:
        ray = import_module("ray")
    except ImportError:
        raise MissingExtra("--engine ray", "ray", "ray") from None
    starts_ray = not ray.is_initialized()
    if starts_ray:
        try:
            ray.init(log_to_driver=False, include_dashboard=False, logging_level="error")
        except Exception as error:  # Ray raises a bare Exception where its processes do not start in time
            problem = f"cannot be reached ({one_line(str(error))[:120]})"
            remedy = "check RAY_ADDRESS; unset it to start Ray on this machine"
            raise InputError("--engine ray", problem, remedy) from None
    # no retries by Ray, because what kills a process would kill the next one too
    remote = ray.remote(num_cpus=1, max_retries=0)(run_cell)
    running: dict[Any, SweepTask] = {}
    try:
        running = {remote.remote(task): task for task in tasks}
        while running:
            for reference in ray.wait(list(running), num_returns=1)[0]:
                task = running.pop(reference)
                try:
                    record = ray.get(reference)
                except ray.exceptions.RayError as error:
                    record = task.record(error=f"{type(error).__name__}: {str(error).splitlines()[0]}")
                yield record
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
        if starts_ray:
            ray.shutdown()


# The settings that figures depend on, and the file of an earlier run.


def _settings(names: Mapping[str, Path], setup: Setup, tell: Callable[[str], None]) -> dict[str, Any]:
    """Return the settings that figures depend on, with hashes for the content of files.

    A sweep continues an earlier run only if the settings are equal. Calls ``tell`` with the assumptions of fitted models.
    Raises InputError for files that cannot be read.
    """
    jobs = [job for path in names.values() for job in read_workload(path)]
    read_cluster(setup.cluster)
    assumed = read_truth(jobs, setup.traces, setup.models).assumed
    fitted = {model.application: f"{model.given}:".encode() + model.file.read_bytes() for model in setup.models}
    for text in assumed:
        tell(text)
    applications = sorted({job.application for job in jobs})

    def hashed(content: bytes) -> str:
        """Return the SHA-256 of a file's content, in hexadecimal digits."""
        return hashlib.sha256(content).hexdigest()

    # traces and fitted models are by application, so that a later run may add others
    return {
        "workloads": {name: hashed(path.read_bytes()) for name, path in names.items()},
        "cluster": hashed(read_text(setup.cluster).encode()),
        "traces": {name: hashed(fitted.get(name) or _traces(setup.traces, name)) for name in applications},
        "options": asdict(setup.options),
        "power": setup.power,
        **({"prices_per_gpu_hour": dict(setup.prices)} if setup.prices is not None else {}),
        **({"assumptions": dict(zip(fitted, assumed, strict=True))} if fitted else {}),
    }


def _traces(folders: Sequence[Path], application: str) -> bytes:
    """Return the concatenated trace files of one application, each after its name and size, for a hash of them all."""
    files = [path for folder in folders for path in sorted((folder / application).glob("*.csv"))]
    return b"".join(f"{path.name}:{path.stat().st_size}:".encode() + path.read_bytes() for path in files)


def _earlier_cells(output: Path | None, settings: dict[str, Any]) -> dict[Key, SweepCell]:
    """Return the successful cells of an earlier run in ``output``, and add to ``settings`` the files that only it had.

    {} without such a file. Raises InputError where its settings differ from these.
    """
    if output is None or not output.is_file() or output.stat().st_size == 0:
        return {}
    earlier = load(output, SweepDocument)
    remedy = "give a new file name, or remove it"
    # converted to JSON and back, as the file's settings were, so that both have the same types
    new = json.loads(json.dumps(settings))
    for name in {**new, **earlier.settings}:
        new_value, earlier_value = new.get(name), earlier.settings.get(name)
        if name not in _BY_NAME:
            if earlier_value != new_value:
                raise InputError(f"{output}:settings.{name}", "is not that of this sweep", remedy)
            continue
        if name == "assumptions":  # a setting that is absent without fitted models
            new_value, earlier_value = new_value or {}, earlier_value or {}
        if not (isinstance(earlier_value, dict) and all(isinstance(item, str) for item in earlier_value.values())):
            raise InputError(f"{output}:settings.{name}", "is missing", remedy)
        changed = [key for key in new_value if earlier_value.get(key, new_value[key]) != new_value[key]]
        if changed:
            raise InputError(f"{output}:settings.{name}.{changed[0]}", "has changed since", remedy)
        settings[name] = {**earlier_value, **new_value}
    # Failed ones are left out, to be tried again.
    return {record.key: record for record in earlier.cells if record.figures is not None}


@contextmanager
def sole_writer(output: Path | None) -> Iterator[None]:
    """Hold the lock of ``output``, a file beside it that is removed afterwards.

    None, ``-``, pipes and devices need no lock. The lock ends with the process, however that ends. Raises InputError when
    another sweep holds it, and where the lock file cannot be written.
    """
    if output is None or is_stream(output):
        yield
        return
    side = output.resolve().with_name(f".{output.resolve().name}.lock")
    lock = FileLock(side)
    try:
        lock.acquire(timeout=_LOCK_PATIENCE_S)  # with patience, because its last holder may just be removing it
    except Timeout:
        remedy = "wait until it ends, or give another file"
        raise InputError("-o", f"another sweep is writing {output}", remedy) from None
    except OSError as error:
        side.unlink(missing_ok=True)
        problem = f"cannot be locked ({error.strerror}: {side})"
        raise InputError(str(output), problem, "give a file in a writable folder") from None
    try:
        yield
    finally:
        side.unlink(missing_ok=True)  # while it is held, so that the lock file of a later holder is never removed
        lock.release()


MEASURES = ("avg_jct_s", "p99_jct_s", "worst_fairness", "makespan_s", "gpu_seconds", "cost")
"""Figures that are compared, all of which should be low; the cost only where every replay has one above 0."""
_CONFIDENCE = 0.95  # of the intervals of their ratios


def compare(cells: Sequence[SweepCell], first: str, second: str) -> PolicyComparison:
    """Return the ratios of the first policy's figures to the second's, on the workloads and seeds that both have replayed.

    Raises InputError without a common workload and seed, for a policy compared with itself, and for figures that are not
    above 0.
    """
    if first == second:
        raise InputError("--compare", f"names {first!r} twice", "name two policies, such as ours,pollux")
    figures_by_policy = {
        name: {(cell.workload, cell.seed): cell.figures for cell in cells if cell.policy == name and cell.figures}
        for name in (first, second)
    }
    # The same workload and seed under both policies.
    pairs = [
        (key, first_figures, figures_by_policy[second][key])
        for key, first_figures in figures_by_policy[first].items()
        if key in figures_by_policy[second]
    ]
    if not pairs:
        raise InputError("--compare", f"{first} and {second} have no workload and seed in common", "replay both on one")
    several = len({workload for (workload, _), *_ in pairs}) > 1
    priced = all((figures.cost or 0) > 0 for _, *pair in pairs for figures in pair)
    comparisons = []
    for measure in MEASURES if priced else MEASURES[:-1]:
        ratios_by_unit: dict[object, list[float]] = {}
        for (workload, seed), first_figures, second_figures in pairs:
            # The seeds of a workload are one unit of evidence, unless there is only one workload.
            ratio = _log(first_figures, measure, workload, seed) - _log(second_figures, measure, workload, seed)
            ratios_by_unit.setdefault(workload if several else seed, []).append(ratio)
        comparisons.append(
            _interval(measure, np.array([np.mean(unit_ratios) for unit_ratios in ratios_by_unit.values()]))
        )
    unit: Literal["workload", "seed"] = "workload" if several else "seed"
    return PolicyComparison(first=first, second=second, unit=unit, confidence=_CONFIDENCE, comparisons=comparisons)


def _log(figures: SweepFigures, measure: str, workload: str, seed: int) -> float:
    """Return the logarithm of a measure. Raises InputError, naming the cell, unless it is above 0."""
    value = getattr(figures, measure)
    if not value > 0:
        raise InputError(f"workload {workload} seed {seed}:{measure}", f"is {value}", "a number above 0")
    return math.log(value)


def _interval(measure: str, log_ratios: Floats) -> ComparedMeasure:
    """Return the mean ratio of one measure and its interval, from log ratios (n,), one per workload or seed.

    The interval is Student's t; there is none for a single ratio, or where all are equal.
    """
    count = len(log_ratios)
    mean_log = float(log_ratios.mean())
    low: float | None = None
    high: float | None = None
    # Ratios that agree to the last digits are one replay repeated (no draw depended on the seed), not more evidence.
    if count > 1 and float(np.ptp(log_ratios)) > 1e-12:
        half_width = float(stdtrit(count - 1, 0.5 + _CONFIDENCE / 2)) * float(log_ratios.std(ddof=1)) / math.sqrt(count)
        # clipped to the range of floats
        low = math.exp(max(mean_log - half_width, -700.0))
        high = math.exp(min(mean_log + half_width, 700.0))
    return ComparedMeasure(
        measure=measure,
        ratio=math.exp(mean_log),
        low=low,
        high=high,
        better=int((log_ratios < 0).sum()),
        units=count,
        decided=low is not None and high is not None and not low <= 1 <= high,
    )
