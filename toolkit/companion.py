"""The companion database: a job's best plan for every number of available devices, as one SQLite file.

Its tables: ``meta`` holds one JSON document (:class:`CompanionMeta`); ``plans`` the different plans; ``vectors`` the best
plan for each vector of device counts, under a key in mixed base (:meth:`CompanionMeta.key`). The file is written atomically;
later changes are transactions. A file that is cut off, foreign or of another version is refused.
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
# Limits of the bytes of a value and the seconds of a query: anybody may have made the database.
_LONGEST_VALUE, _QUERY_S = 1 << 26, 10.0
_LOOKUP = """SELECT plans.document FROM vectors JOIN plans ON plans.id = vectors.plan
WHERE vectors.key = ? AND vectors.generation = ?"""


class CompanionDevice(Record):
    """Devices of one type."""

    type: Name
    count: Processes = Field(description="the most devices of this type for which plans are kept")
    capability_per_s: Rate = Field(
        description="mini-batches per second of one EST alone; measured where telemetry disagreed"
    )
    max_ests: AtLeastOne | None = None


class CompanionMeta(Artifact):
    """The job and the devices that the plans were made for (kind ``ddltool.companion``)."""

    kind: Literal["ddltool.companion"] = "ddltool.companion"
    job: str
    max_workers: Processes = Field(description="maxP: ESTs (logical workers) of the job")
    batch_size: AtLeastOne = Field(description="samples of one EST's mini-batch")
    homogeneous: bool = Field(default=False, description="the job uses devices of one type only")
    devices: list[CompanionDevice] = Field(min_length=1)
    generation: AtLeastOne = Field(
        default=1,
        description="grows when a capability changes; plans of earlier generations are made again when asked for",
    )

    def clamped(self, counts: Mapping[str, int]) -> tuple[int, ...]:
        """Return the ``counts`` (by type, absent: 0) in the order of ``devices``, each limited to the kept count.

        Raises InputError for an unknown type, a negative count, and a count above the kept one. The last is allowed if
        plans are kept for as many devices as the job has logical workers: more of them would stay idle.
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
            if count > device.count and device.count < self.max_workers:
                problem = f"is {count}, and plans are kept for at most {device.count}"
                raise InputError(f"devices.{device.type}", problem, "make the database again with more")
            kept_counts.append(min(count, device.count))
        return tuple(kept_counts)

    def key(self, counts: Sequence[int]) -> int:
        """Return the key in table ``vectors`` of these counts, in the order of ``devices``, each at most the type's ``count``.

        The counts are its digits in mixed base: a type of which plans are kept for up to 4 devices has the digits 0 to 4, and
        so the base 5.
        """
        number = 0
        for device, count in zip(self.devices, counts, strict=True):
            number = number * (device.count + 1) + count
        return number


class CompanionPlan(Record):
    """One plan. All figures are predicted."""

    throughput: NonNegative = Field(description="logical mini-batches per second; 0: the devices cannot run the job")
    step_s: Seconds = Field(description="seconds of a step; 0 if throughput is 0")
    ests: dict[str, list[tuple[AtLeastOne, AtLeastOne]]] = Field(description="device type to (devices, ESTs on each)")

    @property
    def used(self) -> dict[str, int]:
        """The number of devices that the plan uses, by type."""
        return {name: sum(devices for devices, _ in rows) for name, rows in self.ests.items()}


_NOTHING_RUNS = CompanionPlan(throughput=0.0, step_s=0.0, ests={})


def is_companion(path: Path) -> bool:
    """Return whether ``path`` is a file that begins as an SQLite database; False if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        if path.is_file():
            with path.open("rb") as file:
                return file.read(len(_MAGIC)) == _MAGIC
    return False


def write_companion(
    path: Path, meta: CompanionMeta, plans: Iterable[CompanionPlan], vectors: Iterable[tuple[int, int]]
) -> None:
    """Write a database atomically. Raises InputError if it cannot be written.

    ``vectors``: pairs (key of the device counts, index in ``plans`` of the best plan for them).
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
    """An open database; a context manager that closes it. Every method raises InputError for a damaged file."""

    def __init__(self, path: Path) -> None:
        """Open and check the file. Raises InputError unless it is a whole database of this version."""
        self.path = path
        _check_file(path)
        with self._explained():
            self._base = sqlite3.connect(path, timeout=10.0)
        try:
            with self._explained():
                self._limit_database()
                self.meta = self._read_meta()
        except BaseException:
            self._base.close()
            raise

    def _limit_database(self) -> None:
        """Limit what a file from anybody can do: no functions in its schema, no long values, no long queries.

        Raises InputError unless its tables are exactly those that :func:`write_companion` makes.
        """
        base = self._base
        base.execute("PRAGMA trusted_schema = OFF")
        base.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
        deadline = [0.0]  # a list, as both functions below share it

        def set_deadline(_statement: str) -> None:
            """Set the deadline of the statement that begins; ``_statement`` is its text, which SQLite passes."""
            deadline[0] = time.monotonic() + _QUERY_S

        base.set_trace_callback(set_deadline)  # SQLite calls it as each statement begins
        # SQLite calls it every 10,000 instructions of its machine; True interrupts the statement.
        base.set_progress_handler(lambda: time.monotonic() > deadline[0], 10_000)
        if base.execute("SELECT sql FROM sqlite_master ORDER BY name").fetchall() != [(sql,) for sql in _SCHEMA]:
            problem = "is no companion database: its tables are others"
            raise InputError(str(self.path), problem, "make one with: ddltool companion JOB.yaml")

    def lookup(self, counts: Sequence[int]) -> CompanionPlan | None:
        """Return the plan for device counts, in the order of ``meta.devices`` (:meth:`CompanionMeta.clamped`).

        None if the database has none, or only one of an earlier generation, made with capabilities that have changed.
        """
        with self._explained():
            row = self._base.execute(_LOOKUP, (self.meta.key(counts), self.meta.generation)).fetchone()
            return None if row is None else self._checked(row[0], counts)

    def _checked(self, document: str, counts: Sequence[int]) -> CompanionPlan:
        """Return the plan in a row's JSON ``document``. Raises ValueError if it is no possible plan for ``counts``.

        Anybody may have made the file. A possible plan uses at most ``counts`` devices, and either runs nothing or
        passes :meth:`_runs_all`.
        """
        with contextlib.suppress(ValidationError):
            plan = CompanionPlan.model_validate_json(document)
            available = dict(zip((device.type for device in self.meta.devices), counts, strict=True))
            fits = all(used <= available.get(name, 0) for name, used in plan.used.items())
            if fits and (plan == _NOTHING_RUNS or self._runs_all(plan)):
                return plan
        raise ValueError("a plan in it does not fit its devices")

    def _runs_all(self, plan: CompanionPlan) -> bool:
        """Return whether a plan places every EST (logical worker), with the step time and throughput that follow from it."""
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
        """Store a plan for ``counts`` devices (in the order of ``meta.devices``), which was made on demand.

        Nothing is stored, without an error, if the file cannot be written or its capabilities have changed since it was
        opened: the caller has the plan anyway.
        """
        with self._explained(), contextlib.suppress(sqlite3.OperationalError), self._writing():
            if self._read_meta().generation != self.meta.generation:  # another process has recalibrated
                return
            inserted = self._base.execute("INSERT INTO plans (document) VALUES (?)", (plan.model_dump_json(),))
            self._base.execute(
                "INSERT OR REPLACE INTO vectors VALUES (?, ?, ?)",
                (self.meta.key(counts), inserted.lastrowid, self.meta.generation),
            )

    def recalibrate(self, capability: Mapping[str, float]) -> None:
        """Replace capabilities (mini-batches per second of one EST, by type); all stored plans are then out of date.

        Types that are not in ``capability`` keep what the file has, also if another process changed it since opening.
        """
        with self._explained(), self._writing():
            stored = self._read_meta()
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
        """Run the body as a transaction of the only writer: committed at its end, undone by an error in it."""
        with self._base:
            self._base.execute("BEGIN IMMEDIATE")
            yield

    def _read_meta(self) -> CompanionMeta:
        """Return the meta document that is now in the file. Raises InputError if it cannot be read."""
        row = self._base.execute("SELECT document FROM meta").fetchone()
        document = None
        with contextlib.suppress(ValueError, TypeError):  # no row, or in a damaged file one without a text
            document = json.loads(row[0])
        if not isinstance(document, dict):
            raise InputError(str(self.path), "has no readable meta document", "make the database again")
        return parse(document, CompanionMeta, str(self.path))

    def counts(self) -> tuple[int, int]:
        """Return (number of count vectors with a plan of this generation, number of all count vectors)."""
        with self._explained():
            query = "SELECT COUNT(*) FROM vectors WHERE generation = ?"
            fresh = int(self._base.execute(query, (self.meta.generation,)).fetchone()[0])
        return fresh, math.prod(device.count + 1 for device in self.meta.devices)

    def close(self) -> None:
        """Close the database."""
        self._base.close()

    def __enter__(self) -> Self:
        """Return the open database."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the database; errors of the body pass."""
        self.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn SQLite's and JSON's errors of the body into an InputError about the file."""
        try:
            yield
        except (sqlite3.Error, ValueError) as error:
            locked = "locked" in str(error)
            remedy = "try again when the process that writes it is done" if locked else "make it again"
            raise InputError(str(self.path), f"cannot be used as a database ({error})", remedy) from None


def _check_file(path: Path) -> None:
    """Raise InputError unless ``path`` is an SQLite file with as many bytes as its header says."""
    demand_file(path)  # opening a pipe would wait for its writer
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
    # Offsets of SQLite's file format, section 1.3: the page size in bytes and the number of pages.
    page_bytes = int.from_bytes(head[16:18], "big")
    page_bytes = 65536 if page_bytes == 1 else page_bytes  # 1 stands for 65536, which needs more than two bytes
    page_count = int.from_bytes(head[28:32], "big")
    if size < page_bytes * page_count:
        raise InputError(str(path), f"is cut off ({size} of {page_bytes * page_count} bytes)", "copy or make it again")
