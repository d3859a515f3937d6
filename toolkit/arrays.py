"""The arrays that figures are kept in, by what they hold."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Indices = NDArray[np.int32]
"""Half as large as ``Ints``, for columns of events."""
Places = NDArray[np.intp]
Flags = NDArray[np.bool_]
