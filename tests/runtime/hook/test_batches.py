"""Unequal batches: every epoch is a partition of the dataset, checked against brute force."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddltool.analyzers.job.goodput.elastic_table import Split
from ddltool.errors import InputError
from ddltool.runtime.hook.pending_batches import PendingBatches
from ddltool.runtime.processes.batches import Sizes, VariableBatchSampler

local_sizes = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@st.composite
def epochs(draw: st.DrawFn) -> tuple[int, list[int]]:
    """A dataset size and local batches that fit into it."""
    sizes = draw(local_sizes)
    return draw(st.integers(sum(sizes), 6 * sum(sizes))), sizes


def all_ranks(dataset_size: int, sizes: list[int], epoch: int = 0, **options: object) -> list[list[list[int]]]:
    """Return the batches of every rank."""
    samplers = [VariableBatchSampler(dataset_size, sizes, rank, **options) for rank in range(len(sizes))]  # type: ignore[arg-type]
    for sampler in samplers:
        sampler.set_epoch(epoch)
        assert len(sampler) == len(list(sampler))
    return [list(sampler) for sampler in samplers]


def permutation(size: int, seed: int) -> list[int]:
    """Return the order that torch's DistributedSampler takes for one replica."""
    order = DistributedSampler(range(size), num_replicas=1, rank=0, seed=seed)  # type: ignore[arg-type, var-annotated]
    return list(order)


@given(epochs(), st.integers(0, 5), st.integers(0, 5), st.booleans())
def test_an_epoch_visits_the_permutation_in_rank_order(
    case: tuple[int, list[int]], seed: int, epoch: int, drop_last: bool
) -> None:
    dataset_size, sizes = case
    ranks = all_ranks(dataset_size, sizes, epoch, seed=seed, drop_last=drop_last)
    assert len({len(batches) for batches in ranks}) == 1
    visited = [index for step in zip(*ranks, strict=True) for batch in step for index in batch]
    tail = dataset_size % sum(sizes)
    dropped = tail if drop_last or tail < len(sizes) else 0
    assert visited == permutation(dataset_size, seed + epoch)[: dataset_size - dropped]
    for rank, batches in enumerate(ranks):
        full = dataset_size // sum(sizes)
        assert [len(batch) for batch in batches[:full]] == [sizes[rank]] * full
        assert all(0 < len(batch) <= sizes[rank] for batch in batches)


@given(epochs())
def test_without_shuffling_the_order_is_the_datasets(case: tuple[int, list[int]]) -> None:
    ranks = all_ranks(*case, shuffle=False)
    visited = [index for step in zip(*ranks, strict=True) for batch in step for index in batch]
    assert visited == list(range(len(visited)))


def test_epochs_and_seeds_differ_and_repeat() -> None:
    orders = [all_ranks(40, [3, 5], epoch, seed=seed) for epoch, seed in ((0, 0), (1, 0), (0, 7), (0, 0))]
    assert orders[0] == orders[3]
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_the_last_step_is_split_as_fairly_as_any_split_can(sizes: list[int], data: st.DataObject) -> None:
    """Brute force over all splits with 1 to x_i samples each: none is nearer to the shares in proportion to x_i.

    These are ``clip(f x_i, 1, x_i)`` with the f, found here by bisection, for which they add up.
    """
    tail = data.draw(st.integers(len(sizes), sum(sizes)))
    low, high = Fraction(0), Fraction(1)
    for _ in range(40):
        middle = (low + high) / 2
        short = sum(max(middle * size, 1) for size in sizes) < tail
        low, high = (middle, high) if short else (low, middle)
    shares = [max(high * size, 1) for size in sizes]

    def distance(split: tuple[int, ...]) -> float:
        return float(sum((part - share) ** 2 for part, share in zip(split, shares, strict=True)))

    splits = [split for split in product(*(range(1, size + 1) for size in sizes)) if sum(split) == tail]
    found = tuple(Sizes(tuple(sizes)).sizes_of(tail)[:, 0].tolist())
    assert found in splits
    assert distance(found) <= min(map(distance, splits)) + 1e-6


def test_the_last_steps_split_worked_by_hand() -> None:
    def split(sizes: tuple[int, ...], tail: int) -> list[int]:
        return Sizes(sizes).sizes_of(tail)[:, 0].tolist()

    assert split((3, 13), 5) == [1, 4]  # shares 1 and 4
    assert split((4, 4), 5) == [3, 2]  # equal remainders: the lower rank
    assert split((1, 98, 1), 4) == [1, 2, 1]  # one each at least
    assert split((1, 1), 2) == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((15, [3, 13], 0), "sizes: add up to 16 samples, but the dataset has 15; use smaller"),
        ((15, [3, 0], 0), r"sizes: is \[3, 0\]; give every rank one sample or more"),
        ((15, [], 0), r"sizes: is \[\]; give every rank"),
        ((15, [3, 3], 2), "rank: is 2; there are 2 ranks: 0 to 1"),
        ((15, [3, 3], -1), "rank: is -1; there are 2 ranks: 0 to 1"),
    ],
)
def test_refusals(arguments: tuple[int, list[int], int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        VariableBatchSampler(*arguments)


def test_it_feeds_a_dataloader_with_workers() -> None:
    dataset = TensorDataset(torch.arange(20) * 10)
    sampler = VariableBatchSampler(20, [2, 5], 1, seed=4)
    batches = [batch[0].tolist() for batch in DataLoader(dataset, batch_sampler=sampler, num_workers=1)]
    assert batches == [[index * 10 for index in batch] for batch in sampler]


def split_of(ranks: int, total: int, passes: int) -> Split:
    """Return a split of ``total`` samples."""
    return Split(world_size=ranks, total_batch_size=total, accumulation_steps=passes - 1)


@given(st.data(), st.integers(1, 120))
def test_resizing_loses_and_repeats_nothing(data: st.DataObject, dataset_size: int) -> None:
    """Changes of the batch, fetching ahead, and restarts on other numbers of ranks, against the permutation itself.

    Drawn are what happens at each step: nothing, a change at the first step that no rank has handed out, or a restart.
    """
    sizes = st.builds(split_of, st.just(0), st.integers(1, 30), st.integers(1, 4))
    ranks, state = 0, None
    visited: list[int] = []
    steps = 0
    while len(visited) < dataset_size:
        ranks = data.draw(st.integers(1, 5))
        first = data.draw(sizes)
        split = split_of(ranks, first.total_batch_size, first.accumulation_steps + 1)
        samplers = [VariableBatchSampler(dataset_size, split, rank, seed=3, whole=True) for rank in range(ranks)]
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state, split)
        loaders = [iter(sampler) for sampler in samplers]
        ahead = [data.draw(st.integers(0, 6)) for _ in samplers]
        fetched: list[list[list[int]]] = [[] for _ in samplers]
        while len(visited) < dataset_size:
            step: list[int] = []
            for rank, sampler in enumerate(samplers):
                while True:
                    while len(fetched[rank]) <= ahead[rank] and (batch := next(loaders[rank], None)) is not None:
                        fetched[rank].append(batch)
                    taken, batch = sampler.issued.popleft(), fetched[rank].pop(0)
                    assert taken.step == steps
                    assert len(batch) == max(taken.samples, 1)
                    step += batch if taken.samples else []
                    if taken.is_last:
                        break
                sampler.commit(taken)
            assert len(step) == taken.step_samples
            assert taken.is_full or len(visited) + len(step) == dataset_size
            visited += step
            steps += 1
            happens = data.draw(st.sampled_from(["nothing", "change", "restart"]))
            if happens == "change":
                new = data.draw(sizes)
                at = max(sampler.next_step for sampler in samplers)
                for sampler in samplers:
                    sampler.resize(split_of(ranks, new.total_batch_size, new.accumulation_steps + 1), at)
                    assert sampler.split_at(at).total_batch_size == new.total_batch_size
            if happens == "restart":
                break
        state = samplers[0].state_dict()
        assert all(sampler.state_dict() == state for sampler in samplers)
    assert visited == permutation(dataset_size, 3)


def test_what_was_handed_out_keeps_its_size() -> None:
    sampler = VariableBatchSampler(100, split_of(2, 8, 1), 0, shuffle=False, whole=True)
    loader = iter(sampler)
    assert [next(loader), next(loader)] == [[0, 1, 2, 3], [8, 9, 10, 11]]
    assert sampler.next_step == 2
    with pytest.raises(InputError, match="step: 1 was handed out already; the next is 2"):
        sampler.resize(split_of(2, 6, 1), 1)
    sampler.resize(split_of(2, 6, 1), 2)
    assert next(loader) == [16, 17, 18]
    with pytest.raises(InputError, match="split: is for 3 ranks"):
        sampler.resize(split_of(3, 6, 1), 3)
    # Steps 0 and 1 of 8, 14 of 6 from 16 to 100; an iteration that begins after step 0 has one less.
    assert len(sampler) == 16
    sampler.commit(sampler.issued.popleft())
    assert len(sampler) == 16
    assert len(list(sampler)) == len(sampler) == 15
    sampler.set_epoch(1)
    assert sampler.position == 0


def test_a_rank_without_samples_takes_part_with_weight_0() -> None:
    sampler = VariableBatchSampler(9, split_of(4, 8, 1), 3, shuffle=False, whole=True)
    assert list(sampler) == [[6, 7], [8]]
    assert [(taken.samples, taken.weight, taken.step_samples) for taken in sampler.issued] == [
        (2, 0.25, 8),
        (0, 0.0, 1),
    ]
    with pytest.raises(InputError, match="rank: is 4; there are 4 ranks"):
        VariableBatchSampler(9, split_of(4, 8, 1), 4)
    with pytest.raises(InputError, match="dataset: has 0 samples"):
        VariableBatchSampler(0, split_of(4, 8, 1), 0)


@pytest.mark.parametrize("is_announced", [False, True])
@pytest.mark.parametrize("skipped", [0, 3, 5_000, 12_000])
def test_a_resumed_loop_may_skip_any_number_of_batches(skipped: int, is_announced: bool) -> None:
    """A trainer that resumes takes the skipped batches from the sampler too, and then fetches three ahead."""
    pending, sampler = PendingBatches(), VariableBatchSampler(50_000, [1, 3], 1, shuffle=False)
    if not is_announced:
        pending.unannounced.add(sampler)
    for _ in zip(range(skipped + 3), sampler, strict=False):
        if is_announced:
            pending.draw(sampler, sampler.issued.popleft())
    steps = []
    for turn in range(3):
        pending.turn_to_next(0 if turn else skipped)
        assert pending.share(turn, "hook") is not None
        taken = pending.last_used(sampler)
        assert taken is not None
        steps.append(taken.step)
    assert steps == [skipped, skipped + 1, skipped + 2]
