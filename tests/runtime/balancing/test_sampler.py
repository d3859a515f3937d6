"""Samplers and partitions under changing batch sizes: every sample exactly once, whatever happens to the sizes."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from ddltool.analyzers.job.balancing.partitions import Traversals, between
from ddltool.errors import InputError
from ddltool.runtime.processes.batches import VariableBatchSampler

sampled = partial(VariableBatchSampler, whole=True)


def done(sampler: VariableBatchSampler) -> None:
    """Commit the step that was handed out first of those that are not done."""
    sampler.commit(sampler.issued.popleft())


def composition(chance: np.random.Generator, total: int, parts: int) -> list[int]:
    """Return ``parts`` random whole numbers of at least 1 that add up to ``total``."""
    cuts = np.sort(chance.choice(np.arange(1, total), parts - 1, replace=False))
    return np.diff([0, *cuts, total]).tolist()


@given(
    st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 7), st.integers(0, 200), st.integers(0, 30), st.booleans()
)
def test_every_sample_comes_once_and_no_rank_gets_less_than_the_least_in_any_step(
    seed: int, ranks: int, least: int, samples: int, extra: int, shuffle: bool
) -> None:
    """Any dataset, however short, with that much for each rank: also the last step of an epoch has it."""
    chance, floor = np.random.default_rng(seed), ranks * least
    samples, total = samples + floor, floor + extra
    raised = partial(at_least, chance, total, ranks, least)
    start = raised()
    made = [sampled(samples, start, rank, shuffle, seed % 100, least=least) for rank in range(ranks)]
    for epoch in range(2):
        for sampler in made:
            sampler.set_epoch(epoch)
        streams = [iter(sampler) for sampler in made]
        seen: Counter[int] = Counter()
        sums = []
        for _ in range(len(made[0])):
            if chance.random() < 0.5:
                sizes, ahead = raised(), int(chance.integers(0, 3))
                for sampler in made:
                    sampler.resize(sizes, sampler.next_step + ahead)
            wanted = made[0].sizes
            shares = []
            for stream in streams:
                batch = next(stream)
                seen.update(batch)
                shares.append(len(batch))
            assert min(shares) >= least
            sums.append(sum(shares))
            if sums[-1] == total:
                assert tuple(shares) == wanted
            elif sums[-1] < total:
                assert all(share <= size for share, size in zip(shares, wanted, strict=True))
        assert all(next(stream, None) is None for stream in streams)
        assert seen == Counter(range(samples))
        left = samples % total
        if left in (0, *range(floor, total)) or samples < total:
            expected = [total] * (samples // total) + [left] * (left > 0)
        elif total + left >= 2 * floor:  # the step before gives what the last one lacks
            expected = [total] * (samples // total - 1) + [total + left - floor, floor]
        else:  # no two steps can be made of what is left
            expected = [total] * (samples // total - 1) + [total + left]
        assert sums == expected


def at_least(chance: np.random.Generator, total: int, parts: int, least: int) -> list[int]:
    """Return ``parts`` random whole numbers of at least ``least`` that add up to ``total``."""
    return [least - 1 + size for size in composition(chance, total - parts * (least - 1), parts)]


@given(st.integers(0, 10**6))
def test_it_goes_on_after_the_last_step_done_with_another_least_on_another_number_of_ranks(seed: int) -> None:
    """All that is left comes once, the new least in each step, or it is refused where too little is left."""
    chance = np.random.default_rng(seed)
    (ranks, others), (least, later) = chance.integers(1, 6, 2).tolist(), chance.integers(1, 5, 2).tolist()
    total, samples = int(chance.integers(20, 28)), int(chance.integers(30, 100))
    start = at_least(chance, total, ranks, least)
    made = [sampled(samples, start, rank, seed=3, least=least) for rank in range(ranks)]
    streams = [iter(sampler) for sampler in made]
    seen: Counter[int] = Counter()
    for _ in range(int(chance.integers(0, len(made[0]) + 1))):
        for sampler, stream in zip(made, streams, strict=True):
            seen.update(next(stream))
            done(sampler)
    for stream in streams:
        next(stream, None)  # handed out ahead, but never done
    state = json.loads(json.dumps(made[0].state_dict()))
    left = samples - sum(seen.values())
    start, sizes = (at_least(chance, total, others, later) for _ in range(2))
    for rank in range(others):
        sampler = sampled(samples, start, rank, seed=3, least=later)
        if 0 < left < others * later:
            assert others * later > ranks * least  # what goes on as it was is never refused
            with pytest.raises(InputError, match=f"leaves {left} samples of the epoch for {others} ranks"):
                sampler.load_state_dict(state)
            return
        sampler.load_state_dict(state)
        assert sampler.sizes == tuple(start)
        if left == 0:
            sampler.set_epoch(1)
            assert len(list(sampler)) == len(sampler)
            continue
        if seed % 2:
            sampler.resize(sizes)
        for batch in sampler:
            assert len(batch) >= later
            seen.update(batch)
    assert seen == Counter(range(samples))


def test_where_every_rank_has_a_part_of_the_rest_whole_epochs_are_the_plans() -> None:
    for rank in range(3):
        ours, fixed = sampled(51, [3, 4, 5], rank, seed=7), VariableBatchSampler(51, [3, 4, 5], rank, seed=7)
        for epoch in (0, 3):
            ours.set_epoch(epoch)
            fixed.set_epoch(epoch)
            assert list(ours) == list(fixed)


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_that_look_ahead_change_at_one_step(workers: int) -> None:
    """Ranks resize at the same boundary; with data workers the change comes later, on both at the same step."""
    start, later = [6, 2], [3, 5]
    rows = []
    for rank in range(2):
        sampler = sampled(64, start, rank, shuffle=False)
        loader = DataLoader(TensorDataset(torch.arange(64)), batch_sampler=sampler, num_workers=workers)
        taken = []
        for step, (batch,) in enumerate(loader):
            taken.append(batch.tolist())
            done(sampler)
            if step == 1:
                sampler.resize(later)
                assert sampler.sizes == tuple(later)
        rows.append(taken)
    lengths = [(len(one), len(other)) for one, other in zip(*rows, strict=True)]
    first = 2 + 2 * workers
    assert lengths == [(6, 2)] * first + [(3, 5)] * (8 - first)
    assert sorted(index for batch in (*rows[0], *rows[1]) for index in batch) == list(range(64))


def test_what_does_not_fit_is_refused() -> None:
    sampler = sampled(20, [2, 3], 0)
    stream = iter(sampler)
    next(stream)
    with pytest.raises(InputError, match="handed out already"):
        sampler.resize([3, 2], 0)
    for sizes in ([3, 3], [5], [0, 5], [2.5, 2.5]):
        with pytest.raises(InputError):
            sampler.resize(sizes)
    with pytest.raises(InputError, match="has 1 samples for 2 ranks; give every rank one sample or more"):
        sampled(1, [1, 1], 0)
    with pytest.raises(InputError, match="has 3 samples for 2 ranks; give every rank 2 samples or more, or make least"):
        sampled(3, [2, 2], 0, least=2)
    with pytest.raises(InputError, match="least: is 0"):
        sampled(3, [2, 2], 0, least=0)
    firm = sampled(20, [2, 3], 0, least=2)
    with pytest.raises(InputError, match=r"sizes: is \[1, 4\]; give every rank 2 samples or more"):
        firm.resize([1, 4])
    with pytest.raises(InputError, match="leaves 3 samples of the epoch for 2 ranks that need 2 each"):
        firm.load_state_dict({**firm.state_dict(), "position": 17})
    with pytest.raises(InputError, match="sampler state:position: is 99; the epoch has 20 samples"):
        sampler.load_state_dict({**sampler.state_dict(), "position": 99})
    with pytest.raises(InputError, match="lacks epoch"):
        sampler.load_state_dict({**sampler.state_dict(), "epoch": None})


@given(st.integers(0, 10**6), st.integers(1, 8))
def test_after_the_moves_all_partitions_are_traversed_equally_often(seed: int, ranks: int) -> None:
    chance = np.random.default_rng(seed)
    sizes = chance.integers(1, 50, ranks)
    counted = Traversals(chance.integers(100, 5000, ranks).tolist(), threshold=float(chance.uniform(0.2, 3)))
    before, steps = int(counted.partitions.sum()), 0
    while not (moves := counted.moves()) and steps < 3000:
        assert counted.gap <= counted.threshold
        counted.add(sizes)
        steps += 1
    if not moves:
        return
    assert counted.gap > counted.threshold
    assert len(moves) <= ranks - 1
    counted.reset(moves)
    assert counted.partitions.sum() == before
    assert (counted.partitions >= 1).all()
    share = counted.partitions / before - sizes / sizes.sum()
    assert np.abs(share).max() <= 1.01 / before * ranks
    counted.add(sizes * 1000)
    # Each partition is less than a sample from its exact share.
    assert counted.gap <= 2 * counted.counts.max() * 1.05 / max(1, counted.partitions.min() - 1)


def test_moves_are_few_and_refuse_nonsense() -> None:
    assert between(np.array([4, 4]), np.array([4, 4])) == []
    with pytest.raises(InputError, match="partitions"):
        Traversals([3, 0])
    with pytest.raises(InputError, match="threshold"):
        Traversals([3, 3], float("nan"))
