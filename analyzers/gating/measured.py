"""Measured step times: the rows of profiles and of telemetry as metrics with repeats."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ddltool.analyzers.gating.metric import Metric, Unit, figure
from ddltool.analyzers.gating.noise import FEWEST_REPEATS, Cell, cell_of, geometric_mean
from ddltool.errors import InputError

# Neighbouring steps are alike, so steps are no repeats of each other; the medians of long stretches nearly are.
BLOCKS, FEWEST_STEPS_PER_BLOCK = 10, 5


def step_times(document: Mapping[str, Any], where: str) -> Iterator[Metric]:
    """Yield ``step_time_s`` of each configuration and of all together (geometric mean), and what has no repeats.

    ``rows`` of the document are a profile's rows. A configuration that occurs in several rows has them as repeats.
    """
    rows = document["rows"]
    if not rows:
        raise InputError(where, "has no rows", "give at least one measured row")
    by_key: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_key[configuration(row)].append(row)
    cells = [pool(key, [_row_cell(key, row) for row in found]) for key, found in by_key.items()]
    yield from family("step_time_s", cells)
    yield Metric(name="configurations", value=float(len(cells)))
    for key, found in by_key.items():
        yield from figure(f"sync_time_s/{key}", _middle(found, "sync_time_s"), "s", measured=True)
        yield from figure(f"peak_memory_bytes/{key}", _middle(found, "peak_memory_bytes"), "bytes", measured=True)


def configuration(row: Mapping[str, Any]) -> str:
    """Return the name of a row's configuration: ``DEVICE/NODESxREPLICAS/bLOCAL_BATCH``, ``/sPASSES`` where accumulated."""
    device = "_".join(str(row["device"]).replace("/", "_").split())
    name = f"{device}/{int(row['num_nodes'])}x{int(row['num_replicas'])}/b{int(row['local_batch_size'])}"
    steps = row.get("accumulation_steps")
    # NaN where the column is empty.
    return f"{name}/s{int(steps)}" if steps is not None and steps == steps and steps > 0 else name


def _row_cell(key: str, row: Mapping[str, Any]) -> Cell:
    repeats, spread = _number(row.get("repeats")), _number(row.get("step_time_spread_s"))
    known = repeats is not None and spread is not None
    return Cell(
        key=key,
        median=float(row["step_time_s"]),
        spread=spread or 0.0,
        repeats=int(repeats or 1) if known else 1,
    )


def _number(value: Any) -> float | None:
    return None if value is None or math.isnan(value) else float(value)


def _middle(rows: Sequence[Mapping[str, Any]], column: str) -> float | None:
    found = [number for row in rows if (number := _number(row.get(column))) is not None]
    return cell_of("", found).median if found else None


def pool(key: str, cells: Sequence[Cell]) -> Cell:
    """Return one cell for several measurements of one thing (rows or files).

    Three or more: their medians are the repeats, because runs differ by more than the repeats within a run do. Two: the repeats
    together, with the distance of the two as the spread where that is larger.
    """
    if len(cells) == 1:
        return replace(cells[0], key=key)
    together = replace(cell_of(key, [cell.median for cell in cells]), runs=sum(cell.runs for cell in cells))
    if len(cells) >= FEWEST_REPEATS:
        return together
    distance = abs(cells[0].median - cells[1].median)
    spread = max(distance, *(cell.spread for cell in cells))
    return replace(together, spread=spread, repeats=sum(cell.repeats for cell in cells))


def family(name: str, cells: Sequence[Cell], unit: Unit = "s") -> Iterator[Metric]:
    """Yield the geometric mean of all cells as ``NAME``, then each as ``NAME/KEY``."""
    ordered = tuple(sorted(cells, key=lambda cell: cell.key))
    yield Metric(name=name, value=geometric_mean(ordered), unit=unit, measured=True, cells=ordered)
    for cell in ordered:
        yield Metric(name=f"{name}/{cell.key}", value=cell.median, unit=unit, measured=True, cells=(cell,))


def telemetry_times(document: Mapping[str, Any], where: str) -> Iterator[Metric]:
    """Yield ``step_s``, ``compute_s``, ``wait_s`` and ``sync_s`` of each rank, and of all ranks together.

    Repeats are the medians of consecutive stretches of steps: ten of at least five steps
    each; with fewer steps there are fewer.
    """
    rows = document["rows"]
    if not rows:
        raise InputError(where, "has no rows", "give the steps of at least one rank")
    by_rank: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        by_rank[int(row["rank"])].append(row)
    yield Metric(name="ranks", value=float(len(by_rank)))
    yield Metric(name="steps", value=float(min(len(steps) for steps in by_rank.values())))
    for column in ("step_s", "compute_s", "wait_s", "sync_s"):
        cells = [
            _stretches(f"rank{rank}", [float(row[column]) for row in sorted(steps, key=lambda row: int(row["step"]))])
            for rank, steps in by_rank.items()
        ]
        yield from family(column, cells)


def _stretches(key: str, seconds: Sequence[float]) -> Cell:
    count = min(BLOCKS, len(seconds) // FEWEST_STEPS_PER_BLOCK)
    if count < FEWEST_REPEATS:
        return replace(cell_of(key, seconds), repeats=1)
    edges = [round(part * len(seconds) / count) for part in range(count + 1)]
    medians = [cell_of(key, seconds[low:high]).median for low, high in pairwise(edges)]
    return replace(cell_of(key, medians), key=key)


def merge(sides: Iterable[Sequence[Metric]]) -> list[Metric]:
    """Return the metrics of several artifacts of one kind as one: each file is a measurement of the same thing.

    A measured figure gets the files as repeats (see :func:`pool`). A counted or predicted one must be the same in all files;
    else it is treated as measured, for something makes it vary.
    """
    by_name: dict[str, list[Metric]] = defaultdict(list)
    order: list[str] = []
    for metrics in sides:
        for metric in metrics:
            if metric.name not in by_name:
                order.append(metric.name)
            by_name[metric.name].append(metric)
    return [_merged(by_name[name]) for name in order]


def _merged(found: Sequence[Metric]) -> Metric:
    first = found[0]
    if len(found) == 1 or (not first.measured and len({metric.value for metric in found}) == 1):
        return first
    if isinstance(first.value, str):
        return replace(first, value=", ".join(sorted({str(metric.value) for metric in found})))
    by_key: dict[str, list[Cell]] = defaultdict(list)
    for metric in found:
        for cell in metric.cells or (Cell(key="", median=float(metric.value), spread=0.0, repeats=1),):
            by_key[cell.key].append(cell)
    cells = tuple(pool(key, by_key[key]) for key in sorted(by_key))
    value = geometric_mean(cells) if len(cells) > 1 else cells[0].median
    return replace(first, value=value, measured=True, cells=cells)
