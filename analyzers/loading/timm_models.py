"""``timm:NAME`` and ``timm:NAME@SIZE``: an image model of the timm package, without its pretrained weights."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from ddltool.analyzers.loading.bound import REMEDY, least_batch
from ddltool.analyzers.loading.packages import imported, nearest
from ddltool.analyzers.tracing.step import TrainingStep, default_loss
from ddltool.errors import InputError, one_line


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
