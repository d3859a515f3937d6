"""A process is killed, stopped or ended at any moment: the others end in time, in one line that names it."""

from __future__ import annotations

import random

import pytest

from benchmarks.kills import GRACE_S, KINDS, RANKS, SIGNALS, TIMEOUT_S, Outcome, disturbed


def check(kind: str, name: str, victim: int, delay_s: float, call: tuple[int, bool] | None = None) -> Outcome:
    found = disturbed(kind, SIGNALS[name], victim, delay_s, call)
    assert None not in found.codes, f"some hung: {found}"
    assert found.names(victim) == len(found.told), found
    assert not found.torn, found
    return found


@pytest.mark.parametrize(
    ("kind", "name", "call"),
    [
        ("agent", "SIGKILL", None),
        ("elastic", "SIGSTOP", (9, False)),  # in the set-up
        ("servers", "SIGTERM", None),
        ("hook", "SIGKILL", None),
    ],
)
def test_the_others_end_and_name_the_process(kind: str, name: str, call: tuple[int, bool] | None) -> None:
    check(kind, name, 1, 0.1 if call is None else 0.0, call)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SIGNALS)
def test_random_moments(kind: str, name: str) -> None:
    chance = random.Random(f"{kind} {name}")
    for _ in range(5):
        found = check(kind, name, chance.randrange(RANKS + (kind == "servers")), chance.uniform(0.0, 1.0))
        assert found.lived_s < TIMEOUT_S + GRACE_S, found
