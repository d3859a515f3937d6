"""The placement problem: logical workers, device types with exact capabilities, constraints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ddltool.errors import Infeasible, InputError, did_you_mean
from ddltool.graph import natural_key
from ddltool.job import DeviceOffer, Job

# Prices are compared as whole millionths: a device's price rounded up, the limit rounded down, so that a plan can
# never cost more than it may. Prices with up to six decimals are exact.
_PRICE_UNIT = 1_000_000
# A larger limit would leave the solver's 64-bit sums, and limits nothing.
_LARGEST_PRICE = 10**9


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
    """Limit of what a plan costs in an hour, in millionths. With it, every device type has a price."""

    @property
    def device_limit(self) -> int:
        """How many devices a plan may use: each carries at least one EST."""
        return self.max_workers if self.max_devices is None else min(self.max_workers, self.max_devices)

    def affordable(self, device: DeviceType) -> int:
        """Return how many devices of one type ``device_limit`` and the price limit allow when there are no others."""
        count = min(device.count, self.device_limit)
        if self.max_price_micro is None or not device.price_micro:
            return count
        return min(count, self.max_price_micro // device.price_micro)


def from_job(job: Job, capabilities: Mapping[str, float]) -> Problem:
    """Return the problem of a job; ``capabilities`` (mini-batches per second of one EST alone) by device type.

    A type without enough memory for one EST is left out: ESTs on a device take turns, so memory does not grow with
    their number (EasyScale, section 3). D1 keeps to one type, because kernels differ between types; D0 promises equal
    bits for the same placement only and D2 has hardware-agnostic kernels, so both may mix. Types with a count of 0 are
    ignored. Raises Infeasible when nothing is left to run on, InputError when a capability is missing or a constraint
    needs a figure that the job does not give.
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
    problem = Problem(
        job=job.name,
        max_workers=job.max_workers,
        batch_size=job.batch_size,
        devices=tuple(_device(offer, capabilities) for offer in _fitting(offers, limits.memory_per_worker_gib)),
        single_type=limits.homogeneous or limits.determinism == "D1",
        max_devices=limits.max_devices,
        max_price_micro=None if budget is None else math.floor(_exact(budget) * _PRICE_UNIT),
    )
    usable = {device.name for device in problem.devices}
    check_affordable(problem, left_out=[offer.type for offer in offers if offer.type not in usable])
    return problem


def check_affordable(problem: Problem, left_out: Sequence[str] = ()) -> None:
    """Raise Infeasible when the price limit buys no device at all: the only way in which a problem has no plan.

    ``left_out`` names the device types that have too little memory, for the message.
    """
    if any(problem.affordable(device) for device in problem.devices):
        return
    cheapest = min(problem.devices, key=lambda device: device.price_micro or 0)
    budget, price = (problem.max_price_micro or 0) / _PRICE_UNIT, (cheapest.price_micro or 0) / _PRICE_UNIT
    text = f"max_price_per_hour: {budget:g} an hour buys no device; the cheapest, {cheapest.name}, costs {price:g}"
    raise Infeasible(f"{text} (memory_per_worker_gib leaves out {', '.join(left_out)})" if left_out else text)


def _exact(number: float) -> Fraction:
    """Return the decimal number that stands in the job's file: 0.1 is one tenth, not the nearest binary fraction."""
    return Fraction(repr(float(number)))


def _device(offer: DeviceOffer, capabilities: Mapping[str, float]) -> DeviceType:
    where = f"devices.{offer.type}.capability_per_s"
    if offer.type not in capabilities:
        raise InputError(where, "is missing", did_you_mean(offer.type, capabilities))
    capability = capabilities[offer.type]
    if not (math.isfinite(capability) and capability > 0):
        raise InputError(where, f"is {capability}", "mini-batches per second must be a finite number > 0")
    price = offer.price_per_hour
    return DeviceType(
        name=offer.type,
        count=offer.count,
        capability_per_s=_exact(capability),
        memory_gib=offer.memory_gib,
        price_micro=None if price is None else math.ceil(_exact(price) * _PRICE_UNIT),
    )


def _need(offers: Sequence[DeviceOffer], field: str, limit: float | None, constraint: str) -> None:
    for offer in offers:
        if limit is not None and getattr(offer, field) is None:
            where = f"devices.{offer.type}.{field}"
            raise InputError(where, "is missing", f"constraints.{constraint} needs it")


def _fitting(offers: Sequence[DeviceOffer], memory_gib: float | None) -> list[DeviceOffer]:
    fitting = [offer for offer in offers if memory_gib is None or (offer.memory_gib or 0.0) >= memory_gib]
    if not fitting:
        sizes = ", ".join(f"{offer.type} has {offer.memory_gib:g}" for offer in offers)
        raise Infeasible(f"memory_per_worker_gib: one worker needs {memory_gib:g} GiB; {sizes}")
    return fitting
