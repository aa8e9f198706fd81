"""Fixtures that several folders of tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

WriteTokens = Callable[..., Path]


@pytest.fixture
def write_tokens(tmp_path: Path) -> WriteTokens:
    """`write_tokens(name, tokens, dtype="uint32")`: a headerless file below `tmp_path`, its folders made as needed."""

    def write(name: str, tokens: npt.ArrayLike, dtype: npt.DTypeLike = "uint32") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        np.asarray(tokens).astype(dtype).tofile(path)
        return path

    return write
