"""``ddltool doctor``: what this machine offers to ddltool, and what to do about what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from ddltool.commands.options import Json

if TYPE_CHECKING:
    from ddltool.runtime.measuring.machine_checks import Check

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
    from ddltool.errors import InputError

    if overhead is not None:
        from ddltool.commands.overhead import show_overhead

        show_overhead(overhead, max_overhead, pairs, steps, replicas, as_json)
        return
    if max_overhead:
        raise InputError("--max-overhead", "needs a script", "add --overhead SCRIPT")
    _look(as_json)


def _look(as_json: bool) -> None:
    """Print what this machine offers; raise CheckFailed when something needed does not work."""
    from ddltool import __version__
    from ddltool.commands.output import out, print_json, table
    from ddltool.errors import CheckFailed

    checks, machine = _examine()
    failed = [check for check in checks if check.status == "failed"]
    versions = _versions()
    if as_json:
        document = {"kind": "ddltool.doctor", "schema_version": 1, "version": __version__, **machine, **versions}
        document["passed"] = not failed
        document["checks"] = [
            {"name": each.name, "status": each.status, "found": each.found, "remedy": each.remedy} for each in checks
        ]
        print_json(document)
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
    from ddltool.runtime.measuring import machine_checks as tried

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
    from ddltool.runtime.measuring.machine_checks import Check

    return Check(name="python", status="ok", found=f"{platform.python_version()}, {sys.executable}")


def _package_checks() -> list[Check]:
    """One line for all packages, and one for each that is missing."""
    from ddltool.runtime.measuring.machine_checks import Check

    missing = [name for name in PACKAGES if _version(name) is None]
    if not missing:
        shown = f"all {len(PACKAGES)} there; torch {_version('torch')}"
        return [Check(name="packages", status="ok", found=shown)]
    return [
        Check(name=name, status="failed", found="missing", remedy=f"pip install {name}, or install ddltool again")
        for name in missing
    ]


def _cores_check(machine: dict[str, Any]) -> Check:
    from ddltool.runtime.measuring.machine_checks import Check

    cores, busy = machine["cpu_count"], os.getloadavg()[0]
    found = f"{cores} core(s), {machine['memory_gib']} GiB of memory, load {busy:.1f}"
    if busy <= cores:
        return Check(name="machine", status="ok", found=found)
    remedy = "other programs keep it busy: measured times will be noisy (profile says how sure each is)"
    return Check(name="machine", status="warning", found=found, remedy=remedy)


def _cuda_check(machine: dict[str, Any]) -> Check:
    from ddltool.runtime.measuring.machine_checks import Check

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
    from ddltool.runtime.measuring.machine_checks import check_folder, check_shared_memory

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
    from ddltool.runtime.measuring.machine_checks import Check, check_folder

    remedy = "set TMPDIR to a writable folder"
    try:
        folder = tempfile.gettempdir()
    except OSError as error:
        return Check(name="temporary files", status="failed", found=str(error.strerror or error), remedy=remedy)
    return check_folder("temporary files", folder, required=True, remedy=remedy)


def _extra_checks() -> list[Check]:
    from ddltool.runtime.measuring.machine_checks import Check

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
