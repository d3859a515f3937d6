"""A module whose named inputs are given by position, as a TrainingStep needs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.func import functional_call

from ddltool.analyzers.loading.known_values import Assumptions, KnownValues
from ddltool.analyzers.tracing.torch_adapter import silent_log
from ddltool.errors import InputError, one_line

REMEDY = "write a factory that returns (module, example_inputs)"


def least_batch(module: nn.Module) -> int:
    """Return the samples of an example: two with BatchNorm, which needs more than one value for every channel."""
    return 1 + any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())


def refusal(source: str, error: Exception) -> InputError:
    """Return the error of a model of ours to feed, not the user's, that does not run on what it is fed."""
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        problem = "cannot be traced: what it does depends on its activations"
    else:
        text = one_line(f"{type(error).__name__}: {error}")[:200]
        problem = f"does not run on the inputs that ddltool makes for it ({text})"
    return InputError(source, problem, REMEDY)


def bind(
    module: nn.Module, inputs: Mapping[str, Tensor], source: str, packed: frozenset[str] = frozenset()
) -> tuple[Tensor, ...]:
    """Make ``module(*tensors)`` pass its tensors under the names of ``inputs``, and return ``inputs`` as such a tuple.

    All have the batch in dimension 0. Those in ``packed`` are handed on without it, samples one after another: patches
    of images of any size. While the module is traced, the inputs' values are those given here, repeated to the batch
    size at hand, so that a forward may depend on them. They are CPU tensors.
    """
    names = tuple(inputs)
    forward = module.forward

    def given(tensors: tuple[Tensor, ...]) -> dict[str, Any]:
        named = dict(zip(names, tensors, strict=True))
        return {name: tensor.flatten(0, 1) if name in packed else tensor for name, tensor in named.items()}

    def call(*tensors: Tensor) -> Any:
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return forward(**given(tensors))
        with KnownValues() as known, Assumptions(known):
            for tensor, value in zip(tensors, inputs.values(), strict=True):
                known.learn(tensor, value)
            try:
                return forward(**given(tensors))
            except Exception as error:
                raise refusal(source, error) from error

    module.forward = call  # the module itself stays what it is: a wrapper would rename its parameters
    return tuple(inputs.values())


class _Method(nn.Module):
    """A method of a module, as a module."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        self.owner, self.name = owner, name

    def forward(self, **inputs: Any) -> Any:
        return getattr(self.owner, self.name)(**inputs)


def tried(owner: nn.Module, method: str, inputs: Mapping[str, Tensor], packed: frozenset[str] = frozenset()) -> Any:
    """Return what a method of a module makes of named inputs, as tensors without values; raises what it raises.

    It runs as it would be traced: no weight takes memory, and the inputs' values are known.
    """
    module = _Method(owner, method)
    with (
        silent_log(),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
        KnownValues() as known,
        Assumptions(known),
    ):
        state = {
            name: torch.empty_like(tensor, device="cpu")
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        }
        named = {}
        for name, tensor in inputs.items():
            named[name] = torch.empty_like(tensor, device="cpu")
            known.learn(named[name], tensor)
            if name in packed:
                named[name] = named[name].flatten(0, 1)
        return functional_call(module, state, (), named)
