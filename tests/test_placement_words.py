"""Plans and conflicts from the words of job.yaml, against every multiset of ESTs on every device, all constraints together.

Nothing here is shared with the planner: no step times ``k / C``, no dealing, no problem records.
"""

from __future__ import annotations

import itertools
from collections import Counter
from fractions import Fraction
from functools import cache
from random import Random

import pytest

from ddltool.analyzers.placement.dealing import device_counts
from ddltool.analyzers.placement.est import solve_est
from ddltool.analyzers.placement.problem import from_job
from ddltool.errors import Infeasible
from ddltool.job import Constraints, DeviceOffer, Job
from ddltool.plan import Plan

ORDERS = (
    ("throughput", "devices", "price", "waste"),
    ("price", "throughput"),
    ("devices", "throughput", "price"),
    ("moves", "throughput"),
    ("price", "devices", "throughput"),
)
NAMES = ("memory_per_worker_gib", "max_ests", "max_devices", "max_price_per_hour", "one type", "min_throughput")


def exact(number: float | None) -> Fraction:
    """The decimal number that was written."""
    return Fraction(str(number or 0))


def random_job(random: Random) -> Job:
    offers = [
        DeviceOffer(
            type=f"t{place}",
            count=random.randint(1, 3 if place < 2 else 1),
            capability_per_s=random.choice([round(random.uniform(0.3, 6), 3), 1.0, 2.0, 1 / 3]),
            memory_gib=random.choice([8, 12, 16, 32]),
            price_per_hour=random.choice([0, 0.1, 0.5, 1.4, 2.5]),
            max_ests=random.choice([None, None, 1, 2, 3]),
        )
        for place in range(random.choice([2, 2, 3]))
    ]
    limits: dict[str, object] = {}
    if random.random() < 0.5:
        limits["memory_per_worker_gib"] = random.choice([2, 5.3, 10, 16, 20])
        if random.random() < 0.6:
            limits["memory_fixed_gib"] = random.choice([0, 1, 6.4, 10])
    if random.random() < 0.5:
        limits["max_price_per_hour"] = random.choice([0, 0.3, 1, 1.9, 3, 5])
    if random.random() < 0.5:
        limits["max_devices"] = random.randint(1, 4)
    if random.random() < 0.6:
        limits["min_throughput"] = random.choice([0.5, 1, 2, 4, 8])
    if random.random() < 0.3:
        limits |= random.choice([{"homogeneous": True}, {"determinism": "D1"}, {"determinism": "D2"}])
    return Job(name="j", max_workers=random.randint(1, 6), devices=offers, constraints=Constraints(**limits))  # type: ignore[arg-type]


@cache
def multisets(number: int, most: int) -> tuple[tuple[int, ...], ...]:
    """Every way to have 1 to ``most`` ESTs on each of ``number`` equal devices, largest first."""
    return tuple(itertools.combinations_with_replacement(range(most, 0, -1), number))


def most_ests(job: Job, offer: DeviceOffer) -> int:
    """ESTs on one device: one after the other while the memory lasts."""
    limits, fits = job.constraints, 0
    while fits < min(job.max_workers, offer.max_ests or job.max_workers):
        if limits.memory_per_worker_gib is not None:
            at_once = 1 if limits.memory_fixed_gib is None else fits + 1
            needed = exact(limits.memory_fixed_gib) + at_once * exact(limits.memory_per_worker_gib)
            if needed > exact(offer.memory_gib):
                break
        fits += 1
    return fits


def every_plan(job: Job) -> dict[tuple[int, ...], Fraction]:
    """The best step time on every allowed number of devices."""
    limits, rows = job.constraints, []
    for offer in job.devices:
        most = most_ests(job, offer)
        ways = [way for number in range(offer.count + 1) for way in multisets(number, most)]
        rows.append(
            {
                (len(way), sum(way), Fraction(max(way, default=0)) / exact(offer.capability_per_s))
                for way in ways
                if sum(way) <= job.max_workers
            }
        )
    found: dict[tuple[int, ...], Fraction] = {}
    for combined in itertools.product(*rows):
        counts, step = tuple(number for number, _, _ in combined), max(slowest for _, _, slowest in combined)
        if sum(ests for _, ests, _ in combined) != job.max_workers:
            continue
        if (limits.homogeneous or limits.determinism == "D1") and sum(map(bool, counts)) > 1:
            continue
        if sum(counts) > (limits.max_devices or 99):
            continue
        if limits.max_price_per_hour is not None and price(job, counts) > exact(limits.max_price_per_hour):
            continue
        if job.max_workers / step >= exact(limits.min_throughput):
            found[counts] = min(step, found.get(counts, step))
    return found


def price(job: Job, counts: tuple[int, ...]) -> Fraction:
    return sum(
        (count * exact(offer.price_per_hour) for count, offer in zip(counts, job.devices, strict=True)), Fraction(0)
    )


def without(job: Job, name: str) -> Job:
    """The job without one of its requirements."""
    changes: dict[str, object] = {name: None}
    if name == "max_ests":
        return job.model_copy(update={"devices": [each.model_copy(update=changes) for each in job.devices]})
    if name == "memory_per_worker_gib":
        changes["memory_fixed_gib"] = None
    if name == "one type":
        changes = {"homogeneous": False, "determinism": None}
    return job.model_copy(update={"constraints": job.constraints.model_copy(update=changes)})


def solve(job: Job, **options: object) -> Plan:
    rates = {offer.type: offer.capability_per_s or 0.0 for offer in job.devices}
    return solve_est(from_job(job, rates), **options)  # type: ignore[arg-type]


def named(error: Infeasible) -> set[str]:
    """The requirements that a message names."""
    text = str(error).rpartition("without any one of them they can: ")[2]
    names = {part.partition(":")[0] for part in text.split(" | ")}
    return {"one type" if name == "homogeneous" or name.startswith("determinism") else name for name in names}


def check_conflict(job: Job, error: Infeasible) -> int:
    """The named requirements alone have no plan, and every proper subset of them has one."""
    names = named(error)
    assert names <= set(NAMES), error
    for size in range(len(names) + 1):
        for kept in itertools.combinations(sorted(names), size):
            left = job
            for name in set(NAMES) - set(kept):
                left = without(left, name)
            assert bool(every_plan(left)) == (size < len(names)), (kept, error)
    return len(names)


def ranked(
    job: Job, plans: dict[tuple[int, ...], Fraction], order: tuple[str, ...], now: dict[str, int]
) -> list[tuple[int, ...]]:
    """Numbers of devices, best first."""

    def key(counts: tuple[int, ...]) -> list[object]:
        step, offers = plans[counts], list(zip(counts, job.devices, strict=True))
        rate = sum((count * exact(offer.capability_per_s) for count, offer in offers), Fraction(0))
        figures = {
            "throughput": step,
            "devices": sum(counts),
            "price": price(job, counts),
            "waste": rate - job.max_workers / step,
            "moves": sum(abs(count - now[offer.type]) for count, offer in offers),
        }
        return [*(figures[name] for name in order), [-count for count in counts]]

    return sorted(plans, key=key)


def test_plans_and_conflicts_of_random_jobs_equal_brute_force() -> None:
    random, conflicts, planned = Random(2), Counter[int](), 0
    for number in range(400):
        job = random_job(random)
        order = ORDERS[number % len(ORDERS)]
        now = {offer.type: random.randint(0, offer.count) for offer in job.devices}
        plans = every_plan(job)
        if not plans:
            with pytest.raises(Infeasible) as caught:
                solve(job)
            conflicts[check_conflict(job, caught.value)] += 1
            continue
        whole = (*order, *(name for name in ("throughput", "devices", "waste") if name not in order))
        best = ranked(job, plans, whole, now)[:5]
        made = solve(job, top_k=5, objective=order, current=now)
        used = [device_counts(plan) for plan in (made, *made.alternatives)]
        assert [tuple(each.get(offer.type, 0) for offer in job.devices) for each in used] == best
        assert [plan.iteration_s for plan in (made, *made.alternatives)] == [float(plans[counts]) for counts in best]
        assert (made.status, made.gap) == ("optimal", 0)
        planned += 1
    assert planned > 150
    assert min(conflicts[1], conflicts[2]) > 20
    assert conflicts[3]


def test_a_price_that_does_not_matter_is_not_named() -> None:
    """One EST would fit on the dear device, but not all five: the memory alone is the cause."""
    offers = [
        DeviceOffer(type="small", count=3, capability_per_s=1, memory_gib=16, price_per_hour=0.1),
        DeviceOffer(type="dear", count=2, capability_per_s=1, memory_gib=32, price_per_hour=2.5),
    ]
    limits = Constraints(memory_per_worker_gib=20, memory_fixed_gib=0, max_price_per_hour=1.9)
    for workers, names in ((5, {"memory_per_worker_gib"}), (2, {"memory_per_worker_gib", "max_price_per_hour"})):
        job = Job(name="j", max_workers=workers, devices=offers, constraints=limits)
        with pytest.raises(Infeasible) as caught:
            solve(job)
        assert named(caught.value) == names
        check_conflict(job, caught.value)
