"""The companion database: a job's best plan for every number of available devices, as one SQLite file.

``meta`` holds the kind, the version and one JSON document (:class:`CompanionMeta`); ``plans`` the different plans;
``vectors`` which plan is the best for each vector of device counts, under a key in mixed base. A file is written beside its
place and renamed; later changes are transactions. What is torn, foreign or of another version is refused in one line.
"""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError

from ddltool.artifacts import Artifact, Record, demand_file, parse, write_bytes
from ddltool.errors import InputError, did_you_mean
from ddltool.quantities import AtLeastOne, Name, NonNegative, Processes, Rate, Seconds

_MAGIC, _HEADER_BYTES = b"SQLite format 3\x00", 100
# In the order of the tables' names.
_SCHEMA = (
    "CREATE TABLE meta (document TEXT NOT NULL)",
    "CREATE TABLE plans (id INTEGER PRIMARY KEY, document TEXT NOT NULL)",
    "CREATE TABLE vectors (key INTEGER PRIMARY KEY, plan INTEGER NOT NULL, generation INTEGER NOT NULL)",
)
# Bytes of a value, and seconds of a query, of a database that others made.
_LONGEST_VALUE, _QUERY_S = 1 << 26, 10.0
_LOOKUP = """SELECT plans.document FROM vectors JOIN plans ON plans.id = vectors.plan
WHERE vectors.key = ? AND vectors.generation = ?"""


class CompanionDevice(Record):
    """Devices of one type."""

    type: Name
    count: Processes = Field(description="plans are kept for 0 to so many")
    capability_per_s: Rate = Field(
        description="mini-batches per second of one EST alone; measured where telemetry disagreed"
    )
    max_ests: AtLeastOne | None = None


class CompanionMeta(Artifact):
    """What the plans were made for (kind ``ddltool.companion``)."""

    kind: Literal["ddltool.companion"] = "ddltool.companion"
    job: str
    max_workers: Processes
    batch_size: AtLeastOne
    homogeneous: bool = False
    devices: list[CompanionDevice] = Field(min_length=1)
    generation: AtLeastOne = Field(
        default=1,
        description="grows when a capability changes; plans of earlier generations are made again when asked for",
    )

    def clamped(self, counts: Mapping[str, int]) -> tuple[int, ...]:
        """Return the counts in the order of ``devices``, as many as plans are kept for.

        More devices of a type than the job has logical workers cannot help, and count as that many. Raises InputError
        for unknown types, negative counts, and more devices than plans are kept for where more would help.
        """
        types = [device.type for device in self.devices]
        for name, count in counts.items():
            if name not in types:
                raise InputError(f"devices.{name}", "is not in the database", did_you_mean(name, types))
            if count < 0:
                raise InputError(f"devices.{name}", f"is {count}", "a number of devices is 0 or more")
        kept_counts = []
        for device in self.devices:
            count = counts.get(device.type, 0)
            # More devices than the job has logical workers would stay idle; below that they could help.
            if count > device.count and device.count < self.max_workers:
                problem = f"is {count}, and plans are kept for at most {device.count}"
                raise InputError(f"devices.{device.type}", problem, "make the database again with more")
            kept_counts.append(min(count, device.count))
        return tuple(kept_counts)

    def key(self, counts: Sequence[int]) -> int:
        """Return the number under which the plan for these counts is kept.

        The counts, in the order of ``devices``, are its digits in mixed base: a type with 4 devices has the digits 0 to
        4.
        """
        number = 0
        for device, count in zip(self.devices, counts, strict=True):
            number = number * (device.count + 1) + count
        return number


class CompanionPlan(Record):
    """One plan. All figures are predicted."""

    throughput: NonNegative = Field(description="logical mini-batches per second; 0: the devices cannot run the job")
    step_s: Seconds = Field(description="0 where throughput is")
    ests: dict[str, list[tuple[AtLeastOne, AtLeastOne]]] = Field(description="device type to (devices, ESTs on each)")

    @property
    def used(self) -> dict[str, int]:
        """Return how many devices of each type the plan uses."""
        return {name: sum(devices for devices, _ in rows) for name, rows in self.ests.items()}


_NOTHING_RUNS = CompanionPlan(throughput=0.0, step_s=0.0, ests={})


def is_companion(path: Path) -> bool:
    """Return whether a file starts as an SQLite database does."""
    with contextlib.suppress(OSError, ValueError):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(len(_MAGIC)) == _MAGIC
    return False


def write_companion(
    path: Path, meta: CompanionMeta, plans: Iterable[CompanionPlan], vectors: Iterable[tuple[int, int]]
) -> None:
    """Write a database atomically. ``vectors``: pairs (key of the device counts, index in ``plans`` of the best plan for them).

    Raises InputError when it cannot be written. ``meta``: what the plans were made for.
    """
    with contextlib.closing(sqlite3.connect(":memory:")) as base:
        base.executescript("; ".join(_SCHEMA))
        rows = ((number, plan.model_dump_json()) for number, plan in enumerate(plans))
        with base:
            base.execute("INSERT INTO meta VALUES (?)", (meta.model_dump_json(),))
            base.executemany("INSERT INTO plans VALUES (?, ?)", rows)
            base.executemany(f"INSERT INTO vectors VALUES (?, ?, {meta.generation:d})", vectors)
        write_bytes(path, base.serialize())


class Companion:
    """An open database. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Open and check ``path``. Raises InputError for anything but a whole database of this version."""
        self.path = path
        _check_file(path)
        with self._explained():
            self._base = sqlite3.connect(path, timeout=10.0)
        try:
            with self._explained():
                self._distrust()
                self.meta = self._stored()
        except BaseException:
            self._base.close()
            raise

    def _distrust(self) -> None:
        """Bound what a file that anybody may have made can do: no functions in its schema, no long values, no long searches.

        Raises InputError where its tables are not exactly those that :func:`write_companion` makes.
        """
        base = self._base
        base.execute("PRAGMA trusted_schema = OFF")
        base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
        deadline = [0.0]  # a list, so that the function below can change what the other one reads

        def set_deadline(_statement: str) -> None:
            """Give the statement that begins ten seconds; ``_statement`` is its text, which SQLite passes."""
            deadline[0] = time.monotonic() + _QUERY_S

        base.set_trace_callback(set_deadline)  # called with each statement as it begins
        # Asked every 10,000 instructions of SQLite's machine; True interrupts the statement.
        base.set_progress_handler(lambda: time.monotonic() > deadline[0], 10_000)
        if base.execute("SELECT sql FROM sqlite_master ORDER BY name").fetchall() != [(sql,) for sql in _SCHEMA]:
            problem = "is no companion database: its tables are others"
            raise InputError(str(self.path), problem, "make one with: ddltool companion JOB.yaml")

    def lookup(self, counts: Sequence[int]) -> CompanionPlan | None:
        """Return the plan for device counts, in the order of the devices.

        None where it is not in the database, or was made with capabilities that have changed since (an earlier
        generation).
        """
        with self._explained():
            row = self._base.execute(_LOOKUP, (self.meta.key(counts), self.meta.generation)).fetchone()
            return None if row is None else self._checked(row[0], counts)

    def _checked(self, document: str, counts: Sequence[int]) -> CompanionPlan:
        """Return the plan that a row holds, as the file may be anybody's. Raises ValueError unless it can be true.

        Either it runs nothing, or it places every EST (logical worker) on devices among ``counts``, its step takes as
        long as the slowest of them, and its throughput is that of such steps.
        """
        with contextlib.suppress(ValidationError):
            plan = CompanionPlan.model_validate_json(document)
            available = dict(zip((device.type for device in self.meta.devices), counts, strict=True))
            fits = all(used <= available.get(name, 0) for name, used in plan.used.items())
            if fits and (plan == _NOTHING_RUNS or self._runs_all(plan)):
                return plan
        raise ValueError("a plan in it does not fit its devices")

    def _runs_all(self, plan: CompanionPlan) -> bool:
        """Return whether a plan places every EST (logical worker), in the time that the devices' capabilities give."""
        speeds = {device.type: device.capability_per_s for device in self.meta.devices}
        placed = sum(devices * ests for rows in plan.ests.values() for devices, ests in rows)
        # A device runs its ESTs one after another; the step waits for the slowest device.
        slowest_s = max((ests / speeds[name] for name, rows in plan.ests.items() for _, ests in rows), default=0.0)
        return (
            placed == self.meta.max_workers
            and math.isclose(plan.step_s, slowest_s, rel_tol=1e-6)
            and math.isclose(plan.throughput * plan.step_s, placed, rel_tol=1e-6)
        )

    def remember(self, counts: Sequence[int], plan: CompanionPlan) -> None:
        """Keep a plan that was made on demand. A database that cannot be written is left as it is: the plan is no less good.

        ``counts``: the devices that it is for, in their order.
        """
        with self._explained(), contextlib.suppress(sqlite3.OperationalError), self._writing():
            # Another process may have corrected a capability since this file was opened.
            if self._stored().generation != self.meta.generation:
                return  # made with capabilities that have changed since
            inserted = self._base.execute("INSERT INTO plans (document) VALUES (?)", (plan.model_dump_json(),))
            self._base.execute(
                "INSERT OR REPLACE INTO vectors VALUES (?, ?, ?)",
                (self.meta.key(counts), inserted.lastrowid, self.meta.generation),
            )

    def recalibrate(self, capability: Mapping[str, float]) -> None:
        """Replace capabilities (mini-batches per second, by type); plans made before then count as out of date.

        What another process has changed since the file was opened is kept.
        """
        with self._explained(), self._writing():
            stored = self._stored()
            devices = [
                device.model_copy(
                    update={"capability_per_s": float(capability.get(device.type, device.capability_per_s))}
                )
                for device in stored.devices
            ]
            meta = stored.model_copy(update={"devices": devices, "generation": stored.generation + 1})
            self._base.execute("UPDATE meta SET document = ?", (meta.model_dump_json(),))
        self.meta = meta

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Be the only writer from here to the end of the body, which is committed; an error in it undoes all."""
        with self._base:
            self._base.execute("BEGIN IMMEDIATE")
            yield

    def _stored(self) -> CompanionMeta:
        """Return the meta document as it stands in the file now. Raises InputError where it cannot be read."""
        row = self._base.execute("SELECT document FROM meta").fetchone()
        document = None
        with contextlib.suppress(ValueError, TypeError):  # no row, or in a damaged file one without a text
            document = json.loads(row[0])
        if not isinstance(document, dict):
            raise InputError(str(self.path), "has no readable meta document", "make the database again")
        return parse(document, CompanionMeta, str(self.path))

    def counts(self) -> tuple[int, int]:
        """Return how many vectors have a plan of this generation, and how many there are in all."""
        with self._explained():
            query = "SELECT COUNT(*) FROM vectors WHERE generation = ?"
            fresh = int(self._base.execute(query, (self.meta.generation,)).fetchone()[0])
        return fresh, math.prod(device.count + 1 for device in self.meta.devices)

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    def __enter__(self) -> Self:
        """Return the open database."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn SQLite's and JSON's errors in the body into one line about the file."""
        try:
            yield
        except (sqlite3.Error, ValueError) as error:
            locked = "locked" in str(error)
            remedy = "try again when the process that writes it is done" if locked else "make it again"
            raise InputError(str(self.path), f"cannot be used as a database ({error})", remedy) from None


def _check_file(path: Path) -> None:
    """Raise InputError for what is no whole SQLite file.

    Its header says the bytes of a page and the number of pages; a copy that was cut off has fewer bytes.
    """
    demand_file(path)  # a pipe would be waited for
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
        size = path.stat().st_size
    except FileNotFoundError:
        raise InputError(str(path), "no such file", "give the path of an existing file") from None
    except OSError as error:
        raise InputError(str(path), f"cannot be read ({error.strerror})", "check the path") from None
    if head[: len(_MAGIC)] != _MAGIC or len(head) < _HEADER_BYTES:
        raise InputError(str(path), "is no SQLite file", "make one with: ddltool companion JOB.yaml -o FILE")
    page_bytes = int.from_bytes(head[16:18], "big")
    page_bytes = 65536 if page_bytes == 1 else page_bytes  # which does not fit into two bytes
    page_count = int.from_bytes(head[28:32], "big")
    if size < page_bytes * page_count:
        raise InputError(str(path), f"is cut off ({size} of {page_bytes * page_count} bytes)", "copy or make it again")
