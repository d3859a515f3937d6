"""Training steps of the user's factories (``package.module:factory``, ``path/file.py:factory``) and of timm's models
(``timm:NAME``, ``timm:NAME@SIZE``), and the import of optional packages with models.
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
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ddltool.analyzers.step.recording.vision import declare_torchvision
from ddltool.analyzers.step.tracing.batches import divide_batch, with_batch
from ddltool.analyzers.step.tracing.step import (
    TrainingStep,
    as_arguments,
    batch_dimension,
    default_loss,
    guess_inputs,
    tensors_in,
)
from ddltool.errors import DdlToolError, InputError, MissingExtra, did_you_mean, one_line

REMEDY = "write a factory that returns (module, example_inputs)"


def imported(package: str, source: str) -> ModuleType:
    """Import an optional package, which is also the name of ddltool's extra, and return it.

    ``source``: what names the model, for messages. Raises MissingExtra if the package is not installed.
    """
    declare_torchvision()  # timm and transformers import torchvision, which may not load without this
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingExtra(source, package, package) from None


def nearest(name: str, known: Iterable[str], otherwise: Iterable[str]) -> str:
    """Return a question for error messages that lists the known names close to ``name``, or ``otherwise`` if none is."""
    close_names = difflib.get_close_matches(name, list(known), n=5) or list(otherwise)
    return f"did you mean {', '.join(close_names)}?"


def least_batch(module: nn.Module) -> int:
    """Return how many samples an example input needs: 2 with BatchNorm, which needs several values per channel, else 1."""
    has_batch_norm = any(isinstance(submodule, nn.modules.batchnorm._BatchNorm) for submodule in module.modules())
    return 2 if has_batch_norm else 1


def timm_step(name: str, attention: str | None = None) -> TrainingStep:
    """Return one training step of a timm model on images of its default size, or of ``@SIZE`` pixels: ``resnet50@256``.

    ``attention``: eager or sdpa; None: what timm picks. Images are (batch, channels, height, width). Raises InputError for
    unknown names and for models that cannot be built, MissingExtra without timm. timm's setting of attention, if one is
    asked for, stays changed in this process.
    """
    source = f"timm:{name}"
    timm = imported("timm", source)
    name, separator, size_text = name.partition("@")
    if not timm.is_model(name):
        remedy = nearest(name, timm.list_models(), ("resnet50", "convnext_base", "vit_base_patch16_224"))
        raise InputError(source, f"unknown model {name!r}", remedy)
    if separator and not size_text.isdecimal():
        raise InputError(source, f"cannot read the image size {size_text!r}", f"give pixels: timm:{name}@256")
    pixels = int(size_text) if separator else None  # None: the model's default size
    if attention is not None:
        timm.layers.set_fused_attn(attention != "eager")  # a model reads this setting when it is built
    module = _timm_model(timm, source, name)
    default_config: Any = module.default_cfg
    channels, default_height, default_width = default_config["input_size"]
    # A model of fixed image size is built anew for another size; other models take images of any size.
    if pixels is not None and default_config.get("fixed_input_size") and pixels != default_width:
        module = _timm_model(timm, source, name, img_size=pixels)
    height, width = (default_height, default_width) if pixels is None else (pixels, pixels)
    images = torch.ones(least_batch(module), channels, height, width)
    return TrainingStep(name=name, module=module, inputs=(images,), loss=default_loss)


def _timm_model(timm: Any, source: str, name: str, **options: int) -> nn.Module:
    """Return the timm model ``name`` without trained weights; ``options`` go to ``timm.create_model``.

    Raises InputError, which names ``source``, if it cannot be built.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about names that timm has renamed
            module: nn.Module = timm.create_model(name, pretrained=False, **options)
    except Exception as error:
        message = one_line(f"{type(error).__name__}: {error}")[:300]
        raise InputError(source, f"cannot be built ({message})", REMEDY) from error
    return module


def factory_step(source: str) -> TrainingStep:
    """Import the factory that ``source`` names (``FILE.py:NAME`` or ``PACKAGE:NAME``), call it, and return its model's step.

    The factory is called without arguments and returns what :func:`step_from` takes. Raises InputError for a file or
    package that cannot be imported, for a missing factory, and for one that raises or returns anything else.
    """
    location, _, name = source.rpartition(":")
    declare_torchvision()  # the file may import timm or transformers
    module = _import_file(location, source) if location.endswith(".py") else _import_module(location, source)
    factory = getattr(module, name, None)
    if factory is None:
        function_names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InputError(source, f"{location} has no {name!r}", did_you_mean(name, function_names))
    if not callable(factory):
        raise InputError(source, f"{name!r} is not callable", "give a function that returns an nn.Module")
    with _user_errors(source, "the factory raised", "it must work when called without arguments"):
        product = factory()
    return step_from(product, source, name)


def fed_step(model: Any, batch: Any, name: str) -> TrainingStep:
    """Return the step of a model on a batch of its DataLoader.

    ``model`` is a module, (module, example inputs), a function that returns either, or the step of a model that was given
    by name, whose module is changed. The batch takes the place of example inputs. ``name``: of the step, and in errors.
    Raises InputError for anything else, and for a batch that does not fit the module.
    """
    batch = _off_the_gpu(batch)
    if isinstance(model, TrainingStep):
        vars(model.module).pop("forward", None)  # a named model's forward was bound to the inputs made for it
        return with_batch(model, divide_batch(model.module, batch))
    is_function = callable(model) and not isinstance(model, nn.Module)
    if is_function:
        with _user_errors(name, "the function raised", "it must work when called without arguments"):
            model = model()
    module = model[0] if isinstance(model, tuple) and model else model
    if not isinstance(module, nn.Module):
        raise InputError(
            name, f"a {type(module).__name__} is no model", "give an nn.Module, or a function that makes it"
        )
    parts = divide_batch(module, batch)
    return with_batch(held_step((module, parts.example), name), parts)


def held_step(model: Any, name: str) -> TrainingStep:
    """Return the step of a module, of (module, example inputs), or of a function that returns either.

    The step has a copy of the module whose weights are on the meta device, so that the caller's module stays unchanged
    and no memory is taken; what a function returns is not copied. ``name``: of the step, and in errors. Raises InputError
    for anything else, and for a module that cannot be copied.
    """
    is_function = callable(model) and not isinstance(model, nn.Module)
    if is_function:
        with _user_errors(name, "the function raised", "it must work when called without arguments"):
            return step_from(model(), name, name)
    module, inputs = model if isinstance(model, tuple) and len(model) == 2 else (model, None)
    if not isinstance(module, nn.Module):
        raise InputError(
            name, f"a {type(module).__name__} is no model", "give an nn.Module or (nn.Module, example_inputs)"
        )
    tensors = [*module.parameters(), *module.buffers()]
    copies: dict[int, Any] = {}  # by the identity of a weight; deepcopy takes what it finds here instead of copying
    for tensor in tensors:
        weightless = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
        is_parameter = isinstance(tensor, nn.Parameter)
        copies[id(tensor)] = nn.Parameter(weightless, tensor.requires_grad) if is_parameter else weightless
    with _user_errors(name, "cannot be copied:", "give a function that makes it"):
        module_copy = copy.deepcopy(module, copies)
    return step_from(module_copy if inputs is None else (module_copy, inputs), name, name)


def _off_the_gpu(example: Any) -> Any:
    """Return an example with its CUDA tensors replaced by tensors of the meta device, which have no values.

    No recording reads their values, and a recording in a forked process cannot use CUDA once its parent has.
    """

    def without_cuda(tensor: Tensor) -> Tensor:
        """Return a tensor of the same shape and type without values for one on CUDA; return any other tensor itself."""
        return torch.empty_like(tensor, device="meta") if tensor.is_cuda else tensor

    return tree_map_only(Tensor, without_cuda, example)


def step_from(product: Any, source: str, name: str) -> TrainingStep:
    """Return the step of ``product``: a module, or (module, example inputs).

    Example inputs are one input, a tuple of them, or a mapping of keywords; without them they are guessed. The loss is
    ``module.loss(output, module.example_targets(batch_size))`` for a module that has both methods, else the default loss.
    ``source`` names the step in messages, ``name`` in results. Raises InputError for any other product.
    """
    note = ""
    if isinstance(product, tuple) and len(product) == 2 and isinstance(product[0], nn.Module):
        module, example = product
    elif isinstance(product, nn.Module):
        module = product
        example, note = guess_inputs(module)
    else:
        type_name = type(product).__name__
        remedy = "return an nn.Module or (nn.Module, example_inputs)"
        raise InputError(source, f"the factory returned a {type_name}", remedy)
    # With the default loss; in its place the module's own, if it has one.
    inputs, keywords = as_arguments(_off_the_gpu(example))
    step = TrainingStep(
        name=name,
        module=module,
        inputs=inputs,
        keywords=keywords,
        loss=default_loss,
        note=note,
        batch_dimension=batch_dimension(module, guessed=bool(note)),
    )
    module_loss = getattr(module, "loss", None)
    targets = getattr(module, "example_targets", None)
    if not (callable(module_loss) and callable(targets)):
        return step

    def loss(output: Any) -> Any:
        """Return the module's own loss against its own targets, for as many samples as the output has."""
        first_output = tensors_in(output)[0]
        return module_loss(output, targets(first_output.shape[0]).to(first_output.device))

    return replace(step, loss=loss)


@contextmanager
def _user_errors(source: str, problem: str, remedy: str) -> Iterator[None]:
    """Turn exceptions of the user's code in the block into an InputError of one line: ``problem``, then the exception.

    ``source``: what the error is about, ``remedy``: what would be right. That includes SystemExit, which would end the
    command without a message. Errors of ddltool and KeyboardInterrupt pass unchanged, and so do, with the meta device as
    the default, errors that it may have caused.
    """
    try:
        yield
    except (DdlToolError, KeyboardInterrupt):
        raise
    except BaseException as error:
        is_of_meta = torch.get_default_device().type == "meta"
        if is_of_meta and isinstance(error, (NotImplementedError, RuntimeError, TypeError)):
            raise  # the op lacks a meta kernel or reads a weight's value: the caller builds with real weights instead
        message = one_line(f"{type(error).__name__}: {error}")[:300]
        raise InputError(source, f"{problem} {message}", remedy) from error


def _import_module(name: str, source: str) -> ModuleType:
    """Import a module from the installed packages or the working folder, which is added to ``sys.path``, and return it.

    Raises InputError, which names ``source`` (the user's text, ``PACKAGE:NAME``), if the import fails.
    """
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as `python -m` does, so that a package in the working folder is found
    with _user_errors(source, f"cannot import {name}:", "is it installed, or in this folder?"):
        return importlib.import_module(name)


def _import_file(location: str, source: str) -> Any:
    """Import a Python file, whose folder is added to ``sys.path``, and return its module.

    Raises InputError, which names ``source``, for a missing file or a failing import.
    """
    path = Path(location)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise InputError(source, f"no such file: {location}", "give the path of a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules.setdefault(
        path.stem, module
    )  # its classes may be pickled by this name; an imported package keeps its own
    with _user_errors(source, f"{location} cannot be loaded:", "it must import without errors"):
        spec.loader.exec_module(module)
    return module
