"""TrainingStep: a module with example inputs and a loss, as a tracer or a profiler needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
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
    """Positional arguments; tensors have the batch in ``batch_dimension``, anything else is passed as it is."""
    loss: Callable[[Any], Tensor]
    """From the module's output to a scalar tensor."""
    note: str = ""
    """What had to be guessed, for people."""
    batch_dimension: int = 0

    def at_batch(self, batch_size: int | None) -> TrainingStep:
        """Return the step with its inputs at a batch size; None: as they are. Raises InputError where they have none."""
        return replace(self, inputs=with_batch_size(self.inputs, batch_size, self.batch_dimension))


def all_tensors(output: Any) -> list[Tensor]:
    """Return the tensors in a module's output (tensor, sequence, mapping or dataclass), in order."""
    if isinstance(output, Tensor):
        return [output]
    values: Iterable[Any] = output if isinstance(output, (tuple, list)) else ()
    if isinstance(output, Mapping):
        values = output.values()
    elif is_dataclass(output):
        values = [getattr(output, field.name) for field in fields(output)]
    return [tensor for value in values for tensor in all_tensors(value)]


def tensors_in(output: Any) -> list[Tensor]:
    """Return the floating-point tensors in a module's output, in order."""
    return [tensor for tensor in all_tensors(output) if tensor.is_floating_point()]


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


def with_batch_size(inputs: tuple[Any, ...], batch_size: int | None, dimension: int = 0) -> tuple[Any, ...]:
    """Return the inputs with the batch of every tensor that shares the first tensor's set to ``batch_size``.

    ``dimension``: where tensors have the batch. Rows are repeated, so that token indices stay valid. Raises InputError
    when there is no tensor with a batch.
    """
    if batch_size is None:
        return inputs
    batched = [
        value
        for value in inputs
        if isinstance(value, Tensor) and value.dim() > dimension and value.shape[dimension] > 0
    ]
    if not batched:
        raise InputError("--batch-size", "the example inputs hold no tensor with a batch dimension", "leave it out")
    old = batched[0].shape[dimension]
    # by identity: tensors compare element by element
    sharing = {id(value) for value in batched if value.shape[dimension] == old}
    return tuple(resized(value, dimension, batch_size) if id(value) in sharing else value for value in inputs)


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


def _sequence(layer: nn.RNNBase) -> Tensor:
    width = int(layer.input_size)
    return torch.zeros(1, 128, width) if layer.batch_first else torch.zeros(128, 1, width)


_GUESSES: tuple[tuple[type[nn.Module], str, Callable[[Any], Tensor]], ...] = (
    (nn.Embedding, "token indices", lambda _: torch.zeros(1, 128, dtype=torch.long)),
    (nn.Conv2d, "an image", lambda layer: torch.zeros(1, layer.in_channels, 224, 224)),
    (nn.Conv1d, "a sequence", lambda layer: torch.zeros(1, layer.in_channels, 128)),
    (nn.Linear, "a row", lambda layer: torch.zeros(1, layer.in_features)),
    (nn.RNNBase, "a sequence", _sequence),
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
        for kind, what, make in _GUESSES:
            if isinstance(layer, kind):
                made = make(layer)
                name = type(layer).__name__
                return (made,), f"example inputs were guessed from the first {name}: {what} {tuple(made.shape)}"
    problem = f"{type(module).__name__} does not say what it takes"
    raise InputError("SOURCE", problem, "let the factory return (module, example_inputs)")


def batch_dimension(module: nn.Module, *, guessed: bool) -> int:
    """Return where a module's inputs have the batch: 1 for a recurrent layer that wants the sequence first, else 0.

    ``guessed``: whether the inputs were made by :func:`guess_inputs` for the module's first layer, not given for it.
    """
    kinds = tuple(kind for kind, _, _ in _GUESSES)
    layer = next((part for part in module.modules() if isinstance(part, kinds)), module) if guessed else module
    return int(isinstance(layer, nn.RNNBase) and not layer.batch_first)
