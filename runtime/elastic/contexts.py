"""What a logical worker (EST) keeps between its turns: random streams and module buffers. Start at :class:`Contexts`.

Parameters and optimizer state are the same for all logical workers between steps and are held once per process;
activations are gone when a turn ends. What is left is small, which is why a context switch is cheap (EasyScale, section
3.2 of the paper). Plain attributes of modules stay where they are: :class:`AttributeWatch` warns of those that change.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ddltool.errors import InputError

Document = dict[str, Any]
"""Nested dicts of tensors, numbers, strings and None: what ``torch.load(weights_only=True)`` takes."""
WATCHED_TURNS = 2
_PLAIN = frozenset({int, float, bool, str, type(None)})


def plain_name(name: str) -> str:
    """Return a parameter's or buffer's name without what ``torch.compile`` puts before it."""
    return name.replace("_orig_mod.", "")


@dataclass(frozen=True, slots=True)
class RandomStreams:
    """The states of the generators that training code draws from without saying so: those that are global.

    Python's, NumPy's, torch's on the host, and torch's on a device.
    """

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
        with kept(device):
            seed_streams(seed, virtual_rank, device)
            return cls.capture(device)

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
        numbers = {"position": int(position), "has_gauss": int(has_gauss), "cached": float(cached)}
        return {
            "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
            "numpy": {"key": torch.from_numpy(key.astype(np.int64))} | numbers,
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


@contextmanager
def kept(device: torch.device) -> Iterator[None]:
    """Keep what is drawn, and seeded, within the block from this process's streams."""
    present = RandomStreams.capture(device)
    try:
        yield
    finally:
        present.restore(device)


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


class Buffers:
    """All buffers of a model, by place. A set of values is swapped in by assignment: nothing is copied.

    A tensor that is registered in two places stays one tensor in every set of values.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [(module, name) for module in model.modules() for name in module._buffers]
        self.names = [
            f"{prefix}.{name}" if prefix else name
            for prefix, module in model.named_modules()
            for name in module._buffers
        ]

    def current(self) -> list[Tensor | None]:
        """Return the values that the model holds now, in the order of ``names``."""
        return [module._buffers[name] for module, name in self._places]

    def named(self) -> dict[str, Tensor | None]:
        """Return the values that the model holds now, by name."""
        return dict(zip(self.names, self.current(), strict=True))

    def copy(self) -> list[Tensor | None]:
        """Return copies of the values that the model holds now."""
        memo: dict[int, Tensor] = {}
        return [
            None if value is None else memo.setdefault(id(value), value.detach().clone()) for value in self.current()
        ]

    def install(self, values: Sequence[Tensor | None]) -> None:
        """Let the model hold ``values``."""
        for (module, name), value in zip(self._places, values, strict=True):
            module._buffers[name] = value


class Contexts:
    """The random streams and buffers of the logical workers of this process; at most one worker is switched in.

    Between turns, the process's own random streams are back in place and the model holds the buffers of the first
    local worker (on the process of virtual rank 0 those of that one, whose buffers plain DDP would keep).
    """

    def __init__(self, model: nn.Module, local: Sequence[int], seed: int, device: torch.device) -> None:
        self._model_buffers = Buffers(model)
        self._device, self._local = device, local
        self._streams = {rank: RandomStreams.seeded(seed, rank, device) for rank in local}
        self._buffers = {rank: self._model_buffers.copy() for rank in local}
        self._outside: RandomStreams | None = None  # the process's own, while a step is under way
        self.active: int | None = None
        self._model_buffers.install(self._buffers[local[0]])

    def enter(self, virtual_rank: int) -> None:
        """Switch ``virtual_rank`` in; no other worker is."""
        if self._outside is None:
            self._outside = RandomStreams.capture(self._device)
        self._model_buffers.install(self._buffers[virtual_rank])
        self._streams[virtual_rank].restore(self._device)
        self.active = virtual_rank

    def leave(self, last: bool = True) -> None:
        """Switch out the worker that is in; after the ``last`` one of a step, the process's own streams come back."""
        if self.active is None:
            return
        self._streams[self.active] = RandomStreams.capture(self._device)
        self._buffers[self.active] = self._model_buffers.current()
        self.active = None
        if last and self._outside is not None:
            self._outside.restore(self._device)
            self._outside = None
            self._model_buffers.install(self._buffers[self._local[0]])

    def seen(self) -> tuple[Document, dict[str, Tensor | None]]:
        """Return the random streams and buffers that code draws from and changes now, whosever they are."""
        return RandomStreams.capture(self._device).to_document(), self._model_buffers.named()

    def to_documents(self) -> list[Document]:
        """Return the local workers' contexts in virtual-rank order, for a checkpoint; buffers are no copies."""
        names = list(map(plain_name, self._model_buffers.names))
        return [
            {
                "virtual_rank": rank,
                "streams": self._streams[rank].to_document(),
                "buffers": dict(zip(names, self._buffers[rank], strict=True)),
            }
            for rank in self._local
        ]

    def load(self, documents: list[Document], where: str) -> None:
        """Take the local workers' contexts from those of all workers. Raises InputError when buffers do not fit."""
        names = list(map(plain_name, self._model_buffers.names))
        for rank in self._local:
            saved = documents[rank]["buffers"]
            if odd := sorted(saved.keys() ^ set(names)):
                side = "the checkpoint" if odd[0] in saved else "the model"
                raise InputError(f"{where}:buffers", f"{odd[0]} is only in {side}", "build the model that was saved")
            memo: dict[int, Tensor] = {}  # tied in the model: tied again
            self._buffers[rank] = [
                saved[name]
                if saved[name] is None or old is None
                else memo.setdefault(id(old), saved[name].to(self._device))
                for name, old in zip(names, self._buffers[rank], strict=True)
            ]
            self._streams[rank] = RandomStreams.from_document(documents[rank]["streams"])
        self._model_buffers.install(self._buffers[self._local[0]])


class AttributeWatch:
    """Warns of plain attributes that the first two turns on a process have both changed.

    Buffers belong to a logical worker and are swapped with it. ``self.calls += 1`` in a forward pass is no buffer: it
    counts the turns of the process, however many workers take them, and is in no checkpoint. What a forward pass makes
    of such a number then depends on the placement. Whether it makes anything of it cannot be seen from outside.

    What only one of them changed was set to the same by both, as ``training`` or the shape of the last batch. After the
    two turns nothing is looked at any more; with ``active`` False nothing at all.
    """

    def __init__(self, model: nn.Module, active: bool = True) -> None:
        self._model = model
        self._turns_left = WATCHED_TURNS if active else 0
        self._before: dict[tuple[str, str], str] = {}
        self._changed: list[set[tuple[str, str]]] = []

    def begin(self) -> None:
        """Note what the modules hold at the start of a turn."""
        if self._turns_left:
            self._before = dict(_attributes(self._model))

    def end(self) -> None:
        """Compare with what they hold at its end, and warn after the last turn that is watched."""
        if not self._turns_left:
            return
        self._turns_left -= 1
        self._changed.append({key for key, value in _attributes(self._model) if self._before.get(key) != value})
        if self._turns_left == 0 and (both := sorted(set.intersection(*self._changed))):
            (where, name), *others = [(f"module {place}" if place else "the model", name) for place, name in both]
            more = f" (and {', '.join(f'{place}: {other}' for place, other in others)})" if others else ""
            text = (
                f"{where}: attribute {name}{more} changes in every turn. The logical workers of a process share it and no"
                " checkpoint has it: if the computation uses it, the bits depend on the number of processes. Then"
                f" register it as a buffer: self.register_buffer({name!r}, torch.tensor(...))"
            )
            warnings.warn(text, stacklevel=2)


def _attributes(model: nn.Module) -> Iterator[tuple[tuple[str, str], str]]:
    """Yield the plain attributes by module and name, as text: NaN equals NaN, and 1 does not equal True."""
    for prefix, module in model.named_modules():
        prefix = plain_name(f"{prefix}.").removesuffix(".")
        for name, value in vars(module).items():
            if _is_plain(value):
                yield (prefix, name), repr(value)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(_is_plain(part) for part in value))
