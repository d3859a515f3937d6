"""``--attention``: an eager model keeps its scores, and no option changes a model that has its attention in its code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import ddltool as dt
from ddltool.analyzers.step.costs.work import work_of
from ddltool.analyzers.step.recording.torch_costs import issued
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.errors import InputError
from tests.conftest import Cli

HEADS, LAYERS, LENGTH, BATCH = 12, 12, 512, 2


@pytest.mark.slow
def test_eager_keeps_the_squares_of_scores() -> None:
    rows = {
        name: dt.predict(
            "transformers:gpt2", "A100", batch_sizes=BATCH, precision="bf16", sequence_length=LENGTH, attention=name
        ).rows[0]
        for name in (None, "eager", "sdpa", "flash")
    }
    own, eager, sdpa, flash = rows.values()
    assert own.step_time_s == sdpa.step_time_s == flash.step_time_s
    assert own.peak_memory_bytes == sdpa.peak_memory_bytes
    assert eager.step_time_s > sdpa.step_time_s
    scores_bytes = LAYERS * BATCH * HEADS * LENGTH**2 * 2  # of 16 bits
    assert scores_bytes <= eager.peak_memory_bytes - sdpa.peak_memory_bytes <= 8 * scores_bytes


@pytest.mark.slow
def test_so_does_timm() -> None:
    asked = {"batch_sizes": 64, "precision": "bf16"}
    eager, sdpa = (
        dt.predict("timm:vit_tiny_patch16_224", "A100", attention=name, **asked) for name in ("eager", "sdpa")
    )
    assert eager.rows[0].peak_memory_bytes > sdpa.rows[0].peak_memory_bytes
    assert eager.rows[0].step_time_s > sdpa.rows[0].step_time_s


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("zoo:cifarnet", "--attention", "eager"), "--attention: zoo:cifarnet has its attention in its code"),
        (("transformers:gpt2", "--attention", "flash"), "--attention: flash has no kernel for fp32"),
        (("transformers:gpt2", "--attention", "fast"), "--attention: unknown"),
    ],
)
def test_where_it_has_no_part(cli: Cli, arguments: tuple[str, ...], line: str) -> None:
    assert line in cli("predict", *arguments, "--device", "A100").error_line


def test_a_module_with_its_batch_has_its_own() -> None:
    with pytest.raises(InputError, match="attention: Linear has its attention in its code"):
        dt.predict(nn.Linear(8, 4), "A100", batch=torch.zeros(4, 8), attention="eager")


def test_a_plan_takes_it_too(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
    asked = (f"transformers:{tmp_path / 'config.json'}", "--devices", "A100=1")
    sized = ("--batch-size", "4", "--precision", "bf16", "--json")
    steps = [cli("plan", *asked, *sized, "--attention", name).document["iteration_s"] for name in ("eager", "sdpa")]
    assert steps[0] > steps[1]
    line = cli("plan", *asked, "--attention", "flash").error_line
    assert "attention: flash has no kernel for fp32" in line


def test_the_backward_pass_reads_the_forward_one_s_result() -> None:
    """The kernel's argument ``out`` is no tensor that it writes."""
    curve = work_of("zoo:gpt_small", Numerics("bf16"), None)
    node = next(node for name, node in curve.traced.nodes.items() if "attention_backward" in name)
    arguments = dict(zip((each.name for each in node.target._schema.arguments), node.args, strict=False))
    result = arguments["out"].meta["val"]
    others = [arguments[name].meta["val"] for name in ("grad_out", "query", "key", "value")]
    read_shapes = [tensor.shape for tensor in issued(node).inputs]
    assert read_shapes.count(tuple(result.shape)) >= 1 + sum(other.shape == result.shape for other in others)
