"""Names of published models: how they are found, what a wrong one is answered, and how soon."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ddltool.errors import InputError
from ddltool.published_models import check_hub_name, find_model, published_models, unknown_model


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("META-LLAMA/llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("llama-3.1-8b", "meta-llama/Llama-3.1-8B"),
        ("deepseek-r1-distill-llama-8b", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"),
        ("c4ai-command-r-v01", "CohereLabs/c4ai-command-r-v01"),  # of two organisations, and one configuration
        ("gpt2", "openai-community/gpt2"),  # whose configuration is its type's default
        ("bloom", None),  # a type of transformers, whose default it has always been
        ("bigscience/bloom", "bigscience/bloom"),
        ("someone/Llama-3.1-8B", None),
    ],
)
def test_names_in_any_case_and_without_organisation(name: str, found: str | None) -> None:
    model = find_model(name)
    assert (model and model.name) == found


def test_a_model_like_another_differs_by_what_is_given() -> None:
    older, newer = (published_models()[f"meta-llama/{name}-8B"] for name in ("Meta-Llama-3", "Llama-3.1"))
    assert {**older.fields, "max_position_embeddings": 131072} == newer.fields
    assert older.fields["max_position_embeddings"] == 8192
    same = published_models()["meta-llama/Llama-3.1-8B-Instruct"]
    assert (same.same_as, same.fields) == (newer.name, newer.fields)


def test_the_table_holds_each_name_once() -> None:
    names = [name.lower() for name in published_models()]
    assert len(names) == len(set(names)) > 300
    assert all(name.count("/") == 1 for name in names)


def test_a_wrong_name_names_the_nearest_and_the_other_way() -> None:
    with pytest.raises(InputError) as caught:
        check_hub_name("transformers:meta-llama/Llama-3-8C")
    line = str(caught.value)
    assert line.startswith("transformers:meta-llama/Llama-3-8C: unknown model 'meta-llama/Llama-3-8C'; did you mean ")
    assert "meta-llama/Llama-3-8B, " in line
    assert line.endswith("? a config.json works too: transformers:path/config.json")
    assert "meta-llama/Llama-3.1-8B" in str(unknown_model("someone/Llama-3.1-8B"))
    assert "`ddltool show models` lists the known ones; a config.json" in str(unknown_model("zzz/zzz"))
    assert "did you mean bert?" in str(unknown_model("brt", ["bert", "vit"]))


@pytest.mark.parametrize("source", ["transformers:llama", "transformers:a/b/config.json", "zoo:a/b", "a/b.py:f"])
def test_other_sources_pass(source: str) -> None:
    check_hub_name(source)


def test_a_wrong_name_is_said_before_torch_is_imported() -> None:
    code = """
import sys
from ddltool.commands.main import run
code = run(["predict", "transformers:meta-llama/Llama-3-8C", "--device", "H100"])
assert code == 2, code
assert not {"torch", "transformers"} & {*sys.modules}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "error: transformers:meta-llama/Llama-3-8C: unknown model" in done.stderr
