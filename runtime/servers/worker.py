"""The worker's end of ordered transfers: pull while the forward pass runs, push while the backward pass runs.

Start at :class:`Worker`. A module's forward pass waits for the parameters that it owns and for no others; a gradient is
pushed as soon as it is complete. Parameters are received in place. Buffers (batch-norm statistics) stay local.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddltool.errors import InputError
from ddltool.runtime.servers.ends import End
from ddltool.runtime.servers.transfers import TIMEOUT_S, TransferError, TransferPlan, check_values, listing
from ddltool.runtime.servers.wire import CLOSE, HEADER, PULL, REFUSED, STEP, Gate, Wire

# A server gives up on a transfer after the timeout and says why; the worker waits a little longer, to hear it.
GRACE_S = 2.0
PushOrder = Literal["ready", "reverse", "step"]
PUSH_ORDERS = ("ready", "reverse", "step")
# Modules that only call their children, which then wait for themselves. Other modules of torch.nn may use the
# parameters of their children without calling them (MultiheadAttention does).
_CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """One parameter's arrival: its version and the seconds since the pull was asked for."""

    name: str
    server: int
    version: int
    time_s: float


@dataclass(frozen=True, slots=True)
class _Pull:
    """The receives that are posted for one server's parameters in one pull."""

    kind: int
    clock: int
    start: float
    headers: list[tuple[Tensor, dist.Work]]
    payloads: dict[int, tuple[Tensor, dist.Work]]


class Worker(End):
    """A training process of a plan; see :mod:`ddltool.runtime.servers.transfers` for a loop.

    Attributes:
        arrivals: what came in the last pull, in the order in which it came.
        clock: the number of steps whose gradients have been pushed.
    """

    def __init__(
        self, model: nn.Module, plan: TransferPlan, *, timeout_s: float = TIMEOUT_S, push: PushOrder = "ready"
    ) -> None:
        """Connect and hook the model; a collective over all ranks.

        ``push``: "ready" sends each channel's gradients as they become ready, "reverse" holds them to the reverse of
        the plan's order (of the registration order under a random seed). Both send while the backward pass runs, so
        ``.grad`` must not be changed after it. "step" sends what ``.grad`` holds at the end of the step: after clipping
        and scaling, and after any number of backward passes. Raises InputError as :class:`Wire` does, and for another
        ``push``.
        """
        self.model, self.plan, self._timeout_s, self._push_order = model, plan, timeout_s, push
        self._parameters = dict(model.named_parameters())
        wire = self._connect(timeout_s)
        self.rank = plan.worker_of_rank(wire.rank)
        super().__init__(wire, f"worker {self.rank} (rank {wire.rank})")
        self.clock = 0
        self.arrivals: list[Arrival] = []
        self._names = [slot.name for slot in plan.slots]
        self._arrived = set(range(len(plan.slots)))
        self._awaited: set[int] = set()
        self._gradients: dict[int, Tensor] = {}
        self._offered: dict[int, tuple[Tensor, int]] = {}  # `.grad` as the hook saw it, and its version then
        self._pushed = 0
        self._pushing = False
        self._closed: set[int] = set()
        self._reported = False
        self._orders: list[list[int]] = [[] for _ in range(plan.servers)]
        self._pulls: list[queue.SimpleQueue[_Pull | None]] = [queue.SimpleQueue() for _ in range(plan.servers)]
        self._pushes: list[queue.SimpleQueue[Gate | None]] = [queue.SimpleQueue() for _ in range(plan.servers)]
        self._handles = self._hook()
        self._lanes += [*self._pulls, *self._pushes]
        for server in range(plan.servers):
            self._listen_to(plan.rank_of_server(server))
            self._start(self._receive, server)
            self._start(self._push, server)

    def _connect(self, timeout_s: float) -> Wire:
        return Wire(self.plan, timeout_s, self._check)

    def _check(self) -> None:
        """Raise InputError for arguments that do not fit; all ranks then refuse."""
        if self._push_order not in PUSH_ORDERS:
            raise InputError("push", f"is {self._push_order}", f"known: {', '.join(PUSH_ORDERS)}")
        check_values(self.plan, self._parameters)

    @contextmanager
    def step(self, *, push: bool = True) -> Iterator[Self]:
        """Pull all parameters, run the body, and push all gradients (``push`` False: inference, nothing is pushed).

        The body runs one forward and, with ``push``, one backward pass. On leaving, every parameter has arrived and
        every gradient is with the transport; a trainable parameter without a gradient has pushed zeros, and ``grad`` is
        None again. Raises TransferError when a transfer fails, and InputError when ``.grad`` was changed after it had
        been offered to the transport; an exception of the body ends the job's transfers.
        """
        self._demand_open()
        try:
            self._begin(STEP if push else PULL)
            yield self
            self._finish()
        except BaseException as error:
            self._reported = True
            self._fail(TransferError(f"{self._title} left a step with {type(error).__name__}: {error}"))
            raise

    def pull(self) -> None:
        """Pull all parameters and wait until they are here; after the last step this brings the trained values."""
        with self.step(push=False):
            pass

    def close(self) -> None:
        """Tell the servers that nothing more will be asked for, and remove the hooks. Idempotent.

        Raises TransferError when the job has failed and nothing has said so to the caller yet.
        """
        for handle in self._handles:
            handle.remove()
        self._handles = []
        try:
            if self._threads and not self._failing:
                with self._requesting(), self._telling("while closing"):
                    for server in range(self.plan.servers):
                        self._abandonable(partial(self._say_goodbye, server))
        except TransferError:
            self._reported = True
            raise
        finally:
            for lane in self._lanes:
                lane.put(None)
            self._join()
        if not self._reported:
            self._reported = True
            self._raise_what_ended_it()

    def _say_goodbye(self, server: int) -> None:
        self._ask(server, CLOSE, self.clock)
        with self.changed:
            self._closed.add(self.plan.rank_of_server(server))
            self.changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._reported = True
            self._fail(TransferError(f"{self._title} was ended by {type(error).__name__}: {error}"))
        self.close()

    def _hook(self) -> list[Any]:
        """Register what waits before a forward pass and what pushes after a gradient is complete."""
        index = {id(self._parameters[name]): place for place, name in enumerate(self._names)}
        handles: list[Any] = []
        for module in self.model.modules():
            whole = type(module).__module__.startswith("torch.nn.") and not isinstance(module, _CONTAINERS)
            owned = [index[id(value)] for value in module.parameters(recurse=whole) if id(value) in index]
            if owned:
                wait = partial(self._await, frozenset(owned))
                handles.append(module.register_forward_pre_hook(lambda module, args, wait=wait: wait()))
        for place, slot in enumerate(self.plan.slots):
            if slot.trainable:
                ready = partial(self._ready, place)
                handles.append(self._parameters[slot.name].register_post_accumulate_grad_hook(ready))
        return handles

    def _begin(self, kind: int) -> None:
        with self.changed:
            self._raise_failure()
            self._arrived, self._awaited, self.arrivals = set(), set(), []
            self._gradients, self._offered, self._pushed, self._pushing = {}, {}, 0, kind == STEP
        start = time.perf_counter()
        for server, lane in enumerate(self._pulls):
            what = f"while asking server {server} (rank {self.plan.rank_of_server(server)})"
            with self._requesting(), self._telling(what):
                lane.put(self._expect(server, kind, start))
        for server, gates in enumerate(self._pushes):
            order = self.plan.gradients(server)
            self._orders[server] = list(order) if self._push_order == "reverse" else []
            if kind == STEP and order:
                gates.put(Gate(self._orders[server], self._gradients.__contains__, self.changed))

    def _expect(self, server: int, kind: int, start: float) -> _Pull:
        """Post the receives of one server's parameters."""
        peer = self.plan.rank_of_server(server)
        indices = self.plan.queue(server, self.rank, 0)
        payloads = {}
        for index in indices:
            value = self._parameters[self._names[index]].detach()
            in_place = value.is_contiguous() and value.device.type == "cpu"
            buffer = value if in_place else torch.empty(value.shape, dtype=value.dtype)
            payloads[index] = buffer, self._wire.post("pull", buffer, peer, index)
        headers = []
        for _ in indices:
            header = torch.empty(HEADER, dtype=torch.int64)
            headers.append((header, self._wire.post("pull", header, peer, self._wire.header_tag)))
        return _Pull(kind, self.clock, start, headers, payloads)

    def _ask(self, server: int, kind: int, clock: int) -> None:
        request = torch.tensor([kind, clock])
        peer = self.plan.rank_of_server(server)
        self._wire.send("pull", request, peer, self._wire.request_tag, self._timeout_s + GRACE_S)

    def _finish(self) -> None:
        """Wait for what has not arrived, push zeros where there is no gradient, and wait for the pushes."""
        self._wait_until(lambda: len(self._arrived) == len(self._names))
        if not self._pushing:
            return
        self._demand_unchanged()
        for index, slot in reversed(list(enumerate(self.plan.slots))):  # last layer first, as a backward pass has it
            if slot.trainable and index not in self._gradients:
                gradient = self._parameters[slot.name].grad if self._push_order == "step" else None
                if gradient is None:
                    gradient = torch.zeros(slot.shape, dtype=getattr(torch, slot.dtype))
                self._offer(index, _on_host(gradient))
        trainable = sum(slot.trainable for slot in self.plan.slots)
        self._wait_until(lambda: self._pushed == trainable)
        for name in self._names:
            self._parameters[name].grad = None
        self._gradients, self._offered, self._pushing = {}, {}, False
        self.clock += 1

    def _demand_unchanged(self) -> None:
        """Raise InputError when a gradient that was offered has been changed: anything between may have been sent."""
        for index, (offered, version) in self._offered.items():
            present = self._parameters[self._names[index]].grad
            if offered._version != version or (present is not None and present is not offered):
                problem = f"{self._names[index]}.grad was changed after the backward pass, while it was being pushed"
                remedy = 'clip and scale gradients with push="step", or scale the loss'
                raise InputError("worker.step", problem, remedy)

    def _await(self, wanted: frozenset[int]) -> None:
        """Wait for parameters: the hook before a module's forward pass."""
        self._awaited |= wanted
        if not wanted <= self._arrived or self._failure is not None:
            self._wait_until(lambda: wanted <= self._arrived)

    def _ready(self, index: int, parameter: Tensor) -> None:
        """Push a gradient: the hook after it has been accumulated."""
        name, gradient = self._names[index], parameter.grad
        if not self._pushing or gradient is None:
            return
        if index not in self._awaited:
            problem = f"uses {name} without calling the module that owns it, so nothing waited for its transfer"
            raise InputError("model", problem, "call the owning module in the forward pass")
        if self._push_order == "step":
            return
        if index in self._gradients:
            remedy = 'run one backward pass per step, or give push="step"'
            raise InputError("worker.step", f"{name} has a second gradient", remedy)
        self._offered[index] = gradient, gradient._version
        self._offer(index, _on_host(gradient))

    def _offer(self, index: int, gradient: Tensor) -> None:
        with self.changed:
            self._gradients[index] = gradient
            if self._push_order != "reverse":
                self._orders[self.plan.slots[index].server].append(index)
            self.changed.notify_all()

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Wait for the threads; each of their waits has a timeout, so this one needs none."""
        with self.changed:
            while not done():
                self._raise_failure()
                self.changed.wait()
            self._raise_failure()

    def _receive(self, server: int) -> None:
        """Ask for pulls and take what comes from one server, until closed."""
        peer = self.plan.rank_of_server(server)
        while (pull := self._pulls[server].get()) is not None:
            left = dict(pull.payloads)
            with self._telling(f"while asking server {server} (rank {peer})"):
                self._ask(server, pull.kind, pull.clock)
            for header, announced in pull.headers:
                missing = listing([self._names[index] for index in left])
                with self._telling(f"while waiting for {missing} of server {server} (rank {peer})"):
                    self._wire.wait(announced, peer, self._timeout_s + GRACE_S)
                index, version = header.tolist()
                if index == REFUSED:
                    raise TransferError(f"{self._title} was taken out of the job by server {server} (rank {peer})")
                buffer, arrival = left.pop(index)
                with self._telling(f"while {self._names[index]} came from server {server} (rank {peer})"):
                    self._wire.wait(arrival, peer, self._timeout_s)
                value = self._parameters[self._names[index]].detach()
                if buffer.data_ptr() != value.data_ptr():
                    value.copy_(buffer)
                time_s = time.perf_counter() - pull.start
                with self.changed:
                    found = Arrival(name=self._names[index], server=server, version=version, time_s=time_s)
                    self.arrivals.append(found)
                    self._arrived.add(index)
                    self.changed.notify_all()

    def _push(self, server: int) -> None:
        """Send gradients to one server, one at a time, until closed."""
        peer = self.plan.rank_of_server(server)
        count = len(self.plan.gradients(server))
        while (gate := self._pushes[server].get()) is not None:
            while gate.counter < count:
                index = gate.take(None, lambda _index: self._raise_failure())
                assert index is not None  # no timeout was given: the backward pass takes what it takes
                with self._telling(f"while the gradient of {self._names[index]} went to server {server} (rank {peer})"):
                    header = torch.tensor([index, self.clock])
                    self._wire.send("push", header, peer, self._wire.header_tag, self._timeout_s)
                    self._wire.send("push", self._gradients[index], peer, index, self._timeout_s)
                gate.passed()
                with self.changed:
                    self._pushed += 1
                    self.changed.notify_all()


def _on_host(gradient: Tensor) -> Tensor:
    """Return a gradient as it is sent; its own memory where that is possible."""
    return gradient.detach().to_dense().cpu().contiguous()
