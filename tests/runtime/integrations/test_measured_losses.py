"""What a loss is a mean over comes out of its values on parts of a batch."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from ddltool.errors import InputError
from ddltool.runtime.processes.job import DistributedJob

if find_spec("accelerate") is None:
    pytest.skip("needs accelerate", allow_module_level=True)
from ddltool.runtime.integrations.measured_losses import HALF_TOLERANCE, TOLERANCE, LossKinds

ROWS, LENGTH, WORDS = 6, 8, 11
Made = Callable[[Any, Any], Tensor]


class Computed:
    """A loss of logits that the batch brings along."""

    def __init__(self, made: Made, *, said: bool = False, half: bool = False, processes: int = 1) -> None:
        self.said, self.tolerance = said, HALF_TOLERANCE if half else TOLERANCE
        self._made, self._half, self._processes, self.calls = made, half, processes, 0

    def __call__(self, inputs: Any, items: Any, *, alone: bool = True) -> float:
        self.calls += 1
        if self._half:
            inputs["logits"] = inputs["logits"].bfloat16().float()
        return float(self._made(inputs, items)) * (1 if alone else self._processes)


def batch(*, uneven: bool = True, rows: int = ROWS, scale: float = 1.0) -> dict[str, Any]:
    """Texts with labels; ``uneven``: of 2 labels to all that there are; ``scale``: how far the logits lie from each other."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, WORDS, (rows, LENGTH), generator=generator)
    lengths = torch.linspace(2, LENGTH, rows).long()[:, None] if uneven else LENGTH
    labels = torch.where(torch.arange(LENGTH) < lengths, labels, -100)
    return {
        "logits": scale * torch.randn(rows, LENGTH, WORDS, generator=generator),
        "labels": labels,
        "mask": torch.tensor(1.0),
        "name": "text",
    }


def summed(inputs: Any, items: Any) -> Tensor:
    return F.cross_entropy(inputs["logits"].flatten(0, 1), inputs["labels"].flatten(), reduction="sum") / items


def of_labels(inputs: Any, items: Any) -> Tensor:
    return F.cross_entropy(inputs["logits"].flatten(0, 1), inputs["labels"].flatten())


def of_shifted(inputs: Any, items: Any) -> Tensor:
    return F.cross_entropy(inputs["logits"][:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())


def of_samples(inputs: Any, items: Any) -> Tensor:
    each = F.cross_entropy(inputs["logits"].transpose(1, 2), inputs["labels"], reduction="none")
    return (each.sum(1) / inputs["labels"].ne(-100).sum(1)).mean()


def squared(inputs: Any, items: Any) -> Tensor:
    return inputs["logits"].square().mean()  # type: ignore[no-any-return]


def pairs(inputs: Any, items: Any) -> Tensor:
    points = inputs["logits"].flatten(1)
    return F.cross_entropy(points @ points.T / 20, torch.arange(len(points)))


def pairs_divided(inputs: Any, items: Any) -> Tensor:
    return pairs(inputs, items) * len(inputs["labels"]) / items


def hardest(inputs: Any, items: Any) -> Tensor:
    each = F.cross_entropy(inputs["logits"].transpose(1, 2), inputs["labels"], reduction="none").sum(1)
    return each.topk(max(1, len(each) // 2)).values.mean()


def with_router(inputs: Any, items: Any) -> Tensor:
    return summed(inputs, items) + 0.1 * inputs["logits"].square().mean()


def broken_in_parts(inputs: Any, items: Any) -> Tensor:
    if len(inputs["labels"]) < ROWS:
        raise ValueError("image tokens do not match\nby far")
    return summed(inputs, 40 if items is None else items)


def kinds() -> LossKinds:
    return LossKinds(DistributedJob(rank=0, world_size=1, side=None), "say it")


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("items", [None, 40, torch.tensor(40)])
@pytest.mark.parametrize("scale", [0.02, 1.0])
@pytest.mark.parametrize(
    ("made", "kind"), [(of_labels, "labels"), (of_shifted, "shifted labels"), (of_samples, "samples")]
)
def test_means_are_told_apart(made: Made, kind: str, scale: float, items: Any, half: bool) -> None:
    """Also near the start of a training, where all labels' losses are almost alike, and whether or not a number is given."""
    assert kinds().kind(Computed(made, half=half), batch(scale=scale), items) == kind


@pytest.mark.parametrize(("made", "rows"), [(summed, 1), (summed, ROWS), (broken_in_parts, ROWS)])
def test_a_sum_is_divided(made: Made, rows: int) -> None:
    """One sample is enough to see that, and so is a model that cannot take parts of its batch."""
    assert kinds().kind(Computed(made), batch(rows=rows), 40) == "divided"


def test_a_loss_without_labels_is_a_mean_over_samples() -> None:
    inputs = {name: value for name, value in batch().items() if name != "labels"}
    assert kinds().kind(Computed(squared), inputs, None) == "samples"
    assert kinds().kind(Computed(squared), inputs | {"labels": torch.randn(ROWS)}, None) == "samples"


def test_kinds_are_told_apart_when_it_matters() -> None:
    """While all samples have as many labels nothing is measured again."""
    chosen = kinds()
    loss = Computed(of_labels)
    assert chosen.kind(loss, batch(uneven=False), None) == "samples"
    calls = loss.calls
    assert chosen.kind(loss, batch(uneven=False), None) == "samples"
    assert loss.calls == calls


def test_what_the_script_says_is_not_measured() -> None:
    loss = Computed(pairs, said=True)
    chosen = kinds()
    assert [chosen.kind(loss, batch(), None) for _ in range(3)] == ["said"] * 3
    assert loss.calls == 1


NEITHER = "is neither a sum divided by num_items_in_batch nor a mean over samples or labels; say it"


@pytest.mark.parametrize(
    ("loss", "items", "rows", "problem"),
    [
        (Computed(pairs), None, ROWS, NEITHER),
        (Computed(pairs_divided), 40, ROWS, NEITHER),
        (Computed(hardest), None, ROWS, NEITHER),
        (Computed(with_router), 40, ROWS, NEITHER),
        (Computed(summed, processes=2), 40, ROWS, NEITHER),
        (Computed(of_labels, processes=2), 40, ROWS, NEITHER),
        (Computed(of_labels, processes=3), 40, ROWS, NEITHER),
        (Computed(of_labels, processes=2), None, ROWS, NEITHER),
        (Computed(broken_in_parts), None, ROWS, r"cannot be .* \(ValueError: image tokens do not match\); say it"),
        (
            Computed(of_labels),
            None,
            1,
            "cannot be measured: it is 0 or not finite, or each rank has one sample; say it",
        ),
        (Computed(lambda *_: torch.tensor(0.0)), None, ROWS, "cannot be measured: it is 0"),
        (Computed(lambda *_: torch.tensor(torch.nan)), 40, ROWS, "cannot be measured: it is 0"),
    ],
)
def test_what_no_kind_fits_is_refused(loss: Computed, items: Any, rows: int, problem: str) -> None:
    with pytest.raises(InputError, match=f"^loss: {problem}"):
        kinds().kind(loss, batch(rows=rows), items)


class TwoRanks:
    """A job whose other rank tells ``told``."""

    def __init__(self, *told: tuple[float, ...]) -> None:
        self._told = [*told]

    def numbers(self, *own: float) -> list[list[float]]:
        return [[*own], [*self._told.pop(0)]]


def with_other(*told: tuple[float, ...]) -> LossKinds:
    return LossKinds(cast(DistributedJob, TwoRanks(*told)), "say it")


def test_one_rank_tells_what_another_cannot() -> None:
    """A rank with one sample goes by the other's; numbers: has the script said it, verdicts by kind."""
    assert with_other((0,), (-1, -1, 1, -1)).kind(Computed(of_labels), batch(rows=1), None) == "labels"
    with pytest.raises(InputError, match=NEITHER):
        with_other((0,), (-1, -1, 1, -1)).kind(Computed(of_samples), batch(), None)
    assert with_other((1,)).kind(Computed(of_labels), batch(), None) == "said"


def test_what_weighs_unlike_on_ranks_and_cannot_be_told_apart_is_refused() -> None:
    """Here all samples have 8 labels, and on the other rank, which has as many samples, they have 5."""
    first = (0,), (-1, 1, 1, -1), (ROWS, 5 * ROWS)
    with pytest.raises(
        InputError, match="^loss: may be a mean over samples or labels, which its values do not tell; say"
    ):
        with_other(*first, *first[:2]).kind(Computed(of_labels), batch(uneven=False), None)
