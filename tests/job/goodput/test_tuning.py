"""Tuning: the best batch against a search through all of them, and what follows from it for the number of GPUs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddltool.analyzers.job.goodput.throughput import ThroughputParams, goodput_per_s, overlapped, sync_time_s
from ddltool.analyzers.job.goodput.tuning import BatchLimits, frontier, goodput_grid, tune, tune_one
from ddltool.errors import Infeasible, InputError
from tests.conftest import throughput

CLUSTER = throughput(
    alpha_grad_s=0.05,
    beta_grad_s=0.001,
    alpha_sync_local_s=0.02,
    beta_sync_local_s=0.001,
    alpha_sync_node_s=0.1,
    beta_sync_node_s=0.002,
    gamma=2.5,
)
# Newton's method alone swings to and fro here for ever.
SWINGS = throughput(
    alpha_grad_s=0.006737946999085467,
    beta_grad_s=0.09301448921066349,
    alpha_sync_local_s=1.0,
    beta_sync_local_s=0.049787068367863944,
    alpha_sync_node_s=1.0,
    gamma=7.0,
)
LIMITS = BatchLimits(initial_batch_size=128, max_batch_size=8192, max_local_batch_size=256)


def spread(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers spread over orders of magnitude."""
    return st.floats(math.log(low), math.log(high)).map(math.exp)


def or_zero(numbers: st.SearchStrategy[float]) -> st.SearchStrategy[float]:
    return st.one_of(numbers, numbers, numbers, st.just(0.0))


params = st.builds(
    ThroughputParams,
    alpha_grad_s=or_zero(spread(1e-4, 1)),
    beta_grad_s=spread(1e-5, 0.1),
    alpha_sync_local_s=or_zero(spread(1e-4, 10)),
    beta_sync_local_s=or_zero(spread(1e-4, 0.1)),
    alpha_sync_node_s=or_zero(spread(1e-4, 10)),
    beta_sync_node_s=or_zero(spread(1e-4, 0.1)),
    gamma=st.floats(1, 10),
)
noise_scales = st.one_of(spread(0.1, 1e5), spread(0.1, 1e5), st.sampled_from([0.0, math.inf]))


@st.composite
def limits(draw: st.DrawFn) -> BatchLimits:
    initial = draw(st.integers(1, 150))
    largest = draw(st.integers(1, 50))
    return BatchLimits(
        initial_batch_size=initial,
        max_batch_size=initial + draw(st.one_of(st.integers(0, 8), st.integers(0, 500))),
        max_local_batch_size=largest,
        min_local_batch_size=draw(st.one_of(st.just(1), st.integers(1, largest))),
        max_accumulation_steps=draw(st.one_of(st.none(), st.integers(0, 8))),
    )


def best_of_all(grad, sync: float, gamma: float, replicas: int, allowed: BatchLimits, noise: float) -> float:  # type: ignore[no-untyped-def]
    """Goodput of the best of all integer (m, s), each looked at; ``grad`` is T_grad(m)."""
    most = allowed.max_batch_size if allowed.max_accumulation_steps is None else allowed.max_accumulation_steps + 1
    m = np.arange(allowed.min_local_batch_size, allowed.max_local_batch_size + 1)[:, None]
    passes = np.arange(1, min(most, allowed.max_batch_size) + 1)[None, :]
    total = replicas * m * passes
    step = (passes - 1) * grad(m) + overlapped(grad(m), sync, gamma)
    first = allowed.initial_batch_size
    share = 1.0 if math.isinf(noise) else (noise + first) / (noise + total)
    fits = (total >= first) & (total <= allowed.max_batch_size)
    return float(np.where(fits, total / step * share, 0.0).max(initial=0.0))


def rounded_up(replicas: int, allowed: BatchLimits) -> int:
    """The least total from M0 on that equal local batches in as few passes as fit can have; 0 where there is none."""
    most = allowed.initial_batch_size if allowed.max_accumulation_steps is None else allowed.max_accumulation_steps + 1
    for passes in range(1, most + 1):
        for local in range(1, allowed.max_local_batch_size + 1):
            if replicas * passes * local >= allowed.initial_batch_size:
                fits = local >= allowed.min_local_batch_size
                fits &= replicas * allowed.min_local_batch_size <= allowed.max_batch_size
                return replicas * passes * local if fits else 0
    return 0


@given(params, limits(), noise_scales, st.integers(1, 4))
@example(SWINGS, BatchLimits(initial_batch_size=1, max_batch_size=10**4, max_local_batch_size=50), math.exp(7), 2)
@example(SWINGS, BatchLimits(initial_batch_size=128, max_batch_size=128, max_local_batch_size=64), 500.0, 2)
@example(SWINGS, BatchLimits(initial_batch_size=56, max_batch_size=64, max_local_batch_size=16), math.exp(7), 1)
def test_no_batch_is_better(p: ThroughputParams, allowed: BatchLimits, noise: float, per_node: int) -> None:
    replicas = np.arange(1, 13)
    nodes = -(-replicas // per_node)
    found = tune(p, nodes, replicas, allowed, noise_scale=noise)
    for i, (node, replica) in enumerate(zip(nodes.tolist(), replicas.tolist(), strict=True)):
        sync = float(sync_time_s(p, node, replica))
        wanted = best_of_all(lambda m: p.alpha_grad_s + p.beta_grad_s * m, sync, p.gamma, replica, allowed, noise)
        m, s, total = found.local_batch_size[i], found.accumulation_steps[i], found.total_batch_size[i]
        rounded = 0 if wanted else rounded_up(replica, allowed)
        assert found.feasible[i] == (wanted > 0 or rounded > 0) == (m > 0)
        if rounded:
            assert total == rounded
        else:
            assert found.goodput_per_s[i] == pytest.approx(wanted, rel=1e-10)
            assert total == 0 or allowed.initial_batch_size <= total <= allowed.max_batch_size
        if m:
            assert total == replica * m * (s + 1)
            assert allowed.min_local_batch_size <= m <= allowed.max_local_batch_size
            assert allowed.max_accumulation_steps is None or s <= allowed.max_accumulation_steps
            if not math.isinf(noise):
                own = goodput_per_s(
                    p, node, replica, m, s, noise_scale=noise, initial_batch_size=allowed.initial_batch_size
                )
                assert own == pytest.approx(found.goodput_per_s[i], rel=1e-12)


def test_a_prime_total_batch_takes_as_many_steps_as_it_must() -> None:
    fixed = BatchLimits(initial_batch_size=1009, max_batch_size=1009, max_local_batch_size=1000)
    alone = tune_one(CLUSTER, 1, 1, fixed, noise_scale=100.0)
    assert (alone.local_batch_size, alone.accumulation_steps) == (1, 1008)


def test_a_total_that_cannot_be_shared_equally_is_rounded_up() -> None:
    """128 samples on 3 replicas are 3 x 43; on 200 replicas there is nothing to share."""
    fixed = BatchLimits(initial_batch_size=128, max_batch_size=128, max_local_batch_size=64)
    made = tune_one(CLUSTER, 1, 3, fixed, noise_scale=100.0)
    assert (made.local_batch_size, made.accumulation_steps, made.total_batch_size) == (43, 0, 129)
    small = BatchLimits(initial_batch_size=128, max_batch_size=128, max_local_batch_size=20)
    assert tune_one(CLUSTER, 1, 3, small, noise_scale=100.0).total_batch_size == 3 * 15 * 3
    with pytest.raises(Infeasible, match="no multiple of 200 from 128 to 128"):
        tune_one(CLUSTER, 1, 200, fixed, noise_scale=100.0)


def test_more_noise_asks_for_larger_batches() -> None:
    totals = [tune_one(CLUSTER, 2, 8, LIMITS, noise_scale=phi).total_batch_size for phi in (0, 10, 1e3, 1e5, math.inf)]
    assert totals == sorted(totals)
    assert (totals[0], totals[-1]) == (128, 8192)


def test_distinct_allocations_are_answered_as_alone() -> None:
    chance = np.random.default_rng(3)
    for most in (40, 10**7):  # by table, and by sorting
        replicas = chance.integers(1, most, 300)
        nodes = np.where(chance.random(300) < 0.5, 1, np.minimum(replicas, 3))
        wide = BatchLimits(initial_batch_size=100, max_batch_size=10**9, max_local_batch_size=64)
        together = tune(CLUSTER, nodes, replicas, wide, noise_scale=5e3)
        for i in range(0, 300, 30):
            one = tune_one(CLUSTER, int(nodes[i]), int(replicas[i]), wide, noise_scale=5e3)
            assert one.goodput_per_s == pytest.approx(together.goodput_per_s[i], rel=1e-12)
            assert one.total_batch_size == together.total_batch_size[i]


@pytest.mark.parametrize(
    ("field", "value"),
    [("initial_batch_size", 0), ("max_batch_size", 5), ("min_local_batch_size", 300), ("max_accumulation_steps", -1)],
)
def test_limits_that_cannot_be(field: str, value: int) -> None:
    good = {"initial_batch_size": 128, "max_batch_size": 8192, "max_local_batch_size": 256}
    with pytest.raises(InputError, match="batch_size|accumulation"):
        BatchLimits(**{**good, field: value})


def test_questions_that_cannot_be_answered() -> None:
    with pytest.raises(InputError, match="1 replicas on 2 nodes"):
        tune(CLUSTER, [1, 2], [1, 1], LIMITS, noise_scale=1.0)
    with pytest.raises(InputError, match="no integer"):
        tune(CLUSTER, 1, 1.5, LIMITS, noise_scale=1.0)
    for noise in (-1.0, math.nan):
        with pytest.raises(InputError, match="noise_scale"):
            tune(CLUSTER, 1, 1, LIMITS, noise_scale=noise)


@given(params, spread(1, 1e5), st.integers(1, 8), st.floats(0, 1))
def test_frontier(p: ThroughputParams, noise: float, per_node: int, threshold: float) -> None:
    found = frontier(p, 24, LIMITS, noise_scale=noise, replicas_per_node=per_node, threshold=threshold)
    goodput = found.tuned.goodput_per_s
    for k in range(24):
        assert found.efficient[k] == all(goodput[j] < goodput[k] for j in range(k))
    assert found.speedup[0] == 1
    stop = found.pays_until - 1
    for k in range(stop + 1, 24):  # nothing beyond brings its share
        assert goodput[k] - goodput[stop] < threshold * goodput[0] * (k - stop) * (1 + 1e-9) + 1e-12
    for k in range(stop):  # and everything up to it did
        assert goodput[stop] - goodput[k] >= threshold * goodput[0] * (stop - k) * (1 - 1e-9) - 1e-12 * goodput[0]


def test_a_dip_at_the_second_node_does_not_end_scaling() -> None:
    slow_network = ThroughputParams(**{**CLUSTER.model_dump(), "alpha_sync_node_s": 0.3, "beta_sync_node_s": 0.0})
    narrow = BatchLimits(initial_batch_size=128, max_batch_size=2048, max_local_batch_size=256)
    found = frontier(slow_network, 16, narrow, noise_scale=1e4, replicas_per_node=4, threshold=0.2)
    goodput = found.tuned.goodput_per_s
    assert goodput[4] < goodput[3]
    assert not found.efficient[4]
    assert found.pays_until > 8


def test_grid_agrees_with_the_tuned_points() -> None:
    totals = np.arange(128, 2049, 8)
    grid = goodput_grid(CLUSTER, [1, 2], [2, 8], totals, LIMITS, noise_scale=800.0)
    assert grid.shape == (2, len(totals))
    best = tune(CLUSTER, [1, 2], [2, 8], LIMITS, noise_scale=800.0)
    for i in range(2):
        at = np.flatnonzero(totals == best.total_batch_size[i])
        assert grid[i].max() <= best.goodput_per_s[i] * 1.001
        if at.size:
            assert grid[i, at[0]] == pytest.approx(best.goodput_per_s[i], rel=1e-9)
    assert np.isnan(goodput_grid(CLUSTER, 1, 1, [100, 128, 9000], LIMITS, noise_scale=8.0)).tolist() == [
        [True, False, True]
    ]
