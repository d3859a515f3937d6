"""The chain of gradients: the bits of the plain sum in rank order, for any placement, with gradients leaving early."""

from __future__ import annotations

import gc
import weakref

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.runtime.elastic.ordered_mean import OrderedMean
from ddltool.runtime.elastic.processes import Processes
from ddltool.runtime.processes.digests import digest
from tests.helpers.elastic_workers import PARAMETERS, SHAPES, chained, gradient_of, on, twice

COUNTS = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


def plain(workers: int, steps: int = 3, order: int = 1) -> list[str]:
    """Return the digests of the means as a loop over ranks computes them."""
    found = []
    for step in range(steps):
        for name in PARAMETERS:
            gradients = [gradient_of(rank, name, step) for rank in range(workers)][::order]
            if all(gradient is None for gradient in gradients):
                found.append("none")
                continue
            zero = torch.zeros(SHAPES[name])
            total = zero if gradients[0] is None else gradients[0]
            for gradient in gradients[1:]:
                total = total + (zero if gradient is None else gradient)
            found.append(digest(total / workers))
    return found


@given(counts=COUNTS, early=st.booleans())
@settings(max_examples=12)
def test_any_placement_has_the_bits_of_the_plain_sum(counts: tuple[int, ...], early: bool) -> None:
    expected = plain(sum(counts))
    for found, _ in on(len(counts), chained, counts, early):
        assert found == expected


def test_the_oracle_depends_on_the_order() -> None:
    assert plain(5) != plain(5, order=-1)


def test_gradients_leave_during_the_backward_pass_only_when_that_is_the_last_one() -> None:
    # Three steps of two turns on each process; in the very first turn the buckets are not known.
    assert [ahead for _, ahead in on(2, chained, (2, 2), True)] == [5, 5]
    assert [ahead for _, ahead in on(2, chained, (2, 2), False)] == [0, 0]


def test_a_second_backward_pass_in_a_turn_is_refused_once_gradients_have_left() -> None:
    assert all("more than one backward pass" in message for message in on(2, twice))


def test_a_mean_that_nobody_uses_is_collected_with_its_parameters() -> None:
    """What a tensor's hook holds is out of the garbage collector's reach: with it a job's connections would stay."""
    parameter = torch.nn.Parameter(torch.ones(3))
    mean = OrderedMean({"p": parameter}, Processes.this(2))
    gone = weakref.ref(mean), weakref.ref(parameter)
    del mean, parameter
    gc.collect()
    assert [each() for each in gone] == [None, None]
