"""What ``plan --strategy auto`` says of ElasticBSP's transfers: those of the devices that take part, and of no others."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.job.placement.problem import Problem, from_job
from ddltool.analyzers.job.planning.candidates import Candidate, Candidates
from ddltool.analyzers.job.planning.exposed import Communication, Exposed
from ddltool.analyzers.job.planning.job_model import JobModel
from ddltool.analyzers.job.planning.superstep import DEFAULT_LOOKAHEAD, best_superstep
from ddltool.job import Job


class Shared(Communication):
    """One link for all: each device more adds its time to everybody's iteration."""

    source = "a shared link"

    def __init__(self, each_s: float) -> None:
        self.each_s = each_s

    def synchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        return self.asynchronous(devices, pass_s)

    def asynchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        assert all(count >= 0 for count in devices.values())
        seconds = self.each_s * sum(devices.values())
        return Exposed(default_s=seconds, best_s=seconds, setting="as it comes")


def elastic(
    offers: Mapping[str, tuple[int, float]], each_s: float, workers: int = 16, **constraints: object
) -> tuple[Candidate, Problem]:
    listed = [{"type": name, "count": count, "capability_per_s": rate} for name, (count, rate) in offers.items()]
    made = Job.model_validate({"name": "test", "max_workers": workers, "devices": listed, "constraints": constraints})
    problem = from_job(made, {name: rate for name, (_, rate) in offers.items()})
    knowledge = JobModel(communication=Shared(each_s))
    left_out: dict[str, str] = {}
    found = Candidates(job=made, model=knowledge).of(problem, left_out, "elastic-bsp")
    return found[0], problem


def rate_of(offers: Mapping[str, tuple[int, float]], devices: Mapping[str, int], each_s: float) -> float:
    """Return mini-batches per second of the best superstep of exactly these devices, slowed by each other."""
    transfer = Fraction(each_s * sum(devices.values()))
    speeds = [(1 / (1 / Fraction(repr(offers[name][1])) + transfer), count) for name, count in devices.items()]
    barrier, iterations = best_superstep(speeds, DEFAULT_LOOKAHEAD)
    return float(sum(k * count for k, (_, count) in zip(iterations, speeds, strict=True)) / barrier)


def test_devices_that_stay_out_slow_nobody() -> None:
    """The slow ones make no iteration within the lookahead of the fast ones; only those share the link."""
    offers = {"fast": (3, 4.0), "slow": (8, 0.004)}
    made, _ = elastic(offers, 0.05)
    assert made.option.devices == {"fast": 3}
    assert made.option.throughput == pytest.approx(3 / (0.25 + 3 * 0.05))
    assert made.plan.superstep is not None
    assert made.plan.superstep.left_out == {"slow": 8}
    assert made.plan.status == "optimal"


def test_one_type_only_has_the_link_to_itself() -> None:
    """Behind the transfers of all twelve, the ten slow ones would look better; they come to 3.3 a second."""
    made, _ = elastic({"fast": (2, 4.0), "slow": (10, 0.5)}, 0.1, homogeneous=True)
    assert made.option.devices == {"fast": 2}
    assert made.option.throughput == pytest.approx(2 / (0.25 + 0.2))


@given(
    st.lists(st.tuples(st.integers(1, 6), st.sampled_from([0.01, 0.5, 1.0, 2.5, 4.0, 10.0])), min_size=1, max_size=4),
    st.sampled_from([0.0, 0.003, 0.05, 1.0]),
    st.integers(1, 12),
)
@settings(max_examples=80, deadline=None)
def test_the_figure_is_that_of_the_chosen_devices(shapes: list[tuple[int, float]], each_s: float, workers: int) -> None:
    offers = {f"T{place}": shape for place, shape in enumerate(shapes)}
    made, problem = elastic(offers, each_s, workers)
    option = made.option
    assert sum(option.devices.values()) <= workers
    assert option.throughput == pytest.approx(rate_of(offers, option.devices, each_s), rel=1e-9)
    assert option.iteration_s == pytest.approx(problem.max_workers / option.throughput, rel=1e-9)
    assert option.communication_s is not None
    assert option.communication_s >= -1e-12
