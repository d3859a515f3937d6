"""What a sweep consists of: its cells, what each must give, and which are still to do. Pure; the runners are commands'.

A cell is one replay: a workload, a policy, a seed. Its figures are numbers that depend on nothing else, so that they are
the same bit for bit wherever they were computed; how long it took is kept beside them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddltool.analyzers.scheduling.metrics import Summary
from ddltool.analyzers.scheduling.paired import Replay
from ddltool.analyzers.scheduling.simulator import SimulationResult
from ddltool.errors import InputError, one_line

FIGURES = (
    "jobs",
    "avg_jct_s",
    "median_jct_s",
    "p99_jct_s",
    "makespan_s",
    "avg_queueing_s",
    "utilization",
    "worst_fairness",
    "fair_share",
    "restarts",
    "gpu_seconds",
)
COLUMNS = ("workload", "policy", "seed", *FIGURES, "cost", "cpu_s", "error")
"""Of the CSV: one row per cell; ``cost`` is a figure where prices are given, else empty."""
_MOST_CELLS = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Cell:
    """One replay of the sweep."""

    workload: str
    policy: str
    seed: int

    def __str__(self) -> str:
        """Return the cell as people name it."""
        return f"{self.workload} under {self.policy}, seed {self.seed}"


def cells(workloads: Sequence[str], policies: Sequence[str], seeds: Sequence[int]) -> list[Cell]:
    """Return workloads x policies x seeds, in this order. Raises InputError for repeated or missing values."""
    for name, values in (("workloads", workloads), ("policies", policies), ("seeds", seeds)):
        if not values:
            raise InputError(name, "are empty", "give at least one")
        if len(set(values)) < len(values):
            twice = next(value for value in values if list(values).count(value) > 1)
            raise InputError(name, f"name {twice!r} twice", "give each once")
    count = len(workloads) * len(policies) * len(seeds)
    if count > _MOST_CELLS:
        raise InputError("seeds", f"make {count:,} replays", f"at most {_MOST_CELLS:,} in one sweep")
    return [Cell(workload=w, policy=p, seed=s) for w in workloads for p in policies for s in seeds]


def figures(result: SimulationResult, summary: Summary) -> dict[str, float]:
    """Return the figures of one replay, with the keys of :data:`FIGURES` and a cost where there are prices.

    They hold no measured time.
    """
    return {
        "jobs": len(result.jobs),
        "avg_jct_s": summary.avg_jct_s,
        "median_jct_s": summary.median_jct_s,
        "p99_jct_s": summary.p99_jct_s,
        "makespan_s": summary.makespan_s,
        "avg_queueing_s": summary.avg_queueing_s,
        "utilization": summary.utilization,
        "worst_fairness": summary.worst_fairness,
        "fair_share": summary.share_below_1,
        "restarts": summary.restarts,
        "gpu_seconds": sum(job.gpu_seconds for job in result.jobs),
        **({"cost": summary.cost} if summary.cost is not None else {}),
    }


def done(cell: Cell, values: Mapping[str, float], cpu_s: float) -> dict[str, Any]:
    """Return the record of a cell that was replayed."""
    return {**_key(cell), "figures": dict(values), "cpu_s": cpu_s, "error": None}


def failed(cell: Cell, problem: str) -> dict[str, Any]:
    """Return the record of a cell that was not: one line says why."""
    return {**_key(cell), "figures": None, "cpu_s": None, "error": one_line(problem)}


def _key(cell: Cell) -> dict[str, Any]:
    return {"workload": cell.workload, "policy": cell.policy, "seed": cell.seed}


def finished(records: Iterable[Mapping[str, Any]], where: str) -> dict[Cell, dict[str, Any]]:
    """Return the cells that an earlier run's ``records`` hold; failed ones are left out, to be tried again.

    Raises InputError, naming ``where``, for records that are no cells and for figures that are no finite numbers.
    """
    made: dict[Cell, dict[str, Any]] = {}
    for number, record in enumerate(records):
        at, remedy = f"{where}:cells[{number}]", "give the file that a sweep wrote, or a new name"
        try:
            cell = Cell(workload=record["workload"], policy=record["policy"], seed=record["seed"])
            values, cpu_s = record["figures"], record["cpu_s"]
            known = {name: values[name] for name in (*FIGURES, *values)} if values is not None else {}
            whole = [type(each) for each in (cell.workload, cell.policy, cell.seed)] == [str, str, int]
        except (KeyError, TypeError):
            whole = False
        if not whole:
            raise InputError(at, "is no cell of a sweep", remedy)
        if values is None:
            continue
        for name, value in {**known, "cpu_s": cpu_s}.items():
            if type(value) not in (int, float) or not math.isfinite(value):
                raise InputError(f"{at}:{name}", f"is {value} ({cell})", f"a finite number; {remedy}")
        made[cell] = done(cell, values, cpu_s)
    return made


def rows(records: Iterable[Mapping[str, Any]]) -> list[list[Any]]:
    """Return one row per record in the order of :data:`COLUMNS`; what a failed cell lacks is empty."""
    made = []
    for record in records:
        values = record["figures"] or {}
        row = {**record, **values}
        made.append(["" if row.get(name) is None else row[name] for name in COLUMNS])
    return made


def replays(records: Iterable[Mapping[str, Any]]) -> list[Replay]:
    """Return what :func:`ddltool.analyzers.scheduling.paired.compare` takes: the cells that were replayed."""
    return [
        Replay(
            workload=record["workload"], seed=record["seed"], policy=record["policy"], figures=dict(record["figures"])
        )
        for record in records
        if record["figures"] is not None
    ]
