"""Expert parallelism, against arithmetic by hand on a small Qwen3 with experts."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.costs.expert_parallel import all_to_all_s, expert_names, share_experts
from ddltool.analyzers.step.costs.model import cost_model
from ddltool.analyzers.step.costs.parallel import ParallelCurve, parallel_curve
from ddltool.analyzers.step.costs.predict import predict
from ddltool.analyzers.step.costs.setting import ParallelDegrees, Placement, Setting
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.analyzers.step.costs.work import WorkCurve, measure_work
from ddltool.analyzers.step.tracing.factories import imported
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.transformers_models import NamedConfig, configured_step
from ddltool.errors import InputError
from ddltool.graph import SEND
from ddltool.links import parse_link, parse_nic
from ddltool.shipped import calibration, devices
from tests.conftest import Cli

BLOCKS, EXPERTS, CHOSEN, WIDTH, HIDDEN, TOKENS = 2, 8, 2, 64, 32, 16
EXPERT = 3 * WIDTH * HIDDEN  # elements of one expert: gate, up and down
FABRIC = Fabric(inside=parse_link("nvlink4"), between=parse_nic("8x400Gbit"), gpus_per_node=8)
SHAPE = {
    "hidden_size": WIDTH, "moe_intermediate_size": HIDDEN, "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN,
    "num_hidden_layers": BLOCKS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
}  # fmt: skip


@cache
def curve_of(kind: str = "qwen3_moe") -> WorkCurve:
    shape = SHAPE if kind == "qwen3_moe" else {name: SHAPE[name] for name in ("hidden_size", "num_hidden_layers")}
    config = imported("transformers", kind).AutoConfig.for_model(kind, **shape)
    return measure_work(lambda: configured_step(NamedConfig(config, kind, kind, kind, ""), TOKENS), Numerics("bf16"))


def parallel(experts: int) -> ParallelCurve:
    return ParallelCurve.of(curve_of(), ParallelDegrees(expert=experts), 1)


def row_of(experts: int, replicas: int = 8, **changed: Any) -> Any:
    layout = ParallelDegrees(expert=experts, **{key: changed.pop(key) for key in ("tensor",) if key in changed})
    per_node = changed.pop("per_node", 8)
    between = parse_nic(changed.pop("nic", "8x400Gbit"))
    fabric = Fabric(inside=FABRIC.inside, between=between, gpus_per_node=per_node)
    setting = Setting(fabric=fabric, layout=layout, optimizer="adamw", sharding=changed.pop("sharding", "zero1"))
    place = Placement(num_nodes=-(-replicas * layout.gpus // per_node), num_replicas=replicas, gpus=layout.gpus)
    curve = parallel_curve(changed.pop("curve", curve_of()), setting)
    return predict(
        curve, cost_model(devices().device("H100"), calibration()), setting, [changed.pop("batch", 4)], [place]
    )[0]


def test_experts_are_the_weights_of_grouped_products() -> None:
    names = expert_names(curve_of().traced)
    assert len(names) == 2 * BLOCKS  # gate and up in one, and down
    assert all(".experts." in name for name in names)
    assert not expert_names(curve_of("llama").traced)


@pytest.mark.parametrize("gpus", [2, 8])
def test_a_gpu_has_its_experts_and_computes_as_much(gpus: int) -> None:
    whole = parallel(1).traced.graph
    part = parallel(gpus).traced.graph
    sent = {name: graph.size_bytes[graph.kind == SEND].sum() for name, graph in (("whole", whole), ("part", part))}
    assert sent["whole"] - sent["part"] == pytest.approx(4 * BLOCKS * EXPERTS * EXPERT * (1 - 1 / gpus))
    assert part.flops.sum() == pytest.approx(whole.flops.sum(), rel=1e-6)
    products = [op for op, kind in enumerate(whole.op_type) if "grouped_mm" in kind]
    assert len(products) == BLOCKS * 2 * 3  # forward, and the gradients of inputs and weights
    # Each product reads or writes one of two weights, of which a part is left.
    moved = whole.size_bytes[products].sum() - part.size_bytes[products].sum()
    assert moved == pytest.approx(3 * 2 * BLOCKS * EXPERTS * EXPERT * (1 - 1 / gpus))


def test_a_block_sends_its_rows_there_and_back_in_both_passes() -> None:
    curve = curve_of().under(Sharding(kind="fsdp"))
    rank = share_experts(curve.traced, 4)
    assert all(exchange.of_experts for exchange in rank.exchanges)
    assert rank.exchanged_bytes(4) == [4 * TOKENS * CHOSEN * WIDTH * 2] * 4 * BLOCKS
    assert sum(exchange.op.startswith("backward") for exchange in rank.exchanges) == 2 * BLOCKS


def test_rows_cross_nodes_by_each_gpu_s_share_of_the_card() -> None:
    size = np.array([2.0**26])
    inside = all_to_all_s(FABRIC, 8, size)
    assert inside == pytest.approx(FABRIC.over(8).all_gather_s(size))
    across = all_to_all_s(FABRIC, 16, size)
    assert across == pytest.approx(FABRIC.between.latency_s + size / 2 / (FABRIC.between.bytes_per_s / 8))


def test_memory_is_that_of_a_gpu_s_experts_and_of_its_part_of_the_states() -> None:
    count = curve_of().traced.graph.meta["parameter_elements"]
    assert isinstance(count, int)
    experts, replicas = BLOCKS * EXPERTS * EXPERT, 8
    for gpus in (1, 2, 8):
        held = parallel(gpus).held(4, Sharding.named("zero1", replicas), "adamw")
        assert held is not None
        parts = held.peak().parts
        own = count - experts + experts / gpus
        assert parts["parameters"] == pytest.approx(2 * own)
        # Two moments and the float32 copy: replicas with the same experts share theirs.
        states = 12 * ((count - experts) / replicas + experts / gpus / max(1, replicas / gpus))
        assert parts["optimizer"] == pytest.approx(states)
    sharded = [parallel(gpus).held(4, Sharding.named("fsdp", replicas), "adamw") for gpus in (1, 4)]
    alone, shared = (held.peak().parts for held in sharded if held is not None)
    assert shared["optimizer"] == pytest.approx(
        alone["optimizer"], rel=0.01
    )  # of all replicas together there is one copy
    assert shared["gathered"] < alone["gathered"]


def test_a_step_pays_for_the_rows_and_saves_the_exchange_of_gradients() -> None:
    alone, shared = row_of(1, 16), row_of(8, 16)
    assert shared.peak_memory_bytes < alone.peak_memory_bytes
    assert shared.sync_time_s < alone.sync_time_s
    rows = [row_of(8, 16, nic="1Gbit", batch=256, per_node=per_node) for per_node in (8, 2)]
    passes_s = [row.step_time_s - row.sync_time_s for row in rows]
    assert passes_s[1] > 2 * passes_s[0]  # rows go over the nodes' cards


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"experts": 3, "replicas": 3}, "--expert-parallel: 3 GPUs do not divide 8 experts; give a divisor"),
        ({"experts": 2, "tensor": 2}, "--expert-parallel: experts that several replicas share are not modelled beside"),
        (
            {"experts": 2, "curve": "llama"},
            "--expert-parallel: llama has no experts in a grouped product; leave it out",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused_in_one_line(asked: dict[str, Any], line: str) -> None:
    if "curve" in asked:
        asked = {**asked, "curve": curve_of(asked["curve"])}
    with pytest.raises(InputError) as caught:
        row_of(**asked)
    assert str(caught.value).startswith(line)


def test_replicas_are_whole_groups_of_experts(cli: Cli) -> None:
    refused = cli("predict", "zoo:resnet32", "--device", "H100", "--replicas", "4,6", "--expert-parallel", "4")
    assert refused.error_line == (
        "--expert-parallel: 4 GPUs share the experts of 4, 6 replicas; give --replicas in multiples of it"
    )
