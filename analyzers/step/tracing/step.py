"""A module with example inputs and a loss, for tracers and profilers. Start at :class:`TrainingStep`."""

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
    """One training step of a model: ``loss(module(*inputs))``."""

    name: str
    """The step's name in results and messages."""
    module: nn.Module
    inputs: tuple[Any, ...]
    """Arguments; tensors have the batch in ``batch_dimension``, other values are passed unchanged."""
    keywords: tuple[str, ...] = ()
    """Names of the last of ``inputs``, which are passed by keyword."""
    loss: Callable[[Any], Tensor]
    """A function from the module's output to a scalar tensor."""
    note: str = ""
    """A remark for the user on guessed inputs, "" for none."""
    batch_dimension: int = 0
    """1 for a recurrent layer that takes (steps, batch, features)."""

    def at_batch(self, batch_size: int | None) -> TrainingStep:
        """Return the step with its inputs at a batch size; None: unchanged. Raises InputError for inputs without a batch."""
        return replace(self, inputs=with_batch_size(self.inputs, batch_size, self.batch_dimension))

    def run(self) -> Tensor:
        """Return the loss of the example inputs, a scalar tensor."""
        return self.loss(called(self.module, self.inputs, self.keywords))


def called(module: Callable[..., Any], inputs: tuple[Any, ...], keywords: tuple[str, ...] = ()) -> Any:
    """Call the module and return its output; ``keywords``: names of the last inputs, which are passed by keyword.

    >>> called(lambda a, b: a - b, (1, 5), ("b",))
    -4
    """
    positional = len(inputs) - len(keywords)
    return module(*inputs[:positional], **dict(zip(keywords, inputs[positional:], strict=True)))


def as_arguments(example: Any) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Return (inputs, keywords) of a step for one input, a tuple or list of inputs, or a mapping of inputs by name.

    They are as the fields of :class:`TrainingStep`: the inputs, and the names of those that are passed by keyword.

    >>> as_arguments({"x": 1, "mask": 2})
    ((1, 2), ('x', 'mask'))
    """
    if isinstance(example, Mapping):
        return tuple(example.values()), tuple(str(name) for name in example)
    inputs = tuple(example) if isinstance(example, (tuple, list)) else (example,)
    return inputs, ()


def all_tensors(output: Any) -> list[Tensor]:
    """Return the tensors in a module's output, in order: a tensor, or a nested sequence, mapping or dataclass."""
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
    """Return a scalar loss for any output: its own ``loss`` if it has one, else the sum of a term per floating-point tensor.

    The term of a matrix (batch, classes) is its cross entropy against class 0, which costs what a classifier's loss does;
    that of any other tensor is its mean. Raises InputError for an output without a floating-point tensor.
    """
    output_loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(output_loss, Tensor):
        return output_loss
    terms = [_loss_term(tensor) for tensor in tensors_in(output)]
    if not terms:
        type_name = type(output).__name__
        problem = f"the module returned {type_name} without a floating-point tensor"
        raise InputError("SOURCE", problem, "return one to train on")
    return terms[0] if len(terms) == 1 else torch.stack([term.float() for term in terms]).sum()


def _loss_term(tensor: Tensor) -> Tensor:
    """Return the scalar loss of one tensor: cross entropy against class 0 for (batch, classes), else the mean."""
    if tensor.dim() == 2 and tensor.shape[1] > 1:
        return F.cross_entropy(tensor, torch.zeros(tensor.shape[0], dtype=torch.long, device=tensor.device))
    return tensor.mean()


def language_model_loss(output: Any) -> Tensor:
    """Return the mean cross entropy, over all tokens, of ``output.logits`` (batch, length, vocabulary) against token 0.

    The targets do not matter, because a step is traced for the ops of its loss, not for the value. It is computed in
    float32 whatever the type of the logits, as by transformers' losses (``ForCausalLMLoss``).
    """
    logits = output["logits"] if isinstance(output, Mapping) else output.logits
    flat = logits.reshape(-1, logits.shape[-1]).float()
    return F.cross_entropy(flat, torch.zeros(flat.shape[0], dtype=torch.long, device=flat.device))


def with_batch_size(inputs: tuple[Any, ...], batch_size: int | None, dimension: int = 0) -> tuple[Any, ...]:
    """Return the inputs at ``batch_size``; None: unchanged. ``dimension``: the index of the batch dimension.

    The first tensor that has this dimension says the old batch size. Tensors of that size are resized; their entries are
    repeated, so that token indices stay valid. Other tensors and values stay unchanged. Raises InputError if no tensor has
    a batch.
    """
    if batch_size is None:
        return inputs
    candidates = [
        value
        for value in inputs
        if isinstance(value, Tensor) and value.dim() > dimension and value.shape[dimension] > 0
    ]
    if not candidates:
        raise InputError("--batch-size", "the example inputs hold no tensor with a batch dimension", "leave it out")
    old_size = candidates[0].shape[dimension]
    # Tensors are compared by id, because == compares their elements.
    batched = {id(value) for value in candidates if value.shape[dimension] == old_size}
    return tuple(resized(value, dimension, batch_size) if id(value) in batched else value for value in inputs)


def with_sequence_length(inputs: tuple[Any, ...], length: int | None) -> tuple[Any, ...]:
    """Return the inputs with ``length`` tokens in every sample; None: unchanged.

    Every (batch, tokens) tensor of integers is resized, its columns repeated or cut off. Raises InputError if there is no
    such tensor.
    """
    if length is None:
        return inputs
    is_tokens = [isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point() for value in inputs]
    if not any(is_tokens):
        raise InputError("--sequence-length", "the example inputs hold no token indices", "leave it out")
    pairs = zip(inputs, is_tokens, strict=True)
    return tuple(resized(value, 1, length) if holds_tokens else value for value, holds_tokens in pairs)


def resized(tensor: Tensor, dimension: int, size: int) -> Tensor:
    """Return a tensor with ``size`` entries along a dimension: its own, repeated in a cycle or cut off."""
    indices = torch.arange(size, device=tensor.device) % tensor.shape[dimension]
    return tensor.index_select(dimension, indices)


_GUESSED_LENGTH = 128
"""Steps or tokens of a guessed sequence."""
_GUESSED_PIXELS = 224
"""Height and width of a guessed image, ImageNet's usual size."""


def _sequence_input(layer: nn.RNNBase) -> Tensor:
    """Return one sequence for a recurrent layer: (1, steps, features) if it is ``batch_first``, else (steps, 1, features)."""
    width = int(layer.input_size)
    return torch.zeros(1, _GUESSED_LENGTH, width) if layer.batch_first else torch.zeros(_GUESSED_LENGTH, 1, width)


# (a type of layer, what it takes in words, a function that makes one sample for such a layer)
_GUESSES: tuple[tuple[type[nn.Module], str, Callable[[Any], Tensor]], ...] = (
    (nn.Embedding, "token indices", lambda _: torch.zeros(1, _GUESSED_LENGTH, dtype=torch.long)),
    (nn.Conv2d, "an image", lambda layer: torch.zeros(1, layer.in_channels, _GUESSED_PIXELS, _GUESSED_PIXELS)),
    (nn.Conv1d, "a sequence", lambda layer: torch.zeros(1, layer.in_channels, _GUESSED_LENGTH)),
    (nn.Linear, "a row", lambda layer: torch.zeros(1, layer.in_features)),
    (nn.RNNBase, "a sequence", _sequence_input),
)


def guess_inputs(module: nn.Module) -> tuple[Any, str]:
    """Return (example inputs of a module, remark): the remark says how the inputs were guessed, "" if they are its own.

    A module may have ``example_inputs()`` or ``example_input_array``, whose values :func:`as_arguments` takes. Otherwise
    the inputs are guessed from the first layer whose input shape is known. Raises InputError if there is no such layer
    either.
    """
    method = getattr(module, "example_inputs", None)
    array = getattr(module, "example_input_array", None)
    example = method() if callable(method) else array
    if example is not None:
        return example, ""
    for layer in module.modules():
        for kind, description, make in _GUESSES:
            if isinstance(layer, kind):
                tensor = make(layer)
                name = type(layer).__name__
                described = f"{description} {tuple(tensor.shape)}"
                return (tensor,), f"example inputs were guessed from the first {name}: {described}"
    problem = f"{type(module).__name__} does not say what it takes"
    raise InputError("SOURCE", problem, "let the factory return (module, example_inputs)")


def batch_dimension(module: nn.Module, *, guessed: bool) -> int:
    """Return the batch dimension of a module's inputs: 1 for a recurrent layer that takes (steps, batch, features), else 0.

    ``guessed``: whether the inputs were guessed by :func:`guess_inputs`; then the layer that they were guessed from is
    looked at, otherwise the module itself.
    """
    layer = module
    if guessed:
        layer_types = tuple(layer_type for layer_type, _, _ in _GUESSES)
        layers = (submodule for submodule in module.modules() if isinstance(submodule, layer_types))
        layer = next(layers, module)
    takes_steps_first = isinstance(layer, nn.RNNBase) and not layer.batch_first
    return int(takes_steps_first)
