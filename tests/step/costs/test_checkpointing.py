"""What to compute again under a budget: against all choices there are, and never above the budget."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest

from ddltool.analyzers.step.costs import checkpointing, saving_options
from ddltool.analyzers.step.costs.allocator import CachingAllocator, reserved_bytes
from ddltool.analyzers.step.costs.checkpointing import cheapest
from ddltool.analyzers.step.costs.memory import Recomputation, TensorLifetimes
from ddltool.analyzers.step.costs.saving import Saving
from ddltool.analyzers.step.costs.saving_options import options
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.analyzers.step.costs.traced_lifetimes import lifetimes_of
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
        recompute_s = float(lifetimes.recomputed(Recomputation(lifetimes, saved_ops), lifetimes.seconds(timed)).sum())
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


def played_s(lifetimes: TensorLifetimes, saving: Saving, seconds: Any, size: Any, rate: float) -> float:
    """By a clock that goes through the blocks: what recomputation and waits for one link add to a pass."""
    again = lifetimes.recomputed(Recomputation(lifetimes, saving), seconds)
    copies = [float(size[own].sum()) / rate for own in Recomputation(lifetimes, saving).copied]
    now = link = 0.0
    there, place = dict[int, float](), 0
    for number, block in enumerate(lifetimes.blocks):
        now, place = now + seconds[place : block.last + 1].sum(), block.last + 1
        if block.name in saving.on_host:
            link = there[number] = max(link, now) + copies[number]
        now = max(now, there.get(number - saving.window, 0.0))
    here = dict[int, float]()
    for number, block in reversed(list(enumerate(lifetimes.blocks))):
        now, place = now + seconds[place : block.begins].sum(), block.begins
        now = max(now, here.get(number, 0.0))
        wanted = number - saving.window
        if wanted >= 0 and lifetimes.blocks[wanted].name in saving.on_host:
            link = here[wanted] = max(link, now) + copies[wanted]
        now += again[number]
    return float(now + seconds[place:].sum() - seconds.sum())


@pytest.mark.parametrize("seed", range(6))
def test_no_choice_with_the_host_is_cheaper(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random times, links and budgets; every choice of keep, recompute and offload of every block, played one by one."""
    draw = random.Random(seed)
    layers, window, kept = draw.choice([(3, 1, 3), (4, 1, 2), (5, 2, 1)])
    monkeypatch.setattr(saving_options, "_OPTIONS", kept)
    monkeypatch.setattr(checkpointing, "WINDOWS", (window,))
    lifetimes = lifetimes_of(trace_step(lambda: gpt(layers, 16), mode="training"))
    graph, size, rate = lifetimes.traced.graph, lifetimes.sizes(), 10 ** draw.uniform(9, 10.7)
    times = [1e-6 + flops * draw.uniform(0.5, 2) * 1e-12 for flops in graph.flops]
    timed = graph.with_durations(times, ["rule"] * len(graph))
    seconds, sharding, every = lifetimes.seconds(timed), Sharding(kind="none"), []
    own_options = [list(product([None, *own], [False, True])) for own in options(lifetimes, seconds, size)]
    for choice in product(*own_options):
        named = list(zip(lifetimes.names, choice, strict=True))
        saving = Saving(
            saved_ops={name: kept for name, (kept, _) in named if kept is not None},
            on_host=frozenset(name for name, (_, on_host) in named if on_host),
            window=window,
        )
        if saving.on_host.isdisjoint(lifetimes.names[-window:]):  # nothing would hide the copies of the last
            peak = lifetimes.peak(sharding, "adam", saving).total_bytes
            every.append((peak, played_s(lifetimes, saving, seconds, size, rate)))
    least, most = min(peak for peak, _ in every), max(peak for peak, _ in every)
    for share in (0.0, 0.1, 0.3, 0.5, 0.8, 1.0):
        budget = least + share * (most - least)
        found = cheapest(lifetimes, seconds, sharding, "adam", budget, host_bytes_per_s=rate)
        expected, rounded = min(cost for peak, cost in every if peak <= budget), 10 * layers * seconds.sum() / 1e6
        assert found.cost_s == pytest.approx(expected, abs=rounded)
        assert found.bound_s == pytest.approx(expected, abs=rounded)
        assert found.cost_s == pytest.approx(played_s(lifetimes, found.saving, seconds, size, rate), abs=1e-12)
        added = lifetimes.lengthened(found.saving, timed, size, rate).duration_s.sum() - timed.duration_s.sum()
        assert added == pytest.approx(found.cost_s, abs=1e-12)
        assert lifetimes.peak(sharding, "adam", found.saving).total_bytes == pytest.approx(found.peak_bytes)
        assert found.peak_bytes <= budget
        near = cheapest(lifetimes, seconds, sharding, "adam", budget, host_bytes_per_s=rate, gap=1e-3)
        assert near.bound_s - rounded <= expected <= near.cost_s + rounded
        assert near.peak_bytes <= budget


def test_copies_of_like_blocks_are_spread_evenly() -> None:
    """With a gap, what is near the proven bound for many blocks is found without a search."""
    lifetimes = lifetimes_of(trace_step(lambda: gpt(48, 16), mode="training"))
    nodes = len(lifetimes.traced.graph)
    seconds = lifetimes.seconds(lifetimes.traced.graph.with_durations([1e-6] * nodes, ["rule"] * nodes))
    sharding = Sharding(kind="none")
    least, most = (lifetimes.peak(sharding, "adam", lifetimes.every_block(how)).total_bytes for how in ("full", "none"))
    # The link takes about one and a half times as long for a block's tensors as the device for its passes.
    rate = 0.7 * lifetimes.sizes()[lifetimes.owned[3]].sum() / (seconds.sum() / 48)
    budget = least + 0.25 * (most - least)
    near = cheapest(lifetimes, seconds, sharding, "adam", budget, host_bytes_per_s=rate, gap=0.02, limit_s=0.0)
    alone = cheapest(lifetimes, seconds, sharding, "adam", budget)
    assert near.cost_s - near.bound_s <= 0.02 * seconds.sum()
    assert near.cost_s < 0.8 * alone.cost_s
    assert near.peak_bytes <= budget


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
    for block in (first, second):
        allocator.give_back(block)
    allocator.take(20 * MIB)
    assert allocator.reserved_bytes == 36 * MIB  # the joined segment of 20 MiB is taken whole
    for block in small:
        allocator.give_back(block)
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


def test_the_command_sends_what_blocks_save_to_the_host(cli: Cli) -> None:
    """A budget that recomputation alone keeps at more cost; every block's input or all of it, for which compute waits."""
    asked = ("predict", "zoo:bert_small", "--device", "H100", "--batch-sizes", 64, "--json", "--checkpointing")
    rows = {way: cli(*asked, way).document["rows"][0] for way in ("none", "none:cpu", "full", "full:cpu")}
    budget = f"{0.6 * rows['none']['peak_memory_bytes'] / MIB:.3f}MiB"
    rows |= {way: cli(*asked, way).document["rows"][0] for way in (budget, f"{budget}:cpu")}
    cost = {way: (row["recompute"] or {"recomputed_s": 0, "waits_s": 0}) for way, row in rows.items()}
    for way, row in rows.items():
        added_s = cost[way]["recomputed_s"] + cost[way]["waits_s"]
        assert row["step_time_s"] == pytest.approx(rows["none"]["step_time_s"] + added_s, rel=1e-3)
    blocks = [f"blocks.{number}" for number in range(4)]
    for way in ("none:cpu", "full:cpu"):
        away = [{"module": one, "until": until} for one, until in pairwise(blocks)]
        assert cost[way]["on_host"] == away
    assert cost["none:cpu"]["host_bytes"] > 4 * cost["full:cpu"]["host_bytes"] > 0
    assert cost["none:cpu"]["waits_s"] > 0 == cost["none:cpu"]["recomputed_s"]
    assert rows["none:cpu"]["peak_memory_bytes"] < rows["none"]["peak_memory_bytes"]
    with_host = cost[f"{budget}:cpu"]
    assert with_host["on_host"]
    assert with_host["recomputed_s"] + with_host["waits_s"] < cost[budget]["recomputed_s"]
    told = cli(*asked[:-2], "--checkpointing", "full:cpu").out
    assert "3 save on the host" in " ".join(told.split())
    none, compiled = (cli(*asked, way, "--compile").document["rows"][0] for way in ("none", "none:cpu"))
    assert 0 < compiled["recompute"]["host_bytes"] <= cost["none:cpu"]["host_bytes"]
    assert compiled["step_time_s"] == pytest.approx(none["step_time_s"] + compiled["recompute"]["waits_s"], rel=1e-3)
    assert compiled["peak_memory_bytes"] < none["peak_memory_bytes"]


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
