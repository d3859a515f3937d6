"""Synthetic workloads: arrivals against their rate, shares and classes against Pollux's table, and the command."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from ddltool.analyzers.cluster.cluster import ClusterSpec
from ddltool.analyzers.cluster.generator import (
    CLASS_SHARES,
    PATTERNS,
    POLLUX,
    SIZE_CLASSES,
    Pattern,
    arrivals,
    class_indices,
    generate,
    size_class,
    templates,
)
from ddltool.analyzers.cluster.inputs import read_applications, read_workload
from ddltool.analyzers.cluster.metrics import IsolatedTimes
from ddltool.errors import InputError
from tests.conftest import Cli
from tests.helpers.workloads import FOLDER


@given(st.integers(1, 300), st.floats(0.01, 100), st.sampled_from(PATTERNS), st.integers(0, 9))
def test_arrivals_are_ascending_whole_seconds_within_the_span_and_the_seed_fixes_them(
    jobs: int, hours: float, pattern: str, seed: int
) -> None:
    asked = Pattern(jobs=jobs, hours=hours, pattern=pattern, seed=seed)
    made = arrivals(asked)
    assert made.shape == (jobs,)
    assert (np.diff(made) >= 0).all()
    assert 0 <= made[0] <= made[-1] <= 3600 * hours
    assert (made == np.floor(made)).all()
    assert generate(asked) == generate(asked)


def test_poisson_arrivals_are_uniform_given_their_number_and_diurnal_ones_peak_threefold() -> None:
    span = 8 * 3600.0
    poisson = arrivals(Pattern(jobs=20_000, pattern="poisson", seed=5)) / span
    assert kstest(poisson, "uniform").pvalue > 0.01
    diurnal = arrivals(Pattern(jobs=20_000, seed=5))
    assert kstest(diurnal / span, "uniform").pvalue < 1e-9
    counts = np.histogram(diurnal, bins=np.arange(9) * 3600.0)[0]
    assert counts.argmax() == 3
    assert counts[3] / counts[0] == pytest.approx(3.0, rel=0.08)
    assert np.ptp(np.diff(arrivals(Pattern(jobs=100, pattern="constant")))) <= 1


def test_pollux_shares_requests_and_classes_come_out() -> None:
    jobs = generate(Pattern(jobs=20_000, seed=1))
    counts = Counter(job.application for job in jobs)
    for template in POLLUX:
        assert counts[template.application] / 20_000 == pytest.approx(template.share, abs=0.012)
        asked = {(job.num_replicas, job.batch_size) for job in jobs if job.application == template.application}
        assert asked == set(template.requests)
    for name, share in CLASS_SHARES.items():
        assert sum(template.share for template in POLLUX if template.size == name) == pytest.approx(share)
    assert len({job.name for job in jobs}) == 20_000
    assert generate(Pattern(seed=1)) != generate(Pattern(seed=2))


@given(st.floats(0, 1e6))
def test_the_class_is_the_first_whose_end_is_above(hours: float) -> None:
    assert list(SIZE_CLASSES)[int(class_indices(np.array([hours]))[0])] == size_class(hours)
    assert hours < SIZE_CLASSES[size_class(hours)]


def test_requests_of_given_applications_reach_50_to_80_percent_of_linear_speed_up() -> None:
    applications = read_applications([FOLDER / "traces"], ["vision", "language"])
    cluster = ClusterSpec.homogeneous(4, 4)
    made = templates(applications, cluster)
    isolated = IsolatedTimes(applications, cluster)
    assert [template.size for template in made] == [size_class(isolated(one.application, 1) / 3600) for one in made]
    for template in made:
        application = applications[template.application]
        for replicas, batch in template.requests:
            assert replicas > 1
            assert batch in application.batch_sizes
            # The isolated time also tunes the batch by epoch, so that both ends are a little lower there.
            share = isolated(template.application, 1) / isolated(template.application, replicas) / replicas
            assert 0.45 <= share <= 0.85


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--jobs=0", "--jobs: is 0; from 1 to 10000000"),
        ("--hours=nan", "--hours: is nan"),
        ("--hours=1e308", "--hours: is 1e+308"),
        ("--pattern=dirunal", "unknown pattern 'dirunal'; did you mean \"diurnal\"?"),
        ("--jbos=5", "No such option: --jbos"),
        ("--seed=-1", "--seed: is -1; give a whole number of at least 0"),
    ],
)
def test_a_bad_pattern_is_named_and_nothing_is_written(cli: Cli, tmp_path: Path, text: str, message: str) -> None:
    cli("simulate", "generate", text, "-o", tmp_path / "w.csv").refuses(message)
    assert not list(tmp_path.iterdir())


def test_the_command_writes_a_labelled_workload_that_it_can_replay(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "w.csv"
    traces = ("--cluster", FOLDER / "cluster.yaml", "--traces", FOLDER / "traces")
    asked = ("simulate", "generate", "--jobs", 6, "--hours", 0.5, "--pattern", "poisson", "--seed", 4)
    cli(*asked, *traces, "-o", path).done()
    lines = path.read_text().splitlines()
    assert all("synthetic: jobs=6,hours=0.5,pattern=poisson,seed=4" in line for line in lines[1:])
    again = cli(*asked)  # what ships is these files
    assert again.out == path.read_text()
    jobs = read_workload(path)
    assert [job.name for job in jobs] == [f"synthetic-{n}" for n in range(1, 7)]
    replayed = cli("simulate", path, "--policy", "fifo", "--json").done()
    assert replayed.document["jobs"] == 6


def test_templates_without_a_share_are_refused() -> None:
    with pytest.raises(InputError, match="hold no application"):
        generate(Pattern(), ())
