"""Writes the pictures of ``ddltool simulate --picture DIR``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddltool.analyzers.scheduling.recording import Recorder
    from ddltool.analyzers.scheduling.simulator import Policy, SimulationResult
    from ddltool.commands.simulate_replay import Replay


class Watched:
    """Makes a policy whose last instance is remembered with what it gave to whom."""

    def __init__(self, make: Callable[[], Policy]) -> None:
        self._make = make
        self.recorder: Recorder | None = None

    def __call__(self) -> Policy:
        """Return a new instance of the policy, recorded."""
        from ddltool.analyzers.scheduling.recording import Recorder

        self.recorder = Recorder(self._make())
        return self.recorder


def watch(makers: Mapping[str, Callable[[], Policy]]) -> dict[str, Watched]:
    """Return makers of the same policies that remember what they give to whom."""
    return {name: Watched(make) for name, make in makers.items()}


def draw(
    folder: Path, replays: Sequence[Replay], watched: Mapping[str, Watched], *, job: str | None, file_format: str
) -> None:
    """Write the pictures of replays under watched policies, and say where they are."""
    from ddltool.commands.output import note, progress

    recorders = {name: each.recorder for name, each in watched.items() if each.recorder is not None}
    results = {each.policy: each.result for each in replays}
    with progress("drawing pictures"):
        paths = write_pictures(folder, results, recorders, job=job, file_format=file_format)
    for path in paths:
        note(f"wrote {path}")


def prepare_folder(folder: Path, file_format: str = "png") -> None:
    """Make the folder, or raise InputError before anything is replayed."""
    from ddltool.analyzers.scheduling.pictures import FORMATS
    from ddltool.artifacts import check_writable
    from ddltool.errors import InputError

    if file_format not in FORMATS:
        raise InputError("--picture-format", f"is {file_format!r}", "png or svg")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"cannot be made ({error.strerror})"
        raise InputError(str(folder), problem, "give a folder, or the name of one to be made") from None
    check_writable(folder / f"completion-times.{file_format}")


def write_pictures(
    folder: Path,
    results: Mapping[str, SimulationResult],
    records: Mapping[str, Recorder],
    *,
    groups: Sequence[str] | None = None,
    job: str | None = None,
    file_format: str = "png",
) -> list[Path]:
    """Write all pictures of some policies' replays of one workload and return their files.

    ``records`` are the recorders that wrapped the policies. ``groups`` (n,): what the allocation is stacked by, the
    applications by default; ``job``: whose life is drawn, by default the one that the first policy restarts most.
    Raises InputError for an unknown job before anything is written.
    """
    from ddltool.analyzers.scheduling.pictures import (
        allocation_picture,
        completion_picture,
        life_picture,
        longest_restarted,
    )
    from ddltool.artifacts import write_bytes

    prepare_folder(folder, file_format)
    made = {"completion-times": completion_picture(results, file_format=file_format)}
    shown = job if job is not None else longest_restarted(next(iter(results.values())))
    for name, result in results.items():
        made[f"allocation-{name}"] = allocation_picture(result, records[name], groups, file_format=file_format)
        made[f"job-{name}"] = life_picture(result, records[name], shown, file_format=file_format)
    paths = []
    for name, content in made.items():
        paths.append(folder / f"{name}.{file_format}")
        write_bytes(paths[-1], content)
    return paths
