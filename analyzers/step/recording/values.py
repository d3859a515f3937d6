"""The values of fake tensors, as far as they follow from constants: positions, masks, counters, sizes.

A step is recorded on tensors that have shapes and no values, and yet a forward pass may read a value: whether a mask hides
anything (which decides the kernel of attention), how many patches an image has. :class:`Values` computes beside the recording
whatever depends on known tensors alone; what depends on activations or weights stays unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from ddltool.analyzers.step.recording.torch_costs import written_arguments

MAX_ELEMENTS = 1 << 21
"""Elements of the largest tensor whose values are kept: an image or a mask, but no batch of feature maps."""
_BY_SHAPE = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"})
"""Operations that use only the shape of their input tensor."""


class Values:
    """The known values of tensors without storage, kept for as long as these tensors live."""

    def __init__(self, *, only_whole: bool = False) -> None:
        """Begin with no known values.

        ``only_whole``: floating-point tensors of more than one element stay unknown, so that tables of sines and freshly
        initialised weights are not computed for nothing.
        """
        self._only_whole = only_whole
        self._values: Any = WeakTensorKeyDictionary()
        """By a tensor without storage, a real tensor of the CPU with its values; views share the storage of their base."""

    def __contains__(self, tensor: Tensor) -> bool:
        """Return whether the values of a tensor without storage are known."""
        return tensor in self._values

    def __setitem__(self, tensor: Tensor, value: Tensor) -> None:
        """Keep ``value``, a real tensor of the CPU, as what a tensor without storage holds."""
        self._values[tensor] = value

    def value_of(self, tensor: Tensor) -> Tensor | None:
        """Return a real tensor of the CPU with the values of ``tensor``, None if they are not known.

        A real tensor of the CPU is returned itself, unless it is a parameter or has more than ``MAX_ELEMENTS``: these
        count as unknown.
        """
        if not isinstance(tensor, FakeTensor):
            is_constant = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.numel() <= MAX_ELEMENTS
            return tensor if is_constant else None
        return self._values.get(tensor)  # type: ignore[no-any-return]

    def forget(self, tensor: Tensor) -> None:
        """Drop the known values of a tensor and of all tensors that share its storage; their known values share one, too."""
        if tensor not in self._values:
            return
        storage = self._values[tensor].untyped_storage()._cdata
        aliases = [key for key, value in self._values.items() if value.untyped_storage()._cdata == storage]
        for alias in aliases:
            del self._values[alias]

    def compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the real result, on the CPU, of an op on the values of its tensors.

        ``func``: torch's operator, ``args`` and ``kwargs``: its arguments. Unknown tensors count as zeros, so the result is
        right only if the op uses no more of them than their shape. Integers are computed as floats where the CPU has a
        kernel for floats only.
        """
        with _disable_current_modes():
            on_cpu = {"device": torch.device("cpu")} if "device" in kwargs else {}
            real_args, real_kwargs = tree_map_only(Tensor, self._value_or_zeros, (args, {**kwargs, **on_cpu}))
            try:
                return func(*real_args, **real_kwargs)
            except NotImplementedError:
                float_args, float_kwargs = tree_map_only(Tensor, Tensor.float, (real_args, real_kwargs))
                return tree_map_only(Tensor, Tensor.long, func(*float_args, **float_kwargs))

    def follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outcome: Any) -> bool:
        """Keep the values of an op's results, after it ran on tensors without values; return whether they are known.

        They are known if all inputs are, or if only shapes matter, and if they are worth keeping. Otherwise the values
        of tensors that the op wrote to in place are forgotten. ``outcome``: the results, tensors without storage; a single
        one, or nested in tuples and lists.
        """
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        needs_shapes_only = func._schema.name.removeprefix("aten::") in _BY_SHAPE
        can_compute = needs_shapes_only or all(self.value_of(leaf) is not None for leaf in leaves)
        is_known = can_compute and self._is_worth_keeping(func, outcome)
        if is_known:
            self.record(outcome, self.compute(func, args, kwargs))
        elif func._schema.is_mutable:
            self._forget_written(func, args, kwargs)
        return is_known

    def record(self, outcome: Any, value: Any) -> None:
        """Keep the values of an op's outputs.

        ``outcome``: the outputs, tensors without storage, a single one or nested in tuples and lists; ``value``: the same
        structure with real tensors of the CPU in it.
        """
        for tensor, known_value in zip(tree_leaves(outcome), tree_leaves(value), strict=True):
            if isinstance(tensor, Tensor):
                self._values[tensor] = known_value

    def _value_or_zeros(self, tensor: Tensor) -> Tensor:
        """Return a tensor's known values, else zeros of its shape that share one element of memory."""
        value = self.value_of(tensor)
        return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) if value is None else value

    def _is_worth_keeping(self, func: Any, outcome: Any) -> bool:
        """Return whether an op's results are worth computing.

        They are not if they are random, uninitialized or larger than ``MAX_ELEMENTS``, nor under ``only_whole`` if they are
        floating-point tensors of more than one element.
        """
        if torch.Tag.nondeterministic_seeded in func.tags:
            return False
        results = [leaf for leaf in tree_leaves(outcome) if isinstance(leaf, Tensor)]
        if self._only_whole and any(leaf.dtype.is_floating_point and leaf.numel() > 1 for leaf in results):
            return False
        is_filled = not func._schema.name.startswith(("aten::empty", "aten::new_empty"))
        return is_filled and all(leaf.numel() <= MAX_ELEMENTS for leaf in results)

    def _forget_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Drop the values of tensors that a call of ``func`` writes to in place, and of all that share their storage."""
        for leaf in tree_leaves(written_arguments(func, args, kwargs)):
            if isinstance(leaf, Tensor):
                self.forget(leaf)
