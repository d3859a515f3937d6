"""The first thing in which two recorded training runs differ, and what is likely to blame. Start at :func:`compare_runs`.

A record has one JSON line per step (:class:`~ddltool.runtime.elastic.digests.StepFile`). Two of them are read side by side, a
step at a time, so memory does not depend on their length. This module does not import torch.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from ddltool.errors import InputError, did_you_mean

KIND = "step-digests"
SCHEMA_VERSION = 1
Cause = Literal[
    "initial weights",
    "random numbers",
    "data order",
    "data",
    "buffers",
    "kernel",
    "reduction order",
    "optimizer",
    "code",
]

# What a difference of each kind of record means, when everything that comes earlier is equal. In causal order.
WORKER_CAUSES: Mapping[str, tuple[Cause, str]] = {
    "random stream": (
        "random numbers",
        "the random state at the start of the turn; another seed, or draws that were not the worker's own",
    ),
    "batch": ("data", "the data: other samples, or an augmentation that draws from somewhere else"),
    "buffer before": ("buffers", "module buffers at the start of the turn; they were not the worker's own"),
    "output": (
        "kernel",
        "this module's kernel: another device type, number of threads or library, or a random draw of its own",
    ),
    "loss": ("kernel", "the loss function's kernel"),
    "gradient": ("kernel", "a kernel of the backward pass: another device type, number of threads or library"),
    "buffer": ("buffers", "module buffers after the turn: the kernel that updates them"),
}
SHARED_CAUSES: Mapping[str, tuple[Cause, str]] = {
    "combined gradient": ("reduction order", "the reduction: the order in which gradients are added"),
    "parameter": ("optimizer", "the optimizer: its state, its settings or its kernel"),
}
# In the line of step 0 alone.
BEFORE = "parameter before"
BEFORE_CAUSE: tuple[Cause, str] = (
    "initial weights",
    "the weights that the runs began with: another initialisation, or another checkpoint",
)
ONLY_ONE: tuple[Cause, str] = (
    "code",
    "what only one of the runs has: other code, or another number of workers",
)
REORDERED: tuple[Cause, str] = (
    "data order",
    "the order of the data: the other run gives this batch to another worker in the same step",
)
A_RECORD = "give a record of steps (ElasticTrainer(record=...), RunRecorder)"
Step = Mapping[str, Any]
Run = str | os.PathLike[str] | Sequence[Step]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where two runs part.

    Attributes:
        step, epoch: the first step that differs, counted from 0.
        worker: the virtual rank of the logical worker; None for what all share.
        kind: a key of ``WORKER_CAUSES`` or ``SHARED_CAUSES``, or ``BEFORE``.
        tensor: its name.
        cause_class: what is to blame, in a word.
        cause: what can be to blame, as all that comes before it is equal.
        differing: how many tensors of each kind differ in that step; what follows from the first is among them.
    """

    step: int
    epoch: int
    worker: int | None
    kind: str
    tensor: str
    cause_class: Cause
    cause: str
    differing: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        who = "" if self.worker is None else f", logical worker {self.worker}"
        return (
            f"step {self.step}{who}: {self.kind} {self.tensor} differs. All before it is equal, so it is {self.cause}"
        )


@dataclass(kw_only=True, slots=True)
class Seen:
    """What was read of one record. ``cut``: its last line is unfinished, as a killed run leaves it."""

    steps: int = 0
    first: int | None = None
    last: int | None = None
    cut: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What two records say of each other.

    Attributes:
        difference: the first one; None when no common step differs. Reading stops there.
        common: steps in both records that were compared.
        a, b: what was read of each.
        settings: settings in which the first common steps differ: name, value in a, value in b (None: not recorded).
    """

    difference: Difference | None
    common: int
    a: Seen
    b: Seen
    settings: tuple[tuple[str, Any, Any], ...]

    @property
    def same_length(self) -> bool:
        """Whether both records have the same steps, as far as was read, and end whole."""
        return (self.a.steps, self.a.first) == (self.b.steps, self.b.first) and not (self.a.cut or self.b.cut)


def compare_runs(a: Run, b: Run) -> Comparison:
    """Compare two recorded runs up to the first difference, in causal order.

    Within a step: each kind of record in the order of ``WORKER_CAUSES``, each worker in virtual-rank order, each tensor
    in the order in which it came to be; then what all workers share. ``a`` and ``b`` are paths of records (``.gz``
    too) or their steps (:func:`read_steps`). Steps that only one of them has are left out. Raises InputError for what
    is no record, and when they have no step in common.
    """
    seen = Seen(), Seen()
    common = 0
    settings: tuple[tuple[str, Any, Any], ...] = ()
    for left, right in _pairs(_steps(a, seen[0]), _steps(b, seen[1])):
        settings = settings if common else _different_settings(left, right)
        common += 1
        found = _difference_of_step(left, right)
        if found is not None:
            return Comparison(difference=found, common=common, a=seen[0], b=seen[1], settings=settings)
    for run, read in ((a, seen[0]), (b, seen[1])):
        if not read.steps:
            where = os.fspath(run) if isinstance(run, (str, os.PathLike)) else "run"
            raise InputError(where, "has no whole step", A_RECORD)
    if not common:
        problem = f"have no step in common ({_span(seen[0])} and {_span(seen[1])})"
        raise InputError("runs", problem, "record two runs of the same training")
    return Comparison(difference=None, common=common, a=seen[0], b=seen[1], settings=settings)


def first_difference(a: Run, b: Run) -> Difference | None:
    """Return the first thing in which two recorded runs differ (:func:`compare_runs`); None when no common step does."""
    return compare_runs(a, b).difference


def read_steps(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return all steps of a record. A last line that a killed process left unfinished is left out.

    Raises InputError when the file is missing or is not such a record.
    """
    return [dict(step) for step in iterate_steps(path)]


def iterate_steps(path: str | os.PathLike[str]) -> Iterator[Step]:
    """Yield what :func:`read_steps` returns, one step at a time. Raises as it does, when it gets there."""
    return _steps(path, Seen())


def _span(seen: Seen) -> str:
    return f"steps {seen.first} to {seen.last}"


def _steps(run: Run, seen: Seen) -> Iterator[Step]:
    """Yield a run's steps in ascending order, noting in ``seen`` what was read."""
    where = os.fspath(run) if isinstance(run, (str, os.PathLike)) else "run"
    for step in _lines(where, seen) if isinstance(run, (str, os.PathLike)) else run:
        number = step["step"]
        if seen.last is not None and number <= seen.last:
            again = "comes twice" if number == seen.last else f"comes after step {seen.last}"
            raise InputError(where, f"step {number} {again}", "give the record of one run")
        seen.first = number if seen.first is None else seen.first
        seen.last = number
        seen.steps += 1
        yield step


def _lines(where: str, seen: Seen) -> Iterator[Step]:
    try:
        with _open(where) as file:
            for number, line in enumerate(file, start=1):
                whole = line.endswith("\n")
                try:
                    step = json.loads(line, object_pairs_hook=_distinct, parse_constant=str)
                except (ValueError, RecursionError) as error:
                    if not whole:  # a process that is killed while it writes leaves a line without an end
                        seen.cut = True
                        return
                    what = error if isinstance(error, _Twice) else "is not JSON"
                    raise InputError(f"{where}:{number}", str(what), A_RECORD) from None
                yield _checked(step, f"{where}:{number}")
    except EOFError:  # a compressed record whose writer was killed
        seen.cut = True
    except (OSError, zlib.error) as error:
        problem = getattr(error, "strerror", None) or "is damaged"
        raise InputError(where, f"cannot be read ({problem})", "give the path of a record") from None
    except UnicodeDecodeError:
        raise InputError(where, "is no text", A_RECORD) from None


def _open(path: str) -> TextIO:
    return gzip.open(path, "rt", encoding="utf-8") if path.endswith(".gz") else Path(path).open(encoding="utf-8")


class _Twice(ValueError):
    """A key that stands twice in one JSON object."""


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        raise _Twice(f"has {next(name for name in names if names.count(name) > 1)!r} twice")
    return made


def _checked(step: Any, where: str) -> Step:
    """Return a step. Raises InputError unless it has the shape of one."""
    if not isinstance(step, dict) or (step.get("kind"), step.get("schema_version")) != (KIND, SCHEMA_VERSION):
        raise InputError(where, f"is no {KIND} of version {SCHEMA_VERSION}", A_RECORD)
    for name in ("step", "epoch"):
        value = step.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise InputError(f"{where}:{name}", f"is {value!r}", "a whole number, 0 or more")
    if not isinstance(step.get("settings", {}), dict):
        raise InputError(f"{where}:settings", "is no mapping", A_RECORD)
    groups = step.get("workers")
    if not isinstance(groups, dict) or not all(_is_rank(rank) for rank in groups):
        raise InputError(f"{where}:workers", "is no mapping from virtual ranks", A_RECORD)
    for name, kinds in [*groups.items(), ("shared", step.get("shared"))]:
        good = isinstance(kinds, dict) and all(
            isinstance(tensors, dict) and all(isinstance(digest, str) for digest in tensors.values())
            for tensors in kinds.values()
        )
        if not good:
            raise InputError(f"{where}:{name}", "does not map kinds to tensors to digests", A_RECORD)
        known = {*SHARED_CAUSES, BEFORE} if name == "shared" else WORKER_CAUSES.keys()
        if unknown := sorted(kinds.keys() - known):
            raise InputError(f"{where}:{name}", f"unknown kind {unknown[0]!r}", did_you_mean(unknown[0], known))
    return step


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def _pairs(a: Iterator[Step], b: Iterator[Step]) -> Iterator[tuple[Step, Step]]:
    """Yield the steps of equal number of two ascending runs, reading both to their ends."""
    left, right = next(a, None), next(b, None)
    while left is not None and right is not None:
        if left["step"] == right["step"]:
            yield left, right
            left, right = next(a, None), next(b, None)
        elif left["step"] < right["step"]:
            left = next(a, None)
        else:
            right = next(b, None)
    for rest in (a, b):
        for _ in rest:
            pass


def _different_settings(a: Step, b: Step) -> tuple[tuple[str, Any, Any], ...]:
    left, right = a.get("settings", {}), b.get("settings", {})
    names = [*left, *(name for name in right if name not in left)]
    return tuple((name, left.get(name), right.get(name)) for name in names if left.get(name) != right.get(name))


def _difference_of_step(a: Step, b: Step) -> Difference | None:
    ranks = sorted(set(a["workers"]) | set(b["workers"]), key=int)
    places: list[tuple[str, str | None, tuple[Cause, str]]] = []
    if BEFORE in a["shared"] and BEFORE in b["shared"]:  # older records have none
        places.append((BEFORE, None, BEFORE_CAUSE))
    places += [(kind, rank, cause) for kind, cause in WORKER_CAUSES.items() for rank in ranks]
    places += [(kind, None, cause) for kind, cause in SHARED_CAUSES.items()]
    first: tuple[str, str | None, str, tuple[Cause, str]] | None = None
    differing: dict[str, int] = {}
    for kind, rank, cause in places:
        one, other = _tensors(a, rank, kind), _tensors(b, rank, kind)
        for name in [*one, *(name for name in other if name not in one)]:
            if one.get(name) == other.get(name):
                continue
            differing[kind] = differing.get(kind, 0) + 1
            if first is None:
                missing = name not in one or name not in other
                first = (kind, rank, name, ONLY_ONE if missing else cause)
    if first is None:
        return None
    kind, rank, name, (cause_class, text) = first
    if kind == "batch" and rank is not None and cause_class == "data" and _moved(a, b, rank, name):
        cause_class, text = REORDERED
    return Difference(
        step=a["step"],
        epoch=a["epoch"],
        worker=None if rank is None else int(rank),
        kind=kind,
        tensor=name,
        cause_class=cause_class,
        cause=text,
        differing=differing,
    )


def _tensors(step: Step, rank: str | None, kind: str) -> Mapping[str, str]:
    group = step["shared"] if rank is None else step["workers"].get(rank, {})
    found: Mapping[str, str] = group.get(kind, {})
    return found


def _moved(a: Step, b: Step, rank: str, name: str) -> bool:
    """Return whether this worker's batch in ``a`` is another worker's in ``b``."""
    wanted = _tensors(a, rank, "batch")[name]
    return any(_tensors(b, other, "batch").get(name) == wanted for other in b["workers"] if other != rank)
