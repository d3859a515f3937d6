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
_TABLE_FIELDS = ("parameters", "also", "like")  # fields of an entry that are no part of the model's configuration


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model of the hub: what its published configuration says, and how large it is."""

    name: str
    """``organisation/model``, as the hub spells it."""
    model_type: str
    """Its ``model_type`` in transformers, such as ``llama``."""
    parameters: int
    """Elements of all parameters, as published; tied ones count once."""
    fields: Mapping[str, Any]
    """The fields of its configuration that differ from the defaults of its type."""
    same_as: str = ""
    """The model whose table entry it shares; "": it has an entry of its own."""


@cache
def published_models() -> dict[str, PublishedModel]:
    """Return all models of the table by ``organisation/model``, in its order.

    An entry's ``also`` names further models of the same configuration (without an organisation: of the same one); its
    ``like`` names an earlier entry whose fields it inherits.
    """
    models: dict[str, PublishedModel] = {}
    for model_type, entries in read_document(folder() / "models.yaml").items():
        for name, entry in entries.items():
            inherited = models[entry["like"]].fields if "like" in entry else {}
            fields = {key: value for key, value in entry.items() if key not in _TABLE_FIELDS}
            for also in (name, *entry.get("also", ())):
                full = also if "/" in also else f"{name.partition('/')[0]}/{also}"
                same_as = "" if also == name else name
                models[full] = PublishedModel(full, model_type, entry["parameters"], {**inherited, **fields}, same_as)
    return models


@cache
def _models_by_lower_name() -> dict[str, PublishedModel]:
    """Return the models by every accepted name in lower case: with the organisation, and without it if that is unambiguous.

    A name without organisation that is also a ``model_type``, such as ``bloom``, means the type and is left out.
    """
    models = published_models().values()
    bare: dict[str, list[PublishedModel]] = {}
    for model in models:
        bare.setdefault(model.name.partition("/")[2].lower(), []).append(model)
    types = {model.model_type for model in models}
    names = {name: alike[0] for name, alike in bare.items() if name not in types and _share_entry(alike)}
    return names | {model.name.lower(): model for model in models}


def _share_entry(models: list[PublishedModel]) -> bool:
    """Return whether all these models share one entry of the table, and so one configuration."""
    return len({model.same_as or model.name for model in models}) == 1


def find_model(name: str) -> PublishedModel | None:
    """Return the model with this hub name, None for an unknown one.

    Upper and lower case count the same; the organisation may be left out if the name is then unambiguous.

    >>> find_model("llama-3.1-8b").name
    'meta-llama/Llama-3.1-8B'
    """
    return _models_by_lower_name().get(name.lower())


def unknown_model(name: str, types: Iterable[str] = ()) -> InputError:
    """Return (not raise) the error for a hub name that is not in the table, with up to four similar names.

    ``types``: names of transformers' model types, which may be suggested too.
    """
    shown_name = {key: model.name for key, model in _models_by_lower_name().items()} | {each: each for each in types}
    whole, bare = name.lower(), name.lower().rpartition("/")[2]
    near = [*difflib.get_close_matches(whole, shown_name, n=4), *difflib.get_close_matches(bare, shown_name, n=4)]
    names = [*dict.fromkeys(shown_name[key] for key in near)][:4]
    question = f"did you mean {', '.join(names)}?" if names else "`ddltool show models` lists the known ones;"
    return InputError(
        f"{_SCHEME}{name}", f"unknown model {name!r}", f"{question} a config.json works too: {_SCHEME}path/config.json"
    )


def check_hub_name(source: str) -> None:
    """Raise InputError if ``source`` is ``transformers:ORGANISATION/MODEL`` with a model that is not in the table.

    Any other SOURCE of a model passes. Only the table is read, so a misspelt name is refused before torch is imported.
    """
    name = source.removeprefix(_SCHEME)
    if name != source and "/" in name and not name.endswith(".json") and find_model(name) is None:
        raise unknown_model(name)
