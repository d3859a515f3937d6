"""A plan in the terms that training frameworks share: degrees of parallelism, and equal batches in equal passes.

What a plan has and such terms lack are *gaps*: sentences ``PART: remedy`` for the top of the written file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddltool.decision import Layout
from ddltool.errors import InputError
from ddltool.plans import Plan, StepSettings

Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """The degrees of parallelism, and the batch of each data-parallel rank (a process, or a group of them)."""

    replicate: int
    """Number of replicas: sets of ranks that hold the whole state together."""
    shard: int
    """Number of ranks of a replica."""
    tensor: int
    """Degree of tensor parallelism: processes that share the products of every block."""
    pipeline: int
    """Degree of pipeline parallelism: processes that have some of the blocks each."""
    reshard: bool
    """Whether gathered parameters are freed after the forward pass; False: as in ZeRO-2."""
    sharded: bool
    """Whether the state is sharded at all; False: DDP."""
    offload: bool
    """Whether the state is kept in the hosts' memory."""
    batch_size: int
    """Samples of a rank in a step, over all its passes."""
    passes: int
    """Number of equal forward and backward passes of a step; of a pipeline, of its micro-batches."""

    @property
    def ranks(self) -> int:
        """Number of data-parallel ranks."""
        return self.replicate * self.shard

    @property
    def processes(self) -> int:
        """Number of processes: one per GPU."""
        return self.ranks * self.tensor * self.pipeline

    @property
    def micro_batch_size(self) -> int:
        """Samples of a rank in one pass."""
        return self.batch_size // self.passes

    @property
    def total_batch_size(self) -> int:
        """Samples of all ranks in a step."""
        return self.ranks * self.batch_size


def shares(plan: Plan, target: str) -> tuple[Shares, list[str]]:
    """Return the plan's degrees for a framework with one batch size for all ranks, and the gaps: where they differ from it.

    If the planned number of passes does not divide the batch, the next larger one that does is taken, which keeps the
    total batch and needs no more memory. Raises InputError for a plan of unequal batches, which such a framework cannot
    express. ``target``: the framework's name, for messages.
    """
    sizes = sorted({row.local_batch_size for row in plan.assignments})
    if len(sizes) > 1:
        problem = f"has one batch size for all, and the plan gives its devices {sizes[0]} to {sizes[-1]} samples a step"
        raise InputError(f"--target {target}", problem, "give --target hook, torchrun, slurm or kubernetes")
    samples = sizes[0]
    planned = planned_passes(plan)
    # There is always one: as many passes as samples.
    passes = next(count for count in range(min(planned, samples), samples + 1) if samples % count == 0)
    gaps = []
    if passes != planned:
        gaps.append(
            f"passes: {samples} samples in {planned} passes are unequal ones; here {passes} of {samples // passes}"
        )
    sharding = plan.sharding
    is_sharded = plan.group is not None if sharding is None else sharding.kind != "ddp"
    if sharding is None:
        gaps.append(f"sharding: the plan knows nothing of memory; {'FSDP2' if is_sharded else 'DDP'} is written")
    replicate = 1 if sharding is None else sharding.replicate
    if not is_sharded:
        replicate = plan.world_size
    degrees = Shares(
        replicate=replicate,
        shard=plan.world_size // replicate,
        tensor=1 if plan.group is None else plan.group.tensor,
        pipeline=1 if plan.group is None else plan.group.pipeline,
        reshard=reshards(plan),
        sharded=is_sharded,
        offload=sharding is not None and sharding.offload,
        batch_size=samples,
        passes=passes,
    )
    return degrees, gaps


def planned_passes(plan: Plan) -> int:
    """Return the number of forward and backward passes in a step, the largest over all ranks; at least 1.

    Logical workers that take turns on a device make one pass each.
    """
    passes = [1]
    if plan.goodput is not None:
        passes.append(plan.goodput.accumulation_steps + 1)
    for row in plan.assignments:
        passes += [row.accumulation_steps + 1, row.ests_per_device]
    return max(passes)


def reshards(plan: Plan) -> bool:
    """Return whether gathered parameters are freed after the forward pass, by the plan's prefetch or its picked layout.

    True, FSDP2's default, for a plan that has neither.
    """
    if plan.fsdp2 is not None:
        return plan.fsdp2.reshard_after_forward
    picked = _picked_layout(plan)
    return picked is None or picked.reshard_after_forward


def recomputation(plan: Plan) -> tuple[Checkpointing, list[str]]:
    """Return a framework's mode of activation checkpointing, and the gaps: what it leaves out of the plan.

    "none"; "full": every block is computed again; "selective": only some blocks, or blocks that keep some products.
    Frameworks do not name single modules, so "selective" leaves out which ones.
    """
    entries = [] if plan.sharding is None else plan.sharding.checkpointing
    if not entries:
        return "none", []
    blocks = block_names(plan)
    is_every_block = not blocks or {entry.module for entry in entries} >= set(blocks)
    keeping_count = sum(bool(entry.keeps) for entry in entries)
    if is_every_block and not keeping_count:
        return "full", []
    modules_text = f"{len(entries)} modules are computed again"
    if keeping_count:
        modules_text += f", {keeping_count} of them without chosen products"
    return "selective", [f"activation checkpointing by module: {modules_text}; emit --target fsdp2 or ddp names them"]


def block_names(plan: Plan) -> list[str]:
    """Return the names of the model's blocks in order: FSDP2's units, else those in the names of the parameters.

    The parameter ``layers.10.mlp.weight`` is in the block ``layers.10``.
    """
    if plan.fsdp2 is not None:
        return list(plan.fsdp2.units)
    number_by_block: dict[str, int] = {}
    for parameter in plan.parameters:
        parts = parameter.name.split(".")
        position = next((index for index, part in enumerate(parts) if part.isdigit()), None)
        if position is not None:
            number_by_block[".".join(parts[: position + 1])] = int(parts[position])
    return sorted(number_by_block, key=lambda name: (name.rpartition(".")[0], number_by_block[name]))


def run_settings(plan: Plan) -> tuple[StepSettings, list[str]]:
    """Return the settings of a step (precision, optimizer, compilation, ...), and the gaps.

    A plan of an earlier version has no settings: the defaults are returned, with one gap that says so.
    """
    if plan.run is not None:
        return plan.run, []
    return StepSettings(), [
        "precision, optimizer, compile, tokens: the plan does not say them; plan again, or set them"
    ]


def _picked_layout(plan: Plan) -> Layout | None:
    """Return the layout that the plan's comparison picked, its first; None if there is none of the plan's sharding."""
    layouts = [] if plan.decision is None else plan.decision.layouts
    if not layouts or plan.sharding is None or layouts[0].sharding not in ("none", plan.sharding.kind):
        return None
    return layouts[0]
