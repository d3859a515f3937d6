"""The determinism scan: its tables against the installed torch, its verdicts against the paper and small models."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ddltool.analyzers.step.tracing.determinism import CLASSES, OPS, TORCH_VERSION, class_of, op_facts, scan
from ddltool.analyzers.step.tracing.sources import scan_source
from ddltool.analyzers.step.tracing.step import TrainingStep, default_loss
from ddltool.analyzers.step.tracing.torch_adapter import trace_step
from ddltool.commands.main import load
from ddltool.errors import InputError
from ddltool.graph import Graph, Op

# The documentation names modules and functions; these are the aten ops behind them.
DOCUMENTED_AS = {
    "Conv1d": "convolution",
    "Conv2d": "convolution",
    "Conv3d": "convolution",
    "ConvTranspose1d": "convolution",
    "ConvTranspose2d": "convolution",
    "ConvTranspose3d": "convolution",
    "ReplicationPad1d": "replication_pad1d_backward",
    "ReplicationPad2d": "replication_pad2d_backward",
    "ReplicationPad3d": "replication_pad3d_backward",
    "bmm": "",  # sparse only
    "__getitem__": "index_put",
    "put_": "put",
    "scatter_add_": "scatter_add",
    "gather": "scatter_add",
    "index_select": "index_add",
    "repeat_interleave": "index_add",
    "MaxPool3d": "max_pool3d_with_indices_backward",
    "AvgPool3d": "avg_pool3d_backward",
    "AdaptiveAvgPool2d": "_adaptive_avg_pool2d_backward",
    "AdaptiveAvgPool3d": "_adaptive_avg_pool3d_backward",
    "AdaptiveMaxPool2d": "adaptive_max_pool2d_backward",
    "FractionalMaxPool2d": "fractional_max_pool2d_backward",
    "FractionalMaxPool3d": "fractional_max_pool3d_backward",
    "MaxUnpool1d": "max_unpool2d",
    "MaxUnpool2d": "max_unpool2d",
    "MaxUnpool3d": "max_unpool3d",
    "interpolate": "upsample_bilinear2d_backward",
    "ReflectionPad1d": "reflection_pad1d_backward",
    "ReflectionPad2d": "reflection_pad2d_backward",
    "ReflectionPad3d": "reflection_pad3d_backward",
    "NLLLoss": "nll_loss2d_forward",
    "CTCLoss": "_ctc_loss_backward",
    "EmbeddingBag": "_embedding_bag_backward",
    "grid_sample": "grid_sampler_2d_backward",
    "resize_": "",  # quantized only
}


def documented(section: str) -> list[str]:
    text = " ".join((torch.use_deterministic_algorithms.__doc__ or "").split())
    begin = text.index(section)
    ends = (text.find(mark, begin) for mark in ("The following", "In addition"))
    end = min(place for place in ends if place > 0)
    return [name.rpartition(".")[2] for name in re.findall(r"\* :\w+:`([\w.]+)`", text[begin:end])]


@pytest.mark.skipif(not torch.__version__.startswith(TORCH_VERSION), reason="tables are of another torch")
@pytest.mark.parametrize(
    ("section", "classes"),
    [
        ("will act deterministically", {"convolution", "atomics", "atomics only"}),  # put_: on the CPU only
        (
            "operations will throw a :class:`RuntimeError`",
            {"atomics only", "atomics"},
        ),  # scatter_reduce: for products only
    ],
)
def test_every_documented_nondeterministic_op_is_listed(section: str, classes: set[str]) -> None:
    names = documented(section)
    assert len(names) > 20
    for name in names:
        op = DOCUMENTED_AS.get(name, name.rstrip("_"))
        if op:
            assert OPS[f"aten.{op}"] in classes, name


def test_every_listed_op_is_an_op_of_torch() -> None:
    known = {name.rstrip("_") for name in aten_names()}
    listed = [op for entry in CLASSES.values() for op in entry.get("documented", "").split()]
    missing = [op for op in listed if op not in known]
    assert len(listed) > 30
    assert not missing, missing


def aten_names() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {name.partition("::")[2].partition(".")[0] for name in names if name.startswith("aten::")}


def tagged(tag: torch.Tag) -> set[str]:
    found = (getattr(torch.ops.aten, name, None) for name in aten_names())
    packets = [packet for packet in found if packet is not None]
    return {
        f"aten.{packet._qualified_op_name.partition('::')[2]}"
        for packet in packets
        if any(tag in getattr(packet, overload).tags for overload in packet.overloads())
    }


def test_tables_agree_with_torchs_tags() -> None:
    seeded = {op: class_of(op) for op in tagged(torch.Tag.nondeterministic_seeded)}
    assert {op for op, name in seeded.items() if name not in ("random", "attention", "recurrent")} == set()
    pointwise = tagged(torch.Tag.pointwise)
    assert {op for op in pointwise if class_of(op) not in ("exact", "reduction", "random")} == set()
    reduction = tagged(torch.Tag.reduction) - pointwise
    assert {op for op in reduction if class_of(op) != "reduction"} == set()
    assert len(seeded) > 30
    assert len(pointwise) > 150


def traced_scan(module: nn.Module, *inputs: Tensor, loss: object = None):
    step = TrainingStep(name="m", module=module, inputs=inputs, loss=loss or (lambda out: default_loss(out)))  # type: ignore[arg-type]
    traced = trace_step(lambda: step, mode="training")
    return scan(traced.graph, op_facts(traced))


class Pooled(nn.Module):
    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.before, self.pool, self.head = nn.Linear(8, 8), pool, nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.pool(self.before(images)).flatten(1)[:, :4])  # type: ignore[no-any-return]


class Summed(nn.Module):
    def __init__(self, floating: bool) -> None:
        super().__init__()
        self.floating = floating
        self.head = nn.Linear(4, 3)

    def forward(self, features: Tensor) -> Tensor:
        counts = features.cumsum(1) if self.floating else torch.ones(2, 4, dtype=torch.long).cumsum(1)
        return self.head(features * counts)  # type: ignore[no-any-return]


def test_each_class_is_seen_in_a_model_that_has_it() -> None:
    images, rows = torch.randn(2, 3, 8, 8), torch.randn(2, 4)
    assert traced_scan(nn.Linear(4, 3), rows).level == "D2"
    convolution = traced_scan(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2)), images)
    assert (convolution.level, len(convolution.reasons)) == ("D1", 2)
    assert "of the FLOPs" in convolution.reasons[0]
    assert convolution.ops[0].modules == ["0"]
    patches = traced_scan(nn.Sequential(nn.Conv2d(3, 4, 4, stride=4), nn.Flatten(), nn.Linear(16, 2)), images)
    assert patches.d2_eligible
    assert {"patches"} < {finding.class_ for finding in patches.ops}
    grouped = traced_scan(nn.Sequential(nn.Conv2d(4, 4, 2, 2, groups=4), nn.Flatten()), torch.randn(2, 4, 4, 4))
    assert grouped.level == "D1"
    assert traced_scan(Pooled(nn.AdaptiveMaxPool2d(3)), images).level == "none"
    assert traced_scan(Pooled(nn.AvgPool2d(3)), images).level == "D2"
    assert traced_scan(Summed(True), rows).level == "none"
    assert traced_scan(Summed(False), rows).level == "D2"
    recurrent = nn.LSTM(4, 3, batch_first=True)
    assert traced_scan(nn.Sequential(recurrent), torch.randn(2, 5, 4)).ops


@pytest.mark.parametrize("source", ["zoo:bert_small", "zoo:gpt_small"])
def test_models_without_convolutions_are_eligible_as_in_the_paper(source: str) -> None:
    graph, found = scan_source(source)
    assert found.d2_eligible
    assert scan(graph).d2_eligible
    names = {finding.class_ for finding in found.ops}
    assert names == {"gemm", "attention", "reduction", "random"} or names == {"gemm", "attention", "reduction"}


def test_fixture_graphs_of_convolutional_networks_are_not_eligible() -> None:
    folder = Path(__file__).parents[3] / "fixtures/graphs"
    for name in ("resnet50_v1", "vgg19", "inception_v3"):  # two of them are in the paper's table 1
        _, found = scan_source(str(folder / f"{name}-training.graph.json.gz"))
        assert found.level == "D1"
        assert all("convolution" in reason for reason in found.reasons)


def graph_of(*ops: tuple[str, str]) -> Graph:
    return Graph.from_ops("g", "training", [Op(name=name, kind="compute", op_type=kind) for name, kind in ops])


def test_a_graph_without_types_or_modules() -> None:
    found = scan(graph_of(("a", ""), ("b", "")))
    assert (found.level, found.d2_eligible) == ("unknown", False)
    assert found.reasons == ["an op without a type (2 times): not in the tables of known kernels"]
    assert found.ops[0].modules == []
    mixed = scan(graph_of(("a", ""), ("forward/x/b", "aten.histc"), ("backward/c", "aten.add")))
    assert (mixed.level, mixed.exact_ops) == ("none", 1)
    assert mixed.ops[0].modules == ["x"]
    assert scan(graph_of(("a", "onnx.Conv"), ("b", "onnx.Relu"))).level == "D1"


def test_the_level_is_the_lowest_of_its_ops() -> None:
    one_of = {CLASSES[name]["level"]: op for op, name in OPS.items()} | {"unknown": "mine.op"}
    order = ["none", "unknown", "D1"]
    for place, level in enumerate(order):
        chosen = [("a", "aten.add"), ("b", "aten.mm"), *((x, one_of[x]) for x in order[place:])]
        assert scan(graph_of(*chosen)).level == level


def determinism(source: str, *more: str) -> None:
    load("trace").main([source, "--determinism", *more], standalone_mode=False)


def test_the_printed_document_and_table(capsys: pytest.CaptureFixture[str]) -> None:
    determinism("zoo:cifarnet", "--json")
    document = json.loads(capsys.readouterr().out)["determinism"]
    assert document["level"] == "none"
    assert document["d2_eligible"] is False
    assert any("avg_pool3d_backward" in reason for reason in document["reasons"])
    assert {row["op"] for row in document["ops"]} > {"aten.convolution", "aten.mm"}
    determinism("zoo:cifarnet")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("cifarnet (training): not even D0")
    table = lines[lines.index("Ops whose bits depend on more than their inputs".ljust(80)) :]
    assert max(len(line) for line in lines) <= 80
    assert any("set:" in line for line in lines)
    assert any("features.0" in line for line in table)


def test_bad_sources_are_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text('{"kind": "ddltool.graph", "ops": [')
    with pytest.raises(InputError):
        determinism(str(tmp_path / "cut.json"))
    with pytest.raises(InputError, match="unknown"):
        determinism("zoo:nothing")
