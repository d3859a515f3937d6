"""Gradients of all logical workers (ESTs), summed in an order that does not depend on where they ran.

Addition of floating-point numbers is not associative: g0 + g1 + g2 + g3 and (g0 + g1) + (g2 + g3) differ in their last
bits. So the order in which the workers' gradients are added is fixed by virtual rank alone, and a process adds gradients
locally only where that order has them next to each other anyway. Start at :class:`GatheredMean`; what is used unless
asked otherwise is :class:`ddltool.runtime.elastic.ordered_chain.ChainedMean`.
"""

# No `from __future__ import annotations` here: DDP compares the annotations of a communication hook with real types.

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddltool.runtime.elastic.ordered_buckets import Bucket, OrderedMean, add_gradient
from ddltool.runtime.elastic.processes import Processes

Order = Literal["ranked", "tree"]
ORDERS = ("ranked", "tree")
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


def segments(run: Sequence[int], order: Order) -> list[Segment]:
    """Return the sums that a process with the virtual ranks ``run`` sends to the others."""
    nothing = torch.zeros(0)
    return [part for part, _ in fold(((Segment(rank, rank + 1), nothing) for rank in run), order)]


class GatheredMean(OrderedMean):
    """The mean by gathering every sum that cannot be added up further, on all processes, after the last turn.

    Memory: a process holds one gradient per sum that it cannot add up (``ranked``: one on process 0 and one per local
    worker elsewhere; ``tree``: at most 2 log2 of the number of local workers), and while buckets travel a few times
    ``bucket_bytes``. The processes' virtual ranks are contiguous.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], processes: Processes, *, order: Order = "ranked", **options: Any
    ) -> None:
        super().__init__(parameters, processes, **options)
        self._order: Order = order
        self._sent = [segments(run, order) for run in processes.runs]
        self._stack: list[Segment] = []

    def take(self, virtual_rank: int) -> None:
        """See :meth:`OrderedMean.take`."""
        self._prepare()
        self._note_present(virtual_rank)
        self._stack = [] if virtual_rank == self._processes.local[0] else self._stack
        segment = Segment(virtual_rank, virtual_rank + 1)
        joins = bool(self._stack) and self._stack[-1].joins(segment, self._order)
        row = len(self._stack) - 1 if joins else len(self._stack)
        for bucket in self._buckets:
            for part in bucket.slices:
                add_gradient(bucket.rows[row], part, part.parameter.grad, first=not joins)
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
        """See :meth:`OrderedMean.finish`."""
        used, table = self._exchange(notes)
        waiting: list[tuple[Bucket, Callable[[], None]]] = []
        for bucket in self._buckets:
            if len(waiting) == IN_FLIGHT:
                self._complete(*waiting.pop(0), used)
            waiting.append((bucket, self._collect(bucket)))
        for item in waiting:
            self._complete(*item, used)
        return table

    def _complete(self, bucket: Bucket, total: Callable[[], None], used: Tensor) -> None:
        total()
        bucket.rows[0].div_(self._divisor)
        self._publish(bucket, used)

    def _rows_needed(self) -> int:
        depth = 0
        for count in range(1, len(self._processes.local) + 1):
            depth = max(depth, len(segments(self._processes.local[:count], self._order)))
        return max(depth + (self._order == "tree"), max(map(len, self._sent)))

    def _collect(self, bucket: Bucket) -> Callable[[], None]:
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
