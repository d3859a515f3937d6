"""A scratch folder over the disk: what a script writes goes there, what it reads comes from there first.

Only what Python opens is redirected, for as long as the process lives, and no cache of a library; ``torch.save`` writes
nothing.
"""

from __future__ import annotations

import builtins
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

_DEVICES = ("/dev/", "/proc/", "/sys/")
# Folders of libraries' caches, which they read by other means too: what they write there stays.
_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "HF_DATASETS_CACHE", "TORCH_HOME")


class Overlay:
    """Paths below ``scratch`` that stand for those of the disk: ``/data/log`` becomes ``scratch/data/log``."""

    def __init__(self, scratch: Path) -> None:
        """Begin with a scratch folder.

        Devices, the folder around the scratch folder (the recording's own) and libraries' caches are not redirected.
        """
        self.scratch = str(scratch)
        caches = [os.environ[name] for name in _CACHES if os.environ.get(name)] + ["~/.cache"]
        cache_paths = [os.path.abspath(os.path.expanduser(folder)) for folder in caches]
        self._not_redirected = (str(scratch.parent), *_DEVICES, *cache_paths)
        """Beginnings of paths that are left alone."""

    def path_to_write(self, path: Any) -> Any:
        """Return the path below the scratch folder to write to in place of ``path``, and make the folders above it.

        A path that :meth:`is_left_alone` is returned unchanged, the same object.
        """
        placed = self._path_in_scratch(path)
        if placed != path:
            _makedirs(os.path.dirname(placed), exist_ok=True)
        return placed

    def path_to_read(self, path: Any) -> Any:
        """Return the path in the scratch folder where something was written there, else the path itself."""
        placed = self._path_in_scratch(path)
        return placed if placed != path and _lexists(placed) else path

    def is_left_alone(self, path: Any) -> bool:
        """Return whether a path is not redirected: an open file's number, a device, a cache, the recording's own folder."""
        return isinstance(path, int) or os.path.abspath(os.fsdecode(path)).startswith(self._not_redirected)

    def _path_in_scratch(self, path: Any) -> Any:
        """Return a path's place below the scratch folder, or the path itself where it is not redirected."""
        return path if self.is_left_alone(path) else self.scratch + os.path.abspath(os.fsdecode(path))


# The functions as they are before they are redirected: the overlay itself works on the disk.
_makedirs, _lexists = os.makedirs, os.path.lexists
_FILE_EXISTS = 17
"""The operating system's number for "File exists" (EEXIST)."""


def overlay(scratch: Path) -> None:
    """Redirect the files that this process writes from now on to a folder; what lies in the folder is read from there.

    Functions of ``builtins``, ``io``, ``os`` and torch are replaced for good. A file of the disk that is opened to be
    changed is copied to the folder first, and the disk's stays as it is. ``torch.save`` writes nothing, since tensors
    have no values here.
    """
    import torch

    overlaid = Overlay(scratch)
    real_open, real_os_open = builtins.open, os.open

    def open_redirected(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file as ``open`` does: in the scratch folder for writing, and for reading where it was written there."""
        writes = any(letter in mode for letter in "wax+")
        if not writes:
            return real_open(overlaid.path_to_read(file), mode, *args, **kwargs)
        target = overlaid.path_to_write(file)
        keeps_content = "w" not in mode and "x" not in mode  # the file is appended to, or changed in place
        if target != file and keeps_content and not _lexists(target) and os.path.isfile(file):
            with real_open(file, "rb") as source, real_open(target, "wb") as copy:
                copy.write(source.read())
        return real_open(target, mode, *args, **kwargs)

    def os_open_redirected(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        """Open a file as ``os.open`` does, in the scratch folder where the flags ask to write."""
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        redirected = overlaid.path_to_write(path) if writes else overlaid.path_to_read(path)
        return real_os_open(redirected, flags, *args, **kwargs)

    builtins.open = io.open = open_redirected
    os.open = os_open_redirected
    for name in ("mkdir", "remove", "unlink", "rmdir", "symlink", "chmod", "utime", "truncate"):
        _redirect(name, overlaid, changes_existing=name != "mkdir")
    for name in ("stat", "lstat", "statvfs", "listdir", "scandir", "access"):
        setattr(os, name, _reader_from_scratch(getattr(os, name), overlaid))
    for name in ("rename", "replace"):
        setattr(os, name, _mover_in_scratch(getattr(os, name), overlaid))
    torch.save = lambda *_, **__: None


def _redirect(name: str, overlaid: Overlay, changes_existing: bool) -> None:
    """Replace ``os.<name>``, which makes or changes the file or folder at a path, by one that works in the scratch folder.

    ``changes_existing``: whether the function changes what is at the path, as ``os.remove`` does; ``os.mkdir`` makes it.
    """
    real = getattr(os, name)

    def run_redirected(path: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``os.<name>`` at the path's place in the scratch folder; a path that is not redirected is changed on the disk.

        A call to change what the scratch folder does not have is ignored: it does nothing and raises nothing, so that the
        disk stays as it is and the script goes on. Raises FileExistsError for a folder to be made that is there already.
        """
        target = overlaid.path_to_write(path)
        if target is path:  # not redirected
            return real(path, *args, **kwargs)
        if changes_existing and not _lexists(target):  # at most the disk has it
            return None
        if name == "mkdir" and os.path.isdir(path):
            raise FileExistsError(_FILE_EXISTS, "File exists", os.fspath(path))
        return real(target, *args, **kwargs)

    setattr(os, name, run_redirected)


def _reader_from_scratch(real: Callable[..., Any], overlaid: Overlay) -> Callable[..., Any]:
    """Return the function ``real`` of ``os``, which reads at a path, as one that looks first in the scratch folder."""

    def run_on_newest(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        """Read the path in the scratch folder where it was written there, else on the disk."""
        if kwargs.get("dir_fd") is not None:  # the path is relative to an open folder
            return real(path, *args, **kwargs)
        return real(overlaid.path_to_read(path), *args, **kwargs)

    return run_on_newest


def _mover_in_scratch(real: Callable[..., Any], overlaid: Overlay) -> Callable[..., Any]:
    """Return the function ``real`` of ``os`` (``rename``, ``replace``) as one that moves within the scratch folder."""

    def move_in_scratch(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Move a file within the scratch folder; a file that only the disk has is not moved, and no error is raised.

        A path that is not redirected is moved on the disk.
        """
        if overlaid.is_left_alone(source):
            return real(source, target, *args, **kwargs)
        newest = overlaid.path_to_read(source)
        if newest is source:  # the scratch folder does not have it
            return None
        return real(newest, overlaid.path_to_write(target), *args, **kwargs)

    return move_in_scratch
