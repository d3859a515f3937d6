"""What lengths are predicted to gain against what they gain in processes that compute attention."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.bench_lengths import EDGES, SCALES, SHARES, lengths_like, table


def test_drawn_lengths_have_the_published_shares() -> None:
    for name, shares in SHARES.items():
        lengths = lengths_like(name, 100_000)
        for edge, share in zip(EDGES[1:], shares, strict=True):
            assert (lengths <= edge / SCALES[name]).mean() == pytest.approx(share, abs=0.005)


@pytest.mark.slow
def test_gains_are_as_predicted_on_three_public_distributions() -> None:
    """Nine gains, of three ways each: within a tenth in the median; each within a seventh, for cores are shared."""
    rows = table([*SHARES], steps=8, repeats=3)
    errors = np.array([expected / found - 1 for ways in rows.values() for expected, found in ways.values()])
    assert np.median(np.abs(errors)) < 0.10
    assert np.abs(errors).max() < 0.15
    assert min(found for ways in rows.values() for _, found in ways.values()) > 1.5
