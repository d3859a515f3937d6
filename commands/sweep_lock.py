"""One sweep per output file: two that write the same one would each throw away what the other has replayed."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddltool.errors import InputError
from ddltool.file_lock import try_lock


@contextmanager
def sole_writer(output: Path | None) -> Iterator[None]:
    """Hold the lock of ``output`` (a side file beside it, gone afterwards) and clear up after writers that were killed.

    None, ``-``, pipes and devices are written without a lock. The lock ends with the process, however that ends. Raises
    InputError when another sweep holds it.
    """
    if output is None or str(output) == "-" or (output.exists() and not output.is_file()):
        yield
        return
    target = output.resolve()
    side = target.with_name(f".{target.name}.lock")
    descriptor = _take(side, output)
    try:
        _remove_leftovers(target)
        yield
    finally:
        # Removed while it is still held: who waits for it would see that the file it has locked is gone, and try again.
        with suppress(OSError):
            side.unlink()
        os.close(descriptor)


def _take(side: Path, output: Path) -> int:
    """Return the descriptor of the locked side file."""
    while True:
        try:
            descriptor = os.open(side, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        except OSError as error:
            raise _unlockable(output, side, error) from None
        try:
            locked = try_lock(descriptor)
        except OSError as error:
            os.close(descriptor)
            with suppress(OSError):
                side.unlink()
            raise _unlockable(output, side, error) from None
        if not locked:
            os.close(descriptor)
            raise InputError("-o", f"another sweep is writing {output}", "wait until it ends, or give another file")
        # Between opening and locking, its last holder may have removed the file (and a third made a new one): then what is
        # locked here keeps nobody out, and the next round opens the name anew.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(side)):
                return descriptor
        os.close(descriptor)


def _unlockable(output: Path, side: Path, error: OSError) -> InputError:
    problem = f"cannot be locked ({error.strerror}: {side})"
    return InputError(str(output), problem, "give a file in a writable folder")


def _remove_leftovers(target: Path) -> None:
    """Remove the temporary files of killed writers of ``target``: named and permitted as tempfile makes them, and ours."""
    name = re.compile(re.escape(f".{target.name}.") + r"[a-z0-9_]{8}")
    for path in target.parent.iterdir():
        if name.fullmatch(path.name):
            with suppress(OSError):
                found = path.lstat()
                private = stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o600
                if private and found.st_uid == os.getuid():
                    path.unlink()
