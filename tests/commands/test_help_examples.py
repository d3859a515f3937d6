"""The table of commands: what it says of each is what the command says, and its examples can be run."""

from __future__ import annotations

import pytest

from ddltool.commands.main import COMMANDS, load
from tests.house.test_docs import check_options


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_own_summary_and_one_example_that_it_understands(name: str) -> None:
    summary, example = COMMANDS[name]["summary"], COMMANDS[name].get("example")
    command = load(name)
    text = command.help or ""
    assert command.get_short_help_str(200) == summary
    assert (example is None) == ("Example: ddltool" in text)
    if example is not None:
        assert f"ddltool {name}" in example
        for part in example.replace("; then: ", "; ").replace("; or: ", "; ").split("; "):
            check_options(part)
