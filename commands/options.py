"""Options that several subcommands share, so that one thing has one name and one help text; which have a part in a mode."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from ddltool.errors import InputError
from ddltool.links import DATASHEET

_SHORT = 26
"""So many letters of choices fit beside an option's name in --help; more stand in its text."""


def one_of(*names: str, help: str) -> dict[str, Any]:
    """Return what makes an option name its choices in --help and in completion; a wrong one is refused by who reads it."""
    return _choices(names, help, "NAME", lambda: list(names))


def device_names(begun: str) -> list[str]:
    """Complete the last of a list of device types that ship."""
    from ddltool.fixtures.loading import known_devices  # `ddltool --help` reads this module, and no table

    before, comma, _ = begun.rpartition(",")
    return [f"{before}{comma}{device.name}" for device in known_devices().devices]


def some_of(*names: str, help: str) -> dict[str, Any]:
    """Return the same for a list of names separated by commas: completion goes on after the last comma."""

    def complete(incomplete: str) -> list[str]:
        before, comma, _ = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names]

    return _choices(names, help, "NAME[,NAME]", complete)


def _choices(names: Sequence[str], text: str, metavar: str, complete: Callable[..., list[str]]) -> dict[str, Any]:
    short = "|".join(names)
    if metavar == "NAME" and len(short) <= _SHORT:
        return {"metavar": short, "help": text, "autocompletion": complete}
    return {"metavar": metavar, "help": f"{text} One of: {', '.join(names)}.", "autocompletion": complete}


@dataclass
class Voice:
    """How much a command says on stderr beside its result; :func:`ddltool.commands.main.run` takes it back."""

    quiet: bool = False
    """No progress and no remarks; errors are said."""
    verbose: bool = False
    """The seconds of each stage, and where an error comes from that is ddltool's own."""

    def set(self, name: str) -> Callable[[bool], None]:
        """Return what typer calls with the value of ``-q`` or ``-v``, wherever on the command line it stands."""

        def told(value: bool) -> None:
            if value:
                setattr(self, name, True)
            if self.quiet and self.verbose:
                raise InputError("-q", "has no part beside -v", "give one of the two")

        return told


VOICE = Voice()
_EVERYWHERE: dict[str, Any] = {"expose_value": False, "is_eager": True, "rich_help_panel": "How much it says"}
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", callback=VOICE.set("quiet"), help="No progress and no remarks on stderr.", **_EVERYWHERE
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        callback=VOICE.set("verbose"),
        help="The seconds of each stage on stderr; a traceback for an internal error.",
        **_EVERYWHERE,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; all else goes to stderr.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the artifact here.")]
DevicesFile = Annotated[
    Path | None, typer.Option("--devices-file", metavar="FILE", help="Device types of your own, YAML or JSON.")
]
AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Import and run the file.py:f or package.module:f that a file names.")
]
Precision = Annotated[
    str,
    typer.Option(
        **one_of("fp32", "tf32", "amp", "bf16", help="fp32: torch's default, convolutions may use TF32; amp: float16.")
    ),
]
ChannelsLast = Annotated[bool, typer.Option("--channels-last", help="Images in channels_last.")]
SequenceLength = Annotated[int | None, typer.Option(help="Tokens of a sample; the source's own by default.", min=1)]
Compress = Annotated[
    str | None, typer.Option(metavar="NAME", help="What compressed gradients would bring DDP: bf16 or powersgd:RANK.")
]
NcclTests = Annotated[
    list[Path] | None,
    typer.Option(
        "--nccl-tests", metavar="FILE", help="A log of nccl-tests, which overrides the model; repeat for more."
    ),
]
LocalLink = Annotated[
    str | None,
    typer.Option(
        "--link",
        metavar="NAME",
        autocompletion=lambda: [*DATASHEET],
        help="Inside a node: nvlink3, pcie4, ..., or a rate as 240GB/s.",
    ),
]
Nic = Annotated[
    str | None, typer.Option("--nic", metavar="RATE", help="A node's RDMA cards by datasheet, e.g. 8x200Gbit.")
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything random.", min=0)]
Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="model.onnx, package.module:factory, file.py:factory, zoo:NAME, transformers:NAME, timm:NAME or graph.json.",
    ),
]


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether the command line (or an environment variable) gives this parameter."""
    source = context.get_parameter_source(name)
    return source is not None and not source.name.startswith("DEFAULT")


def demand_part(context: typer.Context, mode: str, allowed: Collection[str], *, instead: str = "leave it out") -> None:
    """Raise InputError for the first option or argument on the command line that has no part in ``mode``.

    Even with its default value: who gives it expects something of it. ``allowed``: names of the command's parameters, as
    in its signature. ``instead``: what would be right.
    """
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in allowed or not parameter.expose_value or not is_given(context, name):
            continue
        is_option = parameter.param_type_name == "option"
        shown = parameter.opts[-1] if is_option else getattr(parameter, "metavar", None) or name.upper()
        raise InputError(shown, f"has no part in {mode}", instead)
