"""What a profile says about a device: launch overhead, saturation batch, linear part, memory limit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

if TYPE_CHECKING:
    import pandas as pd

# A batch is saturating when it reaches this share of the best measured throughput.
SATURATED = 0.9
# Step times lie on a line when it misses none of them by more than this.
LINEAR = 0.05

Origin = Literal["measured", "extrapolated"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveSummary:
    """A device's throughput curve in a few figures; None where the rows do not tell."""

    saturation_batch: int
    """Smallest measured local batch with 90 % of the best measured throughput."""
    memory_limit_batch: int | None
    """Largest local batch that fits in memory."""
    memory_limit_origin: Origin | None
    """Whether that batch ran and the next one did not, or a line through the peak memories says so."""
    launch_overhead_s: float | None
    """Step time of an empty batch on the line through the measured ones."""
    linear_from_batch: int | None
    """Smallest measured batch from which on one line holds all step times to 5 %; None without three such batches."""
    seconds_per_sample: float | None
    """Slope of that line."""


def summarise(
    frame: pd.DataFrame, memory_limit_bytes: float | None, measured_limits: Mapping[str, int | None] | None = None
) -> dict[str, CurveSummary]:
    """Return a summary per device from a checked profile's rows with the fewest replicas and no accumulation.

    ``memory_limit_bytes``: what a line through the peak memories is extrapolated to, for devices that are not in
    ``measured_limits``, the largest batch that ran by device (None: memory sets no limit).
    """
    if "accumulation_steps" in frame and (frame["accumulation_steps"].fillna(0) == 0).any():
        frame = frame[frame["accumulation_steps"].fillna(0) == 0]
    found: dict[str, CurveSummary] = {}
    for device, rows in frame.groupby("device", sort=True):
        fewest = rows[rows["num_replicas"] == rows["num_replicas"].min()]
        medians = fewest.groupby("local_batch_size").median(numeric_only=True).sort_index()
        batches = medians.index.to_numpy(dtype=float)
        times = medians["step_time_s"].to_numpy(dtype=float)
        memory = medians["peak_memory_bytes"].to_numpy(dtype=float) if "peak_memory_bytes" in medians else None
        origin: Origin | None = "measured"
        limit = (measured_limits or {}).get(str(device))
        if measured_limits is None or str(device) not in measured_limits:
            limit = _memory_limit(batches, memory, memory_limit_bytes)
            origin = "extrapolated" if limit is not None else None
        linear = _linear_part(batches, times)
        found[str(device)] = CurveSummary(
            saturation_batch=_saturation(batches, times),
            memory_limit_batch=limit,
            memory_limit_origin=origin,
            launch_overhead_s=line(batches, times)[0] if len(batches) > 1 else None,
            linear_from_batch=linear[0] if linear else None,
            seconds_per_sample=linear[1] if linear else None,
        )
    return found


def _saturation(batches: NDArray[np.float64], times: NDArray[np.float64]) -> int:
    speed = batches / times
    return int(batches[np.flatnonzero(speed >= SATURATED * speed.max())[0]])


def _linear_part(batches: NDArray[np.float64], times: NDArray[np.float64]) -> tuple[int, float] | None:
    """Return the first batch from which on one line holds all times, and the line's slope."""
    for first in range(len(batches) - 2):
        base, each = line(batches[first:], times[first:])
        if np.abs((base + each * batches[first:]) / times[first:] - 1).max() <= LINEAR:
            return int(batches[first]), each
    return None


def line(batches: NDArray[np.float64], values: NDArray[np.float64]) -> tuple[float, float]:
    """Return intercept and slope, both >= 0, of the line with the least relative squared error; arrays of shape (n,)."""
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
    base, each = line(batches, memory)
    if each * batches[-1] < 0.01 * memory[-1]:
        return None  # memory does not grow with the batch beyond the noise
    return max(0, int((limit_bytes - base) / each))
