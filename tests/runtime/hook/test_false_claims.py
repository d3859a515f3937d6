"""Losses that are said to be what they are not, and what finds it: the hook in the first steps, or a comparison.

What is no matter of samples that depend on each other (a wrong count, a sum said as a mean) is not measured while a job runs:
``ddltool doctor --check`` compares the gradients of the first updates with one process's, and so do these tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ddltool.errors import InputError
from tests.helpers.pattern_cases import Experts, each, importance, squares, with_kept_term
from tests.helpers.pattern_workers import HOOK, Script, bare, net, trained
from tests.helpers.runtime_workers import crew
from tests.helpers.training_patterns import Tied, every_token, sequences, tokens

UPDATES, FOUND, EQUAL = 3, 1e-4, 1e-9
"""Of float64: what the comparison is sure to find, and what it takes for equal."""
ce, Claim = F.cross_entropy, Callable[..., Tensor]
"""A loss as said, given the model, the batch's tensors and ``handle.loss``."""


def weights(x: Tensor) -> Tensor:
    return x[:, 0].abs()


def labelled(x: Tensor, y: Tensor) -> Tensor:
    """Return the labels, of which those of some samples are to be ignored."""
    return y.masked_fill(x[:, 0] > 0.5, -100)


def weighed(m: Any, x: Tensor, y: Tensor) -> Tensor:
    return (each(m(x), y) * weights(x)).sum() / weights(x).sum()


def gram(m: Any, x: Tensor) -> Tensor:
    outputs = m(x)
    return torch.einsum("ni,nj->ij", outputs, outputs).square().mean() / len(outputs) ** 2


def two(m: Any, x: Tensor, y: Tensor, first: Any, second: Any = lambda term: term) -> Any:
    outputs = m(x)
    return first(ce(outputs, y)) + second(outputs.square().mean())


AT_ONCE: dict[str, Claim] = {
    "nothing said": lambda m, x, y, say: ce(m(x), y),
    "a mean of what is coupled": lambda m, x, y, say: say(ce(m(x), y) + gram(m, x)),
    "a spread of the batch as a mean": lambda m, x, y, say: say(each(m(x), y).std()),
    "a term forgotten": lambda m, x, y, say: two(m, x, y, say),
    "said twice": lambda m, x, y, say: say(say(ce(m(x), y))),
    "a term said twice": lambda m, x, y, say: say(two(m, x, y, say)),
    "a term in an attribute": with_kept_term,
}
BY_COMPARISON: dict[str, Claim] = {
    "a sum as a mean": lambda m, x, y, say: say(each(m(x), y).sum() / 20),
    "a mean as a sum": lambda m, x, y, say: say(ce(m(x), y), reduction="sum"),
    "a mean with the count 1": lambda m, x, y, say: say(ce(m(x), y), count=1),
    "ignored labels as samples": lambda m, x, y, say: say(ce(m(x), labelled(x, y))),
    "a penalty as a sum": lambda m, x, y, say: say(ce(m(x), y)) + say(0.05 * squares(bare(m)), reduction="sum"),
    "a detached mean of the rank": lambda m, x, y, say: say(((o := each(m(x), y)) * (o / o.mean()).detach()).mean()),
    "tokens as samples": lambda m, x, say: say(every_token(m, [x])),
}
RIGHT: dict[str, Claim] = {
    "a mean": lambda m, x, y, say: say(ce(m(x), y)),
    "a mean with its count": lambda m, x, y, say: say(ce(m(x), y), count=len(x)),
    "a sum": lambda m, x, y, say: say(each(m(x), y).sum() / 20, reduction="sum"),
    "weights with their sum": lambda m, x, y, say: say(weighed(m, x, y), count=weights(x).sum()),
    "two terms": lambda m, x, y, say: two(m, x, y, say, say),
    "a penalty as an average": lambda m, x, y, say: (
        say(ce(m(x), y)) + say(0.05 * squares(bare(m)), reduction="average")
    ),
    "tokens with their count": lambda m, x, say: say(every_token(m, [x]), count=tokens([x])),
}
CLAIMS = AT_ONCE | BY_COMPARISON | RIGHT


def told(rank: int, name: str) -> float | str:
    """Return how far the first updates' gradients are from one process's, over their largest; or the refusal."""
    seen = []
    common: dict[str, Any] = {"model": (lambda: Experts(importance, kept=True)) if "attribute" in name else net}
    if "tokens" in name:
        common = {"model": lambda: Tied().double(), "dataset": lambda: sequences(torch.float64)}
    for alone in (False, True):
        torch.manual_seed(11)
        updates: list[list[Tensor]] = []

        def after(optimizer: Any, updates: list[list[Tensor]] = updates) -> None:
            updates.append([value.grad.clone() for value in optimizer.param_groups[0]["params"]])
            optimizer.step()

        try:
            trained(Script(HOOK, rank, alone=alone), CLAIMS[name], after=after, **common)
        except InputError as error:
            return str(error)
        seen.append(updates[:UPDATES])
    pairs = [pair for steps in zip(*seen, strict=True) for pair in zip(*steps, strict=True)]
    return max(float((one - two).abs().max()) for one, two in pairs) / max(float(two.abs().max()) for _, two in pairs)


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_is_refused_found_by_a_comparison_or_right(name: str) -> None:
    for found in crew().run(told, name):
        if name in AT_ONCE:
            assert isinstance(found, str), f"off by {found:.2g}, not refused"
            assert "\n" not in found
        else:
            assert isinstance(found, float), found
            assert found > FOUND if name in BY_COMPARISON else found < EQUAL
