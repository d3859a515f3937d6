"""Muon and Adafactor against torch's own, run for real on the CPU under torch's counters, and recorded as a script."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

import ddltool as dt
from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.costs.model import cost_model, estimate, memory_words
from ddltool.analyzers.step.costs.optimizers import update_of
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.analyzers.step.costs.work import gathered_matrices_s, measure_work, own_update_s
from ddltool.analyzers.step.tracing.step import TrainingStep
from ddltool.device import Network
from ddltool.errors import InputError
from ddltool.links import Link
from ddltool.runtime.measuring.training import backward_and_update
from ddltool.shipped import calibration, devices
from tests.conftest import Cli
from tests.helpers.training_scripts import GPT, SCRIPTS

ALONE = Sharding(kind="none")
MODEL = cost_model(devices().device("A100"), calibration())
LINK = Link(kind="plain", bytes_per_s=200e9, latency_s=5e-6)
FABRIC = Fabric(inside=LINK, between=LINK, gpus_per_node=8)


def decoder(width: int = 256) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The decoder of the scripts, and a text of tokens and targets."""
    names: dict[str, Any] = {}
    exec(GPT, names)
    tokens = torch.arange(16)[None]
    return names["Decoder"](width=width), (tokens, tokens + 1)


def narrow() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """What the CPU updates with Muon in a moment."""
    return decoder(width=128)


def images() -> tuple[nn.Module, tuple[Tensor, ...]]:
    layers = [nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(256, 500)), (torch.zeros(2, 3, 12, 12),)


def step(build: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]) -> TrainingStep:
    module, inputs = build()
    return TrainingStep(name="step", module=module, inputs=inputs, loss=lambda output: output.sum())


def optimizers(name: str, module: nn.Module) -> list[torch.optim.Optimizer]:
    """Return torch's own: of Muon, with AdamW for what is no matrix of the model's blocks."""
    if name == "adafactor":
        return [torch.optim.Adafactor(module.parameters())]
    blocks = module.get_submodule("blocks") if hasattr(module, "blocks") else module
    hidden = [parameter for parameter in blocks.parameters() if parameter.dim() == 2]
    known = {id(parameter) for parameter in hidden}
    rest = [parameter for parameter in module.parameters() if id(parameter) not in known]
    return [torch.optim.Muon(hidden), torch.optim.AdamW(rest, fused=True)]


CASES = [("muon", narrow), ("muon", images), ("adafactor", decoder), ("adafactor", images)]


@pytest.mark.parametrize(("name", "build"), CASES)
def test_states_flops_and_peak_are_those_of_torch_s_own_update(
    name: str, build: Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]
) -> None:
    module, inputs = build()
    updates, memory = optimizers(name, module), MemTracker()
    memory.track_external(module, *updates, *inputs)
    for turn in range(2):
        with memory:
            module(*inputs).sum().backward()
            with FlopCounterMode(display=False) as flops:
                for update in updates:
                    update.step()
            for update in updates:
                update.zero_grad()
            if turn == 0:
                memory.reset_mod_stats()
    tracked = sum(each["Total"] for each in memory.get_tracker_snapshot("peak").values())
    on_host = name == "adafactor"  # which counts its steps there
    kept = [state for update in updates for states in update.state.values() for key, state in states.items()
            if not (on_host and key == "step")]  # fmt: skip
    curve = measure_work(lambda: step(build))
    predicted = curve.peak(inputs[0].shape[0], ALONE, name)
    assert predicted is not None
    assert predicted.parts["optimizer"] == sum(state.nbytes for state in kept)
    assert predicted.parts["updating"] > 0  # the peak is the update's
    assert predicted.total_bytes == pytest.approx(tracked, rel=0.03)
    products = update_of(curve.traced.graph, name).kernels.flops.sum()
    assert products == flops.get_total_flops() > 1e5


def test_muon_is_as_fast_as_the_script_that_calls_it(tmp_path: Path) -> None:
    """The script has AdamW for embeddings, norms and biases; without its update the step takes half as long."""
    size = "Decoder(width=1024, layers=2)"
    script, model = tmp_path / "train.py", tmp_path / "model.py"
    script.write_text(SCRIPTS["Muon and AdamW"].replace("foreach=True", "fused=True").replace("Decoder()", size))
    model.write_text(f"{GPT}\ndef build():\n    return {size}, make_batch()\n")
    [run] = dt.predict(["python", str(script)], "A100").rows
    times = {}
    for name in ("none", "muon"):
        [row] = dt.predict(f"{model}:build", "A100", batch_sizes=[4], optimizer=name).rows
        times[name] = row.step_time_s
    assert times["muon"] - times["none"] == pytest.approx(run.step_time_s - times["none"], rel=0.05)
    assert run.step_time_s > 2 * times["none"]
    assert row.peak_memory_bytes == pytest.approx(run.peak_memory_bytes, rel=0.001)


def test_sharded_processes_update_whole_matrices_each() -> None:
    """Eight matrices in the decoder's two blocks: of 3 processes one updates three, of 16 each at most one."""
    graph = estimate(measure_work(lambda: step(decoder)).traced.graph, MODEL, Network(), optimizer="muon")
    whole_s = float(graph.meta["update_s"] or 0.0)
    shares = {shard: own_update_s(graph, Sharding(kind="fsdp", shard=shard)) / whole_s for shard in (1, 2, 3, 8, 16)}
    assert shares == pytest.approx({1: 1, 2: 1 / 2, 3: 3 / 8, 8: 1 / 8, 16: 1 / 8})
    matrices = 2 * (3 + 1 + 4 + 4) * 256 * 256
    group = FABRIC.sharded(4, 4)
    moved_s = gathered_matrices_s(graph, group, Sharding(kind="fsdp", shard=4))
    assert moved_s == pytest.approx(2 * group.reduce_scatter_s(2 * matrices / 4))  # there and back, in bfloat16
    adamw = estimate(graph, MODEL, Network(), optimizer="adamw")
    assert gathered_matrices_s(adamw, group, Sharding(kind="fsdp", shard=4)) == 0


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_shards_divide_the_states_and_muon_holds_a_whole_matrix(name: str) -> None:
    curve = measure_work(lambda: step(decoder))
    alone, sharded = (curve.peak(1, Sharding(kind=kind, shard=n), name) for kind, n in (("none", 1), ("fsdp", 4)))  # type: ignore[arg-type]
    assert alone is not None
    assert sharded is not None
    assert sharded.parts["optimizer"] == pytest.approx(alone.parts["optimizer"] / 4)
    held = curve.held(1, Sharding(kind="fsdp", shard=4), name)
    assert held is not None
    whole = alone.parts["updating"]
    assert held.curves()["updating"][-1] == pytest.approx(whole if name == "muon" else whole / 4)


def test_what_muon_and_adafactor_cannot_do_is_one_line() -> None:
    graph = measure_work(lambda: step(decoder)).traced.graph
    without = replace(graph, gemm=np.zeros_like(graph.gemm))
    for name in ("muon", "adafactor"):
        with pytest.raises(InputError, match="step does not say the shapes of its parameters; trace it again"):
            update_of(without, name)
    filters = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    of_images = measure_work(lambda: step(lambda: (filters, (torch.zeros(1, 3, 8, 8),)))).traced.graph
    with pytest.raises(InputError, match="muon finds no matrix in the blocks of step; give adamw"):
        update_of(of_images, "muon")
    assert len(update_of(of_images, "adafactor").waits) == 8  # two of each parameter


def test_the_answer_says_what_is_assumed_of_shards(cli: Cli) -> None:
    texts = {
        sharding: " ".join(cli("predict", "zoo:bert_small", *options, "--sharding", sharding).out.split())
        for options in [("--device", "A100", "--batch-sizes", "8", "--replicas", "4", "--optimizer", "muon")]
        for sharding in ("ddp", "fsdp")
    }
    assert "Muon: each process updates some of the matrices whole" in texts["fsdp"]
    assert "each process updates" not in texts["ddp"]


def test_words_say_what_a_parameter_takes() -> None:
    matrices = "6 bytes a parameter of the blocks' matrices with muon, 8 of the rest with adamw"
    assert memory_words("bf16-pure", "muon") == f"bf16-pure: everything in bfloat16, {matrices}"
    assert memory_words("fp32", "adafactor").startswith(
        "fp32: 8 bytes a parameter with adafactor, and a number for each"
    )
    assert memory_words("fp32", "lion") == "fp32: 12 bytes a parameter with lion"


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_profile_trains_with_the_optimizer_that_is_predicted(name: str) -> None:
    module, inputs = narrow()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    backward, update = backward_and_update(module, name, "fp32", torch.device("cpu"))
    backward(module(*inputs))
    with FlopCounterMode(display=False) as flops:
        update()
    assert all(not torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
    graph = measure_work(lambda: step(narrow)).traced.graph
    assert flops.get_total_flops() == update_of(graph, name).kernels.flops.sum()
