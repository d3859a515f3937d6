"""Lightning's Trainer with uneven batches on two ranks is the Trainer alone with whole ones."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from ddltool.telemetry import TelemetryRow
from tests.processes import as_job
from tests.whole_trainers import Found, assert_alike, assert_refused, found_in

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
CELLS = (
    *("plain", "clipped", "accumulated", "shuffled", "data workers", "stream", "validated", "closure called again"),
    *("by hand", "two optimizers", "resumed"),
)
REFUSED = {
    "sum over samples": "loss: is a sum over the batch, not a mean over its samples; say ",
    "sampler of lightning": "loader: is shared out by a DistributedSamplerWrapper; leave that to the hook",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return found_in("tests.lightning_workers", CELLS, REFUSED, tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_a_module_is_trained_as_by_one_process(found: Found, name: str) -> None:
    assert_alike(found, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused(found: Found, name: str) -> None:
    assert_refused(found, name, REFUSED[name])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_telemetry_where_nothing_is_enforced(tmp_path: Path, ranks: int) -> None:
    from tests.lightning_workers import watched

    ended = as_job(ranks, tmp_path, watched, str(tmp_path / "rows.jsonl"), ranks)
    assert not any(code for code, _, _ in ended), ended[0][2][-3000:]
    rows = [TelemetryRow.model_validate(json.loads(line)) for line in (tmp_path / "rows.jsonl").open()]
    steps = 7 if ranks == 1 else 4
    assert sorted((row.rank, row.step) for row in rows) == [(r, step) for r in range(ranks) for step in range(steps)]
    assert {(row.batch, row.total_batch) for row in rows if row.step == 0} == {(16, 16 * ranks)}
    assert all(row.compute_s > 0 for row in rows)
