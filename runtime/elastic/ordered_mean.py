"""Gradients of all logical workers (ESTs), summed in an order that does not depend on where they ran.

Addition of floating-point numbers is not associative: g0 + g1 + g2 + g3 and (g0 + g1) + (g2 + g3) differ in their last
bits. So the order in which the workers' gradients are added is fixed by virtual rank alone, and a process adds gradients
locally only where that order has them next to each other anyway. Start at :class:`OrderedMean`; :class:`ChainedMean` is
what is used unless asked otherwise, :class:`GatheredMean` the other way to the same bits.
"""

# No `from __future__ import annotations` here: DDP compares the annotations of a communication hook with real types.

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddltool.errors import InputError
from ddltool.runtime.elastic.processes import Processes

MIB = 1024 * 1024
Order = Literal["ranked", "tree"]
ORDERS = ("ranked", "tree")
IN_FLIGHT = 2
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


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
        """Take away what watches the parameters."""
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
        self.close()
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


class ChainedMean(OrderedMean):
    """The mean in rank order, with gradients on their way during backward passes. For parameters on the host.

    ((g0 + g1) + g2) + g3 allows no local sums: a process that runs ranks 1 and 3 must wait for g2 between them. So the
    partial sum itself travels. The ranks are dealt out in the order in which turns end (:func:`.processes.divide`), the
    process of rank r adds its gradient to what comes from the process of rank r - 1, bucket by bucket, and passes it on
    while the next turn computes. A process holds one sum and the gradients of one turn, however many workers it has.

    A thread passes the sums on while the main thread computes; it lives from the first turn of a step to its end. A
    backward pass waits until at most a bucket of the turn before has not been added, so memory does not depend on the
    number of workers: the gradients of a turn, one set of sums, and a bucket. (Where backward passes come unannounced,
    without :meth:`expect`, each bucket waits for the same one of the turn before when its gradients are there.)
    """

    def __init__(self, parameters: dict[str, nn.Parameter], processes: Processes, **options: Any) -> None:
        super().__init__(parameters, processes, **options)
        self._owners = processes.owners
        self._changed = threading.Condition()
        # By virtual rank and bucket: gradients in the order of the bucket's slices, and what the thread has added.
        self._submitted: dict[tuple[int, int], list[Tensor | None]] = {}
        self._added: set[tuple[int, int]] = set()
        self._waiting_bytes = 0
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._turn: int | None = None
        self._expected = False
        self._missing: list[set[str]] = []
        self._place: dict[str, int] = {}
        self._sends: list[dist.Work | None] = []

    def begin(self, virtual_rank: int) -> None:
        """See :meth:`OrderedMean.begin`."""
        self._turn, self._expected = virtual_rank, False
        if self._processes.size > 1 and self._buckets and not self._watchers:
            self._watchers = [self._watch_bucket(name) for name in self._parameters]

    def expect(self) -> None:
        """See :meth:`OrderedMean.expect`. ``.grad`` must stay as that backward pass leaves it."""
        # Alone there is nothing to send, and in the first turn the buckets are not known yet.
        self._expected = self._processes.size > 1 and bool(self._buckets)
        with self._changed:  # else the gradients of two turns would be there at once
            self._changed.wait_for(lambda: self._waiting_bytes <= self._bucket_bytes or self._failure is not None)
        self._raise_failure()
        self._missing = [set(names) for names in self.bucket_names or []]

    def _watch_bucket(self, name: str) -> torch.utils.hooks.RemovableHandle:
        place = self._place[name]

        def note(_: Tensor) -> None:
            if self._turn is None:
                return
            self._wait_for_turn_before(self._turn, place)
            if not self._expected:
                return
            if name not in self._missing[place]:
                problem = "gets its gradient in more than one backward pass"
                raise InputError(f"model:{name}", problem, "write the loop with trainer.batches and turn_done")
            self._missing[place].discard(name)
            if not self._missing[place]:
                self._submit(self._turn, place)

        handle: torch.utils.hooks.RemovableHandle = self._parameters[name].register_post_accumulate_grad_hook(note)
        return handle

    def take(self, virtual_rank: int) -> None:
        """See :meth:`OrderedMean.take`."""
        self._prepare()
        self._note_present(virtual_rank)
        early, self._turn, self._expected = self._expected, None, False
        for place, bucket in enumerate(self._buckets):
            if self._processes.size == 1:
                for part in bucket.slices:
                    add_gradient(bucket.rows[0], part, part.parameter.grad, first=virtual_rank == 0)
            elif not early or self._missing[place]:
                self._wait_for_turn_before(virtual_rank, place)
                self._submit(virtual_rank, place)
        for parameter in self._parameters.values():
            parameter.grad = None

    def finish(self, notes: Tensor) -> Tensor:
        """See :meth:`OrderedMean.finish`."""
        used, table = self._exchange(notes)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._raise_failure()
            self._added.clear()
        else:
            for bucket in self._buckets:
                bucket.rows[0].div_(self._divisor)
        for bucket in self._buckets:
            self._publish(bucket, used)
        return table

    def _prepare(self) -> None:
        super()._prepare()
        if not self._place:
            buckets = enumerate(self.bucket_names or [])
            self._place = {name: place for place, names in buckets for name in names}

    def _submit(self, virtual_rank: int, place: int) -> None:
        """Hand the present gradients of a bucket to the thread."""
        gradients = [part.parameter.grad for part in self._buckets[place].slices]
        with self._changed:
            self._submitted[virtual_rank, place] = gradients
            self._waiting_bytes += self._buckets[place].rows.nbytes
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._pass_on, name="ordered-chain", daemon=True)
            self._thread.start()

    def _wait_for_turn_before(self, virtual_rank: int, place: int) -> None:
        """Wait until this process's gradients of the same bucket in the turn before have been added."""
        turn = self._processes.local.index(virtual_rank)
        if turn == 0:
            return
        before = (self._processes.local[turn - 1], place)
        with self._changed:
            self._changed.wait_for(lambda: before in self._added or self._failure is not None)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"the chain of gradients broke: {self._failure}") from self._failure

    def _pass_on(self) -> None:
        """Add this process's gradients to the chain, bucket by bucket, then take part in spreading the mean."""
        try:
            with torch.no_grad():
                self._sends = [None] * len(self._buckets)
                for virtual_rank in self._processes.local:
                    for place in range(len(self._buckets)):
                        self._add(virtual_rank, place)
                if self._owners[-1] != self._processes.rank:
                    for place in range(len(self._buckets)):
                        self._spread(place)
                for work in self._sends:
                    if work is not None:
                        work.wait()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _add(self, virtual_rank: int, place: int) -> None:
        """Add one turn's gradients of a bucket to what the turns before have left, and pass the sum on."""
        bucket, me = self._buckets[place], self._processes.rank
        row = bucket.rows[0]
        if virtual_rank > 0 and (source := self._owners[virtual_rank - 1]) != me:
            self._settle(place)
            dist.recv(row.view(torch.uint8), src=source, group=self._processes.chain)
        with self._changed:
            self._changed.wait_for(lambda: (virtual_rank, place) in self._submitted)
            gradients = self._submitted.pop((virtual_rank, place))
        self._settle(place)
        for part, gradient in zip(bucket.slices, gradients, strict=True):
            add_gradient(row, part, gradient, first=virtual_rank == 0)
        gradients.clear()  # frees them
        del gradient
        last = virtual_rank == len(self._owners) - 1
        if last:
            row.div_(self._divisor)
        with self._changed:
            self._added.add((virtual_rank, place))
            self._waiting_bytes -= row.nbytes
            self._changed.notify_all()
        if last:
            self._spread(place)
        elif (target := self._owners[virtual_rank + 1]) != me:
            self._sends[place] = dist.isend(row.view(torch.uint8), dst=target, group=self._processes.chain)

    def _settle(self, place: int) -> None:
        """Wait until what was sent of a bucket has left."""
        work, self._sends[place] = self._sends[place], None
        if work is not None:
            work.wait()

    def _spread(self, place: int) -> None:
        """Send a bucket's mean from the last rank's process to all others."""
        self._settle(place)
        row = self._buckets[place].rows[0].view(torch.uint8)
        dist.broadcast(row, src=self._owners[-1], group=self._processes.chain)


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
