"""Random streams that logical workers keep between their turns. Start at :class:`Streams`.

Streams are those that training code draws from without saying so: the global generators of Python, NumPy and torch.
"""

from __future__ import annotations

import ctypes
import random
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from torch import Tensor

# What Python's and NumPy's generators look like in memory: 624 words of a Mersenne twister and the position in them,
# which comes first in Python and last in NumPy. A draw changes the position, or, where it comes out the same, all words.
WORDS = 624
_GENERATOR: Any = random._inst  # what random.random and its like belong to
_Memory = ctypes.c_uint32 * (WORDS + 1)
_TELLING = (0, 1, 2, WORDS - 1, WORDS)
Document = dict[
    str, Any
]  # nested dicts of tensors, numbers, strings and None: what torch.load(weights_only=True) takes


@dataclass(frozen=True, slots=True)
class RandomStreams:
    """The states of the generators that training code draws from: Python, NumPy, torch on the host, torch on a device."""

    python: tuple[Any, ...]
    numpy: Any
    torch_cpu: Tensor  # (5056,) bytes
    device: Tensor | None  # None where the model is on the host

    @classmethod
    def capture(cls, device: torch.device) -> RandomStreams:
        """Return the present states of this process's global generators."""
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state(), on_device)  # noqa: NPY002  # user code draws from it

    @classmethod
    def seeded(cls, seed: int, virtual_rank: int, device: torch.device) -> RandomStreams:
        """Return the streams that a logical worker starts with; they depend on ``seed`` and ``virtual_rank`` only."""
        before = cls.capture(device)
        seed_streams(seed, virtual_rank, device)
        streams = cls.capture(device)
        before.restore(device)
        return streams

    def restore(self, device: torch.device) -> None:
        """Make these the states of this process's global generators."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002  # user code draws from it
        torch.set_rng_state(self.torch_cpu)
        if self.device is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.device, device)

    def to_document(self) -> Document:
        """Return the states as tensors and numbers."""
        version, words, gauss = self.python
        _, key, position, has_gauss, cached = self.numpy
        return {
            "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
            "numpy": {
                "key": torch.from_numpy(key.astype(np.int64)),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "cached": float(cached),
            },
            "torch_cpu": self.torch_cpu,
            "device": self.device,
        }

    @classmethod
    def from_document(cls, document: Document) -> RandomStreams:
        """Return the streams that :meth:`to_document` described."""
        python, numpy = document["python"], document["numpy"]
        key = numpy["key"].numpy().astype(np.uint32)
        return cls(
            (python["version"], tuple(python["words"].tolist()), python["gauss"]),
            ("MT19937", key, numpy["position"], numpy["has_gauss"], numpy["cached"]),
            document["torch_cpu"],
            document["device"],
        )


def seed_streams(seed: int, virtual_rank: int, device: torch.device | None = None) -> None:
    """Seed this process's global generators as logical worker ``virtual_rank`` of a run with ``seed`` starts.

    For a plain DDP script that is to be compared with an elastic run: call it with the process's rank.
    """
    words = np.random.SeedSequence([seed, virtual_rank]).generate_state(4, np.uint64).tolist()
    random.seed(words[0])
    np.random.seed(words[1] % 2**32)  # noqa: NPY002  # user code draws from it
    torch.default_generator.manual_seed(words[2])
    if device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(words[3])


def _python_memory() -> Any:
    """Return Python's global generator as it lies in memory, None where its layout is not the known one."""
    if sys.implementation.name != "cpython":
        return None
    memory = _Memory.from_address(id(_GENERATOR) + object.__basicsize__)
    _, (*words, position), _ = random.getstate()
    return memory if list(memory) == [position, *words] else None


class PythonStream:
    """A state of Python's global generator, which is read only after a turn that drew from it."""

    _memory: Any = None
    _asked = False

    def __init__(self, state: tuple[Any, ...]) -> None:
        self._state = state
        self._mark: tuple[Any, ...] | None = None

    def enter(self) -> None:
        """Let the global functions draw from this stream."""
        random.setstate(self._state)
        self._mark = self._now()

    def leave(self) -> None:
        """Note where the global functions have come to."""
        if self._mark is None or self._mark != self._now():
            self._state = random.getstate()

    def value(self) -> tuple[Any, ...]:
        """Return the state as ``random.getstate()`` gives it. Only for a stream that is switched out."""
        return self._state

    @classmethod
    def _now(cls) -> tuple[Any, ...] | None:
        """Return what changes with every draw, None where that cannot be seen."""
        if not cls._asked:
            cls._asked, cls._memory = True, _python_memory()
        if cls._memory is None:
            return None
        return (_GENERATOR.gauss_next, *(cls._memory[place] for place in _TELLING))


class NumpyStream:
    """A state of NumPy's global generator, switched by reference: nothing is copied unless something was drawn.

    NumPy keeps half of a pair of normal draws outside of the generator and has no cheap way to read it, so it is read
    only after a turn that changed the generator or began with such a half. What this cannot see: a turn that seeds
    NumPy, ends in the very state in which it began, and leaves half a pair.
    """

    def __init__(self, generator: np.random.BitGenerator, half: tuple[int, float] = (0, 0.0)) -> None:
        self._generator, self._half = generator, half
        self._memory = self._memory_of(generator)
        self._mark: tuple[int, ...] | None = None

    @classmethod
    def of(cls, state: Any) -> NumpyStream:
        """Return the stream in a state as ``np.random.get_state()`` gives it."""
        kind, key, position, has_half, half = state
        generator = np.random.MT19937()
        generator.state = {"bit_generator": kind, "state": {"key": key, "pos": position}}
        return cls(generator, (has_half, half))

    def enter(self) -> None:
        """Let the global functions draw from this stream."""
        set_bit_generator(self._generator)
        if self._half[0]:
            state = dict(self._generator.state) | {"has_gauss": self._half[0], "gauss": self._half[1]}
            np.random.set_state(state)  # noqa: NPY002  # user code draws from it
        self._mark = self._now()

    def leave(self) -> None:
        """Note where the global functions have come to, before another stream is switched in."""
        present = get_bit_generator()
        if present is self._generator and not self._half[0] and self._mark is not None and self._mark == self._now():
            return
        if present is not self._generator:
            self._generator, self._memory = present, self._memory_of(present)
        state = np.random.get_state(legacy=False)  # noqa: NPY002  # user code draws from it
        self._half = (int(state["has_gauss"]), float(state["gauss"]))

    @staticmethod
    def _memory_of(generator: np.random.BitGenerator) -> Any:
        """Return the generator as it lies in memory, None where its layout is not known."""
        if not isinstance(generator, np.random.MT19937):
            return None
        return _Memory.from_address(generator.ctypes.state_address)

    def _now(self) -> tuple[int, ...] | None:
        """Return what changes with every draw, None where that cannot be seen."""
        return None if self._memory is None else tuple(self._memory[place] for place in _TELLING)

    def value(self) -> Any:
        """Return the state as ``np.random.get_state()`` gives it. Only for a stream that is switched out."""
        state = self._generator.state
        return (state["bit_generator"], state["state"]["key"], state["state"]["pos"], *self._half)


class Streams:
    """The random streams of one logical worker, or of the process between turns; at most one is switched in."""

    def __init__(self, values: RandomStreams, numpy: NumpyStream | None = None) -> None:
        self._python, self._torch, self._device = PythonStream(values.python), values.torch_cpu, values.device
        self._numpy = NumpyStream.of(values.numpy) if numpy is None else numpy

    @classmethod
    def present(cls, device: torch.device) -> Streams:
        """Return this process's global generators themselves, as they are now."""
        numpy = NumpyStream(get_bit_generator())
        numpy.leave()
        return cls(RandomStreams.capture(device), numpy)

    def enter(self, device: torch.device) -> None:
        """Let code draw from these."""
        self._python.enter()
        self._numpy.enter()
        torch.set_rng_state(self._torch)
        if self._device is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self._device, device)

    def leave(self, device: torch.device) -> None:
        """Note where they have come to."""
        self._python.leave()
        self._numpy.leave()
        self._torch = torch.get_rng_state()
        if device.type == "cuda":
            self._device = torch.cuda.get_rng_state(device)

    def values(self) -> RandomStreams:
        """Return the states. Only for streams that are switched out."""
        return RandomStreams(self._python.value(), self._numpy.value(), self._torch, self._device)
