"""What the crew's ranks do with the modules that ``ddltool emit`` writes."""

from __future__ import annotations

import runpy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from tests.helpers.data_parallel_workers import Blocks, step


def emitted_ddp(rank: int, module: str, changes: dict[str, Any]) -> tuple[str, list[int], int]:
    """Return the hash and batches of an emitted module, and how many buckets DDP forms with it."""
    made = runpy.run_path(module)
    torch.manual_seed(0)
    model = made["wrap"](Blocks(), **changes)
    for _ in range(3):
        step(model)
    rebuilt = str(model._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"])
    return made["PLAN_SHA256"], made["LOCAL_BATCH_SIZES"], len(rebuilt.split(","))


def emitted_fsdp2(rank: int, module: str) -> list[str]:
    """Return the order of all-gathers in a step of a model that an emitted module sharded."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = runpy.run_path(module)["shard"](Blocks(), mesh=mesh)
    step(model)
    with profile(activities=[ProfilerActivity.CPU]) as run:
        step(model)
    start = "FSDP::all_gather ("
    gathers = [event for event in run.events() or [] if event.name.startswith(start)]
    gathers.sort(key=lambda event: event.time_range.start)
    return [event.name.removeprefix(start).rstrip(")") for event in gathers]
