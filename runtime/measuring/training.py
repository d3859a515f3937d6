"""Prepares a measured training step: the precision that it computes in, and the optimizer that updates parameters.

The names are those of :mod:`ddltool.precision` and of ``--optimizer``, so that the step that is measured is the one that
was predicted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ddltool.analyzers.step.communication.fsdp import block_container, block_of
from ddltool.errors import InputError
from ddltool.precision import PRECISIONS, precision_name

if TYPE_CHECKING:
    import torch
    from torch import nn

OPTIMIZERS = (
    *("none", "sgd", "momentum", "adam", "adamw", "muon", "adafactor"),
    *("foreach-sgd", "foreach-momentum", "foreach-adam", "foreach-adamw"),
)
_FIRST_SCALE = 128.0
"""AMP's first loss scale: torch's own, 65536, overflows, and then the updates that are to be timed are skipped."""
MEASURED = ("fp32", "tf32", "bf16", "fp16", "bf16-pure", "fp16-pure")
"""Precisions in which a step can be run here; float8 would need another library's kernels."""


def checked_precision(precision: str, device: str) -> str:
    """Return the standard name of a precision in which ``device`` ("cpu" or "cuda") can compute.

    Raises InputError for one that is unknown, a share such as "50%", or not measured on this device.
    """
    name = precision_name(precision, "precision") if not precision.endswith("%") else None
    if name is None:
        remedy = f"give --half-width {precision}, or a type such as bf16"
        raise InputError("precision", f"is {precision}, a share", remedy)
    if name not in MEASURED:
        raise InputError("precision", f"{name} is not measured here", f"give one of {', '.join(MEASURED)}")
    if name == "tf32" and device != "cuda":
        raise InputError("precision", "tf32 is a GPU's", "give fp32 or bf16, or --device cuda")
    return name


def prepared_module(
    module: nn.Module, inputs: Sequence[Any], precision: str, device: torch.device
) -> tuple[nn.Module, tuple[Any, ...], Callable[[], contextlib.AbstractContextManager[Any]]]:
    """Return (the module in training mode, its inputs, a function that makes the context manager of a forward pass).

    Module and floating-point inputs are moved to ``device`` in the type in which ``precision``, one of ``MEASURED``,
    keeps values. The context is autocast if the precision uses it, and otherwise does nothing. On CUDA, TF32 is switched
    on or off for the whole process.
    """
    import torch

    setting = PRECISIONS[precision]
    kept_dtype: torch.dtype = getattr(torch, setting.keeps)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    module = module.to(device, kept_dtype).train()

    def moved(value: Any) -> Any:
        """Return an input on the device, floating-point numbers in the kept type; one that is no tensor as it is."""
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device, kept_dtype if value.is_floating_point() else None)

    moved_inputs = tuple(map(moved, inputs))
    if not setting.is_autocast:
        return module, moved_inputs, contextlib.nullcontext
    computed_dtype: torch.dtype = getattr(torch, setting.computes)
    return module, moved_inputs, lambda: torch.autocast(device.type, computed_dtype)


def backward_and_update(
    module: nn.Module, optimizer: str, precision: str, device: torch.device
) -> tuple[Callable[[Any], None], Callable[[], None]]:
    """Return (a function that runs the backward pass of a loss, a function that updates the parameters and clears gradients).

    With fp16 the loss is scaled by AMP's GradScaler.

    Args:
        module: the module whose parameters are updated.
        optimizer: one of ``OPTIMIZERS``. A plain name means ``fused=True`` on a GPU and torch's own default on a CPU;
            with the prefix "foreach-", ``foreach=True``. "muon" updates the matrices of the module's blocks by Muon and
            all else by AdamW. "none": no updates.
        precision: one of ``MEASURED``.
        device: where the module is.
    """
    import torch

    scaler = torch.amp.GradScaler(device.type, init_scale=_FIRST_SCALE, enabled=precision == "fp16")
    built = _built_optimizers(module, optimizer, device)

    def backward(loss: Any) -> None:
        """Run the backward pass of a loss, scaled if the precision needs it."""
        scaler.scale(loss).backward()

    def update() -> None:
        """Update the parameters, and clear their gradients."""
        for optimizer_part in built:
            scaler.step(optimizer_part)
        if built:
            scaler.update()
        module.zero_grad()

    return backward, update


def _built_optimizers(module: nn.Module, optimizer: str, device: torch.device) -> list[torch.optim.Optimizer]:
    """Return the optimizers that together update all parameters of ``module``; empty for the name "none".

    ``optimizer``: one of ``OPTIMIZERS``, as :func:`backward_and_update` describes them. Only "muon" takes two: Muon for
    the matrices of the module's blocks, AdamW for all else. ``device``: where the module is.
    """
    import torch

    name = optimizer.removeprefix("foreach-")
    implementation: dict[str, Any] = {"fused": True} if device.type == "cuda" else {}
    if optimizer != name:
        implementation = {"foreach": True}
    parameters = list(module.parameters())
    if name == "none":
        return []
    if name in ("sgd", "momentum"):
        momentum = 0.9 if name == "momentum" else 0.0
        return [torch.optim.SGD(parameters, lr=1e-3, momentum=momentum, **implementation)]
    if name == "adafactor":
        return [torch.optim.Adafactor(parameters)]
    built: list[torch.optim.Optimizer] = []
    if name == "muon":
        matrices = _matrices_of_blocks(module)
        built = [torch.optim.Muon(matrices)] if matrices else []
        ids_of_matrices = set(map(id, matrices))
        parameters = [parameter for parameter in parameters if id(parameter) not in ids_of_matrices]
    if parameters:
        adam = torch.optim.Adam if name == "adam" else torch.optim.AdamW
        built.append(adam(parameters, lr=1e-4, **implementation))
    return built


def _matrices_of_blocks(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters for Muon: trained matrices in the module's list of blocks, or all if there is no such list."""
    named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    container = block_container(list(named), [float(parameter.nbytes) for parameter in named.values()])
    return [
        parameter
        for name, parameter in named.items()
        if parameter.dim() == 2 and (container is None or block_of(name, container))
    ]
