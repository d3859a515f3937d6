"""Parse YAML and JSON into plain scalars, lists and mappings with text keys, within limits. Start at :func:`from_yaml`."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import yaml

from ddltool.errors import InputError, shortened
from ddltool.units import show_bytes

# Limits of YAML: characters of a text, levels of nesting, values after aliases are expanded.
_LONGEST_YAML, _DEEPEST_YAML, _MOST_VALUES = 1 << 24, 100, 1_000_000


class RepeatedKey(Exception):
    """A mapping has a key twice, so that one of the two values would be silently lost."""

    def __init__(self, key: object, line: int | None = None) -> None:
        """Keep the key and the line (from 1) of its second place; None: JSON, whose lines are not known."""
        super().__init__(key)
        self.key, self.line = key, line


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the mapping of a JSON object's (key, value) pairs. Raises RepeatedKey for a key that is there twice."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise RepeatedKey(next(key for key in counts if counts[key] > 1))
    return mapping


def _count_values(node: yaml.Node, count_by_node: dict[int, int]) -> int:
    """Return the number of values in a YAML node after its aliases are expanded.

    A few lines of nested aliases can stand for billions of values. Raises ValueError above ``_MOST_VALUES``, and for an
    alias of a node that contains it. ``count_by_node`` is changed: counts by id of the node, 0 while its children are
    being counted.
    """
    if id(node) in count_by_node:
        if not count_by_node[id(node)]:
            raise ValueError("an alias within what it names")
        return count_by_node[id(node)]
    count_by_node[id(node)] = 0
    count = 1
    if not isinstance(node, yaml.ScalarNode):
        is_mapping = isinstance(node, yaml.MappingNode)
        children = [child for pair in node.value for child in pair] if is_mapping else node.value
        count += sum(_count_values(child, count_by_node) for child in children)
    if count > _MOST_VALUES:
        raise ValueError(f"more than {_MOST_VALUES:,} values, aliases written out")
    count_by_node[id(node)] = count
    return count


# The C parser where PyYAML has it: ten times as fast.
class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A YAML parser that reads dates as texts and 1e-3 as a number; :func:`_plain` makes the values of its nodes."""


_TAG = "tag:yaml.org,2002:"
# YAML 1.1, which PyYAML follows, takes 1e-3 (without a point and a sign) for a text; YAML 1.2 and JSON take it for a number.
_Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] != f"{_TAG}timestamp"]
    for first, pairs in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    f"{_TAG}float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+"), list("-+.0123456789")
)
# By tag: the function that makes the value of (loader, node), and the word for such a value in errors.
_SCALARS: Mapping[str, tuple[Any, str]] = {
    f"{_TAG}str": (yaml.SafeLoader.construct_yaml_str, "text"),
    f"{_TAG}int": (
        lambda loader, node: _within_64_bits(yaml.SafeLoader.construct_yaml_int(loader, node)),
        "whole number",
    ),
    f"{_TAG}float": (yaml.SafeLoader.construct_yaml_float, "number"),
    f"{_TAG}bool": (yaml.SafeLoader.construct_yaml_bool, "true or false"),
    f"{_TAG}null": (yaml.SafeLoader.construct_yaml_null, "null"),
}


def _plain(loader: Any, node: yaml.Node) -> Any:
    """Return the value of a YAML node: a plain scalar, a list, or a mapping with text keys.

    Raises MarkedYAMLError for anything else, and RepeatedKey for a key that a mapping has twice. ``loader``: the parser
    that made the node.
    """

    def wrong(problem: str, at: yaml.Node = node) -> yaml.MarkedYAMLError:
        """Return an error to raise, which says ``problem`` with the line and column of the node ``at``."""
        return yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)

    if isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS:
        read, name = _SCALARS[node.tag]
        try:
            return read(loader, node)
        except (ValueError, LookupError):
            raise wrong(f"{shortened(node.value, 40)!r} is no {name}") from None
    if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
        return [_plain(loader, entry) for entry in node.value]
    if not (isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map"):
        raise wrong(f"the tag {shortened(node.tag.replace(_TAG, '!!'), 60)} does not go here")
    mapping: dict[str, Any] = {}
    merged: dict[str, Any] = {}
    # Merge keys (<<) are resolved here: PyYAML's flatten_mapping changes the node, which an alias may bring in again.
    for key, value in node.value:
        if key.tag == f"{_TAG}merge":
            sources = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for source in reversed(sources):  # the first of a list wins
                if not isinstance(source, yaml.MappingNode):
                    raise wrong("expected a mapping or a list of mappings for merging", source)
                merged |= _plain(loader, source)
        elif key.tag != f"{_TAG}str":
            raise wrong("a key is no text" if isinstance(key, yaml.ScalarNode) else "a key is a collection", key)
        elif key.value in mapping:
            raise RepeatedKey(key.value, key.start_mark.line + 1)
        else:
            mapping[key.value] = _plain(loader, value)
    return merged | mapping


def from_yaml(text: str, where: str) -> Any:
    """Return the value of a YAML text: a plain scalar, a list or a mapping with text keys; None for an empty text.

    Raises InputError with line and column for a mistake, and for a text beyond the limits (length, nesting, number of
    values). ``where``: the file, for errors.
    """
    if len(text) > _LONGEST_YAML:
        raise InputError(where, f"holds more than {show_bytes(_LONGEST_YAML)} of YAML", "give a shorter file")
    loader = None
    try:
        depth = 0
        # Nesting is checked before the tree is built: the C parser builds it recursively, and would overflow the stack.
        for event in yaml.parse(text, _Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST_YAML:
                raise RecursionError
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _count_values(node, {})
        return _plain(loader, node)
    except RepeatedKey as error:
        raise InputError(f"{where}:line {error.line}", f"gives {error.key!r} twice", "keep one of the two") from None
    except RecursionError:
        raise InputError(where, "is nested too deeply", "ddltool's documents are a few levels deep") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{where}:line {mark.line + 1} column {mark.column + 1}" if mark is not None else where
        problem = getattr(error, "problem", None) or str(error)
        raise InputError(place, f"is not valid YAML ({problem})", "mind the indentation and the quotes") from None
    except ValueError as error:  # of _count_values
        raise InputError(where, f"holds a value that cannot be read ({error})", "write it out, or shorter") from None
    finally:
        if loader is not None:
            loader.dispose()


def _within_64_bits(value: int) -> int | float:
    """Return an integer of at most 64 bits unchanged, a larger one as a float (infinite from 2**1000 on).

    Arrays and solvers could not hold it; as a float it is outside of every integer field's type or range, and refused.
    """
    if -(2**63) <= value < 2**63:
        return value
    return float(value) if abs(value) < 2**1000 else math.inf


def json_value(text: str) -> Any:
    """Return the value of a JSON text; integers beyond 64 bits become floats (:func:`_within_64_bits`).

    Raises json's own errors, and RepeatedKey for a key that an object has twice.
    """

    def whole_number(digits: str) -> int | float:
        """Return the integer of a JSON text of digits, with a sign if negative."""
        # 18 digits fit into 64 bits. 400 make an infinite float already; int() is slow, or refuses, for thousands.
        return int(digits) if len(digits) < 19 else _within_64_bits(int(digits[:400]))

    return json.loads(text, object_pairs_hook=_refuse_repeated_keys, parse_int=whole_number)


def from_json(text: str, where: str) -> Any:
    """Return the value of a JSON text. Raises InputError with line and column for a mistake, and for a repeated key.

    ``where``: the file, for errors.
    """
    try:
        return json_value(text)
    except RepeatedKey as error:
        raise InputError(where, f"gives {error.key!r} twice", "keep one of the two") from None
    except json.JSONDecodeError as error:
        place = f"{where}:line {error.lineno} column {error.colno}"
        raise InputError(place, f"is not valid JSON ({error.msg})", "the file may be cut off; make it again") from None
    except RecursionError:
        raise InputError(where, "is nested too deeply", "ddltool's documents are a few levels deep") from None
