"""A rank is killed, stopped or ended at any moment: the others end in time, in one line that names it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kill_workers import KINDS
from tests.processes import free_port

RANKS, TIMEOUT_S, GRACE_S = 3, 3.0, 2.0
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "SIGTERM": signal.SIGTERM}


def disturbed(kind: str, number: signal.Signals, victim: int, delay_s: float) -> tuple[float, list[str]]:
    """Send a signal to a rank some time after training began; return how long the others lived on, and their last lines."""
    root = Path(__file__).parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": f"{root}:{PATHS}"}
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.kill_workers", kind, str(rank), str(RANKS), str(port), str(TIMEOUT_S)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=root,
            env=environment,
        )
        for rank in range(RANKS)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n", rank.communicate()[1]
        time.sleep(delay_s)
        ranks[victim].send_signal(number)
        begin = time.monotonic()
        others = [rank for place, rank in enumerate(ranks) if place != victim]
        told = [rank.communicate(timeout=60)[1] for rank in others]
        lived_s = time.monotonic() - begin
        assert [rank.returncode for rank in others] == [1] * len(others), told
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return lived_s, told


PATHS = os.environ.get("PYTHONPATH", "")


def check(kind: str, name: str, victim: int, delay_s: float) -> str:
    lived_s, told = disturbed(kind, SIGNALS[name], victim, delay_s)
    row = f"{kind} {name} of rank {victim} after {delay_s:.2f} s: {lived_s:.1f} s, {told[0].strip().splitlines()[-1:]}"
    assert lived_s < TIMEOUT_S + GRACE_S, row
    for text in told:
        lines = text.strip().splitlines()
        assert len(lines) == 1, text
        holds_store = victim == 0 and "the store is gone, and with it the rank that holds it (rank 0" in lines[0]
        assert holds_store or f"rank {victim}" in lines[0], text
    return row


def test_the_others_end_in_time_and_name_the_rank() -> None:
    check("elastic", "SIGSTOP", 1, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SIGNALS)
def test_twenty_random_moments(kind: str, name: str) -> None:
    chance = random.Random(f"{kind} {name}")
    for _ in range(20):
        print(check(kind, name, chance.randrange(RANKS), chance.uniform(0.0, 1.0)))
