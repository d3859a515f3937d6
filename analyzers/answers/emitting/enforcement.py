"""From a plan to the hook's configuration, and the parts of a plan that a target cannot express.

A *target* is a framework or launcher that a plan is written for; its *gaps* are the parts of the plan that its text leaves
out or assumes, each with a remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ddltool.analyzers.answers.emitting.layout import ProcessLayout, plan_hash
from ddltool.errors import InputError
from ddltool.plans import Enforcement, Plan, RankEnforcement

Target = Literal["hook", "torchrun", "kubernetes", "slurm", "fsdp2", "ddp", "torchtitan", "accelerate", "deepspeed"]
_HOOK = "emit --target hook and ddltool.runtime.attach do it"
# The targets whose processes run with the hook: launchers pass it enforce.json.
_ENFORCED: tuple[Target, ...] = ("hook", "torchrun", "slurm", "kubernetes")
# Frameworks with settings of their own; their modules report gaps in batches, passes and checkpointing themselves.
_FRAMEWORKS: tuple[Target, ...] = ("torchtitan", "accelerate", "deepspeed")
# The targets that can run groups of devices: with tensor parallelism alone, and with stages of a pipeline.
_TENSOR: tuple[Target, ...] = ("torchtitan", "accelerate", "deepspeed", "fsdp2", "torchrun", "slurm", "kubernetes")
_PIPELINE: tuple[Target, ...] = ("torchtitan", "torchrun", "slurm", "kubernetes")
# (part of a plan, whether a plan has it, the targets that express it, the remedy for the others), in the order of the output.
_CONTENTS: tuple[tuple[str, Callable[[Plan], object], tuple[Target, ...], str], ...] = (
    ("weights of uneven gradients", lambda plan: len(_batch_sizes(plan)) > 1, _ENFORCED, _HOOK),
    ("order of parameters", lambda plan: any(p.priority is not None for p in plan.parameters), _ENFORCED, _HOOK),
    (
        "DDP buckets",
        lambda plan: plan.ddp and (plan.sharding is None or plan.sharding.kind == "ddp"),
        (*_ENFORCED, "ddp"),
        "emit --target ddp",
    ),
    (
        "FSDP2 units and prefetch",
        lambda plan: plan.fsdp2 and (plan.sharding is None or plan.sharding.kind != "ddp"),
        (*_ENFORCED, "fsdp2"),
        "emit --target fsdp2",
    ),
    (
        "activations on the host",
        lambda plan: plan.sharding and plan.sharding.on_host,
        _ENFORCED,
        "emit --target hook and ddltool.runtime.shard do it; without, they stay on the devices, which may not hold them",
    ),
    (
        "accumulation steps",
        lambda plan: (
            (plan.goodput and plan.goodput.accumulation_steps) or any(r.accumulation_steps for r in plan.assignments)
        ),
        (*_FRAMEWORKS, "ddp", "fsdp2"),
        "accumulate in the script: the local batch size holds all passes",
    ),
    (
        "sequence parallelism",
        lambda plan: plan.group is not None and plan.group.tensor > 1,
        ("torchtitan", *_ENFORCED),
        "each GPU of a tensor group norms all tokens, which takes more memory than planned; torchtitan splits them",
    ),
    (
        "LoRA",
        lambda plan: plan.run is not None and plan.run.lora,
        (),
        "the script adds the adapters and freezes the rest, as peft does",
    ),
    (
        "4-bit weights",
        lambda plan: plan.run is not None and plan.run.load_in_4bit,
        (),
        "the script loads them with load_in_4bit=True of bitsandbytes",
    ),
    (
        "channels_last",
        lambda plan: plan.run is not None and plan.run.channels_last,
        (),
        "the script puts the model and its images into it, .to(memory_format=torch.channels_last)",
    ),
    (
        "logical workers",
        lambda plan: any(row.ests_per_device > 1 for row in plan.assignments),
        (),
        "attach runs them as one larger batch per device; ElasticTrainer.planned runs them in turns and keeps their bits",
    ),
    (
        "supersteps",
        lambda plan: plan.superstep,
        (),
        "the script takes its batches from ddltool.runtime.servers.follow, without DDP; the last rank is the server, on a CPU",
    ),
    (
        "device types",
        lambda plan: len({row.device_type for row in plan.assignments}) > 1,
        _ENFORCED,
        "start the processes in the order of LOCAL_BATCH_SIZES; --target torchrun, kubernetes and slurm do it",
    ),
)


_MOST_RANKS = 100_000


def demand_words_for_groups(plan: Plan, target: Target, where: str) -> None:
    """Raise InputError, which names targets that work, if the plan's ranks are groups that ``target`` cannot run.

    A group is several devices that hold one copy of the model by tensor or pipeline parallelism. ``where``: the plan's
    file, for the message.
    """
    if plan.group is None:
        return
    able = _PIPELINE if plan.group.pipeline > 1 else _TENSOR
    if target not in able:
        problem = f"each device is a group of {plan.group.text}, for which --target {target} has no words"
        raise InputError(f"{where}:group", problem, f"give --target {', '.join(able[:-1])} or {able[-1]}")


def to_enforcement(plan: Plan, *, telemetry: str | None = "telemetry.jsonl") -> Enforcement:
    """Return the configuration that the hook reads in each training process: a rank per used device, in the plan's order.

    A rank's ``ests`` are its logical workers, and its local batch has the samples of all of them. ``telemetry``: the
    file that the hook writes; None: no file. Raises InputError for more than 100,000 processes.
    """
    if plan.world_size > _MOST_RANKS:
        problem = f"are {plan.world_size:,} devices"
        raise InputError(
            "plan:assignments", problem, f"a configuration is written for at most {_MOST_RANKS:,} processes"
        )
    # For each rank its assignment: the devices of an assignment have ranks one after another.
    assignment_of_ranks = [row for row in plan.assignments for _ in range(row.devices)]
    ranks = [
        RankEnforcement(
            rank=rank,
            device_type=row.device_type,
            ests=row.ests_per_device,
            local_batch_size=row.local_batch_size,
            accumulation_steps=row.accumulation_steps,
        )
        for rank, row in enumerate(assignment_of_ranks)
    ]
    return Enforcement(
        job=plan.job,
        strategy=plan.strategy,
        world_size=len(ranks),
        total_batch_size=sum(rank.local_batch_size for rank in ranks),
        ranks=ranks,
        parameters=plan.parameters,
        ddp=plan.ddp,
        fsdp2=plan.fsdp2,
        sharding=plan.sharding,
        superstep=plan.superstep,
        telemetry=telemetry,
        plan_sha256=plan_hash(plan),
    )


def not_expressed(plan: Plan, target: Target, layout: ProcessLayout | None = None) -> list[str]:
    """Return the gaps: the parts of a plan that the target leaves out or assumes, each as ``PART: remedy``.

    ``layout``: the nodes, for a target that starts processes; None: for any other.
    """
    gaps = [
        f"{content}: {remedy}"
        for content, has_content, targets, remedy in _CONTENTS
        if has_content(plan) and target not in targets
    ]
    # A launcher of groups only starts the script, which must set up everything else itself.
    if plan.group is not None and target in _ENFORCED:
        able = "torchtitan" if plan.group.pipeline > 1 else "torchtitan, accelerate, deepspeed or fsdp2"
        gaps = [f"parts of the model, batches and passes: the script's, as --target {able} writes them"]
    if layout is not None and layout.assumed:
        gaps.append(
            "nodes: the plan does not say how many devices a node has; one node per device type is assumed (--devices-per-node)"
        )
    return gaps


def _batch_sizes(plan: Plan) -> set[int]:
    """Return the different local batch sizes of a plan."""
    return {row.local_batch_size for row in plan.assignments}
