"""Published models by their names on the Hugging Face hub, as ``models.yaml`` has them: start at :func:`find_model`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from ddltool.artifacts import read_document
from ddltool.errors import InputError
from ddltool.shipped import folder

Library = Literal["transformers", "diffusers"]
LIBRARIES: tuple[Library, ...] = get_args(Library)
_TABLE_FIELDS = ("parameters", "also", "like")  # fields of an entry that are no part of the model's configuration


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A model of the hub: what its published configuration says, and how large it is."""

    name: str
    """``organisation/model``, as the hub spells it."""
    library: Library
    """The package that builds it: transformers or diffusers."""
    model_type: str
    """Its ``model_type`` in transformers, such as ``llama``, or its class in diffusers."""
    parameters: int
    """Elements of all parameters, as published; tied ones count once."""
    fields: Mapping[str, Any]
    """The fields of its configuration that differ from the defaults of its type, but for ``dtype``."""
    dtype: str | None
    """The type of its published weights, where its configuration says it and it is not float32."""
    same_as: str = ""
    """The model whose table entry it shares; "": it has an entry of its own."""

    @property
    def source(self) -> str:
        """Return the SOURCE that builds it, as ``transformers:meta-llama/Llama-3.1-8B``."""
        return f"{self.library}:{self.name}"


@cache
def published_models() -> dict[str, PublishedModel]:
    """Return all models of the table by ``organisation/model``, in its order.

    An entry's ``also`` names further models of the same configuration (without an organisation: of the same one); its
    ``like`` names an earlier entry whose fields it inherits.
    """
    models: dict[str, PublishedModel] = {}
    for kind, entries in read_document(folder() / "models.yaml").items():
        prefix, _, model_type = kind.rpartition("/")
        library: Library = "diffusers" if prefix == "diffusers" else "transformers"
        for name, entry in entries.items():
            like = models.get(entry.get("like", ""))
            fields = {**(like.fields if like else {}), **entry}
            dtype = fields.pop("dtype", like.dtype if like else None)
            for field in _TABLE_FIELDS:
                fields.pop(field, None)
            for also in (name, *entry.get("also", ())):
                full = also if "/" in also else f"{name.partition('/')[0]}/{also}"
                same_as = "" if also == name else name
                models[full] = PublishedModel(full, library, model_type, entry["parameters"], fields, dtype, same_as)
    return models


@cache
def _models_by_lower_name() -> dict[str, PublishedModel]:
    """Return the models by every accepted name in lower case: with the organisation, and without it if that is unambiguous.

    A name without organisation that is also a ``model_type``, such as ``bloom``, means the type and is left out, unless
    the model is the type's default as ``gpt2`` is.
    """
    models = published_models().values()
    bare: dict[str, list[PublishedModel]] = {}
    for model in models:
        bare.setdefault(model.name.partition("/")[2].lower(), []).append(model)
    types = {model.model_type for model in models}
    names = {
        name: alike[0]
        for name, alike in bare.items()
        if len({model.same_as or model.name for model in alike}) == 1  # they share one entry of the table
        and (name not in types or not alike[0].fields)
    }
    return names | {model.name.lower(): model for model in models}


def find_model(name: str, library: Library = "transformers") -> PublishedModel | None:
    """Return the model with this hub name that ``library`` builds, None for an unknown one.

    Upper and lower case count the same; the organisation may be left out if the name is then unambiguous.

    >>> find_model("llama-3.1-8b").name
    'meta-llama/Llama-3.1-8B'
    """
    model = _models_by_lower_name().get(name.lower())
    return model if model is not None and model.library == library else None


def configuration_file(name: str) -> tuple[Path, str] | None:
    """Return (path, title) of the ``config.json`` that a name stands for, None for a name that is no file's nor folder's.

    The name is the file's path, or that of the folder in which the library saved a model, unless it is also a published
    model's. The title is the folder's name for a file called config.json, else the file's without its ending. Raises
    InputError for a folder without the file whose name is a path.
    """
    path = Path(name)
    if not name.endswith(".json"):
        if not path.is_dir() or name.lower() in _models_by_lower_name():
            return None
        path /= "config.json"
        if not path.is_file():
            if "/" in name:
                raise InputError(name, "is a folder without a config.json", "give the folder of a saved model")
            return None
    folder = path.absolute().parent.name
    return path, folder if path.stem == "config" and folder else path.stem


def unknown_model(name: str, types: Iterable[str] = (), library: Library = "transformers") -> InputError:
    """Return (not raise) the error for a hub name that is not in the table, with up to four similar names.

    ``types``: names of the library's model types, which may be suggested too. A model of the other library is named with
    its SOURCE.
    """
    similar = similar_names(name, types, library)
    question = f"did you mean {', '.join(similar)}?" if similar else "`ddltool show models` lists the known ones;"
    remedy = f"{question} a config.json works too: {library}:path/config.json"
    return InputError(f"{library}:{name}", f"unknown model {name!r}", remedy)


def similar_names(name: str, types: Iterable[str] = (), library: Library = "transformers") -> list[str]:
    """Return up to four names of models, and of ``types``, that resemble ``name``; [] if none does.

    A model that ``library`` does not build is named with its SOURCE.
    """
    known = _models_by_lower_name().items()
    shown_name = {key: model.name if model.library == library else model.source for key, model in known}
    shown_name |= {each: each for each in types}
    whole, bare = name.lower(), name.lower().rpartition("/")[2]
    near = [*difflib.get_close_matches(whole, shown_name, n=4), *difflib.get_close_matches(bare, shown_name, n=4)]
    return [*dict.fromkeys(shown_name[key] for key in near)][:4]


def check_hub_name(source: str) -> None:
    """Raise InputError if ``source`` is ``transformers:`` or ``diffusers:ORGANISATION/MODEL`` with an unknown model.

    Any other SOURCE of a model passes. Only the table is read, so a misspelt name is refused before torch is imported.
    """
    prefix, _, name = source.partition(":")
    for library in LIBRARIES:
        name = name.partition("@")[0]
        if library != prefix or "/" not in name or configuration_file(name) is not None:
            continue
        if find_model(name, library) is None:
            raise unknown_model(name, library=library)
