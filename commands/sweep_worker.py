"""Replays single cells of a sweep: in this process, or as a process of its own that reads tasks from its stdin.

A task and its answer are one line of JSON each. Nothing is pickled, and a worker whose parent is gone reads the end of
its stdin and ends at once, in the middle of a replay too: no killed sweep leaves a process.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddltool.analyzers.scheduling.cluster import ClusterSpec
    from ddltool.analyzers.scheduling.job import JobSpec
    from ddltool.analyzers.scheduling.simulator import Options
    from ddltool.analyzers.scheduling.truth import Application


def run_cell(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of one cell; a problem is a record too.

    ``task``: ``workload`` (its name), ``policy``, ``seed``, ``workload_path``, ``cluster_path``, ``traces`` (folders),
    ``models`` (fitted: application, file, fields), ``prices`` (by type, or None), ``power`` and ``options`` (of
    :class:`ddltool.analyzers.scheduling.simulator.Options`).
    """
    from ddltool.analyzers.scheduling.sweep import Cell, done, failed, figures

    cell = Cell(workload=task["workload"], policy=task["policy"], seed=task["seed"])
    begin = time.process_time()
    try:
        values = figures(*replay_cell(task))
    except KeyboardInterrupt:
        raise
    except Exception as error:  # a cell may fail in any way, and the others are to go on
        return failed(cell, f"{type(error).__name__}: {error}" if not str(error) else str(error))
    return done(cell, values, time.process_time() - begin)


def replay_cell(task: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the simulation's result and its summary."""
    from ddltool.commands.simulate_policies import policies
    from ddltool.commands.simulate_replay import replays

    models = tuple(tuple(model) for model in task["models"])
    jobs, machines, applications = _inputs(task["workload_path"], task["cluster_path"], tuple(task["traces"]), models)
    options = _options(task["options"], task["seed"])
    mixed = len(machines.type_names) > 1
    makers = policies(task["policy"], task["power"], options.restart_delay_s, task["seed"], mixed=mixed)
    # The sweep shows how far it is; a worker's own bar would write over that.
    (done,) = replays(jobs, applications, machines, makers, options, prices=task["prices"], show_progress=False)
    return done.result, done.summary


def _options(values: Mapping[str, Any], seed: int) -> Options:
    """Return the options from their mapping. Each seed draws failures of its own, the same for every policy."""
    from dataclasses import replace

    from ddltool.analyzers.scheduling.failures import Failures, NodeEvent
    from ddltool.analyzers.scheduling.simulator import Options

    lost = values.get("failures")
    if lost is None:
        return Options(**values)
    failures = Failures(**{**lost, "events": tuple(NodeEvent(**event) for event in lost["events"])})
    return Options(**{**values, "failures": replace(failures, seed=failures.seed + seed)})


@lru_cache(maxsize=4)
def _inputs(
    workload: str, cluster: str, traces: tuple[str, ...], models: tuple[tuple[str, str, str], ...]
) -> tuple[list[JobSpec], ClusterSpec, dict[str, Application]]:
    """Return the workload, the cluster and the applications, read once for the cells of a workload."""
    from ddltool.commands.simulate_inputs import read_truth
    from ddltool.commands.workload_inputs import FittedText
    from ddltool.commands.workloads import read_cluster, read_workload

    jobs = read_workload(Path(workload))
    truth = read_truth(jobs, [Path(name) for name in traces], [FittedText(*model) for model in models])
    return jobs, read_cluster(Path(cluster)), truth.applications


def main() -> None:
    """Answer the tasks on stdin until it ends."""
    tasks: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            tasks.put(line)
        os._exit(0)  # the parent is gone, or wants no more: nothing here needs to be put in order

    # Whatever a library prints must not come between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    threading.Thread(target=read, daemon=True).start()
    while True:
        record = run_cell(json.loads(tasks.get()))
        answers.write(json.dumps(record, allow_nan=False) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
