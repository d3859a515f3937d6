"""Does this run compute what a single process would? Start at :func:`begin_check`.

With ``DDLTOOL_CHECK=1`` rank 0 starts the same script once more, alone, where the hook hands out whole batches, and compares
the gradients of the first updates: by then they have been averaged, clipped and unscaled. One line says how far they are
apart, and which pattern in the script is the likely reason. Nothing of the job's own training is changed, but that dropout
lets everything pass on both sides, for it would draw other numbers.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ddltool.artifacts import write_text
from ddltool.runtime.hook.job import REFERENCE, DistributedJob, is_reference, is_set

CHECK, RESULT = "DDLTOOL_CHECK", "DDLTOOL_CHECK_RESULT"
UPDATES = 3
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
HALF_TOLERANCE = 5e-2
PATIENCE_S = 300.0
_LAUNCHER = ("TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_", "RANK", "WORLD_SIZE", "MASTER_", "DDLTOOL_CHECK")
Arrays = dict[str, NDArray[Any]]


def begin_check(job: DistributedJob, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Check this run where that was asked for; all ranks call this, once the model is wrapped and before the first step."""
    if not is_reference() and not (is_set(CHECK) and job.world_size > 1):
        return
    _leave_out_dropout(model)
    run: _Recorded = _Reference(job, model) if is_reference() else _Checked(job, model)
    optimizer.register_step_pre_hook(run.before_update)


def _leave_out_dropout(model: nn.Module) -> None:
    """Let dropout pass everything: layers, and what models call as functions."""
    for module in model.modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
    attention = nn.functional.scaled_dot_product_attention

    def attend(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any, **more: Any
    ) -> Any:
        return attention(query, key, value, attn_mask, 0.0, *rest, **more)

    nn.functional.scaled_dot_product_attention = attend
    nn.functional.dropout = lambda input, p=0.5, training=True, inplace=False: input


class _Recorded:
    """The gradients of the first updates of this process."""

    def __init__(self, job: DistributedJob, model: nn.Module) -> None:
        self._job, self._model = job, model
        self._updates: list[Arrays] = []

    def before_update(self, *_: object) -> None:
        """Note the gradients with which an update begins."""
        if len(self._updates) < UPDATES:
            self._updates.append({name: _array(value.grad) for name, value in self._named() if value.grad is not None})
            if len(self._updates) == UPDATES:
                self.complete()

    def complete(self) -> None:
        """All updates are there."""

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        plain = [(name.replace("_orig_mod.", ""), value) for name, value in self._model.named_parameters()]
        return [(name.removeprefix("module."), value) for name, value in plain]


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    whole = getattr(tensor, "full_tensor", None)
    return (tensor if whole is None else whole()).detach().cpu().double().numpy().copy()


class _Reference(_Recorded):
    """The process that trains alone."""

    def complete(self) -> None:
        path = Path(os.environ[REFERENCE])
        arrays = {
            f"{number}/{name}": value
            for number, gradients in enumerate(self._updates)
            for name, value in gradients.items()
        }
        with path.with_suffix(".new").open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        path.with_suffix(".new").rename(path)
        os._exit(0)  # in the middle of the script: its own ending has nothing to say


class _Checked(_Recorded):
    """One rank of the job. Rank 0 compares; it looks for the other process at updates, and waits for it at the end."""

    def __init__(self, job: DistributedJob, model: nn.Module) -> None:
        super().__init__(job, model)
        self._told = job.rank != 0
        self._dtype = next(model.parameters()).dtype
        self._ends = os.environ[CHECK] == "end"
        if self._told:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="ddltool-check-")
        self._path = Path(self._folder.name, "gradients.npz")
        self._errors = Path(self._folder.name, "stderr").open("w+b")  # noqa: SIM115
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHER)}
        place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        self._child = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1:]],
            env=kept | place | {"MASTER_PORT": "0", REFERENCE: str(self._path)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )
        self._deadline_s = time.monotonic() + PATIENCE_S
        atexit.register(self._finish)

    def before_update(self, *_: object) -> None:
        super().before_update()
        if len(self._updates) < UPDATES:
            return
        if not self._told and (self._ends or self._child.poll() is not None):
            self._finish()
        if self._ends:
            self._job.gather(b"")
            os._exit(0)

    def _finish(self) -> None:
        """Say what came out, once."""
        if self._told:
            return
        self._told = True
        atexit.unregister(self._finish)
        equal, line = self._outcome()
        sys.stderr.write(f"ddltool check: {line}\n")
        sys.stderr.flush()
        if target := os.environ.get(RESULT):
            write_text(Path(target), json.dumps({"equal": equal, "line": line}))
        self._errors.close()
        self._folder.cleanup()

    def _outcome(self) -> tuple[bool, str]:
        try:
            code = self._child.wait(max(self._deadline_s - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
            return False, f"undecided: the script alone made fewer than {UPDATES} updates within {PATIENCE_S:g} s"
        if code:
            self._errors.seek(0)
            last = (self._errors.read().decode(errors="replace").strip().splitlines() or [f"exit code {code}"])[-1]
            return False, f"undecided: the script cannot run alone ({last})"
        if not self._path.exists():
            return False, f"undecided: the script alone ended before update {UPDATES}; let it make as many"
        with np.load(self._path) as file:
            expected: list[Arrays] = [{} for _ in range(UPDATES)]
            for key in file.files:
                number, name = key.split("/", 1)
                expected[int(number)][name] = file[key]
        return self._compared(expected)

    def _compared(self, expected: list[Arrays]) -> tuple[bool, str]:
        tolerance, furthest = TOLERANCES.get(self._dtype, HALF_TOLERANCE), 0.0
        for number, (mine, other) in enumerate(zip(self._updates, expected, strict=False)):
            largest = max((float(np.abs(value).max(initial=0.0)) for value in other.values()), default=0.0) or 1.0
            apart = {
                name: float(np.abs(mine.get(name, np.zeros_like(value)) - value).max(initial=0.0)) / largest
                for name, value in other.items()
            }
            if apart and not (worst := max(apart.values())) <= tolerance:
                name = max(apart, key=lambda key: apart[key])
                difference = f"gradients of step {number + 1} differ by {worst:.2g} from one process's, most in {name}"
                return False, f"{difference}: {self._reason(mine, other)}"
            furthest = max(furthest, *apart.values()) if apart else furthest
        return True, f"gradients of {len(self._updates)} steps equal to {furthest:.0e} those of one process"

    def _reason(self, mine: Arrays, other: Arrays) -> str:
        """Return the likely reason, by what is in the script and by how the gradients differ."""
        both = [(mine[name].ravel(), other[name].ravel()) for name in other if name in mine]
        one, two = (np.concatenate(parts) for parts in zip(*both, strict=True)) if both else (np.zeros(1), np.ones(1))
        ratio = float(one @ two / max(two @ two, 1e-300))
        if abs(ratio - 1) > 1e-3 and np.abs(one - ratio * two).max() < 1e-3 * np.abs(two).max():
            return (
                f"all are {ratio:.3g} times as large, so the loss is no mean over this rank's samples: say hook.loss(loss, "
                'reduction="sum") or "average", or count='
            )
        for name, module in self._model.named_modules():
            if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training:
                return (
                    f"{name.removeprefix('module.')} is a BatchNorm over this rank's samples alone; use SyncBatchNorm"
                )
        missing = sorted(set(other) - set(mine))
        if missing:
            return f"{missing[0]} has no gradient here"
        return (
            "a term of the loss is a mean over this rank's samples (weights over their mean, advantages less theirs, a mean "
            "that is detached, a part of the batch): take that mean over all ranks; or random numbers in the forward pass "
            "or the data (draw none, or by sample), a loader that gives one process other samples, or another start of the "
            "model (seed it before it is made)"
        )
