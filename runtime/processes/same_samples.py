"""Checks that all ranks have the same dataset. Start at :func:`demand_same_samples`."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from ddltool.errors import InputError
from ddltool.runtime.processes.digests import fingerprint
from ddltool.runtime.processes.job import DistributedJob
from ddltool.runtime.processes.random_streams import seed_streams, streams_kept

MAP_STYLE = "give a map-style dataset (with __len__ and __getitem__)"


def dataset_length(dataset: Dataset[Any], remedy: str = MAP_STYLE) -> int:
    """Return the number of samples of a map-style dataset.

    Raises InputError, with ``remedy``, for a dataset whose samples cannot be picked by index.
    """
    if isinstance(dataset, IterableDataset):
        raise InputError("dataset", f"is a {type(dataset).__name__}, an IterableDataset", remedy)
    try:
        return len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        raise InputError("dataset", f"is a {type(dataset).__name__} without a length", remedy) from None


def demand_same_samples(job: DistributedJob, dataset: Dataset[Any] | None) -> None:
    """Raise InputError on every rank unless all ranks have the same number of samples and equal ones at three indices.

    The first, middle and last sample are compared. They are read from a copy of the dataset, because a file that it
    opens must not be shared with data workers, and with the same random seeds on all ranks, for random transforms.
    Samples of a stream (IterableDataset) are not compared: all ranks need only have a stream, or all None.
    """
    size = None
    if dataset is None:
        described = "none"
    elif isinstance(dataset, IterableDataset):
        described = "a stream"
    else:
        size = dataset_length(dataset)
        described = f"{size} samples"
    job.demand_same("dataset", described, "give every rank the whole dataset")
    if size is not None and job.world_size > 1:
        remedy = "make it alike on every rank: the same files in the same order, and the same seed where it is shuffled"
        job.demand_same("dataset: content of samples", _fingerprint(dataset, size), remedy)


def _fingerprint(dataset: Any, size: int) -> str:
    """Return a digest (12 hex digits) of the first, middle and last of ``size`` samples.

    If one cannot be read, it is a text with the kind of error instead: ranks that fail alike count as equal.
    """
    fingerprints = []
    with streams_kept():
        try:
            copied = _own_copy(dataset)
            for index in (0, size // 2, size - 1):
                seed_streams(index)
                fingerprints.append(fingerprint(copied[index]))
        except Exception as error:
            return f"not readable ({type(error).__name__})"  # the training loop will raise the error itself
    return fingerprint(fingerprints)[:12]


def _own_copy(dataset: Any) -> Any:
    """Return a shallow copy of a dataset whose wrapped datasets (attribute ``dataset``) are copied too.

    Files that reading opens are then attributes of the copies only.
    """
    copied = copy.copy(dataset)
    if isinstance(getattr(copied, "dataset", None), Dataset):
        copied.dataset = _own_copy(copied.dataset)
    return copied
