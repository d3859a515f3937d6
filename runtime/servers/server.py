"""The parameter server, which holds a share of the parameters under a synchronisation policy. Start at :class:`Server`.

One thread handles one message at a time, and after each sends all values that may go. Each worker's pull has a queue in
the plan's order; the policy says when a transfer may go and which updates a gradient leads to; torch's own optimizer
makes the updates. zmq sends in threads of its own. In a *step* a worker pulls all parameters and pushes all gradients;
its *clock* is the number of steps that it has made. A *seat* is the place of a worker on the server, also of one that may
join late; a *member* is a worker that takes part.
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
from ddltool.runtime.processes.stopping import StopSignals, refuse_in_one_line
from ddltool.runtime.servers.meeting import Hello, Meeting, address_towards, gather_processes, join_job
from ddltool.runtime.servers.policies import BSP, ServerState, SyncPolicy, Update
from ddltool.runtime.servers.records import SyncLog, log
from ddltool.runtime.servers.transfers import TransferError, TransferPlan, describe_error
from ddltool.runtime.servers.wire import BEAT_S, CLOSED, STOOD_STILL_S, Message, Peer, Wire, fill
from ddltool.telemetry import JoinedRow, LeftRow, StepRow


@dataclass(slots=True)
class _Seat:
    """One worker's state on this server."""

    peer: Peer | None = None
    """The worker's connection; None: it has not called yet."""
    last_heard_s: float = 0.0
    """When its last message came, or its silence began to count, by ``time.monotonic``."""
    clock: int = 0
    """Number of steps that the worker had made at its last pull."""
    queue: deque[int] = field(default_factory=deque)
    """Indices of the parameters that the worker has asked for and not yet been sent, in the plan's order."""
    pulls: int = 0
    """Number of pulls that have begun."""
    pulled_versions: dict[str, int] = field(default_factory=dict)
    """By parameter, the version that the worker was sent last."""
    blocked_transfer: tuple[int, str] | None = None
    """(step, parameter) of the transfer that the policy holds back; None: no transfer is held back."""
    waiting_since_s: float | None = None
    """When the wait for other workers began; None: the worker does not wait for others."""
    # Of the step under way: gradients that have come, seconds waited for other workers, largest staleness.
    gradients: int = 0
    wait_s: float = 0.0
    staleness: int = 0
    # The last epoch for which the worker asked for its share, the number of its batches and its first step there; None:
    # not known.
    epoch: int | None = None
    epoch_batches: int | None = None
    epoch_first_step: int | None = None


class Server:
    """A parameter server of a plan.

    Args:
        model: its parameters, of which this server holds a share, are version 0.
        plan: which server has which parameters, and the order of transfers; the same on all ranks.
        optimizer: any of ``torch.optim`` on the parameters of ``model``; each update is one step of it, with the
            gradients of the parameters that the policy updates together.
        policy: the synchronisation model, as on all ranks; None: :class:`BSP` in which the loss of a worker ends the
            run.
        lost_after_s: a worker for which others wait is taken out after this many seconds of silence, and workers give
            up a silent server. It must exceed the longest step, update and transfer; None: the policy's, usually 10 s.
        telemetry: a JSON Lines file of this server's own (:mod:`~.records`).
        meeting: how the processes find each other; None: by the environment.

    Attributes:
        values: this server's parameters by name, the last finite ones; tensors are replaced, never written to.
        version: number of updates of each parameter, by name.
        lost: by lost worker, the reason; in the order of loss.
        closed: the workers that have ended without failure.
        log: seconds waited and staleness (:class:`~.records.SyncLog`).
        policy: the synchronisation model; with ElasticBSP, ``policy.supersteps`` on server 0 has the decisions.

    Raises InputError, on all ranks, when plans, models or policies differ between ranks or a rank's arguments are
    wrong, and TransferError when a rank does not come or is lost.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: TransferPlan,
        optimizer: torch.optim.Optimizer,
        policy: SyncPolicy | None = None,
        *,
        lost_after_s: float | None = None,
        telemetry: str | PathLike[str] | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        """Take this rank's share of the parameters, and meet the other processes; blocks until all have come."""
        refuse_in_one_line()
        meeting = meeting or Meeting.of_environment()
        self.plan = plan
        self.policy = policy or BSP(fixed=True)
        self._optimizer = optimizer
        self._lost_after_s = self.policy.lost_after_s if lost_after_s is None else lost_after_s
        rank = plan.rank_of_server(0) if meeting.rank is None else meeting.rank
        self.server = rank - plan.workers
        self._title = plan.title(rank)
        self._parameters = dict(model.named_parameters())
        own_slots = [slot for slot in plan.slots if slot.server == self.server]
        self.version = {slot.name: 0 for slot in own_slots}
        self.lost: dict[int, str] = {}
        self.closed: set[int] = set()
        self.log = SyncLog(plan.seats, None if telemetry is None else Path(telemetry))
        self._state = ServerState(
            workers=plan.workers,
            seats=plan.seats,
            names=tuple(slot.name for slot in own_slots if slot.trainable),
            decides=self.server == 0,
            version=self.version,
        )
        self._seats = [_Seat(pulled_versions=dict(self.version)) for _ in range(plan.seats)]
        self._members_of_epoch: dict[int, list[int]] = {}
        self._joiners: dict[int, tuple[int, set[int]]] = {}
        """By joining worker: its first step, and the ranks of the servers that have not confirmed it yet."""
        self._last_heartbeat_s = 0.0
        self._stop = StopSignals()
        self._own_hello, refusal = meeting.hello(plan, self.policy, lambda: self._check_arguments(model))
        try:
            self._meet_processes(meeting)
        except DdlToolError as error:
            raise refusal or error from None

    def _check_arguments(self, model: nn.Module) -> None:
        """Raise InputError for arguments that contradict each other; then open policy and log, and copy the values.

        The meeting calls this, and sends the error to all ranks.
        """
        plan = self.plan
        names = self._state.names
        plan.check(model)
        if not self._lost_after_s > 0:
            raise InputError("lost_after_s", f"is {self._lost_after_s}", "give seconds above 0")
        optimizer_ids = {id(value) for group in self._optimizer.param_groups for value in group["params"]}
        if names_left_out := [name for name in names if id(self._parameters[name]) not in optimizer_ids]:
            raise InputError("optimizer", f"lacks {listed(names_left_out, 3)}", "make it with this model's parameters")
        if plan.late and self.policy.fixed:
            problem = f"is {plan.late} under {self.policy.describe()}"
            raise InputError("transfer plan:late", problem, "give another policy")
        if plan.late and not self.server and not names:
            raise InputError("transfer plan", "puts no trainable parameter on server 0", "joining needs one there")
        self.policy.open(self._state)
        self.log.open()
        self.values = {name: self._copy_value(name) for name in self.version}

    def _meet_processes(self, meeting: Meeting) -> None:
        """Listen, and meet the other processes: server 0 gathers them, other servers join it.

        Messages that come before the job begins are kept, and handled first.
        """
        plan = self.plan
        first = self.plan.rank_of_server(0)
        first_address = ""
        if self.server == 0:
            host, port = meeting.listening_place()
        else:
            first_address = meeting.find()
            host = address_towards(first_address.rpartition(":")[0])
            port = 0
        self._wire = Wire(meeting.token, self._stop)
        self._early_messages: list[Message]
        try:
            address = self._wire.listen(host, port)
            hello = replace(self._own_hello, address=address)
            if self.server == 0:
                meeting.announce(address)
                self._server_peers, self._addresses, self._early_messages = gather_processes(
                    self._wire, plan, meeting, hello, self._lost_after_s, self.log.run
                )
            else:
                begin, self._early_messages = join_job(self._wire, plan, first_address, hello, meeting.limit_s)
                *_, self._addresses, _, self.log.run = begin
                self._server_peers = {first: first}
        except BaseException:
            self._wire.close()
            raise
        self._rank_of_peer: dict[Peer, int] = {peer: rank for rank, peer in self._server_peers.items()}
        now_s = time.monotonic()
        for worker, seat in enumerate(self._seats):  # the workers' peers go to their seats; servers remain
            seat.last_heard_s = now_s
            seat.peer = self._server_peers.pop(plan.rank_of_worker(worker), None)

    @property
    def updates(self) -> float:
        """Mean number of updates made so far of this server's trainable parameters; 0 without any."""
        names = self._state.names
        return sum(self.version[name] for name in names) / max(len(names), 1)

    @property
    def steps_made(self) -> list[int]:
        """Per worker, late ones included, the number of steps that it has made itself."""
        return [steps - self._state.start.get(worker, 0) for worker, steps in enumerate(self._state.steps)]

    def serve(self) -> dict[str, Tensor]:
        """Serve until every worker has closed or is lost, and return this server's final parameters by name.

        Raises TransferError when no worker closes without failure, when another server is lost, when an update is not
        finite, and when a worker is lost under a policy that needs all; :attr:`values` then has the last finite ones.
        Any error is sent to all ranks, and an error of another kind is raised as a TransferError. SIGTERM and Ctrl-C,
        unless the script handles them, end the run in the same way: the summary is written and the workers are told.
        """
        self.log.start()
        self._stop.open()
        try:
            self._decide_barrier()
            while self._state.members:
                message = self._early_messages.pop(0) if self._early_messages else self._wire.receive(BEAT_S)
                if message is not None:
                    peer, (kind, *values), payload = message
                    # A method for each kind of message takes the sender, the values and the bytes of a tensor, if any.
                    getattr(self, f"_on_{kind}")(peer, *values, *([] if payload is None else [payload]))
                self._send_released_values()
                self._send_heartbeats()
            if not self.closed:
                worker, reason = next(iter(self.lost.items()))
                first_lost = f"the first lost was worker {worker}, which {reason}"
                raise TransferError(f"{self._title}: no worker is left; {first_lost}")
            self._broadcast(self._server_peers.values(), "bye")
        except BaseException as error:
            failure = error
            prefix = "failed:" if isinstance(error, Exception) else "was ended by"
            if not isinstance(error, TransferError):
                failure = TransferError(f"{self._title} {prefix} {describe_error(error)}")
            self._broadcast(self._rank_of_peer, "end", str(failure))
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
        """Answer a worker that joins late, on server 0: refuse it, or give it a seat and the number of its first step."""
        hello = Hello(**content)
        own_hello = self._own_hello
        if hello.rank is not None:
            return  # a process that waits for the next job at this address: it will call again
        own_job = f"plan {own_hello.plan} under {own_hello.policy}"
        joiner_job = f"plan {hello.plan} under {hello.policy}"
        worker = self.plan.workers + len(self._state.start)  # the number of the next free seat
        if joiner_job != own_job:
            problem = f"is {own_job}, this worker has {joiner_job}"
            self._wire.send(peer, ["refused", "job", problem, "give the joiner the plan and model of the job"])
        elif worker >= self.plan.seats:
            problem = f"all {self.plan.late} seats have been taken"
            self._wire.send(peer, ["refused", "transfer plan:late", problem, "plan for more"])
        else:
            self._on_worker(peer, worker)
            # The first step of which no gradient has been pushed on any server: a worker pushes only when it has all
            # parameters, and server 0 holds back its own from that step on until all servers have confirmed the joiner.
            pushed_counts = (count for counts in self._state.pushed.values() for count in counts)
            clock = 1 + max(pushed_counts, default=0)
            self._joiners[worker] = clock, set(self._server_peers)
            self._broadcast(self._server_peers.values(), "seat", worker, clock)
            self._admit_joiner(worker, clock)
            self._begin_joiner(worker)

    def _admit_joiner(self, worker: int, clock: int) -> None:
        """Make a joining worker a member, as if it had made ``clock`` steps: that is the number of its first one."""
        state = self._state
        for counts in state.pushed.values():
            counts[worker] = clock
        state.steps[worker] = clock
        state.start[worker] = clock
        state.members.add(worker)
        state.workers = max(state.workers, len(state.members))
        self._seats[worker].last_heard_s = time.monotonic()
        self.policy.joined(worker, clock)
        self.log.add(JoinedRow(time_s=self.log.time_s, worker=worker, step=clock, epoch=self._next_epoch))

    def _begin_joiner(self, worker: int) -> None:
        """Tell a joining worker to begin if all other servers have confirmed it; else do nothing."""
        clock, servers_to_confirm = self._joiners[worker]
        if not servers_to_confirm:
            del self._joiners[worker]
            rank = self.plan.rank_of_worker(worker)
            # The values of a "begin" message, as `join_job` returns them.
            self._send(
                worker, "begin", rank, clock, self._next_epoch, self._addresses, self._lost_after_s, self.log.run
            )

    @property
    def _next_epoch(self) -> int:
        """The first epoch for which no worker has asked for its share of the samples: a joiner gets shares from it on."""
        return max(self._members_of_epoch, default=-1) + 1

    def _on_worker(self, peer: Peer, worker: int) -> None:
        """Note that the connection ``peer`` belongs to worker ``worker``, which has called this server."""
        self._seats[worker].peer = peer
        self._rank_of_peer[peer] = self.plan.rank_of_worker(worker)

    def _member_of_peer(self, peer: Peer) -> int | None:
        """Note that a message has come from a worker; return its number, or None if it was taken out of the job."""
        worker = self.plan.worker_of_rank(self._rank_of_peer[peer])
        self._seats[worker].last_heard_s = time.monotonic()
        return worker if worker in self._state.members else None

    def _on_here(self, peer: Peer) -> None:
        """Note a worker's sign of life, which it sends while it receives for long."""
        self._member_of_peer(peer)

    def _on_pull(self, peer: Peer, clock: int) -> None:
        """Queue all parameters of this server for a worker that has made ``clock`` steps and starts the next."""
        if (worker := self._member_of_peer(peer)) is not None:
            seat = self._seats[worker]
            seat.clock = clock
            seat.queue = deque(self.plan.queue(self.server, worker, seat.pulls))  # a random order differs by pull
            seat.pulls += 1
            seat.epoch_first_step = clock if seat.epoch_first_step is None else seat.epoch_first_step

    def _on_gradient(self, peer: Peer, index: int, clock: int, payload: memoryview) -> None:
        """Accept a worker's gradient (``payload``, its bytes) of the plan's parameter ``index``, in its step ``clock``."""
        if (worker := self._member_of_peer(peer)) is not None:
            slot = self.plan.slots[index]
            gradient = torch.empty(slot.shape, dtype=getattr(torch, slot.dtype))
            fill(gradient, payload)
            self.accept(worker, clock, slot.name, gradient)

    def accept(self, worker: int, clock: int, name: str, gradient: Tensor) -> None:
        """Pass a member's gradient of step ``clock`` to the policy, and make the updates that it returns.

        After the last gradient of a step, the step is counted and logged, and a barrier may be decided. A gradient that
        is not finite is dropped and takes the member out of the job. ``gradient`` may be changed in place.
        """
        state = self._state
        seat = self._seats[worker]
        if not torch.isfinite(gradient).all():
            # The message says how large parameters are: if very large, the job diverges rather than this worker fails.
            largest = max(float(value.abs().max()) for value in self.values.values())
            gradient_text = f"a gradient of {name} in step {clock} that is not finite"
            self._remove_lost_worker(worker, f"sent {gradient_text} (the largest parameter here is {largest:.3g})")
            return
        state.pushed[name][worker] += 1
        updates = self.policy.take(worker, name, gradient)
        seat.staleness = max(seat.staleness, self.version[name] - seat.pulled_versions[name])
        self._apply_updates(updates, f"after worker {worker}'s gradient of step {clock}")
        seat.gradients += 1
        if seat.gradients == len(state.names):
            state.steps[worker] += 1
            row = StepRow(
                time_s=self.log.time_s,
                worker=worker,
                step=clock,
                wait_s=seat.wait_s,
                staleness=seat.staleness,
                gap=state.steps[worker] - min(state.steps[other] for other in state.members),
            )
            self.log.add(row)
            seat.gradients = 0
            seat.wait_s = 0.0
            seat.staleness = 0
            self._decide_barrier(worker)

    def _on_members(self, peer: Peer, epoch: int) -> None:
        """Tell a worker which workers share the samples of an epoch.

        They are the members at the epoch's first request, so that all workers get the same answer.
        """
        if (worker := self._member_of_peer(peer)) is not None:
            members = self._members_of_epoch.setdefault(epoch, sorted(self._state.members))
            seat = self._seats[worker]  # which now counts the worker's steps of this epoch, for the log if it is lost
            seat.epoch = epoch
            seat.epoch_batches = None
            seat.epoch_first_step = None
            self._send(worker, "members", members)

    def _on_share(self, peer: Peer, batches: int) -> None:
        """Note how many batches a worker has in the epoch for which it asked last."""
        if (worker := self._member_of_peer(peer)) is not None:
            self._seats[worker].epoch_batches = batches

    def _on_close(self, peer: Peer) -> None:
        """Remove a worker that has closed, and confirm it with "bye"; all its gradients have come before this message."""
        if (worker := self._member_of_peer(peer)) is not None:
            self._remove_member(worker, None)
            self._wire.send(peer, ["bye"])

    def _on_fail(self, peer: Peer, reason: str) -> None:
        """Take a worker that reports its own failure out of the job."""
        if (worker := self._member_of_peer(peer)) is not None:
            self._remove_lost_worker(worker, reason)

    def _on_gone(self, peer: Peer) -> None:
        """Handle the end of a connection: a worker is then lost; the loss of another server raises TransferError."""
        rank = self._rank_of_peer.pop(peer, None)
        if rank in self._server_peers:
            raise TransferError(f"{self._title}: {self.plan.title(rank)} {CLOSED}")
        if rank is not None and (worker := self.plan.worker_of_rank(rank)) in self._state.members:
            self._remove_lost_worker(worker, CLOSED)

    # Messages between servers.

    def _on_alive(self, peer: Peer) -> None:
        """Do nothing: another server's sign of life, which other servers need not note."""

    def _on_connected(self, peer: Peer) -> None:
        """Do nothing: a connection to another server is established, which nothing here waits for."""

    def _on_bye(self, peer: Peer) -> None:
        """Forget another server, which has ended without failure."""
        self._server_peers.pop(self._rank_of_peer.pop(peer))

    def _on_end(self, peer: Peer, reason: str) -> None:
        """Raise the failure of another server as a TransferError."""
        raise TransferError(f"{self._title} ended, before that: {reason}")

    def _on_seat(self, peer: Peer, worker: int, clock: int) -> None:
        """Admit a worker that joins late, as server 0 says, and confirm that to server 0 with "seated"."""
        self._admit_joiner(worker, clock)
        self._wire.send(peer, ["seated", worker])

    def _on_seated(self, peer: Peer, worker: int) -> None:
        """Note on server 0 that another server has admitted a late joiner, which begins when all servers have."""
        if worker in self._joiners:
            self._joiners[worker][1].discard(self._rank_of_peer[peer])
            self._begin_joiner(worker)

    def _on_barrier(self, peer: Peer, quota: list[int]) -> None:
        """Follow server 0's decision on the next barrier; ``quota``: steps to it from the start of the job, per worker."""
        self.policy.follow(quota)

    def _on_lost(self, peer: Peer, worker: int, reason: str) -> None:
        """Take a worker that another server has taken out of the job out here too."""
        if worker in self._state.members:
            self._remove_lost_worker(worker, reason)

    # What follows from messages and from time.

    def _send_released_values(self) -> None:
        """Send each worker the values in its queue, in order, up to the first that the policy holds back."""
        for worker, seat in enumerate(self._seats):
            while seat.queue and self._may_send(worker, seat, seat.queue[0]):
                index = seat.queue.popleft()
                name = self.plan.slots[index].name
                seat.pulled_versions[name] = self.version[name]
                self._send(worker, "value", index, self.version[name], tensor=self.values[name])

    def _may_send(self, worker: int, seat: _Seat, index: int) -> bool:
        """Return whether parameter ``index`` may be sent to ``worker``; also note when its wait starts and ends.

        A frozen parameter always may. ``seat``: the worker's. Raises TransferError where, under a policy that needs all
        workers, it would wait for one that has closed.
        """
        slot = self.plan.slots[index]
        if not slot.trainable:
            return True
        blockers = self._blockers_of(worker, seat.clock, slot.name)
        if blockers is None:
            if seat.blocked_transfer is not None:
                # A blocked worker has nothing to send, so its silence counts from now on.
                seat.blocked_transfer = None
                seat.last_heard_s = time.monotonic()
            if seat.waiting_since_s is not None:
                waited_s = time.monotonic() - seat.waiting_since_s
                seat.waiting_since_s = None
                seat.wait_s += waited_s
                self.log.wait_s[worker] += waited_s
            return True
        seat.blocked_transfer = seat.clock, slot.name
        if blockers and seat.waiting_since_s is None:
            seat.waiting_since_s = time.monotonic()
        if self.policy.fixed and (closed_blockers := sorted(self.closed.intersection(blockers))):
            raise TransferError(f"{self._title}: {self._describe_wait(worker, closed_blockers)}, which has closed")
        return False

    def _blockers_of(self, worker: int, clock: int, name: str) -> list[int] | None:
        """Return the workers for which the transfer of parameter ``name`` to ``worker`` waits, which has made ``clock`` steps.

        They are those of :meth:`SyncPolicy.waits_for`, and late joiners that are not confirmed yet. None: the transfer
        is released; empty: it waits for a decision.
        """
        blockers = self.policy.waits_for(worker, clock, name)
        # No worker may start a joiner's first step before all servers have confirmed the joiner.
        joiners = [other for other, (step, _) in self._joiners.items() if other != worker and clock >= step]
        if not joiners:
            return blockers
        return sorted({*(blockers or ()), *joiners})

    def _describe_wait(self, worker: int, blockers: Iterable[int]) -> str:
        """Return in words which transfer ``worker`` waits for, and from which ``blockers`` a gradient is missing."""
        seat = self._seats[worker]
        title = self.plan.title
        assert seat.blocked_transfer is not None
        clock, name = seat.blocked_transfer
        blocker_titles = listed([title(self.plan.rank_of_worker(other)) for other in blockers], 3)
        names_behind = [self.plan.slots[index].name for index in list(seat.queue)[1:]]
        behind = f" ({listed(names_behind, 3)} wait behind it)" if names_behind else ""
        worker_title = title(self.plan.rank_of_worker(worker))
        return f"{name} for {worker_title}{behind} waits for its gradient of step {clock - 1} from {blocker_titles}"

    def _send_heartbeats(self) -> None:
        """Send all processes a sign of life, and take out silent workers for which others wait.

        Does nothing if the last sign of life is more recent than BEAT_S, or a quarter of ``lost_after_s``.
        """
        now_s = time.monotonic()
        if now_s - self._last_heartbeat_s < min(BEAT_S, self._lost_after_s / 4):
            return
        # This process itself was stopped: messages that workers sent meanwhile may still be on their way.
        if now_s - self._last_heartbeat_s > BEAT_S + STOOD_STILL_S:
            for seat in self._seats:
                seat.last_heard_s = now_s
        self._last_heartbeat_s = now_s
        self._broadcast(self._rank_of_peer, "alive")
        for worker, reason in self._awaited_workers().items():
            seat = self._seats[worker]
            silent_s = now_s - seat.last_heard_s
            if worker in self._state.members and seat.blocked_transfer is None and silent_s >= self._lost_after_s:
                self._remove_lost_worker(worker, f"was silent for {silent_s:.1f} s, and {reason}")

    def _awaited_workers(self) -> dict[int, str]:
        """Return the workers that others wait for, by number, each with the reason in words that follow "and"."""
        reason_by_worker: dict[int, str] = {}
        if self.closed:  # once some workers have closed the run ends, and the server waits for all that remain
            reason_by_worker = dict.fromkeys(self._state.members, "others have closed")
        for worker, seat in enumerate(self._seats):
            if seat.blocked_transfer is None:
                continue
            for blocker in self._blockers_of(worker, *seat.blocked_transfer) or ():
                reason_by_worker[blocker] = f"others waited for it: {self._describe_wait(worker, [blocker])}"
        return reason_by_worker

    def _remove_lost_worker(self, worker: int, reason: str) -> None:
        """Take a lost worker out of the job, and tell it and the other servers. ``reason`` follows the worker's name.

        Raises TransferError under a policy that needs all workers.
        """
        self.lost[worker] = reason
        self._send(worker, "out", reason)
        self._broadcast(self._server_peers.values(), "lost", worker, reason)
        self._remove_member(worker, reason)
        if self.policy.fixed:
            raise TransferError(f"{self._title}: {self.plan.title(self.plan.rank_of_worker(worker))} {reason}")

    def _remove_member(self, worker: int, reason: str | None) -> None:
        """Take a worker out of the members, log that, and make the updates and decisions that have waited for it.

        ``reason``: why it was lost; None: it has closed.
        """
        state = self._state
        seat = self._seats[worker]
        state.members.discard(worker)
        self._joiners.pop(worker, None)
        seat.queue = deque()
        seat.blocked_transfer = None
        # How many steps of its last epoch the worker has made, and how many batches it leaves (None: not known).
        steps = 0 if seat.epoch_first_step is None else max(0, state.steps[worker] - seat.epoch_first_step)
        batches_left = None if seat.epoch_batches is None else max(0, seat.epoch_batches - steps)
        row = LeftRow(
            time_s=self.log.time_s,
            worker=worker,
            lost=reason is not None,
            reason=reason or "closed",
            epoch=seat.epoch,
            steps_of_epoch=None if seat.epoch is None else steps,
            batches_left=batches_left,
        )
        self.log.add(row)
        if reason is None:
            self.closed.add(worker)
        else:
            epoch_text = "" if seat.epoch is None else f"; it had made {steps} steps of epoch {seat.epoch}"
            if batches_left is not None:
                epoch_text += f", {batches_left} of its {seat.epoch_batches} batches are left out"
            log.warning("worker %d is taken out of the job: %s%s", worker, reason, epoch_text)
        if state.members:
            self._apply_updates(self.policy.settle(), "after the loss or the end of a worker")
            self._decide_barrier()

    def _decide_barrier(self, worker: int | None = None) -> None:
        """On server 0, ask the policy whether a superstep is over; if so, log it and send the next barrier to other servers.

        ``worker``: the one whose step has just been completed; None: another event.
        """
        if self.server == 0 and (finished_superstep := self.policy.decide(self.log.time_s, worker)) is not None:
            self.log.add(finished_superstep)
            self._broadcast(self._server_peers.values(), "barrier", list(self.policy.quota))

    def _apply_updates(self, updates: list[Update], when: str) -> None:
        """Make the updates by one step of the optimizer, then set :attr:`values` and :attr:`version`.

        Gradients are summed in place, in their order. Without updates nothing happens. Raises TransferError, before any
        value is set, when an updated value is not finite; ``when``: the last words of its text.
        """
        if not updates:
            return
        mean_by_name = {}
        for update in updates:
            mean = update.gradients[0]
            for gradient in update.gradients[1:]:
                mean.add_(gradient)
            mean.div_(update.divisor)
            mean_by_name[update.name] = mean
            parameter = self._parameters[update.name]
            parameter.grad = mean.to(parameter.device)
        self._optimizer.step()
        new_values = {}
        for update in updates:
            self._parameters[update.name].grad = None  # so that the next step leaves this parameter alone
            value = self._copy_value(update.name)
            new_values[update.name] = value
            if not torch.isfinite(value).all():
                problem = self._describe_not_finite(update, mean_by_name[update.name])
                raise TransferError(f"{self._title}: {problem}, {when}")
        for name, value in new_values.items():
            self.values[name] = value
            self.version[name] += 1

    def _copy_value(self, name: str) -> Tensor:
        """Return a contiguous copy of a parameter on the CPU, which may be sent because it is never written to."""
        return self._parameters[name].detach().to("cpu", copy=True).contiguous()

    def _describe_not_finite(self, update: Update, mean: Tensor) -> str:
        """Return in words which update is not finite and why.

        Either the sum of finite gradients has overflowed (``mean`` is not finite), or the optimizer's step has.
        """
        if not torch.isfinite(mean).all():
            cause = f"the sum of {len(update.gradients)} workers' finite gradients is too large for {mean.dtype}"
        else:
            largest = max(float(mean.abs().max()), float(self.values[update.name].abs().max()))
            cause = f"the optimizer left the numbers of {mean.dtype} on finite gradients (largest number {largest:.3g})"
        return f"update {self.version[update.name] + 1} of {update.name} is not finite: {cause}"

    def _broadcast(self, peers: Iterable[Peer], *content: Any) -> None:
        """Send a message of kind ``content[0]`` to all of ``peers``."""
        for peer in list(peers):
            self._wire.send(peer, content)

    def _send(self, worker: int, *content: Any, tensor: Tensor | None = None) -> None:
        """Send a worker, if it has called, a message of kind ``content[0]``, with the bytes of ``tensor`` if given."""
        if (peer := self._seats[worker].peer) is not None:
            self._wire.send(peer, content, tensor)
