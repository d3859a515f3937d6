"""The command line: its commands, one module each, and how an error becomes one line and an exit code.

Only typer and rich are imported here; a command's module is imported when the command runs, so that ``--help`` is fast.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
import tomllib
import traceback
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from keyword import iskeyword
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from ddltool import __version__, interrupts
from ddltool.commands.options import VOICE, Quiet, Verbose, is_follower
from ddltool.errors import DdlToolError, InputError, Interrupted, one_line

COMMANDS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("commands.toml").read_text(encoding="utf-8")
)
"""By command: its ``summary``, the ``question`` under which help lists it, an ``example``, and ``panels``: titles of groups
of options, with their parameters."""


MOVED = {
    **{f"workload {name}": f"simulate {name}" for name in ("generate", "convert")},
    **{name: f"simulate {name}" for name in ("sweep", "trials", "autoscale", "advise")},
    **{"watch": "profile watch", "zoo": "show zoo", "explain": "show term", "schema": "show schema"},
}
"""A command's name in earlier versions to its present name; the earlier one still works, with a note."""


def load(name: str) -> TyperCommand:
    """Import a command's module and return the command; ``name``: as on the command line.

    The command ``simulate sweep`` is the function ``simulate_sweep`` in the module ``simulate``; a word that Python
    reserves has a ``_`` appended (``import_``).
    """
    words = [f"{word}_" if iskeyword(word) else word for word in name.replace("-", "_").split()]
    module = import_module(f"ddltool.commands.{words[0]}")
    panels = {option: title for title, options in COMMANDS[name].get("panels", {}).items() for option in options}
    from ddltool.commands.verbs import typer_command  # imported late, as `ddltool --help` does not need it

    # Below the options, help shows an example, and the second words of commands such as "simulate sweep".
    epilog = []
    example = COMMANDS[name].get("example")
    if example:
        epilog.append(f"Example: {example}")
    second_words = [other.partition(" ")[2] for other in COMMANDS if other.startswith(f"{name} ")]
    if second_words:
        epilog.append(f"Beside it: {name} {', '.join(second_words)}")
    single = typer.Typer(add_completion=False)
    register = single.command(name=name, cls=_Command, epilog="\n\n".join(epilog) or None)
    register(typer_command(getattr(module, "_".join(words)), name, panels))
    command = cast("TyperCommand", get_command(single))
    # -q and -v may stand behind the command's name too.
    command.params += [parameter for parameter in get_command(app).params if parameter.name in ("quiet", "verbose")]
    return command


class _PlainHelp:
    """A mixin for commands whose help shows types in a user's words, and no types of flags and arguments."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of a command, including ``--help``, with their shown type set by :func:`_type_shown`."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            parameter.display_type_rich = partial(_type_shown, parameter)
        return parameters


def _type_shown(parameter: Any, ctx: Any) -> str | None:
    """Return the type that help shows for a parameter; None, which shows nothing, for arguments and flags.

    ``ctx``: typer's context, which asks for it.
    """
    if parameter.param_type_name == "argument" or getattr(parameter, "is_flag", False):
        return None
    shown = type(parameter).display_type_rich(parameter, ctx) or ""
    return shown.replace("<str>", "TEXT")


class _Command(_PlainHelp, TyperCommand):
    """A command whose options stand once each, but for those that take a list."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments into ``ctx`` and return those left over.

        Raises InputError for an option that is given twice: the parser would keep the last one and drop the others unsaid.
        """
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))  # a parameter is there as often as it is given
        for option in set(given):
            is_single = isinstance(option, TyperOption) and not (option.multiple or option.is_flag or option.count)
            if is_single and given.count(option) > 1:
                remedy = "give it once; of several values, all in one text with commas"
                raise InputError(option.opts[-1], "is given twice", remedy)
        return super().parse_args(ctx, args)


def _check_models(args: list[str]) -> None:
    """Raise InputError for an unknown model of a hub in the arguments, before the command's module imports torch."""
    for text in args:
        if text.startswith(("transformers:", "diffusers:")):
            from ddltool.published_models import check_hub_name

            check_hub_name(text)


class _Lazy(_PlainHelp, TyperGroup):
    """The group of all commands; a command, whose name is one word or two, is loaded when it runs or is completed."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return (name, command, remaining arguments) for the command that the arguments begin with.

        Two words are tried before one. For a command's earlier name a note is printed. Raises a usage error for a first
        word that needs a second, and for an unknown command.
        """
        for words in (2, 1):
            name = " ".join(args[:words])
            if name in MOVED and not ctx.resilient_parsing:
                print(f"note: ddltool {name} is now ddltool {MOVED[name]}", file=sys.stderr)  # noqa: T201 - for people
            name = MOVED.get(name, name)
            if name in COMMANDS:
                _check_models(args[words:])
                return name, load(name), args[words:]
        second_words = [name.partition(" ")[2] for name in COMMANDS if name.startswith(f"{args[0]} ")]
        if second_words:
            ctx.fail(f"{args[0]} needs one of: {', '.join(second_words)}")
        return super().resolve_command(ctx, args)


_HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    name="ddltool",
    cls=_Lazy,
    help="Order transfers, size batches, place workers and set barriers for distributed training, before it runs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings=_HELP,
)
for _name, _about in COMMANDS.items():
    # "simulate sweep" is hidden in the list of commands, as the help of "simulate" names it.
    _beside = _name.partition(" ")[0] in COMMANDS and " " in _name
    app.command(_name, help=_about["summary"], rich_help_panel=_about["question"], hidden=_beside)(lambda: None)

# typer has its own copy of click since 0.2x, and used click itself before: the base class is found through its subclass.
_UsageProblem: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

_INTERRUPTED = 130
# Commands whose SOURCE may be a command line.
_RECORDING = ("predict", "trace", "plan")


def _show_version(value: bool) -> None:
    """Print the version and end the command, if ``--version`` is given."""
    if value:
        typer.echo(f"ddltool {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Order transfers, size batches, place workers and set barriers for distributed training, before it runs."""


def _with_command(arguments: Sequence[str] | None) -> Sequence[str] | None:
    """Return the arguments with all that follows ``--`` joined into one SOURCE: a command line to record.

    ``predict -- python train.py`` becomes ``predict -- "-- python train.py"``. Arguments without ``--``, or of a command
    that records nothing, are returned unchanged; None: those of this process.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    position = words.index("--") if "--" in words else len(words)
    command = next((word for word in words[:position] if not word.startswith("-")), None)  # behind options such as -q
    if position >= len(words) - 1 or command not in _RECORDING:
        return arguments
    return [*words[:position], "--", f"-- {shlex.join(words[position + 1 :])}"]


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 check failed, 2 bad input, 3 no plan, 130 interrupted.

    Every error becomes one line on stderr. ``arguments``: None: those of this process.
    """
    begin_s = time.perf_counter()
    try:
        result = app(args=_with_command(arguments), prog_name="ddltool", standalone_mode=False)
        sys.stdout.flush()
        if VOICE.verbose:
            print(f"{time.perf_counter() - begin_s:.1f} s in all", file=sys.stderr)  # noqa: T201
        code = result if isinstance(result, int) else 0  # an int: of typer.Exit
        # typer turns a KeyboardInterrupt into this code.
        return _fail("interrupted", code) if code == _INTERRUPTED else code
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        _close_output()  # the reader of stdout has ended, as in `ddltool ... | head`
        return 0
    except OSError as error:
        # Its buffer is dropped, else Python would fail to flush it once more at its end.
        with contextlib.suppress(OSError):
            _close_output()
        # Errors of reading and writing artifacts are InputErrors; others are of stdout (a full disk), or of a strange name.
        where = error.filename or "output"
        return _fail(f"{where}: cannot be used ({error.strerror or error}); give another place", 2)
    except Exception as error:
        # After a signal, a library may raise its own error in place of KeyboardInterrupt.
        if interrupts.exit_code() and not isinstance(error, Interrupted):
            return _fail("interrupted", _INTERRUPTED)
        return _fail(*_line_and_exit_code(error))
    finally:  # tests and notebooks run several commands in one process
        VOICE.quiet = VOICE.verbose = False


def _close_output() -> None:
    """Redirect stdout to /dev/null, so that Python's last flush of text that cannot be written does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _line_and_exit_code(error: Exception) -> tuple[str, int]:
    """Return (the line to print for an error, the exit code).

    Our own errors have their line; some others are explained by their type; any other is a bug of ddltool, code 1.
    """
    if isinstance(error, DdlToolError):
        return str(error), error.exit_code
    if isinstance(error, _UsageProblem):
        return _usage_text(error), 2
    if isinstance(error, MemoryError):
        return "input: needs more memory than there is; give a smaller model, batch or file", 2
    if isinstance(error, ModuleNotFoundError):
        # Packages may be missing, as gates and reports run in small installations (docs/gate.md).
        package = (error.name or "").partition(".")[0]
        if package not in ("", "ddltool"):
            return f"{package}: this command needs the package, which is not installed; {_how_to_get(package)}", 2
    # Python sets sys.stdout to None if it is started with standard output closed, so that writing to it fails so.
    if isinstance(error, AttributeError) and sys.stdout is None:
        return "output: standard output is closed; give it a place, or use -o FILE", 2
    problem = ""
    if isinstance(error, (OverflowError, RecursionError, UnicodeEncodeError)):
        problem = f"{type(error).__name__}: {error}"
    elif type(error).__name__ == "ValidationError":  # pydantic's, by name, as importing it would slow down --help
        first = error.errors()[0]  # type: ignore[attr-defined]
        problem = f"{'.'.join(map(str, first['loc']))} would be {first['input']!r}"
    if problem:  # a value that passed its own check, but leads to a number or text that cannot be used
        return f"input: holds a number or text beyond what can be computed with ({problem}); use ordinary ones", 2
    return f"internal: {type(error).__name__}: {error}; this is ddltool's own mistake, -v shows where it is", 1


def _how_to_get(package: str) -> str:
    """Return the command that installs a missing package; ``package``: the name by which it is imported."""
    if package == "torch":
        return "pip install torch (without a GPU: --index-url https://download.pytorch.org/whl/cpu)"
    charts = "altair vl-convert-python"
    names = {"sklearn": "scikit-learn", "altair": charts, "vl_convert": charts, "yaml": "pyyaml"}
    return f"pip install {names.get(package, package)}"


def _usage_text(error: Exception) -> str:
    """Return typer's message on wrong usage as one line that ends with the command for help."""
    text = getattr(error, "format_message", lambda: str(error))().rstrip(".")
    if "(-- " in text:  # both a SOURCE and a command after --, which is one argument too many
        text = "the command after -- is what the step is of; leave out the other source"
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "ddltool"
    return f"{text}; see {command} --help" if text else f"see {command} --help"


def _fail(text: str, code: int) -> int:
    """Print an error as one line on stderr and return its exit code.

    Ranks above 0 of a torchrun job print nothing. With ``-v`` an unexpected error also prints its traceback.
    """
    with contextlib.suppress(AttributeError, OSError):  # stdout may be closed, or its disk full
        sys.stdout.flush()
    if is_follower():
        return code
    if VOICE.verbose and not isinstance(sys.exception(), DdlToolError | _UsageProblem | KeyboardInterrupt | None):
        traceback.print_exc()
    print(f"error: {one_line(text)}", file=sys.stderr)  # noqa: T201 - this is the one place that reports errors
    return code
