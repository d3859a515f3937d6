"""``ddltool import FILE...``: measurements made elsewhere, as one profile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ddltool.analyzers.job.goodput.imported_rows import import_files
from ddltool.commands.options import within
from ddltool.commands.output import note, out, print_json, say, table, tell_written
from ddltool.profiles import records, write_profile
from ddltool.results import ProfileResult


def import_(
    files: list[Path],
    device_name: str | None = None,
    batch_size: Annotated[int | None, within(1)] = None,
    nodes: Annotated[int | None, within(1)] = None,
    replicas: Annotated[int | None, within(1)] = None,
    output: Path | None = None,
    as_json: bool = False,
) -> None:
    """Read measurements made elsewhere: AdaptDL tables, profiler traces, telemetry; write one profile.

    The profile is written to ``output``; without it, what the files hold is only printed: the rows of each file, and the
    range of each device's batches (``as_json``: all rows). ``device_name``, ``batch_size``, ``nodes`` and ``replicas``:
    values for files that do not have them. Raises InputError for a file that cannot be read or lacks such a value.
    """
    frame, sources = import_files(
        files, device=device_name or None, batch_size=batch_size, num_nodes=nodes, num_replicas=replicas
    )
    if output is not None:
        write_profile(frame, output)
    for source in sources:
        for remark in source.remarks:
            note(f"{source.path}: {remark}")
    if as_json:
        print_json(ProfileResult(rows=records(frame), sources=sources))
        return
    rows = [(Path(source.path).name, source.kind, f"{source.rows:,}") for source in sources]
    out().print(table("Imported", ("file", "kind", "rows"), rows, text_columns=2))
    for name, of_device in frame.groupby("device", sort=True):
        batches, replica_counts = of_device["local_batch_size"], of_device["num_replicas"]
        say(
            f"{name}: {len(of_device):,} rows, local batch {batches.min()} to {batches.max()}, {replica_counts.min()} to "
            f"{replica_counts.max()} replicas on up to {of_device['num_nodes'].max()} nodes"
        )
    tell_written(output)
