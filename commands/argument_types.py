"""Whether what a program gives a verb is of a type that the verb says. Start at :func:`taken`.

The command line reads texts and needs none of this. Numbers and arrays of numpy become Python's, a path a text where a text is
asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ddltool.errors import InputError, one_line

_WORDS = {
    str: "a text",
    float: "a number",
    int: "a whole number",
    bool: "True or False",
    NoneType: "None",
    Path: "a path",
}
_WORDS |= {Mapping: "a mapping", Callable: "a function"}  # type: ignore[dict-item]


def taken(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``given`` arguments of a function, those of numpy as Python's and paths as texts where it takes texts alone.

    Raises InputError for the first that is of none of the types that the function says.
    """
    hints, made = get_type_hints(function), {}
    for name, value in given.items():
        hint = hints.get(name, Any)
        if hint is not Any and type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            value = value.tolist()  # of a number, too
        if isinstance(value, os.PathLike) and not suits(value, hint) and suits("", hint):
            value = os.fspath(value)
        if not suits(value, hint):
            words = " or ".join(dict.fromkeys(_words(hint)))
            raise InputError(name, f"is {one_line(repr(value))[:60]}", f"give {words}")
        made[name] = value
    return made


def suits(value: Any, hint: Any) -> bool:
    """Return whether a value is of a type, as ``Sequence[int] | None``; True for a type that this function does not know.

    >>> suits([1, 2], list[int] | None), suits("12", list[int]), suits(3, str | None)
    (True, False, False)
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(suits(value, each) for each in inner)
    if hint is Any or origin is Literal:
        return hint is Any or any(value is each or (type(value) is type(each) and value == each) for each in inner)
    if origin is Callable or not isinstance(origin or hint, type):
        return callable(value) if origin is Callable else True
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if origin is not None and issubclass(origin, Iterable) and origin is not tuple:
        is_many = isinstance(value, (Sequence, AbstractSet)) and not isinstance(value, (str, bytes))
        return is_many and all(suits(each, inner[0]) for each in value)
    if hint in (int, float):
        return isinstance(value, int if hint is int else (int, float)) and not isinstance(value, bool)
    if origin is None and issubclass(hint, os.PathLike):
        return isinstance(value, (str, os.PathLike))
    return origin is not None or isinstance(value, hint)


def _words(hint: Any) -> list[str]:
    """Return what a type is called in an error, a word for each of its alternatives."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return [word for each in inner for word in _words(each)]
    if origin is Literal:
        return [str(each) for each in inner]
    if isinstance(origin, type) and issubclass(origin, Iterable) and not issubclass(origin, Mapping) and inner:
        return [f"a list of {word.removeprefix('a ')}s" for word in _words(inner[0]) if inner[0] is not Any] or [
            "a list"
        ]
    return [_WORDS.get(origin or hint, f"a {getattr(origin or hint, '__name__', hint)}")]
