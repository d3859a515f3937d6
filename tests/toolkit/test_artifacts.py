"""Documents: refused with one line that says where and what; written whole or not at all.
Files that nobody would make by accident: each ends with one line, in bounded time and memory.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool import artifacts
from ddltool.artifacts import (
    check_writable,
    load,
    opened,
    parse,
    read_document,
    read_lines,
    read_text,
    read_toml,
    save,
    to_json,
    write_text,
)
from ddltool.commands.main import run
from ddltool.commands.show import MODELS, schema_of
from ddltool.companion import Companion, CompanionDevice, CompanionMeta, CompanionPlan, write_companion
from ddltool.errors import InputError, did_you_mean
from ddltool.job import Job, is_code, read_job
from ddltool.profiles import read_profile, write_profile
from tests.conftest import Cli, write

JOB = "kind: ddltool.job\nname: j\nmax_workers: 4\ndevices:\n  - {type: V100, count: 2, capability_per_s: 3}\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("empty.json", "", "empty.json: is empty"),
        ("cut.json", '{"kind": "ddltool.plan", "job"', r"cut.json:line 1 column 31: is not valid JSON"),
        ("list.json", "[1]", "list.json: holds a list, not a mapping"),
        ("deep.json", "[" * 100_000, "deep.json: is nested too deeply"),
        ("bad.yaml", "a: [1, 2\nb: 3", r"bad.yaml:line 2 column \d+: is not valid YAML"),
        ("tagged.yaml", "a: !!python/object/apply:os.system [ls]", "tagged.yaml:line 1 column 4: is not valid YAML"),
        ("cut.json.gz", "not gzip", "cut.json.gz: is not a whole gzip file"),
    ],
)
def test_unreadable_documents(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        read_document(tmp_path / name)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            {"model_type": "llama", "hidden_size": 8},
            "c.json: is the configuration of a model; write transformers:c.json",
        ),
        ({"_class_name": "UNet2DModel"}, "c.json: is the configuration of a model; write diffusers:c.json"),
        ({"kind": "ddltool.command_plan", "schema_version": 1}, "c.json:kind: is of a command"),
    ],
)
def test_what_is_no_job_says_what_to_do_with_it(document: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(document, Job, "c.json")


def test_missing_binary_and_truncated_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nothing.json: no such file; give the path of an existing file"):
        read_document(tmp_path / "nothing.json")
    with pytest.raises(InputError, match="is a folder"):
        read_document(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not UTF-8 text"):
        read_document(tmp_path / "binary.json")
    (tmp_path / "half.json.gz").write_bytes(gzip.compress(b'{"kind": "x"}' * 100)[:-10])
    with pytest.raises(InputError, match="is not a whole gzip file"):
        read_document(tmp_path / "half.json.gz")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("kind: ddltool.job", "kind: ddltool.plan"), "kind: is 'ddltool.plan'; expected 'ddltool.job'"),
        (("name: j", "schema_version: 2\nname: j"), "schema_version: is 2; this ddltool reads version 1"),
        (("name: j", "schema_version: true\nname: j"), "schema_version: is True"),
        (("max_workers: 4\n", ""), "max_workers: is missing; it is required"),
        (("max_workers", "max_worker"), "max_worker: unknown field 'max_worker'; did you mean \"max_workers\""),
        (("count: 2", "cuont: 2"), r"devices\[0\].cuont: unknown field 'cuont'; did you mean \"count\""),
        (("devices:\n  - {type: V100, count: 2, capability_per_s: 3}", "x: 1"), "names no devices|unknown field 'x'"),
        (("devices:\n  -", "devices:\n  - {type: V100}\n  -"), "device type 'V100' stands twice"),
        (("count: 2,", "count: 2, profile: a.csv,"), "V100 has both capability_per_s and profile"),
    ],
)
def test_refused_jobs(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    assert change[0] in JOB
    (tmp_path / "job.yaml").write_text(JOB.replace(*change))
    with pytest.raises(InputError, match=message) as caught:
        read_job(tmp_path / "job.yaml")
    assert str(caught.value).startswith(str(tmp_path / "job.yaml"))
    assert "\n" not in str(caught.value)


def test_a_cluster_gives_the_counts(tmp_path: Path) -> None:
    first = "- {name: a, count: 3, devices: {type: V100, count: 8}}"
    nodes = ("nodes:", first, "- {name: b, devices: {type: T4}}", "- {name: c, devices: {type: V100}}")
    write(tmp_path / "cluster.yaml", *nodes)
    (tmp_path / "job.yaml").write_text(
        "name: j\nmax_workers: 4\ncluster: cluster.yaml\ndevices:\n  - {type: V100, capability_per_s: 3}\n"
    )
    job = read_job(tmp_path / "job.yaml")
    assert [(offer.type, offer.count) for offer in job.devices] == [("V100", 25)]
    (tmp_path / "job.yaml").write_text("name: j\nmax_workers: 4\ncluster: cluster.yaml\n")
    assert [(offer.type, offer.count) for offer in read_job(tmp_path / "job.yaml").devices] == [("V100", 25), ("T4", 1)]
    (tmp_path / "job.yaml").write_text("name: j\nmax_workers: 4\ncluster: cluster.yaml\ndevices: [{type: A100}]\n")
    with pytest.raises(InputError, match="'A100' is not in cluster.yaml; types there: T4, V100"):
        read_job(tmp_path / "job.yaml")


@st.composite
def profiles(draw: st.DrawFn) -> pd.DataFrame:
    count = draw(st.integers(1, 6))

    def column(values: st.SearchStrategy[object]) -> list[object]:
        return draw(st.lists(values, min_size=count, max_size=count))

    return pd.DataFrame(
        {
            "device": column(st.from_regex("[A-Za-z][A-Za-z0-9 ,]{0,8}[A-Za-z]", fullmatch=True)),
            "num_nodes": column(st.integers(1, 4)),
            "num_replicas": column(st.integers(4, 64)),
            "local_batch_size": column(st.integers(1, 4096)),
            "step_time_s": column(st.floats(1e-9, 1e6)),
            "sync_time_s": column(st.floats(0, 1e6)),
            "peak_memory_bytes": column(st.floats(0, 1e15)),
            "step_time_spread_s": column(st.floats(0, 1e6)),
            "repeats": column(st.integers(1, 99)),
        }
    )


def test_a_device_may_be_called_na(tmp_path: Path) -> None:
    header = "device,num_nodes,num_replicas,local_batch_size,step_time_s,sync_time_s,peak_memory_bytes"
    (tmp_path / "p.csv").write_text(f"{header}\nNA,1,1,8,0.1,0,1\nnan,1,1,8,0.1,0,1\n")
    assert read_profile(tmp_path / "p.csv")["device"].tolist() == ["NA", "nan"]


@given(profiles())
@settings(max_examples=25)
def test_profiles_round_trip_through_csv(tmp_path_factory: pytest.TempPathFactory, frame: pd.DataFrame) -> None:
    folder = tmp_path_factory.mktemp("csv")
    for name in ("p.csv", "p.csv.gz"):
        write_profile(frame, folder / name)
        again = read_profile(folder / name)
        pd.testing.assert_frame_equal(again[list(frame.columns)], frame, check_dtype=False, check_exact=True)


numbers = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
values = st.none() | st.booleans() | numbers | st.text() | st.lists(numbers) | st.dictionaries(st.text(), numbers)


@given(st.dictionaries(st.text(), values))
@settings(max_examples=25)
def test_every_number_and_text_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("round") / "a.json"
    path.write_text(to_json(document), encoding="utf-8")
    assert read_document(path) == document


def test_round_trip(every_artifact: Path, tmp_path: Path) -> None:
    kinds = set()
    for path in every_artifact.glob("*.json"):
        kind = read_document(path)["kind"]
        model = MODELS[kind.removeprefix("ddltool.")]
        artifact = load(path, model)
        save(artifact, tmp_path / path.name)
        assert load(tmp_path / path.name, model) == artifact
        assert to_json(artifact) == (tmp_path / path.name).read_text()
        kinds.add(kind)
    assert len(kinds) > 12


def test_compressed_files_repeat_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "a.gz", "same")
    first = (tmp_path / "a.gz").read_bytes()
    monkeypatch.setattr(time, "time", lambda: 2e9)  # which gzip would write down
    write_text(tmp_path / "a.gz", "same")
    assert (tmp_path / "a.gz").read_bytes() == first


def test_nan_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range float values"):
        save({"x": float("nan")}, tmp_path / "x.json")
    assert list(tmp_path.iterdir()) == []


def test_unwritable_places(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot be written \(No such file or directory\)"):
        write_text(tmp_path / "no" / "file.json", "x")
    with pytest.raises(InputError, match="is a folder; give a file name"):
        write_text(tmp_path, "x")
    with pytest.raises(InputError, match="cannot be written"):
        check_writable("/proc/file.json")
    with pytest.raises(InputError, match="no folder"):
        check_writable(tmp_path / "no" / "file.json")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.json"
    write_text(target, "old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device"):
        write_text(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_two_writers_that_are_killed_leave_the_last_whole_file(tmp_path: Path) -> None:
    """Whenever somebody looks, the file is one that a writer has written to its end, and a new one comes after it."""
    target = tmp_path / "a.txt"
    code = (
        "import sys\nfrom ddltool.artifacts import write_text\nn = 0\n"
        "while True:\n    n += 1\n    write_text(sys.argv[1], f'{sys.argv[2]}{n:07}' * 250_000)\n    print(n, flush=True)\n"
    )
    seen: dict[str, list[int]] = {"a": [], "b": []}
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(
                subprocess.Popen([sys.executable, "-c", code, str(target), name], stdout=subprocess.PIPE)
            )
            for name in seen
        ]
        for turn in range(8):
            for child in writers:
                assert child.stdout is not None
                child.stdout.readline()
            if turn == 7:
                for child in writers:
                    child.kill()
                    child.wait()
            text = target.read_text()
            assert text == text[:8] * 250_000
            seen[text[0]].append(int(text[1:8]))
    assert all(numbers == sorted(numbers) for numbers in seen.values())


def test_links_and_modes_are_kept(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    write_text(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert real.stat().st_mode & 0o777 == 0o640


def test_every_kind_has_a_schema() -> None:
    for kind in MODELS:
        assert schema_of(kind)["properties"]["schema_version"]
        assert schema_of(f"ddltool.{kind}") == schema_of(kind)
    with pytest.raises(InputError, match="unknown kind 'plann'; did you mean \"plan\""):
        schema_of("plann")


def test_suggestions() -> None:
    assert did_you_mean("xyz", ["b", "a"]) == "known: a, b"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"kind": "ddltool.job", "name": "a", "name": "b"}', "a.json: gives 'name' twice"),
        ("a.yaml", "kind: ddltool.job\nname: a\ndevices: []\nname: b\n", "a.yaml:line 4: gives 'name' twice"),
        ("b.yaml", "name: a\ndevices:\n  - {type: T4, type: V100}\n", "b.yaml:line 3: gives 'type' twice"),
    ],
)
def test_a_key_that_stands_twice_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        read_document(tmp_path / name)
    assert message in str(caught.value)


def test_a_column_that_stands_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("device,num_nodes,device\nV,1,T\n", encoding="utf-8")
    with pytest.raises(InputError, match="a.csv:line 1: has the column 'device' twice; keep one of the two"):
        read_profile(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("1.0e308", 1e308), ("-2E4", -2e4), (".5e1", 5.0), ("'1e-3'", "1e-3"), ("e5", "e5"), ("12", 12)],
)
def test_yaml_numbers_with_an_exponent_are_numbers(tmp_path: Path, text: str, value: object) -> None:
    (tmp_path / "a.yaml").write_text(f"a: {text}\n", encoding="utf-8")
    found = read_document(tmp_path / "a.yaml")["a"]
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_an_integer_beyond_64_bits_names_its_field(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    for number in (2**63 - 1, -(2**63)):
        path.write_text(f'{{"a": {number}}}', encoding="utf-8")
        assert read_document(path)["a"] == number
    for digits, shown in (
        (str(2**63), r"9\.223372036854776e\+18"),
        ("1" + "0" * 400, "inf"),
    ):
        path.write_text(f'{{"name": "a", "max_workers": {digits}, "devices": []}}', encoding="utf-8")
        with pytest.raises(InputError, match=rf"{name}:max_workers: is {shown}; give a whole number"):
            load(path, Job)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("? [1, 2]\n: 3", "line 1 column 3: is not valid YAML (a key is a collection)"),
        ("? {a: 1}\n: 3", "line 1 column 3: is not valid YAML (a key is a collection)"),
        ("{[1]: 2}", "line 1 column 2: is not valid YAML (a key is a collection)"),
        ("a: {? {} : 1}", "line 1 column 7: is not valid YAML (a key is a collection)"),
        ("1: a", "line 1 column 1: is not valid YAML (a key is no text)"),
        ("~: a", "line 1 column 1: is not valid YAML (a key is no text)"),
        ('a: !!int ""', "line 1 column 4: is not valid YAML ('' is no whole number)"),
        ("a: !!int x", "line 1 column 4: is not valid YAML ('x' is no whole number)"),
        ('a:\n  b: !!float ""', "line 2 column 6: is not valid YAML ('' is no number)"),
        ("a: !!float x", "line 1 column 4: is not valid YAML ('x' is no number)"),
        ("a: !!bool x", "line 1 column 4: is not valid YAML ('x' is no true or false)"),
        ("a: !!timestamp x", "line 1 column 4: is not valid YAML (the tag !!timestamp does not go here)"),
        ("a: !!set {b, c}", "line 1 column 4: is not valid YAML (the tag !!set does not go here)"),
        ("a: !!map [1]", "line 1 column 4: is not valid YAML (the tag !!map does not go here)"),
        ("a: !!seq {b: 1}", "line 1 column 4: is not valid YAML (the tag !!seq does not go here)"),
        ("a: !!omap [b: 1]", "line 1 column 4: is not valid YAML (the tag !!omap does not go here)"),
        ("a: !!binary eA==", "line 1 column 4: is not valid YAML (the tag !!binary does not go here)"),
        ("a: !!str [1]", "line 1 column 4: is not valid YAML (the tag !!str does not go here)"),
        ("a: {<<: 1}", "line 1 column 9: is not valid YAML (expected a mapping"),
        ("a: =", "line 1 column 4: is not valid YAML (the tag !!value does not go here)"),
    ],
)
def test_yaml_that_is_no_plain_value(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=f"^{re.escape(f'{tmp_path}/a.yaml:{problem}')}"):
        read_document(tmp_path / "a.yaml")


@pytest.mark.parametrize("command", ["plan", "simulate advise", "devices --devices-file", "plan job.yaml"])
def test_commands_that_read_yaml_say_where_it_is_wrong(tmp_path: Path, cli: Cli, command: str) -> None:
    write(tmp_path / "a.yaml", "a: =")
    write(tmp_path / "job.yaml", "name: a\nmax_workers: 1\ncluster: a.yaml\n")
    with contextlib.chdir(tmp_path):
        cli(*command.split(), *([] if "job.yaml" in command else ["a.yaml"])).refuses("a.yaml:line 1 column 4: is not")


def test_a_date_is_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: 2026-01-01\nb: 2026-13-77\n", encoding="utf-8")
    assert read_document(tmp_path / "a.yaml") == {"a": "2026-01-01", "b": "2026-13-77"}


def test_what_a_terminal_acts_on_is_shown_as_an_escape() -> None:
    from ddltool.commands.output import table

    assert str(InputError("a\u202eb", "is\x1b[31m red\nand")) == "a\\u202eb: is\\x1b[31m red and"
    made = table("t\u2066", ("c",), [("x\u202ey",)])
    assert str(made.title) == "t\\u2066"
    assert [str(cell) for cell in made.columns[0].cells] == ["x\\u202ey"]


def test_a_name_as_long_as_a_line_leaves_the_figures_their_room() -> None:
    from ddltool.commands.output import out, table

    console = out()
    with console.capture() as shown:
        console.print(table("t", ("op", "class", "n"), [("o" * 70, "reduction", "1,234,567")], text_columns=2))
    assert shown.get().count("reduction") == shown.get().count("1,234,567") == 1
    assert max(map(len, shown.get().splitlines())) <= 80


def test_headings_break_between_words_and_figures_nowhere() -> None:
    from ddltool.commands.output import out, table

    knobs = ("per-device-train-batch-size", "gradient-accumulation-steps")
    header = (*knobs, "on", "step", "samples/s", "memory")
    console = out()
    with console.capture() as shown:
        console.print(
            table("t", header, [("8", "2", "16 A100-PCIe-80GB", "756 us", "21,150", "2.0 MiB")], text_columns=3)
        )
    lines = shown.get().splitlines()
    assert max(map(len, lines)) <= 80
    words = shown.get().split()
    assert {"per-device-", "train-batch-", "size", "gradient-", "accumulation-", "steps", "samples/s", "21,150"} <= set(
        words
    )
    assert "756 us" in shown.get()


JOB_DOCUMENT = "name: a\nmax_workers: 4\ndevices: [{type: V100, count: 4}]\n"


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
        ("a: " + "[" * 200_000, "nested too deeply|exceeded maximum nesting depth"),
        ("- " * 200_000, "nested too deeply|exceeded maximum nesting depth"),
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


def test_an_alias_of_a_mapping_that_overrides_a_merged_field(tmp_path: Path) -> None:
    """Read twice, a field that overrides one under ``<<`` is still given once; of merged mappings the first wins."""
    text = "a: {<<: &m {<<: &b {x: 1, y: 2}, x: 3}, z: 4}\nb: *m\nc: {<<: [{x: 5}, *b], w: 6}\n"
    (tmp_path / "a.yaml").write_text(text, encoding="utf-8")
    merged = {"x": 3, "y": 2}
    expected = {"a": {**merged, "z": 4}, "b": merged, "c": {"x": 5, "y": 2, "w": 6}}
    assert read_document(tmp_path / "a.yaml") == expected
    (tmp_path / "a.yaml").write_text("a: {<<: {x: 1, x: 2}}\n", encoding="utf-8")
    with pytest.raises(InputError, match="line 1: gives 'x' twice"):
        read_document(tmp_path / "a.yaml")


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
    job.write_text(f"{JOB_DOCUMENT}model: {tmp_path / 'evil.py'}:f\n")
    assert run(["plan", str(job)]) == 2
    assert "names code" in (error := capsys.readouterr().err)
    assert error.count("\n") == 1
    assert not ran.exists()
    assert run(["plan", str(job), "--strategy", "est", "--allow-code"]) == 0
    assert ran.exists()
    assert [is_code(name) for name in ("zoo:lenet", "timm:a", "transformers:a", "g.json", "os:abort")] == [
        False
    ] * 4 + [True]


def test_lines_of_devices(tmp_path: Path) -> None:
    rows = "".join(f"- {{type: d{i}, count: 1}}\n" for i in range(1001))
    (tmp_path / "job.yaml").write_text(f"name: a\nmax_workers: 4\ndevices:\n{rows}", encoding="utf-8")
    with pytest.raises(InputError, match="devices: has 1001 entries; give at most 1000"):
        read_job(tmp_path / "job.yaml")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--bandwidth", "10Gbit", "--latency", "10"], "--latency: '10' has no unit; write 10us or 10ms"),
        (["--bandwidth", "10Gbit", "--latency", "1e300h"], "--latency: '1e300h' is longer than"),
        (["--bandwidth", "10Gbit", "--latency", "2h"], "is no latency of a network"),
        (["--bandwidth", "1e-320Gbit"], "is not a usable bandwidth"),
    ],
)
def test_quantities_that_nobody_means(arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", "zoo:lenet", "--device", "V100", *arguments]) == 2
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
