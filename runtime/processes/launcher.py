"""What the launcher (torchrun) says in environment variables; without torch, so that commands can ask before they need it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ddltool.errors import InputError


def launched_number(name: str, default: str = "", environment: Mapping[str, str] = os.environ) -> int:
    """Return a variable that the launcher sets, or ``default`` where it is not set, as a number.

    Raises InputError for anything but a whole number.
    """
    text = environment.get(name, default)
    if not text.isdecimal():
        raise InputError(name, f"is {text!r}", "start the job with torchrun")
    return int(text)


def count_nodes(world_size: int) -> int:
    """Return the number of machines in a job of ``world_size`` ranks.

    It is read from the launcher's variables: GROUP_WORLD_SIZE, or else ``world_size / LOCAL_WORLD_SIZE``; 1 without
    both.
    """
    nodes = os.environ.get("GROUP_WORLD_SIZE", "")
    if nodes.isdecimal() and int(nodes) > 0:
        return int(nodes)
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdecimal() and int(local) > 0:
        return -(-world_size // int(local))  # rounded up
    return 1
