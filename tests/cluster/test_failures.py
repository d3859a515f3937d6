"""Nodes that fail, leave and come back: by hand, against a replay of the written events, and invariants of every policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from ddltool.analyzers.cluster.cluster import (
    Allocation,
    ClusterSpec,
    NodeEvent,
    NodeFailures,
    NodeStates,
    count_gpus,
)
from ddltool.analyzers.cluster.job import JobSpec, SimulatedJob, Tuning, make_jobs
from ddltool.analyzers.cluster.policies.easyscale import EasyScale
from ddltool.analyzers.cluster.policies.gangs import Fifo
from ddltool.analyzers.cluster.simulator import Options, simulate
from ddltool.analyzers.cluster.truth import Application
from ddltool.errors import Infeasible, InputError
from tests.conftest import submitted
from tests.helpers.workloads import EVERY, steady


def at(time_s: float, node: int, kind: Any) -> NodeEvent:
    return NodeEvent(time_s=time_s, node=node, kind=kind)


def play(events: Sequence[NodeEvent], nodes: int = 1, checkpoint_s: float = 25.0, react: bool = False) -> Any:
    """Replay one job of 10 epochs of 10 s; it is seen at 60 and trains from 90 on."""
    failures = NodeFailures(events=tuple(events), checkpoint_interval_s=checkpoint_s)
    options = Options(failures=failures, react=react)
    return simulate(
        [submitted("a", 0.0)], {"steady": steady(epochs=10)}, ClusterSpec.homogeneous(nodes, 1), Fifo(), options
    )


# By hand.


def test_a_failure_costs_what_was_trained_since_the_checkpoint() -> None:
    assert play([]).jobs[0].finish_s == 190.0
    # Fails at 150, 60 s trained, saved at 115 and 140: 10 s lost. Back at 200: the round at 240, training from 270 on.
    made = play([at(150.0, 0, "fail"), at(200.0, 0, "join")])
    assert made.jobs[0].finish_s == pytest.approx(270.0 + 100.0 - 50.0)
    assert (made.jobs[0].failures, made.jobs[0].restarts, made.node_failures) == (1, 1, 1)
    assert made.jobs[0].lost_gpu_seconds == pytest.approx(10.0)
    assert made.jobs[0].restart_gpu_seconds == 60.0
    assert made.jobs[0].gpu_seconds == pytest.approx((150 - 60) + (320 - 240))
    assert made.available_gpu_seconds == {"gpu": pytest.approx(150 + 120)}


def test_epochs_are_undone_too() -> None:
    # No checkpoint before 200 s of training: all 60 s, six epochs, are lost.
    made = play([at(150.0, 0, "fail"), at(200.0, 0, "join")], checkpoint_s=200.0)
    assert made.jobs[0].finish_s == pytest.approx(270.0 + 100.0)
    assert made.jobs[0].lost_gpu_seconds == pytest.approx(60.0)
    assert made.jobs[0].useful_samples == 800.0


def test_a_node_that_leaves_after_notice_costs_only_the_restart() -> None:
    made = play([at(150.0, 0, "leave"), at(200.0, 0, "join")])
    assert made.jobs[0].finish_s == pytest.approx(270.0 + 40.0)
    assert (made.jobs[0].failures, made.jobs[0].lost_gpu_seconds, made.node_failures) == (0, 0.0, 0)


def test_the_job_goes_to_a_node_that_is_up_at_once_with_react() -> None:
    assert play([at(150.0, 0, "fail")], nodes=2).jobs[0].finish_s == pytest.approx(180.0 + 30.0 + 50.0)
    # With react it trains from 30 on: 50 s are saved at 100, and it starts again in that very moment.
    assert play([at(100.0, 0, "fail")], nodes=2, react=True).jobs[0].finish_s == pytest.approx(100.0 + 30.0 + 50.0)


def test_a_node_may_join_late_and_a_failure_while_starting_loses_no_training() -> None:
    made = play([at(0.0, 0, "leave"), at(100.0, 0, "join")])
    assert made.jobs[0].finish_s == pytest.approx(120.0 + 30.0 + 100.0)
    early = play([at(80.0, 0, "fail"), at(81.0, 0, "join")])
    assert early.jobs[0].lost_gpu_seconds == 0.0
    assert early.jobs[0].finish_s == pytest.approx(120.0 + 30.0 + 100.0)


def test_an_end_at_the_moment_of_the_failure_counts() -> None:
    assert play([at(190.0, 0, "fail")]).jobs[0].finish_s == 190.0


def test_what_can_never_end_is_said_so() -> None:
    with pytest.raises(Infeasible, match="gives no GPUs"):
        play([at(100.0, 0, "fail")])
    hopeless = NodeFailures(mtbf_s=5.0, repair_s=100.0, checkpoint_interval_s=300.0)
    with pytest.raises(Infeasible, match="no job has come further for"):
        simulate(
            [submitted("a", 0.0)],
            {"steady": steady(epochs=10)},
            ClusterSpec.homogeneous(1, 1),
            Fifo(),
            Options(failures=hopeless, interval_s=200.0),
        )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mtbf_s": 0.0}, "mtbf: is 0 s; from 1"),
        ({"mtbf_s": float("nan")}, "mtbf: is nan"),
        ({"repair_s": 0.0}, "repair: is 0 s; above 0"),
        ({"checkpoint_interval_s": float("inf")}, "checkpoint interval: is inf s"),
        ({"seed": -1}, "failure seed: is -1"),
        ({"events": (at(float("nan"), 0, "fail"),)}, "node event: is NodeEvent"),
        ({"events": (at(0.0, 9, "fail"),)}, "at 0 s is on node 9; nodes are 0 to 0"),
    ],
)
def test_values_that_make_no_sense_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        NodeFailures(**values).check(ClusterSpec.homogeneous(1, 1))


# The drawn failures.


def test_the_share_of_time_up_is_that_of_the_renewal_process() -> None:
    states = NodeStates(NodeFailures(mtbf_s=9000.0, repair_s=1000.0, seed=3), ClusterSpec.homogeneous(40, 1))
    up = last = 0.0
    while states.next_s() < 2e6:
        up += (40 - len(states.down)) * (states.next_s() - last)
        last = states.next_s()
        states.pop()
    # MTBF / (MTBF + repair) = 0.9; 40 nodes x 200 cycles: the standard error is about 0.001.
    assert up / (40 * last) == pytest.approx(0.9, abs=0.005)
    assert states.failed == pytest.approx(8000, rel=0.05)


def test_every_node_has_a_stream_of_its_own_and_sources_add_up() -> None:
    def history(nodes: int) -> list[tuple[float, bool]]:
        states = NodeStates(NodeFailures(mtbf_s=500.0, repair_s=50.0), ClusterSpec.homogeneous(nodes, 1))
        made = []
        while states.next_s() < 20_000:
            when, before = states.next_s(), 0 in states.down
            states.pop()
            if (0 in states.down) != before:
                made.append((when, before))
        return made

    assert history(1) == history(7)
    states = NodeStates(NodeFailures(events=(at(5.0, 0, "leave"), at(5.0, 0, "join"))), ClusterSpec.homogeneous(2, 1))
    assert [states.pop(), states.pop()] == [([], [0]), ([], [])]  # in the order given: away and back at once
    assert not states.down
    states = NodeStates(NodeFailures(events=(at(5.0, 0, "join"), at(5.0, 0, "leave"))), ClusterSpec.homogeneous(2, 1))
    assert [states.pop(), states.pop()] == [([], []), ([], [0])]
    assert states.returns is False
    assert states.gone == {0}


def test_more_failures_than_can_be_drawn_are_refused() -> None:
    failures = NodeFailures(mtbf_s=1.0, repair_s=1.0)
    with pytest.raises(InputError, match="mtbf: is 1 s: more than 1e\\+07 failures until the last job comes"):
        simulate(
            [submitted("a", 0.0), submitted("b", 3e8)],
            {"steady": steady()},
            ClusterSpec.homogeneous(20, 1),
            Fifo(),
            Options(failures=failures),
        )


def test_a_job_that_was_content_asks_again_when_its_node_is_gone(
    synthetic: tuple[list[JobSpec], dict[str, Application], ClusterSpec],
) -> None:
    """A scale-out that made it slower is taken back, and then its nodes fail: it must not wait for good."""
    specs, applications, cluster = synthetic
    policy = EasyScale()
    jobs = make_jobs(specs[:1], applications, policy.tuning, cluster)
    policy._content.add(0)
    jobs[0].running_from_s = 0.0
    assert count_gpus(policy.allocate(jobs, cluster, 60.0)[0]) >= 1


def test_training_that_restarts_undo_and_a_hundred_years_end_the_replay() -> None:
    class Restless:
        """Moves the only job each round, so that it never gets to train."""

        name, tuning = "fifo", Tuning.RIGID

        def allocate(
            self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float
        ) -> Mapping[int, Allocation]:
            node = int(now_s / 60.0) % 2
            return {one.index: ((node, 1),) for one in jobs}

    two = ClusterSpec.homogeneous(2, 1)
    with pytest.raises(Infeasible, match="no job has come further for .* restarts leave no time to train"):
        simulate([submitted("a", 0.0)], {"steady": steady()}, two, Restless(), Options(restart_delay_s=90.0))
    endless = steady(step_s=3e7, epochs=40)
    with pytest.raises(Infeasible, match=r"after 100 simulated years under policy fifo 1 jobs are not done \(a\)"):
        simulate([submitted("a", 0.0)], {"steady": endless}, two, Fifo(), Options(interval_s=604_800.0))


def test_jobs_shorter_than_a_round_are_progress() -> None:
    """None of them is seen at a round with progress; together they last longer than what is taken for futile."""
    specs = [submitted(f"j{n}", 60.0 * n) for n in range(10_500)]
    made = simulate(
        specs, {"steady": steady(step_s=0.1)}, ClusterSpec.homogeneous(1, 1), Fifo(), Options(restart_delay_s=0.0)
    )
    assert made.rounds >= 10_500


@pytest.mark.parametrize("name", EVERY)
def test_options_that_never_strike_change_nothing(name: str, synthetic: tuple[Any, Any, Any]) -> None:
    jobs, applications, cluster = synthetic
    bare = simulate(jobs[:8], applications, cluster, EVERY[name](), Options())
    idle = simulate(jobs[:8], applications, cluster, EVERY[name](), Options(failures=NodeFailures()))
    assert [replace(one, lost_gpu_seconds=0.0) for one in idle.jobs] == list(bare.jobs)
    assert idle.usage == bare.usage


def test_shorter_checkpoint_intervals_lose_less(synthetic: tuple[Any, Any, Any]) -> None:
    jobs, applications, cluster = synthetic
    lost = []
    for interval in (20.0, 200.0, 2000.0):
        failures = NodeFailures(mtbf_s=4000.0, repair_s=300.0, checkpoint_interval_s=interval)
        made = simulate(jobs, applications, cluster, Fifo(), Options(failures=failures))
        lost.append(sum(one.lost_gpu_seconds for one in made.jobs))
    assert 0 < lost[0] < lost[1] < lost[2]
