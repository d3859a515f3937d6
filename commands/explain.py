"""``ddltool explain TERM``: what a word of the reports and pages means."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated

from ddltool.commands.options import completed
from ddltool.commands.output import out, print_json
from ddltool.errors import InputError, did_you_mean

GLOSSARY: dict[str, str] = tomllib.loads(Path(__file__).with_name("glossary.toml").read_text(encoding="utf-8"))
"""By term, one or two sentences; the site lists them."""


def explain(
    term: Annotated[str, completed(GLOSSARY)] = "",
    as_json: bool = False,
) -> None:
    """Say what a term means: goodput, EST, makespan, D1, ...

    Example: ddltool explain goodput
    """
    found = entries(term) if term else GLOSSARY
    if as_json:
        print_json({"terms": found})
        return
    for name, text in found.items():
        out().print(f"{name}: {text}")


def entries(term: str) -> dict[str, str]:
    """Return the entries that a word names, capitals apart. Raises InputError, with the nearest, for none."""
    wanted = term.strip().lower()
    found = {name: text for name, text in GLOSSARY.items() if wanted in _words(name)}
    if not found:
        raise InputError("TERM", f"unknown term {term[:60]!r}", did_you_mean(term[:60], GLOSSARY))
    return found


def _words(name: str) -> set[str]:
    """Return what a term may be asked by: whole, without what stands in brackets, and each of several."""
    bare = re.sub(r"\s*\([^)]*\)", "", name)
    inside = re.findall(r"\(([^)]*)\)", name)
    return {one.strip().lower() for one in (name, bare, *bare.split(","), *inside)}
