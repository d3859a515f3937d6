"""``ddltool profile --import FILE...``: measurements of others as one native profile.csv."""

from __future__ import annotations

import csv
import gzip
import io
import json
import warnings
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


_MAY_BE_MISSING = {"memory_bytes": 0.0, "passes": 1.0}


@dataclass(frozen=True, kw_only=True)
class ImportedFile:
    """What one file gave."""

    path: str
    kind: str
    """profile, placements, scalability, telemetry or trace."""
    rows: int
    """Rows of the file, or steps of a trace."""


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
    """Read the files, write one profile when ``output`` is given, and print.

    ``device`` names the device of all rows; the three numbers are what a profiler trace does not always say.
    """
    from ddltool.artifacts import check_writable
    from ddltool.commands.output import print_json
    from ddltool.profile import write_profile

    if output is not None:
        check_writable(output)
    frame, sources = import_files(
        files, device=device, batch_size=batch_size, num_nodes=num_nodes, num_replicas=num_replicas
    )
    if output is not None:
        write_profile(frame, output)
    if as_json:
        print_json(import_document(frame, sources))
    else:
        show_import(frame, sources, output)


def import_files(
    files: Sequence[Path],
    *,
    device: str | None = None,
    batch_size: int | None = None,
    num_nodes: int | None = None,
    num_replicas: int | None = None,
    unnamed: str = "",
) -> tuple[pd.DataFrame, list[ImportedFile]]:
    """Return the rows of all files, in their order, and what each gave. Nothing is returned when one of them is bad.

    ``device`` names the device of all rows, ``unnamed`` that of rows that name none.
    Raises InputError naming file, row and column; also for a file given twice.
    """
    import pandas as pd

    from ddltool.errors import InputError

    if not files:
        raise InputError("--import", "names no file", "give a placements.csv, telemetry.jsonl, trace or profile.csv")
    seen: set[Path] = set()
    parts, sources = [], []
    for path in files:
        if path.resolve() in seen:
            raise InputError(str(path), "is given twice", "its rows would count double")
        seen.add(path.resolve())
        part, source = _import_one(path, device, batch_size, num_nodes, num_replicas, unnamed)
        parts.append(part)
        sources.append(source)
    # The tables say these of each row.
    given = {"--batch-sizes": batch_size, "--nodes": num_nodes, "--replicas": num_replicas}
    named = [name for name, value in given.items() if value is not None]
    if named and all(source.kind != "trace" for source in sources):
        raise InputError(named[0], f"has no part in the import of {sources[0].path}", "it is for a profiler trace")
    return pd.concat(parts, ignore_index=True), sources


def _import_one(
    path: Path,
    device: str | None,
    batch_size: int | None,
    num_nodes: int | None,
    num_replicas: int | None,
    unnamed: str,
) -> tuple[pd.DataFrame, ImportedFile]:
    from ddltool.analyzers.goodput.observations import import_steps, import_table, kind_of
    from ddltool.errors import InputError

    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    last = suffixes[-1].lower() if suffixes else ""
    if last == ".json":
        from ddltool.analyzers.oracle.kineto import read_steps

        steps = read_steps(path)
        rows = import_steps(
            steps,
            local_batch_size=batch_size,
            num_nodes=num_nodes,
            num_replicas=num_replicas,
            device=device or steps.device or unnamed or None,
        )
        return rows, ImportedFile(path=str(path), kind="trace", rows=len(steps.step_time_s))
    if last in (".jsonl", ".ndjson"):
        frame = read_telemetry(path)
    elif last == ".csv":
        frame = read_csv(path)
    else:
        raise InputError(str(path), f"ends in {last or 'nothing'}", "give a .csv, .jsonl or .json file (or .gz of one)")
    kind = kind_of([str(name) for name in frame.columns], str(path))
    if unnamed and "device" in frame.columns:
        frame["device"] = frame["device"].fillna("").astype(str).str.strip().replace("", unnamed)
    elif unnamed:
        device = device or unnamed
    return import_table(frame, str(path), device), ImportedFile(path=str(path), kind=kind, rows=len(frame))


def read_csv(path: Path) -> pd.DataFrame:
    """Return a CSV table, its columns checked. Raises InputError for a table that is empty, ragged, or names a column twice."""
    import pandas as pd

    from ddltool.analyzers.goodput.observations import kind_of
    from ddltool.artifacts import read_text
    from ddltool.profile import not_csv

    text = read_text(path)
    try:
        header = [name.strip() for name in next(csv.reader(io.StringIO(text), skipinitialspace=True), [])]
    except csv.Error:
        raise not_csv(text, path) from None
    kind_of(header, str(path))  # pandas would rename a column that occurs twice
    missing = {name: [""] if name == "device" else ["", "nan", "NaN", "NA"] for name in header}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # rows longer than the header
            return pd.read_csv(
                io.StringIO(text),
                skipinitialspace=True,
                header=0,
                names=header,
                index_col=False,
                dtype={name: str for name in ("placement", "device") if name in header},
                float_precision="round_trip",
                keep_default_na=False,
                na_values=missing,
                low_memory=False,
            )
    except (pd.errors.ParserError, pd.errors.EmptyDataError, pd.errors.ParserWarning):
        raise not_csv(text, path) from None


def read_telemetry(path: Path) -> pd.DataFrame:
    """Return the numbers of a telemetry file, read line by line: about 300 bytes of memory per row.

    A last line without its end is dropped: that is a writer that was killed. Raises InputError naming the line.
    """
    import numpy as np
    import pandas as pd

    from ddltool.analyzers.goodput.observations import TELEMETRY_NUMBERS
    from ddltool.errors import InputError
    from ddltool.telemetry import TelemetryRow

    columns = {name: array("d") for name in TELEMETRY_NUMBERS}
    devices: dict[str, int] = {}
    codes = array("i")
    for number, line, whole in _lines(path):
        where = f"{path}:line {number}"
        try:
            row = json.loads(line, object_pairs_hook=_once)
        except json.JSONDecodeError as error:
            if not whole and codes:
                break
            raise InputError(where, f"is not JSON ({error.msg})", "one JSON object per line") from None
        except (ValueError, RecursionError) as error:
            raise InputError(where, str(error)[:200], "one JSON object per line, each key once") from None
        if not isinstance(row, dict) or row.get("kind", TelemetryRow.KIND) != TelemetryRow.KIND:
            found = row.get("kind") if isinstance(row, dict) else type(row).__name__
            raise InputError(where, f"is {found!r}", f"every line is a {TelemetryRow.KIND} object")
        for name, column in columns.items():
            column.append(_number(row, name, where))
        codes.append(devices.setdefault(str(row.get("device", "")), len(devices)))
    if not codes:
        raise InputError(str(path), "is empty", "expected telemetry, one JSON object per line")
    names = np.array(list(devices), dtype=object)[np.frombuffer(codes, dtype=np.int32)]
    return pd.DataFrame({**{name: pd.Series(column) for name, column in columns.items()}, "device": names})


def _lines(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield number, text and whether it is whole, of every line that is not blank."""
    from ddltool.errors import InputError

    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, raw in enumerate(_bounded(file), start=1):
                text = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield number, text, text.endswith("\n")
    except FileNotFoundError:
        raise InputError(str(path), "no such file", "give the path of an existing file") from None
    except UnicodeDecodeError:
        raise InputError(str(path), "is not UTF-8 text", "give a text file") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(str(path), f"is not a whole gzip file ({error})", "copy or make it again") from None
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror})", "check the path") from None


def _bounded(file: Any) -> Iterable[bytes]:
    """Yield lines of at most a mebibyte, so that a file that is something else cannot fill the memory."""
    return iter(lambda: file.readline(1 << 20), b"")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"has the key {twice!r} twice")
    return made


def _number(row: dict[str, Any], name: str, where: str) -> float:
    """Return a field as a float; files of earlier versions lack some. Raises InputError for what is no number >= 0."""
    from ddltool.errors import InputError

    value = row.get(name, _MAY_BE_MISSING.get(name))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = float("inf")
        if 0 <= number < float("inf"):
            return number
    problem = "is missing" if value is None else f"is {str(value)[:40]}"
    raise InputError(f"{where}:{name}", problem, "it must be a finite number >= 0")


def import_document(frame: pd.DataFrame, sources: Sequence[ImportedFile]) -> dict[str, Any]:
    """Return the JSON document of an import."""
    from dataclasses import asdict

    rows = json.loads(frame.to_json(orient="records", double_precision=15))
    return {"kind": "ddltool.profile", "schema_version": 1, "rows": rows, "sources": [asdict(s) for s in sources]}


def show_import(frame: pd.DataFrame, sources: Sequence[ImportedFile], output: Path | None) -> None:
    """Print what each file gave and what the profile covers."""
    from ddltool.commands.output import out, table

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
    if output is not None:
        console.print(f"wrote {output}", soft_wrap=True)
