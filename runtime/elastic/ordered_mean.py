"""Gradients of all logical workers (ESTs), summed in an order that does not depend on where they ran. Start at
:class:`OrderedMean`. A worker's number is its *virtual rank*; its part of a step, on one process, is its *turn*.

Addition of floating-point numbers is not associative, so the workers' gradients are always added as ((g0 + g1) + g2) +
g3. A process that runs virtual ranks 1 and 3 needs g2 added between them, so it cannot sum up its own first. Instead
the partial sum travels: the process of virtual rank r receives it from that of r - 1, adds its own gradient, and sends
it to that of r + 1 while the next turn computes. Gradients travel in buckets. Virtual ranks are numbered in the order
in which turns end (:func:`.processes.divide`).
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
    """Parameters whose gradients are sent as one message."""

    parts: list[tuple[int, nn.Parameter, int]]
    """(index among all parameters, parameter, offset of its first element in ``row``)."""
    row: Tensor
    """The partial sum of the flattened gradients, then their mean, (elements,); on the host."""
    missing: int = 0
    """Number of gradients that the present backward pass has not computed yet."""
    seen: set[int] = field(default_factory=set)
    """Ids of the parameters whose gradients the turn has computed."""

    def view(self, parameter: nn.Parameter, offset: int) -> Tensor:
        """Return the part of ``row`` from ``offset`` on that belongs to ``parameter``, as a view of the parameter's shape."""
        return self.row[offset : offset + parameter.numel()].view(parameter.shape)

    def add(self, gradients: list[Tensor | None], *, first: bool) -> None:
        """Add a turn's gradients, in the order of ``parts`` (None: zeros), to ``row``.

        With ``first``, for the first turn of a step, they overwrite ``row``, which still holds the last step's mean.
        """
        for (_, parameter, offset), gradient in zip(self.parts, gradients, strict=True):
            target = self.view(parameter, offset)
            if first:
                target.zero_() if gradient is None else target.copy_(gradient)
            else:  # zero is added too, because it turns -0.0 into 0.0, as it does on any other placement
                target.add_(0.0 if gradient is None else gradient.to(target.device))


class OrderedMean:
    """Sums the gradients of each turn in virtual-rank order, and sets ``.grad`` to the mean over all logical workers' turns.

    For each turn call :meth:`begin`, optionally :meth:`expect`, run the backward passes, and call :meth:`take`; after
    the step's last turn call :meth:`finish`. Buckets are recorded in the first step, in the order in which virtual rank
    0's gradients become ready, and do not change. Sums are elementwise, so buckets decide which gradients share a
    message, but not the bits.

    A thread receives, adds and sends while the main thread computes; it lives from the first turn of a step to its end.
    Invariant: after :meth:`expect`, a backward pass starts only when at most one bucket of the turn before is not added
    yet. So memory does not depend on the number of workers: it holds the gradients of a turn, one set of sums, and a
    bucket. (Without :meth:`expect` each bucket waits, when its gradients are complete, for the same bucket of the turn
    before.)

    Args:
        parameters: by name; those that do not require gradients are left out.
        processes: which process runs which logical workers.
        turns_per_worker: micro-batches per logical worker and step, by whose number the sum is divided too.
        bucket_bytes: most bytes of gradients in a message; a larger gradient travels alone.
        buckets: parameter names of each bucket, from a checkpoint; None: record them in the first step.
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
        """Register hooks on the parameters, to see when their gradients are ready; the first bucket starts the thread."""
        self._parameters = {name: value for name, value in parameters.items() if value.requires_grad}
        self._processes = processes
        self._owners = processes.owners
        self._divisor = processes.max_workers * turns_per_worker
        self._bucket_bytes = bucket_bytes
        self._buckets: list[Bucket] = []
        self.bucket_names = buckets
        self._has_gradient = torch.zeros(len(processes.local), len(self._parameters), dtype=torch.bool)
        # Names in the order in which their gradients became ready, until the buckets are known: a dict as an ordered set.
        self._ready: dict[str, None] = {}
        self._bucket_index: dict[str, int] = {}
        # Guards the next four fields, which both threads use.
        self._changed = threading.Condition()
        # By (virtual rank, bucket index): gradients in the order of the bucket's parts that wait to be added.
        self._submitted: dict[tuple[int, int], list[Tensor | None]] = {}
        # (virtual rank, bucket index) of the gradients that the thread has added in this step.
        self._added: set[tuple[int, int]] = set()
        self._unadded_bytes = 0  # of the gradients in `_submitted`
        self._failure: BaseException | None = None  # what has ended the thread
        self._thread: threading.Thread | None = None
        self._turn: int | None = None  # the virtual rank whose turn it is; None between turns
        self._expected = False  # whether `expect` has announced that the next backward pass is the turn's last
        self._sends: list[dist.Work | None] = []  # the pending send of each bucket; None: none is pending
        # Python cannot collect a cycle through a tensor's hook, and this object holds the tensors and the connections.
        reference = weakref.ref(self)
        self._gradient_hooks = [
            value.register_post_accumulate_grad_hook(partial(_note_gradient, reference, name))
            for name, value in self._parameters.items()
        ]

    def clear(self) -> None:
        """Set ``.grad`` of all parameters to None."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def is_usable(self) -> bool:
        """Return whether there are gradients and all are finite; otherwise a loss scaler (AMP) skips the update."""
        gradients = [value.grad for value in self._parameters.values() if value.grad is not None]
        return bool(gradients) and all(bool(gradient.isfinite().all()) for gradient in gradients)

    def close(self) -> None:
        """Remove the hooks from the parameters; :meth:`take` still works, but nothing is submitted ahead of it."""
        for hook in self._gradient_hooks:
            hook.remove()
        self._gradient_hooks = []

    def begin(self, virtual_rank: int) -> None:
        """Begin the turn of virtual rank ``virtual_rank``, whose gradients come next."""
        self._turn = virtual_rank
        self._expected = False

    def expect(self) -> None:
        """Announce the last backward pass of the turn: each bucket goes to the thread as soon as its gradients are ready.

        ``.grad`` must not be changed after that backward pass. Blocks until at most one bucket of earlier turns is not
        added yet. Raises RuntimeError if the thread has failed.
        """
        # A single process sends nothing, and in the first turn the buckets are not known yet.
        self._expected = self._processes.size > 1 and bool(self._buckets)
        with self._changed:  # otherwise memory would hold the gradients of two turns
            self._changed.wait_for(lambda: self._unadded_bytes <= self._bucket_bytes or self._failure is not None)
        self._raise_failure()
        for bucket in self._buckets:
            bucket.missing = len(bucket.parts)
            bucket.seen = set()

    def _take_gradient(self, name: str) -> None:
        """Note that a backward pass has computed the gradient of the parameter ``name``.

        After :meth:`expect` its bucket is submitted if no other gradient is missing; a second gradient of the same
        parameter raises InputError. Without it, this only waits for the same bucket of the turn before. In the first
        turn, where buckets are not known yet, the order of gradients is recorded.
        """
        if not self._buckets:
            self._ready.setdefault(name)
            return
        if self._turn is None:
            return
        bucket_index = self._bucket_index[name]
        bucket = self._buckets[bucket_index]
        self._wait_for_turn_before(self._turn, bucket_index)
        if not self._expected:
            return
        parameter_id = id(self._parameters[name])
        if parameter_id in bucket.seen:
            problem = "gets its gradient in more than one backward pass"
            raise InputError(f"model:{name}", problem, "write the loop with trainer.batches and turn_done")
        bucket.seen.add(parameter_id)
        bucket.missing -= 1
        if not bucket.missing:
            self._submit(self._turn, bucket_index)

    def take(self, virtual_rank: int) -> None:
        """Add the gradients of a logical worker's whole turn to the sum, and clear ``.grad``; call it in virtual-rank order.

        A single process adds them at once; otherwise the buckets that the backward pass has not submitted go to the
        thread. The first call of all makes the buckets, with a message of all processes. Raises InputError for sparse
        gradients, and RuntimeError if the thread has failed.
        """
        self._lay_out_buckets()
        has_gradient = [value.grad is not None for value in self._parameters.values()]
        self._has_gradient[self._processes.local.index(virtual_rank)] = torch.tensor(has_gradient)
        was_expected = self._expected
        self._turn = None
        self._expected = False
        for bucket_index, bucket in enumerate(self._buckets):
            was_submitted = was_expected and not bucket.missing  # in the backward pass
            if self._processes.size == 1:
                bucket.add([parameter.grad for _, parameter, _ in bucket.parts], first=virtual_rank == 0)
            elif not was_submitted:
                self._wait_for_turn_before(virtual_rank, bucket_index)
                self._submit(virtual_rank, bucket_index)
        self.clear()

    def finish(self, notes: Tensor) -> Tensor:
        """Set ``.grad`` of every parameter to the mean, or to None where no worker had a gradient; return all workers' notes.

        All processes call this together; it blocks until all means are there. ``.grad`` may be a view of the bucket's
        row, which the next step overwrites. Raises RuntimeError if the thread has failed.

        ``notes``: float64 (workers here, n), further numbers that each worker of this process sends along, such as its
        loss. The result has those of all workers: shape (max_workers, n), in virtual-rank order.
        """
        # One message for both: the first columns say whether each parameter has a gradient, the others are the notes.
        parameter_count = len(self._parameters)
        table = self._processes.gather_rows(torch.cat([self._has_gradient.double(), notes], dim=1))
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._raise_failure()
            self._added.clear()
        else:  # a single process has no thread, which would have divided
            for bucket in self._buckets:
                bucket.row.div_(self._divisor)
        has_any_gradient = (table[:, :parameter_count].sum(0) > 0).tolist()  # by parameter index
        for bucket in self._buckets:
            for index, parameter, offset in bucket.parts:
                if has_any_gradient[index]:
                    mean = bucket.view(parameter, offset)
                    is_usable_view = parameter.is_contiguous() and parameter.device == mean.device
                    parameter.grad = mean if is_usable_view else torch.empty_like(parameter).copy_(mean)
        return table[:, parameter_count:]

    def _lay_out_buckets(self) -> None:
        """Make the buckets, if there are none yet: of a checkpoint's names or those that virtual rank 0's process recorded.

        All processes do so at the end of their first turn. Raises InputError for sparse gradients.
        """
        if self._buckets:
            return
        for name, parameter in self._parameters.items():
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise InputError(f"model:{name}", "has a sparse gradient", "use dense gradients (sparse=False)")
        if self._processes.size == 1:  # nothing is sent, so nobody needs to know when gradients are ready
            self.close()
        if self.bucket_names is None:
            # Gradients may become ready in another order elsewhere, so all use what virtual rank 0's process recorded.
            recorded = self._processes.job.gather(json.dumps(self._recorded_buckets()).encode())
            self.bucket_names = json.loads(recorded[self._owners[0]])
        index_of = {name: index for index, name in enumerate(self._parameters)}
        for names in self.bucket_names or []:
            parts: list[tuple[int, nn.Parameter, int]] = []
            offset = 0
            for name in names:
                parameter = self._parameters[name]
                self._bucket_index[name] = len(self._buckets)
                parts.append((index_of[name], parameter, offset))
                offset += parameter.numel()
            self._buckets.append(Bucket(parts, torch.zeros(offset, dtype=parameter.dtype)))
        self._sends = [None] * len(self._buckets)

    def _recorded_buckets(self) -> list[list[str]]:
        """Return parameter names by bucket, in the order in which gradients became ready.

        Parameters without a gradient come last, in reversed order of the model. All parameters of a bucket have one
        dtype and device and, if there are several, at most ``bucket_bytes`` of gradients.
        """
        names = [*self._ready, *(name for name in reversed(self._parameters) if name not in self._ready)]
        buckets: list[list[str]] = []
        open_buckets: dict[Any, tuple[list[str], int]] = {}  # (names, bytes) by (dtype, device)
        for name in names:
            parameter = self._parameters[name]
            size = parameter.numel() * parameter.element_size()
            bucket, held_bytes = open_buckets.get((parameter.dtype, parameter.device), ([], 0))
            if not bucket or held_bytes + size > self._bucket_bytes:
                bucket = []
                held_bytes = 0
                buckets.append(bucket)
            bucket.append(name)
            open_buckets[parameter.dtype, parameter.device] = (bucket, held_bytes + size)
        return buckets

    def _submit(self, virtual_rank: int, bucket_index: int) -> None:
        """Give a bucket's gradients of the turn of ``virtual_rank`` to the thread, which is started if it does not run."""
        bucket = self._buckets[bucket_index]
        with self._changed:
            self._submitted[virtual_rank, bucket_index] = [parameter.grad for _, parameter, _ in bucket.parts]
            self._unadded_bytes += bucket.row.nbytes
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._reduce_step, name="ordered-chain", daemon=True)
            self._thread.start()

    def _wait_for_turn_before(self, virtual_rank: int, bucket_index: int) -> None:
        """Block until this process's gradients of the same bucket in its turn before have been added.

        So a bucket's gradients of two turns are never kept at once, which bounds the memory. Raises RuntimeError if the
        thread has failed.
        """
        turn_index = self._processes.local.index(virtual_rank)
        if turn_index == 0:
            return
        before = (self._processes.local[turn_index - 1], bucket_index)
        with self._changed:
            self._changed.wait_for(lambda: before in self._added or self._failure is not None)
        self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise RuntimeError in the main thread if an error has ended the other thread."""
        if self._failure is not None:
            raise RuntimeError(f"the chain of gradients broke: {self._failure}") from self._failure

    def _reduce_step(self) -> None:
        """Add this process's gradients to the travelling partial sums, bucket by bucket, then receive and forward the means.

        This is the body of the thread. An exception goes into ``_failure``, for the main thread to raise.
        """
        try:
            with torch.no_grad():
                for virtual_rank in self._processes.local:
                    for bucket_index in range(len(self._buckets)):
                        self._add(virtual_rank, bucket_index)
                for bucket_index in range(len(self._buckets)):
                    if self._owners[-1] != self._processes.rank:  # the last worker's process has sent them in `_add`
                        self._broadcast_mean(bucket_index)
                for bucket_index in range(len(self._buckets)):
                    self._wait_for_send(bucket_index)
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _add(self, virtual_rank: int, bucket_index: int) -> None:
        """Add one turn's gradients of a bucket to its partial sum, which comes from the process of the virtual rank before.

        Blocks until both are there. The sum is sent on to the process of the next virtual rank. After the last virtual
        rank it is complete: it is divided, and the mean is sent to all.
        """
        bucket = self._buckets[bucket_index]
        own_rank = self._processes.rank
        self._wait_for_send(bucket_index)  # receiving overwrites the row that is being sent
        if virtual_rank > 0 and (source := self._owners[virtual_rank - 1]) != own_rank:
            self._receive(bucket_index, source)
        with self._changed:
            self._changed.wait_for(lambda: (virtual_rank, bucket_index) in self._submitted)
            gradients = self._submitted.pop((virtual_rank, bucket_index))
        bucket.add(gradients, first=virtual_rank == 0)
        del gradients  # frees the memory before the main thread is told below
        is_last = virtual_rank == len(self._owners) - 1
        if is_last:
            bucket.row.div_(self._divisor)
        with self._changed:
            self._added.add((virtual_rank, bucket_index))
            self._unadded_bytes -= bucket.row.nbytes
            self._changed.notify_all()
        if is_last:
            self._broadcast_mean(bucket_index)
        elif (target := self._owners[virtual_rank + 1]) != own_rank:
            self._send(bucket_index, target)

    def _wait_for_send(self, bucket_index: int) -> None:
        """Block until the pending send of a bucket, if any, is complete, so that its row may change."""
        work = self._sends[bucket_index]
        self._sends[bucket_index] = None
        if work is not None:
            work.wait()

    def _broadcast_mean(self, bucket_index: int) -> None:
        """Pass a bucket's mean around the ring of processes: receive it, except at its source, and send it on.

        The source is the process of the last virtual rank, which completes the sum; the one before it in the ring does
        not send.
        """
        rank = self._processes.rank
        size = self._processes.size
        source = self._owners[-1]
        if rank != source:
            self._wait_for_send(bucket_index)  # the row may still be on its way as a partial sum
            self._receive(bucket_index, (rank - 1) % size)
        if (target := (rank + 1) % size) != source:
            self._send(bucket_index, target)

    def _send(self, bucket_index: int, target: int) -> None:
        """Start to send a bucket's row to the process of rank ``target``, as bytes, so that any dtype can be sent."""
        row = self._buckets[bucket_index].row.view(torch.uint8)
        self._sends[bucket_index] = dist.isend(row, dst=target, group=self._processes.job.side, tag=self._processes.tag)

    def _receive(self, bucket_index: int, source: int) -> None:
        """Overwrite a bucket's row with the one from the process of rank ``source``; blocks until it has come."""
        row = self._buckets[bucket_index].row.view(torch.uint8)
        dist.recv(row, src=source, group=self._processes.job.side, tag=self._processes.tag)


def _note_gradient(reference: "weakref.ref[OrderedMean]", name: str, _: Tensor) -> None:
    """Tell the OrderedMean, if it still exists, that the gradient of the parameter ``name`` is ready: a parameter's hook."""
    if (mean := reference()) is not None:
        mean._take_gradient(name)


def ordered_mean(
    group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # exported only where torch.distributed is available
) -> torch.futures.Future[Tensor]:
    """Average a DDP bucket over the ranks in rank order: ``model.register_comm_hook(None, ordered_mean)``.

    With one logical worker per process the result equals that of :class:`OrderedMean` bit by bit, so a plain DDP script
    with this hook is the reference for an elastic run.
    """
    buffer = bucket.buffer()
    # All rows are gathered, because an all-reduce would add them in an order of its own.
    rows = [torch.empty_like(buffer) for _ in range(dist.get_world_size(group))]

    def finish(_: torch.futures.Future[list[Tensor]]) -> Tensor:
        """Return the mean of all ranks' rows, added in rank order."""
        total = rows[0]
        for row in rows[1:]:
            total.add_(row)
        return total.div_(len(rows))

    future: torch.futures.Future[Tensor] = (
        dist.all_gather(rows, buffer, group=group, async_op=True).get_future().then(finish)
    )
    return future
