"""A plan as a Python module that needs nothing but torch: DDP's buckets, FSDP2's units and prefetch."""

from __future__ import annotations

import json
import pprint
from collections.abc import Sequence

from ddltool.analyzers.emitting.layout import one_word, plan_hash
from ddltool.errors import InputError
from ddltool.plan import Plan

_DDP = '''
def wrap(model, **arguments):
    """Return the model in DistributedDataParallel with the planned buckets; ``arguments`` are passed on."""
    return DistributedDataParallel(model, **{**DDP_ARGUMENTS, **arguments})
'''

_FSDP2 = '''
def shard(model, **arguments):
    """Shard the planned units and the model, set the prefetch lists, return the model; ``arguments`` are passed on."""
    arguments = {"reshard_after_forward": RESHARD_AFTER_FORWARD, **arguments}
    for name in UNITS:
        fully_shard(model.get_submodule(name), **arguments)
    fully_shard(model, **arguments)
    for name, ahead in FORWARD_PREFETCH.items():
        model.get_submodule(name).set_modules_to_forward_prefetch([model.get_submodule(other) for other in ahead])
    for name, ahead in BACKWARD_PREFETCH.items():
        model.get_submodule(name).set_modules_to_backward_prefetch([model.get_submodule(other) for other in ahead])
    return model
'''


def ddp_module(plan: Plan, *, gaps: Sequence[str]) -> str:
    """Return a module with ``DDP_ARGUMENTS`` and ``wrap(model)``. Raises InputError for a plan without buckets."""
    if plan.ddp is None:
        raise InputError("plan:ddp", "is missing", "plan with --graph and a training graph")
    if plan.ddp.bucket_cap_mb_list is not None:
        arguments: dict[str, object] = {"bucket_cap_mb_list": plan.ddp.bucket_cap_mb_list}
    else:
        arguments = {} if plan.ddp.bucket_cap_mb is None else {"bucket_cap_mb": plan.ddp.bucket_cap_mb}
    head = _head(plan, gaps, "DistributedDataParallel", "from torch.nn.parallel import DistributedDataParallel")
    return head + _constant("DDP_ARGUMENTS", arguments, "for DistributedDataParallel; empty: its default") + "\n" + _DDP


def fsdp2_module(plan: Plan, *, gaps: Sequence[str]) -> str:
    """Return a module with the units, the prefetch lists and ``shard(model)``. Raises InputError for a plan without."""
    setting = plan.fsdp2
    if setting is None:
        problem = "is missing: the plan knew no list of blocks"
        raise InputError("plan:fsdp2", problem, "plan with --graph and a training graph of a model with blocks")
    constants = [
        _constant("UNITS", setting.units, "modules to shard, in the order of forward"),
        _constant("FORWARD_PREFETCH", setting.forward, "module to those to gather ahead of it; empty: the default"),
        _constant("BACKWARD_PREFETCH", setting.backward),
        _constant("RESHARD_AFTER_FORWARD", setting.reshard_after_forward),
    ]
    head = _head(plan, gaps, "FSDP2", "from torch.distributed.fsdp import fully_shard")
    return head + "".join(constants) + "\n" + _FSDP2


def _head(plan: Plan, gaps: Sequence[str], noun: str, imports: str) -> str:
    """Return the module up to its settings: what it is, what it leaves out, the batch of every rank."""
    sizes = [row.local_batch_size for row in plan.assignments for _ in range(row.devices)]
    passes = 1 if plan.goodput is None else plan.goodput.accumulation_steps + 1
    lines = [
        f"# {noun} as planned for the job {one_word(plan.job)}, strategy {plan.strategy}; needs torch alone.",
        f"# Plan SHA-256: {plan_hash(plan)}",
        *(f"# Not expressed here: {gap}" for gap in gaps),
        "",
        imports,
        "",
        f"PLAN_SHA256 = {json.dumps(plan_hash(plan))}",
        f"WORLD_SIZE = {len(sizes)}",
    ]
    return (
        "\n".join(lines)
        + "\n"
        + _constant("LOCAL_BATCH_SIZES", sizes, "samples per step, by rank, all passes together")
        + _constant("PASSES", passes, "forward and backward passes per step (accumulation steps + 1)")
    )


def _constant(name: str, value: object, remark: str = "") -> str:
    """Return an assignment of a literal, wrapped."""
    comment = f"# {remark}\n" if remark else ""
    return f"{comment}{name} = {pprint.pformat(value, width=100, compact=True, sort_dicts=False)}\n"
