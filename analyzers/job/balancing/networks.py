"""Simple RNN, LSTM and NARX that predict each worker's speed; one small model per worker, all in one batch.

Every parameter has the worker as its first dimension, so one tensor operation serves all workers while no worker's
model sees another's data: the loss is a sum over workers and Adam treats each parameter for itself. Look-back is 2 and
there is one hidden layer (LB-BSP, section 3.2.2). NARX is a feedforward network over two past speeds and the current
and two past readings of CPU and memory (Equation 4).

Models are initialised by reuse, as in the paper: the first training begins with one model for the recent iterations of all
workers together, from which each worker's own training continues. So a worker that has never been short of memory knows from
the others how that changes its speed. Speeds are inputs relative to the worker's own 90th percentile, and readings are shares,
so weights mean the same for every worker. In shapes, n is workers, s samples, f features, k iterations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from ddltool.analyzers.job.balancing.trained import PredictorSettings, Trained
from ddltool.arrays import Floats

LOOK_BACK = 2
"""Past iterations that a network sees."""
VALIDATED = 0.2
"""Share of the samples, the latest ones, on which a training is validated."""
# The common model is trained on at most so many iterations of all workers together; more take time and improve it little.
POOLED = 4000
# Adam's learning rates for the common model and for each worker's own.
_POOLED_RATE, _OWN_RATE = 0.01, 0.003
# Relative speeds and shares lie between 0 and about 1; this brings them to about -1.5 to 1.5.
_CENTRE, _SCALE = 0.5, 0.3
# Quantile of a worker's speeds that its speeds are divided by.
_REFERENCE = 0.9
# Share by which the validation error must fall to count as a gain.
_LEAST_GAIN = 1e-4


class NeuralNetwork(Trained):
    """A recurrent or NARX network for each of n workers.

    Attributes:
        weights: name -> (n, ...) parameters in double precision.
    """

    LEARNED = ("weights", "_reference")

    def __init__(self, kind: str, workers: int, settings: PredictorSettings) -> None:
        """Make untrained networks of one ``kind`` (rnn, lstm or narx), one for each worker."""
        super().__init__(workers, settings)
        self.kind = kind
        self.workers = workers
        self.weights = initial_weights(kind, settings, workers)
        self._reference = np.ones(workers)
        """(n,) samples per second that each worker's speeds are divided by."""

    def _train(self) -> None:
        """Fit each worker's weights to its iterations in the window.

        The first training begins with a model trained on all workers, later ones with the previous weights.
        """
        rows = self.last(self.settings.window)
        self._reference = np.quantile(rows[:, 0], _REFERENCE, axis=0)
        inputs, targets = (torch.from_numpy(array) for array in _samples(self.kind, self._scaled(rows)))
        with one_thread():
            if not self.ready:
                self._fit_common(inputs, targets)
            self.weights = self._fit(self.weights, inputs, targets, _OWN_RATE, self.settings.own_steps)

    def _fit_common(self, inputs: Tensor, targets: Tensor) -> None:
        """Set every worker's weights to those of one model, trained on random samples of all workers together.

        ``inputs`` (n, s, f) and ``targets`` (n, s): the workers' samples.
        """
        held_out = _held_out(targets.shape[1])
        generator = torch.Generator().manual_seed(self.settings.seed)

        def pooled(part: slice, most: int) -> tuple[Tensor, Tensor]:
            """Return inputs and targets of up to ``most`` random samples of all workers, out of this ``part`` of each one's."""
            part_inputs = inputs[:, part].flatten(0, 1)
            part_targets = targets[:, part].flatten()
            chosen = torch.randperm(len(part_targets), generator=generator)[:most]
            return part_inputs[chosen], part_targets[chosen]

        train_inputs, train_targets = pooled(slice(None, -held_out), POOLED)
        # a quarter as many for validation, so that it is a fifth of all
        validation_inputs, validation_targets = pooled(slice(-held_out, None), POOLED // 4)
        common_weights = self._fit(  # one model, so that the first dimension is 1; all workers begin with equal weights
            {name: value[:1] for name, value in self.weights.items()},
            torch.cat([train_inputs, validation_inputs])[None],
            torch.cat([train_targets, validation_targets])[None],
            rate=_POOLED_RATE,
            steps=self.settings.most_steps,
            held_out=len(validation_targets),
        )
        # An expanded tensor shares memory between workers, and training changes each worker's weights: so they are copied.
        self.weights = {
            name: value.expand(self.workers, *value.shape[1:]).clone() for name, value in common_weights.items()
        }

    def _fit(
        self, weights: Mapping[str, Tensor], inputs: Tensor, targets: Tensor, rate: float, steps: int, held_out: int = 0
    ) -> dict[str, Tensor]:
        """Return trained weights of m models: for each model those with its lowest validation error.

        A model whose validation error has not fallen for ``patience`` steps keeps its weights; training ends when all models
        do.

        Args:
            weights: name -> (m, ...) parameters to begin with.
            inputs: (m, s, f) samples of each model.
            targets: (m, s) speeds that follow.
            rate: Adam's learning rate.
            steps: most steps, each over all samples.
            held_out: number of the last samples, which validate; 0: a fifth of them.
        """
        held_out = held_out or _held_out(targets.shape[1])
        parameters = {name: value.clone().requires_grad_() for name, value in weights.items()}
        optimizer = torch.optim.Adam(parameters.values(), lr=rate)
        best_weights = {name: value.clone() for name, value in weights.items()}
        lowest_error = torch.full((len(targets),), torch.inf, dtype=torch.float64)
        steps_without_gain = torch.zeros(len(targets))
        for _ in range(steps):
            squared_errors = (_forward(self.kind, parameters, inputs) - targets) ** 2
            error = squared_errors[:, -held_out:].mean(dim=1).detach()
            has_improved = (error < lowest_error * (1 - _LEAST_GAIN)) & (steps_without_gain < self.settings.patience)
            lowest_error = torch.where(has_improved, error, lowest_error)
            for name, value in parameters.items():
                best_weights[name][has_improved] = value.detach()[has_improved]
            steps_without_gain = torch.where(has_improved, 0, steps_without_gain + 1)
            if (steps_without_gain >= self.settings.patience).all():
                break
            optimizer.zero_grad()
            squared_errors[:, :-held_out].mean(dim=1).sum().backward()
            optimizer.step()
        return best_weights

    def _forecast(self, cpu: Floats, memory: Floats) -> Floats:
        """Return (n,) forecast speeds of the next iteration, in samples per second.

        ``cpu`` and ``memory``: (n,) readings at its start. The last two iterations are the other inputs.
        """
        past_rows = self.last(LOOK_BACK)
        present_row = np.stack((np.zeros_like(cpu), cpu, memory))[None]  # 0 for the unknown speed, which is not used
        inputs, _ = _samples(self.kind, self._scaled(np.concatenate((past_rows, present_row))))
        with one_thread(), torch.no_grad():
            forecast = _forward(self.kind, self.weights, torch.from_numpy(inputs)).numpy()[:, 0]
        speeds: Floats = (forecast * _SCALE + _CENTRE) * self._reference  # the inverse of _scaled()
        return speeds

    def _scaled(self, rows: Floats) -> Floats:
        """Return (k, 3, n) ``rows`` of speed, CPU and memory scaled for the networks, to about -1.5 to 1.5.

        Speeds are divided by the worker's reference speed first; CPU and memory are shares already.
        """
        ones = np.ones(self.workers)
        scaled: Floats = (rows / np.stack((self._reference, ones, ones)) - _CENTRE) / _SCALE
        return scaled


def initial_weights(kind: str, settings: PredictorSettings, workers: int = 1) -> dict[str, Tensor]:
    """Return name -> (n, ...) untrained parameters, drawn by the settings' seed and equal for all n ``workers``."""
    generator = torch.Generator().manual_seed(settings.seed)
    shapes = _shapes(kind, settings.hidden)
    return {name: _uniform((workers, *shape), fan_in, generator) for name, (shape, fan_in) in shapes.items()}


def _held_out(samples: int) -> int:
    """Return the number of ``samples`` that validate a training: a fifth, and at least one."""
    return max(1, int(VALIDATED * samples))


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread within the block, and restore its number of threads afterwards.

    These operations are too small for more threads, and with one the order of sums, and so the result, is always the same.
    """
    thread_count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(thread_count)


def _shapes(kind: str, hidden: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return name -> (shape of one worker's parameter, fan-in), the fan-in being the inputs of a unit.

    ``kind``: rnn, lstm or narx; ``hidden``: units of the hidden layer.
    """
    output_shapes: dict[str, tuple[tuple[int, ...], int]] = {"out": ((hidden, 1), hidden), "out_bias": ((1, 1), hidden)}
    if kind == "narx":
        features = LOOK_BACK + 2 * (LOOK_BACK + 1)
        return {"in": ((features, hidden), features), "bias": ((1, hidden), features), **output_shapes}
    gates = 4 if kind == "lstm" else 1
    rows = {"in": 1, "recurrent": hidden, "bias": 1}
    return {**{name: ((count, gates * hidden), hidden) for name, count in rows.items()}, **output_shapes}


def _uniform(shape: tuple[int, ...], fan_in: int, generator: torch.Generator) -> Tensor:
    """Return values in the ``shape`` (n, ...), uniform between -1/sqrt(fan_in) and 1/sqrt(fan_in).

    They are equal for the n workers, so that models differ by their data alone.
    """
    bound = fan_in**-0.5
    worker_values = torch.empty(shape[1:], dtype=torch.float64).uniform_(-bound, bound, generator=generator)
    return worker_values.expand(shape).clone()  # a copy, because an expanded tensor shares memory between workers


def _samples(kind: str, scaled: Floats) -> tuple[Floats, Floats]:
    """Return (n, s, f) inputs and (n, s) targets from (k, 3, n) scaled rows of speed, CPU and memory; s = k - 2.

    The target is a row's speed. Inputs of recurrent networks are the two speeds before it, oldest first; NARX also gets CPU and
    memory of these two rows and of the row itself.
    """
    speed, cpu, memory = scaled[:, 0], scaled[:, 1], scaled[:, 2]
    columns = [speed[:-2], speed[1:-1]]
    if kind == "narx":
        columns += [cpu[:-2], cpu[1:-1], cpu[2:], memory[:-2], memory[1:-1], memory[2:]]
    inputs = np.ascontiguousarray(np.stack(columns, axis=-1).transpose(1, 0, 2))
    return inputs, np.ascontiguousarray(speed[2:].T)


def _forward(kind: str, weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Return the networks' (n, s) outputs, which are scaled speeds, for (n, s, f) ``inputs``.

    ``kind``: rnn, lstm or narx; ``weights``: name -> (n, ...), with the names of :func:`initial_weights`. A NARX network is one
    hidden layer over all features. In a recurrent network each feature is one past iteration, oldest first; the four gates
    of an LSTM are columns of one product.
    """
    if kind == "narx":
        state = torch.tanh(torch.baddbmm(weights["bias"], inputs, weights["in"]))
        return torch.baddbmm(weights["out_bias"], state, weights["out"])[..., 0]
    hidden = weights["out"].shape[1]
    state = inputs.new_zeros((*inputs.shape[:2], hidden))
    cell = state
    for step in range(inputs.shape[2]):
        from_input = torch.baddbmm(weights["bias"], inputs[..., step : step + 1], weights["in"])
        gates = torch.baddbmm(from_input, state, weights["recurrent"])
        if kind == "rnn":
            state = torch.tanh(gates)
            continue
        input_gate, forget_gate, candidate, output_gate = gates.split(hidden, dim=-1)
        cell = torch.sigmoid(forget_gate) * cell + torch.sigmoid(input_gate) * torch.tanh(candidate)
        state = torch.sigmoid(output_gate) * torch.tanh(cell)
    return torch.baddbmm(weights["out_bias"], state, weights["out"])[..., 0]
