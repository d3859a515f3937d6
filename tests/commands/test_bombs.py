"""Files that are small on the disk and large in memory, and ones without an end: one line, in seconds, with little memory."""

from __future__ import annotations

import gzip
import io
import resource
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ddltool import artifacts
from tests.commands.test_bounds import READERS, _ended, place  # noqa: F401 - a fixture

MOST_S, MOST_MIB = 5.0, 900
"""Of computing, of each refusal; what this process may grow by in each: a text of half a GiB is read whole."""


def _packed(*parts: bytes) -> bytes:
    """A hundred kB of gzip become a GB, 10 MB at a time."""
    return b"".join(gzip.compress(part) for part in parts) + gzip.compress(bytes(10_000_000)) * 100


def _zipped() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("graph.json", bytes(100_000_000))
    return made.getvalue()


def _aliases() -> bytes:
    """Nine lines of nine aliases each: a billion values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    return "\n".join(lines).encode()


BOMBS: dict[str, Callable[[], bytes]] = {
    "bomb.json.gz": lambda: _packed(b'{"kind": "ddltool.plan", "x": "'),
    "bomb.jsonl.gz": lambda: _packed(b'{"step": 1}\n'),
    "bomb.csv.gz": lambda: _packed(b"step,rank\n1,"),
    "bomb.zip": _zipped,
    "zipped.json": _zipped,
    "bomb.yaml": _aliases,
    "deep.json": lambda: b'{"kind": "ddltool.plan", "x": ' + b"[" * 1_000_000,
    "deep.jsonl": lambda: b'{"step": ' + b"[" * 500_000 + b"]" * 500_000 + b"}\n",
    "deep.yaml": lambda: b"x: " + b"[" * 100_000,
    "wide.json": lambda: b'{"kind": "ddltool.plan", "x": [' + b"0," * 20_000_000 + b"0]}",
}
EVERY = {command for commands in READERS.values() for command in commands}
COMMANDS = sorted(command for command in EVERY if command[0] != "the hook" and "FILE" in command)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BOMBS, "/dev/zero"])
def test_no_reader_is_blown_up(place: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:  # noqa: F811
    """Two commands with the limits that users have, then all of them with a thirtieth of those."""
    if name in BOMBS:
        Path(name).write_bytes(BOMBS[name]())
    for number, command in enumerate((("gate", "FILE", "--metrics"), ("stragglers", "FILE"), *COMMANDS)):
        if name == "/dev/zero" and command[command.index("FILE") - 1] == "-o":
            continue  # where a sweep is kept, which a device may take
        if number == 2:
            for function in (artifacts.read_bytes, artifacts.opened.__wrapped__):  # type: ignore[attr-defined]
                monkeypatch.setattr(function, "__defaults__", (1 << 24,))
        before, began_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        code, told = _ended(*(word.replace("FILE", name) for word in command))
        took_s = time.process_time() - began_s
        grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        print(f"{name} {' '.join(command)}: {took_s:.1f} s, {grown_mib:.0f} MiB: {told.strip()[:120]}")
        errors = [line for line in told.splitlines() if line.startswith("error: ")]
        assert (code, len(errors), "internal" in told) == (2, 1, False), (command, told)
        assert took_s < MOST_S, command
        assert grown_mib < MOST_MIB, command
