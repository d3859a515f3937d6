"""Whether what a program gives a verb is of the type that the verb says. Start at :func:`demand_types`.

The command line reads texts and needs none of this. Numbers of numpy, and a path for a text or a text for a path, are as good.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ddltool.errors import InputError, one_line

_PLAIN = {str: (str, os.PathLike), float: (Real,), int: (Integral,), NoneType: (NoneType,)}
_WORDS = {
    str: "a text",
    float: "a number",
    int: "a whole number",
    bool: "True or False",
    NoneType: "None",
    Path: "a path",
}


def demand_types(function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise InputError for the first of the ``given`` arguments of a function that is of none of the types it says."""
    hints = get_type_hints(function)
    for name, value in given.items():
        if not suits(value, hint := hints.get(name, Any)):
            shown = one_line(repr(value))[:60]
            raise InputError(name, f"is {shown}", f"give {' or '.join(dict.fromkeys(_words(hint)))}")


def suits(value: Any, hint: Any) -> bool:
    """Return whether a value is of a type, as ``Sequence[int] | None``; True for a type that this function does not know.

    >>> suits([1, 2], list[int] | None), suits("12", list[int]), suits(3, str | None)
    (True, False, False)
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin is Annotated:
        return suits(value, inner[0])
    if origin in (Union, UnionType):
        return any(suits(value, each) for each in inner)
    if origin is Literal:
        return value in inner
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if isinstance(origin, type) and issubclass(origin, Iterable) and origin is not tuple:
        is_many = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
        return is_many and (
            not isinstance(value, (list, tuple, AbstractSet)) or all(suits(each, inner[0]) for each in value)
        )
    if hint in _PLAIN:
        return isinstance(value, _PLAIN[hint])
    if isinstance(hint, type) and issubclass(hint, os.PathLike):
        return isinstance(value, (str, os.PathLike))
    return not isinstance(hint, type) or origin is not None or isinstance(value, hint)


def _words(hint: Any) -> list[str]:
    """Return what a type is called in an error, a word for each of its alternatives."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _words(inner[0])
    if origin in (Union, UnionType):
        return [word for each in inner for word in _words(each)]
    if origin is Literal:
        return [str(each) for each in inner]
    if isinstance(origin, type) and issubclass(origin, Iterable) and not issubclass(origin, Mapping) and inner:
        return [f"a list of {_words(inner[0])[0].removeprefix('a ')}s"]
    return [_WORDS.get(hint, f"a {getattr(origin or hint, '__name__', hint)}")]
