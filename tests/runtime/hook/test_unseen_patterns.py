"""Loops of classes that nobody looked at while the hook was made: right, refused, or a limit that only a comparison finds.

Forty updates in two epochs with a smaller last batch, under an uneven plan and an even one, float64.
"""

from __future__ import annotations

import re

import pytest

from tests.helpers.runtime_workers import crew
from tests.helpers.unseen_loops import LIMIT, RIGHT, UNSEEN, outcome

TOLERANCE, FOUND = 1e-6, 1e-4
"""What rounding may come to, and what a comparison with one process is sure to find."""
PLANS = {"uneven": (12, 20), "even": (16, 16)}
EASY = {("even", "right"), ("even", "limit")}
TABLE = [
    # What is right with uneven batches is so with even ones: these are for who has the time.
    pytest.param(
        name, plan, marks=[pytest.mark.slow] if "compiled" in name or (plan, UNSEEN[name].truth) in EASY else []
    )
    for name in UNSEEN
    for plan in PLANS
]


@pytest.mark.parametrize(("name", "plan"), TABLE)
def test_a_loop_is_what_is_said_of_it(name: str, plan: str) -> None:
    truth = UNSEEN[name].truth
    for found in crew().run(outcome, name, PLANS[plan]):
        if truth in (RIGHT, LIMIT):
            assert isinstance(found, float), found
            assert found < TOLERANCE if truth == RIGHT else found > FOUND
        else:
            assert isinstance(found, str), f"off by {found:.2g} of the way, not refused"
            assert "\n" not in found
            assert re.search(truth, found), found
