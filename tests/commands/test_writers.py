"""Every output of every command, by what has its name: a file, a link, a folder, a pipe, a device, a socket.

The outputs are the options of the commands' signatures that take a file to write; a new one without words to run it fails.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddltool import artifacts
from ddltool.commands.main import COMMANDS, load
from ddltool.commands.verbs import _WORDS
from ddltool.errors import InputError
from ddltool.shipped import folder
from tests.cluster.test_readers import HELIOS
from tests.commands.test_bounds import TEXTS
from tests.commands.test_calibrate import LOGS
from tests.conftest import Cli

LOADS = folder() / "workloads"
CLUSTER, TRACES = ("--cluster", LOADS / "cluster.yaml"), ("--traces", LOADS / "traces")
JOBS = (LOADS / "synthetic.csv", *CLUSTER, *TRACES)
# Words with which a command ends well, its output left out.
WORDS: dict[str, tuple[object, ...]] = {
    "predict": ("zoo:cifarnet", "--device", "V100"),
    "import": ("profile.csv",),
    "fit": ("profile.csv",),
    "plan": ("job.yaml", "--strategy", "est"),
    "companion": ("kept.yaml",),
    "trace": ("toy.json.gz", "--device", "V100", "--bandwidth", "10Gbit"),
    "balance": ("speeds.csv", "--predictor", "last"),
    "barrier": (folder() / "barrier" / "times.csv",),
    "emit": ("plan-est.json",),
    "verify": ("plan-est.json", "telemetry.jsonl", "--max-error", "100000%"),
    "stragglers": ("telemetry.jsonl",),
    "gate": ("plan-est.json", "--rule", "iteration_s <= 100"),
    "report": ("plan-est.json",),
    "simulate": (*JOBS, "--policy", "fifo"),
    "simulate sweep": (*JOBS, "--policy", "fifo", "--seeds", "1", "--jobs", "1"),
    "simulate generate": ("--jobs", "5", "--hours", "1", *CLUSTER, *TRACES),
    "simulate advise": ("state.yaml",),
    "show schema": ("plan",),
    "simulate convert": ("helios.csv",),
    "simulate autoscale": ("vision",),
    "simulate trials": ("vision", "--policy", "fifo"),
    "calibrate": ("nccl.log", "--device", "A10"),
    "network": (),
    "profile": ("zoo:cifarnet", "--batch-sizes", "1", "--repeats", "1", "--warmup", "0"),
    "profile watch": ("zoo:cifarnet", "--iterations", "2"),
}
BESIDE: dict[str, tuple[object, ...]] = {"--patch": ("kept.db", "--lookup", "V100=4")}
"""Other words where an option has no part beside the usual ones."""
FOLDERS = ("init", "demo", "show zoo")
"""Commands whose output is a folder of files, each written as all are."""


def outputs() -> Iterator[tuple[str, str]]:
    """Yield each command with each option that names a file to write."""
    for name in COMMANDS.keys() - set(FOLDERS):
        words = _WORDS["shared"] | _WORDS.get(name, {})
        for parameter in load(name).params:
            said = words.get(parameter.name)
            if parameter.name == "output" or (isinstance(said, dict) and said.get("writes")):
                yield name, parameter.opts[0]


OUTPUTS = sorted(outputs())


@pytest.fixture(scope="module")
def place(every_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with what the commands read, in which they run."""
    made = shutil.copytree(every_artifact, tmp_path_factory.mktemp("writers") / "place")
    for name, text in (TEXTS | {"helios.csv": HELIOS, "nccl.log": LOGS["2.13"]}).items():
        (made / name).write_text(text.replace("case.json", "goodput.json"))
    with contextlib.chdir(made):
        yield made


def words_of(command: str, option: str, target: object) -> list[object]:
    """The words of a command that writes to ``target``."""
    return [*command.split(), *BESIDE.get(option, WORDS[command]), option, target]


def test_every_output_is_known() -> None:
    assert {command for command, _ in OUTPUTS} == set(WORDS)
    assert len(OUTPUTS) > 25


@pytest.mark.parametrize(("command", "option"), OUTPUTS)
def test_a_place_where_no_file_can_be(place: Path, tmp_path: Path, cli: Cli, command: str, option: str) -> None:
    """A folder, a socket, a loop of links, a folder that is not there: refused before anything is done."""
    with socket.socket(socket.AF_UNIX) as taken, contextlib.chdir(tmp_path):
        taken.bind("taken")
    (tmp_path / "loop").symlink_to("loop")
    for name in (".", "taken", "loop", "none/file"):
        cli(*words_of(command, option, tmp_path / name)).refuses(str(tmp_path / name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loop", "taken"]


def _tried(cli: Cli, monkeypatch: pytest.MonkeyPatch, folder: Path, command: str, option: str) -> None:
    """Run a command on a link to a file, a pipe that nobody reads, one that is read, and a full device."""
    monkeypatch.setattr(artifacts, "_PIPE_TIMEOUT_S", 0.2)
    file, pipe, full = folder / "real.out", folder / "pipe", folder / "full"
    (folder / "link").symlink_to(file)
    full.symlink_to("/dev/full")
    os.mkfifo(pipe)
    if command == "companion" and option == "--patch":
        cli("companion", "kept.yaml", "-o", "kept.db").done()
    ended = cli(*words_of(command, option, folder / "link"))
    assert ended.code == (command == "verify"), ended.err  # whose run is none of the plan
    assert (folder / "link").is_symlink()
    assert file.stat().st_size > 0
    before = os.stat("/dev/full")
    if (command, option) == ("companion", "-o"):  # a database is no stream
        for other in (pipe, full):
            cli(*words_of(command, option, other)).refuses(f"{other.name}: is a pipe or a device; give a file name")
        assert pipe.is_fifo()
        return
    cli(*words_of(command, option, full)).refuses("full: cannot be written (No space left on device)")
    assert os.stat("/dev/full").st_rdev == before.st_rdev
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)
    cli(*words_of(command, option, pipe)).refuses("pipe: cannot be written (nobody read from this pipe within 0.2 s)")
    assert pipe.is_fifo()
    monkeypatch.setattr(artifacts, "_PIPE_TIMEOUT_S", 30.0)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    assert cli(*words_of(command, option, pipe)).code == ended.code
    reader.join(10)
    assert pipe.is_fifo()
    assert read
    assert read[0]


@pytest.mark.parametrize(
    ("command", "option"), [("fit", "-o"), ("gate", "--sarif"), ("emit", "-o"), ("companion", "-o")]
)
def test_pipes_devices_and_links(
    place: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str, option: str
) -> None:
    _tried(cli, monkeypatch, tmp_path, command, option)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "option"), OUTPUTS)
def test_pipes_devices_and_links_of_all(
    place: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str, option: str
) -> None:
    _tried(cli, monkeypatch, tmp_path, command, option)


def test_a_reader_that_stops_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "_PIPE_TIMEOUT_S", 0.2)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(InputError, match=r"pipe: cannot be written \(nobody read from this pipe within 0.2 s\)"):
            artifacts.write_bytes(pipe, bytes(1 << 20))  # more than a pipe holds
    finally:
        os.close(reader)
