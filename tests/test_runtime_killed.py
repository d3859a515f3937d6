"""A rank is killed, stopped or ended at any moment: the others end in time, in one line that names it."""

from __future__ import annotations

import random
import signal

import pytest

from tests.kill_workers import KINDS, TIMEOUT_S, disturbed

GRACE_S = 2.0
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "SIGTERM": signal.SIGTERM}


def check(kind: str, name: str, victim: int, delay_s: float) -> str:
    lived_s, told = disturbed(kind, SIGNALS[name], victim, delay_s)
    row = f"{kind} {name} of rank {victim} after {delay_s:.2f} s: {lived_s:.1f} s, {told[0].strip()}"
    assert lived_s < TIMEOUT_S + GRACE_S, row
    for text in told:
        assert text.startswith("error: "), text
        assert text.count("\n") == 1, text
        assert f"rank {victim}" in text, text
    return row


@pytest.mark.parametrize("kind", KINDS)
def test_the_others_end_in_time_and_name_the_rank(kind: str) -> None:
    check(kind, "SIGKILL" if kind == "agent" else "SIGSTOP", 1, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SIGNALS)
def test_twenty_random_moments(kind: str, name: str) -> None:
    chance = random.Random(f"{kind} {name}")
    for _ in range(20):
        print(check(kind, name, chance.randrange(3), chance.uniform(0.0, 1.0)))
