"""Trained weights as JSON text: what one run has learned serves the next one, other workers, and other jobs.

Nothing but numbers and names is in it, so a file from elsewhere can at worst predict badly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddltool.analyzers.balancing.networks import Network
from ddltool.errors import InputError, did_you_mean

KIND = "ddltool.speed_weights"
VERSION = 1


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
