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
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.helpers import noted_steps
from tests.helpers.noted_steps import compared, flops_compared
from tests.helpers.training_scripts import SCRIPTS

Noted = dict[str, Any]
RECURRENT = "LSTM"
FOR_EACH = [name for name in SCRIPTS if name != RECURRENT]


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tuple[Noted, Noted]]]:
    """Return what notes a script's step: the real one and the recorded one."""
    folder = tmp_path_factory.mktemp("steps")
    with subprocess.Popen(
        [sys.executable, noted_steps.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as server:  # fmt: skip
        known: dict[str, tuple[Noted, Noted]] = {}

        def note(name: str) -> tuple[Noted, Noted]:
            if name not in known:
                known[name] = (ask("real", name), ask("recorded", name))
            return known[name]

        def ask(kind: str, name: str) -> Noted:
            assert server.stdin is not None
            assert server.stdout is not None
            script, out = folder / "train.py", folder / f"{kind}.json"
            script.write_text(SCRIPTS[name])
            server.stdin.write(json.dumps({"kind": kind, "script": str(script), "out": str(out)}) + "\n")
            server.stdin.flush()
            assert server.stdout.readline().strip() == "0", f"{name} did not run ({kind})"
            answer: Noted = json.loads(out.read_text())
            return answer

        yield note
        assert server.stdin is not None
        server.stdin.close()


@pytest.mark.parametrize("name", FOR_EACH)
def test_the_recorded_ops_are_the_real_ones(name: str, noted: Callable[[str], tuple[Noted, Noted]]) -> None:
    real, recorded = noted(name)
    assert len(real["calls"]) > 50
    assert compared(recorded["calls"]) == compared(real["calls"])


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_flops_are_those_that_torch_counts(name: str, noted: Callable[[str], tuple[Noted, Noted]]) -> None:
    real, recorded = noted(name)
    counted = flops_compared(real["flops"])
    assert sum(counted.values()) > 1e6
    if name == RECURRENT:  # one op of cuDNN's stands for many products, the gradient of the first state among them
        layers, batch, width = 2, 8, 96
        first_state = layers * 2 * batch * width * 4 * width
        assert sum(flops_compared(recorded["flops"]).values()) == sum(counted.values()) + first_state
    else:
        assert flops_compared(recorded["flops"]) == counted


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_peak_is_that_of_torch_s_tracker(name: str, noted: Callable[[str], tuple[Noted, Noted]]) -> None:
    real, recorded = noted(name)
    assert real["peak_bytes"] > 2**21
    assert recorded["peak_bytes"] == pytest.approx(real["peak_bytes"], rel=0.03)


def test_recurrent_layers_are_one_op_and_all_else_is_the_same(noted: Callable[[str], tuple[Noted, Noted]]) -> None:
    real, recorded = noted(RECURRENT)
    ops, real_ops = (Counter(map(json.dumps, compared(step["calls"]))) for step in (recorded, real))
    assert {name for name, _, _ in recorded["calls"]} >= {"recurrent", "recurrent_backward"}
    around = [op for op in ops if json.loads(op)[0].startswith(("embedding", "_log_softmax", "nll_loss", "_foreach"))]
    assert len(around) > 6
    assert {op: real_ops[op] for op in around} == {op: ops[op] for op in around}


def test_another_shape_another_op_or_another_order_is_seen(noted: Callable[[str], tuple[Noted, Noted]]) -> None:
    real, recorded = noted("averaged weights (EMA)")
    product = next(place for place, (name, _, _) in enumerate(recorded["calls"]) if name == "addmm")
    wrong = json.loads(json.dumps(recorded["calls"]))
    wrong[product][1][1][0][0] += 1
    assert compared(wrong) != compared(real["calls"])
    assert compared(recorded["calls"][1:]) != compared(real["calls"])
    assert compared(recorded["calls"][::-1]) != compared(real["calls"])
