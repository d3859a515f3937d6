"""From functions to commands, and from a command's options to a function of the API.

Start at :func:`declared`: the words of each option, and no output that replaces an input.
"""

from __future__ import annotations

import inspect
import signal
import tomllib
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer

from ddltool.artifacts import check_outputs
from ddltool.commands.options import Remark, as_options, is_follower, is_given, number
from ddltool.commands.output import note, progress

_SHORT = 26
"""So many letters of choices fit beside an option's name in --help; more stand in its text."""
_WORDS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("options.toml").read_text(encoding="utf-8"))
"""What is said of parameters, by command; ``shared``: where a command says nothing itself."""
_NUMBERS = {float: False, float | None: False, int: True, int | None: True}
"""Annotations of numbers, and whether these are whole."""
Found = TypeVar("Found")


def declared(function: Callable[..., Any], name: str, panels: Mapping[str, str]) -> Callable[..., Any]:
    """Return the function of command ``name`` as typer takes it: each parameter an argument or option with its words.

    ``panels`` are titles by parameter. A function of (text, option) among the remarks of a type reads the text. A bool is a
    flag. Before the function runs, the files that it writes are held against those that it reads; an error that names a
    parameter names its option. Raises KeyError for a parameter without words.
    """
    signature = inspect.signature(function, eval_str=True)
    shared, own = _WORDS["shared"], _WORDS.get(name, {})
    said = {
        one: {"help": words} if isinstance(words := own.get(one) or shared[one], str) else words
        for one, parameter in signature.parameters.items()
        if parameter.annotation is not typer.Context
    }

    flags = {one: _flags(one, words)[-1] for one, words in said.items() if "argument" not in words}
    spelt = flags | {one.replace("_", " "): flag for one, flag in flags.items()}

    @wraps(function)
    def command(**given: Any) -> Any:
        if is_follower():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal tells rank 0 as well, and it ends all
        _check_files(given, said)
        with as_options(spelt):
            return function(**given)

    shown = [
        one.replace(annotation=_shown(one, said[key], panels.get(key))) if key in said else one
        for key, one in signature.parameters.items()
    ]
    command.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return command


def _check_files(given: Mapping[str, Any], said: Mapping[str, Remark]) -> None:
    """Raise InputError for a file that would be written over one that is read, or twice, or cannot be written."""
    outputs = sorted((name for name in said if said[name].get("writes")), key=lambda name: name != "output")
    written = {_flags(name, said[name])[0]: given[name] for name in outputs}
    read: list[Any] = []
    for name in said:
        value = given[name]
        if "SOURCE" in said[name].get("argument", ""):
            read.append(value.partition(":")[0])
        elif not said[name].get("writes"):
            read += [path for path in (value if isinstance(value, list) else [value]) if isinstance(path, Path)]
    check_outputs(read, written)


def _flags(name: str, said: Remark) -> list[str]:
    """Return what an option is called on the command line."""
    return said.get("flags") or ["--" + name.strip("_").replace("_", "-")]


def _shown(parameter: inspect.Parameter, said: Remark, panel: str | None) -> Any:
    """Return the annotation of a parameter, with its words and remarks, for typer."""
    annotated = get_origin(parameter.annotation) is Annotated
    annotation, *remarks = get_args(parameter.annotation) if annotated else (parameter.annotation,)
    settings = {key: value for key, value in said.items() if key not in ("writes", "flags")}
    for remark in remarks:
        settings |= remark if isinstance(remark, dict) else {"reader": remark}
    flags = _flags(parameter.name, said)
    argument = settings.pop("argument", "")
    if choices := settings.pop("choices", ()):
        short = "|".join(choices)
        settings.setdefault("metavar", short if len(short) <= _SHORT else "NAME")
        if settings["metavar"] != short:
            settings["help"] += f" One of: {', '.join(choices)}."
    if annotation in _NUMBERS:
        settings.setdefault("reader", number(whole=_NUMBERS[annotation]))
    if read := settings.pop("reader", None):
        annotation, where = str, argument or flags[-1]
        settings["parser"] = lambda given: read(given, where) if isinstance(given, str) else given
        settings.setdefault("metavar", argument or "N")
    if argument:
        return Annotated[annotation, typer.Argument(**{"metavar": argument, **settings})]
    return Annotated[annotation, typer.Option(*flags, rich_help_panel=panel, **settings)]


def called(context: typer.Context, function: Callable[..., Found], **made: Any) -> Found:
    """Return what a function of the API makes of the options that the command line gives, each under its own name.

    All others are the function's defaults. ``made``: options that the command has turned into something else. What it remarks
    and how far it is are shown.
    """
    takes = inspect.signature(function).parameters
    given = {name.strip("_"): value for name, value in context.params.items() if is_given(context, name)}
    heard = {"tell": note, "stage": progress, **given, **made}
    return function(**{name: value for name, value in heard.items() if name in takes})
