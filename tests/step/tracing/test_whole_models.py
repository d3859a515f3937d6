"""Whole models of transformers and timm: FLOPs against a count at the level of torch's functions, and what feeds nothing."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ddltool.analyzers.step.tracing.sources import load_graph, resolve_step
from ddltool.graph import RECV, SEND, Graph

FAST = ["transformers:distilbert", pytest.param("timm:resnet50", marks=pytest.mark.slow)]
TRANSFORMERS = """
albert align altclip aria_text audio-spectrogram-transformer bart beit bert big_bird blenderbot-small blip blip-2 bloom
bridgetower camembert canine chinese_clip clap clip clipseg codegen convbert convnext convnextv2 ctrl cvt data2vec-audio
data2vec-text data2vec-vision deberta deit detr dinov2 distilbert efficientnet electra ernie falcon florence2 fnet focalnet
gemma git glpn gpt2 gpt_neo gpt_neox gptj groupvit hiera hubert idefics3 imagegpt layoutlm layoutlmv3 led levit lilt
longformer marian mixtral mobilevit opt perceiver qwen2_vl regnet resnet roberta segformer siglip speech_to_text swin
switch_transformers t5 vit
wav2vec2 whisper xlnet yolos llava
"""
TIMM = """
resnet50 resnext50_32x4d seresnet50 resnetv2_50 densenet121 vgg16 efficientnet_b0 mobilenetv2_100 mobilenetv3_large_100
mnasnet_100 regnety_016 convnext_tiny convnextv2_tiny vit_tiny_patch16_224 deit3_small_patch16_224 beit_base_patch16_224
eva02_tiny_patch14_224 swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 maxvit_tiny_tf_224 coatnet_0_rw_224 levit_128
mixer_s32_224 resmlp_12_224 gmlp_s16_224 cait_xxs24_224 xcit_nano_12_p8_224 crossvit_9_240 pit_ti_224 tnt_s_patch16_224
twins_pcpvt_small coat_tiny convit_tiny visformer_tiny poolformer_s12 pvt_v2_b0 edgenext_xx_small mobilevit_xxs
mobilevitv2_050 efficientformer_l1 efficientformerv2_s0 fastvit_t8 repvit_m1 mobileone_s0 repvgg_a0 ghostnet_100
tinynet_e lcnet_050 hardcorenas_a fbnetc_100 spnasnet_100 mixnet_s hrnet_w18_small dla34 dpn68 res2net50_26w_4s
resnest14d selecsls42 skresnet18 inception_v3 inception_v4 inception_resnet_v2 xception41 cspresnet50 vovnet39a
focalnet_tiny_srf davit_tiny nest_tiny sequencer2d_s volo_d1_224 nfnet_f0 rexnet_100 gcvit_xxtiny mvitv2_tiny hiera_tiny_224
inception_next_tiny tiny_vit_5m_224 starnet_s1 efficientvit_b0 hgnet_tiny
"""
# What some types keep and do not use in the step that they are traced for, by a part of its path.
UNUSED: Mapping[str, str] = {
    "pooler": "the head reads all tokens",
    "contact_head": "reads attention maps that are asked for separately",
    "mask_emb": "only masked inputs read it",
    "mask_token": "only masked inputs read it",
    "canine.final_char_encoder": "the classifier reads what comes before it",
    "layout_output": "the classifier reads the text and not the layout of the last layer",
    "r_s_bias": "only inputs of several segments read it",
    "seg_embed": "only inputs of several segments read it",
    "vision_tower": "the language model reads an earlier layer of the vision tower",
}
MATRIX = {
    *("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention"),
}


class Counter(TorchFunctionMode):
    """Two operations for each multiplication in the products that a forward asks torch for, from their shapes."""

    def __init__(self, unused: set[int]) -> None:
        super().__init__()
        self.flops = 0.0
        self.unused = unused
        """Identities of weights whose products nothing reads, which a trace leaves out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self.unused.intersection(id(value) for value in args):
            return output
        self.flops += self.count(func, args, kwargs, output)
        return output

    def count(self, func: Any, args: Any, kwargs: Any, output: Any) -> float:
        name = getattr(func, "__name__", "")
        if name == "linear":
            return 2.0 * output.numel() * args[0].shape[-1]
        if name in ("matmul", "__matmul__", "__rmatmul__", "mm", "bmm"):
            return 2.0 * output.numel() * args[0].shape[-1]
        if name in ("addmm", "baddbmm"):
            return 2.0 * output.numel() * (args[1] if len(args) > 1 else kwargs["batch1"]).shape[-1]
        if name in ("conv1d", "conv2d", "conv3d"):
            return 2.0 * output.numel() * math.prod(args[1].shape[1:])
        if name.startswith("conv_transpose"):
            return 2.0 * args[0].numel() * math.prod(args[1].shape[1:])
        if name == "scaled_dot_product_attention":
            query, key, value = args[0], args[1], args[2]
            return 2.0 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        if func is F.multi_head_attention_forward:  # four projections and two products
            (queries, batch, width), keys = args[0].shape, args[1].shape[0]
            return 4.0 * batch * width * (width * (queries + keys) + queries * keys)
        if name in ("grouped_mm", "_grouped_mm"):
            return 2.0 * args[0].shape[0] * args[1].shape[-2] * args[1].shape[-1]
        if name == "einsum":
            return einsum_flops(args[0], args[1] if isinstance(args[1], (list, tuple)) else args[1:])
        return 0.0


def einsum_flops(equation: str, operands: Any) -> float:
    """A product of two tensors: every combination of their indices is one multiplication."""
    letters = [part.strip() for part in equation.partition("->")[0].split(",")]
    if len(letters) < 2 or "." in equation:
        pytest.skip(f"einsum {equation}")
    sizes = {
        letter: one.shape[place]
        for part, one in zip(letters, operands, strict=True)
        for place, letter in enumerate(part)
    }
    result = equation.partition("->")[2].replace(" ", "")
    contracted = set("".join(letters)) - set(result)
    summed = math.prod(sizes[letter] for letter in contracted)  # over one number there is nothing to sum
    return 2.0 * math.prod(sizes.values()) if summed > 1 else 0.0


def counted(source: str, unfed: set[str]) -> float:
    """FLOPs of a training step's forward, counted while it runs on tensors without values."""
    with torch.device("meta"):
        step = resolve_step(source)
    step.module.train()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        state = {
            name: torch.empty_like(value, device="cpu")
            for name, value in (*step.module.named_parameters(), *step.module.named_buffers())
        }
        inputs = tuple(torch.empty_like(value, device="cpu") for value in step.inputs)
        with Counter({id(state[name]) for name in unfed}) as counter:
            functional_call(step.module, state, inputs)
    return counter.flops


def forward_flops(graph: Graph) -> float:
    return sum(
        op.flops for op in graph.ops() if op.name.startswith("forward") and op.op_type.removeprefix("aten.") in MATRIX
    )


def check(source: str) -> None:
    if importlib.util.find_spec(source.partition(":")[0]) is None:
        pytest.skip("needs the package")
    graph = load_graph(source, "training", None)
    fed = {int(op) for reader in range(len(graph.names)) for op in graph.inputs_of(reader)}
    unfed = {graph.parameter[op] or "" for op in graph.of_kind(RECV) if int(op) not in fed}
    assert forward_flops(graph) == pytest.approx(counted(source, unfed), rel=1e-9)
    sent = {graph.parameter[op] for op in graph.of_kind(SEND)}
    assert not unfed & sent
    assert {name for name in unfed if not any(part in name for part in UNUSED)} == set()


@pytest.mark.parametrize("source", FAST)
def test_some_models(source: str) -> None:
    check(source)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMERS.split())
def test_transformers_models(name: str) -> None:
    check(f"transformers:{name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM.split())
def test_timm_models(name: str) -> None:
    check(f"timm:{name}")
