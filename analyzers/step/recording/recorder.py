"""What a script does to tensors that seem to be on a GPU: every operation, storage and collective of one steady step.

GPU tensors are fake (sizes without values); tensors on the CPU are real, except for large ones that hold no data.
:class:`Recorder` is the mode under which a script runs; start there.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Work
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ddltool.analyzers.step.recording.op_rules import names_in
from ddltool.analyzers.step.recording.torch_costs import arguments_by_name
from ddltool.analyzers.step.recording.values import Values

Phase = Literal["forward", "backward", "update"]
_LARGE_BYTES = 2**20
"""A tensor of the CPU of at least so many bytes has no memory, unless it was filled with data."""
_MAX_CALLS = 500_000
"""Operations of the longest step that is recorded."""
_TRUTH = "_ddltool_truth"
"""The attribute of a boolean tensor without values that holds the truth value assumed of all its elements."""
_PARTS = "_ddltool_parts"
"""The attribute of a sparse tensor that holds its indices and values, which torch's fake sparse tensors lack."""
_ROWS_ARGUMENT = {"embedding_backward": 2, "_embedding_bag_backward": 6}
"""The index of the number of an embedding's rows among the arguments of its gradient."""
_FROM_ROWS_TO_SPARSE = 3
"""How many arguments after that one comes the flag whether the gradient is sparse."""
_IMAGE_ARGUMENT = {"convolution": 0, "convolution_backward": 1}
"""The index of a convolution's image among its arguments; the weight follows it."""
LAYOUTS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The layout with channels last of images, of dimensions (samples, channels, height, width), and of volumes."""
_CALLERS_SEARCHED = 13
"""Frames to look through for who reads a value: between a script's call and the mode lie a few of torch's own."""
# Operators that make a tensor without reading data.
_FILLS = names_in("empty empty_strided rand randn zeros ones full randint empty_like rand_like randn_like new_empty")
_FAKE = torch._C._TorchDispatchModeKey.FAKE
_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
"""Operators that read a tensor's only value, for ``item()`` and ``if``."""
_UNIQUE = ("unique", "_unique2", "unique_dim", "unique_consecutive")
"""Operators whose result has a row for each distinct element."""


@dataclass(slots=True)
class RecordedStorage:
    """The memory behind GPU tensors, and its life in the step."""

    number: int
    """Its index among the step's storages."""
    size_bytes: int
    made: int
    """Index of the call that made it, -1 for one that was there before the step."""
    freed: int | None = None
    """Index of the call after which it was freed, None for one that outlives the step."""
    shadow: Tensor | None = None
    """The same bytes on the meta device, behind the tensors that stand for those of the calls."""
    shadows: dict[tuple[Any, ...], Shadow] = field(default_factory=dict)
    """The shadows of this storage's tensors so far, by shape, strides, offset and type."""

    def shadow_of(self, tensor: Tensor) -> Shadow:
        """Return the shadow of a tensor laid out as ``tensor`` is, in this storage: the same one whenever it is asked for.

        Shadows of one storage share a storage, too. Call it outside the modes, which would note its operations.
        """
        layout = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
        found = self.shadows.get(layout)
        if found is None:
            if self.shadow is None:
                self.shadow = torch.empty(self.size_bytes, dtype=torch.uint8, device="meta")
            view = torch.empty(0, dtype=tensor.dtype, device="meta")
            view.set_(self.shadow.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
            found = self.shadows[layout] = Shadow(self.number, view)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Shadow:
    """A tensor of a call: its storage's number, and a meta tensor of the same shape, strides and type.

    Two tensors of a recording that agree in all of these are one shadow.
    """

    storage: int
    tensor: Tensor


def shadows_of(value: Any) -> Iterator[Shadow]:
    """Yield the tensors among a call's values, in nested tuples, lists and mappings.

    In a recorded call every GPU tensor is a :class:`Shadow`: the number of its storage, and its shape and type.
    """
    if isinstance(value, Shadow):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from shadows_of(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from shadows_of(part)


@dataclass(frozen=True, slots=True)
class Collective:
    """What a collective moves, and between which ranks."""

    name: str
    """all_reduce, all_gather, reduce_scatter, broadcast, ... as torch.distributed names it."""
    size_bytes: int
    """Of the whole: what all_gather puts together, what reduce_scatter takes apart."""
    ranks: tuple[int, ...]


@dataclass(slots=True)
class RecordedCall:
    """One operation on GPU tensors, in which every tensor is a :class:`Shadow`, or a collective."""

    target: Any
    """torch's operator."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    phase: Phase
    module: str
    """The innermost module whose forward pass is under way, by its name; "": none is."""
    stream: int
    """0 for the default stream, positive for other streams of the script, negative for collectives, one for each group."""
    waits: tuple[int, ...] = ()
    """Indices of calls of other streams that end before this one starts."""
    exchange: Collective | None = None
    """None: it is no collective."""
    recomputed: bool = False
    """Whether a checkpoint computes it again in the backward pass."""
    copied: int | None = None
    """The same number for calls that differ only in whose block's tensors they take (:mod:`.repeating`); None: recorded."""


@dataclass(slots=True)
class Recording:
    """One step of a script: what lies between the ends of two updates."""

    calls: list[RecordedCall] = field(default_factory=list)
    storages: list[RecordedStorage] = field(default_factory=list)
    parameters: dict[str, Shadow] = field(default_factory=dict)
    """The trained model's parameters by name."""
    gradients: dict[str, Shadow] = field(default_factory=dict)
    """By a parameter's name, its gradient of this step, as it was when it was noted last."""
    buffers: set[int] = field(default_factory=set)
    """The storages of the model's buffers."""
    assumed: Counter[str] = field(default_factory=Counter)
    """How often a value that only a run knows was read, by ``file:line``."""
    host_waits: list[int] = field(default_factory=list)
    """Indices of calls that the host waited for before it went on."""
    inputs: list[tuple[int, ...]] = field(default_factory=list)
    """For every forward pass of the model (the called module with most trained elements), the shape of its first tensor."""
    tokens: bool = False
    """Whether these tensors hold whole numbers."""
    compiled: bool = False
    """Whether the script asks torch.compile for its model."""
    tf32: bool = False
    """Whether products of float32 may use TF32."""
    world_size: int = 1
    seconds: float = 0.0
    """How long the recording took."""


class Recorder(TorchDispatchMode):
    """The mode under which a script runs: GPU operations run on fake tensors, which have sizes and no values.

    While :attr:`recording` is true, every such operation, its storages and collectives are noted in :attr:`step`. Methods
    take an operator as torch passes it to a mode: ``func``, its ``name`` without namespace and overload, its ``args``
    and ``kwargs``, and ``tensors``, the tensors among these.
    """

    def __init__(self, gpu: torch.device) -> None:
        """Begin with nothing recorded; ``gpu``: the registered device that the script takes for CUDA."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.gpu = gpu
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.step = Recording()
        self.recording = False
        self.phase: Phase = "forward"
        self.modules: list[str] = []
        """Names of the modules whose forward passes are under way, the innermost last."""
        self.recomputing = 0
        """How many of them were called in a backward pass, where only checkpoints call modules."""
        self._backwards_without_gradients: set[int] = set()
        """Torch's numbers of the backward passes in which some op ran without gradients."""
        self.stream = 0
        """The current stream's number; collectives have the negative number of their group."""
        self._last_place: dict[int, int] = {}
        """By stream, the index of its last call."""
        self._waiting: dict[int, set[int]] = {}
        """By stream, the indices of calls that its next call waits for."""
        self._group_numbers: dict[tuple[int, ...], int] = {}
        """By a process group's ranks, its number, in the order of the groups' first exchanges."""
        self.kept: list[Any] = []
        """What must live as long as the process: libraries of operators."""
        self._handles: list[Any] = []  # torch holds only the C++ half of a collective's handle; this keeps the other
        self._filled_by: dict[int, int] = {}
        """By a storage's number, the index of the collective's call that fills it."""
        self.roots: dict[int, nn.Module] = {}
        """The outermost modules that were called, by identity."""
        self.inputs: dict[int, list[tuple[tuple[int, ...], bool]]] = {}
        """By an outermost module's identity, the input of each of its passes: its shape, and whether it is of integers."""
        self._storages: dict[int, tuple[RecordedStorage, Any]] = {}
        """By torch's identifier, the storages that live, each with a weak reference that notes when it is freed."""
        self._gradients: dict[int, Shadow] = {}
        """By a parameter's identity, its gradient of this step."""
        self._values = Values(only_whole=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator: on real tensors of the CPU as it is and unnoted, on fake tensors otherwise, and noted.

        ``types``: the tensor subclasses among its arguments. A tensor that is made on the GPU is fake. So is a large one of
        the CPU that holds no data, so that it takes no memory. For collectives, sparse tensors and reads of single values a
        result is returned without running the operator.
        """
        if any(issubclass(kind, Tensor) and kind not in (Tensor, nn.Parameter, FakeTensor) for kind in types):
            return NotImplemented  # a subclass made of tensors (DTensor): it calls again with those tensors
        kwargs = dict(kwargs or {})
        if kwargs.get("generator") is not None:
            kwargs["generator"] = None  # every generator is of the CPU here, which operators on the device refuse
        namespace, _, name = func._schema.name.partition("::")
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
        if namespace == "c10d":
            return self._exchange(func, name, args)
        if name in ("_indices", "_values") and hasattr(tensors[0], _PARTS):
            return getattr(tensors[0], _PARTS)[name == "_values"]  # (indices, values) of a sparse tensor
        if is_fake:
            result = self._without_running(func, name, args, tensors)
            if result is not NotImplemented:
                return result
        # Under another fake mode torch asks itself for shapes (DTensor does): nothing runs.
        if namespace == "prim" or torch._C._get_dispatch_mode(_FAKE) is not None:
            return func(*args, **kwargs)
        device = kwargs.get("device")
        is_made_on_gpu = device is not None and torch.device(device).type in (self.gpu.type, "cuda")
        if is_made_on_gpu:
            kwargs["device"] = self.gpu
        if is_made_on_gpu or (name in _FILLS and not tensors and _is_large(name, args, kwargs)):
            with self.fake:
                fake_args, fake_kwargs = tree_map_only(Tensor, _without_values, (args, kwargs))
                output = func(*fake_args, **fake_kwargs)
        elif is_fake:
            try:
                output = self._on_fake_tensors(func, name, args, kwargs, tensors)
            except DataDependentOutputException:  # the op returns a Python value, as torch.equal does
                return self._assumed_value(tensors[0])
        else:
            return func(*args, **kwargs)
        self._keep_result(func, name, args, kwargs, tensors, output)
        return output

    def _keep_result(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[Tensor], output: Any
    ) -> None:
        """Note an operator that has run on fake tensors, and keep what is known of the values of its ``output``.

        Of a boolean result without known values that is a truth value to assume, of a sparse one its indices and values.
        """
        is_known = self._values.follow(func, args, kwargs, output)
        if isinstance(output, FakeTensor) and output.dtype == torch.bool and not is_known:
            setattr(output, _TRUTH, self._truth_of(func, name, args, kwargs))
        if isinstance(output, FakeTensor) and output.layout == torch.sparse_coo:
            # No kernel runs: the operators that made its indices and values have been noted.
            self._keep_parts(name, args, tensors, output)
        else:
            self._note(func, args, kwargs, output)

    def _without_running(self, func: Any, name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> Any:
        """Return the result of an op on fake tensors if it is known without running the op; NotImplemented otherwise.

        These are sparse gradients of embeddings, reads of single values, and handles of asynchronous collectives. ``name``:
        the op's, without overload; ``tensors``: those among its arguments.
        """
        if name in _ROWS_ARGUMENT:
            sparse_argument = _ROWS_ARGUMENT[name] + _FROM_ROWS_TO_SPARSE
            if args[sparse_argument]:
                return self._sparse_gradient(name, args)
        if func in _READS:  # of its only argument
            return self._assumed_value(tensors[0])
        if name == "_wrap_tensor_autograd":
            from torch.distributed._functional_collectives import AsyncCollectiveTensor

            return AsyncCollectiveTensor(args[0])  # its first use waits for its collective
        return NotImplemented

    def _on_fake_tensors(self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Return the result of an op on fake tensors, fake as well.

        If torch does not know the result's shape, the op runs on the CPU, on known values and on ones in the place of
        unknown values. If that shape depends on values, a wait of the host is noted, because the host needs the values
        to allocate the result; and an assumed value where a whole-number or boolean input is unknown. Raises
        DataDependentOutputException where the op returns a Python value.
        """
        try:
            with self.fake:
                output = func(*args, **kwargs)
                return _as_cudnn_lays_out(name, args, output) if name in _IMAGE_ARGUMENT else output
        except DynamicOutputShapeException:  # the size depends on values; with ones, nonzero finds every element
            if any(self._values.value_of(tensor) is None for tensor in tensors if not tensor.is_floating_point()):
                self.note_assumed_value()
            self.note_host_wait()
        except (NotImplementedError, UnsupportedOperatorException):
            pass  # torch has no rule for the result's shape; the CPU's kernel below has
        return self._run_on_ones(func, name, args, kwargs, tensors)

    def _keep_parts(self, name: str, args: tuple[Any, ...], tensors: list[Tensor], output: Tensor) -> None:
        """Set the indices and values of a sparse ``output`` on it: those it was made of, or a sparse input's.

        ``name``: the op that returned it; ``args``, ``tensors``: the op's arguments, and the tensors among them. For
        ``clone`` the two are copied, by operators that are noted.
        """
        # The first op's arguments 3 and 4 are "indices" and "values".
        parts = args[3:5] if name == "_sparse_coo_tensor_with_dims_and_tensors" else getattr(tensors[0], _PARTS)
        if name == "clone":
            with self:
                parts = tuple(map(torch.clone, parts))
        setattr(output, _PARTS, parts)

    def _sparse_gradient(self, name: str, args: tuple[Any, ...]) -> Any:
        """Return the sparse gradient of an embedding's table (rows, width), with one row for each index that was looked up.

        torch makes it inside of one operator, where no mode sees its indices and values; here they are made by
        operators that are noted. ``name``: ``embedding_backward``, or ``_embedding_bag_backward`` for sums of rows;
        ``args``: that operator's, which begin with the gradient of its result (..., width) and the indices.
        """
        gradient, indices = args[:2]
        rows = args[_ROWS_ARGUMENT[name]]
        with self:  # torch leaves the mode while it handles an operator, and these are to be noted
            flat = torch.ops.aten.view.default(indices, [1, -1])
            width = gradient.shape[-1]
            if name == "embedding_backward":
                values = torch.ops.aten.view.default(gradient, [-1, width])
            else:  # of bags: the gradient of an index is that of its bag, whose number is in the argument offset2bag
                values = torch.ops.aten.index_select.default(gradient, 0, args[3])
        with self.fake:
            sparse = torch.sparse_coo_tensor(flat, values, (rows, width), check_invariants=False)
        setattr(sparse, _PARTS, (flat, values))
        return sparse

    def start(self) -> None:
        """Begin the step; a step that was begun before is dropped.

        Storages that exist now are numbered from 0 and count as made before the step. What was assumed so far, and
        whether the script compiles its model, is kept.
        """
        self.step = Recording(assumed=self.step.assumed, compiled=self.step.compiled)
        for notes in (self._last_place, self._waiting, self._filled_by, self._gradients, self.inputs):
            notes.clear()
        for number, (record, _) in enumerate(self._storages.values()):
            record.number = number
            record.made = -1  # before the step
            record.shadows.clear()  # they hold the storage's earlier number
            self.step.storages.append(record)
        self.recording = True

    def stop(self) -> None:
        """End the step; put its inputs, the model's parameters and buffers, and the gradients by name into :attr:`step`."""
        self.recording = False
        with _disable_current_modes():
            self._keep_inputs()
            for root in self.roots.values():
                self._keep_model_tensors(root)

    def _keep_inputs(self) -> None:
        """Put the inputs of the trained model into :attr:`step`: of the called module with most trained elements."""
        trained_elements = {
            key: sum(p.numel() for p in self.roots[key].parameters() if p.requires_grad) for key in self.inputs
        }
        if not trained_elements:  # no module was called with a tensor
            return
        model = max(trained_elements, key=trained_elements.__getitem__)
        passes = self.inputs[model]
        self.step.inputs = [shape for shape, _ in passes]
        self.step.tokens = any(is_whole for _, is_whole in passes)

    def _keep_model_tensors(self, root: nn.Module) -> None:
        """Put a module's parameters and gradients by name, and its buffers' storages, into :attr:`step`.

        Only tensors on the GPU count; a name that an earlier module has taken keeps that module's tensors.
        """
        for name, parameter in root.named_parameters():
            name = name.removeprefix("module.")  # what data parallelism wraps around the model
            value = _local_part(parameter)
            if self._lives(value):
                self.step.parameters.setdefault(name, self.shadow_of(value))
            gradient = self._gradients.get(id(parameter))
            if gradient is not None:
                self.step.gradients.setdefault(name, gradient)
        for buffer in root.buffers():
            value = _local_part(buffer)
            if self._lives(value):
                self.step.buffers.add(self._storage(value).number)

    def note_gradient(self, parameter: Tensor) -> None:
        """Note a parameter's gradient, if it has one on the GPU and a step is being recorded.

        torch calls this hook at the moment when the gradient is complete.
        """
        if not self.recording or parameter.grad is None:
            return
        gradient = _local_part(parameter.grad)
        if self._is_on_gpu(gradient):
            with _disable_current_modes():
                self._gradients[id(parameter)] = self.shadow_of(gradient)

    def _lives(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the GPU and the recorder has a record of its storage, which is not freed yet."""
        return self._is_on_gpu(tensor) and tensor.untyped_storage()._cdata in self._storages

    def shadow_of(self, tensor: Tensor) -> Shadow:
        """Return the shadow of a tensor: its storage's number, and a tensor on the meta device of the same layout and type.

        A sparse tensor has the shadow of its values. Call it outside the modes, which would note its operations.
        """
        tensor = getattr(tensor, _PARTS, (tensor,))[-1]
        return self._storage(tensor).shadow_of(tensor)

    def last_call_index(self, stream: int) -> int | None:
        """Return the index of a stream's last call, None before its first call."""
        return self._last_place.get(stream)

    def wait_for(self, stream: int, call_index: int | None) -> None:
        """Let the next call of a stream wait for an earlier call, given by its index; None: nothing to wait for."""
        if call_index is not None:
            self._waiting.setdefault(stream, set()).add(call_index)

    def note_host_wait(self) -> None:
        """Note that the host (the script's own thread) waits for all calls that it has issued."""
        if self.recording and self.step.calls:
            self.step.host_waits.append(len(self.step.calls) - 1)

    def note_resize(self, storage: Any, nbytes: int) -> None:
        """Note that a storage is about to be resized to ``nbytes``; a storage of that size already is left alone.

        FSDP frees and allocates memory in this way, under the same tensors. The old storage counts as freed, and a new
        one as made unless ``nbytes`` is 0.
        """
        key = storage._cdata
        entry = self._storages.get(key)
        if entry is None or entry[0].size_bytes == nbytes:
            return
        record, _ = entry
        record.freed = len(self.step.calls) - 1
        del self._storages[key]
        if nbytes:
            self._remember(storage, key, nbytes)

    def note_assumed_value(self) -> None:
        """Count a value that only a run knows as read, at the line of the script that reads it."""
        self.step.assumed[script_line()] += 1

    def _assumed_value(self, tensor: Tensor) -> Any:
        """Return the number that the script reads from a tensor of one element: its known value, or an assumed one.

        The assumed value is 1; a truth value is what the ops before it give for ones (:meth:`_truth_of`); and 0.0 is
        read by torch's gradient scaler, which looks for infinite gradients. A read of a GPU tensor is also noted as a
        wait of the host.
        """
        if self._is_on_gpu(tensor):
            self.note_host_wait()
        value = self._values.value_of(tensor)
        if value is not None:
            return value.item()
        self.note_assumed_value()
        if any("grad_scaler.py" in _file(frame) for frame in _frames(_CALLERS_SEARCHED)):
            return 0.0  # no gradient was infinite
        if tensor.dtype == torch.bool:
            return getattr(tensor, _TRUTH, True)
        return 1.0 if tensor.is_floating_point() else 1

    def _run_on_ones(self, func: Any, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        """Run an op on the CPU, with ones in the place of unknown values, and return fake tensors shaped like its result.

        They are on the device of the first of ``tensors``.
        """
        with _disable_current_modes():
            real_args, real_kwargs = tree_map_only(Tensor, self._value_or_ones, (args, kwargs))
            if name in _UNIQUE:  # ones would all be equal and give one row; instead all elements are taken to differ
                first = tensors[0]
                positions = torch.arange(first.numel()).reshape(first.shape).to(first.dtype)
                real_args = (positions, *real_args[1:])
            result = func(*real_args, **real_kwargs)
        with self.fake:
            return tree_map_only(
                Tensor, lambda value: torch.empty(value.shape, dtype=value.dtype, device=tensors[0].device), result
            )

    def _value_or_ones(self, tensor: Tensor) -> Tensor:
        """Return a real tensor of the CPU: the known values of a tensor, else ones of its shape."""
        value = self._values.value_of(tensor)
        return torch.ones(tensor.shape, dtype=tensor.dtype) if value is None else value

    def _truth_of(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return the truth value that is assumed of all elements of an op's boolean result.

        For an element-wise op it is the op's result if every unknown number is 1. It is False for zeros, and for ``any``, so
        that a loop that runs while something is found ends. For any other op, such as one that indexes or reshapes, it is
        the truth value assumed of its first boolean input, True without one.
        """

        def one_element(tensor: Tensor) -> Tensor:
            """Return a tensor of shape () for a whole tensor: its only known value, else its assumed truth value, or 1."""
            value = self._values.value_of(tensor)
            if value is not None and value.numel() == 1:
                return value.reshape(())
            return torch.full((), getattr(tensor, _TRUTH, True), dtype=tensor.dtype)

        if name == "any" or name.endswith(("zeros", "zeros_like")):  # the latter make tensors of False
            return False
        if torch.Tag.pointwise in func.tags:
            with _disable_current_modes():
                return bool(
                    func(*tree_map_only(Tensor, one_element, args), **tree_map_only(Tensor, one_element, dict(kwargs)))
                )
        # The other ops index or reshape, for example.
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return next((getattr(tensor, _TRUTH, True) for tensor in tensors if tensor.dtype == torch.bool), True)

    def _exchange(self, func: Any, name: str, args: tuple[Any, ...]) -> Any:
        """Record a collective of a process group; return what torch's operator returns.

        ``func`` is an operator of torch's namespace c10d, ``name`` its name (``allreduce_``), ``args`` its arguments:
        first the tensors that it writes to, and somewhere the group. It returns these tensors and a handle to wait for,
        or the handle alone, as its schema says. Nothing is exchanged, because all ranks are taken to be alike. Values
        that a reduction would change are forgotten. The call is not noted if none of its tensors is on the GPU.
        """
        from torch.distributed import ProcessGroup, get_process_group_ranks

        group = next((leaf for leaf in args if isinstance(leaf, torch.ScriptObject) and _is_group(leaf)), None)
        ranks = tuple(get_process_group_ranks(ProcessGroup.unbox(group))) if group is not None else ()
        # A collective's size is that of its larger side: the inputs of a reduce_scatter, the outputs of any other.
        outputs = args[0] if args else []
        larger_side = args[1] if "reduce_scatter" in name and len(args) > 1 else outputs
        moved = [leaf for leaf in tree_leaves(larger_side) if isinstance(leaf, Tensor)]
        if "broadcast" not in name:  # a reduction changes values, except zeros, which alike ranks reduce to zeros
            for tensor in moved:
                value = self._values.value_of(tensor)
                if value is not None and bool(value.any()):
                    self._values.forget(tensor)
        call_index = None
        if any(self._is_on_gpu(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)):
            size_bytes = sum(leaf.numel() * leaf.element_size() for leaf in moved)
            call_index = self._note_exchange(Collective(_plain_name(name), size_bytes, ranks), func, args, None)
        handle = _RecordedWork(self, call_index)
        self._handles.append(handle)
        boxed = handle.boxed()
        return (args[0], boxed) if len(func._schema.returns) == 2 else boxed

    def _note_exchange(self, exchange: Collective, func: Any, args: Any, output: Any) -> int | None:
        """Record a collective on its group's stream, where it waits for the current stream's last call.

        ``func``, ``args``, ``output``: torch's operator, its arguments, and its result (None where it writes to its
        arguments). Returns the collective's index among the calls, None if no step is being recorded.
        """
        if not self.recording:
            return None
        # Groups have the streams -1, -2, ..., which no stream of the script has.
        stream = -1 - self._group_numbers.setdefault(exchange.ranks, len(self._group_numbers))
        self.wait_for(stream, self._last_place.get(self.stream))
        return self._append(func, (args, {}, output), stream, exchange)

    def _storage(self, tensor: Tensor) -> RecordedStorage:
        """Return the record of a tensor's storage (for a sparse tensor: of its values), which is made at first sight."""
        storage = getattr(tensor, _PARTS, (tensor,))[-1].untyped_storage()
        entry = self._storages.get(storage._cdata)
        return entry[0] if entry is not None else self._remember(storage, storage._cdata, storage.nbytes())

    def _remember(self, storage: Any, key: int, nbytes: int) -> RecordedStorage:
        """Return a new record of a storage of ``nbytes``, which counts as made by the call that is noted next.

        ``key``: torch's identifier of the storage, which may be reused for another one once this one is freed. A weak
        reference notes when that happens.
        """
        record = RecordedStorage(len(self.step.storages), nbytes, len(self.step.calls))
        if self.recording:
            self.step.storages.append(record)

        def freed(_: Any) -> None:
            """Note that the storage is freed after the last call so far; Python calls this when the storage dies."""
            if self.recording:
                record.freed = len(self.step.calls) - 1
            known = self._storages.get(key)
            if known is not None and known[0] is record:  # else another storage has the identifier by now
                del self._storages[key]

        self._storages[key] = (record, weakref.ref(storage, freed))
        return record

    def _note(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Append an operation on GPU tensors to the step, and make records of new storages; outside a step only the latter.

        ``output``: its result. An operation whose results and arguments are all on the CPU is left out.
        """
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and self._is_on_gpu(leaf)]
        if not self.recording:
            for result in results:
                self._storage(result)  # makes the storage's record where there is none
            return
        on_gpu = results or [
            leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and self._is_on_gpu(leaf)
        ]
        if not on_gpu:
            return
        if func.namespace in ("_c10d_functional", "_c10d_functional_autograd"):
            self._note_functional(func, args, kwargs, output)
        else:
            self._append(func, (args, kwargs, output), self.stream)

    def _note_functional(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Note a functional collective, one that returns new tensors and takes its group by name.

        ``wait_tensor``, by which the current stream waits for such a tensor, is no call of its own: it only adds a wait.
        """
        from torch.distributed import get_process_group_ranks
        from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

        if func._schema.name.endswith("wait_tensor"):
            self.wait_for(self.stream, self._filled_by.get(self._storage(args[0]).number))
            return
        group_name = arguments_by_name(func, args, kwargs)["group_name"]
        name = _plain_name(func._schema.name.partition("::")[2])
        larger_side = output if name == "all_gather" else args[0]
        size_bytes = sum(t.numel() * t.element_size() for t in tree_leaves(larger_side) if isinstance(t, Tensor))
        ranks = tuple(get_process_group_ranks(_resolve_process_group(group_name)))
        call_index = self._note_exchange(Collective(name, size_bytes, ranks), func, args, output)
        for leaf in tree_leaves(output):
            if call_index is not None and isinstance(leaf, Tensor):
                self._filled_by[self._storage(leaf).number] = call_index

    def _append(self, func: Any, values: Any, stream: int, exchange: Collective | None = None) -> int:
        """Append a call to the step and return its index among the calls.

        ``values``: (arguments, keyword arguments, output); in the appended call their GPU tensors are replaced by
        shadows, and their CPU tensors by None. ``stream``: the number of the stream that runs the call. ``exchange``:
        what a collective moves between ranks, None for any other call. The calls for which :meth:`wait_for` made ``stream``
        wait become the call's ``waits``. Raises MemoryError beyond ``_MAX_CALLS`` calls.
        """
        call_index = len(self.step.calls)
        if call_index >= _MAX_CALLS:
            raise MemoryError(f"a step of more than {_MAX_CALLS:,} operations")
        with _disable_current_modes():
            shadowed = tree_map_only(Tensor, self._shadow_if_on_gpu, values)
        backward_pass = torch._C._current_graph_task_id()
        in_backward = backward_pass != -1  # -1: autograd runs none
        waits = tuple(sorted(self._waiting.pop(stream, ())))
        args, kwargs, output = shadowed
        # An optimizer may update in the backward pass, parameter by parameter; that counts as the update.
        phase: Phase = "backward" if in_backward and self.phase != "update" else self.phase
        module = self.modules[-1] if self.modules else ""
        # Checkpoints turn gradients on for what they compute again, in a backward pass that runs without them otherwise.
        if in_backward and not torch.is_grad_enabled():
            self._backwards_without_gradients.add(backward_pass)
        is_checkpointed = torch.is_grad_enabled() and backward_pass in self._backwards_without_gradients
        recomputed = phase == "backward" and (self.recomputing > 0 or is_checkpointed)
        self.step.calls.append(
            RecordedCall(func, args, kwargs, output, phase, module, stream, waits, exchange, recomputed)
        )
        self._last_place[stream] = call_index
        return call_index

    def _shadow_if_on_gpu(self, tensor: Tensor) -> Any:
        """Return the shadow of a GPU tensor, None for a tensor of the CPU, which takes no memory of the GPU."""
        return self.shadow_of(tensor) if self._is_on_gpu(tensor) else None

    def _is_on_gpu(self, tensor: Tensor) -> bool:
        """Return whether a tensor is one of the registered device."""
        return isinstance(tensor, FakeTensor) and tensor.fake_device.type == self.gpu.type


def _local_part(tensor: Any) -> Any:
    """Return this rank's part of a distributed tensor; return any other tensor itself."""
    return tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor


class _RecordedWork(Work):
    """The handle that a collective returns; waiting on it lets the current stream wait for the collective."""

    def __init__(self, recorder: Recorder, call_index: int | None) -> None:
        """Stand for the collective with this index among the calls; None: it was not recorded."""
        super().__init__()
        self._recorder, self._call_index = recorder, call_index

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream's next call wait for the collective, and return True; the host goes on, as with NCCL."""
        self._recorder.wait_for(self._recorder.stream, self._call_index)
        return True

    def is_completed(self) -> bool:
        """Return True: the exchange is done at once."""
        return True

    def get_future(self) -> Any:
        """Wait as :meth:`wait` does, and return a future that is done."""
        future: torch.futures.Future[None] = torch.futures.Future()
        self.wait()
        future.set_result(None)
        return future


def _is_group(script_object: Any) -> bool:
    """Return whether an argument of a collective is its process group."""
    return "ProcessGroup" in str(script_object._type())


def _plain_name(name: str) -> str:
    """Return torch.distributed's name for a collective's operator: ``all_gather`` for ``allgather_into_tensor_coalesced_``.

    An operator of another kind keeps its name, without underscores at its ends.
    """
    plain_names = {
        "allreduce": "all_reduce", "all_reduce": "all_reduce", "allgather": "all_gather", "all_gather": "all_gather",
        "reduce_scatter": "reduce_scatter", "alltoall": "all_to_all", "all_to_all": "all_to_all",
    }  # fmt: skip
    for part, plain_name in plain_names.items():
        if part in name:
            return plain_name
    return name.strip("_")


def _without_values(tensor: Tensor) -> Tensor:
    """Return a fake tensor of the same layout for a real, strided tensor of the CPU; return any other tensor itself.

    An op whose result is to be fake takes no real tensors. Call it under the fake mode.
    """
    if isinstance(tensor, FakeTensor) or tensor.layout != torch.strided:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")


def _as_cudnn_lays_out(name: str, args: tuple[Any, ...], output: Any) -> Any:
    """Return a convolution's results with channels last in memory if its image or its weight has them last, as cuDNN does.

    ``name``: ``convolution`` or ``convolution_backward``; ``output``: its results, which are returned unchanged
    otherwise. Call it under the fake mode, which does not know how a registered device lays out tensors.
    """
    first = _IMAGE_ARGUMENT[name]
    image, weight = args[first : first + 2]
    layout = LAYOUTS.get(image.dim())
    if layout is None:  # neither images nor volumes
        return output
    # A tensor of one channel or one pixel is contiguous in both layouts; it does not decide.
    has_channels_last = any(
        tensor.is_contiguous(memory_format=layout) and not tensor.is_contiguous() for tensor in (image, weight)
    )
    if not has_channels_last:
        return output

    def laid_out(tensor: Tensor) -> Tensor:
        """Return a tensor of the same shape with channels last; return one of other dimensions (a bias gradient) itself."""
        if tensor.dim() != image.dim():
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device, memory_format=layout)

    return tree_map_only(Tensor, laid_out, output)


def _is_large(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the tensor that an op makes takes ``_LARGE_BYTES`` or more.

    ``args``, ``kwargs``: of an op that fills a new tensor; the first list or tuple among ``args`` is its size.
    """
    size = next((value for value in args if isinstance(value, (list, tuple))), ())
    element_bytes = (kwargs.get("dtype") or torch.get_default_dtype()).itemsize
    return all(isinstance(number, int) for number in size) and prod(size) * element_bytes >= _LARGE_BYTES


def _frames(most: int) -> Iterator[Any]:
    """Yield the frames of this thread's callers, at most ``most``, the innermost first."""
    frame: Any = sys._getframe(1)
    for _ in range(most):
        if frame is None:
            return
        yield frame
        frame = frame.f_back


def _file(frame: Any) -> str:
    """Return the path of a frame's source file, "" for None."""
    return str(frame.f_code.co_filename) if frame is not None else ""


_NOT_THE_SCRIPTS = ("/torch/", "/ddltool/", "<frozen", "contextlib.py")
"""Parts of the paths of frames that stand between a script's line and the mode: torch, this package, Python's own."""


def script_line() -> str:
    """Return ``file:line`` of the innermost calling frame whose path has no part of ``_NOT_THE_SCRIPTS``, or "?"."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = _file(frame)
        if not any(part in path for part in _NOT_THE_SCRIPTS):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
