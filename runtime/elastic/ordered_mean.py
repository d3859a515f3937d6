"""Gradients of all logical workers (ESTs), summed in an order that does not depend on where they ran.

Addition of floating-point numbers is not associative, so the workers' gradients are always added as
((g0 + g1) + g2) + g3. That allows no local sums: a process that runs ranks 1 and 3 must wait for g2 between them. So the
partial sum itself travels. The ranks are dealt out in the order in which turns end (:func:`.processes.divide`), the
process of rank r adds its gradient to what comes from the process of rank r - 1, bucket by bucket, and passes it on while
the next turn computes. Start at :class:`OrderedMean`.
"""

# No `from __future__ import annotations` here: DDP compares the annotations of a communication hook with real types.

import json
import threading
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddltool.errors import InputError
from ddltool.runtime.elastic.processes import Processes

MIB = 1024 * 1024


@dataclass(slots=True)
class Bucket:
    """Parameters whose gradients travel together: each with its place among all, and its beginning in ``row``."""

    parts: list[tuple[int, nn.Parameter, int]]
    row: Tensor
    """(elements,) a sum of them, on the host."""
    missing: int = 0
    """Gradients of the backward pass under way that are still to come."""
    seen: set[int] = field(default_factory=set)

    def view(self, parameter: nn.Parameter, begin: int) -> Tensor:
        """Return a parameter's place in the sum."""
        return self.row[begin : begin + parameter.numel()].view(parameter.shape)

    def add(self, gradients: list[Tensor | None], *, first: bool) -> None:
        """Add a turn's gradients (None: zeros), or put them there where they are the ``first``."""
        for (_, parameter, begin), gradient in zip(self.parts, gradients, strict=True):
            target = self.view(parameter, begin)
            if first:
                target.zero_() if gradient is None else target.copy_(gradient)
            else:  # adding zero is not nothing: it turns -0.0 into 0.0, here as on any other placement
                target.add_(0.0 if gradient is None else gradient.to(target.device))


class OrderedMean:
    """Takes the gradients of each turn, and puts the mean over all turns of all logical workers into ``.grad``.

    The buckets are recorded in the first step, from the order in which virtual rank 0's gradients become ready, and stay
    as they are; as sums are elementwise, they decide what travels together and not the bits.

    A thread passes the sums on while the main thread computes; it lives from the first turn of a step to its end. A
    backward pass waits until at most a bucket of the turn before has not been added, so memory does not depend on the
    number of workers: the gradients of a turn, one set of sums, and a bucket. (Where backward passes come unannounced,
    without :meth:`expect`, each bucket waits for the same one of the turn before when its gradients are there.)

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
        self._processes, self._owners = processes, processes.owners
        self._divisor = processes.max_workers * turns_per_worker
        self._bucket_bytes = bucket_bytes
        self._buckets: list[Bucket] = []
        self.bucket_names = buckets
        self._has_gradient = torch.zeros(len(processes.local), len(self._parameters), dtype=torch.bool)
        self._ready: dict[str, None] = {}  # in the order of arrival, until the buckets are known
        self._place: dict[str, int] = {}
        self._changed = threading.Condition()
        # By virtual rank and bucket: gradients in the order of the bucket's parts, and what the thread has added.
        self._submitted: dict[tuple[int, int], list[Tensor | None]] = {}
        self._added: set[tuple[int, int]] = set()
        self._waiting_bytes = 0
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._turn: int | None = None
        self._expected = False
        self._sends: list[dist.Work | None] = []
        # Python cannot collect a cycle through a tensor's hook, and this holds the tensors and the job's connections.
        this = weakref.ref(self)
        self._watchers = [
            value.register_post_accumulate_grad_hook(partial(_tell, this, name))
            for name, value in self._parameters.items()
        ]

    @property
    def names(self) -> list[str]:
        """The parameters that are averaged, in the model's order."""
        return list(self._parameters)

    def clear(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def is_usable(self) -> bool:
        """Return whether there are gradients to be used: none that are infinite, which a loss scaler passes over."""
        gradients = [value.grad for value in self._parameters.values() if value.grad is not None]
        return bool(gradients) and all(bool(gradient.isfinite().all()) for gradient in gradients)

    def close(self) -> None:
        """Take away what watches the parameters."""
        for watcher in self._watchers:
            watcher.remove()
        self._watchers = []

    def begin(self, virtual_rank: int) -> None:
        """Say that a worker's turn begins."""
        self._turn, self._expected = virtual_rank, False

    def expect(self) -> None:
        """Say that one more backward pass completes the gradients of the turn: they may begin to travel in it.

        ``.grad`` must stay as that backward pass leaves it.
        """
        # Alone there is nothing to send, and in the first turn the buckets are not known yet.
        self._expected = self._processes.size > 1 and bool(self._buckets)
        with self._changed:  # else the gradients of two turns would be there at once
            self._changed.wait_for(lambda: self._waiting_bytes <= self._bucket_bytes or self._failure is not None)
        self._raise_failure()
        for bucket in self._buckets:
            bucket.missing, bucket.seen = len(bucket.parts), set()

    def _note(self, name: str) -> None:
        """A backward pass has a parameter's gradient ready."""
        if not self._buckets:
            self._ready.setdefault(name)
        elif self._turn is not None:
            place = self._place[name]
            bucket = self._buckets[place]
            self._wait_for_turn_before(self._turn, place)
            if not self._expected:
                return
            if (key := id(self._parameters[name])) in bucket.seen:
                problem = "gets its gradient in more than one backward pass"
                raise InputError(f"model:{name}", problem, "write the loop with trainer.batches and turn_done")
            bucket.seen.add(key)
            bucket.missing -= 1
            if not bucket.missing:
                self._submit(self._turn, place)

    def take(self, virtual_rank: int) -> None:
        """Move the gradients of a worker's whole turn out of ``.grad``; workers come in virtual-rank order.

        Raises InputError for sparse gradients.
        """
        self._prepare()
        has = [value.grad is not None for value in self._parameters.values()]
        self._has_gradient[self._processes.local.index(virtual_rank)] = torch.tensor(has)
        early, self._turn, self._expected = self._expected, None, False
        for place, bucket in enumerate(self._buckets):
            if self._processes.size == 1:
                bucket.add([parameter.grad for _, parameter, _ in bucket.parts], first=virtual_rank == 0)
            elif not early or bucket.missing:
                self._wait_for_turn_before(virtual_rank, place)
                self._submit(virtual_rank, place)
        self.clear()

    def finish(self, notes: Tensor) -> Tensor:
        """Set ``.grad`` of every parameter to the mean, None where no worker had one. All processes call this together.

        ``notes`` (workers here, n), float64, travels along; returns that of all workers, (max_workers, n), in
        virtual-rank order.
        """
        count = len(self._parameters)
        table = self._processes.gather_rows(torch.cat([self._has_gradient.double(), notes], dim=1))
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._raise_failure()
            self._added.clear()
        else:
            for bucket in self._buckets:
                bucket.row.div_(self._divisor)
        used = (table[:, :count].sum(0) > 0).tolist()
        for bucket in self._buckets:
            for index, parameter, begin in bucket.parts:
                if used[index]:
                    mean = bucket.view(parameter, begin)
                    as_it_is = parameter.is_contiguous() and parameter.device == mean.device
                    parameter.grad = mean if as_it_is else torch.empty_like(parameter).copy_(mean)
        return table[:, count:]

    def _prepare(self) -> None:
        """Lay out the buckets, at the first turn. The process of virtual rank 0 says which (its first turn is that)."""
        if self._buckets:
            return
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise InputError(f"model:{name}", "has a sparse gradient", "use dense gradients (sparse=False)")
        if self._processes.size == 1:
            self.close()
        if self.bucket_names is None:
            recorded = self._processes.job.gather(json.dumps(self._record()).encode())
            self.bucket_names = json.loads(recorded[self._owners[0]])
        index = {name: number for number, name in enumerate(self._parameters)}
        for names in self.bucket_names or []:
            parts: list[tuple[int, nn.Parameter, int]] = []
            end = 0
            for name in names:
                parameter = self._parameters[name]
                self._place[name] = len(self._buckets)
                parts.append((index[name], parameter, end))
                end += parameter.numel()
            self._buckets.append(Bucket(parts, torch.zeros(end, dtype=parameter.dtype)))
        self._sends = [None] * len(self._buckets)

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

    def _submit(self, virtual_rank: int, place: int) -> None:
        """Hand the present gradients of a bucket to the thread."""
        bucket = self._buckets[place]
        with self._changed:
            self._submitted[virtual_rank, place] = [parameter.grad for _, parameter, _ in bucket.parts]
            self._waiting_bytes += bucket.row.nbytes
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
                for virtual_rank in self._processes.local:
                    for place in range(len(self._buckets)):
                        self._add(virtual_rank, place)
                for place in range(len(self._buckets)):
                    if self._owners[-1] != self._processes.rank:
                        self._spread(place)
                for place in range(len(self._buckets)):
                    self._settle(place)
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _add(self, virtual_rank: int, place: int) -> None:
        """Add one turn's gradients of a bucket to what the turns before have left, and pass the sum on."""
        bucket, me = self._buckets[place], self._processes.rank
        self._settle(place)
        if virtual_rank > 0 and (source := self._owners[virtual_rank - 1]) != me:
            self._receive(place, source)
        with self._changed:
            self._changed.wait_for(lambda: (virtual_rank, place) in self._submitted)
            gradients = self._submitted.pop((virtual_rank, place))
        bucket.add(gradients, first=virtual_rank == 0)
        del gradients  # frees them
        last = virtual_rank == len(self._owners) - 1
        if last:
            bucket.row.div_(self._divisor)
        with self._changed:
            self._added.add((virtual_rank, place))
            self._waiting_bytes -= bucket.row.nbytes
            self._changed.notify_all()
        if last:
            self._spread(place)
        elif (target := self._owners[virtual_rank + 1]) != me:
            self._send(place, target)

    def _settle(self, place: int) -> None:
        """Wait until what was sent of a bucket has left."""
        work, self._sends[place] = self._sends[place], None
        if work is not None:
            work.wait()

    def _spread(self, place: int) -> None:
        """Let a bucket's mean go round, from the last virtual rank's process to the next one and on to all others."""
        me, size, first = self._processes.rank, self._processes.size, self._owners[-1]
        if me != first:
            self._settle(place)
            self._receive(place, (me - 1) % size)
        if (target := (me + 1) % size) != first:
            self._send(place, target)

    def _send(self, place: int, target: int) -> None:
        row = self._buckets[place].row.view(torch.uint8)
        self._sends[place] = dist.isend(row, dst=target, group=self._processes.job.side, tag=self._processes.tag)

    def _receive(self, place: int, source: int) -> None:
        row = self._buckets[place].row.view(torch.uint8)
        dist.recv(row, src=source, group=self._processes.job.side, tag=self._processes.tag)


def _tell(mean: "weakref.ref[OrderedMean]", name: str, _: Tensor) -> None:
    if (there := mean()) is not None:
        there._note(name)


def ordered_mean(
    group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # exported only where torch.distributed is available
) -> torch.futures.Future[Tensor]:
    """Average a DDP bucket over the ranks in rank order: ``model.register_comm_hook(None, ordered_mean)``.

    With one logical worker per process, this is what :class:`OrderedMean` computes, so a plain DDP script with this hook
    is the run that an elastic one can be compared with.
    """
    buffer = bucket.buffer()
    rows = [torch.empty_like(buffer) for _ in range(dist.get_world_size(group))]

    def finish(_: torch.futures.Future[list[Tensor]]) -> Tensor:
        total = rows[0]
        for row in rows[1:]:
            total.add_(row)
        return total.div_(len(rows))

    future: torch.futures.Future[Tensor] = (
        dist.all_gather(rows, buffer, group=group, async_op=True).get_future().then(finish)
    )
    return future
