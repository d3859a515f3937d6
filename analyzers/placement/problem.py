"""From job.yaml to the placement problem."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ddltool.analyzers.placement.requirements import (
    PRICE_UNIT,
    DeviceType,
    Problem,
    conflict_error,
    minimal_conflict,
)
from ddltool.analyzers.placement.step_table import check_capability, exact
from ddltool.errors import Infeasible, InputError, did_you_mean
from ddltool.graph import natural_key
from ddltool.job import Constraints, DeviceOffer, Job

__all__ = ["DeviceType", "Problem", "check_affordable", "from_job"]

# A larger limit would leave the solver's 64-bit sums, and limits nothing.
_LARGEST_PRICE = 10**9


def from_job(job: Job, capabilities: Mapping[str, float]) -> Problem:
    """Return the problem of a job; ``capabilities`` (mini-batches per second of one EST alone) by device type.

    A type without enough memory for one EST is left out: ESTs on a device take turns, so memory does not grow with
    their number (EasyScale, section 3), unless the job gives ``memory_fixed_gib``. D1 keeps to one type, because kernels
    differ between types, and so does D2 for a model that is not ``hardware_agnostic``; D0 promises equal bits for the
    same placement only and D2 has hardware-agnostic kernels, so both may mix. Types with a count of 0 are ignored.
    Raises Infeasible when nothing is left to run on, InputError when a capability is missing or a constraint needs a
    figure that the job does not give.
    """
    limits = job.constraints
    offers = sorted((offer for offer in job.devices if offer.count > 0), key=lambda offer: natural_key(offer.type))
    if not offers:
        raise Infeasible("no devices are offered: every count is 0")
    _need(offers, "memory_gib", limits.memory_per_worker_gib, "memory_per_worker_gib")
    _need(offers, "price_per_hour", limits.max_price_per_hour, "max_price_per_hour")
    budget = limits.max_price_per_hour
    if budget is not None and budget > _LARGEST_PRICE:
        raise InputError(
            "constraints.max_price_per_hour", f"is {budget:g}", f"at most {_LARGEST_PRICE}, or leave it out"
        )
    for offer in offers:
        if offer.price_per_hour is not None and offer.price_per_hour > _LARGEST_PRICE:
            where, price = f"devices.{offer.type}.price_per_hour", offer.price_per_hour
            raise InputError(where, f"is {price:g}", f"at most {_LARGEST_PRICE}, or leave it out")
    every = [_device(offer, capabilities, limits) for offer in offers]
    single = _single_type_reason(limits)
    problem = Problem(
        job=job.name,
        max_workers=job.max_workers,
        batch_size=job.batch_size,
        devices=tuple(device for device in every if device.memory_ests != 0),
        left_out=tuple(device for device in every if device.memory_ests == 0),
        memory_text=_memory_text(limits, every),
        single_type=single is not None,
        single_type_reason=single or "",
        max_devices=limits.max_devices,
        max_price_micro=None if budget is None else math.floor(exact(budget) * PRICE_UNIT),
        min_throughput=None if limits.min_throughput is None else exact(limits.min_throughput),
    )
    check_affordable(problem)
    return problem


def check_affordable(problem: Problem) -> None:
    """Raise Infeasible when no device is left that has the memory for one EST and can be paid for."""
    if not _runs(problem):
        # How many ESTs fit on a device, and how fast they run, is for the strategy to see.
        basic = replace(problem, single_type=False, max_devices=None, min_throughput=None)
        raise conflict_error(problem, minimal_conflict(basic, _could_run))


def _runs(problem: Problem) -> bool:
    """Return whether at least one EST can run somewhere."""
    return any(problem.affordable(device) for device in problem.devices)


def _could_run(problem: Problem) -> bool:
    """Return the same for part of the requirements: where memory alone leaves too little room, the price is no cause."""
    limited = all(device.memory_ests is not None for device in problem.devices)
    if problem.max_price_micro is None and limited:
        return sum(device.count * (device.memory_ests or 0) for device in problem.devices) >= problem.max_workers
    return _runs(problem)


def _single_type_reason(limits: Constraints) -> str | None:
    """Return the constraint that keeps a plan to one device type."""
    if limits.homogeneous:
        return "homogeneous"
    if limits.determinism == "D2" and limits.hardware_agnostic is False:
        return "determinism D2 without hardware_agnostic"
    return "determinism D1" if limits.determinism == "D1" else None


def _device(offer: DeviceOffer, capabilities: Mapping[str, float], limits: Constraints) -> DeviceType:
    where = f"devices.{offer.type}.capability_per_s"
    if offer.type not in capabilities:
        raise InputError(where, "is missing", did_you_mean(offer.type, capabilities))
    check_capability(where, capabilities[offer.type])
    price = offer.price_per_hour
    return DeviceType(
        name=offer.type,
        count=offer.count,
        capability_per_s=exact(capabilities[offer.type]),
        memory_gib=offer.memory_gib,
        price_micro=None if price is None else math.ceil(exact(price) * PRICE_UNIT),
        max_ests=offer.max_ests,
        memory_ests=_memory_ests(offer, limits),
    )


def _memory_ests(offer: DeviceOffer, limits: Constraints) -> int | None:
    """Return how many ESTs fit into a device's memory; None: any number, since they take turns."""
    each = limits.memory_per_worker_gib
    if each is None or offer.memory_gib is None:
        return None
    if limits.memory_fixed_gib is None:
        return None if offer.memory_gib >= each else 0
    return max(0, math.floor((exact(offer.memory_gib) - exact(limits.memory_fixed_gib)) / exact(each)))


def _memory_text(limits: Constraints, devices: Sequence[DeviceType]) -> str:
    each, fixed = limits.memory_per_worker_gib, limits.memory_fixed_gib
    if each is None:
        return ""
    if fixed is None:
        sizes = ", ".join(f"{device.name} has {device.memory_gib:g}" for device in devices)
        return f"one worker needs {each:g} GiB; {sizes}"
    sizes = ", ".join(
        f"{device.name} has {device.memory_gib:g} (room for {device.memory_ests}; {device.count} offered)"
        for device in devices
    )
    return f"k workers on a device need {fixed:g} + k x {each:g} GiB; {sizes}"


def _need(offers: Sequence[DeviceOffer], field: str, limit: float | None, constraint: str) -> None:
    for offer in offers:
        if limit is not None and getattr(offer, field) is None:
            where = f"devices.{offer.type}.{field}"
            raise InputError(where, "is missing", f"constraints.{constraint} needs it")
