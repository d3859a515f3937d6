"""Reports and choices that travel along a tree of ranks, between real gloo processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.runtime.balancing.roll_call import RollCall
from tests.balance_workers import tree_failure, tree_job, tree_late, tree_lives, tree_rounds
from tests.processes import LASTING
from tests.runtime_workers import Crew

RANKS = 4
NOTHING = "step 0: nothing came from rank {}, so batch sizes are unknown (time is up)"


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


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.slow), 1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_rank_that_stays_away_is_named_by_all_others(ranks: Crew, who: int) -> None:
    """In a chain: at its beginning, in the middle, at its end."""
    told = ranks.run(tree_failure, RANKS, str(who))
    assert told.pop(who) == "stayed away"
    assert set(told) == {NOTHING.format(who)}


@pytest.mark.parametrize(
    ("after_s", "lost"),
    [
        # rank 1 still waits for rank 2 when rank 0 has heard the roll
        pytest.param([0.0, 3.6, None, 0.0], "2", marks=pytest.mark.slow),
        pytest.param([3.2, 0.0, None, 3.5], "2", marks=pytest.mark.slow),
        pytest.param([None, 2.5, 0.0, 3.5], "0", marks=pytest.mark.slow),
        pytest.param([0.0, None, 3.5, None], "1, 3", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_come_at_different_times_are_not_taken_for_lost(
    ranks: Crew, after_s: list[float | None], lost: str
) -> None:
    """Each waits for 4 s from when it comes, and for the roll call; the first to give up does so long before the last."""
    told = ranks.run(tree_late, RANKS, after_s, 4.0)
    for after, (text, seconds) in zip(after_s, told, strict=True):
        if after is None:
            assert text == "step 0: this rank came too late, the others had given up; batch sizes are unknown"
        else:
            assert text == NOTHING.format(lost)
            assert seconds < 4.0 + 3.0 + 5.0


def test_late_ranks_that_come_in_time_lose_nothing(ranks: Crew) -> None:
    """The time counts from when a rank comes, the first to come waiting for the last."""
    told = ranks.run(tree_late, RANKS, [0.0, 2.0, 1.0, 2.5], 6.0)
    assert [text for text, _ in told] == ["nothing"] * RANKS


def test_what_is_closed_is_gone(ranks: Crew) -> None:
    """Four trees, one after the other, the last two of which fail: as many groups, threads and open files as after one."""
    for first, *others in ranks.run(tree_lives, RANKS):
        assert first[0] == 1  # that of the job
        assert others == [first] * 3


def test_a_job_of_many_ranks_that_all_wait(ranks: Crew) -> None:
    """The way from ``balance``: sizes follow the speeds, and closing ends the tree's group and leaves the job's others."""
    answers = ranks.run(tree_job, [0.2, 0.2, 0.2, 2.0])
    assert [answer["kind"] for answer in answers] == ["TreeExchange"] * RANKS
    assert [answer["ended"] for answer in answers] == [1] * RANKS
    assert not any("ddltool-roll-call" in answer["threads"] for answer in answers)
    steps = list(zip(*(answer["steps"] for answer in answers), strict=True))
    assert steps[0] == (16,) * RANKS
    assert all(sum(sizes) == 64 for sizes in steps)
    assert max(sizes[3] for sizes in steps[5:]) <= 10
    assert len({answer["sizes"] for answer in answers}) == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.sampled_from([None, 4, 5, 6]), st.booleans()), min_size=1, max_size=6))
def test_who_is_lost_by_what_the_store_says(others: list[tuple[bool, int | None, bool]]) -> None:
    """Each other rank: whether it says that it lives, the last step it says it came to, whether a connection to it broke."""
    store = dist.HashStore()
    for rank, (alive, came, broken) in enumerate(others, 1):
        for key, value in (("alive", "1" if alive else None), ("came", came), ("broken", "1" if broken else None)):
            if value is not None:
                store.set(f"{key}/{rank}", str(value))
    asked = RollCall(store, 0, len(others) + 1, 1.0)
    asked.begin(5)
    verdict = asked.decide(0.0)
    asked.close()
    assert verdict is not None
    dead = tuple(rank for rank, (alive, _, broken) in enumerate(others, 1) if broken and not alive)
    away = tuple(rank for rank, (alive, came, _) in enumerate(others, 1) if not alive and came in (None, 4))
    assert (verdict.lost, verdict.broken) == ((dead, True) if dead else (away, False))
    later = RollCall(store, 1, len(others) + 1, 1.0)
    later.broken.add(0)
    assert later.decide(0.0) == verdict  # what one has said all say
    later.close()
