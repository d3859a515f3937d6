"""The texts that options take, as numbers and checked names; each error names the option."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ddltool.errors import InputError
from ddltool.units import parse_duration, parse_share

_LONGEST_BUDGET_S = 30 * 86400.0
_MOST_NUMBERS = 1000


@contextmanager
def as_options(names: Mapping[str, str]) -> Iterator[None]:
    """Name the option in an InputError of the code inside: library functions name their own fields.

    ``names``: the option by the field. Also decorates a command.
    """
    try:
        yield
    except InputError as error:
        if error.where in names:
            field, error.where = error.where, names[error.where]
            # what was added to the line since, such as the rows that are kept, stays
            error.args = (error.where + str(error).removeprefix(field),)
        raise


def number(where: str, least: float = -math.inf, most: float = math.inf) -> Callable[[str | float], float]:
    """Return what reads a number from ``least`` to ``most``, as ``typer.Option(parser=)`` takes it.

    A bound of typer's own tells whoever gives NaN that it "should be less than" something.
    """

    def read(text: str | float) -> float:
        try:
            value = float(text)
        except ValueError:
            raise InputError(where, f"{text!r} is no number", "give a number") from None
        if math.isnan(value):
            raise InputError(where, "is nan", "give a number")
        if not least <= value <= most:
            limits = f"from {least:.15g} to {most:.15g}" if most < math.inf else f"of at least {least:.15g}"
            raise InputError(where, f"is {value:.15g}", f"give a number {limits}")
        return value

    return read


def integers(
    text: str, where: str, least: int = 1, most: int | None = None, *, ordered: bool = True, once: bool = True
) -> tuple[int, ...]:
    """Return the numbers in ``1,2,4``; ``once``: each once, ``ordered``: by size, else as they stand.

    Raises InputError for anything that is no whole number from ``least`` to ``most``.
    """
    remedy = "write for example 1,2,4" if least else "write for example 0,1,4"
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:  # also a number of thousands of digits
        shown = text if len(text) <= 60 else f"{text[:60]}..."
        raise InputError(where, f"{shown!r} is not a list of whole numbers", remedy) from None
    if min(values) < least:
        raise InputError(where, f"{min(values)} is below {least}", f"write whole numbers >= {least}")
    if most is not None and max(values) > most:
        raise InputError(where, f"has {max(values)}", f"give whole numbers up to {most}")
    if len(values) > _MOST_NUMBERS:
        raise InputError(where, f"holds {len(values)} numbers", f"give at most {_MOST_NUMBERS}")
    return (tuple(sorted(set(values)) if ordered else dict.fromkeys(values))) if once else values


def device_counts(option: str, text: str) -> dict[str, int]:
    """Return ``V100=2,T4=1`` as numbers by device type. Raises InputError for anything else."""
    counts: dict[str, int] = {}
    for part in text.split(","):
        name, equals, number = part.strip().rpartition("=")
        if not (equals and name and number.isascii() and number.isdigit() and len(number) <= 9):
            raise InputError(option, f"{part.strip()!r} is not TYPE=N", "for example V100=2,T4=1")
        if name in counts:
            raise InputError(option, f"{name} stands twice", "add the counts up")
        counts[name] = int(number)
    return counts


def single(numbers: tuple[int, ...] | None, text: str, where: str, remedy: str) -> int | None:
    """Return the only one of the ``numbers`` that ``text`` gave, None where it gave none at all.

    Raises InputError, which ends with ``remedy``, for several numbers and for words in place of one.
    """
    if numbers is None:
        return None
    if len(numbers) != 1:
        raise InputError(where, f"is {text}", remedy)
    return numbers[0]


def share(text: str, where: str) -> float:
    """Return the share that ``5%`` or ``0.05`` means. Raises InputError unless it lies above 0 and below 1."""
    value = parse_share(text)
    if not 0 < value < 1:
        raise InputError(where, f"{text!r} is not a share", "write for example 5% or 0.05")
    return value


def budget(text: str, where: str) -> float:
    """Return the seconds that ``60s`` or ``5min`` means. Raises InputError for 0, and for more than thirty days."""
    seconds = parse_duration(text, where)
    if not 0 < seconds <= _LONGEST_BUDGET_S:
        raise InputError(where, f"{text!r} is not a usable time", "write a time above 0 and up to 720h, such as 60s")
    return seconds


def words(text: str, option: str) -> list[str]:
    """Return a script and its arguments. Raises InputError naming the option where there are none."""
    try:
        found = shlex.split(text)
    except ValueError as error:
        raise InputError(option, f"cannot be split into words ({error})", "mind the quotes") from None
    if not found or not text.isprintable():
        raise InputError(option, "names no script, or holds a line break", 'give "train.py --its options"')
    if not found[0] or found[0].startswith("-"):
        raise InputError(option, f"begins with {found[0]!r}, which is no script", 'give "train.py --its options"')
    return found
