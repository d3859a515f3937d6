"""Batches shared out by length: the same samples a step, each once an epoch, gradients of the whole batch, on resume too."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddltool.artifacts import save
from ddltool.errors import InputError
from ddltool.runtime import Lengths, attach
from ddltool.runtime.processes.batches import Sizes, VariableBatchSampler
from tests.helpers.length_workers import Sentences, counted, mean_error, padded, refusals, trained
from tests.helpers.runtime_workers import crew, enforcement


@pytest.fixture
def config(tmp_path: Path) -> str:
    save(enforcement([8, 8]), tmp_path / "enforce.json")
    return str(tmp_path / "enforce.json")


def samplers(
    lengths: Lengths | None, sizes: tuple[int, ...], samples: int, **options: Any
) -> list[VariableBatchSampler]:
    return [
        VariableBatchSampler(samples, Sizes(sizes, **options), rank, seed=1, lengths=lengths)
        for rank in range(len(sizes))
    ]


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 3), st.integers(0, 60), st.booleans())
def test_steps_have_the_samples_that_they_have_without_lengths(
    seed: int, ranks: int, passes: int, extra: int, is_padded: bool
) -> None:
    """Each once, in any pass of any rank; half-way the state goes on in other samplers."""
    chance = np.random.default_rng(seed)
    sizes = tuple((passes * chance.integers(1, 5, ranks)).tolist())
    samples = sum(sizes) * 2 + extra
    lengths = Lengths(chance.lognormal(5, 1.5, samples), padded=is_padded)
    plain = samplers(None, sizes, samples, passes=passes, least=passes)
    ours = samplers(lengths, sizes, samples, passes=passes, least=passes)
    assert [len(each) for each in ours] == [len(each) for each in plain]
    expected = [list(each) for each in plain]
    found: list[list[list[int]]] = []
    for sampler in ours:
        handed = iter(sampler)
        first = [next(handed) for _ in range(passes)]
        sampler.commit([sampler.issued.popleft() for _ in range(passes)][-1])
        resumed = VariableBatchSampler(
            samples, Sizes(sizes, passes=passes, least=passes), sampler.rank, seed=1, lengths=lengths
        )
        resumed.load_state_dict(sampler.state_dict())
        found.append([*first, *resumed])
    for step in range(len(expected[0]) // passes):
        at = slice(step * passes, (step + 1) * passes)
        parts = Counter(index for rank in expected for part in rank[at] for index in part)
        shared = Counter(index for rank in found for part in rank[at] for index in part)
        assert shared == parts
        assert all(part for rank in found for part in rank[at])
    assert [len(rank) for rank in found] == [len(rank) for rank in expected]


def test_ranks_cost_as_their_planned_batches() -> None:
    chance = np.random.default_rng(0)
    tokens = chance.lognormal(5, 0.8, 600).astype(int) + 1
    ours = samplers(Lengths(tokens, cost=(1, 1e-3)), (48, 16), 600)
    for fast, slow in zip(*ours, strict=True):
        costs = [(tokens[part] + 1e-3 * tokens[part] ** 2).sum() for part in (fast, slow)]
        assert costs[0] / costs[1] == pytest.approx(3, rel=0.05)
    taken = ours[0].issued[0]
    assert taken.share.total == 64
    assert taken.share.samples != 48
    assert not taken.share.even


@pytest.mark.parametrize(("way", "passes"), [("hook", 1), ("planned", 1), ("planned", 2)])
@pytest.mark.parametrize("options", [{}, {"padded": True, "cost": (1, 0.01, 2)}])
def test_gradients_are_those_of_whole_batches(
    config: str, tmp_path: Path, way: str, passes: int, options: dict[str, Any]
) -> None:
    if passes > 1:
        plain = enforcement([8, 8])
        ranks = [each.model_copy(update={"accumulation_steps": passes - 1}) for each in plain.ranks]
        save(plain.model_copy(update={"ranks": ranks}), tmp_path / "enforce.json")
    found = crew().run(trained, config, way, passes, options)
    assert max(each["error"] for each in found) < 1e-12
    assert len(found[0]["steps"]) == 7  # six of 16, the last of 7
    assert counted(found[0]["steps"]) == Counter(range(103))
    if not options:
        tokens = np.array([each["tokens"][:-1] for each in found])
        assert (np.ptp(tokens, axis=0) / tokens.mean(axis=0)).max() < 0.1
    assert len({*found[0]["sizes"]}) > 1


def test_means_over_samples_and_over_tokens_weigh_right(config: str) -> None:
    assert max(crew().run(mean_error, config)) < 1e-12


def test_lengths_that_are_none_are_refused_on_every_rank(config: str) -> None:
    cases: list[Any] = [[1, 2], [5] * 19 + [0], [5] * 19 + [float("nan")], ["a"] * 20, []]
    said = [
        "lengths: has 2 numbers for 20 samples; give one for each sample of the dataset, by index",
        "lengths[19]: is 0; give finite numbers above 0",
        "lengths[19]: is nan; give finite numbers above 0",
        "lengths: is a list; give one number for each sample",
        "lengths: has shape (0,); give one number for each sample",
    ]
    for answers in crew().run(refusals, config, cases):
        assert answers[:-1] == said
        assert answers[-1].startswith("lengths: differs between rank 0 (")
    with pytest.raises(InputError, match=r"^cost: has 1 numbers; give a, b and c of a L \+ b L\^2 \+ c$"):
        Lengths(Sentences(4).lengths, cost=[1.0])


def test_without_a_plan_lengths_change_nothing() -> None:
    data = Sentences(20)
    hook = attach(None, dataset=data)
    plain, given = (
        [batch.tolist() for batch, _ in hook.dataloader(batch_size=4, collate_fn=padded, **more)]
        for more in ({}, {"lengths": data.lengths})
    )
    assert given == plain
    assert len(plain) == 5
