"""A module whose named inputs are given by position, and the values that its forward may ask for while it is traced.

Tracing runs on tensors without values, and a forward that asks for one (``mask.any()``, ``sizes.tolist()``,
``states[mask]``) cannot be traced. Many ask only about their integer inputs: where the image tokens stand, how many
patches an image has, whether anything is masked. :class:`KnownValues` computes what depends on such inputs alone beside
the trace, and answers from that. What a router chooses by activations is assumed to be balanced; everything else that
depends on weights or activations stays unknown and is refused. Start at :func:`bind`.
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
from torch.utils.weak import WeakTensorKeyDictionary

from ddltool.analyzers.loading.factories import REMEDY
from ddltool.analyzers.tracing.step import resized
from ddltool.analyzers.tracing.torch_adapter import silent_log
from ddltool.errors import InputError, one_line

_LARGEST = 1 << 21  # elements: an image or a mask, but no batch of feature maps
_CHOICES = frozenset([torch.ops.aten.topk.default, torch.ops.aten.argmax.default, torch.ops.aten.max.dim])
_DYNAMIC = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})


class KnownValues(TorchDispatchMode):
    """While active, tracks the values of tensors without storage that follow from those given to :meth:`learn`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values: Any = WeakTensorKeyDictionary()

    def learn(self, tensor: Tensor, value: Tensor) -> None:
        """Say what a tensor without values holds: a tensor, its rows repeated to as many as the tensor has."""
        if tensor.numel() <= _LARGEST and value.device.type == "cpu":
            with _disable_current_modes():
                self._values[tensor] = resized(value, 0, tensor.shape[0])

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op, and beside it the same op on values where all of its inputs' are known."""
        kwargs = dict(kwargs or {})
        if not all(self._is_known(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)):
            self._forget(func, args, kwargs)
            outcome = func(*args, **kwargs)
            if func in _CHOICES:
                self._balance(func, args, outcome)
            return outcome
        given, named = tree_map_only(Tensor, lambda tensor: self._values.get(tensor, tensor), (args, kwargs))
        if "device" in named:
            named["device"] = torch.device("cpu")
        if _DYNAMIC.intersection(func.tags):
            with _disable_current_modes():
                value = func(*given, **named)
            outcome = tree_map_only(Tensor, torch.ops.aten.clone.default, value)
            self._note(outcome, value)
            return outcome
        outcome = func(*args, **kwargs)
        if func is torch.ops.aten.rand.default and outcome.numel() == 1:
            # Whether a layer is skipped in this step (LayerDrop): what happens most often.
            with _disable_current_modes():
                self._values[outcome] = torch.full(outcome.shape, 0.5)
            return outcome
        made = [leaf for leaf in tree_leaves(outcome) if isinstance(leaf, Tensor)]
        if torch.Tag.nondeterministic_seeded in func.tags or any(leaf.numel() > _LARGEST for leaf in made):
            self._forget(func, args, kwargs)
            return outcome
        with _disable_current_modes():
            value = func(*given, **named)
        self._note(outcome, value)
        return outcome

    def _note(self, outcome: Any, value: Any) -> None:
        for tensor, known in zip(tree_leaves(outcome), tree_leaves(value), strict=True):
            if isinstance(tensor, Tensor):
                self._values[tensor] = known

    def _balance(self, func: Any, args: tuple[Any, ...], outcome: Any) -> None:
        """Let a choice by activations fall on all in turn: a router sends equally many tokens to every expert."""
        chosen = outcome[1] if isinstance(outcome, (tuple, list)) else outcome
        place = {"argmax": 1, "max": 1, "topk": 2}[func._schema.name.partition("::")[2]]
        size = args[0].shape[args[place] if len(args) > place and args[place] is not None else -1]
        with _disable_current_modes():
            self._values[chosen] = (torch.arange(chosen.numel()) % size).reshape(chosen.shape)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor's values are known."""
        return tensor in self._values

    def _is_known(self, tensor: Tensor) -> bool:
        constant = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.numel() <= _LARGEST
        return constant or tensor in self._values

    def _forget(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Drop what an op writes to in place, with everything that shares its memory."""
        if not func._schema.is_mutable:
            return
        arguments = func._schema.arguments
        named = dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
        written = [
            named.get(argument.name) for argument in arguments if argument.alias_info and argument.alias_info.is_write
        ]
        for tensor in (leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor) and leaf in self._values):
            storage = self._values[tensor].untyped_storage()._cdata
            for other in [key for key, value in self._values.items() if value.untyped_storage()._cdata == storage]:
                del self._values[other]


class Assumptions(TorchFunctionMode):
    """While active, all numbers are finite, as in a healthy step, and masks with known values become the places in them.

    A mask as an index makes a tensor whose size only its values tell, in the backward pass once more; places do not.
    """

    def __init__(self, known: KnownValues) -> None:
        super().__init__()
        self._known = known

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer whether numbers are finite, replace known masks, and run everything else."""
        if not args:
            return func(**(kwargs or {}))
        if func in (torch.isfinite, Tensor.isfinite):
            return torch.ones(args[0].shape, dtype=torch.bool)
        if func in (torch.isinf, Tensor.isinf, torch.isnan, Tensor.isnan):
            return torch.zeros(args[0].shape, dtype=torch.bool)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = (args[0], self._places(args[1]), *args[2:])
        if func is Tensor.__format__ and self._known.holds(args[0]) and args[0].dim() == 0:
            return format(args[0].item(), args[1])
        if func in (torch.tensor, torch.as_tensor) and isinstance(args[0], (list, tuple)):
            args = (tree_map_only(Tensor, lambda tensor: tensor.tolist(), args[0]), *args[1:])
        if func in (torch.masked_select, Tensor.masked_select) and len(args) == 2 and self._known.holds(args[1]):
            tensor, mask = torch.broadcast_tensors(*args)
            return tensor[mask.nonzero().unbind(1)]
        return func(*args, **(kwargs or {}))

    def _places(self, index: Any) -> Any:
        if not isinstance(index, tuple):
            masks = isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() and self._known.holds(index)
            return index.nonzero().unbind(1) if masks else index
        found = [self._places(one) for one in index]
        return tuple(part for one in found for part in (one if isinstance(one, tuple) else (one,)))


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
