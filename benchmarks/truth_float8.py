"""What float8 gains, as predicted and as others measured it: a section of docs/truth.md.

    python benchmarks/truth_float8.py

Four minutes; it changes that section alone. Start at :data:`GAINS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch
from memory_truth import every_second
from torch import Tensor, nn
from torch.nn import functional
from truth_models import llama
from truth_networks import put_section

from ddltool.analyzers.step.costs.compiling import compiled
from ddltool.analyzers.step.costs.memory import TensorLifetimes
from ddltool.analyzers.step.costs.model import cost_model, estimate
from ddltool.analyzers.step.costs.saving import SavedOps
from ddltool.analyzers.step.costs.traced_lifetimes import lifetimes_of
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.step import TrainingStep, language_model_loss
from ddltool.analyzers.step.tracing.torch_adapter import trace_step
from ddltool.device import Device, Network
from ddltool.graph import COMPUTE
from ddltool.precision import PrecisionName
from ddltool.shipped import calibration, devices

COMMAND = "python benchmarks/truth_float8.py"
TITLE = "## Float8"
_8B = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "vocab_size": 128256},
}
_70B = {
    **{"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    **{"num_key_value_heads": 8, "vocab_size": 128256},
}


class _Block(nn.Module):
    """One of MPT's blocks."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, tokens, width) from the same."""
        parts = self.qkv(self.norm_1(x)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm_2(x))))
        return result


class _Mpt(nn.Module):
    """MPT with 1.3 x 10^9 parameters: transformers' GPT-2, its like, has no linear layers."""

    def __init__(self, length: int, width: int = 2048, heads: int = 16, words: int = 50368) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width, heads) for _ in range(24))
        self.norm = nn.LayerNorm(width, bias=False)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return the logits of every token."""
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return {"logits": functional.linear(self.norm(x), self.words.weight)}


def _mpt(batch: int, length: int) -> TrainingStep:
    inputs = (torch.zeros(batch, length, dtype=torch.long),)
    return TrainingStep(name="mpt-1b", module=_Mpt(length), inputs=inputs, loss=language_model_loss)


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A published gain of float8 over bfloat16 in samples per second."""

    what: str
    who: str
    measured: str
    build: Callable[[int], TrainingStep]
    """By the batch size."""
    device: str
    compile: bool = True
    saved: Callable[[TensorLifetimes], SavedOps] | None = None
    """What checkpointing keeps."""
    batches: tuple[int, int] = (1, 1)
    """Of the steps in bfloat16 and in float8."""


_TITAN = "[torchtitan](https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md)"
_AO = "[torchao](https://github.com/pytorch/ao/tree/main/torchao/float8#training-benchmarks)"
_FOUNDRY = "[LLM Foundry](https://github.com/mosaicml/llm-foundry/tree/main/scripts/train/benchmarking)"
_CRUSOE = (
    "[torchtitan](https://pytorch.org/blog/"
    "accelerating-2k-scale-pre-training-up-to-1-28x-with-torchao-mxfp8-and-torchtitan-on-crusoe-b200-cluster)"
)
# Meta's H100 have 96 GB of HBM2e and 500 W.
META = "H100 of 500 W"
GAINS = (
    Gain(
        what="Llama-3.1-8B, 2 x 8,192 tokens, compiled, H100 of 500 W",
        who=_TITAN,
        measured="1.28",
        build=lambda batch: llama(batch, 8192, **_8B),
        device=META,
        saved=every_second,
        batches=(2, 2),
    ),
    Gain(
        what="Llama-3-8B, 1 x 8,192 tokens, compiled, H100 of 500 W",
        who=_AO,
        measured="1.25",
        build=lambda batch: llama(batch, 8192, **_8B),
        device=META,
        saved=every_second,
    ),
    Gain(
        what="the same, MI300X",
        who=_AO,
        measured="1.15",
        build=lambda batch: llama(batch, 8192, **_8B),
        device="MI300X",
        saved=every_second,
    ),
    *(
        Gain(
            what=f"MPT-1b, {batch} x {length:,} tokens, eager, Transformer Engine, H100",
            who=_FOUNDRY,
            measured=gain,
            build=partial(_mpt, length=length),
            device="H100",
            compile=False,
            batches=(before, after),
        )
        for length, batch, before, after, gain in (
            (512, "56", 56, 56, "1.35"),
            (8192, "3 and 2", 3, 2, "1.10"),
            (32768, "1", 1, 1, "1.05"),
        )
    ),
    Gain(
        what="Llama-3-70B, 1 x 8,192 tokens, compiled, MXFP8, B200",
        who=_CRUSOE,
        measured="1.22 to 1.28",
        build=lambda batch: llama(batch, 8192, **_70B),
        device="B200",
        saved=lambda lifetimes: lifetimes.every_block("full"),
    ),
)


def device_of(name: str) -> Device:
    """Return a device by its name in the table of gains."""
    if name != META:
        return devices().device(name)
    return devices().device("H100").model_copy(update={"memory_bytes_per_s": 2.4e12, "power_w": 500.0})


@cache
def _sample_s(gain: Gain, precision: PrecisionName, batch: int) -> float:
    """Return the seconds of a sample, without collectives and update."""
    traced = trace_step(lambda: gain.build(batch), mode="training", numerics=Numerics(precision, gathered=True))
    run = compiled(traced.graph) if gain.compile else traced.graph
    timed = estimate(run, cost_model(device_of(gain.device), calibration()), Network(), optimizer="none")
    if gain.saved is not None:
        lifetimes = lifetimes_of(traced)
        timed = lifetimes.lengthened(gain.saved(lifetimes), timed)
    return float(timed.duration_s[timed.kind == COMPUTE].sum()) / batch


def section() -> str:
    """Return the section of the page."""
    lines = ["| step | measured by | gain measured | gain predicted |", "|---|---|---:|---:|"]
    for gain in GAINS:
        before, after = gain.batches
        predicted = _sample_s(gain, "bf16", before) / _sample_s(gain, "fp8", after)
        lines.append(f"| {gain.what} | {gain.who} | {gain.measured} | {predicted:.2f} |")
    parts = [
        TITLE,
        f"<!-- run: parse (four minutes) -->\n```sh\n{COMMAND}\n```",
        "Steps of `--precision fp8` over `bf16`, of compute alone, with the recomputation of their checkpointing. No constant "
        "was fitted to a step in float8.",
        "\n".join(lines),
        "- torchtitan and torchao gather weights in float8 as well, and LLM Foundry's Transformer Engine scales by the steps "
        "before; both are predicted as `fp8` is: current scaling, weights gathered in bfloat16.\n"
        "- MXFP8 is predicted as `fp8`: NeMo's rows in both, alike otherwise, are 0 to 11 % slower in MXFP8.\n"
        "- Attention gains nothing: with 32,768 tokens it is most of the step.",
    ]
    return "\n\n".join(parts) + "\n\n"


def main() -> None:
    """Write the section."""
    put_section(TITLE, section())


if __name__ == "__main__":
    main()
