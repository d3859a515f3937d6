"""The parameter server: keeps a share of the parameters, under a synchronisation policy. Start at :class:`Server`.

One thread takes one message at a time, and after each hands over what may go now: each worker's pull has a queue in the
plan's order, the policy says when a transfer may go and what a gradient leads to, and torch's own optimizer makes the
updates. Sending is zmq's doing, beside this thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddltool.errors import DdlToolError, InputError, listed
from ddltool.runtime.hook.stopping import StopSignals, refuse_in_one_line
from ddltool.runtime.servers.meeting import Hello, Meeting, address_towards, call, gather
from ddltool.runtime.servers.policies import BSP, Book, Policy, Update
from ddltool.runtime.servers.records import SyncLog, log
from ddltool.runtime.servers.transfers import TransferError, TransferPlan, named
from ddltool.runtime.servers.wire import BEAT_S, CLOSED, STOOD_STILL_S, Message, Peer, Wire, fill
from ddltool.telemetry import JoinedRow, LeftRow, StepRow


@dataclass(slots=True)
class _Seat:
    """One worker, as this server sees it."""

    peer: Peer | None = None
    heard_s: float = 0.0
    clock: int = 0
    """Of its last pull: the number of steps that it had made."""
    queue: deque[int] = field(default_factory=deque)
    """What it has asked for and not yet been sent."""
    pulls: int = 0
    """How many have begun."""
    begun: bool = False
    """Whether a trainable parameter of the last one has gone."""
    pulled: dict[str, int] = field(default_factory=dict)
    """The versions that it was sent last."""
    waits: tuple[int, str] | None = None
    """For which step's parameter it waits, where the policy lets it wait."""
    since_s: float | None = None
    """Since when it has waited for other workers."""
    # Of the step under way.
    gradients: int = 0
    wait_s: float = 0.0
    staleness: int = 0
    dropped: bool = False
    # Of the epoch of which it asked for a share last: its number, the batches if it has said so, its first step.
    epoch: int | None = None
    batches: int | None = None
    first: int | None = None


class Server:
    """A parameter server of a plan.

    Attributes:
        values: this server's parameters by name, the last finite ones; replaced, never written to.
        version: how often each has been updated.
        lost: worker to the reason, in the order of loss.
        closed: the workers that have ended well.
        log: waiting, staleness, dropped gradients.
        policy: with ElasticBSP, ``policy.supersteps`` on server 0 has the decisions.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: TransferPlan,
        optimizer: torch.optim.Optimizer,
        policy: Policy | None = None,
        *,
        lost_after_s: float | None = None,
        telemetry: str | PathLike[str] | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        """Take this rank's share of ``model`` as version 0 and meet the others: returns when all have come.

        ``optimizer``: any of ``torch.optim`` on the parameters of ``model``; each update is one step of it, with the
        gradients of the parameters that the policy updates together. ``policy``: without one, :class:`BSP` in which the
        loss of a worker ends the run. ``lost_after_s``: a worker for which others wait, and from which nothing has come
        for so long, is taken out, and workers wait no longer for a server: it must exceed the longest step, update and
        transfer; 10 s unless the policy says otherwise.
        ``telemetry``: a JSON Lines file of this server's own (see :mod:`~.records`). ``meeting``: by default that of
        the environment. Raises InputError, on all ranks, when the ranks' plans, models or policies differ or one's
        arguments are wrong; TransferError when one of them does not come or is lost.
        """
        refuse_in_one_line()
        meeting = meeting or Meeting.of_environment()
        self.plan, self.policy, self._optimizer = plan, policy or BSP(fixed=True), optimizer
        self._lost_after_s = self.policy.lost_after_s if lost_after_s is None else lost_after_s
        rank = plan.rank_of_server(0) if meeting.rank is None else meeting.rank
        self.server, self._title = rank - plan.workers, plan.title(rank)
        self._parameters = dict(model.named_parameters())
        mine = [slot for slot in plan.slots if slot.server == self.server]
        self.version = {slot.name: 0 for slot in mine}
        self.lost: dict[int, str] = {}
        self.closed: set[int] = set()
        self.log = SyncLog(plan.seats, None if telemetry is None else Path(telemetry))
        self._book = Book(
            workers=plan.workers,
            seats=plan.seats,
            names=tuple(slot.name for slot in mine if slot.trainable),
            decides=self.server == 0,
            version=self.version,
        )
        self._seats = [_Seat(pulled=dict(self.version)) for _ in range(plan.seats)]
        self._epochs: dict[int, list[int]] = {}
        self._joining: dict[int, tuple[int, set[int]]] = {}
        """Who joins: the first step, and the other servers that do not know yet."""
        self._beat_s = 0.0
        self._stop = StopSignals()
        self._hello, refusal = meeting.hello(plan, self.policy, lambda: self._check(model))
        try:
            self._meet(meeting)
        except DdlToolError as error:
            raise refusal or error from None

    def _check(self, model: nn.Module) -> None:
        """Raise InputError for arguments that do not fit; all ranks then refuse."""
        plan, names = self.plan, self._book.names
        plan.check(model)
        if not self._lost_after_s > 0:
            raise InputError("lost_after_s", f"is {self._lost_after_s}", "give seconds above 0")
        held = {id(value) for group in self._optimizer.param_groups for value in group["params"]}
        if left_out := [name for name in names if id(self._parameters[name]) not in held]:
            raise InputError("optimizer", f"lacks {listed(left_out, 3)}", "make it with this model's parameters")
        if plan.late and self.policy.fixed:
            problem = f"is {plan.late} under {self.policy.describe()}"
            raise InputError("transfer plan:late", problem, "give another policy")
        if plan.late and not self.server and not names:
            raise InputError("transfer plan", "puts no trainable parameter on server 0", "joining needs one there")
        self.policy.open(self._book)
        self.log.open()
        self.values = {name: self._value(name) for name in self.version}

    def _meet(self, meeting: Meeting) -> None:
        plan, first, found = self.plan, self.plan.rank_of_server(0), ""
        if self.server == 0:
            where, port = meeting.here()
        else:
            found = meeting.find()
            where, port = address_towards(found.rpartition(":")[0]), 0
        self._wire = Wire(meeting.token, self._stop)
        self._early: list[Message]
        try:
            address = self._wire.listen(where, port)
            hello = replace(self._hello, address=address)
            if self.server == 0:
                meeting.announce(address)
                self._servers, self._addresses, self._early = gather(
                    self._wire, plan, meeting, hello, self._lost_after_s, self.log.run
                )
            else:
                begin, self._early = call(self._wire, plan, found, hello, meeting.limit_s)
                *_, self._addresses, _, self.log.run = begin
                self._servers = {first: first}
        except BaseException:
            self._wire.close()
            raise
        self._callers: dict[Peer, int] = {peer: rank for rank, peer in self._servers.items()}
        now_s = time.monotonic()
        for worker, seat in enumerate(self._seats):
            seat.heard_s, seat.peer = now_s, self._servers.pop(plan.rank_of_worker(worker), None)

    @property
    def updates(self) -> float:
        """Updates per trainable parameter so far."""
        names = self._book.names
        return sum(self.version[name] for name in names) / max(len(names), 1)

    @property
    def steps_made(self) -> list[int]:
        """Per worker, late ones included, the steps that it has made (under local SGD: rounds)."""
        return [steps - self._book.start.get(worker, 0) for worker, steps in enumerate(self._book.steps)]

    def serve(self) -> dict[str, Tensor]:
        """Serve until every worker has closed or is lost, and return the final values.

        Raises TransferError when no worker ended well, when another server is lost, when an update is not finite, and
        where the policy needs all workers and one is lost; :attr:`values` then holds the last ones, all finite. SIGTERM
        and Ctrl-C end the run in order (the summary is written, the workers hear of it) unless the script has handlers
        of its own.
        """
        self.log.start()
        self._stop.open()
        try:
            self._decide()
            while self._book.members:
                message = self._early.pop(0) if self._early else self._wire.receive(BEAT_S)
                if message is not None:
                    peer, (kind, *values), payload = message
                    getattr(self, f"_on_{kind}")(peer, *values, *([] if payload is None else [payload]))
                self._hand_over()
                self._beat()
            if not self.closed:
                worker, reason = next(iter(self.lost.items()))
                raise TransferError(
                    f"{self._title}: no worker is left; the first lost was worker {worker}, which {reason}"
                )
            self._tell(self._servers.values(), "bye")
        except BaseException as error:
            failure, how = error, "failed:" if isinstance(error, Exception) else "was ended by"
            if not isinstance(error, TransferError):
                failure = TransferError(f"{self._title} {how} {named(error)}")
            self._tell(self._callers, "end", str(failure))
            if failure is error or not isinstance(error, Exception):
                raise
            raise failure from error
        finally:
            self.log.close(self.policy.describe(), self.steps_made, round(self.updates))
            self._wire.close()
            self._stop.close()
        return self.values

    # Messages of workers.

    def _on_hello(self, peer: Peer, content: dict[str, Any]) -> None:
        """Let a worker in that comes late; server 0."""
        hello, mine = Hello(**content), self._hello
        if hello.rank is not None:
            return  # it is ahead, in another job that will be at the same place: it calls again
        ours, theirs = (f"plan {one.plan} under {one.policy}" for one in (mine, hello))
        worker = self.plan.workers + len(self._book.start)
        if theirs != ours:
            what = ["job", f"is {ours}, this worker has {theirs}", "give the joiner the plan and model of the job"]
            self._wire.send(peer, ["refused", *what])
        elif worker >= self.plan.seats:
            what = ["transfer plan:late", f"all {self.plan.late} seats have been taken", "plan for more"]
            self._wire.send(peer, ["refused", *what])
        else:
            self._on_worker(peer, worker)
            # The next step of which no gradient can have been pushed anywhere: a worker pushes its gradients when it has
            # all parameters, and server 0 keeps its own back from that step on until all servers know.
            clock = 1 + max((count for counts in self._book.pushed.values() for count in counts), default=0)
            self._joining[worker] = clock, set(self._servers)
            self._tell(self._servers.values(), "seat", worker, clock)
            self._seat(worker, clock)
            self._let_in(worker)

    def _seat(self, worker: int, clock: int) -> None:
        """Make a joiner a member; ``clock`` is the number of its first step."""
        book = self._book
        for counts in book.pushed.values():
            counts[worker] = clock
        book.steps[worker] = book.start[worker] = clock
        book.members.add(worker)
        book.workers = max(book.workers, len(book.members))
        self._seats[worker].heard_s = time.monotonic()
        self.policy.joined(worker, clock)
        self.log.add(JoinedRow(time_s=self.log.time_s, worker=worker, step=clock, epoch=self._next_epoch))

    def _let_in(self, worker: int) -> None:
        """Let a joiner begin when all servers know it."""
        clock, unknowing = self._joining[worker]
        if not unknowing:
            del self._joining[worker]
            place = self.plan.rank_of_worker(worker), clock, self._next_epoch
            self._send(worker, "begin", *place, self._addresses, self._lost_after_s, self.log.run)

    @property
    def _next_epoch(self) -> int:
        """The first epoch that nobody has begun."""
        return max(self._epochs, default=-1) + 1

    def _on_worker(self, peer: Peer, worker: int) -> None:
        """A worker has called."""
        self._seats[worker].peer, self._callers[peer] = peer, self.plan.rank_of_worker(worker)

    def _of(self, peer: Peer) -> int | None:
        """Return which member a message is from, None for those who are none any more."""
        worker = self.plan.worker_of_rank(self._callers[peer])
        self._seats[worker].heard_s = time.monotonic()
        return worker if worker in self._book.members else None

    def _on_here(self, peer: Peer) -> None:
        self._of(peer)

    def _on_pull(self, peer: Peer, clock: int) -> None:
        if (worker := self._of(peer)) is not None:
            seat = self._seats[worker]
            seat.clock, seat.begun = clock, False
            seat.queue = deque(self.plan.queue(self.server, worker, seat.pulls))
            seat.pulls += 1
            seat.first = clock if seat.first is None else seat.first

    def _on_gradient(self, peer: Peer, index: int, clock: int, payload: memoryview) -> None:
        if (worker := self._of(peer)) is not None:
            slot = self.plan.slots[index]
            gradient = torch.empty(slot.shape, dtype=getattr(torch, slot.dtype))
            fill(gradient, payload)
            self.accept(worker, clock, slot.name, gradient)

    def accept(self, worker: int, clock: int, name: str, gradient: Tensor) -> None:
        """Take one gradient of a member."""
        book, seat = self._book, self._seats[worker]
        if not torch.isfinite(gradient).all():
            # Large parameters are the job's doing: then other workers' gradients will not be finite either.
            largest = max(float(value.abs().max()) for value in self.values.values())
            what = f"a gradient of {name} in step {clock} that is not finite"
            self._lose(worker, f"sent {what} (the largest parameter here is {largest:.3g})")
            return
        book.pushed[name][worker] += 1
        counts, updates = self.policy.take(worker, name, gradient)
        if counts:
            seat.staleness = max(seat.staleness, self.version[name] - seat.pulled[name])
        seat.dropped |= not counts
        self._apply(updates, f"after worker {worker}'s gradient of step {clock}")
        seat.gradients += 1
        if seat.gradients == len(book.names):
            book.steps[worker] += 1
            row = StepRow(
                time_s=self.log.time_s,
                worker=worker,
                step=clock,
                wait_s=seat.wait_s,
                staleness=seat.staleness,
                gap=book.steps[worker] - min(book.steps[other] for other in book.members),
                dropped=seat.dropped,
            )
            self.log.add(row)
            seat.gradients, seat.wait_s, seat.staleness, seat.dropped = 0, 0.0, 0, False
            self._decide(worker)

    def _on_members(self, peer: Peer, epoch: int) -> None:
        """Tell who shares the samples of an epoch: the same for all who ask."""
        if (worker := self._of(peer)) is not None:
            members = self._epochs.setdefault(epoch, sorted(self._book.members))
            seat = self._seats[worker]
            seat.epoch, seat.batches, seat.first = epoch, None, None
            self._send(worker, "members", members)

    def _on_share(self, peer: Peer, batches: int) -> None:
        if (worker := self._of(peer)) is not None:
            self._seats[worker].batches = batches

    def _on_close(self, peer: Peer) -> None:
        """A worker asks for nothing more; all its gradients have come before this."""
        if (worker := self._of(peer)) is not None:
            self._remove(worker, None)
            self._wire.send(peer, ["bye"])

    def _on_fail(self, peer: Peer, reason: str) -> None:
        if (worker := self._of(peer)) is not None:
            self._lose(worker, reason)

    def _on_gone(self, peer: Peer) -> None:
        """A connection has ended."""
        rank = self._callers.pop(peer, None)
        if rank in self._servers:
            raise TransferError(f"{self._title}: {self.plan.title(rank)} {CLOSED}")
        if rank is not None and (worker := self.plan.worker_of_rank(rank)) in self._book.members:
            self._lose(worker, CLOSED)

    # Messages between servers.

    def _on_alive(self, peer: Peer) -> None: ...

    def _on_connected(self, peer: Peer) -> None: ...

    def _on_bye(self, peer: Peer) -> None:
        """Another server has served to the end."""
        self._servers.pop(self._callers.pop(peer))

    def _on_end(self, peer: Peer, reason: str) -> None:
        """Another server has failed."""
        raise TransferError(f"{self._title} ended, before that: {reason}")

    def _on_seat(self, peer: Peer, worker: int, clock: int) -> None:
        self._seat(worker, clock)
        self._wire.send(peer, ["seated", worker])

    def _on_seated(self, peer: Peer, worker: int) -> None:
        if worker in self._joining:
            self._joining[worker][1].discard(self._callers[peer])
            self._let_in(worker)

    def _on_barrier(self, peer: Peer, quota: list[int]) -> None:
        self.policy.follow(quota)

    def _on_lost(self, peer: Peer, worker: int, reason: str) -> None:
        """Another server has taken a worker out."""
        if worker in self._book.members:
            self._lose(worker, reason)

    # What follows from messages and from time.

    def _hand_over(self) -> None:
        """Send every worker what may go now: what is first in its queue, and what each transfer waits for."""
        for worker, seat in enumerate(self._seats):
            while seat.queue and self._may_send(worker, seat, seat.queue[0]):
                index = seat.queue.popleft()
                name = self.plan.slots[index].name
                seat.pulled[name] = self.version[name]
                self._send(worker, "value", index, self.version[name], tensor=self.values[name])

    def _may_send(self, worker: int, seat: _Seat, index: int) -> bool:
        """Return whether a transfer may go, and keep account of who waits for others."""
        slot = self.plan.slots[index]
        if not slot.trainable:
            return True
        blockers = self._waits_for(worker, seat.clock, slot.name)
        if blockers is None:
            if not seat.begun:
                seat.begun, self._book.begun[worker] = True, self.version[slot.name]
            if seat.waits is not None:
                seat.waits, seat.heard_s = None, time.monotonic()  # its silence counts from now
            if seat.since_s is not None:
                waited_s, seat.since_s = time.monotonic() - seat.since_s, None
                seat.wait_s += waited_s
                self.log.wait_s[worker] += waited_s
            return True
        seat.waits = seat.clock, slot.name
        if blockers and seat.since_s is None:
            seat.since_s = time.monotonic()
        if self.policy.fixed and (gone := sorted(self.closed.intersection(blockers))):
            raise TransferError(f"{self._title}: {self._waiting(worker, gone)}, which has closed")
        return False

    def _waits_for(self, worker: int, clock: int, name: str) -> list[int] | None:
        """Return for whom a transfer waits; None: it may go."""
        found = self.policy.waits_for(worker, clock, name)
        # Nobody makes the step with which another one joins before all servers know of it.
        joiners = [other for other, (step, _) in self._joining.items() if other != worker and clock >= step]
        return sorted({*(found or ()), *joiners}) if joiners else found

    def _waiting(self, worker: int, blockers: Iterable[int]) -> str:
        """Return which transfer to ``worker`` waits for which."""
        seat, title = self._seats[worker], self.plan.title
        assert seat.waits is not None
        clock, name = seat.waits
        missing = listed([title(self.plan.rank_of_worker(other)) for other in blockers], 3)
        behind = [self.plan.slots[index].name for index in list(seat.queue)[1:]]
        more = f" ({listed(behind, 3)} wait behind it)" if behind else ""
        for_whom = title(self.plan.rank_of_worker(worker))
        return f"{name} for {for_whom}{more} waits for its gradient of step {clock - 1} from {missing}"

    def _beat(self) -> None:
        """Tell all that this server is there, and take out workers for which others wait in vain."""
        now_s = time.monotonic()
        if now_s - self._beat_s < min(BEAT_S, self._lost_after_s / 4):
            return
        if now_s - self._beat_s > BEAT_S + STOOD_STILL_S:  # what the workers said meanwhile may still be on its way
            for seat in self._seats:
                seat.heard_s = now_s
        self._beat_s = now_s
        self._tell(self._callers, "alive")
        # When some have closed the run comes to its end, and the server itself waits for the last.
        wanted = dict.fromkeys(self._book.members, "others have closed") if self.closed else {}
        for worker, seat in enumerate(self._seats):
            for other in (self._waits_for(worker, *seat.waits) or ()) if seat.waits is not None else ():
                wanted[other] = f"others waited for it: {self._waiting(worker, [other])}"
        for worker, why in wanted.items():
            seat = self._seats[worker]
            silent_s = now_s - seat.heard_s
            if worker in self._book.members and seat.waits is None and silent_s >= self._lost_after_s:
                self._lose(worker, f"was silent for {silent_s:.1f} s, and {why}")

    def _lose(self, worker: int, reason: str) -> None:
        """Take a worker out, tell it, and the other servers."""
        self.lost[worker] = reason
        self._send(worker, "out", reason)
        self._tell(self._servers.values(), "lost", worker, reason)
        self._remove(worker, reason)
        if self.policy.fixed:
            raise TransferError(f"{self._title}: {self.plan.title(self.plan.rank_of_worker(worker))} {reason}")

    def _remove(self, worker: int, reason: str | None) -> None:
        """Take a worker out (``reason`` None: it has closed), and do what others waited for it to do."""
        book, seat = self._book, self._seats[worker]
        book.members.discard(worker)
        self._joining.pop(worker, None)
        seat.queue, seat.waits = deque(), None
        steps = 0
        if seat.first is not None:
            steps = max(0, book.steps[worker] - seat.first) * self.policy.local_steps
        left = None if seat.batches is None else max(0, seat.batches - steps)
        row = LeftRow(
            time_s=self.log.time_s,
            worker=worker,
            lost=reason is not None,
            reason=reason or "closed",
            epoch=seat.epoch,
            steps_of_epoch=None if seat.epoch is None else steps,
            batches_left=left,
        )
        self.log.add(row)
        if reason is None:
            self.closed.add(worker)
        else:
            share = "" if seat.epoch is None else f"; it had made {steps} steps of epoch {seat.epoch}"
            share += "" if left is None else f", {left} of its {seat.batches} batches are left out"
            log.warning("worker %d is taken out of the job: %s%s", worker, reason, share)
        if book.members:
            self._apply(self.policy.settle(), "after the loss or the end of a worker")
            self._decide()

    def _decide(self, worker: int | None = None) -> None:
        """On server 0: tell the others when a barrier has been reached and the next one is chosen."""
        if self.server == 0 and (over := self.policy.decide(self.log.time_s, worker)) is not None:
            self.log.add(over)
            self._tell(self._servers.values(), "barrier", list(self.policy.quota))

    def _apply(self, updates: list[Update], when: str) -> None:
        """Make updates by one step of the optimizer. Raises TransferError, with nothing published, for what is not finite."""
        if not updates:
            return
        means = {}
        for due in updates:
            total = due.gradients[0]
            for gradient in due.gradients[1:]:
                total = total.add_(gradient)
            means[due.name] = total.div_(due.divisor)
            self._parameters[due.name].grad = means[due.name].to(self._parameters[due.name].device)
        self._optimizer.step()
        new = {}
        for due in updates:
            self._parameters[due.name].grad = None
            value = new[due.name] = self._value(due.name)
            if not torch.isfinite(value).all():
                raise TransferError(f"{self._title}: {self._not_finite(due, means[due.name])}, {when}")
        for name, value in new.items():
            self.values[name] = value
            self.version[name] += 1

    def _value(self, name: str) -> Tensor:
        """Return a copy of a parameter as it is sent."""
        return self._parameters[name].detach().to("cpu", copy=True).contiguous()

    def _not_finite(self, due: Update, mean: Tensor) -> str:
        """Return which update is not finite, and why; every gradient in it is finite."""
        if not torch.isfinite(mean).all():
            cause = f"the sum of {len(due.gradients)} workers' finite gradients is too large for {mean.dtype}"
        else:
            largest = max(float(mean.abs().max()), float(self.values[due.name].abs().max()))
            cause = f"the optimizer left the numbers of {mean.dtype} on finite gradients (largest number {largest:.3g})"
        return f"update {self.version[due.name] + 1} of {due.name} is not finite: {cause}"

    def _tell(self, peers: Iterable[Peer], *what: Any) -> None:
        for peer in list(peers):
            self._wire.send(peer, what)

    def _send(self, worker: int, *what: Any, tensor: Tensor | None = None) -> None:
        if (peer := self._seats[worker].peer) is not None:
            self._wire.send(peer, what, tensor)
