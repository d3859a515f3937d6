"""What tests that start processes need: a port for them, and which of them are still there."""

from __future__ import annotations

import socket
import time

import psutil

# multiprocessing's own helpers live as long as the process that first needed them.
_HELPERS = ("resource_tracker", "multiprocessing.forkserver")
# Process ids of those that are meant to serve all files of a session.
LASTING: set[int] = set()


def free_port() -> int:
    """Return a TCP port of this machine that nobody uses now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def children_left(within_s: float = 10.0) -> list[list[str]]:
    """Return the command lines of this process's children that are still there after ``within_s`` seconds."""
    deadline = time.monotonic() + within_s
    while (left := _children()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _children() -> list[list[str]]:
    found = []
    for child in psutil.Process().children():
        try:
            if child.pid in LASTING or child.status() == psutil.STATUS_ZOMBIE:
                continue
            command = child.cmdline()
        except psutil.NoSuchProcess:
            continue
        if not any(name in " ".join(command) for name in _HELPERS):
            found.append(command)
    return found


def workers_of(pid: int, least: int) -> list[psutil.Process]:
    """Return the measuring processes, once there are so many; multiprocessing's own helper is none of them."""
    deadline = time.monotonic() + 120
    found: list[psutil.Process] = []
    while len(found) < least and time.monotonic() < deadline:
        time.sleep(0.02)
        found = [child for child in psutil.Process(pid).children() if "spawn_main" in " ".join(child.cmdline())]
    assert len(found) >= least
    return found
