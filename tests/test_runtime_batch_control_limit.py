"""Real CPU limits: they hold, they go away again, and batch sizes follow them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from ddltool.errors import InputError

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
SPIN = "import sys\nprint(flush=True)\nsys.stdin.readline()\nwhile True: pass"


def limits() -> ModuleType:
    spec = importlib.util.spec_from_file_location("cpu_limit", BENCHMARKS / "cpu_limit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cpu_limit"] = module
    spec.loader.exec_module(module)
    return module


def needed() -> ModuleType:
    module = limits()
    try:
        module.find_place()
    except InputError as error:
        pytest.skip(str(error))
    return module


def used_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("mounts", "own"),
    [
        ("tmpfs /sys/fs/cgroup tmpfs rw 0 0", "0::/"),
        ("cgroup2 {here} cgroup2 rw 0 0", "0::/"),  # the cpu controller is elsewhere
        ("cgroup {here} cgroup rw,memory 0 0", "3:memory:/"),
        ("cgroup {here}/none cgroup rw,cpu 0 0", "3:cpu:/"),
    ],
)
def test_without_a_cpu_controller_it_says_so(tmp_path: Path, mounts: str, own: str) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("memory pids")
    with pytest.raises(InputError, match="no CPU limit can be set here"):
        limits().find_place(mounts.format(here=tmp_path), own)


def test_a_limit_holds_and_goes_away_with_who_is_in_it() -> None:
    module = needed()
    with subprocess.Popen([sys.executable, "-c", SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        with module.CpuLimits((0.1,)) as made:
            (group,) = made.groups
            (group / "cgroup.procs").write_text(str(process.pid))
            process.stdin.write(b"\n")
            process.stdin.flush()
            begin, before = time.monotonic(), used_s(process.pid)
            time.sleep(1.0)
            assert used_s(process.pid) - before <= 0.15 * (time.monotonic() - begin)
        assert not group.exists()
        assert process.wait(5) == -9


@pytest.mark.slow
def test_sizes_follow_the_limit_to_another_worker() -> None:
    """Worker 1 has a third of worker 0's CPU; after the middle of the run it is the other way round."""
    needed()
    command = [sys.executable, str(BENCHMARKS / "bench_balance_live.py"), "--cpu-limit", "--steps", "24"]
    command += ["--seeds", "1", "--variants", "bsp,oracle,cpu", "--trials", "1", "--per-step"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    sizes = json.loads(done.stdout.splitlines()[-1])[0]["cpu"]["sizes"]
    assert sizes[0] == [64, 64]
    assert sizes[11][0] > 80
    assert sizes[-1][0] < 48
    assert all(sum(row) == 128 for row in sizes)
