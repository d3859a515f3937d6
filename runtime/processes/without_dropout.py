"""Switches dropout off for a while, because it draws other random numbers for other batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# Functions whose second argument is the dropout probability.
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
"""By torch function: index and name of the argument that is the dropout probability."""
_LAYERS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class WithoutDropout(TorchFunctionMode):
    """Switches dropout off until :meth:`end`: in the model's dropout layers, and in torch's functions called directly."""

    def __init__(self, model: nn.Module) -> None:
        """Set the probability of all dropout layers of ``model`` to 0, and start to intercept torch's dropout functions."""
        super().__init__()
        self._kept: list[tuple[nn.Module, str, float]] = []  # (layer, attribute, probability), to be restored
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
        """Call ``func``, with a dropout probability of 0 if it has one; torch calls this for each of its functions."""
        kwargs = dict(kwargs or {})
        # torch switches the mode off inside this method, but checkpointed layers run their forward again in backward.
        if func is torch.Tensor.backward:
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
        """Restore the layers' probabilities, and stop intercepting functions."""
        self._open.close()
        for module, name, value in self._kept:
            setattr(module, name, value)


def _backward(
    tensor: torch.Tensor, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    """Run a backward pass without ``Tensor.backward``, which would be intercepted again; its parameters are the same."""
    torch.autograd.backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)
