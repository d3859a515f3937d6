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
from tests.helpers.processes import torchrun

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
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


def share_used(process: int, at_least_s: float) -> float:
    """Return the CPU seconds per second of a process, over at least 1 s and until it has used some."""
    begin, before = time.monotonic(), used_s(process)
    used = spent = 0.0
    while spent < 1.0 or used < at_least_s:
        time.sleep(0.1)
        used, spent = used_s(process) - before, time.monotonic() - begin
        assert spent < 30.0, f"used {used} s in {spent} s"
    return used / spent


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
            limited = share_used(process.pid, 0.03)
            assert limited <= 0.15
            module.set_limit(group, 1.0)
            assert any(share_used(process.pid, 0.15) > 1.5 * limited for _ in range(5))
        assert not group.exists()
        assert process.wait(5) == -9


@pytest.mark.slow
def test_sizes_follow_the_limit_to_another_worker(tmp_path: Path) -> None:
    """Worker 1 has a third of worker 0's CPU; after the middle of the run it is the other way round."""
    module, shares, steps = needed(), (0.6, 0.2), 16
    with module.CpuLimits(shares) as made:
        given = {
            **{"variants": ["cpu"], "shares": shares, "groups": list(map(str, made.groups)), "steps": steps},
            **{"move_at": steps // 2, "total_batch": 128, "channels": 128, "seed": 0},
        }
        script = BENCHMARKS / "bench_balance_live.py"
        done = torchrun(2, script, "--limited-worker", json.dumps(given), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    sizes = json.loads(done.stdout.splitlines()[-1])["cpu"]["sizes"]
    assert sizes[0] == [64, 64]
    assert sizes[7][0] > 80
    assert sizes[-1][0] < 48
    assert all(sum(row) == 128 for row in sizes)
