"""JSON Lines files to which the processes of a job append. Start at :class:`LineFile`."""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ddltool.artifacts import check_writable, is_stream, opened_stream
from ddltool.errors import InputError

WRITE_BYTES = 4096
"""Whole lines up to this size go out in one write: appends of several processes to one file then never mix."""
LONGEST_ROW = 1 << 20
"""Bytes at the end of a file that are searched for its last line."""
WRITABLE = "name a file in a writable folder, or null for none"

log = logging.getLogger(__name__)


def new_run() -> str:
    """Return a new name for a run: the UTC time and five random hexadecimal digits, such as ``20250131-120000-a1b2c``."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)[:5]}"


def whole_lines(lines: list[str], limit: int = WRITE_BYTES) -> Iterator[bytes]:
    r"""Yield the lines, joined into UTF-8 blocks of at most ``limit`` bytes; a longer line is a block of its own.

    >>> list(whole_lines(["ab", "cd", "ef"], limit=6))
    [b'ab\ncd\n', b'ef\n']
    """
    block = b""
    for line in lines:
        data = line.encode() + b"\n"
        if block and len(block) + len(data) > limit:
            yield block
            block = b""
        block += data
    if block:
        yield block


def prepare(path: Path, kind: str, what: str) -> None:
    """Prepare ``path`` for appending rows of ``kind``: cut off a partial last line, which a killed run may leave.

    Call it before any process writes. A missing file or one that is not a regular file (a pipe) is left alone. Raises
    InputError if the file cannot be written, or if its first line does not name ``kind``; ``what`` says in the message
    what the file should hold.
    """
    check_writable(path)
    if not path.exists() or not stat.S_ISREG(path.stat().st_mode):
        return
    try:
        with path.open("r+b") as file:
            first_bytes = file.read(WRITE_BYTES)
            if first_bytes.strip() and kind.encode() not in first_bytes.splitlines()[0]:
                raise InputError(str(path), f"holds something other than {what}", "move it or name another file")
            _end_last_line(file)
    except OSError as error:
        raise InputError(str(path), f"cannot be written ({error.strerror})", WRITABLE) from None


def _end_last_line(file: IO[bytes]) -> None:
    """Make the file end with a whole line: cut off a last line that is not valid JSON, or add a missing newline.

    A last line longer than :data:`LONGEST_ROW` is left as it is.
    """
    size = file.seek(0, os.SEEK_END)
    begin = file.seek(max(0, size - LONGEST_ROW))
    _, _, after_last_newline = file.read().rpartition(b"\n")
    if not after_last_newline:
        return
    if begin and len(after_last_newline) == LONGEST_ROW:
        return  # the line began before what was read
    try:
        json.loads(after_last_newline)
        file.write(b"\n")
    except ValueError:
        file.truncate(size - len(after_last_newline))


class LineFile:
    """Appends whole lines to a JSON Lines file of ``kind``, in the process that has opened it.

    Existing lines stay. When writing fails, one warning is logged and training goes on without the file. Without a
    ``path`` nothing is open, and lines are dropped. Appends of several processes do not mix on a local file system;
    over NFS give each node its own working folder. Raises InputError when the file cannot be written or holds something
    else.
    """

    def __init__(self, path: Path | None = None, kind: str = "", what: str = "") -> None:
        """Open the file for appending; ``kind``: the artifact kind that its rows carry; ``what``: their name in messages."""
        self._path = path
        self._what = what
        self._process = os.getpid()
        self._descriptor: int | None = None
        if path is None:
            return
        prepare(path, kind, what)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = opened_stream(path) if is_stream(path) else os.open(path, flags, 0o666)
        except OSError as error:
            raise InputError(str(path), f"cannot be written ({error.strerror})", WRITABLE) from None

    @property
    def is_open(self) -> bool:
        """Whether there is a file and this process may write to it; a forked data worker inherits it and may not."""
        return self._descriptor is not None and os.getpid() == self._process

    def write(self, lines: list[str]) -> None:
        """Write lines at once, so that none is lost if the process is killed; a failure closes the file, with a warning."""
        if self._descriptor is None:
            return
        try:
            for block in whole_lines(lines):
                if os.write(self._descriptor, block) != len(block):  # a short write: the disk is full
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            log.warning("%s: %s stops, training goes on (%s)", self._path, self._what, error.strerror)
            self.close()

    def close(self) -> None:
        """Close the file; more calls do nothing."""
        descriptor = self._descriptor
        self._descriptor = None
        if descriptor is not None:
            os.close(descriptor)
