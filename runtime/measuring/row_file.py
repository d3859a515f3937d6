"""The file that a measurement fills as it goes, and continues later. Start at :class:`RowFile`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from ddltool.artifacts import check_writable
from ddltool.errors import InputError
from ddltool.profile import read_profile, write_profile

if TYPE_CHECKING:
    import pandas as pd

_SETTINGS = {"device", "threads", "warmup", "seed", "torch"}  # as measure_request.settings_of writes them
_KEY = ["num_replicas", "accumulation_steps", "local_batch_size"]


def source_name(source: str) -> str:
    """Return what the ``source`` column says: SOURCE, with a digest of the file where it names one.

    A model that was edited since is another model.
    """
    location, colon, _ = source.rpartition(":")
    path = Path(location)
    if not colon or not location.endswith(".py") or not path.is_file():
        return source
    return f"{source}#{hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"


class RowFile:
    """A profile.csv that is rewritten (atomically) whenever a row comes; a killed process loses no row that was written."""

    def __init__(self, path: Path | None, *, resume: bool, device: str, source: str, settings: str) -> None:
        """Read what is there when ``resume``. Raises InputError when it was measured from something else, or otherwise."""
        self.path = path
        self.known: pd.DataFrame | None = None
        self.written = 0
        self._streams = path is not None and (str(path) == "-" or (path.exists() and not path.is_file()))
        if path is None:
            if resume:
                raise InputError("--resume", "has no file to go on with", "name it with -o FILE")
            return
        check_writable(path)
        if resume and not self._streams and path.exists():
            self.known = self._read(path, {"device": device, "source": source, "settings": settings})

    def write(self, frame: pd.DataFrame) -> None:
        """Write all rows; standard output and pipes get them at the end (:meth:`close`)."""
        if self.path is not None and not self._streams:
            write_profile(frame, self.path)
            self.written = len(frame)

    def close(self, frame: pd.DataFrame) -> None:
        """Write all rows for good."""
        if self.path is not None:
            write_profile(frame, self.path)

    @staticmethod
    def _read(path: Path, expected: dict[str, str]) -> pd.DataFrame:
        frame = read_profile(path)
        for name, now in expected.items():
            if name not in frame.columns:
                raise InputError(str(path), f"has no column {name!r}", "only what ddltool profile wrote can be resumed")
            for row, value in enumerate(frame[name].astype(str).tolist(), start=1):
                if value != now:
                    then, here = _difference(value, now)
                    remedy = f"measure alike{_options(name, then)}, or write another file"
                    raise InputError(f"{path}:row {row}:{name}", f"is {then}, not {here}", remedy)
        frame["accumulation_steps"] = frame["accumulation_steps"].fillna(0).astype("int64")
        twice = frame.duplicated(_KEY).to_numpy().nonzero()[0]
        if twice.size:
            raise InputError(f"{path}:row {twice[0] + 1}", "repeats an earlier configuration", "remove one of the rows")
        return frame.drop(columns="schema_version", errors="ignore")  # every writing sets it anew


def threads_of(path: Path) -> int:
    """Return the threads per process with which the rows of ``path`` were measured, 0 where the file says nothing of it.

    What is wrong with the file is for :class:`RowFile` to say.
    """
    try:
        settings = read_profile(path)["settings"].astype(str)
    except (InputError, KeyError):
        return 0
    found = settings.str.extract(r"(?:^|;)threads=([1-9]\d{0,8})(?:;|$)")[0].dropna()
    return int(found.iloc[0]) if len(found) else 0


def _options(column: str, then: str) -> str:
    """Return in brackets the options that make a measurement like the one that filled ``column`` with ``then``."""
    if column == "device":
        return " (--device, --device-name)"
    if column != "settings":
        return ""
    settings = dict(part.split("=", 1) for part in then.split(";") if "=" in part)
    if not settings or not set(settings) <= _SETTINGS:  # rows that were predicted or imported: no option measures those
        return ""
    named = (f"{name if name == 'torch' else f'--{name}'} {value}" for name, value in settings.items())
    return f" ({', '.join(named)})"


def _difference(then: str, now: str) -> tuple[str, str]:
    """Return the parts of two settings that differ; other texts as they are."""
    one, two = then.split(";"), now.split(";")
    if len(one) != len(two) or len(one) == 1:
        return then, now
    parts = [(left, right) for left, right in zip(one, two, strict=True) if left != right]
    return ";".join(left for left, _ in parts), ";".join(right for _, right in parts)
