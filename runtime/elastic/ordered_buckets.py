"""What gradients travel together: buckets, recorded once and kept. Start at :class:`OrderedMean`.

The subclasses compute the mean: :class:`ddltool.runtime.elastic.ordered_chain.ChainedMean` and
:class:`ddltool.runtime.elastic.ordered_reduction.GatheredMean`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ddltool.errors import InputError
from ddltool.runtime.elastic.processes import Processes

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Slice:
    """A parameter's place in a bucket. ``index`` is its place among all that are averaged."""

    index: int
    parameter: nn.Parameter
    begin: int
    end: int


@dataclass(slots=True)
class Bucket:
    """Parameters whose gradients travel together, and ``rows`` (n, elements) for sums of them."""

    slices: list[Slice]
    rows: Tensor


def add_gradient(row: Tensor, part: Slice, gradient: Tensor | None, *, first: bool) -> None:
    """Add a parameter's gradient (None: zeros) to its place in ``row``, or put it there where it is the ``first``."""
    target = row[part.begin : part.end].view(part.parameter.shape)
    if first:
        target.zero_() if gradient is None else target.copy_(gradient)
    else:  # adding zero is not nothing: it turns -0.0 into 0.0, here as on any other placement
        target.add_(0.0 if gradient is None else gradient)


class OrderedMean:
    """Takes the gradients of each turn, and puts the mean over all turns of all logical workers into ``.grad``.

    The buckets are recorded in the first step, from the order in which virtual rank 0's gradients become ready, and stay
    as they are; as sums are elementwise, they decide what travels together and not the bits.

    Args:
        parameters: by name; those that do not require gradients are left out.
        processes: who runs which logical workers.
        turns_per_worker: micro-batches per logical worker and step; the mean is over all of them.
        bucket_bytes: gradients that travel together.
        buckets: parameter names by bucket as recorded before; None: record them.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        processes: Processes,
        *,
        turns_per_worker: int = 1,
        bucket_bytes: int = 25 * MIB,
        buckets: list[list[str]] | None = None,
    ) -> None:
        self._parameters = {name: value for name, value in parameters.items() if value.requires_grad}
        self._processes = processes
        self._divisor = processes.max_workers * turns_per_worker
        self._bucket_bytes = bucket_bytes
        self._buckets: list[Bucket] = []
        self.bucket_names = buckets
        self._has_gradient = torch.zeros(len(processes.local), len(self._parameters), dtype=torch.bool)
        self._ready: dict[str, None] = {}
        self._watchers = [] if buckets else [self._watch(name, value) for name, value in self._parameters.items()]

    def _watch(self, name: str, parameter: nn.Parameter) -> torch.utils.hooks.RemovableHandle:
        def note(_: Tensor) -> None:
            self._ready.setdefault(name)

        handle: torch.utils.hooks.RemovableHandle = parameter.register_post_accumulate_grad_hook(note)
        return handle

    @property
    def names(self) -> list[str]:
        """The parameters that are averaged, in the model's order."""
        return list(self._parameters)

    def clear(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def close(self) -> None:
        """Take away what watches the parameters: another mean takes over."""
        for watcher in self._watchers:
            watcher.remove()
        self._watchers = []

    def begin(self, virtual_rank: int) -> None:
        """Say that a worker's turn begins."""

    def expect(self) -> None:
        """Say that one more backward pass completes the gradients of the turn: they may begin to travel in it."""

    def take(self, virtual_rank: int) -> None:
        """Move the gradients of a worker's whole turn out of ``.grad``; workers come in virtual-rank order.

        Raises InputError for sparse gradients.
        """
        raise NotImplementedError

    def finish(self, notes: Tensor) -> Tensor:
        """Set ``.grad`` of every parameter to the mean, None where no worker had one. All processes call this together.

        ``notes`` (workers here, n), float64, travels along; returns that of all workers, (max_workers, n), in
        virtual-rank order.
        """
        raise NotImplementedError

    def _note_present(self, virtual_rank: int) -> None:
        """Note which parameters have a gradient in this turn."""
        has = [value.grad is not None for value in self._parameters.values()]
        self._has_gradient[self._processes.local.index(virtual_rank)] = torch.tensor(has)

    def _exchange(self, notes: Tensor) -> tuple[Tensor, Tensor]:
        """Return which parameters any worker had a gradient of, (parameters,), and the notes of all workers."""
        table = self._processes.gather_rows(torch.cat([self._has_gradient.double(), notes], dim=1))
        return table[:, : len(self._parameters)].sum(0) > 0, table[:, len(self._parameters) :]

    def _publish(self, bucket: Bucket, used: Tensor) -> None:
        """Let ``.grad`` be what is in the bucket's row 0."""
        for part in bucket.slices:
            if not used[part.index]:
                continue
            gradient = bucket.rows[0, part.begin : part.end].view(part.parameter.shape)
            like = part.parameter
            part.parameter.grad = gradient if like.is_contiguous() else torch.empty_like(like).copy_(gradient)

    def _rows_needed(self) -> int:
        return 1

    def _prepare(self) -> None:
        """Lay out the buckets, at the first turn. The process of virtual rank 0 says which (its first turn is that)."""
        if self._buckets:
            return
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise InputError(f"model:{name}", "has a sparse gradient", "use dense gradients (sparse=False)")
        for watcher in self._watchers:
            watcher.remove()
        self._watchers = []
        if self.bucket_names is None:
            text = self._processes.from_first(lambda: json.dumps(self._record()).encode())
            self.bucket_names = json.loads(text)
        place = {name: index for index, name in enumerate(self._parameters)}
        for names in self.bucket_names or []:
            slices, end = [], 0
            for name in names:
                parameter = self._parameters[name]
                slices.append(Slice(place[name], parameter, end, end + parameter.numel()))
                end += parameter.numel()
            self._buckets.append(Bucket(slices, parameter.detach().new_zeros((self._rows_needed(), end))))

    def _record(self) -> list[list[str]]:
        """Return buckets in the order of the gradients' arrival, of one data type and device each."""
        names = [*self._ready, *(name for name in reversed(self._parameters) if name not in self._ready)]
        buckets: list[list[str]] = []
        filled: dict[Any, tuple[list[str], int]] = {}
        for name in names:
            parameter = self._parameters[name]
            size = parameter.numel() * parameter.element_size()
            bucket, held = filled.get((parameter.dtype, parameter.device), ([], 0))
            if not bucket or held + size > self._bucket_bytes:
                bucket, held = [], 0
                buckets.append(bucket)
            bucket.append(name)
            filled[parameter.dtype, parameter.device] = (bucket, held + size)
        return buckets
