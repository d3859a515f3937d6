"""Agreements between real processes: rank 0 sees all rows, all get its choice, and who is missing is named by all others."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist

from ddltool.errors import DdlToolError
from ddltool.runtime.processes.consensus import Choose, Consensus
from ddltool.runtime.processes.job import DistributedJob
from ddltool.runtime.processes.liveness import LivenessMonitor
from tests.helpers.runtime_workers import Crew

RANKS = 4
PATIENCE_S = 60.0
NOTHING = "step 1: nothing came from rank {}, so batch sizes are unknown (time is up)"


@pytest.fixture(scope="module")
def ranks() -> Iterator[Crew]:
    made = Crew(RANKS)
    yield made
    made.close()


def place(rank: int) -> DistributedJob:
    return DistributedJob(rank=rank, world_size=RANKS, side=None)


def rounds(rank: int, behind: bool) -> list[list[float] | None]:
    """Return what four rounds answer: row r is (r + step, r), the choice their product plus 100 r."""

    def choose(rows: np.ndarray) -> np.ndarray:
        return rows[:, 0] * rows[:, 1] + 100 * np.arange(len(rows))

    consensus = Consensus(place(rank), choose, timeout_s=PATIENCE_S, behind=behind)
    told = []
    for step in range(4):
        chosen = consensus.propose(lambda step=step: np.array([rank + step, rank]))  # type: ignore[misc]
        told.append(None if chosen is None else chosen.tolist())
    consensus.close()
    return told


@pytest.mark.parametrize("behind", [False, True])
def test_rank_0_sees_rows_in_order_and_all_get_its_choice(ranks: Crew, behind: bool) -> None:
    expected = [[(rank + step) * rank + 100.0 * rank for rank in range(RANKS)] for step in range(4)]
    assert ranks.run(rounds, behind) == [[None, *expected[:3]] if behind else expected] * RANKS


def test_one_process_agrees_with_itself() -> None:
    alone = Consensus(DistributedJob(rank=0, world_size=1, side=None), lambda rows: rows.sum(axis=1))
    assert alone.propose(lambda: np.array([1.0, 2.0])).tolist() == [3.0]  # type: ignore[union-attr]
    alone.close()


def failing(rank: int, behind: bool) -> list[str]:
    """Return what each call tells when rank 0 cannot choose in the second round."""
    seen = []

    def choose(rows: np.ndarray) -> np.ndarray:
        seen.append(rows)
        if len(seen) == 2:
            raise DdlToolError("no idea")
        return rows[0]

    consensus = Consensus(place(rank), choose, timeout_s=PATIENCE_S, behind=behind)
    told = []
    for _ in range(4 if behind else 2):
        try:
            chosen = consensus.propose(lambda: np.array([7.0]))
            told.append("none yet" if chosen is None else str(chosen[0]))
        except DdlToolError as error:
            told.append(str(error))
    consensus.close()
    return told


def test_a_choice_that_fails_ends_the_job_everywhere(ranks: Crew) -> None:
    told = [
        ["7.0", "no idea"],
        *[["7.0", "step 1: rank 0 could not choose batch sizes; see its message"]] * (RANKS - 1),
    ]
    assert ranks.run(failing, False) == told
    behind = ranks.run(failing, True)
    # Asking again does not wait for ever.
    assert behind == [["none yet", *row, row[1]] for row in told]


def signs(of: str) -> dist.Store:
    """Return keys of a test's own, by which its ranks wait for each other rather than for a time."""
    return dist.PrefixStore(f"tests/{of}", dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]


def late(rank: int, after_s: list[float | None], timeout_s: float) -> str:
    """Return what each rank is told when it comes after so many seconds; None: when all others have given up.

    Where all others come at once, the last of them gives up after ``timeout_s``, once it has seen the others' rows.
    """
    consensus = Consensus(place(rank), lambda rows: rows[:, 0], timeout_s=PATIENCE_S)
    assert consensus.propose(lambda: np.array([7.0])).tolist() == [7.0] * RANKS  # type: ignore[union-attr]
    after, given_up = after_s[rank], signs(f"late {after_s}")
    others = [other for other, seconds in enumerate(after_s) if seconds is not None]
    at_once = not any(after_s)
    if after is None:
        given_up.wait([str(other) for other in others], timedelta(seconds=PATIENCE_S))
    elif at_once and rank == others[-1]:
        consensus._store.wait([f"row/1/{other}" for other in others[:-1]], timedelta(seconds=PATIENCE_S))
    else:
        time.sleep(after)
    if not at_once or rank == others[-1]:
        consensus._timeout_s = timeout_s
    try:
        consensus.propose(lambda: np.array([1.0]))
    except DdlToolError as error:
        return str(error)
    finally:
        consensus.close()
        given_up.set(str(rank), "")
    return "nothing"


@pytest.mark.parametrize(
    ("after_s", "lost"),
    [
        ([0.0, None, 0.0, 0.0], "1"),
        pytest.param([None, 0.0, 0.0, 0.0], "0", marks=pytest.mark.slow),
        # Each a part of the time that a rank waits: who has come when the first gives up is not taken for lost.
        pytest.param([0.0, 0.6, None, 0.0], "2", marks=pytest.mark.slow),
        pytest.param([0.5, 0.0, None, 0.6], "2", marks=pytest.mark.slow),
        pytest.param([None, 0.3, 0.0, 0.6], "0", marks=pytest.mark.slow),
        pytest.param([0.0, None, 0.6, None], "1, 3", marks=pytest.mark.slow),
    ],
)
def test_who_stays_away_is_named_by_all_others_and_nobody_else(
    ranks: Crew, after_s: list[float | None], lost: str
) -> None:
    waits_s = 10.0 if any(after_s) else 1.0
    told = ranks.run(late, [after and after * waits_s for after in after_s], waits_s)
    for after, text in zip(after_s, told, strict=True):
        if after is None:
            assert text == "step 1: this rank came too late, the others had given up; batch sizes are unknown"
        else:
            assert text == NOTHING.format(lost)


def test_late_ranks_that_come_in_time_lose_nothing(ranks: Crew) -> None:
    """The time counts from when a rank comes, the first to come waiting for the last."""
    assert ranks.run(late, [0.0, 0.2, 0.1, 0.4], PATIENCE_S) == ["nothing"] * RANKS


def lives(rank: int) -> list[tuple[int, int]]:
    """Return the threads and open files after each of five agreements, ranks closing theirs at different times."""
    found = []
    for number in range(5):
        choose = failure if number == 3 else first_column
        consensus = Consensus(place(rank), choose, timeout_s=PATIENCE_S, behind=number > 3)
        with contextlib.suppress(DdlToolError):
            for _ in range(3):
                consensus.propose(lambda: np.array([7.0]))
        time.sleep(0.1 * ((rank + number) % RANKS))
        consensus.close()
        consensus.close()
        del consensus
        dist.barrier()
        found.append(kept(found[0] if found else None))
    return found


def kept(at_most: tuple[int, int] | None) -> tuple[int, int]:
    """Return the threads and open files, once they are so few; None: the least of some looks.

    A store of files opens one for a moment each time that somebody looks into it.
    """
    end = time.monotonic() + (PATIENCE_S if at_most else 0.1)
    least = 10**6, 10**6
    while time.monotonic() < end:
        threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        if at_most is not None and threads <= at_most[0] and files <= at_most[1]:
            return threads, files
        least = min(least[0], threads), min(least[1], files)
        time.sleep(0.005)
    return least if at_most is None else (threads, files)


def first_column(rows: np.ndarray) -> np.ndarray:
    return rows[:, 0]


def failure(rows: np.ndarray) -> np.ndarray:
    raise DdlToolError("no idea")


def test_what_is_closed_is_gone(ranks: Crew) -> None:
    for first, *others in ranks.run(lives):
        assert all(threads <= first[0] and files <= first[1] for threads, files in others)


def test_who_ends_early_is_named() -> None:
    """Of three, rank 1 ends while rank 0 chooses, or rank 0 while it waits: the others hear it at once, in its name."""
    for who, told_by in ((1, {1: "this rank is ending", 2: "rank 1 has ended"}), (0, {1: "rank 0 has ended"})):
        store, told = dist.HashStore(), {}
        choosing, ended = threading.Event(), threading.Event()

        def choose(
            rows: np.ndarray, choosing: threading.Event = choosing, ended: threading.Event = ended
        ) -> np.ndarray:
            choosing.set()
            ended.wait(60)
            return rows.sum(axis=0)

        def end(rank: int, choose: Choose = choose, store: dist.Store = store) -> Consensus:
            return Consensus(
                DistributedJob(rank=rank, world_size=3, side=None), choose, timeout_s=90.0, behind=True, store=store
            )

        ends = [end(rank) for rank in range(3)]

        def take_part(rank: int, ends: list[Consensus] = ends, told: dict[int, str] = told) -> None:
            with contextlib.suppress(DdlToolError):
                ends[rank].propose(lambda: np.array([float(rank)]))
            try:
                told[rank] = str(ends[rank].propose(lambda: np.array([0.0])))
            except DdlToolError as error:
                told[rank] = str(error)

        taking = [threading.Thread(target=take_part, args=(rank,)) for rank in ((0, 1, 2) if who else (0, 1))]
        for thread in taking:
            thread.start()
        if who:
            assert choosing.wait(60)
        else:
            store.wait(["row/0/0", "row/0/1"], timedelta(seconds=60))
        ends[who].close()
        for thread in taking[1:]:
            thread.join(60)
        ended.set()
        taking[0].join(60)
        for one in ends:
            one.close()
        assert {rank: told[rank] for rank in told_by} == {
            rank: f"step 0: {text}, so batch sizes are unknown" for rank, text in told_by.items()
        }


def lost(rank: int) -> str:
    """Return what each rank is told when rank 2 is gone and only rank 3 has seen a connection break."""
    consensus, is_gone = Consensus(place(rank), first_column, timeout_s=30.0), signs("lost")
    consensus.propose(lambda: np.array([7.0]))
    try:
        if rank < 2:
            consensus.propose(lambda: np.array([7.0]))
        if rank == 2:
            LivenessMonitor.of_this_job().close()  # as a process that is gone, it does not answer
            is_gone.set("2", "")
            return "is gone"
        is_gone.wait(["2"], timedelta(seconds=60))
        time.sleep(0.5)  # the others wait by then, or hear it when they come
        return str(LivenessMonitor.of_this_job().missing_ranks())
    except DdlToolError as error:
        return str(error)
    finally:
        consensus.close()


def test_who_waits_is_told_at_once_whom_another_rank_has_lost(ranks: Crew) -> None:
    told = "step 1: nothing came from rank 2, so batch sizes are unknown (the connection is lost)"
    assert ranks.run(lost) == [told, told, "is gone", "[2]"]
