"""The least samples that every rank gets: in chosen sizes, in jobs with BatchNorm, and where it cannot be had."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset, TensorDataset

from ddltool.analyzers.balancing.algorithm2 import Algorithm2, Phase, Settings
from ddltool.analyzers.balancing.control import Policy, Report, SpeedPolicy, TrialPolicy
from ddltool.analyzers.balancing.sizing import proportional
from ddltool.errors import Infeasible, InputError
from ddltool.runtime.balancing.control import BalanceOptions, Balancer, balance, least_samples, local_batch_norm
from tests.balance_workers import CLOCK
from tests.runtime_workers import crew

SAMPLES = 101  # 6 steps of 16, and 5 that two ranks with 3 each cannot share


@given(
    st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(0, 40)), min_size=1, max_size=6),
    st.integers(1, 9),
    st.integers(0, 100),
)
@settings(max_examples=200, deadline=None)
def test_shares_are_cut_off_below_at_the_least(workers: list[tuple[float, int]], least: int, extra: int) -> None:
    """Against the factor that bisection finds."""
    speeds = np.array([speed for speed, _ in workers])
    limits = np.array([least + room for _, room in workers])
    total = min(len(workers) * least + extra, int(limits.sum()))
    sizes = proportional(speeds, total, limits, least)
    assert sizes.sum() == total
    assert (sizes >= least).all()
    assert (sizes <= limits).all()
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(middle * speeds, least, limits).sum() < total else (low, middle)
    assert np.abs(sizes - np.clip(high * speeds, least, limits)).max() < 1 + 1e-6


def test_sizes_below_the_least_have_no_solution() -> None:
    assert proportional([1.0, 15.0], 16, least=3).tolist() == [3, 13]
    with pytest.raises(Infeasible, match="total batch 5 is less than 3 samples for each of 2 workers"):
        proportional([1.0, 1.0], 5, least=3)
    with pytest.raises(Infeasible, match="limit of worker 1 admits 2 of at least 3 samples"):
        proportional([1.0, 1.0], 8, [9, 2], least=3)
    with pytest.raises(InputError, match="least: is 0"):
        proportional([1.0, 1.0], 8, least=0)
    for made in (SpeedPolicy, TrialPolicy):
        with pytest.raises(InputError, match=r"sizes: is \[2, 14\]; give every worker 3 samples or more"):
            made([2, 14], least=3)
    with pytest.raises(InputError, match="2 workers and 16 samples, 3 or more each"):
        Algorithm2([8, 8], least=3).load_state_dict(Algorithm2([2, 14]).state_dict())


@given(st.integers(0, 10**6), st.sampled_from(["speeds", "trial"]))
@settings(max_examples=60, deadline=None)
def test_both_ways_keep_the_least_and_the_total(seed: int, way: str) -> None:
    chance = np.random.default_rng(seed)
    workers, least = int(chance.integers(2, 5)), int(chance.integers(1, 5))
    start = (least + chance.integers(0, 12, workers)).tolist()
    trial = Settings(step=3, window=1, fine_window=2, renew=True)
    policy: Policy = (
        SpeedPolicy(start, predictor="last", least=least) if way == "speeds" else TrialPolicy(start, None, trial, least)
    )
    speeds = 10.0 ** chance.uniform(-2, 2, workers)
    for step in range(60):
        if step == 30:
            speeds = speeds[::-1]
        sizes = policy.sizes
        assert sizes.min() >= least
        assert sizes.sum() == sum(start)
        seconds = sizes / speeds * chance.uniform(0.9, 1.1, workers)
        spare = np.full(workers, 0.1)
        report = Report(samples=sizes.copy(), seconds=seconds, memory=spare, cpu=spare, available=spare)
        policy.choose(report)


@pytest.mark.parametrize("renew", [False, True])
def test_a_hopeless_straggler_ends_at_the_least_and_is_told_to_go(renew: bool) -> None:
    algorithm = Algorithm2([16, 16], settings=Settings(window=1, fine_window=1, renew=renew), least=4)
    told = [algorithm.observe([1.0, 1000.0]) for _ in range(12)]
    assert [decision.sizes[1] for decision in told] == [11, 6, 6, 5, *[4] * 8]
    assert [decision.remove for decision in told] == [False] * 5 + [True] * 7
    assert told[2].phase is Phase.FINE


class Slow(nn.Module):
    """A BatchNorm network in which rank 1 takes longer by far; it refuses a batch of one, as torch does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        slow = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
        CLOCK.now_s += (0.002 if slow else 0.0001) * len(inputs)
        return self.layers(inputs)


def job(
    model: nn.Module, samples: int = SAMPLES, **arguments: Any
) -> tuple[nn.Module, torch.optim.Optimizer, Balancer]:
    torch.manual_seed(0)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    data = TensorDataset(torch.arange(samples)[:, None].float())
    return wrapped, optimizer, balance(wrapped, optimizer, data, **{"total_batch": 16, **arguments})


@CLOCK.told()
def train(rank: int, cluster: str, least: int | None) -> tuple[list[int], list[list[int]], int]:
    """Return the samples of every step, and the samples' numbers by epoch, of a job with one slow rank."""
    trial = Settings(step=3, window=1, fine_window=1)
    options = BalanceOptions(cluster=cluster, predictor="last", trial=trial, timeout_s=30)  # type: ignore[arg-type]
    model, optimizer, balancer = job(Slow(), least=least, options=options)
    loader, steps, seen = balancer.dataloader(seed=5), [], []
    for epoch in range(3):
        balancer.set_epoch(epoch)
        seen.append([])
        for (inputs,) in loader:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            steps.append(len(inputs))
            seen[-1] += inputs[:, 0].long().tolist()
    balancer.close()
    return steps, seen, balancer.least


@pytest.mark.parametrize(("cluster", "least"), [("cpu", None), ("gpu", None), ("cpu", 3)])
def test_a_model_with_batch_norm_trains_beside_a_slow_rank(cluster: str, least: int | None) -> None:
    answers = crew().run(train, cluster, least)
    steps = list(zip(*(steps for steps, *_ in answers), strict=True))
    number = 2 if least is None else least
    assert answers[0][2] == number
    assert min(map(min, steps)) == number  # reached by the slow rank, and never less
    last = [16, 5] if number == 2 else [15, 6]
    assert [sum(sizes) for sizes in steps] == ([16] * 5 + last) * 3
    for epoch in range(3):
        assert Counter(place for _, seen, _ in answers for place in seen[epoch]) == Counter(range(SAMPLES))


def test_two_where_a_layer_normalizes_over_the_local_batch() -> None:
    def norms(*layers: nn.Module) -> str | None:
        return local_batch_norm(nn.Sequential(nn.Linear(2, 2), *layers))

    assert norms(nn.BatchNorm2d(2)) == "1"
    assert norms(nn.Sequential(nn.ReLU(), nn.BatchNorm1d(2))) == "1.1"
    assert norms(nn.LayerNorm(2), nn.SyncBatchNorm(2), nn.GroupNorm(1, 2), nn.InstanceNorm1d(2)) is None
    assert norms(nn.BatchNorm1d(2).eval()) is None  # frozen
    assert norms(nn.BatchNorm1d(2, track_running_stats=False).eval()) == "1"  # never uses anything but the batch
    assert local_batch_norm(nn.Sequential(nn.BatchNorm1d(2)).eval()) == "0"  # trained later
    assert least_samples(nn.BatchNorm1d(2), None, 2, 4) == 2
    assert least_samples(nn.BatchNorm1d(2), 1, 2, 4) == 1
    assert least_samples(nn.Linear(2, 2), None, 2, 4) == 1


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        yield from range(5)


def refusal(rank: int, case: str) -> str:
    """Return the message with which a job is refused."""
    plain, known = nn.Linear(1, 2), BalanceOptions(enabled=False)
    cases: dict[str, Any] = {
        "total": lambda: job(Slow(), total_batch=3),
        "total asked": lambda: job(plain, least=9),
        "sizes": lambda: job(Slow(), sizes=[15, 1]),
        "sizes asked": lambda: job(plain, sizes=[15, 1], least=3),
        "limits": lambda: job(plain, limits=[16, 4], least=5),
        "zero": lambda: job(plain, least=0),
        "fraction": lambda: job(plain, least=1.5),
        "differs": lambda: job(plain, least=1 + rank),
        "dataset": lambda: job(Slow(), 3)[2].dataloader(),
        "set_sizes": lambda: job(Slow(), options=known)[2].set_sizes([15, 1]),
        "set_sizes total": lambda: job(plain, options=known)[2].set_sizes([15, 2]),
        "stream": lambda: balance(
            wrapped := job_model(), torch.optim.SGD(wrapped.parameters()), Stream(), total_batch=4
        ).dataloader(),
        "one by choice": lambda: job(Slow(), sizes=[15, 1], least=1),
    }
    try:
        cases[case]()
    except InputError as error:
        return str(error)
    return "accepted"


def job_model() -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(1, 2))


BATCH_NORM = "(layer module.layers.1 is BatchNorm over the local batch)"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "total",
            f"least: 2 for each of 2 ranks {BATCH_NORM} is more than the total batch of 3; "
            "give a total batch of 4 or more, or least=1",
        ),
        (
            "total asked",
            "least: 9 for each of 2 ranks is more than the total batch of 16; "
            "give a total batch of 18 or more, or a smaller least",
        ),
        (
            "sizes",
            f"sizes: has 1 for rank 1, below the least of 2 samples {BATCH_NORM}; "
            "give every rank 2 or more, or least=1",
        ),
        (
            "sizes asked",
            "sizes: has 1 for rank 1, below the least of 3 samples; give every rank 3 or more, or a smaller least",
        ),
        (
            "limits",
            "limits: has 4 for rank 1, below the least of 5 samples; give every rank 5 or more, or a smaller least",
        ),
        ("zero", "least: 0 is no number of samples; give whole numbers from 1 to 1000000000000"),
        ("fraction", "least: 1.5 is no number of samples; give whole numbers from 1 to 1000000000000"),
        (
            "differs",
            "batch sizes: differs between rank 0 ((8, 8), at least 1) and rank 1 ((8, 8), at least 2); "
            "give every rank the same sizes and the same least",
        ),
        (
            "dataset",
            "dataset: has 3 samples for 2 ranks; give every rank 2 samples or more, or make least smaller",
        ),
        (
            "set_sizes",
            "sizes: is [15, 1]; give every rank 2 samples or more, or make least smaller",
        ),
        ("set_sizes total", "sizes: are 2 with sum 17; this job has 2 ranks and 16 samples"),
        (
            "stream",
            "dataset: is a Stream, an IterableDataset; give a map-style dataset (with __len__ and __getitem__)",
        ),
        ("one by choice", "accepted"),
    ],
)
def test_what_leaves_a_rank_with_less_is_refused_on_all_ranks(case: str, message: str) -> None:
    assert crew().run(refusal, case) == [message, message]
