"""The placement problem, and which of its requirements cannot be kept together, in the words of job.yaml."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from ddltool.errors import Infeasible

# Prices are compared as whole millionths: a device's price rounded up, the limit rounded down, so that a plan can
# never cost more than it may. Prices with up to six decimals are exact.
PRICE_UNIT = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceType:
    """Devices of one type. ``capability_per_s`` is exact: the decimal number that was written."""

    name: str
    count: int
    capability_per_s: Fraction
    memory_gib: float | None = None
    price_micro: int | None = None
    """Price of one device for an hour, in millionths; None when unknown."""
    max_ests: int | None = None
    """Most ESTs on one device; None: any number."""
    memory_ests: int | None = None
    """ESTs that fit into one device's memory; None: any number."""

    @property
    def most_ests(self) -> int | None:
        """Most ESTs on one device for either reason; None: any number."""
        limits = [limit for limit in (self.max_ests, self.memory_ests) if limit is not None]
        return min(limits, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Place ``max_workers`` ESTs on ``devices``, types in natural order of their names, only usable ones."""

    job: str
    max_workers: int
    batch_size: int
    devices: tuple[DeviceType, ...]
    single_type: bool = False
    """Use one device type only: asked for, or needed for the same bits on any number of devices."""
    max_devices: int | None = None
    max_price_micro: int | None = None
    """Limit of what a plan costs in an hour, in millionths. With it, every device type has a price."""
    min_throughput: Fraction | None = None
    """Logical mini-batches per second that an EST plan must reach."""
    left_out: tuple[DeviceType, ...] = ()
    """Offered types without the memory for one EST."""
    single_type_reason: str = "homogeneous"
    """The constraint behind ``single_type``, as it stands in job.yaml."""
    memory_text: str = ""
    """What one worker needs, and what the types have."""

    @property
    def device_limit(self) -> int:
        """How many devices a plan may use: each carries at least one EST."""
        return self.max_workers if self.max_devices is None else min(self.max_workers, self.max_devices)

    @property
    def slowest_step(self) -> Fraction:
        """A step time in seconds that no plan needs to exceed, or may: any device is full in it, or it is the limit."""
        slowest = self.max_workers / min(device.capability_per_s for device in self.devices)
        return slowest if self.min_throughput is None else min(slowest, self.max_workers / self.min_throughput)

    def affordable(self, device: DeviceType) -> int:
        """Return how many devices of one type ``device_limit`` and the price limit allow when there are no others."""
        count = min(device.count, self.device_limit)
        if self.max_price_micro is None or not device.price_micro:
            return count
        return min(count, self.max_price_micro // device.price_micro)

    def room(self, device: DeviceType, step_s: Fraction) -> int:
        """Return how many ESTs one device has room for in a step of ``step_s`` seconds."""
        most = self.max_workers if device.most_ests is None else min(device.most_ests, self.max_workers)
        return min(int(device.capability_per_s * step_s), most)


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """Something that job.yaml asks for and could be left out."""

    name: str
    text: str
    without: Callable[[Problem], Problem]
    """Return a problem without the requirement, otherwise the same."""


def requirements(problem: Problem) -> list[Requirement]:
    """Return the requirements of a problem: what a plan must keep besides the devices that there are."""
    every = sorted((*problem.devices, *problem.left_out), key=lambda device: device.name)
    found: list[Requirement] = []
    if any(device.memory_ests is not None for device in every):
        found.append(Requirement(name="memory_per_worker_gib", text=problem.memory_text, without=_without_memory))
    if any(device.max_ests is not None for device in every):
        shown = _listed(f"{device.max_ests} on a {device.name}" for device in every if device.max_ests is not None)
        text = f"{problem.max_workers} workers, at most {shown}"
        found.append(Requirement(name="max_ests", text=text, without=_without_max_ests))
    if problem.max_devices is not None:
        text = f"at most {problem.max_devices}"
        found.append(Requirement(name="max_devices", text=text, without=lambda other: replace(other, max_devices=None)))
    if problem.max_price_micro is not None:
        text = f"at most {problem.max_price_micro / PRICE_UNIT:g} an hour; {_prices(every)}"
        found.append(
            Requirement(
                name="max_price_per_hour", text=text, without=lambda other: replace(other, max_price_micro=None)
            )
        )
    if problem.single_type:
        text = "devices of one type only; offered are " + _listed(f"{device.count} {device.name}" for device in every)
        found.append(
            Requirement(
                name=problem.single_type_reason, text=text, without=lambda other: replace(other, single_type=False)
            )
        )
    if problem.min_throughput is not None:
        text = f"at least {float(problem.min_throughput):g} mini-batches/s"
        found.append(
            Requirement(name="min_throughput", text=text, without=lambda other: replace(other, min_throughput=None))
        )
    return found


def demand_throughput(throughput: float, least: Fraction | float | None) -> None:
    """Raise Infeasible when a plan's throughput is below ``least`` (both in logical mini-batches per second)."""
    if least is not None and throughput < float(least) * (1 - 1e-9):
        raise Infeasible(
            f"min_throughput: at least {float(least):g} mini-batches/s; this strategy reaches {throughput:.4g}"
        )


def minimal_conflict(problem: Problem, feasible: Callable[[Problem], bool]) -> list[Requirement]:
    """Return requirements that cannot be kept together, and could if any one of them were dropped.

    A deletion filter: each requirement is left out in turn, for good when the rest is still infeasible. Of several such
    sets it finds the one that keeps what stands last in :func:`requirements`. ``feasible`` must be exact. The problem
    itself must be infeasible.
    """
    kept: list[Requirement] = []
    rest = problem
    for requirement in requirements(problem):
        without = requirement.without(rest)
        if feasible(without):
            kept.append(requirement)
        else:
            rest = without
    return kept


def conflict_error(problem: Problem, conflict: Sequence[Requirement], best: str = "") -> Infeasible:
    """Return the error that names a minimal conflict; ``best`` is the throughput that its other members allow."""
    if [requirement.name for requirement in conflict] == ["max_price_per_hour"]:
        every = (*problem.devices, *problem.left_out)
        cheapest = min(every, key=lambda device: device.price_micro or 0)
        if (cheapest.price_micro or 0) > (problem.max_price_micro or 0):
            budget, price = (problem.max_price_micro or 0) / PRICE_UNIT, (cheapest.price_micro or 0) / PRICE_UNIT
            text = f"max_price_per_hour: {budget:g} an hour buys no device; the cheapest, {cheapest.name}, costs"
            return Infeasible(f"{text} {price:g}")
    texts = [f"{requirement.name}: {requirement.text}" for requirement in conflict]
    if best and any(requirement.name == "min_throughput" for requirement in conflict):
        texts[-1] += f"; the most that can be reached is {best}"
    if len(conflict) == 1:
        workers = "" if conflict[0].name in ("memory_per_worker_gib", "max_ests") else f" ({_workers(problem)})"
        return Infeasible(texts[0] + workers)
    if not conflict:
        return Infeasible(f"the offered devices cannot hold {_workers(problem)}")
    head = f"{_workers(problem)}: these requirements cannot be kept together, but without any one of them they can: "
    return Infeasible(head + " | ".join(texts))


def _workers(problem: Problem) -> str:
    return f"{problem.max_workers} worker{'s' if problem.max_workers > 1 else ''}"


def _prices(devices: Iterable[DeviceType]) -> str:
    return _listed(f"{device.name} costs {(device.price_micro or 0) / PRICE_UNIT:g}" for device in devices)


def _listed(parts: Iterable[str]) -> str:
    """Return the parts joined by commas, eight at most."""
    shown = list(parts)
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")


def _without_memory(problem: Problem) -> Problem:
    every = sorted((*problem.devices, *problem.left_out), key=lambda device: device.name)
    return replace(problem, devices=tuple(replace(device, memory_ests=None) for device in every), left_out=())


def _without_max_ests(problem: Problem) -> Problem:
    return replace(
        problem,
        devices=tuple(replace(device, max_ests=None) for device in problem.devices),
        left_out=tuple(replace(device, max_ests=None) for device in problem.left_out),
    )
