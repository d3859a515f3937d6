"""A training script's step, recorded in a process of its own, against the same step run for real on the CPU."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddltool.analyzers.step.communication.fabrics import fabric_of
from ddltool.analyzers.step.costs.model import cost_model
from ddltool.analyzers.step.costs.recorded import collective_s, predict_recorded, simulate_streams
from ddltool.analyzers.step.recording.command import assumed, is_command, record, words_of
from ddltool.analyzers.step.recording.launchers import launched
from ddltool.commands.main import run
from ddltool.errors import InputError
from ddltool.graph import COMPUTE, SEND, Graph, Op, Recorded, from_document, to_document
from ddltool.shipped import calibration, known_devices

SCRIPT = """
import sys, pathlib, torch
from torch import nn
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
if "tf32" in sys.argv:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 8)).to(device)
if "ddp" in sys.argv:
    torch.distributed.init_process_group("nccl")
    net = nn.parallel.DistributedDataParallel(net, device_ids=[0])
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=True)
pathlib.Path("log.txt").write_text("started")
assert pathlib.Path("log.txt").read_text() == "started"
for step in range(10):
    for _ in range(2):
        x, y = torch.randn(16, 32).to(device), torch.randint(8, (16,)).to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled="bf16" in sys.argv):
            loss = nn.functional.cross_entropy(net(x), y)
        loss.backward()
    if loss.item() < -1.0:
        print("impossible")
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("script")
    (place / "train.py").write_text(SCRIPT)
    return place


@cache
def recorded(folder: Path, *words: str) -> Graph:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return record(list(words), gpus_per_node=8)


def test_tf32_may_be_asked_for_by_torch_s_newer_setting(folder: Path) -> None:
    """Which makes torch refuse to say what its older settings hold: transformers uses the newer ones to compile."""
    assert recorded(folder, "python", "train.py", "tf32").meta["precision"] == "tf32"
    assert recorded(folder, "python", "train.py").meta["precision"] == "fp32"


def facts(graph: Graph) -> Recorded:
    assert graph.recorded is not None
    return graph.recorded


class Ops(TorchDispatchMode):
    """The names of the ops of a real run, from the end of its first update to the end of the second."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[f"aten.{func._schema.name.partition('::')[2]}"] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def real_ops(folder: Path) -> Counter[str]:
    """What the script's step does on this machine's CPU."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=True)
    ops = Ops()
    for step in range(2):
        if step == 1:
            ops.names.clear()
        for _ in range(2):
            x, y = torch.randn(16, 32), torch.randint(8, (16,))
            with ops:
                torch.nn.functional.cross_entropy(net(x), y).backward()
        with ops:
            optimizer.step()
        optimizer.zero_grad()
    return ops.names


def test_the_ops_are_those_of_a_real_step(folder: Path, real_ops: Counter[str]) -> None:
    graph = recorded(folder, "python", "train.py")
    ops = Counter(name for name, kind in zip(graph.op_type, graph.kind, strict=True) if kind == COMPUTE)
    quiet = {
        *("aten._record_function_enter_new", "aten._record_function_exit", "aten.detach", "aten._to_copy"),
        *("aten.randn", "aten.randint", "aten._local_scalar_dense", "aten.ones_like"),
    }
    assert {k: v for k, v in ops.items() if k not in quiet} == {k: v for k, v in real_ops.items() if k not in quiet}
    assert ops["aten._to_copy"] == 4  # two inputs and two targets go to the GPU
    assert facts(graph).passes == 2
    assert graph.batch_size == 16


def test_parameters_and_gradients_are_the_model_s(folder: Path) -> None:
    graph = recorded(folder, "python", "train.py")
    names = {"0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"}
    assert {graph.parameter[op] for op in graph.of_kind(SEND)} == names
    elements = 32 * 64 + 64 + 64 + 64 + 64 * 8 + 8
    assert graph.parameter_bytes == graph.trained_bytes == 4 * elements
    held: Counter[str] = Counter()
    for part, size, made in zip(facts(graph).parts, facts(graph).storage_bytes, facts(graph).made, strict=True):
        held[part] += int(size) if made < 0 else 0
    assert held["parameters"] == held["optimizer"] == 4 * elements  # the momentum of every parameter


def test_autocast_is_cuda_s(folder: Path) -> None:
    graph = recorded(folder, "python", "train.py", "bf16")
    assert graph.meta["precision"] == "bf16"
    types = {(op.op_type, op.dtype) for op in graph.ops() if op.kind == "compute"}
    assert ("aten.addmm", "bfloat16") in types
    assert ("aten.native_layer_norm", "float32") in types
    forward_casts = [op for op in graph.ops() if op.op_type == "aten._to_copy" and op.name.startswith("forward")]
    # The first weight is cast once in each of two passes: read in float32, written in bfloat16.
    assert [op.written_bytes for op in forward_casts if op.size_bytes == (4 + 2) * 32 * 64] == [2.0 * 32 * 64] * 2


def test_ddp_reduces_every_gradient_once_in_a_step(folder: Path) -> None:
    graph = recorded(folder, "torchrun", "--nproc-per-node", "4", "--nnodes", "2", "train.py", "ddp")
    reduced = [op for op in graph.ops() if op.op_type == "c10d.all_reduce"]
    assert sum(op.size_bytes for op in reduced) == 2 * graph.trained_bytes  # both passes synchronize: no no_sync here
    assert set(facts(graph).groups.values()) == {tuple(range(8))}
    assert facts(graph).world_size == 8
    assert len({op.resource for op in reduced}) == 1
    assert reduced[0].resource != next(op.resource for op in graph.ops() if op.op_type == "aten.addmm")


def test_a_value_that_only_a_run_knows_is_named(folder: Path) -> None:
    graph = recorded(folder, "python", "train.py")
    [(place, count)] = facts(graph).assumed.items()
    line = next(number for number, text in enumerate(SCRIPT.splitlines(), 1) if "loss.item()" in text)
    assert place.endswith(f"train.py:{line}")
    assert f"Assumed: {count} value" in str(assumed(graph))


ACCUMULATES = """
import sys
import torch
from accelerate import Accelerator
accelerator = Accelerator(gradient_accumulation_steps=4)
net = torch.nn.Linear(64, 64)
loader = torch.utils.data.DataLoader(torch.randn(int(sys.argv[1]), 64), batch_size=4)
net, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters()), loader)
for _ in range(3):
    for batch in loader:
        with accelerator.accumulate(net):
            accelerator.backward(net(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.parametrize(("samples", "passes", "said"), [(8, 2, "The step has 2 of the 4 passes"), (16, 4, "")])
def test_a_data_set_that_ends_before_the_passes_of_a_step_is_told(
    samples: int, passes: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(ACCUMULATES)
    monkeypatch.chdir(tmp_path)
    graph = record(["python", "train.py", str(samples)])
    assert facts(graph).passes == passes
    assert assumed(graph).partition(" that accumulate")[0] == said


def test_what_the_script_writes_does_not_stay(folder: Path) -> None:
    recorded(folder, "python", "train.py")
    assert not (folder / "log.txt").exists()


def test_what_the_script_writes_stays_if_asked(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    record(["python", "train.py"], keep_files=True)
    assert (tmp_path / "log.txt").read_text() == "started"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('no data')", "ValueError: no data after 0 of the 2 updates"),
        ("print('nothing to train')", "the script ended after 0 of the 2 updates"),
        ("import sys; sys.exit('give --data')", "the script ended with 'give --data'"),
    ],
)
def test_a_script_without_two_updates_is_one_line(
    body: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(body)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="train.py") as raised:
        record(["python", "train.py"])
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_script_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("import time; time.sleep(600)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="has not ended its second update in 3 s"):
        record(["python", "train.py"], limit_s=3)


@pytest.mark.parametrize(
    ("command", "processes", "script"),
    [
        ("python train.py --lr 1", None, ("train.py", "--lr", "1")),
        ("FLAG=1 python3.11 -u train.py", None, ("train.py",)),
        ("python -m package.train -x", None, ("package.train", "-x")),
        ("torchrun --nproc-per-node 4 train.py", 4, ("train.py",)),
        ("torchrun --nproc_per_node=gpu --nnodes=1:4 train.py -m", 32, ("train.py", "-m")),
        ("python -m torch.distributed.run --nproc-per-node 2 -m package.train", 2, ("package.train",)),
    ],
)
def test_launchers(
    command: str, processes: int | None, script: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    found = launched(shlex.split(command), 8)
    assert (found.processes, found.script) == (processes, script)
    assert found.variables().get("WORLD_SIZE") == (str(processes) if processes else None)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("", "no command follows"),
        ("A=1", "no command follows"),
        ("mpirun train.py", "mpirun is no launcher"),
        ("python", "python without a script"),
        ("python -c pass", "no script to record"),
        ("python absent.py", "no script 'absent.py'"),
        ("torchrun --nproc-per-node many train.py", "'many'"),
        ("torchrun --no-such-option train.py", "required|unrecognized|train.py"),
    ],
)
def test_a_command_that_cannot_be_read(
    command: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=problem):
        launched(shlex.split(command), 8)


def test_what_is_a_command() -> None:
    assert is_command("-- python train.py")
    assert is_command(["python", "train.py"])
    assert not is_command("train.py:model")
    assert not is_command(torch.nn.Linear(1, 1))
    assert words_of("-- python 'my train.py'") == ["python", "my train.py"]
    with pytest.raises(InputError, match="quot"):
        words_of("-- python 'train.py")


def streamed() -> Graph:
    """Two kernels on one stream, a collective between them that only the second waits for, and one on a stream apart."""
    kernel = {"kind": "compute", "size_bytes": 4e9, "op_type": "aten.add", "dtype": "float32", "estimate": "rule"}
    ops = [
        Op(name="a", resource="compute:0", **kernel),  # type: ignore[arg-type]
        Op(
            name="r",
            kind="compute",
            resource="compute:1000",
            inputs=("a",),
            op_type="c10d.all_reduce",
            size_bytes=1e9,
            estimate="free",
        ),
        Op(name="b", resource="compute:0", inputs=("a",), **kernel),  # type: ignore[arg-type]
        Op(name="c", resource="compute:0", inputs=("b", "r"), **kernel),  # type: ignore[arg-type]
    ]
    told = Recorded(
        world_size=8, passes=1, compiled=False, made=(-1, 0, 1), freed=(None, 2, None), storage_bytes=(100.0, 50.0, 25.0),
        parts=("parameters", "activations", "temporary"), groups={"r": tuple(range(8))},
    )  # fmt: skip
    return Graph.from_ops("streams", "training", ops, batch_size=4, meta={"precision": "fp32"}, recorded=told)


def test_streams_run_side_by_side_and_wait_where_they_must() -> None:
    device = known_devices(None).gpu("A100")
    model, fabric, graph = cost_model(device, calibration()), fabric_of(device, gpus_per_node=8), streamed()
    step = simulate_streams(graph, model, fabric)
    alone_s = step.end_s[0] - step.start_s[0]
    reduce_s = collective_s("all_reduce", 1e9, range(8), fabric)
    assert step.start_s[1] == step.end_s[0] == step.start_s[2]  # the collective overlaps b
    assert step.end_s[1] - step.start_s[1] == pytest.approx(reduce_s)
    assert step.start_s[3] == max(step.end_s[1], step.end_s[2])
    assert step.step_s == pytest.approx(step.start_s[0] + 2 * alone_s + max(alone_s, reduce_s))
    [row] = predict_recorded(graph, [(model, fabric)], "streams").rows
    assert row.sync_time_s == pytest.approx(max(0.0, reduce_s - alone_s))
    assert row.peak_memory_bytes == 175
    assert row.samples_per_s == pytest.approx(8 * 4 / step.step_s)


def test_a_recorded_graph_survives_its_file() -> None:
    graph = streamed()
    document = json.loads(json.dumps(to_document(graph)))
    assert from_document(document).recorded == graph.recorded
    document["recorded"]["freed"][1] = 99
    with pytest.raises(InputError, match="recorded"):
        from_document(document)


def test_the_command_line_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert run(["predict", "--device", "H100,A100", "--json", "--", "python", "train.py", "bf16"]) == 0
    answered = capsys.readouterr()
    rows = json.loads(answered.out)["rows"]
    assert [row["device"] for row in rows] == ["H100", "A100"]
    assert np.all([row["step_time_s"] > 0 and row["fits"] for row in rows])
    assert "Assumed: 2 values" in answered.err
    assert run(["predict", "--device", "H100", "--precision", "bf16", "--", "python", "train.py"]) == 2
    assert (
        "--precision: has no part in a recorded step; leave it out, and put torch.autocast" in capsys.readouterr().err
    )
    assert run(["predict", "--device", "H100", "--compile", "--", "python", "train.py"]) == 2
    assert "leave it out, and put torch.compile(model) in the script\n" in capsys.readouterr().err


def test_convolutions_keep_channels_last_as_cudnn_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nfrom torch import nn\n"
        "net = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)).cuda()\n"
        "net = net.to(memory_format=torch.channels_last)\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\nscaler = torch.amp.GradScaler('cuda')\n"
        "for _ in range(2):\n"
        "    x = torch.randn(4, 8, 16, 16).cuda().to(memory_format=torch.channels_last)\n"
        "    with torch.autocast('cuda', dtype=torch.float16):\n        loss = net(x).square().mean()\n"
        "    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()\n    optimizer.zero_grad()\n"
    )
    monkeypatch.chdir(tmp_path)
    graph = record(["python", "train.py"])
    assert graph.meta["channels_last"]
    assert graph.meta["precision"] == "fp16"
    assert "aten._amp_foreach_non_finite_check_and_unscale_" in graph.op_type
    assert "aten.clone" not in graph.op_type  # nothing is laid out anew


def test_what_libraries_ask_of_a_script_s_values_loaders_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Lightning does: flags of this rank reduced over all, loaders made anew by their parameters, files put in place."""
    (tmp_path / "train.py").write_text(
        "import inspect, os, torch\nfrom torch import distributed, nn\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "distributed.init_process_group('nccl')\n"
        "net = nn.parallel.DistributedDataParallel(nn.Linear(8, 4).cuda(), device_ids=[0])\n"
        "optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "assert 'batch_size' in inspect.signature(DataLoader.__init__).parameters\n"
        "for x, in DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=16, num_workers=2):\n"
        "    flag = torch.tensor([0], device='cuda')\n    distributed.all_reduce(flag)\n"
        "    if flag.item() or bool(flag == 8):\n        raise SystemExit('a flag that nobody set')\n"
        "    set_ = torch.tensor(3.0).cuda()\n    assert set_.item() == 3.0\n    set_.add_(1)\n    assert set_.item() == 4.0\n"
        "    set_.add_(next(net.parameters()).detach().sum())\n    assert set_.item() == 1.0\n"
        "    open('new.txt', 'w').close()\n    os.chmod('new.txt', 0o600)\n    os.statvfs('new.txt')\n"
        "    net(x.cuda()).sum().backward()\n    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    monkeypatch.chdir(tmp_path)
    graph = record(["torchrun", "--nproc-per-node", "8", "train.py"], gpus_per_node=8)
    assert graph.batch_size == 16
    assert sum(facts(graph).assumed.values()) == 2  # what was added to, in two steps
    assert not (tmp_path / "new.txt").exists()
