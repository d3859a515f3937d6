"""Training loops as people write them: each equals one process that sees all samples, or is refused in one line.

Uneven batches (12 and 20 of 32 for the hook and the balancer, 17 and 16 of 33 for the agent, in one pass and in two; and a
smaller last step), float64, two epochs; no third outcome.
"""

from __future__ import annotations

import re

import pytest

from tests import training_patterns
from tests.pattern_workers import IN_PASSES, PATTERNS, WAYS, outcome
from tests.runtime_workers import crew

TOLERANCE = {"bf16_autocast": 0.02}
PER_REPLICA = {
    *("batch_norm_and_dropout", "tensor_in_attribute", "tensors_in_list", "loss_with_a_mean_not_told"),
}
"""What DDP computes otherwise than one process, with equal batches as well."""
PER_PASS = {"layer_drop", "number_in_attribute", "number_in_namespace", "lbfgs"}
"""What depends on the number of passes."""
OWN = {
    *("own loader", "own loader turned", "loader made before", "loader before everything", "loader with its own order"),
    *("validation between updates", "validation with gradients", "loader made anew"),
    *("loader of a distributed sampler", "stream with data workers", "streams of the ranks' own", "one stream of two"),
}
"""Loaders of the script's own are the hook's alone: balancer and agent bring the loader."""
COUNT = r"^loss: is a mean over [\d.]+ terms for \d+ samples on rank 0, but over .*; weigh it by what it counts: \w+\.loss\("
SUM = r'^loss: is a sum over the batch, not a mean over its samples; say \w+\.loss\(loss, reduction="sum"'
COUPLED = (
    r"^loss: goes over all samples of a rank's batch \(\w+\), and one process would over .*, or say \w+\.loss\(loss\)"
)
UNKNOWN = r"^loss: what it is a mean over cannot be read from its graph \(\w+\); say \w+\.loss\(loss\) if it is a mean"
PAST = r"^backward: reaches the model's parameters past the wrapped model, so that nobody averages .*; call the wrapped"
LATE = r"^model: buffer module\.\w+, made in a forward pass,: differs between rank 0 .*; make it before"
HOOKED = r"^gradient of 0\.weight: is changed by a hook on each rank by itself, .*; change \.grad"
FROZEN = r"^optimizer: trains module\.0\.weight, which was frozen when DDP wrapped the model; unfreeze before"
SECOND = r"^optimizer: a second one \(\w+\) steps within agent\.batches, whose gradients nobody weighs; train one"
AHEAD = r"^agent\.batches: the next one was fetched before the first was trained on"
REFUSED = {
    "simclr": COUPLED,
    "loss_with_parameters": r"^optimizer: trains a parameter of shape \(3, 3\) that is not in the model: nobody averages it",
    "parameter_outside": r"^optimizer: trains a parameter of shape \(\) that is not in the model: nobody averages it",
    "late_unfreezing": FROZEN,
    "buffer_made_in_forward": LATE,
    **{("iterable_dataset", way): r"^dataset: is a Endless, an IterableDataset; give a map-style" for way in WAYS[1:]},
    "fixmatch equal unlabelled": COUNT,
    "variable lengths": COUNT,
    "bare sum": SUM,
    "compiled loss": UNKNOWN,
    "lazily made mean": LATE,
    "two losses one pass": r"^backward: comes again by one forward pass, whose gradients DDP averages once only; add the",
    "past the wrapper": PAST,
    "past the wrapper after a pass": PAST,
    "gradient penalty alone": PAST,
    "gradients clipped by hooks": HOOKED,
    "update within backward": HOOKED,
    "optimizer made after unfreezing": FROZEN,
    "second model not attached": r"^optimizer: trains a Linear beside the one that was attached to, whose losses nobody",
    ("second model not attached", "agent"): SECOND,
    "temperature of its own": r"^optimizer: trains a parameter of shape \(\) that is not in the model: nobody averages it",
    ("temperature of its own", "agent"): SECOND,
    "rates that differ": r"^learning rate: differs between rank 0 \([\d.]+\) and rank 1 \([\d.]+\); let what changes it",
    "short_rows": r"^model: embedding has max_norm, by which each rank changes rows of its own batch; leave it out",
    "code moved in a pass": r"^model: module\.code, changed by a forward pass,: differs between rank 0 .*; change it after",
    "norm of the gradient": COUNT,
    "gradients by hand": r"^backward: went past the weights of the ranks' batches; call loss\.backward\(\)",
    ("gradients by hand", "agent"): r"^optimizer\.step: came before the pass's backward; call agent\.backward\(loss\)",
    "one stream of two": r"^dataset: first sample of the stream: differs between rank 0 .* say that each has its own",
    ("fsdp2", "balance"): r"^model: is a FSDPSequential, not a DistributedDataParallel; give the model that",
    ("fsdp2", "agent"): r"^model: is a FSDPSequential, not a DistributedDataParallel; give the model that",
    **{(name, "agent"): SECOND for name in ("gan", "dcgan")},
    ("two optimizers", "agent"): SECOND,
    ("batch fetched ahead", "agent"): AHEAD,
    ("loss of two batches", "agent"): AHEAD,
    (
        "own loader turned",
        "hook",
    ): r"^forward: the batch cannot be counted by dimension 0 of the model's arguments \(6\)",
    (
        "gradients cleared in every pass",
        IN_PASSES,
    ): r"^gradients: were changed or cleared before the step's last pass; "
    r"clear and clip them where agent\.complete",
    **{
        f"loss: {name}": COUNT
        for name in (
            "over their weights",
            "weights of classes",
            "ignored",
            "hard ones",
            "constant divisor",
            "correlation",
        )
    },
    **{f"loss: {name}": SUM for name in ("sum", "sum of terms")},
    **{f"loss: {name}": UNKNOWN for name in ("root", "dice", "squared mean", "shares of experts")},
    **{f"loss: {name}": COUPLED for name in ("hardest", "variance", "softmax over the batch", "pairs")},
    ("loss: hardest", "agent"): COUNT,
}
TABLE = [
    (name, way)
    for way in WAYS
    for name in (*training_patterns.PATTERNS, *PATTERNS)
    if name not in PER_REPLICA and (way == "hook" or name not in OWN)
    # In passes a loop asks whether a step is complete.
    if way != IN_PASSES or (name in training_patterns.PATTERNS and name not in PER_PASS) or "every pass" in name
]


@pytest.mark.parametrize(
    ("name", "way"),
    [pytest.param(*each, marks=[pytest.mark.slow] if each[0] == "compiled loss" else []) for each in TABLE],
)
def test_a_pattern_is_right_or_refused(name: str, way: str) -> None:
    expected = REFUSED.get((name, way), REFUSED.get(name))
    for found in crew().run(outcome, name, way):
        if expected is None:
            assert isinstance(found, float), found
            assert found < TOLERANCE.get(name, 1e-6)
        else:
            assert isinstance(found, str), f"off by {found:.2g} of the way, not refused"
            assert "\n" not in found
            assert re.search(expected, found), found
