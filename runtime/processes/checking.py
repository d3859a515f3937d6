"""Compares a running job with a single process that trains by the same script. Start at :func:`begin_check`.

With ``DDLTOOL_CHECK=1`` rank 0 starts the same script once more, as a single process (the reference) to which the hook
gives whole batches. The two are compared by the gradients and learning rates at the start of each update, when
gradients have been averaged, clipped and unscaled. 40 updates are compared, or as many as are made in a minute, so that
an epoch's smaller last step, accumulation and a schedule's steps are among them if they come that soon. One line says
how far apart the two are, and which pattern in the script is the likely reason; the outcome is also kept in the config
that the script attached to. The job's own training is not changed, except that dropout is off on both sides meanwhile.
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
"""Variables that are set in the reference process: the folder for its gradients, and the job's number of ranks."""
LEAST_UPDATES, MOST_UPDATES = 3, 40
LONGEST_S = 60.0
"""After these seconds no further update is compared, once three are."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
HALF_TOLERANCE = 5e-2  # of all other types
# Differences of rounding grow as training goes on: up to DRIFT times the largest so far, and FURTHEST_DRIFT, is allowed.
# An error of the script shows at once, or gets larger than that.
DRIFT, FURTHEST_DRIFT = 100.0, 1e-2
PATIENCE_S, ENDING_S = 300.0, 5.0
"""Seconds that the job waits at its end for the reference's updates, and then for the reference to exit by itself."""
SMALL_MODEL = 100_000
"""Up to this many parameters all values of gradients are compared; in larger models, random sums of them."""
SUMS = 251
"""Number of sums that stand for a large gradient; prime, so that the columns of a matrix do not share a sum."""
# Prefixes of the variables that a launcher sets, which the reference must not inherit.
_LAUNCHER = ("TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "RANK", "WORLD_SIZE", "MASTER_", "DDLTOOL_CHECK")
Arrays = dict[str, NDArray[Any]]
Update = tuple[Arrays, list[float]]
"""The gradients and learning rates with which an update begins."""

log = logging.getLogger(__name__)


class CheckIsOver(SystemExit):
    """Exits a process that runs for the check only, with code 0, in mid-training.

    A script that catches it gets another one at the next update.
    """

    def __init__(self) -> None:
        super().__init__(0)


def is_set(name: str) -> bool:
    """Return whether the environment variable ``name`` is set to something else than "" and "0"."""
    return os.environ.get(name, "") not in ("", "0")


def is_reference() -> bool:
    """Return whether this process is a check's reference, which trains alone on whole batches."""
    return bool(os.environ.get(REFERENCE))


def begin_check(
    job: DistributedJob, model: nn.Module, *optimizers: torch.optim.Optimizer, path: str | None = None
) -> None:
    """Compare this run with a single process if DDLTOOL_CHECK asks for it and there are several ranks, else do nothing.

    All ranks call this, once the model is wrapped and before the first step; it registers hooks on the first optimizer,
    whose updates are compared, and rank 0 starts the reference. Learning rates are those of all ``optimizers``. The
    outcome is kept in the config ``path``; None: nowhere. In the reference itself, updates are written for the job.
    """
    if not is_reference() and not (is_set(CHECK) and job.world_size > 1):
        return
    run = _Reference(model, optimizers) if is_reference() else _Checked(job, model, optimizers, path)
    optimizers[0].register_step_pre_hook(run.before_update)
    optimizers[0].register_step_post_hook(run.after_update)


def note_unchecked(path: str, enforcement: Enforcement, job: DistributedJob) -> None:
    """Log a warning on rank 0 unless ``enforcement`` holds a check that proves this script equal to a single process.

    The check must be of the script's and the plan's present content. Nothing is logged for a single process, for code
    that is not in a file, and while a check runs. ``path``: the config's, for the message.
    """
    script = _script_sha256()
    proof = enforcement.checked
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
    """Return the SHA-256 (hexadecimal) of the script that runs; None if it is not in a file (a notebook's cell, ``-c``)."""
    try:
        return hashlib.sha256(Path(sys.argv[0]).read_bytes()).hexdigest()
    except OSError:
        return None


def _array(tensor: torch.Tensor, name: str, *, whole: bool) -> NDArray[Any]:
    """Return a tensor's values, float64 (n,), if ``whole``; otherwise SUMS sums of them with random signs, (SUMS,).

    Sums take the place of a large gradient, which would take long to write and compare.

    With independent signs, the expected square of a sum is the sum of the squared terms (Alon, Matias and Szegedy
    1996). So the norm of the SUMS sums is that of the tensor, within about 9 %. As sums are linear, the norm of the
    difference of two tensors' sums is that of the tensors' difference. The signs are seeded by ``name``, so that each
    process uses the same.
    """
    with torch.no_grad():
        flat = tensor.detach().reshape(-1)
        if whole:
            return flat.cpu().double().numpy().copy()
        signs = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        sums = torch.zeros(SUMS, dtype=torch.float64)
        for part in flat.split(SUMS << 12):  # a million values at a time, to bound the memory for signs and copies
            plus_or_minus_one = torch.randint(0, 2, part.shape, generator=signs) * 2 - 1
            signed = part.cpu().double() * plus_or_minus_one
            padded = functional.pad(signed, (0, -len(signed) % SUMS))  # with zeros, to a multiple of SUMS
            sums += padded.view(-1, SUMS).sum(0)
        return sums.numpy()


class _Recorded:
    """Reads gradients and learning rates at the start of this process's updates."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Name the parameters as in the bare model (without DDP's and compile's prefixes), and switch dropout off."""
        self._optimizers = optimizers
        names = (name.replace("_orig_mod.", "").removeprefix("module.") for name, _ in model.named_parameters())
        self._named_parameters = list(zip(names, model.parameters(), strict=True))
        self._sizes = {name: value.numel() for name, value in self._named_parameters}
        self._dropout = WithoutDropout(model)
        self._made = 0  # updates so far

    def arrays(self, tensors: Mapping[str, torch.Tensor]) -> Arrays:
        """Return the values of tensors by name; in a model of more than SMALL_MODEL parameters sums of them (:func:`_array`).

        All ranks call this together, because each may hold a part of a sharded tensor.
        """
        is_small = sum(self._sizes.values()) <= SMALL_MODEL
        arrays = {}
        for name, value in tensors.items():
            # A sharded tensor (DTensor) has `full_tensor`, which gathers it from all ranks; any other is whole already.
            gathered = value.full_tensor() if hasattr(value, "full_tensor") else value
            arrays[name] = _array(gathered, name, whole=is_small)
        return arrays

    def update(self) -> Update:
        """Return the present gradients (averaged by now) by parameter name, and all optimizers' learning rates by group.

        Parameters without a gradient are left out. All ranks call this together.
        """
        gradients = {name: value.grad for name, value in self._named_parameters if value.grad is not None}
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        return self.arrays(gradients), [float(group["lr"]) for group in groups if "lr" in group]


class _Reference(_Recorded):
    """The reference: it writes gradients and rates of each update to files, and exits after the last that is compared."""

    def before_update(self, *_: object) -> None:
        """Write the update's gradients and rates to ``<number>.npz`` in the folder that the job reads: the pre-step hook.

        Raises CheckIsOver where all updates are written (a script has caught the first one).
        """
        if self._made >= MOST_UPDATES:
            raise CheckIsOver
        path = Path(os.environ[REFERENCE], f"{self._made}.npz")
        gradients, rates = self.update()
        # Written under another name first, so that the job does not read half a file.
        with path.with_suffix(".new").open("wb") as file:
            named = {f"gradient {name}": value for name, value in gradients.items()}
            np.savez(file, allow_pickle=False, rates=np.array(rates), **named)
        path.with_suffix(".new").rename(path)

    def after_update(self, *_: object) -> None:
        """Count the update, and raise CheckIsOver after the last that is compared: the optimizer's post-step hook."""
        self._made += 1
        if self._made >= MOST_UPDATES:
            raise CheckIsOver


class _Outcome(NamedTuple):
    """The outcome of a check: ``equal`` (None: undecided), a line that explains it, and the number of updates compared."""

    equal: bool | None
    line: str
    updates: int = 0
    largest_difference: float = 0.0
    """Of a gradient, relative to the largest gradient of its update; NaN or infinite where gradients are."""

    @property
    def difference(self) -> float | None:
        """The largest relative difference of a gradient; None where it is not finite, which JSON cannot hold."""
        return self.largest_difference if math.isfinite(self.largest_difference) else None


class _Checked(_Recorded):
    """One rank of the job. Rank 0 compares with the reference: at an update if that is done by then, else at exit."""

    def __init__(
        self, job: DistributedJob, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], path: str | None
    ) -> None:
        """Start recording; rank 0 also starts the reference. ``path``: the config that keeps the outcome, or None."""
        super().__init__(model, optimizers)
        self._job = job
        self._model = model
        self._config = None if path is None else os.path.abspath(path)
        # Whether all updates that are compared were made; whether the outcome was printed, or is not this rank's to print.
        self._is_over = False
        self._told = job.rank != 0  # only rank 0 compares and prints
        self._tolerance = TOLERANCES.get(next(model.parameters()).dtype, HALF_TOLERANCE)
        self._updates: list[Update] = []
        self._unlike_ranks = ""
        """In words, which rank's parameters differ from rank 0's; "" if no rank's do."""
        # DDLTOOL_CHECK=end: the command that started this wants the outcome only, so training ends with the check.
        self._ends_process = os.environ[CHECK] == "end"
        self._begin_s = time.monotonic()
        if not self._told:
            self._start()

    def _start(self) -> None:
        """Start the script once more as the reference, which writes its updates into a temporary folder."""
        self._folder = tempfile.TemporaryDirectory(prefix="ddltool-check-")
        self._path = Path(self._folder.name)
        self._errors = (self._path / "stderr").open("w+b")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)}
        # A job of one process, at any free port.
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        alone |= {"MASTER_PORT": "0", REFERENCE: str(self._path), REFERENCE_RANKS: str(self._job.world_size)}
        self._child = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],  # with the interpreter's own options, such as -m
            env=environment | alone,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )
        atexit.register(self._finish)

    def before_update(self, *_: object) -> None:
        """Keep the update's gradients and rates, on rank 0 only: the optimizer's pre-step hook, on all ranks."""
        if not self._is_over:
            update = self.update()  # on all ranks, because it may gather sharded gradients
            if not self._told:
                self._updates.append(update)

    def after_update(self, *_: object) -> None:
        """Stop recording after the last update that is compared, and then print the outcome once the reference is done.

        The optimizer's post-step hook. All ranks agree on which update is the last. The ranks' parameters are compared
        with each other after update LEAST_UPDATES and after the last. Where only the outcome is wanted, this blocks for
        it and raises CheckIsOver.
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
                # The other ranks wait until rank 0 has printed: a launcher ends all with the first.
                self._job.gather(b"")
                raise CheckIsOver

    def _compare_ranks(self) -> str:
        """Return in words which rank's parameters differ from rank 0's, "" if none do; all ranks call this together.

        They differ if some value (or random sum) is further away than the tolerance, relative to the largest.
        """
        own_values = np.concatenate([*self.arrays(dict(self._named_parameters)).values()])
        first, *others = (np.frombuffer(values) for values in self._job.gather(own_values.tobytes()))
        largest = float(np.abs(first).max(initial=0.0)) or 1.0  # of rank 0; 1: no division by zero
        for rank, values in enumerate(others, 1):
            difference = float(np.abs(values - first).max(initial=0.0)) / largest
            if not difference <= self._tolerance:  # rather than ">", so that NaN counts as different
                return f"parameters of rank {rank} are {difference:.2g} away from rank 0's after update {self._made}"
        return ""

    def _written(self) -> int:
        """Return how many updates the reference has written so far."""
        return next(count for count in range(MOST_UPDATES + 1) if not (self._path / f"{count}.npz").exists())

    def _finish(self) -> None:
        """Print the outcome, once; this blocks until the reference has ended, and deletes its folder.

        The outcome is also written as JSON to the file in DDLTOOL_CHECK_RESULT, for the command that started the job,
        and, if decided, into the plan's config, with hashes of script and plan and the versions that it holds for.
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
        self._keep_proof(outcome)

    def _keep_proof(self, outcome: _Outcome) -> None:
        """Write a decided outcome into the plan's config, if the script attached to one; a failure is logged only."""
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
        except InputError as error:  # the outcome is printed already, so a config that cannot be written is no failure
            log.warning("the check is not kept: %s", error)

    def _outcome(self) -> _Outcome:
        """Wait for the reference, kill it if it does not end, and return how its updates compare with this job's.

        The outcome is undecided where the script failed, cannot run alone, or made too few updates. Where all compared
        updates are equal, the job still counts as different if some rank alone changes parameters, or if the reference
        has ended after fewer updates.
        """
        failed = getattr(sys, "last_value", None) is not None  # at exit: the exception that ended the script
        updates_wanted = len(self._updates)
        written, code = self._ended_reference(0 if failed else updates_wanted)
        if failed:
            return _Outcome(None, "undecided: the script failed")
        if code and written < updates_wanted:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines() or [f"exit code {code}"]
            return _Outcome(None, f"undecided: the script cannot run alone ({lines[-1]})")
        if min(written, updates_wanted) < LEAST_UPDATES:
            # The job ended early, or only the reference did.
            subject = "the script" if updates_wanted < LEAST_UPDATES else "the script alone"
            line = f"{subject} ended before update {LEAST_UPDATES}; let it make as many"
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

    def _ended_reference(self, updates_wanted: int) -> tuple[int, int | None]:
        """Wait until the reference has written ``updates_wanted`` updates, ends or takes too long, and see that it ends.

        Returns (number of updates that it has written; its exit code, None if it did not end and was killed).
        """
        deadline_s = self._begin_s + LONGEST_S + PATIENCE_S
        while self._child.poll() is None and time.monotonic() < deadline_s and self._written() < updates_wanted:
            time.sleep(0.02)
        if self._written() >= MOST_UPDATES:  # it ends by itself, unless the script catches CheckIsOver
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(ENDING_S)
        written = self._written()
        code = self._child.poll()
        if code is None:
            self._child.kill()
            self._child.wait()
        return written, code

    def _read(self, number: int) -> Update:
        """Return the update ``number``, from 0, that the reference has written."""
        with np.load(self._path / f"{number}.npz") as file:
            named = {key.removeprefix("gradient "): file[key] for key in file.files if key.startswith("gradient ")}
            return named, file["rates"].tolist()

    def _compared(self, expected: Sequence[Update]) -> _Outcome:
        """Return how this job's updates compare with the ``expected`` ones, which the reference has written.

        A gradient's difference is its root mean square over the largest root mean square of the update's gradients. It
        may be as large as the tolerance, or DRIFT times the largest of earlier updates, because training makes
        differences of rounding grow. The first update that differs more decides.
        """
        furthest = 0.0  # the largest difference of the updates so far
        has_gradients = False
        pairs = zip(self._updates, expected, strict=False)
        for number, ((own_gradients, rates), (expected_gradients, expected_rates)) in enumerate(pairs, 1):
            name, largest_difference = self._largest_difference(own_gradients, expected_gradients)
            allowed = max(self._tolerance, min(DRIFT * furthest, FURTHEST_DRIFT))
            if not largest_difference <= allowed:  # rather than ">", so that NaN counts as different
                line = f"gradients of step {number} differ by {largest_difference:.2g} from one process's, most in {name}: "
                line += _reason(self._model, own_gradients, expected_gradients)
                return _Outcome(False, line, number, largest_difference)
            furthest = max(furthest, largest_difference)
            has_gradients = has_gradients or bool(expected_gradients)
            if len(rates) != len(expected_rates) or not all(map(math.isclose, rates, expected_rates)):
                return _Outcome(False, _rates_apart(number, rates, expected_rates), number, furthest)
        if not has_gradients:
            return _Outcome(None, "undecided: no parameter has a gradient when updates begin (a closure makes them?)")
        line = f"gradients of {len(expected)} steps equal to {furthest:.0e} those of one process"
        return _Outcome(True, line, len(expected), furthest)

    def _largest_difference(self, own_gradients: Arrays, expected_gradients: Arrays) -> tuple[str, float]:
        """Return (name of the gradient of one update that differs most from the expected one, its relative difference).

        The difference is relative to the largest expected gradient, both by root mean square; a gradient that is missing
        counts as zeros, and a difference of NaN as the largest. Without expected gradients: ("", 0.0).
        """
        sizes = (self._mean_size(name, value) for name, value in expected_gradients.items())
        scale = max(sizes, default=0.0) or 1.0
        difference_by_name = {
            name: self._mean_size(name, own_gradients.get(name, np.zeros_like(value)) - value) / scale
            for name, value in expected_gradients.items()
        }
        name = max(
            difference_by_name,  # NaN counts as infinite: max() would pass it over
            key=lambda key: math.inf if math.isnan(difference_by_name[key]) else difference_by_name[key],
            default="",
        )
        return name, difference_by_name.get(name, 0.0)

    def _mean_size(self, name: str, array: NDArray[Any]) -> float:
        """Return the root mean square of the values of the parameter ``name``'s gradient.

        ``array`` holds the values, or sums of the same norm.
        """
        return float(np.linalg.norm(array)) / math.sqrt(max(self._sizes.get(name, array.size), 1))


def _reason(model: nn.Module, own_gradients: Arrays, expected_gradients: Arrays) -> str:
    """Return the likely reason why this job's gradients differ from the reference's, in words with a remedy.

    Both have the values by parameter name; the reference's are expected.

    The first that holds: all own gradients are one multiple of the expected ones (within a thousandth of the largest), a
    BatchNorm sees this rank's samples only, a gradient is missing; otherwise a list of what a loss term or random numbers
    may do.
    """
    ratio = _common_ratio(own_gradients, expected_gradients)
    if ratio is not None and abs(ratio - 1) > 1e-3:
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


def _common_ratio(own_gradients: Arrays, expected_gradients: Arrays) -> float | None:
    """Return the one number by which all own gradients are the expected ones multiplied; None if there is none.

    Gradients that only one side has are left out, and None is returned if they have none in common. A difference up to a
    thousandth of the largest gradient is allowed.
    """
    names = [name for name in expected_gradients if name in own_gradients]
    if not names:
        return None
    own = np.concatenate([own_gradients[name] for name in names])
    expected = np.concatenate([expected_gradients[name] for name in names])
    ratio = float(own @ expected / max(expected @ expected, 1e-300))  # by least squares; 1e-300: no division by 0
    is_common = np.abs(own - ratio * expected).max() < 1e-3 * np.abs(expected).max()
    return ratio if is_common else None


def _rates_apart(number: int, rates: Sequence[float], expected_rates: Sequence[float]) -> str:
    """Return in words how the learning ``rates`` of update ``number`` differ from the reference's, ``expected_rates``.

    Each has one rate for each parameter group of all optimizers; at least one differs.
    """
    if len(rates) != len(expected_rates):
        return f"step {number} has {len(rates)} learning rates, and {len(expected_rates)} in one process"
    own, expected = next(pair for pair in zip(rates, expected_rates, strict=True) if not math.isclose(*pair))
    remedy = "let it follow updates or epochs, not the number of ranks or of this rank's batches"
    return f"the learning rate of step {number} is {own:g}, and {expected:g} in one process: {remedy}"
