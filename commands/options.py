"""Types of options: how their texts are read (errors name the option), shown in help and completed by the shell."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ddltool.errors import InputError, known, shortened
from ddltool.links import DATASHEET
from ddltool.precision import NAMES, precision_name
from ddltool.units import parse_duration, parse_share

Remark = dict[str, Any]
"""Settings in a parameter's type (``Annotated[int, within(1)]``): arguments of ``typer.Option``; ``reader``, a function of
(text, option); ``choices``, the allowed names."""


def within(least: int, most: int | None = None) -> Remark:
    """Return the settings of a whole number from ``least`` to ``most``, both included; ``most`` None: no upper limit."""
    if most is None:
        return {"metavar": f"N [x>={least}]", "reader": number(least, whole=True)}
    return {"metavar": f"N [{least}<=x<={most}]", "reader": number(least, most, whole=True)}


def completed(names: Iterable[str]) -> Remark:
    """Return the settings of an option for which the shell offers these names; other values are allowed, too."""
    return {"autocompletion": lambda: [*names]}


def one_of(*names: str) -> Remark:
    """Return the settings of a choice of ``names``: shown by --help, completed by the shell; any other name is refused."""
    return {"choices": names, **completed(names), "reader": lambda text, option: known(option, text, names)}


def some_of(*names: str) -> Remark:
    """Return the settings of a comma-separated list of ``names``: shown by --help; the shell completes the last one.

    The names are not checked here.
    """
    return {"choices": names, "metavar": "NAME[,NAME]", **after_comma(lambda: names)}


def after_comma(names: Callable[[], Iterable[str]]) -> Remark:
    """Return the settings of a comma-separated list whose last name the shell completes.

    ``names``: returns the names; called when the shell completes, as it may read a file.
    """

    def complete(typed: str) -> list[str]:
        """Return completions of the typed text: each name in place of what follows the last comma."""
        finished_names, comma, _ = typed.rpartition(",")
        return [f"{finished_names}{comma}{name}" for name in names()]

    return {"autocompletion": complete}


def _device_names() -> list[str]:
    """Return the names of the known device types, for completion."""
    from ddltool.shipped import known_devices  # `ddltool --help` reads this module, and no table

    return [device.name for device in known_devices().devices]


@dataclass
class Voice:
    """How much a command prints on stderr beside its result; :func:`ddltool.commands.main.run` resets it after a command."""

    quiet: bool = False
    """``-q``: no progress and no remarks; errors are printed."""
    verbose: bool = False
    """``-v``: the seconds of each stage, details of results, and tracebacks of ddltool's own errors."""

    def set(self, field: str) -> Callable[[bool], None]:
        """Return typer's callback for ``-q`` or ``-v``, which sets ``field`` ("quiet" or "verbose")."""

        def set_field(is_set: bool) -> None:
            """Set ``field`` to True if the option is given. Raises InputError if both ``-q`` and ``-v`` are."""
            if is_set:
                setattr(self, field, True)
            if self.quiet and self.verbose:
                raise InputError("-q", "has no part beside -v", "give one of the two")

        return set_field


VOICE = Voice()


def is_follower() -> bool:
    """Return whether this process is a rank above 0 of a torchrun job; only rank 0 prints."""
    return "WORLD_SIZE" in os.environ and os.environ.get("RANK", "0") != "0"


_SHARED_BY_ALL: dict[str, Any] = {"expose_value": False, "is_eager": True, "rich_help_panel": "How much it says"}
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", callback=VOICE.set("quiet"), help="No progress and no remarks on stderr.", **_SHARED_BY_ALL
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        callback=VOICE.set("verbose"),
        help="The seconds of each stage on stderr; a traceback for an internal error.",
        **_SHARED_BY_ALL,
    ),
]


_LONGEST_BUDGET_S = 30 * 86400.0
_MOST_NUMBERS = 1000


@contextmanager
def as_options(names: Mapping[str, str]) -> Iterator[None]:
    """Let an InputError of the body name an option where it names a parameter of the function that raised it.

    ``names``: the option by the name of the parameter. The error stays the same object.
    """
    try:
        yield
    except InputError as error:
        if error.where in names:
            parameter = error.where
            error.where = names[parameter]
            # Only the beginning of the message is replaced: text may have been added at its end.
            error.args = (error.where + str(error).removeprefix(parameter),)
        raise


def number(least: float = -math.inf, most: float = math.inf, *, whole: bool = False) -> Callable[[str, str], float]:
    """Return a reader ``(text, option) -> number``, which raises InputError unless ``least`` <= number <= ``most``.

    ``whole``: whether it reads whole numbers only, as int.
    """
    kind = "whole number" if whole else "number"

    def read(text: str, where: str) -> float:
        """Return the number in the text; ``where``: the option, for errors."""
        try:
            value = int(text) if whole else float(text)
        except ValueError:
            raise InputError(where, f"{shortened(text, 60)!r} is no {kind}", f"give a {kind}") from None
        if math.isnan(value):
            raise InputError(where, "is nan", "give a number")
        if not least <= value <= most:
            limits = f"from {least:.15g} to {most:.15g}" if most < math.inf else f"of at least {least:.15g}"
            raise InputError(where, f"is {value:.15g}", f"give a {kind} {limits}")
        return value

    return read


def numbers(least: int, most: int, *, above: float = -math.inf) -> Callable[[str, str], tuple[float, ...]]:
    """Return a reader ``(text, option) -> numbers`` of a comma-separated list.

    It raises InputError unless there are ``least`` to ``most`` numbers, all finite and greater than ``above``.
    """

    def read(text: str, where: str) -> tuple[float, ...]:
        """Return the numbers in the text; ``where``: the option, for errors."""
        parts = text.split(",")
        if not least <= len(parts) <= most:
            raise InputError(where, f"has {len(parts)} numbers", f"give {least} to {most}, separated by commas")
        values = tuple(number()(part, where) for part in parts)
        for value in values:
            if not above < value < math.inf:
                raise InputError(where, f"has {value:g}", f"give finite numbers above {above:g}")
        return values

    return read


def integers(
    text: str, where: str, least: int = 1, most: int | None = None, *, ordered: bool = True, once: bool = True
) -> tuple[int, ...]:
    """Return the whole numbers in a text such as ``1,2,4``; ``where``: the option, for errors.

    ``once``: drop repeated numbers. ``ordered``: also sort them; it has no effect without ``once``. Raises InputError for
    a part that is no whole number from ``least`` to ``most``, and for more than 1,000 numbers.
    """
    remedy = "write for example 1,2,4" if least else "write for example 0,1,4"
    try:
        values = tuple(int(part) for part in text.split(","))
    except ValueError:  # also a number of thousands of digits
        quoted = text if len(text) <= 60 else f"{text[:60]}..."
        raise InputError(where, f"{quoted!r} is not a list of whole numbers", remedy) from None
    if min(values) < least:
        raise InputError(where, f"{min(values)} is below {least}", f"write whole numbers >= {least}")
    if most is not None and max(values) > most:
        raise InputError(where, f"has {max(values)}", f"give whole numbers up to {most}")
    if len(values) > _MOST_NUMBERS:
        raise InputError(where, f"holds {len(values)} numbers", f"give at most {_MOST_NUMBERS}")
    if not once:
        return values
    return tuple(sorted(set(values))) if ordered else tuple(dict.fromkeys(values))


def pairs(text: str, where: str, form: str, example: str, pattern: str = ".+") -> dict[str, str]:
    """Return the values by name in a text ``NAME=VALUE,NAME=VALUE``; blanks around parts and empty parts are ignored.

    Raises InputError for a part of another form and for a repeated name.

    Args:
        text: what the user wrote.
        where: the option, for errors.
        form: the right form in words, for errors, such as "TYPE=N".
        example: a text of that form, for errors.
        pattern: a regular expression that each value must match in full.
    """
    values_by_name: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, value_text = (piece.strip() for piece in part.rpartition("="))
        if not (name and re.fullmatch(pattern, value_text, re.ASCII)):
            raise InputError(where, f"{shortened(part, 80)!r} is not {form}", f"for example {example}")
        if name in values_by_name:
            raise InputError(where, f"gives {name} twice", "give it once")
        values_by_name[name] = value_text
    return values_by_name


def device_counts(text: str, option: str) -> dict[str, int]:
    """Return the counts by device type in a text such as ``V100=2,T4=1``. Raises InputError, naming ``option``, for others."""
    values_by_type = pairs(text, option, "TYPE=N", "V100=2,T4=1", "[0-9]{1,9}")
    if not values_by_type:
        raise InputError(option, f"{text!r} is not TYPE=N", "for example V100=2,T4=1")
    return {name: int(count) for name, count in values_by_type.items()}


def share(text: str, where: str) -> float:
    """Return the share in a text ``5%`` or ``0.05``; ``where``: the option, for errors.

    Raises InputError unless it is between 0 and 1, both excluded.
    """
    value = parse_share(text)
    if not 0 < value < 1:
        raise InputError(where, f"{text!r} is not a share", "write for example 5% or 0.05")
    return value


def percent(text: str, where: str) -> float:
    """Return the share in a text ``15%`` or ``0.15``; more than 100 % is allowed. ``where``: the option, for errors.

    Raises InputError for a negative or infinite number, for other texts, and for a number above 1 without ``%``: 15 would
    be 1500 %, and 15 % is probably meant.
    """
    value = parse_share(text)
    if not (math.isfinite(value) and value >= 0):
        raise InputError(where, f"{text!r} is no share", "write for example 15% or 0.15")
    if value > 1 and not text.strip().endswith("%"):
        raise InputError(where, f"{text!r} would be {100 * value:g}%", f"write {value:g}% or {value / 100:g}")
    return value


def budget(text: str, where: str) -> float:
    """Return the seconds in a text ``60s`` or ``5min``; ``where``: the option, for errors.

    Raises InputError for 0, for more than thirty days, and for other texts.
    """
    seconds = parse_duration(text, where)
    if not 0 < seconds <= _LONGEST_BUDGET_S:
        raise InputError(where, f"{text!r} is not a usable time", "write a time above 0 and up to 720h, such as 60s")
    return seconds


def words(text: str, option: str) -> list[str]:
    """Return the words of a script with its arguments, split as a shell does.

    Raises InputError, naming ``option``, for unmatched quotes, no words, a line break, and a first word that is an option.
    """
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise InputError(option, f"cannot be split into words ({error})", "mind the quotes") from None
    if not parts or not text.isprintable():
        raise InputError(option, "names no script, or holds a line break", 'give "train.py --its options"')
    if not parts[0] or parts[0].startswith("-"):
        raise InputError(option, f"begins with {parts[0]!r}, which is no script", 'give "train.py --its options"')
    return parts


Seed = Annotated[int, within(0)]
DEVICES = after_comma(_device_names)
Precision = Annotated[str, {**one_of(*NAMES), "reader": precision_name}]
_FOREACH = ("foreach-sgd", "foreach-momentum", "foreach-adam", "foreach-adamw")
OPTIMIZER = one_of("none", "sgd", "momentum", "adam", "adamw", "adamw-8bit", "lion", "muon", "adafactor", *_FOREACH)
LocalLink = Annotated[str | None, completed(DATASHEET)]


def _model_names(typed: str) -> list[str]:
    """Return the shell's completions of a SOURCE: built-in models after ``zoo:``, published ones after their library.

    Returns [] for other texts: they may be files, which the shell completes by itself.
    """
    if typed.startswith("zoo:"):
        from ddltool.fixtures.zoo import ZOO

        return [f"zoo:{name}" for name in ZOO]
    if typed.startswith(("transformers:", "diffusers:")):
        from ddltool.published_models import published_models

        return [model.source for model in published_models().values()]
    return []


IN_SCRIPT: Mapping[str, str] = {
    name: f"leave it out, and {how} in the script"
    for name, how in {
        "batch_sizes": "set the batch size",
        "batch_size": "set the batch size",
        "precision": "put torch.autocast, or bf16=True of its trainer,",
        "channels_last": "put model.to(memory_format=torch.channels_last)",
        "compile": "put torch.compile(model)",
        "optimizer": "make the optimizer",
        "accumulation": "accumulate gradients",
        "sharding": "put FSDP2's fully_shard(model)",
        "checkpointing": "put torch.utils.checkpoint, or gradient_checkpointing=True of its trainer,",
        "sequence_length": "cut the samples",
        "lora": "put peft's get_peft_model",
        "load_in_4bit": "put load_in_4bit=True",
        "attention": "put attn_implementation=",
    }.items()
} | {"replicas": "leave it out, and start the script by torchrun --nproc-per-node N"}
"""What would be right for an option beside a command that trains, whose script says by itself how a step is computed."""
AS_TEXT: Remark = {"type": str, "autocompletion": _model_names}
"""Settings of a parameter that takes a model in a program, and the model's name on the command line."""
AS_FILES: Remark = {"type": list[Path]}
"""Settings of a parameter that takes objects in a program, and files on the command line."""
