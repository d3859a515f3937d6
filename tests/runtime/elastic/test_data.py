"""Data workers that logical workers share: the same samples and augmentations for any number of them and any placement."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, default_collate

from ddltool.errors import InputError
from ddltool.runtime.elastic.run_difference import first_difference
from ddltool.runtime.elastic.sample_feed import BatchTask, SampleFeed
from ddltool.runtime.processes.digests import digest
from tests.helpers.elastic_workers import BATCH, SAMPLES, WORKERS, Digits, bits, fed, on

UNTIL = 12  # of ten steps an epoch


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on one process that fetches its samples itself."""
    path = tmp_path_factory.mktemp("alone") / "run.pt"
    on(1, fed, str(path), 0, UNTIL)
    return path


@pytest.mark.parametrize(
    ("size", "data_workers"),
    [(1, 1), (2, 2), pytest.param(4, 1, marks=pytest.mark.slow), pytest.param(2, 4, marks=pytest.mark.slow), (3, 0)],
)
def test_any_placement_and_number_of_data_workers(size: int, data_workers: int, alone: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    on(size, fed, str(path), data_workers, UNTIL)
    assert first_difference(f"{alone}.jsonl", f"{path}.jsonl") is None
    assert bits(path) == bits(alone)


@pytest.mark.slow
def test_resumed_in_mid_epoch_on_other_numbers(alone: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    for size, data_workers, until in ((2, 2, 3), (4, 0, 7), (1, 4, 11), (3, 1, UNTIL)):
        on(size, fed, str(path), data_workers, until)
    assert bits(path) == bits(alone)


def test_micro_batches_have_states_of_their_own(tmp_path: Path) -> None:
    found = []
    for size, data_workers in ((1, 0), (2, 2)):
        path = tmp_path / f"{size}.pt"
        on(size, fed, str(path), data_workers, 3, BATCH // 2)
        found.append(bits(path))
    assert found[0] == found[1]


def test_batches_are_new_every_time_and_are_not_those_of_turns(alone: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    on(1, fed, str(path), None, 1)
    found = first_difference(f"{alone}.jsonl", f"{path}.jsonl")
    assert found is not None
    assert (found.record, found.cause_class) == ("batch", "data")
    with pytest.raises(InputError, match="sample_streams: is turn there and batch here"):
        on(1, fed, str(path), 0, 2)


def order_of(data: st.DataObject) -> list[BatchTask]:
    """Draw the tasks of some processes' logical workers in some order."""
    place = st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 5), st.integers(0, 1))
    places = data.draw(st.lists(place, min_size=1, max_size=12, unique=True))
    return [BatchTask(*place, (7, 8, SAMPLES - 1)) for place in places]


@pytest.fixture(scope="module")
def feeds() -> Iterator[dict[int, SampleFeed]]:
    dataset = Digits()
    made = {count: SampleFeed(dataset, default_collate, seed=5, workers=count) for count in (0, 1, 2, 4)}
    yield made
    for feed in made.values():
        feed.close()


@given(data=st.data())
@settings(max_examples=25)
def test_a_batch_depends_on_its_task_alone(feeds: dict[int, SampleFeed], data: st.DataObject) -> None:
    tasks = order_of(data)
    single = feeds[0]
    expected = {task: [digest(part) for part in next(single.batches([task]))] for task in tasks}
    count = data.draw(st.sampled_from(list(feeds)))
    random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002  # the state before does not matter
    shuffled = data.draw(st.permutations(tasks))
    for task, batch in zip(shuffled, feeds[count].batches(shuffled), strict=True):
        assert [digest(part) for part in batch] == expected[task]
    images = {expected[task][0] for task in tasks}
    assert len(images) == len(tasks)


class Deadly(Dataset[Any]):
    """The data worker that fetches sample 40 is killed."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 40:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)


def test_a_killed_data_worker_is_named_in_one_line() -> None:
    feed = SampleFeed(Deadly(), default_collate, workers=2)
    tasks = [BatchTask(0, 0, step, 0, (step * 10, step * 10 + 1)) for step in range(8)]
    with (
        pytest.raises(InputError, match=r"data worker 0: \(process \d+\) was killed by SIGKILL; start again") as caught,
        feed.watched(),
    ):
        list(feed.batches(tasks))
    assert "\n" not in str(caught.value)


def test_an_error_of_the_dataset_stays_what_it_is() -> None:
    for count in (0, 2):
        feed = SampleFeed(Digits(8), default_collate, workers=count)
        with pytest.raises(IndexError):
            list(feed.batches([BatchTask(0, 0, 0, 0, (99,))]))
        feed.close()


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(InputError, match="data_workers: is -1"):
        SampleFeed(Digits(8), default_collate, workers=-1)


def test_the_streams_of_this_process_are_left_alone(tmp_path: Path) -> None:
    """What draws between steps and in the loop sees the same numbers, with and without data workers."""
    assert WORKERS > 1
    drawn = []
    for count in (0, 2):
        random.seed(3), np.random.seed(3), torch.manual_seed(3)  # noqa: NPY002
        on(1, fed, str(tmp_path / f"{count}.pt"), count, 2)
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(1))))  # noqa: NPY002
    assert drawn[0] == drawn[1]
