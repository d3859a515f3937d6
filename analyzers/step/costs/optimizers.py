"""The cost of an optimizer's update as torch.optim runs it on a GPU: its kernels, its states and its temporary tensors.

Most optimizers do the same to every number of every parameter. Muon and Adafactor do not: their products, states and
temporaries follow from each parameter's shape, and they update the parameters one by one. Start at :data:`OPTIMIZERS` and
:func:`update_of`. Sources: torch/optim/_muon.py and _adafactor.py (Muon has no ``foreach`` form, and it is not Adafactor's
default).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ddltool.analyzers.step.communication.fsdp import block_container, block_of
from ddltool.analyzers.step.costs.kernels import Kernels, kernels_of_rows
from ddltool.arrays import Ints
from ddltool.errors import InputError
from ddltool.graph import NO_GEMM, SEND, Gemm, Graph
from ddltool.precision import precision_of

Row = tuple[str, str, float, Gemm]
"""A kernel: (op type such as "mm", torch's name of the type that it works in, bytes that it reads and writes, shape of its
matrix product or ``NO_GEMM``)."""
VIEW_OP, WAIT = "view", "wait"
"""Op types of rows that are no kernel: a view, which takes time of the host, and a number that the host waits for."""
# Muon's Newton-Schulz iterations, and the bytes of an element of bfloat16, in which they compute.
_STEPS, _HALF = 5, 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A trained parameter as an optimizer sees it."""

    name: str
    size_bytes: float
    """Bytes of all its elements."""
    width: float
    """Bytes of an element."""
    dtype: str
    """torch's name of its type, such as ``float32``."""
    count: float
    rows: float
    columns: float
    """The parameter is ``count`` matrices (rows, columns); for a vector, count and rows are 0, and columns is its length."""
    hidden: bool
    """Whether it is a single matrix in one of the model's blocks (or in a model without blocks), which Muon updates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """The cost of an optimizer's update, as torch.optim runs it on a GPU."""

    states: int
    """How many states it keeps of each element."""
    kernels: tuple[int, ...]
    """For each of its kernels over all tensors, how often it reads or writes the parameters' bytes."""
    temporaries: int = 0
    """How many tensors of a gradient's size it makes while it updates."""
    counters: int = 0
    """Bytes per tensor of a step counter on the device, which a kernel of its own updates before the others; 0: it has none."""
    each: Callable[[Parameter], Iterator[Row]] | None = None
    """Returns the kernels for a parameter that is updated by itself; None: all kernels are over all tensors."""
    shares: Callable[[Parameter], tuple[float, ...]] | None = None
    """Returns the bytes of each state of such a parameter, as shares of the parameter's."""
    takes: Callable[[Parameter], bool] = lambda _: True
    """Returns whether a parameter is updated in this way; AdamW with ``fused=True`` updates the others."""
    state_width: float | None = None
    """Bytes of an element of a state; the last kernel then reads and writes the states in addition to what ``kernels`` says.
    None: states are as wide as the parameter, and ``kernels`` includes them."""

    def state_share(self, width: float) -> float:
        """Return the bytes of all states over those of the parameters, whose elements have ``width`` bytes."""
        return self.states * (1.0 if self.state_width is None else self.state_width / width)

    def kernels_at(self, width: float) -> tuple[float, ...]:
        """Return for each kernel how often it reads or writes the parameters' bytes, for elements of ``width`` bytes.

        The last kernel reads and writes each state of ``state_width`` once.
        """
        if self.state_width is None:
            return self.kernels
        return (*self.kernels[:-1], self.kernels[-1] + 2 * self.state_share(width))


def _muon(parameter: Parameter) -> Iterator[Row]:
    """Yield the kernels of Muon's update of one matrix: momentum, five Newton-Schulz iterations in bfloat16, the step.

    A matrix with more rows than columns is transposed first, so that its product with itself is as small as possible.
    """
    size = parameter.size_bytes
    kept = parameter.dtype
    half_type = "bfloat16"
    m, n = sorted((parameter.rows, parameter.columns))
    whole = _HALF * m * n  # bytes of the matrix (m, n) in bfloat16
    gram = _HALF * m * m  # bytes of its product with itself (m, m)
    transposed = [_view] if parameter.rows > parameter.columns else []
    yield "lerp_", kept, 3 * size, NO_GEMM
    yield "lerp", kept, 3 * size, NO_GEMM
    if kept != half_type:
        yield "_to_copy", half_type, size + whole, NO_GEMM
    yield from transposed
    yield "linalg_vector_norm", half_type, whole + _HALF, NO_GEMM
    yield "clamp", half_type, 2 * _HALF, NO_GEMM
    yield "div_", half_type, 2 * whole + _HALF, NO_GEMM
    for _ in range(_STEPS):
        yield _view
        yield "mm", half_type, 2 * whole + gram, (1.0, m, m, n)
        yield "addmm", half_type, 2 * gram, (1.0, m, m, m)
        yield "addmm", half_type, 2 * whole + gram, (1.0, m, n, m)
    yield from transposed
    yield "mul_", kept, 2 * size, NO_GEMM
    yield "add_", kept, 2 * size + whole, NO_GEMM


def _adafactor(parameter: Parameter) -> Iterator[Row]:
    """Yield the kernels of Adafactor's update of one parameter, and two waits of the host for a norm.

    Of a matrix the variance is estimated from the means of its rows and of its columns, whose outer product it is taken to be.
    """
    size, width = parameter.size_bytes, parameter.width
    one = width * max(parameter.count, 1.0)  # bytes of one number for each of its matrices

    def kernel(op_type: str, moved_bytes: float, gemm: Gemm = NO_GEMM) -> Row:
        """Return a kernel in the parameter's type."""
        return op_type, parameter.dtype, moved_bytes, gemm

    def norm() -> Iterator[Row]:
        """Yield the kernel of the norm of a tensor of the parameter's size, and the host's wait for it."""
        yield kernel("linalg_vector_norm", size + width)
        yield _wait

    yield from norm()
    if parameter.rows:
        row_share, column_share = _factored(parameter)
        row_means = size * row_share  # bytes of a number for each row
        column_means = size * column_share
        for means in (row_means, column_means):
            yield kernel("linalg_vector_norm", size + means)
            yield kernel("pow_", 2 * means)
            yield kernel("div_", 2 * means)
            yield kernel("lerp_", 3 * means)
        outer_product = (parameter.count, parameter.rows, parameter.columns, 1.0)
        yield kernel("mm" if parameter.count == 1 else "bmm", row_means + column_means + size, outer_product)
        yield kernel("mean", row_means + one)
        yield kernel("clamp_", 2 * one)
        yield kernel("div_", 2 * size + one)
    else:
        yield kernel("mul", 2 * size)
        yield kernel("lerp_", 3 * size)
        yield kernel("clone", 2 * size)
    yield kernel("clamp_", 2 * size)
    yield kernel("rsqrt_", 2 * size)
    yield kernel("mul_", 3 * size)
    yield from norm()
    yield kernel("add_", 3 * size)


_view: Row = (VIEW_OP, "", 0.0, NO_GEMM)
_wait: Row = (WAIT, "", 0.0, NO_GEMM)


def _factored(parameter: Parameter) -> tuple[float, ...]:
    """Return the bytes of each of Adafactor's states, as shares of the parameter's bytes.

    They are two for a matrix, a number for each row and a number for each column, and one for a vector, a copy of it.
    """
    return (1.0 / parameter.columns, 1.0 / parameter.rows) if parameter.rows else (1.0,)


# lerp_, mul_, addcmul_, sqrt, div_, add_ and addcdiv_ of lists of tensors.
_FOREACH_ADAM = (3, 2, 3, 2, 2, 2, 4)
OPTIMIZERS = {
    "none": Optimizer(states=0, kernels=()),
    "sgd": Optimizer(states=0, kernels=(3,)),
    "momentum": Optimizer(states=1, kernels=(5,)),
    "adam": Optimizer(states=2, kernels=(7,), counters=4),
    "adamw": Optimizer(states=2, kernels=(7,), counters=4),
    # A byte of each moment, and a float32 scale for each block of 256 of them (bitsandbytes 0.43 on).
    "adamw-8bit": Optimizer(states=2, kernels=(3,), state_width=1 + 4 / 256),
    # A sign and a momentum in one kernel, as bitsandbytes has it.
    "lion": Optimizer(states=1, kernels=(5,)),
    "muon": Optimizer(states=1, kernels=(), each=_muon, shares=lambda _: (1.0,), takes=lambda each: each.hidden),
    "adafactor": Optimizer(states=0, kernels=(), each=_adafactor, shares=_factored),
    "foreach-sgd": Optimizer(states=0, kernels=(3,)),
    "foreach-momentum": Optimizer(states=1, kernels=(2, 3, 3)),
    "foreach-adam": Optimizer(states=2, kernels=_FOREACH_ADAM, temporaries=1),
    "foreach-adamw": Optimizer(states=2, kernels=(2, *_FOREACH_ADAM), temporaries=1),
}
"""By the names of ``--optimizer``. Plain names are of ``fused=True``, one kernel over all tensors, as trainers run them;
``foreach-`` is torch's own default, one kernel for each step of the formula. ``muon`` updates the matrices in blocks, and AdamW
the rest."""


@dataclass(frozen=True, kw_only=True, eq=False)
class IssuedUpdate:
    """The kernels of an update, as the host issues them."""

    kernels: Kernels
    views: Ints
    """(k,) how many views the host makes before each kernel."""
    waits: tuple[int, ...]
    """Indices of kernels that the host issues only when the device has done all before."""


def parameters_of(graph: Graph) -> tuple[Parameter, ...]:
    """Return the trained parameters of a graph with their shapes, in the order of its sends, without empty ones.

    Raises InputError for a graph that lacks the shapes.
    """
    sends = [op for op in graph.of_kind(SEND).tolist() if graph.size_bytes[op] > 0]
    names = [graph.parameter[op] or "" for op in sends]
    container = block_container(names, graph.size_bytes[sends].tolist())
    found = []
    for op, name in zip(sends, names, strict=True):
        count, _, rows, columns = graph.gemm[op].tolist()  # a send has the shape of its parameter there
        if not columns:
            raise InputError("--optimizer", f"{graph.name} does not say the shapes of its parameters", "trace it again")
        is_hidden = count == 1 and (container is None or bool(block_of(name, container)))
        width = _WIDTHS.get(graph.dtype[op], 4.0)
        found.append(
            Parameter(
                name=name, size_bytes=float(graph.size_bytes[op]), width=width, dtype=graph.dtype[op],
                count=count, rows=rows, columns=columns, hidden=is_hidden,
            )
        )  # fmt: skip
    return tuple(found)


_WIDTHS = {"float64": 8.0, "bfloat16": 2.0, "float16": 2.0}


def update_of(graph: Graph, optimizer: str) -> IssuedUpdate:
    """Return the kernels of the update that follows a traced training step; none for inference or without trained parameters.

    ``graph``: the step's, without a recorded update. ``optimizer``: a name of ``OPTIMIZERS``. Raises InputError for an
    optimizer that goes by parameters' shapes (Muon, Adafactor) if the graph lacks them, or has no parameter that it would
    update.
    """
    update = OPTIMIZERS[optimizer]
    if graph.mode != "training" or not graph.trained_bytes:
        return _issued_update([])
    if update.each is not None:
        parameters = parameters_of(graph)
        if not any(map(update.takes, parameters)):
            raise InputError("--optimizer", f"{optimizer} finds no matrix in the blocks of {graph.name}", "give adamw")
        return _update_per_parameter(parameters, optimizer)
    width = precision_of(graph.meta.get("precision")).width
    return _issued_update(list(_kernels_over_all_tensors(update, width, graph.trained_bytes, len(graph.of_kind(SEND)))))


def _kernels_over_all_tensors(update: Optimizer, width: float, size_bytes: float, tensors: int) -> Iterator[Row]:
    """Yield the kernels of an update over all tensors at once, that of the step counters first if there are any.

    ``width``: bytes of an element of the parameters; ``size_bytes``: of all parameters together; ``tensors``: how many there
    are, each of which has a counter.
    """
    counter_bytes = float(update.counters * tensors)
    if counter_bytes:
        yield "pointwise", "float32", 2.0 * counter_bytes, NO_GEMM  # read and written
    for passes in update.kernels_at(width):
        yield "pointwise", "float32", passes * size_bytes + counter_bytes, NO_GEMM


@lru_cache(maxsize=32)
def _update_per_parameter(parameters: tuple[Parameter, ...], optimizer: str) -> IssuedUpdate:
    """Return the kernels of an optimizer that updates some parameters one by one, then of AdamW over all the others."""
    update = OPTIMIZERS[optimizer]
    assert update.each is not None
    rows = [row for parameter in parameters if update.takes(parameter) for row in update.each(parameter)]
    rest = [parameter for parameter in parameters if not update.takes(parameter)]
    if rest:
        size_bytes = sum(parameter.size_bytes for parameter in rest)
        # AdamW's states are as wide as the parameters, so that the width of one stands for all.
        rows += _kernels_over_all_tensors(OPTIMIZERS["adamw"], rest[0].width, size_bytes, len(rest))
    return _issued_update(rows)


def _issued_update(rows: list[Row]) -> IssuedUpdate:
    """Return an update as the host issues it; ``rows``: its kernels, views and waits in order.

    Views and waits belong to the kernel that comes after them.
    """
    kernels: list[Row] = []
    views: list[int] = []
    waits: list[int] = []
    views_since = 0  # the last kernel
    for row in rows:
        if row[0] == WAIT:
            waits.append(len(kernels))
        elif row[0] == VIEW_OP:
            views_since += 1
        else:
            kernels.append(row)
            views.append(views_since)
            views_since = 0
    return IssuedUpdate(kernels=kernels_of_rows(kernels), views=np.array(views, dtype=np.int64), waits=tuple(waits))


def state_shares(parameter: Parameter, optimizer: str) -> tuple[float, ...]:
    """Return the bytes of each state of a parameter over the parameter's, for an optimizer that goes by shapes.

    A parameter that the optimizer does not update by itself has AdamW's states: two copies, and a counter of steps.
    """
    update = OPTIMIZERS[optimizer]
    if update.shares is not None and update.takes(parameter):
        return update.shares(parameter)
    adamw = OPTIMIZERS["adamw"]
    copies = (1.0,) * adamw.states
    return (*copies, adamw.counters / parameter.size_bytes)


def state_share(graph: Graph, optimizer: str) -> float:
    """Return the bytes of all states of an optimizer over those of the trained parameters.

    Raises InputError for an optimizer that goes by shapes if the graph lacks them.
    """
    update = OPTIMIZERS[optimizer]
    if update.each is None:
        return update.state_share(precision_of(graph.meta.get("precision")).width)
    parameters = parameters_of(graph)
    held = sum(parameter.size_bytes * sum(state_shares(parameter, optimizer)) for parameter in parameters)
    return held / max(sum(parameter.size_bytes for parameter in parameters), 1.0)


def temporaries(parameters: tuple[Parameter, ...], optimizer: str) -> tuple[float, ...]:
    """Return the bytes of each temporary tensor at the moment when an optimizer that goes by shapes holds most; () for none.

    Muon holds a copy of the momentum, the matrix before and after an iteration, and two square matrices of its shorter side.
    Adafactor holds the estimate of the variance of a parameter, that of the parameter before, and for a vector its square.
    """
    update = OPTIMIZERS[optimizer]
    taken = [parameter for parameter in parameters if update.takes(parameter)]
    held_by_parameter: list[tuple[float, ...]] = []
    if optimizer == "muon":
        for parameter in taken:
            matrix_bytes = _HALF * parameter.rows * parameter.columns
            square_bytes = _HALF * min(parameter.rows, parameter.columns) ** 2
            held_by_parameter.append((parameter.size_bytes, matrix_bytes, matrix_bytes, square_bytes, square_bytes))
    else:
        estimate_before = (
            0.0  # torch's loop still holds the estimate of the parameter before when it makes the next one's
        )
        for parameter in taken:
            own = (parameter.size_bytes,) if parameter.rows else (parameter.size_bytes, parameter.size_bytes)
            held_by_parameter.append((estimate_before, *own))
            estimate_before = parameter.size_bytes
    return max(held_by_parameter, key=sum, default=())
