"""A GPU that is not there: what a script finds of ``torch.cuda``, on tensors that have sizes and no values.

:func:`posed` is entered once, in a process of its own: it registers a device with torch's dispatcher, and stands in for
the calls of torch that ask for CUDA. Tensors of that device are fake; they say that they are on ``cuda:0``.
"""

from __future__ import annotations

import contextlib
import copyreg
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, wraps
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ddltool import own_process
from ddltool.analyzers.step.recording.device_kernels import Autocast, install_cuda_kernels
from ddltool.analyzers.step.recording.legacy import legacy_result
from ddltool.analyzers.step.recording.recorder import Recorder
from ddltool.errors import InputError

CUDA = torch.device("cuda", 0)
# What a torch without CUDA says of its version: that of the wheels of torch 2.13, which torchvision compares with its own.
_CUDA = "13.0"
# What :func:`posed` replaces belongs to the whole process, so one thread runs such a block at a time (within it the same
# thread may open another), and other threads wait for the lock, at most so many seconds.
_LOCK, _LOCK_WAIT_S = threading.RLock(), 600.0
_IMAGE_DIMENSIONS = 3
"""An image is (channels, height, width); detectors take a list of images, not a batch."""
_RNG_STATE_BYTES = 16
"""The size of the state of CUDA's random numbers."""
_LEAST_ELAPSED_MS = 1e-3
"""The least time between two events."""


class PosedBackend(ModuleType):
    """The module ``torch.gpu`` of the registered device, with the functions that torch asks every backend for."""

    posed: ClassVar[int] = 0
    """How many blocks of :func:`posed` are open. torch cannot forget a backend, so outside of them it counts no devices."""

    def __init__(self) -> None:
        """Make the module, with the device's name."""
        super().__init__("gpu")

    def is_initialized(self) -> bool:
        """Return True: the device needs no start."""
        return True

    def is_available(self) -> bool:
        """Return whether the device is there."""
        return PosedBackend.posed > 0

    def current_device(self) -> int:
        """Return the index of the only device."""
        return 0

    def device_count(self) -> int:
        """Return 1 while the device is there, else 0: a process sees its own GPU alone."""
        return int(PosedBackend.posed > 0)

    def _is_in_bad_fork(self) -> bool:
        """Return False: a forked process can use the device, which has no state to lose."""
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: no random number is drawn on the device."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the types that CUDA's autocast casts to."""
        return [torch.float16, torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        """Return a state of random numbers of the size that CUDA's has, in bytes."""
        return torch.zeros(_RNG_STATE_BYTES, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        """Do nothing: no random number is drawn on the device."""

    def set_device(self, device: Any) -> None:
        """Do nothing: there is one device."""

    def synchronize(self, device: Any = None) -> None:
        """Return at once: nothing runs on the device."""

    def current_stream(self, device: Any = None) -> Any:
        """Return the stream that the script's operations go to."""
        return Stream(stream_id=Stream.recorder.stream)

    def stream(self, stream: Any) -> Any:
        """Return a context in which ``stream`` is the current one; None: a context that changes nothing."""
        return stream if stream is not None else contextlib.nullcontext()

    def set_stream(self, stream: Any) -> None:
        """Make a stream the current one."""
        Stream.recorder.stream = stream.stream_id


class Event:
    """Stands in for ``torch.cuda.Event``: it marks the last call that a stream had been given when it was recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Stand for the calls that the current stream has been given so far; the arguments are ignored."""
        self.device = CUDA
        self.record()

    def record(self, stream: Any = None) -> None:
        """Stand from now on for the calls that a stream has been given so far; None: the current stream."""
        self.recorded_s = time.perf_counter()
        self.call_index = Stream.recorder.last_call_index(_stream_number(stream))
        """Of the last of those calls; None: there is none."""

    def wait(self, stream: Any = None) -> None:
        """Let the next call of a stream wait for the calls that the event stands for; None: the current stream."""
        Stream.recorder.wait_for(_stream_number(stream), self.call_index)

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds of this computer between the recording of this event and of ``end``.

        At least 0.001, because scripts divide by it.
        """
        return max(_LEAST_ELAPSED_MS, 1e3 * float(end.recorded_s - self.recorded_s))

    def query(self) -> bool:
        """Return True: all that the event stands for is done, since nothing runs."""
        return True

    def synchronize(self) -> None:
        """Note that the host waits for the GPU."""
        Stream.recorder.note_host_wait()


class Stream:
    """Stands in for ``torch.cuda.Stream``, known by its number; in a ``with`` block it is the current stream."""

    recorder: ClassVar[Recorder]
    """The recorder whose current stream is changed: that of the innermost block of :func:`posed`."""
    _numbers = count(1)

    def __init__(self, device: Any = None, priority: int = 0, stream_id: int | None = None, **_: Any) -> None:
        """Make a stream with the next number, or an object for the stream ``stream_id``; 0 is the default stream.

        ``device`` is ignored, because there is one.
        """
        self.device = CUDA
        self.priority = priority
        # The device's type and index as torch.Stream has them.
        self.device_type = torch._C._autograd.DeviceType.CUDA.value
        self.device_index = 0
        self.stream_id = next(Stream._numbers) if stream_id is None else stream_id
        self.cuda_stream = self.stream_id
        self._outer_streams: list[int] = []

    def __enter__(self) -> Stream:
        """Make the stream the current one."""
        self._outer_streams.append(Stream.recorder.stream)
        Stream.recorder.stream = self.stream_id
        return self

    def __exit__(self, *_: object) -> None:
        """Go back to the stream that was the current one before the block."""
        Stream.recorder.stream = self._outer_streams.pop()

    def __eq__(self, other: object) -> bool:
        """Return whether another object is the same stream: streams are often made anew from their number."""
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        """Return the stream's number, so that equal streams have equal hashes."""
        return self.stream_id

    def wait_stream(self, stream: Any) -> None:
        """Let this stream's next call wait for the calls that another stream has been given so far."""
        Stream.recorder.wait_for(self.stream_id, Stream.recorder.last_call_index(stream.stream_id))

    def wait_event(self, event: Any) -> None:
        """Let this stream's next call wait for the calls that an event stands for."""
        event.wait(self)

    def record_event(self, event: Any = None) -> Any:
        """Return an event, the given one or a new one, that stands for what the stream has been given so far."""
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Return True: all work of the stream is done, since nothing runs."""
        return True

    def is_capturing(self) -> bool:
        """Return False: while a graph of CUDA is captured, calls run as ever."""
        return False

    def synchronize(self) -> None:
        """Note that the host waits for the GPU."""
        Stream.recorder.note_host_wait()


def _stream_number(stream: Any) -> int:
    """Return the number of a stream; None: of the current one."""
    return Stream.recorder.stream if stream is None else int(stream.stream_id)


PosedBackend.Event, PosedBackend.Stream = Event, Stream  # type: ignore[attr-defined]


@cache
def register_device() -> torch.device:
    """Register the device with torch under the name ``gpu``, once in a process, and return it.

    Raises NeedsOwnProcess where there is a GPU, on which this process could not train any more.
    """
    own_process.demand_own_process()
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(rename="gpu", backend_module=PosedBackend())
    return torch.device("gpu", 0)


class Pose(TorchFunctionMode):
    """The mode in which every call of torch's functions on ``cuda`` works on the registered device.

    The script names and sees ``cuda``; its tensors are on the registered device. Arguments are translated from the one
    to the other, and properties of tensors back.
    """

    def __init__(self, recorder: Recorder) -> None:
        """Stand in for CUDA with the device of ``recorder``, which also notes which values the script reads."""
        super().__init__()
        self.recorder, self.gpu = recorder, recorder.gpu

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one call of torch's with the registered device in place of CUDA, or return a result without running it.

        Memory cannot be pinned here and no random number is drawn, so ``pin_memory`` and ``generator`` are unset.
        """
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if isinstance(first, Tensor):
            result = self._result_for_tensor(func, name, first, args, kwargs)
            if result is not NotImplemented:
                return result
        if func is torch.device:
            # The script keeps a device that says cuda, and it is translated where it is used. A number alone is a GPU's.
            device = torch.device("cuda", first) if isinstance(first, int) else func(*args, **kwargs)
            return CUDA if device.type == self.gpu.type else device
        if name in ("__getitem__", "__setitem__") and isinstance(first, FakeTensor):
            args = (first, _lists_to_tensors(args[1]), *args[2:])
        args = tuple(map(self.on_registered_device, args))
        if "device" in kwargs:
            kwargs["device"] = self.on_registered_device(kwargs["device"])
        if name in ("tensor", "as_tensor", "asarray", "from_numpy") and kwargs.get("device") is not None:
            # The data, Python's or numpy's, has values: it is read on the CPU, then moved.
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if kwargs.get("generator") is not None:
            kwargs["generator"] = None
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if name == "to" and isinstance(first, Tensor) and len(args) > 1 and isinstance(args[1], int):
            args = (first, self.gpu, *args[2:])  # x.to(0): the number of a GPU
        return func(*args, **kwargs)

    def _result_for_tensor(
        self, func: Any, name: str, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of a tensor's property or method that is handled here; NotImplemented: the call has to run.

        ``func`` is torch's function, ``name`` its name, ``args`` and ``kwargs`` its arguments, and ``tensor`` the first of
        these.
        """
        if name == "__get__":  # the getter of a property, such as is_cuda or device
            return self._property(func, args, kwargs)
        if name == "cuda":
            return tensor.to(self.gpu, non_blocking=True)
        if name == "pin_memory":  # memory cannot be pinned here
            return tensor
        if name in _MEMORY_RESULTS:
            return _MEMORY_RESULTS[name]
        if isinstance(tensor, FakeTensor) and name in _READS:
            return self._read(name, tensor, args)
        if name in ("new", "type"):  # these two may name the tensor types of torch's first years
            return legacy_result(name, tensor, args[1:], self.gpu)
        return NotImplemented

    def on_registered_device(self, value: Any) -> Any:
        """Return the registered device for a device of CUDA or the name of one; return anything else unchanged.

        That includes whole numbers, which mean a GPU in some arguments only.
        """
        if isinstance(value, torch.device):
            return self.gpu if value.type == "cuda" else value
        if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
            return self.gpu
        return value

    def _property(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return a tensor's property, as if a tensor of the registered device were on CUDA.

        ``func`` is the property's getter, a method bound to its descriptor; ``args`` begins with the tensor.
        """
        descriptor = getattr(func, "__self__", None)
        if getattr(descriptor, "__name__", "") == "is_cuda":
            return isinstance(args[0], FakeTensor) and args[0].fake_device.type == self.gpu.type
        value = func(*args, **kwargs)
        return CUDA if isinstance(value, torch.device) and value.type == self.gpu.type else value

    def _read(self, name: str, tensor: Tensor, args: tuple[Any, ...]) -> Any:
        """Return what a script gets that reads a tensor without values: ones, as Python or numpy objects, or a text.

        ``name``: one of ``_READS``, ``args``: the method's arguments, the tensor first. Unless the script asks for
        ``repr``, the read is noted as an assumed value. Raises TypeError where numpy lacks the type, as torch does.
        """
        if name != "__repr__":
            self.recorder.note_assumed_value()
        with _disable_current_modes():
            ones = torch.ones(tuple(tensor.shape), dtype=tensor.dtype)
            if name == "__format__":
                printed = ones.item() if ones.dim() == 0 else f"tensor{tuple(ones.shape)}"
                return format(printed, args[1])
            if name == "__repr__":
                return f"tensor(..., size={tuple(ones.shape)}, dtype={ones.dtype})"
            if name == "numpy" and ones.dtype == torch.bfloat16:
                raise TypeError("Got unsupported ScalarType BFloat16")
            return ones.tolist() if name == "tolist" else ones.numpy()


def _lists_to_tensors(index: Any) -> Any:
    """Return an index of a tensor with its lists of numbers, at any depth of tuples, as tensors of the CPU.

    torch would turn the lists into tensors by itself, on the device, in a call that no mode sees.
    """
    if isinstance(index, tuple):
        return tuple(map(_lists_to_tensors, index))
    if not isinstance(index, list) or not all(isinstance(number, (int, list)) for number in index):
        return index
    return torch.tensor(index, dtype=None if index else torch.long)  # torch would take [] for floats


_MEMORY_RESULTS = {"is_pinned": False, "record_stream": None}
"""What methods return that concern a tensor's memory, which does not exist here."""
_READS = frozenset(["__format__", "__repr__", "tolist", "numpy", "__array__"])
"""Methods that read a tensor's values."""


class _StandIns:
    """Attributes of torch's modules and classes that are replaced until :meth:`restore`."""

    def __init__(self) -> None:
        """Begin with nothing replaced."""
        self._replaced: list[tuple[Any, str, Any]] = []
        """Of each replacement the owner, the attribute's name, and its value before; ``_ABSENT`` where it had none."""

    def set(self, owner: Any, **values: Any) -> None:
        """Set attributes of ``owner``, a module or class, to ``values`` by name, and keep what was there before."""
        for name, value in values.items():
            self._replaced.append((owner, name, vars(owner).get(name, _ABSENT)))
            setattr(owner, name, value)

    def restore(self) -> None:
        """Undo all replacements, the last one first, since an attribute may have been replaced twice."""
        for owner, name, value in reversed(self._replaced):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._replaced.clear()


_ABSENT = object()


@contextlib.contextmanager
def posed(
    recorder: Recorder,
    *,
    name: str = "GPU",
    memory_bytes: int = 80 * 2**30,
    capability: tuple[int, int] = (9, 0),
    count: int = 1,
) -> Iterator[Pose]:
    """Run the block in a process that seems to have ``count`` GPUs of a name, a memory and a compute capability.

    ``recorder``: the mode that records, active in the block, too. ``memory_bytes``: of each GPU. ``capability``: (major,
    minor). Yields the function mode that is active in the block. What is replaced in torch belongs to the whole process,
    and is restored at the end; other threads that call this wait until then, and raise InputError after ten minutes.
    """
    if not _LOCK.acquire(timeout=_LOCK_WAIT_S):
        raise InputError("record", f"another thread has recorded for {_LOCK_WAIT_S:g} s", "let it end first")
    autocast = install_cuda_kernels(recorder.gpu.type)
    pose, stand_ins = Pose(recorder), _StandIns()
    outer_recorder = getattr(Stream, "recorder", recorder)  # of a block around this one
    Stream.recorder = recorder
    PosedBackend.posed += 1
    swaps_parameters = torch.__future__.get_swap_module_params_on_conversion()
    try:
        _stand_in_cuda(stand_ins, name, memory_bytes, capability, count)
        _stand_in_autocast(stand_ins, recorder.gpu, autocast)
        _stand_in_tensors(stand_ins, pose)
        _stand_in_modules(stand_ins, pose)
        _stand_in_files(stand_ins, pose)
        # torch starts a thread for every device at the first backward pass of a process, and so may have none for this one.
        with torch.autograd.set_multithreading_enabled(False), recorder, pose:
            yield pose
    finally:
        stand_ins.restore()
        autocast.clear()
        torch.__future__.set_swap_module_params_on_conversion(swaps_parameters)
        PosedBackend.posed -= 1
        Stream.recorder = outer_recorder
        _LOCK.release()


def _stand_in_cuda(stand_ins: _StandIns, name: str, memory_bytes: int, capability: tuple[int, int], count: int) -> None:
    """Let functions of ``torch.cuda`` and ``torch.accelerator`` describe ``count`` GPUs; arguments as of :func:`posed`.

    The GPUs are always idle and empty: memory in use is 0 bytes, and synchronizing is noted as a wait of the host. Other
    properties are those of an H100 (132 multiprocessors, 50 MiB of L2 cache).
    """
    device = PosedBackend()
    major, minor = capability
    properties = SimpleNamespace(
        name=name, total_memory=memory_bytes, major=major, minor=minor, multi_processor_count=132, is_integrated=False,
        warp_size=32, max_threads_per_multi_processor=2048, L2_cache_size=50 * 2**20, gcnArchName="", uuid="0",
    )  # fmt: skip
    # Functions that take any arguments, by what they do or return.
    nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    zero: Callable[..., int] = lambda *_, **__: 0  # noqa: E731
    true: Callable[..., bool] = lambda *_, **__: True  # noqa: E731
    waits: Callable[..., None] = lambda *_, **__: Stream.recorder.note_host_wait()  # noqa: E731
    block: Callable[..., Any] = lambda *_, **__: contextlib.nullcontext()  # noqa: E731
    stand_ins.set(
        torch.cuda,
        is_current_stream_capturing=lambda: False,
        is_available=true, is_initialized=true, is_bf16_supported=true, is_tf32_supported=true, can_device_access_peer=true,
        device_count=lambda: count, current_device=zero, get_device_name=lambda *_: name,
        get_device_capability=lambda *_: capability, get_device_properties=lambda *_: properties,
        get_arch_list=lambda: [f"sm_{major}{minor}"],
        set_device=nothing, synchronize=waits, empty_cache=nothing, init=nothing, _lazy_init=nothing, ipc_collect=nothing,
        manual_seed=nothing, manual_seed_all=nothing, seed=nothing, seed_all=nothing,
        reset_peak_memory_stats=nothing, reset_max_memory_allocated=nothing, set_per_process_memory_fraction=nothing,
        get_rng_state=device.get_rng_state, set_rng_state=nothing, set_rng_state_all=nothing,
        get_rng_state_all=lambda: [device.get_rng_state() for _ in range(count)],
        memory_allocated=zero, max_memory_allocated=zero, memory_reserved=zero, max_memory_reserved=zero,
        memory_stats=lambda *_, **__: dict.fromkeys(_MEMORY_STATISTICS, 0), memory_summary=lambda *_, **__: "",
        mem_get_info=lambda *_: (memory_bytes, memory_bytes), utilization=zero,
        Event=Event, Stream=Stream, current_stream=device.current_stream, default_stream=lambda *_: Stream(stream_id=0),
        set_stream=device.set_stream,
        stream=device.stream, device=block, device_of=block, _DeviceGuard=block,
    )  # fmt: skip
    stand_ins.set(
        torch.accelerator,
        is_available=true, device_count=lambda: count, current_accelerator=lambda *_, **__: torch.device("cuda"),
        current_device_index=zero, current_device_idx=zero, set_device_index=nothing, set_device_idx=nothing,
        synchronize=waits, current_stream=device.current_stream, set_stream=device.set_stream, empty_cache=nothing,
        memory_stats=lambda *_, **__: dict.fromkeys(_MEMORY_STATISTICS, 0), max_memory_allocated=zero,
        memory_allocated=zero,
        max_memory_reserved=zero, memory_reserved=zero, reset_peak_memory_stats=nothing,
        get_memory_info=lambda *_: (memory_bytes, memory_bytes),
    )  # fmt: skip
    stand_ins.set(torch.version, cuda=torch.version.cuda or _CUDA)
    stand_ins.set(torch.backends.cuda, is_built=true)
    stand_ins.set(
        torch.backends.cudnn, is_available=true, version=lambda: 91002,
        is_acceptable=lambda _tensor: False,  # else recurrent layers would flatten weights, and ask for addresses
    )  # fmt: skip
    stand_ins.set(torch.distributed, is_nccl_available=true)
    _stand_in_generators(stand_ins)


def _stand_in_generators(stand_ins: _StandIns) -> None:
    """Replace torch's random generators by ones of the CPU, since no random number is drawn on the device.

    Setting a state that is a fake tensor does nothing, as it has no values.
    """
    real_generator: Any = torch.Generator

    class AnyGenerator(type(real_generator)):  # type: ignore[misc]
        """The metaclass of the replacement, by which torch's own generators count as its instances."""

        def __instancecheck__(cls, value: Any) -> bool:
            """Return whether a value is any generator of torch's."""
            return isinstance(value, real_generator)

    class Generator(real_generator, metaclass=AnyGenerator):  # type: ignore[misc]
        """A generator of the CPU, whatever device is asked for."""

        def __new__(cls, device: Any = "cpu") -> Any:
            """Return a generator of the CPU."""
            return real_generator.__new__(cls, "cpu")

        def set_state(self, state: Tensor) -> Any:
            """Set the state, unless that is a fake tensor; return the generator."""
            return self if isinstance(state, FakeTensor) else super().set_state(state)

    real_set = torch.random.set_rng_state

    def set_rng_state(new_state: Tensor) -> None:
        """Set the state of the CPU's generator, unless that is a fake tensor."""
        if not isinstance(new_state, FakeTensor):
            real_set(new_state)

    stand_ins.set(torch, Generator=Generator, set_rng_state=set_rng_state)
    stand_ins.set(torch.random, set_rng_state=set_rng_state)


_MEMORY_STATISTICS = [
    f"{what}.{pool}.{when}"
    for what in ("active_bytes", "allocated_bytes", "reserved_bytes", "inactive_split_bytes", "active", "segment")
    for pool in ("all", "large_pool", "small_pool")
    for when in ("current", "peak", "allocated", "freed")
] + ["num_alloc_retries", "num_ooms"]


def _stand_in_autocast(stand_ins: _StandIns, gpu: torch.device, cache: Autocast) -> None:
    """Let autocast on CUDA work on the registered device: the context managers, and the functions that ask about it.

    ``cache``: the device's autocast kernels, whose casts of parameters are forgotten when the outermost block ends, as
    torch does with its own.
    """
    real = torch.amp.autocast_mode.autocast

    def device_type_here(device_type: Any) -> Any:
        """Return the registered device's type for "cuda" or "cuda:0", and any other type unchanged."""
        return gpu.type if str(device_type).partition(":")[0] == "cuda" else device_type

    class autocast(real):  # type: ignore[misc,valid-type]  # noqa: N801 - torch's name
        """torch's autocast with CUDA's default type, float16, on the registered device."""

        def __init__(
            self, device_type: str = "cuda", dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
        ) -> None:
            """Take the arguments of ``torch.autocast``; ``dtype`` None on CUDA: float16."""
            if device_type_here(device_type) == gpu.type and dtype is None:
                dtype = torch.float16
            super().__init__(device_type_here(device_type), dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

        def __exit__(self, *args: Any) -> Any:
            """End the block; after the outermost one, forget the casts."""
            result = super().__exit__(*args)
            if not torch.is_autocast_enabled(gpu.type):
                cache.clear()
            return result

    class cuda_autocast(autocast):  # noqa: N801 - torch's name
        """The older ``torch.cuda.amp.autocast``, whose first argument is ``enabled``."""

        def __init__(self, enabled: bool = True, dtype: Any = torch.float16, cache_enabled: bool = True) -> None:
            """Take the arguments of ``torch.cuda.amp.autocast``, which has no device among them."""
            super().__init__("cuda", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    for module in (torch, torch.amp, torch.amp.autocast_mode):
        stand_ins.set(module, autocast=autocast)
    for module in (torch.cuda.amp, torch.cuda.amp.autocast_mode):
        stand_ins.set(module, autocast=cuda_autocast)
    # Libraries ask for, and set, the state of autocast by these functions.
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        original = getattr(torch, name)

        def ask_of_device(*args: Any, _original: Any = original) -> Any:
            """Call torch's function; where its first argument names CUDA, or it has none, it is asked of the registered device.

            ``_original`` is a default because the loop's ``original`` will have changed by the time of a call.
            """
            if args and isinstance(args[0], str):
                args = (device_type_here(args[0]), *args[1:])
            return _original(*(args or (gpu.type,)))

        stand_ins.set(torch, **{name: ask_of_device})
    stand_ins.set(
        torch,
        is_autocast_enabled_cuda=lambda: torch.is_autocast_enabled("cuda"),
        get_autocast_gpu_dtype=lambda: torch.get_autocast_dtype("cuda"),
    )
    for amp in (torch.amp, torch.amp.autocast_mode):
        stand_ins.set(amp, is_autocast_available=lambda _type: True)


def _stand_in_tensors(stand_ins: _StandIns, pose: Pose) -> None:
    """Let fake tensors say that they are on CUDA, and let them be swapped, resized, and updated by fused optimizers."""
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    # A fake tensor's device is a property of Python's, which no mode sees; the operators themselves ask for the real one.
    real_device: Any = FakeTensor.device.fget  # type: ignore[attr-defined]

    def device(tensor: FakeTensor) -> torch.device:
        """Return CUDA for a tensor of the registered device, and its own device for any other.

        torch's operators ask while no function mode is on the stack, and get the registered device itself.
        """
        own: torch.device = real_device(tensor)
        return CUDA if own.type == pose.gpu.type and torch._C._len_torch_function_stack() else own

    stand_ins.set(FakeTensor, device=property(device))
    stand_ins.set(torch._subclasses, FakeTensor=_fake_class_for_torch_alone())
    stand_ins.set(torch.utils, swap_tensors=_swap)
    for owner in (optimizer, _foreach_utils):  # fused and foreach optimizers take tensors of listed types alone
        stand_ins.set(owner, _foreach_supported_types=[*owner._foreach_supported_types, FakeTensor])
    real_resize = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        """Resize a storage as torch does, and note it: FSDP frees and allocates parameters in this way."""
        Stream.recorder.note_resize(storage, size)
        return real_resize(storage, size)

    stand_ins.set(torch.UntypedStorage, resize_=resize)
    real_wrapper: Any = Tensor._make_wrapper_subclass

    def wrapper(kind: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        """Make an instance of ``kind``, a tensor subclass that wraps others; "cuda" means the registered device."""
        tensor: Tensor = real_wrapper(kind, *args, device=pose.on_registered_device(device), **kwargs)
        return tensor

    stand_ins.set(Tensor, _make_wrapper_subclass=staticmethod(wrapper))


def _stand_in_modules(stand_ins: _StandIns, pose: Pose) -> None:
    """Let modules move to the registered device and be recomputed in checkpoints, and let ``compile`` return them unchanged."""
    from torch.utils import checkpoint

    for module in (nn, nn.parallel, nn.parallel.data_parallel):
        stand_ins.set(module, DataParallel=_data_parallel_of(pose))
    # Else ``Module.to`` would make new parameters, as a real one takes no fake data; on CUDA they stay the same objects.
    torch.__future__.set_swap_module_params_on_conversion(True)
    stand_ins.set(torch, compile=_compiled)

    def compile_in_place(module: nn.Module, *_: Any, **__: Any) -> None:
        """Stand in for ``nn.Module.compile``: note that compiling was asked for, and leave the module unchanged."""
        _compiled(module)

    stand_ins.set(nn.Module, compile=compile_in_place)
    # Checkpointing compares the tensors that a recomputation saves with those saved first, by shape, type and device. A
    # tensor's device depends here on who asks, so it is left out.
    checks = checkpoint._allowed_determinism_checks_to_fns
    without_device: Callable[[Tensor], dict[str, Any]] = lambda saved: {"shape": saved.shape, "dtype": saved.dtype}  # noqa: E731
    stand_ins.set(checkpoint, _allowed_determinism_checks_to_fns={**checks, "default": without_device})
    stand_ins.set(nn.Module, cuda=lambda self, device=None: self.to("cuda"))
    real_to = nn.Module.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Move a module as ``nn.Module.to`` does; CUDA, or the number of a GPU, means the registered device."""
        if args and isinstance(args[0], int):
            args = (pose.gpu, *args[1:])
        if isinstance(kwargs.get("device"), int):
            kwargs["device"] = pose.gpu
        args = tuple(map(pose.on_registered_device, args))
        kwargs = {name: pose.on_registered_device(value) for name, value in kwargs.items()}
        return real_to(self, *args, **kwargs)

    stand_ins.set(nn.Module, to=to)


def _stand_in_files(stand_ins: _StandIns, pose: Pose) -> None:
    """Let data loaders load in this process, and ``torch.load`` read files to the CPU before it moves them to the device."""
    from torch.utils import data

    real_load, signature = torch.load, inspect.signature(torch.load)

    def load(*args: Any, **kwargs: Any) -> Any:
        """Load a file to the CPU, and move its tensors to the registered device where ``map_location`` names CUDA.

        torch cannot read a file to a device without memory. The arguments are those of ``torch.load``.
        """
        bound = signature.bind(*args, **kwargs)
        device = bound.arguments.get("map_location")
        bound.arguments["map_location"] = "cpu"
        loaded = real_load(*bound.args, **bound.kwargs)
        # A device of CUDA is the only one that has another one in its place.
        names_cuda = isinstance(device, (str, torch.device)) and pose.on_registered_device(device) != device
        return tree_map_only(Tensor, lambda tensor: tensor.to(pose.gpu), loaded) if names_cuda else loaded

    real_default = torch.set_default_device
    stand_ins.set(torch, load=load, set_default_device=lambda device: real_default(pose.on_registered_device(device)))
    real_loader = data.DataLoader.__init__

    @wraps(real_loader)  # Lightning reads this signature to make loaders anew
    def init_loader(self: Any, *args: Any, **kwargs: Any) -> None:
        """Make a data loader without worker processes and pinned memory, whatever the arguments of ``DataLoader`` ask.

        Workers would not be recorded, and memory cannot be pinned here.
        """
        bound = inspect.signature(real_loader).bind(self, *args, **kwargs)
        # The last three are refused by loaders without workers.
        bound.arguments.update(
            num_workers=0, pin_memory=False, persistent_workers=False, prefetch_factor=None, timeout=0
        )
        bound.arguments.pop("multiprocessing_context", None)
        real_loader(*bound.args, **bound.kwargs)

    stand_ins.set(data.DataLoader, __init__=init_loader)


def _fake_class_for_torch_alone() -> type:
    """Return a class for the name ``FakeTensor`` that only torch's own code finds tensors to be instances of.

    Libraries that find a fake tensor take another path than with a real one, and the real path is to be recorded.
    """

    class Fake(type):
        """The metaclass, by which the result of isinstance depends on the file of the calling code."""

        def __instancecheck__(cls, value: Any) -> bool:
            """Return whether a value is a fake tensor and the calling code lies in a folder ``torch``."""
            return isinstance(value, FakeTensor) and "/torch/" in sys._getframe(1).f_code.co_filename

        def __subclasscheck__(cls, kind: Any) -> bool:
            """Return whether a class is that of fake tensors or derives from it."""
            return issubclass(kind, FakeTensor)

    return Fake("FakeTensor", (), {})


def _data_parallel_of(pose: Pose) -> type[nn.Module]:
    """Return a class to replace DataParallel, which uses one GPU alone; several are noted as an assumed value."""

    class DataParallel(nn.DataParallel):  # type: ignore[type-arg]
        """DataParallel over the one device."""

        def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None, dim: int = 0) -> None:
            """Wrap a module for one device; note an assumed value where DataParallel would use several."""
            if (len(device_ids) if device_ids is not None else torch.cuda.device_count()) > 1:
                pose.recorder.note_assumed_value()
            super().__init__(module, [0], 0, dim)

        def forward(self, *inputs: Any, **kwargs: Any) -> Any:
            """Call the module on inputs that are moved to the device, as DataParallel moves them."""
            inputs, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(pose.gpu), (inputs, kwargs))
            return self.module(*inputs, **kwargs)

    return DataParallel


def _compiled(model: Any = None, **_: Any) -> Any:
    """Stand in for ``torch.compile``: return the model or function unchanged, and note that compiling was asked for.

    The cost model works out later which kernels compiling fuses. Without a model, return a decorator.
    """
    Stream.recorder.step.compiled = True
    return model if model is not None else lambda function: function


def _swap(first: Tensor, second: Tensor) -> None:
    """Swap the contents of two tensors, as ``torch.utils.swap_tensors`` does, also between a real and a fake tensor.

    ``Module.to`` calls it with a parameter as ``first`` and the moved tensor as ``second``. Attributes that the script
    has set on the parameter stay on it.
    """
    if type(first) is not type(second):  # a tensor of the registered device is fake, one of the CPU is real
        first.__class__, second.__class__ = type(second), type(first)
    before, other_before = dict(first.__dict__), dict(second.__dict__)
    # Each ``__dict__`` is changed in place, so that it stays the same object.
    first.__dict__.clear()
    first.__dict__.update(other_before)
    second.__dict__.clear()
    second.__dict__.update(before)
    for name, value in before.items():
        if not name.startswith(
            "_ddltool"
        ):  # what the recorder sets on a tensor describes its values, and moves with them
            first.__dict__.setdefault(name, value)
    if type(first) is type(second):  # attributes that are not in ``__dict__``
        for slot in copyreg._slotnames(type(first)):  # type: ignore[attr-defined]
            one, other = getattr(first, slot), getattr(second, slot)
            setattr(first, slot, other)
            setattr(second, slot, one)
    torch._C._swap_tensor_impl(first, second)


def _first_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[int, ...], bool] | None:
    """Return (shape, whether it holds whole numbers) of the first tensor among a module's inputs; None: there is none.

    Tensors without dimensions are passed over. For a list of images the shape begins with the number of images, as that of a
    batch does.
    """
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    first = next((tensor for tensor in tensors if tensor.dim()), None)  # a single number is no batch
    if first is None:
        return None
    is_list_of_images = bool(args) and isinstance(args[0], (list, tuple)) and first.dim() == _IMAGE_DIMENSIONS
    shape = (len(args[0]), *first.shape) if is_list_of_images else tuple(first.shape)
    return shape, not first.is_floating_point()


@contextlib.contextmanager
def recording_modules(recorder: Recorder) -> Iterator[None]:
    """Keep ``recorder.modules``, the names of the modules whose forward passes are under way, within the block.

    Names are those within the outermost module that is called. ``nn.Module.__call__`` is replaced, because torch's
    global module hooks do not get keyword arguments.
    """
    names: dict[int, str] = {}  # by a module's identity
    watched: set[int] = set()  # identities of parameters whose gradients are noted

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        """Append the name of a module, whose forward pass begins, to ``recorder.modules``; "" for a module without one."""
        # A submodule that is called on its own, as checkpoints do in the backward pass, keeps its name in the whole model.
        if not recorder.modules and not names.get(id(module)):
            enter_outermost(module, args, kwargs)
        recorder.modules.append(names.get(id(module), ""))

    def enter_outermost(module: nn.Module, args: Any, kwargs: Any) -> None:
        """Keep the names of the submodules of a module that no other module calls, and set hooks on its parameters.

        Its input is kept, too, if gradients are on and the step is being recorded. The hook of a trained parameter notes the
        parameter's gradient as soon as that is complete.
        """
        names.update({id(child): name for name, child in module.named_modules()})
        recorder.roots.setdefault(id(module), module)
        if recorder.recording and torch.is_grad_enabled():
            first = _first_input(args, kwargs)
            if first is not None:
                recorder.inputs.setdefault(id(module), []).append(first)
        for parameter in module.parameters():
            if parameter.requires_grad and id(parameter) not in watched:
                watched.add(id(parameter))
                parameter.register_post_accumulate_grad_hook(recorder.note_gradient)

    real_call = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call a module, whose name is the last of ``recorder.modules`` meanwhile."""
        enter(module, args, kwargs)
        in_backward = torch._C._current_graph_task_id() != -1  # -1: autograd runs no backward pass
        recorder.recomputing += in_backward
        try:
            return real_call(module, *args, **kwargs)
        finally:
            recorder.recomputing -= in_backward
            recorder.modules.pop()

    setattr(nn.Module, "__call__", call)  # noqa: B010 - mypy lets no method be assigned
    try:
        yield
    finally:
        setattr(nn.Module, "__call__", real_call)  # noqa: B010
