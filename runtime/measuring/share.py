"""The shares of this machine, of a core and of the memory, that a process can expect now."""

from __future__ import annotations

import os

import psutil


def expected_cpu() -> float:
    """Return the share of a core that this process can expect now, above 0 and at most 1.

    It is the number of cores on which it may run over the number of processes that are ready to run on one of them,
    itself included. A process counts once, whatever its number of threads.
    """
    cores = os.sched_getaffinity(0)
    return min(1.0, len(cores) / (1 + _others_running(cores)))


def available_memory() -> float:
    """Return the share of the machine's memory that is available to new work, 0 to 1."""
    memory = psutil.virtual_memory()
    return float(memory.available / memory.total)


def _others_running(cores: set[int]) -> int:
    """Return how many other processes of this machine are running or ready to run, and were last on one of ``cores``.

    ``cores``: the system's core numbers. A process counts once, by its main thread. It reads /proc itself,
    because psutil takes ten times as long, which would slow down short iterations.
    """
    running = 0
    own_pid = str(os.getpid())
    for name in os.listdir("/proc"):
        if not name.isdecimal() or name == own_pid:
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
        except OSError:
            continue  # the process has ended meanwhile
        # Fields 3 and 39 of proc(5): the state, and the core on which it ran last. The list begins with field 3.
        if fields[0] == b"R" and int(fields[36]) in cores:
            running += 1
    return running
