"""Training loops as people write them: each equals one process that sees all samples, or is refused in one line.

Uneven batches (12 and 20 of 32 for the hook and the balancer, 17 and 16 of 33 for the agent, in one pass and in two; and a
smaller last step), float64, two epochs. Of classes that nobody looked at while the hook was made there is a third outcome: what
only a comparison with one process finds.
"""

from __future__ import annotations

import re

import pytest

from tests.helpers.pattern_cases import CASES, outcome
from tests.helpers.pattern_workers import EVEN, LIMIT, RIGHT
from tests.helpers.runtime_workers import crew

FOUND = 1e-4
"""What a comparison with one process is sure to find."""


def marks(name: str, way: str) -> list[pytest.MarkDecorator]:
    """What is right with uneven batches is so with even ones: these are for who has the time."""
    is_easy = way == EVEN and CASES[name].truth in (RIGHT, LIMIT)
    return [pytest.mark.slow] if is_easy or name == "compiled loss" else []


TABLE = [pytest.param(name, way, marks=marks(name, way)) for name in CASES for way in CASES[name].ways]


@pytest.mark.parametrize(("name", "way"), TABLE)
def test_a_loop_is_what_is_said_of_it(name: str, way: str) -> None:
    truth = CASES[name].expected(way)
    for found in crew().run(outcome, name, way):
        if truth in (RIGHT, LIMIT):
            assert isinstance(found, float), found
            assert found < CASES[name].tolerance if truth == RIGHT else found > FOUND
        else:
            assert isinstance(found, str), f"off by {found:.2g} of the way, not refused"
            assert "\n" not in found
            assert re.search(truth, found), found
