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
# Other accepted names: "amp" is what autocast to float16 was called first.
ALIASES: dict[str, PrecisionName] = {"amp": "fp16"}


@dataclass(frozen=True, slots=True)
class Precision:
    """The number types of a precision, by torch's names and ``tf32``."""

    computes: str
    """The type of matrix products, which picks the device's peak rate."""
    keeps: str
    """The type of parameters, gradients and optimizer states."""
    width: float
    """Bytes of one number of type ``keeps``."""
    linears: str = ""
    """The type of linear layers' products; "": ``computes``."""

    @property
    def is_autocast(self) -> bool:
        """Whether parameters are kept in float32 and cast to a 16-bit type in each forward pass."""
        return self.keeps == "float32" and self.computes in ("bfloat16", "float16")

    @property
    def torch_type(self) -> str:
        """torch's name of the type that it computes in: TF32 is a way to multiply float32, and no type."""
        return self.computes.replace("tf32", "float32")

    @property
    def words(self) -> str:
        """What the precision's name means, in words; "" if all is kept in float32 without autocast (fp32, tf32)."""
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
    """Return the precision that ``text`` names: itself, or ``fp16`` for its alias ``amp``.

    Raises InputError, named ``where``, for a text that is no precision.

    >>> precision_name("amp"), precision_name("bf16-pure")
    ('fp16', 'bf16-pure')
    """
    named = ALIASES.get(text, text)
    for name in NAMES:
        if name == named:
            return name
    raise InputError(where, f"unknown precision {text!r}", did_you_mean(text, [*NAMES, *ALIASES]))


def precision_of(text: object) -> Precision:
    """Return the precision named by a graph's ``meta["precision"]``, fp32 for None. Raises InputError for an unknown name.

    >>> precision_of("amp").computes, precision_of(None).keeps
    ('float16', 'float32')
    """
    return PRECISIONS[precision_name(str(text or "fp32"))]


def no_rate_words(types: str, precision: str) -> str:
    """Return the sentence on device ``types`` whose datasheets have no rate for what a precision computes in."""
    return f"{types}: no rate for {precision} in the datasheet; float32's is taken."
