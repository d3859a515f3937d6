"""Checkpoint files of elastic training: written atomically, checked when read, no pickled code. Start at :func:`write`.

A file is what ``torch.save`` makes of ``{"content": ..., "digest": ...}`` with a content of tensors, numbers, strings,
lists and dicts, and is read with ``weights_only=True``. The file before the last is kept as ``NAME.previous``.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ddltool.errors import InputError
from ddltool.file_lock import try_lock
from ddltool.runtime.elastic.digests import digest, leaves

KIND = "elastic-checkpoint"
SCHEMA_VERSION = 1
READABLE = "keep to tensors, numbers, strings, lists and dicts in the states of optimizer and extras"
_BUILD = "build the optimizer that was saved"
# What a learning-rate scheduler changes as it goes: there only the value that it started from is the user's choice.
_SCHEDULED = frozenset({"lr", "momentum", "betas"})


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


def plain_name(name: str) -> str:
    """Return a parameter's or buffer's name without what ``torch.compile`` puts before it."""
    return name.replace("_orig_mod.", "")


def uncompiled(content: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's content with plain names, so that it fits the model compiled and as it is."""
    buckets = content["buckets"] and [[plain_name(name) for name in bucket] for bucket in content["buckets"]]
    workers = [worker | {"buffers": _plain(worker["buffers"])} for worker in content["workers"]]
    return content | {"parameters": _plain(content["parameters"]), "buckets": buckets, "workers": workers}


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {plain_name(name): value for name, value in values.items()}


def encode(content: dict[str, Any]) -> bytes:
    """Return ``content`` as bytes, for another process."""
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def encode_readable(path: str | os.PathLike[str], content: dict[str, Any]) -> bytes:
    """Return ``content`` as :func:`encode` does. Raises InputError when it has objects that only pickle could bring back."""
    try:
        data = encode(content)
        decode(data)
    except Exception as error:  # pickle raises what the object's own code raises
        problem = f"what would be written cannot be read back ({type(error).__name__})"
        raise InputError(os.fspath(path), problem, READABLE) from None
    return data


def decode(data: bytes) -> dict[str, Any]:
    """Return what :func:`encode` was given."""
    content: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return content


def previous(path: Path) -> Path:
    """Return where the checkpoint before the last is kept."""
    return path.with_name(_named(path) + ".previous")


Stamp = tuple[int, int, int]
"""What tells one written file from the next: its inode, size and time of change."""


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
    run got when it last wrote or read ``path``. Raises InputError when another run has written there since, when the
    folder cannot be written to or is full, or when the content has objects that only pickle could bring back.
    """
    path = Path(path)
    _demand_own(path, last)
    content = {"kind": KIND, "schema_version": SCHEMA_VERSION} | content
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{_named(path)}.", suffix=".partial", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            with contextlib.suppress(OSError):  # a checkpoint without a lock is better than none
                try_lock(descriptor)  # so that nobody takes it for a leftover
            torch.save({"content": content, "digest": content_digest(content)}, file)
            file.flush()
            os.fsync(file.fileno())
            _demand_readable(path, Path(temporary))
            if path.exists():  # a second name first, then the switch: at no moment is `path` missing
                spare = Path(temporary + ".previous")
                os.link(path, spare)
                os.replace(spare, previous(path))
            os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch tells a full disk by a RuntimeError
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        remedy = "check that the folder exists, is writable and has space"
        raise InputError(str(path), f"cannot be written ({reason})", remedy) from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
    _sync_folder(path.parent)
    _remove_leftovers(path)
    return stamp(path)


def _demand_own(path: Path, last: Stamp | None) -> None:
    """Raise InputError when the file is not the one that this run left: two runs would overwrite each other's."""
    now = stamp(path)
    if last is not None and now is not None and now != last:
        remedy = "end that run, or give this one a checkpoint of its own"
        raise InputError(str(path), "was written by another run in the meantime", remedy)


def _named(path: Path) -> str:
    """Return the file's name. Raises InputError for a path without one."""
    if not path.name:
        raise InputError(f'"{path}"', "names no file", "give the path of a checkpoint")
    return path.name


def _demand_readable(path: Path, temporary: Path) -> None:
    try:
        _read_one(temporary)
    except InputError as error:
        problem = (
            f"what would be written cannot be read back ({str(error).removeprefix(error.where + ': ').split(';')[0]})"
        )
        raise InputError(str(path), problem, READABLE) from None


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # some file systems cannot
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_leftovers(path: Path) -> None:
    """Remove the temporary files of processes that were killed while they wrote this checkpoint."""
    own = re.compile(rf"\.{re.escape(path.name)}\.[a-z0-9_]{{8}}\.partial(\.previous)?")
    for entry in path.parent.iterdir():
        if own.fullmatch(entry.name) and not _being_written(entry.with_name(entry.name.removesuffix(".previous"))):
            entry.unlink(missing_ok=True)


def _being_written(partial: Path) -> bool:
    """Return whether a process is writing this temporary file."""
    try:
        with partial.open("rb") as file:
            return not try_lock(file.fileno())
    except OSError:
        return False


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a checkpoint's content; where the file is damaged, that of the one before it, with a warning.

    Raises InputError when there is none, or none that is whole and of a known version.
    """
    path = Path(path)
    older = previous(path)
    try:
        return _read_one(path)
    except _OtherVersion:
        raise
    except InputError as error:
        if not older.exists():
            raise
        content = _read_one(older)
        warnings.warn(f"{error}. Continuing from the checkpoint before it, {older}", stacklevel=2)
        return content


class _OtherVersion(InputError):
    """A whole file that another version wrote: an older one beside it would be no remedy."""


def _read_one(path: Path) -> dict[str, Any]:
    try:
        document = torch.load(path, map_location="cpu", weights_only=True)
        content, written = document["content"], document["digest"]
        intact = isinstance(content, dict) and content_digest(content) == written
    except FileNotFoundError:
        raise InputError(str(path), "no such file", "give the path of a checkpoint") from None
    except Exception as error:  # torch.load raises whatever the damage leads to
        problem = f"is no checkpoint, or a damaged one ({type(error).__name__})"
        raise InputError(str(path), problem, "give a checkpoint that ElasticTrainer.save wrote") from None
    if not intact:
        raise InputError(str(path), "is damaged: its content is not what was written", "use an older checkpoint")
    if (content.get("kind"), content.get("schema_version")) != (KIND, SCHEMA_VERSION):
        problem = f"is {content.get('kind')} of version {content.get('schema_version')}"
        raise _OtherVersion(str(path), problem, f"this program reads {KIND} of version {SCHEMA_VERSION}")
    result: dict[str, Any] = content
    return result


def demand_equal(path: str | os.PathLike[str], saved: dict[str, Any], present: dict[str, Any], remedy: str) -> None:
    """Raise InputError for the first field in which ``present`` is not what was ``saved``."""
    for name, value in present.items():
        if saved.get(name) != value:
            raise InputError(f"{os.fspath(path)}:{name}", f"is {saved.get(name)} there and {value} here", remedy)


def demand_same_optimizer(
    path: str | os.PathLike[str], saved: Mapping[str, Any], saved_class: str | None, optimizer: torch.optim.Optimizer
) -> str | None:
    """Check a saved state against ``optimizer`` before anything is loaded; return what is to be told, or None.

    Other values of an option (a learning rate, say) are told: the saved ones are continued with. Raises InputError for
    another class of optimizer (``saved_class``; None: not recorded), other parameter groups or other options.
    """
    where = f"{os.fspath(path)}:optimizer"
    here_class = type(optimizer).__name__
    if saved_class not in (None, here_class):
        raise InputError(where, f"is {saved_class} there and {here_class} here", _BUILD)
    there, here = saved["param_groups"], optimizer.state_dict()["param_groups"]
    if len(there) != len(here):
        raise InputError(where, f"has {len(there)} parameter groups there and {len(here)} here", _BUILD)
    told = []
    for number, (one, other) in enumerate(zip(there, here, strict=True)):
        group = f"{where}:group {number}"
        if len(one["params"]) != len(other["params"]):
            problem = f"has {len(one['params'])} parameters there and {len(other['params'])} here"
            raise InputError(group, problem, _BUILD)
        # A scheduler adds names of its own, such as initial_lr, when it is made.
        if lacking := sorted(other.keys() - one.keys() - {"initial_lr"}):
            raise InputError(group, f"has no {lacking[0]} there", _BUILD)
        compared = other.keys() & one.keys() - {"params"}
        if "initial_lr" in one:
            compared -= _SCHEDULED
        told += [
            f"{name} of group {number} is {one[name]} there and {other[name]} here"
            for name in sorted(compared)
            if one[name] != other[name]
        ]
    return f"{where}: {'; '.join(told)}; the saved values are continued with" if told else None
