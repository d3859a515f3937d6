"""Recording and pictures: what is drawn adds up to what the simulator counted."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ddltool.analyzers.scheduling.failures import Failures
from ddltool.analyzers.scheduling.inputs import read_applications, read_cluster, read_workload
from ddltool.analyzers.scheduling.pictures import (
    Recorder,
    allocation_picture,
    completion_picture,
    gpus_over_time,
    life_picture,
    longest_restarted,
)
from ddltool.analyzers.scheduling.policies import POLICIES, policies
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


def size(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def test_pictures_are_whole_and_repeatable(replays: Replays) -> None:
    result, record = replays["pollux"]
    results = {name: one for name, (one, _) in replays.items()}
    for draw in (
        lambda kind: completion_picture(results, file_format=kind),
        lambda kind: allocation_picture(result, record, file_format=kind),
        lambda kind: life_picture(result, record, longest_restarted(result), file_format=kind),
    ):
        assert size(draw("png")) >= (600, 400)
        svg = draw("svg")
        assert svg == draw("svg")
        assert svg.rstrip().endswith(b"</svg>")
        assert b"2026" not in svg  # no date in it


def test_names_are_drawn_as_they_are(replays: Replays) -> None:
    result, record = replays["pollux"]
    # More applications than there are colours.
    jobs = tuple(replace(job, application=f"$group_{row}^{{2}}$ <b>") for row, job in enumerate(result.jobs))
    many = allocation_picture(replace(result, jobs=jobs), record, file_format="svg")
    assert many != allocation_picture(result, record, file_format="svg")
    with pytest.raises(InputError, match="no job"):
        life_picture(result, record, "vision-x")
    with pytest.raises(InputError, match="png or svg"):
        completion_picture({"pollux": result}, file_format="bmp")
    with pytest.raises(InputError, match="no policy"):
        completion_picture({})
