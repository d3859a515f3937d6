"""What holds of every policy, on the workload that ships and on mixed GPUs, with nodes that fail and without."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.cluster.cluster import (
    Allocation,
    ClusterSpec,
    NodeEvent,
    NodeFailures,
    NodeStates,
    count_gpus,
    without,
)
from ddltool.analyzers.cluster.job import JobSpec, SimulatedJob, Tuning
from ddltool.analyzers.cluster.metrics import IsolatedTimes, summarize
from ddltool.analyzers.cluster.policies import policies
from ddltool.analyzers.cluster.simulator import Options, SimulationResult, simulate
from ddltool.analyzers.cluster.truth import Application
from tests.conftest import submitted
from tests.helpers.workloads import APPLICATIONS, EVERY, TWO_TYPES, finishes


class Watched:
    """A policy that checks what it is shown (nothing dead, backwards or lost beyond a checkpoint) and what it answers."""

    def __init__(self, inner: Any, cluster: ClusterSpec, failures: NodeFailures | None) -> None:
        self.inner, self.name, self.tuning = inner, inner.name, inner.tuning
        self.pools, self.mixed = getattr(inner, "pools", False), getattr(inner, "mixed", True)
        self.whole, self.failures = cluster, failures or NodeFailures()
        self.last_s = 0.0
        self.seen: dict[int, tuple[float, int, float]] = {}

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        assert now_s >= self.last_s
        self.last_s = now_s
        states = NodeStates(self.failures, self.whole)
        while states.next_s() <= now_s:
            states.pop()
        assert cluster.gpus == without(self.whole, states.down).gpus
        for one in jobs:
            progress, failed, lost = self.seen.get(one.index, (0.0, 0, 0.0))
            assert one.spec.submit_s <= now_s
            assert one.tally.failures >= failed
            assert one.progress >= progress - (one.lost_progress - lost) * (1 + 1e-9)
            self.seen[one.index] = one.progress, one.tally.failures, one.lost_progress
            assert not {node for node, _ in one.allocation} & states.down
        made: Mapping[int, Allocation] = self.inner.allocate(jobs, cluster, now_s)
        self._hold(made, {one.index: one for one in jobs}, cluster)
        return made

    def _hold(self, made: Mapping[int, Allocation], jobs: Mapping[int, SimulatedJob], cluster: ClusterSpec) -> None:
        used = np.zeros(len(cluster.gpus))
        for index, allocation in made.items():
            kinds = {cluster.gpu_types[node] for node, _ in allocation}
            assert kinds <= set(jobs[index].gpu_types)
            assert len(kinds) == 1 or self.name == "easyscale-heter"
            assert len({node for node, _ in allocation}) == len(allocation)
            if allocation != jobs[index].allocation:
                assert 1 <= count_gpus(allocation) <= jobs[index].most_replicas
            if self.tuning is Tuning.RIGID:
                assert count_gpus(allocation) == jobs[index].spec.num_replicas
            for node, count in allocation:
                assert count >= 1
                used[node] += count
        assert (used <= np.array(cluster.gpus)).all()
        if self.name == "pollux":
            nodes = [node for allocation in made.values() if len(allocation) > 1 for node, _ in allocation]
            assert len(nodes) == len(set(nodes))


def check(
    make: Callable[[], Any],
    jobs: Sequence[JobSpec],
    applications: dict[str, Application],
    cluster: ClusterSpec,
    options: Options,
) -> None:
    """Replay under the policy, watched and once more, and hold what comes out."""
    watched = Watched(make(), cluster, options.failures)
    made = simulate(jobs, applications, cluster, watched, options)
    assert [one.name for one in made.jobs] == [one.name for one in jobs]
    hold_gpu_time(made, options.failures)
    isolated = IsolatedTimes(applications, cluster)
    rounding = 0.5 * 20 if options.whole_seconds else 0.0
    for one in made.jobs:
        assert one.submit_s <= one.start_s < one.finish_s
        assert one.finish_s - one.start_s > options.restart_delay_s * (one.restarts > 0)
        if watched.tuning is not Tuning.LOGICAL:
            least = isolated(one.application, cluster.total_gpus)
            assert one.finish_s - one.start_s >= 0.98 * least - rounding + options.restart_delay_s
    again = simulate(jobs, applications, cluster, make(), options)
    assert (again.jobs, again.usage) == (made.jobs, made.usage)  # to the bit
    summary = summarize(made, isolated, options.restart_delay_s)
    assert 0 < summary.finish_time_fairness.max < math.inf


def hold_gpu_time(made: SimulationResult, failures: NodeFailures | None) -> None:
    """Hold GPU time against the usage, and losses against the checkpoints."""
    starts = [used.time_s for used in made.usage]
    ends = [*starts[1:], max(finishes(made))]
    assert all(a <= b for a, b in itertools.pairwise(starts))
    lent = sum(used.gpus * max(end - start, 0.0) for used, start, end in zip(made.usage, starts, ends, strict=True))
    held = sum(one.gpu_seconds for one in made.jobs)
    assert held == pytest.approx(lent)
    assert all(used.gpus <= used.up for used in made.usage)
    assert held <= sum(made.available_gpu_seconds.values()) * (1 + 1e-9)
    interval_s = failures.checkpoint_interval_s if failures is not None else 0.0
    for one in made.jobs:
        assert sum(one.gpu_seconds_by_type.values()) == pytest.approx(one.gpu_seconds)
        assert one.lost_gpu_seconds + one.restart_gpu_seconds <= one.gpu_seconds * (1 + 1e-9)
        assert 0 <= one.lost_gpu_seconds <= one.failures * interval_s * made.total_gpus * (1 + 1e-9)
        assert one.failures <= one.restarts + 1


def some_failures(data: st.DataObject, nodes: int) -> NodeFailures | None:
    """Draw failures, or none. Whoever leaves comes back: a gang that needs all nodes must be able to end."""
    if not data.draw(st.booleans()):
        return None
    gone = st.tuples(st.integers(0, 3000), st.integers(0, nodes - 1), st.sampled_from(["fail", "leave"]))
    return NodeFailures(
        mtbf_s=data.draw(st.sampled_from([None, 3000.0, 20_000.0])),
        repair_s=data.draw(st.sampled_from([30.0, 600.0])),
        checkpoint_interval_s=data.draw(st.sampled_from([20.0, 300.0])),
        events=tuple(
            NodeEvent(time_s=float(time_s), node=node, kind=kind)
            for when, node, what in data.draw(st.lists(gone, max_size=4))
            for time_s, kind in ((when, what), (when + 400, "join"))
        ),
        seed=data.draw(st.integers(0, 5)),
    )


def some_options(data: st.DataObject, nodes: int) -> Options:
    return Options(
        interval_s=data.draw(st.sampled_from([20.0, 60.0, 137.0])),
        restart_delay_s=data.draw(st.sampled_from([0.0, 30.0])),
        interference=data.draw(st.sampled_from([0.0, 0.3])),
        whole_seconds=data.draw(st.booleans()),
        react=data.draw(st.booleans()),
        failures=some_failures(data, nodes),
    )


@pytest.mark.parametrize("name", EVERY)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_on_the_workload_that_ships(name: str, synthetic: tuple[Any, Any, Any], data: st.DataObject) -> None:
    everything, applications, cluster = synthetic
    jobs = data.draw(st.lists(st.sampled_from(everything), min_size=1, max_size=9, unique_by=lambda one: one.name))
    check(EVERY[name], jobs, applications, cluster, some_options(data, len(cluster.gpus)))


@pytest.mark.parametrize("name", policies("all", mixed=True))
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_on_mixed_gpus(name: str, data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(sorted(APPLICATIONS)), min_size=1, max_size=8))
    jobs = [
        submitted(str(n), data.draw(st.integers(0, 400)), kind, replicas := data.draw(st.integers(1, 6)), 8 * replicas)
        for n, kind in enumerate(kinds)
    ]
    check(EVERY[name], jobs, APPLICATIONS, TWO_TYPES, some_options(data, len(TWO_TYPES.gpus)))
