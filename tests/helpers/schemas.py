"""What a JSON Schema says of each field, as values that it allows and values that lie just outside."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]
Path = tuple[str | int, ...]
ITEM, KEY = "[]", "{}"
"""Any entry of a list, any key of a mapping: steps of a field's way."""
_PYTHON = {"number": (int, float), "integer": (int,), "string": (str,), "boolean": (bool,), "null": (type(None),)}
_TEXTS = ("0.1", "nan", "", "x")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A field that holds one value: the way to it, and the alternatives of its schema."""

    way: tuple[str, ...]
    options: tuple[Schema, ...]

    @property
    def name(self) -> str:
        """The last name of the way."""
        return next(step for step in reversed(self.way) if step not in (ITEM, KEY))

    @property
    def types(self) -> set[str]:
        """The JSON types that it may have."""
        return {type_of(option) for option in self.options}

    @property
    def numeric(self) -> Schema | None:
        """The alternative that is a number."""
        return next((option for option in self.options if type_of(option) in ("number", "integer")), None)

    def wrong(self) -> st.SearchStrategy[Any]:
        """Return values that the schema refuses: those just outside, and any further out."""
        boundary = st.sampled_from(self.just_outside())
        numeric = self.numeric
        if numeric is None:
            return boundary
        low, high = numeric.get("minimum", numeric.get("exclusiveMinimum")), numeric.get("maximum")
        further: list[st.SearchStrategy[Any]] = []
        if numeric["type"] == "integer":
            further += [st.integers(-(2**63), low - 1)] if low is not None and low > -(2**63) else []
            further += [st.integers(high + 1, 2**63 - 1)] if high is not None and high < 2**63 - 1 else []
        else:
            further += [st.floats(max_value=low, exclude_max="minimum" in numeric)] if low is not None else []
            further += [st.floats(min_value=high, exclude_min=True)] if high is not None else []
        return st.one_of(boundary, *further)

    def just_outside(self) -> list[Any]:
        """Return the values at the limits that the schema refuses, and NaN, infinities, text, bool, null, huge."""
        numeric = self.numeric
        values: list[Any] = [
            True,
            None,
            *_TEXTS,
            math.nan,
            math.inf,
            -math.inf,
            1e308,
            -1e308,
            10**30,
            [],
            {},
            5e-324,
            0.5,
        ]
        if numeric is not None:
            whole = numeric["type"] == "integer"
            low, high = numeric.get("minimum"), numeric.get("maximum")
            values += [] if low is None else [low - 1 if whole else math.nextafter(low, -math.inf)]
            values += [] if high is None else [high + 1 if whole else math.nextafter(high, math.inf)]
            values += [numeric["exclusiveMinimum"]] if "exclusiveMinimum" in numeric else []
        return [value for value in values if not any(allows(option, value) for option in self.options)]


def type_of(schema: Schema) -> str:
    """Return the JSON type of an alternative without alternatives."""
    for key in ("const", "enum"):
        if key in schema:
            value = schema[key] if key == "const" else schema[key][0]
            return next(name for name in ("boolean", "string", "integer", "number") if type(value) in _PYTHON[name])
    return str(schema.get("type", "any"))


def allows(schema: Schema, value: Any) -> bool:
    """Return whether an alternative takes a value, as this project reads JSON: a bool is no number."""
    if "const" in schema or "enum" in schema:
        allowed = schema.get("enum", [schema.get("const")])
        return any(type(each) is type(value) and each == value for each in allowed)
    kind = type_of(schema)
    if kind == "any":
        return True
    if kind in ("array", "object"):
        return isinstance(value, list if kind == "array" else dict)
    if kind == "string":
        return isinstance(value, str) and len(value) >= schema.get("minLength", 0) and fits(schema, value)
    if type(value) not in _PYTHON[kind]:
        return False
    if kind not in ("number", "integer"):
        return True
    return bool(
        math.isfinite(value)
        and value >= schema.get("minimum", -math.inf)
        and value > schema.get("exclusiveMinimum", -math.inf)
        and value <= schema.get("maximum", math.inf)
    )


def fits(schema: Schema, text: str) -> bool:
    """Return whether a text has the pattern of a schema."""
    return re.search(schema.get("pattern", ""), text) is not None


def alternatives(schema: Schema, root: Schema) -> list[Schema]:
    """Return the alternatives of a schema, references followed."""
    if "$ref" in schema:
        return alternatives(root["$defs"][schema["$ref"].rsplit("/", 1)[-1]], root)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return [found for each in schema[key] for found in alternatives(each, root)]
    if "allOf" in schema:
        return alternatives(schema["allOf"][0], root)
    return [schema]


def leaves(schema: Schema, root: Schema | None = None, way: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """Yield the fields of a schema that hold single values."""
    root = root or schema
    options = alternatives(schema, root)
    nested = [one for one in options if type_of(one) in ("array", "object") and _holds(one)]
    if not nested and way:
        yield Leaf(way, tuple(options))
    for one in nested:
        for name, inner in one.get("properties", {}).items():
            yield from leaves(inner, root, (*way, name))
        if isinstance(one.get("additionalProperties"), dict):
            yield from leaves(one["additionalProperties"], root, (*way, KEY))
        if isinstance(one.get("items"), dict):
            yield from leaves(one["items"], root, (*way, ITEM))
        for inner in one.get("prefixItems", [])[:1]:
            yield from leaves(inner, root, (*way, ITEM))


def _holds(schema: Schema) -> bool:
    inner = schema.get("additionalProperties")
    return bool(schema.get("properties") or schema.get("items") or schema.get("prefixItems") or isinstance(inner, dict))


def places(document: Any, way: tuple[str, ...], path: Path = ()) -> Iterator[Path]:
    """Yield the paths in a document that a way leads to; the last step may lead to a field that is not there."""
    if not way:
        yield path
        return
    step, rest = way[0], way[1:]
    if step == ITEM and isinstance(document, list):
        for position, inner in enumerate(document):
            yield from places(inner, rest, (*path, position))
    elif step == KEY and isinstance(document, dict):
        for key, inner in document.items():
            yield from places(inner, rest, (*path, key))
    elif isinstance(document, dict) and step not in (ITEM, KEY):
        if step in document:
            yield from places(document[step], rest, (*path, step))
        elif not rest:
            yield (*path, step)


def with_value(document: Any, path: Path, value: Any) -> Any:
    """Return a copy of a document with another value at a path."""
    changed = copy.deepcopy(document)
    inner = changed
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return changed


def least(schema: Schema, root: Schema) -> Any:
    """Return a small value that a schema allows, optional fields and one entry of each list and mapping filled in."""
    one = next((each for each in alternatives(schema, root) if type_of(each) != "null"), {"type": "null"})
    kind = type_of(one)
    if "const" in one or "enum" in one:
        return one.get("const", one.get("enum", [None])[0])
    if kind == "object":
        fields = {name: least(inner, root) for name, inner in one.get("properties", {}).items()}
        extra = one.get("additionalProperties")
        return fields | ({"x": least(extra, root)} if isinstance(extra, dict) else {})
    if kind == "array":
        entries = one.get("prefixItems") or [one.get("items", {})] * max(1, one.get("minItems", 1))
        return [least(entry, root) for entry in entries]
    if kind in ("number", "integer"):
        return max(1, one.get("minimum", 1)) if one.get("maximum", 1) >= 1 else one.get("minimum", 0)
    text = "x" if fits(one, "x") else "0" * 64
    return {"string": text, "boolean": True, "null": None}.get(kind)


def with_parents(document: Any, way: tuple[str, ...], root: Schema) -> Any:
    """Return a copy of a document in which the last step of a way has something to stand in, made up where it is not there."""
    changed = copy.deepcopy(document)
    inner, schema = changed, root
    for step, after in itertools.pairwise(way):
        option = next(
            each for each in alternatives(schema, root)
            if step in each.get("properties", {})
            or (step == KEY and isinstance(each.get("additionalProperties"), dict))
            or (step == ITEM and ("items" in each or "prefixItems" in each))
        )  # fmt: skip
        if step == KEY:
            schema = option["additionalProperties"]
            key: Any = next(iter(inner))
        elif step == ITEM:
            schema = option["items"] if isinstance(option.get("items"), dict) else option["prefixItems"][0]
            key = 0
        else:
            schema, key = option["properties"][step], step
        held = inner.get(key) if isinstance(inner, dict) else inner[key]
        wanted = list if after == ITEM else dict
        if not isinstance(held, wanted) or not (held or after not in (ITEM, KEY)):
            fitting = next(
                each
                for each in alternatives(schema, root)
                if type_of(each) == ("array" if wanted is list else "object")
            )
            inner[key] = least(fitting, root)
        inner = inner[key]
    return changed
