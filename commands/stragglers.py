"""``ddltool stragglers TRACE...``: which rank slows the others down, since when, by how much, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ddltool.analyzers.answers.reporting.telemetry_section import stragglers_section
from ddltool.analyzers.job.diagnosing import diagnosis, operations
from ddltool.analyzers.job.diagnosing.traces import of_traces
from ddltool.analyzers.step.measured.ranks import RankSteps, of_telemetry
from ddltool.artifacts import (
    LONGEST_STREAM,
    check_outputs,
    demand_once,
    ending,
    read_bytes,
    to_json,
    write_bytes,
    write_text,
)
from ddltool.commands.options import within
from ddltool.commands.output import finish, note, progress
from ddltool.errors import InputError
from ddltool.tables import read_table

MOST_TRACES = 4096
_TELEMETRY_SUFFIXES = (".jsonl", ".ndjson")


def stragglers(
    sources: list[Path],
    batch_size: Annotated[int | None, within(1), {"show_default": "1"}] = None,
    feed: Path | None = None,
    output: Path | None = None,
    as_json: bool = False,
) -> None:
    """Read the traces of all ranks: which one holds the others up, since when, why, and what to do.

    ``sources``: one trace for each rank, folders of these, the hook's telemetry, or one table of operations (.parquet).
    ``feed``: the folder for files (feeds) that the remedies' commands read; ``batch_size``: samples of a rank in a step,
    for these files. Raises InputError for sources that cannot be combined or read, and for ``batch_size`` without ``feed``.
    """
    if batch_size is not None and feed is None:
        raise InputError("--batch-size", "needs --feed", "it is the samples of a step in the files that --feed writes")
    paths = _trace_files(sources)
    check_outputs(paths, {"-o": output})
    source_name = sources[0].name if len(sources) == 1 else f"{len(paths)} traces"
    if any(path.suffix == ".parquet" for path in paths):  # seconds of operations, without what rank speeds follow from
        if len(paths) > 1 or feed is not None:
            problem = "is given with others" if len(paths) > 1 else "has no rank's speeds"
            raise InputError(str(paths[0]), problem, "give one .parquet file, without --feed")
        operations_result = operations.what_if(operations.read_operations(paths[0]))
        finish(operations_result, lambda: stragglers_section(operations_result, source_name), output, as_json)
        return
    run, source = _read_run(paths)
    feed_folder = feed or Path()
    # The files that remedies name: those of --feed, or the given telemetry, which has all that they need.
    feeds = diagnosis.Feeds(**{field: str(feed_folder / file) for field, file in _FEED_FILES.items()})
    if source == "telemetry" and feed is None:
        feeds = diagnosis.Feeds.all(str(paths[0]))
    result = diagnosis.diagnose(run, source, feeds)
    if feed is not None:
        _write_feeds(run, batch_size or 1, feeds, paths if source == "telemetry" else [])
        note(f"wrote {', '.join(_FEED_FILES.values())} to {feed}")
    elif result.findings and source == "traces":
        note("the files that the remedies name are written by --feed FOLDER")
    finish(result, lambda: stragglers_section(result, source_name), output, as_json)


# What --feed writes, by field of ``diagnosis.Feeds``.
_FEED_FILES = {"speeds": "speeds.csv", "ends": "ends.csv", "telemetry": "telemetry.jsonl"}


def _trace_files(sources: list[Path]) -> list[Path]:
    """Return the given files, with each folder replaced by the traces in it.

    Raises InputError for a folder without traces, a file that is given twice, and more than ``MOST_TRACES`` files.
    """
    paths: list[Path] = []
    for source in sources:
        if source.is_dir():
            traces = [
                path for path in source.iterdir() if path.name.endswith((".json", ".json.gz", ".parquet", ".jsonl"))
            ]
            if not traces:
                raise InputError(
                    str(source), "holds no trace", "a folder of .json or .json.gz files, one for each rank"
                )
            paths += traces
        else:
            paths.append(source)
    if len(paths) > MOST_TRACES:
        raise InputError("TRACE", f"are {len(paths)}", f"give at most {MOST_TRACES}, one for each rank")
    demand_once(paths, "give one trace for each rank")
    return paths


def _read_run(paths: list[Path]) -> tuple[RankSteps, str]:
    """Return (steps of all ranks, "telemetry" or "traces": what they were read from).

    Raises InputError for telemetry given with other files, as one file has all ranks.
    """
    telemetry_files = [path for path in paths if ending(path) in _TELEMETRY_SUFFIXES]
    if telemetry_files:
        if len(paths) > 1:
            raise InputError(str(telemetry_files[0]), "is given with others", "telemetry of all ranks is one file")
        return of_telemetry(read_table(telemetry_files[0]), str(telemetry_files[0]), note), "telemetry"
    with progress("reading", len(paths)) as advance:
        return of_traces(paths, advance), "traces"


def _write_feeds(run: RankSteps, batch_size: int, feeds: diagnosis.Feeds, telemetry_files: list[Path]) -> None:
    """Write the files that the commands of the remedies read: the workers' speeds, their iteration ends, and telemetry.

    ``run``: the steps of all ranks. ``batch_size``: samples of a rank in a step. ``feeds``: the paths of the files.
    ``telemetry_files``: the first is copied; []: telemetry is made from ``run``.
    """
    Path(feeds.speeds).parent.mkdir(parents=True, exist_ok=True)
    for path, header, rows in (
        (feeds.speeds, "iteration,worker,speed,cpu,memory", diagnosis.speeds(run, batch_size)),
        (feeds.ends, "worker,iteration,end_s", diagnosis.ends(run)),
    ):
        lines = [",".join(f"{value:.9g}" for value in row) for row in rows]
        write_text(path, "\n".join([header, *lines]) + "\n")
    if telemetry_files:
        write_bytes(feeds.telemetry, read_bytes(telemetry_files[0], LONGEST_STREAM))
        return
    telemetry_lines = [to_json(row, indent=None) for row in diagnosis.telemetry(run, batch_size)]
    write_text(feeds.telemetry, "".join(telemetry_lines))
