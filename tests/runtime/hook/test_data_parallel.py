"""Planned DDP buckets and FSDP2 prefetch lists, applied in real processes and read back from torch."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddltool.analyzers.step.communication.collectives import plan_collectives, settings
from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.costs.model import datasheet, estimate
from ddltool.analyzers.step.tracing.step import TrainingStep
from ddltool.analyzers.step.tracing.torch_adapter import trace_torch
from ddltool.artifacts import save
from ddltool.device import Network
from ddltool.errors import InputError
from ddltool.plans import BucketSetting, PrefetchSetting, ShardingSetting
from ddltool.runtime import shard
from ddltool.runtime.hook import data_parallel
from ddltool.runtime.hook.data_parallel import ddp_arguments, prefetch_units
from ddltool.shipped import devices
from tests.helpers.data_parallel_workers import Blocks, ddp_buckets, fsdp_order, prefetch_refusal
from tests.helpers.processes import as_job
from tests.helpers.runtime_workers import crew, enforcement

needs_lists = pytest.mark.skipif(
    "bucket_cap_mb_list" not in inspect.signature(DistributedDataParallel.__init__).parameters,
    reason="torch 2.10 has one cap for all buckets",
)
BLOCKS = [f"layers.{k}" for k in range(4)]


def planned() -> tuple[BucketSetting, PrefetchSetting | None]:
    """The plan for the crew's model on a network where several buckets pay."""

    def build() -> TrainingStep:
        module = Blocks()
        return TrainingStep(
            name="blocks", module=module, inputs=(module.example_inputs(),), loss=lambda out: out.square().mean()
        )

    graph = trace_torch(build, mode="training")
    graph = estimate(graph, datasheet(devices().device("cpu-core")), Network())
    plans = plan_collectives(graph, Fabric.flat(2e9, 3e-6).over(2))
    assert plans is not None
    return settings(plans)


def config(tmp_path: Path, **changes: Any) -> str:
    made = enforcement([8, 8]).model_copy(update=changes)
    save(made, tmp_path / "enforce.json")
    return str(tmp_path / "enforce.json")


@needs_lists
def test_ddp_forms_the_planned_buckets(tmp_path: Path) -> None:
    buckets, _ = planned()
    assert buckets.bucket_cap_mb_list is not None  # the network above makes a list the better choice
    assert 1 < len(buckets.buckets) < 12
    for before, text, actual in crew().run(ddp_buckets, config(tmp_path, ddp=buckets)):
        assert before == "not settled"
        assert text == f"DDP buckets: {len(actual)}, as planned"
        assert actual == [sorted(bucket) for bucket in buckets.buckets]


@needs_lists
def test_another_order_of_gradients_is_told(tmp_path: Path) -> None:
    buckets, _ = planned()
    wrong = buckets.model_copy(update={"buckets": buckets.buckets[::-1]})
    for _, text, _ in crew().run(ddp_buckets, config(tmp_path, ddp=wrong)):
        assert "the first that differs is bucket 0" in text


def test_prefetch_lists_change_the_order_of_gathers(tmp_path: Path) -> None:
    """Two ahead in forward: the first block's pre-forward gathers the second and third, and so on."""
    setting = PrefetchSetting(
        units=BLOCKS,
        forward={"layers.0": ["layers.2", "layers.1"]},
        backward={"layers.3": ["layers.1", "layers.2"]},
        step_s=1.0,
        default_step_s=1.0,
    )
    for text, order in crew().run(fsdp_order, config(tmp_path, fsdp2=setting)):
        assert text == "FSDP2 prefetch: lists set on 1 modules for forward and 1 for backward"
        gathered = [name for name in order if name.startswith("layers.")]
        assert gathered[:4] == ["layers.0", "layers.2", "layers.1", "layers.3"]
        backward = gathered[4:]
        assert backward[-4:].index("layers.1") < backward[-4:].index("layers.2")
    default = setting.model_copy(update={"forward": {}, "backward": {}})
    for text, order in crew().run(fsdp_order, config(tmp_path, fsdp2=default)):
        assert text == "FSDP2 prefetch: the default, as planned"
        assert [name for name in order if name.startswith("layers.")][:4] == BLOCKS


def test_the_plan_names_the_blocks() -> None:
    _, prefetch = planned()
    assert prefetch is not None
    assert prefetch.units == BLOCKS


@pytest.mark.parametrize(
    ("sharded", "message"),
    [(False, "'layers.0' is not sharded; call fully_shard on each unit"), (True, "the model has no module 'layers.2'")],
)
def test_an_unfitting_model_is_refused(tmp_path: Path, sharded: bool, message: str) -> None:
    setting = PrefetchSetting(units=BLOCKS, forward={}, backward={}, step_s=1.0, default_step_s=1.0)
    answer = prefetch_refusal(0, config(tmp_path, fsdp2=setting), sharded)
    assert message in answer


def test_a_config_without_plans_is_refused(tmp_path: Path) -> None:
    path = config(tmp_path)
    with pytest.raises(InputError, match="ddp: is missing"):
        ddp_arguments(path)
    with pytest.raises(InputError, match="fsdp2: is missing"):
        prefetch_units(path)


def test_caps_that_this_torch_does_not_take_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_parallel, "DistributedDataParallel", nn.Module)
    made = BucketSetting(bucket_cap_mb_list=[0.5], buckets=[["a"]], step_s=1.0, default_step_s=1.0)
    with pytest.raises(InputError, match="is unknown to this torch; torch 2.11 knows it; or plan a single cap"):
        ddp_arguments(config(tmp_path, ddp=made))


@needs_lists
def test_arguments_for_ddp(tmp_path: Path) -> None:
    base = {"buckets": [["a"]], "step_s": 1.0, "default_step_s": 1.0}
    for made, wanted in (
        (BucketSetting(**base), {}),
        (BucketSetting(bucket_cap_mb=7.0, **base), {"bucket_cap_mb": 7.0}),
        (BucketSetting(bucket_cap_mb_list=[0.5, 2.0], **base), {"bucket_cap_mb_list": [0.5, 2.0]}),
    ):
        assert ddp_arguments(config(tmp_path, ddp=made)) == wanted


def shard_before_the_group(rank: int) -> None:
    shard(nn.Linear(1, 1), "enforce.json")


def test_what_comes_before_attach_refuses_in_one_line(tmp_path: Path) -> None:
    config(tmp_path, sharding=ShardingSetting(kind="ddp", replicate=2))
    line = "error: enforce.json:world_size: is 2, but this job runs 1 process(es); start as many processes as planned, "
    assert as_job(1, tmp_path, shard_before_the_group) == [(2, "", f"{line}after init_process_group\n")]
    (tmp_path / "other").mkdir()
    line = "error: absent.json: no such file; give the path of an existing file\n"
    assert as_job(1, tmp_path / "other", ddp_arguments_of, "absent.json") == [(2, "", line)]


def ddp_arguments_of(rank: int, path: str) -> None:
    ddp_arguments(path)
