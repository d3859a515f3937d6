"""Latency and bandwidth between processes: the fit, real processes, a link of known rate, and failures."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddltool.errors import DdlToolError, InputError
from ddltool.results import NetworkResult
from ddltool.runtime.measuring.network import DEFAULT_SIZES, fit_link, measure_network, pairs_to_measure
from tests.helpers.processes import as_job, children_left, wait_until

SIZES = (8, 2**16, 2**20, 2**24)


@given(
    st.floats(1e-7, 1.0), st.floats(1e4, 1e11), st.lists(st.integers(1, 2**30), min_size=2, max_size=12, unique=True)
)
def test_times_on_a_line_give_the_line(latency: float, bandwidth: float, sizes: list[int]) -> None:
    times = [latency + size / bandwidth for size in sizes]
    if max(times) - min(times) < 1e-6 * max(times):
        return  # all the same to within rounding: there is no slope to be found
    found = fit_link(sizes, times)
    assert found.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=1e-6)
    assert found.latency_s == pytest.approx(latency, rel=1e-6, abs=1e-8 * max(times))
    assert found.residual == pytest.approx(0.0, abs=1e-6)


def test_a_burst_does_not_count_as_bandwidth() -> None:
    # A token bucket lets the first 256 KiB through at once; after that 25 MB/s, with 50 us each.
    sizes = DEFAULT_SIZES
    times = [50e-6 + max(0, size - 2**18) / 25e6 for size in sizes]
    found = fit_link(sizes, times)
    assert found.bandwidth_bytes_per_s == pytest.approx(25e6, rel=0.02)
    assert found.latency_s == pytest.approx(50e-6, rel=0.02)
    assert found.residual > 0.3


@pytest.mark.parametrize(
    ("sizes", "times", "message"),
    [
        ([8], [1.0], "1 times for 1 sizes; give two sizes or more"),
        ([8, 8], [1.0, 2.0], "2 times for 1 sizes; give two sizes or more"),
        ([8, 16, 32], [1.0, 2.0], "2 times for 3 sizes; give two sizes or more"),
        ([8, 16], [0.0, 1.0], "hold 0 s; they must be above 0 and finite"),
        ([8, 16], [1.0, float("inf")], "hold 1 s; they must be above 0 and finite"),
        ([8, 16], [2.0, 1.0], "do not grow with the size; measure larger sizes"),
    ],
)
def test_times_that_say_nothing(sizes: list[int], times: list[float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit_link(sizes, times)


def test_who_is_measured_with_whom() -> None:
    assert pairs_to_measure(2) == [(0, 1)]
    assert pairs_to_measure(4) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert pairs_to_measure(5) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)]


def check(found: NetworkResult) -> None:
    for pair in found.pairs:
        assert pair.sizes_bytes == list(SIZES)
        assert all(0 < short <= median for short, median in zip(pair.shortest_s, pair.median_s, strict=True))
        assert 0 < pair.latency_s <= pair.shortest_s[0]
    assert found.latency_s == max(pair.latency_s for pair in found.pairs)
    assert found.bandwidth_bytes_per_s == min(pair.bandwidth_bytes_per_s for pair in found.pairs)


def roughly_linear(found: NetworkResult) -> bool:
    """Return whether 16 times the bytes take 4 to 64 times as long, and the fit is within a factor of 3 there."""
    for pair in found.pairs:
        predicted = pair.latency_s + SIZES[3] / pair.bandwidth_bytes_per_s
        if not (4 < pair.shortest_s[3] / pair.shortest_s[2] < 64 and 1 / 3 < predicted / pair.shortest_s[3] < 3):
            return False
    return True


@pytest.mark.parametrize(("processes", "linear"), [(2, False), pytest.param(3, True, marks=pytest.mark.slow)])
def test_local_processes(processes: int, linear: bool) -> None:
    """That times grow as the bytes do is a matter of a machine that is not busy with other things."""
    for _ in range(10):  # other load is not even: it may meet one size and not the other
        seen: list[tuple[int, int]] = []
        found = measure_network(
            processes, sizes_bytes=SIZES, rounds=10, progress=lambda done, total, seen=seen: seen.append((done, total))
        )
        check(found)
        if not linear or roughly_linear(found):
            break
    assert roughly_linear(found) or not linear, found
    assert found.local
    assert [tuple(pair.ranks) for pair in found.pairs] == pairs_to_measure(processes)
    assert seen == [(number + 1, len(found.pairs)) for number in range(len(found.pairs))]
    assert not children_left()


JOB = f"""
import os
from ddltool.runtime.measuring.network import measure_network
found = measure_network(sizes_bytes={SIZES}, rounds=5)
with open(os.path.join(os.path.dirname(__file__), "rank" + os.environ["RANK"] + ".json"), "w") as file:
    file.write(found.model_dump_json())
"""


def one_rank(rank: int, script: Path) -> None:
    runpy.run_path(str(script))


def test_every_rank_of_a_job_gets_the_same_result(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB, encoding="utf-8")
    for code, _, told in as_job(2, tmp_path, one_rank, script):
        assert code == 0, told
    document, other = (json.loads((tmp_path / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1))
    assert document == other
    assert (document["processes"], document["local"]) == (2, False)
    assert document["pairs"][0]["sizes_bytes"] == list(SIZES)


def test_a_process_that_dies_is_told_and_nobody_is_left() -> None:
    before = set(multiprocessing.active_children())  # other files' processes may serve this session too

    def kill_one() -> None:
        wait_until(lambda: set(multiprocessing.active_children()) - before, "a measuring process starts")
        time.sleep(0.5)  # whatever it does by then
        (set(multiprocessing.active_children()) - before).pop().kill()

    killer = threading.Thread(target=kill_one)
    killer.start()
    try:
        with pytest.raises(DdlToolError, match=r"process [01] was killed \(SIGKILL|the processes lost each other"):
            measure_network(2, sizes_bytes=(8, 2**28), rounds=10_000, timeout_s=20)
    finally:
        killer.join()
    assert not children_left()


def test_a_job_whose_peer_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        monkeypatch.setenv(name, value)
    with pytest.raises(DdlToolError, match="the processes lost each other"):
        measure_network(timeout_s=2)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(InputError, match="WORLD_SIZE: is 1; measure between 2 or more processes"):
        measure_network()


def test_one_process_has_nobody_to_talk_to() -> None:
    with pytest.raises(InputError, match="replicas: 1 process has nobody to talk to; measure between 2 or more"):
        measure_network(1)


def run_quietly(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def shaped_link() -> Iterator[tuple[str, str, float]]:
    """Two network namespaces joined by a link of 200 Mbit/s; yields their names and the rate in bytes/s."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("needs root, ip and tc")
    tag = f"nt{os.getpid() % 100_000}"
    first, second = f"{tag}a", f"{tag}b"
    try:
        made = run_quietly("ip", "link", "add", first, "type", "veth", "peer", "name", second)
        for number, end in enumerate((first, second), start=1):
            inside = ("ip", "netns", "exec", end)
            made = made and all(
                run_quietly(*command)
                for command in (
                    ("ip", "netns", "add", end),
                    ("ip", "link", "set", end, "netns", end),
                    (*inside, "ip", "addr", "add", f"10.98.11.{number}/24", "dev", end),
                    (*inside, "ip", "link", "set", end, "up"),
                    (*inside, "ip", "link", "set", "lo", "up"),
                    (*inside, "tc", *f"qdisc add dev {end} root tbf rate 200mbit burst 256kb latency 50ms".split()),
                )
            )
        if not made:
            pytest.skip("cannot make network namespaces here")
        yield first, second, 200e6 / 8
    finally:
        for end in (first, second):
            run_quietly("ip", "netns", "del", end)
        run_quietly("ip", "link", "del", first)


@pytest.mark.slow
def test_a_link_of_known_rate(shaped_link: tuple[str, str, float], tmp_path: Path) -> None:
    *ends, rate = shaped_link
    script = tmp_path / "job.py"
    script.write_text(JOB.replace(f"{SIZES}", "(8, 2**16, 2**20, 2**22)"), encoding="utf-8")
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "10.98.11.1", "MASTER_PORT": "29517"}
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", str(end), sys.executable, str(script)],
            env={**shared, "RANK": str(rank), "GLOO_SOCKET_IFNAME": str(end), "OMP_NUM_THREADS": "1"},
        )
        for rank, end in enumerate(ends)
    ]
    try:
        assert [process.wait(timeout=90) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    fit = json.loads((tmp_path / "rank0.json").read_text(encoding="utf-8"))["pairs"][0]
    # The kernel counts headers towards the rate and lets a burst through first: a few percent either way.
    assert fit["bandwidth_bytes_per_s"] == pytest.approx(rate, rel=0.1)
    assert fit["latency_s"] < 0.01
