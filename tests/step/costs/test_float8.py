"""Linear layers in float8: which run so, what each moves and keeps, counted by hand, and who refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from ddltool.analyzers.step.costs.compiling import FUSED, compiled, compiled_lifetimes
from ddltool.analyzers.step.costs.memory import ACTIVATION, TensorLifetimes
from ddltool.analyzers.step.costs.model import cost_model
from ddltool.analyzers.step.costs.predict import products_s
from ddltool.analyzers.step.costs.tensor_parallel import rank_of
from ddltool.analyzers.step.costs.traced_lifetimes import lifetimes_of
from ddltool.analyzers.step.recording.command import record
from ddltool.analyzers.step.recording.float8 import float8_layers
from ddltool.analyzers.step.recording.torch_costs import base_name
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.step import TrainingStep, language_model_loss
from ddltool.analyzers.step.tracing.torch_adapter import TracedStep, trace_any_batch, trace_step
from ddltool.errors import InputError
from ddltool.graph import Graph
from ddltool.precision import PrecisionName
from ddltool.shipped import calibration, devices
from tests.conftest import Result

Cli = Callable[..., Result]
BATCH, TOKENS, WIDTH, HIDDEN, WORDS = 4, 128, 512, 2048, 4096
ROWS = BATCH * TOKENS


class Block(nn.Module):
    """Two layers with biases, and two that stay in bfloat16: too narrow, and of a width that 16 does not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.narrow, self.odd = nn.Linear(WIDTH, 128), nn.Linear(WIDTH, 500)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, tokens, width) from the same."""
        shares = self.narrow(x).mean(-1, keepdim=True) + self.odd(x).mean(-1, keepdim=True)
        return x + self.down(F.gelu(self.up(self.norm(x)))) * shares


class Words(nn.Module):
    """A language model: an embedding, blocks, and a head with an output for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return the logits."""
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(x)}


def language() -> TrainingStep:
    inputs = (torch.zeros(BATCH, TOKENS, dtype=torch.long),)
    return TrainingStep(name="words", module=Words(), inputs=inputs, loss=language_model_loss)


class Gelu(nn.Module):
    """One layer behind a GELU of something trained."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.down = nn.Parameter(torch.zeros(HIDDEN)), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, width) from (rows, hidden)."""
        return self.down(F.gelu(x + self.shift))


def one_layer() -> TrainingStep:
    return TrainingStep(
        name="gelu", module=Gelu(), inputs=(torch.zeros(ROWS, HIDDEN),), loss=lambda y: y.float().mean()
    )


@cache
def traced(precision: PrecisionName = "fp8", gathered: bool = True) -> TracedStep:
    return trace_step(language, mode="training", numerics=Numerics(precision, gathered=gathered))


@cache
def layer(precision: PrecisionName = "fp8") -> Graph:
    return trace_step(one_layer, mode="training", numerics=Numerics(precision, gathered=True)).graph


def moved(graph: Graph, op_type: str, phase: str) -> list[tuple[float, float]]:
    """Bytes moved and written by the ops of a type in a phase."""
    ops = [op for op, name in enumerate(graph.names) if graph.op_type[op] == op_type and name.startswith(phase)]
    return [(float(graph.size_bytes[op]), float(graph.written_bytes[op])) for op in ops]


def test_wide_layers_are_converted_and_heads_narrow_and_misaligned_ones_are_not() -> None:
    assert float8_layers(Words()) == [f"blocks.{n}.{name}" for n in range(2) for name in ("up", "down")]
    graph, half = traced().graph, traced("bf16").graph
    narrow = [op for op in range(len(graph)) if graph.gemm[op, 1] > 0 and graph.dtype[op].startswith("float8")]
    assert {graph.op_type[op] for op in narrow} == {"aten._scaled_mm"}
    assert len(narrow) == 2 * 2 * 3  # blocks, layers, and the products of each: forward and of two gradients
    others = [op for op in range(len(graph)) if graph.gemm[op, 1] > 0 and op not in narrow]
    assert {graph.dtype[op] for op in others} == {"bfloat16"}
    assert sum(graph.flops[others]) == sum(half.flops[half.gemm[:, 1] > 0]) - sum(graph.flops[narrow])
    assert graph.meta["note"] == "float8: 4 of 9 linear layers, in bfloat16: blocks.narrow, blocks.odd, head"


def test_a_layer_moves_what_a_count_by_hand_says() -> None:
    graph, size = layer(), ROWS * HIDDEN
    weight, number = WIDTH * HIDDEN, 4.0
    # Input and weight are read for their largest values, and again to be cast; so is the gradient of the output.
    assert moved(graph, "aten.float8_scale", "forward") == [(2 * size + number, number), (2 * weight + number, number)]
    assert moved(graph, "aten.to_float8", "forward") == [(3 * size + number, size), (3 * weight + number, weight)]
    result = 2 * ROWS * WIDTH
    bias = 2 * WIDTH
    assert moved(graph, "aten._scaled_mm", "forward") == [(size + weight + 2 * number + bias + result, result)]
    gradient = ROWS * WIDTH
    assert moved(graph, "aten.float8_scale", "backward") == [(2 * gradient + number, number)]
    assert moved(graph, "aten.to_float8", "backward") == [
        (3 * gradient + number, gradient),
        (3 * weight + number, weight),
    ]
    assert moved(graph, "aten.clone", "backward") == [(2 * gradient, gradient), (2 * size, size)]
    assert moved(graph, "aten._scaled_mm", "backward") == [
        (gradient + weight + 2 * number + 2 * size, 2 * size),
        (gradient + size + 2 * number + 2 * weight, 2 * weight),
    ]


def test_products_have_the_layout_that_hopper_takes() -> None:
    nodes = [node for node in traced().program.nodes if base_name(node.target) == "_scaled_mm"]
    assert len(nodes) == 12
    for node in nodes:
        rows, columns = (source.meta["val"] for source in node.args[:2])
        assert rows.stride(1) == 1, "the first factor by rows"
        assert columns.stride(0) == 1, "the second by columns"
        assert {rows.element_size(), columns.element_size()} == {1}
        assert node.meta["val"].dtype == torch.bfloat16
    gradients = [node for node in nodes if torch.float8_e5m2 in {source.meta["val"].dtype for source in node.args[:2]}]
    assert len(gradients) == 8, "every product but those of the forward pass has a gradient"


def test_compiled_the_search_for_the_largest_joins_what_makes_the_tensor_and_the_cast_is_a_kernel() -> None:
    graph, size = compiled(layer()), ROWS * HIDDEN
    forward = [
        float(graph.size_bytes[op])
        for op in range(len(graph))
        if graph.op_type[op] == FUSED and graph.names[op].startswith("forward/down")
    ]
    # GELU's kernel reads and writes; the cast reads its result again. Nothing is read for the largest value alone.
    assert forward[:2] == [4 * size + 2 * HIDDEN + 4.0, 3 * size + 4.0]


def kept(lifetimes: TensorLifetimes, width: float) -> float:
    """Bytes of the forward pass's activations of a width that the backward pass reads."""
    is_kept = (lifetimes.role == ACTIVATION) & (lifetimes.alloc < lifetimes.backward)
    is_kept &= (lifetimes.free > lifetimes.backward) & (lifetimes.width == width)
    return float(lifetimes.sizes()[is_kept].sum())


def test_inputs_are_kept_in_float8_and_weights_are_cast_again() -> None:
    narrow, half = lifetimes_of(traced()), lifetimes_of(traced("bf16"))
    assert kept(narrow, 1.0) == 2 * ROWS * (WIDTH + HIDDEN)
    # bfloat16 keeps what the layers read: the norm's result and GELU's.
    assert kept(half, 2.0) - kept(narrow, 2.0) == 2 * 2 * ROWS * (WIDTH + HIDDEN)


def test_inputs_are_given_up_layer_by_layer() -> None:
    lifetimes = lifetimes_of(traced())
    is_kept = (lifetimes.role == ACTIVATION) & (lifetimes.alloc < lifetimes.backward) & (lifetimes.width == 1.0)
    ends = sorted(lifetimes.free[is_kept & (lifetimes.free > lifetimes.backward)].tolist())
    assert len(set(ends)) == 4
    assert ends[-1] < lifetimes.nodes - 1


def test_compiled_the_input_is_cast_again_from_what_is_kept_anyway() -> None:
    assert kept(compiled_lifetimes(lifetimes_of(traced())), 1.0) == 0.0


def test_under_autocast_weights_stay_in_float32_and_are_never_cast_to_bfloat16() -> None:
    step = traced(gathered=False)
    assert set(step.graph.size_bytes[step.graph.kind == 0]) >= {4.0 * WIDTH * HIDDEN}
    casts = [node for node in step.program.nodes if base_name(node.target) == "_to_copy"]
    weights = {(WIDTH, HIDDEN), (HIDDEN, WIDTH)}
    assert not [node for node in casts if tuple(node.meta["val"].shape) in weights and node.meta["val"].itemsize == 2]


def test_layers_side_by_side_cast_their_input_once() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, HIDDEN, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            """Return a sum of both."""
            return self.left(x).sum() + self.right(x).sum()

    step = TrainingStep(name="pair", module=Pair(), inputs=(torch.zeros(ROWS, WIDTH),), loss=lambda y: y)
    graph = trace_step(lambda: step, mode="training", numerics=Numerics("fp8")).graph
    assert len(moved(graph, "aten.to_float8", "forward")) == 3


class Computed(nn.Module):
    """A layer within a checkpoint, and one whose weight is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return (rows, width) from the same."""
        return self.normed(checkpoint(lambda rows: F.gelu(self.layer(rows)), x, use_reentrant=False))


def test_a_computed_weight_stays_in_bfloat16() -> None:
    step = TrainingStep(name="computed", module=Computed(), inputs=(torch.zeros(ROWS, WIDTH),), loss=lambda y: y.mean())
    graph = trace_step(lambda: step, mode="training", numerics=Numerics("fp8", gathered=True)).graph
    assert graph.meta["note"] == "float8: 1 of 2 linear layers, in bfloat16: normed"
    wide = [op for op in range(len(graph)) if graph.gemm[op, 1] > 0 and not graph.dtype[op].startswith("float8")]
    assert [graph.op_type[op] for op in wide] == ["aten.addmm", "aten.mm", "aten.mm"]


def test_any_batch_scales_from_one_trace() -> None:
    scaled = trace_any_batch(language, mode="training", numerics=Numerics("fp8", gathered=True))
    assert scaled.prime is not None
    once = scaled.at(BATCH)
    assert np.array_equal(once.size_bytes, traced().graph.size_bytes)
    assert np.array_equal(once.gemm, traced().graph.gemm)


def test_ranks_of_a_tensor_group_divide_and_exchange_as_in_bfloat16() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            """Return (batch, tokens, width) from the same."""
            return x + self.down(F.gelu(self.up(self.norm(x))))

    def build() -> TrainingStep:
        module = nn.Sequential(*(Layer() for _ in range(2)))
        inputs = (torch.zeros(BATCH, TOKENS, WIDTH),)
        return TrainingStep(name="layers", module=module, inputs=inputs, loss=lambda y: y.float().mean())

    exchanged = {}
    for precision in ("bf16", "fp8"):
        numerics = Numerics(precision, gathered=True)  # type: ignore[arg-type]
        step = trace_step(build, mode="training", numerics=numerics)
        rank = rank_of(step, lifetimes_of(step).blocks, 4)
        exchanged[precision] = [each.tensor for each in rank.exchanges]
        products = step.graph.gemm[:, 1] > 0
        assert np.allclose(rank.traced.graph.flops[products], step.graph.flops[products] / 4)
    assert exchanged["fp8"] == exchanged["bf16"]
    casts = [op for op, kind in enumerate(step.graph.op_type) if kind == "aten.to_float8"]
    share = rank.traced.graph.size_bytes[casts] / step.graph.size_bytes[casts]
    # In a block every cast but those of the whole input and of the whole gradient.
    assert np.count_nonzero(np.isclose(share, 1.0)) == 2 * 2
    assert np.count_nonzero(np.isclose(share, 0.25, rtol=1e-3)) == len(casts) - 4


def test_products_take_half_the_time_and_mfu_counts_their_own_peak() -> None:
    device = devices().device("H100")
    narrow, half = layer(), layer("bf16")
    assert products_s(narrow, device) == pytest.approx(products_s(half, device) / 2, rel=1e-3)
    model = cost_model(device, calibration())
    seconds = {}
    for name, graph in (("fp8", narrow), ("bf16", half)):
        large = graph.gemm * [1.0, 16.0, 16.0, 16.0]
        op_s = model.step(replace(graph, gemm=large, flops=2 * large.prod(axis=1))).op_s
        seconds[name] = float(op_s[graph.gemm[:, 1] > 0].sum())
    assert 1.8 < seconds["bf16"] / seconds["fp8"] < 2.1


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(InputError, match="narrow: has no linear layer for float8 among 1; give bf16: widths must"):
        trace_step(
            lambda: TrainingStep(
                name="narrow", module=nn.Linear(64, 64), inputs=(torch.zeros(8, 64),), loss=lambda y: y.mean()
            ),
            mode="training",
            numerics=Numerics("fp8"),
        )


@pytest.mark.parametrize("verb", ["predict", "trace"])
def test_a_device_without_float8_refuses(cli: Cli, verb: str) -> None:
    result = cli(verb, "zoo:bert_small", "--device", "A100", "--precision", "fp8")
    assert result.code == 2
    assert result.error_line.startswith("--precision: A100 has no rate for fp8; its datasheet has float32, tf32")


SCRIPT = """
import torch

class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return product(x, weight.t())

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return product(gradient, weight), product(gradient.t(), x)

def product(left, right):
    left, right = left.to(torch.float8_e4m3fn).contiguous(), right.to(torch.float8_e4m3fn).t().contiguous().t()
    one = torch.ones((), device="cuda")
    return torch._scaled_mm(left, right, one, one, out_dtype=torch.bfloat16)

net = torch.nn.Linear(512, 512, bias=False).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
while True:
    Product.apply(torch.randn(64, 512).cuda(), net.weight).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_that_multiplies_in_float8_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    graph = record(["python", "train.py"])
    assert graph.meta["precision"] == "fp8"
    assert {graph.dtype[op] for op in range(len(graph)) if graph.gemm[op, 1] > 0} == {"float8_e4m3fn"}
    with pytest.raises(InputError, match="A100 has no rate for fp8"):
        cost_model(devices().device("A100"), calibration()).step(graph)


def test_a_graph_in_float8_is_not_timed_on_such_a_device() -> None:
    with pytest.raises(InputError, match="V100 has no rate for fp8"):
        cost_model(devices().device("V100"), calibration()).step(layer())
