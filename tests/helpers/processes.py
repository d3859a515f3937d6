"""What tests that start processes need: a quick start, a port for them, and which of them are still there."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import psutil

from ddltool.errors import DdlToolError

# multiprocessing's own helpers live as long as the process that first needed them.
_HELPERS = ("resource_tracker", "multiprocessing.forkserver")
# Process ids of those that are meant to serve all files of a session.
LASTING: set[int] = set()
_PRELOADED = (
    *("torch._dynamo", "torch.distributed.fsdp", "torch.profiler", "tests.helpers.runtime_workers"),
    *("ddltool.runtime.agent.agent", "ddltool.runtime.balancing.control", "ddltool.runtime.elastic.trainer"),
    *("ddltool.runtime.measuring.worker", "ddltool.runtime.servers", "ddltool.analyzers.cluster.sweep"),
    "tests.helpers.frozen",
)


def forking() -> ForkServerContext:
    """Return what starts processes by a fork of one that has imported torch: in a tenth of a second, not in four.

    Their environment is that of the session's first such start; the working directory and ``sys.path`` are the caller's.
    They run no exit handlers, but those of :func:`as_job` do.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


def as_job(size: int, folder: Path, body: Callable[..., object], *args: object) -> list[tuple[int | None, str, str]]:
    """Run ``body(rank, *args)`` in ``size`` processes as a launcher does; return each one's exit code, stdout and stderr.

    Each has a launcher's variables, the uncaught exception goes to ``sys.excepthook``, and the interpreter really ends.
    """
    job = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    job |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        forking().Process(
            target=_as_script, args=(folder, job | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, body, rank, *args)
        )
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + 240
    try:
        for process in ranks:
            process.join(max(deadline - time.monotonic(), 0.0))
    finally:
        for process in ranks:
            process.kill()
    return [
        (process.exitcode, *((folder / f"{stream}.{rank}").read_text() for stream in ("stdout", "stderr")))
        for rank, process in enumerate(ranks)
    ]


def _as_script(
    folder: Path, environment: dict[str, str], body: Callable[..., object], rank: int, *args: object
) -> None:
    for number, stream in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / f"{stream}.{rank}", os.O_WRONLY | os.O_CREAT), number)
    os.environ |= environment
    os.chdir(folder)
    multiprocessing.set_start_method("fork", force=True)  # a script's
    code = 0
    try:
        body(rank, *args)
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    ctypes.pythonapi.Py_Exit(code)  # not os._exit, by which multiprocessing ends: what aborts at exit must be seen


def torchrun(size: int, *arguments: object, folder: Path, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a script (``-m`` and a module of the tests), or a command's module, in ``size`` processes, from ``folder``."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}", "--monitor-interval=0.1"]
    command += [
        f"--max-restarts={restarts}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
        *map(str, arguments),
    ]
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def message_of(call: Callable[..., object], *args: Any, **options: Any) -> str:
    """Return the line with which a call is refused; "accepted" where it is not."""
    try:
        call(*args, **options)
    except DdlToolError as error:
        return str(error)
    return "accepted"


def wait_until(condition: Callable[[], object], what: str, within_s: float = 120.0) -> None:
    """Return once ``condition`` holds; raise AssertionError that ``what`` did not come about in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what}"
        time.sleep(0.01)


def free_port() -> int:
    """Return a TCP port of this machine that nobody uses now.

    Not one of those that the system gives to connections: another test's may be given it before it is listened at.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    for _ in range(1000):
        port = random.SystemRandom().randrange(min(lowest, 32_768) // 2, min(lowest, 32_768))
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port
    raise AssertionError(f"no port below {lowest} is free")


def children_left(within_s: float = 60.0) -> list[list[str]]:
    """Return the command lines of this process's children that are still there after ``within_s`` seconds."""
    deadline = time.monotonic() + within_s
    while (left := _children()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _children() -> list[list[str]]:
    """Return the commands of this process's children and of those that were forked for it; neither helpers nor lasting ones."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            command = child.cmdline()
            if any(name in " ".join(command) for name in _HELPERS):
                found += [(forked, forked.cmdline()) for forked in child.children()]
            else:
                found.append((child, command))
    return [command for child, command in found if child.pid not in LASTING and _runs(child)]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _command(process: psutil.Process) -> list[str]:
    """Return a process's command line; nothing where it has just ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def workers_of(pid: int, least: int) -> list[psutil.Process]:
    """Return the measuring processes, once there are so many; multiprocessing's own helper is none of them."""
    found: list[psutil.Process] = []

    def enough() -> bool:
        found[:] = [child for child in psutil.Process(pid).children() if "spawn_main" in " ".join(_command(child))]
        return len(found) >= least

    wait_until(enough, f"{least} measuring processes")
    return found
