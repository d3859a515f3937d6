"""Datasets that must be alike on all ranks. Start at :func:`demand_same_samples`."""

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
    """Raise InputError on every rank unless all have equally many samples, and an equal first, middle and last one.

    The samples are read from a copy of the dataset, as a file that it opens must not be shared with data workers, and
    with the same random seeds on all ranks, for random transforms. A stream, or None, must be one on every rank.
    """
    size = None if dataset is None or isinstance(dataset, IterableDataset) else dataset_length(dataset)
    described = "none" if dataset is None else "a stream" if size is None else f"{size} samples"
    job.demand_same("dataset", described, "give every rank the whole dataset")
    if size is not None and job.world_size > 1:
        remedy = "make it alike on every rank: the same files in the same order, and the same seed where it is shuffled"
        job.demand_same("dataset: content of samples", _fingerprint(dataset, size), remedy)


def _fingerprint(dataset: Any, size: int) -> str:
    """Return a digest of the first, middle and last of ``size`` samples, or text that says that they cannot be read."""
    fingerprints = []
    with streams_kept():
        try:
            copied = _own_copy(dataset)
            for index in (0, size // 2, size - 1):
                seed_streams(index)
                fingerprints.append(fingerprint(copied[index]))
        except Exception as error:
            return f"not readable ({type(error).__name__})"  # that is for the training loop to show
    return fingerprint(fingerprints)[:12]


def _own_copy(dataset: Any) -> Any:
    """Return a shallow copy of a dataset, and of the datasets that it wraps: what reading opens stays in the copy."""
    copied = copy.copy(dataset)
    if isinstance(getattr(copied, "dataset", None), Dataset):
        copied.dataset = _own_copy(copied.dataset)
    return copied
