"""Speed predictors online, their replay, weights that travel, and the schemes they are compared with."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.synthetic import cpu_cluster, gpu_clock, gpu_curves, jitter, least_longest
from ddltool.analyzers.job.balancing.networks import NeuralNetwork
from ddltool.analyzers.job.balancing.predict import PREDICTORS, Arima, make_predictor
from ddltool.analyzers.job.balancing.replay import (
    Clock,
    bounded,
    bsp,
    cpu_clock,
    gain_kept,
    lb_bsp,
    lb_bsp_oracle,
    redundant,
    replay,
    replay_equal,
    replay_oracle,
    work_shifting,
)
from ddltool.analyzers.job.balancing.sizing import equal
from ddltool.analyzers.job.balancing.trained import PredictorSettings
from ddltool.analyzers.step.measured.balance_trace import SpeedTrace

QUICK = PredictorSettings(warm_up=150, refit_every=150, window=300, most_steps=400, own_steps=20)


def driven(iterations: int = 450, seed: int = 0, workers: int = 3) -> SpeedTrace:
    """Speed is CPU share times 100, the share jumps at random: nothing in past speeds foretells it, the reading does."""
    chance = np.random.default_rng(seed)
    cpu = chance.uniform(0.3, 1.0, (iterations, workers))
    memory = np.full_like(cpu, 0.5)
    speed = 100 * cpu * np.exp(chance.normal(0, 0.01, cpu.shape))
    return SpeedTrace.of(tuple(f"w{n}" for n in range(workers)), speed, cpu, memory)


@pytest.mark.parametrize("name", PREDICTORS)
def test_predictors_are_causal_and_repeatable(name: str) -> None:
    """What comes later changes nothing of what was predicted before, and two runs agree to the bit."""
    trace = cpu_cluster(220, seed=3, workers=3)
    cut = 200
    changed = SpeedTrace.of(
        trace.names,
        np.concatenate((trace.speed[:cut], trace.speed[cut:] * 3)),
        np.concatenate((trace.cpu[: cut + 1], trace.cpu[cut + 1 :] / 2)),
        trace.memory,
    )
    runs = [replay(t, make_predictor(name, 3, QUICK), 96).predicted for t in (trace, trace, changed)]
    assert all(run is not None for run in runs)
    assert np.array_equal(runs[0], runs[1], equal_nan=True)  # type: ignore[arg-type]
    assert np.array_equal(runs[0][: cut + 1], runs[2][: cut + 1], equal_nan=True)  # type: ignore[index]
    assert not np.array_equal(runs[0][cut + 1 :], runs[2][cut + 1 :])  # type: ignore[index]


@pytest.mark.parametrize("name", PREDICTORS)
def test_predictions_of_one_worker_do_not_hang_on_the_order_of_workers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """True to the bit for what each worker computes alone; networks begin with a common model, here with none."""
    trace = cpu_cluster(330, seed=5, workers=3)
    swapped = SpeedTrace.of(trace.names[::-1], trace.speed[:, ::-1], trace.cpu[:, ::-1], trace.memory[:, ::-1])
    one, other = (make_predictor(name, 3, QUICK) for _ in range(2))
    monkeypatch.setattr(NeuralNetwork, "_fit_common", lambda *_: None)
    first, second = replay(trace, one, 96).predicted, replay(swapped, other, 96).predicted
    np.testing.assert_allclose(first, second[:, ::-1], rtol=1e-6)  # type: ignore[index]


def test_ema_is_its_closed_form() -> None:
    trace = cpu_cluster(60, seed=1, workers=2)
    predicted = replay(trace, make_predictor("ema", 2), 64).predicted
    assert predicted is not None
    for k in (1, 7, 59):
        weights = 0.2 * 0.8 ** np.arange(k - 1, -1, -1)
        weights[0] = 0.8 ** (k - 1)
        np.testing.assert_allclose(predicted[k], weights @ trace.speed[:k])
    last = replay(trace, make_predictor("last", 2), 64).predicted
    assert last is not None
    assert np.array_equal(last[1:], trace.speed[:-1])


@pytest.mark.parametrize("name", ["arima", "rnn", "lstm", "narx"])
@pytest.mark.parametrize("restart_after", [0, 3])
def test_a_warm_up_notices_a_lasting_change_where_ema_does(name: str, restart_after: int) -> None:
    """What a predictor says before it has learned is EMA's to the bit, the paper's or the one that begins anew."""
    settings, nothing = PredictorSettings(restart_after=restart_after), np.zeros(2)
    learning, ema, plain = (
        make_predictor(name, 2, settings),
        make_predictor("ema", 2, settings),
        make_predictor("ema", 2),
    )
    for speed in [[30.0, 20.0]] * 20 + [[10.0, 20.5]] * 3:
        for predictor in (learning, ema, plain):
            predictor.predict(nothing, nothing)
            predictor.observe(np.array(speed))
    said, expected, slow = (each.predict(nothing, nothing).tolist() for each in (learning, ema, plain))
    assert said == expected
    assert said[1] == slow[1]
    assert said[0] == (10.0 if restart_after else slow[0])
    assert slow[0] > 20


def test_arima_forecasts_are_those_of_statsmodels() -> None:
    """With the same parameters, the state-space model's own one-step predictions, once its start is forgotten."""
    from statsmodels.tsa.arima.model import ARIMA

    chance = np.random.default_rng(4)
    noise = chance.normal(0, 1, 420)
    series = 100 + np.convolve(noise, [1, 0.4, 0.2])[:420] * 2
    trace = SpeedTrace.of(("w0",), series[:, None], np.ones((420, 1)), np.ones((420, 1)))
    predictor = Arima(1, PredictorSettings(warm_up=200, refit_every=10_000, window=400))
    predicted = replay(trace, predictor, 10).predicted
    assert predicted is not None
    phi1, phi2, theta = predictor.parameters[:, 0]
    assert -1 <= theta < -0.5  # differencing once too often leaves a moving average near its bound
    expected = ARIMA(series, order=(2, 2, 1)).smooth([phi1, phi2, theta, 1.0]).predict()
    np.testing.assert_allclose(predicted[300:, 0], expected[300:], rtol=2e-3)


def test_narx_uses_what_only_readings_tell() -> None:
    trace = driven()
    errors = {
        name: replay(trace, make_predictor(name, 3, QUICK), 96, since=150).rmse for name in ("ema", "rnn", "narx")
    }
    assert errors["narx"] is not None
    assert errors["ema"] is not None
    assert errors["rnn"] is not None
    assert errors["narx"] < 0.25 * errors["ema"]
    assert errors["rnn"] > 0.8 * errors["ema"]  # there is nothing in the past to be learned


def test_each_model_learns_from_its_own_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the common start another worker's data must not reach a worker's weights."""
    monkeypatch.setattr(NeuralNetwork, "_fit_common", lambda *_: None)
    trace = driven()
    made = []
    for exponent in (1.0, 2.0):
        predictor = NeuralNetwork("narx", 3, QUICK)
        speed = trace.speed ** np.array([1.0, 1.0, exponent])
        replay(SpeedTrace.of(trace.names, speed, trace.cpu, trace.memory), predictor, 96)
        made.append(predictor.weights["in"].numpy())
    np.testing.assert_allclose(made[0][:2], made[1][:2], rtol=1e-9)
    assert not np.allclose(made[0][2], made[1][2], rtol=1e-3)


def test_predictions_stay_near_what_was_seen() -> None:
    """ARIMA extrapolates a collapse to speeds below zero; no batch can be sized by those."""
    speed = np.concatenate((np.full(200, 100.0), [90, 60, 20, 5, 5, 5, 5]))[:, None]
    speed += np.random.default_rng(0).normal(0, 1, speed.shape)
    trace = SpeedTrace.of(("w",), np.abs(speed), np.ones_like(speed), np.ones_like(speed))
    predicted = replay(trace, make_predictor("arima", 1, PredictorSettings(warm_up=100)), 10).predicted
    assert predicted is not None
    assert (predicted[1:] > 0).all()
    assert predicted[1:].max() < 160


def test_replay_and_its_bounds() -> None:
    trace = cpu_cluster(300, seed=2, workers=8)
    equal_split, oracle = replay_equal(trace, 256), replay_oracle(trace, 256)
    assert equal_split.mean_s == pytest.approx((32 / trace.speed).max(axis=1).mean())
    # No whole sizes can beat X / sum v, and rounding costs less than a sample of the slowest.
    bound = 256 / trace.speed.sum(axis=1)
    assert (oracle.iteration_s >= bound - 1e-12).all()
    assert (oracle.iteration_s <= bound + 1 / trace.speed.min(axis=1)).all()
    assert gain_kept(oracle, equal_split, oracle) == 1.0
    assert gain_kept(equal_split, equal_split, oracle) == 0.0
    assert oracle.rmse == 0.0
    steady = SpeedTrace.of(trace.names, np.tile(trace.speed[:1], (50, 1)), trace.cpu[:50], trace.memory[:50])
    for name in ("last", "ema"):
        known = replay(steady, make_predictor(name, 8), 256, since=1)
        np.testing.assert_allclose(known.iteration_s, replay_oracle(steady, 256, since=1).iteration_s)


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(2, 30))
@settings(max_examples=60, deadline=None)
def test_the_clock_inverts_itself(seed: int, workers: int, rows: int) -> None:
    chance = np.random.default_rng(seed)
    clock = Clock(chance.uniform(0.1, 5, (rows, workers)), chance.uniform(0.5, 2, rows))
    at = chance.uniform(0, clock.horizon_s * 1.2, workers)
    np.testing.assert_allclose(clock.when(clock.done_by(at)), at, rtol=1e-9, atol=1e-9)
    halves = np.linspace(0, clock.horizon_s, 200)
    done = np.array([clock.done_by(float(t)) for t in halves])
    assert (np.diff(done, axis=0) > 0).all()


def test_bsp_on_the_clock_is_the_trace() -> None:
    trace = cpu_cluster(200, seed=1, workers=6)
    clock = cpu_clock(trace, 192)
    assert bsp(clock, np.full(6, 32.0)).iteration_s == pytest.approx(replay_equal(trace, 192).mean_s)


def test_ssp_against_a_step_by_step_simulation() -> None:
    """Two steady workers, 1 s and 3 s per iteration, bound 2: events by hand."""
    rates = np.tile([3.0, 1.0], (40, 1))
    clock = Clock(rates, np.full(40, 3.0))
    need = np.array([3.0, 3.0])
    ends: list[list[float]] = [[], []]
    for _ in range(200):
        for worker in range(2):
            begin = ends[worker][-1] if ends[worker] else 0.0
            number = len(ends[worker])
            other = ends[1 - worker]
            if number >= 2:
                if len(other) < number - 1:
                    continue
                begin = max(begin, other[number - 2])
            ends[worker].append(begin + 3.0 / rates[0, worker])
    made = bounded(clock, need, 2)
    counted = sum(end <= clock.horizon_s for row in ends for end in row)
    assert made.iteration_s == pytest.approx(clock.horizon_s * 2 / counted)
    assert made.iteration_gap == 2
    free = bounded(clock, need, None)
    assert free.iteration_s == pytest.approx(2 / (1 + 1 / 3), rel=0.02)
    assert free.iteration_gap == 80


def test_schemes_keep_their_order() -> None:
    trace = cpu_cluster(250, seed=4, workers=16)
    total = 16 * 64
    clock, need = cpu_clock(trace, total), equal(16, total).astype(float)
    base = bsp(clock, need).iteration_s
    work_bound = clock.horizon_s * total / clock.done[-1].sum()
    asp, ssp = bounded(clock, need, None), bounded(clock, need, 5)
    oracle = lb_bsp_oracle(clock, total)
    predicted = lb_bsp(clock, trace, total, make_predictor("ema", 16))
    shifted = work_shifting(clock, total)
    dropped = redundant(clock, lambda sizes: sizes.astype(float), total, 1)
    assert ssp.iteration_gap <= 5
    assert asp.iteration_gap > 5
    assert bounded(clock, need, 1).iteration_s == pytest.approx(base, rel=0.02)
    for made in (asp, ssp, oracle, predicted, shifted, dropped):
        assert work_bound * 0.98 <= made.iteration_s < base
    assert oracle.iteration_s < predicted.iteration_s
    assert oracle.iteration_s == pytest.approx(work_bound, rel=0.05)
    # Nobody waits in ASP, so all others update once per update of a worker, on average over updates.
    assert asp.staleness == pytest.approx(15, rel=0.1)
    assert predicted.staleness == 0


def test_equal_speeds_leave_nothing_to_shift() -> None:
    """Everybody ends at once: shifting work changes nothing, and an iteration is the batch over the speed."""
    trace = cpu_cluster(60, seed=0, workers=4)
    constant = dataclasses.replace(trace, speed=np.full_like(trace.speed, 10.0))
    made = work_shifting(cpu_clock(constant, 40), 40)
    assert made.iteration_s == pytest.approx(1.0)


def test_gpu_schemes_on_curves() -> None:
    _, curves = gpu_curves()
    clock = gpu_clock(curves, jitter(300, 16), 512)
    base = bsp(clock, curves.seconds(equal(16, 512)))
    balanced = bsp(clock, curves.seconds(least_longest(curves, 512)))
    assert balanced.iteration_s < 0.5 * base.iteration_s


def test_generator_is_seeded_and_shaped_like_table_2() -> None:
    trace, again, other = cpu_cluster(100), cpu_cluster(100), cpu_cluster(100, seed=1)
    assert np.array_equal(trace.speed, again.speed)
    assert not np.array_equal(trace.speed, other.speed)
    kinds = [name.rpartition("-")[0] for name in trace.names]
    counts = {kind: kinds.count(kind) for kind in set(kinds)}
    assert counts == {"m4.2xlarge": 17, "c5.2xlarge": 10, "r4.2xlarge": 2, "m4.4xlarge": 2, "m4.xlarge": 1}


@pytest.mark.slow
def test_narx_is_first_where_resources_drive_the_speed() -> None:
    for seed in range(3):
        trace = cpu_cluster(1200, seed, workers=16)
        errors = {name: replay(trace, make_predictor(name, 16), 2048, since=500).rmse for name in PREDICTORS}
        assert min(errors, key=lambda name: errors[name] or 0) == "narx", errors
