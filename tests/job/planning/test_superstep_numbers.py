"""Every figure of ``ddltool plan --strategy elastic-bsp`` against all devices and all numbers of iterations."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest

from tests.conftest import Result

Cli = Callable[..., Result]


@pytest.mark.parametrize("seed", range(100))
def test_every_figure_of_the_plan(cli: Cli, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    devices = [
        {
            "type": f"T{kind}",
            "count": chance.randint(1, 2),
            "capability_per_s": chance.choice((chance.randint(1, 6), chance.randint(1, 60) / 10)),
            "price_per_hour": chance.choice((0, 1, 2.5, 3.1)),
        }
        for kind in range(chance.randint(1, 3))
    ]
    limits: dict[str, object] = {}
    if chance.random() < 0.3:
        limits["max_devices"] = chance.randint(1, 3)
    if chance.random() < 0.3:
        limits["max_price_per_hour"] = chance.choice((1, 2, 4.5, 6))
    if chance.random() < 0.2:
        limits["homogeneous"] = True
    workers, lookahead, gap = chance.randint(1, 4), chance.randint(1, 4), chance.choice((None, None, 0, 1, 2))
    job = {"kind": "ddltool.job", "name": "numbers", "max_workers": workers, "devices": devices, "constraints": limits}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    speeds = [Fraction(repr(device["capability_per_s"])) for device in devices]
    found = []  # (-mini-batches per second, devices, barrier): the order in which plans are preferred
    for numbers in itertools.product(*(range(int(device["count"]) + 1) for device in devices)):
        price = sum(Fraction(repr(d["price_per_hour"])) * n for d, n in zip(devices, numbers, strict=True))
        if not 1 <= sum(numbers) <= min(workers, int(str(limits.get("max_devices", 99)))):
            continue
        if price > Fraction(str(limits.get("max_price_per_hour", 99))):
            continue
        if limits.get("homogeneous") and sum(number > 0 for number in numbers) > 1:
            continue
        used = [(speed, number) for speed, number in zip(speeds, numbers, strict=True) if number]
        for counts in itertools.product(range(1, lookahead + 1), repeat=len(used)):
            if gap is None or max(counts) - min(counts) <= gap:
                barrier = max(count / speed for count, (speed, _) in zip(counts, used, strict=True))
                made = sum(count * number for count, (_, number) in zip(counts, used, strict=True))
                found.append((-made / barrier, sum(numbers), barrier))
    options = ["--lookahead", lookahead, *(() if gap is None else ("--max-gap", gap))]
    result = cli("plan", path, "--strategy", "elastic-bsp", *options, "--json")
    if not found:
        assert result.code == 3
        return
    assert result.code == 0, result.err
    plan, made_of = result.document, result.document["superstep"]
    rate, number, barrier = min(found)
    assert plan["status"] == "optimal"
    assert plan["throughput"] == pytest.approx(float(-rate), rel=1e-12)
    assert plan["iteration_s"] == pytest.approx(float(workers / -rate), rel=1e-12)
    assert made_of["superstep_s"] == pytest.approx(float(barrier), rel=1e-12)
    by_name = {str(device["type"]): speed for device, speed in zip(devices, speeds, strict=True)}
    rows = {row["device_type"]: row["devices"] for row in plan["assignments"]}
    assert sum(rows.values()) == number
    iterations = made_of["iterations"]
    assert set(iterations) == set(rows)
    waits = {name: barrier - count / by_name[name] for name, count in iterations.items()}
    assert min(waits.values()) == 0
    assert made_of["mini_batches"] == sum(count * rows[name] for name, count in iterations.items())
    assert made_of["mini_batches"] / barrier == -rate
    assert made_of["waiting_s"] == pytest.approx(float(max(waits.values())), rel=1e-9)
    total = sum(wait * rows[name] for name, wait in waits.items())
    assert made_of["total_waiting_s"] == pytest.approx(float(total), rel=1e-9)
    assert made_of["iteration_gap"] == max(iterations.values()) - min(iterations.values())
