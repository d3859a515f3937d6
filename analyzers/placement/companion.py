"""EasyScale's companion module (section 3.4): the best plan for every vector of available devices, all at once.

Built with one bisection for all vectors together (:class:`~.steps.StepTable`); the next vector's plan needs at most one
device more, so many vectors share a plan and few different plans are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from ddltool.analyzers.placement.problem import Problem, check_capability, exact
from ddltool.analyzers.placement.steps import StepTable, deal, step_table, whole
from ddltool.arrays import Ints
from ddltool.companion import CompanionDevice, CompanionMeta, CompanionPlan
from ddltool.errors import InputError, did_you_mean

# A database of more vectors is filled as they are asked for: one plan takes microseconds to make.
LARGEST_BUILD = 2_000_000
_CHUNK = 200_000


def meta_of(problem: Problem) -> CompanionMeta:
    """Return what a database for this problem is about. More devices of a type than ESTs are never of use.

    Raises InputError for constraints that the database does not know: price, number of devices, throughput.
    """
    limits = {"max_devices": problem.max_devices, "max_price_per_hour": problem.max_price_micro}
    limits["min_throughput"] = None if problem.min_throughput is None else 1
    for name, limit in limits.items():
        if limit is not None:
            raise InputError(f"constraints.{name}", "is not kept in a companion database", "leave it out, or use plan")
    devices = [
        CompanionDevice(
            type=device.name,
            count=min(device.count, problem.max_workers),
            capability_per_s=float(device.capability_per_s),
            max_ests=device.most_ests,
        )
        for device in problem.devices
    ]
    return CompanionMeta(
        job=problem.job,
        max_workers=problem.max_workers,
        batch_size=problem.batch_size,
        homogeneous=problem.single_type,
        devices=devices,
    )


def table_for(meta: CompanionMeta) -> StepTable:
    """Return the step times that the database's plans can have."""
    return step_table(
        tuple(exact(device.capability_per_s) for device in meta.devices),
        meta.max_workers,
        tuple(device.max_ests for device in meta.devices),
    )


def build(meta: CompanionMeta) -> tuple[list[CompanionPlan], Ints]:
    """Return the different best plans for 0 to N_i devices of each type, and (V,) the place of each vector's, by key.

    Nothing for more than ``LARGEST_BUILD`` vectors.
    """
    sizes = [device.count + 1 for device in meta.devices]
    total = math.prod(sizes)
    if total > LARGEST_BUILD:
        return [], np.zeros(0, dtype=np.int64)
    table = table_for(meta)
    known: dict[int, int] = {}
    plans: list[CompanionPlan] = []
    places = np.empty(total, dtype=np.int64)
    for start in range(0, total, _CHUNK):
        keys = np.arange(start, min(total, start + _CHUNK))
        vectors = np.stack(np.unravel_index(keys, sizes), axis=1).astype(np.int64)
        steps, used = table.best_of(vectors, homogeneous=meta.homogeneous)
        codes = steps * total + np.ravel_multi_index(tuple(used.T), sizes)
        different, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
        numbers = np.empty(len(different), dtype=np.int64)
        for number, (code, row) in enumerate(zip(different.tolist(), first.tolist(), strict=True)):
            if code not in known:
                known[code] = len(plans)
                plans.append(describe(meta, table, int(steps[row]), used[row].tolist()))
            numbers[number] = known[code]
        places[start : start + len(keys)] = numbers[inverse]
    return plans, places


def plan_for(meta: CompanionMeta, counts: Sequence[int]) -> CompanionPlan:
    """Return the best plan for one vector, made now."""
    table = table_for(meta)
    steps, used = table.best_of(np.array([counts], dtype=np.int64), homogeneous=meta.homogeneous)
    return describe(meta, table, int(steps[0]), used[0].tolist())


def describe(meta: CompanionMeta, table: StepTable, place: int, used: Sequence[int]) -> CompanionPlan:
    """Return the plan of a step time on the used devices."""
    if place == len(table.seconds):
        return CompanionPlan(throughput=0.0, step_s=0.0, ests={})
    rows = deal(table.rooms[place].tolist(), used, meta.max_workers, whole(table.capabilities))
    ests = {device.type: dealt for device, dealt in zip(meta.devices, rows, strict=True) if dealt}
    return CompanionPlan(throughput=float(table.throughputs[place]), step_s=float(table.seconds[place]), ests=ests)


def disagreeing(meta: CompanionMeta, measured: Mapping[str, float], threshold: float) -> dict[str, float]:
    """Return the measured capabilities that differ from the database's by more than the share ``threshold``.

    Raises InputError for unknown types and capabilities that are not positive.
    """
    known = {device.type: device.capability_per_s for device in meta.devices}
    found: dict[str, float] = {}
    for name, value in measured.items():
        if name not in known:
            raise InputError(f"measured.{name}", "is not in the database", did_you_mean(name, known))
        check_capability(f"measured.{name}", value)
        if abs(value / known[name] - 1.0) > threshold:
            found[name] = value
    return found


def measured_capability(rows: pd.DataFrame, batch_size: int) -> dict[str, float]:
    """Return mini-batches per second by device type from checked rows of telemetry: the median over steps with samples."""
    steps = rows[(rows["batch"] > 0) & (rows["compute_s"] > 0)]
    rates = (steps["batch"] / batch_size / steps["compute_s"]).groupby(steps["device"]).median()
    return {str(name): float(rate) for name, rate in rates.items()}
