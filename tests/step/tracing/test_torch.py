"""Tracing torch modules: against real runs (NaN propagation, FlopCounterMode, memory), not against itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.sources import load_graph, resolve_step
from ddltool.analyzers.step.tracing.step import TrainingStep, default_loss, guess_inputs, with_batch_size
from ddltool.analyzers.step.tracing.torch_adapter import trace_torch
from ddltool.errors import InputError
from ddltool.graph import COMPUTE, RECV, SEND, Graph


class Branches(nn.Module):
    """Two branches that join, batch norm, a view that is written to, a tied weight and a parameter nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.right = nn.Conv2d(3, 4, 1)
        self.head = nn.Linear(4, 4, bias=False)
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.head.weight
        self.shift = nn.Parameter(torch.ones(4))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, image: Tensor) -> Tensor:
        left = self.left(image).clone()
        left[:, 0].add_(self.shift[0])
        joined = (left + self.right(image)).mean((2, 3))
        return self.again(torch.tanh(self.head(joined))) + self.shift


def branches() -> TrainingStep:
    return TrainingStep(name="branches", module=Branches(), inputs=(torch.randn(4, 3, 6, 6),), loss=default_loss)


def ancestors(graph: Graph, name: str) -> set[str]:
    """All recv parameters that an op depends on, found by plain search."""
    todo, seen = [graph.names.index(name)], set()
    while todo:
        op = todo.pop()
        if op not in seen:
            seen.add(op)
            todo.extend(int(source) for source in graph.inputs_of(op))
    return {graph.parameter[op] or "" for op in seen if graph.kind[op] == RECV}


def test_dependencies_equal_what_nan_reaches_in_a_real_run() -> None:
    """Poison one parameter at a time: a gradient turns NaN exactly when its send depends on that parameter's recv."""
    graph = trace_torch(branches, mode="training")
    sends = [graph.names[op] for op in graph.of_kind(SEND)]
    names = [name for name, _ in Branches().named_parameters()]
    for poisoned in names:
        torch.manual_seed(0)
        step = branches()
        step.module.train()
        parameters = dict(step.module.named_parameters())
        with torch.no_grad():
            parameters[poisoned].fill_(float("nan"))
        step.run().backward()
        for send in sends:
            gradient = parameters[send.removeprefix("send/")].grad
            assert gradient is not None
            reached = bool(gradient.isnan().any())
            assert reached == (poisoned in ancestors(graph, send)), (poisoned, send)


def test_every_parameter_is_received_and_every_gradient_sent() -> None:
    graph = trace_torch(branches, mode="training")
    parameters = dict(Branches().named_parameters())
    received = {graph.parameter[op]: graph.size_bytes[op] for op in graph.of_kind(RECV)}
    assert received == {name: value.numel() * 4 for name, value in parameters.items()}
    assert {graph.parameter[op] for op in graph.of_kind(SEND)} == set(parameters) - {"unused"}
    inference = trace_torch(branches, mode="inference")
    assert len(inference.of_kind(SEND)) == 0
    assert len(inference.of_kind(RECV)) == len(parameters)


def test_a_write_through_a_view_is_a_dependency() -> None:
    graph = trace_torch(branches, mode="inference")
    add = next(op.name for op in graph.ops() if op.op_type == "aten.add_" and "shift" in ancestors(graph, op.name))
    joined = next(op for op in graph.ops() if op.op_type == "aten.mean")
    reader = graph.op(graph.names.index(joined.inputs[0]))
    assert add in reader.inputs


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("source", ["zoo:resnet32", "zoo:gpt_small", "zoo:bert_small", "zoo:cifarnet"])
def test_flops_equal_torchs_own_counter_on_a_real_run(source: str, mode: str) -> None:
    graph = load_graph(source, mode, 2)  # type: ignore[arg-type]
    step = resolve_step(source)
    module = step.module.train(mode == "training")
    inputs = with_batch_size(step.inputs, 2)
    with FlopCounterMode(display=False) as counter:
        if mode == "training":
            step.loss(module(*inputs)).backward()
        else:
            with torch.no_grad():
                module(*inputs)
    matrix = {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"}
    counts = counter.get_flop_counts()["Global"]  # of attention on a CPU too, by some torches alone
    counted = sum(count for op, count in counts.items() if str(op).removeprefix("aten.") in matrix)
    ours = sum(op.flops for op in graph.ops() if op.op_type.removeprefix("aten.") in matrix)
    assert counted > 0
    assert ours == pytest.approx(counted, rel=1e-12)


def test_attention_is_counted_on_cpu_traces() -> None:
    """Torch's registry lacks the CPU attention kernels; without the fix their FLOPs would be a silent zero."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(16, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            q = self.project(x).view(2, 8, 4, 4).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(q, q, q)

    graph = trace_torch(lambda: step_of(Attention(), torch.zeros(2, 8, 16)), mode="inference")
    kernel = next(op for op in graph.ops() if "attention" in op.op_type)
    assert kernel.flops == 2 * (2 * 2 * 4 * 8 * 8 * 4)  # two products of (batch 2, heads 4) 8 x 4 x 8
    assert kernel.estimate == "rule"


def step_of(module: nn.Module, *inputs: Tensor) -> TrainingStep:
    return TrainingStep(name="m", module=module, inputs=inputs, loss=default_loss)


def test_views_are_free_and_unknown_ops_are_marked() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return (torch.linalg.qr(self.weight.t() @ x)[0] + 0).contiguous().t().t().view(4, 4)

    graph = trace_torch(lambda: step_of(Odd(), torch.zeros(4, 4)), mode="inference")
    kinds = {op.op_type: op for op in graph.ops() if op.kind == "compute"}
    assert kinds["aten.view"].estimate == "free"
    assert kinds["aten.view"].size_bytes == 0
    assert kinds["aten.linalg_qr"].estimate == "default"
    assert kinds["aten.linalg_qr"].size_bytes > 0


def test_batch_size_scales_compute_and_not_parameters() -> None:
    small, large = (trace_torch(branches, mode="training", batch_size=size) for size in (4, 8))
    assert (small.batch_size, large.batch_size) == (4, 8)
    assert small.parameter_bytes == large.parameter_bytes
    conv = [graph.flops[graph.names.index("forward/left.0/convolution")] for graph in (small, large)]
    assert conv[1] == 2 * conv[0] > 0


def test_two_traces_are_equal() -> None:
    assert trace_torch(branches, mode="training") == trace_torch(branches, mode="training")


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda x: x @ torch.zeros(7, 7), "training step cannot be traced .RuntimeError: "),
        (lambda x: "text", "returned str without a floating-point tensor"),
        (lambda x: x.detach(), "cannot be traced .*does not require grad"),
    ],
)
def test_modules_that_cannot_be_traced(forward: Callable[[Tensor], object], message: str) -> None:
    class Bad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> object:
            return forward(self.layer(x))

    with pytest.raises(InputError, match=message) as caught:
        trace_torch(lambda: step_of(Bad(), torch.zeros(2, 4)), mode="training")
    assert "\n" not in str(caught.value)


def test_a_value_that_only_a_run_knows_is_assumed_and_told() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.layer(x)
            return hidden if hidden.sum() > 0 else -hidden

    graph = trace_torch(lambda: step_of(Branching(), torch.zeros(2, 4)), mode="training")
    assert str(graph.meta["note"]).startswith("Assumed: 1 value that only a run knows: ")
    assert "test_torch.py" in str(graph.meta["note"])
    assert "aten.neg" not in graph.op_type


def test_what_a_forward_pass_makes_on_the_cpu_is_made_on_the_gpu() -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + torch.arange(4.0)  # without device=x.device

    graph = trace_torch(lambda: step_of(Careless(), torch.zeros(2, 4)), mode="training")
    assert "aten.arange" in graph.op_type


def test_a_module_that_needs_real_weights_to_be_built_still_traces() -> None:
    class Orthogonal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.scale = float(self.layer.weight.detach().abs().sum())  # not possible on meta tensors

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale

    graph = trace_torch(lambda: step_of(Orthogonal(), torch.zeros(2, 4)), mode="inference")
    assert len(graph.of_kind(RECV)) == 2


def test_guessed_inputs() -> None:
    inputs, note = guess_inputs(nn.Sequential(nn.Conv2d(5, 2, 3)))
    assert inputs[0].shape == (1, 5, 224, 224)
    assert "guessed from the first Conv2d" in note
    with pytest.raises(InputError, match="Tanh does not say what it takes; let the factory return"):
        guess_inputs(nn.Tanh())


@dataclass
class Answer:
    logits: Tensor
    hidden: tuple[Tensor, ...]


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_dataclass_as_output(mode: str) -> None:
    class Answers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = nn.Linear(4, 3), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Answer:
            return Answer(self.layer(x), (self.other(x),))

    graph = trace_torch(lambda: step_of(Answers(), torch.zeros(2, 4)), mode=mode)  # type: ignore[arg-type]
    forward = [op.flops for op in graph.ops() if op.op_type == "aten.addmm"]
    assert forward == [2 * 2 * 4 * 3, 2 * 2 * 4 * 2]


def test_parameters_that_are_read_and_never_trained_are_told() -> None:
    class Stops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head, self.frozen = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(self.frozen(x)).detach())

    graph = trace_torch(lambda: step_of(Stops(), torch.zeros(2, 4)), mode="training")
    assert graph.meta["note"] == "2 trained parameters are read and get no gradient: body"
    assert {graph.parameter[op] for op in graph.of_kind(SEND)} == {"head.weight", "head.bias"}


@pytest.mark.slow
def test_gradient_checkpointing_of_transformers() -> None:
    pytest.importorskip("transformers")

    def build(checkpointing: bool) -> TrainingStep:
        step = resolve_step("transformers:gpt2")
        if checkpointing:
            step.module.gradient_checkpointing_enable()  # type: ignore[operator]
        return step

    plain, saved = (trace_torch(lambda on=on: build(on), mode="training") for on in (False, True))  # type: ignore[misc]
    assert len(saved.of_kind(SEND)) == len(plain.of_kind(SEND))
    assert saved.flops.sum() > plain.flops.sum()


@pytest.mark.parametrize("name", ["bert", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_transformers_models(name: str) -> None:
    pytest.importorskip("transformers")
    graph = load_graph(f"transformers:{name}", "training", None)
    assert len(graph.of_kind(RECV)) == {"bert": 201, "gpt2": 148}[name]
    assert len(graph.of_kind(SEND)) == len(graph.of_kind(RECV))
    unknown = [op.op_type for op in graph.ops() if op.estimate == "default"]
    assert len(unknown) <= 0.02 * len(graph.of_kind(COMPUTE)), set(unknown)


@pytest.mark.slow
def test_a_seven_billion_parameter_model_needs_little_memory() -> None:
    """32 layers of Llama, 27 GB of float32 weights, in well under 2 GiB."""
    pytest.importorskip("transformers")
    code = (
        "from pathlib import Path\nfrom ddltool.analyzers.step.tracing.sources import load_graph\n"
        "g = load_graph('transformers:llama', 'training', None)\n"
        "kib = Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0]\n"  # ru_maxrss counts the parent's too
        "print(int(g.parameter_bytes), len(g.of_kind(0)), 1024 * int(kib))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    size, count, peak = map(int, done.stdout.split()[-3:])
    assert size > 26e9
    assert count == 291
    assert peak < 1 * 2**30


@pytest.fixture
def factory_file(tmp_path: Path) -> Path:
    text = (
        "import torch\nfrom torch import nn\nprint('noise on import')\n"
        "def good():\n    print('noise')\n    return nn.Linear(3, 2), torch.zeros(4, 3)\n"
        "def bare():\n    return nn.Linear(3, 2)\n"
        "def raises():\n    raise ValueError('no\\nsuch weights')\n"
        "def wrong():\n    return 7\n"
        "def leaves():\n    raise SystemExit(5)\n"
        "constant = 5\n"
    )
    (tmp_path / "model.py").write_text(text)
    return tmp_path / "model.py"


def test_factories(factory_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = load_graph(f"{factory_file}:good", "training", None)
    assert (graph.name, graph.batch_size, len(graph.of_kind(RECV))) == ("good", 4, 2)
    bare = load_graph(f"{factory_file}:bare", "inference", None)
    assert "guessed from the first Linear" in str(bare.meta["note"])
    assert capsys.readouterr().out == ""  # what the user's code prints must not mix with the result


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("FILE:raises", r"the factory raised ValueError: no such weights; it must work when called without"),
        ("FILE:leaves", "the factory raised SystemExit: 5"),
        ("FILE:wrong", "the factory returned a int; return an nn.Module or"),
        ("FILE:constant", "'constant' is not callable"),
        ("FILE:goood", "has no 'goood'; did you mean \"good\""),
        ("nowhere.py:f", "no such file: nowhere.py"),
        ("no_such_package.x:f", "cannot import no_such_package.x"),
        ("zoo:resnet31", "did you mean"),
        (
            "transformers:brt",
            "unknown model 'brt'; did you mean .*bert.*a config.json works too: transformers:path/config",
        ),
        ("nothing", "no such file or source; SOURCE is model.onnx,"),
    ],
)
def test_bad_sources(factory_file: Path, source: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_graph(source.replace("FILE", str(factory_file)), "training", None)


def test_a_script_with_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(InputError, match=r"broken.py cannot be loaded: SyntaxError"):
        load_graph(f"{tmp_path}/broken.py:f", "training", None)


def test_a_half_module_is_asked_for_its_precision() -> None:
    """Memory and words of float32 parameters would be wrong; those of the adapters alone decide beside frozen ones."""

    def step(dtype: torch.dtype, frozen: torch.dtype | None = None) -> TrainingStep:
        module = nn.Sequential(
            nn.Linear(8, 8).to(frozen or dtype).requires_grad_(frozen is None), nn.Linear(8, 8).to(dtype)
        )
        return TrainingStep(
            name="m", module=module, inputs=(torch.zeros(2, 8, dtype=frozen or dtype),), loss=default_loss
        )

    with pytest.raises(
        InputError, match=r"^m: has parameters in float16, which fp32 keeps in float32; give --precision "
    ):
        trace_torch(lambda: step(torch.float16), mode="training")
    with pytest.raises(InputError, match="bfloat16, which bf16 keeps in float32; give --precision bf16-pure"):
        trace_torch(lambda: step(torch.bfloat16), mode="training", numerics=Numerics("bf16"))
    pure = trace_torch(lambda: step(torch.bfloat16), mode="training", numerics=Numerics("bf16-pure"))
    mixed = trace_torch(lambda: step(torch.float32, torch.bfloat16), mode="training", numerics=Numerics("bf16"))
    assert (pure.meta["precision"], mixed.meta["precision"]) == ("bf16-pure", "bf16")


def test_channels_last_needs_images_or_filters() -> None:
    with pytest.raises(InputError, match="--channels-last: has no part: m has no images and no filters; leave it out"):
        trace_torch(
            lambda: TrainingStep(name="m", module=nn.Linear(4, 4), inputs=(torch.zeros(2, 4),), loss=default_loss),
            mode="training",
            numerics=Numerics(channels_last=True),
        )
