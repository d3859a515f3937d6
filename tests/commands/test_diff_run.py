"""Two recorded runs side by side: the first difference, its class, and records that are cut, longer or no records."""

from __future__ import annotations

import gzip
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddltool.commands import diff_run as command
from ddltool.errors import CheckFailed, InputError
from ddltool.runtime.elastic.run_difference import SHARED_CAUSES, WORKER_CAUSES, compare_runs, first_difference
from tests.conftest import write_lines
from tests.helpers.elastic_workers import WORKERS, on, recorded_ddp, run

STEPS = 4


def record(steps: int = STEPS, workers: int = 2, **options: Any) -> list[dict[str, Any]]:
    """Return the record of a run whose every digest is its place."""

    def digests(*place: object) -> dict[str, str]:
        return {name: f"{hash((*map(str, place), name)) & (2**64 - 1):016x}" for name in ("x", "y")}

    return [
        {
            "kind": "step-digests",
            "schema_version": 1,
            "step": step,
            "epoch": step // 3,
            "settings": {"seed": 0} | options,
            "workers": {str(w): {kind: digests(step, w, kind) for kind in WORKER_CAUSES} for w in range(workers)},
            "shared": {kind: digests(step, kind) for kind in SHARED_CAUSES},
        }
        for step in range(steps)
    ]


PLACES = [(kind, w) for kind in WORKER_CAUSES for w in (0, 1)] + [(kind, None) for kind in SHARED_CAUSES]


@given(data=st.data())
def test_the_first_of_several_changes_in_causal_order_is_found(data: st.DataObject) -> None:
    """The oracle is a list of all places in causal order."""
    b = record()
    order = [(step, kind, worker, name) for step in range(STEPS) for kind, worker in PLACES for name in ("x", "y")]
    changed = data.draw(st.lists(st.sampled_from(order), min_size=1, max_size=5, unique=True))
    for step, kind, worker, name in changed:
        (b[step]["shared"] if worker is None else b[step]["workers"][str(worker)])[kind][name] = "0" * 16
    with tempfile.TemporaryDirectory() as folder:
        a = write_lines(Path(folder, "a.jsonl"), record())
        found = first_difference(a, write_lines(Path(folder, "b.jsonl"), b))
        assert first_difference(a, a) is None
    assert found is not None
    first = min(changed, key=order.index)
    assert (found.step, found.record, found.worker, found.tensor) == first
    assert found.cause_class == (WORKER_CAUSES | SHARED_CAUSES)[found.record][0]  # type: ignore[operator,index]
    assert sum(found.differing_in_step.values()) == sum(step == first[0] for step, *_ in changed)


def test_batches_that_changed_places_are_the_order_of_the_data(tmp_path: Path) -> None:
    a, b = record(), record()
    one, other = (b[2]["workers"][rank]["batch"] for rank in ("0", "1"))
    b[2]["workers"]["0"]["batch"], b[2]["workers"]["1"]["batch"] = other, one
    found = first_difference(write_lines(tmp_path / "a.jsonl", a), write_lines(tmp_path / "b.jsonl", b))
    assert found is not None
    assert (found.step, found.worker, found.cause_class) == (2, 0, "data order")


def test_exit_codes_and_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_lines(tmp_path / "a.jsonl", record())
    longer = tmp_path / "longer.jsonl.gz"
    longer.write_bytes(gzip.compress("".join(json.dumps(s) + "\n" for s in record(6)).encode()))
    command.diff_run(a, longer, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert (document["equal"], document["same_length"], document["steps_compared"]) == (True, False, STEPS)
    assert (document["a"]["last_step"], document["b"]["last_step"]) == (3, 5)
    with pytest.raises(CheckFailed, match="only one of them has the others"):
        command.diff_run(a, longer, whole=True)
    assert "steps 0 to 5 (6)" in capsys.readouterr().out
    command.diff_run(a, a, whole=True)
    capsys.readouterr()
    changed = record(seed=1)
    changed[1]["shared"]["combined gradient"]["x"] = "0" * 16
    with pytest.raises(CheckFailed, match="step 1: combined gradient x differs") as failed:
        command.diff_run(a, write_lines(tmp_path / "b.jsonl", changed), as_json=True)
    assert failed.value.exit_code == 1
    document = json.loads(capsys.readouterr().out)
    assert document["settings"] == [{"name": "seed", "a": 0, "b": 1}]
    assert document["difference"]["cause_class"] == "reduction order"
    assert document["difference"]["worker"] is None


def test_a_record_that_a_killed_run_left_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    a = write_lines(tmp_path / "a.jsonl", record())
    whole = json.dumps(record()[2])
    for length in range(1, len(whole), 97):
        found = compare_runs(a, write_lines(tmp_path / "cut.jsonl", record(2), whole[:length]))
        assert (found.difference, found.steps_compared, found.b.cut, found.same_length) == (None, 2, True, False)
    later = compare_runs(a, write_lines(tmp_path / "later.jsonl", record()[2:]))
    assert (later.steps_compared, later.b.first_step, later.difference) == (2, 2, None)


def test_other_numbers_of_workers_are_named(tmp_path: Path) -> None:
    files = [write_lines(tmp_path / f"{workers}.jsonl", record(workers=workers)) for workers in (2, 3)]
    found = first_difference(*files)
    assert found is not None
    assert (found.worker, found.cause_class) == (2, "code")


BAD: dict[str, tuple[Callable[[list[dict[str, Any]]], str], str]] = {
    "empty": (lambda _: "", "b.jsonl: has no whole step"),
    "no JSON": (lambda _: "{\n{}\n", "is not JSON"),
    "another kind": (lambda s: json.dumps(s[0] | {"kind": "x"}) + "\n", "b.jsonl:1:kind: is 'x'; give 'step-digests'"),
    "a list": (lambda _: "[]\n", "b.jsonl:1: is a list; give a mapping"),
    "twice": (lambda s: 2 * (json.dumps(s[0]) + "\n"), "step 0 comes twice"),
    "backwards": (lambda s: "".join(json.dumps(s[i]) + "\n" for i in (2, 1)), "step 1 comes after step 2"),
    "negative": (lambda s: json.dumps(s[0] | {"step": -1}) + "\n", "step: is -1"),
    "NaN": (lambda s: json.dumps(s[0] | {"epoch": float("nan")}) + "\n", "epoch: is 'NaN'"),
    "digests": (lambda s: json.dumps(s[0] | {"shared": {"parameter": {"y": 1}}}) + "\n", "shared.parameter.y: is 1"),
    "a kind": (lambda s: json.dumps(s[0] | {"workers": {"0": {"mystery": {}}}}) + "\n", "is 'mystery'; give 'random"),
    "a rank": (lambda s: json.dumps(s[0] | {"workers": {"1" * 5000: {}}}) + "\n", "b.jsonl:1:workers"),
    "deep": (lambda _: "[" * 100_000 + "\n", "is not JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_record_is_told_in_one_line(name: str, tmp_path: Path) -> None:
    make, message = BAD[name]
    (tmp_path / "b.jsonl").write_text(make(record()))
    with pytest.raises(InputError, match=message) as caught:
        command.diff_run(write_lines(tmp_path / "a.jsonl", record()), tmp_path / "b.jsonl")
    assert "\n" not in str(caught.value)


def test_missing_binary_and_cut_compressed_files(tmp_path: Path) -> None:
    a = write_lines(tmp_path / "a.jsonl", record())
    (tmp_path / "binary.jsonl").write_bytes(random.Random(0).randbytes(1000))
    packed = gzip.compress(a.read_bytes(), mtime=0)
    (tmp_path / "flipped.jsonl.gz").write_bytes(packed[:100] + bytes([packed[100] ^ 255]) + packed[101:])
    for name in ("missing.jsonl", "binary.jsonl", "flipped.jsonl.gz"):
        with pytest.raises(InputError, match=name):
            compare_runs(a, tmp_path / name)
    many = write_lines(tmp_path / "many.jsonl", record(40))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(many.read_bytes(), mtime=0)[:-20])
    found = compare_runs(many, tmp_path / "cut.jsonl.gz")
    assert (found.difference, found.b.cut, found.same_length) == (None, True, False)
    assert 0 < found.steps_compared < 40


def test_two_records_that_are_cut_are_not_whole(tmp_path: Path) -> None:
    cut = write_lines(tmp_path / "a.jsonl", record(), "{")
    command.diff_run(cut, cut)
    with pytest.raises(CheckFailed, match="equal in 4 steps, but .* ends in the middle of a line"):
        command.diff_run(cut, cut, whole=True)


def test_settings_that_are_no_numbers_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write_lines(tmp_path / "a.jsonl", record(rate=float("nan")))
    command.diff_run(a, a, as_json=True)
    assert json.loads(capsys.readouterr().out)["settings"] == []
    command.diff_run(a, write_lines(tmp_path / "b.jsonl", record(rate=1)), as_json=True)
    assert json.loads(capsys.readouterr().out)["settings"] == [{"name": "rate", "a": "NaN", "b": 1}]


def test_other_weights_at_the_start_are_named(tmp_path: Path) -> None:
    """Also beside a record that was continued, where the weights before are those of another step."""
    from torch import nn, optim

    from ddltool.runtime.elastic.trainer import ElasticTrainer
    from tests.helpers.elastic_workers import Digits

    def recorded(name: str, weight: float, stop: int = 3) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        with torch.no_grad():
            model[1].weight[0, 0] = weight
        trainer = ElasticTrainer(
            model,
            optim.SGD(model.parameters(), lr=0.1),
            nn.CrossEntropyLoss(),
            Digits(),
            record=tmp_path / f"{name}.jsonl",
        )
        trainer.resume(tmp_path / f"{name}.pt")
        for step in trainer.epoch(0):
            if step.number == stop:
                break
        trainer.save(tmp_path / f"{name}.pt")
        return tmp_path / f"{name}.jsonl"

    whole = recorded("whole", 0.0)
    found = first_difference(whole, recorded("other", 1e-6))
    assert found is not None
    assert (found.step, found.record, found.tensor) == (0, "parameter before", "1.weight")
    assert found.cause_class == "initial weights"
    recorded("parts", 0.0, stop=1)
    parts = recorded("parts", 0.0)
    lines = parts.read_text().splitlines(keepends=True)
    assert ["parameter before" in line for line in lines] == [True, False, False]
    assert compare_runs(whole, parts).difference is None
    (tmp_path / "late.jsonl").write_text("".join(lines[1:]))
    assert compare_runs(whole, tmp_path / "late.jsonl").difference is None


def test_plain_ddp_with_the_ordered_hook_records_what_an_elastic_run_records(tmp_path: Path) -> None:
    """Streams, batches, outputs, losses, every worker's own gradients, their mean and the parameters."""
    elastic, plain = tmp_path / "elastic.jsonl", tmp_path / "plain.jsonl"
    on(1, _elastic, str(tmp_path / "run.pt"), str(elastic))
    on(WORKERS, recorded_ddp, str(plain), 3)
    found = compare_runs(elastic, plain)
    assert found.difference is None
    assert found.steps_compared == 3
    assert ("processes", None, WORKERS) in [(one.name, one.a, one.b) for one in found.settings]
    on(WORKERS, recorded_ddp, str(tmp_path / "unhooked.jsonl"), 3, False)
    difference = first_difference(plain, tmp_path / "unhooked.jsonl")
    assert difference is not None
    assert (difference.step, difference.record, difference.cause_class) == (0, "combined gradient", "reduction order")


def _elastic(path: str, recorded: str) -> None:
    run(path, model="transformer", optimizer="adamw", until=3, record=recorded)


def test_a_recorder_that_goes_on_replaces_what_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    on(1, recorded_ddp, str(path), 3)
    with path.open("a") as file:
        file.write('{"kind": "step-dig')
    found = compare_runs(path, path)
    assert (found.steps_compared, found.a.cut) == (3, True)
    recorded_ddp(str(path), 1, first_step=2)
    found = compare_runs(path, path)
    assert (found.steps_compared, found.a.cut) == (3, False)
    (tmp_path / "other.txt").write_text("my notes\n")
    with pytest.raises(InputError, match="is not JSON"):
        recorded_ddp(str(tmp_path / "other.txt"), 1)
    assert (tmp_path / "other.txt").read_text() == "my notes\n"
