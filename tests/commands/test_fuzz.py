"""Every artifact with a value changed, left out, doubled or of another kind: answered, or refused in one line.

``DDLTOOL_FUZZ_SEED=1 DDLTOOL_FUZZ_SECONDS=600 pytest -m slow tests/commands/test_fuzz.py`` searches on; its counts are by kind.
"""

from __future__ import annotations

import copy
import gzip
import json
import os
import random
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ddltool.commands.main import run
from tests.helpers.report_artifacts import artifacts_in

pytestmark = pytest.mark.slow
# Of all files together.
SECONDS = float(os.environ.get("DDLTOOL_FUZZ_SECONDS", "90"))
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**53, 2**63 - 1, 10**30, 0.5, -0.0, 1e-320, 1e308, -1e300),
    *("", "0", "nan", "V100", "a\0b", "\ud800", "\u202e", "x" * 10_000, "../../x", "os:abort", "1e999"),
    *([], {}, [[]], [{}], {"": {}}, [1, "a"], {"kind": "ddltool.plan"}),
)
COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "plan": (
        ("emit", "FILE", "-o", "OUT"),
        ("gate", "FILE", "--baseline", "FILE"),
        ("verify", "FILE", "telemetry.jsonl"),
    ),
    "telemetry": (("fit", "FILE", "-o", "OUT"), ("verify", "plan-est.json", "FILE"), ("barrier", "FILE")),
    "agent": (("fit", "FILE", "-o", "OUT"),),
    "profile": (("fit", "FILE", "-o", "OUT"),),
    "sync": (("barrier", "FILE"),),
    "goodput": (("gate", "FILE", "--metrics"), ("plan", "tuned.yaml", "--strategy", "goodput")),
    "toy": (("trace", "FILE", "--bandwidth", "10Gbit", "--device", "V100"),),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all values within a document, its own left out."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    return [found for key, inner in pairs for found in [(*path, key), *places(inner, (*path, key))]]


def changed(document: Any, draw: random.Random) -> Any:
    """Return a document with one to three changes."""
    document = copy.deepcopy(document)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        every = places(document)
        if not every:
            return document
        *way, last = draw.choice(every)
        inner = document
        for key in way:
            inner = inner[key]
        kind = draw.randrange(5)
        if kind == 0:
            del inner[last]
        elif kind == 1 and isinstance(inner, list):
            inner += [copy.deepcopy(inner[last])] * draw.choice([1, 5])
        elif kind == 2 and isinstance(inner, dict):
            inner[f"{last}x"] = inner.pop(last)
        elif kind == 3 and isinstance(inner[last], (int, float)):
            inner[last] = inner[last] * draw.choice([-1, 0, 1e-9, 1e9, 1e300, 1.5]) + draw.choice([0, 1])
        else:
            inner[last] = copy.deepcopy(draw.choice(ODD))
    return document


def variant(path: Path, draw: random.Random) -> bytes:
    """Return the bytes of a file with something wrong in it."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if draw.random() < 0.1:
        at = draw.randrange(len(raw))
        raw = (
            raw[:at]
            + draw.choice([b"", bytes([draw.randrange(256)]), b"\xff\xfe", raw[at : at + 50] * 2])
            + raw[at + 1 :]
        )
    elif path.suffix == ".csv":
        rows = [line.split(",") for line in raw.decode().splitlines()]
        row = draw.choice(rows)
        row[draw.randrange(len(row))] = str(draw.choice(ODD)).replace("\ud800", "?").replace("\0", "")
        raw = "\n".join(",".join(row) for row in rows).encode()
    elif ".jsonl" in path.suffixes:
        lines = raw.splitlines()
        at = draw.randrange(len(lines))
        lines[at] = json.dumps(changed(json.loads(lines[at]), draw)).encode()
        raw = b"\n".join(lines) + b"\n"
    else:
        raw = json.dumps(changed(json.loads(raw), draw)).encode()
    return gzip.compress(raw, 1) if path.suffix == ".gz" else raw


def test_what_is_wrong_with_a_file_is_one_line(
    every_artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(every_artifact, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    files = [path for path in artifacts_in(tmp_path) if path.stat().st_size < 2_000_000]
    draw, counts, limit = (
        random.Random(int(os.environ.get("DDLTOOL_FUZZ_SEED", "0"))),
        Counter[str](),
        time.monotonic() + SECONDS,
    )
    while time.monotonic() < limit:
        path = draw.choice(files)
        broken = tmp_path / f"broken{''.join(path.suffixes)}"
        broken.write_bytes(variant(path, draw))
        kind = path.name.partition(".")[0].partition("-")[0]
        for command in (("report", "FILE", "-o", "OUT"), *COMMANDS.get(kind, (("gate", "FILE", "--metrics"),))):
            names = {"FILE": str(broken), "OUT": str(tmp_path / ("out.html" if command[0] == "report" else "out.json"))}
            arguments = [names.get(word, word) for word in command]
            kept = f"{arguments} on a variant of {path.name}: {broken.read_bytes()[:2000]!r}"
            began = time.monotonic()
            try:
                code = run(arguments)
            except BaseException as error:  # whatever comes through is a traceback for the user
                pytest.fail(f"{type(error).__name__}: {error}; {kept}")
            told = capsys.readouterr().err
            assert code in (0, 1, 2, 3), kept
            errors = [line for line in told.splitlines() if line.startswith("error: ")]
            assert len(errors) == (code in (2, 3)) or code == 1, f"{told}; {kept}"
            assert time.monotonic() - began < 60, kept
            counts[f"{kind}: {'read' if code in (0, 1) else 'refused'}"] += 1
    with capsys.disabled():
        print("", *(f"{count:6,} {name}" for name, count in sorted(counts.items())), sep="\n")
    assert sum(counts.values()) > 20
