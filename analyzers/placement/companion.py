"""EasyScale's companion module (section 3.4): the best plan for every vector of available devices, all at once.

Built with one bisection for all vectors together (:class:`step_table.StepTable`); the next vector's plan needs at most one
device more, so many vectors share a plan and few different plans are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.placement.problem import Problem
from ddltool.analyzers.placement.step_table import StepTable, check_capability, exact, step_table
from ddltool.companion import CompanionDevice, CompanionMeta, CompanionPlan
from ddltool.errors import InputError, did_you_mean

Ints = NDArray[np.int64]
# A database of more vectors is filled as they are asked for: one plan takes microseconds to make.
LARGEST_BUILD = 2_000_000
_CHUNK = 200_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """The plans of a database."""

    plans: list[CompanionPlan]
    """The different ones."""
    plan_of: Ints
    """(V,) the place in ``plans`` of each vector, by key."""

    def vectors(self) -> Iterator[tuple[int, int]]:
        """Yield (key, place of the plan)."""
        yield from enumerate(self.plan_of.tolist())


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


def build(meta: CompanionMeta) -> Built:
    """Return the best plan for every vector of 0 to N_i devices of each type; nothing for more than ``LARGEST_BUILD``."""
    sizes = [device.count + 1 for device in meta.devices]
    total = math.prod(sizes)
    if total > LARGEST_BUILD:
        return Built(plans=[], plan_of=np.zeros(0, dtype=np.int64))
    table = table_for(meta)
    known: dict[int, int] = {}
    plans: list[CompanionPlan] = []
    places = np.empty(total, dtype=np.int64)
    for start in range(0, total, _CHUNK):
        keys = np.arange(start, min(total, start + _CHUNK))
        vectors = np.stack(np.unravel_index(keys, sizes), axis=1).astype(np.int64)
        steps, used = best_of(table, vectors, homogeneous=meta.homogeneous)
        codes = steps * total + np.ravel_multi_index(tuple(used.T), sizes)
        different, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
        numbers = np.empty(len(different), dtype=np.int64)
        for number, (code, row) in enumerate(zip(different.tolist(), first.tolist(), strict=True)):
            if code not in known:
                known[code] = len(plans)
                plans.append(describe(meta, table, int(steps[row]), used[row].tolist()))
            numbers[number] = known[code]
        places[start : start + len(keys)] = numbers[inverse]
    return Built(plans=plans, plan_of=places)


def plan_for(meta: CompanionMeta, counts: Sequence[int]) -> CompanionPlan:
    """Return the best plan for one vector, made now."""
    table = table_for(meta)
    steps, used = best_of(table, np.array([counts], dtype=np.int64), homogeneous=meta.homogeneous)
    return describe(meta, table, int(steps[0]), used[0].tolist())


def best_of(table: StepTable, vectors: Ints, *, homogeneous: bool) -> tuple[Ints, Ints]:
    """Return (V,) places of the smallest step times for (V, T) devices, and (V, T) how many of them are used.

    Roomiest types are used first, so as few devices as possible; none where there is no step time.
    """
    if homogeneous:
        alone = [np.where(np.arange(vectors.shape[1]) == place, vectors, 0) for place in range(vectors.shape[1])]
        steps_of = np.stack([table.smallest(part) for part in alone])
        chosen = steps_of.argmin(axis=0)
        vectors = np.where(np.arange(vectors.shape[1]) == chosen[:, None], vectors, 0)
    steps = table.smallest(vectors)
    rooms = np.vstack([table.rooms, np.zeros((1, vectors.shape[1]), dtype=np.int64)])[steps]
    order = np.argsort(-rooms, axis=1, kind="stable")
    left = np.full(len(vectors), table.max_workers, dtype=np.int64)
    used, lines = np.zeros_like(vectors), np.arange(len(vectors))
    for rank in range(vectors.shape[1]):
        kind = order[:, rank]
        room = rooms[lines, kind]
        taken = np.where(room > 0, np.minimum(vectors[lines, kind], -(-left // np.maximum(room, 1))), 0)
        used[lines, kind] = taken
        left = np.maximum(left - taken * room, 0)
    return steps, used


def describe(meta: CompanionMeta, table: StepTable, place: int, used: Sequence[int]) -> CompanionPlan:
    """Return the plan of a step time on the used devices: full devices first, the last one takes what is left."""
    if place == len(table.seconds):
        return CompanionPlan(throughput=0.0, step_s=0.0, ests={})
    rooms, left = table.rooms[place].tolist(), meta.max_workers
    ests: dict[str, list[tuple[int, int]]] = {}
    for kind in sorted(range(len(used)), key=lambda kind: (-rooms[kind], kind)):
        if not used[kind]:
            continue
        full = min(used[kind], left // rooms[kind])
        rows = [(full, rooms[kind])] if full else []
        left -= full * rooms[kind]
        if full < used[kind]:
            rows.append((1, left))
            left = 0
        ests[meta.devices[kind].type] = rows
    ordered = {device.type: ests[device.type] for device in meta.devices if device.type in ests}
    return CompanionPlan(throughput=float(table.throughputs[place]), step_s=float(table.seconds[place]), ests=ordered)


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


def measured_capability(rows: Sequence[tuple[str, int, float]], batch_size: int) -> dict[str, float]:
    """Return mini-batches per second by device type from (device type, samples, seconds of computing) of steps.

    The median over the steps of each type; rows without samples or time say nothing.
    """
    rates: dict[str, list[float]] = {}
    for name, samples, seconds in rows:
        if samples > 0 and seconds > 0:
            rates.setdefault(name, []).append(samples / batch_size / seconds)
    return {name: float(np.median(values)) for name, values in rates.items()}
