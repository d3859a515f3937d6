"""Rounds of islands against a simulation that takes one inner step at a time, bytes by hand, and what papers printed."""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.job.barriers.islands import FragmentExchange, Rounds
from ddltool.analyzers.job.barriers.outer_losses import MEASURED, published
from ddltool.errors import InputError
from ddltool.links import Link


def link(bytes_per_s: float, latency_s: float = 0.0) -> Link:
    return Link(kind="plain", bytes_per_s=bytes_per_s, latency_s=latency_s)


def stepped(
    step_s: list[float], every: list[int], fragment_s: float, fragments: int, overlap: int, rounds: int
) -> list[float]:
    """When each fragment is sent: islands and the link as actors of an event queue, an event for every inner step."""
    numbered = list(itertools.product(range(rounds), range(fragments)))
    sends = [
        {whole * steps + (part + 1) * steps // fragments: whole * fragments + part for whole, part in numbered}
        for steps in every
    ]
    order = itertools.count()
    queue = [(seconds, next(order), "step", island) for island, seconds in enumerate(step_s)]
    heapq.heapify(queue)
    made, waits = [0] * len(step_s), [-1] * len(step_s)
    arrived, ended, starts = [0] * len(numbered), [False] * len(numbered), list[float]()
    sent = 0  # fragments are sent in order
    is_free, waiting = True, set[int]()

    def begin(now: float) -> None:
        nonlocal sent, is_free
        if is_free and sent in waiting:
            waiting.discard(sent)
            starts.append(now)
            heapq.heappush(queue, (now + fragment_s, next(order), "sent", sent))
            sent, is_free = sent + 1, False

    def go_on(island: int, now: float) -> None:
        due = sends[island].get(made[island] - overlap)
        if due is not None and not ended[due]:
            waits[island] = due
        elif made[island] < rounds * every[island]:
            heapq.heappush(queue, (now + step_s[island], next(order), "step", island))

    while queue:
        now, _, what, which = heapq.heappop(queue)
        if what == "step":
            made[which] += 1
            number = sends[which].get(made[which])
            if number is not None:
                arrived[number] += 1
                if arrived[number] == len(step_s):
                    waiting.add(number)
                    begin(now)
            go_on(which, now)
        else:
            ended[which], is_free = True, True
            for island, due in enumerate(waits):
                if due == which:
                    waits[island] = -1
                    if made[island] < rounds * every[island]:
                        heapq.heappush(queue, (now + step_s[island], next(order), "step", island))
            begin(now)
    return starts


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(3, 9)), min_size=2, max_size=4),
    st.integers(0, 30),
    st.integers(1, 3),
    st.integers(0, 2),
)
@settings(max_examples=60, deadline=None)
def test_rounds_are_those_of_a_simulation_step_by_step(
    islands: list[tuple[int, int]], fragment_s: int, fragments: int, overlap: int
) -> None:
    step_s, every = [float(one) for one, _ in islands], [other for _, other in islands]
    rounds = Rounds(step_s=step_s, every=every, fragment_s=fragment_s, fragments=fragments, overlap=overlap)
    assert rounds.starts_s(6) == stepped(step_s, every, fragment_s, fragments, overlap, 6)
    assert rounds.round_s >= rounds.compute_s - 1e-9


def test_rounds_by_hand() -> None:
    """Ten steps of 2 s; 5 s on the way: waited for, hidden behind 3 steps, half hidden behind 2, in halves, and a full link."""
    alike = {"step_s": [2.0, 2.0], "every": [10, 10]}
    assert Rounds(**alike, fragment_s=5.0).round_s == 25
    assert Rounds(**alike, fragment_s=5.0, overlap=3).round_s == 20
    assert Rounds(**alike, fragment_s=5.0, overlap=2).exposed_s == 1
    assert Rounds(**alike, fragment_s=2.5, fragments=2, overlap=1).exposed_s == 1
    assert Rounds(**alike, fragment_s=15.0, fragments=2, overlap=4).round_s == 20 + 2 * (15 - 8)
    assert Rounds(**alike, fragment_s=10.0, fragments=5, overlap=9).round_s == 50  # nothing but the link
    unequal = Rounds(step_s=[1.0, 3.0], every=[15, 5], fragment_s=5.0)
    assert (unequal.compute_s, unequal.round_s) == (15, 20)
    assert Rounds(step_s=[1.0, 3.0], every=[10, 10], fragment_s=5.0).round_s == 35


def test_bytes_by_hand() -> None:
    """A hundred numbers of 32 bits: two islands send each other all of them, four a ring's 2 x 3/4."""
    assert FragmentExchange(elements=100, islands=2, link=link(100)).sent_bytes == 400
    assert FragmentExchange(elements=100, islands=4, link=link(100)).sent_bytes == 600
    assert FragmentExchange(elements=100, islands=2, link=link(100), bits=4).sent_bytes == 50
    two = FragmentExchange(elements=100, islands=2, link=link(100, 0.25), fragments=2)
    assert two.fragment_s == pytest.approx(2 + 2 * 0.25)
    assert FragmentExchange(elements=100, islands=4, link=link(100)).fragment_s == pytest.approx(6)


def test_published_savings_of_communication() -> None:
    """DiLoCo's 500 times fewer exchanges of the same bytes; Streaming DiLoCo's 400 times fewer bits than bfloat16 gradients."""
    inner = {
        "step_s": [0.1] * 8,
        "fragment_s": FragmentExchange(elements=150_000_000, islands=8, link=link(1e9)).fragment_s,
    }
    each, diloco = (Rounds(**inner, every=[every] * 8).starts_s(rounds) for every, rounds in ((1, 1000), (500, 2)))
    assert len(each) / len(diloco) == 500  # exchanges of as many bytes in 1,000 steps
    every_step = FragmentExchange(elements=10**9, islands=2, link=link(1e9), bits=16)
    streamed = FragmentExchange(elements=10**9, islands=2, link=link(1e9), bits=4, fragments=8)
    assert 100 * every_step.sent_bytes / streamed.sent_bytes == 400
    # Table 1 of arXiv 2501.18512, 25 billion tokens: 441 TB in all and 1.10 TB
    assert every_step.sent_bytes / (streamed.sent_bytes / 100) == pytest.approx(441 / 1.10, rel=0.01)


# Table 6 of arXiv 2503.09799: Gbit/s at which so much of the time is computation, printed on a grid of steps of 1.2.
TABLE_6 = {
    (10e9, 0.8): {
        10: (16.0, 49.4, 86.8, 152.6), 50: (3.0, 11.0, 23.3, 41.0), 100: (1.4, 6.2, 13.3, 23.3), 300: (0.5, 2.0, 4.3, 9.1)
    },
    (405e9, 26.0): {
        10: (19.3, 72.0, 126.5, 184.2), 50: (3.6, 13.3, 28.1, 59.6), 100: (2.0, 7.5, 16.0, 33.9), 300: (0.7, 3.0, 6.2, 13.3)
    },
    (671e9, 20.0): {
        10: (49.4, 152.6, 268.3, 390.7), 50: (7.5, 33.9, 72.0, 126.5), 100: (4.3, 16.0, 41.0, 72.0), 300: (1.7, 6.2, 13.3, 28.1)
    },
}  # fmt: skip


def test_published_bandwidths_for_a_share_of_computation() -> None:
    """Behind the last backward pass, two thirds of a step, their simulator hides a reduction: then rates are within 1.5."""
    ratios = []
    for (elements, step_s), rows in TABLE_6.items():
        for every, printed in rows.items():
            for share, gbit in zip((0.5, 0.8, 0.9, 0.95), printed, strict=True):
                exchange = FragmentExchange(elements=int(elements), islands=2, link=link(gbit * 1e9 / 8), bits=16)
                exposed_s = every * step_s * (1 - share) / share
                ratio = exchange.fragment_s / (exposed_s + step_s * 2 / 3)  # of the rate that we would need
                faster = replace(exchange, link=link(ratio * gbit * 1e9 / 8))
                seconds = faster.fragment_s - step_s * 2 / 3
                rounds = Rounds(step_s=[step_s] * 2, every=[every] * 2, fragment_s=seconds)
                assert rounds.compute_s / rounds.round_s == pytest.approx(share)
                ratios.append(ratio)
    assert min(ratios) > 0.95
    assert max(ratios) < 1.5
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) == pytest.approx(1.2, abs=0.05)


def test_published_losses_are_those_of_like_settings() -> None:
    def changes(parameters: float, islands: int, every: int) -> tuple[float, float] | None:
        runs = published(parameters, islands, every)
        found = [round(100 * run.change, 2) for run in runs]
        return (min(found), max(found)) if runs else None

    assert changes(2.4e9, 2, 30) == (-0.18, 0.2)  # 1.3B to 4B, Tables 4 and 5
    assert changes(35e6, 8, 30) == (3.1, 3.9)
    assert changes(1e9, 2, 100) == (-0.4, 1.07)
    assert changes(150e6, 8, 500) == (-0.68, 0.75)
    assert changes(1e9, 2, 1) is None
    assert changes(1e9, 2, 8) is None
    assert changes(1e9, 9, 30) is None
    assert changes(1e12, 2, 30) == changes(10e9, 2, 30)
    assert {run.every for run in MEASURED} == {30, 100, 500}


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Rounds(step_s=[1.0], every=[0], fragment_s=1.0), "outer_every: has 0; give 1 inner step or more"),
        (
            lambda: Rounds(step_s=[1.0], every=[3], fragment_s=1.0, fragments=4),
            "fragments: are 4, and an island takes 3 inner steps between outer steps; "
            "one is sent at a time: give no more than there are steps",
        ),
        (
            lambda: Rounds(step_s=[1.0], every=[3], fragment_s=1.0, overlap=3),
            "overlap: is 3 inner steps, of 3 between outer steps; give 0 to 2",
        ),
        (
            lambda: FragmentExchange(elements=5, islands=2, link=link(1), bits=5),
            "outer_bits: is 5; give 4, 8, 16 or 32",
        ),
        (
            lambda: FragmentExchange(elements=5, islands=2, link=link(1), fragments=6),
            "fragments: are 6, of 5 parameters; give at least 1, and no more than there are parameters",
        ),
    ],
)
def test_nonsense_is_refused(make: object, line: str) -> None:
    with pytest.raises(InputError) as caught:
        make()  # type: ignore[operator]
    assert str(caught.value) == line
