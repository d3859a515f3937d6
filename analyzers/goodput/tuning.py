"""The batch that makes the most progress: local batch m and accumulation steps s of highest goodput, exact over integers.

Start at :func:`tune` (thousands of allocations at once), :func:`tune_one` or :func:`tune_mixed` (unlike devices).

Exact over integer m and s: :mod:`ddltool.analyzers.goodput.batch_search` has the search and why it misses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddltool.analyzers.goodput.batch_search import BatchLimits, BatchSearch, Line
from ddltool.analyzers.goodput.throughput import ThroughputParams, sync_time_s
from ddltool.errors import Infeasible, InputError

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tuned:
    """The best batch per allocation; arrays of shape (n,), all zero where no batch is allowed."""

    local_batch_size: Ints
    accumulation_steps: Ints
    total_batch_size: Ints
    goodput_per_s: Array

    @property
    def feasible(self) -> NDArray[np.bool_]:
        """Where a batch is allowed at all, shape (n,)."""
        return self.local_batch_size > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TunedOne:
    """The best batch for one allocation."""

    local_batch_size: int
    accumulation_steps: int
    total_batch_size: int
    goodput_per_s: float


def tune(
    params: ThroughputParams,
    num_nodes: ArrayLike,
    num_replicas: ArrayLike,
    limits: BatchLimits,
    *,
    noise_scale: float,
) -> Tuned:
    """Return the batch of highest goodput for each allocation (Pollux, Equation 13; exact over integer m and s).

    ``num_nodes`` and ``num_replicas`` broadcast to shape (n,). ``noise_scale`` phi >= 0 in samples; ``math.inf`` makes
    efficiency 1, so throughput alone counts. Goodput in useful samples per second, zeros where no batch is allowed.
    Raises InputError for an allocation or a noise scale that cannot be, and when a pass takes no time.
    """
    nodes, replicas = _allocations(num_nodes, num_replicas)
    lines = ((params.alpha_grad_s, params.beta_grad_s),)
    return _tune_distinct(lines, params, nodes, replicas, limits, noise_scale)


def tune_one(
    params: ThroughputParams, num_nodes: int, num_replicas: int, limits: BatchLimits, *, noise_scale: float
) -> TunedOne:
    """Return the batch of highest goodput for one allocation. Raises Infeasible, naming the limits, when none is allowed."""
    found = tune(params, num_nodes, num_replicas, limits, noise_scale=noise_scale)
    if not found.feasible[0]:
        accumulation = limits.max_accumulation_steps
        raise Infeasible(
            f"no batch fits {num_replicas} replicas: no multiple of {num_replicas} from {limits.initial_batch_size} to "
            f"{limits.max_batch_size} samples has local batches of {limits.min_local_batch_size} to "
            f"{limits.max_local_batch_size} with {'any' if accumulation is None else f'at most {accumulation}'} "
            "accumulation steps"
        )
    return TunedOne(
        local_batch_size=int(found.local_batch_size[0]),
        accumulation_steps=int(found.accumulation_steps[0]),
        total_batch_size=int(found.total_batch_size[0]),
        goodput_per_s=float(found.goodput_per_s[0]),
    )


def tune_mixed(
    models: Mapping[str, ThroughputParams],
    counts: Mapping[str, ArrayLike],
    num_nodes: ArrayLike,
    limits: BatchLimits,
    *,
    noise_scale: float,
    max_local_batch_sizes: Mapping[str, int] | None = None,
) -> Tuned:
    """Return the best equal local batch on unlike devices: a synchronous step waits for the slowest of those used.

    ``counts[type]`` are the devices of each type per allocation, broadcasting with ``num_nodes`` to shape (n,). The models
    of all types share their synchronisation parameters and gamma. ``max_local_batch_sizes`` are further limits by type.
    ``X = max_i (a_i + b_i m)`` is still convex, so all of the above holds piece by piece. Raises InputError when types
    differ between the mappings or in the shared parameters.
    """
    if not counts:
        raise InputError("counts", "names no device type", "give at least one")
    unknown = sorted((set(counts) | set(max_local_batch_sizes or {})) - set(models))
    if unknown:
        raise InputError("counts", f'names "{unknown[0]}"', f"known device types: {', '.join(sorted(models))}")
    names = sorted(counts)
    shared = models[names[0]]
    for name in names[1:]:
        same = replace(models[name], alpha_grad_s=shared.alpha_grad_s, beta_grad_s=shared.beta_grad_s)
        if same != shared:
            raise InputError(f"models:{name}", f"synchronises otherwise than {names[0]}", "share those parameters")
    arrays = np.broadcast_arrays(np.atleast_1d(num_nodes), *(np.atleast_1d(counts[name]) for name in names))
    per_type: Ints = np.stack([_whole(name, array) for name, array in zip(names, arrays[1:], strict=True)])
    if (per_type < 0).any():
        raise InputError("counts", "has a negative number of devices", "use 0 for types that are not used")
    nodes, replicas = _allocations(arrays[0], per_type.sum(axis=0))
    used = (1 << np.arange(len(names))) @ (per_type > 0)
    count = len(nodes)
    out = Tuned(
        local_batch_size=np.zeros(count, dtype=np.int64),
        accumulation_steps=np.zeros(count, dtype=np.int64),
        total_batch_size=np.zeros(count, dtype=np.int64),
        goodput_per_s=np.zeros(count),
    )
    for group in np.unique(used):
        members = np.flatnonzero(used == group)
        present = [name for bit, name in enumerate(names) if group >> bit & 1]
        lines = tuple((models[name].alpha_grad_s, models[name].beta_grad_s) for name in present)
        most = min([limits.max_local_batch_size] + [(max_local_batch_sizes or {}).get(n, math.inf) for n in present])
        if most < limits.min_local_batch_size:
            continue
        own = replace(limits, max_local_batch_size=int(most))
        found = _tune_distinct(lines, shared, nodes[members], replicas[members], own, noise_scale)
        for field in fields(Tuned):
            getattr(out, field.name)[members] = getattr(found, field.name)
    return out


def _whole(name: str, values: ArrayLike) -> Ints:
    given = np.asarray(values)
    made = given.astype(np.int64)
    if given.dtype.kind not in "iu" and not np.array_equal(made, given):
        raise InputError(name, "has a value that is no integer", "give whole numbers")
    return made


def _allocations(num_nodes: ArrayLike, num_replicas: ArrayLike) -> tuple[Ints, Ints]:
    nodes, replicas = np.broadcast_arrays(
        np.atleast_1d(_whole("num_nodes", num_nodes)), np.atleast_1d(_whole("num_replicas", num_replicas))
    )
    if nodes.size and (nodes.min() < 1 or (replicas < nodes).any()):
        bad = int(np.flatnonzero((nodes < 1) | (replicas < nodes))[0])
        raise InputError(
            f"allocation {bad}", f"has {replicas[bad]} replicas on {nodes[bad]} nodes", "each node has at least one"
        )
    return nodes, replicas


def _tune_distinct(
    lines: Sequence[Line],
    shared: ThroughputParams,
    nodes: Ints,
    replicas: Ints,
    limits: BatchLimits,
    noise_scale: float,
) -> Tuned:
    """Return the answer per allocation, searching once per (replicas, one node or several): nothing else matters."""
    if not noise_scale >= 0:
        raise InputError(
            "noise_scale", f"is {noise_scale}", "give a number of samples >= 0, or inf for throughput alone"
        )
    if max(alpha + beta for alpha, beta in lines) <= 0:
        raise InputError("params", "say that a pass takes no time", "alpha_grad_s or beta_grad_s must be above 0")
    keys = 2 * replicas + (nodes > 1)
    most = int(keys.max(initial=0))
    if most <= 16 * len(keys) + 1024:
        seen = np.zeros(most + 1, dtype=bool)
        seen[keys] = True
        distinct = np.flatnonzero(seen)
        place = np.zeros(most + 1, dtype=np.int64)
        place[distinct] = np.arange(len(distinct))
        where = place[keys]
    else:
        distinct, where = np.unique(keys, return_inverse=True)
    alone = distinct // 2
    sync = np.asarray(sync_time_s(shared, 1 + distinct % 2, alone), dtype=np.float64)
    search = BatchSearch(lines, shared.gamma, sync, alone.astype(np.float64), limits, noise_scale)
    real_local, real_passes, cost = search.run()
    scale = 1.0 if math.isinf(noise_scale) else noise_scale + limits.initial_batch_size
    goodput = np.where(real_local > 0, scale / cost, 0.0)
    local: Ints = real_local.astype(np.int64)
    passes: Ints = real_passes.astype(np.int64)
    return Tuned(
        local_batch_size=local[where],
        accumulation_steps=np.maximum(passes - 1, 0)[where],
        total_batch_size=(alone * local * passes)[where],
        goodput_per_s=goodput[where],
    )
