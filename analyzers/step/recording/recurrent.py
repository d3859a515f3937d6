"""cuDNN's recurrent layers in traces: one op for all layers of a module, forward and backward."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor


def recurrent_layers(
    x: Tensor, hidden: Any, weights: list[Tensor], bidirectional: bool, batch_first: bool
) -> tuple[Tensor, ...]:
    """Return a recurrent module's outputs and last states, from one op for all layers: cuDNN's kernels run them together.

    ``x`` is (steps, batch, features), or (batch, steps, features) with ``batch_first``; ``hidden`` is the first state,
    or for an LSTM its first state and cell, each (layers x directions, batch, width). Returns the outputs, laid out like
    ``x``, then the last state and, for an LSTM, the last cell, shaped like ``hidden``.
    """
    # An LSTM's hidden state is a pair; other modules have no cell.
    state, *cells = hidden if isinstance(hidden, (tuple, list)) else (hidden,)
    directions = 2 if bidirectional else 1
    width = int(state.shape[-1]) * directions
    steps_first = x.transpose(0, 1) if batch_first else x
    outputs = torch.ops.ddltool.recurrent(steps_first, list(weights), width)
    # Right in shape, and made of the outputs, so that a loss of the last state has a backward pass through the layers.
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
    """Return an empty tensor with the shape and type of the outputs of ``recurrent``: (steps, batch, width)."""
    return x.new_empty((*x.shape[:2], width))


@recurrent_backward.register_fake
def _(gradient: Tensor, x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Return empty tensors with the shapes and types of the gradients: those of x and of each weight, in this order."""
    return [torch.empty_like(x), *(torch.empty_like(weight) for weight in weights)]


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save x and the weights of ``recurrent`` for its backward pass; ``inputs``: its arguments (x, weights, width)."""
    x, weights, _ = inputs
    ctx.save_for_backward(x, *weights)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """Return the gradients of ``recurrent``'s arguments: x, the weights, and None for the width."""
    x, *weights = ctx.saved_tensors
    x_gradient, *weight_gradients = torch.ops.ddltool.recurrent_backward(gradient, x, list(weights))
    return x_gradient, weight_gradients, None


torch.library.register_autograd("ddltool::recurrent", _differentiate, setup_context=_save_inputs)


def _lstm_cell(input_gates: Tensor, hidden_gates: Tensor, cell: Tensor, *_biases: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors shaped like the new state and cell, each (batch, width), and the four gates (batch, 4 width).

    The gates are kept for the backward pass.
    """
    return torch.empty_like(cell), torch.empty_like(cell), torch.empty_like(input_gates)


def _lstm_cell_backward(
    _hidden: Any, _new_cell: Any, cell: Tensor, _kept: Tensor, gates: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors shaped like the gradients of the gates (batch, 4 width), the cell (batch, width), and the bias.

    The bias has (4 width,), or no elements where there is none.
    """
    return torch.empty_like(gates), torch.empty_like(cell), gates.new_empty(gates.shape[1] if has_bias else 0)


def _gru_cell(input_gates: Tensor, hidden_gates: Tensor, state: Tensor, *_biases: Any) -> tuple[Tensor, Tensor]:
    """Return empty tensors shaped like the new state (batch, width), and like what is kept for the backward pass.

    CUDA's kernel keeps five values for each element of the state: (batch, 5 width).
    """
    return torch.empty_like(state), state.new_empty(state.shape[0], 5 * state.shape[1])


def _gru_cell_backward(gradient: Tensor, gates: Tensor, has_bias: bool) -> tuple[Tensor, ...]:
    """Return empty tensors shaped like the gradients of input gates, hidden gates, state and the two biases.

    ``gradient``: of the new state, (batch, width). A GRU has three gates: the gradients of gates are (batch, 3 width), and
    (3 width,) of a bias, or (0,) where there are no biases.
    """
    batch, gate_width = gradient.shape[0], 3 * gradient.shape[1]
    bias_width = gate_width if has_bias else 0
    input_gates, hidden_gates = (gates.new_empty(batch, gate_width) for _ in range(2))
    state = torch.empty_like(gradient)
    return input_gates, hidden_gates, state, gates.new_empty(bias_width), gates.new_empty(bias_width)


def declare_cells(library: torch.library.Library) -> None:
    """Tell torch the shapes of what CUDA's fused kernels of one LSTM or GRU cell return, which it does not always know.

    ``library``: a library of implementations for aten, in which they are registered and as long as which they live.
    """
    for name, shape_rule in (
        ("_thnn_fused_lstm_cell", _lstm_cell),
        ("_thnn_fused_lstm_cell_backward_impl", _lstm_cell_backward),
        ("_thnn_fused_gru_cell", _gru_cell),
        ("_thnn_fused_gru_cell_backward", _gru_cell_backward),
    ):
        with contextlib.suppress(RuntimeError):  # torch has registered it: that depends on what was imported before
            library.impl(name, shape_rule, "Meta")
