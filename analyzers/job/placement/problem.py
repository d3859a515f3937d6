"""The placement problem of a job, and errors that name a smallest set of requirements that cannot be kept together.

Start at :class:`Problem` and :func:`from_job`; :func:`minimal_conflict` finds such a set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ddltool.errors import Infeasible, InputError, did_you_mean
from ddltool.graph import COMPUTE, Graph, natural_key
from ddltool.job import Constraints, DeviceOffer, Job
from ddltool.plans import Assignment, Plan, Strategy

if TYPE_CHECKING:  # read tables alone need it
    import pandas as pd

# Capabilities outside these bounds are mistakes, and step times over them leave the range of floats.
SMALLEST_CAPABILITY, LARGEST_CAPABILITY = 1e-12, 1e12
# Prices are compared as whole millionths: a device's price rounded up, the limit rounded down, so that a plan can
# never cost more than it may. Prices with up to six decimals are exact.
PRICE_UNIT = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceType:
    """Devices of one type. ``capability_per_s`` (mini-batches per second) is exactly the decimal number that was written."""

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
        """Most ESTs (logical workers) on one device, by the job's limit and by memory; None: any number."""
        limits = [limit for limit in (self.max_ests, self.memory_ests) if limit is not None]
        return min(limits, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """The problem to place ``max_workers`` ESTs on ``devices``, which are in natural order of the types' names.

    An EST is EasyScale's logical worker (an "EasyScale thread"): ESTs on one device take turns, so that a job trains the same
    on any number of devices. T is the number of device types. :func:`from_job` checks the values.
    """

    job: str
    """The job's name, for results and errors."""
    max_workers: int
    batch_size: int
    """Samples of one EST in a step."""
    devices: tuple[DeviceType, ...]
    single_type: bool = False
    """Whether a plan must keep to one device type: asked for, or needed for the same bits on any number of devices."""
    max_devices: int | None = None
    """Most devices in all; None: any number."""
    max_price_micro: int | None = None
    """Highest price of a plan per hour, in millionths; None: no limit. With it, every device type has a price."""
    min_throughput: Fraction | None = None
    """Logical mini-batches per second that an EST plan must reach; None: no limit."""
    left_out: tuple[DeviceType, ...] = ()
    """Offered types without the memory for one EST."""
    single_type_reason: str = "homogeneous"
    """The constraint behind ``single_type``, as it stands in job.yaml."""
    memory_text: str = ""
    """What one worker needs and what the types have, in words for an error."""

    @property
    def device_limit(self) -> int:
        """Most devices that a plan may use; each runs at least one EST."""
        return self.max_workers if self.max_devices is None else min(self.max_workers, self.max_devices)

    @property
    def slowest_step(self) -> Fraction:
        """Longest step time in seconds to consider: one slowest device runs every EST, or ``min_throughput`` is just met."""
        slowest = self.max_workers / min(device.capability_per_s for device in self.devices)
        return slowest if self.min_throughput is None else min(slowest, self.max_workers / self.min_throughput)

    def affordable(self, device: DeviceType) -> int:
        """Return how many devices of one type a plan may use if it uses no others: the limits of number and price."""
        count = min(device.count, self.device_limit)
        if self.max_price_micro is None or not device.price_micro:
            return count
        return min(count, self.max_price_micro // device.price_micro)

    def allows(self, counts: Sequence[int]) -> bool:
        """Return whether ``counts`` (T,) devices keep the constraints on numbers, price and types of devices.

        Constraints on ESTs per device and on throughput are not checked.
        """
        price = sum((device.price_micro or 0) * count for device, count in zip(self.devices, counts, strict=True))
        return (
            1 <= sum(counts) <= self.device_limit
            and all(0 <= count <= device.count for device, count in zip(self.devices, counts, strict=True))
            and (self.max_price_micro is None or price <= self.max_price_micro)
            and not (self.single_type and sum(map(bool, counts)) > 1)
        )

    @property
    def offered(self) -> dict[str, int]:
        """Type name -> number of devices that are offered, for those above 0."""
        return self.named([device.count for device in self.devices])

    def named(self, counts: Sequence[int]) -> dict[str, int]:
        """Return type name -> count, for those of the (T,) device counts that are above 0."""
        return {device.name: count for device, count in zip(self.devices, counts, strict=True) if count}

    def counts(self, used: Mapping[str, int]) -> tuple[int, ...]:
        """Return the counts ``used`` (by type name) as (T,) counts in the order of the problem's types."""
        return tuple(used.get(device.name, 0) for device in self.devices)

    def spare(self, counts: Sequence[int]) -> dict[str, int]:
        """Return type name -> unused devices, for the types of which the constraints allow one more than ``counts`` (T,)."""
        return {
            device.name: device.count - counts[more_index]
            for more_index, device in enumerate(self.devices)
            if self.allows([count + (index == more_index) for index, count in enumerate(counts)])
        }

    def offering(self, counts: Sequence[int]) -> Problem:
        """Return the same problem with ``counts`` (T,) devices offered; types with a count of 0 stay in it."""
        devices = tuple(replace(device, count=count) for device, count in zip(self.devices, counts, strict=True))
        return replace(self, devices=devices)

    def plan(self, strategy: Strategy, iteration_s: float, assignments: list[Assignment], **more: Any) -> Plan:
        """Return a plan of this problem with a step of ``iteration_s`` seconds on the devices in ``assignments``.

        ``more``: other fields of :class:`Plan`; by default those of a plan that is proven optimal, without ESTs and waste.
        """
        figures: dict[str, Any] = {
            "throughput": self.max_workers / iteration_s,
            "overload_factor": iteration_s,  # EasyScale's f: seconds that the slowest device computes
            "est_count": 0,
            "waste": 0.0,
            "status": "optimal",
            "gap": 0.0,
            "solve_seconds": 0.0,
            **more,
        }
        figures["waste"] = max(0.0, figures["waste"])  # a difference, which rounding may leave below 0
        return Plan(
            job=self.job,
            strategy=strategy,
            max_workers=self.max_workers,
            batch_size=self.batch_size,
            iteration_s=iteration_s,
            assignments=assignments,
            **figures,
        )

    def with_added(self, type_order: Iterable[int], limit: int, numbers: Sequence[int] | None = None) -> list[int]:
        """Return ``numbers`` (T,) with as many devices added as the limits on number and price allow, type by type.

        ``type_order``: indices of the types, in the order in which devices are added; ``limit``: most devices in all, beside
        ``max_devices``; ``numbers``: None means no devices.
        """
        counts = list(numbers or [0] * len(self.devices))
        most_devices = limit if self.max_devices is None else min(limit, self.max_devices)
        devices_left = most_devices - sum(counts)
        prices = [device.price_micro or 0 for device in self.devices]
        price = sum(price * count for price, count in zip(prices, counts, strict=True))
        budget_left = (self.max_price_micro or 0) - price
        for type_index in type_order:
            added = min(devices_left, self.devices[type_index].count - counts[type_index])
            if self.max_price_micro is not None and prices[type_index]:
                added = min(added, budget_left // prices[type_index])
            counts[type_index] += added
            devices_left -= added
            budget_left -= added * prices[type_index]
        return counts

    @property
    def fastest_first(self) -> list[int]:
        """Indices of the device types, fastest first; types of equal capability stay in the order of their names."""
        return sorted(range(len(self.devices)), key=lambda type_index: -self.devices[type_index].capability_per_s)

    @property
    def cheapest_first(self) -> list[int]:
        """Indices of the device types by rising price per capability."""
        value = [(device.price_micro or 0) / device.capability_per_s for device in self.devices]
        return sorted(range(len(value)), key=value.__getitem__)

    @property
    def affordable_capability(self) -> Fraction:
        """An upper bound on the mini-batches per second that the price limit buys; only for a problem with a price limit.

        It is the fractional knapsack: devices, and a fraction of the last one, are bought in the order of price per capability.
        Devices without a price are free, and all taken.
        """
        budget_left = Fraction(self.max_price_micro or 0)
        capability = Fraction(0)
        for type_index in self.cheapest_first:
            device = self.devices[type_index]
            bought = Fraction(device.count)
            if device.price_micro:
                bought = min(bought, budget_left / device.price_micro)
            capability += bought * device.capability_per_s
            budget_left -= bought * (device.price_micro or 0)
        return capability

    def est_capacity(self, device: DeviceType, step_s: Fraction) -> int:
        """Return the most ESTs (logical workers) that one device can run, one after another, in a step of ``step_s`` seconds.

        A device of capability C runs one in 1 / C seconds. The device's own limit and the job's number of ESTs bound the
        result.
        """
        est_limit = self.max_workers if device.most_ests is None else min(device.most_ests, self.max_workers)
        return min(int(device.capability_per_s * step_s), est_limit)


@lru_cache(maxsize=4096)
def exact(number: float) -> Fraction:
    """Return a float as the decimal number that was written for it: 0.1 is one tenth, not the nearest binary fraction."""
    return Fraction(repr(float(number)))


def check_capability(where: str, capability: float) -> None:
    """Raise InputError at ``where`` unless ``capability`` (mini-batches per second) is between 1e-12 and 1e12."""
    if not (math.isfinite(capability) and capability > 0):
        raise InputError(where, f"is {capability}", "mini-batches per second must be a finite number > 0")
    if not SMALLEST_CAPABILITY <= capability <= LARGEST_CAPABILITY:
        bounds = f"between {SMALLEST_CAPABILITY:g} and {LARGEST_CAPABILITY:g}"
        raise InputError(where, f"is {capability:g}", f"mini-batches per second must lie {bounds}")


def from_job(job: Job, capabilities: Mapping[str, float]) -> Problem:
    """Return the placement problem of a job.

    ``capabilities``: device type -> mini-batches per second of one EST alone. Types with a count of 0 are ignored, and types
    without the memory for one EST are left out: ESTs on a device take turns, so memory does not grow with their number
    (EasyScale, section 3), unless the job gives ``memory_fixed_gib``. Determinism D1 keeps a plan to one type, because kernels
    differ between types; so does D2 for a model that is not ``hardware_agnostic``. Else D2 may mix types, and so may D0, which
    promises equal bits for the same placement only. Raises Infeasible when nothing is left to run on, InputError when a
    capability is missing or a constraint needs a figure that the job does not give.
    """
    limits = job.constraints
    offers = sorted((offer for offer in job.devices if offer.count > 0), key=lambda offer: natural_key(offer.type))
    if not offers:
        raise Infeasible("no devices are offered: every count is 0")
    _check_field_given(offers, "memory_gib", limits.memory_per_worker_gib, "memory_per_worker_gib")
    _check_field_given(offers, "price_per_hour", limits.max_price_per_hour, "max_price_per_hour")
    budget = limits.max_price_per_hour
    devices = [_device_type(offer, capabilities, limits) for offer in offers]
    single_type_reason = _single_type_reason(limits)
    problem = Problem(
        job=job.name,
        max_workers=job.max_workers,
        batch_size=job.batch_size,
        devices=tuple(device for device in devices if device.memory_ests != 0),
        left_out=tuple(device for device in devices if device.memory_ests == 0),
        memory_text=_memory_text(limits, devices),
        single_type=single_type_reason is not None,
        single_type_reason=single_type_reason or "",
        max_devices=limits.max_devices,
        max_price_micro=None if budget is None else math.floor(exact(budget) * PRICE_UNIT),
        min_throughput=None if limits.min_throughput is None else exact(limits.min_throughput),
    )
    check_affordable(problem)
    return problem


def check_affordable(problem: Problem) -> None:
    """Raise Infeasible, naming a minimal conflict, when no device has the memory for one EST and a price within the limit."""
    if not _can_run_one_est(problem):
        # memory and price alone are to blame here; the other requirements are for each strategy to check
        basic = replace(problem, single_type=False, max_devices=None, min_throughput=None)
        raise conflict_error(problem, minimal_conflict(basic, _allows_plan))


def _can_run_one_est(problem: Problem) -> bool:
    """Return whether at least one device can be used and paid for, so that one EST can run."""
    return any(problem.affordable(device) for device in problem.devices)


def _allows_plan(problem: Problem) -> bool:
    """Return whether memory and price allow a plan of a problem from which :func:`minimal_conflict` dropped requirements.

    An EST is a logical worker. With a price limit it is enough that one EST can run. Without one the memory must hold every
    EST, so that a shortage of memory is not blamed on the price; a device whose memory sets no limit holds any number, so there
    it is enough, too, that one can run.
    """
    memory_limits_all = all(device.memory_ests is not None for device in problem.devices)  # None: any number fits
    if problem.max_price_micro is None and memory_limits_all:
        ests_in_memory = sum(device.count * (device.memory_ests or 0) for device in problem.devices)
        return ests_in_memory >= problem.max_workers
    return _can_run_one_est(problem)


def _single_type_reason(limits: Constraints) -> str | None:
    """Return the constraint that keeps a plan to one device type, by its name in job.yaml; None: types may be mixed."""
    if limits.homogeneous:
        return "homogeneous"
    if limits.determinism == "D2" and limits.hardware_agnostic is False:
        return "determinism D2 without hardware_agnostic"
    return "determinism D1" if limits.determinism == "D1" else None


def _device_type(offer: DeviceOffer, capabilities: Mapping[str, float], limits: Constraints) -> DeviceType:
    """Return an offered type with exact figures: price in millionths, rounded up, and the ESTs that its memory holds.

    ``capabilities``: type -> mini-batches per second. Raises InputError where the type has none.
    """
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
    """Return how many ESTs fit into a device's memory; None: any number, or not known.

    ESTs take turns, so a device that holds one holds any number. Only where the job gives ``memory_fixed_gib`` does each EST
    need memory of its own beside that.
    """
    worker_gib = limits.memory_per_worker_gib
    if worker_gib is None or offer.memory_gib is None:
        return None
    if limits.memory_fixed_gib is None:
        return None if offer.memory_gib >= worker_gib else 0
    return max(0, math.floor((exact(offer.memory_gib) - exact(limits.memory_fixed_gib)) / exact(worker_gib)))


def _memory_text(limits: Constraints, devices: Sequence[DeviceType]) -> str:
    """Return in words what memory a worker needs and what each type has, for an error; "" where the job does not say."""
    worker_gib, fixed_gib = limits.memory_per_worker_gib, limits.memory_fixed_gib
    if worker_gib is None:
        return ""
    if fixed_gib is None:
        sizes = ", ".join(f"{device.name} has {device.memory_gib:g}" for device in devices)
        return f"one worker needs {worker_gib:g} GiB; {sizes}"
    sizes = ", ".join(
        f"{device.name} has {device.memory_gib:g} (room for {device.memory_ests}; {device.count} offered)"
        for device in devices
    )
    return f"k workers on a device need {fixed_gib:g} + k x {worker_gib:g} GiB; {sizes}"


def _check_field_given(offers: Sequence[DeviceOffer], field: str, limit: float | None, constraint: str) -> None:
    """Raise InputError where a ``limit`` is set and an offered type lacks the ``field`` that it needs.

    ``constraint``: the limit's name in job.yaml, for the message.
    """
    if limit is None:
        return
    for offer in offers:
        if getattr(offer, field) is None:
            where = f"devices.{offer.type}.{field}"
            raise InputError(where, "is missing", f"constraints.{constraint} needs it")


class Requirement(NamedTuple):
    """A constraint in job.yaml, which could be dropped."""

    name: str
    """Its name in job.yaml."""
    text: str
    """What it asks for, in words for an error."""
    without: Callable[[Problem], Problem]
    """Returns a problem without this constraint."""


def requirements(problem: Problem) -> list[Requirement]:
    """Return the requirements that a job sets, which could be dropped to make a plan possible.

    The numbers of offered devices are not among them.
    """
    devices = sorted((*problem.devices, *problem.left_out), key=lambda device: device.name)
    est_limits = _joined(f"{device.max_ests} on a {device.name}" for device in devices if device.max_ests is not None)
    prices = _joined(f"{device.name} costs {(device.price_micro or 0) / PRICE_UNIT:g}" for device in devices)
    offered = _joined(f"{device.count} {device.name}" for device in devices)
    memory = "" if all(device.memory_ests is None for device in devices) else problem.memory_text
    min_throughput, budget = problem.min_throughput, problem.max_price_micro
    device_limit = "" if problem.max_devices is None else f"at most {problem.max_devices}"
    price_limit = "" if budget is None else f"at most {budget / PRICE_UNIT:g} an hour; {prices}"
    single_type = f"devices of one type only; offered are {offered}" if problem.single_type else ""
    throughput = "" if min_throughput is None else f"at least {float(min_throughput):g} mini-batches/s"
    # minimal_conflict drops requirements in this order, and errors name them in it.
    rows = (
        Requirement("memory_per_worker_gib", memory, _without_memory),
        Requirement(
            "max_ests", est_limits and f"{problem.max_workers} workers, at most {est_limits}", _without_max_ests
        ),
        Requirement("max_devices", device_limit, partial(replace, max_devices=None)),
        Requirement("max_price_per_hour", price_limit, partial(replace, max_price_micro=None)),
        Requirement(problem.single_type_reason, single_type, partial(replace, single_type=False)),
        Requirement("min_throughput", throughput, partial(replace, min_throughput=None)),
    )
    return [row for row in rows if row.text]


def demand_throughput(throughput: float, least: Fraction | float | None, most: str = "this strategy reaches") -> None:
    """Raise Infeasible when a plan's throughput is below ``least``, both in logical mini-batches per second.

    A relative difference of up to 1e-9 counts as rounding. ``least``: None demands nothing; ``most``: the words before the
    throughput in the message.
    """
    if least is not None and throughput < float(least) * (1 - 1e-9):
        raise Infeasible(f"min_throughput: at least {float(least):g} mini-batches/s; {most} {throughput:.4g}")


def minimal_conflict(problem: Problem, feasible: Callable[[Problem], bool]) -> list[Requirement]:
    """Return a minimal set of requirements that cannot be kept together: without any one of them the others can.

    The problem must be infeasible, and ``feasible`` must tell exactly whether a problem has a plan. This is a deletion filter:
    each requirement in turn is dropped for good if the rest is still infeasible. So of several minimal sets it finds the one
    whose members stand last in :func:`requirements`.
    """
    kept: list[Requirement] = []
    remaining = problem
    for requirement in requirements(problem):
        without = requirement.without(remaining)
        if feasible(without):
            kept.append(requirement)
        else:
            remaining = without
    return kept


def conflict_error(problem: Problem, conflict: Sequence[Requirement], best: str = "") -> Infeasible:
    """Return the error that names the requirements of a minimal conflict (:func:`minimal_conflict`).

    ``best``: the highest throughput that its requirements other than ``min_throughput`` allow, in words; "": not known.
    """
    if [requirement.name for requirement in conflict] == ["max_price_per_hour"]:
        all_types = (*problem.devices, *problem.left_out)
        cheapest = min(all_types, key=lambda device: device.price_micro or 0)
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
    """Return the number of the job's workers in words, such as ``8 workers``."""
    return f"{problem.max_workers} worker{'s' if problem.max_workers > 1 else ''}"


def _joined(parts: Iterable[str]) -> str:
    """Return the first eight parts joined by commas, and how many others there are: ``a, b and 3 more``."""
    shown = list(parts)
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")


def _without_memory(problem: Problem) -> Problem:
    """Return the problem without limits by memory; it offers the types again that were left out for lack of it."""
    devices = sorted((*problem.devices, *problem.left_out), key=lambda device: device.name)
    return replace(problem, devices=tuple(replace(device, memory_ests=None) for device in devices), left_out=())


def _without_max_ests(problem: Problem) -> Problem:
    """Return the problem without the job's limits on ESTs per device."""
    devices = tuple(replace(device, max_ests=None) for device in problem.devices)
    left_out = tuple(replace(device, max_ests=None) for device in problem.left_out)
    return replace(problem, devices=devices, left_out=left_out)


def capability_from_profile(frame: pd.DataFrame, device_type: str, batch_size: int, where: str) -> float:
    """Return a device type's capability in mini-batches per second from a checked profile: 1 / step time at ``batch_size``.

    ``frame``: the profile's rows, with the columns ``device``, ``num_replicas``, ``local_batch_size``, ``step_time_s`` and
    perhaps ``accumulation_steps``; ``where``: its file. The step time is the median of the rows with one replica and no
    accumulation, interpolated linearly between measured batch sizes. A profile of a single device is used for any type. Raises
    InputError when a profile of several lacks the type, or when ``batch_size`` is outside the measured range.
    """
    single = frame[frame["num_replicas"] == 1]
    if "accumulation_steps" in single.columns:  # a step of several passes is no mini-batch of its local batch size
        single = single[single["accumulation_steps"].fillna(0) == 0]
    devices = sorted(set(single["device"]))
    if len(devices) != 1:
        if device_type not in devices:
            remedy = did_you_mean(device_type, devices) if devices else "profile with --replicas 1"
            raise InputError(where, f"has no single-replica rows of device {device_type!r}", remedy)
        single = single[single["device"] == device_type]
    times = single.groupby("local_batch_size")["step_time_s"].median().sort_index()
    batches = times.index.to_numpy(dtype=float)
    if not batches[0] <= batch_size <= batches[-1]:
        problem = f"covers local batch sizes {batches[0]:.0f} to {batches[-1]:.0f}, not the job's {batch_size}"
        raise InputError(where, problem, f"profile with --batch-sizes up to {batch_size}")
    return 1.0 / float(np.interp(batch_size, batches, times.to_numpy(dtype=float)))


def capability_from_graph(graph: Graph) -> float:
    """Return the capability in mini-batches per second from a timed graph: 1 / seconds of its compute and update.

    A mini-batch has the graph's batch size. Raises InputError when its compute takes no time.
    """
    step_s = float(graph.duration_s[graph.kind == COMPUTE].sum()) + float(graph.meta.get("update_s") or 0.0)
    if not step_s > 0:
        raise InputError(graph.name, f"its compute ops take {step_s} s", "use a timed graph with work in it")
    return 1.0 / step_s
