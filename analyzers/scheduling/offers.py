"""What Sia's and our policy share: what each GPU type would bring a job, as believed, and from counts per type to nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.scheduling.cluster import Allocation, ClusterSpec, count_gpus
from ddltool.analyzers.scheduling.job import SimulatedJob
from ddltool.analyzers.scheduling.search import Choice, flat, pack, search

Floats = NDArray[np.float64]
# No job is given more replicas than in the published simulator.
MOST_REPLICAS = 64
Placed = list[tuple[int, Allocation]]
"""(place in the list of choices, allocation) of the jobs that got GPUs."""


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
    made, row = [], min(len(job.allocation), 2) - 1
    for name in job.gpu_types:
        table = job.goodput_table(wide, name)
        if table is not None and base is None and table[0, 1] > 0:
            base = float(table[0, 1])
        speedup = np.tile(np.arange(wide + 1.0), (2, 1)) if table is None or base is None else table / base
        speedup[0, max(cluster.gpus[node] for node in cluster.nodes_of(name)) + 1 :] = 0.0
        speedup[1, :2] = 0.0
        made.append(Offer(gpu_type=name, speedup=speedup, held=held if name == held_type else 0, row=row))
    remaining = job.remaining_samples() / base if base else None
    return Offers(job=job, most=most, remaining_s=remaining, by_type=tuple(made))


def tables(by_type: Mapping[str, Choice], names: Sequence[str]) -> list[Floats]:
    """Return what each count on each of the types ``names`` costs one job; nothing costs the same on all of them."""
    made = [flat(by_type[name]) if name in by_type else np.zeros(1) for name in names]
    for table in made:
        table[0] = next(iter(by_type.values())).within[0]
    return made


def place_on_type(
    choices: Sequence[Choice],
    cluster: ClusterSpec,
    gpu_type: str,
    *,
    counts: Sequence[int] | None = None,
    effort: int = 0,
    seed: int = 0,
) -> Placed:
    """Return allocations on the nodes of one type: of small total cost, or of about ``counts`` (n,), which must fit."""
    nodes = cluster.nodes_of(gpu_type)
    gpus = [cluster.gpus[node] for node in nodes]
    local = {node: at for at, node in enumerate(nodes)}
    here = [replace(one, base=tuple((local[node], count) for node, count in one.base)) for one in choices]
    found = search(here, gpus, effort=effort, seed=seed).allocations if counts is None else pack(here, gpus, counts)
    return [(at, tuple((nodes[node], count) for node, count in made)) for at, made in enumerate(found) if made]
