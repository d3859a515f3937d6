"""Attaching: what is refused and how it reads, what ``attach(None)`` leaves alone, and the examples."""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from ddltool import runtime
from ddltool.artifacts import save, to_json
from ddltool.errors import InputError
from ddltool.plans import ParameterRecord
from ddltool.runtime.hook.job import check_parameters
from ddltool.runtime.processes.launcher import count_nodes
from ddltool.telemetry import TelemetryRow
from tests.helpers.processes import as_job, torchrun
from tests.helpers.runtime_workers import (
    crew,
    enforcement,
    make_model,
    parameter_records,
    refusal,
    registered,
    traces_of_attach,
)

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"


def attach_alone(config: str | None, **changes: Any) -> runtime.Hook:
    """Attach in this process, which has no process group."""
    model = make_model()
    given: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "dataset": TensorDataset(torch.zeros(40)),
    }
    return runtime.attach(config, **(given | changes))


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Local batches of 3 and 13 for two processes."""
    save(enforcement([3, 13], parameters=parameter_records(make_model())), tmp_path / "enforce.json")
    return str(tmp_path / "enforce.json")


ADVICE = "give a map-style dataset, or leave dataset out and load hook.local_batch_size samples per step yourself"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "bare",
            "model: is a Branches, not a DistributedDataParallel; "
            "give the model that torch.nn.parallel.DistributedDataParallel(model) or runtime.shard returns",
        ),
        (
            "compiled around",
            "model: is a OptimizedModule, not a DistributedDataParallel; "
            "give the model that torch.nn.parallel.DistributedDataParallel(model) or runtime.shard returns",
        ),
        ("part of the ranks", "model: is averaged over 1 of the 2 processes; wrap it with the default process group"),
        ("unsized", f"dataset: is a Unsized without a length; {ADVICE}"),
        (
            "small",
            "CONFIG:total_batch_size: is 16, but the dataset has 15 samples; plan smaller batches or fewer processes",
        ),
        (
            "different data",
            "dataset: differs between rank 0 (40 samples) and rank 1 (41 samples); give every rank the whole dataset",
        ),
        ("no optimizer", "optimizer: is a list; give the job's torch.optim.Optimizer"),
        ("good", "accepted"),
    ],
)
def test_every_rank_refuses_in_the_same_words(config: str, case: str, message: str) -> None:
    assert crew().run(refusal, config, case) == [message.replace("CONFIG", config)] * 2


def test_a_communication_hook_of_the_scripts_own_stays(tmp_path: Path) -> None:
    """Weights enter at the loss, and times are taken where the gradients are complete."""
    save(enforcement([3, 13], telemetry=str(tmp_path / "rows.jsonl")), tmp_path / "rows.json")
    assert crew().run(refusal, str(tmp_path / "rows.json"), "hooked") == ["accepted"] * 2
    message = "model: is attached to already; attach, balance or make an agent once per model"
    assert crew().run(refusal, str(tmp_path / "rows.json"), "twice") == [message] * 2


def test_the_wrong_number_of_processes(tmp_path: Path) -> None:
    config = str(tmp_path / "enforce.json")
    save(enforcement([4, 4, 4, 4]), config)
    message = (
        f"{config}:world_size: is 4, but this job runs 2 processes; "
        "start 4 (torchrun --nproc-per-node), or plan for 2 and emit again"
    )
    assert crew().run(refusal, config, "good") == [message] * 2
    with pytest.raises(InputError) as caught:
        attach_alone(config)
    assert str(caught.value) == (
        f"{config}:world_size: is 4, but this job runs 1 process (torch.distributed is not initialised); "
        "start 4 (torchrun --nproc-per-node), or plan for 1 and emit again"
    )


def test_a_refusal_on_one_rank_is_one_on_all(config: str) -> None:
    own = f"{config}.absent: no such file; give the path of an existing file"
    assert crew().run(refusal, config, "missing on rank 1") == [f"rank 1: {own}", own]


def test_telemetry_that_one_rank_cannot_write_is_refused_on_all(tmp_path: Path) -> None:
    config = str(tmp_path / "enforce.json")
    save(enforcement([3, 13], telemetry="rows/telemetry.jsonl"), config)
    (tmp_path / "rank0" / "rows").mkdir(parents=True)
    (tmp_path / "rank1").mkdir()
    own = f"rows/telemetry.jsonl: cannot be written (no folder {tmp_path / 'rank1' / 'rows'}); make the folder first"
    assert crew().run(refusal, config, "good") == [f"rank 1: {own}", own]


def test_ranks_with_different_configs_are_refused(config: str) -> None:
    save(enforcement([4, 12]), f"{config}.other")
    first, second = crew().run(refusal, config, "different configs")
    pattern = (
        r": differs between rank 0 \(content \w{12}\) and rank 1 \(content \w{12}\); give every rank the same file"
    )
    assert re.fullmatch(re.escape(config) + pattern, first)
    assert re.fullmatch(re.escape(f"{config}.other") + pattern, second)


def test_a_model_that_is_not_the_planned_one(tmp_path: Path) -> None:
    records = parameter_records(make_model())
    planned = [
        ParameterRecord(name="stem.weight", size_bytes=8),
        records[0].model_copy(update={"size_bytes": 384}),
        *records[3:],
    ]
    config = str(tmp_path / "enforce.json")
    save(enforcement([3, 13], parameters=planned), config)
    message = (
        f"{config}:parameters: stem.weight is not in the model, "
        "body.0.weight has 384 bytes in the plan and 768 in the model, body.0.bias is not in the plan (and 1 more); "
        "make the plan from this model, in this data type"
    )
    assert crew().run(refusal, config, "good") == [message] * 2


def test_parameters_that_fit_in_other_wrappings() -> None:
    model = make_model()
    records = parameter_records(model)
    check_parameters("enforce.json", records, model)
    check_parameters("enforce.json", records[::-1], torch.compile(model))  # type: ignore[arg-type]
    check_parameters("enforce.json", [], torch.nn.Linear(1, 1))
    model.body[0].weight.requires_grad_(False)
    check_parameters("enforce.json", records[1:], model)
    with pytest.raises(InputError, match=re.escape("enforce.json:parameters: body.0.bias is not in the plan; make")):
        check_parameters("enforce.json", records[2:], model)
    with pytest.raises(InputError, match=r"body\.0\.weight has 768 bytes in the plan and 1536 in the model"):
        check_parameters("enforce.json", records[:1], model.double())


def test_a_config_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.json: no such file; give the path of an existing file"):
        attach_alone(str(tmp_path / "absent.json"))


def test_a_launched_job_without_process_group(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError) as caught:
        attach_alone(config)
    assert str(caught.value) == (
        "torch.distributed: is not initialised, but WORLD_SIZE is 2; "
        "call torch.distributed.init_process_group before runtime.attach"
    )


def attach_to_nothing(rank: int) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]
    with contextlib.suppress(InputError):
        attach_alone("absent.json")
    attach_alone("enforce.json")


def test_uncaught_it_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    line = "error: enforce.json: no such file; give the path of an existing file\n"
    assert as_job(1, tmp_path, attach_to_nothing) == [(2, "", line)]


def test_other_errors_keep_their_traceback(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(InputError, match=r"absent\.json: no such file"):
        attach_alone("absent.json")
    sys.excepthook(KeyError, KeyError("something else"), None)
    assert capsys.readouterr().err == "KeyError: 'something else'\n"


def test_attach_none_registers_nothing_and_loads_as_usual() -> None:
    for answer in crew().run(traces_of_attach, None):
        assert answer["registered"] == 0
        assert answer["types"] == ("Hook", "DataLoader", "DistributedSampler")
        assert answer["local_batch_size"] is None
        loader, own, usual = answer["batches"]
        assert loader == own == usual
        assert sum(map(len, usual)) == 11


def test_attach_with_a_config_registers_and_replaces_the_batch_size(tmp_path: Path) -> None:
    """So the count above can be other than 0. Without telemetry: two around the forward, two around the update."""
    save(enforcement([3, 7]), tmp_path / "enforce.json")
    answers = crew().run(traces_of_attach, str(tmp_path / "enforce.json"))
    for answer, size in zip(answers, (3, 7), strict=True):
        assert answer["registered"] == 4
        assert answer["local_batch_size"] == size
        loader, own, _ = answer["batches"]
        assert loader == own
        assert [len(batch) for batch in loader] == [size] * 2
    seen = [index for answer in answers for batch in answer["batches"][0] for index in batch]
    assert len(set(seen)) == len(seen) == 20  # one of 21 is dropped: a tail smaller than the number of ranks


def test_attach_none_without_a_process_group() -> None:
    hook = attach_alone(None)
    assert (hook.rank, hook.world_size, hook.local_batch_size) == (0, 1, None)
    assert [len(batch[0]) for batch in hook.dataloader(batch_size=16)] == [16, 16, 8]
    assert [len(batch[0]) for batch in hook.dataloader(batch_size=16, drop_last=True)] == [16, 16]


def test_one_process_has_nothing_to_weigh(tmp_path: Path) -> None:
    save(enforcement([6]), tmp_path / "enforce.json")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters())
    before = registered(model, optimizer)
    hook = runtime.attach(tmp_path / "enforce.json", model=model, optimizer=optimizer, dataset=range(20))  # type: ignore[arg-type]
    assert registered(model, optimizer) == before + 1  # the watch of its gradients
    assert [len(batch) for batch in hook.dataloader(batch_size=1)] == [6, 6, 6, 2]
    loss = model.heads[0].bias.sum()
    assert all(hook.loss(loss) is loss for _ in hook.dataloader(batch_size=1))


def test_what_a_loader_of_the_scripts_own_cannot_be(tmp_path: Path) -> None:
    save(enforcement([6]), tmp_path / "enforce.json")
    hook = attach_alone(str(tmp_path / "enforce.json"), dataset=None)
    numbers = TensorDataset(torch.zeros(40))
    with pytest.raises(InputError, match=r"loader: is a list; give a torch.utils.data.DataLoader"):
        hook.planned([1])  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"loader: takes whole batches from a list; give it a sampler of single"):
        hook.planned(DataLoader(numbers, batch_sampler=[[0, 1]]))
    with pytest.raises(InputError, match=r"sizes: add up to 6 samples, but the dataset has 5"):
        hook.planned(DataLoader(numbers, sampler=range(5)))
    message = (
        "accumulated: is 2, but the plan makes an update of 6 samples in 1 pass; update after each batch, or plan again"
    )
    with pytest.raises(InputError, match=f"^{message}$"):
        hook.planned(DataLoader(numbers, batch_size=9), accumulated=2)
    for accumulated in (None, 1):
        assert len(hook.planned(DataLoader(numbers, batch_size=9), accumulated=accumulated)) == 7


def test_nothing_is_handed_out_before_it_is_known_what_is_trained(tmp_path: Path) -> None:
    save(enforcement([6]), tmp_path / "enforce.json")
    hook = attach_alone(str(tmp_path / "enforce.json"), model=None, optimizer=None)
    loader = hook.dataloader(batch_size=16)
    with pytest.raises(InputError, match=r"loader: is used before the hook knows what is trained; call hook.bind"):
        next(iter(loader))
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook.bind(model, optimizer)
    assert [len(batch[0]) for batch in loader] == [6, 6, 6, 6, 6, 6, 4]
    with pytest.raises(InputError, match=r"bind: was called already; attach once for each model"):
        hook.bind(model, optimizer)
    with pytest.raises(InputError, match=r"attach: got a model or an optimizer alone; give both, or neither"):
        attach_alone(str(tmp_path / "enforce.json"), optimizer=None)


@pytest.mark.parametrize("with_config", [False, True])
def test_what_a_loader_refuses(tmp_path: Path, with_config: bool) -> None:
    save(enforcement([6]), tmp_path / "enforce.json")
    config = str(tmp_path / "enforce.json") if with_config else None
    with pytest.raises(InputError, match=r"dataset: was not given to attach; call runtime.attach\(..., dataset"):
        attach_alone(config, dataset=None).dataloader(batch_size=4)
    with pytest.raises(InputError, match=r"dataloader: sampler is the hook's to choose; use hook.batch_sampler"):
        attach_alone(config).dataloader(batch_size=4, sampler=[1])


@pytest.mark.parametrize(
    ("variables", "nodes"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 2),
        ({"LOCAL_WORLD_SIZE": "5"}, 2),
        ({"LOCAL_WORLD_SIZE": "8"}, 1),
        ({"GROUP_WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "8"}, 3),
        ({"GROUP_WORLD_SIZE": "some", "LOCAL_WORLD_SIZE": "0"}, 1),
    ],
)
def test_nodes_are_counted_by_what_the_launcher_says(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], nodes: int
) -> None:
    for name in ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert count_nodes(8) == nodes


def test_importing_the_runtime_imports_nothing_heavy_but_torch() -> None:
    code = (
        "import sys\nimport ddltool.runtime as r\nassert 'torch' not in sys.modules\n"
        "import torch\nbefore = set(sys.modules)\nr.attach\nprint(*(set(sys.modules) - before))\n"
        "r.balance, r.ElasticTrainer, r.Worker\nprint(*(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    hook, every = map(str.split, done.stdout.splitlines())
    heavy = {"ortools", "pandas", "scipy", "sklearn", "onnx", "altair", "networkx", "typer", "rich"}
    assert not heavy & {name.split(".")[0] for name in every}
    assert "ddltool.runtime.hook.attaching" in hook
    inside = {name for name in hook if name.startswith("ddltool.")}
    assert not {name for name in inside if name.split(".")[1] in ("analyzers", "commands", "fixtures")}


def test_the_examples_differ_by_at_most_eight_lines() -> None:
    plain, hooked = (
        (EXAMPLES / name).read_text(encoding="utf-8").splitlines() for name in ("train_plain.py", "train_hooked.py")
    )
    changes = [line for line in difflib.ndiff(plain, hooked) if line[0] in "+-" and line[2:].strip()]
    assert 0 < len(changes) <= 8, changes
    loop = plain.index("        for inputs, answers in loader:")
    said = [line.replace("hook.loss(", "").replace(")).back", ").back") for line in hooked]
    assert plain[loop:] == said[said.index(plain[loop]) :]


@pytest.mark.slow
def test_the_examples_train_under_torchrun_to_the_same_accuracy(tmp_path: Path) -> None:
    """Batches of 8 and 24, rightly weighted, are the same steps as two batches of 16."""
    (tmp_path / "enforce.json").write_text(to_json(enforcement([8, 24], telemetry="telemetry.jsonl")), encoding="utf-8")
    plain, hooked = (torchrun(2, EXAMPLES / name, folder=tmp_path) for name in ("train_plain.py", "train_hooked.py"))
    assert (plain.returncode, hooked.returncode) == (0, 0), plain.stderr + hooked.stderr
    assert plain.stdout == hooked.stdout
    assert float(hooked.stdout.removeprefix("accuracy ")) > 0.8
    lines = (tmp_path / "telemetry.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [TelemetryRow.model_validate_json(line) for line in lines]
    # Three epochs of 46 full steps and a tail of 1500 - 46 * 32 = 28 samples.
    assert sorted((row.rank, row.step) for row in rows) == [(rank, step) for rank in (0, 1) for step in range(3 * 47)]
    assert {(row.rank, row.batch) for row in rows} == {(0, 8), (1, 24), (0, 7), (1, 21)}


@pytest.mark.slow
def test_under_torchrun_a_refusal_is_one_line_for_each_rank(tmp_path: Path) -> None:
    (tmp_path / "enforce.json").write_text(to_json(enforcement([8, 8, 8])), encoding="utf-8")
    done = torchrun(2, EXAMPLES / "train_hooked.py", folder=tmp_path)
    assert done.returncode != 0
    line = (
        "error: enforce.json:world_size: is 3, but this job runs 2 processes; "
        "start 3 (torchrun --nproc-per-node), or plan for 2 and emit again"
    )
    assert done.stderr.splitlines().count(line) == 2
    assert "exitcode  : 2 " in done.stderr
    assert "InputError" not in done.stderr


def test_a_config_of_another_plan_than_the_launchers_is_refused() -> None:
    from ddltool.runtime.hook.job import check_plan

    check_plan("e.json", "a" * 64, "a" * 64)
    check_plan("e.json", None, "a" * 64)
    check_plan("e.json", "a" * 64, None)
    with pytest.raises(InputError, match=r"e\.json:plan_sha256: is aaaaaaaaaaaa\.\.\., but .* by plan bbbbbbbbbbbb"):
        check_plan("e.json", "a" * 64, "b" * 64)
