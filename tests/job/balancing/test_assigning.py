"""Samples of unlike cost on ranks: CP-SAT, LPT, Karmarkar-Karp and padded cuts against every assignment there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ddltool.analyzers.job.balancing.assigning import (
    assign_passes,
    balanced,
    by_length,
    karmarkar_karp,
    lower_bound,
    lpt,
    seconds_of,
    solve,
    topped_up,
)
from ddltool.arrays import Floats


def cases(count: int, seed: int, alike: bool) -> list[tuple[Floats, Floats]]:
    """Random costs of 1 to 8 samples, from even to heavy-tailed, on 2 or 3 ranks."""
    chance, made = np.random.default_rng(seed), []
    for _ in range(count):
        lengths = np.maximum(chance.lognormal(4, chance.choice([0.2, 1.0, 2.0]), chance.integers(1, 9)), 1).round()
        ranks = int(chance.integers(2, 4))
        speeds = np.ones(ranks) if alike else chance.choice([0.5, 1.0, 1.7, 3.0], ranks)
        made.append((lengths + 2e-3 * lengths**2, speeds))
    return made


def best(costs: Floats, speeds: Floats) -> float:
    every = itertools.product(range(len(speeds)), repeat=len(costs))
    table = np.array(list(every))
    loads = np.stack([((table == rank) * costs).sum(axis=1) / speed for rank, speed in enumerate(speeds)])
    return float(loads.max(axis=0).min())


@pytest.mark.parametrize("alike", [True, False])
def test_the_solver_finds_what_every_assignment_tried_finds_and_heuristics_keep_their_bounds(alike: bool) -> None:
    """500 cases in all: 250 with ranks of equal speed, 250 with others."""
    for costs, speeds in cases(250, 7, alike):
        optimum, ranks = best(costs, speeds), len(speeds)
        proven = solve(costs, speeds, limit_s=5.0)
        assert proven.seconds == pytest.approx(optimum, rel=1e-12)
        assert proven.is_optimal
        assert proven.bound <= optimum * (1 + 1e-12)
        assert lower_bound(costs, speeds) <= optimum * (1 + 1e-12)
        ratio = 4 / 3 - 1 / (3 * ranks) if alike else 2 - 2 / (ranks + 1)
        tried = [lpt(costs, speeds), *([karmarkar_karp(costs, ranks)] if alike else [])]
        for places in tried:
            assert seconds_of(costs, places, speeds).max() <= optimum * ratio * (1 + 1e-12)
        kept = seconds_of(costs, balanced(costs, speeds), speeds).max()
        if len(costs) >= ranks and not alike:
            continue  # a rank that the best leaves without samples gets one
        assert kept <= min(seconds_of(costs, places, speeds).max() for places in tried) * (1 + 1e-12)


def test_a_known_case_by_hand() -> None:
    """Korf's example: {8, 7, 6, 5, 4} in two: LPT 17 and 13, Karmarkar-Karp 16 and 14, the best 15 and 15."""
    costs, speeds = np.array([8.0, 7.0, 6.0, 5.0, 4.0]), np.ones(2)
    assert seconds_of(costs, lpt(costs, speeds), speeds).max() == 17
    assert seconds_of(costs, karmarkar_karp(costs, 2), speeds).max() == 16
    assert solve(costs, speeds, 5.0).seconds == 15


def padded_time(costs: Floats, places: Floats, count: int) -> float:
    return max(
        costs[places == place].max() * (places == place).sum() for place in range(count) if (places == place).any()
    )


def test_padded_cuts_are_the_best_of_all_assignments_with_equal_speeds() -> None:
    for costs, speeds in cases(120, 3, True):
        ranks, costs = len(speeds), costs[:6]
        every = itertools.product(range(ranks), repeat=len(costs))
        optimum = min(padded_time(costs, np.array(places), ranks) for places in every)
        assert padded_time(costs, by_length(costs, speeds), ranks) == pytest.approx(optimum, rel=1e-12)


def test_every_place_has_samples_and_passes_of_a_rank_are_alike() -> None:
    chance = np.random.default_rng(1)
    for ranks, passes in itertools.product((1, 3, 8), (1, 2, 5)):
        costs = chance.lognormal(5, 1.5, 4 * ranks * passes)
        for speeds in (np.ones(ranks), chance.uniform(0.01, 1, ranks)):
            for places in (balanced(costs, speeds, passes), by_length(costs, speeds, passes)):
                assert set(places.tolist()) == set(range(ranks * passes))
    even = assign_passes(np.ones(12), np.zeros(12, dtype=np.int64), 1, 3)
    assert np.bincount(even).tolist() == [4, 4, 4]
    assert topped_up(np.array([3.0, 1.0, 2.0]), np.zeros(3, dtype=np.int64), 3).tolist() == [0, 1, 2]
