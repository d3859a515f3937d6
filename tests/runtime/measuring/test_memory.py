"""The memory limit: the search against exact curves, and real processes against what they allocate."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ddltool.errors import DdlToolError, InputError
from ddltool.runtime.measuring import memory as measure_memory
from ddltool.runtime.measuring.memory import measure_limit, search_limit
from ddltool.runtime.measuring.worker import Subject
from tests.helpers.processes import children_left
from tests.runtime.measuring.test_steps import Step

MIB = 2**20
SAMPLE = 2 * MIB  # bytes


class Touch(nn.Module):
    """Keeps two copies of its input while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).sum(1)


class Full(nn.Module):
    """A device whose allocator gives up beyond batch 23."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 23:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return x * self.scale


def resolver(source: str, batch_size: int) -> Step:
    if source == "dies" and batch_size > 3:
        import os

        os._exit(5)
    if source == "broken":
        raise ValueError("no weights")
    if source == "full":
        return Step(Full(), (torch.ones(batch_size, 1),))
    return Step(Touch(), (torch.ones(batch_size, SAMPLE // 4),))


def subject(source: str) -> Subject:
    return Subject(source=source, resolver="tests.runtime.measuring.test_memory:resolver", device="cpu", threads=1)


@given(
    limit=st.integers(0, 3000),
    base=st.floats(0, 1e9),
    each=st.floats(1.0, 1e6),
    bend=st.floats(0.5, 1.5),
    most=st.integers(1, 4000),
)
def test_the_search_finds_the_largest_that_fits(limit: int, base: float, each: float, bend: float, most: int) -> None:
    asked: list[int] = []

    def attempt(batch: int) -> float | None:
        asked.append(batch)
        assert 1 <= batch <= most
        return base + each * batch**bend if batch <= limit else None

    found = search_limit(attempt, base + each * (limit + 0.5) ** bend, most)
    assert found.batch == (limit if limit < most else None)
    assert len(asked) == len(set(asked)) <= 36
    assert list(found.tried) == asked


def test_a_line_is_found_in_few_tries() -> None:
    found = search_limit(lambda batch: 1e8 + 1e6 * batch if batch <= 1000 else None, 1e8 + 1e6 * 1000.5)
    assert found.batch == 1000
    assert len(found.tried) <= 12  # doubling and halving alone take 21


@pytest.mark.slow
def test_the_limit_of_a_real_process() -> None:
    """From the smallest batch to the limit, the room must be filled by what a sample takes: 4 or 6 MiB of copies."""
    budget = 600 * MIB
    found = measure_limit(subject("touch"), budget)
    assert found.batch is not None
    one, last = found.tried[1], found.tried[found.batch]
    assert one is not None
    assert last is not None
    assert last <= budget
    assert found.tried[found.batch + 1] is None  # the next one was tried
    each = (last - one) / (found.batch - 1)
    assert 2 * SAMPLE * 0.9 <= each <= 4 * SAMPLE * 1.1
    assert budget - last <= 3 * each  # no room for more than noise
    assert not children_left()


def test_the_kernels_high_water_mark_decides_where_nobody_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent looks so seldom that it sees nothing; a batch of 400 MiB and more must still not pass for 600 MiB."""
    monkeypatch.setattr(measure_memory, "_LOOK_EVERY_S", 60.0)
    tried: list[float | None] = []
    monkeypatch.setattr(measure_memory, "search_limit", lambda attempt, _: tried.extend(map(attempt, (1, 200))))
    measure_limit(subject("touch"), 600.0 * MIB)
    small, large = tried
    assert small is not None
    assert large is None


@pytest.mark.slow
def test_an_exception_of_the_allocator_is_caught() -> None:
    found = measure_limit(subject("full"), 2 * 2**30)
    assert found.batch == 23
    assert not children_left()


@pytest.mark.parametrize(
    ("source", "budget", "error", "message"),
    [
        ("broken", 2**30, InputError, r"broken: a training step failed \(ValueError: no weights\)"),
        pytest.param(
            *("dies", 2**30, DdlToolError, r"memory of batch \d+: process 0 died \(exit code 5\)"),
            marks=pytest.mark.slow,
        ),
        ("touch", 2.0**60, InputError, r"--memory: 1.07e\+09 GiB is more than the .* GiB that are free"),
    ],
)
def test_failures(source: str, budget: float, error: type[DdlToolError], message: str) -> None:
    with pytest.raises(error, match=message):
        measure_limit(subject(source), budget)
    assert not children_left()
