"""The numbers and texts that records hold, each with its range: checked where a file is read and where a record is made.

The limits lie beyond all that is measured or planned, and so far within floats that products and sums of them stay finite.
"""

from __future__ import annotations

import sys
from typing import Annotated

from pydantic import Field, Strict

LARGEST = 1e30
LONGEST_S = 1e12
"""Thirty thousand years."""
MOST = 2**53 - 1
"""The next whole number is also the one that a float holds for the one after it, as tables of floats do."""
MOST_DEVICES, MOST_PASSES = 10_000_000, 10_000

Finite = Annotated[float, Strict(), Field(ge=-sys.float_info.max, le=sys.float_info.max, allow_inf_nan=False)]
"""Somebody else's figure, which is compared and no more."""
Number = Annotated[float, Strict(), Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
NonNegative = Annotated[float, Strict(), Field(ge=0, le=LARGEST, allow_inf_nan=False)]
Positive = Annotated[float, Strict(), Field(ge=1 / LARGEST, le=LARGEST, allow_inf_nan=False)]
Share = Annotated[float, Strict(), Field(ge=0, le=1, allow_inf_nan=False)]
Seconds = Annotated[float, Strict(), Field(ge=0, le=LONGEST_S, allow_inf_nan=False)]
"""A time that may be none at all."""
StepTime = Annotated[float, Strict(), Field(ge=0, le=1e9, allow_inf_nan=False)]
"""Seconds of a training step or a part of one; none takes thirty years."""
Duration = Annotated[float, Strict(), Field(ge=1 / LONGEST_S, le=LONGEST_S, allow_inf_nan=False)]
"""Seconds that something takes."""
Change = Annotated[float, Strict(), Field(ge=-LONGEST_S, le=LONGEST_S, allow_inf_nan=False)]
"""Seconds from one moment to another, earlier ones below 0."""
Rate = Annotated[float, Strict(), Field(ge=1 / LONGEST_S, le=1e18, allow_inf_nan=False)]
"""Of anything per second that does go on."""
Price = Annotated[float, Strict(), Field(ge=0, le=1e9, allow_inf_nan=False)]
Whole = Annotated[int, Strict(), Field(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, Strict(), Field(ge=0, le=MOST)]
AtLeastOne = Annotated[int, Strict(), Field(ge=1, le=MOST)]
Devices = Annotated[int, Strict(), Field(ge=0, le=MOST_DEVICES)]
Processes = Annotated[int, Strict(), Field(ge=1, le=MOST_DEVICES)]
Passes = Annotated[int, Strict(), Field(ge=0, le=MOST_PASSES)]
"""Forward and backward passes of a step before its last one."""
Name = Annotated[str, Field(min_length=1, pattern=r"\S")]
"""A text that is more than blanks."""
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
"""SHA-256, in hexadecimal digits."""
