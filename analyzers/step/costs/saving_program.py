"""What blocks save as an integer program, and whole choices near its solution in fractions.

The waits for copies (:mod:`.saving`) are the least numbers that linear inequalities allow, and memory at every place is linear
in the choices (:mod:`.saving_options`), so that the least time within a budget of memory is an integer program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby, pairwise, product
from typing import Any

import numpy as np

from ddltool.analyzers.step.costs.saving import Saving
from ddltool.analyzers.step.costs.saving_options import SavingOptions
from ddltool.arrays import Floats, Ints
from ddltool.solver import IntegerProgram

# The fractions of a solution are averaged over so many blocks before they are rounded; each way gives a choice.
_AVERAGED = (1, 4, 8, 12, 16, 24, 32, 10**6)
# The solver counts in integers: seconds become whole nanoseconds, or whole millionths of a step with copies beside it.
_UNIT_S, _UNITS = 1e-9, 1e6


@dataclass(frozen=True, eq=False)
class SavingProgram:
    """The integer programs of what blocks save, which differ in their budgets of memory and in where it is limited."""

    options: SavingOptions

    @property
    def unit_s(self) -> float:
        """Return the seconds that a program counts as one."""
        return max(_UNIT_S, self.options.step_s / _UNITS) if self.options.copies else _UNIT_S

    def seconds(self, cost: float) -> float:
        """Return the seconds of what a program minimizes."""
        return cost / self._cost_weight * self.unit_s

    def cost(self, seconds: float) -> float:
        """Return what ``seconds`` are in what a program minimizes."""
        return seconds / self.unit_s * self._cost_weight

    @property
    def _cost_weight(self) -> int:
        """Return by what a program multiplies the cost, so that a unit of it outweighs a block on the host for every block."""
        return 1 + len(self.options.by_block)

    @cached_property
    def _columns(self) -> list[int]:
        """By block the column of its first option among a program's variables, and behind them the end of the last."""
        return [0, *accumulate(map(len, self.options.by_block))]

    @property
    def _block_columns(self) -> list[slice]:
        """Return by block the columns of its options among a program's variables."""
        return [slice(begin, end) for begin, end in pairwise(self._columns)]

    @property
    def peak_column(self) -> int:
        """Return the column of the most bytes at one time among a program's variables."""
        return self._columns[-1] + len(self.options.shared)

    def picked(self, values: Ints) -> list[int]:
        """Return the choice that a program's variables, with the values (n,) ``values``, stand for."""
        values_by_block = [values[own] for own in self._block_columns]
        return [int(own.argmax()) + 1 if own.any() else 0 for own in values_by_block]

    def hints(self, known: Saving) -> list[bool]:
        """Return, by block and option, whether the block saves in that way in ``known``, a choice of another problem."""
        hints = []
        for block, own_options in zip(self.options.lifetimes.blocks, self.options.by_block, strict=True):
            known_option = (known.saved_ops.get(block.name), block.name in known.on_host)
            hints += [option == known_option for option in own_options]
        return hints

    def of(self, places: Sequence[int], budget_bytes: float | None, most_s: float) -> IntegerProgram:
        """Return the integer program whose solution is the cheapest choice with memory limited at ``places``.

        Its variables are, in order: for every block and option whether the block takes it (0 or 1), for every set of blocks
        with common inputs whether these are held (0 or 1), the most bytes at one time if they are minimized, and the times of
        :meth:`_waits`. An expression is a row with the coefficients of all variables and a constant at its end; each of those
        made here is to be at most 0.

        ``budget_bytes``: the most bytes at one time; None: these are minimized, not the cost. ``most_s``: the most seconds that
        a choice may cost; infinite: any.
        """
        columns = self._columns
        peak = self.peak_column
        row = self._row
        rows = [row(own, 1, -1) for own in self._block_columns]  # at most one option; none: the block keeps everything
        for column, (blocks, _) in enumerate(self.options.shared, columns[-1]):
            for index in blocks:  # common inputs are held as soon as any of the blocks is recomputed
                recomputing = [
                    columns[index] + k for k, (saved, _) in enumerate(self.options.by_block[index]) if saved is not None
                ]
                rows.append(row(recomputing) - row(column))
        limit = row(peak) if budget_bytes is None else row(-1, 0, int(budget_bytes))
        for place in places:
            shared_bytes = np.array([curve[place] for _, curve in self.options.shared])
            added_bytes = np.concatenate([*(own[:, place] for own in self.options.added), shared_bytes])
            whole_bytes = np.ceil(added_bytes)  # so that no solution holds more than it says
            rows.append(row(slice(0, peak), whole_bytes, np.ceil(self.options.base[place])) - limit)

        upper = row(slice(0, peak))
        upper[peak] = 2**60
        cost = row(peak)
        if budget_bytes is not None:
            recomputes = self._in_units(self.options.recompute_s)
            cost = np.sum(recomputes, axis=0)
            if self.options.copies:
                wait_rows, waits, most = self._waits(recomputes, self._in_units(self.options.copy_s))
                rows += wait_rows
                cost += waits
                upper[peak + 1 : -1] = most
            if most_s < np.inf:
                most_units = math.ceil(most_s / self.unit_s) + len(self.options.by_block)  # each term was rounded
                rows.append(cost - row(-1, 0, most_units))
            # Of equally cheap choices the one with the fewest blocks on the host.
            is_on_host = [on_host for own_options in self.options.by_block for _, on_host in own_options]
            cost = self._cost_weight * cost + row(slice(0, columns[-1]), is_on_host)
        all_rows = np.array(rows)
        return IntegerProgram(cost=cost[:-1], upper=upper[:-1], rows=all_rows[:, :-1], limits=-all_rows[:, -1])

    def _row(self, columns: slice | int | Sequence[int], coefficients: Any = 1, constant: float = 0) -> Ints:
        """Return the expression with ``coefficients`` at some of a program's columns, and with a constant at its end."""
        waits = 4 * len(self.options.by_block) if self.options.copies else 0
        expression = np.zeros(self.peak_column + 1 + waits + 1, dtype=np.int64)
        expression[columns] = coefficients
        expression[-1] = constant
        return expression

    def _in_units(self, seconds_by_option: Sequence[Sequence[float]]) -> list[Ints]:
        """Return by block the expression of its chosen option's seconds in units of ``unit_s``."""
        return [
            self._row(own, [round(each_s / self.unit_s) for each_s in own_s])
            for own, own_s in zip(self._block_columns, seconds_by_option, strict=True)
        ]

    def _waits(self, recomputes: Sequence[Ints], copies: Sequence[Ints]) -> tuple[list[Ints], Ints, int]:
        """Return (expressions that are at most 0, the wait for all copies to the host and back, the most of each time).

        The inequalities are those of :meth:`Copies.waits`: the least numbers that they allow are the waits. Of a block without
        a copy each follows from its neighbours', so none depends on what is picked. Behind the most bytes the variables are,
        for the forward and then the backward passes, all waits up to each block's and the end of each block's copy.

        Args:
            recomputes: by block, the time of its recomputation in units of ``unit_s``.
            copies: by block, the time of its copy in these units.
        """
        row = self._row
        count = len(copies)
        window = self.options.window
        rows: list[Ints] = []
        waits = row(-1, 0)
        column = self.peak_column + 1
        for is_forward in (True, False):
            late = [row(column + block) for block in range(count)]
            done = [row(column + count + block) for block in range(count)]
            column += 2 * count
            order = range(count) if is_forward else range(count - 1, -1, -1)
            plain_s = self.options.plain.ends if is_forward else self.options.plain.begins
            # By block, when its pass ends (forward), or begins (backward): after the recomputation of all blocks behind it.
            clock = [late[block] + row(-1, 0, round(plain_s[block] / self.unit_s)) for block in range(count)]
            if not is_forward:
                again = row(-1, 0)
                for block in order:
                    clock[block] += again
                    again += recomputes[block]
            for before, block in pairwise(order):
                rows += [late[before] - late[block], done[before] + copies[block] - done[block]]
            for block in order:
                # Out: begun at the own end, awaited a window later. Back: begun a window earlier, awaited at the own begin.
                begun = block if is_forward else block + window
                if begun < count:
                    rows.append(clock[begun] + copies[block] - done[block])
                awaited = block - window if is_forward else block
                if awaited >= 0 and awaited + window < count:
                    rows.append(done[awaited] - clock[block])
            waits += late[order[-1]]
        # No wait and no copy ends later than everything one after another, each of the longest kind.
        most_s = self.options.step_s + sum(map(max, self.options.recompute_s)) + sum(map(max, self.options.copy_s))
        return rows, waits, 4 * round(most_s / self.unit_s) + 2

    def near(self, values: Floats) -> list[list[int]]:
        """Return whole choices near a solution in fractions, whose variables have the values (n,) ``values``.

        The fractions of each block are averaged with those of its neighbours in a run of blocks of one kind: a solver returns
        a corner, in which the kinds of saving come in bursts, and bursts of copies have to wait for the link. From block to
        block each then takes the way with the largest sum of fractions not yet taken (error diffusion).
        """
        widest = max(map(len, self.options.by_block))
        fractions = np.zeros((len(self.options.by_block), 1 + widest))
        for own_fractions, own in zip(fractions, self._block_columns, strict=True):
            own_fractions[1 : 1 + own.stop - own.start] = values[own]
            own_fractions[0] = 1.0 - values[own].sum()
        kinds = [*zip(self.options.by_block, self.options.recompute_s, self.options.copy_s, strict=True)]
        runs = [list(indices) for _, indices in groupby(range(len(kinds)), key=lambda index: kinds[index])]
        choices = []
        for width, step in product(_AVERAGED, (1, -1)):
            choice = [0] * len(kinds)
            for indices in runs:
                carried = np.zeros(1 + widest)
                for index in indices[::step]:
                    first = max(indices[0], index - width // 2)
                    carried += fractions[first : min(indices[-1], index + width // 2) + 1].mean(axis=0)
                    choice[index] = int(carried.argmax())
                    carried[choice[index]] -= 1.0
            choices.append(choice)
        return choices
