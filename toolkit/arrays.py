"""Types of numpy arrays by what they hold."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Indices = NDArray[np.int32]
"""Half the size of ``Ints``; for the long columns of events."""
Places = NDArray[np.intp]
"""Indices into arrays, in numpy's own index type."""
Flags = NDArray[np.bool_]
