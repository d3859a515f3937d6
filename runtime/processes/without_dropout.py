"""Lets dropout pass everything for a while: it would draw other numbers for other batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_WITH_P = (
    *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
    *(functional.alpha_dropout, functional.feature_alpha_dropout, torch.dropout, torch.dropout_),
    *(torch.alpha_dropout, torch.alpha_dropout_, torch.feature_dropout, torch.feature_dropout_),
)
_PROBABILITIES: dict[Callable[..., Any], tuple[int, str]] = {
    **dict.fromkeys(_WITH_P, (1, "p")),
    functional.scaled_dot_product_attention: (4, "dropout_p"),
    functional.multi_head_attention_forward: (10, "dropout_p"),
}
"""Place and name of the probability among the arguments of torch's functions."""
_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class WithoutDropout(TorchFunctionMode):
    """Lets dropout pass everything until :meth:`end`: torch's functions that models call, and their dropout layers."""

    def __init__(self, model: nn.Module) -> None:
        """Set the probability of all dropout layers of ``model`` to 0, and begin to catch torch's own dropout functions."""
        super().__init__()
        self._kept: list[tuple[nn.Module, str, float]] = []  # (layer, attribute, probability), to be given back
        for module in model.modules():
            if isinstance(module, (*_LAYERS, nn.RNNBase, nn.MultiheadAttention)):
                name = "p" if isinstance(module, _LAYERS) else "dropout"
                self._kept.append((module, name, getattr(module, name)))
                setattr(module, name, 0.0)
        self._open = ExitStack()
        self._open.enter_context(self)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a torch function, with a probability of 0 where it drops out: torch calls this for each of its functions."""
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.backward:  # checkpoints compute their forward pass again in it, where this mode is off
            with self:
                return _backward(*args, **kwargs)
        if argument := _PROBABILITIES.get(func):
            place, name = argument
            if len(args) > place:
                args = (*args[:place], 0.0, *args[place + 1 :])
            else:
                kwargs[name] = 0.0
        return func(*args, **kwargs)

    def end(self) -> None:
        """Give the layers their probabilities back, and catch functions no more."""
        self._open.close()
        for module, name, value in self._kept:
            setattr(module, name, value)


def _backward(
    tensor: torch.Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """Run a backward pass; the parameters are those of ``Tensor.backward``."""
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)
