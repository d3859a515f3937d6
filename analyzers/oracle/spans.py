"""Spans of a trace as columns: which lies in which, what runs below, and how long something was busy.

A span is one timed range on one CPU thread. Spans of a thread nest, so that each has at most one parent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int32]
Flags = NDArray[np.bool_]

# Times that were cut to whole microseconds let a child stand out of its parent by as much.
_OVERHANG_S = 1.0e-6
_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Spans:
    """``m`` spans sorted by thread, then start, then longest first: a parent stands before what it holds."""

    key: Indices
    """(m,) index into the trace's names."""
    thread: Indices
    """(m,) number of the thread."""
    start_s: Floats
    duration_s: Floats
    parent: Indices
    """(m,) index of the span around it on the same thread, -1 at the top."""
    levels: list[Indices]
    """The spans of each depth that have a parent, shallowest first."""

    @classmethod
    def build(
        cls, key: Indices, thread: Indices, start_s: Floats, duration_s: Floats
    ) -> tuple[Spans, NDArray[np.intp]]:
        """Return the sorted spans, and the order that sorts other columns likewise. O(m log m)."""
        order = np.lexsort((-duration_s, start_s, thread))
        key, thread, start_s, duration_s = key[order], thread[order], start_s[order], duration_s[order]
        parent, depth = _nest(thread, start_s, start_s + duration_s)
        by_depth = np.argsort(depth, kind="stable").astype(np.int32)
        levels = np.split(by_depth, np.cumsum(np.bincount(depth))[:-1])[1:] if depth.size else []
        table = cls(key=key, thread=thread, start_s=start_s, duration_s=duration_s, parent=parent, levels=levels)
        return table, order

    def __len__(self) -> int:
        return len(self.key)

    def below(self, marked: Flags) -> Flags:
        """Return (m,) whether any span around span i, itself left out, is marked. O(m)."""
        found = np.zeros(len(self), dtype=bool)
        for level in self.levels:
            around = self.parent[level]
            found[level] = found[around] | marked[around]
        return found

    def with_nested(self, amount: Floats) -> Floats:
        """Return (m,) each span's amount plus that of every span in it. O(m)."""
        total = amount.copy()
        for level in reversed(self.levels):
            np.add.at(total, self.parent[level], total[level])
        return total

    def innermost(self, thread: Indices, time_s: Floats) -> Indices:
        """Return (k,) the innermost span around each moment on its thread, -1 where there is none. O(k log m)."""
        found = np.full(len(time_s), -1, dtype=np.int32)
        for number in np.unique(thread):
            asked = np.flatnonzero(thread == number)
            first, last = np.searchsorted(self.thread, [number, number + 1])
            found[asked] = np.searchsorted(self.start_s[first:last], time_s[asked], side="right") - 1
            found[asked[found[asked] >= 0]] += np.int32(first)
        if not len(self):
            return found
        end = self.start_s + self.duration_s
        while (over := np.flatnonzero((found >= 0) & (end[found] < time_s))).size:
            found[over] = self.parent[found[over]]  # what started last is over: the moment lies in a span around it
        return found


def _nest(thread: Indices, start_s: Floats, end_s: Floats) -> tuple[Indices, Indices]:
    parents, depths = np.empty(len(thread), dtype=np.int32), np.empty(len(thread), dtype=np.int32)
    stack: list[tuple[int, float]] = []
    current = -1
    for first in range(0, len(thread), _CHUNK):  # Python floats of a chunk at a time: they take three times the memory
        part = slice(first, first + _CHUNK)
        rows = zip(thread[part].tolist(), start_s[part].tolist(), end_s[part].tolist(), strict=True)
        for position, (where, start, end) in enumerate(rows, first):
            if where != current:
                current = where
                stack.clear()
            while stack and (start >= stack[-1][1] or end > stack[-1][1] + _OVERHANG_S):
                stack.pop()
            parents[position] = stack[-1][0] if stack else -1
            depths[position] = len(stack)
            stack.append((position, end))
    return parents, depths


def busy_s(start_s: Floats, duration_s: Floats) -> float:
    """Return the length of the union of intervals, seconds; shapes (k,) and (k,). O(k log k).

    Overlapping intervals (several streams) count once.
    """
    if not len(start_s):
        return 0.0
    order = np.argsort(start_s, kind="stable")
    start = start_s[order]
    reach = np.maximum.accumulate(start + duration_s[order])
    # Each interval adds what reaches beyond everything before it.
    before = np.concatenate([start[:1], reach[:-1]])
    return float(np.maximum(reach - np.maximum(start, before), 0.0).sum())
