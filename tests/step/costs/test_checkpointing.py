"""What to compute again under a budget: against all choices there are, and never above the budget."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ddltool.analyzers.step.costs.allocator import CachingAllocator, reserved_bytes
from ddltool.analyzers.step.costs.checkpointing import cheapest, options
from ddltool.analyzers.step.costs.memory import Recomputation, Sharding, TensorLifetimes, lifetimes_of
from ddltool.analyzers.step.tracing.torch_adapter import trace_step
from ddltool.errors import Infeasible
from ddltool.graph import Graph
from tests.conftest import Result
from tests.step.costs.test_memory import gpt

Cli = Callable[..., Result]
MIB = 2**20


@pytest.fixture(scope="module")
def step() -> tuple[TensorLifetimes, Graph]:
    lifetimes = lifetimes_of(trace_step(lambda: gpt(3, 16), mode="training"))
    graph = lifetimes.traced.graph
    seconds = [1e-6 + flops * 1e-12 + size * 1e-11 for flops, size in zip(graph.flops, graph.size_bytes, strict=True)]
    return lifetimes, graph.with_durations(seconds, ["rule"] * len(graph))


@pytest.mark.parametrize("kind", ["none", "fsdp"])
def test_no_choice_within_the_budget_is_cheaper(kind: Any, step: tuple[TensorLifetimes, Graph]) -> None:
    lifetimes, timed = step
    sharding = Sharding(kind=kind, shard=4 if kind == "fsdp" else 1)
    sets = options(lifetimes, lifetimes.seconds(timed), lifetimes.sizes())
    assert all(() in own for own in sets)
    every = []
    for choice in product(*[(None, *own) for own in sets]):
        saved_ops = {block.name: kept for block, kept in zip(lifetimes.blocks, choice, strict=True) if kept is not None}
        recompute_s = float(lifetimes.recompute_s(Recomputation(lifetimes, saved_ops), lifetimes.seconds(timed)).sum())
        every.append((lifetimes.peak(sharding, "adam", saved_ops).total_bytes, recompute_s))
    least, most = min(peak for peak, _ in every), max(peak for peak, _ in every)
    assert least <= lifetimes.peak(sharding, "adam", lifetimes.every_block("full")).total_bytes < most
    for share in (0.0, 0.15, 0.4, 0.65, 0.9, 1.0):
        budget = least + share * (most - least)
        found = cheapest(lifetimes, lifetimes.seconds(timed), sharding, "adam", budget)
        expected = min(seconds for peak, seconds in every if peak <= budget)
        assert found.cost_s == pytest.approx(expected, rel=1e-9, abs=1e-15)
        assert found.gap == pytest.approx(0, abs=1e-9)
        assert lifetimes.peak(sharding, "adam", found.saving).total_bytes == pytest.approx(found.peak_bytes)
        assert found.peak_bytes <= budget
    with pytest.raises(Infeasible, match="the least is"):
        cheapest(lifetimes, lifetimes.seconds(timed), sharding, "adam", least - 1)


def test_segments_are_torchs() -> None:
    """By hand: rounding, the three kinds of segments, splitting, best fit, joining."""
    allocator = CachingAllocator()
    small = [allocator.take(1), allocator.take(MIB), allocator.take(MIB - 512)]
    assert allocator.reserved_bytes == 2 * MIB  # 512 + 1 MiB + the rest but 512
    allocator.take(513)
    assert allocator.reserved_bytes == 4 * MIB
    first, second = allocator.take(MIB + 1), allocator.take(9 * MIB)
    assert allocator.reserved_bytes == 24 * MIB
    allocator.take(11 * MIB - 1)
    assert allocator.reserved_bytes == 36 * MIB
    for address in (first, second):
        allocator.give_back(address)
    allocator.take(20 * MIB)
    assert allocator.reserved_bytes == 36 * MIB  # the joined segment of 20 MiB is taken whole
    for address in small:
        allocator.give_back(address)
    allocator.take(MIB)
    assert allocator.reserved_bytes == 36 * MIB


def test_what_is_cut_does_not_fit_again() -> None:
    """Two halves of a segment with one that lasts between them hold no whole."""
    spans = [(0, 1, 30.0 * MIB), (2, 3, 28.0 * MIB)]
    assert reserved_bytes([], [], spans) == 30 * MIB
    assert reserved_bytes([], [8.0 * MIB], spans) == 60 * MIB  # after the first step a state cuts the segment


def test_too_little_memory_gives_back_what_is_free() -> None:
    spans = [(0, 1, 30.0 * MIB), (2, 3, 40.0 * MIB)]
    assert reserved_bytes([], [], spans) == 70 * MIB
    assert reserved_bytes([], [], spans, limit_bytes=40 * MIB) == 40 * MIB
    assert reserved_bytes([], [], spans, limit_bytes=40 * MIB - 1) is None
    shrinking = [(0, 1, 30.0 * MIB), (2, 3, 12.0 * MIB)]
    assert reserved_bytes([], [], shrinking, limit_bytes=35 * MIB) == 30 * MIB  # the most, not what is left at the end


def test_what_fits_takes_no_more_than_there_is(cli: Cli, tmp_path: Path) -> None:
    """On a device with a little less than the allocator would take of a larger one, it gives segments back."""
    asked = ("predict", "zoo:bert_small", "--batch-sizes", 64, "--json", "--devices-file")
    devices = tmp_path / "devices.json"

    def row(memory_gib: float) -> dict[str, Any]:
        own = {"name": "own", "like": "T4", "memory_gib": memory_gib}
        devices.write_text(json.dumps({"devices": [own]}))
        found: dict[str, Any] = cli(*asked, devices, "--device", "own").document["rows"][0]
        return found

    ample = row(80.0)
    usable = ample["reserved_bytes"] - MIB
    tight = row(usable / 2**30 + 1)
    assert ample["fits"]
    assert tight["fits"]
    assert tight["peak_memory_bytes"] == ample["peak_memory_bytes"] <= tight["reserved_bytes"] <= usable


def test_the_command_keeps_its_budget_and_draws_its_memory(cli: Cli, tmp_path: Path) -> None:
    asked = ("predict", "zoo:bert_small", "--device", "T4", "--batch-sizes", 64, "--json")
    free = cli(*asked).document["rows"][0]
    assert free["recompute"] is None
    budget = 0.7 * free["peak_memory_bytes"]
    document = cli(*asked, "--checkpointing", f"{budget / MIB:.3f}MiB").document
    row = document["rows"][0]
    assert row["peak_memory_bytes"] <= budget + 1
    assert row["memory_low_bytes"] <= row["reserved_bytes"] < row["memory_high_bytes"]
    recomputation = row["recompute"]
    assert 0 < recomputation["recomputed_s"] == pytest.approx(recomputation["lower_bound_s"])
    assert {each["module"] for each in recomputation["modules"]} <= {f"blocks.{number}" for number in range(4)}
    assert row["step_time_s"] == pytest.approx(free["step_time_s"] + recomputation["recomputed_s"], rel=1e-3)
    held = document["devices"]["T4"]["memory"]
    assert max(map(sum, zip(*held["parts"].values(), strict=True))) == pytest.approx(row["peak_memory_bytes"], rel=1e-6)
    assert held["time_s"] == sorted(held["time_s"])
    made = tmp_path / "predicted.json"
    made.write_text(json.dumps(document))
    page = tmp_path / "report.html"
    assert cli("report", made, "-o", page).code == 0
    assert "What one process holds on T4" in page.read_text("utf-8")


def test_what_fits_nowhere_says_what_would(cli: Cli) -> None:
    told = cli("predict", "zoo:bert_small", "--device", "T4", "--checkpointing", "1MiB")
    assert told.code == 3
    assert "no choice of activations to compute again holds the tensors of a step within 1.0 MiB" in told.error_line
    assert "the least is 80.8 MiB" in told.error_line


def test_what_does_not_fit_a_device_says_what_would(cli: Cli, tmp_path: Path) -> None:
    """100 MiB of state and activations of one sample do not fit 82 MiB; half of them do, which is the least change."""
    small = tmp_path / "small.yaml"
    small.write_text("devices: [{name: small, like: T4, memory_gib: 1.08}]")
    asked = ("predict", "zoo:bert_small", "--device", "small", "--devices-file", small)
    told = cli(*asked)
    assert told.code == 3
    found = re.search(r"with --replicas 2 --sharding fsdp a local batch of (\d+) does", told.error_line)
    assert found is not None
    done = cli(
        *asked, "--replicas", 2, "--sharding", "fsdp", "--batch-sizes", f"{found[1]},{int(found[1]) + 1}", "--json"
    )
    assert [row["fits"] for row in done.document["rows"]] == [True, False]
