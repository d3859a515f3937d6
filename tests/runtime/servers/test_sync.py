"""Synchronisation models between real processes. Workers are made unequal by sleeps; what matters are counts and order."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddltool.analyzers.job.barriers.predict import PREDICTORS, predict_ends
from ddltool.analyzers.job.barriers.tradeoff import best_barrier
from ddltool.analyzers.job.barriers.zipline import zipline
from ddltool.artifacts import save
from ddltool.errors import InputError
from ddltool.plans import Superstep
from ddltool.runtime.servers import ASP, BSP, SSP, ElasticBSP, SyncPolicy, shard
from ddltool.runtime.servers.policies import ServerState
from tests.helpers import sync_workers as bodies
from tests.helpers.runtime_workers import enforcement
from tests.helpers.transfer_workers import Outcome, launch, make_model, results, trained_alone

STEPS = 5
NAMES = [name for name, _ in make_model().named_parameters()]


def run(
    policy: SyncPolicy, steps: list[int], sleeps_s: list[float], servers: int = 1, **options: Any
) -> tuple[list[Outcome], list[Outcome]]:
    """Return how the workers and the servers ended."""
    return bodies.run(policy, len(steps), servers, steps, sleeps_s, options)[:2]


@pytest.mark.parametrize(("servers", "order"), [(1, "none"), (2, "reversed")])
def test_bsp_has_the_bits_of_one_process(servers: int, order: str) -> None:
    workers, ours = run(BSP(), [STEPS] * 3, [0.0, 0.1, 0.0], servers, order=order)
    alone = trained_alone(STEPS, lambda step: [(worker, step) for worker in range(3)])
    for worker in results(workers):
        for name in NAMES:
            assert worker["weights"][name].tobytes() == alone[name].tobytes()
    for server in results(ours):
        assert set(server["version"].values()) == {STEPS}
        assert server["staleness"] == {0: 3 * STEPS}
        assert min(server["wait_s"][0], server["wait_s"][2]) > 0


def test_a_plan_is_followed_until_the_data_are_used_up(tmp_path: Path) -> None:
    """Two workers of a plan; one leaves after three batches, the other makes the rest."""
    superstep = Superstep(
        **{"lookahead": 3, "superstep_s": 1.0, "iterations": {"type0": 2, "type1": 1}, "mini_batches": 3},
        **{"waiting_s": 0.0, "total_waiting_s": 0.0, "iteration_gap": 1},
    )
    telemetry = str(tmp_path / "telemetry.jsonl")
    save(enforcement([5, 5], telemetry=telemetry, strategy="elastic-bsp", superstep=superstep), tmp_path / "e.json")
    fast, slow, server = results(launch(bodies.follow_plan, 3, str(tmp_path / "e.json"), 3))
    assert server == []
    assert len(slow) == 3
    assert 24 <= len(fast) + len(slow) <= 26, (
        "two epochs of 60 samples in batches of 5; who ends it has one pull behind it"
    )
    assert all(len(batch) == 5 for batch in fast + slow)
    first = [index for batch in (*fast[:6], *slow) for index in batch]
    assert len(set(first)) == len(first), "shares of an epoch are disjoint"
    rows = [json.loads(line) for line in Path(telemetry).read_text().splitlines()]
    assert sorted(row["step"] for row in rows if row["rank"] == 0) == list(range(len(fast)))
    assert {(row["rank"], row["device"], row["batch"]) for row in rows} == {(0, "type0", 5), (1, "type1", 5)}
    assert {row["servers"] for row in rows} == {1}
    assert len({row["run"] for row in rows} - {""}) == 1, "the server has named the run"


def test_ssp_keeps_its_bound_and_uses_it() -> None:
    """By the workers' own clocks: when a worker holds its parameters for step c, all others have made c - s steps.

    The last one stays in its first step until the others have come as far as they may.
    """
    bound = 2
    workers, servers = run(SSP(bound), [8, 8, 8], [0.0, 0.01, 0.02], no_pull=True, last=2, stands_in=bound)
    found = results(workers)
    ahead = []
    for worker, other in itertools.permutations(range(3), 2):
        for clock, pulled_s in enumerate(found[worker]["pulled"]):
            ahead.append(clock - sum(made_s < pulled_s for made_s in found[other]["made"]))
    assert max(ahead) == bound
    (server,) = results(servers)
    assert set(server["version"].values()) == {24}, "every gradient is an update"
    assert server["wait_s"][0] > 0
    # In the order in which the server took them: before a worker's gradient of step c come the others' of c - s - 1.
    for name in NAMES:
        taken = [0, 0, 0]
        for _, worker, clock, _, _ in (event for event in server["events"] if event[3] == name):
            assert clock == taken[worker]
            assert clock - min(taken) <= bound
            taken[worker] += 1


def test_asp_waits_for_nobody() -> None:
    """The last worker stays in its first step until the others have made all of theirs."""
    workers, servers = run(ASP(), [10, 10, 2], [0.0, 0.01, 0.0], last=2)
    quick, _, slow = results(workers)
    (server,) = results(servers)
    assert server["wait_s"] == [0.0, 0.0, 0.0]
    assert quick["made"][-1] < slow["made"][0], "ten steps while the slow worker makes its first"
    assert set(server["version"].values()) == {22}
    assert max(server["staleness"]) >= 10, "all that the slow worker slept through"
    assert sum(server["staleness"].values()) == 22


@pytest.mark.parametrize("servers", [1, 2])
def test_elastic_supersteps_have_the_iterations_that_were_chosen(servers: int) -> None:
    """By the gradients that the server took."""
    lookahead = 6
    workers, ours = run(ElasticBSP(lookahead), [30] * 3, [0.0, 0.02, 0.06], servers)  # unequal on a busy machine, too
    results(workers)
    found = results(ours)
    supersteps = [row for row in found[0]["supersteps"] if row.workers == [0, 1, 2] and None not in row.end_s]
    assert [row.iterations for row in supersteps[:2]] == [[1, 1, 1], [1, 1, 1]]
    assert len(supersteps) >= 5
    assert 1 <= max(max(row.iterations) - min(row.iterations) for row in supersteps) < lookahead
    name = next(iter(found[0]["version"]))
    pushes = [worker for _, worker, _, pushed, _ in found[0]["events"] if pushed == name]
    for row in supersteps:
        made, pushes = pushes[: sum(row.iterations)], pushes[sum(row.iterations) :]
        assert [made.count(worker) for worker in range(3)] == row.iterations
        assert len(row.predicted_end_s) == (3 if row.superstep >= 2 else 0)
    for server in found:
        assert set(server["version"].values()) == {90}


lengths = st.lists(st.floats(0.001, 1.0), min_size=1, max_size=5)


@given(recorded=st.lists(lengths, min_size=1, max_size=4), max_gap=st.sampled_from([None, 1]))
def test_elastic_bsp_chooses_what_zipline_does(recorded: list[list[float]], max_gap: int | None) -> None:
    """Without processes; against a search of all barriers, and the trade-off where the gap is bounded."""
    policy = ElasticBSP(6, predictor="last", max_gap=max_gap)
    iterations, ends_s = policy.choose([np.array(one) for one in recorded])
    ends = predict_ends([np.array(one) for one in recorded], np.zeros(len(recorded)), 6, PREDICTORS["last"])
    if max_gap is None:
        assert iterations == zipline(ends).iterations.tolist()
        waiting_s, expected_s = max(ends_s) - min(ends_s), brute_force(ends)
        assert waiting_s == pytest.approx(expected_s, abs=1e-9)
    else:
        assert iterations == best_barrier(ends, objective="waiting", max_gap=max_gap).iterations.tolist()
        assert max(iterations) - min(iterations) <= max_gap
    assert ends_s == [row[count - 1] for row, count in zip(ends, iterations, strict=True)]


def brute_force(ends: np.ndarray) -> float:
    """Return the least time from the first worker's end to a barrier before which everyone has made an iteration."""
    least = math.inf
    for barrier_s in ends.ravel():
        counts = (ends <= barrier_s).sum(axis=1)
        if counts.min():
            least = min(least, barrier_s - min(row[count - 1] for row, count in zip(ends, counts, strict=True)))
    return least


def test_bsp_mean_over_those_who_are_left() -> None:
    """A worker that closes leaves; from then on the update is the other's gradient alone."""
    workers, servers = run(BSP(), [3, 1], [0.0, 0.0])
    alone = trained_alone(3, lambda step: [(0, step), (1, step)][: 2 if step == 0 else 1])
    for name in NAMES:
        assert results(workers)[0]["weights"][name].tobytes() == alone[name].tobytes()
    assert results(servers)[0]["lost"] == {}


POLICIES = [BSP(), ASP(), SSP(1), ElasticBSP(4)]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_a_killed_worker_is_taken_out_and_the_rest_finish(policy: SyncPolicy) -> None:
    servers = 2 if isinstance(policy, (ElasticBSP, BSP)) else 1
    culprit = 0 if isinstance(policy, SSP) else 1
    workers, ours = run(policy, [40] * 3, [0.01, 0.01, 0.02], servers, culprit=culprit, trouble="kill", epochs=True)
    assert workers[culprit].exit_code == -9
    rest = results([workers[rank] for rank in range(3) if rank != culprit])
    for worker in rest:
        assert len(worker["made"]) == 40
        assert all(np.isfinite(value).all() for value in worker["weights"].values())
        assert worker["members"][0] == (0, 1, 2)
        assert worker["members"][-1] == tuple(rank for rank in range(3) if rank != culprit)
    assert rest[0]["members"] == rest[1]["members"]
    for server in results(ours):
        assert list(server["lost"]) == [culprit]
        assert "was silent" not in server["lost"][culprit], "its end was noticed, not its silence"


@pytest.mark.parametrize(
    ("policy", "trouble", "reason"),
    [
        (BSP(), "raise", "left a step with ValueError: a bad batch"),
        (ASP(), "nan", "in step 3 that is not finite"),
        (ElasticBSP(4), "nan", "in step 3 that is not finite"),
        pytest.param(SSP(1), "stall", "and others waited for it", marks=pytest.mark.slow),
        pytest.param(BSP(), "stall", "and others waited for it", marks=pytest.mark.slow),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, SyncPolicy) else value[:5],
)
def test_a_worker_in_trouble_is_taken_out_and_hears_of_it(policy: SyncPolicy, trouble: str, reason: str) -> None:
    options: dict[str, Any] = {"culprit": 1, "trouble": trouble}
    if trouble == "stall":
        options |= {"stall_s": 12.0, "lost_after_s": 5.0}
    steps, sleeps_s = ([8, 8, 80], [0.05] * 3) if trouble == "stall" else ([8, 8, 8], [0.01] * 3)
    workers, servers = run(policy, steps, sleeps_s, **options)
    rest = results([workers[0], workers[2]])
    (server,) = results(servers)
    assert list(server["lost"]) == [1]
    assert reason in server["lost"][1]
    assert all(np.isfinite(value).all() for worker in rest for value in worker["weights"].values())
    assert workers[1].exit_code == 0
    if trouble != "raise":
        assert workers[1].error.startswith("TransferError: ")
        assert "taken out" in workers[1].error
    if trouble == "stall":
        waits_s = np.diff(rest[1]["made"])
        assert waits_s.max() >= 3.3, "they waited for as long as they should; it was taken out, so not until it woke"


@pytest.mark.parametrize(("servers", "lost"), [(1, 0), (2, 1)])
def test_a_killed_server_ends_the_run_with_a_checkpoint(servers: int, lost: int, tmp_path: Path) -> None:
    policy = ElasticBSP(4) if lost else BSP()
    options = {"kill_at": 24, "kill_server": lost, "checkpoint": tmp_path / "last.pt", "optimizer": {"lr": 0.0}}
    workers, ours = run(policy, [100] * 2, [0.005, 0.01], servers, **options)
    assert ours[lost].exit_code == -9
    for rank, worker in enumerate(workers):
        assert worker.error.startswith("TransferError: ")
        assert "\n" not in worker.error
        assert f"server {lost} (rank {2 + lost})" in worker.error
        saved = bodies.load(tmp_path / f"last.pt.{rank}")
        model = make_model()
        model.load_state_dict(saved["model"])
        # The learning rate is 0 and the worker began with NaN: these are the server's values, all of them.
        for name, value in make_model().named_parameters():
            assert torch.equal(saved["model"][name], value)
        assert 1 <= saved["clock"] < 100
    for server in ours[:lost] + ours[lost + 1 :]:
        assert server.error.startswith("TransferError: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.pt.0", "last.pt.1"]


def test_telemetry_tells_what_the_log_sums_up(tmp_path: Path) -> None:
    path = tmp_path / "sync.jsonl"
    workers, servers = run(ElasticBSP(4), [10, 10], [0.005, 0.012], telemetry=path)
    results(workers)
    (server,) = results(servers)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert {row["kind"] for row in rows} == {"ddltool.sync"}
    assert len({row["run"] for row in rows} - {""}) == 1
    steps = [row for row in rows if row["event"] == "step"]
    assert [len([row for row in steps if row["worker"] == worker]) for worker in range(2)] == [10, 10]
    for worker in range(2):
        assert [row["step"] for row in steps if row["worker"] == worker] == list(range(10))
    summary = rows[-1]
    assert (summary["event"], summary["steps"], summary["updates"]) == ("summary", [10, 10], 20)
    assert summary["staleness"] == {str(k): v for k, v in sorted(server["staleness"].items())}
    assert summary["updates_per_s"] == pytest.approx(20 / summary["time_s"])
    # The last pull, which belongs to no step, may wait too.
    for worker in range(2):
        waited_s = sum(row["wait_s"] for row in steps if row["worker"] == worker)
        assert waited_s <= summary["wait_s"][worker] + 1e-9
    barriers = [row for row in rows if row["event"] == "barrier"]
    assert [row["superstep"] for row in barriers] == list(range(len(barriers)))
    told = [row for row in barriers if row["predicted_end_s"]]
    assert told
    for row in told:
        assert len(row["predicted_end_s"]) == len(row["end_s"]) == len(row["workers"])
        assert all(0 < end_s <= row["length_s"] for end_s in row["end_s"] if end_s is not None)
    assert [(row["worker"], row["lost"]) for row in rows if row["event"] == "left"] in (
        [(0, False), (1, False)],
        [(1, False), (0, False)],
    )


def test_ranks_with_another_model_are_refused() -> None:
    outcomes = launch(bodies.disagree, 3)
    for outcome in outcomes:
        assert outcome.error == (
            "InputError: synchronisation model: is SSP(3) on rank 0 and SSP(2) on rank 1; give every rank the same"
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SSP(-1), "SSP: a staleness of -1"),
        (lambda: ElasticBSP(0), "ElasticBSP:lookahead: is 0"),
        (lambda: ElasticBSP(5, max_gap=-1), "ElasticBSP:max_gap: is -1"),
        (lambda: ElasticBSP(5, predictor="emma"), 'ElasticBSP:predictor: "emma"; did you mean "ema"?'),
        (lambda: ElasticBSP(5, objective="totals"), 'ElasticBSP:objective: "totals"; did you mean "total"?'),
        (lambda: ElasticBSP(5).open(ServerState(workers=2, names=())), "puts no trainable parameter on server 0"),
        (lambda: shard(5, (0, 2), 1, epoch=0, seed=0), "worker 1: is not among the members [0, 2]"),
    ],
)
def test_what_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError) as refusal:
        make()
    assert message in str(refusal.value)


@given(
    samples=st.integers(0, 60),
    members=st.sets(st.integers(0, 9), min_size=1),
    epoch=st.integers(0, 3),
    seed=st.integers(0, 3),
)
def test_shards_hold_every_sample_once(samples: int, members: set[int], epoch: int, seed: int) -> None:
    shards = [shard(samples, tuple(members), worker, epoch=epoch, seed=seed) for worker in members]
    assert sorted(np.concatenate(shards).tolist()) == list(range(samples))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    again = [shard(samples, tuple(sorted(members, reverse=True)), worker, epoch=epoch, seed=seed) for worker in members]
    assert all(np.array_equal(one, other) for one, other in zip(shards, again, strict=True))
