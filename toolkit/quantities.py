"""Types of the numbers and texts in records, each with its range, which is checked whenever a record is made.

The limits are beyond anything that is measured or planned, and small enough that products and sums of floats stay finite.
"""

from __future__ import annotations

import sys
from typing import Annotated

from pydantic import Field, Strict

LARGEST = 1e30
LONGEST_S = 1e12
"""Thirty thousand years."""
MOST = 2**53 - 1
"""The largest count: above it, floats (as tables have) skip whole numbers."""
MOST_DEVICES, MOST_PASSES = 10_000_000, 10_000

Finite = Annotated[float, Strict(), Field(ge=-sys.float_info.max, le=sys.float_info.max, allow_inf_nan=False)]
"""Any finite number: figures of other tools, which are only compared."""
Number = Annotated[float, Strict(), Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
NonNegative = Annotated[float, Strict(), Field(ge=0, le=LARGEST, allow_inf_nan=False)]
Positive = Annotated[float, Strict(), Field(ge=1 / LARGEST, le=LARGEST, allow_inf_nan=False)]
Share = Annotated[float, Strict(), Field(ge=0, le=1, allow_inf_nan=False)]
Seconds = Annotated[float, Strict(), Field(ge=0, le=LONGEST_S, allow_inf_nan=False)]
"""Seconds, possibly 0."""
StepTime = Annotated[float, Strict(), Field(ge=0, le=1e9, allow_inf_nan=False)]
"""Seconds of a training step or a part of it, at most thirty years."""
Duration = Annotated[float, Strict(), Field(ge=1 / LONGEST_S, le=LONGEST_S, allow_inf_nan=False)]
"""Seconds above 0."""
Change = Annotated[float, Strict(), Field(ge=-LONGEST_S, le=LONGEST_S, allow_inf_nan=False)]
"""Seconds from one moment to another; negative: to an earlier one."""
Rate = Annotated[float, Strict(), Field(ge=1 / LONGEST_S, le=1e18, allow_inf_nan=False)]
"""Anything per second, above 0."""
Price = Annotated[float, Strict(), Field(ge=0, le=1e9, allow_inf_nan=False)]
Whole = Annotated[int, Strict(), Field(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Strict(), Field(ge=0, le=MOST)]
AtLeastOne = Annotated[int, Strict(), Field(ge=1, le=MOST)]
Devices = Annotated[int, Strict(), Field(ge=0, le=MOST_DEVICES)]
Processes = Annotated[int, Strict(), Field(ge=1, le=MOST_DEVICES)]
Passes = Annotated[int, Strict(), Field(ge=0, le=MOST_PASSES)]
"""Forward and backward passes of a step, not counting its last one."""
Name = Annotated[str, Field(min_length=1, pattern=r"\S")]
"""A text with at least one character that is no white space."""
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
"""SHA-256, in hexadecimal digits."""
