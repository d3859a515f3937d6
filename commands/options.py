"""Options that several subcommands share, so that one thing has one name and one help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout; all else goes to stderr.")]
Output = Annotated[Optional[Path], typer.Option("-o", "--output", metavar="FILE", help="Write the artifact here.")]  # noqa: UP045
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything random.", min=0)]
Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="model.onnx, package.module:factory, file.py:factory, zoo:NAME, transformers:NAME or graph.json.",
        show_default=False,
    ),
]
