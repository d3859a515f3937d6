"""What a torch SOURCE can be: inputs that reach the whole model, values known while tracing, refusals in one line."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from ddltool.analyzers.step.tracing import factories
from ddltool.analyzers.step.tracing.known_values import AssumedValues, KnownValues, bind
from ddltool.analyzers.step.tracing.sources import demand_whole, load_graph, resolve_step
from ddltool.analyzers.step.tracing.step import TrainingStep, default_loss
from ddltool.analyzers.step.tracing.torch_adapter import trace_torch
from ddltool.errors import InputError, MissingExtra
from ddltool.graph import RECV, SEND, Graph


def needs(package: str) -> None:
    """Skip without an optional package; importing it is the loader's, which knows how to where torchvision is broken."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")


MASK = torch.tensor([[1, 0, 1], [0, 0, 1]])


def traced(look: Callable[[Tensor], Any], value: Tensor = MASK) -> Any:
    """What a function sees of a tensor without values when its values are known."""
    with FakeTensorMode(allow_non_fake_inputs=True), KnownValues() as known, AssumedValues(known):
        tensor = torch.empty_like(value)
        known.learn(tensor, value)
        return look(tensor)


@pytest.mark.parametrize(
    "look",
    [
        lambda mask: mask.sum().item(),
        lambda mask: mask.tolist(),
        lambda mask: (mask[:, 1:] == 0).all().item(),
        lambda mask: torch.ones(2, 3)[mask.bool()].shape,
        lambda mask: torch.ones(4, 2, 3)[:, mask.bool()].shape,
        lambda mask: torch.ones(2, 3, 5).masked_select(mask[..., None].bool()).shape,
        lambda mask: mask.nonzero().tolist(),
        lambda mask: torch.repeat_interleave(mask[0]).tolist(),
        lambda mask: f"expert_{mask[0, 2]}",
        lambda mask: torch.tensor([mask[0, 0], 7]).tolist(),
        lambda mask: mask.clone().fill_(3).sum().item(),
        lambda mask: mask.clone()[0].add_(1).tolist(),
        lambda mask: torch.isfinite(mask / 0).all().item() or True,
    ],
)
def test_known_values_are_those_of_a_real_run(look: Callable[[Tensor], Any]) -> None:
    assert traced(look) == look(MASK)


def test_a_view_that_is_written_to_changes_what_is_known() -> None:
    def look(mask: Tensor) -> list[Any]:
        copy = mask.clone()
        copy[0].mul_(5)
        return copy.tolist()

    assert traced(look) == look(MASK)


def test_what_an_unknown_number_is_written_to_is_unknown() -> None:
    def look(mask: Tensor) -> Any:
        copy = mask.clone()
        row = copy[0]
        row.copy_(torch.empty(3, 3).normal_().sum(0))
        return copy[1].tolist()

    with pytest.raises(DataDependentOutputException):
        traced(look)


def test_a_router_uses_all_experts_equally() -> None:
    def look(mask: Tensor) -> list[int]:
        weights = torch.randn(6, 4)
        return [int(weights.topk(2).indices.eq(expert).sum()) for expert in range(4)]

    assert traced(look) == [3, 3, 3, 3]


class Eats(nn.Module):
    """Adds the rows that a mask names to a packed input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, mask: Tensor, rows: Tensor) -> Tensor:
        assert rows.shape[0] == mask.numel()
        return self.layer(rows[mask.flatten().bool()])


def test_bound_inputs_follow_the_batch_size_and_keep_their_values() -> None:
    def build() -> TrainingStep:
        module = Eats()
        inputs = {"rows": torch.ones(1, 4, 3), "mask": torch.tensor([[1, 0, 1, 1]], device="cpu")}
        return TrainingStep(
            name="eats", module=module, inputs=bind(module, inputs, "eats", frozenset(["rows"])), loss=default_loss
        )

    for batch_size in (None, 5):
        graph = trace_torch(build, mode="training", batch_size=batch_size)
        product = next(op for op in graph.ops() if op.op_type == "aten.addmm")
        assert product.flops == 2 * 3 * (batch_size or 1) * 3 * 3
        assert len(graph.of_kind(RECV)) == len(graph.of_kind(SEND)) == 2
    real = build()
    assert real.module(*real.inputs).shape == (3, 3)  # and without tracing it is the module's own forward


class Classifier(nn.Module):
    """Takes what a tokenizer makes, by keyword, and returns its own loss as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, attention_mask: Tensor, labels: Tensor, input_ids: Tensor, scale: float = 1.0) -> SimpleNamespace:
        pooled = (self.words(input_ids) * attention_mask[..., None]).mean(1) * scale
        logits = self.head(pooled)
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def classifier() -> tuple[nn.Module, dict[str, Any]]:
    """A factory whose names stand in another order than the module's arguments."""
    tokens = torch.arange(14).view(2, 7)
    labels = torch.tensor([0, 2])
    return Classifier(), {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones(2, 7), "scale": 2.0}


def test_inputs_by_name_are_passed_by_keyword_and_follow_the_batch_size() -> None:
    real = resolve_step(classifier)
    module, example = classifier()
    with torch.no_grad():
        for own, other in zip(module.parameters(), real.module.parameters(), strict=True):
            other.copy_(own)
        assert torch.equal(real.run(), module(**example).loss)  # the model's own loss, of the same arguments
    for batch_size in (None, 5):
        graph = load_graph(classifier, "training", batch_size)
        (product,) = (op for op in graph.ops() if op.op_type == "aten.addmm")
        assert product.flops == 2 * 8 * 3 * (batch_size or 2)
        assert (graph.batch_size, graph.meta["tokens_per_sample"]) == (batch_size or 2, 7)
        assert "aten.nll_loss_forward" in graph.op_type
    longer = resolve_step(classifier, sequence_length=9)
    assert [tuple(value.shape) for value in longer.inputs[:3]] == [(2, 9), (2,), (2, 7)]


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Linear(4, 4)
        self.tower = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, row: Tensor) -> Tensor:
        return self.seen(row)


def test_parameters_that_feed_nothing() -> None:
    step = lambda: TrainingStep(name="half", module=Half(), inputs=(torch.ones(2, 4),), loss=default_loss)  # noqa: E731
    for mode in ("training", "inference"):
        graph = trace_torch(step, mode=mode)  # type: ignore[arg-type]
        told = demand_whole(graph, "train.py:half")
        assert told.meta["note"] == "4 of 6 parameters (66.7% of their bytes) feed nothing: tower"
        with pytest.raises(
            InputError, match=r"transformers:half: 4 of 6 parameters .* feed nothing: tower; no example"
        ):
            demand_whole(graph, "transformers:half")


def parameters(graph: Graph) -> int:
    return int(graph.meta["parameter_elements"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        pytest.param("clip", 151_277_313, marks=pytest.mark.slow),  # openai/clip-vit-base-patch32
        ("whisper", 37_760_640),  # openai/whisper-tiny, whose default has as many layers and another vocabulary
        pytest.param("wav2vec2", 94_396_320, marks=pytest.mark.slow),  # facebook/wav2vec2-base-960h
        pytest.param("deit", 86_567_656, marks=pytest.mark.slow),
    ],
)
def test_both_halves_of_a_model_are_trained(name: str, elements: int) -> None:
    needs("transformers")
    graph = load_graph(f"transformers:{name}", "training", 2)
    assert graph.batch_size == 2
    assert "note" not in graph.meta
    assert parameters(graph) == pytest.approx(elements, rel=0.01)


def test_the_vision_tower_feeds_the_language_model() -> None:
    """As many image tokens as the tower makes of an image: (336 / 14) squared, for every image of the batch."""
    needs("transformers")
    with torch.device("meta"):
        step = resolve_step("transformers:llava", sequence_length=600)
    tokens, image = step.inputs
    assert (tokens.shape, image.shape) == ((1, 600), (1, 3, 336, 336))
    values, counts = tokens.unique(return_counts=True)
    assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == {0: 24, 32000: 576}


def test_experts_are_counted_by_the_tokens_that_they_get() -> None:
    """Two of eight experts a token: the products of mixtral's experts cost a quarter of all eight on all tokens."""
    needs("transformers")
    graph = load_graph("transformers:mixtral", "inference", None)
    products = [op for op in graph.ops() if op.op_type == "aten._grouped_mm"]
    assert len(products) == 2 * 32
    wide, narrow = 2 * 14336, 4096
    assert [op.flops for op in products[:2]] == [2 * 256 * 4096 * wide, 2 * 256 * 14336 * narrow]


@pytest.mark.parametrize(
    ("source", "length", "message"),
    [
        ("transformers:bert", 513, "--sequence-length: is 513; transformers:bert takes at most 512 tokens"),
        ("transformers:roberta", 511, "takes at most 510 tokens"),
        ("transformers:vit", 64, "transformers:vit reads no text; leave it out"),
        ("transformers:llava", 300, "has 576 tokens of its example image or sound"),
        ("zoo:resnet32", 64, "the example inputs hold no token indices; leave it out"),
    ],
)
def test_a_sequence_length_that_a_model_does_not_have(source: str, length: int, message: str) -> None:
    needs("transformers")
    with pytest.raises(InputError, match=message), torch.device("meta"):
        resolve_step(source, length)


@pytest.mark.parametrize(("source", "length"), [("transformers:t5", 1024), ("zoo:gpt_small", 40)])
def test_a_sequence_length(source: str, length: int) -> None:
    needs("transformers")
    with torch.device("meta"):
        step = resolve_step(source, length)
    assert {tensor.shape[1] for tensor in step.inputs} == {length}


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("transformers:decision_transformer", "takes states, actions, .* for which ddltool has no example inputs"),
        ("transformers:rag", "does not run on the inputs that ddltool makes for it .*; write a factory that returns"),
        ("timm:resnet5000", "unknown model 'resnet5000'; did you mean resnet50"),
        ("timm:resnet18@big", "cannot read the image size 'big'; give pixels: timm:resnet18@256"),
        ("transformers:luke", "parameters .* feed nothing: luke"),
    ],
)
def test_models_that_are_refused(source: str, message: str) -> None:
    needs(source.partition(":")[0])
    with pytest.raises(InputError, match=message) as caught:
        load_graph(source, "training", None)
    assert "\n" not in str(caught.value)


def test_another_image_size() -> None:
    needs("timm")
    small, large = (load_graph(f"timm:{name}", "inference", None) for name in ("resnet18@64", "resnet18@128"))
    convolutions = [sum(op.flops for op in one.ops() if op.op_type == "aten.convolution") for one in (small, large)]
    assert convolutions[1] == 4 * convolutions[0] > 0


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name, name=name)

    monkeypatch.setattr(factories, "importlib", SimpleNamespace(import_module=missing, util=factories.importlib.util))
    with pytest.raises(
        MissingExtra, match=r"timm:x: needs the package timm; install it with: pip install 'ddltool\[timm\]'"
    ):
        factories.imported("timm", "timm:x")
