"""Precisions of training: the type in which a step computes, and the type in which its parameters are kept.

``bf16`` and ``fp16`` are what trainers mean by them: autocast over float32 parameters; ``fp8`` is ``bf16`` with the products
of linear layers in float8. Start at :data:`PRECISIONS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ddltool.errors import InputError, did_you_mean

PrecisionName = Literal["fp32", "tf32", "bf16", "fp16", "bf16-pure", "fp16-pure", "fp8"]
NAMES: tuple[PrecisionName, ...] = get_args(PrecisionName)
# Other names that are accepted: autocast to float16 is what amp once meant.
ALIASES: dict[str, PrecisionName] = {"amp": "fp16"}


@dataclass(frozen=True, slots=True)
class Precision:
    """What a precision computes and keeps in; types are torch's names, and ``tf32``."""

    computes: str
    """Of matrix products: the rate of the device that counts."""
    keeps: str
    """Of parameters, gradients and optimizer states."""
    width: float
    """Bytes of one number that is kept."""
    linears: str = ""
    """Of the products of linear layers, where that is a narrower type than ``computes``."""

    @property
    def is_autocast(self) -> bool:
        """Whether parameters are kept in float32, and cast for the products of each forward pass."""
        return self.keeps == "float32" and self.computes in ("bfloat16", "float16")

    @property
    def words(self) -> str:
        """What the name stands for, in words; "" for plain float32."""
        if self.is_autocast:
            return f"autocast over float32 parameters{f', linear layers in {self.linears}' if self.linears else ''}"
        return f"everything in {self.keeps}" if self.keeps != "float32" else ""


PRECISIONS: dict[str, Precision] = {
    "fp32": Precision("float32", "float32", 4.0),
    "tf32": Precision("tf32", "float32", 4.0),
    "bf16": Precision("bfloat16", "float32", 4.0),
    "fp16": Precision("float16", "float32", 4.0),
    "bf16-pure": Precision("bfloat16", "bfloat16", 2.0),
    "fp16-pure": Precision("float16", "float16", 2.0),
    "fp8": Precision("bfloat16", "float32", 4.0, linears="float8"),
}


def precision_name(text: str, where: str = "--precision") -> PrecisionName:
    """Return the name of a precision, ``fp16`` for ``amp``. Raises InputError for a text that names none.

    >>> precision_name("amp"), precision_name("bf16-pure")
    ('fp16', 'bf16-pure')
    """
    named = ALIASES.get(text, text)
    for name in NAMES:
        if name == named:
            return name
    raise InputError(where, f"unknown precision {text!r}", did_you_mean(text, [*NAMES, *ALIASES]))


def precision_of(text: object) -> Precision:
    """Return the precision that a graph's ``meta`` names; float32 where it names none.

    >>> precision_of("amp").computes, precision_of(None).keeps
    ('float16', 'float32')
    """
    return PRECISIONS[precision_name(str(text or "fp32"))]
