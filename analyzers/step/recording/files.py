"""A folder over the disk: what a script writes goes there, what it reads comes from there first.

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
    """Paths below ``scratch`` that stand for those of the disk."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = str(scratch)
        caches = [os.environ[name] for name in _CACHES if os.environ.get(name)] + ["~/.cache"]
        self._own = (str(scratch.parent), *_DEVICES, *(os.path.abspath(os.path.expanduser(each)) for each in caches))

    def written(self, path: Any) -> Any:
        """Return where a path is written to; its folders are made."""
        placed = self._place(path)
        if placed != path:
            _makedirs(os.path.dirname(placed), exist_ok=True)
        return placed

    def read(self, path: Any) -> Any:
        """Return the scratch folder's path where it has one, else the path itself."""
        placed = self._place(path)
        return placed if placed != path and _lexists(placed) else path

    def owns(self, path: Any) -> bool:
        """Return whether a path is left as it is: devices, open files, and this package's own folder."""
        return isinstance(path, int) or os.path.abspath(os.fsdecode(path)).startswith(self._own)

    def _place(self, path: Any) -> Any:
        return path if self.owns(path) else self.scratch + os.path.abspath(os.fsdecode(path))


_makedirs, _lexists = os.makedirs, os.path.lexists


def overlay(scratch: Path) -> None:
    """Redirect what this process writes from now on to a folder, from which it then reads it; other files stay as they are.

    A file that is changed in place is copied there first. ``torch.save`` writes nothing: tensors have no values here.
    """
    import torch

    over = Overlay(scratch)
    real_open, real_os_open = builtins.open, os.open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not any(letter in mode for letter in "wax+"):
            return real_open(over.read(file), mode, *args, **kwargs)
        target = over.written(file)
        if target != file and "w" not in mode and "x" not in mode and not _lexists(target) and os.path.isfile(file):
            with real_open(file, "rb") as source, real_open(target, "wb") as copy:
                copy.write(source.read())  # it is appended to, or changed
        return real_open(target, mode, *args, **kwargs)

    def os_opened(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        return real_os_open(over.written(path) if writes else over.read(path), flags, *args, **kwargs)

    builtins.open = io.open = opened
    os.open = os_opened
    for name in ("mkdir", "remove", "unlink", "rmdir", "symlink", "chmod", "utime", "truncate"):
        _redirect(name, over, existing=name != "mkdir")
    for name in ("stat", "lstat", "statvfs", "listdir", "scandir", "access"):
        setattr(os, name, _reading(getattr(os, name), over))
    for name in ("rename", "replace"):
        setattr(os, name, _moving(getattr(os, name), over))
    torch.save = lambda *_, **__: None


def _redirect(name: str, over: Overlay, existing: bool) -> None:
    real = getattr(os, name)

    def run(path: Any, *args: Any, **kwargs: Any) -> Any:
        target = over.written(path)
        if target is path:
            return real(path, *args, **kwargs)
        if existing and not _lexists(target):
            return None  # what the disk holds stays there
        if name == "mkdir" and os.path.isdir(path):
            raise FileExistsError(17, "File exists", os.fspath(path))
        return real(target, *args, **kwargs)

    setattr(os, name, run)


def _reading(real: Callable[..., Any], over: Overlay) -> Callable[..., Any]:
    def run(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir_fd") is not None:
            return real(path, *args, **kwargs)
        return real(over.read(path), *args, **kwargs)

    return run


def _moving(real: Callable[..., Any], over: Overlay) -> Callable[..., Any]:
    def run(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if over.owns(source):
            return real(source, target, *args, **kwargs)
        moved = over.read(source)
        return real(moved, over.written(target), *args, **kwargs) if moved is not source else None

    return run
