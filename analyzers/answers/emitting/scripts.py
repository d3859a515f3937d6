"""A plan as scripts for torchrun and sbatch, and as Python modules that need torch alone; their text is in templates/."""

from __future__ import annotations

import pprint
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ddltool.analyzers.answers.emitting.layout import (
    EqualNodes,
    LaunchSettings,
    ProcessLayout,
    cluster_name,
    one_word,
    plan_hash,
)
from ddltool.analyzers.answers.emitting.shares import block_names, planned_passes, reshards
from ddltool.errors import InputError
from ddltool.plans import PRODUCTS, Plan
from ddltool.precision import precision_of

CORES = 4
"""Cores for a process and its data loaders, where a launcher must request them: Slurm's default is one."""


def torchrun_script(plan: Plan, layout: ProcessLayout, settings: LaunchSettings, *, gaps: Sequence[str]) -> str:
    """Return a bash script that is run once on every node and starts the node's processes with torchrun.

    Its own arguments are appended to those of the training script. On several nodes it needs the variables ``NODE_RANK``,
    which decides the number of processes, and ``MASTER_ADDR``. torchrun's static rendezvous numbers processes node by
    node, so rank r is rank r of the plan. ``gaps``: the parts of the plan that are left out, for comments.
    """
    return _fill_template("torchrun.sh", plan, gaps, layout, script=shlex.join(settings.script))


def slurm_script(plan: Plan, layout: ProcessLayout, settings: LaunchSettings, *, gaps: Sequence[str]) -> str:
    """Return a batch script for sbatch: one task per node, which starts the node's processes with torchrun.

    Different nodes are components of a heterogeneous job (``#SBATCH hetjob``), in the order of ranks. Devices are
    requested as Slurm's generic resources (GRES), ``RESOURCE:TYPE:COUNT``, with TYPE from :func:`gres_type`. ``gaps``:
    the parts of the plan that are left out, for comments.
    """
    script = shlex.join(settings.script)
    return _fill_template(
        "slurm.sh", plan, gaps, layout, script=script, gres=settings.resource, partition=settings.queue, cores=CORES
    )


def gres_type(device_type: str) -> str:
    """Return a device type as the type of a generic resource: lower case, other characters than ``a-z0-9_.-`` as ``_``."""
    return re.sub(r"[^a-z0-9_.-]+", "_", device_type.lower()).strip("_") or "any"


def ddp_module(plan: Plan, *, gaps: Sequence[str]) -> str:
    """Return the text of a Python module with ``DDP_ARGUMENTS`` and ``wrap(model)``.

    The arguments are a list of bucket sizes, else one size, else none. Raises InputError for a plan with neither buckets
    nor DDP as its sharding. ``gaps``: the parts of the plan that are left out, for comments.
    """
    if plan.ddp is None and (plan.sharding is None or plan.sharding.kind != "ddp"):
        raise InputError("plan:ddp", "is missing", "plan with --graph and a training graph, or emit --target fsdp2")
    buckets = plan.ddp
    arguments: dict[str, object] = {}
    if buckets is not None and buckets.bucket_cap_mb_list is not None:
        arguments = {"bucket_cap_mb_list": buckets.bucket_cap_mb_list}
    elif buckets is not None and buckets.bucket_cap_mb is not None:
        arguments = {"bucket_cap_mb": buckets.bucket_cap_mb}
    return _fill_template("ddp.txt", plan, gaps, arguments=arguments)


def fsdp2_module(plan: Plan, *, gaps: Sequence[str]) -> str:
    """Return the text of a Python module with FSDP2's units and prefetch lists, and ``shard(model)``, which applies them.

    ``shard`` applies tensor parallelism first, if there is any. Raises InputError for a plan without a list of blocks.
    ``gaps``: the parts of the plan that are left out, for comments.
    """
    has_units = plan.group is not None or plan.fsdp2 is not None
    units = block_names(plan) if has_units else []
    if not has_units and plan.sharding is not None and plan.sharding.kind == "ddp":
        raise InputError("plan:fsdp2", "is missing: every process holds the whole model", "emit --target ddp")
    if not units:
        problem = "is missing: the plan knew no list of blocks"
        raise InputError("plan:fsdp2", problem, "plan with --graph and a training graph of a model with blocks")
    sharding = plan.sharding
    tensor = {"tensor": plan.group.tensor} if plan.group is not None and plan.group.tensor > 1 else {}
    # The mesh's dimensions, by name. With several replicas there are two; DDP beside tensor parallelism is replicas of
    # one rank each.
    if sharding is not None and (sharding.kind == "hsdp" or (tensor and sharding.kind == "ddp")):
        replicas = sharding.replicate if sharding.kind == "hsdp" else plan.world_size
        mesh = {"replicate": replicas, "shard": plan.world_size // replicas}
    else:
        mesh = {"shard": plan.world_size}
    # unit -> the units that it gathers ahead, in each direction; {} leaves it to FSDP2
    ahead = {"forward": {}, "backward": {}} if plan.fsdp2 is None else plan.fsdp2.model_dump()
    return _fill_template(
        "fsdp2.txt", plan, gaps, units=units, ahead=ahead, reshard=reshards(plan), mesh={**mesh, **tensor}
    )


def remarks(plan: Plan, layout: ProcessLayout | None, gaps: Sequence[str]) -> str:
    """Return comment lines for the top of an output: the job, the plan's hash, the nodes (if any) and the gaps."""
    return _fill_template("head.txt", plan, gaps, layout)


def _fill_template(
    name: str, plan: Plan, gaps: Sequence[str], layout: ProcessLayout | None = None, **more_values: object
) -> str:
    """Return the template ``name`` rendered with the plan's values.

    ``gaps``: the parts of the plan that are left out, for comments. ``layout``: the nodes; None: the output starts no
    processes. ``more_values``: further variables of that template.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # escapes are for HTML; in shell and Python, names are made one word and arguments are quoted
    )
    title = f"Job {one_word(plan.job)}, strategy {plan.strategy}"

    def torchrun(group: EqualNodes, rank: str) -> str:
        """Return the command that starts the processes of one node of ``group``; ``rank``: the node's, or a shell variable."""
        assert layout is not None
        return (
            f"torchrun --nnodes {layout.nodes} --node-rank {rank} --nproc-per-node {group.processes_per_node} "
            '--rdzv-backend static --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}"'
        )

    if layout is None:
        title += "; needs torch alone"
    else:
        title += f": {layout.processes} process(es) on {layout.nodes} node(s)"
    half = None  # the 16-bit type in which autocast computes
    if plan.run is not None and precision_of(plan.run.precision).is_autocast:
        half = precision_of(plan.run.precision).computes
    recomputed_modules = [] if plan.sharding is None else plan.sharding.checkpointing
    return environment.get_template(name).render(
        sharding=plan.sharding,
        recomputed={entry.module: entry.keeps for entry in recomputed_modules},
        keeps=any(entry.keeps for entry in recomputed_modules),
        products=PRODUCTS,
        title=title,
        name=cluster_name(plan.job),
        sha=plan_hash(plan),
        sizes=[row.local_batch_size for row in plan.assignments for _ in range(row.devices)],
        passes=planned_passes(plan),
        tensor=1 if plan.group is None else plan.group.tensor,
        run=plan.run,
        half=half,
        enforced=plan.group is None,
        layout=layout,
        groups=() if layout is None else layout.groups,
        gaps=gaps,
        torchrun=torchrun,
        gres_type=gres_type,
        quote=shlex.quote,
        literal=lambda value: pprint.pformat(value, width=100, compact=True, sort_dicts=False),
        **more_values,
    )
