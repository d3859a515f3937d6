"""The precision and layout in which a module's step runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddltool.analyzers.step.recording.float8 import Float8Linears, float8_layers, linear_layers
from ddltool.precision import PRECISIONS, Precision, PrecisionName, precision_name


@dataclass(frozen=True, slots=True)
class Numerics:
    """The precision and the memory layout of a step.

    ``fp32``: float32 as torch runs it by default (convolutions may use TF32 where the device has it). ``tf32``:
    float32 with TF32 in matrix products too. ``bf16``, ``fp16``: autocast over float32 parameters; ``amp`` is read as
    ``fp16``. ``bf16-pure``, ``fp16-pure``: parameters and activations in that type. ``fp8``: ``bf16``, and wide
    linear layers in float8 (:mod:`ddltool.analyzers.step.recording.float8`). Raises InputError for another name.
    """

    precision: PrecisionName = "fp32"
    channels_last: bool = False
    """Whether images and filters have their channels last in memory."""
    cuda: bool = True
    """False: record what runs on the CPU, kernel by kernel."""
    gathered: bool = False
    """Whether ``fully_shard`` computes in the half type of autocast, ``MixedPrecisionPolicy(param_dtype, torch.float32)``:
    shards of float32 are gathered in the half type and reduced in float32; nothing is cast between the ops."""
    load_in_4bit: bool = False
    """Whether the linear layers that LoRA freezes have weights of 4 bits, unpacked for every product (QLoRA)."""

    def __post_init__(self) -> None:
        """Replace the precision by its canonical name."""
        object.__setattr__(self, "precision", precision_name(self.precision))  # the class is frozen

    @property
    def format(self) -> Precision:
        """The types that the precision computes in and keeps parameters in."""
        return PRECISIONS[self.precision]

    @property
    def autocasts(self) -> bool:
        """Whether the forward pass runs under autocast."""
        return self.format.is_autocast and not self.gathered

    def kept(self, value: Tensor) -> Tensor:
        """Return a parameter in the type in which the precision keeps and updates it; other tensors are returned unchanged."""
        if self.format.keeps == "float32" or not value.is_floating_point():
            return value
        return value.to(getattr(torch, self.format.keeps))

    def cast(self, value: Tensor) -> Tensor:
        """Return a parameter, buffer or input in the type and layout in which the module gets it.

        The type is that in which the precision keeps parameters (:meth:`kept`); where ``fully_shard`` gathers in the half
        type (:attr:`gathered`), float32 becomes that. Integers keep their type. Images and filters may get their channels
        last.
        """
        value = self.kept(value)
        if self.gathered and self.format.is_autocast and value.dtype == torch.float32:
            value = value.to(getattr(torch, self.format.computes))
        if self.channels_last and value.dim() == 4:  # images and filters
            value = value.contiguous(memory_format=torch.channels_last)
        return value

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context for the forward pass and the loss: autocast, or one that does nothing where nothing is cast."""
        if not self.autocasts:
            return nullcontext()
        return torch.autocast("cuda" if self.cuda else "cpu", dtype=getattr(torch, self.format.computes))

    def float8_linears(self, module: nn.Module, parameters: Mapping[str, Tensor]) -> AbstractContextManager[object]:
        """Return a context in which a module's linear layers run in float8; for other precisions it does nothing.

        ``parameters``: the tensors that take the place of the module's own in the step, by name.
        """
        if not self.format.linears:
            return nullcontext()
        layers = linear_layers(module)
        # A weight that several layers share has one name among the parameters, which need not be the layer's.
        names = {id(value): name for name, value in module.named_parameters()}
        weights = [parameters[names[id(layers[name].weight)]] for name in float8_layers(module)]
        return Float8Linears(weights, getattr(torch, self.format.computes))
