"""Capability: mini-batches per second of one logical worker (EST) alone on a device (EasyScale's C_i)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ddltool.errors import InputError, did_you_mean
from ddltool.graph import COMPUTE, Graph

if TYPE_CHECKING:
    import pandas as pd


def capability_from_profile(frame: pd.DataFrame, device_type: str, batch_size: int, where: str) -> float:
    """Return 1 / step time at ``batch_size`` from a checked profile's single-replica rows, in mini-batches per second.

    Between measured batch sizes the step time is interpolated linearly. Raises InputError when the profile has no such
    device (a profile of one device serves any type) or when ``batch_size`` lies outside what was measured.
    """
    single = frame[frame["num_replicas"] == 1]
    if "accumulation_steps" in single.columns:  # a step of several passes is no mini-batch of its local batch size
        single = single[single["accumulation_steps"].fillna(0) == 0]
    devices = sorted(set(single["device"]))
    if len(devices) != 1:
        if device_type not in devices:
            problem = f"has no single-replica rows of device {device_type!r}"
            raise InputError(
                where, problem, did_you_mean(device_type, devices) if devices else "profile with --replicas 1"
            )
        single = single[single["device"] == device_type]
    times = single.groupby("local_batch_size")["step_time_s"].median().sort_index()
    batches = times.index.to_numpy(dtype=float)
    if not batches[0] <= batch_size <= batches[-1]:
        problem = f"covers local batch sizes {batches[0]:.0f} to {batches[-1]:.0f}, not the job's {batch_size}"
        raise InputError(where, problem, f"profile with --batch-sizes up to {batch_size}")
    return 1.0 / float(np.interp(batch_size, batches, times.to_numpy(dtype=float)))


def capability_from_graph(graph: Graph) -> float:
    """Return 1 / step time of a timed graph, its update included, in mini-batches (of the graph's batch size) per second.

    Raises InputError when the graph takes no time.
    """
    total = float(graph.duration_s[graph.kind == COMPUTE].sum()) + float(graph.meta.get("update_s") or 0.0)
    if not total > 0:
        raise InputError(graph.name, f"its compute ops take {total} s", "use a timed graph with work in it")
    return 1.0 / total
