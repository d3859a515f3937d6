"""Brings the processes of a job together: they find each other, compare plans, and begin. Start at :class:`Meeting`.

Server 0 listens at an address that all others know, with the job's token. Every process sends it a hello; when all are
there and agree, it tells them where the other servers listen. A worker that joins later sends a hello in the same way.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from ddltool.errors import InputError, listed, one_line
from ddltool.runtime.processes.launcher import launched_number
from ddltool.runtime.servers.policies import SyncPolicy
from ddltool.runtime.servers.transfers import TransferError, TransferPlan
from ddltool.runtime.servers.wire import BEAT_S, Message, Peer, Wire

log = logging.getLogger(__name__)

# How long a process waits for the others: at the start of a job, and to join a running one.
LIMIT_S, JOIN_S = 300.0, 60.0
REMIND_S = 10.0  # how often to log which processes are missing
HEAR_S = 1.0  # how much longer than server 0 the other processes wait, so that it can tell them which ranks are missing
_meetings_by_address: Counter[str] = Counter()
"""How many meetings this process has had at each address; the number distinguishes one job there from the next."""


@dataclass(kw_only=True)
class Meeting:
    """Where a job's processes find each other, and this process's rank; one object for each worker or server.

    Either all know ``address`` and ``token`` beforehand, or server 0 puts both into ``store``, which all can reach.
    """

    rank: int | None
    """This process's rank; None: it joins a job that is running."""
    size: int | None = None
    """How many processes were started; None: not known."""
    address: str = ""
    """``HOST:PORT`` where server 0 listens."""
    token: str = ""
    """The job's secret; nobody without it can speak to the job or read what is sent."""
    store: Store | None = None
    limit_s: float = LIMIT_S
    """Seconds to wait for the others."""

    @classmethod
    def of_environment(cls) -> Meeting:
        """Return the meeting that the launcher's environment variables describe.

        The address is ``DDLTOOL_SERVER`` (``HOST:PORT``), with the token ``DDLTOOL_TOKEN``; without them it is in the
        store at ``MASTER_ADDR`` and ``MASTER_PORT``, as torchrun sets them. ``RANK`` and ``WORLD_SIZE`` are this
        process's; with ``DDLTOOL_SERVER`` and without ``RANK`` it joins a running job. Raises InputError where neither
        address is set or a number is none, and TransferError when the store does not answer.
        """
        environment = os.environ
        rank = launched_number("RANK") if "RANK" in environment else None
        size = launched_number("WORLD_SIZE") if "WORLD_SIZE" in environment else None
        if (address := environment.get("DDLTOOL_SERVER")) is not None:
            if not (token := environment.get("DDLTOOL_TOKEN")):
                raise InputError("DDLTOOL_TOKEN", "is not set", "give all processes of the job the same secret")
            host, _, port = address.rpartition(":")
            if not host or not port.isdecimal():
                raise InputError("DDLTOOL_SERVER", f'is "{address}"', "give HOST:PORT")
            # A job that runs answers soon; one that starts waits for all its processes.
            return cls(rank=rank, size=size, address=address, token=token, limit_s=JOIN_S if rank is None else LIMIT_S)
        if rank is None or "MASTER_ADDR" not in environment:
            remedy = "start it by torchrun or examples/sync_launch.py, or set DDLTOOL_SERVER and DDLTOOL_TOKEN"
            raise InputError("RANK and MASTER_ADDR", "are not set, so this process has no job", remedy)
        return cls(rank=rank, size=size, store=_store_of_environment())

    def __post_init__(self) -> None:
        """Number this job among those that this process meets at the address: another process may be in the next already."""
        self.job = _meetings_by_address[self.address]
        _meetings_by_address[self.address] += 1
        self._key = f"ddltool/servers/{self.job}"

    def listening_place(self) -> tuple[str, int]:
        """Return the host and port (0: any free one) for server 0 to listen at; without an address also make a token."""
        if self.address:
            host, _, port = self.address.rpartition(":")
            return host, int(port)
        self.token = self.token or secrets.token_hex(16)
        return address_towards(os.environ.get("MASTER_ADDR", "localhost")), 0

    def announce(self, address: str) -> None:
        """Put server 0's ``address`` and the token into the store; without a store all processes know them already."""
        if self.store is not None:
            self.store.set(self._key, f"{address} {self.token}")

    def find(self) -> str:
        """Return the address of server 0, and take the token from the store if there is one.

        Blocks until server 0 has announced it; raises TransferError after ``limit_s`` seconds.
        """
        if self.store is None:
            return self.address
        try:
            self.store.wait([self._key], timedelta(seconds=self.limit_s))
        except RuntimeError as error:
            raise TransferError(f"server 0 has not come within {self.limit_s:g} s") from error
        address, self.token = bytes(self.store.get(self._key)).decode().split()
        return address

    def hello(
        self, plan: TransferPlan, policy: SyncPolicy, check: Callable[[], None]
    ) -> tuple[Hello, InputError | None]:
        """Return (this process's first message to server 0, the error that keeps it from taking part or None).

        The error is returned, not raised, and its text is in the message, so that all processes learn of it. ``check``:
        a function that raises InputError for wrong arguments of the process; ``plan`` and ``policy``: this process's,
        which must agree with those of the others.
        """
        refusal = None
        try:
            self._check_rank_and_size(plan)
            check()
        except InputError as error:
            refusal = error
        text = str(refusal or "")
        hello = Hello(rank=self.rank, job=self.job, plan=plan.digest(), policy=policy.describe(), refusal=text)
        return hello, refusal

    def _check_rank_and_size(self, plan: TransferPlan) -> None:
        """Raise InputError unless the job has as many processes as the plan, and this process's rank is among them.

        A process without a rank joins late, for which the plan must have seats (``late``).
        """
        if self.size not in (None, plan.world_size):
            planned = f"{plan.workers} workers and {plan.servers} servers"
            problem = f"is for {planned}, but this job runs {self.size} processes"
            raise InputError("transfer plan", problem, f"start {plan.world_size}")
        if self.rank is None and not plan.late:
            remedy = "give the job's plan, with seats for more"
            raise InputError("transfer plan:late", "is 0, so nobody can join", remedy)
        if self.rank is not None and not 0 <= self.rank < plan.world_size:
            problem = f"is {self.rank} in a plan for {plan.world_size} processes"
            raise InputError("RANK", problem, "give one of those")


@functools.cache  # rank 0 may host the store, which must live as long as the process
def _store_of_environment() -> Store:
    """Return torch.distributed's store at ``MASTER_ADDR`` and ``MASTER_PORT``. Raises TransferError if it does not answer."""
    try:
        store: Store = next(iter(rendezvous("env://", timeout=timedelta(seconds=LIMIT_S))))[0]
    except (RuntimeError, ValueError) as error:
        raise TransferError(f"torch.distributed's store does not answer: {one_line(str(error))[:200]}") from error
    return store


def address_towards(host: str) -> str:
    """Return this machine's IP address in the network by which ``host`` is reached. Raises InputError for unknown hosts."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 1))  # chooses the interface; a datagram socket sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise InputError(host, f"cannot be reached ({error.strerror or error})", "give the host of server 0") from None


@dataclass(frozen=True, kw_only=True)
class Hello:
    """A process's first message: its rank, and digests of what must agree with the other processes."""

    rank: int | None
    """The process's rank; None: it joins late."""
    job: int
    """Number of the job among those that meet at this address, from 0."""
    plan: str
    """The plan's digest."""
    policy: str
    """The synchronisation model and its settings (:meth:`SyncPolicy.describe`)."""
    refusal: str = ""
    """The error in this process's own arguments, which keeps the job from starting; empty: none."""
    address: str = ""
    """``HOST:PORT`` where a server listens; empty for a worker."""


def join_job(
    wire: Wire, plan: TransferPlan, address: str, hello: Hello, limit_s: float
) -> tuple[list[Any], list[Message]]:
    """Send ``hello`` to server 0 at ``address`` (``HOST:PORT``), and block until the job begins.

    Returns (values of server 0's "begin" message, messages that others have sent before it). The values are: rank,
    first step, first epoch, servers' addresses, seconds after which a silent process counts as lost, name of the run.
    Raises InputError when the processes disagree, and TransferError when server 0 does not answer within ``limit_s``
    seconds, or does not begin within ``limit_s + HEAR_S`` more, or is lost.
    """
    first_server = plan.rank_of_server(0)
    deadline_s = time.monotonic() + limit_s
    is_held = False
    other_messages = []
    wire.dial(first_server, address)
    while (left_s := deadline_s - time.monotonic()) > 0:
        message = wire.receive(left_s)
        if message is None:
            continue
        peer, (kind, *values), _ = message
        if peer != first_server:
            other_messages.append(message)
        elif kind == "connected":
            wire.send(first_server, ["hello", asdict(hello)])
        elif kind == "held":  # server 0 has the hello, and waits for those of the others
            deadline_s = time.monotonic() + limit_s + HEAR_S
            is_held = True
        elif kind == "refused":
            raise InputError(*values)
        elif kind == "over":
            raise TransferError(*values)
        elif kind == "begin":
            return values, other_messages
        elif kind == "gone" and is_held:  # before that, zmq dials again by itself
            raise TransferError(f"{plan.title(first_server)} ended before the job began")
    failure = "not begun the job" if is_held else f"not answered at {address}; is it there, and has it the same token?"
    raise TransferError(f"{plan.title(first_server)} has, for {limit_s:g} s, {failure}")


def gather_processes(
    wire: Wire, plan: TransferPlan, meeting: Meeting, own_hello: Hello, lost_after_s: float, run: str
) -> tuple[dict[int, Peer], list[str], list[Message]]:
    """On server 0, wait for the hellos of all processes, then send each its "begin" message (:func:`join_job`).

    Returns (peers by rank, addresses of the servers by number, hellos of workers that join late). Touches the file in
    ``DDLTOOL_BEGUN``, if set.

    Args:
        wire: this server's connections; it listens already.
        plan: the plan of transfers.
        meeting: the number of processes, the number of the job, and how long to wait.
        own_hello: this server's own first message.
        lost_after_s: seconds after which a silent process counts as lost, which "begin" tells.
        run: name of this run of the job, which "begin" tells.

    Raises InputError when the processes disagree, and TransferError naming the ranks that did not come in time or ended;
    all that have come are told.
    """
    assert own_hello.rank is not None
    hellos = {own_hello.rank: own_hello}
    peers = dict[int, Peer]()
    late_messages = list[Message]()
    try:
        _hear_all(wire, plan, meeting, hellos, peers, late_messages)
        _demand_agreement(hellos)
    except BaseException as error:
        refusal = ["over", str(error) or type(error).__name__]
        if isinstance(error, InputError):
            refusal = ["refused", error.where, error.problem, error.remedy]
        for peer in peers.values():
            wire.send(peer, refusal)
        raise
    addresses = [hellos[plan.rank_of_server(server)].address for server in range(plan.servers)]
    for rank, peer in peers.items():
        wire.send(peer, ["begin", rank, 0, 0, addresses, lost_after_s, run])  # from step 0 of epoch 0
    if marker := os.environ.get("DDLTOOL_BEGUN"):
        Path(marker).touch()  # tells the launcher that the job has begun
    return peers, addresses, late_messages


def _hear_all(
    wire: Wire,
    plan: TransferPlan,
    meeting: Meeting,
    hellos: dict[int, Hello],
    peers: dict[int, Peer],
    late_messages: list[Message],
) -> None:
    """Receive messages until ``hellos``, which starts with this process's own, has one of each rank.

    Fills ``hellos`` and ``peers`` (their senders) by rank, and ``late_messages`` with the hellos of workers that join
    late. Raises TransferError after the meeting's limit, and for a process that ended.
    """
    own_rank = min(hellos)
    began_s = time.monotonic()
    reminded_s = began_s
    while missing := [rank for rank in range(meeting.size or plan.world_size) if rank not in hellos]:
        now_s = time.monotonic()
        names = listed([plan.title(rank) for rank in missing], 3)
        if now_s - began_s > meeting.limit_s:
            raise TransferError(f"{plan.title(own_rank)}: {names} did not come within {meeting.limit_s:g} s")
        if now_s - reminded_s > REMIND_S:
            reminded_s = now_s
            log.warning("waiting for %s since %.0f s", names, now_s - began_s)
        message = wire.receive(BEAT_S)
        for peer in peers.values():
            wire.send(peer, ["alive"])
        if message is None:
            continue
        sender, (kind, *values), _ = message
        if kind == "gone":
            if gone_ranks := [rank for rank, peer in peers.items() if peer == sender]:
                raise TransferError(f"{plan.title(gone_ranks[0])} ended before the job began")
        elif kind == "hello" and values[0]["rank"] is None:
            late_messages.append(message)
        elif kind == "hello" and values[0]["job"] == meeting.job:  # a process of a later job calls again after this one
            hello = Hello(**values[0])
            assert hello.rank is not None
            hellos[hello.rank] = hello
            peers[hello.rank] = sender
            wire.send(sender, ["held"])


def _demand_agreement(hellos: Mapping[int, Hello]) -> None:
    """Raise InputError for the first rank that refuses, or else for plans or policies that differ from rank 0's.

    ``hellos``: the processes' first messages by rank.
    """
    first = hellos[0]
    for rank, hello in sorted(hellos.items()):
        if hello.refusal:
            raise InputError(f"rank {rank}", hello.refusal)
    if differing_ranks := [str(rank) for rank, hello in sorted(hellos.items()) if hello.plan != first.plan]:
        problem = f"differs from rank 0's on rank{'s' if differing_ranks[1:] else ''} {listed(differing_ranks, 8)}"
        raise InputError("transfer plan", problem, "give every rank the same plan and model")
    for rank, hello in sorted(hellos.items()):
        if hello.policy != first.policy:
            problem = f"is {first.policy} on rank 0 and {hello.policy} on rank {rank}"
            raise InputError("synchronisation model", problem, "give every rank the same")
