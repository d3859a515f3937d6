"""Real CPU limits for processes of this machine, by control groups: version 1 (cpu.cfs_quota_us) or 2 (cpu.max).

Start at :class:`CpuLimits`. Only groups made here are ever written to, and they are removed on the way out.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from ddltool.errors import InputError

PERIOD_US = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where groups with a CPU limit can be made."""

    folder: Path
    version: int


def find_place(mounts: str | None = None, own: str | None = None) -> Place:
    """Return the folder for new groups: below this process's own one, or next to it.

    Args:
        mounts, own: the text of /proc/self/mounts and /proc/self/cgroup; None: they are read.

    Raises InputError where the CPU cannot be limited.
    """
    problem = "no CPU limit can be set here", "run as root on Linux with a writable cpu control group"
    try:
        mounts = mounts if mounts is not None else Path("/proc/self/mounts").read_text()
        own = own if own is not None else Path("/proc/self/cgroup").read_text()
    except OSError:
        raise InputError("cgroup", *problem) from None
    paths = {names: path for _, names, path in (line.split(":", 2) for line in own.splitlines())}
    for mount in (line.split() for line in mounts.splitlines()):
        if mount[2] not in ("cgroup", "cgroup2"):
            continue
        version = 2 if mount[2] == "cgroup2" else 1
        names = "" if version == 2 else next((name for name in paths if "cpu" in name.split(",")), None)
        if names not in paths or (version == 1 and "cpu" not in mount[3].split(",")):
            continue
        top = Path(mount[1])
        below = top / paths[names].lstrip("/")
        for folder in (below, *below.parents):
            if _usable(folder, version):
                return Place(folder=folder, version=version)
            if folder == top:
                break
    raise InputError("cgroup", *problem)


def _usable(folder: Path, version: int) -> bool:
    """Tell whether a group that can be made in ``folder`` would limit the CPU; tries it."""
    if version == 2:
        with contextlib.suppress(OSError):
            if "cpu" not in (folder / "cgroup.subtree_control").read_text().split():
                return False
    trial = folder / f"ddltool-trial-{os.getpid()}"
    try:
        trial.mkdir()
    except OSError:
        return False
    try:
        return os.access(trial / ("cpu.max" if version == 2 else "cpu.cfs_quota_us"), os.W_OK)
    finally:
        with contextlib.suppress(OSError):
            trial.rmdir()


class CpuLimits:
    """One group with a CPU limit for each of several processes; ``with CpuLimits((0.6, 0.2)) as limits``.

    Attributes:
        groups: the folders, one per share.
    """

    def __init__(self, shares: tuple[float, ...], place: Place | None = None) -> None:
        """``shares``: of one core, above 0. Raises InputError where the CPU cannot be limited."""
        self._place = place if place is not None else find_place()
        self.groups: list[Path] = []
        try:
            for share in shares:
                group = Path(tempfile.mkdtemp(prefix="ddltool-", dir=self._place.folder))
                self.groups.append(group)
                set_limit(group, share)
        except OSError as error:
            self.close()
            raise InputError(
                "cgroup", f"no CPU limit can be set here ({error.strerror})", "run as root on Linux"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes that are still in the groups, and remove these. Idempotent."""
        while self.groups:
            group = self.groups.pop()
            for _ in range(50):
                with contextlib.suppress(OSError):  # the last one may end meanwhile
                    for process in (group / "cgroup.procs").read_text().split():
                        os.kill(int(process), signal.SIGKILL)
                with contextlib.suppress(OSError):  # a process that has been killed holds its group for a moment
                    group.rmdir()
                if not group.exists():
                    break
                time.sleep(0.1)


def set_limit(group: Path, share: float, period_us: int = PERIOD_US) -> None:
    """Let the processes in ``group`` use ``share`` of a core from now on, in periods of ``period_us`` microseconds."""
    quota = max(1000, round(share * period_us))
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota} {period_us}")
        return
    (group / "cpu.cfs_period_us").write_text(str(period_us))
    (group / "cpu.cfs_quota_us").write_text(str(quota))


def join(group: Path) -> None:
    """Put this process, with all its threads, into ``group``."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
