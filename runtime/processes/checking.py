"""Compares a running job with a single process that trains by the same script. Start at :func:`begin_check`.

With ``DDLTOOL_CHECK=1`` rank 0 starts the same script once more, alone, where the hook hands out whole batches. It
compares the gradients and learning rates with which updates begin: by then gradients have been averaged, clipped and
unscaled. 40 updates are compared, or as many as a minute allows, so that an epoch's smaller last step, accumulation and
steps of a schedule are among them where they come that soon. One line says how far the two are apart, and which pattern
in the script is the likely reason; the config that the script attached to keeps it. The job's own training is not
changed, except that dropout lets everything pass on both sides meanwhile.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from ddltool import __version__
from ddltool.artifacts import load, save, write_text
from ddltool.errors import InputError
from ddltool.plans import Enforcement, ScriptProof
from ddltool.runtime.processes.job import DistributedJob
from ddltool.runtime.processes.without_dropout import WithoutDropout

CHECK, RESULT = "DDLTOOL_CHECK", "DDLTOOL_CHECK_RESULT"
REFERENCE, REFERENCE_RANKS = "DDLTOOL_CHECK_REFERENCE", "DDLTOOL_CHECK_RANKS"
"""Set in a process that a check has started, to train alone on whole batches: where its gradients go, and the job's ranks."""
LEAST_UPDATES, MOST_UPDATES = 3, 40
LONGEST_S = 60.0
"""After this, the third update is the last that is compared."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
HALF_TOLERANCE = 5e-2
# Rounding that differs is carried on by training, and grows; an error of the script comes at once, or gets this large.
DRIFT, FURTHEST_DRIFT = 100.0, 1e-2
PATIENCE_S, ENDING_S = 300.0, 5.0
"""How long the job waits for the other process's updates at its end, and for that process to end by itself."""
SMALL_MODEL = 100_000
"""Up to so many parameters gradients are compared as they are, beyond by sums."""
SUMS = 251
"""So many sums stand for a large gradient; prime, so that the columns of a matrix do not share a sum."""
# How the names of variables begin that a launcher sets, which the process that trains alone must not inherit.
_LAUNCHER = ("TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "RANK", "WORLD_SIZE", "MASTER_", "DDLTOOL_CHECK")
Arrays = dict[str, NDArray[Any]]
Update = tuple[Arrays, list[float]]
"""The gradients and learning rates with which an update begins."""

log = logging.getLogger(__name__)


class CheckIsOver(SystemExit):
    """Ends, in mid-training, a process that was started for the check alone; a script that catches it meets the next one."""

    def __init__(self) -> None:
        super().__init__(0)


def is_set(name: str) -> bool:
    """Return whether an environment variable is there, and neither empty nor 0."""
    return os.environ.get(name, "") not in ("", "0")


def is_reference() -> bool:
    """Return whether this process is the one that a check has started to train alone."""
    return bool(os.environ.get(REFERENCE))


def begin_check(
    job: DistributedJob, model: nn.Module, *optimizers: torch.optim.Optimizer, path: str | None = None
) -> None:
    """Compare this run with that of one process, where that was asked for; do nothing otherwise.

    All ranks call this, once the model is wrapped and before the first step. Updates are those of the first optimizer,
    learning rates those of all; the config ``path`` keeps the outcome. In the process that a check has started, record
    what the job compares with.
    """
    if not is_reference() and not (is_set(CHECK) and job.world_size > 1):
        return
    run = _Reference(model, optimizers) if is_reference() else _Checked(job, model, optimizers, path)
    optimizers[0].register_step_pre_hook(run.before_update)
    optimizers[0].register_step_post_hook(run.after_update)


def note_unchecked(path: str, enforcement: Enforcement, job: DistributedJob) -> None:
    """Log a line on rank 0 where this script, in this version, was not shown to train as one process would.

    Nothing is logged for one process alone, for code that is in no file, and while a check runs. ``path``: the
    config's, which holds the proof of the last check.
    """
    script, proof = _script_sha256(), enforcement.checked
    if job.rank > 0 or job.world_size == 1 or script is None or is_set(CHECK):
        return
    if proof is None:
        state = "was not checked against one process yet"
    elif (proof.script_sha256, proof.plan_sha256) != (script, enforcement.plan_sha256):
        state = "is another than was checked against one process"
    elif not proof.equal:
        state = "did not train as one process would when it was checked"
    else:
        return
    command = shlex.join(sys.argv).replace('"', '\\"')
    log.warning('%s: %s %s: ddltool doctor --check "%s"', path, os.path.basename(sys.argv[0]), state, command)


def _script_sha256() -> str | None:
    """Return the digest of the script that runs; None where it is in no file (a notebook's cell, ``-c``)."""
    try:
        return hashlib.sha256(Path(sys.argv[0]).read_bytes()).hexdigest()
    except OSError:
        return None


def _array(tensor: torch.Tensor, name: str, *, whole: bool) -> NDArray[Any]:
    """Return a tensor's values, float64 of shape (n,); unless ``whole``, sums of them with random signs, of shape (SUMS,).

    With independent signs, the expected square of a sum is the sum of the squares of what is added (Alon, Matias and
    Szegedy 1996). So the norm of (SUMS,) such sums is that of the tensor, give or take 9 %; as sums are linear, the
    norm of the difference of two tensors' sums is that of their difference. The signs follow from ``name``, so they are
    the same in each process.
    """
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        if whole:
            return flat.cpu().double().numpy().copy()
        signs = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        sums = torch.zeros(SUMS, dtype=torch.float64)
        for part in flat.split(SUMS << 12):
            signed = part.cpu().double() * (torch.randint(0, 2, part.shape, generator=signs) * 2 - 1)
            sums += functional.pad(signed, (0, -len(signed) % SUMS)).view(-1, SUMS).sum(0)
        return sums.numpy()


class _Recorded:
    """Reads the gradients and learning rates with which the first updates of this process begin."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Name the parameters as the bare model does, and let dropout pass everything."""
        self._optimizers = optimizers
        names = (name.replace("_orig_mod.", "").removeprefix("module.") for name, _ in model.named_parameters())
        self._named_parameters = list(zip(names, model.parameters(), strict=True))
        self._sizes = {name: value.numel() for name, value in self._named_parameters}
        self._dropout = WithoutDropout(model)
        self._made = 0  # updates so far

    def arrays(self, tensors: Mapping[str, torch.Tensor]) -> Arrays:
        """Return the values of tensors by name, in a large model sums of them (:func:`_array`).

        All ranks call this together, as each may hold a part of a sharded tensor.
        """
        is_small = sum(self._sizes.values()) <= SMALL_MODEL
        arrays = {}
        for name, value in tensors.items():
            # A sharded tensor (DTensor) has `full_tensor`, which gathers it from all ranks; any other is whole already.
            gathered = value.full_tensor() if hasattr(value, "full_tensor") else value
            arrays[name] = _array(gathered, name, whole=is_small)
        return arrays

    def update(self) -> Update:
        """Return the gradients, averaged by now, and all optimizers' learning rates, with which an update begins."""
        gradients = {name: value.grad for name, value in self._named_parameters if value.grad is not None}
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return self.arrays(gradients), [float(group["lr"]) for group in groups if "lr" in group]


class _Reference(_Recorded):
    """The process that trains alone: it writes down what each update begins with, and ends after the last that counts."""

    def before_update(self, *_: object) -> None:
        """Write an update's gradients and rates into the folder that the job reads: the optimizer's pre-step hook."""
        if self._made >= MOST_UPDATES:
            raise CheckIsOver
        path = Path(os.environ[REFERENCE], f"{self._made}.npz")
        gradients, rates = self.update()
        # Under another name first: the job must not read half a file.
        with path.with_suffix(".new").open("wb") as file:
            named = {f"gradient {name}": value for name, value in gradients.items()}
            np.savez(file, allow_pickle=False, rates=np.array(rates), **named)
        path.with_suffix(".new").rename(path)

    def after_update(self, *_: object) -> None:
        """End the process after the last update that is compared: the optimizer's post-step hook."""
        self._made += 1
        if self._made >= MOST_UPDATES:
            raise CheckIsOver


class _Outcome(NamedTuple):
    """The outcome of a check: ``equal`` (None: undecided), the line that says it, and the number of updates compared."""

    equal: bool | None
    line: str
    updates: int = 0
    largest_difference: float = 0.0

    @property
    def difference(self) -> float | None:
        """The largest relative difference of a gradient where it is a number, None where it is not finite."""
        return self.largest_difference if math.isfinite(self.largest_difference) else None


class _Checked(_Recorded):
    """One rank of the job. Rank 0 compares; it looks for the other process at updates, and waits for it at the end."""

    def __init__(
        self, job: DistributedJob, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], path: str | None
    ) -> None:
        """Begin to record; rank 0 also starts the script once more, alone."""
        super().__init__(model, optimizers)
        self._job, self._model = job, model
        self._config = None if path is None else os.path.abspath(path)
        # Whether all updates that are compared were made, and whether the outcome was printed: only rank 0 does so.
        self._is_over, self._told = False, job.rank != 0
        self._tolerance = TOLERANCES.get(next(model.parameters()).dtype, HALF_TOLERANCE)
        self._updates: list[Update] = []
        self._unlike_ranks = ""
        """In words, which rank's parameters are not rank 0's; "": none's."""
        # "end": the command that started this wants the outcome alone, so training ends with the check.
        self._ends_process, self._begin_s = os.environ[CHECK] == "end", time.monotonic()
        if not self._told:
            self._start()

    def _start(self) -> None:
        """Start the script once more, as a single process that trains alone and writes its updates into a folder."""
        self._folder = tempfile.TemporaryDirectory(prefix="ddltool-check-")
        self._path = Path(self._folder.name)
        self._errors = (self._path / "stderr").open("w+b")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)}
        place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        place |= {"MASTER_PORT": "0", REFERENCE: str(self._path), REFERENCE_RANKS: str(self._job.world_size)}
        self._child = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env=environment | place,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )
        atexit.register(self._finish)

    def before_update(self, *_: object) -> None:
        """Keep the gradients and rates with which an update begins: the optimizer's pre-step hook, on all ranks."""
        if not self._is_over:
            update = self.update()
            if not self._told:
                self._updates.append(update)

    def after_update(self, *_: object) -> None:
        """End the recording after the last update that is compared, and print the outcome once there is one.

        The optimizer's post-step hook. On the way, the ranks' parameters are compared twice. All ranks agree on which
        update is the last.
        """
        if self._is_over:
            if self._ends_process:
                raise CheckIsOver
            if not self._told and (self._child.poll() is not None or self._written() >= len(self._updates)):
                self._finish()
            return
        self._made += 1
        if self._made < LEAST_UPDATES:
            return
        is_last = self._made >= MOST_UPDATES or time.monotonic() - self._begin_s > LONGEST_S
        self._is_over = any(flag for (flag,) in self._job.numbers(float(is_last)))
        if self._is_over or self._made == LEAST_UPDATES:
            self._unlike_ranks = self._unlike_ranks or self._compare_ranks()
        if self._is_over:
            self._dropout.end()
            if self._ends_process:
                self._finish()
                self._job.gather(b"")
                raise CheckIsOver

    def _compare_ranks(self) -> str:
        """Return in words which rank's parameters are not rank 0's, "" for none's; all ranks call this together."""
        own_values = np.concatenate([*self.arrays(dict(self._named_parameters)).values()])
        first, *others = (np.frombuffer(values) for values in self._job.gather(own_values.tobytes()))
        largest = float(np.abs(first).max(initial=0.0)) or 1.0
        for rank, values in enumerate(others, 1):
            if not (difference := float(np.abs(values - first).max(initial=0.0)) / largest) <= self._tolerance:
                return f"parameters of rank {rank} are {difference:.2g} away from rank 0's after update {self._made}"
        return ""

    def _written(self) -> int:
        """Return how many updates the process that trains alone has written so far."""
        return next(count for count in range(MOST_UPDATES + 1) if not (self._path / f"{count}.npz").exists())

    def _finish(self) -> None:
        """Print the outcome, once; write it where the command that started this reads it, and into the plan's config.

        The config keeps a decided outcome as proof, with hashes of script and plan and the versions that it holds for.
        """
        if self._told:
            return
        self._told = True
        atexit.unregister(self._finish)
        outcome = self._outcome()
        sys.stderr.write(f"ddltool check: {outcome.line}\n")
        sys.stderr.flush()
        if target := os.environ.get(RESULT):
            answer = {"equal": bool(outcome.equal), "line": outcome.line, "updates": outcome.updates}
            if outcome.difference is not None:
                answer["largest_difference"] = outcome.difference
            write_text(Path(target), json.dumps(answer))
        with contextlib.suppress(OSError):
            self._errors.close()
            self._folder.cleanup()
        script = _script_sha256()
        if self._config is None or script is None or outcome.equal is None:
            return
        try:
            enforcement = load(self._config, Enforcement)
            proof = ScriptProof(
                script_sha256=script,
                plan_sha256=enforcement.plan_sha256,
                ddltool=__version__,
                torch=str(torch.__version__),
                updates=outcome.updates,
                largest_difference=outcome.difference,
                equal=outcome.equal,
            )
            save(enforcement.model_copy(update={"checked": proof}), self._config)
        except InputError as error:  # the answer is there, whether the file can keep it or not
            log.warning("the check is not kept: %s", error)

    def _outcome(self) -> _Outcome:
        """Wait for the process that trains alone, end it, and return whether its updates are those of this job.

        The outcome is undecided where the script failed, cannot run alone, or made too few updates. Where all compared
        updates are equal, it is still no if one rank alone changes parameters, or an epoch of one process has another
        length.
        """
        failed = getattr(sys, "last_value", None) is not None  # at exit: the exception that ended the script
        updates_wanted, deadline_s = len(self._updates), self._begin_s + LONGEST_S + PATIENCE_S

        def is_waiting() -> bool:
            """Return whether the other process still has updates to write, lives, and has time left."""
            is_running = self._child.poll() is None and time.monotonic() < deadline_s
            return not failed and is_running and self._written() < updates_wanted

        while is_waiting():
            time.sleep(0.02)
        if self._written() >= MOST_UPDATES:  # it ends by itself, where the script lets it
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(ENDING_S)
        written, code = self._written(), self._child.poll()
        if code is None:
            self._child.kill()
            self._child.wait()
        if failed:
            return _Outcome(None, "undecided: the script failed")
        if code and written < updates_wanted:
            self._errors.seek(0)
            last = (self._errors.read().decode(errors="replace").strip().splitlines() or [f"exit code {code}"])[-1]
            return _Outcome(None, f"undecided: the script cannot run alone ({last})")
        if min(written, updates_wanted) < LEAST_UPDATES:
            line = f"the script{' alone' * (updates_wanted >= LEAST_UPDATES)} ended before update {LEAST_UPDATES}"
            line += "; let it make as many"
            if code is None and updates_wanted >= LEAST_UPDATES:
                line = f"the script alone made fewer than {LEAST_UPDATES} updates within {PATIENCE_S:g} s"
            return _Outcome(None, f"undecided: {line}")
        outcome = self._compared([self._read(number) for number in range(min(written, updates_wanted))])
        if outcome.equal and self._unlike_ranks:
            line = f"{self._unlike_ranks}: something changes them on one rank alone (a load, a reset, an average of its own)"
            return outcome._replace(equal=False, line=line)
        if outcome.equal and code == 0 and written < updates_wanted:
            line = f"one process ended after {written} updates, this job made more: its epochs have other steps"
            return outcome._replace(equal=False, line=line)
        return outcome

    def _read(self, number: int) -> Update:
        """Return the update with this number, from 0, as the process that trains alone has written it."""
        with np.load(self._path / f"{number}.npz") as file:
            named = {key.removeprefix("gradient "): file[key] for key in file.files if key.startswith("gradient ")}
            return named, file["rates"].tolist()

    def _compared(self, expected: Sequence[Update]) -> _Outcome:
        """Return how this job's updates compare with the ``expected`` ones of one process.

        A difference may be as large as rounding, or larger where earlier updates had one too, as training carries it
        on.
        """
        furthest, has_gradients = 0.0, False
        pairs = zip(self._updates, expected, strict=False)
        for number, ((own_gradients, rates), (expected_gradients, expected_rates)) in enumerate(pairs, 1):
            sizes = (self._mean_size(name, value) for name, value in expected_gradients.items())
            scale = max(sizes, default=0.0) or 1.0
            difference_by_name = {
                name: self._mean_size(name, own_gradients.get(name, np.zeros_like(value)) - value) / scale
                for name, value in expected_gradients.items()
            }
            name = max(
                difference_by_name,
                key=lambda key: math.inf if math.isnan(difference_by_name[key]) else difference_by_name[key],
                default="",
            )
            largest_difference = difference_by_name.get(name, 0.0)
            if not largest_difference <= max(self._tolerance, min(DRIFT * furthest, FURTHEST_DRIFT)):
                line = f"gradients of step {number} differ by {largest_difference:.2g} from one process's, most in {name}: "
                line += _reason(self._model, own_gradients, expected_gradients)
                return _Outcome(False, line, number, largest_difference)
            furthest, has_gradients = max(furthest, largest_difference), has_gradients or bool(difference_by_name)
            if not np.allclose(rates, expected_rates, rtol=1e-9, atol=0.0):
                return _Outcome(False, _rates_apart(number, rates, expected_rates), number, furthest)
        if not has_gradients:
            return _Outcome(None, "undecided: no parameter has a gradient when updates begin (a closure makes them?)")
        line = f"gradients of {len(expected)} steps equal to {furthest:.0e} those of one process"
        return _Outcome(True, line, len(expected), furthest)

    def _mean_size(self, name: str, array: NDArray[Any]) -> float:
        """Return the root mean square of a gradient's values; ``array`` holds them, or sums that have the same norm."""
        return float(np.linalg.norm(array)) / math.sqrt(max(self._sizes.get(name, array.size), 1))


def _reason(model: nn.Module, own_gradients: Arrays, expected_gradients: Arrays) -> str:
    """Return the likely reason why this job's gradients are not one process's, in words with a remedy.

    Looked for in this order: all are a multiple of the others, a BatchNorm over the rank's own samples, a missing
    gradient, a term of the loss.
    """
    both = [(own_gradients[name], expected_gradients[name]) for name in expected_gradients if name in own_gradients]
    own, expected = (np.concatenate(parts) for parts in zip(*both, strict=True)) if both else (np.zeros(1), np.ones(1))
    ratio = float(own @ expected / max(expected @ expected, 1e-300))
    if abs(ratio - 1) > 1e-3 and np.abs(own - ratio * expected).max() < 1e-3 * np.abs(expected).max():
        return (
            f"all are {ratio:.3g} times as large, so the loss is no mean over what hook.loss was told: say "
            'hook.loss(loss, reduction="sum") or "average", or count='
        )
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training:
            return f"{name.removeprefix('module.')} is a BatchNorm over this rank's samples alone; use SyncBatchNorm"
    if missing := sorted(set(expected_gradients) - set(own_gradients)):
        return f"{missing[0]} has no gradient here"
    return (
        "a term of the loss is a mean over this rank's samples (weights over their mean, advantages less theirs, a mean "
        "that is detached, a part of the batch): take that mean over all ranks, or tell hook.loss what the loss counts; "
        "or random numbers in the forward pass or the data (draw none, or by sample), a loader that gives one process "
        "other samples, or another start of the model (seed it before it is made)"
    )


def _rates_apart(number: int, rates: Sequence[float], other: Sequence[float]) -> str:
    """Return in words how the learning rates of the update ``number`` differ from one process's (``other``)."""
    if len(rates) != len(other):
        return f"step {number} has {len(rates)} learning rates, and {len(other)} in one process"
    own, expected = next(pair for pair in zip(rates, other, strict=True) if not math.isclose(*pair))
    cause = "let it follow updates or epochs, not the number of ranks or of this rank's batches"
    return f"the learning rate of step {number} is {own:g}, and {expected:g} in one process: {cause}"
