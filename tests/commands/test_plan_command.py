"""The plan of a command: its own knobs, each combination recorded and predicted; and of a recorded step's file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ddltool as dt
from ddltool.analyzers.answers.gating.metrics import extract
from ddltool.analyzers.answers.reporting.command_section import command_section
from ddltool.analyzers.job.planning.commands import knobs_of
from ddltool.artifact_files import read_any
from ddltool.commands.main import run
from ddltool.errors import Infeasible, InputError
from ddltool.graph_results import CommandPlan
from ddltool.units import show_bytes, show_money
from tests.conftest import Cli

SCRIPT = """
import argparse, torch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--tp", type=int, default=1)
args = parser.parse_args()
torch.distributed.init_process_group("nccl")
mesh = torch.distributed.init_device_mesh("cuda", (8 // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
net = nn.Sequential(nn.Linear(1024, 2048), nn.Linear(2048, 1024)).cuda()
if args.tp > 1:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    parallelize_module(net, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
assert args.batch_size < 1000, "too many"
for _ in range(3):
    net(torch.randn(args.batch_size, 1024, device="cuda")).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.parametrize(
    ("knob", "command", "changed", "stands"),
    [
        ("--batch-size 8", "t.py --batch-size 4 --x", "t.py --batch-size 8 --x", "4"),
        ("--batch-size 8", "t.py --batch_size=4", "t.py --batch_size=8", "4"),
        ("--batch-size 8", "t.py --lr 1", "t.py --lr 1 --batch-size 8", None),
        ("--batch-size=8", "t.py", "t.py --batch-size=8", None),
        ("batch_size=8", "t.py config.py --batch_size=4", "t.py config.py --batch_size=8", "4"),
        ("batch_size = 8", "t.py batch_size=4 a=1", "t.py batch_size=8 a=1", "4"),
        ("--offset 8", "t.py --offset -1", "t.py --offset 8", "-1"),
        ("--tp 2", "t.py --tp --fast", "t.py --tp 2 --fast", ""),
        ("--tp 2", "t.py --tp 1 --tp=4", "t.py --tp 1 --tp=2", "4"),
    ],
)
def test_a_knob_is_turned_where_it_stands_and_as_it_is_written(
    knob: str, command: str, changed: str, stands: str | None
) -> None:
    [found] = knobs_of([knob])
    assert " ".join(found.set_in(command.split(), found.values[0])) == changed
    assert found.value_in(command.split()) == stands


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--vary", "--tp", "--devices", "8xH100"), "--vary: '--tp' has no values; write"),
        (("--vary", "--tp 1,,2", "--devices", "8xH100"), "--vary: '--tp 1,,2' has no values; write"),
        (("--vary", "--a-b 1", "--vary", "a_b=2", "--devices", "8xH100"), "--vary: gives a_b twice; name"),
        (("--vary", f"--tp {','.join(map(str, range(65)))}", "--devices", "8xH100"), "--vary: makes 65 combinations; try"),
        (
            ("--devices", "8xH100", "--compile"),
            "--compile: has no part in the plan of a recorded step; leave it out, and put torch.compile(model) in the script",
        ),
        (("--devices", "8xH100", "--strategy", "bsp"), "--strategy: has no part in the plan of a recorded step; leave"),
        (("--devices", "8xH100", "zoo:resnet50_v1"), "the command after -- is what the step is of; leave out the other"),
        (("--devices", "4xH100"), "--devices: 4xH100 is a node of 4, and the command starts 8 processes on each; write 8xH100"),
        (("--devices", "8xH100=4"), "--devices: '8xH100=4' is not TYPE=N; for example"),
        (("--devices", "8xH1000"), "--devices: unknown device 'H1000'; did you mean"),
        ((), "--devices: is missing; name those of a node, such as 8xH100"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_in_a_line(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str
) -> None:
    assert run(["plan", *arguments, "--", "torchrun", "--nproc-per-node", "8", "train.py"]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: {line}")


def test_knobs_have_no_part_in_the_plan_of_a_job(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "zoo:alexnet_v2", "--devices", "H100=2", "--vary", "--tp 2"]) == 2
    assert "--vary: has no part in the plan of a job; give the command that trains after --" in capsys.readouterr().err


def test_every_combination_is_recorded_and_predicted_the_best_first(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--", "torchrun", "train.py"]
    knobs = ["--vary", "--batch-size 64,1000", "--vary", "--tp 2"]
    assert run(["plan", "--devices", "8xH100,8xA100", *knobs, "-o", "tried.json", "--json", *command]) == 0
    out, err = capsys.readouterr()
    assert "torchrun says no --nproc-per-node: 8 processes" in err
    plan = CommandPlan.model_validate_json(Path("tried.json").read_text())
    assert plan.model_dump(mode="json") == json.loads(out)
    # Two combinations and the command as it is, on two types; a batch of 1000 fails and stops no other.
    assert len(plan.tried) == 6
    assert [one.row is None for one in plan.tried] == [False] * 4 + [True] * 2
    assert all("too many after 0 of the 2 updates" in str(one.failure) for one in plan.tried[4:])
    rates = [plan.rate(one) for one in plan.tried]
    assert rates == sorted(rates, reverse=True)
    best = plan.best
    assert best is not None
    assert best.row is not None
    assert best.values == {"--batch-size": "64", "--tp": "2"}
    assert best.command == "torchrun --nproc-per-node 8 train.py --batch-size 64 --tp 2"
    # Pairs of the eight processes share a batch.
    assert best.row.samples_per_s == pytest.approx(4 * 64 / best.row.step_time_s)
    given = plan.as_given(best.device, 8)
    assert given is not None
    assert given.row is not None
    assert given.row.samples_per_s == pytest.approx(8 * 4 / given.row.step_time_s)

    section = command_section(plan)
    ratio = best.row.samples_per_s / given.row.samples_per_s
    assert section.lead[0].startswith(f"Use --batch-size 64 --tp 2 on 8 {best.device}: ")
    assert f"{ratio:.3g} times as fast as the command as it is" in section.lead[0]
    assert sum(line.startswith("Failed: --batch-size 1000 --tp 2: ") for line in section.lead) == 1
    assert read_any(Path("tried.json")).content == plan
    metrics = extract(json.loads(out), "tried.json").metrics
    assert metrics["samples_per_s/batch-size=64,tp=2/8xH100"].value == pytest.approx(
        next(one.row.samples_per_s for one in plan.tried if one.row and one.device == "H100" and one.values)
    )
    assert run(["gate", "tried.json", "--baseline", "tried.json"]) == 0
    assert run(["report", "tried.json"]) == 0


def test_a_recorded_file_is_planned_in_its_own_world(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["torchrun", "--nproc-per-node", "8", "train.py", "--tp", "2"]
    dt.trace(command, device="H100", output="graph.json")
    predicted = dt.predict("graph.json", "H100").rows[0]
    assert dt.predict(command, "H100").rows == dt.predict(dt.read("graph.json"), "H100").rows == [predicted]
    plan = dt.plan("graph.json", devices="8xH100,8xA100")
    assert isinstance(plan, CommandPlan)
    assert {one.device for one in plan.tried} == {"H100", "A100"}
    assert next(one.row for one in plan.tried if one.device == "H100") == predicted
    assert predicted.samples_per_s == pytest.approx(4 * 4 / predicted.step_time_s)
    # 40 million samples on 8 GPUs: hours by the rate, dollars by the price of each, of the option before that of the offer.
    priced = dt.plan("graph.json", devices="8xH100@9,8xA100@1", price="H100=2.5", samples=1e7, epochs=4)
    assert isinstance(priced, CommandPlan)
    slower = next(one for one in priced.tried if one.device == "A100" and one.row)
    assert slower.row is not None
    hours = {"H100": 4e7 / predicted.samples_per_s / 3600, "A100": 4e7 / slower.row.samples_per_s / 3600}
    assert {one.device: priced.hours(one) for one in priced.tried} == pytest.approx(hours)
    costs = {"H100": 8 * 2.5 * hours["H100"], "A100": 8 * hours["A100"]}
    assert {one.device: priced.cost(one) for one in priced.tried} == pytest.approx(costs)
    assert costs["A100"] < costs["H100"]
    answer = command_section(priced).lead[0]
    assert (
        f" and costs {show_money(costs['H100'])}. Cheapest: as it is on 8 A100, {show_money(costs['A100'])} in"
        in answer
    )
    # A deadline takes the fastest of those that keep a budget, and says what breaks which.
    limited = {"devices": "8xH100@9,8xA100@1", "price": "H100=2.5", "samples": 4e7}
    cheap = dt.plan("graph.json", **limited, budget=(costs["A100"] + costs["H100"]) / 2)  # type: ignore[arg-type]
    assert isinstance(cheap, CommandPlan)
    assert cheap.best is not None
    assert cheap.best.device == "A100"
    with pytest.raises(Infeasible, match=r"no variant keeps all limits: deadline: the fastest .*; budget: .* allowed"):
        dt.plan("graph.json", **limited, deadline_s=hours["H100"] * 3599, budget=costs["A100"])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="--budget: limits a price, and no device has one"):
        dt.plan("graph.json", devices="8xT4", samples=4e7, budget=1)
    with pytest.raises(InputError, match="--deadline: limits a whole run, and how long that is nobody says"):
        dt.plan("graph.json", devices="8xH100", deadline_s=1)
    with pytest.raises(InputError, match="--price: T4 is not among the devices"):
        dt.plan("graph.json", devices="8xH100", price="T4=1")
    with pytest.raises(InputError, match="--tokens: the recorded steps read no tokens; give --samples"):
        dt.plan("graph.json", devices="8xH100", tokens=1e9)
    with pytest.raises(InputError, match="the plan of a file's step; give the command that trains"):
        dt.plan("graph.json", devices="8xH100", vary=["--tp 2"])
    Path("job.yaml").write_text(
        "name: a\nmax_workers: 8\nbatch_size: 8\nmodel: graph.json\ndevices: [{type: H100, count: 8}]\n"
    )
    with pytest.raises(InputError, match="is a script's recorded step, at its own batch in its own world"):
        dt.plan("job.yaml")
    assert run(["report", "graph.json"]) == 0
    assert f"tensors take {show_bytes(predicted.peak_memory_bytes)} at its peak" in Path(
        "report.html"
    ).read_text().replace("\xa0", " ")
    document = json.loads(Path("graph.json").read_text())
    assert extract(document, "graph.json").metrics["peak_memory_bytes"].value == predicted.peak_memory_bytes
    assert run(["gate", "graph.json", "--baseline", "graph.json"]) == 0
    largest = max(document["recorded"]["storage_bytes"])
    document["recorded"]["storage_bytes"] = [
        2 * size if size == largest else size for size in document["recorded"]["storage_bytes"]
    ]
    Path("larger.json").write_text(json.dumps(document))
    assert run(["gate", "larger.json", "--baseline", "graph.json"]) == 1
    assert "peak_memory_bytes" in capsys.readouterr().err


@pytest.mark.slow
def test_nothing_fits_is_said_with_the_memory_and_code_3(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = Path("train.py").read_text().replace("nn.Linear(1024, 2048)", "nn.Linear(1024, 4_000_000)")
    Path("train.py").write_text(text.replace("nn.Linear(2048, 1024)", "nn.Linear(4_000_000, 1024)"))
    assert run(["-q", "plan", "--devices", "8xT4", "--", "torchrun", "train.py"]) == 3
    out, err = capsys.readouterr()
    assert "Nothing fits: the least, the command as it is, takes" in out
    assert "GiB a process on T4" in " ".join(out.split())
    assert "memory: torchrun" in err


def test_a_model_without_devices_is_told_so(cli: Cli) -> None:
    cli("plan", "timm:resnet18").refuses(
        "--devices: is missing beside the model timm:resnet18; name them, such as 8xH100"
    )
