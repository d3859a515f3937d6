"""Checkpoint files of elastic training: written atomically, checked when read, no pickled code. Start at :func:`write`.

A file is what ``torch.save`` makes of ``{"content": ..., "digest": ...}`` with a content of tensors, numbers, strings,
lists and dicts, and is read with ``weights_only=True``. The file before the last is kept as ``NAME.previous``.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from ddltool.errors import InputError
from ddltool.file_lock import try_lock
from ddltool.runtime.elastic.contexts import plain_name
from ddltool.runtime.hook.digests import digest, leaves

KIND = "elastic-checkpoint"
SCHEMA_VERSION = 1
READABLE = "keep to tensors, numbers, strings, lists and dicts in the states of optimizer and extras"
_PARTS = (
    *("settings", "environment", "position", "buckets", "parameters"),
    *("optimizer", "optimizer_class", "extras", "workers"),
)
_CONTINUED = "give the settings of the run that is continued"
_BUILD = "build the optimizer that was saved"
_WRITTEN = "give a checkpoint that ElasticTrainer.save wrote"
# What a learning-rate scheduler changes as it goes: there only the value that it started from is the user's choice.
_SCHEDULED = frozenset({"lr", "momentum", "betas"})

Stamp = tuple[int, int, int]
"""What tells one written file from the next: its inode, size and time of change."""


def environment(device: torch.device) -> dict[str, Any]:
    """Return what the bits of a run depend on besides the data and the code: all of it must be the same to continue."""
    device_type = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    )
    return {
        "device": f"{device.type} {device_type}",
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()),
    }


def content_digest(content: dict[str, Any]) -> str:
    """Return one fingerprint of everything in a checkpoint's content, names included."""
    hasher = hashlib.blake2b(digest_size=16)
    for name, leaf in leaves(content):
        value = digest(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf)
        hasher.update(f"{name}={value}\n".encode())
    return hasher.hexdigest()


def encode(path: str | os.PathLike[str], content: dict[str, Any]) -> bytes:
    """Return ``content`` as bytes. Raises InputError when it has objects that only pickle could bring back."""
    stream = io.BytesIO()
    try:
        torch.save(content, stream)
        decode(stream.getvalue())
    except Exception as error:  # pickle raises what the object's own code raises
        problem = f"what would be written cannot be read back ({type(error).__name__})"
        raise InputError(os.fspath(path), problem, READABLE) from None
    return stream.getvalue()


def decode(data: bytes) -> dict[str, Any]:
    """Return what :func:`encode` was given."""
    content: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return content


def previous(path: Path) -> Path:
    """Return where the checkpoint before the last is kept. Raises InputError for a path without a name."""
    if not path.name:
        raise InputError(f'"{path}"', "names no file", "give the path of a checkpoint")
    return path.with_name(path.name + ".previous")


def stamp(path: str | os.PathLike[str]) -> Stamp | None:
    """Return the stamp of the file at ``path``; None when there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def write(path: str | os.PathLike[str], content: dict[str, Any], last: Stamp | None = None) -> Stamp | None:
    """Replace the checkpoint at ``path``: whenever the process is killed, the old file or the new one is there, whole.

    What is written is read back before it takes the old file's place. Returns the new file's stamp; ``last`` is what this
    run got when it last wrote or read ``path``. Raises InputError when another run has written there since or is doing so,
    when the folder cannot be written to or is full, or when the content has objects that only pickle could bring back.
    """
    path = Path(path)
    now = stamp(path)
    if last is not None and now is not None and now != last:
        remedy = "end that run, or give this one a checkpoint of its own"
        raise InputError(str(path), "was written by another run in the meantime", remedy)
    older = previous(path)
    content = {"kind": KIND, "schema_version": SCHEMA_VERSION} | content
    # One name for all, so that what a killed process leaves is overwritten; the lock keeps two runs out of it.
    partial, spare = (path.with_name(f".{path.name}.partial{ending}") for ending in ("", ".previous"))
    try:
        with partial.open("ab") as file:
            if not try_lock(file.fileno()) or not _is_at(file.fileno(), partial):
                raise InputError(str(path), "is being written by another run", "give this one a checkpoint of its own")
            try:
                file.truncate(0)
                torch.save({"content": content, "digest": content_digest(content)}, file)
                file.flush()
                os.fsync(file.fileno())
                _demand_readable(path, partial)
                if now is not None:  # a second name first, then the switch: at no moment is `path` missing
                    spare.unlink(missing_ok=True)
                    os.link(path, spare)
                    os.replace(spare, older)
                    spare.unlink(missing_ok=True)  # two names of one file stay two
                os.replace(partial, path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
    except (OSError, RuntimeError) as error:  # torch tells a full disk by a RuntimeError
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        remedy = "check that the folder exists, is writable and has space"
        raise InputError(str(path), f"cannot be written ({reason})", remedy) from None
    with contextlib.suppress(OSError):  # some file systems cannot
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    return stamp(path)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether a name is still that of the open file: another run may have renamed it before it was locked."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _demand_readable(path: Path, partial: Path) -> None:
    try:
        _read_one(partial)
    except InputError as error:
        problem = f"what would be written cannot be read back ({error.problem})"
        raise InputError(str(path), problem, READABLE) from None


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a checkpoint's content; where the file is damaged, that of the one before it, with a warning.

    Raises InputError when there is none, or none that is whole and of a known version.
    """
    path = Path(path)
    older = previous(path)
    try:
        content = _read_one(path)
    except InputError as error:
        if not older.exists():
            raise
        content = _read_one(older)
        warnings.warn(f"{error}. Continuing from the checkpoint before it, {older}", stacklevel=2)
    found = content.get("kind"), content.get("schema_version")
    if found != (KIND, SCHEMA_VERSION):
        remedy = f"this program reads {KIND} of version {SCHEMA_VERSION}"
        raise InputError(str(path), f"is {found[0]} of version {found[1]}", remedy)
    return content


def _read_one(path: Path) -> dict[str, Any]:
    """Return the content of a whole file."""
    try:
        document = torch.load(path, map_location="cpu", weights_only=True)
        content: dict[str, Any] = document["content"]
        intact = isinstance(content, dict) and content_digest(content) == document["digest"]
    except FileNotFoundError:
        raise InputError(str(path), "no such file", "give the path of a checkpoint") from None
    except Exception as error:  # torch.load raises whatever the damage leads to
        raise InputError(str(path), f"is no checkpoint, or a damaged one ({type(error).__name__})", _WRITTEN) from None
    if not intact:
        raise InputError(str(path), "is damaged: its content is not what was written", "use an older checkpoint")
    return content


def _demand_equal(where: str, saved: Mapping[str, Any], present: Mapping[str, Any], remedy: str) -> None:
    """Raise InputError for the first field in which ``present`` is not what was ``saved``."""
    for name, value in present.items():
        if saved.get(name) != value:
            raise InputError(f"{where}:{name}", f"is {saved.get(name)} there and {value} here", remedy)


def _demand_same_optimizer(
    where: str, saved: Mapping[str, Any], saved_class: str, optimizer: torch.optim.Optimizer
) -> list[str]:
    """Check a saved state against ``optimizer`` before anything is loaded; return the options that have other values.

    Those (a learning rate, say) are continued with as saved. Raises InputError for another class of optimizer, other parameter
    groups or other options.
    """
    here_class = type(optimizer).__name__
    if saved_class != here_class:
        raise InputError(where, f"is {saved_class} there and {here_class} here", _BUILD)
    there, here = saved["param_groups"], optimizer.state_dict()["param_groups"]
    if len(there) != len(here):
        raise InputError(where, f"has {len(there)} parameter groups there and {len(here)} here", _BUILD)
    told = []
    for number, (one, other) in enumerate(zip(there, here, strict=True)):
        if len(one["params"]) != len(other["params"]):
            problem = f"has {len(one['params'])} parameters there and {len(other['params'])} here"
            raise InputError(f"{where}:group {number}", problem, _BUILD)
        # A scheduler adds names of its own, such as initial_lr, when it is made.
        if lacking := sorted(other.keys() - one.keys() - {"initial_lr"}):
            raise InputError(f"{where}:group {number}", f"has no {lacking[0]} there", _BUILD)
        chosen = (other.keys() & one.keys()) - {"params"} - (_SCHEDULED if "initial_lr" in one else set())
        told += [
            f"{name} of group {number} is {one[name]} there and {other[name]} here"
            for name in sorted(chosen)
            if one[name] != other[name]
        ]
    return told


def continued(
    path: str | os.PathLike[str],
    settings: Mapping[str, Any],
    device: torch.device,
    parameters: Mapping[str, torch.Tensor],
    extras: Collection[str],
    optimizer: torch.optim.Optimizer,
) -> tuple[dict[str, Any], list[str]]:
    """Return a checkpoint's content, and which options of the optimizer have other values there.

    Raises InputError unless a run of these settings, parameters and extras can continue it with equal bits.
    """
    content, where = read(path), os.fspath(path)
    if missing := [name for name in _PARTS if name not in content]:
        raise InputError(where, f"has no {missing[0]}", _WRITTEN)
    _demand_equal(where, content["settings"], settings, _CONTINUED)
    remedy = "equal bits need the same: torch.set_num_threads, torch's version, the type of device"
    _demand_equal(where, content["environment"], environment(device), remedy)
    saved = {name: _form(value) for name, value in content["parameters"].items()}
    present = {plain_name(name): _form(value) for name, value in parameters.items()}
    absent = dict.fromkeys(present | saved, "missing")
    _demand_equal(f"{where}:parameters", absent | saved, absent | present, "build the model that was saved")
    if missing := sorted(set(content["extras"]) ^ set(extras)):
        raise InputError(f"{where}:extras", f"{missing[0]} is only on one side", _CONTINUED)
    told = _demand_same_optimizer(f"{where}:optimizer", content["optimizer"], content["optimizer_class"], optimizer)
    return content, told


def _form(value: torch.Tensor) -> str:
    """Return a tensor's type and shape in words."""
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
