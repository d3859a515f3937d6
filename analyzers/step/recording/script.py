"""The process in which a script is recorded: ``python -m ddltool.analyzers.step.recording.script REQUEST -- COMMAND``.

REQUEST is a JSON file: ``out`` (the graph that is written), ``scratch`` (the folder of what the script writes), and the GPU
that it finds. Ends with one line on stderr where no step could be recorded.
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
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ddltool.analyzers.step.recording.files import overlay
from ddltool.analyzers.step.recording.graph_of import graph_of
from ddltool.analyzers.step.recording.groups import stand_in_groups, world_size
from ddltool.analyzers.step.recording.kernels import PACKAGES
from ddltool.analyzers.step.recording.launchers import launched
from ddltool.analyzers.step.recording.libraries import change_libraries
from ddltool.analyzers.step.recording.packages import ABSENT, INSTEAD, missing, needed_by, stand_in_packages
from ddltool.analyzers.step.recording.posing import posed, recording_modules, register_device
from ddltool.analyzers.step.recording.recorder import Recorder
from ddltool.analyzers.step.recording.vision import declare_torchvision
from ddltool.analyzers.step.recording.window import StepWindow
from ddltool.errors import InputError
from ddltool.graph import write_graph

_NETWORK_S = 20.0


def main(arguments: list[str]) -> int:
    """Run a script where CUDA seems to be there, and record one steady step; return the exit status where there was none.

    ``arguments``: the request's file, ``--``, and the command. Once the step is recorded the graph is written and the process
    ends (:func:`_write`). Whatever ends the script before is one line on stderr, behind a NUL byte.
    """
    request = json.loads(Path(arguments[0]).read_text())
    again = _Again(arguments, request, dict(os.environ), os.getcwd())
    try:
        launch = launched(arguments[arguments.index("--") + 1 :], request["count"])
    except InputError as error:
        sys.stderr.write(f"\x00{error.problem}; {error.remedy}\n")
        return 2
    os.environ.update(launch.variables())
    socket.setdefaulttimeout(_NETWORK_S)
    if request.get("scratch"):
        shutil.rmtree(request["scratch"], ignore_errors=True)
        overlay(Path(request["scratch"]))
    torchvision_ops = declare_torchvision()  # the script may import it
    threading.Thread(target=_follow_parent, args=(os.getppid(),), daemon=True).start()
    recorder = Recorder(register_device())
    started_s = time.perf_counter()
    window = StepWindow(recorder, lambda: _write(window, request, started_s))
    random.seed(0)
    stand_in_groups(recorder)
    script = list(launch.script)
    sys.path.insert(0, os.getcwd() if launch.is_module else str(Path(script[0]).resolve().parent))
    if not again.absent and not launch.is_module:
        request["absent"] = needed_by(script[:1])  # what fails for sure need not fail first
    stand_in_packages(again.absent, PACKAGES, partial(_note_stand_in, window))
    change_libraries(recorder, torchvision_ops)
    sys.argv = script
    gpu = {"name": request["name"], "memory_bytes": request["memory_bytes"], "capability": tuple(request["capability"])}
    try:
        with (
            posed(recorder, **gpu, count=launch.per_node if launch.processes is not None else 1),
            recording_modules(recorder),
        ):
            if launch.is_module:
                runpy.run_module(script[0], run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script[0], run_name="__main__")
    except SystemExit as error:
        again.without_what_is_missing(error)
        if error.code not in (None, 0) and isinstance(error.__context__, Exception):
            return _raised(error.__context__, window)  # a library of commands caught it, and ended the process
        if error.code not in (None, 0):
            return _failed(f"the script ended with {error.code!r}", window)
    except Exception as error:  # whatever the script raises is its user's to read
        again.without_what_is_missing(error)
        return _raised(error, window)
    return _failed("the script ended", window)


def _write(window: StepWindow, request: Mapping[str, Any], started_s: float) -> NoReturn:
    """Write the graph, and end the process: threads and handlers of the script may wait for what never comes."""
    status, step = 3, window.recorder.step
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            step.seconds = time.perf_counter() - started_s
            step.world_size = world_size()
            step.tf32 = torch.backends.cuda.matmul.allow_tf32 or torch.get_float32_matmul_precision() != "highest"
            if step.calls:
                write_graph(graph_of(step, request["label"]), Path(request["out"]))
                status = 0
            else:
                sys.stderr.write("\x00its step runs nothing on a GPU; let it train on cuda\n")
    except Exception as error:
        status = _raised(error, window)
    finally:
        sys.stderr.flush()
        os._exit(status)


def _note_stand_in(window: StepWindow, package: str) -> None:
    """Note that the script used a package that is not installed here, for the graph and for what is said at the end."""
    if package not in window.absent:
        window.absent.append(package)
        window.recorder.step.assumed[f"{ABSENT}{package}"] = 1


@dataclass
class _Again:
    """Starts the recording anew in this process, with stand-ins for packages that the script turned out to need."""

    arguments: list[str]
    request: dict[str, Any]
    environment: dict[str, str]
    folder: str

    @property
    def absent(self) -> list[str]:
        """The packages that are stood in for."""
        return list(self.request.get("absent", []))

    def without_what_is_missing(self, error: BaseException) -> None:
        """Begin anew where an error says that a package is missing; return where none is, or its stand-in did not do."""
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
    """End this process once the one that started it has ended, however that came."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _raised(error: Exception, window: StepWindow) -> int:
    traceback.print_exception(error)
    text = str(error).strip()
    reason = text.splitlines()[0].replace(";", ",") if text else _place(error)
    return _failed(f"the script raised {type(error).__name__}: {reason}", window, _remedy(error))


def _place(error: BaseException) -> str:
    """Return where an error without words came from."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"at {Path(frames[-1].filename).name}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""
    return place.replace(";", ",")


_NETWORK = re.compile(
    r"hub|offline|download|resolve|max retries|connect|urlopen|name or service|dataset", re.IGNORECASE
)


def _remedy(error: BaseException) -> str:
    """Return what to do where a script would have fetched something, by the errors that its own came from."""
    causes: list[BaseException] = [error]
    for cause in causes:
        causes += [
            before for before in (cause.__cause__, cause.__context__) if before is not None and before not in causes
        ]
    if any(isinstance(cause, OSError) and _NETWORK.search(f"{type(cause).__name__} {cause}") for cause in causes):
        return "what a run would fetch is to be here: fetch it before, or give a path of this disk"
    return ""


def _failed(what: str, window: StepWindow, remedy: str = "") -> int:
    line = f"{what} after {window.updates} of the 2 updates that are needed"
    if window.absent:
        line += f" (stood in for, not installed here: {', '.join(window.absent)})"
        instead = [INSTEAD[name] for name in window.absent if name in INSTEAD]
        remedy = (
            remedy
            or ", ".join(instead)
            or f"if the script needs more of them: pip install {' '.join(window.absent)}, or leave them out"
        )
    if remedy:
        line += f"; {remedy}"
    sys.stderr.write(f"\x00{line}\n")
    return 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
