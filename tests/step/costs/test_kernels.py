"""What kernels behind the ops of a step really read: rows, norms, casts and masks, counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ddltool as dt
from ddltool.analyzers.step.costs.kernels import FORWARD, INPUT_GRADIENT, Kernels, kernels_of
from ddltool.analyzers.step.recording.op_rules import CLASSES
from ddltool.analyzers.step.tracing.factories import step_from
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.torch_adapter import trace_torch
from ddltool.graph import Graph
from ddltool.precision import PrecisionName


def traced(module: nn.Module, example: Any, precision: PrecisionName = "fp32") -> Graph:
    step = step_from((module, example), "train.py:make", "make")
    return trace_torch(lambda: step, mode="training", numerics=Numerics(precision))


def of(graph: Graph, op_type: str) -> tuple[Kernels, int]:
    """The kernels of a graph, and the place of the only one of an op."""
    kernels = kernels_of(graph)
    places = [place for place, op in enumerate(kernels.op) if graph.op_type[op].startswith(f"aten.{op_type}")]
    assert len(places) == 1, [*graph.op_type]
    return kernels, places[0]


class Logits(nn.Module):
    """A loss over 30,000 or 100 classes for each of 40 rows."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, classes)

    def forward(self, rows: Tensor) -> Tensor:
        logits = self.layer(rows)
        return F.cross_entropy(logits, torch.zeros(len(rows), dtype=torch.long, device=rows.device))


@pytest.mark.parametrize(("classes", "forward", "backward"), [(30_000, 4, 4), (100, 2, 3)])
def test_softmax_reads_a_long_row_three_times(classes: int, forward: int, backward: int) -> None:
    """120 kB of a row do not fit a multiprocessor's memory: read for the maximum, the sum and the result, and written."""
    graph = traced(Logits(classes), torch.zeros(40, 8))
    for name, passes in (("_log_softmax", forward), ("_log_softmax_backward_data", backward)):
        kernels = kernels_of(graph)
        place = next(
            place for place, op in enumerate(kernels.op) if f"{graph.op_type[op]}.".startswith(f"aten.{name}.")
        )
        assert kernels.moved_bytes[place] == pytest.approx(passes * 40 * classes * 4, rel=0.01)
        assert kernels.gemm[place].tolist() == [40.0, 0.0, 0.0, classes]


def test_a_loss_reads_one_element_of_a_row_and_its_gradient_is_written_whole() -> None:
    graph = traced(Logits(30_000), torch.zeros(40, 8))
    kernels, place = of(graph, "nll_loss_forward")
    assert kernels.moved_bytes[place] == 40 * (32 + 8)
    kernels, place = of(graph, "nll_loss_backward")
    assert kernels.moved_bytes[place] == 40 * (32 + 8) + 40 * 30_000 * 4


def test_a_layer_norm_is_so_many_rows_and_reads_them_again_for_its_weights() -> None:
    graph = traced(nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 4)), torch.zeros(64, 256))
    size = 64 * 256 * 4
    kernels, place = of(graph, "native_layer_norm_backward")
    assert CLASSES[kernels.kind[place]] == "row_normalisation"
    assert kernels.gemm[place].tolist() == [64.0, 0.0, 0.0, 256.0]
    assert kernels.moved_bytes[place] == pytest.approx(5 * size, rel=0.05)  # two tensors read twice, one written
    forward = next(
        place for place, op in enumerate(kernels.op) if graph.op_type[op].split(".")[1] == "native_layer_norm"
    )
    assert kernels.moved_bytes[forward] == pytest.approx(2 * size, rel=0.05)


@pytest.mark.parametrize(
    ("precision", "kind", "forward", "backward"),
    [("fp32", "normalisation", 3, 5), ("fp16", "normalisation", 3, 5), ("bf16", "native_normalisation", 4, 3)],
)
def test_batch_norm_reads_its_input_for_the_statistics_too(
    precision: PrecisionName, kind: str, forward: int, backward: int
) -> None:
    """In bfloat16 it is torch's own kernels, as a profile of an H200 shows: cuDNN has the others."""
    graph = traced(
        nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.Conv2d(32, 4, 3)),
        torch.zeros(8, 3, 34, 34),
        precision,
    )
    size = 8 * 32 * 32 * 32 * (4 if precision == "fp32" else 2)
    kernels = kernels_of(graph)
    found = {
        "backward" in graph.op_type[op]: (CLASSES[kernels.kind[place]], kernels.moved_bytes[place] / size)
        for place, op in enumerate(kernels.op)
        if "batch_norm" in graph.op_type[op]
    }
    assert found == {False: (kind, pytest.approx(forward, rel=0.02)), True: (kind, pytest.approx(backward, rel=0.02))}
    norms = np.array(["batch_norm" in graph.op_type[op] for op in kernels.op])
    assert (kernels.gemm[norms] == [32, 0, 0, 8 * 32 * 32]).all()  # channels, and what each has
    assert sorted(kernels.direction[norms]) == [FORWARD, INPUT_GRADIENT]


class Permuted(nn.Module):
    """A filter per channel before and after a norm over channels, which wants them last: ConvNeXt's order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.LayerNorm(8)
        self.mixing, self.second = nn.Linear(8, 8), nn.Conv2d(8, 8, 3, padding=1, groups=8)

    def forward(self, images: Tensor) -> Tensor:
        mixed = self.mixing(self.norm(self.first(images).permute(0, 2, 3, 1)))
        return self.second(mixed.permute(0, 3, 1, 2))


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_permuted_image_keeps_its_channels_last_for_the_next_convolution(channels_last: bool) -> None:
    """As torch itself says of both convolutions' results on the CPU; a step of one layout has one flag for all."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    images, seen = torch.zeros(2, 8, 6, 6).to(memory_format=layout), []
    module = Permuted()
    for layer in (module.first, module.second):
        layer.register_forward_pre_hook(
            lambda _, inputs: seen.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
        )
    module(images)
    assert seen == [channels_last, True]
    step = step_from((Permuted(), torch.zeros(2, 8, 6, 6)), "train.py:make", "make")
    graph = trace_torch(lambda: step, mode="training", numerics=Numerics("fp32", channels_last))
    kernels = kernels_of(graph)
    is_convolution = kernels.kind == CLASSES.index("depthwise_convolution")
    names = [graph.op_type[op] for op in kernels.op[is_convolution]]
    assert [name.removeprefix("aten.") for name in names] == ["convolution"] * 2 + ["convolution_backward"] * 3
    assert kernels.is_channels_last[is_convolution].tolist() == [seen[place] for place in (0, 1, 1, 1, 0)]
    of_one_layout = kernels_of(replace(graph, layout=("",) * len(graph)))  # as in a file of an older version
    assert set(of_one_layout.is_channels_last) == {channels_last}


def test_a_cast_to_a_wider_type_is_a_kind_of_its_own() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64))

        def forward(self, rows: Tensor) -> Tensor:
            half = (rows * self.scale).half()
            return half.float() * 2.0

    graph = traced(Cast(), torch.zeros(32, 64))
    kernels = kernels_of(graph)
    kinds = [CLASSES[kernels.kind[place]] for place, op in enumerate(kernels.op) if "_to_copy" in graph.op_type[op]]
    assert sorted(kinds) == ["copy", "copy", "widening", "widening"]  # each way, forward and backward


def _heads(mask: Callable[[], Tensor] | None, groups: int, dropout: float) -> nn.Module:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            kept = x[:, : 4 // groups]
            given = None if mask is None else mask().to(x.device, x.dtype)
            return F.scaled_dot_product_attention(
                x * self.scale, kept, kept, given, dropout_p=dropout, is_causal=mask is None, enable_gqa=groups > 1
            )

    return Heads()


@pytest.mark.parametrize(
    ("mask", "kernel"),
    [
        (None, "_scaled_dot_product_flash_attention"),
        (lambda: torch.zeros(1, 4, 32, 32), "_scaled_dot_product_efficient_attention"),
        (lambda: torch.zeros(32, 32, 4).permute(2, 0, 1).unsqueeze(0), "bmm"),  # as T5 lays out its biases
    ],
)
def test_fused_attention_reads_a_mask_by_rows_alone(mask: Callable[[], Tensor] | None, kernel: str) -> None:
    graph = traced(_heads(mask, 1, 0.0), torch.zeros(2, 4, 32, 16), "bf16-pure")
    fused = {op.split(".")[1] for op in graph.op_type if "attention" in op or op == "aten.bmm"}
    assert kernel in fused
    assert (kernel == "bmm") == (not any("attention" in name for name in fused))


def test_flash_attention_shares_keys_without_copies() -> None:
    """Four heads of queries for two of keys and values."""
    graph = traced(_heads(None, 2, 0.0), torch.zeros(2, 4, 32, 16), "bf16-pure")
    attention = [op for op in graph.ops() if "attention" in op.op_type]
    assert {op.gemm for op in attention} == {(8.0, 32.0, 16.0, 16.0)}
    assert not any("repeat" in op_type or "clone" in op_type for op_type in graph.op_type)


def test_dropout_takes_fused_attention_time_and_no_operations() -> None:
    plain, dropped = (traced(_heads(None, 1, rate), torch.zeros(2, 4, 32, 16), "bf16-pure") for rate in (0.0, 0.1))
    flops = [[op.flops for op in graph.ops() if "attention" in op.op_type] for graph in (plain, dropped)]
    assert flops[0] == flops[1]
    widths = np.array([[op.gemm[3] for op in graph.ops() if "attention" in op.op_type] for graph in (plain, dropped)])
    assert (widths[1] - widths[0]).tolist() == [130.0, 32.0]


class Scores(nn.Module):
    """Attention's two products, without its softmax: (2, tokens, 16) times the same transposed, times the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.layer(tokens)
        return (states @ states.mT @ states).sum()


def test_alignment_depends_on_the_length_of_rows_and_not_on_their_number() -> None:
    """A matrix begins where it is read whatever its first side; of a transposed one the first side is the length."""
    graph = traced(Scores(), torch.zeros(2, 7, 16))
    kernels = kernels_of(graph)
    sides: dict[tuple[object, ...], set[str]] = {}
    for place, op in enumerate(kernels.op):
        if kernels.gemm[place, 1] > 0:
            sides_text = "".join(np.array(["m", "n", "k"])[kernels.sets_alignment[place]])
            sides.setdefault((graph.op_type[op], *kernels.gemm[place].tolist()), set()).add(sides_text)
    assert sides == {
        ("aten.addmm", 1, 14, 16, 16): {"nk"},  # rows of 16 by columns of 16
        ("aten.bmm", 2, 7, 7, 16): {"nk"},  # scores, and their gradient: rows of 16 by columns of 16, into rows of 7
        # scores by states; their transpose by the result's gradient; their gradient by states
        ("aten.bmm", 2, 7, 16, 7): {"nk", "mn"},
        ("aten.bmm", 2, 16, 7, 7): {"mn"},  # states transposed by the scores' gradient, into rows of 7
        ("aten.mm", 1, 16, 16, 14): {"mn"},  # the gradient of the weight: columns of 16, of which there are 14
    }


def step_s(rows: int, classes: int) -> float:
    """The predicted seconds of a chain of linear layers on so many rows of 1,024, the last of which has so many outputs."""
    layers = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(4)]
    module = nn.Sequential(*layers, nn.Linear(1024, classes))
    return (
        dt.predict(lambda: (module, torch.zeros(1, 1024)), "H100", batch_sizes=rows, precision="bf16")
        .rows[0]
        .step_time_s
    )


def test_an_odd_number_of_rows_takes_no_longer() -> None:
    assert step_s(8191, 1024) == pytest.approx(step_s(8192, 1024), rel=0.03)


def test_rows_of_an_odd_length_take_longer() -> None:
    assert step_s(8192, 50_257) > 1.3 * step_s(8192, 50_264)


@pytest.mark.parametrize("compiled", [False, True])
def test_an_odd_number_of_images_takes_no_longer(compiled: bool) -> None:
    """Where channels lie together, a convolution's positions are rows; forward and for both gradients."""
    layers = [nn.Sequential(nn.Conv2d(256, 256, 3, padding=1, bias=False), nn.ReLU()) for _ in range(4)]

    def step_s(images: int) -> float:
        made = nn.Sequential(*layers), torch.zeros(1, 256, 7, 7)
        settings: dict[str, Any] = {"precision": "bf16", "channels_last": True, "compile": compiled}
        return dt.predict(lambda: made, "A100", batch_sizes=images, **settings).rows[0].step_time_s

    assert step_s(1023) == pytest.approx(step_s(1024), rel=0.03)
