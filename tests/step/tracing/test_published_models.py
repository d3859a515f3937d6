"""The models of the hub, built without weights: their parameters against the published counts, and what their steps do."""

from __future__ import annotations

import importlib.util
from collections import Counter
from math import prod
from pathlib import Path

import pytest
import torch

from ddltool.analyzers.step.tracing.factories import imported
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.sources import load_graph, resolve_step
from ddltool.analyzers.step.tracing.transformers_models import build_model, named_config
from ddltool.errors import InputError
from ddltool.graph import Graph
from ddltool.published_models import check_hub_name, find_model, published_models

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
FAST = {
    *("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-405B", "meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-7B"),
    *("meta-llama/Llama-4-Scout-17B-16E", "Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1", "openai/gpt-oss-20b"),
    *("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V2-Lite", "google/gemma-3-4b-pt", "microsoft/phi-4"),
    *("google/flan-t5-base", "google-bert/bert-base-uncased", "microsoft/deberta-v3-base", "openai/whisper-large-v3"),
    *("tiiuae/falcon-40b", "google/siglip-so400m-patch14-384", "facebook/dinov2-giant", "mosaicml/mpt-7b"),
}
MODELS = [model for model in published_models().values() if model.library == "transformers"]
OWN = [model.name for model in MODELS if not model.same_as]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow, id=name) for name in OWN]
)
def test_as_many_parameters_as_published(name: str) -> None:
    """Within 0.5 %: for encoders the published count has the pooler and not the head of the task, or the other way."""
    with torch.device("meta"):
        _, module = build_model(named_config(name))
    count = sum(parameter.numel() for parameter in module.parameters())
    assert count == pytest.approx(published_models()[name].parameters, rel=0.005)


def test_no_name_hides_a_type() -> None:
    """``transformers:bloom`` is the type's default whatever the table holds, and what is found by a type's name is that."""
    types = imported("transformers", "").models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    assert {model.model_type for model in MODELS} <= {*types}
    assert {name: dict(model.fields) for name in types if (model := find_model(name)) is not None} == {"gpt2": {}}
    assert named_config("GPT2").model_type == "gpt2"


def test_what_a_configuration_says_is_not_repaired(tmp_path: Path) -> None:
    """Some types' defaults do not fit together and are replaced; a file's and a published model's own values stand."""
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v2", "num_experts_per_tok": 4}')
    published, default = named_config(f"{tmp_path}/config.json"), named_config("deepseek_v2")
    assert (published.config.num_experts_per_tok, published.note) == (4, "")
    assert default.config.num_experts_per_tok == 6
    assert default.note.endswith("used instead: num_experts_per_tok=6")
    assert named_config("meta-llama/Llama-4-Scout-17B-16E").note == ""


def attention(graph: Graph) -> Counter[tuple[str, float]]:
    """How often each kernel of attention runs forward, with its FLOPs."""
    kernels = (op for op in graph.ops() if "attention" in str(op.op_type) and "backward" not in str(op.op_type))
    return Counter((str(op.op_type).removeprefix("aten._scaled_dot_product_"), op.flops) for op in kernels)


@pytest.mark.slow
def test_windows_cost_what_torchs_attention_does_of_them() -> None:
    """Gemma 3: 15 of 18 layers see 512 tokens. SDPA computes a window as a mask over all 2,048, so all have 4 s^2 h d FLOPs."""
    graph = load_graph(
        "transformers:gemma-3-270m", "training", None, sequence_length=2048, numerics=Numerics("bf16", False)
    )
    flops = 4 * 2048**2 * 4 * 256
    assert attention(graph) == {("efficient_attention", flops): 15, ("flash_attention", flops): 3}


@pytest.mark.slow
def test_experts_tied_embeddings_and_groups_of_heads_are_the_configurations() -> None:
    """OLMoE: 8 of 64 experts see each token; the products of a token are those of 1.3 of its 6.9 billion parameters."""
    graph = load_graph("transformers:OLMoE-1B-7B-0924", "inference", None)
    tokens, hidden, wide, layers = 128, 2048, 1024, 16
    grouped = sum(op.flops or 0 for op in graph.ops() if op.op_type == "aten._grouped_mm")
    assert grouped == 2 * tokens * 8 * layers * 3 * hidden * wide
    with torch.device("meta"):
        step = resolve_step("transformers:Llama-3.2-1B")
    shapes = {name: tuple(parameter.shape) for name, parameter in step.module.named_parameters()}
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (512, 2048)
    assert sum(prod(shape) == 128256 * 2048 for shape in shapes.values()) == 1


def test_more_tokens_than_the_model_is_configured_for_are_said() -> None:
    with torch.device("meta"):
        step = resolve_step("transformers:SmolLM2-135M", sequence_length=8193)
        assert step.note == "8,193 tokens are more than the 8,192 that the model is configured for"
        assert resolve_step("transformers:SmolLM2-135M", sequence_length=8192).note == ""
    assert step.name == "SmolLM2-135M"
    assert step.inputs[0].shape == (1, 8193)


def test_no_layer_is_skipped_at_random() -> None:
    """Wav2vec 2.0 is trained with LayerDrop: one traced step would lack layers by chance."""
    named = named_config("facebook/wav2vec2-base-960h")
    assert named.config.layerdrop == 0.0
    assert named.note == "training skips layers at random (layerdrop), each in 10% of the steps; all are counted"


def test_a_folder_stands_for_its_configuration_and_names_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "small-llama"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2}')
    (folder / "other.json").write_text('{"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2}')
    by_folder, by_file = named_config(str(folder)), named_config(f"{folder}/config.json")
    assert by_folder.title == by_file.title == "small-llama"
    assert by_folder.config.hidden_size == 256
    assert named_config(f"{folder}/other.json").title == "other"
    check_hub_name(f"transformers:{folder}")
    with pytest.raises(InputError, match="is a folder without a config.json; give the folder of a saved model"):
        check_hub_name(f"transformers:{tmp_path}")


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ('"model_type": "llama9"', "config.json: unknown model type 'llama9'"),
        (
            '"model_type": "llama", "num_hidden_layers": 0',
            "config.json:num_hidden_layers: is 0; give a number of at least 1",
        ),
        (
            '"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 3',
            "config.json:num_key_value_heads: is 3, which does not divide 8 heads; give a divisor",
        ),
    ],
)
def test_a_configuration_of_no_model_names_the_field(tmp_path: Path, fields: str, line: str) -> None:
    (tmp_path / "config.json").write_text(f"{{{fields}}}")
    with pytest.raises(InputError) as caught:
        named_config(str(tmp_path))
    assert line in str(caught.value)


def test_a_folder_does_not_hide_a_published_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2", "n_layer": 3}')
    monkeypatch.chdir(tmp_path)
    assert (named_config("gpt2").config.n_layer, named_config("./gpt2").config.n_layer) == (12, 3)
