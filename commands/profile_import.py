"""``ddltool profile --import FILE...``: measurements of others as one native profile.csv."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddltool.analyzers.loading.imported_rows import import_files
from ddltool.commands.output import note, out, print_json, table, tell_written
from ddltool.profiles import records, write_profile
from ddltool.results import ProfileResult


def profile_import(
    files: Sequence[Path],
    output: Path | None,
    as_json: bool,
    *,
    device: str | None = None,
    batch_size: int | None = None,
    num_nodes: int | None = None,
    num_replicas: int | None = None,
) -> None:
    """Read the files, write one profile when ``output`` is given, and print what each file gave and the profile covers.

    ``device`` names the device of all rows; the three numbers are what a profiler trace does not always say.
    """
    frame, sources = import_files(
        files, device=device, batch_size=batch_size, num_nodes=num_nodes, num_replicas=num_replicas
    )
    if output is not None:
        write_profile(frame, output)
    for source in sources:
        for remark in source.remarks:
            note(f"{source.path}: {remark}")
    if as_json:
        print_json(ProfileResult(rows=records(frame), sources=sources))
        return
    console = out()
    rows = [(Path(source.path).name, source.kind, f"{source.rows:,}") for source in sources]
    console.print(table("Imported", ("file", "kind", "rows"), rows, text_columns=2))
    for name, part in frame.groupby("device", sort=True):
        batches, replicas = part["local_batch_size"], part["num_replicas"]
        console.print(
            f"{name}: {len(part):,} rows, local batch {batches.min()} to {batches.max()}, {replicas.min()} to "
            f"{replicas.max()} replicas on up to {part['num_nodes'].max()} nodes",
            soft_wrap=True,
        )
    tell_written(output)
