"""Algorithm 2 against its listing, the paper's run on four GPUs, and the exact optimum; policies on simulated workers."""

from __future__ import annotations

import json
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.synthetic import gpu_curves, jitter, least_longest, simulate, slower_network
from ddltool.analyzers.job.balancing.algorithm2 import Algorithm2, Algorithm2Settings, Phase
from ddltool.analyzers.job.balancing.control import Report, SpeedPolicy, TrialPolicy
from ddltool.analyzers.job.balancing.minmax import DeviceCurves
from ddltool.analyzers.job.balancing.trained import PredictorSettings as Learning
from ddltool.errors import Infeasible, InputError

PAPER = (89, 21, 12, 6)


class Listing:
    """The paper's listing, line by line, with the whole history: slow, and only for comparison."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.delta, self.window = list(sizes), 5, 5
        self.history: list[list[float]] = []

    def update(self, seconds: list[float], memory: list[float]) -> bool:
        self.history.append(seconds)
        fit = [i for i in range(len(seconds)) if memory[i] <= 0.95]
        straggler = max(range(len(seconds)), key=lambda i: (seconds[i], -i))
        if not fit:
            return False
        leader = min(fit, key=lambda i: (seconds[i], i))
        if leader == straggler:
            return False
        if self.sizes[straggler] <= self.delta:
            return True
        last = self.history[-self.window :]
        if len(last) == self.window and all(t[leader] < t[straggler] for t in last):
            self.sizes[leader] += self.delta
            self.sizes[straggler] -= self.delta
        elif any(t[leader] > t[straggler] for t in self.history):
            self.delta, self.window = 1, 20
        return False


@given(st.integers(0, 10**6), st.integers(2, 5), st.floats(0, 0.2))
def test_every_decision_is_the_listings(seed: int, workers: int, noise: float) -> None:
    chance = np.random.default_rng(seed)
    start = chance.integers(2, 60, workers).tolist()
    slopes, launch = chance.uniform(0.01, 0.1, workers), chance.uniform(0, 1, workers)
    ours, listing = Algorithm2(start, settings=Algorithm2Settings(strict=True)), Listing(start)
    for _ in range(120):
        seconds = (launch + slopes * ours.sizes) * np.exp(chance.normal(0, noise, workers))
        memory = chance.choice([0.5, 0.97], workers)
        advised = listing.update(seconds.tolist(), memory.tolist())
        decision = ours.observe(seconds, memory)
        assert list(decision.sizes) == listing.sizes
        assert decision.remove == advised
        assert (decision.phase is Phase.FINE) == (listing.delta == 1)


@pytest.mark.parametrize("delay", [0, 1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_the_papers_four_gpus(delay: int, seed: int) -> None:
    """Published: (89, 21, 12, 6) from 32 each, fine tuning after iteration 30, another equilibrium after the cut at 150."""
    _, curves = gpu_curves(1)
    cut = slower_network(curves, 1, 4.0)
    run = simulate(curves, [32] * 4, 300, factors=jitter(300, 4, seed, 0.01), changes={150: cut}, delay=delay)
    assert (run.sizes.sum(axis=1) == 128).all()
    assert run.fine_at is not None
    assert 10 <= run.fine_at <= 40
    assert np.abs(run.sizes[149] - PAPER).max() <= 3
    assert run.seconds[149].max() < 0.45 * run.seconds[0].max()
    assert run.spread(130, 150) < 0.1
    assert run.sizes[299, 1] < run.sizes[149, 1] - 5  # the worker with the slower network has given samples away
    assert run.spread(280, 300) < 0.12
    assert not run.removals
    optimum = float(cut.seconds(least_longest(cut, 128)).max())
    assert cut.seconds(run.sizes[299]).max() < 1.1 * optimum


@given(st.integers(0, 10**6), st.integers(2, 6), st.integers(0, 2))
@settings(max_examples=20)
def test_it_gets_close_to_the_exact_optimum(seed: int, workers: int, delay: int) -> None:
    """Without noise, on linear devices: within a few samples of the optimum, and never above a limit or below one."""
    chance = np.random.default_rng(seed)
    curves = DeviceCurves.of(
        per_sample_s=chance.uniform(0.01, 0.05, workers),
        launch_s=chance.uniform(0.0, 0.2, workers),
        memory_limit=chance.integers(40, 200, workers),
    )
    run = simulate(curves, [32] * workers, 1200, delay=delay)
    assert (run.sizes.sum(axis=1) == 32 * workers).all()
    assert (run.sizes >= 1).all()
    assert (run.sizes <= curves.limits).all()
    one_sample_s = float(curves.per_sample_s.max())  # times of old sizes can move one that had better stayed
    assert run.seconds[-1].max() <= run.seconds[0].max() + one_sample_s
    # A worker above 95 % of its memory takes no more, which the optimum does not know.
    roomy = DeviceCurves.of(
        per_sample_s=curves.per_sample_s,
        launch_s=curves.launch_s,
        memory_limit=np.maximum(curves.limits * 95 // 100, 32),
    )
    optimum = float(roomy.seconds(least_longest(roomy, 32 * workers)).max())
    assert run.seconds[-100:].max(axis=1).mean() <= optimum + 3 * one_sample_s


def test_a_worker_short_of_memory_takes_no_more() -> None:
    algorithm = Algorithm2([10, 10, 10], settings=Algorithm2Settings(window=1))
    decision = algorithm.observe([1.0, 2.0, 3.0], [0.96, 0.95, 0.2])
    assert (decision.leader, decision.sizes) == (1, (10, 15, 5))
    assert algorithm.observe([1.0, 2.0, 3.0], [0.96, 0.96, 0.96]).leader is None
    limited = Algorithm2([10, 10, 10], [14, 40, 40], Algorithm2Settings(window=1))
    assert limited.observe([1.0, 2.0, 3.0]).sizes == (10, 15, 5)


def test_when_to_do_without_a_straggler() -> None:
    """A worker that is slowest with one sample is advised to go; in the fast approach fine tuning comes first."""
    curves = DeviceCurves.of(per_sample_s=[0.01, 0.01, 0.01], launch_s=[0.0, 0.0, 9.0])
    run = simulate(curves, [32] * 3, 100)
    assert run.removals
    assert run.removals[0][1] == 2
    assert run.sizes[-1, 2] == 1
    strict = simulate(curves, [32] * 3, 100, settings=Algorithm2Settings(strict=True))
    assert strict.sizes[-1, 2] == 2
    assert strict.removals[0][0] < run.removals[0][0]


def test_samples_on_their_way_are_not_moved_again() -> None:
    """With late sizes, times of the old ones must not move more; not telling them apart overshoots."""
    ours = Algorithm2([32, 32], settings=Algorithm2Settings(window=1))
    assert ours.observe([1.0, 2.0], sizes=[32, 32]).moved == 5
    assert ours.observe([1.0, 2.0], sizes=[32, 32]).moved == 0
    assert ours.observe([1.0, 2.0], sizes=[37, 27]).moved == 5


def test_a_state_goes_on_as_if_nothing_had_happened() -> None:
    _, curves = gpu_curves(1)
    one = Algorithm2([32] * 4)
    for k in range(40):
        if k == 17:
            other = Algorithm2([32] * 4)
            other.load_state_dict(json.loads(json.dumps(one.state_dict())))
        seconds = curves.seconds(one.sizes)
        decision = one.observe(seconds)
        if k >= 17:
            assert other.observe(seconds) == decision
    with pytest.raises(InputError, match="this job has 3 workers"):
        Algorithm2([32] * 3).load_state_dict(one.state_dict())


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_times_that_are_none(bad: float) -> None:
    with pytest.raises(InputError, match=r"seconds\[1\]"):
        Algorithm2([4, 4]).observe([1.0, bad])
    with pytest.raises(InputError, match="sizes"):
        Algorithm2([4, 0])


def report(sizes: np.ndarray, speeds: np.ndarray, memory: np.ndarray | None = None) -> Report:
    used = np.zeros(len(sizes)) if memory is None else memory
    return Report(
        samples=sizes, seconds=sizes / speeds, memory=used, cpu=np.ones(len(sizes)), available=np.ones(len(sizes))
    )


def test_speeds_become_sizes_in_proportion() -> None:
    policy = SpeedPolicy([25] * 4, predictor="last")
    assert policy.choose(report(policy.sizes, np.array([1.0, 2.0, 3.0, 4.0]))).sizes == (10, 20, 30, 40)
    capped = SpeedPolicy([25] * 4, [100, 100, 100, 30], predictor="last")
    assert capped.choose(report(capped.sizes, np.array([1.0, 2.0, 3.0, 4.0]))).sizes == (12, 23, 35, 30)
    with pytest.raises(Infeasible, match="admit 98"):
        SpeedPolicy([25] * 4, [24, 25, 25, 24])
    with pytest.raises(InputError, match="at least its batch"):
        SpeedPolicy([25] * 4, [24, 50, 50, 50])


@given(st.integers(0, 10**6), st.integers(1, 8), st.sampled_from(["last", "ema"]))
def test_the_total_is_kept_and_nobody_short_of_memory_grows(seed: int, workers: int, predictor: str) -> None:
    chance = np.random.default_rng(seed)
    start = chance.integers(1, 40, workers)
    limits = start + chance.integers(0, 60, workers)
    policy = SpeedPolicy(start.tolist(), limits.tolist(), predictor)
    for _ in range(30):
        before, memory = policy.sizes.copy(), chance.choice([0.5, 0.951, 1.0], workers)
        made = np.array(policy.choose(report(before, chance.uniform(1, 100, workers), memory)).sizes)
        assert made.sum() == start.sum()
        assert (made >= 1).all()
        assert (made <= limits).all()
        assert (made[memory > 0.95] <= before[memory > 0.95]).all()


def test_a_tolerance_leaves_sizes_alone_that_are_good_enough() -> None:
    policy = SpeedPolicy([50, 50], predictor="last", tolerance=0.1)
    assert policy.choose(report(policy.sizes, np.array([1.0, 1.05]))).sizes == (50, 50)
    assert policy.choose(report(policy.sizes, np.array([1.0, 2.0]))).sizes == (33, 67)


@pytest.mark.parametrize("seed", range(3))
def test_sizes_follow_what_lasts_and_not_the_noise(seed: int) -> None:
    """Speeds scatter by 10 %, and from step 150 on worker 1 is half as fast: the only reason to move."""
    changes = {}
    for tolerance in (0.0, None):
        speeds = np.random.default_rng(seed).lognormal(0, 0.1, (300, 3))
        speeds[150:, 1] /= 2
        policy = SpeedPolicy([60] * 3, settings=Learning(restart_after=3), tolerance=tolerance)
        sizes = [policy.choose(report(policy.sizes, each)).sizes for each in speeds]
        changes[tolerance] = sum(one != other for one, other in pairwise(sizes))
        assert np.abs(np.subtract(sizes[180], (72, 36, 72))).max() <= 10
    assert changes[None] <= 20 < 200 < changes[0.0]


def test_a_network_learns_in_the_background() -> None:
    """The loop goes on while it trains; afterwards the network, which sees the CPU, foretells what EMA cannot."""
    learning = Learning(warm_up=60, refit_every=10**6, most_steps=300, background=True)
    chance = np.random.default_rng(1)
    errors: dict[str, list[float]] = {"narx": [], "ema": []}
    policies = {name: SpeedPolicy([32] * 3, predictor=name, settings=learning) for name in errors}
    cpu = chance.uniform(0.3, 1.0, (141, 3))
    for k in range(140):
        speeds = 100 * cpu[k]
        for name, policy in policies.items():
            if k > 80:
                errors[name].append(float((policy.sizes / speeds).max() / (96 / speeds.sum())))
            made = Report(
                samples=policy.sizes,
                seconds=policy.sizes / speeds,
                memory=np.zeros(3),
                cpu=cpu[k + 1],
                available=np.ones(3),
            )
            policy.choose(made)
        if k == 75:
            deadline = time.monotonic() + 120
            while policies["narx"]._predictor._background_training[1].is_alive() and time.monotonic() < deadline:
                time.sleep(0.01)
    assert np.mean(errors["narx"]) < 1 + 0.5 * (np.mean(errors["ema"]) - 1)


def test_trial_policy_tells_when_fine_tuning_begins() -> None:
    policy = TrialPolicy([32, 32], settings=Algorithm2Settings(window=1))
    both = [policy.choose(report(policy.sizes, np.array(speeds))) for speeds in ([2.0, 1.0], [1.0, 3.0], [1.0, 3.0])]
    assert [choice.fine_tuning for choice in both].count(True) <= 1
    assert all(sum(choice.sizes) == 64 for choice in both)
