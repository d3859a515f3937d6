"""What share of this machine a process can expect now: of a core, and of the memory."""

from __future__ import annotations

import os

import psutil


def expected_cpu() -> float:
    """Return the share of a core that this process can expect now, above 0 to 1.

    It is the number of its cores over the number of processes that want to run on one of them, itself included. A
    process counts once whatever its threads.
    """
    cores = os.sched_getaffinity(0)
    return min(1.0, len(cores) / (1 + _others_running(cores)))


def available_memory() -> float:
    """Return the share of the machine's memory that new work could take, 0 to 1."""
    memory = psutil.virtual_memory()
    return float(memory.available / memory.total)


def _others_running(cores: set[int]) -> int:
    """Return how many other processes of this machine want to run on these ``cores``, by their numbers, now.

    Reads /proc itself: psutil would take ten times as long, which a short iteration would notice.
    """
    running, own_pid = 0, str(os.getpid())
    for name in os.listdir("/proc"):
        if not name.isdecimal() or name == own_pid:
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        # Fields 3 and 39 of proc(5): the state, and the core it was last on.
        if fields[0] == b"R" and int(fields[36]) in cores:
            running += 1
    return running
