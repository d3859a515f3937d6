"""Files that nobody would make by accident: each ends with one line, in bounded time and memory."""

from __future__ import annotations

import gzip
import os
import sqlite3
import threading
from pathlib import Path

import pytest

from ddltool import artifacts
from ddltool.analyzers.answers.emitting.enforcement import to_enforcement
from ddltool.artifacts import check_writable, opened, read_document, read_lines, read_text, read_toml, save
from ddltool.commands.main import run
from ddltool.companion import Companion, CompanionDevice, CompanionMeta, CompanionPlan, write_companion
from ddltool.errors import InputError
from ddltool.job import is_code, read_job
from ddltool.plans import Assignment, Plan

JOB = "name: a\nmax_workers: 4\ndevices: [{type: V100, count: 4}]\n"


def test_a_file_is_read_up_to_its_limit_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts.read_bytes, "__defaults__", (1000,))
    for size, packed in ((1000, False), (1000, True), (1001, False), (1001, True)):
        path = tmp_path / ("a.json.gz" if packed else "a.json")
        text = b"x" * size
        path.write_bytes(gzip.compress(text) if packed else text)
        if size == 1000:
            assert read_text(path) == text.decode()
        else:
            with pytest.raises(InputError, match=r"holds more than 1000 B; give a smaller file"):
                read_text(path)


def test_a_device_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts.read_bytes, "__defaults__", (1 << 20,))
    with pytest.raises(InputError, match="/dev/zero: holds more than"):
        read_text("/dev/zero")


def test_gzip_is_told_by_its_bytes_too(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(gzip.compress(b'{"a": 1}'))
    assert read_document(tmp_path / "a.json") == {"a": 1}


def test_a_pipe_is_read_and_one_without_a_writer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pipe.json"
    os.mkfifo(path)
    monkeypatch.setattr(artifacts, "_PIPE_TIMEOUT_S", 0.05)
    with pytest.raises(
        InputError, match=r"pipe.json: cannot be read \(nothing was written to this pipe within 0.05 s\)"
    ):
        read_text(path)
    monkeypatch.setattr(artifacts, "_PIPE_TIMEOUT_S", 30.0)
    writer = threading.Thread(target=path.write_text, args=('{"a": 1}\n',))
    writer.start()
    assert list(read_lines(path)) == [(1, {"a": 1})]
    writer.join()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: " + "[" * 200_000, "nested too deeply"),
        ("- " * 200_000, "nested too deeply"),
        ("a: &a [*a]", "an alias within what it names"),
        (
            "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}' if i else '1'] * 10)}]\n" for i in range(8)),
            "more than 1,000,000",
        ),
        (
            "a0: &a0 {k: 1}\n"
            + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 9)),
            "more than 1,000,000 values",
        ),
    ],
    ids=["flow", "block", "cycle", "aliases", "merges"],
)
def test_yaml_that_grows(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=problem):
        read_document(tmp_path / "a.yaml")


def test_an_alias_is_fine(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: &a {x: 1}\nb: {<<: *a, y: 2}\nc: [*a, *a]\n", encoding="utf-8")
    assert read_document(tmp_path / "a.yaml") == {"a": {"x": 1}, "b": {"x": 1, "y": 2}, "c": [{"x": 1}] * 2}


def test_a_key_at_the_end_of_many_is_found_at_once(tmp_path: Path) -> None:
    """Quadratic time would be a minute."""
    keys = [f'"k{i}": 1' for i in range(100_000)]
    (tmp_path / "a.json").write_text("{" + ", ".join([*keys, '"k99999": 2']) + "}", encoding="utf-8")
    with pytest.raises(InputError, match="gives 'k99999' twice"):
        read_document(tmp_path / "a.json")


def test_numbers_of_a_toml_file(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("x = " + "1" * 5000, encoding="utf-8")
    with pytest.raises(InputError, match="is not valid TOML"):
        read_toml(tmp_path / "a.toml")


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path / "loop", tmp_path / "a\0b"):
        with pytest.raises(InputError, match="cannot be written"):
            check_writable(path)
        with pytest.raises(InputError, match="cannot be written"):
            save({"a": 1}, path)
        with pytest.raises(InputError), opened(path):
            pass


def test_code_in_a_job_runs_only_where_it_is_allowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(
        f"open({str(ran)!r}, 'w')\nimport torch\nf = lambda: (torch.nn.Linear(2, 2), torch.ones(1, 2))\n"
    )
    job = tmp_path / "job.yaml"
    job.write_text(f"{JOB}model: {tmp_path / 'evil.py'}:f\n")
    assert run(["plan", str(job)]) == 2
    assert "names code" in (error := capsys.readouterr().err)
    assert error.count("\n") == 1
    assert not ran.exists()
    assert run(["plan", str(job), "--strategy", "est", "--allow-code"]) == 0
    assert ran.exists()
    assert [is_code(name) for name in ("zoo:lenet", "timm:a", "transformers:a", "g.json", "os:abort")] == [
        False
    ] * 4 + [True]


def test_more_processes_than_any_cluster_has() -> None:
    row = Assignment(device_type="A", devices=10**12, ests_per_device=1, local_batch_size=1)
    plan = Plan(
        **{"job": "a", "strategy": "bsp", "max_workers": 4, "batch_size": 1, "iteration_s": 1.0, "throughput": 1.0},
        **{"assignments": [row], "est_count": 4, "waste": 0.0, "overload_factor": 1.0, "status": "optimal"},
        **{"gap": 0.0, "solve_seconds": 0.0},
    )
    with pytest.raises(InputError, match="at most 100,000 processes"):
        to_enforcement(plan)


def test_lines_of_devices(tmp_path: Path) -> None:
    rows = "".join(f"- {{type: d{i}, count: 1}}\n" for i in range(1001))
    (tmp_path / "job.yaml").write_text(f"name: a\nmax_workers: 4\ndevices:\n{rows}", encoding="utf-8")
    with pytest.raises(InputError, match="devices: has 1001 entries; give at most 1000"):
        read_job(tmp_path / "job.yaml")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--latency", "10"], "--latency: '10' has no unit; write 10us or 10ms"),
        (["--latency", "1e300h"], "--latency: '1e300h' is longer than"),
        (["--latency", "2h"], "is no latency of a network"),
        (["--bandwidth", "1e-320Gbit"], "is not a usable bandwidth"),
    ],
)
def test_quantities_that_nobody_means(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "zoo:lenet", "--device", "V100", "--bandwidth", "10Gbit", *arguments]) == 2
    assert problem in capsys.readouterr().err


@pytest.fixture
def database(tmp_path: Path) -> Path:
    devices = [CompanionDevice(type="V100", count=1, capability_per_s=2.0)]
    meta = CompanionMeta(job="a", max_workers=4, batch_size=1, devices=devices)
    write_companion(
        tmp_path / "a.db", meta, [CompanionPlan(throughput=2.0, step_s=2.0, ests={"V100": [(1, 4)]})], [(1, 0)]
    )
    return tmp_path / "a.db"


@pytest.mark.parametrize(
    ("sql", "problem"),
    [
        ("CREATE TRIGGER t AFTER INSERT ON plans BEGIN DELETE FROM meta; END", "is no companion database"),
        (
            "ALTER TABLE plans RENAME TO p; CREATE VIEW plans AS WITH RECURSIVE"
            " c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT x AS id, 'a' AS document FROM c",
            "is no companion database",
        ),
        (
            """UPDATE plans SET document = replace(document, '"step_s":2.0', '"step_s":0.2')""",
            "does not fit its devices",
        ),
        ("""UPDATE plans SET document = replace(document, '2.0', '1.0')""", "does not fit its devices"),
        ("UPDATE plans SET document = zeroblob(100000000)", "cannot be used as a database"),
    ],
)
def test_databases_of_others(database: Path, sql: str, problem: str) -> None:
    with Companion(database) as base:
        assert base.lookup([1]) is not None
    with sqlite3.connect(database) as base:
        base.executescript(sql)
    base.close()
    with pytest.raises(InputError, match=problem), Companion(database) as opened_base:
        opened_base.lookup([1])


def test_a_query_has_a_limit(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddltool.companion._QUERY_S", -1.0)
    with Companion(database) as base, pytest.raises(sqlite3.OperationalError, match="interrupted"):
        base._base.execute(
            "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT max(x) FROM c"
        ).fetchone()
