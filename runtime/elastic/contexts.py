"""What a logical worker (EST) keeps between its turns: random streams and module buffers. Start at :class:`Contexts`.

Parameters and optimizer state are the same for all logical workers between steps and are held once per process;
activations are gone when a turn ends. What is left is small, which is why a context switch is cheap (EasyScale, section
3.2 of the paper).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddltool.errors import InputError
from ddltool.runtime.elastic.checkpoint import plain_name
from ddltool.runtime.elastic.random_streams import Document, RandomStreams, Streams


class Buffers:
    """All buffers of a model, by place. A set of values is swapped in by assignment: nothing is copied.

    A tensor that is registered in two places stays one tensor in every set of values.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (module, name, f"{prefix}.{name}" if prefix else name)
            for prefix, module in model.named_modules()
            for name in module._buffers
        ]
        self.names = [full for _, _, full in self._places]
        self.plain_names = list(map(plain_name, self.names))

    def current(self) -> list[Tensor | None]:
        """Return the values that the model holds now, in the order of ``names``."""
        return [module._buffers[name] for module, name, _ in self._places]

    def copy(self) -> list[Tensor | None]:
        """Return copies of the values that the model holds now."""
        memo: dict[int, Tensor] = {}
        for value in self.current():
            if value is not None:
                memo.setdefault(id(value), value.detach().clone())
        return [None if value is None else memo[id(value)] for value in self.current()]

    def install(self, values: Iterable[Tensor | None]) -> None:
        """Let the model hold ``values``."""
        for (module, name, _), value in zip(self._places, values, strict=True):
            module._buffers[name] = value


@dataclass(slots=True)
class Context:
    """One logical worker's state between its turns."""

    streams: Streams
    buffers: list[Tensor | None]


class Contexts:
    """The contexts of the logical workers of this process; at most one is switched in.

    Between turns, the process's own random streams are back in place and the model holds the buffers of the first
    local worker (on the process of virtual rank 0 those of that one, whose buffers plain DDP would keep).
    """

    def __init__(self, model: nn.Module, local: Sequence[int], seed: int, device: torch.device) -> None:
        self._buffers = Buffers(model)
        self._device = device
        self._local = local
        self._contexts = {
            rank: Context(Streams(RandomStreams.seeded(seed, rank, device)), self._buffers.copy()) for rank in local
        }
        self._outside = Streams.present(device)
        self._aside = Streams(RandomStreams.seeded(seed, 0, device))
        self._within = False
        self.active: int | None = None
        self._buffers.install(self._contexts[local[0]].buffers)

    def enter(self, virtual_rank: int) -> None:
        """Switch ``virtual_rank`` in; no other worker is."""
        context = self._contexts[virtual_rank]
        if not self._within:
            self._outside.leave(self._device)
            self._within = True
        self._buffers.install(context.buffers)
        context.streams.enter(self._device)
        self.active = virtual_rank

    def leave(self, last: bool = True) -> None:
        """Switch out the worker that is in; after the ``last`` one of a step, the process's own streams come back."""
        if self.active is None:
            return
        context = self._contexts[self.active]
        context.streams.leave(self._device)
        context.buffers = self._buffers.current()
        self.active = None
        if last:
            self._outside.enter(self._device)
            self._within = False
            self._buffers.install(self._contexts[self._local[0]].buffers)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Keep what is drawn, and seeded, within the block from everybody's streams."""
        current = self._outside if self.active is None else self._contexts[self.active].streams
        put_by = self.active is not None or not self._within
        if put_by:
            current.leave(self._device)
        self._aside.enter(self._device)
        try:
            yield
        finally:
            if put_by:
                current.enter(self._device)

    def seen(self) -> tuple[Document, dict[str, Tensor | None]]:
        """Return the random streams and buffers that code draws from and changes now, whosever they are."""
        streams = RandomStreams.capture(self._device).to_document()
        return streams, dict(zip(self._buffers.names, self._buffers.current(), strict=True))

    def named_buffers(self, virtual_rank: int) -> dict[str, Tensor | None]:
        """Return a worker's buffers by name; not copies. Only for a worker that is switched out."""
        return dict(zip(self._buffers.names, self._contexts[virtual_rank].buffers, strict=True))

    def streams(self, virtual_rank: int) -> RandomStreams:
        """Return a worker's random streams. Only for a worker that is switched out."""
        return self._contexts[virtual_rank].streams.values()

    def to_documents(self) -> list[Document]:
        """Return the local workers' contexts in virtual-rank order, for a checkpoint."""
        return [
            {"virtual_rank": rank, "streams": self.streams(rank).to_document(), "buffers": self.named_buffers(rank)}
            for rank in self._local
        ]

    def load(self, documents: list[Document], where: str) -> None:
        """Take the local workers' contexts from those of all workers, with buffers by plain name.

        Raises InputError when buffers do not fit.
        """
        loaded = {}
        for rank in self._local:
            document = documents[rank]
            context = self._contexts[rank]
            if (saved := set(document["buffers"])) != (present := set(self._buffers.plain_names)):
                name = sorted(saved ^ present)[0]
                side = "the checkpoint" if name in saved else "the model"
                raise InputError(f"{where}:buffers", f"{name} is only in {side}", "build the model that was saved")
            values: list[Tensor | None] = []
            memo: dict[int, Tensor] = {}
            for name, old in zip(self._buffers.plain_names, context.buffers, strict=True):
                new = document["buffers"][name]
                if new is not None and old is not None:  # tied in the model: tied again
                    new = memo.setdefault(id(old), new.to(self._device))
                values.append(new)
            loaded[rank] = Context(Streams(RandomStreams.from_document(document["streams"])), values)
        self._contexts = loaded
        self._buffers.install(self._contexts[self._local[0]].buffers)
