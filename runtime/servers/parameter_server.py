"""A parameter server: one process that keeps a share of the parameters. Start at :class:`ParameterServer`.

It answers each worker's pull with its parameters in the plan's order, takes the gradients in whatever order they come,
and updates a parameter when all workers' gradients are in, summed in rank order: the trained bits do not depend on the
order of any transfer. Other synchronisation policies override :meth:`ParameterServer.may_send`,
:meth:`ParameterServer.blockers` and :meth:`ParameterServer.accept`; :mod:`ddltool.runtime.servers` has them.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddltool.runtime.servers.ends import JOIN_S, End
from ddltool.runtime.servers.transfers import IDLE_S, TIMEOUT_S, TransferError, TransferPlan, check_values, listing
from ddltool.runtime.servers.wire import CLOSE, CLOSED, HEADER, PULL, STEP, Gate, Wire

Update = Callable[[str, Tensor, Tensor], Tensor]
"""From a parameter's name, value and mean gradient to its new value, which must be a new tensor."""


@dataclass(kw_only=True)
class MomentumSGD:
    """SGD with momentum and weight decay, bit for bit as ``torch.optim.SGD`` computes it."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    _buffers: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, name: str, value: Tensor, gradient: Tensor) -> Tensor:
        """Return the new value of parameter ``name``."""
        if self.weight_decay:
            gradient = gradient.add(value, alpha=self.weight_decay)
        if self.momentum:
            before = self._buffers.get(name)
            gradient = gradient.clone() if before is None else before.mul_(self.momentum).add_(gradient)
            self._buffers[name] = gradient
        return value.add(gradient, alpha=-self.lr)


@dataclass(frozen=True, slots=True)
class _Step:
    """The gradients that are expected from one worker in one step, receives posted."""

    clock: int
    headers: list[tuple[Tensor, dist.Work]]
    payloads: dict[int, tuple[Tensor, dist.Work]]


class ParameterServer(End):
    """One server of a plan, bulk synchronous (BSP): version v of a parameter needs every worker's v-th gradient.

    Attributes:
        values: this server's parameters by name; replaced, never written to, so a transfer under way keeps its bits.
        version: how often each has been updated.
        sent: per worker, the names handed to the transport in its last pull, in order.
    """

    def __init__(
        self,
        values: nn.Module | Mapping[str, Tensor],
        plan: TransferPlan,
        update: Update,
        *,
        timeout_s: float = TIMEOUT_S,
        idle_s: float = IDLE_S,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Take this rank's share of ``values`` as version 0 and connect; a collective over all ranks.

        ``timeout_s``: how long a transfer that a worker asked for may wait for its turn, and how long its bytes may
        take. ``idle_s``: how long a worker may ask for nothing. ``check`` may refuse with InputError, which then all
        ranks raise. Raises InputError as :class:`Wire` does.
        """
        given = dict(values.named_parameters()) if isinstance(values, nn.Module) else dict(values)
        self.plan, self._update, self._timeout_s, self._idle_s = plan, update, timeout_s, idle_s

        def check_all() -> None:
            check_values(plan, given)
            check()

        wire = Wire(plan, timeout_s, check_all)
        self.server = plan.server_of_rank(wire.rank)
        super().__init__(wire, f"server {self.server} (rank {wire.rank})")
        mine = [slot for slot in plan.slots if slot.server == self.server]
        self.values = {slot.name: given[slot.name].detach().clone().contiguous() for slot in mine}
        self.version = dict.fromkeys(self.values, 0)
        self.sent: list[tuple[str, ...]] = [()] * plan.seats
        self._gradients: dict[str, dict[int, Tensor]] = {name: {} for name in self.values}
        self._index = {slot.name: index for index, slot in enumerate(plan.slots)}
        self._closed: set[int] = set()
        self._accepting = threading.RLock()
        self._steps: list[queue.SimpleQueue[_Step | None]] = [queue.SimpleQueue() for _ in range(plan.seats)]
        self._lanes += self._steps

    def may_send(self, worker: int, clock: int, name: str) -> bool:
        """Return whether ``worker``, which has pushed ``clock`` steps, may have ``name`` now; ``changed`` is held."""
        return self.version[name] >= clock or not self.plan.slots[self._index[name]].trainable

    def blockers(self, worker: int, clock: int, name: str) -> list[int]:
        """Return the workers whose gradients :meth:`may_send` waits for; ``changed`` is held."""
        return [other for other in range(self.plan.workers) if other not in self._gradients[name]]

    def accept(self, worker: int, clock: int, name: str, gradient: Tensor) -> None:
        """Take one gradient; called for one at a time on this server, ``changed`` not held."""
        with self.changed:
            together = self._gradients[name]
            together[worker] = gradient
            if len(together) < self.plan.workers:
                return
        total = together[0]
        for other in range(1, self.plan.workers):
            total = total.add_(together[other])
        self.publish(name, self._update(name, self.values[name], total.div_(self.plan.workers)))

    def publish(self, name: str, value: Tensor) -> None:
        """Make ``value`` the next version of parameter ``name``, and let the transfers that wait for it go."""
        with self.changed:
            self.values[name] = value
            self.version[name] += 1
            self._gradients[name] = {}
            self.changed.notify_all()

    def to_send(self, worker: int, name: str) -> tuple[Tensor, int]:
        """Return the value of ``name`` that ``worker`` gets, and its version; ``changed`` is held."""
        return self.values[name], self.version[name]

    def other_request(self, worker: int, kind: int, clock: int) -> None:
        """Answer a request that is none of CLOSE, PULL and STEP. Raises TransferError: BSP knows no others."""
        raise TransferError(f"{self._title}: worker {worker} (rank {worker}) sent request {kind}, which is unknown")

    def left(self, worker: int) -> None:
        """Note that ``worker`` asks for nothing more; its last gradients may be on their way."""
        with self.changed:
            self._closed.add(worker)
            self.changed.notify_all()

    def serve(self) -> dict[str, Tensor]:
        """Serve until every worker has closed and return the final values.

        Raises TransferError when a transfer waits longer than the timeout, a worker goes away, or one closes whose
        gradients another waits for. All connections are closed then.
        """
        try:
            for worker in range(self.plan.workers):
                self._listen_to(self.plan.rank_of_worker(worker))
                self._start(self._answer, worker)
                self._start(self._collect, worker)
            self._until_done()
        except BaseException as error:  # an interruption ends the others as well
            self._fail(TransferError(f"{self._title} was ended by {type(error).__name__}"))
            raise
        finally:
            self._join()
        self._raise_what_ended_it()
        return self.values

    def _until_done(self) -> None:
        """Wait for the threads to end, or for a failure."""
        with self.changed:
            self.changed.wait_for(lambda: self._failing or self._ended.issuperset(self._threads))

    def _listen(self, peer: int) -> None:
        """Fail when a worker goes away without having closed."""
        super()._listen(peer)
        worker = self.plan.worker_of_rank(peer)
        with self.changed:  # its last request may still be on its way
            if self.changed.wait_for(lambda: self._failing or worker in self._closed, JOIN_S):
                return
        raise TransferError(f"{self._title}: {CLOSED}: worker {worker} (rank {peer})", peer)

    def _answer(self, worker: int) -> None:
        """Answer one worker's requests, one transfer at a time, until it closes."""
        request = torch.empty(HEADER, dtype=torch.int64)
        pull, peer = 0, self.plan.rank_of_worker(worker)
        while True:
            with self._telling(f"while waiting for a request of worker {worker} (rank {peer})"):
                tag = self._wire.request_tag
                self._wire.wait(self._wire.post("pull", request, peer, tag), peer, self._idle_s)
            kind, clock = request.tolist()
            if kind == CLOSE:
                break
            if kind not in (PULL, STEP):
                self.other_request(worker, kind, clock)
                continue
            if kind == STEP:
                with self._telling(f"while asking worker {worker} (rank {peer}) for gradients"):
                    self._steps[worker].put(self._expect(worker, clock))
            self._hand_over(worker, clock, pull)
            pull += 1
        self._steps[worker].put(None)
        self.left(worker)

    def _hand_over(self, worker: int, clock: int, pull: int) -> None:
        """Send this server's parameters in order: the counter, and what each transfer waits for."""
        names, peer = [slot.name for slot in self.plan.slots], self.plan.rank_of_worker(worker)

        def ready(index: int) -> bool:
            return self.may_send(worker, clock, names[index])

        def check(index: int) -> None:
            self._raise_failure()
            gone = [] if ready(index) else sorted(self._closed.intersection(self.blockers(worker, clock, names[index])))
            if gone:
                raise TransferError(self._waits(worker, clock, names[index], gone) + ", which has closed")

        order = self.plan.queue(self.server, worker, pull)
        gate = Gate(order, ready, self.changed)
        sent = []
        while gate.counter < len(order):
            index = gate.take(self._timeout_s, check)
            name = names[order[gate.counter]]
            if index is None:
                with self.changed:
                    text = self._waits(worker, clock, name, self.blockers(worker, clock, name))
                    behind = [names[key] for key in gate.waiting()]
                more = f"; {listing(behind)} wait behind it" if behind else ""
                raise TransferError(f"{text}, for {self._timeout_s:g} s{more}")
            with self.changed:
                value, version = self.to_send(worker, name)
            with self._telling(f"while {name} went to worker {worker} (rank {peer})"):
                header = torch.tensor([index, version])
                self._wire.send("pull", header, peer, self._wire.header_tag, self._timeout_s)
                self._wire.send("pull", value, peer, index, self._timeout_s)
            gate.passed()
            sent.append(name)
        self.sent[worker] = tuple(sent)

    def _waits(self, worker: int, clock: int, name: str, blockers: list[int]) -> str:
        """Return which transfer waits for which."""
        missing = listing([f"worker {other} (rank {self.plan.rank_of_worker(other)})" for other in blockers])
        what = f"its gradient of step {clock - 1} from {missing}" if blockers else "its update"
        return f"{self._title}: {name} for worker {worker} (rank {self.plan.rank_of_worker(worker)}) waits for {what}"

    def _expect(self, worker: int, clock: int) -> _Step:
        """Post the receives of one worker's gradients."""
        tag, indices = self._wire.header_tag, self.plan.gradients(self.server)
        peer = self.plan.rank_of_worker(worker)
        payloads = {}
        for index in indices:
            slot = self.plan.slots[index]
            buffer = torch.empty(slot.shape, dtype=getattr(torch, slot.dtype))
            payloads[index] = buffer, self._wire.post("push", buffer, peer, index)
        headers = []
        for _ in indices:
            header = torch.empty(HEADER, dtype=torch.int64)
            headers.append((header, self._wire.post("push", header, peer, tag)))
        return _Step(clock, headers, payloads)

    def _collect(self, worker: int) -> None:
        """Take one worker's gradients as they come, until it closes."""
        peer = self.plan.rank_of_worker(worker)
        while (step := self._steps[worker].get()) is not None:
            for header, announced in step.headers:
                with self._telling(f"while waiting for gradients of worker {worker} (rank {peer})"):
                    self._wire.wait(announced, peer, self._idle_s)
                index, clock = header.tolist()
                name = self.plan.slots[index].name
                with self._telling(f"while the gradient of {name} came from worker {worker} (rank {peer})"):
                    buffer, arrival = step.payloads.pop(index)
                    self._wire.wait(arrival, peer, self._timeout_s)
                with self._accepting:
                    self.accept(worker, clock, name, buffer)
