"""LoRA: which parameters are trained, what a step computes and holds, counted by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddltool as dt
from ddltool.analyzers.step.costs.optimizers import update_of
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.analyzers.step.costs.work import work_of
from ddltool.analyzers.step.tracing.adapters import LoraLinear, with_lora
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.sources import resolve_step
from ddltool.analyzers.step.tracing.step import TrainingStep
from ddltool.errors import InputError
from ddltool.graph import SEND

RANK, WIDTH, HIDDEN = 8, 64, 256


class Block(nn.Module):
    """Two linear layers of (WIDTH, HIDDEN) and back."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def make() -> tuple[nn.Module, torch.Tensor]:
    return Block(), torch.zeros(4, WIDTH)


def test_adapters_alone_are_trained_and_nothing_else_has_a_gradient() -> None:
    traced = work_of(make, Numerics("bf16"), None, RANK).traced
    sent = {traced.graph.parameter[op]: traced.graph.size_bytes[op] for op in traced.graph.of_kind(SEND).tolist()}
    assert sorted(name or "" for name in sent) == ["down.lora_a", "down.lora_b", "up.lora_a", "up.lora_b"]
    assert sum(sent.values()) == 4 * 2 * RANK * (WIDTH + HIDDEN)  # float32
    assert traced.graph.parameter_bytes == 2 * 2 * WIDTH * HIDDEN + sum(sent.values())  # frozen ones in bfloat16


def test_the_products_are_those_that_freezing_leaves() -> None:
    """Forward: base and adapter. Backward: of the base its input alone, which the first layer does not need."""
    graph = work_of(make, Numerics("bf16"), None, RANK).traced.at(4)
    base, adapter = 2.0 * 4 * WIDTH * HIDDEN, 2.0 * 4 * RANK * (WIDTH + HIDDEN)
    products = graph.flops[graph.gemm[:, 1] > 0].sum()
    forward = 2 * base + 2 * adapter
    backward = base + 2 * 2 * adapter - 2.0 * 4 * RANK * WIDTH  # the input of the first layer has no gradient
    assert products == pytest.approx(forward + backward)


def test_frozen_weights_have_no_state_in_memory() -> None:
    curve = work_of(make, Numerics("bf16"), None, RANK)
    peak = curve.peak(4, Sharding(kind="none"), "adam")
    assert peak is not None
    trained = 4 * 2 * RANK * (WIDTH + HIDDEN)
    assert peak.parts["optimizer"] == pytest.approx(2 * trained, rel=0.01)  # and a counter of each
    assert peak.parts["parameters"] == 2 * 2 * WIDTH * HIDDEN + trained


def test_the_output_is_the_formula() -> None:
    torch.manual_seed(0)
    base = nn.Linear(6, 5)
    layer = LoraLinear(base, 6, 5, 2)
    nn.init.normal_(layer.lora_a)
    nn.init.normal_(layer.lora_b)
    x = torch.randn(3, 6)
    expected = x @ (base.weight + 2 * layer.lora_b @ layer.lora_a).T + base.bias
    torch.testing.assert_close(layer(x), expected)
    assert layer.weight is base.weight  # T5 reads its type


def test_the_head_of_a_language_model_stays_as_it_is() -> None:
    with torch.device("meta"):
        step = with_lora(resolve_step("transformers:gpt2", 64), RANK, Numerics("bf16"))
    adapted = [name for name, module in step.module.named_modules() if isinstance(module, LoraLinear)]
    assert len(adapted) == 12 * 4
    assert not any("lm_head" in name for name in adapted)
    # GPT-2's layers: 768 to 2,304, 768 to 768, 768 to 3,072 and back.
    trained = sum(weight.numel() for weight in step.module.parameters() if weight.requires_grad)
    assert trained == 12 * RANK * ((768 + 2304) + 2 * 768 + 2 * (768 + 3072))


def test_a_model_without_linear_layers_is_refused() -> None:
    step = TrainingStep(name="conv", module=nn.Conv2d(3, 3, 1), inputs=(torch.zeros(1, 3, 4, 4),), loss=torch.sum)
    with pytest.raises(InputError, match="--lora: conv has no linear layers beside its head"):
        with_lora(step, RANK, Numerics("bf16"))


def test_predict_says_what_is_trained() -> None:
    found = dt.predict(make, "A100", batch_sizes=4, precision="bf16", lora=RANK)
    whole = dt.predict(make, "A100", batch_sizes=4, precision="bf16")
    assert found.assumptions.lora == RANK
    assert found.rows[0].peak_memory_bytes < whole.rows[0].peak_memory_bytes


@pytest.mark.parametrize(("precision", "width"), [("bf16", 4.0), ("bf16-pure", 2.0)])
def test_eight_bit_states_are_a_byte_each_and_a_scale_for_every_block(precision: str, width: float) -> None:
    """Hand arithmetic of bitsandbytes: two moments of 1 + 4 / 256 bytes, read and written beside parameter and gradient."""
    curve = work_of(make, Numerics(precision), None)  # type: ignore[arg-type]
    parameters = 2 * WIDTH * HIDDEN
    for kind, shards in (("none", 1), ("zero1", 4)):
        peak = curve.peak(4, Sharding(kind=kind, shard=shards), "adamw-8bit")  # type: ignore[arg-type]
        assert peak is not None
        assert peak.parts["optimizer"] == pytest.approx(parameters * 2 * (1 + 4 / 256) / shards)
    kernels = update_of(curve.traced.at(4), "adamw-8bit").kernels
    assert kernels.moved_bytes.sum() == pytest.approx(parameters * (3 * width + 2 * 2 * (1 + 4 / 256)))


def test_weights_of_4_bits_are_unpacked_for_every_product() -> None:
    """QLoRA by hand: half a byte an element and a float32 scale for 64 of them; the unpacked weight is not kept."""
    curve = work_of(make, Numerics("bf16", load_in_4bit=True), None, RANK)
    graph = curve.traced.at(4)
    elements = WIDTH * HIDDEN
    packed_bytes = elements * (0.5 + 4 / 64)
    unpacked = [op for op, name in enumerate(graph.op_type) if name == "aten.dequantize"]
    assert len(unpacked) == 3  # two forward; backward of the second alone, for the first layer's input has no gradient
    assert graph.size_bytes[unpacked].tolist() == [packed_bytes + 2 * elements] * 3
    half = work_of(make, Numerics("bf16"), None, RANK)
    peaks = [each.peak(4, Sharding(kind="none"), "adam") for each in (curve, half)]
    assert peaks[0] is not None
    assert peaks[1] is not None
    assert peaks[0].parts["parameters"] == elements + 4 * 2 * RANK * (WIDTH + HIDDEN)
    saved_bytes = 2 * (2 * elements - packed_bytes) - 2 * elements  # at the peak one weight is unpacked
    assert peaks[0].total_bytes == pytest.approx(peaks[1].total_bytes - saved_bytes, rel=0.02)


SCRIPT = """
import bitsandbytes as bnb
import torch
from torch import nn
from torch.nn import functional as F


class Lora(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.base = bnb.nn.Linear4bit(inputs, outputs, bias=False, compute_dtype=torch.bfloat16)
        self.lora_a = nn.Parameter(torch.empty(8, inputs))
        self.lora_b = nn.Parameter(torch.empty(outputs, 8))

    def forward(self, x):
        result = self.base(x)
        return (result + F.linear(F.linear(x.float(), self.lora_a), self.lora_b) * 2.0).to(result.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = Lora(64, 256), Lora(256, 64)

    def forward(self, x):
        return self.down(self.up(x).relu())


block = Block().cuda()
optimizer = torch.optim.Adam(p for p in block.parameters() if p.requires_grad)
x = torch.zeros(4, 64, device="cuda")
while True:
    with torch.autocast("cuda", torch.bfloat16):
        loss = block(x).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_with_bitsandbytes_holds_and_computes_as_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    row = dt.predict(["python", "train.py"], "A100").rows[0]
    traced = dt.predict(make, "A100", batch_sizes=4, precision="bf16", lora=8, load_in_4bit=True).rows[0]
    assert row.peak_memory_bytes == pytest.approx(traced.peak_memory_bytes, rel=0.02)
    assert row.step_time_s == pytest.approx(traced.step_time_s, rel=0.1)


# Two blocks whose layers are transformers' ``Conv1D``, with biases.
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 512, "n_head": 8, "vocab_size": 128, "n_positions": 16}


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "bf16-pure"])
@pytest.mark.parametrize("load_in_4bit", [False, True])
def test_adapters_run_in_every_precision(precision: str, load_in_4bit: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    settings: dict[str, Any] = {"batch_sizes": 1, "sequence_length": 16, "precision": precision}
    row = dt.predict(f"transformers:{tmp_path}", "H100", lora=4, load_in_4bit=load_in_4bit, **settings).rows[0]
    layers = 2 * 12 * 512 * 512
    width = 4 if precision in ("fp32", "tf32") else 2
    weights = layers * (0.5 + 4 / 64) if load_in_4bit else layers * width
    others = (
        2 * 2 * 4 * (9 * 512 + 7 * 512) * 4 + 512 * 512 * 4 * width
    )  # adapters with their states; one layer unpacked
    assert weights < row.peak_memory_bytes < 1.1 * (weights + others + 144 * 512 * width + 2 * 2**20)


def test_4_bits_are_for_frozen_weights_on_one_gpu() -> None:
    with pytest.raises(
        InputError, match="packs the weights that LoRA freezes, and all weights are trained; give --lora 16"
    ):
        dt.predict(make, "A100", load_in_4bit=True)
    with pytest.raises(
        InputError, match="--load-in-4bit: packs the weights that LoRA freezes, and none is; give --lora 16"
    ):
        dt.plan("zoo:cifarnet", devices="A100=1", lora="none", load_in_4bit=True)
    with pytest.raises(InputError, match="--load-in-4bit: unpacks weights to 16 bits, and fp8 multiplies 8"):
        dt.predict(make, "H100", batch_sizes=4, lora=8, load_in_4bit=True, precision="fp8")
    with pytest.raises(InputError, match="weights of 4 bits are not divided among GPUs"):
        dt.predict(make, "A100", lora=8, load_in_4bit=True, tensor_parallel=2)


def test_t5_keeps_the_layers_that_transformers_never_packs() -> None:
    with torch.device("meta"):
        step = with_lora(resolve_step("transformers:t5-small", 64), RANK, Numerics("bf16", load_in_4bit=True))
    packed = {name.rpartition(".")[0] for name, weight in step.module.named_parameters() if weight.dtype == torch.uint8}
    assert len(packed) > 12
    assert not any(name.endswith(".wo.base") for name in packed)
