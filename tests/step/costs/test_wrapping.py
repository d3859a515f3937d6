"""What the hooks of DDP and FSDP2 add where the host bounds a step."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import ddltool as dt
from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.communication.program import Program, program_of
from ddltool.analyzers.step.costs.model import cost_model
from ddltool.analyzers.step.costs.setting import Setting
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.analyzers.step.costs.work import work_of
from ddltool.analyzers.step.costs.wrapping import hook_ops, with_copies
from ddltool.analyzers.step.recording.command import record
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.shipped import calibration, devices
from tests.helpers.processes import as_job


def chain(units: int, width: int) -> tuple[nn.Sequential, torch.Tensor]:
    blocks = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(units))
    return nn.Sequential(*blocks), torch.zeros(8, width)


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


class Copies(TorchDispatchMode):
    """Counts the bytes that FSDP2's own operators read and write."""

    moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.fsdp.split_with_sizes_copy.default:
            self.moved += args[0].nbytes + sum(each.nbytes for each in kwargs["out"])
        if func is torch.ops.fsdp.chunk_cat.default:
            self.moved += sum(each.nbytes for each in args[0]) + kwargs["out"].nbytes
        return made


def count_copies(rank: int, reshards: bool) -> None:
    dist.init_process_group("gloo")
    model, x = chain(4, 64)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshards)
    fully_shard(model, mp_policy=policy, reshard_after_forward=reshards)
    with Copies() as copies:
        model(x).sum().backward()
    print(copies.moved)
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["fsdp", "zero2"])
def test_copies_are_those_of_torch_s_own_operators(kind: Literal["fsdp", "zero2"], tmp_path: Path) -> None:
    """Blocks of float32 parameters that are gathered in bfloat16 and reduced in float32."""
    [(code, printed, told), _] = as_job(2, tmp_path, count_copies, kind == "fsdp")
    assert code == 0, told[-2000:]
    curve = work_of(partial(chain, 4, 64), Numerics("bf16", gathered=True), None)
    model = cost_model(devices().device("H200"), calibration())
    sharding = Sharding.named(kind, 2)
    setting = Setting(fabric=Fabric.flat(1e9, 0.0), sharding=sharding)
    graph = curve.timed(8, model, setting)
    program = program_of(graph)
    copies_s = with_copies(program, graph, sharding).compute_s - program.compute_s
    assert copies_s * model.memory_bytes_per_s == pytest.approx(int(printed))


SHARDED = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
torch.distributed.init_process_group("nccl")
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4))).cuda()
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.randn(8, 64).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_recorded_script_copies_as_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process copies its half of each block into the buffer, forward and backward, and all of it out."""
    (tmp_path / "train.py").write_text(SHARDED)
    monkeypatch.chdir(tmp_path)
    graph = record(["torchrun", "--nproc-per-node", "2", "train.py"])
    names = np.array([op_type.rpartition(".")[2] for op_type in graph.op_type])
    moved = {name: graph.size_bytes[names == name].sum() for name in set(names)}
    block = 4 * (64 * 64 + 64)  # bytes in float32
    assert moved["all_gather_copy_in"] == 4 * 2 * (2 * block / 2)
    assert moved["split_with_sizes_copy"] == 4 * 2 * (2 * block)
    assert moved["chunk_cat"] == 4 * (2 * block)


def test_small_models_wait_for_hooks_and_large_ones_do_not() -> None:
    """An H200's host took 12.9 ms for a chain of 32 layers under DDP and 56 under FSDP2, where it took 11.9 alone."""
    for width, samples, ratios in (
        (64, 8, {"ddp": (1.02, 1.4), "fsdp": (3.0, 12.0)}),
        (16_384, 4096, {"ddp": (0.99, 1.1), "fsdp": (0.9, 1.1)}),
    ):
        predict = partial(dt.predict, partial(chain, 16, width), "H200", batch_sizes=samples, optimizer="sgd")
        alone = predict().rows[0]
        for sharding, (low, high) in ratios.items():
            shared = predict(replicas=2, sharding=sharding).rows[0]
            passes_s = shared.step_time_s - shared.sync_time_s
            assert low < passes_s / alone.step_time_s < high
            assert shared.host_bound == (width == 64)
            assert shared.host_wait_s >= alone.host_wait_s


def test_the_host_issues_recomputed_ops_as_well() -> None:
    """Where FSDP2's host bounds a step, a device that computes more only waits less, but the host has more to issue."""

    def blocks() -> tuple[nn.Sequential, torch.Tensor]:
        return nn.Sequential(*(chain(4, 64)[0] for _ in range(8))), torch.zeros(8, 64)

    predict = partial(dt.predict, blocks, "H200", batch_sizes=8, replicas=2, sharding="fsdp")
    kept, recomputed = predict().rows[0], predict(checkpointing="full").rows[0]
    assert kept.host_bound
    assert recomputed.host_bound
    assert 1.02 < recomputed.step_time_s / kept.step_time_s < 1.3  # hooks, which take most of it, run no more often
