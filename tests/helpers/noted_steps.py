"""One step of a training script, noted twice: run for real on the CPU under torch's own counters, and as it is recorded.

``python noted_steps.py`` reads requests from stdin, one JSON object a line: ``kind`` (real or recorded), ``script``,
``arguments``, ``world`` (processes; 0: no launcher), ``out`` (the JSON file of the answer). It prints an exit status for each.
Each runs in processes of its own, forked once torch is loaded.
"""

from __future__ import annotations

import gc
import json
import math
import os
import runpy
import socket
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

Noted = list[Any]
"""The name of an op, and shapes with types of the tensors that it gets and gives."""
Step = dict[str, Any]
"""``calls``: what is :data:`Noted`; ``exchanges``: (kind, bytes) of collectives; ``flops`` by op; ``peak_bytes``."""
_STEADY = 2
"""So many updates of an optimizer before the step that is noted: its states are made by then, those of others too."""
_ON_HOST = ("_local_scalar_dense", "is_nonzero", "lift_fresh")
"""Values that are read, and numbers made into tensors: on a GPU's machine the host does it."""


def _seen(values: Any) -> list[Any]:
    return [[list(leaf.shape), str(leaf.dtype)] for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class Notary:
    """Notes steps in processes forked from one that has torch loaded; use it in ``with``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> Notary:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}  # real steps run on the CPU
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()

    def pair(self, script: str, *arguments: str, world: int = 0) -> tuple[Step, Step]:
        """Return a script's step as it is and as it is recorded. Raises RuntimeError for a script that fails."""
        path = self.folder / "train.py"
        path.write_text(script)
        return self.note("real", path, *arguments, world=world), self.note("recorded", path, *arguments, world=world)

    def note(self, kind: str, script: Path, *arguments: str, world: int = 0) -> Step:
        """Return a step, of a kind. Raises RuntimeError for a script that fails."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        out = self.folder / f"{kind}.json"
        request = {"kind": kind, "script": str(script), "arguments": arguments, "world": world, "out": str(out)}
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        if self._server.stdout.readline().strip() != "0":
            raise RuntimeError(f"{script.name} {' '.join(arguments)} did not run ({kind})")
        step: Step = json.loads(out.read_text())
        return step


def compared(calls: list[Noted]) -> list[Noted]:
    """Return calls with attention by one name, of what it gets the queries, keys and values, of what it gives the first three
    (backward) or the first; without calls on empty tensors alone, which some torches make on the host, for checkpoints."""
    calls = [call for call in calls if any(math.prod(shape) for shape, _ in call[1] + call[2])]
    return [[_ATTENTION + "_backward", gets[:4], gives[:3]] if _ATTENTION in name and "backward" in name
            else [_ATTENTION, gets[:3], gives[:1]] if _ATTENTION in name
            else [name, gets, gives] for name, gets, gives in calls]  # fmt: skip


def flops_compared(flops: dict[str, int]) -> dict[str, int]:
    """Return the FLOPs of ops that torch's counter knows, without attention's, of which each kernel has another share."""
    return {name: count for name, count in flops.items() if count and name in _COUNTED}


_ATTENTION = "scaled_dot_product"
_COUNTED = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "recurrent", "recurrent_backward")


class Notes(TorchDispatchMode):
    """Notes every op that this process runs, but for those that run on the host wherever the model is."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Noted] = []
        self.exchanges: list[list[Any]] = []
        """The kind of each collective and its bytes; they go through torch's dispatcher, DDP's reducer in C++ too."""
        self.counters: set[int] = set()
        """Storages of optimizers' and averages' counts of steps: tensors of the CPU, but for those of fused optimizers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls again with this rank's parts
        output = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            self._exchanged(func._schema.name.partition("::")[2], args, output)
            return output
        name = func._schema.name.partition("::")[2]
        tensors = [leaf for leaf in tree_leaves((args, kwargs, output)) if isinstance(leaf, Tensor)]
        is_count = any(tensor.untyped_storage()._cdata in self.counters for tensor in tensors)
        if tensors and not is_count and name not in _ON_HOST and not _is_in_batch():
            self.calls.append([name, _seen((args, kwargs)), _seen(output)])
        return output

    def _exchanged(self, name: str, args: Any, output: Any) -> None:
        """Note a collective with the bytes of the whole: what a gathering gives, what a scattering gets."""
        kind = next((kind for part, kind in _KINDS.items() if part in name), None)
        if kind is None:
            return  # the wait for one
        gives = args[0] if name.endswith("_") else output
        gets = args[1] if name.endswith("_") and "base" in name else args[0]
        moved = gives if kind == "all_gather" else gets
        self.exchanges.append([kind, sum(t.nbytes for t in tree_leaves(moved) if isinstance(t, Tensor))])


# fmt: off
_KINDS = {
    "allreduce": "all_reduce", "all_reduce": "all_reduce", "allgather": "all_gather", "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter", "broadcast": "broadcast", "alltoall": "all_to_all", "all_to_all": "all_to_all",
}
# fmt: on


class NoModules:
    """What torch's counters ask of their tracker of modules, for a program as a whole."""

    parents = frozenset({"Global"})
    is_bw = False

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def register_user_hooks(self, *_: object) -> None: ...

    def clear_user_hooks(self) -> None: ...


def _let_dropout_be_one_op() -> None:
    """Let dropout be the op that it is on CUDA, which the CPU has too and takes four others for."""

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.native_dropout(x, p, True)[0] if training and p > 0 else x

    torch.nn.functional.dropout = dropout


def _backward_flops(gradient: Any, image: Any, weight: Any, *arguments: Any, out_val: Any = None, **_: Any) -> int:
    """Return the FLOPs of a convolution's gradients: each those of the convolution; torch's own formula forgets groups."""
    products = 2 * torch.Size(gradient).numel() * torch.Size(weight[1:]).numel()
    is_transposed, wanted = arguments[4], arguments[-1]
    assert not is_transposed
    return products * sum(wanted[:2])


def _is_in_batch() -> bool:
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "make_batch":
            return True
        frame = frame.f_back
    return False


def _run_real(request: dict[str, Any], write: Callable[[Any], NoReturn]) -> None:
    """Run a script as it is; note the step after the second update of the optimizer that ends one first."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    flops = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.convolution_backward: _backward_flops})
    notes, memory = Notes(), MemTracker()
    # Their hooks of modules, which we do not ask about, keep tensors alive and refuse frozen parameters.
    flops.mod_tracker = memory._mod_tracker = NoModules()  # type: ignore[assignment]
    _let_dropout_be_one_op()
    first: list[Any] = []
    before: Counter[str] = Counter()
    updates, depth = [0], [0]

    def flops_by_op() -> Counter[str]:
        return Counter({str(op).removeprefix("aten."): count for op, count in flops.flop_counts["Global"].items()})

    def begins(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        depth[0] += 1

    def ended(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        depth[0] -= 1
        if depth[0]:  # an optimizer of another
            return
        first.append(optimizer)
        for state in optimizer.state.values():
            if isinstance(step := state.get("step"), Tensor) and not optimizer.defaults.get("fused"):
                notes.counters.add(step.untyped_storage()._cdata)
        for average in gc.get_objects() if updates[0] == 1 else ():
            if type(average) is AveragedModel:
                notes.counters.add(average.n_averaged.untyped_storage()._cdata)
        if optimizer is not first[0]:
            return
        updates[0] += 1
        if updates[0] == _STEADY:
            gc.collect()
            before.update(flops_by_op())
            notes.calls.clear()
            notes.exchanges.clear()
            memory._peak_mem.clear()
            memory._peak_mem_snap.clear()
        elif updates[0] == _STEADY + 1:
            counted = flops_by_op()
            counted.subtract(before)
            peak = sum(snapshot["Total"] for snapshot in memory.get_tracker_snapshot("peak").values())
            exchanges = list(notes.exchanges)
            if request["world"]:
                torch.distributed.barrier()
            write({"calls": notes.calls, "exchanges": exchanges, "flops": counted, "peak_bytes": peak})

    register_optimizer_step_pre_hook(begins)
    register_optimizer_step_post_hook(ended)
    sys.argv = [request["script"], *request["arguments"]]
    with flops, memory, notes:
        runpy.run_path(request["script"], run_name="__main__")


def _record(request: dict[str, Any], write: Callable[[Any], NoReturn]) -> None:
    """Record a script by the product's own process, and note what it recorded."""
    from ddltool.analyzers.step.recording import script
    from ddltool.analyzers.step.recording.recorder import Shadow

    real_graph_of = script.graph_of

    def shapes(values: Any) -> list[Any]:
        return [
            [list(leaf.tensor.shape), str(leaf.tensor.dtype)]
            for leaf in tree_leaves(values)
            if isinstance(leaf, Shadow)
        ]

    def noted_graph_of(step: Any, label: str) -> NoReturn:
        graph = real_graph_of(step, label)
        flops: Counter[str] = Counter()
        for op, call in zip([op for op in graph.ops() if op.kind == "compute"], step.calls, strict=True):
            flops[call.target._schema.name.partition("::")[2]] += int(op.flops)
        live, change = 0, [0] * (len(step.calls) + 2)
        for storage in step.storages:
            change[max(storage.made, 0)] += storage.size_bytes
            change[len(step.calls) + 1 if storage.freed is None else max(storage.freed, storage.made, 0) + 1] -= (
                storage.size_bytes
            )
        peak = 0
        for difference in change:
            live += difference
            peak = max(peak, live)
        calls = []
        for call in step.calls:
            name, gets, gives = (
                call.target._schema.name.partition("::")[2],
                shapes((call.args, call.kwargs)),
                shapes(call.output),
            )
            if gets or name not in ("_to_copy", "copy_"):  # a batch comes from the host
                calls.append([name, gets, gives])
        exchanges = [[call.exchange.name, call.exchange.size_bytes] for call in step.calls if call.exchange]
        write({"calls": calls, "exchanges": exchanges, "flops": flops, "peak_bytes": peak})

    script.graph_of = noted_graph_of
    path = Path(request["out"]).with_suffix(".request")
    path.write_text(
        json.dumps(
            {
                **{"out": request["out"] + ".graph", "label": "script", "name": "GPU", "memory_bytes": 80 * 2**30},
                **{"capability": [9, 0], "count": 8, "scratch": None},
            }
        )
    )
    launcher = ["torchrun", "--nproc-per-node", str(request["world"])] if request["world"] else ["python"]
    script.main([str(path), "--", *launcher, request["script"], *request["arguments"]])


def _answer(request: dict[str, Any]) -> None:
    """Write what a step was; ends the process."""

    def write(noted: Any) -> NoReturn:
        if int(os.environ.get("RANK", "0")) == 0:
            Path(request["out"]).write_text(json.dumps(noted))
        os._exit(0)

    try:
        {"real": _run_real, "recorded": _record}[request["kind"]](request, write)
    except Exception:
        traceback.print_exc()
    os._exit(1)


def serve() -> None:
    """Answer requests until stdin ends."""
    from ddltool.analyzers.step.recording import script  # noqa: F401 - loaded once for all
    from ddltool.analyzers.step.recording.vision import declare_torchvision

    declare_torchvision()  # before timm asks for its ops
    import timm  # noqa: F401
    from transformers import BertForSequenceClassification, GPT2LMHeadModel  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()  # none of it is garbage, nor looked through in what is forked
    for line in sys.stdin:
        request = json.loads(line)
        ranks = range(request["world"] if request["kind"] == "real" else 0)
        port = free_port() if ranks else 0
        world = [
            {
                **{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": len(ranks)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            }
            for rank in ranks
        ]
        children = [_forked(request, {name: str(value) for name, value in rank.items()}) for rank in world or [{}]]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(max(map(abs, statuses)), flush=True)


def _forked(request: dict[str, Any], environment: dict[str, str]) -> int:
    """Start the answer to a request; return the process's number."""
    child = os.fork()
    if child == 0:
        os.dup2(2, 1)
        os.environ.update(environment)
        _answer(request)
    return child


def free_port() -> int:
    """Return a port that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


if __name__ == "__main__":
    serve()
