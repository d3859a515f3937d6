"""Telemetry as observations for a fit."""

from __future__ import annotations

import pandas as pd
import pytest

from ddltool.analyzers.goodput.observations import from_frame
from ddltool.analyzers.goodput.throughput import ThroughputParams, iteration_time_s

PARAMS = ThroughputParams(
    alpha_grad_s=0.02,
    beta_grad_s=0.01,
    alpha_sync_local_s=0.05,
    beta_sync_local_s=0.0,
    alpha_sync_node_s=0.0,
    beta_sync_node_s=0.0,
    gamma=1.0,
)


@pytest.mark.parametrize("passes", [None, 1, 4])
def test_samples_that_came_in_several_passes_are_counted_per_pass(passes: int | None) -> None:
    """Compute of the whole step and its batch are those of all passes; the model speaks of one."""
    count = passes or 1
    grad = 0.02 + 0.01 * 8
    row = {"rank": 0, "world_size": 2, "num_nodes": 1, "batch": 8 * count, "wait_s": 0.0}
    rows = [{**row, "step": step, "compute_s": grad * count, "sync_s": 0.05} for step in range(10)]
    if passes is not None:
        rows = [{**entry, "passes": passes} for entry in rows]
    seen = from_frame(pd.DataFrame(rows), "telemetry.jsonl")
    assert seen.local_batch_size.tolist() == [8.0]
    assert seen.grad_time_s.tolist() == pytest.approx([grad])
    assert seen.accumulation_steps.tolist() == [count - 1.0]
    assert seen.step_time_s[0] == pytest.approx(float(iteration_time_s(PARAMS, 1, 2, 8, count - 1)))
