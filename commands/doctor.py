"""``ddltool doctor``: what this machine offers to ddltool."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from typing import Annotated, Any, Optional

import typer

from ddltool.commands.options import Json

PACKAGES = ("torch", "onnx", "numpy", "pandas", "scipy", "ortools", "networkx", "scikit-learn", "matplotlib")
OPTIONAL = ("transformers", "ray")


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
    """Show versions, processors, memory and GPUs, and what is missing; or measure what ddltool costs a script."""
    from ddltool.errors import InputError

    if overhead is not None:
        from ddltool.commands.overhead import show_overhead

        show_overhead(overhead, max_overhead, pairs, steps, replicas, as_json)
        return
    if max_overhead:
        raise InputError("--max-overhead", "needs a script", "add --overhead SCRIPT")
    _look(as_json)


def _look(as_json: bool) -> None:
    """Print what this machine offers."""
    from ddltool import __version__
    from ddltool.commands.output import out, print_json, table

    document = {"kind": "ddltool.doctor", "schema_version": 1, "version": __version__, **_machine(), **_packages()}
    if as_json:
        print_json(document)
        return
    rows = [("python", document["python"]), ("cpu cores", str(document["cpu_count"]))]
    rows += [
        ("memory", f"{document['memory_gib']} GiB"),
        ("CUDA devices", ", ".join(document["cuda_devices"]) or "none"),
    ]
    rows += [("gloo", "yes" if document["gloo"] else "no: profile --replicas and the hook need it")]
    rows += [(name, version or "missing") for name, version in document["packages"].items()]
    rows += [(name, version or "not installed (optional)") for name, version in document["optional"].items()]
    out().print(table(f"ddltool {__version__}", ("what", "found"), rows))


def _machine() -> dict[str, Any]:
    import psutil
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "cuda_devices": gpus,
        "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
    }


def _packages() -> dict[str, Any]:
    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {
        "packages": {name: version(name) for name in PACKAGES},
        "optional": {name: version(name) for name in OPTIONAL},
    }
