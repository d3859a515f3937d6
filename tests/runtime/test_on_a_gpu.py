"""What needs a GPU to be shown: the same bits, a plan followed under NCCL, times and memory as the device says them.

One GPU is enough: processes of an elastic job share it, and sum over gloo.
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from ddltool.artifacts import save
from ddltool.commands.predict import predict
from tests.conftest import Cli
from tests.helpers.processes import torchrun
from tests.helpers.runtime_workers import enforcement

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
    """A step's parts add up to it; the largest memory is that of parameters, gradients and Adam's states, and more."""
    rows = tmp_path / "telemetry.jsonl"
    save(enforcement([256], telemetry=str(rows)), tmp_path / "enforce.json")
    script = tmp_path / "train.py"
    script.write_text(HOOKED)
    done = torchrun(1, script, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [row for row in map(json.loads, rows.read_text().splitlines()) if "step" in row]
    assert [row["batch"] for row in found] == [256] * 16
    assert all(0 < row["compute_s"] + row["wait_s"] + row["sync_s"] <= 1.001 * row["step_s"] for row in found)
    states = 16 * (8 * 2048 * 2049 + 2049 * 10)
    assert states < found[-1]["memory_bytes"] < 1.5 * states


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "bf16-pure"])
def test_a_profile_measures_the_device_and_memory_is_as_predicted(precision: str, tmp_path: Path, cli: Cli) -> None:
    path, name = tmp_path / "profile.csv", torch.cuda.get_device_name()
    given = ["--device", "cuda", "--precision", precision, "--optimizer", "adamw", "--batch-sizes", "64,256"]
    assert cli("profile", "timm:resnet18", *given, "--time-limit", "20s", "-o", str(path)).code == 0
    measured = pd.read_csv(path)
    assert list(measured["local_batch_size"]) == [64, 256]
    predicted = predict("timm:resnet18", name, batch_sizes=[64, 256], precision=precision, optimizer="adamw").rows
    for (_, row), expected in zip(measured.iterrows(), predicted, strict=True):
        ratio = expected.step_time_s / row["step_time_s"]
        assert 0.6 < ratio < 1.6, f"{precision}, {row['local_batch_size']}: {ratio:.2f} of the measured"
        assert expected.peak_memory_bytes == pytest.approx(row["peak_memory_bytes"], rel=0.1)
