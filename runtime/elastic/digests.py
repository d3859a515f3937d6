"""Fingerprints of every tensor of a training run.

A run that is recorded (``ElasticTrainer(..., record="run.jsonl")``, or :class:`~.run_recorder.RunRecorder`
in a loop of one's own) leaves one line per step. Two records of the same training, on whatever numbers of processes,
are compared by :func:`first_difference` and by ``ddltool diff-run``::

    >>> print(first_difference("a.jsonl", "b.jsonl"))  # doctest: +SKIP
    step 7, logical worker 2: output of 4 (Dropout) differs (first inputs and random streams are equal: a kernel or ...)
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddltool.artifacts import check_writable
from ddltool.runtime.elastic.run_difference import (
    KIND,
    SCHEMA_VERSION,
    WORKER_CAUSES,
    Difference,
    first_difference,
    iterate_steps,
    read_steps,
)

__all__ = ["Difference", "StepFile", "TurnRecorder", "digest", "digests", "first_difference", "leaves", "read_steps"]

DIGEST_BYTES = 8


def digest(value: Tensor | bytes) -> str:
    """Return the fingerprint (16 hex digits) of a tensor's type, shape and bits, or of bytes."""
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    if isinstance(value, Tensor):
        hasher.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        value = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    hasher.update(value)
    return hasher.hexdigest()


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and value of everything in nested mappings, lists and tuples that is none of these.

    >>> list(leaves({"a": [1, (2,)], "b": 3}))
    [('a.0', 1), ('a.1.0', 2), ('b', 3)]
    """
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        yield name, value
        return
    for key, item in items:
        yield from leaves(item, f"{name}.{key}" if name else str(key))


def digests(value: Any) -> dict[str, str]:
    """Return the fingerprint of everything in a nested value, by name; what is no tensor goes by its ``repr``."""
    return {
        name: digest(leaf if isinstance(leaf, (Tensor, bytes)) else repr(leaf).encode()) for name, leaf in leaves(value)
    }


class TurnRecorder:
    """Collects the fingerprints of the turns of this process, one document per logical worker.

    Module outputs are those of the modules that have no children, in the order in which they ran.
    """

    def __init__(self, model: nn.Module) -> None:
        self._turns: dict[int, dict[str, dict[str, str]]] = {}
        self._now: dict[str, dict[str, str]] | None = None
        for name, module in model.named_modules():
            if not list(module.children()):
                module.register_forward_hook(self._watch(f"{name or 'model'} ({type(module).__name__})"))

    def _watch(self, name: str) -> Any:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._now is not None and torch.is_grad_enabled():
                place = f"{len(self._now['output'])} {name}"
                whole = "".join(digests(output).values())
                self._now["output"][place] = digest(whole.encode())

        return note

    def begin(self, virtual_rank: int, streams: Any, buffers: Mapping[str, Tensor | None]) -> None:
        """Begin a turn: ``streams`` and ``buffers`` are the worker's own, before it draws from them."""
        self._now = self._turns[virtual_rank] = {kind: {} for kind in WORKER_CAUSES}
        self._now["random stream"] = digests(streams)
        self._now["buffer before"] = digests(buffers)

    def batch(self, content: Any) -> None:
        """Note a micro-batch."""
        if self._now is not None:
            self._now["batch"] |= {f"{len(self._now['batch'])}.{k}": v for k, v in digests(content).items()}

    def loss(self, value: Tensor) -> None:
        """Note the loss of a micro-batch."""
        if self._now is not None:
            self._now["loss"][f"loss {len(self._now['loss'])}"] = digest(value)

    def end(self, gradients: Mapping[str, Tensor | None], buffers: Mapping[str, Tensor | None]) -> None:
        """End a turn; ``gradients`` come in the order in which the backward pass makes them, last layer first."""
        if self._now is not None:
            self._now["gradient"] = digests(gradients)
            self._now["buffer"] = digests(buffers)
        self._now = None

    def take(self) -> bytes:
        """Return the turns since the last call as JSON."""
        turns, self._turns = self._turns, {}
        return json.dumps(turns).encode()


class StepFile:
    """Writes one line per step. Opened on process 0 alone; a step that is made again replaces the one in the file.

    ``settings`` (plain numbers and strings by name) stand in every line. Raises InputError where the file cannot be
    written.
    """

    def __init__(self, path: str | os.PathLike[str], settings: Mapping[str, Any] | None = None) -> None:
        self._path = Path(path)
        self._settings = dict(settings or {})
        self._begun = False
        check_writable(self._path)
        if self._path.exists():
            next(iterate_steps(self._path), None)  # another kind of file is not to be overwritten

    def reopen(self) -> None:
        """Let the next step that is written replace that step and what follows it."""
        self._begun = False

    def _keep_until(self, step: int) -> None:
        """Drop what is recorded of ``step`` and later ones, and a line that a killed process left unfinished."""
        partial = self._path.with_name(self._path.name + ".partial")
        with partial.open("w") as kept:
            for line in iterate_steps(self._path) if self._path.exists() else ():
                if line["step"] >= step:
                    break
                kept.write(json.dumps(line) + "\n")
        os.replace(partial, self._path)

    def write(self, step: int, epoch: int, turns: Sequence[bytes], shared: Mapping[str, Mapping[str, str]]) -> None:
        """Append a step; the first one drops the lines of that step and later ones, which a resumed run makes again."""
        if not self._begun:
            self._keep_until(step)
            self._begun = True
        workers: dict[str, Any] = {}
        for part in turns:
            workers |= json.loads(part)
        workers = {rank: workers[rank] for rank in sorted(workers, key=int)}
        line = {
            "kind": KIND,
            "schema_version": SCHEMA_VERSION,
            "step": step,
            "epoch": epoch,
            "settings": self._settings,
        }
        with self._path.open("a") as file:
            file.write(json.dumps(line | {"workers": workers, "shared": shared}) + "\n")
