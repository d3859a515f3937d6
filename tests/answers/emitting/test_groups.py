"""Plans of groups of GPUs: their processes started, and a model split by tensors that trains as one process would."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ddltool.analyzers.answers.emitting.layout import layout
from ddltool.artifacts import save
from ddltool.errors import InputError
from ddltool.job import WorkerGroup
from ddltool.plans import ParameterRecord, Plan, ShardingSetting, StepSettings
from tests.answers.emitting.test_emit import fake_torchrun, options, plan, run, shims
from tests.conftest import Cli
from tests.helpers.emit_workers import emitted_tensor, learned, tiny
from tests.helpers.runtime_workers import Crew

__all__ = ["shims"]


@pytest.fixture(scope="module")
def four() -> Iterator[Crew]:
    ranks = Crew(4, first=partial(tiny, "llama"))  # importing transformers takes seconds
    yield ranks
    ranks.close()


def grouped(groups: int, tensor: int, pipeline: int = 1, kind: str = "fsdp", **changes: Any) -> Plan:
    """A plan of groups that take 4 samples each, of a model of three blocks."""
    names = [f"model.layers.{n}.self_attn.q_proj.weight" for n in range(3)]
    shape = {"fsdp": (1, groups), "hsdp": (groups // 2, 2), "ddp": (groups, 1)}[kind]
    usual = {
        "group": WorkerGroup(tensor=tensor, pipeline=pipeline),
        "parameters": [ParameterRecord(name=name, size_bytes=8) for name in ["model.embed.weight", *names]],
        "sharding": ShardingSetting(kind=kind, replicate=shape[0], shard=shape[1]),  # type: ignore[arg-type]
    }
    return plan(("A", groups, 4), strategy="bsp", **(usual | changes))


@pytest.mark.parametrize(
    ("kind", "model", "tensor"),
    [("fsdp", "llama", 2), ("ddp", "named", 2), ("fsdp", "qwen3", 2), ("fsdp", "tied", 2), ("hsdp", "llama", 1)],
)
def test_a_model_split_by_tensors_trains_as_one_process(
    cli: Cli, tmp_path: Path, four: Crew, kind: str, model: str, tensor: int
) -> None:
    """Three steps of momentum, by transformers' own plan and by Llama's names; norms of heads and tied embeddings too."""
    save(grouped(4 // tensor, tensor, kind=kind), tmp_path / "plan.json")
    cli("emit", tmp_path / "plan.json", "--target", "fsdp2", "-o", tmp_path / "f.py").done()
    texts = torch.randint(0, 40, (4, 9), generator=torch.Generator().manual_seed(1))
    alone = learned(tiny(model), texts)
    for losses, shape in four.run(emitted_tensor, str(tmp_path / "f.py"), model, texts):
        assert losses == pytest.approx(alone, rel=1e-6)
        assert shape == [32 // tensor // {"ddp": 1, "hsdp": 2, "fsdp": 4 // tensor}[kind], 32]
    assert alone[2] < alone[0] * 0.99


def test_heads_that_no_group_can_share_are_refused(cli: Cli, tmp_path: Path, four: Crew) -> None:
    save(grouped(1, 4), tmp_path / "plan.json")
    cli("emit", tmp_path / "plan.json", "--target", "fsdp2", "-o", tmp_path / "f.py").done()
    said = four.run(emitted_tensor, str(tmp_path / "f.py"), "refused", torch.zeros(1))
    assert said == ["num_key_value_heads is 2, which 4 processes cannot share"] * 4


# -- processes


@pytest.mark.parametrize("target", ["torchrun", "slurm"])
def test_launchers_start_every_gpu_of_the_groups(cli: Cli, tmp_path: Path, shims: Path, target: str) -> None:
    """Eight stages on nodes of eight, of which the record of the run knows; nothing names a config that is not there."""
    fake_torchrun(shims)
    made = grouped(2, 4, 2, devices_per_node={"A": 1}, run=StepSettings(gpus_per_node={"A": 8}))
    save(made, tmp_path / "plan.json")
    said = cli(
        "emit", tmp_path / "plan.json", "--target", target, "-o", tmp_path / "l.sh", "--script", "t.py", "--json"
    )
    assert (said.document["world_size"], said.document["paths"]) == (16, [str(tmp_path / "l.sh")])
    counts = []
    for node in range(1 if target == "slurm" else 2):
        ran = run(["bash", str(tmp_path / "l.sh")], shims, NODE_RANK=str(node), MASTER_ADDR="h", SLURM_JOB_ID="7",
                  SLURM_JOB_NODELIST="n1,n2")  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        words = ran.stdout.splitlines()
        while words:
            found = options(words[1 : 1 + int(words[0])])
            counts.append((found["--nnodes"], found["--nproc-per-node"]))
            words = words[1 + int(words[0]) :]
    assert counts == [("2", "8")] * 2
    assert "DDLTOOL_ENFORCE" not in (tmp_path / "l.sh").read_text()


def test_a_train_job_has_a_process_for_every_gpu(cli: Cli, tmp_path: Path) -> None:
    made = grouped(4, 4, devices_per_node={"A": 2})
    save(made, tmp_path / "plan.json")
    cli("emit", tmp_path / "plan.json", "--target", "kubernetes", "-o", tmp_path / "k.yaml").done()
    config, job = [document for document in yaml.safe_load_all((tmp_path / "k.yaml").read_text()) if document]
    trainer = job["spec"]["trainer"]
    assert (job["kind"], trainer["numNodes"], trainer["numProcPerNode"]) == ("TrainJob", 2, 8)
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "8"}
    assert [variable["name"] for variable in trainer["env"]] == ["DDLTOOL_PLAN_SHA256", "DDLTOOL_JOB"]
    assert Plan.model_validate_json(config["data"]["plan.json"]) == made


def test_torchtitan_is_the_default_of_groups(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What plan says to do next works; -o names a file for the hook, which refuses."""
    monkeypatch.chdir(tmp_path)
    save(grouped(2, 2, 2), tmp_path / "plan.json")
    assert cli("emit", "plan.json", "--json").document["paths"] == ["torchtitan.toml"]
    cli("emit", "plan.json", "-o", "enforce.json").refuses("for which --target hook has no words")


def test_nodes_hold_whole_tensor_groups() -> None:
    made = grouped(4, 4, devices_per_node={"A": 2})
    assert [(g.nodes, g.processes_per_node) for g in layout(made).groups] == [(2, 8)]
    assert [(g.nodes, g.processes_per_node) for g in layout(made, 4).groups] == [(4, 4)]
    with pytest.raises(
        InputError, match="a node of 6 A holds no whole number of tensor groups of 4; give a multiple of 4"
    ):
        layout(made, 6)


@pytest.mark.parametrize(
    ("target", "pipeline", "able"),
    [
        ("hook", 1, "torchtitan, accelerate, deepspeed, fsdp2, torchrun, slurm or kubernetes"),
        ("ddp", 1, "torchtitan, accelerate, deepspeed, fsdp2, torchrun, slurm or kubernetes"),
        *(
            (target, 2, "torchtitan, torchrun, slurm or kubernetes")
            for target in ("hook", "fsdp2", "ddp", "accelerate", "deepspeed")
        ),
    ],
)
def test_what_runs_no_groups_names_what_does(cli: Cli, tmp_path: Path, target: str, pipeline: int, able: str) -> None:
    save(grouped(2, 2, pipeline), tmp_path / "plan.json")
    made = cli("emit", tmp_path / "plan.json", "--target", target, "-o", tmp_path / "out")
    text = f"each device is a group of {2 * pipeline} devices (tensor 2, pipeline {pipeline})"
    made.refuses(f"{text}, for which --target {target} has no words; give --target {able}")
    assert not (tmp_path / "out").exists()
