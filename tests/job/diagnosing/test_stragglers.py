"""Stragglers: runs played through with a known cause, a published what-if, and real processes one of which sleeps."""

from __future__ import annotations

import gzip
import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import bench_stragglers
from ddltool.analyzers.answers.reporting.telemetry_section import stragglers_section
from ddltool.analyzers.job.diagnosing.diagnosis import (
    Feeds,
    _cause,
    _chance_p_value,
    _onset_index,
    _pattern,
    _remedy,
    _sure_share,
    diagnose,
    ends,
    speeds,
    telemetry,
)
from ddltool.analyzers.job.diagnosing.operations import Pipeline, ideal_s, of_frame, read_operations, what_if
from ddltool.analyzers.job.diagnosing.traces import of_traces
from ddltool.analyzers.step.measured.ranks import RankSteps, of_telemetry
from ddltool.analyzers.step.measured.worker_tables import read_speeds
from ddltool.artifacts import load
from ddltool.commands.main import run
from ddltool.errors import InputError
from ddltool.results import StragglersResult
from ddltool.tables import read_table
from tests.helpers import stragglers_workers
from tests.helpers.processes import as_job
from tests.helpers.stragglers_runs import PARTS, TRANSFER_MS, Slow, write_run


@pytest.mark.parametrize("gpu", [False, True])
def test_steps_are_split_as_they_were(tmp_path: Path, gpu: bool) -> None:
    """Every part of every rank and step, and its waiting, to within what a trace cannot tell."""
    paths, truth = write_run(tmp_path, lambda rank, step, parts: 0.0, gpu=gpu, noise=0.2, steps=8)
    found = of_traces(paths)
    assert found.ranks == (0, 1, 2, 3)
    assert found.steps.tolist() == list(range(5, 13))
    close = {"atol": 0.1 if gpu else 1e-3}
    for name in PARTS:
        np.testing.assert_allclose(found.parts[name] * 1e3, truth[name], **close, err_msg=name)
    np.testing.assert_allclose(found.wait_s * 1e3, truth["wait"], **close)
    np.testing.assert_allclose(found.exposed_s * 1e3, TRANSFER_MS, **close)
    np.testing.assert_allclose(found.step_s * 1e3, truth["step"], atol=1e-3)
    np.testing.assert_allclose(found.own_s + found.wait_s + found.exposed_s, found.step_s, atol=1e-9)


def test_clocks_are_set_by_the_ends_of_collectives(tmp_path: Path) -> None:
    offsets = (0.0, 5.0, -40.0, 2.0)
    paths, truth = write_run(tmp_path, noise=0.2, steps=8, offsets_ms=offsets)
    found = of_traces(paths)
    assert found.offsets_s is not None
    np.testing.assert_allclose(np.diff(found.offsets_s) * 1e3, np.diff(offsets), atol=1e-3)
    np.testing.assert_allclose(found.wait_s * 1e3, truth["wait"], atol=1e-3)


HSDP = [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]


@pytest.mark.parametrize("offsets", [(), (0.0, 5.0, -40.0, 2.0)])
def test_groups_of_ranks_meet_among_themselves(tmp_path: Path, offsets: tuple[float, ...]) -> None:
    """HSDP: shards meet first, then replicas; nobody meets all the others at once, and the clocks are set all the same."""

    def slow(rank: int, step: int, parts: dict[str, float]) -> float:
        return 12.0 if rank == 3 else 0.0

    paths, truth = write_run(tmp_path, slow, noise=0.2, gpu=True, offsets_ms=offsets, groups=HSDP)
    found = of_traces(paths)
    assert found.offsets_s is not None
    np.testing.assert_allclose(np.diff(found.offsets_s) * 1e3, np.diff(offsets or np.zeros(4)), atol=1e-3)
    np.testing.assert_allclose(found.wait_s * 1e3, truth["wait"], atol=0.1)
    np.testing.assert_allclose(found.exposed_s * 1e3, 2 * TRANSFER_MS, atol=0.1)
    assert found.remarks == ()
    assert [one.rank for one in diagnose(found, "traces").findings] == [3]


def backward_sleeps(rank: int, step: int, parts: dict[str, float]) -> float:
    return 12.0 if rank == 2 and step >= 6 else 0.0


def slow_device(rank: int, step: int, parts: dict[str, float]) -> float:
    if rank == 1:
        for name in parts:
            parts[name] *= 1.5
    return 0.0


def slow_input(rank: int, step: int, parts: dict[str, float]) -> float:
    parts["input"] += 15.0 * (rank == 3)
    return 0.0


def slow_host(rank: int, step: int, parts: dict[str, float]) -> float:
    parts["host"] += 9.0 * (rank == 0)
    return 0.0


def long_sequences(rank: int, step: int, parts: dict[str, float]) -> float:
    if rank == 1:
        parts["forward"] *= 1.6
        parts["backward"] *= 1.6
    return 0.0


def pauses(rank: int, step: int, parts: dict[str, float]) -> float:
    return 60.0 if rank == 1 and step % 4 == 2 else 0.0


def heats_up(rank: int, step: int, parts: dict[str, float]) -> float:
    if rank == 3:
        parts["forward"] *= 1 + 0.05 * step
        parts["backward"] *= 1 + 0.05 * step
        parts["optimizer"] *= 1 + 0.05 * step
    return 0.0


CASES: dict[str, tuple[Slow, int, str, str, str]] = {
    "a backward pass that stands still": (backward_sleeps, 2, "slow device", "persistent", "backward"),
    "a slow device": (slow_device, 1, "slow device", "persistent", "compute"),
    "a slow loader": (slow_input, 3, "slow input", "persistent", "input"),
    "a slow host": (slow_host, 0, "slow host", "persistent", "host"),
    "long sequences": (long_sequences, 1, "uneven work", "persistent", "compute"),
    "pauses": (pauses, 1, "pauses", "periodic", "backward"),
    "heat": (heats_up, 3, "thermal drift", "persistent", "compute"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_injected_cause_is_found(tmp_path: Path, name: str) -> None:
    slow, rank, cause, pattern, part = CASES[name]
    paths, truth = write_run(tmp_path, slow, noise=0.03)
    found = diagnose(of_traces(paths), "traces")
    assert [(one.rank, one.cause, one.pattern, one.part) for one in found.findings] == [(rank, cause, pattern, part)]
    (finding,) = found.findings
    own = sum(truth[each] for each in PARTS)
    excess = own[rank] - np.median(np.delete(own, rank, axis=0), axis=0)
    slow_steps = excess > max(0.05 * truth["step"].mean(), 0.2 * excess.max())
    assert finding.slow_steps == slow_steps.sum()
    assert finding.excess_s * 1e3 == pytest.approx(excess[slow_steps].mean(), rel=0.02)
    # What the step would be is what the simulator gives, played again with the rank at the others' pace.
    own[rank] = np.median(np.delete(own, rank, axis=0), axis=0)
    without = (own.max(axis=0) + TRANSFER_MS).mean()
    assert found.splits[rank].step_if_median_s * 1e3 == pytest.approx(without, rel=0.03)
    assert finding.share_of_run == pytest.approx(1 - without / truth["step"].mean(), abs=0.03)
    assert f"Rank {rank} " in found.verdict
    if name.startswith("a backward"):
        assert finding.since_step == 11
        assert "since step 11" in found.verdict
    if pattern == "periodic":
        assert finding.every_steps == 4


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_clean_run_names_nobody(tmp_path: Path, seed: int, gpu: bool) -> None:
    found = diagnose(of_traces(write_run(tmp_path, noise=0.05, seed=seed, gpu=gpu)[0]), "traces")
    assert found.findings == []
    assert found.verdict.startswith("No rank holds the others up")
    assert found.slowdown < 1.15


def test_on_a_gpu_what_stands_still_is_the_host(tmp_path: Path) -> None:
    found = diagnose(of_traces(write_run(tmp_path, backward_sleeps, gpu=True)[0]), "traces")
    assert [(one.rank, one.cause) for one in found.findings] == [(2, "slow host")]


@pytest.mark.parametrize("more", [1.0, 1.6])
def test_shapes_tell_uneven_work_from_a_slow_device(tmp_path: Path, more: float) -> None:
    """Both have a slow optimizer here, so that only the shapes can tell."""
    paths, _ = write_run(tmp_path, slow_device, elements=lambda rank, step: round(100 * (more if rank == 1 else 1)))
    found = diagnose(of_traces(paths), "traces")
    assert [one.cause for one in found.findings] == ["uneven work" if more > 1 else "slow device"]


@pytest.mark.parametrize("slow", range(4))
def test_a_slow_link_is_seen_by_its_rank_and_the_one_that_this_sends_to(tmp_path: Path, slow: int) -> None:
    """As in real runs at 20 Mbit/s, with others late by turns; where all are late by turns nobody's link is slow."""
    chance = np.random.default_rng(slow)
    by_turns = np.abs(chance.normal(0, 2.0, (4, 20)))
    at = {slow: 6.0, (slow - 1) % 4: 9.0}  # gloo's ring sends to the rank before
    paths, _ = write_run(tmp_path / "a", late=lambda rank, step: by_turns[rank, step] + at.get(rank, 0.0))
    found = diagnose(of_traces(paths), "traces")
    assert [(one.rank, one.cause) for one in found.findings] == [(slow, "slow link")]
    paths, _ = write_run(tmp_path / "b", late=lambda rank, step: 4 * by_turns[rank, step])
    assert diagnose(of_traces(paths), "traces").findings == []
    if slow == 2:  # one end alone
        paths, _ = write_run(tmp_path / "c", late=lambda rank, step: 8.0 * (rank == slow))
        assert [(one.rank, one.cause) for one in diagnose(of_traces(paths), "traces").findings] == [(2, "slow link")]


def run_of(compute: np.ndarray) -> RankSteps:
    """The run in which ranks compute that long (R, K) and wait for the slowest."""
    still = np.full_like(compute, 1e-3)
    return RankSteps(
        ranks=tuple(range(len(compute))),
        nodes=("",) * len(compute),
        steps=np.arange(compute.shape[1]),
        parts={"compute": compute, "host": still},
        wait_s=compute.max(axis=0) - compute,
        exposed_s=still,
        step_s=np.broadcast_to(compute.max(axis=0) + 2e-3, compute.shape),
    )


def median(values: Iterable[float]) -> float:
    """The middle of a few numbers, or the mean of the two in the middle."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


@given(st.integers(2, 5), st.integers(1, 9), st.integers(0, 10_000))
def test_the_what_ifs_are_those_by_hand(ranks: int, steps: int, seed: int) -> None:
    """Step by step and rank by rank, with numbers of one figure, so that many are alike."""
    chance = np.random.default_rng(seed)
    parts = {name: chance.integers(1, 9, (ranks, steps)) / 8 for name in ("input", "forward", "backward")}
    wait, exposed = chance.integers(0, 9, (2, ranks, steps)) / 8
    own = sum(parts.values())
    found = diagnose(
        RankSteps(
            **{"ranks": tuple(range(ranks)), "nodes": ("",) * ranks, "steps": np.arange(steps), "parts": parts},
            **{"wait_s": wait, "exposed_s": exposed, "step_s": own + wait + exposed},
        ),
        "run",
    )
    whole = [median((own + wait + exposed)[:, step]) for step in range(steps)]
    rest = [max(0.0, whole[step] - max(own[:, step])) for step in range(steps)]
    average = {name: part.sum() / part.size for name, part in parts.items()}
    ideal = sum(average.values()) + median(rest)
    assert found.step_s == pytest.approx(sum(whole) / steps)
    assert (found.ideal_step_s, found.slowdown) == pytest.approx((ideal, sum(whole) / steps / ideal))
    assert found.waiting_share == pytest.approx(wait.sum() / ranks / sum(whole))
    for name, part in parts.items():
        alone = sum(max(part[:, step]) for step in range(steps)) / steps + ideal - average[name]
        assert found.classes[name] == pytest.approx(alone / ideal)
    slowest = max(range(ranks), key=lambda rank: own[rank].sum())  # 3 % of so few is one
    if found.slowdown > 1.02 and [one.sum() for one in own].count(own[slowest].sum()) == 1:
        without = own.copy()
        without[slowest] = sum(average.values())
        left = sum(max(without[:, step]) + rest[step] for step in range(steps)) / steps
        assert found.m_w == pytest.approx((found.step_s - left) / (found.step_s - ideal))
    for rank, split in enumerate(found.splits):
        saved = 0.0
        for step in range(steps):
            others = [own[other, step] for other in range(ranks) if other != rank]
            mine = min(own[rank, step], median(others))
            saved += max(0.0, whole[step] - max(*others, mine) - rest[step])
        assert split.step_if_median_s == pytest.approx((sum(whole) - saved) / steps)
        assert split.parts_s == pytest.approx({name: sum(part[rank]) / steps for name, part in parts.items()})
        assert (split.wait_s, split.exposed_s) == pytest.approx((sum(wait[rank]) / steps, sum(exposed[rank]) / steps))
        assert split.step_s == pytest.approx(sum((own + wait + exposed)[rank]) / steps)


def test_who_costs_most_comes_first() -> None:
    compute = np.full((8, 60), 0.1)
    compute[1, ::2], compute[3, 1::2] = 0.3, 0.4
    found = diagnose(run_of(compute), "run")
    assert [one.rank for one in found.findings] == [3, 1]
    assert found.verdict == found.findings[0].sentence


def test_remedies_are_those_by_hand() -> None:
    """Ranks that take 0.1 and 0.2 s would take 2 / 15 each: 66.7 ms less of 202; of few steps nothing is replayed."""
    feeds, gain = Feeds(speeds="s.csv", ends="e.csv", telemetry="t.jsonl"), (0.2 - 2 / 15) / 0.202
    for steps, (share, typical) in itertools.product((20, 21), ((0.5, 0.1), (0.1, 0.5), (0.2, 0.1), (0.1, 0.2))):
        run, won = run_of(np.repeat([[0.1], [0.2]], steps, axis=1)), min(gain, max(share, typical))
        balance = (
            "ddltool plan job.yaml --strategy lb-bsp --telemetry t.jsonl" if steps == 20 else "ddltool balance s.csv"
        )
        for cause in ("slow device", "uneven work", "thermal drift"):
            follow = (
                " and follow it while it runs with ddltool.runtime.balance" if cause[0] == "t" and steps > 20 else ""
            )
            said, predicted, command = _remedy(run, cause, share, typical, feeds)
            assert said == f"Balanced batches would win {won:.0%} back (predicted){follow}: {balance}"
            assert (predicted, command) == (pytest.approx(won), balance)
        for cause, way, tool in (
            ("pauses", "Collect garbage", "barrier e.csv"),
            ("slow input", "Give its DataLoader", "plan job.yaml --telemetry t.jsonl"),
            ("slow host", "Look at what else", "plan job.yaml --telemetry t.jsonl"),
        ):
            said, predicted, command = _remedy(run, cause, share, typical, feeds)
            assert said.startswith(way)
            assert said.endswith(f"up to {share:.0%} (predicted). What else would help: ddltool {tool}")
            assert (predicted, command) == (share, f"ddltool {tool}")


def test_chance_and_confidence_are_those_of_all_draws() -> None:
    """Every draw of a slowest rank, and every draw of steps with replacement, in place of two thousand by chance."""
    gains = np.array([[0.4, 0.3, 0.0, 0.2, 0.5], [0.0, 0.0, 0.3, 0.0, 0.0], [0.0, 0.1, 0.0, 0.0, 0.0]])
    step_s = np.array([1.0, 1.2, 0.9, 1.1, 1.3])
    worst, as_much = gains.max(axis=0), 0
    for drawn in itertools.product(range(3), repeat=5):
        costs = [sum(worst[step] for step in range(5) if drawn[step] == rank) for rank in range(3)]
        as_much += max(costs) >= gains[0].sum() - 1e-9
    assert _chance_p_value(gains, 0) == pytest.approx(as_much / 3**5, abs=0.012)
    extra = gains[0] - [median(gains[1:, step]) for step in range(5)]
    shares = sorted(
        extra[list(drawn)].sum() / step_s[list(drawn)].sum() for drawn in itertools.product(range(5), repeat=5)
    )
    assert _sure_share(gains, 0, step_s) == pytest.approx(shares[len(shares) // 20], abs=0.012)


@given(st.lists(st.booleans(), min_size=1, max_size=14).filter(any))
def test_onset_and_pattern_are_those_by_hand(slow: list[bool]) -> None:
    def score(start: int) -> float:
        return sum(slow[start:]) ** 1.5 / len(slow[start:])

    places = [step for step, is_slow in enumerate(slow) if is_slow]
    best = max(map(score, places))
    onset = _onset_index(np.array(slow))
    assert onset == next(step for step in places if score(step) > best - 1e-9)
    since, gaps = slow[onset:], [after - before for before, after in itertools.pairwise(places)]
    mean = sum(gaps) / max(len(gaps), 1)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / max(len(gaps), 1)) ** 0.5
    if sum(since) >= 3 and sum(since) >= 0.6 * len(since) - 1e-9:
        wanted: tuple[str, int | None] = ("persistent", None)
    else:
        wanted = ("periodic", round(mean)) if len(gaps) >= 2 and spread <= mean / 4 + 1e-12 else ("transient", None)
    assert _pattern(np.array(slow), onset) == wanted


PASS_S = {"input": 0.01, "forward": 0.1, "backward": 0.2, "optimizer": 0.05, "host": 0.01}


@pytest.mark.parametrize(
    ("slower", "beside", "wanted"),
    [
        ({"input": 9.0}, {}, "slow input"),
        ({"host": 9.0}, {}, "slow host"),
        ({"optimizer": 2.0}, {}, "slow device"),
        # nothing else is slower: more work; of the optimizer up to 0.35 of the passes' excess counts as none
        ({"forward": 1.6, "backward": 1.6}, {}, "uneven work"),
        ({"forward": 1.6, "backward": 1.6, "optimizer": 1.2}, {}, "uneven work"),
        ({"forward": 1.6, "backward": 1.6, "optimizer": 1.22}, {}, "slow device"),
        ({"forward": 1.6, "backward": 1.25}, {}, "uneven work"),  # 0.25 is more than 0.4 of 0.6
        ({"forward": 1.6, "backward": 1.23}, {}, "slow device"),
        # work that is counted: by more than 2 %, and 0.3 of the time's excess
        ({"forward": 1.5, "backward": 1.5}, {"work": 1.16}, "uneven work"),
        ({"forward": 1.5, "backward": 1.5}, {"work": 1.14}, "slow device"),
        ({"forward": 1.05, "backward": 1.05}, {"work": 1.021}, "uneven work"),
        ({"forward": 1.05, "backward": 1.05}, {"work": 1.019}, "slow device"),
        # standing still: 0.3 of the excess of 0.18 s at least
        ({"forward": 1.6, "backward": 1.6}, {"gap": 0.31 * 0.18}, "slow device"),
        ({"forward": 1.6, "backward": 1.6}, {"gap": 0.29 * 0.18}, "uneven work"),
        # now and then: in 40 % of the steps, and 0.6 of the excess of 0.18 s standing still
        ({"forward": 1.6, "backward": 1.6}, {"gap": 0.61 * 0.18, "every": [0, 1, 5, 8]}, "pauses"),
        ({"forward": 1.6, "backward": 1.6}, {"gap": 0.59 * 0.18, "every": [0, 1, 5, 8]}, "slow device"),
        ({"forward": 1.6, "backward": 1.6}, {"gap": 0.61 * 0.18, "every": [0, 1, 3, 5, 8]}, "slow device"),
        # telemetry has no gaps: alone, and without more work
        ({"forward": 1.6, "backward": 1.6}, {"every": [0, 3, 5, 8]}, "pauses"),
        ({"forward": 1.6, "backward": 1.6}, {"every": [0, 1, 5, 8]}, "uneven work"),
        ({"forward": 1.6, "backward": 1.6}, {"every": [0, 3, 5, 8], "work": 1.5}, "uneven work"),
        ({"forward": 1.6, "backward": 1.6}, {"every": [0, 3, 5, 8], "work": 1.01}, "pauses"),
    ],
)
def test_a_cause_is_that_of_its_rule(slower: dict[str, float], beside: dict[str, Any], wanted: str) -> None:
    """Rank 0 of three, in ten steps: in those that are slow each part takes so many times as long as the others'."""
    slow = np.isin(np.arange(10), beside.get("every", range(10)))
    grown = {name: np.where(slow, slower.get(name, 1.0), 1.0) for name in PASS_S}
    parts = {
        name: np.stack([took * grown[name], np.full(10, took), np.full(10, took)]) for name, took in PASS_S.items()
    }
    still = np.zeros((3, 10))
    work = gap = None
    if "work" in beside:
        work = 1.0 + still
        work[0, slow] = beside["work"]
    if "gap" in beside:
        gap = still.copy()
        gap[0, slow] = beside["gap"]
    run_ = RankSteps(
        **{"ranks": (0, 1, 2), "nodes": ("",) * 3, "steps": np.arange(10), "parts": parts, "work": work, "gap_s": gap},
        **{"wait_s": still, "exposed_s": still, "step_s": still},
    )
    excess = sum(parts[name][0] - parts[name][1] for name in PASS_S)
    pattern = "transient" if "every" in beside else "persistent"
    most = max(PASS_S, key=lambda name: PASS_S[name] * (slower.get(name, 1.0) - 1))
    assert _cause(run_, 0, excess, slow, pattern, most) == wanted


def test_a_long_first_step_does_not_hide_what_batches_would_win() -> None:
    """One rank of four three times as slow: 48 ms become 19.2 ms, whatever the first step was."""
    compute = np.full((4, 50), 0.016)
    compute[1] = 0.048
    compute[2, 0] = 3.0
    (found,) = diagnose(run_of(compute), "run").findings
    assert found.predicted_gain == pytest.approx(1 - (19.2 + 2) / (48 + 2), rel=0.01)


@given(
    seed=st.integers(0, 10_000),
    rank=st.integers(0, 3),
    steps=st.sampled_from([16, 24, 40]),
    more=st.floats(0.5, 3.0),
    kind=st.sampled_from(["level", "heat", "clean"]),
)
def test_heat_is_told_from_a_level_and_nobody_from_both(
    seed: int, rank: int, steps: int, more: float, kind: str
) -> None:
    """Work that is half as long again now and then, as on a busy machine; the excess stands still or grows from nothing."""
    chance = np.random.default_rng(seed)
    compute = 0.02 * (1 + 0.04 * np.abs(chance.standard_normal((4, steps))))
    compute *= 1 + 0.5 * (chance.random((4, steps)) < 0.05)
    compute[rank] *= 1 + {"level": more, "heat": 2 * more * np.arange(steps) / steps, "clean": 0.0}[kind]
    found = diagnose(run_of(compute), "run").findings
    wanted = {"level": [(rank, "slow device")], "heat": [(rank, "thermal drift")], "clean": []}[kind]
    assert [(one.rank, one.cause) for one in found] == wanted


def test_balanced_batches_would_win_what_they_win(tmp_path: Path) -> None:
    """The prediction against the simulator, played again with batches by the ranks' speeds."""

    def slower(rank: int, step: int, parts: dict[str, float]) -> float:
        for name in ("forward", "backward"):
            parts[name] *= 2.0 if rank == 1 else 1.0
        return 0.0

    def balanced(rank: int, step: int, parts: dict[str, float]) -> float:
        share = (0.5 if rank == 1 else 1.0) / 3.5 * 4
        for name in ("forward", "backward"):
            parts[name] *= share * (2.0 if rank == 1 else 1.0)
        return 0.0

    paths, before = write_run(tmp_path / "a", slower, steps=30)
    run_ = of_traces(paths)
    (finding,) = diagnose(run_, "traces").findings
    after = write_run(tmp_path / "b", balanced, steps=30)[1]
    assert finding.predicted_gain == pytest.approx(1 - after["step"].mean() / before["step"].mean(), abs=0.02)
    assert finding.command == "ddltool balance speeds.csv"
    fast, slow = (np.mean([row[2] for row in speeds(run_, 32) if row[1] == rank]) for rank in (0, 1))
    assert fast / slow == pytest.approx(2.0, rel=0.05)


def test_the_feeds_are_what_other_commands_read(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_run(tmp_path / "traces", slow_device, steps=45)
    fed = tmp_path / "fed"
    assert run(["stragglers", str(tmp_path / "traces"), "--batch-size", "32"]) == 2
    assert "--batch-size: needs --feed" in capsys.readouterr().err
    assert run(["stragglers", str(tmp_path / "traces"), "--batch-size", "32", "--feed", str(fed)]) == 0
    printed = capsys.readouterr().out
    assert "Rank 1 is 1.50x slower in compute in every step" in printed
    assert (
        f"ddltool balance {fed}/speeds.csv" in printed.replace("\n", " ").replace("fed /", "fed/")
        or "balance" in printed
    )
    recorded = read_speeds(fed / "speeds.csv", print)
    assert recorded.speed[:, 1].mean() == pytest.approx(recorded.speed[:, 0].mean() / 1.5, rel=0.02)
    assert recorded.speed[:, 0].mean() == pytest.approx(32 / 24e-3, rel=0.05)
    assert run(["barrier", str(fed / "ends.csv"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workers"] == 4
    assert read_speeds(fed / "telemetry.jsonl", print).speed == pytest.approx(recorded.speed, rel=1e-6)
    assert run(["balance", str(fed / "telemetry.jsonl"), "--predictor", "last", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predictors"]["last"]["iteration_time_ratio"] < 0.85
    assert run(["stragglers", str(fed / "telemetry.jsonl"), "--json", "-o", str(tmp_path / "found.json")]) == 0
    again = json.loads(capsys.readouterr().out)
    assert [(one["rank"], one["cause"]) for one in again["findings"]] == [(1, "slow device")]
    assert stragglers_section(load(tmp_path / "found.json", StragglersResult), "found.json").blocks
    packed = tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress((fed / "telemetry.jsonl").read_bytes()))
    assert run(["stragglers", str(packed), "--feed", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "telemetry.jsonl").read_text() == (fed / "telemetry.jsonl").read_text()


def test_ends_go_on_from_one_moment(tmp_path: Path) -> None:
    found = of_traces(write_run(tmp_path, slow_device, steps=5)[0])
    rows = ends(found)
    last = {rank: max(end for one, _, end in rows if one == rank) for rank in range(4)}
    assert len({round(end, 9) for end in last.values()}) == 1
    first = [end for rank, step, end in rows if step == 0]
    assert first[1] < first[0]  # the slow rank began earlier


def test_telemetry_with_uneven_batches_is_uneven_work(tmp_path: Path) -> None:
    found = of_traces(write_run(tmp_path, long_sequences)[0])
    rows = [row.model_dump() for row in telemetry(found, 32)]
    for row in rows:
        row |= {"batch": 51 if row["rank"] == 1 else 32, "total_batch": 32 * row["world_size"] + 19}
    result = diagnose(of_telemetry(pd.DataFrame(rows), "telemetry.jsonl"), "telemetry")
    assert [(one.rank, one.cause) for one in result.findings] == [(1, "uneven work")]


@pytest.mark.parametrize("length", [1, 3])
def test_telemetry_tells_single_pauses_from_a_slow_spell(tmp_path: Path, length: int) -> None:
    def slow(rank: int, step: int, parts: dict[str, float]) -> float:
        return 60.0 if rank == 1 and step % (5 if length == 1 else 12) < length else 0.0

    found = of_traces(write_run(tmp_path, slow, steps=36)[0])
    rows = pd.DataFrame([row.model_dump() for row in telemetry(found, 32)])
    result = diagnose(of_telemetry(rows, "telemetry.jsonl"), "telemetry")
    assert [(one.rank, one.cause) for one in result.findings] == [(1, "pauses" if length == 1 else "slow device")]


def test_what_is_no_run_of_ranks_is_refused(tmp_path: Path) -> None:
    paths, _ = write_run(tmp_path / "a", steps=3)
    with pytest.raises(InputError, match="is the trace of one rank; give one trace for each rank"):
        of_traces(paths[:1])
    other = write_run(tmp_path / "b", steps=3)[0]
    with pytest.raises(InputError, match=r"is a second trace of rank 1; give one trace for each rank"):
        of_traces([*paths, other[1]])
    assert run(["stragglers", str(paths[0]), str(paths[0])]) == 2
    (tmp_path / "empty").mkdir()
    assert run(["stragglers", str(tmp_path / "empty")]) == 2
    (tmp_path / "empty" / "loop.json").symlink_to(tmp_path / "empty" / "loop.json")
    assert run(["stragglers", str(tmp_path / "empty")]) == 2


def test_collectives_that_others_lack_are_said(tmp_path: Path) -> None:
    paths, _ = write_run(tmp_path, steps=3)
    document = json.loads(paths[0].read_text())
    extra = next(one for one in document["traceEvents"] if one["name"] == "gloo:all_reduce")
    document["traceEvents"].append({**extra, "name": "gloo:broadcast"})
    paths[0].write_text(json.dumps(document))
    assert any("1 of 4 collectives are not in all their ranks' traces" in said for said in of_traces(paths).remarks)


# ---------------------------------------------------------------- operations of pipeline-parallel jobs


def pipeline_rows(
    slow: dict[tuple[int, int], float], stages: int = 3, replicas: int = 2, batches: int = 4
) -> pd.DataFrame:
    """One-forward-one-backward by hand: each stage's compute in order, transfers of no time, starts played through."""
    rows: list[dict[str, Any]] = []
    for replica in range(replicas):
        ends: dict[tuple[str, int, int], float] = {}
        order = {stage: _schedule(stage, stages, batches) for stage in range(stages)}
        free, place = dict.fromkeys(range(stages), 0.0), dict.fromkeys(range(stages), 0)
        while any(place[stage] < len(order[stage]) for stage in range(stages)):
            for stage in range(stages):
                if place[stage] == len(order[stage]):
                    continue
                way, number = order[stage][place[stage]]
                before = (way, number, stage - 1 if way == "forward" else stage + 1)
                edge = before[2] in (-1, stages)
                if not edge and before not in ends:
                    continue
                begin = max(free[stage], 0.0 if edge else ends[before])
                length = (1.0 if way == "forward" else 2.0) * slow.get((replica, stage), 1.0)
                common = {
                    **{"dp_rank": replica, "stage": stage, "rank": replica + replicas * stage, "step": 7},
                    **{"mc": 0, "gmc": stage},
                }
                rows.append(
                    {**common, "optype": f"{way}-compute", "start_ts": begin, "duration": length, "seq_id": number}
                )
                if not edge:
                    rows.append(
                        {**common, "optype": f"{way}-recv", "start_ts": begin, "duration": 0.0, "seq_id": number}
                    )
                if (stage < stages - 1) if way == "forward" else stage > 0:
                    at = {
                        **common,
                        "optype": f"{way}-send",
                        "start_ts": begin + length,
                        "duration": 0.0,
                        "seq_id": number,
                    }
                    rows.append(at)
                ends[way, number, stage] = free[stage] = begin + length
                place[stage] += 1
        for stage in range(stages):
            common = {
                **{"dp_rank": replica, "stage": stage, "rank": replica + replicas * stage, "step": 7},
                **{"mc": 0, "gmc": stage},
            }
            rows.append({**common, "optype": "optimizer", "start_ts": free[stage], "duration": 0.5, "seq_id": 0})
    return pd.DataFrame(rows)


def _schedule(stage: int, stages: int, batches: int) -> list[tuple[str, int]]:
    ahead = min(stages - stage, batches)
    order = [("forward", number) for number in range(ahead)]
    for number in range(batches):
        order.append(("backward", number))
        if ahead + number < batches:
            order.append(("forward", ahead + number))
    return order


def test_a_pipeline_is_played_as_it_ran() -> None:
    """Without delays the play must give the makespan of the table itself, which another loop made."""
    for slow in ({}, {(1, 1): 2.0}, {(0, 2): 1.5}):
        frame = pipeline_rows(slow)
        operations = of_frame(frame, "rows")
        pipeline = Pipeline(operations)
        wanted = (frame["start_ts"] + frame["duration"]).max()
        assert pipeline.play(pipeline.transfer_s()).tolist() == pytest.approx([wanted])


def test_a_slow_worker_explains_the_slowdown() -> None:
    """M_W by the loop that made the table: compute at its mean (7/6) everywhere, and of the slow worker alone."""
    found = what_if(of_frame(pipeline_rows({(1, 1): 2.0}), "rows"))
    (finding,) = found.findings
    everywhere = {(replica, stage): 7 / 6 for replica in range(2) for stage in range(3)}
    rows = [pipeline_rows(slow) for slow in ({(1, 1): 2.0}, everywhere, {(1, 1): 7 / 6})]
    actual, ideal, without = ((frame["start_ts"] + frame["duration"]).max() for frame in rows)
    assert found.slowdown == pytest.approx(actual / ideal)
    assert (finding.rank, finding.cause) == (3, "slow device")
    assert finding.ratio == pytest.approx(2.0)
    assert found.m_w == pytest.approx((actual - without) / (actual - ideal))
    assert max(found.workers, key=found.workers.__getitem__) == "data-parallel rank 1"


def test_a_slow_last_stage_is_told_from_a_slow_worker() -> None:
    found = what_if(of_frame(pipeline_rows({(0, 2): 1.6, (1, 2): 1.6}), "rows"))
    assert [one.cause for one in found.findings] == ["slow stage"]
    assert found.m_s is not None
    assert found.m_s > 0.5


def test_steps_that_are_not_alike_are_left_out() -> None:
    """More microbatches in one step, a rank that comes late, a collection in some: the usual steps say what they say alone."""
    usual = pipeline_rows({(1, 1): 2.0})
    steps = [usual.assign(step=step) for step in range(4, 8)]
    collect = usual[usual["optype"] == "optimizer"].assign(step=5, optype="gc", duration=0.0)
    late = usual[usual["dp_rank"] == 0].assign(step=2)
    ramp = pipeline_rows({(1, 1): 2.0}, batches=8).assign(step=3)
    table = pd.concat([late, ramp, *steps, collect]).assign(mc=lambda rows: rows["mc"].where(rows["optype"] != "gc"))
    operations = of_frame(table, "rows")
    assert operations.steps == 4
    found, alone = what_if(operations), what_if(of_frame(usual, "rows"))
    assert (found.slowdown, found.m_w) == (pytest.approx(alone.slowdown), pytest.approx(alone.m_w))


def test_a_transfer_recorded_after_the_optimizer_is_no_part_of_the_step() -> None:
    frame = pipeline_rows({})
    last = frame[frame["optype"] == "optimizer"]["start_ts"].max() + 5.0
    idle = frame[(frame["optype"] == "forward-recv") & (frame["stage"] == 1)].drop_duplicates("dp_rank")
    frame = pd.concat([frame, idle.assign(start_ts=last, duration=30.0, seq_id=99)])
    assert what_if(of_frame(frame, "rows")).step_s == pytest.approx(what_if(of_frame(pipeline_rows({}), "rows")).step_s)


def test_equal_workers_have_no_slowdown() -> None:
    operations = of_frame(pipeline_rows({}), "rows")
    found = what_if(operations)
    assert found.slowdown == pytest.approx(1.0)
    assert found.findings == []
    np.testing.assert_allclose(ideal_s(operations, operations.duration_s), operations.duration_s)


def test_tables_that_are_no_steps_are_refused() -> None:
    frame = pipeline_rows({})
    with pytest.raises(InputError, match="has 'tea'; known are"):
        of_frame(frame.assign(optype="tea"), "rows")
    with pytest.raises(InputError, match="has no step with every operation on every rank"):
        of_frame(frame[(frame["dp_rank"] == 0) | (frame["optype"] != "optimizer")], "rows")
    with pytest.raises(InputError, match=r"row 1:duration: is nan"):
        of_frame(frame.assign(duration=np.nan), "rows")


def test_the_published_what_if(shared_data: Path) -> None:
    """ByteDance's own answers for the trace that its study ships (Apache-2.0), to a hundredth of a percent."""
    pytest.importorskip("pyarrow")
    folder = shared_data / "truth" / "stragglers"
    if not (folder / "bytedance_trace-AR.parquet").is_file():
        pytest.skip("no published trace here")
    answer = json.loads((folder / "bytedance_result-AR.json").read_text())
    mine = what_if(read_operations(folder / "bytedance_trace-AR.parquet"))
    assert mine.slowdown == pytest.approx(answer["blocking_slowdown"], rel=1e-4)
    assert mine.m_w == pytest.approx(json.loads((folder / "bytedance_mw-AR.json").read_text())["Mw"], abs=1e-4)
    assert mine.m_s == pytest.approx(json.loads((folder / "bytedance_ms-AR.json").read_text())["Ms"], abs=1e-4)
    for name, value in answer["blocking_decompose_by_optype"].items():
        ours = name.replace("-pp-comm", " transfers")
        assert mine.classes[ours] == pytest.approx(value, rel=1e-4)
    for mine_by, name, label in ((mine.stages, "stage", "stage"), (mine.workers, "dp_rank", "data-parallel rank")):
        for number, value in answer[f"blocking_decompose_by_{name}"].items():
            assert mine_by[f"{label} {number}"] == pytest.approx(value, rel=1e-4)
    assert [(one.rank, one.cause) for one in mine.findings] == [(0, "slow device")]


# ---------------------------------------------------------------- real processes


@pytest.mark.slow
def test_a_watch_tells_while_the_job_runs(tmp_path: Path) -> None:
    """Three ranks, one slow from step 25 on: said once by rank 0 alone, as the command says it of the file afterwards."""
    ended = as_job(3, tmp_path, stragglers_workers.train_watched, 1, 70)
    assert [code for code, _, _ in ended] == [0, 0, 0], ended
    told = [line for line in ended[0][2].splitlines() if line.startswith("steps ")]
    assert re.search(r"Rank 1 (takes .* longer|is .*x slower) in compute", told[-1]), told
    assert all("Rank" not in error for _, _, error in ended[1:])
    found = diagnose(of_telemetry(read_table(tmp_path / "telemetry.jsonl"), "telemetry.jsonl"), "telemetry")
    assert [(one.rank, one.cause, one.part) for one in found.findings] == [(1, "slow device", "compute")]
    assert abs(found.findings[0].since_step - 25) <= 1


@pytest.mark.slow
def test_a_rank_that_sleeps_in_its_backward_pass_is_found(tmp_path: Path) -> None:
    """Two processes over gloo: on both a step takes as long, and the traces say who sleeps."""
    (folder,) = bench_stragglers.run_cases(tmp_path, 2, [("backward", 1)])
    assert bench_stragglers.named(folder) == [(1, "slow device")]
    run_ = of_traces(sorted(folder.glob("*.json")))
    assert np.median(run_.step_s[0]) == pytest.approx(np.median(run_.step_s[1]), rel=0.25)
    slept = np.median(run_.parts["backward"][1] - run_.parts["backward"][0])
    assert slept == pytest.approx(bench_stragglers.SLEEP_S, rel=0.5)


@pytest.mark.slow
def test_injected_causes_are_found_in_real_runs(tmp_path: Path) -> None:
    """Four ranks, each cause on one of them, and a clean run; a busy machine may hide one."""
    causes = {kind: cause for kind, cause in bench_stragglers.CAUSES.items() if kind != "link"}
    cases = [(kind, number % 4) for number, kind in enumerate(causes)]
    found = map(bench_stragglers.named, bench_stragglers.run_cases(tmp_path, 4, cases))
    wanted = [[] if causes[kind] is None else [(slow, causes[kind])] for kind, slow in cases]
    missed = [(case, mine) for case, mine, right in zip(cases, found, wanted, strict=True) if mine[:1] != right]
    assert len(missed) <= 1, missed
    assert all(case[0] != "clean" for case, _ in missed), missed
