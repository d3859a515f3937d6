"""``ddltool doctor``: what this machine offers to ddltool, and what to do about what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shlex
import shutil
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer

from ddltool import __version__, units
from ddltool.commands.options import Json
from ddltool.commands.output import out, print_json, progress, table
from ddltool.errors import CheckFailed, InputError
from ddltool.results import DoctorResult, MachineCheck, OverheadInterval, OverheadResult, OverheadRun
from ddltool.runtime.measuring import machine_checks as tried
from ddltool.runtime.measuring.machine_checks import Check, check_folder, check_shared_memory
from ddltool.runtime.measuring.overhead import Interval, Overhead, measure_overhead
from ddltool.units import show_seconds

PACKAGES = (
    "torch",
    "onnx",
    "numpy",
    "pandas",
    "scipy",
    "ortools",
    "networkx",
    "scikit-learn",
    "matplotlib",
    "pydantic",
    "PyYAML",
    "psutil",
    "typer",
    "rich",
)
OPTIONAL = {
    "transformers": "sources transformers:NAME: pip install 'ddltool[transformers]'",
    "ray": "simulate --engine ray: pip install 'ddltool[ray]'",
}
_BROWSERS = ("chromium", "chromium-browser")


def doctor(
    overhead: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar='"SCRIPT ARGS"',
            help="Measure instead what ddltool costs this training script, on and off in turns.",
            show_default=False,
        ),
    ] = None,
    max_overhead: Annotated[
        str, typer.Option(metavar="SHARE", help="With --overhead: exit 1 when it is above, such as 1%.")
    ] = "",
    pairs: Annotated[int, typer.Option(help="With --overhead: pairs of runs.", min=1, max=1000)] = 10,
    steps: Annotated[int, typer.Option(help="With --overhead: optimizer steps of each run.", min=4)] = 60,
    replicas: Annotated[int, typer.Option(help="With --overhead: processes, under torchrun.", min=1, max=4096)] = 1,
    as_json: Json = False,
) -> None:
    """Try what ddltool needs of this machine, and say what to do about it; or measure what it costs a script."""
    if overhead is not None:
        show_overhead(overhead, max_overhead, pairs, steps, replicas, as_json)
        return
    if max_overhead:
        raise InputError("--max-overhead", "needs a script", "add --overhead SCRIPT")
    _look(as_json)


def _look(as_json: bool) -> None:
    """Print what this machine offers; raise CheckFailed when something needed does not work."""
    checks, machine = _examine()
    failed = [check for check in checks if check.status == "failed"]
    versions = _versions()
    if as_json:
        tried_all = [MachineCheck(**asdict(each)) for each in checks]
        print_json(DoctorResult(version=__version__, **machine, **versions, passed=not failed, checks=tried_all))
    else:
        rows = [(each.name, each.status, each.found) for each in checks]
        out().print(table(f"ddltool {__version__}", ("what", "status", "found"), rows, text_columns=3))
        for each in checks:
            if each.remedy:
                out().print(f"{each.name}: {each.remedy}", soft_wrap=True)
    if failed:
        names = ", ".join(check.name for check in failed)
        raise CheckFailed(f"{len(failed)} of {len(checks)} checks failed: {names}; remedies are in the output")


def _examine() -> tuple[list[Check], dict[str, Any]]:
    """Return all checks, and the figures of the machine. The two processes start first: they import torch meanwhile."""
    port = tried.check_store_port()
    if importlib.util.find_spec("torch") is None or port.status != "ok":
        machine = _machine()
        checks = [_python_check(), *_package_checks(), _cores_check(machine), port, tried.check_clock()]
        return [*checks, *_folder_checks(), *_extra_checks()], machine
    with tried.processes() as pair:
        machine = _machine()
        checks = [_python_check(), *_package_checks(), _cores_check(machine), _cuda_check(machine), port]
        checks += pair.checks()
    # The clock is looked at when the processes are done: a busy machine is not a coarse clock.
    return [*checks, tried.check_clock(), *_folder_checks(), *_extra_checks()], machine


def _python_check() -> Check:

    return Check(name="python", status="ok", found=f"{platform.python_version()}, {sys.executable}")


def _package_checks() -> list[Check]:
    """One line for all packages, and one for each that is missing."""
    missing = [name for name in PACKAGES if _version(name) is None]
    if not missing:
        shown = f"all {len(PACKAGES)} there; torch {_version('torch')}"
        return [Check(name="packages", status="ok", found=shown)]
    return [
        Check(name=name, status="failed", found="missing", remedy=f"pip install {name}, or install ddltool again")
        for name in missing
    ]


def _cores_check(machine: dict[str, Any]) -> Check:

    cores, busy = machine["cpu_count"], os.getloadavg()[0]
    found = f"{cores} core(s), {machine['memory_gib']} GiB of memory, load {busy:.1f}"
    if busy <= cores:
        return Check(name="machine", status="ok", found=found)
    remedy = "other programs keep it busy: measured times will be noisy (profile says how sure each is)"
    return Check(name="machine", status="warning", found=found, remedy=remedy)


def _cuda_check(machine: dict[str, Any]) -> Check:

    devices = machine["cuda_devices"]
    if devices:
        return Check(name="CUDA", status="ok", found=f"{len(devices)}: {', '.join(dict.fromkeys(devices))}")
    if machine["cuda_build"] is None:
        return Check(
            name="CUDA",
            status="optional",
            found="torch is built without it",
            remedy="GPUs are predicted (profile --analytic), not measured; to measure, install a CUDA build of torch",
        )
    return Check(
        name="CUDA",
        status="warning",
        found=f"torch is built for CUDA {machine['cuda_build']}, no device seen",
        remedy="look at nvidia-smi, the driver's version and CUDA_VISIBLE_DEVICES",
    )


def _folder_checks() -> list[Check]:

    cache = os.environ.get("MPLCONFIGDIR") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return [
        check_folder("this folder", Path.cwd(), required=False, remedy="give -o FILE in a writable folder"),
        _temporary_check(),
        check_folder(
            "cache", cache, required=False, remedy="set MPLCONFIGDIR to a writable folder, or each picture takes longer"
        ),
        check_shared_memory(),
    ]


def _temporary_check() -> Check:

    remedy = "set TMPDIR to a writable folder"
    try:
        folder = tempfile.gettempdir()
    except OSError as error:
        return Check(name="temporary files", status="failed", found=str(error.strerror or error), remedy=remedy)
    return check_folder("temporary files", folder, required=True, remedy=remedy)


def _extra_checks() -> list[Check]:

    found: list[Check] = []
    for name, remedy in OPTIONAL.items():
        version = _version(name)
        if version is None:
            found.append(Check(name=name, status="optional", found="not installed", remedy=remedy))
        else:
            found.append(Check(name=name, status="ok", found=version))
    browser = next((path for name in _BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        remedy = "only the tests that look at reports need it: apt-get install chromium"
        found.append(Check(name="chromium", status="optional", found="not installed", remedy=remedy))
    else:
        found.append(Check(name="chromium", status="ok", found=browser))
    return found


def _machine() -> dict[str, Any]:
    import psutil

    figures: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "cuda_devices": [],
        "cuda_build": None,
        "gloo": False,
    }
    if importlib.util.find_spec("torch") is None:
        return figures
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    return {**figures, "cuda_devices": gpus, "cuda_build": torch.version.cuda, "gloo": gloo}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> dict[str, Any]:
    return {
        "packages": {name: _version(name) for name in PACKAGES},
        "optional": {name: _version(name) for name in OPTIONAL},
    }


# The body of ``ddltool doctor --overhead SCRIPT``: what ddltool costs a training script, measured on this machine


def show_overhead(script: str, max_overhead: str, pairs: int, steps: int, replicas: int, as_json: bool) -> None:
    """Measure, print, and raise CheckFailed when the overhead is above the limit beyond doubt."""
    limit = parse_share(max_overhead) if max_overhead else None
    try:
        command = shlex.split(script)
    except ValueError as error:
        raise InputError(
            "--overhead", f"cannot be split into words ({error})", "quote the script's arguments"
        ) from None
    if not command:
        raise InputError("--overhead", "names no script", 'give "train.py --its options"')
    warmup = min(10, max(steps // 4, 1))
    with progress("runs", 2 * pairs) as advance:
        measured = measure_overhead(
            command, pairs=pairs, steps=steps, warmup=warmup, replicas=replicas, progress=lambda done: advance(done, "")
        )
    found = _overhead_result(script, measured, limit, replicas)
    if as_json:
        print_json(found)
    else:
        rows = [
            ("wall clock", *_cells(measured, "wall_s", measured.wall)),
            ("CPU seconds", *_cells(measured, "cpu_s", measured.cpu)),
        ]
        percent = f"{min(measured.wall.confidence, measured.cpu.confidence):.1%}"
        made = f"Measured: {pairs} pairs of runs in turns; {percent} intervals of the median."
        caption = f"{made} {_verdict_words(found)}".strip()
        out().print(
            table(
                f"ddltool on and off: {command[0]}",
                ("per step", "off", "on", "overhead", "interval"),
                rows,
                caption=caption,
            )
        )
    if found.verdict == "above":
        raise CheckFailed(f"the overhead of ddltool is above {max_overhead} of a step")


def parse_share(text: str) -> float:
    """Return a share from "1%" or "0.01". Raises InputError for anything but a number from 0 to 1000 %.

    >>> parse_share("1%"), parse_share("0.02")
    (0.01, 0.02)
    """
    share = units.parse_share(text)
    if not 0 <= share <= 10:
        raise InputError("--max-overhead", f'is "{text}"', "give a share such as 1%")
    return share


def _overhead_result(script: str, measured: Overhead, limit: float | None, replicas: int) -> OverheadResult:
    verdict = None
    if limit is not None:
        found = {measured.wall.excess(limit), measured.cpu.excess(limit)}
        order: tuple[Literal["above", "not decided", "within"], ...] = ("above", "not decided", "within")
        verdict = next(word for word in order if word in found)
    return OverheadResult(
        script=script,
        replicas=replicas,
        limit=limit,
        verdict=verdict,
        wall=OverheadInterval(**asdict(measured.wall)),
        cpu=OverheadInterval(**asdict(measured.cpu)),
        on=[OverheadRun(**asdict(run)) for run in measured.on],
        off=[OverheadRun(**asdict(run)) for run in measured.off],
    )


def _cells(measured: Overhead, name: str, interval: Interval) -> tuple[str, str, str, str]:

    off, on = (statistics.median(getattr(run, name) for run in runs) for runs in (measured.off, measured.on))
    ends = f"{interval.low - 1:+.1%} to {interval.high - 1:+.1%}"
    return show_seconds(off), show_seconds(on), f"{interval.median - 1:+.1%}", ends


def _verdict_words(found: OverheadResult) -> str:
    """Return the verdict in words; empty without a limit."""
    if found.verdict is None:
        return ""
    if found.verdict == "not decided":
        return f"Whether it is within {found.limit:.1%} is not decided: this machine is too noisy for so few runs (--pairs)."
    return f"The overhead is {found.verdict} {found.limit:.1%}."
