"""Plain words for pydantic's validation errors: what is wrong, and what would be right. Start at :func:`in_words`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddltool.errors import one_line, shortened

_LONGEST_VALUE = 80
# Pydantic's error types for an unknown field: of a model, of a dataclass.
UNKNOWN_FIELD = frozenset(["extra_forbidden", "unexpected_keyword_argument"])
# What to give instead, by the type in the name of pydantic's error.
_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "string": "a text",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "set": "a list",
    "dict": "a mapping",
    "mapping": "a mapping",
    "model": "a mapping",
    "dataclass": "a mapping",
    "none": "null",
}


def in_words(complaint: Mapping[str, Any]) -> tuple[str, str]:
    """Return (what is wrong, what would be right) for one of pydantic's complaints (``ValidationError.errors()``).

    >>> in_words({"type": "greater_than", "ctx": {"gt": 0.0}, "input": 0, "msg": "Input should be greater than 0"})
    ('is 0', 'give a number above 0')
    >>> in_words({"type": "dict_type", "input": [], "msg": "Input should be a valid dictionary"})
    ('is a list', 'give a mapping')
    """
    kind = str(complaint["type"])
    value = complaint.get("input")  # what was refused
    context = complaint.get("ctx") or {}  # such as the limit that it exceeds
    if kind == "missing":
        return "is missing", "it is required"
    if kind in UNKNOWN_FIELD:
        return "is unknown", "remove it"
    remedy_words = _wanted(kind, context)
    if kind in ("string_too_short", "too_short", "string_too_long", "too_long"):
        return _length_in_words(kind, value), remedy_words
    if remedy_words:
        return f"is {shown(value)}", remedy_words
    # The messages of our own validators are plain already; for errors that are not covered above, pydantic's is shown.
    message = one_line(str(complaint["msg"]).removeprefix("Value error, "))
    if value is None or isinstance(value, (str, int, float)):
        message += f" (got {shown(value)})"
    return message, ""


def shown(value: object) -> str:
    """Return a value as JSON and YAML write it, shortened; a list or a mapping is only named as such.

    >>> shown(True), shown(None), shown("4"), shown({"a": 1}), shown(1e308)
    ('true', 'null', "'4'", 'a mapping', '1e+308')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (str, bytes, int, float)):
        return shortened(repr(value), _LONGEST_VALUE)
    if isinstance(value, (list, tuple, set)):
        return "a list"
    return "a mapping" if isinstance(value, Mapping) else f"a {type(value).__name__}"


def _wanted(kind: str, context: Mapping[str, Any]) -> str:
    """Return what would be right in place of a value that pydantic refuses, such as "give a number above 0".

    Returns "" for a type of error that is not covered. ``kind`` and ``context`` are the error's ``type`` and ``ctx``.
    """
    if kind == "greater_than_equal" and 0 < context["ge"] < 1e-6:  # the limits of Positive and Duration
        return f"give a number above 0 (at least {_number(context['ge'])})"
    for name, key, words in (
        ("greater_than", "gt", "above"),
        ("greater_than_equal", "ge", "of at least"),
        ("less_than", "lt", "below"),
        ("less_than_equal", "le", "of at most"),
        ("multiple_of", "multiple_of", "that is a multiple of"),
    ):
        if kind == name:
            return f"give a number {words} {_number(context[key])}"
    if kind == "finite_number":
        return "give a finite number"
    if kind == "string_unicode":
        return "give a text"
    if kind == "string_pattern_mismatch":
        return {r"\S": "give a name", "^[0-9a-f]{64}$": "give 64 hexadecimal digits"}.get(context["pattern"], "")
    if kind == "literal_error":
        return f"give {context['expected']}"
    if kind in ("string_too_short", "too_short"):
        return f"give at least {_counted(kind, context['min_length'])}"
    if kind in ("string_too_long", "too_long"):
        return f"give at most {_counted(kind, context['max_length'])}"
    # pydantic names a type's errors by how they came about: int_type, int_parsing, int_from_float.
    for ending in ("_attributes_type", "_type", "_parsing", "_parsing_size", "_from_float", "_required"):
        if kind.endswith(ending) and kind.removesuffix(ending) in _WANTED:
            return f"give {_WANTED[kind.removesuffix(ending)]}"
    return ""


def _number(value: float) -> str:
    """Return a limit as text: 5 for 5.0."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _length_in_words(kind: str, value: object) -> str:
    """Return the length of a text or a list in words, such as "has 3 entries"; ``kind``: the type of pydantic's error."""
    count = len(value) if isinstance(value, (str, list, tuple, dict)) else 0
    return f"has {_counted(kind, count)}" if count else "is empty"


def _counted(kind: str, count: int) -> str:
    """Return ``count`` characters (for an error about a text) or entries, in words."""
    unit, units = ("character", "characters") if kind.startswith("string") else ("entry", "entries")
    return f"{count} {unit if count == 1 else units}"
