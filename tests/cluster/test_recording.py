"""Who held what in each round of a replay adds up to what the simulator counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from ddltool.analyzers.answers.reporting.simulation_section import completion_figure
from ddltool.analyzers.cluster.cluster import Allocation, ClusterSpec, NodeFailures, count_gpus
from ddltool.analyzers.cluster.inputs import read_applications, read_cluster, read_workload
from ddltool.analyzers.cluster.job import SimulatedJob
from ddltool.analyzers.cluster.policies import POLICIES, policies
from ddltool.analyzers.cluster.simulator import Options, SchedulingPolicy, SimulationResult, simulate
from tests.helpers.workloads import FOLDER


class Recorder:
    """A policy that passes everything on and keeps what each job holds from when on, and the batches seen."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.policy, self.name, self.tuning = policy, policy.name, policy.tuning
        self.pools = getattr(policy, "pools", False)
        self.held: list[tuple[float, int, int, bool]] = []  # time, job, GPUs, whether that is a restart
        self.batches: list[tuple[int, int]] = []
        self._known: dict[int, Allocation] = {}

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        has = {job.index: job.allocation for job in jobs}
        for index, known in list(self._known.items()):  # what a failed node took away is seen here at the earliest
            if known and known != has.get(index, ()):
                self._note(now_s, index, (), False)
        self.batches += [
            (job.index, job.total_batch_size) for job in jobs if job.allocation and now_s > job.running_from_s
        ]
        chosen = self.policy.allocate(jobs, cluster, now_s)
        for job in jobs:
            if (new := chosen.get(job.index, ())) != job.allocation:
                self._note(now_s, job.index, new, bool(new) and job.starts > 0)
        return chosen

    def _note(self, now_s: float, job: int, allocation: Allocation, restarted: bool) -> None:
        self._known[job] = allocation
        self.held.append((now_s, job, count_gpus(allocation), restarted))


def gpu_seconds(result: SimulationResult, record: Recorder) -> tuple[np.ndarray, float]:
    """Return each job's GPU seconds, and the most GPUs that were held at once."""
    ends = [job.finish_s for job in result.jobs]
    changes = [(at, job, gpus) for at, job, gpus, _ in record.held if at < ends[job]]
    changes += [(end, job, 0) for job, end in enumerate(ends)]
    times = np.unique([at for at, *_ in changes])
    held = np.zeros((len(ends), len(times)))
    for at, job, gpus in sorted(changes, key=lambda change: change[0]):
        held[job, int(np.searchsorted(times, at)) :] = gpus
    return (held[:, :-1] * np.diff(times)).sum(axis=1), held.sum(axis=0).max()


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
    return made


@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_held_is_what_was_counted(policy: str, replays: Replays) -> None:
    result, record = replays[policy]
    spent, most = gpu_seconds(result, record)
    assert spent == pytest.approx([job.gpu_seconds for job in result.jobs])
    assert most <= result.total_gpus
    for row, job in enumerate(result.jobs):
        assert sum(restarted for _, index, _, restarted in record.held if index == row) == job.restarts
        assert next(at for at, index, *_ in record.held if index == row) == job.start_s


def test_failed_nodes_are_not_counted_as_held() -> None:
    jobs = read_workload(FOLDER / "synthetic.csv")[:12]
    applications = read_applications([FOLDER / "traces"], [job.application for job in jobs])
    record = Recorder(policies("pollux", -1.0, 30.0, 0)["pollux"]())
    lost = NodeFailures(mtbf_s=2000.0, repair_s=300.0, seed=3)
    result = simulate(jobs, applications, read_cluster(FOLDER / "cluster.yaml"), record, Options(failures=lost))
    assert sum(job.failures for job in result.jobs) > 3
    spent, most = gpu_seconds(result, record)
    assert most <= result.total_gpus
    for value, job in zip(spent.tolist(), result.jobs, strict=True):
        # A failure is seen at the next round, at most an interval later, on at most all GPUs.
        assert job.gpu_seconds - 1e-6 <= value <= job.gpu_seconds + job.failures * 60.0 * result.total_gpus


def test_batches_are_those_of_the_policy(replays: Replays) -> None:
    result, record = replays["tiresias"]
    jobs = read_workload(FOLDER / "synthetic.csv")[: len(result.jobs)]
    assert record.batches
    for row, size in record.batches:  # what is asked for, rounded up to a whole local batch per replica
        assert jobs[row].batch_size <= size < jobs[row].batch_size + 4 * jobs[row].num_replicas
    adaptive = replays["pollux"][1].batches
    assert max(len({size for index, size in adaptive if index == row}) for row in range(len(jobs))) > 1


def test_completion_times_reach_every_job_and_one_end(replays: Replays) -> None:
    times = {name: [job.jct_s for job in result.jobs] for name, (result, _) in replays.items()}
    lines = completion_figure(times).lines
    assert [line.label for line in lines] == list(replays)
    for line in lines:
        assert sorted(times[line.label]) == line.x[1:-1].tolist()
        assert (line.y[0], line.y[-1], line.x[-1]) == (0.0, 1.0, max(map(max, times.values())))
