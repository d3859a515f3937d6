"""``transformers:NAME``: the default configuration of a model type, or the one in a file (``transformers:config.json``), with
the head that it is trained with. Start at :func:`transformers_step`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddltool.analyzers.loading.known_values import bind
from ddltool.analyzers.loading.packages import REMEDY, imported, nearest
from ddltool.analyzers.loading.transformers_inputs import example_inputs, packed
from ddltool.analyzers.tracing.step import TrainingStep, default_loss, language_model_loss
from ddltool.artifacts import read_text
from ddltool.errors import DdlToolError, InputError, one_line

_TABLES: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("transformers.toml").read_text(encoding="utf-8"))


def transformers_step(name: str, sequence_length: int | None = None) -> TrainingStep:
    """Return one training step of a model type's default configuration, under the ambient default device.

    ``name`` may be the path of a published ``config.json`` as well, which says its type. ``sequence_length``: tokens of text,
    by default 128 or as many as the model takes. Raises InputError for unknown types, for those that cannot be built or fed
    here, and for a length that the model does not have.
    """
    source = f"transformers:{name}"
    transformers = imported("transformers", source)
    transformers.logging.set_verbosity_error()
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    given: dict[str, Any] = {}
    file = Path(name) if name.endswith(".json") else None
    if file is not None:
        given = _config_file(file)
        name, source = str(given.pop("model_type")), str(file)
    if name not in known:
        remedy = nearest(name, known, ("bert", "gpt2", "llama", "t5", "vit"))
        raise InputError(source, f"unknown model type {name!r}", remedy)
    try:
        config = transformers.AutoConfig.for_model(name, **given)
    except Exception as error:  # some types are put together from others and have no default
        problem = "has no default configuration" if file is None else f"is no configuration of a {name}"
        raise _refusal(source, problem, error) from error
    step = configured_step(config, name, sequence_length)
    return step if file is None else replace(step, name=file.stem)


def _config_file(path: Path) -> dict[str, Any]:
    """Return a published configuration: a mapping with ``model_type``. Raises InputError for another file."""
    try:
        found = json.loads(read_text(path))
    except ValueError as error:
        raise InputError(str(path), f"is no JSON ({one_line(str(error))})", "give a model's config.json") from None
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise InputError(f"{path}:model_type", "is missing", "give a model's config.json, as transformers writes it")
    left_out = {"auto_map", "quantization_config", "torch_dtype", "dtype", "transformers_version", "_name_or_path"}
    return {key: value for key, value in found.items() if key not in left_out}


def configured_step(config: Any, name: str, sequence_length: int | None = None) -> TrainingStep:
    """Return the step of a transformers configuration; otherwise as :func:`transformers_step`."""
    source = f"transformers:{name}"
    _accept_any_grouped_product()
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a training step keeps no generation cache, and it would be traced as outputs
    note = _repair(config, name)
    try:
        head, cls = _model_class(config, name)
        module = cls._from_config(config)
    except DdlToolError:
        raise
    except Exception as error:  # never with real weights instead: they may be larger than this machine
        raise _refusal(source, "cannot be built", error) from error
    for part in module.modules():
        if type(part).__name__.endswith("Router") and hasattr(part, "classifier"):
            # It converts its weights in every forward to the type that they have; a tensor being traced cannot be.
            part.classifier.to = lambda *_, itself=part.classifier, **__: itself
    inputs = example_inputs(module, config, source, sequence_length)
    loss = language_model_loss if head in _TABLES["token_heads"] else _prediction_loss
    bound = bind(module, inputs, source, packed(inputs))
    return TrainingStep(name=name, module=module, inputs=bound, loss=loss, note=note)


def _repair(config: Any, name: str) -> str:
    """Replace defaults that do not fit together, and return a note on them."""
    replaced = dict(_TABLES["repairs"].get(name, {}))
    vision: Any = getattr(config, "vision_config", None)
    width = getattr(vision, "out_hidden_size", None)
    if width is not None and width != config.get_text_config().hidden_size:  # its rows take the place of tokens
        replaced["vision_config.out_hidden_size"] = config.get_text_config().hidden_size
    for path, value in replaced.items():
        *parts, field = path.split(".")
        setattr(reduce(getattr, parts, config), field, value)
    listed = ", ".join(f"{path}={value}" for path, value in replaced.items())
    return f"the type's defaults do not fit together; used instead: {listed}" if replaced else ""


def _refusal(source: str, problem: str, error: Exception) -> InputError:
    text = one_line(f"{type(error).__name__}: {error}")[:300]
    return InputError(source, f"{problem} ({text})", REMEDY)


def _model_class(config: Any, name: str) -> tuple[str, Any]:
    """Return the task whose head a type is trained with, and the class with that head."""
    import transformers
    from transformers.models.auto import modeling_auto as auto

    def listed(task: str) -> Any:
        table = vars(auto).get(f"MODEL_{task and f'FOR_{task}_'}MAPPING_NAMES", {})
        names = table.get(name)
        return names[0] if isinstance(names, (tuple, list)) else names

    for head in _TABLES["heads"]:
        # An encoder is one that also predicts masked tokens; what is trained is its classifier.
        task = "SEQUENCE_CLASSIFICATION" if head == "ENCODER" and listed("MASKED_LM") else head
        found = None if task == "ENCODER" else listed(task)
        if found is not None:
            return head, getattr(transformers, found)
    # Parts of other models have a type of their own, but are in no table.
    try:
        modeling = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    except ModuleNotFoundError:
        modeling = None
    parts = [
        cls
        for cls in (vars(modeling).values() if modeling is not None else ())
        if inspect.isclass(cls) and getattr(cls, "config_class", None) is type(config) and "forward" in vars(cls)
    ]
    if not parts:
        raise InputError(
            f"transformers:{name}", "is a configuration without a model", "name the model that it is a part of"
        )
    return "", min(parts, key=lambda cls: (len(cls.__name__), cls.__name__))


def _prediction_loss(output: Any) -> Tensor:
    """Return a loss on an output's logits and predictions, or on all of it where it has none: states are no targets."""
    if not isinstance(output, Mapping):
        return default_loss(output)
    wanted = {key: value for key, value in output.items() if "logits" in key or "pred" in key}
    return default_loss(wanted or output)


@cache
def _accept_any_grouped_product() -> torch.library.Library:
    """Let the products of mixtures of experts be traced in any type, and return what keeps it so.

    torch's kernels multiply groups of float32 and float16 rows as well; only the function that tells the shape of the
    result insists on bfloat16.
    """

    def shape_of(
        left: Tensor, right: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
    ) -> Tensor:
        if left.dim() == 2 and right.dim() == 2 and offs is not None:
            size = [offs.shape[0], left.shape[0], right.shape[1]]  # one product for each group of the inner dimension
        elif left.dim() == 3 and right.dim() == 2:
            size = [left.shape[1], right.shape[1]]
        else:
            size = [*left.shape[:-1], right.shape[-1]]
        return left.new_empty(size, dtype=out_dtype or left.dtype)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_grouped_mm", shape_of, "Meta", allow_override=True)
    return library
