"""Recorded steps against real ones: the same scripts, run on this machine's CPU under torch's own counters.

What differs for a good reason, and is made alike before it is compared:

- attention: CUDA's fused kernels and the CPU's have other names and other outputs beside the result, which are left out;
- recurrent layers: cuDNN has one op for all of them, the CPU many;
- dropout: ``native_dropout`` on CUDA; the real run takes it too (the CPU would take four other ops);
- autocast: its lists differ, so these scripts leave it where they do (norms in float32);
- what the host does in both: batches, counts of updates, values that are read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from tests.helpers.noted_steps import Notary, Step, compared, flops_compared
from tests.helpers.training_scripts import DISTRIBUTED, SCRIPTS

Pairs = Callable[..., tuple[Step, Step]]
RECURRENT = "LSTM"
FOR_EACH = [name for name in SCRIPTS if name != RECURRENT]


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    """Return what notes a script's step: the real one and the recorded one, of so many processes."""
    with Notary(tmp_path_factory.mktemp("steps")) as notary:
        yield cache(notary.pair)


@pytest.mark.parametrize("name", FOR_EACH)
def test_the_recorded_ops_are_the_real_ones(name: str, noted: Pairs) -> None:
    real, recorded = noted(SCRIPTS[name])
    assert len(real["calls"]) > 50
    assert compared(recorded["calls"]) == compared(real["calls"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_flops_are_those_that_torch_counts(name: str, noted: Pairs) -> None:
    real, recorded = noted(SCRIPTS[name])
    counted = flops_compared(real["flops"])
    assert sum(counted.values()) > 1e6
    if name == RECURRENT:  # one op of cuDNN's stands for many products, the gradient of the first state among them
        layers, batch, width = 2, 8, 96
        first_state = layers * 2 * batch * width * 4 * width
        assert sum(flops_compared(recorded["flops"]).values()) == sum(counted.values()) + first_state
    else:
        assert flops_compared(recorded["flops"]) == counted


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_peak_is_that_of_torch_s_tracker(name: str, noted: Pairs) -> None:
    real, recorded = noted(SCRIPTS[name])
    assert real["peak_bytes"] > 2**21
    assert recorded["peak_bytes"] == pytest.approx(real["peak_bytes"], rel=0.03)


def test_recurrent_layers_are_one_op_and_all_else_is_the_same(noted: Pairs) -> None:
    real, recorded = noted(SCRIPTS[RECURRENT])
    ops, real_ops = (Counter(map(json.dumps, compared(step["calls"]))) for step in (recorded, real))
    assert {name for name, _, _ in recorded["calls"]} >= {"recurrent", "recurrent_backward"}
    around = [op for op in ops if json.loads(op)[0].startswith(("embedding", "_log_softmax", "nll_loss", "_foreach"))]
    assert len(around) > 6
    assert {op: real_ops[op] for op in around} == {op: ops[op] for op in around}


def test_another_shape_another_op_or_another_order_is_seen(noted: Pairs) -> None:
    real, recorded = noted(SCRIPTS["averaged weights (EMA)"])
    product = next(place for place, (name, _, _) in enumerate(recorded["calls"]) if name == "addmm")
    wrong = json.loads(json.dumps(recorded["calls"]))
    wrong[product][1][1][0][0] += 1
    assert compared(wrong) != compared(real["calls"])
    assert compared(recorded["calls"][1:]) != compared(real["calls"])
    assert compared(recorded["calls"][::-1]) != compared(real["calls"])


@pytest.mark.parametrize(
    ("kind", "kinds"),
    [
        ("ddp", ["broadcast", "all_reduce"]),
        ("ddp-unused", ["broadcast", "all_reduce"]),
        ("ddp-static", ["broadcast", "all_reduce"]),
        ("zero", ["broadcast", "all_reduce"]),
        ("fsdp", ["all_gather", "reduce_scatter", "all_reduce"]),
        ("tp", ["all_reduce"]),
    ],
)
def test_two_processes_exchange_what_is_recorded_of_one(kind: str, kinds: list[str], noted: Pairs) -> None:
    real, recorded = noted(DISTRIBUTED, kind, world=2)
    assert {name for name, _ in real["exchanges"]} == set(kinds)
    assert recorded["exchanges"] == real["exchanges"]  # in order, with the bytes of each
    assert recorded["peak_bytes"] == pytest.approx(real["peak_bytes"], rel=0.03)
    assert flops_compared(recorded["flops"]) == flops_compared(real["flops"])
