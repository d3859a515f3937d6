"""Compressed gradients: bytes against torch's own rule, steps by hand and by what must hold."""

from __future__ import annotations

import numpy as np
import pytest
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _should_compress

from ddltool.analyzers.step.communication.collectives import Compression, compressed_ddp, parse_compression, plan_ddp
from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.communication.program import program_of
from ddltool.analyzers.step.costs.model import cost_model, estimate
from ddltool.analyzers.step.tracing.sources import resolve_step
from ddltool.analyzers.step.tracing.torch_adapter import trace_torch
from ddltool.device import Network
from ddltool.errors import InputError
from ddltool.graph import Graph, Op
from ddltool.plans import CompressionFigures
from ddltool.shipped import calibration, devices

V100 = devices().device("V100")
SLOW, FAST = Fabric.flat(1.25e9, 5e-5).over(8), Fabric.flat(1e13, 0.0).over(8)


def traced(name: str) -> Graph:
    graph = trace_torch(lambda: resolve_step(f"zoo:{name}"), mode="training")
    return estimate(graph, cost_model(V100, calibration()), Network())


def figures(graph: Graph, rank: int, group: object = SLOW) -> CompressionFigures:
    program = program_of(graph)
    default = plan_ddp(program, group).default  # type: ignore[arg-type]
    return compressed_ddp(graph, program, group, Compression(rank=rank), V100.memory_bytes_per_s, default.step_s)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [1, 4, 32])
@pytest.mark.parametrize("name", ["bert_small", "resnet32"])
def test_bytes_are_those_of_torchs_hook(name: str, rank: int) -> None:
    """What ``powerSGD_hook`` sends of the model's own tensors: rows x rank and columns x rank, or all."""
    sent = 0
    for parameter in resolve_step(f"zoo:{name}").module.parameters():
        rows = parameter.shape[0] if parameter.dim() > 1 else 1
        columns = parameter.numel() // rows
        taken, whole, factors = _should_compress(rows, columns, rank, 2.0)
        sent += 4 * (factors if taken and parameter.dim() > 1 else parameter.numel())
        assert whole == parameter.numel()
    assert figures(traced(name), rank).sent_bytes == pytest.approx(sent, rel=0.01)


def test_bf16_halves_float32_and_leaves_bfloat16() -> None:
    graph = traced("bert_small")
    found = figures(graph, 0)
    assert found.sent_bytes == found.uncompressed_bytes / 2 == graph.parameter_bytes / 2
    assert found.kept_bytes == 0
    assert found.compute_s == pytest.approx(3 * graph.parameter_bytes / V100.memory_bytes_per_s)
    assert 0.3 < found.saved < 0.5  # half of what is exposed, on a network that is nearly all of the step


def test_compression_costs_where_the_network_does_not() -> None:
    graph = traced("bert_small")
    for rank in (0, 4):
        found = figures(graph, rank, FAST)
        assert found.saved < 0
        assert found.step_s == pytest.approx(program_of(graph).compute_s + found.compute_s, rel=0.02)
        assert "longer" in found.verdict or "not worth it" in found.verdict
    steps = [figures(graph, rank).step_s for rank in (1, 4, 16, 64)]
    assert steps == sorted(steps)


def test_a_step_by_hand() -> None:
    """One weight of 1000 x 1000 after 1 s of compute, 2 processes: P and Q of rank 2 in two all-reduces."""
    rows = [
        Op(name="r", kind="recv", resource="channel:0", size_bytes=4e6, duration_s=0.0, parameter="w"),
        Op(name="forward/mm", kind="compute", inputs=("r",), duration_s=0.5, gemm=(1, 8, 1000, 1000)),
        Op(name="backward/mm", kind="compute", inputs=("forward/mm",), duration_s=0.5),
        Op(
            name="s",
            kind="send",
            resource="channel:0",
            size_bytes=4e6,
            duration_s=0.0,
            parameter="w",
            inputs=("backward/mm",),
        ),
    ]
    graph = Graph.from_ops("one", "training", rows)
    program, group = program_of(graph), Fabric.flat(1e6, 0.0).over(2)
    default = plan_ddp(program, group).default
    found = compressed_ddp(graph, program, group, Compression(rank=2), 44e6, default.step_s)
    assert default.step_s == pytest.approx(1 + 4)
    assert found.sent_bytes == 2 * 1000 * 2 * 4
    assert found.compute_s == pytest.approx(1.0)  # 11 passes over 4 MB
    assert found.step_s == pytest.approx(1 + 1 + 0.016)
    assert found.saved == pytest.approx(1 - 2.016 / 5)
    assert np.isfinite(found.kept_bytes)


@pytest.mark.parametrize("text", ["", "fp16", "powersgd", "powersgd:0", "powersgd:x", "bf16:2"])
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--compress: unknown .*; bf16, or powersgd:R"):
        parse_compression(text)
