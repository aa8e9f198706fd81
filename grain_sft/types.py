"""Names of array types that many files use."""

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Integers = npt.NDArray[np.integer]
Bools = npt.NDArray[np.bool_]
Array = npt.NDArray[Any]
