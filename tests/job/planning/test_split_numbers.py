"""Every figure of ``ddltool plan --strategy lb-bsp`` against all choices of devices and all splits, in exact fractions."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Result

Cli = Callable[..., Result]
Job = dict[str, Any]


def fraction(value: float) -> Fraction:
    return Fraction(repr(value))


def random_job(chance: random.Random) -> Job:
    """Return a job of up to three types of up to two devices, with limits of memory, money, number and type."""
    devices = []
    for kind in range(chance.randint(1, 3)):
        device: Job = {
            "type": f"T{kind}",
            "count": chance.randint(1, 2),
            "capability_per_s": chance.choice((chance.randint(1, 6), chance.randint(1, 60) / 10)),
            "price_per_hour": chance.choice((0, 1, 2.5, 3.1)),
            "memory_gib": chance.choice((1, 2, 3.3, 5)),
        }
        if chance.random() < 0.4:
            device["max_local_batch_size"] = chance.randint(1, 6)
        if chance.random() < 0.4:
            device["saturation_batch"] = chance.randint(1, 5)
        devices.append(device)
    limits: Job = {}
    if chance.random() < 0.3:
        limits["max_devices"] = chance.randint(1, 3)
    if chance.random() < 0.3:
        limits["max_price_per_hour"] = chance.choice((1, 2, 4.5, 6))
    if chance.random() < 0.2:
        limits["homogeneous"] = True
    if chance.random() < 0.4:
        limits["memory_per_worker_gib"] = chance.choice((1, 0.5, 0.3))
        if chance.random() < 0.5:
            limits["memory_fixed_gib"] = 0.5
    return {
        "kind": "ddltool.job",
        "name": "numbers",
        "max_workers": chance.randint(1, 4),
        "batch_size": chance.randint(1, 3),
        "devices": devices,
        "constraints": limits,
    }


def allowed(job: Job) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of devices of each type that the job's limits allow."""
    limits = job["constraints"]
    most = min(limits.get("max_devices", 99), job["max_workers"] * job["batch_size"])
    for numbers in itertools.product(*(range(device["count"] + 1) for device in job["devices"])):
        price = sum(fraction(d["price_per_hour"]) * n for d, n in zip(job["devices"], numbers, strict=True))
        if not 1 <= sum(numbers) <= most or price > fraction(limits.get("max_price_per_hour", 99)):
            continue
        if not limits.get("homogeneous") or sum(number > 0 for number in numbers) == 1:
            yield numbers


def limit_of(job: Job, device: Job) -> int:
    """Return the most samples that a device holds at a time."""
    known = [device.get("max_local_batch_size", 10**6)]
    limits = job["constraints"]
    if "memory_per_worker_gib" in limits:
        room = fraction(device["memory_gib"]) - fraction(limits.get("memory_fixed_gib", 0))
        known.append(max(0, math.floor(room / fraction(limits["memory_per_worker_gib"]))) * job["batch_size"])
    return min(known)


def seconds(job: Job, device: Job, size: int, *, passes: bool) -> Fraction | None:
    """Return the seconds of a device with ``size`` samples, in as few and as equal passes as fit; None where none does."""
    limit, saturation = limit_of(job, device), device.get("saturation_batch", 0)
    if limit == 0 or (size > limit and not passes):
        return None
    count = -(-size // limit)
    parts = [size // count + (place < size % count) for place in range(count)]
    each = 1 / (fraction(device["capability_per_s"]) * max(job["batch_size"], saturation))
    return sum((each * max(part, saturation) for part in parts), Fraction(0))


def shortest(job: Job, choices: list[tuple[int, ...]], *, passes: bool) -> Fraction | None:
    """Return the least slowest device over the choices and over all splits in which every device has a sample."""
    total = job["max_workers"] * job["batch_size"]
    best = None
    for numbers in choices:
        ends: dict[int, Fraction] = {0: Fraction(0)}  # samples given so far: the least slowest device
        for device in (d for d, n in zip(job["devices"], numbers, strict=True) for _ in range(n)):
            following: dict[int, Fraction] = {}
            for given, at in ends.items():
                for size in range(1, total - given + 1):
                    took = seconds(job, device, size, passes=passes)
                    if took is not None:
                        end = max(at, took)
                        following[given + size] = min(end, following.get(given + size, end))
            ends = following
        if total in ends and (best is None or ends[total] < best):
            best = ends[total]
    return best


@pytest.mark.parametrize("seed", range(40))
def test_every_figure_of_the_plan(cli: Cli, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    job = random_job(chance)
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    result = cli("plan", path, "--strategy", "lb-bsp", "--json")
    at_once = shortest(job, list(allowed(job)), passes=False)
    in_passes = shortest(job, list(allowed(job)), passes=True)
    best = at_once if at_once is not None else in_passes
    if best is None:
        assert result.code == 3
        return
    assert result.code == 0, result.err
    plan, made = result.document, result.document["split"]
    by_name = {device["type"]: device for device in job["devices"]}
    total = job["max_workers"] * job["batch_size"]
    assert plan["iteration_s"] == pytest.approx(float(best), rel=1e-12)
    assert plan["throughput"] == pytest.approx(float(job["max_workers"] / best), rel=1e-12)
    idle, capability, used, given = Fraction(0), Fraction(0), dict.fromkeys(by_name, 0), 0
    for row in plan["assignments"]:
        device, size = by_name[row["device_type"]], row["local_batch_size"]
        took = seconds(job, device, size, passes=at_once is None)
        assert took is not None
        assert row["compute_s"] == pytest.approx(float(took), rel=1e-12)
        assert row["accumulation_steps"] == -(-size // limit_of(job, device)) - 1
        idle += row["devices"] * (best - took)
        capability += row["devices"] * size / took / job["batch_size"]
        used[row["device_type"]] += row["devices"]
        given += row["devices"] * size
    assert given == total
    assert tuple(used.values()) in set(allowed(job))
    assert made["idle_s"] == pytest.approx(float(idle), rel=1e-9, abs=1e-12)
    assert plan["waste"] == pytest.approx(float(max(0, capability - job["max_workers"] / best)), rel=1e-9, abs=1e-9)
    shorter = at_once is not None and in_passes is not None and in_passes < at_once
    assert made["accumulated_s"] == (pytest.approx(float(in_passes or 0), rel=1e-12) if shorter else None)
    everybody = tuple(number + made["dropped"].get(name, 0) for name, number in used.items())
    kept = shortest(job, [everybody], passes=at_once is None)
    assert made["kept_s"] == (None if kept is None else pytest.approx(float(kept), rel=1e-12))
