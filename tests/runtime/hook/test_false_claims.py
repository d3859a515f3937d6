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
from tests.helpers.pattern_workers import HOOK, TOTAL, Script, bare, data, each, net, trained
from tests.helpers.runtime_workers import crew
from tests.helpers.training_patterns import Tied, classified, every_token, sequences, tokens
from tests.helpers.unseen_loops import Experts, importance, with_kept_term

UPDATES, FOUND, EQUAL = 3, 1e-4, 1e-9
"""Of float64: what the comparison is sure to find, and what it takes for equal."""


def weights(batch: Any) -> Tensor:
    found: Tensor = batch[0][:, 0].abs()
    return found


def labelled(batch: Any) -> Tensor:
    """Return the labels, of which those of some samples are to be ignored."""
    found: Tensor = batch[1].masked_fill(batch[0][:, 0] > 0.5, -100)
    return found


def weighed(model: Any, batch: Any) -> Tensor:
    return (each(model(batch[0]), batch[1]) * weights(batch)).sum() / weights(batch).sum()


def losses(model: Any, batch: Any) -> Tensor:
    return each(model(batch[0]), batch[1])


def penalty(model: Any) -> Tensor:
    return 0.05 * torch.stack([value.square().sum() for value in bare(model).parameters()]).sum()


def gram(model: Any, batch: Any) -> Tensor:
    outputs = model(batch[0])
    return torch.einsum("ni,nj->ij", outputs, outputs).square().mean() / len(outputs) ** 2


def two(model: Any, batch: Any, first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> Tensor:
    outputs = model(batch[0])
    return first(F.cross_entropy(outputs, batch[1])) + second(outputs.square().mean())


def kept(model: Any, batch: Any, say: Any) -> Tensor:
    class Said:
        loss = staticmethod(say)

    term: Tensor = with_kept_term(model, batch, Said)
    return term


Claim = Callable[[Any, Any, Any], Tensor]
"""A loss as said, given the model, the batch and ``handle.loss``."""
AT_ONCE: dict[str, Claim] = {
    "nothing said": lambda model, batch, say: classified(model, batch),
    "a mean of what is coupled": lambda model, batch, say: say(classified(model, batch) + gram(model, batch)),
    "a spread of the batch as a mean": lambda model, batch, say: say(losses(model, batch).std()),
    "a term forgotten": lambda model, batch, say: two(model, batch, say, lambda term: term),
    "said twice": lambda model, batch, say: say(say(classified(model, batch))),
    "a term said twice": lambda model, batch, say: say(two(model, batch, say, lambda term: term)),
    "a term in an attribute": lambda model, batch, say: kept(model, batch, say),
}
BY_COMPARISON: dict[str, Claim] = {
    "a sum as a mean": lambda model, batch, say: say(losses(model, batch).sum() / 20),
    "a mean as a sum": lambda model, batch, say: say(classified(model, batch), reduction="sum"),
    "a mean as an average": lambda model, batch, say: say(classified(model, batch), reduction="average"),
    "a mean as a sum of what is counted": lambda model, batch, say: say(
        20 * classified(model, batch), count=len(batch[0]), reduction="sum"
    ),
    "a mean with the count 1": lambda model, batch, say: say(classified(model, batch), count=1),
    "the count of the other rank": lambda model, batch, say: say(
        classified(model, batch), count=max(TOTAL - len(batch[0]), 1)
    ),
    "the count squared": lambda model, batch, say: say(classified(model, batch), count=len(batch[0]) ** 2),
    "weights over their sum as samples": lambda model, batch, say: say(weighed(model, batch)),
    "ignored labels as samples": lambda model, batch, say: say(F.cross_entropy(model(batch[0]), labelled(batch))),
    "samples with the count of labels": lambda model, batch, say: say(
        classified(model, batch), count=(labelled(batch) >= 0).sum()
    ),
    "a penalty as a sum": lambda model, batch, say: (
        say(classified(model, batch)) + say(penalty(model), reduction="sum")
    ),
    "a term as an average": lambda model, batch, say: two(
        model, batch, say, lambda term: say(term, reduction="average")
    ),
    "the first half as samples": lambda model, batch, say: say(losses(model, batch)[: len(batch[0]) // 2].mean()),
    "a detached mean of the rank": lambda model, batch, say: (
        lambda found: say((found * (found / found.mean()).detach()).mean())
    )(losses(model, batch)),
    "tokens as samples": lambda model, batch, say: say(every_token(model, batch)),
    "samples as tokens": lambda model, batch, say: say(
        F.cross_entropy(model(batch[0]).mean(1), batch[0][:, 0]), count=tokens(batch)
    ),
    "a sum over tokens as a mean": lambda model, batch, say: say(every_token(model, batch) * tokens(batch) / 50),
}
RIGHT: dict[str, Claim] = {
    "a mean": lambda model, batch, say: say(classified(model, batch)),
    "a mean with its count": lambda model, batch, say: say(classified(model, batch), count=len(batch[0])),
    "a sum": lambda model, batch, say: say(losses(model, batch).sum() / 20, reduction="sum"),
    "weights with their sum": lambda model, batch, say: say(weighed(model, batch), count=weights(batch).sum()),
    "two terms": lambda model, batch, say: two(model, batch, say, say),
    "a penalty as an average": lambda model, batch, say: (
        say(classified(model, batch)) + say(penalty(model), reduction="average")
    ),
    "tokens with their count": lambda model, batch, say: say(every_token(model, batch), count=tokens(batch)),
}
CLAIMS = AT_ONCE | BY_COMPARISON | RIGHT


def told(rank: int, name: str) -> float | str:
    """Return how far the first updates' gradients are from one process's, over their largest; or the refusal."""
    seen = []
    for alone in (False, True):
        torch.manual_seed(11)
        updates: list[list[Tensor]] = []

        def after(optimizer: Any, updates: list[list[Tensor]] = updates) -> None:
            updates.append([value.grad.clone() for value in optimizer.param_groups[0]["params"]])
            optimizer.step()

        script = Script(HOOK, rank, alone=alone)
        model = Experts(importance, kept=True) if "attribute" in name else net()
        common: dict[str, Any] = {"model": model, "dataset": data()}
        if "tokens" in name:
            common = {"model": Tied().double(), "dataset": sequences(torch.float64)}
        try:
            trained(script, lambda *given: CLAIMS[name](*given[:2], given[2].loss), after=after, **common)
        except InputError as error:
            return str(error)
        seen.append(updates[:UPDATES])
    pairs = [pair for steps in zip(*seen, strict=True) for pair in zip(*steps, strict=True)]
    return max(float((one - two).abs().max()) for one, two in pairs) / max(float(two.abs().max()) for _, two in pairs)


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_false_claim_is_refused_in_the_first_steps(name: str) -> None:
    for found in crew().run(told, name):
        assert isinstance(found, str), f"off by {found:.2g}, not refused"
        assert "\n" not in found


@pytest.mark.parametrize("name", BY_COMPARISON)
def test_a_false_claim_is_found_by_a_comparison(name: str) -> None:
    for found in crew().run(told, name):
        assert isinstance(found, float), found
        assert found > FOUND


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_claim_is_equal_to_one_process(name: str) -> None:
    for found in crew().run(told, name):
        assert isinstance(found, float), found
        assert found < EQUAL
