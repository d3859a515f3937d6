"""The placement problem: logical workers, device types with exact capabilities, constraints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from ddltool.errors import Infeasible, InputError
from ddltool.graph import natural_key
from ddltool.job import Job

# Prices are compared as whole millionths, rounded up, so a plan can never cost more than it may.
_PRICE_UNIT = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceType:
    """Devices of one type. ``capability_per_s`` is exact: the decimal number that was written."""

    name: str
    count: int
    capability_per_s: Fraction
    memory_gib: float | None = None
    price_micro: int | None = None
    """Price of one device for an hour, in millionths; None when unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Place ``max_workers`` ESTs on ``devices``, types in natural order of their names, only usable ones."""

    job: str
    max_workers: int
    batch_size: int
    devices: tuple[DeviceType, ...]
    single_type: bool = False
    """Use one device type only: asked for, or needed for the same bits on any number of devices (D1)."""
    max_devices: int | None = None
    max_price_micro: int | None = None


def from_job(job: Job, capabilities: Mapping[str, float]) -> Problem:
    """Return the problem of a job; ``capabilities`` (mini-batches per second) by device type.

    A type without enough memory for one EST is left out: ESTs on a device take turns, so memory does not grow with
    their number (EasyScale, section 3). D1 keeps to one type, because kernels differ between types. Raises Infeasible
    when no type is left, InputError when a constraint needs a figure that the job does not give.
    """
    limits = job.constraints
    _need(job, "memory_gib", limits.memory_per_worker_gib, "memory_per_worker_gib")
    _need(job, "price_per_hour", limits.max_price_per_hour, "max_price_per_hour")
    devices = [
        DeviceType(
            name=offer.type,
            count=offer.count,
            capability_per_s=Fraction(repr(float(capabilities[offer.type]))),
            memory_gib=offer.memory_gib,
            price_micro=None if offer.price_per_hour is None else _micro(offer.price_per_hour, up=True),
        )
        for offer in sorted(job.devices, key=lambda offer: natural_key(offer.type))
    ]
    budget = limits.max_price_per_hour
    return Problem(
        job=job.name,
        max_workers=job.max_workers,
        batch_size=job.batch_size,
        devices=_usable(devices, limits.memory_per_worker_gib),
        single_type=limits.homogeneous or limits.determinism == "D1",
        max_devices=limits.max_devices,
        max_price_micro=None if budget is None else _check_budget(devices, budget),
    )


def _need(job: Job, field: str, limit: float | None, constraint: str) -> None:
    for offer in job.devices:
        if limit is not None and getattr(offer, field) is None:
            where = f"devices.{offer.type}.{field}"
            raise InputError(where, "is missing", f"constraints.{constraint} needs it")


def _micro(price: float, *, up: bool) -> int:
    exact = Fraction(repr(float(price))) * _PRICE_UNIT
    return -int(-exact // 1) if up else int(exact // 1)


def _usable(devices: list[DeviceType], memory_gib: float | None) -> tuple[DeviceType, ...]:
    offered = [device for device in devices if device.count > 0]
    if not offered:
        raise Infeasible("no devices are offered: every count is 0")
    fitting = [device for device in offered if memory_gib is None or (device.memory_gib or 0.0) >= memory_gib]
    if not fitting:
        sizes = ", ".join(f"{device.name} has {device.memory_gib:g}" for device in offered)
        raise Infeasible(f"memory_per_worker_gib: one worker needs {memory_gib:g} GiB; {sizes}")
    return tuple(fitting)


def _check_budget(devices: list[DeviceType], budget: float) -> int:
    cheapest = min((device for device in devices if device.count > 0), key=lambda device: device.price_micro or 0)
    allowed = _micro(budget, up=False)
    if (cheapest.price_micro or 0) > allowed:
        price = (cheapest.price_micro or 0) / _PRICE_UNIT
        raise Infeasible(
            f"max_price_per_hour: {budget:g} an hour buys no device; the cheapest, {cheapest.name}, costs {price:g}"
        )
    return allowed
