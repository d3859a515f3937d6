"""Plain Python state of modules, which the logical workers of a process share. Start at :class:`AttributeWatch`.

Buffers belong to a logical worker and are swapped with it. ``self.calls += 1`` in a forward pass is no buffer: it counts
the turns of the process, however many workers take them, and is in no checkpoint. What a forward pass makes of such a
number then depends on the placement. Whether it makes anything of it cannot be seen from outside.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from ddltool.runtime.elastic.checkpoint import plain_name

WATCHED_TURNS = 2
_PLAIN = frozenset({int, float, bool, str, type(None)})


class AttributeWatch:
    """Warns of plain attributes that the first two turns on a process have both changed.

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
        present = dict(_attributes(self._model))
        self._changed.append({key for key, value in present.items() if self._before.get(key) != value})
        if self._turns_left == 0 and (both := sorted(set.intersection(*self._changed))):
            module, name = both[0]
            where = f"module {module}" if module else "the model"
            others = ", ".join(f"{place or 'the model'}: {other}" for place, other in both[1:])
            more = f" (and {others})" if others else ""
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
