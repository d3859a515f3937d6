"""Simple RNN, LSTM and NARX that predict each worker's speed; one small model per worker, all in one batch.

Every parameter has the worker as its first dimension, so one tensor operation serves all workers while no worker's
model sees another's data: the loss is a sum over workers and Adam treats each parameter for itself. Look-back is 2 and
there is one hidden layer (LB-BSP, section 3.2.2). NARX is a feedforward network over two past speeds and the current
and two past readings of CPU and memory (Equation 4).

Models are initialised by reuse, as in the paper: the first training begins with one model for the recent iterations of
all workers together, from which each worker's own goes on. A worker that has never been short of memory so knows from
the others what that does. Speeds enter relative to the worker's own 90th percentile and readings as the shares they are,
so weights mean the same for every worker, in the next run, and in another job. They travel as JSON text
(:func:`weights_to_json`): nothing but numbers and names is in it, so a file from elsewhere can at worst predict badly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddltool.analyzers.balancing.trained import Settings, Trained
from ddltool.errors import InputError, did_you_mean

Floats = NDArray[np.float64]
LOOK_BACK = 2
VALIDATED = 0.2
# The common model sees at most this many iterations of all workers together; more cost time and teach it little.
POOLED = 4000
_POOLED_RATE, _OWN_RATE = 0.01, 0.003
# Relative speeds and shares lie between 0 and about 1; this brings them to about -1.5 to 1.5.
_CENTRE, _SCALE = 0.5, 0.3
_REFERENCE = 0.9
# A reused model starts once its worker's own speed is roughly known.
_REUSE_AFTER = 10
KIND = "ddltool.speed_weights"
VERSION = 1


class Network(Trained):
    """A recurrent or NARX network for each of n workers.

    Attributes:
        weights: name -> (n, ...) parameters in double precision.
        validation: (n,) mean square error of relative speeds on the held-out iterations; NaN before training.
    """

    LEARNED = ("weights", "validation", "_reference")

    def __init__(self, kind: str, workers: int, settings: Settings) -> None:
        """``kind``: rnn, lstm or narx."""
        super().__init__(workers, settings)
        self.kind = kind
        self.workers = workers
        self.weights = initial_weights(kind, settings, workers)
        self.validation = np.full(workers, np.nan)
        self._reference = np.ones(workers)
        self._compare = False

    def reuse(self, weights: Mapping[str, Any], *, compare: bool = False) -> None:
        """Predict with these (n, ...) weights from the tenth iteration on; training goes on from them.

        With ``compare`` the first training begins anew as well, and each worker keeps what validates better: weights from
        elsewhere may fit worse than none.
        """
        self.weights = {
            name: torch.tensor(np.asarray(weights[name]), dtype=torch.float64).reshape(value.shape)
            for name, value in self.weights.items()
        }
        self.ready, self._compare = True, compare

    @property
    def look_back(self) -> int:
        """Two iterations; with reused weights enough to know the worker's own speed."""
        return LOOK_BACK if self.history.count >= self.settings.warm_up else _REUSE_AFTER

    def _train(self) -> None:
        rows = self.history.last(self.settings.window)
        self._reference = np.quantile(rows[:, 0], _REFERENCE, axis=0)
        inputs, targets = (torch.from_numpy(array) for array in _samples(self.kind, self._scaled(rows)))
        with one_thread():
            kept = self._fit(self.weights, inputs, targets, _OWN_RATE, self.settings.own_steps) if self.ready else None
            if kept is None or self._compare:
                self.weights = initial_weights(self.kind, self.settings, self.workers)
                self._fit_common(inputs, targets)
                fresh = self._fit(self.weights, inputs, targets, _OWN_RATE, self.settings.own_steps)
                kept = fresh if kept is None else _better(kept, fresh)
            self._compare = False
            self.weights, error = kept
        self.validation = error.numpy() * _SCALE**2

    def _fit_common(self, inputs: Tensor, targets: Tensor) -> None:
        """Begin every worker's weights from one model of all workers' iterations."""
        held = _held_out(targets.shape[1])
        generator = torch.Generator().manual_seed(self.settings.seed)
        parts = []
        for span in (slice(None, -held), slice(-held, None)):
            given, wanted = inputs[:, span].flatten(0, 1), targets[:, span].flatten()
            chosen = torch.randperm(len(wanted), generator=generator)[: POOLED if span.stop else POOLED // 4]
            parts.append((given[chosen], wanted[chosen]))
        common = {name: value[:1] for name, value in self.weights.items()}
        given = torch.cat([part[0] for part in parts])[None]
        wanted = torch.cat([part[1] for part in parts])[None]
        common, _ = self._fit(common, given, wanted, _POOLED_RATE, self.settings.most_steps, len(parts[1][1]))
        self.weights = {name: value.expand(self.workers, *value.shape[1:]).clone() for name, value in common.items()}

    def _fit(
        self,
        weights: Mapping[str, Tensor],
        inputs: Tensor,
        targets: Tensor,
        rate: float,
        steps: int,
        held: int | None = None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Train on (m, s, f) inputs and (m, s) targets; return weights with the lowest validation error, and that (m,).

        The last ``held`` samples validate. A model whose validation error has not fallen for a while has ended; all
        train on until the last one has.
        """
        held = _held_out(targets.shape[1]) if held is None else held
        parameters = {name: value.clone().requires_grad_() for name, value in weights.items()}
        optimizer = torch.optim.Adam(parameters.values(), lr=rate)
        best = {name: value.clone() for name, value in weights.items()}
        lowest = torch.full((len(targets),), torch.inf, dtype=torch.float64)
        waited = torch.zeros(len(targets))
        for _ in range(steps):
            squares = (_forward(self.kind, parameters, inputs) - targets) ** 2
            error = squares[:, -held:].mean(dim=1).detach()
            better = (error < lowest * (1 - 1e-4)) & (waited < self.settings.patience)
            lowest = torch.where(better, error, lowest)
            for name, value in parameters.items():
                best[name][better] = value.detach()[better]
            waited = torch.where(better, 0, waited + 1)
            if (waited >= self.settings.patience).all():
                break
            optimizer.zero_grad()
            squares[:, :-held].mean(dim=1).sum().backward()
            optimizer.step()
        return best, lowest

    def _forecast(self, cpu: Floats, memory: Floats) -> Floats:
        if self.history.count < self.settings.warm_up:  # reused weights: the reference is still being learned
            self._reference = np.quantile(self.history.last(self.settings.window)[:, 0], _REFERENCE, axis=0)
        past = self.history.last(LOOK_BACK)
        now = np.stack((np.zeros_like(cpu), cpu, memory))[None]
        inputs, _ = _samples(self.kind, self._scaled(np.concatenate((past, now))))
        with one_thread(), torch.no_grad():
            forecast = _forward(self.kind, self.weights, torch.from_numpy(inputs)).numpy()[:, 0]
        speeds: Floats = (forecast * _SCALE + _CENTRE) * self._reference
        return speeds

    def _scaled(self, rows: Floats) -> Floats:
        """Return (k, 3, n) rows of relative speed, CPU and memory as the networks see them."""
        ones = np.ones(self.workers)
        scaled: Floats = (rows / np.stack((self._reference, ones, ones)) - _CENTRE) / _SCALE
        return scaled


def _better(
    one: tuple[dict[str, Tensor], Tensor], other: tuple[dict[str, Tensor], Tensor]
) -> tuple[dict[str, Tensor], Tensor]:
    """Return for each worker the weights, of two, with the lower validation error: what was reused may not fit."""
    first = one[1] <= other[1]
    weights = {
        name: torch.where(first.reshape(-1, *[1] * (value.dim() - 1)), value, other[0][name])
        for name, value in one[0].items()
    }
    return weights, torch.minimum(one[1], other[1])


def initial_weights(kind: str, settings: Settings, workers: int = 1) -> dict[str, Tensor]:
    """Return name -> (n, ...) seeded parameters before any training, the same for every worker."""
    generator = torch.Generator().manual_seed(settings.seed)
    return {
        name: _uniform((workers, *shape), fan_in, generator)
        for name, (shape, fan_in) in _shapes(kind, settings.hidden).items()
    }


def _held_out(samples: int) -> int:
    return max(1, int(VALIDATED * samples))


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread: these operations are too small for more, and sums keep their order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _shapes(kind: str, hidden: int) -> dict[str, tuple[tuple[int, ...], int]]:
    """Return name -> (shape of one worker's parameter, fan-in)."""
    ends: dict[str, tuple[tuple[int, ...], int]] = {"out": ((hidden, 1), hidden), "out_bias": ((1, 1), hidden)}
    if kind == "narx":
        features = LOOK_BACK + 2 * (LOOK_BACK + 1)
        return {"in": ((features, hidden), features), "bias": ((1, hidden), features), **ends}
    gates = 4 if kind == "lstm" else 1
    return {
        "in": ((1, gates * hidden), hidden),
        "recurrent": ((hidden, gates * hidden), hidden),
        "bias": ((1, gates * hidden), hidden),
        **ends,
    }


def _uniform(shape: tuple[int, ...], fan_in: int, generator: torch.Generator) -> Tensor:
    """Return uniform values in +-1/sqrt(fan_in), the same for every worker: models then differ by their data alone."""
    bound = fan_in**-0.5
    one = torch.empty(shape[1:], dtype=torch.float64).uniform_(-bound, bound, generator=generator)
    return one.expand(shape).clone()


def _samples(kind: str, scaled: Floats) -> tuple[Floats, Floats]:
    """Return (n, s, f) inputs and (n, s) targets of (k, 3, n) scaled rows, s = k - 2.

    Recurrent networks see the two past speeds, oldest first; NARX also sees CPU and memory of those and of the row.
    """
    speed, cpu, memory = scaled[:, 0], scaled[:, 1], scaled[:, 2]
    columns = [speed[:-2], speed[1:-1]]
    if kind == "narx":
        columns += [cpu[:-2], cpu[1:-1], cpu[2:], memory[:-2], memory[1:-1], memory[2:]]
    inputs = np.ascontiguousarray(np.stack(columns, axis=-1).transpose(1, 0, 2))
    return inputs, np.ascontiguousarray(speed[2:].T)


def _forward(kind: str, weights: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Return (n, s) outputs for (n, s, f) inputs."""
    if kind == "narx":
        state = torch.tanh(torch.baddbmm(weights["bias"], inputs, weights["in"]))
        return torch.baddbmm(weights["out_bias"], state, weights["out"])[..., 0]
    hidden = weights["out"].shape[1]
    state = inputs.new_zeros((*inputs.shape[:2], hidden))
    cell = state
    for step in range(inputs.shape[2]):
        given = torch.baddbmm(weights["bias"], inputs[..., step : step + 1], weights["in"])
        gates = torch.baddbmm(given, state, weights["recurrent"])
        if kind == "rnn":
            state = torch.tanh(gates)
            continue
        enter, forget, new, leave = gates.split(hidden, dim=-1)
        cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(new)
        state = torch.sigmoid(leave) * torch.tanh(cell)
    return torch.baddbmm(weights["out_bias"], state, weights["out"])[..., 0]


def weights_to_json(network: Network, names: Sequence[str]) -> str:
    """Return the weights of a trained network whose n workers are called ``names``, with their validation errors.

    Raises InputError where the network has not been trained or reused.
    """
    if not network.ready:
        raise InputError("weights", "have not been trained yet", "observe more iterations than the warm-up")
    workers = {
        name: {
            "validation": None if math.isnan(network.validation[place]) else float(network.validation[place]),
            "weights": {key: value[place].tolist() for key, value in network.weights.items()},
        }
        for place, name in enumerate(names)
    }
    document = {
        "kind": KIND,
        "schema_version": VERSION,
        "network": network.kind,
        "hidden": network.settings.hidden,
        "workers": workers,
    }
    return json.dumps(document, allow_nan=False) + "\n"


def reuse_weights(network: Network, document: Any, names: Sequence[str], where: str = "weights") -> None:
    """Let the network's n workers, called ``names``, begin with the weights of a parsed document.

    A worker of the same name goes on with its own; any other takes those with the lowest validation error. Where a fresh
    start validates better at the first training, that is kept instead. Raises InputError for a document of another kind,
    network or shape, and for values that are no finite numbers.
    """
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise InputError(where, "holds no weights of a speed predictor", f'its "kind" must be "{KIND}"')
    if document.get("schema_version") != VERSION:
        raise InputError(f"{where}:schema_version", f"is {document.get('schema_version')!r}", f"expected {VERSION}")
    if document.get("network") != network.kind:
        problem = f"is {document.get('network')!r}"
        raise InputError(f"{where}:network", problem, f"these are not weights of {network.kind}")
    stored = document.get("workers")
    if not isinstance(stored, dict) or not stored:
        raise InputError(f"{where}:workers", "holds no workers", "give a file that this program has written")
    checked = {name: _checked(record, network, f"{where}:workers.{name}") for name, record in stored.items()}
    best = min(stored, key=lambda name: (_validation(stored[name]), name))
    chosen = [checked[name if name in checked else best] for name in names]
    weights = {key: np.stack([weights[key] for weights in chosen]) for key in network.weights}
    network.reuse(weights, compare=True)


def _validation(record: dict[str, Any]) -> float:
    error = record.get("validation")
    return float(error) if isinstance(error, int | float) else math.inf


def _checked(record: Any, network: Network, where: str) -> dict[str, Any]:
    """Return one worker's arrays by name."""
    given = record.get("weights") if isinstance(record, dict) else None
    if not isinstance(given, dict):
        raise InputError(where, "holds no weights", "give a file that this program has written")
    arrays = {}
    for name, value in network.weights.items():
        if name not in given:
            raise InputError(f"{where}.weights", f"has no {name!r}", did_you_mean(name, given))
        try:
            array = np.array(given[name], dtype=np.float64)
        except (TypeError, ValueError):
            array = np.empty(0)
        if array.shape != tuple(value.shape[1:]) or not np.isfinite(array).all():
            expected = "x".join(map(str, value.shape[1:]))
            raise InputError(f"{where}.weights.{name}", "is not usable", f"expected {expected} finite numbers")
        arrays[name] = array
    return arrays
