"""What a profile says about a device: launch overhead, saturation batch, memory limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

if TYPE_CHECKING:
    import pandas as pd

# A batch is saturating when it reaches this share of the best measured throughput.
SATURATED = 0.9


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveSummary:
    """A device's throughput curve in three figures; None where the rows do not tell."""

    saturation_batch: int
    """Smallest measured local batch with 90 % of the best measured throughput."""
    memory_limit_batch: int | None
    """Largest local batch whose peak memory, extrapolated in a line, fits: predicted, not tried."""
    launch_overhead_s: float | None
    """Step time of an empty batch on the line through the measured ones."""


def summarise(frame: pd.DataFrame, memory_limit_bytes: float | None) -> dict[str, CurveSummary]:
    """Return a summary per device from a checked profile's rows with the fewest replicas."""
    found: dict[str, CurveSummary] = {}
    for device, rows in frame.groupby("device", sort=True):
        fewest = rows[rows["num_replicas"] == rows["num_replicas"].min()]
        medians = fewest.groupby("local_batch_size").median(numeric_only=True).sort_index()
        batches = medians.index.to_numpy(dtype=float)
        times = medians["step_time_s"].to_numpy(dtype=float)
        memory = medians["peak_memory_bytes"].to_numpy(dtype=float) if "peak_memory_bytes" in medians else None
        found[str(device)] = CurveSummary(
            saturation_batch=_saturation(batches, times),
            memory_limit_batch=_memory_limit(batches, memory, memory_limit_bytes),
            launch_overhead_s=_line(batches, times)[0] if len(batches) > 1 else None,
        )
    return found


def _saturation(batches: NDArray[np.float64], times: NDArray[np.float64]) -> int:
    speed = batches / times
    return int(batches[np.flatnonzero(speed >= SATURATED * speed.max())[0]])


def _line(batches: NDArray[np.float64], values: NDArray[np.float64]) -> tuple[float, float]:
    """Return intercept and slope, both >= 0, of the line with the least relative squared error."""
    weighted = np.stack([np.ones_like(batches), batches], axis=1) / values[:, None]
    solution, _ = nnls(weighted, np.ones_like(values))
    return float(solution[0]), float(solution[1])


def _memory_limit(
    batches: NDArray[np.float64], memory: NDArray[np.float64] | None, limit_bytes: float | None
) -> int | None:
    if (
        memory is None
        or limit_bytes is None
        or len(batches) < 2
        or not np.isfinite(memory).all()
        or (memory <= 0).any()
    ):
        return None
    base, each = _line(batches, memory)
    if each * batches[-1] < 0.01 * memory[-1]:
        return None  # memory does not grow with the batch beyond the noise
    return max(0, int((limit_bytes - base) / each))
