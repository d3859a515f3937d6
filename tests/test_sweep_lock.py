"""The lock of a sweep's output file where the file system, or the moment, does not do what one expects."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ddltool.analyzers.scheduling.sweep import sole_writer
from ddltool.errors import InputError

fcntl = pytest.importorskip("fcntl")
Flock = Callable[[int, int], None]


def failing(code: int) -> Flock:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(code, os.strerror(code))

    return flock


def test_a_disk_that_fails_is_no_missing_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(errno.EIO))
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    with (
        pytest.raises(InputError, match=r"sweep\.json: cannot be locked .*error"),
        sole_writer(tmp_path / "sweep.json"),
    ):
        raise AssertionError("the lock was not taken")
    assert not list(tmp_path.iterdir())
    assert not before or len(os.listdir("/proc/self/fd")) <= before
