"""The scheduling policies, found in the modules of this folder: to add one, add a file here.

A policy is a class like :class:`~ddltool.analyzers.cluster.simulator.SchedulingPolicy`, with a ``name`` and a method
``allocate``. Of the settings ``power`` (of Pollux's fitness), ``delay_s`` (seconds of a restart) and ``seed``, its constructor
gets those that are among its parameters.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from ddltool.analyzers.cluster.simulator import SchedulingPolicy
from ddltool.errors import InputError, did_you_mean


def _found() -> dict[str, Callable[..., Any]]:
    """Return name -> policy, in alphabetical order: the classes in this folder's modules with a name and an ``allocate``.

    Classes that a module only imports are left out.
    """
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    classes: list[Any] = [
        each
        for module in modules
        for each in vars(module).values()
        if inspect.isclass(each) and each.__module__ == module.__name__ and hasattr(each, "allocate")
    ]
    named = {each.name: each for each in classes if getattr(each, "name", "")}
    return {name: named[name] for name in sorted(named)}


POLICIES: Mapping[str, Callable[..., Any]] = _found()
"""The policies by their names."""


def policies(
    names: str | Sequence[str], power: float = -1.0, delay_s: float = 30.0, seed: int = 0, *, mixed: bool = False
) -> dict[str, Callable[[], SchedulingPolicy]]:
    """Return name -> constructor without parameters, for the policies in a list, or in a text with commas, in its order.

    ``names`` may be "all": then, on a ``mixed`` cluster, policies that support only one GPU type are left out. ``power`` (of
    Pollux's fitness), ``delay_s`` (seconds of a restart) and ``seed`` go to the constructors that take them. Raises InputError
    for unknown names, and for a power out of range.
    """
    text = names if isinstance(names, str) else ",".join(names)
    usable_names = [name for name, policy in POLICIES.items() if not mixed or getattr(policy, "mixed", True)]
    chosen_names = usable_names if text == "all" else [name.strip() for name in text.split(",") if name.strip()]
    settings = {"power": power, "delay_s": delay_s, "seed": seed}
    makers: dict[str, Callable[[], SchedulingPolicy]] = {}
    for name in chosen_names:
        if name == "all":
            raise InputError("--policy", "is 'all' with others", "give all alone, or names")
        if name not in POLICIES:
            raise InputError("--policy", f"unknown policy {name!r}", did_you_mean(name, [*POLICIES, "all"]))
        parameters = inspect.signature(POLICIES[name]).parameters
        makers[name] = partial(POLICIES[name], **{key: value for key, value in settings.items() if key in parameters})
        makers[name]()  # raises InputError for bad settings now, and not in the middle of a sweep
    if not makers:
        raise InputError("--policy", "names no policy", did_you_mean(text, POLICIES))
    return makers
