"""What is known of tensors without values decides over the kernels of a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddltool.analyzers.step.costs.kernels import kernels_of
from ddltool.analyzers.step.recording.op_rules import CLASS
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.step import TrainingStep
from ddltool.analyzers.step.tracing.torch_adapter import trace_step
from ddltool.graph import Graph

_HEADS, _LENGTH, _WIDTH = 4, 64, 32


class _Reader(nn.Module):
    """Attention whose mask depends on what ``reads`` says of whole numbers that follow from the input's shape."""

    def __init__(self, reads: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.embedding, self.reads = nn.Embedding(100, _HEADS * _WIDTH), reads

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.embedding(tokens).unflatten(-1, (_HEADS, _WIDTH)).transpose(1, 2)
        is_plain = self.reads(tokens)
        mask = None if is_plain else torch.ones(_LENGTH, _LENGTH, dtype=torch.bool, device=tokens.device).tril()
        return F.scaled_dot_product_attention(states, states, states, mask, is_causal=is_plain)


def _traced(reads: Callable[[Tensor], bool]) -> Graph:
    def build() -> TrainingStep:
        tokens = torch.zeros(2, _LENGTH, dtype=torch.long)
        return TrainingStep(
            name="reader", module=_Reader(reads), inputs=(tokens,), loss=lambda made: made.float().mean()
        )

    return trace_step(build, mode="training", batch_size=3, numerics=Numerics("bf16")).graph


def _one_document(tokens: Tensor) -> bool:
    """Return whether positions rise by one, as transformers asks before it leaves a causal mask out."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1)
    jumps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    return bool((jumps.cumsum(-1)[:, -1] == 0).all())


def _two_documents(tokens: Tensor) -> bool:
    positions = torch.arange(tokens.shape[1], device=tokens.device).repeat(tokens.shape[0], 1)
    positions[:, _LENGTH // 2 :] -= _LENGTH // 2  # written through a view
    jumps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    return bool((jumps.cumsum(-1)[:, -1] == 0).all())


def _all_seen(tokens: Tensor) -> bool:
    seen = torch.ones_like(tokens, dtype=torch.bool)
    return bool(seen.sum() == seen.numel())


@pytest.mark.parametrize(
    ("reads", "kernel"), [(_one_document, "flash"), (_two_documents, "efficient"), (_all_seen, "flash")]
)
def test_a_mask_is_made_where_the_model_would_make_one(reads: Callable[[Tensor], bool], kernel: str) -> None:
    attention = {op_type for op_type in _traced(reads).op_type if "attention" in op_type}
    assert attention == {
        f"aten._scaled_dot_product_{kernel}_attention",
        f"aten._scaled_dot_product_{kernel}_attention_backward",
    }


def test_what_depends_on_the_input_stays_unknown() -> None:
    """A written token makes its tensor unknown, and truth is assumed of it."""

    def overwritten(tokens: Tensor) -> bool:
        flags = torch.zeros(2, dtype=torch.long, device=tokens.device)
        whole = flags.view(1, 2)
        flags[0] = tokens[0, 0]
        return bool((whole == 0).all())

    assert any("efficient" in op_type for op_type in _traced(overwritten).op_type)


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_causal_mask_halves_what_attention_computes_and_not_what_is_counted(is_causal: bool) -> None:
    """Two products forward and five backward (FlashAttention-2, section 4.1: half of them under a causal mask)."""

    def build() -> TrainingStep:
        class Attention(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embedding = nn.Embedding(100, _HEADS * _WIDTH)

            def forward(self, tokens: Tensor) -> Tensor:
                states = self.embedding(tokens).unflatten(-1, (_HEADS, _WIDTH)).transpose(1, 2)
                return F.scaled_dot_product_attention(states, states, states, is_causal=is_causal)

        tokens = torch.zeros(2, _LENGTH, dtype=torch.long)
        return TrainingStep(name="a", module=Attention(), inputs=(tokens,), loss=lambda made: made.float().mean())

    graph = trace_step(build, mode="training", batch_size=2, numerics=Numerics("bf16")).graph
    square = 2.0 * 2 * _HEADS * _LENGTH**2 * _WIDTH
    places = [place for place, op_type in enumerate(graph.op_type) if "attention" in op_type]
    assert graph.flops[places].tolist() == [2 * square, 5 * square]
    kernels = kernels_of(graph)
    share = 0.5 if is_causal else 1.0
    assert kernels.flops[kernels.kind == CLASS["attention"]].tolist() == [2 * share * square, 5 * share * square]
