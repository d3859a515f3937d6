"""EasyScale's intra-job scheduler (section 3.4): the throughput on a job's devices, and the gain of more devices.

Its role 1 is :func:`best_throughput`, role 2 :func:`proposals`; :func:`accept` is the cluster's side of role 3. Throughput is
exact: ``max_workers`` over the smallest step time in which the devices run every EST. Functions are pure: the cluster
simulator and the ``companion`` command call them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import cast

import numpy as np

from ddltool.analyzers.job.placement.problem import check_capability, exact
from ddltool.analyzers.job.placement.steps import StepTable, integer_weights, smallest_step, step_table
from ddltool.errors import InputError, did_you_mean
from ddltool.graph import natural_key

# For more step times than these, making a table takes longer than it saves.
_LARGEST_TABLE = 50_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """A job's request for ``count`` more devices of one type."""

    device_type: str
    count: int
    throughput: float
    """Logical mini-batches per second with these devices added."""
    speedup: float
    """Throughput over that on the held devices; when nothing is held, over that of one device of the slowest known type."""
    speedup_per_gpu: float
    """Gain in throughput, relative as in ``speedup``, divided by ``count``."""


def best_throughput(capability: Mapping[str, float], held: Mapping[str, int], max_workers: int) -> float:
    """Return the highest throughput on the held devices in logical mini-batches per second (role 1); 0 when nothing is held.

    ``capability``: device type -> mini-batches per second of one EST (logical worker) alone; ``held``: device type -> devices;
    ``max_workers``: ESTs of the job. Exact (EasyScale, Equation 1), in some microseconds. Raises InputError for capabilities
    that are not positive, negative counts, types without a capability, or ``max_workers`` below 1.
    """
    names = _checked_names(capability, held, max_workers)
    if not names:
        return 0.0
    weights = _weights(tuple(float(capability[name]) for name in names))
    smallest = smallest_step(weights, [min(held[name], max_workers) for name in names], max_workers)
    if smallest is None:
        return 0.0
    k, type_index = smallest
    return _throughput(capability[names[type_index]], k, max_workers)


def proposals(
    capability: Mapping[str, float],
    held: Mapping[str, int],
    free: Mapping[str, int],
    max_workers: int,
    top_k: int,
    homogeneous: bool,
) -> list[Proposal]:
    """Return the ``top_k`` best requests for more devices of one type, highest speedup per device first (role 2).

    Of equal speedups per device, more devices come first, then the type's name decides. A count is proposed only if the job is
    faster with it than with one device fewer.

    Args:
        capability: device type -> mini-batches per second of one EST (logical worker) alone.
        held: device type -> devices that the job has.
        free: device type -> devices that the job could get.
        max_workers: ESTs of the job.
        top_k: most requests to return.
        homogeneous: whether the job must run on one type: then it asks only for the type that it holds, if it holds any.

    Raises InputError as :func:`best_throughput` does, and for a ``top_k`` below 1.
    """
    if top_k < 1:
        raise InputError("top_k", f"is {top_k}", "ask for one proposal at least")
    offered = _checked_names(capability, free, max_workers)
    names_held = _checked_names(capability, held, max_workers)
    if homogeneous and names_held:  # where it holds several types, it runs on the one with most throughput
        kept_name = max(names_held, key=lambda name: best_throughput(capability, {name: held[name]}, max_workers))
        offered = [name for name in offered if name == kept_name]
        names_held = [kept_name]
    if not offered:
        return []
    used = {name: held[name] for name in names_held}
    held_throughput = best_throughput(capability, used, max_workers)
    # a job that holds nothing is compared with one device of the slowest type
    reference = held_throughput or min(float(value) for value in capability.values())
    candidates: list[Proposal] = []
    for name in offered:
        throughputs = _throughputs_with_added(capability, used, name, free[name], max_workers)
        for count, (previous, throughput) in enumerate(pairwise([held_throughput, *throughputs]), start=1):
            if throughput > previous:
                candidates.append(
                    Proposal(
                        device_type=name,
                        count=count,
                        throughput=throughput,
                        speedup=throughput / reference,
                        speedup_per_gpu=(throughput - held_throughput) / reference / count,
                    )
                )
    return sorted(candidates, key=_sort_key)[:top_k]


def accept(offers: Iterable[tuple[str, Proposal]], free: Mapping[str, int]) -> list[tuple[str, Proposal]]:
    """Return the (job, proposal) pairs that a cluster grants (EasyScale, section 3.4).

    Pairs are taken in the order of speedup per device, then more devices, then the job's name in natural order. One is granted
    if the ``free`` devices (by type) suffice and its job has no grant yet.
    """
    left = dict(free)
    granted: list[tuple[str, Proposal]] = []
    served: set[str] = set()
    for job, proposal in sorted(offers, key=lambda offer: (*_sort_key(offer[1])[:2], natural_key(offer[0]))):
        if job not in served and proposal.count <= left.get(proposal.device_type, 0):
            left[proposal.device_type] -= proposal.count
            served.add(job)
            granted.append((job, proposal))
    return granted


def _sort_key(proposal: Proposal) -> tuple[float, int, tuple[tuple[int, int, str], ...]]:
    """Return the key by which the better proposal sorts first: speedup per device, then more devices, then the type's name.

    Speedups are rounded to nine digits, so that rounding errors do not decide between equal ones.
    """
    return -float(f"{proposal.speedup_per_gpu:.9g}"), -proposal.count, natural_key(proposal.device_type)


def _checked_names(capability: Mapping[str, float], counts: Mapping[str, int], max_workers: int) -> list[str]:
    """Return the types with a positive count, in natural order of their names.

    Raises InputError as :func:`best_throughput` does.
    """
    if max_workers < 1:
        raise InputError("max_workers", f"is {max_workers}", "at least one logical worker")
    for name, count in counts.items():
        if count < 0:
            raise InputError(f"devices.{name}", f"is {count}", "a number of devices is 0 or more")
        if count and name not in capability:
            raise InputError(f"devices.{name}", "has no capability", did_you_mean(name, capability))
        if count:
            check_capability(f"capability.{name}", capability[name])
    return sorted((name for name, count in counts.items() if count), key=natural_key)


def _throughputs_with_added(
    capability: Mapping[str, float], held: Mapping[str, int], name: str, free: int, max_workers: int
) -> Sequence[float]:
    """Return the throughputs, in mini-batches per second, with 1, 2, ... more devices of the type ``name``.

    The last is with ``free`` devices or, as more cannot help, with ``max_workers``. ``held``: device type -> devices held.
    """
    names = sorted({*held, name}, key=natural_key)
    capabilities = tuple(float(capability[type_name]) for type_name in names)
    max_added = min(free, max_workers)
    held_counts = [min(held.get(type_name, 0), max_workers) for type_name in names]
    # one row of device counts by type for each number of added devices
    vectors = np.tile(held_counts, (max_added, 1)).astype(np.int64)
    vectors[:, names.index(name)] += np.arange(1, max_added + 1)
    if max_workers * len(names) > _LARGEST_TABLE:  # one bisection per number of added devices instead of a table
        weights = _weights(capabilities)
        throughputs: list[float] = []
        for counts in vectors.tolist():
            smallest = smallest_step(weights, counts, max_workers)
            if smallest is not None:
                k, type_index = smallest
                throughputs.append(_throughput(capabilities[type_index], k, max_workers))
        return throughputs
    table = _table(capabilities, max_workers)
    return cast(list[float], table.throughputs[table.smallest_steps(vectors)].tolist())


@lru_cache(maxsize=4096)
def _weights(capabilities: tuple[float, ...]) -> tuple[int, ...]:
    """Return whole numbers in the exact ratio of the capabilities; cached, because simulated jobs ask again and again."""
    return integer_weights(tuple(exact(capability) for capability in capabilities))


@lru_cache(maxsize=512)
def _table(capabilities: tuple[float, ...], max_workers: int) -> StepTable:
    """Return the table of step times of types with these capabilities; cached, as :func:`_weights` is."""
    return step_table(tuple(exact(capability) for capability in capabilities), max_workers)


def _throughput(capability: float, k: int, max_workers: int) -> float:
    """Return the mini-batches per second of a job whose step takes ``k / capability`` seconds.

    A step computes a mini-batch for each of ``max_workers`` logical workers (ESTs). The device that ends last computes ``k`` of
    them, ``capability`` of them per second. The result is rounded once, at the end, so that equal throughputs compare as equal.
    """
    return float(max_workers * exact(capability) / k)
