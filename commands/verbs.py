"""From a verb, a function of ``import ddltool as dt``, to its command: one signature, one docstring, one set of defaults.

A verb is a function that returns a record (a pydantic document); it has the name of its module. Beside it, ``show_VERB`` prints
the record for the command: its first parameter is the :class:`VerbCall`, its others are options that only the command has. A
command whose function has a parameter ``as_json`` is no verb: it prints by itself. Start at :func:`typer_command`.

``tell`` and ``stage`` are parameters of verbs that take functions: one is called with each remark for the user, the other makes
the context in which a long stage shows its progress.
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
from ddltool.commands.argument_types import taken
from ddltool.commands.options import Remark, as_options, is_follower, number
from ddltool.commands.output import note, progress
from ddltool.errors import InputError
from ddltool.own_process import NeedsOwnProcess, in_fork
from ddltool.stages import Tell

_SHORT = 26
"""Most characters of choices that --help shows beside an option's name; longer ones are in its text."""
_WORDS: dict[str, dict[str, Any]] = tomllib.loads(Path(__file__).with_name("options.toml").read_text(encoding="utf-8"))
"""Help texts and settings of parameters, by command; ``shared``: those of parameters that a command does not list.

False: the parameter is no option of the command line."""
_LISTENERS: Mapping[str, Any] = {"tell": note, "stage": progress}
"""Parameters of verbs that are no options: functions for remarks and for progress, with those that a command passes."""
Taken = ParamSpec("Taken")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class _Asked:
    """The running call of a verb or command."""

    given: Mapping[str, Any]
    """The arguments that the caller gave, by parameter, in the signature's order."""
    spelling: Mapping[str, str]
    """Parameter to its name in errors: the option, on the command line."""


_NOTHING = _Asked({}, {})
# A context variable, not a global: verbs may run in several threads at once.
_asked: ContextVar[_Asked] = ContextVar("asked", default=_NOTHING)


@contextmanager
def _asking(given: Mapping[str, Any], spelling: Mapping[str, str]) -> Iterator[None]:
    """Make the body the running call: :func:`is_given` and :func:`refuse` look at its ``given`` and ``spelling``."""
    token = _asked.set(_Asked(given, spelling))
    try:
        yield
    finally:
        _asked.reset(token)


def verb(function: Callable[Taken, Result]) -> Callable[Taken, Result]:
    """Decorate a verb: :func:`is_given` and :func:`demand_part` in it then see which parameters its caller gave.

    Arguments of other types than it says are refused. It may also run in a fork (:mod:`ddltool.own_process`).
    """
    signature = inspect.signature(function)

    @wraps(function)
    def called(*args: Taken.args, **kwargs: Taken.kwargs) -> Result:
        """Check the arguments, and run the verb as the running call, in a process where it may run (:func:`_alone`)."""
        bound = signature.bind(*args, **kwargs)
        bound.arguments.update(taken(function, bound.arguments))
        args, kwargs = bound.args, bound.kwargs  # type: ignore[assignment]  # those of the signature
        with _asking(bound.arguments, _asked.get().spelling):
            if "tell" not in signature.parameters:
                return _alone(lambda _: function(*args, **kwargs), lambda _: None)
            given: dict[str, Any] = dict(kwargs)
            tell = given.get("tell", signature.parameters["tell"].default)
            listened: Callable[..., Result] = function
            return _alone(lambda listener: listened(*args, **{**given, "tell": listener}), tell)

    return called


def _alone(call: Callable[[Tell], Result], tell: Tell) -> Result:
    """Return ``call(tell)``, run in a forked process if this one must not run it.

    That is so where this process may train on a GPU, which recording a model would disturb: the call then raises
    :class:`NeedsOwnProcess`. It is begun anew in the fork, and a remark that it has passed to ``tell`` already is not passed a
    second time.
    """
    already_told: list[str] = []

    def listen(text: str) -> None:
        """Pass on a remark of the first try, and remember it."""
        already_told.append(text)
        tell(text)

    try:
        return call(listen)
    except NeedsOwnProcess:
        pass  # the fork below runs outside of this exception, so that its own errors have no other behind them

    def listen_again(text: str) -> None:
        """Pass on a remark of the fork, unless the first try has passed it on."""
        if text in already_told:
            already_told.remove(text)  # a text that the fork tells more often than the first try is passed on
        else:
            tell(text)

    return in_fork(call, listen_again)


def also_takes(
    other: Callable[..., Any], *, without: Collection[str]
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Return a decorator for a function with ``**rest``, which adds the parameters of ``other`` to its signature.

    Left out are the names in ``without``, and parameters that the function has itself. Help and editors then show all
    parameters; at run time ``**rest`` receives them.
    """

    def widened(function: Callable[..., Result]) -> Callable[..., Result]:
        """Return the same function with the wider signature."""
        parameters = dict(inspect.signature(function, eval_str=True).parameters)
        _, rest = parameters.popitem()  # the last one
        assert rest.kind is inspect.Parameter.VAR_KEYWORD, f"{function.__name__} takes no other parameters"
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
    """Return whether the caller of the running verb or command gave this parameter, possibly with its default value."""
    return name in _asked.get().given


def given_options(without: Collection[str]) -> list[str]:
    """Return the given options of the running call as words of a command line, in the signature's order.

    Left out are the parameters in ``without``, the :data:`_LISTENERS`, and values of None and False, for which there is no
    option to write.
    """
    words: list[str] = []
    for name, value in _asked.get().given.items():
        if name in _LISTENERS or name in without or value is None or value is False:
            continue
        flag = _asked.get().spelling.get(name, "--" + name.replace("_", "-"))
        if value is True:
            words.append(flag)
        elif not isinstance(value, (list, tuple)):
            words += [flag, str(value)]
        elif any(isinstance(part, Path) for part in value):  # the option is repeated for each file
            for part in value:
                words += [flag, str(part)]
        else:
            words += [flag, ",".join(map(str, value))]
    return words


def demand_part(mode: str, allowed: Collection[str], *, instead: str | Mapping[str, str] = "leave it out") -> None:
    """Raise InputError for the first parameter of the running call that is not ``allowed``, as it has no effect.

    A parameter counts that the caller gave, also with its default value: an effect is expected of it. ``mode``: what the caller
    asked for, as it stands in the message, such as "a plan of several jobs". ``instead``: the remedy of all, or by parameter.
    """
    refuse(
        mode, [name for name in _asked.get().given if name not in allowed and name not in _LISTENERS], instead=instead
    )


def refuse(mode: str, names: Collection[str], *, instead: str | Mapping[str, str] = "leave it out") -> None:
    """Raise InputError for the first parameter among ``names`` that the caller of the running call gave: it has no effect.

    ``mode``: what the caller asked for, as it stands in the message, such as "a plan of one job". ``instead``: the remedy of
    all, or by parameter where it is not to leave it out.
    """
    asked = _asked.get()
    for name in asked.given:
        if name in names:
            remedy = instead if isinstance(instead, str) else instead.get(name, "leave it out")
            raise InputError(asked.spelling.get(name, name), f"has no part in {mode}", remedy)


class VerbCall(Generic[Result]):
    """A verb with the arguments of a command line; ``call()`` runs it, ``call["name"]`` is an argument or its default."""

    def __init__(self, function: Callable[..., Result], given: Mapping[str, Any]) -> None:
        """Keep the verb and the ``given`` arguments by parameter, and pass its remarks and progress to the terminal."""
        parameters = inspect.signature(function).parameters
        listeners = {name: listener for name, listener in _LISTENERS.items() if name in parameters}
        self._function = function
        self._arguments = {**listeners, **given}

    def __call__(self, **changed: Any) -> Result:
        """Run the verb and return its record; ``changed``: arguments that replace those of the command line."""
        return self._function(**{**self._arguments, **changed})

    def __contains__(self, name: str) -> bool:
        """Return whether the verb has the parameter ``name``."""
        return name in inspect.signature(self._function).parameters

    def __getitem__(self, name: str) -> Any:
        """Return the argument ``name``: as given, else the verb's default."""
        return self._arguments.get(name, inspect.signature(self._function).parameters[name].default)


def typer_command(function: Callable[..., Any], name: str, panels: Mapping[str, str]) -> Callable[..., Any]:
    """Return a function for typer that runs the command ``name``: its parameters are typer's arguments and options.

    ``function`` is a verb, or has a parameter ``as_json`` and prints by itself. Help texts are those of options.toml;
    ``panels``: titles of groups of options, by parameter. When the command runs, it first checks that no output is
    also an input; then it runs ``function``, and for a verb its ``show_VERB``; errors about a parameter name its
    option. Raises KeyError for a parameter without a help text.
    """
    words = _WORDS["shared"] | _WORDS.get(name, {})  # by parameter: its help text, its settings, or False
    parameters = dict(inspect.signature(function, eval_str=True).parameters)
    # The function's parameters that are options; those with False in options.toml are not.
    taken = {key for key in parameters if key not in _LISTENERS and words[key] is not False}
    show, shown = None, set[str]()  # show_VERB, and the names of its parameters
    if "as_json" not in parameters:  # a verb
        show = getattr(sys.modules[function.__module__], f"show_{function.__name__}")
        _call, *of_show = inspect.signature(show, eval_str=True).parameters.values()
        shown = {parameter.name for parameter in of_show}
        # A parameter of both has the place that show_VERB gives it, and the type and default of the verb.
        verb_alone = {key: parameters[key] for key in parameters if key in taken - shown}
        parameters = verb_alone | {parameter.name: parameters.get(parameter.name, parameter) for parameter in of_show}
    remarks: dict[str, Remark] = {
        key: {"help": said} if isinstance(said := words[key], str) else said for key in parameters
    }
    # What errors call a parameter: its long option, or the name of its argument in help.
    flags = {key: _flags(key, remark)[-1] for key, remark in remarks.items() if "argument" not in remark}
    spelling = {key: flags.get(key) or remark["argument"] for key, remark in remarks.items()}
    # Errors of a function may name a parameter by its name, or in words ("time limit" for time_limit_s).
    fields = {field: flag for key, flag in flags.items() for field in (key, key.removesuffix("_s").replace("_", " "))}

    def command(context: typer.Context, **values: Any) -> Any:
        """Run the function with the options that the user gave; show the result of a verb."""
        if is_follower():
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches rank 0 as well, which ends all ranks
        _check_files(values, remarks)
        # Not the defaults, which typer passes too: refuse() and the like ask what the user gave.
        given = [key for key in values if _from_user(context, key)]
        with as_options(fields), _asking({key: values[key] for key in given}, spelling):
            if show is None:
                return function(**values)
            call = VerbCall(function, {key: values[key] for key in given if key in taken})
            return show(call, **{key: values[key] for key in shown})

    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    options = [_option(parameter, remarks[key], panels.get(key)) for key, parameter in parameters.items()]
    command.__signature__ = inspect.Signature([context, *options])  # type: ignore[attr-defined]
    # Help shows the summary alone; the rest is for programs.
    command.__doc__ = (inspect.getdoc(function) or "").partition("\n\n")[0]
    return command


def _from_user(context: typer.Context, name: str) -> bool:
    """Return whether the user gave a parameter, on the command line or by an environment variable, and it is no default."""
    source = context.get_parameter_source(name)
    return source is not None and not source.name.startswith("DEFAULT")


def _check_files(given: Mapping[str, Any], said: Mapping[str, Remark]) -> None:
    """Raise InputError for an output that is also an input, is written twice, or cannot be written.

    ``given``: the command's values by parameter. ``said``: the settings of each parameter in options.toml, whose ``writes``
    marks an output.
    """
    # -o first, so that an error about two options for one file names the other option.
    outputs = sorted((name for name in said if said[name].get("writes")), key=lambda name: name != "output")
    written = {_flags(name, said[name])[0]: given[name] for name in outputs}
    read: list[Any] = []
    for name in said:
        value = given[name]
        # Of a source FILE:FUNCTION the file is read.
        if "SOURCE" in said[name].get("argument", ""):
            read.append(value.partition(":")[0])
        elif not said[name].get("writes"):
            read += [path for path in (value if isinstance(value, list) else [value]) if isinstance(path, Path)]
    check_outputs(read, written)


def _flags(name: str, said: Remark) -> list[str]:
    """Return the flags of the option of parameter ``name``, such as ["-o", "--output"].

    They are those in its settings ``said`` (of options.toml), else one made of the parameter's name.
    """
    return said.get("flags") or ["--" + name.strip("_").replace("_", "-")]


def _option(parameter: inspect.Parameter, said: Remark, panel: str | None) -> inspect.Parameter:
    """Return a parameter declared for typer as an argument or option.

    Its settings are ``said`` (of options.toml) and those in its ``Annotated`` type: a mapping (:data:`Remark`), or a
    reader alone. ``panel``: the title of the group in which help shows it; None: no group.
    """
    annotated = get_origin(parameter.annotation) is Annotated
    annotation, *remarks = get_args(parameter.annotation) if annotated else (parameter.annotation,)
    # What typer does not know is taken out of the settings below; the rest are its own arguments.
    settings = {key: value for key, value in said.items() if key not in ("writes", "flags")}
    for remark in remarks:
        settings |= remark if isinstance(remark, dict) else {"reader": remark}
    flags = _flags(parameter.name, said)
    argument = settings.pop("argument", "")
    # Short lists of choices are shown beside the option, others in its text.
    if choices := settings.pop("choices", ()):
        short = "|".join(choices)
        settings.setdefault("metavar", short if len(short) <= _SHORT else "NAME")
        if settings["metavar"] != short:
            settings["help"] += f" One of: {', '.join(choices)}."
    kind = settings.pop("type", None) or _typed(annotation)
    if kind in (int, float):  # typer's own errors are of another form
        settings.setdefault("reader", number(whole=kind is int))
    if read := settings.pop("reader", None):
        kind, where = str, argument or flags[-1]
        # typer also calls the parser with default values, which are no texts.
        settings["parser"] = lambda given: read(given, where) if isinstance(given, str) else given
        settings.setdefault("metavar", argument or "N")
    default = parameter.default
    if get_origin(kind) is list and not default:
        default = None  # typer's default of a list without values
    if argument:
        declaration: Any = Annotated[kind, typer.Argument(**{"metavar": argument, **settings})]
    else:
        declaration = Annotated[kind, typer.Option(*flags, rich_help_panel=panel, **settings)]
    return parameter.replace(annotation=declaration, default=default, kind=inspect.Parameter.KEYWORD_ONLY)


def _typed(annotation: Any) -> Any:
    """Return the type of a parameter for typer, from its annotation in Python.

    A list of paths is a repeated option. Of a union the command line takes Path, else str, else a list of texts if a list
    is in it, else the first type.
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
