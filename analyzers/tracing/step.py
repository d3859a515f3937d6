"""TrainingStep: a module with example inputs and a loss, as a tracer or a profiler needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddltool.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingStep:
    """What one step runs: ``loss(module(*inputs))``."""

    name: str
    module: nn.Module
    inputs: tuple[Any, ...]
    """Positional arguments; tensors have the batch in dimension 0, anything else is passed as it is."""
    loss: Callable[[Any], Tensor]
    """From the module's output to a scalar tensor."""
    note: str = ""
    """What had to be guessed, for people."""


def tensors_in(output: Any) -> list[Tensor]:
    """Return the floating-point tensors in a module's output (tensor, sequence or mapping), in order."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    return [tensor for value in values for tensor in tensors_in(value)]


def default_loss(output: Any) -> Tensor:
    """Return a scalar loss for any output: its own ``loss`` if it has one, else one term per floating-point tensor.

    A matrix (batch, classes) gets cross entropy against class 0, which is what a classifier would cost; everything
    else its mean. Raises InputError when nothing can be differentiated.
    """
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    terms = [_term(tensor) for tensor in tensors_in(output)]
    if not terms:
        kind = type(output).__name__
        raise InputError(
            "SOURCE", f"the module returned {kind} without a floating-point tensor", "return one to train on"
        )
    return torch.stack([term.float() for term in terms]).sum()


def _term(tensor: Tensor) -> Tensor:
    if tensor.dim() == 2 and tensor.shape[1] > 1:
        return F.cross_entropy(tensor, torch.zeros(tensor.shape[0], dtype=torch.long, device=tensor.device))
    return tensor.mean()


def language_model_loss(output: Any) -> Tensor:
    """Return token-wise cross entropy of ``output.logits`` (batch, length, vocabulary) against token 0."""
    logits = output["logits"] if isinstance(output, Mapping) else output.logits
    flat = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(flat, torch.zeros(flat.shape[0], dtype=torch.long, device=flat.device))


def with_batch_size(inputs: tuple[Any, ...], batch_size: int | None) -> tuple[Any, ...]:
    """Return the inputs with dimension 0 of every tensor that shares the first tensor's batch set to ``batch_size``.

    Rows are repeated, so that token indices stay valid. Raises InputError when there is no tensor with a batch.
    """
    if batch_size is None:
        return inputs
    batched = [value for value in inputs if isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] > 0]
    if not batched:
        raise InputError("--batch-size", "the example inputs hold no tensor with a batch dimension", "leave it out")
    old = batched[0].shape[0]

    return tuple(
        resized(value, 0, batch_size) if isinstance(value, Tensor) and value.dim() and value.shape[0] == old else value
        for value in inputs
    )


def with_sequence_length(inputs: tuple[Any, ...], length: int | None) -> tuple[Any, ...]:
    """Return the inputs with dimension 1 of every (batch, length) tensor of integers set to ``length``.

    Columns are repeated. Raises InputError when there is no such tensor.
    """
    if length is None:
        return inputs
    tokens = [isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point() for value in inputs]
    if not any(tokens):
        raise InputError("--sequence-length", "the example inputs hold no token indices", "leave it out")
    return tuple(resized(value, 1, length) if is_one else value for value, is_one in zip(inputs, tokens, strict=True))


def resized(tensor: Tensor, dimension: int, size: int) -> Tensor:
    """Return a tensor with ``size`` entries along a dimension: its own, from the first again after the last."""
    places = torch.arange(size, device=tensor.device) % tensor.shape[dimension]
    return tensor.index_select(dimension, places)


_GUESSES: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.Embedding, "token indices (1, 128)"),
    (nn.Conv2d, "an image (1, in_channels, 224, 224)"),
    (nn.Conv1d, "a sequence (1, in_channels, 128)"),
    (nn.Linear, "a row (1, in_features)"),
    (nn.LSTM, "a sequence (1, 128, input_size)"),
    (nn.GRU, "a sequence (1, 128, input_size)"),
)


def guess_inputs(module: nn.Module) -> tuple[tuple[Any, ...], str]:
    """Return example inputs for a bare module and a note on what was guessed.

    Taken from ``module.example_inputs()`` or ``module.example_input_array`` if there is one; otherwise from the first
    layer that says what it takes. Raises InputError when nothing does.
    """
    method = getattr(module, "example_inputs", None)
    array = getattr(module, "example_input_array", None)
    given = method() if callable(method) else array
    if given is not None:
        return (tuple(given) if isinstance(given, (tuple, list)) else (given,)), ""
    for layer in module.modules():
        for kind, text in _GUESSES:
            if isinstance(layer, kind):
                note = f"example inputs were guessed from the first {kind.__name__}: {text}"
                return (_guess_for(layer),), note
    problem = f"{type(module).__name__} does not say what it takes"
    raise InputError("SOURCE", problem, "let the factory return (module, example_inputs)")


def _guess_for(layer: nn.Module) -> Tensor:
    if isinstance(layer, nn.Embedding):
        return torch.zeros(1, 128, dtype=torch.long)
    if isinstance(layer, nn.Conv2d):
        return torch.zeros(1, layer.in_channels, 224, 224)
    if isinstance(layer, nn.Conv1d):
        return torch.zeros(1, layer.in_channels, 128)
    if isinstance(layer, nn.Linear):
        return torch.zeros(1, layer.in_features)
    if isinstance(layer, (nn.LSTM, nn.GRU)):
        width = int(layer.input_size)
        return torch.zeros(1, 128, width) if layer.batch_first else torch.zeros(128, 1, width)
    raise AssertionError(f"no guess for {type(layer).__name__}")  # _GUESSES and this function list the same layers
