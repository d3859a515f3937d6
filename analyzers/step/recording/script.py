"""The process in which a script is recorded: ``python -m ddltool.analyzers.step.recording.script REQUEST -- COMMAND``.

REQUEST is a JSON file: ``out`` (where the graph is written), ``label`` (its name), ``scratch`` (the folder for what the script
writes, null: the disk), the GPU that the script finds, and ``absent`` (packages to stand in for, set by a first try). A process
that recorded no step says why in a line on stderr that begins with FAILURE_MARK.
"""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import shutil
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ddltool import own_process
from ddltool.analyzers.step.recording.files import overlay
from ddltool.analyzers.step.recording.graph_of import graph_of
from ddltool.analyzers.step.recording.groups import stand_in_groups, world_size
from ddltool.analyzers.step.recording.kernels import PACKAGES
from ddltool.analyzers.step.recording.launchers import launched
from ddltool.analyzers.step.recording.libraries import change_libraries
from ddltool.analyzers.step.recording.packages import (
    ABSENT,
    FAILURE_MARK,
    INSTEAD,
    missing,
    needed_by,
    stand_in_packages,
)
from ddltool.analyzers.step.recording.posing import posed, recording_modules, register_device
from ddltool.analyzers.step.recording.recorder import Recorder
from ddltool.analyzers.step.recording.vision import declare_torchvision
from ddltool.analyzers.step.recording.window import StepWindow, note_short
from ddltool.errors import InputError
from ddltool.graph import write_graph

_NETWORK_S = 20.0
"""Seconds after which the script's connections give up."""
_FAILED = 3
"""The exit status where no step was recorded."""
_PARENT_POLL_S = 1.0
"""Seconds between two looks at whether the parent process lives."""


def main(arguments: list[str]) -> int:
    """Run a script where CUDA seems to be there, and record one steady step.

    ``arguments``: the request's file (its keys: see the module's docstring), ``--``, and the command. Once the step is
    recorded, the graph is written and the process ends (:func:`_write_graph_and_exit`). If the script fails for a missing
    package, this process starts anew with a stand-in for it (:class:`_Retry`). So the function returns only if no step was
    recorded: the exit status, after the reason was written to stderr.
    """
    request = json.loads(Path(arguments[0]).read_text())
    retry = _Retry(arguments, request, dict(os.environ), os.getcwd())  # before the script can change any of them
    try:
        launch = launched(arguments[arguments.index("--") + 1 :], request["count"])
    except InputError as error:
        _tell_parent(f"{error.problem}; {error.remedy}")
        return 2  # the status of wrong input
    # The world that the script finds: the launcher's variables, its files, its ranks, and packages that are not here.
    os.environ.update(launch.variables())
    socket.setdefaulttimeout(_NETWORK_S)
    if request.get("scratch"):
        shutil.rmtree(request["scratch"], ignore_errors=True)
        overlay(Path(request["scratch"]))
    torchvision_ops = declare_torchvision()  # before the script imports torchvision, which fails without its ops
    threading.Thread(target=_follow_parent, args=(os.getppid(),), daemon=True).start()
    own_process.claim()  # it will not train, so that it may register the device beside a GPU, too
    recorder = Recorder(register_device())
    started_s = time.perf_counter()
    window = StepWindow(recorder, lambda: _write_graph_and_exit(window, request, started_s))
    random.seed(0)  # two recordings of a script draw alike
    stand_in_groups(recorder)
    script = list(launch.script)
    sys.path.insert(0, os.getcwd() if launch.is_module else str(Path(script[0]).resolve().parent))
    if not retry.absent and not launch.is_module:
        # Packages that the script imports at its top are stood in for at once: without them it is sure to fail.
        request["absent"] = needed_by(script[:1])
    stand_in_packages(retry.absent, PACKAGES, partial(_note_stand_in, window))
    change_libraries(recorder, torchvision_ops)
    sys.argv = script
    # Copies of tensors ask for addresses, which tensors without values lack: no matter of the script's user.
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    gpu = {"name": request["name"], "memory_bytes": request["memory_bytes"], "capability": tuple(request["capability"])}
    gpu_count = launch.per_node if launch.processes is not None else 1
    try:  # the recording itself: until the window's callback ends the process, or the script ends before that
        with posed(recorder, **gpu, count=gpu_count), recording_modules(recorder):
            if launch.is_module:
                runpy.run_module(script[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script[0], run_name="__main__")
    except SystemExit as error:
        retry.without_what_is_missing(error)  # does not return if the script lacked a package
        return _exited(error, window)
    except Exception as error:  # whatever the script raises is its user's to read
        retry.without_what_is_missing(error)
        return _raised(error, window)
    return _failed("the script ended", window)


def _exited(error: SystemExit, window: StepWindow) -> int:
    """Tell the parent process that the script ended itself before its step was recorded; return the exit status."""
    if error.code in (None, 0):
        return _failed("the script ended", window)
    # A library of command lines may catch the script's exception, and end the process in its place.
    if isinstance(error.__context__, Exception):
        return _raised(error.__context__, window)
    return _failed(f"the script ended with {error.code!r}", window)


def _tell_parent(line: str) -> None:
    """Write to stderr, marked for the parent process, why no step was recorded.

    ``line``: the problem and, after "; ", what would be right.
    """
    sys.stderr.write(f"{FAILURE_MARK}{line}\n")


def _write_graph_and_exit(window: StepWindow, request: Mapping[str, Any], started_s: float) -> NoReturn:
    """Write the graph of the recorded step, and end the process at once, with status 0 or ``_FAILED``.

    The script is not run to its end, and its threads and exit handlers are not waited for: they may wait for other
    ranks. ``started_s``: when the recording began, by ``time.perf_counter``.
    """
    status, step = _FAILED, window.recorder.step
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            step.seconds = time.perf_counter() - started_s
            step.world_size = world_size()
            step.tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"  # which the older settings change, too
            note_short(step)
            if step.calls:
                write_graph(graph_of(step, request["label"]), Path(request["out"]))
                status = 0
            else:
                _tell_parent("its step runs nothing on a GPU; let it train on cuda")
    except Exception as error:  # of any kind: the parent waits for a reason, and the process ends either way
        status = _raised(error, window)
    finally:
        sys.stderr.flush()
        os._exit(status)


def _note_stand_in(window: StepWindow, package: str) -> None:
    """Add a package to those that were stood in for: in ``window``, for messages, and in the recording's assumptions.

    Called whenever the script imports a stand-in for the package or one of its modules; only the first time counts.
    """
    if package not in window.absent:
        window.absent.append(package)
        window.recorder.step.assumed[f"{ABSENT}{package}"] = 1


@dataclass
class _Retry:
    """Replaces this process by a new one that records with stand-ins for packages that the script turned out to need.

    A new process is needed because the failed import has left modules half loaded.
    """

    arguments: list[str]
    """The arguments of this process: the request's file, ``--``, and the command."""
    request: dict[str, Any]
    environment: dict[str, str]
    """The environment variables at the start, before the script changed them."""
    folder: str
    """The current folder at the start."""

    @property
    def absent(self) -> list[str]:
        """The packages that are stood in for; the request carries them from one start to the next."""
        return list(self.request.get("absent", []))

    def without_what_is_missing(self, error: BaseException) -> None:
        """Replace this process by a new one, with more stand-ins, if a script's error names packages that are missing.

        Returns only if it names none, or only some that have stand-ins already. The request's file is rewritten.
        """
        packages = [name for name in missing(error) if name not in self.absent]
        if not packages:
            return
        sys.stderr.write(f"{', '.join(packages)}: not installed here; once more with a stand-in\n")
        sys.stdout.flush()
        sys.stderr.flush()
        Path(self.arguments[0]).write_text(json.dumps(self.request | {"absent": self.absent + packages}))
        with suppress(OSError):
            os.chdir(self.folder)
        module = "ddltool.analyzers.step.recording.script"
        os.execve(sys.executable, [sys.executable, "-m", module, *self.arguments], self.environment)


def _follow_parent(parent: int) -> None:
    """Block until the parent process has ended, for whatever reason, then end this one with status 1.

    ``parent``: the parent's process number. Run in a thread, so that a killed parent leaves no recording behind.
    """
    while os.getppid() == parent:
        time.sleep(_PARENT_POLL_S)
    os._exit(1)


def _raised(error: Exception, window: StepWindow) -> int:
    """Write the traceback of an error of the script to stderr, and tell the parent its first line; return the exit status."""
    traceback.print_exception(error)
    text = str(error).strip()
    # Semicolons become commas, because the parent takes what follows one for the remedy.
    reason = text.splitlines()[0].replace(";", ",") if text else _raised_at(error)
    return _failed(f"the script raised {type(error).__name__}: {reason}", window, _remedy(error))


def _raised_at(error: BaseException) -> str:
    """Return where an error was raised, as ``at train.py:3 (loss.backward())``; "" for an error without a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"at {Path(frames[-1].filename).name}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
    return place.replace(";", ",")  # as in _raised


_NETWORK = re.compile(
    r"hub|offline|download|resolve|max retries|connect|urlopen|name or service|dataset", re.IGNORECASE
)
"""A word in an OSError, or in the name of its type, that speaks of a network or a hub."""


def _remedy(error: BaseException) -> str:
    """Return advice for a script that failed to fetch something; "" if neither the error nor its causes name a network."""
    chain: list[BaseException] = [error]
    for raised in chain:  # the list grows while it is read
        earlier = (raised.__cause__, raised.__context__)
        chain += [other for other in earlier if other is not None and other not in chain]
    for raised in chain:
        if isinstance(raised, OSError) and _NETWORK.search(f"{type(raised).__name__} {raised}"):
            return "what a run would fetch is to be here: fetch it before, or give a path of this disk"
    return ""


def _failed(happening: str, window: StepWindow, remedy: str = "") -> int:
    """Tell the parent process why no step was recorded; return the exit status.

    ``happening``: what happened, with its subject ("the script ended"); ``remedy``: what would be right, "" where that is
    not known. Packages that were stood in for are named, with advice about them where there is no other remedy.
    """
    line = f"{happening} after {window.updates} of the 2 updates that are needed"
    if window.absent:
        line += f" (stood in for, not installed here: {', '.join(window.absent)})"
    if window.absent and not remedy:
        advice = ", ".join(INSTEAD[name] for name in window.absent if name in INSTEAD)
        remedy = advice or f"if the script needs more of them: pip install {' '.join(window.absent)}, or leave them out"
    if remedy:
        line += f"; {remedy}"
    _tell_parent(line)
    return _FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
