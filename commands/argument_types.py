"""Checks that what a program gives a verb is of the type in the verb's signature. Start at :func:`taken`.

A verb is a function of ``import ddltool as dt``; the command line reads texts and needs none of this. Numbers and arrays of
numpy become Python's, a path a text where a text is asked for.
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
    """Return the ``given`` arguments of a function by parameter, converted to the types in its signature where that is safe.

    Values of numpy become Python's, and paths texts where the function takes texts alone. Raises InputError for the first
    argument that is of none of its parameter's types.
    """
    hints = get_type_hints(function)
    converted = {}
    for name, value in given.items():
        hint = hints.get(name, Any)
        if hint is not Any and type(value).__module__ == "numpy" and hasattr(value, "tolist"):
            value = value.tolist()  # of a number, too
        if isinstance(value, os.PathLike) and not suits(value, hint) and suits("", hint):
            value = os.fspath(value)
        if not suits(value, hint):
            words = " or ".join(dict.fromkeys(_words(hint)))
            raise InputError(name, f"is {one_line(repr(value))[:60]}", f"give {words}")
        converted[name] = value
    return converted


def suits(value: Any, hint: Any) -> bool:
    """Return whether a value is of the type ``hint``, such as ``Sequence[int] | None``.

    Lists are looked at entry by entry; of a mapping or a function only that it is one. True for a type that this function does
    not know.

    >>> suits([1, 2], list[int] | None), suits("12", list[int]), suits(3, str | None)
    (True, False, False)
    """
    origin, inner = get_origin(hint), get_args(hint)  # of list[int]: list and (int,)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(suits(value, each) for each in inner)
    if origin is Literal:
        return any(value is each or (type(value) is type(each) and value == each) for each in inner)
    if origin is Callable:
        return callable(value)
    if not isinstance(origin or hint, type):  # a type variable or the like
        return True
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if origin is not None and issubclass(origin, Iterable) and origin is not tuple:
        is_many = isinstance(value, (Sequence, AbstractSet)) and not isinstance(value, (str, bytes))
        return is_many and all(suits(each, inner[0]) for each in value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if origin is None and issubclass(hint, os.PathLike):
        return isinstance(value, (str, os.PathLike))
    return origin is not None or isinstance(value, hint)


def _words(hint: Any) -> list[str]:
    """Return what the type ``hint`` is called in an error, such as "a list of texts"; one entry for each alternative."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return [word for each in inner for word in _words(each)]
    if origin is Literal:
        return [str(each) for each in inner]
    if isinstance(origin, type) and issubclass(origin, Iterable) and not issubclass(origin, Mapping) and inner:
        if inner[0] is Any:
            return ["a list"]
        return [f"a list of {word.removeprefix('a ')}s" for word in _words(inner[0])]
    kind = origin or hint
    return [_WORDS.get(kind, f"a {getattr(kind, '__name__', hint)}")]
