"""Equal blocks that are recorded once: the recording is that of all of them, call by call; others are recorded as they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.analyzers.step.costs.traced_lifetimes import lifetimes_of
from ddltool.analyzers.step.recording.recorder import Recording, Shadow
from ddltool.analyzers.step.recording.repeating import equal_blocks
from ddltool.analyzers.step.tracing import torch_adapter
from ddltool.analyzers.step.tracing.factories import imported
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.step import TrainingStep, language_model_loss
from ddltool.analyzers.step.tracing.torch_adapter import TracedStep
from ddltool.analyzers.step.tracing.transformers_models import transformers_step

pytest.importorskip("transformers")
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128}
FIELDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL, "intermediate_size": 96, "num_hidden_layers": 9},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 8, "n_head": 4, "vocab_size": 128},
    # Blocks of two kinds in turn, with experts: a block of the run is a pair of them.
    "gpt_oss": {
        "model_type": "gpt_oss",
        **SMALL,
        "intermediate_size": 32,
        "num_hidden_layers": 14,
        "head_dim": 16,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    },
}


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., TrainingStep]:
    """Return what makes the step of a small model on ``meta``; ``changed``: fields of its configuration."""

    def step(name: str, **changed: Any) -> TrainingStep:
        file = tmp_path / "config.json"
        file.write_text(json.dumps({**FIELDS[name], **changed}))
        with torch.device("meta"):
            return transformers_step(str(file), 24)

    return step


def calls(step: Recording) -> list[tuple[Any, ...]]:
    """What every call does, with storages numbered as they are met, and when each is made and freed."""
    numbers: dict[int, int] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, Shadow):
            storage, tensor = step.storages[value.storage], value.tensor
            number = numbers.setdefault(value.storage, len(numbers))
            form = tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype
            return number, *form, storage.size_bytes, storage.made, storage.freed
        if isinstance(value, (tuple, list)):
            return tuple(map(plain, value))
        if isinstance(value, Mapping):
            return {key: plain(part) for key, part in value.items()}
        return value

    return [
        (str(call.target), plain(call.args), plain(call.kwargs), plain(call.output), call.phase, call.module)
        for call in step.calls
    ]


def recorded(step: TrainingStep, numerics: Numerics, *, shorten: bool) -> Any:
    return torch_adapter._record_step(step.at_batch(3), "training", numerics, shorten=shorten)


@pytest.mark.parametrize(("name", "precision"), [("llama", "fp32"), *((name, "bf16") for name in FIELDS)])
def test_the_recording_is_that_of_every_block(made: Callable[..., TrainingStep], name: str, precision: str) -> None:
    step, numerics = made(name), Numerics(precision)  # type: ignore[arg-type]
    assert equal_blocks(step.module) is not None
    short, full = (recorded(step, numerics, shorten=shorten) for shorten in (True, False))
    assert calls(short.recording) == calls(full.recording)
    for field in ("parameters", "gradients", "kept_bytes", "kept_types", "trained"):
        assert list(getattr(short, field)) == list(getattr(full, field))
    assert short.kept_bytes == full.kept_bytes


def test_memory_is_the_same_to_the_byte(made: Callable[..., TrainingStep], monkeypatch: pytest.MonkeyPatch) -> None:
    def traced() -> TracedStep:
        return torch_adapter.trace_any_batch(
            lambda: made("llama"), mode="training", numerics=Numerics("bf16", gathered=True)
        )

    short = traced()
    monkeypatch.setattr(torch_adapter, "equal_blocks", lambda module: None)
    full = traced()
    assert short.graph.names == full.graph.names
    assert short.graph.flops.tolist() == full.graph.flops.tolist()
    for sharding in (Sharding(kind="ddp"), Sharding(kind="fsdp", shard=4)):
        one, two = (lifetimes_of(each) for each in (short, full))
        for way in ("none", "full"):
            peaks = [each.peak(sharding, "adam", each.every_block(way)) for each in (one, two)]  # type: ignore[arg-type]
            assert peaks[0].curve.tolist() == peaks[1].curve.tolist()


def test_what_the_host_waits_for_before_the_blocks_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads on the host whether positions are those of one document, before the first block."""
    transformers = imported("transformers", "llama")
    config = transformers.LlamaConfig(**SMALL, intermediate_size=96, num_hidden_layers=9, use_cache=False)
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config)
    step = TrainingStep(
        name="user", module=module, inputs=(torch.zeros(2, 24, dtype=torch.long),), loss=language_model_loss
    )
    full = recorded(step, Numerics("bf16"), shorten=False)
    records: list[int] = []
    whole = torch_adapter._record_once
    monkeypatch.setattr(
        torch_adapter, "_record_once", lambda step, *rest, **more: records.append(1) or whole(step, *rest, **more)
    )
    short = recorded(step, Numerics("bf16"), shorten=True)
    assert len(records) == 1
    assert short.recording.host_waits == full.recording.host_waits != []
    assert calls(short.recording) == calls(full.recording)
    assert any("flash_attention" in str(call.target) for call in short.recording.calls)


def test_six_of_the_blocks_are_recorded(made: Callable[..., TrainingStep]) -> None:
    step = made("llama", num_hidden_layers=40)
    blocks = equal_blocks(step.module)
    assert blocks is not None
    assert (blocks.path, blocks.first, blocks.period, blocks.count) == ("model.layers", 0, 1, 40)
    with blocks.shortened():
        assert len(step.module.get_submodule("model.layers")) == 6  # type: ignore[arg-type]
    assert len(step.module.get_submodule("model.layers")) == 40  # type: ignore[arg-type]


def test_a_block_with_another_setting_ends_the_run(made: Callable[..., TrainingStep]) -> None:
    step = made("llama", num_hidden_layers=12)
    wide = made("llama", num_hidden_layers=1, rms_norm_eps=1e-3).module.get_submodule("model.layers.0")
    step.module.get_submodule("model.layers")[4] = wide  # type: ignore[index, operator]
    blocks = equal_blocks(step.module)
    assert blocks is not None
    assert (blocks.first, blocks.count) == (5, 7)


def test_lists_of_other_peoples_code_are_recorded_whole() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(20))

        def forward(self, x: Tensor) -> Tensor:
            for number, block in enumerate(self.blocks):
                x = block(x) if number != 11 else x
            return x

    assert equal_blocks(Model()) is None


def test_a_block_that_does_more_than_the_others_lets_all_be_recorded(
    made: Callable[..., TrainingStep], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the fifth block on what the first made is added."""
    step = made("llama")
    layers: Any = step.module.get_submodule("model.layers")
    kept: list[Tensor] = []
    forward = type(layers[0]).forward

    def remembering(self: nn.Module, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self is layers[0]:
            kept.clear()
        output = forward(self, hidden, *args, **kwargs)
        kept.append(output)
        return output + kept[0] if len(kept) > 4 else output

    monkeypatch.setattr(type(layers[0]), "forward", remembering)
    short = recorded(step, Numerics(), shorten=True)
    full = recorded(step, Numerics(), shorten=False)
    assert len(short.recording.calls) == len(full.recording.calls)
