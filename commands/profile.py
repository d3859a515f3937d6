"""``ddltool profile SOURCE``: measure step times, synchronisation and memory on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ddltool.commands import profile_options as given
from ddltool.commands.options import Json, Output, Seed
from ddltool.commands.parts import demand_part, is_given
from ddltool.commands.values import as_options

if TYPE_CHECKING:
    from collections.abc import Mapping

_ALWAYS = {"output", "seed", "as_json"}
_ONE = _ALWAYS | {"source", "batch_sizes", "replicas"}
_PARTS = {
    "--network": _ALWAYS | {"network", "replicas"},
    "--watch": _ONE | {"watch", "cores"},
    "--import": _ALWAYS | {"imports", "device_name", "batch_sizes", "nodes", "replicas"},
    "": _ONE
    | {"accumulation", "device", "device_name", "precision", "budget", "repeats", "warmup"}
    | {"threads", "memory", "memory_gib", "resume"},
}
"""By mode (\"\": measuring), the parameters that it reads."""
_OPTIONS = {
    "batch sizes": "--batch-sizes",
    "replicas": "--replicas",
    "accumulation steps": "--accumulation",
    "warmup": "--warmup",
    "repeats": "--repeats",
    "precision": "--precision",
    "budget": "--budget",
}
"""What a request to measure calls these options in its errors."""


@as_options(_OPTIONS)
def profile(
    context: typer.Context,
    source: given.Source = None,
    batch_sizes: given.BatchSizes = "",
    replicas: given.Replicas = "",
    accumulation: given.Accumulation = "0",
    device: given.Device = "cpu",
    device_name: given.DeviceName = "",
    precision: given.Precision = "5%",
    budget: given.Budget = "",
    repeats: given.Repeats = None,
    warmup: given.Warmup = 2,
    threads: given.Threads = 0,
    memory: given.Memory = "",
    memory_gib: given.MemoryGib = None,
    resume: given.Resume = False,
    network: given.Network = False,
    watch: given.Watch = None,
    cores: given.Cores = "",
    imports: given.Imports = None,
    nodes: given.Nodes = None,
    output: Output = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Measure training steps here, or the network; watch workers; or import measurements."""
    from ddltool.commands import values
    from ddltool.commands.torchrun import one_voice
    from ddltool.errors import InputError
    from ddltool.outputs import demand_distinct

    # Long, but flat: it hands each mode its share of the options.
    demand_distinct(imports or [], {"-o": output})
    with one_voice():
        mode = _mode({"--network": network, "--watch": watch, "--import": imports})
        demand_part(context, mode or "measuring", _PARTS[mode])
        if is_given(context, "repeats") and is_given(context, "precision"):
            raise InputError(
                "--precision", "has no part beside --repeats, which takes its place", "give one of the two"
            )
        sizes = () if batch_sizes == "auto" else values.optional_integers(batch_sizes, "--batch-sizes")
        counts = values.optional_integers(replicas, "--replicas")
        subject = _subject(source, mode)
        if imports:
            from ddltool.commands.profile_import import profile_import

            size = values.single(sizes, batch_sizes, "--batch-sizes", "give the one size of the imported trace")
            count = values.single(counts, replicas, "--replicas", "give the one number of the imported trace")
            named = device_name or None
            profile_import(imports, output, as_json, device=named, batch_size=size, num_nodes=nodes, num_replicas=count)
        elif network:
            from ddltool.commands.network import profile_network

            profile_network(max((2, *(counts or ()))), output, as_json)
        elif watch:
            from ddltool.commands.watch import profile_watch

            size = values.single(
                sizes, batch_sizes, "--batch-sizes", "give the one size that every process trains with"
            )
            profile_watch(
                subject,
                batch=size or 8,
                workers=max(counts or (2,)),
                iterations=watch,
                cores=cores or None,
                seed=seed,
                output=output,
                as_json=as_json,
            )
        else:
            from ddltool.commands.profile_measure import MeasureOptions, Sampling, profile_model

            options = MeasureOptions(
                source=subject,
                batch_sizes=(1, 2, 4, 8) if sizes is None else sizes,
                replicas=counts or (),
                accumulation=values.integers(accumulation, "--accumulation", least=0),
                device=device,
                device_name=device_name or device,
                sampling=Sampling.read(precision=precision, budget=budget, repeats=repeats, warmup=warmup),
                threads=threads,
                memory=_memory(memory, memory_gib),
                resume=resume,
                seed=seed,
            )
            profile_model(options, output, as_json)


def _mode(asked: Mapping[str, object]) -> str:
    """Return the option of the one mode that is asked for, "" for measuring. Raises InputError for two."""
    from ddltool.errors import InputError

    modes = [name for name, on in asked.items() if on]
    if len(modes) > 1:
        raise InputError(modes[1], f"has no part in {modes[0]}", "give one of the two")
    return modes[0] if modes else ""


def _subject(source: str | None, mode: str) -> str:
    """Return the SOURCE to work on, "" in a mode without one. Raises InputError when it is missing."""
    from ddltool.errors import InputError

    if source is None and "source" in _PARTS[mode]:
        raise InputError("SOURCE", "is missing", "give a model, for example zoo:resnet32, or --network")
    return source or ""


def _memory(size: str, gib: float | None) -> str:
    """Return what --memory or --memory-gib says in the form of the first, "" without either.

    Raises InputError for both, and for no memory.
    """
    from ddltool.errors import InputError

    if gib is None:
        return size
    if size:
        raise InputError("--memory-gib", "says the same as --memory", "give one of them")
    if gib <= 0:
        raise InputError("--memory-gib", f"is {gib:g}", "give a number above 0")
    return f"{gib!r}GiB"
