"""The one exception family, with the exit code each member ends a command with.

::

    DdlToolError            1   what was run failed: a process was killed, processes lost each other
    +-- CheckFailed         1   a gate or a verification said no
    +-- InputError          2   a file, an option or a value is wrong: says where, what, and what would be right
    |   +-- MissingExtra    2   an optional package is needed and not installed
    +-- Infeasible          3   no plan satisfies the constraints: says which
    +-- NotProven           3   a solver ran out of time without any answer
    +-- Interrupted       130   Ctrl-C, where there is more to say than that: what is kept

Library code raises these; only :func:`ddltool.__main__.main` turns them into a line and an exit code.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# Names come from files that others wrote: one of ten thousand characters must not hide the message.
LONGEST_PART = 1000


class DdlToolError(Exception):
    """The base of all errors; its message is one line for the user."""

    exit_code = 1


class CheckFailed(DdlToolError):
    """A check ran and its answer is no."""

    exit_code = 1


class InputError(DdlToolError):
    """Input that cannot be used; the message is ``WHERE: PROBLEM; REMEDY`` on one line.

    ``where`` is ``FILE`` or ``FILE:FIELD`` or an option; ``remedy`` says what would be right.
    """

    exit_code = 2

    def __init__(self, where: str, problem: str, remedy: str = "") -> None:
        """Make the one-line message ``WHERE: PROBLEM; REMEDY``, its parts cut to a readable length."""
        self.where = where
        self.problem = problem
        self.remedy = remedy
        where, problem, remedy = (shortened(part, LONGEST_PART) for part in (where, problem, remedy))
        text = ": ".join(part for part in (where, problem) if part)
        super().__init__(one_line(f"{text}; {remedy}" if remedy else text))

    def __reduce__(self) -> tuple[type[InputError], tuple[str, str, str]]:
        """Return how pickle rebuilds the error in another process: from its three parts, not from its message.

        A MissingExtra, which takes other parts, arrives as an InputError with the same message.
        """
        return InputError, (self.where, self.problem, self.remedy)


class MissingExtra(InputError):
    """An optional package is needed for this input."""

    def __init__(self, where: str, package: str, extra: str) -> None:
        """Say that ``where`` (an option or a value) needs ``package``, which ddltool's ``extra`` brings."""
        super().__init__(where, f"needs the package {package}", f"install it with: pip install 'ddltool[{extra}]'")


class Infeasible(DdlToolError):
    """No plan exists under the constraints; the message names the one that binds."""

    exit_code = 3


class NotProven(DdlToolError):
    """The solver stopped at its time limit without any solution."""

    exit_code = 3


class Interrupted(DdlToolError):
    """The user stopped a run that leaves something behind; the message says what, and how to go on."""

    exit_code = 130

    def __init__(self, kept: str) -> None:
        """Say that the run was interrupted, and what was ``kept`` of it."""
        super().__init__(f"interrupted; {kept}")


@contextmanager
def naming(path: str | Path, fields: Collection[str]) -> Iterator[None]:
    """Add the file's name to an InputError of the body whose ``where`` is only a field of that file.

    ``fields``: the names of the file's top fields. Errors about anything else, and other kinds of errors, pass unchanged.
    """
    try:
        yield
    except InputError as error:
        top_field = re.split("[.:[]", error.where, maxsplit=1)[0]  # "devices" of "devices[0].type"
        if type(error) is not InputError or top_field not in fields:
            raise
        raise InputError(f"{path}:{error.where}", error.problem, error.remedy) from None


def one_line(text: str) -> str:
    """Return ``text`` with every run of white space (newlines included) as one blank, made :func:`visible`."""
    return visible(" ".join(text.split()))


def visible(text: str) -> str:
    r"""Return ``text`` with each unprintable character (controls, bidirectional marks) as an escape such as ``\x1b``.

    A terminal would act on such characters. Newlines and tabs stay.

    >>> visible("V100\u202e001P")
    'V100\\u202e001P'
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in "\n\t" else character.encode("unicode_escape").decode()
        for character in text
    )


def shortened(text: str, most: int) -> str:
    """Return ``text``, its middle replaced by … if it has more than ``most`` characters: names differ at both ends.

    >>> shortened("telemetry-of-node-17.jsonl", 15)
    'telemet…7.jsonl'
    """
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return f"{text[: most - 1 - tail]}…{text[len(text) - tail :]}"


def few(remarks: Sequence[str], most: int = 4) -> list[str]:
    """Return the first ``most`` remarks, each cut to 240 characters, and a line with the number of those left out, if any."""
    shown = [shortened(remark, 240) for remark in remarks[:most]]
    if len(remarks) > most:
        shown.append(f"and {len(remarks) - most:,} more of the kind")
    return shown


def listed(names: Sequence[str], most: int) -> str:
    """Return names joined by commas: the first ``most``, and the number of those left out, as "a, b and 3 more"."""
    shown = ", ".join(shortened(name, 60) for name in names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


_LISTED = 30


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return a remedy for the unknown ``word``: the most similar of ``choices``, if any is similar, then the choices.

    The choices are sorted; of more than 30 the first 30 are named.

    >>> did_you_mean("V-100", ["V100", "P100"])
    'did you mean "V100"? (known: P100, V100)'
    """
    names = sorted(choices)
    listing = ", ".join(names[:_LISTED])
    if len(names) > _LISTED:
        listing += f" and {len(names) - _LISTED} more"
    similar = difflib.get_close_matches(word, names, n=1)
    return f'did you mean "{similar[0]}"? (known: {listing})' if similar else f"known: {listing}"


def known(option: str, name: str, names: Sequence[str]) -> str:
    """Return the one of ``names`` that equals ``name`` but for upper and lower case.

    Raises InputError for any other name, with the most similar one. ``option``: where the name was given, for the message.
    """
    for each in names:
        if each.lower() == name.lower():
            return each
    raise InputError(option, f"unknown {option.removeprefix('--')} {name!r}", did_you_mean(name, names))
