"""The model of failures against a simulation that knows none of its formulas: every failure, checkpoint and restart is played.
The papers' own figures. Spares, shrinking and waiting are played by the simulator of clusters (tests/cluster).
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ddltool.analyzers.job.planning.failures import Failures, daly_s
from ddltool.analyzers.job.planning.job_inputs import checkpoint_bytes, job_of
from ddltool.arrays import Floats
from ddltool.errors import InputError
from ddltool.fixtures import zoo

MINUTE_S, HOUR_S = 60.0, 3600.0
SEGMENTS, RUNS = 40, 4000
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


def played(failures: Failures, devices: int, interval_s: float, per_storage: int = 0) -> Floats:
    """How many times as long RUNS runs took as their computation alone.

    A run is SEGMENTS intervals, or the next whole number of patterns. After each interval comes a checkpoint, in a neighbour's
    memory where there are any, and after every ``per_storage``-th one in storage, which is written beside the training that
    follows. Each device fails after an exponential time of its own, of which the first counts. A failure that memory does not
    outlast takes that checkpoint with it. Then comes a restart, which may fail as well.
    """
    chance = np.random.default_rng(0)
    every, memory_s = max(per_storage, 1), failures.memory_s if per_storage else 0.0
    segments = -(-SEGMENTS // every) * every
    wall_s, written_at_s = np.zeros(RUNS), np.full(RUNS, math.inf)
    done, in_memory, in_storage, writing = (np.zeros(RUNS, dtype=int) for _ in range(4))
    restarts, saves = np.zeros(RUNS, dtype=bool), np.zeros(RUNS, dtype=bool)
    while (runs := np.flatnonzero((done < segments) | saves)).size:
        due_s = np.where(saves[runs], failures.checkpoint_s, interval_s + memory_s)
        due_s = np.where(restarts[runs], failures.restart_s, due_s)
        failure_s = chance.exponential(failures.mtbf_s / devices, len(runs))
        fails = failure_s < due_s
        wall_s[runs] += np.minimum(failure_s, due_s)
        is_written = runs[wall_s[runs] >= written_at_s[runs]]
        in_storage[is_written], written_at_s[is_written] = writing[is_written], math.inf
        trained, saved = runs[~fails & ~restarts[runs] & ~saves[runs]], runs[~fails & ~restarts[runs] & saves[runs]]
        done[trained] += 1
        in_memory[trained] = done[trained]
        writing[saved], written_at_s[saved] = done[saved], wall_s[saved] + failures.write_s
        saves[saved], saves[trained] = False, done[trained] % every == 0
        lasting = chance.random(len(runs)) < (failures.memory_share if per_storage else 0.0)
        lost, hit = runs[fails & ~lasting], runs[fails]
        in_memory[lost] = in_storage[lost]
        done[hit], written_at_s[hit] = in_memory[hit], math.inf
        saves[hit] &= False
        # what memory holds of a moment whose storage was due is stored first
        saves[hit] |= (done[hit] % every == 0) & (in_memory[hit] > in_storage[hit])
        restarts[runs] = fails
    return wall_s / (segments * interval_s)


def mean_of(times: Floats, within: float = 0.005) -> float:
    """The mean, known to within a share of it: else a comparison would say little."""
    assert times.std() / math.sqrt(len(times)) < within * times.mean()
    return float(times.mean())


@pytest.mark.parametrize(("mtbf_s", "devices", "checkpoint_s", "restart_s"), GRID)
def test_the_time_of_a_run_and_the_best_interval(
    mtbf_s: float, devices: int, checkpoint_s: float, restart_s: float
) -> None:
    failures = Failures(mtbf_s=mtbf_s, checkpoint_s=checkpoint_s, restart_s=restart_s)
    chosen_s = failures.interval_s(devices)
    times = played(failures, devices, chosen_s)
    mean = mean_of(times)
    assert failures.factor(devices) == pytest.approx(mean, rel=0.02)
    spread_s = failures.spread_s(devices, mean * SEGMENTS * chosen_s)
    if failures.factor(devices) < 1.5:  # restarts that fail come in rows
        assert spread_s / (SEGMENTS * chosen_s) == pytest.approx(times.std(), rel=0.15)
    stretches = (0.4, 2.0)
    others = [played(failures, devices, chosen_s * stretch).mean() for stretch in stretches]
    assert mean < 1.01 * min(others)
    assert max(others[0], others[-1]) > 1.002 * mean  # the search is wide enough to see a worse one
    exact = [replace(failures, checkpoint_interval_s=chosen_s * 1.01**power) for power in range(-60, 61)]
    assert failures.factor(devices) < 1.003 * min(each.factor(devices) for each in exact)


@pytest.mark.parametrize(("mtbf_s", "write_s"), [(24 * HOUR_S, 60.0), (2 * HOUR_S, 120.0), (2 * HOUR_S, 900.0)])
def test_checkpoints_that_are_written_beside_training(mtbf_s: float, write_s: float) -> None:
    failures = Failures(mtbf_s=mtbf_s, checkpoint_s=5.0, write_s=write_s, restart_s=120.0)
    chosen_s = failures.interval_s(1)
    assert chosen_s == max(daly_s(5.0, mtbf_s), write_s)  # one at a time
    assert failures.factor(1) == pytest.approx(mean_of(played(failures, 1, chosen_s)), rel=0.02)
    waiting = replace(failures, checkpoint_s=5.0 + write_s, write_s=0.0)
    assert failures.factor(1) < waiting.factor(1) * (1 if write_s < 900 else 1.1)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
@pytest.mark.parametrize(("mtbf_s", "memory_s", "checkpoint_s"), [(24 * HOUR_S, 5.0, 300.0), (HOUR_S, 2.0, 60.0)])
def test_checkpoints_in_memory_and_in_storage(
    share: float, mtbf_s: float, memory_s: float, checkpoint_s: float
) -> None:
    failures = Failures(
        mtbf_s=mtbf_s, checkpoint_s=checkpoint_s, restart_s=120.0, memory_s=memory_s, memory_share=share
    )
    chosen_s, number = failures.interval_s(1), failures.per_storage(1)
    assert number > 1
    assert failures.factor(1) == pytest.approx(mean_of(played(failures, 1, chosen_s, number)), rel=0.02)
    best = min(
        played(failures, 1, chosen_s * stretch, max(1, round(number * more))).mean()
        for stretch in (0.7, 0.85, 1.0, 1.2, 1.4)
        for more in (0.5, 0.75, 1.0, 1.5, 2.0)
    )
    assert failures.factor(1) < 1.02 * best
    assert failures.factor(1) < replace(failures, memory_s=0.0).factor(1)


def test_a_notice_leaves_time_for_a_checkpoint() -> None:
    """Lost are the checkpoint and the restart; by hand, where restarts do not fail."""
    spot = Failures(mtbf_s=10 * HOUR_S, checkpoint_s=20.0, write_s=40.0, restart_s=1e-6, notice_s=120.0)
    assert spot.factor(10) == pytest.approx(1 + 60.0 / HOUR_S)
    assert spot.interval_s(10) == math.inf
    late = replace(spot, notice_s=59.0)
    assert late.interval_s(10) < HOUR_S
    assert late.factor(10) > spot.factor(10)


def test_the_simulation_itself() -> None:
    """Without failures a run is its computation and checkpoints; a device's failures add up over devices."""
    never = Failures(mtbf_s=1e10, checkpoint_s=60.0, memory_s=6.0)
    assert played(never, 1, 540.0)[0] == pytest.approx(600 / 540)
    assert played(never, 1, 540.0, per_storage=6)[0] == pytest.approx((546 + 10) / 540)
    few, many = (Failures(mtbf_s=HOUR_S * devices, checkpoint_s=60.0) for devices in (1, 16))
    assert (played(few, 1, 600.0) == played(many, 16, 600.0)).all()
    assert few.factor(1) == many.factor(16)


@pytest.mark.parametrize(("mtbf_min", "interval_min", "digits"), [(24 * 60, 117, 0), (6 * 60, 57, 0), (15, 9.1, 1)])
def test_dalys_own_figures(mtbf_min: float, interval_min: float, digits: int) -> None:
    """Daly 2006, Figures 3 to 5: a dump of 5 minutes, a restart of 10."""
    found = Failures(mtbf_s=mtbf_min * MINUTE_S, checkpoint_s=5 * MINUTE_S, restart_s=10 * MINUTE_S).interval_s(1)
    assert round(found / MINUTE_S, digits) == interval_min


def test_youngs_formula_as_graphlab_used_it() -> None:
    """Low et al. (VLDB 2012): 64 machines that fail once a year, a checkpoint of 2 minutes: every 3 hours."""
    failures = Failures(mtbf_s=365 * 24 * HOUR_S, checkpoint_s=2 * MINUTE_S)
    assert failures.interval_s(64) / HOUR_S == pytest.approx(3, rel=0.01)


def test_two_levels_lose_what_benoit_et_al_found() -> None:
    """Benoit et al. (IEEE TC 2017): rare failures of kind l lose ``sum sqrt(2 lambda_l C_l)``, in ``sqrt`` proportions."""
    mtbf_s, share = 1e8, 0.8
    failures = Failures(mtbf_s=mtbf_s, checkpoint_s=100.0, memory_s=1.0, memory_share=share, restart_s=0.0)
    lost = math.sqrt(2 * share / mtbf_s * 1.0) + math.sqrt(2 * (1 - share) / mtbf_s * 100.0)
    assert failures.factor(1) - 1 == pytest.approx(lost, rel=0.01)
    assert failures.per_storage(1) == math.sqrt(4 * 100.0)
    assert failures.interval_s(1) == pytest.approx(math.sqrt(2 * mtbf_s * 1.0 / share), rel=0.01)


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("lion", None)])
def test_a_checkpoint_is_as_large_as_what_torch_saves(name: str, kind: type[torch.optim.Optimizer] | None) -> None:
    """Parameters and the optimizer's state after a step; Lion, which torch lacks, keeps one moment."""
    model = zoo.build("cifarnet")
    saved = parameters = sum(each.numel() * each.element_size() for each in model.parameters())
    if kind is not None:
        optimizer = kind(model.parameters())
        model(*zoo.example_inputs("cifarnet", 2)).sum().backward()
        optimizer.step()
        states = optimizer.state_dict()["state"].values()
        saved += sum(each.numel() * each.element_size() for state in states for each in state.values())
    else:
        saved += parameters
    job = job_of("zoo:cifarnet", "V100=2", batch_size=4, optimizer=name)
    assert checkpoint_bytes(job, Path(), None) == pytest.approx(saved, rel=1e-3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mtbf_s": 0.5}, "mtbf: is 0.5 s; from 1"),
        ({"checkpoint_s": -1.0}, "checkpoint: is -1 s; at most 604800 seconds"),
        ({"write_s": 1e9}, "write: is 1e\\+09 s"),
        ({"memory_share": 1.5}, "memory checkpoint: outlasts 1.5 of the failures; a share"),
    ],
)
def test_values_that_make_no_sense_are_named(values: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Failures(**values)  # type: ignore[arg-type]
