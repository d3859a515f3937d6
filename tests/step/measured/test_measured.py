"""The measured oracle: real ops on this machine, ops alike timed once, and an honest word on what was not measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddltool.analyzers.step.costs.model import coverage
from ddltool.analyzers.step.measured import measured
from ddltool.analyzers.step.measured.measured import OpTimes, apply_times, estimate_measured, measure_ops
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.sources import resolve_step, training_step
from ddltool.analyzers.step.tracing.step import TrainingStep, default_loss
from ddltool.analyzers.step.tracing.torch_adapter import TracedStep, trace_step
from ddltool.device import Network
from ddltool.errors import InputError
from ddltool.graph import COMPUTE, Graph, Op


def step_of(module: nn.Module, *inputs: Any) -> TrainingStep:
    return TrainingStep(name="net", module=module, inputs=inputs, loss=default_loss)


def traced(build: Callable[[], TrainingStep]) -> TracedStep:
    return trace_step(build, mode="training", numerics=Numerics(cuda=False))


class ConvNet(nn.Sequential):
    """Three equal blocks and one that differs."""

    def __init__(self) -> None:
        block = lambda: (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())  # noqa: E731
        super().__init__(*block(), *block(), *block(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 16 * 16, 10))


def conv_step() -> TrainingStep:
    return step_of(ConvNet(), torch.randn(16, 8, 32, 32))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """CPU time is the clock then, and other load on the machine counts for little."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def real_step(step: TrainingStep) -> float:
    step.module.zero_grad()
    return measured.time_call(lambda: step.run().backward())


@pytest.mark.parametrize(
    ("build", "real"),
    [(conv_step, conv_step), (lambda: resolve_step("zoo:gpt_small"), lambda: training_step("zoo:gpt_small", 1))],
    ids=["convolutions", "gpt_small"],
)
def test_the_ops_add_up_to_a_real_step(build: Callable[[], TrainingStep], real: Callable[[], TrainingStep]) -> None:
    found = trace_step(build, mode="training", batch_size=real().inputs[0].shape[0], numerics=Numerics(cuda=False))
    step = real()
    real_step(step)
    steps, sums = [], []
    for _ in range(8):  # what else runs on the machine comes and goes: the shortest of each is compared
        steps += [real_step(step) for _ in range(3)]
        times = measure_ops(found)
        assert not times.failed
        sums.append(sum(times.seconds.values()))
        if 0.6 < min(sums) / min(steps) < 1.6:
            return
    pytest.fail(f"ops {min(sums):.6f} s, step {min(steps):.6f} s")


def test_only_ops_that_cost_something_are_timed_and_equal_ones_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    real_make = measured.make_call

    def counted(node: torch.fx.Node) -> Callable[[], Any]:
        made.append(str(node.target))
        return real_make(node)

    monkeypatch.setattr(measured, "make_call", counted)
    found = traced(conv_step)
    calls: list[tuple[int, int]] = []
    times = measure_ops(found, runs=2, progress=lambda done, total: calls.append((done, total)))
    costly = {op.name for op in found.graph.ops() if op.kind == "compute" and op.estimate != "free"}
    assert set(times.seconds) == costly
    # Three equal convolutions: forward one call; backward two, because the first needs no gradient for its input.
    assert made.count("aten.convolution.default") == 1
    assert made.count("aten.convolution_backward.default") == 2
    assert made.count("aten.native_batch_norm.default") == 1
    assert len(made) == times.distinct < len(costly)
    assert calls == [(number + 1, 3 * times.distinct) for number in range(3 * times.distinct)]
    by_type: dict[str, set[float]] = {}
    for op in found.graph.ops():
        if op.name in times.seconds:
            by_type.setdefault(op.op_type, set()).add(times.seconds[op.name])
    assert len(by_type["aten.convolution"]) == 1
    assert len(by_type["aten.convolution_backward"]) == 2


def test_what_makes_two_calls_different() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            same, other, square, turned = x * y, y * x, x * x, x.t() * y.t()
            return same, other, square, turned, x.sum(0), x.sum(1), x.sum(1)

    found = trace_step(
        lambda: step_of(Net(), torch.zeros(4, 4), torch.zeros(4, 4)), mode="inference", numerics=Numerics(cuda=False)
    )
    signatures = [measured.signature(n) for n in found.nodes.values() if "mul" in str(n.target)]
    assert len(signatures) == 4
    assert len(set(signatures)) == 3  # x * y and y * x alike; one tensor twice and other strides are not
    assert len({measured.signature(n) for n in found.nodes.values() if "sum" in str(n.target)}) == 2


class Indexed(nn.Module):
    """Every way to index: tables, gathers, advanced indices, classes, pooled places."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 6)

    def forward(self, tokens: Tensor, image: Tensor) -> Tensor:
        rows = self.table(tokens)
        picked = rows[tokens[:, :2] % 3, tokens[:, 2:4] % 5]
        gathered = rows.gather(1, (tokens % 2)[:, :, None].expand(-1, -1, 6))
        chosen = rows.index_select(1, tokens[0] % 4)
        scattered = torch.zeros(8, 6).scatter_add(0, (tokens % 8)[:, :6], rows.mean(2)[:, :6])
        pooled = F.max_pool2d(image, 2)
        flat = torch.cat([picked.flatten(), gathered.flatten(), chosen.flatten(), scattered.flatten()])
        loss: Tensor = flat.sum() + F.cross_entropy(rows.mean(1), tokens[:, 0] % 6) + pooled.sum()
        return loss


def test_ops_that_take_indices_run() -> None:
    def build() -> TrainingStep:
        image = torch.randn(2, 3, 8, 8)
        return TrainingStep(
            name="indexed", module=Indexed(), inputs=(torch.randint(50, (8, 10)), image), loss=lambda out: out
        )

    found = traced(build)
    times = measure_ops(found, runs=1)
    assert dict(times.failed) == {}
    seen = {found.graph.op_type[found.graph.names.index(name)] for name in times.seconds}
    wanted = {
        *("embedding", "embedding_dense_backward", "index", "index_put", "gather", "scatter_add", "nll_loss_forward")
    }
    assert {f"aten.{name}" for name in wanted} <= {name.replace("_unsafe_", "") for name in seen}


def test_made_up_indices_reach_the_whole_table() -> None:
    found = traced(
        lambda: step_of(nn.Sequential(nn.Embedding(50, 4), nn.Flatten()), torch.zeros(64, 16, dtype=torch.long))
    )
    node = next(node for node in found.nodes.values() if node.target is torch.ops.aten.embedding.default)
    rows = measured.make_call(node)().reshape(-1, 4)
    assert len(rows.unique(dim=0)) == 50


def test_made_up_pooling_indices_are_those_of_the_forward_pass() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return F.max_pool2d(x * self.scale, 2)

    found = traced(lambda: step_of(Net(), torch.randn(1, 1, 8, 8)))
    node = next(node for name, node in found.nodes.items() if "with_indices_backward" in name)
    gradient = measured.make_call(node)()
    assert all(int((window != 0).sum()) == 1 for window in gradient.unfold(2, 2, 2).unfold(3, 2, 2).reshape(-1, 4))


@torch.library.custom_op("ddltool_tests::stubborn", mutates_args=())
def stubborn(x: Tensor) -> Tensor:
    """Refuse everything but the ones that ``Stubborn`` makes: no made-up argument will do."""
    if not bool((x == 1).all()):
        raise ValueError("this is\nnot what I was made for")
    return x * 2


@stubborn.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


stubborn.register_autograd(lambda ctx, grad: grad * 2)


class Stubborn(nn.Module):
    """An op that does not run by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        return hidden + stubborn(torch.ones_like(hidden))


def test_an_op_that_does_not_run_alone_is_scaled_and_listed() -> None:
    def build() -> TrainingStep:
        return step_of(Stubborn(), torch.randn(2, 4))

    times = measure_ops(traced(build), runs=1)
    (name,) = times.failed
    assert name.endswith("stubborn")
    assert times.failed[name] == "ValueError: this is not what I was made for"
    graph = estimate_measured(build, mode="training", runs=1)
    assert graph.timed
    op = graph.op(graph.names.index(name))
    assert op.estimate == "default"
    assert op.duration_s is not None
    assert op.duration_s > 0
    assert coverage(graph).default_types == [("aten.stubborn", 1)]


def test_the_memory_guard() -> None:
    wide = 1 << 16

    def build() -> TrainingStep:
        return step_of(nn.Sequential(nn.Linear(8, wide), nn.ReLU(), nn.Linear(wide, 8)), torch.randn(4, 8))

    found = traced(build)
    times = measure_ops(found, runs=1, memory_bytes=2 * 2**20)
    assert times.failed
    assert times.seconds
    for name in times.failed:
        assert measured.working_bytes(found.nodes[name]) > 2 * 2**20
        assert times.failed[name].endswith("more than the 2.0 MiB allowed"), times.failed[name]
    for name in times.seconds:
        assert measured.working_bytes(found.nodes[name]) <= 2 * 2**20
    assert not measure_ops(found, runs=1).failed
    graph = apply_times(found.graph, times, Network())
    assert {op.name for op in graph.ops() if op.estimate == "default"} == set(times.failed)


def test_one_thread_is_timed_by_what_it_computes() -> None:
    assert measured.time_call(lambda: time.sleep(0.2)) < 0.1
    torch.set_num_threads(2)
    assert measured.time_call(lambda: time.sleep(0.2)) >= 0.2


OPS = [
    Op(name="r", kind="recv", resource="channel:0", size_bytes=100.0, parameter="w"),
    Op(name="a", kind="compute", flops=1e5, size_bytes=1e4, inputs=("r",), op_type="mm", estimate="rule"),
    Op(name="b", kind="compute", flops=2e5, size_bytes=1e4, inputs=("a",), op_type="mm", estimate="rule"),
    Op(name="c", kind="compute", size_bytes=3e4, inputs=("a",), op_type="odd", estimate="default"),
    Op(name="v", kind="compute", size_bytes=9.0, inputs=("a",), op_type="view", estimate="free"),
    Op(name="s", kind="send", resource="channel:0", size_bytes=100.0, parameter="w", inputs=("b",)),
]


def test_times_by_hand() -> None:
    graph = Graph.from_ops("g", "training", OPS)
    network = Network(bandwidth_bytes_per_s=50.0, latency_s=0.5)
    timed = apply_times(graph, OpTimes(seconds={"a": 4e-6, "b": 9e-6, "c": 1e-6}, distinct=3), network)
    assert timed.duration_s.tolist() == [2.5, 4e-6, 9e-6, 1e-6, 0.0, 2.5]
    assert timed.estimate == ("rule", "measured", "measured", "measured", "free", "rule")
    assert timed.meta["oracle"] == "measured"


def test_an_op_without_a_time_is_scaled_by_its_own_type_or_by_all() -> None:
    graph = Graph.from_ops("g", "training", OPS)
    # At the nominal rates a takes 1 us of work, b 2, c 3, and a microsecond of launch each: 2, 3 and 4.
    by_type = apply_times(graph, OpTimes(seconds={"a": 4e-6, "c": 40e-6}, distinct=2, failed={"b": "?"}), Network())
    assert by_type.op(2).duration_s == pytest.approx(6e-6)
    by_all = apply_times(graph, OpTimes(seconds={"a": 4e-6, "b": 12e-6}, distinct=2, failed={"c": "?"}), Network())
    assert by_all.op(3).duration_s == pytest.approx(12e-6)
    assert by_all.estimate[3] == "default"
    with pytest.raises(InputError, match=r"^g: none of its 3 ops could be timed \(why\); use roofline$"):
        apply_times(graph, OpTimes(seconds={}, distinct=0, failed={"a": "why"}), Network())


def test_the_graph_says_how_it_was_measured() -> None:
    state = torch.get_rng_state()
    graph = estimate_measured(
        conv_step,
        mode="training",
        batch_size=2,
        network=Network(bandwidth_bytes_per_s=1e6, latency_s=0.25, parameter_servers=2),
        runs=1,
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert graph.batch_size == 2
    assert graph.meta["device"] == "cpu"
    assert graph.meta["threads"] == torch.get_num_threads()
    assert graph.meta["torch"] == torch.__version__
    assert {name for name in graph.resource_names if name.startswith("channel")} == {"channel:0", "channel:1"}
    transfer = graph.kind != COMPUTE
    assert graph.duration_s[transfer].tolist() == (0.25 + graph.size_bytes[transfer] / 1e6).tolist()
