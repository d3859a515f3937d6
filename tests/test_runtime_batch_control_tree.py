"""Reports and choices that travel along a tree of ranks, between real gloo processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.balance_workers import tree_failure, tree_rounds
from tests.processes import LASTING
from tests.runtime_workers import Crew

RANKS = 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    made = Crew(RANKS)
    LASTING.update(process.pid for process in made._processes if process.pid is not None)
    yield made
    made.close()


def test_rank_0_sees_rows_in_order_and_all_get_its_choice(ranks: Crew) -> None:
    """A chain, a tree whose second level is not full, and a star."""
    expected = [[(rank + step) * rank + 100.0 * rank for rank in range(RANKS)] for step in range(3)]
    for fan_out in (1, 2, RANKS):
        assert ranks.run(tree_rounds, RANKS, fan_out) == [expected] * RANKS


def test_a_choice_that_fails_is_told_everywhere(ranks: Crew) -> None:
    told = ranks.run(tree_failure, RANKS, "choice")
    assert told == ["no idea", *["step 0: rank 0 could not choose batch sizes; see its message"] * (RANKS - 1)]


@pytest.mark.parametrize("who", [0, 1, 3])
def test_a_rank_that_stays_away_is_named_by_all_others(ranks: Crew, who: int) -> None:
    """In a chain: at its beginning, in the middle, at its end."""
    told = ranks.run(tree_failure, RANKS, str(who))
    assert told.pop(who) == "stayed away"
    assert set(told) == {f"step 0: nothing came from rank {who}, so batch sizes are unknown"}
