"""From counts per GPU type to nodes: what the policies for mixed clusters share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.scheduling.cluster import Allocation, ClusterSpec, count_gpus
from ddltool.analyzers.scheduling.search import Choice, pack, search

Floats = NDArray[np.float64]
Placed = list[tuple[int, Allocation]]
"""(place in the list of choices, allocation) of the jobs that got GPUs."""


def flat(choice: Choice) -> Floats:
    """Return the least cost of each count (m + 1,), wherever its GPUs stand, the current allocation included.

    The array is longer where the job holds more GPUs than it may newly be given.
    """
    made = np.minimum(choice.within, choice.across)
    made[0] = choice.within[0]
    held = count_gpus(choice.base)
    if held >= len(made):
        made = np.concatenate([made, np.full(held + 1 - len(made), np.inf)])
    if held:
        made[held] = min(made[held], choice.keep)
    return np.asarray(made)


def search_type(choices: Sequence[Choice], cluster: ClusterSpec, gpu_type: str, effort: int, seed: int) -> Placed:
    """Return allocations on the nodes of one type of small total cost, by :func:`search`."""
    nodes = cluster.nodes_of(gpu_type)
    found = search(_local(choices, nodes), [cluster.gpus[node] for node in nodes], effort=effort, seed=seed)
    return _global(found.allocations, nodes)


def pack_type(choices: Sequence[Choice], counts: Sequence[int], cluster: ClusterSpec, gpu_type: str) -> Placed:
    """Return allocations on the nodes of one type of about ``counts`` (n,) GPUs, which must fit, by :func:`pack`."""
    nodes = cluster.nodes_of(gpu_type)
    return _global(pack(_local(choices, nodes), [cluster.gpus[node] for node in nodes], counts), nodes)


def _local(choices: Sequence[Choice], nodes: Sequence[int]) -> list[Choice]:
    """Return the choices with nodes numbered within the type."""
    local = {node: at for at, node in enumerate(nodes)}
    return [replace(one, base=tuple((local[node], count) for node, count in one.base)) for one in choices]


def _global(allocations: Sequence[Allocation], nodes: Sequence[int]) -> Placed:
    return [
        (at, tuple((nodes[node], count) for node, count in allocation))
        for at, allocation in enumerate(allocations)
        if allocation
    ]
