"""Gradients of all logical workers (ESTs), summed in an order that does not depend on where they ran.

Addition of floating-point numbers is not associative: g0 + g1 + g2 + g3 and (g0 + g1) + (g2 + g3) differ in their last
bits. So the order in which the workers' gradients are added is fixed by virtual rank alone, and a process adds gradients
locally only where that order has them next to each other anyway. Start at :class:`OrderedMean`.
"""

# No `from __future__ import annotations` here: DDP compares the annotations of a communication hook with real types.

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddltool.errors import InputError
from ddltool.runtime.elastic_group import Processes

Order = Literal["ranked", "tree"]
ORDERS = ("ranked", "tree")
MIB = 1024 * 1024
IN_FLIGHT = 2
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """The sum over virtual ranks ``begin`` to ``end`` - 1."""

    begin: int
    end: int

    def joins(self, right: "Segment", order: Order) -> bool:
        """Return whether ``order`` adds ``right``, which begins where this ends, to this as it stands.

        ``ranked`` is ((g0 + g1) + g2) + g3: only a sum that begins with rank 0 takes its neighbour. ``tree`` is the
        binary tree (g0 + g1) + (g2 + g3): two halves of an aligned block join.
        """
        if order == "ranked":
            return self.begin == 0
        size = self.end - self.begin
        return right.end - right.begin == size and self.begin % (2 * size) == 0


def fold(parts: Iterable[tuple[Segment, Tensor]], order: Order) -> list[tuple[Segment, Tensor]]:
    """Join neighbours, in place, as far as ``order`` allows; ``parts`` come in virtual-rank order.

    >>> ones = [(Segment(rank, rank + 1), torch.ones(1)) for rank in range(2, 6)]
    >>> [(part.begin, part.end) for part, _ in fold(ones, "tree")]
    [(2, 4), (4, 6)]
    >>> [(part.begin, part.end) for part, _ in fold(ones, "ranked")]
    [(2, 3), (3, 4), (4, 5), (5, 6)]
    """
    stack: list[tuple[Segment, Tensor]] = []
    for part in parts:
        stack.append(part)
        while len(stack) > 1 and stack[-2][0].joins(stack[-1][0], order):
            (left, total), (right, value) = stack[-2:]
            stack[-2:] = [(Segment(left.begin, right.end), total.add_(value))]
    return stack


def sum_all(parts: Iterable[tuple[Segment, Tensor]], order: Order) -> Tensor:
    """Return the sum over all virtual ranks, in place. What ``order`` leaves apart is added from the left."""
    (_, total), *rest = fold(parts, order)
    for _, value in rest:
        total.add_(value)
    return total


def _assign(target: Tensor, value: Tensor) -> None:
    if target.data_ptr() != value.data_ptr():
        target.copy_(value)


def segments(run: range, order: Order) -> list[Segment]:
    """Return the sums that a process with the virtual ranks ``run`` sends to the others."""
    nothing = torch.zeros(0)
    return [part for part, _ in fold(((Segment(rank, rank + 1), nothing) for rank in run), order)]


@dataclass(frozen=True, slots=True)
class _Slice:
    """A parameter's place in a bucket."""

    index: int
    parameter: nn.Parameter
    begin: int
    end: int


@dataclass(slots=True)
class _Bucket:
    slices: list[_Slice]
    rows: Tensor  # (deepest stack of sums on this process, elements)


class OrderedMean:
    """Takes the gradients of each turn, and puts the mean over all turns of all logical workers into ``.grad``.

    The buckets are recorded in the first step, from the order in which virtual rank 0's gradients become ready, and stay
    as they are. Memory: a process holds one gradient per sum that it cannot add up further (``ranked``: one on process 0
    and one per local worker elsewhere; ``tree``: at most 2 log2 of the number of local workers), and while buckets travel
    a few times ``bucket_bytes``.

    Args:
        parameters: by name; those that do not require gradients are left out.
        processes: who runs which logical workers.
        turns_per_worker: micro-batches per logical worker and step; the mean is over all of them.
        order: how the sum is bracketed.
        bucket_bytes: gradients that travel together.
        buckets: parameter names by bucket as recorded before; None: record them.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        processes: Processes,
        *,
        turns_per_worker: int = 1,
        order: Order = "ranked",
        bucket_bytes: int = 25 * MIB,
        buckets: list[list[str]] | None = None,
    ) -> None:
        self._parameters = {name: value for name, value in parameters.items() if value.requires_grad}
        self._processes = processes
        self._divisor = processes.runs[-1].stop * turns_per_worker
        self._order: Order = order
        self._bucket_bytes = bucket_bytes
        self._buckets: list[_Bucket] = []
        self.bucket_names = buckets
        self._sent = [segments(run, order) for run in processes.runs]
        self._stack: list[Segment] = []
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

    def take(self, virtual_rank: int) -> None:
        """Move the gradients of a worker's whole turn out of ``.grad``; workers come in virtual-rank order.

        Raises InputError for sparse gradients.
        """
        self._prepare()
        place = virtual_rank - self._processes.local.start
        self._stack = [] if place == 0 else self._stack
        segment = Segment(virtual_rank, virtual_rank + 1)
        joins = bool(self._stack) and self._stack[-1].joins(segment, self._order)
        row = len(self._stack) - 1 if joins else len(self._stack)
        has = [value.grad is not None for value in self._parameters.values()]
        self._has_gradient[place] = torch.tensor(has)
        for bucket in self._buckets:
            for part in bucket.slices:
                gradient = part.parameter.grad
                target = bucket.rows[row, part.begin : part.end].view(part.parameter.shape)
                if not joins:
                    target.zero_() if gradient is None else target.copy_(gradient)
                else:  # adding zero is not nothing: it turns -0.0 into 0.0, here as on any other placement
                    target.add_(0.0 if gradient is None else gradient)
                part.parameter.grad = None
        self._stack = self._joined([*self._stack, segment], row)

    def _joined(self, stack: list[Segment], row: int) -> list[Segment]:
        """Join sums on top of the stack; the newest one's values are already added where ``row`` is not its own."""
        while len(stack) > 1 and stack[-2].joins(stack[-1], self._order):
            left, right = stack[-2:]
            if row == len(stack) - 1:
                for bucket in self._buckets:
                    bucket.rows[row - 1].add_(bucket.rows[row])
                row -= 1
            stack = [*stack[:-2], Segment(left.begin, right.end)]
        return stack

    def finish(self, notes: Tensor) -> Tensor:
        """Set ``.grad`` of every parameter to the mean, None where no worker had one. All processes call this together.

        ``notes`` (workers here, n), float64, travels along; returns that of all workers, (max_workers, n), in
        virtual-rank order.
        """
        flags = torch.cat([self._has_gradient.double(), notes], dim=1)
        table = self._processes.gather_rows(flags)
        used = table[:, : len(self._parameters)].sum(0) > 0
        waiting: list[tuple[_Bucket, Callable[[], None]]] = []
        for bucket in self._buckets:
            if len(waiting) == IN_FLIGHT:
                self._publish(*waiting.pop(0), used)
            waiting.append((bucket, self._collect(bucket)))
        for item in waiting:
            self._publish(*item, used)
        return table[:, len(self._parameters) :]

    def _collect(self, bucket: _Bucket) -> Callable[[], None]:
        """Start gathering a bucket's sums; return a function that waits and puts the total into the bucket's row 0.

        The rows of all processes together are as long as one bucket may be, so that memory does not depend on how many
        they are: a bucket travels in pieces.
        """
        if self._processes.size == 1:
            return lambda: _assign(bucket.rows[0], sum_all(zip(self._stack, bucket.rows, strict=False), self._order))
        size, width = self._processes.size, max(map(len, self._sent))
        elements = bucket.rows.shape[1]
        step = max(1, self._bucket_bytes // (size * width * bucket.rows.element_size()))

        def start(begin: int) -> tuple[Tensor, dist.Work]:
            mine = bucket.rows[:width, begin : begin + step].contiguous()
            everything = mine.new_empty((size, *mine.shape))
            return everything, _all_gather(everything.flatten(), mine.flatten(), async_op=True)

        first = start(0)

        def total() -> None:
            current = first
            for begin in range(0, elements, step):
                everything, work = current
                if begin + step < elements:
                    current = start(begin + step)
                work.wait()
                parts = (
                    (part, everything[rank, at]) for rank, sent in enumerate(self._sent) for at, part in enumerate(sent)
                )
                bucket.rows[0, begin : begin + step].copy_(sum_all(parts, self._order))

        return total

    def _publish(self, bucket: _Bucket, total: Callable[[], None], used: Tensor) -> None:
        mean = bucket.rows[0]
        total()
        mean.div_(self._divisor)
        for part in bucket.slices:
            if not used[part.index]:
                continue
            gradient = mean[part.begin : part.end].view(part.parameter.shape)
            like = part.parameter
            part.parameter.grad = gradient if like.is_contiguous() else torch.empty_like(like).copy_(gradient)

    def _prepare(self) -> None:
        """Lay out the buckets, at the first turn. Process 0 says which (its first turn is virtual rank 0's)."""
        if self._buckets:
            return
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise InputError(f"model:{name}", "has a sparse gradient", "use dense gradients (sparse=False)")
        for watcher in self._watchers:
            watcher.remove()
        if self.bucket_names is None:
            text = self._processes.from_first(lambda: json.dumps(self._record()).encode())
            self.bucket_names = json.loads(text)
        place = {name: index for index, name in enumerate(self._parameters)}
        depth = 0
        for begin in range(1, len(self._processes.local) + 1):
            depth = max(depth, len(segments(self._processes.local[:begin], self._order)))
        depth = max(depth + (self._order == "tree"), max(map(len, self._sent)))
        for names in self.bucket_names or []:
            slices, end = [], 0
            for name in names:
                parameter = self._parameters[name]
                slices.append(_Slice(place[name], parameter, end, end + parameter.numel()))
                end += parameter.numel()
            self._buckets.append(_Bucket(slices, parameter.detach().new_zeros((depth, end))))

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


def ordered_mean(
    group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # exported only where torch.distributed is available
) -> torch.futures.Future[Tensor]:
    """Average a DDP bucket over the ranks in rank order: ``model.register_comm_hook(None, ordered_mean)``.

    With one logical worker per process, this is what :class:`OrderedMean` computes with ``order="ranked"``, so a plain
    DDP script with this hook is the run that an elastic one can be compared with.
    """
    buffer = bucket.buffer()
    rows = [torch.empty_like(buffer) for _ in range(dist.get_world_size(group))]

    def finish(_: torch.futures.Future[list[Tensor]]) -> Tensor:
        parts: Sequence[tuple[Segment, Tensor]] = [(Segment(rank, rank + 1), row) for rank, row in enumerate(rows)]
        return sum_all(parts, "ranked").div_(len(rows))

    future: torch.futures.Future[Tensor] = (
        dist.all_gather(rows, buffer, group=group, async_op=True).get_future().then(finish)
    )
    return future
