"""``ddltool emit PLAN``: the enforcement config of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from ddltool.commands.options import Json

TARGETS = ("hook",)


def emit(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json, written by ddltool plan -o.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="File to write.")] = Path(
        "enforce.json"
    ),
    target: Annotated[str, typer.Option(help="What will read it: hook (ddltool.runtime).")] = "hook",
    telemetry: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="File the hook appends measurements to; 'none' for no telemetry."),
    ] = "telemetry.jsonl",
    as_json: Json = False,
) -> None:
    """Write the enforcement config that the runtime hook follows."""
    from ddltool.analyzers.placement.enforcement import to_enforcement
    from ddltool.artifacts import load, save
    from ddltool.commands.output import out, print_json
    from ddltool.errors import InputError, did_you_mean
    from ddltool.plan import Plan

    if target not in TARGETS:
        raise InputError("--target", f"unknown target {target!r}", did_you_mean(target, TARGETS))
    enforcement = to_enforcement(load(plan_file, Plan), telemetry=None if telemetry == "none" else telemetry)
    save(enforcement, output)
    if as_json:
        document = {"kind": "ddltool.emit", "schema_version": 1, "target": target, "paths": [str(output)]}
        print_json({**document, "world_size": enforcement.world_size})
        return
    batches = ", ".join(str(rank.local_batch_size) for rank in enforcement.ranks[:16])
    more = ", ..." if enforcement.world_size > 16 else ""
    out().print(
        f"wrote {output}: {enforcement.world_size} processes, local batch sizes {batches}{more}", soft_wrap=True
    )
