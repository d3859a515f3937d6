"""``package.module:factory`` and ``path/file.py:factory``: what a function of the user's makes, as a training step.

Optional packages that hold models: how they are imported, and ``timm:NAME`` and ``timm:NAME@SIZE``.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ddltool.analyzers.tracing.step import TrainingStep, batch_dimension, default_loss, guess_inputs, tensors_in
from ddltool.errors import DdlToolError, InputError, MissingExtra, did_you_mean, one_line

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


def factory_step(source: str) -> TrainingStep:
    """Return the step of the module that the function named by ``source`` makes, called without arguments.

    Raises InputError for what cannot be imported, has no such function, or makes no module.
    """
    location, _, name = source.rpartition(":")
    declare_torchvision()  # the file may import what needs it
    module = _import_file(location, source) if location.endswith(".py") else _import_module(location, source)
    factory = getattr(module, name, None)
    if factory is None:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InputError(source, f"{location} has no {name!r}", did_you_mean(name, names))
    if not callable(factory):
        raise InputError(source, f"{name!r} is not callable", "give a function that returns an nn.Module")
    with _told(source, "the factory raised", "it must work when called without arguments"):
        made = factory()
    return step_from(made, source, name)


def held_step(held: Any, name: str) -> TrainingStep:
    """Return the step of a module, (module, example inputs) or a function that makes one, as a program holds it.

    A module is traced as a copy without weights: the caller's own stays as it is.
    """
    if callable(held) and not isinstance(held, nn.Module):
        with _told(name, "the function raised", "it must work when called without arguments"):
            return step_from(held(), name, name)
    module, inputs = held if isinstance(held, tuple) and len(held) == 2 else (held, None)
    if not isinstance(module, nn.Module):
        raise InputError(
            name, f"a {type(module).__name__} is no model", "give an nn.Module or (nn.Module, example_inputs)"
        )
    tensors = [*module.parameters(), *module.buffers()]
    empty: dict[int, Any] = {}
    for tensor in tensors:
        bare = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
        empty[id(tensor)] = nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
    with _told(name, "cannot be copied:", "give a function that makes it"):
        shadow = copy.deepcopy(module, empty)  # every weight is replaced by one that takes no memory
    return step_from(shadow if inputs is None else (shadow, inputs), name, name)


def step_from(made: Any, source: str, name: str) -> TrainingStep:
    """Return the step of a module or of (module, example inputs), trained on the module's own loss where it has one.

    That is ``module.loss(output, module.example_targets(batch_size))``. Raises InputError for anything else.
    """
    note = ""
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        module, inputs = made
        inputs = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
    elif isinstance(made, nn.Module):
        module = made
        inputs, note = guess_inputs(module)
    else:
        kind = type(made).__name__
        raise InputError(source, f"the factory returned a {kind}", "return an nn.Module or (nn.Module, example_inputs)")
    step = TrainingStep(
        name=name,
        module=module,
        inputs=inputs,
        loss=default_loss,
        note=note,
        batch_dimension=batch_dimension(module, guessed=bool(note)),
    )
    own = getattr(module, "loss", None)
    targets = getattr(module, "example_targets", None)
    if not (callable(own) and callable(targets)):
        return step

    def loss(output: Any) -> Any:
        first = tensors_in(output)[0]
        return own(output, targets(first.shape[0]).to(first.device))

    return replace(step, loss=loss)


@contextmanager
def _told(source: str, problem: str, remedy: str) -> Iterator[None]:
    """Turn whatever the user's code raises into one line; SystemExit too: it must not end the command without a word."""
    try:
        yield
    except (DdlToolError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if torch.get_default_device().type == "meta" and isinstance(
            error, (NotImplementedError, RuntimeError, TypeError)
        ):
            raise  # an op that the meta device lacks, or a number asked of a weight that is not there: real ones have it
        text = one_line(f"{type(error).__name__}: {error}")[:300]
        raise InputError(source, f"{problem} {text}", remedy) from error


def _import_module(name: str, source: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does, so that a package in the working folder is found
    with _told(source, f"cannot import {name}:", "is it installed, or in this folder?"):
        return importlib.import_module(name)


def _import_file(location: str, source: str) -> Any:
    path = Path(location)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise InputError(source, f"no such file: {location}", "give the path of a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules.setdefault(path.stem, module)
    with _told(source, f"{location} cannot be loaded:", "it must import without errors"):
        spec.loader.exec_module(module)
    return module
