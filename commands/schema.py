"""``ddltool schema KIND``: the JSON Schema of a kind of document."""

from __future__ import annotations

from typing import Annotated

import typer

from ddltool.commands.options import Json, Output


def schema(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND", help="graph, profile, goodput, cluster, job, plan, enforcement, telemetry or devices."
        ),
    ],
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Print the JSON Schema of a kind of document (of one row, for profile and telemetry)."""
    from ddltool.artifacts import save
    from ddltool.commands.output import print_json
    from ddltool.schemas import schema_of

    document = schema_of(kind)
    if output is not None:
        save(document, output)
    if output is None or as_json:
        print_json(document)
