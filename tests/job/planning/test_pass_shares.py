"""How samples are shared out among devices of several types in each pass of a step, against every possibility."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.job.goodput.throughput import StepTime
from ddltool.analyzers.job.planning.layout_batches import LayoutBatches
from ddltool.analyzers.step.costs.sharding import Sharding

TIMES = st.builds(
    StepTime, launch_s=st.sampled_from([0.0, 0.1, 1.0]), per_sample_s=st.sampled_from([0.2, 0.45, 1.0, 3.0])
)
TYPE = st.tuples(TIMES, st.integers(1, 3), st.integers(1, 6))  # time of a pass, devices, most samples of a pass


@settings(max_examples=300, deadline=None)
@given(st.lists(TYPE, min_size=2, max_size=3), st.integers(1, 60), st.integers(1, 6))
def test_a_pass_is_as_short_as_any_split_makes_it(types: list[Any], total: int, passes: int) -> None:
    names = [f"t{index}" for index in range(len(types))]
    times, counts, limits = (dict(zip(names, column, strict=True)) for column in zip(*types, strict=True))
    figures: Any = SimpleNamespace(total=total, _pass_line=lambda name, *_: times[name])
    rows = LayoutBatches._shares(figures, counts, limits, Sharding(kind="fsdp"), "none", passes, False)
    pass_total = math.ceil(total / passes)
    # By type, the largest share of a device in a pass; each smaller one is possible, too.
    possible = [
        sizes
        for sizes in itertools.product(*(range(1, limits[name] + 1) for name in names))
        if sum(counts.values())
        <= pass_total
        <= sum(counts[name] * size for name, size in zip(names, sizes, strict=True))
    ]
    if rows is None:
        assert not possible
        return
    assert sum(row.devices * row.size for row in rows) == total
    assert {name: sum(row.devices for row in rows if names[row.kind] == name) for name in names} == counts
    largest = [math.ceil(row.size / passes) for row in rows]
    assert all(size <= limits[names[row.kind]] for row, size in zip(rows, largest, strict=True))
    slowest_s = max(times[names[row.kind]].seconds(max(size, 1)) for row, size in zip(rows, largest, strict=True))
    best_s = min(max(times[name].seconds(size) for name, size in zip(names, sizes, strict=True)) for sizes in possible)
    assert slowest_s <= best_s * (1 + 1e-9)
