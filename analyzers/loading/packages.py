"""Optional packages that hold models: how they are imported, and ``timm:NAME`` and ``timm:NAME@SIZE``."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ddltool.analyzers.tracing.step import TrainingStep, default_loss
from ddltool.errors import InputError, MissingExtra, one_line

REMEDY = "write a factory that returns (module, example_inputs)"


def imported(package: str, source: str) -> ModuleType:
    """Return a package that is an extra of its own name. Raises MissingExtra when it is not installed."""
    declare_torchvision()
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
def declare_torchvision() -> torch.library.Library | None:
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


def least_batch(module: nn.Module) -> int:
    """Return the samples of an example: two with BatchNorm, which needs more than one value for every channel."""
    return 1 + any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())


def timm_step(name: str) -> TrainingStep:
    """Return one training step of a timm model on images (3, H, W) of the size that it was made for, or of ``@SIZE``.

    Raises InputError for unknown names and for models that cannot be built, MissingExtra without timm.
    """
    source = f"timm:{name}"
    timm = imported("timm", source)
    name, at, side = name.partition("@")
    if not timm.is_model(name):
        remedy = nearest(name, timm.list_models(), ("resnet50", "convnext_base", "vit_base_patch16_224"))
        raise InputError(source, f"unknown model {name!r}", remedy)
    if at and not side.isdecimal():
        raise InputError(source, f"cannot read the image size {side!r}", f"give pixels: timm:{name}@256")
    pixels = {"img_size": int(side)} if at else {}
    module = _built(timm, source, name)
    made_for: Any = module.default_cfg
    # A model of fixed size has to be built for another; the others take images of any.
    if pixels and made_for.get("fixed_input_size") and int(side) != made_for["input_size"][-1]:
        module = _built(timm, source, name, **pixels)
    channels, *sides = made_for["input_size"]
    size = (channels, int(side), int(side)) if at else (channels, *sides)
    images = torch.ones(least_batch(module), *size)
    return TrainingStep(name=name, module=module, inputs=(images,), loss=default_loss)


def _built(timm: Any, source: str, name: str, **options: int) -> nn.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of names that timm has renamed since
            made: nn.Module = timm.create_model(name, pretrained=False, **options)
    except Exception as error:
        text = one_line(f"{type(error).__name__}: {error}")[:300]
        raise InputError(source, f"cannot be built ({text})", REMEDY) from error
    return made
