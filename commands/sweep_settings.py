"""What the figures of a sweep depend on, and whether a file of an earlier run was of the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddltool.analyzers.scheduling.simulator import Options
    from ddltool.analyzers.scheduling.sweep import Cell
    from ddltool.commands.workload_inputs import FittedText

# Settings that hold one value per file or application: a file of other ones may be taken up, not of changed ones.
_BY_NAME = ("workloads", "traces", "assumptions")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What all cells share."""

    cluster: Path
    traces: Sequence[Path]
    models: Sequence[FittedText]
    options: Options
    power: float
    prices: Mapping[str, float] | None


def settings_of(names: Mapping[str, Path], setup: Setup) -> dict[str, Any]:
    """Return what the figures depend on: file contents by their hash. Tells on stderr what fitted models assume.

    Raises InputError for what cannot be read.
    """
    from ddltool.artifacts import read_text
    from ddltool.commands.output import note
    from ddltool.commands.simulate_inputs import check_models, read_truth
    from ddltool.commands.workload_inputs import demand_workload
    from ddltool.commands.workloads import read_cluster, read_workload

    for path in names.values():
        demand_workload(path)
    jobs = [job for path in names.values() for job in read_workload(path)]
    read_cluster(setup.cluster)
    check_models(jobs, setup.models)
    assumed = read_truth(jobs, setup.traces, setup.models).assumed
    fitted = {model.application: model for model in setup.models}
    for text in assumed:
        note(text)
    return {
        "workloads": {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in names.items()},
        "cluster": hashlib.sha256(read_text(setup.cluster).encode()).hexdigest(),
        "traces": {
            name: _model_hash(fitted[name]) if name in fitted else _traces_hash(setup.traces, name)
            for name in sorted({job.application for job in jobs})
        },
        "options": asdict(setup.options),
        "power": setup.power,
        **({"prices_per_gpu_hour": dict(setup.prices)} if setup.prices is not None else {}),
        **({"assumptions": dict(zip(fitted, assumed, strict=True))} if fitted else {}),
    }


def _model_hash(model: FittedText) -> str:
    """Return the hash of a fitted model and of what was said about its job."""
    return hashlib.sha256(f"{model.fields}:".encode() + Path(model.file).read_bytes()).hexdigest()


def _traces_hash(traces: Sequence[Path], application: str) -> str:
    """Return the hash of all that the folders hold of one application."""
    digest = hashlib.sha256()
    for folder in traces:
        for path in sorted((folder / application).glob("*.csv")):
            content = path.read_bytes()
            digest.update(f"{path.name}:{len(content)}:".encode() + content)
    return digest.hexdigest()


def earlier_cells(output: Path | None, settings: dict[str, Any]) -> dict[Cell, dict[str, Any]]:
    """Return the cells of an earlier run with these settings, and add to ``settings`` the files that only it had."""
    from ddltool.analyzers.scheduling.sweep import finished
    from ddltool.artifacts import read_document
    from ddltool.errors import InputError

    if output is None or not output.is_file() or output.stat().st_size == 0:
        return {}
    found = read_document(output)
    remedy = "give a new file name, or remove it"
    if found.get("kind") != "ddltool.sweep" or not isinstance(found.get("cells"), list):
        raise InputError(str(output), "is there and is no sweep", remedy)
    old = found.get("settings")
    if not isinstance(old, dict):
        raise InputError(f"{output}:settings", "are missing", remedy)
    # Through JSON, as the file has gone: tuples and integers look alike on both sides.
    new = json.loads(json.dumps(settings))
    for name in {**new, **old}:
        value, known = new.get(name), old.get(name)
        if name not in _BY_NAME:
            if known != value:
                raise InputError(f"{output}:settings.{name}", "is not that of this sweep", remedy)
            continue
        if name == "assumptions":  # not there without fitted models
            value, known = value or {}, known or {}
        if not (isinstance(known, dict) and all(isinstance(each, str) for each in known.values())):
            raise InputError(f"{output}:settings.{name}", "is missing", remedy)
        changed = [key for key in value if known.get(key, value[key]) != value[key]]
        if changed:
            raise InputError(f"{output}:settings.{name}.{changed[0]}", "has changed since", remedy)
        settings[name] = {**known, **value}
    return finished(found["cells"], str(output))
