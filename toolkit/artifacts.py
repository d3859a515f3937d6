"""Reading and writing artifacts: every file that ddltool makes or takes goes through here.

A document is JSON (or YAML where people write it by hand), UTF-8, and gzip-compressed when its name ends in ``.gz``.
It carries ``kind`` and ``schema_version`` and is checked against a pydantic model on the way in. Writing is atomic: a
temporary file in the same folder, fsync, rename; a killed process leaves the old file or the new one, never half.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import json
import math
import os
import select
import stat
import sys
import tempfile
import time
import tomllib
import zlib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from ddltool import showing
from ddltool.errors import InputError, did_you_mean, shortened
from ddltool.plain_values import RepeatedKey, from_json, from_yaml, json_value
from ddltool.schema_words import UNKNOWN_FIELD, in_words
from ddltool.units import show_bytes

if TYPE_CHECKING:
    import pandas as pd


SCHEMA_VERSION = 1
_THIS_VERSION = Field(ge=SCHEMA_VERSION, le=SCHEMA_VERSION, json_schema_extra={"const": SCHEMA_VERSION})
Version = Annotated[int, Strict(), _THIS_VERSION]
"""The one version, 1. (Literal[1] would accept true, which equals 1.)"""
# Most unpacked bytes of a document in memory, of a file that is read line by line, and of one such line.
LONGEST_TEXT, LONGEST_STREAM, _LONGEST_LINE = 1 << 29, 1 << 33, 1 << 20
# Bytes that are read or written at once.
_READ_AT_ONCE, _WRITTEN_AT_ONCE = 1 << 18, 1 << 16
# Seconds that the other end of a pipe may take for the next bytes.
_PIPE_TIMEOUT_S = 60.0
_STDOUT = ("-", "/dev/stdout")
_STDIN, _GZIP = "-", b"\x1f\x8b"


class Record(BaseModel):
    """A part of a document. Unknown fields are refused, so that a misspelt one is not silently ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Artifact(Record):
    """A whole document. Each subclass has a field ``kind``: a literal, such as ``ddltool.plan``, that is its own default."""

    schema_version: Version = SCHEMA_VERSION

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Self:
        """Return the document in a mapping, which is checked as a file is. Raises InputError naming the wrong field."""
        if not isinstance(document, Mapping):
            raise InputError("document", f"is a {type(document).__name__}", "give a mapping, such as a dict of fields")
        return parse({**document}, cls, kind_of(cls).removeprefix("ddltool."))

    def save(self, path: str | Path) -> None:
        """Write the document atomically as JSON; for a name ending in ``.csv``, the rows of a profile as CSV."""
        if Path(path).name.removesuffix(".gz").endswith(".csv"):
            showing.module().save_table(self, path)
        else:
            save(self, path)

    def to_frame(self) -> pd.DataFrame:
        """Return the document's main table: a profile's rows, a simulation's policies, a plan's assignments."""
        return cast("pd.DataFrame", showing.module().frame(self))

    def chart(self) -> Any:
        """Return the first picture of its report section as an Altair chart. Raises InputError if there is none."""
        return showing.module().chart(self)

    def _repr_html_(self) -> str:
        """Return its section of the report as HTML, which a notebook shows."""
        return str(showing.module().html(self))


A = TypeVar("A", bound=Artifact)
R = TypeVar("R", bound=BaseModel)


@contextlib.contextmanager
def _name_read_errors(path: Path) -> Iterator[None]:
    """Turn an error of the body into an InputError that says what is wrong with the file ``path``.

    The errors: the file is missing, a folder, unreadable, a broken gzip file, or not UTF-8.
    """
    try:
        yield
    except FileNotFoundError:
        raise InputError(str(path), "no such file", "give the path of an existing file") from None
    except IsADirectoryError:
        raise InputError(str(path), "is a folder", "give the path of a file") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(str(path), f"is not a whole gzip file ({error})", "copy or make it again") from None
    except UnicodeDecodeError as error:
        raise InputError(str(path), f"is not UTF-8 text (byte {error.start})", "give a text file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(str(path), f"cannot be read ({reason})", "check the path and its permissions") from None


class _FileWithTimeout(io.FileIO):
    """A file or pipe whose reads raise TimeoutError if nothing is written into the pipe for ``_PIPE_TIMEOUT_S``."""

    def readinto(self, buffer: Any) -> int | None:
        """Read into ``buffer`` and return the number of bytes, 0 at the end of the file."""
        if not select.select([self], [], [], _PIPE_TIMEOUT_S)[0]:
            raise TimeoutError(0, f"nothing was written to this pipe within {_PIPE_TIMEOUT_S:g} s")
        return super().readinto(buffer)


class _BoundedBytes(io.RawIOBase):
    """A file's unpacked bytes, with a limit: reading more than ``max_bytes`` raises InputError."""

    def __init__(self, stream: Any, path: Path, max_bytes: int) -> None:
        """Read from ``stream``, the unpacked bytes of ``path`` (named in the error)."""
        self._stream, self._path, self._max_bytes, self._left = stream, path, max_bytes, max_bytes

    def readable(self) -> bool:
        """Return True: the BufferedReader around this asks."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into ``buffer`` and return the number of bytes. Raises InputError once they exceed the limit in all."""
        count = int(self._stream.readinto1(buffer))
        self._left -= count
        if self._left < 0:
            remedy = "give a smaller file, or check that it is the one you mean"
            raise InputError(str(self._path), f"holds more than {show_bytes(self._max_bytes)}", remedy)
        return count


@contextlib.contextmanager
def opened(path: str | Path, max_bytes: int = LONGEST_STREAM) -> Iterator[io.BufferedReader]:
    """Yield an open file or pipe, from which bytes are read; gzip, told by name or first bytes, is unpacked.

    ``-`` is standard input, which may be opened several times. Raises InputError, also for errors of the ``with`` body,
    if the file is missing, a folder, unreadable, a broken gzip file, longer than ``max_bytes`` unpacked, a pipe without
    data for a minute, or not UTF-8 when the body decodes it.
    """
    path = Path(path)
    if str(path) == _STDIN:
        with _name_read_errors(path):
            data = _all_of_stdin(sys.stdin.buffer)
            stdin: Any = io.BytesIO(data)
            unpacked = gzip.GzipFile(fileobj=stdin) if data[:2] == _GZIP else stdin
            yield io.BufferedReader(_BoundedBytes(unpacked, path, max_bytes), _READ_AT_ONCE)
        return
    with (
        _name_read_errors(path),
        _FileWithTimeout(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as raw,
    ):
        # Opened without blocking, as opening a pipe would wait for its writer; reading does wait, up to the timeout.
        os.set_blocking(raw.fileno(), True)
        buffered = io.BufferedReader(raw)
        is_gzip = path.suffix == ".gz" or buffered.peek(2)[:2] == _GZIP
        stream = gzip.GzipFile(fileobj=buffered) if is_gzip else buffered
        yield io.BufferedReader(_BoundedBytes(stream, path, max_bytes), _READ_AT_ONCE)


@lru_cache(maxsize=1)
def _all_of_stdin(stream: Any) -> bytes:
    """Return all bytes of standard input (``stream``). They are read once and cached, as they cannot be read again.

    Raises InputError for more than ``LONGEST_TEXT`` bytes.
    """
    data: bytes = stream.read(LONGEST_TEXT + 1)
    if len(data) > LONGEST_TEXT:
        raise InputError(_STDIN, f"holds more than {show_bytes(LONGEST_TEXT)}", "give it as a file")
    return data


def read_bytes(path: str | Path, max_bytes: int = LONGEST_TEXT) -> bytes:
    """Return the unpacked bytes of a file. Raises InputError as :func:`opened` does."""
    with opened(path, max_bytes) as file:
        return file.read()


def read_text(path: str | Path) -> str:
    """Return the text of a file, without a byte order mark.

    Raises InputError for a file that is missing, unreadable, too long (``LONGEST_TEXT``), empty or not UTF-8.
    """
    path = Path(path)
    with _name_read_errors(path):
        text = read_bytes(path).decode("utf-8-sig")
    if not text or text.isspace():
        raise InputError(str(path), "is empty", "expected a document with a kind")
    return text


def read_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) for each line of a JSON Lines file; numbers count from 1, blank lines are skipped.

    The file is read as it is iterated: it may be larger than memory. A last line without line end that is no valid JSON
    is dropped, as its writer was killed or still writes. Raises InputError as :func:`read_text` does, and naming the
    line for any other line that is no JSON object, and for a NaN.
    """
    path = Path(path)
    has_rows = False
    with opened(path) as file:
        # readline's limit keeps a file without line ends from filling the memory.
        for line_number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), start=1):
            if not line.strip():
                continue
            where = f"{path}:line {line_number}"
            row, problem = _parse_object(line)
            if row is None:
                # A whole value that is no object was not broken off; nor was a line that readline's limit cut.
                is_broken_off = not line.endswith(b"\n") and len(line) < _LONGEST_LINE
                if has_rows and is_broken_off and problem != _NOT_AN_OBJECT:
                    return
                raise InputError(where, problem, "one JSON object per line")
            has_rows = True
            if b"NaN" in line:
                for name, value in row.items():
                    if isinstance(value, float) and math.isnan(value):  # a table shows a missing value as NaN too
                        raise InputError(f"{where}:{name}", "is NaN", "give a finite number, or null")
            yield line_number, row
    if not has_rows:
        raise InputError(str(path), "is empty", "expected one JSON object per line")


_NOT_AN_OBJECT = "is not an object"


def _parse_object(line: bytes) -> tuple[dict[str, Any] | None, str]:
    """Return (object, "") for a line that is a JSON object, else (None, the problem as text)."""
    try:
        value = json_value(line.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        return None, f"is not JSON ({error.msg})"
    except UnicodeDecodeError:
        return None, "is not UTF-8 text"
    except RepeatedKey as error:
        return None, f"has the key {error.key!r} twice"
    except RecursionError:
        return None, "is nested thousands deep"
    return (value, "") if isinstance(value, dict) else (None, _NOT_AN_OBJECT)


def read_document(path: str | Path) -> dict[str, Any]:
    """Return the mapping in a JSON or YAML (by its name) file. Raises InputError with the line and column of a mistake."""
    path = Path(path)
    read = from_yaml if ending(path) in (".yaml", ".yml") else from_json
    document = read(read_text(path), str(path))
    if not isinstance(document, dict):
        raise InputError(str(path), f"holds a {type(document).__name__}, not a mapping", "expected {kind: ..., ...}")
    return document


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises InputError as :func:`read_text` does, and for text that is not TOML."""
    text = read_text(path)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, or a number of thousands of digits
        reason = str(error).partition(";")[0]  # about such a number, advice for programmers follows the semicolon
        raise InputError(str(path), f"is not valid TOML ({reason})", "mind the quotes and brackets") from None


def ending(path: Path) -> str:
    """Return a file's last suffix other than ``.gz``, in lower case and with its dot; "" if it has none.

    For standard input (``-``), which has no name, the suffix is guessed from the beginning of its text.

    >>> ending(Path("telemetry.JSONL.gz"))
    '.jsonl'
    """
    if str(path) == _STDIN:
        return _ending_of_stdin()
    return next((suffix.lower() for suffix in reversed(path.suffixes) if suffix != ".gz"), "")


def _ending_of_stdin() -> str:
    """Return the suffix for the text of standard input: ``.jsonl``, ``.json``, ``.csv`` or ``.yaml``.

    Text that begins with ``{`` or ``[`` is JSON; it is JSON Lines if the first line ends an object and the next begins
    one. A first line with a comma and no colon is the header of a CSV. All else is YAML.
    """
    with opened(_STDIN, LONGEST_TEXT) as file:
        beginning = file.read(_LONGEST_LINE)
    text = beginning.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    text = "\n".join(line for line in text.splitlines() if not line.startswith("#"))  # YAML's comments
    first, _, rest = text.partition("\n")
    if text[:1] in ("{", "["):
        return ".jsonl" if first.rstrip().endswith("}") and rest.lstrip()[:1] == "{" else ".json"
    return ".csv" if "," in first and ":" not in first else ".yaml"


def kind_of(model: type[BaseModel]) -> str:
    """Return the ``kind`` of a model's documents, such as ``ddltool.plan``."""
    return str(model.model_fields["kind"].default)


def parse(document: dict[str, Any], model: type[A], where: str) -> A:
    """Return ``document`` checked and as a ``model``. Raises InputError as ``WHERE:FIELD: PROBLEM; REMEDY``.

    ``schema_version`` may be absent, and stands for the newest; ``kind`` may be absent only together with it.
    ``where``: the file or other origin of the document.
    """
    wanted = kind_of(model)
    kind = document.get("kind", wanted if "schema_version" not in document else None)
    if "kind" not in document and not {"model_type", "_class_name"}.isdisjoint(document):
        library = "transformers" if "model_type" in document else "diffusers"
        raise InputError(where, "is the configuration of a model", f"write {library}:{where}")
    if kind == "ddltool.command_plan" != wanted:
        problem = "is of a command, whose script trains as it is"
        raise InputError(f"{where}:kind", problem, f"run the command it names, or give a {wanted}")
    if kind != wanted:
        raise InputError(f"{where}:kind", f"is {kind!r}", f"expected {wanted!r}")
    version = document.get("schema_version", SCHEMA_VERSION)
    if type(version) is not int or version != SCHEMA_VERSION:
        raise InputError(f"{where}:schema_version", f"is {version!r}", f"this ddltool reads version {SCHEMA_VERSION}")
    return parse_record({**document, "kind": kind}, model, where)


def parse_record(document: Mapping[str, Any] | str, model: type[R], where: str, inside: str = "") -> R:
    """Return a mapping, or a JSON text, checked and as a ``model``. Raises InputError for its first problem.

    ``where``: the file, for the message. ``inside``: the path of the mapping within the file, such as ``devices[0]``,
    which the message puts before the field.
    """
    try:
        return model.model_validate_json(document) if isinstance(document, str) else model.model_validate(document)
    except ValidationError as error:
        raise _first_validation_error(error, model, where, inside) from None


def load(path: str | Path, model: type[A]) -> A:
    """Return the artifact in a JSON or YAML file. Raises InputError as :func:`read_document` and :func:`parse` do."""
    return parse(read_document(path), model, str(path))


def _first_validation_error(error: ValidationError, model: type[BaseModel], where: str, inside: str = "") -> InputError:
    """Return an InputError for one of pydantic's errors: the first unknown field, else the first error.

    A field's own limits come before the agreement of several fields. Its message says how many more errors there are.
    ``where`` and ``inside``: see :func:`parse_record`.
    """
    # A misspelt field is both unknown and missing; the unknown one is what the reader must mend. Only validators, which
    # compare fields, raise ValueError.
    problem_found = min(
        error.errors(), key=lambda problem: (problem["type"] not in UNKNOWN_FIELD, problem["type"] == "value_error")
    )
    field = inside
    # The path of the field as people write it: devices[0].type.
    for part in problem_found["loc"]:
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else str(part)
    if problem_found["type"] in UNKNOWN_FIELD:
        name = str(problem_found["loc"][-1])
        known = _fields_beside(problem_found["loc"], model)
        return InputError(
            f"{where}:{field}", f"unknown field {name!r}", did_you_mean(name, known) if known else "remove it"
        )
    problem, remedy = in_words(problem_found)
    if error.error_count() > 1 and problem_found["type"] != "missing":
        count_note = f" (and {error.error_count() - 1} more)"
        if remedy:
            remedy += count_note
        else:
            problem += count_note
    return InputError(f"{where}:{field}" if field else where, problem, remedy)


def _fields_beside(location: tuple[int | str, ...], model: type[BaseModel]) -> list[str]:
    """Return the names of the fields that the model has where an unknown field was found; [] where it has none.

    ``location``: the path of the unknown field from the top, such as ("devices", 0, "typ"). The JSON schema is followed
    along it.
    """
    schema: dict[str, Any] = model.model_json_schema()
    schema_node = schema
    for location_part in location[:-1]:
        if isinstance(location_part, int):  # an index into a list
            schema_node = schema_node.get("items", {})
        else:
            schema_node = schema_node.get("properties", {}).get(location_part, {})
        # Of alternatives ("this or null") the first with fields or entries is followed.
        for alternative in schema_node.get("anyOf", [schema_node]):
            if "$ref" in alternative or "items" in alternative or "properties" in alternative:
                schema_node = alternative
                break
        if "$ref" in schema_node:
            schema_node = schema["$defs"][schema_node["$ref"].rsplit("/", 1)[-1]]
    return list(schema_node.get("properties", {}))


def to_json(artifact: BaseModel | dict[str, Any], *, indent: int | None = 1) -> str:
    """Return the document as JSON text in field order, with a final newline. Raises ValueError for NaN and infinities."""
    document = artifact.model_dump(mode="json") if isinstance(artifact, BaseModel) else artifact
    return json.dumps(document, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"


def to_yaml(artifact: Artifact) -> str:
    """Return an artifact as YAML text with its ``kind`` and the fields that differ from their defaults, in schema order."""
    import yaml  # most commands write JSON alone

    document = artifact.model_dump(mode="json", exclude_defaults=True)
    return str(yaml.safe_dump({"kind": kind_of(type(artifact)), **document}, sort_keys=False, allow_unicode=True))


def save(artifact: BaseModel | dict[str, Any], path: str | Path) -> None:
    """Write an artifact atomically as JSON (:func:`write_bytes`). Raises InputError if ``path`` cannot be written."""
    write_text(path, to_json(artifact))


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` atomically as UTF-8 (:func:`write_bytes`), gzip-compressed if the name ends in ``.gz``.

    The gzip file has no time stamp, so that the same text gives the same bytes.
    """
    data = text.encode("utf-8")
    write_bytes(path, gzip.compress(data, mtime=0) if Path(path).suffix == ".gz" else data)


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write ``data`` atomically: into a temporary file in the folder of ``path``, which is synced to disk and renamed.

    ``-`` is standard output. Into a pipe or a device the bytes are written directly (:func:`opened_stream`). Raises
    InputError if ``path`` cannot be written.
    """
    if str(path) in _STDOUT:
        sys.stdout.buffer.write(data)
        return
    path = Path(path)
    with _name_write_errors(path):
        mode = path.stat().st_mode if path.exists() else None
        if mode is not None and not stat.S_ISREG(mode):
            _fill_stream(path, data)
            return
        target = _resolved(path)
        # In the same folder, as a rename is atomic only within one file system.
        handle = tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False)  # noqa: SIM115
        _fill_and_rename(handle, data, target, mode)


def _resolved(path: Path) -> Path:
    """Return the file that ``path`` leads to. Raises OSError (RuntimeError before 3.13) for a circle of links."""
    target = path.resolve()
    if target.is_symlink():  # since Python 3.13 a circle is left as it is
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return target


def append_text(path: str | Path, text: str) -> None:
    """Append ``text`` to a file, or write it into a pipe or a device. Raises InputError if it cannot be written."""
    path = Path(path)
    with _name_write_errors(path):
        if is_stream(path):
            _fill_stream(path, text.encode())
        else:
            with path.open("a", encoding="utf-8") as file:
                file.write(text)


def opened_stream(path: Path) -> int:
    """Open a pipe or a character device for writing, and return its descriptor, whose writes do not block.

    Waits up to a minute for a reader of the pipe, then raises TimeoutError. Raises InputError for a folder, a disk or a
    socket.
    """
    check_writable(path)
    deadline_s = time.monotonic() + _PIPE_TIMEOUT_S
    while True:
        try:
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENXIO:  # ENXIO: nobody reads the pipe yet
                raise
            if time.monotonic() > deadline_s:
                raise TimeoutError(0, f"nobody read from this pipe within {_PIPE_TIMEOUT_S:g} s") from None
        time.sleep(min(0.05, _PIPE_TIMEOUT_S))


def _fill_stream(path: Path, data: bytes) -> None:
    """Write all of ``data`` into a pipe or a device. Raises TimeoutError if its reader takes nothing for a minute."""
    descriptor, rest = opened_stream(path), memoryview(data)
    try:
        while rest:
            if not select.select([], [descriptor], [], _PIPE_TIMEOUT_S)[1]:
                raise TimeoutError(0, f"nobody read from this pipe within {_PIPE_TIMEOUT_S:g} s")
            rest = rest[os.write(descriptor, rest[:_WRITTEN_AT_ONCE]) :]
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _name_write_errors(path: Path) -> Iterator[None]:
    """Turn an error of the body, which writes to ``path``, into an InputError with the system's reason."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links; ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(str(path), f"cannot be written ({reason})", "give a file in a writable folder") from None


def _fill_and_rename(handle: IO[bytes], data: bytes, target: Path, mode: int | None) -> None:
    """Write ``data`` into the temporary file ``handle`` and rename it to ``target``; on any failure delete it.

    ``mode``: the permissions of the file that is replaced; None: there is none, and the umask's permissions are given.
    """
    try:
        with handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        os.chmod(handle.name, stat.S_IMODE(mode) if mode is not None else 0o666 & ~_read_umask())
        os.replace(handle.name, target)
    except BaseException:  # Ctrl-C too
        with contextlib.suppress(OSError):
            os.unlink(handle.name)
        raise


def _read_umask() -> int:
    """Return the process's umask."""
    mask = os.umask(0o022)  # it can be read only by setting it
    os.umask(mask)
    return mask


def is_stream(path: str | Path) -> bool:
    """Return whether ``path`` is standard output, a pipe or a device, into which bytes are written directly."""
    return str(path) in _STDOUT or (Path(path).exists() and not Path(path).is_file())


def check_writable(path: str | Path) -> None:
    """Raise InputError if ``path`` cannot be written; called before long work, whose result would be lost."""
    if str(path) in _STDOUT:
        return
    path = Path(path)
    with _name_write_errors(path):
        folder = _resolved(path).parent
        if path.is_dir() or path.is_block_device() or path.is_socket():
            what = "a folder" if path.is_dir() else "a disk" if path.is_block_device() else "a socket"
            raise InputError(str(path), f"is {what}", "give a file name")
        if not folder.is_dir():
            raise InputError(str(path), f"cannot be written (no folder {folder})", "make the folder first")
        if not path.exists() or path.is_file():  # a pipe or a device needs no temporary file
            # A file is really made there, as permissions do not tell whether the disk is read-only.
            tempfile.TemporaryFile(dir=folder).close()


def demand_file(path: str | Path) -> None:
    """Raise InputError if ``path`` is a folder, a pipe or a device; a file, or nothing, passes."""
    path = Path(path)
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a pipe or a device"
        raise InputError(str(path), f"is {what}", "give a file name")


_LONGEST_NAME = 160


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents. Raises InputError if it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(str(path), f"cannot be made ({error.strerror})", "give a folder in a writable place") from None


def check_outputs(inputs: Iterable[str | Path | None], outputs: Mapping[str, str | Path | None]) -> None:
    """Raise InputError if an output is also an input, is written by two options, or cannot be written.

    ``outputs``: the path by option. None and ``-`` (the standard streams) are not checked. Paths are the same if they
    are the same file, whatever their spelling or links; pipes and devices may be used twice.
    """
    input_paths = [Path(path) for path in inputs if path is not None and str(path) != "-"]
    path_by_option: dict[str, Path] = {}
    for option, output in outputs.items():
        if output is None or str(output) == "-":
            continue
        path = Path(output)
        quoted = shortened(str(path), _LONGEST_NAME)
        if any(_is_same_file(path, path_before) for path_before in input_paths):
            raise InputError(option, f"{quoted} is one of the inputs", "give another file")
        # Two options that write one file: the later would overwrite the earlier.
        earlier_option = next(
            (name for name, path_before in path_by_option.items() if _is_same_file(path, path_before)), None
        )
        if earlier_option is not None:
            raise InputError(option, f"{quoted} is written by {earlier_option} too", "give another file")
        check_writable(path)
        path_by_option[option] = path


def demand_once(paths: Iterable[Path], remedy: str) -> None:
    """Raise InputError if two of the paths are the same file. ``remedy``: the end of the error's line."""
    seen: set[str] = set()
    for path in paths:
        if (real_path := os.path.realpath(path)) in seen:
            raise InputError(str(path), "is given twice", remedy)
        seen.add(real_path)


def _is_same_file(path: Path, other_path: Path) -> bool:
    """Return whether two paths are the same file; False for two pipes or devices.

    Also False if one cannot be examined: reading or writing it then raises the error.
    """
    try:
        if path.exists() and other_path.exists():
            return path.is_file() and os.path.samefile(path, other_path)
        return path.resolve() == other_path.resolve()
    except (OSError, RuntimeError, ValueError):
        return False
