"""Every field of every kind of document, from its schema, with values just outside: the same refusal of all that read it.

``pytest -m slow -s tests/commands/test_bounds.py`` tries all fields with all commands and prints the counts by kind.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddltool.artifacts import load
from ddltool.commands.main import run
from ddltool.commands.show import KINDS, schema_of
from ddltool.errors import InputError
from ddltool.plans import Enforcement
from ddltool.shipped import folder
from tests.helpers import report_artifacts, schemas
from tests.helpers.schemas import Leaf

LOADS = folder() / "workloads"
ANY = (("gate", "FILE", "--metrics"), ("report", "FILE", "-o", "out.html"))
REPORT = ANY[1:]
SIMULATE = ("simulate", str(LOADS / "synthetic.csv"), "--policy", "fifo", "--traces", str(LOADS / "traces"))
READERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "graph": (
        ("trace", "FILE", "--bandwidth", "10Gbit", "--device", "V100"),
        ("plan", "job.yaml", "--strategy", "est", "--graph", "FILE"),
        *ANY,
    ),
    "profile": (("fit", "FILE"), ("plan", "profiled.yaml", "--strategy", "est"), ("import", "FILE"), *ANY),
    "goodput": (
        ("plan", "fitted.yaml", "--strategy", "goodput"),
        ("verify", "plan-est.json", "telemetry.jsonl", "--goodput", "FILE"),
        (*SIMULATE, "--cluster", str(LOADS / "cluster.yaml"), "--goodput", "language=FILE,noise=1,samples=1e6,batch=8"),
        ("simulate", "advise", "state.yaml"),
        *ANY,
    ),
    "cluster": (("plan", "clustered.yaml", "--strategy", "est"), (*SIMULATE, "--cluster", "FILE")),
    "job": (("plan", "FILE", "--strategy", "est"), ("companion", "FILE", "-o", "other.db")),
    "job_state": (("simulate", "advise", "FILE"),),
    "plan": (("emit", "FILE", "-o", "out.json"), ("verify", "FILE", "telemetry.jsonl"), *ANY),
    "command_plan": ANY,
    "islands_plan": ANY,
    "enforcement": (("the hook", "FILE"), *ANY),
    "telemetry": (
        ("fit", "FILE"),
        ("verify", "plan-est.json", "FILE"),
        ("plan", "job.yaml", "--strategy", "auto", "--telemetry", "FILE"),
        ("companion", "kept.db", "--measured", "FILE"),
        ("barrier", "FILE"),
        ("stragglers", "FILE"),
        ("balance", "FILE"),
        ("import", "FILE"),
        *ANY,
    ),
    "devices": (
        ("devices", "H100", "--devices-file", "FILE"),
        ("predict", "zoo:cifarnet", "--device", "V100", "--devices-file", "FILE"),
        ("trace", "zoo:cifarnet", "--device", "V100", "--bandwidth", "10Gbit", "--devices-file", "FILE"),
        ("plan", "job.yaml", "--strategy", "est", "--devices-file", "FILE"),
        ("companion", "kept.yaml", "-o", "other.db", "--devices-file", "FILE"),
    ),
    "companion": (("companion", "FILE", "--lookup", "V100=2"), ("companion", "FILE", "--measured", "telemetry.jsonl")),
    "sync": (("barrier", "FILE"), *REPORT),
    **dict.fromkeys(("network", "barrier", "balance", "lengths", "stragglers", "simulation"), ANY),
    "verification": REPORT,
    "gate": REPORT,
    "sweep": (("simulate", "sweep", *SIMULATE[1:], "--cluster", str(LOADS / "cluster.yaml"), "-o", "FILE"), *ANY),
    "trace": ANY[:1],
}
"""By kind, the commands that read a file of it."""
SPELT = {"advise": "simulate", "hook": "the hook", "--measured": "companion", "sweep": "simulate"}
"""What kinds.toml calls otherwise than READERS."""
UNREAD = ("calibration", "balance_event", "figures", "demo", "enforcement")
"""Kinds that no command takes from a user, or without a schema of their fields; an enforcement is also read by a program."""
DEVICES = {
    "kind": "ddltool.devices",
    "devices": [
        {
            **{"name": "V100", "architecture": "Volta", "multiprocessors": 80, "clock_hz": 1.53e9, "l2_bytes": 6e6},
            **{"peak_flops": {"float32": 15.7e12}, "memory_bytes_per_s": 9e11, "memory_gib": 32.0, "power_w": 300.0},
            **{"link_bytes_per_s": 1.5e11, "price_per_hour": 1.0},
            "fitted": {
                "units": {"tensor": 1.0, "vector": 1.0, "memory": 1.0},
                **{"issue_s": 1e-5, "start_s": 1e-6, "update_s": 1e-6, "source": "a"},
                "residuals": {"low": 0.9, "high": 1.1, "median_error": 0.1, "rows": 5, "what": "a"},
            },
        }
    ],
}
TEXTS = {
    "kept.yaml": "name: k\nmax_workers: 4\nbatch_size: 32\ndevices: [{type: V100, count: 4, capability_per_s: 3.1}]\n",
    "profiled.yaml": "name: p\nmax_workers: 4\nbatch_size: 16\ndevices: [{type: T4, count: 2, profile: case.csv}]\n",
    "fitted.yaml": report_artifacts.TUNED.replace("goodput.json", "case.json"),
    "clustered.yaml": "name: c\nmax_workers: 4\ncluster: case.json\ndevices: [{type: V100, capability_per_s: 3.0}]\n",
    "state.yaml": "goodput: case.json\nnoise_scale: 800.0\ninitial_batch_size: 64\nmax_batch_size: 4096\n"
    "max_local_batch_size: 256\nheld: [2, 0]\nfree: [2, 4]\nremaining_s: 3600.0\nrestarts_s: [30.0]\n",
}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "cluster": {
        "kind": "ddltool.cluster",
        "nodes": [{"name": "a", "count": 2, "devices": {"type": "V100", "count": 4}}],
    },
    "job": {
        **{"kind": "ddltool.job", "name": "a", "max_workers": 4, "batch_size": 8, "weight": 1.0},
        "devices": [{"type": "V100", "count": 2, "capability_per_s": 3.0, "memory_gib": 16.0, "price_per_hour": 1.0}],
    },
    "job_state": {
        **{"kind": "ddltool.job_state", "goodput": "goodput.json", "noise_scale": 800.0, "initial_batch_size": 64},
        **{"max_batch_size": 4096, "max_local_batch_size": 256, "held": [2, 0], "free": [2, 4], "remaining_s": 3600.0},
        "restarts_s": [30.0],
    },
    "devices": DEVICES,
}


class Case(NamedTuple):
    """A file with one wrong value, and a command that reads it."""

    kind: str
    leaf: Leaf
    value: Any
    command: tuple[str, ...]


@pytest.fixture(scope="module")
def place(every_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a file of every kind, in which the commands run."""
    place = shutil.copytree(every_artifact, tmp_path_factory.mktemp("bounds") / "place")
    for name, text in TEXTS.items():
        (place / name).write_text(text)
    with contextlib.chdir(place):
        shutil.copy("goodput.json", "case.json")
        for name in ("kept.db", "plans.db"):
            assert _ended("companion", "kept.yaml", "-o", name)[0] == 0
        with open("trace.json", "w") as file, contextlib.redirect_stdout(file):
            assert run(["trace", "toy.json.gz", "--bandwidth", "10Gbit", "--device", "V100", "--json"]) == 0
        yield place


def _ended(*arguments: str) -> tuple[int, str]:
    """Run a command; return its exit code and stderr."""
    told = io.StringIO()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(told):
        if arguments[0] == "the hook":
            try:
                load(arguments[1], Enforcement)
            except InputError as error:
                return 2, f"error: {error}\n"
            return 0, ""
        return run(list(arguments)), told.getvalue()


EXAMPLES: dict[str, tuple[str, ...]] = {
    "graph": ("toy.json.gz",),
    "profile": ("profile.csv",),
    "plan": tuple(f"plan-{name}.json" for name in ("auto", "est", "lb-bsp", "elastic-bsp", "goodput", "bsp")),
    "enforcement": ("enforce.json",),
    "telemetry": ("telemetry.jsonl", "agent.jsonl"),
    "companion": ("plans.db",),
    "sync": ("sync.jsonl",),
}


@functools.cache
def _document(kind: str, example: str) -> Any:
    """The document of an example; of tables their rows."""
    if not example:
        return DOCUMENTS.get(kind) or schemas.least(schema_of(kind), schema_of(kind))
    path = Path(example)
    if path.suffix == ".csv":
        return [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(path.open())]
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".db":
        with contextlib.closing(sqlite3.connect(path)) as base:
            return json.loads(base.execute("SELECT document FROM meta").fetchone()[0])
    from ddltool.artifacts import read_document

    return read_document(path)


def _number(text: str) -> Any:
    return text if not text[:1].isdigit() else float(text) if "." in text else int(text)


def _examples(kind: str) -> tuple[str, ...]:
    return ("",) if kind in (*DOCUMENTS, "command_plan") else EXAMPLES.get(kind, (f"{kind}.json",))


def _written(case: Case) -> str | None:
    """Write the case's file and return its name; None where its form has no way to say the value."""
    example = _fullest(case.kind, case.leaf.way)
    document = _document(case.kind, example)
    if isinstance(document, list):
        event = next((step for step in case.leaf.way if step.startswith("event=")), "")
        way = tuple(step for step in case.leaf.way if step != event)
        at = next((n for n, row in enumerate(document) if not event or row.get("event") == event[6:]), None)
        if at is None:
            return None
        at = len(document) // 2 if not event else at
        row = schemas.with_parents(document[at], way, _schemas_of(case.kind)[event])
        row = schemas.with_value(row, next(schemas.places(row, way)), case.value)
        document = [*document[:at], row, *document[at + 1 :]]
        if example.endswith(".csv"):
            header = list(dict.fromkeys(key for row in document for key in row))
            if not _says(case.leaf, case.value):
                return None
            text = io.StringIO()
            writer = csv.DictWriter(text, header, restval="")
            writer.writeheader()
            writer.writerows(
                {key: "" if value is None else str(value) for key, value in row.items()} for row in document
            )
            Path("case.csv").write_text(text.getvalue())
            return "case.csv"
        if case.kind == "telemetry" and case.value is None and case.leaf.name not in schema_of(case.kind)["required"]:
            return None  # in a table a null is the default, as where it is missing
        Path("case.jsonl").write_text("".join(json.dumps(row) + "\n" for row in document))
        return "case.jsonl"
    document = schemas.with_parents(document, case.leaf.way, _schemas_of(case.kind)[""])
    document = schemas.with_value(document, next(schemas.places(document, case.leaf.way)), case.value)
    if case.kind == "companion":
        shutil.copy(example, "case.db")
        with contextlib.closing(sqlite3.connect("case.db")) as base, base:
            base.execute("UPDATE meta SET document = ?", (json.dumps(document),))
        return "case.db"
    Path("case.json").write_text(json.dumps(document))
    return "case.json"


def _says(leaf: Leaf, value: Any) -> bool:
    """Whether a CSV can say a wrong value: there all are texts, and a field that may be missing is empty or nan."""
    text = "" if value is None else str(value)
    is_optional = leaf.name not in schema_of("profile")["required"]
    if isinstance(value, (list, dict)) or (is_optional and text in ("", "nan")):
        return False
    if leaf.numeric is None:
        return text == ""
    with contextlib.suppress(ValueError):
        number = float(text)
        whole = leaf.numeric["type"] == "integer" and number.is_integer()
        return not schemas.allows(leaf.numeric, int(number) if whole else number)
    return True


@functools.cache
def _schemas_of(kind: str) -> dict[str, schemas.Schema]:
    """The schemas of a kind's documents or rows: one, or one by event."""
    schema = schema_of(kind)
    if kind != "sync":
        return {"": schema}
    return {
        f"event={one['properties']['event']['const']}": {**one, "$defs": schema["$defs"]}
        for one in schemas.alternatives(schema, schema)
    }


@functools.cache
def fields_of(kind: str) -> tuple[Leaf, ...]:
    """The fields of a kind that hold single values."""
    return tuple(
        Leaf((event, *leaf.way) if event else leaf.way, leaf.options)
        for event, schema in _schemas_of(kind).items()
        for leaf in schemas.leaves(schema)
        if not (leaf.name == "kind" and "goodput" in leaf.way)
    )


@functools.cache
def _fullest(kind: str, way: tuple[str, ...]) -> str:
    """The first example of a kind that has a place for a field, else the first."""
    examples = _examples(kind)
    return next((one for one in examples if any(schemas.places(_document(kind, one), way))), examples[0])


def answer_of(case: Case) -> tuple[str, str]:
    """Return how a command answered a case ("refused" if as it should, "" if no file can say so), and what it said."""
    name = _written(case)
    if name is None:
        return "", ""
    code, told = _ended(*(word.replace("FILE", name) for word in case.command))
    errors = [line.removeprefix("error: ") for line in told.splitlines() if line.startswith("error: ")]
    if "error: internal" in told or "Traceback" in told:
        return "internal", told
    if code != 2:
        return "accepted", f"exit {code}: {told}"
    is_named = len(errors) == 1 and errors[0].startswith(name) and case.leaf.name in errors[0]
    is_named &= not any(word in told for word in ("Input should", "Field required"))  # pydantic's own words
    return "refused" if is_named else "unnamed", errors[0] if errors else told


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any command that reads a kind, and a value that the kind's schema does not allow."""
    kind = draw(st.sampled_from(sorted(READERS)))
    leaf = draw(st.sampled_from(fields_of(kind)))
    return Case(kind, leaf, draw(leaf.wrong()), draw(st.sampled_from(READERS[kind])))


@given(cases())
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_a_value_outside_is_refused_by_name(place: Path, case: Case) -> None:
    answer, said = answer_of(case)
    assert answer in ("refused", ""), said


@pytest.mark.parametrize("name", ["step", "passes"])  # which all rows have, and which one has: a column of floats
def test_a_whole_number_that_a_float_takes_for_another_is_refused(place: Path, name: str) -> None:
    leaf = next(leaf for leaf in fields_of("telemetry") if leaf.name == name)
    for value in (2**53, 2**53 + 1):
        answer, said = answer_of(Case("telemetry", leaf, value, ("barrier", "FILE")))
        assert answer == "refused", said
        assert "to 9007199254740991" in said


def test_every_command_that_reads_a_kind_is_tried() -> None:
    for kind, listed in KINDS.items():
        readers = [one.strip().removeprefix("the ").partition(" ")[0] for one in listed.read_by.split(",")]
        named = {SPELT.get(one, one) for one in readers} - {"people"}
        missing = named - {command[0] for command in READERS.get(kind, ())}
        assert not missing or kind in UNREAD, (kind, missing)


def test_every_number_of_every_kind_has_two_limits() -> None:
    for kind in KINDS.keys() - {"figures"}:
        for leaf in fields_of(kind):
            for option in leaf.options:
                if schemas.type_of(option) not in ("number", "integer") or "const" in option or leaf.way[0] == "meta":
                    continue  # what a graph was made from is free-form
                assert {"minimum", "maximum"} <= set(option), (kind, leaf.way)


ROW = {
    **{"num_replicas": 1, "num_nodes": 1, "local_batch_size": 1, "accumulation_steps": 0, "total_batch_size": 2},
    **{"goodput_per_s": 1.0, "speedup": 1.0},
}
NONSENSE: tuple[tuple[str, schemas.Path, Any, str], ...] = (
    ("plan-est", ("est_count",), 9, "est_count is 9, but the assignments have 8"),
    ("plan-est", ("assignments", 0, "devices"), 3, "est_count is 8, but the assignments have 6"),
    ("plan-est", ("max_workers",), 9, "est_count is 8, too few for max_workers, 9"),
    ("plan-est", ("assignments", 0, "local_batch_size"), 63, "local_batch_size is 63, but the ESTs of a V100 take 64"),
    ("plan-est", ("parameters", 1, "name"), "features.0.bias", "parameters: 'features.0.bias' stands twice"),
    ("plan-est", ("ddp", "buckets", 0, 0), "nobody", "ddp.buckets: 'nobody' is not known"),
    ("plan-est", ("ddp", "buckets", 0, 0), "head.5.weight", "ddp: buckets: 'head.5.weight' stands twice"),
    ("plan-est", ("fsdp2", "units", 0), "head.3", "fsdp2: units: 'head.3' stands twice"),
    ("plan-est", ("fsdp2", "backward"), {"head.5": ["x"]}, "fsdp2: backward.head.5: 'x' is not known"),
    ("plan-est", ("fsdp2", "forward"), {"x": []}, "fsdp2: forward: 'x' is not known"),
    ("plan-est", ("gap",), 0.5, "gap is 0.5 and status optimal"),
    ("plan-lb-bsp", ("split", "total_batch_size"), 255, "split.total_batch_size is 255, but the assignments have 256"),
    ("plan-bsp", ("strategy",), "elastic-bsp", "superstep is that of strategy elastic-bsp"),
    ("plan-elastic-bsp", ("strategy",), "bsp", "superstep is that of strategy elastic-bsp"),
    ("plan-elastic-bsp", ("superstep", "mini_batches"), 71, "superstep.mini_batches is 71, but the iterations"),
    ("plan-elastic-bsp", ("superstep", "iterations"), {"V100": 13}, "superstep.iterations are of V100"),
    ("plan-goodput", ("goodput", "total_batch_size"), 1121, "total_batch_size is 1121, but the passes of all replicas"),
    ("plan-goodput", ("assignments", 0, "devices"), 7, "goodput.num_replicas is 8, but the assignments have 7"),
    ("plan-goodput", ("assignments", 0, "local_batch_size"), 70, "goodput.total_batch_size is 1120, but the"),
    ("plan-goodput", ("goodput", "device_type"), "K80", "goodput.device_type: 'K80' is not known"),
    ("plan-goodput", ("goodput", "scaling", 1, "num_nodes"), 3, "num_nodes is 3, more than num_replicas, 2"),
    ("plan-goodput", ("goodput", "scaling"), [ROW], "goodput.scaling[0]: total_batch_size is 2, but the passes of all"),
    ("plan-goodput", ("goodput", "scaling"), [ROW, {**ROW, "speedup": -1.0}], "goodput.scaling[1].speedup: is -1.0"),
    ("enforce", ("ranks", 0, "local_batch_size"), 63, "total_batch_size is 256 but the ranks' batches add up to 255"),
    ("enforce", ("ranks", 0, "rank"), 1, "ranks must be 0 to 3 in order"),
    ("enforce", ("plan_sha256",), "f" * 63, "plan_sha256: is 'ffff"),
    ("enforce", ("ddp", "buckets", 0, 0), "nobody", "ddp.buckets: 'nobody' is not known"),
)


@pytest.mark.parametrize(("example", "path", "value", "problem"), NONSENSE)
def test_parts_that_do_not_agree(place: Path, example: str, path: schemas.Path, value: Any, problem: str) -> None:
    kind = "enforcement" if example == "enforce" else "plan"
    Path("case.json").write_text(json.dumps(schemas.with_value(_document(kind, f"{example}.json"), path, value)))
    for command in READERS[kind]:
        code, told = _ended(*(word.replace("FILE", "case.json") for word in command))
        assert code == 2, (command, told)
        assert told.startswith("error: case.json:"), told
        assert problem in told


@pytest.mark.slow
def test_every_field_of_every_kind(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The values at the limits, of each field, with all commands: every command says the same."""
    counts: dict[str, Counter[str]] = {}
    problems: list[str] = []
    for kind, commands in READERS.items():
        counts[kind] = Counter(fields=len(fields_of(kind)), commands=len(commands))
        for leaf in fields_of(kind)[:: int(os.environ.get("DDLTOOL_BOUNDS_STEP", "1"))]:
            for value in leaf.just_outside():
                answers = [answer_of(Case(kind, leaf, value, command)) for command in commands]
                counts[kind].update(answer for answer, _ in answers if answer)
                wrong = [one for one in answers if one[0] not in ("refused", "")]
                if wrong or len({said for _, said in answers}) > 1:
                    problems.append(
                        f"{kind} {'.'.join(leaf.way)} = {value!r:.40}: {wrong or {said for _, said in answers}}"
                    )
    with capsys.disabled():
        columns = ("fields", "commands", "refused", "accepted", "unnamed", "internal")
        rows = [(kind, *(count[name] for name in columns)) for kind, count in counts.items()]
        total = ("all", *(sum(row[column] for row in rows) for column in range(1, len(columns) + 1)))
        for row in (("kind", *columns), *rows, total):
            print("  ".join(f"{cell:>9}" for cell in row))
        print(*problems[:40], sep="\n")
    assert not problems
