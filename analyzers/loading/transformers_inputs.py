"""Example inputs for a transformers model, from its forward's signature and the size hints of its configuration.

A model that reads images or sound beside text gets as many placeholder tokens in its text as its own tower makes of the
example, so that the tower feeds the language model. Start at :func:`example_inputs`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ddltool.analyzers.loading.known_values import refusal, tried
from ddltool.analyzers.loading.packages import REMEDY, least_batch
from ddltool.analyzers.tracing.step import resized
from ddltool.errors import InputError

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
        height, width = _image_size(self.vision, self.config)
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
