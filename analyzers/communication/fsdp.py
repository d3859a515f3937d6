"""FSDP2's all-gathers: how much stays exposed for each prefetch depth, and what to set. Start at :func:`plan_fsdp`.

What ``fully_shard`` does with one unit per block and one for the root, on CUDA streams that run ahead of the program:

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

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddltool.analyzers.communication.program import SMALL_GAIN, Program, share_saved
from ddltool.analyzers.costs.nccl import Communicator
from ddltool.graph_results import FsdpFigures, PrefetchFigures
from ddltool.plans import PrefetchSetting
from ddltool.units import show_bytes, show_seconds

DEPTHS = (1, 2, 3, 4, 6, 8)
# A deeper prefetch must save this share of the step to be worth its memory.
_WORTH = 0.002


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


def plan_fsdp(program: Program, group: Communicator) -> FsdpFigures | None:
    """Return FSDP2's default, the best depths, and the best without resharding, one unit per block; None without a list
    of blocks.
    """
    found = units_of(program)
    if found is None:
        return None
    root, units = found
    depths = sorted({min(depth, len(units)) for depth in DEPTHS})
    tried = [simulate_fsdp(root, units, group, ahead, back) for ahead in depths for back in depths]
    default = simulate_fsdp(root, units, group, 1, 1)
    fastest = min(plan.step_s for plan in tried)
    enough = [plan for plan in tried if plan.step_s <= fastest * (1 + _WORTH)]
    best = min(enough, key=lambda plan: (plan.gathered_bytes, plan.step_s, plan.forward_depth, plan.backward_depth))
    if default.step_s <= best.step_s * (1 + _WORTH):
        best = default
    without = [simulate_fsdp(root, units, group, ahead, 1, reshard=False) for ahead in depths]
    kept = min(without, key=lambda plan: (plan.step_s, plan.forward_depth))
    names = [unit.name for unit in units]
    return FsdpFigures(
        units=names,
        default=default,
        best=best,
        without_reshard=kept,
        forward_prefetch=_ahead(names, best.forward_depth),
        backward_prefetch=_ahead(names[::-1], best.backward_depth),
        lower_bound_s=_lower(root, units, group),
        verdict=_verdict(program, default, best, kept),
    )


def _ahead(names: Sequence[str], depth: int) -> dict[str, list[str]]:
    """Return for each block those to prefetch, in order; empty: leave the default."""
    if depth <= 1:
        return {}
    return {name: list(names[place : place + depth]) for place, name in enumerate(names[:-1], start=1)}


def prefetch_setting(fsdp: FsdpFigures, chosen: PrefetchFigures | None = None) -> PrefetchSetting:
    """Return FSDP2's units and prefetch lists for a plan, of the best setting by default."""
    chosen = fsdp.best if chosen is None else chosen
    return PrefetchSetting(
        units=fsdp.units,
        forward=_ahead(fsdp.units, chosen.forward_depth),
        backward=_ahead(fsdp.units[::-1], chosen.backward_depth),
        reshard_after_forward=chosen.reshard_after_forward,
        step_s=chosen.step_s,
        default_step_s=fsdp.default.step_s,
    )


def _verdict(program: Program, default: PrefetchFigures, best: PrefetchFigures, kept: PrefetchFigures) -> str:
    """Return in words what FSDP2's prefetch can gain and what to set."""
    gain = share_saved(best.step_s, default.step_s)
    text = f"FSDP2's default leaves {show_seconds(default.exposed_s)} of communication exposed; "
    if gain < SMALL_GAIN:
        text += f"prefetching further ahead saves less than {SMALL_GAIN:.0%}: leave the default."
    else:
        extra = show_bytes(best.gathered_bytes - default.gathered_bytes)
        depths = f"prefetch {best.forward_depth} blocks in forward and {best.backward_depth} in backward"
        text += f"{depths}: {gain:.1%} of the step saved for {extra} more."
    if (more := share_saved(kept.step_s, best.step_s)) >= SMALL_GAIN:
        size = show_bytes(kept.gathered_bytes)
        text += f" Where {size} of gathered parameters fit, reshard_after_forward=False saves another {more:.1%}."
    return text + program.starved(default.exposed_s)


def units_of(program: Program) -> tuple[Unit, list[Unit]] | None:
    """Return the root and the blocks in forward order, or None without a numbered list of blocks.

    A block's forward runs from its first use of a parameter to the next block's; its backward ends with its last
    gradient and begins where the block after it ended. The root gets the time before the first and after the last.
    """
    container = block_container(program.held, program.held_bytes.tolist())
    if container is None:
        return None
    held = [block_of(name, container) for name in program.held]
    trained = [block_of(name, container) for name in program.parameters]
    names = sorted({name for name in held if name})
    first, last, size, gradient = {}, {}, {}, {}
    for name in names:
        mine = np.array([other == name for other in held])
        ready = np.array([other == name for other in trained], dtype=bool)
        first[name] = float(program.first_use_s[mine].min())
        size[name] = float(program.held_bytes[mine].sum())
        gradient[name] = float(program.size_bytes[ready].sum())
        last[name] = float(program.ready_s[ready].max(initial=program.backward_s))
    names = [name for name in names if np.isfinite(first[name])]
    if len(names) < 2:
        return None
    names.sort(key=lambda name: (first[name], name))
    starts = [first[name] for name in names]
    # Ops of the root after the last block (head, loss) are not told from it by first use alone: the root's own
    # parameters used later mark them.
    uses = zip(program.first_use_s.tolist(), held, strict=True)
    rooted = [use for use, name in uses if not name and starts[-1] < use < 1e300]
    ends = [*starts[1:], min([*rooted, program.backward_s])]
    by_backward = sorted(names, key=lambda name: (last[name], name))
    # The root's own gradients before the first block's are the model's head's.
    limit_s, times = last[by_backward[0]], zip(program.ready_s.tolist(), trained, strict=True)
    before = max([program.backward_s, *(at for at, name in times if not name and at < limit_s)])
    backward: dict[str, float] = {}
    for name in by_backward:
        backward[name] = max(0.0, last[name] - before)
        before = max(before, last[name])
    units = [
        Unit(name, size[name], gradient[name], max(0.0, end - start), backward[name])
        for name, start, end in zip(names, starts, ends, strict=True)
    ]
    total = sum(unit.forward_s + unit.backward_s for unit in units)
    root = Unit(
        name="",
        size_bytes=float(program.held_bytes.sum()) - sum(unit.size_bytes for unit in units),
        gradient_bytes=max(0.0, float(program.size_bytes.sum()) - sum(unit.gradient_bytes for unit in units)),
        forward_s=starts[0],
        backward_s=max(0.0, program.compute_s - total - starts[0]),
    )
    return root, units


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
    """Return a step with one setting. O(blocks x depth). ``near``: who gathers again for the backward pass, if not all.

    The root's backward time is taken to lie half before the blocks (loss, head) and half after (embeddings). Units without
    a gradient are not reduced.
    """
    count = len(units)
    sizes = [unit.size_bytes for unit in units]
    gather = group.all_gather_s(np.array(sizes)).tolist()
    again = gather if near is None else near.all_gather_s(np.array(sizes)).tolist()
    gradients = np.array([unit.gradient_bytes for unit in units])
    scatter = np.where(gradients > 0, group.reduce_scatter_s(gradients), 0.0).tolist()
    network = group.all_gather_s(root.size_bytes) if root.size_bytes else 0.0
    now = network + root.forward_s  # the root is gathered before anything runs
    begun: list[float] = []
    for place, unit in enumerate(units):
        gate = place - 1 - forward_depth
        network = max(network, begun[gate] if gate >= 0 else 0.0) + gather[place]
        begun.append(max(now, network))
        now = begun[-1] + unit.forward_s
    now += root.backward_s / 2
    gathered = [0.0] * count
    issued = 1 if reshard else count
    if reshard:
        network = max(network, begun[-1]) + again[-1]
        gathered[-1] = network
    scattered = 0.0
    for step in range(count):
        here = count - 1 - step
        if step >= issued:
            network = max(network, now) + again[here]
            gathered[here] = network
            issued += 1
        begin = max(now, gathered[here])
        while issued < min(count, step + 1 + backward_depth):
            following = count - 1 - issued
            network = max(network, begin) + again[following]
            gathered[following] = network
            issued += 1
        now = max(begin + units[here].backward_s, scattered)  # the buffer of the reduce-scatter before must be free
        if scatter[here]:
            network = max(network, now) + scatter[here]
            scattered = network
    now += root.backward_s / 2
    if root.gradient_bytes:
        network = max(network, now) + group.reduce_scatter_s(root.gradient_bytes)
    compute = root.forward_s + root.backward_s + sum(unit.forward_s + unit.backward_s for unit in units)
    step_s = max(now, network)
    window = max(forward_depth + 2, backward_depth + 1) if reshard else count
    held = max(sum(sizes[low : low + window]) for low in range(max(1, count - window + 1)))
    return PrefetchFigures(
        forward_depth=forward_depth,
        backward_depth=backward_depth,
        reshard_after_forward=reshard,
        step_s=step_s,
        exposed_s=step_s - compute,
        gathered_bytes=root.size_bytes + held,
    )


def _lower(root: Unit, units: Sequence[Unit], group: Communicator) -> float:
    """Return a bound for every depth and for both ways of resharding."""
    compute = root.forward_s + root.backward_s + sum(unit.forward_s + unit.backward_s for unit in units)
    reduced = [group.reduce_scatter_s(unit.gradient_bytes) for unit in (root, *units) if unit.gradient_bytes]
    wire = sum(group.all_gather_s(unit.size_bytes) for unit in (root, *units) if unit.size_bytes) + sum(reduced)
    edges = group.all_gather_s(root.size_bytes) if root.size_bytes else 0.0
    edges += group.reduce_scatter_s(root.gradient_bytes) if root.gradient_bytes else 0.0
    return max(compute + edges, wire)


def block_of(parameter: str, container: str) -> str:
    """Return the block that a parameter belongs to: ``container.NUMBER``, or "" for the root."""
    prefix = f"{container}." if container else ""
    if not parameter.startswith(prefix):
        return ""
    number = parameter[len(prefix) :].partition(".")[0]
    return f"{prefix}{number}" if number.isdigit() else ""


def block_container(parameters: Sequence[str], size_bytes: Sequence[float]) -> str | None:
    """Return the list of blocks that holds most of the parameters' bytes, as ``model.layers``; None if there is none.

    ``parameters`` and ``size_bytes``: (q,) names and sizes. A list is whatever numbers its members: ``layers.0.weight``,
    ``layers.1.weight``; the outermost one wins a tie.
    """
    sizes: dict[str, float] = {}
    members: dict[str, set[str]] = {}
    for name, size in zip(parameters, size_bytes, strict=True):
        parts = name.split(".")
        for place, part in enumerate(parts[:-1]):
            if part.isdigit():
                container = ".".join(parts[:place])
                sizes[container] = sizes.get(container, 0.0) + size
                members.setdefault(container, set()).add(part)
    listed = [container for container, numbers in members.items() if len(numbers) > 1]
    if not listed:
        return None
    return min(listed, key=lambda container: (-sizes[container], container.count("."), container))
