"""Modules with named inputs passed by position, and tensor values for forwards that read them during a trace.

Traces run on tensors without values, and a forward that reads a value (``mask.any()``, ``sizes.tolist()``,
``states[mask]``) cannot be traced. Many forwards read values of integer inputs only: positions of image tokens, patches
of an image, masks. :class:`KnownValues` computes beside the trace all tensors that depend on such inputs alone. A
router's choice by activations is assumed to be balanced; other values that depend on weights or activations stay
unknown, and reading them is an error. Start at :func:`bind`.
"""

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
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ddltool.analyzers.step.recording.values import MAX_ELEMENTS, Values
from ddltool.analyzers.step.tracing.factories import REMEDY
from ddltool.analyzers.step.tracing.step import resized
from ddltool.analyzers.step.tracing.torch_adapter import silent_log
from ddltool.errors import InputError, one_line

_CHOICES = frozenset([torch.ops.aten.topk.default, torch.ops.aten.argmax.default, torch.ops.aten.max.dim])
"""Ops that choose among options by values, as a router chooses experts."""
_DYNAMIC = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})
"""Marks of ops whose result's shape, or whose result, depends on values."""
_NO_SKIP = 0.5
"""The number that a model draws to skip a layer (LayerDrop), which skips where it is below a small probability."""


class KnownValues(TorchDispatchMode):
    """A mode that tracks the values of tensors without storage, where they follow from those given to :meth:`learn`."""

    def __init__(self) -> None:
        """Begin with no known values."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._values = Values()

    def learn(self, tensor: Tensor, value: Tensor) -> None:
        """Set the values of a tensor without storage to those of a real tensor.

        The rows of ``value`` are repeated or cut to the tensor's number of rows. A tensor of more than ``MAX_ELEMENTS``
        stays unknown, and so does one whose value is not on the CPU.
        """
        if tensor.numel() <= MAX_ELEMENTS and value.device.type == "cpu":
            with _disable_current_modes():
                self._values[tensor] = resized(value, 0, tensor.shape[0])

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor's values are known."""
        return tensor in self._values

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op ``func`` without values, and once more on values where those of all its inputs are known."""
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # Without values, the mode below this one would refuse the op: its result's shape is not known.
        if _DYNAMIC.intersection(func.tags) and all(self._values.value_of(tensor) is not None for tensor in tensors):
            value = self._values.compute(func, args, kwargs)
            outcome = tree_map_only(Tensor, lambda known: torch.empty_like(known, device=tensors[0].device), value)
            self._values.record(outcome, value)
            return outcome
        outcome = func(*args, **kwargs)
        if func is torch.ops.aten.rand.default and outcome.numel() == 1:  # a draw by which a layer may be skipped
            with _disable_current_modes():
                self._values[outcome] = torch.full(outcome.shape, _NO_SKIP)
        elif not self._values.follow(func, args, kwargs, outcome) and func in _CHOICES:
            self._assume_balanced(func, args, outcome)
        return outcome

    def _assume_balanced(self, func: Any, args: tuple[Any, ...], outcome: Any) -> None:
        """Set the indices that an op chooses by activations to 0, 1, 2, ... over all options, and again from 0.

        A router then loads all experts equally. ``func``: the op, one of ``_CHOICES``, ``args``: its arguments, ``outcome``:
        its result: the chosen indices, or a tuple with these second.
        """
        choice = outcome[1] if isinstance(outcome, (tuple, list)) else outcome
        op_name = func._schema.name.partition("::")[2]
        # The index, among the op's arguments, of the dimension that is searched; by default that is the last one.
        argument_index = {"argmax": 1, "max": 1, "topk": 2}[op_name]
        dimension = args[argument_index] if len(args) > argument_index else None
        searched = args[0]
        option_count = searched.shape[-1 if dimension is None else dimension]
        with _disable_current_modes():
            self._values[choice] = (torch.arange(choice.numel()) % option_count).reshape(choice.shape)


class AssumedValues(TorchFunctionMode):
    """A mode under which all numbers count as finite, as in a healthy step, and masks with known values become indices.

    The size of a tensor that is indexed by a mask depends on values, also in the backward pass; indices make it known.
    """

    def __init__(self, known: KnownValues) -> None:
        """Take the known values from ``known``, the mode that tracks them."""
        super().__init__()
        self._known = known

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one function of torch under the two assumptions of the class.

        Formatting a known number, a tensor made of a list of known tensors, and ``masked_select`` work, too.
        """
        if not args:  # keywords alone: none of the functions below is called in this way
            return func(**(kwargs or {}))
        # First what is assumed of all numbers, then what reads known values: masks, texts, lists.
        if func in (torch.isfinite, Tensor.isfinite):
            return torch.ones(args[0].shape, dtype=torch.bool, device=args[0].device)
        if func in (torch.isinf, Tensor.isinf, torch.isnan, Tensor.isnan):
            return torch.zeros(args[0].shape, dtype=torch.bool, device=args[0].device)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = (args[0], self._masks_to_indices(args[1]), *args[2:])
        if func is Tensor.__format__ and self._known.holds(args[0]) and args[0].dim() == 0:
            return format(args[0].item(), args[1])
        if func in (torch.tensor, torch.as_tensor) and isinstance(args[0], (list, tuple)):
            args = (tree_map_only(Tensor, lambda tensor: tensor.tolist(), args[0]), *args[1:])
        if func in (torch.masked_select, Tensor.masked_select) and len(args) == 2 and self._known.holds(args[1]):
            tensor, mask = torch.broadcast_tensors(*args)
            return tensor[mask.nonzero().unbind(1)]
        return func(*args, **(kwargs or {}))

    def _masks_to_indices(self, index: Any) -> Any:
        """Return an index of a tensor with masks of known values replaced by the indices of their true elements.

        A mask over n dimensions becomes n tensors of indices; in a tuple they take its place.
        """
        if not isinstance(index, tuple):
            is_mask = isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() > 0
            return index.nonzero().unbind(1) if is_mask and self._known.holds(index) else index
        flat: list[Any] = []
        for item in index:
            replaced = self._masks_to_indices(item)
            flat += replaced if isinstance(replaced, tuple) else (replaced,)
        return tuple(flat)


def refusal(source: str, error: Exception) -> InputError:
    """Return the InputError for the model ``source``, which raised ``error`` on the inputs that ddltool made for it."""
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        problem = "cannot be traced: what it does depends on its activations"
    else:
        message = one_line(f"{type(error).__name__}: {error}")[:200]
        problem = f"does not run on the inputs that ddltool makes for it ({message})"
    return InputError(source, problem, REMEDY)


def bind(
    module: nn.Module, inputs: Mapping[str, Tensor], source: str, packed: frozenset[str] = frozenset()
) -> tuple[Tensor, ...]:
    """Replace the module's ``forward`` by one that takes the tensors of ``inputs`` by position; return them as a tuple.

    ``inputs`` are CPU tensors by name, with the batch in dimension 0. Those in ``packed`` are passed on without this
    dimension, the samples one after another (patches of images of any size). While the module is traced, its inputs have
    the values given here, repeated to the traced batch size, so that its forward may read them; what it raises then
    becomes an InputError that names ``source``.
    """
    names = tuple(inputs)
    forward = module.forward

    def named_inputs(tensors: tuple[Tensor, ...]) -> dict[str, Any]:
        """Return the tensors by their names, the packed ones without their batch dimension."""
        by_name = dict(zip(names, tensors, strict=True))
        return {name: tensor.flatten(0, 1) if name in packed else tensor for name, tensor in by_name.items()}

    def forward_by_position(*tensors: Tensor) -> Any:
        """Call the module's own forward with its inputs by name.

        In a trace the inputs' values are known meanwhile, and what the forward raises becomes an InputError.
        """
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors):  # no trace: a step that really runs
            return forward(**named_inputs(tensors))
        with KnownValues() as known, AssumedValues(known):
            for tensor, value in zip(tensors, inputs.values(), strict=True):
                known.learn(tensor, value)
            try:
                return forward(**named_inputs(tensors))
            except Exception as error:
                raise refusal(source, error) from error

    module.forward = forward_by_position  # the module itself stays what it is: a wrapper would rename its parameters
    return tuple(inputs.values())


class _Method(nn.Module):
    """A module whose forward is a method of another module, so that ``functional_call`` can run it."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        """Stand for the method called ``name`` of the module ``owner``."""
        super().__init__()
        self.owner, self.name = owner, name

    def forward(self, **inputs: Any) -> Any:
        """Return the method's result."""
        return getattr(self.owner, self.name)(**inputs)


def run_without_values(
    owner: nn.Module, method: str, inputs: Mapping[str, Tensor], packed: frozenset[str] = frozenset()
) -> Any:
    """Return the result, in tensors without values, of a module's method on named inputs; raises what the method raises.

    The method runs as in a trace: weights take no memory, and the values of the inputs are known. ``packed``: names of
    inputs that are passed on without their batch dimension.
    """
    module = _Method(owner, method)
    with (
        silent_log(),
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
        KnownValues() as known,
        AssumedValues(known),
    ):
        state = {
            name: torch.empty_like(tensor, device="cpu")
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
        }
        fake_inputs = {}
        for name, tensor in inputs.items():
            fake_inputs[name] = torch.empty_like(tensor, device="cpu")
            known.learn(fake_inputs[name], tensor)
            if name in packed:
                fake_inputs[name] = fake_inputs[name].flatten(0, 1)
        return functional_call(module, state, (), fake_inputs)
