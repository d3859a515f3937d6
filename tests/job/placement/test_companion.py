"""The companion database: every plan against the intra-job scheduler's, torn and foreign files, recalibration."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ddltool.analyzers.job.placement.companion import (
    build,
    differing_capabilities,
    measured_capability,
    meta_of,
    plan_for,
)
from ddltool.analyzers.job.placement.problem import from_job
from ddltool.analyzers.job.placement.proposals import best_throughput
from ddltool.companion import Companion, CompanionDevice, CompanionMeta, is_companion, write_companion
from ddltool.errors import InputError
from ddltool.job import Constraints, DeviceOffer, Job
from tests.conftest import Cli

CAPABILITY = {"T4": 1.0, "P100": 2.4, "V100": 3.1}


def about(counts: tuple[int, ...] = (3, 4, 2), workers: int = 8, **changes: object) -> CompanionMeta:
    devices = [
        CompanionDevice(type=name, count=count, capability_per_s=rate)
        for (name, rate), count in zip(CAPABILITY.items(), counts, strict=True)
    ]
    return CompanionMeta(job="j", max_workers=workers, batch_size=4, devices=devices, **changes)  # type: ignore[arg-type]


def written(path: Path, meta: CompanionMeta | None = None) -> Path:
    meta = meta or about()
    plans, places = build(meta)
    write_companion(path, meta, plans, enumerate(places.tolist()))
    return path


@pytest.mark.parametrize("homogeneous", [False, True])
def test_every_vector_has_the_best_plan(tmp_path: Path, homogeneous: bool) -> None:
    meta = about(homogeneous=homogeneous)
    file = written(tmp_path / "plans.db", meta)
    with Companion(file) as base:
        assert base.meta == meta
        assert base.counts() == (4 * 5 * 3, 4 * 5 * 3)
        for vector in np.ndindex(4, 5, 3):
            held = dict(zip(CAPABILITY, (int(count) for count in vector), strict=True))
            plan = base.lookup(tuple(held.values()))
            assert plan is not None
            ways = [{name: count} for name, count in held.items()] if homogeneous else [held]
            assert plan.throughput == max(best_throughput(CAPABILITY, way, 8) for way in ways)
            if not any(held.values()):
                assert (plan.ests, plan.step_s) == ({}, 0.0)
                continue
            assert sum(devices * ests for rows in plan.ests.values() for devices, ests in rows) == 8
            assert all(plan.used[name] <= held[name] for name in plan.used)
            slowest = max(ests / CAPABILITY[name] for name, rows in plan.ests.items() for _, ests in rows)
            assert plan.step_s == pytest.approx(slowest)
            # No device could be left out: without the one of least room there is too little for all.
            rooms = sorted(int(CAPABILITY[name] * slowest + 1e-9) for name in plan.used for _ in range(plan.used[name]))
            assert sum(rooms) - rooms[0] < 8
            assert plan.step_s * plan.throughput == pytest.approx(8)


def test_limits_on_a_device_leave_vectors_without_a_plan(tmp_path: Path) -> None:
    job = Job(name="j", max_workers=5, devices=[DeviceOffer(type="T4", count=4, capability_per_s=1.0, max_ests=2)])
    meta = meta_of(from_job(job, {"T4": 1.0}))
    with Companion(written(tmp_path / "plans.db", meta)) as base:
        found = [base.lookup((count,)) for count in range(5)]
    assert [plan.throughput for plan in found if plan] == [0.0, 0.0, 0.0, 2.5, 2.5]
    priced = job.model_copy(update={"constraints": Constraints(max_devices=2)})
    with pytest.raises(InputError, match=r"constraints\.max_devices: is not kept in a companion database"):
        meta_of(from_job(priced, {"T4": 1.0}))


def test_large_inventories_are_filled_as_they_are_asked_for(tmp_path: Path) -> None:
    meta = about((200, 200, 200), workers=200)
    assert build(meta)[0] == []
    with Companion(written(tmp_path / "plans.db", meta)) as base:
        held = (17, 180, 3)
        assert base.lookup(held) is None
        plan = plan_for(base.meta, held)
        base.remember(held, plan)
        assert plan.throughput == best_throughput(CAPABILITY, dict(zip(CAPABILITY, held, strict=True)), 200)
    with Companion(tmp_path / "plans.db") as base:
        assert base.lookup(held) is not None
        assert base.lookup(held).throughput == plan.throughput  # type: ignore[union-attr]


def test_more_devices_than_workers_are_the_same_as_as_many(tmp_path: Path) -> None:
    job = Job(name="j", max_workers=3, devices=[DeviceOffer(type="T4", count=50, capability_per_s=1.0)])
    meta = meta_of(from_job(job, {"T4": 1.0}))
    assert meta.devices[0].count == 3
    assert meta.clamped({"T4": 40}) == (3,)
    with pytest.raises(InputError, match=r"devices\.T4: is 9, and plans are kept for at most 3"):
        about(workers=8).clamped({"T4": 9})
    with pytest.raises(InputError, match=r"devices\.A100: is not in the database"):
        meta.clamped({"A100": 1})


def test_recalibration_makes_plans_again_when_they_are_asked_for(tmp_path: Path) -> None:
    file = written(tmp_path / "plans.db")
    held = {"T4": 3, "P100": 4, "V100": 2}
    with Companion(file) as base:
        assert differing_capabilities(base.meta, {"V100": 3.0}, 0.1) == {}
        changed = differing_capabilities(base.meta, {"V100": 2.0, "T4": 1.05}, 0.1)
        assert changed == {"V100": 2.0}
        base.recalibrate(changed)
        counts = base.meta.clamped(held)
        assert base.lookup(counts) is None
        assert base.counts()[0] == 0
        base.remember(counts, plan_for(base.meta, counts))
    with Companion(file) as base:
        assert base.meta.generation == 2
        plan = base.lookup(counts)
        assert plan is not None
        assert plan.throughput == best_throughput({**CAPABILITY, "V100": 2.0}, held, 8)
        assert base.counts()[0] == 1


def test_capability_is_the_median_over_steps() -> None:
    rows = [("a", 8, 2.0), ("a", 8, 1.0), ("a", 8, 100.0), ("a", 0, 1.0), ("b", 4, 0.0), ("c", 4, 0.5)]
    frame = pd.DataFrame(rows, columns=["device", "batch", "compute_s"])
    assert measured_capability(frame, 4) == {"a": 1.0, "c": 2.0}


def look_at_everything(path: Path) -> None:
    with Companion(path) as base:
        for vector in np.ndindex(4, 5, 3):
            base.lookup([int(count) for count in vector])


def test_torn_foreign_and_newer_files_are_refused_in_one_line(tmp_path: Path) -> None:
    good = written(tmp_path / "plans.db").read_bytes()

    def refused(name: str, content: bytes) -> str:
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(InputError) as caught:
            look_at_everything(path)
        assert "\n" not in str(caught.value)
        assert path.read_bytes() == content  # looked at, not changed
        return str(caught.value)

    assert "is cut off" in refused("torn.db", good[: len(good) // 2])
    assert "is no SQLite file" in refused("empty.db", b"")
    assert "is no SQLite file" in refused("text.db", b'{"kind": "ddltool.companion"}')
    assert "cannot be used as a database" in refused("noise.db", good[:100] + os.urandom(len(good) - 100))
    for name, statement, message in (
        (
            "kind.db",
            "UPDATE meta SET document = replace(document, 'ddltool.companion', 'ddltool.plan')",
            "expected 'ddltool.companion'",
        ),
        (
            "version.db",
            "UPDATE meta SET document = replace(document, '\"schema_version\":1', '\"schema_version\":9')",
            "schema_version: is 9",
        ),
        ("meta.db", "UPDATE meta SET document = 'x'", "no readable meta document"),
        ("tables.db", "DROP TABLE vectors", "is no companion database"),
        # As a damaged page may have it: no text where the table promises one.
        (
            "null.db",
            "PRAGMA writable_schema = 1; UPDATE sqlite_master SET sql = replace(sql, ' NOT NULL', '') WHERE name = 'meta'"
            ";; UPDATE meta SET document = NULL; PRAGMA writable_schema = 1;"
            "UPDATE sqlite_master SET sql = replace(sql, 'TEXT', 'TEXT NOT NULL') WHERE name = 'meta'",
            "no readable meta document",
        ),
    ):
        path = tmp_path / name
        path.write_bytes(good)
        for part in statement.split(";;"):  # each sees the tables as the one before left them
            base = sqlite3.connect(path)
            base.executescript(part)
            base.commit()
            base.close()
        assert message in refused(name, path.read_bytes())


def test_a_failed_write_leaves_the_old_database(tmp_path: Path) -> None:
    file = written(tmp_path / "plans.db")
    before = file.read_bytes()

    def broken():  # type: ignore[no-untyped-def]
        yield (0, 0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_companion(file, about(), build(about())[0], broken())
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["plans.db"]
    with pytest.raises(InputError, match="cannot be written"):
        write_companion(tmp_path / "no" / "plans.db", about(), [], [])


JOB = """
name: mixed
max_workers: 8
batch_size: 4
devices:
  - {type: V100, count: 4, capability_per_s: 3.1}
  - {type: T4, count: 4, capability_per_s: 1.0}
"""


def test_the_command_makes_looks_up_and_corrects(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    base = tmp_path / "plans.db"
    made = cli("companion", tmp_path / "job.yaml", "-o", base, "--json").done()
    assert made.document["built"]["vectors"] == 25
    assert is_companion(base)
    held = {"V100": 2, "T4": 1}
    shown = cli("companion", base, "--lookup", "V100=2,T4=1", "--free", "V100=2,T4=3", "--json").document
    assert shown["throughput"] == best_throughput({"V100": 3.1, "T4": 1.0}, held, 8)
    assert shown["proposals"][0]["device_type"] == "V100"
    telemetry = tmp_path / "telemetry.jsonl"
    row = {
        "kind": "ddltool.telemetry", "schema_version": 1, "rank": 0, "world_size": 1, "num_nodes": 1, "device": "V100",
        "batch": 8, "total_batch": 8, "wait_s": 0.0, "sync_s": 0.0, "step_s": 1.0, "memory_bytes": 0.0,
    }  # fmt: skip
    lines = [json.dumps({**row, "step": step, "compute_s": 1.0}) for step in range(5)]
    telemetry.write_text("\n".join(lines) + "\n")
    corrected = cli("companion", base, "--measured", telemetry, "--lookup", "V100=2,T4=1", "--json").document
    assert corrected["recalibrated"] == {"V100": {"measured": 2.0, "predicted": 3.1, "changed": True}}
    assert corrected["throughput"] == best_throughput({"V100": 2.0, "T4": 1.0}, held, 8)
    again = cli("companion", base, "--measured", telemetry, "--json").document
    assert again["recalibrated"]["V100"]["changed"] is False
    assert max(len(line) for line in cli("companion", base).out.splitlines()) <= 80
    assert "8 logical workers" in cli("companion", base).out


def test_the_command_refuses_in_one_line(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    base = tmp_path / "plans.db"
    assert cli("companion", tmp_path / "job.yaml", "-o", base).code == 0
    (tmp_path / "torn.db").write_bytes(base.read_bytes()[:5000])
    (tmp_path / "net.yaml").write_text(JOB + "network: goodput.json\n")
    for name in ("empty.db", "goodput.json"):
        (tmp_path / name).touch()
    for arguments, message in (
        ((tmp_path / "job.yaml",), "--output: is missing"),
        ((tmp_path / "net.yaml", "-o", tmp_path / "x.db"), "net.yaml:network: is not kept in a companion database"),
        ((base, "-o", tmp_path / "x.db"), "--output: is for making a database"),
        ((base, "--lookup", "V100"), "--lookup: 'V100' is not TYPE=N"),
        ((base, "--lookup", "V100=-1"), "--lookup: 'V100=-1' is not TYPE=N"),
        ((base, "--lookup", "V100=1,V100=2"), "--lookup: gives V100 twice"),
        ((base, "--lookup", "A100=1"), "devices.A100: is not in the database"),
        ((base, "--lookup", "V100=5"), "is 5, and plans are kept for at most 4"),
        ((base, "--free", "V100=1"), "--free: needs --lookup"),
        ((base, "--lookup", "V100=0"), "cannot run on V100=0"),
        ((tmp_path / "torn.db",), "is cut off"),
        ((tmp_path / "empty.db",), "is no SQLite file"),
        ((tmp_path / "none.db",), "no such file"),
    ):
        result = cli("companion", *arguments)
        assert message in result.error_line, arguments
        assert result.code in (2, 3)


def test_vectors_are_numbered_in_mixed_base() -> None:
    meta, random = about(), Random(0)
    for _ in range(50):
        vector = tuple(random.randint(0, device.count) for device in meta.devices)
        assert meta.key(vector) == np.ravel_multi_index(vector, [device.count + 1 for device in meta.devices])


def test_two_that_recalibrate_at_once_both_count(tmp_path: Path) -> None:
    """Each opened the file before the other wrote; plans made with the old capabilities do not come back."""
    path = written(tmp_path / "plans.db")
    names = [device.type for device in about().devices]
    with Companion(path) as one, Companion(path) as other:
        one.recalibrate({names[0]: 10.0})
        counts = one.meta.clamped({names[0]: 1, names[1]: 1})
        stale = plan_for(one.meta, counts)
        other.recalibrate({names[1]: 5.0})
        one.remember(counts, stale)
        assert other.lookup(counts) is None
        assert other.meta.generation == 3
    with Companion(path) as base:
        assert [device.capability_per_s for device in base.meta.devices][:2] == [10.0, 5.0]
        assert base.lookup(counts) is None


CORRECTS = """
import sys
from pathlib import Path
from ddltool.companion import Companion
path, name, first = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
print("ready", flush=True)
sys.stdin.read(1)
for number in range(40):
    with Companion(path) as base:
        base.recalibrate({name: first + number})
        if next(device.capability_per_s for device in base.meta.devices if device.type == name) != first + number:
            sys.exit("lost")
"""


def test_two_processes_that_correct_it_lose_nothing(tmp_path: Path) -> None:
    """Eighty corrections, forty of each process: each type has its last, and every one of them counts."""
    path, firsts = written(tmp_path / "plans.db"), {"T4": 1.5, "P100": 100.5}
    with contextlib.ExitStack() as stack:
        both = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", CORRECTS, path, name, str(first)],
                    **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True},
                )
            )
            for name, first in firsts.items()
        ]
        assert [one.stdout and one.stdout.readline() for one in both] == ["ready\n"] * 2
        for one in both:
            assert one.stdin is not None
            one.stdin.write("x")
            one.stdin.flush()
        for one in both:
            one.communicate(timeout=100)
    assert [one.returncode for one in both] == [0, 0]
    with Companion(path) as base:
        found = {device.type: device.capability_per_s for device in base.meta.devices}
        assert found == {"T4": 40.5, "P100": 139.5, "V100": CAPABILITY["V100"]}
        assert base.meta.generation == 81


@pytest.mark.parametrize(
    "change",
    [
        *({"ests": value} for value in (None, [1], {"V100": 3}, {"H100": [[1, 8]]}, {"V100": [[-1, -8]]}, {})),
        *({"throughput": value} for value in ("abc", -5.0, float("inf"))),
        *({"step_s": value} for value in ("x", float("inf"), 0.0)),
    ],
    ids=str,
)
def test_a_plan_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = written(tmp_path / "plans.db")
    plan = {"throughput": 3.1, "step_s": 8 / 3.1, "ests": {"V100": [[1, 8]]}}
    with sqlite3.connect(path) as base:
        base.execute("UPDATE plans SET document = ?", (json.dumps(plan | change),))
    base.close()
    with Companion(path) as companion_base, pytest.raises(InputError, match=r"plans\.db: cannot be used as a database"):
        companion_base.lookup([device.count for device in companion_base.meta.devices])


def test_a_locked_database_is_to_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "plans.db")
    real = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: real(*a, **{**k, "timeout": 0.05}))
    with Companion(path) as base:
        other = real(path)
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(InputError, match="is locked.*try again when the process that writes it is done"):
            base.recalibrate({base.meta.devices[0].type: 2.0})
        other.close()


def test_a_train_job_gets_the_best_size_of_one_type(cli: Any, tmp_path: Path) -> None:
    """By brute force over types and whole nodes; kubectl's merge patch, and exit 3 where nothing runs."""
    file, patch = written(tmp_path / "plans.db", about((3, 8, 3))), tmp_path / "patch.json"
    asked = ("companion", file, "--lookup", "T4=3,P100=7,V100=3", "--patch", patch, "--per-node", 2, "--json")
    made = cli(*asked).document["patch"]
    assert made == json.loads(patch.read_text())
    # Of 8 workers 2 x 3 P100 run at most 2 each, 1 x 2 V100 4 each, 6 of 7 P100 on whole nodes.
    rates = {
        (name, count): 8 / (math.ceil(8 / count) / CAPABILITY[name])
        for name, most in (("T4", 3), ("P100", 7), ("V100", 3))
        for count in range(1, most + 1)
        if count <= 2 or count % 2 == 0
    }
    name, count = max(rates, key=lambda key: (rates[key], -key[1]))
    trainer = made["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (count // 2, 2)
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "2"}
    notes = made["metadata"]["annotations"]
    assert notes["ddltool/device-type"] == name
    assert sum(map(int, notes["ddltool/local-batch-sizes"].split(","))) == 8 * 4
    assert "needs --lookup" in cli("companion", file, "--patch", patch).error_line
    for held in ("T4=0", "V100=0"):
        assert cli("companion", file, "--lookup", held, "--patch", patch).code == 3
