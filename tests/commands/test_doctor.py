"""``ddltool doctor``: checks that are really tried, on this machine and on machines that are made to lack something."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from ddltool.results import MachineCheck
from ddltool.runtime.measuring import machine_checks
from ddltool.runtime.measuring.children import Children
from tests.conftest import Cli
from tests.helpers.processes import children_left

WANTED = (
    *("python", "packages", "machine", "CUDA", "store port", "gloo", "gloo, default network", "NCCL"),
    *(("torchvision",) if importlib.util.find_spec("torchvision") else ()),
    "clock",
    *("this folder", "temporary files", "shared memory"),
    *("altair", "scikit-learn", "statsmodels", "transformers", "ray", "chromium"),
)


def by_name(document: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in document["checks"]}


def test_this_machine_passes(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "PATIENCE_S", 120.0)  # the machine may be busy
    result = cli("doctor", "--json").done()
    assert result.document["passed"] is True
    checks = by_name(result.document)
    assert tuple(checks) == WANTED
    for check in checks.values():
        assert (check["remedy"] == "") == (check["status"] == "ok"), check
    assert checks["gloo"]["status"] == "ok"
    assert "2 processes added 1 MiB" in checks["gloo"]["found"]
    assert not any("no answer" in check["found"] for check in checks.values())
    assert children_left() == []


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The status of gloo, as told in the place of two processes; none is started for torchvision either."""
    said = {"gloo": "ok"}

    def answers(children: object) -> list[MachineCheck]:
        remedy = "" if said["gloo"] == "ok" else "mend it"
        return [MachineCheck(name="gloo", status=said["gloo"], found="as told", remedy=remedy)]

    monkeypatch.setattr(machine_checks, "check_processes", answers)
    monkeypatch.setattr(machine_checks, "check_torchvision", list)
    monkeypatch.setattr(machine_checks, "Children", lambda *_: contextlib.nullcontext())
    return said


def test_only_what_is_needed_fails(told: dict[str, str], cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(machine_checks, "SHARED_MEMORY_BYTES", float("inf"))
    result = cli("doctor", "--json")
    checks = by_name(result.document)
    assert checks["chromium"]["status"] == "optional"
    assert checks["shared memory"]["status"] == "warning"
    assert (result.code, result.document["passed"]) == (0, True)
    told["gloo"] = "failed"
    result = cli("doctor", "--json")
    assert (result.code, result.document["passed"]) == (1, False)
    assert result.error_line.startswith("1 of 16 checks failed: gloo;") or "checks failed: gloo;" in result.error_line
    shown = cli("doctor")
    assert shown.code == 1
    assert "gloo: mend it" in shown.out
    assert max(len(line) for line in shown.out.splitlines() if "─" in line) <= 80


def test_a_missing_package_fails_and_is_named(told: dict[str, str], cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "PACKAGES", ("torch", "no-such-package-anywhere"))
    result = cli("doctor", "--json")
    assert result.code == 1
    assert "no-such-package-anywhere" in result.error_line
    assert by_name(result.document)["no-such-package-anywhere"]["remedy"].startswith("pip install")


def test_a_machine_without_torch_gets_a_list_too(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else real(name, *rest))
    checks = by_name(cli("doctor", "--json").document)
    assert "store port" in checks
    assert "gloo" not in checks


@pytest.mark.parametrize(
    ("source", "status", "found"),
    [
        ("", "ok", ""),
        ("raise RuntimeError('operator torchvision::nms does not exist')", "warning", "nms does not exist"),
    ],
)
def test_a_torchvision_for_another_torch_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, status: str, found: str
) -> None:
    (tmp_path / "torchvision.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (check,) = machine_checks.check_torchvision()
    assert check.status == status
    assert check.found.endswith(found)
    assert ("was built for another torch" in check.remedy) == (status == "warning")


def test_folders_are_tried(tmp_path: Path) -> None:
    def check(folder: Path, required: bool) -> MachineCheck:
        return machine_checks.check_folder("temporary files", folder, required=required, remedy="set TMPDIR")

    assert check(tmp_path, True).status == "ok"
    assert check(tmp_path / "not" / "yet", True).status == "ok"
    assert list(tmp_path.iterdir()) == []  # nothing is left, nothing is made
    (tmp_path / "file").write_text("")
    assert check(tmp_path / "file", True).status == "failed"  # no folder can be there
    assert check(tmp_path / "file", False).status == "warning"
    assert check(tmp_path / "file", False).remedy == "set TMPDIR"


def test_no_temporary_folder_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    def none_usable() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['a', 'b']")

    assert machine_checks.check_temporary().status == "ok"
    monkeypatch.setattr(tempfile, "gettempdir", none_usable)
    assert machine_checks.check_temporary().found == "No usable temporary directory found in ['a', 'b']"
    assert machine_checks.check_temporary().status == "failed"


def test_little_room_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "FREE_BYTES", 2**62)
    check = machine_checks.check_folder("cache", tmp_path, required=True, remedy="set MPLCONFIGDIR")
    assert check.status == "warning"
    assert check.remedy == "make room, or set MPLCONFIGDIR"


def test_a_coarse_clock_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_checks.check_clock().status == "ok"
    real = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: round(real(), 3))
    coarse = machine_checks.check_clock()
    assert coarse.status == "warning"
    assert "1,000,000 ns" in coarse.found


def test_a_port_that_cannot_be_had_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(99, "Cannot assign requested address")

    assert machine_checks.check_store_port().status == "ok"
    monkeypatch.setattr(socket, "create_server", refuse)
    check = machine_checks.check_store_port()
    assert (check.status, check.found) == ("failed", "127.0.0.1: Cannot assign requested address")


def hang(rank: int, results: Connection) -> None:
    time.sleep(600)


def test_processes_that_hang_or_die_fail_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    def processes() -> Children:
        return Children(hang, [(0,), (1,)])

    monkeypatch.setattr(machine_checks, "PATIENCE_S", 0.001)
    with processes() as children:
        hung = {check.name: check for check in machine_checks.check_processes(children)}
    assert hung["gloo"].status == "failed"
    assert "no answer" in hung["gloo"].found
    assert hung["gloo, default network"].status == "warning"
    monkeypatch.setattr(machine_checks, "PATIENCE_S", 60.0)
    with processes() as children:
        children.processes[0].kill()
        died = {check.name: check for check in machine_checks.check_processes(children)}
    assert "was killed (SIGKILL" in died["gloo"].found
    assert children_left() == []


@pytest.mark.slow
def test_a_wrong_interface_fails_what_uses_it() -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "no-such-interface"}
    command = [sys.executable, "-m", "ddltool", "doctor", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1  # it was asked for by name, so everything that uses gloo fails
    assert "checks failed: gloo;" in done.stderr
    assert "GLOO_SOCKET_IFNAME" in done.stdout


def test_what_is_said_of_gpus_that_are_not_here() -> None:
    works, broken = ("", 0.002), ("unhandled system error", 0.0)
    assert machine_checks.check_nccl({}, "").status == "optional"
    good = machine_checks.check_nccl({("NCCL", 0): works, ("NCCL", 1): works}, "")
    assert (good.status, good.found) == ("ok", "2 processes added 1 MiB in 2.00 ms (median)")
    bad = machine_checks.check_nccl({("NCCL", 0): works, ("NCCL", 1): broken}, "")
    assert (bad.status, bad.found) == ("failed", "unhandled system error")
    assert "NCCL_DEBUG" in bad.remedy
    here = machine_checks.machine_figures()
    for devices, build, status in ((["T4", "T4"], "13.0", "ok"), ([], "13.0", "warning"), ([], None, "optional")):
        machine = here.model_copy(update={"cuda_devices": devices, "cuda_build": build})
        assert machine_checks.check_cuda(machine).status == status
