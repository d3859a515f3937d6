"""Processes in which scripts are recorded, forked from one that has loaded what each of them would load first.

They start in a twentieth of a second, not in three, and are otherwise as ``python -m`` would start them: nothing but the
product's module is loaded. Run as a script, this file is the process that forks.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

_MODULE = "ddltool.analyzers.step.recording.script"
_MOST_BYTES = 2**17


class Starter:
    """Stands in for ``subprocess.Popen`` where a recording is started."""

    def __init__(self, lasting: set[int]) -> None:
        """``lasting``: gets the number of the process that forks, which starts with the first recording."""
        self._lasting, self._lock = lasting, threading.Lock()
        self._server: socket.socket | None = None

    def __call__(self, arguments: list[str], *, env: dict[str, str], **options: Any) -> Any:
        if arguments[1:3] != ["-m", _MODULE]:
            return subprocess.Popen(arguments, env=env, **options)
        with self._lock:
            if self._server is None:
                self._server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._process = subprocess.Popen([sys.executable, __file__], stdin=theirs)
                self._lasting.add(self._process.pid)
                theirs.close()
            answers, theirs = socket.socketpair()
            reading, writing = os.pipe()
            request = {"arguments": arguments[3:], "environment": env, "folder": os.getcwd()}
            socket.send_fds(self._server, [json.dumps(request).encode()], [theirs.fileno(), writing])
            theirs.close()
            os.close(writing)
        return _Recording(arguments, answers, reading, options["errors"])

    def close(self) -> None:
        """End the process that forks."""
        if self._server is not None:
            self._server.close()
            self._process.wait()


class _Recording:
    """What :mod:`subprocess` tells of a process."""

    def __init__(self, arguments: list[str], answers: socket.socket, output: int, errors: str) -> None:
        self._arguments, self._answers = arguments, answers.makefile("r")
        self._socket = answers
        self.returncode: int | None = None
        self.stdout = os.fdopen(output, encoding="utf-8", errors=errors)
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(1e-3)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._socket.settimeout(timeout)
            try:
                self.returncode = int(self._socket.recv(16))
            except TimeoutError:
                raise subprocess.TimeoutExpired(self._arguments, timeout or 0.0) from None
            self._socket.close()
        return self.returncode


def serve() -> None:
    """Fork for each request on the socket that is stdin; return once nobody can ask any more."""
    import torch._dynamo  # noqa: F401 - which every mode of fake tensors loads

    from ddltool.analyzers.step.recording.script import main

    gc.freeze()  # none of it is garbage, nor looked through in what is forked
    requests = socket.socket(fileno=0)
    minders: list[int] = []
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 2)
        if not message:
            return
        minders = [minder for minder in minders if os.waitpid(minder, os.WNOHANG)[0] == 0]
        minder = os.fork()
        if minder == 0:
            _mind(json.loads(message), main, *descriptors)
        minders.append(minder)
        for descriptor in descriptors:
            os.close(descriptor)


def _mind(request: dict[str, Any], main: Callable[[list[str]], int], answers: int, output: int) -> None:
    """Fork the recording, tell its number and, once it has ended, how."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, 64)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        sys.path[0] = request["folder"]
        code = 1
        try:
            code = main(request["arguments"])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(output)
    os.write(answers, f"{child}\n".encode())
    os.write(answers, f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}".encode())
    os._exit(0)


if __name__ == "__main__":
    serve()
