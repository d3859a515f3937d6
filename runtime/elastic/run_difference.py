"""The first difference of two recorded training runs, and its likely cause. Start at :func:`compare_runs`.

A record has one JSON line per step (:class:`RecordedStep`). Two of them are read side by side, a step at a time, so
memory does not depend on their length. This module does not import torch.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from ddltool.artifacts import Record, opened, parse_record
from ddltool.errors import InputError
from ddltool.results import DifferingSetting, FirstDifference, RunDifference, RunSeen

WorkerKind = Literal["random stream", "batch", "buffer before", "output", "loss", "gradient", "buffer"]
SharedKind = Literal["parameter before", "combined gradient", "parameter"]
Cause = tuple[str, str]
"""(class, sentence): the cause of a difference where everything earlier in causal order is equal."""

# Kinds of records in causal order, each with its cause.
WORKER_CAUSES: Mapping[WorkerKind, Cause] = {
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
SHARED_CAUSES: Mapping[SharedKind, Cause] = {
    "combined gradient": ("reduction order", "the reduction: the order in which gradients are added"),
    "parameter": ("optimizer", "the optimizer: its state, its settings or its kernel"),
}
BEFORE: SharedKind = "parameter before"  # in the line of the first step only
BEFORE_CAUSE = "initial weights", "the weights that the runs began with: another initialisation, or another checkpoint"
ONLY_ONE = ("code", "what only one of the runs has: other code, or another number of workers")
REORDERED = "data order", "the order of the data: the other run gives this batch to another worker in the same step"
_LONGEST_STEP = 1 << 26  # bytes of a line that are read at most
A_RECORD = "give a record of steps (ElasticTrainer(record=...), RunRecorder)"
Digests = dict[str, str]


class RecordedStep(Record):
    """The fingerprints of one step.

    ``workers``: by virtual rank, kind and tensor name; ``shared``, of what all workers share: by kind and tensor name.
    """

    kind: Literal["step-digests"] = "step-digests"
    schema_version: Literal[1] = 1
    step: int = Field(ge=0)
    epoch: int = Field(ge=0)
    settings: dict[str, Any] = Field(default_factory=dict)
    workers: dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], dict[WorkerKind, Digests]]
    shared: dict[SharedKind, Digests]


def compare_runs(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> RunDifference:
    """Compare two records, files that may be gzipped, and return their first difference in causal order, if any.

    Within a step the order is: initial parameters; each kind in the order of ``WORKER_CAUSES``, for each the workers by
    virtual rank, for each worker the tensors as they were recorded; then the kinds of ``SHARED_CAUSES``. Steps that only
    one record has are left out. Reading stops at the first step that differs. Raises InputError for a file that is not a
    record, and for two without a common step.
    """
    steps_a = StepReader(a)
    steps_b = StepReader(b)
    common_count = 0
    settings = list[DifferingSetting]()
    difference = None
    for left, right in _pairs(iter(steps_a), iter(steps_b)):
        if common_count == 0:  # the settings of a run are the same in all of its lines
            settings = _different_settings(left.settings, right.settings)
        common_count += 1
        difference = _difference_of_step(left, right)
        if difference is not None:
            break
    for reader in (steps_a, steps_b):
        if not reader.steps:
            raise InputError(reader.path, "has no whole step", A_RECORD)
    if not common_count:
        spans = " and ".join(f"steps {reader.first} to {reader.last}" for reader in (steps_a, steps_b))
        raise InputError("runs", f"have no step in common ({spans})", "record two runs of the same training")
    has_same_steps = steps_a.steps == steps_b.steps and steps_a.first == steps_b.first
    is_any_cut = steps_a.cut or steps_b.cut
    return RunDifference(
        equal=difference is None,
        same_length=difference is None and has_same_steps and not is_any_cut,
        steps_compared=common_count,
        a=steps_a.seen(),
        b=steps_b.seen(),
        settings=settings,
        difference=difference,
    )


def first_difference(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> FirstDifference | None:
    """Return the first difference of two recorded runs (:func:`compare_runs`); None if all common steps are equal."""
    return compare_runs(a, b).difference


class StepReader:
    """Reads the steps of a record in ascending order, one at a time.

    Attributes, of what was read so far:
        steps: the number of steps.
        first, last: the first and the last step's number; None before the first.
        cut: whether the last line is unfinished, as a killed run leaves it; it is left out.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.steps = 0
        self.first: int | None = None
        self.last: int | None = None
        self.cut = False

    def seen(self) -> RunSeen:
        """Return the attributes as they are now: what was read so far."""
        return RunSeen(steps_read=self.steps, first_step=self.first, last_step=self.last, cut=self.cut)

    def __iter__(self) -> Iterator[RecordedStep]:
        """Yield the steps, and count them in the attributes.

        Raises InputError for a missing file, for a malformed line and for a step number that does not ascend, each when
        reading gets there.
        """
        for step in self._lines():
            if self.last is not None and step.step <= self.last:
                problem = "comes twice" if step.step == self.last else f"comes after step {self.last}"
                raise InputError(self.path, f"step {step.step} {problem}", "give the record of one run")
            self.first = step.step if self.first is None else self.first
            self.last = step.step
            self.steps += 1
            yield step

    def _lines(self) -> Iterator[RecordedStep]:
        """Yield the steps in the order of the lines, whatever their numbers; at an unfinished last line, set ``cut``.

        Raises InputError, with the line's number, for a line that is not JSON or not a step.
        """
        with opened(self.path) as file:
            try:
                for line_number, line in enumerate(iter(lambda: file.readline(_LONGEST_STEP), b""), start=1):
                    try:
                        document = json.loads(line, parse_constant=str)  # NaN as text, which equals itself
                    except (ValueError, RecursionError):
                        if not line.endswith(b"\n"):
                            self.cut = True
                            return
                        raise InputError(f"{self.path}:{line_number}", "is not JSON", A_RECORD) from None
                    yield parse_record(document, RecordedStep, f"{self.path}:{line_number}")
            except EOFError:  # a compressed record whose writer was killed
                self.cut = True


def _pairs(a: Iterator[RecordedStep], b: Iterator[RecordedStep]) -> Iterator[tuple[RecordedStep, RecordedStep]]:
    """Yield pairs of the steps, with equal numbers, that two runs in ascending order have in common; read both to the end.

    So both readers check all lines and count all steps.
    """
    left = next(a, None)
    right = next(b, None)
    while left is not None and right is not None:
        if left.step == right.step:
            yield left, right
        behind = min(left.step, right.step)
        left = next(a, None) if left.step == behind else left
        right = next(b, None) if right.step == behind else right
    for reader in (a, b):
        for _ in reader:
            pass


def _different_settings(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[DifferingSetting]:
    """Return the settings in which two runs differ, in order of their names' appearance; a missing one counts as None."""
    names = dict.fromkeys([*a, *b])
    return [DifferingSetting(name=name, a=a.get(name), b=b.get(name)) for name in names if a.get(name) != b.get(name)]


def _difference_of_step(a: RecordedStep, b: RecordedStep) -> FirstDifference | None:
    """Return the first difference, in causal order, of two records of one step; None if they are equal.

    All kinds are compared, to count for each how many tensors differ; the first difference gives the cause. If it is a
    batch that another worker of run ``b`` got in this step, the cause is the order of the data.
    """
    first, differing_counts = _compared(a, b)
    if first is None:
        return None
    kind, rank, name, (cause_class, cause_text) = first
    if cause_class == "data" and rank is not None:  # so both have the tensor: what one lacks has the class of ONLY_ONE
        batch_digest = _tensors(a, rank, kind)[name]
        if any(_tensors(b, other, kind).get(name) == batch_digest for other in b.workers if other != rank):
            cause_class, cause_text = REORDERED
    return FirstDifference(
        step=a.step,
        epoch=a.epoch,
        worker=None if rank is None else int(rank),
        record=kind,
        tensor=name,
        cause_class=cause_class,
        cause=cause_text,
        differing_in_step={kind: count for kind, count in differing_counts.items() if count},
    )


class _DifferentTensor(NamedTuple):
    """A tensor that differs between two records of one step."""

    kind: str
    virtual_rank: str | None
    """The logical worker that has it; None: all share it."""
    name: str
    cause: Cause


def _compared(a: RecordedStep, b: RecordedStep) -> tuple[_DifferentTensor | None, Mapping[str, int]]:
    """Return (the first tensor in causal order that differs in two records of one step, the number that differ by kind).

    The tensor is None if none differs.
    """
    ranks = sorted(a.workers.keys() | b.workers.keys(), key=int)
    causal_order: list[tuple[str, str | None, Cause]] = []  # kind, virtual rank (None: shared by all), cause
    if BEFORE in a.shared and BEFORE in b.shared:  # a continued run has no parameters before its first step
        causal_order.append((BEFORE, None, BEFORE_CAUSE))
    causal_order += [(kind, rank, cause) for kind, cause in WORKER_CAUSES.items() for rank in ranks]
    causal_order += [(kind, None, cause) for kind, cause in SHARED_CAUSES.items()]
    first: _DifferentTensor | None = None
    differing_counts = Counter[str]()
    for kind, rank, cause in causal_order:
        left = _tensors(a, rank, kind)
        right = _tensors(b, rank, kind)
        names = [name for name in dict.fromkeys([*left, *right]) if left.get(name) != right.get(name)]
        differing_counts[kind] += len(names)
        if names and first is None:
            name = names[0]
            is_in_both = name in left and name in right
            first = _DifferentTensor(kind, rank, name, cause if is_in_both else ONLY_ONE)
    return first, differing_counts


def _tensors(step: RecordedStep, rank: str | None, kind: str) -> Digests:
    """Return a step's fingerprints of one ``kind`` by tensor name; empty if the step has none of it.

    ``rank``: the virtual rank of the worker whose fingerprints are wanted; None: those of what all workers share.
    """
    group: Mapping[str, Digests] = step.shared if rank is None else step.workers.get(rank, {})  # type: ignore[assignment]
    return group.get(kind, {})
