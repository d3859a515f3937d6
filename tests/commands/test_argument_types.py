"""What a program gives a verb is of the types that the verb says, or refused in one line that names the parameter."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import numpy as np
import pytest

import ddltool as dt
from ddltool import _VERBS
from ddltool.commands.argument_types import suits
from ddltool.errors import InputError
from ddltool.plans import Plan


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (int, [3, np.int64(3), True], ["3", None, 2.5]),
        (float, [3, 2.5, np.float32(1.0)], ["3", None]),
        (str, ["a", Path("a")], [3, None, b"a"]),
        (Path, ["a", Path("a")], [3, None]),
        (Sequence[int] | int | None, [[1, 2], (1,), 3, None, range(3), np.arange(2)], ["12", [None], [2.5], {1: 2}]),
        (Mapping[str, int], [{}, {"a": 1}], [[], "a", None]),
        (Literal["a", "b"], ["a"], ["c", None]),
        (Annotated[int | None, "a remark"], [1, None], ["1"]),
        (Any, [object()], []),
        (Plan, [], [3, {}]),
    ],
)
def test_values_and_types(hint: Any, good: list[Any], bad: list[Any]) -> None:
    assert all(suits(value, hint) for value in good)
    assert not any(suits(value, hint) for value in bad)


@pytest.mark.parametrize("name", _VERBS)
def test_each_verb_refuses_by_name_what_is_of_no_type_that_it_says(name: str) -> None:
    verb = getattr(dt, name)
    hints = get_type_hints(verb)
    needed = [
        each.name for each in inspect.signature(verb).parameters.values() if each.default is inspect.Parameter.empty
    ]
    strange = object()
    checked = [parameter for parameter in hints if parameter != "return" and not suits(strange, hints[parameter])]
    assert len(checked) >= 2
    for parameter in checked:
        # only the strange one can be wrong: what else is needed is of its type where anything is
        given = {each: "x" for each in needed if suits("x", hints[each])} | {parameter: strange}
        if given.keys() >= {*needed}:
            with pytest.raises(InputError, match=rf"^(--)?{parameter}: is <object object"):
                verb(**given)


def test_what_is_right_is_said() -> None:
    with pytest.raises(InputError, match="device: is None; give a text or a list of texts"):
        dt.predict("zoo:resnet32", None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="samples: is 'lots'; give a number or None"):
        dt.plan("zoo:resnet32", devices="8xH100", samples="lots")  # type: ignore[arg-type]
