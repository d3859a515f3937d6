"""A DataLoader that tells which of its batches the training loop has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset

from ddltool.runtime.hook.batches import VariableBatchSampler
from ddltool.runtime.hook.weighing import Weigher


class CountedLoader(DataLoader[Any]):
    """Yields what ``sampler`` hands out, and says so to ``weigher``; ``options`` go to ``DataLoader``.

    Accelerate's ``prepare`` leaves it as it is: the batches are this rank's already.
    """

    _is_accelerate_prepared = True

    def __init__(self, dataset: Dataset[Any], sampler: VariableBatchSampler, weigher: Weigher, **options: Any) -> None:
        super().__init__(dataset, batch_sampler=sampler, **options)
        self._variable, self._weigher = sampler, weigher
        self._left_early = False
        weigher.follow(sampler)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches of the epoch, or of what is left of it."""
        if self._left_early:
            self._weigher.drop(self._variable, unused=True)
        self._left_early = True
        for batch in super().__iter__():
            self._weigher.draw(self._variable, self._variable.issued.popleft())
            yield batch
        self._weigher.drop(self._variable)  # a loop that fetched ahead has its last batches still to use
        self._left_early = False
