"""What a program gives a verb is of the types that the verb says, or refused in one line that names the parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_type_hints

import numpy as np
import pytest

import ddltool as dt
from ddltool import _VERBS
from ddltool.commands.argument_types import suits, taken
from ddltool.errors import InputError
from ddltool.plans import Plan


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (int, [3], ["3", None, 2.5, True]),
        (float, [3, 2.5], ["3", None, False]),
        (bool, [True], [1, "yes", None]),
        (str, ["a"], [3, None, b"a"]),
        (Path, ["a", Path("a")], [3, None]),
        (Sequence[int] | int | None, [[1, 2], (1,), 3, None, range(3), {4}], ["12", [None], [2.5], {1: 2}, iter([1])]),
        (Callable[[int], int], [abs], [3, None]),
        (Mapping[str, int], [{}, {"a": 1}], [[], "a", None]),
        (Literal["a", "b"], ["a"], ["c", None]),
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
            with pytest.raises(InputError, match=rf"^{parameter}: is <object object"):
                verb(**given)


def test_what_is_right_is_said() -> None:
    with pytest.raises(InputError, match="device: is None; give a text or a list of texts"):
        dt.predict("zoo:resnet32", None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="samples: is 'lots'; give a number or None"):
        dt.plan("zoo:resnet32", devices="8xH100", samples="lots")  # type: ignore[arg-type]


def test_numbers_of_numpy_and_paths_are_taken() -> None:
    def verb(
        size: int, share: float, name: str, sizes: Sequence[int] | None, quick: bool, file: Path, source: Any
    ) -> None: ...

    source = np.arange(3)
    given = {
        "size": np.int64(3),
        "share": np.float32(0.5),
        "name": Path("a"),
        "sizes": np.array([1, 2]),
        "quick": np.True_,
    }
    made = taken(verb, {**given, "file": "a", "source": source})
    assert made == {"size": 3, "share": 0.5, "name": "a", "sizes": [1, 2], "quick": True, "file": "a", "source": source}
    assert [type(value) for value in made.values()] == [int, float, str, list, bool, str, np.ndarray]
    two = dt.predict(
        "zoo:resnet32", Path("H100"), batch_sizes=np.array([8, 16]), replicas=np.int64(2), accumulation=np.int64(1)
    )
    assert [(row.local_batch_size, row.num_replicas) for row in two.rows] == [(8, 2), (16, 2)]
