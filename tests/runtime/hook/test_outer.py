"""Outer steps against the recurrence written out in one process, in float64; on resume, and as islands come and go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ddltool.errors import InputError
from ddltool.runtime import OuterSteps, attach, island_group
from ddltool.runtime.hook.rounding import BLOCK, packed_bits, unpacked
from tests.helpers.island_workers import (
    batch,
    changing,
    furthest,
    inner_of,
    inside,
    losing,
    made,
    refusals,
    sharded,
    step,
    trained,
    values,
    written_out,
)
from tests.helpers.processes import free_port
from tests.helpers.runtime_workers import crew

PARTS = ((0, 1), (2,), (3, 4, 5))
"""Of the six parameters, of 21, 7, 35, 5, 10 and 2 numbers, three runs of about one size."""
STREAMING = {"every": 5, "fragments": 3, "overlap": 2, "mixing": 0.3}


def agree(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    assert max(furthest(one, other) for one, other in zip(found, expected, strict=True)) < 1e-12


def test_averages_in_every_step_are_data_parallel_training() -> None:
    """H = 1, SGD outside with learning rate 1: one process that averages the gradients of both batches in each step."""
    found = crew().run(trained, 20, None, {"every": 1, "optimizer": (1.0, 0.0)}, "sgd")
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(1, 21):
        optimizer.zero_grad()
        for island in range(2):
            (model(batch(island, number)).square().sub(1).square().mean() / 2).backward()
        optimizer.step()
    agree(found, [values(model)] * 2)


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"every": 4}, ((0, 1, 2, 3, 4, 5),)),
        ({"every": 4, "optimizer": (1.0, 0.0)}, ((0, 1, 2, 3, 4, 5),)),
        ({"every": 5, "fragments": 3}, PARTS),
        (STREAMING, PARTS),
        ({**STREAMING, "overlap": 4, "mixing": 0.0}, PARTS),  # two fragments on their way at once
        ({"every": 3, "overlap": 1, "weights": (3.0, 1.0)}, ((0, 1, 2, 3, 4, 5),)),
    ],
)
def test_outer_steps_are_the_recurrence_written_out(
    settings: dict[str, Any], parts: tuple[tuple[int, ...], ...]
) -> None:
    found = crew().run(trained, 23, None, settings)
    written = {name: value for name, value in settings.items() if name != "fragments"}
    agree(found, written_out(2, 23, parts=parts, **written))


@pytest.mark.parametrize("resume_at", [10, 14, 15])
def test_resumed_training_is_the_uninterrupted_one(resume_at: int) -> None:
    """In the middle of a round, with two fragments on their way, and with one."""
    settings = {**STREAMING, "overlap": 4}
    found = crew().run(trained, 23, resume_at, settings)
    agree(found, crew().run(trained, 23, None, settings))


def test_an_island_hands_the_average_on_and_islands_are_jobs_of_their_own() -> None:
    agree(crew().run(inside, free_port(), 9, 3), written_out(2, 9, every=3))


def test_shards_of_fsdp2_take_outer_steps_by_themselves() -> None:
    agree(crew().run(sharded, 9, 3), written_out(1, 9, every=3) * 2)


def test_islands_leave_and_join_between_outer_steps() -> None:
    """H = 4 by hand: both; then island 0 alone; then both again from its outer parameters, island 1 with H = 2."""
    one, other = crew().run(changing, free_port())
    rate, momentum = 0.5, 0.5

    def inner(start: list[torch.Tensor], island: int, numbers: range) -> list[torch.Tensor]:
        model = made()
        with torch.no_grad():
            for value, given in zip(model.parameters(), start, strict=True):
                value.copy_(given)
        optimizer = inner_of(model, "sgd")
        for number in numbers:
            step(model, optimizer, batch(island, number))
        return values(model)

    outer = values(made())
    kept = [torch.zeros_like(value) for value in outer]
    seen = {}
    for name, rounds in (
        ("together", ((0, range(1, 5)), (1, range(1, 5)))),
        ("alone", ((0, range(5, 9)),)),
        ("after", ((0, range(9, 13)), (1, range(9, 11)))),
    ):
        ends = [inner(outer, island, numbers) for island, numbers in rounds]
        for place, value in enumerate(outer):
            gradient = sum((value - end[place] for end in ends), torch.zeros_like(value)) / len(ends)
            kept[place] = momentum * kept[place] + gradient
            outer[place] = value - rate * (gradient + momentum * kept[place])
        seen[name] = list(outer)
    agree([one["together"], other["together"]], [seen["together"]] * 2)
    agree([one["alone"], other["joined"]], [seen["alone"]] * 2)
    agree([one["after"], other["after"]], [seen["after"]] * 2)
    assert (one["steps"], other["steps"]) == (8, 4)


def test_a_lost_island_is_said_and_the_others_go_on() -> None:
    """The exchange that failed is not applied: island 0's next difference, of eight inner steps, has all of it."""
    one, other = crew().run(losing, free_port())
    assert one["said"].startswith("an island is gone; give a group of those left to outer.regroup (")
    agree([one["together"]], [other["together"]])
    start, first = values(made()), one["together"]
    model = made()
    optimizer = inner_of(model, "sgd")
    with torch.no_grad():
        for value, given in zip(model.parameters(), first, strict=True):
            value.copy_(given)
    for number in range(5, 13):
        step(model, optimizer, batch(0, number))
    expected = []
    for before, after, end in zip(start, first, values(model), strict=True):
        kept = (before - after) / (0.5 * 1.5)  # of the first outer step: 0.5 (D + 0.5 D)
        gradient = after - end
        expected.append(after - 0.5 * (gradient + 0.5 * (0.5 * kept + gradient)))
    agree([one["alone"]], [expected])


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_rounded_exchanges_are_near_and_alike_on_all_islands(bits: int) -> None:
    found = crew().run(trained, 8, None, {"every": 4, "bits": bits})
    assert furthest(found[0], found[1]) == 0
    error = furthest(found[0], written_out(2, 8, every=4)[0])
    assert 0 < error < {16: 0.01, 8: 0.02, 4: 0.2}[bits]


@pytest.mark.parametrize(("bits", "share"), [(16, 2**-8), (8, 0.5 / 127), (4, 0.5 / 7)])
def test_rounding_keeps_to_half_a_step_and_to_its_bits(bits: int, share: float) -> None:
    value = torch.randn(3 * BLOCK, dtype=torch.float64) * torch.logspace(-3, 3, 3 * BLOCK, dtype=torch.float64)
    value[:BLOCK] = 0
    packed = packed_bits(value, bits)
    assert packed.numel() == 3 * BLOCK * bits // 8 + (0 if bits == 16 else 3 * 4)
    error = (unpacked(packed, bits, value.dtype) - value).abs().view(3, BLOCK)
    largest = value.abs().view(3, BLOCK)
    bound = largest if bits == 16 else largest.amax(dim=1, keepdim=True)
    assert bool((error <= share * 1.001 * bound).all())


def test_settings_that_cannot_be_followed_are_refused() -> None:
    said = {
        "every: is 0; give the inner steps between outer steps, 1 or more": {"every": 0},
        "fragments: are 7, of 6 parameters in 9 steps; give 1 to 6: a fragment has a parameter, and a step of its own": {
            "every": 9,
            "fragments": 7,
        },
        "overlap: is 4 of 4 inner steps; give 0 to 3": {"every": 4, "overlap": 4},
        "optimizer: is (0.0, 0.9); give a learning rate above 0 and a momentum of 0 to 1: (0.7, 0.9)": {
            "every": 4,
            "optimizer": (0.0, 0.9),
        },
        "mixing: is 1; give 0 (the outer parameters) to less than 1 (an island's own)": {"every": 4, "mixing": 1},
        "bits: is 5; give 4, 8, 16 or 32": {"every": 4, "bits": 5},
        "weight: is 0; give a number above 0, such as the island's samples": {"every": 4, "weight": 0},
    }
    assert crew().run(refusals, [*said.values()]) == [[*said]] * 2
    model = made()
    optimizer = inner_of(model)
    hook = attach(None)
    outer = hook.outer(model, optimizer, every=2)
    with pytest.raises(InputError, match=r"^outer: was called already; call it once"):
        hook.outer(model, optimizer, every=2)
    with pytest.raises(InputError, match=r"^outer state: is none; give what state_dict returned$"):
        outer.load_state_dict({})
    with pytest.raises(InputError, match=r"^state: has no outer steps; call hook.outer first"):
        hook.load_state_dict({})
    other = OuterSteps(made(), inner_of(made()), every=4, fragments=2)
    with pytest.raises(InputError, match=r"^outer state: has 1 fragments of other sizes than these 2"):
        other.load_state_dict(outer.state_dict())
    for address, place in (("nowhere", 0), ("127.0.0.1:80", 2)):
        with pytest.raises(InputError, match=r"^address: .*; give host:port, and islands from 0 on$"):
            island_group(address, place, 2)


def test_one_process_looks_ahead_by_itself(tmp_path: Path) -> None:
    """Without other islands an outer step is Lookahead's with Nesterov momentum."""
    model = made()
    optimizer = inner_of(model)
    hook = attach(None)
    hook.outer(model, optimizer, every=4)
    for number in range(1, 12):
        step(model, optimizer, batch(0, number))
    agree([values(model)], written_out(1, 11, every=4))
