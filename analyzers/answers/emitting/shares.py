"""A plan in the terms that training frameworks share: degrees of parallelism, and equal batches in equal passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ddltool.decision import Layout
from ddltool.errors import InputError
from ddltool.plans import Plan, StepSettings

Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Who shares the model's state, and what each data-parallel rank (a process or a group) does in a step."""

    replicate: int
    """Sets of ranks that hold the whole state each."""
    shard: int
    """Ranks of such a set."""
    tensor: int
    """Processes that share every block's products."""
    pipeline: int
    """Processes that have some of the blocks each."""
    reshard: bool
    """Whether gathered parameters are given up after the forward pass; False: ZeRO-2's way."""
    sharded: bool
    """Whether the state is sharded at all; False: DDP."""
    offload: bool
    """Whether the state is kept in the hosts' memory."""
    batch_size: int
    """Samples of a rank in a step, all passes together."""
    passes: int
    """Equal forward and backward passes of a step; of a pipeline, its micro-batches."""

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
    """Return what a framework with one batch size for all ranks is told, and what of it is not quite the plan's.

    ``target``: the framework's name, for messages. Where the planned number of passes does not divide the batch, the
    next larger one that does is taken, which keeps the total batch and needs no more memory. Raises InputError for a
    plan of unequal batches, which such a framework cannot say.
    """
    sizes = sorted({row.local_batch_size for row in plan.assignments})
    if len(sizes) > 1:
        problem = f"has one batch size for all, and the plan gives its devices {sizes[0]} to {sizes[-1]} samples a step"
        raise InputError(f"--target {target}", problem, "give --target hook, torchrun, slurm or kubernetes")
    planned = planned_passes(plan)
    # The batch itself divides the batch, so there is always one.
    passes = next(n for n in range(min(planned, sizes[0]), sizes[0] + 1) if sizes[0] % n == 0)
    gaps = []
    if passes != planned:
        gaps.append(
            f"passes: {sizes[0]} samples in {planned} passes are unequal ones; here {passes} of {sizes[0] // passes}"
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
        batch_size=sizes[0],
        passes=passes,
    )
    return degrees, gaps


def planned_passes(plan: Plan) -> int:
    """Return how many forward and backward passes a rank makes for one optimizer step, the most over all ranks; at least 1.

    Logical workers that take turns on a device make one pass each.
    """
    steps = 0 if plan.goodput is None else plan.goodput.accumulation_steps
    return max(steps + 1, *(max(row.accumulation_steps + 1, row.ests_per_device) for row in plan.assignments), 1)


def reshards(plan: Plan) -> bool:
    """Return whether gathered parameters are given up after the forward pass, as the plan's prefetch or comparison says.

    True, FSDP2's default, where neither says it.
    """
    if plan.fsdp2 is not None:
        return plan.fsdp2.reshard_after_forward
    picked = _picked_layout(plan)
    return picked is None or picked.reshard_after_forward


def recomputation(plan: Plan) -> tuple[Checkpointing, list[str]]:
    """Return a framework's word for which modules are computed again in the backward pass, and what that word leaves out.

    "none"; "full": every block, with nothing kept; "selective": every block, with the products that it keeps, or only
    some blocks. Frameworks do not name single modules, so which ones is left out.
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
    """Return the names of the model's blocks, in the model's order: the units of FSDP2, or else what the parameters number.

    The parameter ``layers.10.mlp.weight``, for one, lies in the block ``layers.10``.
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
    """Return how the plan's step is run (precision, optimizer, compilation), and a list of what the plan does not say of it.

    Plans of earlier versions say nothing; the defaults then stand in.
    """
    if plan.run is not None:
        return plan.run, []
    return StepSettings(), [
        "precision, optimizer, compile, tokens: the plan does not say them; plan again, or set them"
    ]


def _picked_layout(plan: Plan) -> Layout | None:
    """Return the layout that the plan's comparison picked (the first); None where it did not choose between layouts."""
    layouts = [] if plan.decision is None else plan.decision.layouts
    if not layouts or plan.sharding is None or layouts[0].sharding not in ("none", plan.sharding.kind):
        return None
    return layouts[0]
