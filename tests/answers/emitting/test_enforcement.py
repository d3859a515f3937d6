"""What each process is told to do, and what a target has no words for: device by device, and target by target."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddltool.analyzers.answers.emitting import enforcement
from ddltool.analyzers.answers.emitting.enforcement import not_expressed, to_enforcement
from ddltool.analyzers.answers.emitting.layout import plan_hash
from ddltool.errors import InputError
from ddltool.plans import Assignment, BucketSetting, Plan, PrefetchSetting

BLOCKS = [f"layers.{k}" for k in range(4)]


def plan(*rows: tuple[str, int, int], **changes: Any) -> Plan:
    """A plan with (device type, devices, samples per device)."""
    fields: dict[str, Any] = {
        "job": "mixed",
        "strategy": "lb-bsp",
        "max_workers": 4,
        "batch_size": 8,
        "iteration_s": 1.0,
        "throughput": 4.0,
        "assignments": [
            Assignment(device_type=name, devices=count, ests_per_device=0, local_batch_size=size)
            for name, count, size in rows
        ],
        "est_count": 0,
        "waste": 0.0,
        "overload_factor": 1.0,
        "status": "optimal",
        "gap": 0.0,
        "solve_seconds": 0.1,
    }
    return Plan(**(fields | changes))


@given(
    st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=4
    )
)
def test_every_rank_does_what_its_own_device_is_to_do(rows: list[tuple[int, int, int, int]]) -> None:
    """Device after device in the order of the assignments, counted one by one."""
    made = [
        Assignment(device_type=f"t{n}", devices=devices, ests_per_device=ests, local_batch_size=size, accumulation_steps=passes)
        for n, (devices, size, ests, passes) in enumerate(rows)
    ]  # fmt: skip
    given_plan = plan(assignments=made, est_count=sum(row[0] * row[2] for row in rows), max_workers=1, batch_size=1)
    enforced = to_enforcement(given_plan, telemetry="t.jsonl")
    wanted = []
    for row in made:
        for _ in range(row.devices):
            wanted.append(
                (len(wanted), row.device_type, row.ests_per_device, row.local_batch_size, row.accumulation_steps)
            )
    found = [
        (one.rank, one.device_type, one.ests, one.local_batch_size, one.accumulation_steps) for one in enforced.ranks
    ]
    assert found == wanted
    assert (enforced.world_size, enforced.total_batch_size) == (len(wanted), sum(row[3] for row in wanted))
    kept = ("job", "strategy", "parameters", "ddp", "fsdp2", "sharding", "superstep")
    assert [getattr(enforced, name) for name in kept] == [getattr(given_plan, name) for name in kept]
    assert (enforced.telemetry, enforced.plan_sha256) == ("t.jsonl", plan_hash(given_plan))


LAUNCHED = {"hook", "torchrun", "kubernetes", "slurm"}
FRAMEWORKS = {"torchtitan", "accelerate", "deepspeed"}
TARGETS = {*LAUNCHED, *FRAMEWORKS, "ddp", "fsdp2"}
BUCKETS = BucketSetting(bucket_cap_mb=1.0, buckets=[["x"]], step_s=1.0, default_step_s=2.0)
UNITS = PrefetchSetting(units=BLOCKS, forward={}, backward={}, step_s=1.0, default_step_s=2.0)
ALONE = {"device_type": "A", "devices": 1, "ests_per_device": 0, "local_batch_size": 1}
# What a plan has, what that is called, and who can say it.
SAID: tuple[tuple[Plan, str, set[str]], ...] = (
    (plan(("A", 2, 1)), "", TARGETS),
    (plan(("A", 2, 2)), "", TARGETS),
    (plan(("A", 2, 2), ("A", 1, 3)), "weights of uneven gradients", LAUNCHED),
    (plan(("A", 1, 1), parameters=[{"name": "x", "size_bytes": 4, "priority": 0}]), "order of parameters", LAUNCHED),
    (plan(("A", 1, 1), ddp=BUCKETS), "DDP buckets", {*LAUNCHED, "ddp"}),
    (plan(("A", 1, 1), ddp=BUCKETS, sharding={"kind": "fsdp"}), "", TARGETS),
    (plan(("A", 1, 1), fsdp2=UNITS), "FSDP2 units and prefetch", {*LAUNCHED, "fsdp2"}),
    (plan(("A", 1, 1), fsdp2=UNITS, sharding={"kind": "ddp"}), "", TARGETS),
    (plan(("A", 1, 1), run={"lora": 8}), "LoRA", set()),
    (plan(("A", 1, 1), sharding={"kind": "fsdp", "checkpointing": [{"module": "x"}]}), "", TARGETS),
    (plan(assignments=[ALONE | {"accumulation_steps": 1}]), "accumulation steps", {*FRAMEWORKS, "ddp", "fsdp2"}),
    (plan(assignments=[ALONE | {"ests_per_device": 2}], est_count=2, max_workers=2), "logical workers", set()),
    (plan(("A", 1, 1), ("B", 1, 1)), "device types", LAUNCHED),
)


@pytest.mark.parametrize(("made", "what", "able"), SAID)
def test_who_can_say_what(made: Plan, what: str, able: set[str]) -> None:
    for target in TARGETS:
        gaps = {gap.partition(":")[0] for gap in not_expressed(made, target)}  # type: ignore[arg-type]
        assert (what in gaps) == (bool(what) and target not in able), target
        assert gaps <= {what}


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), (2, 1), (2, 2)])
def test_who_runs_groups_of_devices(tensor: int, pipeline: int) -> None:
    made = plan(("A", 2, 2), group={"tensor": tensor, "pipeline": pipeline})
    able = {"torchtitan", "torchrun", "slurm", "kubernetes"}
    able |= set() if pipeline > 1 else {"accelerate", "deepspeed", "fsdp2"}
    writing = "torchtitan" if pipeline > 1 else "torchtitan, accelerate, deepspeed or fsdp2"
    for target in TARGETS:
        gaps = [gap.partition(":")[0] for gap in not_expressed(made, target)]  # type: ignore[arg-type]
        split = ["sequence parallelism"] if tensor > 1 and target != "torchtitan" else []
        assert gaps == (["parts of the model, batches and passes"] if target in LAUNCHED else split)
        if target in LAUNCHED:
            assert f"--target {writing} writes them" in not_expressed(made, target)[0]  # type: ignore[arg-type]
        if target in able:
            enforcement.demand_words_for_groups(made, target, "plan.json")  # type: ignore[arg-type]
            continue
        with pytest.raises(InputError, match=f"plan.json:group: .* --target {target} has no words; give") as refused:
            enforcement.demand_words_for_groups(made, target, "plan.json")  # type: ignore[arg-type]
        assert set(str(refused.value).rpartition("--target ")[2].replace(" or ", ", ").split(", ")) == able
    enforcement.demand_words_for_groups(plan(("A", 2, 2)), "ddp", "plan.json")


def test_more_processes_than_any_cluster_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InputError, match="are 100,001 devices; a configuration is written for at most 100,000 processes"
    ):
        to_enforcement(plan(("A", 100_001, 1)))
    monkeypatch.setattr(enforcement, "_MOST_RANKS", 3)
    assert to_enforcement(plan(("A", 3, 1))).world_size == 3
    with pytest.raises(InputError):
        to_enforcement(plan(("A", 4, 1)))
