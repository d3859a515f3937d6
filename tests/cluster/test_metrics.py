"""Cost, goodput, queueing and size classes of a simulation: by hand, and against the jobs' own figures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ddltool.analyzers.cluster.cluster import ClusterSpec, NodeEvent, NodeFailures
from ddltool.analyzers.cluster.metrics import IsolatedTimes, check_prices, class_of, summarize
from ddltool.analyzers.cluster.policies.gangs import Fifo
from ddltool.analyzers.cluster.policies.ours import Ours
from ddltool.analyzers.cluster.simulator import Options, simulate
from ddltool.errors import InputError
from tests.conftest import submitted
from tests.helpers.workloads import APPLICATIONS, TWO_TYPES, steady


def test_useful_share_cost_and_goodput_by_hand() -> None:
    applications = {"steady": steady(epochs=10)}
    cluster = ClusterSpec.homogeneous(1, 1)
    events = (NodeEvent(time_s=150.0, node=0, kind="fail"), NodeEvent(time_s=200.0, node=0, kind="join"))
    options = Options(failures=NodeFailures(events=events, checkpoint_interval_s=25.0))
    made = simulate([submitted("a", 0.0)], applications, cluster, Fifo(), options)
    summary = summarize(made, IsolatedTimes(applications, cluster), 30.0, prices={"gpu": 36.0})
    # Held 60-150 and 240-320: 170 GPU-seconds, 60 of them starting, 10 lost, 100 useful; down 150-200 of 320.
    assert summary.makespan_s == 320.0
    assert summary.gpu_hours * 3600 == pytest.approx(170)
    assert summary.restart_gpu_hours * 3600 == pytest.approx(60)
    assert summary.lost_gpu_hours * 3600 == pytest.approx(10)
    assert summary.useful_share == pytest.approx(100 / 270)
    assert summary.availability == pytest.approx(270 / 320)
    assert summary.cost is not None
    assert (summary.cost.jobs, summary.cost.cluster) == pytest.approx((1.70, 2.70))
    assert (summary.node_failures, summary.job_failures, summary.restarts) == (1, 1, 1)
    assert summary.goodput_by_application == {"steady": pytest.approx(100 * 8 / 260)}
    assert summary.avg_queueing_s == 60.0


def test_prices_count_by_type_on_mixed_gpus() -> None:
    jobs = [submitted(str(n), 40.0 * n, kind, 2, 32) for n, kind in enumerate(["both", "quick", "only", "both"])]
    made = simulate(jobs, APPLICATIONS, TWO_TYPES, Ours())
    isolated = IsolatedTimes(APPLICATIONS, TWO_TYPES)
    only_fast = summarize(made, isolated, 30.0, prices={"slow": 0.0, "fast": 3.0})
    only_slow = summarize(made, isolated, 30.0, prices={"slow": 3.0, "fast": 0.0})
    assert only_fast.cost is not None
    assert only_slow.cost is not None
    assert only_fast.cost.jobs > 0
    assert only_fast.cost.jobs + only_slow.cost.jobs == pytest.approx(3.0 * only_fast.gpu_hours)
    assert only_fast.jobs[2].cost == 0.0  # measured on the slow type alone
    assert only_fast.cost.cluster == pytest.approx(3.0 * 8 * only_fast.makespan_s / 3600)
    assert summarize(made, isolated, 30.0).cost is None


def test_classes_share_out_the_jobs() -> None:
    applications: dict[str, Any] = {"quick": steady(), "slow": steady(step_s=400.0), "imagenet": steady(step_s=2.0)}
    for name, application in applications.items():
        application.name = name
    cluster = ClusterSpec.homogeneous(2, 2)
    isolated = IsolatedTimes(applications, cluster)
    # 20 steps of 400 s on one GPU are 2.2 GPU-hours; what Pollux published goes before what was computed.
    assert [class_of(name, isolated) for name in applications] == ["small", "medium", "xlarge"]
    jobs = [submitted(str(n), 30.0 * n, name) for n, name in enumerate(["quick", "slow", "imagenet", "quick"])]
    made = simulate(jobs, applications, cluster, Fifo())
    summary = summarize(made, isolated, 30.0)
    assert list(summary.by_class) == ["small", "medium", "xlarge"]
    assert [each.jobs for each in summary.by_class.values()] == [2, 1, 1]
    assert sum(each.jobs * each.avg_jct_s for each in summary.by_class.values()) == pytest.approx(4 * summary.avg_jct_s)
    assert sum(each.gpu_hours for each in summary.by_class.values()) == pytest.approx(summary.gpu_hours)
    assert max(each.worst_fairness for each in summary.by_class.values()) == summary.finish_time_fairness.max
    small = [one.jct_s for one in made.jobs if one.application == "quick"]
    assert summary.by_class["small"].median_jct_s == pytest.approx(np.median(small))


@pytest.mark.parametrize(
    ("prices", "message"),
    [
        ({"slow": 1.0}, "price: of fast is missing"),
        ({"slow": 1.0, "fast": float("nan")}, "price:fast: is nan"),
        ({"slow": -1.0, "fast": 1.0}, "price:slow: is -1"),
        ({"slow": 1.0, "fats": 1.0}, 'price:fats: is of no type in the cluster; did you mean "fast"'),
    ],
)
def test_bad_prices_are_named(prices: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_prices(prices, TWO_TYPES)


def test_a_fair_share_does_not_depend_on_the_order_of_the_types() -> None:
    """And it is that of the type on which the application is fastest."""
    from ddltool.analyzers.cluster.cluster import ClusterSpec

    assert len(set(TWO_TYPES.gpu_types)) == 2
    turned = ClusterSpec(gpus=TWO_TYPES.gpus[::-1], gpu_types=TWO_TYPES.gpu_types[::-1])
    for name, application in APPLICATIONS.items():
        for count in (1, 2, 4):
            found = IsolatedTimes(APPLICATIONS, TWO_TYPES)(name, count)
            assert found == IsolatedTimes(APPLICATIONS, turned)(name, count)
            alone = []
            for kind in TWO_TYPES.type_names:
                if application.runs_on(kind):
                    at = [place for place, each in enumerate(TWO_TYPES.gpu_types) if each == kind]
                    part = ClusterSpec(gpus=tuple(TWO_TYPES.gpus[i] for i in at), gpu_types=(kind,) * len(at))
                    alone.append(IsolatedTimes(APPLICATIONS, part)(name, count))
            assert found == min(alone)


def test_a_share_is_one_of_every_type() -> None:
    """And the job is on the type where that is fastest; by hand from the times on whole GPUs."""
    isolated = IsolatedTimes(APPLICATIONS, TWO_TYPES)
    for name, application in APPLICATIONS.items():
        for share in (1.0, 0.5, 0.3, 0.01):
            expected = []
            for kind in TWO_TYPES.type_names:
                if not application.runs_on(kind):
                    continue
                nodes = tuple(
                    count for count, each in zip(TWO_TYPES.gpus, TWO_TYPES.gpu_types, strict=True) if each == kind
                )
                alone = IsolatedTimes(APPLICATIONS, ClusterSpec(gpus=nodes, gpu_types=(kind,) * len(nodes)))
                gpus = share * sum(nodes)
                whole = [1 / alone(name, count) for count in range(1, sum(nodes) + 1)]
                speed = np.interp(gpus, range(len(whole) + 1), [0.0, *whole])
                expected.append(1 / speed)
            assert isolated.on_share(name, share) == pytest.approx(min(expected))
