"""Fingerprints of every tensor of a training run, and the first one in which two runs differ.

A run that is recorded (``ElasticTrainer(..., record="run.jsonl")``) leaves one line per step. Two records of the same
training, on whatever numbers of processes, are compared by :func:`first_difference`::

    >>> print(first_difference("a.jsonl", "b.jsonl"))  # doctest: +SKIP
    step 7, logical worker 2: output of 4 (Dropout) differs (first inputs and random streams are equal: a kernel or ...)
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddltool.errors import InputError

DIGEST_BYTES = 8
KIND = "step-digests"
SCHEMA_VERSION = 1

# What a difference of each kind means, when everything that comes earlier in the step is equal. In causal order.
WORKER_CAUSES = {
    "random stream": "the random state at the start of the turn; another seed, or draws that were not the worker's own",
    "batch": "the data: other samples, or another order, or an augmentation that draws from somewhere else",
    "buffer before": "module buffers at the start of the turn; they were not the worker's own",
    "output": "this module's kernel: another device type, number of threads or library, or a random draw of its own",
    "loss": "the loss function's kernel",
    "gradient": "a kernel of the backward pass: another device type, number of threads or library",
    "buffer": "module buffers after the turn: the kernel that updates them",
}
SHARED_CAUSES = {
    "combined gradient": "the reduction: the order in which gradients are added",
    "parameter": "the optimizer: its state, its settings or its kernel",
}


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
    """Writes one line per step. Opened on process 0 alone; a step that is made again replaces the one in the file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._begun = False

    def reopen(self) -> None:
        """Let the next step that is written replace that step and what follows it."""
        self._begun = False

    def _keep_until(self, step: int) -> None:
        lines = read_steps(self._path) if self._path.exists() else []
        kept = [json.dumps(line) for line in lines if line["step"] < step]
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text("".join(f"{line}\n" for line in kept))
        os.replace(partial, self._path)

    def write(self, step: int, epoch: int, turns: Sequence[bytes], shared: Mapping[str, Mapping[str, str]]) -> None:
        """Append a step; the first one drops the lines of that step and later ones, which a resumed run makes again."""
        if not self._begun:
            self._keep_until(step)
            self._begun = True
        workers: dict[str, Any] = {}
        for part in turns:
            workers |= json.loads(part)
        line = {"kind": KIND, "schema_version": SCHEMA_VERSION, "step": step, "epoch": epoch}
        with self._path.open("a") as file:
            file.write(json.dumps(line | {"workers": workers, "shared": shared}) + "\n")


def read_steps(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return a record's steps. A last line that a killed process left unfinished is left out.

    Raises InputError when the file is missing or is not such a record.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror})", "give the path of a record") from None
    steps = []
    for number, line in enumerate(lines, start=1):
        try:
            step = json.loads(line)
        except ValueError:
            if number == len(lines):
                break
            raise InputError(f"{path}:{number}", "is not JSON", "give a record of steps") from None
        if not isinstance(step, dict) or (step.get("kind"), step.get("schema_version")) != (KIND, SCHEMA_VERSION):
            raise InputError(f"{path}:{number}", f"is no {KIND} of version {SCHEMA_VERSION}", "give a record of steps")
        steps.append(step)
    return steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where two runs part.

    Attributes:
        step, epoch: the first step that differs, counted from 0.
        worker: the virtual rank of the logical worker; None for what all share.
        kind: a key of ``WORKER_CAUSES`` or ``SHARED_CAUSES``, or "missing" where only one run has such a record.
        tensor: its name.
        cause: what can be to blame, as all that comes before it is equal.
    """

    step: int
    epoch: int
    worker: int | None
    kind: str
    tensor: str
    cause: str

    def __str__(self) -> str:
        who = "" if self.worker is None else f", logical worker {self.worker}"
        return (
            f"step {self.step}{who}: {self.kind} {self.tensor} differs. All before it is equal, so it is {self.cause}"
        )


Run = str | os.PathLike[str] | Sequence[Mapping[str, Any]]


def first_difference(a: Run, b: Run) -> Difference | None:
    """Return the first thing, in causal order, in which two recorded runs differ; None when no common step does.

    Within a step: each kind of record in the order of ``WORKER_CAUSES``, each worker in virtual-rank order, each tensor
    in the order in which it came to be; then what all workers share. ``a`` and ``b`` are paths of records or their steps
    (:func:`read_steps`). Steps that only one of them has are left out. Raises InputError when they have no step in
    common.
    """
    left, right = ({step["step"]: step for step in _steps(run)} for run in (a, b))
    common = sorted(left.keys() & right.keys())
    if not common:
        raise InputError("runs", "have no step in common", "record two runs of the same training")
    for number in common:
        if (found := _difference_of_step(left[number], right[number])) is not None:
            return found
    return None


def _steps(run: Run) -> Sequence[Mapping[str, Any]]:
    return read_steps(run) if isinstance(run, (str, os.PathLike)) else run


def _difference_of_step(a: Mapping[str, Any], b: Mapping[str, Any]) -> Difference | None:
    ranks = sorted(set(a["workers"]) | set(b["workers"]), key=int)
    places = [(kind, rank, cause) for kind, cause in WORKER_CAUSES.items() for rank in ranks]
    for kind, rank, cause in [*places, *((kind, None, cause) for kind, cause in SHARED_CAUSES.items())]:
        one, other = ((run["shared"] if rank is None else run["workers"].get(rank, {})).get(kind, {}) for run in (a, b))
        worker = None if rank is None else int(rank)
        for name in [*one, *(name for name in other if name not in one)]:
            if name not in one or name not in other:
                cause = "what only one of the runs has: other code, or another number of workers"
            if one.get(name) != other.get(name):
                return Difference(step=a["step"], epoch=a["epoch"], worker=worker, kind=kind, tensor=name, cause=cause)
    return None
