"""cuDNN's recurrent layers in traces: one op for all layers of a module, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def recurrent_layers(
    x: Tensor, hidden: Any, weights: list[Tensor], bidirectional: bool, batch_first: bool
) -> tuple[Tensor, ...]:
    """Return a recurrent module's outputs and last states, from one op for all layers.

    ``x`` is (steps, batch, features), or (batch, steps, features) with ``batch_first``; ``hidden`` the first state, or the
    state and the cell of an LSTM, each (layers, batch, width).
    """
    state, *cells = hidden if isinstance(hidden, (tuple, list)) else (hidden,)
    width = int(state.shape[-1]) * (2 if bidirectional else 1)
    steps_first = x.transpose(0, 1) if batch_first else x
    outputs = torch.ops.ddltool.recurrent(steps_first, list(weights), width)
    last_state = outputs[-1:, :, : state.shape[-1]].expand(state.shape).to(state.dtype)
    returned = outputs.transpose(0, 1) if batch_first else outputs
    if not cells:
        return returned, last_state
    [cell] = cells  # of an LSTM; wider than the state where that is projected
    if cell.shape == state.shape:
        return returned, last_state, last_state
    return returned, last_state, outputs[-1:, :, :1].expand(cell.shape).to(cell.dtype)


@torch.library.custom_op("ddltool::recurrent", mutates_args=())
def recurrent(x: Tensor, weights: list[Tensor], width: int) -> Tensor:
    """Stand for all layers of a recurrent module: x (steps, batch, features) -> (steps, batch, width). Only ever traced."""
    raise NotImplementedError("ddltool::recurrent stands for cuDNN's recurrent layers in traces; it computes nothing")


@torch.library.custom_op("ddltool::recurrent_backward", mutates_args=())
def recurrent_backward(gradient: Tensor, x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Stand for the backward pass: the gradients of x and of every weight. Only ever traced."""
    raise NotImplementedError("ddltool::recurrent_backward stands for cuDNN's recurrent layers in traces")


@recurrent.register_fake
def _(x: Tensor, weights: list[Tensor], width: int) -> Tensor:
    return x.new_empty((*x.shape[:2], width))


@recurrent_backward.register_fake
def _(gradient: Tensor, x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(x), *(torch.empty_like(weight) for weight in weights)]


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save x and the weights of ``recurrent`` for its backward pass."""
    ctx.save_for_backward(inputs[0], *inputs[1])


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """Return the gradients of ``recurrent``'s arguments: x, the weights, and None for the width."""
    x, *weights = ctx.saved_tensors
    x_gradient, *weight_gradients = torch.ops.ddltool.recurrent_backward(gradient, x, list(weights))
    return x_gradient, weight_gradients, None


torch.library.register_autograd("ddltool::recurrent", _differentiate, setup_context=_save_inputs)


def _lstm_cell(input_gates: Tensor, hidden_gates: Tensor, cell: Tensor, *_biases: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(cell), torch.empty_like(cell), torch.empty_like(input_gates)


def _lstm_cell_backward(
    _hidden: Any, _new_cell: Any, cell: Tensor, _kept: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(gates), torch.empty_like(cell), gates.new_empty(gates.shape[1] if has_bias else 0)


def _gru_cell(input_gates: Tensor, hidden_gates: Tensor, state: Tensor, *_biases: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(state), state.new_empty(state.shape[0], 5 * state.shape[1])


def _gru_cell_backward(gradient: Tensor, gates: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
    width = 3 * gradient.shape[1] if has_bias else 0
    both = [gates.new_empty(gradient.shape[0], 3 * gradient.shape[1]) for _ in range(2)]
    return *both, torch.empty_like(gradient), gates.new_empty(width), gates.new_empty(width)


def declare_cells(library: torch.library.Library) -> None:
    """Give ``library`` (of aten) the sizes of what CUDA's kernels of one LSTM or GRU cell make, which torch does not know."""
    for name, sizes in (
        ("_thnn_fused_lstm_cell", _lstm_cell),
        ("_thnn_fused_lstm_cell_backward_impl", _lstm_cell_backward),
        ("_thnn_fused_gru_cell", _gru_cell),
        ("_thnn_fused_gru_cell_backward", _gru_cell_backward),
    ):
        library.impl(name, sizes, "Meta")
