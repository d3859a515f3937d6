"""Optional packages that hold models."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from ddltool.errors import MissingExtra


def imported(package: str, source: str) -> ModuleType:
    """Return a package that is an extra of its own name. Raises MissingExtra when it is not installed."""
    _declare_torchvision()
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingExtra(source, package, package) from None


def nearest(name: str, known: Iterable[str], otherwise: Iterable[str]) -> str:
    """Return a remedy with only the nearest names, or ``otherwise``: there are hundreds."""
    near = difflib.get_close_matches(name, list(known), n=5) or list(otherwise)
    return f"did you mean {', '.join(near)}?"


@cache
def _declare_torchvision() -> torch.library.Library | None:
    """Declare torchvision's two ops where its compiled part cannot be loaded, and return what keeps them declared.

    PyPI's torchvision is compiled for torch with CUDA. Beside a CPU torch its import fails on giving these ops a meta
    kernel, and with it that of timm and of most of transformers, though no traced model ever calls them.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return None
    try:
        for compiled in Path(found.origin).parent.glob("_C.*"):
            torch.ops.load_library(str(compiled))
            return None
    except OSError:
        pass  # built for another torch (with CUDA, say): the two names below stand in for it
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
