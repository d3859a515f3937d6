"""``transformers:NAME``: the default configuration of a model type, or the one in a file (``transformers:config.json``), with
the head that it is trained with. Start at :func:`transformers_step`.

Example inputs for a transformers model, from its forward's signature and the size hints of its configuration.

A model that reads images or sound beside text gets as many placeholder tokens in its text as its own tower makes of the
example, so that the tower feeds the language model. Start at :func:`example_inputs`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, reduce
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ddltool.analyzers.loading.factories import REMEDY, imported, least_batch, nearest
from ddltool.analyzers.loading.known_values import bind, refusal, tried
from ddltool.analyzers.tracing.step import TrainingStep, default_loss, language_model_loss, resized
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
        """Return an empty tensor of the shape and type that a product of groups has."""
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
_TEXT_LENGTH = 128
_GRID = 16  # patches along each side of a packed image
_SAMPLES = 16_000  # one second of sound, as most models of raw sound sample it
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len", "seq_length")
_PLACEHOLDERS = ("{}_token_id", "{}_token_index", "{}_token", "boi_token_id")

Inputs = dict[str, Tensor]


def example_inputs(module: nn.Module, config: Any, source: str, length: int | None) -> Inputs:
    """Return inputs for a transformers model by name, one sample each: integers on the CPU, with values that matter.

    ``length``: tokens of text. Raises InputError for an input that nothing here can make, for inputs that the model
    refuses, and for a length that the model does not have.
    """
    return _Maker(module, config, source, length).inputs()


def packed(inputs: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the inputs without a dimension for the sample: patches of images of any size, one image after another."""
    return _GRIDS | {"pixel_values", "hidden_states"} if _GRIDS.intersection(inputs) else frozenset()


class _Maker:
    def __init__(self, module: nn.Module, config: Any, source: str, length: int | None) -> None:
        self.module = module
        self.config = config
        self.source = source
        self.takes = inspect.signature(module.forward).parameters
        self.text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.vision = _part(config, "vision")
        self.audio = _part(config, "audio", "speech", "encoder")
        self.wanted = length
        self.length = self._length(length)

    def inputs(self) -> Inputs:
        """Return the first combination of candidates that the forward accepts."""
        towers = [self._tower("image", self._images()), self._tower("audio", self._sounds())]
        found: list[Inputs] = []
        batch = least_batch(self.module)
        for images, sounds in product(*towers):
            given = images | sounds
            given = self._tokens(given) | given | self._rest(given)  # text first: it is what a sample's length means
            found.append({name: resized(one, 0, batch) for name, one in given.items() if name in self.takes})
        if not found[0]:
            names = ", ".join(self.takes) or "nothing by name"
            raise InputError(self.source, f"takes {names}, for which ddltool has no example inputs", REMEDY)
        if len(found) == 1:
            return found[0]
        return self._first_accepted(self.module, "forward", found)

    def _length(self, wanted: int | None) -> int:
        positions = _hint((self.text, self.config), *_POSITIONS)
        most = positions if isinstance(positions, int) and positions > 0 else None
        if wanted is None:
            axial = _hint((self.config,), "axial_pos_shape")  # Reformer trains on texts of one length
            return math.prod(axial) if axial else min(_TEXT_LENGTH, most or _TEXT_LENGTH)
        if not {"input_ids", "decoder_input_ids"}.intersection(self.takes):
            raise InputError("--sequence-length", f"{self.source} reads no text", "leave it out")
        limit = self._learned_positions(most) if most is not None else None
        if limit is not None and wanted > limit:
            raise InputError("--sequence-length", f"is {wanted}", f"{self.source} takes at most {limit} tokens")
        return wanted

    def _learned_positions(self, most: int) -> int | None:
        """Return how many positions a model has a vector for, None where they are computed and may be any number."""
        for part in self.module.modules():
            if isinstance(part, nn.Embedding) and most <= part.num_embeddings <= most + 4:
                return min(most, part.num_embeddings - 1 - (-1 if part.padding_idx is None else part.padding_idx))
        return None

    def _first_accepted(self, owner: nn.Module, method: str, candidates: list[Inputs]) -> Inputs:
        refusals: list[Exception] = []
        for candidate in candidates:
            try:
                tried(owner, method, candidate, packed(candidate))
            except Exception as error:  # whatever a forward raises at a shape that it does not take
                refusals.append(error)
            else:
                return candidate
        raise refusal(self.source, refusals[0]) from refusals[0]

    def _tower(self, kind: str, candidates: list[Inputs]) -> list[Inputs]:
        """Return the candidates that a tower accepts: the first, where the model can be asked for its tower alone."""
        owner, method = self._owner(kind), f"get_{kind}_features"
        if owner is None or candidates == [{}]:
            return candidates
        asked = [_accepted(getattr(owner, method), one) for one in candidates]
        accepted = self._first_accepted(owner, method, asked)
        return [next(one for one, given in zip(candidates, asked, strict=True) if given is accepted)]

    def _owner(self, kind: str) -> nn.Module | None:
        """Return what makes the features that take the place of placeholder tokens, None where there are none."""
        found = (self.module, getattr(self.module, "model", None))
        owner = next((one for one in found if hasattr(one, f"get_{kind}_features")), None)
        return owner if self._placeholder(kind) is not None else None

    def _placeholder(self, kind: str) -> int | None:
        names = (pattern.format(kind) for pattern in _PLACEHOLDERS)
        found = _hint((self.config,), *names)
        return found if isinstance(found, int) else None

    def _images(self) -> list[Inputs]:
        """Return candidates for the model's images."""
        if not {"pixel_values", "pixel_values_videos", "grid_thw"}.intersection(self.takes):
            return [{}]
        channels = _hint((self.vision, self.config), "num_channels", "in_channels", "in_chans", default=3)
        height, width = _image_size(self.vision, self.config, _part(self.config, "backbone"))
        if _GRIDS.intersection(self.takes):
            patch = _hint((self.vision,), "patch_size", default=14)
            depth = _hint((self.vision,), "temporal_patch_size", default=1)
            grid = torch.tensor([[[1, _GRID, _GRID]]], device="cpu")
            shapes: list[tuple[int, ...]] = [
                (1, _GRID**2, channels * depth * patch**2),
                (1, _GRID**2, channels * patch**2),
                (1, _GRID**2, channels, patch, patch),
            ]
            return [
                {"pixel_values": _floats(*s), "hidden_states": _floats(*s), "image_grid_thw": grid, "grid_thw": grid}
                for s in shapes
            ]
        if "spatial_shapes" in self.takes:  # an image cut into patches
            patch = _hint((self.vision,), "patch_size", default=16)
            return [
                {
                    "pixel_values": _floats(1, _GRID**2, channels * patch**2),
                    "pixel_attention_mask": torch.ones(1, _GRID**2, dtype=torch.long, device="cpu"),
                    "spatial_shapes": torch.tensor([[_GRID, _GRID]], device="cpu"),
                }
            ]
        if "aspect_ratio_ids" in self.takes:  # an image cut into tiles
            tiles = _hint((self.vision,), "max_num_tiles", default=4)
            ratio = {"aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long, device="cpu")}
            ratio["aspect_ratio_mask"] = torch.ones(1, 1, tiles, dtype=torch.long, device="cpu")
            return [{"pixel_values": _floats(1, 1, tiles, channels, height, width)} | ratio]
        frames = _hint((self.vision, self.config), "num_frames", "frames_per_clip")
        shapes = [(1, channels, height, width), (1, 1, channels, height, width)]
        shapes += [(1, tiles, channels, height, width) for tiles in (3, 2, 5)]
        if frames:
            shapes = [(1, frames, channels, height, width), *shapes]
        if self._owner("image") is None and not frames:
            shapes = shapes[:2]
        sizes = torch.tensor([[height, width]], device="cpu")
        name = "pixel_values" if "pixel_values" in self.takes else "pixel_values_videos"
        found: list[Inputs] = [{name: _floats(*shape)} for shape in shapes]
        return found + [one | {"image_sizes": sizes} for one in found if "image_sizes" in self.takes]

    def _sounds(self) -> list[Inputs]:
        """Return candidates for the model's sound: a spectrogram either way round, or raw samples."""
        takes = {"input_features", "input_values"}.intersection(self.takes)
        if not takes:
            return [{}]
        where = (self.audio, self.config)
        bands = _hint(
            where, "num_mel_bins", "n_mels", "feature_size", "input_feat_per_channel", "input_dim", default=80
        )
        frames = 2 * _hint(where, "max_source_positions", default=500)
        if "input_features" in takes:
            mask = torch.ones(1, frames, dtype=torch.long, device="cpu")
            shapes: list[tuple[int, ...]] = [(1, bands, frames), (1, frames, bands), (1, 1, frames, bands)]
            masks = {"input_features_mask": mask, "feature_attention_mask": mask}
            return [{"input_features": _floats(*shape)} | masks for shape in shapes]
        length = _hint((self.config,), "max_length")
        shapes = [(1, _SAMPLES), (1, 1, _SAMPLES)]
        if isinstance(length, int) and _hint((self.config,), "num_mel_bins") is not None:
            shapes = [(1, length, bands)]
        return [{"input_values": _floats(*shape)} for shape in shapes]

    def _tokens(self, given: Inputs) -> Inputs:
        """Return the text, with a placeholder for every row that a tower makes of the example, before it."""
        found: Inputs = {}
        ids: list[int] = []
        kinds: list[int] = []
        for number, kind in enumerate(("image", "audio"), start=1):
            owner, token, method = self._owner(kind), self._placeholder(kind), f"get_{kind}_features"
            if owner is None or token is None:
                continue
            asked = _accepted(getattr(owner, method), given)
            if not asked:
                continue
            rows = self._rows(tried(owner, method, asked, packed(asked)))
            ids += [token] * rows
            kinds += [number] * rows
        if ids and self.wanted is not None and self.wanted <= len(ids):
            remedy = f"{self.source} has {len(ids)} tokens of its example image or sound, so more than that"
            raise InputError("--sequence-length", f"is {self.wanted}", remedy)
        length = self.length if not ids or self.wanted else len(ids) + self.length
        plain = next(token for token in range(3) if token not in ids)
        ids += [plain] * (length - len(ids))
        kinds += [0] * (length - len(kinds))
        found["input_ids"] = torch.tensor([ids], device="cpu")
        if any(kinds):
            found["mm_token_type_ids"] = torch.tensor([kinds], device="cpu")
            found["moe_mm_token_type_ids"] = found["mm_token_type_ids"]
            found["token_type_ids"] = torch.tensor([kinds], device="cpu").clamp(max=1)
        return found

    def _rows(self, features: Any) -> int:
        """Return how many places in the text the features of a tower take."""
        pooled = getattr(features, "pooler_output", None)
        leaves = tree_leaves(features if pooled is None else pooled)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        tensors = tensors[:1] if pooled is None else tensors
        return sum(tensor.numel() // tensor.shape[-1] for tensor in tensors)

    def _rest(self, given: Inputs) -> Inputs:
        """Return the inputs that a model needs beside the usual ones."""
        tokens = torch.zeros(1, self.length, dtype=torch.long, device="cpu")
        found: Inputs = {
            "decoder_input_ids": tokens,
            "bbox": tokens[..., None].repeat(1, 1, 4),
            "qformer_input_ids": tokens,
        }
        found["global_attention_mask"] = (torch.arange(self.length, device="cpu") == 0).long()[None]
        channels = _hint((self.config,), "num_input_channels", "input_size", default=1)
        found["past_values"] = _floats(1, _hint((self.config,), "context_length", default=_TEXT_LENGTH), channels)
        required = (
            name
            for name, parameter in self.takes.items()
            if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        )
        for name in required:
            if name in given or name in found or name == "input_ids":
                continue
            if "attention_mask" not in name:
                raise InputError(self.source, f"takes {name}, for which ddltool has no example inputs", REMEDY)
            found[name] = torch.ones_like(tokens)
        return found


def _accepted(call: Any, given: Inputs) -> Inputs:
    """Return the inputs that a method has parameters for; where it only hands on what it gets, all of that kind."""
    known = inspect.signature(call).parameters
    kind = call.__name__.split("_")[1]
    handed = {
        "image": ("pixel_values", "image_sizes"),
        "audio": ("input_features", "input_values", "input_features_mask"),
    }
    named = {name: tensor for name, tensor in given.items() if name in known}
    return named or {name: tensor for name, tensor in given.items() if name in handed[kind]}


def _floats(*shape: int) -> Tensor:
    return torch.ones(*shape, device="cpu")


def _part(config: Any, *words: str) -> Any:
    """Return the configuration of a tower inside a configuration, itself where it has none."""
    inner = {name: value for name, value in vars(config).items() if hasattr(value, "to_diff_dict")}
    for word in words:
        for name, value in inner.items():
            if word in name:
                return value
    deeper = ((_part(value, *words), value) for value in inner.values())
    return next((part for part, value in deeper if part is not value), config)


def _hint(configs: tuple[Any, ...], *names: str, default: Any = None) -> Any:
    """Return the first of these attributes that a configuration has."""
    found = (getattr(config, name, None) for name in names for config in configs)
    return next((value for value in found if value is not None), default)


def _image_size(*configs: Any) -> tuple[int, int]:
    """Return height and width of the images that a model is made for, 224 where it takes any."""
    size = _hint(configs, "image_size", "img_size", default=224)
    if isinstance(size, Mapping):
        return int(size["height"]), int(size["width"])
    if isinstance(size, (list, tuple)):
        return int(size[-2]), int(size[-1])
    return int(size), int(size)
