"""Comparing batches and elements, for tests of everything that makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def assert_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Both have the same keys, and under each the same dtype, shape and values."""
    assert one.keys() == other.keys()
    for key, array in one.items():
        assert array.dtype == other[key].dtype and array.shape == other[key].shape, key
        np.testing.assert_array_equal(array, other[key], err_msg=key)
