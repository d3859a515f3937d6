"""What tensors without storage hold, where that follows from constants: positions, masks, counters, sizes.

A step is recorded on tensors that have shapes and no values, and yet a forward may read one: whether a mask hides anything
(which decides over the kernel of attention), how many patches an image has. :class:`Values` computes beside the recording
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

MAX_ELEMENTS = 1 << 21
"""Elements of the largest tensor whose values are kept: an image or a mask, but no batch of feature maps."""
_BY_SHAPE = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"})
"""Operations that ask for a tensor's shape alone."""


class Values:
    """The values of tensors without storage, as long as these live.

    ``only_whole``: fractions are kept of tensors of one element alone, so that tables of sines and freshly initialised
    weights are not computed for nothing.
    """

    def __init__(self, *, only_whole: bool = False) -> None:
        self._only_whole = only_whole
        self._values: Any = WeakTensorKeyDictionary()

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._values

    def __setitem__(self, tensor: Tensor, value: Tensor) -> None:
        self._values[tensor] = value

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return what a tensor holds: a small one of the CPU itself, None for one whose values are not known."""
        if not isinstance(tensor, FakeTensor):
            is_constant = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.numel() <= MAX_ELEMENTS
            return tensor if is_constant else None
        return self._values.get(tensor)  # type: ignore[no-any-return]

    def forget(self, tensor: Tensor) -> None:
        """Drop what is known of a tensor and of all that share its storage."""
        if tensor not in self._values:
            return
        storage = self._values[tensor].untyped_storage()._cdata
        for alias in [key for key, value in self._values.items() if value.untyped_storage()._cdata == storage]:
            del self._values[alias]

    def computed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return an op's result on the values of its tensors, all known: real tensors of the CPU.

        Whole numbers are taken as floats where the CPU has a kernel for these only.
        """
        with _disable_current_modes():
            on_cpu = {"device": torch.device("cpu")} if "device" in kwargs else {}
            real_args, real_kwargs = tree_map_only(Tensor, self._or_shape, (args, {**kwargs, **on_cpu}))
            try:
                return func(*real_args, **real_kwargs)
            except NotImplementedError:
                floats = tree_map_only(Tensor, Tensor.float, (real_args, real_kwargs))
                return tree_map_only(Tensor, Tensor.long, func(*floats[0], **floats[1]))

    def follow(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outcome: Any) -> bool:
        """Note what an op that ran without values would have made; return whether that is known.

        ``outcome``: its tensors without storage. What it writes to is forgotten where its values are not known any more.
        """
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_known = func._schema.name.removeprefix("aten::") in _BY_SHAPE
        is_known = is_known or all(self.of(leaf) is not None for leaf in leaves)
        is_known = is_known and self._is_worth_keeping(func, outcome)
        if is_known:
            self.record(outcome, self.computed(func, args, kwargs))
        elif func._schema.is_mutable:
            self._forget_written(func, args, kwargs)
        return is_known

    def record(self, outcome: Any, value: Any) -> None:
        """Note the values of an op's outputs."""
        for tensor, known_value in zip(tree_leaves(outcome), tree_leaves(value), strict=True):
            if isinstance(tensor, Tensor):
                self._values[tensor] = known_value

    def _or_shape(self, tensor: Tensor) -> Tensor:
        """Return what a tensor holds; of one whose values are not known, zeros of its shape that take no memory."""
        value = self.of(tensor)
        return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape) if value is None else value

    def _is_worth_keeping(self, func: Any, outcome: Any) -> bool:
        if torch.Tag.nondeterministic_seeded in func.tags:
            return False
        made = [leaf for leaf in tree_leaves(outcome) if isinstance(leaf, Tensor)]
        if self._only_whole and any(leaf.dtype.is_floating_point and leaf.numel() > 1 for leaf in made):
            return False
        is_filled = not func._schema.name.startswith(("aten::empty", "aten::new_empty"))
        return is_filled and all(leaf.numel() <= MAX_ELEMENTS for leaf in made)

    def _forget_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Drop the values of tensors that an op writes to in place, and of all tensors with the same storage."""
        arguments = func._schema.arguments
        given = dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(kwargs)
        written = [given.get(each.name) for each in arguments if each.alias_info and each.alias_info.is_write]
        for leaf in tree_leaves(written):
            if isinstance(leaf, Tensor):
                self.forget(leaf)
