"""Checkpoint files of elastic training: written atomically, checked when read, no pickled code. Start at :func:`write`.

A file is what ``torch.save`` makes of ``{"content": ..., "digest": ...}``. The content consists of tensors, numbers,
strings, lists and dicts, so that ``weights_only=True`` reads it. The checkpoint that it replaces stays as
``NAME.previous``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from ddltool.artifacts import demand_file
from ddltool.errors import InputError
from ddltool.runtime.elastic.contexts import plain_name
from ddltool.runtime.processes.digests import digest, leaves

KIND = "elastic-checkpoint"
SCHEMA_VERSION = 1
READABLE = "keep to tensors, numbers, strings, lists and dicts in the states of optimizer and extras"
_CONTENT_FIELDS = (
    *("settings", "environment", "position", "buckets", "parameters"),
    *("optimizer", "optimizer_class", "extras", "workers"),
)
_SAME_SETTINGS = "give the settings of the run that is continued"
_SAME_OPTIMIZER = "build the optimizer that was saved"
_GIVE_CHECKPOINT = "give a checkpoint that ElasticTrainer.save wrote"
# Options that a learning-rate scheduler changes: with a scheduler, saved and present values may differ.
_SCHEDULED = frozenset({"lr", "momentum", "betas"})

# Errors of a file system that has no locks.
_NO_LOCK_ERRORS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}

Stamp = tuple[int, int, int]
"""Inode, size and modification time (ns) of a file: they differ between any two checkpoints written."""


def environment(device: torch.device) -> dict[str, Any]:
    """Return the settings of ``device`` and torch on which the bits of a run depend, by name: "threads" and so on."""
    is_cuda = device.type == "cuda"
    device_type = torch.cuda.get_device_name(device) if is_cuda else torch.backends.cpu.get_cpu_capability()
    return {
        "device": f"{device.type} {device_type}",
        "torch": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "default_dtype": str(torch.get_default_dtype()),
    }


def content_digest(content: dict[str, Any]) -> str:
    """Return the digest of a checkpoint's whole content, names included, as 32 hexadecimal digits."""
    hasher = hashlib.blake2b(digest_size=16)
    for name, leaf in leaves(content):
        value = digest(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf)
        hasher.update(f"{name}={value}\n".encode())
    return hasher.hexdigest()


def encode(path: str | os.PathLike[str], content: dict[str, Any]) -> bytes:
    """Return ``content`` as bytes that :func:`decode` reads, to send it to another process.

    Raises InputError when it has objects that only pickle could restore; ``path``: the checkpoint, for the message.
    """
    stream = io.BytesIO()
    try:
        torch.save(content, stream)
        decode(stream.getvalue())
    except Exception as error:  # pickle raises whatever an object's own code raises
        problem = f"what would be written cannot be read back ({type(error).__name__})"
        raise InputError(os.fspath(path), problem, READABLE) from None
    return stream.getvalue()


def decode(data: bytes) -> dict[str, Any]:
    """Return the content that :func:`encode` has encoded."""
    content: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return content


def previous(path: Path) -> Path:
    """Return where the checkpoint that ``path`` replaced is kept: ``NAME.previous``. Raises InputError without a file name."""
    if not path.name:
        raise InputError(f'"{path}"', "names no file", "give the path of a checkpoint")
    return path.with_name(path.name + ".previous")


def stamp(path: str | os.PathLike[str]) -> Stamp | None:
    """Return the stamp of the file at ``path``; None if it cannot be found."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def write(path: str | os.PathLike[str], content: dict[str, Any], last: Stamp | None = None) -> Stamp | None:
    """Replace the checkpoint at ``path`` atomically, and return the new file's stamp.

    A killed process leaves the whole old file or the whole new one. The new file is read back before it replaces the
    old one, which stays as ``NAME.previous``.

    Args:
        path: the checkpoint.
        content: what is saved, by name: tensors, numbers, strings, lists and dicts.
        last: the stamp that this run got when it last read or wrote ``path``; None: it has done neither.

    Raises InputError when another run has written there since or is writing, when ``path`` is a folder, a pipe or a
    device, when the folder is not writable or full, or when the content has objects that only pickle could restore.
    """
    path = Path(path)
    for replaced in (path, previous(path)):
        demand_file(replaced)
    # Refuse to replace what another run has written.
    present = stamp(path)
    if last is not None and present is not None and present != last:
        remedy = "end that run, or give this one a checkpoint of its own"
        raise InputError(str(path), "was written by another run in the meantime", remedy)
    content = {"kind": KIND, "schema_version": SCHEMA_VERSION} | content
    # The same name in every run, so that leftovers of a killed process are overwritten; the lock keeps other runs out.
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("ab") as file:
            if not _try_lock(file.fileno()) or not _is_named(file.fileno(), partial):
                raise InputError(str(path), "is being written by another run", "give this one a checkpoint of its own")
            try:
                file.truncate(0)
                torch.save({"content": content, "digest": content_digest(content)}, file)
                file.flush()
                os.fsync(file.fileno())
                _demand_readable(path, partial)
                if present is not None:
                    _keep_previous(path)
                os.replace(partial, path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
    except (OSError, RuntimeError) as error:  # torch reports a full disk by a RuntimeError
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        remedy = "check that the folder exists, is writable and has space"
        raise InputError(str(path), f"cannot be written ({reason})", remedy) from None
    _sync_folder(path.parent)
    return stamp(path)


def _sync_folder(folder: Path) -> None:
    """Make the names of new files in ``folder`` durable, if the file system can do that for a folder."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _keep_previous(path: Path) -> None:
    """Give the checkpoint at ``path`` the second name ``NAME.previous``, in place of an earlier one of that name.

    It keeps its own name, so ``path`` always exists.
    """
    spare = path.with_name(f".{path.name}.partial.previous")
    spare.unlink(missing_ok=True)
    os.link(path, spare)
    os.replace(spare, previous(path))
    spare.unlink(missing_ok=True)  # os.replace does nothing, and leaves it, where both names are of the same file


def _try_lock(descriptor: int) -> bool:
    """Lock an open file until it is closed or the process ends; return whether that worked: another may have locked it.

    Returns True where the file system has no locks: refusing to write there would be worse than missing another run.
    Raises OSError when the disk fails.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCK_ERRORS:
            raise
    return True


def _is_named(descriptor: int, path: Path) -> bool:
    """Return whether ``path`` still names the open file; another run may have renamed it before it was locked here."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _demand_readable(path: Path, partial: Path) -> None:
    """Raise InputError, naming ``path``, unless ``partial``, the file to replace it, can be read as a checkpoint."""
    try:
        _read_file(partial)
    except InputError as error:
        problem = f"what would be written cannot be read back ({error.problem})"
        raise InputError(str(path), problem, READABLE) from None


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a checkpoint's content; if it is missing or damaged, that of ``NAME.previous``, with a warning.

    Raises InputError when neither file is an intact checkpoint, and for one of another kind or version.
    """
    path = Path(path)
    older = previous(path)
    try:
        content = _read_file(path)
    except InputError as error:
        if not older.exists():
            raise
        content = _read_file(older)
        warnings.warn(f"{error}. Continuing from the checkpoint before it, {older}", stacklevel=2)
    kind = content.get("kind")
    version = content.get("schema_version")
    if (kind, version) != (KIND, SCHEMA_VERSION):
        remedy = f"this program reads {KIND} of version {SCHEMA_VERSION}"
        raise InputError(str(path), f"is {kind} of version {version}", remedy)
    return content


def _read_file(path: Path) -> dict[str, Any]:
    """Return the content of one checkpoint file. Raises InputError when it is missing, unreadable or altered."""
    try:
        document = torch.load(path, map_location="cpu", weights_only=True)
        content: dict[str, Any] = document["content"]
        intact = isinstance(content, dict) and content_digest(content) == document["digest"]
    except FileNotFoundError:
        raise InputError(str(path), "no such file", "give the path of a checkpoint") from None
    except Exception as error:  # torch.load raises whatever the damage leads to
        problem = f"is no checkpoint, or a damaged one ({type(error).__name__})"
        raise InputError(str(path), problem, _GIVE_CHECKPOINT) from None
    if not intact:
        raise InputError(str(path), "is damaged: its content is not what was written", "use an older checkpoint")
    return content


def _demand_equal(where: str, saved: Mapping[str, Any], present: Mapping[str, Any], remedy: str) -> None:
    """Raise InputError for the first field of this job (``present``) whose value differs in the checkpoint (``saved``).

    A field that the checkpoint lacks counts as None. ``where``: the file and the part of it, for the message, which ends in
    ``remedy``.
    """
    for name, value in present.items():
        if saved.get(name) != value:
            raise InputError(f"{where}:{name}", f"is {saved.get(name)} there and {value} here", remedy)


def _demand_same_optimizer(
    where: str, saved: Mapping[str, Any], saved_class: str, optimizer: torch.optim.Optimizer
) -> list[str]:
    """Check the saved state of an optimizer against ``optimizer``; return in words each option whose value differs.

    Such a difference (say, of a learning rate) is allowed: the saved value will be used. Raises InputError for another
    class of optimizer, for parameter groups of other number or size, and for an option that the saved state lacks.
    """
    present_class = type(optimizer).__name__
    if saved_class != present_class:
        raise InputError(where, f"is {saved_class} there and {present_class} here", _SAME_OPTIMIZER)
    saved_groups = saved["param_groups"]
    groups = optimizer.state_dict()["param_groups"]
    if len(saved_groups) != len(groups):
        problem = f"has {len(saved_groups)} parameter groups there and {len(groups)} here"
        raise InputError(where, problem, _SAME_OPTIMIZER)
    differences = []
    for index, (saved_group, group) in enumerate(zip(saved_groups, groups, strict=True)):
        if len(saved_group["params"]) != len(group["params"]):
            problem = f"has {len(saved_group['params'])} parameters there and {len(group['params'])} here"
            raise InputError(f"{where}:group {index}", problem, _SAME_OPTIMIZER)
        # A scheduler adds options of its own, such as initial_lr, when it is made.
        if lacking := sorted(group.keys() - saved_group.keys() - {"initial_lr"}):
            raise InputError(f"{where}:group {index}", f"has no {lacking[0]} there", _SAME_OPTIMIZER)
        scheduled = _SCHEDULED if "initial_lr" in saved_group else frozenset()
        differences += [
            f"{name} of group {index} is {saved_group[name]} there and {group[name]} here"
            for name in sorted((group.keys() & saved_group.keys()) - {"params"} - scheduled)
            if saved_group[name] != group[name]
        ]
    return differences


def read_matching(
    path: str | os.PathLike[str],
    settings: Mapping[str, Any],
    device: torch.device,
    parameters: Mapping[str, torch.Tensor],
    extras: Collection[str],
    optimizer: torch.optim.Optimizer,
) -> tuple[dict[str, Any], list[str]]:
    """Return (a checkpoint's content, in words each option of the optimizer whose saved value differs).

    Raises InputError unless the run that the other arguments describe can continue it with equal bits. A differing option is
    no error, because the saved value is continued with.

    Args:
        path: the checkpoint.
        settings: the settings of the present run, by name, as :class:`~.settings.RunSettings` has them.
        device: where the run's model is.
        parameters: the trained parameters of model, loss and optimizer, by name.
        extras: names of the further objects whose states the run saves, such as a learning-rate scheduler.
        optimizer: the run's optimizer.
    """
    content = read(path)
    where = os.fspath(path)
    if missing := [name for name in _CONTENT_FIELDS if name not in content]:
        raise InputError(where, f"has no {missing[0]}", _GIVE_CHECKPOINT)
    _demand_equal(where, content["settings"], settings, _SAME_SETTINGS)
    remedy = "equal bits need the same: torch.set_num_threads, torch's version, the type of device"
    _demand_equal(where, content["environment"], environment(device), remedy)
    saved_parameters = {name: _dtype_and_shape(value) for name, value in content["parameters"].items()}
    present_parameters = {plain_name(name): _dtype_and_shape(value) for name, value in parameters.items()}
    # Parameters of one side alone count as "missing" on the other, so that they differ.
    all_missing = dict.fromkeys(present_parameters | saved_parameters, "missing")
    saved_or_missing = all_missing | saved_parameters
    present_or_missing = all_missing | present_parameters
    _demand_equal(f"{where}:parameters", saved_or_missing, present_or_missing, "build the model that was saved")
    if unmatched := sorted(set(content["extras"]) ^ set(extras)):
        raise InputError(f"{where}:extras", f"{unmatched[0]} is only on one side", _SAME_SETTINGS)
    saved = content["optimizer"]
    saved_class = content["optimizer_class"]
    return content, _demand_same_optimizer(f"{where}:optimizer", saved, saved_class, optimizer)


def _dtype_and_shape(value: torch.Tensor) -> str:
    """Return a tensor's data type and shape as text, such as ``float32 (8, 3)``."""
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
