"""Training steps of ``diffusers:NAME``: the denoiser of a diffusion model, which is the part that training changes.

NAME is a published model (``stabilityai/stable-diffusion-xl-base-1.0``), with ``@SIZE`` for images of SIZE pixels, or a
denoiser's configuration file (``diffusers:config.json``). Latents, times and embeddings of the text are inputs, as where
they are computed before training. Start at :func:`diffusers_step`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddltool.analyzers.step.tracing.factories import REMEDY, imported
from ddltool.analyzers.step.tracing.known_values import bind
from ddltool.analyzers.step.tracing.step import TrainingStep
from ddltool.artifacts import read_text
from ddltool.errors import InputError, one_line
from ddltool.plain_values import from_json
from ddltool.published_models import configuration_file, find_model, unknown_model

_PIXELS_PER_LATENT = 8
"""Pixels along a side of an image for each of its latents, as the autoencoders of all these models have it."""
_LARGEST_IMAGE = 8192
_DEFAULT_PIXELS = 1024
"""A side of the image of a model whose configuration does not say it, as FLUX.1 is used."""
_VIDEO = (21, 60, 104)
"""Latents of a video of 81 frames (the first, then one for each 4) of 480 x 832 pixels, which Wan 2.1 is made for."""
_TEXT_TOKENS = {
    "PixArtTransformer2DModel": 120,
    "SD3Transformer2DModel": 333,
    "FluxTransformer2DModel": 512,
    "WanTransformer3DModel": 512,
}
"""Tokens of the text as the pipelines of diffusers encode it: SD3's 77 of CLIP and 256 of T5 in a row."""
_CLIP_TOKENS = 77
_WHICH_FILE = "give the config.json of a unet or transformer folder"


def diffusers_step(name: str, sequence_length: int | None = None) -> TrainingStep:
    """Return one training step of a denoiser, without its weights, under the ambient default device.

    The loss is the mean squared error of what it predicts, in float32.

    Args:
        name: of a published model, or the path of its ``config.json`` or of its folder; with
            ``@SIZE``, images are SIZE x SIZE pixels.
        sequence_length: tokens of the text; None: as the model's pipeline encodes it.

    Raises InputError for an unknown name, a size that is none, and a model that cannot be built or takes inputs that
    ddltool cannot make; MissingExtra without diffusers.
    """
    source = f"diffusers:{name}"
    name, separator, size_text = name.partition("@")
    is_size = size_text.isdecimal() and 16 <= int(size_text) <= _LARGEST_IMAGE and int(size_text) % 16 == 0
    if separator and not is_size:
        remedy = f"give a multiple of 16 pixels, up to {_LARGEST_IMAGE:,}: diffusers:{name}@512"
        raise InputError(source, f"cannot take images of {size_text or 'no'} pixels", remedy)
    title, class_name, fields = _configuration(name)
    module = _built(class_name, fields, source)
    inputs = _example_inputs(module, int(size_text) if separator else None, sequence_length, source)
    _take_dotted_names(module)
    return TrainingStep(name=title, module=module, inputs=bind(module, inputs, source), loss=_denoising_loss)


def _configuration(name: str) -> tuple[str, str, Mapping[str, Any]]:
    """Return (title, name of the class in diffusers, configuration's fields) of a published model or a configuration file.

    The title is the name in results: the model's without its organisation, or the folder's or file's. Raises InputError for
    an unknown name, and for a file that names no class.
    """
    file = configuration_file(name)
    if file is None:
        published = find_model(name, "diffusers")
        if published is None:
            raise unknown_model(name, library="diffusers")
        return published.name.partition("/")[2], published.model_type, published.fields
    path, title = file
    document = from_json(read_text(path), str(path))
    if not isinstance(document, dict) or not isinstance(document.get("_class_name"), str):
        raise InputError(f"{path}:_class_name", "is missing", _WHICH_FILE)
    fields = {key: value for key, value in document.items() if not key.startswith("_")}
    return title, document["_class_name"], fields


def _built(class_name: str, fields: Mapping[str, Any], source: str) -> Any:
    """Return the model of a class of diffusers, built from the configuration's ``fields``, without trained weights.

    ``source``: what names the model, for messages. Raises InputError if there is no such class or it cannot be built.
    """
    diffusers = imported("diffusers", source)
    diffusers.utils.logging.set_verbosity_error()  # it warns of fields that it does not know, and of casts
    model_class = getattr(diffusers, class_name, None)
    if not (isinstance(model_class, type) and issubclass(model_class, nn.Module)):
        raise InputError(source, f"{class_name} is no model of diffusers {diffusers.__version__}", _WHICH_FILE)
    try:
        return model_class.from_config(dict(fields))  # type: ignore[attr-defined]
    except Exception as error:  # never with real weights instead: they may be larger than this machine
        text = one_line(f"{type(error).__name__}: {error}")[:300]
        raise InputError(source, f"cannot be built ({text})", REMEDY) from error


def _example_inputs(module: Any, pixels: int | None, tokens: int | None, source: str) -> dict[str, Tensor]:
    """Return one sample of each input that a denoiser takes, by name; ``a.b`` is the entry ``b`` of the dictionary ``a``.

    ``pixels``: along a side of the image, None for the model's own size. ``tokens``: of the text, None for as many as the
    model's pipeline encodes. ``source``: what names the model, for messages. Raises InputError if ``tokens`` is given and
    the model takes no text.
    """
    config = module.config
    takes = inspect.signature(module.forward).parameters
    class_name = type(module).__name__
    per_latent = 1 if class_name == "UNet2DModel" else _PIXELS_PER_LATENT  # it denoises the image itself
    is_video = class_name == "WanTransformer3DModel"
    if is_video and pixels is not None:
        frames = f"videos of {_VIDEO[1] * per_latent} x {_VIDEO[2] * per_latent} pixels"
        raise InputError(source, f"takes {frames}, and no other size here", "leave @SIZE out")
    side = getattr(config, "sample_size", None) or _DEFAULT_PIXELS // per_latent
    if not isinstance(side, int):
        raise InputError(source, f"has images of sample_size {side!r}", "give the side of a square, as a whole number")
    side = side if pixels is None else pixels // per_latent
    length = tokens or _TEXT_TOKENS.get(class_name, _CLIP_TOKENS)
    inputs: dict[str, Tensor] = {}
    if "img_ids" in takes:  # FLUX: squares of 2 x 2 latents in a row, with their places
        squares = (side // 2) ** 2
        inputs["hidden_states"] = _zeros(1, squares, config.in_channels)
        inputs["img_ids"] = _zeros(squares, 3)
        inputs["txt_ids"] = _zeros(length, 3)
    else:
        extent = _VIDEO if is_video else (side, side)
        inputs["sample" if "sample" in takes else "hidden_states"] = _zeros(1, config.in_channels, *extent)
    inputs["timestep"] = torch.zeros(1, dtype=torch.long, device="cpu")
    # The width of a text embedding, under the name that the model's configuration has for it.
    width_fields = ("text_dim", "caption_channels", "joint_attention_dim", "cross_attention_dim")
    widths = (getattr(config, field, None) for field in width_fields)
    width = next((value for value in widths if value), None)
    if "encoder_hidden_states" in takes and width is not None and class_name != "DiTTransformer2DModel":
        inputs["encoder_hidden_states"] = _zeros(1, length, int(width))
    elif tokens is not None:
        raise InputError("--sequence-length", f"{source} takes no text", "leave it out")
    if getattr(config, "num_embeds_ada_norm", None) and class_name == "DiTTransformer2DModel":
        inputs["class_labels"] = torch.zeros(1, dtype=torch.long, device="cpu")
    if getattr(config, "addition_embed_type", None) == "text_time":  # SDXL: pooled text, and six numbers of the crop
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        inputs["added_cond_kwargs.text_embeds"] = _zeros(1, pooled)
        inputs["added_cond_kwargs.time_ids"] = _zeros(1, 6)
    if getattr(module, "use_additional_conditions", False):  # PixArt for images of many sizes
        inputs["added_cond_kwargs.resolution"] = _zeros(1, 2)
        inputs["added_cond_kwargs.aspect_ratio"] = _zeros(1, 1)
    if "pooled_projections" in takes:
        inputs["pooled_projections"] = _zeros(1, config.pooled_projection_dim)
    if getattr(config, "guidance_embeds", False):
        inputs["guidance"] = _zeros(1)
    return inputs


def _take_dotted_names(module: Any) -> None:
    """Let a denoiser's forward take ``added_cond_kwargs.b=value`` for the entry ``b`` of the dictionary ``added_cond_kwargs``.

    The inputs of a step have to be tensors, and not dictionaries. Entries that are not given are None, as a model for one
    size of image takes them. The module is changed.
    """
    forward = module.forward
    takes_conditions = "added_cond_kwargs" in inspect.signature(forward).parameters

    def forward_by_names(**inputs: Any) -> Any:
        """Call the module's own forward, with the inputs of dotted names in one dictionary."""
        arguments = {name: value for name, value in inputs.items() if "." not in name}
        if takes_conditions:
            entries = {name.partition(".")[2]: value for name, value in inputs.items() if "." in name}
            arguments["added_cond_kwargs"] = {"resolution": None, "aspect_ratio": None, **entries}
        return forward(**arguments)

    module.forward = forward_by_names


def _denoising_loss(output: Any) -> Tensor:
    """Return the mean squared error of ``output.sample`` against noise, both in float32 as diffusers' scripts compute it."""
    predicted = output.sample.float()
    return F.mse_loss(predicted, torch.zeros_like(predicted))


def _zeros(*shape: int) -> Tensor:
    """Return zeros of a shape, on the CPU whatever the default device."""
    return torch.zeros(*shape, device="cpu")
