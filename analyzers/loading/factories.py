"""``package.module:factory`` and ``path/file.py:factory``: what a function of the user's makes, as a training step."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddltool.analyzers.loading.packages import declare_torchvision
from ddltool.analyzers.tracing.step import TrainingStep, batch_dimension, default_loss, guess_inputs, tensors_in
from ddltool.errors import DdlToolError, InputError, did_you_mean, one_line


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
