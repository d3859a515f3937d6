"""Accelerate's own wrappers around model, optimizer, loader and scheduler: no sample is lost, and each counts once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddltool.artifacts import save
from tests.runtime_workers import enforcement

pytest.importorskip("accelerate")


@pytest.mark.slow
def test_prepared_training_is_that_of_one_process(tmp_path: Path) -> None:
    save(enforcement([12, 20]), tmp_path / "enforce.json")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(Path(__file__).parent / "accelerate_script.py"), str(tmp_path / "enforce.json")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = re.findall(r"rank (\d): (\d+) samples, off by (\S+)", done.stdout)
    assert sorted(rank for rank, _, _ in told) == ["0", "1"]
    assert {int(samples) for _, samples, _ in told} == {2 * 228}
    assert max(float(apart) for _, _, apart in told) < 1e-6
