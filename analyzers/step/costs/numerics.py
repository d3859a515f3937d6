"""Numerics in which a step takes less memory: what to try where nothing fits.

Numerics are a job's precision, its optimizer, and whether LoRA adapters are trained in place of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddltool.device import Device
from ddltool.errors import InputError
from ddltool.precision import precision_of

# The rank of the adapters that are tried.
_RANK = 16
Change = Mapping[str, Any]
"""Values for fields of a job in place of its own, by name: precision, optimizer, lora (the rank of adapters), load_in_4bit."""


def smaller_numerics(
    precision: str, optimizer: str, lora: int | None, devices: Sequence[Device], *, load_in_4bit: bool = False
) -> list[Change]:
    """Return changes of a job's numerics that need less memory, in the order in which they are to be tried.

    They are: an 8-bit optimizer; everything in the half type (16 bits) that all ``devices`` compute in, parameters included
    (bf16-pure or fp16-pure); both; LoRA adapters, which alone are then trained; and adapters of weights of 4 bits. A change
    that the job has already is left out.

    Args:
        precision: the job's, a name as in :class:`Numerics`.
        optimizer: the job's, a name of ``OPTIMIZERS``.
        lora: the rank of adapters that the job has already, whose states are few, so that an 8-bit optimizer is not tried
            beside them; None: it has none.
        devices: the device types that the job may run on.
        load_in_4bit: whether the frozen weights have 4 bits already.

    >>> from ddltool.shipped import devices
    >>> smaller_numerics("fp32", "adamw-8bit", None, [devices().device("V100")])
    [{'precision': 'fp16-pure'}, {'lora': 16}, {'lora': 16, 'load_in_4bit': True}]
    """
    pure = "bf16-pure" if all("bfloat16" in device.peak_flops for device in devices) else "fp16-pure"
    eight_bit: Change = {"optimizer": "adamw-8bit"}
    halved: Change = {"precision": pure}
    has_eight_bit = optimizer != "adamw-8bit" and lora is None
    has_halved = precision_of(precision).width > 2  # bytes of a parameter
    changes: list[Change] = []
    if has_eight_bit:
        changes.append(eight_bit)
    if has_halved:
        changes.append(halved)
    if has_halved and has_eight_bit:
        changes.append({**halved, **eight_bit})
    if lora is None:
        changes.append({"lora": _RANK})
    if not load_in_4bit:
        changes.append({"lora": lora or _RANK, "load_in_4bit": True})
    return changes


def least_that_fit(changes: Sequence[Change], fits: Callable[[Change], bool]) -> list[str]:
    """Return the changes that let a step fit, each as the text of its options, such as "--precision bf16-pure".

    A change of several values is returned only where none of its values is enough alone. ``changes``: those to try, those of
    one value first. ``fits``: tries one; a change for which it raises InputError, such as adapters of a model that takes none,
    does not fit.
    """
    fitting: list[Change] = []
    for change in changes:
        if any(smaller.items() <= change.items() for smaller in fitting):  # a part of it is enough
            continue
        try:
            if fits(change):
                fitting.append(change)
        except InputError:
            continue
    return [options_text(change) for change in fitting]


def options_text(change: Change) -> str:
    """Return the options that make a change, as on a command line.

    >>> options_text({"lora": 16, "load_in_4bit": True})
    '--lora 16 --load-in-4bit'
    """
    options = ((f"--{name.replace('_', '-')}", value) for name, value in change.items())
    return " ".join(option if value is True else f"{option} {value}" for option, value in options)
