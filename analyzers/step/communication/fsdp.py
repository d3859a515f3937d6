"""FSDP2's all-gathers: how much of them stays exposed for each prefetch depth, and what to set. Start at :func:`plan_fsdp`.

This models ``fully_shard`` with one unit per block and one for the root, on CUDA streams that run ahead of the program:

- The network runs the collectives one after another in the order of issue.
- Forward: the all-gather of unit j is issued with the units before it and may start once compute of unit j - 1 - d has
  begun, where d is the number of units prefetched (1 by default: the gather waits for the copy-out of the unit before
  the current one).
- Backward: before unit i runs, the gathers of the next d units (in reverse) are issued (1 by default) and may start
  when unit i's compute does; after unit i, its reduce-scatter, for which compute waits until the one before is through.
  Every block is gathered again, the last one from the moment its forward has begun; the root stays gathered.
- With ``reshard_after_forward=False`` there are no gathers in backward.

Gathered and not yet freed parameters are what a deeper prefetch costs; the plan reports them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ddltool.analyzers.step.communication.nccl import Communicator
from ddltool.analyzers.step.communication.program import SMALL_GAIN, Program, share_saved
from ddltool.graph_results import FsdpFigures, PrefetchFigures
from ddltool.plans import PrefetchSetting
from ddltool.units import show_bytes, show_seconds

DEPTHS = (1, 2, 3, 4, 6, 8)
# A deeper prefetch must save this share of the step to be worth its memory.
_WORTHWHILE_SHARE = 0.002


@dataclass(frozen=True, slots=True)
class Unit:
    """One ``fully_shard`` unit: a block, or the root (name ""), in the order of forward."""

    name: str
    size_bytes: float
    """What is gathered: all parameters, frozen ones included."""
    gradient_bytes: float
    """What is reduced and scattered."""
    forward_s: float
    backward_s: float
    """Seconds of compute in each pass."""


def plan_fsdp(program: Program, group: Communicator) -> FsdpFigures | None:
    """Return FSDP2's default, its best prefetch depths, and its best without resharding; None: the model has no blocks.

    There is a unit for each block and one for the root. Of the settings within ``_WORTHWHILE_SHARE`` of the fastest, the one
    with the least memory for gathered parameters counts as best.
    """
    units_found = units_of(program)
    if units_found is None:
        return None
    root, units = units_found
    depths = sorted({min(depth, len(units)) for depth in DEPTHS})  # units gathered ahead
    candidates = [
        simulate_fsdp(root, units, group, forward_depth, backward_depth)
        for forward_depth in depths
        for backward_depth in depths
    ]
    default = simulate_fsdp(root, units, group, 1, 1)
    fastest = min(plan.step_s for plan in candidates)
    near_best = [plan for plan in candidates if plan.step_s <= fastest * (1 + _WORTHWHILE_SHARE)]
    best = min(near_best, key=lambda plan: (plan.gathered_bytes, plan.step_s, plan.forward_depth, plan.backward_depth))
    if default.step_s <= best.step_s * (1 + _WORTHWHILE_SHARE):
        best = default
    unresharded = [simulate_fsdp(root, units, group, forward_depth, 1, reshard=False) for forward_depth in depths]
    best_unresharded = min(unresharded, key=lambda plan: (plan.step_s, plan.forward_depth))
    names = [unit.name for unit in units]
    return FsdpFigures(
        units=names,
        default=default,
        best=best,
        without_reshard=best_unresharded,
        forward_prefetch=_prefetch_lists(names, best.forward_depth),
        backward_prefetch=_prefetch_lists(names[::-1], best.backward_depth),
        lower_bound_s=_lower_bound_s(root, units, group),
        verdict=_verdict(program, default, best, best_unresharded),
    )


def _prefetch_lists(names: Sequence[str], depth: int) -> dict[str, list[str]]:
    """Return, by block, the next ``depth`` blocks that it prefetches; {} for the default depth of 1, which needs no list.

    >>> _prefetch_lists(["a", "b", "c"], 2)
    {'a': ['b', 'c'], 'b': ['c']}
    """
    if depth <= 1:
        return {}
    return {name: list(names[index + 1 : index + 1 + depth]) for index, name in enumerate(names[:-1])}


def prefetch_setting(fsdp: FsdpFigures, chosen: PrefetchFigures | None = None) -> PrefetchSetting:
    """Return FSDP2's units and prefetch lists as a plan stores them, for the setting ``chosen``; None: for the best one."""
    chosen = fsdp.best if chosen is None else chosen
    return PrefetchSetting(
        units=fsdp.units,
        forward=_prefetch_lists(fsdp.units, chosen.forward_depth),
        backward=_prefetch_lists(fsdp.units[::-1], chosen.backward_depth),
        reshard_after_forward=chosen.reshard_after_forward,
        step_s=chosen.step_s,
        default_step_s=fsdp.default.step_s,
    )


def _verdict(program: Program, default: PrefetchFigures, best: PrefetchFigures, unresharded: PrefetchFigures) -> str:
    """Return a text that says what FSDP2's prefetch can gain and what to set.

    ``default``, ``best``: the steps with the default prefetch and with the best depths; ``unresharded``: the best step where
    parameters stay gathered after the forward pass.
    """
    gain = share_saved(best.step_s, default.step_s)
    text = f"FSDP2's default leaves {show_seconds(default.exposed_s)} of communication exposed; "
    if gain < SMALL_GAIN:
        text += f"prefetching further ahead saves less than {SMALL_GAIN:.0%}: leave the default."
    else:
        extra = show_bytes(best.gathered_bytes - default.gathered_bytes)
        depths = f"prefetch {best.forward_depth} blocks in forward and {best.backward_depth} in backward"
        text += f"{depths}: {gain:.1%} of the step saved for {extra} more."
    further_gain = share_saved(unresharded.step_s, best.step_s)
    if further_gain >= SMALL_GAIN:
        size = show_bytes(unresharded.gathered_bytes)
        text += (
            f" Where {size} of gathered parameters fit, reshard_after_forward=False saves another {further_gain:.1%}."
        )
    return text + program.starvation_advice(default.exposed_s)


def units_of(program: Program) -> tuple[Unit, list[Unit]] | None:
    """Return (root, blocks in forward order) with their bytes and seconds; None: there are no two numbered blocks in use.

    A block's forward pass lasts from its first use of a parameter to that of the next block; its backward pass ends with its
    last gradient and begins where the backward pass of the block after it ended. All other time is the root's.
    """
    container = block_container(program.held, program.held_bytes.tolist())
    if container is None:
        return None
    held_blocks = [block_of(name, container) for name in program.held]
    trained_blocks = [block_of(name, container) for name in program.parameters]
    names = sorted({name for name in held_blocks if name})
    first_use_s: dict[str, float] = {}  # by block, when an op first uses one of its parameters
    last_gradient_s: dict[str, float] = {}  # by block, when its last gradient is ready
    held_bytes: dict[str, float] = {}
    gradient_bytes: dict[str, float] = {}
    for name in names:
        is_held = np.array([other == name for other in held_blocks])
        is_trained = np.array([other == name for other in trained_blocks], dtype=bool)
        first_use_s[name] = float(program.first_use_s[is_held].min())
        held_bytes[name] = float(program.held_bytes[is_held].sum())
        gradient_bytes[name] = float(program.size_bytes[is_trained].sum())
        last_gradient_s[name] = float(program.ready_s[is_trained].max(initial=program.backward_s))
    names = [name for name in names if np.isfinite(first_use_s[name])]  # infinite: no op uses the block
    if len(names) < 2:
        return None
    names.sort(key=lambda name: (first_use_s[name], name))
    starts_s = [first_use_s[name] for name in names]
    # The last block ends where the root's own parameters are first used after it began (head, loss), or with the forward pass.
    uses = zip(program.first_use_s.tolist(), held_blocks, strict=True)
    late_root_uses_s = [use_s for use_s, name in uses if not name and starts_s[-1] < use_s < np.inf]
    ends_s = [*starts_s[1:], min([*late_root_uses_s, program.backward_s])]
    backward_s = _backward_seconds(program, trained_blocks, {name: last_gradient_s[name] for name in names})
    units = [
        Unit(name, held_bytes[name], gradient_bytes[name], max(0.0, end_s - start_s), backward_s[name])
        for name, start_s, end_s in zip(names, starts_s, ends_s, strict=True)
    ]
    blocks_s = sum(unit.forward_s + unit.backward_s for unit in units)
    root = Unit(
        name="",
        size_bytes=float(program.held_bytes.sum()) - sum(unit.size_bytes for unit in units),
        gradient_bytes=max(0.0, float(program.size_bytes.sum()) - sum(unit.gradient_bytes for unit in units)),
        forward_s=starts_s[0],
        backward_s=max(0.0, program.compute_s - blocks_s - starts_s[0]),
    )
    return root, units


def _backward_seconds(
    program: Program, trained_blocks: Sequence[str], last_gradient_s: Mapping[str, float]
) -> dict[str, float]:
    """Return, by block, the seconds of its backward pass: from the end of the one that ran before it to its last gradient.

    ``trained_blocks`` (p,): the block of each gradient in ready order, "" for the root. ``last_gradient_s``: by block, when
    its last gradient is ready. The first block to run begins after the root's gradients that come before it (the head's).
    """
    backward_order = sorted(last_gradient_s, key=lambda name: (last_gradient_s[name], name))
    first_block_s = last_gradient_s[backward_order[0]]
    ready_times = zip(program.ready_s.tolist(), trained_blocks, strict=True)
    head_ready_s = [ready_s for ready_s, name in ready_times if not name and ready_s < first_block_s]
    begin_s = max([program.backward_s, *head_ready_s])
    backward_s: dict[str, float] = {}
    for name in backward_order:
        backward_s[name] = max(0.0, last_gradient_s[name] - begin_s)
        begin_s = max(begin_s, last_gradient_s[name])
    return backward_s


def simulate_fsdp(
    root: Unit,
    units: Sequence[Unit],
    group: Communicator,
    forward_depth: int,
    backward_depth: int,
    *,
    reshard: bool = True,
    near: Communicator | None = None,
) -> PrefetchFigures:
    """Return the simulated step of one setting of prefetch and resharding. O(blocks x depth).

    Half of the root's backward time is taken to lie before the blocks (loss, head) and half after them (embeddings). Units
    without a gradient are not reduced.

    Args:
        root, units: what ``fully_shard`` gathers at once, the blocks in the order of their forward passes.
        group: the processes that gather and reduce.
        forward_depth, backward_depth: how many units ahead are gathered in each pass.
        reshard: whether a block's parameters are freed after its forward pass, and gathered again for its backward pass.
        near: the group that gathers for the backward pass, if it is another (``reshard_after_forward`` as a number).
    """
    # What each block's collectives take: its gathers in both passes, and its reduce-scatter.
    count = len(units)
    sizes = [unit.size_bytes for unit in units]
    gather_s = group.all_gather_s(np.array(sizes)).tolist()
    regather_s = gather_s if near is None else near.all_gather_s(np.array(sizes)).tolist()
    gradients = np.array([unit.gradient_bytes for unit in units])
    scatter_s = np.where(gradients > 0, group.reduce_scatter_s(gradients), 0.0).tolist()
    root_s = group.all_gather_s(root.size_bytes) if root.size_bytes else 0.0
    forward_end, last_begin_s = _run_forward(root, units, root_s, gather_s, forward_depth)
    blocks_begin = _FreeTimes(forward_end.network_s, forward_end.device_s + root.backward_s / 2)
    blocks_end = _run_backward(
        units, regather_s if reshard else None, scatter_s, backward_depth, blocks_begin, last_begin_s
    )
    device_s = blocks_end.device_s + root.backward_s / 2
    network_s = blocks_end.network_s
    if root.gradient_bytes:
        network_s = max(network_s, device_s) + group.reduce_scatter_s(root.gradient_bytes)
    total_compute_s = root.forward_s + root.backward_s + sum(unit.forward_s + unit.backward_s for unit in units)
    step_s = max(device_s, network_s)
    # Blocks that are gathered at one time: the current one, those ahead and, in forward alone, the one before.
    window = max(forward_depth + 2, backward_depth + 1) if reshard else count
    gathered_bytes = max(sum(sizes[low : low + window]) for low in range(max(1, count - window + 1)))
    return PrefetchFigures(
        forward_depth=forward_depth,
        backward_depth=backward_depth,
        reshard_after_forward=reshard,
        step_s=step_s,
        exposed_s=max(step_s - total_compute_s, 0.0),  # below 0 by rounding, where all of it is hidden
        gathered_bytes=root.size_bytes + gathered_bytes,
    )


class _FreeTimes(NamedTuple):
    """From when on the network and the device's compute are free, in seconds from the step's start."""

    network_s: float
    device_s: float


def _run_forward(
    root: Unit, units: Sequence[Unit], root_s: float, gather_s: Sequence[float], depth: int
) -> tuple[_FreeTimes, float]:
    """Return the free times after the forward pass, and the seconds at which its last block begins (0: there is no block).

    ``root_s``, ``gather_s`` (blocks,): seconds of the root's gather and of each block's. ``depth``: how many blocks ahead are
    gathered.
    """
    network_s = root_s
    device_s = network_s + root.forward_s  # the root is gathered before anything runs
    begin_s: list[float] = []
    for index, unit in enumerate(units):
        gate_index = index - 1 - depth  # the block that must have begun before this one may be gathered
        gate_s = begin_s[gate_index] if gate_index >= 0 else 0.0
        network_s = max(network_s, gate_s) + gather_s[index]
        begin_s.append(max(device_s, network_s))
        device_s = begin_s[-1] + unit.forward_s
    return _FreeTimes(network_s, device_s), begin_s[-1] if begin_s else 0.0


def _run_backward(
    units: Sequence[Unit],
    gather_s: Sequence[float] | None,
    scatter_s: Sequence[float],
    depth: int,
    free: _FreeTimes,
    last_begin_s: float,
) -> _FreeTimes:
    """Return the free times after the blocks' backward passes, which run from the last block to the first.

    Args:
        units: the blocks, in the order of their forward passes.
        gather_s: (blocks,) seconds of each block's gather; None: all blocks are gathered still.
        scatter_s: (blocks,) seconds of each block's reduce-scatter; 0: it has none.
        depth: how many blocks ahead are gathered.
        free: the free times before the first of these passes.
        last_begin_s: when the last block's forward pass began, from which on it may be gathered again.
    """
    network_s, device_s = free
    count = len(units)
    gathered_s = [0.0] * count  # when each block is gathered

    def gather(index: int, from_s: float) -> None:
        """Gather a block as soon as the network is free, and not before ``from_s``."""
        nonlocal network_s
        assert gather_s is not None
        network_s = max(network_s, from_s) + gather_s[index]
        gathered_s[index] = network_s

    issued = count  # how many blocks have been gathered, from the last one on
    if gather_s is not None:
        gather(count - 1, last_begin_s)
        issued = 1
    scattered_s = 0.0  # when the last reduce-scatter so far is through
    for step in range(count):
        index = count - 1 - step
        if step >= issued:  # the block was not prefetched
            gather(index, device_s)
            issued += 1
        block_begin_s = max(device_s, gathered_s[index])
        while issued < min(count, step + 1 + depth):
            gather(count - 1 - issued, block_begin_s)
            issued += 1
        # The buffer of the reduce-scatter before must be free.
        device_s = max(block_begin_s + units[index].backward_s, scattered_s)
        if scatter_s[index]:
            network_s = max(network_s, device_s) + scatter_s[index]
            scattered_s = network_s
    return _FreeTimes(network_s, device_s)


def _lower_bound_s(root: Unit, units: Sequence[Unit], group: Communicator) -> float:
    """Return a lower bound on the step's seconds for every prefetch depth, with and without resharding.

    It is the larger of two sums: all compute and the root's collectives, which overlap no compute; and every collective once.
    """
    compute_s = root.forward_s + root.backward_s + sum(unit.forward_s + unit.backward_s for unit in units)
    reduce_s = [group.reduce_scatter_s(unit.gradient_bytes) for unit in (root, *units) if unit.gradient_bytes]
    gather_s = [group.all_gather_s(unit.size_bytes) for unit in (root, *units) if unit.size_bytes]
    collectives_s = sum(gather_s) + sum(reduce_s)
    root_s = group.all_gather_s(root.size_bytes) if root.size_bytes else 0.0
    if root.gradient_bytes:
        root_s += group.reduce_scatter_s(root.gradient_bytes)
    return max(compute_s + root_s, collectives_s)


def block_of(parameter: str, container: str) -> str:
    """Return the block that a parameter belongs to, as ``CONTAINER.NUMBER``; "" if it belongs to the root.

    >>> block_of("model.layers.3.mlp.weight", "model.layers")
    'model.layers.3'
    """
    prefix = f"{container}." if container else ""
    if not parameter.startswith(prefix):
        return ""
    number = parameter[len(prefix) :].partition(".")[0]
    return f"{prefix}{number}" if number.isdigit() else ""


def block_container(parameters: Sequence[str], size_bytes: Sequence[float]) -> str | None:
    """Return the name of the list of blocks that holds most of the parameters' bytes, as ``model.layers``; None: there is none.

    ``parameters`` and ``size_bytes``: (q,) names and sizes. A list is recognized by two or more numbered members
    (``layers.0.weight``, ``layers.1.weight``); of lists with as many bytes the outermost is taken.
    """
    sizes: dict[str, float] = {}
    members: dict[str, set[str]] = {}
    for name, size in zip(parameters, size_bytes, strict=True):
        parts = name.split(".")
        for depth, part in enumerate(parts[:-1]):
            if part.isdigit():
                container = ".".join(parts[:depth])
                sizes[container] = sizes.get(container, 0.0) + size
                members.setdefault(container, set()).add(part)
    listed = [container for container, numbers in members.items() if len(numbers) > 1]
    if not listed:
        return None
    return min(listed, key=lambda container: (-sizes[container], container.count("."), container))
