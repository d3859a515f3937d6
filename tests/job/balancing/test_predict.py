"""Speed predictors online, their replay, weights that travel, and the schemes they are compared with.
Every figure of ``ddltool balance`` that needs no training, from the trace by hand: exact fractions, loops, definitions.
Both ways to choose batch sizes keep the least that every worker gets, and notice a speed that changes for good.
"""

from __future__ import annotations

import dataclasses
import math
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.synthetic import cpu_cluster, gpu_clock, gpu_curves, jitter, least_longest
from ddltool.analyzers.job.balancing.algorithm2 import Algorithm2, Algorithm2Settings, Phase
from ddltool.analyzers.job.balancing.control import Policy, Report, SpeedPolicy, TrialPolicy
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
from ddltool.analyzers.job.balancing.sizing import equal, proportional
from ddltool.analyzers.job.balancing.trained import Ema, PredictorSettings
from ddltool.analyzers.step.measured.worker_tables import SpeedTrace
from ddltool.errors import InputError
from tests.conftest import Cli, write

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
    trace = cpu_cluster(220, seed=3, workers=2)
    cut = 200
    changed = SpeedTrace.of(
        trace.names,
        np.concatenate((trace.speed[:cut], trace.speed[cut:] * 3)),
        np.concatenate((trace.cpu[: cut + 1], trace.cpu[cut + 1 :] / 2)),
        trace.memory,
    )
    runs = [replay(t, make_predictor(name, 2, QUICK), 96).predicted for t in (trace, trace, changed)]
    assert all(run is not None for run in runs)
    assert np.array_equal(runs[0], runs[1], equal_nan=True)  # type: ignore[arg-type]
    assert np.array_equal(runs[0][: cut + 1], runs[2][: cut + 1], equal_nan=True)  # type: ignore[index]
    assert not np.array_equal(runs[0][cut + 1 :], runs[2][cut + 1 :])  # type: ignore[index]


@pytest.mark.parametrize("name", PREDICTORS)
def test_predictions_of_one_worker_do_not_hang_on_the_order_of_workers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """True to the bit for what each worker computes alone; networks begin with a common model, here with none."""
    trace = cpu_cluster(330, seed=5, workers=2)
    swapped = SpeedTrace.of(trace.names[::-1], trace.speed[:, ::-1], trace.cpu[:, ::-1], trace.memory[:, ::-1])
    one, other = (make_predictor(name, 2, QUICK) for _ in range(2))
    monkeypatch.setattr(NeuralNetwork, "_fit_common", lambda *_: None)
    first, second = replay(trace, one, 96).predicted, replay(swapped, other, 96).predicted
    np.testing.assert_allclose(first, second[:, ::-1], rtol=1e-6)  # type: ignore[index]


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
def test_the_clock_inverts_itself(seed: int, workers: int, rows: int) -> None:
    chance = np.random.default_rng(seed)
    clock = Clock(chance.uniform(0.1, 5, (rows, workers)), chance.uniform(0.5, 2, rows))
    at = chance.uniform(0, clock.horizon_s * 1.2, workers)
    np.testing.assert_allclose(clock.when(clock.done_by(at)), at, rtol=1e-9, atol=1e-9)
    halves = np.linspace(0, clock.horizon_s, 200)
    done = np.array([clock.done_by(float(t)) for t in halves])
    assert (np.diff(done, axis=0) > 0).all()


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


Speeds = list[list[Fraction]]
ALPHA, BOUND = Fraction(1, 5), 5


def shares(speeds: list[Fraction], total: int) -> list[int]:
    """Return whole batches in proportion to speeds, at least 1, the largest remainders rounded up (the first of equal ones)."""
    fixed: set[int] = set()
    while True:
        left = total - len(fixed)
        moving = sum((v for w, v in enumerate(speeds) if w not in fixed), Fraction(0))
        exact = [Fraction(1) if w in fixed else v * left / moving for w, v in enumerate(speeds)]
        below = {w for w, share in enumerate(exact) if share < 1}
        if not below:
            break
        fixed |= below
    sizes = [math.floor(share) for share in exact]
    order = sorted(range(len(speeds)), key=lambda w: (-(exact[w] - sizes[w]), w))
    for worker in order[: total - sum(sizes)]:
        sizes[worker] += 1
    return sizes


def equal_shares(workers: int, total: int) -> list[int]:
    return [total // workers + (worker < total % workers) for worker in range(workers)]


def slowest(sizes: list[int], speeds: list[Fraction]) -> Fraction:
    return max(size / speed for size, speed in zip(sizes, speeds, strict=True))


class Memory:
    """``last`` or ``ema`` of the speeds seen so far; None before the first."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: list[Fraction] | None = None

    def see(self, speeds: list[Fraction]) -> None:
        if self.state is None or self.kind == "last":
            self.state = speeds
        else:
            self.state = [ALPHA * new + (1 - ALPHA) * old for new, old in zip(speeds, self.state, strict=True)]

    def sizes(self, workers: int, total: int) -> list[int]:
        return equal_shares(workers, total) if self.state is None else shares(self.state, total)


def random_trace(chance: random.Random) -> tuple[Speeds, int]:
    """Return speeds of a few workers, far apart or close, and a batch that can be as small as one sample each."""
    workers = chance.randint(1, 5)
    base = [chance.choice((1, 10, 100)) * chance.uniform(1, 9) for _ in range(workers)]
    trace = [
        [Fraction(f"{speed * chance.uniform(0.3, 1.7):.6f}") for speed in base] for _ in range(chance.randint(21, 40))
    ]
    return trace, chance.choice((workers, workers + 1, 7 * workers, 129 * workers + 5))


def saved(path: Path, trace: Speeds, chance: random.Random) -> Path:
    rows = [
        f"{k},w{worker},{float(speed)!r},{chance.random():.3f},{chance.random():.3f}"
        for k, row in enumerate(trace)
        for worker, speed in enumerate(row)
    ]
    chance.shuffle(rows)
    return write(path, "iteration,worker,speed,cpu,memory", *rows)


def replayed(trace: Speeds, total: int, kind: str, since: int) -> dict[str, float]:
    """Return mean iteration time and errors of batches by the ``last`` or ``ema`` of earlier speeds."""
    workers, memory = len(trace[0]), Memory(kind)
    times, errors = [], [Fraction(0)] * workers
    for k, speeds in enumerate(trace):
        if k >= since:
            assert memory.state is not None
            times.append(slowest(memory.sizes(workers, total), speeds))
            errors = [e + (p - v) ** 2 for e, p, v in zip(errors, memory.state, speeds, strict=True)]
        memory.see(speeds)
    judged = len(trace) - since
    roots = [math.sqrt(error / judged) for error in errors]
    means = [float(sum(row[worker] for row in trace[since:])) / judged for worker in range(workers)]
    return {
        "iteration_s": float(sum(times) / judged),
        "rmse": sum(roots) / workers,
        "rmse_relative": sum(root / mean for root, mean in zip(roots, means, strict=True)) / workers,
    }


@pytest.mark.parametrize("seed", range(20))
def test_the_replay_by_hand(cli: Cli, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    trace, total = random_trace(chance)
    workers, kind, since = len(trace[0]), chance.choice(("last", "ema")), 20
    path = saved(tmp_path / "trace.csv", trace, chance)
    result = cli("balance", path, "--predictor", kind, "--total-batch", total, "--warm-up", 20, "--json").done()
    document = result.document
    judged = trace[since:]
    equal_s = float(sum(slowest(equal_shares(workers, total), row) for row in judged) / len(judged))
    oracle_s = float(sum(slowest(shares(row, total), row) for row in judged) / len(judged))
    made = document["predictors"][kind]
    expected = replayed(trace, total, kind, since)
    for name, value in expected.items():
        assert made[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    assert made["iteration_time_ratio"] == pytest.approx(expected["iteration_s"] / equal_s, rel=1e-9)
    assert document["equal_split"] == pytest.approx({"iteration_s": equal_s, "iteration_time_ratio": 1.0}, rel=1e-9)
    assert document["oracle"] == pytest.approx(
        {"iteration_s": oracle_s, "iteration_time_ratio": oracle_s / equal_s}, rel=1e-9
    )
    gain = (equal_s - expected["iteration_s"]) / (equal_s - oracle_s) if equal_s - oracle_s > 1e-12 else 1.0
    assert made["gain_kept"] == pytest.approx(gain, rel=1e-6)


class WallClock:
    """Rates that change from row to row of wall-clock time, the last one's going on for ever."""

    def __init__(self, trace: Speeds, total: int) -> None:
        self.trace = trace
        self.ends = []
        at = Fraction(0)
        for row in trace:
            at += slowest(equal_shares(len(row), total), row)
            self.ends.append(at)

    def row(self, at: Fraction) -> int:
        return next((k for k, end in enumerate(self.ends) if at < end), len(self.ends) - 1)

    def end(self, worker: int, begin: Fraction, samples: Fraction | int) -> Fraction:
        """Return when the worker has made so many samples."""
        at, left = begin, Fraction(samples)
        while True:
            k = self.row(at)
            rate = self.trace[k][worker]
            until = self.ends[k] if at < self.ends[k] else None
            if until is None or left <= rate * (until - at):
                return at + left / rate
            left -= rate * (until - at)
            at = until


def together(clock: WallClock, total: int, memory: Memory | None) -> float:
    """Return the mean iteration of workers that begin together: BSP, or LB-BSP by a memory of the speeds met."""
    at, count = Fraction(0), 0
    workers = len(clock.trace[0])
    while at < clock.ends[-1]:
        sizes = equal_shares(workers, total) if memory is None else memory.sizes(workers, total)
        ends = [clock.end(worker, at, size) for worker, size in enumerate(sizes)]
        if memory is not None:
            memory.see([size / (end - at) for size, end in zip(sizes, ends, strict=True)])
        at, count = max(ends), count + 1
    return float(at / count)


def apart(clock: WallClock, total: int, bound: int | None) -> dict[str, Any]:
    """Return ASP's or SSP's figures, from a list of all iterations."""
    workers, horizon = len(clock.trace[0]), clock.ends[-1]
    sizes = equal_shares(workers, total)
    begins: list[list[Fraction]] = [[] for _ in range(workers)]
    ends: list[list[Fraction]] = [[] for _ in range(workers)]
    while min(row[-1] if row else Fraction(0) for row in ends) < horizon:
        made = len(ends[0])
        for worker in range(workers):
            begin = ends[worker][-1] if made else Fraction(0)
            if bound is not None and made >= bound:
                begin = max(begin, *(row[made - bound] for row in ends))
            begins[worker].append(begin)
        for worker in range(workers):
            ends[worker].append(clock.end(worker, begins[worker][-1], sizes[worker]))
    counted, unseen, widest = 0, 0, 0
    for worker in range(workers):
        for begin, end in zip(begins[worker], ends[worker], strict=True):
            if end > horizon:
                continue
            counted += 1
            unseen += sum(begin < other < end for w, row in enumerate(ends) if w != worker for other in row)
            widest = max(widest, *(made_by(ends[worker], end) - made_by(row, end) for row in ends))
    return {
        "iteration_s": float(horizon * workers / max(1, counted)),
        "staleness": unseen / max(1, counted),
        "iteration_gap": widest,
    }


def made_by(ends: list[Fraction], at: Fraction) -> int:
    return sum(end <= at for end in ends)


@pytest.mark.parametrize("seed", range(10))
def test_the_schemes_by_hand(cli: Cli, tmp_path: Path, seed: int) -> None:
    chance = random.Random(500 + seed)
    trace, total = random_trace(chance)
    trace = [[speed / 20 + row[0] for speed in row] for row in trace[:24]]  # close to each other: iterations stay few
    total = max(total, 7 * len(trace[0]))
    path = saved(tmp_path / "trace.csv", trace, chance)
    trace = [[Fraction(float(speed)) for speed in row] for row in trace]
    options = ("--predictor", "last", "--total-batch", total, "--warm-up", 20, "--schemes", "--json")
    result = cli("balance", path, *options).done()
    made = result.document["schemes"]
    clock = WallClock(trace, total)
    bsp_s = together(clock, total, None)
    assert bsp_s == pytest.approx(float(clock.ends[-1] / len(trace)))
    assert made["bsp"]["iteration_s"] == pytest.approx(bsp_s, rel=1e-9)
    assert made["lb_bsp"]["iteration_s"] == pytest.approx(together(clock, total, Memory("last")), rel=1e-9)
    for name, bound in (("asp", None), ("ssp", BOUND)):
        expected = apart(clock, total, bound)
        assert {key: made[name][key] for key in expected} == pytest.approx(expected, rel=1e-9), name
    for record in (value for key, value in made.items() if key != "predictor"):
        assert record["iteration_time_ratio"] == pytest.approx(record["iteration_s"] / bsp_s, rel=1e-9)


NOTHING = np.zeros(2)


def test_sizes_below_the_least_have_no_solution() -> None:
    assert proportional([1.0, 15.0], 16, least=3).tolist() == [3, 13]
    with pytest.raises(InputError, match="least: is 0"):
        proportional([1.0, 1.0], 8, least=0)
    for made in (SpeedPolicy, TrialPolicy):
        with pytest.raises(InputError, match=r"sizes: is \[2, 14\]; give every worker 3 samples or more"):
            made([2, 14], least=3)
    with pytest.raises(InputError, match="2 workers and 16 samples, 3 or more each"):
        Algorithm2([8, 8], least=3).load_state_dict(Algorithm2([2, 14]).state_dict())


@given(st.integers(0, 10**6), st.sampled_from(["speeds", "trial"]))
def test_both_ways_keep_the_least_and_the_total(seed: int, way: str) -> None:
    chance = np.random.default_rng(seed)
    workers, least = int(chance.integers(2, 5)), int(chance.integers(1, 5))
    start = (least + chance.integers(0, 12, workers)).tolist()
    trial = Algorithm2Settings(step=3, window=1, fine_window=2, renew=True)
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
    algorithm = Algorithm2([16, 16], settings=Algorithm2Settings(window=1, fine_window=1, renew=renew), least=4)
    told = [algorithm.observe([1.0, 1000.0]) for _ in range(12)]
    assert [decision.sizes[1] for decision in told] == [11, 6, 6, 5, *[4] * 8]
    assert [decision.remove for decision in told] == [False] * 5 + [True] * 7
    assert told[2].phase is Phase.FINE


def predicted(speeds: list[list[float]], restart_after: int) -> list[float]:
    ema = Ema(2, restart_after=restart_after)
    for speed in speeds:
        ema.observe(np.array(speed))
    return ema.predict(NOTHING, NOTHING).tolist()


def test_the_average_begins_anew_after_a_lasting_change_and_only_for_who_changed() -> None:
    before = [[30.0, 20.0]] * 5
    assert predicted([*before, *[[10.0, 20.0]] * 3], 3) == [10.0, 20.0]
    assert predicted([*before, *[[90.0, 20.0]] * 3], 3) == [90.0, 20.0]
    assert predicted([*before, [10.0, 20.0], [8.0, 20.0], [12.0, 20.0]], 3)[0] == 10.0
    assert predicted([*before, *[[10.0, 20.0]] * 3], 0)[0] == pytest.approx(10 + 20 * 0.8**3)


def test_what_passes_is_no_change() -> None:
    """Two far-off speeds and a usual one, or far off on either side in turns, leave the plain average."""
    for after in ([10.0, 10.0, 30.0], [10.0, 90.0, 10.0, 90.0]):
        speeds = [[30.0, 20.0]] * 5 + [[speed, 20.0] for speed in after]
        assert predicted(speeds, 3) == predicted(speeds, 0)


@given(st.lists(st.tuples(st.floats(90, 110), st.floats(4.5, 5.5)), min_size=1, max_size=30))
def test_noise_of_a_tenth_is_no_change(speeds: list[tuple[float, float]]) -> None:
    rows = [list(row) for row in speeds]
    assert predicted(rows, 3) == predicted(rows, 0)


def steps_until_level(renew: bool) -> int:
    """Return the iterations that Algorithm 2 needs once speeds of 3 and 1 have changed places, until times differ by 15 %."""
    algorithm, speeds = Algorithm2([64, 64], settings=Algorithm2Settings(renew=renew)), np.array([3.0, 1.0])
    for _ in range(150):
        algorithm.observe(algorithm.sizes / speeds)
    assert algorithm.phase is Phase.FINE
    assert abs(algorithm.sizes[0] - 96) <= 1
    for step in range(200):
        seconds = algorithm.sizes / speeds[::-1]
        if seconds.max() < 1.15 * seconds.min():
            return step
        algorithm.observe(seconds)
    raise AssertionError("never level again")


def test_the_fast_approach_comes_back_after_a_change() -> None:
    """64 samples have to move: 13 iterations of 5 and a window, or one at a time after a long window."""
    assert steps_until_level(renew=True) <= 20
    assert steps_until_level(renew=False) >= 60


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_end_fine_tuning(seed: int) -> None:
    chance, algorithm = np.random.default_rng(seed), Algorithm2([32] * 4, settings=Algorithm2Settings(renew=True))
    speeds = np.array([8.0, 3.0, 2.0, 1.0])
    for step in range(600):
        algorithm.observe(algorithm.sizes / speeds * chance.uniform(0.95, 1.05, 4))
        assert step < 100 or algorithm.phase is Phase.FINE
