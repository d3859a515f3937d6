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
"""DDP's first bucket is small, so that its exchange starts early; the others hold 25 MiB (torch's defaults)."""
_BUCKET_MIB = 25
_MIB = 2**20


def world_size() -> int:
    """Return the number of processes: of the default group if it is initialized, else as WORLD_SIZE says (1 if unset)."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def stand_in_groups(recorder: Recorder) -> None:
    """Let ``torch.distributed`` start a group of the launcher's size in this one process.

    The group is torch's "fake" one, which sends nothing: every collective is done at once. DistributedDataParallel is
    replaced because its reducer, in C++, needs gradients with memory. All replacements stay for good.
    """
    from torch.distributed import device_mesh, distributed_c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    real_init_group = dist.init_process_group

    def start_fake_group(backend: Any = None, init_method: Any = None, timeout: Any = None, world_size: int = -1,
                         rank: int = -1, store: Any = None, group_name: str = "", pg_options: Any = None,
                         device_id: Any = None, **_: Any) -> None:  # fmt: skip
        """Start the fake group; the arguments are those of ``torch.distributed.init_process_group``.

        ``world_size`` and ``rank``, where they are not given (-1), default to the launcher's environment variables; all other
        arguments are ignored.
        """
        size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
        own_rank = rank if rank >= 0 else int(os.environ.get("RANK", "0"))
        with _without_modes():  # torch exchanges small tensors when it starts a group, and reads their values
            real_init_group("fake", rank=own_rank, world_size=size, store=FakeStore())

    for module in (dist, distributed_c10d, device_mesh):
        module.init_process_group = start_fake_group  # type: ignore[attr-defined]
    for name in ("init_device_mesh", "DeviceMesh"):
        _stand_in_mesh(device_mesh, name, recorder)
    setattr(dist, "init_device_mesh", device_mesh.init_device_mesh)  # noqa: B010 - mypy knows no such name
    _run_outside_recording(dist, distributed_c10d, "new_group")
    _run_outside_recording(dist, distributed_c10d, "new_subgroups")
    _run_outside_recording(dist, distributed_c10d, "new_subgroups_by_enumeration")
    _spawn_here()
    for name, stand_in in _FREE_FUNCTIONS.items():
        for module in (dist, distributed_c10d):
            setattr(module, name, stand_in)
    for module in (dist, distributed_c10d):  # scripts and libraries take another path where the backend is not NCCL
        module.get_backend = lambda group=None: "nccl"  # type: ignore[attr-defined]
    ddp = type("DistributedDataParallel", (_StandInDdp,), {"recorder": recorder})
    for module in (nn.parallel, nn.parallel.distributed):
        module.DistributedDataParallel = ddp  # type: ignore[attr-defined]


@contextlib.contextmanager
def _without_modes() -> Iterator[None]:
    """Run the block outside the recording: its tensors are real, and its calls are not noted."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _run_outside_recording(dist_module: Any, module: Any, name: str) -> None:
    """Replace a function of ``torch.distributed`` that makes groups by one that runs outside the recording.

    The function makes small tensors and reads their values, which recorded tensors do not have. ``module``:
    ``torch.distributed.distributed_c10d``, which defines the function; ``dist_module``: ``torch.distributed``, which has it
    under the same ``name`` and where it is replaced, too. Its ``device_id`` is dropped, because fake groups need no device.
    """
    original = getattr(module, name)

    def run_outside(*args: Any, **kwargs: Any) -> Any:
        """Call the function with a fake backend, outside of the recording."""
        kwargs = {key: value for key, value in kwargs.items() if key != "device_id"}
        if kwargs.get("backend") is not None:
            kwargs["backend"] = "fake"
        with _without_modes():
            return original(*args, **kwargs)

    setattr(module, name, run_outside)
    setattr(dist_module, name, run_outside)


def _stand_in_mesh(module: Any, name: str, recorder: Recorder) -> None:
    """Let a device mesh on "cuda" be made on the recorded device.

    ``module`` is ``torch.distributed.device_mesh``. ``name`` is ``DeviceMesh``, the class, whose constructor is
    replaced, or ``init_device_mesh``, the function, which is replaced itself.
    """
    original: Any = getattr(module, name)
    if inspect.isclass(original):
        real_init: Any = getattr(original, "__init__")  # noqa: B009 - mypy takes it for object's

        def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            """Make the mesh outside the recording; "cuda" means the recorded device."""
            with _without_modes():
                real_init(self, recorder.gpu.type if device_type == "cuda" else device_type, *args, **kwargs)

        setattr(original, "__init__", init)  # noqa: B010
        return

    def mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        """Return a device mesh; "cuda" means the recorded device.

        As torch does, it starts the default group first if the script has not done so.
        """
        if not dist.is_initialized():
            dist.init_process_group()
        with _without_modes():
            return original(recorder.gpu.type if device_type == "cuda" else device_type, *args, **kwargs)

    setattr(module, name, mesh)


def _spawn_here() -> None:
    """Let ``torch.multiprocessing.spawn`` run the first of its processes in this one, and no other."""
    from torch import multiprocessing

    def spawn(fn: Callable[..., None], args: tuple[Any, ...] = (), nprocs: int = 1, *_: Any, **__: Any) -> Any:
        """Run ``fn`` as rank 0 in this process, to its end; return an object whose ``join`` returns True at once."""
        fn(0, *args)
        return SimpleNamespace(join=lambda *_, **__: True)

    for module in (multiprocessing, sys.modules["torch.multiprocessing.spawn"]):
        module.spawn = module.start_processes = spawn  # type: ignore[attr-defined]


def _gather_object(objects: list[Any], value: Any, group: Any = None) -> None:
    """Stand in for ``all_gather_object``: fill ``objects``, a list with a place for each rank, with this rank's value.

    All ranks are taken to be alike.
    """
    objects[:] = [value] * len(objects)


def _gather_to_one(value: Any, objects: list[Any] | None = None, *_: Any, **__: Any) -> None:
    """Stand in for ``gather_object``: fill ``objects``, a list with a place for each rank, with this rank's value.

    None: this rank does not receive.
    """
    if objects is not None:
        objects[:] = [value] * len(objects)


def _scatter_object(output: list[Any], objects: list[Any] | None = None, *_: Any, **__: Any) -> None:
    """Stand in for ``scatter_object_list``: put the object for rank 0 into ``output``, a list of one place.

    ``objects`` has one for each rank; None or empty: this rank sends none, and gets None.
    """
    output[0] = objects[0] if objects else None


_FREE_FUNCTIONS: dict[str, Callable[..., None]] = {
    "all_gather_object": _gather_object,
    "gather_object": _gather_to_one,
    "broadcast_object_list": lambda *_, **__: None,
    "scatter_object_list": _scatter_object,
    "barrier": lambda *_, **__: None,
    "monitored_barrier": lambda *_, **__: None,
    "destroy_process_group": lambda *_, **__: None,
}
"""Stand-ins for exchanges of Python objects, which have no cost on a GPU, and for functions that only wait or end."""


class _StandInDdp(nn.Module):
    """Stands in for DistributedDataParallel: gradients fill buckets as they come, and full buckets are exchanged.

    A bucket is a flat tensor for the gradients of several parameters. From the second step on the buckets are
    torch's: in the order in which gradients come, the last layers first.
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
        """Wrap a module, and hook its trained parameters.

        The arguments are those of DistributedDataParallel. ``bucket_cap_mb`` is the size of a bucket in MiB (None: torch's
        default), and ``process_group`` the group that exchanges gradients (None: the default group).
        """
        super().__init__()
        # Attributes of DistributedDataParallel that scripts and libraries read or set.
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
        """Names of parameters and buffers that are not exchanged."""
        self._hook: tuple[Any, Callable[..., Any]] | None = None
        """(state, function) that the script registered to exchange buckets; None: they are summed over all ranks."""
        if bucket_cap_mb is None:
            self._limits = _FIRST_BUCKET_BYTES, _BUCKET_MIB * _MIB
        else:
            bucket_bytes = int(bucket_cap_mb * _MIB)
            self._limits = bucket_bytes, bucket_bytes
        """The bytes at which the first bucket is full, and at which each later one is."""
        trained = [p for n, p in module.named_parameters() if p.requires_grad and n not in self._skipped]
        self._finds_unused = find_unused_parameters and not static_graph
        """Whether each forward pass looks for parameters that its outputs do not depend on."""
        self._arrival_order: list[Tensor] | None = None if self._finds_unused else []
        """The parameters in the order in which the first step's gradients came; None: buckets are not formed anew."""
        # The buckets of the first step follow the order of the parameters, and are exchanged from the last one on. Buckets
        # that will be formed anew have no limit at first: one for each type.
        limits = self._limits if self._finds_unused else (sys.maxsize, sys.maxsize)
        index_of = {id(parameter): index for index, parameter in enumerate(trained)}
        first_buckets = sorted(_in_buckets(trained, limits), key=lambda bucket: -index_of[id(bucket[0])])
        self._still_to_come: dict[int, set[int]] = {}
        """By a bucket's number, the identities of the parameters whose gradients are still to come in this pass."""
        self._exchanges: dict[int, Any] = {}
        """By a bucket's number, the handle of its exchange under way."""
        self._next_bucket = 0
        """The bucket that is exchanged next: buckets are exchanged in order, so that all ranks agree."""
        self._take_buckets(first_buckets)
        if self._finds_unused:  # a number for each parameter, whether it is used: ranks exchange it after the buckets
            self._used = torch.zeros(len(trained), dtype=torch.int32, device=self.recorder.gpu)
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._gradient_arrived)

    def _take_buckets(self, buckets: list[list[Tensor]]) -> None:
        """Use these buckets, lists of parameters, from now on; their flat tensors are made when they are first needed."""
        self._buckets = buckets
        self._bucket_of = {id(parameter): number for number, bucket in enumerate(buckets) for parameter in bucket}
        self._flat_buckets: dict[int, Tensor] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, as DistributedDataParallel does.

        Unless gradients are off or the call is in :meth:`no_sync`, rank 0's buffers are broadcast first, and the next
        backward pass exchanges the gradients.
        """
        is_exchanged = self.require_backward_grad_sync and torch.is_grad_enabled()
        if is_exchanged:
            self._expect_all()
            if self._sends_buffers:
                self._send_buffers()
        if self.device_ids:  # torch moves the inputs to the device that it was given
            args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(self.recorder.gpu), (args, kwargs))
        outputs = self.module(*args, **kwargs)
        if self._finds_unused and is_exchanged:  # no gradient will come for parameters that the outputs do not use
            reached = _parameters_behind(outputs)
            for awaited in self._still_to_come.values():
                awaited &= reached
            self._exchange_ready()
        return outputs

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let the backward passes within the block exchange nothing, so that gradients accumulate on each rank."""
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join(self, *_: Any, **__: Any) -> Any:
        """Return a context that does nothing: all ranks are taken to have equally many batches."""
        return contextlib.nullcontext()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let a function of the script exchange the buckets; it is called as ``hook(state, bucket)``."""
        self._hook = state, hook

    def _set_static_graph(self) -> None:
        """Do nothing; libraries call it."""

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return no statistics; libraries ask for them."""
        return {}

    def _expect_all(self) -> None:
        """Let the next backward pass exchange every bucket: all gradients are still to come."""
        self._still_to_come = {number: {id(p) for p in bucket} for number, bucket in enumerate(self._buckets)}
        self._next_bucket = 0

    def _send_buffers(self) -> None:
        """Record the broadcast of rank 0's buffers, those of one type together; nothing is received, and so none changes."""
        buffers = [b for n, b in self.module.named_buffers() if n not in self._skipped]
        with torch.no_grad():
            for dtype in dict.fromkeys(b.dtype for b in buffers):
                flat = torch.cat([b.detach().reshape(-1) for b in buffers if b.dtype == dtype])
                dist.broadcast(flat, 0, group=self.process_group)

    def _gradient_arrived(self, parameter: Tensor) -> None:
        """Put a parameter's complete gradient into its bucket, and exchange the buckets that are full by now.

        Does nothing in :meth:`no_sync`, nor for a gradient that this pass does not wait for.
        """
        bucket_number = self._bucket_of[id(parameter)]
        awaited = self._still_to_come.get(bucket_number)
        if not self.require_backward_grad_sync or awaited is None or id(parameter) not in awaited:
            return
        with torch.no_grad():
            flat = self._flat_bucket(bucket_number)
            bucket_view = self._view_in_bucket(parameter, bucket_number)
            assert parameter.grad is not None
            if not self.gradient_as_bucket_view:
                # Divided while it is copied, as torch does: the sum over ranks is then their mean.
                torch.mul(parameter.grad, 1.0 / dist.get_world_size(self.process_group), out=bucket_view)
            elif parameter.grad.untyped_storage()._cdata != flat.untyped_storage()._cdata:
                parameter.grad = bucket_view  # from now on gradients accumulate in the bucket; nothing is copied here
            awaited.discard(id(parameter))
            if self._arrival_order is not None:
                self._arrival_order.append(parameter)
            if not awaited:
                self._exchange_ready()

    def _view_in_bucket(self, parameter: Tensor, number: int) -> Tensor:
        """Return the part of a bucket's flat tensor that is a parameter's, in the parameter's shape."""
        start = 0
        for other in self._buckets[number]:
            if other is parameter:
                break
            start += other.numel()
        flat = self._flat_bucket(number)
        return flat[start : start + parameter.numel()].view(parameter.shape)

    def _flat_bucket(self, number: int) -> Tensor:
        """Return the flat tensor that holds a bucket's gradients one after another; it is made at the first call."""
        if number not in self._flat_buckets:
            bucket = self._buckets[number]
            size = sum(parameter.numel() for parameter in bucket)
            self._flat_buckets[number] = torch.empty(size, dtype=bucket[0].dtype, device=bucket[0].device)
        return self._flat_buckets[number]

    def _exchange_ready(self) -> None:
        """Exchange the full buckets in order, up to the first that still waits for gradients.

        After the last bucket, autograd is asked to call :meth:`_finish` at the end of the backward pass.
        """
        while self._next_bucket in self._still_to_come:
            number = self._next_bucket
            if self._still_to_come[number]:  # gradients are still to come
                return
            del self._still_to_come[number]
            flat = self._flat_bucket(number)  # made here where none of its parameters is used
            if self._hook is None:
                self._exchanges[number] = dist.all_reduce(flat, group=self.process_group, async_op=True)
            else:
                self._run_hook(flat, number)
            self._next_bucket += 1
            if not self._still_to_come:
                self._end_exchange()

    def _end_exchange(self) -> None:
        """Exchange which parameters were used, where that differs, and have :meth:`_finish` called after the backward pass."""
        if self._finds_unused:
            dist.all_reduce(self._used, group=self.process_group, async_op=True)
        if torch._C._current_graph_task_id() != -1:  # -1: no backward pass runs, as no parameter is used
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        """Copy the exchanged buckets back to the gradients.

        After the first step, buckets are formed anew in the order in which the gradients came, as torch does.
        """
        for number in range(len(self._buckets)):
            self._copy_back(number)
        if self._arrival_order is not None:
            self._take_buckets(_in_buckets(self._arrival_order, self._limits))
            self._arrival_order = None

    def _copy_back(self, number: int) -> None:
        """Wait for a bucket's exchange, then copy the bucket to the gradients unless they are views of it."""
        exchange = self._exchanges.pop(number, None)  # None: the script's hook has exchanged the bucket
        if exchange is not None:
            exchange.wait()
        if self.gradient_as_bucket_view:
            return
        with torch.no_grad():
            start = 0
            for parameter in self._buckets[number]:
                if parameter.grad is not None:
                    exchanged = self._flat_buckets[number][start : start + parameter.numel()]
                    parameter.grad.copy_(exchanged.view(parameter.shape))
                start += parameter.numel()

    def _run_hook(self, flat: Tensor, number: int) -> None:
        """Call the script's registered hook to exchange a bucket, given as an object with ``GradBucket``'s methods."""
        assert self._hook is not None
        parameters = self._buckets[number]
        bucket = SimpleNamespace(
            buffer=lambda: flat, index=lambda: number, set_buffer=lambda _: None, parameters=lambda: list(parameters),
            is_last=lambda: number == len(self._buckets) - 1, gradients=lambda: [p.grad for p in parameters],
        )  # fmt: skip
        state, hook = self._hook
        hook(state, bucket)


def _parameters_behind(outputs: Any) -> set[int]:
    """Return the ``id`` of every parameter that tensors in ``outputs`` depend on; only these get gradients from them."""
    visited: set[Any] = set()
    parameters: set[int] = set()
    open_nodes = [output.grad_fn for output in tree_leaves(outputs) if isinstance(output, Tensor)]
    while open_nodes:
        node = open_nodes.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        # Only a node that accumulates a gradient has a variable, its parameter; id(None) is no parameter's.
        parameters.add(id(getattr(node, "variable", None)))
        open_nodes.extend(earlier_node for earlier_node, _ in node.next_functions)
    return parameters


def _in_buckets(parameters: Sequence[Tensor], limits: tuple[float, float]) -> list[list[Tensor]]:
    """Return the parameters, in their order, divided into DDP's buckets: one type each, closed once it is full.

    ``limits``: the bytes at which a type's first bucket is full, and at which each later one is. Buckets are ordered by
    when they were closed; those that never fill come last.
    """
    first_limit, later_limit = limits
    open_buckets: dict[torch.dtype, list[Tensor]] = {}
    filled_bytes: dict[torch.dtype, int] = {}  # of each type's open bucket
    closed: list[list[Tensor]] = []
    has_first_bucket: set[torch.dtype] = set()
    for parameter in parameters:
        dtype = parameter.dtype
        open_buckets.setdefault(dtype, []).append(parameter)
        filled_bytes[dtype] = filled_bytes.get(dtype, 0) + parameter.numel() * parameter.element_size()
        limit = later_limit if dtype in has_first_bucket else first_limit
        if filled_bytes[dtype] >= limit:
            closed.append(open_buckets.pop(dtype))
            filled_bytes[dtype] = 0
            has_first_bucket.add(dtype)
    return closed + list(open_buckets.values())
