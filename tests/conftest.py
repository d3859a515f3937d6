"""Shared fixtures: the command line in this process, and small artifacts."""

from __future__ import annotations

import fcntl
import gc
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from ddltool import own_process
from ddltool.goodput_model import ThroughputParams
from ddltool.job import Job
from ddltool.simulation_results import JobSpec
from tests.helpers.processes import LASTING, children_left, forking
from tests.helpers.recordings import Starter

# On a busy machine an example may take any time, and a change must not fail on a rare example that it did not cause:
# `pytest --hypothesis-profile=search` looks for those, among twenty times as many.
EXAMPLES: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", max_examples=30, derandomize=True, **EXAMPLES)
settings.register_profile("search", max_examples=600, **EXAMPLES)
settings.load_profile("repeatable")

# Tests train on a GPU in processes of their own alone.
own_process.claim()

# Two cores serve many test processes: one thread each keeps them from fighting, and results repeatable.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What collecting makes stays to the end: looking through it for garbage again and again takes a third of the time.
gc.disable()
# What collecting compiles is kept, also where the environment has nothing compiled kept: pytest rewrites the asserts of each
# module, which takes half of the time.
_KEEPS_NOTHING, sys.dont_write_bytecode = sys.dont_write_bytecode, False


def pytest_collection_finish() -> None:
    """From here on garbage is collected, and looked for among what the tests make."""
    sys.dont_write_bytecode = _KEEPS_NOTHING
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files of tests/runtime evenly among the others.

    They mostly wait for processes, of which no core is kept busy where several of them run side by side.
    """
    files = list(dict.fromkeys(item.path for item in items))
    waiting, computing = (
        [file for file in files if (file.parent.parent.name == "runtime") == waits] for waits in (True, False)
    )
    place = {file: (at + 0.5) / len(kind) for kind in (waiting, computing) for at, file in enumerate(kind)}
    items.sort(key=lambda item: (place[item.path], item.path))


@dataclass(frozen=True)
class Result:
    """What one command left behind."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout; fails when there is anything else."""
        return json.loads(self.out)

    @property
    def error_line(self) -> str:
        """The one line on stderr that starts with ``error:``; fails when there is no such line or a traceback."""
        assert "Traceback" not in self.err
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        assert self.err.rstrip().endswith(lines[0])
        return lines[0].removeprefix("error: ")

    def done(self) -> Result:
        """Return this; fails when the command did."""
        assert self.code == 0, self.err
        return self

    def refuses(self, *words: str, code: int = 2) -> None:
        """Fail unless the command ended with this code, by default that of bad input, and one line that has these words."""
        assert self.code == code, self.out
        for each in words:
            assert each in self.error_line


Cli = Callable[..., Result]


def throughput(**changes: float) -> ThroughputParams:
    """A fitted model in which nothing takes time but what is given."""
    names = [name for name in ThroughputParams.model_fields if name != "gamma"]
    return ThroughputParams(**{**dict.fromkeys(names, 0.0), "gamma": 1.0, **changes})


def job(offers: Mapping[str, Sequence[float | None]], **changes: object) -> Job:
    """A job by device type: count, and where it matters capability, price per hour, memory in GiB."""
    names = ("count", "capability_per_s", "price_per_hour", "memory_gib")
    devices = [{"type": kind, **dict(zip(names, offer, strict=False))} for kind, offer in offers.items()]
    return Job.model_validate({"name": "test", "max_workers": 8, "batch_size": 4, "devices": devices, **changes})


def submitted(name: str, submit_s: float, application: str = "steady", replicas: int = 1, batch: int = 8) -> JobSpec:
    """A job of a workload."""
    return JobSpec(name=name, submit_s=submit_s, application=application, num_replicas=replicas, batch_size=batch)


def write(path: Path, *lines: str) -> Path:
    """Write a text, or lines of one."""
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]], tail: str = "") -> Path:
    """Write rows as JSON Lines, and what else is to stand behind them."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail, encoding="utf-8")
    return path


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Iterator[Cli]:
    """Run ``ddltool ARGUMENTS`` in this process, which says nothing of how long it takes, however busy the machine is."""
    from ddltool.commands import output
    from ddltool.commands.main import run

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "_FIRST_LINE_S", 1e6)
        yield call


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of measured data of others; tests that need it are skipped where it is absent."""
    folder = Path(os.environ.get("DDLTOOL_DATA", Path(__file__).resolve().parents[1] / ".." / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("no measured data here (set DDLTOOL_DATA)")
    return folder


@pytest.fixture(scope="session")
def every_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an artifact of every kind, made once for all processes that test; whoever writes there takes a copy."""
    from tests.helpers.report_artifacts import write_all

    base = tmp_path_factory.getbasetemp()
    made = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "every-artifact"
    with open(f"{made}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            begun = tmp_path_factory.mktemp("artifacts")
            write_all(begun)
            begun.rename(made)
    return made


@pytest.fixture(autouse=True, scope="session")
def children_start_quickly() -> Iterator[None]:
    """Fork what this process would spawn, recordings too; commands that tests run as processes of their own do spawn."""
    from ddltool.analyzers.step.recording import command

    real = multiprocessing.get_context
    starter = Starter(LASTING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", lambda way=None: forking() if way == "spawn" else real(way))
        patch.setattr(command, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": starter}))
        yield
    starter.close()


@pytest.fixture(autouse=True, scope="session")
def files_are_not_waited_for() -> Iterator[None]:
    """Leave it to the system when a file reaches the disk: no test cuts the power, and each file would take a moment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="module")
def nobody_is_left() -> Iterator[None]:
    """Fail the file whose tests leave a process behind: the next file's tests would count it as theirs."""
    yield
    assert not children_left()
