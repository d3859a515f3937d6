"""What the crew's ranks do for the tests of DDP bucket plans and FSDP2 prefetch lists."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from ddltool.runtime.hook.data_parallel import apply_prefetch, bucket_report, ddp_arguments, prefetch_units
from tests.helpers.processes import message_of


class Blocks(nn.Module):
    """A list of equal blocks between two layers, as transformers have it."""

    def __init__(self, blocks: int = 4, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(blocks))
        self.last = nn.Linear(width, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (batch, 4)."""
        hidden = self.first(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.last(hidden)

    def example_inputs(self) -> Tensor:
        return torch.zeros(16, 8)


def step(model: nn.Module) -> None:
    model(torch.ones(16, 8)).square().mean().backward()


def ddp_buckets(rank: int, config: str) -> tuple[str, str, list[list[str]]]:
    """Return the report before and after the buckets settle, and the buckets."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Blocks(), **ddp_arguments(config))
    step(model)
    before = bucket_report(model, config).status
    for _ in range(2):
        step(model)
    report = bucket_report(model, config)
    return before, report.text, [sorted(bucket) for bucket in report.actual]


def fsdp_order(rank: int, config: str) -> tuple[str, list[str]]:
    """Return the report of the prefetch lists and the order in which all-gathers were issued in one step."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Blocks()
    for name in prefetch_units(config):
        fully_shard(model.get_submodule(name), mesh=mesh)
    fully_shard(model, mesh=mesh)
    text = apply_prefetch(model, config).text
    step(model)
    with profile(activities=[ProfilerActivity.CPU]) as run:
        step(model)
    events: list[Any] = sorted(
        (event for event in run.events() or [] if event.name.startswith("FSDP::all_gather (")),
        key=lambda event: event.time_range.start,
    )
    return text, [event.name.removeprefix("FSDP::all_gather (").rstrip(")") for event in events]


def prefetch_refusal(rank: int, config: str, sharded: bool) -> str:
    """Return what applying the lists to an unfitting model answers."""
    model: nn.Module = Blocks(blocks=4 if not sharded else 2)
    return message_of(apply_prefetch, model, config)
