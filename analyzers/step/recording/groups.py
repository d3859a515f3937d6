"""Process groups that are not there: the launcher's world of ranks in one process, and DDP's buckets without its reducer.

What is stood in for stays so: the process is the recorded script's alone.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ddltool.analyzers.step.recording.recorder import Recorder

_FIRST_BUCKET_BYTES = 2**20


def world_size() -> int:
    """Return how many processes there are: those of the group, before it is made those of the launcher, 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def stand_in_groups(recorder: Recorder) -> None:
    """Let ``torch.distributed`` start a group of the launcher's size in which every exchange has happened at once."""
    from torch.distributed import device_mesh, distributed_c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    real_start = dist.init_process_group

    def start(backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1, rank: int = -1,
              store: Any = None, group_name: str = "", pg_options: Any = None, device_id: Any = None,
              **_: Any) -> None:  # fmt: skip
        size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
        own_rank = rank if rank >= 0 else int(os.environ.get("RANK", "0"))
        with _without_modes():
            real_start("fake", rank=own_rank, world_size=size, store=FakeStore())

    for module in (dist, distributed_c10d, device_mesh):
        module.init_process_group = start  # type: ignore[attr-defined]
    for name in ("init_device_mesh", "DeviceMesh"):
        _stand_in_mesh(device_mesh, name, recorder)
    setattr(dist, "init_device_mesh", device_mesh.init_device_mesh)  # noqa: B010 - mypy knows no such name
    _outside(dist, distributed_c10d, "new_group")
    _outside(dist, distributed_c10d, "new_subgroups")
    _outside(dist, distributed_c10d, "new_subgroups_by_enumeration")
    _spawn_here()
    for name, stand_in in _OBJECTS.items():
        for module in (dist, distributed_c10d):
            setattr(module, name, stand_in)
    for module in (dist, distributed_c10d):
        module.get_backend = lambda group=None: "nccl"  # type: ignore[attr-defined]
    ddp = type("DistributedDataParallel", (_StandInDdp,), {"recorder": recorder})
    for module in (nn.parallel, nn.parallel.distributed):
        module.DistributedDataParallel = ddp  # type: ignore[attr-defined]


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _outside(dist_module: Any, module: Any, name: str) -> None:
    """Let a function of torch run as if no script were recorded: it reads values of small tensors."""
    original = getattr(module, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        kwargs = {key: value for key, value in kwargs.items() if key != "device_id"}
        if kwargs.get("backend") is not None:
            kwargs["backend"] = "fake"
        with _without_modes():
            return original(*args, **kwargs)

    setattr(module, name, run)
    setattr(dist_module, name, run)


def _stand_in_mesh(module: Any, name: str, recorder: Recorder) -> None:
    """Let a mesh of CUDA devices be one of the recorded device."""
    original: Any = getattr(module, name)
    if inspect.isclass(original):
        real_init: Any = getattr(original, "__init__")  # noqa: B009 - mypy takes it for object's

        def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            with _without_modes():
                real_init(self, recorder.gpu.type if device_type == "cuda" else device_type, *args, **kwargs)

        setattr(original, "__init__", init)  # noqa: B010
        return

    def mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        if not dist.is_initialized():
            dist.init_process_group()
        with _without_modes():
            return original(recorder.gpu.type if device_type == "cuda" else device_type, *args, **kwargs)

    setattr(module, name, mesh)


def _spawn_here() -> None:
    """Let ``torch.multiprocessing.spawn`` run the first of its processes in this one."""
    from torch import multiprocessing

    def spawn(fn: Callable[..., None], args: tuple[Any, ...] = (), nprocs: int = 1, *_: Any, **__: Any) -> Any:
        fn(0, *args)
        return SimpleNamespace(join=lambda *_, **__: True)

    for module in (multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        module.spawn = module.start_processes = spawn  # type: ignore[attr-defined]


def _gather_object(objects: list[Any], value: Any, group: Any = None) -> None:
    objects[:] = [value] * len(objects)


def _gather_to_one(value: Any, objects: list[Any] | None = None, *_: Any, **__: Any) -> None:
    if objects is not None:
        objects[:] = [value] * len(objects)


def _scatter_object(output: list[Any], objects: list[Any] | None = None, *_: Any, **__: Any) -> None:
    output[0] = (objects or [None])[0]


_OBJECTS: dict[str, Callable[..., None]] = {
    "all_gather_object": _gather_object,
    "gather_object": _gather_to_one,
    "broadcast_object_list": lambda *_, **__: None,
    "scatter_object_list": _scatter_object,
    "barrier": lambda *_, **__: None,
    "monitored_barrier": lambda *_, **__: None,
    "destroy_process_group": lambda *_, **__: None,
}


class _StandInDdp(nn.Module):
    """Stands in for DistributedDataParallel: its buckets, filled as gradients come and exchanged when they are full.

    The buckets are torch's from the second step on: in the order of the gradients, the last layers first.
    """

    recorder: ClassVar[Recorder]

    def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None, dim: int = 0,
                 broadcast_buffers: bool = True, init_sync: bool = True, process_group: Any = None,
                 bucket_cap_mb: Any = None,
                 find_unused_parameters: bool = False, check_reduction: bool = False,
                 gradient_as_bucket_view: bool = False,
                 static_graph: bool = False, delay_all_reduce_named_params: Any = None,
                 param_to_hook_all_reduce: Any = None,
                 mixed_precision: Any = None, device_mesh: Any = None, **_: Any) -> None:  # fmt: skip
        super().__init__()
        self.module = module
        self.process_group = process_group
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.static_graph, self.find_unused_parameters = static_graph, find_unused_parameters
        self.broadcast_buffers, self.gradient_as_bucket_view = broadcast_buffers, gradient_as_bucket_view
        self.reducer = SimpleNamespace(  # what libraries call that start an exchange by hand
            prepare_for_backward=lambda _outputs: self._expect_all(), _rebuild_buckets=lambda: True
        )
        self.device, self.device_ids, self.dim = None, device_ids, dim
        self._sends_buffers = broadcast_buffers and any(True for _ in module.buffers())
        self._skipped = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._hook: tuple[Any, Callable[..., Any]] | None = None
        cap = int((25 if bucket_cap_mb is None else bucket_cap_mb) * 2**20)
        self._limits = (_FIRST_BUCKET_BYTES if bucket_cap_mb is None else cap), cap
        trained = [p for n, p in module.named_parameters() if p.requires_grad and n not in self._skipped]
        self._finds_unused = find_unused_parameters and not static_graph
        # Torch fills buckets in the order of the first gradients, unless it looks for those that do not come.
        self._order: list[Tensor] | None = None if self._finds_unused else []
        limits = self._limits if self._finds_unused else (sys.maxsize, sys.maxsize)
        place = {id(parameter): number for number, parameter in enumerate(trained)}
        first_buckets = sorted(_buckets(trained, limits), key=lambda bucket: -place[id(bucket[0])])
        self._missing: dict[int, set[int]] = {}
        """By bucket, the identities of the parameters whose gradients are still to come."""
        self._works: dict[int, Any] = {}
        """By bucket, the exchange under way."""
        self._next = 0
        """The bucket that is exchanged next: none is before those that precede it."""
        self._fill(first_buckets)
        if self._finds_unused:
            self._used = torch.zeros(len(trained), dtype=torch.int32, device=self.recorder.gpu)
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._arrived)

    def _fill(self, buckets: list[list[Tensor]]) -> None:
        """Take other buckets: no gradient has come for them yet."""
        self._buckets = buckets
        self._bucket_of = {id(parameter): number for number, bucket in enumerate(buckets) for parameter in bucket}
        self._flat: dict[int, Tensor] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, with buffers sent before, and the next backward pass set to exchange its gradients."""
        is_exchanged = self.require_backward_grad_sync and torch.is_grad_enabled()
        if is_exchanged:
            self._expect_all()
            if self._sends_buffers:
                self._send_buffers()
        if self.device_ids:  # what it is given goes to its device
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(self.recorder.gpu), (args, kwargs))
        outputs = self.module(*args, **kwargs)
        if self._finds_unused and is_exchanged:
            reached = _reached(outputs)
            for missing in self._missing.values():
                missing &= reached
            self._exchange_ready()
        return outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let the backward passes of the block exchange nothing."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join(self, *_: Any, **__: Any) -> Any:
        """Return a block in which nothing more is done: all ranks have as many batches."""
        return contextlib.nullcontext()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let a function exchange the buckets."""
        self._hook = state, hook

    def _set_static_graph(self) -> None:
        pass

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}

    def _expect_all(self) -> None:
        """Let the next backward pass exchange every bucket."""
        self._missing = {number: {id(p) for p in bucket} for number, bucket in enumerate(self._buckets)}
        self._next = 0

    def _send_buffers(self) -> None:
        """Broadcast rank 0's buffers, those of a type together."""
        buffers = [b for n, b in self.module.named_buffers() if n not in self._skipped]
        with torch.no_grad():
            for dtype in dict.fromkeys(b.dtype for b in buffers):
                flat = torch.cat([b.detach().reshape(-1) for b in buffers if b.dtype == dtype])
                dist.broadcast(flat, 0, group=self.process_group)

    def _arrived(self, parameter: Tensor) -> None:
        """Put a gradient that is complete into its bucket, and exchange the bucket when it was the last."""
        number = self._bucket_of[id(parameter)]
        missing = self._missing.get(number)
        if not self.require_backward_grad_sync or missing is None or id(parameter) not in missing:
            return
        with torch.no_grad():
            bucket, flat = self._buckets[number], self._flat_of(number)
            start = sum(p.numel() for p in bucket[: next(i for i, p in enumerate(bucket) if p is parameter)])
            place = flat[start : start + parameter.numel()].view(parameter.shape)
            assert parameter.grad is not None
            if not self.gradient_as_bucket_view:
                torch.mul(parameter.grad, 1.0 / dist.get_world_size(self.process_group), out=place)
            elif parameter.grad.untyped_storage()._cdata != flat.untyped_storage()._cdata:
                parameter.grad = place
            missing.discard(id(parameter))
            if self._order is not None:
                self._order.append(parameter)
            if not missing:
                self._exchange_ready()

    def _flat_of(self, number: int) -> Tensor:
        """Return the flat tensor that a bucket's gradients are exchanged in; it is made when the first is needed."""
        if number not in self._flat:
            bucket = self._buckets[number]
            size = sum(parameter.numel() for parameter in bucket)
            self._flat[number] = torch.empty(size, dtype=bucket[0].dtype, device=bucket[0].device)
        return self._flat[number]

    def _exchange_ready(self) -> None:
        """Exchange the buckets that are full, none before those that precede it; after the last, let all come back."""
        while not self._missing.get(self._next, {0}):
            del self._missing[self._next]
            flat = self._flat_of(self._next)  # empty so far where all its parameters go unused
            if self._hook is None:
                self._works[self._next] = dist.all_reduce(flat, group=self.process_group, async_op=True)
            else:
                self._run_hook(flat, self._next)
            self._next += 1
            if not self._missing:
                if self._finds_unused:
                    dist.all_reduce(self._used, group=self.process_group, async_op=True)
                if torch._C._current_graph_task_id() != -1:  # else nothing is used at all
                    torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        """Copy what was exchanged back to the gradients; after the first step, fill buckets in the gradients' order."""
        for number in range(len(self._buckets)):
            self._copy_back(number)
        if self._order is not None:
            self._fill(_buckets(self._order, self._limits))
            self._order = None

    def _copy_back(self, number: int) -> None:
        """Wait for a bucket's exchange and copy it to the gradients, unless these are views of it."""
        if (work := self._works.pop(number, None)) is not None:
            work.wait()
        if self.gradient_as_bucket_view:
            return
        with torch.no_grad():
            start = 0
            for parameter in self._buckets[number]:
                if parameter.grad is not None:
                    exchanged = self._flat[number][start : start + parameter.numel()]
                    parameter.grad.copy_(exchanged.view(parameter.shape))
                start += parameter.numel()

    def _run_hook(self, flat: Tensor, number: int) -> None:
        """Let the registered function exchange a bucket, which it gets as torch's ``GradBucket``."""
        assert self._hook is not None
        parameters = self._buckets[number]
        bucket = SimpleNamespace(
            buffer=lambda: flat, index=lambda: number, set_buffer=lambda _: None, parameters=lambda: list(parameters),
            is_last=lambda: number == len(self._buckets) - 1, gradients=lambda: [p.grad for p in parameters],
        )  # fmt: skip
        state, hook = self._hook
        hook(state, bucket)


def _reached(outputs: Any) -> set[int]:
    """Return the identities of the leaves whose gradients a backward pass from outputs makes."""
    visited: set[Any] = set()
    leaves: set[int] = set()
    open_nodes = [leaf.grad_fn for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    while open_nodes:
        node = open_nodes.pop()
        if node is not None and node not in visited:
            visited.add(node)
            leaves.add(id(getattr(node, "variable", None)))
            open_nodes.extend(before for before, _ in node.next_functions)
    return leaves


def _buckets(parameters: Sequence[Tensor], limits: tuple[float, float]) -> list[list[Tensor]]:
    """Return parameters in DDP's buckets, in their order: one type each, closed once they hold their limit of bytes."""
    open_buckets: dict[torch.dtype, list[Tensor]] = {}
    filled: dict[torch.dtype, int] = {}
    closed: list[list[Tensor]] = []
    first_of: set[torch.dtype] = set()
    for parameter in parameters:
        dtype = parameter.dtype
        open_buckets.setdefault(dtype, []).append(parameter)
        filled[dtype] = filled.get(dtype, 0) + parameter.numel() * parameter.element_size()
        if filled[dtype] >= limits[dtype in first_of]:
            closed.append(open_buckets.pop(dtype))
            filled[dtype] = 0
            first_of.add(dtype)
    return closed + [bucket for bucket in open_buckets.values() if bucket]
