"""From a verb, a function of ``import ddltool as dt``, to its command: one signature, one docstring, one set of defaults.

A module of this package holds a verb by its own name, which returns a record. How its command shows the record stands beside
it in ``show_VERB``, whose first parameter is the :class:`VerbCall`; what else that takes are options of the command line
alone. A function with ``as_json`` among its parameters is no verb: it prints by itself. Start at :func:`declared`.
"""

from __future__ import annotations

import inspect
import signal
import sys
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Generic, ParamSpec, TypeVar, get_args, get_origin

import typer

from ddltool.artifacts import check_outputs
from ddltool.commands.options import Remark, as_options, is_follower, number
from ddltool.commands.output import note, progress
from ddltool.errors import InputError

_SHORT = 26
"""So many letters of choices fit beside an option's name in --help; more stand in its text."""
_WORDS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("options.toml").read_text(encoding="utf-8"))
"""What is said of parameters, by command; ``shared``: where a command says nothing itself."""
_LISTENERS: Mapping[str, Any] = {"tell": note, "stage": progress}
"""Parameters of verbs that are no options: whom a verb tells its remarks and how far it is."""
Taken = ParamSpec("Taken")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the caller gave, by parameter in the signature's order, and how the command line spells these."""

    given: Mapping[str, Any]
    spelling: Mapping[str, str]


_NOTHING = _Asked({}, {})
# A context variable, not a global: verbs may run in several threads at once.
_asked: ContextVar[_Asked] = ContextVar("asked", default=_NOTHING)


@contextmanager
def _asking(given: Mapping[str, Any], spelling: Mapping[str, str]) -> Iterator[None]:
    """Let :func:`is_given` and :func:`refuse` know, in the body, what the caller gave, by parameter.

    ``spelling``: how errors call each parameter, by its name.
    """
    token = _asked.set(_Asked(given, spelling))
    try:
        yield
    finally:
        _asked.reset(token)


def verb(function: Callable[Taken, Result]) -> Callable[Taken, Result]:
    """Decorate a verb, so that :func:`is_given` and :func:`demand_part` inside it know which parameters its caller gave."""
    signature = inspect.signature(function)

    @wraps(function)
    def called(*args: Taken.args, **kwargs: Taken.kwargs) -> Result:
        """Run the verb, with the names of its given arguments noted."""
        with _asking(signature.bind(*args, **kwargs).arguments, _asked.get().spelling):
            return function(*args, **kwargs)

    return called


def also_takes(
    other: Callable[..., Any], *, without: Collection[str]
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Return a decorator of a function with ``**rest``: it takes the parameters of ``other`` too, except those in ``without``.

    A parameter that both have is the function's own. The signature lists all, so that help and editors show them.
    """

    def widened(function: Callable[..., Result]) -> Callable[..., Result]:
        """Return the function with the wider signature."""
        parameters = dict(inspect.signature(function, eval_str=True).parameters)
        _, rest = parameters.popitem()
        assert rest.kind is inspect.Parameter.VAR_KEYWORD, f"{function.__name__} takes no other parameters"
        # Parameters of the other function behind its own, by keyword alone.
        more = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(other, eval_str=True).parameters.items()
            if name not in parameters and name not in without
        ]
        signature = inspect.signature(function, eval_str=True)
        function.__signature__ = signature.replace(parameters=[*parameters.values(), *more])  # type: ignore[attr-defined]
        return function

    return widened


def is_given(name: str) -> bool:
    """Return whether the caller of the running verb or command gave this parameter, even if with its default value."""
    return name in _asked.get().given


def given_options(without: Collection[str]) -> list[str]:
    """Return the options of the running verb's caller, but for those in ``without``, as words of a command line."""
    words: list[str] = []
    for name, value in _asked.get().given.items():
        if name in _LISTENERS or name in without or value is None or value is False:
            continue
        flag, values = _asked.get().spelling.get(name, "--" + name.replace("_", "-")), [value]
        if isinstance(value, (list, tuple)):  # of files each stands behind the option again
            values = list(value) if any(isinstance(part, Path) for part in value) else [",".join(map(str, value))]
        words += [flag] if value is True else [word for each in values for word in (flag, str(each))]
    return words


def demand_part(mode: str, allowed: Collection[str], *, instead: str | Mapping[str, str] = "leave it out") -> None:
    """Raise InputError for the first given parameter that is not ``allowed``, as it has no part in ``mode``.

    A default value that is given counts too: who gives it expects something of it. ``instead``: what would be right.
    """
    refuse(
        mode, [name for name in _asked.get().given if name not in allowed and name not in _LISTENERS], instead=instead
    )


def refuse(mode: str, names: Collection[str], *, instead: str | Mapping[str, str] = "leave it out") -> None:
    """Raise InputError for the first given parameter among ``names``, which have no part in ``mode``.

    ``instead``: what would be right, of all or by parameter, where that is not to leave it out.
    """
    question = _asked.get()
    for name in question.given:
        if name in names:
            remedy = instead if isinstance(instead, str) else instead.get(name, "leave it out")
            raise InputError(question.spelling.get(name, name), f"has no part in {mode}", remedy)


class VerbCall(Generic[Result]):
    """A verb as a command line calls it: with what is given there, all else as the verb's own defaults."""

    def __init__(self, function: Callable[..., Result], given: Mapping[str, Any]) -> None:
        """Keep the verb and the arguments that the command line gives; remarks and progress go to the terminal."""
        takes = inspect.signature(function).parameters
        listeners = {name: listener for name, listener in _LISTENERS.items() if name in takes}
        self._function, self._arguments = function, {**listeners, **given}

    def __call__(self, **changed: Any) -> Result:
        """Run the verb and return its record; ``changed``: arguments in place of those of the command line."""
        return self._function(**{**self._arguments, **changed})

    def __contains__(self, name: str) -> bool:
        """Return whether the verb has such a parameter."""
        return name in inspect.signature(self._function).parameters

    def __getitem__(self, name: str) -> Any:
        """Return an argument of the call: as given, else the verb's default."""
        return self._arguments.get(name, inspect.signature(self._function).parameters[name].default)


def declared(function: Callable[..., Any], name: str, panels: Mapping[str, str]) -> Callable[..., Any]:
    """Return the function of command ``name`` as typer takes it: each parameter an argument or option with its words.

    ``function`` is a verb, or prints by itself. ``panels`` are titles by parameter. A function of (text, option) among the
    remarks of a type reads the text. A bool is a flag. Before the function runs, the files that it writes are held against
    those that it reads; an error that names a parameter names its option. Raises KeyError for a parameter without words.
    """
    words = _WORDS["shared"] | _WORDS.get(name, {})  # False: the command line leaves the parameter out
    parameters = dict(inspect.signature(function, eval_str=True).parameters)
    taken = {key for key in parameters if key not in _LISTENERS and words[key] is not False}
    # A verb's show function, and its parameters, which the verb itself need not have.
    show, shown = None, set[str]()
    if "as_json" not in parameters:
        show = getattr(sys.modules[function.__module__], f"show_{function.__name__}")
        _call, *of_show = inspect.signature(show, eval_str=True).parameters.values()
        shown = {parameter.name for parameter in of_show}
        # What both have stands where the showing function has it, as the verb says it: type, remarks and default.
        verb_alone = {key: parameters[key] for key in parameters if key in taken - shown}
        parameters = verb_alone | {parameter.name: parameters.get(parameter.name, parameter) for parameter in of_show}
    remarks: dict[str, Remark] = {
        key: {"help": said} if isinstance(said := words[key], str) else said for key in parameters
    }
    flags = {key: _flags(key, remark)[-1] for key, remark in remarks.items() if "argument" not in remark}
    spelling = {key: flags.get(key) or remark["argument"] for key, remark in remarks.items()}
    # How errors of a function call its parameter: by its name, or in words ("time limit" for time_limit_s).
    fields = {field: flag for key, flag in flags.items() for field in (key, key.removesuffix("_s").replace("_", " "))}

    def command(context: typer.Context, **values: Any) -> Any:
        """Run the function, or show what the verb returns, with the options that the user gave."""
        if is_follower():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal tells rank 0 as well, and it ends all
        _check_files(values, remarks)
        given = [key for key in values if _from_user(context, key)]
        with as_options(fields), _asking({key: values[key] for key in given}, spelling):
            if show is None:
                return function(**values)
            call = VerbCall(function, {key: values[key] for key in given if key in taken})
            return show(call, **{key: values[key] for key in shown})

    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    options = [_option(parameter, remarks[key], panels.get(key)) for key, parameter in parameters.items()]
    command.__signature__ = inspect.Signature([context, *options])  # type: ignore[attr-defined]
    command.__doc__ = (inspect.getdoc(function) or "").partition("\n\n")[0]
    return command


def _from_user(context: typer.Context, name: str) -> bool:
    """Return whether the command line, or an environment variable, gives this parameter, and not its default."""
    source = context.get_parameter_source(name)
    return source is not None and not source.name.startswith("DEFAULT")


def _check_files(given: Mapping[str, Any], said: Mapping[str, Remark]) -> None:
    """Raise InputError for a file that would be written over one that is read, or twice, or cannot be written.

    ``given``: the command's values by parameter; ``said``: the words on each, which say whether it is written.
    """
    outputs = sorted((name for name in said if said[name].get("writes")), key=lambda name: name != "output")
    written = {_flags(name, said[name])[0]: given[name] for name in outputs}
    read: list[Any] = []
    for name in said:
        value = given[name]
        # A source may be FILE:FUNCTION; the file is what is read.
        if "SOURCE" in said[name].get("argument", ""):
            read.append(value.partition(":")[0])
        elif not said[name].get("writes"):
            read += [path for path in (value if isinstance(value, list) else [value]) if isinstance(path, Path)]
    check_outputs(read, written)


def _flags(name: str, said: Remark) -> list[str]:
    """Return what an option is called on the command line; ``said``: the words on it, which may name it."""
    return said.get("flags") or ["--" + name.strip("_").replace("_", "-")]


def _option(parameter: inspect.Parameter, said: Remark, panel: str | None) -> inspect.Parameter:
    """Return a parameter as typer takes it: an argument or option, by its annotation and the words that are ``said`` of it.

    The remarks in an ``Annotated`` type say what its text may be: mappings of typer's own settings, choices, or a reader of
    (text, option). ``panel``: the title of the group that help shows it in; None: no group.
    """
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
    kind = settings.pop("type", None) or _typed(annotation)
    if kind in (int, float):
        settings.setdefault("reader", number(whole=kind is int))
    if read := settings.pop("reader", None):
        kind, where = str, argument or flags[-1]
        # typer parses defaults too, which are values already.
        settings["parser"] = lambda given: read(given, where) if isinstance(given, str) else given
        settings.setdefault("metavar", argument or "N")
    default = parameter.default
    if get_origin(kind) is list and not default:
        default = None  # typer's own word for no value at all
    if argument:
        declaration: Any = Annotated[kind, typer.Argument(**{"metavar": argument, **settings})]
    else:
        declaration = Annotated[kind, typer.Option(*flags, rich_help_panel=panel, **settings)]
    return parameter.replace(annotation=declaration, default=default, kind=inspect.Parameter.KEYWORD_ONLY)


def _typed(annotation: Any) -> Any:
    """Return the type by which typer reads a parameter that takes ``annotation`` in Python.

    A path is a path, and several of them a repeated option. Of the other types that a verb takes, a command line has
    text.
    """
    is_single = get_origin(annotation) in (list, Sequence, None)
    members = [annotation] if is_single else [part for part in get_args(annotation) if part is not NoneType]
    several = [part for part in members if get_origin(part) in (list, Sequence)]
    for part in several:
        if Path in (get_args(part)[0], *get_args(get_args(part)[0])):
            return list[Path]
    for kind in (Path, str):
        if kind in members:
            return kind
    return list[str] if several else members[0]
