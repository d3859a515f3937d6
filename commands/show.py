"""``ddltool show zoo``, ``models``, ``term`` and ``schema``: known models, terms, and schemas of documents.

``glossary.toml`` has the terms. ``kinds.toml`` has every kind of document with its form, its writers and its readers;
``docs/formats.md`` describes the fields of those that people write or read by hand, the site those of all.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter

from ddltool import graph_results, island_results, results, simulation_results
from ddltool.analyzers.step.costs.timed_graph import timed_graph
from ddltool.artifacts import kind_of, make_folder, save
from ddltool.calibration import CalibrationTable
from ddltool.commands.options import completed
from ddltool.commands.output import out, print_json, progress, say, table
from ddltool.companion import CompanionMeta
from ddltool.device import DeviceTable
from ddltool.errors import InputError, did_you_mean
from ddltool.fixtures.zoo import ZOO, entry
from ddltool.goodput_model import Goodput
from ddltool.graph import COMPUTE, RECV, GraphDocument, Mode, read_graph, write_graph
from ddltool.graph_results import HubModel, HubModelsResult, ZooModel, ZooResult
from ddltool.job import Cluster, Job
from ddltool.job_state import JobState
from ddltool.plans import Enforcement, Plan
from ddltool.profiles import ProfileRow
from ddltool.published_models import LIBRARIES, published_models, similar_names
from ddltool.results import KindsResult, ListedKind
from ddltool.shipped import folder, graph_files
from ddltool.telemetry import BalanceEvent, SyncRow, TelemetryRow

MODES: dict[str, Mode] = {"inference": "inference", "training": "training"}


def show_zoo(write: Path | None = None, as_json: bool = False) -> None:
    """List the built-in models: parameters, size and ops in both modes, beside the figures of TicTac's Table 1."""
    if write is not None:
        _write_graphs(write, as_json)
        return
    models = [describe(name) for name in ZOO]
    if as_json:
        print_json(ZooResult(models=models))
        return
    rows = [_zoo_row(model) for model in models]
    columns = ("zoo:NAME", "batch", "param.", "MiB", "ops", "Table 1: param. MiB ops")
    caption = "param.: parameter tensors; ops: inference/training (ours aten's, TicTac's Table 1 TensorFlow's)"
    out().print(table("Built-in models", columns, rows, caption=caption))


def show_models(part: str = "", as_json: bool = False) -> None:
    """List the published models that are known by name, with their parameters; all, or those whose name or type has PART."""
    models = [
        HubModel(
            name=model.name,
            library=model.library,
            model_type=model.model_type,
            parameters=model.parameters,
            same_as=model.same_as or None,
        )
        for model in published_models().values()
        if part.lower() in f"{model.source} {model.model_type}".lower()
    ]
    if not models:
        similar = similar_names(part)
        remedy = f"did you mean {', '.join(similar)}?" if similar else "leave it out to see all"
        raise InputError("PART", f"no published model has {part!r} in its name or type", remedy)
    if as_json:
        print_json(HubModelsResult(models=models))
        return
    for library in LIBRARIES:
        rows = [
            (model.name, model.model_type, f"{model.parameters / 1e9:.3g}")
            for model in models
            if model.library == library
        ]
        if not rows:
            continue
        caption = f"billion: parameters, as published. Any other model: {library}:path/config.json"
        title = f"Published models of {library}:NAME"
        out().print(table(title, ("NAME", "type", "billion"), rows, caption=caption, text_columns=2))


def _write_graphs(target_folder: Path, as_json: bool) -> None:
    """Write the shipped graphs into a folder, which is made if it is missing; those of zoo models are traced anew."""
    make_folder(target_folder)
    written_files: list[Path] = []
    # The files are named MODEL-MODE.graph.json.gz; those of no zoo model are copied.
    with progress("tracing", len(ZOO) * len(MODES)) as advance:
        for path in graph_files():
            advance(len(written_files), path.name)
            name, _, mode = path.name.partition(".")[0].rpartition("-")
            graph = timed_graph(f"zoo:{name}", mode=MODES[mode]) if name in ZOO else read_graph(path)
            written_files.append(target_folder / path.name)
            write_graph(graph, written_files[-1])
    if as_json:
        print_json(ZooResult(paths=[str(path) for path in written_files]))
    else:
        say(f"wrote {len(written_files)} graphs to {target_folder}")


def describe(name: str) -> ZooModel:
    """Return a built-in model's figures in both modes, from the shipped graphs, and the published ones if there are any."""
    inference, training = (read_graph(folder() / "graphs" / f"{name}-{mode}.graph.json.gz") for mode in MODES)
    return ZooModel(
        name=name,
        title=entry(name).title,
        batch_size=entry(name).batch_size,
        parameters=len(training.of_kind(RECV)),
        parameter_elements=int(training.meta["parameter_elements"] or 0),
        parameter_mib=training.parameter_bytes / 2**20,
        ops_inference=len(inference.of_kind(COMPUTE)),
        ops_training=len(training.of_kind(COMPUTE)),
        published=entry(name).published,
    )


def _zoo_row(model: ZooModel) -> tuple[str, ...]:
    """Return a built-in model's cells: its figures, then those of TicTac's Table 1 in one cell, "-" if it lacks the model."""
    published = model.published
    published_figures = "-"
    if published is not None:
        ops = f"{published.ops_inference}/{published.ops_training}"
        published_figures = f"{published.parameters:3d}  {published.parameter_mib:6.2f}  {ops:>9s}"
    own_ops, own_mib = f"{model.ops_inference}/{model.ops_training}", f"{model.parameter_mib:.2f}"
    return model.name, str(model.batch_size), str(model.parameters), own_mib, own_ops, published_figures


GLOSSARY: dict[str, str] = tomllib.loads(Path(__file__).with_name("glossary.toml").read_text(encoding="utf-8"))
"""Term to one or two sentences on it; the site lists them."""


def show_term(
    term: Annotated[str, completed(GLOSSARY)] = "",
    as_json: bool = False,
) -> None:
    """Say what a term means: goodput, EST, makespan, D1, ..."""
    shown_entries = entries(term) if term else GLOSSARY
    if as_json:
        print_json({"terms": shown_entries})
        return
    for name, text in shown_entries.items():
        out().print(f"{name}: {text}")


def entries(term: str) -> dict[str, str]:
    """Return the glossary's entries (text by term) for a word, in any case.

    Raises InputError, with the most similar term, if there are none.
    """
    asked_word = term.strip().lower()
    matches = {name: text for name, text in GLOSSARY.items() if asked_word in _lookup_words(name)}
    if not matches:
        raise InputError("TERM", f"unknown term {term[:60]!r}", did_you_mean(term[:60], GLOSSARY))
    return matches


def _lookup_words(name: str) -> set[str]:
    """Return the words, in lower case, by which a term of the glossary is found.

    "maxP (EST)" is found by itself, by "maxp" and by "est"; a term with commas also by each of its parts.
    """
    without_brackets = re.sub(r"\s*\([^)]*\)", "", name)
    bracketed = re.findall(r"\(([^)]*)\)", name)
    return {word.strip().lower() for word in (name, without_brackets, *without_brackets.split(","), *bracketed)}


# In kinds.toml a kind of document is a list: its form, what writes it, what reads it.
FILES, RESULTS = (
    [ListedKind(name=name, form=form, written_by=by, read_by=to) for name, (form, by, to) in kinds.items()]
    for kinds in tomllib.loads(Path(__file__).with_name("kinds.toml").read_text(encoding="utf-8")).values()
)
KINDS = {kind.name: kind for kind in (*FILES, *RESULTS)}
_FILE_MODELS: tuple[type[BaseModel], ...] = (
    *(GraphDocument, Goodput, Cluster, Job, JobState, Plan, Enforcement, TelemetryRow),
    *(CalibrationTable, DeviceTable, CompanionMeta, BalanceEvent),
)
_RESULT_MODELS = [
    model
    for module in (results, graph_results, island_results, simulation_results)
    for model in vars(module).values()
    if isinstance(model, type) and issubclass(model, results.Result)
]
MODELS: dict[str, type[BaseModel]] = {
    kind_of(model).removeprefix("ddltool."): model
    for model in (*_RESULT_MODELS, *_FILE_MODELS)
    if "kind" in model.model_fields
} | {"profile": ProfileRow}
"""By kind (without ``ddltool.``): the model that documents are checked against; for tables, the model of one row."""


def schema_of(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a kind of document (for tables: of one row), named with or without ``ddltool.``.

    Raises InputError, with the most similar kind, for an unknown one.
    """
    kind_name = kind.removeprefix("ddltool.")
    if kind_name not in KINDS:
        raise InputError("KIND", f"unknown kind {kind!r}", did_you_mean(kind_name, KINDS))
    if kind_name in MODELS:
        schema = MODELS[kind_name].model_json_schema()
    elif kind_name == "sync":
        # The rows are a union of several models.
        schema = {"title": "SyncRow", **TypeAdapter(SyncRow).json_schema()}
    else:  # a document that no command reads has no model: only the fields that all documents have are promised
        schema = {
            "title": kind_name,
            "description": f"Written by: {KINDS[kind_name].written_by}. Other fields are described on that command's page.",
            "type": "object",
            "properties": {"kind": {"const": f"ddltool.{kind_name}"}, "schema_version": {"const": 1}},
            "required": ["kind", "schema_version"],
        }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"ddltool.{kind_name}", **schema}


def show_schema(
    kind: Annotated[str, completed(KINDS)] = "",
    output: Path | None = None,
    as_json: bool = False,
) -> None:
    """Print the JSON Schema of a kind of document (of one row, for tables), or list the kinds."""
    if not kind:
        if output is not None:
            raise InputError("-o", "needs a kind", "name one, such as: ddltool show schema plan -o plan.schema.json")
        _list_kinds(as_json)
        return
    document = schema_of(kind)
    if output is not None:
        save(document, output)
    if output is None or as_json:
        print_json(document)


def _list_kinds(as_json: bool) -> None:
    """Print every kind of document with its form, its writers and its readers."""
    if as_json:
        print_json(KindsResult(kinds=list(KINDS.values())))
        return
    for title, kinds in (("Files", FILES), ("What commands print", RESULTS)):
        rows = [(kind.name, kind.form, kind.written_by, kind.read_by) for kind in kinds]
        out().print(table(title, ("kind", "form", "written by", "read by"), rows, text_columns=4))
