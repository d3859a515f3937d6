"""The examples below ``--help``: one for each command, with options that it knows."""

from __future__ import annotations

import typer

from ddltool.commands.examples import EXAMPLES, epilog
from ddltool.commands.main import app
from tests.test_docs import check_options

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_every_command_has_one_example_that_it_understands() -> None:
    in_help = {name for name, command in COMMANDS.items() if "Example: ddltool" in (command.help or "")}
    assert set(EXAMPLES) | in_help == set(COMMANDS)
    assert not set(EXAMPLES) & in_help
    for name, example in EXAMPLES.items():
        assert f"ddltool {name}" in example
        for part in example.replace("; then: ", "; ").replace("; or: ", "; ").split("; "):
            check_options(part)


def test_they_are_shown_where_any_is() -> None:
    shown = {name: command.epilog for name, command in COMMANDS.items() if command.epilog}
    assert shown in ({}, {name: epilog(name) for name in EXAMPLES})
