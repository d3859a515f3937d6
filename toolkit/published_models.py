"""Published models by their names on the Hugging Face hub, as ``models.yaml`` has them: start at :func:`find_model`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ddltool.artifacts import read_document
from ddltool.errors import InputError
from ddltool.shipped import folder

_SCHEME = "transformers:"
_OF_THE_TABLE = ("parameters", "also", "like")  # fields of an entry that are not the configuration's


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model of the hub: what its published configuration says, and how large it is."""

    name: str
    """``organisation/model``, as the hub spells it."""
    model_type: str
    """Its type in transformers."""
    parameters: int
    """Elements of all parameters, as published; tied ones once."""
    fields: Mapping[str, Any]
    """What its configuration has otherwise than the default of its type."""
    same_as: str = ""
    """The model whose entry this is too, "" for an entry of its own."""


@cache
def published_models() -> dict[str, PublishedModel]:
    """Return all models by name, in the table's order.

    An entry may name others that are built alike (``also``), which have their own name, and one above it whose fields
    it takes over (``like``).
    """
    models: dict[str, PublishedModel] = {}
    for model_type, entries in read_document(folder() / "models.yaml").items():
        for name, entry in entries.items():
            inherited = models[entry["like"]].fields if "like" in entry else {}
            fields = {key: value for key, value in entry.items() if key not in _OF_THE_TABLE}
            for also in (name, *entry.get("also", ())):
                full = also if "/" in also else f"{name.partition('/')[0]}/{also}"
                same_as = "" if also == name else name
                models[full] = PublishedModel(full, model_type, entry["parameters"], {**inherited, **fields}, same_as)
    return models


@cache
def _by_spelling() -> dict[str, PublishedModel]:
    """Return the models by every lower-case name that finds one: with the organisation, and without it where that is clear.

    A name without organisation that is also a type's, such as ``bloom``, is left to the type.
    """
    models = published_models().values()
    bare: dict[str, list[PublishedModel]] = {}
    for model in models:
        bare.setdefault(model.name.partition("/")[2].lower(), []).append(model)
    types = {model.model_type for model in models}
    names = {name: alike[0] for name, alike in bare.items() if name not in types and _one_configuration(alike)}
    return names | {model.name.lower(): model for model in models}


def _one_configuration(models: list[PublishedModel]) -> bool:
    """Return whether models of one bare name, from several organisations, are all the same model."""
    return len({model.same_as or model.name for model in models}) == 1


def find_model(name: str) -> PublishedModel | None:
    """Return the model of a hub name, in any case and without its organisation where that is clear, None for no such name.

    >>> find_model("llama-3.1-8b").name
    'meta-llama/Llama-3.1-8B'
    """
    return _by_spelling().get(name.lower())


def unknown_model(name: str, types: Iterable[str] = ()) -> InputError:
    """Return the error for a hub name that is not in the table, with up to four of the nearest names.

    ``types``: transformers' own names of model types, among which the nearest are looked for too.
    """
    spelt = {key: model.name for key, model in _by_spelling().items()} | {each: each for each in types}
    whole, bare = name.lower(), name.lower().rpartition("/")[2]
    near = [*difflib.get_close_matches(whole, spelt, n=4), *difflib.get_close_matches(bare, spelt, n=4)]
    names = [*dict.fromkeys(spelt[key] for key in near)][:4]
    question = f"did you mean {', '.join(names)}?" if names else "`ddltool show models` lists the known ones;"
    return InputError(
        f"{_SCHEME}{name}", f"unknown model {name!r}", f"{question} a config.json works too: {_SCHEME}path/config.json"
    )


def check_hub_name(source: str) -> None:
    """Raise InputError for ``transformers:ORGANISATION/MODEL`` that is not in the table; any other SOURCE passes.

    It looks at the table alone, so that a misspelt name is refused before torch is imported.
    """
    name = source.removeprefix(_SCHEME)
    if name != source and "/" in name and not name.endswith(".json") and find_model(name) is None:
        raise unknown_model(name)
