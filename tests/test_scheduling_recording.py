"""Recording and pictures: what is drawn adds up to what the simulator counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddltool.analyzers.reporting.figures import Lines
from ddltool.analyzers.reporting.simulation_section import allocation_figure, completion_figure, life_figures
from ddltool.analyzers.scheduling.failures import Failures
from ddltool.analyzers.scheduling.inputs import read_applications, read_cluster, read_workload
from ddltool.analyzers.scheduling.policies import POLICIES, policies
from ddltool.analyzers.scheduling.recording import Recorder, gpus_over_time, longest_restarted
from ddltool.analyzers.scheduling.simulator import Options, SimulationResult, simulate
from ddltool.errors import InputError

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "workloads"
Replays = dict[str, tuple[SimulationResult, Recorder]]


@pytest.fixture(scope="module")
def replays() -> Replays:
    """Every policy's replay of the first jobs of the synthetic workload, recorded."""
    jobs = read_workload(FOLDER / "synthetic.csv")[:12]
    applications = read_applications([FOLDER / "traces"], [job.application for job in jobs])
    cluster = read_cluster(FOLDER / "cluster.yaml")
    made = {}
    for name, make in policies("all", -1.0, 30.0, 0).items():
        recorder = Recorder(make())
        made[name] = simulate(jobs, applications, cluster, recorder), recorder
        plain = simulate(jobs, applications, cluster, make())
        assert made[name][0].jobs == plain.jobs, name  # being watched changes nothing
    return made


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_drawn_is_what_was_held(policy: str, replays: Replays) -> None:
    result, record = replays[policy]
    times, held = gpus_over_time(result, record)
    assert (held[:, :-1] * np.diff(times)).sum(axis=1) == pytest.approx([job.gpu_seconds for job in result.jobs])
    assert held.sum(axis=0).max() <= result.total_gpus
    assert not held[:, -1].any()
    for row, job in enumerate(result.jobs):
        assert sum(entry.restarted for entry in record.held if entry.job == row) == job.restarts
        first = next(entry.time_s for entry in record.held if entry.job == row)
        assert first == job.first_start_s


def test_failed_nodes_are_not_drawn_as_held() -> None:
    jobs = read_workload(FOLDER / "synthetic.csv")[:12]
    applications = read_applications([FOLDER / "traces"], [job.application for job in jobs])
    record = Recorder(policies("pollux", -1.0, 30.0, 0)["pollux"]())
    lost = Failures(mtbf_s=2000.0, repair_s=300.0, seed=3)
    result = simulate(jobs, applications, read_cluster(FOLDER / "cluster.yaml"), record, Options(failures=lost))
    assert sum(job.failures for job in result.jobs) > 3
    times, held = gpus_over_time(result, record)
    assert held.sum(axis=0).max() <= result.total_gpus
    drawn = (held[:, :-1] * np.diff(times)).sum(axis=1)
    for value, job in zip(drawn.tolist(), result.jobs, strict=True):
        # A failure is seen at the next round, at most an interval later, on at most all GPUs.
        assert job.gpu_seconds - 1e-6 <= value <= job.gpu_seconds + job.failures * 60.0 * result.total_gpus


def test_batches_are_those_of_the_policy(replays: Replays) -> None:
    result, record = replays["tiresias"]
    jobs = read_workload(FOLDER / "synthetic.csv")[: len(result.jobs)]
    assert record.batches
    for entry in record.batches:
        # What is asked for, rounded up to a whole local batch per replica.
        asked = jobs[entry.job]
        assert asked.batch_size <= entry.batch_size < asked.batch_size + 4 * asked.num_replicas
    adaptive = replays["pollux"][1].batches
    assert max(len({e.batch_size for e in adaptive if e.job == row}) for row in range(len(jobs))) > 1


def test_completion_times_reach_every_job_and_one_end(replays: Replays) -> None:
    times = {name: [job.jct_s for job in result.jobs] for name, (result, _) in replays.items()}
    lines = completion_figure(times).lines
    assert [line.label for line in lines] == list(replays)
    for line in lines:
        assert sorted(times[line.label]) == line.x[1:-1].tolist()
        assert (line.y[0], line.y[-1], line.x[-1]) == (0.0, 1.0, max(map(max, times.values())))


def test_areas_add_up_and_the_smallest_are_put_together(replays: Replays) -> None:
    result, record = replays["pollux"]
    _, held = gpus_over_time(result, record)
    jobs = tuple(replace(job, application=f"$group_{row}^{{2}}$ <b>") for row, job in enumerate(result.jobs))
    for shown in (result, replace(result, jobs=jobs)):
        figure = allocation_figure(shown, record)
        assert len(figure.lines) <= 8
        assert sum(line.y for line in figure.lines).max() == held.sum(axis=0).max()
    assert figure.lines[-1].label == f"others ({len(jobs) - 7})"


def test_a_jobs_life_has_its_restarts_as_dots(replays: Replays) -> None:
    result, record = replays["pollux"]
    job = longest_restarted(result)
    gpus, batches = life_figures(result, record, job)
    assert isinstance(gpus, Lines)
    assert isinstance(batches, Lines)
    restarts = next(one.restarts for one in result.jobs if one.name == job)
    assert gpus.lines[0].dots is not None
    assert len(gpus.lines[0].dots[0]) == restarts > 0
    with pytest.raises(InputError, match="no job"):
        life_figures(result, record, "vision-x")
