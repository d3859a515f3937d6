"""SOURCE on the command line: resolves it to a training step or a graph.

``model.onnx``, ``package.module:factory``, ``path/file.py:factory``, ``zoo:NAME``, ``transformers:NAME`` or
``graph.json``. Everything heavy is imported when it is needed.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddltool.errors import DdlToolError, InputError, MissingExtra, did_you_mean, one_line

if TYPE_CHECKING:
    from ddltool.analyzers.tracing.step import TrainingStep
    from ddltool.graph import Graph, Mode

FORMS = "model.onnx, package.module:factory, path/file.py:factory, zoo:NAME, transformers:NAME or graph.json"


def is_graph_file(source: str) -> bool:
    """Return whether SOURCE names a graph document."""
    return source.removesuffix(".gz").endswith(".json")


def is_onnx_file(source: str) -> bool:
    """Return whether SOURCE names an ONNX file."""
    return source.endswith(".onnx")


def load_graph(source: str, mode: Mode | None, batch_size: int | None) -> Graph:
    """Return the graph of any SOURCE. Torch sources default to a training step, ONNX files to inference.

    Raises InputError when the source does not exist, does not run, or has no such mode.
    """
    if is_graph_file(source):
        from ddltool.graph_io import read_graph

        graph = read_graph(source)
        if mode is not None and mode != graph.mode:
            raise InputError("--mode", f"{source} holds a graph for {graph.mode}, not {mode}", "leave --mode out")
        if batch_size is not None and batch_size != graph.batch_size:
            raise InputError("--batch-size", f"{source} was traced for {graph.batch_size}", "trace the model again")
        return graph
    if is_onnx_file(source):
        from ddltool.analyzers.tracing.onnx_adapter import trace_onnx

        if mode == "training":
            raise InputError("--mode", f"{source} holds a forward graph only", "use --mode inference for ONNX files")
        return trace_onnx(source, batch_size=batch_size)
    from ddltool.analyzers.tracing.torch_adapter import trace_torch

    with contextlib.redirect_stdout(sys.stderr):  # what the user's forward prints must not mix with the result either
        return trace_torch(lambda: resolve_step(source), mode=mode or "training", batch_size=batch_size)


def training_step(source: str, batch_size: int) -> TrainingStep:
    """Return a real training step of a torch SOURCE at that batch size, weights allocated and initialised."""
    from dataclasses import replace

    from ddltool.analyzers.tracing.step import with_batch_size

    if is_graph_file(source) or is_onnx_file(source):
        raise InputError(source, "cannot be trained here", "give a torch source: zoo:NAME, file.py:factory, ...")
    step = resolve_step(source)
    return replace(step, inputs=with_batch_size(step.inputs, batch_size))


def resolve_step(source: str) -> TrainingStep:
    """Return the module of a torch SOURCE with example inputs and a loss, under the ambient default device."""
    scheme, colon, rest = source.partition(":")
    if scheme == "zoo" and colon:
        return _zoo_step(rest)
    if scheme == "transformers" and colon:
        return _transformers_step(rest)
    if not colon:
        exists = Path(source).exists()
        problem = "is not a model that ddltool reads" if exists else "no such file or source"
        raise InputError(source, problem, f"SOURCE is {FORMS}")
    return _factory_step(source)


def _zoo_step(name: str) -> TrainingStep:
    from ddltool.fixtures import zoo

    entry = zoo.entry(name)
    return _step_from((zoo.build(name), zoo.example_inputs(name)), f"zoo:{name}", entry.name)


def _transformers_step(name: str) -> TrainingStep:
    try:
        import transformers
    except ImportError:
        raise MissingExtra(f"transformers:{name}", "transformers", "transformers") from None
    import torch

    from ddltool.analyzers.tracing.step import TrainingStep, default_loss, language_model_loss

    transformers.logging.set_verbosity_error()
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if name not in known:
        raise InputError(f"transformers:{name}", f"unknown model type {name!r}", _near(name, list(known.keys())))
    config = transformers.AutoConfig.for_model(name)
    auto, language = _auto_class(type(config))
    module = auto.from_config(config)
    if module.main_input_name == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        inputs: tuple[Any, ...] = (torch.zeros(1, getattr(config, "num_channels", 3), height, width),)
    elif module.main_input_name == "input_ids":
        length = min(128, getattr(config, "max_position_embeddings", None) or 128)
        tokens = torch.zeros(1, length, dtype=torch.long)
        inputs = (tokens, None, tokens) if config.is_encoder_decoder else (tokens,)
    else:
        problem = f"takes {module.main_input_name}, for which ddltool has no example inputs"
        raise InputError(f"transformers:{name}", problem, "write a factory that returns (module, example_inputs)")
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a training step keeps no generation cache, and it would be traced as outputs
    loss = language_model_loss if language else _logits_loss(default_loss)
    return TrainingStep(name=name, module=module, inputs=inputs, loss=loss)


def _near(name: str, known: list[str]) -> str:
    """Return only the nearest names: there are hundreds of model types."""
    import difflib

    near = difflib.get_close_matches(name, known, n=5) or ["bert", "gpt2", "llama", "t5", "vit"]
    return f"did you mean {', '.join(near)}?"


def _logits_loss(loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a loss on the output's logits where it has some: hidden states are no targets."""
    return lambda output: loss(output.logits if getattr(output, "logits", None) is not None else output)


def _auto_class(config: type[Any]) -> tuple[Any, bool]:
    """Return transformers' auto class for the task that a model type is usually trained on, and if it predicts tokens."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    if config in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForSeq2SeqLM, True
    if config in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        return transformers.AutoModelForImageClassification, False
    if config in auto.MODEL_FOR_MASKED_LM_MAPPING and config in auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return transformers.AutoModelForSequenceClassification, False
    if config in auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM, True
    return transformers.AutoModel, False


def _factory_step(source: str) -> TrainingStep:
    location, _, name = source.rpartition(":")
    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints must not mix with the result
        module = _import_file(location, source) if location.endswith(".py") else _import_module(location, source)
        factory = getattr(module, name, None)
        if factory is None:
            names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            raise InputError(source, f"{location} has no {name!r}", did_you_mean(name, names))
        if not callable(factory):
            raise InputError(source, f"{name!r} is not callable", "give a function that returns an nn.Module")
        try:
            made = factory()
        except (DdlToolError, NotImplementedError, KeyboardInterrupt):
            raise  # NotImplementedError: the meta device lacks an op; the tracer then builds with real weights
        except BaseException as error:  # SystemExit too: a factory must not end the command without a word
            text = one_line(f"{type(error).__name__}: {error}")[:300]
            raise InputError(
                source, f"the factory raised {text}", "it must work when called without arguments"
            ) from error
    return _step_from(made, source, name)


def _step_from(made: Any, source: str, name: str) -> TrainingStep:
    from torch import nn

    from ddltool.analyzers.tracing.step import TrainingStep, default_loss, guess_inputs, tensors_in

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
    own = getattr(module, "loss", None)
    targets = getattr(module, "example_targets", None)
    if not (callable(own) and callable(targets)):
        return TrainingStep(name=name, module=module, inputs=inputs, loss=default_loss, note=note)

    def loss(output: Any) -> Any:
        first = tensors_in(output)[0]
        return own(output, targets(first.shape[0]).to(first.device))

    return TrainingStep(name=name, module=module, inputs=inputs, loss=loss, note=note)


def _import_module(name: str, source: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does, so that a package in the working folder is found
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may call sys.exit
        text = one_line(f"{type(error).__name__}: {error}")[:300]
        raise InputError(source, f"cannot import {name} ({text})", f"SOURCE is {FORMS}") from error


def _import_file(location: str, source: str) -> Any:
    path = Path(location)
    if not path.is_file():
        raise InputError(source, f"no such file: {location}", "give the path of a Python file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise InputError(source, f"{location} cannot be loaded", "give the path of a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script may call sys.exit
        text = one_line(f"{type(error).__name__}: {error}")[:300]
        raise InputError(source, f"{location} cannot be loaded ({text})", "it must import without errors") from error
    return module
