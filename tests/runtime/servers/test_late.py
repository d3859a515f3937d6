"""Workers that join a job which is running, between real processes."""

from __future__ import annotations

import numpy as np
import pytest

from ddltool.errors import InputError
from ddltool.runtime.servers import ASP, BSP, SSP, ElasticBSP, SyncPolicy, TransferPlan, shard
from tests.helpers import sync_workers as bodies
from tests.helpers.transfer_workers import make_model, results, trained_alone

# Those who began wait in this step for who joins, however late, and are not taken for lost meanwhile.
HELD = {"hold": 20}
NAMES = [name for name, _ in make_model().named_parameters()]


@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_bsp_takes_a_joiner_into_the_mean_from_its_first_step_on(servers: int) -> None:
    """Bit for bit as one process that adds the third worker's gradients from that step on."""
    steps = [60, 60, 8]
    workers, ours, late = bodies.run(BSP(), 2, servers, steps, [0.02] * 3, {"open_at": 20} | HELD)
    (joiner,) = results(late)
    found = results(workers)
    began = joiner["began"]
    assert 1 <= began < 50
    assert joiner["worker"] == 2

    def workers_of(step: int) -> list[tuple[int, int]]:
        return [(0, step), (1, step), *([(2, step - began)] if began <= step < began + steps[2] else [])]

    alone = trained_alone(60, workers_of)
    for worker in found:
        for name in NAMES:
            assert worker["weights"][name].tobytes() == alone[name].tobytes()
    for server in results(ours):
        assert set(server["version"].values()) == {60}
        assert server["lost"] == {}
        assert server["steps"] == 128


POLICIES = [pytest.param(ASP(), marks=pytest.mark.slow), SSP(2), ElasticBSP(4)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_joiner_works_beside_the_others(policy: SyncPolicy) -> None:
    steps, servers = [40, 40, 10], 2 if isinstance(policy, ElasticBSP) else 1
    options = {"open_at": 20, "optimizer": {"lr": 0.02}} | HELD
    workers, ours, late = bodies.run(policy, 2, servers, steps, [0.02, 0.03, 0.02], options)
    found, (joiner,) = results(workers), results(late)
    assert 1 <= joiner["began"] < 40, "it came while the others worked"
    assert all(np.isfinite(value).all() for one in (*found, joiner) for value in one["weights"].values())
    for server in results(ours):
        assert server["lost"] == {}
        assert server["steps"] == 90
        assert set(server["version"].values()) == {90}
    if isinstance(policy, SSP):
        for name in NAMES:
            taken = [0, 0, joiner["began"]]
            present = [True, True, False]
            for _, worker, clock, _, _ in (event for event in results(ours)[0]["events"] if event[3] == name):
                assert clock == taken[worker]
                present[worker] = True
                assert clock - min(count for count, here in zip(taken, present, strict=True) if here) <= 2
                taken[worker] += 1
                present[worker] = taken[worker] < steps[worker] + (joiner["began"] if worker == 2 else 0)
    if isinstance(policy, ElasticBSP):
        supersteps = results(ours)[0]["supersteps"]
        with_it = [step for step in supersteps if step.workers == [0, 1, 2]]
        assert with_it[0].iterations == [1, 1, 1], "nothing is known of the newcomer yet"
        assert any(len(step.predicted_end_s) == 3 for step in with_it[2:]), "now it is predicted as the others are"


def test_a_joiner_takes_over_the_share_of_a_lost_worker() -> None:
    """Killed in step 3; from the joiner's first epoch on, all samples belong to those who are there."""
    steps = [60, 60, 10]
    options = {"open_at": 60, "epochs": True, "culprit": 1, "trouble": "kill"} | HELD | {"hold": 30}
    workers, ours, late = bodies.run(BSP(), 2, 1, steps, [0.02] * 3, options)
    assert workers[1].exit_code == -9
    (survivor,), (joiner,) = results(workers[:1]), results(late)
    assert list(results(ours)[0]["lost"]) == [1]
    told = survivor["members"]  # epoch by epoch
    assert told[0] == (0, 1)
    first = joiner["epoch"]
    assert (0,) in told[:first], "in between the survivor had it all"
    assert joiner["members"] == told[first : first + 10] == [(0, 2)] * 10
    shares = [shard(23, told[first], worker, epoch=first, seed=0) for worker in told[first]]
    assert sorted(np.concatenate(shares).tolist()) == list(range(23))


@pytest.mark.parametrize("servers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_joiner_that_is_killed_is_taken_out(servers: int) -> None:
    steps = [60, 60, 60]
    options = {"open_at": 20, "culprit": 2, "trouble": "kill"} | HELD
    workers, ours, late = bodies.run(BSP(), 2, servers, steps, [0.02] * 3, options)
    assert late[0].exit_code == -9
    results(workers)
    for server in results(ours):
        assert list(server["lost"]) == [2]
        assert set(server["version"].values()) == {60}


def test_who_cannot_join_is_told_why_and_the_job_goes_on() -> None:
    """Three knock: one has another synchronisation model, one finds no seat, and one gets in."""
    options = {"open_at": 20, "late": 1, "strangers": {3: SSP(3)}} | HELD
    workers, ours, late = bodies.run(BSP(), 2, 1, [60, 60, 5, 5, 5], [0.02] * 5, options)
    results(workers)
    (server,) = results(ours)
    assert server["steps"] == 125
    errors = sorted(outcome.error for outcome in late)
    assert errors[0] == ""
    assert errors[1].startswith("InputError: job: is plan ")
    assert "under BSP, this worker has plan" in errors[1]
    assert errors[2] == "InputError: transfer plan:late: all 1 seats have been taken; plan for more"


def test_a_joiner_that_comes_when_all_is_over_is_told() -> None:
    options = {"open_at": 1, "comes_after": True}
    workers, ours, late = bodies.run(BSP(), 2, 1, [5, 5, 5], [0.0] * 3, options)
    results(workers)
    results(ours)
    assert late[0].error.startswith("TransferError: server 0 (rank 2) has, for 1 s, not answered at 127.0.0.1:")


def test_a_plan_has_seats_for_late_workers() -> None:
    with pytest.raises(InputError, match="transfer plan:late: is -1; give 0 or more"):
        TransferPlan.for_model(make_model(), workers=1, servers=1, late=-1)
    plan = TransferPlan.for_model(make_model(), workers=2, servers=3, late=2)
    assert (plan.world_size, plan.seats) == (5, 4)
    assert [plan.rank_of_worker(worker) for worker in range(4)] == [0, 1, 5, 6]
    assert plan.digest() != TransferPlan.for_model(make_model(), workers=2, servers=3).digest()
