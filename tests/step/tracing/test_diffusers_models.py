"""Denoisers of diffusers: built as published, fed as the library's own scripts feed them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddltool.analyzers.step.tracing.sources import load_graph, resolve_step
from ddltool.errors import InputError
from ddltool.graph import Graph
from ddltool.published_models import published_models

needs_diffusers = pytest.mark.skipif(importlib.util.find_spec("diffusers") is None, reason="needs diffusers")
OWN = [model for model in published_models().values() if model.library == "diffusers" and not model.same_as]
BLOCKS = {
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "block_out_channels": [32, 64],
}
UNET = {"_class_name": "UNet2DConditionModel", "sample_size": 8, "cross_attention_dim": 24, **BLOCKS}
SDXL = UNET | {
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + 20,
}
PIXART = {"_class_name": "PixArtTransformer2DModel", "sample_size": 8, "caption_channels": 16, "num_layers": 2}
PIXART |= {"num_attention_heads": 3, "attention_head_dim": 8, "cross_attention_dim": 24}
FLUX = {"_class_name": "FluxTransformer2DModel", "num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2}
FLUX |= {"attention_head_dim": 16, "joint_attention_dim": 24, "pooled_projection_dim": 12, "guidance_embeds": True}
FLUX |= {"axes_dims_rope": [4, 6, 6]}


def written(folder: Path, config: dict[str, Any]) -> str:
    """The SOURCE of a configuration."""
    (folder / "config.json").write_text(json.dumps(config))
    return f"diffusers:{folder}/config.json"


@needs_diffusers
@pytest.mark.parametrize("model", OWN, ids=lambda model: model.name)
def test_as_many_parameters_as_published(model: Any) -> None:
    with torch.device("meta"):
        step = resolve_step(model.source)
    assert sum(parameter.numel() for parameter in step.module.parameters()) == model.parameters
    assert step.name == model.name.partition("/")[2]


@needs_diffusers
@pytest.mark.parametrize(
    ("config", "conditions"),
    [
        (UNET, ()),
        (SDXL, ("text_embeds", "time_ids")),
        (PIXART | {"use_additional_conditions": False}, ()),
        (PIXART | {"use_additional_conditions": True}, ("resolution", "aspect_ratio")),
    ],
    ids=["unet", "sdxl", "pixart", "pixart-sizes"],
)
def test_the_step_is_that_of_a_script(config: dict[str, Any], conditions: tuple[str, ...], tmp_path: Path) -> None:
    """A batch of three, against the model's own forward with the dictionary that a script of diffusers makes."""
    torch.manual_seed(0)
    step = resolve_step(written(tmp_path, config)).at_batch(3)
    inputs = [torch.randn_like(value) if value.is_floating_point() else value for value in step.inputs]
    sample, timestep, text, *others = inputs
    added: dict[str, Tensor | None] = {"resolution": None, "aspect_ratio": None}
    added |= dict(zip(conditions, others, strict=True))
    is_unet = config is UNET or config is SDXL
    step.module.eval()
    with torch.no_grad():
        predicted = type(step.module).forward(
            step.module, sample, timestep=timestep, encoder_hidden_states=text, added_cond_kwargs=added
        )
        loss = step.loss(step.module(*inputs))
    assert sample.shape[0] == 3
    assert text.shape[1] == (77 if is_unet else 120)
    assert float(loss) == pytest.approx(float(predicted.sample.square().mean()))


@needs_diffusers
def test_latents_in_a_row_keep_their_places_at_every_batch(tmp_path: Path) -> None:
    """FLUX: an image of 64 pixels is 8 x 8 latents, 16 squares; their places are no samples."""
    step = resolve_step(written(tmp_path, FLUX) + "@64").at_batch(4)
    assert [tuple(value.shape) for value in step.inputs] == [
        (4, 16, 64), (16, 3), (512, 3), (4,), (4, 512, 24), (4, 12), (4,),
    ]  # fmt: skip
    assert step.run().shape == ()


def attended(graph: Graph) -> float:
    """FLOPs of attention forward."""
    kinds = ((str(op.op_type), op.flops or 0) for op in graph.ops())
    return sum(flops for kind, flops in kinds if "attention" in kind and "backward" not in kind)


def scores(latents: int, tokens: int) -> float:
    """Products of attention, up to a factor: 5 layers of 32 channels, and one of 64 with a quarter of the latents.

    Each attends to the latents and to the text.
    """
    few = latents / 4
    return 5 * 32 * (latents**2 + latents * tokens) + 64 * (few**2 + few * tokens)


@needs_diffusers
def test_a_larger_image_and_a_longer_text_are_more_work(tmp_path: Path) -> None:
    source = written(tmp_path, UNET)
    usual, large, long = (
        load_graph(*given, "training", 1, sequence_length=length)
        for given, length in (((source,), None), ((f"{source}@128",), None), ((source,), 154))
    )
    assert attended(large) / attended(usual) == pytest.approx(scores(16 * 16, 77) / scores(8 * 8, 77))
    assert attended(long) / attended(usual) == pytest.approx(scores(8 * 8, 154) / scores(8 * 8, 77))


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("diffusers:stabilityai/sdxl", "unknown model 'stabilityai/sdxl'; did you mean "),
        ("diffusers:unet", "unknown model 'unet'"),
        ("diffusers:facebook/DiT-XL-2-256@500", "cannot take images of 500 pixels; give a multiple of 16 pixels"),
        ("diffusers:facebook/DiT-XL-2-256@", "cannot take images of no pixels"),
        ("diffusers:meta-llama/Llama-3.1-8B", "did you mean transformers:meta-llama/Llama-3.1-8B"),
        ("transformers:facebook/DiT-XL-2-256", "did you mean diffusers:facebook/DiT-XL-2-256"),
        ("transformers:DiT-XL-2-256", "did you mean diffusers:facebook/DiT-XL-2-256"),
    ],
)
def test_what_is_no_denoiser_is_one_line(source: str, line: str) -> None:
    with pytest.raises(InputError, match=r"^[^\n]+$") as caught:
        resolve_step(source)
    assert line in str(caught.value)


@needs_diffusers
def test_files_that_are_no_denoisers(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="_class_name: is missing; give the config.json of a unet or transformer folder"
    ):
        resolve_step(written(tmp_path, {"model_type": "llama"}))
    for name in ("Nothing", "StableDiffusionPipeline", "DDPMScheduler"):
        with pytest.raises(InputError, match=f"{name} is no model of diffusers .*; give the config.json of a unet or"):
            resolve_step(written(tmp_path, {"_class_name": name}))
    with pytest.raises(InputError, match="has images of sample_size 'x'; give the side of a square"):
        resolve_step(written(tmp_path, UNET | {"sample_size": "x"}))
    with pytest.raises(InputError, match="takes videos of 480 x 832 pixels, and no other size here; leave @SIZE out"):
        resolve_step("diffusers:Wan-AI/Wan2.1-T2V-1.3B-Diffusers@256")
    with pytest.raises(InputError, match="takes no text"):
        resolve_step("diffusers:facebook/DiT-XL-2-256", sequence_length=10)
