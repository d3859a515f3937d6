"""The cost model: work against counting by hand and direct traces, times against closed forms and a queue run by hand."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.communication.program import program_of
from ddltool.analyzers.step.costs import predict as predict_module
from ddltool.analyzers.step.costs import work as work_module
from ddltool.analyzers.step.costs.compiling import compiled
from ddltool.analyzers.step.costs.kernel_times import ARITHMETIC, CARRIED, FEED, TRAFFIC, Constants
from ddltool.analyzers.step.costs.kernels import INPUT_GRADIENT, WEIGHT_GRADIENT, kernels_of
from ddltool.analyzers.step.costs.model import CostModel, PredictedStep, cost_model, estimate, time_step
from ddltool.analyzers.step.costs.predict import (
    _fitting_sizes,
    memory_limit_batch,
    memory_range,
    predict,
    remedy,
    timeline,
    usable_bytes,
)
from ddltool.analyzers.step.costs.setting import ParallelDegrees, Placement, Setting
from ddltool.analyzers.step.costs.sharding import Kind, Sharding
from ddltool.analyzers.step.costs.work import (
    WorkCurve,
    gathered_matrices_s,
    measure_work,
    own_sum_s,
    own_update_s,
    timed_step,
)
from ddltool.analyzers.step.recording.op_rules import CLASS
from ddltool.analyzers.step.tracing.factories import step_from
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.sources import resolve_step, training_step
from ddltool.analyzers.step.tracing.step import TrainingStep, default_loss
from ddltool.analyzers.step.tracing.torch_adapter import trace_any_batch, trace_torch
from ddltool.device import Device, Network
from ddltool.errors import Infeasible, InputError
from ddltool.graph import COMPUTE, RECOMPUTED, Graph, Op
from ddltool.links import Link
from ddltool.precision import PrecisionName
from ddltool.profiles import read_profile
from ddltool.shipped import calibration, devices
from tests.conftest import Result

Cli = Callable[..., Result]
LINK = Link(kind="plain", bytes_per_s=1e9, latency_s=1e-4)
SETTING = Setting(fabric=Fabric(inside=LINK, between=LINK, gpus_per_node=8), optimizer="sgd")
ALONE = Placement(num_nodes=1, num_replicas=1)
DEVICE = Device(
    name="test",
    architecture="Ampere",
    multiprocessors=80,
    clock_hz=1.5e9,
    peak_flops={"float32": 1e12, "tf32": 8e12, "float16": 16e12},
    memory_bytes_per_s=1e11,
    memory_gib=16,
)
PLAIN = Constants(
    arithmetic=dict.fromkeys(ARITHMETIC, 1.0),
    traffic=dict.fromkeys(TRAFFIC, 1.0),
    feed=dict.fromkeys(FEED, 1e9),
    carried=dict.fromkeys(CARRIED, 1e9),
    start_s=0.0,
    cache=0.0,
    issue_s=0.0,
    update_s=0.0,
    turn_s=0.0,
)


def model(name: str = "V100") -> CostModel:
    return cost_model(devices().device(name), calibration())


@cache
def curve_of(name: str) -> WorkCurve:
    """The work of a built-in model in float32, traced once for all tests that ask how long it takes."""
    return measure_work(lambda: resolve_step(f"zoo:{name}"))


def step_of(module: nn.Module, *inputs: Tensor) -> TrainingStep:
    return TrainingStep(name="made", module=module, inputs=inputs, loss=default_loss)


def traced(module: type[nn.Module] | nn.Module, *inputs: Tensor, numerics: Numerics | None = None) -> Graph:
    made = module if isinstance(module, nn.Module) else module()
    return trace_torch(lambda: step_of(made, *inputs), mode="training", numerics=numerics or Numerics())


def flops_of(graph: Graph, word: str) -> float:
    return float(sum(op.flops for op in graph.ops() if word in op.op_type))


# ---------------------------------------------------------------- FLOPs, by hand


@pytest.mark.parametrize("groups", [1, 4, 64])
def test_grouped_convolutions_count_their_own_channels(groups: int) -> None:
    graph = traced(
        nn.Sequential(nn.Conv2d(3, 64, 1), nn.Conv2d(64, 64, 3, padding=1, groups=groups)), torch.zeros(2, 3, 8, 8)
    )
    one = 2 * 2 * 8 * 8 * 64 * (64 // groups) * 9
    forward = [op.flops for op in graph.ops() if op.op_type == "aten.convolution"]
    backward = [op.flops for op in graph.ops() if op.op_type == "aten.convolution_backward"]
    assert forward == [2 * 2 * 8 * 8 * 64 * 3, one]
    assert backward == [2 * one, 2 * 2 * 8 * 8 * 64 * 3]  # the image wants no gradient


@pytest.mark.parametrize(
    ("layer", "shape", "one"),
    [
        (nn.Conv1d(6, 8, 5), (2, 6, 20), 2 * 2 * 16 * 8 * 6 * 5),
        (nn.Conv3d(2, 4, 3), (2, 2, 5, 5, 5), 2 * 2 * 27 * 4 * 2 * 27),
        (nn.ConvTranspose2d(6, 8, 4, stride=2, groups=2), (2, 6, 5, 5), 2 * 2 * 25 * 6 * 4 * 16),
        (nn.Linear(6, 9), (2, 6), 2 * 2 * 6 * 9),
    ],
)
def test_other_products(layer: nn.Module, shape: tuple[int, ...], one: int) -> None:
    graph = traced(nn.Sequential(layer, nn.Flatten()), torch.zeros(*shape))
    products = graph.flops[graph.gemm[:, 1] > 0]
    assert products.sum() == 2 * one  # forward, and the gradient of the weights


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers(kind: type[nn.LSTM], gates: int, bidirectional: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = kind(16, 32, 2, bidirectional=bidirectional, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)[0]

    sides = 2 if bidirectional else 1
    weights = sides * gates * 32 * ((16 + 32) + (32 * sides + 32))
    for numerics in (Numerics(), Numerics("fp16")):
        graph = traced(Model, torch.zeros(3, 7, 16), numerics=numerics)
        assert flops_of(graph, "recurrent") == 3 * 2 * 3 * 7 * weights  # backward is twice forward
        assert {op.dtype for op in graph.ops() if "recurrent" in op.op_type} == {
            "float16" if numerics.precision == "fp16" else "float32"
        }


def test_grouped_matrix_products() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 16, 32))

        def forward(self, x: Tensor) -> Tensor:
            ends = torch.full((4,), 8, dtype=torch.int32).cumsum(0).to(torch.int32)
            return torch._grouped_mm(x.bfloat16(), self.weight.bfloat16(), offs=ends).float()

    graph = traced(Experts, torch.zeros(32, 16))
    assert flops_of(graph, "grouped_mm") == 2 * (2 * 32 * 16 * 32)


def test_attention_counts_the_square_and_keeps_half_of_it_under_a_mask() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x * self.scale, x, x, is_causal=True)

    graph = traced(Heads, torch.zeros(2, 4, 32, 16))
    one = 2 * 2 * 4 * 32 * 32 * 16
    assert sorted(op.flops for op in graph.ops() if "attention" in op.op_type) == [2 * one, 5 * one]
    assert {op.gemm for op in graph.ops() if "attention" in op.op_type} == {(8.0, 32.0, 16.0, 16.0)}


# ---------------------------------------------------------------- one trace, any batch


EVERY_NUMERICS = (Numerics(), Numerics("fp16"), Numerics("fp16", True), Numerics("bf16-pure"))


@pytest.mark.parametrize(
    ("name", "numerics"),
    [
        *(("cifarnet", numerics) for numerics in EVERY_NUMERICS),
        # Batch norm and attention, once each: they are large traces.
        ("resnet32", Numerics("fp16", True)),
        ("bert_small", Numerics("fp16")),
    ],
    ids=str,
)
def test_one_trace_gives_every_batch(name: str, numerics: Numerics) -> None:
    known = trace_any_batch(lambda: resolve_step(f"zoo:{name}"), mode="training", numerics=numerics)
    assert known.prime is not None
    for size in (2, 24) if name == "cifarnet" else (24,):
        direct = trace_torch(lambda: resolve_step(f"zoo:{name}"), mode="training", batch_size=size, numerics=numerics)
        agree(known.at(size), direct)


def test_work_of_all_pairs_grows_with_the_square() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            made = self.linear(x)
            return (made @ made.T).logsumexp(1)

    curve = measure_work(lambda: step_of(Pairs(), torch.zeros(1, 64)))
    for size in (8, 16, 64):
        assert 2 * size * size * 32 in curve.traced.at(size).flops


def test_a_model_that_halves_its_batch_is_traced_at_an_even_one() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.reshape(2, -1, 6)).sum((0, 2))

    graph = measure_work(lambda: step_of(Halves(), torch.zeros(2, 6))).traced.at(8)
    assert 2 * 8 * 36 in graph.flops


class Lambda(nn.Module):
    """Layers by name, and a forward pass that uses them."""

    def __init__(self, run: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.run, self.layers = run, nn.ModuleDict(layers)

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self.layers, *inputs)


def agree(made: Graph, direct: Graph) -> None:
    assert made.op_type == direct.op_type
    assert made.batch_size == direct.batch_size
    for field in ("flops", "size_bytes", "written_bytes", "gemm"):
        np.testing.assert_array_equal(getattr(made, field), getattr(direct, field))


LINEAR = {"l": nn.Linear(32, 32)}


@pytest.mark.parametrize(
    ("module", "shape", "prime"),
    [
        # Dimensions that happen to be multiples of the first prime.
        (nn.Sequential(nn.Conv2d(3, 4, 4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)), (1, 3, 64, 64), 67),
        (
            Lambda(
                lambda m, x: torch.cat([m["a"](x), m["b"](x)], 1).relu(), a=nn.Conv2d(3, 30, 1), b=nn.Conv2d(3, 31, 1)
            ),
            (1, 3, 4, 4),
            67,
        ),
        # The batch, twice; the batch as groups of a convolution; half of it in every view.
        (Lambda(lambda m, x: (m["l"](x) @ m["l"](x).T).logsumexp(1), **LINEAR), (4, 32), 61),
        (
            Lambda(
                lambda m, x: nn.functional.conv2d(
                    x.reshape(1, -1, 8, 8), m["l"](x[:, :1, 0, :4]).reshape(-1, 1, 2, 2), groups=len(x)
                ),
                l=nn.Linear(4, 4),
            ),
            (4, 1, 8, 8),
            61,
        ),
        (Lambda(lambda m, x: m["l"](x.view(2, x.shape[0] // 2, 32)).relu(), **LINEAR), (4, 32), 61),
        # Work that is no multiple of the batch.
        (Lambda(lambda m, x: m["l"](x[: x.shape[0] // 2]), **LINEAR), (4, 32), None),
        (Lambda(lambda m, x: torch.cat([m["l"](part) for part in x.chunk(2, 0)]), **LINEAR), (4, 32), None),
        (Lambda(lambda m, x: torch.cat([m["l"](part) for part in x.split(16)]), **LINEAR), (4, 32), None),
        (
            Lambda(lambda m, x: m["a" if len(x) > 32 else "b"](x), a=nn.Linear(64, 64), b=nn.Linear(64, 2)),
            (4, 64),
            None,
        ),
        (
            Lambda(lambda m, x: m["a" if len(x) > 100 else "b"](x), a=nn.Linear(64, 64), b=nn.Linear(64, 2)),
            (4, 64),
            None,
        ),
    ],
)  # fmt: skip
def test_every_batch_is_what_a_direct_trace_says(module: nn.Module, shape: tuple[int, ...], prime: int | None) -> None:
    module(torch.zeros(shape))
    step = step_of(module, torch.zeros(shape))
    known = trace_any_batch(lambda: step, mode="training")
    assert known.prime == prime
    assert ("does not grow in proportion" in str(known.graph.meta.get("note"))) == (prime is None)
    for size in (2, 8, 34, 128) if prime else (2, 34, 102):  # on both sides of where a model changes its way
        agree(known.at(size), trace_torch(lambda: step, mode="training", batch_size=size))


def test_places_drawn_for_a_mask_do_not_trace_the_step_again() -> None:
    """As speech models do: the places to mask are drawn on the CPU, so that their number follows the batch only roughly."""

    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.masked = nn.Linear(256, 256), nn.Parameter(torch.zeros(256))

        def forward(self, x: Tensor) -> Tensor:
            places = np.random.default_rng(len(x)).random((len(x), 50)) < 0.1
            x = self.linear(x)
            rows, columns = torch.from_numpy(places).nonzero().to(x.device).unbind(1)
            x[rows, columns] = self.masked
            return x

    step = step_of(Masks(), torch.zeros(4, 50, 256))
    curve = measure_work(lambda: step)
    assert curve.traced.prime == 61
    direct = trace_torch(lambda: step, mode="training", batch_size=24)
    assert curve.traced.at(24).flops.sum() == pytest.approx(direct.flops.sum(), rel=0.01)


def test_a_batch_that_a_model_does_not_take() -> None:
    step = step_of(Lambda(lambda m, x: m["l"](x.view(2, x.shape[0] // 2, 32)), **LINEAR), torch.zeros(4, 32))
    curve = measure_work(lambda: step)
    assert [curve.runs_at(size) for size in (1, 2, 3)] == [False, True, False]
    assert tensors(curve, 3) > tensors(curve, 2)
    with pytest.raises(InputError, match="made at batch size 3: training step cannot be traced"):
        curve.traced.at(3)


def test_a_loop_over_samples_is_traced_up_to_a_length() -> None:
    step = step_of(Lambda(lambda m, x: torch.stack([m["l"](row) for row in x]), **LINEAR), torch.zeros(4, 32))
    curve = measure_work(lambda: step)
    largest = curve.traced.largest
    assert largest is not None
    assert largest >= 61
    with pytest.raises(InputError, match=f"loops over its samples, .* {2 * largest}; ask for at most {largest}"):
        curve.traced.at(2 * largest)
    assert curve.peak(2 * largest, ALONE_STATE, "none") is None
    direct = measure_work(lambda: step_of(Lambda(lambda m, x: m["l"](x), **LINEAR), torch.zeros(4, 32)))
    assert tensors(curve, 8) > tensors(direct, 8)


# ---------------------------------------------------------------- checkpoints


def blocks(wrap: Callable[..., Tensor]) -> nn.Module:
    layers = {str(n): nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16)) for n in range(4)}

    def run(parts: nn.ModuleDict, x: Tensor) -> Tensor:
        x = parts["head"](x)
        for name in layers:
            x = x + wrap(parts[name], x)
        return x

    return Lambda(run, head=nn.Linear(16, 16), **layers)


@pytest.mark.parametrize("numerics", [Numerics(), Numerics("fp16")], ids=["fp32", "fp16"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_computed_again(reentrant: bool, numerics: Numerics) -> None:
    wrap = partial(checkpoint, use_reentrant=reentrant)
    given = torch.zeros(8, 32, 16)
    plain, saved = (
        measure_work(lambda run=run: step_of(blocks(run), given), numerics)  # type: ignore[misc]
        for run in (lambda layer, x: layer(x), wrap)
    )
    rows, one = 8 * 32, 2 * 16 * 64
    by_hand = 3 * 4 * 2 * rows * one + 2 * rows * 2 * 16 * 16  # the head's input wants no gradient
    product = plain.traced.at(8).gemm[:, 1] > 0
    assert plain.traced.at(8).flops[product].sum() == by_hand
    # Once more forward: all of it, or up to the last tensor that is kept, which the last product does not make.
    again = 4 * rows * one * (2 if reentrant else 1)
    product = saved.traced.at(8).gemm[:, 1] > 0
    assert saved.traced.at(8).flops[product].sum() == by_hand + again
    a100, products_s = devices().device("A100"), predict_module.products_s
    assert products_s(saved.traced.at(8), a100) == products_s(plain.traced.at(8), a100)  # MFU counts it once
    assert tensors(saved, 8) < tensors(plain, 8)
    kinds = {op.op_type for op in saved.traced.graph.ops()}
    assert "aten.native_dropout" in kinds
    assert saved.traced.prime == 61


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_functions_are_told_apart_as_well(reentrant: bool) -> None:
    """A function that calls no module: its products count once in MFU, whether or not they are computed again."""

    def run(parts: nn.ModuleDict, x: Tensor, wrap: Callable[..., Tensor]) -> Tensor:
        x = parts["head"](x)
        for name in ("a", "b"):
            x = x + wrap(
                lambda y, name=name: F.linear(F.linear(y, parts[name].weight).relu(), parts[name].weight.t()), x
            )
        return x.sum(dim=-1, keepdim=True) @ x.new_ones(1, 1)

    def module(wrap: Callable[..., Tensor]) -> nn.Module:
        return Lambda(partial(run, wrap=wrap), head=nn.Linear(16, 16), a=nn.Linear(16, 64), b=nn.Linear(16, 64))

    a100, x = devices().device("A100"), torch.zeros(8, 16)
    plain, again = (
        traced(module(wrap), x)
        for wrap in (lambda function, y: function(y), partial(checkpoint, use_reentrant=reentrant))
    )
    assert any(name.startswith(RECOMPUTED) for name in again.names)
    assert predict_module.products_s(again, a100) == predict_module.products_s(plain, a100)


class Penalised(nn.Module):
    """A layer whose forward pass runs a backward pass of its own, as a gradient penalty does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.requires_grad_())
        [slope] = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope


def test_a_backward_pass_within_a_forward_pass_is_no_recomputation() -> None:
    graph = traced(nn.Sequential(Penalised(), nn.Linear(16, 4)), torch.zeros(8, 16))
    assert not any(name.startswith(RECOMPUTED) for name in graph.names)


def test_checkpoints_count_what_a_real_step_counts() -> None:
    for reentrant in (False, True):
        module = blocks(partial(checkpoint, use_reentrant=reentrant))
        given = torch.zeros(2, 3, 16)
        with FlopCounterMode(display=False) as counter:
            module(given).mean().backward()
        graph = traced(module, given)
        assert graph.flops[graph.gemm[:, 1] > 0].sum() == counter.get_total_flops()


def test_a_checkpoint_that_nothing_flows_through_trains_nothing() -> None:
    """Torch's own rule: without an input that wants a gradient the reentrant form drops those of its parameters."""
    run = partial(checkpoint, use_reentrant=True)
    step = step_of(
        Lambda(lambda m, x: m["head"](run(m["body"], x)), body=nn.Linear(8, 8), head=nn.Linear(8, 2)), torch.zeros(4, 8)
    )
    graph = trace_torch(lambda: step, mode="training")
    assert graph.trained_bytes == 4 * (8 * 2 + 2)
    assert graph.meta["note"] == "2 trained parameters are read and get no gradient: layers.body"


# ---------------------------------------------------------------- complex numbers, tables, nothing


def test_complex_products_are_four_real_ones() -> None:
    class Waves(nn.Module):
        def __init__(self, dtype: torch.dtype) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(16, 32, dtype=dtype))

        def forward(self, x: Tensor) -> Tensor:
            return (x.to(self.weight.dtype) @ self.weight).abs()

    waves, real = (traced(Waves(dtype), torch.zeros(8, 16)) for dtype in (torch.complex64, torch.float32))
    assert flops_of(waves, "mm") == 4 * flops_of(real, "mm") == 2 * 8 * 8 * 16 * 32
    kernels = kernels_of(waves)
    product = kernels.kind == CLASS["matrix_product"]
    assert (2 * kernels.gemm[product].prod(1) == kernels.flops[product]).all()
    assert (kernels.width[product] == 8).all()
    op = next(op for op in waves.ops() if op.op_type == "aten.mm")
    assert op.size_bytes == 8 * (8 * 16 + 16 * 32 + 8 * 32)


def test_a_bag_of_embeddings_reads_its_rows() -> None:
    bag = traced(nn.Sequential(nn.EmbeddingBag(100_000, 16), nn.Linear(16, 2)), torch.zeros(4, 8, dtype=torch.long))
    op = next(op for op in bag.ops() if op.op_type.startswith("aten._embedding_bag") and "backward" not in op.op_type)
    assert op.estimate == "rule"
    assert op.flops == 4 * 8 * 16
    rows, written = 4 * 8 * 16 * 4, 4 * 16 * 4
    assert rows + written <= op.size_bytes <= rows + written + 8 * (32 + 4 + 32 + 4 + 4 + 4 * 16)  # and indices


def test_sparse_gradients_are_rows() -> None:
    def curve(sparse: bool) -> WorkCurve:
        table = nn.Sequential(nn.Embedding(10_000, 16, sparse=sparse), nn.Linear(16, 2))
        return measure_work(lambda: step_of(table, torch.zeros(4, 8, dtype=torch.long)))

    sparse, dense = curve(True), curve(False)
    assert sparse.traced.at(4).trained_bytes == dense.traced.at(4).trained_bytes
    table = 4 * 16 * 10_000
    assert tensors(dense, 4) >= 2 * table
    assert table < tensors(sparse, 4) < 1.1 * table


@pytest.mark.filterwarnings("error::RuntimeWarning", "ignore:Initializing zero-element")
def test_a_layer_of_no_features_takes_no_time() -> None:
    graph = traced(nn.Sequential(nn.Linear(64, 0), nn.Linear(0, 64)), torch.zeros(4, 64))
    assert np.isfinite(model().step(graph).step_s)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_sequence_first_layer_has_its_batch_in_the_second_place(kind: type[nn.LSTM]) -> None:
    step = step_from(kind(16, 32), "train.py:layer", "layer")
    assert step.at_batch(5).inputs[0].shape == (128, 5, 16)
    first = step_from(kind(16, 32, batch_first=True), "train.py:layer", "layer")
    other = step_from((kind(16, 32), torch.zeros(128, 1, 16)), "train.py:layer", "layer")
    graphs = [
        trace_any_batch(lambda made=made: made, mode="training").at(5)  # type: ignore[misc]
        for made in (step, first, other)
    ]
    assert {graph.batch_size for graph in graphs} == {5}
    assert len({flops_of(graph, "recurrent") for graph in graphs}) == 1
    assert {op.gemm[:2] for graph in graphs for op in graph.ops() if "recurrent" in op.op_type} == {(128.0, 5.0)}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_a_projected_state_is_narrower_than_its_cell() -> None:
    lstm = nn.LSTM(16, 32, 2, batch_first=True, proj_size=8)
    seen = []

    def run(layers: nn.ModuleDict, x: Tensor) -> Tensor:
        output, (state, cell) = layers["lstm"](x)
        seen.append((output.shape, state.shape, cell.shape))
        return layers["head"](cell[-1]).relu()

    graph = traced(Lambda(run, lstm=lstm, head=nn.Linear(32, 4)), torch.zeros(3, 7, 16))
    output, (state, cell) = lstm(torch.zeros(3, 7, 16))
    assert set(seen) == {(output.shape, state.shape, cell.shape)}
    weights = 4 * 32 * (16 + 8) + 8 * 32 + 4 * 32 * (8 + 8) + 8 * 32
    forward = next(op for op in graph.ops() if op.op_type == "aten.recurrent")
    assert forward.flops == 2 * 3 * 7 * weights
    assert forward.gemm[0] == 2 * 7
    assert 2 * np.prod(forward.gemm) == pytest.approx(forward.flops)


ALONE_STATE = Sharding(kind="none")


def tensors(curve: WorkCurve, batch: int, optimizer: str = "none") -> float:
    """Return the most bytes of tensors that one process alone holds."""
    found = curve.peak(batch, ALONE_STATE, optimizer)
    assert found is not None
    return found.total_bytes


def allocator_peak(name: str, batch: int, folder: Path) -> float:
    """Return the peak bytes of tensors in a real step on the CPU, as torch's allocator reports them."""
    step = training_step(f"zoo:{name}", batch)
    module = step.module.train()

    def run() -> None:
        for parameter in module.parameters():
            parameter.grad = None
        step.loss(module(*step.inputs)).backward()

    run()
    for parameter in module.parameters():
        parameter.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        run()
    recorded.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]")
    held = [*module.parameters(), *module.buffers(), *step.inputs]
    base = sum(tensor.numel() * tensor.element_size() for tensor in held)
    return float(np.cumsum([size for _, size in changes]).max()) + base


@pytest.mark.parametrize("name", ["cifarnet", "resnet32", "bert_small"])
def test_the_peak_of_live_bytes_is_the_allocators(name: str, tmp_path: Path) -> None:
    curve = measure_work(lambda: resolve_step(f"zoo:{name}"), Numerics(cuda=False))
    assert tensors(curve, 8) == pytest.approx(allocator_peak(name, 8, tmp_path), rel=0.05)


# ---------------------------------------------------------------- precision


def test_autocast_is_cudas() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.softmax(nn.functional.gelu(self.linear(self.norm(x))), -1)

    graph = traced(Block, torch.zeros(4, 16), numerics=Numerics("fp16"))
    kind = {op.op_type: op.dtype for op in graph.ops()}
    assert kind["aten.addmm"] == kind["aten.gelu"] == "float16"
    assert kind["aten.native_layer_norm"] == "float32"
    softmax = next(op for op in graph.ops() if op.op_type == "aten._softmax")
    assert softmax.size_bytes == 4 * 16 * (2 + 4)  # it reads half precision and writes float32, in one kernel
    casts = [op for op in graph.ops() if op.op_type == "aten._to_copy" and op.estimate == "free"]
    assert len(casts) >= 2


class Again(nn.Module):
    """One layer, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(self.layer(x)))


@pytest.mark.parametrize(
    ("name", "computes", "width"),
    [("bf16", "bfloat16", 4), ("fp16", "float16", 4), ("bf16-pure", "bfloat16", 2), ("fp16-pure", "float16", 2)],
)
def test_a_half_precision_keeps_float32_unless_it_is_pure(name: PrecisionName, computes: str, width: int) -> None:
    graph = traced(Again, torch.zeros(4, 16), numerics=Numerics(name))
    ops = list(graph.ops())
    assert {op.dtype for op in ops if op.op_type in ("aten.addmm", "aten.mm")} == {computes}
    assert {op.size_bytes for op in ops if op.kind in ("recv", "send")} == {16 * width, 16 * 16 * width}
    # Of three passes through one layer autocast casts x, and weight and bias once: its cache holds them.
    casts = [op for op in ops if op.op_type == "aten._to_copy" and op.name.startswith("forward/layer/")]
    assert len(casts) == (3 if width == 4 else 0)


def test_amp_is_fp16() -> None:
    assert Numerics("amp") == Numerics("fp16")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown precision 'bf16-pur'; did you mean \"bf16-pure\""):
        Numerics("bf16-pur")  # type: ignore[arg-type]


class Cells(nn.Module):
    """Ops that the CPU's autocast runs in another type than CUDA's."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.volume = nn.GRUCell(8, 8), nn.Conv3d(1, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        images = self.volume(x.view(-1, 1, 2, 2, 2))
        pooled = nn.functional.max_pool3d(images, 2)
        return self.cell(x), pooled, 2.0 / images


def test_autocast_follows_cudas_lists_where_the_cpus_differ() -> None:
    graph = traced(Cells, torch.zeros(4, 8), numerics=Numerics("bf16"))
    kind = {op.op_type: op.dtype for op in graph.ops() if op.name.startswith("forward")}
    assert kind["aten._thnn_fused_gru_cell"] == "bfloat16"
    assert kind["aten.max_pool3d_with_indices"] == "bfloat16"
    assert kind["aten.reciprocal"] == "float32"


def test_fully_shard_gathers_half_and_reduces_float32_unless_it_is_pure() -> None:
    module, sharded = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)), Sharding(kind="fsdp", shard=8)
    numbers = 2 * 64 + 64 * 64 + 64

    def work(name: PrecisionName) -> WorkCurve:
        return measure_work(lambda: step_of(module, torch.zeros(2, 64)), Numerics(name))

    def bytes_of(name: PrecisionName) -> tuple[float, float]:
        program = program_of(estimate(work(name).under(sharded).traced.at(8), model("A100"), Network()))
        return program.held_bytes.sum() / numbers, program.size_bytes.sum() / numbers

    assert (bytes_of("fp32"), bytes_of("bf16"), bytes_of("bf16-pure")) == ((4, 4), (2, 4), (2, 2))
    under_ddp, under_fsdp = (work("bf16").under(each).traced.graph for each in (Sharding(kind="ddp"), sharded))
    for graph, norm in ((under_ddp, "float32"), (under_fsdp, "bfloat16")):  # no autocast under a policy
        assert {op.dtype for op in graph.ops() if op.op_type == "aten.native_layer_norm"} == {norm}
    held = {
        name: work(name).peak(8, Sharding(kind="fsdp", shard=2), "adamw").parts  # type: ignore[union-attr]
        for name in ("bf16", "bf16-pure")
    }
    assert [held[name]["parameters"] / numbers for name in held] == [4 / 2, 2 / 2]
    assert [held[name]["optimizer"] / numbers for name in held] == [8 / 2, 4 / 2]


def test_a_model_that_needs_autocast_is_sharded_under_it() -> None:
    class Demands(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            if self.layer.weight.dtype != torch.float32:
                raise TypeError("wants float32 parameters")
            return self.layer(x)

    curve = measure_work(lambda: step_of(Demands(), torch.zeros(2, 16)), Numerics("bf16"))
    assert curve.under(Sharding(kind="fsdp", shard=2)) is curve


def test_every_precision_runs_at_its_own_peak() -> None:
    layers = nn.Sequential(nn.Conv2d(64, 64, 1, bias=False), nn.Flatten(), nn.Linear(64 * 256, 64, bias=False))
    device = DEVICE.model_copy(update={"memory_bytes_per_s": 1e18, "multiprocessors": 0})
    seconds = {}
    for precision in ("fp32", "tf32", "fp16"):
        graph = traced(layers, torch.zeros(64, 64, 16, 16), numerics=Numerics(precision))  # type: ignore[arg-type]
        op_s = time_step(graph, device, PLAIN).op_s
        types = np.array(graph.op_type)
        rate = graph.flops / np.where(op_s > 0, op_s, np.inf)
        seconds[precision] = (rate[types == "aten.convolution"][0], rate[types == "aten.mm"][0])
    assert seconds["fp32"] == pytest.approx((8e12, 1e12))  # torch's default: TF32 in convolutions alone
    assert seconds["tf32"] == pytest.approx((8e12, 8e12))
    assert seconds["fp16"] == pytest.approx((16e12, 16e12))


# ---------------------------------------------------------------- kernels and times


def test_the_backward_of_a_convolution_is_two_kernels() -> None:
    graph = traced(nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 32, 3)), torch.zeros(2, 8, 12, 12))
    kernels = kernels_of(graph)
    chosen = kernels.kind == CLASS["convolution"]
    assert kernels.flops[chosen].sum() == flops_of(graph, "convolution")
    assert sorted(kernels.direction[chosen].tolist()) == [0, 0, INPUT_GRADIENT, WEIGHT_GRADIENT, WEIGHT_GRADIENT]
    np.testing.assert_allclose(2 * kernels.gemm[chosen].prod(axis=1), kernels.flops[chosen])
    assert set(kernels.op.tolist()) <= set(np.flatnonzero(graph.kind == COMPUTE).tolist())


@settings(max_examples=25)
@given(st.lists(st.tuples(st.floats(0, 1e-3), st.booleans()), min_size=1, max_size=30), st.floats(1e-6, 1e-3))
def test_the_device_runs_behind_the_host(ops: list[tuple[float, bool]], issue_s: float) -> None:
    """A queue played by hand: the host issues one op after another, the device runs what it was given, in order."""
    rows = [
        Op(name=str(place), kind="compute", size_bytes=0.0 if view else seconds * 1e11, estimate="free" if view else "rule",
           op_type="aten.add")
        for place, (seconds, view) in enumerate(ops)
    ]  # fmt: skip
    step = time_step(Graph.from_ops("queue", "inference", rows), DEVICE, replace(PLAIN, issue_s=issue_s))
    host = device = idle = 0.0
    for seconds, view in ops:
        busy = seconds if not view and seconds * 1e11 > 0 else 0.0
        host += issue_s if busy else issue_s / 4
        if busy:
            idle += max(host - device, 0.0)
            device = max(device, host) + busy
    assert step.pass_s == pytest.approx(device, rel=1e-9, abs=1e-12)
    assert step.pass_host_s == pytest.approx(idle, rel=1e-9, abs=1e-9 * device)


@pytest.mark.parametrize("name", ["resnet32", "bert_small"])
def test_more_samples_take_longer_and_a_faster_device_less(name: str) -> None:
    curve = curve_of(name)
    rows = predict(curve, model("V100"), SETTING, [1, 8, 64, 512], [ALONE])
    steps = [row.step_time_s for row in rows]
    rates = [row.samples_per_s for row in rows]
    assert steps == pytest.approx(sorted(steps), rel=1e-12)  # few samples wait for the host alike
    assert rates == sorted(rates)
    assert rows[0].host_bound
    assert not rows[-1].host_bound
    waits = [row.host_wait_s / row.step_time_s for row in rows]
    assert waits[0] > 0.2
    assert waits[-1] < 0.01
    assert all(0 < row.mfu < 1 for row in rows)
    at_512 = {
        kind: predict(curve, model(kind), SETTING, [512], [ALONE])[0].step_time_s for kind in ("K80", "V100", "H100")
    }
    assert at_512["K80"] > at_512["V100"] > at_512["H100"]


@pytest.mark.parametrize("name", ["resnet32", "bert_small", "gpt_small"])
def test_compiling_saves_traffic_and_keeps_products(name: str) -> None:
    graph = trace_torch(lambda: resolve_step(f"zoo:{name}"), mode="training", numerics=Numerics("fp16"))
    fused = compiled(graph)
    product = graph.gemm[:, 1] > 0
    np.testing.assert_array_equal(fused.size_bytes[product], graph.size_bytes[product])
    np.testing.assert_array_equal(fused.flops, graph.flops)
    compute = graph.kind == COMPUTE
    assert 0.2 * graph.size_bytes[compute].sum() < fused.size_bytes[compute].sum() < graph.size_bytes[compute].sum()
    assert model().step(fused).device_s < model().step(graph).device_s


def test_the_estimate_is_the_step() -> None:
    graph = curve_of("resnet32").traced.at(8)  # so few samples wait for the host
    timed = estimate(graph, model(), Network(), optimizer="momentum")
    step = model().step(graph, optimizer="momentum")
    assert timed.duration_s[timed.kind == COMPUTE].sum() == pytest.approx(step.pass_s)
    assert timed.meta["update_s"] == step.update_s > step.update_host_s > 0
    # sharded, each tensor is a part of itself, and as many are started; ZeRO-1 gives each process whole tensors
    sharded, parted = (own_update_s(timed, Sharding(kind=kind, shard=4)) for kind in ("fsdp", "zero1"))  # type: ignore[arg-type]
    assert sharded - step.update_host_s == pytest.approx((step.update_s - step.update_host_s) / 4)
    assert parted == pytest.approx(step.update_s / 4)
    assert timed.meta["error_low"] < 1 < timed.meta["error_high"]


# ---------------------------------------------------------------- replicas and memory


def test_synchronisation_hides_behind_backward() -> None:
    curve = curve_of("resnet32")
    places = [ALONE, Placement(num_nodes=2, num_replicas=2)]
    fast, slow = (
        predict(curve, model(), replace(SETTING, fabric=Fabric.flat(rate, 0.0)), [64], places) for rate in (1e12, 1e6)
    )
    assert fast[1].sync_time_s < 0.01 * fast[0].step_time_s
    whole = curve.traced.graph.parameter_bytes / 1e6  # a ring of two moves the whole size once
    assert 0.9 * whole - slow[0].step_time_s < slow[1].sync_time_s <= whole


def test_a_ring_is_as_fast_as_its_slowest_hop() -> None:
    """More replicas never synchronise sooner; a tree of nodes keeps the latency of many from adding up."""
    curve = curve_of("resnet32")
    slow, fast = (Link(kind="plain", bytes_per_s=rate, latency_s=delay) for rate, delay in ((1e8, 1e-5), (1e9, 1e-4)))
    setting = replace(SETTING, fabric=Fabric(inside=slow, between=fast, gpus_per_node=8))
    places = [Placement(num_nodes=-(-count // 8), num_replicas=count) for count in (2, 8, 9, 16, 64, 512)]
    waits = [row.sync_time_s for row in predict(curve, model(), setting, [8], places)]
    assert waits == sorted(waits)
    bytes_s = 2 * curve.traced.graph.parameter_bytes / 1e8
    assert waits[-1] < bytes_s + 3 * 2 * (6 * 1e-4 + 7 * 1e-5)  # three buckets, six levels of nodes, seven hops inside


def test_accumulation_repeats_passes_and_updates_once() -> None:
    curve = curve_of("resnet32")
    once, four = (predict(curve, model(), replace(SETTING, accumulation=n), [64], [ALONE])[0] for n in (1, 4))
    alone = predict(curve, model(), replace(SETTING, optimizer="none"), [64], [ALONE])[0].step_time_s
    sums_s = own_sum_s(timed_step(curve.traced.at(64), model(), SETTING), Sharding(kind="none"))
    assert four.step_time_s - once.step_time_s == pytest.approx(3 * (alone + sums_s))
    assert four.step_time_s < 4 * once.step_time_s + 3 * sums_s  # one update for four passes


def test_memory_by_hand() -> None:
    """One matrix of 4 MB, next to no activations: parameters, gradients, Adam's state and its temporary, DDP's buckets."""
    curve = measure_work(lambda: step_of(nn.Linear(1000, 1000, bias=False), torch.zeros(2, 1000)))

    def copies(optimizer: str, kind: Kind = "none") -> int:
        found = curve.peak(2, Sharding(kind=kind), optimizer)
        assert found is not None
        assert found.total_bytes == pytest.approx(found.curve.max())
        return round(found.total_bytes / 4e6)

    assert [copies(name) for name in ("sgd", "adam", "foreach-adam")] == [2, 4, 5]
    assert copies("sgd", "ddp") == 3


def test_what_is_frozen_has_no_update_and_no_state() -> None:
    frozen = nn.Sequential(nn.Linear(1000, 1000, bias=False), nn.Linear(1000, 10, bias=False))
    frozen[0].requires_grad_(False)
    curve = measure_work(lambda: step_of(frozen, torch.zeros(2, 1000)))
    graph = curve.traced.graph
    assert (graph.parameter_bytes, graph.trained_bytes) == (4_040_000, 40_000)
    peak = curve.peak(2, ALONE_STATE, "adam")
    assert peak is not None
    assert (peak.parts["parameters"], peak.parts["optimizer"]) == (4_040_000, 2 * 40_000 + 4)  # and its count of steps
    small = measure_work(lambda: step_of(nn.Linear(1000, 10, bias=False), torch.zeros(2, 1000))).traced.graph
    times = [model().step(each, optimizer="adam").update_s for each in (graph, small)]
    assert times[0] == pytest.approx(times[1])
    assert times[0] > 0


def test_the_memory_limit_is_the_last_batch_that_fits() -> None:
    curve = curve_of("bert_small")
    for gib in (2, 5, 16):
        device = DEVICE.model_copy(update={"memory_gib": gib})
        limit, usable = memory_limit_batch(curve, device, replace(SETTING, optimizer="sgd")), gib * 2**30 - 2**30
        fits = [curve.held(size, ALONE_STATE, "sgd", {}).reserved_bytes(usable) for size in (limit, limit + 1)]
        assert fits[0] is not None
        assert fits[1] is None
        assert 0.9 * usable < tensors(curve, limit, "sgd") <= usable
    assert memory_limit_batch(curve, DEVICE.model_copy(update={"memory_gib": 1.01}), SETTING) == 0


class Sized:
    """A step of which only the bytes are known: ``lasting`` and ``each`` for every sample, less where state is shared."""

    def __init__(self, lasting: float, each: float) -> None:
        self.lasting, self.each, self.blocks = lasting, each, ("a",)

    def under(self, sharding: Sharding, compile: bool = False) -> Sized:
        return self

    def lifetimes(self, size: int) -> Sized:
        return self

    def runs_at(self, size: int) -> bool:
        return size != 2

    def peak_bytes(self, size: int, sharding: Sharding, checkpointing: str) -> float:
        return (
            self.lasting / sharding.shard
            + size * self.each / {"none": 1, "selective": 2, "full": 4, "full:cpu": 8}[checkpointing]
        )

    def held(self, size: int, sharding: Sharding, optimizer: str, checkpointing: str) -> Any:
        total = self.peak_bytes(size, sharding, checkpointing)
        reserved = 1.25 * total  # segments take a quarter more than the tensors
        return SimpleNamespace(
            peak=lambda: SimpleNamespace(total_bytes=total),
            reserved_bytes=lambda limit: round(reserved) if reserved <= limit else None,
        )


@given(
    st.floats(0, 60e9),
    st.floats(1e7, 40e9),
    st.sampled_from(["ddp", "zero1", "fsdp"]),
    st.sampled_from(["none", "selective", "full"]),
    st.integers(1, 8),
)
def test_the_largest_batch_and_what_helps_are_those_of_trying_all(
    lasting: float, each: float, kind: str, checkpointing: str, replicas: int
) -> None:
    """Batches one after the other until one does not fit; changes of options in the order in which they cost least."""
    sized: Any = Sized(lasting, each)
    setting = replace(SETTING, sharding=kind, checkpointing=checkpointing)

    def largest(name: str, how: str, count: int) -> int:
        sharding = replace(SETTING, sharding=name).sharded(count)
        room = 15 * 2.0**30  # of 16 GiB, less what the driver and a context take
        return next(n for n in itertools.count() if 1.25 * sized.peak_bytes(n + 1, sharding, how) > room)

    limit = largest(kind, checkpointing, replicas)
    assert memory_limit_batch(sized, DEVICE, setting, replicas) == limit
    fits: Any = SimpleNamespace(device=DEVICE)
    if limit:
        sizes = [2**power for power in range(40) if 2**power <= limit]
        assert _fitting_sizes(sized, fits, setting, replicas) == tuple(size for size in sizes if size != 2)
        return
    hows = ["none", "selective", "full", "full:cpu"]
    wanted = ""
    for count in (replicas, *(2**power for power in range(11) if 2**power > replicas)):
        for name in (kind,) if count == 1 else (kind, "zero1", "fsdp") if count == replicas else ("fsdp",):
            for how in hows[hows.index(checkpointing) :]:
                if not wanted and (n := largest(name, how, count)):
                    wanted = f"--replicas {count} " if count != replicas else ""
                    wanted += f"--sharding {name} " if name != kind else ""
                    wanted += f"--checkpointing {how} " if how != checkpointing else ""
                    wanted = f"with {wanted}a local batch of {n} does"
    assert remedy(sized, DEVICE, setting, replicas) == wanted
    with pytest.raises(Infeasible, match=re.escape(wanted or "nor does it sharded over 1,024")):
        _fitting_sizes(sized, fits, setting, replicas)


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.01, 0.5, 3.0]), st.integers(0, 4), st.integers(0, 4)),
        min_size=1,
        max_size=300,
    )
)
def test_a_timeline_shows_the_fullest_place_of_each_span(places: list[tuple[float, int, int]]) -> None:
    ends = np.cumsum([took for took, _, _ in places])
    curves = {"a": np.array([float(one) for _, one, _ in places]), "b": np.array([float(one) for *_, one in places])}
    curve: Any = SimpleNamespace(
        lifetimes=lambda size: SimpleNamespace(clock=lambda again, timed, copies: ends, blocks=()),
        held=lambda *_: SimpleNamespace(
            curves=lambda: curves, peak=lambda: SimpleNamespace(curve=curves["a"] + curves["b"])
        ),
        timed=lambda *_: None,
    )
    curve.under = lambda *_: curve
    row: Any = SimpleNamespace(num_replicas=1, local_batch_size=8, recompute=None)
    with mock.patch.object(predict_module, "Recomputation"):
        found = timeline(curve, model(), SETTING, row)
    fullest: dict[int, int] = {}
    for place, end in enumerate(ends):  # of 160 equal spans; of equal bytes the last place
        span = min(int(160 * end / max(ends[-1], 1e-30)), 159)
        before = fullest.get(span, place)
        fullest[span] = place if sum(places[place][1:]) >= sum(places[before][1:]) else before
    kept = sorted(fullest.values())
    assert found is not None
    assert found.time_s == [ends[place] for place in kept]
    wanted = {part: [float(places[place][n]) for place in kept] for n, part in ((1, "a"), (2, "b"))}
    assert found.parts == {part: held for part, held in wanted.items() if any(held)}


@given(
    st.floats(1, 9), st.floats(0, 1), st.integers(0, 5), st.sampled_from(["none", "ddp", "zero1", "fsdp", "hsdp:2"]),
    st.integers(1, 3), st.integers(1, 2), st.integers(1, 2),
)  # fmt: skip
def test_shares_of_an_update_and_ranges_of_memory_by_hand(
    whole: float, host: float, matrices: int, kind: str, accumulation: int, tensor: int, pipeline: int
) -> None:
    replicas = 1 if kind == "none" else 4
    sharding = replace(SETTING, sharding=kind, accumulation=accumulation).sharded(replicas)
    assert sharding.sums == (accumulation > 1)
    parts = {"none": 1, "ddp": 1, "zero1": 4, "fsdp": 4, "hsdp:2": 2}[kind]
    graph: Any = SimpleNamespace(
        meta={"update_s": whole, "update_host_s": host, "sum_s": whole, "sum_launch_s": host}
        | ({"update_matrices": matrices, "update_matrix_bytes": 8e6} if matrices else {})
    )
    split = kind in ("fsdp", "hsdp:2")
    update = host + (whole - host) / parts if split else whole / parts
    if matrices:  # the process with most of them
        update = whole * max(len(range(first, matrices, parts)) for first in range(parts)) / matrices
    assert own_update_s(graph, sharding) == pytest.approx(update)
    assert own_sum_s(graph, sharding) == pytest.approx(host + (whole - host) / parts if split else whole)
    group: Any = SimpleNamespace(reduce_scatter_s=lambda size: size / 1e6)
    assert gathered_matrices_s(graph, group, sharding) == pytest.approx(2 * 8.0 / parts if matrices else 0.0)
    spread = ParallelDegrees(tensor=tensor, pipeline=pipeline)
    kinds = [replicas > 1, kind == "hsdp:2", tensor > 1, pipeline > 1].count(True)
    first_buckets = 4e8 if kind in ("ddp", "zero1") else 0.0
    assert memory_range(1e9, 2e9, sharding, replicas, 3e8, spread, 4e8) == (
        1e9,
        pytest.approx(1.15 * 2e9 + 2 * 2**30 + 3e8 + kinds * 256 * 2**20 + first_buckets),
    )
    recorded = memory_range(1e9, 0.0, Sharding(kind="none"), 4, 0.0)  # a script's own replicas
    assert recorded == (1e9, 2 * 2**30 + 256 * 2**20)
    program: Any = SimpleNamespace(compute_s=whole)
    with mock.patch.object(work_module, "_synchronized_pass_s", return_value=whole + 1):
        again = (whole + 1 if split else whole) * (accumulation - 1)
        made = replace(SETTING, accumulation=accumulation)
        found = work_module.step_of(program, made, ALONE, sharding, host, lambda group: group)
        assert found == pytest.approx(again + whole + 1 + host)
    ecc = DEVICE.model_copy(update={"ecc": True, "source": "a datasheet"})
    assert usable_bytes(DEVICE) == 15 * 2**30
    assert usable_bytes(ecc) == 14 * 2**30
    assert usable_bytes(ecc.model_copy(update={"source": "given by the user"})) == 15 * 2**30


# ---------------------------------------------------------------- how sure


def test_intervals_widen_with_what_was_not_seen() -> None:
    seen, generation, unknown = (model(name).interval(1.0) for name in ("V100", "A30", "MI300X"))
    for narrow, wide in ((seen, generation), (generation, unknown)):
        assert wide[0] <= narrow[0] <= 1 <= narrow[1] <= wide[1]
    for key, none, some in (("host_share", 0.5, 0.6), ("library_share", 0.0, 0.1)):
        shares = [model("V100").interval(1.0, **{key: share}) for share in (0.0, none, some, 0.7, 0.8, 0.9, 2.0)]
        assert [low for low, _ in shares] == sorted((low for low, _ in shares), reverse=True)
        assert [high for _, high in shares] == sorted(high for _, high in shares)
        assert shares[1] == seen
        assert seen[1] < shares[2][1] < 1.3 * seen[1]  # it widens bit by bit


def test_convolutions_by_channel_run_in_the_library_that_torch_asks_and_grouped_ones_are_less_sure() -> None:
    def step(groups: int, *numerics: object) -> PredictedStep:
        module = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, groups=groups), nn.Flatten(), nn.Linear(64 * 28 * 28, 2))
        build = partial(step_of, module, torch.zeros(2, 64, 28, 28))
        traced = trace_any_batch(build, mode="training", numerics=Numerics(*numerics))  # type: ignore[arg-type]
        return model("A100").step(traced.at(64))

    # channels_first: cuDNN in float16 alone; channels_last: cuDNN in either
    assert step(64, "bf16").device_s > 1.2 * step(64, "fp16").device_s
    assert step(64, "bf16", True).device_s == step(64, "fp16", True).device_s
    assert step(16, "fp16", True).library_share > 0.1
    assert step(16, "fp16").library_share == step(64, "fp16", True).library_share == 0.0


def test_no_device_is_faster_than_its_datasheet() -> None:
    bare = {
        "multiprocessors": 0,
        "clock_hz": 0.0,
        "name": "box",
    }  # without clocks nothing limits what feeds matrix units
    box = cost_model(devices().device("A100").model_copy(update=bare), calibration())
    curve = measure_work(lambda: step_of(nn.Linear(4096, 4096), torch.zeros(2, 4096)), Numerics("fp16"))
    (row,) = predict(curve, box, SETTING, [8192], [ALONE])
    assert 0.4 < row.mfu <= 1.0


def test_the_steps_of_a_recurrent_layer_wait_for_each_other() -> None:
    """As many products in 512 steps of 2 samples as in 2 steps of 512: the former takes at least a turn for each."""

    def pass_s(steps: int, batch: int) -> float:
        layers = nn.LSTM(64, 64, 2, batch_first=True)
        graph = traced(layers, torch.zeros(batch, steps, 64))
        return model("A100").step(graph).device_s

    turns_s = 2 * 2 * 510 * calibration().turn_s  # layers, forward and backward
    assert turns_s < pass_s(512, 2) - pass_s(2, 512) < 3 * turns_s


# ---------------------------------------------------------------- the commands


def test_rows_say_that_they_are_predicted(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "profile.csv"
    options = ("--batch-sizes", "8,32,128", "--replicas", "1,2,8", "--gpus-per-node", 4)
    result = cli("predict", "zoo:cifarnet", "--device", "t4,A100", *options, "-o", out, "--json")
    document = result.document
    assert document["predicted"] is True
    assert {row["origin"] for row in document["rows"]} == {"predicted"}
    assert {row["device"] for row in document["rows"]} == {"T4", "A100"}
    for row in document["rows"]:
        assert row["predicted_low_s"] < row["step_time_s"] < row["predicted_high_s"]
        assert row["samples_per_s"] == pytest.approx(row["num_replicas"] * row["local_batch_size"] / row["step_time_s"])
    assert document["assumptions"]["precision"] == "fp32"
    frame = read_profile(out)
    places = frame[["num_nodes", "num_replicas"]].drop_duplicates().to_numpy().tolist()
    assert places == [[1, 1], [1, 2], [2, 8]]
    text = cli("predict", "zoo:cifarnet", "--device", "H100", "--batch-sizes", 8, "--precision", "bf16").out
    assert "Assumed: bf16: autocast over float32 parameters, 16 bytes a parameter with adam" in " ".join(text.split())
    assert text.splitlines()[0].startswith("Fastest here: ")
    assert "predicted." in text.splitlines()[0]
    [row] = cli(
        "predict", "zoo:cifarnet", "--device", "H100", "--batch-sizes", 8, "--precision", "bf16", "--json"
    ).document["rows"]
    share = f"{row['host_wait_s'] / row['step_time_s']:.0%} of the step"
    assert f"The GPU waits for Python: H100 at batch 8 ({share}); --compile" in " ".join(text.split())
    assert max(len(line) for line in text.splitlines() if "│" in line or "─" in line) <= 80


def test_where_no_sample_fits_the_answer_says_what_would(cli: Cli, tmp_path: Path) -> None:
    spec = "kind: ddltool.devices\ndevices:\n  - {name: Tiny, like: T4, memory_gib: 3}\n"
    (tmp_path / "tiny.yaml").write_text(spec)
    asked = ("predict", "zoo:vgg19", "--device", "Tiny", "--devices-file", tmp_path / "tiny.yaml")
    refused = cli(*asked)
    assert refused.code == 3
    helps = re.search(r"with --replicas \d+ --sharding fsdp a local batch of \d+ does", refused.err)
    assert helps is not None
    assert helps[0] in " ".join(cli(*asked, "--batch-sizes", 1).out.split())


def test_batches_beyond_the_memory_are_shown_and_marked(cli: Cli) -> None:
    rows = cli("predict", "zoo:bert_small", "--device", "T4", "--batch-sizes", "16,1000000", "--json").document["rows"]
    assert [row["fits"] for row in rows] == [True, False]
    every = cli("predict", "zoo:bert_small", "--device", "T4", "--json").document["rows"]
    assert [row["local_batch_size"] for row in every] == [2**power for power in range(len(every))]
    assert all(row["fits"] for row in every)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (("--device", "T44"), 'unknown device .T44.; did you mean "T4"'),
        (("--device", "cpu-core"), "is no GPU"),
        (("--device", ","), "names no device"),
        (("--precision", "fp6"), "--precision: unknown precision 'fp6'"),
        (("--optimizer", "adamx"), "--optimizer: unknown optimizer 'adamx'"),
        (("--batch-sizes", "0"), "--batch-sizes"),
        (("--batch-sizes", "1000000000000"), "--batch-sizes: 1000000000000 is out of range"),
        (("--replicas", "0"), "--replicas"),
        (("--bandwidth", "0Gbit"), "--bandwidth: .*not a usable bandwidth"),
        (("--local-latency", "nan"), "--local-latency"),
    ],
)
def test_bad_requests_get_one_line(cli: Cli, arguments: tuple[str, ...], wanted: str, tmp_path: Path) -> None:
    out = tmp_path / "profile.csv"
    device = () if "--device" in arguments else ("--device", "T4")
    result = cli("predict", "zoo:cifarnet", *device, *arguments, "-o", out)
    assert result.code == 2
    assert re.search(wanted, result.error_line)
    assert not out.exists()


def test_a_source_that_cannot_be_traced_at_other_batches(cli: Cli) -> None:
    assert "holds one batch size only" in cli("predict", "model.onnx", "--device", "T4").error_line


JOB = """
kind: ddltool.job
name: j
model: zoo:{name}
batch_size: {size}
max_workers: 1
precision: {precision}
optimizer: {optimizer}
devices:
  - {{type: {device}, count: 1}}
"""
TEN_JOBS = [  # those of large models, and of one that another row has, are slow
    pytest.param(("resnet32", 64, "fp32", "adam", "V100"), marks=pytest.mark.slow),
    pytest.param(("resnet32", 8, "fp16", "momentum", "T4"), marks=pytest.mark.slow),
    ("cifarnet", 128, "fp32", "sgd", "K80"),
    pytest.param(("resnet50_v1", 32, "fp16", "momentum", "A100"), marks=pytest.mark.slow),
    pytest.param(("bert_small", 16, "tf32", "adamw", "A100"), marks=pytest.mark.slow),
    ("bert_small", 4, "bf16", "adam", "H100"),
    pytest.param(("gpt_small", 8, "fp32", "adam", "RTX3090"), marks=pytest.mark.slow),
    pytest.param(("inception_v1", 32, "fp32", "adam", "P100"), marks=pytest.mark.slow),
    ("vgg16", 16, "fp16", "sgd", "RTX4090"),
    ("alexnet_v2", 256, "fp32", "momentum", "MI300X"),
]


@pytest.mark.parametrize("job", TEN_JOBS, ids=lambda job: f"{job[0]}-{job[4]}")
def test_one_thing_has_one_time(cli: Cli, job: tuple[str, int, str, str, str], tmp_path: Path) -> None:
    """What ``predict`` says of a step is what ``plan`` says, and what ``trace`` and its graph add up to."""
    name, size, precision, optimizer, device = job
    path, graph = tmp_path / "job.yaml", tmp_path / "graph.json"
    path.write_text(JOB.format(name=name, size=size, precision=precision, optimizer=optimizer, device=device))
    predicted = cli(
        *("predict", f"zoo:{name}", "--device", device, "--batch-sizes", size, "--precision", precision),
        *("--optimizer", optimizer, "--json"),
    ).document["rows"][0]["step_time_s"]
    planned = cli("plan", path, "--strategy", "bsp", "--json").document
    assert planned["iteration_s"] == pytest.approx(predicted, rel=1e-6)
    cli("trace", f"zoo:{name}", "--batch-size", size, "--device", device, "--precision", precision, "-o", graph)
    ops = json.loads(graph.read_text())
    passes = sum(op["duration_s"] for op in ops["ops"] if op["kind"] == "compute")
    without = cli(
        *("predict", f"zoo:{name}", "--device", device, "--batch-sizes", size, "--precision", precision),
        *("--optimizer", "none", "--json"),
    ).document["rows"][0]["step_time_s"]
    assert passes == pytest.approx(without, rel=1e-6)


def test_a_table_of_several_devices_and_replicas_keeps_its_columns_whole(cli: Cli) -> None:
    """Where 80 columns do not hold all, the MFU goes first; no word and no figure is folded."""
    lines = cli(
        "predict", "zoo:cifarnet", "--device", "H100,A100-80GB", "--replicas", "96", "--batch-sizes", "2048"
    ).out
    header = next(line for line in lines.splitlines() if "replicas" in line)
    assert "80 % range" in header
    assert "MFU" not in header
    assert max(map(len, lines.splitlines())) <= 80


@pytest.mark.parametrize(("sharding", "told"), [("fsdp", True), ("zero1", True), ("ddp", False), ("fsdp:cpu", False)])
def test_one_replica_is_told_that_it_shares_nothing(cli: Cli, sharding: str, told: bool) -> None:
    run = cli("predict", "zoo:mlp", "--device", "H100", "--batch-sizes", "8", "--sharding", sharding)
    assert ("changes nothing for one replica" in run.err) == told
