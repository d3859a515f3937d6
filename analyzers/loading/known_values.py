"""Values that a traced forward may ask for: those that follow from token ids, masks and sizes alone.

Tracing runs on tensors without values, and a forward that asks for one (``mask.any()``, ``sizes.tolist()``,
``states[mask]``) cannot be traced. Many ask only about their integer inputs: where the image tokens stand, how many
patches an image has, whether anything is masked. :class:`KnownValues` computes what depends on such inputs alone beside
the trace, and answers from that. What a router chooses by activations is assumed to be balanced; everything else that
depends on weights or activations stays unknown and is refused as before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from ddltool.analyzers.tracing.step import resized

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
