"""LoRA: a model whose weights are frozen, and two small trained matrices beside each of its linear layers.

As peft builds it for ``target_modules="all-linear"`` (Hu et al., arXiv:2106.09685): every linear layer but the one that makes
the logits; the input is cast to the adapters' float32 first; no dropout. Frozen weights are held as fine-tuning loads them, in
the half type that the step computes in, or packed in 4 bits as bitsandbytes does (QLoRA: Dettmers et al., arXiv:2305.14314).
Start at :func:`with_lora`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddltool.analyzers.step.recording.kernels import Linear4bit
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.step import TrainingStep
from ddltool.errors import InputError

# A model whose linear layers hold less than this share of the parameters is refused: adapters would train too little of it.
_LEAST_ADAPTED = 0.25
_ADAPTER_SCALE = 2.0
"""The factor on an adapter's output: peft's ``lora_alpha`` over the rank, as often 2. It has no part in the cost."""


class LoraLinear(nn.Module):
    """A frozen linear layer ``base`` and a trained adapter of a low rank beside it: ``base(x) + 2 (x A') B'``.

    A' and B' are the transposed matrices of the adapter.
    """

    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int) -> None:
        """Wrap a linear layer of ``inputs`` and ``outputs`` features.

        The trained matrices are A (rank, inputs) and B (outputs, rank), in float32 on the layer's device.
        """
        super().__init__()
        device = next(base.parameters()).device
        self.base = base
        self.lora_a = nn.Parameter(torch.empty(rank, inputs, device=device))
        self.lora_b = nn.Parameter(torch.empty(outputs, rank, device=device))

    @property
    def weight(self) -> Tensor:
        """The layer's own weight (outputs, inputs), as peft's adapters have it: some models, T5 among them, read its type."""
        return self.base.weight  # type: ignore[return-value]

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum (..., outputs) of the layer's and the adapter's output, in the type of the layer's."""
        result = self.base(x)
        adapted = F.linear(F.linear(x.to(self.lora_a.dtype), self.lora_a), self.lora_b)
        return (result + adapted * _ADAPTER_SCALE).to(result.dtype)  # type: ignore[no-any-return]


def with_lora(step: TrainingStep, rank: int, numerics: Numerics) -> TrainingStep:
    """Freeze a step's module and put adapters of a rank beside its linear layers, all but the head; return the step.

    The module itself is changed. ``numerics``: of the step; under autocast the frozen weights become the half type, and those
    of the adapted layers have 4 bits if it says so. Raises InputError if there are no linear layers beside the head, if they
    hold less than a quarter of the parameters, and for weights of 4 bits in fp8.
    """
    if numerics.load_in_4bit and numerics.format.linears:
        problem = "unpacks weights to 16 bits, and fp8 multiplies 8"
        raise InputError("--load-in-4bit", problem, "give --precision bf16")
    module = step.module
    module.requires_grad_(False)
    computed_type = getattr(torch, numerics.format.torch_type)
    if numerics.format.is_autocast:
        module.to(computed_type)
    heads = {id(_logits_layer(part)) for part in module.modules()}  # id(None), of parts without one, is no layer's
    all_elements = sum(weight.numel() for weight in module.parameters())
    # Layers that transformers never packs, because their models read the type of the weight: T5's "wo".
    never_packed = getattr(module, "_keep_in_fp32_modules", None) or ()
    adapted_weights: dict[int, int] = {}  # elements, by the identity of a weight that layers may share
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            sizes = _linear_sizes(child)
            if sizes is not None and id(child) not in heads:
                adapted_weights |= {id(weight): weight.numel() for weight in child.parameters()}
                is_packed = numerics.load_in_4bit and name not in never_packed
                base = _packed(child, *sizes, computed_type) if is_packed else child
                setattr(parent, name, LoraLinear(base, *sizes, rank))
    if not adapted_weights:
        raise InputError("--lora", f"{step.name} has no linear layers beside its head", "leave it out")
    adapted_share = sum(adapted_weights.values()) / all_elements
    if adapted_share < _LEAST_ADAPTED:
        held = f"hold {adapted_share:.0%} of its parameters"
        problem = f"the linear layers of {step.name} {held}: the rest would stay as it is"
        raise InputError("--lora", problem, "leave it out")
    return replace(step, module=module)


def _packed(layer: nn.Module, inputs: int, outputs: int, computes: torch.dtype) -> nn.Module:
    """Return a frozen linear layer of the same size and bias whose weight has 4 bits an element, and which computes in a type.

    There is a float32 scale for every 64 elements; bitsandbytes can quantise these once more, which is not done here.
    """
    [weight, *biases] = layer.parameters()
    packed = Linear4bit(inputs, outputs, bool(biases), compute_dtype=computes, device=weight.device)
    for bias in biases:
        packed.bias = nn.Parameter(bias)
    scales = packed.scales
    del packed.scales  # of a traced module, what is no parameter must be a buffer to be recorded
    packed.register_buffer("scales", scales)
    return packed.requires_grad_(False)


def _logits_layer(module: nn.Module) -> nn.Module | None:
    """Return the layer that makes the logits of a transformers model, None if it has none or is another model."""
    get_head = getattr(module, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    return head if isinstance(head, nn.Module) else None


def _linear_sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return (inputs, outputs) of a linear layer, transformers' ``Conv1D`` included; None for another module."""
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and isinstance(weight, Tensor):  # its weight is (inputs, outputs)
        return int(weight.shape[0]), int(weight.shape[1])
    return None
