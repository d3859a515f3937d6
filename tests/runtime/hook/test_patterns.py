"""Training loops as people write them: each equals one process that sees all samples, or is refused in one line.

Uneven batches (12 and 20 of 32 for the hook and the balancer, 17 and 16 of 33 for the agent, in one pass and in two; and a
smaller last step), float64, two epochs; no third outcome.
"""

from __future__ import annotations

import re

import pytest

from tests.helpers.pattern_workers import CASES, outcome
from tests.helpers.runtime_workers import crew

TABLE = [(name, way) for name in sorted(CASES) for way in CASES[name].ways]


@pytest.mark.parametrize(("name", "way"), TABLE)
def test_a_loop_is_right_or_refused(name: str, way: str) -> None:
    expected = CASES[name].expected(way)
    for found in crew().run(outcome, name, way):
        if not expected:
            assert isinstance(found, float), found
            assert found < CASES[name].tolerance
        else:
            assert isinstance(found, str), f"off by {found:.2g} of the way, not refused"
            assert "\n" not in found
            assert re.search(expected, found), found
