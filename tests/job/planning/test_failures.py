"""Daly's closed forms against a simulation that knows nothing of them: every failure, checkpoint and restart is played."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ddltool.analyzers.job.planning.options import Failures

HOUR_S = 3600.0
SEGMENTS, RUNS = 60, 4000
GRID = [
    # mean seconds between failures of a device, devices, seconds of a checkpoint, of a restart
    (24 * HOUR_S, 1, 60.0, 300.0),
    (24 * HOUR_S, 64, 60.0, 300.0),
    (24 * HOUR_S, 256, 60.0, 300.0),
    (40 * HOUR_S, 8, 90.0, 240.0),
    (1e6, 1000, 90.0, 240.0),
    (HOUR_S, 1, 60.0, 0.0),
    (HOUR_S, 8, 300.0, 60.0),
    (2 * HOUR_S, 8, 5.0, 600.0),
    (HOUR_S, 8, 900.0, 30.0),  # a checkpoint takes twice the time between failures
]


def played(failures: Failures, devices: int, interval_s: float, seed: int) -> tuple[float, float]:
    """How many times as long runs took as their computation alone, and the standard error of that mean.

    A run is SEGMENTS intervals with a checkpoint after each. Each device fails after an exponential time of its own, of which
    the first counts: then the work since the last checkpoint is done again, after a restart, which may fail as well.
    """
    chance = np.random.default_rng(seed)
    left, wall_s, restarts = np.full(RUNS, SEGMENTS), np.zeros(RUNS), np.zeros(RUNS, dtype=bool)
    while (runs := np.flatnonzero(left)).size:
        due_s = np.where(restarts[runs], failures.restart_s, interval_s + failures.checkpoint_s)
        failure_s = chance.exponential(failures.mtbf_s / devices, len(runs))
        fails = failure_s < due_s
        wall_s[runs] += np.minimum(failure_s, due_s)
        left[runs] -= ~fails & ~restarts[runs]
        restarts[runs] = fails
    times = wall_s / (SEGMENTS * interval_s)
    return float(times.mean()), float(times.std() / math.sqrt(RUNS))


@pytest.mark.parametrize(("mtbf_s", "devices", "checkpoint_s", "restart_s"), GRID)
def test_the_time_of_a_run_and_the_best_interval(
    mtbf_s: float, devices: int, checkpoint_s: float, restart_s: float
) -> None:
    failures = Failures(mtbf_s=mtbf_s, checkpoint_s=checkpoint_s, restart_s=restart_s)
    chosen_s = failures.interval_s(devices)
    mean, error = played(failures, devices, chosen_s, seed=0)
    assert error < 0.005 * mean  # else the next line would say little
    assert failures.factor(devices) == pytest.approx(mean, rel=0.02)
    stretches = (0.4, 0.6, 0.75, 0.9, 1.1, 1.3, 1.6, 2.0)
    others = [played(failures, devices, chosen_s * stretch, seed=0)[0] for stretch in stretches]
    assert mean < 1.01 * min(others)
    assert max(others[0], others[-1]) > 1.002 * mean  # the search is wide enough to see a worse one


def test_the_simulation_itself() -> None:
    """Without failures a run is its computation and checkpoints; a device's failures add up over devices."""
    never = Failures(mtbf_s=1e15, checkpoint_s=60.0)
    assert played(never, 1, 540.0, seed=0)[0] == pytest.approx(600 / 540)
    few, many = (Failures(mtbf_s=HOUR_S * devices, checkpoint_s=60.0) for devices in (1, 16))
    assert played(few, 1, 600.0, seed=0) == played(many, 16, 600.0, seed=0)
    assert few.factor(1) == many.factor(16)
