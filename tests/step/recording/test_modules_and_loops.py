"""A module's step, the same step as a loop in this process, and as a script: one recording, one time, one memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import ddltool as dt
from ddltool.analyzers.step.costs.optimizers import OPTIMIZERS, update_of
from ddltool.analyzers.step.costs.work import work_of
from ddltool.analyzers.step.recording.window import RecordedBlock, record
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.commands.options import OPTIMIZER
from ddltool.errors import InputError
from ddltool.graph_results import PredictedRow
from ddltool.job import OptimizerName

DEVICE = "A100"
LOOP = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 10)), torch.zeros(32, 256)

if __name__ == "__main__":
    model, batch = build()
    model, batch = model.cuda(), batch.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(batch), torch.zeros(32, dtype=torch.long, device="cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def images() -> tuple[nn.Module, Tensor]:
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.1)]
    layers += [nn.Conv2d(32, 64, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*layers), torch.zeros(16, 3, 32, 32)


def rows() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(512, 1024), nn.SiLU(), nn.Linear(1024, 10)), torch.zeros(64, 512)


def same(one: PredictedRow, other: PredictedRow) -> None:
    assert one.step_time_s == pytest.approx(other.step_time_s, rel=1e-12)
    assert one.predicted_high_s == pytest.approx(other.predicted_high_s, rel=1e-12)
    assert (one.peak_memory_bytes, one.reserved_bytes) == (other.peak_memory_bytes, other.reserved_bytes)


UPDATES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, fused=True),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda weights: torch.optim.Adam(weights, fused=True),
    "adamw": lambda weights: torch.optim.AdamW(weights, fused=True),
    "foreach-sgd": lambda weights: torch.optim.SGD(weights, lr=0.1),
    "foreach-momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "foreach-adam": torch.optim.Adam,
    "foreach-adamw": torch.optim.AdamW,
}


def looped(build: Callable[[], tuple[nn.Module, Tensor]], optimizer: str, half: bool, passes: int = 1) -> RecordedBlock:
    with dt.record("loop") as recorded:
        model, batch = build()
        model, batch = model.cuda(), batch.cuda()
        update = UPDATES[optimizer](model.parameters())
        for _ in range(2):
            for _ in range(passes):
                with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
                    loss = cross_entropy(model(batch), torch.zeros(len(batch), dtype=torch.long, device="cuda"))
                loss.backward()
            update.step()
            update.zero_grad()
    return recorded


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("optimizer", UPDATES)
@pytest.mark.parametrize("build", [images, rows])
def test_a_module_is_the_same_step_as_its_loop(
    build: Callable[[], tuple[nn.Module, Tensor]], optimizer: str, half: bool
) -> None:
    graph = looped(build, optimizer, half).graph
    [loop] = dt.predict(graph, DEVICE).rows
    precision = "bf16" if half else "fp32"
    [module] = dt.predict(build, DEVICE, batch_sizes=[len(build()[1])], optimizer=optimizer, precision=precision).rows
    same(module, loop)


def heavy() -> tuple[nn.Module, Tensor]:
    """Weights that take longer to sum than their few samples to compute."""
    return nn.Sequential(nn.Linear(8192, 8192), nn.SiLU(), nn.Linear(8192, 8192)), torch.zeros(256, 8192)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("passes", [2, 5])
def test_gradients_of_several_passes_are_summed_as_in_a_loop(passes: int, half: bool) -> None:
    [loop] = dt.predict(looped(heavy, "adamw", half, passes).graph, DEVICE).rows
    settings: dict[str, Any] = {"optimizer": "adamw", "precision": "bf16" if half else "fp32"}
    with torch.device("meta"):
        sizes = [len(heavy()[1])]
    [module] = dt.predict(heavy, DEVICE, batch_sizes=sizes, accumulation=passes, **settings).rows
    [once] = dt.predict(heavy, DEVICE, batch_sizes=sizes, **settings).rows
    assert module.step_time_s == pytest.approx(loop.step_time_s, rel=0.01)
    assert module.peak_memory_bytes == pytest.approx(loop.peak_memory_bytes, rel=0.01)
    assert module.peak_memory_bytes > 1.05 * once.peak_memory_bytes


@pytest.mark.parametrize("optimizer", UPDATES)
def test_an_optimizer_has_the_kernels_that_torch_runs(optimizer: str) -> None:
    graph = looped(rows, optimizer, half=False).graph
    recorded = [size for name, size in zip(graph.names, graph.size_bytes, strict=True) if name.startswith("update/")]
    assert update_of(graph, optimizer).kernels.moved_bytes.tolist() == recorded
    assert (
        set(UPDATES) | {"none", "adamw-8bit", "lion", "muon", "adafactor"}
        == set(OPTIMIZERS)
        == set(get_args(OptimizerName))
        == set(OPTIMIZER["choices"])
    )


def test_a_module_is_the_same_step_as_its_script(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    [module] = dt.predict(f"{script}:build", DEVICE, batch_sizes=[32], optimizer="foreach-adamw", precision="bf16").rows
    [run] = dt.predict(["python", str(script)], DEVICE).rows
    same(module, run)


def test_a_loop_leaves_torch_as_it_was_and_runs_after_a_real_backward_pass() -> None:
    weight = nn.Parameter(torch.ones(3))
    (2.0 * weight).sum().backward()  # from now on torch has no thread for another device
    names = [("cuda", "is_available"), ("cuda", "Stream"), ("amp", "autocast"), ("utils", "swap_tensors")]
    owners = [(getattr(torch, owner), name) for owner, name in names] + [(torch, "compile"), (nn.Module, "to")]
    before = [getattr(owner, name) for owner, name in owners]
    looped(rows, "adamw", half=True)
    assert [getattr(owner, name) for owner, name in owners] == before
    assert not torch.zeros(2).is_cuda
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]


def test_autocast_casts_a_softmax_unless_the_call_names_a_type() -> None:
    types = []
    with record():
        model = nn.Linear(4, 2).cuda()
        update = torch.optim.SGD(model.parameters())
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                scores = model(torch.zeros(2, 4, device="cuda"))
                results = [torch.softmax(scores, -1), torch.softmax(scores, -1, torch.bfloat16)]
                results += [scores.sum(), scores.sum(dtype=torch.bfloat16)]
            types = [result.dtype for result in results]
            scores.sum().backward()
            update.step()
    assert types == [torch.float32, torch.bfloat16] * 2


def test_threads_record_one_after_another() -> None:
    with ThreadPoolExecutor(3) as pool:
        graphs = [block.graph for block in pool.map(lambda _: looped(rows, "adamw", half=False), range(6))]
    assert all(graph == graphs[0] for graph in graphs)
    assert not torch.cuda.is_available()
    assert torch.accelerator.current_accelerator(check_available=True) is None
    loader = torch.utils.data.DataLoader(torch.zeros(8, 2), 4, pin_memory=True)  # type: ignore[arg-type, var-annotated]
    assert len(list(loader)) == 2


@pytest.mark.parametrize("sharding", ["banana", "fsdp:0", "tp:2", "ddp:4"])
def test_a_sharding_is_checked_on_one_replica_too(sharding: str) -> None:
    with pytest.raises(InputError, match=f"--sharding: .*{sharding}"):
        dt.predict(rows, DEVICE, batch_sizes=[4], sharding=sharding)


def train_on_the_cpu() -> None:
    with record("here"):
        model = nn.Linear(4, 2)
        update = torch.optim.SGD(model.parameters())
        for _ in range(2):
            model(torch.zeros(2, 4)).sum().backward()
            update.step()


def test_loops_without_a_step_are_refused() -> None:
    with pytest.raises(InputError, match="step: has 0 of the 2 updates that are needed; let it train"), record():
        pass
    with pytest.raises(InputError, match="record: no step has been recorded yet; ask after"), record() as block:
        _ = block.graph
    with pytest.raises(InputError, match="here: runs nothing on cuda"):
        train_on_the_cpu()


class _Product(torch.autograd.Function):
    """``x w'``, with what its backward pass needs saved by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return gradient @ w, gradient.t() @ x


class _Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.v, self.w = nn.Parameter(torch.zeros(64, 64)), nn.Parameter(torch.zeros(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return cast(Tensor, _Product.apply(_Product.apply(x, self.v).relu(), self.w))

        return cast(Tensor, checkpoint(block, x, use_reentrant=False))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_function_of_the_users_own_is_computed_again_where_it_is_checkpointed(precision: str) -> None:
    numerics = Numerics(precision)  # type: ignore[arg-type]
    graph = work_of(lambda: (_Recomputed(), torch.zeros(4, 64)), numerics, None).traced.at(4)
    products = graph.flops[graph.gemm[:, 1] > 0].sum()
    # Forward, again, and backward: of the first product the input's gradient is made too, by the function itself.
    assert products == (2 + 2 + 4) * 2 * 4 * 64 * 64
