"""What needs a GPU to be shown: the same bits, a plan followed under NCCL, times and memory as the device says them.

One GPU is enough: processes of an elastic job share it, and sum over gloo.
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from ddltool.analyzers.step.costs.saving import Saving
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.analyzers.step.costs.traced_lifetimes import lifetimes_of
from ddltool.analyzers.step.tracing.step import TrainingStep
from ddltool.analyzers.step.tracing.torch_adapter import trace_step
from ddltool.artifacts import save
from ddltool.commands.predict import predict
from tests.conftest import Cli
from tests.helpers.processes import torchrun
from tests.helpers.runtime_workers import enforcement
from tests.helpers.sharding_workers import Gpt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

ELASTIC = """
import itertools, json, sys, torch
from torch import nn
from ddltool.runtime.elastic.processes import start_processes
from ddltool.runtime.elastic.trainer import ElasticTrainer
from tests.helpers.elastic_workers import Digits, bits, build

path, kind, until = sys.argv[1], sys.argv[2], int(sys.argv[3])
start_processes()
module, optimizer, scheduler = build(kind, "adamw")
module = module.to("cuda")
optimizer = torch.optim.AdamW(module.parameters(), lr=2e-3)
trainer = ElasticTrainer(module, optimizer, nn.CrossEntropyLoss(), Digits(), max_workers=4, batch_size=8)
trainer.resume(path)
for epoch in itertools.count():
    for step in trainer.epoch(epoch):
        if step.number == until:
            trainer.save(path)
            if trainer.processes.rank == 0:
                print(json.dumps([bits(path), list(step.losses)]))
            trainer.close()
            sys.exit()
"""

HOOKED = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from ddltool import runtime

dist.init_process_group("nccl")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(4096, 2048), torch.randint(10, (4096,)))
model = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(8)), nn.Linear(2048, 10))
model = DistributedDataParallel(model.cuda())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
hook = runtime.attach("enforce.json", model=model, optimizer=optimizer, dataset=dataset)
loader = hook.dataloader(batch_size=512, shuffle=True, seed=0)
for inputs, answers in loader:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        loss = nn.functional.cross_entropy(model(inputs.cuda()), answers.cuda())
    hook.loss(loss).backward()
    optimizer.step()
torch.cuda.synchronize()
dist.destroy_process_group()
"""

ASKING = """
import ddltool as dt, torch
from torch import nn

def seconds(**given):
    return dt.predict(model, batch=(torch.zeros(8, 64),), device="H100", batch_sizes=[8], **given).rows[0].step_time_s

class Named(nn.Sequential):
    pass

model = Named(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
before = seconds(), seconds(precision="bf16")
model.cuda()(torch.zeros(8, 64, device="cuda"))
on_gpu = (torch.zeros(8, 64, device="cuda"), torch.zeros(8, dtype=torch.long, device="cuda"))
assert dt.predict(model, batch=on_gpu, device="H100", batch_sizes=[8, 16]).rows[0].step_time_s > 0
model(torch.randn(8, 64, device="cuda")).sum().backward()
assert all(each.grad.is_cuda for each in model.parameters())
assert torch.accelerator.current_accelerator().type == "cuda"
try:
    print(seconds())
except dt.DdlToolError as error:
    print(error)
"""

AWAY = """
import gc, json, sys, torch
from ddltool.plans import Offloaded, Recomputed
from ddltool.runtime.hook.offloading import offload_modules
from ddltool.runtime.hook.sharding import checkpoint_modules
from tests.helpers.sharding_workers import Gpt

torch.use_deterministic_algorithms(True)
layers, width, length, words, samples = json.loads(sys.argv[1])
found = {}
WAYS = {"kept": ([], 0), "away": ([], 1), "away 3": ([], 3), "again": ([0, 1, 3], 0), "both": ([0, 1, 3], 1)}
for name, (again, window) in WAYS.items():
    torch.manual_seed(0)
    model = Gpt(layers=layers, width=width, length=length, words=words).cuda()
    checkpoint_modules(model, [Recomputed(module=f"layers.{k}") for k in again])
    ways = [(f"layers.{k}", f"layers.{k + window}") for k in range(layers - window)] if window else []
    offload_modules(model, [Offloaded(module=each, until=until) for each, until in ways])
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), torch.Generator().manual_seed(1)
    losses = []
    for step in range(6):
        tokens = torch.randint(words, (samples, length + 1), generator=generator).cuda()
        torch.cuda.reset_peak_memory_stats()
        optimizer.zero_grad()
        loss = model.loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        del loss
    bits = [float(each.detach().double().sum()) for each in model.parameters()] + [float(each) for each in losses]
    found[name] = bits, torch.cuda.max_memory_allocated()
    del model, optimizer
    gc.collect()  # modules hold themselves by their replaced forward
    torch.cuda.empty_cache()
print(json.dumps(found))
"""


@pytest.mark.parametrize("kind", ["cnn", "transformer"])
def test_any_number_of_processes_gives_the_same_bits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1, 2, 3 and 4 processes, and one run that goes from 4 over 1 to 2: dropout draws from the device's generator."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    script = tmp_path / "train.py"
    script.write_text(ELASTIC)

    def trained(size: int, path: Path, until: int) -> object:
        done = torchrun(size, script, path, kind, until, folder=tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    alone = trained(1, tmp_path / "1.pt", 6)
    assert [trained(size, tmp_path / f"{size}.pt", 6) for size in (2, 3, 4)] == [alone] * 3
    for size, until in ((4, 2), (1, 4), (2, 6)):
        resized = trained(size, tmp_path / "resized.pt", until)
    assert resized == alone


def test_a_plan_is_followed_and_timed_under_nccl(tmp_path: Path) -> None:
    """A step's parts add up to it. Memory by hand, in bytes of a parameter: 16 for it, its gradient and Adam's states, 4 for
    DDP's buckets and 4 for those of the first step, which go when Python collects them, 2 for autocast's copy."""
    rows = tmp_path / "telemetry.jsonl"
    save(enforcement([256], telemetry=str(rows)), tmp_path / "enforce.json")
    script = tmp_path / "train.py"
    script.write_text(HOOKED)
    done = torchrun(1, script, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [row for row in map(json.loads, rows.read_text().splitlines()) if "step" in row]
    assert [row["batch"] for row in found] == [256] * 16
    assert all(0 < row["compute_s"] + row["wait_s"] + row["sync_s"] <= 1.001 * row["step_s"] for row in found)
    parameters = 8 * 2048 * 2049 + 2049 * 10
    assert found[-1]["memory_bytes"] == pytest.approx(26 * parameters, rel=0.03)


def test_a_script_asks_about_its_model_and_then_trains_it(tmp_path: Path) -> None:
    """Recording here would break all training on CUDA that follows; after a backward pass no fork can do it either."""
    script = tmp_path / "train.py"
    script.write_text(ASKING)
    done = torchrun(1, script, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "this process has run backward passes beside its GPU" in done.stdout


def test_activations_leave_for_the_host_and_the_training_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit over six steps, with a device's streams; the peaks of memory are those of the plan."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    sizes = layers, width, length, words, samples = 8, 1024, 512, 8192, 8
    script = tmp_path / "train.py"
    script.write_text(AWAY)
    done = torchrun(1, script, json.dumps(sizes), folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: bits for name, (bits, _) in found.items()} == dict.fromkeys(found, found["kept"][0])
    model = Gpt(layers=layers, width=width, length=length, words=words)
    tokens = torch.zeros(samples, length, dtype=torch.long)
    step = TrainingStep(
        name="gpt", module=model, inputs=(tokens,), loss=lambda output: model.loss(output, tokens.to(output.device))
    )
    lifetimes = lifetimes_of(trace_step(lambda: step, mode="training"))
    for name, again, window in (("kept", (), 0), ("away", (), 1), ("away 3", (), 3), ("both", (0, 1, 3), 1)):
        saving = Saving(
            saved_ops={f"layers.{k}": () for k in again},
            on_host=frozenset(lifetimes.names[:-window] if window else ()),
            window=max(1, window),
        )
        expected = lifetimes.peak(Sharding.named("none", 1), "adamw", saving).total_bytes
        assert found[name][1] == pytest.approx(expected, rel=0.05), name


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "bf16-pure"])
def test_a_profile_measures_the_device_and_memory_is_as_predicted(precision: str, tmp_path: Path, cli: Cli) -> None:
    path, name = tmp_path / "profile.csv", torch.cuda.get_device_name()
    given = ["--device", "cuda", "--precision", precision, "--optimizer", "adamw", "--batch-sizes", "256,512"]
    assert cli("profile", "timm:resnet18", *given, "--time-limit", "20s", "-o", str(path)).code == 0
    measured = pd.read_csv(path)
    assert list(measured["local_batch_size"]) == [256, 512]
    predicted = predict("timm:resnet18", name, batch_sizes=[256, 512], precision=precision, optimizer="adamw").rows
    for (_, row), expected in zip(measured.iterrows(), predicted, strict=True):
        ratio = expected.step_time_s / row["step_time_s"]
        assert 0.6 < ratio < 1.6, f"{precision}, {row['local_batch_size']}: {ratio:.2f} of the measured"
        assert expected.peak_memory_bytes == pytest.approx(row["peak_memory_bytes"], rel=0.1)
