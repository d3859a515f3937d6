"""``ddltool schema [KIND]``: the JSON Schema of a kind of document, or the list of kinds."""

from __future__ import annotations

from typing import Annotated

import typer

from ddltool.commands.options import Json, Output


def schema(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="[KIND]",
            help="graph, profile, goodput, cluster, job, plan, enforcement, telemetry, ...; none: list all kinds.",
            show_default=False,
        ),
    ] = "",
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Print the JSON Schema of a kind of document (of one row, for tables), or list the kinds."""
    from ddltool.artifacts import save
    from ddltool.commands.kinds import schema_of
    from ddltool.commands.output import print_json
    from ddltool.errors import InputError

    if not kind:
        if output is not None:
            raise InputError("-o", "needs a kind", "name one, such as: ddltool schema plan -o plan.schema.json")
        _list(as_json)
        return
    document = schema_of(kind)
    if output is not None:
        save(document, output)
    if output is None or as_json:
        print_json(document)


def _list(as_json: bool) -> None:
    """Print every kind with its form, what writes it and what reads it."""
    from dataclasses import asdict

    from ddltool.commands.kinds import FILES, KINDS, RESULTS
    from ddltool.commands.output import out, print_json, table

    if as_json:
        kinds_listed = [asdict(kind) for kind in KINDS.values()]
        print_json({"kind": "ddltool.kinds", "schema_version": 1, "kinds": kinds_listed})
        return
    for title, kinds in (("Files", FILES), ("What commands print", RESULTS)):
        rows = [(kind.name, kind.form, kind.written_by, kind.read_by) for kind in kinds]
        out().print(table(title, ("kind", "form", "written by", "read by"), rows, text_columns=4))
