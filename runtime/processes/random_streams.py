"""Saves and restores the global random generators, which user code draws from. Start at :class:`RandomStreams`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch import Tensor

Document = dict[str, Any]
"""Nested dicts of tensors, numbers, strings and None, which ``torch.load(weights_only=True)`` reads."""


@dataclass(frozen=True, slots=True)
class RandomStreams:
    """The states of the global generators: Python's, NumPy's, torch's on the host, and torch's on a device.

    NumPy's is held as the generator object itself, because swapping it costs a hundredth of reading and writing its 624
    words. NumPy draws normal numbers in pairs; the second of a pair that it has cached is not part of that object.
    """

    python: tuple[Any, ...]
    """What ``random.getstate`` returns: (version, words, cached normal number or None)."""
    numpy: Any
    half_pair: tuple[int, float]  # (1 if a normal number is cached, else 0; that number)
    torch_cpu: Tensor  # (5056,) bytes
    device: Tensor | None  # None where the model is on the host

    @classmethod
    def present(cls, device: torch.device) -> RandomStreams:
        """Return this process's present streams; ``device``: the model's.

        NumPy's generator is shared, not copied: what the process draws moves it on until other streams are restored.
        """
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        state = np.random.get_state(legacy=False)  # noqa: NPY002  # user code draws from it
        half_pair = int(state["has_gauss"]), float(state["gauss"])
        return cls(random.getstate(), get_bit_generator(), half_pair, torch.get_rng_state(), on_device)

    @classmethod
    def seeded(cls, seed: int, virtual_rank: int, device: torch.device) -> RandomStreams:
        """Return the streams that a logical worker starts with; they depend on ``seed`` and ``virtual_rank`` only.

        The streams of this process stay as they are.
        """
        with streams_kept(device):
            seed_streams(seed, virtual_rank, device=device)
            return cls.present(device)

    def restore(self, device: torch.device) -> None:
        """Make these the streams of this process, which then advances NumPy's in place. ``device``: the model's."""
        random.setstate(self.python)
        set_bit_generator(self.numpy)
        if self.half_pair[0]:
            state = np.random.get_state(legacy=False)  # noqa: NPY002  # user code draws from it
            state["has_gauss"], state["gauss"] = self.half_pair
            np.random.set_state(state)  # noqa: NPY002  # user code draws from it
        torch.set_rng_state(self.torch_cpu)
        if self.device is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.device, device)

    def to_document(self) -> Document:
        """Return the states as tensors and numbers, for a checkpoint without pickled code."""
        version, words, gauss = self.python
        state = self.numpy.state["state"]
        has_gauss, cached = self.half_pair
        numbers = {"position": int(state["pos"]), "has_gauss": has_gauss, "cached": cached}
        return {
            "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
            "numpy": {"key": torch.from_numpy(state["key"].astype(np.int64))} | numbers,
            "torch_cpu": self.torch_cpu,
            "device": self.device,
        }

    @classmethod
    def from_document(cls, document: Document) -> RandomStreams:
        """Return the streams that :meth:`to_document` described, with a new generator object for NumPy."""
        python = document["python"]
        numpy = document["numpy"]
        generator = np.random.MT19937(0)
        key = numpy["key"].numpy().astype(np.uint32)
        generator.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": numpy["position"]}}
        return cls(
            (python["version"], tuple(python["words"].tolist()), python["gauss"]),
            generator,
            (numpy["has_gauss"], numpy["cached"]),
            document["torch_cpu"],
            document["device"],
        )


@contextmanager
def streams_kept(device: torch.device = torch.device("cpu")) -> Iterator[None]:  # noqa: B008
    """Restore this process's streams after the block, whatever it draws or seeds. ``device``: whose stream is kept too."""
    present = RandomStreams.present(device)
    # NumPy's generator is held as an object, so the block needs another one to draw from.
    set_bit_generator(np.random.MT19937(0))
    try:
        yield
    finally:
        present.restore(device)


def seed_streams(*entropy: int, device: torch.device | None = None) -> None:
    """Seed this process's global generators from the numbers ``entropy``; other numbers give independent streams.

    A logical worker starts from (seed, virtual rank). A plain DDP script that is to be compared with an elastic run
    calls this with the seed and the process's rank. torch's generator on ``device`` is seeded too if that is CUDA.
    """
    words = np.random.SeedSequence(entropy).generate_state(4, np.uint64).tolist()  # a seed for each generator
    random.seed(words[0])
    np.random.seed(words[1] % 2**32)  # noqa: NPY002  # user code draws from it; it takes 32 bits
    torch.default_generator.manual_seed(words[2])
    if device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(words[3])
