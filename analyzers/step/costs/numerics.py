"""Numerics in which a step takes less memory: what to try where nothing fits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddltool.device import Device
from ddltool.errors import InputError
from ddltool.precision import precision_of

# The rank of the adapters that are tried.
_RANK = 16
Change = Mapping[str, Any]
"""Fields of a job in place of its own: precision, optimizer, lora."""


def smaller_numerics(precision: str, optimizer: str, lora: int | None, devices: Sequence[Device]) -> list[Change]:
    """Return changes of a job's numerics that need less memory, in the order in which they are to be tried.

    An 8-bit optimizer; everything in the half type that all ``devices`` compute in, parameters included (bf16-pure or
    fp16-pure); both; LoRA adapters, which alone are then trained. ``lora``: the rank of adapters that the job has already,
    whose states are few, so that an 8-bit optimizer is not tried beside them; None: it has none.

    >>> from ddltool.shipped import devices
    >>> smaller_numerics("fp32", "adamw-8bit", None, [devices().device("V100")])
    [{'precision': 'fp16-pure'}, {'lora': 16}]
    """
    pure = "bf16-pure" if all("bfloat16" in device.peak_flops for device in devices) else "fp16-pure"
    eight_bit: Change = {"optimizer": "adamw-8bit"} if optimizer != "adamw-8bit" and lora is None else {}
    halved: Change = {"precision": pure} if precision_of(precision).width > 2 else {}
    both: Change = {**halved, **eight_bit} if halved and eight_bit else {}
    return [change for change in (eight_bit, halved, both, {"lora": _RANK} if lora is None else {}) if change]


def least_that_fit(changes: Sequence[Change], fits: Callable[[Change], bool]) -> list[str]:
    """Return the changes that let a step fit, as options; of several values at once only where none of them does alone.

    ``fits`` tries one; what it raises InputError for, such as adapters of a model that takes none, does not fit.
    """
    fitting: list[Change] = []
    for change in changes:
        if any(one.items() <= change.items() for one in fitting):  # a part of it is enough
            continue
        try:
            if fits(change):
                fitting.append(change)
        except InputError:
            continue
    return [" ".join(f"--{name} {value}" for name, value in change.items()) for change in fitting]
