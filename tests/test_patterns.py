"""Training loops as people write them: each equals one process that sees all samples, or is refused in one line.

Uneven batches (12 and 20 of 32, and a smaller last step), float64, two epochs; no third outcome.
"""

from __future__ import annotations

import re

import pytest

from tests.pattern_workers import PATTERNS, outcome
from tests.runtime_workers import crew

TOLERANCE = 1e-6
OWN = (
    *("own loader", "own loader turned", "loader made before", "loader before everything", "loader with its own order"),
    *("stream with data workers", "streams of the ranks' own", "one stream of two"),
)
"""Loaders of the script's own are the hook's alone: the balancer brings the loader."""
REFUSED = {
    "fixmatch equal unlabelled": r"^loss: is a mean over \d+ terms for 12 samples on rank 0, but over .*count=",
    "variable lengths": r"^loss: is a mean over 60 terms for 12 samples on rank 0, but over \d+ for 20",
    "bare sum": r'^loss: is a sum over the batch, not a mean over its samples; say \w+\.loss\(loss, reduction="sum"',
    "compiled loss": r"^loss: what it is a mean over cannot be read from its graph \(CompiledFunctionBackward\); say ",
    "lazily made mean": r"^model: buffer module.shift, made in a forward pass,: differs between rank 0 .*; make it before",
    "two losses one pass": r"^backward: comes again by one forward pass, whose gradients DDP averages once only; add the",
    "loss with parameters": r"^optimizer: trains a parameter of shape \(1, 1\) that is not in the model: nobody averages it",
    "late unfreezing": r"^optimizer: trains (module\.)?0\.weight, which was frozen when DDP wrapped the model; unfreeze before",
    ("iterable dataset", "balance"): r"^dataset: is a Stream, an IterableDataset; give a map-style dataset",
    "one stream of two": r"^dataset: first sample of the stream: differs between rank 0 .* say that each has its own",
    ("fsdp2", "balance"): r"^model: is a FSDPSequential; wrap it in DistributedDataParallel first",
    (
        "own loader turned",
        "hook",
    ): r"^forward: the batch cannot be counted by dimension 0 of the model's arguments \(6\)",
}


@pytest.mark.parametrize("way", ["hook", "balance"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "compiled" in name else []) for name in PATTERNS]
)
def test_a_pattern_is_right_or_refused(name: str, way: str) -> None:
    if name in OWN and way == "balance":
        pytest.skip("the balancer brings the loader")
    expected = REFUSED.get((name, way), REFUSED.get(name))
    for found in crew().run(outcome, name, way):
        if expected is None:
            assert isinstance(found, float), found
            assert found < TOLERANCE
        else:
            assert isinstance(found, str), f"off by {found:.2g} of the way, not refused"
            assert "\n" not in found
            assert re.search(expected, found), found
