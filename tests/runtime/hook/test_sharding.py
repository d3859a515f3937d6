"""FSDP2 and HSDP as a plan says, in real processes: they train as one process would, whatever the batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import ddltool as dt
from ddltool.analyzers.answers.emitting.enforcement import to_enforcement
from ddltool.analyzers.answers.emitting.scripts import fsdp2_module
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.analyzers.step.costs.traced_lifetimes import lifetimes_of
from ddltool.analyzers.step.tracing.torch_adapter import trace_step
from ddltool.artifacts import save
from ddltool.errors import InputError
from ddltool.plans import Enforcement, Offloaded, PrefetchSetting, Recomputed, ShardingSetting
from ddltool.runtime import shard
from tests.helpers import sharding_workers
from tests.helpers.runtime_workers import Crew, crew, enforcement
from tests.helpers.sharding_workers import (
    Gpt,
    allocated_bytes,
    gpt,
    middling,
    offloaded,
    peak_bytes,
    refusal,
    train,
    train_normed,
)
from tests.job.planning.test_layouts import planner, problem

BLOCKS = [f"layers.{k}" for k in range(3)]
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
AGAIN = [Recomputed(module="layers.0"), Recomputed(module="layers.2", keeps=[0, 2])]
UNEVEN = [[[1, 4]], [[3, 2]], [[1, 4]]]


def config(
    folder: Path,
    sizes: list[int],
    kind: Any = "fsdp",
    replicate: int = 1,
    offload: bool = False,
    on_host: Sequence[Offloaded] = (),
) -> str:
    units = PrefetchSetting(units=BLOCKS, forward={BLOCKS[0]: BLOCKS[1:]}, backward={}, step_s=1, default_step_s=1)
    shape: Any = {"kind": kind, "replicate": replicate, "shard": len(sizes) // replicate, "offload": offload}
    sharding = ShardingSetting(**shape, checkpointing=AGAIN, on_host=list(on_host))
    save(enforcement(sizes, fsdp2=None if kind == "ddp" else units, sharding=sharding), folder / "enforce.json")
    return str(folder / "enforce.json")


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_uneven_batches_count_every_sample_once(tmp_path: Path, dtype: torch.dtype) -> None:
    for worst, _ in crew().run(train, config(tmp_path, [1, 4]), UNEVEN, dtype):
        assert worst < TOLERANCE[dtype]


def test_without_weights_they_are_far_off(tmp_path: Path) -> None:
    """It also shows that the test above can fail."""
    assert all(worst > 1e-3 for worst, _ in crew().run(train, config(tmp_path, [1, 4]), UNEVEN, torch.float64, False))


@pytest.mark.parametrize("steps", [[[[1, 2], [3, 2]], [[1, 1], [2, 1]]], [[[1, 4], [2, 2]]]], ids=["tail", "more"])
def test_passes_of_a_step_count_their_own_samples(tmp_path: Path, steps: list[list[list[int]]]) -> None:
    path = config(tmp_path, [1, 4])
    made = Enforcement.model_validate_json(Path(path).read_text())
    ranks = [rank.model_copy(update={"accumulation_steps": 1}) for rank in made.ranks]
    save(made.model_copy(update={"ranks": ranks}), Path(path))
    for worst, _ in crew().run(train, path, steps, torch.float64):
        assert worst < 1e-12


def test_a_state_on_the_host_trains_alike(tmp_path: Path) -> None:
    """Here device and host are one; what FSDP2 was told is seen of its parameters."""
    for planned in (False, True):
        path = config(tmp_path, [1, 4], offload=planned)
        for worst, _ in crew().run(train, path, UNEVEN, torch.float64):
            assert worst < 1e-12
        assert crew().run(offloaded, path) == [planned, planned]


@pytest.mark.parametrize(("kind", "replicate"), [("fsdp", 1), ("hsdp", 2), ("ddp", 2)])
def test_activations_on_the_host_train_alike(tmp_path: Path, kind: Any, replicate: int) -> None:
    """A block that is computed again, and one that is not; what arrives where is test_offloading's question."""
    away = [Offloaded(module=BLOCKS[0], until=BLOCKS[2]), Offloaded(module=BLOCKS[1], until=BLOCKS[2])]
    for worst, _ in crew().run(train, config(tmp_path, [1, 4], kind, replicate, on_host=away), UNEVEN, torch.float64):
        assert worst < 1e-12


def test_batch_norms_keep_their_type_in_mixed_precision(tmp_path: Path) -> None:
    """Of the runtime and of what is emitted; torch refuses statistics in float32 beside weights in bfloat16."""
    path, emitted = config(tmp_path, [4, 4]), tmp_path / "fsdp2_plan.py"
    made = Enforcement.model_validate_json(Path(path).read_text())
    assert made.sharding is not None
    assert made.fsdp2 is not None
    units = made.fsdp2.model_copy(
        update={"units": [*BLOCKS, "first.1"], "forward": {}}
    )  # of which one is a norm itself
    made = made.model_copy(update={"sharding": made.sharding.model_copy(update={"checkpointing": []}), "fsdp2": units})
    save(made, Path(path))
    found = dt.plan(f"{sharding_workers.__file__}:normed", devices="2xA100", precision="bf16", batch_size=8)
    sharded = {"sharding": made.sharding, "fsdp2": made.fsdp2}
    emitted.write_text(fsdp2_module(found.model_copy(update=sharded), gaps=[]))
    for module in (None, str(emitted)):
        for worst, types in crew().run(train_normed, path, module):
            assert worst < 0.02
            assert types == {torch.float32}


def test_ddp_is_a_sharding_too(tmp_path: Path) -> None:
    for worst, kinds in crew().run(train, config(tmp_path, [1, 4], "ddp", 2), UNEVEN, torch.float64):
        assert worst < 1e-12
        assert kinds[0] == "DistributedDataParallel"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sharding": None}, "sharding: is missing: the plan knew nothing of memory"),
        ({}, "fsdp2.units: the model has no module 'layers.1'"),
    ],
)
def test_what_does_not_fit_the_plan_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = config(tmp_path, [1, 4])
    made = Enforcement.model_validate_json(Path(path).read_text())
    save(made.model_copy(update=changes), Path(path))
    assert all(said in answer for answer in crew().run(refusal, path))


def test_other_processes_than_planned(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"world_size: is 2, but this job runs 1 process\(es\)"):
        shard(Gpt(), config(tmp_path, [1, 4]))
    with pytest.raises(ValueError, match="sharding is 2 x 1 processes, and world_size 3"):
        enforcement([1, 1, 1], sharding=ShardingSetting(kind="hsdp", replicate=2, shard=1))
    with pytest.raises(ValueError, match="fsdp is not 2 x 2"):
        ShardingSetting(kind="fsdp", replicate=2, shard=2)


@pytest.fixture(scope="module")
def four() -> Iterator[Crew]:
    """Four ranks for all cases."""
    ranks = Crew(4)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    ("size", "how", "kind"),
    [
        (2, "none", "zero1"),
        (2, "full", "ddp"),
        *(pytest.param(2, how, kind, marks=pytest.mark.slow) for how, kind in (("none", "ddp"), ("full", "zero1"))),
        *(pytest.param(4, how, kind, marks=pytest.mark.slow) for how in ("none", "full") for kind in ("ddp", "zero1")),
    ],
)
def test_whole_replicas_hold_what_is_predicted(kind: str, how: Any, size: int, request: pytest.FixtureRequest) -> None:
    """Of state and activations alike; nothing else than the profiler sees DDP's buckets."""
    ranks = request.getfixturevalue("four") if size == 4 else crew()
    for layers, samples in ((6, 1), (3, 16)):
        lifetimes = lifetimes_of(trace_step(lambda: gpt(layers, samples), mode="training"))  # noqa: B023
        saved_ops = lifetimes.every_block(how)
        ours = lifetimes.peak(Sharding.named(kind, size), "momentum", saved_ops).total_bytes
        assert ours == pytest.approx(min(ranks.run(allocated_bytes, kind, saved_ops, layers, samples)), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
@pytest.mark.parametrize("how", ["none", "selective", "full"])
def test_planned_and_emitted_layouts_train_as_one_process_in_the_predicted_memory(
    tmp_path: Path, four: Crew, kind: str, how: str
) -> None:
    """Uneven batches last: the mean over samples whatever the split."""
    layouts, asked = planner(16, "momentum", T4=1e6), problem(16, T4=4)  # slow enough that all four are worth it
    every, _ = layouts.search(asked, equal=True)
    found = next(
        it
        for it in every
        if (it.layout.sharding, it.layout.checkpointing) == (kind, how) and it.layout.reshard_after_forward
    )
    _, prefetch = layouts.communication(found)
    plan = layouts.plan(found, asked, "bsp").model_copy(update={"fsdp2": prefetch})
    assert plan.sharding is not None
    made = to_enforcement(plan, telemetry=None)
    path, emitted = tmp_path / "enforce.json", tmp_path / "fsdp2_plan.py"
    save(made, path)
    emitted.write_text(fsdp2_module(plan, gaps=[]))
    steps = [[[4, 4, 4, 4]]] * 3
    for dtype, tolerance in TOLERANCE.items():
        for module in (None, str(emitted)):
            for worst, _ in four.run(train, str(path), steps, dtype, True, middling, module):
                assert worst < tolerance
    for peak in four.run(peak_bytes, str(path)):
        assert peak == pytest.approx(plan.sharding.memory_bytes["T4"], rel=0.1)
    sizes = [1, 7, 3, 5]
    ranks = [rank.model_copy(update={"local_batch_size": size}) for rank, size in zip(made.ranks, sizes, strict=True)]
    save(made.model_copy(update={"ranks": ranks}), path)
    for worst, _ in four.run(train, str(path), [[sizes], [[2, 1, 4, 1]], [sizes]], torch.float32, True, middling):
        assert worst < 1e-6
