"""A model with what its DataLoader yields: which parts of a batch are the module's inputs, and which its targets.

A batch is a tensor, a sequence of parts such as (images, labels), or a mapping of parts by name. The parts that the module's
``forward`` does not take are targets, and the loss is the usual one for their type and shape. Start at :func:`with_batch`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddltool.analyzers.step.tracing.step import TrainingStep, as_arguments, default_loss, tensors_in
from ddltool.errors import InputError


class Fed(NamedTuple):
    """A model and one batch for it.

    The model is any SOURCE except a file of a graph. The batch is a tensor, a sequence of parts, or parts by name.
    """

    model: Any
    batch: Any


class Parts(NamedTuple):
    """A batch divided into the inputs of a module and the targets of its loss.

    A part that is neither (several targets, an index) is dropped.
    """

    example: Any
    """Inputs as :func:`~ddltool.analyzers.step.tracing.step.as_arguments` takes them."""
    targets: Tensor | None = None
    """None: the batch has none, or several tensors are left over."""
    has_loss: bool = False
    """Whether the module takes the targets, too, so that a number among what it returns is its loss."""
    takes_mapping: bool = False
    """Whether the module takes the mapping as its one argument."""


def samples_in(batch: Any) -> int:
    """Return how many samples a batch holds: the first dimension of its first tensor. Raises InputError if it holds none.

    >>> samples_in({"x": torch.zeros(4, 2)})
    4
    """
    if isinstance(batch, int):
        raise InputError("batch", f"is {batch}, a number", f"give batch_sizes={batch}, or what a DataLoader yields")
    values, _ = as_arguments(batch)
    tensors = [value for value in values if isinstance(value, Tensor) and value.dim()]
    if not tensors:
        problem = f"a {type(batch).__name__} without a tensor is no batch"
        raise InputError("batch", problem, "give a tensor, a tuple of tensors, or tensors by name")
    return int(tensors[0].shape[0])


def divide_batch(module: nn.Module, batch: Any) -> Parts:
    """Divide a batch into the module's inputs and the targets, by the parameters of its ``forward``.

    A tensor is the only input. The parts of a sequence are inputs in order, as far as ``forward`` has parameters for
    data; the parts of a mapping are inputs by name. Raises InputError for a batch that holds no tensor, or that lacks a
    required input.
    """
    samples_in(batch)
    parameters = inspect.signature(module.forward).parameters.values()
    if isinstance(batch, Mapping):
        return _divide_by_name(module, {**batch}, parameters)
    if isinstance(batch, Tensor):
        return Parts(batch)
    positional = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = sum(one.default is one.empty for one in positional)
    # A parameter whose default is a flag or a number is a setting; data come in those without a default, or with None.
    settings = [index for index, one in enumerate(positional) if one.default not in (one.empty, None)]
    data_parameters = settings[0] if settings else len(positional)  # data end at the first setting
    takes_all = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    count = len(batch) if takes_all else min(len(batch), data_parameters)
    if len(batch) < needed:
        problem = f"has {len(batch)} parts, and the forward of {type(module).__name__} takes {needed}"
        raise InputError("batch", problem, "give all of them, or by name")
    # A forward that takes the whole batch, more than it needs, is taken to return its loss.
    has_loss = count == len(batch) > needed
    return Parts(tuple(batch[:count]), _single_tensor(batch[count:]), has_loss)


def _divide_by_name(module: nn.Module, batch: dict[str, Any], parameters: Any) -> Parts:
    """Divide a mapping: parts that are named as parameters of the module's ``forward`` are inputs, the others targets.

    A module with a single required parameter, and no parameter of these names, is taken to read the whole mapping.
    ``parameters``: ``inspect.Parameter`` objects, those of ``forward``. Raises InputError for a required parameter without
    a part.
    """
    names = {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    needed = [one.name for one in parameters if one.name in names and one.default is one.empty]
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    inputs = batch if takes_all else {name: value for name, value in batch.items() if name in names}
    missing = [name for name in needed if name not in inputs]
    if missing and len(needed) == 1 and not inputs:  # it gets the targets, too, and so may return its loss
        return Parts(batch, has_loss=True, takes_mapping=True)
    if missing:
        problem = f"has no {missing[0]!r}, which the forward of {type(module).__name__} takes"
        raise InputError("batch", problem, f"it has {', '.join(map(str, batch))}")
    rest = [value for name, value in batch.items() if name not in inputs]
    # A forward that takes the whole batch, more than it needs, is taken to return its loss.
    has_loss = not rest and len(inputs) > len(needed)
    return Parts(inputs, _single_tensor(rest), has_loss)


def _single_tensor(rest: Any) -> Tensor | None:
    """Return the targets among ``rest``, the parts of a batch that are no inputs: the only tensor, None for several or none."""
    tensors = [value for value in rest if isinstance(value, Tensor)]
    return tensors[0] if len(tensors) == 1 else None


def with_batch(step: TrainingStep, parts: Parts) -> TrainingStep:
    """Return the step with a batch's inputs, and with a loss against its targets if it has any.

    ``parts``: the batch, as :func:`divide_batch` divides it for the step's module. Without targets, the loss is the
    module's own if it returns one, else the step's. A module that takes the batch as one mapping is changed to take it by
    keywords.
    """
    inputs, keywords = as_arguments(parts.example)
    loss: Callable[[Any], Tensor] = step.loss
    if parts.targets is not None:
        loss = loss_against(parts.targets)
    elif parts.has_loss:
        loss = _own_loss
    if parts.takes_mapping:
        _take_keywords(step.module)
    return replace(step, inputs=inputs, keywords=keywords, loss=loss, note="")


def _take_keywords(module: nn.Module) -> None:
    """Change a module in place so that it takes by keywords the parts that it took as one mapping.

    Only its class is replaced, because a wrapping module would rename its parameters.
    """
    module_type = type(module)

    def forward(self: nn.Module, **parts: Any) -> Any:
        """Call the module's own forward with the keywords as one mapping."""
        return module_type.forward(self, parts)

    module.__class__ = type(module_type.__name__, (module_type,), {"forward": forward})


def _own_loss(output: Any) -> Tensor:
    """Return the loss that a module computed itself: its only output without dimensions, or else the default loss."""
    values, _ = as_arguments(output)  # the parts of a tuple, list or mapping, or the output alone
    numbers = [value for value in values if isinstance(value, Tensor) and value.dim() == 0]
    return numbers[0] if len(numbers) == 1 else default_loss(output)


def loss_against(example: Tensor) -> Callable[[Any], Tensor]:
    """Return a loss function of a module's output against targets of ``example``'s type and shape, for any batch size.

    The targets' values are zeros. Integers are classes: cross entropy over the output's last dimension, (batch, ...,
    classes), or over its second, (batch, classes, ...), if only then the other dimensions are those of the targets.
    Floating-point targets of the output's shape: the mean squared error. Anything else, and an output with a ``loss`` of
    its own: the default loss.
    """

    def loss(output: Any) -> Tensor:
        """Return the loss of the output's first floating-point tensor, (batch, ...), by the cases of :func:`loss_against`."""
        own_loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(own_loss, Tensor) or not tensors_in(output):
            return default_loss(output)
        predicted = tensors_in(output)[0]
        if example.is_floating_point():
            is_alike = predicted.shape[1:] == example.shape[1:]
            return F.mse_loss(predicted, torch.zeros_like(predicted)) if is_alike else default_loss(output)
        if predicted.dim() != example.dim() + 1:
            return default_loss(output)
        # Whether the output's dimensions beside the batch and the classes are those of the targets. Where both readings
        # fit, the last dimension is taken for the classes.
        fits_classes_second = predicted.shape[2:] == example.shape[1:]
        fits_classes_last = predicted.shape[1:-1] == example.shape[1:]
        if fits_classes_second and not fits_classes_last:
            labels = torch.zeros((predicted.shape[0], *predicted.shape[2:]), dtype=torch.long, device=predicted.device)
            return F.cross_entropy(predicted, labels)
        flat = predicted.reshape(-1, predicted.shape[-1])
        flat = flat.float() if example.dim() > 1 else flat  # most trainers compute a loss token by token in float32
        return F.cross_entropy(flat, torch.zeros(flat.shape[0], dtype=torch.long, device=flat.device))

    return loss
