"""The encrypted TCP connections of one process. Start at :class:`Wire`."""

from __future__ import annotations

import hashlib
import json
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import zmq
from torch import Tensor
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from ddltool.errors import InputError
from ddltool.runtime.processes.stopping import StopSignals
from ddltool.runtime.servers.transfers import TransferError

BEAT_S = 0.1  # how often a server sends all a sign of life, and so finds closed connections
# If a turn of a process's receiving loop takes this much longer than BEAT_S, the process itself was stopped, and does not
# count the silence of others in that time.
STOOD_STILL_S = 1.0
SILENT_S = 60.0  # how long a machine may not answer before its connections count as broken, whether or not anyone waits
CLOSED = "closed its connection"
LINGER_S = 1.0  # how long closing waits for queued messages to be sent
Peer: TypeAlias = int | bytes
"""The other end of a connection: the rank of a server that was dialled, or the identity that zmq gave to a caller."""
Message: TypeAlias = tuple[Peer, list[Any], memoryview | None]
"""(sender, [kind, *values], bytes of a tensor or None)."""


class Wire:
    """The connections of one process; used by one thread at a time.

    zmq queues and sends in threads of its own, so that no method but :meth:`receive` and :meth:`close` blocks. CURVE
    encrypts with one key pair that is derived from the token, so nobody without the token can connect.
    """

    def __init__(self, token: str, stop: StopSignals) -> None:
        """Derive the key pair from ``token``. :meth:`receive` raises signals that ``stop`` has noted."""
        secret = z85.encode(hashlib.blake2b(token.encode(), digest_size=32, person=b"ddltool servers").digest())
        # (secret, public): all processes share this pair, which is both the server's and the client's.
        self._keys = secret, zmq.curve_public(secret)
        self._stop = stop
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._router: zmq.Socket[bytes] | None = None  # the listening socket; None: this process does not listen
        self._dealers: dict[int, zmq.Socket[bytes]] = {}  # by rank of a server that was dialled: the socket to it
        # By monitor socket of a dealer, which tells of its connection's beginning and end: the server's rank.
        self._monitors: dict[zmq.Socket[bytes], int] = {}
        # (rank, its dealer) and (None, the router): sockets to receive from, in turns.
        self._sources: deque[tuple[int | None, zmq.Socket[bytes]]] = deque()
        self._events: deque[Message] = deque()  # messages "connected" and "gone" that `receive` has not returned yet
        self._gone: set[Peer] = set()  # callers for which there was a message "gone"

    def listen(self, host: str, port: int) -> str:
        """Accept connections on the interface of ``host``, at ``port`` (0: any free one); return the address ``HOST:PORT``.

        Raises InputError for an unknown host or a port that cannot be used.
        """
        self._router = self._socket(zmq.ROUTER)
        self._router.router_mandatory = True  # so that sending to a closed connection raises
        self._router.curve_server = True
        self._sources.append((None, self._router))
        try:
            self._router.bind(f"tcp://{socket.gethostbyname(host)}:{port or '*'}")
        except OSError as error:  # the base class of ZMQError and of the error for an unknown host
            raise InputError(f"{host}:{port}", f"cannot be listened at ({error.strerror or error})") from None
        return self._router.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")

    def dial(self, rank: int, address: str) -> None:
        """Start to connect to the server of rank ``rank`` at ``address`` (``HOST:PORT``).

        :meth:`receive` returns messages "connected" and "gone" when the connection is established and ends.
        """
        dealer = self._socket(zmq.DEALER)
        self._dealers[rank] = dealer
        dealer.curve_serverkey = self._keys[1]
        monitor = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        monitor.linger = 0
        self._monitors[monitor] = rank
        self._poller.register(monitor, zmq.POLLIN)
        self._sources.append((rank, dealer))
        dealer.connect(f"tcp://{address}")

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        """Return a new zmq socket of type ``kind`` with this job's keys, a heartbeat and queues without a limit."""
        zmq_socket = self._context.socket(kind)
        zmq_socket.linger = int(1e3 * LINGER_S)
        # No limit, so that nothing is dropped: a worker pulls what it needs only.
        zmq_socket.sndhwm = 0
        zmq_socket.rcvhwm = 0
        zmq_socket.curve_secretkey, zmq_socket.curve_publickey = self._keys
        # In milliseconds: four heartbeats in the time after which silence counts as broken.
        zmq_socket.heartbeat_ivl = int(250 * SILENT_S)
        zmq_socket.heartbeat_timeout = int(1e3 * SILENT_S)
        zmq_socket.reconnect_ivl_max = 1000  # tries to connect at least once a second
        self._poller.register(zmq_socket, zmq.POLLIN)
        return zmq_socket

    def give_up(self, rank: int) -> None:
        """Let :meth:`close` drop messages that are queued for a lost server, instead of waiting for them to be sent."""
        self._dealers[rank].linger = 0

    def send(self, peer: Peer, content: Sequence[Any], tensor: Tensor | None = None) -> None:
        """Queue a message: ``content`` (its kind, then JSON values) and the bytes of ``tensor``, if given.

        It does not block, and nothing tells when the message is sent, so the tensor's memory must never change
        afterwards. If a caller's connection has ended, :meth:`receive` returns one message "gone" from it.
        """
        frames: list[Any] = [json.dumps(content).encode()]
        if tensor is not None:
            frames.append(tensor.detach().reshape(-1).view(torch.uint8).numpy())
        if isinstance(peer, int):
            self._dealers[peer].send_multipart(frames, copy=False)
            return
        assert self._router is not None
        try:
            self._router.send_multipart([peer, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:
            if peer not in self._gone:
                self._gone.add(peer)
                self._events.append((peer, ["gone"], None))

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message, or None if none comes within ``timeout_s`` seconds.

        The messages "connected" (a dialled server has answered) and "gone" (a connection has ended; comes after all
        messages from it) are made here, and have no values. A signal raises as in :meth:`StopSignals.hear`.
        """
        self._stop.hear()
        if message := self._next():
            return message
        if not self._events:
            self._poller.poll(int(1e3 * timeout_s) + 1)
        for monitor, rank in self._monitors.items():
            while monitor.poll(0):
                has_ended = recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED
                # Closing does not wait for messages to a process that has ended.
                self._dealers[rank].linger = 0 if has_ended else int(1e3 * LINGER_S)
                self._events.append((rank, ["gone" if has_ended else "connected"], None))
        # Messages go before events: everything that was sent over a connection before it ended has come by now.
        if message := self._next():
            return message
        return self._events.popleft() if self._events else None

    def _next(self) -> Message | None:
        """Return a message that has come already, or None; connections take turns, so that a busy one starves no other."""
        for _ in range(len(self._sources)):
            self._sources.rotate()
            rank, source = self._sources[0]
            try:
                frames = source.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                continue
            if rank is None:  # the router puts the caller's identity before the message
                peer: Peer = frames.pop(0).bytes
            else:
                peer = rank
            content = json.loads(frames[0].bytes)
            payload = frames[1].buffer if len(frames) > 1 else None
            return peer, content, payload
        return None

    def close(self) -> None:
        """Close all connections; blocks until queued messages are sent, at most LINGER_S. More calls do nothing."""
        for dealer in self._dealers.values():
            dealer.disable_monitor()
        self._dealers = {}
        self._monitors = {}
        self._sources = deque()
        self._context.destroy()


def fill(tensor: Tensor, payload: memoryview | None) -> None:
    """Copy received bytes (``payload``) into ``tensor``. Raises TransferError if there are none or of another size."""
    received_bytes = 0 if payload is None else payload.nbytes
    if payload is None or received_bytes != tensor.numel() * tensor.element_size():
        raise TransferError(f"{received_bytes} bytes came for {tuple(tensor.shape)}")
    tensor.copy_(torch.frombuffer(payload, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape))
