"""Branch and bound over whole numbers, against looking at all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ddltool.search import search_counts

falls = st.lists(st.integers(0, 20), min_size=1, max_size=40)


@given(falls, st.data(), st.integers(0, 50))
def test_the_best_number_is_found_or_bounded(fewer: list[int], data: st.DataObject, looks: int) -> None:
    """Costs are the sum of one that never rises and one that never falls, as computing and synchronising are."""
    more = data.draw(st.lists(st.integers(0, 20), min_size=len(fewer), max_size=len(fewer)))
    computing, synchronising = sorted(fewer, reverse=True), sorted(more)
    costs = [sum(pair) for pair in zip(computing, synchronising, strict=True)]
    last = len(costs) - 1

    def bound(low: int, high: int) -> int:
        return computing[high] + synchronising[low]

    best, unopened = search_counts(0, last, costs.__getitem__, bound)
    assert costs[best] == min(costs)
    assert unopened is None or unopened >= min(costs)
    turns = iter(range(looks))
    early, left = search_counts(0, last, costs.__getitem__, bound, lambda: next(turns, None) is None)
    assert min(costs[early], costs[early] if left is None else left) <= min(costs) <= costs[early]
