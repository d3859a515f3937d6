"""What each GPU type would bring a job, as believed: the tables that Sia's and our policy choose from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.scheduling.cluster import ClusterSpec, count_gpus
from ddltool.analyzers.scheduling.job import SimulatedJob

Floats = NDArray[np.float64]
# No job is given more replicas than in the published simulator.
MOST_REPLICAS = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Offer:
    """A job's believed goodput on one GPU type, over that on one GPU of its first type."""

    gpu_type: str
    speedup: Floats
    """(2, m + 1): row 0 within a node, row 1 across nodes; 0 where it cannot run."""
    held: int
    """GPUs that it holds of this type, 0 if none."""
    row: int
    """The row of what it holds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Offers:
    """All types on which a job can run."""

    job: SimulatedJob
    most: int
    """Replicas that it may be given."""
    remaining_s: float | None
    """Seconds left on one GPU of its first type, as believed; None before anything was seen of it."""
    by_type: tuple[Offer, ...]


def offers(job: SimulatedJob, cluster: ClusterSpec) -> Offers:
    """Return what each type of the cluster would bring a job. Before anything was seen, speedups count the GPUs."""
    most = min(job.most_replicas, MOST_REPLICAS)
    held = count_gpus(job.allocation)
    held_type = cluster.type_of(job.allocation) if held else None
    wide = max(most, held, 1)
    base: float | None = None
    made = []
    for name in job.gpu_types:
        table = job.goodput_table(wide, name)
        if table is not None and base is None and table[0, 1] > 0:
            base = float(table[0, 1])
        speedup = np.tile(np.arange(wide + 1.0), (2, 1)) if table is None or base is None else table / base
        speedup[0, max(cluster.gpus[node] for node in cluster.nodes_of(name)) + 1 :] = 0.0
        speedup[1, :2] = 0.0
        made.append(
            Offer(
                gpu_type=name,
                speedup=speedup,
                held=held if name == held_type else 0,
                row=min(len(job.allocation), 2) - 1,
            )
        )
    remaining = job.remaining_samples() / base if base else None
    return Offers(job=job, most=most, remaining_s=remaining, by_type=tuple(made))
