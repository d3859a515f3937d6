"""Transformers' Trainer with uneven batches on two ranks is the Trainer alone with whole ones: parameters, logged losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddltool.errors import MissingExtra
from ddltool.runtime import integrations
from ddltool.telemetry import TelemetryRow
from tests.processes import as_job
from tests.whole_trainers import Found, assert_alike, assert_refused, found_in

CELLS = (
    *("labels of all ranks", "labels of all ranks accumulated", "labels of the rank", "labels of the rank accumulated"),
    *("mean over samples", "mean over samples accumulated", "number of labels not used"),
    *("number of labels not used nor averaged", "loss of a function", "loss of a method", "schedule and adafactor"),
    *("labels in planned passes", "samples in planned passes"),
    *("data workers", "in order", "stream", "checkpoint resumed", "trained twice", "bert", "llama"),
)
REFUSED = {
    "passes of another number": "accumulation: of 3 batches an update, where the plan makes 2 passes; accumulate 2",
    "loss times the ranks": "loss: is a mean over ",
    "compiled loss": "loss: what it is a mean over cannot be read from its graph (",
    "stream resumed": "resume_from_checkpoint: cannot skip batches of a stream; set ignore_data_skip=True",
    "batches of the script's own": "loader: takes whole batches from a ",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    pytest.importorskip("accelerate")
    return found_in("tests.trainer_workers", CELLS, REFUSED, tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_a_trainer_is_that_of_one_process(found: Found, name: str) -> None:
    assert_alike(found, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_trainer_that_cannot_be_right_is_refused(found: Found, name: str) -> None:
    assert_refused(found, name, REFUSED[name])
    assert "loss" not in name or all("self.hook.loss(" in each[name] for each in found[1])


@pytest.mark.slow
def test_telemetry_of_a_trainer_in_which_nothing_is_enforced(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from tests.trainer_workers import watched

    ended = as_job(2, tmp_path, watched, str(tmp_path / "rows.jsonl"))
    assert not any(code for code, _, _ in ended), ended[0][2][-3000:]
    rows = [TelemetryRow.model_validate(json.loads(line)) for line in (tmp_path / "rows.jsonl").open()]
    assert sorted((row.rank, row.step) for row in rows) == [(rank, step) for rank in (0, 1) for step in range(2)]
    assert {(row.batch, row.total_batch) for row in rows if row.step == 0} == {(32, 64)}


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lightning", None)
    monkeypatch.delitem(__import__("sys").modules, "ddltool.runtime.integrations.lightning_callback", raising=False)
    with pytest.raises(MissingExtra, match=r"HookCallback: needs the package lightning; install it with: pip install"):
        _ = integrations.HookCallback
