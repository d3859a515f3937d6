"""Training steps of ``transformers:NAME``, where NAME is a model of the hub, a model type (in its default configuration), or a
configuration file (``transformers:config.json``). The model gets the head for its training task. Start at
:func:`transformers_step`.

:func:`example_inputs` makes example inputs from the signature of a model's forward and the sizes in its configuration.
A "tower" is the part of a model that encodes images or sound for its language model. The text for such a model holds a
placeholder token for each embedding that the tower makes of the example, so that the tower feeds the language model.
"""

from __future__ import annotations

import importlib
import inspect
import math
import tomllib
from collections.abc import Mapping
from functools import cache, reduce
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ddltool.analyzers.step.tracing.factories import REMEDY, imported, least_batch, nearest
from ddltool.analyzers.step.tracing.known_values import bind, refusal, run_without_values
from ddltool.analyzers.step.tracing.step import TrainingStep, default_loss, language_model_loss, resized
from ddltool.analyzers.step.tracing.torch_adapter import join_notes
from ddltool.artifacts import read_text
from ddltool.errors import DdlToolError, InputError, one_line
from ddltool.plain_values import from_json
from ddltool.published_models import check_hub_name, configuration_file, find_model, unknown_model

# Fields of configurations that hold the number of a layer's experts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Fields of configurations that hold numbers of which a model has at least one.
_COUNTS = {
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
}
_TABLES: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("transformers.toml").read_text(encoding="utf-8"))


class NamedConfig(NamedTuple):
    """A configuration of transformers, and its names."""

    config: Any
    model_type: str
    title: str
    """The name in results: the model's without its organisation, the file's, or the model type."""
    source: str
    """The name in errors."""
    note: str
    """A remark on default values that were replaced, "" for none."""


def transformers_step(name: str, sequence_length: int | None = None, attention: str | None = None) -> TrainingStep:
    """Return one training step of a model, without its weights, under the ambient default device.

    Args:
        name: of a published model (``meta-llama/Llama-3.1-8B``), a model type, or the path of a ``config.json`` or
            of its folder.
        sequence_length: tokens of text; None: 128, or the model's maximum if less.
        attention: eager or sdpa; None: what the library picks.

    Raises InputError for an unknown name, for a model that cannot be built here or takes inputs that ddltool cannot make,
    and for a length beyond the model's positions, where it has learned them.
    """
    return configured_step(named_config(name), sequence_length, attention)


def configured_step(
    named: NamedConfig, sequence_length: int | None = None, attention: str | None = None
) -> TrainingStep:
    """Return one training step of the model of a configuration, without its weights.

    ``sequence_length``: tokens of text, None: the default; a length beyond what the model is configured for is noted in the
    step. ``attention``: eager or sdpa, None: what the library picks. Errors are those of :func:`transformers_step`.
    """
    head, module = build_model(named, attention)
    inputs = example_inputs(module, named.config, named.source, sequence_length)
    loss = language_model_loss if head in _TABLES["token_heads"] else _prediction_loss
    bound = bind(module, inputs, named.source, packed(inputs))
    note = named.note
    longest = _max_positions(named.config)
    if sequence_length is not None and longest is not None and sequence_length > longest:
        excess = f"{sequence_length:,} tokens are more than the {longest:,} that the model is configured for"
        note = join_notes(note, excess)
    if attention is None and _has_unfused_attention(module):
        note = join_notes(note, "attention is not fused: transformers has no such form of it for this model")
    if any((getattr(named.config.get_text_config(), field, 0) or 0) > 1 for field in _EXPERTS):
        note = join_notes(note, "every replica has all experts (predict --expert-parallel shares them out)")
    return TrainingStep(name=named.title, module=module, inputs=bound, loss=loss, note=note)


def named_config(name: str) -> NamedConfig:
    """Return the configuration that ``transformers:NAME`` stands for: of a file, a published model or a model type.

    Raises InputError for an unknown name, and for fields that make no configuration. Silences transformers' warnings.
    """
    source = f"transformers:{name}"
    file = configuration_file(name)
    fields: dict[str, Any] = {}
    title = model_type = name  # the name is a model type, unless it is a file's or a published model's
    if file is not None:
        path, title = file
        fields, source = _read_config(path), str(path)
        model_type = str(fields.pop("model_type"))
    else:
        check_hub_name(source)
        published = find_model(name)
        if published is not None:
            title = published.name.partition("/")[2]
            model_type, fields = published.model_type, dict(published.fields)
    transformers = imported("transformers", source)
    transformers.logging.set_verbosity_error()
    known_types = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    if model_type not in known_types:
        model_type = model_type.lower()
    if model_type not in known_types:
        if file is None and not fields:
            raise unknown_model(name, known_types)
        remedy = nearest(model_type, known_types, ("bert", "gpt2", "llama", "t5", "vit"))
        raise InputError(source, f"unknown model type {model_type!r}", remedy)
    try:
        config = transformers.AutoConfig.for_model(model_type, **fields)
    except Exception as error:  # of any type; some model types consist of others and have no default configuration
        problem = f"is no configuration of a {model_type}" if fields else "has no default configuration"
        raise _model_error(source, problem, error) from error
    if hasattr(config, "use_cache"):
        config.use_cache = False  # a cache for generation would be traced as outputs, and training keeps none
    note = join_notes(
        "" if fields else _repair_defaults(config, model_type), _keep_layers(config, transformers.PreTrainedConfig)
    )
    return NamedConfig(config, model_type, title, source, note)


def _read_config(path: Path) -> dict[str, Any]:
    """Return the fields of a model's ``config.json`` that describe the model, ``model_type`` among them.

    Raises InputError for a file without ``model_type``, and for counts that no model has.
    """
    document = from_json(read_text(path), str(path))
    if not isinstance(document, dict) or not isinstance(document.get("model_type"), str):
        raise InputError(f"{path}:model_type", "is missing", "give a model's config.json, as transformers writes it")
    for field in _COUNTS & document.keys():
        if isinstance(document[field], int) and document[field] < 1:
            raise InputError(f"{path}:{field}", f"is {document[field]}", "give a number of at least 1")
    heads, key_heads = document.get("num_attention_heads"), document.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(key_heads, int) and heads % key_heads:
        raise InputError(
            f"{path}:num_key_value_heads", f"is {key_heads}, which does not divide {heads} heads", "give a divisor"
        )
    unused_fields = {"auto_map", "quantization_config", "torch_dtype", "dtype", "transformers_version", "_name_or_path"}
    return {key: value for key, value in document.items() if key not in unused_fields}


def build_model(named: NamedConfig, attention: str | None = None) -> tuple[str, nn.Module]:
    """Return (head, model): the model of a configuration for its training task, and the task's name in ``transformers.toml``.

    The name is "" for a model without a head. ``attention``: eager or sdpa; None: what the library picks. Raises InputError
    for a model that cannot be built.
    """
    _accept_any_grouped_product()
    try:
        head, cls = _model_class(named.config, named.model_type)
        if attention == "sdpa" and not cls._supports_sdpa:
            problem = f"transformers has no fused attention for {named.title}"
            raise InputError("--attention", problem, "leave it out")
        module = cls._from_config(named.config, **({} if attention is None else {"attn_implementation": attention}))
    except DdlToolError:
        raise
    except Exception as error:  # never with real weights instead: they may be larger than this machine
        raise _model_error(named.source, "cannot be built", error) from error
    if getattr(named.config, "scale_decoder_outputs", None) is False:
        # T5's family ties its head whatever the configuration says, until it loads weights that hold a head of their own.
        module.lm_head.weight = nn.Parameter(torch.empty_like(module.lm_head.weight))
    for submodule in module.modules():
        if type(submodule).__name__.endswith("Router") and hasattr(submodule, "classifier"):
            # The router converts its weights to their own type in every forward, which a tensor in a trace cannot do.
            submodule.classifier.to = lambda *_, itself=submodule.classifier, **__: itself
    return head, module


def _has_unfused_attention(module: Any) -> bool:
    """Return whether a transformers model has attention, and no form of it in ``scaled_dot_product_attention``."""
    has_heads = getattr(module.config.get_text_config(), "num_attention_heads", 0)
    return bool(has_heads) and not module._supports_sdpa


def _repair_defaults(config: Any, model_type: str) -> str:
    """Replace default values of a configuration that contradict each other; return a note on that, "" for none replaced.

    The configuration is changed. ``transformers.toml`` lists the replacements by model type.
    """
    replacements = dict(_TABLES["repairs"].get(model_type, {}))  # by a field's dotted path, its value
    vision: Any = getattr(config, "vision_config", None)
    vision_width = getattr(vision, "out_hidden_size", None)
    if vision_width is not None:  # its vectors take the place of tokens' vectors, so they have the same width
        text_width = config.get_text_config().hidden_size
        if vision_width != text_width:
            replacements["vision_config.out_hidden_size"] = text_width
    for path, value in replacements.items():
        *parts, field = path.split(".")
        setattr(reduce(getattr, parts, config), field, value)
    assignments = ", ".join(f"{path}={value}" for path, value in replacements.items())
    return f"the type's defaults do not fit together; used instead: {assignments}" if replacements else ""


def _keep_layers(config: Any, kind: type) -> str:
    """Let no layer be skipped at random, in a configuration and those inside it; return a note on that, "" for none changed.

    LayerDrop (arXiv 1909.11556) skips whole layers in some steps, so that one traced step would miss some by chance.
    ``config`` is changed. ``kind``: the base class of configurations, by which those inside are found.
    """
    configs = [config]
    probabilities = [0.0]  # that a layer is skipped in a step
    for each in configs:  # the list grows while it is read: configurations inside are appended
        inner = [value for value in vars(each).values() if isinstance(value, kind)]
        configs += [value for value in inner if not any(value is known for known in configs)]
        names = [name for name in vars(each) if name.endswith("layerdrop")]
        for name in names:
            probabilities.append(getattr(each, name) or 0.0)
            setattr(each, name, 0.0)
    highest = max(probabilities)
    if not highest:
        return ""
    return f"training skips layers at random (layerdrop), each in {highest:.0%} of the steps; all are counted"


def _model_error(source: str, problem: str, error: Exception) -> InputError:
    """Return the one-line InputError for an exception of transformers; ``problem`` says what failed."""
    text = one_line(f"{type(error).__name__}: {error}")[:300]
    return InputError(source, f"{problem} ({text})", REMEDY)


def _model_class(config: Any, model_type: str) -> tuple[str, Any]:
    """Return (head, class) for a model type's training task: the first head of ``transformers.toml`` that transformers has.

    For a type with none, the class is the model itself and the head is "". Raises InputError if there is no such class.
    """
    import transformers
    from transformers.models.auto import modeling_auto as auto

    def class_name_for(task: str) -> Any:
        """Return the name of the model type's class for a task ("": no task), None if transformers has none."""
        table_name = f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES"
        class_names = vars(auto).get(table_name, {}).get(model_type)
        return class_names[0] if isinstance(class_names, (tuple, list)) else class_names

    for head in _TABLES["heads"]:  # by preference
        # A type that can predict masked tokens is an encoder, which is trained as a classifier.
        task = "SEQUENCE_CLASSIFICATION" if head == "ENCODER" and class_name_for("MASKED_LM") else head
        class_name = None if task == "ENCODER" else class_name_for(task)
        if class_name is not None:
            return head, getattr(transformers, class_name)
    # Towers and other parts of models have model types of their own, which are in no table of transformers.
    return "", _class_beside(config, model_type)


def _class_beside(config: Any, model_type: str) -> Any:
    """Return the model's class in the module of transformers that belongs to a configuration's module.

    Raises InputError if there is no such module or class.
    """
    try:
        modeling = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
        values = list(vars(modeling).values())
    except ModuleNotFoundError:
        values = []
    candidates = [
        cls
        for cls in values
        if inspect.isclass(cls) and getattr(cls, "config_class", None) is type(config) and "forward" in vars(cls)
    ]
    if not candidates:
        raise InputError(
            f"transformers:{model_type}", "is a configuration without a model", "name the model that it is a part of"
        )
    # The class with the shortest name is the model itself; the names of others add a task or a part.
    return min(candidates, key=lambda cls: (len(cls.__name__), cls.__name__))


def _prediction_loss(output: Any) -> Tensor:
    """Return the default loss of the outputs whose names hold "logits" or "pred", or of all outputs if none does."""
    if not isinstance(output, Mapping):
        return default_loss(output)
    predictions = {key: value for key, value in output.items() if "logits" in key or "pred" in key}
    return default_loss(predictions or output)


@cache
def _accept_any_grouped_product() -> torch.library.Library:
    """Let the grouped products of mixtures of experts be traced in any type.

    torch's kernels multiply float32 and float16 groups too; only its shape function insists on bfloat16 and is replaced.
    Returns the library of the replacement, which is undone when the library dies; the cache of this function holds it.
    """

    def shape_of(
        left: Tensor, right: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
    ) -> Tensor:
        """Return an empty tensor with the shape and type of the grouped product of ``left`` and ``right``.

        Each has two dimensions, or three with the groups first. ``offs``: where each group of rows, of columns or of the
        inner dimension ends; its length is the number of groups.
        """
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


_GRIDS = frozenset(["image_grid_thw", "grid_thw"])
"""Inputs that say how many patches an image has along time, height and width."""
_TEXT_LENGTH = 128  # tokens
_GRID = 16  # patches along each side of a packed image
_SAMPLES = 16_000  # one second of sound, as most models of raw sound sample it
# Names under which configurations say the longest text.
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "seq_length")
# Names under which they say the token that an image or a sound is put in the place of.
_PLACEHOLDERS = ("{}_token_id", "{}_token_index", "{}_token", "boi_token_id")

_MOST_EXTRA_ROWS = 4
"""A table of position vectors may have up to so many more rows than positions, for an offset and padding."""

Inputs = dict[str, Tensor]
"""Example inputs by name, with the samples in dimension 0."""


def example_inputs(module: nn.Module, config: Any, source: str, length: int | None) -> Inputs:
    """Return example inputs for a transformers model, by name, as real tensors of the CPU.

    They hold one sample, or two for a model with BatchNorm. Floating-point inputs are ones; integers have values that the
    forward may read (tokens, masks, sizes of images). ``length``: tokens of text, None for the default. ``source`` names
    the model in errors. Raises InputError for an input that ddltool cannot make, for inputs that the model refuses, and for
    a length beyond the model's maximum.
    """
    return _InputMaker(module, config, source, length).inputs()


def packed(inputs: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the names of the inputs that the model takes without a batch dimension: the patches of all images in a row.

    Only a model that takes the images' grids has such inputs; for any other model there are none.
    """
    if not _GRIDS.intersection(inputs):
        return frozenset()
    return _GRIDS | {"pixel_values", "hidden_states"}


class _InputMaker:
    """Makes example inputs for one model.

    A tower is the part of a model that encodes images or sound for its language model, whose text holds a placeholder token
    for each of the tower's vectors. A candidate is a set of inputs that the model may accept, to be tried. ``takes`` are
    the parameters of the model's forward; ``vision`` and ``audio`` are the configurations of its towers, or the model's own
    where it has no such tower. A method's ``kind`` is "image" or "audio".
    """

    def __init__(self, module: nn.Module, config: Any, source: str, length: int | None) -> None:
        """Read what the model takes.

        ``config``: its configuration; ``source``: its name in errors; ``length``: the tokens of text that are asked for, None
        for the default.
        """
        self.module = module
        self.config = config
        self.source = source
        self.takes = inspect.signature(module.forward).parameters
        self.vision = _nested_config(config, "vision")
        self.audio = _nested_config(config, "audio", "speech", "encoder")
        self.wanted = length
        """The tokens of text that are asked for, None for the default."""
        self.length = self._text_length(length)
        """The tokens of text: those asked for, or the default."""

    def inputs(self) -> Inputs:
        """Return the first combination of candidates for images, sound and text that the forward accepts.

        A single combination is returned without trying it. Raises InputError if there is none, or none is accepted.
        """
        image_candidates = self._accepted_candidates("image", self._image_candidates())
        sound_candidates = self._accepted_candidates("audio", self._sound_candidates())
        combinations: list[Inputs] = []
        batch = least_batch(self.module)
        for images, sounds in product(image_candidates, sound_candidates):
            media = images | sounds
            # Text comes first, because the first tensor says how long a sample is.
            inputs = self._text_inputs(media) | media | self._other_inputs(media)
            taken = {name: tensor for name, tensor in inputs.items() if name in self.takes}
            combinations.append({name: resized(tensor, 0, batch) for name, tensor in taken.items()})
        if not combinations[0]:
            names = ", ".join(self.takes) or "nothing by name"
            raise InputError(self.source, f"takes {names}, for which ddltool has no example inputs", REMEDY)
        if len(combinations) == 1:
            return combinations[0]
        return self._first_accepted(self.module, "forward", combinations)

    def _text_length(self, wanted: int | None) -> int:
        """Return the number of tokens of text: ``wanted``; for None the default, or the model's maximum if that is less.

        Raises InputError for a ``wanted`` length if the model reads no text, or has learned vectors for fewer positions.
        """
        max_positions = _max_positions(self.config)
        if wanted is None:
            axial = _first_attribute((self.config,), "axial_pos_shape")  # Reformer trains on texts of one length
            return math.prod(axial) if axial else min(_TEXT_LENGTH, max_positions or _TEXT_LENGTH)
        if not {"input_ids", "decoder_input_ids"}.intersection(self.takes):
            raise InputError("--sequence-length", f"{self.source} reads no text", "leave it out")
        limit = self._learned_positions(max_positions) if max_positions is not None else None
        if limit is not None and wanted > limit:
            raise InputError("--sequence-length", f"is {wanted}", f"{self.source} takes at most {limit} tokens")
        return wanted

    def _learned_positions(self, max_positions: int) -> int | None:
        """Return how many positions the model has learned vectors for; None: positions are computed, and have no limit.

        ``max_positions``: the configuration's, by which the table of vectors is recognized among the model's embeddings.
        """
        for submodule in self.module.modules():
            if not isinstance(submodule, nn.Embedding):
                continue
            rows = submodule.num_embeddings
            if max_positions <= rows <= max_positions + _MOST_EXTRA_ROWS:
                padding_index = -1 if submodule.padding_idx is None else submodule.padding_idx
                return min(max_positions, rows - 1 - padding_index)  # positions are counted from after the padding
        return None

    def _first_accepted(self, owner: nn.Module, method: str, candidates: list[Inputs]) -> Inputs:
        """Return the first candidate on which the method ``method`` of the module ``owner`` runs.

        ``candidates``: at least one. If the method runs on none, raises an InputError with what it raised on the first.
        """
        refusals: list[Exception] = []
        for candidate in candidates:
            try:
                run_without_values(owner, method, candidate, packed(candidate))
            except Exception as error:  # whatever a forward raises at a shape that it does not take
                refusals.append(error)
            else:
                return candidate
        raise refusal(self.source, refusals[0]) from refusals[0]

    def _accepted_candidates(self, kind: str, candidates: list[Inputs]) -> list[Inputs]:
        """Return a list of the first candidate that the tower accepts; all candidates for a model without a separate tower.

        ``kind``: "image" or "audio"; ``candidates``: of all inputs of this kind; ``[{}]``: the model has no such input.
        """
        owner = self._tower_module(kind)
        method = f"get_{kind}_features"
        if owner is None or candidates == [{}]:
            return candidates
        tower_inputs = [_method_inputs(getattr(owner, method), candidate) for candidate in candidates]
        accepted = self._first_accepted(owner, method, tower_inputs)
        # Compared by identity, because == would compare the tensors' elements.
        position = next(index for index, inputs in enumerate(tower_inputs) if inputs is accepted)
        return [candidates[position]]

    def _tower_module(self, kind: str) -> nn.Module | None:
        """Return the module whose ``get_KIND_features`` makes the embeddings that replace placeholder tokens.

        None: the configuration has no placeholder token, or neither the model nor its ``model`` has such a method.
        """
        modules = (self.module, getattr(self.module, "model", None))
        owner = next((module for module in modules if hasattr(module, f"get_{kind}_features")), None)
        return owner if self._placeholder_token(kind) is not None else None

    def _placeholder_token(self, kind: str) -> int | None:
        """Return the id of the token that stands in the text for one embedding of an image or sound; None: there is none."""
        names = (pattern.format(kind) for pattern in _PLACEHOLDERS)
        token = _first_attribute((self.config,), *names)
        return token if isinstance(token, int) else None

    def _image_candidates(self) -> list[Inputs]:
        """Return candidates for the model's image inputs, the likeliest first; ``[{}]`` for a model without images.

        A configuration says the sizes but not the order of dimensions, so there are several shapes to try.
        """
        if not {"pixel_values", "pixel_values_videos", "grid_thw"}.intersection(self.takes):
            return [{}]
        channels = _first_attribute((self.vision, self.config), "num_channels", "in_channels", "in_chans", default=3)
        height, width = _image_size(self.vision, self.config, _nested_config(self.config, "backbone"))
        if _GRIDS.intersection(self.takes):
            return self._packed_image_candidates(channels)
        if "spatial_shapes" in self.takes:  # an image cut into patches
            patch = _first_attribute((self.vision,), "patch_size", default=16)
            return [
                {
                    "pixel_values": _floats(1, _GRID**2, channels * patch**2),
                    "pixel_attention_mask": torch.ones(1, _GRID**2, dtype=torch.long, device="cpu"),
                    "spatial_shapes": torch.tensor([[_GRID, _GRID]], device="cpu"),
                }
            ]
        if "aspect_ratio_ids" in self.takes:  # an image cut into tiles
            tiles = _first_attribute((self.vision,), "max_num_tiles", default=4)
            ratio = {"aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long, device="cpu")}
            ratio["aspect_ratio_mask"] = torch.ones(1, 1, tiles, dtype=torch.long, device="cpu")
            return [{"pixel_values": _floats(1, 1, tiles, channels, height, width)} | ratio]
        # A whole image, alone or with a dimension of images, tiles or frames before it.
        frames = _first_attribute((self.vision, self.config), "num_frames", "frames_per_clip")
        shapes: list[tuple[int, ...]] = [(1, channels, height, width), (1, 1, channels, height, width)]
        shapes += [(1, tiles, channels, height, width) for tiles in (3, 2, 5)]  # models that cut an image into tiles
        if frames:
            shapes = [(1, frames, channels, height, width), *shapes]
        if self._tower_module("image") is None and not frames:  # without a tower the whole model runs on each: try few
            shapes = shapes[:2]
        image_sizes = torch.tensor([[height, width]], device="cpu")
        name = "pixel_values" if "pixel_values" in self.takes else "pixel_values_videos"
        candidates: list[Inputs] = [{name: _floats(*shape)} for shape in shapes]
        if "image_sizes" not in self.takes:
            return candidates
        return candidates + [candidate | {"image_sizes": image_sizes} for candidate in candidates]

    def _packed_image_candidates(self, channels: int) -> list[Inputs]:
        """Return candidates for a model that takes an image as patches in a row, and how many there are along each side."""
        patch = _first_attribute((self.vision,), "patch_size", default=14)  # pixels along a side of it
        depth = _first_attribute((self.vision,), "temporal_patch_size", default=1)  # frames that a patch spans
        grid = torch.tensor([[[1, _GRID, _GRID]]], device="cpu")  # along time, height and width
        shapes: list[tuple[int, ...]] = [
            (1, _GRID**2, channels * depth * patch**2),
            (1, _GRID**2, channels * patch**2),
            (1, _GRID**2, channels, patch, patch),
        ]
        return [
            {
                "pixel_values": _floats(*shape),
                "hidden_states": _floats(*shape),
                "image_grid_thw": grid,
                "grid_thw": grid,
            }
            for shape in shapes
        ]

    def _sound_candidates(self) -> list[Inputs]:
        """Return candidates for the model's sound inputs, spectrograms or raw samples; ``[{}]`` for a model without sound."""
        sound_names = {"input_features", "input_values"}.intersection(self.takes)
        if not sound_names:
            return [{}]
        configs = (self.audio, self.config)
        # A spectrogram is (bands of frequency, frames of time), in either order.
        bands = _first_attribute(
            configs, "num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", "input_dim", default=80
        )
        frames = 2 * _first_attribute(configs, "max_source_positions", default=500)  # towers halve their length
        if "input_features" in sound_names:
            mask = torch.ones(1, frames, dtype=torch.long, device="cpu")
            shapes: list[tuple[int, ...]] = [(1, bands, frames), (1, frames, bands), (1, 1, frames, bands)]
            masks = {"input_features_mask": mask, "feature_attention_mask": mask}
            return [{"input_features": _floats(*shape)} | masks for shape in shapes]
        # ``input_values`` are raw samples, or frames of bands for a model whose configuration says both.
        audio_frames = _first_attribute((self.config,), "max_length")
        shapes = [(1, _SAMPLES), (1, 1, _SAMPLES)]
        if isinstance(audio_frames, int) and _first_attribute((self.config,), "num_mel_bins") is not None:
            shapes = [(1, audio_frames, bands)]
        return [{"input_values": _floats(*shape)} for shape in shapes]

    def _text_inputs(self, inputs: Inputs) -> Inputs:
        """Return the text inputs: a placeholder for every embedding that the towers make of ``inputs``, then plain tokens.

        Token types are 0 for text, 1 for an image and 2 for sound. A length that was asked for is that of the whole text;
        the default length is that of the plain tokens alone. Raises InputError if the placeholders fill the length.
        """
        text: Inputs = {}
        ids: list[int] = []
        token_types: list[int] = []
        for tower_type, tower in enumerate(("image", "audio"), start=1):
            owner, token = self._tower_module(tower), self._placeholder_token(tower)
            method = f"get_{tower}_features"
            if owner is None or token is None:
                continue
            tower_inputs = _method_inputs(getattr(owner, method), inputs)
            if not tower_inputs:
                continue
            row_count = self._feature_rows(run_without_values(owner, method, tower_inputs, packed(tower_inputs)))
            ids += [token] * row_count
            token_types += [tower_type] * row_count
        if ids and self.wanted is not None and self.wanted <= len(ids):
            remedy = f"{self.source} has {len(ids)} tokens of its example image or sound, so more than that"
            raise InputError("--sequence-length", f"is {self.wanted}", remedy)
        length = self.length
        if ids and not self.wanted:  # the default length is that of the tokens after the placeholders
            length += len(ids)
        text_token = next(token for token in range(3) if token not in ids)  # any token that is no placeholder
        ids += [text_token] * (length - len(ids))
        token_types += [0] * (length - len(token_types))
        text["input_ids"] = torch.tensor([ids], device="cpu")
        if any(token_types):
            text["mm_token_type_ids"] = torch.tensor([token_types], device="cpu")
            text["moe_mm_token_type_ids"] = text["mm_token_type_ids"]  # some families have another name for it
            text["token_type_ids"] = torch.tensor([token_types], device="cpu").clamp(max=1)
        return text

    def _feature_rows(self, features: Any) -> int:
        """Return how many placeholder tokens a tower's result replaces: one for each vector of its pooled or first output."""
        pooled = getattr(features, "pooler_output", None)
        leaves = tree_leaves(features if pooled is None else pooled)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if pooled is None:
            tensors = tensors[:1]
        return sum(tensor.numel() // tensor.shape[-1] for tensor in tensors)  # (..., width): a vector for each position

    def _other_inputs(self, made_inputs: Inputs) -> Inputs:
        """Return the inputs that models need beside text, images and sound, and attention masks of ones that are required.

        ``made_inputs``: the images and sound. Raises InputError for any other required input.
        """
        tokens = torch.zeros(1, self.length, dtype=torch.long, device="cpu")
        inputs: Inputs = {
            "decoder_input_ids": tokens,
            "bbox": tokens[..., None].repeat(1, 1, 4),  # four corners of each token's box on a page
            "qformer_input_ids": tokens,
        }
        inputs["global_attention_mask"] = (torch.arange(self.length, device="cpu") == 0).long()[None]
        # Of models of time series: values at each of so many steps.
        channels = _first_attribute((self.config,), "num_input_channels", "input_size", default=1)
        steps = _first_attribute((self.config,), "context_length", default=_TEXT_LENGTH)
        inputs["past_values"] = _floats(1, steps, channels)
        for name, parameter in self.takes.items():
            is_required = parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            if not is_required or name in made_inputs or name in inputs or name == "input_ids":
                continue
            if "attention_mask" not in name:
                raise InputError(self.source, f"takes {name}, for which ddltool has no example inputs", REMEDY)
            inputs[name] = torch.ones_like(tokens)
        return inputs


def _method_inputs(call: Any, inputs: Inputs) -> Inputs:
    """Return the inputs that a tower's method names as parameters; all inputs of the tower's kind if it names none of them.

    ``call``: the method ``get_image_features`` or ``get_audio_features``, which may take ``**kwargs`` only.
    """
    parameters = inspect.signature(call).parameters
    named_inputs = {name: tensor for name, tensor in inputs.items() if name in parameters}
    if named_inputs:
        return named_inputs
    kind = call.__name__.split("_")[1]  # "image" in get_image_features
    names_of_kind = {
        "image": ("pixel_values", "image_sizes"),
        "audio": ("input_features", "input_values", "input_features_mask"),
    }
    return {name: tensor for name, tensor in inputs.items() if name in names_of_kind[kind]}


def _floats(*shape: int) -> Tensor:
    """Return ones of a shape, on the CPU whatever the default device."""
    return torch.ones(*shape, device="cpu")


def _nested_config(config: Any, *words: str) -> Any:
    """Return the first nested configuration whose name holds one of the words, ``config`` itself if none does.

    A match of an earlier word is preferred, and any match at this level to one deeper down.
    """
    nested_configs = {name: value for name, value in vars(config).items() if hasattr(value, "to_diff_dict")}
    for word in words:
        for name, value in nested_configs.items():
            if word in name:
                return value
    for value in nested_configs.values():
        found = _nested_config(value, *words)
        if found is not value:
            return found
    return config


def _first_attribute(configs: tuple[Any, ...], *names: str, default: Any = None) -> Any:
    """Return the first of these attributes that a configuration has and that is not None, else the default.

    All configurations are asked for the first name before any is asked for the next one.
    """
    values = (getattr(config, name, None) for name in names for config in configs)
    return next((value for value in values if value is not None), default)


def _max_positions(config: Any) -> int | None:
    """Return the length in tokens of the longest text that a configuration is made for, None if it does not say."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = _first_attribute((text, config), *_POSITIONS)
    return positions if isinstance(positions, int) and positions > 0 else None


def _image_size(*configs: Any) -> tuple[int, int]:
    """Return (height, width) in pixels of the images that a model is made for, (224, 224) if no configuration says it."""
    size = _first_attribute(configs, "image_size", "img_size", default=224)
    if isinstance(size, Mapping):
        return int(size["height"]), int(size["width"])
    if isinstance(size, (list, tuple)):
        return int(size[-2]), int(size[-1])
    return int(size), int(size)
