"""Groups of devices as logical workers: a plan over groups is that of a job whose devices are the groups."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from ddltool.analyzers.job.planning.job_inputs import read_job
from ddltool.artifacts import save
from ddltool.commands.plan import plan
from ddltool.errors import InputError
from tests.conftest import Cli

HEAD = "kind: ddltool.job\nname: big\nmax_workers: 6\nbatch_size: 8\n"
CARDS = "nic: 8x400Gbit"
GROUPS = f"""
group: {{tensor: 4, pipeline: 2}}
devices:
  - {{type: H100, count: 33, capability_per_s: 2.0, per_node: 8, {CARDS}, price_per_hour: 4, memory_gib: 80}}
  - {{type: A100, count: 16, capability_per_s: 1.0, per_node: 8, {CARDS}, price_per_hour: 2, memory_gib: 40}}
"""
WHOLE = f"""
devices:
  - {{type: H100, count: 4, capability_per_s: 2.0, per_node: 1, {CARDS}, price_per_hour: 32, memory_gib: 640}}
  - {{type: A100, count: 2, capability_per_s: 1.0, per_node: 1, {CARDS}, price_per_hour: 16, memory_gib: 320}}
"""


def written(folder: Path, text: str, name: str = "job.yaml") -> Path:
    (folder / name).write_text(HEAD + textwrap.dedent(text))
    return folder / name


def figures(made: Any) -> Any:
    return made.model_copy(update={"group": None, "solve_seconds": 0.0}).model_dump(exclude={"decision", "command"})


@pytest.mark.parametrize("strategy", ["bsp", "lb-bsp", "est"])
@pytest.mark.parametrize(
    "more", ["", "constraints: {max_price_per_hour: 80}", "constraints: {memory_per_worker_gib: 40}"]
)
def test_a_group_is_planned_as_one_device_of_its_speed_price_and_memory(
    tmp_path: Path, strategy: str, more: str
) -> None:
    groups = plan(written(tmp_path, GROUPS + more), strategy)
    whole = plan(written(tmp_path, WHOLE + more, "whole.yaml"), strategy)
    assert groups.group is not None
    assert groups.group.size == 8
    assert figures(groups) == figures(whole)


def test_groups_stand_on_whole_nodes(tmp_path: Path) -> None:
    nodes = [
        "{name: a, count: 2, devices: {type: H100, count: 8}}",
        "{name: b, count: 5, devices: {type: L40S, count: 2}}",
    ]
    nodes.append("{name: c, count: 3, devices: {type: T4, count: 3}}")
    (tmp_path / "cluster.yaml").write_text(f"kind: ddltool.cluster\nnodes: [{', '.join(nodes)}]\n")
    job = read_job(written(tmp_path, "group: {tensor: 4}\ncluster: cluster.yaml\n"))
    assert {offer.type: offer.count for offer in job.devices} == {"H100": 4, "L40S": 2, "T4": 0}


@pytest.mark.parametrize(
    ("group", "devices", "said"),
    [
        ("{expert: 8}", "{type: H100, count: 8}", "expert: the all-to-all of experts is not modelled"),
        ("{tensor: 16}", "{type: H100, count: 8}", "8 H100 make no group of 16 devices"),
        ("{tensor: 0}", "{type: H100, count: 8}", "group.tensor"),
        (
            "{tensor: 8}",
            "{type: H100, count: 8}",
            "H100 has neither capability_per_s nor profile, and the step of 8 devices",
        ),
    ],
)
def test_what_makes_no_group_is_refused(tmp_path: Path, group: str, devices: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        plan(written(tmp_path, f"model: zoo:bert_small\ngroup: {group}\ndevices: [{devices}]\n"))


def test_no_script_follows_a_plan_over_groups(cli: Cli, tmp_path: Path) -> None:
    save(plan(written(tmp_path, GROUPS), "bsp"), tmp_path / "plan.json")
    told = cli("emit", tmp_path / "plan.json", "-o", tmp_path / "enforce.json")
    assert told.code == 2
    assert "plan.json:group: each device is a group of 8 devices" in told.err


def test_a_step_that_sends_to_other_ranks_is_named(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "moe.py").write_text(
        textwrap.dedent("""
            import torch, torch.distributed as dist

            class Experts(torch.nn.Linear):
                def forward(self, x):
                    out = torch.empty_like(x)
                    dist.all_to_all_single(out, super().forward(x))
                    return out

            def make():
                return Experts(8, 8), torch.zeros(4, 8)
        """)
    )
    told = cli("trace", f"{tmp_path / 'moe.py'}:make")
    assert told.code == 2
    assert "calls all_to_all_single of torch.distributed" in told.err
