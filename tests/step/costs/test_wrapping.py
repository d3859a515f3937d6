"""What the hooks of DDP and FSDP2 add where the host bounds a step."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import nn

import ddltool as dt
from ddltool.analyzers.step.communication.program import Program
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.analyzers.step.costs.wrapping import hook_ops


def chain(units: int, width: int) -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(units))), torch.zeros(
        8, width
    )


def program(names: tuple[str, ...]) -> Program:
    some = np.ones(len(names))
    return Program(
        parameters=names, ready_s=some, size_bytes=some, held=names, held_bytes=some, first_use_s=some,
        backward_s=1.0, compute_s=2.0,
    )  # fmt: skip


def test_hooks_are_counted_by_unit_and_parameter() -> None:
    listed = program(("embed.weight", "layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b"))
    assert hook_ops(listed, Sharding.named("fsdp", 2)) == 35 * 3 + 4.5 * 5  # two blocks, and the root
    assert hook_ops(program(("a", "b")), Sharding.named("fsdp", 2)) == 35 + 4.5 * 2  # one unit: no list of blocks
    assert hook_ops(listed, Sharding.named("ddp", 2)) == 0.4 * 5
    assert hook_ops(listed, Sharding.named("none", 1)) == 0.0


def test_small_models_wait_for_hooks_and_large_ones_do_not() -> None:
    """An H200's host took 12.9 ms for a chain of 32 layers under DDP and 56 under FSDP2, where it took 11.9 alone."""
    for width, ratios in (
        (64, {"ddp": (1.02, 1.4), "fsdp": (3.0, 12.0)}),
        (16_384, {"ddp": (0.99, 1.4), "fsdp": (0.7, 1.1)}),
    ):
        predict = partial(dt.predict, partial(chain, 16, width), "H200", batch_sizes=8, optimizer="sgd")
        alone = predict().rows[0]
        for sharding, (low, high) in ratios.items():
            shared = predict(replicas=2, sharding=sharding).rows[0]
            passes_s = shared.step_time_s - shared.sync_time_s
            assert low < passes_s / alone.step_time_s < high
            assert shared.host_bound == (width == 64)
            assert shared.host_wait_s >= alone.host_wait_s
