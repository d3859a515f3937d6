"""Compiled steps: what is kept against torch's own partitioner, what is moved against counting by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional as F

from ddltool.analyzers.step.costs.compiling import FUSED, compiled, compiled_lifetimes, compiled_storages, fuse
from ddltool.analyzers.step.costs.memory import Recomputation
from ddltool.analyzers.step.costs.model import cost_model, time_step
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.analyzers.step.costs.traced_lifetimes import lifetimes_of
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.step import TrainingStep
from ddltool.analyzers.step.tracing.torch_adapter import TracedStep, trace_step
from ddltool.graph import COMPUTE, Graph, Op, Recorded
from ddltool.precision import PrecisionName
from ddltool.shipped import calibration, devices

ROWS, WIDTH, WORDS = 128, 64, 512


class Gated(nn.Module):
    """A residual branch as Llama has it: a root mean square norm in float32, a gated product of SiLU."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the sum of the rows and the branch."""
        wide = rows.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(rows.dtype) * self.scale
        return rows + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Plain(nn.Module):
    """A residual branch as GPT-2 has it: layer norm, GELU, dropout, biases."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, rows: Tensor) -> Tensor:
        """Return the sum of the rows and the branch."""
        return rows + F.dropout(self.down(F.gelu(self.up(self.norm(rows)))), self.dropout, self.training)


class Words(nn.Module):
    """Blocks between an embedding and the logits of its words."""

    def __init__(self, block: Callable[[], nn.Module], layers: int = 3) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits (words, WORDS)."""
        rows = self.embedding(words)
        for layer in self.layers:
            rows = layer(rows)
        return cast(Tensor, self.head(rows))


def images() -> nn.Module:
    """Return convolutions with batch norm and ReLU, one in place."""
    made = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32)]
    return nn.Sequential(*made, nn.ReLU(), nn.Flatten(), nn.Linear(32 * 12 * 12, 4))


def float_loss(logits: Tensor) -> Tensor:
    """Return cross entropy in float32."""
    return F.cross_entropy(logits.float(), torch.zeros(len(logits), dtype=torch.long, device=logits.device))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "gated": lambda: (Words(Gated), torch.zeros(ROWS, dtype=torch.long)),
    "plain": lambda: (Words(Plain), torch.zeros(ROWS, dtype=torch.long)),
    "images": lambda: (images(), torch.zeros(4, 3, 16, 16)),
}


def step_of(name: str) -> TrainingStep:
    module, inputs = MODELS[name]()
    return TrainingStep(name=name, module=module, inputs=(inputs,), loss=float_loss)


def traced(name: str, precision: PrecisionName) -> TracedStep:
    return trace_step(lambda: step_of(name), mode="training", numerics=Numerics(precision, cuda=False))


def kept_by_torch(name: str, precision: PrecisionName) -> int:
    """Return the bytes that a compiled step keeps between its passes by torch's own partitioner, as inductor calls it."""
    torch.manual_seed(0)
    module, inputs = MODELS[name]()
    module = module.to(torch.bfloat16) if precision == "bf16-pure" else module
    owned = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers(), inputs)}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage())._cdata not in owned:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    backend = aot_autograd(
        fw_compiler=lambda module, _: module.forward,
        partition_fn=lambda graph, given, **more: min_cut_rematerialization_partition(
            graph, given, compiler="inductor", **more
        ),
        decompositions=select_decomp_table(),
    )
    torch._dynamo.reset()

    def run(given: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            return float_loss(module(given))

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = torch.compile(run, backend=backend)(inputs)
    assert loss.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize(
    ("name", "precision"),
    [("gated", "bf16-pure"), ("gated", "bf16"), ("plain", "fp32"), ("plain", "bf16"), ("images", "fp32")],
)
def test_what_is_kept_is_what_torchs_partitioner_keeps(name: str, precision: PrecisionName) -> None:
    step = traced(name, precision)
    lifetimes = compiled_lifetimes(lifetimes_of(step))
    size = lifetimes.sizes()
    is_kept = (lifetimes.role == 3) & (lifetimes.alloc < lifetimes.backward) & (lifetimes.free >= lifetimes.backward)
    assert size[is_kept].sum() == pytest.approx(kept_by_torch(name, precision), rel=0.08)


def test_logits_in_float32_and_casts_are_never_written() -> None:
    """Of the loss only the logits in bfloat16 come to memory, and their gradient: no float32 of their size."""
    step = traced("gated", "bf16-pure")
    wide = ROWS * WORDS * 4
    eager, whole = (lifetimes_of(step), compiled_lifetimes(lifetimes_of(step)))
    by_block = compiled_lifetimes(eager, blocks_only=True)
    counts = [int((lifetimes.sizes() == wide).sum()) for lifetimes in (eager, by_block, whole)]
    assert counts[0] == counts[1] > 2
    assert counts[2] == 0
    peaks = [lifetimes.peak(Sharding(kind="none"), "sgd").total_bytes for lifetimes in (eager, by_block, whole)]
    assert peaks[0] > peaks[1] > peaks[2]
    none = Recomputation(eager, {})
    assert whole.held(none, Sharding(kind="none"), "sgd", whole.sizes()).reserved_bytes() is not None


# ---------------------------------------------------------------- kernels


def forward_of(run: Callable[[Tensor], Tensor], rows: int = 256) -> Graph:
    """Return the traced forward pass of a function between two products of 64 columns."""

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            """Return the last product."""
            return cast(Tensor, self.last(run(self.first(x))))

    build = lambda: TrainingStep(name="b", module=Between(), inputs=(torch.zeros(rows, 64),), loss=torch.sum)  # noqa: E731
    return trace_step(build, mode="inference", numerics=Numerics("fp32")).graph


@pytest.mark.parametrize(
    ("run", "tensors"),
    [
        (lambda x: torch.relu(x).exp() + 1.0, 2),  # one kernel reads once and writes once
        (lambda x: torch.softmax(x.bfloat16().float(), -1) * 3.0, 2),  # casts and a softmax within
        (lambda x: F.layer_norm(F.gelu(x), (64,)) + x, 2),  # both read x
        (lambda x: F.gelu(x).t().contiguous().t(), 2),  # a copy
        (lambda x: x.transpose(0, 1).sum(1, keepdim=True).t() + x, 2),  # the sum stays within
        (lambda x: x + torch.ones(256, 64), 2),  # constants are made where they are read
        (
            lambda x: (x @ torch.ones(64, 64)).relu() + x.relu(),
            3.25,
        ),  # x.relu() is made behind the product; and the ones
    ],
)
def test_a_fused_kernel_reads_and_writes_once(run: Callable[[Tensor], Tensor], tensors: float) -> None:
    graph = forward_of(run)
    fusion = fuse(graph)
    assert fusion.traffic.sum() == pytest.approx(tensors * 256 * 64 * 4, rel=0.02)
    done = compiled(graph)
    is_fused = np.array([op_type == FUSED for op_type in done.op_type])
    assert done.size_bytes[is_fused].sum() == fusion.traffic.sum()
    products = graph.gemm[:, 1] > 0
    np.testing.assert_array_equal(done.size_bytes[products], graph.size_bytes[products])
    assert done.meta["compiled"] is True


def test_a_residual_stream_is_not_computed_again_from_its_start() -> None:
    """Each sum is kept, so that the bytes of the backward pass grow with the layers, not with their square."""
    moved = []
    for layers in (2, 4, 8):
        build = lambda layers=layers: TrainingStep(  # noqa: E731
            name="deep", module=Words(Plain, layers), inputs=(torch.zeros(ROWS, dtype=torch.long),), loss=float_loss
        )
        moved.append(fuse(trace_step(build, mode="training", numerics=Numerics("bf16-pure")).graph).traffic.sum())
    assert (moved[2] - moved[1]) == pytest.approx(2 * (moved[1] - moved[0]), rel=0.02)


def test_a_compiled_step_asks_less_of_the_host() -> None:
    graph = traced("gated", "bf16-pure").graph
    model = cost_model(devices().device("H100"), calibration())
    eager, fused = (time_step(each, model.device, model.constants) for each in (graph, compiled(graph)))
    kernels = int((fused.op_s > 0).sum())
    assert fused.host_s == pytest.approx(0.4 * model.constants.issue_s * kernels)
    assert fused.host_s < 0.3 * eager.host_s
    low, high = model.interval(1.0)
    wider = model.interval(1.0, compiled=True)
    assert wider[0] <= low
    assert wider[1] >= high


@pytest.mark.parametrize(
    ("width", "groups", "mode", "turns"),
    [
        *((128, 1, "training", True), (64, 1, "training", False), (64, 1, "inference", True)),
        *((128, 4, "training", False), (128, 4, "inference", False), (128, 128, "training", True)),
    ],
)
def test_convolutions_turn_to_channels_last_as_inductor_decides(
    width: int, groups: int, mode: Any, turns: bool
) -> None:
    def build() -> TrainingStep:
        module = nn.Sequential(nn.Conv2d(width, width, 3, groups=groups), nn.Flatten(), nn.Linear(width * 36, 4))
        return TrainingStep(name="c", module=module, inputs=(torch.zeros(2, width, 8, 8),), loss=float_loss)

    graph = trace_step(build, mode=mode, numerics=Numerics("fp16")).graph
    assert compiled(graph).meta["channels_last"] is turns


def test_a_recorded_steps_storages_are_those_of_its_kernels() -> None:
    """Two element-wise ops between products: the first's output is never written, the second's is freed by its reader."""
    names = ("forward/m/mm", "forward/m/relu", "forward/m/mul", "forward/m/mm_1")
    kinds = ("mm", "relu", "mul", "mm")
    ops = [
        Op(
            name=name,
            kind="compute",
            size_bytes=2e6,
            written_bytes=1e6,
            estimate="rule",
            inputs=names[max(0, place - 1) : place],
            op_type=f"aten.{kinds[place]}",
        )
        for place, name in enumerate(names)
    ]
    recorded = Recorded(
        world_size=1, passes=1, compiled=True, made=(-1, 0, 1, 2), freed=(None, 2, 3, 3),
        storage_bytes=(1e6,) * 4, parts=("parameters", "activations", "activations", "activations"),
    )  # fmt: skip
    graph = Graph.from_ops("recorded", "training", ops, recorded=recorded)
    done = compiled_storages(graph, recorded)
    assert done.storage_bytes == (1e6, 1e6, 0.0, 1e6)
    assert done.freed == (None, 1, 1, 3)
    assert (graph.kind == COMPUTE).all()
    assert compiled(replace(graph, recorded=done)).recorded is done
