"""Other people's trainers with uneven batches on two ranks are the trainer alone with whole ones: parameters, logged losses."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from ddltool.errors import InputError, MissingExtra
from ddltool.runtime import integrations
from ddltool.telemetry import TelemetryRow
from tests.helpers.processes import as_job
from tests.helpers.whole_trainers import failures

PACKAGES = {"accelerate": "accelerate", "trainer": "accelerate", "lightning": "lightning"}
"""What the trainers of a module of cells need; transformers' Trainer needs accelerate."""


def demand(trainer: str) -> None:
    """Skip where a package is missing; it is imported later, once torchvision can be."""
    if find_spec(PACKAGES[trainer]) is None:
        pytest.skip(f"needs {PACKAGES[trainer]}")


@pytest.mark.slow
@pytest.mark.parametrize("trainer", PACKAGES)
def test_a_trainer_is_that_of_one_process_or_refused(trainer: str, tmp_path: Path) -> None:
    demand(trainer)
    assert failures(f"tests.helpers.{trainer}_workers", tmp_path) == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainer", "ranks", "steps", "batch"), [("trainer", 2, 2, 32), ("lightning", 1, 7, 16), ("lightning", 2, 4, 16)]
)
def test_telemetry_where_nothing_is_enforced(trainer: str, ranks: int, steps: int, batch: int, tmp_path: Path) -> None:
    demand(trainer)
    watched = import_module(f"tests.helpers.{trainer}_workers").watched
    ended = as_job(ranks, tmp_path, watched, str(tmp_path / "rows.jsonl"), ranks)
    assert not any(code for code, _, _ in ended), ended[0][2][-3000:]
    rows = [TelemetryRow.model_validate(json.loads(line)) for line in (tmp_path / "rows.jsonl").open()]
    assert sorted((row.rank, row.step) for row in rows) == [(r, step) for r in range(ranks) for step in range(steps)]
    assert {(row.batch, row.total_batch) for row in rows if row.step == 0} == {(batch, batch * ranks)}
    assert all(row.compute_s > 0 for row in rows)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lightning", None)
    monkeypatch.delitem(__import__("sys").modules, "ddltool.runtime.integrations.lightning_callback", raising=False)
    with pytest.raises(MissingExtra, match=r"HookCallback: needs the package lightning; install it with: pip install"):
        _ = integrations.HookCallback


def test_a_torchvision_for_another_torch_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(name: str) -> None:
        try:
            raise RuntimeError("operator torchvision::nms does not exist")
        except RuntimeError as error:
            raise ModuleNotFoundError("Could not import module 'Trainer'.") from error

    monkeypatch.setattr("importlib.import_module", failing)
    with pytest.raises(InputError, match=r"torchvision: cannot be imported .*nms does not exist\); install both from"):
        _ = integrations.HookedTrainerMixin
