"""A process is killed, stopped or ended at any moment: the others end in time, in one line that names it."""

from __future__ import annotations

import random

import pytest

from benchmarks.kills import GRACE_S, KINDS, RANKS, SIGNALS, TIMEOUT_S, disturbed


def check(kind: str, name: str, victim: int, delay_s: float) -> None:
    found = disturbed(kind, SIGNALS[name], victim, delay_s)
    assert found.lived_s < TIMEOUT_S + GRACE_S, found
    assert found.names(victim) == len(found.told), found


@pytest.mark.parametrize(
    ("kind", "name"), [("agent", "SIGKILL"), ("elastic", "SIGSTOP"), ("servers", "SIGTERM"), ("hook", "SIGKILL")]
)
def test_the_others_end_in_time_and_name_the_process(kind: str, name: str) -> None:
    check(kind, name, 1, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SIGNALS)
def test_random_moments(kind: str, name: str) -> None:
    chance = random.Random(f"{kind} {name}")
    for _ in range(5):
        check(kind, name, chance.randrange(RANKS + (kind == "servers")), chance.uniform(0.0, 1.0))
