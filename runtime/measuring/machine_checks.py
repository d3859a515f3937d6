"""What a machine must be able to do for ddltool, tried rather than asked: ports, gloo, NCCL, clocks, folders.

Each check returns a :class:`Check` and none raises: a machine where everything is broken gets a whole list.
"""

from __future__ import annotations

import datetime
import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from ddltool.runtime.measuring.children import Children, free_port

Status = Literal["ok", "warning", "failed", "optional"]

PATIENCE_S = 20.0
"""How long two processes may take to start, meet and reduce before they count as hung."""
_MEETING_S = 5.0
COARSE_CLOCK_S = 1e-5
SHARED_MEMORY_BYTES = 128 * 2**20
FREE_BYTES = 2**30
_ELEMENTS = 262_144  # one MiB of float32
_REPEATS = 20


@dataclass(frozen=True, kw_only=True)
class Check:
    """What was found, and what to do about it.

    ``failed`` stops some command from working, ``warning`` makes figures worse or concerns a part that may not be
    needed, ``optional`` is an extra that is not there. ``remedy`` is empty when the status is ``ok``.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


def check_clock() -> Check:
    """Return the smallest step that the clock of all measurements makes, in seconds: the least of those seen in 20 ms."""
    smallest = float("inf")
    before = time.perf_counter()
    end = before + 0.02
    while before < end:
        now = time.perf_counter()
        if now > before:
            smallest = min(smallest, now - before)
        before = now
    found = f"steps of {smallest * 1e9:,.0f} ns"
    if smallest <= COARSE_CLOCK_S:
        return Check(name="clock", status="ok", found=found)
    remedy = "measured times will be coarse: profile with larger batches, or mend the clock source of the machine"
    return Check(name="clock", status="warning", found=found, remedy=remedy)


def check_store_port() -> Check:
    """Bind, listen and connect on 127.0.0.1, as the store at which processes meet does."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            with socket.create_connection(("127.0.0.1", port), timeout=2.0) as client:
                other, _ = server.accept()
                with other:
                    client.sendall(b"1")
                    other.settimeout(2.0)
                    reached = other.recv(1) == b"1"
    except OSError as error:
        remedy = "bring the loopback interface up (ip link set lo up), and allow local connections"
        return Check(name="store port", status="failed", found=f"127.0.0.1: {error.strerror or error}", remedy=remedy)
    if not reached:
        return Check(
            name="store port",
            status="failed",
            found="127.0.0.1: connected, nothing received",
            remedy="allow local connections in the firewall",
        )
    return Check(name="store port", status="ok", found="127.0.0.1 listens and connects")


def check_folder(name: str, folder: str | Path, *, required: bool, remedy: str) -> Check:
    """Write and remove a file in ``folder``, or where it would be made; less than one GiB of free space is a warning."""
    place = Path(folder)
    try:
        while not place.exists() and place != place.parent:
            place = place.parent
        with tempfile.NamedTemporaryFile(dir=place) as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
        free = shutil.disk_usage(place).free
    except OSError as error:
        found = f"{folder}: {error.strerror or error}"
        return Check(name=name, status="failed" if required else "warning", found=found, remedy=remedy)
    found = f"{folder}, {free / 2**30:,.1f} GiB free"
    if free < FREE_BYTES:
        return Check(name=name, status="warning", found=found, remedy="make room, or " + remedy)
    return Check(name=name, status="ok", found=found)


def check_shared_memory(folder: str = "/dev/shm") -> Check:
    """Return whether loaders with data workers have room to hand over batches (containers often give 64 MiB)."""
    try:
        total = shutil.disk_usage(folder).total
    except OSError:
        return Check(name="shared memory", status="ok", found="not limited here")
    found = f"{folder}, {total / 2**20:,.0f} MiB"
    if total >= SHARED_MEMORY_BYTES:
        return Check(name="shared memory", status="ok", found=found)
    remedy = "loaders with num_workers may die of it: start the container with --shm-size 1g"
    return Check(name="shared memory", status="warning", found=found, remedy=remedy)


# -- two processes


@contextmanager
def processes() -> Iterator[_Pair]:
    """Start two processes that reduce, and kill what is left of them at the end; ask the pair for its checks."""
    pair = _Pair()
    try:
        yield pair
    finally:
        if pair.children is not None:
            pair.children.close()


class _Pair:
    """Two processes that try gloo over the loopback interface, then over the default one, then NCCL where there is CUDA."""

    def __init__(self) -> None:
        self.children: Children | None = None
        self._problem = ""
        try:
            ports = (free_port(), free_port(), free_port())
            self.children = Children(_member, [(rank, ports) for rank in (0, 1)])
        except OSError as error:
            self._problem = f"processes cannot be started ({error.strerror or error})"

    def checks(self) -> list[Check]:
        """Return the checks of gloo and NCCL; a process that dies or hangs fails those that it did not come to."""
        said: dict[tuple[str, int], dict[str, Any]] = {}
        deadline = time.monotonic() + PATIENCE_S
        while (
            self.children is not None and not self._problem and (left := {0, 1} - {r for n, r in said if n == "done"})
        ):
            for rank, answer in self.children.receive(sorted(left), "processes were silent", 0.1):
                if failure := self.children.failure(answer, "a process"):
                    self._problem = str(failure)
                else:
                    name, value = answer
                    said[name, rank] = value
            if left and not self._problem and time.monotonic() > deadline:
                self._problem = f"no answer within {PATIENCE_S:.0f} s"
        return [
            self._gloo(said, "gloo", "failed", "profile --replicas, the hook and demo need it; GLOO_SOCKET_IFNAME=lo?"),
            self._gloo(
                said,
                "gloo, default network",
                "warning",
                "make the host's name resolve to an address of this machine (/etc/hosts), or set GLOO_SOCKET_IFNAME "
                "(lo on one machine, the network interface on several)",
            ),
            self._nccl(said),
        ]

    def _gloo(self, said: dict[tuple[str, int], dict[str, Any]], name: str, bad: Status, remedy: str) -> Check:
        values = [said.get((name, rank)) for rank in (0, 1)]
        problems = [value["problem"] for value in values if value is not None and value["problem"]]
        if problems or None in values:
            found = problems[0] if problems else self._problem
            return Check(name=name, status=bad, found=found, remedy=remedy)
        seconds = max(value["seconds"] for value in values if value is not None)
        return Check(name=name, status="ok", found=f"2 processes added 1 MiB in {seconds * 1e3:.2f} ms (median)")

    def _nccl(self, said: dict[tuple[str, int], dict[str, Any]]) -> Check:
        values = [value for (name, _), value in said.items() if name == "NCCL"]
        if not values:
            if self._problem:
                remedy = "see the line on gloo first"
                return Check(name="NCCL", status="warning", found=self._problem, remedy=remedy)
            return Check(
                name="NCCL",
                status="optional",
                found="no CUDA device to try it on",
                remedy="nothing to do for work on the CPU; else install a CUDA build of torch and its driver",
            )
        if problems := [value["problem"] for value in values if value["problem"]]:
            remedy = "training on several GPUs needs it; run with NCCL_DEBUG=INFO to see why"
            return Check(name="NCCL", status="failed", found=problems[0], remedy=remedy)
        seconds = max(value["seconds"] for value in values)
        found = f"{len(values)} process(es) added 1 MiB in {seconds * 1e3:.2f} ms (median)"
        return Check(name="NCCL", status="ok", found=found)


def _member(rank: int, ports: tuple[int, int, int], results: Connection) -> None:
    """The body of one of the two processes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # backends print pages about what is reported in one line here
    wanted = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = wanted or "lo"
    import torch

    torch.set_num_threads(1)
    works = _tell(results, "gloo", rank, ports[0], "gloo", 2, torch.device("cpu"))
    if wanted is None:
        del os.environ["GLOO_SOCKET_IFNAME"]
    if works:
        _tell(results, "gloo, default network", rank, ports[1], "gloo", 2, torch.device("cpu"))
    else:
        results.send(("gloo, default network", {"problem": "not tried, as the line above failed", "seconds": 0.0}))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if rank < devices:
        _tell(results, "NCCL", rank, ports[2], "nccl", min(devices, 2), torch.device("cuda", rank))
    results.send(("done", {}))


def _tell(results: Connection, name: str, rank: int, port: int, backend: str, world: int, device: Any) -> bool:
    """Report how a reduction went, ``{"problem": text or "", "seconds": median of some}``; return whether it worked."""
    try:
        value: dict[str, Any] = {"problem": "", "seconds": _reduce(rank, port, backend, world, device)}
    except Exception as error:  # whatever a backend throws is what the reader wants to know
        lines = str(error).splitlines()
        value = {"problem": (lines[0] if lines else type(error).__name__)[:120], "seconds": 0.0}
    results.send((name, value))
    return not value["problem"]


def _reduce(rank: int, port: int, backend: str, world: int, device: Any) -> float:
    """Return the median seconds of adding one MiB over all processes. Raises what the backend raises, or a wrong sum."""
    import torch
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=_MEETING_S),
    )
    try:
        seconds = []
        for _ in range(_REPEATS):
            tensor = torch.full((_ELEMENTS,), float(rank + 1), device=device)
            started = time.perf_counter()
            dist.all_reduce(tensor)
            total = float(tensor[-1].item())  # also waits for the device
            seconds.append(time.perf_counter() - started)
            if total != world * (world + 1) / 2:
                raise RuntimeError(f"the sum over {world} processes came out as {total:g}")
        return statistics.median(seconds)
    finally:
        with suppress(Exception):
            dist.destroy_process_group()
