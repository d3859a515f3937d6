"""EasyScale's companion module (section 3.4): a database of the best plan for every vector of available devices.

A vector holds the number of devices of each type. One bisection answers all vectors together (:class:`~.steps.StepTable`).
Neighbouring vectors often share a plan, so the database keeps each different plan once. Start at :func:`build`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from ddltool.analyzers.job.placement.problem import Problem, check_capability, exact
from ddltool.analyzers.job.placement.steps import StepTable, distribute_ests, integer_weights, step_table
from ddltool.arrays import Ints
from ddltool.companion import CompanionDevice, CompanionMeta, CompanionPlan
from ddltool.errors import InputError, did_you_mean

# A database of more vectors holds no plans: each is computed when it is asked for, which takes microseconds.
LARGEST_BUILD = 2_000_000
# Vectors that are computed at once, which bounds the memory in use.
_CHUNK = 200_000


def meta_of(problem: Problem) -> CompanionMeta:
    """Return the head of a problem's companion database: the job, and its device types with capabilities and limits.

    Counts are at most ``max_workers``, because each device runs at least one EST. Raises InputError for constraints that a
    database does not support: price, number of devices, throughput.
    """
    limits = {
        "max_devices": problem.max_devices,
        "max_price_per_hour": problem.max_price_micro,
        "min_throughput": problem.min_throughput,
    }
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
    """Return the table of all step times that plans of this database can have."""
    return step_table(
        tuple(exact(device.capability_per_s) for device in meta.devices),
        meta.max_workers,
        tuple(device.max_ests for device in meta.devices),
    )


def build(meta: CompanionMeta) -> tuple[list[CompanionPlan], Ints]:
    """Return the different best plans for all vectors of devices, and (V,) the index of each vector's plan among them.

    A vector has 0 to ``count`` devices of each type; its place among the V is its flat index in C order. Both results are empty
    for more than ``LARGEST_BUILD`` vectors.
    """
    sizes = [device.count + 1 for device in meta.devices]
    vector_count = math.prod(sizes)
    if vector_count > LARGEST_BUILD:
        return [], np.zeros(0, dtype=np.int64)
    table = table_for(meta)
    plan_index_of_code: dict[int, int] = {}
    plans: list[CompanionPlan] = []
    plan_indices = np.empty(vector_count, dtype=np.int64)
    for start in range(0, vector_count, _CHUNK):
        flat_indices = np.arange(start, min(vector_count, start + _CHUNK))
        vectors = np.stack(np.unravel_index(flat_indices, sizes), axis=1).astype(np.int64)
        step_indices, used_counts = table.best_steps(vectors, homogeneous=meta.homogeneous)
        # One whole number for each different plan: its step time and the devices in use, as digits in mixed base.
        codes = step_indices * vector_count + np.ravel_multi_index(tuple(used_counts.T), sizes)
        unique_codes, first_rows, inverse = np.unique(codes, return_index=True, return_inverse=True)
        unique_plan_indices = np.empty(len(unique_codes), dtype=np.int64)
        for code_index, (code, row) in enumerate(zip(unique_codes.tolist(), first_rows.tolist(), strict=True)):
            if code not in plan_index_of_code:
                plan_index_of_code[code] = len(plans)
                plans.append(_plan_at(meta, table, int(step_indices[row]), used_counts[row].tolist()))
            unique_plan_indices[code_index] = plan_index_of_code[code]
        plan_indices[start : start + len(flat_indices)] = unique_plan_indices[inverse]
    return plans, plan_indices


def plan_for(meta: CompanionMeta, counts: Sequence[int]) -> CompanionPlan:
    """Return the best plan for one vector of device ``counts`` (T,), computed without the database."""
    table = table_for(meta)
    step_indices, used_counts = table.best_steps(np.array([counts], dtype=np.int64), homogeneous=meta.homogeneous)
    return _plan_at(meta, table, int(step_indices[0]), used_counts[0].tolist())


def _plan_at(meta: CompanionMeta, table: StepTable, step_index: int, used: Sequence[int]) -> CompanionPlan:
    """Return the plan with the step time in row ``step_index`` of ``table``, on ``used`` (T,) devices of each type.

    ``meta``: the database's head, with the job and its device types. The index after the table's last row means that no step
    time is possible: the plan has no ESTs and a throughput of 0.
    """
    if step_index == len(table.seconds):
        return CompanionPlan(throughput=0.0, step_s=0.0, ests={})
    type_rows = distribute_ests(
        table.capacities[step_index].tolist(), used, meta.max_workers, integer_weights(table.capabilities)
    )
    ests = {device.type: rows for device, rows in zip(meta.devices, type_rows, strict=True) if rows}
    return CompanionPlan(
        throughput=float(table.throughputs[step_index]), step_s=float(table.seconds[step_index]), ests=ests
    )


def differing_capabilities(meta: CompanionMeta, measured: Mapping[str, float], threshold: float) -> dict[str, float]:
    """Return those ``measured`` capabilities, by type, that differ from the database's by more than the share ``threshold``.

    Raises InputError for unknown types and capabilities that are not positive.
    """
    stored = {device.type: device.capability_per_s for device in meta.devices}
    differing: dict[str, float] = {}
    for name, value in measured.items():
        if name not in stored:
            raise InputError(f"measured.{name}", "is not in the database", did_you_mean(name, stored))
        check_capability(f"measured.{name}", value)
        if abs(value / stored[name] - 1.0) > threshold:
            differing[name] = value
    return differing


def measured_capability(rows: pd.DataFrame, batch_size: int) -> dict[str, float]:
    """Return device type -> measured mini-batches per second, from checked rows of telemetry.

    It is the median over all steps with samples; a mini-batch has ``batch_size`` samples.
    """
    steps = rows[(rows["batch"] > 0) & (rows["compute_s"] > 0)]
    rates = (steps["batch"] / batch_size / steps["compute_s"]).groupby(steps["device"]).median()
    return {str(name): float(rate) for name, rate in rates.items()}
