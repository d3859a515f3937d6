"""Every figure of ``ddltool balance`` that needs no training, from the trace by hand: exact fractions, loops, definitions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Result, write

Cli = Callable[..., Result]
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
    result = cli("balance", path, "--predictor", kind, "--total-batch", total, "--warm-up", 20, "--json")
    assert result.code == 0, result.err
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
    result = cli("balance", path, *options)
    assert result.code == 0, result.err
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
