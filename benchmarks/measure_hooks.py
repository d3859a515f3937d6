"""Measure what DDP, FSDP2 and DTensor make the host do: small models alone and wrapped, whose steps wait for Python.

    python benchmarks/measure_hooks.py [--device cuda]

One process, so that nothing is exchanged. For each model: the milliseconds of a pass alone, and how many more each way of
sharing takes, in all and for each unit; a unit is a block of FSDP2. `analyzers/step/costs/wrapping.py` takes its constants from
here. Start at :func:`main`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

WARM_UP, STEPS = 4, 12


class Residual(nn.Module):
    """A layer norm and two linear layers beside themselves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return as many features."""
        made: Tensor = x + self.narrow(torch.relu(self.wide(self.norm(x))))
        return made


def models() -> dict[str, nn.Sequential]:
    """Return small models by name; every member is a unit."""
    return {
        **{f"{units} x linear": nn.Sequential(*(nn.Linear(64, 64) for _ in range(units))) for units in (8, 32, 96)},
        **{f"{units} x residual": nn.Sequential(*(Residual(64) for _ in range(units))) for units in (8, 32)},
    }


def pass_s(model: nn.Module, x: Tensor) -> float:
    """Return the seconds in which the host issues a forward and a backward pass, the median of several."""
    synchronize: Callable[[], None] = torch.cuda.synchronize if x.is_cuda else lambda: None
    times = []
    for _ in range(WARM_UP + STEPS):
        model.zero_grad(set_to_none=True)
        synchronize()
        began = time.perf_counter()
        model(x).square().mean().backward()
        times.append(time.perf_counter() - began)
    return statistics.median(times[WARM_UP:])


def wrapped(way: str, model: nn.Sequential, mesh: DeviceMesh) -> nn.Module:
    """Return the model as DDP, with both layers of every member split by DTensor, or with every member a unit of FSDP2."""
    if way == "ddp":
        return DistributedDataParallel(model)
    if way == "tensor":
        for unit in model:
            parallelize_module(unit, mesh, {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
        return model
    for unit in model:
        fully_shard(unit)
    fully_shard(model)
    return model


def main() -> None:
    """Print a line for each model and way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = torch.device(parser.parse_args().device)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29555")}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=0, world_size=1)
    mesh = init_device_mesh(device.type, (1,))
    x = torch.randn(8, 64, device=device)
    for name in models():
        alone_s = pass_s(models()[name].to(device), x)
        for way in ("ddp", "fsdp", "tensor") if "residual" in name else ("ddp", "fsdp"):
            model = models()[name].to(device)
            added_ms = 1e3 * (pass_s(wrapped(way, model, mesh), x) - alone_s)
            each = f"{added_ms / len(model):.3f} ms a unit"
            print(f"{name}, {way}: {1e3 * alone_s:.2f} ms alone, {added_ms:.2f} more, {each}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
