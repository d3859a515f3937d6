"""Tensor and pipeline parallelism, against arithmetic by hand and transformers' own plans."""

from __future__ import annotations

import importlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.communication.program import program_of
from ddltool.analyzers.step.costs.memory import Recomputation
from ddltool.analyzers.step.costs.model import _OVERLAPPED, Exchanges, cost_model
from ddltool.analyzers.step.costs.parallel import (
    ParallelCurve,
    _order,
    in_flight_passes,
    parallel_curve,
    play,
    replica_group,
)
from ddltool.analyzers.step.costs.predict import predict
from ddltool.analyzers.step.costs.setting import ParallelDegrees, Placement, Setting
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.analyzers.step.costs.tensor_parallel import Rank, _Divider, rank_of
from ddltool.analyzers.step.costs.work import WorkCurve, measure_work
from ddltool.analyzers.step.tracing.factories import imported
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.step import TrainingStep, default_loss
from ddltool.analyzers.step.tracing.transformers_models import NamedConfig, configured_step
from ddltool.errors import InputError
from ddltool.links import parse_link, parse_nic
from ddltool.shipped import calibration, devices

WIDTH, HIDDEN, HEADS, BLOCKS, WORDS, TOKENS = 64, 256, 8, 4, 1000, 32
FABRIC = Fabric(inside=parse_link("nvlink4"), between=parse_nic("8x400Gbit"), gpus_per_node=8)


class Block(nn.Module):
    """A block as Megatron-LM splits it: queries, keys and values in one product."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.view(*part.shape[:2], HEADS, -1).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Language(nn.Module):
    """An embedding, blocks, and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(BLOCKS)), nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))


def language() -> TrainingStep:
    tokens = torch.zeros(2, TOKENS, dtype=torch.long)
    return TrainingStep(name="language", module=Language(), inputs=(tokens,), loss=lambda loss: loss)


@cache
def curve_of(precision: str = "bf16-pure") -> WorkCurve:
    return measure_work(language, Numerics(precision))  # type: ignore[arg-type]


@cache
def parallel(precision: str = "bf16-pure", **layout: Any) -> ParallelCurve:
    return ParallelCurve.of(curve_of(precision), ParallelDegrees(**layout), 1)


def setting(passes: int = 1, **changed: Any) -> Setting:
    layout = ParallelDegrees(
        **{
            name: changed.pop(name)
            for name in ("tensor", "pipeline", "sequence", "virtual", "overlapped")
            if name in changed
        }
    )
    return Setting(
        fabric=changed.pop("fabric", FABRIC), accumulation=passes, layout=layout, optimizer="adamw", **changed
    )


def row_of(batch: int = 8, replicas: int = 1, passes: int = 1, precision: str = "bf16-pure", **changed: Any) -> Any:
    """A predicted row on H100 in nodes of eight."""
    chosen = setting(passes, **changed)
    gpus = replicas * chosen.layout.gpus
    place = Placement(num_nodes=-(-gpus // 8), num_replicas=replicas, gpus=chosen.layout.gpus)
    curve = parallel_curve(curve_of(precision), chosen)
    return predict(curve, cost_model(devices().device("H100"), calibration()), chosen, [batch], [place])[0]


def rank(tensor: int, sequence: bool = False) -> Rank:
    curve = curve_of()
    return rank_of(curve.traced, curve.lifetimes(8).blocks, tensor, sequence=sequence)


# The schedule -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pipeline", "virtual", "passes"), [(1, 1, 5), (2, 1, 1), (4, 1, 8), (8, 1, 3), (2, 3, 4), (4, 2, 8)]
)
def test_the_bubble_of_even_stages_is_the_textbooks(pipeline: int, virtual: int, passes: int) -> None:
    pieces = pipeline * virtual
    end_s = play(np.full(pieces, 1.0 / virtual), np.full(pieces, 2.0 / virtual), pipeline, passes).max()
    assert end_s == pytest.approx(3.0 * (passes + (pipeline - 1) / virtual))


def test_a_slow_stage_sets_the_pace_and_a_transfer_is_waited_for() -> None:
    # Two stages of 1 + 2 and 2 + 4 s: the second works 6 s for each of three passes, after 1 s and before the first's 2 s.
    assert play(np.array([1.0, 2.0]), np.array([2.0, 4.0]), 2, 3).tolist() == [1 + 3 * 6 + 2, 1 + 3 * 6]
    # One pass crosses from one stage to the other and back: two transfers.
    assert play(np.array([1.0, 2.0]), np.array([2.0, 4.0]), 2, 1, transfer_s=0.5)[0] == 9.0 + 2 * 0.5


@pytest.mark.parametrize(("pipeline", "virtual", "passes"), [(1, 1, 3), (4, 1, 2), (4, 1, 9), (2, 2, 4), (4, 3, 8)])
def test_every_gpu_runs_each_pass_of_its_pieces_once_and_forward_first(
    pipeline: int, virtual: int, passes: int
) -> None:
    for stage in range(pipeline):
        order = _order(stage, pipeline, virtual, passes)
        pieces = range(stage, pipeline * virtual, pipeline)
        expected = {(way, piece, number) for way in (True, False) for piece in pieces for number in range(passes)}
        assert len(order) == len(expected)
        assert set(order) == expected
        assert all(order.index((True, *each[1:])) < order.index(each) for each in order if not each[0])
        running = np.cumsum([1 if is_forward else -1 for is_forward, _, _ in order]).max()
        assert in_flight_passes(stage, ParallelDegrees(pipeline=pipeline, virtual=virtual), passes) == running / virtual


# The work of a rank -----------------------------------------------------------------------------------------------------


def test_a_block_exchanges_its_tokens_twice_forward_and_twice_backward() -> None:
    found = rank(4)
    token_bytes = 8 * TOKENS * WIDTH * 2
    loss_bytes = 8 * TOKENS * 4
    # Also what the embedding gives, the head's gradient, and three numbers a token of the loss.
    assert sorted(found.exchanged_bytes(8)) == [loss_bytes] * 3 + [token_bytes] * (4 * BLOCKS + 2)
    forward = [exchange.op.split("/")[1] for exchange in found.exchanges if exchange.op.startswith("forward/blocks")]
    assert forward == [f"blocks.{block}.{name}" for block in range(BLOCKS) for name in ("out", "down")]


@pytest.mark.parametrize("tensor", [2, 8])
def test_products_and_weights_are_divided_by_the_ranks(tensor: int) -> None:
    whole, own = curve_of().traced.at(8), rank(tensor).traced.at(8)
    products = whole.gemm[:, 1] > 0
    assert own.gemm[products].prod(axis=1) == pytest.approx(whole.gemm[products].prod(axis=1) / tensor)
    assert own.flops[products] == pytest.approx(whole.flops[products] / tensor)
    whole_bytes = {name: float(size) for name, size in zip(whole.parameter, whole.size_bytes, strict=True) if name}
    own_bytes = {name: float(size) for name, size in zip(own.parameter, own.size_bytes, strict=True) if name}
    for name, size in whole_bytes.items():
        replicated = "norm" in name or name.endswith(("out.bias", "down.bias"))
        assert own_bytes[name] == (size if replicated else size / tensor), name


def test_columns_and_rows_are_told_apart_by_the_side_of_a_product_that_shrinks() -> None:
    whole, own = curve_of().traced.at(8), rank(2).traced.at(8)
    by_module = {
        name.split("/")[1]: (whole.gemm[op] / own.gemm[op]).tolist()
        for op, name in enumerate(whole.names)
        if name.startswith("forward/blocks.0") and whole.gemm[op, 1] and "attention" not in whole.op_type[op]
    }
    columns, rows = [1, 1, 2, 1], [1, 1, 1, 2]
    assert by_module == {"blocks.0.qkv": columns, "blocks.0.out": rows, "blocks.0.up": columns, "blocks.0.down": rows}


def test_with_sequence_parallelism_norms_move_their_share_of_the_tokens() -> None:
    plain, shared = (rank(2, sequence).traced.at(8) for sequence in (False, True))
    norms = [op for op, kind in enumerate(plain.op_type) if kind.startswith("aten.native_layer_norm")]
    assert len(norms) == 2 * (2 * BLOCKS + 1)
    assert (shared.written_bytes[norms] < 0.6 * plain.written_bytes[norms]).all()
    products = plain.gemm[:, 1] > 0
    assert shared.gemm[products].tolist() == plain.gemm[products].tolist()


def test_a_device_waits_for_what_products_do_not_hide() -> None:
    """Worked by hand: collectives of 4 s and 8 s, of which half run beside the products before them half beside those after."""
    exchanges = Exchanges(seconds=np.zeros(5), overlapped_s=np.array([0.0, 4.0, 0.0, 8.0, 0.0]), pieces=4)
    op_s, ops = np.array([1.0, 6.0, 1.0, 2.0, 6.0]), ["aten.add", "aten.mm", "aten.add", "aten.mm", "aten.mm"]
    hidden_s = _OVERLAPPED * 3 / 4 * np.array([0.0, 2.0, 0.0, 2.0 + 4.0, 0.0])
    assert exchanges.waits_s(op_s, ops) == pytest.approx(np.array([0.0, 2.0, 0.0, 6.0 + 4.0, 0.0]) - hidden_s)
    alone = replace(exchanges, overlapped_s=None, seconds=np.arange(5.0))
    assert alone.waits_s(op_s, ops).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("pipeline", [1, 2])
def test_asynchronous_exchanges_shorten_the_step_by_a_part_of_their_time(pipeline: int) -> None:
    how = {"batch": 512, "tensor": 4, "sequence": True, "pipeline": pipeline, "passes": 2, "compile": True}
    plain, overlapped = row_of(**how), row_of(**how, overlapped=True)
    slow_links = replace(FABRIC, inside=parse_link("pcie3"))
    assert overlapped.step_time_s < plain.step_time_s
    assert overlapped.peak_memory_bytes == plain.peak_memory_bytes
    # Slow links take longer than all products, so that they can hide no more than their own time.
    behind, beside = (row_of(**how, fabric=slow_links, overlapped=each) for each in (False, True))
    assert behind.step_time_s > beside.step_time_s > plain.step_time_s


SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mixtral"])
def test_split_weights_are_those_of_transformers_own_plan(name: str) -> None:
    config = imported("transformers", name).AutoConfig.for_model(name, **SMALL, head_dim=16)
    curve = measure_work(lambda: configured_step(NamedConfig(config, name, name, name, ""), 32), Numerics("bf16-pure"))
    divider = _Divider(curve.traced, curve.lifetimes(2).blocks, 2, False)
    divider.rank()
    ways = {"columns": ("colwise", "packed_colwise"), "rows": ("rowwise",)}
    plan = {pattern: way for pattern, way in config.base_model_tp_plan.items() if way in sum(ways.values(), ())}
    found = {divider.parameters[node]: way for node, way in divider.split.items() if way in ways}
    for weight, way in found.items():
        pattern = (
            weight.removeprefix("model.")
            .removesuffix(".weight")
            .replace("layers.0", "layers.*")
            .replace("layers.1", "layers.*")
        )
        assert plan[pattern] in ways[way], weight
    assert len(found) == 2 * len(plan)


# Memory -----------------------------------------------------------------------------------------------------------------


def parts_of(precision: str, replicas: int = 1, sharding: str = "ddp", **layout: Any) -> dict[str, float]:
    """Bytes by part of a process of the fullest stage, at the fullest place."""
    curve = replace(parallel(precision, **layout), passes=layout.get("pipeline", 1))
    held = curve.held(8, Sharding.named(sharding if replicas > 1 else "none", replicas), "adamw")
    assert held is not None
    return held.peak().parts


def test_parameters_gradients_and_states_are_divided_by_the_ranks() -> None:
    block = 12 * WIDTH * WIDTH + 2 * 2 * WIDTH  # four products of 12 widths squared; norms
    split_biases, whole_biases = 3 * WIDTH + HIDDEN, 2 * WIDTH
    for tensor in (1, 2, 4):
        divided = (BLOCKS * (12 * WIDTH * WIDTH + split_biases) + 2 * WORDS * WIDTH) / tensor
        whole = BLOCKS * (2 * 2 * WIDTH + whole_biases) + 2 * WIDTH
        count = divided + whole
        assert block == 12 * WIDTH * WIDTH + 4 * WIDTH
        parts = parts_of("bf16", tensor=tensor)
        assert parts["parameters"] == pytest.approx(2 * count)  # bfloat16
        assert parts["optimizer"] == pytest.approx(12 * count)  # float32: two moments and what is updated
        assert 4 * count <= parts["gradients"] <= 4 * count + 2 * 2 * 2 * WORDS * WIDTH  # and those just made
        assert parts_of("bf16", 4, "zero1", tensor=tensor)["optimizer"] == pytest.approx(12 * count / 4)


def test_fp16_sums_half_gradients_and_pure_types_keep_no_copy() -> None:
    states = {name: parts_of(name, tensor=2) for name in ("bf16", "fp16", "bf16-pure")}
    assert states["fp16"]["optimizer"] == states["bf16"]["optimizer"]
    assert states["fp16"]["gradients"] < 0.8 * states["bf16"]["gradients"]
    assert states["bf16-pure"]["optimizer"] == pytest.approx(states["bf16"]["optimizer"] / 3)  # 2 x 2 of 12 bytes


def test_stages_share_the_parameters_and_hold_micro_batches_in_flight() -> None:
    whole = parallel(tensor=1)
    curve = replace(parallel(pipeline=4), passes=8)
    stages = curve._stages_at(8)
    size = stages.lifetimes.sizes(curve.scaled(8))
    assert stages.parameter_bytes(size).sum() == pytest.approx(parts_of("bf16-pure", tensor=1)["parameters"])
    plain = Recomputation(stages.lifetimes, {})
    held = [stages.held(stage, plain, Sharding(kind="none"), "adamw", size, 8) for stage in range(4)]
    alone = [stages.held(stage, plain, Sharding(kind="none"), "adamw", size, 1) for stage in range(4)]
    in_flight = [many.peak().total_bytes - one.peak().total_bytes for many, one in zip(held, alone, strict=True)]
    # The stages' blocks save alike: three, two, one and no more micro-batches than one.
    assert in_flight[3] == 0.0
    assert in_flight[1] == pytest.approx(2 * in_flight[2])
    assert in_flight[0] == pytest.approx(3 * in_flight[2], rel=0.05)
    activations = whole.lifetimes(8).activations(
        Recomputation(whole.lifetimes(8), {}), whole.lifetimes(8).sizes(whole.scaled(8))
    )
    saved = float(activations[whole.lifetimes(8).backward])
    assert in_flight[2] == pytest.approx(saved / 4, rel=0.4)  # a fourth of the blocks, without the head's logits


def test_checkpoints_and_sequence_parallelism_save_memory() -> None:
    kept, shared = row_of(tensor=4), row_of(tensor=4, sequence=True)
    again = row_of(tensor=4, checkpointing="full")
    assert shared.peak_memory_bytes < kept.peak_memory_bytes
    assert again.peak_memory_bytes < kept.peak_memory_bytes
    assert again.step_time_s > kept.step_time_s


# Steps ------------------------------------------------------------------------------------------------------------------


def test_a_layout_of_one_gpu_is_todays_prediction() -> None:
    curve, plain = curve_of("bf16"), setting()
    assert parallel_curve(curve, plain) is curve
    assert row_of(precision="bf16") == row_of(precision="bf16", tensor=1, pipeline=1)


def test_a_pure_step_on_one_gpu_is_the_same_by_both_ways() -> None:
    # Nothing is cast and nothing exchanged: only the sums over passes and what the host waits for differ.
    chosen, model = setting(), cost_model(devices().device("H100"), calibration())
    curve = parallel()
    graph = curve.timed(8, model, chosen)
    place = Placement(num_nodes=1, num_replicas=1)
    time = curve.step_time(graph, program_of(graph), model, chosen, place, 8)
    assert time.passes_s == pytest.approx(program_of(graph).compute_s, rel=0.05)
    assert curve_of().timed(8, model, chosen).duration_s.tolist() == graph.duration_s.tolist()


def test_more_of_anything_takes_no_less_and_a_faster_network_no_more() -> None:
    steps = [row_of(passes=passes, pipeline=2).step_time_s for passes in (1, 2, 4)]
    assert steps == sorted(steps)
    assert steps[2] < 4 * steps[0]  # the bubble is paid once
    batches = [row_of(batch=batch, tensor=2, pipeline=2, passes=4).step_time_s for batch in (8, 64, 512)]
    assert batches == sorted(batches)
    memory = [row_of(tensor=tensor).peak_memory_bytes for tensor in (2, 4, 8)]
    assert memory == sorted(memory, reverse=True)
    apart = replace(setting(4, tensor=8, pipeline=2), fabric=replace(FABRIC, between=parse_nic("10Gbit")))
    place = Placement(num_nodes=2, num_replicas=1, gpus=16)
    model, curve = cost_model(devices().device("H100"), calibration()), parallel_curve(curve_of(), apart)
    slow, fast = (
        predict(curve, model, each, [64], [place])[0].step_time_s for each in (apart, replace(apart, fabric=FABRIC))
    )
    assert fast < slow


def test_replicas_of_a_tensor_group_share_the_cards_of_a_node() -> None:
    # Four replicas of tensor groups of 8 lie on four nodes, and eight groups use a node's cards at once.
    group = replica_group(FABRIC, ParallelDegrees(tensor=8), 4, Sharding(kind="ddp"))
    assert group.nodes == 4  # type: ignore[attr-defined]
    size = 2.0**30
    one_card = replace(
        FABRIC, gpus_per_node=1, between=replace(FABRIC.between, bytes_per_s=FABRIC.between.bytes_per_s / 8)
    )
    assert group.all_reduce_s(size) == one_card.over(4).all_reduce_s(size)
    # Two replicas of groups of 4 are on one node, where nothing is shared.
    inside = replica_group(FABRIC, ParallelDegrees(tensor=4), 2, Sharding(kind="ddp"))
    assert inside.all_reduce_s(size) == pytest.approx(FABRIC.over(2).all_reduce_s(size))


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2", "fsdp"])
def test_every_sharding_of_the_replicas_has_a_step_and_its_memory(sharding: str) -> None:
    alone, four = row_of(tensor=2, pipeline=2), row_of(tensor=2, pipeline=2, replicas=4, sharding=sharding)
    assert four.num_gpus == 16
    assert (four.num_replicas, four.tensor_parallel, four.pipeline_parallel) == (4, 2, 2)
    assert four.sync_time_s > alone.sync_time_s == 0.0
    assert (four.peak_memory_bytes < alone.peak_memory_bytes) == (sharding != "ddp")


# Refusals ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({"tensor": 3}, "--tensor-parallel: 3 ranks do not divide 8 heads of attention; give a divisor of 8"),
        ({"tensor": 16}, "--tensor-parallel: 16 ranks do not divide 8 heads of attention"),
        ({"pipeline": 3}, "--pipeline-parallel: 3 stages of 4 blocks; give a divisor of 4"),
        ({"pipeline": 2, "virtual": 4, "passes": 2}, "--virtual-stages: 8 stages of 4 blocks; give a divisor of 4"),
        ({"pipeline": 2, "virtual": 2, "passes": 3}, "--virtual-stages: 2 of 2 GPUs in 3 passes"),
        ({"tensor": 2, "overlapped": True}, "--async-tensor-parallel: divides reduce-scatters and all-gathers"),
        ({"sequence": True}, "--sequence-parallel: shares tokens within a tensor group of 1"),
        ({"tensor": 2, "checkpointing": "1GiB"}, "--checkpointing: no budget is kept stage by stage"),
        ({"tensor": 2, "sharding": "fsdp:cpu"}, "--sharding: 'fsdp:cpu' beside tensor or pipeline parallelism is not"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(asked: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as caught:
        row_of(**asked)
    assert str(caught.value).startswith(line)


def test_a_model_without_blocks_cannot_be_spread() -> None:
    plain = measure_work(
        lambda: TrainingStep(name="plain", module=nn.Linear(8, 2), inputs=(torch.zeros(2, 8),), loss=default_loss)
    )
    for layout, where in (
        (ParallelDegrees(tensor=2), "--tensor-parallel"),
        (ParallelDegrees(pipeline=2), "--pipeline-parallel"),
    ):
        with pytest.raises(InputError, match=f"{where}: .*no list of blocks"):
            parallel_curve(plain, replace(setting(), layout=layout))


@pytest.fixture
def truth(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script that compares with published steps."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "benchmarks"))
    return importlib.import_module("truth_parallel")


def test_layouts_are_apart_where_the_range_of_a_prediction_does_not_span_them(truth: Any) -> None:
    """Of four layouts of one job two were measured twice as fast as the others, one of which is predicted to be fastest."""
    steps = ((1.0, 1.1), (1.1, 1.3), (2.0, 1.0), (2.2, 2.3))
    pairs = [truth.Pair(group="", strategy="", measured_s=m, predicted_s=p, job=("a",)) for m, p in steps]
    again = [truth.Pair(group="", strategy="", measured_s=2.4, predicted_s=2 * 2.3, samples=2, job=("a",))]
    alone = [truth.Pair(group="", strategy="", measured_s=9.0, predicted_s=9.0, job=("b",))]
    assert truth.Ranking.of([*pairs, *again, *alone]) == truth.Ranking(jobs=1, apart=4, right=2, lost=(2.0,))
    assert truth.range_ratio() == pytest.approx(1.4, abs=0.05)


@pytest.mark.slow
def test_published_layouts_are_ranked_as_they_were_measured(truth: Any, shared_data: Path) -> None:
    for read, apart in ((truth.vtrain, 2500), (truth.simumax, 6)):
        ranking = truth.Ranking.of(list(read(shared_data)))
        assert ranking.apart >= apart
        assert ranking.right >= 0.99 * ranking.apart
        assert np.median(ranking.lost) < 1.02
    dense = [pair for pair in truth.nemo(shared_data) if pair.group.startswith("Llama")]  # others are releases apart
    assert max(truth.Ranking.of(dense).lost) < 1.05
