"""Accelerate's own wrappers around model, optimizer, loader and scheduler: two uneven ranks are one process."""

from __future__ import annotations

import pytest

from tests.whole_trainers import Found, assert_alike, assert_refused, found_in

CELLS = (
    *("prepared at once", "shuffled by seed", "accumulated", "loader of the hook", "dispatched", "stream"),
    *("stream not dispatched", "first batches skipped", "state saved and loaded"),
)
REFUSED = {"loss summed": "loss: is a sum over the batch, not a mean over its samples; say "}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    pytest.importorskip("accelerate")
    return found_in("tests.accelerate_workers", CELLS, REFUSED, tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_a_prepared_script_is_that_of_one_process(found: Found, name: str) -> None:
    assert_alike(found, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_prepared_script_that_cannot_be_right_is_refused(found: Found, name: str) -> None:
    assert_refused(found, name, REFUSED[name])
