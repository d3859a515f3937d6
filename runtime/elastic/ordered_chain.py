"""The sum over logical workers in virtual-rank order, as a chain through the processes. Start at :class:`ChainedMean`.

((g0 + g1) + g2) + g3 allows no local sums: a process that runs ranks 1 and 3 must wait for g2 between them. So the
partial sum itself travels. The ranks are dealt out in the order in which turns end (:func:`.elastic_group.divide`), the
process of rank r adds its gradient to what comes from the process of rank r - 1, bucket by bucket, and passes it on
while the next turn computes. A process holds one sum and the gradients of one turn, however many workers it has.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddltool.errors import InputError
from ddltool.runtime.elastic.ordered_buckets import OrderedMean, add_gradient
from ddltool.runtime.elastic.processes import Processes


class ChainedMean(OrderedMean):
    """The mean in rank order, with gradients on their way during backward passes. For parameters on the host.

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
